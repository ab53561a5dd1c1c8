"""One damage to one file, drawn from a seed. The same seed makes the same damage."""

import json
import random
import struct
from collections.abc import Callable
from typing import Any

from tests.fuzz.gguf_numbers import gguf_numbers

__all__ = ["MUTATIONS", "mutate"]

Random = random.Random

_GGUF = "gguf number"

_INTERESTING = [0, 1, 2, 3, 7, 31, 32, 255, 256, 2**15, 2**16 - 1, 2**20, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32]
_INTERESTING += [2**40, 2**48, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
_SIZES = ("<I", "<Q", "<H", "<B")
_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 64, 255, 2**31, 2**53, 2**63 - 1, 2**63, 10**30, -(2**63), 0.5, -0.0, 1e-300),
    *(1e308, float("inf"), float("-inf"), float("nan"), "", " ", "x", "float32", "F16", "I64", "\x00", "é🙂", "\ud800"),
    *("a" * 5000, "../../etc/passwd", "{{ 1/0 }}", "{% for a in range(10**9) %}{% endfor %}", "(a+)+$", "[", [], {}),
    *([[]], [0], [-1], [2**63], [None] * 100, {"": {}}, {"type": "BPE"}, {"content": 5}, ["x"] * 1000),
]


def mutate(data: bytes, name: str, random: Random) -> tuple[str, bytes]:
    """(name of the mutation, the damaged file). ``name`` of the file decides which ones there are for it."""
    kinds = list(_BYTES)
    if name.endswith(".json"):
        kinds += [kind for kind in _JSON for _ in range(4)]
    elif name.endswith(".safetensors"):
        kinds += [kind for kind in _JSON for _ in range(2)]
    elif name.endswith(".gguf"):
        kinds += [_GGUF] * len(kinds)
    while True:
        kind = random.choice(kinds)
        damaged = _mutate(kind, data, name, random)
        if damaged != data:
            return kind, damaged


def _mutate(kind: str, data: bytes, name: str, random: Random) -> bytes:
    if kind in _BYTES:
        return _BYTES[kind](data, random, _header_size(data, name))
    if kind == _GGUF:
        return _gguf_numbers(data, random)
    if name.endswith(".safetensors"):
        length = _header_size(data, name) - 8
        header = _json(kind, data[8 : 8 + length], random)
        return struct.pack("<Q", len(header)) + header + data[8 + length :]
    return _json(kind, data, random)


def _json(kind: str, data: bytes, random: Random) -> bytes:
    for _ in range(random.choice((1, 1, 1, 3))):
        data = _JSON[kind](data, random)
    return data


def _header_size(data: bytes, name: str) -> int:
    """Where the numbers begin that mean nothing to a reader."""
    if name.endswith(".safetensors"):
        return min(len(data), 8 + int(struct.unpack("<Q", data[:8])[0]))
    if name.endswith(".gguf"):
        return min(len(data), 16384)
    return len(data)


def _position(data: bytes, random: Random, header: int) -> int:
    """Mostly in the header."""
    end = header if random.random() < 0.8 else len(data)
    return random.randrange(max(1, end))


def _flip(data: bytes, random: Random, header: int) -> bytes:
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        changed[_position(data, random, header)] ^= 1 << random.randrange(8)
    return bytes(changed)


def _set_bytes(data: bytes, random: Random, header: int) -> bytes:
    changed = bytearray(data)
    start = _position(data, random, header)
    for index in range(start, min(len(data), start + random.choice((1, 4, 16)))):
        changed[index] = random.choice((0, 255, random.randrange(256)))
    return bytes(changed)


def _truncate(data: bytes, random: Random, header: int) -> bytes:
    return data[: _position(data, random, header)]


def _extend(data: bytes, random: Random, header: int) -> bytes:
    return data + random.choice((b"\0" * random.randrange(1, 100), random.randbytes(random.randrange(1, 100)), data))


def _delete(data: bytes, random: Random, header: int) -> bytes:
    start = _position(data, random, header)
    return data[:start] + data[start + random.choice((1, 4, 8, 100, 1000)) :]


def _duplicate(data: bytes, random: Random, header: int) -> bytes:
    start = _position(data, random, header)
    end = start + random.choice((1, 8, 50, 1000))
    return data[:end] + data[start:end] * random.choice((1, 1, 20)) + data[end:]


def _splice(data: bytes, random: Random, header: int) -> bytes:
    """A section over another one."""
    source, target = _position(data, random, header), _position(data, random, header)
    size = random.choice((4, 8, 64, 512))
    piece = data[source : source + size]
    return data[:target] + piece + data[target + len(piece) :]


def _length_field(data: bytes, random: Random, header: int) -> bytes:
    """A number that looks like a length, a count, a type or an offset becomes another one."""
    code = random.choice(_SIZES)
    size = struct.calcsize(code)
    starts = range(max(1, header - size))
    start = 0 if random.random() < 0.1 else random.choice(starts)
    for _ in range(200):
        if size < 4 or 0 < struct.unpack_from("<I", data.ljust(start + 8, b"\0"), start)[0] < 100000:
            break
        start = random.choice(starts)
    old = struct.unpack_from(code, data.ljust(start + size, b"\0"), start)[0]
    new = random.choice((*_INTERESTING, old + 1, old - 1, old * 2, len(data), len(data) - start)) % (1 << 8 * size)
    return data[:start] + struct.pack(code, new) + data[start + size :]


