"""Which model, and as what."""

from dataclasses import dataclass, field
from typing import Any

from octavo.config.options import option

__all__ = ["ModelConfig"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Attributes beside the flags: ``path``, ``architecture``, ``hf_config``, … from ModelFacts.

    ``tokenizer_path``: what the tokenizer is loaded from; ``path`` unless ``--tokenizer`` was stated.
    ``default_sampling_params``: values that SamplingParams fields have where a request states none: those of
    temperature, top_p, top_k, min_p, repetition_penalty and max_tokens that the model's generation_config.json or
    ``--override-generation-config`` names.
    """

    model: str = option("alias, local folder, .gguf file or hub name")
    dtype: str = option(
        "data type of weights and activations; auto: the checkpoint's, where this machine computes in it",
        default="auto",
        choices=("auto", "bfloat16", "float32", "float16"),
    )
    max_model_len: int = option("longest prompt plus output, tokens (default: what model and memory allow)")
    served_model_name: list[str] = option("names that the API answers to (default: MODEL as given)")
    seed: int = option("seed that requests without one derive theirs from (default: drawn at start-up)")
    max_logprobs: int = option("most logprobs that a request may ask for; -1: the whole vocabulary", default=20)
    logits_processors: list[str] = option("custom logits processors, as module:Class")

    path: str = ""
    tokenizer_path: str = ""
    architecture: str = ""
    hf_config: dict[str, Any] = field(default_factory=dict)
    vocab_size: int = 0
    eos_token_ids: tuple[int, ...] = ()
    fingerprint: str = ""
    max_model_len_stated: bool = False
    default_sampling_params: dict[str, Any] = field(default_factory=dict)
