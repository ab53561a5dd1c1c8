"""Tiny checkpoints that load and generate: what the fuzzer damages. Always the same."""

import io
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import sentencepiece
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests.fuzz.families import FAMILIES, GGUF_FAMILIES, write_family, write_family_gguf
from tests.fuzz.quantized import QUANTIZED, write_quantized

__all__ = ["Subject", "write_subjects"]

_WORDS = "the quick brown fox jumps over the lazy dog and the dog looks on once upon a time in a land far away"
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_HIDDEN, _INTERMEDIATE, _HEADS, _KV_HEADS, _LAYERS = 64, 256, 4, 2, 2
_Q = gguf.GGMLQuantizationType


@dataclass(frozen=True)
class Subject:
    """A checkpoint.

    Attributes:
        name: of its folder.
        model: what octavo is given, below the folder; "" is the folder itself.
        files: names of the files that may be damaged.
        weight: how often it is chosen.
    """

    name: str
    model: str
    files: tuple[str, ...]
    weight: int = 1


def write_subjects(folder: Path) -> list[Subject]:
    """Each in a sub-folder of its own name."""
    small = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json")
    subjects = [
        Subject("single", "", ("model.safetensors", *small), weight=6),
        Subject("sharded", "", (*shards, "config.json", "special_tokens_map.json", "tokenizer.json"), weight=6),
        Subject("bpe", "model.gguf", ("model.gguf",), weight=6),
        Subject("spm", "model.gguf", ("model.gguf",), weight=6),
    ]
    for subject in subjects:
        (folder / subject.name).mkdir(parents=True)
    backend = _byte_level_tokenizer()
    weights = _weights(backend.get_vocab_size())
    _write_folder(folder / "single", backend, weights, shards=False)
    _write_folder(folder / "sharded", backend, weights, shards=True)
    _write_gguf(folder / "bpe" / "model.gguf", weights, _bpe_metadata(backend))
    spm = _spm_metadata()
    _write_gguf(folder / "spm" / "model.gguf", _weights(len(spm["tokens"])), spm)
    families = _write_families(folder, backend.get_vocab_size())
    return [*subjects, *_write_sentence_piece(folder), *families, *_write_quantized(folder)]


def _write_sentence_piece(folder: Path) -> list[Subject]:
    """Folders whose tokenizer is a SentencePiece model alone."""
    subjects = []
    for kind in ("bpe", "unigram"):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([_WORDS] * 20),
            model_writer=model,
            model_type=kind,
            vocab_size=320,
            hard_vocab_limit=False,
            byte_fallback=True,
            num_threads=1,
            minloglevel=2,
        )
        proto = model.getvalue()
        size = sentencepiece.SentencePieceProcessor(model_proto=proto).get_piece_size()
        name = f"sentencepiece-{kind}"
        (folder / name).mkdir()
        (folder / name / "tokenizer.model").write_bytes(proto)
        _write_json(folder / name / "tokenizer_config.json", {"add_bos_token": True, "bos_token": "<s>"})
        _write_json(folder / name / "config.json", _config(size))
        save_file(_weights(size), folder / name / "model.safetensors")
        subjects.append(Subject(name, "", ("tokenizer.model", "tokenizer.model", "tokenizer_config.json"), weight=3))
    return subjects


def _write_families(folder: Path, vocab_size: int) -> list[Subject]:
    subjects = []
    for config_class in FAMILIES:
        write_family(folder / config_class, config_class, vocab_size)
        shutil.copy(folder / "single" / "tokenizer.json", folder / config_class)
        # Of a family's own there is most in its configuration.
        subjects.append(Subject(config_class, "", ("config.json", "config.json", "model.safetensors")))
    for arch in GGUF_FAMILIES:
        write_family_gguf(folder / arch, arch, vocab_size)
        subjects.append(Subject(arch, "model.gguf", ("model.gguf",)))
    return subjects


def _write_quantized(folder: Path) -> list[Subject]:
    subjects = []
    for name in QUANTIZED:
        write_quantized(folder / "single", folder / name, name)
        subjects.append(Subject(name, "", ("config.json", "model.safetensors", "model.safetensors"), weight=2))
    return subjects


def _byte_level_tokenizer() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([_WORDS], trainer)
    return backend


