"""``--quantization int8 | int4``: a plain checkpoint's matrices are quantized as they come; nothing is held twice."""

import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from octavo import kernels
from octavo.bench.roofline import step_bytes
from octavo.checkpoints import read_model_facts
from octavo.config import EngineArgs, OctavoConfig, resolve_config
from octavo.core.kv_cache import hash_root_key
from octavo.errors import CheckpointError, ConfigError, ModelError
from octavo.layers import WeightParameter
from octavo.loader import load_model
from octavo.platforms import current_platform
from tests.models.gguf_files import write_gguf

needs_native = pytest.mark.skipif(
    current_platform().kernel_provider != "native", reason="the native kernels were not built"
)
TYPES = {"int8": "Q8_0", "int4": "Q4_1"}
GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture(autouse=True)
def kernels_are_put_back() -> Iterator[None]:
    yield
    kernels.select("torch")


def config_of(path: Path, quantization: str, dtype: str = "bfloat16") -> OctavoConfig:
    args = EngineArgs(model=str(path), dtype=dtype, quantization=quantization)
    return resolve_config(args, read_model_facts(path), current_platform().facts())


def parameters_of(model: nn.Module) -> dict[str, WeightParameter]:
    return {name: each for name, each in model.named_parameters() if isinstance(each, WeightParameter)}


