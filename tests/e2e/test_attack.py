"""Whoever has no right to come in over TCP, as a caller or as a peer: refused, logged, and told nothing that helps."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.fleet import frames
from kvstore.fleet.door import PeerDoor
from kvstore.fleet.frames import Kind, PeerError
from kvstore.fleet.server import OPENING_S, OPENINGS_MAX
from kvstore.types import ChunkKey
from kvstore.v1 import admin_pb2

from ..fleet_tools import BOUND_S, eventually
from .test_access import TEXT, TOKENS, Caller, authority, bearer, folder, tls_settings, trusting
from .test_daemon_start_stop import free_port
from .test_peers import FLEET, assert_whole, node_of, peer, read, reads, save, secret_file, space

__all__ = ["authority", "folder", "peer", "reads", "secret_file", "space"]
REFUSED = "a TCP caller was refused"
NAMES = ("prefill-account", "inference", "https://kubernetes")
"""Of the access file: no answer shows them."""


@contextmanager
def calling(address: str, token: str = "", credentials: Any = None) -> Iterator[Caller]:
    made = Caller(address, bearer(token) if token else (), credentials)
    with made.channel:
        yield made


def refusal(caller: Caller, method: str, request: Any = None) -> tuple[str, str]:
    """The status, and all that the answer says."""
    with pytest.raises(grpc.RpcError) as refused:
        caller.ask(method, request)
    error = refused.value
    said = [str(error.details()), *(f"{name}={value!r}" for name, value in error.trailing_metadata() or ())]
    return str(error.code().name), " ".join(said)


def assert_nothing_leaks(daemon: Any, said: str, *more: str) -> None:
    """Tokens are in no answer and in no line of the log, names of those who may come in are in no answer."""
    shown = said + json.dumps(daemon.lines)
    assert not [secret for secret in (*TOKENS.values(), *more) if secret in shown]
    assert not [name for name in NAMES if name in said]


# ------------------------------------------------------------------------------------------------- service accounts


@pytest.fixture
def cluster(folder: Path) -> Any:
    pytest.importorskip("jwt")
    from ..unit.test_identities import Cluster

    return Cluster(folder)


@pytest.fixture
def guarded(start_daemon: Callable[..., Any], folder: Path, cluster: Any) -> Any:
    """A daemon that lets in one service account, beside those with tokens."""
    account = (
        '[[identity]]\nname = "prefill-account"\ntenant = "alice"\nroles = ["worker"]\n'
        'service_account = "inference/prefill"\n'
    )
    (folder / "access.toml").write_text(TEXT + account + cluster.text)
    return start_daemon(tcp_address=f"127.0.0.1:{free_port()}", access_file=str(folder / "access.toml"))


def forged(cluster: Any) -> dict[str, str]:
    """Tokens that prove nothing, by what is wrong with them."""
    import base64

    import jwt
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    good = cluster.token()
    head, body, signature = good.split(".")
    claims = jwt.decode(good, options={"verify_signature": False})
    now = int(time.time())

    def part(of: Any) -> str:
        return base64.urlsafe_b64encode(json.dumps(of).encode()).rstrip(b"=").decode()

    public = cluster.key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    signed = f"{part({'alg': 'HS256', 'kid': 'k1', 'typ': 'JWT'})}.{part(claims)}"
    mac = __import__("hmac").digest(public, signed.encode(), "sha256")
    return {
        "expired": cluster.token(exp=now - 3_600),
        "of an hour to come": cluster.token(nbf=now + 3_600),
        "signed by a stranger": cluster.token(key=rsa.generate_private_key(65_537, 2_048)),
        "of another key": cluster.token(kid="k2"),
        "of another cluster": cluster.token(iss="https://elsewhere.example"),
        "for another service": cluster.token(aud=["vault"]),
        "of another account": cluster.token(sub="system:serviceaccount:inference:decode"),
        "without a signature": f"{part({'alg': 'none', 'kid': 'k1'})}.{body}.",
        "without a signature, in capitals": f"{part({'alg': 'NONE', 'kid': 'k1'})}.{body}.",
        "public key as a shared secret": (f"{signed}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"),
        "its key in its own head": (
            f"{part({'alg': 'RS256', 'jwk': cluster.keys[0], 'jku': 'http://127.0.0.1:1/'})}.{body}.{signature}"
        ),
        "claims changed": f"{head}.{part({**claims, 'exp': now + 10**6})}.{signature}",
        "signature cut": f"{head}.{body}.{signature[:-8]}",
    }


def test_forged_tokens_of_service_accounts(guarded: Any, cluster: Any) -> None:
    address = guarded.wait_for("ready")["settings"]["tcp_address"]
    with calling(address, cluster.token()) as good:
        assert good.status("Stats/GetStats") == "OK"
    for what, token in forged(cluster).items():
        with calling(address, token) as caller:
            status, said = refusal(caller, "Stats/GetStats")
            assert status == "UNAUTHENTICATED", what
            # Whoever tries learns no more than that it is not let in
            assert_nothing_leaks(guarded, said, token, token.split(".")[1])
    assert guarded.wait_for(REFUSED)["why"]
    with calling(address, cluster.token()) as good:
        assert good.status("Stats/GetStats") == "OK", "who is let in is let in after all that"


def test_a_token_is_worth_nothing_once_it_has_expired(guarded: Any, cluster: Any) -> None:
    """Also on a connection that it had opened: replaying it there or anew is the same."""
    address = guarded.wait_for("ready")["settings"]["tcp_address"]
    with calling(address, cluster.token()) as caller:
        assert caller.status("Stats/GetStats") == "OK"
        # Clocks of cluster and node may differ by a minute: that much is allowed
        stale = cluster.token(exp=int(time.time()) - 90)
        caller.metadata = bearer(stale)
        assert refusal(caller, "Stats/GetStats")[0] == "UNAUTHENTICATED"
    with calling(address, stale) as again:
        assert refusal(again, "Stats/GetStats")[0] == "UNAUTHENTICATED"


def test_wrong_roles_are_refused_by_name_of_the_call_alone(guarded: Any) -> None:
    address = guarded.wait_for("ready")["settings"]["tcp_address"]
    request = admin_pb2.PurgeRequest(tenant="alice")
    for role in ("worker", "reader", "scheduler", "bob"):
        with calling(address, TOKENS[role]) as caller:
            status, said = refusal(caller, "Admin/Purge", request)
            assert status == "PERMISSION_DENIED", role
            assert_nothing_leaks(guarded, said)
    line = guarded.wait_for("a call was refused")
    assert line["call"] == "Admin/Purge" and line["level"] == "warning"
    with calling(address, TOKENS["operator"]) as operator:
        assert operator.status("Admin/Purge", request) == "OK"


def test_another_tenants_token_opens_its_own_namespaces_alone(guarded: Any, spec: Any) -> None:
    """What it asks for of another's is answered like what is nowhere."""
    address = guarded.wait_for("ready")["settings"]["tcp_address"]
    with calling(address, TOKENS["worker"]) as alice, calling(address, TOKENS["bob"]) as bob:
        theirs = alice.open(spec)
        own = bob.open(spec)
        assert own != theirs
        said = {}
        for number in (theirs, 10_000):
            with pytest.raises(grpc.RpcError) as refused:
                bob.get(number, b"k")
            said[number] = refused.value.code(), str(refused.value.details()).replace(str(number), "N")
        assert said[theirs] == said[10_000]
        assert "alice" not in said[theirs][1]


