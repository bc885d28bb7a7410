"""Eviction policies of others over the same turns: what the core's are judged by. Two tiers that hold a thing once,
DRAM above SSD; what leaves DRAM goes to SSD, what is used on SSD comes back.

    lru, fifo   of chunks
    s3-fifo     a small queue of a tenth, a main one and ghosts (Yang et al., SOSP 2023)
    gdsf        frequency and age: H = L + uses (Cherkasova, 1998; chunks are equal in size and cost)
    belady      what is asked for again latest goes first, and what is not asked for sooner than everything else never
                stays; of one turn the end of the chain (Belady, 1966): nothing does better that holds chunks
    paper       AttentionStore, section 3.3: whole sessions as items, least recently used first; those in the
                look-ahead window, (C_mem + C_disk) / S_kv jobs with the average S_kv, go last, its tail first; those in
                the prefetch window of C_mem / S_kv jobs come to DRAM ahead of need

Nothing here takes time: a prefetch is always there in time, which flatters the baselines.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import count
from typing import Any

from kvstore.errors import BadRequest
from kvstore.replay.machine import Result
from kvstore.replay.trace import Trace, Turn

NEVER = 1 << 60


class Shelf(ABC):
    """What one tier holds, and what leaves it next."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.sizes: dict[Hashable, int] = {}
        self.used = 0

    def __contains__(self, item: Hashable) -> bool:
        return item in self.sizes

    def put(self, item: Hashable, size: int, value: Any) -> None:
        """`value`: what the policy says of the item; the smallest leaves first."""
        self.used += size - self.sizes.get(item, 0)
        self.sizes[item] = size
        self.valued(item, value)

    def take(self, item: Hashable) -> int:
        size = self.sizes.pop(item)
        self.used -= size
        return size

    @abstractmethod
    def valued(self, item: Hashable, value: Any) -> None: ...

    @abstractmethod
    def victim(self) -> Hashable:
        """It is still here."""


class Heap(Shelf):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.values: dict[Hashable, Any] = {}
        self._heap: list[tuple[Any, int, Hashable]] = []
        self._order = count()

    def valued(self, item: Hashable, value: Any) -> None:
        self.values[item] = value
        heapq.heappush(self._heap, (value, next(self._order), item))

    def victim(self) -> Hashable:
        while True:
            value, _, item = self._heap[0]
            if item in self.sizes and self.values[item] == value:
                return item
            heapq.heappop(self._heap)


