"""The soak: a million streamed tokens through 64 connections, one in five clients leaving early; then the books are
balanced. ``python -m tests.soak`` (``make soak``); not part of CI but for a short form.

Every stream whose client stays is whole and says what the server said at rest; the counters agree with what clients
were told; no block stays held; no process grows. ``--plant`` puts a leak into a process, which must be found.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.canary import Canary
from tests.faults.http_client import Connection, Outcome
from tests.faults.memory import MemoryWatch, growth
from tests.faults.planted import planted
from tests.faults.questions import Question, ask_at_rest
from tests.faults.server_process import Server, wait_until
from tests.tiny_llama import write_tiny_llama

__all__ = ["Books", "main", "soak"]

_PROMPT_TOKENS, _MAX_TOKENS, _QUESTIONS = 160, 256, 8
_LOOKS = 100  # at memory
_LEAVING_SHARE = 0.2
# What a process may gain in the second half of the time after its warm-up.
_MOST_GAINED = 6 << 20
# A leak that is planted: bytes for each token. Of a short run it must be as easy to see as of a long one.
_PLANTED_TOTAL = 96 << 20
# Steps that a request may go on for after its client has left.
_STEPS_AFTER_LEAVING = 64


@dataclass
class Books:
    """What clients were told.

    Attributes:
        tokens: of the streams that were whole, by their usage.
        pieces: events of text that clients got who left; at least so many tokens were generated for them.
        unstarted: clients who left before they had got anything.
    """

    streams: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    left: int = 0
    pieces: int = 0
    left_prompt_tokens: int = 0
    unstarted: int = 0
    unstarted_prompt_tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)

    @property
    def streamed(self) -> int:
        return self.tokens + self.pieces

    def enter(self, question: Question, outcome: Outcome) -> None:
        if (wrong := question.wrong(outcome)) is not None:
            self.wrong.append(wrong)
        if outcome.left:
            self.kinds["left"] += 1
            self.left += 1
            self.pieces += outcome.num_events
            if outcome.num_events:
                self.left_prompt_tokens += question.num_prompt_tokens
            else:
                self.unstarted += 1
                self.unstarted_prompt_tokens += question.num_prompt_tokens
            return
        self.kinds[outcome.kind] += 1
        if outcome.whole and outcome.usage is not None:
            self.streams += 1
            self.tokens += outcome.usage.completion_tokens
            self.prompt_tokens += outcome.usage.prompt_tokens


class _Connections:
    """So many clients at once, until enough has been streamed."""

    def __init__(self, server: Server, questions: list[Question], books: Books, seed: int) -> None:
        self._server, self._questions, self._books = server, questions, books
        self._drawn = random.Random(seed)

    async def run(self, count: int, until_tokens: int, leaving_share: float) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._client(until_tokens, leaving_share))

    async def _client(self, until_tokens: int, leaving_share: float) -> None:
        connection = Connection("127.0.0.1", self._server.port)
        while self._books.streamed < until_tokens:
            question = self._drawn.choice(self._questions)
            leave_after = None
            if self._drawn.random() < leaving_share:
                leave_after = self._drawn.randrange(question.num_tokens)
            outcome = await connection.complete(question.streamed(), leave_after)
            self._books.enter(question, outcome)
            if not outcome.whole and not outcome.left:
                return  # the server is not well, and the books say so
        connection.close()


def soak(server: Server, tokens: int, connections: int, seed: int) -> tuple[Books, MemoryWatch]:
    """Streams so many tokens; asserts that all streams were right and the counters agree with them."""
    canary = Canary(server)
    questions = asyncio.run(ask_at_rest("127.0.0.1", server.port, _QUESTIONS, _PROMPT_TOKENS, _MAX_TOKENS))
    before = _counters(server)
    books = Books()
    clients = _Connections(server, questions, books, seed)
    names = {pid: "engine" if pid == server.engine_pid else f"front end {pid}" for pid in server.processes}
    begun = time.monotonic()
    with MemoryWatch({name: pid for pid, name in names.items()}, lambda: books.streamed, tokens / _LOOKS) as watch:
        asyncio.run(clients.run(connections, tokens, _LEAVING_SHARE))
    seconds = time.monotonic() - begun
    _say(f"{books.streamed} tokens in {seconds:.0f} s ({books.streamed / seconds:.0f} a second): {dict(books.kinds)}")
    assert not books.wrong, f"{len(books.wrong)} wrong streams, for example: {books.wrong[0]}"
    assert set(books.kinds) == {"whole", "left"}, books.kinds
    assert wait_until(lambda: server.num_unfinished() == 0), "requests are left"
    after = _counters(server)
    canary.check(most_gained=1 << 40)  # memory is judged by its growth
    _balance(books, {name: after[name] - before[name] for name in after})
    _say("the server is at rest: nothing running or waiting, no block held")
    return books, watch


def _balance(books: Books, counted: dict[str, float]) -> None:
    """Asserts that the server has counted what its clients have got."""
    ended = counted["length"] + counted["abort"]
    assert ended == books.streams + books.left, (counted, books)
    assert books.streams <= counted["length"] <= books.streams + books.left
    assert counted["other"] == 0, counted
    # Of those that left before anything had come, some were computed and some were not.
    least = books.prompt_tokens + books.left_prompt_tokens
    assert least <= counted["prompt_tokens_total"] <= least + books.unstarted_prompt_tokens, (counted, books)
    # Every token belongs to a request that has ended; those of whole streams are known, of others nearly.
    assert counted["generation_tokens_total"] == counted["request_generation_tokens_sum"]
    beyond = counted["generation_tokens_total"] - books.streamed
    assert 0 <= beyond <= books.left * _STEPS_AFTER_LEAVING, (counted, books)
    _say(
        f"counters: {ended:.0f} requests ended ({counted['abort']:.0f} aborted), "
        f"{counted['generation_tokens_total']:.0f} tokens generated: {books.tokens} told by usage, {books.pieces} got "
        f"by {books.left} clients who left, {beyond:.0f} after that ({beyond / max(1, books.left):.1f} each)"
    )


def _counters(server: Server) -> dict[str, float]:
    names = ("generation_tokens_total", "request_generation_tokens_sum", "prompt_tokens_total")
    found = {name: server.metric(name) for name in names}
    reasons = server.metric_by("request_success_total", "finished_reason")
    found |= {reason: reasons.pop(reason, 0.0) for reason in ("length", "abort")}
    return found | {"other": sum(reasons.values())}


def _exact(server: Server, connections: int, seed: int) -> None:
    """Without anybody who leaves, the counters are the usage, to the last token."""
    questions = asyncio.run(ask_at_rest("127.0.0.1", server.port, _QUESTIONS, _PROMPT_TOKENS, _MAX_TOKENS))
    before, books = _counters(server), Books()
    clients = _Connections(server, questions, books, seed)
    asyncio.run(clients.run(connections, connections * _MAX_TOKENS, leaving_share=0))
    after = _counters(server)
    assert not books.wrong, books.wrong[0]
    for name, told in (("generation_tokens_total", books.tokens), ("prompt_tokens_total", books.prompt_tokens)):
        assert after[name] - before[name] == told, (name, after[name] - before[name], told)
    _say(f"{books.streams} streams without leavers: counters equal usage exactly, {books.tokens} tokens")


def _growing(watch: MemoryWatch) -> list[str]:
    """The processes that grow."""
    growing = []
    for name, samples in watch.samples.items():
        found = growth(samples)
        _say(f"{name}: {found.before / 1e6:.1f} MB, then {found.after / 1e6:.1f} MB ({found.gained / 1e6:+.1f})")
        if found.gained > _MOST_GAINED:
            growing.append(name)
    return growing


def _say(line: str) -> None:
    print(line, flush=True)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plant", choices=("engine", "front-end"), help="leak there, and expect it to be found")
    parser.add_argument("flags", nargs="*", help="of octavo serve, after --")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        model, faults = Path(folder, "model"), Path(folder, "faults")
        model.mkdir(), faults.mkdir()
        write_tiny_llama(model, max_position_embeddings=512)
        env = {}
        if args.plant is not None:
            env = planted(faults, f"leak {args.plant} {max(1, _PLANTED_TOTAL // args.tokens)}")
        blocks = str(args.connections * (_PROMPT_TOKENS + _MAX_TOKENS) // 16)
        server = Server(
            *(str(model), "--num-gpu-blocks-override", blocks, "--disable-uvicorn-access-log", *args.flags), env=env
        )
        try:
            _, watch = soak(server.wait_ready(), args.tokens, args.connections, args.seed)
            growing = _growing(watch)
            if args.plant is None:
                assert not growing, f"memory grows in {growing}"
                _exact(server, args.connections, args.seed)
            else:
                found = {"engine": growing == ["engine"], "front-end": growing and "engine" not in growing}
                assert found[args.plant], f"the leak in the {args.plant} was not found: {growing}"
                _say(f"the planted leak was found in {growing}")
            server.signal(15)
            assert server.wait_exit(15) == 0, server.lines
            assert server.left_nothing()
        finally:
            server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
