"""Fields of OpenAI's and vLLM's APIs that octavo does not have yet: which values change nothing, so that clients which
always send them are served, while a request that needs one is refused by the field's name instead of being misread."""

from typing import Any

from octavo.errors import RequestError

__all__ = ["CHAT_ONLY", "COMMON", "COMPLETION_ONLY", "refuse_unsupported"]

# Field → the values that ask for nothing; None always does.
COMMON: dict[str, tuple[Any, ...]] = {
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "use_beam_search": (False,),
}
COMPLETION_ONLY: dict[str, tuple[Any, ...]] = {
    "prompt_embeds": (),
}
CHAT_ONLY: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "include_reasoning": (True,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),  # says something only where there are tools
    "prediction": (),
    "tool_choice": ("none",),
    "tools": (),
    "web_search_options": (),
}


def refuse_unsupported(fields: dict[str, Any], known: dict[str, tuple[Any, ...]]) -> list[str]:
    """Looks through the fields of a request that its model does not have.

    Returns:
        names that are unknown to octavo: accepted and without effect.

    Raises:
        RequestError: a field asks for something that octavo does not do.
    """
    unknown = []
    for name, value in fields.items():
        if name not in known:
            unknown.append(name)
        elif value is not None and not any(_equal(value, neutral) for neutral in known[name]):
            raise RequestError(f"{name} is not supported by octavo yet; leave it out", param=name)
    return unknown


def _equal(value: Any, neutral: Any) -> bool:
    """Python's equality, but for ``False == 0``."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
