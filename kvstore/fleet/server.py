"""Serves this node's chunks to its peers, off the loop's thread: one thread for each connection.

    peer ── READ(namespace, keys) ──▶ thread ── Acquire ──▶ loop and core: pins, extents
    peer ◀── CHUNK, bytes, ... END ── thread ◀── extents ──
                                      thread ── Release ──▶

The loop is asked twice for each READ, whatever its bytes. A lease pins the slots while they are sent; a thread that is
held up by a slow peer renews it, and looks at the generation after a chunk's last byte. Who reads holds the checksums
that the core has against what came, so a slot that was refilled all the same is a miss there.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvstore.config import PEERS, address_remedy
from kvstore.core import events
from kvstore.core.chunks import DERIVED
from kvstore.core.events import Ticket
from kvstore.core.namespaces import Namespace
from kvstore.errors import ConfigError, StoreError
from kvstore.fleet import frames
from kvstore.fleet.bucket import Bucket
from kvstore.fleet.door import PeerDoor
from kvstore.fleet.frames import Answer, ChunkHead, Connection, Kind, Late, PeerError
from kvstore.fleet.secret import FleetSecret
from kvstore.keys import tenant_mark
from kvstore.server.logs import fields
from kvstore.server.loop import Loop
from kvstore.tiers.remote.records import Description, makers_fit
from kvstore.types import ChunkKey, Extent, LeaseId, NamespaceId, Outcome, Reason, WorkerId

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 64
OPENINGS_MAX = 16
"""Of them, those that did not prove yet who they are."""
OPENING_S = 2.0
IDLE_S = 300.0
REQUEST_S = 30.0
"""Longest that one request may take, whatever it asks for."""
BACKLOG = 64
ANSWER_S = 2.0
"""How long the loop may take for what it answers at once."""
RENEW_SHARE = 3
"""A lease is renewed after this part of its time."""
TOLD_AGAIN_S = 60.0
COUNTERS = ("connections", "refused", "reads", "chunks", "misses", "bytes", "aborted", "offers")

Result = TypeVar("Result")
Offered = Callable[[bytes, Sequence[ChunkKey]], int]


@dataclass(frozen=True, slots=True)
class _Chunk:
    extents: list[Extent]
    token_count: int
    derived: bool
    makers: tuple[bytes, ...]

    generation: int
    """Up to which count of the fleet's forgets this node had dropped what was forgotten, when it was pinned."""

    def head(self, index: int, namespace: bytes, key: ChunkKey) -> ChunkHead:
        count = len(self.extents)
        return ChunkHead(
            index,
            Answer.HIT,
            tuple(
                Description(
                    namespace,
                    key,
                    shard,
                    count,
                    self.token_count,
                    self.derived,
                    self.makers,
                    extent.length,
                    extent.checksum,
                    self.generation,
                )
                for shard, extent in enumerate(self.extents)
            ),
        )


@dataclass(slots=True)
class _Granted:
    lease: LeaseId
    ttl_s: float
    at: float
    chunks: dict[int, _Chunk] = field(default_factory=dict)
    """By place of the key in the request."""
    pending: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Guests:
    """Workers of the core that act for one connection: one for each namespace that it reads."""

    by_namespace: dict[NamespaceId, WorkerId] = field(default_factory=dict)


