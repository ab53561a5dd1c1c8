"""build_config: what it says about a model's own recommendations."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.config import EngineArgs
from octavo.engine import build_config


def test_sampling_defaults_of_the_model_that_are_not_applied_are_named_once(
    make_tiny_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny_llama()
    generation = {"eos_token_id": 2, "temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True}
    for recommended, lines in (({"eos_token_id": 2}, []), (generation, ["temperature=0.6, top_k=20: not applied"])):
        (folder / "generation_config.json").write_text(json.dumps(recommended))
        build_config(EngineArgs(model=str(folder)))
        said = [line for line in capsys.readouterr().err.splitlines() if "generation_config.json" in line]
        assert len(said) == len(lines)
        assert all(expected in line for expected, line in zip(lines, said, strict=True))
