"""The same request gives the same answer, however it is computed; the step trace proves that it was computed that way.

The same tokens, and logprobs to the last bit: the native kernels promise it.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo import LLM, AsyncLLM, SamplingParams
from octavo.core.kv_cache.block_pool import BlockPool
from octavo.types import RequestOutputKind
from tests.properties.harness import PROMPT_LEN, Runner, assert_same, greedy, prompt, seeded

few = settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


# cached = uncached ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [15, 16, 17, 33, PROMPT_LEN])
def test_a_cached_prefix_changes_nothing(run: Runner, model_dir: Path, length: int) -> None:
    prompts = [prompt(1, length)]
    plain = run(model_dir, prompts, greedy(), enable_prefix_caching=False)
    cached = run(model_dir, prompts, greedy(), rounds=2)
    assert_same(plain.outputs[0], cached.outputs[0])
    assert plain.outputs[0].num_cached_tokens == 0
    assert cached.outputs[0].num_cached_tokens == (length - 1) // 16 * 16
    assert cached.scheduled()[0] == length - (length - 1) // 16 * 16


def test_blocks_written_while_decoding_serve_a_longer_prompt(run: Runner, model_dir: Path) -> None:
    first = run(model_dir, [prompt(2, 100)], greedy(40)).outputs[0]
    longer = prompt(2, 100) + first.outputs[0].token_ids + prompt(3, 5)
    plain = run(model_dir, [longer], greedy(), enable_prefix_caching=False)
    cached = run(model_dir, [prompt(2, 100), longer], [greedy(40), greedy()], max_num_seqs=1)
    assert_same(plain.outputs[0], cached.outputs[1])
    assert cached.outputs[1].num_cached_tokens == (100 + 39) // 16 * 16


# Room for one of the two prompts and a part of the other: the second one takes the end of the first one's blocks.
_EVICTION: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": 384, "num_gpu_blocks_override": 25}


def test_what_an_eviction_has_left_of_a_prefix_changes_nothing(run: Runner, model_dir: Path) -> None:
    prompts = [prompt(8, 80), prompt(9, 340), prompt(8, 80)]
    plain = run(model_dir, prompts, greedy(), enable_prefix_caching=False)
    cached = run(model_dir, prompts, greedy(), **_EVICTION)
    assert 0 < cached.outputs[2].num_cached_tokens < 64
    for index in range(3):
        assert_same(plain.outputs[index], cached.outputs[index])
    roomy = run(model_dir, prompts, greedy(), **_EVICTION | {"num_gpu_blocks_override": 50})
    assert roomy.outputs[2].num_cached_tokens == 64


def test_control_blocks_that_are_still_found_after_their_eviction_are_noticed(
    run: Runner, llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt(8, 80), prompt(9, 340), prompt(8, 80)]
    plain = run(llama_dir, prompts, greedy(), enable_prefix_caching=False)
    monkeypatch.setattr(BlockPool, "_forget", lambda self, block: setattr(block, "block_hash", None))
    wrong = run(llama_dir, prompts, greedy(), **_EVICTION)
    assert wrong.outputs[2].num_cached_tokens == 64
    with pytest.raises(AssertionError):
        assert_same(plain.outputs[2], wrong.outputs[2])


def test_different_salts_share_nothing(llama_dir: Path) -> None:
    with LLM(str(llama_dir), dtype="float32", kv_cache_memory_bytes=1 << 24) as llm:
        found = [
            llm.generate({"prompt_token_ids": prompt(4, 64), "cache_salt": salt}, greedy(2), use_tqdm=False)[0]
            for salt in ("a", "b", "a")
        ]
    assert [output.num_cached_tokens for output in found] == [0, 0, 48]
    assert_same(found[0], found[1])


def test_control_a_wrong_prefix_hit_is_caught(run: Runner, llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts of the same blocks in another order: a lookup that ignores a block's parent mixes them up."""
    first, second, rest = prompt(5, 16), prompt(7, 16), prompt(6, 200)
    prompts = [first + second + rest, second + first + rest]
    plain = run(llama_dir, prompts, greedy(), enable_prefix_caching=False)
    right = run(llama_dir, prompts, greedy(), max_num_seqs=1)
    assert right.outputs[1].num_cached_tokens == 0
    assert_same(plain.outputs[1], right.outputs[1])

    import octavo.core.request as request_room

    honest = request_room.hash_block
    monkeypatch.setattr(request_room, "hash_block", lambda parent, *others: honest(b"", *others))
    wrong = run(llama_dir, prompts, greedy(), max_num_seqs=1)
    assert wrong.outputs[1].num_cached_tokens > 0
    with pytest.raises(AssertionError):
        assert_same(plain.outputs[1], wrong.outputs[1])


