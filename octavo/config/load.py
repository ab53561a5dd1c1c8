"""Where the weights come from, and in which form."""

from dataclasses import dataclass

from octavo.config.options import option

__all__ = ["LoadConfig"]

_NOT_YET = "octavo does not read this form yet; it reads safetensors and GGUF"
_PICKLES = "loading a pickle runs code from the checkpoint; octavo reads safetensors and GGUF"


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    load_format: str = option(
        "form of the weights; auto: what MODEL holds",
        default="auto",
        choices=("auto", "safetensors", "gguf"),
        refused={
            "pt": _PICKLES,
            "npcache": _PICKLES,
            "hf": "octavo finds the form by itself; leave the flag out",
            "dummy": "random weights are not there yet; give a checkpoint",
        }
        | dict.fromkeys(
            ("bitsandbytes", "fastsafetensors", "instanttensor", "mistral", "modelexpress", "runai_streamer"), _NOT_YET
        )
        | dict.fromkeys(("runai_streamer_sharded", "sharded_state", "tensorizer"), _NOT_YET),
    )
    download_dir: str | None = option(
        "folder that models are fetched into (default: the hub's own cache, and OCTAVO_CACHE for aliases)",
        metavar="FOLDER",
    )
