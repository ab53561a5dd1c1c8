"""Whatever JSON a client sends, the answer is a 200 or a 4xx, never a 5xx, and small."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FIELDS = [
    *("model", "prompt", "messages", "n", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids"),
    *("ignore_eos", "max_tokens", "max_completion_tokens", "min_tokens", "stream", "stream_options", "cache_salt"),
    *("priority", "request_id", "logprobs", "top_logprobs", "chat_template_kwargs", "response_format", "logit_bias"),
    *("min_p", "tools", "echo", "best_of", "unknown", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("allowed_token_ids", "bad_words", "include_stop_str_in_output", "prompt_logprobs", "logprob_token_ids"),
    *("detokenize", "skip_special_tokens", "truncate_prompt_tokens", "vllm_xargs", "return_token_ids", "suffix"),
    *("return_tokens_as_token_ids", "add_generation_prompt", "continue_final_message", "chat_template", "documents"),
    *("add_special_tokens", "return_token_strs", "tokens"),
]
numbers = st.one_of(
    st.sampled_from([-1, 0, 1, 2, 4, 0.5, -0.0, 2**31, 2**63, -(2**63), 2**64, 10**30, 1e308, 1e-320]),
    st.integers(-5, 400),
)
# No half surrogate pairs: json.dumps escapes them, and the body is then refused as a whole.
texts = st.one_of(st.sampled_from(["", "m", "hi", "user", "assistant", "text"]), st.text(max_size=8))
leaves = st.one_of(st.none(), st.booleans(), numbers, texts)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "wizard"]), "content": texts}, optional={"reasoning": leaves}
    ),
    min_size=1,
    max_size=2,
)
values = st.one_of(
    messages,
    st.recursive(
        leaves,
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
        max_leaves=6,
    ),
)
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=5)


@pytest.mark.parametrize(
    ("path", "valid"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
        ("/tokenize", {"prompt": "hi"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=bodies)
def test_any_body_is_served_or_refused(
    server: Any, error: Callable[..., Any], path: str, valid: dict[str, Any], changes: dict[str, Any]
) -> None:
    response = server.post(path, json.dumps(valid | changes).encode())
    assert server.engine.running == set()
    if response.status_code == 200:
        assert response.content
    else:
        assert response.status_code in (400, 404), response.text
        error(response, response.status_code)
