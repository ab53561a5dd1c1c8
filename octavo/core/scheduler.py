"""Scheduler: decides what each step computes, and takes in what it produced.

There is no prefill and no decode: a step brings ``num_computed_tokens`` of each request nearer to its number of
tokens, under one token budget. Several steps may be in flight: tokens that are not known yet count as placeholders,
and results of a step that began before a request (last) entered the batch are not that request's own.
"""

import time
from collections.abc import Iterable
from typing import Any

from octavo.config import OctavoConfig
from octavo.core.admission import Admission, NextStep
from octavo.core.kv_cache import KVCacheManager, hash_root_key
from octavo.core.request import Request, RequestStatus
from octavo.core.request_queue import make_request_queue
from octavo.core.step_plan import StepPlan
from octavo.errors import RequestError
from octavo.types import (
    NO_TOKEN_LEFT,
    BlockIds,
    CachedRequestData,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    KVCacheConfig,
    ModelRunnerOutput,
    PositionLogprobs,
    SchedulerOutput,
    SchedulerStats,
)

__all__ = ["Scheduler"]

# Outputs of a step, by client index.
_Outputs = dict[int, list[EngineCoreOutput]]


class Scheduler:
    """Args:

    config: resolved, with the final ``max_model_len``.
    kv_cache_config: the blocks there are.
    kernel_set: name of the kernels that compute the KV; part of the prefix cache's keys.
    """

    def __init__(self, config: OctavoConfig, kv_cache_config: KVCacheConfig, kernel_set: str) -> None:
        self._config = config.scheduler
        self._max_model_len = config.model.max_model_len
        self._max_num_seqs = config.scheduler.max_num_seqs
        self._max_num_batched_tokens = config.scheduler.max_num_batched_tokens
        self._most_per_request = config.scheduler.long_prefill_token_threshold or self._max_num_batched_tokens
        self._by_priority = config.scheduler.policy == "priority"
        self._hash_key = hash_root_key(config.model.fingerprint, kernel_set, config.cache.kv_cache_dtype)
        self.kv_cache_manager = KVCacheManager(
            kv_cache_config, self._max_num_batched_tokens, config.cache.enable_prefix_caching
        )
        self.requests: dict[str, Request] = {}
        self.waiting = make_request_queue(config.scheduler.policy)
        self.running: list[Request] = []
        self._admission = Admission(config.scheduler)
        self._next_step: NextStep | None = None  # None: not known since things have changed
        # What the worker has not been told yet; it goes with the next step that has something to compute.
        self._finished_req_ids: list[str] = []
        self._preempted_req_ids: list[str] = []
        self._step = 0
        self._num_added = 0
        self._queries_total = self._hits_total = self._preemptions_total = 0
        self._prompt_total = self._generation_total = 0

    # ---- requests ---------------------------------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        return len(self.requests)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def add_request(self, *sequences: EngineCoreRequest) -> None:
        """Queues a request: all of its sequences, or none.

        Raises:
            RequestError: an id is in use, or one of them can never be served.
            OverloadedError: they would have to wait, and too much waits already. An idle engine takes any request.
        """
        added: dict[str, Request] = {}
        for sequence in sequences:
            request_id = sequence.request_id
            if request_id in self.requests or request_id in added:
                message = f"request_id {request_id!r} is in use by a request that is not finished; use another id"
                raise RequestError(message, param="request_id")
            order = self._num_added + len(added)
            block_size = self.kv_cache_manager.block_size
            request = Request(sequence, self._max_model_len, block_size, self._hash_key, order)
            self._check_fits(request)
            added[request_id] = request
        if self._admission.is_limited:
            self._check_admission(list(added.values()))
        self._num_added += len(added)
        now = time.monotonic()
        for request in added.values():
            request.metrics.queued_time = now
            self.waiting.add(request)
            self._admission.on_added(request)
        self.requests |= added

    def _check_admission(self, sequences: list[Request]) -> None:
        if not self.requests:
            return  # idle
        next_step, self._next_step = self._next_step, None
        if next_step is None:
            next_step = NextStep(self._config, self.kv_cache_manager, self.running, self.waiting)
        if next_step.is_full:
            self._next_step = next_step  # and stays as it is, whoever comes
        next_step.add(sequences)
        self._admission.check(sequences, next_step)
        self._next_step = next_step  # unless they were refused: some of them had a place in it

    def _check_fits(self, request: Request) -> None:
        prompt, total = request.num_prompt_tokens, request.max_total_tokens
        if not 0 < prompt < self._max_model_len:
            raise RequestError(
                f"the prompt has {prompt} tokens, but must have at least 1 and at most {self._max_model_len - 1} "
                f"(max_model_len is {self._max_model_len}, and one token must be left to generate)",
                param="input_tokens",
            )
        # The last token is never computed.
        needed, usable = self.kv_cache_manager.max_blocks(total - 1), self.kv_cache_manager.num_usable_blocks
        if needed > usable:
            raise RequestError(
                f"the request needs {needed} KV cache blocks for {prompt} tokens of prompt and max_tokens "
                f"{total - prompt}, but there are {usable}; shorten the prompt, lower max_tokens or give the KV cache "
                "more memory",
                param="input_tokens",
            )

    def abort_requests(self, request_ids: Iterable[str]) -> dict[int, EngineCoreOutputs]:
        """Ends requests wherever they are, also while results of theirs are in flight; unknown ids are ignored.

        Returns:
            Their last outputs, by client index; client 0 is always there, for the stats. Nothing if none has ended.
        """
        outputs: _Outputs = {0: []}
        self._next_step = None
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None:
                continue
            if request.status is RequestStatus.RUNNING:
                self.running.remove(request)
            else:
                self.waiting.remove(request)
                if request.status is RequestStatus.WAITING:
                    self._admission.on_left(request)
            self._finish(request, FinishReason.ABORT)
            outputs.setdefault(request.client_index, []).append(self._output(request))
        return self._with_stats(outputs, 0, time.monotonic()) if any(outputs.values()) else {}

    # ---- schedule ---------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Makes up the next step. One without tokens is not to be run: it tells the worker nothing and has no number
        of its own."""
        plan = StepPlan(step=self._step + 1, budget=self._max_num_batched_tokens)
        self._next_step = None
        self._schedule_running(plan)
        if not plan.preempted:
            self._schedule_waiting(plan)
        if not plan.num_scheduled:
            return plan.output([], [])
        self._step = plan.step
        finished, self._finished_req_ids = self._finished_req_ids, []
        preempted, self._preempted_req_ids = self._preempted_req_ids, []
        return plan.output(finished, preempted)

    def _schedule_running(self, plan: StepPlan) -> None:
        """Running requests first, in order: a prompt that is being computed cannot starve those that generate."""
        manager, index = self.kv_cache_manager, 0
        while index < len(self.running) and plan.budget > 0:
            request = self.running[index]
            index += 1
            num_tokens = len(request.token_ids) + request.num_output_placeholders
            if num_tokens >= request.max_total_tokens:
                continue  # its last tokens are on their way
            missing = num_tokens - request.num_computed_tokens
            num_new_tokens = min(missing, plan.budget, self._most_per_request)
            new_block_ids = manager.allocate_slots(request, num_new_tokens)
            if new_block_ids is None:
                new_block_ids = self._allocate_by_force(request, num_new_tokens, plan)
                if new_block_ids is None:
                    return
                index = self.running.index(request) + 1
            plan.add_running(request, num_new_tokens, new_block_ids)
            if num_new_tokens < missing:
                plan.blocks_to_come += manager.num_blocks_to_come(request)

    def _allocate_by_force(self, request: Request, num_new_tokens: int, plan: StepPlan) -> BlockIds | None:
        """Blocks for a running request, taken from others; None if it had to give up its own."""
        new_block_ids = None
        while new_block_ids is None:
            # Under fcfs the last one running is the latest to arrive.
            victim = max(self.running, key=lambda other: other.sort_key) if self._by_priority else self.running[-1]
            plan.take_back(victim)
            plan.preempted = True
            self.running.remove(victim)
            self._preempt(victim)
            if victim is request:
                return None
            new_block_ids = self.kv_cache_manager.allocate_slots(request, num_new_tokens)
        return new_block_ids

    def _preempt(self, request: Request) -> None:
        """A request that is no longer in ``running`` loses its blocks and waits for another turn."""
        self.kv_cache_manager.free(request)
        request.preempt()
        self.waiting.put_back(request)
        self._preempted_req_ids.append(request.request_id)
        self._preemptions_total += 1

    def _schedule_waiting(self, plan: StepPlan) -> None:
        """The next in the queue, while there is room; nobody overtakes the one that doesn't fit."""
        manager = self.kv_cache_manager
        while self.waiting and plan.budget > 0 and len(self.running) < self._max_num_seqs:
            request = self.waiting.peek()
            looks_up = manager.enable_caching and not request.owes_prompt_logprobs
            hit = manager.get_computed_blocks(request) if looks_up else manager.no_hit
            missing = request.num_tokens - hit.num_tokens
            num_new_tokens = min(missing, plan.budget, self._most_per_request)
            # All of its known tokens must fit beside those of the others, or they would take turns in throwing each
            # other out, half computed. By itself a request always fits: add_request saw to that.
            headroom = 0
            if self.running:
                later = manager.max_blocks(request.num_tokens) - manager.max_blocks(hit.num_tokens + num_new_tokens)
                headroom = plan.blocks_to_come + later
            if manager.allocate_slots(request, num_new_tokens, hit, headroom) is None:
                return
            self.waiting.pop()
            self.running.append(request)
            now = time.monotonic()
            if request.status is RequestStatus.WAITING:
                self._admission.on_entered(request, now)
            if looks_up and request.num_cached_tokens is None:
                self._queries_total += request.num_tokens
                self._hits_total += hit.num_tokens
            request.enter(plan.step, hit.num_tokens, now)
            plan.add_new(request, num_new_tokens, manager.block_ids(request.request_id))
            if num_new_tokens < missing:
                plan.blocks_to_come += manager.num_blocks_to_come(request)

    # ---- update -----------------------------------------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Takes in a step's results, in the order of the steps.

        Returns:
            What is new, by client index; client 0 is always there, for the stats.
        """
        step, num_scheduled = scheduler_output.step, scheduler_output.num_scheduled_tokens
        now = time.monotonic()
        outputs: _Outputs = {0: []}
        self._next_step = None
        num_unfinished = len(self.requests)
        for request_id, token_ids, logprobs in zip(
            model_output.req_ids, model_output.sampled_token_ids, model_output.logprobs, strict=True
        ):
            request = self.requests.get(request_id)
            if request is None or step < request.entry_step:
                continue  # finished or preempted since, or another request of the same id
            error = model_output.errors.get(request_id) if model_output.errors else None
            if error is not None:
                if error != NO_TOKEN_LEFT:  # that one is the client's doing
                    self.kv_cache_manager.forget(request)
                self._finish(request, FinishReason.ERROR)
                output: EngineCoreOutput | None = self._output(request, error=error)
            else:
                part = model_output.prompt_logprobs.get(request_id) if model_output.prompt_logprobs else None
                new_prompt_logprobs = None if part is None else request.take_prompt_logprobs(part)
                output = self._settle(request, num_scheduled[request_id], token_ids, logprobs, now)
                if new_prompt_logprobs:
                    output = output or self._output(request)
                    output.new_prompt_logprobs = new_prompt_logprobs
            if output is not None:
                outputs.setdefault(request.client_index, []).append(output)
        if len(self.requests) < num_unfinished:
            self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]
        return self._with_stats(outputs, scheduler_output.total_num_scheduled_tokens, now)

    def _settle(
        self,
        request: Request,
        num_scheduled: int,
        token_ids: list[int],
        logprobs: list[PositionLogprobs] | None,
        now: float,
    ) -> EngineCoreOutput | None:
        """One request's share of a step: ``num_scheduled`` tokens are computed, ``token_ids`` sampled."""
        num_settled = request.num_settled_tokens = request.num_settled_tokens + num_scheduled
        self.kv_cache_manager.cache_blocks(request, num_settled)
        if num_settled < len(request.token_ids):
            return None  # not yet at its last known token, which is the one to sample from
        request.num_output_placeholders -= 1
        taken, reason = request.append_tokens(token_ids)
        if taken:
            metrics = request.metrics
            if not metrics.first_token_time:
                metrics.first_token_time = now
                self._prompt_total += request.num_prompt_tokens
            self._generation_total += taken
            metrics.last_token_time = now
        if taken < len(token_ids):
            token_ids = token_ids[:taken]
            logprobs = None if logprobs is None else logprobs[:taken]
        if reason is not None:
            self._finish(request, reason)
            return self._output(request, token_ids, logprobs)
        if taken != 1:
            self._roll_back(request)
        if not taken:
            return None
        return EngineCoreOutput(
            request.request_id, token_ids, logprobs, num_cached_tokens=request.num_cached_tokens or 0
        )

    def _roll_back(self, request: Request) -> None:
        """Not the one token came that was counted on. Steps in flight that built on it are void: the request begins
        again with what is known. Without such steps it goes on from its last known token."""
        if request.num_output_placeholders:
            self.running.remove(request)
            self._preempt(request)
        else:
            last = request.num_tokens - 1
            request.num_computed_tokens = min(request.num_computed_tokens, last)
            request.num_settled_tokens = min(request.num_settled_tokens, last)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """Forgets a request and frees what it holds; the caller takes it out of ``running`` or ``waiting``."""
        del self.requests[request.request_id]
        if request.status is RequestStatus.RUNNING:
            self.kv_cache_manager.free(request)
            self._finished_req_ids.append(request.request_id)
        request.finish(reason)

    def _output(
        self,
        request: Request,
        token_ids: list[int] | None = None,
        logprobs: list[PositionLogprobs] | None = None,
        error: str | None = None,
    ) -> EngineCoreOutput:
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[] if token_ids is None else token_ids,
            new_logprobs=logprobs,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            num_cached_tokens=request.num_cached_tokens or 0,
            error=error,
            metrics=request.metrics if request.finish_reason is not None else None,
        )

    def _with_stats(self, outputs: _Outputs, step_tokens: int, now: float) -> dict[int, EngineCoreOutputs]:
        """The totals are the engine's: only the first front end hears them, or each would count them."""
        results = {}
        for client, entries in outputs.items():
            results[client] = EngineCoreOutputs(entries, self.stats(step_tokens) if client == 0 else None, now)
        return results

    # ---- what can be seen -------------------------------------------------------------------------------------------

    def stats(self, step_tokens: int = 0) -> SchedulerStats:
        """The state as it is now."""
        return SchedulerStats(
            step=self._step,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_cache_usage=self.kv_cache_manager.usage,
            prefix_cache_queries_total=self._queries_total,
            prefix_cache_hits_total=self._hits_total,
            preemptions_total=self._preemptions_total,
            prompt_tokens_total=self._prompt_total,
            generation_tokens_total=self._generation_total,
            step_tokens=step_tokens,
        )

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False while requests hold blocks."""
        return self.kv_cache_manager.reset_prefix_cache()

    def step_trace(self, scheduler_output: SchedulerOutput) -> dict[str, Any]:
        """Facts about the step that was scheduled last, for the step trace."""
        entered = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        cached: CachedRequestData = scheduler_output.scheduled_cached_reqs
        before = entered | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        requests = []
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            in_flight = request.num_output_placeholders
            reached = before[request_id] + scheduled == request.num_tokens + in_flight - 1
            requests.append(
                {
                    "id": request_id,
                    "scheduled": scheduled,
                    "computed_before": before[request_id],
                    "cached": request.num_hit_tokens,
                    "resumed": request_id in entered and request.metrics.num_preemptions > 0,
                    "samples": in_flight > 0 and reached,
                }
            )
        return {
            "step": scheduler_output.step,
            "num_tokens": scheduler_output.total_num_scheduled_tokens,
            "requests": requests,
            "num_running": len(self.running),
            "num_waiting": len(self.waiting),
            "free_blocks": self.kv_cache_manager.num_free_blocks,
            "used_blocks": self.kv_cache_manager.num_usable_blocks - self.kv_cache_manager.num_free_blocks,
            "preempted": scheduler_output.preempted_req_ids,
            "finished": scheduler_output.finished_req_ids,
            "hits": sum(entered.values()),
        }
