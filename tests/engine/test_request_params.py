"""Specification of InputProcessor: what becomes of sampling parameters against the facts of a model, whatever the door.

The tokenizer and its vocabulary are real ones, so that words become the tokens that the model would generate.
"""

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from octavo.config import EngineArgs
from octavo.engine import EngineInputs, InputProcessor, build_config
from octavo.errors import ConfigError, RequestError, RequestFailedError
from octavo.tokenizers import Tokenizer, load_tokenizer
from octavo.types import RequestOutputKind, SamplingParams

LENGTH = 64


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_dir: Path) -> Tokenizer:
    return load_tokenizer(tiny_llama_dir)


Door = Callable[..., InputProcessor]


@pytest.fixture
def door(tiny_llama_dir: Path, tokenizer: Tokenizer) -> Door:
    """``door(**options)`` → an InputProcessor of the tiny model with a context of 64 tokens."""

    def make(tokenizer: Tokenizer = tokenizer, **stated: Any) -> InputProcessor:
        options = {"model": str(tiny_llama_dir), "dtype": "float32", "max_model_len": LENGTH} | stated
        return InputProcessor(build_config(EngineArgs(**options)), tokenizer)

    return make


@pytest.fixture(scope="module")
def vocab_size(tiny_llama_dir: Path) -> int:
    return build_config(EngineArgs(model=str(tiny_llama_dir))).model.vocab_size


def take(processor: InputProcessor, prompt: Any = "hello", **params: Any) -> EngineInputs:
    return processor.process("a", prompt, SamplingParams(**params))


