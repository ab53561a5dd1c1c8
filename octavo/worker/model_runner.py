"""ModelRunner: one step of the model, from SchedulerOutput to ModelRunnerOutput.

A step comes in two calls, so that work can be put between forward and sampling. Knows requests as rows of the
InputBatch; the model it drives knows none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention import Attention, set_forward_context
from octavo.config import OctavoConfig
from octavo.errors import UnsupportedError
from octavo.kernels import RecordedForward, huge_memory, record_forward
from octavo.logging import init_logger
from octavo.sample import LogitsProcessor, Sampler, SamplerOutput
from octavo.types import KVCacheConfig, ModelRunnerOutput, SchedulerOutput
from octavo.worker.fused_step import FusedStep
from octavo.worker.input_batch import InputBatch
from octavo.worker.peak_memory import PeakMemory
from octavo.worker.prompt_logprobs import PromptRows, compute_prompt_logprobs, find_prompt_rows
from octavo.worker.step_inputs import Filled, StepInputs

__all__ = ["CausalModel", "ModelRunner"]

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Step:
    """A forward that waits for its sampling.

    Attributes:
        hidden: [num_sampling, hidden_size] rows to be sampled; None: no request samples.
        sampling: [num_sampling] which of ``req_ids`` they belong to.
        rows: [num_sampling] their rows of the batch.
        prompt: tokens whose next token's logprobs are wanted, with their hidden states [tokens, hidden_size].
    """

    req_ids: list[str]
    hidden: Tensor | None
    sampling: NDArray[np.int64]
    rows: NDArray[np.int64]
    prompt: tuple[PromptRows, Tensor] | None = None


class CausalModel(Protocol):
    """What the runner needs of a model."""

    def __call__(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """[num_tokens] int64 twice → hidden states [num_tokens, hidden_size]."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] → [rows, vocab_size] float32."""
        ...


