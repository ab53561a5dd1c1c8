"""Families in bfloat16: near to what transformers computes in float32, and nearer than transformers in bfloat16."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.models import test_gpt_neox, test_granite, test_phi3, test_stablelm

MODELS: dict[str, dict[str, Any]] = {
    "phi3": test_phi3.BASE,
    "granite": test_granite.VARIANTS["granite 3"],
    "granite 4": test_granite.VARIANTS["granite 4"],
    "stablelm": {**test_stablelm.BASE, "qk_layernorm": True},
    "stablelm, parallel": {**test_stablelm.BASE, "use_parallel_residual": True},
    "gpt_neox": test_gpt_neox.BASE,
    "gpt_neox, sequential": {**test_gpt_neox.BASE, "use_parallel_residual": False},
}


def divergence(got: Tensor, expected: Tensor) -> float:
    """Mean over the tokens of the KL divergence, in nats."""
    pointwise = torch.nn.functional.kl_div(
        got.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="none"
    )
    return float(pointwise.sum(-1).mean())


def in_bfloat16(folder: Path, tokens: list[int]) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens])).logits[0].float()
    return logits


@pytest.mark.parametrize("name", MODELS)
def test_logits_in_bfloat16_are_near_those_in_float32(
    make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any, name: str
) -> None:
    path = make_model(**MODELS[name])
    model = paged_model(path, dtype="bfloat16")
    assert {parameter.dtype for parameter in model.model.parameters()} == {torch.bfloat16}
    tokens = random_tokens(100)
    expected = expected_logits(path, tokens)
    got = model.chunked(tokens, 17)
    assert got.dtype == torch.float32
    assert 0 < divergence(got, expected) < divergence(in_bfloat16(path, tokens), expected) < 0.02
