"""What the sampler promises holds for the torch definition and for the native kernel (all levels: tests/kernels)."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from octavo import kernels


@pytest.fixture(scope="module", params=["torch", *(["native"] if find_spec("octavo._native") else [])])
def provider(request: pytest.FixtureRequest) -> Iterator[str]:
    """The tests of a module that asks for it run once with each."""
    kernels.select(request.param)
    yield request.param
    kernels.select("torch")
