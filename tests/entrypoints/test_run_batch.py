"""``octavo run-batch``: lines in, answers out; what is refused, what is bounded, and what a killed run leaves."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import main
from octavo.config import AnswerConfig, EngineArgs
from octavo.entrypoints.batch import BatchOptions, input_lines, run_batch
from octavo.entrypoints.batch.output_file import OutputFile
from octavo.errors import ConfigError, EngineDeadError, NoTokenLeftError, OverloadedError, RequestFailedError
from tests.entrypoints.conftest import FakeAsyncLLM, Server

COMMAND = [sys.executable, "-c", "import sys; from octavo.cli import main; sys.exit(main())", "run-batch"]
MOST_TRIES = 4
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def line(custom_id: Any, url: str = COMPLETIONS, method: str = "POST", **body: Any) -> str:
    asked = {"messages": [{"role": "user", "content": "hi"}]} if url == CHAT else {"prompt": "hi"}
    fields = {"max_tokens": 4, "temperature": 0} | asked | body
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": fields}) + "\n"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def by_id(path: Path) -> dict[str, dict[str, Any]]:
    entries = read(path)
    found = {entry["custom_id"]: entry for entry in entries}
    assert len(found) == len(entries)
    return found


class FakeEngine(FakeAsyncLLM):
    """The rest of AsyncLLM's surface that a batch uses. ``dies``: as soon as it is ready."""

    def __init__(self, **stated: Any) -> None:
        super().__init__(**stated)
        self.dies = False

    async def ready(self) -> None:
        if self.dead_error is not None:
            raise self.dead_error

    async def wait_dead(self) -> EngineDeadError:
        if not self.dies:
            await asyncio.get_running_loop().create_future()
        return EngineDeadError("killed by signal 9")

    def shutdown(self) -> None:
        assert not self.running


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """What a batch in this process runs on."""
    fake = FakeEngine(max_num_seqs=2)
    monkeypatch.setattr("octavo.entrypoints.batch.runner.build_config", lambda args: fake.config)
    monkeypatch.setattr("octavo.entrypoints.batch.runner.AsyncLLM", lambda config: fake)
    monkeypatch.setattr("octavo.entrypoints.batch.runner._FIRST_WAIT_SECONDS", 0.001)
    return fake


@pytest.fixture
def batch(engine: FakeEngine, tmp_path: Path) -> Callable[..., int]:
    """``batch(*lines, **answer options)`` → exit code; from in.jsonl to out.jsonl in the test's folder."""

    def run(*lines: str | bytes, **answer: Any) -> int:
        data = b"".join(each if isinstance(each, bytes) else each.encode() for each in lines)
        (tmp_path / "in.jsonl").write_bytes(data)
        files = {"input_file": str(tmp_path / "in.jsonl"), "output_file": str(tmp_path / "out.jsonl")}
        return run_batch(EngineArgs(model="m"), BatchOptions(**files, answer=AnswerConfig(**answer)))

    return run


# ---- answers --------------------------------------------------------------------------------------------------------


