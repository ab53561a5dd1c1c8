"""compressed-tensors checkpoints against the package that writes them; what is refused, and how it is named."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.checkpoints import iterate_tensors, read_model_facts
from octavo.errors import CheckpointError, ModelError, UnsupportedError
from tests.quantized.compressed import compressed, settings
from tests.quantized.reading import check, read

DOWN = "model.layers.1.mlp.down_proj"  # 64 outputs of 96 inputs
EMBEDDING = "model.embed_tokens"
GENERATOR = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(64, 96, generator=GENERATOR) * 0.2
FLOAT_BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block"}
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}

SCHEMES: list[tuple[str, dict[str, Any], str]] = [
    ("pack-quantized", W4, "U4:32"),
    ("pack-quantized", W4 | {"symmetric": False}, "U4:32"),
    ("pack-quantized", W4 | {"group_size": 96}, "U4:96"),
    ("pack-quantized", W4 | {"group_size": 16}, "F32"),
    ("pack-quantized", W4 | {"group_size": 48, "symmetric": False}, "F32"),
    ("pack-quantized", W4 | {"num_bits": 8, "symmetric": False}, "U8:32"),
    ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": False}, "U4:96"),
    ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, "U8:96"),
    ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": False}, "U8:96"),
    ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "tensor", "symmetric": False}, "U4:96"),
    ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, "U8:96"),
    ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}, "U8:96"),
    ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor"}, "U8:96"),
    ("naive-quantized", W4 | {"num_bits": 8, "symmetric": False}, "U8:32"),
    ("naive-quantized", W4 | {"symmetric": False}, "U8:32"),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, "F8_E4M3:96"),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, "F8_E4M3:96"),
    (
        "float-quantized",
        FLOAT_BLOCKS | {"block_structure": [16, 32]},
        "F8_E4M3:32",
    ),
    (
        "naive-quantized",
        FLOAT_BLOCKS | {"block_structure": [48, 64]},
        "F8_E4M3:32",
    ),
    ("float-quantized", FLOAT_BLOCKS | {"block_structure": [48, 40]}, "F32"),
]


@pytest.mark.parametrize(("form", "scheme", "kind"), SCHEMES)
def test_values_are_the_packages_own(make_quantized: Any, form: str, scheme: dict[str, Any], kind: str) -> None:
    for scale_type in (torch.float32, torch.bfloat16, torch.float16):
        parts, values = compressed(WEIGHT, form, scale_type, **scheme)
        tensor = check(make_quantized({DOWN: parts}, settings(form, **scheme)), DOWN, (64, 96), kind)
        # The package computes in the type of the scales; one rounding of what octavo has.
        found = torch.from_numpy(tensor.to_float32()).to(scale_type)
        assert torch.equal(found, values), scale_type
    # Control: it is not the weight before it was quantized.
    assert not torch.equal(found.float(), WEIGHT)


def test_a_row_that_fills_no_whole_word(make_quantized: Any) -> None:
    """weight_shape says where it ends."""
    weight = torch.randn(64, 93, generator=GENERATOR)
    for symmetric in (True, False):
        weights = {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": symmetric}
        parts, values = compressed(weight, "pack-quantized", **weights)
        tensor = check(make_quantized({DOWN: parts}, settings("pack-quantized", **weights)), DOWN, (64, 93), "F32")
        np.testing.assert_array_equal(tensor.to_float32(), values.numpy())


def test_zeros_of_older_writers(make_quantized: Any) -> None:
    """Not packed, or there without saying anything."""
    weights = W4 | {"symmetric": False}
    parts, values = compressed(WEIGHT, "pack-quantized", **weights)
    words = parts["weight_zero_point"]
    zeros = torch.stack([words >> 4 * place & 15 for place in range(8)], 1).flatten(0, 1) - 8
    older = parts | {"weight_zero_point": zeros.to(torch.int8)}
    tensor = check(make_quantized({DOWN: older}, settings("pack-quantized", **weights)), DOWN, (64, 96), "U4:32")
    np.testing.assert_array_equal(tensor.to_float32(), values.numpy())
    for form, more in (("pack-quantized", W4), ("float-quantized", {"num_bits": 8, "type": "float"})):
        parts, values = compressed(WEIGHT, form, **more)
        empty = torch.zeros(parts["weight_scale"].shape, dtype=torch.int8)
        folder = make_quantized({DOWN: parts | {"weight_zero_point": empty}}, settings(form, **more))
        np.testing.assert_array_equal(read(folder, DOWN).to_float32(), values.numpy())


def test_act_order(make_quantized: Any, said: Any) -> None:
    """The package has given it up; its older checkpoints have weight_g_idx."""
    parts, _ = compressed(WEIGHT, "pack-quantized", **W4)
    config = settings("pack-quantized", **W4, actorder="group")
    in_order = torch.arange(96, dtype=torch.int32) // 32
    for nothing in (in_order, torch.full((96,), -1, dtype=torch.int32)):
        check(make_quantized({DOWN: parts | {"weight_g_idx": nothing}}, config), DOWN, (64, 96), "U4:32")
    assert "widened" not in said()
    order = torch.randperm(96, generator=GENERATOR)
    groups = in_order[order]
    folder = make_quantized({DOWN: parts | {"weight_g_idx": groups}}, config)
    numbers = torch.stack([parts["weight_packed"] >> 4 * place & 15 for place in range(8)], 2).flatten(1) - 8
    expected = numbers * parts["weight_scale"][:, groups.long()]
    tensor = check(folder, DOWN, (64, 96), "U4:32")
    np.testing.assert_array_equal(tensor.to_float32(), expected.numpy())
    assert tensor.input_order.tolist() == sorted(range(96), key=lambda column: (int(groups[column]), column))
    assert "widened" not in said()
    with pytest.raises(CheckpointError, match="weight_g_idx': is missing; actorder says"):
        read_model_facts(make_quantized({DOWN: parts}, config))


def grouped(**groups: dict[str, Any]) -> dict[str, Any]:
    return settings("mixed-precision", **W4) | {"config_groups": groups}


def test_a_module_has_the_scheme_that_names_it_most_closely(make_quantized: Any) -> None:
    """Its name, then a pattern, then its class."""
    eight = {"num_bits": 8, "type": "int", "strategy": "channel"}
    by_class = {"targets": ["Linear"], "weights": W4}
    parts, values = compressed(WEIGHT, "pack-quantized", **eight)
    for target in (DOWN, "re:.*down_proj", r"re:.*\.layers\.\d+\.mlp\.(up|down)_proj$"):
        config = grouped(a=by_class, b={"targets": [target], "weights": eight, "format": "pack-quantized"})
        tensor = check(make_quantized({DOWN: parts}, config), DOWN, (64, 96), "U8:96")
        np.testing.assert_array_equal(tensor.to_float32(), values.numpy())
    config = grouped(a={"targets": ["re:.*down_proj"], "weights": W4}, b={"targets": [DOWN], "weights": eight})
    check(make_quantized({DOWN: parts}, config), DOWN, (64, 96), "U8:96")
    embedding, values = compressed(torch.randn(128, 64, generator=GENERATOR), "pack-quantized", **eight)
    config = grouped(a=by_class, b={"targets": ["Embedding"], "weights": eight})
    tensor = check(make_quantized({EMBEDDING: embedding}, config), EMBEDDING, (128, 64), "U8:64")
    np.testing.assert_array_equal(tensor.to_float32(), values.numpy())
    with pytest.raises(CheckpointError, match=rf"config.json: {DOWN} is quantized, and no group of"):
        read_model_facts(make_quantized({DOWN: parts}, grouped(a={"targets": ["re:^lm_head"], "weights": W4})))


def test_the_slowest_pattern_takes_no_time(make_quantized: Any) -> None:
    """No module can have a name that makes one slow."""
    parts, _ = compressed(WEIGHT, "pack-quantized", **W4)
    folder = make_quantized({}, changed(["re:.*.*.*.*z"] * 32, *GROUP, "targets"), named("a" * 200, parts))
    with pytest.raises(UnsupportedError, match="its name is too long for the patterns"):
        read_model_facts(folder)
    folder = make_quantized({}, changed(["re:.*.*.*.*z"] * 32, *GROUP, "targets"), named("a" * 128, parts))
    began = time.process_time()
    with pytest.raises(CheckpointError, match="is quantized, and no group of"):
        read_model_facts(folder)
    assert time.process_time() - began < 10


def named(module: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{module}.{suffix}": part for suffix, part in parts.items()}


def test_what_is_not_followed_is_said(make_quantized: Any, said: Any) -> None:
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    parts, _ = compressed(WEIGHT, "int-quantized", **weights)
    config = settings("int-quantized", **weights)
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "int", "dynamic": True}
    config["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    folder = make_quantized({DOWN: parts | {"input_scale": torch.ones(1)}}, config, {"model.k_scale": torch.ones(1)})
    assert read_model_facts(folder).quantization == "compressed-tensors"
    assert said() == ""
    list(iterate_tensors(folder))
    assert "weights quantized by compressed-tensors, int-quantized: int8 in rows" in said()
    assert "input_activations are not rounded to int of 8 bits" in said()
    assert "kv_cache_scheme is not followed" in said()
    assert "2 scales of activations or of the cache are not used" in said()


def test_the_old_name_of_the_settings(make_quantized: Any) -> None:
    parts, _ = compressed(WEIGHT, "pack-quantized", **W4)
    config = {key: value for key, value in settings("pack-quantized", **W4).items() if key != "quant_method"}
    folder = make_quantized({DOWN: parts}, None)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"compression_config": config}))
    check(folder, DOWN, (64, 96), "U4:32")


def changed(value: Any, *path: str) -> dict[str, Any]:
    config: dict[str, Any] = settings("pack-quantized", **W4)
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return config


GROUP = ("config_groups", "group_0")
WEIGHTS = (*GROUP, "weights")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (changed("marlin-24", "format"), "format: 'marlin-24' is not supported; supported: pack-quantized, int-"),
        (changed("nvfp4-pack-quantized", *GROUP, "format"), r"group_0\.format: 'nvfp4-pack-quantized' is not"),
        (changed({"format": "sparse-24-bitmask"}, "sparsity_config"), r"sparsity_config\.format: 'sparse-24-bitmask'"),
        (changed({"config_groups": {"R1": {}}}, "transform_config"), "transform_config is not supported"),
        (changed(3, *WEIGHTS, "num_bits"), "num_bits, type: 'int' of 3 bits is not supported; supported: int of 4 "),
        (changed("float", *WEIGHTS, "type"), "'float' of 4 bits is not supported"),
        (changed("tensor_group", *WEIGHTS, "strategy"), "strategy: 'tensor_group' is not supported"),
        (changed(True, *WEIGHTS, "dynamic"), "dynamic weights are not supported"),
        (changed(["re:(.*)+x"], *GROUP, "targets"), "with a repeated group, is not followed"),
        (changed(["re:" + ".*a" * 5], *GROUP, "targets"), "or 4 repetitions"),
        (changed(["re:" + "a" * 300], *GROUP, "targets"), "more than 256 characters"),
        (changed(["re:a"] * 33, *GROUP, "targets"), "config_groups: 33 patterns; octavo follows 32"),
    ],
)
def test_what_is_not_supported_is_named(make_quantized: Any, config: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"config\.json: quantization_config\..*{says}"):
        read_model_facts(make_quantized({}, config))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (changed(None, "config_groups"), "config_groups must be an object with a scheme for each group"),
        (changed({}, "config_groups"), "config_groups must be an object"),
        (changed(["Linear"], *GROUP), r"config_groups\.group_0 must be an object"),
        (changed("Linear", *GROUP, "targets"), "targets must be a list of names"),
        (changed(["re:["], *GROUP, "targets"), "targets must be names, or patterns"),
        (changed(None, *WEIGHTS, "group_size"), "group_size must be a number above 0 with strategy group"),
        (changed("block", *WEIGHTS, "strategy"), "block_structure must be two numbers above 0"),
        (changed("yes", *WEIGHTS, "symmetric"), "symmetric must be true or false"),
        (changed([1], "ignore"), "ignore must be a list of names"),
        (changed(8, *GROUP, "input_activations"), "input_activations must be an object"),
    ],
)
def test_settings_that_cannot_be_right_are_named(make_quantized: Any, config: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: quantization_config\..*{says}"):
        read_model_facts(make_quantized({}, config))


Damage = Callable[[dict[str, Tensor]], dict[str, Tensor]]
ASYMMETRIC = W4 | {"symmetric": False}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


def without(suffix: str) -> Damage:
    return lambda parts: {key: part for key, part in parts.items() if key != suffix}


def put(suffix: str, change: Callable[[Tensor], Tensor]) -> Damage:
    return lambda parts: parts | {suffix: change(parts[suffix])}


@pytest.mark.parametrize(
    ("form", "scheme", "damage", "says"),
    [
        (
            "pack-quantized",
            W4,
            without("weight_scale"),
            "weight_scale': is missing; .* has weight_packed, ",
        ),
        ("pack-quantized", W4, without("weight_shape"), "weight_shape': is missing"),
        ("pack-quantized", ASYMMETRIC, without("weight_zero_point"), "weight_zero_point': is missing"),
        ("pack-quantized", W4, without("weight_packed"), r"down_proj.weight': is missing; .* has weight_scale"),
        ("pack-quantized", W4, put("weight_scale", lambda t: t[:, :2]), r"has shape \[64, 2\], expected \[64, 3\]"),
        ("pack-quantized", W4, put("weight_scale", lambda t: t.int()), "is of type I32, expected F32 or F16 or BF16"),
        ("pack-quantized", W4, put("weight_shape", lambda t: t + 8), r"is \[72, 104\], and weight_packed has 64 rows"),
        ("pack-quantized", W4, put("weight_shape", lambda t: -t), r"is \[-64, -96\], and weight_packed"),
        ("pack-quantized", W4, put("weight_packed", lambda t: t[0]), "a matrix is expected"),
        ("pack-quantized", ASYMMETRIC, put("weight_zero_point", lambda t: t[:7]), r"\[7, 3\], expected \[8, 3\]"),
        (
            "pack-quantized",
            ASYMMETRIC,
            put("weight_zero_point", lambda t: torch.full((64, 3), 8, dtype=torch.int8)),
            "has numbers from 8 to 8, which are not of 4 bits",
        ),
        ("int-quantized", INT8, without("weight_scale"), "weight_scale': is missing"),
        ("int-quantized", INT8, without("weight_zero_point"), "weight_zero_point': is missing"),
        ("int-quantized", INT8, put("weight", lambda t: t.int()), "is of type I32, expected"),
        ("int-quantized", INT8, put("weight", lambda t: t.float()), "is not quantized and has a scale"),
        ("int-quantized", INT8, put("weight_scale", lambda t: t[:1]), r"\[1, 1\], expected \[64, 1\] or \[64\]"),
        ("float-quantized", FLOAT8, without("weight_scale"), "weight_scale': is missing"),
        ("float-quantized", FLOAT8, put("weight", lambda t: t.float().to(torch.float8_e5m2)), "is of type F8_E5M2"),
        ("float-quantized", FLOAT8, put("weight", lambda t: t.view(torch.int8)), "is of type I8, expected F8_E4M3"),
        (
            "float-quantized",
            FLOAT8,
            lambda parts: parts | {"weight_zero_point": torch.ones(64, 1, dtype=torch.int8)},
            "floats with a zero point",
        ),
        (
            "pack-quantized",
            W4,
            lambda parts: parts | {"weight_g_idx": torch.full((96,), 3, dtype=torch.int32)},
            "weight_g_idx': names group 3 of 3",
        ),
    ],
)
def test_a_damaged_weight_is_named(
    make_quantized: Any, form: str, scheme: dict[str, Any], damage: Damage, says: str, load_guarded: Any
) -> None:
    parts, _ = compressed(WEIGHT, form, **scheme)
    error = load_guarded(make_quantized({DOWN: damage(parts)}, settings(form, **scheme)))
    assert error is not None
    with pytest.raises(ModelError, match=rf"model\.safetensors: tensor '{DOWN}.*{says}|{says}"):
        raise error


def test_fakes_of_the_package_are_what_this_reads(make_quantized: Path) -> None:
    """A module that is not quantized is a plain weight, whatever the lists say."""
    folder = make_quantized({}, settings("pack-quantized", **W4))
    assert read(folder, DOWN).type == "F32"
