"""``octavo bench``: what a model does on this machine, beside what the machine could do at best."""

from octavo.bench.environment import describe_environment
from octavo.bench.latency import measure_latency
from octavo.bench.roofline import measure_roofline
from octavo.bench.startup import measure_startup
from octavo.bench.throughput import measure_throughput

__all__ = ["describe_environment", "measure_latency", "measure_roofline", "measure_startup", "measure_throughput"]
