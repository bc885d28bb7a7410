"""What a route costs, from what is known of each node."""

from __future__ import annotations

import numpy as np

from kvstore.fleet.registry import Holder, Node
from kvstore.fleet.routing import Route, routes

HERE = Node("here", b"h" * 16, "here:1")


def where(text: str) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.array([{".": 0, "s": 1, "D": 2}[each] for each in text], np.uint8)


def found(mine: str, *others: tuple[str, str], down: str = "", draining: str = "") -> dict[str, Route]:
    nodes = {name: Node(name, b"x" * 16, f"{name}:1", draining=name == draining) for name, _ in others}
    made = routes(
        HERE,
        where(mine),
        list(nodes.values()),
        [Holder(nodes[name], where(text)) for name, text in others if text.strip(".")],
        1_000,
        reachable=lambda node: node.name != down,
        cost_ms=lambda node, size: (1.0, 3.0),
    )
    return {route.node.name: route for route in made}


def test_a_node_pays_for_what_it_lacks_of_the_longest_prefix() -> None:
    rows = found("DD..", ("a", "DDD."), ("b", "ssss"), ("c", "...."))
    assert {name: row.cost_ms for name, row in rows.items()} == {"a": 1.0, "here": 2.0, "c": 4.0, "b": 8.0}
    assert list(rows) == ["a", "here", "c", "b"]
    assert (rows["a"].prefix_chunks, rows["b"].prefix_dram_chunks) == (3, 0)


def test_holes_end_a_prefix_and_several_nodes_make_one_together() -> None:
    rows = found("D.DD", ("a", ".D.."))
    assert (rows["here"].prefix_chunks, rows["here"].chunks, rows["here"].cost_ms) == (1, 3, 1.0)
    assert rows["a"].cost_ms == 3.0


def test_what_only_an_unreachable_node_holds_is_no_prefix() -> None:
    rows = found("D...", ("a", "DDDD"), down="a")
    assert rows["here"].cost_ms == 0.0
    assert list(rows) == ["here", "a"]


def test_who_drains_comes_last() -> None:
    assert list(found("....", ("a", "DDDD"), draining="a")) == ["here", "a"]


def test_nothing_is_held_anywhere() -> None:
    rows = found("....", ("a", "...."))
    assert all(row.cost_ms == 0.0 and row.prefix_chunks == 0 for row in rows.values())
