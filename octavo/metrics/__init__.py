"""What an operator may watch: metric names, labels and bucket shapes, declared once, and where they are counted."""

from octavo.metrics.engine_metrics import CONTENT_TYPE, EngineMetrics
from octavo.metrics.http_metrics import NO_HANDLER, HttpMetrics
from octavo.metrics.table import MetricsFolder
from octavo.metrics.traces import RequestTracer

__all__ = [
    "CONTENT_TYPE",
    "NO_HANDLER",
    "EngineMetrics",
    "HttpMetrics",
    "MetricsFolder",
    "RequestTracer",
]
