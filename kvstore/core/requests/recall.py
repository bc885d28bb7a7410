"""Recall: purge all that one maker (a worker that turned out to be sick) has made, in all tiers.

    asked -> its open reservations doomed, no new ones, its chunks are misses     at once
          -> rows doomed, sessions that name them listed                          some at a time
          -> the index has none of them any more -> answered

Asked again it purges what is left, which is nothing unless the daemon was started anew in between; the sessions are
listed again as long as they name the chunks. A chunk of several ranks goes if any of them is the maker.

Workers have no such right, but say what they found wrong (`report_wrong`). A maker is *quarantined* for the tenant of
who says so: the same purge, within that tenant alone, since callers name makers themselves. It takes a worker whose
self-test passes, or two: one that is sick finds everything wrong, and must not purge what is good.

Who was recalled or quarantined is barred (`State.bars`): the index keeps that for the next start, and other nodes are
told. A restart leaves out what such a maker made and a purge had not reached yet (`core/ssd/restart.py`).
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvstore.core import events as ev
from kvstore.core.chunks import DOOMED, NONE, STORED
from kvstore.core.cold_tier import ColdTier
from kvstore.core.manifests import Session
from kvstore.core.remote.forgets import Forgets
from kvstore.core.ssd.rewrites import check_admin
from kvstore.core.state import State
from kvstore.core.workers import Worker
from kvstore.errors import BadRequest, DeadlineExceeded, Denied, Exhausted, Unavailable
from kvstore.keys import is_tenant_mark, tenant_mark
from kvstore.types import Millis, NamespaceId, Reason, WorkerId

ROWS_PER_STEP_MAX = 10_000
DROPS_PER_STEP_MAX = 500
ENTRIES_PER_STEP_MAX = 20_000
"""What one step looks at: some ten milliseconds at most. The rest comes when nothing waits, or at ticks."""
RECALLS_MAX = 16
ACCUSED_MAX = 4_096
"""Makers of which it is remembered who found what they made wrong."""
QUARANTINED_MAX = 4_096
"""Of one tenant, since the start; what others of it made is purged all the same. Nobody fills the table alone."""
ACCUSERS_MIN = 2
PATIENCE_MS = 20_000
"""For the index; then the caller is told that it is not durable yet, and may ask again."""


@dataclass(slots=True)
class Purge:
    ticket: ev.Ticket | None
    """None: nobody waits for an answer, since another node was asked, or a worker found something wrong."""
    event: ev.Recall
    born_since: Millis
    """What was born before is not meant; what was born in an earlier start of the daemon always is."""
    tenant: str | None = None
    """Of its chunks alone; None: of all."""
    everything: bool = False
    """Of this tenant goes all, whoever made it, and its sessions."""
    numbers: frozenset[NamespaceId] = frozenset()
    """Its namespaces then."""
    row: int = 0
    """The next to be looked at."""
    sessions_left: list[tuple[NamespaceId, bytes]] | None = None
    sessions_untold: bool = False
    """Nothing of its sessions is told to other nodes any more."""
    chunks: int = 0
    bytes: int = 0
    pinned: int = 0
    sessions: list[ev.RecalledSession] = field(default_factory=list)
    sessions_in_all: int = 0
    dropped_at: Millis | None = None
    """When the last of its chunks was dropped: the index must be newer than that."""
    deadline: Millis = 0

    @property
    def what(self) -> str:
        return "purge" if self.everything else "recall"


class Recalls:
    def __init__(self, state: State, tier: ColdTier, forgets: Forgets) -> None:
        self.state = state
        self._forgets = forgets
        self._tier = tier
        self.purges: list[Purge] = []
        self._quarantines: Counter[str] = Counter()
        """By tenant."""
        self._accused: OrderedDict[tuple[str, bytes], set[str]] = OrderedDict()
        """Of a tenant's makers: which engine groups found something wrong that they had made."""
        self.drop_session: Callable[[Session], None] = lambda session: None
        """Set by the store."""

    def __repr__(self) -> str:
        return f"Recalls({len(self.purges)} under way, {len(self.state.bars)} makers barred)"

    def ask(self, worker: Worker, event: ev.Recall) -> ev.Recalled | None:
        """None: answered later."""
        check_admin(worker, "recall")
        state = self.state
        if len(self.purges) >= RECALLS_MAX:
            raise Exhausted(f"{RECALLS_MAX} recalls are under way", field="recall", remedy="try again later")
        since = state.now - event.age_ms_max if event.age_ms_max else -1
        purge = Purge(event.ticket, event, since)
        if not event.dry_run:
            self._bar(event.maker, purge=not event.age_ms_max)  # raises, and then nothing was done
            self._end_reservations(event.maker)
            self._forgets.forget_maker(event.maker)
            state.counters["recalls"] += 1
        self.purges.append(purge)
        self._guard()
        self._step(purge)
        return None

    @property
    def has_room(self) -> bool:
        return len(self.purges) < RECALLS_MAX

    def ask_purge(self, worker: Worker, event: ev.PurgeTenant) -> ev.Purged | None:
        """All of a tenant goes, here and at every other node. None: answered later."""
        check_admin(worker, "purge")
        if len(self.purges) >= RECALLS_MAX:
            raise Exhausted(f"{RECALLS_MAX} purges are under way", field="purge", remedy="try again later")
        if not event.dry_run:
            self._forgets.forget_maker(tenant_mark(event.tenant))
            for namespace in self.state.namespaces.values():
                if namespace.tenant == event.tenant:
                    self._forgets.forget_namespace(namespace)  # their records beyond the node go at once
        self._begin_purge(event.tenant, event.ticket, dry_run=event.dry_run)
        return None

    def _begin_purge(self, tenant: str, ticket: ev.Ticket | None, *, dry_run: bool = False) -> None:
        state = self.state
        mine = {number: each for number, each in state.namespaces.items() if each.tenant == tenant}
        asked = ev.Recall(ticket or ev.Ticket(WorkerId(0)), tenant_mark(tenant), dry_run=dry_run)
        purge = Purge(ticket, asked, -1, tenant=tenant, everything=True, numbers=frozenset(mine))
        if not dry_run:
            state.counters["tenants_purged"] += 1
            self._forgets.purge_beyond(tenant_mark(tenant))
            for reservation in state.reservations.values():
                for row in reservation.rows:
                    if state.chunks.namespace[row] in purge.numbers:
                        self._forgets.purge_row(row)
            self._forgets.purge(tenant, mine)
        self.purges.append(purge)
        self._step(purge)

    def elsewhere(self, mark: bytes, maker: bytes) -> None:
        """Another node was told to recall it, or has quarantined it for the tenant with that mark: nobody waits for an
        answer here."""
        if mark:
            if self.has_room_for_bars:
                self.state.bar(ev.Bar(mark, maker, purge=True))
            for tenant in {each.tenant for each in self.state.namespaces.values()}:
                if tenant_mark(tenant) == mark:
                    self._purge_of(tenant, ev.Recall(ev.Ticket(WorkerId(0)), maker, sessions_max=0))
            return
        if is_tenant_mark(maker):
            known = {each.tenant for each in self.state.namespaces.values()}
            found = next((tenant for tenant in known if tenant_mark(tenant) == maker), None)
            if found is not None:
                self._begin_purge(found, None)
            else:
                self._forgets.purge_beyond(maker)
            return
        if self.has_room_for_bars:
            self.state.bar(ev.Bar(b"", maker, purge=True))
        self._end_reservations(maker)
        purge = Purge(None, ev.Recall(ev.Ticket(WorkerId(0)), maker, sessions_max=0), -1)
        self.purges.append(purge)
        self._guard()
        self._step(purge)

    def _end_reservations(self, maker: bytes, tenant: str | None = None) -> None:
        """A chunk that another rank began is lost with this one's part of it."""
        for reservation in self.state.reservations.values():
            if reservation.maker == maker:
                for row in reservation.rows:
                    if tenant in (None, self.state.namespace_of(row).tenant):
                        self.state.doom(row, Reason.RECALLED)

    def report_wrong(self, worker: Worker, event: ev.ReportDuplicates) -> ev.Done:
        """How many makers are quarantined by that. What is not there any more proves nothing."""
        state = self.state
        namespace = state.own_namespace(worker, event.namespace)
        if event.checksums:
            raise BadRequest("has none where chunks are wrong", field="checksums", value=len(event.checksums))
        state.counters["chunks_reported_wrong"] += len(event.keys)
        makers: set[bytes] = set()
        for key in event.keys:
            row = namespace.index.get(key, NONE)
            if row != NONE and state.chunks.shard0[row] != NONE and not state.chunks.flags[row] & DOOMED:
                makers.update(state.makers_of(row))
        return ev.Done(sum(self._accuse(worker, maker, event) for maker in sorted(makers)))

    def _accuse(self, worker: Worker, maker: bytes, event: ev.ReportDuplicates) -> bool:
        name = worker.tenant, maker
        if self.state.is_barred(*name):
            return False
        accusers = self._accused.setdefault(name, set())
        accusers.add(worker.group.name)
        if len(self._accused) > ACCUSED_MAX:
            self._accused.popitem(last=False)
        if not event.healthy and len(accusers) < ACCUSERS_MIN:
            return False
        if len(self.purges) >= RECALLS_MAX:
            return False  # who finds it wrong next says so again
        self._accused.pop(name, None)
        self._quarantine(worker.tenant, ev.Recall(event.ticket, maker))
        return True

    def _quarantine(self, tenant: str, event: ev.Recall) -> None:
        state = self.state
        mark = tenant_mark(tenant)
        if self._quarantines[tenant] < QUARANTINED_MAX and self.has_room_for_bars:
            self._quarantines[tenant] += 1
            state.bar(ev.Bar(mark, event.maker, purge=True))
        state.counters["makers_quarantined"] += 1
        self._forgets.forget_maker(event.maker, mark)
        self._purge_of(tenant, event)

    def _purge_of(self, tenant: str, event: ev.Recall) -> None:
        """What this maker made for this tenant goes."""
        self._end_reservations(event.maker, tenant)
        purge = Purge(None, event, -1, tenant=tenant)
        self.purges.append(purge)
        self._guard()
        self._step(purge)

    def check(self, tenant: str, maker: bytes) -> None:
        """Raises Denied for the reservation of a maker that was recalled, or quarantined for that tenant."""
        if self.state.is_barred(tenant, maker):
            raise Denied(
                "was recalled: what it makes is not stored",
                field="maker",
                value=maker,
                remedy="start that worker anew; it is another maker then",
            )

    @property
    def has_room_for_bars(self) -> bool:
        return len(self.state.bars) < self.state.limits.makers_barred_max

    def _bar(self, maker: bytes, *, purge: bool) -> None:
        """No maker is let in again to make room for another: one more than the bound is not recalled."""
        if (b"", maker) not in self.state.bars and not self.has_room_for_bars:
            raise Exhausted(
                f"{len(self.state.bars)} makers were recalled or quarantined, and all stay barred",
                field="recall",
                value=maker,
                remedy="end the workers that were recalled and start with an empty ssd_dir",
            )
        self.state.bar(ev.Bar(b"", maker, purge))

    # ------------------------------------------------------------------------------------------------------- stepping

    @property
    def going(self) -> bool:
        """Whether there is something left to look at."""
        return any(purge.dropped_at is None for purge in self.purges)

    @property
    def dropping(self) -> bool:
        """Whether something of it is to be dropped."""
        return any(purge.dropped_at is None and not purge.event.dry_run for purge in self.purges)

    def tick(self) -> None:
        for purge in [purge for purge in self.purges if purge.dropped_at is not None]:
            self._finish(purge)
        self.go_on()

    def go_on(self) -> None:
        """One step more of the recall that was asked for first."""
        purge = next((purge for purge in self.purges if purge.dropped_at is None), None)
        if purge is not None:
            self._step(purge)

    def pump(self) -> None:
        """After every step: whoever waits for the index only is answered as soon as it is there."""
        for purge in [purge for purge in self.purges if purge.dropped_at is not None]:
            self._finish(purge)

    def _step(self, purge: Purge) -> None:
        if purge.dropped_at is None and self._drop(purge) and self._list_sessions(purge):
            purge.dropped_at = self.state.now
            purge.deadline = self.state.now + PATIENCE_MS
            if not purge.event.dry_run:
                self._guard()
                self._tier.hurry(+1)
        if purge.dropped_at is not None:
            self._finish(purge)

    def _guard(self) -> None:
        """What is about to be doomed is a miss already."""
        recalling: dict[tuple[str, bytes], Millis] = {}
        for purge in self.purges:
            if purge.dropped_at is None and not purge.event.dry_run and not purge.everything:
                for maker in self.state.ids_of(purge.event.maker):
                    name = purge.tenant or "", maker
                    recalling[name] = min(purge.born_since, recalling.get(name, purge.born_since))
        self.state.recalling = recalling

    def _drop(self, purge: Purge) -> bool:
        """True: all rows were looked at."""
        if purge.everything:
            return self._drop_all(purge)
        state = self.state
        chunks = state.chunks
        drops = DROPS_PER_STEP_MAX
        end = min(purge.row + ROWS_PER_STEP_MAX, chunks.rows_ever)
        makers = [maker for maker in state.ids_of(purge.event.maker) if chunks.is_maker(maker)]
        if not makers:
            purge.row = chunks.rows_ever
            return True
        made = (chunks.rows_of_maker(maker, purge.row, end) for maker in makers)
        for row in sorted(itertools.chain.from_iterable(made)):
            if chunks.shard0[row] == NONE or not state.made_since(row, purge.born_since):
                continue
            if purge.tenant not in (None, state.namespace_of(row).tenant):
                continue
            if not drops:
                purge.row = row
                return False
            drops -= 1
            self._drop_row(purge, row)
        purge.row = end
        return end == chunks.rows_ever

    def _drop_all(self, purge: Purge) -> bool:
        """Of a tenant: first the names of its sessions, which others hear of no more, then what they named."""
        state = self.state
        if purge.sessions_left is None:
            purge.sessions_left = [name for name in state.sessions.by_name if name[0] in purge.numbers]
        left = DROPS_PER_STEP_MAX
        while purge.sessions_left and left:
            session = state.sessions.by_name.get(purge.sessions_left.pop())
            left -= 1
            if session is not None:
                purge.sessions_in_all += 1
                if not purge.event.dry_run:
                    self.drop_session(session)
        if purge.sessions_left:
            return False
        if not purge.sessions_untold and not purge.event.dry_run:
            purge.sessions_untold = True
            self._forgets.purge_told(purge.tenant or "", purge.numbers)
        chunks = state.chunks
        end = min(purge.row + ROWS_PER_STEP_MAX, chunks.rows_ever)
        mine = np.isin(chunks.views.namespace[purge.row : end], sorted(purge.numbers))
        for row in (np.flatnonzero(mine) + purge.row).tolist():
            if not left:
                purge.row = row
                return False
            if chunks.namespace[row] in purge.numbers:  # else it went with another
                left -= 1
                self._drop_row(purge, row)
        purge.row = end
        return end == chunks.rows_ever

    def _drop_row(self, purge: Purge, row: int) -> None:
        state = self.state
        chunks = state.chunks
        doomed = bool(chunks.flags[row] & DOOMED)
        if not doomed and (state.is_resident(row) or chunks.flags[row] & STORED):
            purge.chunks += 1
            purge.bytes += state.namespace_of(row).payload_bytes
            purge.pinned += bool(chunks.pins[row])
        if purge.everything:
            if not purge.event.dry_run and not doomed:
                self._forgets.purge_row(row)
            return
        if not purge.event.dry_run and not doomed:
            state.doom(row, Reason.RECALLED)
            state.counters["chunks_recalled"] += 1

    def _list_sessions(self, purge: Purge) -> bool:
        """True: all were looked at."""
        state = self.state
        if purge.ticket is None or purge.everything:
            return True
        if purge.sessions_left is None:
            purge.sessions_left = list(state.sessions.by_name)
        entries = 0
        makers = state.ids_of(purge.event.maker)
        while purge.sessions_left and entries < ENTRIES_PER_STEP_MAX:
            session = state.sessions.by_name.get(purge.sessions_left.pop())
            if session is None:
                continue
            entries += len(session.manifest)
            for index, row in enumerate(session.manifest.rows):
                if state.chunks.maker(row) in makers and state.made_since(row, purge.born_since):
                    purge.sessions_in_all += 1
                    if len(purge.sessions) < purge.event.sessions_max:
                        m = session.manifest
                        purge.sessions.append(
                            ev.RecalledSession(
                                session.name,
                                state.namespaces[session.namespace].tenant,
                                session.namespace,
                                session.version,
                                index,
                                m.first[index] + m.delta[index],
                            )
                        )
                    break
        return not purge.sessions_left

    # -------------------------------------------------------------------------------------------------------- the end

    def _finish(self, purge: Purge) -> None:
        state = self.state
        answer: ev.Answer = ev.Recalled(
            purge.chunks, purge.bytes, purge.pinned, tuple(purge.sessions), purge.sessions_in_all
        )
        if purge.everything:
            answer = ev.Purged(purge.chunks, purge.bytes, purge.pinned, purge.sessions_in_all)
        if not purge.event.dry_run and not self._is_durable(purge):
            why = f"{purge.chunks} chunks are misses now, but a restart could bring them back"
            trouble = self._tier.why_not_gone(purge.dropped_at or 0, purge.deadline)
            if not trouble:
                return
            if purge.deadline > state.now:
                remedy = "do not restart the daemon before it is well; then ask again"
                answer = Unavailable(f"{why}: {trouble}", field=purge.what, remedy=remedy)
            else:
                answer = DeadlineExceeded(f"{why}: {trouble}", field=purge.what, remedy="ask again")
        self.purges.remove(purge)
        if not purge.event.dry_run:
            self._tier.hurry(-1)
        if purge.ticket is not None:
            state.reply(purge.ticket, answer)

    def _is_durable(self, purge: Purge) -> bool:
        """Whether all that was dropped has left the index."""
        assert purge.dropped_at is not None, purge
        return self._tier.is_gone(purge.dropped_at)
