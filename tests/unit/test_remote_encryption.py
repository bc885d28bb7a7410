"""What is sealed opens with its key, under its own header, unchanged; and never otherwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.config import StoreConfig
from kvstore.errors import ConfigError
from kvstore.tiers.remote.records import Description
from kvstore.types import ChunkKey

pytest.importorskip("cryptography")
from kvstore.tiers.remote.encryption import OVERHEAD, Cipher
from kvstore.tiers.remote.opening import read_salt

OLD, NEW = b"o" * 32, b"n" * 32
WHAT = Description(b"n" * 32, ChunkKey(b"k"), 1, 2, 64, False, (b"m" * 16,), 5, 7, 3, 0, True)


@settings(deadline=None, max_examples=50)
@given(payload=st.binary(max_size=200), at=st.integers(0, 10_000))
def test_it_opens_as_it_was_and_not_if_a_bit_differs(payload: bytes, at: int) -> None:
    cipher = Cipher([NEW])
    sealed = cipher.seal(payload, WHAT)
    assert len(sealed) == len(payload) + OVERHEAD
    assert cipher.open(memoryview(sealed), WHAT) == payload
    changed = bytearray(sealed)
    changed[at % len(sealed)] ^= 1 << at % 8
    assert cipher.open(memoryview(changed), WHAT) is None
    assert cipher.open(memoryview(sealed)[: at % len(sealed)], WHAT) is None


@pytest.mark.parametrize(
    "other",
    [
        replace(WHAT, namespace=b"x" * 32),
        replace(WHAT, key=ChunkKey(b"other")),
        replace(WHAT, shard=0),
        replace(WHAT, shards=3),
        replace(WHAT, token_count=63),
        replace(WHAT, derived=True),
        replace(WHAT, makers=()),
        replace(WHAT, length=6),
        replace(WHAT, checksum=8),
        replace(WHAT, generation=4),
    ],
)
def test_it_does_not_open_under_another_header(other: Description) -> None:
    cipher = Cipher([NEW])
    assert cipher.open(memoryview(cipher.seal(b"bytes", WHAT)), other) is None


def test_keys_are_rotated() -> None:
    before = Cipher([OLD]).seal(b"bytes", WHAT)
    both = Cipher([NEW, OLD])
    assert both.open(memoryview(before), WHAT) == b"bytes"
    after = both.seal(b"bytes", WHAT)
    assert Cipher([NEW]).open(memoryview(after), WHAT) == b"bytes"
    assert Cipher([OLD]).open(memoryview(after), WHAT) is None
    assert not Cipher([NEW]).has_key_of(memoryview(before))
    assert both.seal(b"bytes", WHAT) != after, "a nonce is used twice"


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("", 0o600, "must hold 1 to 16 keys of 64 hexadecimal digits"),
        ("11" * 31, 0o600, "must hold 1 to 16 keys"),
        ("xx" * 32, 0o600, "must hold 1 to 16 keys"),
        ("11" * 32, 0o644, "can be read by other users"),
        ("11" * 32, 0o620, "can be read by other users"),
    ],
)
def test_a_key_file_that_is_none_is_refused(tmp_path: Path, text: str, mode: int, why: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=why):
        Cipher.read(str(path))
    with pytest.raises(ConfigError, match="remote_key_file"):
        Cipher.read(str(tmp_path / "absent"))


def test_secrets_that_kubernetes_mounts_are_read(tmp_path: Path) -> None:
    """With an fsGroup the group of a pod can read them, whatever mode is asked for."""
    for name in ("key", "salt"):
        (tmp_path / name).write_text("11" * 32)
        (tmp_path / name).chmod(0o440)
    Cipher.read(str(tmp_path / "key"))
    config = StoreConfig(remote_salt_file=str(tmp_path / "salt"))
    assert read_salt(config) == b"11" * 32
    (tmp_path / "salt").chmod(0o444)
    with pytest.raises(ConfigError, match="can be read by other users"):
        read_salt(config)
