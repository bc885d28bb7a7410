"""Real `kvstored` processes, and a worker that speaks the bare protocol (no client library in between)."""

import contextlib
import json
import mmap
import os
import queue
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore import wire
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.memory import receive_packet
from kvstore.v1 import descriptor_pb2, stats_pb2, stats_pb2_grpc, store_pb2, store_pb2_grpc

from . import forked

BOUND_S = 20.0
"""Every wait in these tests ends by then; it is a failure, never a measurement."""
SMALL = {
    "dram_bytes": 64 << 20,
    "segment_bytes": 16 << 20,
    "staging_bytes": 8 << 20,
    "staging_bytes_max": 32 << 20,
    "drain_ms": 200,
    "scrub_bytes_per_s": 0,  # tests of the disk's faults count reads
    "log_level": "debug",
}


class Daemon:
    """One `kvstored` process, which checks its invariants before it ends. Its log is read all the time, so that it
    never blocks on a full pipe."""

    def __init__(
        self, run_dir: Path, arguments: list[str], environment: dict[str, str], prelude: str = ""
    ) -> None:
        """`prelude`: Python that its process runs first."""
        self.run_dir = run_dir
        self.lines: list[dict[str, Any]] = []
        self.text: list[str] = []
        """Lines on stderr that are no JSON."""
        self._changed = threading.Condition()
        if prelude:
            program = f"{prelude}\nfrom kvstore.sim.daemon import run\nrun()"
            self.process = forked.fresh(["-c", program, *arguments], environment)
        else:
            self.process = forked.start(arguments, environment)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                try:
                    self.lines.append(json.loads(line))
                except json.JSONDecodeError:
                    self.text.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self.lines.append({"message": "<end of log>"})
            self._changed.notify_all()

    def wait_for(self, message: str) -> dict[str, Any]:
        """The first log line with this message."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            found[:] = [line for line in self.lines if line["message"] in (message, "<end of log>")]
            return bool(found)

        with self._changed:
            assert self._changed.wait_for(look, BOUND_S), f"no {message!r} in {self.lines}"
        assert found[0]["message"] == message, f"no {message!r}, the log ended: {self.lines} {self.text}"
        return found[0]

    def wait_for_count(self, message: str, count: int) -> None:
        """Until the log has so many lines with this message."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: sum(line["message"] == message for line in self.lines) >= count, BOUND_S
            ), self.lines

    def exit_status(self) -> int:
        status = self.process.wait(BOUND_S)
        self._reader.join(BOUND_S)
        return status

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.exit_status()

    def kill(self) -> None:
        self.process.kill()
        self.exit_status()

    def close(self) -> None:
        """The end of the test; a daemon that is still there must end well, its invariants checked."""
        ended = self.process.poll() is not None or self.stop() == 0
        if not ended:
            self.kill()
        self._reader.join(BOUND_S)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        assert ended, self.lines

    @property
    def refusals(self) -> list[str]:
        """Why it did not start."""
        return [line["message"] for line in self.lines if line.get("logger") == "kvstored"]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def grpc_target(self) -> str:
        return f"unix:{self.run_dir}/grpc.sock"

    @property
    def rss_anon_bytes(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return next(
            int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:")
        )


@pytest.fixture(scope="session", autouse=True)
def no_server_is_left() -> Iterator[None]:
    yield
    forked.close()


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short, because a socket's path is bounded; not there yet."""
    folder = tempfile.mkdtemp(prefix="kvs-")
    yield Path(folder) / "run"
    shutil.rmtree(folder)


@pytest.fixture
def fast_lane() -> bool:
    """Whether workers are offered a fast lane; modules whose tests go both ways parametrise it."""
    return True


@pytest.fixture
def launch(run_dir: Path, fast_lane: bool) -> Iterator[Callable[..., Daemon]]:
    """launch(*arguments, environment={}, **settings) -> Daemon; settings over SMALL ones, None leaves one out. All are
    gone after the test."""
    started: list[Daemon] = []

    def start(
        *arguments: str, environment: dict[str, str] | None = None, prelude: str = "", **settings: Any
    ) -> Daemon:
        settings = {"run_dir": run_dir, **SMALL, "fast_lane": fast_lane, **settings}
        flags = [
            f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if value is not None
        ]
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("KVSTORED_", "NOTIFY_"))
        }
        daemon = Daemon(
            Path(settings["run_dir"] or run_dir),
            [*flags, *arguments],
            {**clean, "PYTHONSAFEPATH": "1", **(environment or {})},
            prelude,
        )
        started.append(daemon)
        return daemon

    yield start
    for daemon in started:
        daemon.close()


