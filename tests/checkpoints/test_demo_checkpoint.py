"""The demo model's file: its facts, and every tensor against the `gguf` package's dequantization in float32."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.checkpoints import iterate_tensors, read_gguf_metadata, read_model_facts, resolve_model

# Where rows stand in a GGUF's Q and K: position 2p + s of a head is Hugging Face's position p + s × head_dim / 2.
HEAD_DIM = 64
STORED_AT = np.arange(HEAD_DIM).reshape(HEAD_DIM // 2, 2).T.reshape(-1)


@pytest.fixture(scope="module")
def demo() -> Path:
    return resolve_model("smollm2")


def test_facts_of_the_demo_model(demo: Path) -> None:
    facts = read_model_facts(demo)
    assert facts.architecture == "LlamaForCausalLM"
    assert facts.dtype == "bfloat16"
    assert facts.vocab_size == 49152
    assert facts.max_position_embeddings == 8192
    assert facts.eos_token_ids == [2]
    assert facts.weight_bytes == 96576768
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "head_dim": HEAD_DIM}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "rope_theta": 100000.0, "tie_word_embeddings": True}
    assert facts.hf_config.items() >= (sizes | heads).items()


def test_metadata_of_the_demo_model(demo: Path) -> None:
    metadata = read_gguf_metadata(demo)
    assert len(metadata["tokenizer.ggml.tokens"]) == 49152
    assert metadata["tokenizer.ggml.model"] == "gpt2"
    assert "<|im_start|>" in metadata["tokenizer.chat_template"]


def test_every_tensor_equals_the_gguf_package_bit_for_bit(demo: Path) -> None:
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(demo).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    count = 0
    for tensor in iterate_tensors(demo):
        stem = names.get_name(tensor.name, try_suffixes=(".weight",))
        stored = reference[str(stem)]
        expected = gguf.quants.dequantize(stored.data, stored.tensor_type)
        if "attn_q." in stored.name or "attn_k." in stored.name:
            expected = expected.reshape(-1, HEAD_DIM, expected.shape[-1])[:, STORED_AT].reshape(expected.shape)
        found = tensor.to_float32()
        assert found.shape == expected.shape
        assert np.array_equal(found.view(np.uint32), np.ascontiguousarray(expected).view(np.uint32)), tensor.name
        assert tensor.type == stored.tensor_type.name
        count += 1
    assert count == len(reference) == 272
