"""Encryption of what is on SSD: AES-256-GCM with keys of a file, the newest first.

    sealing, 32 bytes of a record's header     id of the key (4) | nonce (12) | tag (16)

The ciphertext lies where the payload would, and is as long. What the header says before the sealing (namespace, key,
shard, generation, length, checksum, maker) is authenticated with it. Nonces are drawn: one key is good for 2^32
records. The keys that encrypt are derived from those of the file, which may be the file of the REMOTE store.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.tiers.disk_port import Buffer
from kvstore.tiers.key_file import read_keys

FIELD = "ssd_key_file"
ID_BYTES, NONCE_BYTES, TAG_BYTES = 4, 12, 16
SEALING_BYTES = ID_BYTES + NONCE_BYTES + TAG_BYTES
OTHER_KEY = "is encrypted with a key that is not here"
NOT_WHOLE = "does not decrypt: it was changed, or written for another record"
PIECE_BYTES = 256 << 10
"""What is encrypted or decrypted at once: other threads of the daemon may wait for this one as long."""


class DiskCipher:
    """Of one directory. Used by several threads; its objects are not shared."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        """Of KEY_BYTES each, the newest first."""
        from cryptography.hazmat.primitives.ciphers.algorithms import AES

        derived = [hashlib.blake2b(key=key, digest_size=32, person=b"kvs.ssd.seal").digest() for key in keys]
        ids = [hashlib.blake2b(key, digest_size=ID_BYTES, person=b"kvs.ssd.key").digest() for key in keys]
        self._algorithms = {
            number: AES(key) for number, key in reversed(list(zip(ids, derived, strict=True)))
        }
        self.newest = ids[0]
        """Id of the key that encrypts."""

    def __repr__(self) -> str:
        return f"DiskCipher({len(self._algorithms)} keys)"

    def __contains__(self, key_id: bytes) -> bool:
        return key_id in self._algorithms

    @classmethod
    def read(cls, path: str) -> DiskCipher:
        """Raises ConfigError."""
        return cls(read_keys(path, field=FIELD))

    def seal(self, payload: npt.NDArray[np.uint8], about: bytes, into: npt.NDArray[np.uint8]) -> bytes:
        """Writes the ciphertext of `payload`, which may change meanwhile, to `into`, as long; returns the sealing."""
        nonce = os.urandom(NONCE_BYTES)
        encryptor = self._context(self.newest, nonce, b"").encryptor()
        encryptor.authenticate_additional_data(about)
        for start in range(0, len(payload), PIECE_BYTES):
            piece = slice(start, start + PIECE_BYTES)
            encryptor.update_into(payload[piece].data, into[piece].data)
        encryptor.finalize()
        return self.newest + nonce + bytes(encryptor.tag)

    def opening(self, sealing: bytes, about: bytes) -> Opening | None:
        """None: it was sealed with another key, or is none."""
        key_id, nonce, tag = sealing[:ID_BYTES], sealing[ID_BYTES:-TAG_BYTES], sealing[-TAG_BYTES:]
        if key_id not in self._algorithms or len(sealing) != SEALING_BYTES:
            return None
        return Opening(self._context(key_id, nonce, tag).decryptor(), about)

    def _context(self, key_id: bytes, nonce: bytes, tag: bytes) -> Any:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.modes import GCM

        return Cipher(self._algorithms[key_id], GCM(nonce, tag or None))

    def seal_text(self, text: bytes, about: bytes) -> bytes:
        """Sealing and ciphertext."""
        into = np.empty(len(text), np.uint8)
        return self.seal(np.frombuffer(text, np.uint8), about, into) + into.tobytes()

    def open_text(self, sealed: bytes, about: bytes) -> bytes | None:
        """None: it was sealed with another key, or changed."""
        opening = self.opening(sealed[:SEALING_BYTES], about)
        text = bytearray(sealed[SEALING_BYTES:])
        if opening is None:
            return None
        opening.decrypt(memoryview(text))
        return bytes(text) if opening.is_whole() else None


class Opening:
    """Of one ciphertext, piece by piece."""

    def __init__(self, decryptor: Any, about: bytes) -> None:
        self._decryptor = decryptor
        decryptor.authenticate_additional_data(about)

    def decrypt(self, data: Buffer) -> None:
        """In place. Nothing of it may be used before `is_whole`."""
        view = memoryview(data)
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            self._decryptor.update_into(piece, piece)

    def is_whole(self) -> bool:
        """Whether all of it was what was sealed; once, at the end."""
        from cryptography.exceptions import InvalidTag

        try:
            self._decryptor.finalize()
        except InvalidTag:
            return False
        return True
