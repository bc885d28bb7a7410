"""Files with keys for encryption at rest: 64 hexadecimal digits a line, the newest first.

The first key of a file encrypts, all of them decrypt: a new first line is a rotation.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from kvstore.errors import ConfigError

KEY_BYTES = 32
KEYS_MAX = 16


def read_keys(path: str, *, field: str) -> list[bytes]:
    """Keys of KEY_BYTES each, of the file that the setting `field` names. Raises ConfigError, also where the library
    that they are for is missing."""
    try:
        lines = Path(path).read_text("ascii", "replace").split()
        others = os.stat(path).st_mode & 0o037  # the group may read: Kubernetes mounts a secret so
    except OSError as problem:
        raise ConfigError.unreadable(problem, field=field, path=path) from None
    if others:
        raise ConfigError("can be read by other users", field=field, value=path, remedy="chmod 600")
    try:
        keys = [bytes.fromhex(line) for line in lines]
    except ValueError:
        keys = []
    if not 1 <= len(keys) <= KEYS_MAX or any(len(key) != KEY_BYTES for key in keys):
        raise ConfigError(
            f"must hold 1 to {KEYS_MAX} keys of {2 * KEY_BYTES} hexadecimal digits, the newest first",
            field=field,
            value=path,
            remedy="openssl rand -hex 32 > it",
        )
    if find_spec("cryptography") is None:
        raise ConfigError(
            "needs the library cryptography",
            field=field,
            value=path,
            remedy="pip install 'attnstore[encryption]'",
        )
    return keys
