"""``benchmarks.compare``: what becomes of results. How fast anything is is nobody's promise here."""

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks import compare
from benchmarks.peers import work
from benchmarks.peers.octavo_cpu import engine_options, packed_bytes
from benchmarks.table import BEGIN, END, Case, Result, markers, read_results, render, replace_between_markers


def result(engine: str, total_s: list[float], **changes: object) -> Result:
    case = Case(16, 128, 64, "2026-01-02 03:04", prefill_s=[1.0] * len(total_s), total_s=total_s)
    fields: dict[str, object] = {
        "model": "a-model",
        "engine": engine,
        "version": "1.2",
        "settings": "bf16",
        "ready_s": 2.0,
        "machine": "a machine",
        "busy_share": 0.01,
        "bandwidth_gb_s": [10.0, 12.0],
        "limits": {
            "kernels": "native-x",
            "threads": 2,
            "buffer_bytes": 120_000_000,
            "bf16_gflop_s": 99.0,
            "f32_gflop_s": 88.0,
            "int8_gop_s": 77.0,
        },
        "cases": {case.name: case},
    }
    return Result(**fields | changes)  # type: ignore[arg-type]


def test_a_rate_is_what_decoding_added_to_the_prompts_time_and_the_ratio_is_of_medians() -> None:
    # 16 streams · 63 tokens in 2 s against 4 s (medians), prompts of 2048 tokens in 1 s.
    table = render([result("octavo", [3.0, 9.0, 2.0]), result("vllm", [5.0, 4.5, 99.0])])
    assert "| decode, 16 streams, 128 + 64 tokens | 504 | 252 | **2.00** |" in table
    assert "| prefill, 16 × 128 tokens | 2,048 | 2,048 | **1.00** |" in table


def test_a_peer_that_was_not_measured_is_named() -> None:
    table = render([result("octavo", [3.0])])
    assert "| vLLM | absent: not measured |" in table
    assert "| OpenVINO GenAI | absent" in table
    assert "octavo ÷" not in table


def test_a_busy_machine_is_told_of() -> None:
    assert "(others used 40% of the machine)" in render([result("octavo", [3.0], busy_share=0.4)])


def test_one_stream_is_compared_with_the_bandwidth() -> None:
    case = Case(1, 32, 128, "2026-01-02 03:04", prefill_s=[1.0], total_s=[1.0 + 127 / 50])
    table = render([result("octavo", [], cases={case.name: case})])
    assert "12.0 GB/s for 120 MB of bf16 weights are 100.0 steps a second" in table
    assert "reaches **0.50** of that" in table


def test_weights_in_memory_are_compared_with_the_file() -> None:
    table = render([result("octavo", [3.0], settings="GGUF", packed_bytes=105, file_bytes=100)])
    assert "for 120 MB of GGUF weights" in table
    assert "In memory its weights take **1.05** of the checkpoint's bytes." in table
    assert "checkpoint's bytes" not in render([result("octavo", [3.0])])


def test_results_of_two_machines_are_no_table() -> None:
    with pytest.raises(ValueError, match="results of 2 machines"):
        render([result("octavo", [3.0]), result("vllm", [3.0], machine="another")])


def test_results_are_kept_as_files(tmp_path: Path) -> None:
    kept = [result("octavo", [3.0]), result("vllm", [5.0])]
    for each in kept:
        each.write(tmp_path / "results")
    assert read_results(tmp_path / "results") == kept


def test_only_what_is_between_the_markers_changes() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    changed = replace_between_markers(page, "new\n")
    assert changed == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert replace_between_markers(changed, "new") == changed


@pytest.mark.parametrize("page", ["", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}\n{BEGIN}\n{END}"])
def test_a_page_without_its_markers_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="expected one line"):
        replace_between_markers(page, "new")


def test_sections_of_a_page_have_markers_of_their_own() -> None:
    page = f"{BEGIN}\nfirst\n{END}\n" + "\n".join(markers("gguf")) + "\n"
    changed = replace_between_markers(page, "second", *markers("gguf"))
    assert changed.startswith(f"{BEGIN}\nfirst\n{END}\n")
    assert changed.index("second") > changed.index(END)
    assert replace_between_markers(changed, "new", *markers("")).count("second") == 1


@pytest.mark.parametrize("text", ["16x128", "0x1x2", "65x1x2", "1x1x1", "1x4000x97", "axbxc"])
def test_a_case_that_cannot_be_measured_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        work.read_case(text)