class PeerServer:
    """`start` listens; every connection has a thread of its own from then on."""

    def __init__(
        self,
        loop: Callable[[], Loop],
        secret: FleetSecret,
        door: PeerDoor,
        numbers: Iterator[int],
        *,
        address: tuple[str, int],
        bytes_per_s: int,
        offered: Offered,
    ) -> None:
        """`numbers` gives ids for guests that no other worker has; `offered` is told, on any thread, what a node that
        leaves would like us to take, and says how much of it we do."""
        self._get_loop = loop
        self._secret = secret
        self._door = door
        self._numbers = numbers
        self._address = address
        self._bucket = Bucket(bytes_per_s)
        self._offered = offered
        self._asyncio: asyncio.AbstractEventLoop | None = None
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._open: set[Connection] = set()
        self._opening = 0
        self._end = threading.Event()
        self._digests: dict[NamespaceId, bytes] = {}
        self._told_at = 0.0
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)

    def __repr__(self) -> str:
        return f"PeerServer({self._address}, {len(self._open)} connections)"

    @property
    def _loop(self) -> Loop:
        return self._get_loop()

    @property
    def port(self) -> int:
        assert self._listener is not None
        return int(self._listener.getsockname()[1])

    def start(self) -> None:
        """On the loop's thread. Raises ConfigError."""
        self._asyncio = asyncio.get_running_loop()
        host, port = self._address
        try:
            self._listener = socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=BACKLOG
            )
        except OSError as problem:
            raise ConfigError(
                f"cannot be used: {problem.strerror}",
                field="peer_address",
                value=f"{host}:{port}",
                remedy=address_remedy(problem),
            ) from None
        threading.Thread(target=self._accept, name="kvstored-peers", daemon=True).start()

    def close(self) -> None:
        """Every connection ends; their threads end with them."""
        self._end.set()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        with self._lock:
            left = list(self._open)
        for connection in left:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    # ------------------------------------------------------------------------------------------------ connections

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._end.is_set():
            try:
                raw, _ = self._listener.accept()
            except OSError as problem:
                if self._end.is_set():
                    return
                log.warning("no connection of a peer is accepted now", extra=fields(why=str(problem)))
                time.sleep(0.1)  # no descriptor is left, say
                continue
            with self._lock:
                full = len(self._open) >= CONNECTIONS_MAX or self._opening >= OPENINGS_MAX
                if not full:
                    self._open.add(raw)
                    self._opening += 1
            if full:
                self.counters["refused"] += 1
                raw.close()
                continue
            threading.Thread(target=self._serve, args=(raw,), name="kvstored-peer", daemon=True).start()

    def _serve(self, raw: socket.socket) -> None:
        connection: Connection | None = None
        guests = _Guests()
        try:
            try:
                connection, peer = self._door.accept(raw, OPENING_S, time.monotonic() + OPENING_S)
            except PeerError as problem:
                self._refused(raw, problem)
                return
            finally:
                with self._lock:
                    self._opening -= 1
                    self._open.discard(raw)
                    if connection is not None:
                        self._open.add(connection)
            if self._end.is_set():
                return
            self.counters["connections"] += 1
            log.debug("a peer is connected", extra=fields(peer=peer))
            self._requests(connection, guests)
        except PeerError as problem:
            log.debug("a peer's connection ended", extra=fields(why=str(problem)))
        except (StoreError, RuntimeError) as problem:
            log.info("a peer's connection was ended", extra=fields(why=str(problem)))
        except Exception:  # one connection ends, and the others go on
            log.exception("a bug ended a peer's connection")
        finally:
            with self._lock:
                self._open.discard(raw)
                if connection is not None:
                    self._open.discard(connection)
            for worker in guests.by_namespace.values():
                self._loop.post_threadsafe(events.WorkerLeft(worker))
            if connection is not None:
                connection.close()
            raw.close()

    def _refused(self, raw: socket.socket, problem: PeerError) -> None:
        self.counters["refused"] += 1
        now = time.monotonic()
        if now - self._told_at >= TOLD_AGAIN_S and not self._end.is_set():
            self._told_at = now
            log.warning("somebody was not let in as a peer", extra=fields(why=str(problem)))

    def _requests(self, connection: Connection, guests: _Guests) -> None:
        while not self._end.is_set():
            kind, number, body = frames.receive(connection, time.monotonic() + IDLE_S)
            match kind:
                case Kind.READ:
                    self._read(connection, guests, number, body)
                case Kind.OFFER:
                    namespace, keys = frames.decode_offer(body)
                    self.counters["offers"] += len(keys)
                    taken = self._offered(namespace, keys)
                    frames.send(
                        connection,
                        Kind.TAKEN,
                        number,
                        taken.to_bytes(4, "little"),
                        time.monotonic() + REQUEST_S,
                    )
                case _:
                    raise PeerError(f"{kind.name} is no request")

    # ------------------------------------------------------------------------------------------------------- reads

    def _read(self, connection: Connection, guests: _Guests, number: int, body: bytes) -> None:
        digest, keys, deadline_ms = frames.decode_read(body)
        deadline = time.monotonic() + min(deadline_ms / 1000, REQUEST_S)
        self.counters["reads"] += 1
        namespace, granted = self._ask(self._acquire(guests, digest, keys, deadline), deadline)
        try:
            for index, key in enumerate(keys):
                of_key = next((each for each in granted if index in each.chunks), None)
                if namespace is None or of_key is None:
                    late = bool(granted) and index in granted[-1].pending
                    head = ChunkHead(index, Answer.LATE if late else Answer.MISS)
                    self.counters["misses"] += 1
                    frames.send(connection, Kind.CHUNK, number, frames.encode_chunk(head), deadline)
                    continue
                chunk = of_key.chunks[index]
                head = chunk.head(index, digest, key)
                frames.send(connection, Kind.CHUNK, number, frames.encode_chunk(head), deadline)
                for extent in chunk.extents:
                    self._send(connection, guests.by_namespace[namespace.id], of_key, extent, deadline)
                self.counters["chunks"] += 1
            frames.send(connection, Kind.END, number, b"", deadline)
        except PeerError:
            self.counters["aborted"] += 1
            raise
        finally:
            if namespace is not None and granted:
                worker = guests.by_namespace[namespace.id]
                leases = tuple(each.lease for each in granted if each.lease)
                if leases:
                    self._loop.post_threadsafe(events.Release(Ticket(worker), leases))

    def _send(
        self, connection: Connection, worker: WorkerId, granted: _Granted, extent: Extent, deadline: float
    ) -> None:
        data = self._loop.arena.view(extent.segment, extent.offset, extent.length).data.cast("B")
        for start in range(0, extent.length, frames.PIECE_BYTES):
            piece = data[start : start + frames.PIECE_BYTES]
            if not self._bucket.take(len(piece), deadline):
                raise Late("the cap on bytes a second leaves no room before the deadline")
            if time.monotonic() - granted.at > granted.ttl_s / RENEW_SHARE:
                self._ask(self._renew(worker, granted), deadline)
            frames.send_all(connection, piece, deadline)
            self.counters["bytes"] += len(piece)
        if not self._loop.arena.holds(extent.segment, extent.cell, extent.generation):
            raise PeerError("a slot was given away while it was sent")  # so that nobody takes these bytes

    def _ask(self, work: Coroutine[Any, Any, Result], deadline: float) -> Result:
        """What the loop makes of it. Raises StoreError, PeerError."""
        assert self._asyncio is not None
        future = asyncio.run_coroutine_threadsafe(work, self._asyncio)
        try:
            return future.result(max(0.0, deadline - time.monotonic()) + ANSWER_S)
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            future.cancel()
            raise Late("the loop did not answer") from None

    async def _acquire(
        self, guests: _Guests, digest: bytes, keys: Sequence[ChunkKey], deadline: float
    ) -> tuple[Namespace | None, list[_Granted]]:
        """Pins of what is in DRAM, or can be brought there before half of the time is over. On the loop's thread."""
        namespace = self._namespace(digest)
        if namespace is None:
            return None, []
        worker = await self._guest(guests, namespace)
        granted: list[_Granted] = []
        wanted = list(range(len(keys)))
        until = time.monotonic() + max(0.0, deadline - time.monotonic()) / 2
        settled = asyncio.Event()

        def push(_: object) -> None:
            settled.set()

        self._loop.subscribe(worker, push)
        try:
            while wanted:
                wait_ms = int(max(0.0, until - time.monotonic()) * 1000)
                asked = tuple(keys[index] for index in wanted)
                at = time.monotonic()
                lease: events.Acquired = await self._loop.ask(
                    events.Acquire(
                        Ticket(worker), namespace.id, asked, wait_ms=wait_ms, prefix_only=False, local=True
                    ),
                    ANSWER_S,
                )
                each = _Granted(lease.lease, lease.ttl_ms / 1000, at)
                extents = iter(lease.extents)
                for index, outcome, reason in zip(wanted, lease.outcomes, lease.reasons, strict=True):
                    if outcome is Outcome.HIT:
                        mine = [next(extents) for _ in range(namespace.shards)]
                        chunk = self._chunk(namespace, keys[index], mine)
                        if chunk is not None:
                            each.chunks[index] = chunk
                    elif outcome is Outcome.PENDING and reason is not Reason.ON_REMOTE:
                        each.pending.add(index)
                granted.append(each)
                wanted = sorted(each.pending)
                if not wanted or not wait_ms:
                    break
                try:
                    async with asyncio.timeout(wait_ms / 1000):
                        await settled.wait()
                except TimeoutError:
                    break
                settled.clear()
        finally:
            self._loop.unsubscribe(worker, push)
        return namespace, granted

    def _chunk(self, namespace: Namespace, key: ChunkKey, extents: list[Extent]) -> _Chunk | None:
        """Of a chunk that is pinned. None: what cannot be recalled by its makers is not handed on."""
        state = self._loop.store.state
        row = namespace.index[key]
        makers = (*state.makers_of(row), tenant_mark(namespace.tenant))
        if not makers_fit(makers) or len(extents) > frames.SHARDS_MAX:
            return None
        derived = bool(state.chunks.flags[row] & DERIVED)
        return _Chunk(extents, state.chunks.tokens[row], derived, makers, state.applied.get(PEERS, 0))

    async def _renew(self, worker: WorkerId, granted: _Granted) -> None:
        at = time.monotonic()
        renewed: events.Renewed = await self._loop.ask(
            events.Renew(Ticket(worker), (granted.lease,)), ANSWER_S
        )
        if not renewed.ttl_ms[0]:
            raise PeerError("a lease ended while its bytes were sent")
        granted.at = at

    def _namespace(self, digest: bytes) -> Namespace | None:
        """The one that this stands for, of whatever tenant: tenant, model, layout and epoch are in the digest."""
        namespaces = self._loop.store.state.namespaces
        if len(self._digests) > 2 * len(namespaces) + 64:
            self._digests.clear()
        for number, namespace in namespaces.items():
            known = self._digests.get(number)
            if known is None:
                known = self._digests[number] = self._secret.namespace(namespace.salt)
            if known == digest and not namespace.retired:
                return namespace
        return None

    async def _guest(self, guests: _Guests, namespace: Namespace) -> WorkerId:
        worker = guests.by_namespace.get(namespace.id)
        if worker is None:
            worker = WorkerId(next(self._numbers))
            self._loop.post(
                events.WorkerJoined(worker, tenant=namespace.tenant, engine_group="", remote=True)
            )
            guests.by_namespace[namespace.id] = worker
            await self._loop.ask(events.Open(Ticket(worker), namespace.spec), ANSWER_S)
        return worker
