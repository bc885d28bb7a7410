"""The loop with a scripted core: order of effects, answers, deadlines, pushes, and what happens after a bug."""

import asyncio
import math
import threading
import typing

import pytest

from kvstore.core import events as ev
from kvstore.core.events import Ticket
from kvstore.errors import BadRequest, DeadlineExceeded, Exhausted, Unavailable
from kvstore.server.loop import CHANNELS_MAX, CORRUPT_TOLD_MAX, TURN_EVENTS_MAX, Loop
from kvstore.types import ChunkKey, NamespaceId, OpId, SegmentId, Tier, WorkerId

WORKER = WorkerId(1)
BOUND_S = 20.0


class Core:
    """Answers GetStats with the effects that a test put in `script`; remembers all events."""

    def __init__(self) -> None:
        self.events: list[ev.Event] = []
        self.script: list[list[ev.Effect] | Exception] = []
        self.at_start: list[ev.Effect] = []
        self.ahead = 0
        """How often there is something to do ahead of need."""

    def start(self) -> list[ev.Effect]:
        return self.at_start

    def has_ahead(self) -> bool:
        return self.ahead > 0

    def apply(self, event: ev.Event, now: int) -> list[ev.Effect]:
        if isinstance(event, ev.Tick):
            return []
        if isinstance(event, ev.Idle):
            self.ahead -= 1
        self.events.append(event)
        answer = self.script.pop(0) if self.script else []
        if isinstance(answer, Exception):
            raise answer
        return answer