def test_an_engine_is_measured_again_case_by_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a stand-in for vLLM that does nothing, quickly; another that fails leaves what was measured as it was."""
    monkeypatch.setattr(compare, "_limits", lambda model: result("vllm", []).limits | {"bandwidth_gb_s": 10.0})
    monkeypatch.setattr(compare, "busy_share", lambda: 0.0)
    monkeypatch.setitem(compare._PROGRAMS, "vllm", "tests.benchmarks.stand_in")
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")

    def run(cases: str) -> int:
        words = f"x --model {tmp_path} --name m --vllm {sys.executable} --engines vllm --cases {cases} --repeats 2"
        monkeypatch.setattr(sys, "argv", [*words.split(), "--results", str(tmp_path / "r"), "--page", str(page)])
        return compare.main()

    assert run("1x32x128") == run("4x8x2") == 0
    (found,) = read_results(tmp_path / "r")
    assert set(found.cases) == {"1x32x128", "4x8x2"}
    assert [len(case.total_s) for case in found.cases.values()] == [2, 2]
    assert "decode, 4 streams, 8 + 2 tokens" in page.read_text()
    assert run("2x7x2") == 1
    assert "vLLM: ended with 1; see " in capsys.readouterr().err
    assert read_results(tmp_path / "r") == [found]


def test_engines_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Round by round; the first warms up. What fails with one of them does not keep the other from being measured."""
    turns: list[str] = []

    class Turns(compare.Peer):
        def __init__(self, command: list[str], log: Path) -> None:
            self._who = log.stem
            super().__init__(command, log)

        def round(self, case: str) -> dict[str, float]:
            turns.append(self._who)
            if self._who == "file-openvino" and turns.count(self._who) == 2:
                case = "1x7x2"
            return super().round(case)

    monkeypatch.setattr(compare, "Peer", Turns)
    monkeypatch.setattr(compare, "_PAUSE", 0.0)
    monkeypatch.setattr(compare, "_limits", lambda model: result("vllm", []).limits | {"bandwidth_gb_s": 10.0})
    monkeypatch.setattr(compare, "busy_share", lambda: 0.0)
    for engine in ("llama-cpp", "openvino"):
        monkeypatch.setitem(compare._PROGRAMS, engine, "tests.benchmarks.stand_in")
    file = tmp_path / "file.gguf"
    file.touch()
    words = f"x --gguf {file} --llama-cpp {sys.executable} --openvino {sys.executable} --engines llama-cpp,openvino"
    monkeypatch.setattr(sys, "argv", [*words.split(), *f"--cases 1x8x2 --repeats 2 --results {tmp_path}".split()])
    assert compare.main() == 1
    assert turns == ["file-llama-cpp", "file-openvino"] * 2 + ["file-llama-cpp"]
    assert "OpenVINO GenAI: ended with 1; see " in capsys.readouterr().err
    (found,) = read_results(tmp_path)
    assert (found.engine, len(found.cases["1x8x2"].total_s)) == ("llama-cpp", 2)


def test_octavo_reads_the_gguf_file_where_there_is_no_folder(tmp_path: Path) -> None:
    parse = compare._parser().parse_args
    file, folder = ["--gguf", str(tmp_path / "a.gguf")], ["--model", str(tmp_path)]

    def model_of(words: list[str]) -> str:
        command = compare._command(parse(words), "octavo")
        return command[command.index("--model") + 1]

    assert model_of(file) == str(tmp_path / "a.gguf")
    assert model_of([*file, *folder]) == str(tmp_path)
    assert compare._command(parse([*file, "--with", "--quantization x"]), "octavo")[-1] == "--flags=--quantization x"
    with pytest.raises(compare.PeerError, match="--model names, and that was not given"):
        compare._command(parse([*file, "--vllm", "python"]), "vllm")


def test_octavo_tells_what_its_weights_take() -> None:
    """A matrix that kernels have packed, one that they have not, and one whose parts are of different formats."""
    model = nn.Module()
    for name, packed in {
        "a": SimpleNamespace(data=torch.zeros(10, dtype=torch.uint8)),
        "b": SimpleNamespace(parts=[SimpleNamespace(data=torch.zeros(size, dtype=torch.uint8)) for size in (3, 4)]),
    }.items():
        parameter = nn.Parameter(torch.empty(0))
        parameter.packed = packed  # type: ignore[attr-defined]
        model.register_parameter(name, parameter)
    model.register_parameter("c", nn.Parameter(torch.zeros(5)))
    assert packed_bytes(model) == 10 + 7 + 20


def test_octavos_flags_are_those_of_its_commands() -> None:
    assert engine_options("") == {"dtype": "bfloat16"}
    assert engine_options("--dtype float32 --block-size 32") == {"dtype": "float32", "block_size": 32}
    with pytest.raises(SystemExit):
        engine_options("--no-such-flag")
