"""What one request changes in its logits, from its sampling parameters and the tokens it has so far.

The worker keeps one of these for each request that changes anything. All of it follows from the tokens: after a
preemption or a rollback it is as if nothing had happened.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.sample.logits_processor import NamedProcessor
from octavo.sample.metadata import Penalties, RowChanges
from octavo.types import SamplingParams

__all__ = ["RequestChanges"]

_NO_IDS: NDArray[np.int64] = np.empty(0, dtype=np.int64)
_NO_BIAS: NDArray[np.float64] = np.empty(0, dtype=np.float64)
_NO_OUTPUT: NDArray[np.int32] = np.empty(0, dtype=np.int32)


class RequestChanges:
    """Args:

    params: the request's.
    eos_token_ids: end-of-sequence ids, for min_tokens.
    vocab_size: width of the logits.
    processors: the custom ones that the request uses.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        processors: Sequence[NamedProcessor] = (),
    ) -> None:
        self._params = params
        self._processors = processors
        repeats, counts = params.repetition_penalty != 1.0, params.frequency_penalty or params.presence_penalty
        self._counts = _TokenCounts(with_prompt=repeats) if repeats or counts else None
        self._bias_ids, self._bias = _NO_IDS, _NO_BIAS
        if params.logit_bias:
            self._bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
            self._bias = np.array(list(params.logit_bias.values()), dtype=np.float64)
        self._forbidden: NDArray[np.bool_] | None = None
        if params.allowed_token_ids is not None:
            self._forbidden = np.ones(vocab_size, dtype=bool)
            self._forbidden[params.allowed_token_ids] = False
        self._bad_words = _BadWords(params.bad_words_token_ids) if params.bad_words_token_ids else None
        self._ending_ids = _NO_IDS
        if params.min_tokens > 0:
            ids = np.unique(np.array([*eos_token_ids, *params.stop_token_ids], dtype=np.int64))
            # A checkpoint may name an end of sequence that is beyond its own vocabulary: it can't be sampled anyway.
            self._ending_ids = ids[ids < vocab_size]
        # What does not depend on the tokens is made once: before min_tokens, and from there on.
        self._follows_tokens = self._counts is not None or self._bad_words is not None or bool(processors)
        self._early, self._late = self._changes(self._ending_ids), self._changes(_NO_IDS)

    @staticmethod
    def used_by(params: SamplingParams) -> bool:
        """Whether ``params`` change logits at all, custom processors aside."""
        return bool(
            params.repetition_penalty != 1.0
            or params.frequency_penalty
            or params.presence_penalty
            or params.logit_bias
            or params.allowed_token_ids is not None
            or params.bad_words_token_ids
            or params.min_tokens
        )

    def row(self, token_ids: NDArray[np.int32], num_prompt_tokens: int) -> RowChanges | None:
        """The changes for the next token; None: there are none for this one.

        Args:
            token_ids: [num_tokens] prompt and output so far.
        """
        early = len(token_ids) - num_prompt_tokens < self._params.min_tokens
        if not self._follows_tokens:
            return self._early if early else self._late
        output = token_ids[num_prompt_tokens:]
        banned = self._ending_ids if early else _NO_IDS
        if self._bad_words is not None:
            banned = np.concatenate([banned, self._bad_words.banned(output)])
        penalties = None if self._counts is None else self._penalties(self._counts, token_ids, num_prompt_tokens)
        return self._changes(banned, penalties, output)

    def _changes(
        self, banned: NDArray[np.int64], penalties: Penalties | None = None, output: NDArray[np.int32] = _NO_OUTPUT
    ) -> RowChanges | None:
        if (
            penalties is None
            and self._forbidden is None
            and not (banned.size or self._bias_ids.size or self._processors)
        ):
            return None
        return RowChanges(
            penalties=penalties,
            bias_ids=self._bias_ids,
            bias=self._bias,
            forbidden=self._forbidden,
            banned_ids=banned,
            processors=self._processors,
            output_token_ids=output,
        )

    def _penalties(
        self, counts: "_TokenCounts", token_ids: NDArray[np.int32], num_prompt_tokens: int
    ) -> Penalties | None:
        counts.follow(token_ids, num_prompt_tokens)
        if not counts.ids.size:
            return None
        params = self._params
        return Penalties(
            ids=counts.ids,
            counts=counts.counts,
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
        )


