"""One real server, with two front ends, for all clients; idle after each test, it ends cleanly after the last."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from octavo_server import MODEL, OctavoServer, run_octavo_side

_scratch = tempfile.TemporaryDirectory(prefix="octavo-clients-")
# Read when a client is imported: nothing here may look for a hub, a price list or a place for telemetry.
os.environ |= {
    "HF_HOME": _scratch.name,
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LANGSMITH_TRACING": "false",
    "TOKENIZERS_PARALLELISM": "false",
}


@pytest.fixture(scope="session")
def server() -> Iterator[OctavoServer]:
    started = OctavoServer("--reasoning-parser", "think", "--max-model-len", "2048", "--api-server-count", "2")
    yield started.wait_ready()
    log = started.log()
    assert started.stop() == 0, log
    started.close()
    assert "Traceback" not in log, log


@pytest.fixture(autouse=True)
def canary(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test that has used the server."""
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").check_idle()


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / MODEL
    folder.mkdir()
    run_octavo_side("tokenizer", str(folder))
    return folder
