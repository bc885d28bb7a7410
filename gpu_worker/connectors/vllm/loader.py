"""A rank's loads: from shared memory into blocks of the paged cache, on threads.

Two ways. Whole: the request is parked, all its blocks are filled, then it is reported. Layer-wise: the step waits
before each layer for that layer.

Whatever the load does, it is reported only when nothing of ours writes to the blocks any more: a copy that came late
must never land in a block that vLLM has given to somebody else. Between its deadline and that lies at most one copy in
memory, never a question to the daemon.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvstore.gpu_worker.connectors.lookup import lost_key
from kvstore.gpu_worker.connectors.vllm.blocks import PagedBlocks
from kvstore.gpu_worker.connectors.vllm.metadata import Changes, Load
from kvstore.gpu_worker.connectors.vllm.stats import Tally
from kvstore.gpu_worker.device import Event
from kvstore.types import KEYS_PER_REQUEST_MAX, ChunkKey, Outcome

if TYPE_CHECKING:
    from kvstore.client import Namespace, ReadLease
    from kvstore.gpu_worker.connectors.link import Link
    from kvstore.layout import NamespaceSpec

THREADS = 8
"""A load that waits for the SSD keeps its thread: others must not wait behind it."""
PARTS = 4
"""A load from SSD is copied in so many parts, while the next ones are read."""
BATCH_BLOCKS = 16
"""Copied between two looks at the clock; each batch is whole or has failed."""
COPY_SLACK_S = 30.0
"""A copy of one batch in memory that takes longer than this means that the machine stands still."""
SPEEDS_MAX = 64
"""Of loads, remembered until the next report."""
log = logging.getLogger(__name__)


class LayerLoad:
    """A load that the step waits for, layer by layer."""

    def __init__(self, load: Load, deadline: float) -> None:
        self.load = load
        self.deadline = deadline
        self.after: Sequence[Event] = ()
        """When its blocks may be written."""
        self.failed = False
        self._changed = threading.Condition()
        self._layers = 0
        self._ended = False
        self._cancelled = False
        self._copying = False

    def wait(self, layer: int) -> None:
        """Until `layer` is in, or nothing will come any more and nothing writes: then `failed`."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._layers > layer or self._ended, max(0.0, self.deadline - time.monotonic())
            )
            if self._layers > layer:
                return
            self.failed = self._cancelled = True
            # Before the first copy the thread looks whether it is still wanted, so only a copy can be under way.
            self._changed.wait_for(lambda: self._ended or not self._copying, COPY_SLACK_S)

    def begin_layer(self) -> bool:
        with self._changed:
            self._copying = not self._cancelled
            return self._copying

    def end_layer(self, whole: bool) -> None:
        with self._changed:
            self._copying = False
            if whole:
                self._layers += 1
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class Loader:
    def __init__(
        self, link: Link, blocks: PagedBlocks, shard: int, tally: Tally, changes: Changes, *, load_s: float
    ) -> None:
        self._link = link
        self._blocks = blocks
        self._shard = shard
        self._tally = tally
        self._changes = changes
        self._load_s = load_s
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kv-loader")
        self._copying = threading.Lock()
        """Copies take turns: side by side they would all be late."""
        self._changed = threading.Condition()  # guards all below
        self._open = 0
        """Whole loads that have not ended."""
        self._done: list[tuple[Load, int]] = []
        """Ended and not reported yet, each with how many of its leading blocks are in."""
        self._generation = 0
        self._speeds: list[tuple[int, float]] = []
        """(blocks, seconds since it was asked for) of loads that ended whole and were not reported yet."""
        self._ssd_bytes_per_s = 0
        """As the store told last, and was not reported yet."""

    # --------------------------------------------------------------------------------------------------------- whole

    def start(self, load: Load, spec: NamespaceSpec) -> None:
        with self._changed:
            self._open += 1
        begun = time.monotonic()
        until = begun + min(self._load_s, load.bound_s)
        after = self._blocks.free_for(load.blocks)
        self._threads.submit(self._run, load, spec, begun, until, self._generation, after)

    def refuse(self, load: Load) -> None:
        """It has ended, with nothing."""
        with self._changed:
            self._done.append((load, 0))
            self._changed.notify_all()

    def take_done(self, wait_s: float = 0.0) -> tuple[set[str], set[int]]:
        """Requests whose loads have ended since the last call, and the blocks that are to be computed after all. Waits
        until there is one, if one is under way."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or not self._open, wait_s)
            done, self._done = self._done, []
        if done:
            self._blocks.filled()
        failed = {block for load, whole in done for block in load.blocks[whole:]}
        return {load.request for load, _ in done}, failed

    def void(self) -> None:
        """What is loaded and not reported yet, queued or under way is of weights that are gone."""
        with self._changed:
            self._generation += 1
            self._done = [(load, 0) for load, _ in self._done]

    def take_ssd_speed(self) -> int:
        with self._changed:
            speed, self._ssd_bytes_per_s = self._ssd_bytes_per_s, 0
        return speed

    def take_speeds(self) -> list[tuple[int, float]]:
        with self._changed:
            speeds, self._speeds = self._speeds, []
        return speeds

    def _run(
        self,
        load: Load,
        spec: NamespaceSpec,
        begun: float,
        deadline: float,
        generation: int,
        after: Sequence[Event],
    ) -> None:
        whole = 0
        try:
            namespace = self._link.namespace(spec, max(0.0, deadline - time.monotonic()))
            if namespace is not None:
                whole = self._fill(load, namespace, deadline, generation, after)
        except Exception:
            # Our bug: vLLM must not wait for what will not come, nor use what came.
            log.exception("a load failed")
            whole = 0
        finally:
            self._count(load, whole, begun)
            with self._changed:
                self._open -= 1
                self._done.append((load, whole if generation == self._generation else 0))
                self._changed.notify_all()

    def _fill(
        self, load: Load, namespace: Namespace, deadline: float, generation: int, after: Sequence[Event]
    ) -> int:
        """How many leading blocks are in."""
        most = KEYS_PER_REQUEST_MAX
        if load.wait_s:
            most = min(most, max(BATCH_BLOCKS, -(-len(load.keys) // PARTS)))
        wait_until = min(deadline, time.monotonic() + load.wait_s)
        with ExitStack() as pinned:
            # All is asked for before the first part is awaited.
            starts = range(0, len(load.keys), most)
            parts = [load.keys[start : start + most] for start in starts]
            awaited = [
                pinned.enter_context(self._from_ssd(namespace, part, wait_until))
                for part in (parts if load.wait_s else ())
            ]
            for number, (start, part) in enumerate(zip(starts, parts, strict=True)):
                if awaited and Outcome.PENDING in awaited[number].outcomes:
                    awaited[number].settled(max(0.0, wait_until - time.monotonic()))
                whole = self._fill_part(load, start, part, namespace, deadline, generation, after)
                if whole < len(part):
                    return start + whole
        return len(load.keys)

    def _from_ssd(self, namespace: Namespace, keys: Sequence[ChunkKey], until: float) -> ReadLease:
        left_s = max(0.001, until - time.monotonic())
        lease = namespace.read(
            keys, shards=(self._shard,), wait_ms=max(1, int(1000 * left_s)), timeout_s=left_s
        )
        if lease.backlog.ssd_bytes_per_s:
            with self._changed:
                self._ssd_bytes_per_s = lease.backlog.ssd_bytes_per_s
        return lease

    def _fill_part(
        self,
        load: Load,
        start: int,
        keys: Sequence[ChunkKey],
        namespace: Namespace,
        deadline: float,
        generation: int,
        after: Sequence[Event],
    ) -> int:
        """As `_fill`, for the load's `keys`, the first of which has number `start`."""
        whole = 0
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return 0
        with namespace.read(keys, shards=(self._shard,), timeout_s=left_s) as lease:
            for batch in range(0, lease.hits, BATCH_BLOCKS):
                numbers = range(batch, min(batch + BATCH_BLOCKS, lease.hits))
                with self._copying:
                    if time.monotonic() > deadline or generation != self._generation:
                        return whole
                    rows = [(number, load.blocks[start + number]) for number in numbers]
                    if not self._blocks.fill(lease, rows, self._shard, after=after):
                        return whole
                whole += len(numbers)
            if lease.hits < len(keys):
                self._lost(namespace, lease)
        return whole

    def _lost(self, namespace: Namespace, lease: ReadLease) -> None:
        if (key := lost_key(lease)) is not None:
            self._changes.add(namespace.spec, (key,))

    def _count(self, load: Load, whole: int, begun: float) -> None:
        self._tally.add(
            blocks_loaded=whole,
            bytes_loaded=whole * self._blocks.shard_bytes,
            blocks_failed=len(load.blocks) - whole,
            load_us=int(1e6 * (time.monotonic() - begun)),
        )
        if whole == len(load.blocks) and not load.wait_s:
            with self._changed:
                if len(self._speeds) < SPEEDS_MAX:
                    self._speeds.append((whole, time.monotonic() - begun))

    # ---------------------------------------------------------------------------------------------------- layer-wise

    def start_layers(self, loads: Sequence[Load], spec: NamespaceSpec) -> list[LayerLoad]:
        now = time.monotonic()
        started = [LayerLoad(load, now + min(self._load_s, load.bound_s)) for load in loads]
        for layers in started:
            layers.after = self._blocks.free_for(layers.load.blocks)
            self._threads.submit(self._run_layers, layers, spec)
        return started

    def _run_layers(self, layers: LayerLoad, spec: NamespaceSpec) -> None:
        begun = time.monotonic()
        whole = False
        try:
            namespace = self._link.namespace(spec, max(0.0, layers.deadline - begun))
            if namespace is not None:
                whole = self._fill_layers(layers, namespace)
        except Exception:
            log.exception("a load failed")
        finally:
            self._count(layers.load, len(layers.load.blocks) if whole else 0, begun)
            layers.end()

    def _fill_layers(self, layers: LayerLoad, namespace: Namespace) -> bool:
        load = layers.load
        left_s = layers.deadline - time.monotonic()
        keys = load.keys[:KEYS_PER_REQUEST_MAX]
        if left_s <= 0 or len(keys) < len(load.keys):
            return False
        with namespace.read(keys, shards=(self._shard,), timeout_s=left_s) as lease:
            if lease.hits < len(keys):
                self._lost(namespace, lease)
                return False
            for layer in range(len(self._blocks.shapes)):
                if not layers.begin_layer():
                    return False
                whole = False
                try:
                    whole = self._blocks.fill(
                        lease, list(enumerate(load.blocks)), self._shard, (layer,), after=layers.after
                    )
                finally:
                    layers.end_layer(whole)
                if not whole:
                    return False
        return True

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
