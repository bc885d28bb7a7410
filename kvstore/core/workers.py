"""Who talks to the store: worker processes, the engine groups they form, and the answers remembered for each.

A lease belongs to an engine group (an engine's scheduler process and all its ranks) and lives while a member lives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.core.events import Answer, Ticket
from kvstore.core.requests.outlines import Outline, outline_of, rows_of
from kvstore.layout import NamespaceSpec
from kvstore.types import LeaseId, NamespaceId, ReservationId, SegmentId, WorkerId


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

    def charge_new(self, rows: Sequence[int], chunk_bytes: int, bytes_max: int) -> bool:
        """The same for all `rows`, if they are different and the group pins none of them yet; else nothing is done."""
        once = dict.fromkeys(rows, 1)
        size = len(rows) * chunk_bytes
        if (
            len(once) < len(rows)
            or self.pinned_bytes + size > bytes_max
            or not self.pins.keys().isdisjoint(rows)
        ):
            return False
        self.pinned_bytes += size
        self.pins.update(once)
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
    """The last `answers_max` answers by request id, for repeated requests; the oldest is forgotten first.

    Answers with many rows (extents, entries) are kept whole up to `rows_max` rows together, the newest of them in any
    case (unless `rows_max` is 0). Of the older ones an outline stays, out of which `repeats.again` makes the answer
    once more: an answer is never forgotten because another one is large.
    """

    __slots__ = ("_answers", "_answers_max", "_kinds", "_large", "_rows", "_rows_max", "waiting")

    def __init__(self, answers_max: int, rows_max: int) -> None:
        self._answers: OrderedDict[int, Answer | Outline] = OrderedDict()
        self._kinds: dict[int, type[Any]] = {}
        """What was asked under each number: of those that are answered or wait."""
        self._large: OrderedDict[int, int] = OrderedDict()
        """Rows of each answer that has some and is kept whole."""
        self._rows = 0
        """Of all of those."""
        self._answers_max = answers_max
        self._rows_max = rows_max
        self.waiting: dict[int, list[Ticket]] = {}
        """Requests that are not answered yet, with the tickets that repeated them."""

    def asked(self, request_id: int, kind: type[Any]) -> bool:
        """Note what is asked; False when the number was another kind of request's, whose answer would be nonsense."""
        return self._kinds.setdefault(request_id, kind) is kind

    def recall(self, request_id: int) -> Answer | Outline | None:
        return self._answers.get(request_id)

    def remember(self, request_id: int, answer: Answer) -> None:
        self.forget(request_id)
        self._answers[request_id] = answer
        if rows := rows_of(answer):
            self._large[request_id] = rows
            self._rows += rows
        while len(self._answers) > max(1, self._answers_max):
            oldest = next(iter(self._answers))
            self.forget(oldest)
            self._kinds.pop(oldest, None)
        while self._rows > self._rows_max and len(self._large) > bool(self._rows_max):
            number, rows = self._large.popitem(last=False)
            self._rows -= rows
            self._answers[number] = outline_of(self._answers[number])

    def forget(self, request_id: int) -> None:
        """The answer, not what was asked. Unknown numbers are fine."""
        self._answers.pop(request_id, None)
        self._rows -= self._large.pop(request_id, 0)

    def check(self) -> None:
        """The bounds; raises AssertionError."""
        whole = {number: rows for number, kept in self._answers.items() if (rows := rows_of(kept))}
        assert whole == self._large and sum(whole.values()) == self._rows, (whole, self._large, self._rows)
        assert len(self._answers) <= max(1, self._answers_max), len(self._answers)
        assert self._rows <= self._rows_max or len(self._large) == 1, (self._rows, self._large)
        assert self._kinds.keys() >= self._answers.keys() | self.waiting.keys(), self._kinds


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
