"""The load: requests sent when they are due, over so many connections as are allowed, and what became of each.

One task a connection; with no limit, one a request. Everything happens on one event loop, in one thread.
"""

import asyncio
import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import uvloop

from octavo.bench.serve.arrivals import ArrivalOptions, arrival_times
from octavo.bench.serve.datasets import BenchPrompt
from octavo.bench.serve.http_client import CutError, HttpClient, UnreachableError
from octavo.bench.serve.outcome import Outcome, StreamReader
from octavo.bench.serve.process_tree import ProcessUse, read_processes
from octavo.errors import ConfigError, OctavoError

__all__ = ["BACKENDS", "Load", "Target", "run_load"]

# How a backend wants to be asked. "vllm" is another name of "openai", as vLLM has it.
BACKENDS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}

_SPARE_FILES = 64  # that are no connections
_PAUSE_SECONDS = 0.5  # between looks whether the server is ready
_LOOK_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Target:
    """The server, and what every request says.

    Attributes:
        base_url, headers, insecure: see HttpClient.
        endpoint: path of the route.
        is_chat: it takes messages.
        body: fields of each request, beside the prompt and the number of tokens.
        request_id_prefix: of the header x-request-id.
        timeout: seconds until a request counts as failed.
    """

    base_url: str
    endpoint: str
    is_chat: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    insecure: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)
    request_id_prefix: str = "bench-"
    timeout: float = 6 * 3600.0


@dataclass(frozen=True)
class Load:
    """What was measured. Seconds.

    Attributes:
        client_cpu_s: processor time of this process meanwhile.
        before, after: the server's processes, where they were looked at.
    """

    outcomes: list[Outcome]
    duration: float
    client_cpu_s: float
    before: list[ProcessUse]
    after: list[ProcessUse]


def run_load(
    target: Target,
    prompts: Sequence[BenchPrompt],
    arrivals: ArrivalOptions,
    *,
    max_concurrency: int | None = None,
    num_warmups: int = 0,
    ready_timeout: float = 0.0,
    keep_text: bool = False,
    server_pid: int | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> Load:
    """Sends all prompts.

    Args:
        max_concurrency: so many requests at once; None: all that are due.
        num_warmups: requests before, which do not count.
        ready_timeout: seconds that the server has to answer a first request, which does not count; 0: none is sent.
        keep_text: of the answers.
        server_pid: the process whose tree is looked at before and after.
        on_done: called after each request.

    Raises:
        OctavoError: the server did not become ready.
        ConfigError: this process may not have so many connections, or the server's processes cannot be looked at.
    """
    num_connections = min(max_concurrency or len(prompts), len(prompts))
    _allow_files(num_connections)
    due = arrival_times(len(prompts), arrivals).tolist()

    async def run() -> Load:
        sender = _Sender(target, keep_text)
        try:
            if ready_timeout:
                await sender.wait_ready(prompts[0], ready_timeout)
            if num_warmups:
                await sender.send_all([prompts[0]] * num_warmups, [0.0] * num_warmups, num_connections)
            return await measured(sender)
        finally:
            sender.close()

    async def measured(sender: _Sender) -> Load:
        before = [] if server_pid is None else read_processes(server_pid, memory=True)
        # Again: looking at the memory took its time.
        cpu_before = [] if server_pid is None else read_processes(server_pid, memory=False)
        cpu, start = time.process_time(), time.perf_counter()
        outcomes = await sender.send_all(prompts, due, num_connections, on_done)
        duration, cpu = time.perf_counter() - start, time.process_time() - cpu
        cpu_after = [] if server_pid is None else read_processes(server_pid, memory=False)
        after = [] if server_pid is None else read_processes(server_pid, memory=True)
        return Load(outcomes, duration, cpu, _with_cpu(before, cpu_before), _with_cpu(after, cpu_after))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def _with_cpu(memory: Iterable[ProcessUse], cpu: Iterable[ProcessUse]) -> list[ProcessUse]:
    """The memory of one look with the processor time of the other."""
    times = {each.pid: each.cpu_s for each in cpu}
    return [ProcessUse(use.pid, use.role, times.get(use.pid, use.cpu_s), use.pss_mb) for use in memory]


def _allow_files(num_connections: int) -> None:
    wanted = num_connections + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise ConfigError(
                f"{num_connections} connections need {wanted} open files, but at most {hard} are allowed "
                "(ulimit -n); state --max-concurrency, or lower --num-prompts"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Sender:
    """Sends prompts to one target."""

    def __init__(self, target: Target, keep_text: bool) -> None:
        self._target = target
        self._keep_text = keep_text
        self._client = HttpClient(target.base_url, target.headers, insecure=target.insecure)

    def close(self) -> None:
        self._client.close()

    async def wait_ready(self, prompt: BenchPrompt, timeout: float) -> None:
        end = time.monotonic() + timeout
        while True:
            look = min(_LOOK_SECONDS, timeout)
            outcome = await self._send(prompt, "ready", look)
            if outcome.failure is None:
                return
            if time.monotonic() >= end:
                said = f"{outcome.failure.kind}: {outcome.failure.message}"
                raise OctavoError(f"the server was not ready within {timeout:g} s (--ready-check-timeout-sec): {said}")
            await asyncio.sleep(_PAUSE_SECONDS)

    async def send_all(
        self,
        prompts: Sequence[BenchPrompt],
        due: Sequence[float],
        num_connections: int,
        on_done: Callable[[], None] = lambda: None,
    ) -> list[Outcome]:
        outcomes: list[Outcome] = [Outcome() for _ in prompts]
        numbers = iter(range(len(prompts)))
        begin = time.perf_counter()

        async def work() -> None:
            for number in numbers:  # shared by all
                at = begin + due[number]
                if (wait := at - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                outcome = await self._send(prompts[number], str(number), self._target.timeout)
                outcome.queued = max(outcome.start - at, 0.0)
                outcomes[number] = outcome
                on_done()

        async with asyncio.TaskGroup() as group:
            for _ in range(min(num_connections, len(prompts))):
                group.create_task(work())
        return outcomes

    async def _send(self, prompt: BenchPrompt, name: str, timeout: float) -> Outcome:
        outcome = Outcome()
        reader = StreamReader(outcome, self._keep_text)
        request = self._encode(prompt, name)
        outcome.start = time.perf_counter()
        try:
            async with asyncio.timeout(timeout):
                await self._client.send(request, reader)
        except UnreachableError as error:
            reader.fail("connect", str(error))
        except CutError as error:
            reader.fail("cut", str(error))
        except TimeoutError:
            reader.fail("timeout", f"no end after {timeout:g} s (--request-timeout-sec)")
        else:
            reader.finish()
        return outcome

    def _encode(self, prompt: BenchPrompt, name: str) -> bytes:
        target = self._target
        if target.is_chat:
            asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt.prompt}]}
        else:
            asked = {"prompt": prompt.prompt}
        asked |= {"max_tokens": prompt.output_len, "stream": True, "stream_options": {"include_usage": True}}
        headers = {"x-request-id": target.request_id_prefix + name}
        return self._client.encode("POST", target.endpoint, msgspec.json.encode(asked | dict(target.body)), headers)
