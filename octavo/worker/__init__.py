"""One device's worker: holds the model, the KV cache and the batch; computes steps and samples."""

from octavo.worker.worker import Worker

__all__ = ["Worker"]
