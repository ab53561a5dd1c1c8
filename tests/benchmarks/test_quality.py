"""``benchmarks.quality`` and ``benchmarks.make_models``: that the figures mean what they say."""

import json
import math
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from benchmarks import quality
from benchmarks.logits import divergences, llama_cpp_logits, octavo_logits, transformers_logits
from benchmarks.make_models import write_gguf, write_random_model
from octavo.bench.roofline import step_bytes
from octavo.checkpoints import iterate_tensors
from tests.checkpoints.conftest import METADATA, llama_weights
from tests.checkpoints.conftest import write_gguf as write_quantized

IDS = [7, 3, 250, 99, 12, 0, 41, 8, 77, 130, 5, 5, 260, 18, 33, 2, 64, 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all that is random nothing is a constant here, so that rows in another order are other rows."""
    found = tmp_path_factory.mktemp("models") / "small-0.5b"
    write_random_model(found, hidden=64, intermediate=96, layers=2, heads=4, kv_heads=2, vocabulary=300)
    return found


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> Any:
    """``measure(*words)`` → (exit code, the rows that are kept)."""

    def run(*words: str) -> tuple[int, dict[str, Any]]:
        results = tmp_path / "results"
        stated = ["--model", str(folder), "--tokens", "40", "--results", str(results)]
        monkeypatch.setattr(sys, "argv", ["quality", *stated, *words])
        code = quality.main()
        kept = results / "small-0.5b.json"
        return code, json.loads(kept.read_text())["rows"] if kept.exists() else {}

    return run


def divergence(exact: Any, other: Any) -> float:
    return fmean(divergences(exact, other))


def test_divergences_are_of_each_position_and_in_nats() -> None:
    exact = np.log(np.array([[0.5, 0.5], [0.25, 0.75]], np.float32))
    other = np.log(np.array([[0.25, 0.75], [0.25, 0.75]], np.float32)) + np.float32(3.0)  # logits, not normalised
    expected = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    assert divergences(exact, other) == pytest.approx([expected, 0.0], abs=1e-6)
    assert divergences(exact, exact) == [0.0, 0.0]


def test_logits_of_another_text_are_refused() -> None:
    with pytest.raises(ValueError, match=r"of \[2, 3\] beside those of \[4, 3\]"):
        divergences(np.zeros((4, 3), np.float32), np.zeros((2, 3), np.float32))


def test_a_ratio_is_of_means_and_has_an_error() -> None:
    """Checked against the spread of ratios over texts that are drawn anew."""
    draw = np.random.default_rng(0)

    def drawn() -> quality.Row:
        both = draw.exponential(1.0, 400)
        ours, theirs = both * 1.2 + draw.exponential(0.3, 400), both + draw.exponential(0.3, 400)
        return quality.Row("x", None, ours.tolist(), "y", theirs.tolist())

    ratios, errors = zip(*[row.ratio for row in (drawn() for _ in range(300)) if row.ratio is not None], strict=True)
    assert np.mean(ratios) == pytest.approx(1.5 / 1.3, rel=0.01)
    assert np.mean(errors) == pytest.approx(np.std(ratios), rel=0.15)
    assert quality.Row("x", None, [1.0]).ratio is None


def test_octavos_logits_are_those_of_the_text(folder: Path) -> None:
    """In float32 nothing but the order of sums is another; a text with one token changed is another text."""
    exact = transformers_logits(folder, IDS, torch.float32)
    assert exact.std() > 0.3
    wide = {"dtype": "float32"}
    assert divergence(exact, octavo_logits(folder, IDS, wide)) < 1e-9
    assert divergence(exact, octavo_logits(folder, [1, *IDS[1:]], wide)) > 1e-3


def test_rows_are_kept_and_written_into_the_page(measure: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{quality.BEGIN}\n{quality.END}\n")
    code, rows = measure("--with", "--dtype float32", "--with", "--dtype bfloat16", "--page", str(page))
    assert code == 0
    assert fmean(rows["`--dtype float32`"]["octavo"]) < 1e-9 < fmean(rows["`--dtype bfloat16`"]["octavo"])
    code, rows = measure("--page", str(page))
    assert (code, len(rows)) == (0, 3)
    assert rows["bfloat16"]["octavo"] == rows["`--dtype bfloat16`"]["octavo"]
    assert rows["bfloat16"]["other"] == "torch"
    assert "### small-0.5b (40 tokens)" in page.read_text()
    assert "| `--dtype float32` |" in page.read_text()


def test_the_exact_logits_are_kept_for_one_model_and_one_text(measure: Any, folder: Path, tmp_path: Path) -> None:
    file = str(tmp_path / "exact.npz")
    _, first = measure("--reference", file, "--with", "--dtype bfloat16")
    _, second = measure("--reference", file, "--with", "--dtype bfloat16")
    assert first == second
    with pytest.raises(SystemExit, match=r"is of small-0\.5b, or of other tokens"):
        measure("--reference", file, "--tokens", "39")


def test_llama_cpp_that_is_absent_is_told_of(
    measure: Any, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "small.gguf"
    write_gguf(folder, file)
    assert measure("--files", str(file), "--llama-cpp", sys.executable) == (1, {})
    assert "llama.cpp, small.gguf: ModuleNotFoundError: No module named 'llama_cpp'" in capsys.readouterr().err
    code, rows = measure("--files", str(file))
    assert code == 0
    assert rows["small.gguf"]["others"] is None
    assert 0 < fmean(rows["small.gguf"]["octavo"]) < 1e-2


def test_what_is_known_of_llama_cpp_stays_where_only_octavo_is_measured_again(
    measure: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "small.gguf"
    write_gguf(folder, file)
    monkeypatch.setattr(quality, "llama_cpp_logits", lambda python, model, ids: octavo_logits(model, ids, {}) * 1.1)
    _, first = measure("--files", str(file), "--llama-cpp", "python")
    assert fmean(first["small.gguf"]["others"]) > fmean(first["small.gguf"]["octavo"])
    assert measure("--files", str(file)) == (0, first)
    _, shorter = measure("--files", str(file), "--tokens", "39")
    assert shorter["small.gguf"]["others"] is None


def test_a_file_can_be_compared_with_its_own_weights(measure: Any, folder: Path, tmp_path: Path) -> None:
    """What is left then is how it is computed: a file of another model is as near to itself."""
    other, file = tmp_path / "other", tmp_path / "other.gguf"
    write_random_model(other, hidden=64, intermediate=96, layers=1, heads=4, kv_heads=2, vocabulary=300)
    write_gguf(other, file)
    _, rows = measure("--files", str(file))
    _, rows = measure("--files", str(file), "--own")
    own, models = (fmean(rows[what]["octavo"]) for what in ("other.gguf, its own weights", "other.gguf"))
    assert 0 < own < 1e-2 < models
    with pytest.raises(SystemExit):
        measure("--own")


def test_llama_cpps_logits_come_from_its_own_interpreter(folder: Path, tmp_path: Path) -> None:
    """With a stand-in for that interpreter: it gets the same ids, and what it writes is what is read."""
    stand_in = tmp_path / "python"
    stand_in.write_text(
        f"#!{sys.executable}\nimport json, sys, numpy\n_, _, program, model, ids, out, threads = sys.argv\n"
        "assert program == 'benchmarks.peers.llama_cpp_logits' and model.endswith('x.gguf') and int(threads) > 0\n"
        "ids = numpy.array(json.load(open(ids)), numpy.float32)\nnumpy.save(out, numpy.stack([ids, ids + 1], 1))\n"
    )
    stand_in.chmod(0o755)
    found = llama_cpp_logits(str(stand_in), tmp_path / "x.gguf", IDS)
    assert found[:, 0].tolist() == [float(each) for each in IDS]


def test_a_gguf_file_has_the_same_tensors_as_the_folder(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "small.gguf"
    write_gguf(folder, file)
    stored, expected = ({each.name: each for each in iterate_tensors(path)} for path in (file, folder))
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(stored[name].to_float32(), tensor.to_float32(), err_msg=name)
        assert stored[name].type == ("BF16" if len(tensor.shape) == 2 else "F32")


def test_a_gguf_file_takes_over_what_another_says(folder: Path, tmp_path: Path) -> None:
    """Tokenizer and settings, not its weights."""
    plain, copied = tmp_path / "plain.gguf", tmp_path / "copied.gguf"
    write_gguf(folder, plain)
    write_gguf(folder, copied, like=plain)
    assert copied.read_bytes() == plain.read_bytes()


def test_the_random_model_is_the_same_in_every_run(folder: Path, tmp_path: Path) -> None:
    write_random_model(tmp_path, hidden=64, intermediate=96, layers=2, heads=4, kv_heads=2, vocabulary=300)
    assert (tmp_path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_step_reads_quantized_weights_as_the_file_has_them(tmp_path: Path) -> None:
    """18 bytes for 32 values of Q4_0, vectors in the type that is computed in."""
    weights = llama_weights()
    file = write_quantized(tmp_path / "q.gguf", weights, GGMLQuantizationType.Q4_0, METADATA, {})
    matrices, vectors = (sum(each.size for each in weights.values() if each.ndim == ndim) for ndim in (2, 1))
    assert step_bytes(file, "bfloat16") == matrices * 18 // 32 + vectors * 2
    assert step_bytes(file, "float32") == matrices * 18 // 32 + vectors * 4