def refusal(processor: InputProcessor, prompt: Any = "hello", **params: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        take(processor, prompt, **params)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    return caught.value


# ---- ids ------------------------------------------------------------------------------------------------------------

ID_FIELDS: dict[str, Callable[[Any], Any]] = {
    "logit_bias": lambda token_id: {token_id: 1.0},
    "allowed_token_ids": lambda token_id: [5, token_id],
    "logprob_token_ids": lambda token_id: [token_id],
    "stop_token_ids": lambda token_id: [token_id],
    "bad_words_token_ids": lambda token_id: [[3], [token_id, 4]],
}


@pytest.mark.parametrize("field", ID_FIELDS)
def test_ids_are_those_of_the_vocabulary(door: Door, vocab_size: int, field: str) -> None:
    processor = door()
    take(processor, **{field: ID_FIELDS[field](vocab_size - 1)})
    for wrong in (vocab_size, -1, 2**63, "x", 1.5, None):
        error = refusal(processor, **{field: ID_FIELDS[field](wrong)})
        assert error.param == field


def test_bias_keys_may_be_text_as_json_has_them(door: Door, vocab_size: int) -> None:
    assert take(door(), logit_bias={"7": -1.5}).params.logit_bias == {7: -1.5}
    assert refusal(door(), logit_bias={str(vocab_size): 1.0}).param == "logit_bias"


# ---- logprobs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_logprobs_are_bound_by_max_logprobs(door: Door, vocab_size: int, field: str) -> None:
    take(door(max_logprobs=7), **{field: 7})
    error = refusal(door(max_logprobs=7), **{field: 8})
    assert error.param == field
    assert "at most 7 (--max-logprobs)" in str(error)
    error = refusal(door(max_logprobs=vocab_size - 1), **{field: -1})
    assert error.param == field
    assert "--max-logprobs" in str(error)
    assert str(vocab_size) in str(error)
    for most in (-1, vocab_size):
        assert getattr(take(door(max_logprobs=most), **{field: -1}).params, field) == -1
        take(door(max_logprobs=most), **{field: vocab_size})


def test_only_the_first_choice_computes_the_prompts_logprobs(door: Door) -> None:
    inputs = take(door(), n=3, prompt_logprobs=2, logprobs=1)
    assert [request.sampling_params.prompt_logprobs for request in inputs.requests] == [2, None, None]
    assert [request.sampling_params.logprobs for request in inputs.requests] == [1, 1, 1]
    assert len({request.sampling_params.seed for request in inputs.requests}) == 1


def test_a_prompts_logprobs_are_bounded(door: Door, vocab_size: int) -> None:
    # 2^22 entries in all; the tiny model's whole vocabulary fits many times.
    processor = door(max_model_len=512, max_logprobs=-1)
    take(processor, {"prompt_token_ids": [5] * 400}, prompt_logprobs=-1)
    bound = 2**22 // (vocab_size + 1)
    processor.max_model_len = bound + 100
    take(processor, {"prompt_token_ids": [5] * bound}, prompt_logprobs=-1)
    error = refusal(processor, {"prompt_token_ids": [5] * (bound + 1)}, prompt_logprobs=-1)
    assert error.param == "prompt_logprobs"
    take(processor, {"prompt_token_ids": [5] * (bound + 1)}, prompt_logprobs=5)


def test_an_outputs_logprobs_are_bounded_where_they_are_many(door: Door, vocab_size: int) -> None:
    processor = door(max_logprobs=-1)
    processor.max_model_len = 2**20
    bound = 2**21 // (vocab_size + 1)
    take(processor, logprobs=-1, max_tokens=bound)
    error = refusal(processor, logprobs=-1, max_tokens=bound + 1)
    assert error.param == "logprobs"
    assert f"at most {bound}" in str(error)
    assert refusal(processor, logprobs=-1, max_tokens=bound // 4 + 1, n=4, temperature=1.0).param == "logprobs"
    assert refusal(processor, logprobs=-1, max_tokens=None).param == "logprobs"
    # A usual number of them is never too many, however long the output may become.
    take(processor, logprobs=20, max_tokens=None)


# ---- bad words ------------------------------------------------------------------------------------------------------


def test_a_bad_word_is_banned_as_it_begins_a_text_and_as_it_follows_a_space(door: Door, tokenizer: Tokenizer) -> None:
    for word in ("dog", " dog", "unbelievable dogs", "\n", "é"):
        sequences = take(door(), bad_words=[word]).params.bad_words_token_ids
        bare = word.lstrip(" ")
        assert {tokenizer.decode(ids) for ids in sequences} <= {bare, " " + bare}
        # Whatever follows either way of coming to the word, the last step into it is a banned one.
        for text in (bare, " " + bare, "see the " + bare):
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert any(ids[-len(banned) :] == banned for banned in sequences), text


def test_the_two_ways_may_have_different_numbers_of_tokens(door: Door, tokenizer: Tokenizer) -> None:
    plain, spaced = (tokenizer.encode(text, add_special_tokens=False) for text in ("the", " the"))
    assert len(plain) != len(spaced)  # else this shows nothing: choose another word
    assert take(door(), bad_words=["the"]).params.bad_words_token_ids == [plain, spaced]


def test_a_space_that_is_a_token_by_itself_makes_no_second_sequence(door: Door) -> None:
    """A SentencePiece tokenizer: a text begins as if after a space."""
    vocabulary = {"<unk>": 0, "▁dog": 1, "▁": 2, "d": 3, "o": 4, "g": 5}
    backend = tokenizers.Tokenizer(models.Unigram([(token, -1.0) for token in vocabulary], unk_id=0))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Metaspace()
    unigram = Tokenizer(
        backend, named_tokens={}, special_tokens=frozenset(["<unk>"]), chat_template=None, file="made here"
    )
    assert [unigram.encode(text, add_special_tokens=False) for text in ("dog", " dog")] == [[1], [2, 1]]
    assert take(door(unigram), bad_words=["dog"]).params.bad_words_token_ids == [[1]]


def test_bad_words_join_those_given_as_ids(door: Door) -> None:
    sequences = take(door(), bad_words=["dog"], bad_words_token_ids=[[9, 8]]).params.bad_words_token_ids
    assert sequences[0] == [9, 8]
    assert len(sequences) == 3


def test_a_bad_word_without_tokens_is_refused(door: Door) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))  # no unknown token: other text vanishes
    words = Tokenizer(backend, named_tokens={}, special_tokens=frozenset(), chat_template=None, file="made here")
    assert take(door(words), "a b", bad_words=["b"]).params.bad_words_token_ids == [[1]]
    error = refusal(door(words), "a b", bad_words=["b", "zzz"])
    assert error.param == "bad_words"
    assert "'zzz'" in str(error)


@pytest.mark.parametrize(
    "words", [[""], ["x"] * 129, "x", [5], ["\ud800"], ["x" * 1025], ["𐍈" * 1024]], ids=lambda words: repr(words)[:20]
)
def test_bad_words_of_another_form_are_refused(door: Door, words: Any) -> None:
    assert refusal(door(), bad_words=words).param == "bad_words"


# ---- what can still be generated ------------------------------------------------------------------------------------


def test_parameters_that_leave_no_token_are_refused(door: Door, tokenizer: Tokenizer) -> None:
    (dog,) = set(tokenizer.encode("g", add_special_tokens=False))
    error = refusal(door(), allowed_token_ids=[2], min_tokens=1)  # 2 ends the sequence
    assert error.param == "allowed_token_ids"
    assert "min_tokens" in str(error)
    take(door(), allowed_token_ids=[2])
    take(door(), allowed_token_ids=[2], min_tokens=1, ignore_eos=True)
    assert refusal(door(), allowed_token_ids=[2, 9], stop_token_ids=[9], min_tokens=1).param == "allowed_token_ids"
    assert refusal(door(), allowed_token_ids=[dog], bad_words=["g"]).param == "allowed_token_ids"
    assert refusal(door(), allowed_token_ids=[]).param == "allowed_token_ids"
    take(door(), allowed_token_ids=[dog, 9], bad_words=["g"])


