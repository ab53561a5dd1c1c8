"""The exception tree. Who raises what, and what a door makes of it:

    OctavoError
    ├── ConfigError           a flag, field or file of ours is wrong           exit code 1
    │   └── UsageError        a flag's value that cannot be right here         exit code 2
    ├── ModelError            the model cannot be served                       exit code 1
    │   ├── CheckpointError   a file is missing, truncated or malformed
    │   └── UnsupportedError  the format, architecture or type is not ours yet
    ├── RequestError          the client's mistake (also a ValueError)         HTTP 4xx
    │   ├── NotFoundError     no such model or resource                        HTTP 404
    │   └── OverloadedError   refused for now; may be tried again              HTTP 503
    ├── RequestFailedError    the engine could not finish this one request     HTTP 500
    │   └── NoTokenLeftError  its own parameters left it nothing to go on with HTTP 400
    └── EngineDeadError       the engine process is gone                       HTTP 503, exit code 3

Messages say what was wrong, what was expected, and which flag or field to change. They are one line: the command
line prints them as they are.
"""

__all__ = [
    "CheckpointError",
    "ConfigError",
    "EngineDeadError",
    "ModelError",
    "NoTokenLeftError",
    "NotFoundError",
    "OctavoError",
    "OverloadedError",
    "RequestError",
    "RequestFailedError",
    "UnsupportedError",
    "UsageError",
]

_LONGEST_MESSAGE = 800


class OctavoError(Exception):
    """Base of everything octavo raises on purpose."""


class ConfigError(OctavoError, ValueError):
    """A stated configuration value is wrong, or two of them contradict each other."""


class UsageError(ConfigError):
    """Numbers of the command line that can be right neither now nor later, with this model on this machine: it is of no
    use to try again."""


class ModelError(OctavoError):
    """The model cannot be loaded or served. What a message quotes from a file may be of any length, the message not."""

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= _LONGEST_MESSAGE else message[:_LONGEST_MESSAGE] + "…")


class CheckpointError(ModelError):
    """A checkpoint file is missing, truncated, mis-shaped or malformed.

    Args:
        message: what is wrong and what was expected.
        file: path of the file at fault.
        tensor: name of the tensor at fault, where one is.
    """

    def __init__(self, message: str, *, file: str | None = None, tensor: str | None = None) -> None:
        where = ""
        if file is not None:
            where += f"{file}: "
        if tensor is not None:
            where += f"tensor {tensor!r}: "
        super().__init__(where + message)
        self.file = file
        self.tensor = tensor


class UnsupportedError(ModelError):
    """A format, architecture, data type or quantization that octavo does not have, named, with what it has."""


class RequestError(OctavoError, ValueError):
    """A request that cannot be served as sent.

    Args:
        message: what was wrong and what was expected.
        param: name of the request field at fault (OpenAI's ``error.param``).
    """

    status = 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NotFoundError(RequestError):
    """The named model or resource does not exist."""

    status = 404


class OverloadedError(RequestError):
    """The server cannot take the request now; the same request may succeed later.

    Args:
        retry_after: when to try again, seconds.
        limit: name of the setting that would be exceeded, where one would.
    """

    status = 503

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: int = 5, limit: str | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.retry_after = retry_after
        self.limit = limit


class RequestFailedError(OctavoError):
    """The engine accepted the request and could not finish it; other requests are not affected."""

    status = 500


class NoTokenLeftError(RequestFailedError):
    """The request's own parameters forbid every token that could come next: the client's mistake, found on the way."""

    status = 400


class EngineDeadError(OctavoError):
    """The engine has died. The message is the cause."""
