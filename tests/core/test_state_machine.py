"""Whatever is added, aborted, scheduled and settled, in whatever order: no block is leaked or used twice, the budget is
kept, every request ends, and every token is computed from exactly the history that it should see.

Each control breaks one thing and sees the same checks notice it.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import octavo.core.request as request_module
from octavo.core import Request, Scheduler
from octavo.core.kv_cache import BlockPool, KVCacheCoordinator, KVCacheManager, SlidingWindowManager
from octavo.core.step_plan import StepPlan
from octavo.types import EngineCoreRequest, FinishReason, KVCacheSpec, PositionLogprobs, PromptLogprobs
from tests.core.harness import EOS, VOCAB_SIZE, full, make_request, sliding
from tests.core.simulation import Simulation

GROUPS: dict[str, list[KVCacheSpec]] = {
    "full": [full(2)],
    "sliding": [sliding(5, 2)],
    "hybrid": [full(2), sliding(3, 2)],
    "two windows": [sliding(4, 2), sliding(7, 2), full(2)],
}
SETTINGS = {
    "usable_blocks": st.integers(14, 40),
    "specs": st.sampled_from(list(GROUPS.values())),
    "depth": st.integers(1, 3),
    "max_model_len": st.just(24),
    "max_num_batched_tokens": st.integers(4, 30),
    "max_num_seqs": st.integers(1, 4),
    "policy": st.sampled_from(["fcfs", "priority"]),
    "long_prefill_token_threshold": st.sampled_from([0, 1, 3]),
    "enable_prefix_caching": st.sampled_from([True, True, True, False]),
}
# Few different beginnings, so that prefixes are shared.
BEGINNINGS = [[], [0] * 4, [0] * 8, [0, 0, 0, 0, 1, 2, 3, 1], [2, 1, 2, 1, 2, 1], [1] * 12]
REQUESTS: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 14),
    "min_tokens": st.just(0),
    "eos_token_ids": st.sampled_from([[], [EOS]]),
    "stop_token_ids": st.sampled_from([[], [], [3]]),
    "priority": st.integers(-1, 2),
    "cache_salt": st.sampled_from([None, None, None, "a"]),
    "client_index": st.integers(0, 1),
    "prompt_logprobs": st.sampled_from([None, None, 0, 2]),
}
PROMPTS = st.tuples(st.sampled_from(BEGINNINGS), st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=8)).map(
    lambda parts: parts[0] + parts[1]
)


class SchedulerMachine(RuleBasedStateMachine):
    """Hypothesis chooses the moves; Simulation makes and checks them."""

    @initialize(settings=st.fixed_dictionaries(SETTINGS))
    def start(self, settings: dict[str, Any]) -> None:
        self.simulation = Simulation.make(**settings)
        self.counter = 0

    @rule(prompt=PROMPTS, fields=st.fixed_dictionaries(REQUESTS))
    def add(self, prompt: list[int], fields: dict[str, Any]) -> None:
        self.counter += 1
        request = make_request(f"r{self.counter}", prompt, arrival_time=float(self.counter), **fields)
        if len(prompt) + request.sampling_params.max_tokens > 24:
            return
        self.simulation.add(request)

    @precondition(lambda self: self.simulation.requests)
    @rule(data=st.data(), again=st.booleans())
    def abort(self, data: st.DataObject, again: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.simulation.requests)))
        request = self.simulation.requests[request_id]
        self.simulation.abort(request_id, "unknown")
        if again:
            self.simulation.add(request)

    @rule()
    def launch(self) -> None:
        self.simulation.launch()

    @precondition(lambda self: self.simulation.requests)
    @rule(data=st.data(), count=st.sampled_from([0, 2, 3]))
    def launch_with_another_number_of_tokens(self, data: st.DataObject, count: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.simulation.requests)))
        self.simulation.launch({request_id: count})

    @precondition(lambda self: self.simulation.requests)
    @rule(data=st.data())
    def launch_with_an_error(self, data: st.DataObject) -> None:
        self.simulation.launch(failing=[data.draw(st.sampled_from(sorted(self.simulation.requests)))])

    @rule()
    def settle(self) -> None:
        self.simulation.settle()

    @rule()
    def reset_prefix_cache(self) -> None:
        running = bool(self.simulation.scheduler.running)
        assert self.simulation.scheduler.reset_prefix_cache() != running
        self.simulation.check()

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.drain()
            self.simulation.check_outputs()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


# The same with plain random numbers, for the controls ----------------------------------------------------------------


def random_request(rng: random.Random, name: str, arrival_time: float) -> EngineCoreRequest:
    prompt = rng.choice(BEGINNINGS) + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 4))]
    return make_request(
        name,
        prompt,
        max_tokens=rng.randint(1, 24 - len(prompt)),
        arrival_time=arrival_time,
        priority=rng.randint(0, 2),
        eos_token_ids=rng.choice([[], [EOS]]),
        cache_salt=rng.choice([None, None, "a"]),
        prompt_logprobs=rng.choice([None, None, None, 1]),
    )


def random_run(seed: int) -> Simulation:
    rng = random.Random(seed)
    simulation = Simulation.make(
        rng.randint(30, 40),
        list(GROUPS.values())[seed % len(GROUPS)],
        depth=rng.randint(1, 2),
        max_model_len=24,
        max_num_batched_tokens=rng.randint(4, 30),
        max_num_seqs=rng.randint(2, 6),
        policy=rng.choice(["fcfs", "priority"]),
        long_prefill_token_threshold=rng.choice([0, 5]),
    )
    for turn in range(60):
        choice = rng.random()
        if choice < 0.3:
            simulation.add(random_request(rng, f"r{turn}", float(turn)))
        elif choice < 0.35 and simulation.requests:
            request = simulation.requests[rng.choice(sorted(simulation.requests))]
            simulation.abort(request.request_id)
            simulation.add(request)
        elif choice < 0.38 and simulation.requests:
            simulation.launch(failing=[rng.choice(sorted(simulation.requests))])
        elif choice < 0.7:
            simulation.launch()
        else:
            simulation.settle()
    simulation.drain()
    simulation.check_outputs()
    return simulation


NUM_RUNS = 60


def test_random_runs_pass_and_do_what_they_are_for() -> None:
    runs = [random_run(seed) for seed in range(NUM_RUNS)]
    for policy in ("fcfs", "priority"):
        chosen = [run for run in runs if run.config.scheduler.policy == policy]
        assert sum(run.preemptions for run in chosen) > 10
        assert sum(run.hits for run in chosen) > 50
        assert {run.depth for run in chosen} == {1, 2}
        assert sum(run.parts for run in chosen) > 20
    assert sum(len(run.finished) for run in runs) > 300
    ends = {reason for run in runs for _, _, reason in run.finished}
    assert ends == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR}


def broken_touch(honest: Callable[..., Any]) -> Callable[..., Any]:
    def touch(self: BlockPool, blocks: list[Any]) -> None:
        """Leaves a block that is in use already at its count."""
        honest(self, [block for block in blocks if block.ref_count == 0])

    return touch


def broken_release(honest: Callable[..., Any]) -> Callable[..., Any]:
    def release(self: BlockPool, blocks: Any) -> None:
        """Forgets one block of several."""
        honest(self, list(blocks)[:3])

    return release


def forgets_to_release(honest: Callable[..., Any]) -> Callable[..., Any]:
    def free(self: KVCacheCoordinator, request_id: str) -> None:
        for manager in self.managers:
            manager.pop_table(request_id)

    return free


def caches_too_early(honest: Callable[..., Any]) -> Callable[..., Any]:
    def allocate_slots(self: KVCacheManager, request: Request, num_new_tokens: int, *rest: Any) -> Any:
        """Makes blocks findable that are only going to be computed, perhaps."""
        blocks = honest(self, request, num_new_tokens, *rest)
        if blocks is not None:
            hit = rest[0].num_tokens if rest else request.num_computed_tokens
            self.cache_blocks(request, min(hit + num_new_tokens, request.num_tokens))
        return blocks

    return allocate_slots


def allocates_by_halves(honest: Callable[..., Any]) -> Callable[..., Any]:
    def allocate(self: KVCacheManager, request_id: str, num_new_tokens: int, hit: Any, headroom: int) -> Any:
        """Takes the hit before it knows whether the rest can be had."""
        blocks = honest(self, request_id, num_new_tokens, hit, headroom)
        if blocks is None:
            self.pool.touch(hit.blocks[0])
            self.pool.release(hit.blocks[0])
        return blocks

    return allocate


def window_too_small(honest: Callable[..., Any]) -> Callable[..., Any]:
    def passed_blocks(self: SlidingWindowManager, request_id: str, num_computed_tokens: int) -> range:
        passed: range = honest(self, request_id, num_computed_tokens + 1)
        return passed

    return passed_blocks


def hit_too_short(honest: Callable[..., Any]) -> Callable[..., Any]:
    def find_hit(self: SlidingWindowManager, block_hashes: Any, max_blocks: int) -> Any:
        """Does without the first block of the window."""
        hit = honest(self, block_hashes, max_blocks)
        for index, block in enumerate(hit):
            if block is not self.pool.null_block:
                return [*hit[:index], self.pool.null_block, *hit[index + 1 :]]
        return hit

    return find_hit


def groups_disagree(honest: Callable[..., Any]) -> Callable[..., Any]:
    def find_longest_hit(self: KVCacheCoordinator, block_hashes: Any, max_blocks: int) -> Any:
        """Takes the first group's word for all."""
        length = len(self.managers[0].find_hit(block_hashes, max_blocks))
        hits = [manager.find_hit(block_hashes, length) for manager in self.managers]
        return tuple(hit + [self.pool.null_block] * (length - len(hit)) for hit in hits)

    return find_longest_hit


