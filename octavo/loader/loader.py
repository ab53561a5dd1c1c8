"""Checkpoint → model: streams tensors into the parameters that they belong to, and insists that nothing is left over.

The model is built with empty parameters; each tensor is converted and packed by its parameter, straight from the mapped
file, so that the checkpoint never lies in memory a second time.
"""

import math
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

from torch import nn

from octavo import kernels
from octavo.checkpoints import CheckpointTensor, CheckpointTensors
from octavo.config import QUANTIZED_WHILE_LOADING, ModelConfig, OctavoConfig
from octavo.errors import CheckpointError, ConfigError, ModelError
from octavo.layers import ShardId, WeightParameter
from octavo.logging import init_logger
from octavo.platforms import current_platform

__all__ = ["load_model"]

logger = init_logger(__name__)

Progress = Callable[[str, float], None]
Assignments = dict[str, tuple[WeightParameter, ShardId]]
Job = tuple[WeightParameter, CheckpointTensor, int]  # rows of the checkpoint → from this row on

_HEAD = "lm_head.weight"
# Of a tensor that a thread reads, converts and packs at a time: threads share out large tensors, too.
_PIECE_BYTES = 4 * 2**20
# Up to so many rows integers are faster than what is widened first.
_FEW_STREAMS = 4


def load_model(
    config: OctavoConfig,
    progress: Progress | None = None,
    on_built: Callable[[nn.Module], None] = lambda model: None,
) -> nn.Module:
    """The model with its weights, ready for a forward under ``torch.inference_mode()``.

    Args:
        progress: called with ("loading weights", share done from 0 to 1).
        on_built: called with the model before its weights are read.

    Raises:
        UnsupportedError: an architecture or a variant of it that octavo does not have.
        CheckpointError: a tensor is missing, unknown, there twice or of the wrong shape.
        ModelError: the model does not fit into memory.
        ConfigError: weights are to be quantized, or multiplied as bfloat16, and the chosen kernels cannot.
    """
    started = time.monotonic()
    kernels.select(current_platform().kernel_provider)
    logger.info("kernels: %s", kernels.describe())
    model = _build(config.model)
    on_built(model)
    loaded_bytes = _load_weights(model, config.model, progress or (lambda stage, share: None))
    gib, seconds = loaded_bytes / 2**30, time.monotonic() - started
    parameters = _parameters(model)
    kinds = _kinds(parameters, config.model)
    logger.info("loaded %s: %.2f GiB of weights as %s in %.1f s", config.model.path, gib, kinds, seconds)
    _choose_products(parameters, config)
    _report_coded(parameters)
    _report_orders(parameters)
    _report_widened(parameters, config.model)
    _report_quantized(model, config.model)
    return model


def kernel_set_of(model: nn.Module) -> str:
    """What tells apart models of the same weights that give other bits: the kernels, and how quantized matrices are
    multiplied."""
    widened = any(each.half_scale != 0 for each in _matrices(_parameters(model)))
    return kernels.kernel_set() + ("-widened" if widened else "")


def _parameters(model: nn.Module) -> list[WeightParameter]:
    return [each for each in model.parameters() if isinstance(each, WeightParameter)]


def _kinds(parameters: list[WeightParameter], config: ModelConfig) -> str:
    """The types of the matrices, the most frequent first."""
    counts = Counter(name or config.dtype for each in parameters for name in each.kept_as)
    return ", ".join(name for name, _ in counts.most_common())


def _choose_products(parameters: list[WeightParameter], config: OctavoConfig) -> None:
    """How quantized matrices are multiplied: as --quantized-products says; auto: by how many rows a step may have."""
    asked, most = config.model.quantized_products, config.scheduler.max_num_seqs
    quantized = [each for each in _matrices(parameters) if each.kept_as and not each.kept_as.startswith("F8")]
    if asked != "auto" and not quantized:
        logger.warning("--quantized-products %s changes nothing: no matrix of this model stays quantized", asked)
    if not quantized or asked == "integers" or (asked == "auto" and most <= _FEW_STREAMS):
        return
    for each in parameters:
        each.widen_in_products()
    widened = sum(each.half_scale != 0 for each in _matrices(parameters))
    if widened:
        logger.info(
            "%d of %d quantized matrices become bfloat16 while they are multiplied (--quantized-products %s, "
            "--max-num-seqs %d)",
            *(widened, len(quantized), asked, most),
        )
    elif asked == "bfloat16":
        raise ConfigError(
            f"--quantized-products bfloat16: {kernels.kernel_set()} kernels multiply these weights as integers only "
            "(level amx with --dtype bfloat16 can do both); leave the flag out"
        )