def test_every_line_gets_the_answer_that_its_route_gives(batch: Callable[..., int], tmp_path: Path) -> None:
    assert batch(line("a"), line("b", CHAT), "\n", line("c", prompt=["x", "y"], n=2, temperature=1)) == 0
    found = by_id(tmp_path / "out.jsonl")
    server = Server()
    for custom_id, url, body in (
        ("a", COMPLETIONS, {"prompt": "hi"}),
        ("b", CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        response = found[custom_id]["response"]
        theirs = server.post(url, body | {"max_tokens": 4, "temperature": 0}).json()
        own = {"id", "created"}
        assert {name: value for name, value in response["body"].items() if name not in own} == {
            name: value for name, value in theirs.items() if name not in own
        }
        assert (found[custom_id]["error"], response["status_code"]) == (None, 200)
        assert response["body"]["id"] == response["request_id"]
        assert "headers" not in response
    assert len(found["c"]["response"]["body"]["choices"]) == 4
    assert len({entry["id"] for entry in found.values()}) == 3


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (COMPLETIONS, {"max_tokens": 0}),
        (COMPLETIONS, {"temperature": "hot"}),
        (COMPLETIONS, {"model": "nope"}),
        (COMPLETIONS, {"prompt": []}),
        (COMPLETIONS, {"prompt": "x" * 100}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": [{"role": "wizard", "content": "hi"}]}),
        (CHAT, {"chat_template": "x"}),
        (CHAT, {"tools": []}),
    ],
)
def test_a_refusal_is_the_routes_own(batch: Callable[..., int], tmp_path: Path, url: str, body: dict[str, Any]) -> None:
    assert batch(line("bad", url, **body), line("good")) == 0
    found = by_id(tmp_path / "out.jsonl")
    theirs = Server().post(url, json.loads(line("bad", url, **body))["body"])
    response = found["bad"]["response"]
    assert (response["status_code"], response["body"]) == (theirs.status_code, theirs.json())
    assert theirs.is_client_error
    assert found["bad"]["error"] is None
    assert found["good"]["response"]["status_code"] == 200


def test_fields_without_effect_are_named_or_refused(batch: Callable[..., int], tmp_path: Path) -> None:
    batch(line("a", zzz=1))
    assert by_id(tmp_path / "out.jsonl")["a"]["response"]["headers"] == {"x-octavo-ignored": "zzz"}
    batch(line("b", zzz=1), strict_requests=True)
    refused = by_id(tmp_path / "out.jsonl")["b"]["response"]
    assert (refused["status_code"], refused["body"]["error"]["param"]) == (400, "zzz")


def test_a_stream_is_refused(batch: Callable[..., int], tmp_path: Path) -> None:
    batch(line("a", stream=True))
    assert by_id(tmp_path / "out.jsonl")["a"]["response"]["body"]["error"]["param"] == "stream"


def test_a_failed_request_fails_alone(batch: Callable[..., int], engine: FakeEngine, tmp_path: Path) -> None:
    engine.fail_after = (2, RequestFailedError("it went wrong"))
    assert batch(line("a"), line("b", max_tokens=2)) == 1
    found = by_id(tmp_path / "out.jsonl")
    assert found["a"]["response"]["status_code"] == 500
    assert found["b"]["response"]["status_code"] == 200
    assert len(engine.started) == 1 + MOST_TRIES


class FailsSometimes:
    """Instead of the engine's way in: so many requests fail with this, then all are as ever."""

    def __init__(self, engine: FakeEngine, times: int, error: Exception) -> None:
        self._generate, self._left, self._error = engine.generate_one, times, error

    async def __call__(self, inputs: Any) -> Any:
        if self._left:
            self._left -= 1
            raise self._error
        async for output in self._generate(inputs):
            yield output


@pytest.mark.parametrize("times", [1, MOST_TRIES - 1])
def test_a_request_that_failed_for_now_is_tried_again(
    batch: Callable[..., int],
    engine: FakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    times: int,
) -> None:
    monkeypatch.setattr(engine, "generate_one", FailsSometimes(engine, times, RequestFailedError("it went wrong")))
    assert batch(line("a")) == 0
    assert by_id(tmp_path / "out.jsonl")["a"]["response"]["status_code"] == 200
    assert f"{times} further tries" in capfd.readouterr().err


def test_control_a_request_that_is_wrong_is_not_tried_again(
    batch: Callable[..., int], engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "generate_one", FailsSometimes(engine, 1, NoTokenLeftError("nothing is left")))
    for _ in range(2):  # nor by the next run
        assert batch(line("a")) == 0
        assert by_id(tmp_path / "out.jsonl")["a"]["response"]["status_code"] == 400


def test_the_next_run_asks_again_what_failed_for_now_and_keeps_the_rest(
    batch: Callable[..., int], engine: FakeEngine, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [line("first", max_tokens=1), line("a"), "nonsense\n", line("b"), line("last", max_tokens=2)]
    engine.fail_after = (2, RequestFailedError("it went wrong"))
    assert batch(*lines) == 1
    assert "2 of those may succeed another time: the same command asks them again" in capfd.readouterr().err
    out = tmp_path / "out.jsonl"
    out.chmod(0o640)
    kept = [entry for entry in read(out) if entry["custom_id"] not in ("a", "b")]
    engine.fail_after = None
    asked = len(engine.started)
    assert batch(*lines) == 0
    assert "2 requests have failed for now; they are asked again" in capfd.readouterr().err
    assert len(engine.started) == asked + 2
    assert read(out)[: len(kept)] == kept
    assert {each: by_id(out)[each]["response"]["status_code"] for each in ("a", "b")} == {"a": 200, "b": 200}
    assert out.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    whole = out.read_bytes()
    assert batch(*lines) == 0
    assert out.read_bytes() == whole


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense\n", "JSON is malformed"),
        ("[]\n", "Expected `object`"),
        ('{"custom_id": "a"}\n', "missing required field"),
        (line(7), "custom_id"),
        (line("a", method="GET"), "method must be POST, got 'GET'"),
        (line("a", url="/v1/embeddings"), "url must be /v1/chat/completions or /v1/completions"),
        (line("deep", a=[0]).replace("[0]", "[" * 100_000 + "]" * 100_000), "nested too deeply"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": 3}\n', "body"),
        (line("fine").replace("fine", "before"), "was in an earlier line"),
    ],
)
def test_a_bad_line_is_told_of_and_is_no_end(
    batch: Callable[..., int], tmp_path: Path, text: str, message: str
) -> None:
    assert batch(line("before"), text, line("after")) == 0
    *good, bad = sorted(read(tmp_path / "out.jsonl"), key=lambda entry: entry["error"] is not None)
    assert sorted(entry["custom_id"] for entry in good) == ["after", "before"]
    assert bad["response"] is None
    assert (bad["error"]["code"], bad["error"]["line"]) == ("bad_line", 2)
    assert message in bad["error"]["message"]


def test_a_line_that_is_too_long_is_told_of_and_passed_over(
    batch: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.entrypoints.batch.input_lines.LONGEST_LINE", 1000)
    batch(line("a"), line("long", prompt="x" * 5000), line("also", prompt="x" * 990), line("b"))
    entries = read(tmp_path / "out.jsonl")
    assert sorted(entry["custom_id"] for entry in entries if entry["error"] is None) == ["a", "b"]
    assert [entry["error"]["line"] for entry in entries if entry["error"]] == [2, 3]


# ---- going on -------------------------------------------------------------------------------------------------------


def test_what_has_an_answer_is_not_asked_again(
    batch: Callable[..., int], engine: FakeEngine, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = [line("a"), "nonsense\n", line("refused", max_tokens=0), "nonsense\n", line("a")]
    batch(*first)
    before = (tmp_path / "out.jsonl").read_bytes()
    assert len(before.splitlines()) == 5
    assert batch(*first) == 0
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert batch(*first, line("b"), "nonsense\n") == 0
    after = (tmp_path / "out.jsonl").read_bytes()
    assert after.startswith(before)
    added = [json.loads(text) for text in after[len(before) :].splitlines()]
    assert [(entry["custom_id"], entry["error"] is None) for entry in added] == [(None, False), ("b", True)]
    assert len(engine.started) == 2
    assert "has 5 answers; going on with the rest" in capfd.readouterr().err


def test_half_a_line_at_the_end_is_dropped_and_its_request_answered(
    batch: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [line("a"), line("b"), line("c")]
    batch(*lines)
    out = tmp_path / "out.jsonl"
    whole = out.read_bytes()
    for cut in (1, 2, 40, len(whole.splitlines(keepends=True)[-1]) - 1):
        out.write_bytes(whole[:-cut])
        assert batch(*lines) == 0
        assert set(by_id(out)) == {"a", "b", "c"}
        assert "its last line is torn" in capfd.readouterr().err


def test_a_file_of_something_else_is_not_touched(batch: Callable[..., int], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("dear diary\n")
    with pytest.raises(ConfigError, match="line 1 is no answer of a batch"):
        batch(line("a"))
    assert out.read_text() == "dear diary\n"


def test_an_engine_that_dies_ends_the_run_and_keeps_what_was_answered(
    batch: Callable[..., int], engine: FakeEngine, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [line("a", max_tokens=1), line("b"), line("c")]
    engine.fail_after = (2, EngineDeadError("killed by signal 9"))
    with pytest.raises(EngineDeadError, match="killed by signal 9"):
        batch(*lines)
    assert "the same command goes on from here" in capfd.readouterr().err
    assert not engine.running
    engine.fail_after = None
    assert batch(*lines) == 0
    assert set(by_id(tmp_path / "out.jsonl")) == {"a", "b", "c"}


def test_an_engine_that_dies_while_nothing_is_asked_ends_the_run(engine: FakeEngine, tmp_path: Path) -> None:
    """The input is a pipe that stays open."""
    os.mkfifo(tmp_path / "in")
    pipe = os.open(tmp_path / "in", os.O_RDWR)
    os.write(pipe, line("a").encode())
    engine.dies = True
    options = BatchOptions(input_file=str(tmp_path / "in"), output_file=str(tmp_path / "out.jsonl"))
    with pytest.raises(EngineDeadError, match="killed by signal 9"):
        run_batch(EngineArgs(model="m"), options)
    os.close(pipe)


def test_only_so_many_requests_are_in_flight(
    batch: Callable[..., int], engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two for each that the engine runs at once, which are two."""
    engine.hold_after = 1
    seen: list[int] = []

    async def watch() -> None:
        while len(engine.running) < 4:
            await asyncio.sleep(0.001)
        for _ in range(100):  # turns in which more would be started
            await asyncio.sleep(0.001)
        seen.append(len(engine.running))
        engine.hold_after = None
        engine.release.set()

    async def ready() -> None:
        watchers.append(asyncio.create_task(watch()))

    watchers: list[asyncio.Task[None]] = []
    monkeypatch.setattr(engine, "ready", ready)
    assert batch(*(line(str(number)) for number in range(50))) == 0
    assert seen == [4]
    assert len(by_id(tmp_path / "out.jsonl")) == 50


@pytest.mark.parametrize(("ahead", "is_bounded"), [(3, True), (1000, False)])
def test_only_so_many_lines_are_read_ahead(monkeypatch: pytest.MonkeyPatch, ahead: int, is_bounded: bool) -> None:
    """The second case is the control: with room for all of them, all are read."""
    monkeypatch.setattr(input_lines, "_AHEAD", ahead)

    class Counted(io.BytesIO):
        calls = 0

        def readline(self, size: int | None = -1) -> bytes:  # type: ignore[override]
            self.calls += 1
            return super().readline(size)

    source = Counted(b"a\n" * 500)

    async def take_one() -> int:
        async with aclosing(input_lines.read_lines(source)) as lines:
            assert (await anext(lines)).text == b"a"
            for _ in range(200):
                await asyncio.sleep(0.001)
                if source.calls > 400:
                    break
        return source.calls

    assert (asyncio.run(take_one()) <= 1 + 3 + 1) == is_bounded


def test_an_engine_that_is_full_is_asked_again_when_something_has_ended(
    batch: Callable[..., int], engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = engine.process_inputs

    async def busy(*args: Any, **options: Any) -> Any:
        if len(engine.running) >= 2:
            raise OverloadedError("the queue is full")
        return await process(*args, **options)

    monkeypatch.setattr(engine, "process_inputs", busy)
    assert batch(*(line(str(number)) for number in range(20))) == 0
    found = by_id(tmp_path / "out.jsonl")
    assert {entry["response"]["status_code"] for entry in found.values()} == {200}

    refused = iter([True, True])  # both of the requests in flight

    async def first_two(*args: Any, **options: Any) -> Any:
        if next(refused, False):
            raise OverloadedError("the queue is full")
        return await process(*args, **options)

    monkeypatch.setattr(engine, "process_inputs", first_two)
    assert batch(line("one"), line("two")) == 0
    found = by_id(tmp_path / "out.jsonl")
    assert [found[each]["response"]["status_code"] for each in ("one", "two")] == [200, 200]

    async def always(*args: Any, **options: Any) -> Any:
        raise OverloadedError("the queue is full")

    monkeypatch.setattr(engine, "process_inputs", always)
    assert batch(line("alone")) == 1
    assert by_id(tmp_path / "out.jsonl")["alone"]["response"]["status_code"] == 503


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-i", "nothing", "-o", "out"], "--input-file nothing cannot be read: No such file"),
        (["-i", "https://a/b", "-o", "out"], "files are read from this machine"),
        (["-i", "in", "-o", "no/out"], "--output-file no/out cannot be written: No such file"),
        (["-i", "in", "-o", "in"], "is the input file, too"),
        (["-i", "in", "-o", "out", "--chat-template", "no"], "--chat-template no cannot be read"),
        (["-i", "in", "-o", "out", "--model", "no-model"], "'no-model' is not there"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OCTAVO_ENABLE_MULTIPROCESSING", "0")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    (tmp_path / "in").write_text(line("a"))
    assert main(["run-batch", *words]) == 1
    errors = capfd.readouterr().err.splitlines()
    assert errors[-1].startswith("octavo: error: ")
    assert message in errors[-1]


class Run:
    """The command as a process, with a pipe as its input."""

    def __init__(self, model: Path, out: str | Path, cwd: Path) -> None:
        flags = [
            "-i",
            "-",
            "-o",
            str(out),
            "--model",
            str(model),
            "--dtype",
            "float32",
            "--num-gpu-blocks-override",
            "64",
        ]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [*COMMAND, *flags], stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=cwd, start_new_session=True
        )

    def ask(self, *lines: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.writelines(lines)
        self.process.stdin.flush()

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@pytest.fixture
def start(tiny_llama_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """``start(output file)`` → Run, over a tiny model."""
    started: list[Run] = []

    def run(out: str | Path) -> Run:
        started.append(Run(tiny_llama_dir, out, tmp_path))
        return started[-1]

    yield run
    for each in started:
        each.process.kill()
        each.process.communicate()


def await_lines(path: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_that_was_killed_or_interrupted_goes_on_where_it_stopped(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    """Killed after two answers, interrupted after four; the third run finds the rest, and a torn line."""
    out = tmp_path / "out.jsonl"
    lines = [line(str(number), (COMPLETIONS, CHAT)[number % 2], prompt=f"Say {number}") for number in range(6)]
    killed = start(out)
    killed.ask(*lines[:2])
    await_lines(out, 2)
    killed.process.send_signal(signal.SIGKILL)
    assert killed.end()[0] == -signal.SIGKILL
    with out.open("a") as file:
        file.write('{"id": "batch_req_1", "cust')
    interrupted = start(out)
    interrupted.ask(*lines[:4])
    await_lines(out, 4)
    interrupted.process.send_signal(signal.SIGINT)
    assert interrupted.process.wait(60) == 130  # while its input is still open
    _, _, err = interrupted.end()
    assert "ended before its end: 2 answered; 2 answered before; " in err
    assert "Traceback" not in err
    kept = out.read_bytes()
    last = start(out)
    last.ask(*lines)
    code, _, err = last.end()
    assert code == 0
    assert "done: 2 answered; 4 answered before" in err
    assert out.read_bytes().startswith(kept)
    found = by_id(out)
    assert set(found) == {str(number) for number in range(6)}
    for entry in found.values():
        assert entry["response"]["body"]["usage"]["completion_tokens"] == 4


def test_a_pipe_goes_in_and_a_pipe_comes_out(start: Callable[..., Run], tmp_path: Path) -> None:
    """Standard output holds answers only."""
    run = start("-")
    run.ask(line("a"), "nonsense\n")
    code, out, err = run.end()
    assert code == 0
    assert {json.loads(text)["custom_id"] for text in out.splitlines()} == {"a", None}
    assert "done: 1 answered; 1 bad lines" in err


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    first = OutputFile(str(tmp_path / "out"), print)
    with pytest.raises(ConfigError, match="another process is writing it"):
        OutputFile(str(tmp_path / "out"), print)
    first.close()
    OutputFile(str(tmp_path / "out"), print).close()
