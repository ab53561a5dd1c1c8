"""A scripted server for the load generator, ended with the test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.bench.scripted import Script, ScriptedServer


@pytest.fixture
def scripted() -> Iterator[Callable[..., ScriptedServer]]:
    """``scripted(script, …)`` → ScriptedServer."""
    started: list[ScriptedServer] = []

    def start(script: Script, **options: Any) -> ScriptedServer:
        started.append(ScriptedServer(script, **options))
        return started[-1]

    yield start
    for each in started:
        each.close()
