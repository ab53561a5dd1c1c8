"""What the routes and the process around them know of each other: how far the engine is, and what is under way."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.config import ServerConfig
from octavo.engine import Pulse
from octavo.entrypoints.active_requests import ActiveRequests
from octavo.entrypoints.errors import UnavailableError
from octavo.entrypoints.front_end_beats import FrontEndBeats
from octavo.entrypoints.openai import (
    OpenAIServingChat,
    OpenAIServingCompletion,
    OpenAIServingDetokenization,
    OpenAIServingModels,
    OpenAIServingTokenization,
)
from octavo.entrypoints.probes import Probes
from octavo.entrypoints.request_body import BodyMemory
from octavo.entrypoints.request_logger import RequestLogger
from octavo.errors import ConfigError
from octavo.metrics import MetricsFolder
from octavo.parsers import REASONING_PARSERS, ReasoningFormat, detect_reasoning_format
from octavo.renderers import ChatRenderer, RenderedPrompt

if TYPE_CHECKING:
    from octavo.engine import AsyncLLM

__all__ = ["ServerState", "Services"]

_FROM_TEMPLATE = "auto"
_NO_REASONING = "none"


class Services:
    """The routes' objects, once the engine is loaded.

    Args:
        engine: loaded.
        chat_template: instead of the model's own.
        reasoning_parser: how chats' answers are split into reasoning and content: a name of REASONING_PARSERS,
            "none", or "auto": as the chat template says.
        trust_template: requests may bring a chat template of their own.
        request_logger: told of what is asked for.
    """

    def __init__(
        self,
        engine: "AsyncLLM",
        chat_template: str | None = None,
        reasoning_parser: str = _FROM_TEMPLATE,
        trust_template: bool = False,
        request_logger: RequestLogger | None = None,
    ) -> None:
        self.engine = engine
        self.models = models = OpenAIServingModels(engine.config)
        self.completion = OpenAIServingCompletion(engine, models, request_logger)
        render = engine.render if chat_template is None else _renderer(engine, chat_template)
        template = engine.tokenizer.chat_template if chat_template is None else chat_template
        reasoning_format = _reasoning_format(reasoning_parser, template)
        self.chat = OpenAIServingChat(engine, models, render, reasoning_format, trust_template, request_logger)
        self.tokenization = OpenAIServingTokenization(engine, models, render, trust_template)
        self.detokenization = OpenAIServingDetokenization(engine, models)


def _renderer(engine: "AsyncLLM", chat_template: str) -> Any:
    renderer = ChatRenderer(engine.tokenizer, chat_template)

    async def render(messages: list[dict[str, Any]], **options: Any) -> RenderedPrompt:
        return await asyncio.to_thread(renderer.render, messages, **options)

    return render


def _reasoning_format(parser: str, chat_template: str | None) -> ReasoningFormat | None:
    if parser == _NO_REASONING:
        return None
    if parser == _FROM_TEMPLATE:
        return detect_reasoning_format(chat_template)
    found: ReasoningFormat = REASONING_PARSERS.get(parser)
    return found


class ServerState:
    """Args:

    config: the server's settings.
    shared_dir: private folder of all front ends of the server; None: this is the only one.
    metrics_folder: where the front ends' numbers meet; None: there is one front end.

    Raises:
        ConfigError: there is no such reasoning parser.

    Attributes:
        stage: what is being loaded, until ``services`` are there.
        progress: share of this stage, 0 to 1; 0 also of a stage whose share nobody can tell.
        engine: also while it is being loaded.
        services: set when the engine is loaded.
        beats: of all front ends; None: there is one.
        draining: no new request is let in.
        active: the generations under way.
        body_memory: for the bodies of requests.
        probes: what health checks are told.
        refresh_access: given the scheduling policy, takes changed files of keys until it is cancelled.
    """

    def __init__(
        self,
        config: ServerConfig | None = None,
        shared_dir: Path | None = None,
        metrics_folder: MetricsFolder | None = None,
    ) -> None:
        self.config = config if config is not None else ServerConfig()
        self.shared_dir = shared_dir
        self.metrics_folder = metrics_folder
        known = (_FROM_TEMPLATE, _NO_REASONING, *REASONING_PARSERS)
        if self.config.logs.enable_log_outputs and not self.config.logs.enable_log_requests:
            raise ConfigError("--enable-log-outputs needs --enable-log-requests; state both, or neither")
        parser = self.config.answer.reasoning_parser
        if parser not in known:
            raise ConfigError(f"--reasoning-parser must be one of {', '.join(known)}; got {parser!r}")
        self.stage = "starting"
        self.progress = 0.0
        self.engine: AsyncLLM | None = None
        self.services: Services | None = None
        self.beats = None
        if metrics_folder is not None:
            folder = metrics_folder
            self.beats = FrontEndBeats(folder.path, folder.front_end, folder.num_front_ends)
        self.draining = False
        self.active = ActiveRequests()
        self.body_memory = BodyMemory(self.config.limits.max_body_bytes)
        self.probes = Probes(self)
        self.refresh_access: Callable[[str], Coroutine[Any, Any, None]] | None = None

    def attach(self, engine: "AsyncLLM", chat_template: str | None = None) -> None:
        """Begins to serve with a loaded engine.

        Args:
            chat_template: instead of the model's own.

        Raises:
            ConfigError: the template is not valid.
        """
        self.engine = engine
        answer, logs = self.config.answer, self.config.logs
        self.services = Services(
            engine,
            chat_template,
            answer.reasoning_parser,
            answer.trust_request_chat_template,
            RequestLogger(logs.max_log_len, logs.enable_log_outputs) if logs.enable_log_requests else None,
        )

    def continue_trace(self, headers: Mapping[str, str]) -> None:
        """What the current task asks of the engine belongs to the trace that a request's headers name."""
        tracer = None if self.services is None else self.services.engine.tracer
        if tracer is not None:
            tracer.continue_trace(headers)

    def engine_pulse(self) -> Pulse:
        """How the engine does, loaded or not."""
        return Pulse() if self.engine is None else self.engine.pulse()

    def front_ends_pulse(self) -> Pulse:
        """How the other front ends do, once requests are served."""
        return Pulse() if self.beats is None or self.services is None else self.beats.pulse()

    def pulse(self) -> Pulse:
        """The worse of both."""
        pulses = (self.engine_pulse(), self.front_ends_pulse())
        return max(pulses, key=lambda pulse: (pulse.is_stuck, pulse.is_overdue))

    @property
    def dead_cause(self) -> str | None:
        """Why the engine is gone, once it is."""
        error = None if self.services is None else self.services.engine.dead_error
        return None if error is None else str(error)

    def serving(self) -> Services:
        """The services; UnavailableError if requests cannot be taken now."""
        if self.services is None:
            share = f", {self.progress:.0%}" if self.progress else ""
            raise UnavailableError(f"the model is still loading ({self.stage}{share}); try again later")
        if self.dead_cause is not None:
            raise UnavailableError("the engine has died; the server is going down")
        if self.draining:
            raise UnavailableError("the server is shutting down and takes no new requests")
        return self.services
