"""The decision core: `Store.apply(event, now) -> effects`.

No clock, file, socket, thread or asyncio in here; the daemon and the simulator run this very code. Read `events.py`
first: it is the vocabulary. A step is: expire what is over, handle the event, hand back the effects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

from kvstore.core import events as ev
from kvstore.core.chunks import DOOMED, NONE, STORED
from kvstore.core.cold_tier import ColdTier, Restored
from kvstore.core.limits import Limits
from kvstore.core.namespaces import Namespace, chunk_salt
from kvstore.core.pool import Phase
from kvstore.core.remote.ahead import Ahead
from kvstore.core.remote.forgets import Forgets
from kvstore.core.remote.saves import RemoteSaves
from kvstore.core.remote.sessions import SharedSessions
from kvstore.core.remote.sources import Sources
from kvstore.core.requests import repeats
from kvstore.core.requests.duplicates import Duplicates
from kvstore.core.requests.hint_actions import HintActions
from kvstore.core.requests.outlines import Outline
from kvstore.core.requests.queue import Queue
from kvstore.core.requests.reads import Reads
from kvstore.core.requests.recall import Recalls
from kvstore.core.requests.resident import Residents
from kvstore.core.requests.saves import Saves
from kvstore.core.requests.sessions import Sessions
from kvstore.core.requests.touches import Touches
from kvstore.core.segments import Segments
from kvstore.core.ssd.rewrites import Rewrites
from kvstore.core.ssd.scrub import Scrubber
from kvstore.core.ssd.slab_tier import SlabTier
from kvstore.core.state import State
from kvstore.core.stats import stats, traffic
from kvstore.core.transfers import Transfers
from kvstore.core.workers import EngineGroup, Memory, Worker
from kvstore.errors import BadRequest, Exhausted, Precondition, StoreError
from kvstore.layout import NamespaceSpec
from kvstore.types import Millis, NamespaceId, OpId, Reason, Tier

RETIRED_DROPS_PER_TICK = 2_000
"""An old epoch's chunks go in steps, so that a reload never holds up the loop."""

GROUP_SPECS_MAX = 256
"""Of how many namespaces of an engine group it is checked that all its members agree."""

READ_ONLY = (
    ev.Match,
    ev.GetSession,
    ev.ListSessions,
    ev.Explain,
    ev.GetStats,
    ev.WantSegments,
    ev.Scrub,
    ev.ListQuarantine,
    ev.ReportResident,
    ev.Touch,
    ev.Touched,
    ev.WantDirectory,
)
"""Asked again, these are answered anew (a report of what is resident says the same again); everything else is
remembered by request id."""


TIERS: dict[str, Callable[[State], ColdTier]] = {"ssd": SlabTier}
"""What may be below DRAM, by the name that `Limits.cold_tier` says."""