class Edge:
    """Arena, staging and copier in one: writes down what it is told to do."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.gate = threading.Event()
        self.gate.set()
        self.create_error: Exception | None = None
        self.to_fault: float = 0
        """Steps that are left."""
        self.faulted = 0
        self.beats = 0

    def fault_in(self) -> bool:
        if self.to_fault:
            self.to_fault -= 1
            self.faulted += 1
        return bool(self.to_fault)

    def create(self, segment: SegmentId, segment_bytes: int, cells: int) -> None:
        assert self.gate.wait(BOUND_S)
        if self.create_error is not None:
            raise self.create_error
        self.done.append(("create", segment))

    def destroy(self, segment: SegmentId) -> None:
        self.done.append(("destroy", segment))

    def set_generations(self, segment, cells, generations) -> None:
        self.done.append(("generations", segment, cells, generations))

    def publish(self, effect) -> None:
        self.done.append(("publish", effect.rows))

    def unpublish(self, namespace, rows) -> None:
        self.done.append(("unpublish", rows))

    def beat(self, now_ms: int) -> None:
        self.beats += 1

    def submit(self, effect, done) -> None:
        self.done.append(("copy", effect.op))
        threading.Thread(target=done, args=(ev.OpDone(effect.op, ()),)).start()

    def drop(self, worker: WorkerId) -> None:
        self.done.append(("drop", worker))

    def close(self, timeout_s: float = 0.0) -> None:
        self.done.append("closed")


class Rig:
    def __init__(self) -> None:
        self.core = Core()
        self.edge = Edge()
        self.now = 0
        self.forgotten: list[WorkerId] = []
        self.fatal = 0
        self.loop = Loop(
            self.core,  # type: ignore[arg-type]
            self.edge,  # type: ignore[arg-type]
            self.edge,  # type: ignore[arg-type]
            self.edge,  # type: ignore[arg-type]
            directories=self.edge,  # type: ignore[arg-type]
            on_forget=self.forgotten.append,
            on_fatal=self._fatal,
            clock=lambda: self.now,
        )

    def _fatal(self) -> None:
        self.fatal += 1

    async def until(self, found) -> None:
        async with asyncio.timeout(BOUND_S):
            while not found():  # noqa: ASYNC110 - what is waited for may happen in another thread
                await asyncio.sleep(0)

    def answered_with(self, answer: ev.Answer) -> list[ev.Effect]:
        """Effects that answer the first `ask`: channels count from 1."""
        return [ev.Reply(Ticket(WORKER, channel=1), answer)]


@pytest.fixture
async def rig():
    rig = Rig()
    rig.loop.start()
    yield rig
    rig.loop.close(2.0)


ASK = ev.GetStats(Ticket(WORKER))


def test_every_effect_has_a_performer():
    """`TierEffect` has kinds of each tier below DRAM that is not the SSD; the daemon has no such tier."""
    assert set(Rig().loop._perform) == set(typing.get_args(ev.Effect)) - {ev.TierEffect}


async def test_an_answer_comes_back(rig):
    rig.core.script = [rig.answered_with(ev.Done(3))]
    assert await rig.loop.ask(ASK, BOUND_S) == ev.Done(3)
    (event,) = rig.core.events
    assert event.ticket.channel == 1
    assert repr(rig.loop) == "Loop(inbox=0, waiting=0, streams=0, stopped=False)"


async def test_an_error_is_raised(rig):
    rig.core.script = [rig.answered_with(BadRequest("no", field="f", value=1))]
    with pytest.raises(BadRequest, match="f=1: no"):
        await rig.loop.ask(ASK, BOUND_S)


async def test_events_are_applied_in_order_and_effects_performed_in_order(rig):
    rig.core.script = [
        [
            ev.SetGenerations(SegmentId(1), (0,), (5,)),
            ev.CopyIn(OpId(7), WORKER, (), ()),
            ev.SetGenerations(SegmentId(2), (1,), (6,)),
        ],
        [ev.ForgetWorker(WORKER)],
    ]
    rig.loop.post(ev.WorkerClosed(WORKER))
    rig.loop.post(ev.WorkerLeft(WORKER))
    await rig.until(lambda: len(rig.core.events) == 3 and len(rig.edge.done) == 4)  # the drop in a thread
    assert rig.edge.done == [
        ("generations", 1, (0,), (5,)),
        ("copy", 7),
        ("generations", 2, (1,), (6,)),
        ("drop", WORKER),
    ]
    assert rig.core.events == [ev.WorkerClosed(WORKER), ev.WorkerLeft(WORKER), ev.OpDone(OpId(7), ())]
    assert rig.forgotten == [WORKER]


async def test_a_flood_does_not_starve_the_loop(rig):
    for _ in range(TURN_EVENTS_MAX + 1):
        rig.loop.post(ASK)
    await asyncio.sleep(0)
    assert len(rig.core.events) == TURN_EVENTS_MAX
    await rig.until(lambda: len(rig.core.events) == TURN_EVENTS_MAX + 1)


async def test_what_is_long_is_done_bit_by_bit_and_whoever_comes_goes_first(rig):
    rig.core.ahead = 3
    rig.loop.post(ASK)
    for turn in range(10):  # of the event loop; none of them waits for the tick
        await asyncio.sleep(0)
        if turn == 1:
            rig.loop.post(ASK)
    assert rig.core.ahead == 0
    kinds = [type(event) for event in rig.core.events]
    assert kinds == [ev.GetStats, ev.Idle, ev.GetStats, ev.Idle, ev.Idle]


async def test_what_can_be_done_ahead_is_done_once_nothing_waits_and_the_answer_is_out(rig):
    rig.core.ahead = 1
    rig.core.script = [rig.answered_with(ev.Done(3))]
    seen: list[list[ev.Event]] = []
    channel = rig.loop.channel(lambda answer: seen.append(list(rig.core.events)), BOUND_S)
    rig.loop.turn(lambda: rig.loop.post(ev.GetStats(Ticket(WORKER, channel=channel))))
    assert len(rig.core.events) == 1
    assert seen == [rig.core.events]
    for _ in range(TURN_EVENTS_MAX + 1):
        rig.loop.post(ASK)
    await rig.until(lambda: rig.core.ahead == 0)
    kinds = [type(event) for event in rig.core.events]
    assert kinds == [ev.GetStats] * (TURN_EVENTS_MAX + 2) + [ev.Idle]
    rig.loop.post(ASK)
    await rig.until(lambda: len(rig.core.events) == TURN_EVENTS_MAX + 4)
    assert rig.core.events[-1] is ASK


async def test_a_bug_in_what_is_done_ahead_is_fatal(rig):
    rig.core.ahead = 1
    rig.core.script = [[], RuntimeError("a bug")]
    rig.loop.post(ASK)
    await rig.until(lambda: rig.fatal == 1)
    with pytest.raises(Unavailable):
        await rig.loop.ask(ASK, BOUND_S)


async def test_segments_are_made_and_unmade_in_a_thread(rig):
    rig.edge.gate.clear()
    segments = [ev.CreateSegment(OpId(1), SegmentId(9), 4096, 1), ev.DestroySegment(SegmentId(8))]
    rig.core.script = [segments, rig.answered_with(ev.Done())]
    rig.loop.post(ASK)
    assert await rig.loop.ask(ASK, BOUND_S) == ev.Done(), "the loop goes on while a segment is being made"
    assert rig.edge.done == []
    rig.edge.gate.set()
    await rig.until(lambda: ev.SegmentReady(OpId(1)) in rig.core.events)
    await rig.until(lambda: rig.edge.done == [("create", 9), ("destroy", 8)])


async def test_the_arena_is_faulted_in_while_its_thread_has_nothing_else_to_do(rig):
    rig.edge.to_fault = 3
    rig.core.script = [[ev.CreateSegment(OpId(1), SegmentId(9), 4096, 1)]]
    rig.loop.post(ASK)
    await rig.until(lambda: rig.edge.faulted == 3)
    assert rig.edge.done == [("create", 9)]
    rig.edge.to_fault = math.inf
    rig.core.script = [[ev.CreateSegment(OpId(2), SegmentId(10), 4096, 1)]]
    rig.loop.post(ASK)
    await rig.until(lambda: rig.edge.faulted > 3)
    rig.core.script = [[ev.DestroySegment(SegmentId(10))]]
    rig.loop.post(ASK)
    await rig.until(lambda: ("destroy", 10) in rig.edge.done)
    rig.loop.close(BOUND_S)
    assert not rig.loop._segment_thread.is_alive(), "it ends before the arena is faulted in"


@pytest.mark.parametrize("problem", [OSError(12, "no memory"), BadRequest("no")])
async def test_a_segment_that_cannot_be_made_is_told(rig, problem):
    rig.edge.create_error = problem
    rig.core.script = [[ev.CreateSegment(OpId(1), SegmentId(9), 4096, 1)]]
    rig.loop.post(ASK)
    await rig.until(lambda: ev.SegmentFailed(OpId(1), str(problem)) in rig.core.events)
    assert rig.fatal == 0


async def test_a_bug_in_the_segment_thread_is_fatal(rig):
    rig.edge.create_error = ZeroDivisionError("a bug")
    rig.core.script = [[ev.CreateSegment(OpId(1), SegmentId(9), 4096, 1)]]
    rig.loop.post(ASK)
    await rig.until(lambda: rig.fatal == 1)


async def test_the_first_effects_are_those_of_start():
    rig = Rig()
    rig.core.at_start = [ev.CreateSegment(OpId(1), SegmentId(0), 4096, 1)]
    rig.loop.start()
    await rig.until(lambda: ev.SegmentReady(OpId(1)) in rig.core.events)
    rig.loop.close(2.0)


# ------------------------------------------------------------------------------------------------------------ waiting


async def test_no_answer_is_deadline_exceeded_and_nothing_is_left(rig):
    asking = asyncio.create_task(rig.loop.ask(ASK, 5.0))
    await rig.until(lambda: rig.core.events)
    rig.now = 4_999
    rig.loop._tick()
    await asyncio.sleep(0)
    assert not asking.done()
    rig.now = 5_000
    rig.loop._tick()
    with pytest.raises(DeadlineExceeded):
        await asking
    assert "waiting=0" in repr(rig.loop)
    rig.core.script = [[ev.Reply(Ticket(WORKER, channel=1), ev.Done())]]
    rig.loop.post(ASK)  # the answer after all: nobody is waiting
    await rig.until(lambda: len(rig.core.events) == 2)
    assert rig.fatal == 0


async def test_a_caller_that_goes_leaves_nothing(rig):
    asking = asyncio.create_task(rig.loop.ask(ASK, BOUND_S))
    await rig.until(lambda: rig.core.events)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert "waiting=0" in repr(rig.loop)


async def test_waiting_is_bounded(rig):
    for _ in range(CHANNELS_MAX):
        rig.loop.channel(lambda answer: None, BOUND_S)
    with pytest.raises(Exhausted, match="65536 requests are waiting"):
        rig.loop.channel(lambda answer: None, BOUND_S)


async def test_closing_answers_everybody(rig):
    asking = asyncio.create_task(rig.loop.ask(ASK, BOUND_S))
    await rig.until(lambda: rig.core.events)
    rig.loop.close(2.0)
    with pytest.raises(Unavailable, match="shutting down"):
        await asking
    with pytest.raises(Unavailable, match="shutting down"):
        await rig.loop.ask(ASK, BOUND_S)
    assert rig.edge.done == ["closed"]


async def test_after_a_bug_nothing_is_served(rig):
    rig.core.script = [AssertionError("free + ready != capacity")]
    with pytest.raises(Unavailable, match="internal error"):
        await rig.loop.ask(ASK, BOUND_S)
    assert rig.fatal == 1
    rig.loop.post(ASK)
    with pytest.raises(Unavailable, match="internal error"):
        await rig.loop.ask(ASK, BOUND_S)
    await asyncio.sleep(0)
    assert len(rig.core.events) == 1, "the core is not touched again"
    assert rig.fatal == 1


# ------------------------------------------------------------------------------------------------------------- pushes


async def test_pushes_go_to_who_subscribed_last(rig):
    older: list[object] = []
    newer: list[object] = []
    rig.loop.subscribe(WORKER, older.append)
    rig.loop.subscribe(WORKER, newer.append)
    rig.loop.unsubscribe(WORKER, older.append)
    push = ev.ChunksSettled(WORKER, NamespaceId(1), (), ())
    rig.core.script = [[push, ev.ChunksSettled(WorkerId(2), NamespaceId(1), (), ())]]
    rig.loop.post(ASK)
    await rig.until(lambda: newer)
    assert (older, newer) == ([], [push])


async def test_who_unsubscribed_is_forgotten(rig):
    """Bound methods, as streams have them: each look at one makes another object."""
    pushed: list[ev.Effect] = []
    rig.loop.subscribe(WORKER, pushed.append)
    assert "streams=1" in repr(rig.loop)
    rig.loop.unsubscribe(WORKER, pushed.append)
    assert "streams=0" in repr(rig.loop), "and nothing of the stream is kept"


async def test_retired_segments_are_told_again_until_they_are_unmapped(rig):
    rig.core.script = [[ev.SegmentsRetired(WORKER, (SegmentId(3), SegmentId(4)))]]
    rig.loop.post(ASK)
    await rig.until(lambda: rig.core.events)
    first: list[object] = []
    rig.loop.subscribe(WORKER, first.append)
    assert first == [ev.SegmentsRetired(WORKER, (SegmentId(3), SegmentId(4)))]
    rig.loop.post(ev.SegmentsUnmapped(Ticket(WORKER), (SegmentId(3),)))
    await rig.until(lambda: len(rig.core.events) == 2)
    second: list[object] = []
    rig.loop.subscribe(WORKER, second.append)
    assert second == [ev.SegmentsRetired(WORKER, (SegmentId(4),))]


@pytest.mark.parametrize("event", [ev.WorkerClosed(WORKER), ev.WorkerLeft(WORKER)])
async def test_a_stream_is_told_that_its_worker_is_gone(rig, event):
    told: list[object] = []
    rig.loop.subscribe(WORKER, told.append)
    rig.loop.post(event)
    await rig.until(lambda: told)
    assert told == [event]


def test_a_file_of_corrupt_chunks_is_told_of_a_few_times_each_other_on_its_own(caplog):
    loop = Rig().loop

    def corrupt(tier, number, slot):
        effect = ev.Quarantined(tier, ((number, slot),), NamespaceId(1), ChunkKey(b"%d" % slot), "torn", True)
        loop._perform[ev.Quarantined](effect)

    for slot in range(100 * CORRUPT_TOLD_MAX):
        corrupt(Tier.SSD, 3, slot)
    messages = [record.message for record in caplog.records]
    assert len(messages) == CORRUPT_TOLD_MAX + 1
    assert all(message.startswith("corrupt bytes") for message in messages[:-1])
    assert "is counted and quarantined, and not logged" in messages[-1]
    corrupt(Tier.SSD, 4, 0)
    corrupt(Tier.DRAM, 3, 0)
    assert len(caplog.records) == CORRUPT_TOLD_MAX + 3
    assert [record.fields["tier"] for record in caplog.records[-2:]] == ["ssd", "dram"]
