"""Ghosts are forgotten, many at a time: what `State.remove_row` does with one after another, in a fraction of the time
(see batch.py). Whoever evicts pays for it, because each ghost that is new pushes out an old one."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

from kvstore.core.bulk import batch, equals
from kvstore.core.chunks import NO_KEY, NONE, ChunkTable
from kvstore.types import NamespaceId, Reason

if TYPE_CHECKING:
    from kvstore.core.state import State


@equals("state.State.remove_row")
def forget_oldest(state: State, count: int) -> None:
    """There are so many."""
    chunks = state.chunks
    listed = state.ghosts
    rows = list(islice(chunks.walk(listed), count))
    which = batch.as_rows(rows)
    key, namespace = chunks.key, chunks.namespace
    state.policy.forget_many(rows)
    index = {}
    told = chunks.directory
    for row in rows:
        if told[row] != NONE:  # it became a ghost in this step
            state.directory.forget(row)
        number = namespace[row]
        if number not in index:
            index[number] = state.namespaces[NamespaceId(number)].index
        del index[number][key[row]]
        key[row] = NO_KEY
    _leave_tree(chunks, which)
    view = chunks.views
    assert (view.shard0[which] == NONE).all() and not (view.pins[which] | view.refs[which]).any(), which
    listed.oldest = chunks.newer[rows[-1]]
    if listed.oldest != NONE:
        chunks.older[listed.oldest] = NONE
    else:
        listed.newest = NONE
    listed.count -= count
    view.newer[which] = view.older[which] = NONE
    for number, uses in Counter(view.maker[which].tolist()).items():
        if number != NONE:
            chunks.give_up_maker(number, uses)
    view.maker[which] = NONE
    view.namespace[which] = NONE
    view.hits[which] = 0
    view.history[which] = 0
    view.tokens[which] = 0
    view.flags[which] = 0
    view.reason[which] = Reason.NEVER_SEEN
    chunks.free_rows.extend(rows)


def _leave_tree(chunks: ChunkTable, which: batch.Rows) -> None:
    """`ChunkTable.leave_parent` and `leave_children` for each; quick for those that have no siblings, and one child."""
    view = chunks.views
    parent, before, after = view.parent[which], view.prev_sibling[which], view.next_sibling[which]
    alone = (before == NONE) & (after == NONE)
    if not alone.all():
        for row in which[~alone].tolist():
            chunks.leave_parent(row)
    only = which[(parent != NONE) & alone]
    view.first_child[view.parent[only]] = NONE
    view.parent[only] = NONE
    child = view.first_child[which]
    several = (child != NONE) & (view.next_sibling[child] != NONE)
    if several.any():
        for row in which[several].tolist():
            chunks.leave_children(row)
    one = (child != NONE) & ~several
    view.parent[child[one]] = NONE
    view.first_child[which[one]] = NONE
