"""The attention layer's contract with the worker: its spec, its cache, and the forward context."""

import threading

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.attention import (
    Attention,
    AttentionMetadata,
    attention_backend,
    attention_layers,
    get_forward_context,
    set_forward_context,
)
from octavo.errors import UnsupportedError
from octavo.types import FullAttentionSpec, SlidingWindowSpec


def make_layer(name: str = "layer", window: int | None = None) -> Attention:
    return Attention(name, num_heads=4, num_kv_heads=2, head_size=8, scale=0.3, sliding_window=window)


def decode(block: int, length: int) -> AttentionMetadata:
    """One token at the end of a request that lies in one block of 16."""
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        block_table=torch.tensor([[block]], dtype=torch.int32),
        slot_mapping=torch.tensor([16 * block + length - 1]),
        max_query_len=1,
        max_seq_len=length,
    )


def step(layer: Attention, metadata: AttentionMetadata, seed: int, dtype: str = "float32") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(1, width, generator=generator).to(getattr(torch, dtype)) for width in (32, 16, 16)]
    with set_forward_context({layer.name: metadata}):
        output: Tensor = layer(*rows, torch.tensor([0]))
    return output


def test_the_spec_says_what_a_token_needs() -> None:
    shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": "bfloat16"}
    assert make_layer().kv_cache_spec(16, "bfloat16") == FullAttentionSpec(**shape)
    assert make_layer(window=5).kv_cache_spec(16, "bfloat16") == SlidingWindowSpec(**shape, sliding_window=5)


def test_a_cache_must_be_whole_blocks() -> None:
    layer = make_layer()
    with pytest.raises(RuntimeError, match=r"kv_cache_spec\(\) comes before"):
        layer.bind_kv_cache(torch.zeros(100, dtype=torch.uint8))
    page = layer.kv_cache_spec(16, "float32").page_size_bytes
    for wrong in (torch.zeros(page + 1, dtype=torch.uint8), torch.zeros(2, page, dtype=torch.uint8)):
        with pytest.raises(ValueError, match=f"not whole blocks of {page} bytes"):
            layer.bind_kv_cache(wrong)


def test_a_layer_without_cache_or_context_says_which_is_missing() -> None:
    layer = make_layer()
    with pytest.raises(RuntimeError, match="layer: no KV cache is bound"):
        step(layer, decode(1, 1), 0)
    with pytest.raises(RuntimeError, match="outside of set_forward_context"):
        get_forward_context()


def test_the_context_ends_with_its_block_and_belongs_to_its_thread() -> None:
    metadata = {"layer": decode(1, 1)}
    failures: list[BaseException] = []

    def other_thread() -> None:
        try:
            get_forward_context()
        except RuntimeError as error:
            failures.append(error)

    with set_forward_context(metadata):
        assert get_forward_context() is metadata
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
    assert len(failures) == 1
    with pytest.raises(RuntimeError):
        get_forward_context()


@pytest.mark.parametrize("provider", ["torch", "native"])
@pytest.mark.parametrize(
    ("dtype", "kept"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("float32", "fp8"), ("bfloat16", "fp8")],
)
def test_a_block_is_bytes_that_can_be_moved(dtype: str, kept: str, provider: str) -> None:
    kernels.select(provider)
    try:
        block_is_bytes(dtype, kept)
    finally:
        kernels.select("torch")


def block_is_bytes(dtype: str, kept: str) -> None:
    layer = make_layer()
    page = layer.kv_cache_spec(16, kept).page_size_bytes
    raw = torch.full((4 * page,), 0xFF, dtype=torch.uint8)
    layer.bind_kv_cache(raw)
    for length in range(1, 6):
        step(layer, decode(1, length), length, dtype)
    expected = step(layer, decode(1, 6), 6, dtype)
    assert expected.isfinite().all()
    raw.view(4, page)[3] = raw.view(4, page)[1]
    raw.view(4, page)[1] = 0xFF
    assert torch.equal(step(layer, decode(3, 6), 6, dtype), expected)


