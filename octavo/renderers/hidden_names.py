"""Keeps the names of special tokens in messages text, while a template runs that writes special tokens of its own.

Each such name is one private-use character that no message holds, for as long as the template runs; afterwards the
names come back, and what the template itself wrote is known by its places.
"""

from typing import Any

from octavo.errors import RequestError
from octavo.renderers.bounds import MAX_CHARS
from octavo.renderers.messages import plain_messages, plain_settings
from octavo.tokenizers import Tokenizer

__all__ = ["HiddenNames", "SpecialNames"]

_PRIVATE_USE = range(0xF0000, 0xFFFFD)
# Looking at a string takes time however short it is: half a million strings of a character would take ten seconds.
_LEAST_CHARS = 32


class SpecialNames:
    """Finds what is, or could become, the name of a special token: whole names, and pieces of names at the ends of a
    string, which what is printed beside it could complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.whole = tokenizer.find_special
        self._beginnings = {name[:size] for name in tokenizer.special_tokens for size in range(1, len(name))}
        self._endings = {name[-size:] for name in tokenizer.special_tokens for size in range(1, len(name))}
        self._longest = max(map(len, self._beginnings), default=0)

    def spans(self, text: str) -> list[tuple[int, int]]:
        """In order, apart."""
        spans = self.whole(text)
        first = spans[0][0] if spans else len(text)
        last = spans[-1][1] if spans else 0
        head = next((n for n in range(min(self._longest, first), 0, -1) if text[:n] in self._endings), 0)
        last = max(last, head)
        tail = next((n for n in range(min(self._longest, len(text) - last), 0, -1) if text[-n:] in self._beginnings), 0)
        return [(0, head)] * bool(head) + spans + [(len(text) - tail, len(text))] * bool(tail)


class HiddenNames:
    """What in some messages is to stay text, and the characters that stand for it while the template runs.

    Args:
        special: of the tokenizer.
        messages: of the chat.
        settings: variables of the template that the caller chose.
        with_end_mark: one more character is needed.

    Attributes:
        names: character → name, or piece of a name.
        end_mark: a character that nothing else holds; "" if it is not needed.

    Raises:
        RequestError: messages or settings are malformed, or have more than MAX_CHARS characters together; the shortest
            text counts as some.
    """

    def __init__(
        self, special: SpecialNames, messages: Any, settings: dict[str, Any], with_end_mark: bool = False
    ) -> None:
        self._special = special
        found: set[str] = set()
        used: set[str] = set()
        num_chars = 0

        def count(text: str) -> None:
            nonlocal num_chars
            num_chars += max(len(text), _LEAST_CHARS)
            if num_chars > MAX_CHARS:
                least = f"each text counted as {_LEAST_CHARS} or more"
                message = f"the messages have more than {MAX_CHARS} characters ({least})"
                raise RequestError(message, param="messages")
            if not text.isascii():
                used.update(text)

        def look(text: str) -> str:
            count(text)
            found.update(text[start:stop] for start, stop in special.spans(text))
            return text

        for message in plain_messages(messages, look):
            count(message["role"])
        plain_settings(settings, look)
        num_needed = len(found) + with_end_mark
        free = [chr(code) for code in _PRIVATE_USE if chr(code) not in used] if num_needed else []
        if len(free) < num_needed:
            raise RequestError("the messages use up all private-use characters", param="messages")
        self.end_mark = free[-1] if with_end_mark else ""
        self.names = dict(zip(free, sorted(found), strict=False))
        self._characters = {name: character for character, name in self.names.items()}

    def hide(self, text: str) -> str:
        """``text`` with a character in place of each name and piece."""
        if not self.names:
            return text
        parts, end = [], 0
        for start, stop in self._special.spans(text):
            parts += [text[end:start], self._characters[text[start:stop]]]
            end = stop
        return "".join([*parts, text[end:]])

    def restore(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """The rendered text with the names back in their places, and the spans of the template's special tokens."""
        parts: list[str] = []
        written: list[tuple[int, int]] = []
        end = length = 0
        for start, stop in [*self._special.whole(text), (len(text), len(text))]:
            between = "".join(self.names.get(character, character) for character in text[end:start])
            parts += [between, text[start:stop]]
            length += len(between)
            if stop > start:
                written.append((length, length + stop - start))
            length += stop - start
            end = stop
        return "".join(parts), written
