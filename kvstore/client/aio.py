"""The awaitable client: the blocking one's operations, driven by an event loop.

What may wait is awaited; what never does (release, abort, buffer) is called as it is. Copies of COPY_INLINE_MAX bytes
or more are made in a thread; who is cancelled meanwhile goes on once it has ended, and the memory is the caller's.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Self, TypeVar

import grpc
import numpy as np
import numpy.typing as npt

from kvstore.answers import ActionsApplied, Matched, Peeked, QueueAccepted, SessionInfo
from kvstore.client.batch import CommitOutcome, PutOutcome, WriteBatch
from kvstore.client.call import drive, drive_async
from kvstore.client.lease import ReadLease
from kvstore.client.namespace import Forgotten, Namespace
from kvstore.client.region import Region
from kvstore.client.sync import STAGING_BYTES, TIMEOUT_S, Client, connect
from kvstore.keys import ROOT, Tokens
from kvstore.layout import NamespaceSpec
from kvstore.types import (
    ChunkKey,
    GrantResult,
    Hint,
    HintAction,
    NamespaceId,
    Outcome,
    Protection,
    Reason,
    SessionEntry,
    Wait,
)
from kvstore.v1 import fleet_pb2, stats_pb2

COPY_INLINE_MAX = 1 << 20
"""Bytes; a copy of so many takes about as long as handing it to a thread."""

T = TypeVar("T")


class AsyncClient:
    """See `sync.Client`."""

    def __init__(self, client: Client) -> None:
        """Use `connect_async`."""
        self._client = client

    def __repr__(self) -> str:
        return f"Async{self._client!r}"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def connected(self) -> bool:
        return self._client.connected

    @property
    def tenant(self) -> str:
        return self._client.tenant

    @property
    def protection(self) -> Protection:
        return self._client.protection

    @property
    def boot_id(self) -> bytes:
        return self._client.boot_id

    @property
    def lease_ttl_ms(self) -> int:
        return self._client.lease_ttl_ms

    @property
    def counters(self) -> dict[str, int]:
        return self._client.counters

    async def open(self, spec: NamespaceSpec, *, timeout_s: float | None = None) -> AsyncNamespace:
        namespace = self._client.unopened(spec)
        await drive_async(namespace.opening(timeout_s))
        return AsyncNamespace(namespace)

    async def adopt(self, fd: int, size_bytes: int, *, timeout_s: float | None = None) -> Region:
        return await asyncio.to_thread(self._client.adopt, fd, size_bytes, timeout_s=timeout_s)

    async def publish_queue(
        self,
        model: str,
        hints: Sequence[Hint],
        *,
        removed: Sequence[bytes] = (),
        snapshot: bool = True,
        ttl_ms: int = 0,
        number: int = 0,
        timeout_s: float | None = None,
    ) -> QueueAccepted:
        return await asyncio.to_thread(
            self._client.publish_queue,
            model,
            hints,
            removed=removed,
            snapshot=snapshot,
            ttl_ms=ttl_ms,
            number=number,
            timeout_s=timeout_s,
        )

    async def apply_actions(
        self,
        model: str,
        actions: Sequence[HintAction],
        *,
        cancelled: Sequence[bytes] = (),
        timeout_s: float | None = None,
    ) -> ActionsApplied:
        return await asyncio.to_thread(
            self._client.apply_actions, model, actions, cancelled=cancelled, timeout_s=timeout_s
        )

    async def prompt_keys(
        self, model: str, tokens: Tokens, *, timeout_s: float | None = None
    ) -> list[ChunkKey]:
        return await asyncio.to_thread(self._client.prompt_keys, model, tokens, timeout_s=timeout_s)

    async def prompts(
        self, model: str, tokens: Tokens, *, timeout_s: float | None = None
    ) -> list[tuple[NamespaceId, list[ChunkKey]]]:
        return await asyncio.to_thread(self._client.prompts, model, tokens, timeout_s=timeout_s)

    async def route(
        self,
        model: str,
        *,
        tokens: Tokens | None = None,
        keys: Sequence[ChunkKey] = (),
        session: bytes = b"",
        timeout_s: float | None = None,
    ) -> fleet_pb2.RouteReply:
        return await asyncio.to_thread(
            self._client.route, model, tokens=tokens, keys=keys, session=session, timeout_s=timeout_s
        )

    async def only_model(self, *, timeout_s: float | None = None) -> str:
        return await asyncio.to_thread(self._client.only_model, timeout_s=timeout_s)

    async def stats(self, *, timeout_s: float | None = None) -> stats_pb2.StatsReply:
        return await asyncio.to_thread(self._client.stats, timeout_s=timeout_s)

    async def unary(
        self,
        stub: Callable[[grpc.Channel], Any],
        method: str,
        request: Any,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        return await asyncio.to_thread(self._client.unary, stub, method, request, timeout_s=timeout_s)

    async def wait_connected(self, timeout_s: float | None = None) -> None:
        await asyncio.to_thread(self._client.wait_connected, timeout_s)

    async def close(self) -> None:
        await asyncio.to_thread(self._client.close)


class AsyncNamespace:
    """See `namespace.Namespace`."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace

    def __repr__(self) -> str:
        return f"Async{self._namespace!r}"

    @property
    def spec(self) -> NamespaceSpec:
        return self._namespace.spec

    @property
    def salt(self) -> bytes:
        return self._namespace.salt

    @property
    def notes(self) -> tuple[str, ...]:
        return self._namespace.notes

    def keys(self, tokens: Tokens, parent: ChunkKey = ROOT) -> list[ChunkKey]:
        return self._namespace.keys(tokens, parent)

    def tail_key(self, tokens: Tokens, parent: ChunkKey) -> ChunkKey:
        return self._namespace.tail_key(tokens, parent)

    async def match(
        self, keys: Sequence[ChunkKey], *, token_count: int = 0, timeout_s: float | None = None
    ) -> Matched:
        return await drive_async(self._namespace.matching(keys, token_count, timeout_s))

    def peek(self, keys: Sequence[ChunkKey], *, token_count: int = 0) -> Peeked | None:
        return self._namespace.peek(keys, token_count=token_count)

    def note_lookup(self, keys: Sequence[ChunkKey], peeked: Peeked) -> None:
        self._namespace.note_lookup(keys, peeked)

    async def read(
        self,
        keys: Sequence[ChunkKey],
        *,
        shards: Sequence[int] = (),
        wait_ms: int = 0,
        any_order: bool = False,
        promote: bool = True,
        ttl_ms: int = 0,
        verify: float | None = None,
        pin: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncReadLease:
        return AsyncReadLease(
            await drive_async(
                self._namespace.reading(
                    keys, shards, wait_ms, any_order, ttl_ms, verify, timeout_s, promote, pin=pin
                )
            )
        )

    async def write(
        self,
        keys: Sequence[ChunkKey],
        *,
        parent: ChunkKey = ROOT,
        parents: Sequence[ChunkKey] = (),
        token_counts: Sequence[int] = (),
        shards: Sequence[int] = (),
        derived: bool = False,
        maker: bytes = b"",
        transient: bool = False,
        staged: bool = True,
        timeout_s: float | None = None,
    ) -> AsyncWriteBatch:
        return AsyncWriteBatch(
            await drive_async(
                self._namespace.writing(
                    self._namespace.asked(
                        keys, parent, parents, token_counts, shards, derived, maker, transient
                    ),
                    staged,
                    timeout_s,
                )
            )
        )

    async def put(
        self,
        keys: Sequence[ChunkKey],
        values: Sequence[Any] | npt.NDArray[Any],
        *,
        parent: ChunkKey = ROOT,
        parents: Sequence[ChunkKey] = (),
        token_counts: Sequence[int] = (),
        shards: Sequence[int] = (),
        derived: bool = False,
        maker: bytes = b"",
        transient: bool = False,
        wait: Wait = Wait.VISIBLE,
        timeout_s: float | None = None,
    ) -> PutOutcome:
        space = self._namespace
        asked = space.asked(keys, parent, parents, token_counts, shards, derived, maker, transient)
        operation = space.putting(asked, values, wait, timeout_s)
        if sum(map(_size, values)) < COPY_INLINE_MAX:
            return await drive_async(operation)
        return await _in_thread(lambda: drive(operation))

    async def get_session(self, name: str | bytes, *, timeout_s: float | None = None) -> SessionInfo | None:
        return await drive_async(self._namespace.getting_session(name, timeout_s))

    async def find_session(self, name: str | bytes, *, timeout_s: float | None = None) -> SessionInfo | None:
        return await drive_async(self._namespace.finding_session(name, timeout_s))

    async def update_session(
        self,
        name: str | bytes,
        *,
        expected_version: int,
        keep: int,
        append: Sequence[SessionEntry],
        timeout_s: float | None = None,
    ) -> SessionInfo:
        return await drive_async(
            self._namespace.updating_session(name, expected_version, keep, append, timeout_s)
        )

    async def truncate(
        self,
        name: str | bytes,
        *,
        expected_version: int,
        first_token: int,
        token_count: int,
        close_gap: bool = False,
        timeout_s: float | None = None,
    ) -> SessionInfo:
        return await drive_async(
            self._namespace.truncating(name, expected_version, first_token, token_count, close_gap, timeout_s)
        )

    async def fork(
        self, name: str | bytes, new_name: str | bytes, *, timeout_s: float | None = None
    ) -> SessionInfo:
        return await drive_async(self._namespace.forking(name, new_name, timeout_s))

    async def report_duplicates(
        self,
        keys: Sequence[ChunkKey],
        checksums: Sequence[int],
        *,
        shards: Sequence[int] = (),
        maker: bytes = b"",
        timeout_s: float | None = None,
    ) -> int:
        return await drive_async(
            self._namespace.reporting_duplicates(keys, checksums, shards, maker, timeout_s)
        )

    async def report_wrong(
        self, keys: Sequence[ChunkKey], *, healthy: bool, maker: bytes = b"", timeout_s: float | None = None
    ) -> int:
        return await drive_async(self._namespace.reporting_wrong(keys, healthy, maker, timeout_s))

    async def report_resident(
        self, keys: Sequence[ChunkKey], *, ttl_ms: int = 0, timeout_s: float | None = None
    ) -> tuple[int, ...]:
        return await drive_async(self._namespace.reporting_resident(keys, ttl_ms, timeout_s))

    async def forget(
        self,
        name: str | bytes | None = None,
        *,
        keys: Sequence[ChunkKey] = (),
        timeout_s: float | None = None,
    ) -> Forgotten:
        return await drive_async(self._namespace.forgetting(name, keys, timeout_s))

    async def publish_queue(
        self,
        hints: Sequence[Hint],
        *,
        removed: Sequence[bytes] = (),
        snapshot: bool = True,
        ttl_ms: int = 0,
        number: int = 0,
        timeout_s: float | None = None,
    ) -> QueueAccepted:
        return await drive_async(
            self._namespace.publishing_queue(hints, removed, snapshot, ttl_ms, number, timeout_s)
        )

    async def apply_actions(
        self,
        actions: Sequence[HintAction],
        *,
        cancelled: Sequence[bytes] = (),
        timeout_s: float | None = None,
    ) -> ActionsApplied:
        return await drive_async(self._namespace.applying_actions(actions, cancelled, timeout_s))

    def touch(self, keys: Sequence[ChunkKey]) -> bool:
        return self._namespace.touch(keys)


class AsyncReadLease:
    """See `lease.ReadLease`."""

    def __init__(self, lease: ReadLease) -> None:
        self._lease = lease

    def __repr__(self) -> str:
        return f"Async{self._lease!r}"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()

    @property
    def hits(self) -> int:
        return self._lease.hits

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        return self._lease.outcomes

    @property
    def reasons(self) -> tuple[Reason, ...]:
        return self._lease.reasons

    @property
    def alive(self) -> bool:
        return self._lease.alive

    async def copy_to(
        self,
        index: int,
        out: Any,
        *,
        shard: int | None = None,
        layer: int | None = None,
        offset: int | None = None,
    ) -> bool:
        def copy() -> bool:
            return self._lease.copy_to(index, out, shard=shard, layer=layer, offset=offset)

        if _size(out) < COPY_INLINE_MAX and not self._lease.may_ask:
            return copy()
        return await _in_thread(copy)

    async def copy_many(self, pieces: Sequence[tuple[int, int, int, Any]]) -> bool:
        if _size_of(pieces) < COPY_INLINE_MAX and not self._lease.may_ask:
            return self._lease.copy_many(pieces)
        return await _in_thread(lambda: self._lease.copy_many(pieces))

    def unsafe_view(self, index: int, shard: int | None = None) -> memoryview | None:
        """Of a read without `pin` the first view asks the daemon for one, which holds up the event loop."""
        return self._lease.unsafe_view(index, shard)

    async def settled(self, timeout_s: float | None = None) -> tuple[int, ...]:
        return await asyncio.to_thread(self._lease.settled, timeout_s)

    def release(self) -> None:
        self._lease.release()


class AsyncWriteBatch:
    """See `batch.WriteBatch`."""

    def __init__(self, batch: WriteBatch) -> None:
        self._batch = batch

    def __repr__(self) -> str:
        return f"Async{self._batch!r}"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._batch.abort()

    @property
    def results(self) -> tuple[GrantResult, ...]:
        return self._batch.results

    @property
    def granted(self) -> tuple[int, ...]:
        return self._batch.granted

    def buffer(self, index: int, shard: int | None = None) -> npt.NDArray[np.uint8]:
        return self._batch.buffer(index, shard)

    async def copy_from(self, index: int, source: Any, *, shard: int | None = None) -> None:
        if _size(source) < COPY_INLINE_MAX:
            self._batch.copy_from(index, source, shard=shard)
        else:
            await _in_thread(lambda: self._batch.copy_from(index, source, shard=shard))

    async def copy_many(self, pieces: Sequence[tuple[int, int | None, Any]]) -> None:
        if _size_of(pieces) < COPY_INLINE_MAX:
            self._batch.copy_many(pieces)
        else:
            await _in_thread(lambda: self._batch.copy_many(pieces))

    def written(self, index: int, shard: int | None = None) -> None:
        self._batch.written(index, shard)

    async def fill(self, region: Region, offsets: Sequence[int], *, timeout_s: float | None = None) -> None:
        await drive_async(self._batch.filling(region, offsets, timeout_s))

    async def commit(self, *, wait: Wait = Wait.VISIBLE, timeout_s: float | None = None) -> CommitOutcome:
        return await drive_async(self._batch.committing(wait, timeout_s))

    def abort(self) -> None:
        self._batch.abort()


async def _in_thread(copy: Callable[[], T]) -> T:
    """Cancelled, it never begins, or has ended: nothing touches the caller's memory any more."""
    result: Future[T] = Future()

    def run() -> None:
        if result.set_running_or_notify_cancel():
            try:
                result.set_result(copy())
            except BaseException as problem:
                result.set_exception(problem)

    asyncio.get_running_loop().run_in_executor(None, run)
    ended = asyncio.wrap_future(result)
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        while not result.cancel() and not ended.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([ended])
        raise


def _size(out: Any) -> int:
    """In bytes; 0 for what is no buffer: whoever copies it says so."""
    try:
        size: int = getattr(out, "nbytes", 0) or memoryview(out).nbytes
    except TypeError:
        return 0
    return size


def _size_of(pieces: Sequence[Any]) -> int:
    """Of all that stands last in its piece."""
    try:
        return sum(_size(piece[-1]) for piece in pieces)
    except (TypeError, IndexError, KeyError):
        return 0


async def connect_async(
    run_dir: str,
    *,
    engine_group: str = "",
    rank: int = 0,
    timeout_s: float = TIMEOUT_S,
    staging_bytes: int = STAGING_BYTES,
    directory: bool = True,
) -> AsyncClient:
    """See `sync.connect`. Who is cancelled meanwhile leaves no connection behind."""
    connecting: Future[Client] = Future()

    def make() -> None:
        if not connecting.set_running_or_notify_cancel():
            return
        try:
            client = connect(
                run_dir,
                engine_group=engine_group,
                rank=rank,
                timeout_s=timeout_s,
                staging_bytes=staging_bytes,
                directory=directory,
            )
        except BaseException as problem:
            connecting.set_exception(problem)
        else:
            connecting.set_result(client)

    threading.Thread(target=make, name="kvstore-client-connect", daemon=True).start()
    try:
        return AsyncClient(await asyncio.wrap_future(connecting))
    except asyncio.CancelledError:
        connecting.add_done_callback(_close_unwanted)
        raise


def _close_unwanted(connecting: Future[Client]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        threading.Thread(target=connecting.result().close, name="kvstore-client-close", daemon=True).start()
