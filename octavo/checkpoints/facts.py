"""What configuration is resolved from: the facts of a checkpoint, read without torch and without its weights."""

from pathlib import Path
from typing import Any

from octavo.checkpoints.checkpoint import Checkpoint, open_checkpoint
from octavo.checkpoints.fingerprint import fingerprint
from octavo.types import ModelFacts

__all__ = ["read_model_facts"]


def read_model_facts(path: Path, hf_overrides: dict[str, Any] | None = None) -> ModelFacts:
    """Facts of a folder in Hugging Face form or a GGUF file, as `resolve_model` gives it; ``hf_overrides`` are merged
    into its configuration before that is checked.

    Raises:
        CheckpointError: a missing, truncated or malformed file.
        UnsupportedError: a format, architecture, type or quantization that octavo does not have.
    """
    checkpoint = open_checkpoint(path, hf_overrides)
    return ModelFacts(
        path=str(path),
        format=checkpoint.format,
        architecture=checkpoint.architecture,
        hf_config=checkpoint.hf_config,
        vocab_size=checkpoint.hf_config["vocab_size"],
        max_position_embeddings=checkpoint.hf_config["max_position_embeddings"],
        dtype=checkpoint.dtype,
        quantization=checkpoint.quantization,
        quantized_as=_quantized_as(checkpoint),
        weight_bytes=sum(tensor.num_bytes for tensor in checkpoint.tensors),
        generation_config=checkpoint.generation_config,
        eos_token_ids=checkpoint.eos_token_ids,
        fingerprint=fingerprint(checkpoint),
    )


def _quantized_as(checkpoint: Checkpoint) -> list[str]:
    if checkpoint.quantization not in ("none", "gguf"):
        return [checkpoint.quantization]
    return sorted({tensor.entry.type.name for tensor in checkpoint.tensors if tensor.entry.type.block_size > 1})
