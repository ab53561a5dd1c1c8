"""Specification of LLM: every sampling parameter has its effect on a real (tiny, random) model, by itself and beside
others; what it should be is worked out from transformers' logits."""

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo import LLM, RequestOutput, SamplingParams
from octavo.errors import RequestError
from octavo.types import CompletionOutput

PROMPT = "The quick brown fox jumps over"
IM_START = 1  # a special token of the tiny model
OPTIONS: dict[str, Any] = {"dtype": "float32", "seed": 0, "num_gpu_blocks_override": 256, "max_logprobs": -1}

PROCESSORS = '''
"""Custom logits processors of a test."""

import torch
from octavo.sample import LogitsProcessor


class OnlyOne(LogitsProcessor):
    """extra_args {"only": id}: no other token."""

    @classmethod
    def validate_params(cls, params):
        only = params.extra_args.get("only", 0)
        if not isinstance(only, int):
            raise ValueError(f"only must be a token id, got {only!r}")

    def new_request(self, params, prompt_token_ids):
        only = params.extra_args.get("only")
        if only is None:
            return None
        if only < 0:
            raise LookupError("no such token")

        def process(output_token_ids, logits):
            changed = torch.full_like(logits, float("-inf"))
            changed[only + len(output_token_ids)] = 0.0
            return changed

        return process
'''


@pytest.fixture(scope="module")
def processors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A module that this process can import, and so the engine's."""
    name = "processors_of_test_llm_sampling"
    folder = tmp_path_factory.mktemp("processors")
    (folder / f"{name}.py").write_text(PROCESSORS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield f"{name}:OnlyOne"
    sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def llm(tiny_llama_dir: Path, processors: str) -> Iterator[LLM]:
    with LLM(str(tiny_llama_dir), **OPTIONS, logits_processors=[processors]) as llm:
        yield llm


@pytest.fixture(scope="module")
def raw_logits(tiny_llama_dir: Path) -> Callable[[list[int]], torch.Tensor]:
    """ids → logits [ids, vocab_size] of transformers' model."""
    model = transformers.LlamaForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32).eval()

    def compute(token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).logits[0]

    return compute


def run(llm: LLM, prompt: Any = PROMPT, **params: Any) -> RequestOutput:
    stated = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | params
    (output,) = llm.generate(prompt, SamplingParams(**stated), use_tqdm=False)
    return output


def first(output: RequestOutput) -> CompletionOutput:
    return output.outputs[0]


# ---- what is sampled ------------------------------------------------------------------------------------------------


def test_a_bias_can_force_a_token_and_forbid_one(llm: LLM) -> None:
    plain = first(run(llm)).token_ids
    assert first(run(llm, logit_bias={77: 100.0})).token_ids == [77] * 12
    assert plain[0] not in first(run(llm, logit_bias={plain[0]: -100.0})).token_ids


def test_only_allowed_tokens_are_generated(llm: LLM, raw_logits: Callable[[list[int]], torch.Tensor]) -> None:
    allowed = [300, 40, 41, 250]
    output = run(llm, allowed_token_ids=allowed)
    logits = raw_logits(output.prompt_token_ids + first(output).token_ids)[len(output.prompt_token_ids) - 1 : -1]
    best = logits[:, allowed].argmax(dim=-1)
    assert first(output).token_ids == [allowed[index] for index in best]
    for seed in range(3):
        sampled = first(run(llm, allowed_token_ids=allowed, temperature=2.0, seed=seed)).token_ids
        assert set(sampled) <= set(allowed)


def contains(ids: list[int], part: list[int]) -> bool:
    return any(ids[at : at + len(part)] == part for at in range(len(ids)))


