"""Nobody gets into an engine group that did not name itself."""

from __future__ import annotations

from kvstore.core.events import WorkerJoined
from kvstore.core.limits import Limits
from kvstore.core.store import Store
from kvstore.sim.integrity import check_integrity
from kvstore.types import WorkerId


def test_a_worker_without_a_group_is_a_group_that_no_name_joins() -> None:
    store = Store(Limits(arena_bytes=1 << 20, segment_bytes=1 << 20))
    store.apply(WorkerJoined(WorkerId(7), "alice", ""), 0)
    private = store.state.workers[WorkerId(7)].group
    for number, name in enumerate((private.name, "worker-7", "worker 7", "7", ""), start=8):
        store.apply(WorkerJoined(WorkerId(number), "alice", name), 0)
    assert private.members == {WorkerId(7)}
    check_integrity(store)
