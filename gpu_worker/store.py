"""The store as an engine sees it: there, or not for now. No call here waits longer than it was told to."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvstore.errors import DeadlineExceeded, StoreError, Unavailable
from kvstore.gpu_worker.compute_or_load import ComputeOrLoad, Found, Plan, Why
from kvstore.layout import NamespaceSpec
from kvstore.types import ChunkKey, Outcome, Reason

if TYPE_CHECKING:
    from kvstore.client import Client, Namespace, ReadLease

CONNECT_AGAIN_S = 5.0
"""How long an engine works without a store before it looks again whether there is one."""
NAMESPACES_MAX = 8
"""Of one model under other settings: they come back."""
log = logging.getLogger(__name__)


class Store:
    """One client, and one namespace at a time. `counters` gets promotions_awaited and promotions_late (not all had come
    when computing them would have been faster)."""

    def __init__(
        self,
        connect: Callable[[], Client],
        spec: NamespaceSpec | None,
        *,
        lookup_timeout_s: float,
        promote_timeout_s: float,
        counters: Counter[str],
        opened: Callable[[Namespace], None] = lambda namespace: None,
    ) -> None:
        """`connect` makes the client, which `close` closes. `spec`: of the namespace; None: no namespace for now.
        `opened` is called where a namespace was opened and nobody waits for it: at the start, and in the background.
        Raises whatever the daemon has against us or the namespace; not that there is none."""
        self.spec = spec
        self._connect = connect
        self._lookup_timeout_s = lookup_timeout_s
        self._promote_timeout_s = promote_timeout_s
        self._counters = counters
        self._opened = opened
        self._client: Client | None = None
        self._namespaces: dict[NamespaceSpec, Namespace] = {}
        self._connecting: threading.Thread | None = None
        self._connect_at = 0.0
        self._starting = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False
        if spec is None:
            return
        try:
            opened(self._open(spec))
        except (Unavailable, DeadlineExceeded) as error:
            log.warning("working without a store for now: %s", error)
            self._connect_at = time.monotonic() + CONNECT_AGAIN_S

    def use(self, spec: NamespaceSpec | None) -> None:
        """From now on `namespace` is that of `spec`; None: there is none. If a daemon is there, its answer is waited
        for, no longer than for a look-up."""
        self.spec = spec
        if spec is None or spec in self._namespaces or self._client is None:
            return
        while len(self._namespaces) >= NAMESPACES_MAX:
            del self._namespaces[next(iter(self._namespaces))]
        try:
            self._open(spec, timeout_s=self._lookup_timeout_s)
        except StoreError as error:
            log.warning("working without a store for now: %s", error)
            self._connect_at = time.monotonic() + CONNECT_AGAIN_S

    def namespace(self) -> Namespace | None:
        """None while there is no daemon; never waits for one."""
        if self.spec is None:
            return None
        known = self._namespaces.get(self.spec)
        if known is None and time.monotonic() >= self._connect_at:
            self._connect_behind(self.spec)
        return known

    def read(
        self, namespace: Namespace, keys: Sequence[ChunkKey], *, any_order: bool = False
    ) -> tuple[ReadLease, frozenset[int]]:
        """A lease on what is in DRAM, and on what is promoted from SSD in time; up to the first key that is not
        there, unless `any_order`. And the numbers of those that were awaited from SSD."""
        wait_ms = int(self._promote_timeout_s * 1000)
        lease = namespace.read(
            keys, any_order=any_order, wait_ms=wait_ms, pin=True, timeout_s=self._lookup_timeout_s
        )
        pending = frozenset(n for n, outcome in enumerate(lease.outcomes) if outcome is Outcome.PENDING)
        if not pending:
            return lease, pending
        self._counters["promotions_awaited"] += 1
        lease.settled(self._promote_timeout_s)
        # The first lease holds what was there until the second holds all.
        promoted = namespace.read(keys, any_order=any_order, pin=True, timeout_s=self._lookup_timeout_s)
        lease.release()
        return promoted, pending

    def read_worthwhile(
        self,
        namespace: Namespace,
        keys: Sequence[ChunkKey],
        choice: ComputeOrLoad,
        *,
        chunks: int,
        have: int,
        any_order: bool = False,
    ) -> tuple[ReadLease, frozenset[int], Plan]:
        """As `read`, of keys of which the first `chunks` are full chunks: what of them is to be loaded is chosen by
        what it takes. What is on SSD is promoted only if that is worth the wait, and awaited no longer than it should
        take: then what has come is used, and the rest computed."""
        first = namespace.read(keys, any_order=any_order, promote=False, timeout_s=self._lookup_timeout_s)
        where: list[bool] = []
        for outcome, reason in zip(first.outcomes[:chunks], first.reasons[:chunks], strict=True):
            if outcome is not Outcome.HIT and reason is not Reason.ON_SSD:
                break
            where.append(outcome is Outcome.HIT)
        backlog, size = first.backlog, namespace.spec.chunk_bytes
        found = Found(where, namespace.spec.chunk_tokens, size, backlog.ahead_bytes, backlog.ssd_bytes_per_s)
        plan = choice.choose(found, now=time.monotonic(), wait_max_s=self._promote_timeout_s, have=have)
        # A tail is worth as much as the chunks before it
        rest = len(keys) - chunks if plan.chunks == len(where) == chunks else 0
        wanted = [*range(plan.chunks), *range(chunks, chunks + rest)]
        cold = frozenset(n for n in wanted if first.reasons[n] is Reason.ON_SSD)
        wait_s = self._promote_timeout_s if plan.why in (Why.UNKNOWN, Why.NOTHING) else plan.wait_s
        if not cold or wait_s <= 0:
            return first, frozenset(), plan
        self._counters["promotions_awaited"] += 1
        asked = list(keys) if rest else list(keys[: plan.chunks])
        promoting = namespace.read(
            asked, any_order=any_order, wait_ms=max(1, int(1000 * wait_s)), timeout_s=self._lookup_timeout_s
        )
        if Outcome.PENDING in promoting.outcomes:
            promoting.settled(wait_s)
        # The first leases hold what was there until the last one holds all
        last = namespace.read(keys, any_order=any_order, promote=False, timeout_s=self._lookup_timeout_s)
        first.release()
        promoting.release()
        came = frozenset(n for n in cold if last.outcomes[n] is Outcome.HIT)
        self._counters["promotions_late"] += came != cold
        return last, came, plan

    def close(self) -> None:
        """What is still being connected is closed when it is there."""
        with self._closing:
            self._closed = True
            client = self._client
        if client is not None:
            client.close()

    def _connect_behind(self, spec: NamespaceSpec) -> None:
        """On a thread of its own, one at a time: the model's thread asks for the namespace, and so does who wants to
        know whether there is a daemon."""
        with self._starting:
            if time.monotonic() < self._connect_at:  # somebody has tried while this one waited its turn
                return
            if self._connecting is None or not self._connecting.is_alive():
                self._connecting = threading.Thread(
                    target=self._open_again, args=(spec,), name="kv-connect", daemon=True
                )
                self._connecting.start()

    def _open_again(self, spec: NamespaceSpec) -> None:
        try:
            self._opened(self._open(spec))
        except Exception as error:
            # One of ours, or of a device: tried again as late as any other, not with each step.
            if not self._closed:
                bug = not isinstance(error, StoreError)
                log.warning("still working without a store: %s", error, exc_info=bug)
            self._connect_at = time.monotonic() + CONNECT_AGAIN_S

    def _open(self, spec: NamespaceSpec, *, timeout_s: float | None = None) -> Namespace:
        client = self._client or self._connect()
        with self._closing:
            closed, self._client = self._closed, client
        if closed:
            client.close()
            raise Unavailable("the engine is closed", remedy="make another one")
        namespace = self._namespaces[spec] = client.open(spec, timeout_s=timeout_s)
        return namespace