@pytest.fixture
def start_daemon(launch: Callable[..., Daemon]) -> Callable[..., Daemon]:
    """As `launch`, and waits until it is ready."""

    def start(*arguments: str, **settings: Any) -> Daemon:
        daemon = launch(*arguments, **settings)
        daemon.wait_for("ready")
        return daemon

    return start


@pytest.fixture
def daemon(start_daemon: Callable[..., Daemon]) -> Daemon:
    return start_daemon()


@contextlib.contextmanager
def acting_as(uid: int | None) -> Iterator[None]:
    """The kernel notes the effective user when a socket connects."""
    if uid is None:
        yield
        return
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


class Worker:
    """A process' connection to the daemon: descriptor socket, token, channel; one Attach stream on demand. `uid`: as
    which user (we must be root)."""

    def __init__(self, daemon: Daemon, *, uid: int | None = None, **hello: Any) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(BOUND_S)
        with acting_as(uid):
            self.socket.connect(str(daemon.run_dir / "kvstored.sock"))
        reply, _ = self.ask(
            descriptor_pb2.DescriptorRequest(hello=descriptor_pb2.Hello(protocol=2, client="test", **hello))
        )
        self.hello = reply.hello
        self.channel = grpc.insecure_channel(
            self.hello.grpc_target,
            options=[("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)],
        )
        self.store = store_pb2_grpc.StoreStub(self.channel)
        self.stats = stats_pb2_grpc.StatsStub(self.channel)
        self.streams: list[Stream] = []

    @property
    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        return ((wire.TOKEN_METADATA, self.hello.token),)

    def ask(
        self, request: descriptor_pb2.DescriptorRequest
    ) -> tuple[descriptor_pb2.DescriptorReply, list[int]]:
        self.socket.send(request.SerializeToString())
        data, fds = receive_packet(self.socket, fds_max=32)
        return descriptor_pb2.DescriptorReply.FromString(data), list(fds)

    def call(self, name: str, request: Any) -> Any:
        """A unary call of Store; StoreError when it fails."""
        return self._call(getattr(self.store, name), request)

    def ask_stats(self, name: str = "GetStats", request: Any = None) -> Any:
        return self._call(
            getattr(self.stats, name), stats_pb2.GetStatsRequest() if request is None else request
        )

    def _call(self, method: Any, request: Any) -> Any:
        try:
            return method(request, metadata=self.metadata, timeout=BOUND_S)
        except grpc.RpcError as error:
            raise store_error(error) from None

    def attach(self, **hello: Any) -> "Stream":
        """By a fast lane where there is one and no other hello is asked for, else by gRPC."""
        stream = LaneStream(self) if self.hello.fast_lane and not hello else Stream(self, **hello)
        self.streams.append(stream)
        return stream

    def lane(self) -> socket.socket:
        reply, fds = self.ask(descriptor_pb2.DescriptorRequest(lane=descriptor_pb2.LaneRequest()))
        if reply.WhichOneof("body") == "error":
            raise wire.error_from_proto(reply.error)
        lane = socket.socket(fileno=fds[0])
        lane.settimeout(BOUND_S)
        return lane

    def staging(self, wanted: int) -> mmap.mmap:
        reply, fds = self.ask(
            descriptor_pb2.DescriptorRequest(staging=descriptor_pb2.StagingRequest(bytes=wanted))
        )
        assert reply.WhichOneof("body") == "staging", reply
        memory = mmap.mmap(fds[0], reply.staging.bytes)
        os.close(fds[0])
        return memory

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
        self.channel.close()
        self.socket.close()


class Stream:
    """An Attach stream. Replies are collected by a thread, pushes apart."""

    def __init__(self, worker: Worker, **hello: Any) -> None:
        self._requests: queue.SimpleQueue[store_pb2.AttachRequest | None] = queue.SimpleQueue()
        self._prepare()
        self._call = worker.store.Attach(iter(self._requests.get, None))
        self._start()
        body = {"request_id": 1, "token": worker.hello.token, "boot_id": worker.hello.boot_id, **hello}
        self._requests.put(store_pb2.AttachRequest(hello=store_pb2.AttachHello(**body)))

    def _prepare(self) -> None:
        self._next_id = 1
        self.replies: dict[int, store_pb2.AttachReply] = {}
        self.pushes: list[store_pb2.AttachReply] = []
        self.error: Exception | None = None
        """How the stream ended, once it did; None for OK."""
        self.ended = False
        self._changed = threading.Condition()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def _replies(self) -> Iterator[store_pb2.AttachReply]:
        yield from self._call

    def _receive(self) -> None:
        try:
            for reply in self._replies():
                with self._changed:
                    if reply.request_id or reply.HasField("welcome"):
                        self.replies[reply.request_id or 1] = reply
                    elif reply.HasField("ended"):
                        self.error = wire.error_from_proto(reply.ended)
                    else:
                        self.pushes.append(reply)
                    self._changed.notify_all()
        except grpc.RpcError as error:
            self.error = store_error(error)
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def send(self, field: str, request: Any) -> int:
        """Send without waiting; returns the request id."""
        self._next_id += 1
        request.request_id = self._next_id
        self.send_raw(store_pb2.AttachRequest(**{field: request}))
        return self._next_id

    def send_raw(self, request: store_pb2.AttachRequest) -> None:
        self._requests.put(request)

    def wait_for(self, found: Callable[[], Any]) -> Any:
        """Wait until `found` (called with the lock held) answers something true."""
        with self._changed:
            assert self._changed.wait_for(lambda: found() or self.ended, BOUND_S), "nothing came"
            if not found():
                raise AssertionError("the stream ended") from self.error
            return found()

    def wait_for_end(self) -> Exception | None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.ended, BOUND_S), "the stream goes on"
        return self.error

    def receive(self, request_id: int) -> Any:
        """The body of the reply; StoreError when it is an error."""
        reply = self.wait_for(lambda: self.replies.get(request_id))
        body = getattr(reply, reply.WhichOneof("body"))
        if reply.WhichOneof("body") == "error":
            raise wire.error_from_proto(body)
        return body

    def ask(self, field: str, request: Any) -> Any:
        return self.receive(self.send(field, request))

    def half_close(self) -> None:
        self._requests.put(None)

    def close(self) -> None:
        self._requests.put(None)
        self._call.cancel()
        self._thread.join(BOUND_S)


class LaneStream(Stream):
    """The same over a fast lane."""

    def __init__(self, worker: Worker) -> None:
        self._prepare()
        self.socket = worker.lane()
        self._start()

    def _replies(self) -> Iterator[store_pb2.AttachReply]:
        with contextlib.suppress(OSError), self.socket.makefile("rb") as source:
            self.socket.settimeout(None)
            while prefix := source.read(wire.LANE_PREFIX_BYTES):
                yield store_pb2.AttachReply.FromString(source.read(int.from_bytes(prefix, "little")))

    def send_raw(self, request: store_pb2.AttachRequest) -> None:
        with contextlib.suppress(OSError):  # as gRPC: who asks after the end learns that from the end
            self.socket.sendall(wire.lane_frame(request.SerializeToString()))

    def half_close(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(BOUND_S)
        self.socket.close()


def store_error(error: Any) -> Exception:
    return wire.error_from_status(error.code().value[0], error.details(), error.trailing_metadata() or ())


@pytest.fixture
def connect() -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def connect_to(daemon: Daemon, **hello: Any) -> Worker:
        worker = Worker(daemon, **hello)
        workers.append(worker)
        return worker

    yield connect_to
    for worker in workers:
        with contextlib.suppress(OSError):
            worker.close()


@pytest.fixture
def worker(daemon: Daemon, connect: Callable[..., Worker]) -> Worker:
    return connect(daemon)


@pytest.fixture
def spec() -> NamespaceSpec:
    """One shard of 256 KiB a chunk."""
    return NamespaceSpec(
        model="tiny",
        weights_digest=b"w" * 32,
        layout_fingerprint="test:bytes",
        chunk_tokens=64,
        groups=(GroupSpec("full", shard_bytes=256 << 10),),
    )


@pytest.fixture
def namespace(worker: Worker, spec: NamespaceSpec) -> int:
    return worker.call("Open", store_pb2.OpenRequest(namespace=wire.spec_to_proto(spec))).namespace_id
