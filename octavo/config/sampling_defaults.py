"""What a request samples with where it says nothing: what the model recommends, and what the operator put before it."""

from typing import Any

from octavo.errors import ConfigError, RequestError
from octavo.types import SamplingParams

__all__ = ["SAMPLING_DEFAULTS", "sampling_defaults"]

# Name in generation_config.json → in SamplingParams.
SAMPLING_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_FLAG = "--override-generation-config"


def sampling_defaults(
    recommended: dict[str, Any], source: str, override: dict[str, Any]
) -> tuple[dict[str, Any], str | None]:
    """(field of SamplingParams → value, where they come from; None where nothing is said).

    Only numbers that are stated count: ``do_sample`` changes nothing, and null stands for nothing.

    Args:
        recommended: generation_config.json; names that are no sampling defaults are left alone.
        source: what to call it in messages.
        override: of ``--override-generation-config``: goes before it; null takes a recommendation away.

    Raises:
        ConfigError: a value that no request could have, or an override of something that is no sampling default.
    """
    unknown = [name for name in override if name not in SAMPLING_DEFAULTS]
    if unknown:
        raise ConfigError(f"{_FLAG}: {unknown[0]!r:.80} is no sampling default; known: {', '.join(SAMPLING_DEFAULTS)}")
    from_model = {
        name: value for name, value in recommended.items() if name in SAMPLING_DEFAULTS and name not in override
    }
    found = _checked(from_model, source) | _checked(override, _FLAG)
    sources = [name for name, values in ((source, from_model), (_FLAG, override)) if any(_stated(values))]
    return found, " and ".join(sources) or None


def _stated(values: dict[str, Any]) -> list[str]:
    return [name for name, value in values.items() if value is not None]


def _checked(values: dict[str, Any], source: str) -> dict[str, Any]:
    found = {}
    for name in _stated(values):
        field, value = SAMPLING_DEFAULTS[name], values[name]
        try:
            found[field] = getattr(SamplingParams(**{field: value}), field)
        except RequestError as error:
            raise ConfigError(f"{source}: {str(error).replace(field, name, 1)}") from error
    return found
