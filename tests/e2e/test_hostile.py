"""Peers that mean harm, or are broken: floods of connections, garbage, messages without end, no descriptors left.

The daemon answers or hangs up, serves everybody else meanwhile, and has what it had before when they are gone.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import resource
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore import wire
from kvstore.client import connect as connect_client
from kvstore.errors import Exhausted, StoreError
from kvstore.memory import send_packet
from kvstore.v1 import bytes_pb2, descriptor_pb2, stats_pb2, store_pb2

from .raw_http2 import DATA, GOAWAY, PING, PREFACE, Http2, frame, in_header
from .standing_process import SPEC, keys_of, load, save
from .test_daemon_start_stop import free_port
from .test_surface_fuzz import methods

BOUND_S = 20.0
CONNECTIONS = 10_000
MIB = 1 << 20
SLACK = 6
"""Descriptors that gRPC makes when it first needs them, for its threads, and keeps."""


def eventually(what: Callable[[], Any], why: Callable[[], object] = lambda: "it never became true") -> Any:
    deadline = time.monotonic() + BOUND_S
    while not (found := what()):
        assert time.monotonic() < deadline, why()
        time.sleep(0.02)
    return found


def descriptors_of(daemon: Any) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


class Before:
    """What the daemon held; `again` waits until it holds no more than that."""

    def __init__(self, daemon: Any) -> None:
        self.daemon = daemon
        self.descriptors = descriptors_of(daemon)
        self.bytes = daemon.rss_anon_bytes

    def again(self, slack_bytes: int = 32 * MIB) -> None:
        eventually(
            lambda: descriptors_of(self.daemon) <= self.descriptors + SLACK,
            lambda: f"{descriptors_of(self.daemon)} descriptors, {self.descriptors} before",
        )
        eventually(
            lambda: self.daemon.rss_anon_bytes - self.bytes < slack_bytes,
            lambda: f"{(self.daemon.rss_anon_bytes - self.bytes) / MIB:.0f} MiB more than before",
        )


def serves(worker: Any) -> bool:
    """Not while others have all the places of its token, or while a machine that is too busy makes it late."""
    try:
        return bool(worker.ask_stats().version)
    except StoreError:
        return False


_opened: list[Any] = []
"""What the test opened and may not come to close."""


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


def dial(address: Path | tuple[str, int], kind: int = socket.SOCK_STREAM) -> socket.socket:
    sock = socket.socket(socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX, kind)
    _opened.append(sock)
    sock.settimeout(BOUND_S)
    sock.connect(address if isinstance(address, tuple) else str(address))
    return sock


def http2(address: Path | tuple[str, int], *, window: int | None = None) -> Http2:
    peer = Http2(address, window=window)
    _opened.append(peer)
    return peer


@pytest.fixture
def tcp_port() -> int:
    return free_port()


@pytest.fixture
def daemon(start_daemon: Callable[..., Any], tcp_port: int) -> Any:
    return start_daemon(
        log_level="info", tcp_address=f"127.0.0.1:{tcp_port}", tcp_unauthenticated=True, peer_timeout_ms=2_000
    )


# ------------------------------------------------------------------------------------------------------ connections


@pytest.mark.timeout(300)
def test_connections_opened_and_dropped(
    daemon: Any, connect: Callable[..., Any], run_dir: Path, tcp_port: int
) -> None:
    """Silent ones, ones with garbage, ones that begin well, on every socket; a worker goes on meanwhile."""
    worker = connect(daemon)
    worker.ask_stats()
    sockets = [
        (run_dir / "grpc.sock", socket.SOCK_STREAM),
        (run_dir / "kvstored.sock", socket.SOCK_SEQPACKET),
        (("127.0.0.1", tcp_port), socket.SOCK_STREAM),
    ]
    hello = descriptor_pb2.DescriptorRequest(hello=descriptor_pb2.Hello(protocol=2)).SerializeToString()

    def flood(count: int) -> None:
        for number in range(count):
            address, kind = sockets[number % 3]
            sock = dial(address, kind)
            well = hello if kind == socket.SOCK_SEQPACKET else PREFACE + frame(4, 0, 0)
            if data := (b"", os.urandom(100), well)[number // 3 % 3]:
                try:
                    sock.send(data)
                except BrokenPipeError:
                    assert kind == socket.SOCK_SEQPACKET, "too many connections without a hello are closed"
            sock.close()
            _opened.clear()
            if number % 1_000 == 0:
                worker.ask_stats()

    flood(500)  # what is made once and kept: thread pools, buffers of the allocator
    worker.ask_stats()
    eventually(lambda: worker.ask_stats().gauges["workers"] == 1)
    before = Before(daemon)
    flood(CONNECTIONS)
    before.again()
    eventually(lambda: worker.ask_stats().gauges["workers"] == 1)


def test_no_descriptors_left(daemon: Any, connect: Callable[..., Any], run_dir: Path) -> None:
    """Who is in is served, who comes is told so at once, and when others leave there is room again."""
    worker = connect(daemon)
    worker.ask_stats()
    with connect_client(str(run_dir), timeout_s=BOUND_S) as client:
        space = client.open(SPEC)
        keys = keys_of(space, "before")
        assert save(space, keys)
        _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (descriptors_of(daemon) + 20, hard))
        crowd = [dial(run_dir / "kvstored.sock", socket.SOCK_SEQPACKET) for _ in range(30)]
        with pytest.raises(Exhausted, match="the daemon has no descriptors left"):
            connect_client(str(run_dir), timeout_s=BOUND_S)
        strangers = [dial(run_dir / "grpc.sock") for _ in range(30)]
        assert load(space, keys) == 4
        assert save(space, keys_of(space, "meanwhile"))
        assert worker.ask_stats().gauges["workers"] == 2
        for sock in (*crowd, *strangers):
            sock.close()

        def welcome() -> bool:
            try:
                with connect_client(str(run_dir), timeout_s=BOUND_S) as other:
                    return load(other.open(SPEC), keys) == 4
            except Exhausted:
                return False

        eventually(welcome)


def test_the_limit_of_descriptors_is_raised(start_daemon: Callable[..., Any]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * 1024 + 256
    if hard < wanted:
        pytest.skip(f"the hard limit here is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        daemon = start_daemon()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    now, _ = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    assert now >= wanted


def test_descriptors_where_none_belong(daemon: Any, connect: Callable[..., Any], run_dir: Path) -> None:
    """On the descriptor socket before and after hello, and beside gRPC's bytes: none of them stays open."""
    worker = connect(daemon)
    worker.ask_stats()
    before = Before(daemon)
    gifts = [os.open("/dev/null", os.O_RDONLY) for _ in range(16)]
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("16i", *gifts))]
    hello = descriptor_pb2.DescriptorRequest(hello=descriptor_pb2.Hello(protocol=2)).SerializeToString()
    staging = descriptor_pb2.DescriptorRequest(staging=descriptor_pb2.StagingRequest(bytes=4096))
    for _ in range(20):
        early = dial(run_dir / "kvstored.sock", socket.SOCK_SEQPACKET)
        early.sendmsg([hello], rights)
        assert early.recv(4096) == b"", "it is hung up on"
        late = dial(run_dir / "kvstored.sock", socket.SOCK_SEQPACKET)
        late.send(hello)
        assert descriptor_pb2.DescriptorReply.FromString(late.recv(4096)).hello.token
        late.sendmsg([staging.SerializeToString()], rights)
        assert late.recv(4096) == b""
        early.close()
        late.close()
    stream = dial(run_dir / "grpc.sock")
    stream.sendmsg([PREFACE], rights)
    stream.sendmsg([frame(4, 0, 0)], rights)
    assert stream.recv(4096)
    for fd in gifts:
        os.close(fd)
    stream.close()
    before.again()


