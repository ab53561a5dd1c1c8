"""The words of a command line before they are parsed: other ways of writing the same."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

__all__ = ["dashed", "join_dotted"]


def dashed(words: Sequence[str]) -> list[str]:
    """``--max_model_len=8`` as ``--max-model-len=8``: both are in use."""
    done: list[str] = []
    for index, word in enumerate(words):
        if word == "--":
            return [*done, *words[index:]]
        flag, equals, value = word.partition("=")
        name, dot, path = flag.partition(".")
        done.append(name.replace("_", "-") + dot + path + equals + value if word.startswith("--") else word)
    return done


def join_dotted(words: Sequence[str], error: Callable[[str], NoReturn]) -> list[str]:
    """``--hf-overrides.rope_theta 1e6`` as ``--hf-overrides '{"rope_theta": 1e6}'``; several of one flag make one
    object. A name that ends in ``+`` adds to a list."""
    done: list[str] = []
    objects: dict[str, tuple[int, dict[str, Any]]] = {}  # flag → (where its value stands, the value)
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            done += [word, *left]
            break
        name, equals, value = word.partition("=")
        flag, dot, path = name.partition(".")
        if not word.startswith("--") or not dot:
            done.append(word)
            continue
        if not equals:
            if not left:
                error(f"argument {name}: expected one argument")
            value = left.pop(0)
        if flag not in objects:
            objects[flag] = len(done) + 1, {}
            done += [flag, ""]
        if not _put(objects[flag][1], path.split("."), _read(value)):
            error(f"argument {name}: its name is no path in {flag}, or contradicts another one")
    for flag, (index, found) in objects.items():
        if any(word.partition("=")[0] == flag for word in done[: index - 1] + done[index:]):
            error(f"argument {flag}: given both whole and in parts")
        done[index] = json.dumps(found)
    return done


def _put(target: dict[str, Any], path: list[str], value: Any) -> bool:
    """Whether the value could be put there."""
    *parents, last = path
    for name in parents:
        target = target.setdefault(name, {})
        if not isinstance(target, dict):
            return False
    if not all(path):
        return False
    if not last.endswith("+"):
        fresh = last not in target
        target[last] = value
        return fresh
    entries = target.setdefault(last.removesuffix("+"), [])
    if isinstance(entries, list):
        entries.append(value)
    return isinstance(entries, list)


def _read(text: str) -> Any:
    """As JSON, where it is JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
