"""Specification of OutputProcessor: text, stop strings, logprob tables, output kinds, choices, ends and accounts.

The tokenizer is a real one whose tokens are single bytes, so that every character boundary can be hit.
"""

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine import EngineInputs, OutputProcessor
from octavo.engine.output_processor import RequestState
from octavo.errors import NoTokenLeftError, OverloadedError, RequestError, RequestFailedError
from octavo.tokenizers import Tokenizer, load_tokenizer
from octavo.types import (
    NO_TOKEN_LEFT,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    Logprob,
    PositionLogprobs,
    Refusal,
    RequestMetrics,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    SchedulerStats,
    StepCounts,
)

EOS = 0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """id 0 is the end of sequence, the others are the 256 bytes."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": EOS} | {letter: index for index, letter in enumerate(alphabet, start=1)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<eos>"])
    folder: Path = tmp_path_factory.mktemp("bytes")
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    return load_tokenizer(folder)


class Bench:
    """An OutputProcessor, and a pretended engine that hands it steps."""

    def __init__(self, tokenizer: Tokenizer, metrics: Any = None) -> None:
        self.tokenizer = tokenizer
        self.processor = OutputProcessor(tokenizer, metrics)
        self.woken: list[str] = []

    def add(self, request_id: str = "a", **params: Any) -> RequestState:
        stated = SamplingParams(**({"seed": 1, "max_tokens": 1000} | params))
        requests = [
            EngineCoreRequest(
                request_id=request_id if stated.n == 1 else f"{index}_{request_id}",
                prompt_token_ids=[1, 2, 3],
                sampling_params=stated,
                eos_token_ids=[EOS],
                arrival_time=100.0,
                choice_index=index,
            )
            for index in range(stated.n)
        ]
        inputs = EngineInputs(request_id, None, stated, requests)
        return self.processor.add_request(inputs, lambda: self.woken.append(request_id))

    def step(self, *outputs: EngineCoreOutput, now: float = 101.0) -> list[str]:
        """Hands over a step; returns the ids to abort."""
        return self.processor.process(EngineCoreOutputs(list(outputs), timestamp=now)).abort_ids

    def stream(self, state: RequestState, ids: Iterable[int], **end: Any) -> list[RequestOutput]:
        """A token a step, taking outputs as they come; then the end, if the stream has not ended itself."""
        engine_id = state.engine_requests[0].request_id
        taken = []
        for token_id in ids:
            self.step(EngineCoreOutput(engine_id, [token_id]))
            taken.append(state.take())
            if state.finished:
                break
        else:
            self.step(EngineCoreOutput(engine_id, **({"new_token_ids": []} | end)))
            taken.append(state.take())
        return [output for output in taken if output is not None]


@pytest.fixture
def bench(tokenizer: Tokenizer) -> Bench:
    return Bench(tokenizer)


def full(bench: Bench, ids: list[int], **params: Any) -> RequestOutput:
    """The one output of a request that is asked for at the end only."""
    state = bench.add("full", output_kind=RequestOutputKind.FINAL_ONLY, **params)
    (output,) = bench.stream(state, ids, finish_reason=FinishReason.LENGTH)
    return output


# ---- text -----------------------------------------------------------------------------------------------------------


def test_cumulative_outputs_grow_and_stay_as_they_were(bench: Bench) -> None:
    outputs = bench.stream(bench.add(), bench.tokenizer.encode("abc"), finish_reason=FinishReason.LENGTH)
    assert [output.outputs[0].text for output in outputs] == ["a", "ab", "abc", "abc"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 3]
    assert [output.finished for output in outputs] == [False, False, False, True]
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert outputs[-1].outputs[0].stop_reason is None


def test_delta_outputs_hold_what_is_new(bench: Bench) -> None:
    state = bench.add(output_kind=RequestOutputKind.DELTA)
    outputs = bench.stream(state, bench.tokenizer.encode("aé"), finish_reason=FinishReason.LENGTH)
    # The first byte of "é" is a token without text: it still comes as an id.
    assert [output.outputs[0].text for output in outputs] == ["a", "", "é", ""]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 1, 1, 0]


def test_only_one_output_comes_with_final_only(bench: Bench) -> None:
    assert full(bench, bench.tokenizer.encode("abc")).outputs[0].text == "abc"
    assert bench.woken == ["full"]


def test_deltas_not_taken_in_time_come_as_one(bench: Bench) -> None:
    state = bench.add(output_kind=RequestOutputKind.DELTA, logprobs=0)
    for token_id in bench.tokenizer.encode("abc"):
        bench.step(EngineCoreOutput("a", [token_id], [PositionLogprobs([token_id], [-1.0], 1)]))
    output = state.take()
    assert output is not None
    (choice,) = output.outputs
    assert (choice.text, len(choice.token_ids), len(choice.logprobs or [])) == ("abc", 3, 3)
    assert state.take() is None


def test_nothing_is_given_when_nothing_changed(bench: Bench) -> None:
    state = bench.add()
    assert state.take() is None
    bench.step(EngineCoreOutput("a", []))
    assert state.take() is None
    assert bench.woken == []


def test_text_cut_in_a_character_is_closed_like_a_whole_decode(bench: Bench) -> None:
    ids = bench.tokenizer.encode("x€")[:-1]
    assert full(bench, ids).outputs[0].text == bench.tokenizer.decode(ids)


def test_the_stop_tokens_id_is_given_and_its_text_is_not(bench: Bench) -> None:
    ids = bench.tokenizer.encode("ab!")
    for last, stop_reason in ((EOS, None), (ids[-1], ids[-1])):
        state = bench.add("a")
        end = EngineCoreOutput("a", [*ids[:2], last], finish_reason=FinishReason.STOP, stop_reason=stop_reason)
        assert bench.step(end) == []
        output = state.take()
        assert output is not None
        choice = output.outputs[0]
        assert (choice.text, choice.token_ids) == ("ab", [*ids[:2], last])
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop_reason)


# ---- stop strings ---------------------------------------------------------------------------------------------------


def test_a_stop_string_split_over_tokens_ends_the_text_before_it(bench: Bench) -> None:
    state = bench.add(stop=["END", "never"], output_kind=RequestOutputKind.DELTA)
    ids = bench.tokenizer.encode("xE ENDabc")
    outputs = bench.stream(state, ids)
    assert "".join(output.outputs[0].text for output in outputs) == "xE "
    assert [token_id for output in outputs for token_id in output.outputs[0].token_ids] == ids[:6]
    assert outputs[-1].finished
    assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == ("stop", "END")


def test_a_stop_string_inside_a_step_cuts_its_other_tokens_off(bench: Bench) -> None:
    state = bench.add(stop=["b"], logprobs=0)
    ids = bench.tokenizer.encode("abcd")
    logprobs = [PositionLogprobs([token_id], [-1.0], 1) for token_id in ids]
    assert bench.step(EngineCoreOutput("a", ids, logprobs)) == ["a"]
    output = state.take()
    assert output is not None
    choice = output.outputs[0]
    assert (choice.text, choice.token_ids, len(choice.logprobs or [])) == ("a", ids[:2], 2)
    assert choice.cumulative_logprob == -2.0


def test_a_stop_string_in_the_engines_last_step_wins_over_its_reason(bench: Bench) -> None:
    state = bench.add(stop=["b"])
    end = EngineCoreOutput("a", bench.tokenizer.encode("ab"), finish_reason=FinishReason.LENGTH)
    assert bench.step(end) == []
    output = state.take()
    assert output is not None
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("a", "stop")


def test_held_back_text_comes_out_at_the_end(bench: Bench) -> None:
    state = bench.add(stop=["abX"], output_kind=RequestOutputKind.DELTA)
    outputs = bench.stream(state, bench.tokenizer.encode("zab"), finish_reason=FinishReason.LENGTH)
    assert [output.outputs[0].text for output in outputs] == ["z", "", "", "ab"]


def test_stop_strings_do_not_act_before_min_tokens(bench: Bench) -> None:
    ids = bench.tokenizer.encode("a#b#c#d")
    for min_tokens, text in ((0, "a"), (1, "a"), (2, "a#b"), (3, "a#b"), (4, "a#b#c"), (6, "a#b#c#d")):
        assert full(bench, ids, stop=["#"], min_tokens=min_tokens).outputs[0].text == text


def test_a_stop_string_may_begin_before_min_tokens_and_end_after(bench: Bench) -> None:
    ids = bench.tokenizer.encode("xENDyENDz")
    assert full(bench, ids, stop=["END"], min_tokens=3).outputs[0].text == "x"
    assert full(bench, ids, stop=["END"], min_tokens=4).outputs[0].text == "xENDy"


def naive(text_of: list[str], stops: list[str], min_tokens: int) -> tuple[str, int, str | None]:
    """(text, tokens used, stop string): the earliest completed occurrence, looked for anew at each token."""
    for used in range(min_tokens + 1, len(text_of)):
        seen, before = text_of[used], text_of[used - 1]
        ends = [
            (begin + len(stop), begin, stop)
            for stop in stops
            for begin in range(len(seen))
            if seen.startswith(stop, begin) and begin + len(stop) > len(before)
        ]
        if ends:
            first = min(end for end, _, _ in ends)
            begin, stop = min((begin, stop) for end, begin, stop in ends if end == first)
            return seen[:begin], used, stop
    return text_of[-1], len(text_of) - 1, None


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab€", max_size=12),
    stops=st.lists(st.text("ab€", min_size=1, max_size=3), max_size=2, unique=True),
    min_tokens=st.integers(0, 6),
    kind=st.sampled_from(list(RequestOutputKind)),
)
def test_streamed_text_is_the_whole_text_up_to_the_first_stop_string(
    tokenizer: Tokenizer, text: str, stops: list[str], min_tokens: int, kind: RequestOutputKind
) -> None:
    bench = Bench(tokenizer)
    ids = tokenizer.encode(text)
    complete = [tokenizer.decode(ids[:used]).removesuffix("\ufffd") for used in range(len(ids) + 1)]
    expected, used, stop = naive(complete, stops, min_tokens)
    state = bench.add(stop=stops, min_tokens=min_tokens, output_kind=kind)
    outputs = bench.stream(state, ids, finish_reason=FinishReason.LENGTH)
    choices = [output.outputs[0] for output in outputs]
    if kind != RequestOutputKind.DELTA:
        choices = choices[-1:]
    assert "".join(choice.text for choice in choices) == expected
    assert [token_id for choice in choices for token_id in choice.token_ids] == ids[:used]
    assert choices[-1].stop_reason == stop
    assert choices[-1].finish_reason == ("length" if stop is None else "stop")


# ---- logprobs -------------------------------------------------------------------------------------------------------


def test_logprob_tables_hold_the_sampled_token_first_and_once(bench: Bench) -> None:
    a, b, c = bench.tokenizer.encode("abc")
    state = bench.add(logprobs=2)
    bench.step(EngineCoreOutput("a", [c], [PositionLogprobs([c, a, b], [-3.0, -0.5, -1.0], 7)]))
    bench.step(EngineCoreOutput("a", [b], [PositionLogprobs([b, a, b], [-1.0, -0.5, -1.0], 2)]))
    output = state.take()
    assert output is not None
    first, second = output.outputs[0].logprobs or []
    assert list(first.items()) == [(c, Logprob(-3.0, 7, "c")), (a, Logprob(-0.5, 1, "a")), (b, Logprob(-1.0, 2, "b"))]
    assert list(second.items()) == [(b, Logprob(-1.0, 2, "b")), (a, Logprob(-0.5, 1, "a"))]
    assert output.outputs[0].cumulative_logprob == -4.0


def test_logprobs_zero_means_the_sampled_token_and_none_means_no_tables(bench: Bench) -> None:
    (a,) = bench.tokenizer.encode("a")
    with_tables, without = bench.add("a", logprobs=0), bench.add("b")
    bench.step(EngineCoreOutput("a", [a], [PositionLogprobs([a], [-0.5], 3)]), EngineCoreOutput("b", [a]))
    output, plain = with_tables.take(), without.take()
    assert output is not None
    assert plain is not None
    assert output.outputs[0].logprobs == [{a: Logprob(-0.5, 3, "a")}]
    assert (plain.outputs[0].logprobs, plain.outputs[0].cumulative_logprob) == (None, None)


def large_prompt(bench: Bench, request_id: str = "a", **params: Any) -> RequestState:
    """A request whose engine has told the logprobs of its prompt, many thousand, and a first token's."""
    a, b, c = bench.tokenizer.encode("abc")
    state = bench.add(request_id, prompt_logprobs=1, logprobs=1, **params)
    positions = [PositionLogprobs([a, b] * 100, [-0.5, -1.0] * 100, 1) for _ in range(100)]
    bench.step(EngineCoreOutput(request_id, [], new_prompt_logprobs=positions))
    bench.step(EngineCoreOutput(request_id, [c], [PositionLogprobs([c, a], [-3.0, -0.5], 7)]))
    return state