# ---------------------------------------------------------------------------------------------------------- garbage


@pytest.mark.parametrize("seed", [1, 2])
def test_random_bytes_on_every_socket(
    daemon: Any, connect: Callable[..., Any], run_dir: Path, tcp_port: int, seed: int
) -> None:
    """Plain noise; noise in the frames of HTTP/2; noise in the messages of gRPC; packets of every length."""
    chance = random.Random(seed)
    worker = connect(daemon)
    worker.ask_stats()
    before = Before(daemon)
    token = {wire.TOKEN_METADATA: in_header(worker.hello.token)}
    methods = (
        "Store/Attach",
        "Store/Reserve",
        "Bytes/Put",
        "Bytes/Get",
        "Stats/WatchStats",
        "Hints/PublishQueue",
    )
    for number in range(240):
        noise = chance.randbytes(chance.choice((1, 9, 100, 5_000, 70_000)))
        address: Any = chance.choice([run_dir / "grpc.sock", ("127.0.0.1", tcp_port)])
        try:
            match number % 4:
                case 0:
                    sock = dial(address)
                    sock.sendall(noise)
                    sock.close()
                case 1:
                    peer = http2(address)
                    for _ in range(20):
                        kind, flags, stream = chance.randrange(11), chance.randrange(256), chance.randrange(8)
                        peer.socket.sendall(frame(kind, flags, stream, noise[: chance.randrange(200)]))
                    peer.close()
                case 2:
                    peer = http2(address)
                    for method in methods:
                        peer.call(f"/kvstore.v1.{method}", noise[:9_000], token)
                    peer.close()
                case _:
                    sock = dial(run_dir / "kvstored.sock", socket.SOCK_SEQPACKET)
                    sock.send(noise)
                    sock.close()
        except (BrokenPipeError, ConnectionResetError):
            pass  # it was hung up on before it had said all
        if number % 40 == 0:
            worker.ask_stats()
    before.again()
    assert worker.ask_stats().uptime_ms
    assert not [line for line in daemon.lines if line["level"] in ("error", "critical")]


