"""Which sequences run, which of their tokens are computed next, and which chunks of the pool they hold.

What sequences have in common is computed once. A prompt whose next chunk is in the pool adopts it; one whose next chunk
an older sequence is about to compute or load waits for it. When the pool is full the newest sequence goes back to the
queue, and is loaded or computed again once there is room. The oldest one always goes on, so all get done.
"""

from __future__ import annotations

from collections import Counter, deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore.gpu_worker.hbm_pool import HbmPool
from kvstore.gpu_worker.loader import Load
from kvstore.gpu_worker.restored_cache import LoadFailed
from kvstore.gpu_worker.sampling import Sampler
from kvstore.gpu_worker.saver import TurnSave
from kvstore.keys import ROOT, SALT_BYTES, exact_chain
from kvstore.types import ChunkKey

if TYPE_CHECKING:
    from kvstore.client import ReadLease
    from kvstore.gpu_worker.pool_store import PoolStore

IDLE_S = 0.05
"""How long to wait at a time when there is nothing to compute before something has arrived."""
_SALT = bytes(SALT_BYTES)  # keys of the pool are compared with one another only


@dataclass(slots=True, eq=False)
class Running:
    """A request from `add` to its last token."""

    number: int
    tokens: list[int]
    """The prompt and what was chosen since."""
    tokens_max: int
    stop_tokens: frozenset[int]
    sampler: Sampler
    chunks: list[int] = field(default_factory=list)
    keys: list[ChunkKey] = field(default_factory=list)
    """Of the full chunks of `tokens`."""
    computed: int = 0
    """Tokens whose KV is in `chunks`; not those that are being loaded."""
    row: int = -1
    """Its row in the forests, while it runs."""
    lookup: Future[ReadLease | None] | None = None
    """What the store has of it; asked when it begins to run."""
    load: Load | None = None
    save: TurnSave | None = None

    @property
    def missing(self) -> int:
        return len(self.tokens) - self.computed


