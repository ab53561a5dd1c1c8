"""`lm-eval` over HTTP: its log-likelihoods are, to the last bit, those of octavo's own `LLM`."""

import json
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.tasks import TaskManager
from octavo_server import FOLDER, KEY, MODEL, OctavoServer, run_octavo_side
from transformers import AutoTokenizer

TASKS = FOLDER / "lm_eval_tasks"
MAX_LENGTH = 64  # of lm-eval's windows


@pytest.fixture(autouse=True)
def beside_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TASKS)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)  # the one place where lm-eval looks for it


def evaluate(
    server: OctavoServer, task: str, tokenizer: Path | None, kind: str = "local-completions", **settings: Any
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The metrics of a task, and its samples."""
    stated: dict[str, Any] = {"model": MODEL, "max_retries": 1, "max_length": MAX_LENGTH, "num_concurrent": 4}
    route = "chat/completions" if kind == "local-chat-completions" else "completions"
    stated["base_url"] = f"{server.url}/v1/{route}"
    if tokenizer is not None:
        stated |= {"tokenizer": str(tokenizer), "tokenizer_backend": "huggingface"}
    results = lm_eval.simple_evaluate(
        model=kind,
        model_args=stated | settings,
        tasks=[task],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        apply_chat_template=kind == "local-chat-completions",
        bootstrap_iters=0,
    )
    return results["results"][task], results["samples"][task]


def engine_sums(pairs: list[tuple[list[int], list[int]]]) -> list[float]:
    """The log-likelihood of each second list of ids after the first, from ``LLM``."""
    found: list[float] = json.loads(run_octavo_side("logprobs", given=pairs))
    return found


@pytest.mark.parametrize("settings", [{}, {"batch_size": 4}, {"tokenized_requests": False}], ids=str)
def test_loglikelihoods_are_those_of_the_engine(
    server: OctavoServer, tokenizer_folder: Path, settings: dict[str, Any]
) -> None:
    metrics, samples = evaluate(server, "octavo_facts", tokenizer_folder, **settings)
    encode = AutoTokenizer.from_pretrained(tokenizer_folder).encode
    told, pairs = [], []
    for sample in samples:
        for (context, continuation), ((sum_of_logprobs, _),) in zip(sample["arguments"], sample["resps"], strict=True):
            told.append(float(sum_of_logprobs))
            before, whole = encode(context), encode(context + continuation)
            pairs.append((before, whole[len(before) :]))
    assert told == engine_sums(pairs)
    assert metrics["acc,none"] >= 0.8  # the demo model knows that much
    # What the model would have written itself is told as such.
    assert {is_greedy for sample in samples for ((_, is_greedy),) in sample["resps"]} == {True, False}


def test_whole_texts_and_those_longer_than_the_window(server: OctavoServer, tokenizer_folder: Path) -> None:
    prefix = 0
    metrics, samples = evaluate(server, "octavo_rolling", tokenizer_folder, custom_prefix_token_id=prefix)
    encode = AutoTokenizer.from_pretrained(tokenizer_folder).encode
    long, short = (encode(sample["doc"]["text"]) for sample in samples)
    assert len(short) < MAX_LENGTH < len(long)
    assert [float(samples[1]["resps"][0][0])] == engine_sums([([prefix], short)])
    assert 1 < metrics["word_perplexity,none"] < 1e6


def test_generation_until_a_stop_string(server: OctavoServer, tokenizer_folder: Path) -> None:
    metrics, samples = evaluate(server, "octavo_copies", tokenizer_folder)
    for sample in samples:
        prompt, settings = sample["arguments"][0]
        body = {"prompt": prompt, "max_tokens": settings["max_gen_toks"], "temperature": 0, "stop": "\n"}
        answer = server.http.post("/v1/completions", json=body).json()["choices"][0]
        assert sample["resps"][0] == [answer["text"]]
        assert "\n" not in answer["text"] != ""
    assert 0 <= metrics["exact_match,none"] <= 1


def test_generation_by_chat(server: OctavoServer) -> None:
    _, samples = evaluate(server, "octavo_copies", None, "local-chat-completions")
    assert all(sample["resps"][0][0] for sample in samples)
