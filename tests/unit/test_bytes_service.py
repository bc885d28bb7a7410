"""Get and Put copy and hash on threads of their own: the loop answers others meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.core import events as ev
from kvstore.errors import Exhausted
from kvstore.tiers.regions import Regions
from kvstore.transport import bytes_service
from kvstore.transport.bytes_service import BytesService
from kvstore.types import (
    CommitResult,
    Extent,
    Extents,
    GrantResult,
    LeaseId,
    Outcome,
    Reason,
    ReservationId,
    SegmentId,
    WorkerId,
)
from kvstore.v1 import bytes_pb2

SHARD = 3 << 20
BOUND_S = 30.0
EXTENT = Extent(SegmentId(0), 0, SHARD, 0, 0)


class Loop:
    """Answers as the core does; a Fill reads the region as the copier does."""

    def __init__(self, regions: Regions) -> None:
        self.regions = regions
        self.slot = np.zeros(SHARD, np.uint8)
        self.held = False
        self.asked: list[str] = []
        state = SimpleNamespace(
            worker=lambda number: number,
            own_namespace=lambda worker, number: SimpleNamespace(tenant="t", spec=None),
            reservations={ReservationId(7): None},
        )
        self.store = SimpleNamespace(state=state)
        self.arena = SimpleNamespace(view=lambda segment, offset, size: self.slot[offset : offset + size])

    def post(self, event: Any) -> None:
        pass

    async def ask(self, event: Any, timeout_s: float) -> Any:
        self.asked.append(type(event).__name__)
        match event:
            case ev.Reserve():
                result = GrantResult.ALREADY if self.held else GrantResult.GRANTED
                return SimpleNamespace(results=(result,), reservation=ReservationId(7), extents=[EXTENT])
            case ev.Fill():
                region = self.regions.of(event.ticket.worker, event.region)
                region.read_into(self.slot.data, event.offsets[0])
                return ev.Filled()
            case ev.Commit():
                return SimpleNamespace(results=(CommitResult.VISIBLE,))
            case ev.Acquire():
                extents = Extents.of([EXTENT])
                return ev.Acquired(LeaseId(1), 60_000, (Outcome.HIT,), (Reason.NONE,), extents, ev.NO_BACKLOG)
        return None


class Peer:
    def __init__(self, frames: list[bytes]) -> None:
        self.frames = frames
        self.written: list[bytes] = []

    async def read(self) -> Any:
        import grpc

        return self.frames.pop(0) if self.frames else grpc.aio.EOF

    async def write(self, message: bytes) -> None:
        self.written.append(message)


def service(loop: Loop, *, intake_bytes_max: int = 64 << 20) -> BytesService:
    async def carry(context: Any, caller: Any, size: int) -> None:
        pass

    around: Any = SimpleNamespace(
        loop=loop, peer_timeout_s=BOUND_S, check_not_draining=lambda: None, carry=carry
    )
    return BytesService(around, iter(range(1, 100)), loop.regions, intake_bytes_max=intake_bytes_max)


def payload() -> bytes:
    return np.random.default_rng(1).integers(0, 256, SHARD, np.uint8).tobytes()


def frames_of(data: bytes) -> list[bytes]:
    first = bytes_pb2.PutFrame(namespace_id=1, key=b"k", payload=data[: 1 << 20])
    rest = [
        bytes_pb2.PutFrame(payload=data[at : at + (1 << 20)]) for at in range(1 << 20, len(data), 1 << 20)
    ]
    return [frame.SerializeToString() for frame in (first, *rest)]


class Blocked:
    """Work that goes on only once the loop has answered somebody else."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self.began = asyncio.Event()
        self.answered = threading.Event()
        self.in_time: list[bool] = []
        self._loop = asyncio.get_running_loop()
        self._work = work

    def __call__(self, *arguments: Any) -> Any:
        self._loop.call_soon_threadsafe(self.began.set)
        self.in_time.append(self.answered.wait(BOUND_S if threading.current_thread() is not MAIN else 0.1))
        return self._work(*arguments)

    async def answer_others(self, loop: Loop) -> None:
        await self.began.wait()
        await loop.ask(ev.Match(ev.Ticket(WorkerId(5)), 1, ()), BOUND_S)  # type: ignore[arg-type]
        self.answered.set()


MAIN = threading.main_thread()


@pytest.mark.parametrize("what", ["put", "compare", "get"])
def test_the_loop_answers_while_bytes_are_copied(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    async def run() -> None:
        loop = Loop(Regions())
        loop.held = what == "compare"
        data = payload()
        loop.slot[:] = np.frombuffer(data, np.uint8) if what != "put" else 0
        made = service(loop)
        if what == "compare":
            blocked = Blocked(lambda *_: None)
            sums = SimpleNamespace(update=blocked, intdigest=lambda: 0)
            monkeypatch.setattr(bytes_service, "xxhash", SimpleNamespace(xxh3_64=lambda: sums))
        else:
            name = "write_all" if what == "put" else "payload_frame"
            blocked = Blocked(getattr(bytes_service, name))
            monkeypatch.setattr(bytes_service, name, blocked)
        others = asyncio.create_task(blocked.answer_others(loop))
        if what == "get":
            peer: Any = Peer([])
            await made._get(
                WorkerId(1), bytes_pb2.GetRequest(namespace_id=1, key=b"k").SerializeToString(), peer
            )
            _, *rest = [bytes_pb2.GetFrame.FromString(frame) for frame in peer.written]
            assert b"".join(frame.payload for frame in rest) == data
        else:
            first, *rest_of = frames_of(data)
            peer = Peer(rest_of)
            reply = bytes_pb2.PutReply.FromString(await made._put(WorkerId(1), first, peer))
            assert reply.grant == (GrantResult.ALREADY if what == "compare" else GrantResult.GRANTED)
            if what == "put":
                assert loop.slot.tobytes() == data
                assert loop.regions.stats().regions == 0, "memory is kept"
        await others
        assert blocked.in_time and all(blocked.in_time), "the loop stood still meanwhile"
        assert "Match" in loop.asked

    asyncio.run(run())


def test_what_comes_in_is_bounded() -> None:
    async def run() -> None:
        made = service(Loop(Regions()), intake_bytes_max=3 * SHARD)
        with (
            made._intake(WorkerId(1), SHARD),
            pytest.raises(Exhausted, match="staging_bytes_max"),
            made._intake(WorkerId(2), SHARD),
        ):
            pass
        with made._intake(WorkerId(3), 100 * SHARD):  # a single one may be as large as it must
            pass
        assert made._intake_bytes == 0

    asyncio.run(run())
