"""Architectures by their Hugging Face class name. A new family is one file and one line here."""

from octavo.registry import Registry

__all__ = ["REGISTRY"]

REGISTRY = Registry(
    "model architecture",
    {
        "LlamaForCausalLM": "octavo.models.llama:LlamaForCausalLM",
        "MistralForCausalLM": "octavo.models.llama:LlamaForCausalLM",
    },
)
