"""What manifests name: one reference of a chunk for each entry. A long session has tens of thousands, so from
`State.batch_min` on they are counted as a batch, which does what `State.add_ref` and `State.drop_ref` do one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.core.bulk import batch, equals
from kvstore.core.chunks import LISTED, NONE, TAIL
from kvstore.core.state import State
from kvstore.types import Reason


@equals("state.State.add_ref")
def add(state: State, rows: Sequence[int]) -> None:
    """One more for each of `rows`, which may name a chunk several times."""
    if len(rows) < state.batch_min:
        for row in rows:
            state.add_ref(row)
        return
    view = state.chunks.views
    which = batch.as_rows(rows)
    np.add.at(view.refs, which, 1)
    ghosts = which[(view.shard0[which] == NONE) & (view.flags[which] & LISTED != 0)]
    if len(ghosts):
        batch.unlink(state.chunks, state.ghosts, np.unique(ghosts))


@equals("state.State.drop_ref")
def drop(state: State, rows: Sequence[int], reason: Reason) -> None:
    """One less for each of `rows`."""
    if len(rows) < state.batch_min:
        for row in rows:
            state.drop_ref(row, reason)
        return
    view = state.chunks.views
    which = batch.as_rows(rows)
    np.subtract.at(view.refs, which, 1)
    left = view.refs[which]
    assert (left >= 0).all(), which[left < 0]
    # What nobody names any more, in the order in which the last entry of each went.
    unnamed = left == 0
    gone = unnamed & (view.shard0[which] == NONE)
    tails = unnamed & (view.flags[which] & TAIL != 0) & ~gone
    if tails.any():
        last = _last_ones(which[gone | tails].tolist())
        view.refs[batch.as_rows(last)] = 1
        for row in last:
            state.drop_ref(row, reason)
    elif gone.any():
        batch.link_newest(state.chunks, state.ghosts, batch.as_rows(_last_ones(which[gone].tolist())))
        state.forget_ghosts()


def _last_ones(rows: list[int]) -> list[int]:
    """Each once, where it stands last."""
    rows.reverse()
    once = list(dict.fromkeys(rows))
    once.reverse()
    return once
