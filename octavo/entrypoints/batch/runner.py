"""A run of a batch: lines in, a bounded number of requests in flight, answers out as they come.

The requests go through the objects that serve the routes, so they are checked, refused and answered as those are. What
failed and may succeed another time is tried again, a few times, and once more by the next run. Who ends the run keeps
what has been answered: the same command goes on from there.
"""

import asyncio
import contextlib
import signal
import time
import uuid
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from octavo.config import AnswerConfig, EngineArgs, OctavoConfig
from octavo.engine import AsyncLLM, build_config
from octavo.entrypoints.batch.batch_line import (
    ROUTES,
    BadLine,
    BatchRequest,
    answer_line,
    error_line,
    is_transient,
    line_id,
    read_line,
)
from octavo.entrypoints.batch.input_lines import LONGEST_LINE, InputLine, count_lines, open_input, read_lines
from octavo.entrypoints.batch.output_file import Claim, OutputFile
from octavo.entrypoints.errors import error_info
from octavo.entrypoints.ignored_fields import remarks, unknown_fields
from octavo.entrypoints.loading import load_failure, read_chat_template
from octavo.entrypoints.openai import Answer
from octavo.entrypoints.server_state import Services
from octavo.errors import (
    ConfigError,
    EngineDeadError,
    OctavoError,
    OverloadedError,
    RequestError,
)
from octavo.logging import init_logger, say

__all__ = ["BatchOptions", "run_batch"]

logger = init_logger(__name__)

# Requests in flight for each that the engine runs at once: as one ends, another is there.
_IN_FLIGHT = 2
# A request that failed and may succeed another time is asked so often, after so long, twice as long, …
_MOST_TRIES = 4
_FIRST_WAIT_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """``input_file``, ``output_file``: ``-`` is standard input, or output. ``answer``: as for a server."""

    input_file: str
    output_file: str
    answer: AnswerConfig = field(default_factory=AnswerConfig)


def run_batch(engine_args: EngineArgs, options: BatchOptions) -> int:
    """Returns the exit code: 0 when every line has its answer, 1 when some have only failed for now, 128 plus the
    signal's number when one ended the run.

    Raises:
        ConfigError, ModelError: it cannot run as configured.
        EngineDeadError: the engine has died.
    """
    if options.input_file != "-" and Path(options.output_file).exists():
        with contextlib.suppress(OSError):
            if Path(options.input_file).samefile(options.output_file):
                raise ConfigError(f"--output-file {options.output_file} is the input file, too; name another one")
    source = open_input(options.input_file)
    with contextlib.closing(OutputFile(options.output_file, say)) as output:
        if output.num_answered:
            say(f"{options.output_file} has {output.num_answered} answers; going on with the rest")
        template = read_chat_template(options.answer)
        say(f"octavo is loading {engine_args.stated['model'].get('model', '')}".rstrip())
        config = build_config(engine_args)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_Batch(config, options.answer, template, source, output).run())