def test_a_plain_or_broken_opening_of_a_tls_port(
    start_daemon: Callable[..., Any], folder: Path, authority: Any
) -> None:
    """It is answered by no word that is not TLS, and the next caller comes in."""
    settings = tls_settings(folder, authority)
    start_daemon(**settings)
    host, port = settings["tcp_address"].split(":")
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(32)
    for sent in (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
        b"GET / HTTP/1.1\r\nAuthorization: Bearer " + TOKENS["worker"].encode() + b"\r\n\r\n",
        hello,  # cut short
        b"\x16\x03\x00" + hello[3:],  # SSL 3
        b"\x80\x2e\x01\x00\x02",  # SSL 2
        os.urandom(2_048),
    ):
        with socket.create_connection((host, int(port)), timeout=BOUND_S) as raw:
            raw.sendall(sent)
            raw.shutdown(socket.SHUT_WR)
            answer = b""
            with suppress(ConnectionResetError):
                while part := raw.recv(4_096):
                    answer += part
            assert answer == b"" or answer[0] == 0x15, f"no alert of TLS: {answer[:40]!r}"
    with calling(settings["tcp_address"], TOKENS["worker"], trusting(authority)) as good:
        assert good.status("Stats/GetStats") == "OK"


# ------------------------------------------------------------------------------------------------------------ peers


@contextmanager
def raw_to(node: Any) -> Iterator[socket.socket]:
    host, _, port = node.address.rpartition(":")
    with socket.create_connection((host, int(port)), BOUND_S) as raw:
        yield raw


def is_shut(raw: socket.socket) -> bool:
    """The other side ends it, within the time that an opening has."""
    raw.settimeout(BOUND_S)
    try:
        while raw.recv(4_096):
            pass
    except ConnectionResetError:
        pass
    return True


def good_peer_reads(peer: Any, space: Any, reads: Any) -> None:
    keys = space.keys(list(range(64 * 2)))
    if space.match(keys).usable < 2:
        save(space, keys)
    got = read(reads, node_of(peer), keys, salt=space.salt)
    assert [result.name for result in got.results] == ["OK", "OK"], got.why
    assert_whole(got, keys)


