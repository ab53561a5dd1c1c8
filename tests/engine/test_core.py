"""EngineCore over an executor without a model: the step, the batch queue, aborts, refusals, the step trace."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.errors import ConfigError, RequestError
from octavo.types import FinishReason


def requests(kit, count, seed=0, **fields):
    rng = random.Random(seed)
    return [
        kit.request(f"r{index}", [rng.randrange(1000) for _ in range(rng.randint(1, 90))], rng.randint(1, 30), **fields)
        for index in range(count)
    ]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_every_request_gets_its_own_tokens_to_the_end(kit, make_core, async_scheduling):
    core = make_core(async_scheduling=async_scheduling)
    asked = requests(kit, 20)
    for request in asked:
        core.add_request(request)
    result = kit.run(core)
    for request in asked:
        count = request.sampling_params.max_tokens
        assert result.tokens[request.request_id] == kit.expected(request.prompt_token_ids, count)
        assert result.finished[request.request_id].finish_reason == FinishReason.LENGTH


def test_two_batches_are_in_flight_before_the_first_is_waited_for(kit, make_core):
    executor = kit.executor(overlap=True)
    core = make_core(executor, async_scheduling=True)
    core.add_request(kit.request("a", [5] * 20, 6))
    executor.hold.clear()
    assert core.next_outputs() == {}  # launched, not waited for
    assert [step.step for step in executor.steps] == [1]
    # The next call launches the second step before it waits for the first: give way as soon as it has.
    execute_model = executor.execute_model

    def execute_and_give_way(scheduler_output):
        future = execute_model(scheduler_output)
        executor.hold.set()
        return future

    executor.execute_model = execute_and_give_way
    outputs = core.next_outputs()
    assert [step.step for step in executor.steps] == [1, 2]
    assert outputs[0].outputs[0].new_token_ids == kit.expected([5] * 20, 1)
    collected = kit.collected()
    collected.add(outputs[0].outputs)
    assert kit.run(core, collected).tokens["a"] == kit.expected([5] * 20, 6)


def test_step_trace_shows_sync_and_overlapped_steps(kit, make_core, tmp_path):
    lines = {}
    for overlap in (False, True):
        path = tmp_path / f"trace{overlap}.jsonl"
        core = make_core(step_trace=str(path), async_scheduling=overlap, max_num_batched_tokens=16, max_num_seqs=4)
        core.add_request(kit.request("a", list(range(40)), 5))
        kit.run(core)
        lines[overlap] = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["num_tokens"] for line in lines[False]] == [16, 16, 8, 1, 1, 1, 1]
    assert [line["step"] for line in lines[False]] == list(range(1, 8))
    assert max(line["in_flight"] for line in lines[False]) == 1
    assert max(line["in_flight"] for line in lines[True]) == 2
    for line in lines[False]:
        assert [request["id"] for request in line["requests"]] == ["a"]
        assert line["graph_mode"] == "EAGER"
        assert line["preempted"] == []


def test_step_trace_says_what_took_how_long(kit, make_core, tmp_path, monkeypatch):
    path = tmp_path / "trace.jsonl"
    executor = kit.executor()
    core = make_core(executor, step_trace=str(path))
    core.add_request(kit.request("a", [1], 1))
    now = 1000.0

    def taking(seconds, call):
        def slow(*args):
            nonlocal now
            now += seconds
            return call(*args)

        return slow

    monkeypatch.setattr("octavo.engine.core.time", SimpleNamespace(monotonic=lambda: now))
    core.scheduler.schedule = taking(0.125, core.scheduler.schedule)
    executor.execute_model = taking(0.25, executor.execute_model)
    executor.sample_tokens = taking(0.5, executor.sample_tokens)
    core.scheduler.update_from_output = taking(1.0, core.scheduler.update_from_output)
    kit.run(core)
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["times_ms"] == {"schedule": 125.0, "execute": 750.0, "update": 1000.0}


def test_step_trace_lines_are_in_the_file_at_once(kit, make_core, tmp_path):
    path = tmp_path / "trace.jsonl"
    core = make_core(step_trace=str(path))
    core.add_request(kit.request("a", [1], 3))
    core.next_outputs()
    assert len(path.read_text().splitlines()) == 1


def test_full_disk_ends_the_trace_with_one_warning_and_not_the_engine(kit, make_core, capsys):
    core = make_core(step_trace="/dev/full")
    core.add_request(kit.request("a", [1], 5))
    assert kit.run(core).tokens["a"] == kit.expected([1], 5)
    assert capsys.readouterr().err.count("no further steps are traced") == 1


def test_trace_file_that_cannot_be_opened_names_the_flag(make_core, tmp_path):
    with pytest.raises(ConfigError, match="--step-trace"):
        make_core(step_trace=str(tmp_path / "missing" / "trace"))


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("steps_before", [0, 1, 2, 3, 7])
def test_abort_at_any_moment_ends_that_request_only(kit, make_core, async_scheduling, steps_before):
    core = make_core(async_scheduling=async_scheduling)
    asked = requests(kit, 6, seed=steps_before)
    victim = kit.request("victim", [9] * 100, 200)
    for request in (*asked[:3], victim, *asked[3:]):
        core.add_request(request)
    collected = kit.collected()
    for _ in range(steps_before):
        for outputs in core.next_outputs().values():
            collected.add(outputs.outputs)
    for outputs in core.abort_requests(["victim", "never heard of"]).values():
        collected.add(outputs.outputs)
    assert collected.finished["victim"].finish_reason == FinishReason.ABORT
    kit.run(core, collected)
    got = collected.tokens["victim"]
    assert got == kit.expected(victim.prompt_token_ids, len(got))
    for request in asked:
        count = request.sampling_params.max_tokens
        assert collected.tokens[request.request_id] == kit.expected(request.prompt_token_ids, count)
    assert core.stats()["kv_cache_usage"] == 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_id_may_be_used_again_while_old_results_are_in_flight(kit, make_core, async_scheduling):
    core = make_core(async_scheduling=async_scheduling)
    core.add_request(kit.request("a", [1, 2, 3], 50))
    for _ in range(3):
        core.next_outputs()
    core.abort_requests(["a"])
    core.add_request(kit.request("a", [7, 8], 10))
    assert kit.run(core).tokens["a"] == kit.expected([7, 8], 10)


def test_preempted_requests_end_with_the_same_tokens_sync_and_async(kit, make_core, tmp_path):
    for overlap in (False, True):
        path = tmp_path / f"trace{overlap}.jsonl"
        core = make_core(async_scheduling=overlap, num_gpu_blocks_override=12, max_model_len=128, step_trace=str(path))
        asked = [kit.request(f"r{index}", [index] * 40, 60) for index in range(4)]
        for request in asked:
            core.add_request(request)
        result = kit.run(core)
        for request in asked:
            assert result.tokens[request.request_id] == kit.expected(request.prompt_token_ids, 60)
        assert core.stats()["preemptions_total"] > 0
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert sum(len(line["preempted"]) for line in lines) == core.stats()["preemptions_total"]


def test_request_that_cannot_be_admitted_is_refused_and_harms_nobody(kit, make_core):
    core = make_core()
    core.add_request(kit.request("a", [1, 2], 5))
    with pytest.raises(RequestError):
        core.add_request(kit.request("a", [3, 4], 5))
    assert kit.run(core).tokens == {"a": kit.expected([1, 2], 5)}


def test_derived_length_is_lowered_to_what_memory_allows_and_said(kit, make_core, capsys):
    page_bytes = 2 * 16 * 8 * 4
    executor = kit.executor(available=page_bytes * 9)
    core = make_core(executor)
    assert core.config.model.max_model_len == core.ready.max_model_len < 512
    assert executor.stages == ["load_model", f"initialize {core.ready.max_model_len}"]
    assert f"lowered from 512 to {core.ready.max_model_len}" in capsys.readouterr().err


def test_few_stated_blocks_lower_the_derived_length_and_it_is_said(make_core, capsys):
    core = make_core(num_gpu_blocks_override=3)
    assert (core.ready.max_model_len, core.ready.num_kv_blocks) == (48, 3)
    assert "lowered from 512 to 48" in capsys.readouterr().err


def test_more_stated_blocks_than_memory_are_an_error_that_names_the_flag(kit, make_core):
    executor = kit.executor()
    with pytest.raises(ConfigError, match=r"--num-gpu-blocks-override 2000000000 .* 16777216"):
        make_core(executor, num_gpu_blocks_override=2_000_000_000)
    assert executor.stages == ["load_model"]


def test_stated_length_that_does_not_fit_is_an_error_that_leaves_nothing_open(kit, make_core):
    executor = kit.executor(available=2 * 16 * 8 * 4 * 9)
    with pytest.raises(ConfigError, match="max-model-len"):
        make_core(executor, max_model_len=512)
    assert executor.is_shut_down


def test_ready_gives_the_final_values(make_core):
    core = make_core(num_gpu_blocks_override=40, max_model_len=100)
    assert (core.ready.max_model_len, core.ready.num_kv_blocks, core.ready.block_size) == (100, 40, 16)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_failed_step_raises_its_own_error(kit, make_core, async_scheduling):
    executor = kit.executor(overlap=async_scheduling)
    executor.fail_at_step = 3
    core = make_core(executor, async_scheduling=async_scheduling)
    core.add_request(kit.request("a", [1], 20))
    with pytest.raises(RuntimeError, match="on fire"):
        kit.run(core)


def test_only_listed_methods_can_be_called_by_name(kit, make_core):
    core = make_core()
    assert core.call_utility("reset_prefix_cache", []) is True
    assert core.call_utility("stats", [])["num_running"] == 0
    for method, args in (("shutdown", []), ("__init__", []), ("stats", [1])):
        with pytest.raises(RequestError):
            core.call_utility(method, args)


def test_outputs_go_to_the_front_end_that_asked(kit, make_core):
    core = make_core()
    core.add_request(kit.request("a", [1], 2, client_index=0))
    core.add_request(kit.request("b", [2], 2, client_index=1))
    seen = {0: set(), 1: set()}
    while core.has_work():
        for client_index, outputs in core.next_outputs().items():
            seen[client_index] |= {output.request_id for output in outputs.outputs}
    assert seen == {0: {"a"}, 1: {"b"}}


def test_trace_path_is_replaced(kit, make_core, tmp_path):
    path = Path(tmp_path / "trace")
    path.write_text("old\n")
    make_core(step_trace=str(path))
    assert path.read_text() == ""
