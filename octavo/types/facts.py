"""Facts that configuration is resolved from: what the checkpoint says and what the machine has."""

from typing import Any

import msgspec

__all__ = ["ModelFacts", "PlatformFacts"]


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint's metadata says, read without torch.

    Attributes:
        path: local path: a folder (Hugging Face form) or a .gguf file.
        format: ``"safetensors"`` or ``"gguf"``.
        architecture: Hugging Face class name, e.g. ``"LlamaForCausalLM"`` (GGUF's are translated).
        hf_config: the text model's config.json as a dict (for GGUF: the same keys, made from the metadata).
        vocab_size: logits width V.
        max_position_embeddings: longest sequence that the checkpoint states, tokens.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``; quantized weights count as bfloat16.
        quantization: ``"none"``, ``"gguf"``, or what the folder's weights are quantized by (``"gptq"``, …).
        quantized_as: what to call the way in which weights are quantized: GGUF's types, or as ``quantization``; empty:
            none is.
        weight_bytes: bytes of all tensors in the files.
        generation_config: generation_config.json, or {}.
        eos_token_ids: ids that end a sequence, from config, generation_config and tokenizer, without duplicates.
        fingerprint: hex digest that changes when the weights do (root of the prefix cache's hash chains).
    """

    path: str
    format: str
    architecture: str
    hf_config: dict[str, Any]
    vocab_size: int
    max_position_embeddings: int
    dtype: str
    weight_bytes: int
    generation_config: dict[str, Any]
    eos_token_ids: list[int]
    fingerprint: str
    quantization: str = "none"
    quantized_as: list[str] = []


class PlatformFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine has, as far as defaults depend on it.

    Attributes:
        name: ``"cpu"``.
        num_threads: cores that this process may use (affinity mask and cgroup quota).
        supported_dtypes: those that the kernels compute in, best first.
        default_memory_share: default of ``--gpu-memory-utilization``.
        default_max_num_batched_tokens: tokens a step.
        offline_max_num_batched_tokens: the same where nobody waits for single tokens.
        default_max_num_seqs: requests in a step.
        default_block_size: tokens.
        async_scheduling: whether overlapping scheduling with execution pays here.
    """

    name: str
    num_threads: int
    supported_dtypes: list[str]
    default_memory_share: float
    default_max_num_batched_tokens: int
    offline_max_num_batched_tokens: int
    default_max_num_seqs: int
    default_block_size: int
    async_scheduling: bool
