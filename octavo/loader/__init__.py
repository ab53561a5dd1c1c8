"""Loads a checkpoint into a model."""

from octavo.loader.loader import load_model

__all__ = ["load_model"]
