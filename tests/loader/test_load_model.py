"""A checkpoint is loaded whole and exactly, or refused in one line that names the file and the tensor."""

import dataclasses
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from octavo.checkpoints import read_model_facts
from octavo.config import EngineArgs, OctavoConfig, resolve_config
from octavo.errors import CheckpointError, ModelError, UnsupportedError
from octavo.loader import load_model
from octavo.platforms import current_platform

MakeTinyLlama = Callable[..., Path]
Tensors = dict[str, Tensor]
GATE = "model.layers.1.mlp.gate_proj.weight"


def config_of(path: Path, dtype: str = "float32") -> OctavoConfig:
    args = EngineArgs(model=str(path), dtype=dtype)
    return resolve_config(args, read_model_facts(path), current_platform().facts())


def load(path: Path, dtype: str = "float32") -> nn.Module:
    return load_model(config_of(path, dtype))


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native kernels pack the weights, and then they cannot be looked at."""
    monkeypatch.setenv("OCTAVO_CPU_ISA", "torch")


@pytest.fixture
def edited(make_tiny_llama: MakeTinyLlama) -> Callable[..., Path]:
    """``edited(change, **config)``: a folder whose tensors ``change`` has altered in place."""

    def make(change: Callable[[Tensors], Any], **config: Any) -> Path:
        path = make_tiny_llama(**config)
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")
        return path

    return make


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert caught.value.tensor is not None
    return message


def test_every_weight_arrives_at_its_place(tiny_llama_dir: Path) -> None:
    stored = load_file(tiny_llama_dir / "model.safetensors")
    loaded = dict(load(tiny_llama_dir).named_parameters())
    layer = "model.layers.1."
    merged = {
        layer + "self_attn.qkv_proj.weight": [f"{layer}self_attn.{part}_proj.weight" for part in "qkv"],
        layer + "mlp.gate_up_proj.weight": [GATE, GATE.replace("gate", "up")],
    }
    for name, parts in merged.items():
        assert torch.equal(loaded[name], torch.cat([stored[part] for part in parts]))
    single = [name for name in stored if name in loaded]
    assert len(single) == 3 + 2 * 4
    for name in single:
        assert torch.equal(loaded[name], stored[name]), name


@pytest.fixture
def merged(edited: Callable[..., Path]) -> Callable[..., Path]:
    """A folder whose layer 1 has its QKV and gate-up weights whole, as Phi-3 has them; ``change`` as in ``edited``."""

    def make(change: Callable[[Tensors], Any] = lambda tensors: None) -> Path:
        def merge(tensors: Tensors) -> None:
            layer = "model.layers.1."
            for whole, parts in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
                names = [f"{layer}{whole.split('.')[0]}.{part}_proj.weight" for part in parts]
                tensors[f"{layer}{whole}_proj.weight"] = torch.cat([tensors.pop(name) for name in names])
            change(tensors)

        return edited(merge)

    return make


def test_merged_weights_may_come_whole(tiny_llama_dir: Path, merged: Callable[..., Path]) -> None:
    expected, got = load(tiny_llama_dir).state_dict(), load(merged()).state_dict()
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_merged_weights_that_come_whole_are_checked(merged: Callable[..., Path]) -> None:
    whole = "model.layers.1.mlp.gate_up_proj.weight"
    assert "has shape [319, 64], expected [320, 64]" in refusal(
        merged(lambda tensors: tensors.update({whole: torch.ones(319, 64)}))
    )
    assert "is there twice" in refusal(merged(lambda tensors: tensors.update({GATE: torch.ones(160, 64)})))
    message = refusal(merged(lambda tensors: tensors.pop(whole)))
    assert repr(GATE) in message
    assert "missing" in message


def test_the_model_is_ready_for_inference(tiny_llama_dir: Path) -> None:
    model = load(tiny_llama_dir)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_converted_to_the_models_type(tiny_llama_dir: Path, dtype: str) -> None:
    stored = load_file(tiny_llama_dir / "model.safetensors")
    loaded = dict(load(tiny_llama_dir, dtype).named_parameters())
    assert {parameter.dtype for parameter in loaded.values()} == {getattr(torch, dtype)}
    assert torch.equal(loaded["lm_head.weight"], stored["lm_head.weight"].to(getattr(torch, dtype)))


def test_sharded_files_give_the_same_model(tiny_llama_dir: Path, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    LlamaForCausalLM.from_pretrained(tiny_llama_dir).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    whole, sharded = load(tiny_llama_dir).state_dict(), load(tmp_path).state_dict()
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


def test_progress_grows_from_nothing_to_all(tiny_llama_dir: Path) -> None:
    seen: list[tuple[str, float]] = []
    load_model(config_of(tiny_llama_dir), lambda stage, share: seen.append((stage, share)))
    shares = [share for _, share in seen]
    assert {stage for stage, _ in seen} == {"loading weights"}
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert len(shares) > 10


@pytest.mark.parametrize(
    "name", [GATE, "model.norm.weight", "lm_head.weight", "model.layers.0.self_attn.k_proj.weight"]
)
def test_a_missing_tensor_is_named(edited: Callable[..., Path], name: str) -> None:
    message = refusal(edited(lambda tensors: tensors.pop(name)))
    assert repr(name) in message
    assert "missing" in message


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.gate_proj.weight", "model.layers.0.self_attn.q_proj.bias", "extra"]
)
def test_an_unknown_tensor_is_named(edited: Callable[..., Path], name: str) -> None:
    message = refusal(edited(lambda tensors: tensors.update({name: torch.ones(3)})))
    assert repr(name) in message
    assert "LlamaForCausalLM" in message


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        (GATE, (160, 63), "[160, 64]"),
        (GATE, (161, 64), "[160, 64]"),
        (GATE, (64, 160), "[160, 64]"),
        ("model.layers.0.self_attn.v_proj.weight", (64, 64), "[32, 64]"),
        ("model.norm.weight", (64, 1), "[64]"),
        ("model.embed_tokens.weight", (10, 64), ", 64]"),
    ],
)
def test_a_wrong_shape_is_named_with_the_right_one(
    edited: Callable[..., Path], name: str, shape: tuple[int, ...], expected: str
) -> None:
    message = refusal(edited(lambda tensors: tensors.update({name: torch.ones(shape)})))
    assert repr(name) in message
    assert f"has shape {list(shape)}, expected [" in message
    assert message.endswith(expected)


def test_a_config_wider_than_the_tensors_is_refused_before_memory_is_taken(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tiny_llama_dir)
    huge = config.model.hf_config | {"intermediate_size": 1 << 50}
    monkeypatch.setattr(type(current_platform()), "available_memory_bytes", lambda platform: 1 << 62)
    with pytest.raises(
        CheckpointError, match=r"mlp\.(gate|up|down)_proj\.weight': has shape \[.*expected \[.*1125899906842624"
    ):
        load_model(dataclasses.replace(config, model=dataclasses.replace(config.model, hf_config=huge)))


def test_tables_that_follow_from_the_config_may_be_there(edited: Callable[..., Path]) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load(edited(lambda tensors: tensors.update({name: torch.ones(8)})))


def test_the_copy_of_a_tied_head_is_left_and_the_log_says_so(
    edited: Callable[..., Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    path = edited(
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
        tie_word_embeddings=True,
    )
    with caplog.at_level(logging.INFO, logger="octavo"):
        load(path)
    assert "lm_head.weight is not used" in caplog.text


def test_a_model_that_does_not_fit_is_refused_with_the_numbers(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tiny_llama_dir)
    monkeypatch.setattr(type(current_platform()), "available_memory_bytes", lambda platform: 1000)
    with pytest.raises(ModelError, match=r"the weights need .* GiB as float32, and .* GiB of memory are available"):
        load_model(config)


def test_an_unknown_architecture_is_refused_by_name(tiny_llama_dir: Path) -> None:
    config = config_of(tiny_llama_dir)
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, architecture="AbacusForCausalLM"))
    with pytest.raises(UnsupportedError, match=r"'AbacusForCausalLM' is not supported; supported: .*LlamaForCausalLM"):
        load_model(other)


def test_another_activation_is_refused_by_name(tiny_llama_dir: Path) -> None:
    config = config_of(tiny_llama_dir)
    fields = config.model.hf_config | {"hidden_act": "relu6"}
    with pytest.raises(UnsupportedError, match=r"hidden_act 'relu6' is not supported; supported: silu"):
        load_model(dataclasses.replace(config, model=dataclasses.replace(config.model, hf_config=fields)))


def test_the_kernels_are_chosen_and_said(
    tiny_llama_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    monkeypatch.setattr(type(current_platform()), "kernel_provider", "abacus")
    config = config_of(tiny_llama_dir)
    with pytest.raises(UnsupportedError, match="kernel provider 'abacus'"):
        load_model(config)
    monkeypatch.undo()
    monkeypatch.setenv("OCTAVO_CPU_ISA", "torch")
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="octavo"):
        load_model(config)
    assert re.search(r"kernels: torch: .*\bembedding, .*linear, ", caplog.text)
