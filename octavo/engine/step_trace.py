"""The step trace: one JSON line a step, written to a file for people and tests that want to see the engine work.

Tracing never harms serving: when a line cannot be written (a full disk), it says so once and stops.
"""

from typing import IO, Any

import msgspec

from octavo.errors import ConfigError
from octavo.logging import init_logger

__all__ = ["StepTrace"]

logger = init_logger(__name__)


class StepTrace:
    """Writes records to ``path``, replacing what is there; each line is in the file when ``write`` returns.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            # Closed by close(); unbuffered, so that a line is one write.
            self._file: IO[bytes] | None = open(path, "wb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"--step-trace {path}: cannot be written: {error.strerror}; name another file") from error

    @property
    def active(self) -> bool:
        """Whether records are still written."""
        return self._file is not None

    def write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(msgspec.json.encode(record) + b"\n")
        except OSError as error:
            logger.warning("step trace %s: %s; no further steps are traced", self._path, error.strerror)
            self.close()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
