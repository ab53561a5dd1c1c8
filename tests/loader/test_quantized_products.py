"""``--quantized-products``: integers or bfloat16, by the number of requests a step may have; never silently."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import nn

from octavo import kernels
from octavo.checkpoints import read_model_facts
from octavo.config import EngineArgs, resolve_config
from octavo.errors import ConfigError
from octavo.layers import WeightParameter
from octavo.loader import kernel_set_of, load_model
from octavo.platforms import current_platform
from tests.kernels import amx

MakeTinyLlama = Callable[..., Path]

needs_native = pytest.mark.skipif(
    current_platform().kernel_provider != "native", reason="the native kernels were not built"
)
needs_halves = pytest.mark.skipif(not amx.has_halves(), reason="no processor with AVX-512 FP16")


@pytest.fixture(autouse=True)
def kernels_are_put_back() -> Iterator[None]:
    yield
    kernels.select("torch")


@pytest.fixture
def level_amx(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OCTAVO_CPU_ISA", "amx")
    with amx.level("amx"):
        yield


def load(path: Path, products: str = "auto", max_num_seqs: int = 128, quantization: str = "int4") -> nn.Module:
    args = EngineArgs(
        model=str(path),
        dtype="bfloat16",
        quantization=quantization,
        quantized_products=products,
        max_num_seqs=max_num_seqs,
    )
    return load_model(resolve_config(args, read_model_facts(path), current_platform().facts()))


def widened(model: nn.Module) -> set[bool]:
    """Of the quantized matrices."""
    packed = [each.packed for each in model.parameters() if isinstance(each, WeightParameter)]
    quantized = [each for each in packed if isinstance(each, kernels.PackedWeight) and each.kept_as]
    assert quantized
    return {each.half_scale != 0 for each in quantized}


@needs_halves
@pytest.mark.usefixtures("level_amx")
@pytest.mark.parametrize(
    ("products", "max_num_seqs", "expected"),
    [
        ("auto", 128, True),
        ("auto", 5, True),
        ("auto", 4, False),
        ("auto", 1, False),
        ("bfloat16", 1, True),
        ("integers", 128, False),
    ],
)
def test_on_level_amx_it_is_what_was_asked_for_and_the_log_says_so(
    make_tiny_llama: MakeTinyLlama,
    caplog: pytest.LogCaptureFixture,
    products: str,
    max_num_seqs: int,
    expected: bool,
) -> None:
    caplog.set_level(logging.INFO)
    model = load(make_tiny_llama(), products, max_num_seqs)
    assert widened(model) == {expected}
    said = f"become bfloat16 while they are multiplied (--quantized-products {products}, --max-num-seqs {max_num_seqs})"
    assert (said in caplog.text) == expected
    assert kernel_set_of(model) == ("native-amx-widened" if expected else "native-amx")


@needs_native
@pytest.mark.parametrize("level", ["avx2", "generic"])
def test_a_level_that_cannot_multiplies_integers_or_refuses(
    make_tiny_llama: MakeTinyLlama, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    monkeypatch.setenv("OCTAVO_CPU_ISA", level)
    path = make_tiny_llama()
    model = load(path)
    assert widened(model) == {False}
    assert kernel_set_of(model) == f"native-{level}"
    with pytest.raises(
        ConfigError, match=f"--quantized-products bfloat16: native-{level} kernels .* leave the flag out"
    ):
        load(path, "bfloat16")


@needs_native
@pytest.mark.parametrize("products", ["auto", "bfloat16", "integers"])
def test_nothing_is_asked_of_a_model_that_is_not_quantized(
    make_tiny_llama: MakeTinyLlama, caplog: pytest.LogCaptureFixture, products: str
) -> None:
    caplog.set_level(logging.INFO)
    load(make_tiny_llama(), products, quantization="auto")
    assert "while they are multiplied" not in caplog.text
    assert (f"--quantized-products {products} changes nothing" in caplog.text) == (products != "auto")