def test_large_tables_are_made_when_they_are_taken_and_before_in_any_thread(bench: Bench) -> None:
    by_take, by_thread = large_prompt(bench, "a"), large_prompt(bench, "b")
    assert by_take.prompt_logprobs == [None]  # the loop that takes in steps has others to serve
    work = by_thread.table_work()
    assert work is not None
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert by_thread.table_work() is None
    first, second = by_take.take(), by_thread.take()
    assert first is not None
    assert second is not None
    assert first.prompt_logprobs == second.prompt_logprobs
    assert len(first.prompt_logprobs or []) == 101
    assert first.outputs == second.outputs
    assert len(first.outputs[0].logprobs or []) == 1


def test_large_tables_that_cannot_be_made_fail_their_own_request(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    state = large_prompt(bench)
    monkeypatch.setattr("octavo.engine.request_state.logprob_table", lambda *_: 1 / 0)
    output = state.take()
    assert output is not None
    assert (output.prompt_logprobs, output.outputs[0].logprobs) == (None, None)
    assert isinstance(state.error, RequestFailedError)
    assert bench.processor.abort(["a"]) == ["a"]  # it is still under way in the engine


# ---- choices --------------------------------------------------------------------------------------------------------


def test_choices_come_in_one_output_in_order_of_index(bench: Bench) -> None:
    a, b = bench.tokenizer.encode("ab")
    state = bench.add(n=2)
    bench.step(EngineCoreOutput("1_a", [b], finish_reason=FinishReason.LENGTH), EngineCoreOutput("0_a", [a]))
    output = state.take()
    assert output is not None
    assert [(c.index, c.text, c.finish_reason) for c in output.outputs] == [(0, "a", None), (1, "b", "length")]
    assert not output.finished
    bench.step(EngineCoreOutput("0_a", [a], finish_reason=FinishReason.LENGTH))
    output = state.take()
    assert output is not None
    assert [(c.index, c.text) for c in output.outputs] == [(0, "aa"), (1, "b")]
    assert output.finished
    assert bench.processor.num_unfinished == 0


def test_deltas_hold_only_the_choices_that_have_something_new(bench: Bench) -> None:
    a, b = bench.tokenizer.encode("ab")
    state = bench.add(n=2, output_kind=RequestOutputKind.DELTA)
    seen = []
    for engine_id, token_id in (("1_a", b), ("0_a", a)):
        bench.step(EngineCoreOutput(engine_id, [token_id]))
        output = state.take()
        assert output is not None
        seen.append([(choice.index, choice.text) for choice in output.outputs])
    assert seen == [[(1, "b")], [(0, "a")]]


def test_final_only_waits_for_every_choice(bench: Bench) -> None:
    (a,) = bench.tokenizer.encode("a")
    state = bench.add(n=2, output_kind=RequestOutputKind.FINAL_ONLY)
    bench.step(EngineCoreOutput("0_a", [a], finish_reason=FinishReason.LENGTH))
    assert state.take() is None
    bench.step(EngineCoreOutput("1_a", [a], finish_reason=FinishReason.LENGTH))
    output = state.take()
    assert output is not None
    assert [choice.text for choice in output.outputs] == ["a", "a"]


# ---- ends, ids, accounts --------------------------------------------------------------------------------------------


def test_an_id_under_way_is_refused_and_free_again_at_the_end(bench: Bench) -> None:
    bench.add("a", n=2)
    for taken in ("a", "1_a"):
        with pytest.raises(RequestError) as caught:
            bench.add(taken)
        assert caught.value.param == "request_id"
    bench.processor.abort(["a"])
    bench.add("a")


def test_an_abort_ends_the_choices_that_go_on(bench: Bench) -> None:
    (a,) = bench.tokenizer.encode("a")
    state = bench.add(n=3, stop=["ab"])
    bench.step(EngineCoreOutput("1_a", [a], finish_reason=FinishReason.LENGTH), EngineCoreOutput("0_a", [a]))
    assert bench.processor.abort(["a", "unknown"]) == ["0_a", "2_a"]
    output = state.take()
    assert output is not None
    assert output.finished
    assert [(c.text, c.finish_reason) for c in output.outputs] == [("a", "abort"), ("a", "length"), ("", "abort")]
    assert bench.processor.abort(["a"]) == []


def test_late_tokens_of_an_ended_request_do_not_reach_the_next_of_that_id(bench: Bench) -> None:
    a, b = bench.tokenizer.encode("ab")
    bench.add("a")
    assert bench.processor.abort(["a"]) == ["a"]
    state = bench.add("a")
    (request,) = state.engine_requests
    assert request.request_id != "a"
    bench.step(EngineCoreOutput("a", [b]), EngineCoreOutput(request.request_id, [a]))
    bench.step(EngineCoreOutput("a", [], finish_reason=FinishReason.ABORT))
    output = state.take()
    assert output is not None
    assert (output.request_id, output.outputs[0].text) == ("a", "a")
    bench.processor.abort(["a"])
    bench.step(EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT))
    # The engine has had its last word on both: the id is used as it is again.
    assert bench.add("a").engine_requests[0].request_id == "a"


