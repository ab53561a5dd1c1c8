"""Admission: how much may wait for its first turn; a request that would make it more is refused at once.

What waits has never been in the batch and has no place in the next step, for want of seats, of tokens in the step's
budget, or of KV blocks. Requests that were preempted have been let in before, and do not count.
"""

import math
import time
from collections.abc import Iterable, Sequence

from octavo.config import SchedulerConfig
from octavo.core.kv_cache import KVCacheManager
from octavo.core.request import Request, RequestStatus
from octavo.errors import OverloadedError

__all__ = ["Admission", "NextStep"]

_LONGEST_RETRY_SECONDS = 60


class NextStep:
    """Who would enter the batch if the next step were made up now. Nobody overtakes the first one that would not: under
    the priority policy that is an estimate, for whoever comes now may go first.

    Attributes:
        is_full: nobody else has a place.
        num_entering: of those that never were in the batch.
        num_entering_tokens: of their prompts.
    """

    def __init__(
        self, config: SchedulerConfig, manager: KVCacheManager, running: Sequence[Request], waiting: Iterable[Request]
    ) -> None:
        self._manager = manager
        self._most_per_request = config.long_prefill_token_threshold or config.max_num_batched_tokens
        self._seats = config.max_num_seqs - len(running)
        self._budget = config.max_num_batched_tokens
        self._free_blocks = manager.num_free_blocks
        self._is_alone = not running  # by itself every request fits
        self.is_full = self._seats <= 0
        self.num_entering = self.num_entering_tokens = 0
        if self.is_full:  # the rest takes a while to find out
            return
        for request in running:
            missing = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
            self._budget -= min(missing, self._most_per_request)
            self._free_blocks -= manager.num_blocks_to_come(request)
        self.add(waiting)

    def add(self, waiting: Iterable[Request]) -> None:
        """More that wait, behind the others."""
        for request in waiting:
            if self.is_full or not self._enters(request):
                self.is_full = True
                return
            if request.status is RequestStatus.WAITING:
                self.num_entering += 1
                self.num_entering_tokens += request.num_prompt_tokens

    def _enters(self, request: Request) -> bool:
        """Whether there is a place for one more, which it then has."""
        if self._seats <= 0 or self._budget <= 0:
            return False
        manager = self._manager
        hit = manager.no_hit if request.owes_prompt_logprobs else manager.get_computed_blocks(request)
        num_blocks = manager.max_blocks(request.num_tokens) - manager.max_blocks(hit.num_tokens)
        if num_blocks > self._free_blocks and not self._is_alone:
            return False
        self._is_alone = False
        self._seats -= 1
        self._budget -= min(request.num_tokens - hit.num_tokens, self._most_per_request)
        self._free_blocks -= num_blocks
        return True


class Admission:
    """Counts what has not had its first turn, and knows how much that may be.

    Attributes:
        is_limited: whether anything can be refused at all.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._most_requests = config.max_num_queued_reqs
        self._most_tokens = config.max_num_queued_tokens
        self.is_limited = self._most_requests is not None or self._most_tokens is not None
        self._num_requests = self._num_tokens = 0
        self._last_entry = self._last_wait = 0.0

    def on_added(self, request: Request) -> None:
        self._num_requests += 1
        self._num_tokens += request.num_prompt_tokens

    def on_entered(self, request: Request, now: float) -> None:
        """Its first turn has come."""
        self.on_left(request)
        self._last_entry, self._last_wait = now, now - request.metrics.queued_time

    def on_left(self, request: Request) -> None:
        """It has ended before its first turn."""
        self._num_requests -= 1
        self._num_tokens -= request.num_prompt_tokens

    def check(self, sequences: Sequence[Request], next_step: NextStep) -> None:
        """Raises OverloadedError if these, which are let in together or not at all, would make too much wait.

        Args:
            next_step: as it is with them.
        """
        num_requests = self._num_requests + len(sequences) - next_step.num_entering
        num_tokens = self._num_tokens + sum(request.num_prompt_tokens for request in sequences)
        num_tokens -= next_step.num_entering_tokens
        if self._most_requests is not None and num_requests > self._most_requests:
            what = f"{num_requests} requests would wait"
            limit, bound = "max_num_queued_reqs", f"{what}, and at most {self._most_requests}"
        elif self._most_tokens is not None and num_tokens > self._most_tokens:
            what = f"{num_tokens} prompt tokens would wait"
            limit, bound = "max_num_queued_tokens", f"{what}, and at most {self._most_tokens}"
        else:
            return
        seconds, flag = self._retry_seconds(), limit.replace("_", "-")
        message = f"the server is busy: {bound} may (--{flag}); try again in {seconds} s"
        raise OverloadedError(message, retry_after=seconds, limit=limit)

    def _retry_seconds(self) -> int:
        """About as long as the last one to enter has waited; longer, where nobody has entered for longer."""
        since_entry = time.monotonic() - self._last_entry if self._last_entry else 0.0
        return min(max(math.ceil(max(self._last_wait, since_entry)), 1), _LONGEST_RETRY_SECONDS)
