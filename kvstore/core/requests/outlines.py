"""What is kept of an answer that is too large to be remembered whole: the number of what it made, and one byte a key.

The rows that made the answer large can be looked up again, see `repeats`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.core import events as ev
from kvstore.types import LeaseId, Millis, ReservationId


@dataclass(frozen=True, slots=True)
class LeaseOutline:
    """Of an Acquired."""

    lease: LeaseId
    ttl_ms: Millis
    outcomes: bytes
    reasons: bytes
    backlog: ev.Backlog


@dataclass(frozen=True, slots=True)
class ReservationOutline:
    """Of a Reserved."""

    reservation: ReservationId
    ttl_ms: Millis
    results: bytes


@dataclass(frozen=True, slots=True)
class SessionOutline:
    """Of a SessionInfo."""

    session: bytes
    version: int


Outline = LeaseOutline | ReservationOutline | SessionOutline


def rows_of(answer: ev.Answer | Outline) -> int:
    """How many extents or entries the answer has: what can be many in it. 0: it is small, or an operator's."""
    match answer:
        case ev.Acquired() | ev.Reserved():
            return len(answer.extents)
        case ev.SessionInfo():
            return len(answer.entries)
    return 0


def outline_of(answer: ev.Answer | Outline) -> ev.Answer | Outline:
    """What is kept of an answer that has rows: no row, and all that was decided."""
    match answer:
        case ev.Acquired():
            kept = bytes(answer.outcomes), bytes(answer.reasons)
            return LeaseOutline(answer.lease, answer.ttl_ms, *kept, answer.backlog)
        case ev.Reserved():
            return ReservationOutline(answer.reservation, answer.ttl_ms, bytes(answer.results))
        case ev.SessionInfo():
            return SessionOutline(answer.session, answer.version)
    return answer
