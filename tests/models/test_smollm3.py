"""SmolLM3: tiny random models from Hugging Face and GGUF form against transformers, and through the engine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.checkpoints import read_model_facts
from octavo.errors import CheckpointError
from tests.models.folders import changed_config
from tests.models.gguf_files import write_gguf
from tests.models.through_engine import VOCAB_SIZE, assert_engine_continues_as_transformers

BASE: dict[str, Any] = {
    "family": "SmolLM3",
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWED = {"use_sliding_window": True, "sliding_window": 23}
VARIANTS: dict[str, dict[str, Any]] = {
    "every fourth layer does not rotate": {},
    "every second": {"no_rope_layer_interval": 2},
    "stated layers": {"no_rope_layers": [0, 1, 0, 1]},
    "biases, untied": {"attention_bias": True, "mlp_bias": True},
    "windows where nothing rotates": WINDOWED,
    "windows elsewhere": {
        **WINDOWED,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
}
MakeModel = Callable[..., Path]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(make_model: MakeModel, check_family: Any, variant: str) -> None:
    check_family(make_model(**BASE, **VARIANTS[variant]))


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}])
def test_a_gguf_file_gives_the_logits_of_its_source(
    make_model: MakeModel, check_family: Any, fields: dict[str, Any]
) -> None:
    folder = make_model(**BASE, **fields)
    check_family(folder, gguf=write_gguf(folder, "smollm3", permuted=True))


def test_control_rows_of_query_and_key_have_to_be_put_back(make_model: MakeModel, check_family: Any) -> None:
    folder = make_model(**BASE)
    with pytest.raises(AssertionError, match="not close"):
        check_family(folder, gguf=write_gguf(folder, "smollm3", permuted=False))


@pytest.mark.parametrize("variant", ["every fourth layer does not rotate", "windows where nothing rotates"])
def test_the_engine_continues_as_transformers(make_model: MakeModel, variant: str) -> None:
    assert_engine_continues_as_transformers(make_model(**BASE, **VARIANTS[variant], vocab_size=VOCAB_SIZE))


@pytest.mark.parametrize("layers", [[1, 1, 1, 1], [1, 1, 0, 1], [0, 1, 1, 0]])
def test_control_other_layers_without_rotation_are_wrong(
    make_model: MakeModel, paged_model: Any, expected_logits: Any, random_tokens: Any, layers: list[int]
) -> None:
    folder = make_model(**BASE)
    tokens = random_tokens(60)
    expected = expected_logits(folder, tokens)
    got = paged_model(changed_config(folder, no_rope_layers=layers)).chunked(tokens, 60)
    assert (got - expected).abs().max() > 1e-3


def test_fields_that_are_left_out_have_the_values_of_the_class(make_model: MakeModel) -> None:
    import transformers

    folder = make_model(**BASE, num_key_value_heads=6)
    config = json.loads((folder / "config.json").read_text())
    kept = ("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    left = {key: config[key] for key in kept} | {"num_attention_heads": 12, "pad_token_id": 0}
    left |= {"bos_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(left))
    found = read_model_facts(folder).hf_config
    reference = transformers.SmolLM3Config(**left)
    for key in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"):
        assert found[key] == getattr(reference, key), key
    assert found["rope_theta"] == reference.rope_parameters["rope_theta"]
    assert found["no_rope_layers"] == reference.no_rope_layers == [1, 1, 1, 0]
    assert found["layer_types"] == reference.layer_types


@pytest.mark.parametrize("layers", [[1, 1, 1], "1111", [1, 1, 1, 2], [1, 1, 1, None], [[], 1, 1, 1]])
def test_layers_that_cannot_be_right_are_named(make_model: MakeModel, layers: Any) -> None:
    folder = changed_config(make_model(**BASE), no_rope_layers=layers)
    with pytest.raises(CheckpointError, match="no_rope_layers must be a list of 0 and 1 for each of 4 layers"):
        read_model_facts(folder)
