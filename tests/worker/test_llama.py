"""A real architecture through the worker: a mixed, chunked batch gives the greedy tokens and logits of transformers."""

from pathlib import Path

import pytest
import torch

from octavo.checkpoints import read_model_facts
from octavo.config import EngineArgs, OctavoConfig, resolve_config
from octavo.core.kv_cache import make_kv_cache_config
from octavo.kernels.native.recording import RecordedForward
from octavo.platforms import current_platform
from octavo.types import CachedRequestData, NewRequestData, SamplingParams, SchedulerOutput
from octavo.worker import Worker

NUM_TOKENS = 8
# More than a block, not a multiple of one, and one of a single token.
PROMPTS = {"a": list(range(5, 42)), "b": [300], "c": [7, 7, 250, 19, 4]}


def llama_config(folder: Path) -> OctavoConfig:
    args = EngineArgs(model=str(folder), dtype="float32", max_num_seqs=4, kv_cache_memory_bytes=1 << 22)
    return resolve_config(args, read_model_facts(folder), current_platform().facts())


def llama_worker(folder: Path) -> Worker:
    config = llama_config(folder)
    worker = Worker(config)
    worker.init_device()
    worker.load_model()
    specs = worker.get_kv_cache_specs()
    kv_cache_config, max_model_len = make_kv_cache_config(specs, worker.determine_available_memory(), config)
    worker.initialize_from_config(kv_cache_config, max_model_len)
    worker.compile_or_warm_up_model()
    return worker


@pytest.fixture(scope="module")
def worker(tiny_llama_dir: Path) -> Worker:
    return llama_worker(tiny_llama_dir)


GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, seed=0, logprobs=3)


def new_request(req_id: str, first_block: int, sampling: SamplingParams) -> NewRequestData:
    prompt = PROMPTS[req_id]
    blocks = ([first_block + i for i in range(-(-(len(prompt) + NUM_TOKENS) // 16))],)
    return NewRequestData(req_id, prompt, len(prompt), sampling, [], 0, blocks, 0)


def generate(worker: Worker, sampling: SamplingParams = GREEDY) -> dict[str, tuple[list[int], list[float]]]:
    """Prompt a in chunks of 16, the others beside it; every request to NUM_TOKENS tokens."""
    found: dict[str, tuple[list[int], list[float]]] = {req_id: ([], []) for req_id in PROMPTS}
    computed = dict.fromkeys(PROMPTS, 0)
    for step in range(40):
        scheduled, cached, new = {}, CachedRequestData.empty(), []
        for index, (req_id, prompt) in enumerate(PROMPTS.items()):
            due = len(prompt) + len(found[req_id][0]) - computed[req_id]
            if step < index or len(found[req_id][0]) == NUM_TOKENS:
                continue
            if computed[req_id] == 0:
                new.append(new_request(req_id, 1 + 4 * index, sampling))
            else:
                cached.req_ids.append(req_id)
                cached.new_block_ids.append(None)
                cached.num_computed_tokens.append(computed[req_id])
                cached.num_output_tokens.append(len(found[req_id][0]))
            scheduled[req_id] = min(16, due)
        if not scheduled:
            break
        worker.execute_model(SchedulerOutput(step, new, cached, scheduled, sum(scheduled.values()), [], []))
        output = worker.sample_tokens()
        for req_id, tokens, logprobs in zip(output.req_ids, output.sampled_token_ids, output.logprobs, strict=True):
            computed[req_id] += scheduled[req_id]
            found[req_id][0].extend(tokens)
            found[req_id][1].extend(entry.logprobs[0] for entry in logprobs or [])
    return found


def test_a_batch_gives_the_greedy_tokens_of_transformers(worker: Worker, tiny_llama_dir: Path) -> None:
    from transformers import LlamaForCausalLM

    oracle = LlamaForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32).eval()
    for req_id, (tokens, logprobs) in generate(worker).items():
        with torch.inference_mode():
            logits = oracle(torch.tensor([PROMPTS[req_id] + tokens])).logits[0]
        before = logits[len(PROMPTS[req_id]) - 1 : -1]
        assert tokens == before.argmax(dim=-1).tolist()
        expected = before.log_softmax(dim=-1).amax(dim=-1).tolist()
        assert logprobs == pytest.approx(expected, abs=1e-4)
        assert len(logprobs) == NUM_TOKENS


def test_a_step_that_failed_leaves_nothing_in_what_is_replayed_after_it(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_anew() -> None:
        worker.execute_model(SchedulerOutput(0, [], CachedRequestData.empty(), {}, 0, list(PROMPTS), []))
        worker.sample_tokens()

    start_anew()
    expected = generate(worker)
    run, left = RecordedForward.run, [0]

    def failing(self: RecordedForward, rows: int, requests: int) -> torch.Tensor:
        hidden = run(self, rows, requests)
        left[0] -= 1
        if left[0] == 0:
            hidden.fill_(float("nan"))  # whatever the step has left in its buffers
            raise RuntimeError("the device is on fire")
        return hidden

    monkeypatch.setattr(RecordedForward, "run", failing)
    for calls in (1, 2, 5, 8):  # forwards and logits; of prompts, chunks and decodes
        start_anew()
        left[0] = calls
        with pytest.raises(RuntimeError, match="on fire"):
            generate(worker)
        start_anew()
        assert generate(worker) == expected
