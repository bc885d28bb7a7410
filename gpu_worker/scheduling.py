"""Which requests run, which of their tokens are computed next, and which chunks of the pool they hold.

What requests have in common is computed once. A prompt whose next chunk is in the pool adopts it; one whose next chunk
an older request is about to compute or load waits for it. When the pool is full the newest request goes back to the
queue, and is loaded or computed again once there is room. The oldest one always goes on, so all get done.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from kvstore.gpu_worker.assembly import Assembly, Span
from kvstore.gpu_worker.compute_or_load import ComputeOrLoad, Computing, read_buffer_layers
from kvstore.gpu_worker.gathering import Gathering
from kvstore.gpu_worker.hbm_pool import HbmPool
from kvstore.gpu_worker.importing import Importing
from kvstore.gpu_worker.loader import Load, LoadFailed
from kvstore.gpu_worker.masses import OBSERVED
from kvstore.gpu_worker.request import Request, Reused
from kvstore.keys import SALT_BYTES, exact_chain
from kvstore.types import ChunkKey

if TYPE_CHECKING:
    from kvstore.gpu_worker.chain import Chain
    from kvstore.gpu_worker.pool_store import PoolStore
    from kvstore.kernels.stretches import Stretch

IDLE_S = 0.05
"""How long to wait at a time when there is nothing to compute before something has arrived."""
_SALT = bytes(SALT_BYTES)  # keys of the pool are compared with one another only


class Scheduler:
    """`counters` gets adopted_tokens, restored_tokens (and of these: restored_ssd_tokens), loads_overlapped (requests
    that joined a step before all of their load was there), loads_late (computing was faster), choices_... (how often
    what was found was to be loaded, split, computed, ..., see `compute_or_load.Why`), load_failures and preemptions."""

    def __init__(
        self,
        pool: HbmPool,
        store: PoolStore | None,
        *,
        sequences_max: int,
        prefill_tokens: int,
        share: bool,
        counters: Counter[str],
        choice: ComputeOrLoad | None = None,
        read_buffer: int | None = None,
        load_ahead: int = 0,
    ) -> None:
        """`choice`: gets what loads took. `read_buffer`: layers that have to be there before a request joins a step;
        None: as many as keep it from waiting. `load_ahead`: how many of those that wait begin to load."""
        for name, value in (("sequences_max", sequences_max), ("prefill_tokens", prefill_tokens)):
            if value < 1:
                raise ValueError(f"{name} is {value}: must be at least 1")
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """Oldest first; all of them are older than those that wait."""
        self._pool = pool
        self._store = store
        self._prefill_tokens = prefill_tokens
        self._share = share
        self._counters = counters
        self.computing = choice.compute if choice is not None else Computing(skipped=1)
        """What steps take."""
        self._choice = choice
        self._read_buffer = read_buffer
        self._load_ahead = load_ahead
        self._chunk_tokens = pool.geometry.chunk_tokens
        self._rows = list(range(sequences_max - 1, -1, -1))
        self._ending: list[tuple[Load, list[int]]] = []
        """Loads that nobody wants any more, and the chunks that they may still write."""

    def schedule(self) -> dict[Request, int]:
        """How many tokens of which request are computed now; those that decode first, then the oldest."""
        self._reap()
        for request in self.running:
            self._adopt(request)
        self._admit()
        pieces: dict[Request, int] = {}
        promised = self._loading()  # and what a request looked at before is to compute, or to load
        budget = self._prefill_tokens
        for request in sorted(self.running, key=lambda request: request.missing > 1):
            if request.row < 0:
                continue  # it had to make room meanwhile
            if request.gathering is not None and self._gathering(request, request.gathering, pieces):
                continue
            if request.open_cut is not None:
                continue  # see `open_cuts`
            self._adopt(request)
            if self._restoring(request, promised, pieces) or request.undecided:
                continue
            count = 1 if request.missing == 1 else self._piece(request, budget)
            if count == 0 or self._next(request) in promised:
                continue
            if self._make_room(request, request.spans(count)[-1][1], pieces):
                pieces[request] = count
                if request.missing > 1:
                    budget -= count
                    promised.update(self._adoptable(request)[request.computed // self._chunk_tokens :])
        self._prepare(promised)
        if not pieces and not self.undecided and not self.open_cuts:
            self._idle()
        return pieces

    def _piece(self, request: Request, budget: int) -> int:
        """How many tokens of its prompt, of so many that a step may still take. What the end of a prompt attends to is
        recorded in one step: enough is left for the last one."""
        count = min(request.missing, budget)
        left = request.missing - count
        if not request.observe or not 0 < left < OBSERVED <= self._prefill_tokens:
            return count
        return max(0, request.missing - OBSERVED)

    def _loading(self) -> set[ChunkKey]:
        """Keys of the chunks that loads bring. One that runs may have been answered before an older one was, and load
        what both of them want: the older one adopts it."""
        return {
            key
            for request in self.running
            if request.load is not None and not request.load.failed
            for key in self._adoptable(request)[request.load_first : len(request.chunks)]
        }

    def _prepare(self, promised: set[ChunkKey]) -> None:
        """The next of those that wait load while the others compute, into chunks that nobody who runs is going to need.
        What two of them want, or one who runs is about to compute or load, is loaded once: the other one adopts it."""
        if self._store is None:
            return
        for request in list(islice(self.waiting, self._load_ahead)):
            unknown = request.choices is not None or request.chain is not None
            if request.alone or request.assembly is not None or unknown:
                continue
            self._adopt(request)
            if request.load is None and request.lookup is None:
                if request.asked or self._next(request) in promised or self._is_here(request):
                    continue
                request.lookup = self._store.look_up(request)
                request.asked = True
            self._restoring(request, promised, {})

    def computed(self, request: Request, count: int) -> None:
        """The KV of so many tokens more is in the pool: what is full now, others may adopt, and the store gets."""
        before = request.computed // self._chunk_tokens
        request.advance(count)
        self._note(request, before)
        if request.computed // self._chunk_tokens > before:
            self._publish(request, before)
            if self._store is not None and request.assembly is None:
                self._store.save(request)

    def settle(self, pieces: Mapping[Request, int]) -> set[Request]:
        """The step of these has ended: those are returned whose load failed after they had joined. They are computed
        again."""
        failed = set()
        for request in pieces:
            if request.load is not None and not self._restored(request):
                failed.add(request)
        return failed

    @property
    def undecided(self) -> list[Request]:
        """Those whose parts are there, and of which some tokens are to be computed all the same: see `decide`."""
        return [request for request in self.running if request.undecided]

    def open_slots(self, request: Request) -> tuple[list[Span], list[Span]]:
        """Of an undecided one: among which slots those are that deviate most; which of the others are computed."""
        assert request.assembly is not None and request.found is not None
        there = [part for _, part in request.found.parts]
        return (
            request.assembly.candidates(there, request.computed),
            request.assembly.holes(len(request.tokens), there, request.computed),
        )

    def decide(self, request: Request, chosen: Sequence[Span]) -> None:
        """Of an undecided one: these slots are computed, too."""
        assert request.assembly is not None
        request.undecided = False
        self._parts_decided(request, request.assembly, chosen)

    @property
    def open_cuts(self) -> list[Request]:
        """Those whose other KV is here, and of which something has to be found out before they go on (`close_cut`)."""
        return [one for one in self.running if one.open_cut is not None and one.gathering is None]

    def close_cut(self, request: Request, chain: Chain, stretches: list[Stretch]) -> None:
        """These are what its own tokens are, and what they see of what it holds."""
        self._pool.drop(request.chunks)
        request.chunks, request.computed = [], 0
        request.see(chain, None)
        request.stretches = stretches
        self._adopt(request)
        if self._store is not None and not request.alone and not self._is_here(request):
            request.lookup = self._store.look_up(request)

    @property
    def a_row(self) -> int:
        """Any row: between two steps no prompt is read in one."""
        return 0

    def find(self, number: int) -> Request | None:
        """The live request of that number."""
        return next((each for each in (*self.running, *self.waiting) if each.number == number), None)

    def restart(self, *, share: bool) -> None:
        """The model computes otherwise. What runs goes back to the queue and is computed again, in the same order; the
        pool and the requests know nothing of before. `share`: whether requests may share chunks from now on."""
        while self.running:
            newest = self.running[-1]
            self.stop(newest, retain=False)
            self.waiting.appendleft(newest)
        self._pool.forget()
        self._share = share
        for request in self.waiting:
            self._let_go(request, retain=False)
            request.save = request.found = None  # of another namespace
            request.store_keys.clear()
            request.reused = Reused()
        if self._store is not None:
            self._store.forget()

    def stop_all(self) -> None:
        """For the end."""
        if self._store is not None:
            for request in (*self.running, *self.waiting):
                if request.assembly is None:
                    self._store.abandon(request)
        while self.waiting:
            self._let_go(self.waiting.pop())
        while self.running:
            self.stop(self.running[-1])

    def compute_alone(self, request: Request) -> None:
        """KV that it reused leads to no numbers: it is computed once more, from its tokens, and others do not get that
        KV from the pool."""
        for chunks in (request.chunks, request.held):
            self._pool.unpublish(chunks)
            self._pool.drop(chunks)
        request.chunks, request.held, request.computed, request.alone = [], [], 0, True
        request.holes, request.undecided = [], False
        if request.assembly is not None:
            request.put_together()
        elif request.chain is not None:
            request.fall_back()
        request.save, request.reused = None, Reused()
        request.load_failures += 1
        self._counters["load_failures"] += 1

    def finish(self, request: Request) -> None:
        """It gets no more tokens. What was computed of it stays in the pool, and in the store as its session; of a
        prompt that was not read to its end the session knows nothing."""
        if self._store is not None:
            there = request.row >= 0 and request.load is None  # else some of its KV is still on its way
            whole = there and request.computed >= request.prompt_tokens
            if request.assembly is not None:
                if whole:
                    self._store.save_parts(request)
            elif whole:
                self._store.finish(request)
            else:
                self._store.abandon(request)
        if request.row < 0:
            self.waiting.remove(request)
            self._let_go(request)
        else:
            self.stop(request)

    def stop(self, request: Request, *, retain: bool = True) -> None:
        """It runs no more, and holds nothing. `retain`: what was computed of it may stay in the pool."""
        self.running.remove(request)
        self._rows.append(request.row)
        request.row = -1
        self._let_go(request, retain=retain)

    def _let_go(self, request: Request, *, retain: bool = True) -> None:
        """It holds nothing any more."""
        if request.lookup is not None:
            request.lookup.add_done_callback(lambda lookup: lookup.result().release())
        if request.gathering is not None:
            self._leave(request.gathering)
        whole, rest = divmod(request.computed, self._chunk_tokens)
        if request.load is not None:
            self._give_up(request, "the request was stopped")
        elif rest and retain and self._share and request.assembly is None:
            self._pool.drop(request.chunks[whole + 1 :])
            tail = request.tokens[whole * self._chunk_tokens : request.computed]
            self._pool.leave_tail(request.chunks[whole], self._key_before(request, whole), tail)
            del request.chunks[whole:]
        self._pool.drop(request.chunks)
        self._pool.drop(request.held)
        request.chunks, request.computed, request.asked, request.holes = [], 0, False, []
        request.held, request.stretches, request.undecided = [], [], False
        request.lookup = request.load = request.gathering = None
        if request.assembly is not None:
            request.put_together()

    def check_integrity(self) -> None:
        """Assert what only a bug could break; for tests."""
        ending = [chunks for _, chunks in self._ending]
        live = [*self.running, *self.waiting]
        gathered = [one.gathering for one in self.running if one.gathering is not None]
        others = [*(one.held for one in self.running), *(each.taken for each in gathered)]
        others += [list(each.chunks.values()) for each in gathered]
        self._pool.check_integrity([*(request.chunks for request in live), *others, *ending])
        numbers = [request.number for request in (*self.running, *self.waiting)]
        assert numbers == sorted(numbers), "a request has lost its turn"
        rows = sorted([*self._rows, *(request.row for request in self.running)])
        assert rows == list(range(len(rows))), "a row is lost or in two places"
        for request in live:
            assert request.computed <= len(request.chunks) * self._chunk_tokens
            size = self._chunk_tokens
            for number, chunk in enumerate(request.chunks[: -(-request.computed // size)]):
                count = min(size, request.computed - number * size)
                assert self._pool.count(chunk) == count, "the pool does not know what a chunk holds"
                assert self._pool.begin(chunk) == request.position(number * size), "keys of another position"
        for request in self.waiting:
            assert request.row < 0 and not request.joined
            assert not request.held and not request.stretches and request.gathering is None
        ahead = [request for request in self.waiting if request.chunks or request.lookup is not None]
        assert ahead == list(self.waiting)[: len(ahead)] or self._load_ahead, "who waits holds something"

    def _admit(self) -> None:
        """Who waits runs, in order, if there are a row and chunks for all its tokens, beside those that the others need
        for theirs and one more for each."""
        needed = self._needed()
        while self.waiting and self._rows:
            request = self.waiting[0]
            if request.choices is not None:
                return  # what it computes is not known yet
            # Chunks that are here, and idle, are no longer available once it holds them
            own = len(request.chunks)
            imports = self._imports(request)
            shared = self._pool.held(self._pool.find(self._adoptable(request)[own:])) if not imports else 0
            if imports:
                needed += imports.chunks_needed(self._pool, len(request.tokens))
                request.gathering = imports
            else:
                needed += self._chunks(len(request.tokens)) - own - shared
            if request.chain is not None and request.chain.seen:
                gathering = Gathering(request.chain, _SALT)
                # As if none of them was held already
                needed += len({part.key for part in gathering.parts(self._chunk_tokens)})
                request.gathering = gathering
            if self.running and needed > self._pool.available:
                request.gathering = None
                return
            request.row = self._rows.pop()
            self.running.append(self.waiting.popleft())
            adopted = self._adopt(request)
            needed += 1 + shared - adopted
            if request.lookup is not None or request.load is not None:
                continue  # it was loaded ahead
            if request.open_cut is not None or imports:
                continue  # what it computes is not known yet
            if self._store is not None and not request.alone and not self._is_here(request):
                request.lookup = self._store.look_up(request)
            if request.assembly is not None:
                request.unplanned = request.lookup is None and not self._is_here(request)

    def _needed(self) -> int:
        """Chunks that those who run have still to get for their tokens, and one more for each."""
        return sum(self._still(one) + 1 for one in self.running)

    def _still(self, request: Request) -> int:
        """Chunks that it has to get for its tokens and for what it sees."""
        if isinstance(request.gathering, Importing):
            return request.gathering.chunks_needed(self._pool, len(request.tokens))
        return self._chunks(len(request.tokens)) - len(request.chunks)

    def _imports(self, request: Request) -> Importing | None:
        """For a prompt whose parts are read where all have them. Its own tokens and all parts must find room at once,
        even if none of it lies together."""
        assembly = request.assembly
        if assembly is None or not assembly.by_part or not assembly.parts or assembly.kept:
            return None
        if self._store is None or not self._share or request.alone:
            return None
        imports = Importing(assembly)
        if len(imports.keys) + self._chunks(request.tokens_max) > self._pool.chunks:
            return None
        return imports

    def _make_room(self, request: Request, tokens: int, pieces: dict[Request, int]) -> bool:
        """Chunks for so many tokens, taken from the newest if none is free. False if it is the newest itself, or if
        there will be some as soon as a load has ended."""
        needed = self._chunks(tokens) - len(request.chunks)
        if request.row < 0 and needed > self._pool.available - self._needed():
            return False  # it waits: those that run come first
        taken = self._take(request, needed, pieces)
        if taken is None:
            return False
        request.chunks += taken
        return True

    def _take(self, request: Request, count: int, pieces: dict[Request, int]) -> list[int] | None:
        """So many chunks, taken from the newest if too few are free; None where `_make_room` is False."""
        while (taken := self._pool.take(count)) is None:
            if (ahead := next((one for one in reversed(self.waiting) if one.chunks), None)) is not None:
                self._let_go(ahead)
                continue
            if self._ending:
                return None
            newest = self.running[-1]
            pieces.pop(newest, None)
            self.stop(newest)
            self.waiting.appendleft(newest)
            self._counters["preemptions"] += 1
            if newest is request:
                return None
        return taken

    # ------------------------------------------------------------------------------------------------- prefixes

    def _adopt(self, request: Request) -> int:
        """Take what others have computed of its tokens; at least one token is left to compute. Returns how many
        chunks."""
        if request.load is not None or request.computed != len(request.chunks) * self._chunk_tokens:
            return 0
        found = self._pool.find(self._adoptable(request)[len(request.chunks) :])
        self._pool.hold(found)
        request.chunks += found
        self._reuse(request, len(found) * self._chunk_tokens)
        return len(found)

    def _adopt_tail(self, request: Request) -> None:
        """Go on in the chunk that somebody left who had the same tokens."""
        whole, inside = divmod(request.computed, self._chunk_tokens)
        waits = request.row < 0 or request.alone or request.assembly
        if inside or whole != len(request.chunks) or not self._share or waits:
            return
        rest = request.tokens[request.computed : request.computed + self._chunk_tokens]
        tail = self._pool.take_tail(self._key_before(request, whole), rest)
        if tail is not None:
            chunk, count = tail
            request.chunks.append(chunk)
            self._reuse(request, count)

    def _reuse(self, request: Request, tokens: int) -> None:
        request.computed += tokens
        request.reused.hbm += tokens
        self._counters["adopted_tokens"] += tokens

    def _gathering(
        self, request: Request, gathering: Gathering | Importing, pieces: dict[Request, int]
    ) -> bool:
        """Whether it has to wait for what it sees beside its own tokens. If that cannot be had, all that remains is
        computed."""
        if isinstance(gathering, Importing):
            return self._importing(request, gathering, pieces)
        if not gathering.begun and (
            request.alone or not self._share or not gathering.begin(self._pool, self._store)
        ):
            return self._in_vain(request, gathering)
        arrived = gathering.arrived()
        if arrived is None:
            return True
        if not arrived:
            return self._in_vain(request, gathering)
        hbm = len(gathering.chunks) * self._chunk_tokens
        if gathering.missing:
            assert self._store is not None
            if gathering.load is None:
                taken = self._take(request, len(gathering.missing), pieces)
                if taken is None:
                    return True
                gathering.start(self._store, taken)
                return True
            if not gathering.load.ended.done():
                return True
            restored = gathering.loaded(self._pool, self._store)
            if restored is None:
                self._counters["load_failures"] += 1
                request.load_failures += 1
                return self._in_vain(request, gathering)
            self._counters["restored_tokens"] += restored
            request.reused.dram += restored
        self._counters["adopted_tokens"] += hbm
        request.reused.hbm += hbm
        request.held, request.stretches = list(gathering.chunks.values()), gathering.stretches(self._pool)
        request.gathering = None
        return False

    def _importing(self, request: Request, imports: Importing, pieces: dict[Request, int]) -> bool:
        """Whether it has to wait for the modules that it imports. What an older request is about to load is loaded
        once."""
        assert self._store is not None and request.assembly is not None
        if not imports.begun:
            if not self._brought_by_others(imports).isdisjoint(imports.keys):
                return True
            imports.begin(self._pool, self._store)
        if not imports.arrived():
            return True
        if imports.coming:
            if imports.load is None:
                taken = self._take(request, len(imports.coming), pieces)
                if taken is not None:
                    imports.start(self._store, taken)
                return True
            if not imports.load.ended.done():
                return True
            if not imports.loaded(self._pool):
                self._counters["load_failures"] += 1
                request.load_failures += 1
        chain = imports.split(request.root, moves=self._store.moves)
        request.gathering, request.absent = None, imports.absent
        request.see(chain, None)
        request.held, request.stretches = list(imports.chunks.values()), imports.stretches(chain)
        for part in (part for one in chain.seen for part in one.parts(_SALT, self._chunk_tokens)):
            if part.key not in imports.restored:
                self._counters["adopted_tokens"] += part.count
                request.reused.hbm += part.count
                continue
            self._counters["restored_tokens"] += part.count
            if part.key in imports.from_ssd:
                self._counters["restored_ssd_tokens"] += part.count
                request.reused.ssd += part.count
            else:
                request.reused.dram += part.count
        self._adopt(request)
        return False

    def _brought_by_others(self, imports: Importing) -> set[ChunkKey]:
        """Keys of parts that other requests have asked for, or load."""
        others = (one.gathering for one in self.running if one.gathering is not imports)
        return {
            part.key
            for other in others
            if isinstance(other, Importing) and other.begun
            for part in other.missing
        }

    def _in_vain(self, request: Request, gathering: Gathering) -> bool:
        """It computes what remains as an ordinary prompt; it waits for what the store has of that."""
        self._leave(gathering)
        if request.lookup is not None:
            request.lookup.add_done_callback(lambda lookup: lookup.result().release())
        self._pool.drop(request.chunks)
        request.chunks, request.computed = [], 0
        request.gathering = request.lookup = request.found = None
        request.fall_back()
        self._counters["truncations_recomputed"] += 1
        self._adopt(request)
        if self._store is not None and not request.alone and not self._is_here(request):
            request.lookup = self._store.look_up(request)
        return request.lookup is not None

    def _leave(self, gathering: Gathering | Importing) -> None:
        """Nobody wants what was gathered."""
        gathering.release()
        self._pool.drop(list(gathering.chunks.values()))
        if gathering.load is not None:
            gathering.load.cancel("the request was stopped")
            self._ending.append((gathering.load, gathering.taken))
        else:
            self._pool.drop(gathering.taken)
        gathering.chunks, gathering.taken = {}, []

    def _is_here(self, request: Request) -> bool:
        """Whether the store can have nothing of its prompt that the pool has not."""
        if request.assembly is not None:
            return not any(part.end > request.computed for part in request.assembly.parts)
        whole = (len(request.tokens) - 1) // self._chunk_tokens
        if request.computed < whole * self._chunk_tokens:
            return False
        return not request.session or len(request.tokens) == request.computed + 1 or self._tail(request) > 0

    def _tail(self, request: Request) -> int:
        """Tokens that the pool has behind its last full chunk."""
        if not self._share or request.alone:
            return 0
        whole, inside = divmod(request.computed, self._chunk_tokens)
        rest = request.tokens[request.computed : request.computed + self._chunk_tokens]
        return 0 if inside else self._pool.tail_tokens(self._key_before(request, whole), rest)

    def _adoptable(self, request: Request) -> list[ChunkKey]:
        """Keys of the chunks that it may take from others."""
        unknown = request.open_cut is not None or isinstance(request.gathering, Importing)
        if not self._share or request.alone or unknown:
            return []
        most = min(len(request.tokens) - 1, request.shared_tokens)
        return self._keys(request)[: most // self._chunk_tokens]

    def _keys(self, request: Request) -> list[ChunkKey]:
        """Of all its full chunks."""
        if request.assembly is not None and request.chain is None:
            if not request.keys:
                request.keys = request.assembly.chain(self._chunk_tokens, _SALT, request.root)
            return request.keys
        known, size = len(request.keys), self._chunk_tokens
        if request.chain is not None:
            whole = len(request.tokens) // size
            request.chain.extend(request.keys, request.tokens, _SALT, size, whole)
            return request.keys
        if len(request.tokens) >= (known + 1) * size:
            parent = request.keys[-1] if known else request.root
            request.keys += exact_chain(_SALT, request.tokens[known * size :], size, parent)
        return request.keys

    def _key_before(self, request: Request, chunk: int) -> ChunkKey:
        """Of the chunk before that one, or what says what a derived chunk saw."""
        if request.chain is not None:
            return request.chain.under(self._keys(request), chunk, _SALT, self._chunk_tokens)
        return self._keys(request)[chunk - 1] if chunk else request.root

    def _next(self, request: Request) -> ChunkKey | None:
        """The key of the chunk that it begins with its next token, if others may compute it as well."""
        number, inside = divmod(request.computed, self._chunk_tokens)
        keys = self._adoptable(request)
        return keys[number] if not inside and number < len(keys) else None

    def _note(self, request: Request, first: int) -> None:
        """Where the tokens in its chunks from that one on stand."""
        size = self._chunk_tokens
        for number in range(first, -(-request.computed // size)):
            tokens = min(size, request.computed - number * size)
            chunk = request.chunks[number]
            if self._pool.count(chunk) != tokens:
                self._pool.note(chunk, begin=request.position(number * size), tokens=tokens)

    def _publish(self, request: Request, first: int) -> None:
        """Chunks from that one on are full and computed."""
        if self._share:
            keys = self._keys(request)
            end = min(request.computed, request.shared_tokens) // self._chunk_tokens
            for number in range(first, end):
                self._pool.publish(request.chunks[number], keys[number])

    # ---------------------------------------------------------------------------------------------------- store

    def _restoring(self, request: Request, promised: set[ChunkKey], pieces: dict[Request, int]) -> bool:
        """Whether it has to wait for what the store has of it. It computes nothing before it is known, so that its
        chunks are whole ones."""
        first = request.computed // self._chunk_tokens
        if request.lookup is not None:
            if not request.lookup.done() or self._next(request) in promised:
                return True
            assert self._store is not None
            found = request.lookup.result()
            chunks = found.chunks + (found.tail is not None)
            useful = chunks > first and request.computed == first * self._chunk_tokens
            if found.tail is not None and found.chunks == first:
                useful &= found.tail.token_count > self._tail(request)
            request.unplanned = bool(request.assembly is not None and (found.missing or not found.parts))
            if found.parts:
                useful = request.computed == first * self._chunk_tokens
                chunks = self._chunks(len(request.tokens))
            if useful and not self._make_room(request, chunks * self._chunk_tokens, pieces):
                return True
            request.lookup, request.found = None, found
            if found.plan is not None:
                request.choice = found.plan.why.value
                self._counters[f"choices_{request.choice}"] += 1
            if found.parts and useful:
                # Others have computed some of them meanwhile, and share these chunks
                found = replace(
                    found, parts=tuple(each for each in found.parts if each[1].end > request.computed)
                )
                request.found = found
                if found.parts:
                    request.load = self._store.load_parts(found, first, request.chunks[first:])
                    request.load_first = first
                else:
                    found.release()
            elif useful:
                request.load = self._store.load(found, first, request.chunks[first:])
                request.load_first = first
            else:
                found.release()
        if request.load is None:
            if self._next(request) not in promised:
                self._adopt_tail(request)
            return False
        if request.load.failed or request.load.ended.done():
            self._restored(request)
            return False
        promised.update(self._adoptable(request)[request.load_first : len(request.chunks)])
        if request.row < 0 or request.assembly is not None:
            return True
        if not request.joined and not self._may_join(request, pieces):
            plan = request.found.plan if request.found is not None else None
            if plan is None or time.monotonic() < request.load.started_at + plan.bound_s:
                return True
            self._counters["loads_late"] += 1
            self._give_up(request, "computing is faster")
            return False
        self._join(request)
        return False

    def _may_join(self, request: Request, pieces: Mapping[Request, int]) -> bool:
        """Whether enough of its load is there for a step that waits for the rest layer by layer. Nobody who shares the
        step is to wait: then it is as much as the rest needs to arrive while the step computes."""
        assert request.load is not None and request.found is not None
        load, layers = request.load, self._pool.geometry.layers
        if self._read_buffer is not None:
            return load.layers_in >= min(self._read_buffer, layers)
        if load.layers_in == 0:
            return False
        if not any(other.load is None and other.lookup is None for other in self.running):
            return True
        tokens = sum(pieces.values()) + min(
            request.missing - self._loaded_tokens(request), self._prefill_tokens
        )
        step_s = self.computing.seconds(tokens)
        return load.layers_in >= read_buffer_layers(layers, load_s=load.layer_s * layers, compute_s=step_s)

    def _loaded_tokens(self, request: Request) -> int:
        """How many tokens of it `load` brings."""
        assert request.found is not None
        return request.found.tokens(self._chunk_tokens) - request.load_first * self._chunk_tokens

    def _join(self, request: Request) -> None:
        if not request.joined:
            request.joined = True
            request.computed += self._loaded_tokens(request)
            self._note(request, request.load_first)
            self._counters["loads_overlapped"] += 1

    def _restored(self, request: Request) -> bool:
        """Its load has ended, or will never: whether all of it came."""
        assert self._store is not None and request.load is not None and request.found is not None
        load, found, first, size = request.load, request.found, request.load_first, self._chunk_tokens
        try:
            if load.failed:
                raise LoadFailed
            load.settle()
        except LoadFailed:
            self._counters["load_failures"] += 1
            request.load_failures += 1
            request.unplanned = request.assembly is not None
            self._give_up(request, "it failed")
            self._adopt_tail(request)
            return False
        if request.assembly is not None:
            request.load = None
            self._parts_restored(request, request.assembly)
            return True
        restored = self._loaded_tokens(request)
        if self._choice is not None:
            self._choice.copy.observe(load.bytes, load.seconds)
        if not request.joined:
            request.computed += restored
        request.load, request.joined = None, False
        tail = found.tail.token_count if found.tail is not None else 0
        from_ssd = size * sum(first <= number < found.chunks for number in found.from_ssd)
        from_ssd += tail if found.asked in found.from_ssd else 0
        self._counters["restored_tokens"] += restored
        self._counters["restored_ssd_tokens"] += from_ssd
        request.reused.ssd += from_ssd
        request.reused.dram += restored - from_ssd
        self._note(request, first)
        self._publish(request, first)
        self._store.loaded(request, first)
        return True

    def _give_up(self, request: Request, why: str) -> None:
        """Nothing of its load is used. Its chunks are free once nothing is written there any more."""
        assert request.load is not None
        request.load.cancel(why)
        self._ending.append((request.load, request.chunks[request.load_first :]))
        del request.chunks[request.load_first :]
        request.computed = min(request.computed, request.load_first * self._chunk_tokens)
        request.load, request.joined = None, False

    def _parts_restored(self, request: Request, assembly: Assembly) -> None:
        """What is not there of a prompt that is put together is computed, in between."""
        if assembly.deviating and self.open_slots(request)[0]:
            request.undecided = True
        else:
            self._parts_decided(request, assembly, ())

    def _parts_decided(self, request: Request, assembly: Assembly, chosen: Sequence[Span]) -> None:
        assert request.found is not None
        before = request.computed
        there = [part for _, part in request.found.parts]
        request.holes = assembly.holes(len(request.tokens), there, before, chosen)
        request.computed = request.holes[0][0]
        restored = len(request.tokens) - before - request.missing
        on_ssd = sum(part.count for number, part in request.found.parts if number in request.found.from_ssd)
        from_ssd = min(restored, on_ssd)
        self._counters["restored_tokens"] += restored
        self._counters["restored_ssd_tokens"] += from_ssd
        request.reused.ssd += from_ssd
        request.reused.dram += restored - from_ssd
        self._note(request, before // self._chunk_tokens)
        self._publish(request, before // self._chunk_tokens)

    def _reap(self) -> None:
        """Free the chunks of loads that have ended, now that nothing is written there any more."""
        going_on = []
        for load, chunks in self._ending:
            if load.ended.done():
                with suppress(LoadFailed):
                    load.settle()
                self._pool.drop(chunks)
            else:
                going_on.append((load, chunks))
        self._ending = going_on
        if self._store is not None:
            self._store.collect()

    def _idle(self) -> None:
        """Nothing can be computed before something arrives."""
        pending: list[Future[Any]] = [load.ended for load, _ in self._ending]
        loads = [request.load for request in self.running if request.load is not None]
        pending += [load.ended if load.begun.done() else load.begun for load in loads]
        for request in self.running:
            if request.gathering is not None:
                pending += request.gathering.pending
        pending += [one.choices for one in islice(self.waiting, 1) if one.choices is not None]
        # Who has its answer already waits for what another one loads
        lookups = (request.lookup for request in self.running if request.lookup is not None)
        pending += [lookup for lookup in lookups if not lookup.done()]
        if pending:
            wait(pending, timeout=IDLE_S, return_when=FIRST_COMPLETED)

    def _chunks(self, tokens: int) -> int:
        return -(-tokens // self._chunk_tokens)
