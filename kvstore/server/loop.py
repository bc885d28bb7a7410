"""The daemon's loop: drain the inbox, apply, perform the effects, answer. asyncio ends here.

Handlers enqueue events and the loop works at its own pace, so one turn serves whatever became ready meanwhile. Nothing
in a turn blocks: copies go to the copier's threads, segments are created and destroyed by a thread of ours, and both
come back as events. A turn that raises is a bug of ours and leaves the core in an unknown state: the loop then refuses
everything and tells the daemon to stop, because a store that might serve wrong bytes is worse than none.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from kvstore.core import events
from kvstore.core.store import Store
from kvstore.errors import DeadlineExceeded, Exhausted, StoreError, Unavailable
from kvstore.server.logs import fields
from kvstore.tiers.arena import Arena, Staging
from kvstore.tiers.base import ChunkSource, SourceEffect
from kvstore.tiers.copier import Copier
from kvstore.tiers.directories import Directories
from kvstore.tiers.ssd import SsdStats, SsdTier
from kvstore.types import DiskState, Millis, SegmentId, Tier, WorkerId

log = logging.getLogger(__name__)

TICK_S = 0.1
CHANNELS_MAX = 65_536
"""Requests that may wait for their answer at one time, all callers together."""
CORRUPT_TOLD_MAX = 8
"""Corrupt chunks of one slab file or segment that the log names: a file that was lost has thousands of them."""
CORRUPT_FILES_MAX = 4_096
TURN_EVENTS_MAX = 1_024
"""Events applied before the sockets are looked at again."""

Push = (
    events.ChunksSettled
    | events.SegmentsRetired
    | events.LeasesRevoked
    | events.WorkerClosed
    | events.WorkerLeft
)
"""The pushes that go to a worker's stream: the core's own, and that the worker's connection or process has ended."""
DiskEffect = (
    events.CreateSlab
    | events.WriteRecords
    | events.ReadRecords
    | events.WriteIndex
    | events.ProbeDisk
    | events.ScrubRecords
    | events.RewriteRecords
)
CopyEffect = events.CopyIn | events.FillSlots | events.Checksum | events.MoveSlots | events.RewriteSlots
Answered = Callable[[events.Answer], None]


def monotonic_ms() -> Millis:
    return time.monotonic_ns() // 1_000_000


