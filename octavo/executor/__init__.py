"""How the engine reaches its workers. Importing this room does not import torch: workers are loaded by name."""

from octavo.executor.executor import EXECUTORS, WORKERS, Executor, WorkerLike, make_executor
from octavo.executor.pending import Done, Pending
from octavo.executor.round_trip import RoundTripExecutor
from octavo.executor.uniproc import UniProcExecutor

__all__ = [
    "EXECUTORS",
    "WORKERS",
    "Done",
    "Executor",
    "Pending",
    "RoundTripExecutor",
    "UniProcExecutor",
    "WorkerLike",
    "make_executor",
]
