"""AsyncLLM: the engine for an event loop. Requests go in, streams come out; encoding text happens off the loop.

One task takes in the engine's outputs; each stream takes from its request's state what is new when its reader is
there. Knows nothing of HTTP.
"""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from octavo.config import CacheConfig, EngineArgs, OctavoConfig
from octavo.engine.client import AsyncEngineCoreClient, make_async_client
from octavo.engine.config_builder import build_config
from octavo.engine.heartbeat import Pulse
from octavo.engine.input_processor import EngineInputs, InputProcessor
from octavo.engine.news import News
from octavo.engine.output_processor import OutputProcessor
from octavo.engine.prompts import Prompt
from octavo.engine.request_state import RequestState
from octavo.engine.sampling_defaults import default_sampling_params
from octavo.engine.serial import FrontEndSlot
from octavo.engine.throughput_log import ThroughputLog
from octavo.errors import ConfigError, EngineDeadError, ModelError, OverloadedError, RequestError
from octavo.logging import init_logger, one_line
from octavo.metrics import EngineMetrics, MetricsFolder, RequestTracer
from octavo.renderers import ChatRenderer, RenderedPrompt
from octavo.tokenizers import Tokenizer, load_tokenizer
from octavo.types import EngineReady, RequestOutput, SamplingParams

__all__ = ["AsyncLLM"]

logger = init_logger(__name__)

_T = TypeVar("_T")

# So many ids are checked on the event loop, in less time than it takes to hand them to a thread. Text never is.
_INLINE_IDS = 2048
_TEXT_THREADS = 4


class _Text(NamedTuple):
    """What is loaded in this process, beside the engine."""

    tokenizer: Tokenizer
    renderer: ChatRenderer
    input_processor: InputProcessor


