"""What stays in the pool is reported to the daemon, which answers how soon queued jobs need it: by that, idle chunks
are evicted.

    model's thread                          reporter's thread
    offer(namespace, keys), once a while -> report, and once more while nothing changes
    take_ranks()                         <- what the answer said

A report that is late or fails costs nothing but ranks that are old.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvstore.errors import DeadlineExceeded, StoreError, Unavailable
from kvstore.types import KEYS_PER_REQUEST_MAX, ChunkKey

if TYPE_CHECKING:
    from kvstore.client import Namespace

REPORT_S = 1.0
"""How often, while requests run;"""
RENEW_S = 15.0
"""and while none do."""
TTL_MS = 45_000
"""Until the daemon forgets what a worker said that is not heard any more."""
REPORT_KEYS_MAX = KEYS_PER_REQUEST_MAX
log = logging.getLogger(__name__)


class Reporter:
    """One thread; `counters` gets reports and reports_failed."""

    def __init__(
        self,
        counters: Counter[str],
        *,
        timeout_s: float,
        every_s: float = REPORT_S,
        renew_s: float = RENEW_S,
    ) -> None:
        self._counters = counters
        self._timeout_s = timeout_s
        self._every_s = every_s
        self._renew_s = renew_s
        self._changed = threading.Condition()  # guards all below
        self._offered: tuple[Namespace | None, Sequence[ChunkKey]] = None, ()
        self._new = False
        self._ranks: Mapping[ChunkKey, int] | None = None
        self._closed = False
        self._due_at = 0.0
        self._refused: Namespace | None = None
        """Its daemon does not take reports."""
        self._thread = threading.Thread(target=self._run, name="kv-report", daemon=True)
        self._thread.start()

    @property
    def due(self) -> bool:
        """Whether there is reason to offer something."""
        return time.monotonic() >= self._due_at

    def offer(self, namespace: Namespace | None, keys: Sequence[ChunkKey]) -> None:
        """This, and no more, is in the pool. Never waits for the daemon; what is offered meanwhile takes its place."""
        self._due_at = time.monotonic() + self._every_s
        with self._changed:
            self._offered = namespace, keys
            self._new = True
            self._changed.notify_all()

    def take_ranks(self) -> Mapping[ChunkKey, int] | None:
        """Of what was reported, all that is needed, by how soon (0 is first); None if nothing was heard since."""
        if self._ranks is None:  # read without the lock: at each step
            return None
        with self._changed:
            ranks, self._ranks = self._ranks, None
        return ranks

    def close(self) -> None:
        """Waits no longer than a report may take."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(self._timeout_s + 1.0)

    def _run(self) -> None:
        told: Namespace | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._new or self._closed, timeout=self._renew_s)
                if self._closed:
                    return
                self._new = False
                namespace, keys = self._offered
            if told is not None and told is not namespace:
                self._report(told, ())
            told = namespace
            if namespace is None or namespace is self._refused:
                continue
            ranks = self._report(namespace, keys)
            if ranks is not None:
                needed = {key: rank - 1 for key, rank in zip(keys, ranks, strict=True) if rank}
                with self._changed:
                    if self._offered[0] is namespace:
                        self._ranks = needed

    def _report(self, namespace: Namespace, keys: Sequence[ChunkKey]) -> Sequence[int] | None:
        try:
            ranks = namespace.report_resident(keys, ttl_ms=TTL_MS, timeout_s=self._timeout_s)
        except (Unavailable, DeadlineExceeded) as error:
            log.debug("what is in the pool was not reported: %s", error)
        except StoreError as error:
            log.warning("what is in the pool is not reported any more: %s", error)
            self._refused = namespace
        except Exception:
            # Our bug, or the client's: said loudly here. Nobody waits for a report.
            log.exception("reporting what is in the pool failed")
            self._refused = namespace
        else:
            self._counters["reports"] += 1
            return ranks
        self._counters["reports_failed"] += 1
        return None
