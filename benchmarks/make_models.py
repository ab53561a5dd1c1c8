"""Models to measure with: ``python -m benchmarks.make_models --help``.

GGUF files of a model in Hugging Face form: one in its own bfloat16, as llama.cpp's converter writes it, and from that
by llama.cpp's quantizer one of each type that is asked for. ``--random`` makes the model first: a Llama of about a
billion random weights, all its widths divisible by 256, so that every type can be used everywhere.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

_REPOSITORY = Path(__file__).parent.parent
_TYPES = "Q8_0,Q4_0,Q4_1,Q5_0,Q5_1,Q4_K_M,Q5_K_M,Q6_K"
_BILLION = {"hidden": 2048, "intermediate": 8192, "heads": 32, "kv_heads": 8, "vocabulary": 32_000}
_EMBEDDING_SPREAD = 0.05  # logits of a tied head then spread by about 2: neither flat nor certain
# Fields of a GGUF file that its writer gives, or that tell of its weights.
_OWN_FIELDS = ("general.architecture", "general.file_type", "general.quantization_version")


def main() -> int:
    args = _parser().parse_args()
    if args.random:
        write_random_model(args.model, **_BILLION, layers=args.layers)
    args.out.mkdir(parents=True, exist_ok=True)
    name = args.model.resolve().name
    wide = args.out / f"{name}-BF16.gguf"
    write_gguf(args.model, wide, args.like)
    print(wide)
    for type_name in filter(None, args.types.split(",")):
        file = args.out / f"{name}-{type_name}.gguf"
        if not _quantize(args.llama_cpp, wide, file, type_name):
            return 1
        print(file)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.make_models", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder in Hugging Face form, of bfloat16")
    parser.add_argument("--random", action="store_true", help="write a random model there first")
    parser.add_argument("--layers", type=int, default=16, help="of the random model (default: 16)")
    parser.add_argument("--like", type=Path, help="GGUF file of the same model, whose metadata and tokenizer are taken")
    parser.add_argument("--out", type=Path, required=True, help="folder for the GGUF files")
    parser.add_argument("--types", default=_TYPES, help="of llama.cpp's quantizer (default: %(default)s)")
    parser.add_argument("--llama-cpp", metavar="PYTHON", required=True, help="interpreter that has llama.cpp's binding")
    return parser


def write_random_model(
    folder: Path, *, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int
) -> None:
    """A Llama with a tied head, the same numbers in every run. Each matrix keeps the spread of what it multiplies; what
    is added to the residual is smaller, by the number of branches, as training begins."""
    draw = torch.Generator().manual_seed(0)

    def matrix(out_size: int, in_size: int, factor: float = 1.0) -> Tensor:
        return (torch.randn(out_size, in_size, generator=draw) * factor * in_size**-0.5).bfloat16()

    kv_size, branch = hidden // heads * kv_heads, (2 * layers) ** -0.5
    tensors = {"model.embed_tokens.weight": matrix(vocabulary, hidden, _EMBEDDING_SPREAD * hidden**0.5)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}input_layernorm.weight": torch.ones(hidden).bfloat16(),
            f"{prefix}self_attn.q_proj.weight": matrix(hidden, hidden),
            f"{prefix}self_attn.k_proj.weight": matrix(kv_size, hidden),
            f"{prefix}self_attn.v_proj.weight": matrix(kv_size, hidden),
            f"{prefix}self_attn.o_proj.weight": matrix(hidden, hidden, branch),
            f"{prefix}post_attention_layernorm.weight": torch.ones(hidden).bfloat16(),
            f"{prefix}mlp.gate_proj.weight": matrix(intermediate, hidden),
            f"{prefix}mlp.up_proj.weight": matrix(intermediate, hidden),
            f"{prefix}mlp.down_proj.weight": matrix(hidden, intermediate, branch),
        }
    tensors["model.norm.weight"] = torch.ones(hidden).bfloat16()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def write_gguf(folder: Path, file: Path, like: Path | None = None) -> None:
    """The model in ``folder`` with its weights as they are, vectors in float32.

    Args:
        like: a GGUF file of the same model: what it says beside the weights is taken over. Without one the model must
            be a Llama, and its file gets a vocabulary of single bytes and made-up words.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture, fields = _fields(config) if like is None else _copied(like)
    writer = gguf.GGUFWriter(file, architecture)
    for key, (value, kind, item_kind) in fields.items():
        writer.add_key_value(key, value, kind, item_kind)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 (it is no dict)
                _add_tensor(writer, names, heads if architecture == "llama" else {}, name, stored.get_tensor(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensor(
    writer: gguf.GGUFWriter, names: gguf.TensorNameMap, heads: dict[str, int], name: str, tensor: Tensor
) -> None:
    """``heads``: the matrices whose rows llama.cpp keeps in another order → heads in them."""
    stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if stored is None:
        raise SystemExit(f"tensor {name!r}: the gguf package knows no name for it")
    if tensor.ndim == 1:
        writer.add_tensor(stored, tensor.float().numpy())
        return
    num_heads = heads.get(stored.split(".")[-2])
    if num_heads is not None:
        # Rotary pairs: Hugging Face has a head's halves one after the other, llama.cpp the two of a pair.
        tensor = tensor.view(num_heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    data = tensor.bfloat16().contiguous().view(torch.uint8).numpy()
    writer.add_tensor(stored, data, raw_dtype=gguf.GGMLQuantizationType.BF16)


Fields = dict[str, tuple[Any, gguf.GGUFValueType, gguf.GGUFValueType | None]]


def _copied(like: Path) -> tuple[str, Fields]:
    """(architecture, the other fields) of a file."""
    reader = gguf.GGUFReader(like)
    fields: Fields = {
        key: (field.contents(), field.types[0], field.types[1] if len(field.types) > 1 else None)
        for key, field in reader.fields.items()
        if not key.startswith("GGUF.") and key not in _OWN_FIELDS
    }
    return reader.fields["general.architecture"].contents(), fields


def _fields(config: dict[str, Any]) -> tuple[str, Fields]:
    kinds = gguf.GGUFValueType
    numbers = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "vocab_size": config["vocab_size"],
    }
    fields: Fields = {f"llama.{key}": (value, kinds.UINT32, None) for key, value in numbers.items()}
    for key, value in {
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
    }.items():
        fields[f"llama.{key}"] = (value, kinds.FLOAT32, None)
    tokens = [*_byte_tokens(), "ab"]
    tokens += [f"word{index}" for index in range(len(tokens), config["vocab_size"])]
    fields |= {
        "tokenizer.ggml.model": ("gpt2", kinds.STRING, None),
        "tokenizer.ggml.pre": ("gpt-2", kinds.STRING, None),
        "tokenizer.ggml.tokens": (tokens, kinds.ARRAY, kinds.STRING),
        "tokenizer.ggml.token_type": ([1] * len(tokens), kinds.ARRAY, kinds.INT32),
        "tokenizer.ggml.merges": (["a b"], kinds.ARRAY, kinds.STRING),
        "tokenizer.ggml.bos_token_id": (0, kinds.UINT32, None),
        "tokenizer.ggml.eos_token_id": (0, kinds.UINT32, None),
    }
    return "llama", fields


def _byte_tokens() -> list[str]:
    """The 256 bytes as byte-level vocabularies write them: printable ones as they are, the others from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) for byte in shown] + [chr(0x100 + index) for index in range(len(others))]


def _quantize(python: str, source: Path, target: Path, type_name: str) -> bool:
    threads = str(len(os.sched_getaffinity(0)))
    command = [python, "-m", "benchmarks.peers.llama_cpp_quantize", str(source.absolute()), str(target.absolute())]
    done = subprocess.run([*command, type_name, threads], cwd=_REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        print(f"{type_name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
