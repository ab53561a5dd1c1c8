"""Splits a stream of generated text into reasoning and content. Any split of the stream gives the same result.

Whether the model begins inside its reasoning is decided from the rendered prompt's tail: some templates open the block
themselves, some write an empty one to switch thinking off, and a message that is gone on with may stop within it.
"""

from enum import Enum
from typing import NamedTuple

import msgspec

from octavo.registry import Registry

__all__ = ["REASONING_PARSERS", "ReasoningFormat", "ReasoningPieces", "ReasoningStream", "detect_reasoning_format"]

_THINK = "octavo.parsers.think:FORMAT"
# vLLM's names of parsers whose models write that form.
_ALIASES_OF_THINK = (
    *("deepseek_r1", "deepseek_v3", "glm45", "glm47", "holo2", "kimi_k2", "mimo", "minimax_m2", "nemotron_v3"),
    *("olmo3", "qwen3", "step3", "step3p5"),
)
REASONING_PARSERS = Registry("reasoning parser", {"think": _THINK, **dict.fromkeys(_ALIASES_OF_THINK, _THINK)})


class ReasoningFormat(msgspec.Struct, frozen=True):
    """The markers around the reasoning. White space next to a marker belongs to neither part."""

    start: str
    end: str


class ReasoningPieces(NamedTuple):
    """What a push added to each part."""

    reasoning: str
    content: str


class _State(Enum):
    BEFORE = 0  # nothing but white space and the beginning of the start marker so far
    REASONING = 1
    CONTENT = 2


def detect_reasoning_format(chat_template: str | None) -> ReasoningFormat | None:
    """The format whose markers the chat template names, or None."""
    if chat_template is not None:
        for name in REASONING_PARSERS:
            found: ReasoningFormat = REASONING_PARSERS.get(name)
            if found.start in chat_template or found.end in chat_template:
                return found
    return None


class ReasoningStream:
    """State of one choice.

    Args:
        reasoning_format: the markers.
        prompt: the rendered prompt; only its tail matters.
        continued: text of the message that the prompt ends with and the model goes on with; None: it begins a new one.
    """

    def __init__(self, reasoning_format: ReasoningFormat, prompt: str, continued: str | None = None) -> None:
        self._format = reasoning_format
        self._held = ""
        self._fresh = True  # nothing of the current part has been given out
        tail = prompt.rstrip()
        if tail.endswith(reasoning_format.start):
            self._state = _State.REASONING
        elif tail.endswith(reasoning_format.end):
            self._state = _State.CONTENT
        elif continued:
            # In the middle of one part or the other: its white space is the model's own.
            begun = continued.rfind(reasoning_format.start) > continued.rfind(reasoning_format.end)
            self._state = _State.REASONING if begun else _State.CONTENT
            self._fresh = False
        else:
            self._state = _State.BEFORE

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning."""
        return self._state is _State.REASONING

    @property
    def is_content(self) -> bool:
        """Whether all that comes is content."""
        return self._state is _State.CONTENT

    def push(self, text: str) -> ReasoningPieces:
        """Takes new text; gives out what is certain."""
        self._held += text
        if self._state is _State.BEFORE:
            self._decide(final=False)
        reasoning = self._take_reasoning(final=False) if self._state is _State.REASONING else ""
        content = self._take_content() if self._state is _State.CONTENT else ""
        return ReasoningPieces(reasoning, content)

    def finish(self) -> ReasoningPieces:
        """The text has ended: gives out what was held back."""
        if self._state is _State.BEFORE:
            self._decide(final=True)
        reasoning = self._take_reasoning(final=True) if self._state is _State.REASONING else ""
        content = self._take_content() if self._state is _State.CONTENT else ""
        return ReasoningPieces(reasoning, content)

    def _decide(self, final: bool) -> None:
        """BEFORE → REASONING at the start marker; → CONTENT once there can be none."""
        start = self._format.start
        seen = self._held.lstrip()
        if seen.startswith(start):
            self._state, self._held = _State.REASONING, seen[len(start) :]
        elif final or not start.startswith(seen):
            self._state = _State.CONTENT
            self._fresh = False  # plain content: its leading white space is the model's own

    def _take_reasoning(self, final: bool) -> str:
        before, marker, after = self._held.partition(self._format.end)
        if marker or final:
            self._held = after
            text = self._trimmed(before.rstrip())
            if marker:
                self._state, self._fresh = _State.CONTENT, True
            return text
        keep = _held_length(before, self._format.end)
        given, self._held = before[: len(before) - keep], before[len(before) - keep :]
        return self._trimmed(given)

    def _take_content(self) -> str:
        text, self._held = self._held, ""
        return self._trimmed(text)

    def _trimmed(self, text: str) -> str:
        """``text`` without the white space that precedes the part's first visible character."""
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        return text


def _held_length(text: str, marker: str) -> int:
    """Length of the longest tail of ``text`` that is white space and then a beginning of ``marker``."""
    for size in range(min(len(marker) - 1, len(text)), -1, -1):
        if marker.startswith(text[len(text) - size :]):
            visible = text[: len(text) - size]
            return size + len(visible) - len(visible.rstrip())
    return 0
