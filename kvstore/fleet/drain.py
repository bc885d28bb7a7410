"""A node that leaves: it offers what it has in DRAM to the others, most recently used first, and they bring it.

Nothing is pushed. An offer names keys; the other node looks them up and reads them as it would for a request of its
own, so its core decides what they may push out, and a node that dies while it drains costs nothing but the rest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.core import events
from kvstore.core.chunks import DOOMED, NONE
from kvstore.core.events import Ticket
from kvstore.core.namespaces import Namespace
from kvstore.core.state import State
from kvstore.errors import StoreError
from kvstore.fleet.client import PeerReads
from kvstore.fleet.frames import PeerError
from kvstore.fleet.held import Where
from kvstore.fleet.registry import Node, Registry
from kvstore.fleet.secret import FleetSecret
from kvstore.server.logs import fields
from kvstore.server.loop import Loop
from kvstore.types import ChunkKey, NamespaceId, Outcome, WorkerId

log = logging.getLogger(__name__)

KEYS_PER_OFFER = 32
OFFER_S = 20.0
TAKE_S = 10.0
ASK_S = 5.0
FAILURES_MAX = 8


@dataclass(slots=True)
class Progress:
    """Of the last drain, for people."""

    running: bool = False
    chunks: int = 0
    """Worth moving, when it began."""
    offered: int = 0
    taken: int = 0
    elsewhere: int = 0
    """That others hold already."""


def worth_moving(state: State, bytes_max: int) -> Iterator[tuple[NamespaceId, list[ChunkKey]]]:
    """What is in DRAM, the most recently used first, in runs of one namespace."""
    view = state.chunks.views
    total = state.chunks.rows_ever
    shards = np.full(max((int(n) for n in state.namespaces), default=0) + 2, -1, np.int64)
    for number, each in state.namespaces.items():
        if not each.retired:
            shards[int(number)] = each.shards
    wanted = shards[view.namespace[:total]]
    alive = (wanted > 0) & (view.shard0[:total] != NONE) & (view.flags[:total] & DOOMED == 0)
    rows = np.flatnonzero(alive & (view.ready[:total] == wanted))
    rows = rows[np.argsort(-view.used_at[:total][rows], kind="stable")]
    left = bytes_max
    run: list[ChunkKey] = []
    of: NamespaceId | None = None
    for row in rows.tolist():
        namespace = state.namespace_of(row)
        left -= namespace.payload_bytes
        if left < 0:
            break
        if of is not None and (namespace.id != of or len(run) >= KEYS_PER_OFFER):
            yield of, run
            run = []
        of = namespace.id
        run.append(state.chunks.key[row])
    if of is not None and run:
        yield of, run


class Drain:
    """On the loop's thread."""

    def __init__(
        self,
        loop: Callable[[], Loop],
        secret: FleetSecret,
        reads: PeerReads,
        registry: Callable[[], Registry | None],
        digest: Callable[[NamespaceId], bytes | None],
    ) -> None:
        self._loop = loop
        self._secret = secret
        self._reads = reads
        self._registry = registry
        self._digest = digest
        self.progress = Progress()

    def begin(self, bytes_max: int) -> asyncio.Task[None]:
        """It runs until everything was offered, nobody is there to take it, or it is cancelled."""
        self.progress = Progress(running=True)
        return asyncio.create_task(self._run(bytes_max))

    async def _run(self, bytes_max: int) -> None:
        state = self._loop().store.state
        runs = list(worth_moving(state, bytes_max or state.limits.arena_bytes))
        progress = self.progress = Progress(running=True, chunks=sum(len(keys) for _, keys in runs))
        failures = 0
        try:
            for number, keys in runs:
                registry, digest = self._registry(), self._digest(number)
                if registry is None or digest is None:
                    continue
                held = np.zeros(len(keys), bool)
                for holder in registry.holders(digest, keys):
                    held |= holder.where == Where.DRAM
                progress.elsewhere += int(held.sum())
                left = [key for key, there in zip(keys, held.tolist(), strict=True) if not there]
                for node in takers(registry.others(), self._reads.is_open):
                    if not left or failures >= FAILURES_MAX:
                        break
                    progress.offered += len(left)
                    try:
                        taken = await asyncio.to_thread(
                            self._reads.offer, node, digest, left, time.monotonic() + OFFER_S
                        )
                    except PeerError as problem:
                        failures += 1
                        log.warning("a peer takes nothing", extra=fields(peer=node.name, why=str(problem)))
                        continue
                    progress.taken += min(taken, len(left))
                    if taken:
                        break
                if failures >= FAILURES_MAX:
                    log.error("draining was given up: the peers take nothing")
                    break
        finally:
            progress.running = False
            log.info(
                "what was worth moving has been offered to the peers",
                extra=fields(
                    chunks=progress.chunks,
                    offered=progress.offered,
                    taken=progress.taken,
                    elsewhere=progress.elsewhere,
                ),
            )


def takers(others: Sequence[Node], is_open: Callable[[Node], bool]) -> list[Node]:
    """Who may be offered something, the one with most free DRAM first."""
    able = [node for node in others if not node.draining and is_open(node)]
    return sorted(
        able,
        key=lambda node: node.load.get("resident_bytes", 0.0) - node.load.get("dram_bytes", 0.0),
    )


async def take(
    loop: Loop,
    namespace: Namespace,
    keys: Sequence[ChunkKey],
    worker: WorkerId,
) -> int:
    """Bring what another node offers, as for a request of a worker. How many of the keys are here then."""
    settled = asyncio.Event()

    def push(_: object) -> None:
        settled.set()

    until = time.monotonic() + TAKE_S
    loop.post(events.WorkerJoined(worker, tenant=namespace.tenant, engine_group=""))
    loop.subscribe(worker, push)
    try:
        await loop.ask(events.Open(Ticket(worker), namespace.spec), ASK_S)
        while True:
            left_ms = int((until - time.monotonic()) * 1000)
            answer: events.Acquired = await loop.ask(
                events.Acquire(
                    Ticket(worker),
                    namespace.id,
                    tuple(keys),
                    wait_ms=max(0, left_ms),
                    prefix_only=False,
                ),
                ASK_S,
            )
            if answer.lease:
                loop.post(events.Release(Ticket(worker), (answer.lease,)))
            if Outcome.PENDING not in answer.outcomes or left_ms <= 0:
                return answer.outcomes.count(Outcome.HIT)
            try:
                async with asyncio.timeout(left_ms / 1000):
                    await settled.wait()
            except TimeoutError:
                return answer.outcomes.count(Outcome.HIT)
            settled.clear()
    except StoreError as problem:
        log.info("an offer was not taken", extra=fields(why=str(problem)))
        return 0
    finally:
        loop.unsubscribe(worker, push)
        loop.post(events.WorkerLeft(worker))
