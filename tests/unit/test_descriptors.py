"""The descriptor socket, with real sockets and real processes that are killed, stopped, forked and of other users."""

import asyncio
import contextlib
import errno
import gc
import os
import queue
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

from kvstore import memory
from kvstore.config import StoreConfig
from kvstore.core.events import (
    Event,
    SegmentsAllowed,
    WantSegments,
    WorkerClosed,
    WorkerJoined,
    WorkerLeft,
)
from kvstore.errors import Code, ConfigError, Unavailable
from kvstore.tiers import regions
from kvstore.tiers.arena import Arena, Staging
from kvstore.tiers.regions import Regions
from kvstore.transport import descriptors
from kvstore.transport.descriptors import DescriptorServer, Identity
from kvstore.types import Protection, RegionId, SegmentId, WorkerId
from kvstore.v1.descriptor_pb2 import (
    AdoptRequest,
    DescriptorReply,
    DescriptorRequest,
    DropRegionRequest,
    Hello,
    SegmentsRequest,
    StagingRequest,
)

SIZE = 1 << 20
BOOT = bytes(range(16))
WAIT_S = 30.0
NOBODY = 65_534
SECRET = b"bytes of segment %d"

T = TypeVar("T")


class FakeLoop:
    """Notes what is posted; allows the segments in `allowed`."""

    def __init__(self) -> None:
        self.posted: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.allowed: set[int] = {1, 2, 3}
        self.error: Exception | None = None
        self.asked = threading.Semaphore(0)
        self.hold: asyncio.Event | None = None
        self.on_post: Callable[[Event], None] = lambda event: None

    def post(self, event: Event) -> None:
        self.on_post(event)
        self.posted.put(event)

    async def ask(self, event: Any, timeout_s: float) -> Any:
        assert isinstance(event, WantSegments)
        assert 0 < timeout_s <= 10
        self.asked.release()
        if self.hold is not None:
            await self.hold.wait()
        if self.error is not None:
            raise self.error
        return SegmentsAllowed(tuple(segment for segment in event.segments if segment in self.allowed))


class Daemon:
    """A descriptor server on a loop in a thread of its own, over a real arena of three segments."""

    def __init__(
        self, run_dir: str, loop_factory: Callable[[], asyncio.AbstractEventLoop], **settings: Any
    ) -> None:
        self.config = StoreConfig(
            run_dir=run_dir, dram_bytes=4 * SIZE, segment_bytes=SIZE, staging_bytes=SIZE, **settings
        )
        self.core = FakeLoop()
        self.arena = Arena(
            protection=Protection(self.config.protection), boot_id=BOOT, huge_pages=False, prefault=False
        )
        for number in (1, 2, 3):
            self.arena.create(SegmentId(number), SIZE, SIZE // 4096)
            secret = SECRET % number
            self.arena.view(SegmentId(number), 0, len(secret))[:] = list(secret)
        self.staging = Staging(bytes_max=self.config.staging_bytes_max)
        self.regions = Regions()
        self.loop_factory = loop_factory
        self.server: DescriptorServer
        self.loop: asyncio.AbstractEventLoop
        self._up: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="loop")
        self.bound = False
        self.problems: list[dict[str, Any]] = []

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self.loop_factory) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(lambda _, context: self.problems.append(context))
        self._stop = asyncio.Event()
        self.server = DescriptorServer(
            self.config,
            self.core,
            arena=self.arena,
            staging=self.staging,
            regions=self.regions,
            boot_id=BOOT,
            grpc_target="unix:/somewhere",
        )
        try:
            await self.server.start()
        except BaseException as problem:
            self._up.put(problem)
            return
        self._up.put(None)
        await self._stop.wait()
        async with asyncio.timeout(WAIT_S):
            await self.server.close()

    def __enter__(self) -> "Daemon":
        self._thread.start()
        problem = self._up.get(timeout=WAIT_S)
        if problem is not None:
            self.__exit__()
            raise problem
        self.bound = True
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self.regions.close(WAIT_S)
        self.staging.close()
        self.arena.close()
        if self.bound:
            os.unlink(self.config.descriptor_socket)
            os.unlink(self.config.stream_socket)
            self.bound = False
        assert self.problems == []

    def call(self, work: Callable[[], T]) -> T:
        """`work` on the loop's thread."""

        async def run() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(WAIT_S)

    def until(self, fact: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not self.call(fact):
            assert time.monotonic() < deadline, "it never came true"
            time.sleep(0.002)

    def event(self) -> Event:
        return self.core.posted.get(timeout=WAIT_S)

    def quiet(self) -> bool:
        """Nothing was posted, also after a turn of the loop."""
        self.call(lambda: None)
        return self.core.posted.empty()


class Client:
    streams = False
    """Whether they use the socket for languages that have no SOCK_SEQPACKET."""

    def __init__(self, daemon: Daemon) -> None:
        self.sock = self.new_socket()
        self.sock.settimeout(WAIT_S)
        self.sock.connect(self.path(daemon))
        self._frames = memory.Frames()

    @classmethod
    def new_socket(cls) -> socket.socket:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM if cls.streams else socket.SOCK_SEQPACKET)

    @classmethod
    def path(cls, daemon: Daemon) -> str:
        return daemon.config.stream_socket if cls.streams else daemon.config.descriptor_socket

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        (memory.send_frame if self.streams else memory.send_packet)(self.sock, data, fds)

    def receive(self) -> tuple[bytes, list[int]]:
        if not self.streams:
            return memory.receive_packet(self.sock, fds_max=32)
        while True:
            packet = self._frames.receive(self.sock, fds_max=32)
            if packet is not None:
                return packet

    def ask(self, **body: Any) -> tuple[DescriptorReply, list[int]]:
        self.send(DescriptorRequest(**body).SerializeToString())
        return self.reply()

    def reply(self) -> tuple[DescriptorReply, list[int]]:
        data, fds = self.receive()
        assert data, "the daemon closed the connection"
        return DescriptorReply.FromString(data), fds

    def hello(self, **fields: Any) -> DescriptorReply:
        reply, fds = self.ask(hello=Hello(**{"protocol": 2, "client": "test", **fields}))
        assert fds == []
        return reply

    def segments(self, *numbers: int) -> tuple[DescriptorReply, list[int]]:
        return self.ask(segments=SegmentsRequest(segments=numbers))

    def closed_by_peer(self) -> bool:
        """After whatever was still to be read."""
        while True:
            try:
                data, fds = self.receive()
            except ConnectionResetError:
                return True
            for fd in fds:
                os.close(fd)
            if not data:
                return True

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(
    params=[(asyncio.new_event_loop, False), (uvloop.new_event_loop, False), (uvloop.new_event_loop, True)],
    ids=["asyncio", "uvloop", "stream"],
)
def loop_factory(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], asyncio.AbstractEventLoop]:
    """And by which of the two sockets the clients come."""
    factory, streams = request.param
    monkeypatch.setattr(Client, "streams", streams)
    factory().close()  # what a loop of this kind opens once for the whole process is open now
    return factory  # type: ignore[no-any-return]


