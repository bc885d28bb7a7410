"""Who talks to the store: worker processes, the engine groups they form, and the answers remembered for each.

A lease belongs to an engine group (an engine's scheduler process and all its ranks) and lives while a member lives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.core.events import Acquired, Answer, Reserved, SessionInfo, Ticket
from kvstore.layout import NamespaceSpec
from kvstore.types import LeaseId, NamespaceId, ReservationId, SegmentId, WorkerId

REMEMBERED_ROWS_MAX = 16_384
"""Bound on the size of a worker's remembered answers: extents and entries are what can be many in them."""


@dataclass(slots=True, eq=False)
class EngineGroup:
    tenant: str
    name: str
    members: set[WorkerId] = field(default_factory=set)
    leases: set[LeaseId] = field(default_factory=set)
    pins: dict[int, int] = field(default_factory=dict)
    """How often the group pins each chunk row: a shared prefix counts once against the quota."""
    pinned_bytes: int = 0
    specs: list[NamespaceSpec] = field(default_factory=list)
    """What its members opened, without epochs: the ranks of one engine must agree."""

    def charge(self, row: int, chunk_bytes: int, bytes_max: int) -> bool:
        """Count one more pin of a row against the quota; False if it would not fit."""
        pinned = self.pins.get(row, 0)
        if not pinned:
            if self.pinned_bytes + chunk_bytes > bytes_max:
                return False
            self.pinned_bytes += chunk_bytes
        self.pins[row] = pinned + 1
        return True

    def discharge(self, rows: Sequence[int], chunk_bytes: int) -> None:
        """One pin less of each."""
        pins = self.pins
        if list(map(pins.__getitem__, rows)).count(1) == len(rows):
            for row in rows:
                del pins[row]
            self.pinned_bytes -= len(rows) * chunk_bytes
            return
        for row in rows:
            left = pins[row] - 1
            if left:
                pins[row] = left
            else:
                del pins[row]
                self.pinned_bytes -= chunk_bytes

    def __repr__(self) -> str:
        return f"EngineGroup({self.tenant}/{self.name}: {len(self.members)} members, {self.pinned_bytes} B pinned)"


class Memory:
    """Answers by request id, for repeated requests; oldest forgotten first."""

    __slots__ = ("_answers", "_kinds", "_limit", "_rows", "waiting")

    def __init__(self, limit: int) -> None:
        self._answers: OrderedDict[int, Answer] = OrderedDict()
        self._kinds: dict[int, type[Any]] = {}
        """What was asked under each number: of those that are answered or wait."""
        self._rows = 0
        self._limit = limit
        self.waiting: dict[int, list[Ticket]] = {}
        """Requests that are not answered yet, with the tickets that repeated them."""

    def asked(self, request_id: int, kind: type[Any]) -> bool:
        """Note what is asked; False when the number was another kind of request's, whose answer would be nonsense."""
        return self._kinds.setdefault(request_id, kind) is kind

    def recall(self, request_id: int) -> Answer | None:
        return self._answers.get(request_id)

    def remember(self, request_id: int, answer: Answer) -> None:
        self._answers[request_id] = answer
        self._rows += _rows(answer)
        while len(self._answers) > 1 and (
            len(self._answers) > self._limit or self._rows > REMEMBERED_ROWS_MAX
        ):
            number, oldest = self._answers.popitem(last=False)
            self._kinds.pop(number, None)
            self._rows -= _rows(oldest)


@dataclass(slots=True, eq=False)
class Worker:
    id: WorkerId
    tenant: str
    group: EngineGroup
    rank: int
    admin: bool
    remote: bool
    memory: Memory
    closed: bool = False
    """Its connection is closed but its process lives."""
    staging_dropped: bool = False
    opened: set[NamespaceId] = field(default_factory=set)
    reservations: set[ReservationId] = field(default_factory=set)
    reserved_bytes: int = 0
    holds: set[SegmentId] = field(default_factory=set)
    """Segments it may have mapped."""
    waits: int = 0
    suspect: list[tuple[SegmentId, int]] = field(default_factory=list)
    """Slots that it may still write: quarantined until it lets go or dies (protection `group`)."""

    def __repr__(self) -> str:
        return f"Worker({self.id} of {self.group.tenant}/{self.group.name} rank {self.rank}{' closed' * self.closed})"


def _rows(answer: Answer) -> int:
    match answer:
        case Acquired() | Reserved():
            return len(answer.extents)
        case SessionInfo():
            return len(answer.entries)
    return 1
