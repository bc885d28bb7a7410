"""The core against a model of a few dicts, under schedules that Hypothesis invents and shrinks.

The world compares every hit with what was committed last under its key, shard by shard (each commit writes its own
tag); the model knows what must be a hit (pinned and not forgotten), what cannot be one (never whole, forgotten, of an
old epoch) and what every session holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.core import events as ev
from kvstore.errors import Conflict, Precondition, StoreError
from kvstore.sim.world import CHUNK_TOKENS, PAGE, World, chain, epoch_of, spec
from kvstore.types import ChunkKey, LeaseId, NamespaceId, Outcome, Protection, WorkerId

SPECS = (spec("one"), spec("two", shards=2, shard_bytes=2 * PAGE - 1))
TENANTS = ("alice", "bob")
NAMES = (b"s", b"t", b"u")
CHAINS = ("a", "b", "c")
DERIVED = "derived"

Name = tuple[NamespaceId, bytes]
Key = tuple[NamespaceId, ChunkKey]
anything = st.integers(0, 1 << 16)


@dataclass
class Known:
    """A worker as the model knows it."""

    tenant: int
    group: str
    opened: list[NamespaceId] = field(default_factory=list)


@dataclass
class Held:
    """A lease as its owner knows it."""

    worker: WorkerId
    namespace: NamespaceId
    keys: tuple[ChunkKey, ...]
    acquired: ev.Acquired


class CoreMachine(RuleBasedStateMachine):
    @initialize(protection=st.sampled_from(Protection), unmap=st.booleans())
    def start(self, protection: Protection, unmap: bool) -> None:
        self.world = World(
            segments=4,
            segment_bytes=8 * PAGE,
            protection=protection,
            lease_ttl_ms=1_000,
            revoke_grace_ms=300,
            reservation_ttl_ms=800,
            incomplete_ttl_ms=1_500,
            ghosts_max=6,
            reserve_share_max=0.5,
            sessions_max=4,
        )
        self.world.unmap_at_once = unmap
        self.workers: dict[WorkerId, Known] = {}
        self.shards: dict[Key, set[int]] = {}
        """Shards committed since the chunk was last known to be lost."""
        self.sessions: dict[Name, ev.SessionInfo] = {}
        self.held: dict[LeaseId, Held] = {}
        self.open: list[tuple[WorkerId, ev.Reserved]] = []
        self.forgotten: set[Key] = set()
        self.epochs = [[0, 0], [0, 0]]
        self.retired: set[NamespaceId] = set()
        self.number = 0
        self.join(0, "")

    # ------------------------------------------------------------------------------------------------------ helpers

    def pick(self, pick: int) -> WorkerId:
        return sorted(self.workers)[pick % len(self.workers)]

    def someone(self, pick: int) -> tuple[WorkerId, NamespaceId]:
        worker = self.pick(pick)
        opened = self.workers[worker].opened
        return worker, opened[pick // 7 % len(opened)]

    def keys(self, pick: int) -> tuple[ChunkKey, ...]:
        name = (*CHAINS, DERIVED)[pick % 4]
        return chain(name, 4)[: 1 + pick // 4 % 4]

    def named(self, namespace: NamespaceId) -> int:
        return self.world.store.state.namespaces[namespace].shards

    def whole(self, namespace: NamespaceId, key: ChunkKey) -> bool:
        return len(self.shards.get((namespace, key), ())) == self.named(namespace)

    def live(self, held: Held) -> bool:
        """Somebody of its engine group is connected and the lease was not taken away."""
        return held.acquired.lease in self.world.leases

    def note_commit(self, worker: WorkerId, reserved: ev.Reserved, answer: ev.Committed | None) -> None:
        if answer is not None:
            for namespace, key, shard in self.world.savings[reserved.reservation].shards:
                self.shards.setdefault((namespace, key), set()).add(shard)
                self.forgotten.discard((namespace, key))

    # -------------------------------------------------------------------------------------------------------- rules

    @precondition(lambda self: len(self.workers) < 4)
    @rule(tenant=st.integers(0, 1), group=st.sampled_from(("", "engine")))
    def join(self, tenant: int, group: str) -> None:
        worker = self.world.join(TENANTS[tenant], group)
        known = self.workers[worker] = Known(tenant, group)
        for number, base in enumerate(SPECS):
            known.opened.append(self.world.open(epoch_of(base, self.epochs[tenant][number]), worker))

    @precondition(lambda self: len(self.workers) > 1)
    @rule(pick=anything, gone=st.booleans())
    def leave(self, pick: int, gone: bool) -> None:
        worker = self.pick(pick)
        del self.workers[worker]
        if gone:
            self.world.kill(worker)
        else:
            self.world.close(worker)
        self.open = [entry for entry in self.open if entry[0] != worker]

    @precondition(lambda self: bool(set(self.world.mapped) - set(self.workers)))
    @rule(pick=anything)
    def a_closed_process_ends(self, pick: int) -> None:
        closed = sorted(set(self.world.mapped) - set(self.workers))
        self.world.kill(closed[pick % len(closed)])

    @rule(pick=anything, keys=anything, mask=st.integers(1, 3))
    def reserve(self, pick: int, keys: int, mask: int) -> None:
        worker, namespace = self.someone(pick)
        shards = tuple(shard for shard in range(self.named(namespace)) if mask >> shard & 1)
        wanted = self.keys(keys)
        try:
            reserved = self.world.reserve(
                worker, namespace, wanted, shards=shards, derived=wanted[0].startswith(DERIVED.encode())
            )
        except Precondition:
            assert namespace in self.retired
            return
        assert namespace not in self.retired
        if reserved.reservation:
            self.open.append((worker, reserved))

    @precondition(lambda self: bool(self.open))
    @rule(pick=anything, end=st.sampled_from(("commit", "commit", "commit", "abort", "fail")))
    def end_reservation(self, pick: int, end: str) -> None:
        worker, reserved = self.open.pop(pick % len(self.open))
        self.number += 1
        if end == "abort":
            known = reserved.reservation in self.world.store.state.reservations
            assert self.world.abort(worker, reserved) == known
            return
        if end == "fail":
            self.world.hold = {ev.CopyIn, ev.Checksum}
        over = self.world.store.state.reservations.get(reserved.reservation)
        alive = over is not None and over.expires_at > self.world.now
        try:
            answer = self.world.commit(worker, reserved, variant=self.number)
        except Precondition:
            assert not alive
            return
        finally:
            self.world.hold = set()
        if answer is None:
            self.world.finish(fails="as told")
        elif alive:
            self.note_commit(worker, reserved, answer)

    @rule(pick=anything, keys=anything, prefix=st.booleans(), wait=st.sampled_from((0, 400)))
    def acquire(self, pick: int, keys: int, prefix: bool, wait: int) -> None:
        worker, namespace = self.someone(pick)
        wanted = self.keys(keys)
        acquired = self.world.acquire(worker, namespace, wanted, prefix_only=prefix, wait_ms=wait)
        hits = tuple(
            key for key, found in zip(wanted, acquired.outcomes, strict=True) if found is Outcome.HIT
        )
        for key in hits:
            assert namespace not in self.retired
            assert self.whole(namespace, key) and (namespace, key) not in self.forgotten, key
        if acquired.lease:
            self.held[acquired.lease] = Held(worker, namespace, hits, acquired)

    @precondition(lambda self: bool(self.held))
    @rule(pick=anything, what=st.sampled_from(("release", "renew", "load")))
    def use_lease(self, pick: int, what: str) -> None:
        lease = sorted(self.held)[pick % len(self.held)]
        held = self.held[lease]
        if held.worker not in self.workers:
            del self.held[lease]
        elif what == "renew":
            (left,) = self.world.ask(ev.Renew, held.worker, (lease,)).ttl_ms
            assert left == 0 or self.live(held)
        elif what == "load":
            segments = self.world.mapped[held.worker]
            for extent in held.acquired.extents:
                if extent.segment in segments:
                    found = self.world.load(held.worker, extent)
                    assert found in (None, extent.checksum)
                    assert found is not None or not self.live(held), "a lease that is held is void"
        else:
            del self.held[lease]
            live = self.live(held)
            assert self.world.release(held.worker, lease) == live

    @rule(pick=anything, keys=anything)
    def forget_keys(self, pick: int, keys: int) -> None:
        worker, namespace = self.someone(pick)
        self.world.ask(ev.Forget, worker, namespace, b"", self.keys(keys))
        for key in self.keys(keys):
            self.shards.pop((namespace, key), None)
            self.forgotten.add((namespace, key))

    @rule(
        pick=anything,
        name=st.sampled_from(NAMES),
        keys=anything,
        keep=st.integers(0, 5),
        stale=st.booleans(),
        approximate=st.booleans(),
    )
    def update_session(
        self, pick: int, name: bytes, keys: int, keep: int, stale: bool, approximate: bool
    ) -> None:
        worker, namespace = self.someone(pick)
        self.refresh()
        known = self.sessions.get((namespace, name), ev.SessionInfo(name, 0, (), 0))
        kept = known.entries[:keep]
        position = kept[-1].first_token + kept[-1].delta + kept[-1].token_count if kept else 0
        wanted = self.keys(keys)
        present = self.world.outcomes(worker, namespace, wanted) == ["HIT"] * len(wanted)
        exact = position == len(kept) * CHUNK_TOKENS and not any(e.approximate or e.delta for e in kept)
        allowed = exact or approximate or wanted[0].startswith(DERIVED.encode())
        try:
            info = self.world.append(
                worker,
                namespace,
                name,
                wanted,
                version=known.version + stale,
                keep=len(kept),
                first=position,
                approximate=approximate,
            )
        except Conflict:
            assert stale
            return
        except Precondition:
            assert not stale and not (present and allowed), "refused without a reason"
            return
        assert not stale and allowed
        assert [e.key for e in info.entries] == [*(e.key for e in kept), *wanted]
        assert info.version > known.version
        self.sessions[namespace, name] = info

    @rule(
        pick=anything,
        name=st.sampled_from(NAMES),
        first=st.integers(0, 4),
        count=st.integers(1, 3),
        close=st.booleans(),
    )
    def truncate(self, pick: int, name: bytes, first: int, count: int, close: bool) -> None:
        worker, namespace = self.someone(pick)
        self.refresh()
        known = self.sessions.get((namespace, name))
        if known is None or first >= len(known.entries):
            return
        cut = known.entries[first : first + count]
        begin = cut[0].first_token + cut[0].delta
        end = cut[-1].first_token + cut[-1].delta + cut[-1].token_count
        info = self.world.ask(ev.Truncate, worker, namespace, name, known.version, begin, end - begin, close)
        rest = known.entries[first + count :]
        assert info.entries[:first] == known.entries[:first], "what precedes the cut does not change"
        gap = sum(entry.token_count for entry in cut) if close else 0
        assert [(e.key, e.first_token, e.delta) for e in info.entries[first:]] == [
            (e.key, e.first_token, e.delta - gap) for e in rest
        ]
        assert all(entry.approximate for entry in info.entries[first:])
        self.sessions[namespace, name] = info

    @rule(pick=anything, name=st.sampled_from(NAMES), other=st.sampled_from(NAMES))
    def fork(self, pick: int, name: bytes, other: bytes) -> None:
        worker, namespace = self.someone(pick)
        self.refresh()
        known, taken = self.sessions.get((namespace, name)), (namespace, other) in self.sessions
        try:
            info = self.world.ask(ev.Fork, worker, namespace, name, other)
        except StoreError:
            assert known is None or taken
            return
        assert known is not None and not taken and info.entries == known.entries
        self.sessions[namespace, other] = info

    @rule(pick=anything, name=st.sampled_from(NAMES))
    def forget_session(self, pick: int, name: bytes) -> None:
        worker, namespace = self.someone(pick)
        self.world.ask(ev.Forget, worker, namespace, name)
        self.sessions.pop((namespace, name), None)

    @rule(pick=anything)
    def new_epoch(self, pick: int) -> None:
        worker, namespace = self.someone(pick)
        known = self.workers[worker]
        number = known.opened.index(namespace)
        if namespace in self.retired:
            epoch = self.epochs[known.tenant][number]
        elif pick % 5:
            return
        else:
            epoch = self.epochs[known.tenant][number] = self.epochs[known.tenant][number] + 1
            self.retired.add(namespace)
        known.opened[number] = self.world.open(epoch_of(SPECS[number], epoch), worker)

    @rule(pick=anything, keys=anything)
    def report(self, pick: int, keys: int) -> None:
        worker, namespace = self.someone(pick)
        before = self.world.outcomes(worker, namespace, self.keys(keys))
        self.world.ask(ev.ReportLoad, worker, namespace, self.keys(keys))
        assert self.world.outcomes(worker, namespace, self.keys(keys)) == before, "nothing was damaged"

    @rule(ms=st.sampled_from((1, 50, 100, 400, 900, 2_000)))
    def pass_time(self, ms: int) -> None:
        self.world.tick(ms)

    @rule()
    def unmap_what_is_retired(self) -> None:
        for push in self.world.take(ev.SegmentsRetired):
            if push.worker in self.workers and not self.world.unmap_at_once:
                self.world.unmap(push.worker, push.segments)

    # --------------------------------------------------------------------------------------------------- invariants

    def refresh(self) -> None:
        """Sessions may be dropped by the bound on their number, or with their epoch; else they are as they were."""
        present = self.world.store.state.sessions.by_name
        self.sessions = {name: info for name, info in self.sessions.items() if name in present}

    @invariant()
    def sessions_are_what_was_put(self) -> None:
        if not hasattr(self, "world"):
            return
        self.refresh()
        for (namespace, name), info in self.sessions.items():
            session = self.world.store.state.sessions.by_name[namespace, name]
            assert session.version == info.version
            key = self.world.store.state.chunks.key
            assert [key[row] for row in session.manifest.rows] == [entry.key for entry in info.entries]

    @invariant()
    def what_is_leased_is_there(self) -> None:
        if not hasattr(self, "world"):
            return
        for held in self.held.values():
            if self.live(held) and held.worker in self.workers:
                for extent in held.acquired.extents:
                    assert self.world.cells[extent.segment][extent.cell] == extent.generation, held


CoreMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_the_core_is_what_the_model_says = CoreMachine.TestCase
