"""Logits of a whole text, by transformers, by octavo and by llama.cpp: float32 [tokens, vocabulary], what follows each
token. And how far two of them are apart."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from octavo.attention import AttentionMetadata, attention_layers, set_forward_context
from octavo.config import EngineArgs
from octavo.engine import build_config
from octavo.loader import load_model
from octavo.worker import Worker

__all__ = ["Logits", "divergences", "llama_cpp_logits", "octavo_logits", "transformers_logits"]

Logits = npt.NDArray[np.float32]

_REPOSITORY = Path(__file__).parent.parent
_BLOCK_SIZE = 16
_ROWS = 64  # compared at a time: a vocabulary of 150,000 in float64 is a megabyte a row


def transformers_logits(model: Path, ids: list[int], dtype: torch.dtype) -> Logits:
    """``model``: a folder, or a GGUF file, whose weights are then widened to ``dtype``."""
    if model.is_file():
        options: dict[str, Any] = {
            "gguf_file": model.name,
            "quantization_config": transformers.GgufConfig(dequantize=True),
        }
        network = transformers.AutoModelForCausalLM.from_pretrained(model.parent, dtype=dtype, **options)
    else:
        network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    with torch.inference_mode():
        found: Logits = network.eval()(torch.tensor([ids])).logits[0].float().numpy()
    return found


def octavo_logits(model: Path, ids: list[int], options: dict[str, Any]) -> Logits:
    """The text as one chunk over a KV cache of its own: prompt logprobs are bounded, and this is the whole vocabulary
    some hundred times. ``options``: as ``LLM`` takes them."""
    config = build_config(EngineArgs(model=str(model), max_model_len=len(ids), block_size=_BLOCK_SIZE, **options))
    network = load_model(config)
    worker = Worker(config, load=lambda *_: network)
    worker.load_model()
    layers, count = attention_layers(network), len(ids)
    num_blocks = -(-count // _BLOCK_SIZE)
    for name, spec in worker.get_kv_cache_specs().items():
        layers[name].bind_kv_cache(torch.zeros((num_blocks + 1) * spec.page_size_bytes, dtype=torch.uint8))
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        block_table=torch.arange(1, num_blocks + 1, dtype=torch.int32)[None],
        slot_mapping=torch.arange(count) + _BLOCK_SIZE,
        max_query_len=count,
        max_seq_len=count,
    )
    with torch.inference_mode(), set_forward_context(dict.fromkeys(layers, metadata)):
        hidden = network(torch.tensor(ids), torch.arange(count))
        found: Logits = network.compute_logits(hidden).float().numpy()
    return found


def llama_cpp_logits(python: str, model: Path, ids: list[int]) -> Logits:
    """By the interpreter ``python``, which has llama.cpp's binding. Raises RuntimeError with what it said last."""
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder, "ids.json"), Path(folder, "logits.npy")
        given.write_text(json.dumps(ids))
        words = [str(model.absolute()), str(given), str(out), str(len(os.sched_getaffinity(0)))]
        command = [python, "-m", "benchmarks.peers.llama_cpp_logits", *words]
        done = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"llama.cpp, {model.name}: {(done.stderr.strip().splitlines() or ['it died'])[-1]}")
        found: Logits = np.load(out)
    return found


def divergences(exact: Logits, other: Logits) -> list[float]:
    """KL divergence of ``other``'s next-token distribution from that of ``exact`` at each position, in nats. Raises
    ValueError for logits of another text or vocabulary."""
    if exact.shape != other.shape:
        raise ValueError(f"logits [tokens, vocabulary] of {list(other.shape)} beside those of {list(exact.shape)}")
    found: list[float] = []
    for first in range(0, len(exact), _ROWS):
        p, q = (torch.from_numpy(each[first : first + _ROWS]).double().log_softmax(-1) for each in (exact, other))
        found += (p.exp() * (p - q)).sum(-1).tolist()
    return found
