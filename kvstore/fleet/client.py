"""Reads chunks out of other nodes' DRAM, straight into slots of ours. Threads of its own; a few connections a peer.

Whatever a peer does (silence, lies, a stop, a byte a second), the read ends by its deadline, the answer for each chunk
says what came of it, and nothing writes to a slot after that: the thread that received is the one that answers.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.fleet import frames
from kvstore.fleet.breaker import Breaker
from kvstore.fleet.bucket import Bucket
from kvstore.fleet.door import PeerDoor
from kvstore.fleet.frames import Answer, Connection, Kind, Late, PeerError
from kvstore.fleet.registry import Node
from kvstore.server.logs import fields
from kvstore.tiers.remote.records import Description, Header, refusal
from kvstore.types import ChunkKey

log = logging.getLogger(__name__)

CONNECT_S = 1.0
IDLE_CONNECTIONS_MAX = 4
"""Of one peer, kept for later."""
IDLE_S = 120.0
"""Less than the time after which the peer's side ends one."""
READS_WAITING_MAX = 1_024
PEERS_REMEMBERED_MAX = 4_096
MISSES_REMEMBERED_MAX = 65_536
MISS_S = 10.0
"""So long a peer that lacked a chunk is not asked for it again, whatever the registry says."""
TOLD_AGAIN_S = 60.0
COUNTERS = ("reads", "chunks", "misses", "corrupt", "bytes", "failed", "late", "refused")


Shards = tuple[Description, ...]


class Result(IntEnum):
    """Of one chunk."""

    OK = 0
    """Its memory holds the bytes that the peer committed."""
    MISS = 1
    CORRUPT = 2
    """What came is not what the peer's checksums say."""
    FAILED = 3
    """The peer could not be asked, or did not answer in time."""


@dataclass(frozen=True, slots=True)
class Wanted:
    key: ChunkKey
    targets: Sequence[npt.NDArray[np.uint8]]
    """Memory of each shard, of its exact size."""


@dataclass(frozen=True, slots=True)
class Read:
    node: Node
    namespace: bytes
    """As `FleetSecret.namespace` gives it."""
    chunks: Sequence[Wanted]
    deadline: float
    """By time.monotonic."""
    done: Callable[[Sequence[Result], Sequence[Shards], str], None]
    """(a result a chunk, what its shards are where that is OK, why not), called once on any thread."""


@dataclass(slots=True)
class _Peer:
    breaker: Breaker = field(default_factory=Breaker)
    idle: list[tuple[float, Connection]] = field(default_factory=list)
    bytes_per_s: float = 0.0
    """Of the last reads, as they were seen here."""
    told_at: float = -math.inf


