"""``octavo run-batch``: files in OpenAI's batch format, answered without a server."""

from octavo.entrypoints.batch.runner import BatchOptions, run_batch

__all__ = ["BatchOptions", "run_batch"]
