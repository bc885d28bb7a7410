"""Threads that copy and checksum slots without holding the interpreter's lock.

An effect of the core goes in, exactly one `OpDone` or `OpFailed` comes out. Checksums are those of the *destination*
after the copy: a worker may still be scribbling over its staging memory, or over the region that is read, and what
counts is what was stored.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore import memory
from kvstore.core.events import Checksum, CopyIn, FillSlots, MoveSlots, OpDone, OpFailed, RewriteSlots
from kvstore.errors import BadRequest, StoreError, Unavailable
from kvstore.tiers.arena import Arena, Staging
from kvstore.tiers.regions import Region, Regions
from kvstore.types import Extent, Extents, WorkerId

log = logging.getLogger(__name__)

OPS_MAX = 4096
"""Ops of one worker, or of the daemon itself, that may be under way; one more fails at once, and with it the commit
that wanted it. Each has its own bound, so that nobody's ops fail for what others have under way."""
BLOCK_BYTES = 2 << 20
"""What is copied and then checksummed at once: little enough to be in the cache still, and to stop soon when the daemon
does; much enough that the interpreter's lock, taken twice a block, costs nothing."""

PART_BYTES = 2 << 20
PARTS_MAX = 256
"""An op is copied in parts of about PART_BYTES, by whichever thread is free; one of 512 MiB and more in so many."""
CLOSING = "the copier is closing"

PATTERNS = (0x55, 0xAA, 0)

Task = CopyIn | FillSlots | Checksum | MoveSlots | RewriteSlots
Done = Callable[[OpDone | OpFailed], None]