def hash_without_parent(honest: Callable[..., Any]) -> Callable[..., Any]:
    return lambda parent, *rest: honest(b"", *rest)


def hash_without_salt(honest: Callable[..., Any]) -> Callable[..., Any]:
    return lambda cache_salt: honest(None)


def results_are_always_its_own(honest: Callable[..., Any]) -> Callable[..., Any]:
    def enter(self: Request, step: int, *rest: Any) -> None:
        honest(self, 0, *rest)

    return enter


def budget_passed(honest: Callable[..., Any]) -> Callable[..., Any]:
    def take(self: StepPlan, request: Request, num_new_tokens: int) -> None:
        honest(self, request, num_new_tokens)
        self.budget += 1

    return take


def tokens_not_given_back(honest: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, request: None


def finished_kept_secret(honest: Callable[..., Any]) -> Callable[..., Any]:
    def output(self: StepPlan, finished: list[str], preempted: list[str]) -> Any:
        return honest(self, [], preempted)

    return output


def preempted_kept_secret(honest: Callable[..., Any]) -> Callable[..., Any]:
    def output(self: StepPlan, finished: list[str], preempted: list[str]) -> Any:
        return honest(self, finished, [])

    return output


def aborts_forget_the_batch(honest: Callable[..., Any]) -> Callable[..., Any]:
    def finish(self: Scheduler, request: Request, reason: FinishReason) -> None:
        del self.requests[request.request_id]
        request.finish(reason)

    return finish


def prompt_logprobs_told_again(honest: Callable[..., Any]) -> Callable[..., Any]:
    def take(self: Request, part: PromptLogprobs) -> list[PositionLogprobs]:
        honest(self, part)
        return part.entries

    return take


def prompt_logprobs_never_told(honest: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, part: []


def prefix_cache_read_all_the_same(honest: Any) -> property:
    return property(lambda self: False)


@pytest.mark.parametrize(
    ("owner", "name", "breaks"),
    [
        (BlockPool, "touch", broken_touch),
        (BlockPool, "release", broken_release),
        (KVCacheCoordinator, "free", forgets_to_release),
        (KVCacheManager, "allocate_slots", caches_too_early),
        (KVCacheManager, "_begin", allocates_by_halves),
        (SlidingWindowManager, "passed_blocks", window_too_small),
        (SlidingWindowManager, "find_hit", hit_too_short),
        (KVCacheCoordinator, "find_longest_hit", groups_disagree),
        (request_module, "hash_block", hash_without_parent),
        (request_module, "hash_extra_keys", hash_without_salt),
        (Request, "enter", results_are_always_its_own),
        (StepPlan, "_take", budget_passed),
        (StepPlan, "take_back", tokens_not_given_back),
        (StepPlan, "output", finished_kept_secret),
        (StepPlan, "output", preempted_kept_secret),
        (Scheduler, "_finish", aborts_forget_the_batch),
        (Request, "take_prompt_logprobs", prompt_logprobs_told_again),
        (Request, "take_prompt_logprobs", prompt_logprobs_never_told),
        (Request, "owes_prompt_logprobs", prefix_cache_read_all_the_same),
    ],
    ids=lambda value: value.__name__ if callable(value) and not isinstance(value, type) else "",
)
def test_control_a_broken_part_is_noticed(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, breaks: Callable[..., Any]
) -> None:
    monkeypatch.setattr(owner, name, breaks(getattr(owner, name)))
    with pytest.raises((AssertionError, LookupError, RuntimeError)):  # noqa: PT012 (one of the runs, not each)
        for seed in range(NUM_RUNS):
            random_run(seed)
