"""Who uses the store: engines with their ranks, schedulers and an operator, each a generator in virtual time.

A program yields what it waits for (`Sleep`, `Answer`, `Settled`) and is sent what came of it. Its process may be
killed, stopped or cut off between any two of them.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from kvstore.core import events as ev
from kvstore.errors import StoreError
from kvstore.layout import NamespaceSpec
from kvstore.types import (
    ActionKind,
    ChunkKey,
    Extent,
    GrantResult,
    LeaseId,
    NamespaceId,
    Outcome,
    Protection,
    RegionId,
    SegmentId,
    StagedPiece,
    Wait,
    WorkerId,
)

from .cluster import Cluster
from .world import CHUNK_TOKENS, REGION, tag

ANSWER_MS = 400
"""How long a client waits for an answer before it asks again,"""
TRIES = 3
"""and how often it asks."""
KEYS_MAX = 24
"""Chunks of a conversation, after which it begins anew."""
GREED_MAX = 96
"""Chunks that one order asks to keep."""
SOLO, RANKED = 0, 1
"""Namespaces of each tenant: one shard a chunk, and two that are written by different ranks."""

Program = Generator[Any, Any, Any]


class Refused(Exception):
    """An error, or no answer: the turn is over, as far as the store is concerned."""


@dataclass(frozen=True, slots=True)
class Sleep:
    ms: int


@dataclass(frozen=True, slots=True)
class Answer:
    request: int
    ms: int


@dataclass(frozen=True, slots=True)
class Settled:
    """Until a key that was asked for is READY or will not come."""

    ms: int


@dataclass(slots=True)
class Conversation:
    """A conversation as its engine knows it; the chunks of its beginning may be shared with others."""

    name: bytes
    keys: list[ChunkKey]
    derived: bool = False
    """Something was cut out of it: what is computed now is not exact."""
    born: int = 0


@dataclass(frozen=True, slots=True)
class SaveTask:
    """What a rank is told to save."""

    namespace: int
    keys: tuple[ChunkKey, ...]
    counts: tuple[int, ...]
    parent: ChunkKey
    derived: bool


class Host(Protocol):
    """What a process needs of the simulation."""

    cluster: Cluster
    clock: int
    variant: int
    members: list[Process]

    def send(self, process: Process, event: ev.Event) -> None: ...

    def spec(self, process: Process, number: int) -> NamespaceSpec: ...


@dataclass(slots=True, eq=False)
class Process:
    host: Host
    name: str
    tenant: str
    group: str
    rank: int
    kind: str
    """"engine", "rank", "scheduler" or "operator"."""
    random: random.Random
    conversations: dict[int, list[Conversation]]
    """Of its tenant, by namespace."""
    worker: WorkerId = WorkerId(0)
    program: Program | None = None
    waiting: Any = None
    """What the program waits for."""
    stopped_until: int = 0
    stubborn_until: int = 0
    lags_until: int = 0
    fails_until: int = 0
    leaving: bool = False
    """It ends after this turn."""
    namespaces: list[NamespaceId] = field(default_factory=list)
    tasks: deque[SaveTask] = field(default_factory=lambda: deque(maxlen=8))
    peers: list[Process] = field(default_factory=list)
    """The other ranks of its engine."""
    requests: int = 0
    hints: Random = field(default_factory=Random)
    """What its orders beside the queue, and its touches, are drawn from."""
    greed: Random = field(default_factory=Random)
    """Whether it orders that all of its tenant's chunks be kept."""
    numbers_hints: bool = False
    queued: dict[NamespaceId, dict[bytes, ev.Hint]] = field(default_factory=dict)
    """A scheduler's queue, by job."""
    numbers: dict[NamespaceId, int] = field(default_factory=dict)
    """Of the last message about each."""
    unsure: set[NamespaceId] = field(default_factory=set)
    """Whose last message nobody answered."""

    def __repr__(self) -> str:
        return f"{self.name} (worker {self.worker})"

    # --------------------------------------------------------------------------------------------------- requests

    def ask(self, kind: Any, *args: Any, tries: int = TRIES, ms: int = ANSWER_MS, **named: Any) -> Program:
        """The answer; raises Refused for an error, and if there is none however often it is asked for."""
        self.requests += 1
        request = self.requests
        for _ in range(tries):
            self.host.send(self, kind(ev.Ticket(self.worker, request), *args, **named))
            answer = yield Answer(request, ms)
            if isinstance(answer, StoreError):
                raise Refused(str(answer))
            if answer is not None:
                return answer
        raise Refused("no answer")

    def tell(self, kind: Any, *args: Any, **named: Any) -> None:
        """Nobody waits for the answer."""
        self.requests += 1
        self.host.send(self, kind(ev.Ticket(self.worker, self.requests), *args, **named))

    # --------------------------------------------------------------------------------------------------- programs

    def run(self) -> Program:
        """Connected, until it ends."""
        try:
            yield from self._open()
        except Refused:
            return
        turns = {"engine": self._turn, "rank": self._job, "scheduler": self._publish, "operator": self._look}
        while not self.leaving:
            yield Sleep(self.random.randrange(1, 40))
            try:
                yield from turns[self.kind]()
            except Refused:
                yield from self._open_again()

    def _open(self) -> Program:
        self.namespaces = []
        self.numbers_hints = self.random.random() < 0.7
        for number in (SOLO, RANKED):
            opened = yield from self.ask(ev.Open, self.host.spec(self, number), tries=10)
            self.namespaces.append(opened.namespace)

    def _open_again(self) -> Program:
        """What was refused may be of an old epoch."""
        for number in (SOLO, RANKED):
            try:
                opened = yield from self.ask(ev.Open, self.host.spec(self, number))
                self.namespaces[number] = opened.namespace
            except Refused:
                yield Sleep(50)

    def _turn(self) -> Program:
        """One turn of a conversation: load what there is, compute the rest, save it, and name it."""
        chance = self.random
        number = RANKED if chance.random() < 0.5 else SOLO
        namespace = self.namespaces[number]
        if chance.random() < 0.01:
            yield from self._intrude()
        conversation = chance.choice(self.conversations[number])
        if chance.random() < 0.2:
            yield from self._edit(namespace, number, conversation)
        keys = tuple(conversation.keys)
        if keys and self.hints.random() < 0.3:  # it found them in its own caches, or will in part
            self.tell(ev.Touch, namespace, keys[: self.hints.randrange(1, len(keys) + 1)])
        if keys and self.hints.random() < 0.3:  # it found them in the directory
            found = bytes(self.hints.randrange(3) for _ in keys)
            self.tell(ev.Touched, namespace, keys, (len(keys),), found)
        if keys:
            yield from self.ask(ev.Match, namespace, keys, len(keys) * CHUNK_TOKENS)
            yield from self._load(namespace, keys)
        fresh = self._grow(conversation)
        yield Sleep(chance.randrange(20))  # the engine computes
        yield from self._save_all(number, conversation, fresh)
        yield from self._update(namespace, conversation)

    def _grow(self, conversation: Conversation) -> int:
        """The next chunks of the conversation; how many. A tail stays outside of `keys`."""
        if len(conversation.keys) >= KEYS_MAX:
            conversation.keys = conversation.keys[:2]  # another conversation that begins with the same words
            conversation.derived = False
            conversation.born += 1
        fresh = self.random.randrange(6, 14) if len(conversation.keys) < 6 else self.random.randrange(1, 6)
        kind = b"derived" if conversation.derived else b"exact"
        for _ in range(fresh):
            at = len(conversation.keys)
            conversation.keys.append(
                ChunkKey(b"%s %s %d %d" % (conversation.name, kind, conversation.born, at))
            )
        return fresh

    # ----------------------------------------------------------------------------------------------------- loading

    def _load(self, namespace: NamespaceId, keys: Sequence[ChunkKey]) -> Program:
        chance = self.random
        wait_ms = chance.choice((0, 100, 300))
        acquired: ev.Acquired = yield from self.ask(
            ev.Acquire,
            namespace,
            tuple(keys),
            wait_ms=wait_ms,
            prefix_only=chance.random() < 0.8,
            promote=chance.random() < 0.8,
        )
        if Outcome.PENDING in acquired.outcomes and wait_ms:
            yield Settled(wait_ms)
        if not acquired.lease:
            return
        if chance.random() < 0.05:
            return  # forgotten: it ends by itself
        yield from self._map({extent.segment for extent in acquired.extents})
        hits = [key for key, outcome in zip(keys, acquired.outcomes, strict=True) if outcome is Outcome.HIT]
        if chance.random() < 0.05:
            yield from self.ask(ev.Forget, namespace, b"", tuple(hits[-2:]))
            yield from self.ask(ev.Match, namespace, tuple(hits))  # while it is pinned it is a miss already
        bad = yield from self._copy(acquired.extents, chance.choice((0, 1, 5)))
        mistaken = chance.random() < 0.1  # its own memory is to blame: the daemon's bytes are good
        if (bad or mistaken) and hits:
            self.tell(ev.ReportLoad, namespace, tuple(hits))
        if chance.random() < 0.1:
            yield from self._hold_on(acquired)
        yield from self._release(acquired.lease)

    def _map(self, segments: set[SegmentId]) -> Program:
        missing = segments - self.host.cluster.mapped.get(self.worker, set())
        if missing:
            yield from self.ask(ev.WantSegments, tuple(sorted(missing)))

    def _copy(self, extents: Sequence[Extent], ms: int) -> Program:
        """Copy out of the mapping as a client does: generation, bytes, time passes, bytes, generation. Whatever passes
        both looks is what was committed, unless bits flipped, and then the checksum tells. Returns what is bad."""
        cluster = self.host.cluster
        bad = []
        for extent in extents[:: max(1, len(extents) // 4)]:
            if extent.segment not in cluster.mapped.get(self.worker, ()):
                continue  # it was not to be had any more
            first = cluster.load(self.worker, extent)
            if ms:
                yield Sleep(ms)
            if extent.segment not in cluster.mapped.get(self.worker, ()):
                continue
            second = cluster.load(self.worker, extent)
            if first is None or second is None:
                continue  # void
            if extent.checksum not in (first, second) or first != second:
                assert cluster.is_damaged(extent), f"{self} loaded wrong bytes: {extent}, {first}, {second}"
                bad.append(extent)
        return bad

    def _hold_on(self, acquired: ev.Acquired) -> Program:
        """Renew, or use the lease for longer than it lasts: what is read then is void, or still right."""
        if self.random.random() < 0.5:
            yield from self.ask(ev.Renew, (acquired.lease,))
        yield Sleep(self.random.choice((50, 500, 2_000)))
        yield from self._copy(acquired.extents, 1)

    def _release(self, lease: LeaseId) -> Program:
        self.host.cluster.leases.pop(lease, None)  # from here on it reads nothing there
        yield from self.ask(ev.Release, (lease,))

    # ------------------------------------------------------------------------------------------------------ saving

    def _save_all(self, number: int, conversation: Conversation, fresh: int) -> Program:
        """This rank's shards itself, those of the other ranks by telling them."""
        chance = self.random
        keys = tuple(conversation.keys[-fresh - chance.randrange(3) :])
        before = conversation.keys[: -len(keys)]
        parent = before[-1] if before else ChunkKey(b"")
        task = SaveTask(number, keys, (), parent, conversation.derived)
        if chance.random() < 0.15:
            count = chance.randrange(1, CHUNK_TOKENS)
            keys = (*keys, ChunkKey(b"%s tail %d" % (keys[-1], count)))
            task = SaveTask(
                number, keys, (*[CHUNK_TOKENS] * (len(keys) - 1), count), parent, conversation.derived
            )
        shards: tuple[int, ...] = ()
        if number == RANKED and self.peers:
            shards = (self.rank,)
            for peer in self.peers:
                peer.tasks.append(task)
        yield from self._save(task, shards)

    def _save(self, task: SaveTask, shards: tuple[int, ...]) -> Program:
        chance, cluster = self.random, self.host.cluster
        if cluster.limits.protection is Protection.SEALED and self.hints.random() < 0.25:
            yield from self._save_at_once(task, shards)
            return
        reserved: ev.Reserved = yield from self.ask(
            ev.Reserve,
            self.namespaces[task.namespace],
            task.keys,
            parent=task.parent,
            token_counts=task.counts,
            shards=shards,
            derived=task.derived,
            maker=self.maker,
            transient=chance.random() < 0.1,
        )
        if GrantResult.ALREADY in reserved.results and chance.random() < 0.2:
            yield from self._compare(task, reserved)
        if chance.random() < 0.2:
            yield from self._report_resident(task)
        if not reserved.reservation:
            if GrantResult.FULL in reserved.results:
                yield Sleep(20)
            return
        yield Sleep(chance.choice((0, 2, 10)))
        what = chance.random()
        if what < 0.04:
            cluster._let_go(reserved.reservation)
            yield from self.ask(ev.Abort, (reserved.reservation,))
        elif what < 0.07:
            return  # forgotten: it expires
        elif what < 0.2:
            yield from self._fill(reserved)
        else:
            self.host.variant += 1
            staged = cluster.write(reserved, self.host.variant)
            yield Sleep(chance.choice((0, 0, 3)))
            told: tuple[int, ...] = ()
            if cluster.limits.protection is Protection.GROUP:
                variant = self.host.variant
                cluster.write(reserved, variant)  # for as long as it thinks that it may
                if chance.random() < 0.5:
                    written = cluster.savings[reserved.reservation].shards
                    told = tuple(tag(shard, variant) for shard in written)
            cluster._let_go(reserved.reservation)
            if chance.random() < 0.4:
                staged = yield from self._fill_ahead(reserved, staged)
            wait = Wait.DURABLE if chance.random() < 0.2 else Wait.VISIBLE
            ms = 6_000 if wait is Wait.DURABLE else ANSWER_MS
            yield from self.ask(ev.Commit, reserved.reservation, staged, wait, told=told, ms=ms)

    def _save_at_once(self, task: SaveTask, shards: tuple[int, ...]) -> Program:
        """What it has written already, in one message."""
        chance, namespace = self.hints, self.namespaces[task.namespace]
        self.host.variant += 1
        every = [
            (namespace, key, shard) for key in task.keys for shard in shards or range(1 + task.namespace)
        ]
        offsets = self.host.cluster.stage(self.worker, every, self.host.variant)
        wait = Wait.DURABLE if chance.random() < 0.2 else Wait.VISIBLE
        transient, maker = chance.random() < 0.1, self.maker

        def event(ticket: ev.Ticket) -> ev.Save:
            reserve = ev.Reserve(
                ticket,
                namespace,
                task.keys,
                parent=task.parent,
                token_counts=task.counts,
                shards=shards,
                derived=task.derived,
                maker=maker,
                transient=transient,
            )
            return ev.Save(ticket, reserve, offsets, wait)

        yield from self.ask(event, ms=6_000 if wait is Wait.DURABLE else ANSWER_MS)

    @property
    def maker(self) -> bytes:
        """Another one after a while: one that was recalled is granted nothing any more. Of 16 bytes at most."""
        return (b"%s %d" % (self.name.encode(), self.host.clock // 4_000))[-16:]

    def _compare(self, task: SaveTask, reserved: ev.Reserved) -> Program:
        """Tell what it computed for what others had committed; now and then it is something else."""
        namespace, committed = self.namespaces[task.namespace], self.host.cluster.committed
        keys = [
            key
            for key, result in zip(task.keys, reserved.results, strict=True)
            if result is GrantResult.ALREADY
        ]
        sums = tuple(committed.get((namespace, key, 0), 1) ^ (self.random.random() < 0.1) for key in keys)
        yield from self.ask(ev.ReportDuplicates, namespace, tuple(keys), sums, (0,), self.maker)
        chance = zlib.crc32(keys[0]) if keys else 1
        if chance % 4 == 0:  # it is wrong, or thinks so
            healthy = bool(chance & 4)
            yield from self.ask(
                ev.ReportDuplicates,
                namespace,
                tuple(keys[:1]),
                (),
                (),
                self.maker,
                wrong=True,
                healthy=healthy,
            )

    def _report_resident(self, task: SaveTask) -> Program:
        """What of a conversation it keeps, in any order; also what was never saved."""
        keys = self.random.sample(task.keys, self.random.randrange(len(task.keys) + 1))
        answer = yield from self.ask(
            ev.ReportResident,
            self.namespaces[task.namespace],
            tuple(keys),
            self.random.choice((0, 50, 5_000)),
        )
        assert len(answer.ranks) == len(keys), answer
        needed = {rank for rank in answer.ranks if rank}
        assert needed == {*range(1, len(needed) + 1)}, answer

    def _fill_ahead(self, reserved: ev.Reserved, staged: tuple[StagedPiece, ...]) -> Program:
        """Tell of some that they are written, and wait for no answer; returns the pieces that the commit has to name.
        A request that was lost makes the commit fail, as a lost connection would."""
        left = list(range(len(self.host.cluster.savings[reserved.reservation].shards)))
        for _ in range(self.random.randrange(1, 4)):
            part = sorted(self.random.sample(left, self.random.randrange(len(left) + 1)))
            if not part:
                continue
            offsets = tuple(staged[number].offset for number in part) if staged else ()
            self.tell(ev.Fill, reserved.reservation, RegionId(0), offsets, tuple(part))
            left = [number for number in left if number not in part]
            yield Sleep(self.random.choice((0, 0, 2, 5)))
        return tuple(staged[number] for number in left) if staged else ()

    def _fill(self, reserved: ev.Reserved) -> Program:
        """Out of a region of its own: two phases, and no commit once the row is another's."""
        cluster = self.host.cluster
        self.host.variant += 1
        offsets, meant = [], []
        for shard in cluster.savings[reserved.reservation].shards:
            cluster._next_piece += 1
            offsets.append(cluster._next_piece)
            meant.append(tag(shard, self.host.variant))
            cluster.rows[self.worker, offsets[-1]] = meant[-1]
        cluster._let_go(reserved.reservation)
        cluster.filled_from[reserved.reservation] = tuple(offsets)
        cluster._meant[reserved.reservation] = tuple(meant)
        try:
            yield from self.ask(ev.Fill, reserved.reservation, REGION, tuple(offsets), tries=1)
        except Refused:
            cluster.reuse_rows(
                self.worker, reserved
            )  # it gave up: the daemon may still read, and never commit
            return
        yield from self.ask(ev.Commit, reserved.reservation)

    def _job(self) -> Program:
        """A rank that follows: it saves its shard of what the first rank saves."""
        if not self.tasks:
            yield Sleep(5)
            return
        task = self.tasks.popleft()
        if self.host.clock < self.fails_until:
            return
        if self.host.clock < self.lags_until:
            yield Sleep(self.random.randrange(1_500))
        yield from self._save(task, (self.rank,))
        if self.random.random() < 0.3:
            yield from self._load(self.namespaces[task.namespace], task.keys)

    # ---------------------------------------------------------------------------------------------------- sessions

    def _update(self, namespace: NamespaceId, conversation: Conversation) -> Program:
        """Let the session name what was saved; what is not there yet, or not any more, another time."""
        keys = conversation.keys
        info: ev.SessionInfo = yield from self.ask(
            ev.GetSession, namespace, conversation.name, len(keys) % 2 == 0
        )
        keep = 0
        while keep < min(len(keys), len(info.entries)) and info.entries[keep].key == keys[keep]:
            keep += 1
        matched: ev.Matched = yield from self.ask(ev.Match, namespace, tuple(keys))
        last = info.entries[keep - 1] if keep else None
        position = last.first_token + last.delta + last.token_count if last else 0
        entries = []
        for key in keys[keep : matched.usable]:
            entries.append(ev.SessionEntry(key, position, CHUNK_TOKENS))
            position += CHUNK_TOKENS
        if entries and matched.usable > keep:
            yield from self.ask(
                ev.UpdateSession, namespace, conversation.name, info.version, keep, tuple(entries)
            )

    def _edit(self, namespace: NamespaceId, number: int, conversation: Conversation) -> Program:
        """Truncate, fork or forget a session, or forget single keys."""
        chance = self.random
        what = chance.random()
        if what < 0.4:
            info: ev.SessionInfo = yield from self.ask(ev.GetSession, namespace, conversation.name)
            if len(info.entries) > 2:
                cut = info.entries[chance.randrange(len(info.entries) - 1)]
                where = cut.first_token + cut.delta
                after: ev.SessionInfo = yield from self.ask(
                    ev.Truncate,
                    namespace,
                    conversation.name,
                    info.version,
                    where,
                    cut.token_count,
                    chance.random() < 0.5,
                )
                conversation.keys = [entry.key for entry in after.entries]
                conversation.derived = True
                conversation.born += 1
        elif what < 0.8:
            other = chance.choice(self.conversations[number])
            yield from self.ask(ev.Forget, namespace, other.name)
            yield from self.ask(ev.Fork, namespace, conversation.name, other.name)
            other.keys = list(conversation.keys)
            other.derived = conversation.derived
            other.born += 1
        elif what < 0.9:
            yield from self.ask(ev.Forget, namespace, conversation.name)
        elif what < 0.95:
            yield from self._assemble(namespace, conversation)
        elif conversation.keys:
            yield from self.ask(ev.Forget, namespace, b"", tuple(conversation.keys[-2:]))

    def _assemble(self, namespace: NamespaceId, conversation: Conversation) -> Program:
        """A manifest as Prompt Cache makes them: some chunks of a conversation, in any order, with gaps between."""
        chance = self.random
        name = conversation.name + b" parts"
        info: ev.SessionInfo = yield from self.ask(ev.GetSession, namespace, name)
        if info.entries and chance.random() < 0.2:
            yield from self.ask(ev.Forget, namespace, name)
            return
        keys = chance.sample(conversation.keys, chance.randrange(len(conversation.keys) + 1))
        if not keys:
            return
        matched: ev.Matched = yield from self.ask(ev.Match, namespace, tuple(keys))
        position = 0
        entries = []
        for key, outcome in zip(keys, matched.outcomes, strict=True):
            if outcome is not Outcome.MISS:
                position += chance.randrange(2 * CHUNK_TOKENS)
                count = chance.choice((CHUNK_TOKENS, chance.randint(1, CHUNK_TOKENS)))  # also parts of chunks
                entries.append(ev.SessionEntry(key, position, count, approximate=True))
                position += count
        if entries:
            yield from self.ask(ev.UpdateSession, namespace, name, info.version, 0, tuple(entries))
            yield from self.ask(ev.GetSession, namespace, name)

    # ------------------------------------------------------------------------------------------------------ others

    def _intrude(self) -> Program:
        """Another tenant's namespace is not there for us, nor are its segments."""
        state = self.host.cluster.store.state
        others = [number for number, namespace in state.namespaces.items() if namespace.tenant != self.tenant]
        for kind in (ev.Match, ev.Acquire, ev.Reserve, ev.ReportLoad, ev.GetSession):
            if not others:
                return
            keys: Any = b"name" if kind is ev.GetSession else (ChunkKey(b"key"),)
            try:
                answer = yield from self.ask(kind, self.random.choice(others), keys, tries=1)
            except Refused:
                continue
            raise AssertionError(f"{self} of {self.tenant} was served: {kind.__name__} {answer}")
        foreign = tuple(
            segment.id for segment in state.pool.segments if segment.namespace in others and segment.capacity
        )
        if foreign:
            allowed: ev.SegmentsAllowed = yield from self.ask(ev.WantSegments, foreign[:4])
            for segment in allowed.segments:
                owner = self.host.cluster._owner[segment]
                assert state.namespaces[owner].tenant == self.tenant, (self, allowed)

    def _publish(self) -> Program:
        """A scheduler says what waits in its queue."""
        chance = self.random
        number = chance.choice((SOLO, RANKED))
        namespace = self.namespaces[number]
        hints = []
        for position in range(chance.randrange(6)):
            conversation = chance.choice(self.conversations[number])
            parts = b" parts" if chance.random() < 0.2 else b""
            named: dict[str, Any] = {"session": conversation.name + parts}
            if chance.random() < 0.5:
                named = {"keys": tuple(conversation.keys[: chance.randrange(1, 8)])}
            hints.append(ev.Hint(b"job %d" % chance.randrange(20), position, **named))
        by_model = self._by_model(len(hints))
        removed = tuple(b"job %d" % chance.randrange(20) for _ in range(chance.randrange(3)))
        snapshot = chance.random() < 0.5
        if self.numbers_hints:
            yield from self._publish_numbered(namespace, hints, removed, bool(by_model))
        else:
            yield from self.ask(
                ev.PublishQueue, namespace, tuple(hints), removed=removed, snapshot=snapshot, **by_model
            )
        if self.hints.random() < 0.6:
            yield from self._act(number)
        yield Sleep(chance.randrange(50, 300))

    def _by_model(self, count: int) -> dict[str, Any]:
        """Now and then all that is named is for whichever of the model's namespaces has it, some of it by the keys that
        each of them has."""
        if self.hints.random() >= 0.4:
            return {}
        prompts = []
        for _ in range(count):
            each = []
            for number in (SOLO, RANKED):
                keys = self.hints.choice(self.conversations[number]).keys[:8]
                if keys and self.hints.random() < 0.4:
                    each.append(ev.Prompt(self.namespaces[number], tuple(keys)))
            prompts.append(tuple(each))
        return {"by_model": True, "prompts": tuple(prompts)}

    def _publish_numbered(
        self, namespace: NamespaceId, hints: Sequence[ev.Hint], removed: Sequence[bytes], by_model: bool
    ) -> Program:
        """Changes of a queue, and all of it when the daemon lacks some or may do so: what it has afterwards is nothing
        but what the scheduler has."""
        queue = self.queued.setdefault(namespace, {})
        for job in removed:
            queue.pop(job, None)
        queue.update((hint.job, hint) for hint in hints)
        whole = namespace in self.unsure
        for snapshot in (False, True) if not whole else (True,):
            said = tuple(queue.values()) if snapshot else tuple(hints)
            self.numbers[namespace] = number = self.numbers.get(namespace, 0) + 1
            if self.random.random() < 0.25:
                return  # lost on its way, and nobody here noticed
            self.unsure.add(namespace)  # until it is answered
            answer = yield from self.ask(
                ev.PublishQueue,
                namespace,
                said,
                removed=tuple(removed),
                snapshot=snapshot,
                number=number,
                by_model=by_model,
            )
            if not answer.snapshot_wanted:
                self.unsure.discard(namespace)
                self.host.cluster.check_queue(self.worker, namespace, number, queue)
                return
            assert not snapshot, (self, number, answer)

    def _act(self, number: int) -> Program:
        """It orders something about some of its tenant's chunks, and no longer wants something else."""
        chance = self.hints
        actions = []
        for _ in range(chance.randrange(1, 4)):
            conversation = chance.choice(self.conversations[number])
            named: dict[str, Any] = {"session": conversation.name}
            if chance.random() < 0.5:
                named = {"keys": tuple(conversation.keys[: chance.randrange(1, 12)])}
            action = ev.HintAction(
                b"order %d" % chance.randrange(8),
                chance.choice(list(ActionKind)),
                ttl_ms=chance.choice((0, 200, 2_000)),
                eta_ms=chance.choice((0, 100, 1_500)),
                **named,
            )
            actions.append(action)
        if self.greed.random() < 0.25:  # and all of them, for long: others come later and want some, too
            everything = [key for conversation in self.conversations[number] for key in conversation.keys]
            kind = self.greed.choice((ActionKind.PIN, ActionKind.RETAIN))
            wanted = tuple(dict.fromkeys(everything))[:GREED_MAX]
            if wanted:
                actions.append(ev.HintAction(b"all of it", kind, ttl_ms=20_000, keys=wanted))
        cancelled = tuple(b"order %d" % chance.randrange(8) for _ in range(chance.randrange(2)))
        answer: ev.ActionsApplied = yield from self.ask(
            ev.ApplyActions,
            self.namespaces[number],
            tuple(actions),
            cancelled,
            **self._by_model(len(actions)),
        )
        assert len(answer.results) == len(answer.chunks) == len(actions), (self, actions, answer)

    def _look(self) -> Program:
        """An operator looks at everything, and now and then drops something."""
        chance = self.random
        yield from self.ask(ev.GetStats)
        yield from self.ask(ev.ListSessions)
        number = chance.choice((SOLO, RANKED))
        conversation = chance.choice(self.conversations[number])
        yield from self.ask(ev.Explain, self.namespaces[number], b"", tuple(conversation.keys))
        what = chance.random()
        if what < 0.2:
            yield from self.ask(ev.Scrub, chance.random() < 0.5, chance.choice((0, 4_096, 409_600)))
        elif what < 0.4:
            yield from self.ask(ev.ListQuarantine, 10, chance.random() < 0.5)
        elif what < 0.5:
            maker = chance.choice(self.host.members).maker
            yield from self.ask(ev.Recall, maker, 0, chance.random() < 0.5, ms=6_000, tries=1)
        elif what < 0.6:
            tenant = chance.choice(self.host.members).tenant
            yield from self.ask(ev.PurgeTenant, tenant, chance.random() < 0.3, ms=6_000, tries=1)
        yield Sleep(chance.randrange(200, 1_000))
