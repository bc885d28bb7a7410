"""The SSD tier of a real daemon on bad days: disks that hang, fill up, flip bits; directories that are in use, or of
another make; and what an operator sees of it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvstore.client import Backlog, Namespace
from kvstore.core.events import SessionEntry
from kvstore.errors import DeadlineExceeded, Unavailable
from kvstore.sim.daemon import READ_BYTES_PER_S
from kvstore.tiers import format
from kvstore.types import ChunkKey, Outcome, Reason, Wait

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
from .test_daemon_start_stop import health

SERVING, NOT_SERVING = 1, 2


@pytest.fixture
def weather(run_dir: Path) -> Weather:
    return Weather(run_dir.parent)


@pytest.fixture
def ssd_dir(run_dir: Path) -> Path:
    return run_dir.parent / "ssd"


@pytest.fixture
def start(start_daemon: Callable[..., Any], ssd_dir: Path, weather: Weather) -> Callable[..., Any]:
    def start(**settings: Any) -> Any:
        return start_daemon(
            **{**SMALL_SSD, "ssd_dir": ssd_dir, "environment": weather.environment, **settings}
        )

    return start


@pytest.fixture
def open_space() -> Iterator[Callable[..., Namespace]]:
    with contextlib.ExitStack() as clients:

        def open_space(daemon: Any, **settings: Any) -> Namespace:
            return clients.enter_context(client_of(daemon, **settings)).open(SPEC)

        yield open_space


def logged(daemon: Any, message: str) -> list[dict[str, Any]]:
    return [line for line in daemon.lines if line["message"] == message]


# --------------------------------------------------------------------------------------------------------- hung disks


def test_a_hung_read_is_a_miss_in_time_and_dram_goes_on(
    start: Callable[..., Any], open_space: Callable[..., Namespace], weather: Weather
) -> None:
    daemon = start(ssd_deadline_ms=1_000)
    space = open_space(daemon)
    client = space.client
    cold, warm = keys_of(space, 4, 1), keys_of(space, 8, 2)
    save(space, cold)
    demote(space, cold, filler=3)
    save(space, warm)
    settled_ssd(client)
    weather.set([{"calls": ["read"], "files": "slab-*", "do": "hang"}])

    with space.read(cold, wait_ms=int(BOUND_S * 1000)) as lease:
        assert lease.outcomes[0] is Outcome.PENDING
        assert lease.settled(BOUND_S) == (), "told that it will not come"
    assert look(space, cold) == [(Outcome.MISS, Reason.SLOW)] * 4
    assert in_state(client, "off").quarantined == 0
    assert sum(pool.quarantined for pool in client.stats().pools) == 4, "the late read may still land there"
    for _ in range(50):
        assert look(space, warm) == [(Outcome.HIT, Reason.NONE)] * 8
    assert space.match(cold + warm).usable == 0
    assert health(daemon.grpc_target) == health(daemon.grpc_target, "kvstore.v1.Store") == SERVING
    eventually(lambda: health(daemon.grpc_target, "kvstore.ssd") == NOT_SERVING)

    weather.clear()
    in_state(client, "ok")
    eventually(lambda: health(daemon.grpc_target, "kvstore.ssd") == SERVING)
    assert [line["state"] for line in logged(daemon, "the SSD tier is degraded, DRAM serves on")] == ["off"]
    daemon.wait_for("the SSD tier is well again")
    assert hits(space, cold) == set(cold)
    assert not sum(pool.quarantined for pool in client.stats().pools), "the read has returned"


def test_what_it_takes_is_told_before_anything_is_read(
    start: Callable[..., Any], open_space: Callable[..., Namespace]
) -> None:
    space = open_space(start())
    first, second = keys_of(space, 4, 1), keys_of(space, 4, 2)
    for keys, filler in ((first, 3), (second, 5)):
        save(space, keys)
        demote(space, keys, filler=filler)
    size = SPEC.chunk_bytes
    with space.read(first, promote=False, wait_ms=int(BOUND_S * 1000)) as lease:
        assert lease.outcomes == (Outcome.PENDING,) * 4
        assert lease.backlog == Backlog(4 * size, 0, 0) == space.match(first).backlog
    assert set(space.match(first).reasons) == {Reason.ON_SSD}, "nothing was promoted"
    with space.read(first, wait_ms=int(BOUND_S * 1000)) as lease:
        assert lease.settled(BOUND_S) == (0, 1, 2, 3)
    told = space.match(second).backlog
    assert (told.ssd_bytes, told.ahead_bytes) == (4 * size, 0)
    assert told.ssd_bytes_per_s > 0, "it has been read from since"


@pytest.mark.parametrize(
    ("fault", "state"),
    [
        ({"calls": ["write"], "files": "slab-*", "do": "hang"}, "off"),
        ({"calls": ["sync"], "do": "EIO"}, "read_only"),
        ({"calls": ["index_commit"], "do": "ENOSPC"}, "read_only"),
    ],
)
def test_saves_go_on_in_dram_and_are_stored_when_the_disk_is_well_again(
    start: Callable[..., Any],
    open_space: Callable[..., Namespace],
    weather: Weather,
    fault: dict[str, Any],
    state: str,
) -> None:
    daemon = start(ssd_deadline_ms=1_000)
    space = open_space(daemon)
    client = space.client
    before, after = keys_of(space, 8, 1), keys_of(space, 8, 2)
    save(space, before, wait=Wait.DURABLE)
    weather.set([fault])
    save(space, after)
    in_state(client, state)
    assert look(space, after) == [(Outcome.HIT, Reason.NONE)] * 8
    late = keys_of(space, 1, 3)
    with space.write(late) as batch:
        batch.buffer(0)[:] = content(late[0])
        outcome = batch.commit(wait=Wait.DURABLE)
    assert isinstance(outcome.error, Unavailable), "nobody is told that it is durable"
    assert look(space, late) == [(Outcome.HIT, Reason.NONE)], "visible all the same"
    assert health(daemon.grpc_target) == SERVING

    weather.clear()
    in_state(client, "ok")
    settled_ssd(client)
    save(space, keys_of(space, 1, 4), wait=Wait.DURABLE)  # and so is what was written before it
    daemon.kill()
    second = start()
    space = open_space(second)
    assert hits(space, before + after + late) == {*before, *after, *late}


def test_one_slab_file_that_fails_is_left_alone(
    start: Callable[..., Any], open_space: Callable[..., Namespace], weather: Weather, ssd_dir: Path
) -> None:
    """The probe file is fine: without more ado the tier would be degraded again with each second."""
    daemon = start(durable_within_ms=200)
    space = open_space(daemon)
    client = space.client
    save(space, keys_of(space, 4, 1), wait=Wait.DURABLE)
    (bad,) = ssd_dir.glob("slab-*.kvs")
    weather.set([{"calls": ["write", "sync"], "files": bad.name, "do": "EIO"}])

    def closed() -> int:
        save(space, keys_of(space, 1, time.monotonic_ns() % (1 << 30)))
        return client.stats().counters["ssd_slabs_closed"]

    eventually(closed)
    in_state(client, "ok")
    keys = keys_of(space, 8, 2)
    save(space, keys, wait=Wait.DURABLE)
    settled_ssd(client)
    assert len(list(ssd_dir.glob("slab-*.kvs"))) > 1, "in another file"
    assert 1 <= len(logged(daemon, "the SSD tier is degraded, DRAM serves on")) <= 2
    weather.clear()
    daemon.kill()
    assert hits(open_space(start()), [*keys, *keys_of(space, 4, 1)]) == {*keys, *keys_of(space, 4, 1)}


def test_durable_in_time_or_told_so(
    start: Callable[..., Any], open_space: Callable[..., Namespace], weather: Weather
) -> None:
    """The index hangs, and is not given up yet: the commit's own time is over first. It is no lost commit."""
    space = open_space(start(ssd_deadline_ms=1_200, durable_within_ms=800))
    client = space.client
    save(space, keys_of(space, 1, 1), wait=Wait.DURABLE)
    weather.set([{"calls": ["index_commit"], "do": "hang"}])
    keys = keys_of(space, 8, 2)
    with space.write(keys) as batch:
        for index in batch.granted:
            batch.buffer(index)[:] = content(keys[index])
        outcome = batch.commit(wait=Wait.DURABLE)
    assert isinstance(outcome.error, DeadlineExceeded) and outcome.error.field == "wait", outcome
    assert look(space, keys) == [(Outcome.HIT, Reason.NONE)] * 8, "committed and visible"
    weather.clear()
    save(space, keys_of(space, 8, 3), wait=Wait.DURABLE)
    assert client.counters.get("reconnects", 0) == 0, "the connection was in order all the time"


