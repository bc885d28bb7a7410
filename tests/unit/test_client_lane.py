"""The client's end of a fast lane against a bare socket: who reads, who sleeps, and how all of that ends."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvstore import errors, wire
from kvstore.client import lane as lane_module
from kvstore.client.call import Call
from kvstore.client.lane import Lane
from kvstore.errors import StoreError, Unavailable
from kvstore.v1 import store_pb2

from ..waiting import eventually

BOUND_S = 20.0
FOREVER = float("inf")


class Rig:
    """A lane whose replies settle calls by their number, as an attachment would."""

    def __init__(self) -> None:
        self.ours, theirs = socket.socketpair()
        self.ours.settimeout(BOUND_S)
        self.calls: dict[int, Call] = {}
        self.pushes: list[store_pb2.AttachReply] = []
        self.readers: dict[int, str] = {}
        """The thread that received the reply with that number."""
        self.bug: BaseException | None = None
        self.problem: StoreError | None = None
        self.awaited = True
        """The carrier's thread never rests."""
        self.lane = Lane(theirs, self.receive, lambda: self.awaited)
        self.thread = threading.Thread(target=self.run, name="carrier", daemon=True)
        self.thread.start()

    def run(self) -> None:
        self.problem = self.lane.run()

    def receive(self, reply: store_pb2.AttachReply) -> None:
        self.readers[reply.request_id] = threading.current_thread().name
        if self.bug is not None:
            raise self.bug
        if reply.request_id:
            self.calls.pop(reply.request_id).settle(reply)
        else:
            self.pushes.append(reply)

    def ask(self, number: int, deadline: float = FOREVER) -> Call:
        call = Call(self, "done", deadline)  # type: ignore[arg-type]
        self.calls[number] = call
        self.lane.send(request(number))
        return call

    def listen(self) -> None:
        self.lane.listen()

    def asked(self) -> int:
        """The number of the next request that reached the daemon."""
        (length,) = self.ours.recv(1, socket.MSG_WAITALL)
        rest = self.ours.recv(3 + length, socket.MSG_WAITALL)
        return store_pb2.AttachRequest.FromString(rest[3:]).heartbeat.request_id

    def answer(self, *numbers: int) -> None:
        replies = (store_pb2.AttachReply(request_id=n, done=store_pb2.DoneReply()) for n in numbers)
        self.ours.sendall(b"".join(wire.lane_frame(reply.SerializeToString()) for reply in replies))

    def close(self) -> None:
        self.lane.cancel()
        self.thread.join(BOUND_S)
        assert not self.thread.is_alive(), "whatever happened, it comes to an end"
        self.ours.close()


def request(number: int) -> store_pb2.AttachRequest:
    return store_pb2.AttachRequest(heartbeat=store_pb2.HeartbeatRequest(request_id=number))


def waiting(rig: Rig, call: Call, name: str) -> threading.Thread:
    thread = threading.Thread(target=rig.lane.wait, args=(call,), name=name)
    thread.start()
    return thread


