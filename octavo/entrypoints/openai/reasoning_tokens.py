"""How many of an answer's tokens are reasoning, however the answer comes: those between the markers, without them."""

from octavo.parsers import ReasoningFormat, ReasoningStream
from octavo.tokenizers import Tokenizer

__all__ = ["ReasoningTokens"]

# White space before the start marker, at most.
_MOST_BEFORE = 8


class _Choice:
    """``begin``: of the reasoning in ``token_ids``; None: not found so far. ``count``: final, once it has ended."""

    def __init__(self, begin: int | None) -> None:
        self.token_ids: list[int] = []
        self.begin = begin
        self.searched = 0  # the end marker begins nowhere before
        self.count: int | None = None


class ReasoningTokens:
    """Args:

    reasoning_format: the markers.
    tokenizer: of the model.
    stream: as it is before the answer.
    """

    def __init__(self, reasoning_format: ReasoningFormat, tokenizer: Tokenizer, stream: ReasoningStream) -> None:
        self._tokenizer = tokenizer
        self._start = tokenizer.encode(reasoning_format.start, add_special_tokens=False)
        self._end = tokenizer.encode(reasoning_format.end, add_special_tokens=False)
        self._begin = 0 if stream.is_reasoning else None
        self._is_over = stream.is_content
        self._choices: dict[tuple[str, int], _Choice] = {}

    def add(self, request_id: str, index: int, token_ids: list[int]) -> None:
        """New ones of a choice. They are looked at when somebody asks."""
        if self._is_over:
            return
        choice = self._choices.get((request_id, index))
        if choice is None:
            choice = self._choices[request_id, index] = _Choice(self._begin)
        if choice.count is None:
            choice.token_ids += token_ids

    def count(self) -> int:
        """Of all choices, so far."""
        return sum(map(self._count, self._choices.values()))

    def _count(self, choice: _Choice) -> int:
        if choice.count is not None:
            return choice.count
        token_ids = choice.token_ids
        if choice.begin is None:
            at = _find(token_ids[: _MOST_BEFORE + len(self._start)], self._start, 0)
            if at is not None and not "".join(map(self._tokenizer.decode_token, token_ids[:at])).strip():
                choice.begin = choice.searched = at + len(self._start)
            else:
                if len(token_ids) >= _MOST_BEFORE + len(self._start):
                    choice.count = 0
                return 0
        end = _find(token_ids, self._end, choice.searched)
        if end is None:
            choice.searched = max(choice.begin, len(token_ids) - len(self._end) + 1)
            return len(token_ids) - choice.begin
        choice.count = end - choice.begin
        choice.token_ids = []
        return choice.count


def _find(token_ids: list[int], wanted: list[int], begin: int) -> int | None:
    """Where ``wanted`` stands first, from ``begin`` on."""
    while True:
        try:
            begin = token_ids.index(wanted[0], begin)
        except ValueError:
            return None
        if token_ids[begin : begin + len(wanted)] == wanted:
            return begin
        begin += 1