class Store:
    def __init__(self, limits: Limits) -> None:
        self.state = State(limits)
        self.cold_tier = self.state.cold_tier = TIERS[limits.cold_tier](self.state)
        self.reads = Reads(self.state)
        self.segments = Segments(self.state, self.reads.revoke)
        self.saves = Saves(self.state, self.cold_tier, self.segments)
        self.transfers = Transfers(self.state, self.cold_tier, self.segments)
        self.queue = Queue(
            self.state,
            self.cold_tier,
            lambda row: self.transfers.promote(row, demanded=False),
            lambda rows: self.transfers.needed_sooner(rows),
        )
        self.residents = Residents(self.state)
        self.actions = HintActions(self.state, self.cold_tier, self.queue)
        self.touches = Touches(self.state, self.reads)
        self.sessions = Sessions(self.state, self.cold_tier, self.actions, self.residents)
        self.duplicates = Duplicates(self.state, self.reads)
        self.rewrites = Rewrites(self.state, self.cold_tier)
        self.sources = Sources(
            self.state,
            lambda row, demanded: self.transfers.reserve_slots(row, demanded=demanded),
            self.state.is_barred,
        )
        self.sources.resume = self._resume
        self.shared_sessions = SharedSessions(self.state)
        self.shared_sessions.answer = self._answer_session
        self.state.keys_elsewhere = self.shared_sessions.keys
        self.queue.is_unknown = self.shared_sessions.is_unknown
        self.ahead = Ahead(self.state, self.sources, self.shared_sessions)
        self.remote = RemoteSaves(self.state, self.sources)
        self.forgets = Forgets(self.state, self.sources, self.remote)
        self.state.hold = self.forgets.hold
        self.recalls = Recalls(self.state, self.cold_tier, self.forgets)
        self.recalls.drop_session = self.sessions.purge
        self.forgets.purge_sessions = self.shared_sessions.purge
        self.forgets.recalling = lambda: self.recalls.dropping
        self.scrub = Scrubber(self.state, self.cold_tier, self.transfers)
        self.reads.promote = self._bring
        self.reads.look = self.sources.look
        self._next_namespace = 1
        self._requests: dict[type, Callable[[Worker, Any], ev.Answer | None]] = {
            ev.Open: self._open,
            ev.Match: self.reads.match,
            ev.Acquire: self.reads.acquire,
            ev.Renew: self.reads.renew,
            ev.Release: self.reads.release,
            ev.Reserve: self._reserve,
            ev.Fill: self.saves.fill,
            ev.Commit: self.saves.commit,
            ev.Save: self._save,
            ev.Abort: self.saves.abort,
            ev.ReportLoad: self.reads.report,
            ev.ReportDuplicates: self._report_duplicates,
            ev.ReportResident: self.residents.report,
            ev.GetSession: self._get_session,
            ev.UpdateSession: self.sessions.update,
            ev.Truncate: self.sessions.truncate,
            ev.Fork: self.sessions.fork,
            ev.Forget: self._forget,
            ev.ListSessions: self.sessions.list,
            ev.Explain: self.sessions.explain,
            ev.GetStats: lambda worker, _: self._stats(worker),
            ev.PublishQueue: self.queue.publish,
            ev.ApplyActions: self.actions.apply,
            ev.Touch: self.touches.touch,
            ev.Touched: self.touches.looked_up,
            ev.Scrub: self.scrub.ask,
            ev.ListQuarantine: self.rewrites.list,
            ev.Recall: self._recall,
            ev.PurgeTenant: self._purge_tenant,
            ev.WantSegments: self.segments.want,
            ev.WantDirectory: self._want_directory,
            ev.SegmentsUnmapped: self._unmapped,
        }
        self._facts: dict[type, Callable[[Any], None]] = {
            ev.WorkerJoined: self._joined,
            ev.WorkerLeft: self._left,
            ev.WorkerClosed: self._closed,
            ev.SegmentReady: lambda event: self._segment_ready(event.op),
            ev.SegmentFailed: lambda event: self.segments.create_failed(event.op),
            ev.OpDone: lambda event: self._op_ended(event.op, event.checksums, ""),
            ev.OpFailed: lambda event: self._op_ended(event.op, None, event.why),
            ev.DiskDone: self._disk_done,
            ev.DiskTrouble: lambda event: self.cold_tier.troubled(event.why),
            ev.ChunksLookedUp: self.sources.looked_up,
            ev.ChunksFetched: self.sources.fetched,
            ev.ChunksStored: self.remote.ended,
            ev.ChunksForgotten: self.forgets.forgotten,
            ev.ForgottenElsewhere: self.forgets.elsewhere,
            ev.PurgedBeyond: lambda event: self.forgets.purged_beyond(event.op),
            ev.SessionsShared: self.shared_sessions.shared,
            ev.SessionsLookedUp: self.shared_sessions.looked_up,
            ev.Tick: lambda _: self._tick(),
            ev.Idle: lambda _: self._idle(),
            **self.cold_tier.facts(),
        }

    def __repr__(self) -> str:
        state = self.state
        return f"Store({state.chunks}, {state.pool}, {state.leases}, {len(state.workers)} workers)"

    def restore(self, snapshot: Any, now: Millis) -> Restored:
        """Put what the tier below DRAM holds in place (of the SSD: `Snapshot`); before `start` and the first event. How
        old it is nobody knows: sessions and chunks count as used at `now`, by the clock that `apply` goes on with."""
        self.state.now = self.state.policy.now = now
        restored = self.cold_tier.restore(snapshot)
        self._next_namespace = restored.next_namespace
        self.state.directory.everything()
        return restored

    def start(self) -> list[ev.Effect]:
        """The first effects: every segment of the arena is to be created."""
        for segment in self.state.pool.segments:
            self.segments.create(segment)
        return self.state.take_effects()

    def apply(self, event: ev.Event, now: Millis) -> list[ev.Effect]:
        """One step. `now` never goes back (a clock that does is held)."""
        state = self.state
        state.now = state.policy.now = max(state.now, now)
        if state.leases.expire(state.now):
            state.room += 1
        self.forgets.expire()
        fact = self._facts.get(type(event))
        if fact is not None:
            fact(event)
        else:
            self._request(event)
        self.cold_tier.make_room(self.sessions.drop)
        self.transfers.pump()
        self.sources.pump()
        while self.forgets.makers and self.recalls.has_room:
            self.recalls.elsewhere(*self.forgets.makers.popleft())
        self.remote.pump()
        self.forgets.pump()
        self.shared_sessions.pump()
        self.scrub.pump()
        self.recalls.pump()
        self.cold_tier.tell_gone()
        return state.take_effects()

    def has_ahead(self) -> bool:
        """Whether an `Idle` may find something to do."""
        return (
            self.segments.is_short()
            or bool(self.sessions.forgetting)
            or self.recalls.going
            or self.forgets.going
            or self.cold_tier.going
        )

    @property
    def behind(self) -> bool:
        """Whether a restart now would forget what a healthy disk is about to remember, or bring back what is about to
        be forgotten."""
        forgetting = bool(self.sessions.forgetting) or self.recalls.going
        return self.transfers.behind or forgetting or self.remote.behind or self.forgets.behind

    def hurry(self) -> None:
        """The daemon is about to stop: what the index lacks is written as soon as it can be, from now on."""
        self.cold_tier.hurry(+1)

    # ---------------------------------------------------------------------------------------------------- requests

    def _request(self, event: Any) -> None:
        """Answer once: a repeated request gets the first answer, an expected failure is an answer."""
        state = self.state
        ticket: ev.Ticket = event.ticket
        try:
            worker = state.worker(ticket.worker)
        except StoreError as error:
            state.effects.append(ev.Reply(ticket, error))
            return
        remembered = ticket.request_id and not isinstance(event, READ_ONLY)
        if remembered:
            if not worker.memory.asked(ticket.request_id, type(event)):
                refusal = BadRequest(
                    "another kind of request had this number",
                    field="request_id",
                    value=ticket.request_id,
                    remedy="number the requests of a worker upwards",
                )
                state.effects.append(ev.Reply(ticket, refusal))
                return
            answer: Any
            try:
                answer = self._first_answer(worker, event)
            except StoreError as error:
                answer = error
            if answer is not None:
                state.effects.append(ev.Reply(ticket, answer))
                return
            under_way = worker.memory.waiting.get(ticket.request_id)
            if under_way is not None:
                under_way.append(ticket)
                return
        try:
            result = self._requests[type(event)](worker, event)
        except StoreError as error:
            result = error
        if result is not None:
            if remembered:
                state.reply(ticket, result)
            else:
                state.effects.append(ev.Reply(ticket, result))
        elif remembered and worker.memory.recall(ticket.request_id) is None:
            worker.memory.waiting[ticket.request_id] = []

    def _first_answer(self, worker: Worker, event: Any) -> ev.Answer | None:
        """What a request of this number was answered; None: it is new, or to be carried out again."""
        number = event.ticket.request_id
        kept = worker.memory.recall(number)
        if not isinstance(kept, Outline):
            return kept
        answer = repeats.again(self.state, self.sessions, worker, event, kept)
        if answer is None:
            worker.memory.forget(number)
        return answer

    def _get_session(self, worker: Worker, event: ev.GetSession) -> ev.SessionInfo | None:
        """None: it is answered when it is known what others told of it, or when its time is up."""
        info = self.sessions.get(worker, event)
        if not event.elsewhere:
            return info
        if self.shared_sessions.find(self.state.namespaces[event.namespace], event):
            return None
        return self._with_elsewhere(info, event)

    def _with_elsewhere(self, info: ev.SessionInfo, event: ev.GetSession) -> ev.SessionInfo:
        known = self.shared_sessions.known.get((event.namespace, event.session))
        there = known.there if known is not None else None
        return info if there is None or there.ours else replace(info, elsewhere=there)

    def _answer_session(self, event: ev.GetSession) -> None:
        """A request that waited for what others told. Nobody is left to answer if its worker has gone."""
        worker = self.state.workers.get(event.ticket.worker)
        if worker is None:
            return
        answer: ev.Answer
        try:
            answer = self._with_elsewhere(self.sessions.get(worker, event), event)
        except StoreError as error:
            answer = error
        self.state.effects.append(ev.Reply(event.ticket, answer))

    def _forget(self, worker: Worker, event: ev.Forget) -> ev.Done | None:
        """None: answered when nothing can bring back what was forgotten, as far as that can be had in time."""
        if not self.forgets.active:
            return self.sessions.forget(worker, event)
        self.state.to_hold.add(event.ticket)
        try:
            answer = self.sessions.forget(worker, event)
            self.forgets.forget_keys(self.state.namespaces[event.namespace], event.keys)
        except StoreError:
            self.state.to_hold.discard(event.ticket)
            raise
        if answer is None:
            return None
        self.state.to_hold.discard(event.ticket)
        return None if self.forgets.hold(event.ticket, answer) else answer

    def _report_duplicates(self, worker: Worker, event: ev.ReportDuplicates) -> ev.Done:
        if event.wrong:
            return self.recalls.report_wrong(worker, event)
        return self.duplicates.report(worker, event)

    def _recall(self, worker: Worker, event: ev.Recall) -> ev.Recalled | None:
        """As `_forget`."""
        if self.forgets.active and not event.dry_run:
            self.state.to_hold.add(event.ticket)
        try:
            return self.recalls.ask(worker, event)
        except StoreError:
            self.state.to_hold.discard(event.ticket)
            raise

    def _purge_tenant(self, worker: Worker, event: ev.PurgeTenant) -> ev.Purged | None:
        """As `_forget`."""
        if self.forgets.active and not event.dry_run:
            self.state.to_hold.add(event.ticket)
        try:
            return self.recalls.ask_purge(worker, event)
        except StoreError:
            self.state.to_hold.discard(event.ticket)
            raise

    def _resume(self, event: ev.Match | ev.Acquire) -> None:
        """A parked request goes on with what is known now. Nobody is left to answer if its worker has gone."""
        state = self.state
        worker = state.workers.get(event.ticket.worker)
        if worker is None:
            return
        answer: ev.Answer
        found: ev.Matched | ev.Acquired | None
        try:
            state.worker(worker.id)
            if isinstance(event, ev.Match):
                found = self.reads.match(worker, event, may_wait=False)
            else:
                found = self.reads.acquire(worker, event, may_wait=False)
            assert found is not None, event
            answer = found
        except StoreError as error:
            answer = error
        if isinstance(event, ev.Match):
            state.effects.append(ev.Reply(event.ticket, answer))
        else:
            state.reply(event.ticket, answer)

    def _bring(self, row: int) -> None:
        """Somebody asked for a chunk that is not in DRAM."""
        if self.state.chunks.flags[row] & STORED:
            self.transfers.promote(row, demanded=True)
        else:
            self.sources.fetch(row, demanded=True)

    def _stats(self, worker: Worker) -> ev.Stats:
        values = stats(self.state, worker, self.residents, self.remote.bytes_of)
        if worker.admin:
            values["gauges"] |= traffic(self.queue, self.transfers) | self.actions.gauges()
            values["gauges"] |= self.sources.gauges() | self.remote.gauges() | self.forgets.gauges()
            values["gauges"] |= self.shared_sessions.gauges()
        return ev.Stats(values)

    def _open(self, worker: Worker, event: ev.Open) -> ev.Opened:
        """The namespace of this spec, for the caller's tenant; a newer epoch retires the older one."""
        state = self.state
        spec = event.spec
        spec.validate()
        largest = max(state.pool.slot_bytes(size) for size in spec.shard_bytes)
        if largest > state.limits.segment_bytes:
            raise BadRequest(
                f"a shard does not fit in a segment of {state.limits.segment_bytes} bytes",
                field="namespace.groups: shard_bytes",
                value=max(spec.shard_bytes),
                remedy="raise the daemon's segment_bytes, or use fewer tokens per chunk",
            )
        if sum(state.pool.slot_bytes(size) for size in spec.shard_bytes) > state.limits.pin_bytes_max:
            raise BadRequest(
                f"one chunk is larger than the {state.limits.pin_bytes_max} bytes that an engine group may pin",
                field="namespace.groups: chunk bytes",
                value=spec.chunk_bytes,
                remedy="raise the daemon's dram_bytes or pin_share_max",
            )
        chunk_bytes = sum(state.pool.slot_bytes(size) for size in spec.shard_bytes)
        quota = state.quotas.of(Tier.DRAM, worker.tenant)
        if chunk_bytes > quota:
            raise BadRequest(
                f"one chunk takes {chunk_bytes} bytes of DRAM, and the quota of tenant {worker.tenant} is {quota}",
                field="namespace.groups: chunk bytes",
                value=spec.chunk_bytes,
                remedy="raise the tenant's quota (the daemon's dram_quotas), or use fewer tokens per chunk",
            )
        if largest > state.limits.reserve_bytes_max:
            raise BadRequest(
                f"a shard is larger than the {state.limits.reserve_bytes_max} bytes that a worker may reserve",
                field="namespace.groups: shard_bytes",
                value=max(spec.shard_bytes),
                remedy="raise the daemon's dram_bytes or reserve_share_max",
            )
        if not worker.remote:  # it has no ranks, and a connection may carry the calls of several callers
            _check_engine_group(worker.group, spec)
        family = spec.digest(worker.tenant)
        namespace = state.newest_epoch.get(family)
        if namespace is not None and namespace.spec.weights_epoch > spec.weights_epoch:
            raise Precondition(
                f"epoch {namespace.spec.weights_epoch} of these weights was opened already",
                field="namespace.weights_epoch",
                value=spec.weights_epoch,
                remedy="an old epoch is never served again: use the newest",
            )
        if namespace is None or namespace.spec.weights_epoch < spec.weights_epoch:
            namespace = self._new_namespace(worker, spec, family, namespace)
        worker.opened.add(namespace.id)
        state.opens += 1
        namespace.opened = state.opens
        timeless = replace(spec, weights_epoch=0)
        if timeless not in worker.group.specs:
            worker.group.specs.append(timeless)
            del worker.group.specs[:-GROUP_SPECS_MAX]
        return ev.Opened(
            namespace.id,
            chunk_salt(family, spec.weights_epoch),
            spec.weights_epoch,
            state.limits.segment_bytes,
            _relatives(state, namespace),
        )

    def _new_namespace(
        self, worker: Worker, spec: NamespaceSpec, family: bytes, older: Namespace | None
    ) -> Namespace:
        state = self.state
        if len(state.namespaces) >= state.limits.namespaces_max:
            self._reap_namespaces()
        if len(state.namespaces) >= state.limits.namespaces_max:
            raise Exhausted("too many namespaces are open", field="namespace", value=len(state.namespaces))
        if older is not None:
            older.retired = True
            state.directory.retired()
            self.forgets.forget_namespace(older)
            state.counters["epochs_retired"] += 1
        slot_bytes = tuple(state.pool.slot_bytes(size) for size in spec.shard_bytes)
        namespace = Namespace(
            id=NamespaceId(self._next_namespace),
            tenant=worker.tenant,
            spec=spec,
            family=family,
            shards=spec.shard_count,
            slot_bytes=slot_bytes,
            chunk_bytes=sum(slot_bytes),
        )
        self._next_namespace += 1
        state.add_namespace(namespace)
        state.newest_epoch[family] = namespace
        self.cold_tier.opened(namespace)
        return namespace

    def _reserve(self, worker: Worker, event: ev.Reserve) -> ev.Reserved:
        self.recalls.check(worker.tenant, event.maker)
        return self.saves.reserve(worker, event)

    def _save(self, worker: Worker, event: ev.Save) -> ev.Saved | None:
        self.recalls.check(worker.tenant, event.reserve.maker)
        return self.saves.save(worker, event)

    def _want_directory(self, worker: Worker, event: ev.WantDirectory) -> ev.DirectoryAllowed:
        """For those only who opened the namespace, as its segments are (invariant 9)."""
        namespace = self.state.own_namespace(worker, event.namespace)
        if not namespace.directory_rows_max:
            raise Precondition(
                "directories are off here", field="directory", remedy="ask by Match and Acquire"
            )
        return ev.DirectoryAllowed(namespace.id)

    def _unmapped(self, worker: Worker, event: ev.SegmentsUnmapped) -> ev.Done:
        self.segments.unmapped(worker, event.segments)
        return ev.Done(len(event.segments))

    # ------------------------------------------------------------------------------------------------------- facts

    def _joined(self, event: ev.WorkerJoined) -> None:
        state = self.state
        assert event.worker not in state.workers, event
        group = EngineGroup(event.tenant, event.engine_group or f"worker {event.worker}")
        if event.engine_group:
            group = state.groups.setdefault((event.tenant, event.engine_group), group)
        group.members.add(event.worker)
        state.workers[event.worker] = Worker(
            event.worker,
            event.tenant,
            group,
            event.rank,
            event.admin,
            event.remote,
            Memory(state.limits.remembered_answers_max, state.limits.remembered_rows_max),
        )

    def _left(self, event: ev.WorkerLeft) -> None:
        worker = self.state.workers.get(event.worker)
        if worker is not None:
            self._remove(worker)

    def _closed(self, event: ev.WorkerClosed) -> None:
        worker = self.state.workers.get(event.worker)
        if worker is None or worker.closed:
            return
        worker.closed = True
        # Nobody will take its hints back; a scheduler that reconnects publishes again.
        self.actions.forget(worker.id)
        self.queue.forget(worker.id)
        self.residents.forget(worker.id)
        self.saves.abort_all(worker, gone=False)
        self._remove_if_over(worker)

    def _remove_if_over(self, worker: Worker) -> None:
        """A closed connection's process may live on; the worker goes once it can touch nothing of ours any more: it
        has no mapping left and will get none, so no old copy of it reads, and it writes no slot that it was granted."""
        if worker.reservations:
            return
        if not worker.holds:
            self._remove(worker)
        elif not worker.staging_dropped:
            worker.staging_dropped = True
            self.state.effects.append(ev.DropStaging(worker.id))

    def _remove(self, worker: Worker) -> None:
        """Everything the worker had ends; its engine group's leases with the last member."""
        state = self.state
        self.saves.abort_all(worker, gone=True)
        self.saves.release_suspects(worker)
        for row, waits in list(state.waits.items()):
            kept = [wait for wait in waits if wait.worker != worker.id]
            if kept:
                state.waits[row] = kept
            else:
                del state.waits[row]
        worker.group.members.discard(worker.id)
        if not worker.group.members:
            for lease_id in list(worker.group.leases):
                state.close_lease(state.leases.leases[lease_id])
            if state.groups.get((worker.tenant, worker.group.name)) is worker.group:
                del state.groups[worker.tenant, worker.group.name]
        self.segments.unmapped(worker, list(worker.holds))
        self.actions.forget(worker.id)
        self.queue.forget(worker.id)
        self.residents.forget(worker.id)
        del state.workers[worker.id]
        state.effects.append(ev.ForgetWorker(worker.id))

    def _segment_ready(self, op: OpId) -> None:
        self.segments.created(op)
        self.transfers.try_again()
        self.sources.try_again()

    def _op_ended(self, op: Any, checksums: tuple[int, ...] | None, why: str) -> None:
        if op in self.saves.copies:
            self.saves.copied(op, checksums, why)
        elif op in self.saves.late:
            self.saves.late_copy_returned(op)
        elif op in self.segments.moves:
            self.segments.moved(op, checksums)
        elif op in self.reads.audits:
            corrupt = self.reads.audited(op, checksums)
            if op in self.duplicates.audits:
                self.duplicates.audited(op, corrupt)
        elif op in self.scrub.audits:
            self.scrub.audited(op, checksums)
        elif op in self.rewrites.ops:
            self.rewrites.rewritten_dram(op, checksums)
        else:
            raise AssertionError(f"op {op} is not under way")

    def _disk_done(self, event: ev.DiskDone) -> None:
        if event.op == self.scrub.op:
            self.scrub.has_read(event.results, event.whys)
        elif event.op in self.rewrites.ops:
            self.rewrites.rewritten_ssd(event.op, event.results)
        else:
            self.transfers.ended(event)

    def _idle(self) -> None:
        self.segments.evict_ahead()
        self.sessions.go_on()
        self.recalls.go_on()
        self.forgets.go_on()

    def _tick(self) -> None:
        self.saves.tick()
        self.reads.tick()
        self.segments.tick()
        self.transfers.tick()
        self.sources.tick()
        self.shared_sessions.tick()
        self.ahead.tick()
        self.remote.tick()
        self.forgets.go_on()
        self.actions.tick()
        self.queue.tick()
        self.residents.tick()
        self.sessions.tick()
        self.recalls.tick()
        self.rewrites.tick()
        self.scrub.tick()
        self._end_waits()
        self._drop_retired()
        for worker in [worker for worker in self.state.workers.values() if worker.closed]:
            self._remove_if_over(worker)

    def _end_waits(self) -> None:
        state = self.state
        for row, waits in list(state.waits.items()):
            over = [wait for wait in waits if wait.until <= state.now]
            if over:
                kept = [wait for wait in waits if wait.until > state.now]
                if kept:
                    state.waits[row] = kept
                else:
                    del state.waits[row]
                for wait in over:
                    state.tell(wait, row, ready=False)

    def _drop_retired(self) -> None:
        """Chunks of old epochs are misses already; here their memory comes back, some at a time. Those that are pinned
        or being written go by themselves when they are let go of."""
        state = self.state
        chunks = state.chunks
        left = RETIRED_DROPS_PER_TICK
        for namespace in state.namespaces.values():
            if not namespace.retired or left <= 0:
                continue
            if namespace.sessions:
                mine = (s for s in state.sessions.by_name.values() if s.namespace == namespace.id)
                for session in list(islice(mine, min(left, namespace.sessions))):
                    self.sessions.drop(session)
                    left -= 1
            alive = ((k, row) for k, row in namespace.index.items() if not chunks.flags[row] & DOOMED)
            for key, row in list(islice(alive, max(0, left))):
                left -= 1
                if namespace.index.get(key) == row:  # else it went with another
                    state.doom(row, Reason.OLD_EPOCH)
                    if (
                        namespace.index.get(key) == row
                        and chunks.shard0[row] == NONE
                        and not chunks.refs[row]
                    ):
                        state.remove_row(row)

    def _reap_namespaces(self) -> None:
        """Namespaces that hold nothing and that nobody has open; old epochs also while somebody has them open, who is
        told then to open the newest."""
        state = self.state
        opened = {namespace_id for worker in state.workers.values() for namespace_id in worker.opened}
        with_segments = {s.namespace for s in state.pool.segments if s.phase is Phase.ASSIGNED}
        gone: list[Namespace] = []
        for namespace in state.namespaces.values():
            if namespace.index or namespace.sessions or namespace.id in with_segments:
                continue
            if namespace.id in opened and not namespace.retired:
                continue
            gone.append(namespace)
            self.cold_tier.closed(namespace.id)
            for worker in state.workers.values():
                worker.opened.discard(namespace.id)
            if state.newest_epoch.get(namespace.family) is namespace:
                del state.newest_epoch[namespace.family]
        state.remove_namespaces(gone)


