"""What the core asks of a tier below DRAM: SSD (`ssd/slab_tier.py`), and whatever comes next.

    place    room for the shards of a chunk                    at once
    write    DRAM slots -> that room                           an effect; its event brings a result a shard
    read     that room -> RESERVED slots of DRAM               likewise
    drop     the copy is nobody's any more                     at once
    health   OK, READ_ONLY or OFF; `degrade`, probes, `heal`
    tick     the tier's own deadlines and retries

`Transfers` says what is written and read, and when: it bounds each op in chunks and bytes, pins the sources, reserves
the targets, keeps the deadlines and moves the flags of chunks (STORED, STORING, PROMOTING). `State` says what is
dropped. A tier knows places and bytes, and nothing of leases, sessions or jobs.

A tier is a subclass in a file of its own, a line in `store.TIERS`, and somebody at the edge who performs its effects.
What is not abstract here is right for a tier that forgets everything when the daemon ends.
"""

# ruff: noqa: B027 (hooks that do nothing unless a tier has something to do)
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from kvstore.core import events as ev
from kvstore.core.namespaces import Namespace
from kvstore.errors import Unavailable
from kvstore.types import ChunkKey, DiskResult, DiskState, Millis, NamespaceId, OpId, SlabId

TOO_FULL = "the SSD is too full for all of it at once"
"""Why whoever waits for chunks until they are durable waits no longer."""

if TYPE_CHECKING:
    from kvstore.core.manifests import Session
    from kvstore.core.ssd.quarantine import Entry
    from kvstore.core.state import State


@dataclass(slots=True)
class Restored:
    """What a restart brought back."""

    chunks: int = 0
    chunks_dropped: int = 0
    """Their slab is gone, or the slot is another's: the index promised too much."""
    chunks_barred: int = 0
    """Their maker was recalled or quarantined, and they were still to go."""
    sessions: int = 0
    slabs_dropped: list[SlabId] = field(default_factory=list)
    next_namespace: int = 1
    """Above every number that anything in the index has."""


