"""Model families, one file each, read from top to bottom. They know nothing of requests."""

from octavo.models.registry import REGISTRY

__all__ = ["REGISTRY"]
