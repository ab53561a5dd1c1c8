"""The clients from npm: each file of tests, run by node's own runner."""

import json
import os
import subprocess

import pytest
from conversations import REASONED
from octavo_server import FOLDER, KEY, MODEL, OctavoServer


@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("*.test.mjs")))
def test_what_node_says(server: OctavoServer, file: str) -> None:
    told = {"OCTAVO_URL": server.url, "OCTAVO_KEY": KEY, "OCTAVO_MODEL": MODEL, "OCTAVO_REASONED": json.dumps(REASONED)}
    done = subprocess.run(
        ["node", "--test", file], cwd=FOLDER, env=os.environ | told, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# fail 0" in done.stdout
    assert "# pass 0" not in done.stdout
