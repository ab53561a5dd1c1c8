"""docs/operations.md: the flags and paths that it names are octavo's, and its examples are taken."""

import re
from pathlib import Path

import pytest
import yaml

from octavo.cli import main
from octavo.config import AccessConfig, HttpConfig, LimitsConfig
from octavo.entrypoints.access import read_api_keys

PAGE = (Path(__file__).resolve().parents[2] / "docs/operations.md").read_text()
# Of other programs.
FOREIGN = {"--stop-timeout"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def known_flags(capsys: pytest.CaptureFixture[str]) -> set[str]:
    found = set[str]()
    for command in (["serve"], ["bench", "serve"]):
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        found |= set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", capsys.readouterr().out))
    return found


def test_every_flag_exists(known_flags: set[str]) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", PAGE))
    assert len(named) > 30
    assert named - known_flags == FOREIGN


def test_the_settings_are_flags(known_flags: set[str]) -> None:
    settings = yaml.safe_load(blocks("yaml")[0])
    assert {f"--{key}" for key in settings} - {"--model"} <= known_flags


def test_the_keys_are_read(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    text = blocks("yaml")[1].replace("sk-3f7c…", "sk-3f7c").replace("6b86b273ff34…", "6b86b273ff34" + "0" * 52)
    file.write_text(text)
    alice, nightly = read_api_keys(AccessConfig(api_key_file=str(file)))
    assert (alice.name, alice.is_limited) == ("alice", False)
    assert (nightly.requests_per_minute, nightly.max_concurrent_requests, nightly.priority) == (60, 4, 10)


def test_the_numbers_are_the_defaults() -> None:
    (proxy,) = blocks("nginx")
    assert f"client_max_body_size {LimitsConfig().max_body_bytes >> 20}m;" in proxy
    assert f"server 127.0.0.1:{HttpConfig().port};" in proxy
    assert f"`--shutdown-timeout` seconds ({HttpConfig().shutdown_timeout:g})" in PAGE
