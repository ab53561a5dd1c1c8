"""What the machine has, and the defaults that follow from it. Imports without torch."""

from octavo.platforms.platform import REGISTRY, Platform, current_platform

__all__ = ["REGISTRY", "Platform", "current_platform"]
