"""A list by recency, hundreds of rows at a time: what `Lru.add` and `Lru.put_back` do with one after another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.core.bulk import batch, equals
from kvstore.core.chunks import NONE, TAIL, ChunkTable, LinkedRows


@equals("policies.lru.Lru.add_each")
def add(chunks: ChunkTable, rows_linked: LinkedRows, rows: Sequence[int]) -> None:
    """`rows` were used now; they stand in chain order."""
    view = chunks.views
    which = batch.as_rows(rows)[::-1]
    unnamed = (view.flags[which] & TAIL != 0) & (view.refs[which] == 0)
    if unnamed.any():
        batch.link_oldest(chunks, rows_linked, which[unnamed])
        which = which[~unnamed]
    if len(which):
        batch.link_newest(chunks, rows_linked, which)


@equals("policies.lru.Lru.put_back_each")
def put_back(chunks: ChunkTable, rows_linked: LinkedRows, rows: Sequence[int]) -> None:
    """`rows` were not used: each to the end of the list that is nearer in time."""
    view = chunks.views
    which = batch.as_rows(rows)
    oldest, newest = rows_linked.oldest, rows_linked.newest
    long_unused = np.zeros(len(which), np.bool_)
    if oldest != NONE:
        used_at = view.used_at[which]
        long_unused = used_at - chunks.used_at[oldest] < chunks.used_at[newest] - used_at
    recent = which[~long_unused]
    if len(recent):
        add(chunks, rows_linked, recent.tolist())
    if long_unused.any():
        batch.link_oldest(chunks, rows_linked, which[long_unused])
