"""The worker's life around its steps: what it reports, how much memory it takes, what it leaves behind."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.platforms import current_platform
from octavo.sample import Sampler
from octavo.types import FullAttentionSpec, SlidingWindowSpec
from octavo.worker import Worker
from tests.worker.toy import (
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    WINDOW,
    PlainScheduler,
    ToyModel,
    params,
    start,
    toy_config,
    toy_kv_cache_config,
    toy_worker,
)

GIB = 1 << 30


class HungryModel(ToyModel):
    """Holds two tensors of 1000 float32 a token at its peak, and makes a third once one of them is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.zeros(1000, 1000)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        self.weights.t().mul_(1.0)  # neither a view of weights nor work in place takes memory
        first = torch.ones(len(input_ids), 1000)
        second = first + 1.0
        first = first[:, :1]  # a view: the first is still alive
        del first
        third = second.view(-1, 2).t()  # no memory of its own
        del second
        third = third.clone()
        return super().forward(input_ids, positions)


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(type(current_platform()), "available_memory_bytes", lambda self: GIB)
    return GIB


def loaded(model: ToyModel, **stated: object) -> Worker:
    worker = Worker(toy_config(**stated), lambda *_: model)
    worker.init_device()
    worker.load_model()
    return worker


def test_specs_name_every_attention_layer() -> None:
    shape = {"block_size": 8, "num_kv_heads": 1, "head_size": 1, "dtype": "float32"}
    assert loaded(ToyModel(), block_size=8).get_kv_cache_specs() == {
        "full": FullAttentionSpec(**shape),
        "window": SlidingWindowSpec(**shape, sliding_window=WINDOW),
    }


def test_loading_progress_is_passed_on() -> None:
    heard: list[tuple[str, float]] = []

    def load(config: object, progress: object, on_built: object) -> ToyModel:
        progress("weights", 0.5)  # type: ignore[operator]
        return ToyModel()

    Worker(toy_config(), load).load_model(lambda stage, share: heard.append((stage, share)))
    assert heard == [("weights", 0.5)]


# memory -------------------------------------------------------------------------------------------------------------


def test_the_kv_cache_may_take_a_share_of_what_a_step_leaves(free_memory: int) -> None:
    for num_tokens in (64, 640):
        # 64 or 640 rows at once where the logprobs of a prompt are asked for, and the default of 20 listed at each.
        workspace = Sampler.workspace_bytes(num_tokens, VOCAB_SIZE) + Sampler.listed_bytes(num_tokens, 20)
        worker = loaded(HungryModel(), max_num_batched_tokens=num_tokens, gpu_memory_utilization=0.5)
        step = (free_memory - workspace) - 2 * worker.determine_available_memory()
        # Two live tensors of 4,000 bytes a token, and the toy's own few numbers.
        assert 8000 * num_tokens <= step < 8200 * num_tokens


def test_a_stated_size_is_taken_as_it_is(free_memory: int) -> None:
    assert loaded(ToyModel(), kv_cache_memory_bytes=12345).determine_available_memory() == 12345


def test_a_stated_number_of_blocks_may_take_all_that_a_step_leaves(free_memory: int) -> None:
    stated = {"num_gpu_blocks_override": 9, "kv_cache_memory_bytes": 12345}
    share = loaded(ToyModel(), gpu_memory_utilization=0.5).determine_available_memory()
    assert loaded(ToyModel(), **stated).determine_available_memory() == pytest.approx(2 * share, abs=1)


def test_a_stated_size_beyond_what_is_free_is_refused(free_memory: int) -> None:
    worker = loaded(ToyModel(), kv_cache_memory_bytes=free_memory + 1)
    with pytest.raises(ConfigError, match=f"--kv-cache-memory-bytes {free_memory + 1} .* {free_memory} bytes"):
        worker.determine_available_memory()


def test_steps_that_do_not_fit_into_memory_are_refused(free_memory: int) -> None:
    worker = loaded(HungryModel(), max_num_batched_tokens=1 << 20)
    with pytest.raises(ConfigError, match="lower --max-num-batched-tokens"):
        worker.determine_available_memory()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_an_unused_kv_cache_is_not_resident() -> None:
    worker, model = toy_worker(toy_config())
    worker.load_model()
    worker.get_kv_cache_specs()
    before = resident_bytes()
    worker.initialize_from_config(toy_kv_cache_config(num_blocks=GIB // 32), MAX_MODEL_LEN)
    assert model.full.raw.nbytes == GIB
    assert resident_bytes() - before < GIB // 8
    # The control: memory that is written to is seen.
    model.full.raw[: GIB // 32] = 1
    assert resident_bytes() - before > GIB // 5


START_UP = """
import sys
from tests.worker.toy import start, toy_config, toy_worker
worker, _ = toy_worker(toy_config())
start(worker)
worker.determine_available_memory()
print("torch._dynamo" in sys.modules)
if "control" in sys.argv:
    import torch._dynamo
    print("torch._dynamo" in sys.modules)
"""


def test_starting_does_not_import_the_compiler_of_torch() -> None:
    command = [sys.executable, "-c", START_UP, "control"]
    root = Path(__file__).parents[2]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=root).stdout
    assert found.split() == ["False", "True"]


# nothing left behind ------------------------------------------------------------------------------------------------


def test_measuring_and_warming_up_leave_no_trace_in_the_kv_cache() -> None:
    worker, model = toy_worker(toy_config())
    start(worker)
    worker.determine_available_memory()
    worker.compile_or_warm_up_model()
    assert len(model.forwards) >= 2
    assert model.full.raw.data_ptr() == model.window.raw.data_ptr()
    assert not model.full.raw.any()
    # The control: a step does leave one.
    scheduler = PlainScheduler()
    scheduler.add("a", [20, 21], params())
    scheduler.step(worker, a=2)
    assert model.full.raw.count_nonzero() == 4


def test_calls_before_loading_and_after_shutdown_say_so() -> None:
    worker, _ = toy_worker(toy_config())
    with pytest.raises(RuntimeError, match="load_model"):
        worker.sample_tokens()
    worker.load_model()
    with pytest.raises(RuntimeError, match="initialize_kv_cache"):
        worker.execute_model(PlainScheduler().schedule())
    worker.shutdown()
    with pytest.raises(RuntimeError, match="shutdown"):
        worker.execute_model(PlainScheduler().schedule())