class AsyncLLM:
    """Use ``start()`` and ``await ready()``, or just ``generate``: the first call then starts the engine and waits.

    Args:
        config: resolved configuration; or give the options of the command line as keywords (``model=…``, …).
        slot: for one of several front ends of an engine.
        metrics_folder: where this front end's numbers meet those of others of the same engine; None: it is alone.

    Attributes:
        config: after ``ready()`` with the engine's final ``max_model_len``.
        metrics: the engine's series.
        tracer: what makes spans of requests, where traces are asked for.
        progress: (stage, share) of loading.
        engine_ready: the engine's final values, after ``ready()``.
    """

    def __init__(
        self,
        config: OctavoConfig | None = None,
        *,
        slot: FrontEndSlot | None = None,
        metrics_folder: MetricsFolder | None = None,
        **options: Any,
    ) -> None:
        if config is not None and options:
            raise TypeError("give AsyncLLM a configuration or options, not both")
        self.config = config if config is not None else build_config(EngineArgs(**options))
        self._slot = slot if slot is not None else FrontEndSlot()
        model = self.config.model
        self.metrics = EngineMetrics(
            model.served_model_name[0], max_model_len=model.max_model_len, folder=metrics_folder
        )
        endpoint = self.config.observability.otlp_traces_endpoint
        self.tracer = None if endpoint is None else RequestTracer(endpoint, model.served_model_name[0])
        self.progress: tuple[str, float] = ("not started", 0.0)
        self.engine_ready: EngineReady | None = None
        self._client: AsyncEngineCoreClient | None = None
        self._started = False  # by the caller, who then knows when it is ready
        self._threads = ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="octavo-text")
        self._text: Future[_Text] | None = None
        self._input_processor: InputProcessor | None = None
        self._output_processor: OutputProcessor | None = None
        self._ready_task: asyncio.Task[None] | None = None
        self._output_task: asyncio.Task[None] | None = None
        quiet = self.config.observability.disable_log_stats or self._slot.index > 0
        self._throughput = None if quiet else ThroughputLog()
        self._failure: EngineDeadError | None = None  # of this front end
        self._failure_exit_code = 0
        self._dead_event = asyncio.Event()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "AsyncLLM":
        return cls(build_config(engine_args))

    # ---- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the engine and returns at once. Needs no running event loop."""
        self._started = True
        self._launch()

    def _launch(self) -> None:
        self._check_alive()
        if self._client is None:
            self.progress = ("starting", 0.0)
            self._client = make_async_client(self.config, self._slot)
            self._text = self._threads.submit(_load_text, self.config)

    async def ready(self) -> None:
        """Returns when requests can be taken; starts the engine if nobody has.

        Raises:
            EngineDeadError: the engine could not load the model; the message is the cause.
            ModelError, ConfigError: the tokenizer, or a custom logits processor, cannot be loaded.
        """
        self._launch()
        if self._ready_task is None:
            self._ready_task = asyncio.create_task(self._become_ready(), name="engine-ready")
        await asyncio.shield(self._ready_task)

    async def _become_ready(self) -> None:
        assert self._client is not None
        assert self._text is not None
        try:
            text, engine_ready = await asyncio.gather(
                asyncio.wrap_future(self._text), self._client.wait_ready(self._on_progress)
            )
        except BaseException as error:
            if isinstance(error, Exception) and self.dead_error is None:
                self._fail(error)
            self.shutdown()
            raise
        self.engine_ready = engine_ready
        model = dataclasses.replace(self.config.model, max_model_len=engine_ready.max_model_len)
        self.config = dataclasses.replace(self.config, model=model)
        self.metrics.on_ready(_cache_facts(self.config.cache, engine_ready), self._progress_of_step)
        text.input_processor.max_model_len = engine_ready.max_model_len
        self._input_processor = text.input_processor
        self._output_processor = OutputProcessor(text.tokenizer, self.metrics, self._slot.index, self.tracer)
        self._output_task = asyncio.create_task(self._take_outputs(), name="engine-output-processing")
        self.progress = ("ready", 1.0)

    def _on_progress(self, stage: str, share: float) -> None:
        self.progress = (stage, share)

    @property
    def is_ready(self) -> bool:
        """Whether requests can be taken."""
        return self._output_task is not None and self.dead_error is None

    def pulse(self) -> Pulse:
        """How the engine does, as far as can be seen without asking it, also while it is being loaded."""
        return Pulse() if self._client is None else self._client.pulse()

    def _progress_of_step(self) -> tuple[float, bool]:
        heartbeat = None if self._client is None else self._client.heartbeat
        return (0.0, False) if heartbeat is None else (heartbeat.step_seconds(), heartbeat.pulse().is_overdue)

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine is gone, once it is."""
        if self._failure is not None:
            return self._failure
        return None if self._client is None else self._client.dead_error

    @property
    def exit_code_hint(self) -> int:
        """What a server should exit with once the engine is gone: 1 configuration or model, 2 a flag, 3 it died."""
        if self._failure is not None:
            return self._failure_exit_code
        return 0 if self._client is None else self._client.exit_code_hint

    def _check_alive(self) -> None:
        if self.dead_error is not None:
            raise EngineDeadError(str(self.dead_error))  # a fresh one each time: tracebacks would pile up on it

    async def wait_dead(self) -> EngineDeadError:
        """Returns the cause when the engine is gone, by a death or by ``shutdown``."""
        await self._dead_event.wait()
        assert self.dead_error is not None
        return self.dead_error

    def shutdown(self) -> None:
        """Ends the engine at any moment; streams under way raise EngineDeadError. May be called again."""
        if self._throughput is not None:
            self._throughput.close()
        if self._output_task is not None:
            self._output_task.cancel()
        # What waits there is not cancelled: who awaits it would take that for a cancellation of its own.
        self._threads.shutdown(wait=False)
        if self._client is not None:
            self._client.shutdown()
        elif self._failure is None:
            self._failure = EngineDeadError("the engine has been shut down")
        self._announce_death()
        if self.tracer is not None:
            self.tracer.close()

    @property
    def ended_well(self) -> bool:
        """False after a ``shutdown`` at which the engine did not end by itself: it was stopped, or hung."""
        return self._client is None or self._client.ended_well

    def engine_is_gone(self, cause: str) -> None:
        """For a front end that has joined another's engine: that one says how the engine has ended."""
        if self._client is not None:
            self._client.engine_is_gone(cause)
        self._announce_death()

    def _fail(self, error: BaseException) -> None:
        """The engine may be well, but nothing can be done with it any more."""
        self._failure = EngineDeadError(one_line(f"{type(error).__name__}: {error}"))
        self._failure_exit_code = 1 if isinstance(error, ConfigError | ModelError) else 3

    def _announce_death(self) -> None:
        self._dead_event.set()
        if self._output_processor is not None:
            self._output_processor.wake_all()

    # ---- text -------------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; waits for it after ``start()``."""
        return self._loaded_text().tokenizer

    @property
    def renderer(self) -> ChatRenderer:
        """Renders chats with the model's own template."""
        return self._loaded_text().renderer

    def _loaded_text(self) -> _Text:
        if self._text is None:
            self._check_alive()
            self._text = self._threads.submit(_load_text, self.config)
        return self._text.result()

    async def render(self, messages: list[dict[str, Any]], **options: Any) -> RenderedPrompt:
        """``renderer.render`` off the event loop, with its options."""
        return await self._in_thread(lambda: self.renderer.render(messages, **options))

    async def _in_thread(self, call: Callable[[], _T]) -> _T:
        self._check_alive()

        def run() -> _T:
            try:
                return call()
            except StopIteration as error:  # asyncio cannot hand this one on: who awaits it would wait for ever
                raise RuntimeError("StopIteration was raised") from error

        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    # ---- requests ---------------------------------------------------------------------------------------------------

    @property
    def default_sampling_params(self) -> SamplingParams:
        """A new SamplingParams with the values that the model's generation_config.json recommends."""
        return default_sampling_params(self.config.model, self.config.model.max_model_len)

    async def process_inputs(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
        add_special_tokens: bool = True,
    ) -> EngineInputs:
        """Checks and encodes a request without starting it. For doors that must know first that all is well.

        Args:
            sampling_params: None: the model's defaults, whose ``max_tokens`` gives way to the model's length.
            add_special_tokens: see InputProcessor.process.

        Raises:
            RequestError: see InputProcessor; OverloadedError while the model is being loaded.
            EngineDeadError: the engine is gone.
        """
        self._check_alive()
        if self._input_processor is None:
            if self._started:
                raise OverloadedError("the model is still loading; try again later")
            await self.ready()
        processor = self._input_processor
        assert processor is not None

        def process() -> EngineInputs:
            return processor.process(
                request_id,
                prompt,
                sampling_params,
                arrival_time=arrival_time,
                priority=priority,
                cache_salt=cache_salt,
                add_special_tokens=add_special_tokens,
            )

        return process() if _is_short(prompt, sampling_params) else await self._in_thread(process)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields what comes, in the form of ``sampling_params.output_kind``. A reader that is slower than the engine
        gets several steps as one output. Closing or cancelling the generator aborts the request.

        Raises:
            RequestError: the request cannot be served as sent.
            RequestFailedError: the engine could not go on with this request.
            EngineDeadError: the engine is gone; the message is the cause.
        """
        inputs = await self.process_inputs(
            prompt, sampling_params, request_id, priority=priority, cache_salt=cache_salt
        )
        async with aclosing(self.generate_from(inputs)) as outputs:
            async for output in outputs:
                yield output

    async def generate_from(self, *inputs: EngineInputs) -> AsyncGenerator[RequestOutput, None]:
        """``generate`` for what ``process_inputs`` has checked. Of several the engine takes all or none; their outputs
        come as they are there, and the failure of one ends them all."""
        self._check_alive()
        assert self._client is not None
        news = News()
        states = self._add(inputs, news.tell)
        try:
            self._client.add_requests([request for state in states for request in state.engine_requests])
            going_on = states
            while going_on:
                if not news.told and not self._dead_event.is_set():
                    await news.wait()
                news.told = False
                before, going_on, something = going_on, [], False
                for state in before:
                    if state.tables_to_make and (work := state.table_work()):
                        await asyncio.to_thread(work)
                    output = state.take()
                    if state.error is not None:
                        raise state.error
                    if output is not None:
                        something = True
                        yield output
                    if output is None or not output.finished:
                        going_on.append(state)
                if not something:
                    self._check_alive()  # not before: outputs may be left that came before the death
        finally:
            self._abort([state.inputs.request_id for state in states if not state.finished])

    def _add(self, inputs: Sequence[EngineInputs], wake: Callable[[], None]) -> list[RequestState]:
        assert self._output_processor is not None
        states: list[RequestState] = []
        try:
            for each in inputs:
                states.append(self._output_processor.add_request(each, wake))
        except RequestError:
            for state in states:
                self._output_processor.discard(state)
            raise
        return states

    async def abort(self, request_id: str) -> None:
        """Ends a request; its stream gets a last output with finish reason "abort". An unknown id is ignored."""
        self._abort([request_id])

    def _abort(self, request_ids: list[str]) -> None:
        if self._output_processor is None or self._client is None:
            return
        engine_ids = self._output_processor.abort(request_ids)
        if engine_ids and self.dead_error is None:
            self._client.abort_requests(engine_ids)

    async def _take_outputs(self) -> None:
        """Takes in the engine's outputs, step by step, until it is gone."""
        assert self._client is not None
        assert self._output_processor is not None
        try:
            while True:
                step = await self._client.get_outputs()
                processed = self._output_processor.process(step)
                if processed.abort_ids and self._client.dead_error is None:  # outputs may be left after a death
                    self._client.abort_requests(processed.abort_ids)
                if self._throughput is not None and step.scheduler_stats is not None:
                    self._throughput.on_step(step.scheduler_stats)
        except EngineDeadError:
            pass
        except asyncio.CancelledError:  # by shutdown, which announces it
            raise
        except BaseException as error:
            # A fault of ours, or a panic of a library in Rust, which is no Exception. Without this task nobody would
            # ever hear anything again.
            logger.exception("processing of the engine's outputs failed")
            self._fail(error)
            if isinstance(error, KeyboardInterrupt | SystemExit):
                self._announce_death()
                raise
        self._announce_death()

    # ---- the engine's own affairs -----------------------------------------------------------------------------------

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False if blocks are in use."""
        return bool(await self._call_engine("reset_prefix_cache"))

    async def stats(self) -> dict[str, float]:
        """The scheduler's state by name, as SchedulerStats has it."""
        stats: dict[str, float] = await self._call_engine("stats")
        return stats

    async def _call_engine(self, method: str) -> Any:
        await self.ready()
        assert self._client is not None
        return await self._client.call_utility(method)


