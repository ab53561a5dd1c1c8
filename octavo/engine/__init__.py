"""The engine: EngineCore (the loop), the process around it, the clients that reach it, and what callers hold.

Names are imported when first used: importing the room pulls in neither torch nor sockets.
"""

from typing import TYPE_CHECKING, Any

__all__ = [
    "LLM",
    "AsyncEngineCoreClient",
    "AsyncLLM",
    "AsyncMPClient",
    "Bounds",
    "ChildProcess",
    "EngineCore",
    "EngineCoreClient",
    "EngineCoreProc",
    "EngineInputs",
    "FrontEndSlot",
    "InprocClient",
    "InputProcessor",
    "LifeLine",
    "OutputProcessor",
    "Prompt",
    "Pulse",
    "SyncMPClient",
    "build_config",
    "describe_exit",
    "early_engine",
    "make_async_client",
    "make_sync_client",
    "note_socket",
    "remove_noted_socket",
]

if TYPE_CHECKING:
    from octavo.engine.async_llm import AsyncLLM
    from octavo.engine.child_process import ChildProcess, LifeLine, describe_exit
    from octavo.engine.client import (
        AsyncEngineCoreClient,
        EngineCoreClient,
        InprocClient,
        make_async_client,
        make_sync_client,
    )
    from octavo.engine.config_builder import build_config
    from octavo.engine.core import EngineCore
    from octavo.engine.core_proc import EngineCoreProc
    from octavo.engine.engine_process import early_engine
    from octavo.engine.heartbeat import Bounds, Pulse
    from octavo.engine.input_processor import EngineInputs, InputProcessor
    from octavo.engine.llm import LLM
    from octavo.engine.mp_client import AsyncMPClient, SyncMPClient
    from octavo.engine.output_processor import OutputProcessor
    from octavo.engine.private_folder import note_socket, remove_noted_socket
    from octavo.engine.prompts import Prompt
    from octavo.engine.serial import FrontEndSlot

_HOMES = {
    "LLM": "llm",
    "AsyncEngineCoreClient": "client",
    "AsyncLLM": "async_llm",
    "AsyncMPClient": "mp_client",
    "ChildProcess": "child_process",
    "EngineCore": "core",
    "EngineCoreClient": "client",
    "EngineCoreProc": "core_proc",
    "EngineInputs": "input_processor",
    "FrontEndSlot": "serial",
    "InprocClient": "client",
    "InputProcessor": "input_processor",
    "LifeLine": "child_process",
    "OutputProcessor": "output_processor",
    "Prompt": "prompts",
    "Bounds": "heartbeat",
    "Pulse": "heartbeat",
    "SyncMPClient": "mp_client",
    "build_config": "config_builder",
    "describe_exit": "child_process",
    "early_engine": "engine_process",
    "make_async_client": "client",
    "make_sync_client": "client",
    "note_socket": "private_folder",
    "remove_noted_socket": "private_folder",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    # Kept. (No sub-module may have the name of something exported: importing it would put the module in its place.)
    globals()[name] = found = getattr(import_module(f"{__name__}.{home}"), name)
    return found
