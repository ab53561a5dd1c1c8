"""Every family that checkpoints are read of has its model, and every model its family."""

import pytest
from torch import nn

from octavo.checkpoints.families import FAMILIES
from octavo.models import REGISTRY


def test_families_and_models_are_the_same() -> None:
    assert set(FAMILIES) == set(REGISTRY)


@pytest.mark.parametrize("architecture", REGISTRY)
def test_a_model_is_what_it_promises(architecture: str) -> None:
    model = REGISTRY.get(architecture)
    assert issubclass(model, nn.Module)
    assert callable(model.compute_logits)