def _matrices(parameters: list[WeightParameter]) -> list[kernels.PackedWeight]:
    weights = [each.packed for each in parameters]
    parts = [part for each in weights for part in (each.parts if isinstance(each, kernels.MergedWeight) else (each,))]
    return [each for each in parts if isinstance(each, kernels.PackedWeight)]


def _report_coded(parameters: list[WeightParameter]) -> None:
    """What takes fewer bytes than the checkpoint says, and is the same all the same."""
    matrices = _matrices(parameters)
    coded = [each for each in matrices if each.coded]
    if coded:
        wide = sum(math.prod(each.shape) * each.dtype.itemsize for each in coded)
        kept = sum(len(each.data) for each in coded)
        logger.info(
            "%d of %d matrices have their exponents coded, without loss: %.1f MiB became %.1f MiB",
            *(len(coded), len(matrices), wide / 2**20, kept / 2**20),
        )


def _report_orders(parameters: list[WeightParameter]) -> None:
    """What is done before a product, and costs time."""
    matrices = _matrices(parameters)
    ordered = sum(each.input_order is not None for each in matrices)
    if ordered:
        logger.info(
            "%d of %d matrices have their inputs in an order of their own (act-order), into which activations are put "
            "before each product",
            *(ordered, len(matrices)),
        )


def _quantize_to(config: ModelConfig) -> str | None:
    """The type that plain weights are to be kept as; None: they stay as they are."""
    type_name = QUANTIZED_WHILE_LOADING.get(config.quantization)
    if type_name is not None and not kernels.keeps(type_name):
        raise ConfigError(
            f"--quantization {config.quantization}: {kernels.chosen_provider()} kernels do not compute with quantized "
            "weights, so nothing would be gained; leave the flag out, or use the native kernels"
        )
    return type_name


def _report_quantized(model: nn.Module, config: ModelConfig) -> None:
    """What ``--quantization`` has done, and which matrices it has left."""
    type_name = _quantize_to(config)
    if type_name is None:
        return
    wide = []
    stored = kept = count = 0
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, WeightParameter):
            continue
        for stored_bytes, kept_bytes in parameter.quantized.values():
            stored, kept = stored + stored_bytes, kept + kept_bytes
        count += bool(parameter.quantized)
        if parameter.is_vocabulary:
            wide.append(f"{name} ({parameter.full_nbytes / 2**20:.1f} MiB)")
    logger.info(
        "--quantization %s: %d matrices are kept as %s, %.1f MiB of the checkpoint as %.1f MiB; as %s stay %s, biases "
        "and norms",
        *(config.quantization, count, type_name, stored / 2**20, kept / 2**20, config.dtype, ", ".join(wide)),
    )


def _way_out(config: ModelConfig, tensors: CheckpointTensors) -> str:
    """What to do about weights that do not fit."""
    quantized = any(kernels.keeps(name) for name in tensors.types.values())
    if quantized and not _keeps_quantized(config):
        return "without --dtype float32 the checkpoint's weights stay quantized"
    if not quantized and config.quantization != "int4":
        return "choose a smaller model, or quantize it while it is loaded (--quantization int4)"
    return "choose a smaller model"


def _keeps_quantized(config: ModelConfig) -> bool:
    """Their products round inputs to 8 bits, or weights to bfloat16; who asks for float32 wants no rounding."""
    return config.dtype != "float32"


def _report_widened(parameters: list[WeightParameter], config: ModelConfig) -> None:
    """What was quantized and is not any more, and what that costs: a token reads all weights."""
    stored: Counter[str] = Counter()
    wide: Counter[str] = Counter()
    for parameter in parameters:
        for name, (stored_bytes, wide_bytes) in parameter.widened.items():
            stored[name] += stored_bytes
            wide[name] += wide_bytes
    for name, num_bytes in wide.items():
        logger.warning(
            "weights of type %s are widened to %s, for %s: %.1f MiB became %.1f MiB, which every token has to read",
            *(name, config.dtype, _why_widened(name, config), stored[name] / 2**20, num_bytes / 2**20),
        )


def _why_widened(type_name: str, config: ModelConfig) -> str:
    if not kernels.keeps(type_name):
        return f"{kernels.chosen_provider()} kernels do not compute with them"
    if not _keeps_quantized(config):
        return "float32 was asked for, in which nothing is rounded (--dtype bfloat16 keeps them)"
    return (
        "gates and what they belong to lie beside each other, and here their types or the orders of their inputs differ"
    )