def _load_text(config: OctavoConfig) -> _Text:
    tokenizer = load_tokenizer(Path(config.model.tokenizer_path))
    return _Text(tokenizer, ChatRenderer(tokenizer), InputProcessor(config, tokenizer))


def _cache_facts(cache: CacheConfig, ready: EngineReady) -> dict[str, object]:
    """The KV cache in the words of vLLM's options."""
    return {
        "block_size": ready.block_size,
        "cache_dtype": cache.kv_cache_dtype,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "gpu_memory_utilization": cache.memory_share,
        "kv_cache_memory_bytes": cache.kv_cache_memory_bytes,
        "kv_cache_size_tokens": ready.num_kv_blocks * ready.block_size,
        "num_gpu_blocks": ready.num_kv_blocks,
        "num_gpu_blocks_override": cache.num_gpu_blocks_override,
    }


def _is_short(prompt: Any, params: SamplingParams | None) -> bool:
    """Whether it is done with sooner than a thread would take it over: few ids, and nothing to encode or to ask."""
    token_ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    if not isinstance(token_ids, list) or len(token_ids) > _INLINE_IDS:
        return False
    if not isinstance(params, SamplingParams):
        return True
    lists = (params.logit_bias, params.allowed_token_ids, params.bad_words_token_ids)
    return not params.bad_words and not params.extra_args and sum(len(each or ()) for each in lists) <= _INLINE_IDS
