"""Controls of the comparison that the property tests rest on."""

from collections.abc import Callable

import pytest

from octavo import RequestOutput
from octavo.types import CompletionOutput, Logprob
from tests.properties.harness import assert_same


def answer(rank: int = 1, second: float = -2.0) -> RequestOutput:
    table = {7: Logprob(-1.0, rank), 8: Logprob(second, 3 - rank)}
    choice = CompletionOutput(0, "a", [7], cumulative_logprob=-1.0, logprobs=[table], finish_reason="stop")
    prompt_logprobs = [None, {5: Logprob(-3.0, 2)}]
    return RequestOutput("0", None, [1, 5], [choice], finished=True, prompt_logprobs=prompt_logprobs)


def ends_elsewhere(choice: CompletionOutput) -> None:
    choice.stop_reason = 7


def adds_up_to_more(choice: CompletionOutput) -> None:
    choice.cumulative_logprob = -0.9


def has_another_logprob(choice: CompletionOutput) -> None:
    assert choice.logprobs is not None
    choice.logprobs[0][8].logprob -= 2e-7


def has_another_rank(choice: CompletionOutput) -> None:
    assert choice.logprobs is not None
    choice.logprobs[0][7].rank = 2


@pytest.mark.parametrize("change", [ends_elsewhere, adds_up_to_more, has_another_logprob, has_another_rank])
def test_a_difference_is_noticed(change: Callable[[CompletionOutput], None]) -> None:
    other = answer()
    change(other.outputs[0])
    assert_same(answer(), answer())
    with pytest.raises(AssertionError):
        assert_same(answer(), other)


def lacks_prompt_logprobs(output: RequestOutput) -> None:
    output.prompt_logprobs = None


def has_less_of_them(output: RequestOutput) -> None:
    output.prompt_logprobs = [None]


def has_another_prompt_logprob(output: RequestOutput) -> None:
    output.prompt_logprobs = [None, {5: Logprob(-3.00002, 2)}]


@pytest.mark.parametrize("change", [lacks_prompt_logprobs, has_less_of_them, has_another_prompt_logprob])
def test_a_difference_in_the_prompts_logprobs_is_noticed(change: Callable[[RequestOutput], None]) -> None:
    other = answer()
    change(other)
    with pytest.raises(AssertionError):
        assert_same(answer(), other)
