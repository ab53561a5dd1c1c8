"""The service manager that has started the server, if one has: systemd's notification protocol (sd_notify).

A message is a datagram to the socket that NOTIFY_SOCKET names.
"""

import os
import socket
from collections.abc import Mapping

from octavo.logging import init_logger

__all__ = ["ServiceManager"]

logger = init_logger(__name__)


class ServiceManager:
    """Args:

    environ: NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID count.

    Attributes:
        watchdog_seconds: how often it wants to hear that all is well, twice in the time it waits; None: it does not.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_seconds: float | None = None
        microseconds = environ.get("WATCHDOG_USEC", "")
        is_meant = environ.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
        if self._address and is_meant and microseconds.isdecimal() and int(microseconds) > 0:
            self.watchdog_seconds = int(microseconds) / 2e6

    def ready(self) -> None:
        """Requests are served from now on."""
        self._tell("READY=1")

    def stopping(self) -> None:
        """The server is about to end."""
        self._tell("STOPPING=1")

    def alive(self) -> None:
        """All is well; to be said every ``watchdog_seconds``."""
        self._tell("WATCHDOG=1")

    def _tell(self, message: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.sendto(message.encode(), self._address)
        except OSError as error:
            logger.warning("NOTIFY_SOCKET does not take %s: %s", message, error.strerror)