class _Batch:
    """One run.

    Args:
        config: of the engine.
        answer: how requests are read and answered.
        template: instead of the model's own.
        source: the lines.
        output: their answers.
    """

    def __init__(
        self, config: OctavoConfig, answer: AnswerConfig, template: str | None, source: BinaryIO, output: OutputFile
    ) -> None:
        self._engine = AsyncLLM(config)
        self._answer = answer
        self._template = template
        self._source = source
        self._output = output
        self._counts: Counter[str] = Counter()
        self._began: float | None = None  # when the engine was there
        self._in_flight = 0  # without those that wait for room
        self._one_ended = asyncio.Event()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), refresh_per_second=2)
        self._task = self._progress.add_task("run-batch", total=count_lines(source))

    async def run(self) -> int:
        signalled: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, _settle, signalled, signum)
        work = asyncio.create_task(self._work(), name="batch")
        death = asyncio.create_task(self._engine.wait_dead(), name="engine-death")
        try:
            await asyncio.wait((work, signalled, death), return_when=asyncio.FIRST_COMPLETED)
            if death.done() and self._began is None:  # it could not be loaded, which the other task tells better
                await asyncio.wait((work, signalled), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                return 1 if self._counts["for now"] else 0
            if signalled.done():
                return 128 + signalled.result()
            raise death.result()
        finally:
            work.cancel()
            death.cancel()
            await asyncio.gather(work, death, return_exceptions=True)
            self._engine.shutdown()
            self._progress.stop()
            if self._began is not None:
                seconds = time.monotonic() - self._began
                say(self._summary(seconds, is_whole=not work.cancelled() and work.exception() is None))

    async def _work(self) -> None:
        services = await self._load()
        self._progress.start()
        self._began = time.monotonic()
        slots = asyncio.Semaphore(_IN_FLIGHT * self._engine.config.scheduler.max_num_seqs)
        try:
            async with asyncio.TaskGroup() as group, aclosing(read_lines(self._source)) as lines:
                async for line in lines:
                    request = self._take(line)
                    if request is None:
                        self._progress.advance(self._task)
                        continue
                    await slots.acquire()
                    assert line.text is not None
                    self._in_flight += 1
                    task = group.create_task(self._serve(services, line_id(line.text), request))
                    task.add_done_callback(lambda _: slots.release())
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None  # they have one cause, or the first is as good as any

    async def _load(self) -> Services:
        try:
            await self._engine.ready()
        except EngineDeadError as error:
            raise load_failure(self._engine, error) from None
        answer = self._answer
        return Services(self._engine, self._template, answer.reasoning_parser, answer.trust_request_chat_template)

    def _take(self, line: InputLine) -> BatchRequest | None:
        """What the line asks, if that is still to be answered; tells of a line that asks nothing."""
        text = line.text or b""
        try:
            if line.text is None:
                raise BadLine(f"the line is longer than {LONGEST_LINE} bytes")
            request = read_line(text)
            claim = self._output.claim(request.custom_id)
            if claim is Claim.TWICE:
                raise BadLine(f"custom_id {request.custom_id!r:.100} was in an earlier line, too", request.custom_id)
        except BadLine as bad:
            if self._output.told_bad(line_id(text)):
                self._counts["skipped"] += 1
            else:
                self._output.add(error_line(text, line.number, bad))
                self._counts["bad"] += 1
            return None
        if claim is Claim.ANSWERED:
            self._counts["skipped"] += 1
            return None
        return request

    async def _serve(self, services: Services, answer_id: str, request: BatchRequest) -> None:
        """Answers one request. The engine's death is raised: what it left unanswered is for the next run."""
        serving = getattr(services, ROUTES[request.url])
        request_id = serving.id_prefix + uuid.uuid4().hex
        wait = _FIRST_WAIT_SECONDS
        try:
            for _ in range(_MOST_TRIES - 1):
                status, body, headers = await self._ask(serving, request.body, request_id)
                if not is_transient(status):
                    break
                self._counts["tries"] += 1
                await asyncio.sleep(wait)
                wait *= 2
            else:
                status, body, headers = await self._ask(serving, request.body, request_id)
        finally:
            self._in_flight -= 1
            self._one_ended.set()
            self._one_ended = asyncio.Event()
        if status == 200:
            self._counts["tokens"] += body.usage.completion_tokens
        else:
            self._counts["failed"] += 1
            self._counts["for now"] += is_transient(status)
        self._output.add(answer_line(answer_id, request.custom_id, status, request_id, body, headers))
        self._counts["answered"] += 1
        self._progress.advance(self._task)

    async def _ask(self, serving: Any, body: dict[str, Any], request_id: str) -> tuple[int, Any, dict[str, str]]:
        """(status, body, headers) of the route's answer."""
        try:
            answer, ignored = await self._create(serving, body, request_id)
        except EngineDeadError:
            raise
        except Exception as error:
            if not isinstance(error, OctavoError):
                logger.exception("a request of the batch failed")
            info = error_info(error)
            return info.code, {"error": info}, {}
        return 200, answer.content, remarks(ignored, answer)

    async def _create(self, serving: Any, body: dict[str, Any], request_id: str) -> tuple[Answer, list[str]]:
        """(the answer, names of fields without effect)."""
        asked = serving.parse(body)
        if asked.stream:
            raise RequestError("a batch has no streams: leave stream out", param="stream")
        ignored: list[str] = asked.ignored_fields()
        if ignored and self._answer.strict_requests:
            raise unknown_fields(ignored)
        while True:
            try:
                answer: Answer = await serving.create(asked, request_id, time.monotonic())
                return answer, ignored
            except OverloadedError:
                if self._in_flight == 1:  # an idle engine takes any request, so this is no matter of room
                    raise
                self._in_flight -= 1
                try:
                    await self._one_ended.wait()
                finally:
                    self._in_flight += 1

    def _summary(self, seconds: float, is_whole: bool) -> str:
        counts = self._counts
        parts = [f"{counts['answered'] - counts['failed']} answered"]
        if counts["failed"]:
            parts.append(f"{counts['failed']} ended with an error")
        if counts["for now"]:
            parts.append(f"{counts['for now']} of those may succeed another time: the same command asks them again")
        if counts["tries"]:
            parts.append(f"{counts['tries']} further tries")
        if counts["bad"]:
            parts.append(f"{counts['bad']} bad lines")
        if counts["skipped"]:
            parts.append(f"{counts['skipped']} answered before")
        if counts["tokens"]:
            parts.append(f"{counts['tokens']} output tokens, {counts['tokens'] / seconds:,.0f} a second")
        text = f"{'done' if is_whole else 'ended before its end'}: {'; '.join(parts)}"
        return text if is_whole else f"{text}; the same command goes on from here"


def _settle(future: "asyncio.Future[int]", signum: int) -> None:
    if not future.done():
        future.set_result(signum)
