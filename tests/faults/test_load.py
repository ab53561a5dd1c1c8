"""More than a server can hold: four times its batch, ten thousand in its queue, a KV cache that is too small. Everybody
gets the answer that they would have got alone, and nothing is left."""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.faults.canary import Canary
from tests.faults.http_client import Connection, Outcome
from tests.faults.memory import private_bytes
from tests.faults.questions import Question, ask_at_rest
from tests.faults.server_process import Server

MAX_NUM_SEQS = 8


def steps_of(trace: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in trace.read_text().splitlines()]


async def ask_at_once(port: int, questions: list[Question], count: int) -> list[tuple[Question, Outcome]]:
    """So many clients, every second one streaming."""

    async def ask(index: int) -> tuple[Question, Outcome]:
        question = questions[index % len(questions)]
        connection = Connection("127.0.0.1", port)
        outcome = await connection.complete(question.streamed() if index % 2 else question.body)
        connection.close()
        return question, outcome

    return await asyncio.gather(*(ask(index) for index in range(count)))


def test_four_times_the_batch_with_too_small_a_kv_cache(start: Callable[..., Server], tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    flags = ("--max-num-seqs", str(MAX_NUM_SEQS), "--num-gpu-blocks-override", "40", "--step-trace", str(trace))
    server = start(*flags).wait_ready()
    canary = Canary(server)
    questions = asyncio.run(ask_at_rest("127.0.0.1", server.port, 5, prompt_tokens=100, max_tokens=200))
    answers = asyncio.run(ask_at_once(server.port, questions, 4 * MAX_NUM_SEQS))
    for question, outcome in answers:
        assert outcome.whole, outcome
        assert question.wrong(outcome) is None
    steps = steps_of(trace)
    assert max(len(step["requests"]) for step in steps) == MAX_NUM_SEQS
    assert max(step["num_waiting"] for step in steps) >= 3 * MAX_NUM_SEQS
    assert sum(len(step["preempted"]) for step in steps) > 0
    assert server.metric("num_preemptions_total") == sum(len(step["preempted"]) for step in steps)
    canary.check()


def test_ten_thousand_queued_requests_are_all_answered_in_memory_that_is_given_back(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    server = start("--step-trace", str(trace)).wait_ready()
    canary = Canary(server)
    prompts = [[5 + index % 200, 6, 7, 8 + index % 3] for index in range(1000)]
    alone = {
        tuple(prompt): server.complete(prompt=prompt, max_tokens=2).json()["choices"][0]["text"]
        for prompt in prompts[:6]
    }
    body = server.body(prompt=prompts, max_tokens=2)

    async def ask(count: int) -> list[Any]:
        limits = httpx.Limits(max_connections=count)
        async with httpx.AsyncClient(trust_env=False, timeout=120, limits=limits) as client:
            answers = [client.post(f"{server.url}/v1/completions", json=body) for _ in range(count)]
            return [answer.json()["choices"] for answer in await asyncio.gather(*answers)]

    (first,) = asyncio.run(ask(1))
    assert [choice["text"] for choice in first[:6]] == [alone[tuple(prompt)] for prompt in prompts[:6]]
    asyncio.run(ask(10))
    begun, memory = time.monotonic(), {pid: private_bytes(pid) for pid in server.processes}
    for choices in asyncio.run(ask(10)):
        assert choices == first
    assert time.monotonic() - begun < 60
    for pid, before in memory.items():
        assert private_bytes(pid) - before < 16 << 20
    assert max(step["num_waiting"] for step in steps_of(trace)) > 5000  # they come while others go
    canary.check(most_gained=150 << 20)  # what ten thousand requests have taken stays with the allocator
