"""The promises with weights whose inputs are quantized in an order of their own: recorded whole, and chunks,
neighbours, replay and preemption change no bit."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from torch import Tensor

from octavo.platforms import current_platform
from tests.properties.harness import SHAPE, Runner, assert_same, greedy, prompt, save_model, seeded
from tests.quantized.writers import gptq_parts, quantized_folder, rounded

pytestmark = pytest.mark.skipif(
    current_platform().kernel_provider != "native", reason="the native kernels were not built"
)

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}
BF16 = {"dtype": "bfloat16"}


def by_act_order(module: str, weight: Tensor) -> tuple[dict[str, Tensor], npt.NDArray[np.float32]]:
    """Projections that see the same input have the same order, as their quantizers give them."""
    in_size = weight.shape[1]
    found = rounded(weight.float(), 32, groups=np.random.default_rng(in_size).permutation(np.arange(in_size) // 32))
    return gptq_parts(found), found.values


@pytest.fixture(scope="module")
def ordered_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    shape = SHAPE | {"hidden_size": 96, "intermediate_size": 224, "num_attention_heads": 6, "num_key_value_heads": 2}
    folder = tmp_path_factory.mktemp("plain")
    save_model(folder, transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).float())
    return quantized_folder(folder, tmp_path_factory.mktemp("ordered"), by_act_order, GPTQ)[0]


def test_replay_and_chunks_change_nothing(run: Runner, ordered_dir: Path) -> None:
    whole = run(ordered_dir, [prompt(91)], seeded(3), **BF16)
    chunked = run(ordered_dir, [prompt(91)], seeded(3), **BF16, long_prefill_token_threshold=17)
    eager = run(ordered_dir, [prompt(91)], seeded(3), **BF16, enforce_eager=True)
    assert (whole.graph_modes, eager.graph_modes) == ({"FULL"}, {"EAGER"})
    assert max(chunked.scheduled()) == 17
    assert_same(whole.outputs[0], chunked.outputs[0])
    assert_same(whole.outputs[0], eager.outputs[0])


def test_neighbours_and_preemption_change_nothing(run: Runner, ordered_dir: Path) -> None:
    prompts, params = [prompt(seed, 300) for seed in (92, 93, 94)], [greedy(80), seeded(5, 80), seeded(6, 80)]
    options = BF16 | {"max_model_len": 400, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    alone = run(ordered_dir, prompts[1:2], params[1], **options)
    roomy = run(ordered_dir, prompts, params, **options)
    tight = run(ordered_dir, prompts, params, **options, num_gpu_blocks_override=44)
    assert (roomy.preemptions, tight.preemptions >= 1) == (0, True)
    assert_same(alone.outputs[0], roomy.outputs[1])
    for a, b in zip(roomy.outputs, tight.outputs, strict=True):
        assert_same(a, b)