def test_sigterm_while_the_disk_hangs(
    start: Callable[..., Any], open_space: Callable[..., Namespace], weather: Weather
) -> None:
    """Every thread of the tier is in a call that does not return."""
    daemon = start()
    space = open_space(daemon)
    cold = keys_of(space, 4, 1)
    save(space, cold, wait=Wait.DURABLE)
    demote(space, cold, filler=3)
    weather.set(
        [
            {"calls": ["read", "write", "sync"], "files": "slab-*", "do": "hang"},
            {"calls": ["index_commit"], "do": "hang"},
        ]
    )
    save(space, keys_of(space, 4, 2))
    space.read(cold, wait_ms=1000).release()

    def hangs() -> bool:
        stats = space.client.stats()
        return bool(stats.ssd.reserved and sum(pool.reserved for pool in stats.pools))

    eventually(hangs)
    assert daemon.stop() == 0, "in bounded time, and with its invariants whole"
    assert [line for line in daemon.lines if "left behind, with the lock" in line["message"]]
    weather.clear()
    second = open_space(start())
    assert hits(second, cold) == set(cold), "the kernel dropped the lock with the process"


def test_sessions_do_not_age_by_a_restart(
    start: Callable[..., Any], open_space: Callable[..., Namespace]
) -> None:
    """The clock of sessions is the machine's, which has been up for longer than these live."""
    settings = {"session_ttl_ms": 20_000, "durable_within_ms": 100}
    daemon = start(**settings)
    space = open_space(daemon)
    keys = keys_of(space, 1, 1)
    save(space, keys)
    entry = SessionEntry(keys[0], 0, space.spec.chunk_tokens)
    space.update_session("s", expected_version=0, keep=0, append=[entry])
    assert daemon.stop() == 0
    space = open_space(start(**settings))
    settled_ssd(space.client)
    assert hits(space, keys) == set(keys)
    assert space.get_session("s") is not None


