"""``octavo bench latency``: one batch after another, each from its prompts to its last token."""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from octavo.bench.roofline import measure_roofline, step_bytes
from octavo.bench.workload import loaded, random_prompts, run, summary

__all__ = ["measure_latency"]


def measure_latency(
    engine_options: dict[str, Any],
    *,
    input_len: int,
    output_len: int,
    batch_size: int,
    num_iters_warmup: int,
    num_iters: int,
    on_iteration: Callable[[], None],
) -> dict[str, Any]:
    """Times in milliseconds. ``bandwidth_share``: weight bytes of a decode step, as the kernels keep them, ÷ measured
    bandwidth ÷ its time; ``checkpoint_share``: the same with the bytes that they have in ``dtype``.
    ``engine_ms_per_step``: what a step takes beside the native kernels. All are None where those are not in use; what
    is said of decode steps is, where one token is generated: it comes from the prompt's step."""
    num_tokens = input_len + output_len
    with loaded(engine_options, num_tokens, batch_size) as llm:
        prompts = random_prompts(llm, batch_size, input_len)
        from octavo import kernels

        native = kernels.chosen_provider() == "native"
        runs, outside = [], []
        for index in range(num_iters_warmup + num_iters):
            before = _kernel_seconds(native)
            timed = run(llm, prompts, output_len)
            on_iteration()
            if index >= num_iters_warmup:
                runs.append(timed)
                outside.append((timed.total - (_kernel_seconds(native) - before)) / timed.num_steps)
        config, kernel_set = llm.config, kernels.kernel_set()
    decode = [(each.last_token - each.first_token) / (output_len - 1) for each in runs] if output_len > 1 else []
    found = {
        "model": config.model.model,
        "dtype": config.model.dtype,
        "kernels": kernel_set,
        "input_len": input_len,
        "output_len": output_len,
        "batch_size": batch_size,
        "latency_ms": summary([each.total for each in runs]),
        "first_token_ms": summary([each.first_token for each in runs]),
        "decode_step_ms": summary(decode) if decode else None,
        "prefill_tokens_s": batch_size * input_len / median(each.first_token for each in runs),
        "decode_tokens_s": batch_size / median(decode) if decode else None,
        "bandwidth_gb_s": None,
        "bandwidth_share": None,
        "checkpoint_share": None,
        "engine_ms_per_step": None,
    }
    if native:
        weights = config.model.dtype, config.model.quantization
        bandwidth = measure_roofline(config.model.model, *weights)["bandwidth_gb_s"]
        found |= {"bandwidth_gb_s": bandwidth, "engine_ms_per_step": median(outside) * 1e3}
        for name, as_kept in (("bandwidth_share", True), ("checkpoint_share", False)):
            at_best = step_bytes(Path(config.model.path), *weights, as_kept=as_kept) / (bandwidth * 1e9)
            found[name] = at_best / median(decode) if decode else None
    return found


def _kernel_seconds(native: bool) -> float:
    if not native:
        return 0.0
    from octavo.kernels.limits import kernel_seconds

    return kernel_seconds()
