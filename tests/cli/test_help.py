"""``--help=WORD``: one flag, one group, or all that speak of it; also of what octavo does not have."""

from collections.abc import Callable
from typing import Any

import pytest

Octavo = Callable[..., Any]


def flags_of(text: str) -> list[str]:
    """The flags that have a line of their own."""
    return [line.split()[0] for line in text.splitlines() if line.startswith("  -")]


def test_a_word_finds_the_flags_whose_names_or_texts_have_it(octavo: Octavo) -> None:
    done = octavo("serve", "--help=KV")
    assert done.code == 0
    shown, _, absent = done.out.partition("\nnot in octavo:\n")
    assert {"--kv-cache-memory-bytes", "--block-size", "--enable-prefix-caching,"} <= set(flags_of(shown))
    assert "--max-num-seqs" not in shown
    assert "cache options:" in shown
    assert "--kv-transfer-config" in absent
    assert "the KV cache stays in this process's memory" in " ".join(absent.split())
    assert octavo("serve", "--help", "kv").out == done.out


@pytest.mark.parametrize("word", ["max-num-seqs", "max_num_seqs", "--max-num-seqs"])
def test_a_flags_name_shows_that_flag_alone(octavo: Octavo, word: str) -> None:
    assert flags_of(octavo("serve", f"--help={word}").out) == ["--max-num-seqs"]


@pytest.mark.parametrize("word", ["cache", "CacheConfig"])
def test_a_groups_name_shows_the_group(octavo: Octavo, word: str) -> None:
    out = octavo("serve", f"--help={word}").out
    assert out.startswith("cache options:\n")
    assert flags_of(out)[0] == "--block-size"
    assert "--dtype" not in out


def test_the_groups_have_names(octavo: Octavo) -> None:
    lines = octavo("serve", "--help=listgroup").out.splitlines()
    names = [line.partition(":")[0] for line in lines]
    assert {
        "http",
        "limits",
        "answer",
        "logs",
        "model",
        "load",
        "cache",
        "scheduler",
        "parallel",
        "observability",
    } <= set(names)
    for name in names:
        assert octavo("serve", f"--help={name}").code == 0


def test_a_flag_that_octavo_does_not_have_is_found_with_its_reason(octavo: Octavo) -> None:
    out = " ".join(octavo("serve", "--help=trust-remote-code").out.split())
    assert out.startswith("not in octavo: --trust-remote-code")
    assert "octavo runs no code from a checkpoint" in out


def test_a_word_that_nothing_speaks_of_is_a_usage_error(octavo: Octavo) -> None:
    done = octavo("serve", "--help=xyzzy")
    assert (done.code, done.out) == (2, "")
    assert "nothing in the help speaks of 'xyzzy'" in done.err


def test_a_client_command_has_no_flags_of_the_engine(octavo: Octavo) -> None:
    assert flags_of(octavo("chat", "--help=url").out) == ["--url"]
    assert octavo("chat", "--help=kv-transfer").code == 2


def test_every_flag_has_a_text_and_the_whole_help_has_every_flag(octavo: Octavo) -> None:
    out = octavo("serve", "--help").out
    assert out.startswith("usage: octavo serve [MODEL] [flags]\n")
    for flag in ("--quantization", "--load-format", "--revision", "--download-dir", "--hf-overrides", "--tokenizer"):
        assert flag in out
    for flag in ("--generation-config", "--override-generation-config", "--max-logprobs", "--config", "-q "):
        assert flag in out
    assert "--trust-remote-code" not in out
    assert octavo("serve", "--help=all").out == out
