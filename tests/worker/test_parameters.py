"""Every sampling parameter through the worker's batch, in which requests with and without them come and go."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.types import NO_TOKEN_LEFT, PositionLogprobs, SamplingParams
from octavo.worker import Worker
from octavo.worker.input_batch import InputBatch
from tests.worker.processors import NAMES
from tests.worker.toy import (
    EOS,
    POISON,
    VOCAB_SIZE,
    PlainRequest,
    PlainScheduler,
    params,
    reference,
    reference_prompt_logprobs,
    start,
    toy_config,
    toy_worker,
)


def toy(**stated: Any) -> Worker:
    worker, _ = toy_worker(toy_config(logits_processors=NAMES, max_logprobs=-1, **stated))
    start(worker)
    return worker


# against the plain reference ----------------------------------------------------------------------------------------

token_ids = st.integers(0, VOCAB_SIZE - 1)
penalties = st.sampled_from([0.0, 0.0, 0.5, 2.0, -1.3])


@st.composite
def any_params(draw: st.DrawFn) -> SamplingParams:
    temperature = draw(st.sampled_from([0.0, 0.7, 1.5]))
    named = draw(st.none() | st.lists(token_ids, max_size=4))
    boost = draw(st.sampled_from([None, None, None, 2.5]))
    # Few tokens, so that they are generated, and generated again.
    allowed = draw(
        st.none() | st.none() | st.lists(st.integers(14, VOCAB_SIZE - 1), min_size=4, max_size=9, unique=True)
    )
    return params(
        seed=draw(st.integers(-(2**63), 2**63 - 1).filter(lambda seed: seed != -1)),  # -1 is None
        temperature=temperature,
        min_p=draw(st.sampled_from([0.0, 0.0, 0.02, 0.4])),
        top_k=draw(st.sampled_from([0, 0, 5])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.8])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.7, 0.6])),
        frequency_penalty=draw(penalties),
        presence_penalty=draw(penalties),
        logit_bias=draw(st.dictionaries(token_ids, st.sampled_from([1.5, -4.0, 100.0, -100.0]), max_size=3)),
        allowed_token_ids=allowed,
        bad_words_token_ids=draw(
            st.lists(
                # The first allowed token ends no bad word: one can always be sampled.
                st.lists(st.sampled_from((allowed or [20, 20])[1:4]), min_size=1, max_size=3),
                max_size=3,
            )
        ),
        min_tokens=draw(st.sampled_from([0, 0, 3])),
        stop_token_ids=draw(st.lists(st.integers(0, 13), max_size=3)),
        logprobs=None if named is not None else draw(st.sampled_from([None, None, 0, 4, -1])),
        logprob_token_ids=named,
        prompt_logprobs=draw(st.sampled_from([None, None, 0, 3, -1])),
        extra_args={} if boost is None else {"boost": boost},
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_requests_that_come_and_go_get_what_the_plain_reference_gives(data: st.DataObject) -> None:
    worker, scheduler = toy(max_num_seqs=4), PlainScheduler(seed=data.draw(st.integers(0, 99)))
    ended = []
    for number in range(data.draw(st.integers(5, 25))):
        held = list(scheduler.requests)
        if len(held) < 4 and data.draw(st.booleans()):
            prompt = data.draw(st.lists(st.integers(14, VOCAB_SIZE - 1), min_size=1, max_size=12))
            scheduler.add(f"r{number}", prompt, data.draw(any_params() | st.just(params())), number % 3)
        for req_id in held:
            event = data.draw(st.sampled_from(["go on"] * 6 + ["finish", "preempt"]))
            request = scheduler.requests[req_id]
            if event == "finish":
                ended.append(scheduler.finish(req_id))
            elif event == "preempt" and request.blocks is not None:
                scheduler.preempt(req_id)
            elif event == "go on" and len(request.outputs) > 2 and data.draw(st.integers(0, 9)) == 0:
                roll_back(request)
        order = data.draw(st.permutations(list(scheduler.requests)))
        due = {req_id: scheduler.requests[req_id].num_tokens - scheduler.requests[req_id].computed for req_id in order}
        scheduler.step(worker, **{r: data.draw(st.integers(1, n)) for r, n in due.items() if data.draw(st.booleans())})
    for request in [*ended, *scheduler.requests.values()]:
        check(request)


def roll_back(request: PlainRequest) -> None:
    """Takes two tokens back, as a drafter's tokens would be that were not accepted."""
    if request.blocks is not None and request.computed == request.num_tokens - 1:
        del request.outputs[-2:], request.logprobs[-2:]
        request.computed = request.num_tokens - 1


