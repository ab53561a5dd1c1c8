"""A small client of an OpenAI-compatible server, for the commands that talk to one from a terminal."""

import json
from collections.abc import Generator
from typing import Any, NamedTuple

import httpx

from octavo.errors import OctavoError

__all__ = ["ApiClient", "ApiError", "Piece"]

_CONNECT_SECONDS = 5.0
# No proxy stands between this machine and itself, whatever the environment says.
_DIRECT = ("all://localhost", "all://127.0.0.1", "all://[::1]")


class ApiError(OctavoError):
    """The server cannot be reached, or refuses."""


class Piece(NamedTuple):
    """What a chunk of a stream adds. ``finish_reason`` is set in the last one."""

    text: str
    reasoning: str
    finish_reason: str | None


class ApiClient:
    """Args:

    url: base of the API, ending in /v1.
    api_key: sent as a bearer token.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = url.rstrip("/")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        # An answer may take as long as it takes; that nobody is there shows at once.
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
        self._http = httpx.Client(headers=headers, timeout=timeout, mounts=dict.fromkeys(_DIRECT))

    def __enter__(self) -> "ApiClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def first_model(self) -> str:
        """The name of the first model that the server has."""
        try:
            response = self._http.get(f"{self._url}/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        self._check(response)
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise self._foreign("models") from None

    def stream(self, route: str, body: dict[str, Any]) -> Generator[Piece, None, None]:
        """What the first choice consists of, as it comes. Closing the iterator closes the stream, which ends the
        generation."""
        try:
            with self._http.stream("POST", f"{self._url}/{route}", json=body | {"stream": True}) as response:
                if response.is_error:
                    response.read()
                self._check(response)
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        return
                    if line.startswith("data:"):
                        yield from self._pieces(route, line.removeprefix("data:"))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        raise ApiError(f"the answer of {self._url}/{route} ended before its end")

    def _pieces(self, route: str, data: str) -> list[Piece]:
        try:
            chunk = json.loads(data)
            if "error" in chunk:
                raise ApiError(f"the server says: {_message(chunk)}")
            return [_piece(choice) for choice in chunk["choices"][:1]]
        except (ValueError, LookupError, TypeError, AttributeError):
            raise self._foreign(route) from None

    def _check(self, response: httpx.Response) -> None:
        if response.is_error:
            try:
                message = _message(response.json())
            except ValueError:
                message = response.text[:200] or response.reason_phrase
            raise ApiError(f"the server says: {message} (HTTP {response.status_code}){self._hint(response)}")

    def _hint(self, response: httpx.Response) -> str:
        if response.status_code == httpx.codes.UNAUTHORIZED:
            return "; a key is given with --api-key"
        if response.status_code == httpx.codes.NOT_FOUND and not self._url.endswith("/v1"):
            return f"; --url most often ends in /v1: {self._url}/v1"
        return ""

    def _foreign(self, route: str) -> ApiError:
        return ApiError(f"{self._url}/{route} does not answer as an OpenAI-compatible server does; see --url")

    def _unreachable(self, error: Exception) -> ApiError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ApiError(
                f"no server at {self._url} ({error}); start one with `octavo serve`, or say with --url where it is"
            )
        if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):
            return ApiError(f"--url {self._url} is not an address ({error}); it looks like http://localhost:8000/v1")
        return ApiError(f"the connection to {self._url} broke: {error or type(error).__name__}")


def _piece(choice: dict[str, Any]) -> Piece:
    delta = choice.get("delta") or {}
    text = delta.get("content") or choice.get("text") or ""
    reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
    return Piece(str(text), str(reasoning), choice.get("finish_reason"))


def _message(body: Any) -> str:
    """The text of an error body."""
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict):
        return str(error.get("message"))
    return str(error or body)[:200]