def _build(config: ModelConfig) -> nn.Module:
    # The law puts models above the loader, so they are found by name.
    architecture = import_module("octavo.models").REGISTRY.get(config.architecture)
    model: nn.Module = architecture(config)
    return model.eval()


def _load_weights(model: nn.Module, config: ModelConfig, progress: Progress) -> int:
    """Fills every parameter; returns the parameters' bytes."""
    assignments = _assignments(model)
    quantize_to = _quantize_to(config)
    tensors = CheckpointTensors(Path(config.path), config.hf_overrides)
    for name, type_name in tensors.types.items():
        if name in assignments:
            parameter, shard_id = assignments[name]
            kept = type_name if quantize_to or _keeps_quantized(config) else ""
            parameter.expect(shard_id, kept, tensors.input_orders.get(name))
            if quantize_to is not None:
                parameter.quantize_to(quantize_to)
    total = sum(parameter.full_nbytes for parameter in {id(p): p for p, _ in assignments.values()}.values())
    kinds = _kinds(_parameters(model), config)
    available = current_platform().available_memory_bytes()
    if total > available:
        raise ModelError(
            f"{config.path}: the weights need {total / 2**30:.1f} GiB as {kinds}, and "
            f"{available / 2**30:.1f} GiB of memory are available; {_way_out(config, tensors)}"
        )
    done = 0
    progress("loading weights", 0.0)
    with warnings.catch_warnings():
        # Mapped files are read-only, and torch says so of every tensor made from one; nobody writes to them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for size in _in_threads(_fill, _jobs(_wanted(tensors, assignments, model))):
            done += size
            progress("loading weights", done / total)
    for name, (parameter, shard_id) in assignments.items():
        # The parts of a merged parameter come before the whole, whose name is told only where there are no parts.
        missing = parameter.shards.keys() - parameter.loaded_shards
        if missing and (shard_id is None or shard_id in missing):
            raise CheckpointError(f"is missing; {type(model).__name__} needs it", file=config.path, tensor=name)
    return total


def _assignments(model: nn.Module) -> Assignments:
    """Name of a checkpoint's tensor → the parameter, and the shard of it (None: all), that it fills."""
    packed: Mapping[str, Mapping[str, ShardId]] = getattr(model, "packed_modules_mapping", {})
    found: Assignments = {}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, WeightParameter):
            raise TypeError(f"parameter {name} is no WeightParameter and cannot load itself")
        *parents, module, field = name.split(".")
        # Some families store merged weights as they are used (qkv_proj, gate_up_proj), most the parts.
        for source, shard_id in {**packed.get(module, {}), module: None}.items():
            found[".".join([*parents, source, field])] = (parameter, shard_id)
    return found


def _wanted(
    tensors: CheckpointTensors, assignments: Assignments, model: nn.Module
) -> Iterator[tuple[CheckpointTensor, WeightParameter, ShardId]]:
    """The checkpoint's tensors with where they go; one that goes nowhere is an error, unless it is known why."""
    zeros = 0
    for tensor in tensors:
        if tensor.name in assignments:
            yield tensor, *assignments[tensor.name]
        elif tensor.name == _HEAD:
            logger.info("%s is not used: the head is tied to the embedding (tie_word_embeddings)", tensor.name)
        elif tensor.name.endswith(".bias") and not tensor.data.any():
            zeros += 1  # quantizers write one for each weight, whether the model has it or not
        else:
            raise CheckpointError(f"is no part of {type(model).__name__}", file=tensor.file, tensor=tensor.name)
    if zeros:
        logger.info("%d biases are not used: %s has none there, and they are all zeros", zeros, type(model).__name__)


def _jobs(wanted: Iterable[tuple[CheckpointTensor, WeightParameter, ShardId]]) -> Iterator[Job]:
    for tensor, parameter, shard_id in wanted:
        first_row = parameter.claim(tensor, shard_id)
        for row, piece in tensor.row_pieces(_PIECE_BYTES):
            yield parameter, piece, first_row + row


def _fill(job: Job) -> int:
    """Returns the bytes that the model has of it."""
    parameter, piece, first_row = job
    parameter.fill(piece, first_row)
    return parameter.share_nbytes(piece.shape[0], first_row)


def _in_threads(work: Callable[[Job], int], jobs: Iterable[Job]) -> Iterator[int]:
    """Results in order. Two threads' worth of jobs are taken at a time, so that few tensors are in memory at once."""
    num_threads = current_platform().facts().num_threads
    pending: deque[Future[int]] = deque()
    # numpy and torch release the Python lock, so that reading, dequantizing and copying overlap.
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="load")
    try:
        for job in jobs:
            pending.append(pool.submit(work, job))
            if len(pending) >= 2 * num_threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
