"""A small client of an OpenAI-compatible server, for the commands that talk to one from a terminal."""

import json
from collections.abc import Generator
from typing import Any

import httpx

from octavo.errors import OctavoError

__all__ = ["ApiClient", "ApiError"]

_CONNECT_SECONDS = 5.0


class ApiError(OctavoError):
    """The server cannot be reached, or refuses."""


class ApiClient:
    """Args:

    url: base of the API, ending in /v1.
    api_key: sent as a bearer token.
    transport: instead of the network (tests).
    """

    def __init__(self, url: str, api_key: str | None = None, transport: httpx.BaseTransport | None = None) -> None:
        self._url = url.rstrip("/")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
        self._http = httpx.Client(headers=headers, timeout=timeout, transport=transport)

    def __enter__(self) -> "ApiClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def first_model(self) -> str:
        """The name of the first model that the server has."""
        try:
            response = self._http.get(f"{self._url}/models")
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        self._check(response)
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ApiError(f"{self._url}/models does not answer as an OpenAI-compatible server does") from None

    def stream(self, route: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The first choice of each chunk. Closing the iterator closes the stream, which ends the generation."""
        try:
            with self._http.stream("POST", f"{self._url}/{route}", json=body | {"stream": True}) as response:
                if response.is_error:
                    response.read()
                self._check(response)
                for line in response.iter_lines():
                    if not line.startswith("data:") or line == "data: [DONE]":
                        continue
                    chunk = json.loads(line[len("data:") :])
                    if "error" in chunk:
                        raise ApiError(f"the server says: {_message(chunk)}")
                    if chunk.get("choices"):
                        yield chunk["choices"][0]
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _check(self, response: httpx.Response) -> None:
        if response.is_error:
            try:
                message = _message(response.json())
            except ValueError:
                message = response.text[:200] or response.reason_phrase
            raise ApiError(f"the server says: {message} (HTTP {response.status_code})")

    def _unreachable(self, error: httpx.HTTPError) -> ApiError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ApiError(f"no server at {self._url} ({error}); start one with `octavo serve`, or give its --url")
        return ApiError(f"the connection to {self._url} broke: {error or type(error).__name__}")


def _message(body: Any) -> str:
    """The text of an error body."""
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict):
        return str(error.get("message"))
    return str(error or body)[:200]