def joined(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(BOUND_S)
        assert not thread.is_alive()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


# ------------------------------------------------------------------------------------------------------------ who reads


def test_who_waits_reads_the_answer(rig: Rig) -> None:
    for number in range(1, 20):
        call = rig.ask(number)
        thread = waiting(rig, call, "caller")
        eventually(lambda: rig.lane._led)
        assert rig.asked() == number
        rig.answer(number)
        joined(thread)
        assert call.done
    assert set(rig.readers.values()) == {"caller"}, "no other thread was woken for it"


def test_one_reads_for_all_and_hands_over_when_its_own_answer_has_come(rig: Rig) -> None:
    first, second, third = (rig.ask(number) for number in (1, 2, 3))
    leader = waiting(rig, first, "leader")
    eventually(lambda: rig.lane._led)
    followers = [waiting(rig, second, "second"), waiting(rig, third, "third")]
    eventually(lambda: len(rig.lane._asleep) == 2)
    rig.answer(3)
    joined(followers[1])
    assert rig.readers[3] == "leader"
    rig.answer(1)
    joined(leader)
    eventually(lambda: rig.lane._led)  # by the one that is left
    rig.answer(2)
    joined(followers[0])
    assert rig.readers[2] == "second"


def test_what_nobody_waits_for_is_read_by_the_carriers_thread(rig: Rig) -> None:
    call = rig.ask(1)
    seen: list[Call] = []
    call.when_done(seen.append)
    rig.answer(0, 1)
    eventually(lambda: seen)
    assert rig.readers == {0: "carrier", 1: "carrier"}
    # also what comes while somebody leads who then leaves before it is there
    other = rig.ask(2, time.monotonic() + 0.05)
    rig.lane.wait(other)
    assert not other.done and not rig.lane._led
    rig.answer(2)
    eventually(lambda: other.done)
    assert rig.readers[2] == "carrier"


def test_the_carriers_thread_rests_between_requests_that_follow_closely(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that is there before anybody leads is left to who waits for it."""
    monkeypatch.setattr(lane_module, "REST_S", 1000.0)
    rig.awaited = False
    for number in range(1, 20):
        call = rig.ask(number)
        if number > 1:
            rig.answer(number)
            time.sleep(0.002)  # time for the other thread to take what it is to leave alone
        thread = waiting(rig, call, "caller")
        if number == 1:
            eventually(lambda: rig.lane._led)
            rig.answer(number)
        joined(thread)
        assert call.done
        eventually(lambda: rig.lane._naps)
    assert set(rig.readers.values()) == {"caller"}


def test_after_its_rest_the_carriers_thread_reads_again(rig: Rig) -> None:
    rig.awaited = False
    for number in range(1, 4):
        thread = waiting(rig, rig.ask(number), "caller")
        rig.answer(number)
        joined(thread)
        rig.answer(0)  # a push
        eventually(lambda: len(rig.pushes) == number)  # noqa: B023
    eventually(lambda: not rig.lane._resting)


def test_it_rests_no_longer_when_something_is_to_come_that_nobody_waits_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_module, "REST_S", 1000.0)
    rig.awaited = False
    first = rig.ask(1)
    thread = waiting(rig, first, "caller")
    eventually(lambda: rig.lane._led)
    rig.answer(1)
    joined(thread)
    eventually(lambda: rig.lane._naps)
    call = rig.ask(2)
    seen: list[Call] = []
    call.when_done(seen.append)
    rig.answer(2)
    eventually(lambda: seen)
    # nor does it begin to
    rig.awaited = True
    other = rig.ask(3)
    thread = waiting(rig, other, "caller")
    rig.answer(3)
    joined(thread)
    rig.answer(0)
    eventually(lambda: rig.pushes)


def test_a_wait_ends_with_the_deadline_of_who_leads_and_of_who_sleeps(rig: Rig) -> None:
    leading = rig.ask(1, time.monotonic() + 0.15)
    leader = waiting(rig, leading, "leader")
    eventually(lambda: rig.lane._led)
    sleeping = rig.ask(2, time.monotonic() + 0.05)
    rig.lane.wait(sleeping)
    assert not sleeping.done and not rig.lane._asleep
    joined(leader)
    assert not leading.done and not rig.lane._led


def test_spinning_in_vain_is_given_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits long burns no processor, but for one short look in so many waits."""
    looks = 0
    now = time.perf_counter()

    def clock() -> float:
        nonlocal looks
        looks += 1
        return now + looks * lane_module.SPIN_S / 2

    monkeypatch.setattr(lane_module, "NAP_S", 0.0)
    monkeypatch.setattr(lane_module.time, "perf_counter", clock)
    rig.lane._spins = True
    for _ in range(20):
        assert rig.lane._spun() is None
    assert rig.lane._spins_to_skip > 4
    assert looks < 20, "most times it did not look at all"
    rig.lane._spins_skipped = rig.lane._spins_to_skip = 0
    with rig.lane._lock:
        rig.lane._led = True  # nobody else reads it
        rig.lane._watch()
    rig.answer(0)
    assert rig.lane._spun()
    assert rig.lane._spins_to_skip == 0
    rig.lane._leave()


def test_many_threads_at_once(rig: Rig) -> None:
    """Whatever the order of answers: each gets its own, nobody sleeps on, and the lead is nobody's in the end."""
    count, rounds = 8, 100
    numbers = iter(range(1, count * rounds + 1))
    lock = threading.Lock()
    done: list[int] = []

    def ask() -> None:
        while True:
            with lock:
                number = next(numbers, 0)
                if not number:
                    return
                call = rig.ask(number, time.monotonic() + BOUND_S)
            rig.lane.wait(call)
            assert call.answer.request_id == number  # type: ignore[union-attr]
            done.append(number)

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    open_numbers: list[int] = []
    for _ in range(count * rounds):
        open_numbers.append(rig.asked())
        if len(open_numbers) >= 4 or open_numbers[-1] > count * (rounds - 1):
            rig.answer(*reversed(open_numbers))
            open_numbers.clear()
    joined(*threads)
    assert sorted(done) == [*range(1, count * rounds + 1)]
    assert not rig.lane._led and not rig.lane._asleep


# -------------------------------------------------------------------------------------------------------------- writing


def test_sending_never_waits_and_loses_nothing(rig: Rig) -> None:
    """More than the sockets hold, while the daemon stands still."""
    keys = [bytes([number % 251]) * 64 for number in range(4096)]
    for number in range(1, 9):
        body = store_pb2.MatchRequest(request_id=number, keys=keys)
        rig.lane.send(store_pb2.AttachRequest(match=body))
    assert rig.lane.unsent
    received = []
    for _ in range(8):
        length = int.from_bytes(rig.ours.recv(4, socket.MSG_WAITALL), "little")
        data = b""
        while len(data) < length:
            data += rig.ours.recv(length - len(data))
        received.append(store_pb2.AttachRequest.FromString(data).match)
    assert [body.request_id for body in received] == [*range(1, 9)]
    assert all(list(body.keys) == keys for body in received)
    eventually(lambda: not rig.lane.unsent)


def test_a_request_never_overtakes_what_is_still_to_be_written(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though there is room for it by now: it would land in the middle of another."""
    monkeypatch.setattr(rig.lane, "_write_on", lambda: time.sleep(0.001))
    keys = [bytes(64)] * 4096
    sent = 0
    while not rig.lane.unsent:
        sent += 1
        body = store_pb2.MatchRequest(request_id=sent, keys=keys)
        rig.lane.send(store_pb2.AttachRequest(match=body))
    data = rig.ours.recv(1 << 20)
    rig.lane.send(request(sent + 1))
    assert rig.lane.unsent == 2
    monkeypatch.undo()
    numbers = []
    while len(numbers) <= sent:
        length = int.from_bytes(data[:4], "little")
        while len(data) < 4 + length or len(data) < 4:
            data += rig.ours.recv(1 << 20)
            length = int.from_bytes(data[:4], "little")
        message = store_pb2.AttachRequest.FromString(data[4 : 4 + length])
        numbers.append(message.match.request_id or message.heartbeat.request_id)
        data = data[4 + length :]
    assert numbers == [*range(1, sent + 2)]


def test_what_is_sent_after_the_end_is_lost_without_a_word(rig: Rig) -> None:
    rig.ours.close()
    eventually(lambda: rig.problem)
    rig.lane.send(request(1))
    assert not rig.lane.unsent


# -------------------------------------------------------------------------------------------------------------- the end


def test_the_end_wakes_everybody(rig: Rig) -> None:
    calls = [rig.ask(number) for number in (1, 2, 3)]
    threads = [waiting(rig, call, "caller") for call in calls]
    eventually(lambda: len(rig.lane._asleep) == 2)
    rig.ours.close()
    joined(*threads, rig.thread)
    assert isinstance(rig.problem, Unavailable)
    assert not any(call.done for call in calls), "that is for who knows of them to say"


def test_cancelling_wakes_everybody(rig: Rig) -> None:
    threads = [waiting(rig, rig.ask(number), "caller") for number in (1, 2)]
    eventually(lambda: len(rig.lane._asleep) == 1)
    rig.lane.cancel()
    joined(*threads, rig.thread)


def test_the_daemon_says_why_it_ends_the_lane(rig: Rig) -> None:
    said = errors.Unauthenticated("the descriptor connection of this worker ended", remedy="say hello again")
    reply = store_pb2.AttachReply(ended=wire.error_to_proto(said))
    rig.ours.sendall(wire.lane_frame(reply.SerializeToString()))
    joined(rig.thread)
    assert isinstance(rig.problem, errors.Unauthenticated) and rig.problem.remedy == said.remedy


@pytest.mark.parametrize(
    "data", [(lane_module.FRAME_BYTES_MAX + 1).to_bytes(4, "little"), wire.lane_frame(b"\xff" * 9)]
)
def test_what_no_daemon_would_send_ends_the_lane(rig: Rig, data: bytes) -> None:
    rig.ours.sendall(data)
    joined(rig.thread)
    assert isinstance(rig.problem, Unavailable)


def test_however_the_bytes_are_cut(rig: Rig) -> None:
    data = b"".join(
        wire.lane_frame(store_pb2.AttachReply(request_id=n, done=store_pb2.DoneReply()).SerializeToString())
        for n in (1, 2, 3)
    )
    calls = [rig.ask(number) for number in (1, 2, 3)]
    for index in range(len(data)):
        rig.ours.sendall(data[index : index + 1])
        if index % 5 == 0:
            time.sleep(0.001)
    eventually(lambda: all(call.done for call in calls))


def test_a_bug_ends_the_lane_and_not_the_thread_that_met_it(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.bug = ValueError("a bug")
    call = rig.ask(1)
    thread = waiting(rig, call, "caller")
    eventually(lambda: rig.lane._led)
    rig.answer(1)
    joined(thread, rig.thread)
    assert "a bug" in caplog.text
    assert isinstance(rig.problem, Unavailable)


def test_an_interrupt_in_the_middle_of_an_answer_ends_the_lane(rig: Rig) -> None:
    """Somebody else's answer may be lost with it, so all ask again; nobody waits for what will not come."""
    rig.bug = KeyboardInterrupt()
    mine, other = rig.ask(1), rig.ask(2)
    with rig.lane._lock:
        rig.lane._led = True
        rig.lane._watch()
    sleeping = waiting(rig, other, "other")
    eventually(lambda: rig.lane._asleep)
    with rig.lane._lock:
        rig.lane._led = False
    rig.answer(1)
    with pytest.raises(KeyboardInterrupt):
        rig.lane.wait(mine)
    joined(sleeping, rig.thread)
    assert rig.lane._epoll.closed


@pytest.mark.parametrize("after", [1, 2], ids=["taking the lead", "handing it on"])
def test_an_interrupt_between_two_readers_leaves_nobody_waiting(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """The lane ends, so that all ask again; else nobody would read it while everybody believed that another did."""
    watch, calls = rig.lane._watch, itertools.count(1)

    def interrupted() -> None:
        if threading.current_thread() is threading.main_thread() and next(calls) == after:
            raise KeyboardInterrupt
        watch()

    monkeypatch.setattr(rig.lane, "_watch", interrupted)
    call = Call(None, "done", time.monotonic() + 0.1)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        rig.lane.wait(call)
    joined(rig.thread)
    assert isinstance(rig.problem, Unavailable)


def test_descriptors_are_closed_in_the_end() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        rig = Rig()
        rig.ask(1)
        rig.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_who_leads_too_long_does_not_hold_up_the_end(rig: Rig) -> None:
    with rig.lane._lock:
        rig.lane._led = True  # stuck in what follows an answer
    rig.lane.cancel()
    joined(rig.thread)
    assert not rig.lane._epoll.closed, "its descriptors are not pulled away"
    rig.lane._leave()
    assert rig.lane._epoll.closed and rig.lane._sock.fileno() == -1
