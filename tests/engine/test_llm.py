"""Specification of LLM, on a tiny random Llama: right answers, the same ones in any company, and errors that name
their cause and harm nobody else."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from octavo import LLM, RequestOutput, SamplingParams
from octavo.errors import EngineDeadError, OverloadedError, RequestError
from tests.metrics.collector import attributes, collecting

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "seed": 0, "num_gpu_blocks_override": 256}
PROMPTS = ["The quick brown fox", "Once upon a time there was", "hello, how are you?", "é"]


@pytest.fixture(scope="module")
def llm(tiny_llama_dir: Path) -> Iterator[LLM]:
    with LLM(str(tiny_llama_dir), **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def separate(tiny_llama_dir: Path) -> Iterator[LLM]:
    """The same with an engine process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_ENABLE_MULTIPROCESSING", "1")
        llm = LLM(str(tiny_llama_dir), **OPTIONS)
    with llm:
        yield llm


@pytest.fixture(scope="module")
def reference(tiny_llama_dir: Path) -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32).eval()


def run(llm: LLM, prompts: Any, params: Any = GREEDY, **options: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False, **options)


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


# ---- right answers --------------------------------------------------------------------------------------------------


def test_greedy_tokens_equal_transformers(llm: LLM, reference: transformers.LlamaForCausalLM) -> None:
    for output in run(llm, PROMPTS):
        ids = torch.tensor([output.prompt_token_ids])
        with torch.inference_mode():
            expected = reference.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=[], pad_token_id=0)
        assert output.outputs[0].token_ids == expected[0, ids.shape[1] :].tolist()
        assert output.outputs[0].finish_reason == "length"
        assert output.finished


def test_logprobs_are_those_of_the_raw_distribution(llm: LLM, reference: transformers.LlamaForCausalLM) -> None:
    params = SamplingParams(temperature=1.3, top_k=50, seed=5, max_tokens=8, logprobs=4, ignore_eos=True)
    (output,) = run(llm, PROMPTS[0], params)
    choice = output.outputs[0]
    start = len(output.prompt_token_ids)
    with torch.inference_mode():
        logits = reference(torch.tensor([output.prompt_token_ids + choice.token_ids])).logits[0]
    raw = logits.log_softmax(-1)
    assert choice.logprobs is not None
    for position, (token_id, table) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True)):
        row = raw[start - 1 + position]
        assert next(iter(table)) == token_id
        top = row.topk(4).indices.tolist()
        assert set(table) == {token_id, *top}
        for other, entry in table.items():
            assert entry.logprob == pytest.approx(row[other].item(), abs=1e-4)
            assert entry.rank == int((row > row[other]).sum()) + 1
            assert entry.decoded_token == llm.get_tokenizer().decode_token(other)
    total = sum(table[token_id].logprob for token_id, table in zip(choice.token_ids, choice.logprobs, strict=True))
    assert choice.cumulative_logprob == pytest.approx(total)


def test_text_is_the_decoding_of_all_ids(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    for output in run(llm, PROMPTS, SamplingParams(seed=3, max_tokens=60, ignore_eos=True)):
        assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids)
        assert output.prompt_token_ids == tokenizer.encode(output.prompt or "")


@pytest.mark.parametrize("width", [2, 5])
def test_a_stop_string_may_be_split_over_tokens(llm: LLM, width: int) -> None:
    whole = run(llm, PROMPTS[0], SamplingParams(seed=8, max_tokens=80, ignore_eos=True))[0].outputs[0]
    stop = whole.text[30 : 30 + width]
    params = SamplingParams(seed=8, max_tokens=80, ignore_eos=True, stop=[stop, "not in it"])
    cut = run(llm, PROMPTS[0], params)[0].outputs[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert stop in llm.get_tokenizer().decode(cut.token_ids)
    assert stop not in llm.get_tokenizer().decode(cut.token_ids[:-1])


def test_stop_tokens_end_the_request_and_do_not_show(llm: LLM) -> None:
    whole = run(llm, PROMPTS[1])[0].outputs[0]
    stop_id = whole.token_ids[5]
    at = whole.token_ids.index(stop_id)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop_id])
    cut = run(llm, PROMPTS[1], params)[0].outputs[0]
    assert cut.token_ids == whole.token_ids[: at + 1]
    assert cut.text == llm.get_tokenizer().decode(whole.token_ids[:at])
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop_id)