def test_a_table_rotates_query_and_key_and_without_one_nothing_is() -> None:
    angles = torch.outer(torch.arange(3.0), torch.tensor([1.0, 0.1]))
    table = torch.cat([angles.cos(), angles.sin()], dim=1)

    def turned(x: Tensor, position: int) -> Tensor:
        """The first four of each head's eight channels, in pairs two apart."""
        heads = x.view(-1, 8)
        pairs = torch.complex(heads[:, :2], heads[:, 2:4]) * torch.polar(torch.ones(2), angles[position])
        return torch.cat([pairs.real, pairs.imag, heads[:, 4:]], dim=1).view(1, -1)

    def outputs(table: Tensor | None, *, by_hand: bool) -> list[Tensor]:
        layer = make_layer()
        layer.bind_kv_cache(torch.zeros(2 * layer.kv_cache_spec(16, "float32").page_size_bytes, dtype=torch.uint8))
        found = []
        for position in range(3):
            generator = torch.Generator().manual_seed(position)
            query, key, value = (torch.randn(1, width, generator=generator) for width in (32, 16, 16))
            if by_hand:
                query, key = turned(query, position), turned(key, position)
            with set_forward_context({"layer": decode(1, position + 1)}):
                found.append(layer(query, key, value, torch.tensor([position]), table))
        return found

    expected = outputs(None, by_hand=True)
    torch.testing.assert_close(outputs(table, by_hand=False), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(outputs(None, by_hand=False)[2], expected[2], atol=1e-3)


def test_soft_cap_and_sinks_reach_the_scores() -> None:
    def outputs(**settings: object) -> Tensor:
        layer = Attention("layer", num_heads=4, num_kv_heads=2, head_size=8, scale=0.3, **settings)  # type: ignore[arg-type]
        layer.bind_kv_cache(torch.zeros(2 * layer.kv_cache_spec(16, "float32").page_size_bytes, dtype=torch.uint8))
        step(layer, decode(1, 1), 1)
        return step(layer, decode(1, 2), 2)

    plain, sinks = outputs(), torch.tensor([-1e4, 0.0, 1e4, 1e4])
    assert not torch.allclose(outputs(logits_soft_cap=0.1), plain)
    heads, expected = outputs(sinks=sinks).view(4, 8), plain.view(4, 8)
    assert torch.equal(heads[0], expected[0])
    assert not torch.allclose(heads[1], expected[1])
    assert not heads[2:].any()


def test_sinks_that_are_a_parameter_have_the_name_that_their_owner_gives_them() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sinks = torch.nn.Parameter(torch.zeros(4))
            self.attn = Attention("layer", num_heads=4, num_kv_heads=2, head_size=8, scale=0.3, sinks=self.sinks)

    assert [name for name, _ in Block().named_parameters()] == ["sinks"]


def test_layers_are_found_by_name_in_order() -> None:
    names = [f"layers.{index}" for index in (0, 1, 10, 2)]
    model = torch.nn.ModuleList(make_layer(name) for name in names)
    assert list(attention_layers(model)) == names


def test_the_backend_names_its_layout() -> None:
    kernels.select("torch")
    assert attention_backend().layout == "kv,token,head,channel"
    kernels.select("native")
    assert attention_backend().layout == "kv,head,tile,channel"
    kernels.select("torch")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_that_the_native_kernels_have_no_room_for_are_refused_when_the_cache_is_bound(dtype: str) -> None:
    kernels.select("native")
    try:
        layer = Attention("odd", num_heads=2, num_kv_heads=1, head_size=15, scale=0.3)
    finally:
        kernels.select("torch")
    raw = torch.zeros(layer.kv_cache_spec(16, dtype).page_size_bytes, dtype=torch.uint8)
    if dtype == "float32":
        layer.bind_kv_cache(raw)
    else:
        with pytest.raises(UnsupportedError, match=r"heads of 15 channels.*use --dtype float32"):
            layer.bind_kv_cache(raw)
