"""The engine's process and its front end's, dying at any moment: noticed, told with the cause, nothing left behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import zmq

from octavo.engine import AsyncMPClient, SyncMPClient
from octavo.errors import EngineDeadError

NOTICED_SECONDS = 5.0

# A front end of its own, started with -c and with nothing of octavo's in its __main__.
FRONT_END = """
import json, sys
from octavo.config import EngineArgs
from octavo.engine import SyncMPClient, build_config
from octavo.types import EngineCoreRequest, SamplingParams

model, until = sys.argv[1:]
config = build_config(EngineArgs(model=model, dtype="float32", max_num_seqs=4, num_gpu_blocks_override=64))
client = SyncMPClient(config)
print(client.engine_pid, flush=True)
def stop_here(stage, share):
    if until == stage:
        print("here", flush=True)
        sys.stdin.read()
client.wait_ready(stop_here)
if until == "idle":
    print("here", flush=True)
    sys.stdin.read()
params = SamplingParams(temperature=0.0, max_tokens=450, seed=1)
client.add_requests([EngineCoreRequest("a", [5, 6], params, [], 0.0)])
while True:
    outputs = client.get_outputs().outputs
    print("here", flush=True)
"""


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition, seconds=NOTICED_SECONDS):
    """Whether ``condition`` became true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def socket_root(tmp_path_factory, monkeypatch):
    """The folder in which clients make the folders of their sockets."""
    import tempfile

    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def serve_until_dead(client, kit, on_moment):
    """Loads, adds a request and takes its outputs; tells ``on_moment`` where it is."""
    client.wait_ready(lambda stage, share: on_moment("loading"))
    on_moment("idle")
    client.add_requests([kit.request("a", [5, 6], 450)])
    while True:
        if client.get_outputs().outputs:
            on_moment("mid-stream")


@pytest.mark.parametrize("moment", ["loading", "idle", "mid-stream"])
def test_killed_engine_is_noticed_with_the_cause(kit, tiny_config, socket_root, moment):
    client = SyncMPClient(tiny_config)
    killed_at = []

    def kill(now):
        if now == moment and not killed_at:
            os.kill(client.engine_pid, signal.SIGKILL)
            killed_at.append(time.monotonic())

    with pytest.raises(EngineDeadError, match=r"^engine core process was killed by signal 9 \(SIGKILL\)$"):
        serve_until_dead(client, kit, kill)
    assert time.monotonic() - killed_at[0] < NOTICED_SECONDS
    assert client.exit_code_hint == 3
    client.shutdown()
    assert list(socket_root.iterdir()) == []


def test_killed_engine_wakes_everything_that_waits_in_an_event_loop(kit, tiny_config):
    async def main():
        client = AsyncMPClient(tiny_config)
        await client.wait_ready()
        outputs = asyncio.create_task(client.get_outputs())
        os.kill(client.engine_pid, signal.SIGSTOP)  # so that the call below is certainly waiting
        call = asyncio.create_task(client.call_utility("stats"))
        await asyncio.sleep(0)
        os.kill(client.engine_pid, signal.SIGKILL)
        for waiting in (outputs, call):
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await asyncio.wait_for(waiting, NOTICED_SECONDS)
        assert "SIGKILL" in str(client.dead_error)
        client.shutdown()

    asyncio.run(main())


def test_killed_engine_while_loading_is_noticed_in_an_event_loop(tiny_config):
    async def main():
        client = AsyncMPClient(tiny_config)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await asyncio.wait_for(
                client.wait_ready(lambda stage, share: os.kill(client.engine_pid, signal.SIGKILL)), 20
            )
        client.shutdown()

    asyncio.run(main())


def test_checkpoint_at_fault_is_told_in_one_line_with_exit_code_1(make_tiny_llama, kit):
    from octavo.config import EngineArgs
    from octavo.engine import build_config

    folder = make_tiny_llama(seed=1)
    config = build_config(EngineArgs(model=str(folder), dtype="float32", num_gpu_blocks_override=64))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    client = SyncMPClient(config)
    with pytest.raises(EngineDeadError) as caught:
        client.wait_ready()
    assert client.exit_code_hint == 1
    assert str(caught.value).startswith("CheckpointError: ")
    assert "model.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)
    client.shutdown()


def test_signals_that_reach_every_process_are_left_to_the_front_end(kit, tiny_config):
    client = SyncMPClient(tiny_config)
    stages = []

    def interrupt(stage, share):
        stages.append(stage)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(client.engine_pid, number)

    client.wait_ready(interrupt)
    assert "starting" in stages
    client.add_requests([kit.request("a", [5, 6], 100)])
    collected = kit.collected()
    while "a" not in collected.finished:
        collected.add(client.get_outputs().outputs)
        os.kill(client.engine_pid, signal.SIGTERM)
    assert str(collected.finished["a"].finish_reason) == "length"
    client.shutdown()


