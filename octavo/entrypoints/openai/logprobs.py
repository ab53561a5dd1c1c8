"""The engine's logprob tables in the two shapes that the API has for them."""

from octavo.entrypoints.openai.responses import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob
from octavo.tokenizers import Tokenizer
from octavo.types import CompletionOutput, Logprob

__all__ = ["chat_logprobs", "completion_logprobs"]

# What stands for the logarithm of a probability that is 0 in float32: JSON has no -Infinity.
_LOWEST = -9999.0
# What the decoder writes for bytes that are no whole character.
_REPLACEMENT = "\ufffd"


def chat_logprobs(output: CompletionOutput, num_top: int, tokenizer: Tokenizer) -> ChatLogprobs | None:
    """Tables of the tokens in ``output``, with the ``num_top`` most likely tokens of each; None: not asked for."""
    if output.logprobs is None:
        return None

    def shown(token_id: int, entry: Logprob) -> tuple[str, float, list[int]]:
        token = entry.decoded_token or ""
        return token, _finite(entry.logprob), list(_bytes_of(token_id, token, tokenizer))

    content = []
    for token_id, table in zip(output.token_ids, output.logprobs, strict=True):
        top = [TopLogprob(*shown(*item)) for item in _most_likely(table, num_top)]
        content.append(ChatTokenLogprob(*shown(token_id, table[token_id]), top))
    return ChatLogprobs(content)


def _bytes_of(token_id: int, token: str, tokenizer: Tokenizer) -> bytes:
    """The token's own bytes: of a piece of a character, what the text does not show."""
    if _REPLACEMENT in token:
        piece = tokenizer.token_table.piece(token_id)
        if piece is not None and piece.text is None:
            return piece.raw
    return token.encode()


def completion_logprobs(output: CompletionOutput, num_top: int, offset: int) -> CompletionLogprobs | None:
    """The same as parallel lists; the first token's text begins ``offset`` characters into the choice's."""
    if output.logprobs is None:
        return None
    found = CompletionLogprobs([], [], [], [])
    for token_id, table in zip(output.token_ids, output.logprobs, strict=True):
        sampled = table[token_id]
        token = sampled.decoded_token or ""
        found.text_offset.append(offset)
        found.tokens.append(token)
        found.token_logprobs.append(_finite(sampled.logprob))
        top: dict[str, float] = {}
        # Different tokens may have the same text, pieces of a character above all: the likeliest stands for them.
        for _, entry in [*_most_likely(table, num_top), (token_id, sampled)]:
            top.setdefault(entry.decoded_token or "", _finite(entry.logprob))
        found.top_logprobs.append(top)
        offset += len(token)
    return found


def _most_likely(table: dict[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    ranked = [item for item in table.items() if item[1].rank is not None and item[1].rank <= num_top]
    return sorted(ranked, key=lambda item: item[1].rank or 0)


def _finite(logprob: float) -> float:
    return logprob if logprob >= _LOWEST else _LOWEST  # NaN too: no comparison with it holds
