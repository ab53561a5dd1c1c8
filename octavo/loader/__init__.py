"""Loads a checkpoint into a model."""

from octavo.loader.loader import kernel_set_of, load_model

__all__ = ["kernel_set_of", "load_model"]
