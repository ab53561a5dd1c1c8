"""The promises of test_promises.py over drawn workloads: every way of computing gives what the plainest way gives.

Plain is: synchronous, whole prompts, no prefix cache, room for all, one process, no executor between. Its forward is
replayed or computed by Python (eager), and so is that of all others, or the other way. Short prompts here, for many
shapes of work; the fixed cases have the long ones. Fixed draws, unless OCTAVO_HYPOTHESIS=random.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from octavo import SamplingParams
from octavo.models import llama
from tests.properties.harness import SHAPE, Run, Runner, assert_same, prompt, save_model, with_window

EXPLORE = os.environ.get("OCTAVO_HYPOTHESIS") == "random"
NARROW = 29  # a window that most of the drawn sequences outgrow
PLAIN: dict[str, Any] = {
    "async_scheduling": False,
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 64,
}


def drawn(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples * (10 if EXPLORE else 1),
        derandomize=not EXPLORE,
        deadline=None,
        # Making a failure smaller takes minutes: only for those who explore.
        phases=list(Phase) if EXPLORE else [Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


# what is drawn -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """Requests, and the shape of the engine that is to make no difference to them."""

    model: str  # "full", "narrow" (window in every layer) or "hybrid" (in the second)
    prompt_seed: int
    prompt_lengths: list[tuple[int, int]]  # of the beginning that all share, and of what is its own
    params: list[SamplingParams]
    priority: list[int]
    policy: str
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    chunk: int
    spare_blocks: int
    caching: bool  # where a variation leaves it open
    kv_cache_dtype: str
    eager: tuple[bool, bool]  # whether the forward is computed by Python: the plain way, and all others

    @property
    def plain(self) -> dict[str, Any]:
        return {**PLAIN, "kv_cache_dtype": self.kv_cache_dtype, "enforce_eager": self.eager[0]}

    @cached_property
    def prompts(self) -> list[list[int]]:
        common = prompt(self.prompt_seed, 80)
        own = [prompt(self.prompt_seed + 1 + index, length) for index, (_, length) in enumerate(self.prompt_lengths)]
        return [common[:shared] + ids for (shared, _), ids in zip(self.prompt_lengths, own, strict=True)]

    @property
    def tight_blocks(self) -> int:
        """Enough for the largest request and ``spare_blocks`` more."""
        lengths = [len(ids) + (params.max_tokens or 0) for ids, params in zip(self.prompts, self.params, strict=True)]
        groups = 2 if self.model == "hybrid" else 1
        return groups * -(-max(lengths) // self.block_size) + self.spare_blocks

    @property
    def num_sequences(self) -> int:
        return sum(params.n for params in self.params)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    temperature = draw(st.sampled_from([0.0, 0.7, 1.0, 1.5]))
    max_tokens = draw(st.integers(1, 30))
    # A tenth of the vocabulary: some requests meet one of it.
    first_stop = draw(st.none() | st.integers(2, 900))
    return SamplingParams(
        temperature=temperature,
        n=draw(st.integers(1, 3)) if temperature else 1,
        top_k=draw(st.sampled_from([0, 1, 7, 40])),
        top_p=draw(st.sampled_from([1.0, 0.8, 0.95])),
        seed=draw(st.integers(0, 2**31)),
        max_tokens=max_tokens,
        min_tokens=draw(st.just(0) | st.integers(0, max_tokens)),
        stop_token_ids=[] if first_stop is None else list(range(first_stop, first_stop + 110)),
        ignore_eos=draw(st.booleans()),
        prompt_logprobs=draw(st.sampled_from([None, None, 0, 5])),
        **draw(logits_changes()),
    )


@st.composite
def logits_changes(draw: st.DrawFn) -> dict[str, Any]:
    """Parameters that change logits, half of the time. Where few tokens are allowed they meet often: penalties and bad
    words have something to act on."""
    if draw(st.booleans()):
        return {"logprobs": 5}
    few = list(range(draw(st.integers(2, 29)), 1100, 27))
    allowed = draw(st.none() | st.just(few))
    ids = st.sampled_from(few)
    penalty = st.sampled_from([0.0, 0.6, -0.4])
    return {
        "repetition_penalty": draw(st.sampled_from([1.0, 1.3])),
        "frequency_penalty": draw(penalty),
        "presence_penalty": draw(penalty),
        "logit_bias": draw(st.dictionaries(ids, st.sampled_from([4.0, -100.0]), max_size=5)),
        "allowed_token_ids": allowed,
        "bad_words_token_ids": draw(st.lists(st.lists(ids, min_size=1, max_size=2), max_size=8)),
        "min_p": draw(st.sampled_from([0.0, 0.01])),
        **draw(st.sampled_from([{"logprobs": 5}, {"logprob_token_ids": [few[3], 7, 1000]}])),
    }


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    lengths = draw(st.lists(st.tuples(st.integers(0, 80), st.integers(1, 40)), min_size=1, max_size=5))
    return Workload(
        model=draw(st.sampled_from(["full", "narrow", "hybrid"])),
        prompt_seed=draw(st.integers(0, 2**16)),
        prompt_lengths=lengths,
        params=[draw(sampling_params()) for _ in lengths],
        priority=[draw(st.integers(-2, 2)) for _ in lengths],
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        block_size=draw(st.sampled_from([1, 4, 16])),
        max_num_batched_tokens=draw(st.sampled_from([16, 33, 100, 512])),
        max_num_seqs=draw(st.sampled_from([1, 2, 4, 16])),
        chunk=draw(st.sampled_from([1, 7, 16, 17])),
        spare_blocks=draw(st.integers(0, 3)),
        caching=draw(st.booleans()),
        kv_cache_dtype=draw(st.sampled_from(["auto", "int8", "fp8"])),
        eager=draw(st.sampled_from([(False, True), (True, False), (False, False)])),
    )


# how it is run -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def narrow_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(2)
    config = transformers.MistralConfig(**SHAPE, sliding_window=NARROW)
    return save_model(tmp_path_factory.mktemp("narrow"), transformers.MistralForCausalLM(config).float())


@contextmanager
def model_of(work: Workload, llama_dir: Path, narrow_dir: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        if work.model == "hybrid":
            patch.setattr(llama, "Attention", with_window(NARROW))
        yield narrow_dir if work.model == "narrow" else llama_dir


def variations(work: Workload) -> dict[str, dict[str, Any]]:
    """What each variation changes in ``PLAIN``."""
    cached = {"enable_prefix_caching": True, "block_size": work.block_size}
    queue: dict[str, Any] = {"scheduling_policy": work.policy, "max_num_seqs": work.max_num_seqs}
    if work.policy == "priority":
        queue["priority"] = work.priority
    chunked = {"long_prefill_token_threshold": work.chunk, "max_num_batched_tokens": work.max_num_batched_tokens}
    tight = {"num_gpu_blocks_override": work.tight_blocks, "block_size": work.block_size}
    overlapped = {"async_scheduling": True}
    through = {"distributed_executor_backend": "roundtrip"}
    caching = {"enable_prefix_caching": work.caching}
    changed: dict[str, dict[str, Any]] = {
        "cached": {**cached, "rounds": 2},
        "shared": {**cached, "max_num_seqs": 1},
        "chunked": {**chunked, **queue},
        "preempted": {**tight, **caching},
        "preempted by priority": {**tight, **caching, "scheduling_policy": "priority", "priority": work.priority},
        "async": {**overlapped, **queue},
        "round trip": {**through, **queue},
        "together": {**cached, **chunked, **queue, **tight, **overlapped, **through, "rounds": 2},
    }
    return {name: {**options, "enforce_eager": work.eager[1]} for name, options in changed.items()}


def what_happened(work: Workload, name: str, found: Run) -> set[str]:
    """Asserts what must have happened, whatever was drawn, and returns what has."""
    happened: set[str] = set()
    told = sum(step["prompt_logprobs"] for step in found.trace)
    wanted = sum(len(o.prompt_logprobs) - 1 for o in found.outputs if o.prompt_logprobs is not None)
    assert told == wanted or (told > wanted and found.preemptions)
    happened.update({"prompt logprobs"} if wanted else ())
    happened.update({"changes"} if any(params.allowed_token_ids for params in work.params) else ())
    assert found.graph_modes == {"EAGER" if work.eager[1] else "FULL"}
    happened.update({"eager = replayed"} if work.eager[0] != work.eager[1] else ())
    steps = [request for step in found.trace for request in step["requests"]]
    if name == "cached":
        # Who wants the logprobs of his prompt has all of it computed.
        expected = [
            0
            if params.prompt_logprobs is not None and len(ids) > 1
            else (len(ids) - 1) // work.block_size * work.block_size
            for ids, params in zip(work.prompts, work.params, strict=True)
        ]
        assert [output.num_cached_tokens for output in found.outputs] == expected
    if name in ("chunked", "together"):
        prefills = [request["scheduled"] for request in steps if request["scheduled"] > 1]
        assert max(prefills, default=1) <= work.chunk
        assert max(step["num_tokens"] for step in found.trace) <= work.max_num_batched_tokens
        happened.update({"chunks"} if any(not request["samples"] for request in steps) else ())
    if name in ("async", "together"):
        # One request after the other (max_num_seqs 1) with one token each leaves nothing to overlap with.
        happened.update({"overlap"} if any(step["in_flight"] == 2 for step in found.trace) else ())
    else:
        assert max(step["in_flight"] for step in found.trace) == 1
    happened.update({"hits"} if any(output.num_cached_tokens for output in found.outputs) else ())
    happened.update({"preemption"} if found.preemptions else ())
    happened.update({"resumption"} if any(request["resumed"] for request in steps) else ())
    happened.update({"neighbours"} if any(len(step["requests"]) > 1 for step in found.trace) else ())
    return happened


VARIATIONS = (
    "cached",
    "shared",
    "chunked",
    "preempted",
    "preempted by priority",
    "async",
    "round trip",
    "together",
)
EXPECTED = {
    ("cached", "hits"),
    ("shared", "hits"),
    ("chunked", "chunks"),
    ("preempted", "preemption"),
    ("preempted", "resumption"),
    ("preempted by priority", "preemption"),
    ("async", "overlap"),
    ("round trip", "neighbours"),
    *(("together", what) for what in ("hits", "chunks", "preemption", "resumption", "overlap", "neighbours")),
    *((name, what) for name in VARIATIONS for what in ("prompt logprobs", "changes", "eager = replayed")),
}


# the properties ------------------------------------------------------------------------------------------------------


def test_every_way_of_computing_gives_the_same(run: Runner, llama_dir: Path, narrow_dir: Path) -> None:
    happened: Counter[Any] = Counter()

    @drawn(24)
    @given(work=workloads())
    def holds(work: Workload) -> None:
        with model_of(work, llama_dir, narrow_dir) as model:
            plain = run(model, work.prompts, work.params, **work.plain)
            assert plain.preemptions == 0
            assert plain.graph_modes == {"EAGER" if work.eager[0] else "FULL"}
            happened["kv", work.kv_cache_dtype] += 1
            happened.update(("ends", choice.finish_reason) for output in plain.outputs for choice in output.outputs)
            for name, options in variations(work).items():
                note(name)
                found = run(model, work.prompts, work.params, **{**work.plain, **options})
                for a, b in zip(plain.outputs, found.outputs, strict=True):
                    assert_same(a, b)
                happened.update((name, what) for what in what_happened(work, name, found))

    holds()
    kept = {("kv", dtype) for dtype in ("auto", "int8", "fp8")}
    assert {("ends", "stop"), ("ends", "length"), *kept, *EXPECTED} <= happened.keys()


def test_alone_equals_among_the_others(run: Runner, llama_dir: Path, narrow_dir: Path) -> None:
    together = 0

    @drawn(8)
    @given(work=workloads())
    def holds(work: Workload) -> None:
        nonlocal together
        with model_of(work, llama_dir, narrow_dir) as model:
            crowd = run(model, work.prompts, work.params, **{**work.plain, "enable_prefix_caching": work.caching})
            together = max(together, *(len(step["requests"]) for step in crowd.trace))
            for ids, params, among in zip(work.prompts, work.params, crowd.outputs, strict=True):
                alone = run(model, [ids], params, **{**work.plain, "enforce_eager": work.eager[1]})
                assert all(len(step["requests"]) <= params.n for step in alone.trace)
                assert_same(alone.outputs[0], among)

    holds()
    assert together >= 4


def test_a_process_of_its_own_gives_the_same(run: Runner, llama_dir: Path, narrow_dir: Path) -> None:
    in_engine_process = 0

    @drawn(3)
    @given(work=workloads().filter(lambda work: work.model != "hybrid" and work.num_sequences > 1))
    def holds(work: Workload) -> None:
        nonlocal in_engine_process
        with model_of(work, llama_dir, narrow_dir) as model, pytest.MonkeyPatch.context() as patch:
            plain = run(model, work.prompts, work.params, **work.plain)
            patch.setenv("OCTAVO_ENABLE_MULTIPROCESSING", "1")
            options = {**work.plain, **variations(work)["together"]}
            outside = run(model, work.prompts, work.params, **options)
            for a, b in zip(plain.outputs, outside.outputs, strict=True):
                assert_same(a, b)
            in_engine_process += len(outside.trace)

    holds()
    assert in_engine_process > 0
