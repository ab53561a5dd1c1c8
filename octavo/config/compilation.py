"""How a step's forward is run."""

from dataclasses import dataclass

from octavo.config.options import option

__all__ = ["CompilationConfig"]


@dataclass(frozen=True, kw_only=True)
class CompilationConfig:
    enforce_eager: bool = option(
        "run the model's Python in every step, instead of recording its kernel calls once and replaying them",
        default=False,
    )
