"""Worker: the life of a model on one device. The executor calls its methods in the order in which they stand here."""

from collections.abc import Callable
from typing import cast

from torch import nn

from octavo.attention import Attention, attention_layers
from octavo.config import OctavoConfig
from octavo.core import make_kv_cache_config
from octavo.errors import ConfigError
from octavo.loader import kernel_set_of, load_model
from octavo.logging import init_logger, one_line
from octavo.platforms import current_platform
from octavo.sample import LogitsProcessor, Sampler, load_logits_processors
from octavo.types import KVCacheConfig, KVCacheSpec, ModelRunnerOutput, SchedulerOutput
from octavo.worker.model_runner import CausalModel, ModelRunner
from octavo.worker.prompt_logprobs import piece_rows

__all__ = ["Worker"]

logger = init_logger(__name__)

Progress = Callable[[str, float], None]
# Tokens of the forward that is measured: few enough to be quick, enough that a token's share tells.
_PROFILED_TOKENS = 16
_WARM_UP_TOKENS = 1


class Worker:
    """Args:

    config: the final configuration.
    load: makes the model, and shows it before the weights are read; the loader's own unless a test brings another.
    """

    def __init__(
        self,
        config: OctavoConfig,
        load: Callable[[OctavoConfig, Progress | None, Callable[[nn.Module], None]], nn.Module] = load_model,
    ) -> None:
        self._config = config
        self._load = load
        self._layers: dict[str, Attention] = {}
        self._runner: ModelRunner | None = None

    def init_device(self) -> None:
        """Sizes torch's thread pool by what this process may use."""
        current_platform().init_threads()

    def load_model(self, progress: Progress | None = None) -> str:
        """Loads the weights; ``progress(stage, share)`` is told how far it is. Returns the kernel set's name."""
        processors = self._make_processors()  # first: a name that is wrong is told before the weights are read
        model = self._load(self._config, progress, self._check_stated_memory)
        self._layers = attention_layers(model)
        self._runner = ModelRunner(self._config, cast(CausalModel, model), self._layers, processors)
        return kernel_set_of(model)

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """What each attention layer keeps for a token, by layer name."""
        cache = self._config.cache
        return {
            name: layer.kv_cache_spec(cache.block_size, cache.kv_cache_dtype) for name, layer in self._layers.items()
        }

    def _check_stated_memory(self, model: nn.Module) -> None:
        """A stated size of the KV cache that is too small is told now, not when gigabytes of weights have been read."""
        cache = self._config.cache
        if cache.kv_cache_memory_bytes is not None and cache.num_gpu_blocks_override is None:
            self._layers = attention_layers(model)
            make_kv_cache_config(self.get_kv_cache_specs(), cache.kv_cache_memory_bytes, self._config)

    def determine_available_memory(self) -> int:
        """Bytes that the KV cache may take: as stated, or the configured share of what is free after loading and
        after the largest step's activations, logits and sampling. A stated number of blocks may take all of that.

        Activations are measured in one small forward and grow with the number of tokens; what attention needs
        beside them is bounded by its tiles.
        """
        cache = self._config.cache
        available = current_platform().available_memory_bytes()
        stated = cache.kv_cache_memory_bytes
        if stated is not None and cache.num_gpu_blocks_override is None:
            if stated > available:
                raise ConfigError(
                    f"--kv-cache-memory-bytes {stated} is more than the {available} bytes of memory that are free; "
                    "lower it"
                )
            return stated
        step = self._step_bytes()
        share = cache.memory_share if cache.num_gpu_blocks_override is None else 1.0
        if step >= available:
            raise ConfigError(
                f"a step of {self._config.scheduler.max_num_batched_tokens} tokens takes about {step} bytes, and "
                f"{available} bytes of memory are free; lower --max-num-batched-tokens, --max-num-seqs or "
                "--max-logprobs"
            )
        logger.debug("memory: %d bytes free, %d for a step, share %g for the KV cache", available, step, share)
        return int((available - step) * share)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig, max_model_len: int) -> None:
        """Allocates the KV cache. ``max_model_len`` may be lower than the configuration's."""
        self._loaded().initialize_kv_cache(kv_cache_config, max_model_len)

    def compile_or_warm_up_model(self) -> None:
        """Records the forward, and runs it once, so that the first request does not pay for what is set up then."""
        runner = self._loaded()
        runner.record()
        runner.warm_up(_WARM_UP_TOKENS)

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Forward of one step; sample_tokens() must follow before the next one."""
        self._loaded().execute_model(scheduler_output)

    def sample_tokens(self) -> ModelRunnerOutput:
        """Samples from the last forward."""
        return self._loaded().sample_tokens()

    def shutdown(self) -> None:
        """Lets go of model and KV cache."""
        self._runner = None
        self._layers = {}

    def _loaded(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError("the worker holds no model: load_model() comes first, and nothing after shutdown()")
        return self._runner

    def _make_processors(self) -> list[LogitsProcessor]:
        processors = []
        for processor in load_logits_processors(self._config.model.logits_processors):
            try:
                processors.append(processor(self._config))
            except Exception as error:  # not our code
                cause = one_line(f"{type(error).__name__}: {error}")
                raise ConfigError(f"--logits-processors: {processor.__name__} cannot be made: {cause}") from error
        return processors

    def _step_bytes(self) -> int:
        scheduler, model = self._config.scheduler, self._config.model
        num_tokens = min(_PROFILED_TOKENS, scheduler.max_num_batched_tokens, model.max_model_len)
        forward = self._loaded().profile_forward(num_tokens) * scheduler.max_num_batched_tokens // num_tokens
        most_logprobs = model.vocab_size if model.max_logprobs == -1 else model.max_logprobs
        listed = Sampler.listed_bytes(scheduler.max_num_batched_tokens, most_logprobs)
        # Never at once: sampling, then the logprobs of prompts, piece by piece.
        largest = max(scheduler.max_num_seqs, min(scheduler.max_num_batched_tokens, piece_rows(model.vocab_size)))
        return forward + Sampler.workspace_bytes(largest, model.vocab_size) + listed
