"""Tiny random models in Hugging Face form, with a tokenizer and a chat template."""

from pathlib import Path
from typing import Any

__all__ = ["write_tiny_llama"]

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog looks on.",
    "Once upon a time there was a server that answered the same request with the same bits.",
    "user assistant system: hello, how are you? I am fine, thank you.",
]


def _write_tokenizer(folder: Path) -> int:
    """A small byte-level BPE tokenizer with a chat template; returns its vocabulary size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        additional_special_tokens=_SPECIAL_TOKENS,
        model_max_length=512,
    )
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return int(tokenizer.get_vocab_size())


def write_tiny_llama(folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """A float32 Llama of two layers. ``overrides``: fields of LlamaConfig."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    vocab_size = _write_tokenizer(folder)
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        # Wide enough that the logits differ clearly: greedy tokens are then no matter of the last bit.
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**(settings | overrides)))
    model.save_pretrained(folder, safe_serialization=True)
    return folder
