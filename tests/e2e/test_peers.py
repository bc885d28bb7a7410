"""Reads from a peer's DRAM: what comes is what was committed there, or a miss; whatever the peer does."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from kvstore.client import Namespace, connect
from kvstore.core.namespaces import chunk_salt
from kvstore.fleet import frames
from kvstore.fleet.client import PeerReads, Read, Result, Wanted
from kvstore.fleet.door import PeerDoor, PeerTls
from kvstore.fleet.frames import Answer, ChunkHead, Connection, Kind, PeerError
from kvstore.fleet.registry import Node
from kvstore.fleet.secret import FleetSecret
from kvstore.keys import ROOT
from kvstore.layout import GroupSpec, LayerSlice, NamespaceSpec
from kvstore.tiers.remote.records import Description
from kvstore.types import ChunkKey

from ..fleet_tools import BOUND_S, SECRET, eventually
from .certificates import Authority, write

SHARD = 256 << 10
SPEC = NamespaceSpec(
    model="tiny",
    weights_digest=b"w" * 32,
    layout_fingerprint="test:bytes",
    chunk_tokens=64,
    groups=(GroupSpec("full", shard_bytes=SHARD, shard_count=2, layers=(LayerSlice(0, 0, SHARD),)),),
)
FLEET = FleetSecret(SECRET.encode())


def content(key: bytes, shard: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng([*key, shard]).integers(0, 256, SHARD, dtype=np.uint8)


def save(space: Namespace, keys: list[ChunkKey]) -> None:
    """In parts that fit in staging memory."""
    for start in range(0, len(keys), 8):
        part = keys[start : start + 8]
        with space.write(part, parent=keys[start - 1] if start else ROOT) as batch:
            assert len(batch.granted) == len(part)
            for index in batch.granted:
                for shard in batch.shards:
                    batch.buffer(index, shard)[:] = content(part[index], shard)
            assert batch.commit().ok


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    return path


@pytest.fixture
def peer(start_daemon: Callable[..., Any], secret_file: Path) -> Any:
    return start_daemon(
        fleet_secret_file=secret_file, peer_address="127.0.0.1:0", peer_plaintext=True, node_name="a"
    )


def node_of(daemon: Any, name: str = "a") -> Node:
    line = daemon.wait_for("this node is one of a fleet")
    return Node(name, b"b" * 16, line["serves"])


@pytest.fixture
def space(peer: Any) -> Iterator[Namespace]:
    with connect(str(peer.run_dir), timeout_s=BOUND_S) as client:
        yield client.open(SPEC)


@pytest.fixture
def reads() -> Iterator[PeerReads]:
    made = PeerReads(PeerDoor(FLEET, "b", None), threads=2, bytes_per_s=0)
    yield made
    made.close(BOUND_S)


class Got:
    def __init__(self, chunks: int) -> None:
        self.memory = np.zeros((chunks, 2, SHARD), np.uint8)
        self.results: list[Result] = []
        self.why = ""
        self._done = threading.Event()

    def done(self, results: Any, described: Any, why: str) -> None:
        assert not self._done.is_set(), "answered twice"
        self.results, self.why = list(results), why
        for result, told, shards in zip(results, described, self.memory, strict=True):
            if result is Result.OK:
                sums = [xxhash.xxh3_64_intdigest(shard) for shard in shards]
                assert [each.checksum for each in told] == sums
                assert {each.token_count for each in told} == {64}
        self._done.set()

    def wait(self) -> list[Result]:
        assert self._done.wait(BOUND_S), "never answered"
        return self.results


def read(
    reads: PeerReads, node: Node, keys: list[ChunkKey], *, salt: bytes, deadline_s: float = BOUND_S
) -> Got:
    got = Got(len(keys))
    wanted = [Wanted(key, list(shards)) for key, shards in zip(keys, got.memory, strict=True)]
    deadline = time.monotonic() + deadline_s
    reads.submit(Read(node, FLEET.namespace(salt), wanted, deadline, got.done))
    got.wait()
    return got


def assert_whole(got: Got, keys: list[ChunkKey]) -> None:
    for key, shards in zip(keys, got.memory, strict=False):
        for number, shard in enumerate(shards):
            np.testing.assert_array_equal(shard, content(key, number))


def test_what_a_peer_committed_is_read(peer: Any, space: Namespace, reads: PeerReads) -> None:
    keys = space.keys(np.arange(64 * 20))
    save(space, keys)
    missing = ChunkKey(b"m" * 32)
    got = read(reads, node_of(peer), [*keys, missing], salt=space.salt)
    assert got.results == [Result.OK] * 20 + [Result.MISS]
    assert_whole(got, keys)
    node = node_of(peer)
    assert reads.lacked(node, FLEET.namespace(space.salt), missing)
    assert not reads.lacked(node, FLEET.namespace(space.salt), keys[0])
    assert reads.speed(node) > 0


def test_many_connections_at_once(peer: Any, space: Namespace) -> None:
    """Bytes of several reads never mix, and no lease is left."""
    keys = space.keys(np.arange(64 * 24))
    save(space, keys)
    many = PeerReads(PeerDoor(FLEET, "b", None), threads=6, bytes_per_s=0)
    try:
        node, gots = node_of(peer), []
        for turn in range(24):
            part = [keys[(turn * 5 + step) % 24] for step in range(6)]
            got = Got(6)
            wanted = [Wanted(key, list(shards)) for key, shards in zip(part, got.memory, strict=True)]
            many.submit(Read(node, FLEET.namespace(space.salt), wanted, time.monotonic() + BOUND_S, got.done))
            gots.append((part, got))
        for part, got in gots:
            assert got.wait() == [Result.OK] * 6, got.why
            assert_whole(got, part)
    finally:
        many.close(BOUND_S)
    eventually(lambda: leases(peer) == 0, "no lease is left")


def leases(daemon: Any) -> float:
    with connect(str(daemon.run_dir), timeout_s=BOUND_S) as client:
        return sum(row.pinned_bytes for row in client.stats().namespaces)


def test_what_is_on_ssd_alone_is_brought_and_sent(
    start_daemon: Callable[..., Any], secret_file: Path, tmp_path: Path, reads: PeerReads
) -> None:
    daemon = start_daemon(
        fleet_secret_file=secret_file,
        peer_address="127.0.0.1:0",
        peer_plaintext=True,
        node_name="a",
        ssd_dir=tmp_path / "ssd",
        ssd_bytes=1 << 30,
        ssd_slab_bytes=16 << 20,
    )
    with connect(str(daemon.run_dir), timeout_s=BOUND_S) as client:
        space = client.open(SPEC)
        keys = space.keys(np.arange(64 * 200))
        for start in range(0, 200, 8):
            save(space, keys[start : start + 8])
            eventually(lambda: client.stats().ssd.to_store < 20, "the SSD keeps up")
        eventually(lambda: client.stats().namespaces[0].cold_chunks > 40, "something is on SSD alone")
        for start in range(0, 16, 8):
            part = keys[start : start + 8]
            got = read(reads, node_of(daemon), part, salt=space.salt)
            assert got.results == [Result.OK] * 8, got.why
            assert_whole(got, part)


def test_tenants_and_epochs_are_apart(peer: Any, space: Namespace, reads: PeerReads) -> None:
    keys = space.keys(np.arange(64 * 2))
    save(space, keys)
    node = node_of(peer)
    stranger = replace(SPEC, weights_epoch=1)
    for salt in (
        chunk_salt(SPEC.digest("another tenant"), 0),
        chunk_salt(stranger.digest("default"), 1),
    ):
        assert read(reads, node, keys, salt=salt).results == [Result.MISS] * 2
    assert read(reads, node, keys, salt=space.salt).results == [Result.OK] * 2
    with connect(str(peer.run_dir), timeout_s=BOUND_S) as client:
        client.open(stranger)  # the weights were reloaded: the old epoch is never served
    assert read(reads, node, keys, salt=space.salt).results == [Result.MISS] * 2


# ------------------------------------------------------------------------------------------------- who may come in


@pytest.fixture
def authority() -> Authority:
    return Authority("the fleet's authority")


def tls_of(
    folder: Path, authority: Authority, name: str, *, by: Authority | None = None, **how: Any
) -> PeerTls:
    ca = folder / "ca.pem"
    ca.write_bytes(authority.pem)
    certificate, key = write(folder, name, (by or authority).issue(name, **how))
    return PeerTls(str(certificate), str(key), str(ca))


def test_with_tls_only_nodes_of_the_authority_talk(
    start_daemon: Callable[..., Any], secret_file: Path, tmp_path: Path, authority: Authority
) -> None:
    ours = tls_of(tmp_path, authority, "a")
    daemon = start_daemon(
        fleet_secret_file=secret_file,
        peer_address="127.0.0.1:0",
        node_name="a",
        peer_certificate=ours.certificate,
        peer_key=ours.key,
        peer_ca=ours.authority,
    )
    node = node_of(daemon)
    with connect(str(daemon.run_dir), timeout_s=BOUND_S) as client:
        space = client.open(SPEC)
        keys = space.keys(np.arange(64 * 3))
        save(space, keys)
        good = PeerReads(PeerDoor(FLEET, "b", tls_of(tmp_path, authority, "b")), threads=1, bytes_per_s=0)
        try:
            got = read(good, node, keys, salt=space.salt)
            assert got.results == [Result.OK] * 3, got.why
            assert_whole(got, keys)
        finally:
            good.close(BOUND_S)
        strangers = Authority("strangers")
        wrong = {
            "plaintext": PeerDoor(FLEET, "b", None),
            "another authority": PeerDoor(FLEET, "b", tls_of(tmp_path, authority, "c", by=strangers)),
            "expired": PeerDoor(FLEET, "b", tls_of(tmp_path, authority, "d", days=-1)),
            "another secret": PeerDoor(
                FleetSecret(b"not the secret of the fleet"), "b", tls_of(tmp_path, authority, "e")
            ),
        }
        for what, door in wrong.items():
            assert is_refused(door, node), what
        # Who answers there is not the node that was meant
        assert is_refused(PeerDoor(FLEET, "b", tls_of(tmp_path, authority, "f")), replace(node, name="z"))


def is_refused(door: PeerDoor, node: Node) -> bool:
    try:
        door.connect(node.address, node.name, BOUND_S, time.monotonic() + BOUND_S).close()
    except PeerError:
        return True
    return False


def test_without_the_secret_nobody_comes_in(peer: Any) -> None:
    node = node_of(peer)
    assert is_refused(PeerDoor(FleetSecret(b"not the secret of the fleet"), "b", None), node)
    assert not is_refused(PeerDoor(FLEET, "b", None), node)
    host, _, port = node.address.rpartition(":")
    for sent in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), frames.HEADER.pack(b"KVPR", 1, 5, 0, 0, 1)):
        with socket.create_connection((host, int(port)), BOUND_S) as raw:
            raw.sendall(sent)
            with suppress(ConnectionResetError):
                assert raw.recv(4096) == b"", "it answered somebody who said no HELLO"
    # A READ before the proof
    with socket.create_connection((host, int(port)), BOUND_S) as raw:
        until = time.monotonic() + BOUND_S
        frames.send(raw, Kind.HELLO, 0, os.urandom(32) + b"b", until)
        assert frames.receive(raw, until)[0] is Kind.WELCOME
        body = frames.encode_read(b"n" * 32, [ChunkKey(b"k")], 1000)
        frames.send(raw, Kind.READ, 1, body, until)
        with pytest.raises(PeerError):
            frames.receive(raw, until)


def test_settings_that_would_show_kv_are_refused(launch: Callable[..., Any], secret_file: Path) -> None:
    for settings, field in (
        ({"peer_address": "0.0.0.0:0"}, "peer_address"),
        ({"peer_address": "10.1.2.3:7000", "peer_plaintext": True}, "peer_address"),
        ({"peer_address": "127.0.0.1:0"}, "peer_address"),
        ({"registry_url": "http://x"}, "registry_url"),
        ({"peer_address": "127.0.0.1:0", "peer_certificate": "x"}, "peer_key"),
    ):
        daemon = launch(fleet_secret_file=secret_file, **settings)
        assert daemon.exit_status() != 0
        assert any(field in line for line in daemon.refusals), daemon.refusals
    daemon = launch(peer_address="127.0.0.1:0", peer_plaintext=True)
    assert daemon.exit_status() != 0 and "fleet_secret_file" in daemon.refusals[0]


# ------------------------------------------------------------------------------------------------- peers that misbehave


@contextmanager
def acted(script: Callable[[Connection, bytes, list[ChunkKey], int], None]) -> Iterator[Node]:
    """A node that knows the secret, and answers each READ as `script` does."""
    listener = socket.create_server(("127.0.0.1", 0))
    door = PeerDoor(FLEET, "evil", None)
    ended = threading.Event()

    def serve(raw: socket.socket) -> None:
        try:
            until = time.monotonic() + BOUND_S
            connection, _ = door.accept(raw, BOUND_S, until)
            with connection:
                while not ended.is_set():
                    _, number, body = frames.receive(connection, until)
                    namespace, keys, _ = frames.decode_read(body)
                    script(connection, namespace, keys, number)
        except (PeerError, OSError):
            pass

    def accept() -> None:
        while not ended.is_set():
            try:
                raw, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(raw,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield Node("evil", b"e" * 16, f"127.0.0.1:{listener.getsockname()[1]}")
    finally:
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def chunk(
    connection: Connection,
    number: int,
    namespace: bytes,
    key: ChunkKey,
    *,
    index: int = 0,
    shards: tuple[tuple[int, int], ...] | None = None,
    data: bytes | None = None,
    makers: tuple[bytes, ...] = (),
) -> None:
    """As an honest peer sends it, but for what is said."""
    bytes_of = [content(key, shard).tobytes() for shard in range(2)]
    if shards is None:
        shards = tuple((len(each), xxhash.xxh3_64_intdigest(each)) for each in bytes_of)
    until = time.monotonic() + BOUND_S
    described = tuple(
        Description(namespace, key, shard, len(shards), 64, False, makers[shard : shard + 1], size, checksum)
        for shard, (size, checksum) in enumerate(shards)
    )
    head = ChunkHead(index, Answer.HIT, described)
    frames.send(connection, Kind.CHUNK, number, frames.encode_chunk(head), until)
    frames.send_all(connection, b"".join(bytes_of) if data is None else data, until)


def end(connection: Connection, number: int) -> None:
    frames.send(connection, Kind.END, number, b"", time.monotonic() + BOUND_S)


def flipped(connection: Connection, namespace: bytes, keys: list[ChunkKey], number: int) -> None:
    data = bytearray(b"".join(content(keys[0], shard).tobytes() for shard in range(2)))
    data[SHARD + 1] ^= 1
    chunk(connection, number, namespace, keys[0], data=bytes(data))
    end(connection, number)


def swapped(connection: Connection, namespace: bytes, keys: list[ChunkKey], number: int) -> None:
    chunk(connection, number, namespace, ChunkKey(b"another key"))
    end(connection, number)


def anothers(connection: Connection, namespace: bytes, keys: list[ChunkKey], number: int) -> None:
    chunk(connection, number, b"n" * 32, keys[0])
    end(connection, number)


def shorter(connection: Connection, namespace: bytes, keys: list[ChunkKey], number: int) -> None:
    chunk(connection, number, namespace, keys[0], shards=((16, 0), (16, 0)), data=bytes(32))
    end(connection, number)


def longer(connection: Connection, namespace: bytes, keys: list[ChunkKey], number: int) -> None:
    chunk(connection, number, namespace, keys[0], shards=((1 << 40, 0), (1 << 40, 0)))


def two_makers(connection: Connection, namespace: bytes, keys: list[ChunkKey], number: int) -> None:
    chunk(connection, number, namespace, keys[0], makers=(b"a" * 16, b"b" * 16))
    end(connection, number)


def cut(connection: Connection, namespace: bytes, keys: list[ChunkKey], number: int) -> None:
    chunk(connection, number, namespace, keys[0], data=bytes(SHARD))
    connection.shutdown(socket.SHUT_RDWR)


def without_end(connection: Connection, namespace: bytes, keys: list[ChunkKey], number: int) -> None:
    """What the peer would send if the slot was given away while it was sent: all bytes, and then it hangs up."""
    chunk(connection, number, namespace, keys[0])
    connection.shutdown(socket.SHUT_RDWR)


def older(connection: Connection, namespace: bytes, keys: list[ChunkKey], number: int) -> None:
    chunk(connection, number - 1, namespace, keys[0])


def garbage(connection: Connection, namespace: bytes, keys: list[ChunkKey], number: int) -> None:
    connection.sendall(os.urandom(64))


@pytest.mark.parametrize(
    "script", [flipped, swapped, anothers, shorter, longer, two_makers, cut, without_end, older, garbage]
)
def test_a_lying_peer_costs_a_miss(script: Any, reads: PeerReads) -> None:
    with acted(script) as node:
        got = read(reads, node, [ChunkKey(b"k" * 32)], salt=b"s" * 32)
        assert got.results in ([Result.FAILED], [Result.CORRUPT])
        assert got.why


def test_of_what_came_before_a_lie_all_but_the_last_counts(reads: PeerReads) -> None:
    def script(connection: Connection, namespace: bytes, keys: list[ChunkKey], number: int) -> None:
        for index in range(3):
            chunk(connection, number, namespace, keys[index], index=index)
        garbage(connection, namespace, keys, number)

    keys = [ChunkKey(bytes([n]) * 32) for n in range(5)]
    with acted(script) as node:
        got = read(reads, node, keys, salt=b"s" * 32)
        assert got.results == [Result.OK, Result.OK, *[Result.FAILED] * 3]
        for number in range(2):
            np.testing.assert_array_equal(got.memory[number][0], content(keys[number], 0))


def test_a_slow_peer_ends_at_the_deadline_and_is_left_alone(reads: PeerReads) -> None:
    """A kilobyte a second."""
    asked: list[int] = []

    def script(connection: Connection, namespace: bytes, keys: list[ChunkKey], number: int) -> None:
        asked.append(number)
        data = content(keys[0], 0).tobytes()
        chunk(connection, number, namespace, keys[0], data=b"")
        for start in range(0, len(data), 100):
            connection.sendall(data[start : start + 100])
            time.sleep(0.1)

    key = ChunkKey(b"k" * 32)
    with acted(script) as node:
        assert reads.is_open(node)
        for _ in range(3):
            got = read(reads, node, [key], salt=b"s" * 32, deadline_s=0.3)
            assert got.results == [Result.FAILED]
            assert "slow" in got.why or "deadline" in got.why
        assert not reads.is_open(node)
        got = read(reads, node, [key], salt=b"s" * 32)
        assert got.results == [Result.FAILED] and "left alone" in got.why
        assert len(asked) == 3


def test_a_stopped_or_killed_peer_costs_the_deadline_and_comes_back(
    peer: Any, space: Namespace, reads: PeerReads
) -> None:
    keys = space.keys(np.arange(64 * 4))
    save(space, keys)
    node = node_of(peer)
    assert read(reads, node, keys, salt=space.salt).results == [Result.OK] * 4
    peer.process.send_signal(signal.SIGSTOP)
    try:
        # By a connection that is open, and by a new one that the kernel accepts
        for _ in range(2):
            got = read(reads, node, keys, salt=space.salt, deadline_s=0.5)
            assert got.results == [Result.FAILED] * 4
    finally:
        peer.process.send_signal(signal.SIGCONT)

    def back() -> bool:
        return read(reads, node, keys, salt=space.salt).results == [Result.OK] * 4

    eventually(back, "the peer is read again")
    address = node.address
    host, _, port = address.rpartition(":")
    peer.kill()
    with socket.socket() as nobody:  # and nobody else listens there
        nobody.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        nobody.bind((host, int(port)))
        assert read(reads, node, keys, salt=space.salt).results == [Result.FAILED] * 4


def test_a_peer_that_reads_nothing_holds_up_nobody_else(
    peer: Any, space: Namespace, reads: PeerReads
) -> None:
    """Its thread ends at its deadline, its pins with it."""
    keys = space.keys(np.arange(64 * 24))
    save(space, keys)
    node = node_of(peer)
    door = PeerDoor(FLEET, "c", None)
    standing = [door.connect(node.address, "a", BOUND_S, time.monotonic() + BOUND_S) for _ in range(8)]
    for connection in standing:
        body = frames.encode_read(FLEET.namespace(space.salt), keys, 1_000)
        frames.send(connection, Kind.READ, 1, body, time.monotonic() + BOUND_S)
    got = read(reads, node, keys, salt=space.salt)
    assert got.results == [Result.OK] * 24, got.why
    assert_whole(got, keys)
    eventually(lambda: leases(peer) == 0, "their pins are gone")
    for connection in standing:
        connection.close()


def test_a_cap_holds(peer: Any, space: Namespace) -> None:
    """Beyond the deadline nobody is held by it, and what it leaves no time for is a miss."""
    keys = space.keys(np.arange(64 * 8))
    save(space, keys)
    slow = PeerReads(PeerDoor(FLEET, "b", None), threads=1, bytes_per_s=1 << 20)
    try:
        got = read(slow, node_of(peer), keys, salt=space.salt, deadline_s=1.0)
        assert Result.FAILED in got.results and "cap" in got.why
    finally:
        slow.close(BOUND_S)
