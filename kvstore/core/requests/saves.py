"""Writing shards: Reserve, Fill, Commit, Save, Abort, and what becomes of them when time or a worker runs out.

A worker's bytes come from its staging memory, copied by Commit; or from a region of its own, copied by Fill and made
visible by a Commit after it. The two phases are for a daemon that is stopped and goes on later: it reads rows that the
worker may have used for something else, so a worker that gave up waiting for the Fill must be able to not commit.
Parts of what Commit would copy can be filled ahead of it, while the worker still writes the rest; Commit need not wait
for those, because it waits itself. Save is Reserve and Commit at once, of what stands in staging memory already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, groupby

from kvstore.core import events as ev
from kvstore.core.bulk import batch
from kvstore.core.chunks import COMMITTED, DERIVED, DOOMED, FETCHING, NONE, STORED, TAIL, TRANSIENT
from kvstore.core.cold_tier import ColdTier
from kvstore.core.namespaces import Namespace
from kvstore.core.pool import Phase, Segment
from kvstore.core.requests import admission
from kvstore.core.requests.reads import clip_ttl, wanted_shards
from kvstore.core.reservation import Copying, Reservation
from kvstore.core.segments import Segments
from kvstore.core.state import State
from kvstore.core.workers import Worker
from kvstore.errors import (
    BadRequest,
    Conflict,
    DeadlineExceeded,
    Denied,
    Exhausted,
    NotFound,
    Precondition,
    StoreError,
)
from kvstore.types import (
    NO_EXTENTS,
    ChunkKey,
    CommitResult,
    DiskState,
    Extents,
    GrantResult,
    Millis,
    NamespaceId,
    OpId,
    Protection,
    Reason,
    ReservationId,
    StagedPiece,
    Wait,
    WorkerId,
)

COPY_DEADLINE_MS = 10_000
"""A copy that takes longer is answered as failed; its slots stay quarantined until it returns."""
ENDED_REMEMBERED_MAX = 4096
ENDED_KEYS_MAX = 65_536
"""Of how many reservations, and of how many keys in them, it is remembered how they ended."""
_COUNTED = tuple(
    (result, f"grants_{result.name.lower()}")
    for result in GrantResult
    if result is not GrantResult.UNAVAILABLE
)


@dataclass(slots=True)
class LateCopy:
    """A copy that missed its deadline, or that nobody wants any more: nothing may use its targets before it has
    returned."""

    slots: list[tuple[Segment, int]]
    writer: WorkerId | None = None
    """Who may still write them in place after that."""


@dataclass(slots=True)
class Ended:
    """Why a reservation ended, for a clear answer to a commit that comes too late or again."""

    why: str
    namespace: NamespaceId
    keys: tuple[ChunkKey, ...]


class Saves:
    def __init__(self, state: State, tier: ColdTier, segments: Segments) -> None:
        self.state = state
        self._tier = tier
        self._segments = segments
        self.copies: dict[OpId, tuple[Reservation, Millis]] = {}
        """Running copies with their deadlines."""
        self.late: dict[OpId, LateCopy] = {}
        self._ended: dict[ReservationId, Ended] = {}
        """The most recent ones, oldest first."""
        self._ended_keys = 0
        self._next_id = 1
        self._reserve_bytes_max = state.limits.reserve_bytes_max

    # ----------------------------------------------------------------------------------------------------- reserve

    def reserve(self, worker: Worker, event: ev.Reserve) -> ev.Reserved:
        """Slots for what is neither committed nor being written by somebody; per key, all of `shards` or none."""
        state = self.state
        limits = state.limits
        namespace = state.own_namespace(worker, event.namespace)
        if worker.remote:  # a commit in place would make visible whatever the slots held before
            raise Denied(
                "is for workers that share memory with the daemon",
                field="Reserve",
                value="over TCP",
                remedy="save by Bytes.Put",
            )
        if namespace.retired:
            raise Precondition(
                "a newer weights epoch was opened",
                field="namespace_id",
                value=namespace.id,
                remedy="open it again",
            )
        shards = wanted_shards(namespace, event.shards)
        counts = event.token_counts or (namespace.spec.chunk_tokens,) * len(event.keys)
        self._check(namespace, event, counts)
        self._check_described(namespace, event, counts)
        if len(worker.reservations) >= limits.reservations_per_worker_max:
            raise Exhausted(
                "too many open reservations",
                field="reservations",
                value=len(worker.reservations),
                remedy="commit or abort some",
            )
        ttl_ms = clip_ttl(event.ttl_ms, limits.reservation_ttl_ms, limits.reservation_ttl_max_ms)
        reservation = Reservation(
            ReservationId(self._next_id), worker.id, namespace.id, state.now + ttl_ms, shards=shards
        )
        parents = event.parents or (event.parent, *event.keys[:-1])
        results: list[GrantResult] = []
        wanted = sum([namespace.slot_bytes[shard] for shard in shards])
        refused = admission.refused(state, namespace, event, shards, counts)
        new = {} if refused else self._new_keys(namespace, event.keys, shards)
        again = False
        for index, key in enumerate(event.keys):
            if index < len(results):
                continue  # granted with those before
            if index in refused:
                results.append(GrantResult.FULL)
                continue
            if index in new:
                run = slice(index, new[index])
                granted = self._grant_new(worker, namespace, reservation, event, run, parents, counts)
                results += [GrantResult.GRANTED] * granted
                if not again and run.stop - len(results) > limits.evict_min:
                    again = True  # after one by itself, which may ask for a segment
                    new[len(results) + 1] = run.stop
                if granted:
                    continue
            result = self._grant(worker, namespace, reservation, key, wanted)
            if result is GrantResult.GRANTED:
                self._describe(namespace, namespace.index[key], parents[index], counts[index], event)
            results.append(result)
        for result, name in _COUNTED:
            if count := results.count(result):
                state.counters[name] += count
        if not reservation.rows:
            return ev.Reserved(ReservationId(0), 0, tuple(results), NO_EXTENTS)
        self._next_id += 1
        reservation.maker = event.maker
        state.reservations[reservation.id] = reservation
        worker.reservations.add(reservation.id)
        extents = state.extents(namespace, reservation.rows, shards)
        return ev.Reserved(reservation.id, ttl_ms, tuple(results), extents)

    def _check(self, namespace: Namespace, event: ev.Reserve, counts: Sequence[int]) -> None:
        full = namespace.spec.chunk_tokens
        if event.parents and len(event.parents) != len(event.keys):
            raise BadRequest(
                "must be empty or have one entry per key", field="parents", value=len(event.parents)
            )
        if len(counts) != len(event.keys):
            raise BadRequest(
                "must be empty or have one entry per key", field="token_counts", value=len(counts)
            )
        if counts and min(counts) >= 1 and max(counts) <= full:
            return
        for count in counts:
            if not 1 <= count <= full:
                raise BadRequest(
                    f"must be between 1 and chunk_tokens={full}", field="token_counts", value=count
                )

    def _check_described(self, namespace: Namespace, event: ev.Reserve, counts: Sequence[int]) -> None:
        """What a chunk is was settled by its first shard, and for ever by its first commit: bytes may go and come back,
        but exact never becomes derived, or the other way round (invariant 2)."""
        chunks = self.state.chunks
        for key, count in zip(event.keys, counts, strict=True):
            row = namespace.index.get(key, NONE)
            if row == NONE or (chunks.shard0[row] == NONE and not chunks.flags[row] & COMMITTED):
                continue
            if chunks.tokens[row] != count:
                raise BadRequest(
                    f"chunk {key.hex()} has {chunks.tokens[row]} tokens", field="token_counts", value=count
                )
            if bool(chunks.flags[row] & DERIVED) != event.derived:
                kind = "exact" if event.derived else "derived"
                raise BadRequest(
                    f"chunk {key.hex()} was saved as {kind}",
                    field="derived",
                    value=event.derived,
                    remedy="keys of exact and of derived KV must differ",
                )

    def _grant(
        self,
        worker: Worker,
        namespace: Namespace,
        reservation: Reservation,
        key: ChunkKey,
        wanted: int,
    ) -> GrantResult:
        """All shards of the reservation for one key, which take `wanted` bytes, or none and nothing changed."""
        state = self.state
        chunks = state.chunks
        shards = reservation.shards
        row = namespace.index.get(key, NONE)
        if row != NONE and chunks.shard0[row] != NONE:
            if chunks.flags[row] & (STORED | DOOMED) == STORED:
                return GrantResult.ALREADY
            places = [chunks.shard0[row] + shard for shard in shards]
            if chunks.flags[row] & (DOOMED | FETCHING):
                return GrantResult.BUSY
            if all(chunks.shard_ready[place] for place in places):
                return GrantResult.ALREADY
            if any(chunks.shard_segment[place] != NONE for place in places):
                return GrantResult.BUSY
        if worker.reserved_bytes + wanted > self._reserve_bytes_max:
            return GrantResult.QUOTA
        if (len(reservation.rows) + 1) * len(shards) > state.limits.extents_per_answer_max:
            return GrantResult.QUOTA
        if row == NONE:
            if chunks.rows_used >= state.limits.chunks_max:
                return GrantResult.FULL
            row = namespace.index[key] = chunks.new_row(namespace.id, key, state.now)
        if chunks.shard0[row] == NONE:
            state.begin_chunk(namespace, row)
        placed: list[int] = []
        for shard in shards:
            taken = self._segments.allocate(namespace, namespace.slot_bytes[shard], row)
            if taken is None:
                for number in placed:
                    state.free_slot(*state.unplace_shard(row, number))
                self._drop_if_empty(namespace, row)
                over = state.quotas.dram_left(namespace.tenant) < namespace.slot_bytes[shard]
                return GrantResult.QUOTA if over else GrantResult.FULL
            state.place_shard(row, shard, *taken)
            placed.append(shard)
        reservation.rows.append(row)
        reservation.reserved_bytes += wanted
        worker.reserved_bytes += wanted
        return GrantResult.GRANTED

    def _new_keys(
        self, namespace: Namespace, keys: Sequence[ChunkKey], shards: Sequence[int]
    ) -> dict[int, int]:
        """Where runs of keys that nobody has seen begin, and end, of those long enough to be granted at once."""
        state = self.state
        if len(keys) < state.limits.evict_min or len({namespace.slot_bytes[shard] for shard in shards}) > 1:
            return {}
        slab = state.pool.classes.get((namespace.id, namespace.slot_bytes[shards[0]]))
        enough = slab is not None and slab.free >= len(keys) * len(shards)
        at_least = state.batch_min if enough else state.limits.evict_min
        if len(keys) < at_least or len(set(keys)) < len(keys):
            return {}
        runs: dict[int, int] = {}
        end = 0
        for known, run in groupby(map(namespace.index.__contains__, keys)):
            start, end = end, end + sum(1 for _ in run)
            if not known and end - start >= at_least:
                runs[start] = end
        return runs

    def _grant_new(
        self,
        worker: Worker,
        namespace: Namespace,
        reservation: Reservation,
        event: ev.Reserve,
        run: slice,
        parents: Sequence[ChunkKey],
        counts: Sequence[int],
    ) -> int:
        """`_grant` and `_describe` for a run of new keys, as far as quota and slots go that are free now; how many."""
        state = self.state
        shards = reservation.shards
        slot_bytes = namespace.slot_bytes[shards[0]]
        wanted = slot_bytes * len(shards)
        room = min(
            run.stop - run.start,
            (self._reserve_bytes_max - worker.reserved_bytes) // wanted,
            state.limits.extents_per_answer_max // len(shards) - len(reservation.rows),
            state.limits.chunks_max - state.chunks.rows_used,
        )
        rows: list[int] = []
        asked = not self._segments.may_ask(namespace)
        while len(rows) < room:
            slab = self._segments.with_free(namespace, slot_bytes, len(shards))
            if slab is None:
                granted = self._segments.take_over(
                    namespace, event.keys[run.start + len(rows) : run.start + room]
                )
                if not granted:
                    break
                part = slice(run.start + len(rows), run.start + len(rows) + len(granted))
                self._describe_new(namespace, granted, part, parents, counts, event)
                rows += granted
                continue
            left = state.quotas.dram_left(namespace.tenant) // wanted
            fit = min(room - len(rows), slab.free // len(shards), left)
            if not asked:
                fit = min(fit, -(-self._segments.until_short(slab) // len(shards)))
            part = slice(run.start + len(rows), run.start + len(rows) + fit)
            granted = batch.begin(state, namespace, event.keys[part], slab, shards)
            self._describe_new(namespace, granted, part, parents, counts, event)
            asked = self._segments.ask_if_short(namespace, slab) or asked
            rows += granted
        reservation.rows.extend(rows)
        reservation.reserved_bytes += wanted * len(rows)
        worker.reserved_bytes += wanted * len(rows)
        return len(rows)

    def _describe_new(
        self,
        namespace: Namespace,
        rows: Sequence[int],
        part: slice,
        parents: Sequence[ChunkKey],
        counts: Sequence[int],
        event: ev.Reserve,
    ) -> None:
        """`_describe` for rows that are new, one after the other: a parent that comes later in the request is none."""
        numbers = dict(zip(rows, range(len(rows)), strict=True))
        above: list[int] = []
        before: ChunkKey | None = None
        for number, (key, parent) in enumerate(zip(event.keys[part], parents[part], strict=True)):
            if parent == before:
                above.append(rows[number - 1])
            else:
                row = namespace.index.get(parent, NONE) if parent else NONE
                above.append(row if numbers.get(row, NONE) < number else NONE)
            before = key
        kind = (DERIVED if event.derived else 0) | (TRANSIENT if event.transient else 0)
        full = namespace.spec.chunk_tokens
        tokens = counts[part]
        flags = [kind | (TAIL if count < full else 0) for count in tokens]
        batch.describe(self.state.chunks, rows, above, tokens, flags)

    def _describe(
        self, namespace: Namespace, row: int, parent: ChunkKey, tokens: int, event: ev.Reserve
    ) -> None:
        """What a chunk is, told with its first reserved shard; `_check_described` sees to it that the others agree."""
        chunks = self.state.chunks
        if chunks.ready[row] or chunks.reserved[row] > len(event.shards or range(namespace.shards)):
            return
        chunks.tokens[row] = tokens
        flags = chunks.flags[row] & ~(DERIVED | TAIL | TRANSIENT)
        if event.derived:
            flags |= DERIVED
        if event.transient:
            flags |= TRANSIENT
        if tokens < namespace.spec.chunk_tokens:
            flags |= TAIL
        chunks.flags[row] = flags
        above = namespace.index.get(parent, NONE) if parent else NONE
        if above not in (NONE, row, chunks.parent[row]):
            chunks.leave_parent(row)
            chunks.attach(row, above)

    # -------------------------------------------------------------------------------------------------------- fill

    def fill(self, worker: Worker, event: ev.Fill) -> None:
        """Always answered by the end of the copy, or by whatever ends the reservation before."""
        state = self.state
        reservation = state.reservations.get(event.reservation)
        if reservation is not None and reservation.worker == worker.id:
            self._check_may_fill(reservation, event)
            if reservation.expires_at <= state.now and not reservation.busy:
                self._end(reservation, "expired", may_write=True)
                reservation = None
        if reservation is None or reservation.worker != worker.id:
            raise self._has_ended(worker, event.reservation)
        targets = self._targets(reservation)
        numbers: Sequence[int] = range(len(targets))
        if event.numbers:
            numbers = event.numbers
            if numbers[-1] >= len(targets):
                raise BadRequest(
                    f"the reservation has {len(targets)} granted shards", field="numbers", value=numbers[-1]
                )
            targets = Extents.of(targets[number] for number in numbers)
        in_place = not event.region and state.limits.protection is Protection.GROUP
        self._check_offsets(event, len(targets), in_place)
        pieces = tuple(map(StagedPiece, event.offsets, targets.length))
        op = state.new_op()
        if event.region:
            state.effects.append(ev.FillSlots(op, worker.id, event.region, pieces, targets))
        elif in_place:
            state.effects.append(ev.Checksum(op, targets, worker.id))
        else:
            state.effects.append(ev.CopyIn(op, worker.id, pieces, targets))
        for number in numbers if reservation.filled else ():
            reservation.filled.pop(number, None)
        self._copy(reservation, op, Copying(numbers, event.ticket, region=bool(event.region)))

    def _check_offsets(self, event: ev.Fill, count: int, in_place: bool) -> None:
        if in_place and event.offsets:
            why = "must be empty: under protection group bytes are written in place"
        elif not in_place and len(event.offsets) != count:
            what = "row of the region" if event.region else "piece of staging memory"
            why = f"must name one {what} for each of the {count} granted shards"
        else:
            return
        raise BadRequest(why, field="offsets", value=len(event.offsets))

    def _check_may_fill(self, reservation: Reservation, event: ev.Fill) -> None:
        """Several parts may be filled at one time, each by one copy. Raises Conflict, BadRequest."""
        numbers = event.numbers
        if any(number <= before for before, number in zip((-1, *numbers), numbers, strict=False)):
            raise BadRequest("must ascend", field="numbers", value=numbers)
        self._check_not_committing(reservation)
        for copy in reservation.copies.values():
            if not numbers or not set(copy.numbers).isdisjoint(numbers):
                raise _is_being_filled(reservation)

    def _has_filled(self, reservation: Reservation, copy: Copying, filled: bool, why: str) -> None:
        """Answers the fill. Under a commit that waits, that is told what went wrong, too."""
        state = self.state
        assert copy.ticket is not None, reservation
        if copy.region:
            namespace = state.namespaces[reservation.namespace]
            state.counters["fills" if filled else "fills_failed"] += 1
            each = sum(namespace.shard_bytes[shard] for shard in reservation.shards)
            state.counters["bytes_filled"] += each * len(reservation.rows) if filled else 0
        if not reservation.committing and not reservation.busy and reservation.expires_at <= state.now:
            self._end(reservation, "expired", may_write=True)
            state.reply(copy.ticket, _lost("expired", reservation.id))
        elif filled:
            state.reply(copy.ticket, ev.Filled())
        else:
            what = "rows" if copy.region else "bytes"
            state.reply(
                copy.ticket,
                Precondition(
                    f"the {what} could not be copied: {why}", field="reservation_id", value=reservation.id
                ),
            )

    # ------------------------------------------------------------------------------------------------------ commit

    def commit(self, worker: Worker, event: ev.Commit) -> ev.Committed | ev.Saved | None:
        """None: the copy runs, its end answers. Staged bytes are copied by the daemon, so that what is committed is out
        of everybody's reach; bytes written in place are checksummed where they are; those that a fill has put there
        need nothing more."""
        state = self.state
        reservation = state.reservations.get(event.reservation)
        if reservation is None or reservation.worker != worker.id:
            return self._commit_of_ended(worker, event)
        self._check_not_committing(reservation)
        if any(copy.region for copy in reservation.copies.values()):
            raise _is_being_filled(
                reservation
            )  # nobody knows whether its rows still were what they should be
        if reservation.expires_at <= state.now and not reservation.busy:
            self._end(reservation, "expired")
            return self._commit_of_ended(worker, event)
        self._check_wait(event.wait)
        if event.checksums:
            assert len(event.checksums) == len(reservation.rows) * len(reservation.shards), event
            reservation.filled = dict(enumerate(event.checksums))
        if event.staged and state.limits.protection is Protection.GROUP:
            raise BadRequest(
                "must be empty: under protection group bytes are written in place",
                field="staging_offsets",
                value=len(event.staged),
            )
        if event.told:
            self._check_told(reservation, event)
            # What the daemon itself has read, or is reading, counts more.
            reading = reservation.being_filled()
            told = {n: checksum for n, checksum in enumerate(event.told) if n not in reading}
            reservation.filled = told | reservation.filled
        rest, targets = self._rest(reservation, event)
        pieces = _pieces(event.staged, targets) if state.limits.protection is Protection.SEALED else ()
        if not targets and not reservation.busy:
            return self._is_committed(reservation, event.ticket, event.wait)
        reservation.ticket = event.ticket
        reservation.wait = event.wait
        if targets:
            op = state.new_op()
            if state.limits.protection is Protection.SEALED:
                state.effects.append(ev.CopyIn(op, worker.id, pieces, targets))
            else:
                state.effects.append(ev.Checksum(op, targets, worker.id))
            self._copy(reservation, op, Copying(rest, ticket=None))
        return None

    def save(self, worker: Worker, event: ev.Save) -> ev.Saved | None:
        """`reserve` and `commit` of what is granted. None: the copy runs, its end answers."""
        state = self.state
        if state.limits.protection is Protection.GROUP:
            raise BadRequest(
                "is for protection sealed: in place nothing can be written before it is granted",
                field="Save",
                value="group",
                remedy="reserve, write, commit",
            )
        self._check_wait(event.wait)
        asked = event.reserve
        each = len(wanted_shards(state.own_namespace(worker, asked.namespace), asked.shards))
        if len(event.offsets) != len(asked.keys) * each:
            raise BadRequest(
                f"must name one piece of staging memory for each of {len(asked.keys)} keys and {each} shards",
                field="staging_offsets",
                value=len(event.offsets),
            )
        reserved = self.reserve(worker, asked)
        state.counters["saves_in_one_message"] += 1
        if not reserved.reservation:
            return ev.Saved(reserved.results, ())
        reservation = state.reservations[reserved.reservation]
        reservation.ticket, reservation.wait, reservation.grants = event.ticket, event.wait, reserved.results
        targets = reserved.extents
        granted = [result is GrantResult.GRANTED for result in reserved.results for _ in range(each)]
        pieces = tuple(map(StagedPiece, compress(event.offsets, granted), targets.length))
        op = state.new_op()
        state.effects.append(ev.CopyIn(op, worker.id, pieces, targets))
        self._copy(reservation, op, Copying(range(len(targets)), ticket=None))
        return None

    def _check_wait(self, wait: Wait) -> None:
        if wait is Wait.DURABLE and self.state.disk_state is DiskState.ABSENT:
            raise Precondition(
                "no SSD tier is configured",
                field="wait",
                value="DURABLE",
                remedy="set ssd_dir, or wait for VISIBLE",
            )

    def _check_told(self, reservation: Reservation, event: ev.Commit) -> None:
        """What the worker says of its bytes counts only where they are its own doing. Raises BadRequest."""
        count = len(reservation.rows) * len(reservation.shards)
        if self.state.limits.protection is Protection.SEALED:
            why = "must be empty: under protection sealed the daemon copies, and says what it has stored"
        elif len(event.told) != count:
            why = f"must have one for each of the {count} granted shards"
        else:
            return
        raise BadRequest(why, field="checksums", value=len(event.told))

    def _rest(self, reservation: Reservation, event: ev.Commit) -> tuple[Sequence[int], Extents]:
        """What the commit itself has to copy: all that no fill has put in its slot, or is putting there. But if it
        brings everything, it replaces what was filled."""
        targets = self._targets(reservation)
        if not reservation.busy and (not reservation.filled or len(event.staged) == len(targets)):
            reservation.filled.clear()
            return range(len(targets)), targets
        filling = reservation.being_filled()
        rest = [n for n in range(len(targets)) if n not in reservation.filled and n not in filling]
        return rest, Extents.of(targets[number] for number in rest)

    def _check_not_committing(self, reservation: Reservation) -> None:
        if reservation.committing:
            raise Conflict("is being committed already", field="reservation_id", value=reservation.id)

    def _targets(self, reservation: Reservation) -> Extents:
        namespace = self.state.namespaces[reservation.namespace]
        return self.state.extents(namespace, reservation.rows, reservation.shards)

    def _copy(self, reservation: Reservation, op: OpId, copy: Copying) -> None:
        reservation.copies[op] = copy
        self.copies[op] = (reservation, self.state.now + COPY_DEADLINE_MS)

    def _commit_of_ended(self, worker: Worker, event: ev.Commit) -> ev.Committed | None:
        """Success all the same if somebody else, or this very reservation, committed every chunk: first copy wins."""
        state = self.state
        ended = self._ended.get(event.reservation)
        namespace = state.namespaces.get(ended.namespace) if ended is not None else None
        if ended is None or namespace is None or namespace.id not in worker.opened:
            raise self._has_ended(worker, event.reservation)
        index = namespace.index
        if all(key in index and self._is_kept(index[key]) for key in ended.keys):
            answer = ev.Committed((CommitResult.ALREADY,) * len(ended.keys))
            if event.wait is Wait.VISIBLE:
                return answer
            self._await_durable(event.ticket, namespace, ended.keys, answer)
            return None
        raise self._has_ended(worker, event.reservation)

    def _await_durable(
        self,
        ticket: ev.Ticket,
        namespace: Namespace,
        keys: Sequence[ChunkKey],
        answer: ev.Committed | ev.Saved,
    ) -> None:
        rows = (namespace.index.get(key, NONE) for key in keys)
        self.state.write_at_once = True
        self.state.keep(row for row in rows if row != NONE and self.state.chunks.shard0[row] != NONE)
        self._tier.await_durable(ticket, namespace, keys, answer)

    def _has_ended(self, worker: Worker, reservation_id: ReservationId) -> StoreError:
        """Why nothing can be done with it; a stranger's is not told from one that never was."""
        ended = self._ended.get(reservation_id)
        if ended is None or ended.namespace not in worker.opened:
            return NotFound(
                "no such reservation of this worker", field="reservation_id", value=reservation_id
            )
        return _lost(ended.why, reservation_id)

    def _is_kept(self, row: int) -> bool:
        return self.state.is_hit(row) or self.state.chunks.flags[row] & (STORED | DOOMED) == STORED

    def copied(self, op: OpId, checksums: Sequence[int] | None, why: str = "") -> None:
        """The copy of a commit or fill has returned."""
        state = self.state
        reservation, _ = self.copies.pop(op)
        copy = reservation.copies.pop(op)
        if checksums is not None:
            reservation.filled.update(zip(copy.numbers, checksums, strict=True))
        elif reservation.committing:
            reservation.failed = why
        if copy.ticket is not None:
            self._has_filled(reservation, copy, checksums is not None, why)
        if reservation.ticket is None or reservation.busy:
            return
        if reservation.failed:
            ticket, reservation.ticket = reservation.ticket, None
            self._end(reservation, "aborted")
            state.counters["commits_failed"] += 1
            state.reply(
                ticket,
                Precondition(
                    f"the bytes could not be copied: {reservation.failed}",
                    field="reservation_id",
                    value=reservation.id,
                ),
            )
            return
        answer = self._is_committed(reservation, reservation.ticket, reservation.wait)
        if answer is not None:
            state.reply(reservation.ticket, answer)

    def _is_committed(
        self, reservation: Reservation, ticket: ev.Ticket, wait: Wait
    ) -> ev.Committed | ev.Saved | None:
        """Every byte is in: the chunks become visible. None: it is answered when they are durable."""
        state = self.state
        namespace = state.namespaces[reservation.namespace]
        keys = self._keys(reservation)
        filled = reservation.filled
        checksums = [filled[number] for number in range(len(filled))]
        if len(reservation.rows) >= state.batch_min and batch.may_mark_ready(state.chunks, reservation.rows):
            results = self._mark_all_ready(namespace, reservation, checksums)
        else:
            results = self._mark_each_ready(namespace, reservation, checksums)
        each = sum(namespace.shard_bytes[shard] for shard in reservation.shards)
        state.counters["bytes_saved"] += each * len(reservation.rows)
        state.counters["chunks_saved"] += len(reservation.rows)
        self._forget(reservation, "committed", keys)
        answer: ev.Committed | ev.Saved = ev.Committed(tuple(results))
        if reservation.grants:
            answer = ev.Saved(reservation.grants, tuple(results))
        if wait is Wait.VISIBLE:
            return answer
        self._await_durable(ticket, namespace, keys, answer)
        return None

    def _mark_all_ready(
        self, namespace: Namespace, reservation: Reservation, checksums: Sequence[int]
    ) -> list[CommitResult]:
        state = self.state
        rows = reservation.rows
        if reservation.maker:
            batch.add_maker(state, rows, reservation.maker)
        whole = batch.mark_shards_ready(state, namespace, rows, reservation.shards, checksums)
        state.arrived(list(compress(rows, whole)))
        return [CommitResult.VISIBLE if is_whole else CommitResult.WAITING_FOR_SHARDS for is_whole in whole]

    def _mark_each_ready(
        self, namespace: Namespace, reservation: Reservation, checksums: Sequence[int]
    ) -> list[CommitResult]:
        state = self.state
        results: list[CommitResult] = []
        whole: list[int] = []
        at = 0
        for row in reservation.rows:
            doomed = bool(state.chunks.flags[row] & DOOMED)
            if reservation.maker:
                state.add_maker(row, reservation.maker)
            for shard in reservation.shards:
                if state.mark_shard_ready(namespace, row, shard, checksums[at]):
                    whole.append(row)
                at += 1
            visible = not doomed and state.chunks.ready[row] == namespace.shards
            results.append(CommitResult.VISIBLE if visible else CommitResult.WAITING_FOR_SHARDS)
            if doomed:
                self._drop_if_empty(namespace, row)
        state.arrived(whole)
        return results

    # ----------------------------------------------------------------------------------------------- abort, expiry

    def abort(self, worker: Worker, event: ev.Abort) -> ev.Done:
        """The owner lets go: it writes no more into these slots."""
        count = 0
        for reservation_id in event.reservations:
            reservation = self.state.reservations.get(reservation_id)
            if reservation is not None and reservation.worker == worker.id and not reservation.committing:
                self._abort(reservation, may_write=False)
                count += 1
        return ev.Done(count)

    def _abort(self, reservation: Reservation, *, may_write: bool) -> None:
        if reservation.busy:
            self._give_up_copies(
                reservation, "aborted", _lost("aborted", reservation.id), may_write=may_write
            )
            self.state.counters["reservations_aborted"] += 1
        else:
            self._end(reservation, "aborted", may_write=may_write)

    def abort_all(self, worker: Worker, *, gone: bool) -> None:
        """The worker's process is gone, or only its connection is. What is being committed is copied to the end; what
        is being filled could never be committed."""
        for reservation_id in list(worker.reservations):
            reservation = self.state.reservations[reservation_id]
            if not reservation.committing:
                self._abort(reservation, may_write=not gone)

    def _end(self, reservation: Reservation, why: str, *, may_write: bool = False) -> None:
        assert not reservation.busy, reservation
        keys = self._keys(reservation)
        self._take_slots(reservation, may_write=may_write)
        self.state.counters[f"reservations_{why}"] += 1
        self._forget(reservation, why, keys)

    def _take_slots(self, reservation: Reservation, *, may_write: bool) -> None:
        """Take the slots back. Those that a copy writes are quarantined until it returns; and while the owner may still
        write into them (in place, and neither gone nor done), all are until it is."""
        state = self.state
        namespace = state.namespaces[reservation.namespace]
        worker = state.workers.get(reservation.worker)
        suspect = may_write and state.limits.protection is Protection.GROUP
        copied: dict[int, LateCopy] = {}
        for op, copy in reservation.copies.items():
            del self.copies[op]
            self.late[op] = LateCopy([], reservation.worker if suspect else None)
            copied.update(dict.fromkeys(copy.numbers, self.late[op]))
        number = 0
        for row in reservation.rows:
            for shard in reservation.shards:
                segment, slot = state.unplace_shard(row, shard)
                late = copied.get(number)
                number += 1
                if late is not None:
                    state.quarantine_slot(segment, slot)
                    late.slots.append((segment, slot))
                elif suspect and worker is not None:
                    state.quarantine_slot(segment, slot)
                    worker.suspect.append((segment.id, slot))
                else:
                    state.free_slot(segment, slot)
            self._drop_if_empty(namespace, row)

    def _keys(self, reservation: Reservation) -> tuple[ChunkKey, ...]:
        """To be asked for while its rows are still its own."""
        return tuple([self.state.chunks.key[row] for row in reservation.rows])

    def _forget(self, reservation: Reservation, why: str, keys: tuple[ChunkKey, ...]) -> None:
        state = self.state
        del state.reservations[reservation.id]
        worker = state.workers.get(reservation.worker)
        if worker is not None:
            worker.reservations.discard(reservation.id)
            worker.reserved_bytes -= reservation.reserved_bytes
        self._ended[reservation.id] = Ended(why, reservation.namespace, keys)
        self._ended_keys += len(keys)
        while len(self._ended) > ENDED_REMEMBERED_MAX or self._ended_keys > ENDED_KEYS_MAX:
            self._ended_keys -= len(self._ended.pop(next(iter(self._ended))).keys)

    def release_suspects(self, worker: Worker) -> None:
        """The worker is gone: nobody writes its quarantined slots any more."""
        for segment_id, slot in worker.suspect:
            segment = self.state.pool.by_id.get(segment_id)
            if segment is not None and segment.phase is Phase.ASSIGNED:
                self.state.free_slot(segment, slot)
        worker.suspect.clear()

    def _drop_if_empty(self, namespace: Namespace, row: int) -> None:
        """A partial chunk with no shard left, or a doomed one that nobody writes any more, becomes a ghost."""
        chunks = self.state.chunks
        if (
            chunks.shard0[row] == NONE
            or chunks.reserved[row]
            or chunks.pins[row]
            or chunks.flags[row] & STORED
        ):
            return
        if chunks.flags[row] & DOOMED:
            self.state.to_ghost(row, Reason(chunks.reason[row]))
        elif chunks.ready[row] == 0:
            self.state.to_ghost(row, Reason.INCOMPLETE)
        elif chunks.ready[row] < namespace.shards:
            self.state.settle(row, ready=False)

    def tick(self) -> None:
        state = self.state
        for reservation in [
            r for r in state.reservations.values() if not r.busy and r.expires_at <= state.now
        ]:
            self._end(reservation, "expired", may_write=True)
        for reservation in {r: None for r, deadline in self.copies.values() if deadline <= state.now}:
            self._give_up_copies(
                reservation,
                "aborted: its copy missed the deadline",
                DeadlineExceeded(
                    "the copy missed its deadline", field="reservation_id", value=reservation.id
                ),
                may_write=not reservation.committing,
            )
            state.counters["copies_late"] += 1
        self._drop_incomplete()

    def _give_up_copies(
        self, reservation: Reservation, why: str, answer: StoreError, *, may_write: bool
    ) -> None:
        """Take the slots away from the copies that run, and end the reservation; with `may_write` its owner has not let
        go of them either. Everybody who waits gets `answer`."""
        state = self.state
        keys = self._keys(reservation)
        tickets = [copy.ticket for copy in reservation.copies.values()]
        state.counters["fills_failed"] += sum(copy.region for copy in reservation.copies.values())
        self._take_slots(reservation, may_write=may_write)
        self._forget(reservation, why, keys)
        for ticket in (*tickets, reservation.ticket):
            if ticket is not None:
                state.reply(ticket, answer)

    def late_copy_returned(self, op: OpId) -> None:
        late = self.late.pop(op)
        writer = None if late.writer is None else self.state.workers.get(late.writer)
        for segment, slot in late.slots:
            if writer is None:
                self.state.free_slot(segment, slot)
            else:
                writer.suspect.append((segment.id, slot))

    def _drop_incomplete(self) -> None:
        """A chunk that has been incomplete for too long goes, unless a shard is being written right now."""
        state = self.state
        chunks = state.chunks
        over = state.now - state.limits.incomplete_ttl_ms
        while (row := state.partials.oldest) != NONE and chunks.used_at[row] <= over:
            if chunks.reserved[row] or chunks.flags[row] & FETCHING:
                chunks.unlink(state.partials, row)
                chunks.used_at[row] = state.now
                chunks.link_newest(state.partials, row)
                continue
            state.counters["chunks_incomplete"] += 1
            state.to_ghost(row, Reason.INCOMPLETE)


def _lost(why: str, reservation_id: ReservationId) -> Precondition:
    return Precondition(
        f"was {why}",
        field="reservation_id",
        value=reservation_id,
        remedy="" if why == "committed" else "reserve again; the save is lost",
    )


def _is_being_filled(reservation: Reservation) -> Conflict:
    return Conflict("is being filled already", field="reservation_id", value=reservation.id)


def _pieces(staged: tuple[StagedPiece, ...], targets: Extents) -> tuple[StagedPiece, ...]:
    """One piece per target, of its length (0 in a piece means: as long as the shard)."""
    if len(staged) != len(targets):
        raise BadRequest(
            f"must name one piece of staging memory for each of the {len(targets)} granted shards that are not filled",
            field="staging_offsets",
            value=len(staged),
        )
    for piece, length in zip(staged, targets.length, strict=True):
        if piece.length not in (0, length):
            raise BadRequest(f"the shard has {length} bytes", field="staged length", value=piece.length)
    return tuple(
        [StagedPiece(piece.offset, length) for piece, length in zip(staged, targets.length, strict=True)]
    )
