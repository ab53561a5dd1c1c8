"""StepPlan: the step that is being made up, until it becomes a SchedulerOutput."""

from dataclasses import dataclass, field

import msgspec

from octavo.core.request import Request
from octavo.types import BlockIds, CachedRequestData, NewRequestData, SchedulerOutput

__all__ = ["StepPlan"]


@dataclass(slots=True)
class StepPlan:
    """Attributes:

    step: its number.
    budget: tokens that may still be added.
    num_scheduled: request id → tokens to compute.
    blocks_to_come: blocks that the requests in it, known tokens only, will need in later steps.
    preempted: whether a request lost its place for it.
    """

    step: int
    budget: int
    num_scheduled: dict[str, int] = field(default_factory=dict)
    new: list[NewRequestData] = field(default_factory=list)
    cached: CachedRequestData = field(default_factory=CachedRequestData.empty)
    blocks_to_come: int = 0
    preempted: bool = False

    def add_running(self, request: Request, num_new_tokens: int, new_block_ids: BlockIds) -> None:
        """A request that the worker holds; before ``advance``."""
        cached = self.cached
        cached.req_ids.append(request.request_id)
        cached.new_block_ids.append(new_block_ids or None)
        cached.num_computed_tokens.append(request.num_computed_tokens)
        num_tokens = len(request.token_ids) + request.num_output_placeholders
        cached.num_output_tokens.append(num_tokens - request.num_prompt_tokens)
        self._take(request, num_new_tokens)

    def add_new(self, request: Request, num_new_tokens: int, block_ids: BlockIds) -> None:
        """A request that the worker doesn't hold."""
        core = request.core_request
        params = core.sampling_params
        if params.prompt_logprobs is not None and not request.owes_prompt_logprobs:
            # Delivered before a preemption: the worker need not compute them again.
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        self.new.append(
            NewRequestData(
                req_id=request.request_id,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling_params=params,
                eos_token_ids=core.eos_token_ids,
                choice_index=core.choice_index,
                block_ids=block_ids,
                num_computed_tokens=request.num_computed_tokens,
            )
        )
        self._take(request, num_new_tokens)

    def take_back(self, request: Request) -> None:
        """Undoes ``add_running``, if the request is in the step; its tokens may be given to others."""
        num_new_tokens = self.num_scheduled.pop(request.request_id, None)
        if num_new_tokens is None:
            return
        self.budget += num_new_tokens
        index = self.cached.req_ids.index(request.request_id)
        for column in (
            self.cached.req_ids,
            self.cached.new_block_ids,
            self.cached.num_computed_tokens,
            self.cached.num_output_tokens,
        ):
            del column[index]

    def output(self, finished_req_ids: list[str], preempted_req_ids: list[str]) -> SchedulerOutput:
        """The finished plan."""
        return SchedulerOutput(
            step=self.step,
            scheduled_new_reqs=self.new,
            scheduled_cached_reqs=self.cached,
            num_scheduled_tokens=self.num_scheduled,
            total_num_scheduled_tokens=sum(self.num_scheduled.values()),
            finished_req_ids=finished_req_ids,
            preempted_req_ids=preempted_req_ids,
        )

    def _take(self, request: Request, num_new_tokens: int) -> None:
        self.num_scheduled[request.request_id] = num_new_tokens
        self.budget -= num_new_tokens
        request.num_computed_tokens += num_new_tokens
        if request.num_computed_tokens == len(request.token_ids) + request.num_output_placeholders:
            # Its last known token is computed: the step samples the next.
            request.num_output_placeholders += 1
