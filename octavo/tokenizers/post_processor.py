"""What is put around an encoded text: a token before it, a token after it, or neither."""

import tokenizers
from tokenizers import processors

__all__ = ["surround"]


def surround(backend: tokenizers.Tokenizer, before: str | None, after: str | None) -> None:
    """Sets it; the tokens must be in the vocabulary."""
    template = [token for token in (before, "$A", after) if token is not None]
    ids = {token: backend.token_to_id(token) for token in (before, after) if token is not None}
    # The library wants to know what two texts in one would look like, too.
    pair = [*template, "$B:1"]
    backend.post_processor = processors.TemplateProcessing(single=template, pair=pair, special_tokens=list(ids.items()))
