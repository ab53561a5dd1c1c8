"""Fixtures of the engine's tests: configurations without a checkpoint, an executor without a model, real processes."""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineArgs, OctavoConfig, resolve_config
from octavo.engine import EngineCore
from octavo.types import (
    EngineCoreOutput,
    EngineCoreRequest,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    ModelFacts,
    ModelRunnerOutput,
    PlatformFacts,
    SamplingParams,
    SchedulerOutput,
)

VOCAB_SIZE = 1000
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype="float32")


def next_token(token_ids: list[int]) -> int:
    """The fake model: depends on the last token and the position, so that a wrong input id shows at once."""
    return (31 * token_ids[-1] + 7 * len(token_ids) + 3) % VOCAB_SIZE


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


class FakeExecutor:
    """A worker that holds token ids only. With ``overlap`` the calls run in a thread, as a device's would.

    Attributes:
        available: bytes that it says the KV cache may take.
        hold: while cleared, forwards wait (with ``overlap``).
        fail_at_step: this step's forward raises.
    """

    def __init__(self, overlap: bool = False, available: int = 1 << 24) -> None:
        self.available = available
        self.hold = threading.Event()
        self.hold.set()
        self.fail_at_step = 0
        self.stages: list[str] = []
        self.steps: list[SchedulerOutput] = []
        self.is_shut_down = False
        self._pool = ThreadPoolExecutor(1) if overlap else None
        self._tokens: dict[str, list[int]] = {}
        self._last: ModelRunnerOutput | None = None

    def load_model(self, progress: Callable[[str, float], None] | None = None) -> str:
        self.stages.append("load_model")
        if progress is not None:
            progress("weights", 1.0)
        return "fake"

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return {"layer": SPEC}

    def determine_available_memory(self) -> int:
        return self.available

    def initialize_from_config(self, kv_cache_config: KVCacheConfig, max_model_len: int) -> None:
        self.stages.append(f"initialize {max_model_len}")

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[None]:
        self.steps.append(scheduler_output)
        return self._submit(self._forward, scheduler_output)

    def sample_tokens(self) -> Future[ModelRunnerOutput]:
        return self._submit(self._sample)

    def shutdown(self) -> None:
        self.is_shut_down = True
        self.hold.set()
        if self._pool is not None:
            self._pool.shutdown()

    def _submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        if self._pool is not None:
            return self._pool.submit(call, *args)
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _forward(self, step: SchedulerOutput) -> None:
        self.hold.wait()
        if step.step == self.fail_at_step:
            raise RuntimeError("the device is on fire")
        for req_id in (*step.finished_req_ids, *step.preempted_req_ids):
            self._tokens.pop(req_id, None)
        computed = {}
        for new in step.scheduled_new_reqs:
            self._tokens[new.req_id] = list(new.token_ids)
            computed[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        req_ids, sampled = [], []
        for req_id, count in step.num_scheduled_tokens.items():
            tokens = self._tokens[req_id]
            req_ids.append(req_id)
            reaches_end = computed[req_id] + count == len(tokens)
            sampled.append([next_token(tokens)] if reaches_end else [])
            tokens.extend(sampled[-1])
        self._last = ModelRunnerOutput(req_ids, sampled, [None] * len(req_ids))

    def _sample(self) -> ModelRunnerOutput:
        assert self._last is not None
        return self._last


def fake_config(**stated: Any) -> OctavoConfig:
    """A configuration for FakeExecutor; options as EngineArgs has them."""
    model = ModelFacts(
        path="fake",
        format="safetensors",
        architecture="LlamaForCausalLM",
        hf_config={},
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=512,
        dtype="float32",
        weight_bytes=0,
        generation_config={},
        eos_token_ids=[2],
        fingerprint="fake",
    )
    platform = PlatformFacts(
        name="cpu",
        num_threads=1,
        supported_dtypes=["float32"],
        default_memory_share=0.5,
        default_max_num_batched_tokens=64,
        offline_max_num_batched_tokens=64,
        default_max_num_seqs=8,
        default_block_size=16,
        async_scheduling=False,
    )
    return resolve_config(EngineArgs(model="fake", **stated), model, platform)


def make_request(request_id: str, prompt: list[int], max_tokens: int = 8, **fields: Any) -> EngineCoreRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=1)
    return EngineCoreRequest(request_id, prompt, params, fields.pop("eos_token_ids", []), 0.0, **fields)


class Collected:
    """Tokens and last output of each request."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, EngineCoreOutput] = {}

    def add(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.finished, "an output after the last one"
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.finished[output.request_id] = output


def run_to_end(core: EngineCore, collected: Collected | None = None) -> Collected:
    collected = collected if collected is not None else Collected()
    while core.has_work():
        for outputs in core.next_outputs().values():
            collected.add(outputs.outputs)
    return collected


@dataclasses.dataclass(frozen=True)
class EngineKit:
    """The helpers above, for test modules (which cannot import from here)."""

    executor: type[FakeExecutor] = FakeExecutor
    collected: type[Collected] = Collected
    config: Callable[..., OctavoConfig] = staticmethod(fake_config)
    request: Callable[..., EngineCoreRequest] = staticmethod(make_request)
    expected: Callable[[list[int], int], list[int]] = staticmethod(expected_tokens)
    run: Callable[..., Collected] = staticmethod(run_to_end)


@pytest.fixture(scope="session")
def kit() -> EngineKit:
    return EngineKit()


@pytest.fixture
def make_core(kit: EngineKit) -> Iterator[Callable[..., EngineCore]]:
    """``make_core(executor=None, **options)`` → an EngineCore over a FakeExecutor, shut down after the test."""
    cores: list[EngineCore] = []

    def make(executor: FakeExecutor | None = None, **stated: Any) -> EngineCore:
        if executor is None:
            executor = FakeExecutor(overlap=stated.get("async_scheduling", False))
        cores.append(EngineCore(fake_config(**stated), executor=executor))
        return cores[-1]

    yield make
    for core in cores:
        core.shutdown()


@pytest.fixture(scope="session")
def tiny_config(tiny_llama_dir: Path) -> OctavoConfig:
    """A real configuration of the tiny Llama, with room for a few thousand tokens."""
    from octavo.engine import build_config

    args = EngineArgs(model=str(tiny_llama_dir), dtype="float32", max_num_seqs=8, num_gpu_blocks_override=256)
    return build_config(args)
