"""Every family: what transformers writes is read, any damaged field is a model error in one line, names are unique."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy
import transformers

from octavo.checkpoints import read_model_facts
from octavo.checkpoints.families import FAMILIES
from octavo.errors import ModelError, UnsupportedError

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What the class would not be without, at this size.
OWN: dict[str, dict[str, Any]] = {
    "Gemma3ForConditionalGeneration": {"text_config": SHAPE},
    "GraniteMoeHybridForCausalLM": {
        "layer_types": ["attention"] * 4,
        "num_local_experts": 0,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
    },
    "Phi3ForCausalLM": {
        "original_max_position_embeddings": 64,
        "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    },
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    "SmolLM3ForCausalLM": {"use_sliding_window": True, "sliding_window": 16},
}
JUNK: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    1.5,
    2**40,
    "x",
    "",
    [],
    [1],
    [[]],
    ["sliding_attention"] * 4,
    {},
    {"a": [None]},
]
CONFIG_CLASS_PREFIX = {"Gemma3ForCausalLM": "Gemma3Text", "Gemma3ForConditionalGeneration": "Gemma3"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tensor: no model's, which nobody asks before the model is loaded."""
    safetensors.numpy.save_file({"lm_head.weight": np.zeros((128, 64), np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def config_of(architecture: str, folder: Path) -> dict[str, Any]:
    """What transformers writes for a small model of the class."""
    prefix = CONFIG_CLASS_PREFIX.get(architecture, architecture.removesuffix("ForCausalLM"))
    config = getattr(transformers, f"{prefix}Config")(**(SHAPE | OWN.get(architecture, {})))
    config.architectures = [architecture]
    config.save_pretrained(folder)
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def refusal(folder: Path, config: dict[str, Any]) -> str | None:
    """The message of the ModelError, if it is one; anything else that is raised fails the test."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        facts = read_model_facts(folder)
    except ModelError as error:
        return str(error)
    # What is accepted crosses processes.
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(facts), type=type(facts)) == facts
    return None


def damaged(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what was done, config) with one field, at the top or one level down, left out or replaced by junk."""
    places = [(config, ()), *((value, (key,)) for key, value in config.items() if isinstance(value, dict))]
    for place, path in places:
        for key in place:
            for junk in (..., *JUNK):
                changed = copy.deepcopy(config)
                inner = changed[path[0]] if path else changed
                if junk is ...:
                    del inner[key]
                else:
                    inner[key] = junk
                yield f"{'.'.join([*path, key])} = {junk!r}", changed


@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_transformers_writes_is_read(folder: Path, architecture: str) -> None:
    config = config_of(architecture, folder)
    assert refusal(folder, config) is None
    assert read_model_facts(folder).architecture == architecture
    text = config.get("text_config", config)
    by_type = {**text, "architectures": None}
    assert refusal(folder, by_type) is None
    facts = read_model_facts(folder)
    assert facts.hf_config["num_hidden_layers"] == 4
    assert facts.hf_config["head_dim"] == 16


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_damaged_field_is_a_model_error_in_one_line_or_harmless(folder: Path, architecture: str) -> None:
    config = config_of(architecture, folder)
    refused = 0
    for what, changed in damaged(config):
        message = refusal(folder, changed)
        if message is not None:
            refused += 1
            assert "\n" not in message, what
            assert len(message) < 800, what
    assert refused > 50


def test_the_normal_form_is_a_fixed_point(folder: Path) -> None:
    """GGUF metadata are translated to it before it is checked, and overrides are merged into it."""
    for architecture in FAMILIES:
        assert refusal(folder, config_of(architecture, folder)) is None
        once = read_model_facts(folder).hf_config
        assert refusal(folder, once) is None, architecture
        assert read_model_facts(folder).hf_config == once, architecture


def test_names_lead_to_one_family() -> None:
    gguf = [family.gguf.architecture for family in FAMILIES.values() if family.gguf]
    assert len(gguf) == len(set(gguf))
    types = [family.model_type for family in FAMILIES.values()]
    assert len(types) == len(set(types))


def test_the_supported_ones_are_listed(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": ["AbacusForCausalLM"]}')
    with pytest.raises(UnsupportedError) as caught:
        read_model_facts(folder)
    assert all(architecture in str(caught.value) for architecture in FAMILIES)
