"""octavo, in the process that asks (``LLM``), with its default settings but for the prefix cache."""

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from torch import nn

import octavo
from benchmarks.peers import work
from octavo import LLM, SamplingParams
from octavo.checkpoints import iterate_tensors
from octavo.config import EngineArgs


def engine_options(flags: str) -> dict[str, Any]:
    """Flags as they are written after ``octavo serve`` → keywords of ``LLM``; bfloat16 where no type is stated."""
    parser = argparse.ArgumentParser(prog="octavo's flags", allow_abbrev=False)
    EngineArgs.add_cli_args(parser)
    return {"dtype": "bfloat16"} | EngineArgs.stated_options(parser.parse_args(shlex.split(flags)))


def main() -> None:
    args = work.options()
    options = {"max_model_len": work.MAX_MODEL_LEN, "max_num_seqs": work.MAX_STREAMS, "enable_prefix_caching": False}
    llm = LLM(args.model, **options | engine_options(args.flags))

    def generate(prompts: list[list[int]], output_len: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)

    with llm:
        model: nn.Module = llm._client._core.executor._worker._runner._model  # type: ignore[attr-defined]
        facts = {"packed_bytes": packed_bytes(model), "file_bytes": _file_bytes(Path(llm.config.model.path))}
        settings = ", ".join(filter(None, [_weights(Path(args.model)), args.flags]))
        work.measure(args, octavo.__version__, settings, generate, **facts)


def packed_bytes(model: nn.Module) -> int:
    """Of all weights in memory, as the kernels read them."""
    held = [getattr(parameter, "packed", parameter) for parameter in model.parameters()]
    parts = [part for weight in held for part in getattr(weight, "parts", [weight])]
    return sum(getattr(part, "data", part).nbytes for part in parts)


def _file_bytes(model: Path) -> int:
    """Of the same weights in the checkpoint."""
    return sum(len(tensor.data) for tensor in iterate_tensors(model))


def _weights(model: Path) -> str:
    if model.is_file():
        return "GGUF"
    config = json.loads((model / "config.json").read_text())
    return str(config.get("quantization_config", {}).get("quant_method", "bf16"))


if __name__ == "__main__":
    main()
