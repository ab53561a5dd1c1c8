"""The same answers through HTTP whatever the server does to compute them: whole and in chunks, from the prefix cache or
not, preempted or not, with overlapping steps, alone and in a crowd of unlike neighbours, streamed and not, by one front
end or two. Texts and logprobs, to the last bit. The engine's own promises are held to more in tests/properties."""

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.faults.canary import Canary
from tests.faults.server_process import Server
from tests.faults.test_front_ends import further

BLOCK = 16


def questions() -> list[dict[str, Any]]:
    """Prompts around the ends of blocks, and parameters that must keep to their own request."""
    drawn = random.Random(3)
    common: dict[str, Any] = {"ignore_eos": True, "logprobs": 2, "max_tokens": 40, "temperature": 0}
    bodies = []
    for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK - 1, 5 * BLOCK, 5 * BLOCK + 1, 150):
        bodies.append(common | {"prompt": [drawn.randrange(3, 300) for _ in range(length)]})
    text = common | {"prompt": "Once upon a time 👩‍👩‍👧‍👦 é שלום there was"}
    return [
        *bodies,
        text,
        text | {"temperature": 0.9, "seed": 5, "n": 3},
        text | {"temperature": 0.9, "seed": 6, "top_p": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        text | {"allowed_token_ids": list(range(60, 90)), "min_tokens": 10},
        text | {"logit_bias": {"70": 40.0, "71": 39.0}, "frequency_penalty": 1.5},
        text | {"bad_words": ["e", " the"], "temperature": 1.1, "seed": 7, "min_p": 0.05, "top_k": 20},
        text | {"stop": ["e", "zq", "\n\n"], "temperature": 1.2, "seed": 8, "max_tokens": 120},
    ]


def answer(server: Server, body: dict[str, Any]) -> Any:
    response = server.complete(**body)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def streamed_answer(server: Server, body: dict[str, Any]) -> Any:
    """The choices, put together from their pieces."""
    choices: dict[int, Any] = {}
    with server.stream(**body) as events:
        for event in events:
            if event == "[DONE]":
                return [choices[index] for index in sorted(choices)]
            for piece in json.loads(event)["choices"]:
                _append(choices.setdefault(piece["index"], {}), piece)
    raise AssertionError("the stream has no end")


def _append(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    for key, value in piece.items():
        if key == "text":
            choice[key] = choice.get(key, "") + value
        elif key == "logprobs":
            table = choice.setdefault(key, {name: [] for name in value} if value is not None else None)
            for name, entries in (value or {}).items():
                table[name] += entries
        elif value is not None or key not in choice:
            choice[key] = value


def crowd(server: Server, ask: Callable[..., Any], seed: int) -> list[Any]:
    """All questions at once, in some order; the answers in theirs."""
    bodies = questions()
    order = random.Random(seed).sample(range(len(bodies)), len(bodies))
    with ThreadPoolExecutor(len(bodies)) as threads:
        found = dict(zip(order, threads.map(lambda index: ask(server, bodies[index]), order), strict=True))
    return [found[index] for index in range(len(bodies))]


@pytest.fixture(scope="module")
def expected(tiny_llama_dir: Path) -> Iterator[list[Any]]:
    """Each question alone, in a server that has seen no other: nothing cached, nothing beside it, nothing in chunks."""
    server = Server(str(tiny_llama_dir), "--no-enable-prefix-caching").wait_ready()
    yield [answer(server, body) for body in questions()]
    server.close()


CHUNKED = ("--max-num-batched-tokens", "17")
CROWDED = ("--max-num-batched-tokens", "40", "--num-gpu-blocks-override", "33", "--async-scheduling")
TWO_DOORS = ("--api-server-count", "2")


@pytest.mark.parametrize("flags", [(), CHUNKED, CROWDED, TWO_DOORS], ids=["plain", "chunked", "crowded", "two doors"])
def test_every_way_of_serving_gives_the_same(
    start: Callable[..., Server], tmp_path: Path, expected: list[Any], flags: tuple[str, ...]
) -> None:
    trace = tmp_path / "trace"
    server = start(*flags, "--step-trace", str(trace)).wait_ready()
    if flags == TWO_DOORS:
        further(server)  # its connections are part of the rest
    canary = Canary(server)
    bodies = questions()
    assert [answer(server, body) for body in bodies] == expected
    assert [answer(server, body) for body in bodies] == expected  # from the prefix cache
    assert [streamed_answer(server, body) for body in bodies] == expected
    for seed in range(2):
        assert crowd(server, answer, seed) == expected
        assert crowd(server, streamed_answer, seed) == expected
    canary.check()
    steps = [json.loads(line) for line in trace.read_text().splitlines()]
    assert {step["graph_mode"] for step in steps} == {"FULL"}
    assert sum(step["hits"] for step in steps) > 0
    assert max(len(step["requests"]) for step in steps) > 4
    if flags == CHUNKED:
        assert max(step["num_tokens"] for step in steps) == 17
    if flags == CROWDED:
        assert sum(len(step["preempted"]) for step in steps) > 0
        assert max(step["in_flight"] for step in steps) == 2


def test_control_another_seed_or_a_neighbours_parameter_is_noticed(expected: list[Any]) -> None:
    texts = [choice["text"] for choices in expected for choice in choices]
    assert len(set(texts)) == len(texts)