def _check_engine_group(group: EngineGroup, spec: NamespaceSpec) -> None:
    """The ranks of one engine must agree on everything about one model: a layout that differs is an error here, not a
    silent miss (or worse) later."""
    for known in group.specs:
        same_model = (known.model, known.adapter_digest, known.salt, known.kv_scales_digest) == (
            spec.model,
            spec.adapter_digest,
            spec.salt,
            spec.kv_scales_digest,
        )
        if same_model:
            differences = known.differences(replace(spec, weights_epoch=0))
            if differences and known.weights_digest == spec.weights_digest:
                raise Precondition(
                    f"another member of engine group {group.name!r} opened it differently: {'; '.join(differences)}",
                    field="namespace",
                    value=spec.model,
                    remedy="all ranks of an engine must send the same namespace; a process that serves two of one name "
                    "opens each by another connect()",
                )


def _relatives(state: State, namespace: Namespace) -> tuple[str, ...]:
    """Why there may be no hits: namespaces of the same tenant and model that differ in something."""
    notes = []
    for other in state.namespaces.values():
        if (
            other is not namespace
            and other.tenant == namespace.tenant
            and other.spec.model == namespace.spec.model
        ):
            differences = namespace.spec.differences(other.spec)
            notes.append(f"namespace {other.id} of this model does not match: {'; '.join(differences)[:500]}")
    return tuple(notes[:8])
