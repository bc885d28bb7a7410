"""Encryption of what is in the REMOTE store: AES-256-GCM with keys of a file, the newest first.

    sealed payload    id of the key (4) | nonce (12) | ciphertext | tag (16)

The first key of the file seals, all of them open: a new first line is a rotation, and an old line may go when the
records that it sealed have expired. All that the header says, but the time, is authenticated with the payload: under
another record's header, or under one that claims to be newer than a forget, it does not open. Nonces are drawn: one key
is good for 2^32 records.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence

from kvstore.tiers.disk_port import Buffer
from kvstore.tiers.key_file import read_keys
from kvstore.tiers.remote.records import Description

ID_BYTES, NONCE_BYTES, TAG_BYTES = 4, 12, 16
OVERHEAD = ID_BYTES + NONCE_BYTES + TAG_BYTES
_ABOUT = struct.Struct("<32sIIIQQQ?BB")


class Cipher:
    def __init__(self, keys: Sequence[bytes]) -> None:
        """Of KEY_BYTES each, the newest first."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._by_id = {_id(key): AESGCM(key) for key in reversed(keys)}
        self._newest = _id(keys[0])

    def __repr__(self) -> str:
        return f"Cipher({len(self._by_id)} keys)"

    @classmethod
    def read(cls, path: str) -> Cipher:
        """Raises ConfigError."""
        return cls(read_keys(path, field="remote_key_file"))

    def seal(self, payload: Buffer, about: Description) -> bytes:
        """Lets go of the interpreter's lock, as `open` does."""
        nonce = os.urandom(NONCE_BYTES)
        sealed: bytes = self._by_id[self._newest].encrypt(nonce, payload, _about(about))
        return self._newest + nonce + sealed

    def open(self, sealed: memoryview, about: Description) -> bytes | None:
        """The payload; None: it was not sealed with a key of ours, or for another record, or it was changed."""
        from cryptography.exceptions import InvalidTag

        cipher = self._by_id.get(bytes(sealed[:ID_BYTES]))
        if cipher is None or len(sealed) < OVERHEAD:
            return None
        nonce = bytes(sealed[ID_BYTES : ID_BYTES + NONCE_BYTES])
        try:
            opened: bytes = cipher.decrypt(nonce, sealed[ID_BYTES + NONCE_BYTES :], _about(about))
        except InvalidTag:
            return None
        return opened

    def has_key_of(self, sealed: memoryview) -> bool:
        return bytes(sealed[:ID_BYTES]) in self._by_id


def _id(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=ID_BYTES, person=b"kvs.remote.key").digest()


def _about(d: Description) -> bytes:
    fixed = _ABOUT.pack(
        d.namespace,
        d.shard,
        d.shards,
        d.token_count,
        d.length,
        d.checksum,
        d.generation,
        d.derived,
        len(d.makers),
        len(d.key),
    )
    return fixed + d.key + b"".join(d.makers)
