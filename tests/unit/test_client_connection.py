"""The client against a scripted daemon: answers that are late, lost, refused or wrong, pushes, restarts."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import queue
import resource
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvstore import errors, memory, wire
from kvstore.client import (
    Client,
    Namespace,
    WriteBatch,
    attachment,
    binding,
    connect,
    connect_async,
    connection,
)
from kvstore.client import lease as lease_module
from kvstore.client.call import Call
from kvstore.client.lane import Lane
from kvstore.client.stream import GrpcStream
from kvstore.core import events
from kvstore.keys import exact_chain
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.types import (
    ChunkKey,
    CommitResult,
    Extent,
    GrantResult,
    LeaseId,
    NamespaceId,
    Outcome,
    Reason,
    ReservationId,
    SegmentId,
)
from kvstore.v1 import descriptor_pb2, store_pb2

from ..waiting import eventually

BOUND_S = 20.0
SHARD = 8192
SEGMENT_BYTES = 1 << 20
CELLS = SEGMENT_BYTES // 4096
SPEC = NamespaceSpec("tiny", b"w", "bytes", 64, (GroupSpec("full", SHARD),))
SALT = b"s" * 32
KEYS = exact_chain(SALT, np.arange(64 * 4), 64)

Script = Callable[[Any], events.Answer | None]


class FakeDaemon:
    """Speaks both sockets. What it answers is a script: by the name of a request, a function of its body whose result
    is sent; None withholds the answer until `answer` sends one."""

    def __init__(self, run_dir: Path, *, fast_lane: bool = False) -> None:
        self.run_dir = run_dir
        self.fast_lane = fast_lane
        self.lane_error: errors.StoreError | None = None
        self.script: dict[str, Script] = {}
        self.hello: dict[str, Any] = {}
        """Over the fields of a HelloReply."""
        self.hello_error: errors.StoreError | None = None
        self.welcomes = True
        self.received: list[tuple[str, Any]] = []
        """Every request of every stream, and every packet: (name, body)."""
        self.segments: dict[int, tuple[int, int]] = {}
        self.refused_segments: set[int] = set()
        self.staging_bytes: int | None = None
        self.hold_packets = threading.Event()
        """While set, packets after the hello are not answered."""
        self.streams = 0
        self.hellos = 0
        self.changed = threading.Condition()
        self._next_id = 100
        self._keep: list[Any] = []
        self.start()

    # ------------------------------------------------------------------------------------------- life

    def start(self) -> None:
        self.boot_id = os.urandom(16)
        self._replies: queue.SimpleQueue[store_pb2.AttachReply | None] = queue.SimpleQueue()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self.run_dir / "kvstored.sock"))
        self._listener.listen()
        self._sockets: list[socket.socket] = []
        self._pool = ThreadPoolExecutor(8)
        self._server = grpc.server(self._pool, options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((self._handlers(),))
        self._server.add_insecure_port(f"unix:{self.run_dir}/grpc.sock")
        self._server.start()
        self._threads = [threading.Thread(target=self._accept, args=(self._listener,), daemon=True)]
        self._threads[0].start()

    def die(self) -> None:
        """As a process that is killed: both sockets go."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._replies.put(None)
        self._server.stop(0).wait(BOUND_S)
        self._pool.shutdown()
        for thread in self._threads:
            thread.join(BOUND_S)
            assert not thread.is_alive()
        for name in ("kvstored.sock", "grpc.sock"):
            (self.run_dir / name).unlink(missing_ok=True)

    def close(self) -> None:
        self.die()
        for fds in self.segments.values():
            for fd in fds:
                os.close(fd)

    # ------------------------------------------------------------------------------------------- the descriptor socket

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            self._sockets.append(sock)
            thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            while True:
                try:
                    data, _ = memory.receive_packet(sock)
                except OSError:
                    return
                if not data:
                    return
                request = descriptor_pb2.DescriptorRequest.FromString(data)
                name = str(request.WhichOneof("body"))
                self._note(name, getattr(request, name))
                reply, fds = self._reply(name, request)
                while self.hold_packets.is_set():
                    time.sleep(0.002)
                with contextlib.suppress(OSError):
                    memory.send_packet(sock, reply.SerializeToString(), fds)
                if name == "lane":
                    for fd in fds:
                        os.close(fd)

    def _reply(self, name: str, request: Any) -> tuple[descriptor_pb2.DescriptorReply, list[int]]:
        if name == "hello":
            self.hellos += 1
            if self.hello_error is not None:
                return descriptor_pb2.DescriptorReply(error=wire.error_to_proto(self.hello_error)), []
            fields = {
                "protocol": 2,
                "boot_id": self.boot_id,
                "token": b"t" * 32,
                "tenant": "alice",
                "protection": "sealed",
                "grpc_target": f"unix:{self.run_dir}/grpc.sock",
                "fast_lane": self.fast_lane,
                **self.hello,
            }
            return descriptor_pb2.DescriptorReply(hello=descriptor_pb2.HelloReply(**fields)), []
        if name == "lane":
            if self.lane_error is not None:
                return descriptor_pb2.DescriptorReply(error=wire.error_to_proto(self.lane_error)), []
            return descriptor_pb2.DescriptorReply(lane=descriptor_pb2.LaneReply()), [self._new_lane()]
        if name == "staging":
            granted = request.staging.bytes if self.staging_bytes is None else self.staging_bytes
            if not granted:
                error = errors.Exhausted("no staging memory is left")
                return descriptor_pb2.DescriptorReply(error=wire.error_to_proto(error)), []
            fd = memory.create_memfd("test-staging", granted)
            self.staging = memory.map_shared(fd, granted)
            self._keep.append(fd)
            reply = descriptor_pb2.StagingReply(bytes=granted)
            return descriptor_pb2.DescriptorReply(staging=reply), [fd]
        allowed = [
            n for n in request.segments.segments if n in self.segments and n not in self.refused_segments
        ]
        body = descriptor_pb2.SegmentsReply(
            segments=allowed, bytes=[SEGMENT_BYTES] * len(allowed), cells=[CELLS] * len(allowed)
        )
        fds = [fd for number in allowed for fd in self.segments[number]]
        return descriptor_pb2.DescriptorReply(segments=body), fds

    def add_segment(self, number: int) -> None:
        """Byte b of the segment is (number + b // SHARD) % 256; every generation is 5."""
        data_fd = memory.create_memfd("test-data", SEGMENT_BYTES)
        data = memory.map_shared(data_fd, SEGMENT_BYTES, writable=True)
        data.array[:] = (number + np.arange(SEGMENT_BYTES) // SHARD) % 256
        header_fd = memory.create_memfd("test-header", memory.header_bytes(CELLS))
        header = memory.map_shared(header_fd, memory.header_bytes(CELLS), writable=True)
        memory.write_header(header.array, memory.SegmentHeader(CELLS, SEGMENT_BYTES, self.boot_id))
        self.generations = memory.generations(header.array, CELLS)
        self.generations[:] = 5
        self._keep += [data, header]
        self.segments[number] = (data_fd, header_fd)

    # ------------------------------------------------------------------------------------------------- the stream

    def _handlers(self) -> grpc.GenericRpcHandler:
        daemon = self

        class Handlers(grpc.GenericRpcHandler):
            def service(self, handler_call_details: Any) -> Any:
                assert handler_call_details.method == "/kvstore.v1.Store/Attach"
                return grpc.stream_stream_rpc_method_handler(
                    daemon._attach,
                    request_deserializer=store_pb2.AttachRequest.FromString,
                    response_serializer=store_pb2.AttachReply.SerializeToString,
                )

        return Handlers()

    def _attach(self, requests: Any, context: Any) -> Iterator[store_pb2.AttachReply]:
        hello = next(requests).hello
        if hello.boot_id != self.boot_id:
            error = errors.Precondition("the daemon restarted", field="boot_id")
            context.set_trailing_metadata(wire.error_metadata(error))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "boot")
        replies = self._replies = queue.SimpleQueue()
        self.streams += 1

        def read() -> None:
            with contextlib.suppress(grpc.RpcError):
                for request in requests:
                    self._handle(request, replies)
            replies.put(None)

        reader = threading.Thread(target=read, daemon=True)
        self._threads.append(reader)
        reader.start()
        if self.welcomes:
            welcome = store_pb2.AttachWelcome(lease_ttl_ms=10_000, reservation_ttl_ms=30_000)
            yield store_pb2.AttachReply(welcome=welcome)
        yield from iter(replies.get, None)

    def _new_lane(self) -> int:
        """The client's end. Both threads end with the lane."""
        ours, theirs = socket.socketpair()
        replies = self._replies = queue.SimpleQueue()
        self.streams += 1
        if self.welcomes:
            welcome = store_pb2.AttachWelcome(lease_ttl_ms=10_000, reservation_ttl_ms=30_000)
            replies.put(store_pb2.AttachReply(welcome=welcome))

        def read() -> None:
            with contextlib.suppress(OSError), ours.makefile("rb") as source:
                while prefix := source.read(wire.LANE_PREFIX_BYTES):
                    data = source.read(int.from_bytes(prefix, "little"))
                    self._handle(store_pb2.AttachRequest.FromString(data), replies)
            replies.put(None)

        def write() -> None:
            with contextlib.suppress(OSError):
                for reply in iter(replies.get, None):
                    ours.sendall(wire.lane_frame(reply.SerializeToString()))
            with contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)
            reader.join(BOUND_S)
            ours.close()

        reader = threading.Thread(target=read, daemon=True)
        writer = threading.Thread(target=write, daemon=True)
        self._threads += [reader, writer]
        reader.start()
        writer.start()
        return theirs.detach()

    def _handle(self, request: store_pb2.AttachRequest, replies: Any) -> None:
        name = str(request.WhichOneof("body"))
        body = getattr(request, name)
        if request.release_lease_ids:
            self._note("release", store_pb2.ReleaseRequest(lease_ids=request.release_lease_ids))
        script = self.script.get(name, getattr(self, f"_default_{name}", lambda _: events.Done()))
        answer = script(body)
        if answer is not None:
            replies.put(wire.attach_reply(body.request_id, answer))
        self._note(name, body)

    def _note(self, name: str, body: Any) -> None:
        with self.changed:
            self.received.append((name, body))
            self.changed.notify_all()

    def _default_open(self, body: Any) -> events.Answer:
        self._next_id += 1
        return events.Opened(NamespaceId(self._next_id), SALT, 0, SEGMENT_BYTES)

    def _default_match(self, body: Any) -> events.Answer:
        return events.Matched(
            len(body.keys), (Outcome.HIT,) * len(body.keys), (Reason.NONE,) * len(body.keys)
        )

    def _default_renew(self, body: Any) -> events.Answer:
        return events.Renewed((body.ttl_ms,) * len(body.lease_ids))

    def _default_commit(self, body: Any) -> events.Answer:
        return events.Committed((CommitResult.VISIBLE,) * len(body.staging_offsets))

    def answer(self, request_id: int, answer: events.Answer) -> None:
        self._replies.put(wire.attach_reply(request_id, answer))

    def push(self, **body: Any) -> None:
        self._replies.put(store_pb2.AttachReply(**body))

    def break_stream(self) -> None:
        self._replies.put(None)

    def requests(self, name: str) -> list[Any]:
        with self.changed:
            return [body for found, body in self.received if found == name]

    def wait_for(self, name: str, count: int = 1) -> Any:
        """The count-th request of this name."""
        with self.changed:
            there = self.changed.wait_for(
                lambda: sum(found == name for found, _ in self.received) >= count, BOUND_S
            )
            assert there, f"no {name} number {count} in {[found for found, _ in self.received]}"
        return self.requests(name)[count - 1]


