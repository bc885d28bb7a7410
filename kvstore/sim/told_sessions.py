"""Where nodes tell each other of their sessions, as the simulator has it: a store that replaces what its writer has
seen.

Another node goes on with sessions, and cuts them; the store fails before or after it has done what it was asked for, is
wiped, and put back from an older copy. What this node tells is held against what it has and what it could have seen.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from kvstore.core import events as ev
from kvstore.core.state import SessionName
from kvstore.core.store import Store
from kvstore.types import ChunkKey

Place = tuple[bytes, bytes, bytes]
"""(digest of the namespace, mark of its tenant, name of the session)"""
SESSION_OPS = (ev.ShareSessions, ev.LookUpSessions, ev.ForgetSessions)


@dataclass(frozen=True, slots=True)
class Refused:
    """This node learnt that another one told something newer."""

    version: int
    """Of its own session then."""
    there: tuple[ChunkKey, ...]


class ToldSessions:
    def __init__(self, chance: random.Random) -> None:
        self.weather = chance
        self.there: dict[Place, ev.SharedManifest] = {}
        self._copy: dict[Place, ev.SharedManifest] = {}
        self._answered: dict[Place, dict[bytes, int]] = {}
        """What this start of the daemon was shown: head, and its count."""
        self._refused: dict[Place, Refused] = {}
        self._orders = 0
        self.replaced = self.refused = 0
        """Of this node's writes."""

    def begins(self) -> None:
        """The daemon starts: it has seen nothing, and what an earlier start told is not its own."""
        self._answered.clear()
        self._refused.clear()
        self.there = {place: replace(there, ours=False) for place, there in self.there.items()}

    def emitted(self, effect: ev.ShareSessions, store: Store) -> None:
        """Only exact manifests are told, as they are; and never what another node's newer one would be lost by."""
        state = store.state
        digests = {namespace.salt: namespace for namespace in state.namespaces.values()}
        for told in effect.sessions:
            place = (told.digest, told.mark, told.session)
            namespace = digests[told.digest]
            name: SessionName = (namespace.id, told.session)
            session = state.sessions.by_name.get(name)
            if told.keys:
                assert session is not None and session.manifest.exact, f"not to be told: {told}"
                rows = session.manifest.rows[: len(told.keys)]
                assert told.keys == tuple(state.chunks.key[row] for row in rows), told
                assert told.version == session.version, told
            if told.seen:
                shown = self._answered.get(place, {})
                assert shown.get(told.seen) == told.seen_count, f"it was never shown that: {told}"
            refused = self._refused.get(place)
            if refused is not None and told.keys and not told.ends:
                goes_on = bool(refused.there) and told.keys[: len(refused.there)] == refused.there
                assert goes_on or told.version > refused.version, f"what is newer would be lost: {told}"

    def forget(self, effect: ev.ForgetSessions) -> ev.PurgedBeyond:
        self.there = {place: there for place, there in self.there.items() if place[1] != effect.mark}
        return ev.PurgedBeyond(effect.op)

    def perform(self, effect: ev.ShareSessions | ev.LookUpSessions, trouble: str) -> ev.Event:
        if trouble == "wiped":
            self.there = {}
        elif trouble == "older":
            self.there = dict(self._copy)
        elif self.weather.random() < 0.1:
            self._copy = dict(self.there)
        if isinstance(effect, ev.LookUpSessions):
            if trouble == "fails":
                return ev.SessionsLookedUp(effect.op, failed="as told")
            return ev.SessionsLookedUp(effect.op, tuple(self._show(place) for place in effect.sessions))
        if trouble == "another node":
            self._another_node(effect)
        if trouble == "fails" and self.weather.random() < 0.5:
            return ev.SessionsShared(effect.op, failed="before it was done")
        results = tuple(map(self._share, effect.sessions))
        if trouble == "fails":
            return ev.SessionsShared(effect.op, failed="after it was done")
        for told, result in zip(effect.sessions, results, strict=True):
            self._note_shown((told.digest, told.mark, told.session), result.there)
        return ev.SessionsShared(effect.op, results)

    def applied(self, event: ev.SessionsShared, effect: ev.ShareSessions, store: Store) -> None:
        """The core has learnt how it ended."""
        numbers = {namespace.salt: namespace.id for namespace in store.state.namespaces.values()}
        for told, result in zip(effect.sessions, event.results, strict=False):
            place = (told.digest, told.mark, told.session)
            if result.done or result.there is None or result.there.ours:
                self._refused.pop(place, None)
                continue
            number = numbers.get(told.digest)
            session = store.state.sessions.by_name.get((number, told.session)) if number is not None else None
            self._refused[place] = Refused(session.version if session else 0, result.there.keys)

    def _note_shown(self, place: Place, there: ev.SharedManifest | None) -> None:
        if there is not None:
            self._answered.setdefault(place, {})[there.head] = there.count

    def _show(self, place: Place) -> ev.SharedManifest | None:
        there = self.there.get(place)
        self._note_shown(place, there)
        return there

    def _share(self, told: ev.SessionTold) -> ev.ToldResult:
        """As the script in `fleet/sessions.py`."""
        place = (told.digest, told.mark, told.session)
        there = self.there.get(place)
        if there is not None:
            seen = (there.head, there.count) == (told.seen, told.seen_count)
            if not seen and there.count >= told.seen_count:
                self.refused += 1
                return ev.ToldResult(False, there)
        self.replaced += 1
        if told.ends:
            self.there.pop(place, None)
            return ev.ToldResult(True, None)
        self._orders += 1
        head = b"ours %d" % self._orders
        made = ev.SharedManifest(
            head, told.seen_count + 1, "a", told.version, told.keys, told.token_counts, ours=True
        )
        self.there[place] = made
        return ev.ToldResult(True, made)

    def _another_node(self, effect: ev.ShareSessions) -> None:
        """It has seen what is there, and goes on from it, cuts it, or has another conversation by this name."""
        for told in effect.sessions:
            place = (told.digest, told.mark, told.session)
            there = self.there.get(place)
            before = there.keys if there is not None else told.keys
            keys = self.weather.choice((before, before[:-1], (*before, ChunkKey(b"of another node")), ()))
            self._orders += 1
            self.there[place] = ev.SharedManifest(
                b"other %d" % self._orders,
                (there.count if there is not None else 0) + 1,
                "b",
                self._orders,
                keys,
                (1,) * len(keys),
            )
