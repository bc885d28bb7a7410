"""Chunk keys of prompts: as the store's own clients make them, and as vLLM 0.32 made them."""

from __future__ import annotations

import hashlib
import pickle
import struct
import sys
from typing import Any

import pytest

from kvstore.client.prompts import _cbor, prompt_keys
from kvstore.errors import BadRequest, Unsupported
from kvstore.keys import exact_chain
from kvstore.layout import GroupSpec, NamespaceSpec

SALT = bytes(range(32))
PYTHON = f"python-{sys.version_info[0]}.{sys.version_info[1]}"
SEED = hashlib.sha256(b"vllm-none-hash").hexdigest()[:16]
TOKENS = [7, 300, 70_000, 5_000_000_000 % (1 << 32), 1, 2, 3]


def spec(protocol: str, *, chunk_tokens: int = 2, fingerprint: str = "vllm-0.32.0/x") -> NamespaceSpec:
    return NamespaceSpec("m", b"w", fingerprint, chunk_tokens, (GroupSpec("kv", 64),), hash_protocol=protocol)


def vllm(algorithm: str, python: str = PYTHON, seed: str = SEED) -> str:
    return f"vllm-0.32.0/{algorithm}/{python}/seed-{seed}"


def by_hand(tokens: list[int], step: int, extra: Any = None) -> list[bytes]:
    def digest(what: Any) -> bytes:
        return hashlib.sha256(pickle.dumps(what, protocol=pickle.HIGHEST_PROTOCOL)).digest()

    before, found = digest("vllm-none-hash"), []
    for start in range(0, len(tokens) - step + 1, step):
        before = digest((before, tuple(tokens[start : start + step]), None if found else extra))
        found.append(before)
    return found


def test_our_own_keys() -> None:
    assert prompt_keys(spec("kvs.exact.v1"), SALT, TOKENS) == exact_chain(SALT, TOKENS, 2)
    with pytest.raises(Unsupported, match="cache_salt"):
        prompt_keys(spec("kvs.exact.v1"), SALT, TOKENS, cache_salt="x")


def test_vllms_block_hashes() -> None:
    assert prompt_keys(spec(vllm("sha256")), SALT, TOKENS) == by_hand(TOKENS, 2)
    salted = by_hand(TOKENS, 2, (("cache_salt", "alice"),))
    assert prompt_keys(spec(vllm("sha256")), SALT, TOKENS, cache_salt="alice") == salted
    assert prompt_keys(spec(vllm("sha256")), SALT, [1]) == []


def test_keys_of_the_tier_end_with_the_group_and_may_cover_several_hashes() -> None:
    tier = "vllm-0.32.0/tier/x"
    assert prompt_keys(spec(vllm("sha256"), fingerprint=tier), SALT, TOKENS) == [
        each + bytes(4) for each in by_hand(TOKENS, 2)
    ]
    wide = spec(vllm("sha256") + "/every-2", chunk_tokens=4, fingerprint=tier)
    assert prompt_keys(wide, SALT, TOKENS) == [by_hand(TOKENS, 2)[1] + bytes(4)]


def test_sglangs_pages_are_hashed_with_the_hash_before() -> None:
    """As `make test-sglang` compares with SGLang's own."""
    pages = [struct.pack("<2I", *TOKENS[start : start + 2]) for start in (0, 2)]
    first = hashlib.sha256(pages[0]).digest()
    keys = prompt_keys(spec("sglang.sha256.v1"), SALT, TOKENS[:5])
    assert keys == [first, hashlib.sha256(first + pages[1]).digest()]
    salted = prompt_keys(spec("sglang.sha256.v1"), SALT, TOKENS[:5], cache_salt="a")
    seed = hashlib.sha256(b"sglang-cache-namespace-v1" + bytes([0, 1, 1, *[0] * 7]) + b"a").digest()
    assert salted[0] == hashlib.sha256(seed + pages[0]).digest()
    assert prompt_keys(spec("sglang.sha256.v1"), SALT, TOKENS[:1]) == []


def test_cbor_is_canonical() -> None:
    """Examples of RFC 8949, appendix A."""
    for value, encoded in (
        *((0, "00"), (23, "17"), (24, "1818"), (1000, "1903e8"), (1_000_000, "1a000f4240")),
        *((1_000_000_000_000, "1b000000e8d4a51000"), (None, "f6"), ("IETF", "6449455446")),
        *((b"\1\2\3\4", "4401020304"), ((1, (2, 3)), "8201820203")),
    ):
        assert _cbor(value).hex() == encoded
    with pytest.raises(TypeError):
        _cbor(1.5)
    assert len(prompt_keys(spec(vllm("sha256_cbor")), SALT, TOKENS)) == 3


@pytest.mark.parametrize(
    ("protocol", "field"),
    [
        (vllm("xxhash"), "hash_protocol"),
        (vllm("sha256", "python-2.7"), "hash_protocol"),
        ("sglang", "hash_protocol"),
        (vllm("sha256") + "/every-3", "hash_protocol"),
        (vllm("sha256", seed="0" * 16), "PYTHONHASHSEED"),
    ],
)
def test_what_cannot_be_made_here_is_refused_by_name(protocol: str, field: str) -> None:
    with pytest.raises((Unsupported, BadRequest)) as refused:
        prompt_keys(spec(protocol), SALT, TOKENS)
    assert refused.value.field == field and refused.value.remedy


def test_another_seed_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    seed = hashlib.sha256(b"5").hexdigest()[:16]
    assert prompt_keys(spec(vllm("sha256", seed=seed)), SALT, TOKENS) != by_hand(TOKENS, 2)
