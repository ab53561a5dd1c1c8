"""Specification of OutputProcessor: what a request's parameters make of its text and its tables, streamed or whole.

The tokenizer is a real one: ids 1 to 256 are the bytes, 0 ends a sequence, 257 and 258 are special tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine import EngineInputs, OutputProcessor
from octavo.tokenizers import Tokenizer, load_tokenizer
from octavo.types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    Logprob,
    PositionLogprobs,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)

EOS, THINK, CALL = 0, 257, 258
DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": EOS} | {letter: index for index, letter in enumerate(alphabet, start=1)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<eos>", "<think>", "<call>"])
    folder: Path = tmp_path_factory.mktemp("bytes")
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    return load_tokenizer(folder)


def run(
    tokenizer: Tokenizer, steps: Sequence[EngineCoreOutput], take_each: bool = True, **params: Any
) -> list[RequestOutput]:
    """The outputs of a request ``a`` (with n > 1 its choices are ``0_a``, ``1_a``, …) whose engine does these steps."""
    stated = SamplingParams(**({"seed": 1, "max_tokens": 1000} | params))
    requests = [
        EngineCoreRequest(
            "a" if stated.n == 1 else f"{index}_a", [1, 2, 3], stated, [EOS], arrival_time=0.0, choice_index=index
        )
        for index in range(stated.n)
    ]
    processor = OutputProcessor(tokenizer)
    state = processor.add_request(EngineInputs("a", None, stated, requests, 17))
    outputs = []
    for step in steps:
        if state.finished:
            break
        processor.process(EngineCoreOutputs([step]))
        if take_each:
            outputs.append(state.take())
    outputs.append(state.take())
    return [output for output in outputs if output is not None]


def one_by_one(token_ids: Sequence[int], reason: FinishReason = LENGTH) -> list[EngineCoreOutput]:
    """A token a step, the last with the end."""
    steps = [EngineCoreOutput("a", [token_id]) for token_id in token_ids]
    steps[-1].finish_reason = reason
    return steps


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.outputs[0].text for output in outputs)


def whole_text(tokenizer: Tokenizer, token_ids: Sequence[int], reason: FinishReason = LENGTH, **params: Any) -> str:
    """The text, which must be the same in every form of output."""
    steps = one_by_one(token_ids, reason)
    streamed = text_of(run(tokenizer, steps, output_kind=DELTA, **params))
    (final,) = run(tokenizer, steps, output_kind=FINAL_ONLY, **params)
    cumulative = run(tokenizer, steps, **params)
    at_once = EngineCoreOutput("a", list(token_ids), finish_reason=reason)
    (joined,) = run(tokenizer, [at_once], output_kind=DELTA, **params)
    assert streamed == final.outputs[0].text == cumulative[-1].outputs[0].text == joined.outputs[0].text
    return streamed


# ---- special tokens -------------------------------------------------------------------------------------------------


def test_special_tokens_are_text_only_where_asked_for(tokenizer: Tokenizer) -> None:
    ids = [THINK, *tokenizer.encode("hm"), CALL, CALL]
    assert whole_text(tokenizer, ids) == "hm"
    assert whole_text(tokenizer, ids, skip_special_tokens=False) == "<think>hm<call><call>"
    assert whole_text(tokenizer, ids, skip_special_tokens=False, spaces_between_special_tokens=False) == (
        "<think>hm<call><call>"
    )


def test_stop_strings_are_found_in_special_tokens_only_where_these_are_text(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a"), CALL, *tokenizer.encode("b")]
    assert whole_text(tokenizer, ids, stop=["<call>"]) == "ab"
    assert whole_text(tokenizer, ids, stop=["<call>"], skip_special_tokens=False) == "a"


@pytest.mark.parametrize("end", [EOS, CALL])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_the_end_of_sequence_is_text_if_it_is_included_and_not_skipped(
    tokenizer: Tokenizer, end: int, include: bool, skip: bool
) -> None:
    ids = [*tokenizer.encode("ab"), end]
    text = whole_text(tokenizer, ids, STOP, include_stop_str_in_output=include, skip_special_tokens=skip)
    name = {EOS: "<eos>", CALL: "<call>"}[end]
    assert text == ("ab" + name if include and not skip else "ab")


def test_a_stop_tokens_text_is_included_where_asked_for(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab.")
    assert whole_text(tokenizer, ids, STOP) == "ab"
    assert whole_text(tokenizer, ids, STOP, include_stop_str_in_output=True) == "ab."
    # The control: at a length limit the last token is text like any other.
    assert whole_text(tokenizer, ids, LENGTH) == "ab."


# ---- stop strings in the text ---------------------------------------------------------------------------------------


def test_an_included_stop_string_ends_the_text_even_inside_a_step(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one END two")
    assert whole_text(tokenizer, ids, stop=["END"], include_stop_str_in_output=True) == "one END"
    assert whole_text(tokenizer, ids, stop=["END"]) == "one "
    (output,) = run(tokenizer, one_by_one(ids), False, stop=["END"], include_stop_str_in_output=True)
    choice = output.outputs[0]
    assert (choice.finish_reason, choice.stop_reason, len(choice.token_ids)) == ("stop", "END", 7)


def end_of_text(seen: list[str], stops: list[str], min_tokens: int) -> tuple[str, str | None]:
    """(text up to the end of the first stop string that is completed after ``min_tokens`` tokens, that string), looked
    for anew at each token. ``seen[i]``: the text of i tokens."""
    for used in range(min_tokens + 1, len(seen)):
        for end in range(len(seen[used - 1]) + 1, len(seen[used]) + 1):
            found = [stop for stop in stops if seen[used][:end].endswith(stop)]
            if found:
                return seen[used][:end], max(found, key=len)
    return seen[-1], None


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("ab€👩\u200d", max_size=10),
    stops=st.lists(st.text("ab€\u200d", min_size=1, max_size=3), max_size=3, unique=True),
    min_tokens=st.integers(0, 4),
    include=st.booleans(),
)
def test_any_text_ends_with_or_before_its_first_stop_string(
    tokenizer: Tokenizer, text: str, stops: list[str], min_tokens: int, include: bool
) -> None:
    ids = [*tokenizer.encode(text), *tokenizer.encode(".")]
    seen = [tokenizer.decode(ids[:used]).rstrip("\ufffd") for used in range(len(ids) + 1)]
    expected, stop = end_of_text(seen, stops, min_tokens)
    if stop is not None and not include:
        expected = expected.removesuffix(stop)
    params: dict[str, Any] = {"stop": stops, "min_tokens": min_tokens, "include_stop_str_in_output": include}
    assert whole_text(tokenizer, ids, **params) == expected
    assert run(tokenizer, one_by_one(ids), **params)[-1].outputs[0].stop_reason == stop


# ---- without text ---------------------------------------------------------------------------------------------------


class NoText:
    """A tokenizer that must not be asked for text."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def test_without_detokenization_there_are_ids_and_logprobs_and_no_text() -> None:
    logprobs = [PositionLogprobs([5, 6], [-1.0, -0.5], 2)]
    steps = [EngineCoreOutput("a", [5], logprobs), EngineCoreOutput("a", [EOS], logprobs, STOP)]
    params: dict[str, Any] = {"detokenize": False, "logprobs": 1, "include_stop_str_in_output": True}
    outputs = run(NoText(), steps, **params)  # type: ignore[arg-type]
    assert [output.outputs[0].text for output in outputs] == ["", ""]
    choice = outputs[-1].outputs[0]
    assert choice.token_ids == [5, EOS]
    assert choice.logprobs == [{5: Logprob(-1.0, 2, None), 6: Logprob(-0.5, 1, None)}] * 2
    assert (choice.finish_reason, choice.cumulative_logprob) == ("stop", -2.0)


