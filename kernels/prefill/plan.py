"""Which new tokens attend to which stretches of KV, as a list of work items for prefill attention.

A query is a new token; queries stand in the order of the forest's sequences, those of a row one after the other. A run
that several rows share is attended to by the queries of all of them together, as far as it is cached for all; what
remains of a row's tokens, the new ones included, by its own queries. Joined only where that makes the tiles fewer: a
product of `tile_queries` queries is as good as one can get, whoever they belong to, and each joint stretch costs every
query one partial result more.

    row 0: 6 cached, 3 new     queries    0 1 2 | 3 4        items, at most tile_queries x split_tokens
    row 1: 6 cached, 2 new     a b        [-----------]      joint: all see all of it
    chunks a b c / a b d       c, d       [.----] [.--]      own: a query sees what is not after it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.kernels.launch import Scratch
from kvstore.kernels.stretches import StretchPlan

Ints = NDArray[np.int32]

BEGIN, COUNT, FIRST, TOKENS, PARTIAL, TABLE = range(6)
"""Columns of `PrefillPlan.items`: the place in `order` of its first query; how many queries; its first token's number
in their sequences; its tokens; which of their partial results it makes; the line of `tables` with its chunks."""
LIMIT, PARTIALS, SLOT = range(3)
"""Columns of `PrefillPlan.queries`: how many tokens it sees, itself the last; partial results; where the first lies."""
JOINT_TILES_MAX = 0.75
"""A run is attended to together if that makes of the tiles at most this part."""
ITEMS_WANTED = 64
"""With fewer, the processors of a GPU are not all used: long stretches are cut."""
SPLIT_TOKENS_MIN = 512
"""A partial result of a query costs as much as reading some tokens does."""


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """What a kernel reads: int32 arrays on the forest's device, and the numbers that they were made for.

    `items` [n, 6], longest first. `order` [tokens] has the line of `q` at each place, `queries` [tokens, 3] says what
    the query of each line of `q` sees. `tables` [rows, most chunks of a row] has the chunk numbers of each row, from
    its first token on. All queries of an item see its first token. `tile_queries` is the most queries of an item,
    `partials` the number of slots for partial results, 0 if no query has several or sees a stretch. The plan does not
    change with its forest, and is valid while its chunks are.
    """

    items: torch.Tensor
    tables: torch.Tensor
    order: torch.Tensor
    queries: torch.Tensor
    chunks: int
    chunk_tokens: int
    tile_queries: int
    partials: int
    stretches: StretchPlan | None = None
    """Of what the sequences see elsewhere."""
    rows: tuple[tuple[int, int, int], ...] = ()
    """Of each line of `tables`: its first line of q, how many it has there, and tokens that all of these see; none at
    all where some sequence's new tokens do not follow one another."""
    masks: dict[object, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)
    """See `cpu.py`: the same in all layers."""
    scratch: Scratch = field(default_factory=Scratch, repr=False, compare=False)
    checked: set[object] = field(default_factory=set, repr=False, compare=False)
    """Shapes, strides and types of arguments that fit, see `arguments.check_attention`."""

    def arrays(self) -> tuple[torch.Tensor, ...]:
        return self.items, self.tables, self.order, self.queries


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A sequence with new tokens: its first line of `q`, the new tokens' numbers in it, which rise and need not follow
    one another, and its chunks."""

    line: int
    numbers: NDArray[np.int64]
    chunks: Sequence[int]

    @property
    def tokens(self) -> int:
        """That the last new one sees."""
        return int(self.numbers[-1]) + 1

    @property
    def cached(self) -> int:
        """Tokens that all new ones see, themselves left out."""
        return int(self.numbers[0])

    @property
    def new(self) -> int:
        return len(self.numbers)


def plan_prefill(
    rows: Sequence[Row],
    runs: Sequence[tuple[range, int, int]],
    *,
    chunks: int,
    chunk_tokens: int,
    tile_queries: int,
    split_tokens: int | None,
    device: torch.device,
    stretches: StretchPlan | None = None,
) -> PrefillPlan:
    """`rows` in the order of the forest; `runs`: (which of the rows share it, its first chunk's place, its end), those
    that come before others in a sequence first."""
    new = np.array([row.new for row in rows], np.int64)
    starts = np.concatenate(([0], np.cumsum(new)))  # of each row's queries
    joint = [stretch for run in runs if (stretch := _joint(rows, new, run, chunk_tokens, tile_queries))]
    if split_tokens is None:
        split_tokens = _split(rows, chunk_tokens, tile_queries, device)
    split_chunks = split_tokens // chunk_tokens

    items: list[tuple[int, int, int, int, int, int]] = []
    partials = np.ones(int(starts[-1]), np.int64)
    pieces_before = [0] * len(rows)
    reached = [0] * len(rows)  # chunks of each row that have an item

    def attend(begin: int, end: int, table: int, first: int, last: int, tokens: int) -> int:
        """Items of the queries from `begin` to `end` over chunks from `first` on and, in the last piece, all up to
        `tokens`; cut before `last` only. The number of pieces."""
        pieces = max(1, -(-(last - first) // split_chunks))
        edges = [first + (last - first) * piece // pieces for piece in range(pieces)]
        ends = [*(edge * chunk_tokens for edge in edges[1:]), tokens]
        for number, (edge, until) in enumerate(zip(edges, ends, strict=True)):
            at = edge * chunk_tokens
            items.append((begin, end - begin, at, until - at, pieces_before[table] + number, table))
        return pieces

    for users, first, end in joint:
        table = users[0]
        if reached[table] < first:  # what comes before is not joint
            for user in users:
                span = int(starts[user]), int(starts[user + 1])
                for begin in range(*span, tile_queries):
                    pieces = attend(
                        *(begin, min(begin + tile_queries, span[1]), user, reached[user]),
                        *(first, first * chunk_tokens),
                    )
                pieces_before[user] += pieces
        span = int(starts[users[0]]), int(starts[users[-1] + 1])
        for begin in range(*span, tile_queries):
            pieces = attend(begin, min(begin + tile_queries, span[1]), table, first, end, end * chunk_tokens)
        for user in users:
            pieces_before[user] += pieces
            reached[user] = end
    for number, row in enumerate(rows):
        for begin in range(0, row.new, tile_queries):
            end = min(begin + tile_queries, row.new)
            at = int(starts[number])
            # A piece that begins later is not seen by the first query
            last = int(row.numbers[begin]) // chunk_tokens
            tokens = int(row.numbers[end - 1]) + 1
            pieces = attend(at + begin, at + end, number, reached[number], last, tokens)
            partials[at + begin : at + end] = pieces_before[number] + pieces

    work, tables, order, queries = _moved(_arrays(rows, starts, items, partials), device)
    return PrefillPlan(
        *(work, tables, order, queries),
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        tile_queries=max((item[COUNT] for item in items), default=0),
        partials=int(partials.sum()) if stretches is not None or (partials > 1).any() else 0,
        stretches=stretches,
        rows=_spans(rows),
    )


def _spans(rows: Sequence[Row]) -> tuple[tuple[int, int, int], ...]:
    if any(int(row.numbers[-1]) - int(row.numbers[0]) != row.new - 1 for row in rows):
        return ()
    return tuple((row.line, row.new, row.cached) for row in rows)


def _split(rows: Sequence[Row], chunk_tokens: int, tile_queries: int, device: torch.device) -> int:
    """Tokens of an item: what makes ITEMS_WANTED items on a GPU, but not less than SPLIT_TOKENS_MIN."""
    if device.type == "cpu":
        return chunk_tokens * max((len(row.chunks) for row in rows), default=1)
    work = sum(-(-row.new // tile_queries) * row.tokens for row in rows)
    return chunk_tokens * -(-max(SPLIT_TOKENS_MIN, work // ITEMS_WANTED) // chunk_tokens)


def _joint(
    rows: Sequence[Row],
    new: NDArray[np.int64],
    run: tuple[range, int, int],
    chunk_tokens: int,
    tile_queries: int,
) -> tuple[range, int, int] | None:
    """The part of a run that its rows attend to together, if that makes tiles fewer."""
    users, first, end = run
    if len(users) < 2:
        return None
    counts = new[users.start : users.stop]
    together, apart = -(-counts.sum() // tile_queries), (-(-counts // tile_queries)).sum()
    end = min(end, *(rows[user].cached // chunk_tokens for user in users))
    return (users, first, end) if end > first and together <= JOINT_TILES_MAX * apart else None


def _arrays(
    rows: Sequence[Row],
    starts: NDArray[np.int64],
    items: list[tuple[int, int, int, int, int, int]],
    partials: NDArray[np.int64],
) -> list[Ints]:
    work = np.array(items, np.int32).reshape(-1, 6)
    longest_first = np.argsort(-work[:, TOKENS].astype(np.int64) * work[:, COUNT], kind="stable")
    tables = np.zeros((len(rows), max((len(row.chunks) for row in rows), default=0)), np.int32)
    order = np.zeros(len(partials), np.int32)
    limits = np.zeros(len(partials), np.int32)
    for number, row in enumerate(rows):
        here = slice(int(starts[number]), int(starts[number + 1]))
        tables[number, : len(row.chunks)] = row.chunks
        order[here] = np.arange(row.line, row.line + row.new)
        limits[here] = row.numbers + 1
    queries = np.empty((len(partials), 3), np.int32)
    queries[order] = np.stack((limits, partials, np.cumsum(partials) - partials), 1)
    return [work[longest_first], tables, order, queries]


def _moved(arrays: list[Ints], device: torch.device) -> list[torch.Tensor]:
    """All in one copy, in stream order, each at a multiple of 16 bytes: kernels are compiled for that."""
    sizes = [-(-array.size // 4) * 4 for array in arrays]
    flat = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    for part, array in zip(flat.split(sizes), arrays, strict=True):
        part[: array.size] = torch.from_numpy(array.ravel())
    if device.type != "cpu":
        flat = flat.to(device, non_blocking=True)
    parts = flat.split(sizes)
    return [part[: array.size].view(array.shape) for part, array in zip(parts, arrays, strict=True)]