def check(request: PlainRequest) -> None:
    assert request.error is None
    expected = reference(request.prompt, request.params, len(request.outputs), request.choice_index)
    assert request.outputs == [token_id for token_id, _ in expected]
    for found, wanted in zip(request.logprobs, [entry for _, entry in expected if entry is not None], strict=True):
        assert_close(found, wanted)
    if request.params.prompt_logprobs is None:
        assert request.prompt_logprobs == {}
    else:
        wanted_entries = reference_prompt_logprobs(request.prompt, request.params.prompt_logprobs)
        assert sorted(request.prompt_logprobs) == list(range(1, len(request.prompt_logprobs) + 1))
        assert len(request.prompt_logprobs) >= min(request.computed, len(request.prompt) - 1)
        for position, entry in request.prompt_logprobs.items():
            assert_close(entry, wanted_entries[position - 1])


def assert_close(found: PositionLogprobs, wanted: PositionLogprobs | None) -> None:
    assert wanted is not None
    assert (found.token_ids, found.sampled_rank, found.ranks) == (wanted.token_ids, wanted.sampled_rank, wanted.ranks)
    assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)


@pytest.mark.parametrize(
    "feature",
    [
        {"repetition_penalty": 0.01},
        {"frequency_penalty": -2.0},
        {"presence_penalty": -2.0},
        {"logit_bias": {30: 100.0}},
        {"allowed_token_ids": [30, 31]},
        {"bad_words_token_ids": [[token_id] for token_id in range(20, 40)]},
        {"min_tokens": 6, "stop_token_ids": list(range(1, 40))},
        {"extra_args": {"boost": 50.0}},
        {"temperature": 1.0, "min_p": 0.9},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 0.1},
        {"temperature": 2.0},
    ],
    ids=lambda feature: next(reversed(feature)),
)
def test_control_a_parameter_that_is_ignored_is_noticed(feature: dict[str, Any]) -> None:
    worker, scheduler = toy(), PlainScheduler()
    without = {"temperature": feature.get("temperature", 0.0) and 1.0}
    prompts = [[20, 21, 22], [33], [44, 45], [50, 20], [25, 24], [23]]
    requests = [scheduler.add(f"r{number}", prompt, params(**without)) for number, prompt in enumerate(prompts)]
    advance(worker, scheduler, 12)
    for request in requests:
        check(request)
        request.params = params(**feature)
    with pytest.raises(AssertionError):
        check_all(requests)


def check_all(requests: list[PlainRequest]) -> None:
    for request in requests:
        check(request)


def test_control_a_repetition_penalty_that_forgets_the_prompt_is_noticed() -> None:
    worker, scheduler = toy(), PlainScheduler()
    request = scheduler.add("a", list(range(20, 28)), params(repetition_penalty=0.001))
    advance(worker, scheduler, 3)
    check(request)
    # The prompt's tokens are a thousand times as likely; without it, others come first.
    assert request.outputs[0] in request.prompt
    assert reference(request.prompt, params(), 1)[0][0] not in request.prompt


# slot hygiene -------------------------------------------------------------------------------------------------------

BUSY = {
    "repetition_penalty": 1.7,
    "frequency_penalty": 1.0,
    "presence_penalty": 0.5,
    "logit_bias": {20: 5.0, 30: -100.0},
    "allowed_token_ids": list(range(14, 40)),
    "bad_words_token_ids": [[15], [16, 17], [20, 20]],
    "min_tokens": 4,
    "min_p": 0.05,
    "top_k": 9,
    "top_p": 0.7,
    "temperature": 0.8,
    "prompt_logprobs": 3,
    "logprob_token_ids": [3, 4, 50],
    "extra_args": {"boost": 3.0},
}
PLAIN = params(seed=5, temperature=1.0, logprobs=5)
PLAIN_PROMPT = [20, 21, 22]


def neighbours_of_a_plain_request() -> list[PlainRequest]:
    """Busy requests come, some end, plain ones take their rows, others come and go beside them: all the plain ones."""
    worker, scheduler = toy(max_num_seqs=6), PlainScheduler()
    found = []
    for turn in range(4):
        for number in range(5):
            scheduler.add(f"busy{turn}.{number}", [20 + number, 30], params(seed=number, **BUSY))
        advance(worker, scheduler, 2)
        for number in range(3):
            scheduler.finish(f"busy{turn}.{number}")
        scheduler.preempt(f"busy{turn}.3")
        found += [scheduler.add(f"plain{turn}.{number}", PLAIN_PROMPT, PLAIN) for number in range(3)]
        advance(worker, scheduler, 3)
        for number in range(3, 5):
            scheduler.finish(f"busy{turn}.{number}")
        advance(worker, scheduler, 3)
        for number in range(3):
            scheduler.finish(f"plain{turn}.{number}")
    return found


