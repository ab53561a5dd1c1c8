"""Reasoning and content come apart the same way however the text was cut, and as the prompt's tail says."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.parsers import REASONING_PARSERS, ReasoningStream, detect_reasoning_format

THINK = REASONING_PARSERS.get("think")

pieces_of_text = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "</", "think>", "<th", " ", "\n\n", "word", "é", "🙂", ">"]),
    max_size=12,
)


def split(parts: list[str], prompt: str = "user: hi") -> tuple[str, str]:
    stream = ReasoningStream(THINK, prompt)
    results = [stream.push(part) for part in parts] + [stream.finish()]
    return "".join(r.reasoning for r in results), "".join(r.content for r in results)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nbecause\n</think>\n\nParis", "because", "Paris"),
        ("\n <think>a</think>b", "a", "b"),
        ("Paris", "", "Paris"),
        (" Paris <think>no</think>", "", " Paris <think>no</think>"),
        ("<think>cut off", "cut off", ""),
        ("<think></think>x", "", "x"),
        ("<think>a < b </thin k></think> c </think>", "a < b </thin k>", "c </think>"),
        ("<thinking>", "", "<thinking>"),
        ("", "", ""),
        ("<thi", "", "<thi"),
    ],
)
def test_the_first_block_is_the_reasoning(text: str, reasoning: str, content: str) -> None:
    assert split([text]) == (reasoning, content)


def test_a_template_that_opens_the_block_starts_inside_it() -> None:
    assert split(["because</think>Paris"], prompt="assistant\n<think>\n") == ("because", "Paris")
    assert split(["because, cut off"], prompt="assistant\n<think>\n") == ("because, cut off", "")


def test_a_template_that_closes_the_block_has_switched_thinking_off() -> None:
    assert split(["Paris"], prompt="assistant\n<think>\n\n</think>\n\n") == ("", "Paris")


@settings(max_examples=300, deadline=None)
@given(
    parts=pieces_of_text,
    cuts=st.lists(st.integers(0, 60), max_size=8),
    prompt=st.sampled_from(["hi", "hi <think>\n", "<think></think>\n"]),
)
def test_any_split_gives_the_same_result(parts: list[str], cuts: list[int], prompt: str) -> None:
    text = "".join(parts)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    assert split(pieces, prompt) == split([text], prompt) == split(list(text), prompt)


def test_nothing_is_held_longer_than_needed() -> None:
    stream = ReasoningStream(THINK, "hi <think>")
    assert stream.push("one ").reasoning == "one"
    assert stream.push("two</th").reasoning == " two"
    assert stream.push("e").reasoning == "</the"


def test_the_format_is_detected_from_the_chat_template() -> None:
    assert detect_reasoning_format("{{ '<think>' }}") == THINK
    assert detect_reasoning_format("{{ messages }}") is None
    assert detect_reasoning_format(None) is None


@pytest.mark.parametrize(
    ("continued", "parts", "reasoning", "content"),
    [
        ("<think>why", [" not?", "</thi", "nk> Yes."], " not?", "Yes."),
        ("<think>why</think>Ye", ["s, ", "<think>"], "", "s, <think>"),
        ("Ye", [" s."], "", " s."),
        ("<think>", [" why?</think>Yes."], "why?", "Yes."),
        ("", ["<think>why?</think>Yes."], "why?", "Yes."),
        ("<think>a</think>b<think>c", ["d"], "d", ""),
    ],
)
def test_a_message_is_gone_on_with_in_the_part_where_it_stopped(
    continued: str, parts: list[str], reasoning: str, content: str
) -> None:
    stream = ReasoningStream(THINK, "user: hi assistant: " + continued, continued)
    results = [stream.push(part) for part in parts] + [stream.finish()]
    assert "".join(r.reasoning for r in results) == reasoning
    assert "".join(r.content for r in results) == content