def test_an_error_is_the_requests_own(bench: Bench) -> None:
    (a,) = bench.tokenizer.encode("a")
    failing, other = bench.add("a"), bench.add("b")
    bench.step(
        EngineCoreOutput("a", [], finish_reason=FinishReason.ERROR, error="NaN in the logits"),
        EngineCoreOutput("b", [a]),
    )
    output = failing.take()
    assert output is not None
    assert output.outputs[0].finish_reason == "error"
    assert isinstance(failing.error, RequestFailedError)
    assert str(failing.error) == "NaN in the logits"
    assert (other.finished, other.error) == (False, None)


def test_a_request_that_left_itself_no_token_is_the_clients_mistake(bench: Bench) -> None:
    state = bench.add()
    bench.step(EngineCoreOutput("a", [], finish_reason=FinishReason.ERROR, error=NO_TOKEN_LEFT))
    assert isinstance(state.error, NoTokenLeftError)
    assert state.error.status == 400
    assert RequestFailedError("control").status == 500


def test_the_engines_refusal_of_a_request_is_the_clients_mistake(bench: Bench) -> None:
    state = bench.add()
    refusal = Refusal("input_tokens")
    bench.step(EngineCoreOutput("a", [], finish_reason=FinishReason.ERROR, error="can never fit", refusal=refusal))
    assert isinstance(state.error, RequestError)
    assert state.error.param == "input_tokens"
    assert str(state.error) == "can never fit"
    assert not isinstance(state.error, OverloadedError)


