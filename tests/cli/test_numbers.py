"""Every number of the command line has bounds, and one beyond them ends the start at once, with the flag's name."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.config.flags import flags_of
from octavo.config.options import option

COMMANDS = {"serve": [], "run-batch": ["-i", "in", "-o", "out"], "bench latency": [], "bench startup": []}
# What stands for a number in --help; those of run-batch and bench are the engine's, and counts.
NUMBER = re.compile(r"(?:^|[ ,])(--[a-z0-9-]+) (?:N|X|SECONDS)$")
BEYOND = [str(-(10**30)), str(10**30), "nan", "inf", "-inf", "ten", ""]
LEAST_ARE_MORE_THAN_0 = {
    "--block-size", "--kv-cache-memory-bytes", "--gpu-memory-utilization", "--num-gpu-blocks-override",
    "--max-num-seqs", "--max-num-batched-tokens", "--max-model-len", "--max-num-queued-reqs", "--max-num-queued-tokens",
    "--max-body-bytes", "--max-connections", "--api-server-count",
}  # fmt: skip


def numeric_flags(octavo: Callable[..., Any], command: str) -> set[str]:
    text = octavo(*command.split(), "--help").out
    return {found[1] for line in text.splitlines() if (found := NUMBER.search(re.split(r"  +(?=\S)", line[2:])[0]))}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_number_out_of_its_bounds_is_a_usage_error_that_names_the_flag(
    octavo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    flags = numeric_flags(octavo, command)
    assert flags >= {"--max-num-seqs", "--block-size", "--seed", "--gpu-memory-utilization"}
    if command == "serve":
        assert flags > LEAST_ARE_MORE_THAN_0
    for flag in flags:
        words = BEYOND if command == "serve" else BEYOND[:2]
        if flag.startswith(("--num-iters", "--batch-size", "--input-len", "--output-len")):  # bench's own counts
            words = ["-1", "ten"]
        for word in words:
            done = octavo(*command.split(), *COMMANDS[command], f"{flag}={word}")
            assert (done.code, done.out) == (2, ""), (flag, word)
            assert f"argument {flag}: must be a" in done.err.replace("-asc/", ""), (flag, word)


@pytest.mark.parametrize("flag", sorted(LEAST_ARE_MORE_THAN_0))
def test_zero_is_refused_where_nothing_would_be_left(octavo: Callable[..., Any], flag: str) -> None:
    done = octavo("serve", flag, "0")
    assert done.code == 2
    assert f"{flag}: must be a" in done.err


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--max-num-seqs", "1"], "max_num_seqs"),
        (["--block-size", "7"], "block_size"),
        (["--seed=-9223372036854775808"], "seed"),
        (["--max-logprobs=-1"], "max_logprobs"),
        (["--kv-cache-memory-bytes", "4M"], "kv_cache_memory_bytes"),
    ],
)
def test_control_numbers_at_their_bounds_are_taken(
    octavo: Callable[..., Any], served: list[Any], words: list[str], flag: str
) -> None:
    assert octavo("serve", *words).code == 0
    ((engine_args, _),) = served
    assert flag in {name for group in engine_args.stated.values() for name in group}


def test_no_number_can_be_declared_without_bounds() -> None:
    from dataclasses import dataclass

    @dataclass
    class Config:
        some_number: int = option("a number", least=0)

    with pytest.raises(TypeError, match="--some-number needs least and most"):
        flags_of({"group": Config})


# ---- numbers that this model or this machine cannot have ------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--kv-cache-memory-bytes", "9000t"], "--kv-cache-memory-bytes 9000000000000000 is more than the "),
        (["--kv-cache-memory-bytes", "1"], "--kv-cache-memory-bytes 1 (0.0 MiB) hold 0 blocks"),
        (
            ["--kv-cache-memory-bytes", "64K", "--max-model-len", "512"],
            "--max-model-len 512 needs 32 KV cache blocks",
        ),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "32"], "--max-num-batched-tokens 32 is less than"),
        (["--max-model-len", "100000"], "--max-model-len 100000 is more than the 512 tokens"),
    ],
)
def test_numbers_that_do_not_fit_model_or_machine_end_with_2_before_the_weights_are_read(
    spawn: Callable[..., Any], tiny_llama_dir: Path, words: list[str], says: str
) -> None:
    _, err = (process := spawn("serve", str(tiny_llama_dir), "--port", "0", *words)).communicate(timeout=60)
    assert process.returncode == 2, err
    assert err.splitlines()[-1].startswith("octavo: error: ")
    assert says in err.splitlines()[-1]
    assert "loading weights" not in err
