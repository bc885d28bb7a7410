"""What is forgotten on one node is forgotten on all: telling the others, and heeding what they tell.

    here       doomed, noted -> ForgetChunks to each channel -> ChunksForgotten -> the answer of the Forget or Recall
    elsewhere  ForgottenElsewhere -> what this node has of it is a miss, whoever made it

A *channel* is a place where nodes leave tombstones for each other (`tiers/remote/tombstones.py`): the REMOTE store, the
registry of the fleet. It counts its forgets; `State.applied` is the count up to which this node has dropped everything.
What this node writes to the REMOTE store, or gives to a peer, says that count, and a reader refuses what was forgotten
at a higher one. So what was forgotten cannot come back through a node that has not heard of it yet.

What came from other nodes is served only while this node hears of forgets: if it could read no channel for
`forget_within_ms`, all that came from others goes. What its own workers made stays, and goes when it hears.

The answer to a Forget or Recall waits until each channel knows, `HOLD_MS` at most, and says so if one does not. What a
channel could not take is noted at the edge, which tells it when it is back: ChunksForgotten comes once with the reason
why not, and once more when it was told.

The edge keeps a journal of what was forgotten, here and elsewhere, each at a *position*. A start heeds what stands
behind the position that the index has (`State.heeded`), so that what was saved since stays. A position goes into the
index when nothing of what stands before it is left to do: it was dropped, has left the index, and the edge has removed
what it keeps (`purging`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

import numpy as np

from kvstore.core import events as ev
from kvstore.core.chunks import DOOMED, FETCHING, FOREIGN, NONE
from kvstore.core.namespaces import Namespace
from kvstore.core.remote.saves import RemoteSaves
from kvstore.core.remote.sources import Sources
from kvstore.core.state import State
from kvstore.errors import Unavailable
from kvstore.types import ChunkKey, DiskState, Millis, NamespaceId, OpId, Reason

FORGOTTEN_PER_OP_MAX = 1_024
FORGETS_MAX = 64
"""Under way at one channel; the rest waits here."""
HOLD_MS = 2_000
"""How long an answer waits for the channels to know what was forgotten."""
KEYS_PER_STEP_MAX = 4_096
"""Of what others have forgotten; the rest comes when nothing waits, or with the next tick."""
ROWS_LOOKED_AT_MS = 1_000
"""Between two searches for chunks of other nodes, while none may be served."""
EVERYTHING = (b"", ChunkKey(b""), b"")
"""A channel lost count of what this node has missed."""


@dataclass(slots=True)
class Channel:
    """One place where forgets are told, and read."""

    name: str
    untold: deque[tuple[bytes, ChunkKey, bytes] | None] = field(default_factory=deque)
    """None: of a namespace that is gone, of which nobody is told."""
    under_way: dict[OpId, range] = field(default_factory=dict)
    """Which forgets each op tells of, counted since the start; in the order in which they were noted."""
    postponed: dict[OpId, range] = field(default_factory=dict)
    """Likewise, what the channel could not take, until it has."""
    noted: int = 0
    trouble: str = ""
    """Why it could not take what it was told last; empty: it took it."""
    journaled: int = 0
    """Forgets that it did not know when it was read last, those of before the start among them."""
    heard: Millis | None = None
    """When it was read last."""

    @property
    def what(self) -> str:
        return "the REMOTE store" if self.name == "remote" else "the other nodes"

    @property
    def answered(self) -> int:
        """Up to which forget each was told, or could not be."""
        return min((each.start for each in self.under_way.values()), default=self.noted - len(self.untold))

    @property
    def told(self) -> int:
        """Up to which forget the channel knows all."""
        return min((each.start for each in self.postponed.values()), default=self.answered)

    @property
    def waiting(self) -> int:
        """Forgets that it does not know."""
        ops = (*self.under_way.values(), *self.postponed.values())
        return max(self.journaled, len(self.untold) + sum(map(len, ops)))


@dataclass(slots=True)
class Held:
    """An answer that waits until the channels know what was forgotten before it."""

    ticket: ev.Ticket
    answer: object
    numbers: dict[str, int]
    until: Millis


@dataclass(slots=True)
class Learned:
    channel: Channel
    keys: deque[tuple[bytes, ChunkKey, bytes]]
    count: int
    heeded: ev.Heeded | None
    rows: deque[tuple[int, ChunkKey]] = field(default_factory=deque)
    """Of a namespace that was forgotten as a whole."""


class Forgets:
    def __init__(self, state: State, sources: Sources, saves: RemoteSaves) -> None:
        self.state = state
        self._sources = sources
        self._saves = saves
        self.channels = {name: Channel(name) for name in state.limits.forgets_told}
        self.held: deque[Held] = deque()
        self._learned: deque[Learned] = deque()
        self.makers: deque[tuple[bytes, bytes]] = deque()
        """(mark of the tenant or empty, maker) that were recalled or quarantined elsewhere; the store hands them on."""
        self._searched_at: Millis | None = None
        self._counts: dict[str, int] = {}
        """By channel: up to which count all was heeded or handed on."""
        self._reached: dict[str, ev.Heeded] = {}
        """Likewise, how far the journal."""
        self._leaving: dict[str, deque[tuple[Millis, ev.Heeded]]] = {name: deque() for name in self.channels}
        """How far the journal was carried out here, and when; it may not have left the index. Two at most: the older
        one is waited for, and is not put off by what comes meanwhile."""
        self.purging: set[OpId] = set()
        """What is asked of the edge for tenants that are purged, and not done."""
        self.purge_sessions: Callable[[str, Set[NamespaceId]], OpId | None] = lambda tenant, numbers: None
        self.recalling: Callable[[], bool] = lambda: False
        """Whether a recall or purge still looks for what it is to drop. Both set by the store."""

    def __repr__(self) -> str:
        return f"Forgets({list(self.channels)}, {len(self.held)} answers held, {len(self._learned)} to heed)"

    @property
    def active(self) -> bool:
        return bool(self.channels)

    # ------------------------------------------------------------------------------------------------------ telling

    def pump(self) -> None:
        """After every step."""
        if not self.channels:
            return
        if self.state.forgotten:
            gone, self.state.forgotten = self.state.forgotten, []
            self._forget(gone)
        if self._counts:
            self._apply()
        if any(self._leaving.values()):
            self._note_heeded()
        for channel in self.channels.values():
            while channel.untold and len(channel.under_way) < FORGETS_MAX:
                self._tell(channel)
        if self.held:
            self._release()

    def _forget(self, gone: Iterable[tuple[NamespaceId, ChunkKey]]) -> None:
        for namespace_id, key in gone:
            if self._is_of_one_node(namespace_id):
                continue
            namespace = self.state.namespaces.get(namespace_id)
            self._is_gone((namespace_id, key))
            if namespace is not None:
                self._note(namespace.salt, key, b"")
            else:
                self._note_for_all(None)

    def _is_of_one_node(self, namespace_id: NamespaceId) -> bool:
        """What the doctor saves is nowhere else, and during an outage of the REMOTE store its forgets would wait among
        those that somebody needs."""
        namespace = self.state.namespaces.get(namespace_id)
        return namespace is not None and namespace.spec.is_of_one_node

    def _is_gone(self, name: tuple[NamespaceId, ChunkKey]) -> None:
        self._saves.was_forgotten(name)
        for source in self._sources.by_name:
            self._sources.is_gone(name, source)

    def purge(self, tenant: str, namespaces: Mapping[NamespaceId, Namespace]) -> None:
        """What this node put elsewhere for this tenant, in these namespaces, goes."""
        self._saves.purge(namespaces)

    def purge_beyond(self, mark: bytes) -> None:
        """What the edge keeps for this tenant (`keys.tenant_mark`) goes."""
        op = self.state.new_op()
        self.purging.add(op)
        self.state.effects.append(ev.TenantPurged(op, mark))

    def purge_told(self, tenant: str, numbers: Set[NamespaceId]) -> None:
        """What was told of its sessions goes."""
        op = self.purge_sessions(tenant, numbers)
        if op is not None:
            self.purging.add(op)

    def purged_beyond(self, op: OpId) -> None:
        self.purging.discard(op)

    def purge_row(self, row: int) -> None:
        """It goes with all of its tenant, of which the others are told as a whole."""
        state = self.state
        noted = len(state.forgotten)
        self._saves.purge_row(row)
        self._is_gone((NamespaceId(state.chunks.namespace[row]), state.chunks.key[row]))
        state.doom(row, Reason.FORGOTTEN)
        del state.forgotten[noted:]

    def forget_keys(self, namespace: Namespace, keys: Iterable[ChunkKey]) -> None:
        """Those that this node knows nothing of (`State.doom` notes the others): another node may have them."""
        if self.channels:
            self._forget((namespace.id, key) for key in dict.fromkeys(keys) if key not in namespace.index)

    def forget_namespace(self, namespace: Namespace) -> None:
        """All of it, whoever has it."""
        if self.channels:
            self._note(namespace.salt, ChunkKey(b""), b"")

    def forget_maker(self, maker: bytes, mark: bytes = b"") -> None:
        """What it made, for the tenant with that mark if there is one."""
        if self.channels:
            self._note(b"", ChunkKey(mark), maker)

    def _note(self, digest: bytes, key: ChunkKey, maker: bytes) -> None:
        self._note_for_all((digest, key, maker))

    def _note_for_all(self, forgotten: tuple[bytes, ChunkKey, bytes] | None) -> None:
        for channel in self.channels.values():
            channel.untold.append(forgotten)
            channel.noted += 1

    def _tell(self, channel: Channel) -> None:
        first = channel.noted - len(channel.untold)
        count = min(len(channel.untold), FORGOTTEN_PER_OP_MAX)
        taken = (channel.untold.popleft() for _ in range(count))
        told = tuple(each for each in taken if each is not None)
        if told:
            op = self.state.new_op()
            channel.under_way[op] = range(first, first + count)
            self.state.effects.append(ev.ForgetChunks(op, channel.name, told))

    def forgotten(self, event: ev.ChunksForgotten) -> None:
        channel = next(
            each
            for each in self.channels.values()
            if event.op in each.under_way or event.op in each.postponed
        )
        channel.trouble = event.why
        numbers = channel.under_way.pop(event.op, None)
        if numbers is None:
            del channel.postponed[event.op]  # told at last
            return
        self.state.counters["remote_forgets"] += 1
        if event.why:
            channel.postponed[event.op] = numbers
            self.state.counters["remote_forgets_postponed"] += 1

    def hold(self, ticket: ev.Ticket, answer: object) -> bool:
        """True: this answer waits until the channels know what was forgotten until now."""
        coming = sum(not self._is_of_one_node(number) for number, _ in self.state.forgotten)
        numbers = {name: channel.noted + coming for name, channel in self.channels.items()}
        if all(self.channels[name].told >= number for name, number in numbers.items()):
            return False
        self.held.append(Held(ticket, answer, numbers, self.state.now + HOLD_MS))
        return True

    def _release(self) -> None:
        state = self.state
        while self.held:
            held = self.held[0]
            numbers = [(self.channels[name], number) for name, number in held.numbers.items()]
            if held.until > state.now and any(number > channel.answered for channel, number in numbers):
                return
            self.held.popleft()
            behind = [channel for channel, number in numbers if number > channel.told]
            answer = self._not_durable(held.answer, behind[0]) if behind else held.answer
            state.release(held.ticket, answer)

    @staticmethod
    def _not_durable(answer: object, channel: Channel) -> object:
        why = channel.trouble or "it did not answer in time"
        trouble = f"{channel.what} does not know it yet ({why}); it is told when it is back"
        if channel.name != "remote":
            trouble = f"{channel.what} do not know it yet ({why}); they are told when the registry is back"
        match answer:
            case ev.Done():
                return replace(answer, not_durable=answer.not_durable or trouble)
            case ev.Purged():
                return Unavailable(
                    f"{answer.chunks} chunks are misses here now, but {trouble}",
                    field="purge",
                    remedy=f"ask again when {channel.what} can be reached",
                )
            case ev.Recalled():
                return Unavailable(
                    f"{answer.chunks} chunks are misses now, but {trouble}",
                    field="recall",
                    remedy=f"ask again when {channel.what} can be reached",
                )
        return answer

    # ------------------------------------------------------------------------------------------------------- heeding

    def elsewhere(self, event: ev.ForgottenElsewhere) -> None:
        """A channel was read, and this is new; or nothing is."""
        channel = self.channels[event.source]
        channel.heard = max(channel.heard or 0, self.state.now - event.age_ms)
        channel.journaled = event.untold
        if not event.forgotten and not self._learned:
            self._applied(channel, event.count, event.heeded)
            return
        self._learned.append(Learned(channel, deque(event.forgotten), event.count, event.heeded))
        self.go_on()

    @property
    def going(self) -> bool:
        return bool(self._learned)

    def go_on(self) -> None:
        """One step more of what others have forgotten, in the order in which it was read."""
        left = KEYS_PER_STEP_MAX
        by_digest = {each.salt: each for each in self.state.namespaces.values()} if self._learned else {}
        while self._learned and left > 0:
            learned = self._learned[0]
            while learned.rows and left > 0:
                left -= 1
                self._drop(learned, *learned.rows.popleft())
            while learned.keys and not learned.rows and left > 0:
                left -= 1
                self._heed(learned, learned.keys.popleft(), by_digest)
            if not learned.keys and not learned.rows:
                self._learned.popleft()
                self._applied(learned.channel, learned.count, learned.heeded)

    def _applied(self, channel: Channel, count: int, heeded: ev.Heeded | None) -> None:
        self._counts[channel.name] = max(count, self._counts.get(channel.name, 0))
        if heeded is not None:
            self._reached[channel.name] = heeded
        self._apply()

    def _apply(self) -> None:
        """What a recall or purge has yet to drop would be written elsewhere as newer than it."""
        if self.makers or self.recalling():
            return
        for name, count in self._counts.items():
            self.state.applied[name] = max(count, self.state.applied.get(name, 0))
        self._counts.clear()
        if self.state.cold_tier.persistent and self.state.disk_state is not DiskState.ABSENT:
            for name, heeded in self._reached.items():
                self._wait_until_gone(name, heeded)
        self._reached.clear()

    def _wait_until_gone(self, name: str, heeded: ev.Heeded) -> None:
        leaving = self._leaving[name]
        newest = leaving[-1][1] if leaving else self.state.heeded.get(name)
        if newest == heeded:
            return
        if len(leaving) > 1:
            leaving.pop()
        leaving.append((self.state.now, heeded))

    def _note_heeded(self) -> None:
        """What has left the index need not be heeded by the next start."""
        state = self.state
        if self.purging:
            return
        for name, leaving in self._leaving.items():
            while leaving and state.cold_tier.is_gone(leaving[0][0]):
                state.heeded[name] = leaving.popleft()[1]
                state.dirty_heeded.setdefault(name, state.now)

    def _heed(
        self,
        learned: Learned,
        forgotten: tuple[bytes, ChunkKey, bytes],
        by_digest: Mapping[bytes, Namespace],
    ) -> None:
        digest, key, maker = forgotten
        self.state.counters["forgets_from_elsewhere"] += 1
        if forgotten == EVERYTHING:
            for namespace in by_digest.values():
                learned.rows.extend((row, key) for key, row in namespace.index.items())
            return
        if maker:
            self.makers.append((key, maker))
            return
        found = by_digest.get(digest)
        if found is None:
            return
        if not key:
            learned.rows.extend((row, key) for key, row in found.index.items())
            return
        self._is_gone((found.id, key))
        row = found.index.get(key, NONE)
        if row != NONE:
            self._drop(learned, row, key)

    def _drop(self, learned: Learned, row: int, key: ChunkKey) -> None:
        """A miss from now on, which nobody has to be told of."""
        state = self.state
        if state.chunks.key[row] != key:
            return
        if state.chunks.flags[row] & FETCHING:
            self._sources.was_forgotten(row, learned.channel.name, learned.count)
            return
        noted = len(state.forgotten)
        self._is_gone((NamespaceId(state.chunks.namespace[row]), key))
        if state.doom(row, Reason.FORGOTTEN):
            state.counters["chunks_forgotten_elsewhere"] += 1
        del state.forgotten[noted:]

    def expire(self) -> None:
        """Before every step: what came from others is served only while this node hears of forgets."""
        within = self.state.limits.forget_within_ms
        if not self.channels or not within:
            return
        now = self.state.now
        heard = None
        for channel in self.channels.values():
            if channel.heard is None:
                channel.heard = now  # this node has just begun
            heard = channel.heard if heard is None else max(heard, channel.heard)
        if heard is None or now - heard < within:
            self._searched_at = None
            return
        if self._searched_at is not None and now - self._searched_at < ROWS_LOOKED_AT_MS:
            return
        self._searched_at = now
        chunks = self.state.chunks
        view = chunks.views
        used = slice(0, chunks.rows_ever)
        foreign = (view.flags[used] & FOREIGN != 0) & (view.flags[used] & DOOMED == 0)
        dropped = 0
        for row in np.flatnonzero(foreign & (view.shard0[used] != NONE)).tolist():
            if chunks.flags[row] & FOREIGN and chunks.shard0[row] != NONE:
                dropped += self.state.doom(row, Reason.EXPIRED)
        self.state.counters["chunks_of_others_expired"] += dropped

    # -------------------------------------------------------------------------------------------------------- shown

    def gauges(self) -> dict[str, float]:
        """For admins; none without a channel."""
        if not self.channels:
            return {}
        now = self.state.now
        told = {
            f"{name}_forgets_read_ms_ago": float(now - channel.heard if channel.heard is not None else -1)
            for name, channel in self.channels.items()
        }
        waiting = sum(channel.waiting for channel in self.channels.values())
        return {"remote_forgets_waiting": float(waiting), **told}

    @property
    def behind(self) -> bool:
        """Whether something of this node is on its way to the others that is about to be taken, or is to be dropped."""
        told = any(channel.under_way or channel.untold for channel in self.channels.values())
        return bool(told or self.held or self._learned)
