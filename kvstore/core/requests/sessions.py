"""Session names and their manifests: get, update, truncate, fork, forget, list, explain."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from kvstore.core import events as ev
from kvstore.core.bulk import batch, references
from kvstore.core.chunks import COMMITTED, DERIVED, DOOMED, DURABLE, NONE, PROMOTING, STORED, STORING
from kvstore.core.cold_tier import ColdTier
from kvstore.core.manifests import Manifest, Session
from kvstore.core.namespaces import Namespace
from kvstore.core.requests.hint_actions import HintActions
from kvstore.core.requests.reads import lookup
from kvstore.core.requests.resident import Residents
from kvstore.core.state import State
from kvstore.core.workers import Worker
from kvstore.errors import BadRequest, Conflict, Exhausted, NotFound, Precondition
from kvstore.types import ChunkKey, DiskState, HintState, NamespaceId, Outcome, Reason, Tier

LISTED_MAX = 500
LISTED_ENTRIES_MAX = 10_000
"""What one answer lists: some milliseconds of work. Whoever wants more asks for the rest."""
EXPLAINED_MAX = 1_024
FORGOTTEN_PER_STEP = 1_024
"""Shards of chunks that one step forgets, some ten microseconds each: the rest when nothing waits, or at ticks."""
FORGETTING_MAX = 256
"""Requests and expired sessions of which something is left to forget."""
EXPIRED_PER_TICK = 256


@dataclass(slots=True)
class Forgetting:
    """Chunks that are being forgotten, some at a time: first those of a session, if nothing else names or continues
    them, then those that were named one by one."""

    namespace: Namespace
    reason: Reason
    session: bytes = b""
    """Its index record goes when its chunks have gone: after a crash in between, what is left of it can be named. Empty
    if the index has none."""
    of_session: list[ChunkKey] = field(default_factory=list)
    """The next one last, here and below."""
    named: list[ChunkKey] = field(default_factory=list)
    count: int = 0
    ticket: ev.Ticket | None = None
    """Of the request that is answered at the end."""


class Sessions:
    def __init__(self, state: State, tier: ColdTier, actions: HintActions, residents: Residents) -> None:
        self.state = state
        self._actions = actions
        self._tier = tier
        self._residents = residents
        self.forgetting: deque[Forgetting] = deque()

    # ------------------------------------------------------------------------------------------------------ reading

    def get(self, worker: Worker, event: ev.GetSession) -> ev.SessionInfo:
        namespace = self.state.namespace(worker, event.namespace)
        session = self.state.sessions.get(namespace.id, event.session, self.state.now)
        if session is None:
            return ev.SessionInfo(event.session, 0, (), 0)
        return self.info(session)

    def info(self, session: Session) -> ev.SessionInfo:
        """The session as it is now; no use of it."""
        entries = session.manifest.entries(self.state.chunks.key)
        usable, beyond = self._usable(session)
        return ev.SessionInfo(session.name, session.version, entries, usable, beyond)

    def _usable(self, session: Session) -> tuple[int, bytes]:
        """Leading entries that are whole in some tier (invariant 6), and of those behind, which are; none of an old
        epoch."""
        state = self.state
        rows = session.manifest.rows
        if state.namespaces[session.namespace].retired:
            return 0, bytes(len(rows))
        if len(rows) >= state.batch_min:
            each = batch.usable_each(state, state.namespaces[session.namespace], rows)
        else:
            each = bytes(map(state.is_usable, rows))
        first_hole = each.find(0)
        return (len(rows), b"") if first_hole < 0 else (first_hole, each[first_hole:])

    # ------------------------------------------------------------------------------------------------------ writing

    def update(self, worker: Worker, event: ev.UpdateSession) -> ev.SessionInfo:
        """Compare-and-set: keep the first entries of the expected version, append committed chunks."""
        state = self.state
        namespace = state.own_namespace(worker, event.namespace)
        old = self._expect(namespace, event.session, event.expected_version, may_be_new=True)
        base = old.manifest if old is not None else Manifest()
        if not 0 <= event.keep <= len(base):
            raise BadRequest(f"the manifest has {len(base)} entries", field="keep", value=event.keep)
        if event.keep + len(event.append) > state.limits.session_entries_max:
            raise Exhausted(
                f"a manifest has at most {state.limits.session_entries_max} entries",
                field="append",
                value=event.keep + len(event.append),
            )
        manifest = base.head(event.keep)
        exact = manifest.exact
        for index, entry in enumerate(event.append):
            last = index == len(event.append) - 1
            exact = self._append(namespace, manifest, entry, index, exact=exact, last=last)
        return self._point(namespace, event.session, old, manifest, same=event.keep)

    def _append(
        self,
        namespace: Namespace,
        manifest: Manifest,
        entry: ev.SessionEntry,
        index: int,
        *,
        exact: bool,
        last: bool,
    ) -> bool:
        """Returns whether the manifest, exact so far or not, is exact with this entry."""
        chunks = self.state.chunks
        row = namespace.index.get(entry.key, NONE)
        # Losing bytes between commit and update is no error.
        if row == NONE or not chunks.flags[row] & COMMITTED:
            raise Precondition(
                "was never committed",
                field=f"append[{index}].key",
                value=entry.key,
                remedy="commit the chunk first",
            )
        tokens = chunks.tokens[row]
        # An approximate entry may name a part of a chunk: what is left of it after a cut
        if entry.token_count != tokens and not (entry.approximate and 1 <= entry.token_count < tokens):
            raise BadRequest(
                f"the chunk has {tokens} tokens",
                field=f"append[{index}].token_count",
                value=entry.token_count,
            )
        if entry.first_token < 0 or entry.first_token + entry.delta < manifest.end:
            raise BadRequest(
                f"entries must not overlap: the manifest ends at {manifest.end}",
                field=f"append[{index}].first_token",
                value=entry.first_token,
            )
        if not last and not entry.approximate and entry.token_count < namespace.spec.chunk_tokens:
            raise BadRequest(
                "only the last entry may be a tail",
                field=f"append[{index}].token_count",
                value=entry.token_count,
            )
        exact = exact and entry.first_token == manifest.end and entry.delta == 0
        if not exact and not entry.approximate and not chunks.flags[row] & DERIVED:
            raise Precondition(
                "follows approximate entries, a gap or a shift, but was committed as exact",
                field=f"append[{index}].key",
                value=entry.key,
                remedy="save what was computed after approximate KV under a derived key",
            )
        manifest.add(row, entry.first_token, entry.token_count, entry.delta, entry.approximate)
        return exact and not entry.approximate

    def truncate(self, worker: Worker, event: ev.Truncate) -> ev.SessionInfo:
        """Cut a range out. What follows it attended to it, hence becomes approximate; what precedes it stays exact."""
        state = self.state
        namespace = state.own_namespace(worker, event.namespace)
        old = self._expect(namespace, event.session, event.expected_version, may_be_new=False)
        assert old is not None
        manifest = old.manifest
        begin, end = event.first_token, event.first_token + event.token_count
        if event.token_count < 1:
            raise BadRequest("must be at least 1", field="token_count", value=event.token_count)
        if near := manifest.split_by(begin, end):
            raise BadRequest(
                "the range must begin and end where entries do",
                field="first_token",
                value=f"[{begin}, {end})",
                remedy=f"nearest boundaries: {near}",
            )
        kept, same = manifest.without(begin, end, close_gap=event.close_gap)
        info = self._point(namespace, event.session, old, kept, same=same)
        if old.indexed:
            state.cut_sessions[namespace.id, event.session] = None
        state.counters["sessions_truncated"] += 1
        return info

    def fork(self, worker: Worker, event: ev.Fork) -> ev.SessionInfo:
        """A second name for the same manifest."""
        namespace = self.state.own_namespace(worker, event.namespace)
        source = self.state.sessions.get(namespace.id, event.session, self.state.now)
        if source is None:
            raise NotFound("no such session", field="session", value=event.session)
        if self.state.sessions.get(namespace.id, event.new_session, self.state.now) is not None:
            raise Conflict("exists already", field="new_session", value=event.new_session)
        return self._point(namespace, event.new_session, None, source.manifest)

    def _expect(self, namespace: Namespace, name: bytes, version: int, *, may_be_new: bool) -> Session | None:
        session = self.state.sessions.get(namespace.id, name, self.state.now)
        if session is None and not may_be_new:
            raise NotFound("no such session", field="session", value=name)
        found = 0 if session is None else session.version
        if found != version:
            raise Conflict(
                f"the session is at version {found}",
                field="expected_version",
                value=version,
                remedy="get it and decide again",
            )
        return session

    def _point(
        self, namespace: Namespace, name: bytes, old: Session | None, manifest: Manifest, *, same: int = 0
    ) -> ev.SessionInfo:
        """Let the name point at `manifest`, whose first `same` entries are those of `old`; references of the old one
        go."""
        state = self.state
        sessions = state.sessions
        references.add(state, manifest.rows[same:])
        state.keep(manifest.rows[same:])
        if old is None:
            if len(sessions.by_name) >= state.limits.sessions_max:
                self._drop_oldest()
            namespace.sessions += 1
        session = Session(name, namespace.id, sessions.next_version(old), manifest, state.now)
        session.indexed = old is not None and old.indexed
        sessions.put(session, old)
        if old is not None:
            references.drop(state, old.manifest.rows[same:], Reason.TRUNCATED)
        if state.limits.sessions_told:
            state.changed_sessions.setdefault((namespace.id, name), False)
        if state.disk_state is not DiskState.ABSENT and self._tier.persistent:
            state.dirty_sessions.setdefault((namespace.id, name), state.now)
        while sessions.entries > state.limits.manifest_entries_max and sessions.oldest() is not session:
            self._drop_oldest()
        return self.info(session)

    def _drop_oldest(self) -> None:
        self.state.counters["sessions_dropped"] += 1
        self.drop(self.state.sessions.oldest())

    def drop(self, session: Session, reason: Reason = Reason.TRUNCATED) -> None:
        """The name goes, and its references; whole chunks stay until they are evicted, a tail goes for `reason`."""
        self._unname(session, reason)
        if session.indexed:
            self._delete_record(session.namespace, session.name)

    def _unname(self, session: Session, reason: Reason) -> None:
        state = self.state
        state.sessions.remove(session)
        name = (session.namespace, session.name)
        state.dirty_sessions.pop(name, None)
        state.cut_sessions.pop(name, None)
        state.namespaces[session.namespace].sessions -= 1
        references.drop(state, session.manifest.rows, reason)

    def purge(self, session: Session) -> None:
        """It goes with all of its tenant; what it names is looked at by whoever says so."""
        self._unname(session, Reason.FORGOTTEN)
        if session.indexed:
            self._delete_record(session.namespace, session.name)

    def _delete_record(self, namespace: NamespaceId, name: bytes) -> None:
        """The index is to forget the session. If there is another of this name by now, it is written after that."""
        state = self.state
        state.deleted_sessions.setdefault((namespace, name), state.now)
        if (namespace, name) in state.sessions.by_name:
            state.dirty_sessions.setdefault((namespace, name), state.now)

    def tick(self) -> None:
        """Sessions that nobody used for their time to live end, with the chunks that nothing else names."""
        state = self.state
        ttl_ms = state.limits.session_ttl_ms
        self.go_on()
        for _ in range(EXPIRED_PER_TICK if ttl_ms else 0):
            if not state.sessions.by_name or len(self.forgetting) >= FORGETTING_MAX:
                return
            session = state.sessions.oldest()
            if session.used_at + ttl_ms > state.now:
                return
            job = Forgetting(state.namespaces[session.namespace], Reason.EXPIRED)
            self._take_session(job, session)
            self._begin(job)
            state.counters["sessions_expired"] += 1

    # --------------------------------------------------------------------------------------------------- forgetting

    def forget(self, worker: Worker, event: ev.Forget) -> ev.Done | None:
        """The session and the chunks that nothing else names or continues; and single keys. The name goes at once.
        None: it is answered when the last is gone, from the index too, so that no restart brings it back; or with the
        reason why that is not so yet."""
        state = self.state
        namespace = state.administered_namespace(worker, event.namespace)
        if len(self.forgetting) >= FORGETTING_MAX:
            raise Exhausted(
                f"{FORGETTING_MAX} sessions are being forgotten", field="forget", remedy="try again later"
            )
        job = Forgetting(namespace, Reason.FORGOTTEN, named=list(reversed(event.keys)))
        session = state.sessions.get(namespace.id, event.session, state.now) if event.session else None
        if event.session and state.limits.sessions_told:
            state.changed_sessions[namespace.id, event.session] = True
        if session is not None:
            self._take_session(job, session)
            job.count = 1
        if any(
            one.session and (one.namespace, one.session) == (namespace, event.session)
            for one in self.forgetting
        ):
            # Of this name the index has a record until the one before is through.
            job.ticket = event.ticket
            self.forgetting.append(job)
            return None
        return self._begin(job, event.ticket)

    def _take_session(self, job: Forgetting, session: Session) -> None:
        job.session = session.name if session.indexed else b""
        job.of_session = list(map(self.state.chunks.key.__getitem__, session.manifest.rows))
        self._unname(session, job.reason)

    def _begin(self, job: Forgetting, ticket: ev.Ticket | None = None) -> ev.Done | None:
        if self._forget_some(job):
            return self._tier.await_gone(ticket, job.count)
        job.ticket = ticket
        self.forgetting.append(job)
        return None

    def go_on(self) -> None:
        """One step more of what is being forgotten, if anything is."""
        if self.forgetting and self._forget_some(self.forgetting[0]):
            job = self.forgetting.popleft()
            if job.ticket is not None:
                answer = self._tier.await_gone(job.ticket, job.count)
                if answer is not None:
                    self.state.reply(job.ticket, answer)

    def _forget_some(self, job: Forgetting) -> bool:
        """True: nothing is left. From the end of a session's chain: a chunk that another chain continues, or another
        manifest names, stays."""
        state = self.state
        chunks = state.chunks
        left = FORGOTTEN_PER_STEP
        while left > 0 and (keys := job.of_session or job.named):
            left -= job.namespace.shards
            row = job.namespace.index.get(keys.pop(), NONE)
            stays = row == NONE or (
                keys is job.of_session
                and (chunks.refs[row] or any(state.is_usable(child) for child in chunks.children(row)))
            )
            if not stays and job.reason is Reason.EXPIRED:  # somebody may use it by its key alone
                stays = chunks.used_at[row] + state.limits.session_ttl_ms > state.now
            if not stays:
                job.count += state.doom(row, job.reason)
        if job.session and not job.of_session:
            self._delete_record(job.namespace.id, job.session)
            job.session = b""
        return not (job.of_session or job.named)

    # -------------------------------------------------------------------------------------------------- for operators

    def list(self, worker: Worker, event: ev.ListSessions) -> ev.SessionList:
        """Most recently used first, of the caller's tenant (an admin sees all). Fewer than asked for where that would
        take long."""
        state = self.state
        seen = {
            namespace.id: namespace
            for namespace in state.namespaces.values()
            if (worker.admin or namespace.tenant == worker.tenant) and event.namespace in (None, namespace.id)
        }
        hints = self._actions.by_session()
        if event.session:
            named = (state.sessions.by_name.get((number, event.session)) for number in seen)
            found = sorted((session for session in named if session), key=lambda one: -one.used_at)
            rows = [
                self._session_row(seen[session.namespace], session, hints) for session in found[event.skip :]
            ]
            return ev.SessionList(tuple(rows[: min(event.limit, LISTED_MAX)]), len(found))
        total = sum(namespace.sessions for namespace in seen.values())
        newest_first = (
            session for (number, _), session in reversed(state.sessions.by_name.items()) if number in seen
        )
        rows = []
        entries = 0
        end = min(event.skip + min(event.limit, LISTED_MAX), total)
        for session in islice(newest_first, min(event.skip, end), end):
            rows.append(self._session_row(seen[session.namespace], session, hints))
            entries += len(session.manifest)
            if entries > LISTED_ENTRIES_MAX:
                break
        return ev.SessionList(tuple(rows), total)

    def _session_row(
        self,
        namespace: Namespace,
        session: Session,
        hints: Mapping[tuple[NamespaceId, bytes], Sequence[HintState]],
    ) -> ev.SessionRow:
        state = self.state
        chunks = state.chunks
        manifest = session.manifest
        resident = stored = 0
        reason = Reason.OLD_EPOCH if namespace.retired else Reason.NONE
        for row in manifest.rows:
            flags = chunks.flags[row]
            stored += flags & (STORED | DOOMED) == STORED
            if chunks.ready[row] == namespace.shards and not flags & DOOMED and chunks.shard0[row] != NONE:
                resident += 1
            elif reason is Reason.NONE:
                reason = lookup(state, namespace, chunks.key[row])[2]
        return ev.SessionRow(
            session.name,
            namespace.tenant,
            namespace.id,
            session.version,
            len(manifest),
            manifest.token_count,
            self._usable(session)[0],
            resident * namespace.payload_bytes,
            state.now - session.used_at,
            len(manifest) * namespace.payload_bytes,
            stored * namespace.payload_bytes,
            reason,
            tuple(hints.get((namespace.id, session.name), ())),
        )

    def explain(self, worker: Worker, event: ev.Explain) -> ev.Explained:
        """What is known of each chunk of a session, or of each key: where it is, or why it is gone. Only so many at a
        time."""
        state = self.state
        namespace = state.administered_namespace(worker, event.namespace)
        keys = list(event.keys)
        version = 0
        if event.session:
            session = state.sessions.by_name.get((namespace.id, event.session))
            if session is None:
                raise NotFound("no such session", field="session", value=event.session)
            version = session.version
            keys += map(state.chunks.key.__getitem__, session.manifest.rows)
        hints = self._actions.on_keys(namespace, keys[:EXPLAINED_MAX])
        told = tuple(
            replace(self._history(namespace, key), hints=tuple(hints[key])) for key in keys[:EXPLAINED_MAX]
        )
        return ev.Explained(version, told, rest=tuple(keys[EXPLAINED_MAX:]))

    def _history(self, namespace: Namespace, key: ChunkKey) -> ev.ChunkHistory:
        state = self.state
        chunks = state.chunks
        row, outcome, reason = lookup(state, namespace, key)
        if row == NONE:
            return ev.ChunkHistory(
                *(key, Outcome.MISS, reason, 0, 0, namespace.shards, 0, 0, 0, 0, 0, False, b""),
                resident_in=self._residents.groups(namespace, key),
            )
        flags = chunks.flags[row]
        tiers = {Tier.DRAM} if outcome is Outcome.HIT else set()
        if flags & (STORED | DOOMED) == STORED:
            tiers.add(Tier.SSD)
        return ev.ChunkHistory(
            key=key,
            outcome=outcome,
            reason=reason,
            token_count=chunks.tokens[row],
            shards_ready=chunks.ready[row],
            shards=namespace.shards,
            pins=chunks.pins[row],
            hits=chunks.hits[row],
            age_ms=state.now - chunks.born_at[row],
            idle_ms=state.now - chunks.used_at[row],
            manifests=chunks.refs[row],
            derived=bool(flags & DERIVED),
            maker=b"".join(state.makers_of(row)),
            bytes=namespace.payload_bytes if tiers else 0,
            tiers=frozenset(tiers),
            moving=bool(flags & (PROMOTING | STORING)),
            durable=bool(flags & DURABLE),
            needed=row in state.policy.rank,
            resident_in=self._residents.groups(namespace, key),
            standing=self._standing(namespace, row) if tiers else None,
        )

    def _standing(self, namespace: Namespace, row: int) -> ev.Standing:
        """By which rule it leaves the highest tier that has it."""
        state = self.state
        if state.chunks.pins[row]:
            return ev.Standing("pinned")
        rank = state.policy.rank.get(row)
        if rank is not None:
            window = state.jobs.windows.get(namespace.tenant)
            if window is None:
                return ev.Standing("needed")
            ahead, kept = window.reaches
            return ev.Standing(
                "needed",
                jobs_before=window.queued_before(rank),
                jobs_ahead=ahead,
                jobs_kept=kept,
                ahead_bytes=window.ahead_bytes_max,
                kept_bytes=window.kept_bytes_max,
            )
        resident = state.chunks.ready[row] == namespace.shards
        return state.policy.standing(namespace.dram if resident else namespace.ssd, row)
