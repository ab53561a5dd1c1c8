"""The emulator of AMX instructions against numpy's arithmetic, as the Intel SDM defines each instruction. On a machine
with AMX the same tests ask the machine."""

import ctypes
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels import amx

Array = NDArray[Any]


def config(*shapes: tuple[int, int, int], start_row: int = 0) -> Array:
    """(tile, rows, bytes of a row), …"""
    found = np.zeros(64, np.uint8)
    found[0], found[1] = 1, start_row
    for tile, rows, row_bytes in shapes:
        found[16 + 2 * tile], found[48 + tile] = row_bytes, rows
    return found


def pointer(array: Array, offset: int = 0) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data + offset)


def call(name: str, *arguments: Array | int) -> int:
    given = [pointer(value) if isinstance(value, np.ndarray) else ctypes.c_int64(value) for value in arguments]
    found: int = getattr(amx.instructions(), name)(*given)
    return found


def random_bytes(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def flushed(x: Array) -> Array:
    return np.where(np.abs(x) < 2.0**-126, np.copysign(0.0, x), x)


def rounded(exact: Array, rest: Array) -> Array:
    """``exact + rest``, a float64 and what it lacks, rounded to float32 once, to nearest even; tiny is zero."""
    # Rounded to odd first: a float64 that is not the whole sum gets a last bit that says so.
    bits = exact.view(np.int64)
    up = (rest > 0) == (exact > 0)
    odd = np.where((rest != 0) & (bits % 2 == 0) & np.isfinite(exact), bits + np.where(up, 1, -1), bits).view(
        np.float64
    )
    tiny = np.abs((odd * 2.0**30).astype(np.float32)) < np.float32(2.0**-96)
    return np.where(tiny, np.copysign(0.0, odd), odd).astype(np.float32).astype(np.float64)


def added(a: Array, b: Array) -> Array:
    total = a + b
    part = total - a
    return rounded(total, (a - (total - part)) + (b - part))


def wide(x: Array) -> Array:
    """bfloat16 → float64, denormals as zero."""
    return flushed((x.astype(np.uint32) << 16).view(np.float32).astype(np.float64))


def dot_bf16(a: Array, b: Array, c: Array) -> Array:
    """a: [m, 2k] and b: [k, 2n] bfloat16; c: [m, n] float32. Products of bfloat16 are exact in float64."""
    left, right = wide(a), wide(b)
    chains = []
    for odd in (0, 1):
        chain = np.zeros((len(a), b.shape[1] // 2))
        for k in range(len(b)):
            chain = added(np.outer(left[:, 2 * k + odd], right[k, odd::2]), chain)
        chains.append(chain)
    return added(flushed(c.astype(np.float64)), added(*chains)).astype(np.float32)


def product(name: str, a: Array, b: Array, c: Array) -> Array:
    """Tiles are given and kept in whole kilobytes; what is outside of the configured shapes must stay as it is."""
    m, n, k = len(c), c.shape[1], len(b)
    blocks = [np.full((16, 64), 0xA5, np.uint8) for _ in range(3)]
    for block, matrix in zip(blocks, (a, b, c), strict=True):
        raw = np.ascontiguousarray(matrix).view(np.uint8)
        block[: raw.shape[0], : raw.shape[1]] = raw
    call(name, config((1, m, 4 * n), (2, m, 4 * k), (7, k, 4 * n)), *blocks)
    found = blocks[2]
    assert (found[m:] == 0xA5).all()
    assert (found[:, 4 * n :] == 0xA5).all()
    return np.ascontiguousarray(found[:m, : 4 * n]).view(c.dtype)


SHAPES = [(16, 16, 16), (1, 16, 16), (7, 5, 3), (16, 1, 16), (3, 16, 1)]


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
@pytest.mark.parametrize("kind", ["small", "any"])
def test_tdpbf16ps(m: int, n: int, k: int, kind: str) -> None:
    random = np.random.default_rng(m + n + k)
    if kind == "small":
        a, b = (
            (random.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
            for shape in ((m, 2 * k), (k, 2 * n))
        )
        c = random.standard_normal((m, n)).astype(np.float32)
    else:  # every exponent: denormals, infinities, numbers that are none, results that overflow
        a, b = (random.integers(0, 1 << 16, shape, dtype=np.uint16) for shape in ((m, 2 * k), (k, 2 * n)))
        c = random.integers(0, 1 << 32, (m, n), dtype=np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        expected = dot_bf16(a, b, c)
    found = product("tdpbf16ps", a, b, c)
    number = ~np.isnan(expected)
    assert (np.isnan(found) == ~number).all()
    assert (found.view(np.uint32)[number] == expected.view(np.uint32)[number]).all()


def test_tdpbf16ps_flushes_denormals() -> None:
    def bf16(value: float) -> int:
        return int(np.float32(value).view(np.uint32)) >> 16

    a, b = np.zeros((1, 2), np.uint16), np.zeros((1, 2), np.uint16)
    c = np.array([[2.0**-130]], np.float32)
    assert product("tdpbf16ps", a, b, c)[0, 0] == 0  # what was there
    a[0, 0], b[0, 0] = bf16(2.0**-70), bf16(2.0**-60)
    assert product("tdpbf16ps", a, b, np.zeros((1, 1), np.float32))[0, 0] == 0  # a result
    a[0, 0], b[0, 0] = bf16(2.0**-130), bf16(2.0**100)
    assert product("tdpbf16ps", a, b, np.zeros((1, 1), np.float32))[0, 0] == 0  # a factor
    b[0, 1], a[0, 1] = bf16(2.0**-100), bf16(2.0**-20)
    assert product("tdpbf16ps", a, b, np.zeros((1, 1), np.float32))[0, 0] == np.float32(2.0**-120)


def test_control_the_order_of_the_sum_shows() -> None:
    """Pair by pair into one sum, as one might think, gives other bits than the two chains of the definition."""
    random = np.random.default_rng(0)
    a, b = (
        (random.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        for shape in ((16, 32), (16, 32))
    )
    c = random.standard_normal((16, 16)).astype(np.float32)
    one = c.astype(np.float64)
    for k in range(16):
        for odd in (0, 1):
            one = added(np.outer(wide(a)[:, 2 * k + odd], wide(b)[k, odd::2]), one)
    assert (one.astype(np.float32) != product("tdpbf16ps", a, b, c)).any()
    assert (dot_bf16(a, b, c) == product("tdpbf16ps", a, b, c)).all()


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
@pytest.mark.parametrize(
    ("name", "left", "right"),
    [("tdpbssd", np.int8, np.int8), ("tdpbsud", np.int8, np.uint8), ("tdpbusd", np.uint8, np.int8),
     ("tdpbuud", np.uint8, np.uint8)],
)  # fmt: skip
def test_products_of_bytes(m: int, n: int, k: int, name: str, left: type, right: type) -> None:
    a, b = random_bytes(m, 4 * k), random_bytes(k, 4 * n, seed=1)
    c = random_bytes(m, 4 * n, seed=2).view(np.int32)  # sums wrap
    columns = b.view(right).astype(np.int64).reshape(k, n, 4).transpose(0, 2, 1).reshape(4 * k, n)
    expected = (c + a.view(left).astype(np.int64) @ columns).astype(np.uint64).astype(np.uint32).view(np.int32)
    assert (product(name, a, b, c) == expected).all()


@pytest.mark.parametrize(("rows", "row_bytes"), [(16, 64), (1, 64), (5, 12), (16, 4)])
@pytest.mark.parametrize("stride", [64, 96, 1152, -64])
def test_loads_and_stores_at_every_form_of_address(rows: int, row_bytes: int, stride: int) -> None:
    memory = random_bytes(20 * 1152)
    start = len(memory) - 1152 if stride < 0 else 0
    out = np.zeros((16, 16, 64), np.uint8)
    layout = config((3, rows, row_bytes))
    given = [pointer(layout), pointer(memory, start), ctypes.c_int64(stride), pointer(out)]
    forms = amx.instructions().address_forms(*given)
    assert forms == 11
    expected, repeated = np.zeros((16, 64), np.uint8), np.zeros((16, 64), np.uint8)
    for row in range(rows):
        expected[row, :row_bytes] = memory[start + row * stride :][:row_bytes]
        repeated[row, :row_bytes] = memory[start:][:row_bytes]
    assert (out[:9] == expected).all()
    assert (out[9] == repeated).all()  # without an index
    assert (out[10] == repeated).all()  # the same tile, stored in another form
    assert not out[11:].any()


def test_a_configuration_is_read_back_until_it_is_released() -> None:
    layout, out = config((0, 16, 64), (3, 5, 12), (7, 1, 4), start_row=0), np.full((3, 64), 255, np.uint8)
    call("configure", layout, out)
    assert (out[0] == layout).all()
    assert (out[1] == layout).all()
    assert not out[2].any()


def test_a_tile_is_cleared() -> None:
    out = np.full((16, 64), 255, np.uint8)
    call("zero", config((5, 16, 64)), random_bytes(16, 64), out)
    assert not out.any()


GOOD = config((1, 16, 64), (2, 16, 64), (7, 16, 64))
RESERVED = GOOD.copy()
RESERVED[9] = 1


# Calls each function that it is given, with its layout, in a process of its own, which begins where this one has got
# to: what all of them need is imported once. Says how each has ended, and what it has said.
ENDINGS = """
import ctypes, json, os, sys, tempfile
from tests.kernels import amx
library = amx.instructions()
for name, layout in zip(sys.argv[1::2], sys.argv[2::2]):
    with tempfile.TemporaryFile() as said:
        pid = os.fork()
        if pid == 0:
            os.dup2(said.fileno(), 2)
            getattr(library, name)(bytes.fromhex(layout))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        said.seek(0)
        print(json.dumps([os.waitstatus_to_exitcode(status), said.read().decode()]))
"""
REFUSALS = [
    ("product_of_a_tile_with_itself", GOOD, "a product of a tile with itself"),
    ("product_without_a_configuration", GOOD, "no tiles are configured"),
    ("product", config((1, 16, 64), (2, 16, 64)), "a tile that is not configured"),
    ("product", config((1, 15, 64), (2, 16, 64), (7, 16, 64)), "as many rows as the left factor"),
    ("product", config((1, 16, 60), (2, 16, 64), (7, 16, 64)), "as many columns as the right factor"),
    ("product", config((1, 16, 64), (2, 16, 60), (7, 16, 64)), "are not the right factor's rows"),
    ("product", config((1, 16, 64), (2, 16, 64), (7, 17, 64)), "larger than the palette has"),
    ("product", config((1, 16, 68), (2, 16, 64), (7, 16, 64)), "larger than the palette has"),
    ("product", config((1, 16, 0), (2, 16, 64), (7, 16, 64)), "rows or columns alone"),
    ("product", RESERVED, "reserved bytes"),
    ("product", GOOD, ""),
    ("undefined_instruction", GOOD, None),
]


@pytest.fixture(scope="module")
def endings() -> list[tuple[int, str]]:
    """The exit code of each of REFUSALS, and what it said."""
    words = [word for name, layout, _ in REFUSALS for word in (name, layout.tobytes().hex())]
    command = [sys.executable, "-c", ENDINGS, *words]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=amx.HERE.parents[2], check=True)
    return [tuple(json.loads(line)) for line in run.stdout.splitlines()]


@pytest.mark.parametrize("index", range(len(REFUSALS)), ids=[f"{name}-{why}" for name, _, why in REFUSALS])
def test_what_the_processor_refuses_ends_the_process(endings: list[tuple[int, str]], index: int) -> None:
    _, _, why = REFUSALS[index]
    code, said = endings[index]
    assert (code == 0) == (why == "")
    if why is not None and not amx.native():
        assert why in said
