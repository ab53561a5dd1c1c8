"""The promises in bfloat16, which is what models are served in: chunks and neighbours change no bit of a logprob, in
replayed steps as in those that run the model's Python."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo.kernels.native import provider
from tests.properties.harness import PROMPT_LEN, Runner, assert_same, greedy, prompt, seeded


@pytest.mark.parametrize(("chunk", "enforce_eager"), [(16, False), (17, False), (17, True)])
def test_chunked_prefill_changes_nothing(run: Runner, model_dir: Path, chunk: int, enforce_eager: bool) -> None:
    whole = run(model_dir, [prompt(70)], seeded(3), dtype="bfloat16")
    settings = {"long_prefill_token_threshold": chunk, "enforce_eager": enforce_eager}
    chunked = run(model_dir, [prompt(70)], seeded(3), dtype="bfloat16", **settings)
    assert (whole.graph_modes, chunked.graph_modes) == ({"FULL"}, {"EAGER" if enforce_eager else "FULL"})
    assert whole.scheduled()[0] == PROMPT_LEN
    assert max(chunked.scheduled()) == chunk
    assert_same(whole.outputs[0], chunked.outputs[0])


def test_a_request_alone_equals_the_same_among_neighbours(run: Runner, model_dir: Path) -> None:
    prompts = [prompt(71, 90), prompt(72), prompt(73, 1), prompt(74, 300)]
    params = [seeded(1, 40), greedy(), greedy(30), seeded(2, 5)]
    alone = run(model_dir, prompts[1:2], greedy(), dtype="bfloat16")
    among = run(model_dir, prompts, params, dtype="bfloat16", max_num_batched_tokens=256, max_num_seqs=8)
    assert max(len(step["requests"]) for step in among.trace) >= 3
    assert_same(alone.outputs[0], among.outputs[1])


def test_control_one_bit_of_one_activation_is_noticed(
    run: Runner, llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = provider._KERNELS["gated_linear"]

    def nudged(x: Tensor, *others: object) -> Tensor:
        found: Tensor = honest(x, *others)
        if len(x) == 17:
            found.view(torch.int16)[:, 0] ^= 1
        return found

    monkeypatch.setitem(provider._KERNELS, "gated_linear", nudged)
    # A replayed step runs no Python in which to nudge.
    settings = {"dtype": "bfloat16", "enforce_eager": True}
    whole = run(llama_dir, [prompt(70)], seeded(3), **settings)
    chunked = run(llama_dir, [prompt(70)], seeded(3), **settings, long_prefill_token_threshold=17)
    with pytest.raises(AssertionError):
        assert_same(whole.outputs[0], chunked.outputs[0])
