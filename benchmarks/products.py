"""Products of a model's packed weights against torch's, over every shape that the model has:
``python -m benchmarks.products --model FOLDER``. One JSON line for each shape and number of rows, and for all together.

torch multiplies the same matrices as bfloat16 and as float32, with as many threads. Each repeat times the three in
turn, and what the machine can multiply at that moment, for ``share_of_peak``: on a shared host both move. A ratio is
the median of the repeats' ratios.
"""

import argparse
import ctypes
import json
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.config import EngineArgs
from octavo.engine import build_config
from octavo.loader import load_model
from octavo.platforms import current_platform

_SECONDS = 0.05  # that a timing takes at least


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.products")
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", default="512,1024", help="numbers of rows (default: 512,1024)")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    model = load_model(build_config(EngineArgs(model=args.model, dtype="bfloat16")))
    torch.set_num_threads(current_platform().facts().num_threads)
    _keep_freed_memory()
    print(
        json.dumps({"kernels": kernels.kernel_set(), "torch": torch.__version__, "peak_gflop_s": round(_peak() / 1e9)})
    )
    for rows in (int(text) for text in args.rows.split(",")):
        shapes = [
            (out_size, in_size, count, _times(rows, out_size, in_size, args.repeats))
            for (out_size, in_size), count in _shapes(model).items()
        ]
        for out_size, in_size, count, times in shapes:
            _say(
                {"rows": rows, "shape": [out_size, in_size], "in_model": count},
                [times],
                [1],
                rows * out_size * in_size,
            )
        operations = sum(rows * out_size * in_size * count for out_size, in_size, count, _ in shapes)
        _say({"rows": rows, "shape": "all"}, [each[3] for each in shapes], [each[2] for each in shapes], operations)


def _keep_freed_memory() -> None:
    """Large results are in memory that was used before, for all three: mapping takes the head longer."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
    libc.mallopt(-4, 0)  # M_MMAP_MAX


def _peak(runs: int = 9) -> float:
    """Operations a second."""
    from octavo.kernels import limits

    return max(limits.measure_bf16(runs), limits.measure_f32(runs))


def _shapes(model: nn.Module) -> dict[tuple[int, int], int]:
    """(out_size, in_size) → how often the model has it."""
    found: dict[tuple[int, int], int] = {}
    for parameter in model.parameters():
        weight = getattr(parameter, "packed", None)
        if isinstance(weight, kernels.PackedWeight):
            found[weight.shape] = found.get(weight.shape, 0) + 1
    return found


@torch.inference_mode()
def _times(rows: int, out_size: int, in_size: int, repeats: int) -> list[list[float]]:
    """Seconds a product of octavo, torch bfloat16, torch float32 and at the machine's peak, for each repeat."""
    weight = torch.randn(out_size, in_size).bfloat16()
    x = torch.randn(rows, in_size).bfloat16()
    packed, wide_weight, wide_x = kernels.pack_weight(weight), weight.float(), x.float()
    works = [
        lambda: kernels.linear(x, packed),
        lambda: nn.functional.linear(x, weight),
        lambda: nn.functional.linear(wide_x, wide_weight),
    ]
    counts = [_rounds(work) for work in works]
    operations = 2 * rows * out_size * in_size
    return [
        [_seconds(work, count) for work, count in zip(works, counts, strict=True)] + [operations / _peak(runs=1)]
        for _ in range(repeats)
    ]


def _rounds(work: Callable[[], Tensor]) -> int:
    work()
    return max(1, round(_SECONDS / _seconds(work, 1)))


def _seconds(work: Callable[[], Tensor], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        work()
    return (time.perf_counter() - start) / count


def _say(what: dict[str, object], times: list[list[list[float]]], counts: list[int], products: int) -> None:
    """``times``: of each shape, of each repeat, of the four; a model has ``counts`` of each shape."""
    repeats = [
        [sum(count * shape[repeat][who] for count, shape in zip(counts, times, strict=True)) for who in range(4)]
        for repeat in range(len(times[0]))
    ]
    rate = 2 * products / median(each[0] for each in repeats)
    found = {
        "gflop_s": round(rate / 1e9, 1),
        "share_of_peak": round(median(each[3] / each[0] for each in repeats), 3),
        "torch_bf16_ratio": round(median(each[1] / each[0] for each in repeats), 3),
        "torch_f32_ratio": round(median(each[2] / each[0] for each in repeats), 3),
    }
    print(json.dumps(what | found), flush=True)


if __name__ == "__main__":
    main()
