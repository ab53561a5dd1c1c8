"""GPTQ and AWQ weights against the formats' definitions; what is refused, and that each refusal names its cause."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from octavo.checkpoints import read_model_facts
from octavo.errors import CheckpointError, ModelError, UnsupportedError
from tests.quantized.reading import check, read
from tests.quantized.writers import Quantized, awq_parts, drawn, gptq_parts

DOWN = "model.layers.1.mlp.down_proj"  # 64 outputs of 96 inputs
QUERY = "model.layers.0.self_attn.q_proj"  # 64 of 64
SHAPES = {DOWN: (64, 96), QUERY: (64, 64)}

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def check_values(folder: Path, module: str, weight: Quantized, kind: str) -> None:
    tensor = check(folder, module, weight.q.shape, kind)
    np.testing.assert_array_equal(tensor.to_float32(), weight.values)


@pytest.mark.parametrize("module", [DOWN, QUERY])
@pytest.mark.parametrize(("group_size", "block"), [(32, 32), (64, None), (-1, None), (128, None)])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
def test_gptq(make_quantized: Any, module: str, group_size: int, block: int | None, bits: int, form: str) -> None:
    weight = drawn(SHAPES[module], group_size, bits)
    in_size = SHAPES[module][1]
    # Where rows are not whole groups, blocks are what divides both.
    block = block or (np.gcd(in_size, group_size) if group_size > 0 else in_size)
    settings = GPTQ | {"bits": bits, "group_size": group_size, "checkpoint_format": form}
    folder = make_quantized({module: gptq_parts(weight, less_one=form == "gptq")}, settings)
    check_values(folder, module, weight, f"U{bits}:{block}")


@pytest.mark.parametrize("module", [DOWN, QUERY])
@pytest.mark.parametrize("group_size", [32, 64, -1])
def test_awq(make_quantized: Any, module: str, group_size: int) -> None:
    weight = drawn(SHAPES[module], group_size)
    in_size = SHAPES[module][1]
    block = np.gcd(in_size, group_size) if group_size > 0 else in_size
    check_values(
        make_quantized({module: awq_parts(weight)}, AWQ | {"group_size": group_size}), module, weight, f"U4:{block}"
    )


@pytest.mark.parametrize("shape", [(808, 1056), (16, 1024)])
def test_awq_of_more_words_than_are_unpacked_at_a_time(make_quantized: Any, shape: tuple[int, int]) -> None:
    weight = drawn(shape, 32)
    tensor = read(make_quantized({DOWN: awq_parts(weight)}, AWQ), DOWN)
    np.testing.assert_array_equal(tensor.to_float32(), weight.values)


@pytest.mark.parametrize("scale_type", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_of_every_type(make_quantized: Any, scale_type: torch.dtype) -> None:
    weight = drawn(SHAPES[QUERY], 32, scale_type=scale_type)
    check_values(make_quantized({QUERY: gptq_parts(weight)}, GPTQ), QUERY, weight, "U4:32")
    check_values(make_quantized({QUERY: awq_parts(weight)}, AWQ), QUERY, weight, "U4:32")


@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_zeros_are_recognized_in_either_form(make_quantized: Any, bits: int) -> None:
    """Some writers say "gptq" and keep zeros as they are."""
    weight = drawn(SHAPES[QUERY], 32, bits, symmetric=True)
    for less_one in (True, False):
        folder = make_quantized({QUERY: gptq_parts(weight, less_one)}, GPTQ | {"sym": True, "bits": bits})
        check_values(folder, QUERY, weight, f"U{bits}:32")
    # Control: where nothing says that they are symmetric, the form is what counts.
    folder = make_quantized({QUERY: gptq_parts(weight, less_one=False)}, GPTQ | {"sym": False, "bits": bits})
    assert not np.array_equal(read(folder, QUERY).to_float32(), weight.values)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("group_size", "block"), [(32, 32), (64, 32), (96, 96)])
def test_inputs_in_an_order_of_their_own_come_group_by_group(
    make_quantized: Any, bits: int, group_size: int, block: int, said: Any
) -> None:
    """Of 64: the last group is shorter."""
    weight = drawn(SHAPES[DOWN], group_size, bits)
    groups = np.random.default_rng(1).permutation(weight.groups)
    weight = Quantized(bits, weight.q, weight.scale, weight.zero, groups)
    settings = GPTQ | {"desc_act": True, "bits": bits, "group_size": group_size}
    folder = make_quantized({DOWN: gptq_parts(weight)}, settings)
    check_values(folder, DOWN, weight, f"U{bits}:{block}")
    order = read(folder, DOWN).input_order
    if group_size == 96:
        assert order is None  # one group has no other order
    else:
        assert order.tolist() == sorted(range(96), key=lambda column: (groups[column], column))
        assert sorted(order) == list(range(96))
    assert "widened" not in said()
    assert read(make_quantized({DOWN: gptq_parts(drawn(SHAPES[DOWN], 32))}, GPTQ), DOWN).input_order is None


def test_groups_of_other_sizes_than_is_said_are_widened(make_quantized: Any, said: Any) -> None:
    weight = drawn(SHAPES[DOWN], 32)
    groups = np.random.default_rng(1).permutation(weight.groups)
    groups[np.flatnonzero(groups == 1)[0]] = 2
    weight = Quantized(4, weight.q, weight.scale, weight.zero, groups)
    folder = make_quantized({DOWN: gptq_parts(weight)}, GPTQ | {"desc_act": True})
    check_values(folder, DOWN, weight, "F32")
    assert read(folder, DOWN).input_order is None
    assert (
        "1 quantized weights are widened while loading: groups of inputs (desc_act, act-order) that are not of"
        in said()
    )
    assert DOWN in said()


def test_act_order_in_name_only_is_kept(make_quantized: Any, said: Any) -> None:
    """static_groups: desc_act is set, and groups are neighbours all the same."""
    weight = drawn(SHAPES[DOWN], 32)
    check_values(make_quantized({DOWN: gptq_parts(weight)}, GPTQ | {"desc_act": True}), DOWN, weight, "U4:32")
    empty = gptq_parts(weight) | {"g_idx": torch.zeros(96, dtype=torch.int32)}
    check_values(make_quantized({DOWN: empty}, GPTQ), DOWN, weight, "U4:32")
    assert "widened" not in said()
    assert "weights quantized by GPTQ, 4 bits in groups of 32" in said()


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_that_blocks_cannot_have_are_widened(make_quantized: Any, bits: int, said: Any) -> None:
    weight = drawn(SHAPES[DOWN], 16, bits)
    check_values(
        make_quantized({DOWN: gptq_parts(weight)}, GPTQ | {"group_size": 16, "bits": bits}), DOWN, weight, "F32"
    )
    assert "rows that are not whole groups of a multiple of 32" in said()
    weight = drawn(SHAPES[DOWN], 16)
    check_values(make_quantized({DOWN: awq_parts(weight)}, AWQ | {"group_size": 16}), DOWN, weight, "F32")


def test_settings_may_name_what_is_not_quantized(make_quantized: Any) -> None:
    """Nothing follows from it: the tensors show it."""
    weight = drawn(SHAPES[QUERY], 32)
    for more in ({"dynamic": {"-:.*mlp.*": {}}}, {"lm_head": False}, {"modules_in_block_to_quantize": [["q_proj"]]}):
        folder = make_quantized({QUERY: gptq_parts(weight)}, GPTQ | more)
        check_values(folder, QUERY, weight, "U4:32")
        assert read(folder, DOWN).type == "F32"
    folder = make_quantized({QUERY: awq_parts(weight)}, AWQ | {"modules_to_not_convert": ["mlp"]})
    check_values(folder, QUERY, weight, "U4:32")


def test_awq_without_zeros_is_around_the_middle(make_quantized: Any) -> None:
    weight = drawn(SHAPES[QUERY], 32, symmetric=True)
    parts = awq_parts(weight)
    del parts["qzeros"]
    check_values(make_quantized({QUERY: parts}, AWQ | {"zero_point": False}), QUERY, weight, "U4:32")


def test_settings_may_lie_in_a_file_of_their_own(make_quantized: Any) -> None:
    weight = drawn(SHAPES[QUERY], 32)
    own = {key: value for key, value in GPTQ.items() if key != "quant_method"}
    folder = make_quantized({QUERY: gptq_parts(weight)}, ...)
    (folder / "quantize_config.json").write_text(json.dumps(own))
    assert read_model_facts(folder).quantization == "gptq"
    check_values(folder, QUERY, weight, "U4:32")
    before = read_model_facts(folder).fingerprint
    (folder / "quantize_config.json").write_text(json.dumps(own | {"checkpoint_format": "gptq_v2"}))
    assert read_model_facts(folder).fingerprint != before  # the numbers mean something else now
    (folder / "quantize_config.json").unlink()
    folder = make_quantized({QUERY: awq_parts(weight)}, ...)
    (folder / "quant_config.json").write_text(
        json.dumps({"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"})
    )
    assert read_model_facts(folder).quantization == "awq"
    check_values(folder, QUERY, weight, "U4:32")


def test_only_what_is_asked_for_is_made(make_quantized: Any) -> None:
    """A weight of 96 MiB comes in pieces that are made and let go one after the other."""
    shape = (8192, 24576)
    groups = shape[1] // 128
    parts = {
        "qweight": torch.zeros(shape[1] // 8, shape[0], dtype=torch.int32),
        "qzeros": torch.zeros(groups, shape[0] // 8, dtype=torch.int32),
        "scales": torch.ones(groups, shape[0], dtype=torch.float16),
        "g_idx": (torch.arange(shape[1]) // 128).int(),
    }
    for order, most in ((parts["g_idx"], 16), (parts["g_idx"].flip(0), 48)):
        folder = make_quantized({DOWN: parts | {"g_idx": order}}, GPTQ | {"group_size": 128, "desc_act": True})
        tensor = read(folder, DOWN)
        tracemalloc.start()
        sizes = [len(piece.data) for _, piece in tensor.row_pieces(2**22)]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert sum(sizes) == tensor.num_bytes > 96 * 2**20
        assert max(sizes) <= 2**22
        assert peak < most * 2**20


def test_facts_count_what_lies_in_the_files(make_quantized: Any) -> None:
    weight = drawn(SHAPES[QUERY], 32)
    before = read_model_facts(make_quantized({}, None))
    after = read_model_facts(make_quantized({QUERY: gptq_parts(weight)}, GPTQ))
    assert (before.quantization, after.quantization) == ("none", "gptq")
    parts = gptq_parts(weight).values()
    assert after.weight_bytes - before.weight_bytes == sum(part.nbytes for part in parts) - 64 * 64 * 4
    assert after.dtype == "bfloat16"


@pytest.mark.parametrize("suffix", ["qweight", "qzeros", "scales", "g_idx"])
def test_every_part_counts_in_the_fingerprint(make_quantized: Any, suffix: str) -> None:
    parts = gptq_parts(drawn(SHAPES[QUERY], 32))
    before = read_model_facts(make_quantized({QUERY: parts}, GPTQ)).fingerprint
    parts[suffix] = parts[suffix].clone()
    parts[suffix].view(-1)[-1] = 0 if suffix == "g_idx" else 1
    assert read_model_facts(make_quantized({QUERY: parts}, GPTQ)).fingerprint != before


def test_parts_in_different_files(make_quantized: Any, tmp_path: Path) -> None:
    weight = drawn(SHAPES[QUERY], 32)
    folder = make_quantized({QUERY: gptq_parts(weight)}, GPTQ)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for index in range(3):
        name = f"model-{index + 1:05}-of-00003.safetensors"
        own = {key: tensors[key] for key in sorted(tensors)[index::3]}
        safetensors.torch.save_file(own, folder / name)
        weight_map |= dict.fromkeys(own, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert len({weight_map[f"{QUERY}.{suffix}"] for suffix in ("qweight", "qzeros", "scales")}) > 1
    check_values(folder, QUERY, weight, "U4:32")
    assert read_model_facts(folder).fingerprint


CONFIG_CASES: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "aqlm"}, "quant_method: 'aqlm' is not supported; supported: .*gptq"),
    (GPTQ | {"bits": 3}, "bits: 3 is not supported; supported: 4, 8"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format: 'marlin' is not supported; supported: gptq, gptq_v2"),
    (GPTQ | {"is_marlin_format": True}, "'marlin' is not supported"),
    (GPTQ | {"dynamic": {"+:.*down": {"bits": 8}}}, "dynamic: '\\+:.*down': settings of single modules"),
    (GPTQ | {"adapter": {"name": "lora"}}, "adapter is not supported"),
    (GPTQ | {"pack_dtype": "int16"}, "pack_dtype: 'int16' is not supported"),
    (AWQ | {"bits": 8}, "bits: 8 is not supported; supported: 4"),
    (AWQ | {"version": "gemv"}, "version: 'gemv' is not supported; supported: gemm"),
]


@pytest.mark.parametrize(("settings", "says"), CONFIG_CASES)
def test_what_is_not_supported_is_named(make_quantized: Any, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        read_model_facts(make_quantized({}, settings))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("gptq", "quantization_config must be an object, got 'gptq'"),
        (GPTQ | {"bits": ...}, "quantization_config.bits is missing"),
        (GPTQ | {"bits": "4"}, "bits must be a whole number"),
        (GPTQ | {"group_size": 0}, "group_size must be -1, or a number above 0"),
        (GPTQ | {"group_size": -2}, "group_size must be a whole number from -1"),
        (GPTQ | {"desc_act": 1}, "desc_act must be true or false"),
        (GPTQ | {"sym": "yes"}, "sym must be true or false"),
        (GPTQ | {"dynamic": []}, "dynamic must be an object"),
        (AWQ | {"zero_point": 1}, "zero_point must be true or false"),
    ],
)
def test_settings_that_cannot_be_right_are_named(make_quantized: Any, settings: Any, says: str) -> None:
    if isinstance(settings, dict):
        settings = {key: value for key, value in settings.items() if value is not ...}
    with pytest.raises(CheckpointError, match=says):
        read_model_facts(make_quantized({}, settings))


def without(suffix: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda parts: {key: part for key, part in parts.items() if key != suffix}


def cut(suffix: str, rows: int, columns: int) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda parts: parts | {suffix: parts[suffix][:rows, :columns]}


def cast(suffix: str, kind: torch.dtype) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda parts: parts | {suffix: parts[suffix].to(kind)}


GPTQ_DAMAGE: list[tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = [
    (without("qweight"), r"qweight': is missing; model.layers.1.mlp.down_proj has g_idx, qzeros, scales"),
    (without("qzeros"), "qzeros': is missing"),
    (without("scales"), "scales': is missing"),
    (cut("scales", 2, 64), r"scales': has shape \[2, 64\], expected \[3, 64\]"),
    (cut("qzeros", 3, 7), r"qzeros': has shape \[3, 7\], expected \[3, 8\]"),
    (cut("qweight", 12, 63), "qweight': has 63 outputs, a multiple of 8 is expected"),
    (cast("qweight", torch.int64), "qweight': is of type I64, expected I32"),
    (cast("scales", torch.int32), "scales': is of type I32, expected F32 or F16 or BF16"),
    (lambda parts: parts | {"g_idx": parts["g_idx"] + 1}, "g_idx': names group 3 of 3"),
    (lambda parts: parts | {"g_idx": parts["g_idx"] - 1}, "g_idx': names group 4294967295 of 3"),
    (lambda parts: parts | {"g_idx": parts["g_idx"][:5]}, r"g_idx': has shape \[5\], expected \[96\]"),
    (lambda parts: parts | {"qweight": parts["qweight"][:0]}, r"qweight': has shape \[0, 64\], a matrix"),
    (lambda parts: parts | {"qweight": parts["qweight"].reshape(-1)}, "a matrix is expected"),
]


@pytest.mark.parametrize(("damage", "says"), GPTQ_DAMAGE)
def test_a_damaged_gptq_weight_is_named(make_quantized: Any, damage: Any, says: str, load_guarded: Any) -> None:
    error = load_guarded(make_quantized({DOWN: damage(gptq_parts(drawn(SHAPES[DOWN], 32)))}, GPTQ))
    assert isinstance(error, CheckpointError)
    with pytest.raises(ModelError, match=says):
        raise error


def test_act_order_needs_the_order(make_quantized: Any) -> None:
    parts = without("g_idx")(gptq_parts(drawn(SHAPES[DOWN], 32)))
    check_values(make_quantized({DOWN: parts}, GPTQ), DOWN, drawn(SHAPES[DOWN], 32), "U4:32")
    with pytest.raises(CheckpointError, match="g_idx': is missing; desc_act says"):
        read_model_facts(make_quantized({DOWN: parts}, GPTQ | {"desc_act": True}))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (without("qweight"), "qweight': is missing"),
        (without("qzeros"), "qzeros': is missing"),
        (cut("qzeros", 3, 7), r"qzeros': has shape \[3, 7\], expected \[3, 8\]"),
        (cut("scales", 3, 60), r"scales': has shape \[3, 60\], expected \[3, 64\]"),
        (cut("qweight", 95, 8), "qweight': has 95 inputs, an even number"),
        (cast("qzeros", torch.float32), "qzeros': is of type F32, expected I32"),
    ],
)
def test_a_damaged_awq_weight_is_named(make_quantized: Any, damage: Any, says: str, load_guarded: Any) -> None:
    error = load_guarded(make_quantized({DOWN: damage(awq_parts(drawn(SHAPES[DOWN], 32)))}, AWQ))
    assert isinstance(error, CheckpointError)
    with pytest.raises(ModelError, match=says):
        raise error


@pytest.mark.parametrize("parts", [gptq_parts, awq_parts])
def test_packed_weights_that_no_settings_speak_of_are_refused(make_quantized: Any, parts: Any) -> None:
    folder = make_quantized({DOWN: parts(drawn(SHAPES[DOWN], 32))}, ...)
    with pytest.raises(UnsupportedError, match=r"GPTQ or AWQ, and config\.json's quantization_config does"):
        read_model_facts(folder)
