"""A toy model whose every token depends on all that it should see, a plain reference of it, and a plain scheduler.

The toy keeps token ids in its KV cache. What it computes at a position is a hash of the ids that it finds through block
table, slots and lengths, so that a wrong position, slot, block or input id anywhere changes all that follows.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from octavo.attention import Attention, get_forward_context
from octavo.config import EngineArgs, OctavoConfig, resolve_config
from octavo.platforms import current_platform
from octavo.types import (
    BlockIds,
    CachedRequestData,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheTensor,
    ModelFacts,
    ModelRunnerOutput,
    NewRequestData,
    PositionLogprobs,
    SamplingParams,
    SchedulerOutput,
)
from octavo.worker import Worker
from tests.sample import plain
from tests.worker.processors import boosted

VOCAB_SIZE = 53
EOS = 7
POISON = 13  # a history that ends with it has NaN logits
WINDOW = 5
MAX_MODEL_LEN = 64
NUM_BLOCKS = 400
MODULUS = (1 << 31) - 1


def hashed(token_ids: list[int]) -> int:
    value = 1
    for token_id in token_ids:
        value = (value * 1_000_003 + token_id + 1) % MODULUS
    return value


def toy_logits(full: int, window: int, last: int) -> np.ndarray:
    if last == POISON:
        return np.full(VOCAB_SIZE, np.nan, dtype=np.float32)
    logits = np.random.default_rng([full, window]).normal(size=VOCAB_SIZE).astype(np.float32) * 2
    logits[POISON] = -np.inf  # only prompts are poisoned
    return logits


class ToyAttention(Attention):
    """8 bytes a token, which hold its id. Result: a hash of what each token sees."""

    def __init__(self, name: str, sliding_window: int | None) -> None:
        super().__init__(name, num_heads=1, num_kv_heads=1, head_size=1, scale=1.0, sliding_window=sliding_window)
        self.raw = torch.empty(0)

    def bind_kv_cache(self, raw: Tensor) -> None:
        self.raw = raw.view(torch.int64)

    def forward(self, token_ids: Tensor) -> Tensor:  # type: ignore[override]
        step = get_forward_context()[self.name]
        assert self._spec is not None
        block_size = self._spec.block_size
        assert int(step.slot_mapping.min()) >= block_size, "the null block was written to"
        self.raw[step.slot_mapping] = token_ids
        seen = []
        starts, ends = step.query_start_loc.tolist(), step.seq_lens.tolist()
        assert step.max_seq_len == max(ends)
        assert step.max_query_len == max(b - a for a, b in pairwise(starts))
        for request, end in enumerate(ends):
            table = step.block_table[request].tolist()
            slots = [table[position // block_size] * block_size + position % block_size for position in range(end)]
            history = self.raw[slots].tolist()
            for position in range(end - (starts[request + 1] - starts[request]), end):
                first = 0 if self.sliding_window is None else max(0, position + 1 - self.sliding_window)
                seen.append(hashed(history[first : position + 1]))
        return torch.tensor(seen)


class ToyModel(nn.Module):
    """One full and one sliding-window layer. Records what each forward was given."""

    def __init__(self) -> None:
        super().__init__()
        self.full = ToyAttention("full", None)
        self.window = ToyAttention("window", WINDOW)
        self.forwards: list[tuple[list[int], list[int]]] = []
        self.logits_rows: list[int] = []

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        assert input_ids.dtype == positions.dtype == torch.int64
        self.forwards.append((input_ids.tolist(), positions.tolist()))
        return torch.stack([self.full(input_ids), self.window(input_ids), input_ids], dim=1)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        self.logits_rows.append(len(hidden))
        return torch.from_numpy(np.stack([toy_logits(*row) for row in hidden.tolist()]))


def reference_tokens(prompt: list[int], params: SamplingParams, count: int, choice_index: int = 0) -> list[int]:
    """The tokens that a request must get, computed from its whole history each time, alone."""
    return [token_id for token_id, _ in reference(prompt, params, count, choice_index)]


def reference(
    prompt: list[int], params: SamplingParams, count: int, choice_index: int = 0
) -> list[tuple[int, PositionLogprobs | None]]:
    """The same with their logprobs."""
    history, found = list(prompt), []
    for position in range(count):
        raw = history_logits(history)
        changed = plain.changed_logits(raw, params, prompt, history[len(prompt) :], [EOS])
        token_id = plain.next_token(boosted(changed, params, prompt, position), params, choice_index, position)
        found.append((token_id, plain.raw_logprobs(raw, token_id, params.logprobs, params.logprob_token_ids)))
        history.append(token_id)
    return found


def reference_prompt_logprobs(prompt: list[int], num_logprobs: int) -> list[PositionLogprobs | None]:
    """For each token of the prompt but the first."""
    return [
        plain.raw_logprobs(history_logits(prompt[:position]), prompt[position], num_logprobs)
        for position in range(1, len(prompt))
    ]


def history_logits(history: list[int]) -> list[float]:
    found: list[float] = toy_logits(hashed(history), hashed(history[-WINDOW:]), history[-1]).tolist()
    return found


def toy_config(vocab_size: int = VOCAB_SIZE, longest: int = MAX_MODEL_LEN, **stated: Any) -> OctavoConfig:
    facts = ModelFacts(
        path="toy",
        format="safetensors",
        architecture="Toy",
        hf_config={},
        vocab_size=vocab_size,
        max_position_embeddings=longest,
        dtype="float32",
        weight_bytes=0,
        generation_config={},
        eos_token_ids=[EOS],
        fingerprint="toy",
    )
    settings = {"model": "toy", "max_num_seqs": 6, "max_num_batched_tokens": 64, "block_size": 4, **stated}
    return resolve_config(EngineArgs(**settings), facts, current_platform().facts())


def toy_kv_cache_config(num_blocks: int = NUM_BLOCKS) -> KVCacheConfig:
    """Two groups with block sizes of their own."""
    specs = [FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype="float32") for size in (4, 4)]
    groups = [KVCacheGroup(["full"], specs[0]), KVCacheGroup(["window"], specs[1])]
    size = num_blocks * specs[0].page_size_bytes
    return KVCacheConfig(num_blocks, [KVCacheTensor(size, ["full", "window"])], groups)


def toy_worker(config: OctavoConfig) -> tuple[Worker, ToyModel]:
    """A worker that loads the toy."""
    model = ToyModel()
    return Worker(config, lambda *_: model), model


def start(worker: Any, kv_cache_config: KVCacheConfig | None = None, max_model_len: int = MAX_MODEL_LEN) -> None:
    """The worker's life up to its first step."""
    worker.init_device()
    worker.load_model()
    worker.get_kv_cache_specs()
    worker.initialize_from_config(kv_cache_config or toy_kv_cache_config(), max_model_len)
    worker.compile_or_warm_up_model()