def test_nothing_ends_a_request_before_min_tokens(llm: LLM) -> None:
    whole = run(llm, PROMPTS[1])[0].outputs[0]
    decode = llm.get_tokenizer().decode
    for early in ({"stop_token_ids": [whole.token_ids[2]]}, {"stop": [decode(whole.token_ids[2:3])]}):
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, min_tokens=6, **early)
        choice = run(llm, PROMPTS[1], params)[0].outputs[0]
        # What would end it is not even sampled, or ends it only when it comes again.
        assert len(choice.token_ids) > 6
        assert choice.text.startswith(decode(choice.token_ids[:6]).rstrip("\ufffd"))


def test_without_max_tokens_the_context_is_filled(llm: LLM) -> None:
    ids = [5] * 480
    (output,) = run(llm, {"prompt_token_ids": ids}, SamplingParams(max_tokens=None, ignore_eos=True, seed=1))
    assert len(output.outputs[0].token_ids) == 512 - 480
    assert output.outputs[0].finish_reason == "length"


def test_the_default_is_sixteen_sampled_tokens(llm: LLM) -> None:
    (output,) = llm.generate("hello", use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 16
    assert output.outputs[0].logprobs is None


def test_a_prompt_seen_before_comes_from_the_cache(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(10, 60))}
    assert llm.reset_prefix_cache()
    first, second = run(llm, prompt)[0], run(llm, prompt)[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
    assert tokens([first]) == tokens([second])


def test_the_last_output_carries_the_requests_times(llm: LLM) -> None:
    times = run(llm, PROMPTS[0])[0].metrics
    assert times is not None
    in_order = [times.arrival_time, times.queued_time, times.scheduled_time, times.first_token_time]
    assert [0.0, *in_order, times.last_token_time] == sorted([0.0, *in_order, times.last_token_time])
    assert times.arrival_time > 0.0


# ---- the same in any company ----------------------------------------------------------------------------------------


def test_outputs_come_in_order_and_do_not_depend_on_it(llm: LLM) -> None:
    params = [SamplingParams(seed=seed, max_tokens=9 + seed, ignore_eos=True) for seed in range(len(PROMPTS))]
    together = tokens(run(llm, PROMPTS, params))
    alone = [tokens(run(llm, prompt, each))[0] for prompt, each in zip(PROMPTS, params, strict=True)]
    backwards = tokens(run(llm, PROMPTS[::-1], params[::-1]))
    assert together == alone == backwards[::-1]
    assert [len(choices[0]) for choices in together] == [9, 10, 11, 12]


def test_an_engine_in_a_process_of_its_own_gives_the_same(llm: LLM, separate: LLM) -> None:
    params = SamplingParams(n=2, seed=5, max_tokens=20, stop=["e"], logprobs=2)
    for here, there in zip(run(llm, PROMPTS, params), run(separate, PROMPTS, params), strict=True):
        for left, right in zip(here.outputs, there.outputs, strict=True):
            assert (left.text, left.token_ids) == (right.text, right.token_ids)
            assert (left.finish_reason, left.stop_reason) == (right.finish_reason, right.stop_reason)
            assert left.cumulative_logprob == pytest.approx(right.cumulative_logprob, abs=1e-3)


def test_lower_priority_numbers_go_first(tiny_llama_dir: Path) -> None:
    with LLM(str(tiny_llama_dir), **OPTIONS, scheduling_policy="priority", max_num_seqs=1) as llm:
        outputs = run(llm, PROMPTS[:3], priority=[2, -1, 1])
    times = [output.metrics.scheduled_time for output in outputs if output.metrics is not None]
    assert sorted(range(3), key=times.__getitem__) == [1, 2, 0]


def test_choices_differ_and_repeat_with_the_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=10, ignore_eos=True)
    first, second = run(llm, PROMPTS[0], params)[0], run(llm, PROMPTS[0], params)[0]
    assert [choice.index for choice in first.outputs] == [0, 1, 2]
    assert tokens([first]) == tokens([second])
    assert len({tuple(choice.token_ids) for choice in first.outputs}) == 3
    single = run(llm, PROMPTS[0], SamplingParams(seed=7, max_tokens=10, ignore_eos=True))[0]
    assert single.outputs[0].token_ids == first.outputs[0].token_ids


