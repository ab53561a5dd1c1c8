"""Tiny random models in Hugging Face form, and a runner that feeds octavo's model through a paged KV cache by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from octavo.attention import AttentionMetadata, attention_layers, set_forward_context
from octavo.checkpoints import read_model_facts
from octavo.config import EngineArgs, resolve_config
from octavo.loader import load_model
from octavo.platforms import current_platform

SHAPE = {
    "vocab_size": 301,
    "hidden_size": 72,
    "intermediate_size": 104,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}

MakeModel = Callable[..., Path]
PROMPT_SEED = 7
NUM_TOKENS = 100


def _random(model: transformers.PreTrainedModel, seed: int, norm_mean: float) -> None:
    """Every parameter random, biases and norms too: what stays at 0 or 1 would hide that it is not used."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(norm_mean + 0.2 * drawn if "norm" in name else 0.2 * drawn)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """``make_model(family="Llama", dtype="float32", shard_size="1GB", seed=0, config="", norm_mean=1.0, **config
    fields)`` → folder. ``config``: name of the configuration's class where it is not the family's; ``norm_mean``: what
    the norms' weights lie around."""

    def make(
        family: str = "Llama",
        dtype: str = "float32",
        shard_size: str = "1GB",
        seed: int = 0,
        config: str = "",
        norm_mean: float = 1.0,
        **fields: Any,
    ) -> Path:
        settings = getattr(transformers, config or f"{family}Config")(**(SHAPE | fields))
        model = getattr(transformers, f"{family}ForCausalLM")(settings)
        _random(model, seed, norm_mean)
        folder = tmp_path_factory.mktemp(family.lower())
        model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard_size)
        return folder

    return make


class PagedModel:
    """Runs steps of made-up batches. Blocks are given out in a scrambled order; every place of the cache is NaN until
    it is written, and blocks that a sliding window has left behind become block 0, which is never written.
    """

    def __init__(self, path: Path, dtype: str = "float32", block_size: int = 16, num_blocks: int = 200) -> None:
        args = EngineArgs(model=str(path), dtype=dtype)
        self.config = resolve_config(args, read_model_facts(path), current_platform().facts())
        self.model = load_model(self.config)
        self.block_size = block_size
        self.layers = attention_layers(self.model)
        for layer in self.layers.values():
            spec = layer.kv_cache_spec(block_size, dtype)
            layer.bind_kv_cache(torch.full((num_blocks * spec.page_size_bytes,), 0xFF, dtype=torch.uint8))
        self.windows = {layer.sliding_window for layer in self.layers.values()}
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(num_blocks)) + 1
        self.free_blocks = {window: order.tolist() for window in self.windows}
        self.blocks: dict[tuple[int | None, Any], list[int]] = {}
        self.lengths: dict[Any, int] = {}

    def step(self, batch: list[tuple[Any, list[int]]]) -> Tensor:
        """(request, its next tokens), … → logits [num_tokens, vocab_size] of all of them."""
        spans = []
        for request, tokens in batch:
            begin = self.lengths.get(request, 0)
            end = self.lengths[request] = begin + len(tokens)
            spans.append((request, begin, end))
        metadata = {window: self._metadata(window, spans) for window in self.windows}
        context = {name: metadata[layer.sliding_window] for name, layer in self.layers.items()}
        input_ids = [token for _, tokens in batch for token in tokens]
        positions = [position for _, begin, end in spans for position in range(begin, end)]
        with torch.inference_mode(), set_forward_context(context):
            hidden = self.model(torch.tensor(input_ids), torch.tensor(positions))
            logits: Tensor = self.model.compute_logits(hidden)
        return logits

    def _metadata(self, window: int | None, spans: list[tuple[Any, int, int]]) -> AttentionMetadata:
        """For the layers of one window: they have blocks of their own."""
        slots, starts, tables = [], [0], []
        for request, begin, end in spans:
            blocks = self.blocks.setdefault((window, request), [])
            while len(blocks) * self.block_size < end:
                blocks.append(self.free_blocks[window].pop())
            oldest = 0 if window is None else max(0, begin - window + 1)
            blocks[: oldest // self.block_size] = [0] * (oldest // self.block_size)
            slots += [blocks[p // self.block_size] * self.block_size + p % self.block_size for p in range(begin, end)]
            starts.append(starts[-1] + end - begin)
            tables.append(blocks)
        width = max(len(blocks) for blocks in tables)
        ends = [end for _, _, end in spans]
        return AttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            block_table=torch.tensor([blocks + [0] * (width - len(blocks)) for blocks in tables], dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            max_query_len=max(end - begin for _, begin, end in spans),
            max_seq_len=max(ends),
        )

    def chunked(self, tokens: list[int], chunk_size: int) -> Tensor:
        """Logits of a new request whose tokens come ``chunk_size`` at a time."""
        request = object()
        chunks = [tokens[start : start + chunk_size] for start in range(0, len(tokens), chunk_size)]
        return torch.cat([self.step([(request, chunk)]) for chunk in chunks])


@pytest.fixture(scope="session")
def paged_model() -> type[PagedModel]:
    return PagedModel


@pytest.fixture(scope="session")
def check_family(expected_logits: Any, random_tokens: Any) -> Callable[..., None]:
    """``check_family(folder, gguf=None)``: logits of the model in ``folder`` (or of the GGUF file made from it) are
    those of transformers, at once and in chunks, for a prompt longer than the windows."""

    def check(folder: Path, gguf: Path | None = None) -> None:
        tokens = random_tokens(NUM_TOKENS)
        expected = expected_logits(folder, tokens)
        assert expected.std() > 0.5  # logits near zero would be equal whatever the model does
        model = PagedModel(gguf or folder)
        for chunk_size in (NUM_TOKENS, 1, 16, 17):
            torch.testing.assert_close(model.chunked(tokens, chunk_size), expected, rtol=0, atol=1e-4)

    return check


@pytest.fixture(scope="session")
def expected_logits() -> Callable[[Path, list[int]], Tensor]:
    """``expected_logits(folder, tokens)``: what transformers computes in float32, [num_tokens, vocab_size]."""

    def compute(path: Path, tokens: list[int]) -> Tensor:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.inference_mode():
            logits: Tensor = model(torch.tensor([tokens])).logits[0]
        return logits

    return compute


@pytest.fixture(scope="session")
def random_tokens() -> Callable[..., list[int]]:
    """``random_tokens(count, seed=0)``."""

    def draw(count: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(PROMPT_SEED + seed)
        drawn: list[int] = torch.randint(SHAPE["vocab_size"], (count,), generator=generator).tolist()
        return drawn

    return draw