def test_a_request_that_is_not_let_in_now_may_come_again(bench: Bench) -> None:
    state = bench.add(n=2)
    for index in range(2):
        refusal = Refusal(retry_after=7)
        name = f"{index}_a"
        bench.step(EngineCoreOutput(name, [], finish_reason=FinishReason.ERROR, error="too busy", refusal=refusal))
    assert state.finished
    assert isinstance(state.error, OverloadedError)
    assert (str(state.error), state.error.retry_after) == ("too busy", 7)
    bench.add(n=2)  # nothing is left of it


def test_the_last_output_has_the_requests_times_and_the_cached_tokens(bench: Bench) -> None:
    (a,) = bench.tokenizer.encode("a")
    state = bench.add()
    bench.step(EngineCoreOutput("a", [a], num_cached_tokens=2))
    output = state.take()
    assert output is not None
    assert (output.num_cached_tokens, output.metrics) == (2, None)
    times = RequestMetrics(100.0, 100.1, 100.2, 101.0, 102.0, 3)
    bench.step(EngineCoreOutput("a", [a], finish_reason=FinishReason.LENGTH, metrics=times))
    output = state.take()
    assert output is not None
    assert (output.num_cached_tokens, output.metrics) == (2, times)


def test_what_a_choice_finds_cached_by_another_is_not_counted(bench: Bench) -> None:
    a, b = bench.tokenizer.encode("ab")
    state = bench.add(n=2)
    bench.step(EngineCoreOutput("0_a", [a]), EngineCoreOutput("1_a", [b], num_cached_tokens=2))
    output = state.take()
    assert output is not None
    assert output.num_cached_tokens == 0