def _weights(vocab_size: int) -> dict[str, npt.NDArray[np.float32]]:
    """Under Hugging Face's names."""
    random = np.random.default_rng(0)
    head_dim = _HIDDEN // _HEADS
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocab_size, _HIDDEN), "model.norm": (_HIDDEN,)}
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj": (_HEADS * head_dim, _HIDDEN),
            prefix + "self_attn.k_proj": (_KV_HEADS * head_dim, _HIDDEN),
            prefix + "self_attn.v_proj": (_KV_HEADS * head_dim, _HIDDEN),
            prefix + "self_attn.o_proj": (_HIDDEN, _HEADS * head_dim),
            prefix + "mlp.gate_proj": (_INTERMEDIATE, _HIDDEN),
            prefix + "mlp.up_proj": (_INTERMEDIATE, _HIDDEN),
            prefix + "mlp.down_proj": (_HIDDEN, _INTERMEDIATE),
            prefix + "input_layernorm": (_HIDDEN,),
            prefix + "post_attention_layernorm": (_HIDDEN,),
        }
    return {
        name + ".weight": (random.standard_normal(shape, np.float32) * 0.2 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }


def _write_folder(
    folder: Path, backend: tokenizers.Tokenizer, weights: dict[str, npt.NDArray[np.float32]], shards: bool
) -> None:
    _write_json(folder / "config.json", _config(backend.get_vocab_size()))
    _write_json(folder / "generation_config.json", {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "eos_token_id": 2})
    backend.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>", "lstrip": False}}
    if not shards:
        added = {"0": {"content": "<|endoftext|>", "special": True}}
        settings = {"added_tokens_decoder": added, "add_bos_token": True, "model_max_length": 256}
        _write_json(folder / "tokenizer_config.json", names | settings)
        (folder / "chat_template.jinja").write_text(_TEMPLATE)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return
    _write_json(folder / "special_tokens_map.json", names)
    _write_json(folder / "tokenizer_config.json", {"chat_template": _TEMPLATE})
    halves = [name for name in weights if "layers.0" in name], [name for name in weights if "layers.0" not in name]
    weight_map = {}
    for index, half in enumerate(halves, 1):
        file = f"model-{index:05d}-of-00002.safetensors"
        save_file({name: weights[name] for name in half}, folder / file)
        weight_map |= dict.fromkeys(half, file)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": 1}, "weight_map": weight_map})


def _config(vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "bos_token_id": 1,
        "eos_token_id": [2],
        "dtype": "float32",
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1))


def _bpe_metadata(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=lambda token: model["vocab"][token])
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "types": [3 if token in _SPECIAL else 1 for token in tokens],
        "merges": [" ".join(merge) for merge in model["merges"]],
        "scores": None,
    }


def _spm_metadata() -> dict[str, Any]:
    """SentencePiece's form: scores in place of merges, and a token for each byte."""
    letters = ["▁", *sorted(set(_WORDS) - {" "})]
    words = sorted({"▁" + word for word in _WORDS.split()} | {word[:2] for word in _WORDS.split()})
    pieces = [piece for piece in dict.fromkeys([*words, *letters]) if piece]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    scores = [0.0] * 259 + [-float(index) for index in range(len(pieces))]
    return {"model": "llama", "pre": "default", "tokens": tokens, "types": types, "merges": None, "scores": scores}


def _write_gguf(path: Path, weights: dict[str, npt.NDArray[np.float32]], vocabulary: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(_HIDDEN)
    writer.add_feed_forward_length(_INTERMEDIATE)
    writer.add_block_count(_LAYERS)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(_HIDDEN // _HEADS)
    writer.add_vocab_size(len(vocabulary["tokens"]))
    writer.add_tokenizer_model(vocabulary["model"])
    writer.add_tokenizer_pre(vocabulary["pre"])
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    if vocabulary["merges"] is not None:
        writer.add_token_merges(vocabulary["merges"])
    if vocabulary["scores"] is not None:
        writer.add_token_scores(vocabulary["scores"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template(_TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, _LAYERS)
    for index, (name, weight) in enumerate(weights.items()):
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        kind = _kind(name, index)
        if weight.ndim == 1 or kind is None:
            writer.add_tensor(gguf_name, weight)
        elif kind in (_Q.Q4_K, _Q.Q6_K):  # the package cannot quantize to these; blocks of zeros are of any type
            block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            shape = (weight.shape[0], weight.shape[1] // block_size * block_bytes)
            writer.add_tensor(gguf_name, np.zeros(shape, np.uint8), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _kind(name: str, index: int) -> gguf.GGMLQuantizationType | None:
    """One tensor of each type; superblocks need rows of 256."""
    if "down_proj" in name:
        return _Q.Q4_K if "layers.0" in name else _Q.Q6_K
    return [None, _Q.Q8_0, _Q.Q4_0, _Q.Q4_1, _Q.F16, _Q.BF16, _Q.Q5_0][index % 7]
