"""Chunk keys: test vectors, what a key depends on, what is refused.

The vectors are the contract with every other implementation (and with what lies on disks): they never change.
"""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys

import numpy as np
import numpy.typing as npt
import pytest

from kvstore import keys
from kvstore.errors import BadRequest
from kvstore.keys import ROOT, derived_key, encode_tokens, exact_chain, exact_key, manifest_digest
from kvstore.types import KEY_BYTES_MAX, ChunkKey

SALT = bytes(range(32))


def test_vectors() -> None:
    first = exact_key(SALT, ROOT, [1, 2, 3, 4])
    assert first.hex() == "b94c46701cac990b3619f06fa4abfa5ac67e94d33ae8925ae08ef38b379b4dbf"
    second = exact_key(SALT, first, [5, 6, 7, 4_294_967_295])
    assert second.hex() == "a4325cb3a3fd98efe06f40e4a617007f8c2bef82e2292e3ac2c601b738409e51"
    assert (
        exact_key(SALT, first, [], ()).hex()
        == "8e3623f71482bcae031229c8da1d4b83506677c9e04cd3b0c2080bc42c425d1d"
    )
    assert (
        exact_key(SALT, ROOT, [1], (b"image 1", b"")).hex()
        == "f7d4d573ee2759141b5b345998e6748c32a09fdd6fa3d57ac8b418146be4e9b9"
    )
    digest = manifest_digest([(first, 0, 4, 0, False), (second, 8, 4, -4, True)])
    assert digest.hex() == "2a3ce3148e3cda04aecbfff57d0e8546f5deb981fec3da78c4d5bd85966ff5dc"
    assert (
        derived_key(SALT, digest, [9]).hex()
        == "4b7610151875f7250d472d734c8f20262464f063bf7b2e22e407c41657dea254"
    )


def test_the_encoding_is_as_documented() -> None:
    """LP(parent) LP(tokens) U32(n) LP(extra) ..., keyed BLAKE2b-256 with a personalisation."""
    parent = ChunkKey(b"p" * 5)
    state = hashlib.blake2b(digest_size=32, key=SALT, person=b"kvs.exact.v1")
    state.update(struct.pack("<Q", 5) + b"p" * 5)
    state.update(struct.pack("<QII", 8, 7, 8))
    state.update(struct.pack("<I", 2))
    state.update(struct.pack("<Q", 1) + b"x" + struct.pack("<Q", 0))
    assert exact_key(SALT, parent, [7, 8], (b"x", b"")) == state.digest()


def test_a_chain_is_its_keys_one_by_one_and_leaves_the_rest_out() -> None:
    tokens = list(range(100, 111))
    chain = exact_chain(SALT, tokens, 4)
    assert len(chain) == 2
    assert chain[0] == exact_key(SALT, ROOT, tokens[:4])
    assert chain[1] == exact_key(SALT, chain[0], tokens[4:8])
    assert exact_chain(SALT, tokens[4:], 4, parent=chain[0]) == chain[1:]
    assert exact_chain(SALT, tokens[:3], 4) == exact_chain(SALT, [], 4) == []
    assert exact_chain(SALT, tokens[:4], 4) == chain[:1]


@pytest.mark.parametrize("kind", [list, tuple, np.array])
@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64, np.uint16])
def test_a_key_does_not_depend_on_how_tokens_are_held(kind: type, dtype: type) -> None:
    tokens: npt.NDArray[np.integer] = np.array([1, 2, 30_000], dtype=dtype)
    held = tokens if kind is np.array else kind(tokens.tolist())
    assert exact_key(SALT, ROOT, held) == exact_key(SALT, ROOT, [1, 2, 30_000])
    assert exact_key(SALT, ROOT, tokens[::-1]) == exact_key(SALT, ROOT, [30_000, 2, 1])
    assert exact_key(SALT, ROOT, tokens.astype(tokens.dtype.newbyteorder(">"))) == exact_key(SALT, ROOT, held)


def test_a_key_depends_on_all_that_it_stands_for() -> None:
    parent = exact_key(SALT, ROOT, [0])
    found = [
        exact_key(SALT, ROOT, [1, 2]),
        exact_key(SALT[::-1], ROOT, [1, 2]),
        exact_key(SALT, parent, [1, 2]),
        exact_key(SALT, ROOT, [2, 1]),
        exact_key(SALT, ROOT, [1]),
        exact_key(SALT, ROOT, [1, 2, 0]),
        exact_key(SALT, ROOT, [1, 2], (b"",)),
        exact_key(SALT, ROOT, [1, 2], (b"", b"")),
        exact_key(SALT, ROOT, [1, 2], (b"ab",)),
        exact_key(SALT, ROOT, [1, 2], (b"a", b"b")),
        derived_key(SALT, b"", [1, 2]),
        derived_key(SALT, parent, [1, 2]),
        exact_key(SALT, ChunkKey(b"\x01\0\0\0"), [2]),
        exact_key(SALT, ChunkKey(b"\x01\0\0\0\x02\0\0\0"), []),
    ]
    assert len(set(found)) == len(found)
    assert all(len(key) == 32 <= KEY_BYTES_MAX for key in found)


def test_a_manifest_digest_depends_on_every_field_of_every_entry() -> None:
    base = (b"k", 0, 4, 0, False)
    others = [
        (b"l", 0, 4, 0, False),
        (b"k", 1, 4, 0, False),
        (b"k", 0, 5, 0, False),
        (b"k", 0, 4, -1, False),
        (b"k", 0, 4, 0, True),
    ]
    found = {manifest_digest([entry]) for entry in (base, *others)}
    found |= {manifest_digest([]), manifest_digest([base, base]), manifest_digest([base, others[0]])}
    assert len(found) == 9
    assert manifest_digest(iter([base])) == manifest_digest([base])


def test_keys_are_the_same_in_another_process_with_another_hash_seed() -> None:
    code = "from kvstore.keys import *; print(exact_key(bytes(range(32)), ROOT, [1, 2, 3, 4], (b'a',)).hex())"
    found = {
        subprocess.run(
            [sys.executable, "-P", "-c", code],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {exact_key(SALT, ROOT, [1, 2, 3, 4], (b"a",)).hex()}


@pytest.mark.parametrize(
    ("tokens", "value"),
    [
        ([-1], "-1"),
        ([1 << 32], "4294967296"),
        ([0, -5, 1 << 40], "-5"),
        ([1 << 70], "object of shape (1,)"),
        ([1.0], "float64 of shape (1,)"),
        ([True], "bool of shape (1,)"),
        ([[1, 2]], "int64 of shape (1, 2)"),
        (np.array([[1, 2]]), "int64 of shape (1, 2)"),
        (["1"], "<U1 of shape (1,)"),
    ],
)
def test_what_is_no_token_is_refused(tokens: object, value: str) -> None:
    with pytest.raises(BadRequest) as error:
        encode_tokens(tokens)  # type: ignore[arg-type]
    assert (error.value.field, error.value.value) == ("tokens", value)


def test_the_largest_and_the_smallest_token_are_tokens() -> None:
    assert encode_tokens([0, 0xFFFF_FFFF]) == bytes(4) + b"\xff" * 4
    assert encode_tokens([]) == encode_tokens(np.array([], dtype=np.int64)) == b""


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_salt_has_32_bytes(length: int) -> None:
    with pytest.raises(BadRequest, match="32 bytes") as error:
        exact_key(bytes(length), ROOT, [1])
    assert (error.value.field, error.value.value) == ("salt", f"{length} bytes")
    with pytest.raises(BadRequest):
        derived_key(bytes(length), b"", [1])
    assert keys.SALT_BYTES == 32
