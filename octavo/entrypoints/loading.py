"""What everything that loads a model to answer requests has in common: the server, and run-batch."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.config import AnswerConfig
from octavo.errors import ConfigError, EngineDeadError, ModelError, UsageError

if TYPE_CHECKING:
    from octavo.engine import AsyncLLM

__all__ = ["load_failure", "read_chat_template"]

_CLASS_NAME = re.compile(r"^\w+Error: ")


def read_chat_template(answer: AnswerConfig) -> str | None:
    """The template of ``--chat-template``; None: the model's own.

    Raises:
        ConfigError: the file cannot be read.
    """
    if answer.chat_template is None:
        return None
    try:
        return Path(answer.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--chat-template {answer.chat_template} cannot be read: {reason}") from None


def load_failure(engine: "AsyncLLM", error: EngineDeadError) -> EngineDeadError | ModelError | UsageError:
    """What to raise for an engine that ended before it was ready. One that could not be loaded as configured did not
    die, and the class of its error is of no interest to a user."""
    cause = _CLASS_NAME.sub("", str(error))
    if engine.exit_code_hint == 2:
        return UsageError(cause)
    return ModelError(cause) if engine.exit_code_hint == 1 else error