@pytest.fixture
def run_dir() -> Iterator[str]:
    """One that other users may enter, unlike pytest's."""
    path = tempfile.mkdtemp(prefix="kvs-")
    os.chmod(path, 0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def start(
    run_dir: str, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> Iterator[Callable[..., Daemon]]:
    """Starts a daemon with these settings; when the test is over it must have kept nothing open."""
    with contextlib.ExitStack() as stack:
        gc.collect()  # what other tests in this process left is closed before it is counted
        before = open_fds()
        yield lambda **settings: stack.enter_context(Daemon(run_dir, loop_factory, **settings))
    assert open_fds() <= before


@pytest.fixture
def daemon(start: Callable[..., Daemon]) -> Daemon:
    return start()


WORKER = """
    import os, socket, sys
    from kvstore import memory
    from kvstore.v1.descriptor_pb2 import DescriptorReply, DescriptorRequest, Hello, SegmentsRequest, StagingRequest

    if len(sys.argv) > 2:
        os.setresgid(*[int(sys.argv[2])] * 3)
        os.setresuid(*[int(sys.argv[2])] * 3)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    def ask(**body):
        memory.send_packet(sock, DescriptorRequest(**body).SerializeToString())
        data, fds = memory.receive_packet(sock, fds_max=32)
        return DescriptorReply.FromString(data), fds
    def write(fd):
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        for each in (fd, again):
            for way in (
                lambda: memory.map_shared(each, 4096, writable=True),
                lambda: os.pwrite(each, b"x", 0),
                lambda: os.ftruncate(each, 0),
            ):
                try:
                    way()
                    return "written"
                except PermissionError:
                    pass
        return "refused"
    try:
        sock.connect(sys.argv[1])
        hello = ask(hello=Hello(protocol=2, client="worker"))[0]
        print(hello.hello.token.hex(), hello.hello.tenant, hello.error.code, hello.error.message, flush=True)
    except PermissionError as problem:
        print("no entry", flush=True)
    for line in sys.stdin:
        exec(line)
"""


class Worker:
    """A process that said hello and then does what it is told, line by line."""

    def __init__(self, daemon: Daemon, *uid: int) -> None:
        command = [sys.executable, "-P", "-c", textwrap.dedent(WORKER), daemon.config.descriptor_socket]
        self.process = subprocess.Popen(
            [*command, *map(str, uid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.pid = self.process.pid
        self.said = self.read()

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def do(self, line: str) -> str:
        """The one line that it prints."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.read()

    @property
    def token(self) -> bytes:
        return bytes.fromhex(self.said.split()[0])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


def joined(daemon: Daemon) -> WorkerJoined:
    event = daemon.event()
    assert isinstance(event, WorkerJoined)
    return event


def left(daemon: Daemon) -> WorkerId:
    """The next worker that left; its connection may be seen to end just before it."""
    event = daemon.event()
    if isinstance(event, WorkerClosed):
        closed, event = event, daemon.event()
        assert isinstance(event, WorkerLeft)
        assert event.worker == closed.worker
    assert isinstance(event, WorkerLeft)
    return event.worker


# --------------------------------------------------------------------------------------------------- identity, life


def test_hello_makes_a_worker(daemon: Daemon) -> None:
    with Client(daemon) as client:
        hello = client.hello(engine_group="engine", rank=3).hello
        assert (hello.protocol, hello.boot_id, hello.tenant, hello.protection) == (
            2,
            BOOT,
            "default",
            "sealed",
        )
        assert hello.grpc_target == "unix:/somewhere"
        assert len(hello.token) == 32
        event = joined(daemon)
        assert event == WorkerJoined(event.worker, "default", "engine", rank=3, admin=True)
        known = daemon.call(lambda: daemon.server.worker_of(hello.token))
        assert known == Identity(event.worker, "default", admin=True, pid=os.getpid(), uid=os.getuid())
        assert daemon.call(lambda: daemon.server.worker_of(bytes(32))) is None
        assert daemon.call(lambda: daemon.server.worker_of(b"")) is None


def test_every_hello_has_a_worker_and_token_of_its_own(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(daemon)) for _ in range(20)]
        assert len({client.hello().hello.token for client in clients}) == 20
        assert len({joined(daemon).worker for _ in range(20)}) == 20
    assert caplog.records == []  # no warning


def test_killed_worker_has_left(daemon: Daemon) -> None:
    with Worker(daemon) as worker:
        number = joined(daemon).worker
        known = daemon.call(lambda: daemon.server.worker_of(worker.token))
        assert known is not None
        assert (known.worker, known.pid) == (number, worker.pid)
        worker.kill()
        assert left(daemon) == number
        assert daemon.call(lambda: daemon.server.worker_of(worker.token)) is None


def test_death_is_the_pidfd_not_the_connection(daemon: Daemon) -> None:
    """A forked child keeps the worker's end of the connection open, and lives on."""
    with Worker(daemon) as worker:
        number = joined(daemon).worker
        child = int(
            worker.do(
                "r, w = os.pipe(); child = os.fork(); "
                "print(child, flush=True) if child else (sock.recv(1), os._exit(0))"
            )
        )
        valid = []
        daemon.core.on_post = lambda _: valid.append(daemon.server.worker_of(worker.token))
        worker.kill()
        os.kill(child, 0)
        assert daemon.event() == WorkerLeft(number)
        assert valid == [None]  # the token ended before the core was told
        assert daemon.call(lambda: daemon.server.worker_of(worker.token)) is None
        # the child is hung up on: it sees the end of the connection, and ends
        deadline = time.monotonic() + WAIT_S
        while Path(f"/proc/{child}/stat").exists() and ") Z" not in Path(f"/proc/{child}/stat").read_text():
            assert time.monotonic() < deadline, "the child still has a connection"
            time.sleep(0.002)
        assert daemon.quiet()


def test_stopped_worker_is_alive(daemon: Daemon) -> None:
    with Worker(daemon) as worker, Client(daemon) as other:
        number = joined(daemon).worker
        os.kill(worker.pid, signal.SIGSTOP)
        os.waitpid(worker.pid, os.WUNTRACED)
        other.hello()
        joined(daemon)
        assert daemon.quiet()
        assert daemon.call(lambda: daemon.server.worker_of(worker.token)) is not None
        os.kill(worker.pid, signal.SIGCONT)
        assert worker.do("print(len(ask(segments=SegmentsRequest(segments=[1]))[1]), flush=True)") == "2"
        os.kill(worker.pid, signal.SIGSTOP)
        os.waitpid(worker.pid, os.WUNTRACED)
        worker.kill()
        assert left(daemon) == number


def test_closing_ends_the_token_but_the_process_is_watched(daemon: Daemon) -> None:
    with Worker(daemon) as worker:
        number = joined(daemon).worker
        assert worker.do("sock.close(); print('closed', flush=True)") == "closed"
        assert daemon.event() == WorkerClosed(number)
        assert daemon.call(lambda: daemon.server.worker_of(worker.token)) is None
        worker.kill()
        assert daemon.event() == WorkerLeft(number)
        assert daemon.quiet()


def test_forgotten_worker_is_watched_no_longer(daemon: Daemon) -> None:
    before = open_fds()
    with Client(daemon) as client:
        client.hello()
        number = joined(daemon).worker
    assert daemon.event() == WorkerClosed(number)
    assert open_fds() == before + 1  # the pidfd
    for _ in range(2):
        daemon.call(lambda: daemon.server.forget(number))
        assert open_fds() == before
    daemon.call(lambda: daemon.server.forget(WorkerId(999)))
    assert daemon.quiet()


def test_forgetting_a_connected_worker_hangs_up(daemon: Daemon) -> None:
    with Client(daemon) as client:
        token = client.hello().hello.token
        number = joined(daemon).worker
        daemon.call(lambda: daemon.server.forget(number))
        assert client.closed_by_peer()
        assert daemon.call(lambda: daemon.server.worker_of(token)) is None
        assert daemon.quiet()


def test_death_before_hello_is_nobodys_business(daemon: Daemon) -> None:
    before = open_fds()
    script = (
        "import socket, sys; s = socket.socket(1, 5); s.connect(sys.argv[1]); print(1, flush=True); input()"
    )
    command = [sys.executable, "-P", "-c", script, daemon.config.descriptor_socket]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        daemon.until(lambda: len(daemon.server._peers) == 1)
        process.kill()
    daemon.until(lambda: not daemon.server._peers)
    assert open_fds() == before
    assert daemon.quiet()


def test_kernel_without_peer_pidfd(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "SO_PEERPIDFD", 9_999)
    with Worker(daemon) as worker:
        number = joined(daemon).worker
        worker.kill()
        assert left(daemon) == number


def test_death_while_the_core_thinks(daemon: Daemon) -> None:
    daemon.core.hold = asyncio.Event()
    with Worker(daemon) as worker:
        number = joined(daemon).worker
        assert worker.process.stdin is not None
        worker.process.stdin.write("ask(segments=SegmentsRequest(segments=[1]))\n")
        worker.process.stdin.flush()
        assert daemon.core.asked.acquire(timeout=WAIT_S)
        worker.kill()
        assert left(daemon) == number
        daemon.until(lambda: not daemon.server._peers)
        assert daemon.quiet()


# ------------------------------------------------------------------------------------------------------------ tenants


def socket_mode(daemon: Daemon) -> int:
    return stat.S_IMODE(os.stat(daemon.config.descriptor_socket).st_mode)


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@needs_root
def test_other_users_cannot_even_connect(start: Callable[..., Daemon]) -> None:
    daemon = start()
    assert socket_mode(daemon) == 0o600
    with Worker(daemon, NOBODY) as worker:
        assert worker.said == "no entry"
    assert daemon.quiet()


@needs_root
def test_user_without_a_tenant_is_refused(start: Callable[..., Daemon]) -> None:
    daemon = start(tenants={"1234": "bob"})
    assert socket_mode(daemon) == 0o666
    with Worker(daemon, NOBODY) as worker:
        assert (
            worker.said
            == f"default {Code.PERMISSION_DENIED.value} x".replace("default", "")
            .replace("x", "this user has no tenant here")
            .strip()
        )
        assert daemon.quiet()


@needs_root
def test_named_user_has_its_tenant_and_no_privileges(start: Callable[..., Daemon]) -> None:
    daemon = start(tenants={str(NOBODY): "alice"})
    with Worker(daemon, NOBODY) as worker:
        event = joined(daemon)
        assert event == WorkerJoined(event.worker, "alice", "", admin=False)
        known = daemon.call(lambda: daemon.server.worker_of(worker.token))
        assert known == Identity(event.worker, "alice", admin=False, pid=worker.pid, uid=NOBODY)
        # what it is handed it can read, but not write, also not by opening it anew
        daemon.core.allowed = {2}
        worker.do("fds = ask(segments=SegmentsRequest(segments=[1, 2]))[1]; print(len(fds), flush=True)")
        said = worker.do(f"print(bytes(memory.map_shared(fds[0], {SIZE}).array[:18]).decode(), flush=True)")
        assert said == "bytes of segment 2"
        assert worker.do("print(*map(write, fds), flush=True)") == "refused refused"
        number = event.worker
        worker.kill()
        assert left(daemon) == number


def test_own_user_can_be_named_and_stays_admin(start: Callable[..., Daemon]) -> None:
    daemon = start(tenants={str(os.getuid()): "ops"})
    assert socket_mode(daemon) == 0o600
    with Client(daemon) as client:
        assert client.hello().hello.tenant == "ops"
        event = joined(daemon)
        assert (event.tenant, event.admin) == ("ops", True)


# ----------------------------------------------------------------------------------------------------- shared memory


def test_segments_that_the_core_allows_are_handed_over(daemon: Daemon) -> None:
    with Client(daemon) as client:
        client.hello()
        daemon.core.allowed = {3, 1}
        reply, fds = client.segments(3, 2, 1, 3)
        assert list(reply.segments.segments) == [3, 1]
        assert list(reply.segments.bytes) == [SIZE, SIZE]
        assert list(reply.segments.cells) == [SIZE // 4096] * 2
        assert len(fds) == 4
        for index, number in enumerate((3, 1)):
            data = memory.map_shared(fds[2 * index], SIZE)
            assert bytes(data.array[: len(SECRET % 1)]).startswith(SECRET % number)
            header = memory.map_shared(fds[2 * index + 1], memory.header_bytes(SIZE // 4096))
            assert memory.read_header(header.array).boot_id == BOOT
        for fd in fds:
            os.close(fd)
        daemon.core.allowed = set()
        reply, fds = client.segments(1)
        assert (list(reply.segments.segments), fds) == ([], [])


def test_allowed_segment_that_has_gone_is_left_out(daemon: Daemon) -> None:
    daemon.core.allowed = {2, 77}
    with Client(daemon) as client:
        client.hello()
        reply, fds = client.segments(77, 2)
        assert list(reply.segments.segments) == [2]
        for fd in fds:
            os.close(fd)


def name_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}").removeprefix("/memfd:").removesuffix(" (deleted)")


def before_sending(monkeypatch: pytest.MonkeyPatch, body: str, work: Callable[[], None]) -> None:
    """Has `work` done by another thread between the making of such a reply and its sending."""
    name = "send_frame" if Client.streams else "send_packet"
    real = getattr(memory, name)

    def send(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
        if DescriptorReply.FromString(data).WhichOneof("body") == body:
            other = threading.Thread(target=work)
            other.start()
            other.join(WAIT_S)
        real(sock, data, fds)

    monkeypatch.setattr(descriptors, name, send)


@pytest.mark.parametrize("protection", ["sealed", "group"])
def test_a_segment_that_goes_before_it_is_sent_is_not_another_one(
    start: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch, protection: str
) -> None:
    """The thread that makes and unmakes segments runs meanwhile: the numbers of the descriptors mean another tenant's
    segment by then, which under `group` is writable."""
    daemon = start(protection=protection)

    def replace_them() -> None:
        for number in (1, 2):
            daemon.arena.destroy(SegmentId(number))
        for number in (4, 5):
            daemon.arena.create(SegmentId(number), SIZE, SIZE // 4096)

    before_sending(monkeypatch, "segments", replace_them)
    with Client(daemon) as client:
        client.hello()
        reply, fds = client.segments(1, 2, 3)
        names = [name_of(fd) for fd in fds]
        for fd in fds:
            os.close(fd)
        assert list(reply.segments.segments) == [1, 2, 3]
        assert names == [f"kvs-{part}-{number}" for number in (1, 2, 3) for part in ("data", "header")]


def test_staging_memory_that_goes_before_it_is_sent_is_nothing_else(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace_it() -> None:
        daemon.staging.drop(number)
        daemon.arena.create(SegmentId(4), SIZE, SIZE // 4096)

    before_sending(monkeypatch, "staging", replace_it)
    with Client(daemon) as client:
        client.hello()
        number = joined(daemon).worker
        _, fds = client.ask(staging=StagingRequest(bytes=4096))
        names = [name_of(fd) for fd in fds]
        for fd in fds:
            os.close(fd)
        assert names == [f"kvs-staging-{number}"]


def test_without_descriptors_left_a_segment_is_refused_and_the_connection_goes_on(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(fd: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with Client(daemon) as client:
        client.hello()
        with monkeypatch.context() as patch:
            patch.setattr(os, "dup", none_left)
            reply, fds = client.segments(1, 2)
            assert (reply.error.code, reply.error.field, fds) == (Code.UNAVAILABLE.value, "segments", [])
            assert "LimitNOFILE" in reply.error.remedy
            reply, fds = client.ask(staging=StagingRequest(bytes=4096))
            assert (reply.error.code, fds) == (Code.UNAVAILABLE.value, [])
        reply, fds = client.segments(1)
        assert len(fds) == 2
        for fd in fds:
            os.close(fd)


def test_who_is_in_gets_segments_also_when_others_have_used_up_the_descriptors(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many are spared as one reply takes, and spared again when it is sent."""
    real = os.dup

    def refusing(fd: int) -> int:
        if daemon.server._lendable:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(fd)

    with Client(daemon) as client:
        client.hello()
        spared = daemon.call(lambda: len(daemon.server._lendable))
        assert spared == 32
        monkeypatch.setattr(os, "dup", refusing)
        for _ in range(2):
            _, fds = client.segments(1, 2, 3)
            assert [name_of(fd) for fd in fds[::2]] == ["kvs-data-1", "kvs-data-2", "kvs-data-3"]
            for fd in fds:
                os.close(fd)
            daemon.until(lambda: len(daemon.server._lendable) == spared)


@pytest.mark.parametrize("count", [0, 17])
def test_number_of_segments_is_bounded(daemon: Daemon, count: int) -> None:
    with Client(daemon) as client:
        client.hello()
        reply, fds = client.segments(*range(count))
        assert (reply.error.code, reply.error.field) == (Code.INVALID_ARGUMENT.value, "segments")
        assert fds == []
        reply, fds = client.segments(*range(1, 17))
        assert len(fds) == 6
        for fd in fds:
            os.close(fd)


def test_refusal_of_the_core_is_passed_on(daemon: Daemon) -> None:
    daemon.core.error = Unavailable("going down", remedy="wait")
    with Client(daemon) as client:
        client.hello()
        error = client.segments(1)[0].error
        assert (error.code, error.message, error.remedy) == (Code.UNAVAILABLE.value, "going down", "wait")
        daemon.core.error = None
        _, fds = client.segments(1)
        for fd in fds:
            os.close(fd)


def test_staging_is_handed_over_once_and_clipped(daemon: Daemon) -> None:
    with Client(daemon) as client:
        client.hello()
        number = joined(daemon).worker
        reply, fds = client.ask(staging=StagingRequest(bytes=1 << 40))
        assert reply.staging.bytes == SIZE
        memory.map_shared(fds[0], SIZE, writable=True).array[9] = 99
        assert daemon.staging.view(number, 9, 1)[0] == 99
        for length in (0, 2 * SIZE):
            with pytest.raises(PermissionError):
                os.ftruncate(fds[0], length)
        os.close(fds[0])
        reply, fds = client.ask(staging=StagingRequest(bytes=1))
        assert (reply.error.code, fds) == (Code.INVALID_ARGUMENT.value, [])
        assert "already" in reply.error.message


def test_staging_by_default_and_when_it_is_used_up(start: Callable[..., Daemon]) -> None:
    daemon = start(staging_bytes_max=SIZE + 4096)
    with Client(daemon) as first, Client(daemon) as second, Client(daemon) as third:
        sizes = []
        for client in (first, second, third):
            client.hello()
            reply, fds = client.ask(staging=StagingRequest())
            sizes.append(reply.staging.bytes)
            for fd in fds:
                os.close(fd)
        assert sizes == [SIZE, 4096, 0]
        assert reply.error.code == Code.RESOURCE_EXHAUSTED.value


def test_no_staging_where_workers_write_in_place(start: Callable[..., Daemon]) -> None:
    daemon = start(protection="group")
    with Client(daemon) as client:
        assert client.hello().hello.protection == "group"
        error = client.ask(staging=StagingRequest(bytes=1))[0].error
        assert (error.code, error.field) == (Code.FAILED_PRECONDITION.value, "protection")
        _, fds = client.segments(1)
        memory.map_shared(fds[0], SIZE, writable=True).array[0] = 7
        assert daemon.arena.view(SegmentId(1), 0, 1)[0] == 7
        with pytest.raises(OSError, match="map"):
            memory.map_shared(fds[1], 4096, writable=True)
        for fd in fds:
            os.close(fd)


def test_staging_that_cannot_be_made_is_an_answer(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with Client(daemon) as client:
        client.hello()
        with monkeypatch.context() as patch:
            patch.setattr(memory, "create_memfd", failing)
            error = client.ask(staging=StagingRequest(bytes=1))[0].error
        assert (error.code, "Too many open files" in error.message) == (Code.UNAVAILABLE.value, True)
        reply, fds = client.ask(staging=StagingRequest(bytes=1))
        assert reply.staging.bytes == 4096
        os.close(fds[0])


# ------------------------------------------------------------------------------------------------------- bad packets

HELLO = DescriptorRequest(hello=Hello(protocol=2)).SerializeToString()
INVALID = Code.INVALID_ARGUMENT.value


@pytest.mark.parametrize("said_hello", [False, True])
@pytest.mark.parametrize(
    ("packet", "code"),
    [
        pytest.param(b"\xff\xff\xff", INVALID, id="garbage"),
        pytest.param(HELLO[:-1], INVALID, id="cut"),
        pytest.param(b"\x0a\x04\x12\x02\xff\xfe", INVALID, id="not UTF-8"),
        pytest.param(b"\x7a\x00", INVALID, id="unknown request"),
        pytest.param(b"\x0a\x00" * 30_000 + b"\xff", INVALID, id="long garbage"),
        pytest.param(b"", None, id="empty"),
        pytest.param(b"\x0a\x00" * 40_000, None, id="too long"),
    ],
)
def test_malformed_packet_ends_the_connection(
    daemon: Daemon, packet: bytes, code: int | None, said_hello: bool
) -> None:
    with Client(daemon) as client, Client(daemon) as other:
        if said_hello:
            client.hello()
        client.send(packet)
        if code is not None:
            reply, _ = client.reply()
            assert reply.error.code == code
        assert client.closed_by_peer()
        other.hello()
        kinds = [type(daemon.event()) for _ in range(3 if said_hello else 1)]
        assert kinds == ([WorkerJoined, WorkerClosed, WorkerJoined] if said_hello else [WorkerJoined])


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        ({"staging": StagingRequest(bytes=1)}, Code.FAILED_PRECONDITION, "hello"),
        ({"segments": SegmentsRequest(segments=[1])}, Code.FAILED_PRECONDITION, "hello"),
        ({"hello": Hello(protocol=1)}, Code.UNIMPLEMENTED, "hello.protocol"),
        ({"hello": Hello()}, Code.UNIMPLEMENTED, "hello.protocol"),
        ({"hello": Hello(protocol=2, client="x" * 257)}, Code.INVALID_ARGUMENT, "hello.client"),
        ({"hello": Hello(protocol=2, engine_group="é" * 129)}, Code.INVALID_ARGUMENT, "hello.engine_group"),
        ({"hello": Hello(protocol=2, rank=65_536)}, Code.INVALID_ARGUMENT, "hello.rank"),
    ],
)
def test_bad_hello_is_answered_and_ends_the_connection(
    daemon: Daemon, body: dict[str, Any], code: Code, field: str
) -> None:
    with Client(daemon) as client:
        reply, fds = client.ask(**body)
        assert (reply.error.code, reply.error.field, fds) == (code.value, field, [])
        assert client.closed_by_peer()
    assert daemon.quiet()


def test_second_hello_is_refused_and_changes_nothing(daemon: Daemon) -> None:
    with Client(daemon) as client:
        token = client.hello().hello.token
        assert client.hello().error.code == Code.FAILED_PRECONDITION.value
        joined(daemon)
        assert daemon.quiet()
        assert daemon.call(lambda: daemon.server.worker_of(token)) is not None


def test_too_many_descriptors_from_a_peer_end_its_connection(daemon: Daemon) -> None:
    with Client(daemon) as client:
        client.hello()
        before = open_fds()
        client.send(HELLO, [client.sock.fileno()] * 200)
        assert client.closed_by_peer()
        daemon.until(lambda: not daemon.server._peers and open_fds() == before - 1)  # and the connection


def test_descriptors_of_a_stranger_are_closed_by_a_thread(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    discarded: list[int] = []
    monkeypatch.setattr(daemon.regions, "discard", discarded.append)
    with Client(daemon) as client:
        client.send(HELLO, [client.sock.fileno()] * 3)
        assert client.closed_by_peer()
    daemon.until(lambda: not daemon.server._peers)
    # of a stream's packet something was not read, so the connection is closed by that thread, too
    assert len(discarded) == 3 + Client.streams
    for fd in discarded:
        os.close(fd)


def adopt(client: Client, fds: Sequence[int], size: int = SIZE) -> DescriptorReply:
    request = DescriptorRequest(adopt=AdoptRequest(bytes=size))
    client.send(request.SerializeToString(), fds)
    reply, none = client.reply()
    assert none == []
    return reply


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = os.memfd_create("test")
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


def test_a_region_is_adopted_and_dropped(daemon: Daemon, memfd: int) -> None:
    with Client(daemon) as client:
        client.hello()
        number = adopt(client, [memfd]).adopt.region
        assert number == 1
        assert daemon.regions.of(WorkerId(1), RegionId(number)).size_bytes == SIZE
        assert adopt(client, [memfd], SIZE + 1).error.field == "adopt.bytes"
        assert adopt(client, [memfd]).adopt.region == 2
        reply, _ = client.ask(drop_region=DropRegionRequest(region=number))
        assert reply.WhichOneof("body") == "drop_region"
        reply, _ = client.ask(drop_region=DropRegionRequest(region=number))
        assert reply.error.code == Code.NOT_FOUND.value
        assert daemon.regions.stats().regions == 1


def test_a_region_needs_one_descriptor(daemon: Daemon, memfd: int) -> None:
    with Client(daemon) as client:
        client.hello()
        reply = adopt(client, [])
        assert (reply.error.code, reply.error.field) == (Code.INVALID_ARGUMENT.value, "adopt")
        assert adopt(client, [memfd]).adopt.region, "and the connection lives on"
        request = DescriptorRequest(adopt=AdoptRequest(bytes=SIZE))
        before = open_fds()
        client.send(request.SerializeToString(), [memfd] * 2)
        assert client.closed_by_peer()
        daemon.until(lambda: open_fds() <= before - 2)  # its connection and its region; none is left behind


@pytest.mark.parametrize(
    "packet",
    [
        DescriptorRequest(staging=StagingRequest(bytes=4096)).SerializeToString(),
        DescriptorRequest(segments=SegmentsRequest(segments=[1])).SerializeToString(),
        DescriptorRequest(drop_region=DropRegionRequest(region=1)).SerializeToString(),
        b"",
        b"no message",
    ],
)
def test_a_descriptor_where_none_belongs_ends_the_connection_and_is_closed(
    daemon: Daemon, memfd: int, packet: bytes
) -> None:
    with Client(daemon) as client:
        client.hello()
        before = open_fds()
        client.send(packet, [memfd])
        assert client.closed_by_peer()
        daemon.until(lambda: not daemon.server._peers and open_fds() <= before - 1)  # but for the connection


def test_regions_end_with_the_connection(daemon: Daemon, memfd: int) -> None:
    before = open_fds()
    with Client(daemon) as client:
        client.hello()
        adopt(client, [memfd])
    daemon.until(lambda: daemon.regions.stats().regions == 0)
    daemon.until(lambda: open_fds() == before + 1)  # the pidfd, until the core forgets the worker


def test_no_descriptor_is_taken_in_while_too_many_wait_to_be_closed(
    daemon: Daemon, memfd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be another worker's, on a file system that hangs: whoever adopts keeps its connection."""
    with Client(daemon) as client:
        client.hello()
        with monkeypatch.context() as crowded:
            crowded.setattr(regions, "CLOSING_MAX", 0)
            before = open_fds()
            reply = adopt(client, [memfd])
            assert (
                reply.error.code == Code.UNAVAILABLE.value and "too many descriptors" in reply.error.message
            )
            assert open_fds() == before
            assert daemon.regions.stats().regions == 0
        assert adopt(client, [memfd]).adopt.region
        crowded.setattr(regions, "CLOSING_MAX", 0)
        client.send(DescriptorRequest(adopt=AdoptRequest(bytes=SIZE)).SerializeToString(), [0])
        assert client.closed_by_peer(), "what is no file in memory is not left to the kernel either"
        crowded.undo()


# ----------------------------------------------------------------------------------------------------- parts of packets

ADOPT = DescriptorRequest(adopt=AdoptRequest(bytes=SIZE)).SerializeToString()


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch, loop_factory: object) -> None:
    monkeypatch.setattr(Client, "streams", True)


def send_part(client: Client, part: bytes, fds: Sequence[int] = ()) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b"".join(fd.to_bytes(4, "little") for fd in fds))]
    assert client.sock.sendmsg([part], rights if fds else []) == len(part)


def is_asleep(daemon: Daemon, received: int) -> Callable[[], bool]:
    """The daemon has so many bytes of a packet whose rest is to come."""
    return lambda: [peer.frames and len(peer.frames._received) for peer in daemon.server._peers] == [received]


@pytest.mark.parametrize("with_byte", [0, 3, 4, -1], ids=["first", "prefix", "body", "last"])
def test_packets_of_a_stream_come_in_any_parts(
    daemon: Daemon, memfd: int, with_byte: int, streams: None
) -> None:
    """Their descriptors with any of them."""
    with Client(daemon) as client:
        client.hello()
        frame = framed(ADOPT)
        for at in range(len(frame)):
            daemon.until(is_asleep(daemon, at))
            send_part(client, frame[at : at + 1], [memfd] if at == with_byte % len(frame) else [])
        assert client.reply()[0].adopt.region == 1
        assert daemon.regions.of(WorkerId(1), RegionId(1)).size_bytes == SIZE


def test_two_packets_of_a_stream_in_one_write_are_two(daemon: Daemon, memfd: int, streams: None) -> None:
    with Client(daemon) as client:
        client.hello()
        staging = DescriptorRequest(staging=StagingRequest(bytes=4096)).SerializeToString()
        send_part(client, framed(staging) + framed(ADOPT)[:3])
        reply, fds = client.reply()
        assert reply.staging.bytes == 4096
        os.close(fds[0])
        send_part(client, framed(ADOPT)[3:] + framed(staging), [memfd])
        assert client.reply()[0].adopt.region == 1, "the descriptor is of the first packet that ends here"
        assert client.reply()[0].error.code, "staging memory is had once"


def test_a_stream_that_ends_in_the_middle_of_a_packet_leaves_no_descriptor(
    daemon: Daemon, memfd: int, streams: None
) -> None:
    with Client(daemon) as client:
        client.hello()
        before = open_fds()
        send_part(client, framed(ADOPT)[:5], [memfd])
        daemon.until(is_asleep(daemon, 5))
        daemon.until(lambda: open_fds() == before + 1)
        client.sock.shutdown(socket.SHUT_WR)
        assert client.closed_by_peer()
        daemon.until(lambda: not daemon.server._peers and open_fds() <= before - 1)


@pytest.mark.parametrize("parts", [(0, 5), (4, 5)])
def test_a_packet_of_a_stream_has_one_descriptor_at_most(
    daemon: Daemon, memfd: int, parts: tuple[int, int], streams: None
) -> None:
    with Client(daemon) as client:
        client.hello()
        before = open_fds()
        frame = framed(ADOPT)
        for at in range(len(frame)):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                send_part(client, frame[at : at + 1], [memfd] if at in parts else [])
        assert client.closed_by_peer()
        daemon.until(lambda: not daemon.server._peers and open_fds() <= before - 1)


@pytest.mark.parametrize("full_at", [0, 2])
def test_a_descriptor_in_the_middle_of_a_packet_is_not_taken_in_while_too_many_wait(
    daemon: Daemon, memfd: int, full_at: int, streams: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(daemon) as client:
        client.hello()
        before = open_fds()
        with monkeypatch.context() as crowded:
            frame = framed(ADOPT)
            for at in range(len(frame)):
                daemon.until(is_asleep(daemon, at))
                if at == full_at:
                    crowded.setattr(regions, "CLOSING_MAX", 0)
                send_part(client, frame[at : at + 1], [memfd] if at == 2 else [])
            assert "too many descriptors" in client.reply()[0].error.message
        assert open_fds() == before
        client.send(ADOPT, [memfd])
        assert client.reply()[0].adopt.region


@pytest.mark.parametrize("length", [memory.PACKET_BYTES_MAX + 1, 0xFFFF_FFFF])
def test_a_length_that_no_packet_has_ends_the_stream(daemon: Daemon, length: int, streams: None) -> None:
    with Client(daemon) as client:
        client.hello()
        send_part(client, length.to_bytes(4, "little"))
        assert client.closed_by_peer()


# ------------------------------------------------------------------------------------------------------------- bounds


def test_silent_connection_is_dropped(start: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "HELLO_S", 0.05)
    daemon = start()
    with Client(daemon) as silent:
        assert silent.closed_by_peer()
    assert daemon.quiet()


def test_hello_is_all_that_the_time_limit_is_for(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "HELLO_S", 0.5)
    with Client(daemon) as client, Client(daemon) as silent:
        client.hello()
        assert silent.closed_by_peer()  # so the time is over
        _, fds = client.segments(1)
        assert len(fds) == 2
        for fd in fds:
            os.close(fd)


def test_one_worker_too_many_is_told_so(daemon: Daemon) -> None:
    daemon.server._workers_max = 2
    with Client(daemon) as first, Client(daemon) as second:
        first.hello()
        second.hello()
        numbers = [joined(daemon).worker for _ in range(2)]
        with Client(daemon) as third:
            assert third.hello().error.code == Code.RESOURCE_EXHAUSTED.value
            assert third.closed_by_peer()
        # one that closed its connection counts until it is forgotten
        second.sock.close()
        assert daemon.event() == WorkerClosed(numbers[1])
        with Client(daemon) as fourth:
            assert fourth.hello().error.code == Code.RESOURCE_EXHAUSTED.value
        daemon.call(lambda: daemon.server.forget(numbers[1]))
        with Client(daemon) as fifth:
            assert fifth.hello().hello.token


def test_connections_without_hello_are_bounded(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "HELLOS_PER_USER_MAX", 3)
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(Client(daemon)) for _ in range(3)]
        daemon.until(lambda: len(daemon.server._peers) == 3)
        with Client(daemon) as refused:
            assert refused.closed_by_peer()
        waiting[0].hello()
        with Client(daemon) as client:
            assert client.hello().hello.token
        waiting[1].sock.close()
        daemon.until(lambda: daemon.server._before_hello[os.getuid()] == 1)


def test_a_thousand_connections_come_and_go(daemon: Daemon) -> None:
    before = open_fds()
    workers = 0
    for number in range(1000):
        client = Client(daemon)
        match number % 4:
            case 0:
                client.hello()
                workers += 1
            case 1:
                client.send(HELLO)  # and never read the answer
            case 2:
                client.send(b"garbage")
        client.sock.close()
    daemon.until(lambda: not daemon.server._peers)
    with Client(daemon) as client:
        assert client.hello().hello.token
    alive: set[WorkerId] = set()
    count = 0
    while not daemon.core.posted.empty():
        event = daemon.event()
        assert isinstance(event, WorkerJoined | WorkerClosed)
        if isinstance(event, WorkerJoined):
            count += 1
            alive.add(event.worker)
        else:
            alive.remove(event.worker)
            daemon.call(lambda worker=event.worker: daemon.server.forget(worker))
    assert workers <= count <= 2 * workers + 1
    daemon.until(lambda: not daemon.server._peers)
    for worker in alive:
        daemon.call(lambda worker=worker: daemon.server.forget(worker))
    assert open_fds() == before
    assert daemon.call(lambda: +daemon.server._before_hello) == {}


def test_peer_that_never_reads_is_dropped_and_holds_nobody_up(daemon: Daemon) -> None:
    with Client(daemon) as hog, Client(daemon) as client:
        hog.hello()
        client.hello()
        request = DescriptorRequest(segments=SegmentsRequest(segments=[1, 2, 3])).SerializeToString()

        def ask_for_ever() -> None:
            while True:
                hog.send(request)

        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            ask_for_ever()
        _, fds = client.segments(1)
        assert len(fds) == 2
        for fd in fds:
            os.close(fd)


def test_out_of_descriptors_says_so_and_goes_on(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(Client(daemon))
        served.hello()
        waiting = [Client.new_socket() for _ in range(5)]
        for sock in waiting:
            stack.enter_context(sock)
        # the lowest number that is free is the next that is given: from now on there is none
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            for sock in waiting:
                sock.connect(Client.path(daemon))
                sock.settimeout(WAIT_S)
                refusal = DescriptorReply.FromString(sock.recv(4096)[4 * Client.streams :]).error
                assert refusal.code == Code.RESOURCE_EXHAUSTED.value
                assert "the daemon has no descriptors left" in refusal.message
                assert sock.recv(4096) == b""
            for _ in range(20):  # those who are in are served
                assert served.hello().error.code == Code.FAILED_PRECONDITION.value
            messages = [record.message for record in caplog.records]
            assert messages == ["a connection was refused: no descriptors are left"] * 5
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with Client(daemon) as later:
            assert later.hello().hello.token


def test_accepting_is_resumed_by_itself(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "ACCEPT_PAUSE_S", 0.01)
    # each twice: the second time it is asked for the one connection that is to be turned away
    refusals = iter([errno.EMFILE, errno.EMFILE, errno.ENFILE, errno.ENFILE, errno.ENOMEM, errno.ENOMEM])

    real = socket.socket.accept

    def accept(listener: socket.socket) -> Any:
        for code in refusals:
            raise OSError(code, os.strerror(code))
        return real(listener)

    monkeypatch.setattr(socket.socket, "accept", accept)
    with Client(daemon) as client:
        assert client.hello().hello.token
    assert next(refusals, None) is None


def test_a_socket_that_was_removed_is_made_again(daemon: Daemon) -> None:
    """Who is connected stays, and the other socket is none the worse."""
    path = Client.path(daemon)
    with Client(daemon) as before:
        before.hello()
        os.unlink(path)
        daemon.call(lambda: daemon.server.listen_again(path))
        with Client(daemon) as client:
            assert client.hello().hello.token
        assert before.hello().error.code == Code.FAILED_PRECONDITION.value, "it has said so already"
    Client.streams = not Client.streams
    with Client(daemon) as client:
        assert client.hello().hello.token


def test_second_server_on_the_same_path_is_refused(daemon: Daemon) -> None:
    rival = Daemon(daemon.config.run_dir, daemon.loop_factory)
    with pytest.raises(ConfigError, match="cannot be bound: Address already in use"):
        rival.__enter__()
    with Client(daemon) as client:
        assert client.hello().hello.token


def test_close_hangs_up_on_everybody_without_a_word_to_the_core(start: Callable[..., Daemon]) -> None:
    before = open_fds()
    daemon = start()
    with Client(daemon) as client, Client(daemon) as silent, Client(daemon) as thinking:
        client.hello()
        thinking.hello()
        daemon.core.hold = asyncio.Event()
        thinking.send(DescriptorRequest(segments=SegmentsRequest(segments=[1])).SerializeToString())
        assert daemon.core.asked.acquire(timeout=WAIT_S)
        daemon.until(lambda: len(daemon.server._peers) == 3)
        for _ in range(2):
            joined(daemon)
        daemon.__exit__()
        assert all(each.closed_by_peer() for each in (client, silent, thinking))
    assert daemon.core.posted.empty()
    assert open_fds() == before