class RecordingMetrics:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *args))

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


def test_metrics_count_what_callers_get(tokenizer: Tokenizer) -> None:
    metrics = RecordingMetrics()
    bench = Bench(tokenizer, metrics)
    a, b = tokenizer.encode("ab")
    bench.add("a", stop=["b"])
    stats = SchedulerStats(step=1)
    bench.processor.process(EngineCoreOutputs([EngineCoreOutput("a", [a], num_cached_tokens=2)], stats, 102.0))
    bench.step(EngineCoreOutput("a", [a, b, a, a]), now=104.0)
    bench.step(EngineCoreOutput("a", [a]), now=105.0)  # not counted: the stop string has ended it
    assert metrics.of("on_step") == [(stats,)]
    assert metrics.of("on_outputs") == [(StepCounts(3, 2, 1, [2.0]),), (StepCounts(0, 0, 2, [], {1.0: 2}),)]
    assert metrics.of("on_sequence_finished") == []  # the engine's own times are still to come
    times = RequestMetrics(100.0, 100.1, 100.2, 102.0, 105.0)
    bench.step(EngineCoreOutput("a", [], finish_reason=FinishReason.ABORT, num_cached_tokens=2, metrics=times))
    (((*counted, _now),),) = metrics.of("on_sequence_finished")
    assert counted == [FinishReason.STOP, times, 3, 2, 3, 1000]


