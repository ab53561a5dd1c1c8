"""Parameters load themselves: each shard once, in its rows, of its shape."""

import numpy as np
import pytest
import torch

from octavo.checkpoints import CheckpointTensor
from octavo.errors import CheckpointError
from octavo.layers import (
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    WeightParameter,
)


def stored(values: torch.Tensor, name: str = "some.weight") -> CheckpointTensor:
    kind = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[values.dtype]
    data = values.contiguous().view(-1).view(torch.uint8).numpy()
    return CheckpointTensor(name, kind, tuple(values.shape), data, "file.safetensors")


def test_shards_fill_their_rows_in_any_order() -> None:
    parameter = WeightParameter((5, 3), torch.float32, {"q": 2, "k": 2, "v": 1})
    whole = torch.randn(5, 3)
    for shard_id, rows in (("v", slice(4, 5)), ("q", slice(0, 2)), ("k", slice(2, 4))):
        parameter.weight_loader(stored(whole[rows]), shard_id)
    assert torch.equal(parameter, whole)
    assert parameter.loaded_shards == {"q", "k", "v"}


def test_memory_is_taken_with_the_first_good_shard() -> None:
    parameter = WeightParameter((1 << 40, 1 << 20), torch.float32)
    assert parameter.full_nbytes == 1 << 62
    with pytest.raises(
        CheckpointError, match=r"file\.safetensors: tensor 'some\.weight': has shape \[2, 3\], expected"
    ):
        parameter.weight_loader(stored(torch.ones(2, 3)))
    assert parameter.numel() == 0


def test_a_shard_that_comes_twice_is_refused() -> None:
    parameter = WeightParameter((4,), torch.float32, {0: 2, 1: 2})
    parameter.weight_loader(stored(torch.ones(2)), 0)
    with pytest.raises(CheckpointError, match="is there twice"):
        parameter.weight_loader(stored(torch.zeros(2)), 0)
    assert parameter[:2].tolist() == [1, 1]


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
def test_types_are_converted(source: torch.dtype, target: torch.dtype) -> None:
    values = torch.randn(7, 5).to(source)
    parameter = WeightParameter((7, 5), target)
    parameter.weight_loader(stored(values))
    assert torch.equal(parameter, values.to(target))


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_an_offset_is_added_once_in_the_parameters_type(source: torch.dtype) -> None:
    values = (torch.randn(5) / 64).to(source)
    parameter = RMSNorm(5, 1e-6, torch.bfloat16, weight_offset=1.0).weight
    parameter.weight_loader(stored(values))
    assert torch.equal(parameter, 1.0 + values.float())
    assert not torch.equal(parameter, parameter.bfloat16().float())  # control: the model's type would round it


def test_quantized_data_are_dequantized() -> None:
    blocks = np.zeros((2, 34), np.uint8)
    blocks[:, :2] = np.array([0.5], np.float16).view(np.uint8)
    blocks[:, 2:] = np.arange(32)
    parameter = WeightParameter((2, 32), torch.bfloat16)
    parameter.weight_loader(CheckpointTensor("w", "Q8_0", (2, 32), blocks.reshape(-1), "file.gguf"))
    assert parameter.tolist() == [[0.5 * index for index in range(32)]] * 2


def test_layers_declare_their_shards() -> None:
    qkv = QKVParallelLinear(6, 4, 3, 1, bias=True, dtype=torch.float32)
    assert qkv.weight.full_shape == (20, 6)
    assert qkv.bias is not None
    assert qkv.bias.shards == {"q": slice(0, 12), "k": slice(12, 16), "v": slice(16, 20)}
    assert RowParallelLinear(6, 4, bias=False, dtype=torch.float32).bias is None


def test_a_tied_head_shares_the_embeddings_parameter() -> None:
    embedding = VocabParallelEmbedding(11, 6, torch.bfloat16)
    assert ParallelLMHead(11, 6, torch.bfloat16, tied_to=embedding).weight is embedding.weight
    assert ParallelLMHead(11, 6, torch.bfloat16).weight is not embedding.weight
