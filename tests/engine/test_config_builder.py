"""Stated options to the final configuration, with a real model folder: what is read from where, and what is said."""

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.checkpoints import FetchOptions
from octavo.config import EngineArgs, OctavoConfig
from octavo.engine import build_config
from octavo.errors import CheckpointError, ConfigError, UnsupportedError


@pytest.fixture
def folder(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    """A model folder that a test may change."""
    copy = tmp_path / "model"
    shutil.copytree(tiny_llama_dir, copy)
    return copy


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="octavo"):
        yield caplog


def build(folder: Path, **stated: Any) -> OctavoConfig:
    return build_config(EngineArgs(model=str(folder), **stated))


def write_generation_config(folder: Path, **values: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(values))


def test_generation_config_of_the_model_is_applied_and_said(folder: Path, said: pytest.LogCaptureFixture) -> None:
    write_generation_config(folder, temperature=0.3, num_beams=4, eos_token_id=2)
    assert build(folder).model.default_sampling_params == {"temperature": 0.3}
    assert "generation_config.json: temperature=0.3; applied where a request states none" in said.text
    assert said.text.count("0.3") == 1
    assert "generation_config.json: not applied: num_beams=4" in said.text
    assert "eos_token_id" not in said.text


def test_generation_config_may_be_left_out_or_taken_from_another_folder(folder: Path, tmp_path: Path) -> None:
    write_generation_config(folder, temperature=0.3, eos_token_id=[2, 5])
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ConfigError, match=r"--generation-config .*other: auto, vllm or a folder with a generation_con"):
        build(folder, generation_config=str(other))
    write_generation_config(other, top_p=0.5)
    assert build(folder, generation_config=str(other)).model.default_sampling_params == {"top_p": 0.5}
    plain = build(folder, generation_config="vllm").model
    assert plain.default_sampling_params == {}
    assert set(plain.eos_token_ids) == {2, 5}  # where the model ends is no matter of sampling


def test_a_sampling_default_out_of_range_names_the_file(folder: Path, tmp_path: Path) -> None:
    write_generation_config(folder, top_p=3)
    with pytest.raises(ConfigError, match=r"^generation_config\.json: top_p must be"):
        build(folder)
    with pytest.raises(ConfigError, match=r"model/generation_config\.json: top_p must be"):
        build(folder, generation_config=str(folder))


def test_overrides_take_the_place_of_the_configs_values(folder: Path, said: pytest.LogCaptureFixture) -> None:
    before = build(folder).model
    after = build(folder, hf_overrides={"rms_norm_eps": 0.25, "my_own": 1}).model
    assert (before.hf_config["rms_norm_eps"], after.hf_config["rms_norm_eps"]) == (1e-6, 0.25)
    assert after.fingerprint != before.fingerprint  # cached prefixes of the one are none of the other's
    assert "config.json does not have 'my_own'; taken as stated" in said.text
    assert "'rms_norm_eps'" not in said.text


def test_overrides_of_a_gguf_file_go_by_hugging_faces_names() -> None:
    before = build_config(EngineArgs(model="smollm2")).model
    overrides = {"rope_theta": 5000.0, "eos_token_id": 7}
    after = build_config(EngineArgs(model="smollm2", hf_overrides=overrides)).model
    assert (before.hf_config["rope_theta"], after.hf_config["rope_theta"]) == (100000.0, 5000.0)
    assert after.eos_token_ids == (7,) != before.eos_token_ids


def test_overrides_are_checked_as_the_config_is(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="num_attention_heads must be a whole number"):
        build(folder, hf_overrides={"num_attention_heads": -1})
    with pytest.raises(UnsupportedError, match="architecture 'MyModel' is not supported"):
        build(folder, hf_overrides={"architectures": ["MyModel"]})
    with pytest.raises(ConfigError, match="--hf-overrides must be plain JSON"):
        build(folder, hf_overrides={"x": object()})
    with pytest.raises(ConfigError, match=r"--hf-overrides must be plain JSON: .*beyond 64 bits"):
        build(folder, hf_overrides={"x": 2**70})
    for value in (float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="a number that JSON does not have"):
            build(folder, hf_overrides={"rope_scaling": {"factor": value}})


def test_a_tokenizer_of_its_own(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "tokenizer"
    other.mkdir()
    shutil.copy(folder / "tokenizer.json", other)
    assert build(folder).model.tokenizer_path == str(folder)
    assert build(folder, tokenizer=str(other)).model.tokenizer_path == str(other)
    with pytest.raises(ConfigError, match="--tokenizer-revision v1: there is no --tokenizer"):
        build(folder, tokenizer_revision="v1")


def test_a_revision_of_a_local_folder_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--revision main: MODEL .* is a local path"):
        build(folder, revision="main")


def test_form_and_size_of_the_weights_are_said(folder: Path, said: pytest.LogCaptureFixture) -> None:
    build(folder)
    assert f"model: LlamaForCausalLM, safetensors of 1 MB, from {folder}" in said.text


def test_revision_and_folder_reach_what_fetches(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []

    def resolve(name: str, progress: Any, options: Any) -> Path:
        asked.append((name, options))
        return tiny_llama_dir

    monkeypatch.setattr("octavo.engine.config_builder.resolve_model", resolve)
    monkeypatch.setattr("octavo.engine.config_builder.resolve_tokenizer", resolve)
    stated = {"revision": "v1", "tokenizer_revision": "v2", "download_dir": "/models"}
    build_config(EngineArgs(model="owner/model", tokenizer="owner/other", **stated))
    assert asked == [("owner/model", FetchOptions("v1", "/models")), ("owner/other", FetchOptions("v2", "/models"))]


def test_overrides_reach_the_loader_and_the_model(folder: Path) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    expected = LLM(str(folder)).generate("the dog", greedy, use_tqdm=False)[0].outputs[0].token_ids
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Mine"], "model_type": "mine"}))
    with pytest.raises(UnsupportedError, match="architecture 'Mine' is not supported"):
        LLM(str(folder))
    overridden = LLM(str(folder), hf_overrides={"architectures": ["LlamaForCausalLM"]})
    assert overridden.generate("the dog", greedy, use_tqdm=False)[0].outputs[0].token_ids == expected
    other = LLM(str(folder), hf_overrides={"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 0.9})
    assert other.generate("the dog", greedy, use_tqdm=False)[0].outputs[0].token_ids != expected


def test_steps_are_larger_where_nobody_waits_for_single_tokens(folder: Path) -> None:
    args = EngineArgs(model=str(folder))
    served, offline = build_config(args).scheduler, build_config(args, offline=True).scheduler
    assert (served.max_num_batched_tokens, offline.max_num_batched_tokens) == (512, 2048)
    stated = EngineArgs(model=str(folder), max_num_batched_tokens=300)
    assert build_config(stated, offline=True).scheduler.max_num_batched_tokens == 300
