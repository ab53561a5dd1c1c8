"""``octavo bench throughput``: many requests at once, as fast as they go."""

from collections.abc import Callable
from typing import Any

from octavo.bench.workload import loaded, random_prompts, run

__all__ = ["measure_throughput"]


def measure_throughput(
    engine_options: dict[str, Any],
    *,
    input_len: int,
    output_len: int,
    num_prompts: int,
    on_iteration: Callable[[], None],
) -> dict[str, Any]:
    """Requests and tokens a second, after one short run that nobody counts."""
    with loaded(engine_options, input_len + output_len, min(num_prompts, 128)) as llm:
        prompts = random_prompts(llm, num_prompts, input_len)
        run(llm, prompts[:1], min(output_len, 4))
        timed = run(llm, prompts, output_len)
        on_iteration()
        config = llm.config
    return {
        "model": config.model.model,
        "dtype": config.model.dtype,
        "num_prompts": num_prompts,
        "input_len": input_len,
        "output_len": output_len,
        "elapsed_s": timed.total,
        "requests_s": num_prompts / timed.total,
        "output_tokens_s": timed.num_tokens / timed.total,
        "total_tokens_s": (timed.num_tokens + num_prompts * input_len) / timed.total,
    }
