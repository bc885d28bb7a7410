"""Who calls over TCP, by real connections."""

import itertools
import os
import socket
from collections.abc import Iterator

import pytest

from kvstore.core.events import Event, WorkerJoined, WorkerLeft
from kvstore.errors import BadRequest, Exhausted, Unavailable
from kvstore.transport import callers as callers_module
from kvstore.transport.callers import CALLERS_PER_CONNECTION_MAX, CLIENT_KEPT_S, CLIENT_METADATA, TcpCallers
from kvstore.transport.identities import Identity
from kvstore.transport.roles import Role
from kvstore.types import WorkerId

SOMEBODY = Identity("somebody", "t", frozenset({Role.WORKER}))


class Rig:
    """A listener, connections to it, and who they are taken for."""

    def __init__(self, family: socket.AddressFamily = socket.AF_INET, host: str = "127.0.0.1") -> None:
        self.family, self.host = family, host
        self.listener = socket.create_server((host, 0), family=family)
        self.port: int = self.listener.getsockname()[1]
        self.now = 100.0
        self.events: list[Event] = []
        numbers = itertools.count(-2, -1)
        self.callers = TcpCallers(
            self, lambda: WorkerId(next(numbers)), port=self.port, clock=lambda: self.now
        )

    def post(self, event: Event) -> None:
        self.events.append(event)

    def connect(self, source_port: int = 0) -> tuple[socket.socket, socket.socket, str]:
        """Both ends, and the peer as gRPC writes it."""
        theirs = socket.socket(self.family)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        theirs.bind((self.host, source_port))
        theirs.connect((self.host, self.port))
        ours, address = self.listener.accept()
        host = f"%5B{address[0]}%5D" if ":" in address[0] else address[0]
        return ours, theirs, f"ipv{6 if ':' in host else 4}:{host}:{address[1]}"

    def joined(self) -> list[WorkerId]:
        return [event.worker for event in self.events if isinstance(event, WorkerJoined)]

    def left(self) -> list[WorkerId]:
        return [event.worker for event in self.events if isinstance(event, WorkerLeft)]

    def close(self) -> None:
        self.callers.close()
        self.listener.close()


@pytest.fixture
async def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


async def test_each_connection_is_a_caller_of_its_own(rig):
    one, two = rig.connect(), rig.connect()
    workers = [rig.callers.worker_of(peer, SOMEBODY) for _, _, peer in (one, two, one, two)]
    assert workers == [-2, -3, -2, -3]
    assert rig.events == [
        WorkerJoined(WorkerId(-2), "t", "", remote=True),
        WorkerJoined(WorkerId(-3), "t", "", remote=True),
    ]
    assert -2 in rig.callers and -4 not in rig.callers
    for ours, theirs, _ in (one, two):
        ours.close()
        theirs.close()


async def test_a_caller_ends_with_its_connection_and_no_other_with_it(rig):
    one, two = rig.connect(), rig.connect()
    for _, _, peer in (one, two):
        rig.callers.worker_of(peer, SOMEBODY)
    one[0].close()
    rig.callers.look()
    assert rig.left() == [-2]
    assert rig.callers.worker_of(two[2], SOMEBODY) == -3
    with pytest.raises(Unavailable, match="the connection has ended"):
        rig.callers.worker_of(one[2], SOMEBODY)
    for sock in (one[1], *two[:2]):
        sock.close()


async def test_a_connection_with_the_address_of_one_that_ended_is_another_caller(rig):
    """At once, not when it is looked for those that have ended."""
    ours, theirs, peer = rig.connect()
    first = rig.callers.worker_of(peer, SOMEBODY)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset: no TIME_WAIT
    source_port = theirs.getsockname()[1]
    theirs.close()
    ours.close()
    again = rig.connect(source_port)
    assert again[2] == peer
    second = rig.callers.worker_of(peer, SOMEBODY)
    assert second != first and rig.left() == [first]
    for sock in again[:2]:
        sock.close()


