"""Specification of InputProcessor: what is refused, under which name, and what a request looks like when complete."""

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import EngineArgs, OctavoConfig, resolve_config
from octavo.engine import InputProcessor
from octavo.errors import RequestError
from octavo.types import ModelFacts, PlatformFacts, SamplingParams

VOCAB_SIZE = 300
MAX_MODEL_LEN = 64


class WordTokenizer:
    """A token a word: id = 10 × its length. Counts how often it is asked to encode."""

    vocab_size = VOCAB_SIZE

    def __init__(self) -> None:
        self.encoded = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.encoded += 1
        return [10 * len(word) for word in text.split()]

    def decode_token(self, token_id: int) -> str:
        return "x" * (token_id // 10)


def make_config(**stated: Any) -> OctavoConfig:
    facts = ModelFacts(
        path="tiny",
        format="safetensors",
        architecture="LlamaForCausalLM",
        hf_config={},
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=512,
        dtype="float32",
        weight_bytes=0,
        generation_config={},
        eos_token_ids=[2, 7],
        fingerprint="00",
    )
    platform = PlatformFacts(
        name="cpu",
        num_threads=1,
        supported_dtypes=["float32"],
        default_memory_share=0.4,
        default_max_num_batched_tokens=2048,
        offline_max_num_batched_tokens=2048,
        default_max_num_seqs=128,
        default_block_size=16,
        async_scheduling=False,
    )
    return resolve_config(EngineArgs(**({"model": "tiny", "max_model_len": MAX_MODEL_LEN} | stated)), facts, platform)


def make_processor(**stated: Any) -> InputProcessor:
    return InputProcessor(make_config(**stated), WordTokenizer())  # type: ignore[arg-type]


def refusal(prompt: Any, params: SamplingParams | None = None, **options: Any) -> RequestError:
    stated = options.pop("stated", {})
    with pytest.raises(RequestError) as caught:
        make_processor(**stated).process("a", prompt, params or SamplingParams(), **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return caught.value


@pytest.mark.parametrize("prompt", ["one two", {"prompt": "one two"}, {"prompt_token_ids": [30, 30]}])
def test_every_shape_of_a_prompt_gives_the_same_engine_request(prompt: Any) -> None:
    inputs = make_processor().process("a", prompt, SamplingParams(seed=1), arrival_time=5.0)
    (request,) = inputs.requests
    assert request.prompt_token_ids == inputs.prompt_token_ids == [30, 30]
    assert request.request_id == "a"
    assert request.arrival_time == 5.0
    assert inputs.prompt == (None if "prompt_token_ids" in prompt else "one two")


def test_ids_may_come_with_their_text_which_is_only_handed_back() -> None:
    tokenizer = WordTokenizer()
    processor = InputProcessor(make_config(), tokenizer)  # type: ignore[arg-type]
    inputs = processor.process("a", {"prompt": "shown", "prompt_token_ids": [5]}, SamplingParams())
    assert (inputs.prompt, inputs.prompt_token_ids, tokenizer.encoded) == ("shown", [5], 0)


def test_arrival_time_is_now_unless_given() -> None:
    before = time.monotonic()
    (request,) = make_processor().process("a", "one", SamplingParams()).requests
    assert before <= request.arrival_time <= time.monotonic()


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "   ",
        {"prompt": ""},
        {"prompt_token_ids": []},
        {},
        {"prompt": None},
        {"prompt": 5},
        {"prompt": "a", "multi_modal_data": {}},
        {"prompt_token_ids": "abc"},
        {"prompt_token_ids": [-1]},
        {"prompt_token_ids": [VOCAB_SIZE]},
        {"prompt_token_ids": [2**63]},
        {"prompt_token_ids": [10**5000]},
        {"prompt_token_ids": [1.5]},
        {"prompt_token_ids": [True]},
        {"prompt_token_ids": ["1"]},
        {"prompt_token_ids": [None]},
        {"prompt_token_ids": [[1]]},
        None,
        5,
        [1, 2],
        b"one",
        "broken \ud800 text",
    ],
)
def test_a_prompt_that_is_none_is_refused(prompt: Any) -> None:
    assert refusal(prompt).param == "prompt"


def test_first_and_last_id_of_the_vocabulary_are_taken() -> None:
    make_processor().process("a", {"prompt_token_ids": [0, VOCAB_SIZE - 1]}, SamplingParams())


def test_prompt_and_output_may_fill_the_context_exactly_and_not_more() -> None:
    ids = {"prompt_token_ids": [5] * 60}
    (request,) = make_processor().process("a", ids, SamplingParams(max_tokens=4)).requests
    assert request.sampling_params.max_tokens == 4
    error = refusal(ids, SamplingParams(max_tokens=5))
    assert error.param == "input_tokens"
    for number in ("60 tokens", "max_tokens is 5", "65", "64 tokens", "at most 4"):
        assert number in str(error)


