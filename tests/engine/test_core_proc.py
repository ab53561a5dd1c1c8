"""EngineCoreProc at its sockets: what it makes of messages, of nonsense and of a stop. The engine is a thread here."""

import contextlib
import threading
import time

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine import EngineCoreProc
from octavo.engine.serial import EngineLaunch, decode_launch, decode_message, decode_output, encode
from octavo.types import (
    EngineCoreOutputs,
    EngineCoreRequests,
    EngineCoreRequestType,
    EngineDead,
    EngineProgress,
    EngineReady,
    FinishReason,
    Refusal,
    UtilityRequest,
    UtilityResult,
)


class Peer:
    """A front end made of bare sockets, for ``count`` clients."""

    def __init__(self, config, folder, count=1):
        self.context = zmq.Context()
        self.inputs, self.outputs = [], []
        for index in range(count):
            for kind, name, sockets in ((zmq.ROUTER, "in", self.inputs), (zmq.PULL, "out", self.outputs)):
                sockets.append(self.context.socket(kind))
                sockets[-1].setsockopt(zmq.RCVTIMEO, 20_000)
                sockets[-1].bind(f"ipc://{folder}/{name}{index}")
        launch = EngineLaunch(
            config=config,
            input_addresses=[f"ipc://{folder}/in{index}" for index in range(count)],
            output_addresses=[f"ipc://{folder}/out{index}" for index in range(count)],
            socket_dir=str(folder),
            launched=time.monotonic(),
        )
        self.proc = EngineCoreProc(decode_launch(encode(launch)))
        self.exit_codes = []
        self.thread = threading.Thread(target=lambda: self.exit_codes.append(self.proc.run()))
        self.thread.start()
        self.identities = {}

    def add(self, *requests, client=0):
        self.send(EngineCoreRequestType.ADD, EngineCoreRequests(list(requests)), client)

    def send(self, kind, message, client=0):
        self.send_frames(kind.value, encode(message), client=client)

    def send_frames(self, *frames, client=0):
        if client not in self.identities:  # the engine says hello, unless it cannot even load
            self.identities[client] = self.inputs[client].recv_multipart()[0]
        self.inputs[client].send_multipart([self.identities[client], *frames])

    def receive(self, kind, client=0):
        """The next message of this kind; progress and empty steps before it are passed over."""
        while not isinstance(message := decode_output(self.outputs[client].recv()), kind):
            pass
        return message

    def finished(self, client=0):
        """The next last output of a request, and its tokens so far."""
        tokens = []
        while True:
            for output in self.receive(EngineCoreOutputs, client).outputs:
                tokens += output.new_token_ids
                if output.finish_reason is not None:
                    return output, tokens

    def close(self):
        self.proc.stop()
        self.thread.join(20)
        self.context.destroy(linger=0)


@pytest.fixture
def make_peer(kit, tmp_path_factory, monkeypatch):
    """``make_peer(executor=None, count=1, **options)``: a Peer whose engine has a FakeExecutor and has been started."""
    import octavo.engine.core as core

    peers = []

    def make(executor=None, count=1, **stated):
        monkeypatch.setattr(core, "make_executor", lambda config: executor or kit.executor())
        peers.append(Peer(kit.config(**stated), tmp_path_factory.mktemp("s"), count))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()
        assert not peer.thread.is_alive()


def test_progress_then_ready_then_tokens(kit, make_peer):
    peer = make_peer()
    assert peer.receive(EngineProgress).stage == "starting"
    assert peer.receive(EngineReady).max_model_len == 512
    peer.add(kit.request("a", [4, 5], 6))
    output, tokens = peer.finished()
    assert (output.request_id, output.finish_reason) == ("a", FinishReason.LENGTH)
    assert tokens == kit.expected([4, 5], 6)


def test_abort_gives_a_last_output(kit, make_peer):
    executor = kit.executor(overlap=True)
    peer = make_peer(executor, async_scheduling=True)
    peer.receive(EngineReady)
    executor.hold.clear()
    peer.add(kit.request("a", [4, 5], 400))
    peer.send(EngineCoreRequestType.ABORT, ["a", "unknown"])
    executor.hold.set()
    output, _ = peer.finished()
    assert (output.request_id, output.finish_reason) == ("a", FinishReason.ABORT)


def test_refused_request_is_an_error_output_and_marked_as_the_clients_mistake(kit, make_peer):
    peer = make_peer()
    peer.add(kit.request("long", [1] * 600, 8))
    output, tokens = peer.finished()
    assert (output.request_id, output.finish_reason) == ("long", FinishReason.ERROR)
    assert output.refusal == Refusal("input_tokens")
    assert output.error
    assert tokens == []


def test_of_what_is_sent_together_all_or_nothing_is_taken(kit, make_peer):
    peer = make_peer()
    peer.add(kit.request("good", [1], 8), kit.request("long", [1] * 600, 8))
    outputs = peer.receive(EngineCoreOutputs).outputs
    assert [(output.request_id, output.refusal) for output in outputs] == [
        ("good", Refusal("input_tokens")),
        ("long", Refusal("input_tokens")),
    ]
    peer.add(kit.request("good", [4], 3))
    assert peer.finished()[1] == kit.expected([4], 3)


