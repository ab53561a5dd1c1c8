"""A server in this process: the real app over a fake engine that answers at once and does as it is told."""

import asyncio
import dataclasses
import functools
import itertools
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from octavo.config import (
    AccessConfig,
    AnswerConfig,
    EngineArgs,
    LimitsConfig,
    LogsConfig,
    OctavoConfig,
    ServerConfig,
    resolve_config,
)
from octavo.engine import InputProcessor, Pulse
from octavo.entrypoints import ServerState, build_app
from octavo.errors import EngineDeadError
from octavo.metrics import EngineMetrics
from octavo.renderers import ChatRenderer
from octavo.tokenizers import Tokenizer
from octavo.types import (
    CompletionOutput,
    FinishedSequence,
    FinishReason,
    Logprob,
    ModelFacts,
    PlatformFacts,
    RequestMetrics,
    RequestOutput,
    RequestOutputKind,
    SchedulerStats,
    StepCounts,
)
from tests.entrypoints.live import LiveServer, greedy

VOCAB_SIZE = 300
MAX_MODEL_LEN = 64
MAX_BODY_BYTES = 20_000
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


# What the fake engine's chats are rendered with: the first letter of each role, and the text.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'wizard' %}{{ raise_exception('no wizards') }}{% endif %}"
    "{{ message.role[0] }}:{{ message.content }}{% endfor %}"
    "{% for document in documents or [] %}[{{ document.text }}]{% endfor %}"
)
_GAP_TOKENS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]