async def test_a_caller_with_an_id_is_the_same_over_its_connections_and_a_while_longer(rig):
    one, two = rig.connect(), rig.connect()
    worker = rig.callers.worker_of(one[2], SOMEBODY, b"an id of mine")
    assert rig.callers.worker_of(two[2], SOMEBODY, b"an id of mine") == worker
    assert rig.callers.worker_of(two[2], SOMEBODY, b"another's id") != worker
    assert rig.callers.worker_of(two[2], SOMEBODY) not in (
        worker,
        rig.callers.worker_of(two[2], SOMEBODY, b"another's id"),
    )
    for sock in (*one[:2], *two[:2]):
        sock.close()
    rig.callers.look()
    rig.now += CLIENT_KEPT_S - 1
    rig.callers.look()
    assert worker not in rig.left()
    three = rig.connect()
    assert rig.callers.worker_of(three[2], SOMEBODY, b"an id of mine") == worker
    rig.now += CLIENT_KEPT_S
    rig.callers.look()
    assert worker not in rig.left(), "it has a connection"
    for sock in three[:2]:
        sock.close()
    rig.callers.look()
    rig.now += CLIENT_KEPT_S
    rig.callers.look()
    assert sorted(rig.left()) == sorted(rig.joined()), "all of them have ended"
    assert repr(rig.callers) == "TcpCallers(0 callers, 0 connections)"


async def test_callers_are_bounded(rig, monkeypatch):
    monkeypatch.setattr(callers_module, "CALLERS_MAX", 2)
    one, two, three = rig.connect(), rig.connect(), rig.connect()
    for _, _, peer in (one, two):
        rig.callers.worker_of(peer, SOMEBODY)
    with pytest.raises(Exhausted, match="2 callers over TCP are known already"):
        rig.callers.worker_of(three[2], SOMEBODY)
    two[0].close()
    assert rig.callers.worker_of(three[2], SOMEBODY), "whoever has ended makes room"
    for sock in (*one[:2], two[1], *three[:2]):
        sock.close()


async def test_ids_of_one_connection_are_bounded_and_checked(rig):
    ours, theirs, peer = rig.connect()
    for number in range(CALLERS_PER_CONNECTION_MAX):
        rig.callers.worker_of(peer, SOMEBODY, b"id %5d" % number)
    with pytest.raises(Exhausted, match="64 ids were sent on this connection already"):
        rig.callers.worker_of(peer, SOMEBODY, b"one more id")
    assert rig.callers.worker_of(peer, SOMEBODY, b"id     3") == rig.joined()[3]
    for client in (b"short", b"x" * 65):
        with pytest.raises(BadRequest, match=f"{CLIENT_METADATA}={len(client)} bytes: has 8 to 64 bytes"):
            rig.callers.worker_of(peer, SOMEBODY, client)
    ours.close()
    theirs.close()


async def test_connections_over_ipv6(rig):
    try:
        other = Rig(socket.AF_INET6, "::1")
    except OSError:
        pytest.skip("no IPv6 here")
    ours, theirs, peer = other.connect()
    assert "%5B::1%5D" in peer
    assert other.callers.worker_of(peer, SOMEBODY) == -2
    other.close()
    ours.close()
    theirs.close()


async def test_looking_for_a_connection_closes_nobody_s_descriptors(rig):
    ours, theirs, peer = rig.connect()
    pipe = os.pipe()
    before = set(os.listdir("/proc/self/fd"))
    rig.callers.worker_of(peer, SOMEBODY)
    assert before <= set(os.listdir("/proc/self/fd")) | {str(max(map(int, before)))}
    os.write(pipe[1], b"x")
    assert os.read(pipe[0], 1) == b"x"
    theirs.sendall(b"y")
    assert ours.recv(1) == b"y"
    for fd in pipe:
        os.close(fd)
    ours.close()
    theirs.close()