def test_openings_that_are_cut_short(peer: Any, space: Any, reads: Any) -> None:
    """Every byte of an opening may be the last one."""
    node = node_of(peer)
    hello = frames.HEADER.size + 33
    for length in (1, frames.HEADER.size - 1, frames.HEADER.size, hello - 1):
        with raw_to(node) as raw:
            sent = captured(Kind.HELLO, os.urandom(32) + b"b")
            raw.sendall(sent[:length])
            raw.shutdown(socket.SHUT_WR)
            assert is_shut(raw)
    good_peer_reads(peer, space, reads)


def captured(kind: Kind, body: bytes, number: int = 0) -> bytes:
    """The bytes of a frame."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frames.send(ours, kind, number, body, time.monotonic() + BOUND_S)
        return theirs.recv(len(body) + frames.HEADER.size)


def test_a_proof_that_was_heard_is_worth_nothing_again(peer: Any, space: Any, reads: Any) -> None:
    """Each challenge is new: what a node of the fleet once sent, to this node or to another, opens nothing."""
    node = node_of(peer)
    until = time.monotonic() + BOUND_S
    nonce = os.urandom(32)
    heard = []
    for _ in range(2):
        with raw_to(node) as raw:
            frames.send(raw, Kind.HELLO, 0, nonce + b"b", until)
            kind, _, welcome = frames.receive(raw, until)
            assert kind is Kind.WELCOME
            heard.append(welcome[:32])
            if len(heard) == 1:
                proof = FLEET.proof(b"client", nonce, welcome[:32], b"b", b"\0", welcome[64:])
                frames.send(raw, Kind.PROOF, 0, proof, until)
                assert frames.receive(raw, until)[0] is Kind.READY
                continue
            frames.send(raw, Kind.PROOF, 0, proof, until)
            with pytest.raises(PeerError):
                frames.receive(raw, until)
    assert heard[0] != heard[1], "the challenge was the same"
    # The server's own proof sent back to it, as if it were ours
    with raw_to(node) as raw:
        frames.send(raw, Kind.HELLO, 0, nonce + b"b", until)
        _, _, welcome = frames.receive(raw, until)
        frames.send(raw, Kind.PROOF, 0, welcome[32:64], until)
        with pytest.raises(PeerError):
            frames.receive(raw, until)
    peer.wait_for("somebody was not let in as a peer")
    assert not any(FLEET.prefix in json.dumps(line) for line in peer.lines)
    good_peer_reads(peer, space, reads)


def test_huge_lengths_cost_no_memory(peer: Any, space: Any, reads: Any) -> None:
    """Before the proof, and behind it."""
    node = node_of(peer)
    for length in (1 << 31, (1 << 32) - 1, frames.BODY_BYTES_MAX + 1):
        with raw_to(node) as raw:
            raw.sendall(frames.HEADER.pack(frames.MAGIC, frames.VERSION, Kind.HELLO, 0, length, 0))
            assert is_shut(raw)
    assert peer.wait_for("somebody was not let in as a peer")["why"] == f"a body of {1 << 31} bytes"
    door = PeerDoor(FLEET, "b", None)
    for body in (
        b"n" * 32 + struct.pack("<II", 1_000, (1 << 32) - 1),
        b"n" * 32 + os.urandom(200),
        b"",
        frames.encode_read(b"n" * 32, [ChunkKey(b"k")], 1_000)[:-1],
    ):
        connection = door.connect(node.address, "a", BOUND_S, time.monotonic() + BOUND_S)
        with connection:
            frames.send(connection, Kind.READ, 1, body, time.monotonic() + BOUND_S)
            with pytest.raises(PeerError):
                frames.receive(connection, time.monotonic() + BOUND_S)
    with open(f"/proc/{peer.pid}/status") as file:
        resident_kb = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
    assert resident_kb < 2 << 20
    good_peer_reads(peer, space, reads)


def test_those_who_say_nothing_hold_up_nobody_for_longer_than_an_opening(
    peer: Any, space: Any, reads: Any
) -> None:
    """As many as openings are allowed, one byte each and then none; a peer that is in reads on meanwhile."""
    good_peer_reads(peer, space, reads)
    node = node_of(peer)
    with ExitStack() as held:
        silent = []
        for _ in range(OPENINGS_MAX + 4):
            with suppress(OSError):
                raw = held.enter_context(raw_to(node))
                raw.sendall(b"K")
                silent.append(raw)
        good_peer_reads(peer, space, reads)  # by the connection that it has
        door = PeerDoor(FLEET, "c", None)

        def comes_in() -> bool:
            try:
                door.connect(node.address, "a", OPENING_S, time.monotonic() + OPENING_S).close()
            except PeerError:
                return False
            return True

        eventually(comes_in, "they are shut, and another peer is let in")
        for raw in silent:
            assert is_shut(raw)
