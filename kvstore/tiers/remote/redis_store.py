"""REMOTE in Redis or Valkey, single or cluster: one value a shard, with a time to live.

    kvs:<prefix>:<place>:<name>    a record (`records.py`); <place> is that of its namespace, <name> that of its shard
    kvs:{<prefix>}:...             what was forgotten (`redis_tombstones.py`)

Shard 0 of a chunk is written last and looked up alone: where it is, the others are, or the fetch finds out.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import redis
import redis.backoff
import redis.cluster
import redis.exceptions
import redis.retry

from kvstore.core.events import FetchChunks, FetchedChunk, LookUpChunks, StoreChunks
from kvstore.fleet.registry import one_host
from kvstore.tiers.base import SlotMemory
from kvstore.tiers.remote import records
from kvstore.tiers.remote.backend import Book, StoreFull, StoreProblem, describe, judge, sealed, view
from kvstore.tiers.remote.encryption import Cipher
from kvstore.tiers.remote.redis_tombstones import RedisTombstones
from kvstore.tiers.remote.tombstones import Forgotten
from kvstore.types import ChunkKey, Found

READ_BYTES = 1 << 20
"""Asked of the socket at once: values are large."""
NAMES_PER_SCAN = 1_000


class RedisStore:
    def __init__(
        self,
        url: str,
        book: Book,
        *,
        salt: bytes,
        ttl_s: int,
        timeout_s: float,
        cipher: Cipher | None = None,
    ) -> None:
        self._url, others = one_host(url)
        self._book = book
        self._salt = salt
        self._cipher = cipher
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s
        self._prefix = records.prefix_of(salt)
        self._tombstones = RedisTombstones(lambda what: f"kvs:{{{self._prefix}}}:{what}", book)
        self._cluster = "+cluster" in url
        self._mine = threading.local()
        self._clients: dict[int, Any] = {}
        """By thread."""
        self._nodes = others
        """Of a cluster, as one of them said last: the one in the URL may be the one that is away."""
        self._fetch_ms = 2.0
        """How long a chunk took of late."""

    def __repr__(self) -> str:
        return f"RedisStore({self._prefix}, {len(self._clients)} connections)"

    # --------------------------------------------------------------------------------------------------- connections

    def _client(self) -> Any:
        client = self._clients.get(threading.get_ident())
        if client is None:
            options: dict[str, Any] = {
                "socket_timeout": self._timeout_s,
                "socket_connect_timeout": self._timeout_s,
                "socket_read_size": READ_BYTES,
                "health_check_interval": 0,
                "socket_keepalive": True,
            }
            no_retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
            if self._cluster:
                url = self._url.replace("+cluster", "")
                retry = redis.retry.Retry(redis.backoff.NoBackoff(), 2)  # for what moved to another node
                nodes = [
                    redis.cluster.ClusterNode(host, port)  # type: ignore[no-untyped-call]
                    for host, port in self._nodes
                ]
                client = redis.cluster.RedisCluster.from_url(url, startup_nodes=nodes, retry=retry, **options)
                self._note_nodes(client)
            else:
                client = redis.Redis.from_url(self._url, retry=no_retry, **options)
            self._clients[threading.get_ident()] = client
        return client

    def _note_nodes(self, client: Any) -> None:
        self._nodes = [(str(node.host), int(node.port)) for node in client.get_nodes()]

    def drop_connections(self, thread: int) -> None:
        """End what this thread waits for: its calls raise."""
        client = self._clients.pop(thread, None)
        if client is None:
            return
        pools = [client.connection_pool] if hasattr(client, "connection_pool") else []
        with suppress(Exception):  # a cluster's nodes may not be known yet
            pools += [node.redis_connection.connection_pool for node in client.get_nodes()]
        for pool in pools:
            for connection in [
                *getattr(pool, "_in_use_connections", ()),
                *getattr(pool, "_available_connections", ()),
            ]:
                with suppress(OSError, AttributeError):
                    connection._sock.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def _calling(self) -> Iterator[Any]:
        """Errors of the client become ours, and a connection that had one is not used again."""
        thread = threading.get_ident()
        try:
            yield self._client()
        except redis.exceptions.OutOfMemoryError as problem:
            raise StoreFull(str(problem)) from None
        except redis.exceptions.ResponseError as problem:
            self.drop_connections(thread)
            text = str(problem)
            if text.startswith(("OOM", "MISCONF", "NOREPLICAS", "READONLY")):
                raise StoreFull(text) from None
            raise StoreProblem(text) from None
        except (
            *(
                redis.RedisError,
                redis.exceptions.RedisClusterException,
            ),  # no cluster, or none of its nodes answers
            *(OSError, ValueError, IndexError, AttributeError, TypeError),
        ) as problem:
            # Beside its own errors, the client raises what parsing a torn answer happens to raise.
            self.drop_connections(thread)
            raise StoreProblem(f"{type(problem).__name__}: {problem}") from None

    def _run(self, pipe: Any) -> list[Any]:
        answers: list[Any] = pipe.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _name(self, digest: bytes, key: ChunkKey, shard: int) -> str:
        place = records.place_of(digest, self._salt)
        return f"kvs:{self._prefix}:{place}:{records.name_of(digest, key, shard, self._salt)}"

    # --------------------------------------------------------------------------------------------------------- calls

    def look_up(self, effect: LookUpChunks, deadline: float) -> Sequence[Found | None]:
        with self._calling() as client:
            pipe = client.pipeline(transaction=False)
            for key in effect.keys:
                pipe.getrange(self._name(effect.digest, key, 0), 0, records.FIXED_BYTES - 1)
            heads = self._run(pipe)
        found: list[Found | None] = []
        for key, head in zip(effect.keys, heads, strict=True):
            seen = records.peek(head, namespace=effect.digest, key=key)
            found.append(None if seen is None else Found(seen[1], self._fetch_ms, seen[0]))
        return found

    def fetch(
        self, effect: FetchChunks, memory: SlotMemory, deadline: float
    ) -> tuple[Sequence[FetchedChunk], int]:
        began = time.monotonic()
        shards = len(effect.targets) // len(effect.keys)
        with self._calling() as client:
            pipe = client.pipeline(transaction=False)
            for key in effect.keys:
                for shard in range(shards):
                    pipe.get(self._name(effect.digest, key, shard))
            if not self._cluster:
                pipe.get(self._tombstones.count_name)  # after the records: see `tombstones.py`
            answers = self._run(pipe)
            count = client.get(self._tombstones.count_name) if self._cluster else answers.pop()
            self._tombstones.catch_up(client, count)

        def read(number: int, shard: int) -> bytes | None:
            value: bytes | None = answers[number * shards + shard]
            return value

        held_against = self._book.seen[0]
        chunks = [
            judge(effect, number, read, memory, self._book, self._salt, self._cipher)
            for number in range(len(effect.keys))
        ]
        took_ms = 1_000 * (time.monotonic() - began) / len(effect.keys)
        self._fetch_ms += 0.1 * (took_ms - self._fetch_ms)
        return chunks, held_against

    def store(
        self, effect: StoreChunks, memory: SlotMemory, generation: int, deadline: float
    ) -> Sequence[object]:
        shards = len(effect.sources) // len(effect.keys)
        with self._calling() as client:
            pipe = client.pipeline(transaction=False)
            for number, key in enumerate(effect.keys):
                for shard in reversed(range(shards)):
                    payload = view(memory, effect.sources[number * shards + shard])
                    about = describe(effect, number, shard, generation)
                    head, body = sealed(about, payload, self._salt, self._cipher)
                    record = bytearray(len(head) + len(body))
                    record[: len(head)] = head
                    memoryview(record)[len(head) :] = body
                    pipe.set(self._name(effect.digest, key, shard), memoryview(record), ex=self._ttl_s)
            self._run(pipe)
            self._tombstones.read(client)  # soon: what is forgotten is dropped here, too
        return (None,) * len(effect.keys)

    def drop(self, digest: bytes, keys: Sequence[ChunkKey], deadline: float) -> None:
        with self._calling() as client:
            pipe = client.pipeline(transaction=False)
            for key in keys:
                pipe.unlink(self._name(digest, key, 0))
            self._run(pipe)

    # ------------------------------------------------------------------------------------------------------- forgets

    def forget(self, forgotten: Sequence[Forgotten], deadline: float) -> None:
        with self._calling() as client:
            self._tombstones.read(client)
            self._tombstones.add(client, forgotten)
            for digest, key, maker in forgotten:
                if key and not maker:
                    client.unlink(self._name(digest, key, 0))
        for digest, key, maker in forgotten:
            if not key and not maker:
                with suppress(StoreProblem):  # the tombstone stands, and the records expire
                    self._delete_namespace(digest, deadline)

    def _delete_namespace(self, digest: bytes, deadline: float) -> None:
        pattern = f"kvs:{self._prefix}:{records.place_of(digest, self._salt)}:*"
        with self._calling() as client:
            names: list[bytes] = []
            for name in client.scan_iter(match=pattern, count=NAMES_PER_SCAN):
                names.append(name)
                if len(names) >= NAMES_PER_SCAN:
                    self._unlink(client, names)
                    names = []
                if time.monotonic() > deadline:
                    raise StoreProblem("deleting a namespace takes long: the rest expires")
            self._unlink(client, names)

    def _unlink(self, client: Any, names: Sequence[bytes]) -> None:
        pipe = client.pipeline(transaction=False)
        for name in names:
            pipe.unlink(name)
        if names:
            self._run(pipe)

    def catch_up(self, deadline: float) -> None:
        with self._calling() as client:
            self._tombstones.read(client)

    def tidy(self, deadline: float) -> None:
        """Records expire by themselves; tombstones outlive them by as much again."""
        with self._calling() as client:
            self._tombstones.tidy(client, 2 * self._ttl_s)

    def abandon(self) -> None:
        for thread in list(self._clients):
            self.drop_connections(thread)

    def close(self) -> None:
        self.abandon()
