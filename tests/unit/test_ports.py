"""The disk port: short calls are made whole, and the disk for tests does what its control file says."""

import errno
import json
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.sim.daemon import FAULTS, READ_BYTES_PER_S, ThrottledDisk, disk_of
from kvstore.sim.faulty_disk import FaultyDisk
from kvstore.tiers import disk_port as ports
from kvstore.tiers.disk_port import Buffer, RealDisk
from kvstore.types import DiskResult

WAIT_S = 30.0


class ShortDisk(RealDisk):
    """Moves at most 3 bytes a call, as a disk may."""

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return super().read(fd, self._short(buffers), offset)

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return super().write(fd, self._short(buffers), offset)

    @staticmethod
    def _short(buffers: Sequence[Buffer]) -> list[memoryview]:
        return [memoryview(next(buffer for buffer in buffers if len(buffer)))[:3]]


class Weather:
    """A faulty disk over a real file."""

    def __init__(self, folder: Path) -> None:
        self.control = folder / "faults.json"
        self.path = str(folder / "slab-1")
        self.disk = FaultyDisk(RealDisk(), str(self.control))
        self.fd = self.disk.open(self.path, create=True)

    def set(self, *faults: dict[str, object]) -> None:
        new = self.control.with_suffix(".new")
        new.write_text(json.dumps(faults))
        new.replace(self.control)

    def read(self, size: int, offset: int = 0) -> bytes:
        data = bytearray(size)
        return bytes(data[: self.disk.read(self.fd, [memoryview(data)], offset)])


@pytest.fixture
def weather(tmp_path: Path) -> Iterator[Weather]:
    weather = Weather(tmp_path)
    yield weather
    weather.disk.close(weather.fd)


def test_short_calls_are_made_whole(tmp_path: Path) -> None:
    disk = ShortDisk()
    fd = disk.open(str(tmp_path / "f"), create=True)
    ports.write_all(disk, fd, [b"abcd", b"", b"efghij"], 2)
    head, tail = bytearray(5), bytearray(20)
    assert ports.read_all(disk, fd, [memoryview(head), memoryview(tail)], 2) == 10
    assert bytes(head + tail[:5]) == b"abcdefghij"
    disk.close(fd)


def test_a_disk_that_takes_nothing_is_an_error() -> None:
    class Stubborn(RealDisk):
        def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
            return 0

    with pytest.raises(OSError, match="took no byte"):
        ports.write_all(Stubborn(), -1, [b"a"], 0)


def test_real_files_are_private_new_and_no_links(tmp_path: Path) -> None:
    disk, path = RealDisk(), str(tmp_path / "f")
    fd = disk.open(path, create=True)
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.get_inheritable(fd) is False
    disk.allocate(fd, 8192)
    assert disk.size(fd) == 8192
    assert os.stat(path).st_blocks * 512 >= 8192
    disk.close(fd)
    with pytest.raises(FileExistsError):
        disk.open(path, create=True)
    os.symlink(path, tmp_path / "link")
    with pytest.raises(OSError, match="symbolic links"):
        disk.open(str(tmp_path / "link"))
    assert sorted(disk.names(str(tmp_path))) == ["f", "link"]
    disk.sync_directory(str(tmp_path))
    assert disk.free_bytes(str(tmp_path)) > 0


def test_writing_back_begins_without_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = RealDisk()
    fd = disk.open(str(tmp_path / "f"), create=True)
    disk.allocate(fd, 1 << 20)
    disk.write(fd, [bytes(1 << 20)], 0)
    disk.start_writeback(fd, 4096, 8192)
    disk.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        disk.start_writeback(fd, 0, 4096)
    pipe = os.pipe()
    with pytest.raises(OSError, match="Illegal seek"):
        disk.start_writeback(pipe[1], 0, 4096)
    for end in pipe:
        os.close(end)
    for number in (errno.ENOSYS, errno.EINVAL, errno.EINTR):
        monkeypatch.setattr(ports.ctypes, "get_errno", lambda number=number: number)
        disk.start_writeback(-1, 0, 4096)  # the sync does it all


@pytest.mark.parametrize(
    ("number", "result"),
    [
        (errno.ENOSPC, DiskResult.NO_SPACE),
        (errno.EDQUOT, DiskResult.NO_SPACE),
        (errno.EIO, DiskResult.IO_ERROR),
        (errno.EROFS, DiskResult.IO_ERROR),
    ],
)
def test_errors_become_results(number: int, result: DiskResult) -> None:
    assert ports.disk_result(OSError(number, "no")) == result
    assert ports.describe(OSError(number, "no")) == f"{errno.errorcode[number]}: no"


