"""The demo model, for real: against transformers in float32, and one run of each promise."""

import json
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


@pytest.fixture(scope="module")
def expected(reference: tuple[Any, Any]) -> list[list[int]]:
    """Greedy continuations."""
    model, tokenizer = reference
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            out = model.generate(**ids, max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=[], pad_token_id=0)
        found.append(out[0, ids["input_ids"].shape[1] :].tolist())
    return found


@pytest.fixture(scope="module")
def hf_dir(reference: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smollm2")
    for part in reference:
        part.save_pretrained(path)
    return path


def generate(model: Path, **options: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with LLM(str(model), dtype="float32", max_model_len=1024, disable_log_stats=True, **options) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_greedy_tokens_from_the_hugging_face_form_equal_transformers(hf_dir: Path, expected: list[list[int]]) -> None:
    assert generate(hf_dir) == expected


def test_greedy_tokens_from_the_gguf_file_equal_transformers(gguf: Path, expected: list[list[int]]) -> None:
    assert generate(gguf) == expected


def test_chunks_cache_preemption_and_overlap_leave_the_tokens_alone(
    gguf: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    tight = generate(
        gguf,
        step_trace=str(trace),
        long_prefill_token_threshold=3,
        num_gpu_blocks_override=64,
        max_num_seqs=8,
        async_scheduling=True,
        block_size=4 * 4,
    )
    steps = [json.loads(line) for line in trace.read_text().splitlines()]
    assert tight == expected
    assert max(step["in_flight"] for step in steps) == 2
    assert max(request["scheduled"] for step in steps for request in step["requests"]) <= 64


def test_chat_answers_an_everyday_question(gguf: Path) -> None:
    with LLM(str(gguf), max_model_len=512) as llm:
        messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
        answer = llm.chat(messages, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)[0]
    assert "Paris" in answer.outputs[0].text
    assert answer.outputs[0].finish_reason == "stop"
    assert "<|im_end|>" not in answer.outputs[0].text