def test_the_prompt_of_several_choices_is_counted_once(tokenizer: Tokenizer) -> None:
    metrics = RecordingMetrics()
    bench = Bench(tokenizer, metrics)
    (a,) = tokenizer.encode("a")
    bench.add("a", n=2)
    bench.step(EngineCoreOutput("0_a", [a]), EngineCoreOutput("1_a", [a]))
    ((counts,),) = metrics.of("on_outputs")
    assert (counts.num_prompt_tokens, counts.num_generation_tokens) == (3, 2)
    assert metrics.of("on_request_finished") == []
    bench.step(EngineCoreOutput("1_a", [a], finish_reason=FinishReason.LENGTH))
    assert metrics.of("on_request_finished") == []
    bench.step(EngineCoreOutput("0_a", [], finish_reason=FinishReason.STOP))
    ((request,),) = metrics.of("on_request_finished")
    assert (request.num_prompt_tokens, request.num_generation_tokens) == (3, [1, 2])
    assert request.finish_reasons == ["stop", "length"]


def test_tokens_of_one_step_that_waited_equally_long_are_counted_together(tokenizer: Tokenizer) -> None:
    metrics = RecordingMetrics()
    bench = Bench(tokenizer, metrics)
    (a,) = tokenizer.encode("a")
    for name in "xyz":
        bench.add(name)
    bench.step(EngineCoreOutput("x", [a]), EngineCoreOutput("y", [a]), now=102.0)
    bench.step(EngineCoreOutput("x", [a]), EngineCoreOutput("y", [a]), EngineCoreOutput("z", [a]), now=103.0)
    bench.step(*(EngineCoreOutput(name, [a]) for name in "xyz"), now=105.0)
    waited = [counts.token_seconds for (counts,) in metrics.of("on_outputs")]
    assert waited == [{}, {1.0: 2}, {2.0: 3}]


