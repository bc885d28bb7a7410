"""Orders about chunks that a hint names: prefetch, demote, pin, retain, expect.

An action is a job of the queue's plan, with a place of its own there, so that one order of victims and one window hold
for all that is known of the future:

    PIN                 before every queued job
    queued jobs
    PREFETCH, EXPECT    behind them, by the time at which they are due; what is expected is promoted shortly before
    RETAIN              last of all, and never promoted

DEMOTE is none: the chunks leave DRAM at once, or as soon as the tier below has them and no lease pins them.

What PREFETCH and EXPECT say is judged like a queue's hints (`credit.py`): whose actions come to nothing may have the
less of them. Whatever is asked for, an action never makes a miss of a hit, never refuses an eviction, and ends by
itself: after its time, with its worker, or when its name is cancelled. Pins and retained chunks are bounded by shares
of the memory, of which each tenant that has any gets an equal part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import repeat
from typing import NamedTuple

from kvstore.core import events as ev
from kvstore.core.chunks import NONE, STORED, STORING
from kvstore.core.cold_tier import ColdTier
from kvstore.core.jobs import BEHIND, FIRST, LAST, Job
from kvstore.core.namespaces import Namespace
from kvstore.core.requests.credit import Mark
from kvstore.core.requests.hint_namespaces import namespace_for
from kvstore.core.requests.queue import KEYS_PER_WORKER_MAX, NEVER, Queue
from kvstore.core.requests.reads import clip_ttl
from kvstore.core.state import State
from kvstore.core.workers import Worker
from kvstore.errors import BadRequest
from kvstore.types import (
    ActionKind,
    ChunkKey,
    DiskState,
    HintAction,
    HintResult,
    HintState,
    Millis,
    NamespaceId,
    WorkerId,
)

ACTIONS_PER_WORKER_MAX = 4_096
"""All of them are looked at in each tick, and again when one comes."""
JOB_NAME_SUFFIX = b"\0" * 64
"""A queued job's name is shorter than any that ends so."""
LEAD_MS = 500
LEAD_BYTES_PER_MS = 250_000
"""What is expected is promoted so much earlier, and by the time that its bytes take at 250 MB/s."""
DEMOTED_PER_TICK = 1_024
"""Chunks of waiting demotions that one tick looks at."""
SHOWN_KEYS_MAX = 200_000
"""Keys of actions that one Explain compares: some ten milliseconds of work."""
KEEPING = (ActionKind.PIN, ActionKind.RETAIN)
FORESEEING = (ActionKind.PREFETCH, ActionKind.EXPECT)
"""They say what comes, and share one bound, which is counted under EXPECT."""


def _bound(kind: ActionKind) -> ActionKind:
    """Under which kind its bytes count."""
    return ActionKind.EXPECT if kind in FORESEEING else kind


class Place(NamedTuple):
    worker: WorkerId
    namespace: NamespaceId
    """That the worker named: of an action by model not always where its chunks are."""
    name: bytes


class Result(NamedTuple):
    result: HintResult
    chunks: int


REJECTED = Result(HintResult.REJECTED, 0)


@dataclass(frozen=True, slots=True)
class Kept:
    """A job of the queue's that stands for an action."""

    job: Job
    action: HintAction
    tenant: str
    bytes: int
    """Of the chunks that it names, in DRAM."""


@dataclass(slots=True)
class Left:
    """Of a worker's bounds."""

    count: int
    keys: int

    def take(self, keys: int) -> bool:
        """One action that names so many keys; False: there is no room for it."""
        if self.count < 1 or self.keys < keys:
            return False
        self.count -= 1
        self.keys -= keys
        return True


@dataclass(slots=True)
class Demotion:
    """Chunks that have not left DRAM yet."""

    namespace: NamespaceId
    keys: tuple[ChunkKey, ...]
    action: HintAction
    until: Millis


