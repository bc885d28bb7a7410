"""This daemon as a node of a fleet: what it tells the registry, what it serves to peers, what it reads from them.

    core's columns ── Sweep ──▶ Registry ──▶ Redis ──▶ the others' memory
    a key that is missing here ── Registry.holders ──▶ PeerReads ──▶ a peer's PeerServer ──▶ its DRAM

Nothing of it is needed to serve what is here: without a registry, without peers, the rest of the daemon goes on.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvstore.config import StoreConfig
from kvstore.errors import ConfigError
from kvstore.fleet.client import PeerReads
from kvstore.fleet.door import PeerDoor, PeerTls
from kvstore.fleet.held import Where
from kvstore.fleet.registry import Node, Registry, check_url
from kvstore.fleet.secret import FleetSecret
from kvstore.fleet.server import PeerServer
from kvstore.fleet.source import PeerSource
from kvstore.fleet.sweep import Change, Sweep
from kvstore.server.logs import fields
from kvstore.server.loop import Loop
from kvstore.tiers.base import SlotMemory
from kvstore.types import ChunkKey, NamespaceId

log = logging.getLogger(__name__)

SWEEP_S = 0.1
CLOSE_S = 1.0
NAME_BYTES_MAX = 128


def node_name(config: StoreConfig) -> str:
    """Raises ConfigError."""
    name = config.node_name or socket.gethostname()
    if len(name.encode()) > NAME_BYTES_MAX or not name.isprintable() or set(name) & set("{}"):
        raise ConfigError(
            f"must be at most {NAME_BYTES_MAX} printable characters without braces",
            field="node_name",
            value=name,
        )
    return name


def peer_address(config: StoreConfig) -> tuple[str, int] | None:
    """Where peers are served; None: nowhere. Raises ConfigError."""
    if not config.peer_address:
        return None
    host, _, port = config.peer_address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and port.isascii() and port.isdigit() and 0 <= int(port) <= 65_535):
        raise ConfigError(
            'must be "host:port" with a port from 0 to 65535', field="peer_address", value=config.peer_address
        )
    if host == "localhost":
        host = "127.0.0.1"
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(
            "needs a numeric IP address", field="peer_address", value=config.peer_address
        ) from None
    if peer_tls(config) is None and not (ip.is_loopback and config.peer_plaintext):
        raise ConfigError(
            "peers are served with TLS alone"
            if ip.is_loopback
            else "is reachable from other machines, and without TLS everybody on the way could read KV",
            field="peer_address",
            value=config.peer_address,
            remedy="set peer_certificate, peer_key and peer_ca"
            + (", or peer_plaintext for development" if ip.is_loopback else ""),
        )
    if ip.is_unspecified and not config.peer_advertise:
        raise ConfigError(
            "is no address that peers can connect to",
            field="peer_advertise",
            value="empty",
            remedy="name the address of this node that peers reach",
        )
    return str(ip), int(port)


def peer_tls(config: StoreConfig) -> PeerTls | None:
    """Raises ConfigError."""
    parts = {name: getattr(config, name) for name in ("peer_certificate", "peer_key", "peer_ca")}
    if not any(parts.values()):
        return None
    for name, value in parts.items():
        if not value:
            raise ConfigError(
                "TLS between nodes needs certificate, key and authority", field=name, value="empty"
            )
    if config.peer_plaintext:
        raise ConfigError(
            "contradicts peer_certificate", field="peer_plaintext", value=True, remedy="set one of them"
        )
    return PeerTls(config.peer_certificate, config.peer_key, config.peer_ca, config.peer_tls_name)


def check(config: StoreConfig) -> bool:
    """Whether the settings make this daemon a node of a fleet. Raises ConfigError for what cannot work."""
    if not config.registry_url and not config.peer_address:
        return False
    if not config.fleet_secret_file:
        raise ConfigError(
            "nodes of a fleet share a secret",
            field="fleet_secret_file",
            value="empty",
            remedy="openssl rand -hex 32 > FILE, the same on each node",
        )
    if config.registry_url:
        check_url(config.registry_url)
    node_name(config)
    peer_address(config)
    return True


class FleetNode:
    """On the loop's thread, but for what says otherwise."""

    def __init__(
        self,
        config: StoreConfig,
        loop: Callable[[], Loop],
        memory: SlotMemory,
        numbers: Iterator[int],
        boot: bytes,
    ) -> None:
        """`loop` is asked when the node has started. Raises ConfigError."""
        self.name = node_name(config)
        self.secret = FleetSecret.read(config.fleet_secret_file)
        self._config = config
        self._loop = loop
        self._sweep = Sweep(lambda: loop().store.state)
        self._digests: dict[NamespaceId, bytes] = {}
        self._load: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None
        self.on_changes: list[Callable[[Sequence[Change]], None]] = []
        """Told what came and went, each time that the sweep found something."""
        tls = peer_tls(config)
        self.door = PeerDoor(self.secret, self.name, tls)
        self.reads = PeerReads(self.door, threads=config.peer_threads, bytes_per_s=config.peer_bytes_per_s)
        self.server: PeerServer | None = None
        address = peer_address(config)
        if address is not None:
            self.server = PeerServer(
                loop,
                self.secret,
                self.door,
                numbers,
                address=address,
                bytes_per_s=config.peer_bytes_per_s,
                offered=self._offered,
            )
        self.registry: Registry | None = None
        self.source = PeerSource(
            self.secret,
            self.reads,
            memory,
            registry=lambda: self.registry,
            namespaces=lambda number: loop().store.state.namespaces.get(number),
            post=lambda event: loop().post(event),
            post_threadsafe=lambda event: loop().post_threadsafe(event),
            deadline_s=config.peer_deadline_ms / 1000,
        )
        self._boot = boot
        self.take: Callable[[bytes, Sequence[ChunkKey]], int] = lambda namespace, keys: 0

    def __repr__(self) -> str:
        return f"FleetNode({self.name}, {self.registry}, {self.server}, {self.reads})"

    def start(self) -> None:
        """Raises ConfigError."""
        advertised = self._config.peer_advertise or self._config.peer_address
        if self.server is not None:
            self.server.start()
            if advertised.endswith(":0"):
                advertised = f"{advertised[:-2]}:{self.server.port}"
        if self._config.registry_url:
            self.registry = Registry(
                self._config.registry_url,
                self.secret,
                Node(
                    name=self.name,
                    boot=self._boot,
                    address=advertised if self.server is not None else "",
                    started_at=time.time(),
                ),
                ttl_ms=self._config.registry_ttl_ms,
                pages_per_s=self._config.registry_pages_per_s,
                load=lambda: self._load,
                on_order=self._ordered,
            )
            self.registry.start()
        self._task = asyncio.create_task(self._run())
        log.info(
            "this node is one of a fleet",
            extra=fields(node=self.name, serves=advertised or "nobody", tls=self.door.encrypted),
        )

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self.server is not None:
            self.server.close()
        if self.registry is not None:
            self.registry.close(CLOSE_S)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.look()

    def look(self) -> None:
        """Tell what came and went since the last look."""
        changes = self._sweep.look()
        self._load = self._measure()
        if not changes:
            return
        if self.registry is not None:
            self.registry.note([(change.row, self._value(change)) for change in changes])
        for told in self.on_changes:
            told(changes)

    def _value(self, change: Change) -> int:
        if change.where is Where.NOWHERE or self.registry is None:
            return 0
        digest = self.digest(change.namespace)
        if digest is None:
            return 0
        return self.registry.hasher(digest)(change.key) | (change.where is Where.SSD)

    def digest(self, number: NamespaceId) -> bytes | None:
        """What stands for a namespace of ours between nodes; None: it has gone."""
        found = self._digests.get(number)
        if found is None:
            namespace = self._loop().store.state.namespaces.get(number)
            if namespace is None:
                return None
            found = self._digests[number] = self.secret.namespace(namespace.salt)
        return found

    def _measure(self) -> dict[str, float]:
        state = self._loop().store.state
        return {
            "dram_bytes": float(state.limits.arena_bytes),
            "resident_bytes": float(sum(n.visible * n.chunk_bytes for n in state.namespaces.values())),
            "chunks": float(sum(n.visible for n in state.namespaces.values())),
            "cold_chunks": float(sum(n.cold for n in state.namespaces.values())),
            "sessions": float(sum(n.sessions for n in state.namespaces.values())),
            "leases": float(len(state.leases.leases)),
            "peer_bytes_sent": float(self.server.counters["bytes"] if self.server is not None else 0),
            "peer_bytes_received": float(self.reads.counters["bytes"]),
            "ssd_state": float(state.disk_state),
        }

    def gauges(self) -> dict[str, float]:
        """For metrics."""
        registry = self.registry
        told: dict[str, float] = {
            "registry_ok": float(registry is not None and registry.state == "ok"),
            "fleet_nodes": float(1 + len(registry.others()) if registry is not None else 0),
            "fleet_draining": float(registry is not None and registry.draining),
        }
        return told

    def counters(self) -> dict[str, float]:
        told = {f"peer_reads_{name}": float(value) for name, value in self.reads.counters.items()}
        if self.server is not None:
            told |= {f"peer_serves_{name}": float(value) for name, value in self.server.counters.items()}
        if self.registry is not None:
            told |= {f"registry_{name}": float(value) for name, value in self.registry.counters.items()}
        return told

    # ------------------------------------------------------------------------------------------- from other threads

    def _offered(self, namespace: bytes, keys: Sequence[ChunkKey]) -> int:
        return self.take(namespace, keys)

    def _ordered(self, order: Mapping[str, Any]) -> None:
        log.info("an order came by the registry", extra=fields(order=dict(order)))
