"""Three nodes with addresses of their own, in network namespaces, over TLS: KV follows its conversation, and a network
that is cut or crawls costs misses, never a hang."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client import connect

from ..e2e.certificates import Authority, write
from ..e2e.test_fleet import Member
from ..fleet_tools import BOUND_S, SECRET, RedisServer, eventually, needs_redis

TTL_MS = 2_000
ENTER = """
import ctypes, os
_fd = os.open("/run/netns/{name}", os.O_RDONLY)
assert ctypes.CDLL(None, use_errno=True).setns(_fd, 0x40000000) == 0, ctypes.get_errno()
os.close(_fd)
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Network:
    """A bridge in our namespace, and a namespace with an address for each node."""

    def __init__(self) -> None:
        tag = f"{os.getpid() % 100_000:x}"
        self._bridge = f"kvb{tag}"
        self._tag = tag
        self.net = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self.names: list[str] = []
        ip("link", "add", self._bridge, "type", "bridge")
        ip("addr", "add", f"{self.net}.1/24", "dev", self._bridge)
        ip("link", "set", self._bridge, "up")

    @property
    def gateway(self) -> str:
        return f"{self.net}.1"

    def add(self, node: str) -> tuple[str, str]:
        """(name of the namespace, its address)"""
        name, number = f"kvs{self._tag}{node}", len(self.names) + 2
        ip("netns", "add", name)
        self.names.append(name)
        outer, inner = f"kv{self._tag}{node}0", f"kv{self._tag}{node}1"
        ip("link", "add", outer, "type", "veth", "peer", "name", inner)
        ip("link", "set", inner, "netns", name)
        ip("link", "set", outer, "master", self._bridge, "up")
        address = f"{self.net}.{number}"
        ip("-n", name, "addr", "add", f"{address}/24", "dev", inner)
        ip("-n", name, "link", "set", inner, "up")
        ip("-n", name, "link", "set", "lo", "up")
        return name, address

    def cut(self, node: str, *, up: bool = False) -> None:
        """Nothing that is sent to this node arrives, and nobody is told."""
        ip("link", "set", f"kv{self._tag}{node}0", "up" if up else "down")

    def crawl(self, node: str) -> None:
        """8 kbit a second towards the bridge."""
        shaping = ("root", "tbf", "rate", "8kbit", "burst", "2kb", "latency", "500ms")
        device = f"kv{self._tag}{node}1"
        ip("netns", "exec", f"kvs{self._tag}{node}", "tc", "qdisc", "add", "dev", device, *shaping)

    def close(self) -> None:
        for name in self.names:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)
            # Sockets that nobody reads any more may keep a namespace for minutes; its link goes now.
            with suppress(subprocess.CalledProcessError):
                ip("link", "del", f"kv{name.removeprefix('kvs')}0")
        with suppress(subprocess.CalledProcessError):
            ip("link", "del", self._bridge)


@pytest.fixture(scope="session")
def machine_refuses() -> dict[str, str]:
    """What this machine's kernel or its rights do not let a test have, and what it said. A node is made for nothing, so
    that what fails in a test afterwards is a failure of the test."""
    try:
        tried = Network()
    except (OSError, subprocess.CalledProcessError) as error:
        return {"network": reason(error)}
    try:
        tried.add("x")
        try:
            tried.crawl("x")
        except (OSError, subprocess.CalledProcessError) as error:
            return {"crawl": reason(error)}
        return {}
    except (OSError, subprocess.CalledProcessError) as error:
        return {"network": reason(error)}
    finally:
        tried.close()


def reason(error: OSError | subprocess.CalledProcessError) -> str:
    said = error.stderr.decode().strip() if isinstance(error, subprocess.CalledProcessError) else ""
    return f"{error}: {said}"


@pytest.fixture
def network(machine_refuses: dict[str, str]) -> Iterator[Network]:
    if "network" in machine_refuses:
        pytest.skip(
            f"needs root, ip, bridges and namespaces with links of their own: {machine_refuses['network']}"
        )
    made = Network()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def join(
    network: Network, start_daemon: Callable[..., Any], run_dir: Path, tmp_path: Path
) -> Iterator[Callable[..., Member]]:
    pytest.importorskip("redis")
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    authority = Authority("the fleet's authority")
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    redis = RedisServer(tmp_path, "--bind", network.gateway, "127.0.0.1", "--protected-mode", "no")
    with ExitStack() as ends:
        ends.callback(redis.stop)

        def start(node: str, **settings: Any) -> Member:
            name, address = network.add(node)
            certificate, key = write(tmp_path, node, authority.issue(node))
            daemon = start_daemon(
                prelude=ENTER.format(name=name),
                **{
                    "run_dir": run_dir.parent / node,
                    "node_name": node,
                    "registry_url": f"redis://{network.gateway}:{redis.port}/0",
                    "registry_ttl_ms": TTL_MS,
                    "fleet_secret_file": secret,
                    "peer_address": f"{address}:7071",
                    "peer_certificate": certificate,
                    "peer_key": key,
                    "peer_ca": tmp_path / "ca.pem",
                    "peer_deadline_ms": 20_000,
                    "remote_deadline_ms": 30_000,
                    **settings,
                },
            )
            client = ends.enter_context(connect(str(daemon.run_dir), timeout_s=BOUND_S))
            return Member(daemon, node, client)

        yield start


@needs_redis
def test_a_conversation_moves_over_the_network(join: Callable[..., Member]) -> None:
    a, b, c = join("a"), join("b"), join("c")
    a.turn(64 * 6, chunks=6)
    keys = a.space.keys(np.arange(64 * 6))
    eventually(lambda: b.knows(keys), "b learns what a holds")
    b.turn(64 * 8, chunks=8)
    assert (a.computed, b.computed) == (6, 2)
    a.daemon.kill()
    longer = b.space.keys(np.arange(64 * 8))
    eventually(lambda: c.knows(longer), "c learns what b holds")
    c.turn(64 * 9, chunks=9)
    assert c.computed == 1


@needs_redis
@pytest.mark.parametrize("fault", ["cut", "crawl"])
def test_a_network_that_fails_costs_misses(
    join: Callable[..., Member], network: Network, machine_refuses: dict[str, str], fault: str
) -> None:
    if fault in machine_refuses:
        pytest.skip(f"needs tc and a kernel that shapes traffic: {machine_refuses[fault]}")
    a, b = join("a"), join("b", peer_deadline_ms=500)
    a.turn(64 * 6, chunks=6)
    keys = a.space.keys(np.arange(64 * 6))
    eventually(lambda: b.knows(keys), "b learns what a holds")
    if fault == "cut":
        network.cut("a")
    else:
        network.crawl("a")
    began = time.monotonic()
    b.turn(64 * 6, chunks=6)
    assert time.monotonic() - began < BOUND_S
    assert b.computed == 6, "bytes came by a network that carries none"
    a.turn(64 * 7, chunks=7)  # cut off, and serves on
    assert a.computed == 7
    if fault == "cut":
        network.cut("a", up=True)
        last = a.space.keys(np.arange(64 * 7))
        eventually(lambda: b.knows(last) and b.load(last) == 7, "b reads from a again")
