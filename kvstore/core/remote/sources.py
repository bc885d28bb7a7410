"""Sources beyond this node: who else has a chunk that this node lacks, and how it comes into DRAM.

    miss -> LookUpChunks -> ChunksLookedUp -> known to be there (Reason.ON_REMOTE, PENDING) or not, for a while
         -> Acquire: FetchChunks into RESERVED slots -> ChunksFetched -> READY, a hit
                                                                 or a miss with a reason; slots free again

A source is a name in `Limits.sources` (a REMOTE store, the peers), and somebody at the edge who performs these two
effects for that name. To add one: name it, perform `LookUpChunks` (bounded in time: the answer may be `failed`, it must
not be late) and `FetchChunks` (answered only when nothing writes to the targets any more, however late). The source
verifies what it hands over: key, namespace digest, shard, checksum; `FetchedChunk.result` says CORRUPT where something
differs, REUSED where the chunk is there no more, IO_ERROR where the source itself failed.

Match and Acquire wait for the look-up of what is missing, `lookup_wait_ms` at most, and only while the source is well.
A request whose keys are all here, or are known to be nowhere, waits for nothing. A source that fails or is late is left
alone (`Source.trip`), for twice as long each time; then a look-up that nobody waits for tries it again. Of several
sources that have a chunk the one with the lowest `Found.cost_ms` is read, then the next.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.core import events as ev
from kvstore.core.chunks import COMMITTED, DERIVED, DOOMED, FETCHING, FOREIGN, NONE, TAIL
from kvstore.core.namespaces import Namespace
from kvstore.core.pool import Segment
from kvstore.core.rate import AtOnce, Rate
from kvstore.core.state import State
from kvstore.keys import is_tenant_mark
from kvstore.types import (
    ChunkKey,
    DiskResult,
    Extents,
    Found,
    Millis,
    NamespaceId,
    OpId,
    Reason,
    Tier,
)

Name = tuple[NamespaceId, ChunkKey]

LOOKUP_KEYS_MAX = 512
"""Of one effect; more keys make more effects."""
LOOKUPS_MAX = 64
"""Under way at one source; beyond, a key is a miss that is asked for again."""
PARKED_MAX = 4_096
"""Requests that wait for look-ups."""
KNOWN_MAX = 1 << 17
"""Answers that are remembered; the oldest go."""
CHUNKS_PER_OP_MAX = 32
OPS_AT_ONCE = 4
"""That share what may be under way at one source, as long as that is little."""
FETCHES_MAX = 16
"""Under way at one source. What is late counts: a source that hangs holds no more DRAM than that."""
AHEAD_SHARE = 2
"""What nobody waits for takes such a part of what may be under way at most."""
HELD_MAX = 256
"""Chunks of sources that have enough to do, passed over in one step for those of others."""
ERRORS_MAX = 3
"""Failures of a source in a row after which it is left alone."""
ABSENT_AFTER_CORRUPT_MS = 60_000
NO_NAMESPACE, NO_DIGEST, TRIAL_KEY = NamespaceId(0), bytes(32), ChunkKey(b"is it well?")
"""Nobody has this chunk: what a source is asked for to see whether it is well again."""
_ASKED_FOR = frozenset(
    {
        Reason.NEVER_SEEN,
        Reason.EVICTED,
        Reason.EXPIRED,
        Reason.CORRUPT,
        Reason.INCOMPLETE,
        Reason.TRUNCATED,
        Reason.LOST,
        Reason.SLOW,
        Reason.ON_REMOTE,
    }
)
"""Why a key may be missing here and be asked for elsewhere: what somebody wanted gone (forgotten, recalled, an old
epoch) is not."""


class Looked(enum.Enum):
    """What looking beyond this node means for a request."""

    NOTHING_NEW = 0
    AGAIN = 1
    """Something is known now that was not: look its keys up again."""
    WAITS = 2
    """`resume` gets it when the answers are there, or its time is up."""


@dataclass(slots=True)
class Source:
    """One of them, and how it fares."""

    name: str
    errors: int = 0
    """In a row."""
    pause_ms: Millis = 0
    """For how long it was left alone last; 0: it is well."""
    until: Millis = 0
    """It is left alone until then."""
    why: str = ""
    era: int = 0
    """Counts its outages: an answer of before one does not count any more."""
    lookups: int = 0
    fetches: int = 0
    bytes: int = 0
    """Of the fetches under way, the late ones too."""
    rate: Rate = field(default_factory=Rate)

    def __repr__(self) -> str:
        return f"Source({self.name}: {'well' if not self.pause_ms else self.why})"

    def is_asked(self, now: Millis) -> bool:
        """Whether look-ups go there; after an outage one at a time."""
        if not self.pause_ms:
            return self.lookups < LOOKUPS_MAX
        return now >= self.until and not self.lookups

    @property
    def is_well(self) -> bool:
        return not self.pause_ms

    def trip(self, why: str, now: Millis, *, pause_ms: Millis, pause_max_ms: Millis) -> None:
        """Leave it alone. What fails of what was begun before tells nothing new."""
        if self.pause_ms and now < self.until:
            return
        self.why = why
        self.pause_ms = min(2 * self.pause_ms, pause_max_ms) if self.pause_ms else pause_ms
        self.until = now + self.pause_ms
        self.errors = 0
        self.era += 1

    def recovers(self) -> None:
        self.errors = 0
        self.pause_ms = 0
        self.why = ""


@dataclass(slots=True)
class Answer:
    """What one source said of one key."""

    found: Found | None
    until: Millis
    era: int


@dataclass(slots=True)
class LookUp:
    source: Source
    namespace: NamespaceId
    keys: tuple[ChunkKey, ...]
    deadline: Millis
    late: bool = False


@dataclass(slots=True)
class Parked:
    """A request that waits for look-ups."""

    event: ev.Match | ev.Acquire
    ops: set[OpId]
    until: Millis


@dataclass(slots=True)
class Wanted:
    """A FETCHING chunk whose fetch has not begun."""

    row: int
    key: ChunkKey
    demanded: bool


@dataclass(slots=True)
class LookedUpAnew:
    """A FETCHING chunk of which a forget was heard: whether somebody has it is asked anew."""

    wanted: Wanted
    ops: set[OpId]


@dataclass(slots=True)
class HeardOf:
    """The forgets of a chunk that is FETCHING: what is older than them may not come, what was saved since may."""

    channel: str
    """Where the newest was read; empty: in two channels, and nothing that is under way is held against both."""
    count: int
    asked_anew: bool = False
    """The sources were asked, or could not be, since the newest was heard: they are not asked once more."""


@dataclass(slots=True)
class Fetch:
    source: Source
    rows: list[int]
    keys: list[ChunkKey]
    bytes: int
    began: Millis
    deadline: Millis
    quarantined: list[tuple[Segment, int]] | None = None
    """The targets, once it is late."""


class Sources:
    def __init__(
        self,
        state: State,
        reserve: Callable[[int, bool], bool],
        is_barred: Callable[[str, bytes], bool],
    ) -> None:
        """`reserve(row, demanded)` gives all shards of a chunk RESERVED slots, or none (`Transfers.reserve_slots`);
        `is_barred(tenant, maker)`: what that maker made is not stored."""
        self.state = state
        self._reserve = reserve
        self._is_barred = is_barred
        limits, most = state.limits, state.limits.remote_bytes_in_flight_max
        self.by_name = {name: Source(name) for name in limits.sources}
        first, least = limits.remote_first_bytes, limits.remote_least_bytes
        self.at_once = {
            name: AtOnce(most, self._patience_ms(name), ops=OPS_AT_ONCE, first=first, least=least)
            for name in self.by_name
        }
        """Of fetches."""
        self.known: OrderedDict[Name, dict[str, Answer]] = OrderedDict()
        self.lookups: dict[OpId, LookUp] = {}
        self._asking: dict[tuple[str, NamespaceId, ChunkKey], OpId] = {}
        self.parked: dict[int, Parked] = {}
        self._next_parked = 1
        self._noted = 0
        """Counts the rows whose reason a look-up has changed."""
        self.wanted: deque[Wanted] = deque()
        self._ahead: deque[Wanted] = deque()
        self._without_slot: list[Wanted] = []
        self._may_begin = False
        """Whether something happened since no source had room for what is wanted of it."""
        self.fetches: dict[OpId, Fetch] = {}
        self._forgotten: dict[int, HeardOf] = {}
        """By row."""
        self._anew: dict[int, LookedUpAnew] = {}
        """By row, until the sources have answered."""
        self.resume: Callable[[ev.Match | ev.Acquire], None] = lambda event: None
        """Carries out a parked request; set by the store."""

    def __repr__(self) -> str:
        return f"Sources({list(self.by_name.values())}, {len(self.lookups)} look-ups, {len(self.fetches)} fetches)"

    # ----------------------------------------------------------------------------------------------------- look-ups

    def look(
        self, namespace: Namespace, event: ev.Match | ev.Acquire, reasons: Sequence[Reason], *, may_wait: bool
    ) -> Looked:
        """Ask for what this request misses, whose keys were found to be `reasons` here."""
        if not self.by_name or _ASKED_FOR.isdisjoint(reasons) or namespace.retired:
            return Looked.NOTHING_NEW
        missing = [key for key, reason in zip(event.keys, reasons, strict=True) if reason in _ASKED_FOR]
        prefix = isinstance(event, ev.Match) or event.prefix_only
        noted = self._noted
        ops = self.ask(namespace, missing, prefix=prefix)
        waits = {op for op in ops if self.lookups[op].source.is_well} if may_wait else set()
        if waits and len(self.parked) < PARKED_MAX:
            until = self.state.now + self.state.limits.lookup_wait_ms
            self.parked[self._next_parked] = Parked(event, waits, until)
            self._next_parked += 1
            self.state.counters["requests_parked"] += 1
            return Looked.WAITS
        return Looked.AGAIN if self._noted != noted else Looked.NOTHING_NEW

    def ask(self, namespace: Namespace, keys: Sequence[ChunkKey], *, prefix: bool) -> set[OpId]:
        """Have the sources look up those of `keys` that are missing here and whose answers are not known. The look-ups
        under way, also older ones, that tell of them. `prefix`: what is behind a key that nobody has is not wanted."""
        unknown: dict[str, list[ChunkKey]] = {}
        ops: set[OpId] = set()
        now = self.state.now
        for key in dict.fromkeys(keys):
            if not self.is_missing(namespace, key):
                continue
            answers = self.known.get((namespace.id, key), {})
            there = under_way = False
            for source in self.by_name.values():
                answer = answers.get(source.name)
                if answer is not None and answer.era == source.era and answer.until > now and source.is_well:
                    there = there or answer.found is not None
                    continue
                op = self._asking.get((source.name, namespace.id, key))
                if op is not None:
                    ops.add(op)
                    under_way = under_way or source.is_well
                elif source.is_asked(now):
                    unknown.setdefault(source.name, []).append(key)
                    under_way = under_way or source.is_well
            if there:
                self._note_there(namespace, key)
            elif not under_way:
                self._note_absent(namespace, key)
                if prefix:
                    break
        for name, missing in unknown.items():
            for start in range(0, len(missing), LOOKUP_KEYS_MAX):
                if not self.by_name[name].is_asked(now):
                    break
                ops.add(
                    self._look_up(self.by_name[name], namespace, missing[start : start + LOOKUP_KEYS_MAX])
                )
        return ops

    def _try(self, source: Source) -> None:
        """Whether it is well again, if nobody else asks it."""
        op = self.state.new_op()
        deadline = self.state.now + self.state.limits.lookup_deadline_ms
        self.lookups[op] = LookUp(source, NO_NAMESPACE, (TRIAL_KEY,), deadline)
        source.lookups += 1
        self.state.effects.append(ev.LookUpChunks(op, source.name, NO_NAMESPACE, NO_DIGEST, (TRIAL_KEY,)))

    def is_missing(self, namespace: Namespace, key: ChunkKey) -> bool:
        """Nothing of it is here, nor on its way."""
        row = namespace.index.get(key, NONE)
        if row == NONE:
            return True
        chunks = self.state.chunks
        return chunks.shard0[row] == NONE and Reason(chunks.reason[row]) in _ASKED_FOR

    def _look_up(self, source: Source, namespace: Namespace, keys: Sequence[ChunkKey]) -> OpId:
        state = self.state
        op = state.new_op()
        deadline = state.now + state.limits.lookup_deadline_ms
        self.lookups[op] = LookUp(source, namespace.id, tuple(keys), deadline)
        source.lookups += 1
        for key in keys:
            self._asking[source.name, namespace.id, key] = op
        state.counters["remote_lookups"] += 1
        state.counters["remote_keys_looked_up"] += len(keys)
        state.effects.append(ev.LookUpChunks(op, source.name, namespace.id, namespace.salt, tuple(keys)))
        return op

    def looked_up(self, event: ev.ChunksLookedUp) -> None:
        state = self.state
        limits = state.limits
        lookup = self.lookups.pop(event.op)
        source = lookup.source
        if not lookup.late:
            self._no_longer_asking(event.op, lookup)
        if event.failed:
            self._fails(source, event.failed)
        elif not lookup.late:
            source.recovers()
            namespace = state.namespaces.get(lookup.namespace)
            trial = lookup.namespace == NO_NAMESPACE
            for key, found in () if trial else zip(lookup.keys, event.found, strict=True):
                fresh_ms = limits.lookup_absent_ms if found is None else limits.lookup_fresh_ms
                self._remember(lookup.namespace, key, source, found, fresh_ms)
                if namespace is None:
                    continue
                if found is not None:
                    state.counters["remote_keys_found"] += 1
                    self._note_there(namespace, key)
                else:
                    self._note_absent(namespace, key)
        self._has_answered(event.op)

    def _no_longer_asking(self, op: OpId, lookup: LookUp) -> None:
        lookup.source.lookups -= 1
        for key in lookup.keys:
            name = (lookup.source.name, lookup.namespace, key)
            if self._asking.get(name) == op:
                del self._asking[name]

    def _has_answered(self, op: OpId) -> None:
        for row, anew in list(self._anew.items()):
            anew.ops.discard(op)
            if not anew.ops:
                self._goes_on(row)
        for number, parked in list(self.parked.items()):
            parked.ops.discard(op)
            if not parked.ops:
                del self.parked[number]
                self.resume(parked.event)

    def _remember(
        self, namespace: NamespaceId, key: ChunkKey, source: Source, found: Found | None, fresh_ms: Millis
    ) -> None:
        self._may_begin = True
        name = (namespace, key)
        answers = self.known.pop(name, None) or {}
        answers[source.name] = Answer(found, self.state.now + fresh_ms, source.era)
        self.known[name] = answers
        if len(self.known) > KNOWN_MAX:
            self.known.popitem(last=False)

    def _choices(self, namespace: NamespaceId, key: ChunkKey) -> list[tuple[Source, Found]]:
        """Who has it, as far as is known, the cheapest first."""
        choices = []
        for name, answer in self.known.get((namespace, key), {}).items():
            source = self.by_name[name]
            if answer.found is not None and answer.era == source.era and source.is_well:
                choices.append((source, answer.found))
        return sorted(choices, key=lambda choice: choice[1].cost_ms)

    def lead_ms(self, namespace: Namespace, keys: Sequence[ChunkKey]) -> float:
        """How long bringing these takes, as far as is known of each: of several sources the slowest counts."""
        bytes_of: dict[str, int] = {}
        latency_ms: dict[str, float] = {}
        for key in keys:
            choices = self._choices(namespace.id, key)
            if choices:
                source, found = choices[0]
                bytes_of[source.name] = bytes_of.get(source.name, 0) + namespace.payload_bytes
                latency_ms[source.name] = max(found.cost_ms, latency_ms.get(source.name, 0.0))
        times = []
        for name, size in bytes_of.items():
            rate = self.by_name[name].rate.bytes_per_s
            each_ms = 1_000 * size / rate if rate else latency_ms[name] * size / namespace.payload_bytes
            times.append(latency_ms[name] + each_ms)
        return max(times, default=0.0)

    def has(self, name: Name, source: str) -> bool:
        """Whether this source is known to have the chunk."""
        answer = self.known.get(name, {}).get(source)
        alive = answer is not None and answer.until > self.state.now
        return alive and answer is not None and answer.found is not None

    def is_gone(self, name: Name, source: str) -> None:
        """This source has it no more, or will not serve it."""
        answers = self.known.get(name)
        if answers is not None and source in answers:
            self._remember(*name, self.by_name[source], None, self.state.limits.lookup_absent_ms)

    def has_failed(self, source: str, why: str) -> None:
        """Something else than a look-up or a fetch has."""
        self._fails(self.by_name[source], why)

    def is_late(self, source: str, why: str) -> None:
        self._trip(self.by_name[source], why)

    def is_alive(self, source: str) -> None:
        self.by_name[source].recovers()

    def note_stored(self, row: int, source: str, found: Found) -> None:
        """This node has put it there itself: no look-up is needed when it is gone here."""
        fresh_ms = self.state.limits.lookup_fresh_ms
        namespace = NamespaceId(self.state.chunks.namespace[row])
        self._remember(namespace, self.state.chunks.key[row], self.by_name[source], found, fresh_ms)

    def _note_there(self, namespace: Namespace, key: ChunkKey) -> None:
        """A ghost with Reason.ON_REMOTE stands for what is elsewhere."""
        state = self.state
        chunks = state.chunks
        choices = self._choices(namespace.id, key)
        if not choices:
            return
        row = namespace.index.get(key, NONE)
        tokens = choices[0][1].token_count or namespace.spec.chunk_tokens
        if row == NONE:
            if chunks.rows_used >= state.limits.chunks_max or not state.limits.ghost_rows_max:
                return
            row = namespace.index[key] = chunks.new_row(namespace.id, key, state.now)
            chunks.tokens[row] = tokens
            chunks.reason[row] = Reason.ON_REMOTE
            self._noted += 1
            state.remember_ghost(row)
        elif self.is_missing(namespace, key):
            if not chunks.flags[row] & COMMITTED:
                chunks.tokens[row] = tokens
            self._noted += chunks.reason[row] != Reason.ON_REMOTE
            chunks.reason[row] = Reason.ON_REMOTE

    def _note_absent(self, namespace: Namespace, key: ChunkKey) -> None:
        """No source that answered has it."""
        chunks = self.state.chunks
        row = namespace.index.get(key, NONE)
        if row == NONE or chunks.shard0[row] != NONE or chunks.reason[row] != Reason.ON_REMOTE:
            return
        if not self._choices(namespace.id, key):
            chunks.reason[row] = Reason.EVICTED
            self._noted += 1

    def _fails(self, source: Source, why: str) -> None:
        source.errors += 1
        self.state.counters["remote_errors"] += 1
        if source.errors >= ERRORS_MAX or not source.is_well:
            self._trip(source, why)

    def _trip(self, source: Source, why: str) -> None:
        limits = self.state.limits
        source.trip(
            why, self.state.now, pause_ms=limits.source_pause_ms, pause_max_ms=limits.source_pause_max_ms
        )
        self.state.counters["remote_trips"] += 1

    # ------------------------------------------------------------------------------------------------------ fetches

    def fetch(self, row: int, *, demanded: bool) -> None:
        """Begin to bring what is elsewhere to DRAM; `settle` tells whoever waits how it ends."""
        state = self.state
        chunks = state.chunks
        key = chunks.key[row]
        if chunks.flags[row] & FETCHING:
            if demanded and not chunks.reserved[row]:
                self.wanted.append(Wanted(row, key, demanded=True))
                self._may_begin = True
            return
        namespace = state.namespace_of(row)
        assert chunks.shard0[row] == NONE, chunks.describe(row)
        if not self._choices(namespace.id, key):
            chunks.reason[row] = Reason.EVICTED
            state.settle(row, ready=False)
            return
        state.begin_chunk(namespace, row)
        chunks.born_at[row] = state.restored_at  # nobody here knows when it was made
        chunks.flags[row] |= FETCHING
        (self.wanted if demanded else self._ahead).append(Wanted(row, key, demanded))
        self._may_begin = True

    def pump(self) -> None:
        """After every step: begin what may begin."""
        if self._may_begin and (self.wanted or self._ahead):
            self._start()

    def _start(self) -> None:
        state = self.state
        in_flight = sum(source.bytes for source in self.by_name.values())
        batches: dict[tuple[str, NamespaceId], list[int]] = {}
        held: list[Wanted] = []
        unknown: dict[NamespaceId, list[Wanted]] = {}
        while (
            (self.wanted or self._ahead)
            and in_flight < state.limits.remote_bytes_in_flight_max
            and len(held) < HELD_MAX
        ):
            queue = self.wanted or self._ahead
            if not self.wanted and in_flight * AHEAD_SHARE >= state.limits.remote_bytes_in_flight_max:
                break
            wanted = queue.popleft()
            row = wanted.row
            if not self._still_wanted(wanted):
                continue
            if row in self._anew:
                self._anew[row].wanted.demanded |= wanted.demanded
                continue
            if state.chunks.flags[row] & DOOMED:
                self._failed(row, Reason(state.chunks.reason[row]))
                continue
            namespace = state.namespace_of(row)
            choices = self._choices(namespace.id, wanted.key)
            if not choices and self._is_to_ask_anew(row):
                self._anew[row] = LookedUpAnew(wanted, set())
                unknown.setdefault(namespace.id, []).append(wanted)
                continue
            if not choices:
                asked = row in self._forgotten and all(source.is_well for source in self.by_name.values())
                self._failed(row, Reason.EVICTED if asked else Reason.SLOW)
                continue
            source = choices[0][0]
            batch = batches.setdefault((source.name, namespace.id), [])
            room = self._has_room(source, demanded=wanted.demanded)
            if not room or source.fetches + (not batch) > FETCHES_MAX:
                held.append(wanted)
                if len(self.by_name) == 1:
                    break
                continue
            if not self._reserve(row, wanted.demanded):
                if wanted.demanded and row in state.waits and len(self._without_slot) < PARKED_MAX:
                    self._without_slot.append(wanted)
                else:
                    self._failed(row, Reason.SLOW)
                continue
            batch.append(row)
            in_flight += namespace.payload_bytes
            source.bytes += namespace.payload_bytes
            size = len(batch) * namespace.payload_bytes
            if len(batch) >= CHUNKS_PER_OP_MAX or size >= self.at_once[source.name].op_bytes:
                self._begin(source, namespace, batch)
                del batches[source.name, namespace.id]
        for (name, namespace_id), rows in batches.items():
            if rows:
                self._begin(self.by_name[name], state.namespaces[namespace_id], rows)
        self._may_begin = False
        for namespace_id, forgotten in unknown.items():
            self._look_up_anew(state.namespaces[namespace_id], forgotten)
        for wanted in reversed(held):
            (self.wanted if wanted.demanded else self._ahead).appendleft(wanted)

    def _is_to_ask_anew(self, row: int) -> bool:
        """Whether it waits for a fetch and a forget was heard since anybody was asked for it: it may have been saved
        again after that. Each forget is a reason once."""
        heard = self._forgotten.get(row)
        return heard is not None and not heard.asked_anew and not self.state.namespace_of(row).retired

    def _look_up_anew(self, namespace: Namespace, forgotten: Sequence[Wanted]) -> None:
        """Whatever was answered before, and is being answered: that may be older than the forget."""
        for wanted in forgotten:
            self._forgotten[wanted.row].asked_anew = True
        for source in self.by_name.values():
            for start in range(0, len(forgotten), LOOKUP_KEYS_MAX):
                if not source.is_well or not source.is_asked(self.state.now):
                    break
                asked = forgotten[start : start + LOOKUP_KEYS_MAX]
                op = self._look_up(source, namespace, [wanted.key for wanted in asked])
                for wanted in asked:
                    self._anew[wanted.row].ops.add(op)
        for wanted in forgotten:
            if not self._anew[wanted.row].ops:
                del self._anew[wanted.row]
                self._failed(wanted.row, Reason.SLOW)

    def _goes_on(self, row: int) -> None:
        """All sources that could be asked anew have answered, or are late."""
        wanted = self._anew.pop(row).wanted
        (self.wanted if wanted.demanded else self._ahead).append(wanted)
        self._may_begin = True

    def _patience_ms(self, source: str) -> Millis:
        limits = self.state.limits
        return min(limits.remote_deadline_ms, limits.fetch_within_ms.get(source, limits.remote_deadline_ms))

    def _has_room(self, source: Source, *, demanded: bool) -> bool:
        """Whether one more chunk may be asked for; at least one may be under way, however slow the source is."""
        return source.bytes * (1 if demanded else AHEAD_SHARE) < self.at_once[source.name].bytes

    def _still_wanted(self, wanted: Wanted) -> bool:
        chunks = self.state.chunks
        row = wanted.row
        same = chunks.key[row] == wanted.key and chunks.flags[row] & FETCHING
        return bool(same) and not chunks.reserved[row]

    def _begin(self, source: Source, namespace: Namespace, rows: list[int]) -> None:
        state = self.state
        op = state.new_op()
        keys = [state.chunks.key[row] for row in rows]
        size = len(rows) * namespace.payload_bytes
        deadline = state.now + state.limits.remote_deadline_ms
        self.fetches[op] = Fetch(source, rows, keys, size, state.now, deadline)
        source.fetches += 1
        source.rate.begin(state.now)
        wheres = tuple(self._choices(namespace.id, key)[0][1].where for key in keys)
        targets = Extents.of(state.extents(namespace, rows, range(namespace.shards)))
        state.effects.append(
            ev.FetchChunks(op, source.name, namespace.id, namespace.salt, tuple(keys), wheres, targets)
        )

    def fetched(self, event: ev.ChunksFetched) -> None:
        state = self.state
        fetch = self.fetches.pop(event.op)
        fetch.source.fetches -= 1
        under_way = fetch.source.bytes
        fetch.source.bytes -= fetch.bytes
        self._may_begin = True
        if fetch.quarantined is not None:
            for segment, slot in fetch.quarantined:
                state.free_slot(segment, slot)
            return
        came: list[int] = []
        for row, chunk in zip(fetch.rows, event.chunks, strict=True):
            self._has_come(fetch.source, row, self._if_newer(fetch.source, row, chunk, event.count), came)
        sizes = sum(state.namespace_of(row).payload_bytes for row in came)
        self.at_once[fetch.source.name].ended(state.now - fetch.began, under_way, failed=not came)
        self._end_rate(fetch, sizes)
        state.counters["remote_bytes_fetched"] += sizes
        state.arrived(came)

    def was_forgotten(self, row: int, channel: str, count: int) -> None:
        """A chunk that is FETCHING, by whoever reads this channel's forgets."""
        before = self._forgotten.get(row)
        if before is not None and before.channel != channel:
            channel, count = "", 0
        self._forgotten[row] = HeardOf(channel, max(count, before.count if before is not None else 0))

    def _if_newer(self, source: Source, row: int, chunk: ev.FetchedChunk, count: int) -> ev.FetchedChunk:
        heard = self._forgotten.get(row)
        if heard is None or (heard.channel == source.name and count >= heard.count):
            return chunk
        if heard.asked_anew and heard.channel != source.name:
            return chunk  # it was asked for after the forget was heard
        return ev.FetchedChunk(DiskResult.REUSED, why="it was forgotten on its way")

    def _end_rate(self, fetch: Fetch, came: int) -> None:
        more = any(
            other.source is fetch.source and other.quarantined is None
            for other in self.fetches.values()
            if other is not fetch
        )
        fetch.source.rate.end(came, self.state.now, more=more)

    def _has_come(self, source: Source, row: int, chunk: ev.FetchedChunk, came: list[int]) -> None:
        """What one chunk's fetch brought. Appends the row to `came` if it is a hit now."""
        state = self.state
        chunks = state.chunks
        namespace = state.namespace_of(row)
        key = chunks.key[row]
        result, why = chunk.result, chunk.why
        if result is DiskResult.OK and not self._is_described(namespace, row, chunk):
            result, why = DiskResult.CORRUPT, "it is described otherwise than it was committed"
        if result is DiskResult.OK:
            source.recovers()
            if any(self._is_barred(namespace.tenant, maker) for maker in chunk.makers):
                self._drop_targets(row)
                self._failed(row, Reason.RECALLED)
                return
            if chunks.flags[row] & DOOMED:
                self._drop_targets(row)
                self._failed(row, Reason(chunks.reason[row]))
                return
            self._arrive(namespace, row, chunk, came)
            return
        self._drop_targets(row)
        if result is DiskResult.IO_ERROR:
            self._fails(source, why)
            self._remember(namespace.id, key, source, None, state.limits.lookup_absent_ms)
            self._next_source(row, Reason.SLOW)
        elif result is DiskResult.REUSED:
            state.counters["remote_chunks_gone"] += 1
            self._remember(namespace.id, key, source, None, state.limits.lookup_absent_ms)
            self._next_source(row, Reason.EVICTED)
        else:
            state.counters["remote_chunks_refused"] += 1
            self._remember(namespace.id, key, source, None, ABSENT_AFTER_CORRUPT_MS)
            others = bool(self._choices(namespace.id, key))
            state.effects.append(ev.Quarantined(Tier.REMOTE, (), namespace.id, key, why, not others))
            self._next_source(row, Reason.CORRUPT)

    def _is_described(self, namespace: Namespace, row: int, chunk: ev.FetchedChunk) -> bool:
        """Whether a source may say this of the chunk: what it is was settled by its first commit (invariant 2)."""
        flags, tokens = self.state.chunks.flags[row], self.state.chunks.tokens[row]
        if not 1 <= chunk.token_count <= namespace.spec.chunk_tokens:
            return False
        if len(chunk.checksums) != namespace.shards:
            return False
        if not flags & COMMITTED:
            return True
        return tokens == chunk.token_count and bool(flags & DERIVED) == chunk.derived

    def _arrive(self, namespace: Namespace, row: int, chunk: ev.FetchedChunk, came: list[int]) -> None:
        state = self.state
        chunks = state.chunks
        flags = chunks.flags[row] & ~(FETCHING | DERIVED | TAIL)
        flags |= FOREIGN | (DERIVED if chunk.derived else 0)
        flags |= TAIL if chunk.token_count < namespace.spec.chunk_tokens else 0
        chunks.flags[row] = flags
        chunks.tokens[row] = chunk.token_count
        for maker in chunk.makers:
            if not is_tenant_mark(maker):
                state.add_maker(row, maker)
        self._forgotten.pop(row, None)
        for shard, checksum in enumerate(chunk.checksums):
            if state.mark_shard_ready(namespace, row, shard, checksum):
                came.append(row)
        chunks.born_at[row] = state.restored_at
        state.fetched.add(row)
        state.counters["remote_chunks_fetched"] += 1

    def _next_source(self, row: int, reason: Reason) -> None:
        """The chunk did not come from where it was thought to be."""
        state = self.state
        key = state.chunks.key[row]
        others = bool(self._choices(state.namespace_of(row).id, key))
        anew = reason is not Reason.CORRUPT and self._is_to_ask_anew(row)
        if not state.chunks.flags[row] & DOOMED and (others or anew):
            self.wanted.append(Wanted(row, key, demanded=True))
            self._may_begin = True
        else:
            self._failed(row, reason)

    def _failed(self, row: int, reason: Reason) -> None:
        """A FETCHING chunk without slots is a ghost again."""
        chunks = self.state.chunks
        chunks.flags[row] &= ~FETCHING
        self._forgotten.pop(row, None)
        if chunks.flags[row] & DOOMED:
            reason = Reason(chunks.reason[row])
        if chunks.reason[row] == Reason.ON_REMOTE:
            chunks.reason[row] = reason
        self.state.to_ghost(row, reason)

    def _drop_targets(self, row: int) -> None:
        state = self.state
        for shard in range(state.namespace_of(row).shards):
            state.free_slot(*state.unplace_shard(row, shard))

    # --------------------------------------------------------------------------------------------------------- time

    def tick(self) -> None:
        if not self.by_name:
            return
        state = self.state
        for op, lookup in list(self.lookups.items()):
            if not lookup.late and lookup.deadline <= state.now:
                lookup.late = True
                self._no_longer_asking(op, lookup)
                self._trip(lookup.source, "a look-up missed its deadline")
                self._has_answered(op)
        for number, parked in list(self.parked.items()):
            if parked.until <= state.now:
                del self.parked[number]
                state.counters["lookups_not_waited_for"] += 1
                self.resume(parked.event)
        for fetch in list(self.fetches.values()):
            if fetch.quarantined is None and fetch.deadline <= state.now:
                self._late(fetch)
        for source in self.by_name.values():
            if not source.is_well and source.is_asked(state.now):
                self._try(source)
        self.try_again()

    def try_again(self) -> None:
        """There may be DRAM now for what found none."""
        self._may_begin = True
        waiting, self._without_slot = self._without_slot, []
        self.wanted.extend(waiting)

    def _late(self, fetch: Fetch) -> None:
        """Nobody waits for it any longer; its targets stay out of use until the call has returned."""
        state = self.state
        fetch.quarantined = []
        self.at_once[fetch.source.name].is_late()
        self._end_rate(fetch, 0)
        self._trip(fetch.source, "a fetch missed its deadline")
        state.counters["remote_fetches_late"] += 1
        for row in fetch.rows:
            for shard in range(state.namespace_of(row).shards):
                segment, slot = state.unplace_shard(row, shard)
                state.quarantine_slot(segment, slot)
                fetch.quarantined.append((segment, slot))
            self._next_source(row, Reason.SLOW)

    def gauges(self) -> dict[str, float]:
        """For admins; none without a source."""
        found: dict[str, float] = {}
        for source in self.by_name.values():
            found[f"source_{source.name}_well"] = source.is_well
            found[f"source_{source.name}_bytes_per_s"] = source.rate.bytes_per_s
            found[f"source_{source.name}_bytes_at_once"] = self.at_once[source.name].bytes
            found[f"source_{source.name}_chunks_coming"] = sum(
                len(fetch.rows) for fetch in self.fetches.values() if fetch.source is source
            )
        if self.by_name:
            found["requests_waiting_for_lookups"] = len(self.parked)
        return found

    # ------------------------------------------------------------------------------------------------------ checks

    def check_integrity(self) -> None:
        """Raises AssertionError (simulator, tests)."""
        chunks = self.state.chunks
        fetching = {row for row in range(chunks.rows_ever) if chunks.flags[row] & FETCHING}
        begun = [row for fetch in self.fetches.values() if fetch.quarantined is None for row in fetch.rows]
        assert len(set(begun)) == len(begun), "a chunk is fetched twice"
        queued = {
            wanted.row
            for wanted in (*self.wanted, *self._ahead, *self._without_slot)
            if chunks.key[wanted.row] == wanted.key
        }
        assert self._anew.keys() <= fetching, "a look-up for a chunk that nobody waits for"
        asked = {op for anew in self._anew.values() for op in anew.ops}
        assert all(anew.ops for anew in self._anew.values()), "a chunk waits for a look-up that has ended"
        assert asked <= self.lookups.keys(), "a chunk waits for a look-up that is not under way"
        queued |= self._anew.keys()
        assert fetching <= queued | set(begun), "a chunk waits for a fetch that nobody begins"
        assert self._forgotten.keys() <= fetching, "a forget of what is not on its way any more"
        assert set(begun) <= fetching, "a fetch of a chunk that nobody waits for"
        for source in self.by_name.values():
            mine = [lookup for lookup in self.lookups.values() if lookup.source is source and not lookup.late]
            assert source.lookups == len(mine), source
            fetches = [fetch for fetch in self.fetches.values() if fetch.source is source]
            assert source.fetches == len(fetches), source
            assert source.bytes == sum(fetch.bytes for fetch in fetches), source
