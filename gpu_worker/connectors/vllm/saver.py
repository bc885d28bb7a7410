"""A rank's saves: blocks that a step made full are copied aside within that step, and sent to the store by a thread.

vLLM may give a block to another request in the very next step, so nothing of it is read after the step. The memory for
it is bounded; what does not fit is dropped and counted, never waited for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.errors import StoreError
from kvstore.gpu_worker.connectors.vllm.metadata import Changes
from kvstore.gpu_worker.connectors.vllm.stats import Tally
from kvstore.gpu_worker.device import Event
from kvstore.types import ChunkKey, GrantResult

if TYPE_CHECKING:
    from kvstore.client import Namespace
    from kvstore.gpu_worker.connectors.link import Link
    from kvstore.gpu_worker.connectors.vllm.held import Held
    from kvstore.layout import NamespaceSpec

Shard = npt.NDArray[np.uint8]
BATCH_BYTES_MAX = 16 << 20
"""Reserved, copied and committed at a time: well below a worker's staging memory."""
BATCH_CHUNKS_MAX = 256
UNVERIFIED_MAX = 16_384
"""Batches remembered until the weights that have computed them are verified."""
VERIFIED_MAX = 64
"""Batches remembered beyond that, for what the other ranks held: these are heard of a step or two later."""
ALREADY = (GrantResult.ALREADY, GrantResult.BUSY)
"""BUSY: somebody else is saving the same chunk just now."""
FULL_AGAIN_S = 0.05
"""When the store has no room for a block, it is asked again after so long: the segment that a new namespace gets from
another one comes only when all workers have unmapped it."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Copied:
    """One chunk's shard, copied out of the engine's memory."""

    spec: NamespaceSpec
    key: ChunkKey
    parent: ChunkKey
    shard: Shard
    ready: Event | None = None
    """When the copy is there; None: it is."""
    until: float = 0.0
    """So long (time.monotonic) the store is asked again if it has no room."""


@dataclass(frozen=True, slots=True)
class Recall:
    """Of what was saved before it the store shall forget these, or all that is not verified."""

    keys: frozenset[ChunkKey] | None = None


class Saver:
    def __init__(
        self,
        link: Link,
        shard_bytes: int,
        shard: int,
        tally: Tally,
        changes: Changes,
        *,
        queue_bytes: int,
        save_s: float,
        maker: bytes,
        make: Callable[[], Shard] | None = None,
    ) -> None:
        """`shard`: the number of this rank's; `maker`: 16 bytes. `make`: memory for a shard, by default of the host's
        plain kind."""
        self._link = link
        self._shard_bytes = shard_bytes
        self._make = make or (lambda: np.empty(shard_bytes, np.uint8))
        self._shard = shard
        self._tally = tally
        self._changes = changes
        self._save_s = save_s
        self._maker = maker
        self._left = queue_bytes // shard_bytes
        """Buffers that may still be made."""
        self._changed = threading.Condition()  # guards all below and `_left`
        self._free: list[Shard] = []
        self._queue: deque[Copied | Recall] = deque()
        self._unverified: deque[tuple[float, Namespace, list[ChunkKey]]] = deque(maxlen=UNVERIFIED_MAX)
        """What was saved, by the time of its commit, that nobody has vouched for yet."""
        self._verified: deque[tuple[Namespace, list[ChunkKey]]] = deque(maxlen=VERIFIED_MAX)
        """The last for which this rank has."""
        self._doubts = 0
        self._busy = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-saver", daemon=True)
        self._thread.start()

    def buffers(self, count: int) -> list[Shard]:
        """Up to `count` rows to copy a shard to; each goes to `put` or to `give_back`."""
        with self._changed:
            taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
            made = min(count - len(taken), self._left)
            self._left -= made
        return taken + [self._make() for _ in range(made)]

    def give_back(self, buffers: Sequence[Shard]) -> None:
        with self._changed:
            self._free += buffers

    def put(self, copied: Sequence[Copied]) -> None:
        with self._changed:
            self._queue += copied
            self._changed.notify_all()

    def follow(self, held: Held) -> None:
        """Once weights were others since nobody knows when, the store shall forget what was saved and not verified
        since, after what is queued: it may have been computed with other weights already."""
        with self._changed:
            if held.doubts != self._doubts:
                self._doubts = held.doubts
                self._queue.append(Recall())
                self._changed.notify_all()
            elif not any(isinstance(waiting, Recall) for waiting in self._queue):
                while self._unverified and self._unverified[0][0] < held.verified_at:
                    _, namespace, saved = self._unverified.popleft()
                    self._verified.append((namespace, saved))

    def recall(self, keys: frozenset[ChunkKey]) -> None:
        """The store shall forget these, after what is queued: a rank held other weights when they were computed."""
        with self._changed:
            self._queue.append(Recall(keys))
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Waits until all is saved or dropped; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._busy, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Saves what is queued, for at most `timeout_s`, and drops the rest."""
        flushed = self.flush(timeout_s)
        with self._changed:
            self._closing = True
            dropped = sum(isinstance(copied, Copied) for copied in self._queue)
            self._queue.clear()
            self._changed.notify_all()
        if not flushed:
            log.warning("%d blocks were not saved before the end", dropped)
            self._tally.add(blocks_dropped=dropped)
        self._thread.join(self._save_s + 1)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                recall, batch = self._take()
                self._busy = max(1, len(batch))
            again: list[Copied] = []
            try:
                if recall is not None:
                    self._recall(recall)
                else:
                    again = self._save(batch)
            except StoreError as error:
                log.info("not saved: %s", error)
                self._tally.add(blocks_refused=len(batch))
            except Exception:
                # Our bug; the engine goes on, and so does the next save.
                log.exception("a save failed")
                self._tally.add(blocks_refused=len(batch))
            finally:
                self._end(batch, again)

    def _end(self, batch: Sequence[Copied], again: Sequence[Copied]) -> None:
        """Of the batch, those in `again` come first with the next one, after a pause."""
        waiting = set(map(id, again))
        with self._changed:
            self._busy = 0
            self._free += [copied.shard for copied in batch if id(copied) not in waiting]
            self._queue.extendleft(reversed(again))
            self._changed.notify_all()
            if again:
                self._changed.wait_for(lambda: self._closing, FULL_AGAIN_S)

    def _recall(self, recall: Recall) -> None:
        with self._changed:
            suspect = [(namespace, saved) for _, namespace, saved in self._unverified]
            if recall.keys is None:
                self._unverified.clear()
            else:
                suspect += self._verified
        for namespace, saved in suspect:
            keys = saved if recall.keys is None else [key for key in saved if key in recall.keys]
            if not keys:
                continue
            try:
                forgotten = namespace.forget(keys=keys, timeout_s=self._save_s)
            except StoreError as error:
                log.warning("%d blocks of changed weights may still be in the store: %s", len(keys), error)
                continue
            self._tally.add(blocks_recalled=forgotten)

    def _take(self) -> tuple[Recall | None, list[Copied]]:
        """What is to be forgotten now; else the longest batch of one namespace, each chunk once. Caller locks."""
        most = min(BATCH_CHUNKS_MAX, max(1, BATCH_BYTES_MAX // self._shard_bytes))
        batch: list[Copied] = []
        seen: set[ChunkKey] = set()
        while self._queue and len(batch) < most:
            following = self._queue[0]
            if isinstance(following, Recall):
                if batch:
                    break
                self._queue.popleft()
                return following, []
            if batch and (following.spec is not batch[0].spec or following.key in seen):
                break
            seen.add(following.key)
            batch.append(following)
            self._queue.popleft()
        return None, batch

    def _save(self, batch: Sequence[Copied]) -> list[Copied]:
        """Those for which there is no room yet."""
        for ready in {
            id(copied.ready): copied.ready for copied in batch if copied.ready is not None
        }.values():
            ready.synchronize()
        namespace = self._link.namespace(batch[0].spec, self._save_s)
        if namespace is None:
            self._tally.add(blocks_dropped=len(batch))
            return []
        with namespace.write(
            [copied.key for copied in batch],
            parents=[copied.parent for copied in batch],
            shards=(self._shard,),
            maker=self._maker,
            timeout_s=self._save_s,
        ) as write:
            write.copy_many([(index, None, batch[index].shard) for index in write.granted])
            outcome = write.commit(timeout_s=self._save_s)
        there = [
            copied.key
            for copied, result in zip(batch, write.results, strict=True)
            if result is GrantResult.ALREADY or (result is GrantResult.GRANTED and outcome.ok)
        ]
        if write.granted:
            # Also if the commit was not answered: it may have been done.
            with self._changed:
                mine = [batch[index].key for index in write.granted]
                self._unverified.append((time.monotonic(), namespace, mine))
        self._changes.add(namespace.spec, there, self._shard)
        already = sum(result in ALREADY for result in write.results)
        if self._shard == 0:  # computed again, which was a use; one rank tells of it
            again = [
                copied.key
                for copied, result in zip(batch, write.results, strict=True)
                if result is GrantResult.ALREADY
            ]
            if again:
                namespace.touch(again)
        now = time.monotonic()
        waiting = [
            copied
            for copied, result in zip(batch, write.results, strict=True)
            if result is GrantResult.FULL and now < copied.until
        ]
        saved = len(write.granted) if outcome.ok else 0
        if not outcome.ok:
            log.info("not saved: %s", outcome.error)
        self._tally.add(
            blocks_saved=saved,
            bytes_saved=saved * self._shard_bytes,
            blocks_already=already,
            blocks_refused=len(batch) - already - saved - len(waiting),
        )
        return waiting
