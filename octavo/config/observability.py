"""What can be seen of the engine at work."""

from dataclasses import dataclass

from octavo.config.options import option

__all__ = ["ObservabilityConfig"]


@dataclass(frozen=True, kw_only=True)
class ObservabilityConfig:
    step_trace: str | None = option("file for the step trace: a JSON line a step")
    disable_log_stats: bool = option("do not log throughput every ten seconds", default=False)
    otlp_traces_endpoint: str | None = option(
        "address of an OpenTelemetry collector that gets a trace of every request", metavar="URL"
    )
