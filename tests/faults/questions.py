"""Greedy requests whose answers are known: what a server says to them under load must be what it said at rest."""

import random
from dataclasses import dataclass
from typing import Any

from tests.faults.http_client import Connection, Outcome

__all__ = ["Question", "ask_at_rest"]

_VOCAB_SIZE = 300  # of text; the tiny models have a few more


@dataclass(frozen=True)
class Question:
    """Attributes:

    body: of a completion, not streamed.
    text: the answer.
    """

    body: dict[str, Any]
    text: str
    num_prompt_tokens: int
    num_tokens: int

    def streamed(self) -> dict[str, Any]:
        return self.body | {"stream": True, "stream_options": {"include_usage": True}}

    def wrong(self, outcome: Outcome) -> str | None:
        """What an answer says that it must not, if it does: a whole one must be the answer, a part its beginning."""
        if outcome.whole:
            if outcome.text != self.text:
                return f"another text: {outcome.text!r} instead of {self.text!r}"
            usage = outcome.usage
            counts = None if usage is None else (usage.prompt_tokens, usage.completion_tokens)
            if counts != (self.num_prompt_tokens, self.num_tokens) or outcome.finish_reason != "length":
                return f"usage {counts} and finish reason {outcome.finish_reason}"
        elif not self.text.startswith(outcome.text):
            return f"a text that the answer does not begin with: {outcome.text!r} instead of {self.text!r}"
        return None


async def ask_at_rest(host: str, port: int, count: int, prompt_tokens: int, max_tokens: int) -> list[Question]:
    """So many questions, of different lengths up to these, with the answers of a server that does nothing else."""
    drawn = random.Random(7)
    connection = Connection(host, port)
    questions = []
    for index in range(count):
        share = (index + 1) / count
        prompt = [drawn.randrange(3, _VOCAB_SIZE) for _ in range(max(1, round(prompt_tokens * share)))]
        length = max(1, round(max_tokens * (1 - share / 2)))
        body = {"prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True}
        outcome = await connection.complete(body)
        assert outcome.whole, outcome
        assert outcome.usage is not None
        assert (outcome.usage.prompt_tokens, outcome.usage.completion_tokens) == (len(prompt), length)
        questions.append(Question(body, outcome.text, len(prompt), length))
    connection.close()
    return questions
