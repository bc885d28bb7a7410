"""Chunks into rows: one copy each, out of shared memory, with the generations compared before and after."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore.client import ReadLease
from kvstore.errors import StoreError
from kvstore.gpu_worker.compute_or_load import ComputeOrLoad
from kvstore.gpu_worker.connectors.offload.crew import Crew
from kvstore.gpu_worker.connectors.offload.lookups import Hit, Opener, Question, find
from kvstore.gpu_worker.connectors.offload.rows import Rows
from kvstore.gpu_worker.connectors.offload.tally import Tally
from kvstore.gpu_worker.connectors.offload.transfers import Transfer, Transfers
from kvstore.types import KEYS_PER_REQUEST_MAX, ChunkKey, Outcome

if TYPE_CHECKING:
    from kvstore.client import Namespace

log = logging.getLogger(__name__)


class RowLoader:
    def __init__(self, rows: Rows, crew: Crew, opener: Opener, tally: Tally, choice: ComputeOrLoad) -> None:
        """`choice` learns how fast copies and reads are."""
        self._choice = choice
        self._rows = rows
        self._opener = opener
        self._tally = tally
        self.transfers = Transfers(crew, rows_max=rows.count)

    def start(self, transfer: Transfer, hits: Sequence[Hit | None], questions: Sequence[Question]) -> None:
        """Copy each key of the transfer from its hit; look those up again that have none. Ends the questions. It is
        late once computing would have been faster, by what they say."""
        bound_s = max((question.bound_s for question in questions), default=math.inf)
        cold = frozenset[ChunkKey]().union(*(question.cold for question in questions))
        transfer.cold = sum(key in cold for key in transfer.keys)
        transfer.deadline = min(transfer.deadline, transfer.begun + bound_s)
        if not self.transfers.start(transfer, lambda: self._load(transfer, hits, questions)):
            self._tally.add(loads_dropped=1)
            _end(questions)

    def _load(self, transfer: Transfer, hits: Sequence[Hit | None], questions: Sequence[Question]) -> None:
        waited = False
        wait_s = min((question.wait_s for question in questions if question.cold), default=math.inf)
        try:
            missing = [
                number
                for number, hit in enumerate(hits)
                if hit is None or not self._copy(transfer, number, hit)
            ]
            if missing and not transfer.over:
                waited = self._look_again(transfer, missing, wait_s)
        except StoreError as error:
            log.warning("not loaded: %s", error)
        finally:
            _end(questions)
            transfer.end()
        loaded = sum(transfer.done)
        if loaded == len(transfer.keys) and not waited:
            self._choice.copy.observe(loaded * self._rows.row_bytes, time.monotonic() - transfer.begun)
        self._tally.add(
            blocks_loaded=loaded,
            bytes_loaded=loaded * self._rows.chunk_bytes,
            blocks_failed=len(transfer.keys) - loaded,
        )

    def _look_again(self, transfer: Transfer, missing: Sequence[int], wait_s: float) -> bool:
        """At first for what is in DRAM, without a message; what is left is on SSD, or may be by now, and is waited for
        until `wait_s` after the transfer began. Whether it waited."""
        namespace = self._opener(transfer.left_s)
        if namespace is None:
            return False
        waited = False
        for start in range(0, len(missing), KEYS_PER_REQUEST_MAX):
            part = missing[start : start + KEYS_PER_REQUEST_MAX]
            keys = [transfer.keys[number] for number in part]
            with namespace.read(keys, any_order=True, timeout_s=transfer.left_s) as lease:
                left = [
                    number
                    for index, number in enumerate(part)
                    if lease.outcomes[index] is not Outcome.HIT
                    or not self._copy(transfer, number, Hit(lease, index))
                ]
            if left and not transfer.over:
                waited = True
                self._await(namespace, transfer, left, min(transfer.deadline, transfer.begun + wait_s))
        return waited

    def _await(self, namespace: Namespace, transfer: Transfer, missing: Sequence[int], until: float) -> None:
        found: dict[ChunkKey, Hit] = {}
        leases: list[ReadLease] = []
        try:
            keys = [transfer.keys[number] for number in missing]
            find(namespace, keys, until, found, leases, prefix=False)
            for number in missing:
                hit = found.get(transfer.keys[number])
                if hit is not None:
                    self._copy(transfer, number, hit)
        finally:
            for lease in leases:
                self._choice.reads_from_ssd(lease.backlog.ssd_bytes_per_s)
                lease.release()

    def _copy(self, transfer: Transfer, number: int, hit: Hit) -> bool:
        if not transfer.hold():
            return False
        try:
            parts = self._rows.parts(transfer.rows[number])
            done = hit.lease.copy_many([(hit.number, shard, 0, part) for shard, part in parts])
            transfer.done[number] = done
            return done
        finally:
            transfer.let_go()


def _end(questions: Sequence[Question]) -> None:
    for question in questions:
        question.end()
