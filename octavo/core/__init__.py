"""Decisions: which requests run, what a step computes of each, and where their KV lives. Never sees a tensor."""

from octavo.core.kv_cache import make_kv_cache_config
from octavo.core.request import Request, RequestStatus
from octavo.core.request_queue import FCFSRequestQueue, PriorityRequestQueue, RequestQueue
from octavo.core.scheduler import Scheduler

__all__ = [
    "FCFSRequestQueue",
    "PriorityRequestQueue",
    "Request",
    "RequestQueue",
    "RequestStatus",
    "Scheduler",
    "make_kv_cache_config",
]
