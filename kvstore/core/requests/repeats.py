"""How a repeated request gets its first answer again although only an outline of the answer was kept.

The extents of a lease or reservation are looked up while it lives, the entries of a session while it has the version
that the answer spoke of.
"""

from __future__ import annotations

from typing import Any

from kvstore.core import events as ev
from kvstore.core.requests.outlines import LeaseOutline, Outline, ReservationOutline, SessionOutline
from kvstore.core.requests.reads import wanted_shards
from kvstore.core.requests.sessions import Sessions
from kvstore.core.state import State
from kvstore.core.workers import Worker
from kvstore.types import GrantResult, Outcome, Reason


def again(state: State, sessions: Sessions, worker: Worker, event: Any, outline: Outline) -> ev.Answer | None:
    """The answer of a request that is repeated. None: what the first one acquired or reserved is gone, so that carrying
    it out once more doubles nothing. Raises BadRequest if it is no repetition."""
    match outline:
        case LeaseOutline():
            lease = state.leases.leases.get(outline.lease)
            if lease is None or lease.group is not worker.group:
                return None
            namespace = state.namespaces[lease.namespace]
            shards = wanted_shards(namespace, event.shards)  # it may name others than the first one did
            return ev.Acquired(
                outline.lease,
                outline.ttl_ms,
                tuple(map(Outcome, outline.outcomes)),
                tuple(map(Reason, outline.reasons)),
                state.extents(namespace, lease.rows, shards),
                outline.backlog,
            )
        case ReservationOutline():
            reservation = state.reservations.get(outline.reservation)
            if reservation is None or reservation.worker != worker.id:
                return None
            return ev.Reserved(
                outline.reservation,
                outline.ttl_ms,
                tuple(map(GrantResult, outline.results)),
                state.extents(state.namespaces[reservation.namespace], reservation.rows, reservation.shards),
            )
        case SessionOutline():
            known = event.namespace in worker.opened
            found = state.sessions.by_name.get((event.namespace, outline.session)) if known else None
            if found is not None and found.version == outline.version:
                return sessions.info(found)
            return ev.SessionInfo(outline.session, outline.version, (), 0, entries_forgotten=True)
