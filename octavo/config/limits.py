"""How much of the server one client may hold, and for how long."""

from dataclasses import dataclass

from octavo.config.options import option

__all__ = ["LimitsConfig"]


@dataclass(frozen=True, kw_only=True)
class LimitsConfig:
    max_body_bytes: int = option(
        "largest request body; a larger one is answered with 413", default=32 * 1024 * 1024, least=1
    )