class HintActions:
    def __init__(self, state: State, tier: ColdTier, queue: Queue) -> None:
        self._state = state
        self._tier = tier
        self._queue = queue
        self.kept: dict[Place, Kept] = {}
        """In the order in which the actions came."""
        self.demotions: dict[Place, Demotion] = {}
        self._marks: dict[Place, Mark] = {}
        """Of FORESEEING actions whose chunks are there."""
        self.kept_bytes: dict[ActionKind, Counter[str]] = {
            kind: Counter() for kind in (*KEEPING, ActionKind.EXPECT)
        }
        """By tenant, of those that have any. What two actions name counts twice."""

    def __repr__(self) -> str:
        kinds = Counter(kept.action.kind.name for kept in self.kept.values())
        return f"HintActions({dict(kinds)}, {len(self.demotions)} demotions)"

    def apply(self, worker: Worker, event: ev.ApplyActions) -> ev.ActionsApplied:
        """The namespace need not be open, as with `Queue.publish`."""
        state = self._state
        namespace = state.administered_namespace(worker, event.namespace)
        for index, action in enumerate(event.actions):
            if action.eta_ms < 0:
                raise BadRequest("is a time to come", field=f"actions[{index}].eta_ms", value=action.eta_ms)
        candidates = state.namespaces_of_model(namespace) if event.by_model else []
        actions: list[tuple[Namespace, HintAction]] = [(namespace, action) for action in event.actions]
        if candidates:
            actions = []
            for action, prompts in zip(event.actions, event.prompts or repeat(()), strict=False):
                home, keys = namespace_for(
                    state, self._queue.is_unknown, candidates, action.session, action.keys, prompts
                )
                actions.append((home, replace(action, keys=keys)))
        renewed = {action.name: (home.id, action) for home, action in actions}
        marks: dict[bytes, Mark] = {}
        for name in (*event.cancelled, *renewed):
            mark = self._take_mark(Place(worker.id, namespace.id, name), *renewed.get(name, (None, None)))
            if mark is not None:
                marks[name] = mark
            self._end(Place(worker.id, namespace.id, name))
        left = self._left(worker.id)
        results = []
        for home, action in actions:
            place = Place(worker.id, namespace.id, action.name)
            self._end(place)
            results.append(self._apply(worker, home, place, action, left))
            if action.name in marks and place in self.kept:
                self._marks[place] = marks[action.name]
        state.counters["hint_actions"] += len(results)
        state.counters["hint_actions_rejected"] += sum(result is HintResult.REJECTED for result, _ in results)
        return ev.ActionsApplied(
            tuple(one.result for one in results),
            tuple(one.chunks for one in results),
            tuple(each.id for each in candidates),
        )

    def _apply(
        self, worker: Worker, namespace: Namespace, place: Place, action: HintAction, left: Left
    ) -> Result:
        state = self._state
        session = state.sessions.by_name.get((namespace.id, action.session)) if action.session else None
        if namespace.retired or not (action.keys or session is not None):
            return REJECTED
        keys = action.keys
        if not keys and session is not None:
            keys = tuple(map(state.chunks.key.__getitem__, session.manifest.rows))
        keys = tuple(dict.fromkeys(keys))
        if action.kind is ActionKind.DEMOTE:
            return self._demote(namespace, place, action, keys, left)
        fitting = keys[: self._room(worker.tenant, action.kind) // namespace.chunk_bytes]
        if not fitting or not left.take(len(fitting)):
            return REJECTED
        self._keep(worker.tenant, namespace, place, action, fitting)
        self._share(action.kind)
        if len(fitting) < len(keys):
            return Result(HintResult.CLIPPED, len(fitting))
        return self._result(namespace, action, fitting)

    def _result(self, namespace: Namespace, action: HintAction, keys: tuple[ChunkKey, ...]) -> Result:
        """What is not there yet counts from when it is saved."""
        state = self._state
        rows = [namespace.index.get(key, NONE) for key in keys]
        usable = sum(row != NONE and state.is_usable(row) for row in rows)
        in_dram = sum(row != NONE and state.is_hit(row) for row in rows)
        done = usable if action.kind is ActionKind.RETAIN else in_dram
        result = HintResult.ACCEPTED if done == len(keys) else HintResult.DEFERRED
        return Result(result, usable)

    # ----------------------------------------------------------------------------------------------------- keeping

    def _keep(
        self, tenant: str, namespace: Namespace, place: Place, action: HintAction, keys: tuple[ChunkKey, ...]
    ) -> None:
        """What is expected of a session is what it will have by then; all else is what is named now."""
        state, limits = self._state, self._state.limits
        due = state.now + min(action.eta_ms, limits.hint_ttl_max_ms)
        ttl_ms = clip_ttl(action.ttl_ms, limits.hint_ttl_ms, limits.hint_ttl_max_ms)
        if action.kind is ActionKind.PIN:
            position, promote_at, until = FIRST, 0, state.now + ttl_ms
        elif action.kind is ActionKind.RETAIN:
            position, promote_at, until = LAST, NEVER, state.now + ttl_ms
        else:
            lead_ms = LEAD_MS + len(keys) * namespace.payload_bytes // LEAD_BYTES_PER_MS
            position, promote_at, until = BEHIND + due, due - lead_ms, due + ttl_ms
        named = keys if action.kind in KEEPING or action.keys else ()  # of a session, all that it will have
        job = Job(
            place.worker,
            tenant,
            namespace.id,
            place.name + JOB_NAME_SUFFIX,
            action.session,
            named,
            position,
            state.jobs.new_line(position),
            state.now,
            until,
            namespace.chunk_bytes,
            promote_at,
            action,
        )
        kept = self.kept[place] = Kept(job, action, tenant, len(keys) * namespace.chunk_bytes)
        self.kept_bytes[_bound(action.kind)][tenant] += kept.bytes
        self._queue.put(job, place.namespace)

    def _left(self, worker: WorkerId) -> Left:
        """What the worker's bounds leave room for."""
        jobs, keys = self._queue.held_by(worker)
        waiting = [demotion for place, demotion in self.demotions.items() if place.worker == worker]
        actions = sum(place.worker == worker for place in self.kept)
        left = min(self._state.limits.hints_per_worker_max - jobs, ACTIONS_PER_WORKER_MAX - actions)
        return Left(
            left - len(waiting), KEYS_PER_WORKER_MAX - keys - sum(len(demotion.keys) for demotion in waiting)
        )

    def _bytes_max(self, kind: ActionKind) -> int:
        """Of all tenants together."""
        limits = self._state.limits
        if kind is ActionKind.PIN:
            return int(limits.arena_bytes * limits.hint_pin_share_max)
        everywhere = limits.arena_bytes + self._tier.bytes_max
        return everywhere if kind is ActionKind.EXPECT else int(everywhere * limits.hint_retain_share_max)

    def _part(self, tenant: str, kind: ActionKind, tenants: int) -> int:
        """What one of so many tenants may have."""
        part = self._bytes_max(kind) // max(1, tenants)
        if kind is ActionKind.EXPECT:
            share = self._queue.credit.share_of_actions(tenant)
            return part if share >= 1.0 else min(part, int(self._state.limits.arena_bytes * share))
        return part

    def _room(self, tenant: str, kind: ActionKind) -> int:
        held = self.kept_bytes[_bound(kind)]
        return max(0, self._part(tenant, _bound(kind), len(held.keys() | {tenant})) - held[tenant])

    def _share(self, kind: ActionKind) -> None:
        """A tenant more has some, or a record got worse: parts are smaller, and what exceeds them goes, the newest
        first."""
        bound = _bound(kind)
        held = self.kept_bytes[bound]
        part = {tenant: self._part(tenant, bound, len(held)) for tenant in held}
        if all(held[tenant] <= part[tenant] for tenant in part):
            return
        for place, kept in reversed(list(self.kept.items())):
            if _bound(kept.action.kind) is bound and held[kept.tenant] > part[kept.tenant]:
                self._marks.pop(place, None)  # that it was cut says nothing of it
                self._end(place)
                self._state.counters["hint_actions_cut"] += 1

    # ----------------------------------------------------------------------------------------------------- judging

    def _take_mark(self, place: Place, home: NamespaceId | None, new: HintAction | None) -> Mark | None:
        """Of an action that another one renews which names the same: it is judged when that is over. One that came true
        is judged now."""
        kept, mark = self.kept.get(place), self._marks.get(place)
        if kept is None or mark is None or new is None or new.kind not in FORESEEING:
            return None
        before = kept.job.namespace, kept.action.session, kept.action.keys
        if (home, new.session, new.keys) != before:
            return None
        if mark.used or self._queue.credit.was_asked_for(kept.job.namespace, mark):
            return None
        return self._marks.pop(place)

    def _judge(self) -> None:
        credit = self._queue.credit
        for place, kept in self.kept.items():
            if kept.action.kind not in FORESEEING:
                continue
            mark = self._marks.get(place)
            new = credit.note_action(kept.job) if mark is None else credit.overdue_action(kept.job, mark)
            if new is not None:
                self._marks[place] = new
        if credit.of_actions:
            self._share(ActionKind.EXPECT)

    # ---------------------------------------------------------------------------------------------------- demoting

    def _demote(
        self,
        namespace: Namespace,
        place: Place,
        action: HintAction,
        keys: tuple[ChunkKey, ...],
        left: Left,
    ) -> Result:
        state, limits = self._state, self._state.limits
        if state.disk_state is not DiskState.OK or not left.take(len(keys)):
            return REJECTED
        waiting, demoted = self._leave_dram(namespace, action, keys)
        if waiting:
            ttl_ms = clip_ttl(action.ttl_ms, limits.hint_ttl_ms, limits.hint_ttl_max_ms)
            self.demotions[place] = Demotion(namespace.id, waiting, action, state.now + ttl_ms)
            return Result(HintResult.DEFERRED, demoted + len(waiting))
        return Result(HintResult.ACCEPTED, demoted) if demoted else REJECTED

    def _leave_dram(
        self, namespace: Namespace, action: HintAction, keys: tuple[ChunkKey, ...]
    ) -> tuple[tuple[ChunkKey, ...], int]:
        """(those that may leave later, how many left now), from the end of the chain. Of a session stays what another
        session has too; in any case what a job needs, and what a chunk in DRAM continues. What came because somebody
        waited for it leaves once it was taken, or if nobody takes it for a while."""
        state, chunks = self._state, self._state.chunks
        left: dict[ChunkKey, None] = {}
        demoted = 0
        for key in reversed(keys):
            row = namespace.index.get(key, NONE)
            if row == NONE or not state.is_hit(row) or row in state.policy.rank:
                continue
            if not action.keys and chunks.refs[row] > 1:
                continue
            is_stored = chunks.flags[row] & (STORED | STORING) == STORED
            waits = chunks.pins[row] or not is_stored or state.policy.is_awaited(row)
            if waits or any(chunks.key[child] in left for child in chunks.children(row)):
                left[key] = None
            elif not any(map(state.is_resident, chunks.children(row))):
                state.demote(row)
                demoted += 1
        state.counters["chunks_demoted_by_hint"] += demoted
        return tuple(reversed(left)), demoted

    # --------------------------------------------------------------------------------------------------------- end

    def _end(self, place: Place) -> None:
        self.demotions.pop(place, None)
        kept = self.kept.pop(place, None)
        if kept is None:
            return
        mark = self._marks.pop(place, None)
        if mark is not None:
            self._queue.credit.action_ended(kept.job, mark)
        dropped = self._queue.drop(place.worker, place.namespace, place.name + JOB_NAME_SUFFIX)
        assert dropped, place
        held = self.kept_bytes[_bound(kept.action.kind)]
        held[kept.tenant] -= kept.bytes
        if not held[kept.tenant]:
            del held[kept.tenant]

    def forget(self, worker: WorkerId) -> None:
        """It is gone, or nobody will take its hints back."""
        for place in [place for place in (*self.kept, *self.demotions) if place.worker == worker]:
            self._marks.pop(place, None)  # nobody knows what would have become of it
            self._end(place)

    def tick(self) -> None:
        state = self._state
        ended = [place for place, kept in self.kept.items() if kept.job.until <= state.now]
        for place in ended:
            self._end(place)
        state.counters["hint_actions_ended"] += len(ended)
        self._judge()
        looked_at = 0
        for place, demotion in list(self.demotions.items()):
            namespace = state.namespaces.get(demotion.namespace)
            if demotion.until <= state.now or namespace is None or namespace.retired:
                del self.demotions[place]
                continue
            looked_at += len(demotion.keys)
            if looked_at > DEMOTED_PER_TICK and looked_at > len(demotion.keys):
                break
            del self.demotions[place]
            demotion.keys, _ = self._leave_dram(namespace, demotion.action, demotion.keys)
            if demotion.keys:
                self.demotions[place] = demotion  # behind the others

    # ----------------------------------------------------------------------------------------------- for operators

    def gauges(self) -> dict[str, float]:
        """Of all tenants."""
        kinds = Counter(kept.action.kind for kept in self.kept.values())
        return {
            "hint_pins": kinds[ActionKind.PIN],
            "hint_pinned_bytes": self.kept_bytes[ActionKind.PIN].total(),
            "hint_retained_bytes": self.kept_bytes[ActionKind.RETAIN].total(),
            "hint_expected": kinds[ActionKind.EXPECT] + kinds[ActionKind.PREFETCH],
            "hint_demotions_waiting": len(self.demotions),
        }

    def on_keys(self, namespace: Namespace, keys: Iterable[ChunkKey]) -> dict[ChunkKey, list[HintState]]:
        """What is in force for each of these, as far as it is found among SHOWN_KEYS_MAX keys."""
        found: dict[ChunkKey, list[HintState]] = {key: [] for key in keys}
        looked_at = 0
        for kept in self.kept.values():
            if kept.job.namespace != namespace.id or looked_at > SHOWN_KEYS_MAX:
                continue
            named = set(kept.job.keys or self._keys_of(namespace, kept.job.session))
            looked_at += len(named)
            for key in found.keys() & named:
                found[key].append(self._shown(kept))
        return found

    def by_session(self) -> dict[tuple[NamespaceId, bytes], list[HintState]]:
        """What names sessions."""
        found: dict[tuple[NamespaceId, bytes], list[HintState]] = {}
        for kept in self.kept.values():
            if kept.job.session:
                found.setdefault((kept.job.namespace, kept.job.session), []).append(self._shown(kept))
        return found

    def _keys_of(self, namespace: Namespace, name: bytes) -> list[ChunkKey]:
        session = self._state.sessions.by_name.get((namespace.id, name))
        return [] if session is None else [self._state.chunks.key[row] for row in session.manifest.rows]

    def _shown(self, kept: Kept) -> HintState:
        now, job, kind = self._state.now, kept.job, kept.action.kind
        due_in_ms = max(0, job.position - BEHIND - now) if kind is ActionKind.EXPECT else 0
        return HintState(kind, max(0, job.until - now), due_in_ms)

    # ------------------------------------------------------------------------------------------------ for checkers

    def check_integrity(self) -> None:
        """Each action is a job of its worker, none outlives its worker or its longest time, and nothing keeps more than
        its share."""
        state, limits = self._state, self._state.limits
        in_queue = {
            Place(worker, namespace, name.removesuffix(JOB_NAME_SUFFIX))
            for worker, namespace, name in self._queue.of_actions()
        }
        assert in_queue == self.kept.keys(), (in_queue ^ self.kept.keys(), self)
        assert {place.worker for place in (*self.kept, *self.demotions)} <= state.workers.keys(), self
        held: dict[ActionKind, Counter[str]] = {kind: Counter() for kind in self.kept_bytes}
        for place, kept in self.kept.items():
            assert kept.job.until <= state.now + 2 * limits.hint_ttl_max_ms, kept
            assert kept.tenant == state.workers[place.worker].tenant, kept
            held[_bound(kept.action.kind)][kept.tenant] += kept.bytes
        assert held == self.kept_bytes, (held, self.kept_bytes)
        for kind in KEEPING:
            assert held[kind].total() <= self._bytes_max(kind), (kind, held)
            part = self._bytes_max(kind) // max(1, len(held[kind]))
            assert all(kept <= part for kept in held[kind].values()), (kind, held, part)