def lingering() -> tuple[int, list[socket.socket]]:
    """A socket whose closing takes a minute, because its peer does not read; and that peer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        deaf, _ = server.accept()
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
    sender.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            sender.send(bytes(1 << 16))
    return sender.detach(), [deaf]


HELLO = descriptor_pb2.DescriptorRequest(hello=descriptor_pb2.Hello(protocol=2))


@pytest.mark.parametrize(
    ("before", "packet", "count"),
    [
        ([], HELLO.SerializeToString(), 1),
        ([HELLO.SerializeToString()], b"x", 1),
        ([HELLO.SerializeToString()], b"x", 2),
        ([b"refused, and the next is not read"], b"x", 1),
        ([b"refused, and the next is not read"], b"", 1),
        ([b"refused, and the next is not read", b"nor this"], b"x", 1),
    ],
    ids=["stranger", "worker", "two", "unread", "unread and empty", "unread behind another"],
)
def test_descriptors_whose_closing_lasts(daemon: Any, before: list[bytes], packet: bytes, count: int) -> None:
    """A peer that sends one along, and closes its own, leaves the closing to the daemon: which serves on."""
    others: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(str(daemon.run_dir / "kvstored.sock"))
        sent = [lingering() for _ in range(count)]
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            for first in before:
                peer.send(first)
            send_packet(peer, packet, [fd for fd, _ in sent])
            for fd, deaf in sent:
                os.close(fd)
                others += deaf
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        for _ in range(2):  # whoever comes next may be answered before the first is read
            with connect_client(str(daemon.run_dir), timeout_s=BOUND_S) as client:
                assert client.stats().version
        for deaf in others:
            deaf.close()


def test_what_a_peer_says_does_not_reach_the_log_as_it_is(daemon: Any, run_dir: Path) -> None:
    """gRPC's core tells of a GOAWAY in the peer's own words."""
    peer = http2(run_dir / "grpc.sock")
    words = b'\n{"message": "forged", "level": "info"}\n\xff'
    peer.socket.sendall(
        frame(GOAWAY, 0, 0, struct.pack("!II", 0, 7) + words) + frame(PING, 0, 0, b"answered")
    )
    seen = b""
    while b"answered" not in seen:  # so it has dealt with what came before
        seen += peer.socket.recv(4096)
    assert daemon.stop() == 0
    assert daemon.text == []
    assert "forged" not in [line["message"] for line in daemon.lines]


def test_packets_that_are_too_long(daemon: Any, run_dir: Path) -> None:
    for size in (64 << 10, (64 << 10) + 1, 150_000):
        sock = dial(run_dir / "kvstored.sock", socket.SOCK_SEQPACKET)
        sock.send(b"\n" * size)
        answer = sock.recv(4096)
        if answer:
            error = descriptor_pb2.DescriptorReply.FromString(answer).error
            assert "is not a valid DescriptorRequest" in error.message
        sock.close()


# ----------------------------------------------------------------------------------------------------------- floods


def test_requests_that_are_never_finished(
    daemon: Any, connect: Callable[..., Any], run_dir: Path, tcp_port: int
) -> None:
    """Hundreds of calls that each send almost all of a message as large as may be. Of strangers nothing is taken; of a
    worker a few at a time; and none is waited for without end."""
    worker = connect(daemon)
    worker.ask_stats()
    before = Before(daemon)
    token = {wire.TOKEN_METADATA: in_header(worker.hello.token)}
    almost = b"\0" + struct.pack("!I", 4 * MIB) + bytes(4 * MIB - 100)
    stranger, known, other = (http2(run_dir / "grpc.sock") for _ in range(3))
    highest = 0
    for peer, metadata, method in (
        (stranger, None, "Store/Match"),
        (known, token, "Store/Match"),
        (other, token, "Bytes/Put"),
    ):
        peer.socket.settimeout(2.0)
        try:
            streams = [peer.begin(f"/kvstore.v1.{method}", metadata) for _ in range(100)]
            for at in range(0, len(almost), 16_384):
                for stream in streams:
                    peer.socket.sendall(frame(DATA, 0, stream, almost[at : at + 16_384]))
                highest = max(highest, daemon.rss_anon_bytes)
        except OSError:
            pass  # who ignores the windows is hung up on, or read no further
    eventually(lambda: serves(worker))
    assert highest - before.bytes < 256 * MIB, f"{(highest - before.bytes) / MIB:.0f} MiB"
    for peer in (stranger, known, other):
        peer.close()
    before.again(128 * MIB)  # of what the allocator was given it keeps some


def test_answers_that_are_never_read(
    start_daemon: Callable[..., Any], connect: Callable[..., Any], run_dir: Path
) -> None:
    """Thousands of requests, each with a large answer, from a peer that allows no byte of any answer."""
    daemon = start_daemon(log_level="info", peer_timeout_ms=1_000)
    worker = connect(daemon)
    with connect_client(str(run_dir), timeout_s=BOUND_S) as client:
        space = client.open(SPEC)
        namespace = worker.call(
            "Open", store_pb2.OpenRequest(namespace=wire.spec_to_proto(SPEC))
        ).namespace_id
        before = Before(daemon)
        token = {wire.TOKEN_METADATA: in_header(worker.hello.token)}
        many = store_pb2.MatchRequest(namespace_id=namespace, keys=[b"%d" % n for n in range(4_000)])
        peers = [http2(run_dir / "grpc.sock", window=0) for _ in range(4)]
        for _ in range(200):
            for peer in peers:
                try:
                    peer.call("/kvstore.v1.Store/Match", many.SerializeToString()[:16_000], token)
                    peer.call("/kvstore.v1.Stats/GetStats", b"", token)
                except (BrokenPipeError, ConnectionResetError):
                    continue
        assert save(space, keys_of(space, "flood"))
        assert load(space, keys_of(space, "flood")) == 4
        grown = daemon.rss_anon_bytes - before.bytes
        assert grown < 128 * MIB, f"{grown / MIB:.0f} MiB"

        eventually(lambda: serves(worker))
        for peer in peers:
            peer.close()
        before.again(64 * MIB)


def test_streams_that_are_reset_and_half_closed(
    daemon: Any, connect: Callable[..., Any], run_dir: Path, spec: Any
) -> None:
    """At every point of a call; nothing that the calls had acquired stays."""
    worker = connect(daemon)
    namespace = worker.call("Open", store_pb2.OpenRequest(namespace=wire.spec_to_proto(spec))).namespace_id
    before = Before(daemon)
    token = {wire.TOKEN_METADATA: in_header(worker.hello.token)}
    bodies = {
        "Store/Reserve": store_pb2.ReserveRequest(namespace_id=namespace, keys=[b"k"]).SerializeToString(),
        "Bytes/Put": bytes_pb2.PutFrame(namespace_id=namespace, key=b"p", payload=b"x").SerializeToString(),
        "Bytes/Get": bytes_pb2.GetRequest(namespace_id=namespace, key=b"k").SerializeToString(),
        "Stats/WatchStats": stats_pb2.WatchStatsRequest(interval_ms=100).SerializeToString(),
        "Store/Attach": store_pb2.AttachRequest(
            hello=store_pb2.AttachHello(request_id=1, token=worker.hello.token, boot_id=worker.hello.boot_id)
        ).SerializeToString(),
    }
    peer = http2(run_dir / "grpc.sock")
    for _ in range(10):
        for method, body in bodies.items():
            name = f"/kvstore.v1.{method}"
            peer.reset(peer.begin(name, token))
            peer.begin(name, token, end=True)
            stream = peer.begin(name, token)
            peer.send(stream, body)
            peer.reset(stream)
            peer.call(name, body, token)
    peer.close()
    eventually(lambda: worker.ask_stats().gauges["leases"] == 0)
    eventually(  # but for the one that the worker may have made by a unary call
        lambda: all(pool.reserved <= 1 for pool in worker.ask_stats().pools),
        lambda: worker.ask_stats().pools,
    )
    before.again()
    assert not [line for line in daemon.lines if line["level"] in ("error", "critical")]


def test_who_has_no_token_learns_nothing_and_holds_nothing(daemon: Any, run_dir: Path) -> None:
    """Every method that the daemon serves, found by its own descriptors: refused before a byte of the request came."""
    never: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    with grpc.insecure_channel(f"unix:{run_dir}/grpc.sock") as channel:
        for method in methods():
            name = f"/{method.containing_service.full_name}/{method.name}"
            if method.name == "Attach":  # which says who it is in its first message
                continue
            call = channel.stream_stream(name)(iter(never.get, None), timeout=BOUND_S)
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, name
            never.put(None)
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.stream_stream("/kvstore.v1.Store/Attach")(iter([b""]), timeout=BOUND_S))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
