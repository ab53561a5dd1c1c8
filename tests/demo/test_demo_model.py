"""The demo model, for real: against transformers in float32, and one run of each promise."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo import LLM, SamplingParams
from octavo.checkpoints import resolve_model

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):",
    "Water boils at",
    "The three most important things in life are",
    "In 1969, the first humans",
    "Dear Sir or Madam,",
    "Ein kleiner Test: 1 + 1 =",
]
MAX_TOKENS = 64


@pytest.fixture(scope="module")
def gguf() -> Path:
    return resolve_model("smollm2")


@pytest.fixture(scope="module")
def reference(gguf: Path) -> tuple[Any, Any]:
    """transformers' own reading of the file, in float32."""
    dequantize = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=dequantize
    )
    return model.eval(), transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


def assert_greedy(reference: tuple[Any, Any], continuations: list[list[int]]) -> None:
    """Each token is transformers' most likely one after all tokens before it: by induction, its greedy continuation."""
    model, tokenizer = reference
    for prompt, continuation in zip(PROMPTS, continuations, strict=True):
        assert len(continuation) == MAX_TOKENS
        prompt_ids = tokenizer(prompt)["input_ids"]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt_ids + continuation])).logits[0, len(prompt_ids) - 1 : -1]
        assert logits.argmax(dim=-1).tolist() == continuation


@pytest.fixture(scope="module")
def hf_dir(reference: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smollm2")
    for part in reference:
        part.save_pretrained(path)
    return path


def generate(model: Path, **options: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    options = {"dtype": "float32", "max_model_len": 1024, "disable_log_stats": True, **options}
    with LLM(str(model), **options) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def continuations(gguf: Path) -> list[list[int]]:
    """octavo's, from the file, all prompts together."""
    return generate(gguf)


def test_greedy_tokens_from_the_gguf_file_equal_transformers(
    reference: tuple[Any, Any], continuations: list[list[int]]
) -> None:
    assert_greedy(reference, continuations)


def test_greedy_tokens_from_the_hugging_face_form_equal_transformers(reference: tuple[Any, Any], hf_dir: Path) -> None:
    assert_greedy(reference, generate(hf_dir))


def test_control_one_other_token_is_noticed(reference: tuple[Any, Any], continuations: list[list[int]]) -> None:
    wrong = [list(ids) for ids in continuations]
    wrong[3][40] = (wrong[3][40] + 1) % 49152
    with pytest.raises(AssertionError):
        assert_greedy(reference, wrong)


def test_the_file_as_it_is_stays_close_to_the_same_weights_in_float32(reference: tuple[Any, Any], gguf: Path) -> None:
    """In bfloat16 the file's weights stay quantized, and what goes into their products is rounded to 8 bits."""
    model, tokenizer = reference
    text = "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do."
    ids = tokenizer(text)["input_ids"]
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with LLM(str(gguf), max_model_len=1024, disable_log_stats=True) as llm:
        found = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0].prompt_logprobs
    assert found is not None
    pairs = [
        (position[token].logprob, float(row[token]))
        for position, token, row in zip(found[1:], ids[1:], expected, strict=True)
        if position is not None
    ]
    differences = [abs(mine - theirs) for mine, theirs in pairs]
    assert 0.0 < sum(differences) / len(differences) < 0.1
    shifted = [abs(mine - theirs) for (mine, _), (_, theirs) in pairwise(pairs)]
    assert sum(shifted) / len(shifted) > 1.0


@pytest.mark.parametrize(
    "numbers",
    [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "kv_cache_dtype": "int8"}],
    ids=["float32", "quantized", "quantized, cache too"],
)
def test_chunks_cache_preemption_and_overlap_leave_the_tokens_alone(
    gguf: Path, numbers: dict[str, str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    easy = generate(gguf, **numbers)
    tight = generate(
        gguf,
        **numbers,
        step_trace=str(trace),
        long_prefill_token_threshold=3,
        num_gpu_blocks_override=64,
        max_num_seqs=8,
        async_scheduling=True,
    )
    steps = [json.loads(line) for line in trace.read_text().splitlines()]
    assert tight == easy
    assert max(step["in_flight"] for step in steps) == 2
    assert max(request["scheduled"] for step in steps for request in step["requests"]) <= 64


def test_chat_answers_an_everyday_question(gguf: Path) -> None:
    with LLM(str(gguf), max_model_len=512) as llm:
        messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
        answer = llm.chat(messages, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)[0]
    assert "Paris" in answer.outputs[0].text
    assert answer.outputs[0].finish_reason == "stop"
    assert "<|im_end|>" not in answer.outputs[0].text
