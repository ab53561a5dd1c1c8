"""Model folders from the Hugging Face hub, or from its cache alone when HF_HUB_OFFLINE is set."""

import re
from dataclasses import dataclass
from pathlib import Path

from octavo import envs
from octavo.checkpoints.aliases import Progress
from octavo.errors import ModelError, UnsupportedError
from octavo.logging import init_logger, one_line

__all__ = ["FetchOptions", "fetch_snapshot", "is_hub_name"]

logger = init_logger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_TIMEOUT_SECONDS = 10.0
_TOKENIZERS = ["tokenizer.json", "tokenizer.model", "spiece.model"]
_WANTED = ["*.safetensors", "*.json", "*.jinja", *_TOKENIZERS]
# Sub-folders hold other forms of the model, "consolidated" files a second copy of the weights.
_UNWANTED = ["*/*", "consolidated*"]
_WANTED_TOKENIZER = [
    *_TOKENIZERS,
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "*.jinja"),
]


@dataclass(frozen=True)
class FetchOptions:
    """How models are fetched.

    Attributes:
        revision: branch, tag or commit on the hub; None: its main branch.
        download_dir: folder to fetch into; None: the hub library's own cache, and octavo's for aliases.
    """

    revision: str | None = None
    download_dir: str | None = None


def is_hub_name(model: str) -> bool:
    """Whether ``model`` has the form owner/name."""
    return _NAME.fullmatch(model) is not None and not model.endswith((".gguf", ".safetensors", ".json"))


def fetch_snapshot(
    name: str, progress: Progress | None = None, options: FetchOptions | None = None, tokenizer_only: bool = False
) -> Path:
    """The local folder of the hub's model ``name``; with ``tokenizer_only`` of the tokenizer's files among its files.

    Raises:
        ModelError: no such model or revision, no access, no network, or it is not in the cache and nothing may be
            contacted.
        UnsupportedError: it has no safetensors (or no tokenizer).
    """
    options = options or FetchOptions()
    offline = envs.hub_offline() or not _check_hub(name, options.revision, tokenizer_only)
    if progress is not None:
        progress(f"fetching {name}", 0.0)
    # Imported here: it takes a second, and only hub names need it.
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            name,
            revision=options.revision,
            cache_dir=options.download_dir,
            allow_patterns=_WANTED_TOKENIZER if tokenizer_only else _WANTED,
            ignore_patterns=_UNWANTED,
            local_files_only=offline,
        )
    except Exception as error:  # the library's own errors, HTTP errors and OSErrors, which differ by its version
        raise _failure(name, error, offline) from error
    if progress is not None:
        progress(f"{name} is there", 1.0)
    return Path(folder)


def _check_hub(name: str, revision: str | None, tokenizer_only: bool) -> bool:
    """Whether the hub can be asked; refuses, before anything is downloaded, what octavo could not read."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        siblings = huggingface_hub.HfApi().model_info(name, revision=revision, timeout=_TIMEOUT_SECONDS).siblings
    except HfHubHTTPError as error:
        raise _failure(name, error, offline=False) from error
    except Exception as error:  # no network: which exception says so depends on the library's version
        logger.warning(
            "the hub cannot be reached (%s); looking for %s in the local cache only", one_line(str(error)), name
        )
        return False
    files = [sibling.rfilename for sibling in siblings or ()]
    if tokenizer_only:
        if not set(files) & set(_TOKENIZERS):
            raise UnsupportedError(f"hub model {name} has no tokenizer that octavo reads: {', '.join(_TOKENIZERS)}")
        return True
    if any(file.endswith(".safetensors") and "/" not in file for file in files):
        return True
    if any(file.endswith(".gguf") for file in files):
        raise ModelError(f"hub model {name} holds GGUF files only: download the one you want and give it as MODEL")
    raise UnsupportedError(f"hub model {name} holds no safetensors weights; octavo reads safetensors and GGUF")


def _failure(name: str, error: Exception, offline: bool) -> ModelError:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return ModelError(f"hub model {name} needs its owner's consent: ask for it on its page, then set HF_TOKEN")
    if isinstance(error, RevisionNotFoundError):
        return ModelError(f"hub model {name} has no such revision: check --revision (or --tokenizer-revision)")
    if isinstance(error, RepositoryNotFoundError):
        return ModelError(f"hub model {name} does not exist, or is private: check its name, or set HF_TOKEN")
    if offline:
        why = "HF_HUB_OFFLINE is set" if envs.hub_offline() else "the hub cannot be reached"
        return ModelError(
            f"hub model {name} is not in the local cache and {why}; fetch it while online, or give a local path"
        )
    lines = one_line(str(error).strip() or type(error).__name__)
    return ModelError(f"hub model {name} cannot be fetched: {lines[:300]}")
