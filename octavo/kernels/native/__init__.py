"""The native kernels of ``csrc/cpu`` as a provider of ops."""

from octavo.kernels.native.provider import available_levels, native_provider

__all__ = ["available_levels", "native_provider"]
