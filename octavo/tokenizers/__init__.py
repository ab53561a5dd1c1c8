"""Text to token ids and back: loading, encoding, decoding piece by piece, stop strings. Knows nothing of requests."""

from octavo.tokenizers.detokenizer import IncrementalDetokenizer
from octavo.tokenizers.fill_in_middle import FillInMiddle
from octavo.tokenizers.load import load_tokenizer
from octavo.tokenizers.stop_matcher import StopMatcher
from octavo.tokenizers.tokenizer import Tokenizer

__all__ = ["FillInMiddle", "IncrementalDetokenizer", "StopMatcher", "Tokenizer", "load_tokenizer"]
