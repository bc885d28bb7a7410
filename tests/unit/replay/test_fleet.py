"""Several nodes and a router in virtual time: KV that follows its session, nodes that fail."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from xml.etree import ElementTree

import pytest

from kvstore.cli import simulate
from kvstore.errors import BadRequest
from kvstore.replay.fleet import Failure, simulate_fleet
from kvstore.replay.plot import fleet_svg
from kvstore.replay.trace import Trace, Turn


def conversations(count: int, turns: int, *, step_ms: int = 1_000, shared: int = 1) -> Trace:
    """Each begins with the same `shared` chunks and grows by two chunks a turn; they take turns."""
    made = []
    for turn in range(turns):
        for number in range(count):
            chunks = (*range(1, shared + 1), *(1_000 * (number + 1) + n for n in range(2 * (turn + 1))))
            made.append(Turn(step_ms * len(made), chunks, 64 * len(chunks), session=number, number=turn))
    trace = Trace("made", 64, made)
    trace.note_history()
    return trace


TRACE = conversations(8, 6)


def run(**settings: Any) -> Any:
    return simulate_fleet(TRACE, **{"nodes": 3, "dram_chunks": 60, **settings})


def test_three_nodes_that_read_from_each_other_hit_like_one_with_all_their_memory() -> None:
    alone = simulate_fleet(TRACE, nodes=1, dram_chunks=180)
    for routing in ("prefix", "session", "least", "random"):
        together = run(routing=routing)
        assert together.turns == len(TRACE)
        assert together.hits >= 0.95 * alone.hits, routing


def test_without_peers_a_session_that_moves_is_computed_again() -> None:
    apart, together = run(routing="random", peers=False), run(routing="random")
    assert apart.hits < 0.7 * together.hits
    assert (apart.hits_peers, apart.network_bytes) == (0, 0)
    assert together.hits_peers > 0 and together.network_bytes > 0


def test_routing_by_prefix_leaves_little_for_the_network() -> None:
    routed, scattered = run(routing="prefix"), run(routing="random")
    assert routed.network_bytes < 0.3 * scattered.network_bytes
    assert sum(routed.turns_per_node) == len(TRACE) and min(routed.turns_per_node) > 0


def test_a_node_that_fails_costs_what_only_it_had() -> None:
    whole = run(routing="prefix")
    failed = run(routing="prefix", failures=[Failure(0, at_ms=20_000, for_ms=10_000)])
    assert failed.turns == whole.turns
    assert whole.hits * 0.5 < failed.hits < whole.hits


def test_of_several_failures_one_node_is_left() -> None:
    failures = [Failure(node, at_ms=10_000, for_ms=5_000) for node in range(3)]
    assert run(failures=failures).turns == len(TRACE)


def test_a_slow_network_is_waited_for() -> None:
    fast = run(routing="random")
    slow = run(routing="random", network_bytes_per_s=1e6)
    assert slow.waited_ms > 10 * fast.waited_ms


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"routing": "magic"}, "routing"),
        ({"nodes": 0}, "nodes"),
        ({"failures": [Failure(3, at_ms=0)]}, "failures"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest, match=field):
        run(**settings)


def test_a_plot_has_a_point_for_every_replay() -> None:
    results = [run(nodes=nodes, routing=routing) for nodes in (2, 3) for routing in ("prefix", "random")]
    rows = [asdict(result) | {"hit_rate": result.hit_rate} for result in results]
    drawn = ElementTree.fromstring(fleet_svg(rows))
    name = "{http://www.w3.org/2000/svg}"
    assert len(drawn.findall(f"{name}circle")) == 3 * len(rows)
    assert len(drawn.findall(f"{name}polyline")) == 3 * 2
    said = [text.text for text in drawn.findall(f"{name}text")]
    assert {"prefix", "random", "hits, %", "2", "3"} <= set(said)
    heights = {float(circle.attrib["cy"]) for circle in drawn.findall(f"{name}circle")}
    assert all(60 <= height <= 260 for height in heights) and len(heights) > 2


def test_a_replay_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On standard error alone: the figures go elsewhere."""
    monkeypatch.setattr(simulate, "PROGRESS_S", 0.0)
    result = simulate_fleet(
        TRACE, nodes=2, dram_chunks=60, told=simulate.Progress("2 nodes", len(TRACE.turns))
    )
    said = capsys.readouterr()
    assert not said.out
    assert said.err.splitlines()[-1] == f"2 nodes: {result.turns:,} of {len(TRACE.turns):,} turns"
