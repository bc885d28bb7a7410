"""Lookups and leases: Match, Acquire, Renew, Release, ReportLoad."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.core import events as ev
from kvstore.core.bulk import batch
from kvstore.core.chunks import DOOMED, FETCHING, HITS_MAX, NONE, PROMOTING, STORED
from kvstore.core.namespaces import Namespace
from kvstore.core.remote.sources import Looked
from kvstore.core.state import State
from kvstore.core.workers import Worker
from kvstore.errors import BadRequest, Exhausted
from kvstore.types import (
    NO_EXTENTS,
    ChunkKey,
    DiskState,
    LeaseId,
    Millis,
    OpId,
    Outcome,
    Reason,
    Tier,
    WorkerId,
)

Found = tuple[int, Outcome, Reason]
AUDITS_AGAIN_MAX = 16
"""So often an audit that failed is tried again."""
AUDITS_WAITING_MAX = 4_096
"""Chunks that wait for that."""
AUDITS_PER_OP_MAX = 16
_PENDING = (Reason.BEING_SAVED, Reason.ON_SSD, Reason.ON_REMOTE)
_COLD = (Reason.ON_SSD, Reason.ON_REMOTE)
"""Its bytes can be had, but have to be brought to DRAM first."""
_REASONS = tuple(Reason)
_OUTCOMES = tuple(
    Outcome.HIT if reason is Reason.NONE else Outcome.PENDING if reason in _PENDING else Outcome.MISS
    for reason in Reason
)
"""By reason: what a lookup that ends for it is answered."""


def lookup(state: State, namespace: Namespace, key: ChunkKey) -> Found:
    """(row or NONE, outcome, reason) of one key; changes nothing."""
    if namespace.retired:
        return NONE, Outcome.MISS, Reason.OLD_EPOCH
    row = namespace.index.get(key, NONE)
    if row == NONE:
        return NONE, Outcome.MISS, Reason.NEVER_SEEN
    chunks = state.chunks
    if chunks.shard0[row] == NONE or chunks.flags[row] & DOOMED:
        reason = Reason(chunks.reason[row])
        return row, _OUTCOMES[reason], reason
    if state.recalling and state.is_recalled(row):
        return row, Outcome.MISS, Reason.RECALLED
    if chunks.ready[row] == namespace.shards:
        return row, Outcome.HIT, Reason.NONE
    if chunks.flags[row] & STORED:
        off = state.disk_state is DiskState.OFF
        return row, Outcome.MISS if off else Outcome.PENDING, Reason.SLOW if off else Reason.ON_SSD
    if chunks.flags[row] & FETCHING:
        return row, Outcome.PENDING, Reason.ON_REMOTE
    if chunks.reserved[row]:
        return row, Outcome.PENDING, Reason.BEING_SAVED
    return row, Outcome.MISS, Reason.INCOMPLETE


class Reads:
    def __init__(self, state: State) -> None:
        self.state = state
        self.promote: Callable[[int], None] = lambda row: None
        """Begins to bring a chunk to DRAM that is on SSD or beyond this node; set by the store, which knows both."""
        self.look: Callable[..., Looked] = lambda *_, **__: Looked.NOTHING_NEW
        """Looks beyond this node for what is missing; likewise."""
        self.audits: dict[OpId, tuple[list[int], list[int]]] = {}
        """Checksum ops of reported chunks: (pinned rows, expected checksums)."""
        self._audited: set[int] = set()
        """Rows in `audits`: however often a chunk is reported, it is read once."""
        self._quiet: set[OpId] = set()
        """Of `audits`, those that are no use of the chunk."""
        self._again: dict[int, int] = {}
        """Rows whose audit failed, to be audited again at the next tick, and how often that is still tried."""
        self._repeats: set[OpId] = set()
        """Of `audits`, such second ones."""

    def match(self, worker: Worker, event: ev.Match, *, may_wait: bool = True) -> ev.Matched | None:
        """Longest usable boundary (invariant 4), what is on SSD or beyond this node included. Never promotes, never
        pins, is no use. None: it waits for what a look-up beyond this node finds, and is carried out again then."""
        state = self.state
        namespace = state.namespace(worker, event.namespace)
        rows, reasons = self._look_up(namespace, event.keys)
        looked = self.look(namespace, event, reasons, may_wait=may_wait)
        if looked is Looked.WAITS:
            return None
        if looked is Looked.AGAIN:
            rows, reasons = self._look_up(namespace, event.keys)
        usable = 0
        tokens = 0
        for row, reason in zip(rows, reasons, strict=True):
            if reason is not Reason.NONE and reason not in _COLD:
                break
            if event.token_count:
                tokens += state.chunks.tokens[row]
                if tokens >= event.token_count:
                    break
            usable += 1
        outcomes = tuple(map(_OUTCOMES.__getitem__, reasons))
        return ev.Matched(usable, outcomes, tuple(reasons), self._backlog(namespace, rows, reasons))

    def _backlog(self, namespace: Namespace, rows: Sequence[int], reasons: Sequence[Reason]) -> ev.Backlog:
        """Of an answer, before it has any promoted."""
        cold = reasons.count(Reason.ON_SSD)
        if not cold:
            return ev.NO_BACKLOG
        state = self.state
        flags, reserved = state.chunks.flags, state.chunks.reserved
        own = sum(
            bool(flags[row] & PROMOTING and (reserved[row] or row not in state.prefetched))
            for row, reason in zip(rows, reasons, strict=False)
            if reason is Reason.ON_SSD
        )
        size = namespace.payload_bytes
        ahead = state.reading_bytes + state.wanted_bytes - own * size
        return ev.Backlog(cold * size, max(0, ahead), state.read_rate.bytes_per_s)

    def _look_up(self, namespace: Namespace, keys: Sequence[ChunkKey]) -> tuple[list[int], list[Reason]]:
        """`lookup` of each key, as (rows, reasons)."""
        state = self.state
        if len(keys) < state.batch_min or namespace.retired or state.recalling:
            found = [lookup(state, namespace, key) for key in keys]
            return [row for row, _, _ in found], [reason for _, _, reason in found]
        rows, reasons, rest = batch.look_up(state, namespace, keys)
        for number in rest:
            reasons[number] = lookup(state, namespace, keys[number])[2]
        return rows.tolist(), list(map(_REASONS.__getitem__, reasons))

    def acquire(self, worker: Worker, event: ev.Acquire, *, may_wait: bool = True) -> ev.Acquired | None:
        """Pin the hits; all or nothing per chunk (invariant 3). The promotion of what is on SSD begins, if it may.

        Behind the first PENDING key hits are pinned all the same, or the promotions might push them out; a
        prefix lookup stops at the first MISS. None: as of `match`.
        """
        state = self.state
        limits = state.limits
        namespace = state.own_namespace(worker, event.namespace)
        shards = wanted_shards(namespace, event.shards)
        if len(worker.group.leases) >= limits.leases_per_worker_max * max(1, len(worker.group.members)):
            raise Exhausted(
                "too many open leases", field="leases", value=len(worker.group.leases), remedy="release some"
            )
        ttl_ms = clip_ttl(event.ttl_ms, limits.lease_ttl_ms, limits.lease_ttl_max_ms)
        rows, found = self._look_up(namespace, event.keys)
        if not event.local:
            looked = self.look(namespace, event, found, may_wait=may_wait)
            if looked is Looked.WAITS:
                return None
            if looked is Looked.AGAIN:
                rows, found = self._look_up(namespace, event.keys)
        else:
            found = [Reason.EVICTED if reason is Reason.ON_REMOTE else reason for reason in found]
        reasons: list[Reason] = []
        hits: list[int] = []
        until = state.now + min(event.wait_ms, limits.wait_max_ms)
        hits_max = limits.extents_per_answer_max // len(shards)
        leading = min(_leading_hits(found), hits_max)
        pin_bytes_max = limits.pin_bytes_max
        if leading:
            first = rows[:leading]
            if batch.charge_new(worker.group, first, namespace.chunk_bytes, pin_bytes_max):
                hits += first
                reasons += found[:leading]
                namespace.lookups[Reason.NONE] += leading
        for row, reason in zip(rows[len(hits) :], found[len(hits) :], strict=True):
            if len(hits) >= hits_max:
                reason = Reason.BEYOND_MISS
            elif reason is Reason.NONE and not worker.group.charge(row, namespace.chunk_bytes, pin_bytes_max):
                reason = Reason.QUOTA
            outcome = _OUTCOMES[reason]
            if outcome is Outcome.HIT:
                hits.append(row)
            comes = event.promote or reason not in _COLD
            if outcome is Outcome.PENDING and comes and event.wait_ms > 0:
                state.wait_for(worker, row, until)
            reasons.append(reason)
            namespace.lookups[reason] += 1
            if event.prefix_only and outcome is Outcome.MISS:
                reasons += [Reason.BEYOND_MISS] * (len(event.keys) - len(reasons))
                break
        outcomes = tuple(map(_OUTCOMES.__getitem__, reasons))
        backlog = self._backlog(namespace, rows, reasons)
        if event.promote and (backlog.ssd_bytes or Reason.ON_REMOTE in reasons):
            for row, reason in zip(rows, reasons, strict=True):
                if reason in _COLD:
                    self.promote(row)
        if not hits:
            return ev.Acquired(LeaseId(0), 0, outcomes, tuple(reasons), NO_EXTENTS, backlog)
        state.pin_all(namespace, hits)
        self.note_used(namespace, hits, rows.count(NONE) * namespace.spec.chunk_tokens)
        lease = state.leases.open(worker.group, worker.id, namespace.id, state.now + ttl_ms)
        lease.rows.extend(hits)
        extents = state.extents(namespace, hits, shards)
        return ev.Acquired(lease.id, ttl_ms, outcomes, tuple(reasons), extents, backlog)

    def note_used(self, namespace: Namespace, rows: Sequence[int], behind: int = 0) -> None:
        """`behind`: how many tokens were asked for behind the first miss."""
        state = self.state
        many = len(rows) >= state.batch_min and batch.distinct(rows)
        new = rows if many else list(dict.fromkeys(rows))
        if state.demanded:
            found = state.demanded.intersection(rows)
            if found:  # that they were asked for has been noted
                new = [row for row in new if row not in found]
            state.demanded -= found
            namespace.ssd_hits += len(found)
        if state.fetched:
            found = state.fetched.intersection(rows)
            state.fetched -= found
            namespace.remote_hits += len(found)
        state.policy.used(new, behind)
        if state.prefetched:
            found = state.prefetched.intersection(rows)
            state.prefetched -= found
            state.counters["prefetch_on_time"] += len(found)
        self._count(namespace, rows, many=many)

    def count_use(self, namespace: Namespace, rows: Sequence[int]) -> None:
        """`rows`, which are resident and named once each, were used now in their engine's own caches."""
        self.state.policy.used(rows)
        self._count(namespace, rows, many=len(rows) >= self.state.batch_min)

    def _count(self, namespace: Namespace, rows: Sequence[int], *, many: bool) -> None:
        state = self.state
        if many:
            batch.used(state, namespace, rows)
        else:
            self._used_each(namespace, rows)

    def _used_each(self, namespace: Namespace, rows: Sequence[int]) -> None:
        state = self.state
        chunks = state.chunks
        for row in rows:
            chunks.used_at[row] = state.now
            if chunks.hits[row] < HITS_MAX:
                chunks.hits[row] += 1
            start = chunks.shard0[row]
            for shard_row in range(start, start + namespace.shards):
                state.pool.segments[chunks.shard_segment[shard_row]].touched_at = state.now

    def count_use_of_cold(self, rows: Sequence[int]) -> None:
        """The same of rows that are on SSD alone."""
        self.state.policy.used(rows)
        chunks = self.state.chunks
        for row in rows:
            chunks.used_at[row] = self.state.now
            if chunks.hits[row] < HITS_MAX:
                chunks.hits[row] += 1

    def renew(self, worker: Worker, event: ev.Renew) -> ev.Renewed:
        """The quota was charged when the pins were taken, so whatever is renewed fits in the group's share."""
        state = self.state
        ttl_ms = clip_ttl(event.ttl_ms, state.limits.lease_ttl_ms, state.limits.lease_ttl_max_ms)
        state.leases.expire(state.now)
        remaining: list[Millis] = []
        for lease_id in event.leases:
            lease = state.lease(worker, lease_id)
            if lease is None or lease.expired:
                remaining.append(0)
                continue
            state.leases.renew(lease, state.now + ttl_ms)
            remaining.append(lease.expires_at - state.now)
        return ev.Renewed(tuple(remaining))

    def release(self, worker: Worker, event: ev.Release) -> ev.Done:
        count = 0
        for lease_id in event.leases:
            lease = self.state.lease(worker, lease_id)
            if lease is not None:
                self.state.close_lease(lease)
                count += 1
        return ev.Done(count)

    def report(self, worker: Worker, event: ev.ReportLoad) -> ev.Done:
        """Have the slots of suspect chunks read again; the answer to the op decides. Pinned meanwhile."""
        state = self.state
        namespace = state.own_namespace(worker, event.namespace)
        rows: list[int] = []
        for key in dict.fromkeys(event.keys):
            row, outcome, _ = lookup(state, namespace, key)
            if outcome is Outcome.HIT and row not in self._audited:
                rows.append(row)
        state.counters["loads_reported_bad"] += len(event.keys)
        if rows:
            self._audited.update(rows)
            self.audit(namespace, rows, worker=worker.id)
        return ev.Done(len(rows))

    def audit(
        self,
        namespace: Namespace,
        rows: Sequence[int],
        *,
        worker: WorkerId | None = None,
        quiet: bool = False,
    ) -> OpId:
        """Have the slots of these hits read again, for `worker` or for the daemon itself; `audited` is called with what
        they hold. `quiet`: that is no use of them."""
        state = self.state
        state.pin_all(namespace, rows)
        extents = state.extents(namespace, rows, range(namespace.shards))
        op = state.new_op()
        self.audits[op] = (list(rows), list(extents.checksum))
        if quiet:
            self._quiet.add(op)
        state.effects.append(ev.Checksum(op, extents, worker))
        return op

    def audited(self, op: OpId, checksums: Sequence[int] | None) -> int:
        """End of an audit's checksum. Returns how many were corrupt. None: the op failed (the copier was busy, or is
        closing), and nothing is known of the bytes; they are read again later."""
        state = self.state
        rows, expected = self.audits.pop(op)
        self._audited.difference_update(rows)
        namespace = state.namespace_of(rows[0])
        corrupt = 0
        if checksums is None:
            state.counters["audits_failed"] += 1
            for row in rows:
                self._audit_again(row)
        else:
            for index, row in enumerate(rows):
                self._again.pop(row, None)
                mine = slice(index * namespace.shards, (index + 1) * namespace.shards)
                if list(checksums[mine]) != expected[mine]:
                    corrupt += 1
                    state.found_corrupt(row, Tier.DRAM, "its bytes do not match their checksum")
                    state.doom(row, Reason.CORRUPT)
        state.unpin(namespace, rows, used=op not in self._quiet)
        self._quiet.discard(op)
        self._repeats.discard(op)
        return corrupt

    def _audit_again(self, row: int) -> None:
        left = self._again.get(row, AUDITS_AGAIN_MAX)
        if left and (row in self._again or len(self._again) < AUDITS_WAITING_MAX):
            self._again[row] = left - 1
        else:
            self._again.pop(row, None)  # whoever loads it verifies it, and reports it again

    def tick(self) -> None:
        """Audits that failed are repeated, with one op for each namespace at a time. A row may have become another
        chunk's: its audit does no harm."""
        state = self.state
        if not self._again or self._repeats:
            return
        due: dict[int, list[int]] = {}
        for row in list(self._again):
            if state.chunks.namespace[row] == NONE or not state.is_hit(row):
                del self._again[row]
            elif row not in self._audited:
                rows = due.setdefault(state.chunks.namespace[row], [])
                if len(rows) < AUDITS_PER_OP_MAX:
                    rows.append(row)
        for rows in due.values():
            self._audited.update(rows)
            self._repeats.add(self.audit(state.namespace_of(rows[0]), rows, quiet=True))

    def revoke(self, namespace: Namespace) -> bool:
        """Take the pins of the lease that expired first, if its grace is over. Its loads are void: the generations of
        whatever is evicted move on before the slots are used again."""
        state = self.state
        lease = state.leases.revocable(namespace.id, state.now, state.limits.revoke_grace_ms)
        if lease is None:
            return False
        state.close_lease(lease)
        state.counters["leases_revoked"] += 1
        for member in lease.group.members:
            state.effects.append(ev.LeasesRevoked(member, (lease.id,)))
        return True


def _leading_hits(reasons: Sequence[Reason]) -> int:
    for count, reason in enumerate(reasons):
        if reason is not Reason.NONE:
            return count
    return len(reasons)


def wanted_shards(namespace: Namespace, shards: tuple[int, ...]) -> tuple[int, ...]:
    """The shard numbers of a request; empty means all."""
    for shard in shards:
        if not 0 <= shard < namespace.shards:
            raise BadRequest(
                f"the namespace has shards 0 to {namespace.shards - 1}", field="shards", value=shard
            )
    if len(set(shards)) != len(shards):
        raise BadRequest("names a shard twice", field="shards", value=shards)
    return shards or tuple(range(namespace.shards))


def clip_ttl(wanted_ms: int, default_ms: int, max_ms: int) -> int:
    return min(wanted_ms, max_ms) if wanted_ms > 0 else default_ms
