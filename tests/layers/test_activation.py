"""Activations are found by their Hugging Face names."""

import pytest
import torch
from transformers.activations import ACT2FN

from octavo.checkpoints import CheckpointTensor
from octavo.errors import UnsupportedError
from octavo.layers import GatedColumnParallelLinear, activation


@pytest.mark.parametrize("name", ["silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast"])
def test_a_name_means_what_it_means_in_transformers(name: str) -> None:
    x = torch.linspace(-5, 5, 33).view(3, 11)
    layer = GatedColumnParallelLinear(11, 11, name, bias=False, dtype=torch.float32)
    for shard_id, part in enumerate((torch.eye(11), 3 * torch.eye(11))):
        data = part.view(-1).view(torch.uint8).numpy()
        layer.weight.weight_loader(CheckpointTensor("w", "F32", (11, 11), data, "file.safetensors"), shard_id)
    torch.testing.assert_close(layer(x), ACT2FN[name](x) * 3 * x, rtol=1e-5, atol=1e-5)
    if "gelu" in name:
        torch.testing.assert_close(activation(name)(x), ACT2FN[name](x), rtol=1e-5, atol=1e-5)


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UnsupportedError, match="hidden_act 'relu6' is not supported; supported: silu, swish, gelu,"):
        GatedColumnParallelLinear(11, 11, "relu6", bias=False, dtype=torch.float32)
    with pytest.raises(UnsupportedError, match="hidden_act 'silu' of an MLP without a gate is not supported"):
        activation("silu")
