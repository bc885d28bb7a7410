"""Rows into the store: the daemon reads them out of the engine's file itself, and what it read becomes visible only if
the row was still ours when it had."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore.errors import DeadlineExceeded, Precondition, StoreError, Unavailable
from kvstore.gpu_worker.connectors.offload.crew import Crew
from kvstore.gpu_worker.connectors.offload.lookups import Opener
from kvstore.gpu_worker.connectors.offload.rows import Rows
from kvstore.gpu_worker.connectors.offload.tally import Tally
from kvstore.gpu_worker.connectors.offload.transfers import Transfer, Transfers
from kvstore.types import ChunkKey, GrantResult

if TYPE_CHECKING:
    from kvstore.client import Client, Namespace, Region, WriteBatch

PART_BYTES_MAX = 32 << 20
"""Reserved, read and committed at a time."""
PART_KEYS_MAX = 256
UNVERIFIED_MAX = 16_384
"""Parts remembered until the weights that have computed them are verified."""
RECALL_S = 5.0
ALREADY = (GrantResult.ALREADY, GrantResult.BUSY)
"""BUSY: somebody else is saving the same chunk just now."""
FULL_AGAIN_S = 0.05
"""When the store has no room for a part, it is asked again after so long: the segment that a new namespace gets from
another one comes only when all workers have unmapped it."""
FULL_S = 2.0
"""For no longer: meanwhile the engine cannot use the rows."""
PASSING = (Unavailable, DeadlineExceeded, Precondition)
"""Says nothing about the next time."""
log = logging.getLogger(__name__)


class RowSaver:
    """Saves as transient: the engine has the row itself, so the daemon need not keep it in memory as well."""

    def __init__(
        self, rows: Rows, crew: Crew, opener: Opener, tally: Tally, *, rows_max: int, maker: bytes
    ) -> None:
        """`rows_max`: rows that waiting saves may keep from the engine; `maker`: 16 bytes."""
        self._rows = rows
        self._opener = opener
        self._tally = tally
        self._maker = maker
        self._part = max(1, min(PART_KEYS_MAX, PART_BYTES_MAX // rows.chunk_bytes))
        self._region: Region | None = None
        self._adoptable = rows.fd is not None
        self._crew = crew
        self._unverified: deque[tuple[float, Namespace, list[ChunkKey]]] = deque(maxlen=UNVERIFIED_MAX)
        """What was saved, by the time of its commit, that nobody has vouched for yet."""
        self.transfers = Transfers(crew, rows_max=rows_max)

    def start(self, transfer: Transfer, parents: Sequence[ChunkKey]) -> None:
        """`parents`: of each key, the one before it in its chain, or ROOT."""
        if not self.transfers.start(transfer, lambda: self._save(transfer, parents)):
            self._tally.add(saves_dropped=1, blocks_dropped=len(transfer.keys))

    def refuse(self, transfer: Transfer) -> None:
        """It fails without having been tried."""
        self.transfers.start(transfer, None)
        self._tally.add(saves_dropped=1, blocks_dropped=len(transfer.keys))

    def verified(self, at: float) -> None:
        """What was saved before that (time.monotonic) was computed with the weights that it is named for."""
        unverified = self._unverified
        while unverified and unverified[0][0] < at:
            unverified.popleft()

    def recall(self) -> bool:
        """Weights were others since nobody knows when: after what is under way, the store shall forget what was saved
        and not verified since. False: too much waits, try again."""
        return self._crew.offer(self._recall)

    def _recall(self) -> None:
        while self._unverified:
            _, namespace, keys = self._unverified.popleft()
            try:
                forgotten = namespace.forget(keys=keys, timeout_s=RECALL_S)
            except StoreError as error:
                log.warning("%d chunks of changed weights may still be in the store: %s", len(keys), error)
                continue
            self._tally.add(blocks_recalled=forgotten)

    def close(self) -> None:
        """After its crew has ended."""
        if self._region is not None:
            self._region.close()

    def _save(self, transfer: Transfer, parents: Sequence[ChunkKey]) -> None:
        try:
            namespace = self._opener(transfer.left_s)
            if namespace is not None:
                for start in range(0, len(transfer.keys), self._part):
                    numbers = range(start, min(start + self._part, len(transfer.keys)))
                    if transfer.over or not self._save_part(namespace, transfer, numbers, parents):
                        break
        except StoreError as error:
            log.info("not saved: %s", error)
        finally:
            transfer.end()
        self._tally.add(blocks_refused=len(transfer.keys) - sum(transfer.done))

    def _save_part(
        self, namespace: Namespace, transfer: Transfer, numbers: Sequence[int], parents: Sequence[ChunkKey]
    ) -> bool:
        """False: the store cannot be reached, or was too slow; the rest need not be tried."""
        numbers = [number for number in numbers if self._is_whole(transfer, number)]
        if not numbers:
            return not transfer.over
        region = self._adopted(namespace.client) if self._adoptable else None
        with namespace.write(
            [transfer.keys[number] for number in numbers],
            parents=[parents[number] for number in numbers],
            maker=self._maker,
            transient=True,
            staged=region is None,
            timeout_s=transfer.left_s,
        ) as batch:
            if batch.error is not None:
                log.info("not saved: %s", batch.error)
                return False
            granted = [numbers[index] for index in batch.granted]
            if granted:
                # What was read is good only if the rows were still ours afterwards.
                if not self._read(batch, transfer, granted, region) or transfer.over:
                    return False
                mine = [transfer.keys[number] for number in granted]
                self._unverified.append((time.monotonic(), namespace, mine))
                outcome = batch.commit(timeout_s=transfer.left_s)
                if not outcome.ok:
                    log.info("not saved: %s", outcome.error)
                    return False
        already = [numbers[index] for index, result in enumerate(batch.results) if result in ALREADY]
        if already:
            namespace.touch([transfer.keys[number] for number in already])  # computed again: that was a use
        if transfer.hold():
            for number in (*granted, *already):
                transfer.done[number] = True
            transfer.let_go()
        self._tally.add(
            blocks_saved=len(granted),
            bytes_saved=len(granted) * self._rows.chunk_bytes,
            bytes_shared=len(granted) * self._rows.shared_bytes,
            blocks_already=len(already),
        )
        refused = [numbers[index] for index, result in enumerate(batch.results) if result is GrantResult.FULL]
        # The daemon may lend less staging memory than a part needs: it is free again now.
        soon = region is None and granted
        if refused and not transfer.over and (soon or _pause(transfer)):
            return self._save_part(namespace, transfer, refused, parents)
        return True

    def _is_whole(self, transfer: Transfer, number: int) -> bool:
        """Whether the row's replicas are replicas: whatever vLLM says of its ranks, a part is never stored for others
        that hold something else."""
        if not self._rows.shared_bytes:
            return True
        if not transfer.hold():
            return False
        try:
            same = self._rows.agree(transfer.rows[number])
        finally:
            transfer.let_go()
        if not same:
            self._tally.add(replicas_differ=1)
        return same

    def _read(
        self, batch: WriteBatch, transfer: Transfer, granted: Sequence[int], region: Region | None
    ) -> bool:
        """The granted rows into the batch. False: the transfer was over before that."""
        if region is not None:
            offsets = [offset for number in granted for offset in self._rows.offsets(transfer.rows[number])]
            try:
                batch.fill(region, offsets, timeout_s=transfer.left_s)
            except PASSING:
                raise
            except StoreError:
                # The daemon will not have these rows: the next ones go through staging memory.
                self._adoptable = False
                raise
            return True
        for index, number in zip(batch.granted, granted, strict=True):
            if not transfer.hold():
                return False
            try:
                parts = dict(reversed(self._rows.parts(transfer.rows[number])))  # one copy of each shard
                batch.copy_many([(index, shard, part) for shard, part in parts.items()])
            finally:
                transfer.let_go()
        return True

    def _adopted(self, client: Client) -> Region | None:
        """The rows as the daemon's region; None: they go through staging memory."""
        if self._region is None:
            assert self._rows.fd is not None
            try:
                self._region = client.adopt(self._rows.fd, self._rows.size_bytes)
                log.info("the daemon reads rows by itself: %r", self._region)
            except PASSING:
                return None
            except StoreError as error:
                self._adoptable = False
                log.warning("rows go through staging memory: %s", error)
        return self._region


def _pause(transfer: Transfer) -> bool:
    """Before the store is asked for room again; False: it was asked for long enough."""
    if time.monotonic() - transfer.begun > FULL_S or transfer.left_s <= FULL_AGAIN_S:
        return False
    time.sleep(FULL_AGAIN_S)
    return not transfer.over
