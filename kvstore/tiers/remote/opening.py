"""What `remote_url` and its companions say, checked; and the tier that they ask for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from kvstore.config import REMOTE_JOURNAL, StoreConfig
from kvstore.core.events import Event, Heeded
from kvstore.errors import ConfigError
from kvstore.fleet.registry import check_database
from kvstore.tiers.base import SlotMemory
from kvstore.tiers.remote.backend import Backend, Book
from kvstore.tiers.remote.encryption import Cipher
from kvstore.tiers.remote.tier import POLL_S, RemoteTier

REDIS = ("redis", "rediss", "redis+cluster", "rediss+cluster")
OBJECTS = ("s3", "gs", "az", "file")
SALT_BYTES_MIN = 16
OBJECTS_POLL_S = 5.0
"""Two requests each: about a million a month and node."""


def check(config: StoreConfig) -> bool:
    """Whether there is a REMOTE store. Raises ConfigError for what cannot work."""
    url = config.remote_url
    if not url:
        return False
    parts = urlsplit(url)
    if parts.scheme not in (*REDIS, *OBJECTS):
        known = ", ".join(f"{scheme}://" for scheme in (*REDIS, *OBJECTS))
        raise ConfigError(
            f"must begin with one of {known}", field="remote_url", value=parts.scheme or url[:16]
        )
    if parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/") or parts.path == "/"):
        raise ConfigError("must be file:///absolute/folder", field="remote_url", value=url)
    if parts.scheme != "file" and not parts.netloc:
        what, example = (
            ("bucket or container", "bucket/path") if parts.scheme in OBJECTS else ("host", "host:6379/0")
        )
        raise ConfigError(
            f"names no {what}",
            field="remote_url",
            value=f"{parts.scheme}://",
            remedy=f"{parts.scheme}://{example}",
        )
    if parts.scheme in REDIS:
        check_database(url, "remote_url")
    read_salt(config)
    if config.remote_key_file:
        Cipher.read(config.remote_key_file)
    try:
        if parts.scheme in REDIS:
            import redis  # noqa: F401
        else:
            import obstore  # noqa: F401
    except ImportError as problem:
        raise ConfigError(
            f"needs the library {problem.name}",
            field="remote_url",
            value=f"{parts.scheme}://",
            remedy="pip install 'attnstore[remote]'",
        ) from None
    return True


def read_salt(config: StoreConfig) -> bytes:
    """What signs records, and makes names that nobody else finds. Raises ConfigError."""
    path = config.remote_salt_file
    if not path:
        return b""
    try:
        salt = Path(path).read_bytes().strip()
        others = os.stat(path).st_mode & 0o037  # the group may read: Kubernetes mounts a secret so
    except OSError as problem:
        raise ConfigError.unreadable(problem, field="remote_salt_file", path=path) from None
    if len(salt) < SALT_BYTES_MIN:
        raise ConfigError(
            f"holds fewer than {SALT_BYTES_MIN} bytes",
            field="remote_salt_file",
            value=path,
            remedy="openssl rand -hex 32 > it",
        )
    if others:
        raise ConfigError(
            "can be read by other users", field="remote_salt_file", value=path, remedy="chmod 600"
        )
    return salt


def journal_path(config: StoreConfig) -> str:
    """On the SSD, where a restart finds it; else beside the sockets."""
    return os.path.join(config.ssd_dir or config.run_dir, REMOTE_JOURNAL)


def open_remote(
    config: StoreConfig,
    memory: SlotMemory,
    done: Callable[[Event], None],
    *,
    heeded: Heeded | None = None,
    is_ours: Callable[[], bool],
) -> RemoteTier:
    """Nothing is connected to before it is used: a store that is away keeps no daemon from starting. `heeded`: how far
    the journal was carried out, as the index says. `is_ours`: whether the folder of the journal is still this daemon's.
    Raises ConfigError."""
    book = Book(journal_path(config), heeded=heeded, is_ours=is_ours)
    salt = read_salt(config)
    cipher = Cipher.read(config.remote_key_file) if config.remote_key_file else None
    deadline_s = config.remote_deadline_ms / 1_000
    backend: Backend
    try:
        if urlsplit(config.remote_url).scheme in REDIS:
            from kvstore.tiers.remote.redis_store import RedisStore

            backend = RedisStore(
                config.remote_url,
                book,
                salt=salt,
                ttl_s=config.remote_ttl_s,
                timeout_s=deadline_s,
                cipher=cipher,
            )
        else:
            from kvstore.tiers.remote.object_store import ObjectStore

            backend = ObjectStore(
                config.remote_url,
                book,
                salt=salt,
                ttl_s=config.remote_ttl_s,
                timeout_s=deadline_s,
                cipher=cipher,
            )
    except ValueError as problem:
        raise ConfigError(str(problem), field="remote_url", value="set") from None
    return RemoteTier(
        backend,
        book,
        memory,
        done=done,
        threads=config.remote_threads,
        lookup_s=min(deadline_s, config.limits.lookup_deadline_ms / 1_000),
        deadline_s=0.8 * deadline_s,  # the answer comes before the core gives up
        bytes_per_s=config.remote_bytes_per_s,
        poll_s=OBJECTS_POLL_S if urlsplit(config.remote_url).scheme in OBJECTS else POLL_S,
    )
