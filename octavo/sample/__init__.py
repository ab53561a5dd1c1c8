"""From logits to tokens: vectorised over the batch, each row independent of its neighbours, bit for bit."""

from octavo.sample.logits_processor import (
    LogitsProcessor,
    RowProcessor,
    load_logits_processors,
    request_processors,
)
from octavo.sample.metadata import Penalties, RowChanges, SamplingMetadata
from octavo.sample.output import EMPTY, NAN, SamplerOutput
from octavo.sample.philox import philox_4x32, uniforms
from octavo.sample.request_changes import RequestChanges
from octavo.sample.sampler import Sampler

__all__ = [
    "EMPTY",
    "NAN",
    "LogitsProcessor",
    "Penalties",
    "RequestChanges",
    "RowChanges",
    "RowProcessor",
    "Sampler",
    "SamplerOutput",
    "SamplingMetadata",
    "load_logits_processors",
    "philox_4x32",
    "request_processors",
    "uniforms",
]
