"""What may be imported without what. The floors themselves are checked by import-linter (`make check`)."""

import subprocess
import sys

import pytest

TORCH_FREE = [
    "octavo.errors",
    "octavo.envs",
    "octavo.logging",
    "octavo.registry",
    "octavo.types",
    "octavo.config",
    "octavo.metrics",
    "octavo.checkpoints",
    "octavo.tokenizers",
    "octavo.renderers",
    "octavo.parsers",
    "octavo.core",
    "octavo.core.kv_cache",
    "octavo.platforms",
    "octavo.executor",
    "octavo.engine",
    "octavo.entrypoints",
    "octavo.cli",
]

# Imports every module of a room, with the named package blocked as if it were not installed.
IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules[sys.argv[2]] = None
room = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(getattr(room, "__path__", []), sys.argv[1] + "."):
    importlib.import_module(module.name)
for name in getattr(room, "__all__", []):
    getattr(room, name)
"""


def import_room(room: str, blocked: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", IMPORT_ALL, room, blocked]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("room", TORCH_FREE)
def test_room_imports_with_torch_blocked(room: str) -> None:
    result = import_room(room, "torch")
    assert result.returncode == 0, result.stderr


def test_control_a_room_that_needs_torch_does_not_import_with_torch_blocked() -> None:
    assert "import of torch halted" in import_room("octavo.layers", "torch").stderr


@pytest.mark.parametrize(
    "room", ["octavo.models", "octavo.worker", "octavo.engine", "octavo.entrypoints", "octavo.cli"]
)
def test_the_main_path_does_not_import_transformers(room: str) -> None:
    result = import_room(room, "transformers")
    assert result.returncode == 0, result.stderr


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; before = set(sys.modules); {statement}; print(*(set(sys.modules) - before))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return {name.split(".")[0] for name in result.stdout.split()}


def test_import_octavo_loads_no_other_package() -> None:
    assert loaded_by("import octavo") - sys.stdlib_module_names == {"octavo"}


def test_control_asking_for_a_name_loads_its_room() -> None:
    assert "msgspec" in loaded_by("from octavo import SamplingParams")
