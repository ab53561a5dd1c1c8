"""The fingerprint: the same for the same weights anywhere, another as soon as weights or their use differ."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.checkpoints import read_model_facts


def fingerprint(path: Path) -> str:
    return read_model_facts(path).fingerprint


def test_a_copy_elsewhere_has_the_same(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_folder(shards=2)
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert fingerprint(copy) == fingerprint(folder)
    assert len(fingerprint(folder)) == 64


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"])
def test_a_tensor_that_was_trained_changes_it(
    make_folder: Callable[..., Path], weights: dict[str, Any], name: str
) -> None:
    before = fingerprint(make_folder(weights=weights))
    weights[name] = weights[name] + np.float32(1e-3)
    assert fingerprint(make_folder(weights=weights)) != before


@pytest.mark.parametrize("at", [0, -1])
def test_the_first_and_the_last_number_count(
    make_folder: Callable[..., Path], weights: dict[str, Any], at: int
) -> None:
    before = fingerprint(make_folder(weights=weights))
    for name in weights:
        changed = weights[name].copy()
        changed.reshape(-1)[at] += 1
        assert fingerprint(make_folder(weights=weights | {name: changed})) != before


def test_a_config_that_changes_the_arithmetic_changes_it(make_folder: Callable[..., Path]) -> None:
    assert fingerprint(make_folder(rope_theta=10000.0)) != fingerprint(make_folder(rope_theta=20000.0))


def test_a_gguf_file_has_one_too(make_gguf: Callable[..., Path]) -> None:
    before = fingerprint(make_gguf("Q8_0"))
    assert fingerprint(make_gguf("Q8_0")) == before
    assert fingerprint(make_gguf("Q4_0")) != before


def test_large_tensors_are_sampled_and_not_read_whole(make_folder: Callable[..., Path]) -> None:
    """The cost of a hundred gigabytes is that of their headers: a file of holes would take minutes to hash whole."""
    big = np.zeros(4, np.float32)
    folder = make_folder(weights={"model.embed_tokens.weight": big})
    file = folder / "model.safetensors"
    header = (
        file.read_bytes()[8:].split(b"\x00")[0].replace(b"[0,16]", b"[0,%d]" % 2**36).replace(b"[4]", b"[%d]" % 2**34)
    )
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with file.open("r+b") as sparse:
        sparse.truncate(8 + len(header) + 2**36)
    before = fingerprint(folder)
    with file.open("r+b") as sparse:
        sparse.seek(-1, 2)
        sparse.write(b"\x01")
    assert fingerprint(folder) != before
