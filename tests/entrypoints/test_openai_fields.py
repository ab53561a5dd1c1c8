"""Fields of vLLM's API through the `openai` package, over the real engine: what each does; and as transformers does."""

import itertools
import math
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers

from tests.entrypoints.live import LiveServer

pytestmark = pytest.mark.usefixtures("live_canary")
TALK: Any = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "I am fine, "}]


@pytest.fixture(scope="module")
def reference(tiny_llama_dir: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_dir: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(tiny_llama_dir)


@torch.no_grad()
def logprobs_of(reference: Any, token_ids: list[int]) -> Any:
    """float32 [num_tokens, vocabulary]: after each token, of what comes next."""
    return torch.log_softmax(reference(torch.tensor([token_ids])).logits[0].float(), dim=-1)


# as lm-eval asks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_loglikelihoods_are_those_of_transformers(client: openai.OpenAI, reference: Any, max_tokens: int) -> None:
    """Batches of context and continuation as ids; twice, for the second time finds its prefixes in the cache."""
    pairs = [(list(range(40, 40 + size)), list(range(90, 90 + size // 2))) for size in (2, 17, 34, 60)]
    prompts = [context + continuation for context, continuation in pairs]
    for _ in range(2):
        answer = client.completions.create(
            model="tiny", prompt=prompts, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0, seed=1234
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        for choice, (context, continuation) in zip(answer.choices, pairs, strict=True):
            found = choice.logprobs
            assert found is not None
            assert found.token_logprobs is not None
            assert found.top_logprobs is not None
            assert found.token_logprobs[0] is None
            assert len(found.token_logprobs) == len(context) + len(continuation) + max_tokens
            expected = logprobs_of(reference, context + continuation)
            for position in range(1, len(context) + len(continuation)):
                token_id = (context + continuation)[position]
                logprob = found.token_logprobs[position]
                assert logprob == pytest.approx(float(expected[position - 1, token_id]), abs=1e-4)
                is_greedy = int(expected[position - 1].argmax()) == token_id
                assert (logprob == max(found.top_logprobs[position].values())) == is_greedy


def test_prompt_logprobs_are_those_of_transformers(client: openai.OpenAI, reference: Any) -> None:
    token_ids = list(range(50, 90))
    answer = client.completions.create(model="tiny", prompt=token_ids, max_tokens=1, extra_body={"prompt_logprobs": 3})
    tables = answer.choices[0].model_extra["prompt_logprobs"]  # type: ignore[index]
    assert tables[0] is None
    expected = logprobs_of(reference, token_ids)
    for position, table in enumerate(tables[1:], 1):
        row = expected[position - 1]
        for token_id, entry in table.items():
            assert entry["logprob"] == pytest.approx(float(row[int(token_id)]), abs=1e-4)
            assert entry["rank"] == 1 + int((row > row[int(token_id)]).sum())
        assert sorted(entry["rank"] for entry in table.values())[:3] == [1, 2, 3]
        assert str(token_ids[position]) in table


def test_an_echoed_stream_has_the_text_and_logprobs_of_the_whole(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "tiny",
        "prompt": "Once upon a time, é 🙂",
        "echo": True,
        "logprobs": 2,
        "max_tokens": 6,
        "temperature": 0,
    }
    whole = client.completions.create(**fields).choices[0]
    parts = [chunk.choices[0] for chunk in client.completions.create(**fields, stream=True)]
    assert "".join(part.text for part in parts) == whole.text
    assert whole.text.startswith(fields["prompt"])
    assert whole.logprobs is not None
    for name in ("tokens", "text_offset"):
        assert [value for part in parts if part.logprobs for value in getattr(part.logprobs, name)] == getattr(
            whole.logprobs, name
        )
    offsets = whole.logprobs.text_offset or []
    assert offsets == sorted(offsets)
    for offset, token in zip(offsets, whole.logprobs.tokens or [], strict=True):
        if "\ufffd" not in token and not token.startswith("<|"):
            assert whole.text[offset : offset + len(token)] == token


# what may be generated -----------------------------------------------------------------------------------------------


def completion(client: openai.OpenAI, **fields: Any) -> Any:
    """The choice's token ids, and the choice."""
    common = {"return_token_ids": True, "ignore_eos": True}
    stated = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0}
    extra = fields.pop("extra", {})
    choice = client.completions.create(**(stated | fields), extra_body=common | extra).choices[0]
    assert choice.model_extra is not None
    return choice.model_extra["token_ids"], choice


def test_bias_forces_and_forbids(client: openai.OpenAI) -> None:
    free, _ = completion(client)
    assert completion(client, logit_bias={"77": 100})[0] == [77] * 8
    assert free[0] not in completion(client, logit_bias={str(free[0]): -100})[0]


def test_allowed_tokens_are_the_only_ones(client: openai.OpenAI) -> None:
    found, _ = completion(client, temperature=2, seed=3, extra={"allowed_token_ids": [70, 71, 72]})
    assert set(found) <= {70, 71, 72}
    assert len(set(found)) > 1


def test_words_and_tokens_that_leave_nothing_on_the_way_are_the_clients_mistake(client: openai.OpenAI) -> None:
    """The first token is free; after it the only one that is allowed would complete a bad word."""
    (letter,) = completion(client, prompt="a")[1].model_extra["prompt_token_ids"]
    fields = {"allowed_token_ids": [letter], "bad_words": ["aa"]}
    with pytest.raises(openai.BadRequestError, match="no token is left that may come next"):
        completion(client, extra=fields)
    assert completion(client, max_tokens=1, extra=fields)[0] == [letter]


def test_bad_words_are_not_said(client: openai.OpenAI) -> None:
    free = completion(client)[1].text
    word = free[:2]
    assert word not in completion(client, extra={"bad_words": [word]})[1].text


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_penalties_make_for_variety(client: openai.OpenAI, field: str) -> None:
    biased = {"logit_bias": {str(token_id): 50 for token_id in range(60, 76)}}
    value = 1.9
    repeated, _ = completion(client, max_tokens=16, **biased)
    varied, _ = completion(client, max_tokens=16, **biased, extra={field: value})
    assert len(set(varied)) >= len(set(repeated))
    assert varied != repeated


def test_a_min_p_of_one_is_greedy(client: openai.OpenAI) -> None:
    assert completion(client, temperature=2, extra={"min_p": 1})[0] == completion(client)[0]


def test_the_stop_string_may_be_part_of_the_text(client: openai.OpenAI, golden: str) -> None:
    stop = golden[3:5]
    fields = {"prompt": "Once upon a time", "max_tokens": 12, "stop": stop}
    without = completion(client, **fields)[1].text
    assert completion(client, **fields, extra={"include_stop_str_in_output": True})[1].text == without + stop


def test_special_tokens_may_be_shown(client: openai.OpenAI) -> None:
    fields = {"logit_bias": {"1": 100}, "max_tokens": 2}
    assert completion(client, **fields)[1].text == ""
    assert completion(client, **fields, extra={"skip_special_tokens": False})[1].text == "<|im_start|>" * 2


def test_without_text_there_are_ids(client: openai.OpenAI) -> None:
    ids, choice = completion(client, extra={"detokenize": False})
    assert (ids, choice.text) == (completion(client)[0], "")


def test_choices_differ_by_their_number_and_are_the_same_again(client: openai.OpenAI) -> None:
    def texts() -> list[str]:
        answer = client.completions.create(model="tiny", prompt="hello", n=4, seed=5, max_tokens=12, temperature=1.5)
        return [choice.text for choice in answer.choices]

    first = texts()
    assert len(set(first)) == 4
    assert texts() == first


def test_logprobs_of_chosen_tokens_are_those_of_transformers(client: openai.OpenAI, reference: Any) -> None:
    prompt = list(range(50, 60))
    _, choice = completion(
        client, prompt=prompt, extra={"logprob_token_ids": [5, 300], "return_tokens_as_token_ids": True}, max_tokens=1
    )
    row = logprobs_of(reference, prompt)[-1]
    top = choice.logprobs.top_logprobs[0]
    for token_id in (5, 300):
        assert top[f"token_id:{token_id}"] == pytest.approx(float(row[token_id]), abs=1e-4)


# prompts -------------------------------------------------------------------------------------------------------------


def test_a_message_that_is_gone_on_with(client: openai.OpenAI, live: LiveServer, tokenizer: Any) -> None:
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    answer = client.chat.completions.create(
        model="tiny", messages=TALK, max_tokens=4, extra_body=fields | {"return_token_ids": True, "echo": True}
    )
    assert answer.model_extra is not None
    prompt = tokenizer.decode(answer.model_extra["prompt_token_ids"])
    assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nI am fine, "
    assert (answer.choices[0].message.content or "").startswith("I am fine, ")
    tokenized = httpx.post(live.url + "/tokenize", json={"messages": TALK} | fields).json()
    assert tokenized["tokens"] == answer.model_extra["prompt_token_ids"]


def test_texts_are_tokenized_as_transformers_does(live: LiveServer, tokenizer: Any) -> None:
    for text in ("hello, how are you?", "é 🙂\n<|im_end|>x", "server"):
        body = {"prompt": text, "return_token_strs": True}
        found = httpx.post(live.url + "/tokenize", json=body).json()
        assert found["tokens"] == tokenizer(text)["input_ids"]
        assert found["token_strs"] == tokenizer.convert_ids_to_tokens(found["tokens"])
        assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 512)
        text_again = httpx.post(live.url + "/detokenize", json={"tokens": found["tokens"]}).json()["prompt"]
        assert text_again == text


def test_a_truncated_prompt_is_told_in_header_and_body(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt=[7] * 1000, max_tokens=2, extra_body={"truncate_prompt_tokens": -1, "colour": "red"}
    )
    assert raw.headers["x-octavo-truncated"] == str(1000 - 510)
    assert raw.headers["x-octavo-ignored"] == "colour"
    answer = raw.parse()
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 510
    assert answer.model_extra == {"prompt_truncated_tokens": 490}


def test_streamed_token_ids_add_up(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": TALK[:1], "max_tokens": 12, "seed": 1, "n": 2}
    extra = {"return_token_ids": True, "ignore_eos": True}
    whole = client.chat.completions.create(**fields, extra_body=extra)
    chunks = list(client.chat.completions.create(**fields, extra_body=extra, stream=True))
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        ids = [(part.model_extra or {}).get("token_ids") or [] for part in parts]
        assert choice.model_extra is not None
        assert list(itertools.chain(*ids)) == choice.model_extra["token_ids"]
        assert len(choice.model_extra["token_ids"]) == 12


def test_a_distribution_adds_up_to_one(client: openai.OpenAI) -> None:
    """F9, as far as twenty tokens go: the listed probabilities are in order and not above one together."""
    answer = client.chat.completions.create(
        model="tiny", messages=TALK[:1], max_tokens=3, logprobs=True, top_logprobs=20
    )
    assert answer.choices[0].logprobs is not None
    for entry in answer.choices[0].logprobs.content or []:
        listed = [top.logprob for top in entry.top_logprobs]
        assert listed == sorted(listed, reverse=True)
        assert 0 < sum(map(math.exp, listed)) <= 1 + 1e-3
