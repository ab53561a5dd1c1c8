"""The clients: one protocol in process, in a thread and in a process of its own, with the same tokens out of each."""

import asyncio

import pytest

from octavo.engine import AsyncMPClient, InprocClient, SyncMPClient, make_async_client, make_sync_client
from octavo.errors import ConfigError, EngineDeadError, OverloadedError, RequestError
from octavo.types import EngineReady, FinishReason

PROMPTS = [[5, 6, 7], list(range(3, 60)), [100] * 33]


def ask(kit, max_tokens=12):
    return [kit.request(f"r{index}", prompt, max_tokens) for index, prompt in enumerate(PROMPTS)]


def collect(client, kit, count):
    collected = kit.collected()
    while len(collected.finished) < count:
        collected.add(client.get_outputs().outputs)
    return collected


@pytest.fixture(scope="module")
def reference(kit, tiny_config):
    """Tokens of PROMPTS, from the engine in this process."""
    client = InprocClient(tiny_config)
    client.add_requests(ask(kit))
    tokens = collect(client, kit, len(PROMPTS)).tokens
    client.shutdown()
    return tokens


def test_own_process_gives_the_tokens_of_the_same_process(kit, tiny_config, reference):
    client = SyncMPClient(tiny_config)
    stages = []
    ready = client.wait_ready(lambda stage, share: stages.append(stage))
    assert isinstance(ready, EngineReady)
    assert stages[0] == "starting"
    client.add_requests(ask(kit))
    assert collect(client, kit, len(PROMPTS)).tokens == reference
    client.add_requests([kit.request("again", PROMPTS[1], 12)])
    assert client.call_utility("stats")["num_running"] in (0, 1)
    assert collect(client, kit, 1).tokens["again"] == reference["r1"]
    client.shutdown()


@pytest.mark.parametrize("own_process", [True, False])
def test_event_loop_client_gives_the_same_tokens(kit, tiny_config, reference, own_process):
    async def main():
        client = AsyncMPClient(tiny_config, own_process=own_process)
        with pytest.raises(OverloadedError):
            client.add_requests(ask(kit))
        await client.wait_ready()
        assert (client.engine_pid is not None) == own_process
        client.add_requests(ask(kit))
        collected = kit.collected()
        while len(collected.finished) < len(PROMPTS):
            collected.add((await client.get_outputs()).outputs)
        assert await client.call_utility("reset_prefix_cache") is True
        with pytest.raises(RequestError, match="not one of"):
            await client.call_utility("shutdown")
        client.shutdown()
        with pytest.raises(EngineDeadError):
            await client.get_outputs()
        return collected.tokens

    assert asyncio.run(main()) == reference


def test_environment_variable_chooses_where_the_engine_runs(tiny_config, monkeypatch):
    async def engine_pid():
        client = make_async_client(tiny_config)
        try:
            await client.wait_ready()
            return client.engine_pid
        finally:
            client.shutdown()

    monkeypatch.setenv("OCTAVO_ENABLE_MULTIPROCESSING", "0")
    assert asyncio.run(engine_pid()) is None
    client = make_sync_client(tiny_config)
    assert isinstance(client, InprocClient)
    client.shutdown()
    monkeypatch.setenv("OCTAVO_ENABLE_MULTIPROCESSING", "1")
    client = make_sync_client(tiny_config)
    assert isinstance(client, SyncMPClient)
    client.shutdown()


def test_aborts_give_last_outputs_in_process(kit, tiny_config):
    client = InprocClient(tiny_config)
    client.add_requests(ask(kit, max_tokens=200))
    client.get_outputs()
    client.abort_requests(["r0", "r2", "unknown"])
    collected = kit.collected()
    collected.add(client.get_outputs().outputs)
    assert set(collected.finished) == {"r0", "r2"}
    assert all(output.finish_reason == FinishReason.ABORT for output in collected.finished.values())
    client.abort_requests(["r1"])
    collected.add(client.get_outputs().outputs)
    assert len(collected.finished) == 3
    assert client.get_outputs().outputs == []
    client.shutdown()


def test_in_process_refusal_is_raised_and_takes_back_what_came_with_it(kit, tiny_config):
    client = InprocClient(tiny_config)
    with pytest.raises(RequestError):
        client.add_requests([kit.request("a", [5], 4), kit.request("b", [5] * 600, 4)])
    assert client.call_utility("stats")["num_waiting"] == 0
    client.add_requests([kit.request("a", [5], 4)])
    assert collect(client, kit, 1).finished["a"].finish_reason == FinishReason.LENGTH
    client.shutdown()


def test_step_that_breaks_off_makes_the_in_process_engine_dead(kit, monkeypatch):
    import octavo.engine.core as core

    executor = kit.executor()
    executor.fail_at_step = 2
    monkeypatch.setattr(core, "make_executor", lambda config: executor)
    client = InprocClient(kit.config())
    client.add_requests([kit.request("a", [5], 9)])
    client.get_outputs()
    with pytest.raises(RuntimeError, match="on fire"):
        client.get_outputs()
    assert client.exit_code_hint == 3
    for call in (client.get_outputs, lambda: client.add_requests([kit.request("b", [5], 9)])):
        with pytest.raises(EngineDeadError, match="RuntimeError: the device is on fire"):
            call()
    client.shutdown()


def test_shutdown_may_be_repeated_and_what_follows_says_so(kit, tiny_config):
    clients = [InprocClient(tiny_config), SyncMPClient(tiny_config)]
    for client in clients:
        client.shutdown()
        client.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            client.get_outputs()
        with pytest.raises(EngineDeadError, match="shut down"):
            client.abort_requests(["a"])


def test_folder_too_deep_for_a_socket_is_a_configuration_error(kit, tmp_path, monkeypatch):
    import tempfile

    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match="TMPDIR"):
        SyncMPClient(kit.config())
    assert list(deep.iterdir()) == []


def test_no_module_of_the_room_hides_a_name_of_its_door():
    """Importing a sub-module binds it in the package, whatever the door meant by that name."""
    import pkgutil

    import octavo.engine

    modules = {module.name for module in pkgutil.iter_modules(octavo.engine.__path__)}
    assert not modules & set(octavo.engine.__all__)
