"""Asking the store about requests that wait. What the directory in shared memory says is known at once; the daemon is
asked on threads of their own, and the scheduler's thread only looks at the answer.

Such a lookup is a read without copies: it pins what is there and has what is on SSD promoted, which is also the
look-ahead. The pins are kept until the ranks have loaded, for at most `hold_ms`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvstore.client import ReadLease
from kvstore.errors import StoreError
from kvstore.gpu_worker.compute_or_load import ComputeOrLoad, Delay, Found
from kvstore.gpu_worker.connectors.lookup import LAST_LOOK_S, look_up, note, peek
from kvstore.types import ChunkKey, Tier

if TYPE_CHECKING:
    from kvstore.gpu_worker.connectors.link import Link
    from kvstore.layout import NamespaceSpec

THREADS = 16
"""A lookup that waits for the SSD keeps its thread: others must not wait behind it."""
WAITING_MAX = 1024
"""Lookups that wait for a thread; the store is not asked about more."""
ANSWER_S = 2 * LAST_LOOK_S
"""What a lookup has found by its end is used, so it ends this much before it is given up."""
FRESH_S = 0.05
"""An answer out of the directory is used for so long while vLLM asks again."""
log = logging.getLogger(__name__)


class Lookup:
    """The store's answer about one request, once `done`. Only the scheduler's thread calls `end`."""

    def __init__(self, deadline: float, held_until: float) -> None:
        self.deadline = deadline
        self.held_until = held_until
        self.done = False
        self.keys: tuple[ChunkKey, ...] = ()
        """Of the request's full blocks, as far as they were asked for."""
        self.adapter: bytes | None = None
        """Digest of the request's adapter (b"": none); None: not known, so nothing of it can be named."""
        self.hits = 0
        """Leading keys that are in the store, pinned."""
        self.load = 0
        """Of these, those to be loaded, and ahead of them those that vLLM has: the others are computed."""
        self.bound_s = math.inf
        """A load of them that takes longer is of no use."""
        self.lost: ChunkKey | None = None
        """The first key behind them, when the store does not have it."""
        self.told = False
        """Whether routers know."""
        self.preemptions = 0
        """How often the request had been preempted when it was asked about."""
        self.local = 0
        """Leading blocks that vLLM had itself, when it last asked."""
        self.begun = 0.0
        self.fresh_until: float | None = None
        """Of an answer out of the directory, which pins nothing; None: the daemon was asked."""
        self.cold = 0
        """Of those to be loaded: how many are on SSD ..."""
        self.wait_s = 0.0
        """... and how long the load may wait for them. A lookup that asks the daemon waits itself."""
        self.counted = False
        """Whether what is computed though the store has it was counted."""
        self.delay = Delay()
        self._lock = threading.Lock()
        self._ended = False
        self._leases: list[ReadLease] = []

    def settle(
        self,
        leases: list[ReadLease],
        hits: int,
        keys: Sequence[ChunkKey],
        adapter: bytes | None,
        lost: ChunkKey | None = None,
        *,
        load: int = 0,
        bound_s: float = math.inf,
    ) -> None:
        with self._lock:
            self.keys, self.adapter, self.hits, self.lost = tuple(keys), adapter, hits, lost
            self.load, self.bound_s = load, bound_s
            self.done = True
            if not self._ended:
                self._leases, leases = leases, []
        for lease in leases:
            lease.release()

    def end(self) -> None:
        """Unpin; an answer still to come is given back."""
        with self._lock:
            self._ended = True
            leases, self._leases = self._leases, []
        for lease in leases:
            lease.release()

    @property
    def stale(self) -> bool:
        """Whether what it found may be gone again, or more be there."""
        if self.fresh_until is not None:
            return time.monotonic() > self.fresh_until
        return (
            self.done and self.hits > 0 and not (self._leases and all(lease.alive for lease in self._leases))
        )


