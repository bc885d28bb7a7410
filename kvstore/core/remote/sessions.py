"""Sessions that go on at another node: what each node tells the others of its manifests, and what it hears.

    UpdateSession ─▶ changed ─▶ ShareSessions ─▶ SessionsShared: it is told, or another node told a newer one
    a hint, or Route, for it ─▶ LookUpSessions ─▶ SessionsLookedUp ─▶ its keys, looked up and brought (`ahead.py`)

Told are exact manifests: their keys name the same chunks on every node. What was cut or edited is this node's own,
and what was told of such a session before is replaced by nothing. A manifest that another node told is a hint: it says
which keys to look for, never that a chunk is there, and becomes no session here.

Every manifest that is told replaces the one that its writer had seen (node, boot and version of it), or it is refused:
whoever slept, or began anew, and does not know what was told meanwhile, learns it and changes nothing. It may try again
only where nothing is lost by that: if its own manifest goes on where the other one ends, if it had told that itself and
did not hear of it, or if it has forgotten the session, which then is gone for all. What its workers do after it has
learnt is newer, and replaces what it has learnt. `count` grows with each; a store that has a lower one than this node
has seen is an older copy of itself.

No request waits for any of it, but one that asks for it (`GetSession.elsewhere`), `lookup_wait_ms` at most.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

from kvstore.core import events as ev
from kvstore.core.manifests import Session
from kvstore.core.namespaces import Namespace
from kvstore.core.remote.sources import ERRORS_MAX, Source
from kvstore.core.state import SessionName, State
from kvstore.keys import tenant_mark
from kvstore.types import ChunkKey, Millis, NamespaceId, OpId

TELL_MS = 100
"""So often what changed is told: what changes more often is told once."""
SESSIONS_PER_OP_MAX = 16
OPS_MAX = 4
"""Under way, of each kind."""
CHANGED_MAX = 65_536
"""Sessions that wait to be told; the oldest are passed over, until they change again."""
KEYS_MAX = 2_048
"""Of a manifest: the beginning of a longer one is told."""
KNOWN_MAX = 16_384
KNOWN_KEYS_MAX = 1 << 20
"""What other nodes told and this one remembers; the oldest goes."""
FRESH_MS = 2_000
"""So long what was looked up counts."""
WANTED_MAX = 4_096
"""Sessions that wait to be looked up; beyond, they are unknown."""
WAITING_MAX = 1_024
"""Requests that wait for that."""
DEADLINE_MS = 3_000
"""Of a ShareSessions; nobody waits for it."""


@dataclass(slots=True)
class Known:
    """What this node knows of one name."""

    there: ev.SharedManifest | None
    """What is told of it; None: nothing is."""
    at: Millis
    """When that was so."""


class Kind(enum.Enum):
    """Why a session is told."""

    CHANGED = 0
    FORGOTTEN = 1
    """Here: that holds for what others know of it, too."""
    SURPLUS = 2
    """It was told longest ago of too many."""


@dataclass(slots=True)
class Telling:
    names: dict[SessionName, Kind]
    deadline: Millis
    late: bool = False


@dataclass(slots=True)
class Asking:
    names: tuple[SessionName, ...]
    deadline: Millis
    waiting: list[tuple[ev.GetSession, Millis]] = field(default_factory=list)
    late: bool = False


class SharedSessions:
    def __init__(self, state: State) -> None:
        self.state = state
        self.name = state.limits.sessions_told
        """Of the source that is told, and asked; empty: sessions are this node's own."""
        self._source = Source("sessions")
        self.changed: OrderedDict[SessionName, bool] = OrderedDict()
        """Those to be told, the longest waiting first; True: it was forgotten here."""
        self.known: OrderedDict[SessionName, Known] = OrderedDict()
        self._known_keys = 0
        self.told: OrderedDict[SessionName, None] = OrderedDict()
        """Of which this node's own manifest is what is told, as far as it knows."""
        self._surplus: list[SessionName] = []
        self.telling: dict[OpId, Telling] = {}
        self._wanted: OrderedDict[SessionName, list[tuple[ev.GetSession, Millis]]] = OrderedDict()
        self.asking: dict[OpId, Asking] = {}
        self._next: Millis = 0
        self.answer: Callable[[ev.GetSession], None] = lambda event: None
        """Answers a request that waited; set by the store."""

    def __repr__(self) -> str:
        return f"SharedSessions({len(self.changed)} to tell, {len(self.known)} known, {self._source})"

    @property
    def active(self) -> bool:
        return bool(self.name)

    # ------------------------------------------------------------------------------------------------------ telling

    def pump(self) -> None:
        """After every step."""
        state = self.state
        if not self.name:
            return
        if state.changed_sessions:
            for name, forgotten in state.changed_sessions.items():
                self.changed[name] = forgotten or self.changed.pop(name, False)
            state.changed_sessions = {}
            while len(self.changed) > CHANGED_MAX:
                self.changed.popitem(last=False)
                state.counters["sessions_passed_over"] += 1
        if self._wanted:
            self._ask()
        if (self.changed or self._surplus) and state.now >= self._next:
            self._next = state.now + TELL_MS
            self._tell()

    def _tell(self) -> None:
        state = self.state
        left = max(1, state.limits.sessions_told_per_s * TELL_MS // 1_000)
        under_way = {name for telling in self.telling.values() for name in telling.names}
        while left > 0 and len(self.telling) < OPS_MAX and self._source.is_asked(state.now):
            names: dict[SessionName, Kind] = {}
            sessions: list[ev.SessionTold] = []
            for name in list(self.changed):
                if len(names) >= min(left, SESSIONS_PER_OP_MAX):
                    break
                if name in under_way:
                    continue
                forgotten = self.changed.pop(name)
                told = self._told(name, forgotten)
                if told is not None:
                    names[name] = Kind.FORGOTTEN if forgotten else Kind.CHANGED
                    sessions.append(told)
            while self._surplus and len(names) < min(left, SESSIONS_PER_OP_MAX):
                name = self._surplus.pop()
                told = self._ended(name) if name not in under_way and name not in names else None
                if told is not None:
                    names[name] = Kind.SURPLUS
                    sessions.append(told)
            if not names:
                return
            left -= len(names)
            under_way.update(names)
            op = state.new_op()
            self.telling[op] = Telling(names, state.now + DEADLINE_MS)
            self._source.lookups += 1
            state.counters["sessions_told"] += len(names)
            state.effects.append(ev.ShareSessions(op, self.name, tuple(sessions)))
            if not self._source.is_well:
                return

    def _told(self, name: SessionName, forgotten: bool) -> ev.SessionTold | None:
        """None: there is nothing to be said of it."""
        namespace = self.state.namespaces.get(name[0])
        if namespace is None or namespace.retired:
            return None
        session = self.state.sessions.by_name.get(name)
        known = self.known.get(name)
        there = known.there if known is not None else None
        if session is None and not forgotten:
            return None  # it was dropped to make room, and may go on elsewhere
        keys, tokens = self._manifest(session) if session is not None else ((), ())
        if not keys and not forgotten and (there is None or not there.keys):
            return None
        return ev.SessionTold(
            namespace.salt,
            tenant_mark(namespace.tenant),
            name[1],
            session.version if session is not None else 0,
            keys,
            tokens,
            seen=there.head if there is not None else b"",
            seen_count=there.count if there is not None else 0,
        )

    def _ended(self, name: SessionName) -> ev.SessionTold | None:
        """What was told of it goes, if it still is this node's."""
        namespace, known = self.state.namespaces.get(name[0]), self.known.get(name)
        if namespace is None or known is None or known.there is None or name in self.changed:
            return None
        there = known.there
        mark = tenant_mark(namespace.tenant)
        return ev.SessionTold(
            namespace.salt, mark, name[1], 0, (), (), seen=there.head, seen_count=there.count, ends=True
        )

    def _manifest(self, session: Session) -> tuple[tuple[ChunkKey, ...], tuple[int, ...]]:
        """What may be told of it; nothing of one that is this node's own."""
        manifest = session.manifest
        if not manifest.exact:
            return (), ()
        rows = manifest.rows[:KEYS_MAX]
        return tuple(map(self.state.chunks.key.__getitem__, rows)), tuple(manifest.count[:KEYS_MAX])

    def shared(self, event: ev.SessionsShared) -> None:
        """A ShareSessions has ended."""
        telling = self.telling.pop(event.op)
        if not telling.late:
            self._source.lookups -= 1
        if event.failed:
            self._fails(event.failed)
            for name, kind in telling.names.items():
                if kind is not Kind.SURPLUS:  # whether it was told or not, it is told again
                    self.changed[name] = self.changed.pop(name, False) or kind is Kind.FORGOTTEN
            return
        if not telling.late:
            self._source.recovers()
        for (name, kind), told in zip(telling.names.items(), event.results, strict=True):
            self._remember(name, told.there)
            if told.done:
                self._is_told(name, told.there)
            else:
                self._was_refused(name, kind, told.there)

    def _is_told(self, name: SessionName, there: ev.SharedManifest | None) -> None:
        self.told.pop(name, None)
        if there is None or not there.keys:
            return
        self.told[name] = None
        if len(self.told) > self.state.limits.sessions_told_max:
            self._surplus.append(self.told.popitem(last=False)[0])

    def _was_refused(self, name: SessionName, kind: Kind, there: ev.SharedManifest | None) -> None:
        """Another node told something that this one had not seen: what was done here before it did is no newer."""
        state = self.state
        self.told.pop(name, None)
        forgotten = self.changed.pop(name, False) or kind is Kind.FORGOTTEN
        if kind is Kind.SURPLUS:
            return
        session = state.sessions.by_name.get(name)
        if session is None:
            if forgotten:
                self.changed[name] = True
            return
        keys, _ = self._manifest(session)
        goes_on = there is None or there.ours or (there.keys and keys[: len(there.keys)] == there.keys)
        if goes_on:
            self.changed[name] = False  # nothing of it is lost
            return
        state.counters["sessions_newer_elsewhere"] += 1

    # ------------------------------------------------------------------------------------------------------- asking

    def keys(self, name: SessionName) -> Sequence[ChunkKey]:
        """What another node told of it, whatever its age; nothing is known of most."""
        known = self.known.get(name)
        return known.there.keys if known is not None and known.there is not None else ()

    def is_unknown(self, name: SessionName) -> bool:
        """Nobody told anything of it, a moment ago."""
        if not self.name:
            return True
        known = self.known.get(name)
        return known is not None and known.there is None and self._is_fresh(known)

    def _is_fresh(self, known: Known) -> bool:
        limits = self.state.limits
        return known.at + (FRESH_MS if known.there is not None else limits.lookup_absent_ms) > self.state.now

    def want(self, name: SessionName) -> None:
        """Look it up, unless that was done a moment ago."""
        known = self.known.get(name)
        if not self.name or (known is not None and self._is_fresh(known)) or name in self._wanted:
            return
        if any(name in asking.names for asking in self.asking.values() if not asking.late):
            return
        if len(self._wanted) < WANTED_MAX and self._source.is_asked(self.state.now):
            self._wanted[name] = []

    def find(self, namespace: Namespace, event: ev.GetSession) -> bool:
        """True: this request waits, and is answered in time."""
        name = (namespace.id, event.session)
        known = self.known.get(name)
        if namespace.retired or not self.name or (known is not None and self._is_fresh(known)):
            return False
        self.want(name)
        if not self._source.is_well or self._count_waiting() >= WAITING_MAX:
            return False
        until = self.state.now + self.state.limits.lookup_wait_ms
        if name in self._wanted:
            self._wanted[name].append((event, until))
            return True
        for asking in self.asking.values():
            if name in asking.names and not asking.late:
                asking.waiting.append((event, until))
                return True
        return False

    def _count_waiting(self) -> int:
        asked = sum(len(asking.waiting) for asking in self.asking.values())
        return asked + sum(map(len, self._wanted.values()))

    def _ask(self) -> None:
        state = self.state
        while self._wanted and len(self.asking) < OPS_MAX and self._source.is_asked(state.now):
            names: list[SessionName] = []
            waiting: list[tuple[ev.GetSession, Millis]] = []
            while self._wanted and len(names) < SESSIONS_PER_OP_MAX:
                name, asked = self._wanted.popitem(last=False)
                if name[0] in state.namespaces:
                    names.append(name)
                waiting += asked
            op = state.new_op()
            deadline = state.now + state.limits.lookup_deadline_ms
            self.asking[op] = Asking(tuple(names), deadline, waiting)
            self._source.lookups += 1
            state.counters["sessions_looked_up"] += len(names)
            asked_for = tuple(
                (state.namespaces[number].salt, tenant_mark(state.namespaces[number].tenant), session)
                for number, session in names
            )
            state.effects.append(ev.LookUpSessions(op, self.name, asked_for))

    def looked_up(self, event: ev.SessionsLookedUp) -> None:
        """A LookUpSessions has ended."""
        asking = self.asking.pop(event.op)
        if event.failed:
            if not asking.late:
                self._source.lookups -= 1
            self._fails(event.failed)
        elif not asking.late:
            self._source.lookups -= 1
            self._source.recovers()
            for name, there in zip(asking.names, event.found, strict=True):
                self._remember(name, there)
        for waiting, _ in asking.waiting:
            self.answer(waiting)

    def _remember(self, name: SessionName, there: ev.SharedManifest | None) -> None:
        state = self.state
        before = self.known.pop(name, None)
        was = before.there.keys if before is not None and before.there is not None else ()
        self.known[name] = Known(there, state.now)
        keys = there.keys if there is not None else ()
        self._known_keys += len(keys) - len(was)
        if keys != was:
            state.jobs.session_changed(*name)
        if there is not None and not there.ours:
            self.told.pop(name, None)
        while len(self.known) > KNOWN_MAX or self._known_keys > KNOWN_KEYS_MAX:
            oldest, known = self.known.popitem(last=False)
            self._known_keys -= len(known.there.keys) if known.there is not None else 0
            state.jobs.session_changed(*oldest)

    def purge(self, tenant: str, numbers: Set[NamespaceId]) -> OpId | None:
        """Nothing of this tenant, in these namespaces here, is told or known any more. The op whose end, a
        PurgedBeyond, says that it is so; None: nothing is told at all."""
        if not self.name:
            return None
        op = self.state.new_op()
        self.state.effects.append(ev.ForgetSessions(op, self.name, tenant_mark(tenant)))
        for book in (self.changed, self.told):
            for name in [name for name in book if name[0] in numbers]:
                del book[name]
        for name in [name for name in self.known if name[0] in numbers]:
            known = self.known.pop(name)
            self._known_keys -= len(known.there.keys) if known.there is not None else 0
            self.state.jobs.session_changed(*name)
        return op

    # --------------------------------------------------------------------------------------------------------- time

    def _fails(self, why: str) -> None:
        self._source.errors += 1
        self.state.counters["sessions_errors"] += 1
        if self._source.errors >= ERRORS_MAX or not self._source.is_well:
            self._trip(why)

    def _trip(self, why: str) -> None:
        limits = self.state.limits
        self._source.trip(
            why, self.state.now, pause_ms=limits.source_pause_ms, pause_max_ms=limits.source_pause_max_ms
        )
        for waiting in self._wanted.values():
            for event, _ in waiting:
                self.answer(event)
        self._wanted.clear()

    def tick(self) -> None:
        if not self.name:
            return
        now = self.state.now
        for telling in self.telling.values():
            if not telling.late and telling.deadline <= now:
                telling.late = True
                self._source.lookups -= 1
                self._trip("telling missed its deadline")
        for asking in self.asking.values():
            if not asking.late and asking.deadline <= now:
                asking.late = True
                self._source.lookups -= 1
                self._trip("a look-up missed its deadline")
            asking.waiting = self._answer_overdue(asking.waiting)
        for name, waiting in list(self._wanted.items()):
            self._wanted[name] = self._answer_overdue(waiting)

    def _answer_overdue(
        self, waiting: Sequence[tuple[ev.GetSession, Millis]]
    ) -> list[tuple[ev.GetSession, Millis]]:
        now = self.state.now
        for event, until in waiting:
            if until <= now:
                self.answer(event)
        return [(event, until) for event, until in waiting if until > now]

    def gauges(self) -> dict[str, float]:
        """For admins; none where sessions are this node's own."""
        if not self.name:
            return {}
        return {
            "sessions_to_tell": float(len(self.changed)),
            "sessions_told_now": float(len(self.told)),
            "sessions_of_others_known": float(len(self.known)),
            "source_sessions_well": float(self._source.is_well),
        }

    def check_integrity(self) -> None:
        """Raises AssertionError (simulator, tests)."""
        alive: list[Telling | Asking] = [*self.telling.values(), *self.asking.values()]
        assert self._source.lookups == sum(not each.late for each in alive), self
        assert len(self.telling) <= OPS_MAX and len(self.asking) <= OPS_MAX, self
        known = sum(len(each.there.keys) for each in self.known.values() if each.there is not None)
        assert self._known_keys == known, self
        assert len(self.told) <= self.state.limits.sessions_told_max, self
        names = [name for telling in self.telling.values() for name in telling.names]
        assert len(set(names)) == len(names), "two writes of one session may overtake each other"
