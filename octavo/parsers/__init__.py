"""Generated text → its parts: what the model thought and what it answers.

A format is one file with a small description that names itself in the registry; the streaming is solved once, in
reasoning.py.
"""

from octavo.parsers.reasoning import REASONING_PARSERS, ReasoningFormat, ReasoningStream, detect_reasoning_format

__all__ = ["REASONING_PARSERS", "ReasoningFormat", "ReasoningStream", "detect_reasoning_format"]
