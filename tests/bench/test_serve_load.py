"""The load generator against a scripted server: what it sends, when, and what it takes for an answer."""

import itertools
import ssl
import time
from collections.abc import Callable
from typing import Any

import pytest
import trustme

from octavo.bench.serve import ArrivalOptions, BenchPrompt, EventReader, Load, Outcome, StreamReader, Target, run_load
from octavo.errors import ConfigError, OctavoError
from tests.bench.scripted import DONE, STREAM, Script, ScriptedServer, chunk, refusal, token, usage, whole

Scripted = Callable[[Script], ScriptedServer]
PROMPTS = [BenchPrompt([5, 6, 7], 3, 4)] * 6


def load(server: ScriptedServer, prompts: list[BenchPrompt] = PROMPTS, **options: Any) -> Load:
    target = {name: options.pop(name) for name in ("body", "headers", "is_chat", "timeout") if name in options}
    arrivals = options.pop("arrivals", ArrivalOptions())
    return run_load(Target(base_url=server.url, endpoint="/v1/completions", **target), prompts, arrivals, **options)


def kinds(done: Load) -> list[str | None]:
    return [None if each.failure is None else each.failure.kind for each in done.outcomes]


def test_every_prompt_is_sent_once_and_its_tokens_are_those_that_the_server_counted(scripted: Scripted) -> None:
    server = scripted(lambda number, body: whole(body))
    prompts = [BenchPrompt([5] * length, length, length + 1) for length in (1, 2, 3)]
    done = load(server, prompts, body={"model": "m", "ignore_eos": True}, headers={"authorization": "Bearer k"})
    assert kinds(done) == [None] * 3
    assert [(each.prompt_tokens, each.output_tokens, len(each.times)) for each in done.outcomes] == [
        (1, 2, 2),
        (2, 3, 3),
        (3, 4, 4),
    ]
    for number, (path, headers, body) in enumerate(sorted(server.requests, key=lambda each: len(each[2]["prompt"]))):
        assert path == "/v1/completions"
        assert (headers["authorization"], headers["x-request-id"]) == ("Bearer k", f"bench-{number}")
        assert body == {
            "model": "m",
            "ignore_eos": True,
            "prompt": [5] * (number + 1),
            "max_tokens": number + 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def test_times_are_those_at_which_tokens_came(scripted: Scripted) -> None:
    slow = [STREAM, 0.2, token(), 0.1, token(), 0.1, token(finish_reason="length"), 0.3, usage(3, 3), DONE, "end"]
    done = load(scripted(lambda number, body: slow), PROMPTS[:1])
    (outcome,) = done.outcomes
    assert outcome.ttft > 0.19
    assert outcome.latency > 0.39
    assert outcome.tpot == pytest.approx((outcome.latency - outcome.ttft) / 2)
    assert done.duration > outcome.latency + 0.2  # the last words are no token


def test_the_clock_is_read_once_for_all_that_arrived_together(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(1.0)
    monkeypatch.setattr("octavo.bench.serve.outcome.perf_counter", lambda: next(ticks))
    outcome = Outcome(start=0.5)
    reader = StreamReader(outcome)
    for part in (
        token(),
        token() + token(),
        token()[:9],
        token()[9:],
        token("", finish_reason="stop"),
        usage(3, 4) + DONE,
    ):
        reader.on_data(part)
    reader.finish()
    assert outcome.failure is None
    assert list(outcome.times) == [1.0, 2.0, 2.0, 4.0]
    assert (outcome.ttft, outcome.latency, outcome.tpot) == (0.5, 4.5, 4.0 / 3)


def test_connections_are_used_again_and_never_more_than_allowed(scripted: Scripted) -> None:
    server = scripted(lambda number, body: [STREAM, token(), 0.02, usage(3, 1), DONE, "end"])
    assert kinds(load(server, PROMPTS * 4, max_concurrency=3)) == [None] * 24
    assert (server.connections, server.most) == (3, 3)


def test_without_a_limit_all_that_is_due_is_under_way(scripted: Scripted) -> None:
    server = scripted(lambda number, body: [STREAM, token(), 0.5, usage(3, 1), DONE, "end"])
    assert kinds(load(server)) == [None] * 6
    assert server.most == 6


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (refusal(429, {"error": {"message": "slow down", "code": 429}}), "http_429", "slow down"),
        (refusal(401, {"error": "Unauthorized"}), "http_401", "Unauthorized"),
        (refusal(500, "oh"), "http_500", "oh"),
        ([STREAM, token(), chunk(error={"message": "it died"}), DONE, "end"], "error_event", "it died"),
        ([STREAM, token(), chunk(error={"message": "it died"}), "cut"], "error_event", "it died"),
        ([STREAM, token(), "cut"], "cut", "before the answer did"),
        (["cut"], "cut", "before the answer did"),
        ([STREAM, token(), usage(3, 1), "end"], "cut", "without data: [DONE]"),
        ([STREAM, token(), DONE, "end"], "no_usage", "usage"),
        ([STREAM, usage(3, 0), DONE, "end"], "no_tokens", "no tokens"),
        ([STREAM, b"data: {nonsense\n\n", DONE, "end"], "bad_answer", "no chunk"),
        ([STREAM, token(), 5.0, DONE, "end"], "timeout", "no end after 0.3 s"),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], "cut", "not HTTP"),
    ],
)
def test_a_failure_has_a_kind_and_harms_no_other(scripted: Scripted, answer: Any, kind: str, message: str) -> None:
    server = scripted(lambda number, body: answer if number == 1 else whole(body))
    done = load(server, max_concurrency=1, timeout=0.3)
    assert kinds(done) == [None, kind, None, None, None, None]
    assert message in str(done.outcomes[1].failure)


