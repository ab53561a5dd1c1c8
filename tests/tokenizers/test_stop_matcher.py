"""Specification of StopMatcher: the split of the text does not matter; nothing is held back that cannot be a stop."""

import itertools
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.tokenizers import StopMatcher

# Few letters, so that stop strings overlap, contain each other and begin again inside themselves.
TEXTS = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def expected(text: str, stops: list[str], num_uncounted: int = 0) -> tuple[str, str | None]:
    """By trying each end: the first end counts, and the longest stop string that has it."""
    for end in range(num_uncounted + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


def shown(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    out = ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        out += text
        if stop is not None:
            return out, stop
    return out + matcher.finish(), None


def shown_by_piece(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    """The control: looks for stop strings in each piece by itself."""
    out = ""
    for piece in pieces:
        text, stop = expected(piece, stops)
        out += text
        if stop is not None:
            return out, stop
    return out, None


def cut(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


@settings(max_examples=500, deadline=None)
@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 100), max_size=8))
def test_any_split_gives_the_text_before_the_first_stop_string(text: str, stops: list[str], cuts: list[int]) -> None:
    wanted = expected(text, stops)
    assert shown([text], stops) == wanted
    assert shown(list(text), stops) == wanted
    assert shown(cut(text, cuts), stops) == wanted


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 100), max_size=8))
def test_only_what_may_begin_a_stop_string_is_held_back(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    seen = out = ""
    for piece in cut(text, cuts):
        new, stop = matcher.push(piece)
        seen, out = seen + piece, out + new
        if stop is not None:
            return
        beginnings = [length for s in stops for length in range(len(s)) if seen.endswith(s[:length])]
        assert out == seen[: len(seen) - max(beginnings, default=0)]
    assert out + matcher.finish() == text


@settings(max_examples=300, deadline=None)
@given(before=TEXTS, text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 100), max_size=8))
def test_a_stop_string_completed_in_skipped_text_does_not_count(
    before: str, text: str, stops: list[str], cuts: list[int]
) -> None:
    """But one that only begins there does."""
    wanted = expected(before + text, stops, len(before))
    matcher = StopMatcher(stops)
    out = "".join(matcher.skip(piece) for piece in cut(before, cuts))
    stop = None
    for piece in cut(text, cuts):
        new, stop = matcher.push(piece)
        out += new
        if stop is not None:
            break
    assert (out if stop is not None else out + matcher.finish(), stop) == wanted


@pytest.mark.parametrize(
    ("pieces", "stops", "wanted"),
    [
        (["one ", "two"], [], ("one two", None)),
        (["Hello\n", "\nUser", ":"], ["\n\nUser:"], ("Hello", "\n\nUser:")),
        (["aab"], ["ab", "aab"], ("", "aab")),  # both end here: the longer one
        (["abcd"], ["bcd", "c"], ("ab", "c")),  # the one that ends first
        (["aaab"], ["aab"], ("a", "aab")),  # begins again inside itself
        (["👩‍", "👧 x"], ["👩‍👧"], ("", "👩‍👧")),
        (["no en"], ["end"], ("no en", None)),  # held back, then let out
        (["x", "", "y"], ["xy"], ("", "xy")),
    ],
)
def test_examples(pieces: list[str], stops: list[str], wanted: tuple[str, str | None]) -> None:
    assert shown(pieces, stops) == wanted


def test_control_looking_at_each_piece_is_not_the_same() -> None:
    pieces = ["Hello\n", "\nUser", ":"]
    assert shown_by_piece(pieces, ["\n\nUser:"]) != shown(pieces, ["\n\nUser:"])


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


@pytest.mark.parametrize(
    "feed", [lambda matcher, text: matcher.push(text)[0], lambda matcher, text: matcher.skip(text)]
)
def test_cost_is_linear_in_the_text(feed: Callable[[StopMatcher, str], str]) -> None:
    """Text and stop string as bad as can be; trying each place would take 4·10^9 comparisons."""
    matcher = StopMatcher(["a" * 20_000 + "b"])
    start = time.perf_counter()
    out = "".join(feed(matcher, "a") for _ in range(200_000)) + matcher.finish()
    assert out == "a" * 200_000
    assert time.perf_counter() - start < 10


def test_a_fresh_matcher_shares_no_state_and_makes_no_table_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = StopMatcher(["aab", "b"])
    assert first.push("aa") == ("", None)

    def made_again(stop: str) -> list[int]:
        raise AssertionError(f"the table of {stop} is made again")

    monkeypatch.setattr("octavo.tokenizers.stop_matcher._failure_table", made_again)
    second = first.fresh()
    assert second.push("xa") == ("x", None)
    assert first.push("b") == ("", "aab")
    assert second.push("ab") == ("", "aab")
    with pytest.raises(AssertionError):
        StopMatcher(["c"])
