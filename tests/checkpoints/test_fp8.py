"""8-bit float checkpoints (fp8, fbgemm_fp8) against torch's own e4m3; what is refused, and how it is named."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.checkpoints import iterate_tensors, read_model_facts
from octavo.errors import CheckpointError, ModelError, UnsupportedError
from tests.quantized.reading import check, read

DOWN = "model.layers.1.mlp.down_proj"  # 64 outputs of 96 inputs
GENERATOR = torch.Generator().manual_seed(0)
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [32, 64]}
WHOLE = {"quant_method": "fp8", "activation_scheme": "static"}


def weight(out_size: int = 64, in_size: int = 96) -> Tensor:
    """Every number of the type that is one, and more."""
    numbers = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    drawn = torch.randint(0, len(numbers), (out_size * in_size,), generator=GENERATOR)
    drawn[: len(numbers)] = torch.arange(len(numbers))[: len(drawn)]
    return numbers[drawn].view(torch.float8_e4m3fn).view(out_size, in_size)


def scales(*shape: int) -> Tensor:
    return torch.rand(shape, generator=GENERATOR) * 0.1


@pytest.mark.parametrize(
    ("shape", "block", "kind"),
    [
        ((64, 96), (32, 64), "F8_E4M3:32"),  # a row is not whole blocks
        ((64, 96), (64, 32), "F8_E4M3:32"),
        ((60, 128), (128, 128), "F8_E4M3:128"),
        ((130, 256), (128, 128), "F8_E4M3:128"),
        ((130, 288), (128, 128), "F8_E4M3:32"),
        ((130, 200), (128, 128), "F32"),
        ((64, 96), (1, 16), "F32"),
    ],
)
def test_scales_of_blocks(make_quantized: Any, shape: tuple[int, int], block: tuple[int, int], kind: str) -> None:
    numbers = weight(*shape)
    scale = scales(-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    spread = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]
    parts = {"weight": numbers, "weight_scale_inv": scale}
    folder = make_quantized({DOWN: parts}, BLOCKS | {"weight_block_size": list(block)})
    tensor = check(folder, DOWN, shape, kind)
    np.testing.assert_array_equal(tensor.to_float32(), (numbers.float() * spread).numpy())
    assert read_model_facts(folder).quantization == "fp8"


@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (64,), (64, 1)])
@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_scales_of_rows_and_of_the_whole(make_quantized: Any, shape: tuple[int, ...], name: str, method: str) -> None:
    numbers, scale = weight(), scales(*shape)
    folder = make_quantized({DOWN: {"weight": numbers, name: scale}}, WHOLE | {"quant_method": method})
    spread = scale.reshape(-1, 1)
    tensor = check(folder, DOWN, (64, 96), "F8_E4M3:96")
    np.testing.assert_array_equal(tensor.to_float32(), (numbers.float() * spread).numpy())


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
def test_scales_of_every_type(make_quantized: Any, kind: torch.dtype) -> None:
    numbers, scale = weight(), scales(2, 2).to(kind)
    spread = scale.float().repeat_interleave(32, 0).repeat_interleave(64, 1)[:, :96]
    folder = make_quantized({DOWN: {"weight": numbers, "weight_scale_inv": scale}}, BLOCKS)
    np.testing.assert_array_equal(read(folder, DOWN).to_float32(), (numbers.float() * spread).numpy())


def test_what_is_not_used_is_said(make_quantized: Any, said: Any) -> None:
    parts = {"weight": weight(), "weight_scale": scales(), "input_scale": scales(1)}
    folder = make_quantized({DOWN: parts}, WHOLE, {"model.layers.0.self_attn.k_proj.k_scale": scales(1)})
    list(iterate_tensors(folder))
    assert "weights quantized by fp8, a scale for each row or weight" in said()
    assert "activations are not rounded to 8 bits" in said()
    assert "2 scales of activations or of the cache are not used" in said()


def test_modules_that_stay_as_they_are(make_quantized: Any) -> None:
    folder = make_quantized({}, BLOCKS | {"modules_to_not_convert": ["lm_head"]})
    assert read(folder, DOWN).type == "F32"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (BLOCKS | {"fmt": "e5m2"}, "fmt: 'e5m2' is not supported; supported: e4m3"),
        (BLOCKS | {"activation_scheme": "block"}, "activation_scheme: 'block' is not supported"),
        (BLOCKS | {"expert_dtype": "fp4"}, "expert_dtype: 'fp4' is not supported"),
    ],
)
def test_what_is_not_supported_is_named(make_quantized: Any, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"config\.json: quantization_config\.{says}"):
        read_model_facts(make_quantized({}, settings))


@pytest.mark.parametrize("block", [128, [128], [128, 0], [128, "128"], [True, 128], {}])
def test_blocks_that_cannot_be_are_named(make_quantized: Any, block: Any) -> None:
    with pytest.raises(CheckpointError, match=r"quantization_config\.weight_block_size must be two numbers above 0"):
        read_model_facts(make_quantized({}, BLOCKS | {"weight_block_size": block}))


@pytest.mark.parametrize(
    ("settings", "parts", "says"),
    [
        (BLOCKS, {"weight": weight()}, "weight_scale_inv': is missing; .* has weight"),
        (WHOLE, {"weight": weight()}, "weight_scale': is missing"),
        (BLOCKS, {"weight_scale_inv": scales(2, 2)}, "weight': is missing; .* has weight_scale_inv"),
        (BLOCKS, {"weight": weight(), "weight_scale_inv": scales(2, 3)}, r"shape \[2, 3\], expected \[2, 2\]"),
        (BLOCKS, {"weight": weight(), "weight_scale_inv": scales()}, r"shape \[\], expected \[2, 2\]"),
        (WHOLE, {"weight": weight(), "weight_scale": scales(3)}, r"shape \[3\], expected \[1, 1\] or \[1\] or \[\]"),
        (WHOLE, {"weight": weight(), "weight_scale": scales().int()}, "is of type I32, expected F32"),
        (WHOLE, {"weight": weight()[0], "weight_scale": scales()}, "a matrix is expected"),
        (WHOLE, {"weight": weight().float(), "weight_scale": scales()}, "is of type F32, expected F8_E4M3"),
    ],
)
def test_a_damaged_weight_is_named(
    make_quantized: Any, settings: dict[str, Any], parts: dict[str, Tensor], says: str, load_guarded: Any
) -> None:
    error = load_guarded(make_quantized({DOWN: parts}, settings))
    assert isinstance(error, CheckpointError)
    with pytest.raises(ModelError, match=says):
        raise error


@pytest.mark.parametrize("kind", [torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_other_floats_of_eight_bits_are_refused_by_name(make_quantized: Any, kind: torch.dtype) -> None:
    parts = {"weight": weight().float().to(kind), "weight_scale": scales()}
    folder = make_quantized({DOWN: parts}, WHOLE)
    with pytest.raises(UnsupportedError, match=r"weight': type F8_E\w+ is not supported; supported: F8_E4M3"):
        read_model_facts(folder)


def test_floats_that_no_settings_speak_of_are_refused(make_quantized: Any) -> None:
    with pytest.raises(UnsupportedError, match="type F8_E4M3 is not read yet"):
        read_model_facts(make_quantized({DOWN: {"weight": weight()}}, None))
    with pytest.raises(UnsupportedError, match="quantized by compressed-tensors or FP8, and config"):
        read_model_facts(make_quantized({DOWN: {"weight_scale": scales()}}, None))