class Loop:
    """Owns the core, the arena, directories, staging memory and the copier; every method but `post_threadsafe` is
    called on the asyncio thread.

    `on_forget` is told which workers the core has nothing of any more, `on_purged` of which tenants, by
    their marks, all goes, `on_disk` when the SSD tier degrades or heals; `on_fatal` is called once, after a bug.
    """

    def __init__(
        self,
        store: Store,
        arena: Arena,
        staging: Staging,
        copier: Copier,
        *,
        directories: Directories,
        ssd: SsdTier | None = None,
        sources: Mapping[str, ChunkSource] | None = None,
        on_forget: Callable[[WorkerId], None],
        on_fatal: Callable[[], None],
        on_disk: Callable[[DiskState], None] = lambda _: None,
        on_purged: Callable[[bytes, Callable[[], None]], None] = lambda _, done: done(),
        clock: Callable[[], Millis] = monotonic_ms,
    ) -> None:
        self.store = store
        self.arena = arena
        self.staging = staging
        self.directories = directories
        self._copier = copier
        self._ssd = ssd
        self._sources = dict(sources or {})
        """By their names in `Limits.sources`."""
        self._on_forget = on_forget
        self._on_fatal = on_fatal
        self._on_disk = on_disk
        self._clock = clock
        self.observer: Callable[[events.Event, Millis], None] | None = None
        """Sees every event before it is applied, and costs next to nothing (`recorder.py`)."""
        self._inbox: deque[events.Event] = deque()
        self._turn_due = False
        self._rest_due = False
        self._channels: dict[int, tuple[Answered, Millis]] = {}
        self._next_channel = 1
        self._subscribers: dict[WorkerId, Callable[[Push], None]] = {}
        self._retired: dict[WorkerId, set[SegmentId]] = {}
        """The segments that each worker was asked to unmap and has not confirmed: told again on its next stream."""
        self._segment_work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._segment_thread = threading.Thread(
            target=self._run_segment_work, name="kvstored-segments", daemon=True
        )
        self._ticker: asyncio.TimerHandle | None = None
        self._stopped: StoreError | None = None
        self._disk_state = DiskState.OK
        self._corrupt: Counter[tuple[Tier, int]] = Counter()
        """Corrupt chunks by tier and number of the slab file or segment."""
        self._perform: dict[type[Any], Callable[[Any], None]] = {
            events.Reply: self._reply,
            events.ChunksSettled: self._push,
            events.SegmentsRetired: self._push_retired,
            events.LeasesRevoked: self._push,
            events.SetGenerations: self._set_generations,
            events.CreateDirectory: self.directories.create,
            events.CloseDirectory: lambda effect: self.directories.close(effect.namespace, True),
            events.OpenDirectory: lambda effect: self.directories.close(effect.namespace, False),
            events.DropDirectory: lambda effect: self.directories.drop(effect.namespace),
            events.Unpublish: lambda effect: self.directories.unpublish(effect.namespace, effect.rows),
            events.Publish: self.directories.publish,
            events.CopyIn: self._copy,
            events.FillSlots: self._copy,
            events.Checksum: self._copy,
            events.MoveSlots: self._copy,
            events.CreateSegment: self._create_segment,
            events.AssignSegment: self._assign_segment,
            events.DestroySegment: self._destroy_segment,
            events.CreateSlab: self._disk,
            events.WriteRecords: self._disk,
            events.ReadRecords: self._disk,
            events.WriteIndex: self._disk,
            events.ProbeDisk: self._disk,
            events.ScrubRecords: self._disk,
            events.RewriteRecords: self._disk,
            events.RewriteSlots: self._copy,
            events.LookUpChunks: self._ask_source,
            events.LookUpSessions: self._ask_source,
            events.ShareSessions: self._ask_source,
            events.ForgetSessions: self._ask_source,
            events.TenantPurged: lambda effect: on_purged(
                effect.mark, lambda: self.post(events.PurgedBeyond(effect.op))
            ),
            events.FetchChunks: self._ask_source,
            events.StoreChunks: self._ask_source,
            events.DropChunks: self._ask_source,
            events.ForgetChunks: self._ask_source,
            events.Quarantined: self._quarantined,
            events.DuplicateDiffers: self._duplicate_differs,
            events.DropStaging: self._drop_staging,
            events.ForgetWorker: self._forget_worker,
        }

    def __repr__(self) -> str:
        return (
            f"Loop(inbox={len(self._inbox)}, waiting={len(self._channels)}, streams={len(self._subscribers)}, "
            f"stopped={self._stopped is not None})"
        )

    def start(self) -> None:
        self._asyncio = asyncio.get_running_loop()
        self._segment_thread.start()
        self._guarded(lambda: self._perform_all(self.store.start()))
        self._tick()

    # -------------------------------------------------------------------------------------------------- inbox

    def post(self, event: events.Event) -> None:
        """Apply `event` in the next turn; a reply to it finds nobody waiting unless it has a channel."""
        self._inbox.append(event)
        if not self._turn_due:
            self._turn_due = True
            self._asyncio.call_soon(self._turn)

    def turn(self, work: Callable[[], None]) -> None:
        """Apply what `work` posts in this very turn of the event loop, not in its next. Not from within a turn."""
        self._turn_due, due = True, self._turn_due
        try:
            work()
        finally:
            self._turn()
            self._turn_due |= due  # then another is on its way, and does no harm

    def post_threadsafe(self, event: events.Event) -> None:
        self._call_threadsafe(lambda: self.post(event))

    def _call_threadsafe(self, work: Callable[[], None]) -> None:
        try:
            self._asyncio.call_soon_threadsafe(work)
        except RuntimeError:
            if not self._asyncio.is_closed():  # after the end nobody wants to know
                raise

    def channel(self, answered: Answered, timeout_s: float) -> int:
        """A number for `Ticket.channel`: `answered` is called exactly once with the answer, or after `timeout_s` with
        DeadlineExceeded, or with Unavailable when the loop stops; unless `drop_channel` came first.

        Raises Exhausted when too many requests wait already, Unavailable when the loop has stopped.
        """
        if self._stopped is not None:
            raise self._stopped
        if len(self._channels) >= CHANNELS_MAX:
            raise Exhausted(
                f"{CHANNELS_MAX} requests are waiting for their answers already", remedy="try again later"
            )
        number = self._next_channel
        self._next_channel += 1
        self._channels[number] = (answered, self._clock() + int(timeout_s * 1000))
        return number

    def drop_channel(self, number: int) -> None:
        self._channels.pop(number, None)

    async def ask(self, event: Any, timeout_s: float) -> Any:
        """Submit `event` (one with a ticket; its channel is set here) and wait for its answer; an answer that is a
        StoreError is raised. The wait ends within `timeout_s` and one tick."""
        future: asyncio.Future[events.Answer] = self._asyncio.create_future()

        def answered(answer: events.Answer) -> None:
            if not future.done():
                future.set_result(answer)

        number = self.channel(answered, timeout_s)
        self.post(replace(event, ticket=replace(event.ticket, channel=number)))
        try:
            answer = await future
        finally:
            self.drop_channel(number)
        if isinstance(answer, StoreError):
            raise answer
        return answer

    def subscribe(self, worker: WorkerId, push: Callable[[Push], None]) -> None:
        """From now on `push` gets what the core has to tell `worker`, first of all what it still has to unmap."""
        self._subscribers[worker] = push
        retired = self._retired.get(worker)
        if retired:
            push(events.SegmentsRetired(worker, tuple(sorted(retired))))

    def unsubscribe(self, worker: WorkerId, push: Callable[[Push], None]) -> None:
        """Unless somebody else subscribed meanwhile."""
        if self._subscribers.get(worker) == push:  # a bound method is another object each time, but equal
            del self._subscribers[worker]

    def disk_stats(self) -> SsdStats | None:
        """The work of the SSD tier; None without a tier."""
        return None if self._ssd is None else self._ssd.stats()

    # ------------------------------------------------------------------------------------------------- turns

    def _turn(self) -> None:
        self._turn_due = False
        if self._stopped is None:
            self._guarded(self._drain)

    def _drain(self) -> None:
        now = self._clock()
        inbox = self._inbox
        for _ in range(TURN_EVENTS_MAX):
            if not inbox:
                self._rest_soon()
                return
            event = inbox.popleft()
            if isinstance(event, events.SegmentsUnmapped):
                self._retired.get(event.ticket.worker, set()).difference_update(event.segments)
            elif isinstance(event, (events.WorkerClosed, events.WorkerLeft)):
                self._push(event)
            if self.observer is not None:
                self.observer(event, now)
            self._perform_all(self.store.apply(event, now))
        self._turn_due = True
        self._asyncio.call_soon(self._turn)

    def _rest_soon(self) -> None:
        if not self._rest_due and self.store.has_ahead():
            self._rest_due = True
            self._asyncio.call_soon(self._rest)  # after what this turn answered has gone out

    def _rest(self) -> None:
        """Nothing waits in the inbox: the core may do a little of what will be wanted next, or is long."""
        self._rest_due = False
        if self._stopped is None and not self._inbox:
            self._guarded(lambda: self._perform_all(self.store.apply(events.Idle(), self._clock())))
            self._rest_soon()

    def _perform_all(self, effects: list[events.Effect]) -> None:
        for effect in effects:
            self._perform[type(effect)](effect)

    def _tick(self) -> None:
        if self._stopped is not None:
            return
        self._ticker = self._asyncio.call_later(TICK_S, self._tick)
        self.post(events.Tick())
        self.directories.beat(monotonic_ms())
        if self._ssd is not None:
            self._report_disk()
        now = self._clock()
        late = [number for number, (_, deadline) in self._channels.items() if deadline <= now]
        for number in late:
            self._answer(number, DeadlineExceeded("the daemon did not answer in time", remedy="try again"))

    def _report_disk(self) -> None:
        """Health of the SSD tier, as often as it changes and people could read it."""
        state = self.store.state
        before, self._disk_state = self._disk_state, state.disk_state
        if state.disk_state is before:
            return
        self._on_disk(state.disk_state)
        if state.disk_state is DiskState.OK:
            log.info("the SSD tier is well again", extra=fields(was=before.name.lower()))
        else:
            log.error(
                "the SSD tier is degraded, DRAM serves on",
                extra=fields(state=state.disk_state.name.lower(), why=state.disk_why),
            )

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            log.critical(
                "a bug in the daemon: stopping, rather than serve bytes that may be wrong", exc_info=True
            )
            self._stop(
                Unavailable("the daemon stopped after an internal error", remedy="recompute; see its log")
            )
            self._on_fatal()

    # ------------------------------------------------------------------------------------------------ effects

    def _reply(self, effect: events.Reply) -> None:
        if effect.ticket.channel:
            self._answer(effect.ticket.channel, effect.answer)

    def _answer(self, number: int, answer: events.Answer) -> None:
        waiting = self._channels.pop(number, None)
        if waiting is not None:  # else the caller has gone, or its time was up
            waiting[0](answer)

    def _push(self, effect: Push) -> None:
        push = self._subscribers.get(effect.worker)
        if push is not None:
            push(effect)

    def _push_retired(self, effect: events.SegmentsRetired) -> None:
        self._retired.setdefault(effect.worker, set()).update(effect.segments)
        self._push(effect)

    def _set_generations(self, effect: events.SetGenerations) -> None:
        self.arena.set_generations(effect.segment, effect.cells, effect.generations)

    def _copy(self, effect: CopyEffect) -> None:
        self._copier.submit(effect, self.post_threadsafe)

    def _disk(self, effect: DiskEffect) -> None:
        assert self._ssd is not None, effect
        self._ssd.submit(effect)

    def _ask_source(self, effect: SourceEffect) -> None:
        self._sources[effect.source].submit(effect)

    def _quarantined(self, effect: events.Quarantined) -> None:
        if len(self._corrupt) >= CORRUPT_FILES_MAX:
            self._corrupt.clear()
        where = (effect.tier, effect.places[0][0] if effect.places else -1)
        self._corrupt[where] += 1
        if self._corrupt[where] > CORRUPT_TOLD_MAX:
            return
        log.error(
            "corrupt bytes: their slots are quarantined",
            extra=fields(
                tier=effect.tier.name.lower(),
                places=[list(place) for place in effect.places[:16]],
                namespace=effect.namespace,
                key=effect.key.hex(),
                why=effect.why,
                miss=effect.miss,
            ),
        )
        if self._corrupt[where] == CORRUPT_TOLD_MAX:
            log.error(
                "there is more of it than a chunk or two: what else is corrupt there is counted and quarantined,"
                " and not logged",
                extra=fields(tier=where[0].name.lower(), file=where[1]),
            )

    def _duplicate_differs(self, effect: events.DuplicateDiffers) -> None:
        log.warning(
            "two makers computed different bytes for one chunk: told once for each two",
            extra=fields(
                namespace=effect.namespace,
                key=effect.key.hex(),
                shard=effect.shard,
                first=effect.first.hex(),
                second=effect.second.hex(),
            ),
        )

    def _create_segment(self, effect: events.CreateSegment) -> None:
        def create() -> None:
            answer: events.Event
            try:
                self.arena.create(effect.segment, effect.bytes, effect.cells)
                answer = events.SegmentReady(effect.op)
            except (OSError, StoreError) as problem:
                if getattr(problem, "errno", None) != errno.ECANCELED:  # the daemon ends in the middle of it
                    log.error(
                        "a segment could not be created",
                        extra=fields(segment=effect.segment, why=str(problem)),
                    )
                answer = events.SegmentFailed(effect.op, str(problem))
            self.post_threadsafe(answer)

        self._segment_work.put(create)

    def _assign_segment(self, effect: events.AssignSegment) -> None:
        log.debug("segment assigned", extra=fields(segment=effect.segment, namespace=effect.namespace))

    def _destroy_segment(self, effect: events.DestroySegment) -> None:
        # Freeing a gigabyte of pages takes long, so the thread that makes segments unmakes them too.
        self._segment_work.put(lambda: self.arena.destroy(effect.segment))

    def _drop_staging(self, effect: events.DropStaging | events.ForgetWorker) -> None:
        self._segment_work.put(lambda: self.staging.drop(effect.worker))

    def _forget_worker(self, effect: events.ForgetWorker) -> None:
        self._retired.pop(effect.worker, None)
        self._drop_staging(effect)
        self._on_forget(effect.worker)

    def _run_segment_work(self) -> None:
        """What there is to do comes first; while nothing waits, the arena is faulted in, some at a time."""
        more = False
        while True:
            try:
                work = self._segment_work.get(block=not more)
            except queue.Empty:
                work = self.arena.fault_in
            if work is None:
                return
            try:
                more = work() is not False
            except Exception as problem:
                self._call_threadsafe(partial(self._guarded, partial(_raise, problem)))
                return

    # --------------------------------------------------------------------------------------------------- end

    def _stop(self, reason: StoreError) -> None:
        self._stopped = reason
        self._inbox.clear()
        if self._ticker is not None:
            self._ticker.cancel()
        for number in list(self._channels):
            self._answer(number, reason)

    def close(self, timeout_s: float) -> None:
        """Answer everybody who waits with Unavailable and end the threads; waits at most `timeout_s` for them."""
        if self._stopped is None:
            self._stop(Unavailable("the daemon is shutting down"))
        self._segment_work.put(None)
        self._copier.close(timeout_s / 3)
        self._segment_thread.join(timeout_s / 3)
        for source in self._sources.values():
            source.close(timeout_s / 3)
        if self._ssd is not None:
            self._ssd.close(timeout_s / 3)


def _raise(problem: Exception) -> None:
    raise problem
