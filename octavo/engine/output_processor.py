"""From what the engine produced to what a caller gets: text, stop strings, logprob tables, choices in one output.

Results gather in a RequestState until its caller takes them, so a slow caller costs no more memory than its own
output. Knows nothing of sockets and event loops.
"""

import itertools
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from octavo.engine.input_processor import EngineInputs
from octavo.errors import RequestError, RequestFailedError
from octavo.logging import init_logger, one_line
from octavo.tokenizers import IncrementalDetokenizer, StopMatcher, Tokenizer
from octavo.types import (
    CompletionOutput,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    Logprob,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
    RequestOutputKind,
    SampleLogprobs,
)

if TYPE_CHECKING:
    from octavo.metrics import EngineMetrics

__all__ = ["OutputProcessor", "ProcessedStep", "RequestState"]

logger = init_logger(__name__)


class _TextStream:
    """Token ids in; out comes the text that may be shown, up to the first stop string that is completed after
    ``min_tokens`` tokens."""

    __slots__ = ("_detokenizer", "_matcher", "_num_uncounted")

    def __init__(self, tokenizer: Tokenizer, matcher: StopMatcher | None, min_tokens: int) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._matcher = matcher
        self._num_uncounted = min_tokens

    def push(self, token_id: int) -> tuple[str, str | None]:
        """(new text, the stop string that ended it)."""
        return self._match(self._detokenizer.push(token_id))

    def finish(self) -> tuple[str, str | None]:
        """What was held back; a stop string can still be completed by it."""
        shown, stop = self._match(self._detokenizer.finish())
        return (shown, stop) if stop is not None or self._matcher is None else (shown + self._matcher.finish(), None)

    def _match(self, text: str) -> tuple[str, str | None]:
        if self._matcher is None:
            return text, None
        if self._num_uncounted > 0:
            self._num_uncounted -= 1
            return self._matcher.skip(text), None
        return self._matcher.push(text)


