"""Body of POST /v1/completions."""

from typing import Any

from octavo.entrypoints.openai.protocol import GenerationRequest, widest
from octavo.entrypoints.openai.unsupported import COMMON, COMPLETION_ONLY, refuse_unsupported
from octavo.errors import RequestError
from octavo.types import SamplingParams

__all__ = ["CompletionRequest"]

_MAX_TOKENS = 16  # OpenAI's default


class CompletionRequest(GenerationRequest):
    """``prompt`` is checked entry by entry when the prompts are prepared."""

    prompt: str | list[Any] | None = None
    suffix: str | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    def _unknown_fields(self) -> list[str]:
        return refuse_unsupported(self.model_extra or {}, COMMON | COMPLETION_ONLY)

    @property
    def prompt_only(self) -> bool:
        """Nothing is to be generated: the answer is the prompt, mostly for the sake of its logprobs."""
        return self.max_tokens == 0

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the answer's logprobs begin with those of the prompt."""
        return bool(self.echo) and (self.logprobs is not None or self.logprob_token_ids is not None)

    def default_max_tokens(self, defaults: dict[str, Any]) -> int | None:
        """What it may have at most without ``max_tokens``, if the model's length leaves so much."""
        stated: int | None = defaults.get("max_tokens", _MAX_TOKENS)
        return stated

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams:
        """Without ``max_tokens`` it has none: how much of the default fits is known with the prompt.

        Args:
            defaults: the model's, of what is not stated.

        Raises:
            RequestError: a value is out of range.
        """
        if self.prompt_only and not self.echo:
            raise RequestError("max_tokens must be at least 1; only with echo: true may it be 0", param="max_tokens")
        if self.best_of not in (None, 1, self.n):
            message = "best_of is not supported: octavo returns every choice that it generates; leave it out, and use n"
            raise RequestError(message, param="best_of")
        if self.suffix and self.echo:
            raise RequestError("echo cannot be combined with suffix", param="echo")
        if self.suffix and self.add_special_tokens is False:
            message = "add_special_tokens: false cannot be combined with suffix"
            raise RequestError(message, param="add_special_tokens")
        if self.suffix and self.truncate_prompt_tokens is not None:
            message = "truncate_prompt_tokens cannot be combined with suffix: it cuts off the mark at the beginning"
            raise RequestError(message, param="truncate_prompt_tokens")
        max_tokens = self.default_max_tokens(defaults) if self.max_tokens is None else self.max_tokens
        if self.prompt_only:
            max_tokens = 1  # the engine's least; what it generates is not shown
        echoed = (self.logprobs or 0) if self.echoes_logprobs else None
        params = self._sampling_params(
            defaults,
            max_tokens=max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=widest(self.prompt_logprobs, echoed),
        )
        if self.max_tokens is None:
            params.max_tokens = None
        return params

    def field_of(self, param: str | None) -> str | None:
        if param == "prompt_logprobs" and self.prompt_logprobs is None:
            return "logprobs"
        return super().field_of(param)
