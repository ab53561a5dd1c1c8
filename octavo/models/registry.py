"""Architectures by their Hugging Face class name. A new family is one file and one line here."""

from octavo.registry import Registry

__all__ = ["REGISTRY"]

REGISTRY = Registry(
    "model architecture",
    {
        "Gemma2ForCausalLM": "octavo.models.gemma2:Gemma2ForCausalLM",
        "Gemma3ForCausalLM": "octavo.models.gemma3:Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration": "octavo.models.gemma3:Gemma3ForCausalLM",
        "GPTNeoXForCausalLM": "octavo.models.gpt_neox:GPTNeoXForCausalLM",
        "GraniteForCausalLM": "octavo.models.granite:GraniteForCausalLM",
        "GraniteMoeHybridForCausalLM": "octavo.models.granite4:GraniteMoeHybridForCausalLM",
        "LlamaForCausalLM": "octavo.models.llama:LlamaForCausalLM",
        "MistralForCausalLM": "octavo.models.llama:LlamaForCausalLM",
        "Olmo2ForCausalLM": "octavo.models.olmo2:Olmo2ForCausalLM",
        "Phi3ForCausalLM": "octavo.models.phi3:Phi3ForCausalLM",
        "Qwen2ForCausalLM": "octavo.models.qwen2:Qwen2ForCausalLM",
        "Qwen3ForCausalLM": "octavo.models.qwen3:Qwen3ForCausalLM",
        "SmolLM3ForCausalLM": "octavo.models.smollm3:SmolLM3ForCausalLM",
        "StableLmForCausalLM": "octavo.models.stablelm:StableLmForCausalLM",
    },
)