class _Choice:
    """One sequence of a request: what it has produced, and what of it the caller has not taken yet."""

    __slots__ = (
        "_decode_token",
        "_stream",
        "changed",
        "cumulative_logprob",
        "engine_request",
        "finish_reason",
        "logprobs",
        "metrics",
        "num_tokens",
        "state",
        "stop_reason",
        "text",
        "token_ids",
    )

    def __init__(
        self,
        state: "RequestState",
        engine_request: EngineCoreRequest,
        tokenizer: Tokenizer,
        matcher: StopMatcher | None,
    ) -> None:
        params = engine_request.sampling_params
        self.state = state
        self.engine_request = engine_request
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: SampleLogprobs | None = None if params.logprobs is None else []
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self.num_tokens = 0
        self.changed = False
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.metrics = RequestMetrics(arrival_time=engine_request.arrival_time)
        self._stream = _TextStream(tokenizer, matcher, params.min_tokens)
        self._decode_token = tokenizer.decode_token

    def add(self, output: EngineCoreOutput) -> None:
        """Takes in what a step produced; it may end with a stop string where the engine went on."""
        token_ids = output.new_token_ids
        # The token that made the engine stop is among the ids, but its text is not shown.
        silent = len(token_ids) - 1 if output.finish_reason == FinishReason.STOP else -1
        for position, token_id in enumerate(token_ids):
            self.token_ids.append(token_id)
            self.num_tokens += 1
            if self.logprobs is not None and output.new_logprobs is not None:
                self._add_logprobs(self.logprobs, output.new_logprobs[position])
            if position == silent:
                break
            text, stop = self._stream.push(token_id)
            self.text += text
            if stop is not None:
                self._end(FinishReason.STOP, stop)
                return
        if token_ids:
            self.changed = True
        if output.finish_reason is not None:
            self.end(output.finish_reason, output.stop_reason)

    def end(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends it, and lets out the text that was held back."""
        text, stop = self._stream.finish()
        self.text += text
        if stop is not None:
            self._end(FinishReason.STOP, stop)
        else:
            self._end(reason, stop_reason)

    def fail(self) -> None:
        """Ends it as it is: its text cannot be trusted to go on, not even to its end."""
        self._end(FinishReason.ERROR, None)

    def _end(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.changed = True
        self.state.num_unfinished -= 1

    def _add_logprobs(self, tables: SampleLogprobs, position: PositionLogprobs) -> None:
        decode = self._decode_token
        ranks = itertools.chain((position.sampled_rank,), itertools.count(1))
        # The sampled id may come again among the most likely ones: it keeps its first place.
        tables.append(
            {
                token_id: Logprob(logprob, rank, decode(token_id))
                for token_id, logprob, rank in zip(position.token_ids, position.logprobs, ranks, strict=False)
            }
        )
        assert self.cumulative_logprob is not None
        self.cumulative_logprob += position.logprobs[0]

    def take(self, delta: bool) -> CompletionOutput:
        """What the caller gets: everything, or what is new since the last call."""
        taken = CompletionOutput(
            self.engine_request.choice_index,
            self.text,
            self.token_ids,
            self.cumulative_logprob,
            self.logprobs,
            None if self.finish_reason is None else str(self.finish_reason),
            self.stop_reason,
        )
        self.changed = False
        if delta:
            self.text = ""
            self.token_ids = []
            self.logprobs = None if self.logprobs is None else []
        elif self.finish_reason is None:
            self.token_ids = list(self.token_ids)
            self.logprobs = None if self.logprobs is None else list(self.logprobs)
        return taken


class RequestState:
    """One request under way.

    Attributes:
        inputs: the request as it was checked.
        engine_requests: what the engine is to be given.
        wake: called when there is something to take.
        num_unfinished: choices that go on.
        final_only: there is nothing to take before the end.
        error: what to raise if the engine could not go on with it, or refused it.
    """

    def __init__(self, inputs: EngineInputs, wake: Callable[[], None] | None) -> None:
        self.inputs = inputs
        self.engine_requests: list[EngineCoreRequest] = []
        self.wake = wake
        self.num_unfinished = len(inputs.requests)
        self.num_cached_tokens = 0
        self.error: RequestFailedError | RequestError | None = None
        self.choices: list[_Choice] = []
        self.final_only = inputs.params.output_kind == RequestOutputKind.FINAL_ONLY
        self._delta = inputs.params.output_kind == RequestOutputKind.DELTA

    @property
    def finished(self) -> bool:
        return self.num_unfinished == 0

    def take(self) -> RequestOutput | None:
        """What has come since the last call, in the form that was asked for; None: nothing to give yet."""
        choices, delta = self.choices, self._delta
        if self.final_only and not self.finished:
            return None
        if not any(choice.changed for choice in choices):
            return None
        taken = [choice.take(delta) for choice in choices if choice.changed or not delta]
        return RequestOutput(
            request_id=self.inputs.request_id,
            prompt=self.inputs.prompt,
            prompt_token_ids=self.inputs.prompt_token_ids,
            outputs=taken,
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=_merged([choice.metrics for choice in choices]) if self.finished else None,
        )


class ProcessedStep(NamedTuple):
    """What a step changed.

    Attributes:
        changed: requests that have something new to take.
        abort_ids: ids that the engine is to abort, because they have ended here: with a stop string, or a failure.
        num_prompt_tokens: of the prompts whose computation it completed.
        num_generation_tokens: tokens that callers get.
    """

    changed: list[RequestState]
    abort_ids: list[str]
    num_prompt_tokens: int
    num_generation_tokens: int


class OutputProcessor:
    """Holds the state of every request under way.

    A request that ends here (a stop string, an abort) is still known to the engine for a while. Until the engine's
    own last word on it has come, its id is not used for another, so that no late token can land in the wrong request.
    """

    def __init__(self, tokenizer: Tokenizer, metrics: "EngineMetrics | None" = None) -> None:
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._requests: dict[str, RequestState] = {}
        self._choices: dict[str, _Choice] = {}  # by engine request id
        self._closing: dict[str, _Choice] = {}  # ended here, not yet in the engine
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
        matcher = StopMatcher(inputs.params.stop) if inputs.params.stop else None
        for request in inputs.requests:
            engine_id = request.request_id
            while engine_id in self._closing or engine_id in self._choices:
                engine_id = f"{request.request_id}#{next(self._reuses)}"
            if engine_id != request.request_id:
                request = msgspec.structs.replace(request, request_id=engine_id)
            choice = _Choice(state, request, self._tokenizer, None if matcher is None else matcher.fresh())
            state.engine_requests.append(request)
            state.choices.append(choice)
            self._choices[engine_id] = choice
        self._requests[inputs.request_id] = state
        if self._metrics is not None:
            assert inputs.params.max_tokens is not None
            self._metrics.on_request(inputs.params.n, inputs.params.max_tokens)
        return state

    def process(self, step: EngineCoreOutputs) -> ProcessedStep:
        """Takes in one step's outputs, and wakes the callers that it concerns."""
        changed: dict[RequestState, None] = {}
        abort_ids: list[str] = []
        now = step.timestamp or time.monotonic()
        num_prompt_tokens = num_generation_tokens = 0
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
                num_generation_tokens += new
                if before == 0 and choice.engine_request.choice_index == 0:
                    num_prompt_tokens += len(choice.engine_request.prompt_token_ids)
                self._time(choice, before == 0, new, now)
            if output.num_cached_tokens and choice.engine_request.choice_index == 0:
                state.num_cached_tokens = output.num_cached_tokens
            if choice.finish_reason is not None:
                self._end(choice, output, abort_ids)
            if choice.changed and (state.finished or not state.final_only):
                changed[state] = None
        if self._metrics is not None:
            if step.scheduler_stats is not None:
                self._metrics.on_step(step.scheduler_stats)
            if num_prompt_tokens or num_generation_tokens:
                self._metrics.on_outputs(num_prompt_tokens, num_generation_tokens)
        for state in changed:
            if state.wake is not None:
                state.wake()
        return ProcessedStep(list(changed), abort_ids, num_prompt_tokens, num_generation_tokens)

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

    def _end(self, choice: _Choice, output: EngineCoreOutput, abort_ids: list[str]) -> None:
        """``choice`` has ended with this output: in the engine too, or only here."""
        engine_id = choice.engine_request.request_id
        del self._choices[engine_id]
        state = choice.state
        if choice.finish_reason == FinishReason.ERROR:
            message = output.error or "the engine could not go on with the request"
            # All but the length has been checked before: only that it does not fit is left to refuse.
            state.error = RequestError(message, param="input_tokens") if output.refused else RequestFailedError(message)
        if output.finish_reason is None:
            self._closing[engine_id] = choice
            abort_ids.append(engine_id)
        else:
            self._account(choice, output)
        if state.finished:
            del self._requests[state.inputs.request_id]

    def _fail(self, failed: _Choice, output: EngineCoreOutput, error: Exception, abort_ids: list[str]) -> None:
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

    def _account(self, choice: _Choice, output: EngineCoreOutput) -> None:
        if output.metrics is not None:
            choice.metrics = output.metrics
        if self._metrics is None:
            return
        assert choice.finish_reason is not None
        num_prompt_tokens = len(choice.engine_request.prompt_token_ids)
        self._metrics.on_finished(
            choice.finish_reason, choice.metrics, num_prompt_tokens, choice.num_tokens, time.monotonic()
        )

    def _time(self, choice: _Choice, first: bool, num_tokens: int, now: float) -> None:
        times = choice.metrics
        if first:
            times.first_token_time = now
            if self._metrics is not None:
                self._metrics.on_first_token(now - times.arrival_time)
        elif self._metrics is not None:
            self._metrics.on_inter_token((now - times.last_token_time) / num_tokens, num_tokens)
        times.last_token_time = now


def _merged(times: list[RequestMetrics]) -> RequestMetrics:
    """The times of a request from those of its choices."""
    if len(times) == 1:
        return times[0]

    def earliest(name: str) -> float:
        return min((at for at in (getattr(entry, name) for entry in times) if at), default=0.0)

    return RequestMetrics(
        arrival_time=earliest("arrival_time"),
        queued_time=earliest("queued_time"),
        scheduled_time=earliest("scheduled_time"),
        first_token_time=earliest("first_token_time"),
        last_token_time=max(entry.last_token_time for entry in times),
        num_preemptions=sum(entry.num_preemptions for entry in times),
    )
