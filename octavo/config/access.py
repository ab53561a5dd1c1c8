"""Who may use the server."""

from dataclasses import dataclass

__all__ = ["AccessConfig"]


@dataclass(frozen=True, kw_only=True)
class AccessConfig:
    pass
