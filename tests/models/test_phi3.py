"""Phi-3 and Phi-4 against transformers in float32: merged weights, windows, partial rotation, longrope."""

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.checkpoints import read_model_facts
from octavo.errors import CheckpointError
from tests.models.folders import changed_config
from tests.models.gguf_files import write_gguf
from tests.models.through_engine import VOCAB_SIZE, assert_engine_continues_as_transformers

BASE = {"family": "Phi3", "hidden_size": 96, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}  # heads of 16


def longrope(rotary_dim: int, original: int, **more: Any) -> dict[str, Any]:
    """The long and the short factors have nothing in common, so that the wrong ones would be seen."""
    half = rotary_dim // 2
    scaling = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * index for index in range(half)],
        "long_factor": [2.0 + 3.0 * index for index in range(half)],
        "original_max_position_embeddings": original,
        **more,
    }
    return {"rope_parameters": scaling, "original_max_position_embeddings": original}


def rotated(share: float, theta: float = 10000.0) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share}}


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True, "rms_norm_eps": 1e-2},
    "sliding window": {"sliding_window": 23},
    "three quarters rotated": rotated(0.75, 1234.5),
    "long factors": longrope(16, 64),
    "long factors, three quarters rotated": longrope(12, 64, partial_rotary_factor=0.75),
    "short factors": longrope(16, 1024),
}
NUM_TOKENS = 100


def to_gguf(folder: Path, kinds: tuple[str, ...] = ("long", "short")) -> Path:
    """kinds: lists of factors that are written, where the source has them."""
    config = json.loads((folder / "config.json").read_text())
    rope, original = config["rope_parameters"], config["original_max_position_embeddings"]

    def extra(writer: gguf.GGUFWriter, config: Any) -> None:
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_dimension_count(int(16 * rope["partial_rotary_factor"]))
        writer.add_sliding_window(config.sliding_window or 0)
        if rope["rope_type"] == "longrope":
            stretched = config.max_position_embeddings / original
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretched) / math.log(original)))

    factors = {f"rope_factors_{kind}.weight": rope.get(f"{kind}_factor") for kind in kinds}
    arrays = {name: np.array(values, np.float32) for name, values in factors.items() if values}
    return write_gguf(folder, "phi3", extra=extra, more_tensors=arrays)


def assert_same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(make_model: Any, check_family: Any, variant: str) -> None:
    check_family(make_model(**BASE, **VARIANTS[variant]))


@pytest.mark.parametrize(
    "fields",
    [
        rotated(0.5),
        rotated(0.75, 10100.0),
        longrope(12, 64, partial_rotary_factor=0.75),
        {"sliding_window": 24},
        {"sliding_window": None},
    ],
)
def test_control_a_slightly_wrong_config_fails(
    make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any, fields: dict[str, Any]
) -> None:
    path = make_model(**BASE, **rotated(0.75), sliding_window=23)
    tokens = random_tokens(NUM_TOKENS)
    expected = expected_logits(path, tokens)
    got = paged_model(changed_config(path, **fields)).chunked(tokens, NUM_TOKENS)
    with pytest.raises(AssertionError):
        assert_same(got, expected)


@pytest.mark.parametrize("fields", [{"long_factor": None}, {"attention_factor": 1.5}, {"original": 32}])
def test_control_other_long_factors_fail(
    make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any, fields: dict[str, Any]
) -> None:
    path = make_model(**BASE, **longrope(16, 64))
    tokens = random_tokens(NUM_TOKENS)
    expected = expected_logits(path, tokens)
    other = longrope(16, fields.pop("original", 64), **fields)
    scaling = other["rope_parameters"]
    scaling["long_factor"] = scaling["long_factor"] or scaling["short_factor"]
    got = paged_model(changed_config(path, **other)).chunked(tokens, NUM_TOKENS)
    with pytest.raises(AssertionError):
        assert_same(got, expected)


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_longrope_in_its_old_spellings(
    make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any, kind: str
) -> None:
    path = make_model(**BASE, **longrope(16, 64))
    tokens = random_tokens(NUM_TOKENS)
    expected = expected_logits(path, tokens)
    factors = {key: VARIANTS["long factors"]["rope_parameters"][key] for key in ("short_factor", "long_factor")}
    old = {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": {"type": kind, **factors}}
    assert_same(paged_model(changed_config(path, **old)).chunked(tokens, 17), expected)


@pytest.mark.parametrize(("window", "expected"), [(1023, 1023), (1024, None), (262144, None), (None, None)])
def test_a_window_as_long_as_the_longest_sequence_is_none(
    make_model: Any, window: int | None, expected: int | None
) -> None:
    path = make_model(**BASE, sliding_window=window)
    assert read_model_facts(path).hf_config["sliding_window"] == expected
    assert read_model_facts(to_gguf(path)).hf_config["sliding_window"] == expected


def test_longrope_that_does_not_say_its_old_context_means_4096(make_model: Any) -> None:
    path = changed_config(make_model(**BASE, **longrope(16, 64)), original_max_position_embeddings=None)
    config = json.loads((path / "config.json").read_text())
    del config["rope_parameters"]["original_max_position_embeddings"]
    scaling = read_model_facts(changed_config(path, **config)).hf_config["rope_scaling"]
    assert scaling["original_max_position_embeddings"] == 4096


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gguf_file_gives_the_logits_of_its_source(make_model: Any, check_family: Any, variant: str) -> None:
    path = make_model(**BASE, **VARIANTS[variant])
    check_family(path, to_gguf(path))


@pytest.mark.parametrize(("kind", "missing"), [("long", "short"), ("short", "long")])
def test_one_list_of_factors_of_a_gguf_file_without_the_other_is_refused(
    make_model: Any, kind: str, missing: str
) -> None:
    path = make_model(**BASE, **longrope(16, 64))
    with pytest.raises(CheckpointError, match=f"rope_factors_{missing}.*go together"):
        read_model_facts(to_gguf(path, (kind,)))


@pytest.mark.parametrize("name", ["self_attn.qkv_proj", "mlp.gate_up_proj"])
def test_a_missing_merged_weight_is_named(make_model: Any, paged_model: Any, name: str) -> None:
    path = make_model(**BASE)
    weights = load_file(path / "model.safetensors")
    del weights[f"model.layers.1.{name}.weight"]
    save_file(weights, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name}.weight.*missing"):
        paged_model(path)


def test_a_merged_weight_of_the_wrong_height_is_named(make_model: Any, paged_model: Any) -> None:
    path = make_model(**BASE)
    weights = load_file(path / "model.safetensors")
    name = "model.layers.1.self_attn.qkv_proj.weight"
    weights[name] = weights[name][:-1].clone()
    save_file(weights, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"qkv_proj.*\[159, 96\].*\[160, 96\]"):
        paged_model(path)


@pytest.mark.parametrize("share", [0.2, 0.05])
def test_half_a_pair_cannot_be_rotated(make_model: Any, share: float) -> None:
    path = changed_config(make_model(**BASE), **rotated(share))
    with pytest.raises(CheckpointError, match="partial_rotary_factor"):
        read_model_facts(path)


@pytest.mark.parametrize("variant", ["sliding window", "long factors, three quarters rotated"])
def test_the_engine_continues_as_transformers(make_model: Any, variant: str) -> None:
    assert_engine_continues_as_transformers(make_model(**BASE, **VARIANTS[variant], vocab_size=VOCAB_SIZE))
