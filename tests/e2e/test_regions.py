"""Adopted regions with a real daemon: an engine's own memory is saved without a copy in staging memory, and neither a
region that is cut short, taken back or overwritten, nor a daemon or a worker that stops, ever shows wrong bytes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import wire
from kvstore.client import Client, Namespace, Region, connect_async
from kvstore.errors import BadRequest, DeadlineExceeded, Exhausted, NotFound, Precondition, StoreError
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.memory import send_packet
from kvstore.types import ChunkKey, GrantResult, Protection, Reason, Wait
from kvstore.v1 import descriptor_pb2, store_pb2

from .ssd_tools import (
    BOUND_S,
    CHUNK,
    SMALL_SSD,
    SPEC,
    client_of,
    content,
    eventually,
    hits,
    keys_of,
    settled_ssd,
)

ROWS = 8
SIZE = ROWS * CHUNK
BOTH = pytest.mark.parametrize("protection", [protection.value for protection in Protection])


def in_shm() -> int:
    """A file as engines make it: with a name at first."""
    fd, name = tempfile.mkstemp(dir="/dev/shm", prefix="kvs-test-region-")
    os.unlink(name)
    return fd


@pytest.fixture
def memfd() -> Iterator[int]:
    """A region of ROWS rows, full of noise."""
    fd = os.memfd_create("kvs-test-region")
    os.pwrite(fd, content(b"noise", SIZE).tobytes(), 0)
    yield fd
    os.close(fd)


@pytest.fixture
def client(daemon: Any) -> Iterator[Client]:
    with client_of(daemon) as client:
        yield client


@pytest.fixture
def space(client: Client) -> Namespace:
    return client.open(SPEC)


def write_rows(fd: int, keys: Sequence[ChunkKey], rows: Sequence[int]) -> list[int]:
    """Put the bytes that belong to `keys` into these rows; their offsets."""
    for key, row in zip(keys, rows, strict=True):
        os.pwrite(fd, content(key).tobytes(), row * CHUNK)
    return [row * CHUNK for row in rows]


def fill_and_commit(
    space: Namespace, region: Region, fd: int, keys: Sequence[ChunkKey], **named: Any
) -> None:
    """Until every key is saved, however often the daemon says that it is full."""
    named = {"transient": True, **named}

    def attempt() -> bool:
        with space.write(keys, staged=False, **named) as batch:
            if batch.granted:
                mine = [keys[index] for index in batch.granted]
                batch.fill(region, write_rows(fd, mine, range(len(mine))))
                assert batch.commit().ok
            return all(result in (GrantResult.GRANTED, GrantResult.ALREADY) for result in batch.results)

    eventually(attempt)


def check_hits(space: Namespace, keys: Sequence[ChunkKey], wait_ms: int = 0) -> None:
    """All of them, with their own bytes, copied into the rows of a region as an engine would."""
    region = np.zeros((len(keys), CHUNK), np.uint8)
    with space.read(keys, wait_ms=wait_ms) as lease:
        assert lease.hits == len(keys), lease
        assert all(lease.copy_to(row, region[row]) for row in range(len(keys)))
    for row, key in zip(region, keys, strict=True):
        assert np.array_equal(row, content(key)), f"wrong bytes under key {key.hex()}"


def outcomes(space: Namespace, keys: Sequence[ChunkKey]) -> set[Reason]:
    matched = space.match(keys)
    return set(matched.reasons)


def kept_by(daemon: Any, name: str = "kvs-test-region") -> list[int]:
    """Flags of the descriptors that the daemon has of files of this name."""
    flags = []
    for fd in Path(f"/proc/{daemon.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if name in os.readlink(fd):
                lines = Path(f"/proc/{daemon.pid}/fdinfo/{fd.name}").read_text().splitlines()
                flags += [int(line.split()[1], 8) for line in lines if line.startswith("flags:")]
    return flags


def slots(client: Client) -> tuple[int, int]:
    """(reserved, quarantined) of the whole arena."""
    pools = client.stats().pools
    return sum(pool.reserved for pool in pools), sum(pool.quarantined for pool in pools)


# ----------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize(
    ("memory", "protection"), [(lambda: os.memfd_create("kvs-test-region"), "sealed"), (in_shm, "group")]
)
def test_rows_of_a_region_come_back_bit_exact(
    start_daemon: Callable[..., Any], memory: Callable[[], int], protection: str
) -> None:
    fd = memory()
    os.pwrite(fd, content(b"noise", SIZE).tobytes(), 0)
    daemon = start_daemon(protection=protection)
    with client_of(daemon) as client, client_of(daemon) as reader:
        space = client.open(SPEC)
        keys = keys_of(space, 5)
        region = client.adopt(fd, SIZE)
        with space.write(keys, staged=False) as batch:
            batch.fill(region, write_rows(fd, keys, (7, 0, 3, 4, 1)))
            assert outcomes(space, keys) == {Reason.BEING_SAVED}, "seen before its commit"
            assert batch.commit().ok
        write_rows(fd, [ChunkKey(b"else")] * ROWS, range(ROWS))  # the rows are the engine's again
        os.close(fd)
        check_hits(space, keys)
        check_hits(reader.open(SPEC), keys)
        assert client._attachment.staging is None, "staging memory was asked for"


def test_each_shard_has_a_row_in_grant_order(daemon: Any, client: Client, memfd: int) -> None:
    groups = (GroupSpec("full", CHUNK, shard_count=2), GroupSpec("latent", 3 * 4096 + 5))
    space = client.open(NamespaceSpec("ranks", b"w" * 32, "test:bytes", 64, groups))
    keys = keys_of(space, 2)
    data = np.frombuffer(os.pread(memfd, SIZE, 0), np.uint8)
    region = client.adopt(memfd, SIZE)
    offsets = [9, 3 * CHUNK, 5 * CHUNK + 1, CHUNK, 7, 2 * CHUNK]

    def attempt() -> bool:
        with space.write(keys, shards=(2, 0, 1), staged=False) as batch:
            if len(batch.granted) < len(keys):
                return False  # a segment for the other size of slots is being made
            batch.fill(region, offsets)
            return batch.commit().ok

    eventually(attempt)
    with space.read(keys) as lease:
        for number, offset in enumerate(offsets):
            shard = (2, 0, 1)[number % 3]
            out = np.empty(space.spec.shard_bytes[shard], np.uint8)
            assert lease.copy_to(number // 3, out, shard=shard)
            assert np.array_equal(out, data[offset : offset + out.size]), number


def test_only_what_is_granted_has_rows(daemon: Any, client: Client, space: Namespace, memfd: int) -> None:
    keys = keys_of(space, 3)
    region = client.adopt(memfd, SIZE)
    fill_and_commit(space, region, memfd, keys[1:2])
    with space.write(keys, staged=False) as batch:
        assert batch.granted == (0, 2)
        with pytest.raises(BadRequest, match="one entry for each of 2 keys"):
            batch.fill(region, [0, 0, 0])
        batch.fill(region, write_rows(memfd, [keys[0], keys[2]], (6, 5)))
        assert batch.commit().ok
    check_hits(space, keys)
    with space.write(keys, staged=False) as batch:
        batch.fill(region, [])
        assert batch.commit().ok


async def test_the_same_on_an_event_loop(daemon: Any, memfd: int) -> None:
    async with await connect_async(str(daemon.run_dir), timeout_s=BOUND_S) as client:
        space = await client.open(SPEC)
        tokens = np.arange(128)
        keys = space.keys(tokens)
        region = await client.adopt(memfd, SIZE)
        async with await space.write(keys, staged=False, transient=True) as batch:
            await batch.fill(region, write_rows(memfd, keys, (2, 1)))
            assert (await batch.commit()).ok
        out = np.empty(CHUNK, np.uint8)
        async with await space.read(keys) as lease:
            for index, key in enumerate(keys):
                assert await lease.copy_to(index, out) and np.array_equal(out, content(key))
        region.close()


# ------------------------------------------------------------------------------------- what may be lent, and what not


def test_the_daemon_keeps_a_descriptor_that_can_only_read(daemon: Any, client: Client, memfd: int) -> None:
    region = client.adopt(memfd, SIZE)  # which can write
    (flags,) = eventually(lambda: kept if len(kept := kept_by(daemon)) == 1 else None)
    assert flags & os.O_ACCMODE == os.O_RDONLY
    assert flags & os.O_CLOEXEC
    region.close()
    eventually(lambda: not kept_by(daemon))


def a_socket() -> int:
    one, other = socket.socketpair()
    other.close()
    return one.detach()


def a_pipe() -> int:
    reads, writes = os.pipe()
    os.close(writes)
    return reads


def write_only() -> int:
    fd, name = tempfile.mkstemp(dir="/dev/shm", prefix="kvs-test-region-")
    os.ftruncate(fd, SIZE)
    os.close(fd)
    fd = os.open(name, os.O_WRONLY)
    os.unlink(name)
    return fd


REFUSED: dict[str, tuple[Callable[[], int], str]] = {
    "directory": (lambda: os.open("/", os.O_RDONLY), "no file in memory"),
    "socket": (a_socket, "no file in memory"),
    "pipe": (a_pipe, "no file in memory"),
    "file on a disk": (lambda: os.open(sys.executable, os.O_RDONLY), "no file in memory"),
    "empty file": (lambda: os.memfd_create("kvs-test-region"), "only 0 bytes"),
    "for writing only": (write_only, "cannot be read"),
}


def test_what_is_no_region_is_refused(daemon: Any, client: Client, subtests: Any) -> None:
    # The arena is made in the background, and each piece of it is a descriptor.
    eventually(lambda: (arena := client.stats().arena).ready_bytes == arena.bytes)
    before = len(os.listdir(f"/proc/{daemon.pid}/fd"))
    for name, (open_it, why) in REFUSED.items():
        with subtests.test(name=name):
            lent = open_it()
            with pytest.raises(BadRequest, match=why):
                client.adopt(lent, SIZE)
            os.close(lent)
    eventually(lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) <= before)


def test_a_client_lends_eight_regions(daemon: Any, client: Client, memfd: int) -> None:
    regions = [client.adopt(memfd, SIZE) for _ in range(8)]
    with pytest.raises(Exhausted, match="8 regions already"):
        client.adopt(memfd, SIZE)
    regions[0].close()
    regions[0] = client.adopt(memfd, SIZE)
    del regions
    eventually(lambda: not kept_by(daemon))


def test_rows_outside_of_the_region_are_refused(
    daemon: Any, client: Client, space: Namespace, memfd: int
) -> None:
    region = client.adopt(memfd, SIZE)
    with space.write(keys_of(space, 1), staged=False) as batch:
        for offset in (-1, SIZE - CHUNK + 1, SIZE, 1 << 70):
            with pytest.raises(BadRequest, match=r"not inside the region|must be between"):
                batch.fill(region, [offset])
        batch.fill(region, [SIZE - CHUNK])
    with space.write(keys_of(space, 1)) as batch, pytest.raises(BadRequest, match="the batch has buffers"):
        batch.fill(region, [0])
    with space.write(keys_of(space, 1), staged=False) as batch:
        with pytest.raises(BadRequest, match="no buffers"):
            batch.buffer(0)
        with pytest.raises(BadRequest, match="no fill has ended well"):
            batch.commit()


def adopt(worker: Any, fd: int, size: int = SIZE) -> int:
    """By the bare protocol."""
    request = descriptor_pb2.DescriptorRequest(adopt=descriptor_pb2.AdoptRequest(bytes=size))
    send_packet(worker.socket, request.SerializeToString(), [fd])
    reply = descriptor_pb2.DescriptorReply.FromString(worker.socket.recv(4096))
    if reply.WhichOneof("body") == "error":
        raise wire.error_from_proto(reply.error)
    return int(reply.adopt.region)


def reserved(worker: Any, key: bytes = b"k") -> int:
    opened = worker.call("Open", store_pb2.OpenRequest(namespace=wire.spec_to_proto(SPEC)))
    request = store_pb2.ReserveRequest(namespace_id=opened.namespace_id, keys=[key])
    return int(worker.call("Reserve", request).reservation_id)


def test_the_daemon_checks_rows_and_regions_itself(
    daemon: Any, connect: Callable[..., Any], memfd: int
) -> None:
    worker, other = connect(daemon), connect(daemon)
    region = adopt(worker, memfd)
    reservation = reserved(worker)

    def fill(**fields: Any) -> Any:
        request = {"reservation_id": reservation, "region": region, "offsets": [0], **fields}
        return worker.call("Fill", store_pb2.FillRequest(**request))

    fill()
    for offset in (SIZE - CHUNK + 1, 1 << 62):
        with pytest.raises(Precondition, match="not inside"):
            fill(offsets=[offset])
    for offsets in ([], [0, 0], [1 << 63]):
        with pytest.raises(BadRequest, match="offsets"):
            fill(offsets=offsets)
    for number in (region + 7, region + 1):
        with pytest.raises(Precondition, match="no such region of this worker"):
            fill(region=number)
    # another worker's, by number and by reservation
    with pytest.raises(Precondition, match="no such region of this worker"):
        other.call(
            "Fill", store_pb2.FillRequest(reservation_id=reserved(other, b"o"), region=region, offsets=[0])
        )
    with pytest.raises(NotFound, match="no such reservation of this worker"):
        other.call("Fill", store_pb2.FillRequest(reservation_id=reservation, region=region, offsets=[0]))
    fill()
    stream = worker.attach()
    stream.ask("fill", store_pb2.FillRequest(reservation_id=reservation, region=region, offsets=[CHUNK]))
    stream.ask("commit", store_pb2.CommitRequest(reservation_id=reservation))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as other users")
def test_two_tenants_save_out_of_regions_of_their_own(
    start_daemon: Callable[..., Any], run_dir: Path, connect: Callable[..., Any]
) -> None:
    run_dir.parent.chmod(0o755)
    alice_uid, bob_uid = 12_001, 12_002
    daemon = start_daemon(tenants=f"{alice_uid}=alice,{bob_uid}=bob")
    alice, bob = connect(daemon, uid=alice_uid), connect(daemon, uid=bob_uid)
    lent: dict[str, bytes] = {}
    for worker in (alice, bob):
        name = worker.hello.tenant
        lent[name] = content(name.encode()).tobytes()
        fd = os.memfd_create("kvs-test-region")
        os.pwrite(fd, lent[name], 0)
        region = adopt(worker, fd, CHUNK)
        reservation = reserved(worker)
        worker.call("Fill", store_pb2.FillRequest(reservation_id=reservation, region=region, offsets=[0]))
        worker.call("Commit", store_pb2.CommitRequest(reservation_id=reservation))
        os.close(fd)
    for uid in (alice_uid, bob_uid):
        os.seteuid(uid)
        try:
            with client_of(daemon) as client:
                space = client.open(SPEC)
                out = np.empty(CHUNK, np.uint8)
                with space.read([ChunkKey(b"k")]) as lease:
                    assert lease.copy_to(0, out)
                assert out.tobytes() == lent[client.tenant]
        finally:
            os.seteuid(0)


# ------------------------------------------------------------------------------------- regions that change in mid-use


def test_a_region_that_is_cut_short_is_an_error_and_no_signal(
    daemon: Any, client: Client, space: Namespace, memfd: int
) -> None:
    region = client.adopt(memfd, SIZE)
    keys = keys_of(space, 2)
    with space.write(keys, staged=False) as batch:
        batch.fill(region, [0, CHUNK])
        os.ftruncate(memfd, CHUNK + 5000)
        with pytest.raises(Precondition, match="cut short"):
            batch.fill(region, [0, CHUNK])
        with pytest.raises(BadRequest, match="no fill has ended well"):
            batch.commit()
        os.ftruncate(memfd, SIZE)
        batch.fill(region, write_rows(memfd, keys, (0, 1)))  # the same batch, once there is something to read
        assert batch.commit().ok
    check_hits(space, keys)
    assert daemon.process.poll() is None


def test_a_region_that_is_cut_short_again_and_again_while_it_is_read(
    daemon: Any, client: Client, space: Namespace, memfd: int
) -> None:
    region = client.adopt(memfd, SIZE)
    stop = threading.Event()

    def cut() -> None:
        while not stop.is_set():
            os.ftruncate(memfd, CHUNK // 2)
            os.ftruncate(memfd, SIZE)

    cutting = threading.Thread(target=cut)
    cutting.start()
    failed = 0
    try:
        for number in range(150):
            with space.write(keys_of(space, ROWS, number), staged=False) as batch:
                try:
                    batch.fill(region, [row * CHUNK for row in range(ROWS)])
                except Precondition:
                    failed += 1
    finally:
        stop.set()
        cutting.join(BOUND_S)
    assert failed, "nothing was cut short in time"
    assert daemon.process.poll() is None
    keys = keys_of(space, 2, 1_000)
    os.ftruncate(memfd, SIZE)
    fill_and_commit(space, region, memfd, keys)
    check_hits(space, keys)
    eventually(lambda: slots(client) == (0, 0))


def test_a_region_that_is_taken_back_in_mid_fill(
    daemon: Any, client: Client, space: Namespace, memfd: int
) -> None:
    for number in range(10):
        region = client.adopt(memfd, SIZE)
        filling = threading.Event()
        ended: list[StoreError | None] = []

        def fill(
            region: Region = region, number: int = number, filling: Any = filling, ended: Any = ended
        ) -> None:
            with space.write(keys_of(space, ROWS, number), staged=False) as batch:
                try:
                    while True:
                        filling.set()
                        batch.fill(region, [row * CHUNK for row in range(ROWS)])
                except StoreError as problem:
                    ended.append(problem)

        thread = threading.Thread(target=fill)
        thread.start()
        assert filling.wait(BOUND_S)
        region.close()
        thread.join(BOUND_S)
        assert isinstance(ended[0], (BadRequest, Precondition)), ended
    eventually(lambda: not kept_by(daemon))
    eventually(lambda: slots(client) == (0, 0))
    assert outcomes(space, keys_of(space, ROWS)) == {Reason.NEVER_SEEN}


# ----------------------------------------------------------------------------------- daemons and workers that stop


@contextlib.contextmanager
def stopped(daemon: Any) -> Iterator[None]:
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        stat = Path(f"/proc/{daemon.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
        yield
    finally:
        daemon.process.send_signal(signal.SIGCONT)


@BOTH
def test_rows_that_a_stopped_daemon_reads_late_are_never_seen(
    start_daemon: Callable[..., Any], memfd: int, protection: str
) -> None:
    """The client gives up, and the engine uses the rows for something else, before the daemon goes on."""
    daemon = start_daemon(protection=protection)
    with client_of(daemon) as client:
        space = client.open(SPEC)
        keys = keys_of(space, 3)
        region = client.adopt(memfd, SIZE)
        with space.write(keys, staged=False) as batch:
            offsets = write_rows(memfd, keys, (0, 1, 2))
            with stopped(daemon):
                with pytest.raises(DeadlineExceeded):
                    batch.fill(region, offsets, timeout_s=0.2)
                write_rows(memfd, [ChunkKey(b"else")] * 3, (0, 1, 2))
                with pytest.raises(BadRequest, match="no fill has ended well"):
                    batch.commit()
        # It did read them, late; or it heard first that nobody wants them.
        counted = client.stats
        eventually(lambda: counted().counters.get("fills") or counted().counters.get("fills_failed"))
        eventually(lambda: slots(client) == (0, 0))
        assert outcomes(space, keys) == {Reason.NEVER_SEEN}
        fill_and_commit(space, region, memfd, keys)
        check_hits(space, keys)


WORKER = """
    import os, sys
    import numpy as np
    from kvstore.client import connect
    from tests_spec import SPEC, SIZE, CHUNK, ROWS

    with connect(sys.argv[1], timeout_s=20) as client:
        space = client.open(SPEC)
        fd = os.memfd_create("kvs-test-region")
        os.ftruncate(fd, SIZE)
        region = client.adopt(fd, SIZE)
        number = 0
        print("filling", flush=True)
        while True:
            number += 1
            tokens = np.arange(64 * ROWS) + number % 4 * 100_000
            with space.write(space.keys(tokens), staged=False) as batch:
                batch.fill(region, [row * CHUNK for row in range(len(batch.granted))])
