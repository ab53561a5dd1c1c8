"""The engine's logprob tables in the two shapes that the API has for them."""

from octavo.entrypoints.openai.responses import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob
from octavo.types import CompletionOutput, Logprob

__all__ = ["chat_logprobs", "completion_logprobs"]

# What stands for the logarithm of a probability that is 0 in float32: JSON has no -Infinity.
_LOWEST = -9999.0


def chat_logprobs(output: CompletionOutput, num_top: int) -> ChatLogprobs | None:
    """Tables of the tokens in ``output``, with the ``num_top`` most likely tokens of each; None: not asked for."""
    if output.logprobs is None:
        return None
    content = []
    for token_id, table in zip(output.token_ids, output.logprobs, strict=True):
        top = [TopLogprob(*_shown(entry)) for entry in _most_likely(table, num_top)]
        content.append(ChatTokenLogprob(*_shown(table[token_id]), top))
    return ChatLogprobs(content)


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
        for entry in [*_most_likely(table, num_top), sampled]:
            top.setdefault(entry.decoded_token or "", _finite(entry.logprob))
        found.top_logprobs.append(top)
        offset += len(token)
    return found


def _most_likely(table: dict[int, Logprob], num_top: int) -> list[Logprob]:
    ranked = [entry for entry in table.values() if entry.rank is not None and entry.rank <= num_top]
    return sorted(ranked, key=lambda entry: entry.rank or 0)


def _shown(entry: Logprob) -> tuple[str, float, list[int]]:
    token = entry.decoded_token or ""
    return token, _finite(entry.logprob), list(token.encode())


def _finite(logprob: float) -> float:
    return logprob if logprob >= _LOWEST else _LOWEST  # NaN too: no comparison with it holds