def test_bad_words_are_not_generated(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    plain = first(run(llm, max_tokens=20)).token_ids
    slices = [plain[at : at + size] for at in range(len(plain)) for size in (1, 2, 3)]
    # What the tokenizer makes of a word is banned, not every way to spell it: "Kxe", and not the "Kxe" in K|x|em.
    words = {tokenizer.decode(each): each for each in slices if tokenizer.encode(tokenizer.decode(each)) == each}
    assert {1, 2} <= {len(each) for each in words.values()}
    for word, sequence in words.items():
        assert not contains(first(run(llm, max_tokens=20, bad_words=[word])).token_ids, sequence)
    # Only its last token is banned, and only after the others.
    first_two = first(run(llm, bad_words_token_ids=[plain[:2]])).token_ids[:2]
    assert first_two[0] == plain[0]
    assert first_two[1] != plain[1]


@pytest.mark.parametrize("word", ["server", "there", "fine"])
def test_text_that_is_called_for_is_not_there_as_a_bad_word(llm: LLM, word: str) -> None:
    encode = llm.get_tokenizer().encode
    called_for = dict.fromkeys({*encode(word), *encode(" " + word)}, 20.0)
    params: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "seed": 1, "logit_bias": called_for}
    assert word in first(run(llm, **params)).text  # the control
    assert word not in first(run(llm, **params, bad_words=[word])).text


PENALTIES = [
    {"presence_penalty": 1.9},
    {"frequency_penalty": 1.1},
    {"repetition_penalty": 1.7},
    {"presence_penalty": -0.5, "frequency_penalty": 1.0, "repetition_penalty": 1.4},
]


@pytest.mark.parametrize("penalties", PENALTIES, ids=lambda penalties: "+".join(penalties))
def test_penalties_change_greedy_text_as_worked_out_by_hand(
    llm: LLM, raw_logits: Callable[[list[int]], torch.Tensor], penalties: dict[str, float]
) -> None:
    output = run(llm, "the the dog", max_tokens=30, logit_bias={60: 4.0, 61: 4.0}, **penalties)
    prompt, generated = output.prompt_token_ids, first(output).token_ids
    rows = raw_logits(prompt + generated)[len(prompt) - 1 : -1].tolist()
    expected = []
    for step, row in enumerate(rows):
        before = generated[:step]
        for token_id in {*prompt, *before}:
            factor = penalties.get("repetition_penalty", 1.0)
            row[token_id] = row[token_id] / factor if row[token_id] > 0 else row[token_id] * factor
        for token_id in set(before):
            row[token_id] -= penalties.get("presence_penalty", 0.0)
            row[token_id] -= penalties.get("frequency_penalty", 0.0) * before.count(token_id)
        for token_id in (60, 61):
            row[token_id] += 4.0
        expected.append(row.index(max(row)))
    assert generated == expected
    plain = run(llm, "the the dog", max_tokens=30, logit_bias={60: 4.0, 61: 4.0})
    assert first(plain).token_ids != generated  # the control


def test_min_p_of_one_leaves_the_most_likely_token(llm: LLM) -> None:
    greedy = first(run(llm)).token_ids
    hot = {"temperature": 2.0, "seed": 3}
    assert first(run(llm, min_p=1.0, **hot)).token_ids == greedy
    assert first(run(llm, **hot)).token_ids != greedy


def test_logprobs_stay_those_of_the_raw_distribution(llm: LLM) -> None:
    plain, changed = run(llm), run(llm, logit_bias={77: 100.0}, logprobs=0, repetition_penalty=1.5, max_tokens=1)
    (table,) = first(changed).logprobs or []
    whole = first(run(llm, max_tokens=1, logprobs=-1)).logprobs
    assert whole is not None
    assert table[77] == whole[0][77]
    assert table[77].rank != 1
    assert first(plain).token_ids[0] != 77


# ---- logprobs -------------------------------------------------------------------------------------------------------


