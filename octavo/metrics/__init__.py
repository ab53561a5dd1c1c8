"""What an operator may watch: metric names, labels and bucket shapes, declared once, and where they are counted."""

from octavo.metrics.engine_metrics import CONTENT_TYPE, EngineMetrics

__all__ = ["CONTENT_TYPE", "EngineMetrics"]
