"""What the daemon is told beside who waits: which chunks were used without it, and what hints order about chunks.

The engine's thread puts both into a list; a thread of the crew sends them, together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.client import ActionKind, HintAction
from kvstore.errors import StoreError
from kvstore.gpu_worker.connectors.offload.crew import Crew
from kvstore.gpu_worker.connectors.offload.hints import job_name
from kvstore.gpu_worker.connectors.offload.lookups import Opener
from kvstore.gpu_worker.connectors.offload.tally import Counts
from kvstore.types import KEYS_PER_REQUEST_MAX, ChunkKey, HintResult

TOUCHED_MAX = 1 << 17
"""Keys that wait to be told of as used; of more the oldest are not."""
ORDERS_MAX = 1_024
ORDERS_PER_MESSAGE = 64
APPLY_S = 1.0
PATIENCE_S = 5.0
"""So long an order waits for the store to be there."""
SESSIONS_MAX = 4_096
SESSION_KEYS_MAX = 1 << 18
"""Of all sessions that are remembered."""
log = logging.getLogger(__name__)

Answered = Callable[[HintResult, int], None]
"""Is told the daemon's answer, and how many chunks are there, on a thread of the crew."""


@dataclass(frozen=True, slots=True)
class Order:
    """Of a hint, about chunks whose keys are known."""

    name: str
    kind: ActionKind
    keys: tuple[ChunkKey, ...]
    ttl_ms: int = 0
    eta_ms: int = 0
    given: float = field(default_factory=time.monotonic)


class Orders:
    def __init__(self, crew: Crew, opener: Opener, tally: Counts) -> None:
        self._crew = crew
        self._opener = opener
        self._tally = tally
        self._lock = threading.Lock()  # guards all below
        self._touched: deque[tuple[ChunkKey, ...]] = deque()
        self._touched_keys = 0
        self._orders: deque[tuple[Order, Answered]] = deque()
        self._cancelled: set[bytes] = set()
        self._busy = False

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """In chain order; the engine had them itself."""
        if not keys:
            return
        dropped = 0
        with self._lock:
            self._touched.append(tuple(keys))
            self._touched_keys += len(keys)
            while self._touched_keys > TOUCHED_MAX:
                dropped += len(self._touched[0])
                self._touched_keys -= len(self._touched.popleft())
        self._tally.add(blocks_untold=dropped)

    def add(self, order: Order, answered: Answered) -> bool:
        """False: too many wait already."""
        with self._lock:
            if len(self._orders) >= ORDERS_MAX:
                return False
            self._orders.append((order, answered))
            self._cancelled.discard(job_name(order.name))
            return True

    def cancel(self, name: str) -> None:
        """An order of this name is no longer wanted, whether it was told or not."""
        told = job_name(name)
        with self._lock:
            self._orders = deque(pair for pair in self._orders if job_name(pair[0].name) != told)
            if len(self._cancelled) < ORDERS_MAX:  # else it ends by itself, in time
                self._cancelled.add(told)

    def clear(self) -> None:
        """What keys stand for is not what it was."""
        with self._lock:
            self._touched.clear()
            self._touched_keys = 0
            self._orders.clear()

    def flush(self) -> None:
        """Tell, in the background. Does not wait."""
        with self._lock:
            if self._busy or not (self._touched or self._orders or self._cancelled):
                return
            self._busy = True
        if not self._crew.offer(self._tell):
            with self._lock:
                self._busy = False

    def _tell(self) -> None:
        orders: deque[tuple[Order, Answered]] = deque()
        namespace = None
        try:
            namespace = self._opener(0.0)
            if namespace is None:
                orders = self._take_late()
                return
            touched, orders, cancelled = self._take()
            told = 0
            for start in range(0, len(touched), KEYS_PER_REQUEST_MAX):
                part = touched[start : start + KEYS_PER_REQUEST_MAX]
                told += len(part) if namespace.touch(part) else 0
            self._tally.add(blocks_touched=told, blocks_untold=len(touched) - told)
            if orders or cancelled:
                actions = [
                    HintAction(
                        job_name(order.name),
                        order.kind,
                        keys=order.keys,
                        ttl_ms=order.ttl_ms,
                        eta_ms=order.eta_ms,
                    )
                    for order, _ in orders
                ]
                answer = namespace.apply_actions(actions, cancelled=cancelled, timeout_s=APPLY_S)
                for result, chunks in zip(answer.results, answer.chunks, strict=True):
                    orders.popleft()[1](result, chunks)
        except StoreError as error:
            log.debug("orders were not heard: %s", error)
        finally:
            for _, answered in orders:
                answered(HintResult.REJECTED, 0)
            with self._lock:
                self._busy = False
                more = namespace is not None and bool(self._orders)
            if more:
                self.flush()

    def _take_late(self) -> deque[tuple[Order, Answered]]:
        """Those that have waited for the store long enough."""
        late: deque[tuple[Order, Answered]] = deque()
        with self._lock:
            while self._orders and self._orders[0][0].given < time.monotonic() - PATIENCE_S:
                late.append(self._orders.popleft())
        return late

    def _take(self) -> tuple[list[ChunkKey], deque[tuple[Order, Answered]], list[bytes]]:
        """All that was used, and of the orders as many as a message may have."""
        with self._lock:
            touched = [key for keys in self._touched for key in keys]
            self._touched.clear()
            self._touched_keys = 0
            orders: deque[tuple[Order, Answered]] = deque()
            keys = 0
            while self._orders and len(orders) < ORDERS_PER_MESSAGE:
                keys += len(self._orders[0][0].keys)
                if orders and keys > KEYS_PER_REQUEST_MAX:
                    break
                orders.append(self._orders.popleft())
            cancelled, self._cancelled = sorted(self._cancelled), set()
            return touched, orders, cancelled


class Chains:
    """What the last request of each session used: whom a hint means that names a session. For the engine's thread."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, tuple[ChunkKey, ...]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return len(self._keys)

    def get(self, session: str) -> tuple[ChunkKey, ...]:
        return self._keys.get(session, ())

    def put(self, session: str, keys: tuple[ChunkKey, ...]) -> None:
        self._count += len(keys) - len(self._keys.pop(session, ()))
        self._keys[session] = keys
        while len(self._keys) > SESSIONS_MAX or (self._count > SESSION_KEYS_MAX and len(self._keys) > 1):
            self._count -= len(self._keys.popitem(last=False)[1])

    def clear(self) -> None:
        self._keys.clear()
        self._count = 0
