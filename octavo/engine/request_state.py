"""One request under way: what its choices have produced, and what of it the caller has not taken yet.

Knows nothing of the engine: it takes in outputs, and gives out RequestOutputs in the form that was asked for.
"""

from collections.abc import Callable
from typing import Any

from octavo.engine.input_processor import EngineInputs
from octavo.engine.logprob_tables import TokenTexts, logprob_table
from octavo.engine.text_stream import TextStream
from octavo.errors import RequestError, RequestFailedError
from octavo.logging import init_logger, one_line
from octavo.tokenizers import StopMatcher, Tokenizer
from octavo.types import (
    CompletionOutput,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishedRequest,
    FinishReason,
    PositionLogprobs,
    PromptLogprobTables,
    RequestMetrics,
    RequestOutput,
    RequestOutputKind,
    SampleLogprobs,
)

__all__ = ["Choice", "RequestState"]

logger = init_logger(__name__)

# Entries of logprob tables that are made at once, where others may be waiting.
_MOST_INLINE_ENTRIES = 2048


class Choice:
    """One sequence of a request: what it has produced, and what of it the caller has not taken yet.

    Args:
        texts: of the tokens, for logprob tables.
        matcher: of the stop strings; None: there are none.
    """

    __slots__ = (
        "_stream",
        "_text_at_end",
        "_texts",
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
        texts: TokenTexts,
        matcher: StopMatcher | None,
    ) -> None:
        params = engine_request.sampling_params
        wants_logprobs = params.logprobs is not None or params.logprob_token_ids is not None
        self.state = state
        self.engine_request = engine_request
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: SampleLogprobs | None = [] if wants_logprobs else None
        self.cumulative_logprob: float | None = 0.0 if wants_logprobs else None
        self.num_tokens = 0
        self.changed = False
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.metrics = RequestMetrics(arrival_time=engine_request.arrival_time)
        self._stream = TextStream(tokenizer, matcher, params) if params.detokenize else None
        self._texts = texts if params.detokenize else None
        # Nobody sees its text before the end, and nothing in the text can end it: it is made in one go.
        self._text_at_end = self._stream is not None and matcher is None and state.final_only

    def add(self, output: EngineCoreOutput) -> None:
        """Takes in what a step produced; it may end with a stop string where the engine went on."""
        if output.new_prompt_logprobs is not None and self.state.prompt_logprobs is not None:
            self.state.add_tables(self.state.prompt_logprobs, output.new_prompt_logprobs, self._texts)
        token_ids = output.new_token_ids
        if token_ids:
            stop = None
            if self._stream is not None and not self._text_at_end:
                text, count, stop = self._stream.push(token_ids, output.finish_reason is FinishReason.STOP)
                self.text += text
                token_ids = token_ids[:count]
            self.token_ids.extend(token_ids)
            self.num_tokens += len(token_ids)
            if self.logprobs is not None and output.new_logprobs is not None:
                self._extend_logprobs(output.new_logprobs[: len(token_ids)])
            self.changed = self.state.changed = True
            if stop is not None:
                self._end(FinishReason.STOP, stop)
                return
        if output.finish_reason is not None:
            self.end(output.finish_reason, output.stop_reason)

    def _extend_logprobs(self, positions: list[PositionLogprobs]) -> None:
        assert self.logprobs is not None
        self.state.add_tables(self.logprobs, positions, self._texts)
        for logprobs in positions:
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + logprobs.logprobs[0]

    def end(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends it, and lets out the text that was held back."""
        stop = None
        if self._stream is not None:
            if self._text_at_end:
                self.text, _, _ = self._stream.push(self.token_ids, reason is FinishReason.STOP)
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
        self.changed = self.state.changed = True
        self.state.num_unfinished -= 1

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
        changed: one of the choices is.
        num_unaccounted: choices that the engine has not said its last word on.
        trace_parent: what its span belongs to; see RequestTracer.
        final_only: there is nothing to take before the end.
        tables_to_make: there may be, see ``table_work``.
        error: what to raise if the engine could not go on with it, or refused it.
        prompt_logprobs: what has come of them; None: not asked for, or taken.
    """

    def __init__(self, inputs: EngineInputs, wake: Callable[[], None] | None) -> None:
        self.inputs = inputs
        self.engine_requests: list[EngineCoreRequest] = []
        self.wake = wake
        self.num_unfinished = self.num_unaccounted = len(inputs.requests)
        self.changed = False
        self.trace_parent: Any = None
        self.num_cached_tokens = 0
        self.error: RequestFailedError | RequestError | None = None
        self.choices: list[Choice] = []
        self.final_only = inputs.params.output_kind == RequestOutputKind.FINAL_ONLY
        # Nothing comes before the first token.
        self.prompt_logprobs: PromptLogprobTables | None = None if inputs.params.prompt_logprobs is None else [None]
        self._prompt_token_ids = inputs.prompt_token_ids
        self._delta = inputs.params.output_kind == RequestOutputKind.DELTA
        self.tables_to_make: list[tuple[list[Any], list[PositionLogprobs], TokenTexts | None]] = []

    @property
    def finished(self) -> bool:
        return self.num_unfinished == 0

    def finished_request(self, now: float) -> FinishedRequest:
        """What there is to say of it, when the engine has said its last word on every choice."""
        choices = self.choices
        return FinishedRequest(
            request_id=self.inputs.request_id,
            params=self.inputs.params,
            times=_merged([choice.metrics for choice in choices]),
            num_prompt_tokens=len(self.inputs.prompt_token_ids),
            num_generation_tokens=[choice.num_tokens for choice in choices],
            finish_reasons=[str(choice.finish_reason) for choice in choices],
            error=None if self.error is None else str(self.error),
            trace_parent=self.trace_parent,
            now=now,
        )

    def add_tables(self, tables: list[Any], positions: list[PositionLogprobs], texts: TokenTexts | None) -> None:
        """Puts the tables of ``positions`` at the end of ``tables``: many are made when something is taken."""
        num_entries = sum(len(position.token_ids) for position in positions)
        if self.tables_to_make or num_entries > _MOST_INLINE_ENTRIES:
            self.tables_to_make.append((tables, positions, texts))
        else:
            tables.extend(logprob_table(position, texts) for position in positions)

    def table_work(self) -> Callable[[], None] | None:
        """Makes the tables that are left to be made so far, in any thread, but before something is taken."""
        work, self.tables_to_make = self.tables_to_make, []

        def make() -> None:
            try:
                for tables, positions, texts in work:
                    tables.extend(logprob_table(position, texts) for position in positions)
            except Exception as error:
                logger.exception("the logprobs of request %s could not be processed", self.inputs.request_id)
                cause = one_line(f"{type(error).__name__}: {error}")
                self.error = RequestFailedError(f"the output could not be processed: {cause}")
                self.prompt_logprobs = None
                for choice in self.choices:
                    choice.logprobs = None
                    if choice.finish_reason is not None:  # the others will be aborted
                        choice.finish_reason = FinishReason.ERROR

        return make if work else None

    def take(self) -> RequestOutput | None:
        """What has come since the last call, in the form that was asked for; None: nothing to give yet."""
        choices, delta = self.choices, self._delta
        finished = self.num_unfinished == 0
        if not self.changed or (self.final_only and not finished):
            return None
        if self.prompt_logprobs is not None and self._prompt_logprobs_to_come():
            return None
        self.changed = False
        if self.tables_to_make and (work := self.table_work()):
            work()
        taken = []
        for choice in choices:  # no comprehension: it would be one more call a token
            if choice.changed or not delta:
                taken.append(choice.take(delta))
        output = RequestOutput(
            request_id=self.inputs.request_id,
            prompt=self.inputs.prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=taken,
            finished=finished,
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=self.prompt_logprobs,
            metrics=_merged([choice.metrics for choice in choices]) if finished else None,
            num_truncated_prompt_tokens=self.inputs.num_truncated_prompt_tokens,
        )
        if delta:
            self.prompt_logprobs = None
        return output

    def _prompt_logprobs_to_come(self) -> bool:
        """The first output has them all. They come with the first choice, and another one may be ahead of it."""
        first = self.choices[0]
        return first.num_tokens == 0 and first.finish_reason is None


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
