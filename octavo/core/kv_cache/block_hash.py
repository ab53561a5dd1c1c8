"""Names for the content of KV blocks: a keyed BLAKE2b chain over tokens and whatever else decides a block's KV.

The key holds a fingerprint of the weights, the kernel set and the KV cache's data type, so that hashes of different KV
never meet. Every part is written with its length: no two different inputs have the same encoding.
"""

import struct
from collections.abc import Iterable, Sequence
from hashlib import blake2b

__all__ = ["hash_block", "hash_extra_keys", "hash_root_key"]

_DIGEST_BYTES = 32


def _encode(texts: Iterable[str]) -> bytes:
    parts = []
    for text in texts:
        data = text.encode()
        parts.append(struct.pack("<I", len(data)) + data)
    return b"".join(parts)


def hash_root_key(fingerprint: str, kernel_set: str, kv_cache_dtype: str) -> bytes:
    """The key of all hash chains of one model on one kernel set, with a KV cache of one data type."""
    return blake2b(_encode((fingerprint, kernel_set, kv_cache_dtype)), digest_size=_DIGEST_BYTES).digest()


def hash_extra_keys(cache_salt: str | None) -> bytes:
    """What keeps requests' blocks apart although their tokens are the same."""
    return b"" if cache_salt is None else _encode(("cache_salt", cache_salt))


def hash_block(parent: bytes, token_ids: Sequence[int], extra_keys: bytes, root_key: bytes) -> bytes:
    """Hash of a full block.

    Args:
        parent: hash of the block before it; empty for the first.
        token_ids: the block's tokens, each below 2**32.
        extra_keys: from ``hash_extra_keys``.
        root_key: from ``hash_root_key``.
    """
    count = len(token_ids)
    data = struct.pack(f"<II{count}I", len(parent), count, *token_ids) + parent + extra_keys
    return blake2b(data, key=root_key, digest_size=_DIGEST_BYTES).digest()
