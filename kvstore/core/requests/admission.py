"""Which saves get slots in DRAM at all.

Where nothing is below DRAM, a chunk that is worth less than what would go for it is better not saved: the caller is
spared the copy. It is remembered like a chunk that was evicted, so that the policy learns when it would have been used.
Above an SSD every save gets its slot, because the way to the SSD leads through DRAM; the chunk then leaves DRAM first.

Whoever keeps sessions is never refused: a manifest names committed chunks only. What a queued job waits for is not
either, nor what several ranks save one shard each, which have to agree.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core import events as ev
from kvstore.core.chunks import NONE, TAIL
from kvstore.core.namespaces import Namespace
from kvstore.core.state import State
from kvstore.types import DiskState, Reason


def refused(
    state: State, namespace: Namespace, event: ev.Reserve, shards: Sequence[int], counts: Sequence[int]
) -> frozenset[int]:
    """Which of the keys are not to be saved, by their numbers."""
    nothing: frozenset[int] = frozenset()
    if state.disk_state is not DiskState.ABSENT or namespace.sessions or event.derived or event.parents:
        return nothing
    if len(shards) < namespace.shards or not namespace.dram.count:
        return nothing
    index, chunks = namespace.index, state.chunks
    numbers = []
    rows = []
    for number, key in enumerate(event.keys):
        row = index.get(key, NONE)
        if row == NONE or chunks.shard0[row] == NONE:
            numbers.append(number)
            rows.append(row)
    if not rows or any(row != NONE and chunks.refs[row] for row in rows):
        return nothing
    free = 0
    wanted = state.jobs.awaited(namespace.id, event.keys[numbers[0]])
    if wanted:
        others = [(n, row) for n, row in zip(numbers, rows, strict=True) if event.keys[n] not in wanted]
        free = len(others) - len(rows)
        if not others:
            return nothing
        numbers, rows = map(list, zip(*others, strict=True))
    first = numbers[0]
    above = event.keys[first - 1] if first else event.parent
    slab = state.pool.classes.get((namespace.id, namespace.slot_bytes[0]))
    free += slab.free // namespace.shards if slab is not None else 0
    free += sum(segment.capacity for segment in state.pool.idle.values()) if state.pool.idle else 0
    free = min(free, state.quotas.dram_left(namespace.tenant) // namespace.chunk_bytes)
    tokens = [counts[number] for number in numbers]
    parent = index.get(above, NONE) if above else NONE
    admitted = state.policy.admitted(namespace, rows, parent, tokens, free)
    if admitted == len(rows):
        return nothing
    _remember(state, namespace, event, numbers[admitted:], counts)
    return frozenset(numbers[admitted:])


def _remember(
    state: State, namespace: Namespace, event: ev.Reserve, numbers: Sequence[int], counts: Sequence[int]
) -> None:
    """As ghosts, with what is above each."""
    chunks, index = state.chunks, namespace.index
    rows: dict[int, None] = {}
    for number in numbers:
        key = event.keys[number]
        row = index.get(key, NONE)
        if row in rows:  # the request names it twice
            continue
        if row == NONE:
            if chunks.rows_used >= state.limits.chunks_max:
                break
            row = index[key] = chunks.new_row(namespace.id, key, state.now)
            chunks.tokens[row] = counts[number]
            if counts[number] < namespace.spec.chunk_tokens:
                chunks.flags[row] |= TAIL
            above = event.keys[number - 1] if number else event.parent
            parent = index.get(above, NONE) if above else NONE
            if parent not in (NONE, row):
                chunks.attach(row, parent)
            chunks.reason[row] = Reason.EVICTED
        else:
            chunks.unlink(state.ghosts, row)
        rows[row] = None
    state.policy.refused(list(rows))
    for row in rows:
        chunks.used_at[row] = state.now
        chunks.link_newest(state.ghosts, row)
    state.forget_ghosts()
    state.counters["saves_refused"] += len(numbers)
