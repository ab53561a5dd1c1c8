"""Chaos: kill -9 of a random process of the server every few seconds, under clients that retry, while a supervisor
starts it again on the same port. ``python -m tests.chaos`` (``make chaos``); not part of CI but for a short form.

No answer is wrong, every failure is one that a client can tell from an answer, nothing is left behind by any death, and
the next server works at once.
"""

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.faults.http_client import Connection, Outcome
from tests.faults.questions import Question, ask_at_rest
from tests.faults.server_process import START_SECONDS, Server, wait_until
from tests.tiny_llama import write_tiny_llama

__all__ = ["Supervisor", "Tally", "main", "run_clients"]

_CLIENTS = 8
_PROMPT_TOKENS, _MAX_TOKENS, _QUESTIONS = 120, 400, 6
_ENDED_SECONDS = 5.0  # after any of its processes was killed, the whole server has ended
_HANGING_SECONDS = 60.0
_NOT_READY_SECONDS = 20.0  # until a server with a stopped engine says that it is not ready
_DIE_LOADING, _LOADING_SECONDS = 0.3, 2.0  # that share of the servers dies so early
# Failures that tell a client what has happened.
_TYPED = {
    "refused",
    "reset",
    "reset within a 200",
    "cut",
    "cut within a 200",
    "503 Service Unavailable",
    "503 Service Unavailable event",
}


# ---- clients --------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What clients have seen."""

    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def enter(self, question: Question, outcome: Outcome) -> None:
        self.kinds[outcome.kind] += 1
        if (wrong := question.wrong(outcome)) is not None:
            self.faults.append(f"{outcome.kind}: {wrong}")
        if not outcome.whole and outcome.kind not in _TYPED:
            self.faults.append(f"not a failure that tells what it is: {outcome}")


async def run_clients(port: int, questions: list[Question], tally: Tally, until: threading.Event, seed: int) -> None:
    """Clients that ask again, streamed and not, until they have their answer."""
    async with asyncio.TaskGroup() as group:
        for index in range(_CLIENTS):
            group.create_task(_ask_and_retry(port, questions, tally, until, random.Random(seed + index)))


async def _ask_and_retry(
    port: int, questions: list[Question], tally: Tally, until: threading.Event, drawn: random.Random
) -> None:
    connection = Connection("127.0.0.1", port)
    while not until.is_set():
        question = drawn.choice(questions)
        body = question.streamed() if drawn.random() < 0.5 else question.body
        whole = False
        while not whole and not until.is_set():
            try:
                outcome = await asyncio.wait_for(connection.complete(body), _HANGING_SECONDS)
            except TimeoutError:
                tally.faults.append(f"no end of an answer within {_HANGING_SECONDS:g} s")
                return
            tally.enter(question, outcome)
            whole = outcome.whole
            if not whole:
                await asyncio.sleep(drawn.uniform(0.02, 0.3))
    connection.close()


# ---- the supervisor -------------------------------------------------------------------------------------------------