class Lookups:
    def __init__(
        self, link: Link, choice: ComputeOrLoad, *, chunk_tokens: int, lookup_s: float, hold_s: float
    ) -> None:
        self._link = link
        self._choice = choice
        self._chunk_tokens = chunk_tokens
        self._lookup_s = lookup_s
        self._hold_s = hold_s
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kv-lookup")
        self._changed = threading.Condition()  # guards both below
        self._waiting = 0
        self._unseen = False
        """Whether there was an answer since somebody waited for one."""

    def start(
        self,
        spec: NamespaceSpec | None,
        block_hashes: Sequence[bytes],
        adapter: Callable[[], bytes],
        key: Callable[[bytes, bytes], bytes],
        *,
        promised: int = 0,
    ) -> Lookup:
        """Ask about a request's leading blocks. `adapter` may read files; `key` makes a chunk's key of both;
        `promised`: so many of them another engine is about to save."""
        now = time.monotonic()
        lookup = Lookup(now + self._lookup_s, now + self._lookup_s + self._hold_s)
        lookup.begun = now
        with self._changed:
            if self._waiting >= WAITING_MAX:
                lookup.settle([], 0, (), None)
                return lookup
            self._waiting += 1
        self._threads.submit(self._run, lookup, spec, list(block_hashes), adapter, key, promised)
        return lookup

    def at_once(
        self,
        spec: NamespaceSpec,
        keys: Sequence[ChunkKey],
        adapter: bytes,
        *,
        local: int | None,
        ahead: int,
        waits: bool = True,
        promised: int = 0,
    ) -> Lookup | None:
        """What the directory in shared memory says; None: it cannot tell enough, and the daemon has to be asked.
        `local`: leading blocks that vLLM has; None: only the keys are wanted yet; `ahead`: chunks that our loads wait
        for; `waits`: whether the load can wait for the SSD."""
        namespace = self._link.ready(spec)
        found = peek(namespace, keys if local is not None else keys[:1]) if namespace is not None else None
        if namespace is None or found is None or found.usable < min(promised, len(keys)):
            return None
        rate = self._choice.ssd_bytes_per_s
        if local is not None and found.usable > max(found.hits, local) and not (rate and waits):
            return None  # nobody has told yet how fast the SSD is, or the lookup has to wait for it
        now = time.monotonic()
        lookup = Lookup(now, now)
        lookup.begun = lookup.fresh_until = now
        if local is None:
            lookup.settle([], 0, keys, adapter)
            return lookup
        lookup.fresh_until += FRESH_S
        lookup.local = local
        size = namespace.spec.chunk_bytes
        in_dram = max(found.hits, local)
        plan = self._choice.choose(
            Found(
                [number < in_dram for number in range(found.usable)],
                self._chunk_tokens,
                size,
                ahead * size,
                int(rate),
            ),
            now=now,
            wait_max_s=self._lookup_s,
            have=local,
        )
        lookup.cold = max(0, plan.chunks - in_dram)
        lookup.wait_s = plan.wait_s if lookup.cold else 0.0
        if plan.chunks > local:
            lookup.delay.begin(plan, Tier.SSD if lookup.cold else Tier.DRAM, now)
        self._choice.answered(useful=plan.chunks > local)
        lost = keys[found.usable] if found.usable < len(keys) else None
        lookup.settle([], found.usable, keys, adapter, lost, load=plan.chunks, bound_s=plan.bound_s)
        return lookup

    def note(self, spec: NamespaceSpec, lookup: Lookup) -> None:
        """The daemon is told of a request that `at_once` has answered."""
        namespace = self._link.ready(spec)
        if namespace is not None:
            note(namespace, lookup.keys, lookup.hits)

    def await_answer(self, timeout_s: float) -> None:
        """Until an answer is there that no earlier call waited for; not when none is under way."""
        with self._changed:
            if self._waiting:
                self._changed.wait_for(lambda: self._unseen, timeout_s)
            self._unseen = False

    def _run(
        self,
        lookup: Lookup,
        spec: NamespaceSpec | None,
        block_hashes: list[bytes],
        adapter: Callable[[], bytes],
        key: Callable[[bytes, bytes], bytes],
        promised: int,
    ) -> None:
        leases: list[ReadLease] = []
        hits = load = 0
        bound_s = math.inf
        lost: ChunkKey | None = None
        keys: list[ChunkKey] = []
        digest: bytes | None = None
        try:
            digest = adapter()
            keys = [ChunkKey(key(digest, block_hash)) for block_hash in block_hashes]
            left_s = max(0.0, lookup.deadline - time.monotonic())
            namespace = self._link.namespace(spec, left_s) if spec is not None and keys else None
            if namespace is not None:
                looked = look_up(
                    namespace,
                    keys,
                    self._choice,
                    leases,
                    chunk_tokens=self._chunk_tokens,
                    deadline=lookup.deadline - ANSWER_S,
                    have=lambda: lookup.local,
                    promised=promised,
                    delay=lookup.delay,
                )
                hits, load, lost, bound_s = looked.hits, looked.load, looked.lost, looked.plan.bound_s
        except Exception as error:
            # An adapter that cannot be told, or our bug: the request is computed either way, and the thread lives on.
            log.warning("a request is computed without the store: %s", error, exc_info=not _expected(error))
        finally:
            self._choice.answered(useful=load > lookup.local)
            lookup.settle(leases, hits, keys, digest, lost, load=load, bound_s=bound_s)
            with self._changed:
                self._waiting -= 1
                self._unseen = True
                self._changed.notify_all()

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)


def _expected(error: Exception) -> bool:
    return isinstance(error, (StoreError, OSError))
