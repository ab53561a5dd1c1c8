"""Fields of OpenAI's and vLLM's APIs that octavo does not have yet: which values change nothing, so that clients which
always send them are served, while a request that needs one is refused by the field's name instead of being misread."""

from typing import Any

from octavo.errors import RequestError

__all__ = ["CHAT_ONLY", "COMMON", "COMPLETION_ONLY", "refuse_unsupported"]

# Field → the values that ask for nothing; None always does.
COMMON: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "detokenize": (True,),
    "frequency_penalty": (0,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_p": (0,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
COMPLETION_ONLY: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "best_of": (1,),
    "echo": (False,),
    "prompt_embeds": (),
    "suffix": ("",),
}
CHAT_ONLY: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
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