def test_a_vocabulary_may_be_banned_but_for_one_token(door: Door, vocab_size: int) -> None:
    every = [[token_id] for token_id in range(256)]
    rest = list(range(256, vocab_size))
    assert refusal(door(), bad_words_token_ids=every, stop_token_ids=rest, min_tokens=1).param == "bad_words"
    take(door(), bad_words_token_ids=every, stop_token_ids=rest[1:], min_tokens=1)


def test_long_parameters_are_copied_for_each_choice_and_so_bounded(door: Door) -> None:
    many = {"n": 16384, "max_tokens": 2}
    take(door(), logit_bias=dict.fromkeys(range(200), 1.0), **many)
    for long in (
        {"stop": ["x" * 1000] * 5},
        {"allowed_token_ids": [5] * 5000},
        {"bad_words_token_ids": [[7] * 1000] * 5},
    ):
        error = refusal(door(), **long, **many)
        assert error.param == "n"
        assert "in all choices, but at most 67108864 are taken" in str(error)
        take(door(), **long, n=100)


# ---- truncation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_text", [True, False])
def test_a_truncated_prompt_keeps_its_last_tokens_and_counts_the_others(
    door: Door, tokenizer: Tokenizer, as_text: bool
) -> None:
    text = "the quick brown fox jumps over the lazy dog " * 20
    ids = tokenizer.encode(text)
    assert len(ids) > 2 * LENGTH
    prompt: Any = text if as_text else {"prompt_token_ids": ids}
    for kept, params in (
        (7, {"truncate_prompt_tokens": 7}),
        (LENGTH - 1, {"truncate_prompt_tokens": -1, "max_tokens": None}),
        (LENGTH - 20, {"truncate_prompt_tokens": -1, "max_tokens": 20}),
    ):
        inputs = take(door(), prompt, **params)
        assert inputs.prompt_token_ids == ids[-kept:]
        assert inputs.num_truncated_prompt_tokens == len(ids) - kept
        assert inputs.prompt == (text if as_text else None)
    # The control: without it, and where it keeps too much, the prompt is refused.
    for params in ({}, {"truncate_prompt_tokens": LENGTH - 1, "max_tokens": 2}):
        assert refusal(door(), prompt, **params).param == "input_tokens"


def test_a_prompt_that_is_short_enough_is_not_truncated(door: Door) -> None:
    for size in (-1, 5, 6, 10**6):
        inputs = take(door(), {"prompt_token_ids": [5, 6, 7, 8, 9]}, truncate_prompt_tokens=size)
        assert (inputs.prompt_token_ids, inputs.num_truncated_prompt_tokens) == ([5, 6, 7, 8, 9], 0)


@pytest.mark.parametrize("size", [0, -2, 2**31, "1", 1.5, True])
def test_a_truncation_that_is_no_number_of_tokens_is_refused(door: Door, size: Any) -> None:
    assert refusal(door(), truncate_prompt_tokens=size).param == "truncate_prompt_tokens"


def test_text_far_beyond_the_context_can_be_truncated_up_to_a_bound(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = door()
    longest = max(len(token) for token in processor._tokenizer._backend.get_vocab())
    text = "x" * (LENGTH * longest + 1)
    assert refusal(processor, text).param == "input_tokens"
    inputs = take(processor, text, truncate_prompt_tokens=3)
    assert len(inputs.prompt_token_ids) == 3
    monkeypatch.setattr("octavo.engine.input_processor._MOST_TRUNCATED_CHARACTERS", len(text) - 1)
    error = refusal(processor, text, truncate_prompt_tokens=3)
    assert error.param == "prompt"
    assert f"{len(text)} characters" in str(error)


def test_ids_that_are_cut_off_are_checked_as_well(door: Door) -> None:
    for wrong in ("x", -1, 10**6):
        prompt = {"prompt_token_ids": [wrong] + [5] * 2 * LENGTH}
        assert refusal(door(), prompt, truncate_prompt_tokens=5).param == "prompt"


# ---- defaults -------------------------------------------------------------------------------------------------------


def test_unstated_parameters_are_the_models_defaults_and_stated_ones_are_not(door: Door) -> None:
    processor = door(override_generation_config={"temperature": 0.25, "top_k": 7, "max_new_tokens": 30})
    params = processor.process("a", "hello", None).params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.25, 7, 30)
    params = processor.process("a", "hello", SamplingParams(top_p=0.5)).params
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (1.0, 0, 0.5, 16)
    assert door().process("a", "hello", None).params.max_tokens == 16