@pytest.mark.parametrize("length", [MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 100_000])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(length: int) -> None:
    error = refusal({"prompt_token_ids": [5] * length}, SamplingParams(max_tokens=None))
    assert error.param == "input_tokens"
    assert str(length) in str(error)
    assert str(MAX_MODEL_LEN) in str(error)


def test_absurdly_long_text_is_refused_without_encoding_it() -> None:
    tokenizer = WordTokenizer()
    processor = InputProcessor(make_config(), tokenizer)  # type: ignore[arg-type]
    longest = len(tokenizer.decode_token(VOCAB_SIZE - 1))
    with pytest.raises(RequestError) as caught:
        processor.process("a", "x" * (MAX_MODEL_LEN * longest + 1), SamplingParams())
    assert caught.value.param == "input_tokens"
    assert f"{MAX_MODEL_LEN * longest + 1} characters" in str(caught.value)
    assert f"{MAX_MODEL_LEN} tokens" in str(caught.value)
    assert tokenizer.encoded == 0
    # Text that may just fit is encoded, and judged by its tokens.
    with pytest.raises(RequestError, match="65 tokens"):
        processor.process("a", "x " * 65 + " " * (MAX_MODEL_LEN * longest - 130), SamplingParams())
    assert tokenizer.encoded == 1


def test_max_tokens_beyond_the_context_is_refused_as_such_whatever_the_prompt() -> None:
    assert refusal("one", SamplingParams(max_tokens=MAX_MODEL_LEN + 1)).param == "max_tokens"


def test_no_max_tokens_means_the_rest_of_the_context() -> None:
    (request,) = make_processor().process("a", "one two three", SamplingParams(max_tokens=None)).requests
    assert request.sampling_params.max_tokens == MAX_MODEL_LEN - 3


def test_min_tokens_must_fit_into_the_room_left() -> None:
    params = SamplingParams(max_tokens=None, min_tokens=63)
    make_processor().process("a", "one", params)
    assert refusal("one two", params).param == "min_tokens"
    assert refusal("one", SamplingParams(max_tokens=None, min_tokens=10**9)).param == "min_tokens"


def test_a_context_length_lowered_by_the_engine_holds_from_then_on() -> None:
    processor = make_processor()
    processor.max_model_len = 8
    (request,) = processor.process("a", "one", SamplingParams(max_tokens=None)).requests
    assert request.sampling_params.max_tokens == 7
    with pytest.raises(RequestError, match="8 tokens"):
        processor.process("a", "one", SamplingParams(max_tokens=8))


def test_stop_token_ids_and_logprobs_are_bound_by_the_model() -> None:
    make_processor().process("a", "one", SamplingParams(stop_token_ids=[VOCAB_SIZE - 1], logprobs=20))
    assert refusal("one", SamplingParams(stop_token_ids=[VOCAB_SIZE])).param == "stop_token_ids"
    assert refusal("one", SamplingParams(logprobs=21)).param == "logprobs"
    make_processor(max_logprobs=21).process("a", "one", SamplingParams(logprobs=21))


def test_text_that_could_not_be_sent_on_is_refused() -> None:
    assert refusal("one", SamplingParams(stop=["a", "\ud800"])).param == "stop"
    with pytest.raises(RequestError, match="surrogate") as caught:
        make_processor().process("\ud800", "one", SamplingParams())
    assert caught.value.param == "request_id"


@pytest.mark.parametrize("salt", ["", "x" * 129, "a/b", "a\n", "ä", 5, b"a"])
def test_a_cache_salt_of_another_form_is_refused(salt: Any) -> None:
    assert refusal("one", cache_salt=salt).param == "cache_salt"
    assert refusal({"prompt": "one", "cache_salt": salt}).param == "cache_salt"


def test_a_cache_salt_comes_with_the_prompt_or_as_an_argument() -> None:
    for salt in ("x" * 128, "aZ09._:-"):
        by_argument = make_processor().process("a", "one", SamplingParams(), cache_salt=salt)
        by_prompt = make_processor().process("a", {"prompt": "one", "cache_salt": salt}, SamplingParams())
        assert by_argument.requests[0].cache_salt == by_prompt.requests[0].cache_salt == salt
    assert refusal({"prompt": "one", "cache_salt": "a"}, cache_salt="a").param == "cache_salt"


@pytest.mark.parametrize("priority", [2**63, -(2**63) - 1, 1.0, True, "1", None])
def test_a_priority_that_is_no_int64_is_refused(priority: Any) -> None:
    assert refusal("one", priority=priority, stated={"scheduling_policy": "priority"}).param == "priority"


def test_a_priority_that_the_policy_would_ignore_is_refused() -> None:
    assert "--scheduling-policy" in str(refusal("one", priority=1))
    processor = make_processor(scheduling_policy="priority")
    assert processor.process("a", "one", SamplingParams(), priority=-(2**63)).requests[0].priority == -(2**63)


@pytest.mark.parametrize("request_id", ["", None, 5])
def test_a_request_id_is_a_string(request_id: Any) -> None:
    with pytest.raises(RequestError) as caught:
        make_processor().process(request_id, "one", SamplingParams())
    assert caught.value.param == "request_id"