# chunked = unchunked -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 16, 17])
def test_chunked_prefill_changes_nothing(run: Runner, model_dir: Path, chunk: int) -> None:
    length = PROMPT_LEN if chunk > 1 else 280
    prompts = [prompt(8, length)]
    whole = run(model_dir, prompts, seeded(3))
    chunked = run(model_dir, prompts, seeded(3), long_prefill_token_threshold=chunk)
    assert_same(whole.outputs[0], chunked.outputs[0])
    assert whole.scheduled()[0] == length
    full, rest = divmod(length, chunk)
    assert chunked.scheduled()[: full + bool(rest)] == [chunk] * full + [rest] * bool(rest)


def test_the_token_budget_splits_prompts_between_requests(run: Runner, model_dir: Path) -> None:
    prompts = [prompt(seed, 100) for seed in range(4)]
    whole = run(model_dir, prompts, greedy())
    tight = run(model_dir, prompts, greedy(), max_num_batched_tokens=64, max_num_seqs=4)
    for a, b in zip(whole.outputs, tight.outputs, strict=True):
        assert_same(a, b)
    assert max(step["num_tokens"] for step in tight.trace) == 64


# preempted = uninterrupted -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_preemption_changes_nothing(run: Runner, model_dir: Path, caching: bool, overlap: bool) -> None:
    prompts = [prompt(seed, 300) for seed in (20, 21, 22)]
    params = [greedy(80), seeded(5, 80), seeded(6, 80)]
    options: dict[str, Any] = {"max_model_len": 400, "enable_prefix_caching": caching, "async_scheduling": overlap}
    roomy = run(model_dir, prompts, params, **options)
    tight = run(model_dir, prompts, params, num_gpu_blocks_override=59, **options)
    assert roomy.preemptions == 0
    assert tight.preemptions >= 1
    for a, b in zip(roomy.outputs, tight.outputs, strict=True):
        assert_same(a, b)


# alone = in a crowd --------------------------------------------------------------------------------------------------

neighbours = st.lists(
    st.tuples(
        st.integers(1, 200),  # prompt length
        st.integers(1, 40),  # output length
        st.sampled_from([0.0, 0.7, 1.5]),  # temperature
        st.sampled_from([0, 1, 7]),  # top_k
        st.sampled_from([1.0, 0.8]),  # top_p
    ),
    min_size=1,
    max_size=7,
)


@few
@given(crowd=neighbours, position=st.integers(0, 7), seed=st.integers(0, 2**31))
def test_a_request_alone_equals_the_same_among_neighbours(
    run: Runner, llama_dir: Path, crowd: list[tuple[int, int, float, int, float]], position: int, seed: int
) -> None:
    subjects = [greedy(16), seeded(seed, 16)]
    prompts = [prompt(seed + index, length) for index, (length, *_) in enumerate(crowd)]
    params: list[SamplingParams] = [
        SamplingParams(max_tokens=count, temperature=temperature, top_k=top_k, top_p=top_p, ignore_eos=index % 2 == 0)
        for index, (_, count, temperature, top_k, top_p) in enumerate(crowd)
    ]
    subject_prompt = prompt(seed, 300)
    for subject in subjects:
        alone = run(llama_dir, [subject_prompt], subject)
        at = min(position, len(crowd))
        among = run(
            llama_dir,
            [*prompts[:at], subject_prompt, *prompts[at:]],
            [*params[:at], subject, *params[at:]],
            max_num_batched_tokens=256,
            max_num_seqs=8,
        )
        assert_same(alone.outputs[0], among.outputs[at])
        assert max(len(step["requests"]) for step in among.trace) >= 2


def test_choices_of_one_request_are_independent_and_reproducible(run: Runner, llama_dir: Path) -> None:
    many = run(llama_dir, [prompt(30, 50)], seeded(9, n=4)).outputs[0]
    again = run(llama_dir, [prompt(31, 20), prompt(30, 50)], [greedy(), seeded(9, n=4)]).outputs[1]
    assert_same(many, again)
    assert [choice.index for choice in many.outputs] == [0, 1, 2, 3]
    assert len({tuple(choice.token_ids) for choice in many.outputs}) == 4


def test_unseeded_requests_differ_and_follow_the_engines_seed(run: Runner, llama_dir: Path) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=24, logprobs=5, ignore_eos=True)
    first = run(llama_dir, [prompt(32, 20)] * 2, params, seed=1)
    second = run(llama_dir, [prompt(32, 20)] * 2, params, seed=1)
    other = run(llama_dir, [prompt(32, 20)] * 2, params, seed=2)
    tokens = [[output.outputs[0].token_ids for output in r.outputs] for r in (first, second, other)]
    assert tokens[0] == tokens[1]
    assert tokens[0][0] != tokens[0][1]
    assert tokens[0][0] != tokens[2][0]


