"""Server-sent events out of bytes as they come; only their data is of interest here. Lines end with LF or CRLF."""

__all__ = ["EventReader"]


class EventReader:
    """Any split of the bytes gives the same events."""

    def __init__(self) -> None:
        self._rest = b""  # of a line that has not ended yet
        self._data: list[bytes] = []  # of an event that has not ended yet

    def feed(self, part: bytes) -> list[bytes]:
        """The data of each event that ``part`` completes."""
        *lines, self._rest = (self._rest + part).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
