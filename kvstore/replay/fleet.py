"""Several nodes, each the production core with a machine around it (`machine.py`), one trace, and a router before them.

What a node lacks it looks up at the others and reads out of their DRAM, by the same events as in the daemon
(`core/remote/sources.py`): what is modelled is the registry, which is exact here, and the network, a link for each node
that carries one thing after the other. Nodes fail and come back with nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.core import events as ev
from kvstore.core.chunks import DERIVED, NONE
from kvstore.errors import BadRequest
from kvstore.replay.machine import Disk, Machine
from kvstore.replay.trace import Trace, Turn
from kvstore.types import ChunkKey, DiskResult, Found

PEERS = "peers"
ROUTINGS = ("prefix", "session", "least", "random")
"""prefix: where most of the prompt's beginning is, unless that node is behind; where nobody has enough of it, as
session. session: where the session was last; a new one where the fewest chunks had to be computed so far, since that
node's DRAM has to give up least. least: the node that served least. random: drawn, the same each time."""
WORTH_SHARE = 0.5
"""Of a prompt: a node that has less is no better than the one that the session was at: it goes on saving there."""
BEHIND_TURNS, BEHIND_SHARE = 4, 0.3
"""A node that served so many turns more than its part of all, and so much of that part, is passed by. A tenth moves
sessions for the sake of a balance that no engine needs: each move leaves a copy behind that nobody asks for again."""
PAGE_ROWS, PAGE_BYTES = 4_096, 32 << 10
"""As `kvstore/fleet/held.py` has it."""
RECORD_BYTES = 600
HEARTBEATS_PER_S = 1.0
COMMANDS_PER_HEARTBEAT = 8


@dataclass(frozen=True, slots=True)
class Failure:
    """A node is gone from a time of the trace on, for so long; then it is back with nothing."""

    node: int
    at_ms: int
    for_ms: int = 60_000


@dataclass(slots=True)
class FleetResult:
    trace: str
    nodes: int
    routing: str
    peers: bool
    turns: int = 0
    chunks: int = 0
    hits: int = 0
    hits_peers: int = 0
    """Of the hits: read out of another node's DRAM for it."""
    network_bytes: int = 0
    network_bytes_per_s: float = 0.0
    registry_bytes_per_s: float = 0.0
    registry_commands_per_s: float = 0.0
    turns_per_node: list[int] = field(default_factory=list)
    waited_ms: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / self.chunks if self.chunks else 0.0


class FleetMachine(Machine):
    """One node: a machine that finds the others."""

    def __init__(self, fleet: Fleet, number: int, trace: Trace, **settings: Any) -> None:
        self._fleet = fleet
        self.number = number
        self.fetched = 0
        sources = (PEERS,) if fleet.peers else ()
        super().__init__(trace, sources=sources, remote_deadline_ms=1 << 40, lookup_absent_ms=1, **settings)

    def _perform(self, effects: Sequence[ev.Effect]) -> None:
        for effect in effects:
            match effect:
                case ev.LookUpChunks():
                    found = tuple(self._find(key) for key in effect.keys)
                    self.apply(ev.ChunksLookedUp(effect.op, found))
                case ev.FetchChunks():
                    chunks = tuple(self._fleet.read(self, key) for key in effect.keys)
                    size = sum(chunk.result is DiskResult.OK for chunk in chunks) * self.chunk_bytes
                    self.fetched += size
                    ends = self._fleet.links[self.number].ends(self.now, size)
                    self._later(ends, ev.ChunksFetched(effect.op, chunks))
                case ev.ForgetChunks() | ev.StoreChunks() | ev.DropChunks():
                    raise AssertionError(f"peers store nothing: {effect}")
                case _:
                    super()._perform((effect,))

    def _find(self, key: ChunkKey) -> Found | None:
        holder = self._fleet.holder(self, key)
        return None if holder is None else Found(self.chunk_bytes, cost_ms=1.0)

    def row_of(self, key: ChunkKey) -> int:
        """Of a chunk that is in DRAM; NONE: it is not."""
        state = self.store.state
        row = state.namespaces[self.namespace].index.get(key, NONE)
        return row if row != NONE and state.is_hit(row) else NONE