# however the steps are scheduled, wherever the engine runs -----------------------------------------------------------

WORK = [prompt(40, 300), prompt(41, 20), prompt(42, 77), prompt(43, 1)]
PARAMS = [greedy(30), seeded(1, 30), greedy(3), seeded(2, 30, n=2)]


def test_async_scheduling_equals_sync(run: Runner, model_dir: Path) -> None:
    options = {"max_num_batched_tokens": 128, "max_num_seqs": 8}
    plain = run(model_dir, WORK, PARAMS, async_scheduling=False, **options)
    overlapped = run(model_dir, WORK, PARAMS, async_scheduling=True, **options)
    for a, b in zip(plain.outputs, overlapped.outputs, strict=True):
        assert_same(a, b)
    assert max(step["in_flight"] for step in plain.trace) == 1
    assert max(step["in_flight"] for step in overlapped.trace) == 2


def test_async_scheduling_stops_where_sync_stops(run: Runner, llama_dir: Path) -> None:
    """A stop token is known only one step late; what was computed beyond it must not show."""
    free = run(llama_dir, [prompt(44, 30)], seeded(4, 30)).outputs[0].outputs[0].token_ids
    stop = next(token for index, token in enumerate(free) if index >= 8 and token not in free[:index])
    params = seeded(4, 30, stop_token_ids=[stop])
    results = [run(llama_dir, [prompt(44, 30)], params, async_scheduling=on).outputs[0] for on in (False, True)]
    assert_same(*results)
    assert results[0].outputs[0].token_ids == free[: free.index(stop) + 1]
    assert results[0].outputs[0].stop_reason == results[1].outputs[0].stop_reason == stop


def test_a_process_of_its_own_changes_nothing(run: Runner, llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = run(llama_dir, WORK, PARAMS)
    monkeypatch.setenv("OCTAVO_ENABLE_MULTIPROCESSING", "1")
    outside = run(llama_dir, WORK, PARAMS)
    for a, b in zip(inside.outputs, outside.outputs, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("overlap", [True, False])
def test_nothing_relies_on_objects_shared_with_the_worker(run: Runner, llama_dir: Path, overlap: bool) -> None:
    options: dict[str, Any] = {"async_scheduling": overlap, "max_model_len": 400, "num_gpu_blocks_override": 26}
    direct = run(llama_dir, WORK, PARAMS, **options)
    through = run(llama_dir, WORK, PARAMS, distributed_executor_backend="roundtrip", **options)
    for a, b in zip(direct.outputs, through.outputs, strict=True):
        assert_same(a, b)
    assert direct.preemptions >= 1


def test_streamed_equals_not_streamed(run: Runner, llama_dir: Path) -> None:
    whole = run(llama_dir, WORK, PARAMS)

    async def stream(llm: AsyncLLM, index: int) -> tuple[list[str], list[list[int]]]:
        params = PARAMS[index].clone()
        params.output_kind = RequestOutputKind.DELTA
        texts, ids = [""] * params.n, [[] for _ in range(params.n)]
        async for output in llm.generate({"prompt_token_ids": WORK[index]}, params, f"r{index}"):
            for choice in output.outputs:
                texts[choice.index] += choice.text
                ids[choice.index] += choice.token_ids
        return texts, ids

    async def everything() -> list[tuple[list[str], list[list[int]]]]:
        llm = AsyncLLM(model=str(llama_dir), dtype="float32", seed=0, kv_cache_memory_bytes=1 << 24)
        try:
            return list(await asyncio.gather(*(stream(llm, index) for index in range(len(WORK)))))
        finally:
            llm.shutdown()

    for output, (texts, ids) in zip(whole.outputs, asyncio.run(everything()), strict=True):
        assert [choice.text for choice in output.outputs] == texts
        assert [choice.token_ids for choice in output.outputs] == ids


# controls ------------------------------------------------------------------------------------------------------------


def test_control_another_model_is_noticed(run: Runner, llama_dir: Path, sliding_dir: Path) -> None:
    outputs = [run(path, [prompt(50, 40)], greedy()).outputs[0] for path in (llama_dir, sliding_dir)]
    with pytest.raises(AssertionError):
        assert_same(*outputs)


def test_control_the_window_matters(run: Runner, sliding_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt longer than the window gives another answer when a token outside the window is visible."""
    import json

    plain = run(sliding_dir, [prompt(51)], greedy()).outputs[0]
    config_file = sliding_dir / "config.json"
    saved = config_file.read_text()
    try:
        config_file.write_text(json.dumps({**json.loads(saved), "sliding_window": 1024}))
        wide = run(sliding_dir, [prompt(51)], greedy()).outputs[0]
    finally:
        config_file.write_text(saved)
    with pytest.raises(AssertionError):
        assert_same(plain, wide)
