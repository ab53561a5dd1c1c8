"""``octavo bench`` and ``octavo collect-env``: what comes out, and what is refused before anything is measured.

What is measured is nobody's promise here: the machine may be busy. That the figures belong together is.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import octavo as package
from octavo import kernels
from octavo.bench import startup
from octavo.cli import main
from octavo.kernels import limits
from tests.properties.harness import SHAPE, save_model

Bench = Callable[..., Any]
SIZES = ["--input-len", "20", "--output-len", "3"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE)
    return save_model(tmp_path_factory.mktemp("llama"), transformers.LlamaForCausalLM(config))


@pytest.fixture
def octavo(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """``octavo(*words)`` → (exit code, standard output, standard error)."""

    def run(*words: Any) -> tuple[int, str, str]:
        try:
            code = main([str(word) for word in words])
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def bench(octavo: Callable[..., tuple[int, str, str]], model: Path) -> Bench:
    """``bench(kind, *flags)`` → the result: the one line on standard output."""

    def run(kind: str, *flags: Any) -> Any:
        code, out, err = octavo("bench", kind, "--model", model, *flags)
        assert code == 0, err
        (line,) = out.splitlines()
        found = json.loads(line)
        assert (found["benchmark"], found["model"]) == (kind, str(model))
        return found

    return run


@pytest.fixture
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_RUNS", 1)


def test_latency(bench: Bench, short_measurements: None, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    found = bench(
        "latency", *SIZES, "--batch-size", "2", "--num-iters", "2", "--dtype", "bfloat16", "--output-json", file
    )
    assert json.loads(file.read_text()) == found
    assert (found["input_len"], found["output_len"], found["batch_size"]) == (20, 3, 2)
    assert (found["dtype"], found["kernels"]) == ("bfloat16", kernels.kernel_set())
    assert 0 < found["first_token_ms"]["min"] < found["latency_ms"]["min"] <= found["latency_ms"]["median"]
    assert found["decode_tokens_s"] == pytest.approx(2e3 / found["decode_step_ms"]["median"])
    assert found["prefill_tokens_s"] == pytest.approx(40e3 / found["first_token_ms"]["median"])
    assert 0 < found["engine_ms_per_step"] < found["latency_ms"]["max"]
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    parameters = [each for name, each in model.named_parameters() if name != "model.embed_tokens.weight"]
    assert "lm_head.weight" in dict(model.named_parameters())  # which a step reads, but not the embedding
    wide = sum(2 * each.numel() for each in parameters)
    kept = sum(
        kernels.filled_bytes((each.shape[0], each.shape[1]), torch.bfloat16) if each.ndim == 2 else 2 * each.numel()
        for each in parameters
    )
    for share, read in (("bandwidth_share", kept), ("checkpoint_share", wide)):
        at_best = read / (found["bandwidth_gb_s"] * 1e9)
        assert found[share] == pytest.approx(at_best * 1e3 / found["decode_step_ms"]["median"])


def test_latency_of_one_token_says_nothing_of_decode_steps(bench: Bench, short_measurements: None) -> None:
    found = bench("latency", "--input-len", "20", "--output-len", "1", "--batch-size", "1", "--num-iters", "1")
    assert found["latency_ms"]["min"] > 0
    assert found["decode_step_ms"] is found["decode_tokens_s"] is found["bandwidth_share"] is None


def test_latency_with_torch_says_nothing_of_limits(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CPU_ISA", "torch")
    found = bench("latency", *SIZES, "--batch-size", "1", "--num-iters", "1")
    assert found["kernels"] == "torch"
    assert found["bandwidth_share"] is found["engine_ms_per_step"] is None


def test_throughput(bench: Bench) -> None:
    found = bench("throughput", *SIZES, "--num-prompts", "5", "--max-num-seqs", "2")
    assert found["num_prompts"] == 5
    assert found["output_tokens_s"] == pytest.approx(15 / found["elapsed_s"])
    assert found["total_tokens_s"] == pytest.approx(115 / found["elapsed_s"])
    assert found["requests_s"] == pytest.approx(5 / found["elapsed_s"])


def test_startup(bench: Bench) -> None:
    found = bench("startup", "--num-iters", "1", "--max-model-len", "64")
    for name in ("torch_import_ms", "ready_after_torch_ms", "first_token_after_ready_ms"):
        assert 0 < found[name]["min"] == found[name]["max"]


def test_startup_of_what_cannot_start_ends_with_its_reason(octavo: Callable[..., Any], tmp_path: Path) -> None:
    code, out, err = octavo("bench", "startup", "--model", tmp_path / "nothing", "--num-iters", "1")
    assert (code, out) == (1, "")
    assert f"octavo: error: the engine did not start: MODEL '{tmp_path / 'nothing'}' is not there" in err


def test_startup_of_what_ends_without_a_word_tells_how(
    octavo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "_PROGRAM", "import os; os.kill(os.getpid(), 9)")
    code, _, err = octavo("bench", "startup", "--num-iters", "1")
    assert code == 1
    assert err.splitlines()[-1] == "octavo: error: the engine did not start: its process ended with -9"


def test_roofline(bench: Bench, short_measurements: None) -> None:
    narrow, wide = bench("roofline"), bench("roofline", "--dtype", "float32")
    assert (narrow["dtype"], wide["dtype"]) == ("bfloat16", "float32")
    # Exponents of bfloat16 may be coded: three quarters of the bytes.
    assert 1.5 * narrow["buffer_bytes"] <= wide["buffer_bytes"] + 4096  # whole pages
    assert wide["buffer_bytes"] <= 3 * narrow["buffer_bytes"] + 3 * 4096
    assert narrow["bandwidth_gb_s"] > 0
    assert narrow["bf16_gflop_s"] > 0
    assert narrow["f32_gflop_s"] > 0
    assert narrow["kernels"].startswith("native-")


def test_roofline_without_native_kernels_is_refused(
    octavo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CPU_ISA", "torch")
    code, out, err = octavo("bench", "roofline")
    assert (code, out) == (1, "")
    assert "measures with the native kernels" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench"], "arguments are required: BENCHMARK"),
        (["bench", "speed"], "invalid choice: 'speed'"),
        (["bench", "latency", "--batch-size", "0"], "--batch-size: must be a whole number of at least 1, got '0'"),
        (["bench", "latency", "--output-len", "x"], "--output-len: must be a whole number of at least 1, got 'x'"),
        (["bench", "latency", "--num-prompts", "3"], "unrecognized arguments: --num-prompts 3"),
        (["bench", "roofline", "--max-model-len", "64"], "unrecognized arguments: --max-model-len 64"),
        (["bench", "roofline", "--dtype", "int4"], "invalid choice: 'int4'"),
        (["collect-env", "--json"], "unrecognized arguments: --json"),
    ],
)
def test_wrong_flags_are_usage_errors(octavo: Callable[..., Any], words: list[str], message: str) -> None:
    code, out, err = octavo(*words)
    assert (code, out) == (2, "")
    assert message in err


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    octavo: Callable[..., Any], tmp_path: Path
) -> None:
    code, out, err = octavo("bench", "throughput", "--model", "no/model", "--output-json", tmp_path / "no" / "file")
    assert (code, out) == (1, "")
    assert err == f"octavo: error: --output-json: there is no folder {tmp_path / 'no'}\n"


def test_a_result_that_cannot_be_written_is_shown_all_the_same(
    octavo: Callable[..., Any], model: Path, tmp_path: Path, short_measurements: None
) -> None:
    code, out, err = octavo("bench", "roofline", "--model", model, "--output-json", tmp_path)
    assert code == 1
    assert json.loads(out)["benchmark"] == "roofline"
    assert "octavo: error: --output-json: " in err


def test_collect_env_is_a_page_of_lines(octavo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CPU_ISA", "generic")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OCTAVO_SECRET", "hidden")
    code, out, _ = octavo("collect-env")
    assert code == 0
    found = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert found["octavo"] == package.__version__
    assert found["torch"].startswith(f"{torch.__version__}, CUDA ")
    assert f"transformers {transformers.__version__}" in found["packages"]
    assert found["platform"].startswith("cpu (")
    assert found["kernels"].startswith("native-generic (this machine can run ")
    assert found["threads"].startswith("1 of ")
    assert " GiB available of " in found["memory"]
    assert found["environment"].split()[-2:] == ["OCTAVO_CPU_ISA=generic", "OMP_NUM_THREADS=1"]
    assert "hidden" not in out


def test_collect_env_tells_of_kernels_that_cannot_be_chosen(
    octavo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CPU_ISA", "sse9")
    code, out, _ = octavo("collect-env")
    assert code == 0
    assert "none: OCTAVO_CPU_ISA='sse9': this machine can run" in out
