"""A server in a thread of the tests, its engine in a process: the real thing, over a real socket."""

import asyncio
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai

from octavo import AsyncLLM
from octavo.config import LimitsConfig, LogsConfig, ServerConfig
from octavo.entrypoints import HttpServer, ServerState, build_app

__all__ = ["LiveServer", "greedy"]

MAX_BODY_BYTES = 100_000


class LiveServer:
    """A server in a thread, its engine in a process. ``url``: where it listens; ``options``: the engine's."""

    def __init__(self, model: Path, **options: Any) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = ServerConfig(
            limits=LimitsConfig(max_body_bytes=MAX_BODY_BYTES), logs=LogsConfig(disable_uvicorn_access_log=True)
        )
        self._state = ServerState(config)
        app = build_app(self._state)
        self._http = HttpServer(app, config, app.on_refused)
        self._options = {"model": str(model), "dtype": "float32", "seed": 0, "num_gpu_blocks_override": 256} | options
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._ready.wait(120)

    async def _run(self) -> None:
        engine = AsyncLLM(served_model_name=["tiny"], **self._options)
        engine.start()
        try:
            await engine.ready()
            self._state.attach(engine)
            self._ready.set()
            await self._http.serve(sockets=[self._socket])
        finally:
            engine.shutdown()

    def metric(self, name: str, **labels: str) -> float:
        """Value of a series, 0 if it has none yet."""
        for line in httpx.get(self.url + "/metrics").text.splitlines():
            found = re.fullmatch(rf"vllm:{name}\{{(.*)\}} (\S+)", line)
            if found and all(f'{key}="{value}"' in found[1] for key, value in labels.items()):
                return float(found[2])
        return 0.0

    def check_idle(self) -> None:
        """Asserts that the server is well, and that nothing is left running."""
        assert httpx.get(self.url + "/health").status_code == 200
        deadline = time.monotonic() + 5
        while self.metric("num_requests_running") + self.metric("num_requests_waiting") > 0:
            assert time.monotonic() < deadline, "requests are left running"
        assert self.metric("kv_cache_usage_perc") == 0

    def stop(self) -> None:
        self._http.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


def greedy(client: openai.OpenAI) -> str:
    """The same question always has the same answer."""
    answer = client.completions.create(
        model="tiny", prompt="Once upon a time", max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )
    return answer.choices[0].text
