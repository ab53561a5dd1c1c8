"""The reasoning and the content of every choice of a chat, as its text comes."""

from octavo.entrypoints.openai.reasoning_tokens import ReasoningTokens
from octavo.parsers import ReasoningFormat, ReasoningStream
from octavo.tokenizers import Tokenizer
from octavo.types import CompletionOutput

__all__ = ["ReasoningSplit"]


class ReasoningSplit:
    """Call it with each part of each choice, in order.

    Args:
        reasoning_format: None: everything is content.
        prompt: the rendered prompt.
        continued: text of the message that the answer goes on with; None: it begins a new one.
    """

    def __init__(self, reasoning_format: ReasoningFormat | None, prompt: str, continued: str | None = None) -> None:
        self._format = reasoning_format
        self._prompt = prompt
        self._continued = continued
        self._streams: dict[int, ReasoningStream] = {}

    @property
    def active(self) -> bool:
        return self._format is not None

    def count_tokens(self, tokenizer: Tokenizer) -> ReasoningTokens | None:
        """What counts the tokens of the reasoning; None where there is no format."""
        if self._format is None:
            return None
        stream = ReasoningStream(self._format, self._prompt, self._continued)
        return ReasoningTokens(self._format, tokenizer, stream)

    def __call__(self, part: CompletionOutput) -> tuple[str, str]:
        """(reasoning, content) that ``part`` adds to its choice."""
        if self._format is None:
            return "", part.text
        stream = self._streams.get(part.index)
        if stream is None:
            stream = self._streams[part.index] = ReasoningStream(self._format, self._prompt, self._continued)
        reasoning, content = stream.push(part.text)
        if part.finished:
            last = stream.finish()
            reasoning, content = reasoning + last.reasoning, content + last.content
        return reasoning, content