@functools.cache
def _backend(with_gap_tokens: bool) -> Any:
    """A token a byte, with its value plus 3 as id; then the special tokens."""
    bytes_in_order = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda symbol: byte_of(symbol))
    vocab = {name: index for index, name in enumerate(["<unk>", "<s>", "</s>", *bytes_in_order])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<unk>", "<s>", "</s>", *(_GAP_TOKENS if with_gap_tokens else [])])
    return backend


def byte_of(symbol: str) -> int:
    """The byte that a symbol of the byte-level alphabet stands for: printable ones themselves, the others in order."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if ord(symbol) < 256:
        return ord(symbol)
    hidden = [value for value in range(256) if chr(value) not in alphabet]
    return hidden[ord(symbol) - 256]


def make_tokenizer(with_gap_tokens: bool = False) -> Tokenizer:
    special = frozenset(["<unk>", "<s>", "</s>", *(_GAP_TOKENS if with_gap_tokens else [])])
    return Tokenizer(
        _backend(with_gap_tokens),
        named_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        special_tokens=special,
        chat_template=None,
        file="tokenizer.json",
    )


def make_config(**stated: Any) -> OctavoConfig:
    facts = ModelFacts(
        path="somewhere",
        format="safetensors",
        architecture="LlamaForCausalLM",
        hf_config={},
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_MODEL_LEN,
        dtype="float32",
        weight_bytes=1,
        generation_config={},
        eos_token_ids=[2],
        fingerprint="f",
    )
    platform = PlatformFacts(
        name="cpu",
        num_threads=1,
        supported_dtypes=["bfloat16", "float32"],
        default_memory_share=0.4,
        default_max_num_batched_tokens=2048,
        offline_max_num_batched_tokens=2048,
        default_max_num_seqs=128,
        default_block_size=16,
        async_scheduling=False,
    )
    return resolve_config(EngineArgs(**({"model": "m", "seed": 0} | stated)), facts, platform)


class FakeAsyncLLM:
    """AsyncLLM's surface. The answer to any prompt is ``answer``, over and over, a character a token.

    Attributes:
        answer: what it says.
        opening: what its chat template writes after the messages.
        rendered: the messages and rendering options of each chat.
        started: engine requests that have ever been started.
        running: those under way.
        aborted: those that were closed before their end.
        hold_after: a request stops after so many tokens, until ``release`` is set.
        fail_after: (tokens, error): what happens to a request then.
        logprob_of_b: logprob of every second token.
    """

    def __init__(self, defaults: dict[str, Any] | None = None, with_gap_tokens: bool = False, **stated: Any) -> None:
        self.answer = ALPHABET
        self.opening = ""
        self.rendered: list[tuple[Any, Any]] = []
        self.config = make_config(**stated)
        if defaults is not None:
            model = dataclasses.replace(self.config.model, default_sampling_params=defaults)
            self.config = dataclasses.replace(self.config, model=model)
        self.tokenizer = make_tokenizer(with_gap_tokens)
        self.metrics = EngineMetrics("m")
        self.tracer = None
        self.dead_error: EngineDeadError | None = None
        self.how_it_does = Pulse()
        self.started: list[str] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.hold_after: int | None = None
        self.release = asyncio.Event()
        self.fail_after: tuple[int, Exception] | None = None
        self.logprob_of_b = -1.5
        self._inputs = InputProcessor(self.config, self.tokenizer)

    def lengthen(self, max_model_len: int) -> None:
        """Takes longer prompts than before."""
        self._inputs.max_model_len = max_model_len

    async def render(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        self.rendered.append((messages, options))
        opening = self.opening if options["add_generation_prompt"] else ""
        return ChatRenderer(self.tokenizer, CHAT_TEMPLATE + opening).render(messages, **options)

    def pulse(self) -> Pulse:
        return self.how_it_does

    async def process_inputs(self, prompt: Any, params: Any, request_id: str, **options: Any) -> Any:
        return self._inputs.process(request_id, prompt, params, **options)

    async def generate_from(self, *inputs: Any) -> AsyncGenerator[RequestOutput, None]:
        """As they come; the failure of one ends them all."""
        queue: asyncio.Queue[RequestOutput | Exception | None] = asyncio.Queue(maxsize=1)

        async def pump(one: Any) -> None:
            try:
                async with aclosing(self.generate_one(one)) as outputs:
                    async for output in outputs:
                        await queue.put(output)
            except Exception as error:
                await queue.put(error)
            else:
                await queue.put(None)

        pumps = [asyncio.create_task(pump(one)) for one in inputs]
        try:
            num_unfinished = len(pumps)
            while num_unfinished:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is not None:
                    yield item
                num_unfinished -= item is None
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def generate_one(self, inputs: Any) -> AsyncGenerator[RequestOutput, None]:
        request_id = inputs.request_id
        self.started.append(request_id)
        self.running.add(request_id)
        self._tell()
        try:
            delta = inputs.params.output_kind == RequestOutputKind.DELTA
            total = inputs.params.max_tokens
            for position in range(total):
                await self._obey(position)
                await asyncio.sleep(0)
                if delta:
                    yield self._output(inputs, position, position + 1, finished=position + 1 == total)
            self.running.discard(request_id)
            self._count(inputs)
            if not delta:
                yield self._output(inputs, 0, total, finished=True)
        finally:
            if request_id in self.running:
                self.running.discard(request_id)
                self.aborted.append(request_id)
            self._tell()

    async def _obey(self, position: int) -> None:
        if self.fail_after is not None and position == self.fail_after[0]:
            raise self.fail_after[1]
        if position == self.hold_after:
            await self.release.wait()

    def _output(self, inputs: Any, begin: int, end: int, finished: bool) -> RequestOutput:
        positions = range(begin, end)
        text = "".join(self.answer[position % len(self.answer)] for position in positions)
        ids = self.tokenizer.encode(text)
        tables = None
        if inputs.params.logprobs is not None or inputs.params.logprob_token_ids is not None:
            tables = [self._table(token_id, inputs.params.logprobs or 0) for token_id in ids]
            for table, listed_id in itertools.product(tables, inputs.params.logprob_token_ids or []):
                table[listed_id] = Logprob(-7.0, 99, self.tokenizer.decode_token(listed_id))
        choices = [
            CompletionOutput(index, text, ids, None, tables, "length" if finished else None)
            for index in range(inputs.params.n)
        ]
        return RequestOutput(
            inputs.request_id,
            inputs.prompt,
            inputs.prompt_token_ids,
            choices,
            finished,
            1,
            prompt_logprobs=self._prompt_tables(inputs) if begin == 0 else None,
            num_truncated_prompt_tokens=inputs.num_truncated_prompt_tokens,
        )

    def _prompt_tables(self, inputs: Any) -> Any:
        num_top = inputs.params.prompt_logprobs
        if num_top is None:
            return None
        return [None, *(self._table(token_id, num_top) for token_id in inputs.prompt_token_ids[1:])]

    def _table(self, token_id: int, num_top: int) -> dict[int, Logprob]:
        """The sampled token is the second most likely one."""
        table = {
            token_id: Logprob(self.logprob_of_b if token_id % 2 else -0.5, 2, self.tokenizer.decode_token(token_id))
        }
        for rank in (1, *range(3, min(num_top, VOCAB_SIZE) + 1)):
            if rank <= num_top:
                table[rank + 200] = Logprob(-0.1 * rank, rank, f"<{rank}>")
        return table

    def _count(self, inputs: Any) -> None:
        counts = StepCounts()
        counts.num_prompt_tokens = num_prompt_tokens = len(inputs.prompt_token_ids)
        counts.num_generation_tokens = max_tokens = inputs.params.max_tokens
        self.metrics.on_outputs(counts)
        times = RequestMetrics(arrival_time=1.0)
        finished = FinishedSequence(FinishReason.LENGTH, times, num_prompt_tokens, 0, max_tokens, max_tokens, now=2.0)
        self.metrics.on_sequence_finished(finished)

    def _tell(self) -> None:
        self.metrics.on_step(SchedulerStats(num_running=len(self.running)))


class Server:
    """The app over a fake engine, and a client of it."""

    def __init__(
        self,
        reasoning_parser: str = "auto",
        chat_template: str | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        strict_requests: bool = False,
        trust_request_chat_template: bool = False,
        access: AccessConfig | None = None,
        logs: LogsConfig | None = None,
        **engine_options: Any,
    ) -> None:
        self.engine = FakeAsyncLLM(**engine_options)
        self.engine.tokenizer.chat_template = chat_template
        answer = AnswerConfig(
            reasoning_parser=reasoning_parser,
            strict_requests=strict_requests,
            trust_request_chat_template=trust_request_chat_template,
        )
        limits = LimitsConfig(max_body_bytes=max_body_bytes)
        access, logs = access or AccessConfig(), logs or LogsConfig()
        self.state = ServerState(ServerConfig(answer=answer, limits=limits, access=access, logs=logs))
        self.state.attach(self.engine)  # type: ignore[arg-type]
        self.app = build_app(self.state)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.request(method, path, **options)

        return asyncio.run(ask())

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """``body``: what is sent as JSON; bytes are sent as they are."""
        if isinstance(body, bytes):
            headers = {"content-type": "application/json"} | options.pop("headers", {})
            return self.request("POST", path, content=body, headers=headers, **options)
        return self.request("POST", path, json=body, **options)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 4, "temperature": 0} | fields)

    def chat(self, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": "m", "messages": messages, "max_tokens": 4, "temperature": 0}
        return self.post("/v1/chat/completions", body | fields)

    def tokenize(self, **fields: Any) -> httpx.Response:
        return self.post("/tokenize", fields)

    def detokenize(self, **fields: Any) -> httpx.Response:
        return self.post("/detokenize", fields)


class Connection:
    """A request at ASGI's level, inside a running loop: what is sent is seen piece by piece, and the client may leave.

    Args:
        body: sent whole; or with ``cut_off`` only begun.
        writes: so many messages can be sent to it, and no more.
        headers: beside its content type.
    """

    def __init__(
        self,
        server: Server,
        path: str,
        body: Any,
        cut_off: bool = False,
        writes: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        content = json.dumps(body).encode()
        self._requests = [{"type": "http.request", "body": content, "more_body": cut_off}]
        self._sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._writes = writes
        self._left = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [
                (b"content-type", b"application/json"),
                *((name.encode(), value.encode()) for name, value in (headers or {}).items()),
            ],
            "client": ("client", 1),
            "server": ("server", 80),
        }
        self._task = asyncio.create_task(server.app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._requests:
            return self._requests.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if self._writes is not None and self._sent.qsize() == self._writes:
            raise BrokenPipeError
        self._sent.put_nowait(message)

    async def next(self) -> dict[str, Any]:
        """The next ASGI message."""
        return await asyncio.wait_for(self._sent.get(), 5)

    async def rest(self) -> bytes:
        """All that is still to come of the body, until the response ends."""
        parts = []
        while True:
            message = await self.next()
            parts.append(message.get("body", b""))
            if message["type"] == "http.response.body" and not message.get("more_body"):
                await asyncio.wait_for(self._task, 5)
                return b"".join(parts)

    async def leave(self) -> None:
        """Goes away; returns when the server has done with the request."""
        self._left.set()
        await asyncio.wait_for(self._task, 5)

    @property
    def silent(self) -> bool:
        """Whether nothing has been sent that was not taken."""
        return self._sent.empty()

    async def give_up(self) -> None:
        """The HTTP server lets the request go, as it does when it ends; or the request has failed."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@pytest.fixture
def connect() -> Callable[..., Connection]:
    """``connect(server, path, body)`` → Connection."""
    return Connection


def events_of(response: httpx.Response) -> list[Any]:
    """The JSON of a stream's events; the last must be [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-1] == ""
    assert lines[-2] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@pytest.fixture
def events() -> Callable[[httpx.Response], list[Any]]:
    return events_of


@pytest.fixture
def make_server() -> Callable[..., Server]:
    """``make_server(**options of Server, of FakeAsyncLLM or of EngineArgs)`` → Server."""
    return Server


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def canary(server: Server) -> Iterator[None]:
    """After a probe the server is as it was: healthy, the same answer to the same question, nothing left running."""
    yield
    assert server.get("/health").status_code == 200
    answer = server.complete()
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "abcd"
    assert server.engine.running == set()
    scrape = server.get("/metrics").text
    for name in ("running", "waiting"):
        assert f'vllm:num_requests_{name}{{engine="0",model_name="m"}} 0.0' in scrape


def error_of(response: httpx.Response, code: int, param: str | None = None) -> dict[str, Any]:
    """Asserts that a response is an error in OpenAI's shape that gives nothing away."""
    assert response.status_code == code, response.text
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 4096
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert isinstance(error["message"], str)
    assert error["message"]
    assert error["param"] is None or isinstance(error["param"], str)
    for secret in ("Traceback", "0x", ".py", "site-packages"):
        assert secret not in error["message"]
    if param is not None:
        assert (error["param"] or "").split(".")[0] == param, error
    return error


@pytest.fixture
def error() -> Callable[..., dict[str, Any]]:
    return error_of


# the real engine -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def live(tiny_llama_dir: Path) -> Iterator[LiveServer]:
    server = LiveServer(tiny_llama_dir)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def golden(client: openai.OpenAI) -> str:
    return greedy(client)


@pytest.fixture
def live_canary(live: LiveServer, client: openai.OpenAI, golden: str) -> Iterator[None]:
    """After each test the server is well, says the same, and nothing is left running."""
    yield
    assert greedy(client) == golden
    live.check_idle()