def test_sigterm_loses_nothing(start: Callable[..., Any], open_space: Callable[..., Namespace]) -> None:
    daemon = start(durable_within_ms=4_000, drain_ms=int(BOUND_S * 1000))
    space = open_space(daemon)
    keys = keys_of(space, DRAM_CHUNKS, 1)
    save(space, keys)
    assert daemon.stop() == 0
    assert not logged(daemon, "draining took too long: open leases, commits and writes to SSD end now")
    assert hits(open_space(start()), keys) == set(keys)


def test_sigterm_after_an_open_waits_for_nothing(
    start: Callable[..., Any], open_space: Callable[..., Namespace]
) -> None:
    daemon = start(drain_ms=600_000)
    open_space(daemon)
    assert daemon.stop() == 0


# ------------------------------------------------------------------------------------------------------------- full


@pytest.fixture
def small_disk(run_dir: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 64 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    folder = run_dir.parent / "disk"
    folder.mkdir()
    if getattr(request, "param", "ext4") == "tmpfs":
        run("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder))
    else:
        image = run_dir.parent / "image"
        with image.open("wb") as file:
            file.truncate(64 << 20)
        run(
            "mkfs.ext4", "-q", "-m", "0", "-b", "4096", "-O", "^has_journal", str(image)
        )  # no block is root's alone
        run("mount", "-o", "loop", str(image), str(folder))
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def run(*command: str) -> None:
    try:
        subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as problem:
        pytest.skip(f"no file system can be made here: {problem}")


def fill_up(folder: Path) -> Path:
    """To the last byte. ext4 allocates late, and a daemon may give a block back meanwhile: until nothing is left."""
    path = folder / "other"
    deadline = time.monotonic() + 20
    with path.open("ab", buffering=0) as file:
        while True:
            for size in (1 << 20, 4096, 512):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))
            with contextlib.suppress(OSError):
                os.fsync(file.fileno())
            if os.statvfs(folder).f_bavail == 0:
                return path
            assert time.monotonic() < deadline, os.statvfs(folder)


