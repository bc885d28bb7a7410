"""What is on SSD opens with its key, under its own header, unchanged; and nobody reads it without."""

from __future__ import annotations

import logging
import mmap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.events import SlabReady
from kvstore.errors import ConfigError, Unavailable
from kvstore.tiers.schema_files import SchemaFiles
from kvstore.types import DiskResult

pytest.importorskip("cryptography")
from kvstore.tiers.encryption import PIECE_BYTES, SEALING_BYTES, DiskCipher

from .test_scrub_io import scrub
from .test_ssd import WAIT_S, Fixture, key_file, keys
from .test_ssd import settings as ssd_settings

OK, CORRUPT, REUSED = DiskResult.OK, DiskResult.CORRUPT, DiskResult.REUSED
OLD, NEW = b"o" * 32, b"n" * 32
SCHEMA = b'<schema name="trip"><module name="city">The secret city is Ys.</module></schema>'


@settings(deadline=None, max_examples=50)
@given(payload=st.binary(max_size=200), at=st.integers(0, 10_000))
def test_it_opens_as_it_was_and_not_if_a_bit_differs(payload: bytes, at: int) -> None:
    cipher = DiskCipher([NEW])
    sealed = cipher.seal_text(payload, b"about")
    assert len(sealed) == len(payload) + SEALING_BYTES
    assert cipher.open_text(sealed, b"about") == payload
    assert cipher.open_text(sealed, b"about it") is None
    changed = bytearray(sealed)
    changed[at % len(sealed)] ^= 1 << at % 8
    assert cipher.open_text(bytes(changed), b"about") is None
    assert cipher.open_text(sealed[: at % len(sealed)], b"about") is None
    assert cipher.seal_text(payload, b"about") != sealed, "a nonce is used twice"


@pytest.mark.parametrize("size", [1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 17])
def test_pieces_make_one_whole(size: int) -> None:
    """Whatever the pieces are in which it is read; and of memory that is mapped, as the arena is."""
    cipher = DiskCipher([NEW])
    payload = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    mapped = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    sealing = cipher.seal(payload, b"", mapped)
    opening = cipher.opening(sealing, b"")
    assert opening is not None
    for start in range(0, size, 5000):
        opening.decrypt(mapped[start : start + 5000].data)
    assert opening.is_whole() and bytes(mapped) == bytes(payload)


@pytest.fixture
def it(tmp_path: Path) -> Fixture:
    it = Fixture(tmp_path, ssd_settings(tmp_path, ssd_key_file=key_file(tmp_path, b"1")))
    it.open()
    assert isinstance(it.create(), SlabReady)
    it.write(*range(4))
    it.commit(*range(4))
    return it


def again_with(it: Fixture, *names: bytes) -> None:
    it.tier.close(WAIT_S)
    it.config = replace(it.config, ssd_key_file=key_file(it.folder, *names) if names else "")
    it.open()


def test_no_byte_of_it_can_be_read_on_disk(it: Fixture) -> None:
    it.tier.close(WAIT_S)
    pieces = [bytes(it.slot(number)[at : at + 16]) for number in range(4) for at in (0, 2048)]
    for path in Path(it.config.ssd_dir).rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        assert not any(piece in data for piece in pieces), path


def test_a_record_opens_in_its_own_place_alone(it: Fixture) -> None:
    """Ciphertext and sealing of another record, under the header that is looked for."""
    first, second = it.slab_file().read_bytes()[4096:], it.slab_file().read_bytes()[4096 + 8192 :]
    it.spoil(0, it.header_bytes, second[it.header_bytes : it.header_bytes + 5000])
    assert it.read(0, 1).results == (CORRUPT, OK)
    it.spoil(0, it.header_bytes, first[it.header_bytes : it.header_bytes + 5000])
    assert it.read(0, 1).results == (OK, OK)
    it.tier.close(WAIT_S)


def test_keys_are_rotated(it: Fixture, caplog: pytest.LogCaptureFixture) -> None:
    again_with(it, b"2", b"1")
    assert it.read(0, 1, 2, 3).results == (OK,) * 4
    it.write(4)
    again_with(it, b"2")
    assert not caplog.records
    answer = it.read(3, 4)
    assert answer.results == (REUSED, OK) and "a key that is not here" in answer.why
    (line,) = caplog.records
    assert (
        "slot 3: its chunk is dropped as evicted: it is encrypted with a key that ssd_key_file"
        in line.getMessage()
    )
    assert scrub(it, 3, 4).results == (REUSED, OK)
    assert len(caplog.records) == 2 and caplog.records[1].getMessage() == line.getMessage()
    assert it.tier.stats().records_corrupt == 0, "an old key that went is no damage"
    it.tier.close(WAIT_S)


@pytest.mark.parametrize("names", [(), (b"2",)])
def test_a_wrong_key_file_costs_nothing(it: Fixture, names: tuple[bytes, ...]) -> None:
    right = it.config
    with pytest.raises(ConfigError, match=r"ssd_key_file.*has not the key [0-9a-f]{8}, with which"):
        again_with(it, *names)
    it.config = right
    snapshot = it.open()
    assert sorted(keys(snapshot)) == [b"key-%d" % number for number in range(4)]
    assert snapshot.boot_count == 2, "who was refused has started nothing"
    assert it.read(0, 1, 2, 3).results == (OK,) * 4
    it.tier.close(WAIT_S)


def test_what_was_plain_stays_readable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    it = Fixture(tmp_path, ssd_settings(tmp_path))
    it.open()
    assert isinstance(it.create(), SlabReady)
    it.write(0)
    it.commit(0)
    with caplog.at_level(logging.WARNING):
        again_with(it, b"1")
    assert "before it was encrypted" in caplog.text
    it.write(1)
    assert it.read(0, 1).results == (OK, OK)
    assert bytes(it.slot(0)) in it.slab_file().read_bytes()
    assert bytes(it.slot(1)) not in it.slab_file().read_bytes()
    it.tier.close(WAIT_S)


def test_schemas_are_encrypted(tmp_path: Path) -> None:
    files = SchemaFiles(str(tmp_path), DiskCipher([OLD]))
    files.load()
    version, _, _ = files.put("alice", SCHEMA, "trip.pml")
    (path,) = (tmp_path / "schemas").iterdir()
    assert b"secret city" not in path.read_bytes()

    def reopened(*keys: bytes) -> SchemaFiles:
        files = SchemaFiles(str(tmp_path), DiskCipher(keys) if keys else None)
        files.load()
        return files

    assert reopened(NEW, OLD).get("alice", "trip") == (version, SCHEMA)
    for others in ((), (NEW,)):
        with pytest.raises(Unavailable, match="encrypted with a key that is not here"):
            reopened(*others).get("alice", "trip")
    new = reopened(NEW)
    new.put("alice", SCHEMA.replace(b"Ys", b"Is"), "trip.pml")
    assert b"Is." in new.get("alice", "trip")[1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(Unavailable, match="damaged"):
        reopened(OLD).get("alice", "trip", version.digest)
    plain = SchemaFiles(str(tmp_path / "other"))
    plain.load()
    plain.put("alice", SCHEMA, "trip.pml")
    encrypted = SchemaFiles(str(tmp_path / "other"), DiskCipher([NEW]))
    encrypted.load()
    assert encrypted.get("alice", "trip")[1] == SCHEMA
