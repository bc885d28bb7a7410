"""Where a prompt is best served: who holds how much of it, and what it costs each node to have the rest. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.fleet.held import Where
from kvstore.fleet.registry import Holder, Node

Held = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Route:
    node: Node
    here: bool
    reachable: bool
    prefix_chunks: int
    prefix_dram_chunks: int
    chunks: int
    cost_ms: float
    """To have in its DRAM the longest prefix that any node holds."""


def routes(
    here: Node,
    mine: Held,
    others: Sequence[Node],
    holders: Sequence[Holder],
    chunk_bytes: int,
    *,
    reachable: Callable[[Node], bool],
    cost_ms: Callable[[Node, int], tuple[float, float]],
) -> list[Route]:
    """All nodes, the cheapest first, those that drain last. `mine`: a `Where` for each key, of this node; `cost_ms`: of
    bringing bytes from a node's DRAM, and from its SSD."""
    held = {holder.node.name: holder.where for holder in holders}
    nothing = np.zeros(len(mine), np.uint8)
    everyone = [(here, mine), *((node, held.get(node.name, nothing)) for node in others)]
    able = [where for node, where in everyone if node is here or reachable(node)]
    anywhere = np.max(np.stack(able), axis=0) if len(mine) else mine
    longest = leading(anywhere)
    found = []
    for node, where in everyone:
        prefix = leading(where)
        first = where[:longest]
        missing, cold = int((first == Where.NOWHERE).sum()), int((first == Where.SSD).sum())
        from_dram, from_ssd = cost_ms(node, chunk_bytes)
        found.append(
            Route(
                node,
                here=node is here,
                reachable=node is here or reachable(node),
                prefix_chunks=prefix,
                prefix_dram_chunks=int((where[:prefix] == Where.DRAM).sum()),
                chunks=int((where != Where.NOWHERE).sum()),
                cost_ms=missing * from_dram + cold * (from_ssd - from_dram),
            )
        )
    found.sort(
        key=lambda route: (
            route.node.draining,
            not route.reachable,
            route.cost_ms,
            route.node.load.get("leases", 0.0),
            route.node.name,
        )
    )
    return found


def leading(where: Held) -> int:
    missing = np.flatnonzero(where == Where.NOWHERE)
    return int(missing[0]) if len(missing) else len(where)
