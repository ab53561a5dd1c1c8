"""Models from GGUF files, written by the gguf package, against the same weights in transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.models.gguf_files import write_gguf

# Widths that whole blocks of 32 quantized values divide.
WIDTHS = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
Convert = Callable[..., Path]


@pytest.fixture
def to_gguf() -> Convert:
    """``to_gguf(folder, quantization="F32", rope_freqs=None)`` → path, with the same weights."""

    def convert(folder: Path, quantization: str = "F32", rope_freqs: np.ndarray | None = None) -> Path:
        more = None if rope_freqs is None else {"rope_freqs.weight": rope_freqs.astype(np.float32)}
        return write_gguf(folder, "llama", permuted=True, quantization=quantization, more_tensors=more)

    return convert


@pytest.mark.parametrize("tied", [False, True])
def test_a_float32_file_gives_the_logits_of_its_source(
    make_model: Any, to_gguf: Convert, paged_model: Any, expected_logits: Any, random_tokens: Any, tied: bool
) -> None:
    folder = make_model(**WIDTHS, tie_word_embeddings=tied)
    tokens = random_tokens(40)
    got = paged_model(to_gguf(folder)).chunked(tokens, 17)
    torch.testing.assert_close(got, expected_logits(folder, tokens), rtol=0, atol=1e-4)


def test_frequency_factors_in_the_file_are_the_llama3_scaling(
    make_model: Any, to_gguf: Convert, paged_model: Any, expected_logits: Any, random_tokens: Any
) -> None:
    folder = make_model(**WIDTHS, rope_parameters=LLAMA3)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](transformers.AutoConfig.from_pretrained(folder), "cpu")
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    tokens = random_tokens(100)
    expected = expected_logits(folder, tokens)
    got = paged_model(to_gguf(folder, rope_freqs=(plain / scaled).numpy())).chunked(tokens, 100)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    control = paged_model(to_gguf(folder)).chunked(tokens, 100)
    assert (control - expected).abs().max() > 1e-2


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_quantized_weights_are_those_of_the_gguf_package(
    make_model: Any, to_gguf: Convert, paged_model: Any, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CPU_ISA", "torch")  # native kernels pack the weights
    folder = make_model(**WIDTHS)
    path = to_gguf(folder, quantization)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}

    def weight(name: str) -> Tensor:
        tensor = stored[name]
        return torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).clone()

    def hf_order(rows: Tensor, num_heads: int) -> Tensor:
        return rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    block = "blk.1."
    query, key = hf_order(weight(block + "attn_q.weight"), 4), hf_order(weight(block + "attn_k.weight"), 2)
    expected = {
        "model.embed_tokens.weight": weight("token_embd.weight"),
        "lm_head.weight": weight("output.weight"),
        "model.layers.1.self_attn.qkv_proj.weight": torch.cat([query, key, weight(block + "attn_v.weight")]),
        "model.layers.1.self_attn.o_proj.weight": weight(block + "attn_output.weight"),
        "model.layers.1.mlp.gate_up_proj.weight": torch.cat(
            [weight(block + "ffn_gate.weight"), weight(block + "ffn_up.weight")]
        ),
        "model.layers.1.mlp.down_proj.weight": weight(block + "ffn_down.weight"),
        "model.layers.1.input_layernorm.weight": weight(block + "attn_norm.weight"),
    }
    for dtype in ("float32", "bfloat16"):
        loaded = dict(paged_model(path, dtype=dtype).model.named_parameters())
        for name, values in expected.items():
            assert torch.equal(loaded[name], values.to(getattr(torch, dtype))), name
