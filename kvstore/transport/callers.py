"""Who calls over TCP: a worker for each connection, so that what one caller opens, holds and numbers is no other's.

    connection   without an id, a caller is its connection, and ends with it
    id           a caller that sends `kvstore-client-bin` (CLIENT_METADATA) is the same over all of its connections, and
                 ends CLIENT_KEPT_S after the last of them: a request that is repeated on a new connection gets its
                 first answer; it is so for one identity (`identities.py`), and the same id sent by another is another

gRPC tells the peer's address alone, which another connection may have a moment later, and never that a connection has
ended. The kernel knows: each connection is a socket of this process, and its inode is no other's while it is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import unquote

from kvstore.core.events import Event, WorkerJoined, WorkerLeft
from kvstore.errors import BadRequest, Exhausted, Unavailable
from kvstore.server.logs import fields
from kvstore.transport.identities import Identity
from kvstore.transport.roles import Role
from kvstore.types import WorkerId

log = logging.getLogger(__name__)

CLIENT_METADATA = "kvstore-client-bin"
"""Request metadata of a caller over TCP: an id that it chose for itself, at random."""
CLIENT_BYTES_MIN = 8
CLIENT_BYTES_MAX = 64
CLIENT_KEPT_S = 60.0
"""How long a caller with an id may be without a connection."""
CALLERS_MAX = 1_024
CALLERS_PER_CONNECTION_MAX = 64
LOOK_S = 1.0
"""How often it is looked whether connections have ended."""
SOCKETS = "/proc/self/fd"

Address = tuple[str, int]
Key = tuple[Identity, bytes]
"""Who somebody is by proof, and by its own id."""


class Inbox(Protocol):
    """What this needs of `Loop`."""

    def post(self, event: Event) -> None: ...


@dataclass(slots=True, eq=False)
class _Caller:
    worker: WorkerId
    identity: Identity
    client: bytes
    """Empty: it is its connection."""
    connections: set[str] = field(default_factory=set)
    ends_at: float = 0.0
    """When it has no connection."""


@dataclass(slots=True, eq=False)
class _Connection:
    fd: int
    inode: int
    callers: dict[Key, _Caller] = field(default_factory=dict)

    def is_open(self) -> bool:
        try:
            return os.fstat(self.fd).st_ino == self.inode
        except OSError:
            return False


class TcpCallers:
    """Every method is called on the asyncio thread, and none waits."""

    def __init__(
        self,
        inbox: Inbox,
        new_worker: Callable[[], WorkerId],
        *,
        port: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`port` is the daemon's own."""
        self._inbox = inbox
        self._new_worker = new_worker
        self._port = port
        self._clock = clock
        self._connections: dict[str, _Connection] = {}
        """By the peer's address, as gRPC writes it."""
        self._clients: dict[Key, _Caller] = {}
        """Those that have an id."""
        self._workers: dict[WorkerId, _Caller] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"TcpCallers({len(self._workers)} callers, {len(self._connections)} connections)"

    def __contains__(self, worker: WorkerId) -> bool:
        return worker in self._workers

    def identity_of(self, worker: WorkerId) -> Identity:
        return self._workers[worker].identity

    def who(self, worker: WorkerId) -> dict[str, object]:
        """For the audit log; empty: it is none of these."""
        caller = self._workers.get(worker)
        if caller is None:
            return {}
        return {"identity": caller.identity.name, "peer": ", ".join(sorted(caller.connections))}

    def worker_of(self, peer: str, identity: Identity, client: bytes = b"") -> WorkerId:
        """The worker that stands for who calls from `peer` (gRPC's "ipv4:127.0.0.1:50001"). Raises BadRequest,
        Exhausted, Unavailable."""
        if client and not CLIENT_BYTES_MIN <= len(client) <= CLIENT_BYTES_MAX:
            raise BadRequest(
                f"has {CLIENT_BYTES_MIN} to {CLIENT_BYTES_MAX} bytes",
                field=CLIENT_METADATA,
                value=f"{len(client)} bytes",
                remedy="send 16 random bytes, the same with each call, or none",
            )
        connection = self._connection(peer)
        key = (identity.lasting, client)
        caller = connection.callers.get(key)
        if caller is None:
            if len(connection.callers) >= CALLERS_PER_CONNECTION_MAX:
                raise Exhausted(
                    f"{CALLERS_PER_CONNECTION_MAX} ids were sent on this connection already",
                    field=CLIENT_METADATA,
                    remedy="send the same id with each call",
                )
            caller = self._clients.get(key) or self._join(identity, client, peer)
            connection.callers[key] = caller
            caller.connections.add(peer)
        caller.identity = identity  # with the expiry of the newest token
        return caller.worker

    def _connection(self, peer: str) -> _Connection:
        connection = self._connections.get(peer)
        if connection is not None and connection.is_open():
            return connection
        if connection is not None:  # its address is another connection's now
            self._ended(peer, connection)
        found = _find(peer, self._port)
        if found is None:
            raise Unavailable("the connection has ended", field="peer", value=peer, remedy="connect again")
        connection = self._connections[peer] = _Connection(*found)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)
        return connection

    def _join(self, identity: Identity, client: bytes, peer: str) -> _Caller:
        if len(self._workers) >= CALLERS_MAX:
            self.look()
        if len(self._workers) >= CALLERS_MAX:
            raise Exhausted(
                f"{CALLERS_MAX} callers over TCP are known already",
                remedy=f"close connections, and try again after {CLIENT_KEPT_S:.0f} s",
            )
        caller = _Caller(self._new_worker(), identity, client)
        self._workers[caller.worker] = caller
        if client:
            self._clients[identity.lasting, client] = caller
        # Posted before whatever the caller asks, so it reaches the core earlier.
        admin = Role.OPERATOR in identity.roles
        joined = WorkerJoined(
            caller.worker, tenant=identity.tenant, engine_group="", admin=admin, remote=True
        )
        self._inbox.post(joined)
        log.info(
            "a TCP caller joined",
            extra=fields(worker=caller.worker, identity=identity.name, peer=peer, client=client.hex()),
        )
        return caller

    # -------------------------------------------------------------------------------------------------------- ending

    def _look(self) -> None:
        self._timer = None
        self.look()
        if self._workers or self._connections:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def look(self) -> None:
        """Let go of the callers whose connections have ended."""
        for peer, connection in list(self._connections.items()):
            if not connection.is_open():
                self._ended(peer, connection)
        now = self._clock()
        for caller in list(self._clients.values()):
            if not caller.connections and caller.ends_at <= now:
                self._leave(caller)

    def drop(self, still: Callable[[Identity], bool]) -> None:
        """Let go of those who would not come in any more: their leases end, and what they have going fails."""
        for caller in list(self._workers.values()):
            if not still(caller.identity):
                for peer in caller.connections:
                    self._connections[peer].callers.pop((caller.identity.lasting, caller.client), None)
                self._leave(caller)

    def _ended(self, peer: str, connection: _Connection) -> None:
        del self._connections[peer]
        for caller in connection.callers.values():
            caller.connections.discard(peer)
            caller.ends_at = self._clock() + CLIENT_KEPT_S
            if not caller.client:
                self._leave(caller)

    def _leave(self, caller: _Caller) -> None:
        """Its leases end, and what it was answered is forgotten."""
        del self._workers[caller.worker]
        self._clients.pop((caller.identity.lasting, caller.client), None)
        self._inbox.post(WorkerLeft(caller.worker))
        log.info("a TCP caller left", extra=fields(worker=caller.worker))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _find(peer: str, port: int) -> tuple[int, int] | None:
    """Descriptor and inode of this process' end of the connection from `peer` to `port`."""
    wanted = _address_of(peer)
    for fd in map(int, os.listdir(SOCKETS)):
        with contextlib.suppress(OSError, ValueError), _borrowed(fd) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockname()[1] == port:
                host, number = sock.getpeername()[:2]
                if (_plain(host), number) == wanted:
                    return fd, os.fstat(fd).st_ino
    return None


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """Somebody else's descriptor as a socket, to be asked and left alone. Raises OSError when it is none."""
    sock = socket.socket(fileno=fd)
    try:
        yield sock
    finally:
        sock.detach()


def _address_of(peer: str) -> Address:
    """gRPC's "ipv6:%5B::1%5D:50001", say."""
    host, _, port = unquote(peer.partition(":")[2]).rpartition(":")
    return _plain(host.removeprefix("[").removesuffix("]")), int(port)


def _plain(host: str) -> str:
    """One spelling of each address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
