"""``<think>…</think>`` before the answer: DeepSeek-R1, Qwen3, SmolLM3 and most others."""

from octavo.parsers.reasoning import ReasoningFormat

__all__ = ["FORMAT"]

FORMAT = ReasoningFormat(start="<think>", end="</think>")