class ColdTier(ABC):
    """One instance for each start of the daemon. No method blocks; each looks at a bounded number of chunks, or at
    those that it is given. Methods raise nothing that a caller has to expect."""

    persistent: ClassVar[bool] = False
    """Whether chunks and sessions survive a restart. If so, `State` notes what changed (`dirty_chunks`,
    `deleted_chunks`, `dirty_sessions`, ...) and the tier writes it down; if not, nothing is noted."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.probe_at: Millis = 0
        """When a tier that is not well may be probed next."""
        self._next_generation = 1

    # ------------------------------------------------------------------------------------------------------- places

    @property
    @abstractmethod
    def bytes_max(self) -> int:
        """How much the tier may hold."""

    @abstractmethod
    def fits(self, namespace: Namespace) -> bool:
        """Whether it can ever hold chunks of this namespace; those of others stay in DRAM alone."""

    @abstractmethod
    def place(self, row: int) -> bool:
        """Room for all shards of a resident chunk that has none, or for none. It may evict copies of other chunks
        (`State.evict_copy`). False: none now; nothing can make room if `state.disk_full` is set, which the next tick
        takes back."""

    @abstractmethod
    def drop(self, row: int, *, corrupt: bool) -> None:
        """The copy of a STORED chunk goes, and its room is free at once, or out of service if its bytes are `corrupt`.
        Nobody reads it: a chunk that is PROMOTING is not dropped before its read has ended, or is late."""

    @abstractmethod
    def places(self, row: int) -> Sequence[tuple[int, int]]:
        """Where the shards of a STORED chunk are, as people are told it: (file or object, part of it)."""

    def generation_of(self, row: int) -> int:
        """Of the copy of a STORED or STORING chunk: no other copy ever has the same."""
        chunks = self.state.chunks
        return chunks.disk_generation[chunks.shard0[row]]

    def new_generation(self) -> int:
        self._next_generation += 1
        return self._next_generation

    @property
    def newest_generation(self) -> int:
        """That any copy has."""
        return self._next_generation

    def begin_generations(self, boot_count: int) -> None:
        """Above whatever any earlier start of the daemon wrote."""
        self._next_generation = boot_count << 32

    # ----------------------------------------------------------------------------------------------------- transfers

    @abstractmethod
    def write(self, op: OpId, rows: Sequence[int]) -> None:
        """The effect that writes these chunks, which have room and are pinned. It ends with a `DiskDone` that has a
        result for each shard, row by row, once nothing touches the sources any more, however late."""

    @abstractmethod
    def stored(self, row: int) -> None:
        """All shards are written: the copy counts from now on."""

    @abstractmethod
    def not_stored(self, row: int, results: Sequence[DiskResult]) -> None:
        """Some shard is not written: the room of all of them is free again."""

    @abstractmethod
    def read(self, op: OpId, rows: Sequence[int]) -> None:
        """The effect that reads these chunks into their RESERVED slots and holds them against their checksums. It ends
        like that of `write`, once nothing writes to the targets any more. Results: CORRUPT where the bytes are not
        those that were committed, REUSED where the copy is there no more and nothing is wrong with the tier."""

    def is_lost(self, row: int, results: Sequence[DiskResult]) -> bool:
        """After a read that failed: whether the tier knows that no later one can succeed, though it is well."""
        return False

    def reads_recover(self) -> None:
        """A read succeeded."""

    def reads_fail(self) -> None:
        """So many failed in a row that the tier is about to be OFF."""

    @abstractmethod
    def scrub(self, op: OpId, rows: Sequence[int], bytes_per_s: int) -> None:
        """The effect that reads these STORED chunks no faster than that and holds them against their checksums; the
        bytes land nowhere. It ends like that of `read`."""

    # -------------------------------------------------------------------------------------------------------- health

    @property
    def health(self) -> DiskState:
        """OK; READ_ONLY: nothing is written; OFF: nor read, and what is here only is a miss (SLOW); ABSENT: no tier."""
        return self.state.disk_state

    def degrade(self, to: DiskState, why: str) -> None:
        """Never to a better state; `why` is what an operator reads. A probe is due after `probe_interval_ms`."""
        state = self.state
        if state.disk_state < to:
            state.disk_state = to
            state.disk_why = why
            state.room += 1
            state.counters[f"ssd_degraded_{to.name.lower()}"] += 1
            self.probe_at = state.now + state.limits.probe_interval_ms
            self.degraded(why)

    def troubled(self, why: str) -> None:
        """The edge says that what is written now may not last: nothing new is, until a probe finds that it would."""
        if self.health is not DiskState.ABSENT:
            self.degrade(DiskState.READ_ONLY, why)
            self.state.disk_why = why  # it lasts, whatever else was wrong before

    def heal(self) -> None:
        """A probe succeeded."""
        state = self.state
        state.disk_state = DiskState.OK
        state.disk_why = ""
        state.counters["ssd_healed"] += 1
        state.disk_full = False
        state.room += 1
        self.healed()

    @abstractmethod
    def probe(self, op: OpId) -> None:
        """The effect that finds out whether the tier can be written and read; ends with a `DiskDone` of one result."""

    def degraded(self, why: str) -> None:
        """It was just degraded."""

    def healed(self) -> None:
        """It is OK again."""

    def tick(self) -> bool:
        """Every tick. True: something of the tier's own is late, so that a probe would tell nothing."""
        return False

    def pump(self) -> None:
        """After every step while the tier is OK, before writes begin."""

    def persist(self) -> None:
        """After every step, whatever the health: begin to write down what changed, or is to go."""

    def make_room(self, end_session: Callable[[Session], None]) -> None:
        """After every step, first of all: what is written down about chunks and sessions may need room."""

    @property
    def going(self) -> bool:
        """Whether `pump` would be called and do something: a step for its own sake (`Idle`) is worth it. The daemon
        takes such steps until this is False, hence it is False while the tier is not OK."""
        return False

    def facts(self) -> Mapping[type, Callable[[Any], None]]:
        """Events of this tier's own, beside `DiskDone`, and who handles them."""
        return {}

    def ended(self, event: ev.DiskDone) -> None:
        """An op ended that is neither a transfer nor a probe, so it is the tier's own."""
        raise AssertionError(f"op {event.op} is not under way")

    def stats(self) -> dict[str, Any]:
        """Numbers of its own for operators, beside those of all tiers (`core/stats.py`)."""
        return {}

    # ---------------------------------------------------------------------------------------------------- durability

    def restore(self, snapshot: Any) -> Restored:
        """Before the first event: put what the edge has read at the start (`snapshot`, of the tier's own kind) into
        `State`."""
        return Restored()

    def await_durable(
        self,
        ticket: ev.Ticket,
        namespace: Namespace,
        keys: Sequence[ChunkKey],
        answer: ev.Committed | ev.Saved,
    ) -> None:
        """Reply `answer` once these chunks survive a restart, within a bounded time, or `Unavailable` or
        `DeadlineExceeded` with the reason why they do not."""
        self.state.reply(
            ticket,
            Unavailable(
                "committed and visible, but not durable: the tier below DRAM keeps nothing over a restart",
                field="wait",
                remedy="commit with wait VISIBLE",
            ),
        )

    def refused(self, namespace: Namespace, key: ChunkKey, why: str) -> None:
        """A resident chunk is not going to be written now: whoever waits until it is durable is told why."""

    def await_gone(self, ticket: ev.Ticket | None, count: int) -> ev.Done | None:
        """The answer of a Forget of `count`: now, if no restart can bring back what was dropped until now; else None,
        and `ticket` gets it later, within a bounded time."""
        return ev.Done(count)

    def is_gone(self, since: Millis) -> bool:
        """Whether no restart can bring back what was dropped until then."""
        return True

    def why_not_gone(self, since: Millis, deadline: Millis) -> str:
        """Why whoever waits since then for that waits no longer; empty: he does."""
        return ""

    def tell_gone(self) -> None:
        """After every step, last of all: reply to whoever waits for what is to go."""

    def hurry(self, change: int) -> None:
        """So many more (fewer, if negative) wait for everything to be durable."""

    @property
    def behind(self) -> bool:
        """Whether a restart now would forget what a tier that is well is about to remember."""
        return False

    @property
    def forgetting(self) -> bool:
        """Whether a restart now could bring back what was dropped."""
        return False

    def opened(self, namespace: Namespace) -> None:
        """There is a new namespace; it may hold chunks from now on."""

    def closed(self, namespace: NamespaceId) -> None:
        """It holds nothing any more, and is gone."""

    # ---------------------------------------------------------------------------------------------------- quarantine

    def may_rewrite(self, entry: Entry) -> bool:
        """Whether nothing that a restart reads names this slot, which was dropped as corrupt."""
        raise AssertionError(f"this tier takes no slot out of service: {entry}")

    def rewrite(self, op: OpId, entries: Sequence[Entry]) -> None:
        """The effect that writes these slots and reads them back; ends with a `DiskDone` of a result each."""
        raise AssertionError(f"this tier takes no slot out of service: {entries}")

    # --------------------------------------------------------------------------------------------------------- checks

    @abstractmethod
    def check_row(self, row: int) -> None:
        """Raises AssertionError if the tier's books of a STORED or STORING chunk are wrong (simulator, tests)."""
