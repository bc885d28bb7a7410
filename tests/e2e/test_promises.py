"""What goes wrong in stores of KV, shown not to go wrong here: each test is named after the trouble. Those that other
tests show already are in docs/reliability.md, with these, and tests/test_tidy.py sees that all of them exist.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client import Client, Namespace
from kvstore.config import StoreConfig
from kvstore.tiers import format
from kvstore.types import Outcome, Reason, Wait

from .ssd_tools import (
    BOUND_S,
    CHUNK,
    DRAM_CHUNKS,
    SMALL_SSD,
    SPEC,
    Weather,
    client_of,
    content,
    demote,
    eventually,
    hits,
    in_state,
    keys_of,
    look,
    save,
    settled_ssd,
    ssd_of,
)
from .test_daemon_start_stop import free_port, scrape
from .test_ssd import place_of

HEADER_BYTES = format.record_header_bytes(direct=False)
RECORD_BYTES = HEADER_BYTES + CHUNK


@pytest.fixture
def ssd_dir(run_dir: Path) -> Path:
    return run_dir.parent / "ssd"


@pytest.fixture
def weather(run_dir: Path) -> Weather:
    return Weather(run_dir.parent)


@pytest.fixture
def start(start_daemon: Callable[..., Any], ssd_dir: Path, weather: Weather) -> Callable[..., Any]:
    def start(**settings: Any) -> Any:
        return start_daemon(
            **{**SMALL_SSD, "ssd_dir": ssd_dir, "environment": weather.environment, **settings}
        )

    return start


@pytest.fixture
def client() -> Iterator[Callable[..., Client]]:
    with contextlib.ExitStack() as clients:
        yield lambda daemon, **settings: clients.enter_context(client_of(daemon, **settings))


def disk_bytes(folder: Path) -> int:
    """As `du` counts: what is allocated, holes not."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


# ---------------------------------------------------------------------------------------------------- wrong bytes


def test_a_changed_memory_layout_is_never_read_as_the_old_one(
    start: Callable[..., Any], client: Callable[..., Client]
) -> None:
    """Shapes and sizes are the same, so nothing would notice; and whoever wonders about the misses is told why."""
    daemon = start()
    old = client(daemon).open(SPEC)
    keys = keys_of(old, 4)
    save(old, keys)
    new = client(daemon).open(replace(SPEC, layout_fingerprint="test:packed"))
    assert new.salt != old.salt
    assert not set(keys_of(new, 4)) & set(keys)
    assert hits(new, keys) == set(), "nor by the very same keys"
    assert any("layout_fingerprint" in note for note in new.notes), new.notes


def test_records_that_changed_places_or_vanished_are_misses(
    start: Callable[..., Any], client: Callable[..., Client], ssd_dir: Path
) -> None:
    """While the daemon was down, sound records were exchanged, one was zeroed, and one is a copy of another."""
    daemon = start()
    space = client(daemon).open(SPEC)
    keys = keys_of(space, 8)
    save(space, keys, wait=Wait.DURABLE)
    daemon.kill()
    places = [place_of(ssd_dir, key) for key in keys]

    def record(number: int) -> bytes:
        path, offset = places[number]
        with path.open("rb") as slab:
            slab.seek(offset - HEADER_BYTES)
            return slab.read(RECORD_BYTES)

    def put(number: int, data: bytes) -> None:
        path, offset = places[number]
        with path.open("r+b") as slab:
            slab.seek(offset - HEADER_BYTES)
            slab.write(data)

    first, second, third = record(0), record(1), record(2)
    put(0, second)
    put(1, first)
    put(3, bytes(RECORD_BYTES))
    put(4, third)
    space = client(start()).open(SPEC)
    assert hits(space, keys) == {keys[number] for number in (2, 5, 6, 7)}
    found = [look(space, keys)[number] for number in (0, 1, 3, 4)]
    assert {outcome for outcome, _ in found} == {Outcome.MISS}
    # what is in its place is sound but newer: that is how an eviction looks that a crash made the index forget
    assert {reason for _, reason in found} <= {Reason.CORRUPT, Reason.EVICTED}


def test_a_save_that_failed_on_disk_is_not_found_after_a_restart(
    start: Callable[..., Any], client: Callable[..., Client], weather: Weather
) -> None:
    daemon = start()
    engine = client(daemon)
    space = engine.open(SPEC)
    good, bad = keys_of(space, 4, chain=1), keys_of(space, 4, chain=2)
    save(space, good, wait=Wait.DURABLE)
    weather.set([{"calls": ["write"], "files": "slab-*", "do": "EIO"}])
    save(space, bad)
    in_state(engine, "read_only")
    assert hits(space, bad) == set(bad), "DRAM has them"
    daemon.kill()
    weather.clear()
    space = client(start()).open(SPEC)
    assert hits(space, [*good, *bad]) == set(good)


def test_a_salt_holds_on_ssd_and_after_a_restart_too(
    start: Callable[..., Any], client: Callable[..., Client]
) -> None:
    """The tiers below memory know as much of who may read what as memory does."""
    daemon = start()
    mine = client(daemon).open(replace(SPEC, salt=b"mine"))
    keys = keys_of(mine, 4)
    save(mine, keys, wait=Wait.DURABLE)
    demote(mine, keys, filler=9)
    theirs = client(daemon).open(replace(SPEC, salt=b"theirs"))
    assert mine.salt != theirs.salt
    assert set(keys) & hits(theirs, [*keys, *keys_of(theirs, 4)]) == set()
    assert daemon.stop() == 0
    daemon = start()
    theirs = client(daemon).open(replace(SPEC, salt=b"theirs"))
    assert hits(theirs, keys) == set()
    assert hits(client(daemon).open(replace(SPEC, salt=b"mine")), keys) == set(keys)


