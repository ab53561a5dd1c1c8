"""A scripted server for the load generator, ended with the test."""

from collections.abc import Callable, Iterator

import pytest

from tests.bench.scripted import Script, ScriptedServer


@pytest.fixture
def scripted() -> Iterator[Callable[[Script], ScriptedServer]]:
    """``scripted(script)`` → ScriptedServer."""
    started: list[ScriptedServer] = []

    def start(script: Script) -> ScriptedServer:
        started.append(ScriptedServer(script))
        return started[-1]

    yield start
    for each in started:
        each.close()