class Scheduler:
    """`counters` gets adopted_tokens, restored_tokens, load_failures and preemptions."""

    def __init__(
        self,
        pool: HbmPool,
        store: PoolStore | None,
        *,
        sequences_max: int,
        prefill_tokens: int,
        share: bool,
        counters: Counter[str],
    ) -> None:
        for name, value in (("sequences_max", sequences_max), ("prefill_tokens", prefill_tokens)):
            if value < 1:
                raise ValueError(f"{name} is {value}: must be at least 1")
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        """Oldest first; all of them are older than those that wait."""
        self._pool = pool
        self._store = store
        self._prefill_tokens = prefill_tokens
        self._share = share
        self._counters = counters
        self._step = pool.geometry.chunk_tokens
        self._rows = list(range(sequences_max - 1, -1, -1))
        self._ending: list[tuple[Load, list[int]]] = []
        """Loads that nobody wants any more, and the chunks that they may still write."""

    def schedule(self) -> dict[Running, int]:
        """How many tokens of which sequence are computed now; those that decode first, then the oldest."""
        self._reap()
        for sequence in self.running:
            self._adopt(sequence)
        self._admit()
        pieces: dict[Running, int] = {}
        promised: set[ChunkKey] = set()  # of chunks that a sequence looked at before is to compute or loads
        budget = self._prefill_tokens
        for sequence in sorted(self.running, key=lambda sequence: sequence.missing > 1):
            if sequence.row < 0:
                continue  # it had to make room meanwhile
            self._adopt(sequence)
            if self._restoring(sequence, promised, pieces):
                continue
            count = 1 if sequence.missing == 1 else min(sequence.missing, budget)
            if count == 0 or self._next(sequence) in promised:
                continue
            if self._make_room(sequence, sequence.computed + count, pieces):
                pieces[sequence] = count
                if sequence.missing > 1:
                    budget -= count
                    promised.update(self._adoptable(sequence)[sequence.computed // self._step :])
        if not pieces:
            self._idle()
        return pieces

    def computed(self, sequence: Running, count: int) -> None:
        """The KV of so many tokens more is in the pool: what is full now, others may adopt, and the store gets."""
        before = sequence.computed // self._step
        sequence.computed += count
        if sequence.computed // self._step > before:
            self._publish(sequence, before)
            if self._store is not None:
                self._store.save(sequence, before)

    def abort(self, number: int) -> bool:
        """Of a request: whether it was live."""
        for sequence in self.running:
            if sequence.number == number:
                self.stop(sequence)
                return True
        before = len(self.waiting)
        self.waiting = deque(waiting for waiting in self.waiting if waiting.number != number)
        return len(self.waiting) < before

    def restart(self, *, share: bool) -> None:
        """What runs goes back to the queue and is computed again, in the same order; the pool knows no tokens any more.
        `share`: whether sequences may share chunks from now on."""
        self._share = share
        while self.running:
            newest = self.running[-1]
            self.stop(newest)
            self.waiting.appendleft(newest)
        for sequence in self.waiting:
            sequence.save = None  # of another namespace

    def stop_all(self) -> None:
        self.waiting.clear()
        while self.running:
            self.stop(self.running[-1])

    def stop(self, sequence: Running) -> None:
        """It runs no more, and holds nothing."""
        self.running.remove(sequence)
        if sequence.lookup is not None:
            sequence.lookup.add_done_callback(lambda lookup: _release(lookup.result()))
        if sequence.load is not None:
            whole = sequence.computed // self._step
            sequence.load.cancel("the request was stopped")
            self._ending.append((sequence.load, sequence.chunks[whole:]))
            del sequence.chunks[whole:]
        self._pool.drop(sequence.chunks)
        self._rows.append(sequence.row)
        sequence.chunks, sequence.computed, sequence.row = [], 0, -1
        sequence.lookup = sequence.load = None

    def check_integrity(self) -> None:
        """Assert what only a bug could break; for tests."""
        ending = [chunks for _, chunks in self._ending]
        self._pool.check_integrity([*(sequence.chunks for sequence in self.running), *ending])
        numbers = [sequence.number for sequence in (*self.running, *self.waiting)]
        assert numbers == sorted(numbers), "a sequence has lost its turn"
        rows = sorted([*self._rows, *(sequence.row for sequence in self.running)])
        assert rows == list(range(len(rows))), "a row is lost or in two places"
        for sequence in self.running:
            assert sequence.computed <= len(sequence.chunks) * self._step
        for sequence in self.waiting:
            assert not sequence.chunks and not sequence.computed and sequence.row < 0

    def _admit(self) -> None:
        """Who waits runs, in order, if there are a row and chunks for all its tokens, beside those that the others need
        for theirs and one more for each."""
        needed = sum(self._chunks(len(one.tokens)) - len(one.chunks) + 1 for one in self.running)
        while self.waiting and self._rows:
            sequence = self.waiting[0]
            adoptable = self._adoptable(sequence)
            found = len(self._pool.find(adoptable))
            needed += self._chunks(len(sequence.tokens)) - found
            if self.running and needed > self._pool.free:
                return
            sequence.row = self._rows.pop()
            self.running.append(self.waiting.popleft())
            needed += 1
            if self._store is not None and not (adoptable and found == len(adoptable)):
                sequence.lookup = self._store.look_up(sequence.tokens)

    def _make_room(self, sequence: Running, tokens: int, pieces: dict[Running, int]) -> bool:
        """Chunks for so many tokens, taken from the newest if none is free. False if it is the newest itself, or if
        there will be some as soon as a load has ended."""
        needed = self._chunks(tokens) - len(sequence.chunks)
        while (taken := self._pool.take(needed)) is None:
            if self._ending:
                return False
            newest = self.running[-1]
            pieces.pop(newest, None)
            self.stop(newest)
            self.waiting.appendleft(newest)
            self._counters["preemptions"] += 1
            if newest is sequence:
                return False
        sequence.chunks += taken
        return True

    # ------------------------------------------------------------------------------------------------- prefixes

    def _adopt(self, sequence: Running) -> None:
        """Take what others have computed of its tokens; at least one token is left to compute."""
        if sequence.computed == len(sequence.chunks) * self._step:
            found = self._pool.find(self._adoptable(sequence)[len(sequence.chunks) :])
            self._pool.hold(found)
            sequence.chunks += found
            sequence.computed += len(found) * self._step
            self._counters["adopted_tokens"] += len(found) * self._step

    def _adoptable(self, sequence: Running) -> list[ChunkKey]:
        if not self._share:
            return []
        known = len(sequence.keys)
        if len(sequence.tokens) >= (known + 1) * self._step:
            parent = sequence.keys[-1] if known else ROOT
            sequence.keys += exact_chain(_SALT, sequence.tokens[known * self._step :], self._step, parent)
        return sequence.keys[: (len(sequence.tokens) - 1) // self._step]

    def _next(self, sequence: Running) -> ChunkKey | None:
        """The key of the chunk that it begins with its next token, if others may compute it as well."""
        number, inside = divmod(sequence.computed, self._step)
        keys = self._adoptable(sequence)
        return keys[number] if not inside and number < len(keys) else None

    def _publish(self, sequence: Running, first: int) -> None:
        """Chunks from that one on are full and computed."""
        if self._share:
            self._adoptable(sequence)  # for the keys
            for number in range(first, sequence.computed // self._step):
                self._pool.publish(sequence.chunks[number], sequence.keys[number])

    # ---------------------------------------------------------------------------------------------------- store

    def _restoring(self, sequence: Running, promised: set[ChunkKey], pieces: dict[Running, int]) -> bool:
        """Whether it has to wait for what the store has of it. It computes nothing before it is known, so that its
        chunks are whole ones; all of the load arrives before it goes on, since others share its forward call."""
        first = sequence.computed // self._step
        if sequence.lookup is not None:
            if not sequence.lookup.done() or self._next(sequence) in promised:
                return True
            assert self._store is not None
            lease = sequence.lookup.result()
            end = self._store.hits(lease)
            if end > first and not self._make_room(sequence, end * self._step, pieces):
                return True
            sequence.lookup = None
            if lease is None or end <= first:
                _release(lease)
                return False
            sequence.load = self._store.load(lease, first, sequence.chunks[first:])
        if sequence.load is None:
            return False
        if not sequence.load.ended.done():
            promised.update(self._adoptable(sequence)[first : len(sequence.chunks)])
            return True
        load, sequence.load = sequence.load, None
        try:
            load.wait(self._pool.geometry.layers - 1)
        except LoadFailed:
            self._counters["load_failures"] += 1
            self._pool.drop(sequence.chunks[first:])
            del sequence.chunks[first:]
            return False
        sequence.computed = len(sequence.chunks) * self._step
        self._counters["restored_tokens"] += (len(sequence.chunks) - first) * self._step
        self._publish(sequence, first)
        return False

    def _reap(self) -> None:
        """Free the chunks of loads that have ended, now that nothing is written there any more."""
        for load, chunks in self._ending:
            if load.ended.done():
                self._pool.drop(chunks)
        self._ending = [(load, chunks) for load, chunks in self._ending if not load.ended.done()]

    def _idle(self) -> None:
        """Nothing can be computed before something arrives."""
        loads = [load for load, _ in self._ending]
        loads += [sequence.load for sequence in self.running if sequence.load is not None]
        pending: list[Future[Any]] = [load.ended for load in loads]
        # Who has its answer already waits for what another one loads
        lookups = (sequence.lookup for sequence in self.running if sequence.lookup is not None)
        pending += [lookup for lookup in lookups if not lookup.done()]
        if pending:
            wait(pending, timeout=IDLE_S, return_when=FIRST_COMPLETED)

    def _chunks(self, tokens: int) -> int:
        return -(-tokens // self._step)


def _release(lease: ReadLease | None) -> None:
    if lease is not None:
        lease.release()
