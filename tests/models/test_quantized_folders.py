"""Models whose weights are quantized in Hugging Face's forms compute what the same model with the dequantized weights
does: to the bit where the kernels widen them, too."""

import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from octavo.errors import CheckpointError
from tests.quantized.compressed import compressed, settings
from tests.quantized.writers import Quantized, awq_parts, gptq_parts, quantized_folder, rounded

Quantize = Callable[[str, Tensor], tuple[dict[str, Tensor], npt.NDArray[np.float32]] | None]

# What the logits of these models may be off where kernels round activations to 8 bits (0.04, and 0.06 with bfloat16).
ROUNDED = 0.1
WIDTHS = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6, "head_dim": 16}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def by(
    parts: Callable[[Quantized], dict[str, Tensor]], group_size: int = 32, bits: int = 4, **options: Any
) -> Quantize:
    def quantize(module: str, weight: Tensor) -> tuple[dict[str, Tensor], npt.NDArray[np.float32]]:
        found = rounded(weight.float(), group_size, bits)
        return parts(found), found.values

    return quantize


def gptq_with_order(module: str, weight: Tensor) -> tuple[dict[str, Tensor], npt.NDArray[np.float32]]:
    """The same for all that see the same input, as quantizers give it."""
    return in_order_of(weight.shape[1], weight)


def gptq_with_orders(module: str, weight: Tensor) -> tuple[dict[str, Tensor], npt.NDArray[np.float32]]:
    """Each its own."""
    return in_order_of(zlib.crc32(module.encode()), weight)


def in_order_of(seed: int, weight: Tensor) -> tuple[dict[str, Tensor], npt.NDArray[np.float32]]:
    groups = np.random.default_rng(seed).permutation(np.arange(weight.shape[1]) // 32)
    found = rounded(weight.float(), 32, groups=groups)
    return gptq_parts(found), found.values


def compressed_by(form: str, scheme: dict[str, Any]) -> Quantize:
    def quantize(module: str, weight: Tensor) -> tuple[dict[str, Tensor], npt.NDArray[np.float32]]:
        parts, values = compressed(weight.float(), form, **scheme)
        return parts, values.numpy()

    return quantize


def fp8_blocks(module: str, weight: Tensor) -> tuple[dict[str, Tensor], npt.NDArray[np.float32]]:
    scale = weight.float().unfold(0, 16, 16).unfold(1, 32, 32).abs().amax((2, 3)) / 448
    spread = scale.repeat_interleave(16, 0).repeat_interleave(32, 1)
    numbers = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale_inv": scale}, (numbers.float() * spread).numpy()


W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
W8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
F8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
F8_BLOCK = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}
COMPRESSED = {
    "w4a16": ("pack-quantized", W4),
    "w4a16-asymmetric": ("pack-quantized", W4 | {"symmetric": False}),
    "w8a16": ("pack-quantized", W8),
    "int8": ("int-quantized", W8),
    "float8": ("float-quantized", F8),
    "float8-blocks": ("float-quantized", F8_BLOCK),
}

