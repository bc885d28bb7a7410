"""Chunks that queued jobs need, thousands at a time: what `Policy.set_ranks` and `Policy.put_back` do with one after
another, in a tenth of the time (see batch.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvstore.core.bulk import batch
from kvstore.core.chunks import DOOMED, LISTED, NEEDED, NONE, PROMOTING, STORED, ChunkTable
from kvstore.core.namespaces import Namespace
from kvstore.types import NamespaceId

if TYPE_CHECKING:
    from kvstore.core.policy import Policy

Rows = npt.NDArray[np.intp]


def changed(
    policy: Policy,
    chunks: ChunkTable,
    namespaces: Mapping[NamespaceId, Namespace],
    before: Mapping[int, int],
    rank: Mapping[int, int],
) -> None:
    """`rank` is needed now, `before` was: what is needed no more goes back to the recency lists, what is new leaves
    them; and the heaps are made anew."""
    view = chunks.views
    was = np.fromiter(before, np.intp, len(before))
    now = np.fromiter(rank, np.intp, len(rank))
    ranked = np.zeros(chunks.rows_ever, np.bool_)
    ranked[now] = True
    gone = was[~ranked[was] & (view.flags[was] & NEEDED != 0)]
    for number, mine in _by_namespace(view.namespace, gone):
        rows = gone[mine]
        batch.unlink(chunks, namespaces[number].needed, rows[::-1])
        view.flags[rows] &= ~np.uint16(NEEDED)
        policy.put_back(namespaces[number], rows.tolist())
    for namespace in namespaces.values():
        namespace.order.clear()
    positions = np.fromiter(rank.values(), np.intp, len(rank))
    for number, mine in _by_namespace(view.namespace, now):
        namespace = namespaces[number]
        rows = now[mine]
        listed = view.flags[rows] & (LISTED | NEEDED)
        new = rows[(listed == LISTED) & (view.ready[rows] == namespace.shards)]
        if len(new):
            batch.unlink(chunks, namespace.recency, new)
            batch.link_newest(chunks, namespace.needed, new)
            view.flags[new] |= np.uint16(NEEDED)
        needed = np.flatnonzero(view.flags[rows] & NEEDED)[::-1]  # the last first, as in a heap
        namespace.order.extend(zip((-positions[mine][needed]).tolist(), rows[needed].tolist(), strict=True))


def on_ssd_only(chunks: ChunkTable, namespace: Namespace, rows: list[int]) -> list[int]:
    """Those of the rows that are STORED and not resident, PROMOTING or DOOMED."""
    view = chunks.views
    which = batch.as_rows(rows)
    stored = view.flags[which] & (STORED | PROMOTING | DOOMED) == STORED
    resident = (view.shard0[which] != NONE) & (view.ready[which] == namespace.shards)
    found: list[int] = which[stored & ~resident].tolist()
    return found


def put_back(policy: Policy, chunks: ChunkTable, namespace: Namespace, rows: Rows) -> None:
    """`Policy.put_back`, of rows that no job needs; not for "fifo"."""
    view = chunks.views
    oldest, newest = namespace.recency.oldest, namespace.recency.newest
    long_unused = np.zeros(len(rows), np.bool_)
    if oldest != NONE:
        used_at = view.used_at[rows]
        long_unused = used_at - chunks.used_at[oldest] < chunks.used_at[newest] - used_at
    recent = rows[~long_unused]
    if len(recent):
        batch.evictable(policy, chunks, namespace, recent.tolist())
    if long_unused.any():
        batch.link_oldest(chunks, namespace.recency, rows[long_unused])


def _by_namespace(namespace: npt.NDArray[np.int32], rows: Rows) -> Iterator[tuple[NamespaceId, Any]]:
    """Each of the rows' namespaces, with what selects its rows, in their order."""
    numbers = namespace[rows]
    for number in np.unique(numbers).tolist():
        yield NamespaceId(number), np.flatnonzero(numbers == number)