def test_a_stream_that_ends_with_its_connection_is_whole_when_it_says_so(scripted: Scripted) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    server = scripted(lambda number, body: [head, token(), usage(3, 1), *([DONE] if number else []), "cut"])
    assert kinds(load(server, PROMPTS[:2], max_concurrency=1)) == ["cut", None]


def test_a_connection_that_was_closed_while_idle_is_no_failure(scripted: Scripted) -> None:
    server = scripted(lambda number, body: [*whole(body), 0.2, "cut"])
    seldom = ArrivalOptions(request_rate=2, burstiness=float("inf"))
    assert kinds(load(server, PROMPTS[:2], arrivals=seldom)) == [None] * 2
    assert server.connections == 2


def test_a_connection_that_has_long_been_idle_is_not_used_again(scripted: Scripted) -> None:
    server = scripted(lambda number, body: whole(body))
    seldom = ArrivalOptions(request_rate=0.8, burstiness=float("inf"))
    assert kinds(load(server, PROMPTS[:2], arrivals=seldom)) == [None] * 2
    assert server.connections == 2


@pytest.mark.parametrize(("insecure", "kind"), [(False, "connect"), (True, None)])
def test_a_certificate_that_nobody_vouches_for_is_taken_only_where_that_is_said(
    scripted: Callable[..., ScriptedServer], insecure: bool, kind: str | None
) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(tls)
    server = scripted(lambda number, body: whole(body), tls=tls)
    target = Target(base_url=server.url, endpoint="/v1/completions", insecure=insecure)
    done = run_load(target, PROMPTS[:2], ArrivalOptions())
    assert kinds(done) == [kind] * 2
    if kind is not None:
        assert "CERTIFICATE_VERIFY_FAILED" in str(done.outcomes[0].failure)


def test_no_server_is_a_failure_of_every_request(scripted: Scripted) -> None:
    target = Target(base_url="http://127.0.0.1:1", endpoint="/")
    assert kinds(run_load(target, PROMPTS, ArrivalOptions())) == ["connect"] * 6