# ---- logprobs of the prompt -----------------------------------------------------------------------------------------


def prompt_tables(tokenizer: Tokenizer) -> tuple[list[PositionLogprobs], list[Any]]:
    """For a prompt of three tokens, as the engine says it and as callers get it."""
    a, b, c = tokenizer.encode("abc")
    said = [PositionLogprobs([a, b], [-2.0, -0.5], 4), PositionLogprobs([c, c], [-0.25, -0.25], 1)]
    return said, [None, {a: Logprob(-2.0, 4, "a"), b: Logprob(-0.5, 1, "b")}, {c: Logprob(-0.25, 1, "c")}]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_logprobs_of_the_prompt_come_complete_with_the_first_output(
    tokenizer: Tokenizer, kind: RequestOutputKind
) -> None:
    said, expected = prompt_tables(tokenizer)
    steps = [
        EngineCoreOutput("a", [], new_prompt_logprobs=said[:1]),
        EngineCoreOutput("a", [5], new_prompt_logprobs=said[1:]),
        *one_by_one([6, 7]),
    ]
    outputs = run(tokenizer, steps, prompt_logprobs=1, output_kind=kind)
    counts = {RequestOutputKind.CUMULATIVE: [1, 2, 3], DELTA: [1, 1, 1], FINAL_ONLY: [3]}[kind]
    assert [len(output.outputs[0].token_ids) for output in outputs] == counts
    tables = [output.prompt_logprobs for output in outputs]
    assert tables == ([expected, None, None] if kind == DELTA else [expected] * len(outputs))