class Copier:
    def __init__(self, arena: Arena, staging: Staging, regions: Regions, *, threads: int) -> None:
        self._arena = arena
        self._staging = staging
        self._regions = regions
        self._queue = _FairQueue()
        self._ops: Counter[WorkerId | None] = Counter()
        """Under way, by worker; None: the daemon's own. Never a zero."""
        self._ops_lock = threading.Lock()
        self._closing = False
        self._out_of_time = False
        # Daemon threads: one that hangs in the kernel must not keep the process from ending.
        self._threads = [
            threading.Thread(target=self._run, name=f"kvstored-copy-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, effect: Task, done: Done) -> None:
        """Never blocks and never raises. `done` is called once: from a copier thread, or, when the op is refused
        (OPS_MAX of its worker are waiting, the region is not there, or the copier is closing), before this returns."""
        worker = effect.worker if isinstance(effect, CopyIn | FillSlots | Checksum) else None
        refusal = self._refusal(worker)
        region = None
        if not refusal and isinstance(effect, FillSlots):
            try:
                # Held from here to the end of the op, whoever drops it meanwhile.
                region = self._regions.of(effect.worker, effect.region)
            except StoreError as error:
                refusal = str(error)
        if refusal:
            done(OpFailed(effect.op, refusal))
            return

        def ended(answer: OpDone | OpFailed) -> None:
            with self._ops_lock:
                self._ops[worker] -= 1
                if not self._ops[worker]:
                    del self._ops[worker]
            done(answer)

        with self._ops_lock:
            self._ops[worker] += 1
        parts = _parts(effect)
        joined = _Joined(effect, len(parts), ended)
        for number, part in enumerate(parts):
            self._queue.put(worker, (part, region, partial(joined.ended, number)))

    def _refusal(self, worker: WorkerId | None) -> str:
        if self._closing:
            return CLOSING
        whose = "the daemon's own" if worker is None else "this worker's"
        return f"{OPS_MAX} of {whose} copies are under way already" if self._ops[worker] >= OPS_MAX else ""

    def close(self, timeout_s: float) -> None:
        """What was submitted has `timeout_s` to end; then what did not start fails, and what runs fails at its next
        step. Returns about in time even if a thread hangs."""
        self._closing = True
        self._let_threads_end()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._out_of_time = True
        for effect, _, done in self._queue.take_all():
            done(OpFailed(effect.op, CLOSING))
        self._let_threads_end()

    def _let_threads_end(self) -> None:
        for thread in self._threads:
            if thread.is_alive():
                self._queue.put_end()

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            effect, region, done = task
            answer = self._perform(effect, region)
            del task, region  # or the last one would stay open until the next op
            try:
                done(answer)
            except Exception:
                log.exception("the answer %r could not be delivered", answer)

    def _perform(self, effect: Task, region: Region | None) -> OpDone | OpFailed:
        try:
            match effect:
                case CopyIn():
                    checksums = self._copy_in(effect)
                case FillSlots():
                    assert region is not None, effect
                    checksums = self._fill(effect, region)
                case MoveSlots():
                    checksums = self._move(effect)
                case Checksum():
                    checksums = tuple(map(self._checksum, [self._slot(extent) for extent in effect.extents]))
                case RewriteSlots():
                    checksums = tuple(int(self._keeps(self._slot(target))) for target in effect.targets)
        except StoreError as error:
            return OpFailed(effect.op, str(error))
        except Exception as error:  # a bug; its op must end all the same, or its slots would never be free
            log.exception("op %d failed", effect.op)
            return OpFailed(effect.op, f"{type(error).__name__}: {error}")
        return OpDone(effect.op, checksums)

    def _copy_in(self, effect: CopyIn) -> tuple[int, ...]:
        _same_count(len(effect.pieces), len(effect.targets))
        # All that can be done before is done before: each copy pushes out of the cache what the interpreter needs.
        pairs = [
            (self._staging.view(effect.worker, piece.offset, piece.length), self._slot(target))
            for piece, target in zip(effect.pieces, effect.targets, strict=True)
        ]
        return tuple([self._copy(source, target) for source, target in pairs])

    def _fill(self, effect: FillSlots, region: Region) -> tuple[int, ...]:
        _same_count(len(effect.pieces), len(effect.targets))
        return tuple(
            self._read_in(region, piece.offset, self._slot(target))
            for piece, target in zip(effect.pieces, effect.targets, strict=True)
        )

    def _read_in(self, region: Region, offset: int, target: npt.NDArray[np.uint8]) -> int:
        state = xxhash.xxh3_64()
        for start in range(0, target.size, BLOCK_BYTES):
            self._check_time()
            block = target[start : start + BLOCK_BYTES].data
            region.read_into(block, offset + start)
            state.update(block)
        return state.intdigest()

    def _move(self, effect: MoveSlots) -> tuple[int, ...]:
        _same_count(len(effect.sources), len(effect.targets))
        return tuple(
            self._copy(self._slot(source), self._slot(target))
            for source, target in zip(effect.sources, effect.targets, strict=True)
        )

    def _slot(self, extent: Extent) -> npt.NDArray[np.uint8]:
        return self._arena.view(extent.segment, extent.offset, extent.length)

    def _copy(self, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> int:
        if source.size != target.size:
            raise BadRequest(f"does not fit a slot of {target.size} bytes", field="length", value=source.size)
        state = (
            xxhash.xxh3_64()
        )  # its update() lets go of the lock; the one-shot function of xxhash 3.4 does not
        for start in range(0, target.size, BLOCK_BYTES):
            self._check_time()
            block, of = target[start : start + BLOCK_BYTES], source[start : start + BLOCK_BYTES]
            memory.touch(block)
            memory.touch(of)
            memory.copy(block, of)
            state.update(block.data)
        return state.intdigest()

    def _checksum(self, slot: npt.NDArray[np.uint8]) -> int:
        state = xxhash.xxh3_64()
        for start in range(0, slot.size, BLOCK_BYTES):
            self._check_time()
            block = slot[start : start + BLOCK_BYTES]
            memory.touch(block)
            state.update(block.data)
        return state.intdigest()

    def _keeps(self, slot: npt.NDArray[np.uint8]) -> bool:
        """Whether it holds the patterns that are written to it. All of it is written before any is read, so that most
        of what is read comes from memory, not from the cache."""
        for pattern in PATTERNS:
            for start in range(0, slot.size, BLOCK_BYTES):
                self._check_time()
                slot[start : start + BLOCK_BYTES] = pattern
            for start in range(0, slot.size, BLOCK_BYTES):
                self._check_time()
                if not (slot[start : start + BLOCK_BYTES] == pattern).all():
                    return False
        return True

    def _check_time(self) -> None:
        if self._out_of_time:
            raise Unavailable(CLOSING)

    def __repr__(self) -> str:
        alive = sum(thread.is_alive() for thread in self._threads)
        return f"Copier({alive} threads, {sum(list(self._ops.values()))} ops{', closing' if self._closing else ''})"


_Entry = tuple[Task, Region | None, Done]


class _FairQueue:
    """What waits for a thread: of each worker in the order in which it came, of the workers in turns, so that one who
    saves much does not keep the others waiting. The daemon's own work (None) has its turn like a worker's.

    Threads are woken one by one, each by the one before, which runs by then. If who submits woke them all, it would
    itself still occupy a processor, and on a small machine the scheduler would put two of them on one and leave them
    there: two processors then copy no more than one.
    """

    def __init__(self) -> None:
        self._lines: dict[WorkerId | None, deque[_Entry]] = {}
        """Never an empty one; the first is next, and then goes to the end."""
        self._lock = threading.Lock()
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """True wakes a thread, False ends one."""
        self._waking = False
        """A True is under way; whoever gets it looks at the lines after that."""

    def put(self, worker: WorkerId | None, entry: _Entry) -> None:
        with self._lock:
            self._lines.setdefault(worker, deque()).append(entry)
            wakes, self._waking = not self._waking, True
        if wakes:
            self._wake.put(True)

    def put_end(self) -> None:
        """One thread ends, once nothing waits."""
        self._wake.put(False)

    def get(self) -> _Entry | None:
        """Waits. None: the thread is to end."""
        while True:
            with self._lock:
                entry = self._next() if self._lines else None
                wakes = bool(self._lines) and not self._waking
                self._waking |= wakes
            if wakes:
                self._wake.put(True)
            if entry is not None:
                return entry
            if not self._wake.get():
                return None
            with self._lock:
                self._waking = False

    def _next(self) -> _Entry:
        worker, line = next(iter(self._lines.items()))
        entry = line.popleft()
        del self._lines[worker]
        if line:
            self._lines[worker] = line
        return entry

    def take_all(self) -> list[_Entry]:
        with self._lock:
            left = [entry for line in self._lines.values() for entry in line]
            self._lines.clear()
        return left


class _Joined:
    """The parts of one op: it ends when the last of them has, and fails if one did."""

    def __init__(self, effect: Task, parts: int, done: Done) -> None:
        self._op = effect.op
        self._answers: list[OpDone | OpFailed | None] = [None] * parts
        self._running = parts
        self._done = done
        self._lock = threading.Lock()

    def ended(self, number: int, answer: OpDone | OpFailed) -> None:
        with self._lock:
            self._answers[number] = answer
            self._running -= 1
            if self._running:
                return
        checksums: list[int] = []
        for part in self._answers:
            if not isinstance(part, OpDone):
                assert part is not None, self._op
                self._done(part)
                return
            checksums += part.checksums
        self._done(OpDone(self._op, tuple(checksums)))


def _parts(effect: Task) -> list[Task]:
    """The op in parts that follow each other, of about equal size; one that is small stays whole."""
    extents = effect.extents if isinstance(effect, Checksum) else effect.targets
    lengths = extents.length if isinstance(extents, Extents) else [extent.length for extent in extents]
    size = sum(lengths)
    wanted = min(size // PART_BYTES, len(lengths), PARTS_MAX)
    if wanted < 2 or (isinstance(effect, CopyIn | FillSlots) and len(effect.pieces) != len(lengths)):
        return [effect]
    cuts = [0]
    passed = 0
    for number, length in enumerate(lengths[:-1], start=1):
        passed += length
        if passed * wanted >= size * len(cuts):
            cuts.append(number)
    return [_part(effect, slice(*ends)) for ends in zip(cuts, [*cuts[1:], len(lengths)], strict=True)]


def _part(effect: Task, part: slice) -> Task:
    match effect:
        case CopyIn() | FillSlots():
            return replace(effect, pieces=effect.pieces[part], targets=effect.targets[part])
        case MoveSlots():
            return replace(effect, sources=effect.sources[part], targets=effect.targets[part])
        case RewriteSlots():
            return replace(effect, targets=effect.targets[part])
        case Checksum():
            return replace(effect, extents=effect.extents[part])


def _same_count(sources: int, targets: int) -> None:
    if sources != targets:
        raise BadRequest(f"there are {targets} targets", field="pieces", value=sources)
