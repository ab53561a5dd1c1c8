"""Model families as checkpoints have them, one file each: Hugging Face's names, fields, and llama.cpp's.

Recipe for a family:

1. Here, ``<family>.py`` with a ``FAMILY = Family(...)`` (family.py says what each attribute means), and its line in
   ``FAMILIES`` below. The common fields (sizes, heads, head_dim, eps, hidden_act, tied head, rope) are checked for all
   families by hf_config.py; ``check`` returns the family's own, and everything that the model reads must be in its
   result or among the common ones. Layers of two kinds: ``read_layer_types``. Fields under other names: ``prepare``.
2. If llama.cpp has it: ``gguf=GGUFPart(...)``. Names outside of the layers and the common metadata are there already.
   Find out (from its converter) which rows it permutes and what it adds to norms; ``config`` reads the metadata that
   only this family has, and names them in ``reads`` if others must not have them.
3. Tensors of the Hugging Face form under other names, in another row order, or without use: ``place``, ``ignored``.
   A merged weight may come whole: under the merged parameter's own name (``qkv_proj``, ``gate_up_proj``).
4. The model: ``octavo/models/<family>.py`` and its line in ``octavo/models/registry.py``.
5. Test: ``tests/models/test_<family>.py`` with ``check_family`` (conftest.py there) and ``write_gguf`` (gguf_files.py).
"""

from pathlib import Path
from typing import Any

from octavo.checkpoints.families import (
    gemma2,
    gemma3,
    gpt_neox,
    granite,
    granite4,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    smollm3,
    stablelm,
)
from octavo.checkpoints.families.family import Family, GGUFPart
from octavo.checkpoints.families.placement import Placement, unpermuted
from octavo.checkpoints.json_file import Fields
from octavo.checkpoints.tensor_entry import shown
from octavo.errors import CheckpointError, UnsupportedError

__all__ = ["FAMILIES", "Family", "GGUFPart", "Placement", "family_of_config", "gguf_part_of", "unpermuted"]

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        gemma2.FAMILY,
        gemma3.FAMILY,
        gemma3.FAMILY_WITH_IMAGES,
        gpt_neox.FAMILY,
        granite.FAMILY,
        granite4.FAMILY,
        llama.FAMILY,
        mistral.FAMILY,
        olmo2.FAMILY,
        phi3.FAMILY,
        qwen2.FAMILY,
        qwen3.FAMILY,
        smollm3.FAMILY,
        stablelm.FAMILY,
    )
}


def family_of_config(config: dict[str, Any], file: Path) -> Family:
    """The family that a config.json names.

    Raises:
        CheckpointError: it names none, or not as names.
        UnsupportedError: one that octavo does not have.
    """
    supported = f"supported: {', '.join(FAMILIES)}"
    stated = config.get("architectures")
    if stated is not None and not (isinstance(stated, list) and all(isinstance(name, str) for name in stated)):
        raise CheckpointError(f"architectures must be a list of names, got {shown(stated)}", file=str(file))
    if not stated:
        kind: str = Fields(config, file).string("model_type")
        stated = [family.architecture for family in FAMILIES.values() if family.model_type == kind]
        if not stated:
            raise UnsupportedError(f"{file}: model_type {shown(kind)} is not supported; {supported}")
    known = next((name for name in stated if name in FAMILIES), None)
    if known is None:
        own_code = "; octavo does not run code from checkpoints (auto_map)" if config.get("auto_map") else ""
        raise UnsupportedError(f"{file}: architecture {shown(stated[0])} is not supported; {supported}{own_code}")
    return FAMILIES[known]


def gguf_part_of(architecture: str, file: Path) -> tuple[Family, GGUFPart]:
    """The family whose GGUF files are of this general.architecture. Raises UnsupportedError where there is none."""
    parts = {family.gguf.architecture: (family, family.gguf) for family in FAMILIES.values() if family.gguf}
    if architecture not in parts:
        raise UnsupportedError(
            f"{file}: GGUF architecture {shown(architecture)} is not supported yet; supported: {', '.join(parts)}"
        )
    return parts[architecture]
