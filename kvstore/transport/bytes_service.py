"""Get and Put: KV bytes in frames, for callers that share no memory with the daemon.

A Get or Put is carried out by a *guest*: a worker of its own that the daemon runs on the caller's behalf and that lives
as long as the call. So a stream that breaks is a worker that left, and the rules of leases, reservations, quotas and
quarantine hold as for everybody. Before that, the caller's own identity must have opened the namespace.

No byte is copied or hashed on the loop's thread. What a Put brings is written, by threads of this service, into memory
of the daemon's own (`_Intake`), which the guest lends as a region; a Fill has the copier bring each whole shard from
there into its slots, so what becomes of slots whose reservation ends meanwhile is the core's business, as ever. While
one shard is filled the next comes in.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import xxhash

from kvstore import memory, wire
from kvstore.core import events
from kvstore.core.events import Ticket
from kvstore.errors import BadRequest, DeadlineExceeded, Exhausted, Precondition
from kvstore.layout import CHUNK_TOKENS_MAX
from kvstore.tiers.regions import Regions
from kvstore.transport import decoding, rpc
from kvstore.transport.attach import REQUEST_TIMEOUT_S
from kvstore.transport.rpc import Context, Handlers
from kvstore.transport.service import Service
from kvstore.types import (
    GrantResult,
    NamespaceId,
    RegionId,
    WorkerId,
)
from kvstore.v1 import bytes_pb2

Result = TypeVar("Result")

BYTES_SERVICE = "kvstore.v1.Bytes"

FRAME_BYTES = 1 << 20
FRAME_BYTES_MIN = 4 << 10
FRAME_BYTES_MAX = 2 << 20
THREADS = 2
GUESTS_MAX = 32
"""Gets and Puts at one time."""
PAYLOAD_TAG = bytes([15 << 3 | 2])
"""Field 15, length-delimited: the last field of both frames."""
CALL_TIMEOUT_S = 600.0
"""How long a Get or Put may take in all, however steadily its frames trickle: 1 GiB at 1.8 MB/s."""


@dataclass(frozen=True, slots=True)
class _Intake:
    """Where the bytes of a Put come in: one half for each of two shards, in turn."""

    fd: int
    region: RegionId
    """Of the guest: the same memory, as the copier reads it."""
    shard_bytes: int


class BytesService:
    def __init__(
        self, service: Service, numbers: Iterator[int], regions: Regions, *, intake_bytes_max: int
    ) -> None:
        """`numbers` gives ids for guests that no other worker has; `intake_bytes_max`: of all Puts that run, but for a
        single one."""
        self._service = service
        self._regions = regions
        self._intake_bytes_max = intake_bytes_max
        self._intake_bytes = 0
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvstored-bytes")
        self._loop = service.loop
        self._numbers = numbers
        self._guests = 0

    def __repr__(self) -> str:
        return f"BytesService({self._guests} guests)"

    def handlers(self) -> Handlers:
        return Handlers(
            {
                f"/{BYTES_SERVICE}/Get": self._service.method(self._get, "Bytes/Get"),
                f"/{BYTES_SERVICE}/Put": self._service.method(self._put, "Bytes/Put"),
            }
        )

    # ----------------------------------------------------------------------------------------------------- get

    async def _get(self, caller: WorkerId, raw: bytes, context: Context) -> None:
        self._service.check_not_draining()
        message = wire.parse(bytes_pb2.GetRequest, raw)
        namespace = decoding.namespace_id(message.namespace_id)
        key = decoding.chunk_keys("key", (message.key,))
        shards = decoding.shard_numbers(message.shards)
        frame_bytes = FRAME_BYTES
        if message.frame_bytes:
            frame_bytes = decoding.number(
                "frame_bytes", message.frame_bytes, FRAME_BYTES_MAX, low=FRAME_BYTES_MIN
            )
        async with self._guest(caller, namespace) as guest:
            # Before the lease began, and so before whatever time the peer takes to accept the first frame.
            checked_at = time.monotonic()
            lease: events.Acquired = await self._ask(events.Acquire(Ticket(guest), namespace, key, shards))
            first = bytes_pb2.GetFrame(
                outcome=lease.outcomes[0],
                reason=lease.reasons[0],
                shard_bytes=[extent.length for extent in lease.extents],
                checksum=[extent.checksum for extent in lease.extents],
            )
            await rpc.write(context, first.SerializeToString(), self._service.peer_timeout_s)
            for extent in lease.extents:
                for start in range(0, extent.length, frame_bytes):
                    await self._service.carry(context, caller, min(frame_bytes, extent.length - start))
                    if time.monotonic() - checked_at > lease.ttl_ms / 3000:
                        checked_at = time.monotonic()
                        await self._renew(guest, lease)
                    # The lease holds for two thirds of its time more: nothing else can come into these slots meanwhile.
                    piece = self._loop.arena.view(
                        extent.segment, extent.offset + start, min(frame_bytes, extent.length - start)
                    )
                    frame = await self._in_thread(payload_frame, piece.data)
                    await rpc.write(context, frame, self._service.peer_timeout_s)

    async def _renew(self, guest: WorkerId, lease: events.Acquired) -> None:
        renewed: events.Renewed = await self._ask(events.Renew(Ticket(guest), (lease.lease,)))
        if not renewed.ttl_ms[0]:
            raise Precondition(
                "the lease ended while the bytes were being sent", remedy="drop them and get again"
            )

    # ----------------------------------------------------------------------------------------------------- put

    async def _put(self, caller: WorkerId, raw: bytes, context: Context) -> bytes:
        """`raw` is the first frame."""
        self._service.check_not_draining()
        first = wire.parse(bytes_pb2.PutFrame, raw)
        namespace = decoding.namespace_id(first.namespace_id)
        key = decoding.chunk_keys("key", (first.key,))
        event = events.Reserve(
            Ticket(WorkerId(0)),
            namespace,
            key,
            parent=decoding.chunk_keys("parent", (first.parent,), empty=True)[0],
            token_counts=(
                (decoding.number("token_count", first.token_count, CHUNK_TOKENS_MAX),)
                if first.token_count
                else ()
            ),
            shards=decoding.shard_numbers(first.shards),
            derived=first.derived,
            maker=decoding.maker_id(first.maker),
        )
        frames = self._payloads(caller, memoryview(first.payload), context)
        async with self._guest(caller, namespace) as guest, contextlib.aclosing(frames):
            reserved: events.Reserved = await self._ask(replace(event, ticket=Ticket(guest)))
            match reserved.results[0]:
                case GrantResult.GRANTED:
                    return await self._fill(guest, reserved, frames)
                case GrantResult.ALREADY:
                    differs = await self._differs(guest, event, frames)
                    reply = bytes_pb2.PutReply(grant=GrantResult.ALREADY, differs=differs)
                case result:
                    reply = bytes_pb2.PutReply(grant=result)
        return reply.SerializeToString()

    async def _fill(
        self, guest: WorkerId, reserved: events.Reserved, frames: AsyncIterator[memoryview]
    ) -> bytes:
        """Receive the bytes, have each shard filled when it is whole, and commit."""
        sizes = [extent.length for extent in reserved.extents]
        with self._intake(guest, max(sizes)) as intake:
            filling: asyncio.Task[Any] | None = None
            try:
                async for index, offset, piece in pieces(sizes, frames):
                    if reserved.reservation not in self._loop.store.state.reservations:
                        raise Precondition(
                            "the reservation ended while the bytes came in", remedy="put again, faster"
                        )
                    half = index % 2 * intake.shard_bytes
                    await self._in_thread(write_all, intake.fd, piece, half + offset)
                    if offset + len(piece) < sizes[index]:
                        continue
                    if filling is not None:
                        await filling
                    fill = events.Fill(
                        Ticket(guest), reserved.reservation, intake.region, (half,), numbers=(index,)
                    )
                    filling = asyncio.create_task(self._ask(fill))
                    filling.add_done_callback(_note_end)
                if filling is not None:
                    await filling
            finally:
                if filling is not None and not filling.done():
                    filling.cancel()
            committed: events.Committed = await self._ask(events.Commit(Ticket(guest), reserved.reservation))
        reply = bytes_pb2.PutReply(grant=GrantResult.GRANTED, result=committed.results[0])
        return reply.SerializeToString()

    @contextlib.contextmanager
    def _intake(self, guest: WorkerId, shard_bytes: int) -> Iterator[_Intake]:
        """Memory for two shards, one that comes in and one that is filled. Raises Exhausted."""
        size = 2 * shard_bytes
        if self._intake_bytes + size > self._intake_bytes_max and self._intake_bytes:
            raise Exhausted(
                f"Puts that run have {self._intake_bytes} of {self._intake_bytes_max} bytes for what comes in",
                remedy="try again later, or raise the daemon's staging_bytes_max",
            )
        self._intake_bytes += size
        fd = -1
        try:
            try:
                fd = memory.create_memfd(f"kvs-put-{guest}", size)
                memory.add_seals(fd, memory.SEALS_RESIZE)
                region = self._regions.adopt(guest, os.dup(fd), size)
            except OSError as problem:
                raise Exhausted(f"no memory for what comes in: {problem.strerror}") from None
            yield _Intake(fd, region, shard_bytes)
        finally:
            self._regions.drop_all(guest)
            if fd >= 0:
                os.close(fd)
            self._intake_bytes -= size

    async def _in_thread(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Its end is waited for, whatever becomes of the call: nobody may reuse what it works on before."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise

    async def _differs(
        self, guest: WorkerId, event: events.Reserve, frames: AsyncIterator[memoryview]
    ) -> bool:
        """Whether the caller's bytes are others than those that were committed before; False where they are gone."""
        lease: events.Acquired = await self._ask(
            events.Acquire(Ticket(guest), event.namespace, event.keys, event.shards)
        )
        sizes = [extent.length for extent in lease.extents]
        if not sizes:
            return False
        sums = [xxhash.xxh3_64() for _ in sizes]
        async for index, _, piece in pieces(sizes, frames):
            await self._in_thread(sums[index].update, piece)
        return any(
            mine.intdigest() != extent.checksum for mine, extent in zip(sums, lease.extents, strict=True)
        )

    async def _payloads(
        self, caller: WorkerId, payload: memoryview, context: Context
    ) -> AsyncGenerator[memoryview, None]:
        """What the frames of a Put bring: `payload` came with the first."""
        while True:
            await self._service.carry(context, caller, len(payload))
            yield payload
            raw = await rpc.read(context, self._service.peer_timeout_s)
            if raw is None:
                return
            payload = payload_of(raw)

    # -------------------------------------------------------------------------------------------------- guests

    @contextlib.asynccontextmanager
    async def _guest(self, caller: WorkerId, namespace: NamespaceId) -> AsyncIterator[WorkerId]:
        """A worker that opened what the caller opened, for one call. Raises NotFound or Denied when the caller did
        not open it."""
        state = self._loop.store.state
        opened = state.own_namespace(state.worker(caller), namespace)
        if self._guests >= GUESTS_MAX:
            raise Exhausted(f"{GUESTS_MAX} Gets and Puts are running already", remedy="try again later")
        guest = WorkerId(next(self._numbers))
        self._guests += 1
        self._loop.post(events.WorkerJoined(guest, tenant=opened.tenant, engine_group=""))
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await self._ask(events.Open(Ticket(guest), opened.spec))
                yield guest
        except TimeoutError:
            raise DeadlineExceeded(
                f"the call took longer than {CALL_TIMEOUT_S:.0f} s", remedy="send or read faster"
            ) from None
        finally:
            self._guests -= 1
            self._loop.post(events.WorkerLeft(guest))

    async def _ask(self, event: Any) -> Any:
        return await self._loop.ask(event, REQUEST_TIMEOUT_S)