def test_a_choice_that_is_ahead_waits_for_the_prompts_logprobs(tokenizer: Tokenizer) -> None:
    said, expected = prompt_tables(tokenizer)
    steps = [
        EngineCoreOutput("1_a", [5]),
        EngineCoreOutput("1_a", [6], finish_reason=LENGTH),
        EngineCoreOutput("0_a", [7], new_prompt_logprobs=said),
        EngineCoreOutput("0_a", [8], finish_reason=LENGTH),
    ]
    outputs = run(tokenizer, steps, n=2, prompt_logprobs=1, output_kind=DELTA)
    ids = [[(choice.index, choice.token_ids) for choice in output.outputs] for output in outputs]
    assert ids == [[(0, [7]), (1, [5, 6])], [(0, [8])]]
    assert [output.prompt_logprobs for output in outputs] == [expected, None]
    # The control: without them nobody waits.
    for step in steps:
        step.new_prompt_logprobs = None
    assert len(run(tokenizer, steps, n=2, output_kind=DELTA)) == 4


def test_a_prompt_of_one_token_has_no_logprobs(tokenizer: Tokenizer) -> None:
    (output,) = run(tokenizer, one_by_one([5]), prompt_logprobs=3)
    assert output.prompt_logprobs == [None]


def test_a_request_that_ends_before_its_first_token_still_ends(tokenizer: Tokenizer) -> None:
    steps = [EngineCoreOutput("a", [], finish_reason=FinishReason.ABORT)]
    (output,) = run(tokenizer, steps, prompt_logprobs=3, output_kind=DELTA)
    assert output.finished


# ---- tables ---------------------------------------------------------------------------------------------------------


def test_named_tokens_come_with_their_ranks(tokenizer: Tokenizer) -> None:
    a, b, c = tokenizer.encode("abc")
    said = PositionLogprobs([a, b, a, c], [-1.0, -9.0, -1.0, -3.0], 2, [80, 2, 5])
    (output,) = run(tokenizer, [EngineCoreOutput("a", [a], [said], LENGTH)], logprob_token_ids=[b, a, c])
    choice = output.outputs[0]
    expected = {a: Logprob(-1.0, 2, "a"), b: Logprob(-9.0, 80, "b"), c: Logprob(-3.0, 5, "c")}
    assert choice.logprobs == [expected]
    assert list(choice.logprobs[0]) == [a, b, c]
    assert choice.cumulative_logprob == -1.0


def test_the_texts_of_a_whole_vocabulary_are_worked_out_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    original = tokenizer.decode_token
    monkeypatch.setattr(tokenizer, "decode_token", lambda token_id: asked.append(token_id) or original(token_id))
    ids = list(range(tokenizer.vocab_size))
    said = [PositionLogprobs([5, *ids], [-5.0, *(-1.0 - 0.01 * i for i in ids)], 6)]
    steps = [EngineCoreOutput("a", [5], said) for _ in range(4)]
    steps[-1].finish_reason = LENGTH
    (*_, output) = run(tokenizer, steps, logprobs=-1)
    assert sorted(asked) == ids
    tables = output.outputs[0].logprobs
    assert tables is not None
    assert [table[9].decoded_token for table in tables] == [original(9)] * 4


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_what_the_prompt_lost_is_in_every_output(tokenizer: Tokenizer, kind: RequestOutputKind) -> None:
    outputs = run(tokenizer, one_by_one([5, 6]), output_kind=kind)
    assert {output.num_truncated_prompt_tokens for output in outputs} == {17}