def params(seed: int = 0, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 50, "seed": seed, **more})


@dataclass
class PlainRequest:
    """What a scheduler keeps of a request."""

    req_id: str
    prompt: list[int]
    params: SamplingParams
    choice_index: int = 0
    outputs: list[int] = field(default_factory=list)
    in_flight: int = 0
    computed: int = 0
    blocks: BlockIds | None = None  # None: the worker does not hold the request
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.outputs) + self.in_flight


class PlainScheduler:
    """Does what it is told. Blocks that were freed last are given out first, in random order, so that a stale
    block table soon reads what another request has written."""

    def __init__(self, block_size: int = 4, seed: int = 0) -> None:
        self.block_size = block_size
        self.requests: dict[str, PlainRequest] = {}
        self.free = list(range(1, NUM_BLOCKS))
        self.random = random.Random(seed)
        self.finished: list[str] = []
        self.preempted: list[str] = []
        self.flying: deque[dict[str, PlainRequest]] = deque()
        self.steps = 0

    def add(self, req_id: str, prompt: list[int], params: SamplingParams, choice_index: int = 0) -> PlainRequest:
        self.requests[req_id] = PlainRequest(req_id, prompt, params, choice_index)
        return self.requests[req_id]

    def finish(self, req_id: str) -> PlainRequest:
        request = self.requests.pop(req_id)
        if request.blocks is not None:
            self.finished.append(req_id)
        self._release(request)
        return request

    def preempt(self, req_id: str) -> None:
        request = self.requests[req_id]
        self.preempted.append(req_id)
        self._release(request)
        # Tokens in flight are lost to this life of the request: the object that gets them is not the queue's.
        self.requests[req_id] = PlainRequest(
            req_id,
            request.prompt,
            request.params,
            request.choice_index,
            list(request.outputs),
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
        )

    def schedule(self, **num_tokens: int) -> SchedulerOutput:
        """``schedule(a=3, b=1)``: a step that computes 3 tokens of request a, then 1 of b."""
        self.steps += 1
        new, cached, flying = [], CachedRequestData.empty(), {}
        for req_id, count in num_tokens.items():
            request = self.requests[req_id]
            before, outputs = request.computed, len(request.outputs) + request.in_flight
            held = request.blocks
            fresh = self._allocate(request, before + count)
            if held is None:
                known = request.prompt + request.outputs
                sampling = (request.params, [EOS], request.choice_index)
                new.append(NewRequestData(req_id, known, len(request.prompt), *sampling, fresh, before))
            else:
                cached.req_ids.append(req_id)
                cached.new_block_ids.append(fresh if any(fresh) else None)
                cached.num_computed_tokens.append(before)
                cached.num_output_tokens.append(outputs)
            request.computed += count
            request.in_flight += request.computed == request.num_tokens
            flying[req_id] = request
        self.flying.append(flying)
        finished, self.finished = self.finished, []
        preempted, self.preempted = self.preempted, []
        total = sum(num_tokens.values())
        return SchedulerOutput(self.steps, new, cached, dict(num_tokens), total, finished, preempted)

    def receive(self, output: ModelRunnerOutput) -> None:
        """Gives the oldest step's results to the requests that were in it."""
        flying = self.flying.popleft()
        assert output.req_ids == list(flying)
        for req_id, new, logprobs in zip(output.req_ids, output.sampled_token_ids, output.logprobs, strict=True):
            request = flying[req_id]
            request.outputs += new
            request.in_flight -= len(new)
            request.logprobs += logprobs or []
            if req_id in output.prompt_logprobs:
                part = output.prompt_logprobs[req_id]
                request.prompt_logprobs |= dict(enumerate(part.entries, part.start))
            request.error = output.errors.get(req_id, request.error)

    def step(self, worker: Any, **num_tokens: int) -> ModelRunnerOutput:
        """Schedules, computes and receives."""
        worker.execute_model(self.schedule(**num_tokens))
        output: ModelRunnerOutput = worker.sample_tokens()
        self.receive(output)
        return output

    def _allocate(self, request: PlainRequest, num_tokens: int) -> BlockIds:
        held = request.blocks or ([], [])
        fresh: BlockIds = ([], [])
        for group in range(2):
            while (len(held[group]) + len(fresh[group])) * self.block_size < num_tokens:
                fresh[group].append(self.free.pop(-1 - self.random.randrange(4)))
        request.blocks = tuple([*old, *new] for old, new in zip(held, fresh, strict=True))
        return fresh

    def _release(self, request: PlainRequest) -> None:
        for blocks in request.blocks or ():
            self.free += blocks
        request.blocks = None