class PeerReads:
    def __init__(self, door: PeerDoor, *, threads: int, bytes_per_s: int) -> None:
        self._door = door
        self._bucket = Bucket(bytes_per_s)
        self._lock = threading.Lock()
        self._peers: dict[tuple[str, bytes], _Peer] = {}
        """By name and boot id: a node that starts anew is a new one."""
        self._misses: dict[tuple[str, bytes, bytes], float] = {}
        self._work: queue.Queue[Read | None] = queue.Queue(READS_WAITING_MAX)
        self._ended = False
        self._numbers = iter(range(1, 1 << 62))
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self._threads = [
            threading.Thread(target=self._run, name=f"kvstored-peer-reads-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        return f"PeerReads({len(self._peers)} peers, {self._work.qsize()} waiting)"

    def close(self, timeout_s: float) -> None:
        self._ended = True
        for _ in self._threads:
            try:
                self._work.put_nowait(None)
            except queue.Full:
                break  # they look at `_ended` with each read
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        with self._lock:
            idle = [connection for peer in self._peers.values() for _, connection in peer.idle]
            self._peers.clear()
        for connection in idle:
            connection.close()

    # ------------------------------------------------------------------------------------------------ from any thread

    def submit(self, read: Read) -> None:
        """`read.done` is called in any case, at once if too many wait already."""
        try:
            if self._ended:
                raise queue.Full
            self._work.put_nowait(read)
        except queue.Full:
            self.counters["refused"] += 1
            self._answer(read, [Result.FAILED] * len(read.chunks), (), "too many reads from peers wait")

    def is_open(self, node: Node) -> bool:
        """Whether it is worth asking this peer now."""
        return bool(node.address) and self._peer(node).breaker.closed

    def speed(self, node: Node) -> float:
        """Bytes a second of the last reads from it; 0: nobody knows."""
        return self._peer(node).bytes_per_s

    def lacked(self, node: Node, namespace: bytes, key: ChunkKey) -> bool:
        """Whether it said just now that it does not have this chunk."""
        until = self._misses.get((node.name, namespace, key))
        return until is not None and time.monotonic() < until

    def offer(self, node: Node, namespace: bytes, keys: Sequence[ChunkKey], deadline: float) -> int:
        """Ask a peer to take chunks that we hold. How many it says that it does. Blocks. Raises PeerError."""
        peer = self._peer(node)
        connection, _ = self._connection(peer, node, deadline)
        try:
            frames.send(
                connection, Kind.OFFER, next(self._numbers), frames.encode_offer(namespace, keys), deadline
            )
            kind, _, body = frames.receive(connection, deadline)
            if kind is not Kind.TAKEN or len(body) != 4:
                raise PeerError("no answer to an offer")
        except PeerError:
            connection.close()
            raise
        self._keep(peer, connection)
        return int.from_bytes(body, "little")

    # ---------------------------------------------------------------------------------------------------- the threads

    def _peer(self, node: Node) -> _Peer:
        name = (node.name, node.boot)
        with self._lock:
            peer = self._peers.get(name)
            if peer is None:
                if len(self._peers) >= PEERS_REMEMBERED_MAX:
                    for _, connection in self._peers.pop(next(iter(self._peers))).idle:
                        connection.close()
                peer = self._peers[name] = _Peer()
        return peer

    def _run(self) -> None:
        while True:
            read = self._work.get()
            if read is None:
                return
            results = [Result.FAILED] * len(read.chunks)
            shards: list[Shards] = [()] * len(read.chunks)
            why = "the daemon ends"
            if not self._ended:
                try:
                    why = self._read(read, results, shards)
                except Exception as problem:
                    log.warning("a read from a peer failed for a reason of ours", exc_info=True)
                    why = str(problem)
            self._answer(read, results, shards, why)

    def _answer(self, read: Read, results: Sequence[Result], shards: Sequence[Shards], why: str) -> None:
        self.counters["reads"] += 1
        self.counters["chunks"] += results.count(Result.OK)
        self.counters["misses"] += results.count(Result.MISS)
        self.counters["corrupt"] += results.count(Result.CORRUPT)
        read.done(results, shards or [()] * len(results), why)

    def _read(self, read: Read, results: list[Result], shards: list[Shards]) -> str:
        """Fill in what came. Why not all of it did; empty: all came, or is a miss."""
        peer = self._peer(read.node)
        if not peer.breaker.enter():
            return f"{read.node.name} is left alone for a while: {peer.breaker.why}"
        try:
            self._ask(peer, read, results, shards)
        except PeerError as problem:
            peer.breaker.failed(str(problem))
            self.counters["late" if isinstance(problem, Late) else "failed"] += 1
            now = time.monotonic()
            if now - peer.told_at >= TOLD_AGAIN_S:
                peer.told_at = now
                log.warning(
                    "a peer does not give what it should: its chunks are misses here",
                    extra=fields(peer=read.node.name, address=read.node.address, why=str(problem)),
                )
            return str(problem)
        peer.breaker.succeeded()
        return ""

    def _ask(self, peer: _Peer, read: Read, results: list[Result], shards: list[Shards]) -> None:
        for start in range(0, len(read.chunks), frames.KEYS_MAX):
            part = range(start, min(len(read.chunks), start + frames.KEYS_MAX))
            connection, kept = self._connection(peer, read.node, read.deadline)
            try:
                try:
                    number = self._send_read(connection, read, part)
                    head = frames.receive(connection, read.deadline)
                except Late:
                    raise
                except PeerError:
                    if not kept:
                        raise
                    # The peer may have ended a connection that was idle: once more, by a new one.
                    connection.close()
                    connection = self._new_connection(read.node, read.deadline)
                    number = self._send_read(connection, read, part)
                    head = frames.receive(connection, read.deadline)
                self._take(peer, connection, read, part, number, head, results, shards)
            except BaseException:
                connection.close()
                raise
            self._keep(peer, connection)

    def _send_read(self, connection: Connection, read: Read, part: range) -> int:
        number = next(self._numbers)
        keys = [read.chunks[index].key for index in part]
        left_ms = int((read.deadline - time.monotonic()) * 1000)
        body = frames.encode_read(read.namespace, keys, left_ms)
        frames.send(connection, Kind.READ, number, body, read.deadline)
        return number

    def _take(
        self,
        peer: _Peer,
        connection: Connection,
        read: Read,
        part: range,
        number: int,
        first: tuple[Kind, int, bytes],
        results: list[Result],
        shards: list[Shards],
    ) -> None:
        """The answers to one request. A chunk counts once all of them, END included, have come as they should: a peer
        that ends the connection instead takes back the last one."""
        came: dict[int, Shards] = {}
        began, size = time.monotonic(), 0
        try:
            for index in part:
                kind, its, body = first if index == part.start else frames.receive(connection, read.deadline)
                if kind is not Kind.CHUNK or its != number:
                    raise PeerError("another answer than the one that was asked for")
                head = frames.decode_chunk(body)
                wanted = read.chunks[index]
                if head.index != index - part.start:
                    raise PeerError("a chunk that nobody asked for")
                if head.answer is not Answer.HIT:
                    results[index] = Result.MISS
                    if head.answer is Answer.MISS:
                        self._remember_miss(read, wanted.key)
                    continue
                check(head.shards, read.namespace, wanted)
                for shard, target in zip(head.shards, wanted.targets, strict=True):
                    if self._receive(connection, target, read.deadline) != shard.checksum:
                        results[index] = Result.CORRUPT
                    size += shard.length
                if results[index] is not Result.CORRUPT:
                    came[index] = head.shards
            kind, its, _ = frames.receive(connection, read.deadline)
            if kind is not Kind.END or its != number:
                raise PeerError("no END")
        except PeerError:
            if came:
                del came[max(came)]
            raise
        finally:
            for index, described in came.items():
                results[index], shards[index] = Result.OK, described
            self.counters["bytes"] += size
        if size:
            rate = size / max(1e-6, time.monotonic() - began)
            peer.bytes_per_s = 0.7 * peer.bytes_per_s + 0.3 * rate if peer.bytes_per_s else rate
        if Result.CORRUPT in [results[index] for index in part]:
            raise PeerError("bytes that do not match their checksums")

    def _receive(self, connection: Connection, target: npt.NDArray[np.uint8], deadline: float) -> int:
        """xxh3_64 of what came, read back from where it landed."""
        state = xxhash.xxh3_64()
        view = target.data.cast("B")
        for start in range(0, len(view), frames.PIECE_BYTES):
            piece = view[start : start + frames.PIECE_BYTES]
            if not self._bucket.take(len(piece), deadline):
                raise Late("the cap on bytes a second leaves no room before the deadline")
            frames.receive_into(connection, piece, deadline)
            state.update(piece)
        return state.intdigest()

    def _remember_miss(self, read: Read, key: ChunkKey) -> None:
        with self._lock:
            if len(self._misses) >= MISSES_REMEMBERED_MAX:
                self._misses.clear()
            self._misses[read.node.name, read.namespace, key] = time.monotonic() + MISS_S

    # ---------------------------------------------------------------------------------------------------- connections

    def _connection(self, peer: _Peer, node: Node, deadline: float) -> tuple[Connection, bool]:
        """One that is open, and whether it was kept from before. Raises PeerError."""
        while True:
            with self._lock:
                if not peer.idle:
                    break
                since, connection = peer.idle.pop()
            if time.monotonic() - since < IDLE_S:
                return connection, True
            connection.close()
        return self._new_connection(node, deadline), False

    def _new_connection(self, node: Node, deadline: float) -> Connection:
        until = min(deadline, time.monotonic() + CONNECT_S)
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise Late("the deadline passed")
        return self._door.connect(node.address, node.name, left_s, until)

    def _keep(self, peer: _Peer, connection: Connection) -> None:
        with self._lock:
            if len(peer.idle) < IDLE_CONNECTIONS_MAX and not self._ended:
                peer.idle.append((time.monotonic(), connection))
                return
        connection.close()


def check(shards: Shards, namespace: bytes, wanted: Wanted) -> None:
    """Raises PeerError if these describe something else than what is wanted."""
    if len(shards) != len(wanted.targets):
        raise PeerError(f"{len(shards)} shards, not {len(wanted.targets)}")
    for number, (shard, target) in enumerate(zip(shards, wanted.targets, strict=True)):
        why = refusal(
            Header(shard, size=0, mac=b"", signed=b""),
            namespace=namespace,
            key=wanted.key,
            shard=number,
            shards=len(wanted.targets),
            length=target.size,
        )
        if why:
            raise PeerError(why)
        first = shards[0]
        if (shard.token_count, shard.derived, shard.makers) != (
            first.token_count,
            first.derived,
            first.makers,
        ):
            raise PeerError("shards of one chunk that are described differently")
