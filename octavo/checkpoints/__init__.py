"""Checkpoints: finding and fetching them, and reading what is in them. Knows nothing of torch or of requests.

Two forms are read: a folder in Hugging Face form (config.json and safetensors) and a GGUF file, which comes out under
the Hugging Face names. What differs between model families is in families/. No code from a checkpoint is ever run.
"""

from octavo.checkpoints.aliases import ALIASES, DEFAULT_MODEL, Alias
from octavo.checkpoints.facts import read_model_facts
from octavo.checkpoints.gguf_file import read_gguf_metadata
from octavo.checkpoints.hf_folder import read_generation_config
from octavo.checkpoints.hub import FetchOptions
from octavo.checkpoints.resolve import pull, resolve_model, resolve_tokenizer
from octavo.checkpoints.tensor_types import readable_type, to_float32
from octavo.checkpoints.tensors import CheckpointTensor, CheckpointTensors, iterate_tensors

__all__ = [
    "ALIASES",
    "DEFAULT_MODEL",
    "Alias",
    "CheckpointTensor",
    "CheckpointTensors",
    "FetchOptions",
    "iterate_tensors",
    "pull",
    "read_generation_config",
    "read_gguf_metadata",
    "read_model_facts",
    "readable_type",
    "resolve_model",
    "resolve_tokenizer",
    "to_float32",
]
