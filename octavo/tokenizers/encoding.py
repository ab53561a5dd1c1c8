"""Encoding by the library, whose faults are turned into errors of ours.

Some damage of a tokenizer file shows only with certain texts, as a Rust panic; in Python that is no Exception, and it
would be the end of the thread that meets it.
"""

import tokenizers

from octavo.errors import CheckpointError
from octavo.logging import one_line

__all__ = ["encode"]


def encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool, file: str) -> list[int]:
    """Token ids of ``text``; lets other threads run meanwhile.

    Raises:
        CheckpointError: the tokenizer, read from ``file``, cannot encode this text.
    """
    try:
        # Alone among the library's ways to encode, the batched one lets other threads run; "fast" leaves out offsets.
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        cause = one_line(str(error)) or type(error).__name__
        raise CheckpointError(f"the tokenizer fails on this text: {cause[:200]}", file=file) from error
