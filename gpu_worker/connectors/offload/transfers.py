"""Transfers on rows, and when the engine hears of their end: exactly once, and in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from kvstore.gpu_worker.connectors.offload.crew import Crew
from kvstore.types import ChunkKey


class Transfer:
    """Rows to be filled, or saved: the engine keeps its hands off them until it is told of the transfer's end.

    A thread of ours touches a row between `hold` and `let_go` only. The engine's thread ends a transfer with
    `settle`, which fails while a row is held; from then on `hold` says no.
    """

    def __init__(self, number: int, keys: Sequence[ChunkKey], rows: Sequence[int], deadline: float) -> None:
        assert len(keys) == len(rows), (len(keys), len(rows))
        self.number = number
        self.keys = tuple(keys)
        self.rows = tuple(rows)
        self.deadline = deadline
        self.begun = time.monotonic()
        self.done = [False] * len(keys)
        """Which of the keys were saved or loaded; written by the thread that works on it."""
        self.cold = 0
        """Of the keys: so many were on SSD when the engine was told of them."""
        self.ended = threading.Event()
        """The thread has finished with it, or it was refused."""
        self.late = False
        """Its time was up before all was done."""
        self._ended_at = float("inf")
        self._lock = threading.Lock()
        self._over = False

    def __repr__(self) -> str:
        state = "over" if self._over else "ended" if self.ended.is_set() else "open"
        return f"Transfer({self.number}, {sum(self.done)} of {len(self.keys)} keys done, {state})"

    @property
    def over(self) -> bool:
        """The engine was told, and the rows are its own."""
        return self._over

    @property
    def left_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    @property
    def complete(self) -> bool:
        return bool(self.done) and all(self.done)

    def end(self) -> None:
        """Nothing is left to do."""
        self._ended_at = time.monotonic()
        self.ended.set()

    def hold(self) -> bool:
        """From now until `let_go` a row may be touched; False: never again. For the time of one copy."""
        self._lock.acquire()
        if self._over:
            self._lock.release()
            return False
        return True

    def let_go(self) -> None:
        self._lock.release()

    def settle(self, now: float, *, wait: bool = False) -> bool:
        """Whether the engine can be told now: nothing is left to do, or its time is up. True once, and for good.

        A row that is just being copied delays it: to the next call, or with `wait` for the time of one copy.
        """
        if not self.ended.is_set() and now < self.deadline:
            return False
        if not self._lock.acquire(blocking=wait):
            return False
        self.late = not self.complete and self._ended_at >= self.deadline
        self._over = True
        self._lock.release()
        return True


class Transfers:
    """Transfers that the engine waits for. For its thread alone; no call waits, but for `drain`."""

    def __init__(self, crew: Crew, *, rows_max: int) -> None:
        """`rows_max`: rows that all open transfers may keep from the engine; one that is larger by itself is taken."""
        self._crew = crew
        self._rows_max = rows_max
        self._open: dict[int, Transfer] = {}
        self.rows = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def cold(self) -> int:
        """Chunks that open transfers wait for."""
        return sum(transfer.cold for transfer in self._open.values())

    def start(self, transfer: Transfer, work: Callable[[], None] | None) -> bool:
        """Give it to the crew. False: refused (no room, or nothing to be done); it fails at the next `take`."""
        taken = (
            work is not None
            and (not self._open or self.rows + len(transfer.rows) <= self._rows_max)
            and self._crew.offer(work)
        )
        if not taken:
            transfer.end()
        assert transfer.number not in self._open, transfer
        self._open[transfer.number] = transfer
        self.rows += len(transfer.rows)
        return taken

    def fail(self, number: int) -> None:
        """End a transfer that could not even be begun, whether it was started or not."""
        transfer = self._open.setdefault(number, Transfer(number, (), (), 0.0))
        transfer.end()

    def take(self, now: float) -> list[Transfer]:
        """Those to report; nothing touches their rows any more."""
        return self._take(now, wait=False)

    def drain(self, timeout_s: float) -> list[Transfer]:
        """All, at the latest after `timeout_s` and the time of one copy: who is not done by then has failed."""
        until = time.monotonic() + timeout_s
        for transfer in self._open.values():
            transfer.ended.wait(max(0.0, min(until, transfer.deadline) - time.monotonic()))
        return self._take(float("inf"), wait=True)

    def _take(self, now: float, *, wait: bool) -> list[Transfer]:
        taken = [transfer for transfer in self._open.values() if transfer.settle(now, wait=wait)]
        for transfer in taken:
            del self._open[transfer.number]
            self.rows -= len(transfer.rows)
        return taken