@pytest.fixture(params=[False, True], ids=["grpc", "lane"])
def daemon(request: pytest.FixtureRequest) -> Iterator[FakeDaemon]:
    folder = tempfile.mkdtemp(prefix="kvs-")
    fake = FakeDaemon(Path(folder), fast_lane=request.param)
    yield fake
    fake.close()
    shutil.rmtree(folder)


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[Client]:
    with connect(str(daemon.run_dir), timeout_s=BOUND_S, staging_bytes=16 * SHARD) as client:
        yield client


@pytest.fixture
def space(client: Client) -> Namespace:
    return client.open(SPEC)


def attached(client: Client) -> attachment.Attachment:
    found = client._connection.attachment
    assert found is not None
    return found


def extent(segment: int, slot: int, **changed: Any) -> Extent:
    return replace(Extent(SegmentId(segment), slot * SHARD, SHARD, slot, 5, 0), **changed)


def hit(lease: int, *extents: Extent) -> events.Acquired:
    """Every extent is one key's."""
    count = len(extents)
    return events.Acquired(LeaseId(lease), 10_000, (Outcome.HIT,) * count, (Reason.NONE,) * count, extents)


def granted(reservation: int, count: int) -> events.Reserved:
    extents = tuple(Extent(SegmentId(0), 0, SHARD, 0, 0) for _ in range(count))
    return events.Reserved(ReservationId(reservation), 30_000, (GrantResult.GRANTED,) * count, extents)


def written(batch: WriteBatch) -> WriteBatch:
    """It, with something in all that was granted: so that it can be committed."""
    for index in batch.granted:
        for shard in batch.shards:
            batch.buffer(index, shard)[:] = index + 1
    return batch


def loads(lease: Any, index: int) -> int | None:
    """The byte that the whole shard consists of; None when the load failed."""
    out = np.zeros(SHARD, np.uint8)
    if not lease.copy_to(index, out):
        return None
    assert (out == out[0]).all()
    return int(out[0])


# -------------------------------------------------------------------------------------------------- interruptions