def test_faults_are_only_there_when_a_test_wants_them() -> None:
    assert type(disk_of({})) is RealDisk
    assert type(disk_of({FAULTS: "/nowhere"})) is FaultyDisk
    assert type(disk_of({READ_BYTES_PER_S: "1e9"})) is ThrottledDisk
    assert not FAULTS.startswith("KVSTORED_"), "those are settings, and unknown ones are refused"


def test_no_control_file_is_fair_weather(weather: Weather) -> None:
    assert weather.disk.write(weather.fd, [b"abc"], 0) == 3
    weather.disk.allocate(weather.fd, 100)
    weather.disk.sync(weather.fd)
    weather.disk.index("commit")
    assert weather.read(3) == b"abc"


def test_the_nth_call_fails_and_only_that(weather: Weather) -> None:
    weather.set({"calls": ["read", "write"], "files": "slab-*", "do": "EIO", "skip": 1, "count": 1})
    weather.disk.write(weather.fd, [b"abc"], 0)
    with pytest.raises(OSError, match="a test wants read of slab-1 to fail") as caught:
        weather.read(3)
    assert caught.value.errno == errno.EIO
    assert weather.read(3) == b"abc"
    weather.set({"calls": ["read"], "files": "other-*", "do": "EIO"})
    assert weather.read(3) == b"abc"


@pytest.mark.parametrize("call", ["open", "allocate", "sync", "sync_directory", "unlink", "index_commit"])
def test_every_call_can_fail(weather: Weather, call: str, tmp_path: Path) -> None:
    weather.set({"calls": [call], "do": "ENOSPC"})
    calls = {
        "open": lambda: weather.disk.open(weather.path),
        "allocate": lambda: weather.disk.allocate(weather.fd, 1),
        "sync": lambda: weather.disk.sync(weather.fd),
        "sync_directory": lambda: weather.disk.sync_directory(str(tmp_path)),
        "unlink": lambda: weather.disk.unlink(weather.path),
        "index_commit": lambda: weather.disk.index("commit"),
    }
    with pytest.raises(OSError, match=call) as caught:
        calls[call]()
    assert caught.value.errno == errno.ENOSPC


def test_a_call_hangs_until_the_weather_changes(weather: Weather) -> None:
    weather.disk.write(weather.fd, [b"abc"], 0)
    weather.set({"calls": ["read"], "do": "hang"})
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(weather.read(3)))
    thread.start()
    while not weather.disk.waiting:
        assert thread.is_alive()
    assert not found
    weather.set()
    thread.join(WAIT_S)
    assert found == [b"abc"]
    assert weather.disk.waiting == 0


def test_bits_flip_and_writes_tear(weather: Weather) -> None:
    data = bytes(range(256)) * 8
    weather.disk.write(weather.fd, [data], 0)
    weather.set({"calls": ["read"], "do": "flip", "count": 1})
    wrong = weather.read(2048)
    assert [at for at in range(2048) if wrong[at] != data[at]] == [1024]
    assert weather.read(2048) == data
    weather.set({"calls": ["write"], "do": "flip"})
    assert weather.disk.write(weather.fd, [data], 0) == 2048
    assert weather.read(2048) == wrong
    weather.set({"calls": ["write"], "do": "tear"})
    assert weather.disk.write(weather.fd, [b"x" * 1024, b"y" * 1024], 0) == 2048
    assert weather.read(2048) == b"x" * 1024 + wrong[1024:]


def test_held_writes_are_seen_but_reach_the_file_with_the_sync(weather: Weather) -> None:
    weather.disk.write(weather.fd, [b"0123456789"], 0)
    weather.set({"calls": ["write"], "do": "hold"})
    assert weather.disk.write(weather.fd, [b"ab", b"cd"], 3) == 4
    assert weather.read(10) == b"012abcd789"
    assert weather.read(3, 5) == b"cd7"
    assert Path(weather.path).read_bytes() == b"0123456789"
    weather.set({"calls": ["sync"], "do": "lie"})
    weather.disk.sync(weather.fd)
    assert Path(weather.path).read_bytes() == b"0123456789"
    weather.set()
    weather.disk.sync(weather.fd)
    assert Path(weather.path).read_bytes() == b"012abcd789"


def test_of_writes_in_part_the_first_half_reaches_the_file_at_once(weather: Weather) -> None:
    weather.disk.write(weather.fd, [b"0" * 2048], 0)
    weather.set({"calls": ["write"], "do": "part"})
    assert weather.disk.write(weather.fd, [b"x" * 1024, b"y" * 1024], 0) == 2048
    assert weather.read(2048) == b"x" * 1024 + b"y" * 1024
    assert Path(weather.path).read_bytes() == b"x" * 1024 + b"0" * 1024
    weather.disk.sync(weather.fd)
    assert Path(weather.path).read_bytes() == b"x" * 1024 + b"y" * 1024
