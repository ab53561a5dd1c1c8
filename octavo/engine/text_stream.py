"""The text of one choice as it may be shown: what special tokens, stop strings and stop tokens make of it."""

from octavo.tokenizers import IncrementalDetokenizer, StopMatcher, Tokenizer
from octavo.types import SamplingParams

__all__ = ["TextStream"]


class TextStream:
    """Token ids in; out comes the text that may be shown, up to the first stop string that is completed after
    ``min_tokens`` tokens, or with it.

    Args:
        matcher: of the request's stop strings; None: there are none.
    """

    __slots__ = ("_detokenizer", "_include_stop", "_matcher", "_num_uncounted")

    def __init__(self, tokenizer: Tokenizer, matcher: StopMatcher | None, params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, params.skip_special_tokens, params.spaces_between_special_tokens
        )
        self._matcher = matcher
        self._include_stop = params.include_stop_str_in_output
        self._num_uncounted = params.min_tokens

    def push(self, token_ids: list[int], stopped: bool) -> tuple[str, int, str | None]:
        """Takes tokens, up to the one that completes a stop string.

        Args:
            stopped: the engine stopped at the last one: its text is only shown where that was asked for.

        Returns:
            (new text, how many of the tokens it took, the stop string that ended it).
        """
        shown = token_ids if self._include_stop or not stopped else token_ids[:-1]
        if self._matcher is None:
            push = self._detokenizer.push
            return push(shown[0]) if len(shown) == 1 else "".join(map(push, shown)), len(token_ids), None
        texts = []
        for count, token_id in enumerate(shown, 1):
            text, stop = self._match(self._detokenizer.push(token_id))
            texts.append(text)
            if stop is not None:
                return "".join(texts), count, stop
        return "".join(texts), len(token_ids), None

    def finish(self) -> tuple[str, str | None]:
        """What was held back; a stop string can still be completed by it."""
        shown, stop = self._match(self._detokenizer.finish())
        return (shown, stop) if stop is not None or self._matcher is None else (shown + self._matcher.finish(), None)

    def _match(self, text: str) -> tuple[str, str | None]:
        if self._matcher is None:
            return text, None
        if self._num_uncounted > 0:
            self._num_uncounted -= 1
            return self._matcher.skip(text), None
        shown, stop = self._matcher.push(text)
        return (shown + stop, stop) if stop is not None and self._include_stop else (shown, stop)