class _TokenCounts:
    """The distinct tokens of one request, and how often each has been generated, kept up as tokens come.

    Args:
        with_prompt: the prompt's tokens are among them.

    Attributes:
        ids, counts: int64, [entries]; ids ascending. Good until the next token comes.
    """

    def __init__(self, with_prompt: bool) -> None:
        self._with_prompt = with_prompt
        self._num_counted = 0
        self._keep(_NO_IDS, _NO_IDS)

    def follow(self, token_ids: NDArray[np.int32], num_prompt_tokens: int) -> None:
        """Brings the counts up to ``token_ids``. A step adds a token or few; where tokens have been taken back,
        everything is counted anew."""
        if num_prompt_tokens <= self._num_counted <= len(token_ids):
            for token_id in token_ids[self._num_counted :].tolist():
                self._add(token_id)
        else:
            self._count(token_ids, num_prompt_tokens)
        self._num_counted = len(token_ids)

    def _count(self, token_ids: NDArray[np.int32], num_prompt_tokens: int) -> None:
        generated, generated_counts = np.unique(token_ids[num_prompt_tokens:], return_counts=True)
        ids = np.unique(token_ids) if self._with_prompt else generated
        counts = np.zeros(len(ids), dtype=np.int64)
        counts[np.searchsorted(ids, generated)] = generated_counts
        self._keep(ids, counts)

    def _keep(self, ids: NDArray[Any], counts: NDArray[np.int64]) -> None:
        """With room for as many again."""
        size = len(ids)
        self._room = np.empty((2, 2 * size + 16), dtype=np.int64)
        self.ids, self.counts = self._room[0, :size], self._room[1, :size]
        self.ids[:], self.counts[:] = ids, counts

    def _add(self, token_id: int) -> None:
        size = len(self.ids)
        at = int(self.ids.searchsorted(token_id))
        if at == size or self.ids[at] != token_id:
            if size == self._room.shape[1]:
                self._keep(self.ids, self.counts)
            self._room[:, at + 1 : size + 1] = self._room[:, at:size]
            self._room[0, at], self._room[1, at] = token_id, 0
            self.ids, self.counts = self._room[0, : size + 1], self._room[1, : size + 1]
        self.counts[at] += 1


class _BadWords:
    """The bad words of one request. What they take follows their tokens: one long word among many short ones costs no
    more than itself."""

    _ANYTHING = -1
    _NOTHING = -2

    def __init__(self, words: list[list[int]]) -> None:
        self._last_ids = np.array([word[-1] for word in words], dtype=np.int64)
        self._ids_before = np.array([word[-2] if len(word) > 1 else self._ANYTHING for word in words], dtype=np.int64)
        # All but the last two: looked at only where those before them are there.
        self._heads = [np.array(word[:-2], dtype=np.int32) for word in words]

    def banned(self, output: NDArray[np.int32]) -> NDArray[np.int64]:
        """Last tokens of the words whose other tokens are the end of ``output``."""
        newest = output[-1] if len(output) else self._NOTHING
        possible = np.flatnonzero((self._ids_before == newest) | (self._ids_before == self._ANYTHING)).tolist()
        completed = [index for index in possible if _ends_with(output[:-1], self._heads[index])]
        found: NDArray[np.int64] = self._last_ids[completed]
        return found


def _ends_with(tokens: NDArray[np.int32], head: NDArray[np.int32]) -> bool:
    return not head.size or (len(tokens) >= head.size and bool((tokens[len(tokens) - head.size :] == head).all()))
