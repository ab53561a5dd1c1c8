"""What a caller gets back: RequestOutput and its parts, with vLLM's names."""

import msgspec

from octavo.types.engine_io import RequestMetrics

__all__ = ["CompletionOutput", "Logprob", "PromptLogprobTables", "RequestOutput", "SampleLogprobs"]


class Logprob(msgspec.Struct, gc=False):
    """One token's entry in a logprobs table.

    Attributes:
        logprob: natural logarithm of its probability in the raw distribution.
        rank: 1 for the most likely token of the vocabulary, 2 for the next, ….
        decoded_token: its text when decoded by itself.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# One table a generated token: token id → Logprob. Holds the sampled token and the most likely ones.
SampleLogprobs = list[dict[int, Logprob]]
# The same for the prompt; nothing comes before its first token, so that has none.
PromptLogprobTables = list[dict[int, Logprob] | None]


class CompletionOutput(msgspec.Struct):
    """One choice.

    Attributes:
        index: 0 to n-1.
        text: generated text (or the new part of it, with output kind DELTA).
        token_ids: generated ids, likewise.
        cumulative_logprob: sum of the sampled tokens' logprobs so far, where logprobs were asked for.
        logprobs: a table a token of ``token_ids``, where asked for.
        finish_reason: ``"stop"``, ``"length"``, ``"abort"``, ``"error"``, or None while it goes on.
        stop_reason: the stop string or stop token id that ended it; None for end-of-sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestOutput(msgspec.Struct):
    """The state of one request, or what is new in it.

    Attributes:
        request_id: the caller's id.
        prompt: the prompt's text, where it was given as text.
        prompt_token_ids: its ids.
        prompt_logprobs: a table a token of the prompt, None for the first, where asked for; complete when the first
            token has come. With DELTA in the first output only.
        outputs: the choices, in order of index (with DELTA: those that have something new).
        finished: whether all choices are finished.
        num_cached_tokens: how many prompt tokens the prefix cache supplied.
        metrics: times of the request, once it is finished.
        num_truncated_prompt_tokens: how many tokens ``truncate_prompt_tokens`` cut from the prompt's beginning.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = []
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: PromptLogprobTables | None = None
    metrics: RequestMetrics | None = None
    num_truncated_prompt_tokens: int = 0
