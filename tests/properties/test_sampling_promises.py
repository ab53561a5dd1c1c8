"""The parameters of sampling keep the promises too: logprobs of prompts, penalties, seeds, custom processors.

Fixed cases with long prompts; test_promises_drawn.py has many short ones. The step trace proves how it was computed.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo import LLM, SamplingParams
from octavo.checkpoints import resolve_model
from tests.properties.harness import (
    PROMPT_LEN,
    Run,
    Runner,
    assert_same,
    assert_same_prompt_logprobs,
    greedy,
    prompt,
    seeded,
)
from tests.worker.processors import NAMES


def told(run: Run) -> list[int]:
    """Positions of prompts whose logprobs each step computed, where it did."""
    return [step["prompt_logprobs"] for step in run.trace if step["prompt_logprobs"]]


# logprobs of the prompt ----------------------------------------------------------------------------------------------


def test_they_are_those_of_the_model_at_every_position(run: Runner, model_dir: Path) -> None:
    ids = prompt(80)
    found = run(model_dir, [ids], greedy(1, prompt_logprobs=3)).outputs[0].prompt_logprobs
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].double().log_softmax(dim=-1)
    assert found is not None
    assert found[0] is None
    assert len(found) == PROMPT_LEN
    for position in range(1, PROMPT_LEN):
        before, table = expected[position - 1], found[position]
        assert table is not None
        assert next(iter(table)) == ids[position]
        assert len(table) in (3, 4)
        for token_id, entry in table.items():
            assert entry.logprob == pytest.approx(float(before[token_id]), abs=1e-4)
        assert table[ids[position]].rank == pytest.approx(int((before > before[ids[position]]).sum()) + 1, abs=1)
        assert {entry.rank for entry in table.values()} >= {1, 2, 3}


def test_they_are_the_same_whether_the_prompt_is_in_the_cache_or_not(run: Runner, model_dir: Path) -> None:
    """A request that asks leaves the cache to others: it writes, but does not read."""
    work = [prompt(81), prompt(81)]
    params = [greedy(8, prompt_logprobs=5), greedy(8)]
    missed = run(model_dir, work, params, enable_prefix_caching=False)
    cached = run(model_dir, work, params, rounds=2)
    assert [output.num_cached_tokens for output in cached.outputs] == [0, (PROMPT_LEN - 1) // 16 * 16]
    assert told(cached) == [PROMPT_LEN - 1]
    for a, b in zip(missed.outputs, cached.outputs, strict=True):
        assert_same(a, b)
    # In the first round it was the one that asked from whom the other one had them.
    first = run(model_dir, work, params, max_num_seqs=1)
    assert [output.num_cached_tokens for output in first.outputs] == [0, (PROMPT_LEN - 1) // 16 * 16]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_text_is_the_same_with_and_without_them(run: Runner, llama_dir: Path, overlap: bool) -> None:
    work = [prompt(82, 300), prompt(83, 33), prompt(84, 1)]
    params = [greedy(), seeded(7, n=2), seeded(8)]
    asking = [each.clone() for each in params]
    for each in asking:
        each.prompt_logprobs = 2
    options: dict[str, Any] = {"async_scheduling": overlap, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    without, with_them = run(llama_dir, work, params, **options), run(llama_dir, work, asking, **options)
    assert sum(told(with_them)) == 299 + 32
    assert told(without) == []
    for a, b in zip(without.outputs, with_them.outputs, strict=True):
        assert b.prompt_logprobs is not None
        b.prompt_logprobs = None
        assert_same(a, b)


@pytest.mark.parametrize("chunk", [16, 17, 150])
def test_they_are_the_same_in_chunks(run: Runner, model_dir: Path, chunk: int) -> None:
    params = seeded(3, 8, prompt_logprobs=4)
    whole = run(model_dir, [prompt(85)], params)
    chunked = run(model_dir, [prompt(85)], params, long_prefill_token_threshold=chunk)
    assert told(whole) == [PROMPT_LEN - 1]
    full, rest = divmod(PROMPT_LEN - 1, chunk)
    assert told(chunked) == [chunk] * full + [rest] * bool(rest)
    assert_same(whole.outputs[0], chunked.outputs[0])


@pytest.mark.parametrize("overlap", [False, True])
def test_they_survive_a_preemption_in_the_middle_of_the_prompt(run: Runner, llama_dir: Path, overlap: bool) -> None:
    """The first generates while the prompt of the second is computed in small chunks, until blocks run out."""
    work = [prompt(86, 16), prompt(87, 300)]
    params = [greedy(120), seeded(4, 12, prompt_logprobs=3)]
    options: dict[str, Any] = {"long_prefill_token_threshold": 4, "async_scheduling": overlap, "max_model_len": 330}
    roomy = run(llama_dir, work, params, **options)
    # Enough for the prompt beside the other one as that is at first, and not as it is 60 tokens later.
    tight = run(llama_dir, work, params, num_gpu_blocks_override=22, **options)
    second = tight.outputs[1].request_id
    assert roomy.preemptions == 0
    lost = [step["step"] for step in tight.trace if second in step["preempted"]]
    samples = [s["step"] for s in tight.trace for r in s["requests"] if r["id"] == second and r["samples"]]
    assert lost
    assert lost[0] < samples[0]
    # Computed again, delivered once: assert_same compares the numbers of tables.
    assert sum(told(tight)) > 299 == sum(told(roomy))
    for a, b in zip(roomy.outputs, tight.outputs, strict=True):
        assert_same(a, b)


def test_of_several_choices_one_computes_them(run: Runner, llama_dir: Path) -> None:
    found = run(llama_dir, [prompt(88, 50)], seeded(5, 6, n=3, prompt_logprobs=1))
    assert told(found) == [49]
    assert len(found.outputs[0].outputs) == 3
    alone = run(llama_dir, [prompt(88, 50)], greedy(1, prompt_logprobs=1))
    assert_same_prompt_logprobs(found.outputs[0], alone.outputs[0])


def test_the_real_model_gives_the_same_on_hit_and_miss() -> None:
    params = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=2, logprobs=2)
    text = "The capital of France is Paris, and the capital of Italy is Rome. " * 4
    with LLM(str(resolve_model("smollm2")), kv_cache_memory_bytes=1 << 25, disable_log_stats=True) as llm:
        first, second = (llm.generate(text, params, use_tqdm=False)[0] for _ in range(2))
        params.prompt_logprobs = None
        plain = llm.generate(text, params, use_tqdm=False)[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)
    assert plain.num_cached_tokens > 16
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs == second.prompt_logprobs  # computed in the same shapes: bit for bit
    assert first.outputs[0].text == second.outputs[0].text == plain.outputs[0].text
    # Said for the second time it is no surprise.
    logprobs = [
        table[token_id].logprob
        for token_id, table in zip(first.prompt_token_ids, first.prompt_logprobs, strict=True)
        if table is not None
    ]
    quarter = len(logprobs) // 4
    assert sum(logprobs[-quarter:]) > 0.35 * sum(logprobs[:quarter])


# penalties and other changes of the logits ---------------------------------------------------------------------------

FEW = list(range(30, 1100, 23))
PENALIZED = {
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "presence_penalty": 0.2,
    "allowed_token_ids": FEW,
    "bad_words_token_ids": [[FEW[3]], [FEW[5], FEW[6]], [FEW[6], FEW[5]]],
    "logit_bias": {FEW[0]: 2.0},
}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_penalties_survive_preemption_with_several_choices(
    run: Runner, llama_dir: Path, caching: bool, overlap: bool
) -> None:
    work = [prompt(seed, 200) for seed in (90, 91)]
    params = [seeded(5, 60, n=2, **PENALIZED), greedy(60, **PENALIZED)]
    options: dict[str, Any] = {"max_model_len": 300, "enable_prefix_caching": caching, "async_scheduling": overlap}
    roomy = run(llama_dir, work, params, **options)
    tight = run(llama_dir, work, params, num_gpu_blocks_override=30 if caching else 42, **options)
    assert roomy.preemptions == 0
    assert tight.preemptions >= 1
    for a, b in zip(roomy.outputs, tight.outputs, strict=True):
        assert_same(a, b)
    tokens = [token_id for output in roomy.outputs for choice in output.outputs for token_id in choice.token_ids]
    assert set(tokens) <= set(FEW) - {FEW[3]}
    # They had something to act on.
    assert len(tokens) > 3 * len(set(tokens))


def test_control_penalties_that_forget_what_was_generated_are_noticed(
    run: Runner, llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import octavo.sample.request_changes as room

    params = greedy(30, **PENALIZED)
    right = run(llama_dir, [prompt(92, 100)], params)
    honest = room.RequestChanges.row
    # The output as it was when the request came.
    monkeypatch.setattr(room.RequestChanges, "row", lambda self, ids, count: honest(self, ids[: count + 1], count))
    wrong = run(llama_dir, [prompt(92, 100)], params)
    with pytest.raises(AssertionError):
        assert_same(right.outputs[0], wrong.outputs[0])


# seeds ---------------------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_text_in_a_batch_alone_and_after_a_restart(run: Runner, llama_dir: Path) -> None:
    params = seeded(123, 20, n=3, temperature=1.5, top_k=0, top_p=1.0, min_p=0.01)
    crowd = [params, *(seeded(seed, 20, **PENALIZED) for seed in range(5))]
    work = [prompt(seed, 40) for seed in range(93, 99)]
    together = run(llama_dir, work, crowd, seed=1).outputs[0]
    alone = run(llama_dir, work[:1], params, seed=2).outputs[0]
    assert_same(together, alone)
    # The choices are three different texts, each with the engine's seed having nothing to do with it.
    assert len({choice.text for choice in alone.outputs}) == 3
    other = run(llama_dir, work[:1], seeded(124, 20, n=3, temperature=1.5, top_k=0, top_p=1.0, min_p=0.01)).outputs[0]
    assert not {choice.text for choice in alone.outputs} & {choice.text for choice in other.outputs}


# custom processors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["sync", "async", "roundtrip", "own process"])
def test_custom_processors_see_their_own_request_only(
    run: Runner, llama_dir: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    options: dict[str, Any] = {
        "sync": {},
        "async": {"async_scheduling": True},
        "roundtrip": {"distributed_executor_backend": "roundtrip"},
        "own process": {},
    }[way]
    if way == "own process":
        monkeypatch.setenv("OCTAVO_ENABLE_MULTIPROCESSING", "1")
    work = [[40, *prompt(99, 20)], prompt(100, 20)]
    boosted = greedy(6, extra_args={"boost": 500.0})
    found = run(llama_dir, work, [boosted, greedy(6)], logits_processors=NAMES, **options)
    assert found.outputs[0].outputs[0].token_ids == [40, 41, 42, 43, 44, 45]
    plain = run(llama_dir, work[1:], greedy(6))
    assert_same(plain.outputs[0], found.outputs[1])
