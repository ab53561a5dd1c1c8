"""What a request states reaches the engine as it is stated; what it does not gets the model's default, or the API's."""

from collections.abc import Callable
from typing import Any

import pytest

from octavo.types import SamplingParams

STATED: dict[str, Any] = {
    "n": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "temperature": 0.25,
    "top_p": 0.75,
    "top_k": 7,
    "min_p": 0.125,
    "seed": 11,
    "allowed_token_ids": [5, 6],
    "bad_words": ["xy"],
    "stop": ["x", "y"],
    "stop_token_ids": [9],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "max_tokens": 5,
    "min_tokens": 2,
    "prompt_logprobs": 2,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": 3,
}


@pytest.fixture
def params_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SamplingParams]:
    """``params_of(server, door, **fields)`` → the engine's parameters of the last prompt."""

    def ask(server: Any, door: str, **fields: Any) -> SamplingParams:
        seen = []
        process = server.engine.process_inputs

        async def spy(*args: Any, **options: Any) -> Any:
            inputs = await process(*args, **options)
            seen.append(inputs)
            return inputs

        monkeypatch.setattr(server.engine, "process_inputs", spy)
        response = getattr(server, door)(**fields)
        assert response.status_code == 200, response.text
        assert "x-octavo-ignored" not in response.headers
        found: SamplingParams = seen[-1].params
        for request in seen[-1].requests:  # every choice has as many
            assert request.sampling_params.max_tokens == found.max_tokens
        return found

    return ask


@pytest.mark.parametrize("door", ["complete", "chat"])
def test_every_field_reaches_the_engine(server: Any, params_of: Any, door: str) -> None:
    params = params_of(server, door, **STATED, logit_bias={"7": 2, "8": -1.5})
    assert {name: getattr(params, name) for name in STATED} == STATED
    assert params.logit_bias == {7: 2, 8: -1.5}
    assert params_of(server, door, detokenize=False).detokenize is False
    assert params_of(server, door, logprob_token_ids=[4, 5]).logprob_token_ids == [4, 5]


@pytest.mark.parametrize("door", ["complete", "chat"])
def test_arguments_for_custom_processors_reach_the_engine(
    server: Any, error: Any, monkeypatch: pytest.MonkeyPatch, door: str
) -> None:
    given = []
    process = server.engine.process_inputs

    async def spy(prompt: Any, params: SamplingParams, *args: Any, **options: Any) -> Any:
        given.append(params.extra_args)
        return await process(prompt, params, *args, **options)

    monkeypatch.setattr(server.engine, "process_inputs", spy)
    message = error(getattr(server, door)(vllm_xargs={"a": 1, "b": ["c"]}), 400, "vllm_xargs")["message"]
    assert "--logits-processors" in message  # this server has none that would take them
    assert given == [{"a": 1, "b": ["c"]}]


def test_every_field_of_the_engine_can_be_stated() -> None:
    """Control of the list above: nothing of SamplingParams is forgotten."""
    elsewhere = {"logit_bias", "detokenize", "logprob_token_ids", "extra_args", "logprobs", "output_kind"}
    internal = {"bad_words_token_ids"}
    assert set(STATED) | elsewhere | internal == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("door", ["complete", "chat"])
@pytest.mark.parametrize("unstated", [{}, {"temperature": None, "top_k": None, "max_tokens": None}])
def test_what_is_not_stated_is_the_models_default(
    make_server: Any, params_of: Any, door: str, unstated: dict[str, Any]
) -> None:
    server = make_server(defaults={"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_tokens": 7})
    path, body = (
        ("/v1/completions", {"prompt": "hi"})
        if door == "complete"
        else ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    )
    server.ask = lambda **fields: server.post(path, body | unstated | fields)
    params = params_of(server, "ask", top_p=0.5)
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.6, 20, 0.5, 7)
    params = params_of(make_server(), "complete" if door == "complete" else "chat")
    assert (params.temperature, params.top_k, params.max_tokens) == (0, 0, 4)


