"""Keys of a prompt from its token ids, as whoever stores its KV makes them: a scheduler or gateway that knows what will
be asked needs no hashing of its own.

    hash_protocol of the namespace            key of a chunk
    kvs.exact.v1                              `keys.exact_chain`, keyed with the namespace's salt
    vllm-V/ALGORITHM/python-3.N/seed-DIGEST   vLLM's block hash: ALGORITHM over (hash before, token ids, extra keys),
                                              pickled, or encoded as CBOR; the first follows the hash of a seed
        its tier below host memory            the same at the end of each chunk, then the number of the group (0)
    sglang.sha256.v1                          SGLang's page hash: SHA-256 over (hash before, token ids)

Adapters, images and embeddings are in vLLM's hash too, and in no prompt of tokens alone: such requests are hinted by
their sessions or keys.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvstore.errors import BadRequest, Unsupported
from kvstore.keys import ROOT, Tokens, encode_tokens, exact_chain
from kvstore.layout import NamespaceSpec
from kvstore.types import ChunkKey

EXACT = "kvs.exact.v1"
VLLM_SEED = "vllm-none-hash"
"""What vLLM begins its chains with where PYTHONHASHSEED is not set."""
TIER_MARK = "/tier/"
EVERY = "every-"
SGLANG = "sglang.sha256.v1"


def prompt_keys(spec: NamespaceSpec, salt: bytes, tokens: Tokens, *, cache_salt: str = "") -> list[ChunkKey]:
    """Of all full chunks of a prompt. `salt`: the namespace's; `cache_salt`: the request's, as engines call it.

    Raises Unsupported for a protocol that is not known here, or whose hashes another Python would make otherwise.
    """
    protocol = spec.hash_protocol
    if protocol == EXACT:
        if cache_salt:
            raise Unsupported("is vLLM's and SGLang's alone", field="cache_salt", value=cache_salt)
        return exact_chain(salt, tokens, spec.chunk_tokens, ROOT)
    if protocol == SGLANG:
        return _sglang(tokens, spec.chunk_tokens, cache_salt)
    if not protocol.startswith("vllm-"):
        raise _unknown(protocol, "its owner's hashes are not known here")
    hash_block, step = _vllm(protocol, spec.chunk_tokens)
    ids = np.frombuffer(encode_tokens(tokens), "<u4").tolist()
    hashes = _chain(hash_block, protocol, ids, step, cache_salt)
    if TIER_MARK not in spec.layout_fingerprint:
        return [ChunkKey(each) for each in hashes]
    every = spec.chunk_tokens // step
    return [ChunkKey(each + bytes(4)) for each in hashes[every - 1 :: every]]


def _sglang(tokens: Tokens, page: int, cache_salt: str) -> list[ChunkKey]:
    encoded = encode_tokens(tokens)
    before = b""
    if cache_salt:  # behind the byte that says that no extra key is given
        salt = cache_salt.encode()
        seed = b"sglang-cache-namespace-v1\x00\x01" + len(salt).to_bytes(8, "little") + salt
        before = hashlib.sha256(seed).digest()
    keys = []
    for start in range(0, len(encoded) - 4 * page + 1, 4 * page):
        before = hashlib.sha256(before + encoded[start : start + 4 * page]).digest()
        keys.append(ChunkKey(before))
    return keys


def _vllm(protocol: str, chunk_tokens: int) -> tuple[Callable[[Any], bytes], int]:
    """vLLM's hash function, and the tokens that one hash covers."""
    parts = protocol.split("/")
    python = f"python-{sys.version_info[0]}.{sys.version_info[1]}"
    every = next((part for part in parts if part.startswith(EVERY)), f"{EVERY}{chunk_tokens}")
    step = every.removeprefix(EVERY)
    if not step.isdigit() or not 0 < int(step) <= chunk_tokens or chunk_tokens % int(step):
        raise _unknown(protocol, f"chunks of {chunk_tokens} tokens have no whole number of hashes")
    if "sha256_cbor" in parts:
        return lambda what: hashlib.sha256(_cbor(what)).digest(), int(step)
    if "sha256" not in parts:
        raise _unknown(protocol, "only sha256 and sha256_cbor are known here")
    if python not in parts:
        raise _unknown(protocol, f"this is {python}, which may pickle otherwise")
    return lambda what: hashlib.sha256(pickle.dumps(what, pickle.HIGHEST_PROTOCOL)).digest(), int(step)


def _chain(
    hash_block: Callable[[Any], bytes], protocol: str, ids: Sequence[int], step: int, cache_salt: str
) -> list[bytes]:
    before = hash_block(_seed(protocol))
    hashes = []
    extra: Any = (("cache_salt", cache_salt),) if cache_salt else None
    for start in range(0, len(ids) - step + 1, step):
        before = hash_block((before, tuple(ids[start : start + step]), extra))
        hashes.append(before)
        extra = None
    return hashes


def _seed(protocol: str) -> str:
    wanted = protocol.rpartition("/seed-")[2].partition("/")[0]
    for seed in (VLLM_SEED, os.environ.get("PYTHONHASHSEED", "")):
        if hashlib.sha256(seed.encode()).hexdigest()[:16] == wanted:
            return seed
    raise BadRequest(
        "the engine hashes with another seed",
        field="PYTHONHASHSEED",
        value=os.environ.get("PYTHONHASHSEED"),
        remedy="set PYTHONHASHSEED to what vLLM was started with",
    )


def _unknown(protocol: str, why: str) -> Unsupported:
    return Unsupported(why, field="hash_protocol", value=protocol, remedy="hint by session, or by chunk keys")


def _cbor(what: Any) -> bytes:
    """The canonical encoding (RFC 8949, section 4.2) of what block hashes are made of."""
    match what:
        case None:
            return b"\xf6"
        case int():
            return _head(0, what)
        case bytes():
            return _head(2, len(what)) + what
        case str():
            return _head(3, len(what.encode())) + what.encode()
        case tuple():
            return _head(4, len(what)) + b"".join(map(_cbor, what))
    raise TypeError(type(what))


def _head(major: int, value: int) -> bytes:
    if value < 24:
        return bytes([major << 5 | value])
    size = next(size for size in range(4) if value < 1 << (8 << size))
    return bytes([major << 5 | 24 + size]) + value.to_bytes(1 << size, "big")
