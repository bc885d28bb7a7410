"""The daemon's end of a fast lane, with a scripted core and a bare socket as its peer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore import wire
from kvstore.core import events as ev
from kvstore.errors import (
    BadRequest,
    DeadlineExceeded,
    Exhausted,
    Precondition,
    StoreError,
    Unauthenticated,
)
from kvstore.transport import lane as lane_module
from kvstore.transport.attach import OUTSTANDING_MAX, PUSHES_MAX, Attached
from kvstore.transport.lane import READ_BYTES, UNSENT_PAUSE_BYTES, Lane
from kvstore.types import NamespaceId, WorkerId
from kvstore.v1 import store_pb2

WORKER = WorkerId(1)
BOUND_S = 20.0
FRAME_BYTES_MAX = 1 << 20


class Core:
    """A loop that answers when told to."""

    def __init__(self) -> None:
        self.posted: list[ev.Event] = []
        self.channels: dict[int, Callable[[ev.Answer], None]] = {}

    def channel(self, answered: Callable[[ev.Answer], None], timeout_s: float) -> int:
        number = len(self.posted) + 1
        self.channels[number] = answered
        return number

    def drop_channel(self, number: int) -> None:
        self.channels.pop(number, None)

    def post(self, event: ev.Event) -> None:
        self.posted.append(event)

    def turn(self, work: Callable[[], None]) -> None:
        work()

    def answer(self, answer: ev.Answer, number: int | None = None) -> None:
        self.channels.pop(number or min(self.channels))(answer)


class Rig:
    def __init__(self, *, peer_timeout_s: float = BOUND_S, buffer_bytes: int = 0) -> None:
        self.core = Core()
        self.ended: list[Attached] = []
        ours, self.peer = socket.socketpair()
        self.peer.setblocking(False)
        if buffer_bytes:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        service: Any = SimpleNamespace(loop=self.core, draining=False, peer_timeout_s=peer_timeout_s)
        self.lane = Lane(service, WORKER, ours, frame_bytes_max=FRAME_BYTES_MAX, ended=self.ended.append)
        self.lane.start()
        self.received = b""
        self.closed = False

    def send(self, **body: Any) -> None:
        self.peer.sendall(framed(store_pb2.AttachRequest(**body)))

    def read(self) -> list[store_pb2.AttachReply]:
        """All whole replies that have come and were not returned before."""
        try:
            while data := self.peer.recv(1 << 20):
                self.received += data
            self.closed = True
        except BlockingIOError:
            pass
        except ConnectionResetError:  # the lane ended with requests of ours that it never read
            self.closed = True
        found = []
        while len(self.received) >= 4:
            end = 4 + int.from_bytes(self.received[:4], "little")
            if len(self.received) < end:
                break
            found.append(store_pb2.AttachReply.FromString(self.received[4:end]))
            self.received = self.received[end:]
        return found

    async def replies(self, count: int) -> list[store_pb2.AttachReply]:
        found: list[store_pb2.AttachReply] = []
        await until(lambda: found.extend(self.read()) or len(found) >= count)
        return found

    async def end(self) -> StoreError:
        """Why the lane ended, as it told its peer; it is closed."""
        found: list[store_pb2.AttachReply] = []
        await until(lambda: found.extend(self.read()) or self.closed)
        assert self.ended == [self.lane], "said once"
        assert not self.core.channels, "nobody waits for answers any more"
        return wire.error_from_proto(found[-1].ended)

    def close(self) -> None:
        self.lane.end(StoreError("the test is over"))
        self.lane._close("the test is over")
        self.peer.close()


def framed(message: Any) -> bytes:
    return wire.lane_frame(message.SerializeToString())


def match(number: int) -> store_pb2.MatchRequest:
    return store_pb2.MatchRequest(request_id=number, namespace_id=1, keys=[b"k"])


def beat(number: int) -> store_pb2.HeartbeatRequest:
    return store_pb2.HeartbeatRequest(request_id=number)


async def until(found: Callable[[], Any]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not found():  # noqa: ASYNC110 - the conditions are of many kinds
            await asyncio.sleep(0.001)


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.fixture
async def rigs() -> AsyncIterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(**settings: Any) -> Rig:
        made.append(Rig(**settings))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.fixture
async def rig(rigs: Callable[..., Rig]) -> Rig:
    return rigs()


# ------------------------------------------------------------------------------------------------------------ requests


async def test_answers_go_out_in_the_order_in_which_they_come(rig: Rig) -> None:
    rig.send(match=match(11), release_lease_ids=[5])
    rig.send(match=match(12))
    await until(lambda: len(rig.core.posted) == 3)
    assert rig.core.posted[0] == ev.Release(ev.Ticket(WORKER), (5,)), "before the request that it came with"
    rig.core.answer(ev.Matched(0, (), ()), 3)
    rig.core.answer(ev.Matched(1, (), ()), 2)
    found = await rig.replies(2)
    assert [(reply.request_id, reply.match.usable) for reply in found] == [(12, 0), (11, 1)]


async def test_however_the_bytes_are_cut(rig: Rig) -> None:
    """Messages end anywhere in what is read, and begin anywhere."""
    data = b"".join(framed(store_pb2.AttachRequest(heartbeat=beat(number))) for number in range(1, 9))
    for step in (1, 3, 7, len(data)):
        found: list[store_pb2.AttachReply] = []
        for start in range(0, len(data), step):
            rig.peer.sendall(data[start : start + step])
            await settle()
            found += rig.read()
        await until(lambda found=found: found.extend(rig.read()) or len(found) == 8)
        assert [reply.request_id for reply in found] == [*range(1, 9)]
    assert not rig.ended


async def test_a_message_longer_than_one_read(rig: Rig) -> None:
    keys = [bytes([number % 251]) * 64 for number in range(4096)]
    request = framed(
        store_pb2.AttachRequest(match=store_pb2.MatchRequest(request_id=1, namespace_id=1, keys=keys))
    )
    assert len(request) > 3 * READ_BYTES
    rig.peer.setblocking(True)
    await asyncio.to_thread(rig.peer.sendall, request)
    await until(lambda: rig.core.posted)
    (asked,) = rig.core.posted
    assert isinstance(asked, ev.Match) and list(asked.keys) == keys


async def test_a_lane_that_is_not_answered_is_not_read_on(rig: Rig) -> None:
    def feed() -> None:
        for number in range(1, OUTSTANDING_MAX + 11):
            rig.send(match=match(number))

    rig.peer.setblocking(True)
    await asyncio.wait_for(asyncio.to_thread(feed), BOUND_S)
    rig.peer.setblocking(False)
    await until(lambda: len(rig.core.posted) == OUTSTANDING_MAX)
    await settle()
    assert len(rig.core.posted) == OUTSTANDING_MAX
    for _ in range(5):
        rig.core.answer(ev.Done())
    await until(lambda: len(rig.core.posted) == OUTSTANDING_MAX + 5)
    while rig.core.channels:
        rig.core.answer(ev.Done())
        await asyncio.sleep(0)
    assert len(await rig.replies(OUTSTANDING_MAX + 10)) == OUTSTANDING_MAX + 10, (
        "also what waited in our memory"
    )


@pytest.mark.parametrize("half_close", [False, True])
async def test_more_than_may_be_unanswered_in_one_go(rig: Rig, half_close: bool) -> None:
    """All of it is answered at once, so that nothing that comes later reminds the lane of the rest."""
    count = 3 * OUTSTANDING_MAX
    rig.peer.sendall(
        b"".join(framed(store_pb2.AttachRequest(heartbeat=beat(number))) for number in range(1, count + 1))
    )
    if half_close:
        rig.peer.shutdown(socket.SHUT_WR)
    found = await rig.replies(count)
    assert [reply.request_id for reply in found] == list(range(1, count + 1))
    await until(lambda: rig.read() or rig.closed == half_close)


async def test_a_peer_that_reads_nothing_costs_bounded_memory_and_loses_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers are kept up to a bound, while nothing more is read of it; then it reads, and gets them all."""
    monkeypatch.setattr(lane_module, "UNSENT_PAUSE_BYTES", 1 << 16)
    asked = answered = most = 0

    def answer() -> None:
        nonlocal answered, most
        while rig.core.channels:
            rig.core.answer(ev.Matched(0, (0,) * 4000, (0,) * 4000))  # type: ignore[arg-type]
            answered += 1
            most = max(most, rig.lane._unsent_bytes)

    while rig.lane._watched_for_reading:
        rig.send(match=match(asked + 1))
        asked += 1
        assert asked < OUTSTANDING_MAX, "it is not held back"
        await settle()
        answer()
    rig.send(match=match(asked + 1))
    await settle()
    assert answered == asked == len(rig.core.posted)
    assert most < 2 << 16
    found: list[store_pb2.AttachReply] = []

    def look() -> bool:
        found.extend(rig.read())
        answer()
        return len(found) > asked

    await until(look)
    assert [reply.request_id for reply in found] == [*range(1, asked + 2)]