def _note_end(task: asyncio.Task[Any]) -> None:
    """Of a fill that nobody waits for any more: what it says matters to nobody."""
    if not task.cancelled():
        task.exception()


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Lets go of the interpreter's lock. Raises Exhausted."""
    try:
        while len(data):
            done = os.pwrite(fd, data, offset)
            data, offset = data[done:], offset + done
    except OSError as problem:
        raise Exhausted(f"no memory for what comes in: {problem.strerror}") from None


async def pieces(
    sizes: Sequence[int], frames: AsyncIterator[memoryview]
) -> AsyncIterator[tuple[int, int, memoryview]]:
    """(shard's place, offset in it, bytes) of everything that a caller sends, which must be `sizes` exactly."""
    total = sum(sizes)
    index = offset = received = 0
    async for payload in frames:
        received += len(payload)
        if received > total:
            raise BadRequest(
                f"the chunk has {total} bytes", field="payload", value=f"{received} bytes or more"
            )
        while len(payload):
            piece = payload[: sizes[index] - offset]
            yield index, offset, piece
            payload = payload[len(piece) :]
            offset += len(piece)
            if offset == sizes[index]:
                index, offset = index + 1, 0
    if received < total:
        raise BadRequest(f"the chunk has {total} bytes", field="payload", value=f"{received} bytes")


def payload_frame(payload: memoryview) -> bytes:
    """A frame that is nothing but payload, encoded by hand: one copy instead of protobuf's two."""
    return b"".join((PAYLOAD_TAG, varint(len(payload)), payload))


def payload_of(frame: bytes) -> memoryview:
    """The payload of a later frame: of the usual form without a copy, else by protobuf."""
    head = frame[:11]
    if head.startswith(PAYLOAD_TAG):
        length = shift = 0
        for at, byte in enumerate(head[1:], start=2):
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                if length == len(frame) - at:
                    return memoryview(frame)[at:]
                break
    return memoryview(wire.parse(bytes_pb2.PutFrame, frame).payload)


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