"""


def test_a_worker_killed_in_mid_fill_leaves_nothing_behind(daemon: Any, tmp_path: Path) -> None:
    (tmp_path / "tests_spec.py").write_text(
        "from kvstore.layout import GroupSpec, NamespaceSpec\n"
        f"CHUNK, ROWS, SIZE = {CHUNK}, {ROWS}, {SIZE}\n"
        'SPEC = NamespaceSpec("tiny", b"w" * 32, "test:bytes", 64, (GroupSpec("full", shard_bytes=CHUNK),))\n'
    )
    with client_of(daemon) as client:
        space = client.open(SPEC)
        before = client.stats().counters.get("fills", 0)
        for _ in range(2):
            worker = subprocess.Popen(
                [sys.executable, "-P", "-c", textwrap.dedent(WORKER), str(daemon.run_dir)],
                env={**os.environ, "PYTHONPATH": str(tmp_path)},
                stdout=subprocess.PIPE,
                text=True,
            )
            assert worker.stdout is not None
            try:
                assert worker.stdout.readline() == "filling\n"
                wanted = client.stats().counters.get("fills", before) + 20
                eventually(lambda wanted=wanted: client.stats().counters.get("fills", 0) > wanted)
            finally:
                worker.kill()
                worker.wait(BOUND_S)
                worker.stdout.close()
            eventually(lambda: not kept_by(daemon))
            eventually(lambda: slots(client) == (0, 0))
        assert outcomes(space, keys_of(space, 3)) == {Reason.NEVER_SEEN}


def test_a_restarted_daemon_is_lent_the_region_anew(start_daemon: Callable[..., Any], memfd: int) -> None:
    daemon = start_daemon()
    with client_of(daemon) as client:
        space = client.open(SPEC)
        region = client.adopt(memfd, SIZE)
        keys = keys_of(space, 3)
        fill_and_commit(space, region, memfd, keys)
        with space.write(keys_of(space, 1, 9), staged=False) as batch:
            daemon.kill()
            with pytest.raises(StoreError):
                batch.fill(region, [0])
        daemon = start_daemon()
        client.wait_connected()
        eventually(lambda: outcomes(space, keys) == {Reason.NEVER_SEEN})
        assert not kept_by(daemon)
        with space.write(keys_of(space, 1, 8), staged=False) as batch:
            with stopped(daemon), pytest.raises(DeadlineExceeded):
                batch.fill(region, [0], timeout_s=0.2)  # it is to be lent first
            batch.fill(region, [0])  # lent again: the first answer may come late
        fill_and_commit(space, region, memfd, keys)
        check_hits(space, keys)
        eventually(lambda: len(kept_by(daemon)) == 1)
        region.close()
        eventually(lambda: not kept_by(daemon))
        with (
            space.write(keys_of(space, 1, 10), staged=False) as batch,
            pytest.raises(BadRequest, match="closed"),
        ):
            batch.fill(region, [0])


def test_a_region_that_is_adopted_too_late_is_taken_back(daemon: Any, client: Client, memfd: int) -> None:
    with stopped(daemon), pytest.raises(DeadlineExceeded):
        client.adopt(memfd, SIZE, timeout_s=0.2)
    daemon.wait_for("region adopted")
    eventually(lambda: not kept_by(daemon))


def test_closing_a_region_waits_for_nobody(daemon: Any, client: Client, memfd: int) -> None:
    """Not even for a thread of ours that waits for the daemon to adopt it."""
    region = Region(memfd, SIZE)
    attachment = client._attachment
    ended: list[StoreError] = []

    def lend() -> None:
        try:
            region.lend(attachment, time.monotonic() + BOUND_S)
        except StoreError as problem:
            ended.append(problem)

    with stopped(daemon):
        thread = threading.Thread(target=lend)
        thread.start()
        eventually(lambda: attachment._awaited)
        region.close()
        assert thread.is_alive()
    thread.join(BOUND_S)
    eventually(lambda: not kept_by(daemon))
    assert region._fd == -1, "its descriptor is still open"
    with pytest.raises(BadRequest, match="the region is closed"):
        region.lend(attachment, time.monotonic() + BOUND_S)


def test_regions_end_with_the_connection(daemon: Any, memfd: int) -> None:
    with client_of(daemon) as client:
        region = client.adopt(memfd, SIZE)
        eventually(lambda: len(kept_by(daemon)) == 1)
        assert region.size_bytes == SIZE  # one that nobody has any more would be given back
    eventually(lambda: not kept_by(daemon))


# ------------------------------------------------------------------------------------------------- kept only once


def test_transient_chunks_are_in_dram_only_while_somebody_reads_them(
    start_daemon: Callable[..., Any], tmp_path: Path, memfd: int
) -> None:
    daemon = start_daemon(**SMALL_SSD, ssd_dir=tmp_path / "ssd")
    with client_of(daemon) as client:
        space = client.open(SPEC)
        region = client.adopt(memfd, SIZE)
        keys, others = keys_of(space, 6), keys_of(space, 2, 1)

        def resident() -> tuple[int, int]:
            (namespace,) = client.stats().namespaces
            return namespace.chunks, namespace.cold_chunks

        fill_and_commit(space, region, memfd, keys)
        settled_ssd(client)
        assert resident() == (0, 6)
        fill_and_commit(space, region, memfd, others, transient=False)
        settled_ssd(client)
        assert resident() == (2, 6)
        for _ in range(2):
            with space.read(keys, wait_ms=10_000) as lease:
                assert set(lease.reasons) == {Reason.ON_SSD}
                lease.settled()
                check_hits(space, keys)  # a lease of its own: the first that had them read back
            eventually(lambda: resident() == (2, 6))
        assert hits(space, keys) == set(keys)
    assert daemon.stop() == 0
    daemon = start_daemon(**SMALL_SSD, ssd_dir=tmp_path / "ssd")
    with client_of(daemon) as client:
        space = client.open(SPEC)
        assert hits(space, keys) == set(keys)
        eventually(lambda: client.stats().namespaces[0].chunks == 0)


def test_transient_chunks_stay_in_dram_without_an_ssd(
    daemon: Any, client: Client, space: Namespace, memfd: int
) -> None:
    region = client.adopt(memfd, SIZE)
    keys = keys_of(space, 4)
    fill_and_commit(space, region, memfd, keys)
    for _ in range(3):
        check_hits(space, keys)
    assert client.stats().namespaces[0].chunks == 4


def test_filled_chunks_are_durable_when_that_is_said(
    start_daemon: Callable[..., Any], tmp_path: Path, memfd: int
) -> None:
    daemon = start_daemon(**SMALL_SSD, ssd_dir=tmp_path / "ssd")
    with client_of(daemon) as client:
        space = client.open(SPEC)
        keys = keys_of(space, 3)
        region = client.adopt(memfd, SIZE)
        with space.write(keys, staged=False, transient=True) as batch:
            batch.fill(region, write_rows(memfd, keys, (3, 2, 1)))
            assert batch.commit(wait=Wait.DURABLE).ok
        daemon.kill()
        start_daemon(**SMALL_SSD, ssd_dir=tmp_path / "ssd")
        client.wait_connected()
        eventually(lambda: outcomes(space, keys) == {Reason.ON_SSD})
        assert hits(space, keys) == set(keys)
