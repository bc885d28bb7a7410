"""What all nodes of one fleet share: a secret, from which every key that the fleet needs is derived.

It separates fleets: with another secret the registry's names, its hashes and its pages are others, and a peer's proof
fails. It is never sent and never logged.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat

from kvstore.errors import ConfigError
from kvstore.types import ChunkKey

SECRET_BYTES_MIN = 16
SECRET_BYTES_MAX = 4_096
HASH_BYTES = 8
TAG_BYTES = 16


class FleetSecret:
    def __init__(self, secret: bytes) -> None:
        """`secret`: as `openssl rand -hex 32` prints it, say."""
        root = hashlib.blake2b(secret, digest_size=32, person=b"kvs.fleet.v1").digest()
        self.prefix = self._derive(root, b"prefix").hex()[:16]
        """Of every name in the registry."""
        self._hashes = self._derive(root, b"hashes")
        self._namespaces = self._derive(root, b"namespaces")
        self._pages = self._derive(root, b"pages")
        self._proofs = self._derive(root, b"proofs")

    @staticmethod
    def _derive(root: bytes, what: bytes) -> bytes:
        return hashlib.blake2b(what, key=root, digest_size=32, person=b"kvs.fleet.key").digest()

    @classmethod
    def read(cls, path: str) -> FleetSecret:
        """Raises ConfigError."""
        try:
            with open(path, "rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                secret = file.read(SECRET_BYTES_MAX + 1).strip()
        except OSError as problem:
            raise ConfigError.unreadable(problem, field="fleet_secret_file", path=path) from None
        if mode & 0o007:
            raise ConfigError(
                "other users can read it", field="fleet_secret_file", value=path, remedy="chmod o-rwx"
            )
        if not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
            raise ConfigError(
                f"holds {len(secret)} bytes; a secret has {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX}",
                field="fleet_secret_file",
                value=path,
                remedy="make one: openssl rand -hex 32",
            )
        return cls(secret)

    def namespace(self, salt: bytes) -> bytes:
        """32 bytes that stand for a namespace between nodes. `salt` is that of its chunk keys, which covers tenant,
        model, layout and weights epoch, and keys hashes; so it is not shown itself."""
        return hashlib.blake2b(salt, key=self._namespaces, digest_size=32, person=b"kvs.fleet.ns").digest()

    def hasher(self, namespace: bytes) -> KeyHasher:
        """`namespace`: as `namespace` gives it."""
        return KeyHasher(self._hashes, namespace)

    def tag(self, what: bytes) -> bytes:
        """What proves that a node of this fleet wrote something into the registry."""
        return hashlib.blake2b(what, key=self._pages, digest_size=TAG_BYTES, person=b"kvs.fleet.tag").digest()

    def is_tag(self, what: bytes, tag: bytes) -> bool:
        return hmac.compare_digest(self.tag(what), tag)

    def proof(self, *parts: bytes) -> bytes:
        """What proves to a peer that we know the secret; the parts are of known length, or end with one."""
        return hmac.digest(self._proofs, b"".join(parts), "sha256")


class KeyHasher:
    """Eight bytes of each chunk key of one namespace, the lowest bit of which is 0."""

    __slots__ = ("_state",)

    def __init__(self, secret: bytes, namespace: bytes) -> None:
        self._state = hashlib.blake2b(namespace, key=secret, digest_size=HASH_BYTES, person=b"kvs.fleet.hash")

    def __call__(self, key: ChunkKey) -> int:
        state = self._state.copy()
        state.update(key)
        return int.from_bytes(state.digest(), "little") & ~1 or 2