FORMS: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "gptq": (by(gptq_parts), GPTQ),
    "gptq-8": (by(gptq_parts, bits=8), GPTQ | {"bits": 8}),
    "gptq-rows": (by(gptq_parts, group_size=-1), GPTQ | {"group_size": -1}),
    "gptq-128": (by(gptq_parts, group_size=128), GPTQ | {"group_size": 128}),
    "gptq-act-order": (gptq_with_order, GPTQ | {"desc_act": True}),
    "gptq-act-orders": (gptq_with_orders, GPTQ | {"desc_act": True}),
    "awq": (by(awq_parts), AWQ),
    "awq-16": (by(awq_parts, group_size=16), AWQ | {"group_size": 16}),
    "fp8": (fp8_blocks, FP8),
    **{name: (compressed_by(form, scheme), settings(form, **scheme)) for name, (form, scheme) in COMPRESSED.items()},
}


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_dequantized_weights(
    form: str,
    make_model: Any,
    paged_model: Any,
    expected_logits: Any,
    random_tokens: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OCTAVO_CPU_ISA", "torch")  # it widens every weight, so the bits must be the same
    folder = make_model(**WIDTHS)
    quantize, config = FORMS[form]
    quantized, dequantized = quantized_folder(folder, tmp_path, quantize, config)
    tokens = random_tokens(40)
    logits = paged_model(quantized).chunked(tokens, 17)
    assert torch.equal(logits, paged_model(dequantized).chunked(tokens, 17))
    torch.testing.assert_close(logits, expected_logits(dequantized, tokens), rtol=0, atol=1e-4)
    assert (logits - expected_logits(folder, tokens)).abs().max() > 1e-3  # control: quantizing has changed something


@pytest.mark.parametrize("form", FORMS)
def test_on_the_machines_kernels(
    form: str, make_model: Any, paged_model: Any, random_tokens: Any, tmp_path: Path
) -> None:
    """They may compute with the quantized weights as they are, and then round what is multiplied with them: always in
    the same way, however many rows there are."""
    quantize, config = FORMS[form]
    quantized, dequantized = quantized_folder(make_model(**WIDTHS), tmp_path, quantize, config)
    tokens = random_tokens(40)
    for dtype in ("float32", "bfloat16"):
        expected = paged_model(dequantized, dtype=dtype).chunked(tokens, 40)
        model = paged_model(quantized, dtype=dtype)
        logits = model.chunked(tokens, 40)
        assert (logits - expected).norm() < ROUNDED * expected.norm()
        for chunk_size in (1, 17):
            assert torch.equal(model.chunked(tokens, chunk_size), logits)


@pytest.mark.parametrize("form", ["w4a16", "w8a16", "float8", "float8-blocks"])
def test_logits_are_those_of_transformers(
    form: str, make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any, tmp_path: Path
) -> None:
    """Which reads the same folder by way of the compressed-tensors package (the other forms fail in it)."""
    quantize, config = FORMS[form]
    quantized, _ = quantized_folder(make_model(**WIDTHS), tmp_path, quantize, config)
    tokens = random_tokens(40)
    expected = expected_logits(quantized, tokens)
    logits = paged_model(quantized).chunked(tokens, 40)
    assert (logits - expected).norm() < ROUNDED * expected.norm()


@pytest.mark.parametrize("form", ["gptq", "gptq-act-order", "awq", "w4a16-asymmetric", "fp8"])
def test_merged_weights_and_other_row_orders(
    form: str, make_model: Any, paged_model: Any, random_tokens: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CPU_ISA", "torch")
    tokens = random_tokens(40)
    quantize, config = FORMS[form]
    names = {
        "Phi3": "_proj.weight",  # has query, key and value in one, and gate and up
        "GPTNeoX": "query_key_value.weight",  # and each head's side by side, which is put in order
    }
    for family, name in names.items():
        folder = make_model(family, **WIDTHS, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        quantized, dequantized = quantized_folder(folder, tmp_path / family, quantize, config, name)
        logits = paged_model(quantized).chunked(tokens, 40)
        assert torch.equal(logits, paged_model(dequantized).chunked(tokens, 40))


@pytest.mark.parametrize("left_out", ["q_proj", "v_proj", "up_proj", "gate_proj", "lm_head"])
@pytest.mark.parametrize("form", ["gptq", "gptq-act-order", "w8a16", "fp8"])
def test_models_of_which_a_part_is_quantized(
    form: str,
    left_out: str,
    make_model: Any,
    paged_model: Any,
    random_tokens: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parts of one merged weight among them; and the head, which most leave as it is."""
    quantize, config = FORMS[form]

    def some(module: str, weight: Tensor) -> tuple[dict[str, Tensor], npt.NDArray[np.float32]] | None:
        chosen = module.endswith(("_proj", "lm_head")) and not module.endswith(left_out)
        return quantize(module, weight) if chosen else None

    folder = make_model(**WIDTHS, vocab_size=304)  # packed by eight
    quantized, dequantized = quantized_folder(folder, tmp_path, some, config, ".weight")
    tokens = random_tokens(40)
    expected = paged_model(dequantized, dtype="bfloat16").chunked(tokens, 40)
    logits = paged_model(quantized, dtype="bfloat16").chunked(tokens, 40)
    assert (logits - expected).norm() < ROUNDED * expected.norm()
    assert torch.equal(logits, expected) == (form == "fp8")  # integers round what they are multiplied with
    monkeypatch.setenv("OCTAVO_CPU_ISA", "torch")
    logits, expected = (paged_model(path).chunked(tokens, 40) for path in (quantized, dequantized))
    assert torch.equal(logits, expected)


def test_why_weights_are_widened_is_said(
    make_model: Any, paged_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quantize, config = FORMS["gptq"]

    def no_gates(module: str, weight: Tensor) -> tuple[dict[str, Tensor], npt.NDArray[np.float32]] | None:
        return None if module.endswith("gate_proj") else quantize(module, weight)

    quantized, _ = quantized_folder(make_model(**WIDTHS), tmp_path, no_gates, config)
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    paged_model(quantized, dtype="bfloat16")
    assert "here their types or the orders of their inputs differ" in caplog.text
    caplog.clear()
    quantized, _ = quantized_folder(make_model(**WIDTHS), tmp_path / "orders", *FORMS["gptq-act-orders"])
    paged_model(quantized, dtype="bfloat16")
    assert "here their types or the orders of their inputs differ" in caplog.text
    caplog.clear()
    paged_model(quantized, dtype="float32")
    assert "float32 was asked for" in caplog.text
    caplog.clear()
    monkeypatch.setenv("OCTAVO_CPU_ISA", "torch")
    paged_model(quantized, dtype="bfloat16")
    assert "torch kernels do not compute with them" in caplog.text


def test_orders_of_inputs_are_said_and_kept(
    make_model: Any, paged_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    quantized, _ = quantized_folder(make_model(**WIDTHS), tmp_path, *FORMS["gptq-act-order"])
    paged_model(quantized, dtype="bfloat16")
    assert "8 of 10 matrices have their inputs in an order of their own (act-order)" in caplog.text
    assert "are widened" not in caplog.text
    # Query, key and value are three parts then.
    quantized, _ = quantized_folder(make_model(**WIDTHS), tmp_path / "orders", *FORMS["gptq-act-orders"])
    paged_model(quantized, dtype="bfloat16")
    assert "10 of 14 matrices have their inputs in an order of their own (act-order)" in caplog.text


@pytest.mark.parametrize("tied", [True, False])
def test_quantized_embeddings(
    tied: bool,
    make_model: Any,
    paged_model: Any,
    random_tokens: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is the head, too, is kept once."""
    folder = make_model(**WIDTHS, tie_word_embeddings=tied)
    config = settings("pack-quantized", ("Linear", "Embedding"), **W8)
    quantized, dequantized = quantized_folder(
        folder, tmp_path, compressed_by("pack-quantized", W8), config, "embed_tokens.weight"
    )
    tokens = random_tokens(40)
    expected = paged_model(dequantized, dtype="bfloat16").chunked(tokens, 40)
    logits = paged_model(quantized, dtype="bfloat16").chunked(tokens, 40)
    assert 0 < (logits - expected).norm() < ROUNDED * expected.norm()
    monkeypatch.setenv("OCTAVO_CPU_ISA", "torch")
    logits, expected = (paged_model(path).chunked(tokens, 40) for path in (quantized, dequantized))
    assert torch.equal(logits, expected)


def test_biases_of_zeros_that_the_model_does_not_have(
    make_model: Any, paged_model: Any, random_tokens: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AutoGPTQ writes one for every weight. One that is not all zeros is a part of another model."""
    monkeypatch.setenv("OCTAVO_CPU_ISA", "torch")
    folder = make_model(**WIDTHS)

    def with_bias(value: float) -> Quantize:
        def quantize(module: str, weight: Tensor) -> tuple[dict[str, Tensor], npt.NDArray[np.float32]]:
            found = rounded(weight.float(), 32)
            return gptq_parts(found) | {"bias": torch.full((len(weight),), value)}, found.values

        return quantize

    tokens = random_tokens(20)
    quantized, dequantized = quantized_folder(folder, tmp_path / "zeros", with_bias(0.0), GPTQ)
    logits, expected = (paged_model(path).chunked(tokens, 20) for path in (quantized, dequantized))
    assert torch.equal(logits, expected)
    quantized, _ = quantized_folder(folder, tmp_path / "ones", with_bias(1.0), GPTQ)
    with pytest.raises(CheckpointError, match=r"_proj.bias': is no part of LlamaForCausalLM"):
        paged_model(quantized)
