"""Block hashes: a chain that differs whenever the content, what came before it or what it depends on differs."""

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core import Request
from octavo.core.kv_cache import hash_block, hash_extra_keys, hash_root_key
from octavo.types import EngineCoreRequest
from tests.core.harness import make_request

KEY = hash_root_key("weights", "torch", "float32")
PINNED = "36b4bbae8b8d8921d82b4cf188c591e547d820422fdb1edf42f4a3a21407ad1e"
NO_SALT = hash_extra_keys(None)
tokens = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6)
salts = st.none() | st.text("ab.:", min_size=1, max_size=4)


def hashed(request: EngineCoreRequest, block_size: int = 4, key: bytes = KEY) -> Request:
    result = Request(request, 1000, block_size, key, 0)
    result.extend_block_hashes()
    return result


@settings(max_examples=200, deadline=None)
@given(a=st.tuples(tokens, salts), b=st.tuples(tokens, salts))
def test_equal_content_and_only_equal_content_has_equal_hashes(
    a: tuple[list[int], str | None], b: tuple[list[int], str | None]
) -> None:
    hashes = [hash_block(b"", ids, hash_extra_keys(salt), KEY) for ids, salt in (a, b)]
    assert (hashes[0] == hashes[1]) == (a == b)


def test_a_hash_holds_everything_before_the_block() -> None:
    same = [1, 2, 3, 4]
    first, second = hash_block(b"", [5] * 4, NO_SALT, KEY), hash_block(b"", [6] * 4, NO_SALT, KEY)
    assert hash_block(first, same, NO_SALT, KEY) != hash_block(second, same, NO_SALT, KEY)
    assert hash_block(first, same, NO_SALT, KEY) != hash_block(b"", same, NO_SALT, KEY)
    assert hash_block(first, same, NO_SALT, KEY) == hash_block(first, list(same), NO_SALT, KEY)


def test_what_is_a_token_and_what_is_a_salt_cannot_be_confused() -> None:
    """The bytes of the second block's token are those of the salt: only the lengths tell them apart."""
    salt = hash_extra_keys("abcd")
    as_tokens = [int.from_bytes(salt[start : start + 4], "little") for start in range(0, len(salt) // 4 * 4, 4)]
    assert hash_block(b"", [1], salt, KEY) != hash_block(b"", [1, *as_tokens], salt[len(as_tokens) * 4 :], KEY)
    parent = hash_block(b"", [1], NO_SALT, KEY)
    moved = [int.from_bytes(parent[:4], "little")]
    assert hash_block(parent, [1], NO_SALT, KEY) != hash_block(parent[4:], [1, *moved], NO_SALT, KEY)


def test_weights_kernel_set_and_data_type_are_the_root_of_every_chain() -> None:
    roots = [("weights", "torch", "int8"), ("weightst", "orch", "int8"), ("weights", "native", "int8")]
    keys = {hash_root_key(*root) for root in [*roots, ("weights", "torch", "fp8")]}
    assert len(keys) == 4
    assert len({hash_block(b"", [1, 2], NO_SALT, key) for key in keys}) == 4


def test_the_hash_does_not_depend_on_the_process() -> None:
    """A value that was computed once and must never change: caches may outlive processes."""
    key = hash_root_key("weights", "torch", "bfloat16")
    assert hash_block(b"", [1, 2, 3, 4], hash_extra_keys("salt"), key).hex() == PINNED


def test_a_request_hashes_full_blocks_only_and_goes_on_where_it_stopped() -> None:
    request = hashed(make_request("a", range(9), max_tokens=20))
    assert len(request.block_hashes) == 2
    before = list(request.block_hashes)
    request.append_tokens([9, 10, 11])
    request.extend_block_hashes()
    assert request.block_hashes[:2] == before
    assert request.block_hashes == hashed(make_request("b", range(12))).block_hashes


def test_requests_share_hashes_up_to_where_they_differ() -> None:
    plain = hashed(make_request("a", [1] * 12))
    other = hashed(make_request("b", [1] * 6 + [2] + [1] * 5))
    salted = hashed(make_request("c", [1] * 12, cache_salt="s"))
    assert plain.block_hashes[0] == other.block_hashes[0]
    assert not set(plain.block_hashes[1:]) & set(other.block_hashes[1:])
    assert not set(plain.block_hashes) & set(salted.block_hashes)
    assert salted.block_hashes == hashed(make_request("d", [1] * 12, cache_salt="s")).block_hashes
