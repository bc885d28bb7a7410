"""Which new tokens attend to which stretches of KV that stand elsewhere, as work items for attention kernels.

A *stretch* is some tokens of one chunk that stand in a sequence at positions other than those their keys were computed
at, or that do not fill their chunk: what is left of a conversation whose beginning was cut, or a module of Prompt
Cache. Its stored keys stay as they are. A query at position p sees a key of position s as if it stood at s + delta if
the query is turned by -delta instead (RoFormer, arXiv 2104.09864: only the difference of the two angles counts):

    (R(p) q) . (R(s + delta) k)  =  (R(-delta) R(p) q) . (R(s) k)

One stored K thus serves every placement, without copies and without another rounding. Stretches that the same
sequences see, each sequence with one delta for all of them, are one item for the queries of all these sequences,
wherever they stand in each. Softmax does not ask in which order KV is visited, so stretches have no place in the
sequence, only a number of tokens that come before they are seen (`Stretch.at`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.kernels.launch import Scratch
from kvstore.kernels.rotate import Rotation, rotate, rotation
from kvstore.kernels.rotate.naive import naive_rotate

Ints = NDArray[np.int32]

BEGIN, COUNT, PART, PARTS = range(4)
"""Columns of `StretchPlan.items`: the first of its lines; how many; the first of its parts; how many."""
TURNED, QUERY, PARTIAL = range(3)
"""Columns of `StretchPlan.lines`: which turned query; whose result it is; where the partial result goes."""
CHUNK, FIRST, TOKENS = range(3)
"""Columns of `StretchPlan.parts`: the chunk; the first of its tokens that count; how many count."""


class Stretch(NamedTuple):
    """Tokens [first, first + tokens) of a chunk, in one sequence."""

    chunk: int
    first: int
    tokens: int
    delta: int = 0
    """How far the tokens stand from the positions that their keys were computed at."""
    at: int = 0
    """The sequence's own tokens see them from this number on; those before do not."""


class Viewer(NamedTuple):
    """A sequence whose tokens of these numbers, which rise, are new: their queries begin at line `line` of q."""

    row: int
    line: int
    numbers: NDArray[Any]
    stretches: Sequence[Stretch]

    @property
    def new(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True, slots=True, eq=False)
class StretchPlan:
    """What a kernel reads: int32 arrays on the device of the forest.

    `items` [n, 4], largest first; `lines` [m, 3]; `parts` [k, 3]; `results` [queries, 2]: of each line of q how many
    partial results it has and where the first lies. `turned` and `deltas` [v] int64: of each turned query the line of q
    and by how far what it sees was moved. `partials` is the number of slots, `tile_queries` the most lines of an item.
    """

    items: torch.Tensor
    lines: torch.Tensor
    parts: torch.Tensor
    results: torch.Tensor
    turned: torch.Tensor
    deltas: torch.Tensor
    partials: int
    tile_queries: int
    moved: bool
    """Whether any delta is not 0."""
    rotations: dict[tuple[int, bool], tuple[torch.Tensor, Rotation]] = field(default_factory=dict, repr=False)
    """Kept for the other layers: by frequencies."""
    scratch: Scratch = field(default_factory=Scratch, repr=False)

    def turn(
        self, q: torch.Tensor, inv_freq: torch.Tensor | None, *, interleaved: bool = False
    ) -> torch.Tensor:
        """The queries [v, heads, head_dim] that the kernels take beside `q` [queries, heads, head_dim]: turned by
        -delta. `inv_freq`: of this layer, see `rotate.rotation`; None where keys have no positions, or nothing moved.
        Raises ValueError if there is something to turn and nothing to turn it by."""
        found = q.index_select(0, self.turned)
        if not self.moved or (inv_freq is not None and inv_freq.numel() == 0):
            return found
        if inv_freq is None:
            raise ValueError("keys were moved: give the model's inverse frequencies")
        if q.dtype is torch.float64:
            return naive_rotate(found, -self.deltas.unsqueeze(1), inv_freq, interleaved=interleaved)
        key = id(inv_freq), interleaved
        if key not in self.rotations:
            by = rotation(-self.deltas.unsqueeze(1), inv_freq, interleaved=interleaved)
            self.rotations[key] = (
                inv_freq,
                by,
            )  # which keeps the frequencies, and with them the number that names them
        return rotate(found, self.rotations[key][1])