@pytest.mark.parametrize("moment", ["starting", "idle", "mid-stream"])
def test_killed_front_end_takes_its_engine_along(tiny_llama_dir, socket_root, moment):
    command = [sys.executable, "-c", FRONT_END, str(tiny_llama_dir), moment]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as front_end:
        engine_pid = int(front_end.stdout.readline())
        assert front_end.stdout.readline() == "here\n"
        assert is_running(engine_pid)
        front_end.kill()
        assert wait_until(lambda: not is_running(engine_pid))
    assert wait_until(lambda: list(socket_root.iterdir()) == [])


def test_front_end_that_ends_without_a_shutdown_leaves_nothing(tiny_llama_dir, socket_root):
    script = FRONT_END.replace("params = ", "sys.exit(0)\nparams = ")
    command = [sys.executable, "-c", script, str(tiny_llama_dir), "never"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert not is_running(int(done.stdout.split()[0]))
    assert list(socket_root.iterdir()) == []


def test_shutdown_while_loading_ends_the_engine(tiny_config, socket_root):
    client = SyncMPClient(tiny_config)
    pid = client.engine_pid
    assert [path.stat().st_mode & 0o777 for path in socket_root.iterdir()] == [0o700]
    begun = time.monotonic()
    client.shutdown()
    assert time.monotonic() - begun < NOTICED_SECONDS
    assert not psutil.pid_exists(pid)
    assert list(socket_root.iterdir()) == []


def test_engine_that_does_not_end_by_itself_is_killed(tiny_config):
    client = SyncMPClient(tiny_config)
    client.wait_ready()
    pid = client.engine_pid
    os.kill(pid, signal.SIGSTOP)  # cannot see the end of its standard input
    client.shutdown(timeout=0.2)
    assert not psutil.pid_exists(pid)


@pytest.fixture(scope="module")
def running_client(tiny_config):
    client = SyncMPClient(tiny_config)
    client.wait_ready()
    yield client
    client.shutdown()


def generate(client, kit):
    collected = kit.collected()
    client.add_requests([kit.request("a", [5, 6], 20)])
    while "a" not in collected.finished:
        collected.add(client.get_outputs().outputs)
    return collected.tokens["a"]


def test_ctrl_c_at_the_terminal_is_left_to_the_front_end(kit, running_client):
    before = generate(running_client, kit)
    os.kill(running_client.engine_pid, signal.SIGINT)
    assert generate(running_client, kit) == before


def test_idle_engine_uses_less_than_a_hundredth_of_a_core(kit, running_client):
    generate(running_client, kit)
    engine = psutil.Process(running_client.engine_pid)

    def share_of_a_core(seconds):
        before = sum(engine.cpu_times()[:2])
        time.sleep(seconds)
        return (sum(engine.cpu_times()[:2]) - before) / seconds

    # In the first of them the threads of the last step may still be on their way to sleep.
    assert min(share_of_a_core(seconds=1.5) for _ in range(2)) < 0.01


def test_search_path_of_the_caller_reaches_the_engine_and_its_working_folder_does_not(tiny_llama_dir, tmp_path):
    """octavo found through sys.path alone, and a folder full of modules with the names of the library's."""
    package_root = str(Path(__import__("octavo").__file__).parents[1])
    for name in ("zmq", "msgspec", "queue"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    setup = f"import sys\nsys.path = [p for p in sys.path if p]\nsys.path.insert(0, {package_root!r})\n"
    command = [sys.executable, "-c", setup + FRONT_END.replace("params = ", "sys.exit(0)\nparams = ")]
    done = subprocess.run(
        [*command, str(tiny_llama_dir), "never"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.split()[0])


@pytest.mark.parametrize("payload", [b"", b"\xff\xff", b"\x90", b"\x91" * 100_000])
def test_a_message_that_cannot_be_read_is_the_engines_end_with_the_cause(tiny_config, socket_root, payload):
    def send_nonsense(client):
        socket = client._connection.context.socket(zmq.PUSH)
        socket.connect("inproc://engine-exit")
        socket.send(payload)
        socket.close()

    sync = SyncMPClient(tiny_config)
    sync.wait_ready()
    send_nonsense(sync)
    with pytest.raises(EngineDeadError, match="a message of the engine cannot be read"):
        sync.get_outputs()
    assert sync.exit_code_hint == 3
    sync.shutdown()

    async def main():
        client = AsyncMPClient(tiny_config)
        await client.wait_ready()
        outputs = asyncio.create_task(client.get_outputs())
        send_nonsense(client)
        with pytest.raises(EngineDeadError, match="a message of the engine cannot be read"):
            await asyncio.wait_for(outputs, NOTICED_SECONDS)
        client.shutdown()

    if payload == b"\xff\xff":  # both clients read with the same eyes
        asyncio.run(main())
    assert list(socket_root.iterdir()) == []