def test_the_whole_vocabulary_adds_up_to_one(llm: LLM, raw_logits: Callable[[list[int]], torch.Tensor]) -> None:
    output = run(llm, logprobs=-1, max_tokens=3)
    expected = raw_logits(output.prompt_token_ids + first(output).token_ids).log_softmax(-1)
    tables = first(output).logprobs
    assert tables is not None
    for row, table in zip(expected[len(output.prompt_token_ids) - 1 :], tables, strict=False):
        assert sorted(table) == list(range(len(row)))
        assert sum(math.exp(entry.logprob) for entry in table.values()) == pytest.approx(1.0, abs=1e-4)
        assert sorted(entry.rank or 0 for entry in table.values()) == list(range(1, len(row) + 1))
        assert max(abs(row[token_id] - entry.logprob) for token_id, entry in table.items()) < 1e-4


def test_named_tokens_have_their_logprobs_at_every_position(llm: LLM) -> None:
    named = [300, 5, 77]
    params = {"max_tokens": 4, "temperature": 1.0, "seed": 4}
    chosen, whole = run(llm, logprob_token_ids=named, **params), run(llm, logprobs=-1, **params)
    assert first(chosen).token_ids == first(whole).token_ids
    tables, full = first(chosen).logprobs, first(whole).logprobs
    assert tables is not None
    assert full is not None
    for token_id, table, everything in zip(first(chosen).token_ids, tables, full, strict=True):
        assert list(table) == [token_id, *(each for each in named if each != token_id)]
        assert table == {each: everything[each] for each in table}
    assert first(chosen).cumulative_logprob == first(whole).cumulative_logprob


@pytest.mark.parametrize("num_logprobs", [0, 3, -1])
def test_logprobs_of_the_prompt_equal_transformers(
    tiny_llama_dir: Path, raw_logits: Callable[[list[int]], torch.Tensor], num_logprobs: int
) -> None:
    text = "Once upon a time there was a server that answered the same request " * 6
    with LLM(str(tiny_llama_dir), **OPTIONS, max_num_batched_tokens=24, max_num_seqs=4) as llm:
        again = run(llm, text, prompt_logprobs=num_logprobs, max_tokens=1)
        output = run(llm, text, prompt_logprobs=num_logprobs, n=2, temperature=1.0, seed=1, max_tokens=3)
        plain = run(llm, text, n=2, temperature=1.0, seed=1, max_tokens=3)
    ids, tables = output.prompt_token_ids, output.prompt_logprobs
    assert len(ids) > 3 * 24  # several chunks, and what is cached is not read
    assert tables == again.prompt_logprobs
    assert tables is not None
    assert [choice.token_ids for choice in output.outputs] == [choice.token_ids for choice in plain.outputs]
    assert plain.prompt_logprobs is None
    assert (tables[0], len(tables)) == (None, len(ids))
    expected = raw_logits(ids).log_softmax(-1)
    for row, token_id, table in zip(expected, ids[1:], tables[1:], strict=False):
        assert table is not None
        assert next(iter(table)) == token_id
        assert len(table) >= (len(row) if num_logprobs == -1 else num_logprobs)
        assert len(table) <= (len(row) if num_logprobs == -1 else num_logprobs + 1)
        assert max(abs(row[each] - entry.logprob) for each, entry in table.items()) < 1e-4
        assert all(entry.rank == int((row > row[each]).sum()) + 1 for each, entry in list(table.items())[:3])


# ---- text and prompt ------------------------------------------------------------------------------------------------


def test_a_truncated_prompt_is_its_last_tokens(llm: LLM) -> None:
    text = "the quick brown fox jumps over the lazy dog " * 30
    ids = llm.get_tokenizer().encode(text)
    output = run(llm, text, truncate_prompt_tokens=20, prompt_logprobs=0)
    assert output.num_truncated_prompt_tokens == len(ids) - 20
    assert output.prompt_token_ids == ids[-20:]
    whole = run(llm, {"prompt_token_ids": ids[-20:]}, prompt_logprobs=0)
    assert whole.num_truncated_prompt_tokens == 0
    assert (first(output), output.prompt_logprobs) == (first(whole), whole.prompt_logprobs)
    assert len(run(llm, text, truncate_prompt_tokens=-1, max_tokens=30).prompt_token_ids) == min(len(ids), 512 - 30)