class Supervisor(threading.Thread):
    """Starts servers on one port, one after the other, and kills a process of each, at any moment of its life.

    Args:
        stop_share: of the servers that became ready; their engine is stopped instead, until they say that they are not
            ready, which is when an orchestrator kills all of it.

    Attributes:
        deaths: of which process, loading or serving.
        faults: what a death did not do, or left behind.
        ended_seconds: how long each server took to end after its process was killed.
        ready_seconds: how long each took that became ready.
    """

    def __init__(self, words: list[str], port: int, mean_seconds: float, stop_share: float, seed: int) -> None:
        super().__init__(daemon=True)
        self._stop_share = stop_share
        self._words, self._port, self._mean_seconds = words, port, mean_seconds
        self._drawn = random.Random(seed)
        self.enough = threading.Event()
        self.deaths: Counter[str] = Counter()
        self.faults: list[str] = []
        self.ended_seconds: list[float] = []
        self.ready_seconds: list[float] = []

    def run(self) -> None:
        while not self.enough.is_set():
            server = Server(*self._words, port=self._port)
            try:
                self._live_and_die(server)
            except Exception as error:
                self.faults.append(f"{type(error).__name__}: {error}")
            finally:
                server.close()

    def _live_and_die(self, server: Server) -> None:
        begun = time.monotonic()

        def is_ready() -> bool:
            return server.said("Octavo is ready") is not None

        if self._drawn.random() < _DIE_LOADING:
            self._let_live(server, self._drawn.uniform(0.0, _LOADING_SECONDS), is_ready)
        else:
            self._let_live(server, START_SECONDS, is_ready)
            if is_ready():
                self.ready_seconds.append(time.monotonic() - begun)
            self._let_live(server, self._drawn.uniform(0.2, 2 * self._mean_seconds))
        if is_ready() and self._drawn.random() < self._stop_share:
            self._stop_and_kill(server)
            return
        when = "serving" if is_ready() else "loading"
        victim, name = self._choose(server)
        self.deaths[f"{name}, {when}"] += 1
        victim.kill()
        killed = time.monotonic()
        code = server.wait_exit(_ENDED_SECONDS)
        expected = -signal.SIGKILL if victim.pid == server.process.pid else 3
        if code != expected:
            self.faults.append(f"{name} killed while {when}: exit code {code}, not {expected}: {server.lines[-3:]}")
        if not wait_until(server.left_nothing, _ENDED_SECONDS):
            self.faults.append(f"{name} killed while {when}: left {server.left()}")
        self.ended_seconds.append(time.monotonic() - killed)

    def _stop_and_kill(self, server: Server) -> None:
        """Stops the engine, waits until the server is not ready for it, and kills all of its processes."""
        self.deaths["engine stopped, serving"] += 1
        server.look()
        server.processes[server.engine_pid].suspend()

        def is_not_ready() -> bool:
            return server.http.get(f"{server.url}/ready").status_code == 503

        if not wait_until(is_not_ready, _NOT_READY_SECONDS):
            self.faults.append(f"the engine is stopped, and the server is ready after {_NOT_READY_SECONDS:g} s")
        for process in server.running():
            process.kill()
        server.wait_exit(_ENDED_SECONDS)

        def left() -> list[str]:
            """But for its files, which nobody was left to remove; the next server must not mind them."""
            return [each for each in server.left() if not each.startswith(str(server.folder))]

        if not wait_until(lambda: not left(), _ENDED_SECONDS):
            self.faults.append(f"killed as a whole: left {left()}")

    def _let_live(self, server: Server, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        wait_until(lambda: until() or self.enough.is_set() or server.process.poll() is not None, seconds)
        if server.process.poll() is not None:
            raise AssertionError(f"the server has ended by itself with {server.process.returncode}: {server.lines}")

    def _choose(self, server: Server) -> tuple[psutil.Process, str]:
        """A process of the server, and what it is."""
        server.look()
        victim = self._drawn.choice(sorted(server.running(), key=lambda process: process.pid))
        if victim.pid == server.process.pid:
            return victim, "launcher"
        return victim, "engine" if victim.pid in server.engine_pids else "front end"


# ---- the whole ------------------------------------------------------------------------------------------------------


def _first_answers(words: list[str]) -> tuple[list[Question], int]:
    """From a server that nobody disturbs; and its port, which is free again."""
    server = Server(*words)
    try:
        port = server.wait_ready().port
        questions = asyncio.run(ask_at_rest("127.0.0.1", port, _QUESTIONS, _PROMPT_TOKENS, _MAX_TOKENS))
        server.signal(signal.SIGTERM)
        assert server.wait_exit(15) == 0, server.lines
        assert server.left_nothing(), server.left()
    finally:
        server.close()
    return questions, port


def _serve_calmly(words: list[str], port: int, questions: list[Question]) -> None:
    """After it all a server on the same port is as the first."""
    server = Server(*words, port=port)
    try:
        server.wait_ready()
        again = asyncio.run(ask_at_rest("127.0.0.1", port, _QUESTIONS, _PROMPT_TOKENS, _MAX_TOKENS))
        assert again == questions
    finally:
        server.close()


def _chaos(words: list[str], seconds: float, mean_seconds: float, stop_share: float, seed: int) -> list[str]:
    """Runs it all, says what happened, and returns the faults that were found."""
    questions, port = _first_answers(words)
    tally = Tally()
    supervisor = Supervisor(words, port, mean_seconds, stop_share, seed)
    supervisor.start()
    timer = threading.Timer(seconds, supervisor.enough.set)
    timer.start()
    try:
        asyncio.run(run_clients(port, questions, tally, supervisor.enough, seed))
    finally:
        supervisor.enough.set()
        timer.cancel()
        supervisor.join(START_SECONDS)
    _serve_calmly(words, port, questions)
    _tell(supervisor, tally)
    faults = supervisor.faults + tally.faults
    if tally.kinds["whole"] < len(supervisor.ready_seconds):
        faults.append(f"only {tally.kinds['whole']} answers from {len(supervisor.ready_seconds)} servers")
    return faults


def _tell(supervisor: Supervisor, tally: Tally) -> None:
    def say(name: str, values: Any) -> None:
        print(f"{name}: {values}", flush=True)

    def spread(values: list[float]) -> str:
        found = sorted(values)
        return f"median {found[len(found) // 2]:.2f} s, longest {found[-1]:.2f} s ({len(found)})" if found else "none"

    say("killed", dict(sorted(supervisor.deaths.items())))
    say("from the kill until nothing was left", spread(supervisor.ended_seconds))
    say("from the start until ready", spread(supervisor.ready_seconds))
    say("what clients saw", dict(tally.kinds.most_common()))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds that a server serves, on average")
    parser.add_argument("--stop", type=float, default=0.0, help="share of the servers whose engine is stopped instead")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("flags", nargs="*", help="of octavo serve, after --")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_llama(Path(folder), max_position_embeddings=1024)
        words = [folder, "--disable-uvicorn-access-log", *args.flags]
        faults = _chaos(words, args.seconds, args.every, args.stop, args.seed)
    for fault in faults:
        print(f"FAULT: {fault}", flush=True)
    print(f"{len(faults)} faults", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
