"""``octavo bench``: what a model does on this machine, beside what the machine could do at best; and
in ``serve/`` load for any server.

Names are imported when first used: the load generator needs no torch.
"""

from typing import TYPE_CHECKING, Any

__all__ = ["describe_environment", "measure_latency", "measure_roofline", "measure_startup", "measure_throughput"]

if TYPE_CHECKING:
    from octavo.bench.environment import describe_environment
    from octavo.bench.latency import measure_latency
    from octavo.bench.roofline import measure_roofline
    from octavo.bench.startup import measure_startup
    from octavo.bench.throughput import measure_throughput

_HOMES = {
    "describe_environment": "environment",
    "measure_latency": "latency",
    "measure_roofline": "roofline",
    "measure_startup": "startup",
    "measure_throughput": "throughput",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{home}"), name)
