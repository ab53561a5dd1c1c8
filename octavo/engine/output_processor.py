"""From what the engine produced to what callers get: each step's outputs go to the choices that they belong to.

Results gather in a RequestState until its caller takes them, so a slow caller costs no more memory than its own
output. Knows nothing of sockets and event loops.
"""

import itertools
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from octavo.engine.input_processor import EngineInputs
from octavo.engine.logprob_tables import TokenTexts
from octavo.engine.request_state import Choice, RequestState
from octavo.errors import NoTokenLeftError, OverloadedError, RequestError, RequestFailedError
from octavo.logging import init_logger, one_line
from octavo.tokenizers import StopMatcher, Tokenizer
from octavo.types import (
    NO_TOKEN_LEFT,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishedSequence,
    FinishReason,
    RequestMetrics,
    StepCounts,
)

if TYPE_CHECKING:
    from octavo.metrics import EngineMetrics, RequestTracer

__all__ = ["OutputProcessor", "ProcessedStep", "RequestState"]

logger = init_logger(__name__)


class ProcessedStep(NamedTuple):
    """What a step changed.

    Attributes:
        changed: requests that have something new to take.
        abort_ids: ids that the engine is to abort, because they have ended here: with a stop string, or a failure.
        counts: what it gave to the callers, in sum.
    """

    changed: list[RequestState]
    abort_ids: list[str]
    counts: StepCounts


class OutputProcessor:
    """Holds the state of every request under way.

    A request that ends here (a stop string, an abort) is still known to the engine for a while. Until the engine's
    own last word on it has come, its id is not used for another, so that no late token can land in the wrong request.

    Args:
        client_index: of this front end.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        metrics: "EngineMetrics | None" = None,
        client_index: int = 0,
        tracer: "RequestTracer | None" = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._client_index = client_index
        self._texts = TokenTexts(tokenizer)
        self._metrics = metrics
        self._tracer = tracer
        self._requests: dict[str, RequestState] = {}
        self._choices: dict[str, Choice] = {}  # by engine request id
        self._closing: dict[str, Choice] = {}  # ended here, not yet in the engine
        self._reuses = itertools.count(1)

    @property
    def num_unfinished(self) -> int:
        """Requests under way."""
        return len(self._requests)

    def add_request(self, inputs: EngineInputs, wake: Callable[[], None] | None = None) -> RequestState:
        """Takes a request under its id.

        Raises:
            RequestError: the id belongs to a request that is under way.
        """
        taken = inputs.request_id in self._requests or any(r.request_id in self._choices for r in inputs.requests)
        if taken:
            message = f"request_id {inputs.request_id!r} belongs to a request that is still under way"
            raise RequestError(message, param="request_id")
        state = RequestState(inputs, wake)
        if self._tracer is not None:
            state.trace_parent = self._tracer.current_parent()
        matcher = StopMatcher(inputs.params.stop) if inputs.params.stop else None
        for request in inputs.requests:
            # Two front ends may have got the same id from their callers.
            name = engine_id = (
                f"{request.request_id}@{self._client_index}" if self._client_index else request.request_id
            )
            while engine_id in self._closing or engine_id in self._choices:
                engine_id = f"{name}#{next(self._reuses)}"
            if engine_id != request.request_id:
                request = msgspec.structs.replace(request, request_id=engine_id, client_index=self._client_index)
            fresh = None if matcher is None else matcher.fresh()
            choice = Choice(state, request, self._tokenizer, self._texts, fresh)
            state.engine_requests.append(request)
            state.choices.append(choice)
            self._choices[engine_id] = choice
        self._requests[inputs.request_id] = state
        return state

    def process(self, step: EngineCoreOutputs) -> ProcessedStep:
        """Takes in one step's outputs, and wakes the callers that it concerns."""
        changed: dict[RequestState, None] = {}
        abort_ids: list[str] = []
        now = step.timestamp or time.monotonic()
        counts = StepCounts()
        for output in step.outputs:
            choice = self._choices.get(output.request_id)
            if choice is None:
                if output.finish_reason is not None:
                    self._forget(output)
                continue
            state = choice.state
            before = choice.num_tokens
            try:
                choice.add(output)
            except Exception as error:  # nothing of the other requests' is touched by it
                self._fail(choice, output, error, abort_ids)
                changed[state] = None
                continue
            new = choice.num_tokens - before
            if new:
                if before == 0 and choice.engine_request.choice_index == 0:
                    counts.num_prompt_tokens += len(choice.engine_request.prompt_token_ids)
                    counts.num_cached_tokens += output.num_cached_tokens
                    state.num_cached_tokens = output.num_cached_tokens
                _count_tokens(choice.metrics, before == 0, new, now, counts)
            if choice.finish_reason is not None:
                self._end(choice, output, abort_ids)
            if choice.changed and (not state.final_only or state.finished):
                changed[state] = None
        if self._metrics is not None:
            if step.scheduler_stats is not None:
                self._metrics.on_step(step.scheduler_stats)
            if counts.num_generation_tokens:
                self._metrics.on_outputs(counts)
        for state in changed:
            if state.wake is not None:
                state.wake()
        return ProcessedStep(list(changed), abort_ids, counts)

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Ends requests with finish reason "abort"; ids that are not under way are ignored.

        Returns:
            the ids that the engine is to abort.
        """
        abort_ids = []
        for request_id in request_ids:
            state = self._requests.pop(request_id, None)
            if state is None:
                continue
            for choice in state.choices:
                if choice.finish_reason is None:
                    choice.end(FinishReason.ABORT)
                    engine_id = choice.engine_request.request_id
                    self._closing[engine_id] = self._choices.pop(engine_id)
                    abort_ids.append(engine_id)
            if state.wake is not None:
                state.wake()
        return abort_ids

    def discard(self, state: RequestState) -> None:
        """Forgets a request that the engine has refused to take: it will never say a last word on it."""
        del self._requests[state.inputs.request_id]
        for choice in state.choices:
            del self._choices[choice.engine_request.request_id]

    def wake_all(self) -> None:
        """Wakes every caller, for news that concerns them all."""
        for state in self._requests.values():
            if state.wake is not None:
                state.wake()

    def _end(self, choice: Choice, output: EngineCoreOutput, abort_ids: list[str]) -> None:
        """``choice`` has ended with this output: in the engine too, or only here."""
        engine_id = choice.engine_request.request_id
        del self._choices[engine_id]
        state = choice.state
        if choice.finish_reason == FinishReason.ERROR:
            state.error = _error_of(output)
        if output.finish_reason is None:
            self._closing[engine_id] = choice
            abort_ids.append(engine_id)
        else:
            self._account(choice, output)
        if state.finished:
            del self._requests[state.inputs.request_id]

    def _fail(self, failed: Choice, output: EngineCoreOutput, error: Exception, abort_ids: list[str]) -> None:
        """The output of ``failed`` cannot be processed: its request ends, here and in the engine."""
        state = failed.state
        request_id = state.inputs.request_id
        logger.error("the output of request %s could not be processed", request_id, exc_info=error)
        cause = one_line(f"{type(error).__name__}: {error}")
        state.error = RequestFailedError(f"the output could not be processed: {cause}")
        del self._requests[request_id]
        for choice in state.choices:
            if choice.finish_reason is not None:
                continue
            choice.fail()
            engine_id = choice.engine_request.request_id
            del self._choices[engine_id]
            if choice is failed and output.finish_reason is not None:
                self._account(choice, output)
            else:
                self._closing[engine_id] = choice
                abort_ids.append(engine_id)

    def _forget(self, output: EngineCoreOutput) -> None:
        """The engine's last word on a request that had ended here before."""
        choice = self._closing.pop(output.request_id, None)
        if choice is not None:
            self._account(choice, output)

    def _account(self, choice: Choice, output: EngineCoreOutput) -> None:
        """The engine's last word on ``choice``: now its times are known."""
        if output.metrics is not None:
            choice.metrics = output.metrics
        state, now = choice.state, time.monotonic()
        state.num_unaccounted -= 1
        if self._metrics is not None:
            _measure(self._metrics, choice, output, now)
        if self._tracer is not None and state.num_unaccounted == 0:
            self._tracer.on_request_finished(state.finished_request(now))