def test_chat_is_generate_on_the_rendered_messages(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    (answer,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert answer.prompt == rendered
    assert tokens([answer]) == tokens(run(llm, {"prompt_token_ids": answer.prompt_token_ids}))
    both = llm.chat([messages, messages[:1]], GREEDY, use_tqdm=False)
    assert tokens(both) == tokens([answer, answer])
    (bare,) = llm.chat(messages, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert bare.prompt == rendered.removesuffix("<|im_start|>assistant\n")
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert llm.chat(messages, GREEDY, use_tqdm=False, chat_template=template)[0].prompt == "[hello]"


def test_chat_goes_on_with_the_last_message_and_hands_variables_to_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "I am"}]
    (answer,) = llm.chat(messages, GREEDY, use_tqdm=False, continue_final_message=True)
    assert answer.prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nI am"
    template = "{{ mood }}: {{ messages[0].content }}"
    options: dict[str, Any] = {"chat_template": template, "chat_template_kwargs": {"mood": "kind"}}
    assert llm.chat(messages, GREEDY, use_tqdm=False, **options)[0].prompt == "kind: hello"
    with pytest.raises(RequestError) as caught:
        llm.chat(messages, GREEDY, use_tqdm=False, chat_template="{{ broken")
    assert caught.value.param == "chat_template"


# ---- refusals, failures, interrupts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "params", "priority", "param"),
    [
        (["a", ""], GREEDY, None, "prompt"),
        (["a", {"prompt_token_ids": [10**6]}], GREEDY, None, "prompt"),
        (["a", "b"], [GREEDY], None, "sampling_params"),
        (["a"], [], None, "sampling_params"),
        (["a", "b"], [GREEDY, None], None, "sampling_params"),
        (["a", "b"], GREEDY, [0], "priority"),
        (["a", "b"], GREEDY, [0, 1], "priority"),
        (["a", "x " * 600], GREEDY, None, "input_tokens"),
        (None, GREEDY, None, "prompts"),
    ],
)
def test_a_refusal_names_what_it_is_about_and_starts_nothing(
    llm: LLM, prompts: Any, params: Any, priority: Any, param: str
) -> None:
    before = llm.reset_prefix_cache()
    with pytest.raises(ValueError, match=r".") as caught:
        run(llm, prompts, params, priority=priority)
    assert isinstance(caught.value, RequestError)
    assert caught.value.param == param
    if isinstance(prompts, list) and len(prompts) == 2 and param in ("prompt", "input_tokens"):
        assert str(caught.value).startswith("prompt 1: ")
    assert before
    # The first prompt was a good one: had it been computed, its blocks would now be known.
    assert run(llm, "a" * 64)[0].num_cached_tokens == 0


def test_no_prompts_no_outputs(llm: LLM) -> None:
    assert run(llm, []) == []


def test_the_engines_refusal_is_raised_and_nothing_else_goes_on(llm: LLM, separate: LLM) -> None:
    for each in (llm, separate):
        processor = each._input_processor
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(processor, "max_model_len", 2 * processor.max_model_len)
            with pytest.raises(RequestError, match="600 tokens") as caught:
                run(each, [PROMPTS[0], {"prompt_token_ids": [5] * 600}, PROMPTS[1]])
        assert caught.value.param == "input_tokens"
        assert each._client.call_utility("stats")["num_running"] == 0
        assert len(run(each, PROMPTS)) == len(PROMPTS)
        assert not each._output_processor._closing


@pytest.mark.parametrize("multiprocessing", ["0", "1"])
def test_a_full_queue_is_an_overload_error_and_nothing_goes_on(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, multiprocessing: str
) -> None:
    monkeypatch.setenv("OCTAVO_ENABLE_MULTIPROCESSING", multiprocessing)
    with LLM(str(tiny_llama_dir), max_num_seqs=1, max_num_queued_reqs=2, **OPTIONS) as llm:
        with pytest.raises(OverloadedError, match="--max-num-queued-reqs") as refusal:
            run(llm, ["a"] * 40, SamplingParams(max_tokens=200, ignore_eos=True))
        assert refusal.value.retry_after >= 1
        assert len(run(llm, ["a"])) == 1


def test_nan_logits_fail_their_own_request_only(
    make_tiny_llama: Callable[..., Path], llm: LLM, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny_llama()
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][9] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    good, bad = {"prompt_token_ids": [20, 21, 22]}, {"prompt_token_ids": [20, 9, 22]}
    with LLM(str(folder), **OPTIONS) as poisoned:
        outputs = run(poisoned, [good, bad, good], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].finished
    assert outputs[1].outputs[0].token_ids == []
    assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids
    assert "request 1 failed" in capfd.readouterr().err


@contextmanager
def at_step(llm: LLM, number: int, act: Callable[[], None]) -> Iterator[list[int]]:
    """Calls ``act`` at the beginning of that step; yields the list of the steps that were taken."""
    client = llm._client
    steps: list[int] = []
    original = client.get_outputs

    def step() -> Any:
        steps.append(len(steps) + 1)
        if steps[-1] == number:
            act()
        return original()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "get_outputs", step)
        yield steps


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupt_now() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("act", [press_ctrl_c, interrupt_now])
def test_an_interrupt_aborts_the_requests_and_leaves_the_llm_usable(llm: LLM, act: Callable[[], None]) -> None:
    expected = tokens(run(llm, PROMPTS))
    with at_step(llm, 3, act) as steps, pytest.raises(KeyboardInterrupt):
        run(llm, PROMPTS, SamplingParams(max_tokens=400, ignore_eos=True))
    assert steps == [1, 2, 3]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm._client.call_utility("stats")["num_running"] == 0
    assert tokens(run(llm, PROMPTS)) == expected


