"""`litellm` as applications that used vLLM call it: ``hosted_vllm/NAME``."""

import asyncio
from typing import Any

import litellm
import pytest
from conversations import REASONED, SHORT
from octavo_server import KEY, LIMITED_KEY, MODEL, OctavoServer


@pytest.fixture(scope="module")
def call(server: OctavoServer) -> dict[str, Any]:
    """What every call names."""
    return {"model": f"hosted_vllm/{MODEL}", "api_base": f"{server.url}/v1", "api_key": KEY, "num_retries": 0}


def test_a_chat_and_its_stream_are_the_same(call: dict[str, Any]) -> None:
    fields = call | {"messages": SHORT, "max_tokens": 16, "temperature": 0}
    whole = litellm.completion(**fields)
    chunks = list(litellm.completion(**fields, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    (usage,) = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens > 0
    rebuilt = litellm.stream_chunk_builder(chunks, messages=SHORT)
    assert rebuilt.choices[0].message.content == text


def test_reasoning_is_apart(call: dict[str, Any]) -> None:
    fields = call | {"messages": REASONED, "max_tokens": 60, "temperature": 0}
    message = litellm.completion(**fields).choices[0].message
    assert message.reasoning_content
    assert "think>" not in message.reasoning_content + message.content
    deltas = [chunk.choices[0].delta for chunk in litellm.completion(**fields, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == message.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == message.content


def test_text_completions(call: dict[str, Any]) -> None:
    answer = litellm.text_completion(**call, prompt=["Once upon", "The cat"], max_tokens=4, logprobs=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.text for choice in answer.choices)


def test_asynchronous_calls(call: dict[str, Any]) -> None:
    async def ask() -> list[Any]:
        return await asyncio.gather(
            *[litellm.acompletion(**call, messages=SHORT, max_tokens=8, seed=5) for _ in range(8)]
        )

    assert len({answer.choices[0].message.content for answer in asyncio.run(ask())}) == 1


def test_mistakes_are_its_own_exceptions(call: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature must be"):
        litellm.completion(**call, messages=SHORT, temperature=3)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**call, messages=[{"role": "user", "content": "a " * 3000}])
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**call | {"model": "hosted_vllm/other"}, messages=SHORT)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**call | {"api_key": "wrong"}, messages=SHORT)
    limited = call | {"api_key": LIMITED_KEY, "messages": SHORT}
    stream = litellm.completion(**limited, max_tokens=1000, stream=True, ignore_eos=True)
    next(stream)
    with pytest.raises(litellm.RateLimitError):
        litellm.completion(**limited, max_tokens=1)
    stream.completion_stream.close()
