"""Which sequences share which chunks, as a list of bounded work items for attention kernels.

Sequences that begin with the same chunks form a tree; several system prompts make a forest. A *run* is a maximal
stretch of chunks that the same sequences share; what only one sequence has is its private run, tail included. The
sequences stand in an order in which every run covers a contiguous range. Sharing follows from equal chunk numbers at
equal places; only full chunks are shared, a tail that still grows is private (ChunkAttention, arXiv 2402.15220).

    row 0: a b c          order       0    2   1               items, at most split_tokens x tile_sequences
    row 1: d e            run  a    [------]                   a of rows 0, 2
    row 2: a f            runs b c, f, d e   [b c][ f ][d e]   b c of row 0;  f of row 2;  d e of row 1

Each run is cut into items along its tokens (pieces) and along its sequences (tiles). An item is the same in both phases
of two-phase attention: many sequences over shared chunks, or one over private ones. A sequence gets one partial result
for each piece of each of its runs, numbered in the order of its tokens; the kernels merge them.

What changes does so in place: the arrays keep size and address, a token more is one length more, and a CUDA graph that
was captured over them is replayed until a step needs more room (`Capacity`). A join or leave rebuilds the items of the
runs on that sequence's path.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.kernels.launch import Scratch
from kvstore.kernels.prefill.plan import PrefillPlan, Row, plan_prefill
from kvstore.kernels.stretches import Stretch, StretchPlan, Viewer, check_stretch, plan_stretches

Ints = NDArray[np.int32]

BEGIN, COUNT, FIRST, TOKENS, PARTIAL = range(5)
"""Columns of `Plan.items`: the place in `order` of its first sequence; how many sequences; its first token's number in
them; tokens at most (of a private run's last item, `rows` tells how many); which of their partial results it makes."""
LENGTH, PARTIALS, SLOT = range(3)
"""Columns of `Plan.rows`: tokens; partial results; where the first of them lies."""


CAPACITY_MIN = 64
"""The least that a step is given room for."""


class Capacity(NamedTuple):
    """What a step has room for: work items that programs are launched for, and slots for partial results. Both are
    powers of two, or all that the forest has, so that there are few of them: a CUDA graph is captured for each. It is
    right for every later state of its forest whose capacity is not larger in either."""

    items: int
    partials: int


def room_for(needed: int, most: int) -> int:
    """The least power of two, from CAPACITY_MIN on, that is enough; `most` at most."""
    return min(most, max(CAPACITY_MIN, 1 << max(needed - 1, 0).bit_length()))


Upload = Callable[[Sequence[tuple[torch.Tensor, torch.Tensor]]], None]
"""Each first tensor, of the device, becomes what the second, of the host, is at the call."""


def copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for there, here in pairs:
        there.copy_(here)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a kernel reads: int32 arrays on the forest's device, and the numbers that they were made for.

    `items` [items_max, 5] and `item_chunks` [items_max, split_tokens / chunk_tokens] are in no order; `schedule`
    [items_max] names them longest first, unused ones (COUNT is 0) last. `order` [sequences_max] has the row at each
    place. `rows` [sequences_max, 3] is all zero where a row is unused. Valid until the forest changes. A plan with
    another `capacity` is another object over the same arrays.
    """

    items: torch.Tensor
    item_chunks: torch.Tensor
    schedule: torch.Tensor
    order: torch.Tensor
    rows: torch.Tensor
    chunks: int
    chunk_tokens: int
    split_tokens: int
    tile_sequences: int
    capacity: Capacity
    scratch: Scratch = field(default_factory=Scratch, repr=False, compare=False)
    """Of the forest: the same for all of its plans."""
    stretches: StretchPlan | None = None
    """Of what the sequences see elsewhere. It changes, and with it its arrays, when a sequence with stretches joins or
    leaves."""
    divisions: dict[int, object] = field(default_factory=dict, repr=False, compare=False)
    """What the CPU path worked out from the arrays, kept for the other layers; `Forest.plan` empties it."""
    checked: set[object] = field(default_factory=set, repr=False, compare=False)
    """Shapes, strides and types of arguments that fit, see `arguments.check_attention`."""

    def arrays(self) -> tuple[torch.Tensor, ...]:
        return self.items, self.item_chunks, self.schedule, self.order, self.rows


@dataclass(slots=True, eq=False)
class _Run:
    """Chunks that the same sequences share; with `row` >= 0 the private run of that sequence, which has no children."""

    parent: _Run | None
    first: int
    """How many chunks come before it in each of its sequences."""
    chunks: list[int]
    count: int = 1
    row: int = -1
    children: dict[int, _Run] = field(default_factory=dict)
    """By first chunk. A private run is listed when its first chunk is full."""
    items: list[int] = field(default_factory=list)
    """Piece by piece; within a piece, in the order of the sequences."""


class Forest:
    """Sequences, named by their row in the batch (0 <= row < `sequences_max`). Not safe for concurrent use.

    * `chunk_tokens`, `chunks`: tokens of a chunk, chunks of the pool.
    * `split_tokens`: tokens of an item at most, a multiple of `chunk_tokens`.
    * `tile_sequences`: sequences of an item at most; for a kernel with tiles of R rows, R // (heads / kv_heads).
    * `items_max`, `partials_max`: the most there can be; by default, twice what sequences of `tokens_max` tokens need
      that share nothing.
    * `share=False`: all runs are private, to compare with.
    * `upload`: how what changed gets to the device, in the order of its stream; by default as torch copies, which holds
      up the caller.

    A change that is refused raises ValueError and leaves all as it was. The KV of a token is to be in the pool when a
    kernel runs after the token was added.
    """

    def __init__(
        self,
        *,
        chunk_tokens: int,
        chunks: int,
        sequences_max: int,
        split_tokens: int = 512,
        tile_sequences: int = 16,
        tokens_max: int = 4096,
        items_max: int | None = None,
        partials_max: int | None = None,
        share: bool = True,
        device: torch.device | str = "cpu",
        upload: Upload | None = None,
    ) -> None:
        pieces = max(1, -(-tokens_max // max(split_tokens, 1)))
        self.items_max = 2 * sequences_max * pieces if items_max is None else items_max
        self.partials_max = 2 * sequences_max * pieces if partials_max is None else partials_max
        for name, value in (
            *(("chunk_tokens", chunk_tokens), ("chunks", chunks), ("sequences_max", sequences_max)),
            *(("split_tokens", split_tokens), ("tile_sequences", tile_sequences), ("tokens_max", tokens_max)),
            *(("items_max", self.items_max), ("partials_max", self.partials_max)),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}: must be at least 1")
        if split_tokens % chunk_tokens:
            raise ValueError(
                f"split_tokens is {split_tokens}: must be a multiple of chunk_tokens ({chunk_tokens})"
            )
        self.chunk_tokens = chunk_tokens
        self.chunks = chunks
        self.sequences_max = sequences_max
        self.split_tokens = split_tokens
        self.tile_sequences = tile_sequences
        self.share = share
        self.device = torch.device(device)
        self._chunks_per_item = split_tokens // chunk_tokens

        self._items: Ints = np.zeros((self.items_max, 5), np.int32)
        self._item_chunks: Ints = np.zeros((self.items_max, self._chunks_per_item), np.int32)
        self._schedule: Ints = np.arange(self.items_max, dtype=np.int32)
        self._order: Ints = np.zeros(sequences_max, np.int32)
        self._rows: Ints = np.zeros((sequences_max, 3), np.int32)
        # Of each row: its place in the order, its partial results from shared runs, the first token of its private run
        self._place: Ints = np.full(sequences_max, -1, np.int32)
        self._shared_partials: Ints = np.zeros(sequences_max, np.int32)
        self._private_from: Ints = np.zeros(sequences_max, np.int32)
        self._roots: dict[int, _Run] = {}
        self._private: dict[int, _Run] = {}
        self._stretches: dict[int, tuple[Stretch, ...]] = {}
        self._free = list(range(self.items_max - 1, -1, -1))
        self._reach = 0
        """Items from here on were never used: those that are, are few where there is room for the worst case."""
        self._restretched = False
        self._reordered = False  # the schedule, the order and possibly all items are to be written anew

        host = (self._items, self._item_chunks, self._schedule, self._order, self._rows)
        self._host = [torch.from_numpy(array) for array in host]  # the same memory
        self._upload = upload or (copy_all if self.device.type != "cpu" else None)
        # On a CPU, the same memory again
        items, item_chunks, schedule, order, rows = (
            tensor.to(self.device, copy=self._upload is not None) for tensor in self._host
        )
        self._plan = Plan(
            *(items, item_chunks, schedule, order, rows),
            chunks=chunks,
            chunk_tokens=chunk_tokens,
            split_tokens=split_tokens,
            tile_sequences=tile_sequences,
            capacity=Capacity(*(room_for(0, most) for most in (self.items_max, self.partials_max))),
        )
        self._new_chunks: list[int] = []  # items whose chunks changed though nothing else did

    def __len__(self) -> int:
        return len(self._private)

    def __contains__(self, row: int) -> bool:
        return row in self._private

    def __repr__(self) -> str:
        return f"Forest({len(self)} sequences, {self.items_max - len(self._free)}/{self.items_max} items)"

    def length(self, row: int) -> int:
        """Tokens of a sequence."""
        self._run_of(row)
        return int(self._rows[row, LENGTH])

    def chunks_of(self, row: int) -> list[int]:
        """Chunk numbers of a sequence, from its first token on."""
        run: _Run | None = self._run_of(row)
        found: list[int] = []
        while run is not None:
            found[:0] = run.chunks
            run = run.parent
        return found

    def runs(self) -> Iterator[tuple[list[int], list[int], int]]:
        """Of every run that has chunks: its rows in order, its chunks, how many chunks come before it."""
        pending = [*self._roots.values(), *(run for run in self._private.values() if not self._listed(run))]
        while pending:
            run = pending.pop()
            pending += run.children.values()
            if run.chunks:
                begin = self._begin(run)
                yield self._order[begin : begin + run.count].tolist(), list(run.chunks), run.first

    # -- what changes

    def stretches_of(self, row: int) -> tuple[Stretch, ...]:
        """What a sequence sees beside its own chunks."""
        self._run_of(row)
        return self._stretches.get(row, ())

    def join(self, row: int, chunks: Sequence[int], tokens: int, stretches: Sequence[Stretch] = ()) -> None:
        """Add a sequence of `tokens` tokens in these chunks, of which the last one need not be full. `stretches`: what
        it sees elsewhere, before its own tokens or from one of them on."""
        if not 0 <= row < self.sequences_max:
            raise ValueError(
                f"row is {row}: must be below sequences_max ({self.sequences_max}) and not negative"
            )
        if row in self._private:
            raise ValueError(f"row {row} is in use: let its sequence leave first")
        if tokens < 0 or len(chunks) != -(-tokens // self.chunk_tokens):
            raise ValueError(f"{tokens} tokens do not fill {len(chunks)} chunks of {self.chunk_tokens}")
        chunks = [self._valid(chunk) for chunk in chunks]
        for stretch in stretches:
            check_stretch(stretch, chunks=self.chunks, chunk_tokens=self.chunk_tokens, tokens=tokens)
        full = tokens // self.chunk_tokens
        parent, cut, at = self._longest_prefix(chunks[:full] if self.share else [])
        self._check_room(parent, cut, private_chunks=len(chunks) - at)

        # Its place is the end of the deepest run it shares: inside of all runs on its path, outside of all others
        deepest = cut[0] if cut else parent
        place = len(self) if deepest is None else self._begin(deepest) + deepest.count
        self._order[place + 1 : len(self) + 1] = self._order[place : len(self)].copy()
        self._order[place] = row
        self._place[self._place >= place] += 1
        self._place[row] = place
        items = self._items[: self._reach]
        items[(items[:, BEGIN] >= place) & (items[:, COUNT] > 0), BEGIN] += 1

        if cut:
            parent = self._cut(*cut)
        run = _Run(parent, at, chunks[at:], row=row)
        self._private[row] = run
        self._rows[row, LENGTH] = tokens
        if self.share and full > at:
            self._siblings(run)[run.chunks[0]] = run
        self._lay_out(run, place)
        self._recount(parent, +1)
        if stretches:
            self._stretches[row] = tuple(stretches)
            self._restretched = True
        self._reordered = True

    def leave(self, row: int) -> None:
        """Remove a sequence; its row is free again."""
        run = self._run_of(row)
        place, parent = self._begin(run), run.parent
        if self._listed(run):
            del self._siblings(run)[run.chunks[0]]
        self._release(run)
        del self._private[row]
        self._restretched |= self._stretches.pop(row, None) is not None
        self._order[place : len(self)] = self._order[place + 1 : len(self) + 1].copy()
        self._place[self._place > place] -= 1
        self._place[row] = -1
        items = self._items[: self._reach]
        items[items[:, BEGIN] > place, BEGIN] -= 1
        self._rows[row] = 0
        self._shared_partials[row] = 0
        self._private_from[row] = 0
        self._recount(parent, -1)
        if parent is not None:
            self._unite(parent)
        self._reordered = True

    def append(self, row: int, chunk: int | None = None) -> None:
        """A token more. `chunk` is where it goes if all of the sequence's chunks are full, else None."""
        self._run_of(row)
        self._append([row], {} if chunk is None else {row: chunk})

    def extend(self, row: int, chunks: Sequence[int], tokens: int) -> None:
        """More tokens, as before another piece of a prompt: the sequence now has `tokens` of them, the new ones behind
        the old ones in its chunks and in `chunks`, which come after those."""
        old, length, stretches = self.chunks_of(row), self.length(row), self.stretches_of(row)
        if tokens < length:
            raise ValueError(f"tokens is {tokens}: row {row} has {length} already")
        self.leave(row)
        try:
            self.join(row, [*old, *chunks], tokens, stretches)
        except ValueError:
            self.join(row, old, length, stretches)
            raise

    def step(self, chunks: Mapping[int, int] | None = None) -> None:
        """A token more for every sequence. `chunks` has a chunk for each row whose chunks are all full."""
        self._append(list(self._private), chunks or {})

    def plan(self) -> Plan:
        """The arrays as things are now; what changed since the last call is copied to the device, in stream order."""
        self._rows[:, PARTIALS] = self._shared_partials + self._own_partials()
        self._rows[1:, SLOT] = np.cumsum(self._rows[:-1, PARTIALS])
        if self._reordered:
            # Stable: the tiles of a piece stay neighbours, so that its chunks are read from the cache
            cost = np.where(self._items[: self._reach, COUNT] > 0, self._item_tokens(), -1)
            self._schedule[: self._reach] = np.argsort(-cost, kind="stable")
        if self._upload is not None:
            *of_items, order, rows = zip(self._plan.arrays(), self._host, strict=True)
            changed = [rows]
            if self._reordered:
                used = of_items if self._reach else ()
                changed += [(there[: self._reach], here[: self._reach]) for there, here in used]
                changed.append(order)
            if self._new_chunks and not self._reordered:
                low, high = min(self._new_chunks), max(self._new_chunks) + 1
                changed.append(
                    (self._plan.item_chunks[low:high], torch.from_numpy(self._item_chunks[low:high]))
                )
            self._upload(changed)
        self._reordered = False
        self._new_chunks.clear()
        self._plan.divisions.clear()
        capacity = Capacity(
            room_for(self.items_max - len(self._free), self.items_max),
            room_for(int(self._rows[:, PARTIALS].sum()), self.partials_max),
        )
        if capacity != self._plan.capacity:
            self._plan = replace(self._plan, capacity=capacity)
        if self._restretched:
            self._plan = replace(self._plan, stretches=self._plan_stretches(), divisions={})
            self._restretched = False
        return self._plan

    def _plan_stretches(self) -> StretchPlan | None:
        """Of the newest token of each sequence, which sees all of its stretches."""
        viewers = [
            Viewer(row, line=row, numbers=self._rows[row, LENGTH : LENGTH + 1] - 1, stretches=stretches)
            for row, stretches in sorted(self._stretches.items())
        ]
        return plan_stretches(
            viewers,
            queries=self.sequences_max,
            split_tokens=self.split_tokens,
            tile_queries=self.tile_sequences,
            share=self.share,
            device=self.device,
        )

    def prefill(
        self,
        new_tokens: Mapping[int, int | Sequence[int]],
        *,
        tile_queries: int | None = None,
        split_tokens: int | None = None,
    ) -> PrefillPlan:
        """The work of `prefill_attention` for the last `new_tokens` of these rows' tokens, in the order given; or for
        the tokens of these numbers, which rise: those in between are in the pool already.

        * `tile_queries`: queries of an item at most; by default 512 on a CPU, 128 on a GPU.
        * `split_tokens`: tokens of an item, a multiple of `chunk_tokens`. By default there is no limit on a CPU, and on
          a GPU one that makes enough items for its processors.

        Raises ValueError for rows without a sequence or with other tokens, and for settings that do not fit.
        """
        for name, value in (("tile_queries", tile_queries), ("split_tokens", split_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: must be at least 1")
        if split_tokens is not None and split_tokens % self.chunk_tokens:
            raise ValueError(
                f"split_tokens is {split_tokens}: must be a multiple of chunk_tokens ({self.chunk_tokens})"
            )
        rows: dict[int, Row] = {}
        line = 0
        for row, new in new_tokens.items():
            rows[row] = Row(line, self._numbers(row, new), self.chunks_of(row))
            line += rows[row].new
        order = sorted(rows, key=lambda row: int(self._place[row]))
        places = [int(self._place[row]) for row in order]
        shared = (run for run in self._all_runs() if run.row < 0)
        runs = []
        for run in sorted(shared, key=lambda run: run.first):
            begin = self._begin(run)
            users = range(bisect_left(places, begin), bisect_left(places, begin + run.count))
            runs.append((users, run.first, run.first + len(run.chunks)))
        tile_queries = tile_queries or (512 if self.device.type == "cpu" else 128)
        stretches = plan_stretches(
            [
                Viewer(row, line=one.line, numbers=one.numbers, stretches=self._stretches[row])
                for row, one in rows.items()
                if row in self._stretches
            ],
            queries=line,
            split_tokens=split_tokens or self.split_tokens,
            tile_queries=tile_queries,
            share=self.share,
            device=self.device,
        )
        return plan_prefill(
            [rows[row] for row in order],
            runs,
            chunks=self.chunks,
            chunk_tokens=self.chunk_tokens,
            tile_queries=tile_queries,
            split_tokens=split_tokens,
            device=self.device,
            stretches=stretches,
        )

    def _numbers(self, row: int, new: int | Sequence[int]) -> NDArray[np.int64]:
        """Of a row's new tokens."""
        tokens = self.length(row)
        if isinstance(new, int):
            if not 1 <= new <= tokens:
                raise ValueError(
                    f"row {row} has {new} new tokens: must be at least 1 and at most its {tokens}"
                )
            return np.arange(tokens - new, tokens)
        numbers = np.asarray(new, np.int64)
        if not numbers.size or numbers[0] < 0 or (np.diff(numbers) <= 0).any() or numbers[-1] >= tokens:
            raise ValueError(
                f"row {row} has these new tokens: {numbers[:8].tolist()}: their numbers must rise, and be below its"
                f" {tokens} tokens"
            )
        return numbers

    def check_integrity(self) -> None:
        """Assert what only a bug could break; for tests."""
        used = [item for run in self._all_runs() for item in run.items]
        assert sorted(used + self._free) == list(range(self.items_max)), "an item is lost or in two runs"
        assert (self._items[self._free] == 0).all(), "a free item is not empty"
        assert not used or max(used) < self._reach, (max(used), self._reach)
        assert sorted(self._order[: len(self)].tolist()) == sorted(self._private)
        assert self._stretches.keys() <= self._private.keys(), "stretches of a sequence that left"
        for row, run in self._private.items():
            assert self._order[self._place[row]] == row
            assert len(self.chunks_of(row)) == -(-self.length(row) // self.chunk_tokens)
            assert self._private_from[row] == run.first * self.chunk_tokens
            assert self._shared_partials[row] == self._next_partial(run.parent)
        for run in self._all_runs():
            pieces = self._pieces(len(run.chunks))
            tiles = -(-run.count // self.tile_sequences)
            assert len(run.items) == pieces * tiles, (run.first, run.count, run.items)
            for number, item in enumerate(run.items):
                piece, tile = divmod(number, tiles)
                assert self._items[item, BEGIN] == self._begin(run) + tile * self.tile_sequences
                assert self._items[item, PARTIAL] == self._next_partial(run.parent) + piece
            if run.row < 0:
                begin = self._begin(run)
                below = [other for other in self._all_runs() if other.parent is run]
                assert run.count >= 2 and run.count == sum(other.count for other in below)
                assert all(other.count < run.count for other in below), "two runs should be one"
                covered = sorted(self._begin(other) + n for other in below for n in range(other.count))
                assert covered == list(range(begin, begin + run.count)), "sequences of a run lie apart"

    # -- runs

    def _append(self, rows: list[int], chunks: Mapping[int, int]) -> None:
        lengths = self._rows[rows, LENGTH]
        filled = lengths % self.chunk_tokens == 0
        wanting = {row for row, full in zip(rows, filled.tolist(), strict=True) if full}
        if wanting != set(chunks):
            raise ValueError(
                f"rows {sorted(wanting)} need a new chunk, but chunks are given for {sorted(chunks)}"
            )
        new = {row: self._valid(chunk) for row, chunk in chunks.items()}
        pieces = sum(len(self._private[row].chunks) % self._chunks_per_item == 0 for row in new)
        self._check_capacity(items=pieces, partials=pieces)

        for row, chunk in new.items():
            run = self._private[row]
            piece, column = divmod(len(run.chunks), self._chunks_per_item)
            run.chunks.append(chunk)
            if column == 0:
                item = self._new_item()
                first = run.first * self.chunk_tokens + piece * self.split_tokens
                partial = self._shared_partials[row] + piece
                self._items[item] = (self._place[row], 1, first, self.split_tokens, partial)
                run.items.append(item)
                self._reordered = True
            self._item_chunks[run.items[-1], column] = chunk
            self._new_chunks.append(run.items[-1])
        self._rows[rows, LENGTH] += 1
        if self.share:
            for row in np.asarray(rows)[(lengths + 1) % self.chunk_tokens == 0].tolist():
                run = self._private[row]
                if self._full(run) == 1:
                    self._siblings(run).setdefault(run.chunks[0], run)

    def _longest_prefix(self, chunks: list[int]) -> tuple[_Run | None, tuple[_Run, int] | None, int]:
        """(the deepest run all of whose chunks these begin with; a run below it and how many of its chunks these go on
        with, if not all or if it is private; how many chunks are shared in all)."""
        parent: _Run | None = None
        siblings, at = self._roots, 0
        while at < len(chunks) and (run := siblings.get(chunks[at])) is not None:
            here = len(run.chunks) if run.row < 0 else self._full(run)
            same = 0
            while same < min(here, len(chunks) - at) and run.chunks[same] == chunks[at + same]:
                same += 1
            if run.row >= 0 or same < here:
                return parent, (run, same), at + same
            parent, siblings, at = run, run.children, at + same
        return parent, None, at

    def _cut(self, run: _Run, chunks: int) -> _Run:
        """Make the first `chunks` chunks of a run a run of their own, above it."""
        begin, pieces = self._begin(run), self._pieces(len(run.chunks))
        self._release(run)
        upper = _Run(run.parent, run.first, run.chunks[:chunks], count=run.count)
        self._siblings(run)[upper.chunks[0]] = upper
        run.parent, run.first, run.chunks = upper, run.first + chunks, run.chunks[chunks:]
        if run.row < 0 or self._full(run):
            upper.children[run.chunks[0]] = run
        self._lay_out(upper, begin)
        self._lay_out(run, begin)
        if run.row < 0:
            more = self._pieces(len(upper.chunks)) + self._pieces(len(run.chunks)) - pieces
            self._renumber_below(run, more)
        return upper

    def _unite(self, run: _Run) -> None:
        """Of a run that lost a sequence: unite it with the one below, if the same sequences have both."""
        begin = self._begin(run)
        if run.count == 1:
            lower = self._private[int(self._order[begin])]
        else:
            found = next((child for child in run.children.values() if child.count == run.count), None)
            if found is None:
                return
            lower = found
        pieces = self._pieces(len(run.chunks)) + self._pieces(len(lower.chunks))
        assert lower.parent is run, "a run of one sequence has only its private run below"
        self._release(run)
        self._release(lower)
        self._siblings(run)[run.chunks[0]] = lower
        lower.parent, lower.first, lower.chunks = run.parent, run.first, run.chunks + lower.chunks
        self._lay_out(lower, begin)
        if lower.row < 0:
            self._renumber_below(lower, self._pieces(len(lower.chunks)) - pieces)

    def _recount(self, run: _Run | None, change: int) -> None:
        """A sequence joined or left this run and those above."""
        while run is not None:
            begin = self._begin(run)
            run.count += change
            self._lay_out(run, begin)
            run = run.parent

    def _lay_out(self, run: _Run, begin: int) -> None:
        """Write the items of a run whose first sequence stands at place `begin`."""
        self._release(run)
        partial = self._next_partial(run.parent)
        chunk = 0
        for piece, size in enumerate(self._piece_sizes(run)):
            for tile in range(0, run.count, self.tile_sequences):
                item = self._new_item()
                run.items.append(item)
                self._items[item] = (
                    begin + tile,
                    min(self.tile_sequences, run.count - tile),
                    (run.first + chunk) * self.chunk_tokens,
                    self.split_tokens if run.row >= 0 else size * self.chunk_tokens,
                    partial + piece,
                )
                self._item_chunks[item, :size] = run.chunks[chunk : chunk + size]
            chunk += size
        if run.row >= 0:
            self._shared_partials[run.row] = partial
            self._private_from[run.row] = run.first * self.chunk_tokens

    def _new_item(self) -> int:
        item = self._free.pop()
        self._reach = max(self._reach, item + 1)
        return item

    def _release(self, run: _Run) -> None:
        self._items[run.items] = 0
        self._free += reversed(run.items)
        run.items.clear()

    def _renumber_below(self, run: _Run, change: int) -> None:
        begin, end = self._begin(run), self._begin(run) + run.count
        items = self._items[: self._reach]
        inside = (items[:, BEGIN] >= begin) & (items[:, BEGIN] < end) & (items[:, COUNT] > 0)
        below = items[:, FIRST] >= (run.first + len(run.chunks)) * self.chunk_tokens
        items[inside & below, PARTIAL] += change
        self._shared_partials[self._order[begin:end]] += change

    # -- numbers

    def _pieces(self, chunks: int) -> int:
        return -(-chunks // self._chunks_per_item)

    def _piece_sizes(self, run: _Run) -> list[int]:
        """Chunks of each piece. A private run's grow at the end, so all but the last are full; else they are alike."""
        chunks, pieces = len(run.chunks), self._pieces(len(run.chunks))
        if run.row >= 0:
            return [min(self._chunks_per_item, chunks - n * self._chunks_per_item) for n in range(pieces)]
        return [chunks // pieces + (n < chunks % pieces) for n in range(pieces)]

    def _begin(self, run: _Run) -> int:
        return int(self._place[run.row] if run.row >= 0 else self._items[run.items[0], BEGIN])

    def _full(self, run: _Run) -> int:
        """Full chunks of a private run."""
        return int(self._rows[run.row, LENGTH]) // self.chunk_tokens - run.first

    def _next_partial(self, run: _Run | None) -> int:
        """The number of partial results that a sequence gets from this run and those above."""
        if run is None:
            return 0
        return int(self._items[run.items[0], PARTIAL]) + self._pieces(len(run.chunks))

    def _own_partials(self) -> Ints:
        """Of each row, from its private run."""
        pieces: Ints = -((self._private_from - self._rows[:, LENGTH]) // self.split_tokens)
        return pieces

    def _item_tokens(self) -> Ints:
        """Tokens that each used item has now, up to the last that was ever used."""
        items = self._items[: self._reach]
        lengths = self._rows[self._order[items[:, BEGIN]], LENGTH]
        tokens: Ints = np.minimum(items[:, TOKENS], lengths - items[:, FIRST])
        return tokens

    def _siblings(self, run: _Run) -> dict[int, _Run]:
        return self._roots if run.parent is None else run.parent.children

    def _listed(self, run: _Run) -> bool:
        return bool(run.chunks) and self._siblings(run).get(run.chunks[0]) is run

    def _all_runs(self) -> list[_Run]:
        shared: dict[int, _Run] = {}
        for run in self._private.values():
            above = run.parent
            while above is not None and id(above) not in shared:
                shared[id(above)] = above
                above = above.parent
        return [*self._private.values(), *shared.values()]

    # -- what is refused

    def _run_of(self, row: int) -> _Run:
        if row not in self._private:
            raise ValueError(f"row {row} has no sequence: let one join first")
        return self._private[row]

    def _valid(self, chunk: int) -> int:
        if not 0 <= chunk < self.chunks:
            raise ValueError(f"chunk is {chunk}: must be below chunks ({self.chunks}) and not negative")
        return int(chunk)

    def _check_room(self, parent: _Run | None, cut: tuple[_Run, int] | None, *, private_chunks: int) -> None:
        """Refuse a join that needs more items or partial results than there are."""
        own = self._pieces(private_chunks)
        items, partials = own, own + self._next_partial(parent)
        run = parent
        while run is not None:
            items += self._pieces(len(run.chunks)) * self._tiles(run.count + 1) - len(run.items)
            run = run.parent
        if cut:
            lower, at = cut
            above, below = self._pieces(at), self._pieces(len(lower.chunks) - at)
            items += (
                above * self._tiles(lower.count + 1) + below * self._tiles(lower.count) - len(lower.items)
            )
            partials += above + lower.count * (above + below - self._pieces(len(lower.chunks)))
        self._check_capacity(items=items, partials=partials)

    def _tiles(self, count: int) -> int:
        return -(-count // self.tile_sequences)

    def _check_capacity(self, *, items: int, partials: int) -> None:
        partials += int((self._shared_partials + self._own_partials()).sum())
        for name, needed, most in (
            ("items_max", items + self.items_max - len(self._free), self.items_max),
            ("partials_max", partials, self.partials_max),
        ):
            if needed > most:
                raise ValueError(
                    f"{needed} are needed but {name} is {most}: raise it or use a larger split_tokens"
                )