def test_what_ctrl_c_does_is_up_to_the_handler_that_is_there(llm: LLM) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda signum, frame: seen.append(signum))
    try:
        with at_step(llm, 3, press_ctrl_c):
            (output,) = run(llm, PROMPTS[0])
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]
    assert len(output.outputs[0].token_ids) == 12


def test_ctrl_c_in_the_last_step_is_not_lost(llm: LLM) -> None:
    with at_step(llm, 12, press_ctrl_c) as steps, pytest.raises(KeyboardInterrupt):
        run(llm, PROMPTS[0])
    assert len(steps) == 12


INTERRUPTED = """
import sys
from octavo import LLM, SamplingParams
llm = LLM(sys.argv[1], seed=0, num_gpu_blocks_override=256, max_num_seqs=4, step_trace=sys.argv[2])
greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
before = llm.generate("hello", greedy, use_tqdm=False)[0].outputs
try:
    print("begun", flush=True)
    llm.generate(["hello"] * 1000, SamplingParams(max_tokens=400, ignore_eos=True))  # minutes
except KeyboardInterrupt:
    print("interrupted", flush=True)
after = llm.generate("hello", greedy, use_tqdm=False)[0].outputs
print(after == before, llm._client.call_utility("stats")["num_running"])
"""


@pytest.mark.parametrize("multiprocessing", ["0", "1"])
def test_ctrl_c_at_a_terminal_interrupts_a_script_between_steps(
    tiny_llama_dir: Path, tmp_path: Path, multiprocessing: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    environment = os.environ | {"OCTAVO_ENABLE_MULTIPROCESSING": multiprocessing, "OCTAVO_LOG_LEVEL": "WARNING"}
    script = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tiny_llama_dir), str(trace)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert script.stdout is not None
        assert script.stdout.readline() == "begun\n"
        steps = len(trace.read_text().splitlines())
        deadline = time.monotonic() + 60
        while len(trace.read_text().splitlines()) < steps + 20 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.killpg(script.pid, signal.SIGINT)  # a terminal sends it to the engine's process too
        output, errors = script.communicate(timeout=60)
    finally:
        script.kill()
    assert (script.returncode, output) == (0, "interrupted\nTrue 0\n"), errors


def test_a_shut_down_llm_says_so(tiny_llama_dir: Path) -> None:
    with LLM(str(tiny_llama_dir), **OPTIONS) as llm:
        pass
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        run(llm, "a")


def test_a_dropped_llm_releases_the_model_at_once(tiny_llama_dir: Path) -> None:
    llm = LLM(str(tiny_llama_dir), **OPTIONS)
    client = llm._client
    del llm
    gc.collect()
    assert "shut down" in str(client.dead_error)


def test_a_dropped_llm_ends_its_engine(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_ENABLE_MULTIPROCESSING", "1")
    llm = LLM(str(tiny_llama_dir), **OPTIONS)
    pid = llm._client.engine_pid  # type: ignore[attr-defined]
    os.kill(pid, 0)
    del llm
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("multiprocessing", ["0", "1"])
def test_a_script_needs_no_shutdown(tiny_llama_dir: Path, multiprocessing: str) -> None:
    script = (
        "from octavo import LLM, SamplingParams\n"
        f"llm = LLM({str(tiny_llama_dir)!r}, num_gpu_blocks_override=64)\n"
        "params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)\n"
        "print(len(llm.generate(['hello', 'fox'], params)))"
    )
    environment = os.environ | {"OCTAVO_ENABLE_MULTIPROCESSING": multiprocessing, "OCTAVO_LOG_LEVEL": "WARNING"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "2\n")
    assert "Traceback" not in done.stderr
    assert "2/2" in done.stderr  # the progress bar


# ---- traces ---------------------------------------------------------------------------------------------------------


def test_traces_are_sent_from_a_script_too(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    with collecting() as collector:
        with LLM(str(tiny_llama_dir), otlp_traces_endpoint=collector.endpoint, **OPTIONS) as llm:
            llm.generate([{"prompt_token_ids": [5, 6]}] * 2, SamplingParams(max_tokens=3, ignore_eos=True))
        requests = [span for span in collector.spans if span.name == "llm_request"]  # sent when it ended
    assert [attributes(span)["gen_ai.usage.completion_tokens"] for span in requests] == [3, 3]