@pytest.mark.parametrize("limit", [None, "max_num_queued_reqs"])
def test_a_request_that_is_not_let_in_is_none_that_has_ended(tokenizer: Tokenizer, limit: str | None) -> None:
    metrics = RecordingMetrics()
    bench = Bench(tokenizer, metrics)
    bench.add("a", n=2)
    for name in ("0_a", "1_a"):
        refusal = Refusal(retry_after=3, limit=limit)
        bench.step(EngineCoreOutput(name, [], finish_reason=FinishReason.ERROR, error="no", refusal=refusal))
    assert metrics.of("on_sequence_finished") == metrics.of("on_request_finished") == []
    assert metrics.of("on_rejected") == ([] if limit is None else [(limit,)])


@pytest.mark.parametrize("last", [None, FinishReason.LENGTH])
def test_output_that_cannot_be_processed_fails_its_own_request_only(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, last: FinishReason | None
) -> None:
    a, b = bench.tokenizer.encode("ab")

    def decode_token(token_id: int) -> str:
        raise ValueError("no such token")

    other = bench.add("b")
    monkeypatch.setattr(bench.tokenizer, "decode_token", decode_token)
    failing = bench.add("f", n=2, logprobs=1)
    tables = [PositionLogprobs([a], [-0.5], 1)]
    aborted = bench.step(
        EngineCoreOutput("0_f", [a], new_logprobs=tables, finish_reason=last), EngineCoreOutput("b", [b])
    )
    assert aborted == (["0_f", "1_f"] if last is None else ["1_f"])
    assert isinstance(failing.error, RequestFailedError)
    assert "ValueError: no such token" in str(failing.error)
    assert failing.finished
    assert "f" in bench.woken
    output = other.take()
    assert output is not None
    assert (output.outputs[0].text, other.error) == ("b", None)
    bench.step(*(EngineCoreOutput(engine_id, [], finish_reason=FinishReason.ABORT) for engine_id in aborted))
    assert not bench.processor._closing
    assert bench.processor.num_unfinished == 1


def test_stop_tables_are_made_once_for_all_choices(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    import octavo.engine.output_processor as module

    make = Mock(wraps=module.StopMatcher)
    monkeypatch.setattr(module, "StopMatcher", make)
    bench.add("a", n=8, stop=["#"])
    bench.add("b", n=2)
    make.assert_called_once_with(["#"])
