"""Registry: names → ``"module:Name"`` strings, imported only when asked for.

A model, kernel provider, executor or parser is one file that names itself in one registry and touches nothing else.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from octavo.errors import UnsupportedError

__all__ = ["Registry"]


class Registry:
    """Lazy lookup table.

    Args:
        kind: what the entries are, for messages (``"model architecture"``).
        entries: name → ``"module:Name"``.
    """

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def register(self, name: str, target: str) -> None:
        """Adds ``name``; a name that is already taken is an error."""
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered already, as {self._entries[name]}")
        self._entries[name] = target

    def get(self, name: str) -> Any:
        """Imports and returns the entry; an unknown name is an UnsupportedError that lists the known ones."""
        target = self._entries.get(name)
        if target is None:
            raise UnsupportedError(f"{self.kind} {name!r} is not supported; supported: {', '.join(sorted(self))}")
        module, _, attribute = target.partition(":")
        return getattr(import_module(module), attribute)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)