def test_the_role_and_the_reason_for_the_end_are_no_tokens_but_a_token_may_have_no_text(scripted: Scripted) -> None:
    parts = [
        {"delta": {"role": "assistant", "content": ""}, "finish_reason": None},
        {"delta": {"content": "a"}, "finish_reason": None},
        {"delta": {"reasoning": "b"}, "finish_reason": None},
        {"delta": {"content": ""}, "finish_reason": None},
        {"delta": {}, "finish_reason": "stop"},
    ]
    answer = [STREAM, *[chunk(choices=[part]) for part in parts], usage(9, 3), DONE, "end"]
    server = scripted(lambda number, body: answer)
    done = load(server, [BenchPrompt("hello", None, 4)], is_chat=True, keep_text=True)
    (outcome,) = done.outcomes
    assert (len(outcome.times), outcome.output_tokens, outcome.texts) == (3, 3, ["a", "b"])
    assert server.requests[0][2]["messages"] == [{"role": "user", "content": "hello"}]


def test_requests_are_sent_when_they_are_due_and_waiting_for_a_connection_is_counted(scripted: Scripted) -> None:
    server = scripted(lambda number, body: [STREAM, 0.3, token(), usage(3, 1), DONE, "end"])
    even = ArrivalOptions(request_rate=10, burstiness=float("inf"))
    free = load(server, PROMPTS[:3], arrivals=even).outcomes
    starts = [each.start - each.queued - free[0].start for each in free]
    assert starts == pytest.approx([0.0, 0.1, 0.2], abs=0.05)
    busy = load(server, PROMPTS[:3], arrivals=even, max_concurrency=1).outcomes
    assert busy[1].queued > 0.19
    assert busy[2].queued > 0.38


def test_warm_ups_and_the_first_look_do_not_count(scripted: Scripted) -> None:
    server = scripted(lambda number, body: refusal(503, {"status": "loading"}) if number < 2 else whole(body))
    done = load(server, PROMPTS[:2], num_warmups=3, ready_timeout=30)
    assert (kinds(done), len(server.requests)) == ([None, None], 2 + 1 + 3 + 2)


def test_a_server_that_does_not_become_ready_is_an_error_that_says_why(scripted: Scripted) -> None:
    server = scripted(lambda number, body: refusal(503, {"error": {"message": "loading"}}))
    with pytest.raises(OctavoError, match=r"not ready within 1 s .*http_503: loading"):
        load(server, ready_timeout=1)


def test_the_load_generator_counts_its_own_processor_time(scripted: Scripted) -> None:
    begun = time.process_time()
    done = load(scripted(lambda number, body: whole(body)))
    assert 0 < done.client_cpu_s <= time.process_time() - begun


def test_more_connections_than_files_are_refused(scripted: Scripted) -> None:
    with pytest.raises(ConfigError, match="--max-concurrency"):
        load(scripted(lambda number, body: whole(body)), PROMPTS[:1] * (1 << 21))


@pytest.mark.parametrize("base_url", ["localhost:8000", "ftp://a", "http://", "http://a:b", "http://[::1"])
def test_what_is_no_address_is_refused(base_url: str) -> None:
    with pytest.raises(ConfigError, match="--base-url"):
        run_load(Target(base_url=base_url, endpoint="/"), PROMPTS, ArrivalOptions())


@pytest.mark.parametrize("headers", [{"a": "b\r\nc: d"}, {"a b": "c"}, {"": "c"}])
def test_what_is_no_header_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="--header"):
        run_load(Target(base_url="http://a", endpoint="/", headers=headers), PROMPTS, ArrivalOptions())


def test_any_split_of_the_bytes_gives_the_same_events() -> None:
    data = b': hello\r\n\r\nevent: x\ndata: {"a": 1}\r\n\r\ndata:b\ndata: c\n\n\n\nid: 3\ndata: [DONE]\n\ndata: left'
    expected = [b'{"a": 1}', b"b\nc", b"[DONE]"]
    for size in range(1, len(data) + 1):
        reader = EventReader()
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        assert [event for part in parts for event in reader.feed(part)] == expected