def check_stretch(stretch: Stretch, *, chunks: int, chunk_tokens: int, tokens: int) -> Stretch:
    """Raises ValueError for one that does not lie in a chunk, or that none of `tokens` tokens sees."""
    chunk, first, count, _, at = stretch
    if not 0 <= chunk < chunks:
        raise ValueError(f"chunk is {chunk}: must be below chunks ({chunks}) and not negative")
    if not (first >= 0 and count >= 1 and first + count <= chunk_tokens):
        raise ValueError(f"tokens {first} to {first + count} of a chunk: it has {chunk_tokens}")
    if not 0 <= at < tokens:
        raise ValueError(f"at is {at}: must be below the {tokens} tokens of the sequence and not negative")
    return stretch


def plan_stretches(
    viewers: Sequence[Viewer],
    *,
    queries: int,
    split_tokens: int,
    tile_queries: int,
    share: bool,
    device: torch.device,
) -> StretchPlan | None:
    """None if nobody sees a stretch. `queries`: lines of q. `split_tokens`: tokens of an item at most, or those of one
    stretch. `tile_queries`: lines of an item at most. `share=False`: no item has queries of two sequences."""
    turned: list[NDArray[np.int64]] = []
    deltas: list[int] = []
    first_turned: dict[tuple[int, int], int] = {}
    seen: dict[tuple[int, ...], dict[int, tuple[int, int]]] = {}
    count = 0
    for number, viewer in enumerate(viewers):
        for chunk, first, tokens, delta, at in viewer.stretches:
            if at > viewer.numbers[-1]:
                continue
            if (number, delta) not in first_turned:
                first_turned[number, delta] = count
                turned.append(np.arange(viewer.line, viewer.line + viewer.new))
                deltas.append(delta)
                count += viewer.new
            time, own = 0, -1 if share else number
            while number in seen.setdefault((chunk, first, tokens, own, time), {}):
                time += 1  # it stands twice in this sequence
            seen[chunk, first, tokens, own, time][number] = delta, int(np.searchsorted(viewer.numbers, at))
    if not turned:
        return None
    groups: dict[tuple[tuple[int, tuple[int, int]], ...], list[tuple[int, int, int]]] = {}
    for (chunk, first, tokens, _, _), who in seen.items():
        groups.setdefault(tuple(who.items()), []).append((chunk, first, tokens))

    items: list[tuple[int, int, int, int, int]] = []
    lines: list[NDArray[np.int64]] = []
    parts: list[tuple[int, int, int]] = []
    per_query = np.zeros(queries, np.int64)
    lines_before = 0
    for users, group in groups.items():
        of_turned, of_query = (
            np.concatenate(
                [
                    np.arange(unseen, viewers[number].new) + begins[number, delta]
                    for number, (delta, unseen) in users
                ]
            )
            for begins in (
                first_turned,
                {(number, delta): viewers[number].line for number, delta in first_turned},
            )
        )
        for begin, end in _pieces(group, split_tokens):
            tokens = sum(part[TOKENS] for part in group[begin:end])
            lines.append(np.stack((of_turned, of_query, per_query[of_query]), 1))
            per_query[of_query] += 1
            for tile in range(0, len(of_query), tile_queries):
                some = min(tile_queries, len(of_query) - tile)
                items.append((lines_before + tile, some, len(parts), end - begin, tokens * some))
            lines_before += len(of_query)
            parts += group[begin:end]
    slots = np.cumsum(per_query) - per_query
    every_line = np.concatenate(lines)
    every_line[:, PARTIAL] += slots[every_line[:, QUERY]]
    work = np.array(items, np.int64)
    work = work[np.argsort(-work[:, -1], kind="stable"), :-1]
    arrays = (work, every_line, np.array(parts, np.int64), np.stack((per_query, slots), 1))
    numbers, all_lines, all_parts, results = (
        torch.from_numpy(np.ascontiguousarray(array, np.int32)).to(device) for array in arrays
    )
    of_deltas = np.repeat(np.array(deltas, np.int64), [len(each) for each in turned])
    return StretchPlan(
        numbers,
        all_lines,
        all_parts,
        results,
        torch.from_numpy(np.concatenate(turned)).to(device),
        torch.from_numpy(of_deltas).to(device),
        partials=int(per_query.sum()),
        tile_queries=int(work[:, COUNT].max()),
        moved=any(deltas),
    )


def _pieces(group: Sequence[tuple[int, int, int]], split_tokens: int) -> list[tuple[int, int]]:
    """Consecutive stretches with at most so many tokens, or one."""
    pieces: list[tuple[int, int]] = []
    begin, tokens = 0, 0
    for number, part in enumerate(group):
        if number > begin and tokens + part[TOKENS] > split_tokens:
            pieces.append((begin, number))
            begin, tokens = number, 0
        tokens += part[TOKENS]
    return [*pieces, (begin, len(group))]
