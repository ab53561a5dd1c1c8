"""SamplingParams checks each field and names the one at fault."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo import SamplingParams
from octavo.errors import RequestError

WRONG: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 10**400),
    ("temperature", 2.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", None),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", True),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", "x"),
    ("n", 0),
    ("n", 16385),
    ("n", 2**63),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2**63),
    ("max_tokens", 1.0),
    ("min_tokens", -1),
    ("min_tokens", 10**10),
    ("logprobs", -2),
    ("logprobs", "5"),
    ("prompt_logprobs", -2),
    ("prompt_logprobs", True),
    ("logprob_token_ids", [-1]),
    ("logprob_token_ids", 5),
    ("logprob_token_ids", list(range(1025))),
    ("presence_penalty", 2.1),
    ("presence_penalty", math.nan),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", math.inf),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("logit_bias", {"x": 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {2**63: 1.0}),
    ("logit_bias", {1: 101.0}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: 1.0, "1": 2.0}),
    ("logit_bias", {"1": 1.0, "01": 2.0}),
    ("logit_bias", {"": 1.0}),
    ("logit_bias", {"\u0663": 1.0}),
    ("logit_bias", {"1" * 11: 1.0}),
    ("logit_bias", {True: 1.0}),
    ("logit_bias", {1: 1.0, 2: math.nan, 3: 2.0}),
    ("logit_bias", {1: 1.0, 2: 10**400}),
    ("logit_bias", {1: math.inf, 2: -math.inf}),
    ("logit_bias", {1: 1.0, 2: True}),
    ("logit_bias", {1: 1.0, 2: "1"}),
    ("allowed_token_ids", [1, True]),
    ("allowed_token_ids", [1, 2**31]),
    ("logit_bias", [1]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", ["x"]),
    ("bad_words", [""]),
    ("bad_words", ["x"] * 129),
    ("bad_words", ["x" * 1025]),
    ("bad_words", "x"),
    ("bad_words_token_ids", [[]]),
    ("bad_words_token_ids", [[-1]]),
    ("include_stop_str_in_output", 1),
    ("detokenize", "no"),
    ("skip_special_tokens", 0),
    ("spaces_between_special_tokens", None),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("extra_args", [1]),
    ("extra_args", {1: 2}),
    ("stop", [""]),
    ("stop", [1]),
    ("stop", 5),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [2**63]),
    ("stop_token_ids", ["x"]),
    ("stop_token_ids", 7),
    ("ignore_eos", 1),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_a_value_error_that_names_the_parameter(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, RequestError)
    assert caught.value.param == name
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (1, 1.0, 1.0, 0, 16)
    assert params.seed is None
    assert params.logprobs is None


def test_a_single_stop_string_and_nulls_are_taken() -> None:
    params = SamplingParams(stop="END", stop_token_ids=None, top_k=-1, seed=-1)  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids, params.top_k, params.seed) == (["END"], [], 0, None)
    assert SamplingParams(stop=None).stop == []  # type: ignore[arg-type]


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens") as caught:
        SamplingParams(min_tokens=9, max_tokens=4)
    assert caught.value.param == "min_tokens"
    assert SamplingParams(min_tokens=9, max_tokens=None).min_tokens == 9


def test_several_greedy_choices_are_refused() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(n=2, temperature=0)
    assert caught.value.param == "n"
    assert SamplingParams(n=2, temperature=0.5).n == 2


def test_a_changed_field_is_caught_by_verify() -> None:
    params = SamplingParams()
    params.top_p = 7.0
    with pytest.raises(RequestError, match="top_p"):
        params.verify()


def test_clone_shares_no_list() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[1])
    copy = params.clone()
    copy.stop.append("b")
    copy.stop_token_ids.append(2)
    assert (params.stop, params.stop_token_ids) == (["a"], [1])


def test_params_survive_msgpack() -> None:
    params = SamplingParams(temperature=0.3, top_k=5, seed=-(2**63), stop=["é"], logprobs=0, max_tokens=None)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_stop_strings_and_stop_token_ids_are_bounded_and_the_refusal_names_the_limit() -> None:
    most = SamplingParams(stop=[f"{index:1024}" for index in range(128)], stop_token_ids=list(range(1024)))
    assert (len(most.stop), len(most.stop_token_ids)) == (128, 1024)
    for name, value, limit in (
        ("stop", ["a"] * 129, "at most 128 strings, got 129"),
        ("stop", ["a", "b" * 1025], "at most 1024 characters, got one of 1025"),
        ("stop", "b" * 1025, "at most 1024 characters"),
        ("stop_token_ids", [1] * 1025, "at most 1024 token ids, got 1025"),
    ):
        with pytest.raises(RequestError, match=limit) as caught:
            SamplingParams(**{name: value})  # type: ignore[arg-type]
        assert caught.value.param == name


@pytest.mark.parametrize("name", ["stop", "stop_token_ids"])
def test_a_list_that_is_too_long_is_refused_without_a_look_at_its_entries(name: str) -> None:
    class Sealed(list[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("looked at the entries")

    with pytest.raises(RequestError, match="at most"):
        SamplingParams(**{name: Sealed([object()] * 2000)})


def test_logit_bias_takes_the_keys_that_json_has() -> None:
    assert SamplingParams(logit_bias={"7": 1, 8: -1.0}).logit_bias == {7: 1, 8: -1.0}


_NUMBERS = st.one_of(
    st.integers(-101, 101), st.floats(), st.booleans(), st.sampled_from([2**31 - 1, 2**31, 10**400, "1", None])
)


def _refused(**fields: Any) -> bool:
    try:
        SamplingParams(**fields)
    except RequestError:
        return True
    return False


@given(st.lists(_NUMBERS, min_size=1, max_size=6))
def test_a_list_is_refused_for_each_of_its_entries_and_for_no_other_reason(values: list[Any]) -> None:
    """Long ones are checked all at once; what is wrong with one entry must not hide among the others."""
    assert _refused(allowed_token_ids=values) == any(_refused(allowed_token_ids=[value]) for value in values)
    biases = dict(enumerate(values))
    assert _refused(logit_bias=biases) == any(_refused(logit_bias={0: value}) for value in values)


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="detokenize") as caught:
        SamplingParams(stop=["x"], detokenize=False)
    assert caught.value.param == "stop"


def test_chosen_ids_take_the_place_of_the_most_likely_ones() -> None:
    with pytest.raises(RequestError, match="logprobs") as caught:
        SamplingParams(logprobs=2, logprob_token_ids=[1])
    assert caught.value.param == "logprob_token_ids"


def test_a_clone_shares_nothing() -> None:
    params = SamplingParams(
        logit_bias={1: 1.0}, allowed_token_ids=[1, 2], bad_words_token_ids=[[1]], extra_args={"a": 1}
    )
    copy = params.clone()
    assert copy == params
    copy.logit_bias[2] = 1.0
    assert copy.allowed_token_ids is not None
    copy.allowed_token_ids.append(3)
    copy.extra_args["b"] = 2
    assert copy != params
    assert params.logit_bias == {1: 1.0}


def test_everything_survives_msgpack() -> None:
    params = SamplingParams(
        n=2, min_p=0.5, logit_bias={3: -100.0}, allowed_token_ids=[1], bad_words=["a"], prompt_logprobs=-1, stop=["b"],
        extra_args={"deep": {"x": [1, None]}},
    )  # fmt: skip
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("name", "hint"), [("temprature", "did you mean 'temperature'?"), ("logprob", "did you mean 'logprobs'?")]
)
def test_a_parameter_that_there_is_not_is_named_with_the_one_that_was_meant(name: str, hint: str) -> None:
    with pytest.raises(TypeError) as refused:
        SamplingParams(**{"top_p": 0.5, name: 1})
    assert str(refused.value) == f"SamplingParams has no parameter {name!r}; {hint}"


def test_where_none_is_like_it_all_are_named() -> None:
    with pytest.raises(TypeError, match=r"no parameter 'xyz'; known: allowed_token_ids, .*, truncate_prompt_tokens"):
        SamplingParams(xyz=1)  # type: ignore[call-arg]
    assert SamplingParams(top_p=0.5).top_p == 0.5  # the control
