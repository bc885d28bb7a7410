"""Chunks that queued jobs need, thousands at a time: what `Hints.set_ranks` does with one after another, in a tenth
of the time (see batch.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from kvstore.core.bulk import batch, equals, helper
from kvstore.core.chunks import DOOMED, LISTED, NONE, PROMOTING, RANKED, STORED, ChunkTable
from kvstore.core.namespaces import Namespace
from kvstore.types import NamespaceId

if TYPE_CHECKING:
    from kvstore.core.policies.hints import ByNeed, Hints
    from kvstore.core.state import State

Rows = npt.NDArray[np.intp]


@equals("policies.hints.Hints._changed")
def changed(
    policy: Hints,
    chunks: ChunkTable,
    namespaces: Mapping[NamespaceId, Namespace],
    before: Mapping[int, int],
    rank: Mapping[int, int],
) -> None:
    """`rank` is needed now, `before` was: what is needed no more goes back to the recency lists, what is new leaves
    them; and what is needed is ordered anew."""
    view = chunks.views
    was = np.fromiter(before, np.intp, len(before))
    now = np.fromiter(rank, np.intp, len(rank))
    ranked = np.zeros(chunks.rows_ever, np.bool_)
    ranked[now] = True
    gone = was[~ranked[was] & (view.flags[was] & RANKED != 0)]
    for number, mine in _by_namespace(view.namespace, gone):
        namespace = namespaces[number]
        rows = gone[mine]
        view.flags[rows] &= ~np.uint16(RANKED | LISTED)
        resident = view.ready[rows] == namespace.shards
        for mine_in, part in zip(_lists(namespace), (rows[resident], rows[~resident]), strict=True):
            if len(part):
                policy.put_back(mine_in, part.tolist())
    for namespace in namespaces.values():
        for candidates in _lists(namespace):
            candidates.ranked.replace((), ())
    ranks = list(rank.values())
    on_ssd: dict[int, tuple[ByNeed, list[Rows]]] = {}
    """Numbers in `now`: namespaces share these lists."""
    for number, mine in _by_namespace(view.namespace, now):
        namespace = namespaces[number]
        rows = now[mine]
        resident = (view.ready[rows] == namespace.shards) & (view.shard0[rows] != NONE)
        stored = ~resident & (view.flags[rows] & STORED != 0)
        dram, ssd = _lists(namespace)
        kept = _ranked(policy, chunks, dram, rows, resident)
        _order(dram, now, ranks, mine[kept])
        kept = _ranked(policy, chunks, ssd, rows, stored)
        if len(kept):
            on_ssd.setdefault(id(ssd), (ssd, []))[1].append(mine[kept])
    for candidates, parts in on_ssd.values():
        _order(candidates, now, ranks, np.sort(np.concatenate(parts)))


def _lists(namespace: Namespace) -> tuple[ByNeed, ByNeed]:
    """In DRAM and on SSD, as `Hints` keeps them."""
    return cast("ByNeed", namespace.dram), cast("ByNeed", namespace.ssd)


def _ranked(
    policy: Hints, chunks: ChunkTable, candidates: ByNeed, rows: Rows, which: npt.NDArray[np.bool_]
) -> Rows:
    """Take those of `rows` that are `which` and listed out of the recency list; where they stand in `rows`."""
    view = chunks.views
    listed = which & (view.flags[rows] & LISTED != 0)
    new = rows[listed & (view.flags[rows] & RANKED == 0)]
    if len(new):
        policy.unlink_many(candidates, new)
        view.flags[new] |= np.uint16(RANKED | LISTED)
    return np.flatnonzero(listed)


def _order(candidates: ByNeed, rows: Rows, ranks: list[int], which: Rows) -> None:
    last_first = which[::-1]
    candidates.ranked.replace(rows[last_first].tolist(), [-ranks[number] for number in last_first.tolist()])


@equals("requests.queue.Queue._on_ssd_only")
def on_ssd_only(state: State, rows: Sequence[int]) -> list[int]:
    """Those of the rows that are STORED and not resident, PROMOTING or DOOMED."""
    view = state.chunks.views
    which = batch.as_rows(rows)
    stored = which[view.flags[which] & (STORED | PROMOTING | DOOMED) == STORED]
    return [row for row in stored.tolist() if not state.is_resident(row)]


@helper
def needed_in(state: State) -> dict[int, int]:
    """How many shards of chunks that queued jobs need are in each slab file, by its index."""
    rank, chunks = state.policy.rank, state.chunks
    if not rank:
        return {}
    view = chunks.views
    slab = np.frombuffer(chunks.disk_slab, np.int32)  # viewed no longer than this takes
    rows = np.fromiter(rank, np.intp, len(rank))
    rows = rows[view.shard0[rows] != NONE]
    counts: Counter[int] = Counter()
    for number, mine in _by_namespace(view.namespace, rows):
        start = view.shard0[rows[mine]].astype(np.intp)
        for shard in range(state.namespaces[number].shards):
            found, times = np.unique(slab[start + shard], return_counts=True)
            counts.update(dict(zip(found.tolist(), times.tolist(), strict=True)))
    del counts[NONE]
    return counts


def _by_namespace(namespace: npt.NDArray[np.int32], rows: Rows) -> Iterator[tuple[NamespaceId, Any]]:
    """Each of the rows' namespaces, with what selects its rows, in their order."""
    numbers = namespace[rows]
    for number in np.unique(numbers).tolist():
        yield NamespaceId(number), np.flatnonzero(numbers == number)
