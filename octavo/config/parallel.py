"""How many workers, and how they are reached."""

from dataclasses import dataclass

from octavo.config.options import option

__all__ = ["ParallelConfig"]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    distributed_executor_backend: str = option(
        "uni: the worker inside the engine; roundtrip: the same, with every message sent through msgpack (for tests)",
        default="uni",
        choices=("uni", "roundtrip"),
        refused=dict.fromkeys(
            ("mp", "ray", "external_launcher"), "octavo has one worker so far, inside the engine; leave the flag out"
        ),
    )
