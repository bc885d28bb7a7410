"""How two daemons find out that each may talk to the other: TLS both ways, then a challenge by the fleet's secret.

Certificates prove the nodes, where TLS is on; the secret proves the fleet, always. Without TLS only loopback is served,
and only if the settings say so.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import ssl
from dataclasses import dataclass

from kvstore.errors import ConfigError
from kvstore.fleet.frames import (
    NAME_BYTES_MAX,
    NONCE_BYTES,
    PROOF_BYTES,
    Connection,
    Kind,
    PeerError,
    receive,
    send,
)
from kvstore.fleet.secret import FleetSecret


@dataclass(frozen=True, slots=True)
class PeerTls:
    """PEM files. They are read anew when they changed, for connections that begin later."""

    certificate: str
    key: str
    authority: str
    """Who signs the certificates of nodes: nobody else's counts."""
    name: str = ""
    """In the certificates of all nodes; empty: in each its own name."""

    def _stamp(self) -> tuple[tuple[int, int], ...]:
        stats = [os.stat(path) for path in (self.certificate, self.key, self.authority)]
        return tuple((each.st_ino, each.st_mtime_ns) for each in stats)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self.certificate, self.key)
        context.load_verify_locations(self.authority)
        return context


class PeerDoor:
    """Contexts of TLS, and the opening of a connection."""

    def __init__(self, secret: FleetSecret, name: str, tls: PeerTls | None) -> None:
        """`name`: of this node. Raises ConfigError."""
        self._secret = secret
        self._name = name.encode()[:NAME_BYTES_MAX]
        self._tls = tls
        self._stamp: tuple[tuple[int, int], ...] = ()
        self._server: ssl.SSLContext | None = None
        self._client: ssl.SSLContext | None = None
        if tls is not None:
            self._load(tls)

    @property
    def encrypted(self) -> bool:
        return self._tls is not None

    def _load(self, tls: PeerTls) -> None:
        try:
            stamp = tls._stamp()
            if stamp == self._stamp:
                return
            server, client = tls._context(ssl.PROTOCOL_TLS_SERVER), tls._context(ssl.PROTOCOL_TLS_CLIENT)
        except (OSError, ssl.SSLError) as problem:
            if self._server is not None:
                return  # half of them are new, say: the old ones serve on
            raise ConfigError(
                f"cannot be used: {problem}",
                field="peer_certificate, peer_key, peer_ca",
                value=tls.certificate,
                remedy="name PEM files that this process can read",
            ) from None
        self._stamp, self._server, self._client = stamp, server, client

    # ----------------------------------------------------------------------------------------------------- opening

    def accept(self, raw: socket.socket, deadline_s: float, deadline: float) -> tuple[Connection, str]:
        """(connection, name of the peer), for whoever connected to us. Raises PeerError; `raw` is closed then."""
        connection: Connection = raw
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.settimeout(deadline_s)
            if self._tls is not None:
                self._load(self._tls)
                assert self._server is not None
                connection = self._server.wrap_socket(raw, server_side=True)
            name = self._challenge(connection, deadline)
        except (OSError, ValueError) as problem:
            connection.close()
            raise PeerError(f"the opening failed: {problem}") from None
        except PeerError:
            connection.close()
            raise
        return connection, name

    def _challenge(self, connection: Connection, deadline: float) -> str:
        kind, _, hello = receive(connection, deadline)
        if kind is not Kind.HELLO or not NONCE_BYTES < len(hello) <= NONCE_BYTES + NAME_BYTES_MAX:
            raise PeerError("no HELLO")
        theirs, name = hello[:NONCE_BYTES], hello[NONCE_BYTES:]
        ours = secrets.token_bytes(NONCE_BYTES)
        proof = self._secret.proof(b"server", theirs, ours, name, b"\0", self._name)
        send(connection, Kind.WELCOME, 0, ours + proof + self._name, deadline)
        kind, _, told = receive(connection, deadline)
        wanted = self._secret.proof(b"client", theirs, ours, name, b"\0", self._name)
        if kind is not Kind.PROOF or not hmac.compare_digest(told, wanted):
            raise PeerError("it does not know the fleet's secret")
        send(connection, Kind.READY, 0, b"", deadline)
        return name.decode("utf-8", "replace")

    def connect(self, address: str, node: str, deadline_s: float, deadline: float) -> Connection:
        """To the node of this name, which says that it serves at `address`. Raises PeerError."""
        host, _, port = address.rpartition(":")
        raw: socket.socket | None = None
        connection: Connection | None = None
        try:
            raw = socket.create_connection((host.strip("[]"), int(port)), timeout=deadline_s)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = raw
            if self._tls is not None:
                self._load(self._tls)
                assert self._client is not None
                connection = self._client.wrap_socket(raw, server_hostname=self._tls.name or node)
            elif not _is_loopback(raw):
                raise PeerError("without TLS only loopback is talked to")
            self._prove(connection, node.encode()[:NAME_BYTES_MAX], deadline)
        except (OSError, ValueError, OverflowError) as problem:
            _close(connection, raw)
            raise PeerError(f"no connection to {address}: {problem}") from None
        except PeerError:
            _close(connection, raw)
            raise
        return connection

    def _prove(self, connection: Connection, node: bytes, deadline: float) -> None:
        ours = secrets.token_bytes(NONCE_BYTES)
        send(connection, Kind.HELLO, 0, ours + self._name, deadline)
        kind, _, welcome = receive(connection, deadline)
        if kind is not Kind.WELCOME or len(welcome) < NONCE_BYTES + PROOF_BYTES:
            raise PeerError("no WELCOME")
        theirs, proof = welcome[:NONCE_BYTES], welcome[NONCE_BYTES : NONCE_BYTES + PROOF_BYTES]
        name = welcome[NONCE_BYTES + PROOF_BYTES :]
        wanted = self._secret.proof(b"server", ours, theirs, self._name, b"\0", name)
        if name != node or not hmac.compare_digest(proof, wanted):
            raise PeerError("another node answers there, or it does not know the fleet's secret")
        mine = self._secret.proof(b"client", ours, theirs, self._name, b"\0", name)
        send(connection, Kind.PROOF, 0, mine, deadline)
        kind, _, _ = receive(connection, deadline)
        if kind is not Kind.READY:
            raise PeerError("it does not let us in")


def _is_loopback(connection: socket.socket) -> bool:
    address = str(connection.getpeername()[0])
    return address == "::1" or address.startswith(("127.", "::ffff:127."))


def _close(*connections: Connection | None) -> None:
    for connection in connections:
        if connection is not None:
            connection.close()