def test_a_default_of_max_tokens_gives_way_to_the_models_length(make_server: Any, params_of: Any) -> None:
    server = make_server(defaults={"max_tokens": 60})
    fields = {"prompt": [5] * 40, "max_tokens": None, "n": 2, "temperature": 1, "prompt_logprobs": 0}
    assert params_of(server, "complete", **fields).max_tokens == 24


def test_best_of_is_taken_where_it_asks_for_nothing(server: Any) -> None:
    for fields in ({"best_of": 1}, {"best_of": 2, "n": 2, "temperature": 1}, {"best_of": None}):
        assert server.complete(**fields).status_code == 200


def test_a_prompt_without_the_tokens_that_are_put_around_texts(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    encode = server.engine.tokenizer.encode
    monkeypatch.setattr(
        server.engine.tokenizer, "encode", lambda text, special=True: asked.append(special) or encode(text, special)
    )
    for stated in (None, True, False):
        assert server.complete(add_special_tokens=stated).status_code == 200
    assert asked[::2] == [True, True, False]  # the other half is the fake engine's own


# truncation ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("door", ["complete", "chat"])
def test_a_truncated_prompt_is_told(server: Any, events: Any, door: str, stream: bool) -> None:
    fields = {"prompt": "abcdefgh"} if door == "complete" else {"messages": [{"role": "user", "content": "abcdef"}]}
    response = getattr(server, door)(**fields, truncate_prompt_tokens=3, stream=stream)
    assert response.headers["x-octavo-truncated"] == "5"
    bodies = events(response) if stream else [response.json()]
    assert {body["prompt_truncated_tokens"] for body in bodies} == {5}
    if not stream:
        assert bodies[0]["usage"]["prompt_tokens"] == 3


def test_nothing_is_told_where_nothing_is_cut(server: Any) -> None:
    response = server.complete(prompt="abc", truncate_prompt_tokens=3)
    assert "x-octavo-truncated" not in response.headers
    assert "prompt_truncated_tokens" not in response.json()


@pytest.mark.parametrize(("fields", "kept", "generated"), [({}, 48, 16), ({"max_tokens": 10}, 54, 10)])
def test_truncation_to_what_fits_leaves_room_for_the_answer(
    server: Any, fields: dict[str, Any], kept: int, generated: int
) -> None:
    body = {"prompt": [5] * 100, "truncate_prompt_tokens": -1} | fields
    usage = server.post("/v1/completions", body).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (kept, generated)


def test_control_a_prompt_is_not_truncated_unless_asked(server: Any, error: Any) -> None:
    error(server.complete(prompt=[5] * 100), 400, "input_tokens")


# unknown fields ------------------------------------------------------------------------------------------------------

UNKNOWN = {"user": "u", "stream": True, "stream_options": {"include_usage": True, "verbose": True}}


@pytest.mark.parametrize("door", ["complete", "chat"])
def test_a_strict_server_refuses_unknown_fields_and_names_them(make_server: Any, error: Any, door: str) -> None:
    server = make_server(strict_requests=True)
    message = error(getattr(server, door)(**UNKNOWN), 400, "user")["message"]
    assert "user, stream_options.verbose" in message
    error(getattr(server, door)(**{"x" * 5000: 1}), 400)
    assert getattr(server, door)().status_code == 200
    assert server.engine.started == [name for name in server.engine.started if name][:1]


@pytest.mark.parametrize(
    ("door", "fields"),
    [
        ("tokenize", {"prompt": "a"}),
        ("tokenize", {"messages": [{"role": "user", "content": "a"}]}),
        ("detokenize", {"tokens": [5]}),
    ],
)
def test_tokenization_names_or_refuses_unknown_fields_too(
    make_server: Any, error: Any, door: str, fields: dict[str, Any]
) -> None:
    response = getattr(make_server(), door)(**fields, colour="red")
    assert response.headers["x-octavo-ignored"] == "colour"
    error(getattr(make_server(strict_requests=True), door)(**fields, colour="red"), 400, "colour")