def test_a_default_of_max_tokens_gives_way_to_the_models_length(door: Door) -> None:
    prompt: Any = {"prompt_token_ids": [5] * 60}
    for stated in ({}, {"override_generation_config": {"max_new_tokens": 30}}):
        assert door(**stated).process("a", prompt, None).params.max_tokens == 4
    assert door(override_generation_config={"max_new_tokens": 9999}).process("a", prompt, None).params.max_tokens == 4
    assert refusal(door(), prompt, max_tokens=16).param == "input_tokens"


def test_the_output_kind_can_be_the_doors(door: Door) -> None:
    params = SamplingParams(output_kind=RequestOutputKind.DELTA)
    assert door().process("a", "x", params).params.output_kind == RequestOutputKind.DELTA
    inputs = door().process("a", "x", params, output_kind=RequestOutputKind.FINAL_ONLY)
    assert inputs.requests[0].sampling_params.output_kind == RequestOutputKind.FINAL_ONLY
    assert params.output_kind == RequestOutputKind.DELTA


def test_nothing_of_the_callers_parameters_is_shared(door: Door) -> None:
    params = SamplingParams(
        logit_bias={5: 1.0}, allowed_token_ids=[5, 6], bad_words=["dog"], bad_words_token_ids=[[8, 9]]
    )
    taken = door().process("a", "hello", params).params
    assert params.bad_words_token_ids == [[8, 9]]
    params.bad_words_token_ids[0].append(-1)
    assert taken.bad_words_token_ids[0] == [8, 9]
    params.logit_bias[6] = math.inf
    assert params.allowed_token_ids is not None
    params.allowed_token_ids.append(-1)
    params.bad_words.append("cat")
    assert (taken.logit_bias, taken.allowed_token_ids, taken.bad_words) == ({5: 1.0}, [5, 6], ["dog"])


# ---- custom logits processors ---------------------------------------------------------------------------------------

MODULE = """
from octavo.sample import LogitsProcessor

class Picky(LogitsProcessor):
    @classmethod
    def validate_params(cls, params):
        level = params.extra_args.get("level", 0)
        if level == 13:
            raise KeyError("level")
        if not 0 <= level <= 3:
            raise ValueError(f"level must be 0 to 3,\\n got {level}")

    def new_request(self, params, prompt_token_ids):
        return None

class Other(LogitsProcessor):
    def new_request(self, params, prompt_token_ids):
        return None

def function(): pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = "processors_of_test_request_params"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def test_a_custom_processor_refuses_a_request_at_the_door(door: Door, module: str) -> None:
    processor = door(logits_processors=[f"{module}:Other", f"{module}:Picky"])
    assert take(processor).params.extra_args == {}
    assert take(processor, extra_args={"level": 3}).params.extra_args == {"level": 3}
    error = refusal(processor, extra_args={"level": 4})
    assert (error.param, str(error)) == ("extra_args", "level must be 0 to 3, got 4")


def test_a_custom_processor_that_fails_fails_that_request_only(door: Door, module: str) -> None:
    processor = door(logits_processors=[f"{module}:Picky"])
    with pytest.raises(RequestFailedError, match="Picky could not check it: KeyError"):
        take(processor, extra_args={"level": 13})
    take(processor, extra_args={"level": 1})


def test_arguments_for_nobody_are_refused(door: Door) -> None:
    error = refusal(door(), extra_args={"level": 1})
    assert error.param == "extra_args"
    assert "--logits-processors" in str(error)
    take(door(), extra_args={})


@pytest.mark.parametrize("value", [object(), 2**64, "\ud800", [lambda: None]])
def test_arguments_that_cannot_travel_are_refused(door: Door, module: str, value: Any) -> None:
    processor = door(logits_processors=[f"{module}:Other"])
    assert refusal(processor, extra_args={"it": value}).param == "extra_args"
    deep: list[Any] = []
    for _ in range(10**5):
        deep = [deep]
    assert refusal(processor, extra_args={"it": deep}).param == "extra_args"


def test_arguments_arrive_as_they_would_in_another_process(door: Door, module: str) -> None:
    given = {"words": ("a", "b"), "table": {"x": [1]}}
    taken = take(door(logits_processors=[f"{module}:Other"]), extra_args=given).params.extra_args
    assert taken == {"words": ["a", "b"], "table": {"x": [1]}}
    given["table"]["x"].append(2)  # type: ignore[call-overload, index]
    assert taken["table"] == {"x": [1]}


@pytest.mark.parametrize("name", ["no_such_module:Class", "{}:Nobody", "{}:function", "{}", "json:JSONDecoder"])
def test_a_custom_processor_that_is_none_is_told_at_start_up(door: Door, module: str, name: str) -> None:
    with pytest.raises(ConfigError, match="--logits-processors"):
        door(logits_processors=[name.format(module)])
