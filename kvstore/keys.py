"""Chunk keys: keyed BLAKE2b chains over tokens, in a canonical encoding. Never an interpreter's `hash()`.

    exact key   = BLAKE2b-256(key=salt, person="kvs.exact.v1", LP(parent) LP(tokens) U32(n) LP(extra_0) .. LP(extra_n))
    derived key = BLAKE2b-256(key=salt, person="kvs.derived.v1", LP(manifest digest) LP(tokens) U32(0))

where `LP(x)` is the length of x as a little-endian u64 followed by x, tokens are little-endian u32 and the first chunk
of a chain has the empty parent. Test vectors: tests/unit/test_keys.py. An *exact* key stands for KV computed with full
attention over exactly its chain, at the chain's positions (invariant 2); whatever attended to anything approximate is
*derived*, for ever.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.arguments import binary, shown, whole, wrong_type
from kvstore.errors import BadRequest
from kvstore.types import ChunkKey

SALT_BYTES = 32
DIGEST_BYTES = 32
ROOT = ChunkKey(b"")
"""Parent of the first chunk of every chain."""

_EXACT = b"kvs.exact.v1"
_TENANT = b"\0ten"
_DERIVED = b"kvs.derived.v1"
_MANIFEST = b"kvs.manifest.v1"

Tokens = Sequence[int] | npt.NDArray[np.integer]


@functools.lru_cache(maxsize=1024)
def tenant_mark(tenant: str) -> bytes:
    """16 bytes that stand for a tenant where makers are named: in what is told of a purge, and in records that leave
    the node, so that a purge of the tenant holds against them as a recall of their maker does."""
    return _TENANT + hashlib.blake2b(tenant.encode(), digest_size=12, person=b"kvs.tenant.v1").digest()


def is_tenant_mark(maker: bytes) -> bool:
    return maker.startswith(_TENANT)


def exact_key(salt: bytes, parent: ChunkKey, tokens: Tokens, extra_keys: Iterable[bytes] = ()) -> ChunkKey:
    """Key of the chunk that holds `tokens` after the chain that ends in `parent`.

    `extra_keys` are whatever else the KV depends on at these tokens (image digests, say), in order.
    """
    extra = tuple(extra_keys)
    for index, part in enumerate(extra):
        binary(f"extra_keys[{index}]", part)
    return _keyed(salt, _EXACT, (binary("parent", parent), encode_tokens(tokens)), extra)


def exact_chain(salt: bytes, tokens: Tokens, chunk_tokens: int, parent: ChunkKey = ROOT) -> list[ChunkKey]:
    """Keys of all *full* chunks of `tokens`, which follow the chain that ends in `parent`."""
    packed = encode_tokens(tokens)
    binary("parent", parent)
    step = 4 * whole("chunk_tokens", chunk_tokens, 1)
    keys: list[ChunkKey] = []
    for start in range(0, len(packed) - step + 1, step):
        parent = _keyed(salt, _EXACT, (parent, packed[start : start + step]), ())
        keys.append(parent)
    return keys


def derived_key(salt: bytes, manifest: bytes, tokens: Tokens) -> ChunkKey:
    """Key of KV computed while attending to the manifest prefix whose digest is `manifest`."""
    return _keyed(salt, _DERIVED, (binary("manifest", manifest), encode_tokens(tokens)), ())


def manifest_digest(entries: Iterable[tuple[bytes, int, int, int, bool]]) -> bytes:
    """Digest of manifest entries (key, first token, count, delta, approximate): what a derived key attended to."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES, person=_MANIFEST)
    for key, first, count, delta, approximate in entries:
        state.update(
            struct.pack("<Q", len(key)) + key + struct.pack("<QQq?", first, count, delta, approximate)
        )
    return state.digest()


def encode_tokens(tokens: Tokens) -> bytes:
    """Token ids as little-endian u32; a negative or huge id is an error, never a wrapped number."""
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # rows of different lengths, a GPU's tensor
        raise wrong_type("tokens", tokens, "one row of integers: token ids") from None
    if array.size == 0 and array.ndim == 1:
        return b""
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BadRequest(
            f"token ids must be one row of integers, not {shown(tokens)}",
            field="tokens",
            value=f"{array.dtype} of shape {array.shape}",
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > 0xFFFF_FFFF:
        raise BadRequest(
            "token ids must fit in 32 bits without sign", field="tokens", value=low if low < 0 else high
        )
    return array.astype("<u4").tobytes()


def _keyed(salt: bytes, person: bytes, parts: tuple[bytes, bytes], extra_keys: tuple[bytes, ...]) -> ChunkKey:
    if len(binary("salt", salt)) != SALT_BYTES:
        raise BadRequest(f"a salt has {SALT_BYTES} bytes", field="salt", value=f"{len(salt)} bytes")
    state = hashlib.blake2b(digest_size=DIGEST_BYTES, key=salt, person=person)
    for part in parts:
        state.update(struct.pack("<Q", len(part)) + part)
    state.update(struct.pack("<I", len(extra_keys)))
    for part in extra_keys:
        state.update(struct.pack("<Q", len(part)) + part)
    return ChunkKey(state.digest())
