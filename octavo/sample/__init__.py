"""From logits to tokens: vectorised over the batch, each row independent of its neighbours, bit for bit."""

from octavo.sample.metadata import SamplingMetadata
from octavo.sample.philox import philox_4x32, uniforms
from octavo.sample.sampler import Sampler, SamplerOutput

__all__ = ["Sampler", "SamplerOutput", "SamplingMetadata", "philox_4x32", "uniforms"]