def edited(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


@needs_native
@pytest.mark.parametrize("quantization", TYPES)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_each_matrix_is_kept_as_the_quantizer_s_blocks(
    make_tiny_llama: Callable[..., Path], quantization: str, stored: torch.dtype
) -> None:
    path = edited(make_tiny_llama(), lambda tensors: tensors.update({k: v.to(stored) for k, v in tensors.items()}))
    model = load_model(config_of(path, quantization))
    tensors, parameters = load_file(path / "model.safetensors"), parameters_of(model)
    layer = "model.layers.1."
    whole = {
        f"{layer}self_attn.qkv_proj.weight": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        f"{layer}self_attn.o_proj.weight": ["self_attn.o_proj"],
        f"{layer}mlp.gate_up_proj.weight": ["mlp.gate_proj", "mlp.up_proj"],
        f"{layer}mlp.down_proj.weight": ["mlp.down_proj"],
    }
    for name, parts in whole.items():
        rows = torch.cat([tensors[f"{layer}{part}.weight"] for part in parts])
        blocks, shape = kernels.quantize.definition(TYPES[quantization], rows), (rows.shape[0], rows.shape[1])
        expected = kernels.pack_blocks(TYPES[quantization], blocks, shape, torch.bfloat16, gated="gate" in name)
        packed = parameters[name].packed
        assert isinstance(packed, kernels.PackedWeight)
        assert isinstance(expected, kernels.PackedWeight)
        assert packed.kept_as == TYPES[quantization]
        assert torch.equal(packed.data, expected.data), name


@needs_native
@pytest.mark.parametrize("tied", [True, False])
def test_embedding_head_and_norms_stay_wide(make_tiny_llama: Callable[..., Path], tied: bool) -> None:
    parameters = parameters_of(load_model(config_of(make_tiny_llama(tie_word_embeddings=tied), "int4")))
    kinds = {name: each.kept_as for name, each in parameters.items()}
    wide = {"model.embed_tokens.weight", *(() if tied else ("lm_head.weight",))}
    assert {name for name, kind in kinds.items() if kind == [""]} == wide
    assert all(kind == ["Q4_1"] for name, kind in kinds.items() if "proj" in name)
    assert all(kind == [] for name, kind in kinds.items() if "norm" in name)


@needs_native
def test_the_log_says_what_was_quantized_and_what_stays_wide(
    make_tiny_llama: Callable[..., Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    path = make_tiny_llama(hidden_size=256, intermediate_size=1024, num_hidden_layers=1)
    with caplog.at_level(logging.INFO, logger="octavo"):
        load_model(config_of(path, "int4"))
    tensors = load_file(path / "model.safetensors")
    values = sum(each.numel() for name, each in tensors.items() if "proj" in name)
    assert "weights as Q4_1, bfloat16" in caplog.text
    assert (
        f"--quantization int4: 4 matrices are kept as Q4_1, {values * 4 / 2**20:.1f} MiB of the checkpoint as "
        f"{values * 20 / 32 / 2**20:.1f} MiB; as bfloat16 stay model.embed_tokens.weight ("
    ) in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="octavo"):
        load_model(config_of(path, "auto"))
    assert "--quantization" not in caplog.text


@needs_native
def test_memory_is_checked_for_what_will_be_kept(
    make_tiny_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny_llama(hidden_size=256, intermediate_size=1024, num_hidden_layers=1)
    sizes = {}
    for quantization in ("auto", "int8", "int4"):
        parameters = parameters_of(load_model(config_of(path, quantization)))
        sizes[quantization] = sum(each.full_nbytes for each in parameters.values())
    assert sizes["int4"] < sizes["int8"] < sizes["auto"]
    monkeypatch.setattr(type(current_platform()), "available_memory_bytes", lambda platform: sizes["int4"])
    load_model(config_of(path, "int4"))
    with pytest.raises(ModelError, match=r"the weights need .* GiB as Q8_0, bfloat16"):
        load_model(config_of(path, "int8"))


@needs_native
@pytest.mark.parametrize("quantization", ["auto", *TYPES])
def test_measurements_count_the_bytes_that_a_step_reads(
    make_tiny_llama: Callable[..., Path], quantization: str
) -> None:
    path = make_tiny_llama(hidden_size=80, intermediate_size=208, num_attention_heads=5, num_key_value_heads=5)
    parameters = parameters_of(load_model(config_of(path, quantization)))
    read = sum(each.full_nbytes for name, each in parameters.items() if "embed" not in name and "norm" not in name)
    norms = sum(each.numel() for name, each in parameters.items() if "norm" in name)
    assert step_bytes(path, "bfloat16", quantization) == read + 2 * norms


@needs_native
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_weight_that_is_no_number_is_an_error_that_names_the_tensor(
    make_tiny_llama: Callable[..., Path], value: float
) -> None:
    path = edited(make_tiny_llama(), lambda tensors: tensors[GATE][77].fill_(value))
    load_model(config_of(path, "auto"))
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight.*: cannot be quantized: a number in it is") as caught:
        load_model(config_of(path, "int4"))
    assert caught.value.tensor == GATE


def test_kernels_that_compute_with_wide_weights_only_say_so(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CPU_ISA", "torch")
    with pytest.raises(ConfigError, match="--quantization int8: torch kernels do not compute with quantized weights"):
        load_model(config_of(tiny_llama_dir, "int8", "float32"))


@pytest.mark.parametrize("quantization", TYPES)
def test_what_is_quantized_already_is_refused_by_name(make_tiny_llama: Callable[..., Path], quantization: str) -> None:
    folder = make_tiny_llama()
    file = write_gguf(folder, "llama", permuted=True, quantization="Q4_0")
    message = rf"--quantization {quantization}: \S*model\.gguf is quantized already \(Q4_0\), .*leave the flag out"
    with pytest.raises(ConfigError, match=message):
        config_of(file, quantization)
    write_gguf(folder, "llama", permuted=True)
    assert config_of(file, quantization).model.quantization == quantization


@needs_native
def test_a_gguf_file_of_plain_numbers_gives_the_same_blocks_as_the_folder(make_tiny_llama: Callable[..., Path]) -> None:
    folder = make_tiny_llama()
    models = [load_model(config_of(path, "int4")) for path in (folder, write_gguf(folder, "llama", permuted=True))]
    ours, theirs = (
        {name: each.packed.data for name, each in parameters_of(model).items() if "proj" in name} for model in models
    )
    assert len(ours) == 8
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_cached_prefixes_of_other_weights_are_others(tiny_llama_dir: Path) -> None:
    fingerprints = [config_of(tiny_llama_dir, each).model.fingerprint for each in ("auto", "none", "int8", "int4")]
    assert fingerprints[0] == fingerprints[1]
    assert len({hash_root_key(each, "native-avx2", "auto") for each in fingerprints}) == 3


LAYERS, HIDDEN, INTERMEDIATE = 8, 1024, 3072
LAYER_VALUES = HIDDEN * (2 * HIDDEN + 2 * 256) + 3 * HIDDEN * INTERMEDIATE

# Loads a checkpoint and prints by how many bytes of its own (not of mapped files) the process grew at most.
PEAK = """
import re, sys, threading, time
from pathlib import Path
from octavo import kernels
from octavo.checkpoints import read_model_facts
from octavo.checkpoints import tensors
from octavo.config import EngineArgs, resolve_config
from octavo.loader import load_model
from octavo.platforms import current_platform

path, quantization, twice = Path(sys.argv[1]), sys.argv[2], len(sys.argv) > 3
kept = []
if twice:  # what a loader would do that first reads and then converts
    read = tensors._read
    tensors._read = lambda *args: kept.append(read(*args).data.copy()) or read(*args)

def own_bytes():
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

config = resolve_config(
    EngineArgs(model=str(path), dtype="bfloat16", quantization=quantization),
    read_model_facts(path), current_platform().facts())
kernels.select(current_platform().kernel_provider)
before, peak, done = own_bytes(), 0, False

def watch(*_):
    global peak
    peak = max(peak, own_bytes())

def watch_on():
    while not done:
        watch()
        time.sleep(0.002)

thread = threading.Thread(target=watch_on)
thread.start()
model = load_model(config, watch)
done = True
thread.join()
print(peak - before, sum(each.full_nbytes for each in model.parameters()))
"""


@pytest.fixture(scope="module")
def large_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 200 MB in bfloat16, most of it in layers of 24 MB."""
    path = tmp_path_factory.mktemp("large")
    layer = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (256, HIDDEN),
        "self_attn.v_proj": (256, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (256, HIDDEN), "model.norm.weight": (HIDDEN,)}
    rng = np.random.default_rng(0)
    noise = torch.from_numpy(rng.standard_normal(1 << 22, dtype=np.float32)).bfloat16()
    tensors = {name: noise[: torch.Size(shape).numel()].view(shape).clone() for name, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors")
    fields = {"vocab_size": 256, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5}
    named = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True}
    (path / "config.json").write_text(json.dumps(fields | heads | named | {"dtype": "bfloat16"}))
    return path


def peak_and_size(path: Path, *words: str) -> tuple[int, int]:
    done = subprocess.run([sys.executable, "-c", PEAK, str(path), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    grown, size = map(int, re.findall(r"\d+", done.stdout))
    return grown, size


@needs_native
@pytest.mark.parametrize("quantization", TYPES)
def test_no_more_memory_is_taken_than_the_quantized_model_and_a_layer(large_dir: Path, quantization: str) -> None:
    grown, size = peak_and_size(large_dir, quantization)
    bits = {"int8": 8.5, "int4": 5}[quantization]
    assert size == pytest.approx(LAYERS * LAYER_VALUES * bits / 8, rel=0.01)
    assert grown <= size + 2 * LAYER_VALUES
    assert grown >= 0.9 * size  # it was measured


@needs_native
def test_control_a_second_copy_would_be_noticed(large_dir: Path) -> None:
    grown, size = peak_and_size(large_dir, "int4", "twice")
    assert grown > size + 2 * LAYER_VALUES