# ---------------------------------------------------------------------------------------------------------- leaks


def test_releasing_twice_unpins_once(start: Callable[..., Any], client: Callable[..., Client]) -> None:
    """What two leases pin stays pinned until both are released, however often the first one is."""
    engine = client(start())
    space = engine.open(SPEC)
    keys = keys_of(space, 2)
    save(space, keys)
    first, second = space.read(keys, pin=True), space.read(keys, pin=True)

    def pinned() -> int:
        return sum(row.pinned_bytes for row in engine.stats().namespaces)

    attachment = engine._connection.attachment
    assert attachment is not None
    first.release()
    eventually(lambda: engine.stats().gauges["leases"] == 1)
    for _ in range(3):
        first.release()
        attachment.notice("release", [first.lease_id, 10**6])
        assert attachment.wait_for_notices(time.monotonic() + BOUND_S)
    assert engine.stats().gauges["leases"] == 1
    assert pinned() == 2 * CHUNK
    out = np.empty(CHUNK, np.uint8)
    assert second.copy_to(1, out) and np.array_equal(out, content(keys[1]))
    second.release()
    eventually(lambda: pinned() == 0)


# -------------------------------------------------------------------------------------------------------- capacity


def test_the_cap_is_the_nodes_not_each_workers(
    start: Callable[..., Any], client: Callable[..., Client], ssd_dir: Path
) -> None:
    """Four ranks save at once twice what fits: the directory never has more than its cap, and saving goes on."""
    cap = 24 << 20
    daemon = start(ssd_bytes=cap)
    spaces = [client(daemon, engine_group="engine", rank=rank).open(SPEC) for rank in range(4)]
    highest = 0
    for chain in range(48):
        save(spaces[chain % 4], keys_of(spaces[0], 16, chain))
        highest = max(highest, disk_bytes(ssd_dir))
    ssd = settled_ssd(spaces[0].client)
    highest = max(highest, disk_bytes(ssd_dir))
    assert 2 * cap <= 48 * 16 * CHUNK
    assert cap / 2 < highest <= cap
    assert ssd.state == "ok"
    newest = keys_of(spaces[0], 16, 47)
    assert hits(spaces[0], newest) == set(newest)


def test_without_any_setting_the_disk_has_a_cap() -> None:
    config = StoreConfig()
    assert config.ssd_dir == "", "and is not used at all unless somebody says where"
    assert 0 < config.ssd_slabs_max * config.ssd_slab_bytes + config.ssd_index_max < config.ssd_bytes


def test_a_restart_knows_how_full_its_disk_is(
    start: Callable[..., Any], client: Callable[..., Client], ssd_dir: Path
) -> None:
    """Nothing is dead weight: what was there is found, counted, and makes room when it must."""
    daemon = start(ssd_bytes=24 << 20)
    engine = client(daemon)
    space = engine.open(SPEC)
    keys = keys_of(space, 100, chain=1)
    save(space, keys)
    before = settled_ssd(engine)
    assert before.ready == 100
    daemon.kill()
    engine = client(start(ssd_bytes=24 << 20))
    space = engine.open(SPEC)
    after = ssd_of(engine)
    counted = [(ssd.ready, ssd.free, ssd.capacity, ssd.slab_bytes) for ssd in (before, after)]
    assert counted[0] == counted[1]
    assert after.cold_chunks == 100
    assert len(list(ssd_dir.rglob("*.kvs"))) == after.slab_bytes / SMALL_SSD["ssd_slab_bytes"]
    for chain in range(2, 10):
        save(space, keys_of(space, 2 * DRAM_CHUNKS // 2, chain))
    settled_ssd(engine)
    assert disk_bytes(ssd_dir) <= 24 << 20
    assert len(hits(space, keys)) < 100, "the old made room for the new"


# ---------------------------------------------------------------------------------------------------------- metrics


def test_the_counters_say_what_was_done(start: Callable[..., Any], client: Callable[..., Client]) -> None:
    """Hits and misses of two processes' worth of clients add up, in the metrics as in the statistics."""
    port = free_port()
    daemon = start(metrics_port=port)
    engines = [client(daemon), client(daemon)]
    spaces: list[Namespace] = [engine.open(SPEC) for engine in engines]
    keys = keys_of(spaces[0], 5)
    save(spaces[0], keys[:3])
    for space in spaces:
        with space.read(keys, any_order=True) as lease:
            assert lease.hits == 3
    eventually(lambda: engines[0].stats().namespaces[0].hits == 6)  # the daemon hears of lookups soon
    lines = scrape(port).splitlines()

    def value(start: str) -> float:
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(start))

    assert value('kvstored_lookups_total{outcome="hit"') == 6
    assert value('kvstored_lookups_total{outcome="miss"') == 4
    assert value("kvstored_grants_granted_total") == 3
    (row,) = engines[0].stats().namespaces
    assert (row.hits, row.lookups) == (6, 10)
