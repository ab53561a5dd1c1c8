"""What became of one request: when its tokens came, what the server counted, or how it failed.

A request is completed when its stream came whole, up to ``data: [DONE]``, had tokens in it and said by its ``usage``
how many. Everything else is a failure of a kind that has a name.
"""

from array import array
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import msgspec

from octavo.bench.serve.event_reader import EventReader

__all__ = ["Failure", "Outcome", "StreamReader"]

_LONGEST_ERROR_BODY = 1 << 16
_LONGEST_MESSAGE = 300


@dataclass(frozen=True, slots=True)
class Failure:
    """``kind``: connect, cut, timeout, http_NNN, error_event, bad_answer, no_tokens or no_usage."""

    kind: str
    message: str


@dataclass(slots=True)
class Outcome:
    """Times are of ``time.perf_counter``.

    Attributes:
        start: when it was sent.
        queued: seconds that it had to wait for a free connection, beyond the time at which it was due.
        times: of each chunk that had tokens in it.
        end: of the last chunk of the choice.
        prompt_tokens, output_tokens: as the server counted them.
        texts: the pieces, where they are kept.
        failure: None: completed.
    """

    start: float = 0.0
    queued: float = 0.0
    times: "array[float]" = field(default_factory=lambda: array("d"))
    end: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    texts: list[str] = field(default_factory=list)
    failure: Failure | None = None

    @property
    def ttft(self) -> float:
        return self.times[0] - self.start

    @property
    def latency(self) -> float:
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None where there is but one."""
        return (self.end - self.times[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class _Delta(msgspec.Struct):
    role: Any = None
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class StreamReader:
    """Takes in the answer to one request and writes it down in an Outcome.

    Args:
        outcome: that of the request.
        keep_text: ``outcome.texts`` is wanted.
    """

    def __init__(self, outcome: Outcome, keep_text: bool = False) -> None:
        self._outcome = outcome
        self._keep_text = keep_text
        self._events = EventReader()
        self._status = 200
        self._error_body = b""
        self._done = False
        self._usage: _Usage | None = None

    def on_status(self, status: int) -> None:
        self._status = status

    def on_data(self, part: bytes) -> None:
        if self._status != 200:
            self._error_body = (self._error_body + part)[:_LONGEST_ERROR_BODY]
            return
        now = perf_counter()
        for data in self._events.feed(part):
            if data == b"[DONE]":
                self._done = True
            elif self._outcome.failure is None:
                self._on_chunk(data, now)

    def _on_chunk(self, data: bytes, now: float) -> None:
        outcome = self._outcome
        try:
            chunk = _decode(data)
        except msgspec.MsgspecError as error:
            outcome.failure = Failure("bad_answer", f"an event is no chunk of a completion ({error})")
            return
        if chunk.error is not None:
            outcome.failure = Failure("error_event", _message(chunk.error))
            return
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices:
            outcome.end = now
            text, has_tokens = _tokens_of(choice)
            if has_tokens:
                outcome.times.append(now)
            if self._keep_text and text:
                outcome.texts.append(text)

    def finish(self) -> None:
        """The answer has ended as HTTP wants it to."""
        outcome, usage = self._outcome, self._usage
        if self._status != 200:
            outcome.failure = Failure(f"http_{self._status}", _message(_read(self._error_body)))
        elif outcome.failure is not None:
            return
        elif not self._done:
            outcome.failure = Failure("cut", "the stream ended without data: [DONE]")
        elif not outcome.times:
            outcome.failure = Failure("no_tokens", "the stream had no tokens in it")
        elif usage is None or usage.completion_tokens < 1:
            outcome.failure = Failure("no_usage", "the stream did not say how many tokens there are (usage)")
        else:
            outcome.prompt_tokens, outcome.output_tokens = usage.prompt_tokens, usage.completion_tokens

    def fail(self, kind: str, message: str) -> None:
        """The answer has not come to its end; what the server has said before that goes first."""
        if self._outcome.failure is None:
            self._outcome.failure = Failure(kind, message)


def _tokens_of(choice: _Choice) -> tuple[str, bool]:
    """(its text, whether a token came). A chunk without text is a token that has none, unless it is there to name the
    role or the reason for the end."""
    delta = choice.delta
    if delta is None:
        text = choice.text or ""
        return text, bool(text) or choice.finish_reason is None
    text = delta.content or delta.reasoning or delta.reasoning_content or ""
    if text or delta.tool_calls:
        return str(text), True
    return "", delta.role is None and choice.finish_reason is None


def _read(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return body.decode(errors="replace")


def _message(said: Any) -> str:
    """The text of an error body or event, in the forms that servers give it."""
    while isinstance(said, dict):
        said = next((said[name] for name in ("error", "message", "detail") if said.get(name)), "")
    return " ".join(str(said).split())[:_LONGEST_MESSAGE] or "without a message"