class ModelRunner:
    """Args:

    config: the final configuration.
    model: computes hidden states and logits.
    layers: its attention layers by name.
    processors: custom logits processors.
    """

    def __init__(
        self,
        config: OctavoConfig,
        model: CausalModel,
        layers: Mapping[str, Attention],
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self._config = config
        self._model = model
        self._layers = layers
        self._processors = processors
        self._sampler = Sampler()
        self._group_layers: list[list[str]] = []
        self._kv_tensors: dict[str, Tensor] = {}
        self._batch: InputBatch | None = None
        self._inputs: StepInputs | None = None
        self._recorded: RecordedForward | None = None
        self._recorded_logits: RecordedForward | None = None
        self._fused: FusedStep | None = None
        self._step: _Step | ModelRunnerOutput | None = None

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, max_model_len: int) -> None:
        """Allocates the KV cache, gives each layer its part, and makes the batch."""
        for allocation in kv_cache_config.tensors:
            raw = huge_memory(allocation.size)
            self._kv_tensors.update(dict.fromkeys(allocation.shared_by, raw))
        self._bind_kv_cache()
        scheduler = self._config.scheduler
        self._group_layers = [group.layer_names for group in kv_cache_config.groups]
        self._batch = InputBatch(
            max_num_seqs=scheduler.max_num_seqs,
            max_model_len=max_model_len,
            vocab_size=self._config.model.vocab_size,
            block_sizes=[group.spec.block_size for group in kv_cache_config.groups],
            processors=self._processors,
        )
        self._inputs = StepInputs(self._batch, scheduler.max_num_batched_tokens, scheduler.max_num_seqs)

    @torch.inference_mode()
    def record(self) -> None:
        """Records the forward, so that steps replay it; where that cannot be, says why, and steps run the model."""
        batch, inputs = self._initialized()
        if self._config.compilation.enforce_eager:
            logger.info("step replay: off (--enforce-eager)")
            return

        def forward(rows: int) -> Tensor:
            return self._run_model(inputs, inputs.fill_with_one(rows))

        try:
            max_rows = self._config.scheduler.max_num_batched_tokens
            recorded = record_forward(forward, inputs.of_tokens(), max_rows)
            hidden = recorded.output
            logits = record_forward(
                lambda rows: self._model.compute_logits(hidden[:rows]),
                (hidden,),
                min(max_rows, self._config.scheduler.max_num_seqs),
            )
        except UnsupportedError as error:
            logger.warning("step replay: off, every step runs the model's Python: %s", error)
            return
        self._recorded, self._recorded_logits = recorded, logits
        if recorded.whole is not None and logits.whole is not None:
            self._fused = FusedStep(batch, inputs, recorded, logits)
        split_by = [*recorded.split_by, *logits.split_by]
        if split_by:
            logger.warning("step replay: PIECEWISE, split by %s", ", ".join(split_by))
        else:
            logger.info("step replay: FULL")

    @torch.inference_mode()
    def warm_up(self, num_tokens: int) -> None:
        """Forward and logits of one made-up request. What it leaves in the KV cache is cleared."""
        inputs = self._initialized()[1]
        filled = inputs.fill_with_one(num_tokens)
        self._logits(self._forward(inputs, filled)[:1])
        for name, raw in self._kv_tensors.items():
            size = (
                self._layers[name]
                .kv_cache_spec(self._config.cache.block_size, self._config.cache.kv_cache_dtype)
                .page_size_bytes
            )
            raw[size : 2 * size].zero_()

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Applies the step's increments and computes its forward, and samples if nothing can come in between;
        sample_tokens() must follow."""
        if self._step is not None:
            raise RuntimeError("execute_model was called twice without sample_tokens in between")
        if self._fused is not None and self._fused.takes(scheduler_output):
            self._step = self._fused.run(scheduler_output)
        else:
            self._step = self._execute(scheduler_output)

    def sample_tokens(self) -> ModelRunnerOutput:
        """Samples for the requests of the last forward that are due, and keeps their tokens for the next step."""
        if self._step is None:
            raise RuntimeError("sample_tokens was called without a forward before it")
        step, self._step = self._step, None
        return step if isinstance(step, ModelRunnerOutput) else self._sample(step)

    @torch.inference_mode()
    def _execute(self, scheduler_output: SchedulerOutput) -> _Step:
        batch, inputs = self._initialized()
        batch.apply(scheduler_output)
        req_ids = list(scheduler_output.num_scheduled_tokens)
        if not req_ids:
            nothing = np.empty(0, dtype=np.int64)
            return _Step(req_ids, None, nothing, nothing)
        rows = batch.rows(req_ids)
        num_scheduled = list(scheduler_output.num_scheduled_tokens.values())
        filled = inputs.fill(rows, num_scheduled)
        hidden = self._forward(inputs, filled)
        prompt = None
        if batch.wants_prompt_logprobs:
            wanted = find_prompt_rows(batch, rows, np.array(num_scheduled, dtype=np.int64))
            if wanted is not None:
                prompt = wanted, hidden.index_select(0, torch.from_numpy(wanted.tokens))
        num_sampling = len(filled.sampling)
        return _Step(
            req_ids,
            inputs.select_sampling(hidden, filled) if num_sampling else None,
            filled.sampling,
            rows if num_sampling == len(rows) else rows[filled.sampling],
            prompt,
        )

    @torch.inference_mode()
    def _sample(self, step: _Step) -> ModelRunnerOutput:
        batch, inputs = self._initialized()
        output = ModelRunnerOutput(
            req_ids=step.req_ids,
            sampled_token_ids=[[] for _ in step.req_ids],
            logprobs=[None] * len(step.req_ids),
            graph_mode="EAGER" if self._recorded is None else self._recorded.mode,
        )
        if step.hidden is not None:
            metadata = batch.sampling_metadata(step.rows)
            sampled = self._sampler(self._logits(step.hidden), metadata)
            rows, token_ids = step.rows, sampled.token_ids
            if sampled.errors:
                done = token_ids >= 0
                rows, token_ids = rows[done], token_ids[done]
            inputs.append_tokens(rows, token_ids)
            _fill_output(output, step, sampled)
        if step.prompt is not None:
            logprobs, errors = compute_prompt_logprobs(
                self._model.compute_logits, step.prompt[1], step.prompt[0], self._config.model.vocab_size
            )
            output.prompt_logprobs = {step.req_ids[index]: part for index, part in logprobs.items()}
            output.errors |= {step.req_ids[index]: message for index, message in errors.items()}
        return output

    @torch.inference_mode()
    def profile_forward(self, num_tokens: int) -> int:
        """Peak bytes of the activations in a forward over one request of ``num_tokens``, which has a KV cache of its
        own."""
        specs = {
            name: layer.kv_cache_spec(self._config.cache.block_size, self._config.cache.kv_cache_dtype)
            for name, layer in self._layers.items()
        }
        block_sizes = sorted({spec.block_size for spec in specs.values()})
        for name, spec in specs.items():
            self._layers[name].bind_kv_cache(torch.zeros(2 * spec.page_size_bytes, dtype=torch.uint8))
        batch = InputBatch(1, num_tokens, self._config.model.vocab_size, block_sizes)
        inputs = StepInputs(batch, num_tokens, 1)
        filled = inputs.fill_with_one(num_tokens)
        by_size = dict(zip(block_sizes, inputs.metadata(filled), strict=True))
        metadata = {name: by_size[spec.block_size] for name, spec in specs.items()}
        with set_forward_context(metadata), PeakMemory() as watched:
            self._model(inputs.input_ids, inputs.positions)
        self._bind_kv_cache()
        return int(watched.peak_bytes)

    def _forward(self, inputs: StepInputs, filled: Filled) -> Tensor:
        """Hidden states of the step's tokens: [num_tokens, hidden_size], good until the next forward."""
        if self._recorded is not None:
            return self._recorded.run(filled.num_tokens, filled.num_reqs)
        return self._run_model(inputs, filled)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Of what ``_forward`` gave, its first rows: [rows, vocab_size], good until the next call."""
        if self._recorded_logits is not None:
            return self._recorded_logits.run(hidden.shape[0], 1)
        return self._model.compute_logits(hidden)

    def _run_model(self, inputs: StepInputs, filled: Filled) -> Tensor:
        metadata = inputs.metadata(filled)
        by_layer = {name: group for names, group in zip(self._group_layers, metadata, strict=True) for name in names}
        with set_forward_context(by_layer):
            return self._model(inputs.input_ids[: filled.num_tokens], inputs.positions[: filled.num_tokens])

    def _initialized(self) -> tuple[InputBatch, StepInputs]:
        if self._batch is None or self._inputs is None:
            raise RuntimeError("initialize_kv_cache comes before the first forward")
        return self._batch, self._inputs

    def _bind_kv_cache(self) -> None:
        for name, raw in self._kv_tensors.items():
            self._layers[name].bind_kv_cache(raw)


def _fill_output(output: ModelRunnerOutput, step: _Step, sampled: SamplerOutput) -> None:
    """Writes the sampler's rows where their requests stand in the step."""
    for row, (position, token_id) in enumerate(zip(step.sampling.tolist(), sampled.token_ids.tolist(), strict=True)):
        if row in sampled.errors:
            output.errors[step.req_ids[position]] = sampled.errors[row]
            continue
        output.sampled_token_ids[position].append(token_id)
        if row in sampled.logprobs:
            output.logprobs[position] = [sampled.logprobs[row]]
