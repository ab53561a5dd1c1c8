"""Finds stop strings in text that comes in pieces, and holds back only what may be the beginning of one.

The match is the one that ends first; of several that end at the same character, the one that starts first (the
longest). So any split of the text gives the same result. The cost is linear in the text, whatever the stop strings.
"""

__all__ = ["StopMatcher"]


class _Pattern:
    """One stop string, and how many of its characters the text ends with (Knuth, Morris, Pratt)."""

    __slots__ = ("failure", "matched", "stop")

    def __init__(self, stop: str, failure: list[int]) -> None:
        self.stop = stop
        self.failure = failure
        self.matched = 0

    def search(self, text: str, position: int, limit: int) -> int | None:
        """Reads ``text[position:limit]``, up to a completed stop string; returns the position after it, or None."""
        stop, failure, matched = self.stop, self.failure, self.matched
        while position < limit:
            if not matched:
                position = text.find(stop[0], position, limit)
                if position < 0:
                    break
            character = text[position]
            while matched and stop[matched] != character:
                matched = failure[matched - 1]
            if stop[matched] == character:
                matched += 1
            position += 1
            if matched == len(stop):
                self.matched = failure[-1]
                return position
        self.matched = matched
        return None

    def skip(self, text: str) -> None:
        """Reads ``text``; what it completes does not count."""
        position: int | None = 0
        while position is not None:
            position = self.search(text, position, len(text))


def _failure_table(stop: str) -> list[int]:
    """For each ``i``: the length of the longest proper prefix of ``stop[:i+1]`` that is also its suffix."""
    if not stop:
        raise ValueError("a stop string must not be empty")
    failure = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = failure[length - 1]
        if stop[index] == stop[length]:
            length += 1
        failure[index] = length
    return failure


class StopMatcher:
    """State of one text.

    Args:
        stops: the stop strings, none of them empty.
    """

    __slots__ = ("_held", "_patterns")

    def __init__(self, stops: list[str]) -> None:
        # The longest first: of two that end at the same character, the longer one starts first.
        self._patterns = [_Pattern(stop, _failure_table(stop)) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ("", 0)  # the text held back is so many first characters of this stop string

    def fresh(self) -> "StopMatcher":
        """A matcher of the same stop strings for another text; their tables are shared, not made again."""
        other = StopMatcher([])
        other._patterns = [_Pattern(pattern.stop, pattern.failure) for pattern in self._patterns]
        return other

    def push(self, text: str) -> tuple[str, str | None]:
        """Adds text.

        Returns:
            (text that may be shown now, the stop string that was completed). With a match, the text ends where the
            stop string begins, and the matcher has nothing more to say.
        """
        if not text:
            return "", None
        found: _Pattern | None = None
        end = len(text)
        for pattern in self._patterns:
            # A later pattern is only better if it ends before the best one so far.
            position = pattern.search(text, 0, end if found is None else end - 1)
            if position is not None:
                found, end = pattern, position
        if found is not None:
            return self._shown(text[:end], len(found.stop)), found.stop
        return self._hold(text), None

    def skip(self, text: str) -> str:
        """Adds text in which no stop string counts that it completes; one may begin in it and be completed later.

        Returns:
            text that may be shown now.
        """
        for pattern in self._patterns:
            pattern.skip(text)
        return self._hold(text)

    def finish(self) -> str:
        """No more text comes: returns what was held back."""
        stop, count = self._held
        self._held = ("", 0)
        return stop[:count]

    def _hold(self, text: str) -> str:
        """``text`` has been read: returns what may be shown, and holds back the rest."""
        longest = max(self._patterns, key=lambda pattern: pattern.matched, default=None)
        if longest is None:
            return text
        shown = self._shown(text, longest.matched)
        self._held = (longest.stop, longest.matched)
        return shown

    def _shown(self, text: str, num_held: int) -> str:
        """What was held back plus ``text``, without its last ``num_held`` characters."""
        stop, count = self._held
        num_shown = count + len(text) - num_held
        if num_shown <= count:
            return stop[:num_shown]
        return stop[:count] + text[: num_shown - count]
