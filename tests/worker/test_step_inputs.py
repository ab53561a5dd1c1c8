"""The native call that fills a step's tensors is pointed to arrays: what would lead out of them is refused."""

from importlib.util import find_spec

import numpy as np
import pytest

from octavo.worker.input_batch import InputBatch
from octavo.worker.step_inputs import StepInputs

pytestmark = pytest.mark.skipif(find_spec("octavo._native") is None, reason="built without native kernels")


@pytest.mark.parametrize(
    ("row", "num_scheduled", "why"),
    [(3, 1, "row"), (-1, 1, "row"), (0, 9, "model's length"), (0, 0, "model's length"), (0, 7, "max-num-batched")],
)
def test_the_native_call_refuses_what_is_beyond_the_arrays(
    monkeypatch: pytest.MonkeyPatch, row: int, num_scheduled: int, why: str
) -> None:
    monkeypatch.setattr("octavo.worker.step_inputs.chosen_provider", lambda: "native")
    batch = InputBatch(max_num_seqs=3, max_model_len=8, vocab_size=10, block_sizes=[4])
    inputs = StepInputs(batch, max_tokens=6, max_reqs=2)
    with pytest.raises(IndexError, match=why):
        inputs.fill(np.array([row]), [num_scheduled])
    with pytest.raises(IndexError, match="requests"):
        inputs.fill(np.array([0, 1, 2]), [1, 1, 1])
    batch.num_tokens[:] = 8
    with pytest.raises(IndexError, match="as long as"):
        inputs.append_tokens(np.array([0, 1]), np.array([5, 5]))
    assert inputs.fill(np.array([0]), [6]).num_tokens == 6  # the control
