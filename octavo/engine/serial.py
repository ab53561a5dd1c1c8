"""The wire: what crosses the pipe and the sockets between front end and engine, as msgpack. Types decide the form.

A payload that does not decode to its type raises msgspec.DecodeError (ValidationError is one), nothing else.
"""

from pathlib import Path

import msgspec

from octavo.config import OctavoConfig
from octavo.types import EngineCoreRequests, EngineCoreRequestType, EngineOutput, UtilityRequest

__all__ = [
    "EngineLaunch",
    "EngineMessage",
    "decode_launch",
    "decode_message",
    "decode_output",
    "encode",
    "input_address",
    "output_address",
]

# What an engine is asked, decoded.
EngineMessage = EngineCoreRequests | list[str] | UtilityRequest


class EngineLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """All that a new engine process is told, over its standard input.

    Attributes:
        input_addresses: ZMQ endpoints that requests come from, one for each front end (its ROUTER socket).
        output_addresses: endpoints that results go to, in the same order (its PULL socket).
        socket_dir: the private folder of those sockets, and of what else the server's processes share.
        launched: seconds of time.monotonic().
    """

    config: OctavoConfig
    input_addresses: list[str]
    output_addresses: list[str]
    socket_dir: str
    launched: float


class FrontEndSlot(msgspec.Struct, frozen=True, kw_only=True):
    """A front end's place among those that share an engine.

    Attributes:
        index: its client index.
        count: how many there are.
        socket_dir: the private folder of the engine that is there; None: starts one, which the others can join.
    """

    index: int = 0
    count: int = 1
    socket_dir: str | None = None


def input_address(socket_dir: str | Path, client_index: int) -> str:
    """Where a front end's requests go out."""
    return f"ipc://{socket_dir}/input-{client_index}"


def output_address(socket_dir: str | Path, client_index: int) -> str:
    """Where what is for a front end comes in."""
    return f"ipc://{socket_dir}/output-{client_index}"


_launch_decoder = msgspec.msgpack.Decoder(EngineLaunch)
_output_decoder = msgspec.msgpack.Decoder(EngineOutput)
_message_decoders: dict[bytes, msgspec.msgpack.Decoder[EngineMessage]] = {
    EngineCoreRequestType.ADD.value: msgspec.msgpack.Decoder(EngineCoreRequests),
    EngineCoreRequestType.ABORT.value: msgspec.msgpack.Decoder(list[str]),
    EngineCoreRequestType.UTILITY.value: msgspec.msgpack.Decoder(UtilityRequest),
}


def encode(message: EngineLaunch | EngineMessage | EngineOutput) -> bytes:
    """One message as msgpack."""
    return msgspec.msgpack.encode(message)


def decode_launch(payload: bytes) -> EngineLaunch:
    return _launch_decoder.decode(payload)


def decode_message(frames: list[bytes]) -> EngineMessage:
    """A request, ids to abort or a utility call, from a frame pair ``[EngineCoreRequestType, payload]``."""
    if len(frames) != 2 or frames[0] not in _message_decoders:
        raise msgspec.DecodeError(f"expected a known message type and its payload, got {len(frames)} frames")
    return _message_decoders[frames[0]].decode(frames[1])


def decode_output(payload: bytes) -> EngineOutput:
    return _output_decoder.decode(payload)
