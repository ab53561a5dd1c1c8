"""How far bfloat16 is from float32, octavo's and torch's own: ``python -m benchmarks.quality --model FOLDER``.

Mean KL divergence of the next-token distributions over a fixed text (benchmarks/text.txt: the beginning of Lewis
Carroll's "Alice's Adventures in Wonderland", 1865), the bfloat16 of each against transformers' float32. One JSON line.
"""

import argparse
import json
from pathlib import Path

import torch
import transformers
from torch import Tensor

from octavo.attention import AttentionMetadata, attention_layers, set_forward_context
from octavo.config import EngineArgs
from octavo.engine import build_config
from octavo.loader import load_model

_TEXT = Path(__file__).with_name("text.txt")
_MAX_TOKENS = 1024
_BLOCK_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality")
    parser.add_argument("--model", required=True, help="folder (Hugging Face form)")
    args = parser.parse_args()
    ids = transformers.AutoTokenizer.from_pretrained(args.model)(_TEXT.read_text())["input_ids"][:_MAX_TOKENS]
    exact = _reference(args.model, torch.float32, ids)

    def divergence(other: Tensor) -> float:
        return float((exact.exp() * (exact - other)).sum(-1).mean())

    torchs, ours = divergence(_reference(args.model, torch.bfloat16, ids)), divergence(_octavo(args.model, ids))
    found = {"tokens": len(ids), "torch_bf16": torchs, "octavo_bf16": ours, "ratio": round(ours / torchs, 3)}
    print(json.dumps(found))


def _reference(model: str, dtype: torch.dtype, ids: list[int]) -> Tensor:
    """[tokens - 1, vocabulary] log-probabilities of what follows each token but the last."""
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    with torch.inference_mode():
        return network(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)


def _octavo(model: str, ids: list[int]) -> Tensor:
    """The same, the text as one chunk over a cache of its own: prompt logprobs are bounded, and this is the whole
    vocabulary a thousand times."""
    network = load_model(build_config(EngineArgs(model=model, dtype="bfloat16", max_model_len=len(ids))))
    count, layers = len(ids), attention_layers(network)
    num_blocks = -(-count // _BLOCK_SIZE)
    for layer in layers.values():
        page_bytes = layer.kv_cache_spec(_BLOCK_SIZE, "bfloat16").page_size_bytes
        layer.bind_kv_cache(torch.zeros((num_blocks + 1) * page_bytes, dtype=torch.uint8))
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
        return network.compute_logits(hidden)[:-1].double().log_softmax(-1)


if __name__ == "__main__":
    main()
