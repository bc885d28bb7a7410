"""What one peer does not give is asked of the next that has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from kvstore.core import events as ev
from kvstore.fleet.client import Result
from kvstore.fleet.held import Where
from kvstore.fleet.registry import Holder, Node
from kvstore.fleet.secret import FleetSecret
from kvstore.fleet.source import PeerSource
from kvstore.types import ChunkKey, DiskResult, Extent, Extents, NamespaceId, OpId, SegmentId

KEY = ChunkKey(b"k" * 32)


def test_the_next_holder_is_asked_and_each_only_once() -> None:
    nodes = [Node(name, b"b" * 16, f"{name}:1") for name in "ab"]
    asked: list[str] = []
    posted: list[Any] = []

    def submit(read: Any) -> None:
        asked.append(read.node.name)
        read.done([Result.FAILED], [()], "it is slow")

    where = np.array([Where.DRAM], np.uint8)
    source = PeerSource(
        FleetSecret(b"a secret of this fleet"),
        SimpleNamespace(is_open=lambda _: True, lacked=lambda *_: False, submit=submit),  # type: ignore[arg-type]
        SimpleNamespace(view=lambda *_: np.zeros(8, np.uint8)),
        registry=lambda: SimpleNamespace(holders=lambda *_: [Holder(node, where) for node in nodes]),  # type: ignore[arg-type,return-value]
        namespaces=lambda _: None,
        post=posted.append,
        post_threadsafe=posted.append,
        deadline_s=30.0,
    )
    targets = Extents.of([Extent(SegmentId(0), 0, 8, 0, 0)])
    source.submit(ev.FetchChunks(OpId(1), "peers", NamespaceId(1), b"d" * 32, (KEY,), (None,), targets))
    assert asked == ["a", "b"]
    (answer,) = posted
    assert [chunk.result for chunk in answer.chunks] == [DiskResult.REUSED]
    assert answer.chunks[0].why == "it is slow"