def advance(worker: Worker, scheduler: PlainScheduler, steps: int) -> None:
    for _ in range(steps):
        scheduler.step(worker, **{name: r.num_tokens - r.computed for name, r in scheduler.requests.items()})


def assert_as_alone(found: list[PlainRequest]) -> None:
    worker, scheduler = toy(), PlainScheduler()
    alone = scheduler.add("alone", PLAIN_PROMPT, PLAIN)
    advance(worker, scheduler, 6)
    assert len(alone.outputs) == 6
    for request in found:
        assert (request.outputs, request.logprobs) == (alone.outputs, alone.logprobs)  # bit for bit
        assert request.prompt_logprobs == {}


def test_a_plain_request_is_as_alone_whatever_its_neighbours_ask_and_whoever_had_its_row() -> None:
    found = neighbours_of_a_plain_request()
    assert len(found) == 12
    assert_as_alone(found)


def leaves_changes(honest: Callable[..., None]) -> Callable[..., None]:
    def remove(self: InputBatch, req_id: str) -> None:
        row = self.row_of.get(req_id)
        changes = self._changes.get(-1 if row is None else row)
        honest(self, req_id)
        if row is not None and changes is not None:
            self._changes[row] = changes

    return remove


def leaves_named_logprobs(honest: Callable[..., None]) -> Callable[..., None]:
    def remove(self: InputBatch, req_id: str) -> None:
        kept = dict(self._logprob_token_ids)
        honest(self, req_id)
        self._logprob_token_ids = kept

    return remove


@pytest.mark.parametrize("breaks", [leaves_changes, leaves_named_logprobs])
def test_control_what_a_request_leaves_in_its_row_is_noticed(
    monkeypatch: pytest.MonkeyPatch, breaks: Callable[..., Any]
) -> None:
    monkeypatch.setattr(InputBatch, "remove", breaks(InputBatch.remove))
    with pytest.raises(AssertionError):
        assert_as_alone(neighbours_of_a_plain_request())


# seeds --------------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_tokens_after_a_restart_and_in_a_crowd() -> None:
    sampling = params(seed=77, temperature=1.3, frequency_penalty=0.4, min_p=0.01)
    runs = []
    for crowd in (0, 5):
        worker, scheduler = toy(), PlainScheduler(seed=crowd)
        for number in range(crowd):
            scheduler.add(f"n{number}", [20 + number], params(seed=number, **BUSY))
        request = scheduler.add("a", [20, 21], sampling)
        advance(worker, scheduler, 20)
        runs.append(request.outputs)
    assert runs[0] == runs[1]
    assert len(runs[0]) == 20


def test_choices_of_one_seed_are_independent_of_each_other() -> None:
    """The tokens of two choices agree no more often than those of two seeds do."""
    worker, scheduler = toy(), PlainScheduler()
    keys = {"first": (1, 0), "second": (1, 1), "another seed": (2, 0), "twin": (1, 0)}
    requests = {
        name: scheduler.add(name, [20], params(seed=seed, temperature=2.0), choice)
        for name, (seed, choice) in keys.items()
    }
    advance(worker, scheduler, 40)
    first = requests["first"].outputs
    agreements = {
        name: sum(a == b for a, b in zip(first, request.outputs, strict=True)) for name, request in requests.items()
    }
    assert agreements["twin"] == agreements["first"] == 40
    assert max(agreements["second"], agreements["another seed"]) < 10


# what cannot be sampled ---------------------------------------------------------------------------------------------


def test_a_request_that_forbids_all_it_allows_fails_alone() -> None:
    worker, scheduler = toy(), PlainScheduler()
    stuck = scheduler.add("stuck", [20], params(allowed_token_ids=[EOS, 30], min_tokens=3, bad_words_token_ids=[[30]]))
    poor = scheduler.add("poor", [20], params(allowed_token_ids=[POISON]))
    well = scheduler.add("well", [20], params())
    scheduler.step(worker, stuck=1, poor=1, well=1)
    for failed in (stuck, poor):
        assert failed.error == NO_TOKEN_LEFT
        assert failed.outputs == []
    check(well)


ONLY_TWO = {"allowed_token_ids": [20, 21], "bad_words_token_ids": [[20, 21], [21, 20]]}


def test_only_tokens_that_were_generated_complete_a_bad_word() -> None:
    worker, scheduler = toy(), PlainScheduler()
    requests = [
        scheduler.add(f"r{seed}", [33, 20], params(**ONLY_TWO, seed=seed, temperature=2.0)) for seed in range(6)
    ]
    advance(worker, scheduler, 12)
    for request in requests:
        assert len(set(request.outputs)) == 1  # after the first token the other one is a bad word each time
        check(request)
    # The prompt's 20 was not generated: after it, 21 may come.
    assert {request.outputs[0] for request in requests} == {20, 21}
