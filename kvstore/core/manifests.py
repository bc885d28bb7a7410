"""Immutable, versioned lists of chunks, and the session names that point at them.

A manifest is shared by whoever names it (forks); `Session` is the name with its version. Entries are columns, because a
long conversation has thousands of them.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.core.events import SessionEntries
from kvstore.core.jobs import JobBook
from kvstore.types import ChunkKey, Millis, NamespaceId


@dataclass(slots=True, eq=False)
class Manifest:
    rows: array[int] = field(default_factory=lambda: array("i"))
    first: array[int] = field(default_factory=lambda: array("q"))
    count: array[int] = field(default_factory=lambda: array("i"))
    delta: array[int] = field(default_factory=lambda: array("q"))
    approximate: bytearray = field(default_factory=bytearray)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def token_count(self) -> int:
        return int(_numbers(self.count).sum())

    @property
    def end(self) -> int:
        """Position after the last token, as the manifest places it."""
        return self.first[-1] + self.count[-1] + self.delta[-1] if self.rows else 0

    @property
    def exact(self) -> bool:
        """Nothing approximate, moved or missing: what is computed after it is exact too (invariant 2)."""
        return 1 not in self.approximate and not _numbers(self.delta).any() and self.end == self.token_count

    def add(self, row: int, first: int, count: int, delta: int, approximate: bool) -> None:
        """Only while the manifest is being built."""
        self.rows.append(row)
        self.first.append(first)
        self.count.append(count)
        self.delta.append(delta)
        self.approximate.append(approximate)

    def split_by(self, begin: int, end: int) -> list[int]:
        """The four boundaries of entries that are nearest to a range that does not begin and end at some; else none."""
        start = _numbers(self.first) + _numbers(self.delta)
        stop = start + _numbers(self.count)
        begins = begin == 0 or bool(((start == begin) | (stop == begin)).any())
        if begins and (end >= self.end or bool(((start == end) | (stop == end)).any())):
            return []
        edges = np.unique(np.concatenate(([0], start, stop)))
        distance = np.minimum(abs(edges - begin), abs(edges - end))
        nearest: list[int] = np.sort(edges[np.argsort(distance, kind="stable")[:4]]).tolist()
        return nearest

    def without(self, begin: int, end: int, *, close_gap: bool) -> tuple[Manifest, int]:
        """A new manifest without the entries that lie in [begin, end), and how many leading entries the two share: the
        others are approximate and, with `close_gap`, move up."""
        first, count, delta = (_numbers(column) for column in (self.first, self.count, self.delta))
        start = first + delta
        cut = (start >= begin) & (start + count <= end)
        same = int(cut.argmax()) if cut.any() else len(self)
        kept = ~cut
        delta = delta[kept]
        if close_gap:
            delta[same:] -= count[cut].sum()
        approximate = np.array(self.approximate, np.uint8)[kept]
        approximate[same:] = 1
        new = Manifest(
            _column("i", _numbers(self.rows)[kept]),
            _column("q", first[kept]),
            _column("i", count[kept]),
            _column("q", delta),
            bytearray(approximate.tobytes()),
        )
        return new, same

    def head(self, keep: int) -> Manifest:
        """A new manifest of the first `keep` entries."""
        return Manifest(
            self.rows[:keep], self.first[:keep], self.count[:keep], self.delta[:keep], self.approximate[:keep]
        )

    def entries(self, key: Sequence[ChunkKey]) -> SessionEntries:
        """`key`: of each row. They share this manifest's columns, which nobody changes any more."""
        keys = list(map(key.__getitem__, self.rows))
        return SessionEntries(keys, self.first, self.count, self.delta, self.approximate)

    def __repr__(self) -> str:
        return (
            f"Manifest({len(self)} entries, {self.token_count} tokens{'' if self.exact else ', not exact'})"
        )


def _numbers(column: array[int]) -> npt.NDArray[np.int64]:
    """A copy: a column cannot grow while there is a view of its memory."""
    return np.array(column, np.int64)


def _column(code: str, numbers: npt.NDArray[Any]) -> array[int]:
    return array(code, numbers.astype(f"={code}").tobytes())


@dataclass(slots=True, eq=False)
class Session:
    name: bytes
    namespace: NamespaceId
    version: int
    manifest: Manifest
    used_at: Millis
    indexed: bool = False
    """The index may have a record of this name, of this version or an older one."""


class SessionBook:
    """Sessions in the order of their last use."""

    def __init__(self, jobs: JobBook | None = None) -> None:
        self._jobs = jobs or JobBook()
        """Whose chunks depend on what a name stands for."""
        self.by_name: OrderedDict[tuple[NamespaceId, bytes], Session] = OrderedDict()
        self.entries = 0
        """Of all manifests, a shared one counted once for each name."""
        self._version_floor = 0
        """Highest version of any session that is gone: a name that comes back never repeats a version, or a
        compare-and-set could mistake the new conversation for the old one."""
        self._first_version = 0
        """Below every version that this start of the daemon gives."""

    def __repr__(self) -> str:
        return f"SessionBook({len(self.by_name)} sessions)"

    def get(self, namespace: NamespaceId, name: bytes, now: Millis) -> Session | None:
        session = self.by_name.get((namespace, name))
        if session is not None:
            session.used_at = now
            self.by_name.move_to_end((namespace, name))
        return session

    def begin_versions(self, boot_count: int) -> None:
        """Above whatever any earlier start of the daemon gave: also to names that are forgotten since, and to updates
        that were answered and did not reach the disk."""
        self._first_version = self._version_floor = boot_count << 32

    def next_version(self, old: Session | None) -> int:
        return 1 + (self._version_floor if old is None else max(self._first_version, old.version))

    def put(self, session: Session, old: Session | None) -> None:
        """`old` is what the name stood for."""
        self.entries += len(session.manifest) - (len(old.manifest) if old is not None else 0)
        self.by_name[session.namespace, session.name] = session
        self.by_name.move_to_end((session.namespace, session.name))
        self._jobs.session_changed(session.namespace, session.name)

    def remove(self, session: Session) -> None:
        self.entries -= len(session.manifest)
        self._version_floor = max(self._version_floor, session.version)
        del self.by_name[session.namespace, session.name]
        self._jobs.session_changed(session.namespace, session.name)

    def oldest(self) -> Session:
        return next(iter(self.by_name.values()))
