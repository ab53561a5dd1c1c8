"""MODEL, as a person gives it, to a path on this machine. The same for --tokenizer, of which only the tokenizer is
fetched."""

from pathlib import Path

from octavo.checkpoints.aliases import ALIASES, Progress, fetch_alias
from octavo.checkpoints.hub import FetchOptions, fetch_snapshot, is_hub_name
from octavo.checkpoints.tensor_entry import shown
from octavo.errors import ConfigError, ModelError, UnsupportedError

__all__ = ["pull", "resolve_model", "resolve_tokenizer"]

_MAY_BE = f"an alias ({', '.join(ALIASES)}), a model folder, a .gguf file, or a hub name (owner/name)"


def resolve_model(model: str, progress: Progress | None = None, options: FetchOptions | None = None) -> Path:
    """The folder (Hugging Face form) or .gguf file that ``model`` stands for, fetched where it is not local.

    A name that is both an alias and a local folder is the alias; ``./name`` is the folder.

    Args:
        progress: called with a stage and a share from 0 to 1.

    Raises:
        ModelError: it stands for nothing, or cannot be fetched.
        ConfigError: a revision of something that has none.
    """
    return _resolve(model, progress, options or FetchOptions(), "MODEL", "--revision")


def resolve_tokenizer(tokenizer: str, progress: Progress | None = None, options: FetchOptions | None = None) -> Path:
    """As `resolve_model`, for ``--tokenizer``: of a hub's model only the tokenizer's files are fetched."""
    return _resolve(tokenizer, progress, options or FetchOptions(), "--tokenizer", "--tokenizer-revision")


def _resolve(name: str, progress: Progress | None, options: FetchOptions, what: str, revision_flag: str) -> Path:
    if name in ALIASES:
        _refuse_revision(options, f"{what} {name} is one fixed file", revision_flag)
        return fetch_alias(name, progress, options.download_dir)
    path = Path(name).expanduser()
    try:
        # An empty name would be the current folder.
        is_folder, is_file = bool(name) and path.is_dir(), path.is_file()
    except OSError as error:
        raise ModelError(f"{what} {shown(name)} cannot be looked at: {error.strerror}") from error
    if is_folder or is_file:
        _refuse_revision(options, f"{what} {name} is a local path", revision_flag)
    if is_folder:
        return path
    if is_file:
        if not _is_gguf(path, what):
            raise UnsupportedError(f"{what} {name} is not a GGUF file; {what} is {_MAY_BE}")
        return path
    if is_hub_name(name):
        return fetch_snapshot(name, progress, options, tokenizer_only=what != "MODEL")
    raise ModelError(f"{what} {shown(name)} is not there; {what} is {_MAY_BE}")


def _refuse_revision(options: FetchOptions, why: str, flag: str) -> None:
    if options.revision is not None:
        raise ConfigError(f"{flag} {options.revision}: {why}; revisions are for hub names (owner/name)")


def pull(model: str, progress: Progress | None = None, options: FetchOptions | None = None) -> Path:
    """Fetches an alias or a hub name, if it is not there yet, and says where it is.

    Raises:
        ModelError, ConfigError: as `resolve_model`, and for what cannot be fetched at all.
    """
    options = options or FetchOptions()
    if model in ALIASES:
        return resolve_model(model, progress, options)
    if is_hub_name(model):
        return fetch_snapshot(model, progress, options)
    raise ModelError(
        f"{shown(model)} cannot be pulled: give an alias ({', '.join(ALIASES)}) or a hub name (owner/name)"
    )


def _is_gguf(path: Path, what: str) -> bool:
    """By its first bytes: files in a cache may have no suffix."""
    if path.suffix == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise ModelError(f"{what} {path} cannot be read: {error.strerror}") from error
