"""Each key within its limits: 429 with the headers that clients know, counted by all front ends together."""

import asyncio
import fcntl
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from octavo.config import AccessConfig
from octavo.entrypoints.access import ApiKey, Ledger
from octavo.errors import EngineDeadError
from tests.entrypoints.conftest import Connection

Error = Callable[..., dict[str, Any]]
COMPLETION = {"prompt": "hi", "max_tokens": 4, "temperature": 0}


class Clock:
    """Stands still unless it is told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_key(name: str = "a", **limits: int) -> ApiKey:
    return ApiKey(name=name, digest=name.encode() * 32, **limits)


class TestLedger:
    def test_a_minutes_requests_may_come_at_once_and_then_one_by_one(self) -> None:
        clock, key = Clock(), make_key(requests_per_minute=60)
        ledger = Ledger([key], clock=clock)
        for left in reversed(range(60)):
            standing = ledger.admit(key)
            assert (standing.refusal, standing.limit, standing.remaining) == (None, 60, left)
        refused = ledger.admit(key)
        assert refused.refusal == "this API key may make 60 requests a minute; try again later"
        assert (refused.remaining, refused.reset_seconds, refused.retry_seconds) == (0, 60.0, 1.0)
        clock.now += 0.5
        assert ledger.admit(key).retry_seconds == 0.5
        clock.now += 0.5
        assert ledger.admit(key).refusal is None
        assert ledger.admit(key).refusal is not None
        clock.now += 3600  # no more than a minute's are ever saved up
        assert [ledger.admit(key).refusal for _ in range(61)].count(None) == 60

    def test_so_many_at_once(self) -> None:
        key = make_key(max_concurrent_requests=2)
        ledger = Ledger([key])
        assert [ledger.admit(key).remaining for _ in range(2)] == [1, 0]
        refused = ledger.admit(key)
        assert refused.refusal == "this API key may have 2 requests under way at once; try again when one has ended"
        assert (refused.limit, refused.remaining) == (2, 0)
        assert refused.retry_seconds > 0
        ledger.release(key)
        assert ledger.admit(key).refusal is None
        assert ledger.admit(key).refusal is not None

    def test_a_request_that_is_refused_costs_nothing(self) -> None:
        clock, key = Clock(), make_key(requests_per_minute=2, max_concurrent_requests=1)
        ledger = Ledger([key], clock=clock)
        assert ledger.admit(key).remaining == 1
        for _ in range(5):
            assert "under way" in str(ledger.admit(key).refusal)
        ledger.release(key)
        assert ledger.admit(key).refusal is None

    def test_each_key_has_its_own_account(self) -> None:
        keys = [make_key(name, requests_per_minute=1) for name in "abc"]
        ledger = Ledger(keys)
        for key in keys:
            assert ledger.admit(key).refusal is None
            assert ledger.admit(key).refusal is not None

    def test_front_ends_share_it_whatever_order_they_read_their_keys_in(self, tmp_path: Path) -> None:
        a, b, c = (make_key(name, requests_per_minute=2) for name in "abc")
        one, other = Ledger([a, b], tmp_path), Ledger([c, b, a], tmp_path)
        for key in (a, b):
            assert (one.admit(key).remaining, other.admit(key).remaining) == (1, 0)
            assert one.admit(key).refusal is not None
        assert other.admit(c).remaining == 1
        assert (tmp_path / "api-keys").stat().st_mode & 0o777 == 0o600

    def test_a_front_end_that_is_stopped_while_it_holds_the_lock_is_waited_for_once(self, tmp_path: Path) -> None:
        key = make_key(requests_per_minute=10)
        ledger = Ledger([key], tmp_path)
        with (tmp_path / "api-keys").open() as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            begin = time.monotonic()
            assert [ledger.admit(key).remaining for _ in range(3)] == [9, 8, 7]
            assert 1.0 <= time.monotonic() - begin < 2.0  # the lower bound: it does wait for who holds it
        assert ledger.admit(key).remaining == 6

    def test_control_those_that_share_nothing_let_more_in(self) -> None:
        key = make_key(requests_per_minute=1)
        assert [Ledger([key]).admit(key).refusal for _ in range(2)] == [None, None]

    def test_it_takes_microseconds(self) -> None:
        key = make_key(requests_per_minute=10**9)
        ledger = Ledger([key])
        begin = time.process_time()
        for _ in range(2000):
            ledger.admit(key)
            ledger.release(key)
        assert (time.process_time() - begin) / 2000 < 1e-3  # about 15 µs; the bound is for a busy machine


# A front end: takes and gives back, under a limit of requests and then under one that it cannot reach; tells how often
# it was let in under the first.
FRONT_END = """
import fcntl
import sys
from pathlib import Path
from octavo.entrypoints.access import ApiKey, Ledger

if sys.argv[2] == "careless":
    fcntl.flock = lambda *_: None
