"""MODEL, as a person gives it, to a path on this machine."""

from pathlib import Path

from octavo.checkpoints.aliases import ALIASES, Progress, fetch_alias
from octavo.checkpoints.hub import fetch_snapshot, is_hub_name
from octavo.checkpoints.tensor_entry import shown
from octavo.errors import ModelError, UnsupportedError

__all__ = ["pull", "resolve_model"]

_MAY_BE = f"an alias ({', '.join(ALIASES)}), a model folder, a .gguf file, or a hub name (owner/name)"


def resolve_model(model: str, progress: Progress | None = None) -> Path:
    """The folder (Hugging Face form) or .gguf file that ``model`` stands for, fetched where it is not local.

    A name that is both an alias and a local folder is the alias; ``./name`` is the folder.

    Args:
        progress: called with a stage and a share from 0 to 1.

    Raises:
        ModelError: it stands for nothing, or cannot be fetched.
    """
    if model in ALIASES:
        return fetch_alias(model, progress)
    path = Path(model).expanduser()
    try:
        # An empty name would be the current folder.
        is_folder, is_file = bool(model) and path.is_dir(), path.is_file()
    except OSError as error:
        raise ModelError(f"MODEL {shown(model)} cannot be looked at: {error.strerror}") from error
    if is_folder:
        return path
    if is_file:
        if not _is_gguf(path):
            raise UnsupportedError(f"MODEL {model} is not a GGUF file; MODEL is {_MAY_BE}")
        return path
    if is_hub_name(model):
        return fetch_snapshot(model, progress)
    raise ModelError(f"MODEL {shown(model)} is not there; MODEL is {_MAY_BE}")


def pull(model: str, progress: Progress | None = None) -> Path:
    """Fetches an alias or a hub name, if it is not local yet, and says where it is.

    Raises:
        ModelError: as `resolve_model`, and for what cannot be fetched at all.
    """
    if model in ALIASES or is_hub_name(model):
        return fetch_alias(model, progress) if model in ALIASES else fetch_snapshot(model, progress)
    raise ModelError(
        f"{shown(model)} cannot be pulled: give an alias ({', '.join(ALIASES)}) or a hub name (owner/name)"
    )


def _is_gguf(path: Path) -> bool:
    """By its first bytes: files in a cache may have no suffix."""
    if path.suffix == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise ModelError(f"MODEL {path} cannot be read: {error.strerror}") from error
