"""Real servers for the tests of faults."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.server_process import Server


@pytest.fixture
def start(tiny_llama_dir: Path) -> Iterator[Callable[..., Server]]:
    """``start(*flags, model=…, **options of Server)`` → Server, not ready yet."""
    servers: list[Server] = []

    def start_one(*words: str, model: Path = tiny_llama_dir, **options: Any) -> Server:
        servers.append(Server(str(model), *words, **options))
        return servers[-1]

    yield start_one
    for server in servers:
        server.close()