def _measure(metrics: "EngineMetrics", choice: Choice, output: EngineCoreOutput, now: float) -> None:
    """``choice`` has ended with this output. A request that was not let in is none that has ended."""
    is_over = choice.state.num_unaccounted == 0
    if output.refusal is not None:
        if is_over and output.refusal.limit is not None:
            metrics.on_rejected(output.refusal.limit)
        return
    request, reason = choice.engine_request, choice.finish_reason
    assert reason is not None
    assert request.sampling_params.max_tokens is not None
    finished = FinishedSequence(
        reason,
        choice.metrics,
        len(request.prompt_token_ids),
        output.num_cached_tokens,
        choice.num_tokens,
        request.sampling_params.max_tokens,
        now,
    )
    metrics.on_sequence_finished(finished)
    if is_over:
        metrics.on_request_finished(choice.state.finished_request(now))


def _count_tokens(times: RequestMetrics, first: bool, new: int, now: float, counts: StepCounts) -> None:
    """``new`` tokens of a choice have come, at once."""
    counts.num_generation_tokens += new
    if first:
        times.first_token_time = now
        counts.first_token_seconds.append(now - times.arrival_time)
    else:
        seconds = (now - times.last_token_time) / new
        counts.token_seconds[seconds] = counts.token_seconds.get(seconds, 0) + new
    times.last_token_time = now


def _error_of(output: EngineCoreOutput) -> RequestError | RequestFailedError:
    """What the caller gets for an output with an error."""
    message, refusal = output.error or "the engine could not go on with the request", output.refusal
    if refusal is None:
        return (NoTokenLeftError if message == NO_TOKEN_LEFT else RequestFailedError)(message)
    if refusal.retry_after:
        return OverloadedError(message, param=refusal.param, retry_after=refusal.retry_after)
    return RequestError(message, param=refusal.param)
