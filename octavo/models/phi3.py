"""The Phi-3 family: Phi-3, Phi-3.5 mini, Phi-4, Phi-4 mini.

The same arithmetic as Llama's (with a sliding window in some, and rotation of a part of a head in others). What differs
is the checkpoint: query, key and value are one tensor there, and so are gate and up.
"""

from octavo.models.llama import LlamaForCausalLM

__all__ = ["Phi3ForCausalLM"]


class Phi3ForCausalLM(LlamaForCausalLM):
    packed_modules_mapping = {}
