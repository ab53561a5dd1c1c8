"""What the first process of a server tells its further front ends, over their standard input, as msgpack."""

import msgspec

from octavo.config import OctavoConfig, ServerConfig
from octavo.engine import FrontEndSlot

__all__ = ["Drain", "EngineGone", "FrontEndLaunch", "Hurry", "Order", "decode_order", "encode_order"]


class FrontEndLaunch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first order.

    Attributes:
        config: of the engine, resolved.
        server: the server's settings.
        chat_template: instead of the model's own.
        slot: which front end this is, and where the engine is.
        socket_fd: an inherited socket, bound to the port.
    """

    config: OctavoConfig
    server: ServerConfig
    chat_template: str | None
    slot: FrontEndSlot
    socket_fd: int


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Let running requests finish, for so many seconds at most; then end."""

    timeout: float


class Hurry(msgspec.Struct, frozen=True, tag=True):
    """End now."""


class EngineGone(msgspec.Struct, frozen=True, tag=True):
    """The engine has ended; then end."""

    cause: str


Order = FrontEndLaunch | Drain | Hurry | EngineGone

_decoder = msgspec.msgpack.Decoder(Order)


def encode_order(order: Order) -> bytes:
    """One message."""
    return msgspec.msgpack.encode(order)


def decode_order(message: bytes) -> Order:
    """Raises msgspec.DecodeError where it is none."""
    return _decoder.decode(message)
