"""The engine's logprob tables in the shapes that the API has for them."""

from collections.abc import Iterable

from octavo.entrypoints.openai.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    TopLogprob,
)
from octavo.tokenizers import IncrementalDetokenizer, Tokenizer
from octavo.types import CompletionOutput, Logprob, PromptLogprobTables, SamplingParams

__all__ = ["LogprobForms", "TokenOffsets"]

# What stands for the logarithm of a probability that is 0 in float32: JSON has no -Infinity.
_LOWEST = -9999.0
# What the decoder writes for bytes that are no whole character.
_REPLACEMENT = "\ufffd"


class TokenOffsets:
    """Where in a text its tokens begin. Special tokens that the text leaves out take no room.

    Args:
        params: how the text is made of the tokens.
        begin: where the first one begins, characters.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, begin: int = 0) -> None:
        self._stream = IncrementalDetokenizer(
            tokenizer, params.skip_special_tokens, params.spaces_between_special_tokens
        )
        self._tokenizer = tokenizer
        self._end = begin

    def push(self, token_id: int) -> int:
        """Characters before the next token."""
        begin = self._end
        self._end += len(self._stream.push(token_id))
        # With a token comes what was held back before it: bytes that have not become a character after all.
        return max(begin, self._end - len(self._tokenizer.decode_token(token_id)))


class LogprobForms:
    """Args:

    tokenizer: of the model.
    num_top: how many of the most likely tokens are listed; None: all that the tables have.
    as_ids: tokens are shown as ``token_id:N``, which unlike their texts are all different.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int | None, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._as_ids = as_ids

    def chat(self, output: CompletionOutput) -> ChatLogprobs | None:
        """Tables of the tokens in ``output``; None: not asked for."""
        if output.logprobs is None:
            return None
        content = []
        for token_id, table in zip(output.token_ids, output.logprobs, strict=True):
            top = [TopLogprob(*self._with_bytes(*item)) for item in _most_likely(table, self._num_top)]
            content.append(ChatTokenLogprob(*self._with_bytes(token_id, table[token_id]), top))
        return ChatLogprobs(content)

    def completion(
        self, token_ids: Iterable[int], tables: PromptLogprobTables | list[dict[int, Logprob]], offsets: TokenOffsets
    ) -> CompletionLogprobs:
        """The same as parallel lists. A token without a table, the first of a prompt, has no logprob."""
        found = CompletionLogprobs([], [], [], [])
        for token_id, table in zip(token_ids, tables, strict=True):
            found.text_offset.append(offsets.push(token_id))
            found.tokens.append(self._shown(token_id, None if table is None else table[token_id]))
            if table is None:
                found.token_logprobs.append(None)
                found.top_logprobs.append(None)
                continue
            chosen = table[token_id]
            found.token_logprobs.append(_finite(chosen.logprob))
            top: dict[str, float] = {}
            # Different tokens may have the same text, pieces of a character above all: the likeliest stands for them.
            for top_id, entry in [*_most_likely(table, self._num_top), (token_id, chosen)]:
                top.setdefault(self._shown(top_id, entry), _finite(entry.logprob))
            found.top_logprobs.append(top)
        return found

    def _with_bytes(self, token_id: int, entry: Logprob) -> tuple[str, float, tuple[int, ...]]:
        return self._shown(token_id, entry), _finite(entry.logprob), tuple(self._bytes_of(token_id, entry))

    def _shown(self, token_id: int, entry: Logprob | None) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._text(token_id, entry)

    def _text(self, token_id: int, entry: Logprob | None) -> str:
        if entry is not None and entry.decoded_token is not None:
            return entry.decoded_token
        return self._tokenizer.decode_token(token_id)

    def _bytes_of(self, token_id: int, entry: Logprob) -> bytes:
        """The token's own bytes: of a piece of a character, what the text does not show."""
        text = self._text(token_id, entry)
        if _REPLACEMENT in text:
            piece = self._tokenizer.token_table[token_id]
            if piece is not None and piece.text is None:
                return piece.raw
        return text.encode()

    @staticmethod
    def prompt(
        token_ids: list[int], tables: PromptLogprobTables, num_top: int
    ) -> list[dict[str, PromptLogprob] | None]:
        """The tables of a prompt as they are, by token id; ``num_top`` -1: with all their entries."""
        return [
            None
            if table is None
            else {
                str(listed_id): PromptLogprob(_finite(entry.logprob), entry.rank, entry.decoded_token)
                for listed_id, entry in table.items()
                if listed_id == token_id or num_top == -1 or (entry.rank or 0) <= num_top
            }
            for token_id, table in zip(token_ids, tables, strict=True)
        ]


def _most_likely(table: dict[int, Logprob], num_top: int | None) -> list[tuple[int, Logprob]]:
    ranked = [
        item for item in table.items() if item[1].rank is not None and (num_top is None or item[1].rank <= num_top)
    ]
    return sorted(ranked, key=lambda item: item[1].rank or 0)


def _finite(logprob: float) -> float:
    return logprob if logprob >= _LOWEST else _LOWEST  # NaN too: no comparison with it holds
