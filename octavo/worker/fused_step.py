"""A step in one native call: increments, inputs, forward, logits, sampling.

For steps of running requests that want no more than a token each, where forward and logits are replayed natively. Each
kernel empties the caches, so that every piece of Python between two of them begins cold; here there is none. What comes
out is what the ModelRunner's two calls give, bit for bit.
"""

from octavo.kernels import RecordedForward
from octavo.sample import EMPTY, NAN
from octavo.types import ModelRunnerOutput, SchedulerOutput
from octavo.worker.input_batch import InputBatch
from octavo.worker.step_inputs import StepInputs

__all__ = ["FusedStep"]

_NOT_SAMPLED = -1  # csrc/cpu/fused_step.hpp, end
_ERRORS = {-2: NAN, -3: EMPTY}


class FusedStep:
    """Args:

    batch: which the steps' requests are in.
    inputs: of that batch, with a native filler.
    forward, logits: recorded whole; logits over the first rows of the forward's output.
    """

    def __init__(
        self, batch: InputBatch, inputs: StepInputs, forward: RecordedForward, logits: RecordedForward
    ) -> None:
        from octavo import _native  # not there where it could not be built

        assert inputs.native is not None
        self._batch = batch
        hidden, scores = forward.output, logits.output
        self._native = _native.FusedStep(
            inputs.native,
            tuple(column.ctypes.data for column in batch.sampling_columns()),
            forward.whole,
            (hidden.data_ptr(), hidden.stride(0) * hidden.itemsize),
            logits.whole,
            (scores.data_ptr(), scores.stride(0) * scores.itemsize),
            scores.shape[1],
        )
        self._kept = inputs, forward, logits  # whose memory the native object knows by address

    def takes(self, scheduler_output: SchedulerOutput) -> bool:
        """Whether it can run this step."""
        return (
            not self._batch.special_rows
            and not scheduler_output.scheduled_new_reqs
            and bool(scheduler_output.num_scheduled_tokens)
        )

    def run(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """The whole step."""
        batch, cached = self._batch, scheduler_output.scheduled_cached_reqs
        batch.begin(scheduler_output)
        req_ids = cached.req_ids
        token_ids = self._native.run(
            list(map(batch.row_of.__getitem__, req_ids)),
            cached.num_computed_tokens,
            cached.num_output_tokens,
            list(map(scheduler_output.num_scheduled_tokens.__getitem__, req_ids)),
        )
        sampled = [[token_id] if token_id >= 0 else [] for token_id in token_ids]
        output = ModelRunnerOutput(req_ids, sampled, [None] * len(req_ids), graph_mode="FULL")
        if min(token_ids) < _NOT_SAMPLED:
            output.errors = {
                req_id: _ERRORS[token_id]
                for req_id, token_id in zip(req_ids, token_ids, strict=True)
                if token_id in _ERRORS
            }
        return output