async def test_draining_refuses_what_starts_something(rig: Rig) -> None:
    rig.lane._service.draining = True

    def refuse() -> None:
        raise Precondition("the daemon stops")

    rig.lane._service.check_not_draining = refuse  # type: ignore[method-assign]
    rig.send(match=match(1))
    rig.send(release=store_pb2.ReleaseRequest(request_id=2, lease_ids=[1]))
    (reply,) = await rig.replies(1)
    assert (reply.request_id, reply.error.message) == (1, "the daemon stops")
    assert isinstance(rig.core.posted[-1], ev.Release)


# ----------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("length", [FRAME_BYTES_MAX + 1, (1 << 32) - 1])
async def test_a_message_that_is_too_long_is_refused_by_its_length(rig: Rig, length: int) -> None:
    rig.peer.sendall(length.to_bytes(4, "little"))
    problem = await rig.end()
    assert isinstance(problem, BadRequest)
    assert (problem.field, problem.value) == ("length", str(length))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (wire.lane_frame(b"\xff" * 9), "is not a valid AttachRequest"),
        (wire.lane_frame(b""), "a request has a known body"),
        (framed(store_pb2.AttachRequest(hello=store_pb2.AttachHello(request_id=1))), "hello comes once"),
    ],
)
async def test_what_is_no_request_ends_the_lane(rig: Rig, data: bytes, why: str) -> None:
    rig.send(heartbeat=beat(7))
    rig.peer.sendall(data)
    assert why in str(await rig.end())