def test_a_stop_strings_place_in_the_text(llm: LLM) -> None:
    params: dict[str, Any] = {"max_tokens": 60, "seed": 8, "temperature": 1.0}
    whole = first(run(llm, **params)).text
    stop = whole[20:23]
    without = first(run(llm, **params, stop=[stop]))
    included = first(run(llm, **params, stop=[stop], include_stop_str_in_output=True))
    assert without.text == whole[: whole.index(stop)]
    assert included.text == without.text + stop
    assert without.token_ids == included.token_ids


def test_special_tokens_show_where_asked_for(llm: LLM) -> None:
    forced: dict[str, Any] = {"allowed_token_ids": [IM_START], "max_tokens": 3}
    assert first(run(llm, **forced)).text == ""
    assert first(run(llm, **forced, skip_special_tokens=False)).text == "<|im_start|>" * 3
    stopped = {"stop_token_ids": [IM_START], "skip_special_tokens": False}
    assert first(run(llm, **forced, **stopped)).text == ""
    assert first(run(llm, **forced, **stopped, include_stop_str_in_output=True)).text == "<|im_start|>"


def test_without_detokenization_the_tokens_are_the_same(llm: LLM) -> None:
    plain, silent = first(run(llm, logprobs=1)), first(run(llm, logprobs=1, detokenize=False))
    assert silent.text == ""
    assert silent.token_ids == plain.token_ids
    assert silent.cumulative_logprob == plain.cumulative_logprob


# ---- custom logits processors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiprocessing", ["0", "1"])
def test_a_custom_processor_changes_its_own_request_only(
    llm: LLM, tiny_llama_dir: Path, processors: str, multiprocessing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_ENABLE_MULTIPROCESSING", multiprocessing)
    greedy = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
    params = [SamplingParams(**greedy, extra_args=extra_args) for extra_args in ({}, {"only": 70}, {"only": -1}, {})]
    with LLM(str(tiny_llama_dir), **OPTIONS, logits_processors=[processors]) as own:
        outputs = own.generate([PROMPT] * 4, params, use_tqdm=False)
        with pytest.raises(RequestError, match="only must be a token id") as caught:
            own.generate(PROMPT, SamplingParams(**greedy, extra_args={"only": "x"}), use_tqdm=False)
    assert caught.value.param == "extra_args"
    plain = first(run(llm, max_tokens=5)).token_ids
    assert [first(output).token_ids for output in outputs] == [plain, [70, 71, 72, 73, 74], [], plain]
    assert [first(output).finish_reason for output in outputs] == ["length", "length", "error", "length"]


# ---- defaults -------------------------------------------------------------------------------------------------------


def test_the_models_defaults_apply_where_nothing_is_stated(tiny_llama_dir: Path) -> None:
    recommended = {"temperature": 0.0, "max_new_tokens": 5, "repetition_penalty": 1.3}
    with LLM(str(tiny_llama_dir), **OPTIONS, override_generation_config=recommended) as llm:
        defaults = llm.get_default_sampling_params()
        assert defaults == SamplingParams(temperature=0.0, max_tokens=5, repetition_penalty=1.3)
        (unstated,) = llm.generate(PROMPT, use_tqdm=False)
        (stated,) = llm.generate(PROMPT, defaults, use_tqdm=False)
        assert first(unstated) == first(stated)
        defaults.max_tokens = 7
        assert llm.get_default_sampling_params().max_tokens == 5
        # Parameters of the caller's own are complete: nothing of the model's goes into them.
        own = SamplingParams(temperature=0.0, max_tokens=7)
        assert first(llm.generate(PROMPT, own, use_tqdm=False)[0]).token_ids != first(stated).token_ids
        (short,) = llm.generate({"prompt_token_ids": [5] * 510}, use_tqdm=False)
        assert len(first(short).token_ids) <= 2
