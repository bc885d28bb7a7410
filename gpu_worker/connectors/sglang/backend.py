"""HiCacheStorage of SGLang: pages of its host memory are chunks of the store, under SGLang's own hashes.

SGLang calls from two threads of its own, one that looks up and loads ahead of the scheduler, and one that saves behind
it. None of these calls raises or waits beyond its deadline: what cannot be had is not there, and is computed.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from kvstore.client import Peeked
from kvstore.errors import BadRequest, StoreError, Unsupported
from kvstore.gpu_worker.connectors.link import Link
from kvstore.gpu_worker.connectors.sglang.identity import (
    after_reset,
    extra_of,
    find_owner,
    namespace_of,
    page_pieces,
    watch,
)
from kvstore.gpu_worker.connectors.sglang.settings import Settings
from kvstore.keys import ROOT
from kvstore.types import ChunkKey, GrantResult, Outcome

if TYPE_CHECKING:
    from kvstore.client import Namespace
    from kvstore.layout import NamespaceSpec

KEPT = frozenset({GrantResult.GRANTED, GrantResult.ALREADY, GrantResult.BUSY})
"""Of a save: it is in the store, or somebody is saving it."""
COMPLAIN_EVERY_S = 60.0
log = logging.getLogger(__name__)
Result = TypeVar("Result")
Bits = npt.NDArray[np.uint8]


class KVStoreHiCache(HiCacheStorage):  # type: ignore[misc] # SGLang is not typed
    """One in each rank's scheduler process; SGLang makes it, see docs/sglang.md."""

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        """Raises ConfigError or Unsupported, naming the setting: SGLang then does not start."""
        self._config = storage_config
        self._settings = Settings.of(extra_of(storage_config))
        self._owner = find_owner(storage_config, self._settings)
        self._link = Link(
            self._settings.run_dir,
            engine_group=f"sglang-{self._owner.nonce.hex()}-{storage_config.pp_rank}",
            rank=storage_config.tp_rank,
            timeout_s=self._settings.connect_ms / 1000,
            staging_bytes=self._settings.staging_bytes,
        )
        self._shard = 0 if storage_config.is_mla_model else storage_config.tp_rank
        self._changed = threading.Lock()  # guards the next four
        self._spec: NamespaceSpec | None = None
        """None: what is computed now has no name."""
        self._named: NamespaceSpec | None = None
        """As `_spec`, before the weights changed."""
        self._resets = 0
        self._generation = 0
        """Counts changes of `_spec`: who began before one keeps nothing of what it did."""
        self._pieces: list[int] = []
        self._complained: dict[str, float] = {}
        self._stats = _Stats() if storage_config.enable_storage_metrics else None
        watch(self)

    def __repr__(self) -> str:
        return (
            f"KVStoreHiCache({self._config.model_name}, rank {self._config.tp_rank}, {self._resets} resets)"
        )

    # ---------------------------------------------------------------------------------------------------- attaching

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        spec = namespace_of(self._config, mem_pool_host, self._owner, self._settings)
        self._pieces = page_pieces(mem_pool_host)
        with self._changed:
            self._spec = self._named = spec
            self._generation += 1
        self._link.open(spec)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if str(host_pool_name) == "kv":
            return
        raise Unsupported(
            "pages of several pools belong together, which is not built yet (windows, Mamba, indexers, drafts)",
            field="host pool",
            value=str(host_pool_name),
            remedy="serve this model without --hicache-storage-backend",
        )

    def weights_changing(self) -> None:
        """From here on what SGLang has in its caches is of other weights than `_spec` names, until they are flushed."""
        with self._changed:
            if self._spec is not None:
                log.info("weights change: nothing is loaded or saved until SGLang has flushed its cache")
            self._spec = None
            self._generation += 1

    def flushed(self) -> None:
        """SGLang's caches are empty."""
        with self._changed:
            if self._spec is not None or self._named is None:
                return
            self._resets += 1
            self._generation += 1
            self._spec = self._named = after_reset(self._named, self._owner, self._resets)
            self._link.open(self._spec)

    def clear(self) -> None:
        """Nothing that was stored before is found again by this engine; `kvctl forget` frees it."""
        self.weights_changing()
        self.flushed()

    def close(self) -> None:
        with self._changed:
            self._spec = self._named = None
            self._generation += 1
        self._link.close()

    # ------------------------------------------------------------------------------------------------ what SGLang asks

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many of the keys, from the first, could be loaded, from whatever tier."""
        return self._safely("looked up", 0, lambda: self._count(keys))

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Fills the pages at these indices. Of each whether it has its bytes; of the others they are undefined."""
        return self._safely("loaded", [False] * len(keys), lambda: self._load(keys, host_indices))

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        before = getattr(extra_info, "prefix_keys", None)
        return self._safely("saved", [False] * len(keys), lambda: self._save(keys, host_indices, before))

    def get_stats(self) -> Any:
        return self._stats.take() if self._stats is not None else None

    # Of SGLang's older interface, which `interface_v1` replaces; SGLang's base class asks for them.
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        return None

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> int:
        return 0

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return False

    # ------------------------------------------------------------------------------------------------ how it is done

    def _safely(self, what: str, otherwise: Result, call: Callable[[], Result]) -> Result:
        """An error would end SGLang's thread, and whoever waits for that would wait for ever."""
        try:
            return call()
        except Exception as error:
            now = time.monotonic()
            if now - self._complained.get(what, -COMPLAIN_EVERY_S) >= COMPLAIN_EVERY_S:
                self._complained[what] = now
                expected = isinstance(error, (StoreError, ValueError))
                log.warning("nothing is %s: %s", what, error, exc_info=not expected)
            return otherwise

    def _namespace(self, timeout_ms: int) -> tuple[Namespace, int] | None:
        """And the generation that it is of."""
        with self._changed:
            spec, generation = self._spec, self._generation
        if spec is None:
            return None
        namespace = self._link.namespace(spec, timeout_ms / 1000)
        return None if namespace is None else (namespace, generation)

    def _count(self, keys: Sequence[str]) -> int:
        found = self._namespace(self._settings.lookup_ms)
        if found is None:
            return 0
        namespace, generation = found
        named = _keys(keys)
        matched = namespace.match(named, timeout_s=self._settings.lookup_ms / 1000)
        if generation != self._generation:
            return 0
        count = next(
            (number for number, outcome in enumerate(matched.outcomes) if outcome is Outcome.MISS),
            len(matched.outcomes),
        )
        namespace.note_lookup(named, Peeked(count, count))  # only what is there will be read
        return count

    def _load(self, keys: Sequence[str], indices: Any) -> list[bool]:
        found = self._namespace(self._settings.lookup_ms)
        if found is None:
            return [False] * len(keys)
        namespace, generation = found
        begun = time.monotonic()
        pages = self._pages(indices, len(keys))
        named = _keys(keys)
        loaded = 0
        while loaded < len(named):
            left_s = begun + self._settings.load_ms / 1000 - time.monotonic()
            if left_s <= 0:
                break
            with namespace.read(
                named[loaded:], shards=(self._shard,), wait_ms=max(1, int(1000 * left_s)), timeout_s=left_s
            ) as lease:
                pieces = [
                    (number, self._shard, offset, bits)
                    for number, page in enumerate(pages[loaded : loaded + lease.hits])
                    for offset, bits in page
                ]
                if pieces and not lease.copy_many(pieces):
                    break
                loaded += lease.hits
                # What is on SSD is being read; what comes is leased in the next round.
                if loaded < len(named) and not lease.settled(max(0.0, left_s)):
                    break
        if generation != self._generation:
            return [False] * len(keys)
        if self._stats is not None:
            self._stats.loaded(loaded, loaded * sum(self._pieces), time.monotonic() - begun)
        return [True] * loaded + [False] * (len(keys) - loaded)

    def _save(self, keys: Sequence[str], indices: Any, before: Sequence[str] | None) -> list[bool]:
        """`before`: the hashes of the pages in front of these, if SGLang tells them."""
        parent = _key(before[-1]) if before else ROOT
        found = self._namespace(self._settings.lookup_ms)
        if found is None:
            return [False] * len(keys)
        namespace, generation = found
        begun = time.monotonic()
        timeout_s = self._settings.save_ms / 1000
        pages = self._pages(indices, len(keys))
        with namespace.write(_keys(keys), parent=parent, shards=(self._shard,), timeout_s=timeout_s) as batch:
            kept = [result in KEPT for result in batch.results]
            granted = list(batch.granted)
            for number in granted:
                buffer = batch.buffer(number, self._shard)
                for offset, bits in pages[number]:
                    buffer[offset : offset + bits.nbytes] = bits
                batch.written(number, self._shard)
            if generation != self._generation:  # it is of weights that nobody can name any more
                batch.abort()
                return [False] * len(keys)
            if not granted:
                return kept
            outcome = batch.commit(timeout_s=timeout_s)
        if not outcome.ok:
            for number in granted:
                kept[number] = False
            if outcome.error is not None:
                log.info("a batch of %d pages was not saved: %s", len(granted), outcome.error)
            return kept
        if self._stats is not None:
            self._stats.saved(len(granted), len(granted) * sum(self._pieces), time.monotonic() - begun)
        return kept

    def _pages(self, indices: Any, count: int) -> list[list[tuple[int, Bits]]]:
        """Of each page its pieces in host memory, with where they stand in a shard. Raises BadRequest."""
        pointers, sizes = self.mem_pool_host.get_page_buffer_meta(indices)
        each = len(self._pieces)
        if len(pointers) != count * each or list(sizes) != self._pieces * count:
            raise BadRequest("are not whole pages", field="host_indices", value=f"{len(pointers)} pieces")
        starts = np.cumsum([0, *self._pieces[:-1]]).tolist()
        return [
            [
                (start, _bits(pointers[number * each + piece], self._pieces[piece]))
                for piece, start in enumerate(starts)
            ]
            for number in range(count)
        ]


