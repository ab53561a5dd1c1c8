"""octavo: an LLM inference and serving engine built on pages. Names are imported when first used."""

TYPE_CHECKING = False  # typing's, without its import: the command line begins here, and a Ctrl-C may come any moment

__version__ = "0.1.0"

__all__ = ["LLM", "AsyncLLM", "RequestOutput", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from octavo.engine import LLM, AsyncLLM
    from octavo.types import RequestOutput, SamplingParams

_HOMES = {
    "LLM": "octavo.engine",
    "AsyncLLM": "octavo.engine",
    "SamplingParams": "octavo.types",
    "RequestOutput": "octavo.types",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    import gc
    from importlib import import_module

    collects = gc.isenabled()
    gc.disable()  # a walk through all of torch's objects takes 80 ms, and finds nothing
    try:
        found: object = getattr(import_module(home), name)
    finally:
        if collects:
            gc.enable()
    return found
