"""What sampling is: from a batch of logits to tokens and logprobs, in torch. The native kernel is tested against it.

Every step is an elementwise operation, an exact selection or a running sum along one row, so that a row's result
does not depend on the rows around it. What a batch, and a row, does not use costs it nothing.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.sample.filters import draw
from octavo.sample.logits_changes import change_logits
from octavo.sample.logprobs import named_logprobs, top_logprobs
from octavo.sample.metadata import SamplingMetadata
from octavo.sample.output import EMPTY, NAN, SamplerOutput
from octavo.sample.philox import uniforms
from octavo.sample.raw_logits import RawLogits
from octavo.sample.selection import pieces

__all__ = ["sample", "score"]


def sample(logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
    """What ``Sampler`` gives for them."""
    errors: dict[int, str] = {}
    raw: RawLogits | None = None
    if metadata.changes:
        raw = RawLogits(logits, metadata.changes)
        errors = change_logits(logits, metadata.changes) | dict.fromkeys(raw.broken_rows(), NAN)
    output = _sample(logits, metadata, errors)
    if raw is not None:
        raw.restore(logits)
    _add_logprobs(logits, metadata, output)
    output.token_ids[list(output.errors)] = -1
    return output


def score(logits: Tensor, token_ids: NDArray[np.int64], num_logprobs: NDArray[np.int64]) -> SamplerOutput:
    """What ``Sampler.score`` gives for them."""
    output = SamplerOutput(token_ids, errors=_find_errors(logits.amax(dim=-1).numpy(force=True)))
    rows = np.flatnonzero(_sound(len(token_ids), output.errors))
    if rows.size:
        output.logprobs = top_logprobs(logits, rows, token_ids[rows], num_logprobs[rows])
    return output


def _sample(logits: Tensor, metadata: SamplingMetadata, errors: dict[int, str]) -> SamplerOutput:
    """Tokens of all rows but those with errors; in these, something or other."""
    # torch.argmax is defined to return the first of equal maxima, and NaN where there is one.
    chosen = logits.argmax(dim=-1)
    best = logits.gather(1, chosen[:, None]).squeeze(1)
    errors = _find_errors(best.numpy(force=True)) | errors
    token_ids: NDArray[np.int64] = chosen.numpy(force=True)
    drawn = np.flatnonzero((metadata.temperature > 0.0) & _sound(len(token_ids), errors))
    if drawn.size:
        uniform = uniforms(metadata.seed[drawn], metadata.choice_index[drawn], metadata.output_position[drawn])
        for piece in pieces(drawn.size, logits.shape[1]):
            token_ids[drawn[piece]] = draw(logits, best, drawn[piece], uniform[piece], metadata)
    return SamplerOutput(token_ids, errors=errors)


def _find_errors(best: NDArray[np.float32]) -> dict[int, str]:
    """Rows that nothing can be sampled from, by their largest logit."""
    errors = dict.fromkeys(np.flatnonzero(np.isnan(best)).tolist(), NAN)
    return errors | dict.fromkeys(np.flatnonzero(np.isneginf(best)).tolist(), EMPTY)


def _sound(num_rows: int, errors: dict[int, str]) -> NDArray[np.bool_]:
    sound = np.ones(num_rows, dtype=bool)
    sound[list(errors)] = False
    return sound


def _add_logprobs(raw: Tensor, metadata: SamplingMetadata, output: SamplerOutput) -> None:
    """Fills ``output.logprobs`` from the raw logits."""
    asking = (metadata.num_logprobs >= 0) & _sound(len(output.token_ids), output.errors)
    named = {row: ids for row, ids in metadata.logprob_token_ids.items() if asking[row]}
    if named:
        output.logprobs |= named_logprobs(raw, output.token_ids, named)
        asking[list(named)] = False
    rows = np.flatnonzero(asking)
    if rows.size:
        output.logprobs |= top_logprobs(raw, rows, output.token_ids[rows], metadata.num_logprobs[rows])