def test_parameters_changed_after_construction_are_checked_too() -> None:
    params = SamplingParams()
    params.temperature = 3.0
    assert refusal("one", params).param == "temperature"
    assert refusal("one", {"temperature": 1.0}).param == "sampling_params"  # type: ignore[arg-type]


def test_the_callers_parameters_and_ids_are_neither_changed_nor_shared() -> None:
    params = SamplingParams(max_tokens=None, stop=["a"], stop_token_ids=[3])
    ids = [5, 6]
    inputs = make_processor().process("a", {"prompt_token_ids": ids}, params)
    assert params == SamplingParams(max_tokens=None, stop=["a"], stop_token_ids=[3])
    ids.append(7)
    params.stop.append("b")
    params.stop_token_ids.append(4)
    assert inputs.prompt_token_ids == [5, 6]
    assert (inputs.params.stop, inputs.params.stop_token_ids) == (["a"], [3])


def test_end_of_sequence_ids_are_the_models_unless_ignored() -> None:
    assert make_processor().process("a", "one", SamplingParams()).requests[0].eos_token_ids == [2, 7]
    assert make_processor().process("a", "one", SamplingParams(ignore_eos=True)).requests[0].eos_token_ids == []


def test_choices_are_engine_requests_of_their_own_with_one_seed() -> None:
    inputs = make_processor().process("a", "one", SamplingParams(n=3))
    assert [request.request_id for request in inputs.requests] == ["0_a", "1_a", "2_a"]
    assert [request.choice_index for request in inputs.requests] == [0, 1, 2]
    assert len({request.sampling_params.seed for request in inputs.requests}) == 1


def test_seeds_stay_and_missing_ones_follow_from_the_engines_seed() -> None:
    def seeds(**stated: Any) -> list[int | None]:
        processor = make_processor(**stated)
        return [processor.process(str(i), "one", SamplingParams()).params.seed for i in range(20)]

    first = seeds(seed=11)
    assert first == seeds(seed=11)
    assert len(set(first)) == 20
    assert not set(first) & set(seeds(seed=12))
    assert not set(first) & set(seeds())
    assert all(seed is not None and 0 <= seed < 2**63 for seed in first)
    assert make_processor().process("a", "one", SamplingParams(seed=0)).params.seed == 0


def test_a_refused_request_takes_no_seed_from_the_row() -> None:
    plain, disturbed = make_processor(seed=3), make_processor(seed=3)
    with pytest.raises(RequestError):
        disturbed.process("a", "", SamplingParams())
    seed = plain.process("a", "one", SamplingParams()).params.seed
    assert disturbed.process("a", "one", SamplingParams()).params.seed == seed


_junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(
    prompt=_junk
    | st.fixed_dictionaries({}, optional={"prompt": _junk, "prompt_token_ids": _junk, "cache_salt": _junk}),
    priority=_junk,
    salt=_junk,
)
def test_whatever_is_sent_is_either_a_request_or_a_named_refusal(prompt: Any, priority: Any, salt: Any) -> None:
    try:
        inputs = make_processor().process("a", prompt, SamplingParams(), priority=priority, cache_salt=salt)
    except RequestError as error:
        assert error.param is not None  # noqa: PT017 (either outcome is right)
    else:
        assert 1 <= len(inputs.prompt_token_ids) <= MAX_MODEL_LEN - 16


def test_text_whose_token_the_model_does_not_have_is_refused() -> None:
    error = refusal("aa " + "b" * (VOCAB_SIZE // 10))  # the fake tokenizer gives it the id VOCAB_SIZE
    assert error.param == "prompt"
    assert f"with id {VOCAB_SIZE}" in str(error)
    assert f"0 to {VOCAB_SIZE - 1}" in str(error)
    assert "xxx" in str(error)
    assert make_processor().process("a", "b" * (VOCAB_SIZE // 10 - 1), SamplingParams()).prompt_token_ids


@pytest.mark.parametrize(("excess", "warned"), [(0, False), (1, True), (-5, False)])
def test_a_tokenizer_wider_than_the_model_is_told_once_at_load(
    excess: int, warned: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(WordTokenizer, "vocab_size", VOCAB_SIZE + excess)
    processor = make_processor()
    processor.process("a", "aa bb", SamplingParams())
    assert capfd.readouterr().err.count("model's vocabulary ends at") == int(warned)


def test_the_copies_of_a_prompt_for_its_choices_are_bounded() -> None:
    processor = make_processor(max_model_len=512)
    prompt: Any = {"prompt_token_ids": [5] * 257}
    with pytest.raises(RequestError, match="n is 16384 and the prompt has 257 tokens, together 4210688") as caught:
        processor.process("a", prompt, SamplingParams(n=16384))
    assert caught.value.param == "n"
    assert "at most 4194304" in str(caught.value)
    assert "at most 16320" in str(caught.value)
    assert len(processor.process("a", prompt, SamplingParams(n=16320)).requests) == 16320
