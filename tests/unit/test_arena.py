"""Segments and staging memory: who can reach which bytes, and where the memory goes afterwards."""

import errno
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from kvstore import memory
from kvstore.errors import BadRequest, Exhausted, NotFound
from kvstore.tiers.arena import FAULT_BYTES, Arena, Staging
from kvstore.types import Protection, SegmentId, WorkerId

SIZE = 1 << 20
CELLS = SIZE // 4096
BOOT = bytes(range(16))
ONE, TWO = SegmentId(1), SegmentId(2)


def make_arena(protection: Protection = Protection.SEALED, *, prefault: bool = False) -> Arena:
    return Arena(protection=protection, boot_id=BOOT, huge_pages=False, prefault=prefault)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = make_arena()
    yield arena
    arena.close()


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def mapped(name: str) -> bool:
    return f"/memfd:{name} " in Path("/proc/self/maps").read_text()


@contextmanager
def lent(arena: Arena, segment: SegmentId = ONE) -> Iterator[tuple[int, int]]:
    """The descriptors of a segment, closed afterwards."""
    fds = arena.descriptors(segment)
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def name_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}").removeprefix("/memfd:").removesuffix(" (deleted)")


def shared_rss_bytes() -> int:
    (kib,) = re.findall(r"RssShmem:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) * 1024


def in_worker(script: str, *arguments: int, fds: tuple[int, ...]) -> str:
    """What a worker's process prints, given these descriptors."""
    command = [sys.executable, "-P", "-c", textwrap.dedent(script), *map(str, arguments)]
    done = subprocess.run(command, pass_fds=fds, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


TRY_TO_WRITE = """
    import sys
    from kvstore import memory
    for fd, size in zip(*[iter(map(int, sys.argv[1:]))] * 2):
        print(memory.map_shared(fd, size).array[0], end=" ")
        try:
            memory.map_shared(fd, size, writable=True).array[1] = 66
            print("written")
        except PermissionError:
            print("refused")
"""


@pytest.mark.parametrize(
    ("protection", "data"), [(Protection.SEALED, "refused"), (Protection.GROUP, "written")]
)
def test_who_may_write_a_segment(protection: Protection, data: str) -> None:
    arena = make_arena(protection)
    arena.create(ONE, SIZE, CELLS)
    arena.view(ONE, 0, 2)[:] = [65, 1]
    with lent(arena) as (data_fd, header_fd):
        said = in_worker(
            TRY_TO_WRITE, data_fd, SIZE, header_fd, memory.header_bytes(CELLS), fds=(data_fd, header_fd)
        )
        assert said == f"65 {data}\n{ord('K')} refused\n"
        assert arena.view(ONE, 1, 1)[0] == (66 if data == "written" else 1)
        for fd in (data_fd, header_fd):
            for length in (0, 2 * SIZE):
                with pytest.raises(PermissionError):
                    os.ftruncate(fd, length)
    arena.close()


def test_header_says_what_the_segment_is(arena: Arena) -> None:
    arena.create(ONE, SIZE, CELLS)
    with lent(arena) as (_, header_fd):
        header = memory.map_shared(header_fd, memory.header_bytes(CELLS))
    assert memory.read_header(header.array) == memory.SegmentHeader(CELLS, SIZE, BOOT)
    assert not memory.generations(header.array, CELLS).any()
    assert arena.size_of(ONE) == (SIZE, CELLS)


def test_generations_reach_a_reader_and_only_their_cells(arena: Arena) -> None:
    arena.create(ONE, SIZE, CELLS)
    arena.create(TWO, SIZE, CELLS)
    with lent(arena, ONE) as first, lent(arena, TWO) as second:
        maps = [memory.map_shared(fds[1], memory.header_bytes(CELLS)) for fds in (first, second)]
    arena.set_generations(ONE, (3, 0, CELLS - 1), (7, (1 << 64) - 1, 8))
    arena.set_generations(ONE, (), ())
    seen = memory.generations(maps[0].array, CELLS)
    assert {int(cell): int(seen[cell]) for cell in np.flatnonzero(seen)} == {
        0: (1 << 64) - 1,
        3: 7,
        CELLS - 1: 8,
    }
    assert not memory.generations(maps[1].array, CELLS).any()


@pytest.mark.parametrize(
    ("cells", "generations", "error"),
    [((-1,), (1,), AssertionError), ((CELLS,), (1,), IndexError), ((1, 2), (1,), AssertionError)],
)
def test_cells_that_do_not_exist_are_our_bug(
    arena: Arena, cells: tuple[int, ...], generations: tuple[int, ...], error: type[Exception]
) -> None:
    arena.create(ONE, SIZE, CELLS)
    with pytest.raises(error):
        arena.set_generations(ONE, cells, generations)


@pytest.mark.parametrize(("offset", "length"), [(-1, 2), (0, SIZE + 1), (SIZE, 1), (0, -1)])
def test_views_stay_inside_of_their_segment(arena: Arena, offset: int, length: int) -> None:
    arena.create(ONE, SIZE, CELLS)
    assert arena.view(ONE, SIZE - 1, 1).size == 1
    with pytest.raises(BadRequest, match=f"outside of {SIZE} bytes"):
        arena.view(ONE, offset, length)


def test_unknown_segments_are_not_found(arena: Arena) -> None:
    calls = (
        lambda: arena.view(ONE, 0, 1),
        lambda: arena.descriptors(ONE),
        lambda: arena.size_of(ONE),
        lambda: arena.set_generations(ONE, (0,), (1,)),
        lambda: arena.destroy(ONE),
    )
    for call in calls:
        with pytest.raises(NotFound, match="segment=1"):
            call()


def test_destroyed_segments_leave_nothing() -> None:
    before, resident = open_fds(), shared_rss_bytes()
    arena = make_arena(prefault=True)
    size = 32 << 20
    arena.create(ONE, size, size // 4096)
    with lent(arena) as (data_fd, _):
        assert os.fstat(data_fd).st_blocks * 512 == size
    while arena.fault_in():
        pass
    assert shared_rss_bytes() - resident >= size
    arena.destroy(ONE)
    assert open_fds() == before
    assert not mapped("kvs-data-1")
    assert not mapped("kvs-header-1")
    assert shared_rss_bytes() - resident < 1 << 20


def test_without_prefault_pages_come_when_touched(arena: Arena) -> None:
    arena.create(ONE, SIZE, CELLS)
    with lent(arena) as (data_fd, _):
        assert os.fstat(data_fd).st_blocks == 0
        arena.view(ONE, 5 * 4096, 4096)[:] = 1
        assert os.fstat(data_fd).st_blocks * 512 == 4096


def test_a_new_segment_has_its_pages_and_is_faulted_in_while_it_is_used() -> None:
    """Nobody waits for the faults before the first save, and they leave the bytes alone."""
    arena = make_arena(prefault=True)
    resident, size = shared_rss_bytes(), 3 * FAULT_BYTES + 4096
    arena.create(ONE, size, size // 4096)
    arena.create(TWO, SIZE, CELLS)
    with lent(arena) as (data_fd, _):
        assert os.fstat(data_fd).st_blocks * 512 == size, "memory that is not there is known now"
    assert shared_rss_bytes() - resident < FAULT_BYTES
    last = arena.view(ONE, size - 4096, 4096)
    last[:] = 7
    steps = [arena.fault_in() for _ in range(5)]
    assert steps == [True] * 4 + [False], "one step of the second segment is left after the four of the first"
    assert shared_rss_bytes() - resident >= size + SIZE
    assert (last == 7).all()
    assert arena.view(ONE, 0, size - 4096).max() == 0
    assert not arena.fault_in()
    arena.close()


def test_a_segment_that_goes_is_not_faulted_in_further() -> None:
    arena = make_arena(prefault=True)
    arena.create(ONE, 2 * FAULT_BYTES, 1)
    arena.create(TWO, 2 * FAULT_BYTES, 1)
    assert arena.fault_in()
    arena.destroy(ONE)
    assert [arena.fault_in(), arena.fault_in()] == [True, False]
    arena.create(ONE, 2 * FAULT_BYTES, 1)
    arena.close()
    assert not arena.fault_in()


@pytest.mark.parametrize(("kept", "populated"), [(False, 0), (True, 1)])
def test_huge_pages_that_must_be_asked_for_come_by_faults(
    monkeypatch: pytest.MonkeyPatch, kept: bool, populated: int
) -> None:
    """An allocation would give small ones. Only where a page that cannot be had is a SIGBUS are they waited for."""
    calls: list[str] = []
    real = memory.SharedMapping.populate
    monkeypatch.setattr(memory, "huge_pages_by_advice", lambda: True)
    monkeypatch.setattr(memory, "promises_are_kept", lambda: kept)
    monkeypatch.setattr(memory, "allocate", lambda *_, **__: pytest.fail("small pages"))
    monkeypatch.setattr(
        memory.SharedMapping, "populate", lambda it, **named: bool(calls.append("all")) or real(it, **named)
    )
    arena = Arena(protection=Protection.SEALED, boot_id=BOOT, huge_pages=True, prefault=True)
    arena.create(ONE, SIZE, CELLS)
    assert len(calls) == populated
    assert not arena.fault_in(), "one step was left"
    arena.close()


@pytest.mark.parametrize(
    ("code", "made"), [(errno.ENOMEM, False), (errno.ENOSPC, False), (errno.EPERM, True)]
)
def test_memory_that_is_not_there_is_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch, code: int, made: bool
) -> None:
    """A kernel that cannot allocate without touching (EPERM: glibc tries to write instead) touches all."""

    def failing(*_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", failing)
    arena = make_arena(prefault=True)
    before = open_fds()
    if made:
        arena.create(ONE, SIZE, CELLS)
        with lent(arena) as (data_fd, _):
            assert os.fstat(data_fd).st_blocks * 512 == SIZE
    else:
        with pytest.raises(OSError, match=os.strerror(code)):
            arena.create(ONE, SIZE, CELLS)
        assert open_fds() == before
    arena.close()


def test_a_view_outlives_destruction(arena: Arena) -> None:
    arena.create(ONE, SIZE, CELLS)
    view = arena.view(ONE, 0, 4096)
    arena.destroy(ONE)
    view[:] = 9
    assert mapped("kvs-data-1")
    del view
    assert not mapped("kvs-data-1")


@pytest.mark.parametrize("step", ["map_shared", "add_seals", "write_header"])
@pytest.mark.parametrize("call", [1, 2])
def test_creation_is_all_or_nothing(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, step: str, call: int
) -> None:
    before = open_fds()
    real, calls = getattr(memory, step), iter(range(1, 9))

    def failing(*arguments: object, **options: object) -> object:
        if next(calls) == call:
            raise OSError(errno.ENOMEM, "no memory")
        return real(*arguments, **options)

    monkeypatch.setattr(memory, step, failing)
    if (step, call) == ("write_header", 2):  # there is but one
        arena.create(ONE, SIZE, CELLS)
        return
    with pytest.raises(OSError, match="no memory"):
        arena.create(ONE, SIZE, CELLS)
    monkeypatch.undo()
    assert open_fds() == before
    assert not mapped("kvs-data-1")
    arena.create(ONE, SIZE, CELLS)


def test_closing_stops_a_creation_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_fds()
    arena = make_arena(prefault=True)
    real = memory.allocate
    answers = []

    def closing_meanwhile(fd: int, size_bytes: int, **options: object) -> bool:
        arena.close()
        answers.append(real(fd, size_bytes, **options))  # type: ignore[arg-type]
        return answers[0]

    monkeypatch.setattr(memory, "allocate", closing_meanwhile)
    with pytest.raises(OSError, match="closed") as caught:
        arena.create(ONE, SIZE, CELLS)
    assert caught.value.errno == errno.ECANCELED
    assert answers == [False]
    assert open_fds() == before


def test_nothing_is_created_after_close() -> None:
    before = open_fds()
    arena = make_arena()
    arena.close()
    with pytest.raises(OSError, match="closed"):
        arena.create(ONE, SIZE, CELLS)
    assert open_fds() == before


def test_close_gives_everything_back() -> None:
    before = open_fds()
    arena = make_arena()
    for number in range(1, 9):
        arena.create(SegmentId(number), SIZE, CELLS)
    assert len(open_fds()) == len(before) + 16
    arena.close()
    assert open_fds() == before
    assert not mapped("kvs-data-8")


def test_lent_descriptors_stay_what_they_are_when_the_segment_goes(arena: Arena) -> None:
    """The numbers of the arena's own would be the next segment's, another tenant's."""
    arena.create(ONE, SIZE, CELLS)
    with lent(arena) as fds:
        arena.destroy(ONE)
        arena.create(TWO, SIZE, CELLS)
        assert [name_of(fd) for fd in fds] == ["kvs-data-1", "kvs-header-1"]
        assert not any(os.get_inheritable(fd) for fd in fds)


@pytest.mark.parametrize("end", [lambda arena: arena.destroy(ONE), Arena.close], ids=["destroyed", "closed"])
def test_nothing_is_closed_while_descriptors_are_duplicated(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, end: Callable[[Arena], None]
) -> None:
    """Another thread destroys the segment between the look into the table and each of the two duplicates."""
    arena.create(ONE, SIZE, CELLS)
    real = os.dup
    threads: list[threading.Thread] = []
    free: list[bool] = []

    def destroying_meanwhile(fd: int) -> int:
        free.append(arena._lock.acquire(blocking=False))
        if free[-1]:
            arena._lock.release()
            end(arena)
            arena.create(TWO, SIZE, CELLS)
        else:
            threads.append(threading.Thread(target=_tried, args=(end, arena)))
            threads[-1].start()
        return real(fd)

    monkeypatch.setattr(os, "dup", destroying_meanwhile)
    fds = arena.descriptors(ONE)
    for thread in threads:
        thread.join(30)
    assert free == [False, False]
    assert [name_of(fd) for fd in fds] == ["kvs-data-1", "kvs-header-1"]
    for fd in fds:
        os.close(fd)


def _tried(end: Callable[[Arena], None], arena: Arena) -> None:
    with suppress(NotFound):  # the other thread was faster
        end(arena)


def test_all_or_no_descriptors(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    arena.create(ONE, SIZE, CELLS)
    before, real, calls = open_fds(), os.dup, iter(range(1, 9))

    def failing(fd: int) -> int:
        if next(calls) == 2:
            raise OSError(errno.EMFILE, "too many")
        return real(fd)

    monkeypatch.setattr(os, "dup", failing)
    with pytest.raises(OSError, match="too many"):
        arena.descriptors(ONE)
    assert open_fds() == before


def test_nothing_of_it_is_in_a_file_system(arena: Arena) -> None:
    before = sorted(os.listdir("/dev/shm"))
    arena.create(ONE, SIZE, CELLS)
    assert sorted(os.listdir("/dev/shm")) == before


# ------------------------------------------------------------------------------------------------------------ staging

ALICE, BOB = WorkerId(1), WorkerId(2)


@pytest.fixture
def staging() -> Iterator[Staging]:
    staging = Staging(bytes_max=10 * 4096)
    before = open_fds()
    yield staging
    staging.close()
    for fd in open_fds() - before:  # what create() lent
        os.close(int(fd))


def test_a_lent_descriptor_stays_what_it_is_when_the_memory_is_dropped(staging: Staging) -> None:
    fd, _ = staging.create(ALICE, 4096)
    staging.drop(ALICE)
    others = [staging.create(WorkerId(number), 4096)[0] for number in (2, 3)]
    assert name_of(fd) == "kvs-staging-1"
    assert fd not in others


def test_a_worker_writes_and_the_daemon_reads(staging: Staging) -> None:
    fd, granted = staging.create(ALICE, 4097)
    assert granted == 2 * 4096 == os.fstat(fd).st_size
    script = """
        import os, sys
        from kvstore import memory
        fd, size = map(int, sys.argv[1:])
        array = memory.map_shared(fd, size, writable=True).array
        array[4090:4100] = range(10)
        for length in (0, size - 4096, size + 4096):
            try:
                os.ftruncate(fd, length)
                print("resized")
            except PermissionError:
                print("refused")
    """
    assert in_worker(script, fd, granted, fds=(fd,)) == "refused\n" * 3
    view = staging.view(ALICE, 4090, 10)
    assert bytes(view) == bytes(range(10))
    assert not view.flags.writeable


def test_the_common_bound_clips_then_refuses(staging: Staging) -> None:
    assert staging.create(ALICE, 7 * 4096)[1] == 7 * 4096
    assert staging.create(BOB, 7 * 4096)[1] == 3 * 4096
    before = open_fds()
    with pytest.raises(Exhausted, match="all 40960 bytes"):
        staging.create(WorkerId(3), 1)
    assert open_fds() == before
    staging.drop(ALICE)
    assert staging.bytes_granted == 3 * 4096
    assert staging.create(WorkerId(3), 1 << 40)[1] == 7 * 4096


@pytest.mark.parametrize("wanted", [0, -1])
def test_nothing_is_no_wish(staging: Staging, wanted: int) -> None:
    with pytest.raises(BadRequest, match="above 0"):
        staging.create(ALICE, wanted)


def test_one_per_worker(staging: Staging) -> None:
    staging.create(ALICE, 4096)
    with pytest.raises(BadRequest, match="already"):
        staging.create(ALICE, 4096)
    assert staging.bytes_granted == 4096


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (4096, 1), (0, 4097), (0, -1), (1 << 62, 8)])
def test_nobody_reads_outside_of_its_own(staging: Staging, offset: int, length: int) -> None:
    staging.create(ALICE, 4096)
    staging.create(BOB, 8192)
    with pytest.raises(BadRequest, match="outside of 4096 bytes"):
        staging.view(ALICE, offset, length)
    with pytest.raises(NotFound):
        staging.view(WorkerId(3), 0, 1)


def test_drop_keeps_what_a_copy_runs_on() -> None:
    before = open_fds()
    staging = Staging(bytes_max=SIZE)
    fd, _ = staging.create(ALICE, SIZE)
    os.pwrite(fd, b"abc", 0)
    os.close(fd)
    view = staging.view(ALICE, 0, 3)
    staging.drop(ALICE)
    staging.drop(ALICE)
    assert open_fds() == before
    assert bytes(view) == b"abc"
    assert mapped("kvs-staging-1")
    del view
    assert not mapped("kvs-staging-1")
    with pytest.raises(NotFound):
        staging.view(ALICE, 0, 1)


@pytest.mark.parametrize("step", ["map_shared", "add_seals"])
def test_failed_staging_leaves_nothing(staging: Staging, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def failing(*_: object, **__: object) -> object:
        raise OSError(errno.ENOMEM, "no memory")

    before = open_fds()
    monkeypatch.setattr(memory, step, failing)
    with pytest.raises(OSError, match="no memory"):
        staging.create(ALICE, 4096)
    monkeypatch.undo()
    assert open_fds() == before
    assert staging.bytes_granted == 0
    assert staging.create(ALICE, 4096)[1] == 4096


def test_whether_a_slot_was_given_away_since(arena: Arena) -> None:
    """Whoever sent its bytes elsewhere asks after the last of them."""
    arena.create(ONE, SIZE, CELLS)
    arena.set_generations(ONE, (2, 3), (7, 8))
    assert arena.holds(ONE, 2, 7) and arena.holds(ONE, 3, 8)
    arena.set_generations(ONE, (2,), (9,))
    assert not arena.holds(ONE, 2, 7) and arena.holds(ONE, 3, 8)
    arena.destroy(ONE)
    assert not arena.holds(ONE, 3, 8)
