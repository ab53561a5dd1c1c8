"""``octavo bench serve``: load for any OpenAI-compatible server over HTTP, and what it makes of it."""

from octavo.bench.serve.arrivals import ArrivalOptions, arrival_times
from octavo.bench.serve.datasets import DATASETS, BenchPrompt, DatasetOptions, read_prompts
from octavo.bench.serve.event_reader import EventReader
from octavo.bench.serve.load import BACKENDS, Load, Target, run_load
from octavo.bench.serve.models import ServedModel, first_model
from octavo.bench.serve.outcome import Failure, Outcome, StreamReader
from octavo.bench.serve.process_tree import ProcessUse, read_processes
from octavo.bench.serve.report import GOODPUT_METRICS, METRICS, ReportOptions, details, render, summarize, warnings_of

__all__ = [
    "BACKENDS",
    "DATASETS",
    "GOODPUT_METRICS",
    "METRICS",
    "ArrivalOptions",
    "BenchPrompt",
    "DatasetOptions",
    "EventReader",
    "Failure",
    "Load",
    "Outcome",
    "ProcessUse",
    "ReportOptions",
    "ServedModel",
    "StreamReader",
    "Target",
    "arrival_times",
    "details",
    "first_model",
    "read_processes",
    "read_prompts",
    "render",
    "run_load",
    "summarize",
    "warnings_of",
]
