"""`langchain-openai`: its chat model and its completions, whole, streamed and in batches."""

import asyncio
from typing import Any

import openai
import pytest
from conversations import SHORT
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI
from octavo_server import KEY, MODEL, OctavoServer


def chat(server: OctavoServer, **settings: Any) -> ChatOpenAI:
    stated: dict[str, Any] = {"model": MODEL, "api_key": KEY, "max_retries": 0, "temperature": 0, "max_tokens": 16}
    return ChatOpenAI(base_url=f"{server.url}/v1", **stated | settings)


def test_a_chat_and_its_stream_are_the_same(server: OctavoServer) -> None:
    model = chat(server, stream_usage=True)
    messages = [SystemMessage("Be brief."), HumanMessage("Name three fruits.")]
    whole = model.invoke(messages)
    assert isinstance(whole, AIMessage)
    parts = list(model.stream(messages))
    joined = parts[0]
    for part in parts[1:]:
        joined += part
    assert isinstance(joined, AIMessageChunk)
    assert joined.content == whole.content != ""
    assert whole.response_metadata["finish_reason"] == joined.response_metadata["finish_reason"]
    assert whole.response_metadata["model_name"] == MODEL
    assert whole.usage_metadata
    assert joined.usage_metadata
    assert joined.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    assert joined.usage_metadata["input_token_details"]["cache_read"] > 0


def test_a_batch_and_logprobs(server: OctavoServer) -> None:
    answers = chat(server, logprobs=True, top_logprobs=2).batch(["Say hi.", "Say bye.", "Say no."])
    assert len(answers) == 3
    for answer in answers:
        entries = answer.response_metadata["logprobs"]["content"]
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


def test_asynchronous_streams(server: OctavoServer) -> None:
    async def ask() -> list[str]:
        async def one() -> str:
            return "".join([str(part.content) async for part in chat(server).astream("Name three fruits.")])

        return await asyncio.gather(*[one() for _ in range(8)])

    assert len(set(asyncio.run(ask()))) == 1


def test_text_completions(server: OctavoServer) -> None:
    model = OpenAI(base_url=f"{server.url}/v1", model=MODEL, api_key=KEY, max_retries=0, temperature=0, max_tokens=8)  # type: ignore[arg-type]
    text = model.invoke("Once upon a time")
    assert text == "".join(model.stream("Once upon a time")) != ""
    assert len(model.generate(["a", "b", "c"]).generations) == 3


def test_mistakes_are_exceptions_of_the_openai_package(server: OctavoServer) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature must be"):
        chat(server, temperature=5).invoke(SHORT)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        list(chat(server).stream("a " * 3000))
    with pytest.raises(openai.NotFoundError):
        chat(server, model="other").invoke(SHORT)
    with pytest.raises(openai.AuthenticationError):
        chat(server, api_key="wrong").invoke(SHORT)