class S3Fifo(Shelf):
    """`value` is 0 for what is new here, and 1 for a use."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small: OrderedDict[Hashable, None] = OrderedDict()
        self._main: OrderedDict[Hashable, None] = OrderedDict()
        self._ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self._uses: Counter[Hashable] = Counter()

    def valued(self, item: Hashable, value: Any) -> None:
        if item in self._small or item in self._main:
            self._uses[item] = min(3, self._uses[item] + 1)
        elif item in self._ghosts:
            del self._ghosts[item]
            self._main[item] = None
        else:
            self._small[item] = None

    def take(self, item: Hashable) -> int:
        self._small.pop(item, None)
        self._main.pop(item, None)
        self._uses.pop(item, None)
        return super().take(item)

    def victim(self) -> Hashable:
        while True:
            if self._small and (len(self._small) > self.capacity // 10 or not self._main):
                item = next(iter(self._small))
                if self._uses[item] > 1:
                    del self._small[item]
                    self._main[item] = None
                    self._uses[item] = 0
                    continue
                self._ghosts[item] = None
                while len(self._ghosts) > self.capacity:
                    self._ghosts.popitem(last=False)
                return item
            item = next(iter(self._main))
            if not self._uses[item]:
                return item
            self._uses[item] -= 1
            self._main.move_to_end(item)


class Baseline:
    """Chunks, each by itself."""

    shelf: Callable[[int], Shelf] = Heap

    def __init__(self, trace: Trace, dram_chunks: int, ssd_chunks: int) -> None:
        self.trace = trace
        self.dram = self.shelf(dram_chunks)
        self.ssd = self.shelf(ssd_chunks)
        self.step = 0
        self.written = self.read = 0

    def serve(self, number: int, turn: Turn, ahead: range) -> tuple[int, int]:
        """Leading chunks of the prompt found in DRAM, and on SSD; then the turn's chunks are here."""
        self.step += 1
        in_dram = on_ssd = 0
        for chunk in turn.chunks:
            if chunk in self.dram:
                in_dram += 1
            elif chunk in self.ssd:
                on_ssd += 1
            else:
                break
        chunks = (*turn.chunks, *turn.answer)
        for depth in range(len(chunks) - 1, -1, -1):
            self.use(chunks[depth], self.value(chunks[depth], number, depth))
        self.shrink()
        return in_dram, on_ssd

    def value(self, chunk: Hashable, number: int, depth: int) -> Any:
        """A chunk is used now; of the turn's the end of the chain comes first."""
        return (self.step, -depth)

    def use(self, item: Hashable, value: Any, size: int = 1) -> None:
        if item in self.ssd:
            self.read += self.ssd.take(item)
        self.dram.put(item, size, value)

    def shrink(self) -> None:
        while self.dram.used > self.dram.capacity:
            item = self.dram.victim()
            value = self.dram.values[item] if isinstance(self.dram, Heap) else 0
            size = self.dram.take(item)
            if size <= self.ssd.capacity:
                self.written += size
                self.ssd.put(item, size, value)
            else:
                self.left(item, value)
        while self.ssd.used > self.ssd.capacity:
            item = self.ssd.victim()
            value = self.ssd.values[item] if isinstance(self.ssd, Heap) else 0
            self.ssd.take(item)
            self.left(item, value)

    def left(self, item: Hashable, value: Any) -> None:
        """It is nowhere any more."""


class Fifo(Baseline):
    def __init__(self, trace: Trace, dram_chunks: int, ssd_chunks: int) -> None:
        super().__init__(trace, dram_chunks, ssd_chunks)
        self.born: dict[Hashable, Any] = {}

    def value(self, chunk: Hashable, number: int, depth: int) -> Any:
        return self.born.setdefault(chunk, (self.step, -depth))

    def left(self, item: Hashable, value: Any) -> None:
        del self.born[item]


class S3(Baseline):
    shelf = S3Fifo


class Gdsf(Baseline):
    def __init__(self, trace: Trace, dram_chunks: int, ssd_chunks: int) -> None:
        super().__init__(trace, dram_chunks, ssd_chunks)
        self.uses: Counter[Hashable] = Counter()
        self.floor = 0

    def value(self, chunk: Hashable, number: int, depth: int) -> Any:
        self.uses[chunk] += 1
        return (self.floor + self.uses[chunk], -depth)

    def left(self, item: Hashable, value: Any) -> None:
        self.floor = max(self.floor, value[0])
        del self.uses[item]


class Belady(Baseline):
    def __init__(self, trace: Trace, dram_chunks: int, ssd_chunks: int) -> None:
        super().__init__(trace, dram_chunks, ssd_chunks)
        self._uses: dict[Hashable, list[int]] = defaultdict(list)
        """When each chunk is asked for, the latest first."""
        for number in range(len(trace.turns) - 1, -1, -1):
            for chunk in trace.turns[number].chunks:
                self._uses[chunk].append(number)

    def value(self, chunk: Hashable, number: int, depth: int) -> Any:
        uses = self._uses[chunk]
        while uses and uses[-1] <= number:
            uses.pop()
        return (-uses[-1] if uses else -NEVER, -depth)


