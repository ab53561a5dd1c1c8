"""The soak in short, and that its detectors can fail."""

import pytest

from tests.faults.http_client import Outcome, Usage
from tests.faults.memory import growth
from tests.faults.questions import Question
from tests.soak.__main__ import Books, main

QUESTION = Question({"prompt": [5, 6]}, "whole answer", 2, 12)


def test_a_short_soak_balances() -> None:
    assert main(["--tokens", "25000", "--connections", "32"]) == 0


def test_a_planted_leak_is_found() -> None:
    assert main(["--tokens", "25000", "--connections", "32", "--plant", "front-end"]) == 0


def test_growth_is_told_from_a_warm_up() -> None:
    flat = [(float(done), 1e6 * min(done, 30) + done % 3) for done in range(100)]
    assert abs(growth(flat).gained) < 10
    growing = [(done, size + 1e4 * done) for done, size in flat]
    assert growth(growing).gained == pytest.approx(1e4 * 30, rel=0.1)
    with pytest.raises(ValueError, match="too few"):
        growth(flat[::20])


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, False),
        ({"text": "whole answer!"}, True),
        ({"text": "whole"}, True),
        ({"text": "whole", "left": True, "done": False}, False),
        ({"text": "while", "left": True, "done": False}, True),
        ({"finish_reason": "abort"}, True),
        ({"usage": None}, True),
    ],
)
def test_what_a_client_gets_is_held_against_the_answer_at_rest(change: dict[str, object], wrong: bool) -> None:
    usage = Usage(prompt_tokens=2, completion_tokens=12)
    fields = {"status": 200, "text": "whole answer", "finish_reason": "length", "usage": usage, "done": True}
    books = Books()
    books.enter(QUESTION, Outcome(**(fields | change)))  # type: ignore[arg-type]
    assert bool(books.wrong) == wrong