async def test_a_request_without_a_number_is_refused_and_the_lane_goes_on(rig: Rig) -> None:
    rig.send(heartbeat=beat(0))
    rig.send(heartbeat=beat(3))
    first, second = await rig.replies(2)
    assert "a number above 0" in first.error.message
    assert second.request_id == 3


async def test_a_bug_is_internal_and_tells_the_peer_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: bytes) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(rig.lane, "handle", fail)
    rig.send(heartbeat=beat(1))
    problem = await rig.end()
    assert type(problem) is StoreError and "secret" not in str(problem)
    assert "a secret" in caplog.text


# ------------------------------------------------------------------------------------------------------ slow peers


async def test_a_message_that_is_not_sent_to_its_end_ends_the_lane(rigs: Callable[..., Rig]) -> None:
    rig = rigs(peer_timeout_s=0.05)
    rig.peer.sendall(framed(store_pb2.AttachRequest(heartbeat=beat(1)))[:-1])
    assert isinstance(await rig.end(), DeadlineExceeded)


async def test_an_idle_lane_lives_on(rigs: Callable[..., Rig]) -> None:
    """The deadline is for a message that has begun, and begins anew with the next one."""
    rig = rigs(peer_timeout_s=0.5)
    frame = framed(store_pb2.AttachRequest(heartbeat=beat(1)))
    rig.peer.sendall(frame[:3])
    await settle()
    rig.peer.sendall(frame[3:])
    await rig.replies(1)
    await until(lambda: rig.lane._watchdog is None)  # it looked, and had nothing to find
    rig.send(heartbeat=beat(2))
    await rig.replies(1)
    assert not rig.ended


