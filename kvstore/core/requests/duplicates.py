"""The audit of second commits: two makers that compute the same chunk are to come to the same bytes (invariant 1).

The bytes of the second never reach us (Reserve answers ALREADY), but on a sample the worker says what they were. Who of
the two is sick is not known, if any: engines whose kernels depend on the batch differ in the last bits all the time. So
all are counted, and each pair of makers is named once. Before that our own copy is read again, where it is in DRAM: a
difference that comes from it is damage, and is treated as such.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvstore.core import events as ev
from kvstore.core.chunks import DOOMED, NONE, STORED
from kvstore.core.namespaces import Namespace
from kvstore.core.requests.reads import Reads, wanted_shards
from kvstore.core.state import State
from kvstore.core.workers import Worker
from kvstore.errors import BadRequest
from kvstore.types import ChunkKey, OpId, WorkerId

AUDITS_MAX = 64
"""Of our own copies, under way. What differs beyond is told as it is: whoever reports much of it must not keep the
threads that copy for everybody."""
TOLD_MAX = 4_096
"""Pairs of makers of which it is remembered that they were told of."""


@dataclass(frozen=True, slots=True)
class Difference:
    row: int
    told: ev.DuplicateDiffers


class Duplicates:
    def __init__(self, state: State, reads: Reads) -> None:
        self.state = state
        self._reads = reads
        self.audits: dict[OpId, Difference] = {}
        """Our own copy is being read again."""
        self._being_read: set[int] = set()
        """Their rows, which stay pinned meanwhile."""
        self._told: OrderedDict[tuple[bytes, bytes], None] = OrderedDict()

    def __repr__(self) -> str:
        return f"Duplicates({len(self.audits)} being read again)"

    def report(self, worker: Worker, event: ev.ReportDuplicates) -> ev.Done:
        """How many chunks differ."""
        state = self.state
        namespace = state.own_namespace(worker, event.namespace)
        shards = wanted_shards(namespace, event.shards)
        if len(event.checksums) != len(event.keys) * len(shards):
            raise BadRequest(
                f"has one entry for each of {len(shards)} shards of {len(event.keys)} keys",
                field="number of checksums",
                value=len(event.checksums),
            )
        differ = 0
        for number, key in enumerate(event.keys):
            mine = event.checksums[number * len(shards) : (number + 1) * len(shards)]
            differ += self._compare(namespace, key, shards, mine, event.maker, worker.id)
        return ev.Done(differ)

    def _compare(
        self,
        namespace: Namespace,
        key: ChunkKey,
        shards: tuple[int, ...],
        checksums: tuple[int, ...],
        maker: bytes,
        worker: WorkerId,
    ) -> bool:
        state = self.state
        chunks = state.chunks
        row = namespace.index.get(key, NONE)
        if row == NONE or chunks.shard0[row] == NONE or chunks.flags[row] & DOOMED:
            return False
        shard_rows = [chunks.shard0[row] + shard for shard in shards]
        if not chunks.flags[row] & STORED and not all(
            chunks.shard_ready[shard_row] for shard_row in shard_rows
        ):
            return False
        state.counters["duplicate_commits_compared"] += 1
        wrong = [
            shard
            for shard, shard_row, checksum in zip(shards, shard_rows, checksums, strict=True)
            if chunks.shard_checksum[shard_row] != checksum
        ]
        if not wrong:
            return False
        told = ev.DuplicateDiffers(namespace.id, key, wrong[0], b"".join(state.makers_of(row)), maker)
        if row in self._being_read:
            state.counters["duplicate_commits_differed"] += 1
        elif state.is_hit(row) and len(self.audits) < AUDITS_MAX:
            self._being_read.add(row)
            audit = self._reads.audit(namespace, (row,), worker=worker, quiet=True)
            self.audits[audit] = Difference(row, told)
        else:
            self._tell(told)
        return True

    def audited(self, op: OpId, corrupt: int) -> None:
        """Our own copy has been read again, or could not be: then it differs as far as anybody knows."""
        difference = self.audits.pop(op)
        self._being_read.remove(difference.row)
        if not corrupt:
            self._tell(difference.told)

    def _tell(self, told: ev.DuplicateDiffers) -> None:
        state = self.state
        state.counters["duplicate_commits_differed"] += 1
        pair = (min(told.first, told.second), max(told.first, told.second))
        if pair in self._told:
            return
        self._told[pair] = None
        if len(self._told) > TOLD_MAX:
            self._told.popitem(last=False)
        state.effects.append(told)