bounded = ApiKey(name="a", digest=b"a" * 32, requests_per_minute=500)
counted = ApiKey(name="b", digest=b"b" * 32, max_concurrent_requests=10**6)
ledger = Ledger([bounded, counted], Path(sys.argv[1]))
print("ready", flush=True)
for line in sys.stdin:
    print(sum(ledger.admit(bounded).refusal is None for _ in range(3000)), flush=True)
    for number in range(30_000):
        assert ledger.admit(counted).refusal is None
        if number % 3 == 0:
            ledger.release(counted)
    print("done", flush=True)
"""


class TestTwoProcesses:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Iterator[Callable[..., tuple[int, int]]]:
        """What two front ends do at the same time: how often they were let in, and how many requests the ledger says
        they have under way, of the 40,000 that they do."""
        started: list[subprocess.Popen[str]] = []

        def line(front_end: subprocess.Popen[str]) -> str:
            assert front_end.stdout is not None
            return front_end.stdout.readline().strip()

        def run(manner: str, folder: str) -> tuple[int, int]:
            shared = tmp_path / folder
            shared.mkdir()
            both = [
                subprocess.Popen(
                    [sys.executable, "-c", FRONT_END, str(shared), manner],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for _ in range(2)
            ]
            started.extend(both)
            assert [line(front_end) for front_end in both] == ["ready", "ready"]
            for front_end in both:
                assert front_end.stdin is not None
                front_end.stdin.write("go\n")
                front_end.stdin.flush()
            admitted = sum(int(line(front_end)) for front_end in both)
            assert [line(front_end) for front_end in both] == ["done", "done"]
            key = make_key("b", max_concurrent_requests=10**6)
            return admitted, 10**6 - Ledger([key], shared).admit(key).remaining - 1

        yield run
        for front_end in started:
            front_end.communicate(timeout=60)
            assert front_end.returncode == 0

    def test_together_never_exceed_a_limit_and_lose_no_count(self, run: Callable[..., tuple[int, int]]) -> None:
        begin = time.monotonic()
        admitted, under_way = run("careful", "shared")
        assert 500 <= admitted <= 500 + (time.monotonic() - begin) * 500 / 60
        assert under_way == 2 * 20_000

    def test_control_without_the_lock_they_lose_some(self, run: Callable[..., tuple[int, int]]) -> None:
        assert any(run("careless", f"shared-{attempt}")[1] != 2 * 20_000 for attempt in range(5))


@pytest.fixture
def write_keys(tmp_path: Path) -> Callable[..., AccessConfig]:
    def write(**limits: Any) -> AccessConfig:
        file = tmp_path / "keys.json"
        entries = [{"key": "sk-a", "name": "a", **limits}, {"key": "sk-free", "name": "free"}]
        file.write_text(json.dumps(entries))
        return AccessConfig(api_key_file=str(file))

    return write


@pytest.fixture
def ask(make_server: Callable[..., Any], write_keys: Callable[..., AccessConfig]) -> Callable[..., Any]:
    return lambda **limits: make_server(access=write_keys(**limits))


def complete(server: Any, key: str = "sk-a", **fields: Any) -> Any:
    return server.post("/v1/completions", COMPLETION | fields, headers={"x-api-key": key})


def rate_headers(response: Any) -> dict[str, str]:
    names = ("limit", "remaining", "reset")
    return {name: response.headers[f"x-ratelimit-{name}-requests"] for name in names}


class TestAnswers:
    def test_requests_a_minute(self, ask: Callable[..., Any], error: Error) -> None:
        server = ask(requests_per_minute=2)
        for remaining in ("1", "0"):
            answer = complete(server)
            assert answer.status_code == 200
            headers = rate_headers(answer)
            assert (headers["limit"], headers["remaining"]) == ("2", remaining)
            assert 29 < float(headers["reset"].removesuffix("s")) <= 60
        refused = complete(server)
        assert error(refused, 429)["type"] == "RateLimitError"
        assert rate_headers(refused)["remaining"] == "0"
        assert 25 <= int(refused.headers["retry-after"]) <= 30
        assert len(server.engine.started) == 2
        assert complete(server, "sk-free").status_code == 200
        assert "x-ratelimit-limit-requests" not in complete(server, "sk-free").headers

    def test_every_post_counts_and_nothing_else(self, ask: Callable[..., Any], error: Error) -> None:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/nothing", "/v1/models"):
            server = ask(requests_per_minute=1)
            for reads in ("/v1/models", "/metrics", "/version", "/health", "/openapi.json", "/nothing"):
                for _ in range(2):
                    answer = server.get(reads, headers={"x-api-key": "sk-a"})
                    assert answer.status_code in (200, 404)
                    assert "x-ratelimit-limit-requests" not in answer.headers
            assert server.post(path, {}, headers={"x-api-key": "sk-a"}).status_code in (400, 404, 405)
            error(server.post(path, {}, headers={"x-api-key": "sk-a"}), 429)

    def test_what_the_openai_client_makes_of_it(self, ask: Callable[..., Any]) -> None:
        server = ask(requests_per_minute=1)
        complete(server)

        async def scenario() -> None:
            transport = httpx.ASGITransport(server.app)
            async with (
                httpx.AsyncClient(transport=transport) as http,
                openai.AsyncOpenAI(base_url="http://s/v1", api_key="sk-a", http_client=http, max_retries=0) as client,
            ):
                with pytest.raises(openai.RateLimitError, match="requests a minute"):
                    await client.completions.create(model="m", prompt="hi", max_tokens=1)

        asyncio.run(scenario())


class TestAtOnce:
    """A request is under way until its response has ended, however it ends."""

    @pytest.fixture
    def server(self, ask: Callable[..., Any]) -> Any:
        return ask(max_concurrent_requests=1)

    def open(self, server: Any, **fields: Any) -> Connection:
        return Connection(server, "/v1/completions", COMPLETION | fields, headers={"x-api-key": "sk-a"})

    async def status(self, server: Any) -> int:
        connection = self.open(server)
        message = await connection.next()
        await connection.rest()
        return int(message["status"])

    def test_a_stream_holds_its_place_to_its_end(self, server: Any) -> None:
        async def scenario() -> None:
            server.engine.hold_after = 2
            stream = self.open(server, stream=True)
            head = dict((await stream.next())["headers"])
            assert head[b"x-ratelimit-limit-requests"] == b"1"
            assert head[b"x-ratelimit-remaining-requests"] == b"0"
            assert await self.status(server) == 429
            server.engine.release.set()
            await stream.rest()
            assert await self.status(server) == 200

        asyncio.run(scenario())

    @pytest.mark.parametrize("stream", [True, False])
    def test_a_client_that_leaves_gives_it_back(self, server: Any, stream: bool) -> None:
        async def scenario() -> None:
            server.engine.hold_after = 2
            connection = self.open(server, stream=stream)
            while not server.engine.running:
                await asyncio.sleep(0)
            assert await self.status(server) == 429
            await connection.leave()
            server.engine.hold_after = None
            assert await self.status(server) == 200

        asyncio.run(scenario())

    @pytest.mark.parametrize("stream", [True, False])
    def test_a_failure_gives_it_back(self, server: Any, stream: bool) -> None:
        server.engine.fail_after = (2, RuntimeError("a fault"))
        for _ in range(3):
            assert complete(server, stream=stream).status_code == (200 if stream else 500)
        server.engine.fail_after = None
        assert complete(server).status_code == 200

    def test_a_server_that_ends_all_requests_gives_it_back(self, server: Any) -> None:
        async def scenario() -> None:
            server.engine.hold_after = 2
            stream = self.open(server, stream=True)
            await stream.next()
            server.state.active.end_all(EngineDeadError("going down"))
            await stream.rest()
            assert await self.status(server) != 429

        asyncio.run(scenario())

    def test_bad_requests_give_it_back(self, server: Any) -> None:
        for _ in range(3):
            assert complete(server, n=0).status_code == 400
            assert complete(server, "wrong").status_code == 401


class TestPriority:
    """Of a request: its key's, unless it states a less urgent one."""

    @pytest.fixture
    def server(self, make_server: Callable[..., Any], write_keys: Callable[..., AccessConfig]) -> Any:
        server = make_server(access=write_keys(priority=3), scheduling_policy="priority")
        seen = server.priorities = []
        process = server.engine.process_inputs

        async def process_inputs(*args: Any, priority: int, **options: Any) -> Any:
            seen.append(priority)
            return await process(*args, priority=priority, **options)

        server.engine.process_inputs = process_inputs
        return server

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    def test_is_bounded_by_the_keys(self, server: Any, error: Error, path: str) -> None:
        body = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}

        def ask(key: str, **fields: Any) -> Any:
            return server.post(path, body | {"max_tokens": 1} | fields, headers={"x-api-key": key})

        for key, fields in (("sk-a", {}), ("sk-a", {"priority": 3}), ("sk-a", {"priority": 9}), ("sk-free", {})):
            assert ask(key, **fields).status_code == 200
        assert server.priorities == [3, 3, 9, 0]
        message = error(ask("sk-a", priority=2), 400, "priority")["message"]
        assert message == "priority must be 3 or higher (less urgent) with this API key, got 2"
        error(ask("sk-free", priority=-1), 400, "priority")  # where one key has a priority, the others' is 0
        assert server.priorities == [3, 3, 9, 0]

    def test_is_free_where_no_key_has_one(self, make_server: Callable[..., Any]) -> None:
        server = make_server(access=AccessConfig(api_key=["sk-a"]), scheduling_policy="priority")
        assert complete(server, priority=-7).status_code == 200
