"""Between the paged pool and the store: what is there of a prompt is loaded into chunks; chunks that are full, saved.

Nothing here holds up a forward call: lookups have a thread, loads another, saves a third. What is late, void or finds
no room is computed, or dropped and counted.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from kvstore.errors import Unsupported
from kvstore.gpu_worker.hbm_pool import HbmPool
from kvstore.gpu_worker.layout import Bits, bits
from kvstore.gpu_worker.loader import Load, Loader, Piece
from kvstore.gpu_worker.saver import Layers, Saver, TurnSave
from kvstore.gpu_worker.store import CONNECT_AGAIN_S, Store
from kvstore.kernels.pages import BlockTable, gather
from kvstore.layout import NamespaceSpec
from kvstore.types import KEYS_PER_REQUEST_MAX, Outcome, Reason

if TYPE_CHECKING:
    from kvstore.client import Client, ReadLease
    from kvstore.gpu_worker.scheduling import Running

log = logging.getLogger(__name__)


class PoolStore:
    """All methods but `close` return at once, and are called from the engine's thread."""

    def __init__(
        self,
        model: PreTrainedModel,
        pool: HbmPool,
        connect: Callable[[], Client],
        *,
        spec: NamespaceSpec | None,
        counters: Counter[str],
        lookup_timeout_s: float = 0.5,
        promote_timeout_s: float = 1.0,
        save_timeout_s: float = 5.0,
    ) -> None:
        """`spec`: of the namespace; None: none for now (see `use`). Raises Unsupported for a model that is not in CPU
        memory, and whatever the daemon has against us."""
        if model.device.type != "cpu":
            raise Unsupported(
                "KV is stored from CPU memory only, so far", field="model.device", value=model.device
            )
        self._pool = pool
        self._chunk_tokens = pool.geometry.chunk_tokens
        self._lookup_timeout_s = lookup_timeout_s
        self._store = Store(
            connect,
            spec,
            lookup_timeout_s=lookup_timeout_s,
            promote_timeout_s=promote_timeout_s,
            counters=counters,
        )
        self._lookups = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-lookup")
        self._no_lookup_before = 0.0
        self._loader = Loader(pool.geometry)
        self.saver = Saver(pool.geometry, timeout_s=save_timeout_s)

    def use(self, spec: NamespaceSpec | None) -> None:
        """From now on loads and saves are those of this namespace; None: there are none."""
        self._store.use(spec)

    def look_up(self, tokens: Sequence[int]) -> Future[ReadLease | None] | None:
        """Of the full chunks of `tokens`, leaving at least one to compute; None if the store is not there."""
        namespace = self._store.namespace()
        whole = (len(tokens) - 1) // self._chunk_tokens
        if namespace is None or whole == 0 or time.monotonic() < self._no_lookup_before:
            return None
        keys = namespace.keys(tokens[: whole * self._chunk_tokens])[:KEYS_PER_REQUEST_MAX]

        def ask() -> ReadLease | None:
            began = time.monotonic()
            try:
                lease = self._store.read(namespace, keys)
            except Exception:
                # Our bug, or the client's: said loudly here, while the model must not wait for what will not come.
                log.exception("looking up failed")
                return None
            late = time.monotonic() - began >= self._lookup_timeout_s
            if (
                late and lease.reasons[0] is Reason.UNAVAILABLE
            ):  # it hangs: who comes next need not wait as long
                self._no_lookup_before = time.monotonic() + CONNECT_AGAIN_S
            return lease

        return self._lookups.submit(ask)

    def hits(self, lease: ReadLease | None) -> int:
        """How many leading chunks it has."""
        hit = [outcome is Outcome.HIT for outcome in lease.outcomes] if lease is not None else []
        return hit.index(False) if False in hit else len(hit)

    def load(self, lease: ReadLease, first: int, chunks: Sequence[int]) -> Load:
        """Chunk `first` of a prompt and those after it, into these of the pool. Takes over `lease`."""
        pieces = [
            Piece(first + number, (first + number) * self._chunk_tokens, self._chunk_tokens)
            for number in range(len(chunks))
        ]

        def place(layer: int, piece: Piece) -> Bits:
            return bits(self._pool.layers[layer][chunks[piece.index - first]])

        # Nobody waits for it but by asking whether it has ended: copies between memories end
        return self._loader.start(lease, pieces, place, deadline_s=float("inf"))

    def save(self, sequence: Running, first: int) -> None:
        """Its chunks from `first` on are new and full."""
        namespace = self._store.namespace()
        if namespace is None:
            return
        if sequence.save is None:
            chain = namespace.keys(sequence.tokens[: first * self._chunk_tokens])
            sequence.save = TurnSave(self.saver, namespace, "", None, chain)
        whole = sequence.computed // self._chunk_tokens
        sequence.save.extend(
            _Chunks(self._pool, sequence.chunks[:whole]), sequence.tokens[: whole * self._chunk_tokens]
        )

    def flush(self, timeout_s: float) -> bool:
        """Waits until all KV is saved or dropped; False if that took too long."""
        return self.saver.flush(timeout_s)

    def close(self, timeout_s: float) -> None:
        try:
            self._lookups.shutdown(wait=True)
            self._loader.close()
            self.saver.close(timeout_s)
        finally:
            self._store.close()


class _Chunks:
    """What a save reads."""

    def __init__(self, pool: HbmPool, chunks: Sequence[int]) -> None:
        self._pool = pool
        self._chunks = chunks

    def snapshot(self, first_token: int, /) -> Layers:
        """Copies: the chunks may be freed, and filled with other KV, before they are saved."""
        geometry = self._pool.geometry
        chunks = self._chunks[first_token // geometry.chunk_tokens :]
        tokens = len(chunks) * geometry.chunk_tokens
        table = BlockTable.of(
            chunks,
            blocks=len(self._pool.layers[0]),
            block_tokens=geometry.chunk_tokens,
            chunk_tokens=tokens,  # all of them side by side
        )
        layers = []
        for layer in self._pool.layers:
            together = layer.new_empty(1, 2, geometry.heads, tokens, geometry.head_dim)
            gather(layer[:, 0], layer[:, 1], table, together)
            layers.append((together[:, 0], together[:, 1]))
        return layers