@pytest.mark.timeout(600)  # of a machine that does much else
def test_a_file_system_that_is_full_before_the_first_slab(
    start: Callable[..., Any], open_space: Callable[..., Namespace], small_disk: Path
) -> None:
    daemon = start(ssd_dir=small_disk / "ssd")
    space = open_space(daemon)
    client = space.client
    other = fill_up(small_disk)
    first = keys_of(space, 8, 1)
    save(space, first)
    assert in_state(client, "read_only").ready == 0
    many = keys_of(space, 3 * DRAM_CHUNKS, 2)
    save(space, many)  # from DRAM alone, as without an SSD tier
    assert look(space, many[-8:]) == [(Outcome.HIT, Reason.NONE)] * 8
    assert set(look(space, first)) == {(Outcome.MISS, Reason.EVICTED)}
    assert health(daemon.grpc_target) == SERVING

    other.unlink()
    in_state(client, "ok")
    assert settled_ssd(client).ready >= DRAM_CHUNKS // 2, "what was in DRAM was stored"
    last = keys_of(space, 8, 4)
    save(space, last, wait=Wait.DURABLE)
    daemon.kill()
    assert hits(open_space(start(ssd_dir=small_disk / "ssd")), last) == set(last)


@pytest.mark.timeout(600)  # of a machine that does much else
@pytest.mark.parametrize("write_ms", [0, 150])
def test_a_file_system_that_fills_up_while_it_is_used(
    start: Callable[..., Any],
    open_space: Callable[..., Namespace],
    small_disk: Path,
    weather: Weather,
    write_ms: int,
) -> None:
    """Another program takes what is left: the slabs that exist serve on, within themselves; on a slow disk too."""
    patient = {"ssd_dir": small_disk / "ssd", "ssd_deadline_ms": int(BOUND_S * 1000)}
    daemon = start(**patient)
    space = open_space(daemon)
    client = space.client
    first = keys_of(space, 32, 1)
    save(space, first, wait=Wait.DURABLE)
    if write_ms:
        weather.set([{"calls": ["write"], "files": "slab-*", "do": "delay", "ms": write_ms}])
    other = fill_up(small_disk)
    slabs = ssd_of(client).slab_bytes
    many = keys_of(space, 6 * DRAM_CHUNKS, 2)
    save(space, many[:-16])
    settled_ssd(
        client
    )  # what is being written is pinned: with most of DRAM pinned, the newest have to give way
    newest = many[-16:]
    save(space, newest)  # asked for first: what is promoted from SSD meanwhile would push them out of DRAM
    assert hits(space, newest) == set(newest), "the newest are there"
    hits(space, [*first, *many])
    assert ssd_of(client).slab_bytes == slabs, "no slab could be added"
    assert ssd_of(client).state == "ok"
    assert ssd_of(client).no_space > 0
    counters = client.stats().counters
    assert counters["ssd_slab_failures"] > 0 and counters["chunks_evicted_from_ssd"] > 0
    daemon.kill()
    fill_up(small_disk)
    again = start(**patient)  # on a disk without a free byte
    space = open_space(again)
    client = space.client
    assert hits(space, [*first, *many]) <= {*first, *many}

    other.unlink()
    newest = keys_of(space, 2 * DRAM_CHUNKS, 5)
    save(space, newest)
    eventually(lambda: ssd_of(client).slab_bytes > slabs, lambda: f"no slab was added: {ssd_of(client)}")
    settled_ssd(client)
    assert hits(space, newest) == set(newest)


