"""A worker that remembers, in place of KV, the history of tokens that each slot was computed from.

It follows the scheduler's increments as the real one does, writes every slot that a step computes, and checks every
slot that the step's tokens would attend to. "Sampled" tokens are a function of the history, so that the outputs of
any request can be told beforehand, whatever happens to it on the way.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from octavo.config import OctavoConfig
from octavo.core import Scheduler
from octavo.errors import RequestError
from octavo.types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    KVCacheSpec,
    ModelRunnerOutput,
    NewRequestData,
    PositionLogprobs,
    PromptLogprobs,
    SchedulerOutput,
    SlidingWindowSpec,
)
from tests.core.harness import VOCAB_SIZE, check_scheduler, make_config, make_kv_config, watch_allocations


def history(tokens: Sequence[int], salt: str | None) -> list[int]:
    """For each position a number for the tokens up to it."""
    # Hashes of tuples of integers are the same in every process; those of strings are not.
    value, values = crc32(repr(salt).encode()), []
    for token in tokens:
        value = hash((value, token))
        values.append(value)
    return values


def next_token(value: int) -> int:
    return (value >> 7) % VOCAB_SIZE


def prompt_logprobs_of(tokens: Sequence[int], salt: str | None) -> list[PositionLogprobs]:
    """For each token but the first one entry, whose "rank" is the history before it."""
    values = history(tokens, salt)
    return [PositionLogprobs([token], [-1.0], value) for token, value in zip(tokens[1:], values, strict=False)]


def expected_tokens(request: EngineCoreRequest, max_model_len: int) -> tuple[list[int], FinishReason]:
    """What the request generates when nothing disturbs it."""
    params = request.sampling_params
    tokens = list(request.prompt_token_ids)
    assert params.max_tokens is not None
    limit = min(len(tokens) + params.max_tokens, max_model_len)
    ending = {*request.eos_token_ids, *params.stop_token_ids}
    while True:
        token = next_token(history(tokens, request.cache_salt)[-1])
        tokens.append(token)
        generated = tokens[len(request.prompt_token_ids) :]
        if token in ending and len(generated) >= params.min_tokens:
            return generated, FinishReason.STOP
        if len(tokens) >= limit:
            return generated, FinishReason.LENGTH


@dataclass
class WorkerRequest:
    """What a worker holds of a request."""

    tokens: list[int]
    num_prompt_tokens: int
    tables: list[list[int]]
    salt: str | None
    tells_prompt_logprobs: bool
    failed: bool = False  # its KV is not to be relied on


class HistoryWorker:
    """Args:

    specs: of the groups.
    salts: request id → cache_salt, kept up to date by the caller.
    """

    def __init__(self, specs: Sequence[KVCacheSpec], salts: dict[str, str | None]) -> None:
        self.specs = specs
        self.block_size = specs[0].block_size
        self.salts = salts
        self.held: dict[str, WorkerRequest] = {}
        self.memory: dict[tuple[int, int], tuple[int, int]] = {}  # (block, offset) → (group, history)

    def run(
        self, output: SchedulerOutput, sample_counts: dict[str, int] | None = None, failing: Sequence[str] = ()
    ) -> ModelRunnerOutput:
        """Runs a step.

        Args:
            sample_counts: how many tokens to sample for a request, where it is not one.
            failing: requests for which the step goes wrong.
        """
        for request_id in (*output.finished_req_ids, *output.preempted_req_ids):
            self.held.pop(request_id, None)
        computed = self._apply(output)
        errors = {request_id: "NaN logits" for request_id in failing if request_id in computed}
        for request_id in errors:
            self.held[request_id].failed = True
        known: dict[str, bool] = {}
        for request_id, count in output.num_scheduled_tokens.items():
            known[request_id] = self._write(request_id, computed[request_id], count)
        for request_id, count in output.num_scheduled_tokens.items():
            if known[request_id]:
                self._check_reads(request_id, computed[request_id], count)
        sampled, prompt_logprobs = [], {}
        for request_id, count in output.num_scheduled_tokens.items():
            held = self.held[request_id]
            tokens: list[int] = []
            if held.tells_prompt_logprobs:
                start = computed[request_id]
                entries = prompt_logprobs_of(held.tokens[: held.num_prompt_tokens], held.salt)[start : start + count]
                if entries:
                    prompt_logprobs[request_id] = PromptLogprobs(start + 1, entries)
            if computed[request_id] + count == len(held.tokens):
                for _ in range((sample_counts or {}).get(request_id, 1)):
                    tokens.append(next_token(history(held.tokens, held.salt)[-1]))
                    held.tokens.append(tokens[-1])
            sampled.append(tokens)
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(ids, sampled, [None] * len(ids), errors=errors, prompt_logprobs=prompt_logprobs)

    def _apply(self, output: SchedulerOutput) -> dict[str, int]:
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, blocks, num_output in zip(
            cached.req_ids, cached.new_block_ids, cached.num_output_tokens, strict=True
        ):
            held = self.held[request_id]
            del held.tokens[held.num_prompt_tokens + num_output :]
            for table, new in zip(held.tables, blocks or (), strict=blocks is not None):
                table.extend(new)
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.held, "came as new, but is held"
            self._add(new)
            computed[new.req_id] = new.num_computed_tokens
        assert computed.keys() == output.num_scheduled_tokens.keys()
        return computed

    def _add(self, new: NewRequestData) -> None:
        tables = [list(table) for table in new.block_ids]
        tells = new.sampling_params.prompt_logprobs is not None
        assert not (tells and new.num_computed_tokens), "the logprobs of what the prefix cache supplies are lost"
        assert not (tells and len(new.token_ids) > new.num_prompt_tokens), "all of them have been delivered before"
        self.held[new.req_id] = WorkerRequest(
            list(new.token_ids), new.num_prompt_tokens, tables, self.salts[new.req_id], tells
        )

    def _write(self, request_id: str, computed: int, count: int) -> bool:
        """Writes the slots of ``count`` tokens; False if that is void: tokens of a step that was rolled back are not
        known, or the request has failed."""
        held = self.held[request_id]
        values = [] if held.failed else history(held.tokens, held.salt)
        for position in range(computed, computed + count):
            value = values[position] if position < len(values) else -1
            for group, table in enumerate(held.tables):
                block = table[position // self.block_size]
                assert block != 0, "the null block is written"
                self.memory[block, position % self.block_size] = (group, value)
        return computed + count <= len(values)

    def _check_reads(self, request_id: str, computed: int, count: int) -> None:
        held = self.held[request_id]
        values = history(held.tokens, held.salt)
        for group, (spec, table) in enumerate(zip(self.specs, held.tables, strict=True)):
            window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else computed + count
            for position in range(max(0, computed - window + 1), computed + count):
                slot = (table[position // self.block_size], position % self.block_size)
                assert self.memory.get(slot) == (group, values[position]), f"wrong KV for {request_id} at {position}"


@dataclass
class Simulation:
    """A scheduler and a worker, with up to ``depth`` steps in flight; every move checks everything that can be."""

    scheduler: Scheduler
    specs: Sequence[KVCacheSpec]
    config: OctavoConfig
    depth: int = 1
    requests: dict[str, EngineCoreRequest] = field(default_factory=dict)  # unfinished ones
    generated: dict[str, list[int]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[PositionLogprobs]] = field(default_factory=dict)
    finished: list[tuple[EngineCoreRequest, list[int], FinishReason]] = field(default_factory=list)
    preemptions: int = 0
    hits: int = 0
    parts: int = 0  # of prompt logprobs that came in more than one output

    def __post_init__(self) -> None:
        self.salts: dict[str, str | None] = {}
        self.worker = HistoryWorker(self.specs, self.salts)
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        watch_allocations(self.scheduler.kv_cache_manager)

    @classmethod
    def make(cls, usable_blocks: int, specs: Sequence[KVCacheSpec], depth: int = 1, **settings: Any) -> "Simulation":
        config = make_config(block_size=specs[0].block_size, **settings)
        return cls(Scheduler(config, make_kv_config(usable_blocks, *specs), "torch"), specs, config, depth)

    def add(self, request: EngineCoreRequest) -> bool:
        """False if it was refused."""
        try:
            self.scheduler.add_request(request)
        except RequestError:
            return False
        self.requests[request.request_id] = request
        self.generated[request.request_id] = []
        self.prompt_logprobs[request.request_id] = []
        self.salts[request.request_id] = request.cache_salt
        self.check()
        return True

    def abort(self, *request_ids: str) -> None:
        known = {request_id for request_id in request_ids if request_id in self.requests}
        outputs = self.scheduler.abort_requests(request_ids)
        ended = {entry.request_id: entry for message in outputs.values() for entry in message.outputs}
        assert ended.keys() == known
        assert all(entry.finish_reason is FinishReason.ABORT for entry in ended.values())
        for request_id in known:
            del self.requests[request_id]
        self.check()

    def launch(self, sample_counts: dict[str, int] | None = None, failing: Sequence[str] = ()) -> bool:
        """Schedules and runs a step; False if there was nothing to run, or too much is in flight."""
        if len(self.in_flight) >= self.depth:
            return False
        output = self.scheduler.schedule()
        self._check_step(output)
        if output.total_num_scheduled_tokens == 0:
            assert not output.finished_req_ids, "told to nobody"
            assert not output.preempted_req_ids, "told to nobody"
            self.check()
            return False
        trace = self.scheduler.step_trace(output)
        self.preemptions += len(trace["preempted"])
        self.hits += trace["hits"]
        self.in_flight.append((output, self.worker.run(output, sample_counts, failing)))
        self.check()
        return True

    def settle(self) -> bool:
        """Takes in the oldest step's results; False if none is in flight."""
        if not self.in_flight:
            return False
        output, result = self.in_flight.popleft()
        self._take(self.scheduler.update_from_output(output, result))
        self.check()
        return True

    def drain(self) -> None:
        """Until nothing is left to do; a scheduler that gets nowhere is found out."""
        tokens = sum(len(r.prompt_token_ids) + (r.sampling_params.max_tokens or 0) for r in self.requests.values())
        patience = 50 + 20 * tokens * (1 + len(self.requests))
        while self.in_flight or self.scheduler.has_unfinished_requests():
            while self.launch():
                patience -= 1
            self.settle()
            patience -= 1
            assert patience > 0, "requests do not end"
        assert not self.requests
        manager = self.scheduler.kv_cache_manager
        assert manager.num_free_blocks == manager.num_usable_blocks, "blocks have leaked"

    def check_outputs(self) -> None:
        """What every finished request generated is what it generates alone."""
        for request, tokens, reason in self.finished:
            expected, expected_reason = expected_tokens(request, self.config.model.max_model_len)
            if reason is FinishReason.ERROR:
                assert tokens == expected[: len(tokens)]
            else:
                assert (tokens, reason) == (expected, expected_reason), request.request_id

    def _take(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for client, message in outputs.items():
            assert (message.scheduler_stats is not None) == (client == 0)
            for entry in message.outputs:
                request = self.requests[entry.request_id]
                assert request.client_index == client
                self.generated[entry.request_id] += entry.new_token_ids
                self._take_prompt_logprobs(request, entry)
                if entry.finish_reason is not None:
                    assert entry.metrics is not None
                    del self.requests[entry.request_id]
                    self.finished.append((request, self.generated.pop(entry.request_id), entry.finish_reason))

    def _take_prompt_logprobs(self, request: EngineCoreRequest, entry: EngineCoreOutput) -> None:
        """They come in order, each once, and all before the first token or with it."""
        expected: list[PositionLogprobs] = []
        if request.sampling_params.prompt_logprobs is not None:
            expected = prompt_logprobs_of(request.prompt_token_ids, request.cache_salt)
        have = self.prompt_logprobs[request.request_id]
        new = entry.new_prompt_logprobs or []
        assert entry.new_prompt_logprobs != [], "nothing is told as None"
        assert new == expected[len(have) : len(have) + len(new)]
        self.parts += bool(have and new)
        have += new
        assert not entry.new_token_ids or len(have) == len(expected), "a token comes before all of them have come"

    def _check_step(self, output: SchedulerOutput) -> None:
        settings = self.config.scheduler
        scheduled = output.num_scheduled_tokens
        assert output.total_num_scheduled_tokens == sum(scheduled.values()) <= settings.max_num_batched_tokens
        assert all(count >= 1 for count in scheduled.values())
        assert len(scheduled) <= settings.max_num_seqs
        if settings.long_prefill_token_threshold:
            assert max(scheduled.values(), default=0) <= settings.long_prefill_token_threshold
        # Who lost his place can only come as new.
        assert not {*output.preempted_req_ids, *output.finished_req_ids}.intersection(
            output.scheduled_cached_reqs.req_ids
        )

    def check(self) -> None:
        check_scheduler(self.scheduler)
        assert self.scheduler.requests.keys() == self.requests.keys()