class Paper(Baseline):
    def __init__(self, trace: Trace, dram_chunks: int, ssd_chunks: int) -> None:
        super().__init__(trace, dram_chunks, ssd_chunks)
        self._seen = 0
        """Turns before this one have been in the look-ahead window."""
        self._fetched = 0
        """And before this one in the prefetch window."""
        self._waiting: dict[Hashable, int] = {}
        """Sessions in the window, and the turn that they wait for."""

    def serve(self, number: int, turn: Turn, ahead: range) -> tuple[int, int]:
        self.step += 1
        session = turn.session if turn.session >= 0 else -2 - number
        found = turn.history
        in_dram = found if session in self.dram else 0
        on_ssd = found if session in self.ssd else 0
        if self._waiting.get(session, NEVER) <= number:
            del self._waiting[session]
        size = len(turn.chunks) + len(turn.answer)
        self.use(session, self._value(session), size)
        self.shrink()
        mean = max(1.0, (self.dram.used + self.ssd.used) / max(1, len(self.dram.sizes) + len(self.ssd.sizes)))
        self._look_ahead(ahead, int((self.dram.capacity + self.ssd.capacity) / mean))
        self._prefetch(ahead, int(self.dram.capacity / mean))
        return in_dram, on_ssd

    def _value(self, session: Hashable) -> tuple[int, int]:
        position = self._waiting.get(session)
        return (0, self.step) if position is None else (1, -position)

    def _look_ahead(self, ahead: range, jobs: int) -> None:
        for position in ahead[max(0, self._seen - ahead.start) : jobs]:
            self._seen = position + 1
            session = self.trace.turns[position].session
            if session not in self._waiting:
                self._waiting[session] = position
                for shelf in (self.dram, self.ssd):
                    if session in shelf:
                        shelf.valued(session, (1, -position))

    def _prefetch(self, ahead: range, jobs: int) -> None:
        for position in ahead[max(0, self._fetched - ahead.start) : jobs]:
            self._fetched = position + 1
            session = self.trace.turns[position].session
            if session in self.ssd:
                self.use(session, self._value(session), self.ssd.sizes[session])
                self.shrink()


BASELINES: Mapping[str, type[Baseline]] = {
    "lru": Baseline,
    "fifo": Fifo,
    "s3-fifo": S3,
    "gdsf": Gdsf,
    "belady": Belady,
    "paper": Paper,
}


def baseline(
    trace: Trace,
    policy: str,
    *,
    dram_chunks: int,
    ssd_chunks: int = 0,
    look_ahead: int | Sequence[int] = 0,
    warm_up: int = 0,
    chunk_bytes: int = 1 << 20,
) -> Result:
    """As `replay`, for a policy of BASELINES. `look_ahead` is for "paper" alone: the others do not look, or (belady)
    see everything. Raises BadRequest."""
    if policy not in BASELINES:
        raise BadRequest(
            "no such baseline", field="policy", value=policy, remedy="known: " + ", ".join(BASELINES)
        )
    store = BASELINES[policy](trace, dram_chunks, ssd_chunks)
    farthest = look_ahead if isinstance(look_ahead, int) else max(look_ahead, default=0)
    result = Result(trace.name, f"{policy} (baseline)", dram_chunks, ssd_chunks, farthest)
    written = read = 0
    for number, turn in enumerate(trace.turns):
        if number == warm_up:
            written, read = store.written, store.read
        each = look_ahead if isinstance(look_ahead, int) else look_ahead[number]
        end = min(len(trace.turns), number + 1 + each)
        in_dram, on_ssd = store.serve(number, turn, range(number + 1, end))
        if number < warm_up:
            continue
        result.turns += 1
        result.chunks += len(turn.chunks)
        result.hits_dram += in_dram
        result.hits_ssd += on_ssd
        result.tokens += turn.input_tokens
        result.tokens_hit += min(turn.input_tokens, (in_dram + on_ssd) * trace.chunk_tokens)
        if turn.history:
            result.returning += 1
            result.returning_hit += in_dram + on_ssd >= turn.history
    result.ssd_bytes_written = (store.written - written) * chunk_bytes
    result.ssd_bytes_read = (store.read - read) * chunk_bytes
    return result
