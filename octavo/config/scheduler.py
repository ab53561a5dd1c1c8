"""How steps are made up."""

from dataclasses import dataclass

from octavo.config.options import option

__all__ = ["SchedulerConfig"]


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    max_num_batched_tokens: int = option(
        "most tokens computed in one step, prompts and outputs together", least=1, most=2**24
    )
    max_num_seqs: int = option("most requests in one step", least=1, most=65536)
    policy: str = option(
        "which waiting request goes first", default="fcfs", flag="scheduling-policy", choices=("fcfs", "priority")
    )
    long_prefill_token_threshold: int = option(
        "most prompt tokens of one request in one step; 0: no limit but the step's", default=0, least=0, most=2**31 - 1
    )
    max_num_queued_reqs: int | None = option(
        "most requests that wait for their first step; more are refused with 503 (default: no limit)",
        least=1,
        most=2**31 - 1,
    )
    max_num_queued_tokens: int | None = option(
        "most prompt tokens of all waiting requests together; more are refused with 503 (default: no limit)",
        least=1,
        most=2**63 - 1,
    )
    async_scheduling: bool = option("schedule the next step while this one runs (default: on where it pays)")
