"""LLM: the engine for a script. Everything is asked for at once and comes back in the order of the prompts.

EngineCore runs in the caller's process (see InprocClient), so that a breakpoint works anywhere.
"""

import dataclasses
import gc
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from octavo.checkpoints import DEFAULT_MODEL
from octavo.config import EngineArgs, OctavoConfig
from octavo.engine.client import EngineCoreClient, make_sync_client
from octavo.engine.config_builder import build_config
from octavo.engine.input_processor import EngineInputs, InputProcessor
from octavo.engine.output_processor import OutputProcessor
from octavo.engine.progress_bar import ProgressBar
from octavo.engine.prompts import Prompt, TokensPrompt
from octavo.engine.request_state import RequestState
from octavo.engine.sampling_defaults import default_sampling_params
from octavo.errors import RequestError
from octavo.logging import init_logger
from octavo.renderers import ChatRenderer
from octavo.tokenizers import Tokenizer, load_tokenizer
from octavo.types import EngineCoreOutputs, RequestOutput, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from octavo.metrics import RequestTracer

__all__ = ["LLM"]

logger = init_logger(__name__)

_T = TypeVar("_T")
Messages = list[dict[str, Any]]


class LLM:
    """A model, loaded and ready. To be used from one thread.

    Args:
        model: alias, local folder, .gguf file or hub name.
        options: those of the command line, with underscores: ``dtype``, ``max_model_len``, ``max_num_seqs``,
            ``max_num_batched_tokens``, ``enable_prefix_caching``, ``seed``, ….

    Attributes:
        config: the final configuration.

    Raises:
        ConfigError, ModelError: the model cannot be loaded so (EngineDeadError, where an engine process found out).
    """

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        with _no_collections():
            config = build_config(EngineArgs(model=model, **options), offline=True)
            self._tokenizer = load_tokenizer(Path(config.model.tokenizer_path))  # lets go of Python's lock
            self._renderer = ChatRenderer(self._tokenizer)
            self._input_processor = InputProcessor(config, self._tokenizer)
            tracer = _make_tracer(config)
            self._client: EngineCoreClient = make_sync_client(config)
        # Also when this object is dropped, or the interpreter ends, without a shutdown.
        self._finalizer = weakref.finalize(self, _release, self._client, tracer)
        max_model_len = self._client.wait_ready().max_model_len
        model_config = dataclasses.replace(config.model, max_model_len=max_model_len)
        self.config: OctavoConfig = dataclasses.replace(config, model=model_config)
        self._input_processor.max_model_len = max_model_len
        self._output_processor = OutputProcessor(self._tokenizer, tracer=tracer)
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continues prompts; the outputs come in their order.

        Args:
            prompts: text, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``, or a list of such.
            sampling_params: one for all, or a list of one for each; default: ``get_default_sampling_params()``, whose
                ``max_tokens`` then gives way to the model's length.
            use_tqdm: show a progress bar.
            priority: one for each prompt; lower goes first (needs ``scheduling_policy="priority"``).

        Raises:
            RequestError: (a ValueError) one of the prompts cannot be served as it is; then none is.
            EngineDeadError: the engine is gone.
        """
        if not isinstance(prompts, Sequence | dict):
            raise RequestError(f"prompts must be a prompt or a list of prompts, got {prompts!r}", param="prompts")
        each = cast("Sequence[Prompt]", [prompts] if isinstance(prompts, str | dict) else prompts)
        count = len(each)
        params = _one_each("sampling_params", sampling_params, count)
        priorities = [0] * count if priority is None else _one_each("priority", priority, count)

        def process(index: int) -> EngineInputs:
            if sampling_params is not None and not isinstance(params[index], SamplingParams):
                message = f"sampling_params must be SamplingParams, got {type(params[index]).__name__}"
                raise RequestError(message, param="sampling_params")
            request_id = str(self._num_requests + index)
            return self._input_processor.process(
                request_id,
                each[index],
                params[index],
                priority=priorities[index],
                output_kind=RequestOutputKind.FINAL_ONLY,
            )

        inputs = _for_each(count, process)
        self._num_requests += count
        return self._run(inputs, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers a conversation, or each of a list of conversations.

        Args:
            messages: ``[{"role": …, "content": …}, …]``, or a list of such lists.
            chat_template: Jinja text, instead of the model's own template.
            add_generation_prompt: let the template begin the answer.
            continue_final_message: the last message is the beginning of what is generated, and is left open. Goes
                before ``add_generation_prompt``.
            chat_template_kwargs: further variables of the template.

        Raises:
            RequestError: the template refuses the messages; else as ``generate``.
        """
        conversations = messages if messages and isinstance(messages[0], list) else [messages]

        def render(index: int) -> TokensPrompt:
            rendered = self._renderer.render(
                conversations[index],
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=chat_template_kwargs,
            )
            return {"prompt": rendered.text, "prompt_token_ids": rendered.token_ids}

        return self.generate(_for_each(len(conversations), render), sampling_params, use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """A new SamplingParams with the values that the model's generation_config.json recommends."""
        return default_sampling_params(self.config.model, self.config.model.max_model_len)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False if blocks are in use."""
        return bool(self._client.call_utility("reset_prefix_cache"))

    def stats(self) -> dict[str, float]:
        """What the scheduler counts, and how it stands: the fields of SchedulerStats by name."""
        found: dict[str, float] = self._client.call_utility("stats")
        return found

    def shutdown(self) -> None:
        """Releases the model. May be called again."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _run(self, inputs: list[EngineInputs], show_progress: bool) -> list[RequestOutput]:
        """Gives all requests to the engine and steps until they are finished, or until Ctrl-C."""
        states: list[RequestState] = []
        try:
            with ProgressBar(len(inputs), show_progress) as bar, _postponed_interrupt() as deliver_interrupt:
                for each in inputs:
                    states.append(state := self._output_processor.add_request(each))
                    self._hand_over(state)
                num_unfinished = len(states)
                while num_unfinished:
                    deliver_interrupt()
                    num_finished, num_tokens = self._take_in(self._client.get_outputs())
                    num_unfinished -= num_finished
                    bar.update(num_finished, num_tokens)
        finally:
            self._abort_unfinished(states)
        outputs = [output for state in states if (output := state.take()) is not None]
        for state in states:
            if state.error is not None:
                logger.error("request %s failed: %s", state.inputs.request_id, state.error)
        return outputs

    def _hand_over(self, state: RequestState) -> None:
        try:
            self._client.add_requests(state.engine_requests)
        except RequestError:
            self._output_processor.discard(state)
            raise

    def _take_in(self, step: EngineCoreOutputs) -> tuple[int, int]:
        """(requests that the step finished, tokens that it brought)."""
        processed = self._output_processor.process(step)
        if processed.abort_ids:
            self._client.abort_requests(processed.abort_ids)
        for state in processed.changed:
            if isinstance(state.error, RequestError):  # the engine has refused it
                raise state.error
        return len(processed.changed), processed.counts.num_generation_tokens

    def _abort_unfinished(self, states: list[RequestState]) -> None:
        engine_ids = self._output_processor.abort(state.inputs.request_id for state in states)
        if engine_ids and self._client.dead_error is None:
            self._client.abort_requests(engine_ids)


def _make_tracer(config: OctavoConfig) -> "RequestTracer | None":
    endpoint = config.observability.otlp_traces_endpoint
    if endpoint is None:
        return None
    from octavo.metrics import RequestTracer

    return RequestTracer(endpoint, config.model.served_model_name[0])


def _release(client: EngineCoreClient, tracer: "RequestTracer | None") -> None:
    client.shutdown()
    if tracer is not None:
        tracer.close()


def _one_each(name: str, values: Any, count: int) -> list[Any]:
    """A value for each prompt, from one for all or a sequence."""
    if not isinstance(values, Sequence):
        return [values] * count
    if len(values) != count:
        raise RequestError(f"{name} has {len(values)} entries for {count} prompts: one for each is needed", param=name)
    return list(values)


def _for_each(count: int, make: Callable[[int], _T]) -> list[_T]:
    """``[make(0), make(1), …]``; a refusal says which of several it is about."""
    made = []
    for index in range(count):
        try:
            made.append(make(index))
        except RequestError as error:
            if count == 1:
                raise
            raise type(error)(f"prompt {index}: {error}", param=error.param) from None
    return made


@contextmanager
def _no_collections() -> Iterator[None]:
    """A walk of Python's collector through all of torch's objects takes 80 ms, and finds nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def _postponed_interrupt() -> Iterator[Callable[[], None]]:
    """Yields a function that lets a Ctrl-C act which was pressed meanwhile; at the end it acts in any case.

    A step that is cut in its middle would leave scheduler and worker at odds, so the first Ctrl-C waits for the end of
    the step; a second one does not wait. What it does is up to the handler that was there before.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    pressed: list[FrameType | None] = []

    def postpone(signum: int, frame: FrameType | None) -> None:
        pressed.append(frame)
        if len(pressed) > 1:
            deliver()

    def deliver() -> None:
        if pressed:
            frame = pressed[0]
            pressed.clear()
            handler(signal.SIGINT, frame)

    signal.signal(signal.SIGINT, postpone)
    try:
        yield deliver
    finally:
        signal.signal(signal.SIGINT, handler)
        deliver()