@pytest.mark.parametrize("where", ["settle", "on_reply", "then"])
def test_an_answer_in_whose_middle_somebody_interrupts_is_not_lost(
    client: Client, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Ctrl-C reaches the thread that happens to read for all."""
    done: list[str] = []
    interruptions = [KeyboardInterrupt()]

    def at(place: str) -> None:
        if place == where and interruptions:
            raise interruptions.pop()
        done.append(place)

    settle = Call.settle

    def settled(call: Call, answer: Any) -> None:
        at("settle")
        settle(call, answer)

    monkeypatch.setattr(Call, "settle", settled)
    connection = attached(client)
    call = Call(
        connection, "done", time.monotonic() + BOUND_S, must_end=True, on_reply=lambda _: at("on_reply")
    )
    call.when_done(lambda _: at("then"))
    connection._calls[1 << 40] = call
    with pytest.raises(KeyboardInterrupt):
        connection.receive(store_pb2.AttachReply(request_id=1 << 40, done=store_pb2.DoneReply()))
    eventually(lambda: "on_reply" in done)
    call.wait()
    assert isinstance(call.answer, store_pb2.AttachReply)
    assert not client._connection.counters["bugs"]


class InterruptedLock:
    """Is taken, and then Ctrl-C comes."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock
        self.interruptions = [KeyboardInterrupt()]

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        found: bool = self.lock.acquire(blocking, timeout)
        if self.interruptions:
            raise self.interruptions.pop()
        return found

    def release(self) -> None:
        self.lock.release()


@pytest.mark.parametrize("which", ["_socket_lock", "_making_staging"])
def test_an_interrupt_leaves_no_lock_taken(client: Client, which: str) -> None:
    connection = attached(client)
    lock = getattr(connection, which)
    setattr(connection, which, InterruptedLock(lock))
    with pytest.raises(KeyboardInterrupt):
        connection.make_staging(SHARD, time.monotonic() + BOUND_S)
    setattr(connection, which, lock)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lock.acquire, False).result(BOUND_S), "nobody has it"
        other.submit(lock.release).result(BOUND_S)


