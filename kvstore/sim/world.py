"""A tiny world around the core: virtual time, memory whose content can be seen, and workers that map it.

The world performs every effect, at once or (`hold`) when it is told to, and checks after each step what no test should
have to remember: the core's own integrity; that what a hit names is what was committed under that key; that nobody
writes what a living reader or another writer may still use (invariant 8); and that no segment changes hands while
somebody maps it (invariant 9). Memory has one tag per page instead of bytes: the tag of what was written there.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvstore.core import events as ev
from kvstore.core.limits import Limits
from kvstore.core.store import Store
from kvstore.errors import StoreError
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.sim.integrity import Watch
from kvstore.sim.readers import Directories
from kvstore.types import (
    ChunkKey,
    Extent,
    LeaseId,
    NamespaceId,
    OpId,
    Outcome,
    Protection,
    Reason,
    RegionId,
    ReservationId,
    SegmentId,
    SlotState,
    StagedPiece,
    Wait,
    WorkerId,
)

PAGE = 4096
CHUNK_TOKENS = 4
UNWRITTEN = 0
WRITTEN_LATER = 0xBAD

Shard = tuple[NamespaceId, ChunkKey, int]
Op = ev.CopyIn | ev.FillSlots | ev.Checksum | ev.MoveSlots | ev.RewriteSlots
REGION = RegionId(1)
"""Every worker has lent one."""


def spec(
    model: str = "llama", *, shards: int = 1, shard_bytes: int = PAGE, epoch: int = 0, **others: Any
) -> NamespaceSpec:
    """A namespace of one group unless told otherwise."""
    groups = others.pop("groups", (GroupSpec("kv", shard_bytes, shard_count=shards),))
    return NamespaceSpec(
        model, others.pop("weights", b"w"), "layout", CHUNK_TOKENS, groups, weights_epoch=epoch, **others
    )


def chain(name: str, count: int) -> tuple[ChunkKey, ...]:
    return tuple(ChunkKey(f"{name}-{number}".encode()) for number in range(count))


def tag(shard: Shard, variant: int = 0) -> int:
    """What a worker writes for a shard; another `variant` stands for an engine that computes differently."""
    state = hashlib.blake2b(repr((*shard, variant)).encode(), digest_size=8)
    return int.from_bytes(state.digest(), "little") | 1


@dataclass(slots=True)
class Saving:
    """A reservation as its worker sees it."""

    worker: WorkerId
    shards: tuple[Shard, ...]
    extents: Sequence[Extent]


class World:
    def __init__(
        self,
        *,
        segments: int = 8,
        segment_bytes: int = 16 * PAGE,
        protection: Protection = Protection.SEALED,
        **limits: Any,
    ) -> None:
        limits.setdefault("slot_alignment", PAGE)
        self.limits = Limits(segments * segment_bytes, segment_bytes, protection, **limits)
        self.store = Store(self.limits)
        self.watch = Watch(self.store)
        """Looks at the whole state after every event."""
        self.now = 0
        self.hold: set[type] = set()
        """Kinds of effects (CopyIn, FillSlots, Checksum, MoveSlots, CreateSegment) that wait in `held` until
        `finish`."""
        self.held: list[Any] = []
        self.unmap_at_once = True
        """Workers unmap what is retired as soon as they are told."""
        self.pushes: list[ev.ChunksSettled | ev.SegmentsRetired | ev.LeasesRevoked] = []
        self.replies: list[ev.Reply] = []
        self.answers: dict[tuple[WorkerId, int], ev.Answer] = {}
        self.committed: dict[Shard, int] = {}
        """Tag of every shard, as it was last committed."""
        self.memory: dict[SegmentId, list[int]] = {}
        self.cells: dict[SegmentId, list[int]] = {}
        self.damaged: set[tuple[SegmentId, int]] = set()
        """Pages whose bits flipped since they were written."""
        self.mapped: dict[WorkerId, set[SegmentId]] = {}
        """By process: closed connections keep their mappings."""
        self.groups: dict[WorkerId, tuple[str, str]] = {}
        self.leases: dict[LeaseId, tuple[WorkerId, Sequence[Extent]]] = {}
        self._leases_told: set[LeaseId] = set()
        self._reservations_told: set[ReservationId] = set()
        """All that this life of the store has answered with."""
        self._leased: dict[LeaseId, frozenset[tuple[SegmentId, int]]] = {}
        """The pages of each."""
        self.savings: dict[ReservationId, Saving] = {}
        self.may_write: dict[tuple[SegmentId, int], WorkerId] = {}
        """Pages that a worker may be writing in place (protection `group`), by its own understanding."""
        self.rows: dict[tuple[WorkerId, int], int] = {}
        """By offset, what each worker's region holds; without a row it ends there."""
        self.filled_from: dict[ReservationId, tuple[int, ...]] = {}
        """Rows that the last Fill of a reservation named."""
        self._meant: dict[ReservationId, tuple[int, ...]] = {}
        """What they held then."""
        self._staging: dict[tuple[WorkerId, int], int] = {}
        self._staged_for: dict[ReservationId, tuple[int, ...]] = {}
        """What the pieces hold that a Save names for what it was granted."""
        self._copying: dict[OpId, tuple[ReservationId, tuple[Extent, ...]]] = {}
        """Of commits, and of fills ahead of them: what they write."""
        self._copied: dict[ReservationId, dict[tuple[SegmentId, int], int]] = {}
        """By (segment, offset) what such copies have put there."""
        self._asked: dict[tuple[WorkerId, int], Any] = {}
        self.directories = Directories(self.store, self.cells, self._held_in, self.committed)
        """Those of the store, with readers who copy without a lease."""
        self._owner: dict[SegmentId, NamespaceId] = {}
        self._inbox: deque[ev.Event] = deque()
        self._next_worker = 1
        self._next_request = 1
        self._next_piece = 0
        self._perform_all(self._begin())
        self._drain()

    def _begin(self) -> list[ev.Effect]:
        self._leases_told.clear()
        self._reservations_told.clear()
        return self.store.start()

    # ------------------------------------------------------------------------------------------------------- steps

    def step(self, event: ev.Event) -> None:
        """Apply one event and whatever follows from it at once."""
        self._inbox.append(event)
        self._drain()

    def _drain(self) -> None:
        while self._inbox:
            event = self._inbox.popleft()
            saved = self.store.state.counters["chunks_saved"]
            if isinstance(event, ev.OpDone):
                self._note_copied(event)
            effects = self.store.apply(event, self.now)
            committed = self.store.state.counters["chunks_saved"] != saved
            if isinstance(event, ev.Commit) and (committed or self._waits(event)):
                self._note_told(event)
            if committed:
                self._note_all_committed(event)
            if isinstance(event, ev.Save):
                self._note_saving(event, effects)
            if isinstance(event, (ev.Commit, ev.Fill)):
                for effect in effects:
                    if isinstance(effect, (ev.CopyIn, ev.Checksum)):
                        targets = effect.targets if isinstance(effect, ev.CopyIn) else effect.extents
                        self._copying[effect.op] = (event.reservation, tuple(targets))
            self._perform_all(effects)
            self.watch.check()
            self.directories.check(list(self.watch.changed))
            self.store.rewrites.check_integrity()
            self.store.actions.check_integrity()
            self._applied(event)

    def _applied(self, event: ev.Event) -> None:
        """After each event and its effects. Whatever became READY has the bytes that were committed."""
        chunks = self.store.state.chunks
        for row in self.watch.changed:
            facts = self.watch.facts.get(row)
            for shard, place in enumerate(facts.shard_rows if facts is not None else ()):
                if chunks.shard_ready[place]:
                    self._check_bytes(row, shard)

    def _check_bytes(self, row: int, shard: int) -> None:
        state = self.store.state
        namespace = state.namespace_of(row)
        extent = state.extent(row, shard, namespace.spec.shard_bytes[shard])
        wanted = self.committed.get((namespace.id, state.chunks.key[row], shard))
        if self.is_damaged(extent):
            return
        assert extent.checksum == wanted == self._read(extent), (
            state.chunks.describe(row),
            shard,
            extent,
            wanted,
        )

    def tick(self, ms: int = 0) -> None:
        self.now += ms
        self.step(ev.Tick())

    def ask(
        self,
        kind: Callable[..., Any],
        worker: WorkerId,
        *args: Any,
        request_id: int | None = None,
        **named: Any,
    ) -> Any:
        """The answer, raised if it is an error; None while there is none."""
        if request_id is None:
            request_id = self._next_request
            self._next_request += 1
        event = kind(ev.Ticket(worker, request_id), *args, **named)
        self._asked[worker, request_id] = event
        self.answers.pop((worker, request_id), None)
        self.step(event)
        answer = self.answers.get((worker, request_id))
        if isinstance(answer, StoreError):
            raise answer
        return answer

    # ----------------------------------------------------------------------------------------------------- workers

    def join(
        self,
        tenant: str = "alice",
        group: str = "",
        rank: int = 0,
        *,
        admin: bool = False,
        remote: bool = False,
    ) -> WorkerId:
        worker = WorkerId(self._next_worker)
        self._next_worker += 1
        self.mapped[worker] = set()
        self.groups[worker] = (tenant, group or f"only {worker}")
        self.step(ev.WorkerJoined(worker, tenant, group, rank, admin, remote))
        return worker

    def kill(self, worker: WorkerId) -> None:
        """The process is gone, and with it its mappings."""
        del self.mapped[worker]
        self.may_write = {page: owner for page, owner in self.may_write.items() if owner != worker}
        self.step(ev.WorkerLeft(worker))

    def close(self, worker: WorkerId) -> None:
        """The connection is gone, the process lives: it writes on where it has mappings, and will get no others."""
        self.may_write = {
            (segment, page): owner
            for (segment, page), owner in self.may_write.items()
            if owner != worker or segment in self.mapped[worker]
        }
        self.step(ev.WorkerClosed(worker))

    def open(self, namespace: NamespaceSpec, *workers: WorkerId) -> NamespaceId:
        """Open it for each of these workers of one tenant."""
        opened: list[ev.Opened] = [self.ask(ev.Open, worker, namespace) for worker in workers]
        (number,) = {answer.namespace for answer in opened}
        return number

    def map(self, worker: WorkerId, segments: Sequence[SegmentId]) -> tuple[SegmentId, ...]:
        allowed: ev.SegmentsAllowed = self.ask(ev.WantSegments, worker, tuple(segments))
        self.mapped[worker] |= set(allowed.segments)
        return allowed.segments

    def unmap(self, worker: WorkerId, segments: Sequence[SegmentId]) -> None:
        self.mapped[worker] -= set(segments)
        self.ask(ev.SegmentsUnmapped, worker, tuple(segments))

    # ------------------------------------------------------------------------------------------------------ writing

    def reserve(
        self, worker: WorkerId, namespace: NamespaceId, keys: Sequence[ChunkKey], **named: Any
    ) -> ev.Reserved:
        reserved: ev.Reserved = self.ask(ev.Reserve, worker, namespace, tuple(keys), **named)
        return reserved

    def write(self, reserved: ev.Reserved, variant: int = 0) -> tuple[StagedPiece, ...]:
        """The worker writes its bytes: into staging memory, or in place. Returns what Commit names."""
        saving = self.savings[reserved.reservation]
        pieces = []
        for shard, extent in zip(saving.shards, saving.extents, strict=True):
            if self.limits.protection is Protection.GROUP:
                pages = {self.may_write.get((extent.segment, page)) for page in _pages(extent)}
                if pages == {saving.worker}:  # not what it has committed or aborted before
                    self._write(extent, tag(shard, variant), by=saving.worker)
                continue
            self._next_piece += 1
            self._staging[saving.worker, self._next_piece] = tag(shard, variant)
            pieces.append(StagedPiece(self._next_piece, 0))
        return tuple(pieces)

    def stage(self, worker: WorkerId, shards: Sequence[Shard], variant: int = 0) -> tuple[int, ...]:
        """The worker writes into its staging memory what it has been granted no slots for; where."""
        offsets = []
        for shard in shards:
            self._next_piece += 1
            self._staging[worker, self._next_piece] = tag(shard, variant)
            offsets.append(self._next_piece)
        return tuple(offsets)

    def save_at_once(
        self,
        worker: WorkerId,
        namespace: NamespaceId,
        keys: Sequence[ChunkKey],
        *,
        shards: Sequence[int] = (0,),
        variant: int = 0,
        wait: Wait = Wait.VISIBLE,
        **named: Any,
    ) -> ev.Saved | None:
        """By one Save; None while its copy runs."""
        offsets = self.stage(worker, [(namespace, key, shard) for key in keys for shard in shards], variant)

        def event(ticket: ev.Ticket) -> ev.Save:
            reserve = ev.Reserve(ticket, namespace, tuple(keys), shards=tuple(shards), **named)
            return ev.Save(ticket, reserve, offsets, wait)

        saved: ev.Saved | None = self.ask(event, worker)
        return saved

    def commit(self, worker: WorkerId, reserved: ev.Reserved, *, variant: int = 0) -> ev.Committed | None:
        staged = self.write(reserved, variant)
        self._let_go(reserved.reservation)
        committed: ev.Committed | None = self.ask(ev.Commit, worker, reserved.reservation, staged)
        return committed

    def fill(self, worker: WorkerId, reserved: ev.Reserved, *, variant: int = 0) -> ev.Filled | None:
        """The worker writes rows of its region, and has them copied; None while that runs."""
        offsets, meant = [], []
        for shard in self.savings[reserved.reservation].shards:
            self._next_piece += 1
            offsets.append(self._next_piece)
            meant.append(tag(shard, variant))
            self.rows[worker, self._next_piece] = meant[-1]
        self._let_go(reserved.reservation)
        filled: ev.Filled | None = self.ask(ev.Fill, worker, reserved.reservation, REGION, tuple(offsets))
        self.filled_from[reserved.reservation] = tuple(offsets)
        self._meant[reserved.reservation] = tuple(meant)
        return filled

    def fill_part(
        self,
        worker: WorkerId,
        reserved: ev.Reserved,
        numbers: Sequence[int],
        staged: Sequence[StagedPiece],
        **named: Any,
    ) -> ev.Filled | None:
        """Ahead of the commit, some of what `write` has written; None while that runs."""
        offsets = tuple(staged[number].offset for number in numbers) if staged else ()
        for number in numbers:
            extent = self.savings[reserved.reservation].extents[number]
            for page in _pages(extent):
                self.may_write.pop((extent.segment, page), None)
        filled: ev.Filled | None = self.ask(
            ev.Fill, worker, reserved.reservation, RegionId(0), offsets, tuple(numbers), **named
        )
        return filled

    def reuse_rows(self, worker: WorkerId, reserved: ev.Reserved) -> None:
        """The worker writes something else where the last Fill is to read."""
        for offset in self.filled_from[reserved.reservation]:
            self.rows[worker, offset] = WRITTEN_LATER

    def cut_region(self, worker: WorkerId) -> None:
        """The worker makes its region shorter than any row."""
        self.rows = {row: held for row, held in self.rows.items() if row[0] != worker}

    def commit_filled(self, worker: WorkerId, reserved: ev.Reserved, **named: Any) -> ev.Committed | None:
        committed: ev.Committed | None = self.ask(ev.Commit, worker, reserved.reservation, (), **named)
        return committed

    def abort(self, worker: WorkerId, reserved: ev.Reserved) -> int:
        self._let_go(reserved.reservation)
        done: ev.Done = self.ask(ev.Abort, worker, (reserved.reservation,))
        return done.count

    def save(
        self,
        worker: WorkerId,
        namespace: NamespaceId,
        keys: Sequence[ChunkKey],
        *,
        variant: int = 0,
        **named: Any,
    ) -> ev.Committed:
        """Reserve, write and commit; at least one key must be granted."""
        reserved = self.reserve(worker, namespace, keys, **named)
        assert reserved.reservation, reserved
        committed = self.commit(worker, reserved, variant=variant)
        assert committed is not None
        return committed

    def _let_go(self, reservation: ReservationId) -> None:
        """From here on the worker does not write there any more."""
        for extent in self.savings[reservation].extents:
            for page in _pages(extent):
                self.may_write.pop((extent.segment, page), None)

    # ------------------------------------------------------------------------------------------------------ reading

    def match(
        self, worker: WorkerId, namespace: NamespaceId, keys: Sequence[ChunkKey], tokens: int = 0
    ) -> ev.Matched:
        matched: ev.Matched = self.ask(ev.Match, worker, namespace, tuple(keys), tokens)
        return matched

    def acquire(
        self, worker: WorkerId, namespace: NamespaceId, keys: Sequence[ChunkKey], **named: Any
    ) -> ev.Acquired:
        """With the worker mapping what it was shown; every extent is compared with what was committed."""
        acquired: ev.Acquired = self.ask(ev.Acquire, worker, namespace, tuple(keys), **named)
        segments = {extent.segment for extent in acquired.extents}
        if segments:
            assert set(self.map(worker, sorted(segments))) == segments
        return acquired

    def release(self, worker: WorkerId, *leases: LeaseId) -> int:
        for lease in leases:
            if lease in self.leases and self.groups[self.leases[lease][0]] == self.groups[worker]:
                del self.leases[lease]
        done: ev.Done = self.ask(ev.Release, worker, leases)
        return done.count

    def load(self, worker: WorkerId, extent: Extent) -> int | None:
        """What the worker reads there now, or None where the generation says that the load is void."""
        assert extent.segment in self.mapped[worker], (worker, extent)
        if extent.segment not in self.memory or self.cells[extent.segment][extent.cell] != extent.generation:
            return None
        return self._read(extent)

    def session(self, worker: WorkerId, namespace: NamespaceId, name: bytes) -> ev.SessionInfo:
        info: ev.SessionInfo = self.ask(ev.GetSession, worker, namespace, name)
        return info

    def append(
        self,
        worker: WorkerId,
        namespace: NamespaceId,
        name: bytes,
        keys: Sequence[ChunkKey],
        *,
        version: int = 0,
        keep: int = 0,
        first: int | None = None,
        counts: Sequence[int] = (),
        approximate: bool = False,
    ) -> ev.SessionInfo:
        """UpdateSession with full chunks (or `counts` tokens) one after the other from `first` on."""
        position = keep * CHUNK_TOKENS if first is None else first
        entries = []
        for index, key in enumerate(keys):
            count = counts[index] if counts else CHUNK_TOKENS
            entries.append(ev.SessionEntry(key, position, count, approximate=approximate))
            position += count
        info: ev.SessionInfo = self.ask(
            ev.UpdateSession, worker, namespace, name, version, keep, tuple(entries)
        )
        return info

    # -------------------------------------------------------------------------------------------------------- facts

    def outcomes(self, worker: WorkerId, namespace: NamespaceId, keys: Sequence[ChunkKey]) -> list[str]:
        """ "HIT", or the reason, per key: what Match says."""
        matched = self.match(worker, namespace, keys)
        return [
            "HIT" if outcome is Outcome.HIT else reason.name
            for outcome, reason in zip(matched.outcomes, matched.reasons, strict=True)
        ]

    def slots(self) -> dict[str, int]:
        """Slots of all pools by state, as an admin's stats say."""
        admin = self.join("operator", admin=True)
        pools = self.ask(ev.GetStats, admin).values["pools"]
        self.kill(admin)
        names = ("capacity", "free", "reserved", "ready", "quarantined")
        return {name: sum(pool[name] for pool in pools) for name in names}

    def take(self, kind: type) -> list[Any]:
        """The pushes of this kind since the last look."""
        found = [push for push in self.pushes if isinstance(push, kind)]
        self.pushes = [push for push in self.pushes if not isinstance(push, kind)]
        return found

    # ------------------------------------------------------------------------------------------------------ effects

    def finish(self, held: Any = None, *, fails: str = "", spoil: int = 0) -> None:
        """Perform what is held (the oldest if not told which). `spoil` is xor-ed to the checksums: damaged bytes."""
        held = held or self.held[0]
        self.held.remove(held)
        self._perform_op(held, fails=fails, spoil=spoil)
        self._drain()

    def _perform_all(self, effects: Sequence[ev.Effect]) -> None:
        self.directories.check_order(effects)
        for effect in effects:
            self.directories.go_on()
            match effect:
                case ev.Reply():
                    self._replied(effect)
                case ev.ChunksSettled() | ev.LeasesRevoked():
                    self.pushes.append(effect)
                    for lease in effect.leases if isinstance(effect, ev.LeasesRevoked) else ():
                        self.leases.pop(lease, None)
                case ev.SegmentsRetired():
                    self.pushes.append(effect)
                    if self.unmap_at_once:
                        self.mapped[effect.worker] -= set(effect.segments)
                        self._inbox.append(ev.SegmentsUnmapped(ev.Ticket(effect.worker), effect.segments))
                case ev.SetGenerations():
                    cells = self.cells[effect.segment]
                    for cell, generation in zip(effect.cells, effect.generations, strict=True):
                        # Never back, or an old extent would be valid again.
                        assert generation > cells[cell], (effect.segment, cell, generation, cells[cell])
                        cells[cell] = generation
                    self.directories.bumped(effect.segment, effect.cells)
                case (
                    ev.CreateDirectory()
                    | ev.CloseDirectory()
                    | ev.OpenDirectory()
                    | ev.DropDirectory()
                    | ev.Unpublish()
                    | ev.Publish()
                ):
                    self.directories.perform(effect)
                case ev.AssignSegment():
                    owner = self._owner.setdefault(effect.segment, effect.namespace)
                    assert owner == effect.namespace, f"segment {effect.segment} changes hands unmapped"
                case ev.DestroySegment():
                    assert not any(effect.segment in mapped for mapped in self.mapped.values()), effect
                    del self.memory[effect.segment], self.cells[effect.segment]
                case ev.ForgetWorker():  # a copy that still runs keeps its view of the staging memory
                    self._forget_leases(effect.worker)
                case ev.DropStaging() | ev.Quarantined() | ev.DuplicateDiffers():
                    pass
                case _ if type(effect) in self.hold:
                    self.held.append(effect)
                case _:
                    self._perform_op(effect)  # type: ignore[arg-type]

    def _perform_op(
        self, effect: Op | ev.CreateSegment | ev.TenantPurged, *, fails: str = "", spoil: int = 0
    ) -> None:
        checksums: list[int] = []
        match effect:
            case ev.TenantPurged():
                self._inbox.append(ev.PurgedBeyond(effect.op))
                return
            case ev.CreateSegment():
                if fails:
                    self._inbox.append(ev.SegmentFailed(effect.op, fails))
                    return
                self.memory[effect.segment] = [UNWRITTEN] * (effect.bytes // PAGE)
                self.cells[effect.segment] = [0] * effect.cells
                self._inbox.append(ev.SegmentReady(effect.op))
                return
            case ev.CopyIn():
                for piece, target in zip(effect.pieces, effect.targets, strict=True):
                    assert piece.length == target.length, (piece, target)
                    self._write(target, self._staging[effect.worker, piece.offset], by=None)
                    checksums.append(self._read(target) ^ spoil)
            case ev.FillSlots():
                assert effect.region == REGION, effect
                for piece, target in zip(effect.pieces, effect.targets, strict=True):
                    assert piece.length == target.length, (piece, target)
                    row = self.rows.get((effect.worker, piece.offset))
                    self._write(target, UNWRITTEN if row is None else row, by=None)
                    if row is None:
                        fails = fails or "the region was cut short"
                    checksums.append(self._read(target) ^ spoil)
            case ev.Checksum():
                if any(extent.segment not in self.memory for extent in effect.extents):
                    fails = "no such segment"  # the scrubber pins nothing
                else:
                    checksums = [self._peek(extent) ^ spoil for extent in effect.extents]
            case ev.MoveSlots():
                for source, target in zip(effect.sources, effect.targets, strict=True):
                    self._write(target, self._read(source), by=None)
                    checksums.append(self._read(target) ^ spoil)
            case ev.RewriteSlots():
                for target in effect.targets:
                    segment = self.store.state.pool.by_id[target.segment]
                    assert segment.state[target.cell] == SlotState.QUARANTINED, (segment, target)
                    self._write(target, UNWRITTEN, by=None)
                    checksums.append(int(not spoil))
        if fails:
            self._inbox.append(ev.OpFailed(effect.op, fails))
            return
        self._inbox.append(ev.OpDone(effect.op, tuple(checksums)))

    def _note_copied(self, event: ev.OpDone) -> None:
        """What a commit or a fill ahead of it has put into the slots."""
        reservation, targets = self._copying.get(event.op, (ReservationId(0), ()))
        if reservation in self.store.state.reservations:  # else it came too late, and counts for nothing
            copied = self._copied.setdefault(reservation, {})
            for target, checksum in zip(targets, event.checksums, strict=True):
                copied[target.segment, target.offset] = checksum

    def _note_saving(self, event: ev.Save, effects: Sequence[ev.Effect]) -> None:
        """A Save whose copy begins: which shards it saves, where, and what each is to hold."""
        for effect in effects:
            if not isinstance(effect, ev.CopyIn) or effect.op not in self.store.saves.copies:
                continue
            reservation, _ = self.store.saves.copies[effect.op]
            if reservation.ticket != event.ticket:
                continue
            asked, chunks = event.reserve, self.store.state.chunks
            numbers = asked.shards or range(self.store.state.namespaces[asked.namespace].shards)
            keys = [chunks.key[row] for row in reservation.rows]
            shards = tuple((asked.namespace, key, shard) for key in keys for shard in numbers)
            targets = tuple(effect.targets)
            self.savings[reservation.id] = Saving(event.ticket.worker, shards, effect.targets)
            self._copying[effect.op] = (reservation.id, targets)
            staged = dict(
                zip(((key, shard) for key in asked.keys for shard in numbers), event.offsets, strict=True)
            )
            self._staged_for[reservation.id] = tuple(
                self._staging[event.ticket.worker, staged[key, shard]] for _, key, shard in shards
            )

    def _waits(self, commit: ev.Commit) -> bool:
        """It was accepted, and copies run."""
        reservation = self.store.state.reservations.get(commit.reservation)
        return reservation is not None and reservation.ticket == commit.ticket

    def _note_told(self, commit: ev.Commit) -> None:
        """What counts until a copy of the daemon says otherwise."""
        for extent, checksum in zip(self.savings[commit.reservation].extents, commit.told, strict=False):
            copied = self._copied.setdefault(commit.reservation, {})
            copied.setdefault((extent.segment, extent.offset), checksum)

    def _note_all_committed(self, event: ev.Event) -> None:
        """The core made a reservation visible: by a commit, or by the end of the last copy for one."""
        if isinstance(event, ev.Commit):
            reservation = event.reservation
        else:
            assert isinstance(event, ev.OpDone), event
            reservation, _ = self._copying[event.op]
        saving = self.savings[reservation]
        copied = self._copied.pop(reservation, None)
        if copied is None:  # all of it came out of a region
            held = self._meant[reservation]
        else:
            held = tuple(copied[extent.segment, extent.offset] for extent in saving.extents)
            meant = self._staged_for.pop(reservation, held)
            assert held == meant, f"{saving} was saved out of other pieces: {held}, {meant}"
        for shard, what in zip(saving.shards, held, strict=True):
            self._note_committed(shard, what)

    def _forget_leases(self, worker: WorkerId) -> None:
        """The leases of an engine group end with its last member; another group may have its name later."""
        group = self.groups[worker]
        if all(self.groups[other] != group for other in self.store.state.workers):
            ended = [lease for lease, (owner, _) in self.leases.items() if self.groups[owner] == group]
            for lease in ended:
                del self.leases[lease]

    def _note_committed(self, shard: Shard, what: int) -> None:
        self.committed[shard] = what

    def _replied(self, effect: ev.Reply) -> None:
        self.replies.append(effect)
        ticket, answer = effect.ticket, effect.answer
        event = self._asked.get((ticket.worker, ticket.request_id))
        self.answers[ticket.worker, ticket.request_id] = answer
        if isinstance(answer, ev.Acquired) and isinstance(event, ev.Acquire):
            self._check_acquired(event, answer)
            # A request that came twice is answered twice, perhaps when its worker has let go of the lease already.
            if answer.lease and answer.lease not in self._leases_told:
                self._leases_told.add(answer.lease)
                self.leases[answer.lease] = (ticket.worker, answer.extents)
        if isinstance(answer, ev.Reserved) and isinstance(event, ev.Reserve):
            self._note_reserved(event, answer)

    def _check_acquired(self, event: ev.Acquire, answer: ev.Acquired) -> None:
        """A hit names exactly what was committed under its key, shard by shard."""
        namespace = self.store.state.namespaces[event.namespace]
        cold = answer.reasons.count(Reason.ON_SSD) * namespace.payload_bytes
        assert answer.backlog.ssd_bytes == cold, answer
        shards = event.shards or range(namespace.shards)
        extents = iter(answer.extents)
        for key, outcome in zip(event.keys, answer.outcomes, strict=True):
            if outcome is not Outcome.HIT:
                continue
            for shard in shards:
                extent = next(extents)
                wanted = self.committed[event.namespace, key, shard]
                found = self._read(extent)
                intact = found == wanted == extent.checksum
                assert intact or self.is_damaged(extent), (key, shard, extent, found, wanted)
                assert extent.length == namespace.spec.shard_bytes[shard], (key, shard, extent)
                assert self.cells[extent.segment][extent.cell] == extent.generation, (key, shard, extent)
        assert next(extents, None) is None, answer

    def _note_reserved(self, event: ev.Reserve, answer: ev.Reserved) -> None:
        if not answer.reservation:
            assert not answer.extents, answer
            return
        namespace = self.store.state.namespaces[event.namespace]
        granted = [
            key for key, result in zip(event.keys, answer.results, strict=True) if result.name == "GRANTED"
        ]
        shards = tuple(
            (event.namespace, key, shard)
            for key in granted
            for shard in event.shards or range(namespace.shards)
        )
        assert len(shards) == len(answer.extents), answer
        if answer.reservation in self._reservations_told:
            return  # told twice, perhaps when its worker has given up writing there already
        self._reservations_told.add(answer.reservation)
        self.savings[answer.reservation] = Saving(event.ticket.worker, shards, answer.extents)
        if self.limits.protection is Protection.GROUP:
            for extent in answer.extents:
                for page in _pages(extent):
                    writer = self.may_write.setdefault((extent.segment, page), event.ticket.worker)
                    assert writer == event.ticket.worker, f"worker {writer} may still write {extent}"

    # ------------------------------------------------------------------------------------------------------- memory

    def _peek(self, extent: Extent) -> int:
        """As `_read`, of what may be somebody else's by now."""
        found = {self.memory[extent.segment][page] for page in _pages(extent)}
        return found.pop() if len(found) == 1 else WRITTEN_LATER

    def _read(self, extent: Extent) -> int:
        found = {self.memory[extent.segment][page] for page in _pages(extent)}
        assert len(found) == 1, (extent, found)
        return found.pop()

    def _write(self, extent: Extent, what: int, *, by: WorkerId | None) -> None:
        pages = _pages(extent)
        where = self._pages(extent)
        for lease, (worker, extents) in self.leases.items():
            leased = self._leased.get(lease)
            if leased is None:
                leased = self._leased[lease] = frozenset().union(*map(self._pages, extents))
            if leased.isdisjoint(where):
                continue
            readers = [
                member
                for member, group in self.groups.items()
                if group == self.groups[worker] and extent.segment in self.mapped.get(member, ())
            ]
            assert not readers, f"{extent} is written under lease {lease}, which worker {readers} may use"
        segment = self.store.state.pool.by_id.get(extent.segment)
        if segment is not None and segment.capacity:
            assert segment.state[extent.cell] != SlotState.READY, f"{extent} is written while it is READY"
        self.damaged.difference_update(where)
        for page in pages:
            writer = self.may_write.get((extent.segment, page))
            assert writer in (None, by), f"{extent} is used while worker {writer} may still write there"
            self.memory[extent.segment][page] = what

    def _held_in(self, segment: SegmentId, offset: int, length: int) -> int | None:
        """What a reader copies from there now; None where bits flipped."""
        extent = Extent(segment, offset, length, 0, 0)
        return None if self.is_damaged(extent) else self._peek(extent)

    def is_damaged(self, extent: Extent) -> bool:
        return bool(self.damaged) and not self.damaged.isdisjoint(self._pages(extent))

    def _pages(self, extent: Extent) -> frozenset[tuple[SegmentId, int]]:
        return frozenset((extent.segment, page) for page in _pages(extent))


def _pages(extent: Extent) -> range:
    return range(extent.offset // PAGE, -(-(extent.offset + extent.length) // PAGE))


def epoch_of(namespace: NamespaceSpec, epoch: int) -> NamespaceSpec:
    return replace(namespace, weights_epoch=epoch)
