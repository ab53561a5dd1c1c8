"""Faults planted into the processes of a real server: leaks, and forwards that fail or compute NaN.

``planted(folder, fault)`` gives the environment of such a server. Python imports ``sitecustomize`` from that folder in
each of its processes, and that imports this module, which waits for the module to be changed.
"""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["install", "planted"]

_VARIABLE = "OCTAVO_TEST_FAULT"
_ROOT = Path(__file__).parents[2]


def planted(folder: Path, fault: str) -> dict[str, str]:
    """Args:

    folder: an empty one.
    fault: ``"leak front-end 64"`` or ``"leak engine 64"``: bytes for each token; ``"raise 5"``: in the forward of the
        fifth step; ``"nan 5"``: the logits of that step's first row; ``"nan-kv 5"``: all that the model keeps of the
        tokens of that step.
    """
    (folder / "sitecustomize.py").write_text("from tests.faults import planted\n\nplanted.install()\n")
    search_path = [str(folder), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {_VARIABLE: fault, "PYTHONPATH": os.pathsep.join(search_path)}


def install() -> None:
    """Called in each process of the server, before anything of octavo's is imported."""
    kind, *words = os.environ[_VARIABLE].split()
    if kind == "leak":
        where, num_bytes = words
        name, leak = _LEAKS[where]
        sys.meta_path.insert(0, _After(name, lambda module: leak(module, int(num_bytes))))
    else:
        step = int(words[0])
        sys.meta_path.insert(0, _After("octavo.worker.model_runner", lambda module: _FAULTS[kind](module, step)))


class _After(importlib.abc.MetaPathFinder):
    """Calls a function with a module when that has been imported."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self._name = name
        self._change = change

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            self._change(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


# ---- leaks ----------------------------------------------------------------------------------------------------------


def _leak_in_front_end(module: Any, num_bytes: int) -> None:
    process, kept = module.OutputProcessor.process, []

    def leaking(self: Any, step: Any) -> Any:
        kept.append(os.urandom(num_bytes * max(1, len(step.outputs))))
        return process(self, step)

    module.OutputProcessor.process = leaking


def _leak_in_engine(module: Any, num_bytes: int) -> None:
    update, kept = module.Scheduler.update_from_output, []

    def leaking(self: Any, scheduler_output: Any, model_output: Any) -> Any:
        kept.append(os.urandom(num_bytes * max(1, len(model_output.req_ids))))
        return update(self, scheduler_output, model_output)

    module.Scheduler.update_from_output = leaking


_LEAKS = {
    "front-end": ("octavo.engine.output_processor", _leak_in_front_end),
    "engine": ("octavo.core.scheduler", _leak_in_engine),
}


# ---- forwards -------------------------------------------------------------------------------------------------------


def _count_steps(module: Any) -> Callable[[], int]:
    """How many steps have begun. None of them is fused: what is planted stands between their kernels."""
    execute, count = module.ModelRunner.execute_model, [0]
    module.FusedStep.takes = lambda self, scheduler_output: False

    def counting(self: Any, scheduler_output: Any) -> Any:
        count[0] += 1
        return execute(self, scheduler_output)

    module.ModelRunner.execute_model = counting
    return lambda: count[0]


def _raise_in_forward(module: Any, step: int) -> None:
    now, forward = _count_steps(module), module.ModelRunner._forward

    def failing(self: Any, *args: Any) -> Any:
        hidden = forward(self, *args)
        if now() == step:
            raise RuntimeError("planted: the device is on fire")
        return hidden

    module.ModelRunner._forward = failing


def _nan_logits(module: Any, step: int) -> None:
    now, logits_of = _count_steps(module), module.ModelRunner._logits

    def poisoned(self: Any, *args: Any) -> Any:
        logits = logits_of(self, *args)
        if now() == step:
            logits[0] = float("nan")
        return logits

    module.ModelRunner._logits = poisoned


def _nan_in_kv(module: Any, step: int) -> None:
    """All that the step computed is NaN, and so is what is kept of it."""
    now, forward = _count_steps(module), module.ModelRunner._forward

    def poisoned(self: Any, *args: Any) -> Any:
        import torch

        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[self._config.model.dtype]
        caches = [raw.view(dtype) for raw in self._kv_tensors.values()]
        before = [cache.clone() for cache in caches]
        hidden = forward(self, *args)
        if now() == step:
            hidden[:] = float("nan")
            for cache, old in zip(caches, before, strict=True):
                cache[cache != old] = float("nan")
        return hidden

    module.ModelRunner._forward = poisoned


_FAULTS = {"raise": _raise_in_forward, "nan": _nan_logits, "nan-kv": _nan_in_kv}