@pytest.mark.parametrize("where", ["send_packet", "receive_packet"])
def test_an_interrupt_amid_packets_begins_anew(
    daemon: FakeDaemon, client: Client, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A packet may be lost, and with it which reply belongs to which request."""
    connection = attached(client)
    function, interruptions = getattr(memory, where), [KeyboardInterrupt()]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        if interruptions and threading.current_thread() is threading.main_thread():
            raise interruptions.pop()
        return found

    monkeypatch.setattr(memory, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        connection.make_staging(SHARD, time.monotonic() + BOUND_S)
    eventually(lambda: daemon.hellos == 2 and client.connected)


# ----------------------------------------------------------------------------------------------------- connecting


@pytest.mark.parametrize(
    "refusal",
    [errors.Denied("not you"), errors.Exhausted("too many workers")],
    ids=lambda e: type(e).__name__,
)
def test_a_refusal_is_raised_at_once(daemon: FakeDaemon, refusal: errors.StoreError) -> None:
    daemon.hello_error = refusal
    with pytest.raises(type(refusal)) as caught:
        connect(str(daemon.run_dir), timeout_s=BOUND_S)
    assert str(caught.value) == str(refusal)
    assert daemon.hellos == 1


@pytest.mark.parametrize("hello_comes_first", [False, True])
def test_the_last_word_of_a_daemon_that_hangs_up_is_heard(tmp_path: Path, hello_comes_first: bool) -> None:
    """It says why and closes at once, before or after our hello: the kernel reports a broken pipe, or a reset."""
    refusal = errors.Exhausted("no descriptors left")
    packet = descriptor_pb2.DescriptorReply(error=wire.error_to_proto(refusal)).SerializeToString()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "kvstored.sock"))
        listener.listen()

        def hang_up() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.send(packet)
                if hello_comes_first:
                    sock.recv(1, socket.MSG_PEEK)  # it stays unread, so closing is a reset

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        with pytest.raises(errors.Exhausted, match="no descriptors left"):
            connect(str(tmp_path), timeout_s=BOUND_S)
        thread.join(BOUND_S)


@pytest.mark.parametrize("there", ["nothing", "a directory", "a dead socket", "a file"])
def test_where_nobody_listens_it_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    """However long the caller would wait for a daemon that is there and slow."""
    waited: list[float] = []
    real = threading.Condition.wait

    def wait(condition: threading.Condition, timeout: float | None = None) -> bool:
        if timeout is not None and timeout > 0 and threading.current_thread() is threading.main_thread():
            waited.append(timeout)
        return real(condition, timeout)

    run_dir = tmp_path / "run"
    if there != "nothing":
        run_dir.mkdir()
    if there == "a dead socket":
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
            dead.bind(str(run_dir / "kvstored.sock"))
            dead.listen()
    if there == "a file":
        (run_dir / "kvstored.sock").write_text("no socket")
    monkeypatch.setattr(threading.Condition, "wait", wait)
    what_to_do = "that was there has ended" if there == "a dead socket" else "start kvstored"
    with pytest.raises(errors.Unavailable, match=f"no daemon answers there.*{what_to_do}") as refused:
        connect(str(run_dir), timeout_s=BOUND_S)
    assert refused.value.field == "run_dir" and refused.value.value == str(run_dir)
    assert waited and max(waited[1:], default=0.0) <= connection.NOBODY_S, (
        "the first wait is for the first try"
    )


def test_who_may_not_reach_the_socket_is_told_of_tenants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forbidden(socket.socket):
        def connect(self, address: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket, "socket", Forbidden)
    with pytest.raises(errors.Unavailable, match=r"Permission denied \(.*name your user under `tenants`"):
        attachment._connect(str(tmp_path / "kvstored.sock"), time.monotonic() + BOUND_S)


def test_a_daemon_that_is_just_being_started_is_found(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "NOBODY_S", BOUND_S)
    daemon.die()
    tried = threading.Event()
    real = attachment._connect

    def connecting(path: str, deadline: float) -> socket.socket:
        try:
            return real(path, deadline)
        finally:
            tried.set()

    monkeypatch.setattr(attachment, "_connect", connecting)

    def later() -> None:
        assert tried.wait(BOUND_S)
        daemon.start()

    thread = threading.Thread(target=later)
    thread.start()
    with connect(str(daemon.run_dir), timeout_s=BOUND_S) as client:
        assert client.connected
    thread.join(BOUND_S)


def test_a_relative_directory_means_where_it_was(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process changes its working directory, and then the daemon is started anew."""
    monkeypatch.chdir(daemon.run_dir.parent)
    with connect(daemon.run_dir.name, timeout_s=BOUND_S) as client:
        monkeypatch.chdir("/")
        daemon.die()
        daemon.start()
        eventually(lambda: daemon.hellos == 2 and client.connected)


@pytest.mark.parametrize(
    "fields", [{"protocol": 1}, {"protocol": 3}, {"protection": "none"}], ids=lambda f: next(iter(f))
)
def test_another_protocol_is_refused(daemon: FakeDaemon, fields: dict[str, Any]) -> None:
    daemon.hello = fields
    with pytest.raises(errors.Unsupported, match="install the same version"):
        connect(str(daemon.run_dir), timeout_s=BOUND_S)


@pytest.mark.parametrize("daemon", [True], indirect=True)
def test_a_lane_that_is_refused_is_not_asked_for_again_until_the_next_hello(daemon: FakeDaemon) -> None:
    daemon.lane_error = errors.Exhausted("no socket can be made")
    with connect(str(daemon.run_dir), timeout_s=BOUND_S) as client:
        assert isinstance(attached(client)._carrier, GrpcStream)
        daemon.lane_error = None
        daemon.break_stream()
        eventually(lambda: daemon.streams == 2 and client.connected)
        assert isinstance(attached(client)._carrier, GrpcStream)
        daemon.die()
        daemon.start()
        eventually(lambda: daemon.hellos == 2 and client.connected)
        assert isinstance(attached(client)._carrier, Lane)


def test_no_welcome_is_no_connection(daemon: FakeDaemon) -> None:
    daemon.welcomes = False
    with pytest.raises(errors.Unavailable):
        connect(str(daemon.run_dir), timeout_s=2.0)
    assert daemon.streams == 1


def test_a_stream_that_is_not_welcomed_is_given_up(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachment, "WELCOME_S", 0.1)
    daemon.welcomes = False

    def later() -> None:
        eventually(lambda: daemon.streams == 2)
        daemon.welcomes = True

    thread = threading.Thread(target=later)
    thread.start()
    with connect(str(daemon.run_dir), timeout_s=BOUND_S) as client:
        assert client.connected
    thread.join(BOUND_S)
    assert daemon.hellos == 1, "the same hello serves"


@pytest.mark.parametrize(
    "wrong", [{"timeout_s": 0}, {"staging_bytes": 0}, {"rank": -1}], ids=lambda w: next(iter(w))
)
def test_settings_that_cannot_work(daemon: FakeDaemon, wrong: dict[str, int]) -> None:
    with pytest.raises(errors.BadRequest) as caught:
        connect(str(daemon.run_dir), **wrong)  # type: ignore[arg-type]
    assert caught.value.field == next(iter(wrong))


# ----------------------------------------------------------------------------------------------------- late answers


def test_a_late_lease_is_released_when_it_comes(daemon: FakeDaemon, client: Client, space: Namespace) -> None:
    daemon.add_segment(1)
    daemon.script["acquire"] = lambda _: None
    assert space.read(KEYS[:1], timeout_s=0.01).reasons == (Reason.UNAVAILABLE,)
    request = daemon.wait_for("acquire")
    assert not daemon.requests("release")
    daemon.answer(request.request_id, hit(77, extent(1, 0)))
    assert list(daemon.wait_for("release").lease_ids) == [77]
    assert client.counters["late_answers"] == client.counters["requests_late"] == 1


def test_a_late_grant_is_aborted_when_it_comes(daemon: FakeDaemon, client: Client, space: Namespace) -> None:
    daemon.script["reserve"] = lambda _: None
    assert space.write(KEYS[:2], timeout_s=0.01).results == (GrantResult.UNAVAILABLE,) * 2
    staging = attached(client).staging
    assert staging is not None
    assert staging.space.free_bytes == 16 * SHARD, "nothing was committed, so nothing is read"
    daemon.answer(daemon.wait_for("reserve").request_id, granted(88, 2))
    assert list(daemon.wait_for("abort").reservation_ids) == [88]


def test_a_late_commit_keeps_its_staging_memory_until_it_has_ended(
    daemon: FakeDaemon, client: Client, space: Namespace
) -> None:
    daemon.script["reserve"] = lambda body: granted(88, len(body.keys))
    daemon.script["commit"] = lambda _: None
    batch = space.write(KEYS[:2])
    batch.buffer(0)[:] = 1
    batch.buffer(1)[:] = 2
    outcome = batch.commit(timeout_s=0.01)
    assert isinstance(outcome.error, errors.DeadlineExceeded)
    staging = attached(client).staging
    assert staging is not None
    batch.abort()
    del batch
    assert staging.space.free_bytes == 14 * SHARD
    request = daemon.wait_for("commit")
    assert [int(daemon.staging.array[offset]) for offset in request.staging_offsets] == [1, 2]
    daemon.answer(request.request_id, events.Committed((CommitResult.VISIBLE,) * 2))
    eventually(lambda: staging.space.free_bytes == 16 * SHARD)
    assert not daemon.requests("abort")


def test_a_commit_that_could_not_be_sent_gives_everything_back(
    daemon: FakeDaemon, client: Client, space: Namespace
) -> None:
    daemon.script["reserve"] = lambda body: granted(88, len(body.keys))
    batch = written(space.write(KEYS[:2]))
    staging = attached(client).staging
    assert staging is not None
    daemon.welcomes = False
    daemon.break_stream()
    eventually(lambda: not client.connected)
    assert not batch.commit().ok
    assert staging.space.free_bytes == 16 * SHARD, "the daemon does not know where the bytes are"
    daemon.welcomes = True
    attached(client).cancel_stream()
    assert list(daemon.wait_for("abort").reservation_ids) == [88]
    assert not daemon.requests("commit")


async def test_a_read_that_is_cancelled_while_segments_are_fetched(daemon: FakeDaemon) -> None:
    daemon.add_segment(1)
    daemon.script["acquire"] = lambda _: hit(77, extent(1, 0))
    async with await connect_async(str(daemon.run_dir), timeout_s=BOUND_S) as client:
        space = await client.open(SPEC)
        daemon.hold_packets.set()
        reading = asyncio.create_task(space.read(KEYS[:1]))
        await asyncio.to_thread(daemon.wait_for, "segments")
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        released = await asyncio.to_thread(daemon.wait_for, "release")
        assert list(released.lease_ids) == [77]
        daemon.hold_packets.clear()


def test_a_commit_that_the_daemon_gave_up_waiting_for_is_asked_again(
    daemon: FakeDaemon, client: Client, space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachment, "ASK_AGAIN_S", 0.0)
    answers = iter([errors.DeadlineExceeded("still copying"), None])
    daemon.script["reserve"] = lambda body: granted(88, len(body.keys))
    daemon.script["commit"] = lambda _: next(answers)
    batch = written(space.write(KEYS[:1]))
    outcome = batch.commit()
    assert isinstance(outcome.error, errors.DeadlineExceeded)
    staging = attached(client).staging
    assert staging is not None
    again = daemon.wait_for("commit", 2)
    assert again.request_id == daemon.requests("commit")[0].request_id
    assert staging.space.free_bytes == 15 * SHARD
    daemon.answer(again.request_id, errors.Precondition("it failed"))
    eventually(lambda: staging.space.free_bytes == 16 * SHARD)


def test_a_commit_that_never_ends_costs_the_connection(
    daemon: FakeDaemon, client: Client, space: Namespace
) -> None:
    daemon.script["reserve"] = lambda body: granted(88, len(body.keys))
    daemon.script["commit"] = lambda _: errors.DeadlineExceeded("still copying")
    before = attached(client)
    assert not written(space.write(KEYS[:1])).commit().ok
    eventually(lambda: attached(client) is not before and client.connected)
    assert not before.alive
    assert daemon.hellos == 2


async def test_a_deadline_on_an_event_loop_wakes_the_housekeeping(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachment, "HEARTBEAT_S", 1e6)
    monkeypatch.setattr(connection, "BACKOFF_MAX_S", 1e6)
    daemon.script["match"] = lambda _: None
    async with await connect_async(str(daemon.run_dir), timeout_s=1e3) as client:
        space = await client.open(SPEC)
        matched = await asyncio.wait_for(space.match(KEYS, timeout_s=0.05), BOUND_S)
        assert matched.reasons[0] is Reason.UNAVAILABLE


def test_a_future_of_a_commit_ends_in_time(daemon: FakeDaemon) -> None:
    daemon.script["reserve"] = lambda body: granted(88, len(body.keys))
    daemon.script["commit"] = lambda _: None
    with connect(str(daemon.run_dir), timeout_s=BOUND_S) as client:
        batch = written(client.open(SPEC).write(KEYS[:1]))
        batch._timeout_s = 0.1
        future = batch.commit_async()
        outcome = future.result(BOUND_S)
        assert isinstance(outcome.error, errors.DeadlineExceeded)


# ----------------------------------------------------------------------------------------------------- lost streams


def test_after_a_lost_stream_everything_unanswered_is_asked_again(
    daemon: FakeDaemon, client: Client, space: Namespace
) -> None:
    daemon.add_segment(1)
    daemon.script.update({name: lambda _: None for name in ("acquire", "match", "update_session")})
    found: dict[str, Any] = {}

    def read() -> None:
        found["lease"] = space.read(KEYS[:1])

    def match() -> None:
        found["matched"] = space.match(KEYS[:2])

    threads = []
    for number, work in enumerate((read, match)):
        threads.append(threading.Thread(target=work))
        threads[-1].start()
        daemon.wait_for(("acquire", "match")[number])
    with pytest.raises(errors.DeadlineExceeded):
        space.update_session("s", expected_version=0, keep=0, append=[], timeout_s=0.01)
    daemon.wait_for("update_session")

    daemon.script.update({"acquire": lambda _: hit(5, extent(1, 3))})
    del daemon.script["match"], daemon.script["update_session"]
    daemon.break_stream()
    for thread in threads:
        thread.join(BOUND_S)
    assert loads(found["lease"], 0) == 4
    assert found["matched"].usable == 2
    for name in ("acquire", "match"):
        first, second = daemon.requests(name)
        assert first == second, "same number, same body"
    assert len(daemon.requests("update_session")) == 1, "nobody waits for it any more"
    assert (client.counters["reconnects"], daemon.hellos) == (1, 1)


def test_releases_are_not_lost_with_a_stream(daemon: FakeDaemon, client: Client, space: Namespace) -> None:
    daemon.add_segment(1)
    daemon.script["acquire"] = lambda _: hit(5, extent(1, 3))
    daemon.script["match"] = lambda _: None
    space.read(KEYS[:1]).release()
    space.match(KEYS, timeout_s=0.0)  # takes the release along, and is given up
    daemon.wait_for("match")
    assert list(daemon.wait_for("release").lease_ids) == [5]
    daemon.break_stream()
    assert list(daemon.wait_for("release", 2).lease_ids) == [5]
    assert len(daemon.requests("match")) == 1


def test_a_release_without_company_goes_alone(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, client: Client, space: Namespace
) -> None:
    monkeypatch.setattr(attachment, "HEARTBEAT_S", 1e6)
    daemon.add_segment(1)
    daemon.script["acquire"] = lambda _: hit(5, extent(1, 3))
    space.read(KEYS[:1]).release()
    assert list(daemon.wait_for("release").lease_ids) == [5]
    assert daemon.requests("release")[0].request_id


def test_notices_while_detached_are_sent_together_later(
    daemon: FakeDaemon, client: Client, space: Namespace
) -> None:
    daemon.welcomes = False
    daemon.break_stream()
    eventually(lambda: not client.connected)
    for number in range(3):
        attached(client).notice("abort", [number + 1])
    assert not daemon.requests("abort")
    daemon.welcomes = True
    attached(client).cancel_stream()
    assert list(daemon.wait_for("abort").reservation_ids) == [1, 2, 3]


# ----------------------------------------------------------------------------------------------------- restarts


def test_a_new_boot_voids_what_was_and_opens_namespaces_again(
    daemon: FakeDaemon, client: Client, space: Namespace
) -> None:
    daemon.add_segment(1)
    daemon.script["acquire"] = lambda _: hit(5, extent(1, 3))
    daemon.script["reserve"] = lambda body: granted(6, len(body.keys))
    lease, batch = space.read(KEYS[:1]), written(space.write(KEYS[:1]))
    assert loads(lease, 0) == 4
    old, old_id = attached(client), daemon.requests("open")[0]
    daemon.script["match"] = lambda _: None
    matched: list[Any] = []
    thread = threading.Thread(target=lambda: matched.append(space.match(KEYS)))
    thread.start()
    daemon.wait_for("match")

    daemon.die()
    thread.join(BOUND_S)
    assert matched[0].reasons[0] is Reason.UNAVAILABLE, "answered, though its deadline was far"
    assert not lease.alive
    assert loads(lease, 0) is None
    outcome = batch.commit()
    assert not outcome.ok
    assert isinstance(outcome.error, errors.Unavailable)
    assert space.get_session("s", timeout_s=0.0) is None
    assert isinstance(space.write(KEYS[:1]).error, errors.Unavailable)

    del daemon.script["match"]
    daemon.start()
    client.wait_connected()
    opened = daemon.wait_for("open", 2)
    assert opened.namespace == old_id.namespace
    eventually(lambda: space.match(KEYS).usable == 4)
    assert attached(client) is not old
    assert daemon.requests("match")[-1].namespace_id == daemon._next_id, "the number it has in this boot"
    lease.release()
    batch.abort()
    assert attached(client).wait_for_notices(time.monotonic() + BOUND_S)
    assert not daemon.requests("release"), "numbers of the old boot would be somebody else's in the new"
    assert not daemon.requests("abort")


@pytest.mark.parametrize("daemon", [False], indirect=True)  # a lane comes by the descriptor socket itself
def test_a_stale_boot_id_is_noticed_on_the_stream(daemon: FakeDaemon, client: Client) -> None:
    """The descriptor socket looks fine, but the daemon behind the other one is new."""
    daemon.boot_id = os.urandom(16)
    daemon.break_stream()
    eventually(lambda: daemon.hellos == 2)
    client.wait_connected()
    assert client.boot_id == daemon.boot_id


def test_a_namespace_that_is_refused_is_tried_again(
    daemon: FakeDaemon, client: Client, space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "REOPEN_AGAIN_S", 0.05)
    refusals = iter([errors.Exhausted("too many namespaces")] * 2)
    daemon.script["open"] = lambda body: next(refusals, None) or daemon._default_open(body)
    daemon.die()
    daemon.start()
    client.wait_connected()
    eventually(lambda: space.match(KEYS).usable == 4)
    assert client.counters["reopens_failed"] == 2


# ----------------------------------------------------------------------------------------------------- wrong answers


@pytest.mark.parametrize(
    "answer",
    [
        events.Acquired(LeaseId(9), 10_000, (Outcome.HIT,), (Reason.NONE,), (extent(1, 0),)),
        events.Acquired(LeaseId(9), 10_000, (Outcome.HIT,) * 2, (Reason.NONE,), (extent(1, 0),) * 2),
        hit(9, extent(1, 0), extent(1, 0), extent(1, 0)),
        events.Acquired(LeaseId(9), 10_000, (Outcome.HIT,) * 2, (Reason.NONE,) * 2, ()),
        hit(9, extent(1, 0, offset=SEGMENT_BYTES - SHARD + 1), extent(1, 1)),
        hit(9, extent(1, 0, length=SHARD - 1), extent(1, 1)),
        hit(9, extent(1, 0, cell=CELLS), extent(1, 1)),
        events.Done(3),
        errors.Exhausted("too many leases"),
        errors.StoreError("a bug"),
    ],
    ids=str,
)
def test_an_answer_that_does_not_fit_is_a_miss(
    daemon: FakeDaemon, client: Client, space: Namespace, answer: events.Answer
) -> None:
    daemon.add_segment(1)
    daemon.script["acquire"] = lambda _: answer
    with space.read(KEYS[:2]) as lease:
        assert lease.hits == 0
        assert lease.outcomes == (Outcome.MISS,) * 2
        assert not lease.copy_to(0, bytearray(SHARD))
    if isinstance(answer, events.Acquired):
        assert list(daemon.wait_for("release").lease_ids) == [9]


@pytest.mark.parametrize(
    "answer",
    [
        granted(9, 1),
        events.Reserved(ReservationId(9), 1, (GrantResult.GRANTED,) * 2, granted(9, 1).extents),
        replace(granted(9, 2), extents=(extent(0, 0), extent(0, 0, length=SHARD * 2))),
        events.Done(3),
        errors.Precondition("a newer epoch was opened"),
    ],
    ids=str,
)
def test_a_grant_that_does_not_fit_is_no_grant(
    daemon: FakeDaemon, client: Client, space: Namespace, answer: events.Answer
) -> None:
    daemon.script["reserve"] = lambda _: answer
    batch = space.write(KEYS[:2])
    if answer == granted(9, 1):
        assert batch.granted == (0,), "the other key was not mentioned: not granted"
        batch.abort()
    else:
        assert batch.granted == ()
        assert not batch.commit().ok
    if isinstance(answer, events.Reserved):
        assert list(daemon.wait_for("abort").reservation_ids) == [9]
    staging = attached(client).staging
    assert staging is not None
    assert staging.space.free_bytes == 16 * SHARD


def test_a_commit_answered_for_other_chunks_has_failed(daemon: FakeDaemon, space: Namespace) -> None:
    daemon.script["reserve"] = lambda body: granted(9, 2)
    daemon.script["commit"] = lambda _: events.Committed((CommitResult.VISIBLE,))
    assert not written(space.write(KEYS[:2])).commit().ok


def test_a_refused_match_is_a_miss(daemon: FakeDaemon, client: Client, space: Namespace) -> None:
    for answer in (errors.NotFound("no such namespace"), events.Matched(2, (Outcome.HIT,), (Reason.NONE,))):
        daemon.script["match"] = lambda _, answer=answer: answer  # type: ignore[misc]
        assert space.match(KEYS[:2]) == events.Matched(0, (Outcome.MISS,) * 2, (Reason.UNAVAILABLE,) * 2)
    assert client.counters["matches_failed"] == 2


def test_refused_session_calls_raise_what_the_daemon_said(daemon: FakeDaemon, space: Namespace) -> None:
    refusal = errors.Conflict("moved on", field="expected_version", value=3, remedy="read it again")
    daemon.script.update(
        {"update_session": lambda _: refusal, "get_session": lambda _: errors.NotFound("no")}
    )
    with pytest.raises(errors.Conflict) as caught:
        space.update_session("s", expected_version=3, keep=0, append=[])
    assert str(caught.value) == str(refusal)
    assert space.get_session("s") is None


# ----------------------------------------------------------------------------------------------------- segments


def test_segments_are_fetched_once_in_one_packet(
    daemon: FakeDaemon, client: Client, space: Namespace
) -> None:
    for number in range(1, 21):
        daemon.add_segment(number)
    keys = [ChunkKey(b"%d" % number) for number in range(20)]
    daemon.script["acquire"] = lambda body: hit(5, *(extent(n + 1, n) for n in range(len(body.keys))))
    with space.read(keys) as lease:
        assert [loads(lease, index) for index in range(20)] == [2 * n + 1 for n in range(20)]
    with space.read(keys[:3]) as lease:
        assert loads(lease, 2) == 5
    asked = [list(body.segments) for body in daemon.requests("segments")]
    assert asked == [list(range(1, 17)), list(range(17, 21))]


def test_what_cannot_be_mapped_is_a_miss(daemon: FakeDaemon, client: Client, space: Namespace) -> None:
    for number in (1, 2, 3):
        daemon.add_segment(number)
    daemon.refused_segments = {2}
    answer = hit(5, extent(1, 0), extent(2, 0), extent(3, 0))
    daemon.script["acquire"] = lambda _: answer
    with space.read(KEYS[:3]) as lease:
        assert lease.hits == 1
        assert lease.reasons == (Reason.NONE, Reason.UNAVAILABLE, Reason.BEYOND_MISS)
        assert loads(lease, 0) == 1
        assert loads(lease, 2) is None
    with space.read(KEYS[:3], any_order=True) as lease:
        assert lease.outcomes == (Outcome.HIT, Outcome.MISS, Outcome.HIT)
        assert loads(lease, 2) == 3
    assert client.counters["hits_not_mapped"] == 2
    daemon.refused_segments.clear()
    with space.read(KEYS[:3]) as lease:
        assert lease.hits == 3


def test_a_descriptor_socket_that_stands_still(daemon: FakeDaemon, client: Client, space: Namespace) -> None:
    daemon.add_segment(1)
    daemon.script["acquire"] = lambda _: hit(5, extent(1, 0))
    daemon.script["reserve"] = lambda body: granted(6, len(body.keys))
    daemon.hold_packets.set()
    assert space.read(KEYS[:1], timeout_s=0.05).reasons == (Reason.UNAVAILABLE,)
    assert space.write(KEYS[:1], timeout_s=0.05).results == (GrantResult.UNAVAILABLE,)
    daemon.hold_packets.clear()
    eventually(lambda: attached(client).mappings.get(1) is not None)  # the late packets are of use yet
    eventually(lambda: attached(client).staging is not None)
    with space.read(KEYS[:1]) as lease:
        assert loads(lease, 0) == 1
    assert space.write(KEYS[:1]).granted == (0,)
    assert len(daemon.requests("segments")) == 1


def test_retired_segments_are_unmapped_after_the_last_lease(
    daemon: FakeDaemon, client: Client, space: Namespace
) -> None:
    for number in (1, 2):
        daemon.add_segment(number)
    daemon.script["acquire"] = lambda _: hit(5, extent(1, 0))
    one = space.read(KEYS[:1])
    daemon.script["acquire"] = lambda _: hit(6, extent(2, 0))
    two = space.read(KEYS[:1])
    one.release()
    daemon.push(segments_retired=store_pb2.SegmentsRetired(segments=[1, 2, 3]))

    def told() -> set[int]:
        return {number for body in daemon.requests("segments_unmapped") for number in body.segments}

    eventually(lambda: 1 in told())
    assert told() == {1, 3}
    assert loads(two, 0) == 2
    two.release()
    eventually(lambda: 2 in told())
    assert attached(client).mappings.get(2) is None


def test_descriptors_that_this_process_cannot_open(
    daemon: FakeDaemon, client: Client, space: Namespace
) -> None:
    """With too many open files the kernel drops what came. The daemon believes that it is mapped, so it must be told,
    and the next reply must not be taken for the lost one's."""
    for number in (1, 2):
        daemon.add_segment(number)
    daemon.script["acquire"] = lambda _: hit(5, extent(1, 0))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.dup(0)
    os.close(spare)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare, hard))
    try:
        assert space.read(KEYS[:1]).hits == 0
        assert list(daemon.wait_for("segments_unmapped").segments) == [1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    daemon.script["acquire"] = lambda _: hit(6, extent(2, 1))
    with space.read(KEYS[:1]) as lease:
        assert loads(lease, 0) == 3
    assert (client.counters["reconnects"], daemon.hellos) == (0, 1)


def test_fewer_descriptors_than_segments(
    daemon: FakeDaemon, client: Client, space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.add_segment(1)
    daemon.script["acquire"] = lambda _: hit(5, extent(1, 0))
    receive = memory.receive_packet

    def short(*arguments: Any, **named: Any) -> tuple[bytes, list[int]]:
        data, fds = receive(*arguments, **named)
        for fd in fds[1:]:
            os.close(fd)
        return data, fds[:1]

    monkeypatch.setattr(memory, "receive_packet", short)
    assert space.read(KEYS[:1]).hits == 0
    assert list(daemon.wait_for("segments_unmapped").segments) == [1]


# ----------------------------------------------------------------------------------------------------- pushes


def test_a_revoked_lease_is_void(daemon: FakeDaemon, client: Client, space: Namespace) -> None:
    daemon.add_segment(1)
    daemon.script["acquire"] = lambda _: hit(5, extent(1, 0))
    lease = space.read(KEYS[:1])
    assert loads(lease, 0) == 1
    daemon.push(leases_revoked=store_pb2.LeasesRevoked(lease_ids=[4, 5]))
    eventually(lambda: not lease.alive)
    assert loads(lease, 0) is None
    assert (client.counters["leases_revoked"], client.counters["loads_void"]) == (2, 1)


def test_a_changed_generation_voids_a_load(daemon: FakeDaemon, client: Client, space: Namespace) -> None:
    daemon.add_segment(1)
    daemon.script["acquire"] = lambda _: hit(5, extent(1, 0), extent(1, 1), extent(1, 2))
    lease = space.read(KEYS[:3])
    outs = [bytearray(SHARD) for _ in range(3)]
    assert lease.copy_many([(index, 0, 0, out) for index, out in enumerate(outs)])
    daemon.generations[1] += 1
    assert loads(lease, 1) is None
    assert loads(lease, 0) == 1
    assert not lease.copy_many([(index, 0, 0, out) for index, out in enumerate(outs)])
    assert lease.unsafe_view(1) is None
    assert client.counters["loads_void"] == 2


def test_a_generation_that_changes_during_the_copy_voids_it(
    daemon: FakeDaemon, client: Client, space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.add_segment(1)
    daemon.script["acquire"] = lambda _: hit(5, extent(1, 0))
    lease = space.read(KEYS[:1])
    copy = lease_module.copy_pairs  # type: ignore[attr-defined]

    def overtaken(*arguments: Any) -> None:
        copy(*arguments)
        daemon.generations[0] += 1

    monkeypatch.setattr(lease_module, "copy_pairs", overtaken)
    assert not lease.copy_to(0, bytearray(SHARD))
    assert client.counters["loads_void"] == 1


def test_bytes_are_read_where_they_lie_and_void_if_they_changed_meanwhile(
    daemon: FakeDaemon, client: Client, space: Namespace
) -> None:
    daemon.add_segment(1)
    daemon.script["acquire"] = lambda _: hit(5, extent(1, 0), extent(1, 1))
    lease = space.read(KEYS[:2])
    whole = bytearray(SHARD)
    assert lease.copy_to(1, whole)
    found: list[bytes] = []

    def use(views: Any) -> None:
        found.extend(bytes(view) for view in views)

    assert lease.read_in_place([(1, 0, 8, 16), (0, 0, 0, 4)], use)
    assert found[0] == whole[8:24] and len(found[1]) == 4

    def overtaken(views: Any) -> None:
        use(views)
        daemon.generations[1] += 1

    assert not lease.read_in_place([(1, 0, 0, 4)], overtaken)
    found.clear()
    assert not lease.read_in_place([(1, 0, 0, 4)], use)
    assert found == [], "what is void is not read"
    assert lease.read_in_place([(0, 0, 0, 4)], use)
    assert client.counters["loads_void"] == 2
    with pytest.raises(errors.BadRequest):
        lease.read_in_place([(0, 0, SHARD - 3, 4)], use)
    lease.release()
    assert not lease.read_in_place([(0, 0, 0, 4)], use)
    assert len(found) == 1


def test_chunks_that_settle_before_the_answer_is_looked_at(
    daemon: FakeDaemon, client: Client, space: Namespace
) -> None:
    daemon.add_segment(1)

    def acquire(body: Any) -> events.Answer | None:
        pending = events.Acquired(LeaseId(0), 0, (Outcome.PENDING,) * 3, (Reason.BEING_SAVED,) * 3, ())
        daemon.answer(body.request_id, pending)
        for number, settled in (
            (daemon._next_id, {"ready": body.keys[:1], "failed": body.keys[1:2]}),
            (daemon._next_id + 1, {"ready": body.keys}),  # another namespace's keys of the same name
        ):
            daemon.push(chunks_settled=store_pb2.ChunksSettled(namespace_id=number, **settled))
        return None

    daemon.script["acquire"] = acquire
    with space.read(KEYS[:3], any_order=True, wait_ms=int(BOUND_S * 1000)) as lease:
        eventually(lambda: lease.settled(timeout_s=0.02) == (0,))
        daemon.push(chunks_settled=store_pb2.ChunksSettled(namespace_id=daemon._next_id, ready=KEYS[2:3]))
        assert lease.settled() == (0, 2)
        assert attached(client)._waiters
    assert not attached(client)._waiters
    with space.read(KEYS[:3], any_order=True) as lease:
        assert lease.settled() == (), "it did not ask to be told"


def test_waiting_ends_with_the_connection(daemon: FakeDaemon, client: Client, space: Namespace) -> None:
    pending = events.Acquired(LeaseId(0), 0, (Outcome.PENDING,), (Reason.BEING_SAVED,), ())
    daemon.script["acquire"] = lambda _: pending
    lease = space.read(KEYS[:1], wait_ms=1_000_000)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(lease.settled()))
    thread.start()
    daemon.die()
    thread.join(BOUND_S)
    assert found == [()]
    daemon.start()


def test_what_a_newer_daemon_pushes_is_ignored(daemon: FakeDaemon, client: Client, space: Namespace) -> None:
    daemon.push()
    daemon.push(draining=store_pb2.Draining())
    daemon.answer(999_999, events.Done())
    assert space.match(KEYS).usable == 4
    assert attached(client).draining


# ----------------------------------------------------------------------------------------------------- bounds


def test_too_many_unanswered_requests(
    daemon: FakeDaemon, client: Client, space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachment, "CALLS_MAX", 8)
    daemon.script["match"] = lambda _: None
    for _ in range(8):
        space.match(KEYS, timeout_s=0.0)
    began = time.monotonic()
    assert space.match(KEYS).reasons[0] is Reason.UNAVAILABLE
    assert time.monotonic() - began < BOUND_S / 2
    for number in range(1, 9):
        request = daemon.wait_for("match", number)
        daemon.answer(request.request_id, daemon._default_match(request))
    del daemon.script["match"]
    eventually(lambda: space.match(KEYS).usable == 4)


def test_a_silent_daemon_is_not_waited_for_again_until_it_speaks(
    daemon: FakeDaemon, client: Client, space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachment, "SILENCE_S", 0.2)
    monkeypatch.setattr(attachment, "HEARTBEAT_S", 0.1)
    daemon.script["heartbeat"] = lambda _: None
    heartbeat = daemon.wait_for("heartbeat")
    eventually(lambda: attached(client).silent)
    began = time.monotonic()
    assert space.match(KEYS).usable == 0
    assert space.read(KEYS).hits == 0
    assert time.monotonic() - began < BOUND_S / 2
    assert not daemon.requests("match")
    assert len(daemon.requests("heartbeat")) == 1, "one at a time"
    del daemon.script["heartbeat"]
    monkeypatch.setattr(attachment, "SILENCE_S", BOUND_S)
    daemon.answer(heartbeat.request_id, events.Done())
    eventually(lambda: not attached(client).silent)
    assert space.match(KEYS).usable == 4
    assert client.counters["silences"] == 1


def test_a_stream_that_ended_without_a_word_is_attached_anew(
    daemon: FakeDaemon, client: Client, space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon lives, but of this stream it knows nothing any more."""
    monkeypatch.setattr(attachment, "SILENCE_S", 0.1)
    monkeypatch.setattr(attachment, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(attachment, "ATTACH_ANEW_S", 0.2)
    daemon.script["heartbeat"] = lambda _: None
    daemon.wait_for("heartbeat")
    eventually(lambda: daemon.streams >= 2)
    del daemon.script["heartbeat"]
    eventually(lambda: space.match(KEYS).usable == 4)
    assert daemon.hellos == 1, "it is the same daemon: nothing of it is void"


@pytest.mark.parametrize(("granted_bytes", "fit"), [(0, 0), (2 * SHARD, 2)])
def test_less_staging_memory_than_asked_for(
    daemon: FakeDaemon, client: Client, space: Namespace, granted_bytes: int, fit: int
) -> None:
    daemon.staging_bytes = granted_bytes
    daemon.script["reserve"] = lambda body: granted(9, len(body.keys))
    batch = space.write(KEYS)
    assert batch.results == (GrantResult.GRANTED,) * fit + (GrantResult.FULL,) * (4 - fit)
    assert client.counters["saves_dropped"] == 4 - fit
    assert [len(body.keys) for body in daemon.requests("reserve")] == ([fit] if fit else [])
    assert written(batch).commit().ok


def test_a_save_asks_with_parents_counts_and_maker(daemon: FakeDaemon, space: Namespace) -> None:
    daemon.script["reserve"] = lambda body: granted(9, len(body.keys))
    space.write(KEYS[1:], parent=KEYS[0], token_counts=[64, 64, 3], derived=True, maker=b"m" * 16)
    body = daemon.wait_for("reserve")
    assert list(body.keys) == KEYS[1:]
    assert (body.parent, list(body.token_counts), body.derived, body.maker) == (
        KEYS[0],
        [64, 64, 3],
        True,
        b"m" * 16,
    )
    space.write(KEYS, parents=[b"", *KEYS[:3]])  # type: ignore[list-item]
    assert list(daemon.wait_for("reserve", 2).parents) == [b"", *KEYS[:3]]


def test_loads_are_verified_on_a_sample(daemon: FakeDaemon, client: Client, space: Namespace) -> None:
    daemon.add_segment(1)
    daemon.script["acquire"] = lambda _: hit(5, extent(1, 0))  # its checksum is wrong
    with space.read(KEYS[:1]) as lease:
        assert all(loads(lease, 0) == 1 for _ in range(32)), "none, unless asked"
    with space.read(KEYS[:1], verify=0.25) as lease:
        assert sum(loads(lease, 0) is None for _ in range(32)) == 8
    assert client.counters["loads_corrupt"] == 8
    eventually(lambda: len(daemon.requests("report_load")) == 8)
    assert list(daemon.requests("report_load")[0].keys) == KEYS[:1]


def test_who_waits_for_the_descriptor_socket_until_its_time_is_over_is_told_so(client: Client) -> None:
    """The housekeeping may have it: after a restart it maps the directory, and waits for the daemon."""
    attachment = client._attachment
    has_it, done = threading.Event(), threading.Event()

    def hold() -> None:
        with attachment._socket_lock:
            has_it.set()
            assert done.wait(BOUND_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert has_it.wait(BOUND_S)
    fd = os.memfd_create("test-region")
    os.ftruncate(fd, 4096)
    try:
        with pytest.raises(errors.DeadlineExceeded, match="busy"):
            client.adopt(fd, 4096, timeout_s=0.05)
    finally:
        os.close(fd)
        done.set()
        thread.join(BOUND_S)


def test_closing_tells_the_daemon(daemon: FakeDaemon, client: Client, space: Namespace) -> None:
    daemon.add_segment(1)
    daemon.script["acquire"] = lambda _: hit(5, extent(1, 0))
    daemon.script["reserve"] = lambda body: granted(6, len(body.keys))
    lease, batch = space.read(KEYS[:1]), space.write(KEYS[:1])
    client.close()
    assert [list(body.lease_ids) for body in daemon.requests("release")] == [[5]]
    assert [list(body.reservation_ids) for body in daemon.requests("abort")] == [[6]]
    assert [list(body.segments) for body in daemon.requests("segments_unmapped")] == [[1]]
    assert loads(lease, 0) is None
    with pytest.raises(errors.BadRequest, match="ended"):
        batch.commit()
    client.close()
    assert connection.State.CLOSED is client._connection.state