class Fleet:
    def __init__(
        self,
        trace: Trace,
        *,
        nodes: int,
        routing: str = "prefix",
        peers: bool = True,
        failures: Sequence[Failure] = (),
        network_bytes_per_s: float = 3e9,
        network_latency_ms: float = 1.0,
        **machine: Any,
    ) -> None:
        """`machine`: what each node is like, as for `Machine`. Raises BadRequest."""
        if routing not in ROUTINGS:
            raise BadRequest(f"must be one of {', '.join(ROUTINGS)}", field="routing", value=routing)
        if not 1 <= nodes <= 1_000:
            raise BadRequest("must be between 1 and 1000", field="nodes", value=nodes)
        for failure in failures:
            if not 0 <= failure.node < nodes:
                raise BadRequest(f"there are {nodes} nodes, from 0", field="failures", value=failure.node)
        self.trace = trace
        self.peers = peers and nodes > 1
        self.routing = routing
        self._settings = {
            "policy": "expected",
            "ssd_chunks": 0,
            "chunk_bytes": 1 << 20,
            "ssd_bytes_per_s": math.inf,
            "ssd_latency_ms": 0.0,
            **machine,
        }
        self.links = [Disk(network_bytes_per_s, network_latency_ms) for _ in range(nodes)]
        self.machines: list[FleetMachine] = []
        for number in range(nodes):
            self.machines.append(FleetMachine(self, number, trace, **self._settings))
        self._failures = sorted(failures, key=lambda failure: failure.at_ms)
        self._down: dict[int, int] = {}
        self._served = [0] * nodes
        self._computed = [0] * nodes
        """Chunks that their turns found nowhere near: what each node's DRAM had to take in."""
        self._last: dict[int, int] = {}
        self._draw = random.Random(1)
        self._ended: list[FleetMachine] = []
        """Those that failed: what they did counts."""
        self.result = FleetResult(trace.name, nodes, routing, self.peers)

    # ------------------------------------------------------------------------------------------------- what peers do

    def holder(self, asking: FleetMachine, key: ChunkKey) -> FleetMachine | None:
        machines = self.machines
        first = asking.number + 1
        for step in range(len(machines) - 1):
            machine = machines[(first + step) % len(machines)]
            if machine.number not in self._down and machine.row_of(key) != NONE:
                return machine
        return None

    def read(self, asking: FleetMachine, key: ChunkKey) -> ev.FetchedChunk:
        holder = self.holder(asking, key)
        if holder is None:
            return ev.FetchedChunk(DiskResult.REUSED, why="gone meanwhile")
        chunks = holder.store.state.chunks
        row = holder.row_of(key)
        return ev.FetchedChunk(DiskResult.OK, (0,), chunks.tokens[row], bool(chunks.flags[row] & DERIVED), ())

    # -------------------------------------------------------------------------------------------------------- replay

    def run(self, told: Callable[[int], None] = lambda turns: None) -> FleetResult:
        result = self.result
        for number, turn in enumerate(self.trace.turns):
            self._fail_and_recover(turn.at_ms)
            chosen = self._route(turn)
            self._served[chosen] += 1
            self._computed[chosen] += len(turn.chunks) - self._leading(chosen, turn)
            self._last[turn.session] = chosen
            self.machines[chosen].serve(turn)
            told(number + 1)
        machines = [*self.machines, *self._ended]
        for machine in machines:
            of = machine.result
            result.turns += of.turns
            result.chunks += of.chunks
            result.hits += of.hits
            result.waited_ms += of.waited_ms
            result.hits_peers += machine.store.state.namespaces[machine.namespace].remote_hits
            result.network_bytes += machine.fetched
        result.turns_per_node = list(self._served)
        seconds = max(1.0, self.trace.turns[-1].at_ms / 1000) if self.trace.turns else 1.0
        result.network_bytes_per_s = result.network_bytes / seconds
        self._registry(result, seconds, machines)
        return result

    def _registry(self, result: FleetResult, seconds: float, machines: Sequence[FleetMachine]) -> None:
        """What the nodes would write: the pages in which chunks came in each heartbeat, a record each time; and what
        they would ask."""
        nodes = len(self.machines)
        came = sum(machine.store.state.counters["chunks_saved"] for machine in machines)
        came += result.network_bytes // self._settings["chunk_bytes"]
        beats = max(1.0, seconds * HEARTBEATS_PER_S)
        per_beat = came / beats / nodes
        pages = min(per_beat, 1.0 + per_beat / PAGE_ROWS) if came else 0.0
        result.registry_bytes_per_s = nodes * HEARTBEATS_PER_S * (RECORD_BYTES + pages * PAGE_BYTES)
        result.registry_commands_per_s = nodes * HEARTBEATS_PER_S * (COMMANDS_PER_HEARTBEAT + 3 * (nodes - 1))

    def _fail_and_recover(self, now: int) -> None:
        for number, until in list(self._down.items()):
            if until <= now:
                del self._down[number]
                self.machines[number] = FleetMachine(self, number, self.trace, **self._settings)
        while self._failures and self._failures[0].at_ms <= now:
            failure = self._failures.pop(0)
            if failure.node not in self._down and len(self._down) < len(self.machines) - 1:
                self._down[failure.node] = failure.at_ms + failure.for_ms
                self._ended.append(self.machines[failure.node])

    def _route(self, turn: Turn) -> int:
        up = [node for node in range(len(self.machines)) if node not in self._down]
        if self.routing == "least":
            return min(up, key=lambda node: (self._served[node], node))
        if self.routing == "random":
            return self._draw.choice(up)
        most = (1 + BEHIND_SHARE) * sum(self._served[node] for node in up) / len(up) + BEHIND_TURNS
        allowed = [node for node in up if self._served[node] <= most]
        last = self._last.get(turn.session, -1) if turn.session >= 0 else -1
        freest = min(allowed, key=lambda node: (self._computed[node], node))
        kept = last if last in allowed else freest
        if self.routing == "session":
            return kept
        leading = {node: self._leading(node, turn) for node in allowed}
        best = max(allowed, key=lambda node: (leading[node], -self._served[node], -node))
        return best if leading[best] >= WORTH_SHARE * len(turn.chunks) else kept

    def _leading(self, node: int, turn: Turn) -> int:
        machine = self.machines[node]
        keys = machine.keys
        return next(
            (n for n, chunk in enumerate(turn.chunks) if machine.row_of(keys[chunk]) == NONE),
            len(turn.chunks),
        )


def simulate_fleet(
    trace: Trace, *, told: Callable[[int], None] = lambda turns: None, **settings: Any
) -> FleetResult:
    """`trace` through a fleet, as for `Fleet`; `told` after each turn how many have been. Raises BadRequest."""
    return Fleet(trace, **settings).run(told)