async def test_a_peer_that_accepts_nothing_is_left(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_module, "LAST_WRITE_TIMEOUT_S", 0.05)
    rig = rigs(peer_timeout_s=0.05, buffer_bytes=4096)
    rig.lane.deliver(b"x" * (1 << 20), answers=False)
    await until(lambda: rig.ended)
    await until(lambda: rig.lane._closed)
    assert not rig.lane._unsent, "and its memory is back"


async def test_too_many_bytes_unread_cut_the_peer_off(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_module, "UNSENT_BYTES_MAX", 1 << 16)
    rig = rigs(buffer_bytes=4096)
    push = store_pb2.AttachReply(chunks_settled=store_pb2.ChunksSettled(ready=[b"k" * 4096]))
    for _ in range(100):
        rig.lane.deliver(push.SerializeToString(), answers=False)
    assert rig.ended == [rig.lane]
    assert rig.lane._unsent_bytes < (1 << 16) + 3 * 4200
    told: list[store_pb2.AttachReply] = []

    def look() -> bool:
        told.extend(reply for reply in rig.read() if reply.HasField("ended"))
        return rig.closed

    await until(look)
    assert isinstance(wire.error_from_proto(told[0].ended), Exhausted), "should it read after all"


async def test_too_many_pushes_end_the_lane(rigs: Callable[..., Rig]) -> None:
    rig = rigs(buffer_bytes=4096)
    for _ in range(PUSHES_MAX + 2 + (1 << 20) // 64):
        rig.lane.push(ev.LeasesRevoked(WORKER, (1,)))
    assert rig.ended == [rig.lane]


# ------------------------------------------------------------------------------------------------------------- the end


async def test_half_close_waits_for_answers(rig: Rig) -> None:
    rig.send(match=match(1))
    rig.peer.shutdown(socket.SHUT_WR)
    await until(lambda: rig.core.channels)
    await settle()
    assert not rig.ended
    rig.core.answer(ev.Matched(0, (), ()))
    (reply,) = await rig.replies(1)
    assert reply.request_id == 1
    await until(lambda: rig.read() or rig.closed)
    assert rig.ended == [rig.lane]


async def test_a_peer_that_vanishes_ends_the_lane(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "FINISH_TIMEOUT_S", 0.05)
    rig.send(match=match(1))
    await until(lambda: rig.core.channels)
    rig.peer.close()
    await until(lambda: rig.ended)
    assert not rig.core.channels


async def test_an_idle_peer_that_closes_ends_the_lane_at_once(rig: Rig) -> None:
    rig.peer.close()
    await until(lambda: rig.lane._closed)
    assert rig.ended == [rig.lane]


@pytest.mark.parametrize("event", [ev.WorkerClosed(WORKER), ev.WorkerLeft(WORKER)])
async def test_the_end_of_the_worker_is_the_end_of_the_lane(rig: Rig, event: Any) -> None:
    rig.send(match=match(1))
    await until(lambda: rig.core.channels)
    rig.lane.push(event)
    assert isinstance(await rig.end(), Unauthenticated)


async def test_pushes_and_what_is_under_way_go_out_before_the_end(rig: Rig) -> None:
    rig.lane.push(ev.ChunksSettled(WORKER, NamespaceId(1), (), ()))
    rig.lane.push(ev.SegmentsRetired(WORKER, ()))
    rig.lane.end(Precondition("that is all"))
    rig.lane.push(ev.LeasesRevoked(WORKER, ()))  # nobody is there any more
    rig.lane.end(Precondition("and it was said"))
    first, second, last = await rig.replies(3)
    assert first.HasField("chunks_settled") and second.HasField("segments_retired")
    assert last.ended.message == "that is all"
    await until(lambda: rig.read() or rig.closed)
    assert rig.ended == [rig.lane]


def test_the_bound_of_what_is_unsent_leaves_room_for_one_long_answer() -> None:
    assert UNSENT_PAUSE_BYTES + (16 << 20) < lane_module.UNSENT_BYTES_MAX
