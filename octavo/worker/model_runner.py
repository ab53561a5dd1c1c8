"""ModelRunner: one step of the model, from SchedulerOutput to ModelRunnerOutput.

A step comes in two calls, so that work can be put between forward and sampling. Knows requests as rows of the
InputBatch; the model it drives knows none.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention import Attention, AttentionMetadata, set_forward_context
from octavo.config import OctavoConfig
from octavo.sample import LogitsProcessor, Sampler, SamplerOutput
from octavo.types import KVCacheConfig, ModelRunnerOutput, SchedulerOutput
from octavo.worker.input_batch import InputBatch
from octavo.worker.peak_memory import PeakMemory
from octavo.worker.prompt_logprobs import PromptRows, compute_prompt_logprobs, find_prompt_rows
from octavo.worker.step_inputs import StepInputs, build_step_inputs

__all__ = ["CausalModel", "ModelRunner"]


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
        self._kv_cache_config: KVCacheConfig | None = None
        self._kv_tensors: dict[str, Tensor] = {}
        self._batch: InputBatch | None = None
        self._step: _Step | None = None

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, max_model_len: int) -> None:
        """Allocates the KV cache, gives each layer its part, and makes the batch."""
        for allocation in kv_cache_config.tensors:
            # Fresh pages of the system's: zero, and not resident before they are written (torch.zeros writes them).
            raw = torch.from_numpy(np.zeros(allocation.size, dtype=np.uint8))
            self._kv_tensors.update(dict.fromkeys(allocation.shared_by, raw))
        self._bind_kv_cache()
        self._kv_cache_config = kv_cache_config
        self._batch = InputBatch(
            max_num_seqs=self._config.scheduler.max_num_seqs,
            max_model_len=max_model_len,
            vocab_size=self._config.model.vocab_size,
            block_sizes=[group.spec.block_size for group in kv_cache_config.groups],
            processors=self._processors,
        )

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Applies the step's increments and computes its forward; sample_tokens() must follow."""
        if self._step is not None:
            raise RuntimeError("execute_model was called twice without sample_tokens in between")
        if self._batch is None or self._kv_cache_config is None:
            raise RuntimeError("execute_model was called before initialize_kv_cache")
        self._batch.apply(scheduler_output)
        req_ids = list(scheduler_output.num_scheduled_tokens)
        if not req_ids:
            nothing = np.empty(0, dtype=np.int64)
            self._step = _Step(req_ids, None, nothing, nothing)
            return
        rows = self._batch.rows(req_ids)
        num_scheduled = np.array(list(scheduler_output.num_scheduled_tokens.values()), dtype=np.int64)
        inputs = build_step_inputs(self._batch, rows, num_scheduled)
        by_layer = {
            name: metadata
            for group, metadata in zip(self._kv_cache_config.groups, inputs.metadata, strict=True)
            for name in group.layer_names
        }
        hidden = self._forward(inputs, by_layer)
        wanted = find_prompt_rows(self._batch, rows, num_scheduled)
        self._step = _Step(
            req_ids,
            hidden.index_select(0, inputs.sampling_tokens) if inputs.sampling.size else None,
            inputs.sampling,
            rows[inputs.sampling],
            None if wanted is None else (wanted, hidden.index_select(0, torch.from_numpy(wanted.tokens))),
        )

    @torch.inference_mode()
    def sample_tokens(self) -> ModelRunnerOutput:
        """Samples for the requests of the last forward that are due, and keeps their tokens for the next step."""
        if self._step is None or self._batch is None:
            raise RuntimeError("sample_tokens was called without a forward before it")
        step, self._step = self._step, None
        output = ModelRunnerOutput(
            req_ids=step.req_ids,
            sampled_token_ids=[[] for _ in step.req_ids],
            logprobs=[None] * len(step.req_ids),
        )
        if step.hidden is not None:
            metadata = self._batch.sampling_metadata(step.rows)
            sampled = self._sampler(self._model.compute_logits(step.hidden), metadata)
            done = sampled.token_ids >= 0
            self._batch.append_tokens(step.rows[done], sampled.token_ids[done])
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
        """Peak bytes of the activations in a forward over one request of ``num_tokens``."""
        with self._scratch_step(num_tokens) as (inputs, metadata), PeakMemory() as watched:
            self._forward(inputs, metadata)
        return int(watched.peak_bytes)

    @torch.inference_mode()
    def dummy_run(self, num_tokens: int) -> None:
        """Forward and logits of one made-up request."""
        with self._scratch_step(num_tokens) as (inputs, metadata):
            hidden = self._forward(inputs, metadata)
            self._model.compute_logits(hidden.index_select(0, inputs.sampling_tokens))

    @contextmanager
    def _scratch_step(self, num_tokens: int) -> Iterator[tuple[StepInputs, dict[str, AttentionMetadata]]]:
        """A step of one made-up request over a KV cache of its own, so that none of it is seen in the real one."""
        metadata = {}
        for name, layer in self._layers.items():
            spec = layer.kv_cache_spec(self._config.cache.block_size, self._config.model.dtype)
            num_blocks = -(-num_tokens // spec.block_size)
            layer.bind_kv_cache(torch.zeros((num_blocks + 1) * spec.page_size_bytes, dtype=torch.uint8))
            metadata[name] = AttentionMetadata(
                query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
                seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
                block_table=torch.arange(1, num_blocks + 1, dtype=torch.int32)[None],
                slot_mapping=torch.arange(num_tokens) + spec.block_size,
                max_query_len=num_tokens,
                max_seq_len=num_tokens,
            )
        yield (
            StepInputs(
                input_ids=torch.zeros(num_tokens, dtype=torch.int64),
                positions=torch.arange(num_tokens),
                metadata=[],
                sampling=np.zeros(1, dtype=np.int64),
                sampling_tokens=torch.tensor([num_tokens - 1]),
            ),
            metadata,
        )
        self._bind_kv_cache()

    def _forward(self, inputs: StepInputs, metadata: Mapping[str, AttentionMetadata]) -> Tensor:
        """Hidden states of the step's tokens: [num_tokens, hidden_size]."""
        with set_forward_context(metadata):
            return self._model(inputs.input_ids, inputs.positions)

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