@pytest.mark.parametrize("small_disk", ["tmpfs", "ext4"], indirect=True)
def test_no_room_even_for_the_index(launch: Callable[..., Any], small_disk: Path, run_dir: Path) -> None:
    fill_up(small_disk)
    daemon = launch(**{**SMALL_SSD, "ssd_dir": small_disk / "ssd"})
    assert daemon.exit_status() == 1, "not a setting: a supervisor may try again"
    (line,) = daemon.refusals
    assert line.startswith(f"ssd_dir={small_disk / 'ssd'}"), line
    assert "no space left" in line.lower() and "free some space" in line


# ------------------------------------------------------------------------------------------------------ flipped bytes


def place_of(ssd_dir: Path, key: ChunkKey) -> tuple[Path, int]:
    """The file in which a chunk's bytes are, and from where on."""
    wanted = content(key).tobytes()
    for path in sorted(ssd_dir.glob("slab-*.kvs")):
        if (offset := path.read_bytes().find(wanted)) >= 0:
            return path, offset
    raise AssertionError("the chunk is in no slab file")


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


def test_a_flipped_byte_is_never_served(
    start: Callable[..., Any], open_space: Callable[..., Namespace], ssd_dir: Path
) -> None:
    daemon = start()
    space = open_space(daemon)
    keys = keys_of(space, 8, 1)
    save(space, keys, wait=Wait.DURABLE)
    demote(space, keys, filler=2)
    flipped = {keys[3]: CHUNK // 2, keys[6]: -200}  # in the bytes, in the header before them
    for key, where in flipped.items():
        path, offset = place_of(ssd_dir, key)
        flip(path, offset + where)

    assert hits(space, keys) == set(keys) - set(flipped), "and the neighbours are served"
    for _ in range(3):
        assert look(space, list(flipped)) == [(Outcome.MISS, Reason.CORRUPT)] * 2
    stats = space.client.stats()
    assert stats.counters["chunks_corrupt"] == stats.ssd.corrupt == stats.ssd.quarantined == 2
    lines = logged(daemon, "corrupt bytes: their slots are quarantined")
    assert len(lines) == 2, "each of them once"
    assert all(line["level"] == "error" and line["why"].startswith("slab-") for line in lines)
    save(space, keys)  # and they can be saved anew
    settled_ssd(space.client)
    assert hits(space, keys) == set(keys)


def test_a_byte_that_was_flipped_while_nobody_looked(
    start: Callable[..., Any], open_space: Callable[..., Namespace], ssd_dir: Path
) -> None:
    daemon = start()
    space = open_space(daemon)
    keys = keys_of(space, 8, 1)
    save(space, keys, wait=Wait.DURABLE)
    daemon.kill()
    flip(*place_of(ssd_dir, keys[5]))
    space = open_space(start())
    assert hits(space, keys) == {key for key in keys if key != keys[5]}
    assert look(space, keys)[5] == (Outcome.MISS, Reason.CORRUPT)


# ------------------------------------------------------------------------------------------------------- the directory


def refused(daemon: Any, *words: str) -> None:
    """Exit status 2 and one clear line."""
    assert daemon.exit_status() == 2, (daemon.lines, daemon.text)
    (line,) = daemon.refusals
    for word in words:
        assert word in line, line


def test_two_daemons_on_one_directory(
    start: Callable[..., Any],
    launch: Callable[..., Any],
    open_space: Callable[..., Namespace],
    ssd_dir: Path,
    run_dir: Path,
) -> None:
    first = start()
    space = open_space(first)
    keys = keys_of(space, 8, 1)
    save(space, keys, wait=Wait.DURABLE)
    other = {**SMALL_SSD, "ssd_dir": ssd_dir, "run_dir": run_dir.parent / "other"}
    refused(
        launch(**other),
        f"ssd_dir={ssd_dir}",
        f"another daemon uses this directory (pid {first.pid})",
        "stop it",
    )
    save(space, keys_of(space, 8, 2), wait=Wait.DURABLE)  # the first never noticed

    first.kill()
    second = start(run_dir=run_dir.parent / "other")
    space = open_space(second)
    assert hits(space, keys) == set(keys)
    refused(launch(**SMALL_SSD, ssd_dir=ssd_dir), f"(pid {second.pid})")


def test_a_newer_format_is_refused(
    start: Callable[..., Any], launch: Callable[..., Any], ssd_dir: Path
) -> None:
    start().stop()
    with lmdb.open(str(ssd_dir / "index"), max_dbs=8) as env:
        meta = env.open_db(b"meta")
        with env.begin(write=True) as txn:
            txn.put(b"format", format.encode_meta(format.FORMAT_VERSION + 1), db=meta)
    before = (ssd_dir / "index" / "data.mdb").read_bytes()
    refused(
        launch(**SMALL_SSD, ssd_dir=ssd_dir),
        f"ssd_dir={ssd_dir}",
        f"newer kvstored, in format {format.FORMAT_VERSION + 1}",
        "run the newer version again, or name another directory",
    )
    assert (ssd_dir / "index" / "data.mdb").read_bytes() == before, "not touched"


@pytest.mark.parametrize(
    ("setting", "value", "remedy"),
    [
        ("ssd_slab_bytes", 2 << 20, "set it to 4194304, or name another ssd_dir"),
        ("ssd_direct_io", True, "set it to false, or name another ssd_dir"),
    ],
)
def test_settings_that_belong_to_the_directory(
    start: Callable[..., Any],
    launch: Callable[..., Any],
    open_space: Callable[..., Namespace],
    ssd_dir: Path,
    setting: str,
    value: object,
    remedy: str,
) -> None:
    daemon = start()
    space = open_space(daemon)
    keys = keys_of(space, 8, 1)
    save(space, keys, wait=Wait.DURABLE)
    daemon.stop()
    refused(launch(**{**SMALL_SSD, "ssd_dir": ssd_dir, setting: value}), setting, remedy)
    assert hits(open_space(start()), keys) == set(keys), "nothing was lost by the attempt"


def test_a_smaller_cap_keeps_what_fits(
    start: Callable[..., Any], open_space: Callable[..., Namespace], ssd_dir: Path
) -> None:
    daemon = start()
    space = open_space(daemon)
    keys = keys_of(space, 4 * DRAM_CHUNKS, 1)
    save(space, keys)
    settled_ssd(space.client)
    daemon.stop()
    # Index (it keeps what it has), overhead, two slabs
    smaller = start(ssd_bytes=(8 + 1 + 8) << 20, ssd_index_bytes=2 << 20)
    space = open_space(smaller)
    assert ssd_of(space.client).slab_bytes <= ssd_of(space.client).bytes == 8 << 20
    had = hits(space, keys)
    assert had and len(had) < len(keys)
    used = sum(path.stat().st_blocks * 512 for path in ssd_dir.rglob("*") if path.is_file())
    assert used <= 17 << 20, "the cap is hard, and counts the index"


def test_a_slow_disk_is_late_with_nothing(
    start_daemon: Callable[..., Any], open_space: Callable[..., Namespace], ssd_dir: Path
) -> None:
    """More is asked for at once than it reads within a deadline: it is asked for less at a time."""
    slow = {
        **SMALL_SSD,
        "ssd_dir": ssd_dir,
        "dram_bytes": 64 << 20,
        "ssd_deadline_ms": 2_000,
        "environment": {READ_BYTES_PER_S: "10e6"},
    }
    count = (32 << 20) // CHUNK
    daemon = start_daemon(**slow)
    space = open_space(daemon)
    keys = keys_of(space, count)
    save(space, keys)
    settled_ssd(space.client)
    assert daemon.stop() == 0
    daemon = start_daemon(**slow)
    space = open_space(daemon)
    with space.read(keys, wait_ms=20_000) as lease:
        assert len(lease.settled()) == count
    assert space.client.stats().ssd.state == "ok"