def _gguf_numbers(data: bytes, random: Random) -> bytes:
    """Counts, lengths, types, values, sizes and offsets of the header become other ones."""
    changed = bytearray(data)
    for start, code in random.choices(gguf_numbers(data), k=random.choice((1, 1, 1, 2))):
        old, size = struct.unpack_from(code, data, start)[0], struct.calcsize(code)
        if code in ("<f", "<d"):
            new = random.choice((0.0, -1.0, old * 2, 1e-30, 1e30, float("nan"), float("inf")))
            changed[start : start + size] = struct.pack(code, new)
        else:
            new = random.choice((*_INTERESTING, *range(14), old + 1, old - 1, old * 2, len(data))) % (1 << 8 * size)
            changed[start : start + size] = new.to_bytes(size, "little")
    return bytes(changed)


def _spots(value: Any) -> list[tuple[Any, Any]]:
    """(container, key or index) of everything in it."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        container = waiting.pop()
        for key in list(container) if isinstance(container, dict) else range(len(container)):
            found.append((container, key))
            if isinstance(container[key], dict | list):
                waiting.append(container[key])
    return found


def _of_json(change: Callable[[Any, Random], None]) -> Callable[[bytes, Random], bytes]:
    def mutation(data: bytes, random: Random) -> bytes:
        root = [json.loads(data)]
        change(root, random)
        # A lone surrogate is written as its escape: also a thing to be read.
        return json.dumps(root[0]).encode()

    return mutation


def _pick(root: Any, random: Random) -> tuple[Any, Any]:
    """Of a long list hardly more than of a short one: a vocabulary would take all."""
    spots = _spots(root)
    shallow = [spot for spot in spots if len(spot[0]) < 50]
    return random.choice(shallow if random.random() < 0.8 and shallow else spots)


def _replace_value(root: Any, random: Random) -> None:
    container, key = _pick(root, random)
    container[key] = random.choice(_VALUES)


def _nudge_value(root: Any, random: Random) -> None:
    """A number a little off, a text a little off, a list a little shorter."""
    container, key = _pick(root, random)
    old = container[key]
    if isinstance(old, bool) or old is None:
        container[key] = not old
    elif isinstance(old, int | float):
        container[key] = random.choice((old + 1, old - 1, -old, old * 2, old * 1000, float(old), str(old)))
    elif isinstance(old, str):
        container[key] = random.choice((old[:-1], old + "x", old.upper(), old[::-1], [old]))
    elif isinstance(old, list):
        container[key] = random.choice((old[:-1], old + old, old[::-1], dict(enumerate(map(str, old)))))
    else:
        container[key] = random.choice((list(old), list(old.values()), dict(list(old.items())[:-1]), [old]))


def _remove(root: Any, random: Random) -> None:
    container, key = _pick(root, random)
    del container[key]
    root[:] = root or [{}]


def _rename_key(root: Any, random: Random) -> None:
    spots = [(container, key) for container, key in _spots(root) if isinstance(container, dict)]
    if spots:
        container, key = random.choice(spots)
        container[random.choice((key + "x", key.upper(), "", "content", "type", "id"))] = container.pop(key)


def _exchange(root: Any, random: Random) -> None:
    (one, first), (other, second) = _pick(root, random), _pick(root, random)
    try:
        one[first], other[second] = json.loads(json.dumps(other[second])), json.loads(json.dumps(one[first]))
    except (KeyError, IndexError):
        return


def _nest(root: Any, random: Random) -> None:
    container, key = _pick(root, random)
    for _ in range(random.choice((1, 10, 200))):
        container[key] = random.choice(([container[key]], {"a": container[key]}))


def _repeat_key(data: bytes, random: Random) -> bytes:
    """The beginning of an object stands twice in it."""
    found: dict[str, Any] = json.loads(data)
    if not isinstance(found, dict) or not found:
        return data
    key = random.choice(list(found))
    first = json.dumps({key: random.choice((found[key], *_VALUES[:20]))})
    return (first[:-1] + ", " + json.dumps(found)[1:]).encode()


_BYTES: dict[str, Callable[[bytes, Random, int], bytes]] = {
    "flip": _flip,
    "set bytes": _set_bytes,
    "truncate": _truncate,
    "extend": _extend,
    "delete": _delete,
    "duplicate": _duplicate,
    "splice": _splice,
    "length field": _length_field,
}
_JSON: dict[str, Callable[[bytes, Random], bytes]] = {
    "replace value": _of_json(_replace_value),
    "nudge value": _of_json(_nudge_value),
    "remove": _of_json(_remove),
    "rename key": _of_json(_rename_key),
    "exchange": _of_json(_exchange),
    "nest": _of_json(_nest),
    "repeat key": _repeat_key,
}
MUTATIONS = (*_BYTES, *_JSON, _GGUF)
