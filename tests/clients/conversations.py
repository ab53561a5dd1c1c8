"""What is said to the demo model."""

from typing import Any

__all__ = ["REASONED", "SHORT"]

SHORT: Any = [{"role": "user", "content": "Name three fruits."}]


def _example(question: str, thought: str, answer: str) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{answer}"},
    ]


# The demo model does not reason by itself; it does as it is shown.
REASONED: Any = [
    *_example("What is the colour of the sky?", "The sky is blue.", "Blue."),
    *_example("What is the colour of the grass?", "The grass is green.", "Green."),
    *_example("What is the colour of snow?", "The snow is white.", "White."),
    {"role": "user", "content": "What is the colour of a lemon?"},
]
