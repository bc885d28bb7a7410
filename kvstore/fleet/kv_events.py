"""KV events for routers, in vLLM's format (msgspec over ZMQ): which chunks this daemon has, and in which tier.

    [topic, sequence number (8 bytes, big-endian), msgpack of KVEventBatch]       topic: kv@NODE@MODEL

What came and went is what the sweep found, so an event follows its cause by some tenths of a second. The daemon knows
no tokens: `token_ids` is empty and the hash is the chunk key. Engines that pass their own block hashes as keys (vLLM's
connector and tier do) are followed by routers as if they had said it; what their own publisher says goes first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvstore.core.chunks import NONE
from kvstore.core.state import State
from kvstore.errors import ConfigError
from kvstore.fleet.held import Where
from kvstore.fleet.sweep import Change
from kvstore.server.logs import fields
from kvstore.types import ChunkKey, NamespaceId

log = logging.getLogger(__name__)

OWNERSHIP = "kvstored"
LOCALITY = "LOCAL"
MEDIUM = {Where.DRAM: "CPU", Where.SSD: "STORAGE"}
HASHES_MAX = 1_024
"""In one event."""
WAITING_MAX = 10_000
"""Messages for a subscriber that does not read; then it misses some, and the sequence numbers tell it so."""


class KvEvents:
    """On the loop's thread; sending is ZMQ's own thread's work."""

    def __init__(self, endpoint: str, node: str, state: Callable[[], State]) -> None:
        """Binds `endpoint` ("tcp://127.0.0.1:5557"). Raises ConfigError."""
        try:
            import msgspec
            import zmq
        except ImportError:
            raise ConfigError(
                "needs msgspec and pyzmq",
                field="kv_events_endpoint",
                value=endpoint,
                remedy="pip install 'attnstore[events]'",
            ) from None
        self._node = node
        self._state = state
        self._formats = formats()
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        self._socket: Any = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, WAITING_MAX)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as problem:
            self._context.destroy(linger=0)
            raise ConfigError.unbound(problem, field="kv_events_endpoint", address=endpoint) from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._told: dict[int, tuple[NamespaceId, ChunkKey, Where]] = {}
        """By row: what subscribers believe."""
        self._models: dict[NamespaceId, str] = {}
        self._sequence = 0
        self.events = 0
        log.info("KV events are published", extra=fields(endpoint=self.endpoint))

    def __repr__(self) -> str:
        return f"KvEvents({self.endpoint}, {self.events} events, {len(self._told)} chunks)"

    def close(self) -> None:
        self._context.destroy(linger=0)

    def changed(self, changes: Sequence[Change]) -> None:
        """What the sweep found."""
        gone: dict[tuple[NamespaceId, Where], list[ChunkKey]] = {}
        came: list[Change] = []
        for change in changes:
            before = self._told.pop(change.row, None)
            if before is not None:
                namespace, key, where = before
                if (namespace, key, where) == (change.namespace, change.key, change.where):
                    self._told[change.row] = before
                    continue
                gone.setdefault((namespace, where), []).append(key)
            if change.where is not Where.NOWHERE:
                self._told[change.row] = (change.namespace, change.key, change.where)
                came.append(change)
        by_namespace: dict[NamespaceId, list[Any]] = {}
        for (namespace, where), keys in gone.items():
            by_namespace.setdefault(namespace, []).extend(self._removed(where, keys))
        for change in came:
            self._stored(change, by_namespace.setdefault(change.namespace, []))
        for namespace, events in by_namespace.items():
            self._send(self._model(namespace), events)

    def _removed(self, where: Where, keys: Sequence[ChunkKey]) -> Iterable[Any]:
        for start in range(0, len(keys), HASHES_MAX):
            yield self._formats.removed(
                block_hashes=list(keys[start : start + HASHES_MAX]),
                medium=MEDIUM[where],
                group_idx=0,
                locality=LOCALITY,
                ownership=OWNERSHIP,
            )

    def _stored(self, change: Change, events: list[Any]) -> None:
        """One event more, or one hash more in the last one: chunks of one chain, in order."""
        state = self._state()
        chunks = state.chunks
        parent = chunks.parent[change.row]
        above = chunks.key[parent] if parent != NONE else None
        medium = MEDIUM[change.where]
        last = events[-1] if events else None
        if (
            isinstance(last, self._formats.stored)
            and last.medium == medium
            and above == last.block_hashes[-1]
            and len(last.block_hashes) < HASHES_MAX
        ):
            last.block_hashes.append(change.key)
            return
        namespace = state.namespaces.get(change.namespace)
        events.append(
            self._formats.stored(
                block_hashes=[change.key],
                parent_block_hash=above,
                token_ids=[],
                block_size=namespace.spec.chunk_tokens if namespace is not None else 0,
                lora_id=None,
                medium=medium,
                lora_name=None,
                group_idx=0,
                locality=LOCALITY,
                ownership=OWNERSHIP,
            )
        )

    def _model(self, number: NamespaceId) -> str:
        namespace = self._state().namespaces.get(number)
        if namespace is not None:
            self._models[number] = namespace.spec.model
        return self._models.get(number, "")

    def _send(self, model: str, events: list[Any]) -> None:
        import zmq

        batch = self._formats.batch(ts=time.time(), events=events)
        topic = f"kv@{self._node}@{model}".encode()
        message = (topic, self._sequence.to_bytes(8, "big"), self._encode(batch))
        self._sequence += 1
        self.events += len(events)
        try:
            self._socket.send_multipart(message, zmq.NOBLOCK)
        except zmq.ZMQError as problem:
            log.debug("KV events were not sent", extra=fields(why=str(problem)))


class Formats:
    """vLLM's structs (`vllm.distributed.kv_events`), field by field."""

    def __init__(self, stored: type[Any], removed: type[Any], batch: type[Any]) -> None:
        self.stored = stored
        self.removed = removed
        self.batch = batch


def formats() -> Formats:
    import msgspec

    stored = msgspec.defstruct(
        "BlockStored",
        [
            ("block_hashes", list[bytes]),
            ("parent_block_hash", bytes | None),
            ("token_ids", list[int]),
            ("block_size", int),
            ("lora_id", int | None),
            ("medium", str | None),
            ("lora_name", str | None),
            ("extra_keys", list[Any] | None, None),
            ("group_idx", int | None, None),
            ("kv_cache_spec_kind", str | None, None),
            ("kv_cache_spec_sliding_window", int | None, None),
            ("locality", str | None, None),
            ("ownership", str | None, None),
            ("session_id", str | None, None),
        ],
        tag=True,
        omit_defaults=True,
    )
    removed = msgspec.defstruct(
        "BlockRemoved",
        [
            ("block_hashes", list[bytes]),
            ("medium", str | None),
            ("group_idx", int | None, None),
            ("locality", str | None, None),
            ("ownership", str | None, None),
        ],
        tag=True,
        omit_defaults=True,
    )
    batch = msgspec.defstruct(
        "KVEventBatch",
        [("ts", float), ("events", list[Any]), ("data_parallel_rank", int | None, None)],
        array_like=True,
        omit_defaults=True,
    )
    return Formats(stored, removed, batch)
