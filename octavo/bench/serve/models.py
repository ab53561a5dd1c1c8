"""Which model a server has, where nobody says it."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from octavo.bench.serve.http_client import HttpClient
from octavo.errors import OctavoError

__all__ = ["ServedModel", "first_model"]

_PATH = "/v1/models"
_PAUSE_SECONDS = 0.5
_TIMEOUT_SECONDS = 10.0


class ServedModel(msgspec.Struct):
    """``root``: what the server loaded, where it says so: a path or a hub name."""

    id: str
    root: str | None = None


class _Models(msgspec.Struct):
    data: list[ServedModel]


@dataclass
class _Body:
    status: int = 0
    data: bytes = b""

    def on_status(self, status: int) -> None:
        self.status = status

    def on_data(self, part: bytes) -> None:
        self.data += part


def first_model(base_url: str, headers: Mapping[str, str], *, insecure: bool = False, wait: float = 0.0) -> ServedModel:
    """The first of the server's models; asks again for ``wait`` seconds while there is no answer.

    Raises:
        OctavoError: there is none; the message says why.
    """
    client = HttpClient(base_url, headers, insecure=insecure)

    async def ask() -> ServedModel:
        end = time.monotonic() + wait
        try:
            while True:
                try:
                    async with asyncio.timeout(_TIMEOUT_SECONDS):
                        return await _ask(client)
                except (OctavoError, TimeoutError) as error:
                    if time.monotonic() >= end:
                        why = str(error) or f"no answer within {_TIMEOUT_SECONDS:g} s"
                        raise OctavoError(f"{base_url}{_PATH}: {why}; give --model, or check the address") from None
                await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            client.close()

    return asyncio.run(ask())


async def _ask(client: HttpClient) -> ServedModel:
    body = _Body()
    await client.send(client.encode("GET", _PATH), body)
    if body.status != 200:
        raise OctavoError(f"HTTP {body.status}")
    try:
        return msgspec.json.decode(body.data, type=_Models).data[0]
    except (msgspec.MsgspecError, IndexError):
        raise OctavoError("the answer names no model") from None
