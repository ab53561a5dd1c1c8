"""A vLLM flag that octavo does not have is refused by name, or changes nothing and is said to; it is never ignored."""

import argparse
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.config import AbsentFlag, EngineArgs, ServerConfig, absent_flags
from octavo.engine import build_config
from octavo.errors import ConfigError

ALL = sorted(absent_flags().values(), key=lambda flag: flag.keyword)


def lines_that_ask_for_something(absent: AbsentFlag) -> list[list[str]]:
    if not absent.is_switch:
        return [[absent.flag, "something"]]
    return [[absent.written(on)] for on in (True, False) if on not in absent.neutral]


def test_a_flag_that_octavo_does_not_have_is_refused_by_name_with_a_reason(
    octavo: Callable[..., Any], served: list[Any]
) -> None:
    for absent in ALL:
        for words in lines_that_ask_for_something(absent):
            done = octavo("serve", "MODEL", *words)
            assert (done.code, done.out, served) == (2, "", []), words
            error, _ = done.err.splitlines()
            assert error.startswith(f"octavo serve: error: {absent.flag}: {absent.why}")


def test_what_asks_for_nothing_is_taken_on_the_command_line_and_as_a_keyword(
    octavo: Callable[..., Any], served: list[Any]
) -> None:
    for absent in ALL:
        for value in absent.neutral:
            text = value if isinstance(value, str) else json.dumps(value)
            words = [absent.written(value)] if absent.is_switch else [absent.flag, text]
            assert octavo("serve", "MODEL", *words).code == 0, words
            (engine_args, _) = served.pop()
            assert engine_args.stated["model"] == {"model": "MODEL"}
            assert engine_args.without_effect == {absent.written(value): absent.why}
            assert EngineArgs(**{absent.keyword: value}).without_effect == {absent.written(value): absent.why}
        assert EngineArgs(**{absent.keyword: None}).without_effect == {}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--trust-remote-code"], "--trust-remote-code: octavo runs no code from a checkpoint"),
        (["--trust_remote_code"], "--trust-remote-code: octavo runs no code from a checkpoint"),
        (["-tp", "2"], "--tensor-parallel-size: octavo runs on one device so far; .* (1 is taken)"),
        (["-tp=2"], "--tensor-parallel-size: "),
        (["--tensor-parallel-size", "one"], "--tensor-parallel-size: "),
        (["-O3"], "--optimization-level: nothing is compiled"),
        (["--compilation-config.mode", "3"], "--compilation-config: nothing is compiled"),
        (
            ["--speculative-config", '{"method": "ngram"}'],
            "--speculative-config: octavo has no speculative decoding yet",
        ),
        (["--lora-modules"], "--lora-modules: octavo has no LoRA adapters yet"),  # without its value
        (["--calculate-kv-scales"], "--calculate-kv-scales: --kv-cache-dtype holds for all layers"),
        (["--kv-cache-dtype", "fp8_e5m2"], "--kv-cache-dtype: fp8_e5m2: say fp8"),
        (["--no-enable-chunked-prefill"], "--enable-chunked-prefill: prefill is always chunked"),
        (["--device", "cuda"], "--device: octavo runs on CPUs so far (cpu or auto is taken)"),
    ],
)
def test_the_ways_that_people_write_them(
    octavo: Callable[..., Any], served: list[Any], words: list[str], says: str
) -> None:
    for line in (["serve", "MODEL", *words], ["serve", *words, "MODEL"]):
        done = octavo(*line)
        assert (done.code, served) == (2, [])
        for part in says.split(".*"):
            assert part in done.err


@pytest.mark.parametrize(
    "words", [["-tp", "1"], ["-tp=1"], ["--no-trust-remote-code"], ["--no-cudagraph-metrics"], ["--swap-space", "0"]]
)
def test_model_is_not_taken_for_a_value_of_theirs(
    octavo: Callable[..., Any], served: list[Any], words: list[str]
) -> None:
    assert octavo("serve", *words, "MODEL").code == 0
    assert served[0][0].stated["model"] == {"model": "MODEL"}


def test_the_same_names_are_keywords() -> None:
    with pytest.raises(ConfigError, match="--trust-remote-code: octavo runs no code from a checkpoint"):
        EngineArgs(trust_remote_code=True)
    with pytest.raises(ConfigError, match="--tensor-parallel-size: octavo runs on one device so far"):
        EngineArgs(tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="--enable-expert-parallel"):
        EngineArgs(enable_expert_parallel=1)
    taken = EngineArgs(trust_remote_code=False, tensor_parallel_size=1, cudagraph_metrics=False, quantization=None)
    assert list(taken.without_effect) == [
        "--no-trust-remote-code",
        "--tensor-parallel-size 1",
        "--no-cudagraph-metrics",
    ]


def test_what_changes_nothing_is_said(
    tiny_llama_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="octavo"):
        build_config(EngineArgs(model=str(tiny_llama_dir), cudagraph_metrics=False))
    assert "--no-cudagraph-metrics changes nothing: nothing is compiled" in caplog.text


def test_the_table_is_vllms_and_names_nothing_twice() -> None:
    flags = absent_flags()
    assert len(flags) > 250  # vLLM has about 350; those that octavo has too are not in it
    parser = argparse.ArgumentParser()
    EngineArgs.add_cli_args(parser)  # which refuses a flag that is there twice
    ServerConfig.add_cli_args(parser)
    short = [flag.short for flag in ALL if flag.short]
    assert len(short) == len(set(short))
    assert {"trust_remote_code", "lora_modules", "speculative_config", "kv_transfer_config", "headless"} <= set(flags)