def test_request_that_finds_the_queue_full_is_told_when_to_come_again(kit, make_peer):
    executor = kit.executor(overlap=True)
    peer = make_peer(executor, max_num_seqs=1, max_num_queued_reqs=1)
    executor.hold.clear()
    peer.add(kit.request("runs", [1], 4))
    while not executor.steps:
        time.sleep(0.001)
    peer.add(kit.request("waits", [1], 4))
    peer.add(kit.request("refused", [1], 4))
    executor.hold.set()
    output, _ = peer.finished()
    assert output.request_id == "refused"
    assert output.refusal.retry_after >= 1
    assert output.refusal.limit == "max_num_queued_reqs"
    assert "--max-num-queued-reqs" in output.error
    assert [peer.finished()[0].request_id for _ in range(2)] == ["runs", "waits"]


def test_nonsense_is_dropped_counted_and_logged_and_service_goes_on(kit, make_peer, capsys):
    peer = make_peer()
    add, abort, utility = (kind.value for kind in EngineCoreRequestType)
    bad_value = kit.request("bad", [1], 4)
    bad_value.sampling_params.temperature = -5.0
    nonsense = [
        (b"",),
        (b"\x07", b"\x90"),
        (add,),
        (add, b""),
        (add, b"\xff\xff"),
        (add, encode(["not a request"])),
        (add, encode(kit.request("bare", [1], 4))),
        (add, encode(EngineCoreRequests([]))),
        (add, encode(EngineCoreRequests([bad_value]))),
        (add, encode(EngineCoreRequests([kit.request("r", [1], 4, client_index=7)]))),
        (add, encode(EngineCoreRequests([kit.request("r", [1]), kit.request("s", [1], 4, client_index=1)]))),
        (abort, encode(["ok", 5])),
        (abort, b"\x91\xa2\xff\xfe"),
        (utility, b"\x91" * 100_000),
        (add, encode(EngineCoreRequests([kit.request("r", [1])])), b"extra"),
    ]
    for frames in nonsense:
        peer.send_frames(*frames)
    peer.add(kit.request("a", [4], 3))
    output, tokens = peer.finished()
    assert (output.request_id, tokens) == ("a", kit.expected([4], 3))
    assert peer.proc.num_bad_frames == len(nonsense)
    assert capsys.readouterr().err.count("cannot be read") == len(nonsense)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=3), st.sampled_from([b"\x00", b"\x01", b"\x02"]), st.booleans())
def test_decoding_any_bytes_gives_a_message_or_the_one_error_that_is_expected(frames, kind, prefixed):
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        decode_message([kind, *frames] if prefixed else frames)


def test_utility_calls_are_answered_or_refused(make_peer):
    peer = make_peer()
    for call_id, method, args in ((1, "stats", []), (2, "shutdown", []), (3, "reset_prefix_cache", [])):
        peer.send(EngineCoreRequestType.UTILITY, UtilityRequest(0, call_id, method, args))
    answers = [peer.receive(UtilityResult) for _ in range(3)]
    assert [answer.call_id for answer in answers] == [1, 2, 3]
    assert answers[0].result["num_running"] == 0
    assert "shutdown" in answers[1].error
    assert answers[2].result is True


def test_each_client_gets_its_own_outputs(kit, make_peer):
    peer = make_peer(count=2)
    for client in (0, 1):
        peer.receive(EngineReady, client)
        request = kit.request(f"of{client}", [client + 1], 5, client_index=client)
        peer.add(request, client=client)
    for client in (1, 0):
        output, tokens = peer.finished(client)
        assert (output.request_id, tokens) == (f"of{client}", kit.expected([client + 1], 5))


def test_failed_step_is_told_in_last_words_with_exit_code_3(kit, make_peer):
    executor = kit.executor()
    executor.fail_at_step = 2
    peer = make_peer(executor)
    peer.add(kit.request("a", [4], 5))
    assert peer.receive(EngineDead) == EngineDead("RuntimeError: the device is on fire", 3)
    peer.thread.join(20)
    assert peer.exit_codes == [3]
    assert executor.is_shut_down


def test_configuration_at_fault_is_told_in_last_words_with_exit_code_1(kit, make_peer, tmp_path):
    peer = make_peer(step_trace=str(tmp_path / "missing" / "trace"))
    words = peer.receive(EngineDead)
    assert words.exit_code == 1
    assert words.cause.startswith("ConfigError: --step-trace")
    assert "\n" not in words.cause
    peer.thread.join(20)
    assert peer.exit_codes == [1]


def test_stop_ends_running_requests_and_exits_with_0(kit, make_peer):
    executor = kit.executor()
    peer = make_peer(executor)
    execute_model = executor.execute_model

    def stop_at_third_step(scheduler_output):
        if scheduler_output.step == 3:
            peer.proc.stop()
        return execute_model(scheduler_output)

    executor.execute_model = stop_at_third_step
    peer.add(kit.request("a", [4, 5], 100))
    output, tokens = peer.finished()
    assert output.finish_reason == FinishReason.ABORT
    assert tokens == kit.expected([4, 5], 3)
    peer.thread.join(20)
    assert peer.exit_codes == [0]


def test_output_that_cannot_be_sent_is_told_in_last_words_and_in_the_log(kit, make_peer, monkeypatch, capfd):
    def fail_on_outputs(message):
        if isinstance(message, EngineCoreOutputs):
            raise TypeError("cannot be encoded")
        return encode(message)

    peer = make_peer()
    peer.receive(EngineReady)
    monkeypatch.setattr("octavo.engine.core_proc.encode", fail_on_outputs)
    peer.add(kit.request("a", [4], 5))
    assert peer.receive(EngineDead) == EngineDead("TypeError: cannot be encoded", 3)
    peer.thread.join(20)
    assert peer.exit_codes == [3]
    lines = [line for line in capfd.readouterr().err.splitlines() if "engine core failed" in line]
    assert len(lines) == 1
    assert "ERROR" in lines[0]
    assert "TypeError: cannot be encoded" in lines[0]