def _bits(address: int, size: int) -> Bits:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(int(address)))


def _key(digest: str) -> ChunkKey:
    return ChunkKey(bytes.fromhex(digest))


def _keys(digests: Sequence[str]) -> list[ChunkKey]:
    """SGLang's hashes are 64 hexadecimal digits. Raises ValueError."""
    return list(map(_key, digests))


class _Stats:
    """What SGLang's metrics ask for: of each batch since they asked last, pages and gigabytes a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: list[tuple[int, float]] = []
        self._saved: list[tuple[int, float]] = []

    def loaded(self, pages: int, size: int, seconds: float) -> None:
        self._note(self._loaded, pages, size, seconds)

    def saved(self, pages: int, size: int, seconds: float) -> None:
        self._note(self._saved, pages, size, seconds)

    def _note(self, where: list[tuple[int, float]], pages: int, size: int, seconds: float) -> None:
        if pages:
            with self._lock:
                where.append((pages, size / max(seconds, 1e-9) / 1e9))
                del where[:-1000]

    def take(self) -> Any:
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            loaded, self._loaded = self._loaded, []
            saved, self._saved = self._saved, []
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in loaded],
            prefetch_bandwidth=[speed for _, speed in loaded],
            backup_pgs=[pages for pages, _ in saved],
            backup_bandwidth=[speed for _, speed in saved],
        )
