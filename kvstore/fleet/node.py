"""This daemon as a node of a fleet: what it tells the registry, what it serves to peers, what it reads from them.

    core's columns ── Sweep ──▶ Registry ──▶ Redis ──▶ the others' memory
    a key that is missing here ── Registry.holders ──▶ PeerReads ──▶ a peer's PeerServer ──▶ its DRAM

Nothing of it is needed to serve what is here: without a registry, without peers, the rest of the daemon goes on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ipaddress
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvstore.config import PEERS, PEERS_JOURNAL, StoreConfig
from kvstore.core.events import ForgottenElsewhere, Heeded
from kvstore.errors import ConfigError
from kvstore.fleet.client import PeerReads
from kvstore.fleet.door import PeerDoor, PeerTls
from kvstore.fleet.drain import TAKE_S, Drain, take
from kvstore.fleet.forgets import FleetForgets
from kvstore.fleet.held import Where
from kvstore.fleet.kv_events import KvEvents
from kvstore.fleet.registry import Node, Registry, check_url, connect
from kvstore.fleet.secret import FleetSecret
from kvstore.fleet.server import ANSWER_S, PeerServer
from kvstore.fleet.sessions import FleetSessions
from kvstore.fleet.source import PeerSource
from kvstore.fleet.sweep import Change, Sweep
from kvstore.server.logs import fields
from kvstore.server.loop import Loop
from kvstore.tiers.base import SlotMemory
from kvstore.tiers.remote.backend import News
from kvstore.types import ChunkKey, NamespaceId, WorkerId

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
    if not config.registry_url and not config.peer_address and not config.kv_events_endpoint:
        return False
    if not config.registry_url and not config.peer_address:
        node_name(config)
        return True
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
        *,
        heeded: Heeded | None = None,
        is_ours: Callable[[], bool] = lambda: True,
    ) -> None:
        """`loop` is asked when the node has started; `heeded`: how far its journal was carried out, as the index says;
        `is_ours`: whether the folder of the journal still is this daemon's. Raises ConfigError."""
        self.name = node_name(config)
        alone = not config.registry_url and not config.peer_address  # it publishes events alone
        self.secret = (
            FleetSecret(secrets.token_bytes(32)) if alone else FleetSecret.read(config.fleet_secret_file)
        )
        self._config = config
        self._loop = loop
        self._sweep = Sweep(lambda: loop().store.state)
        self._digests: dict[NamespaceId, bytes] = {}
        self._load: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None
        self.events: KvEvents | None = None
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
        self.forgets: FleetForgets | None = None
        if config.registry_url:
            self.forgets = FleetForgets(
                self.secret,
                os.path.join(config.ssd_dir or config.run_dir, PEERS_JOURNAL),
                news=self._heard,
                done=lambda event: loop().post_threadsafe(event),
                within_s=config.forget_within_s,
                heeded=heeded,
                is_ours=is_ours,
            )
        self.source = PeerSource(
            self.secret,
            self.reads,
            memory,
            registry=lambda: self.registry,
            namespaces=lambda number: loop().store.state.namespaces.get(number),
            post=lambda event: loop().post(event),
            post_threadsafe=lambda event: loop().post_threadsafe(event),
            deadline_s=config.peer_deadline_ms / 1000,
            forgets=self.forgets,
            sessions=lambda: self.sessions,
        )
        self.sessions: FleetSessions | None = None
        self._boot = boot
        self._numbers = numbers
        self._asyncio: asyncio.AbstractEventLoop | None = None
        self._drain = Drain(loop, self.secret, self.reads, lambda: self.registry, self.digest)
        self._draining: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"FleetNode({self.name}, {self.registry}, {self.server}, {self.reads})"

    def start(self) -> None:
        """Raises ConfigError."""
        self._asyncio = asyncio.get_running_loop()
        advertised = self._config.peer_advertise or self._config.peer_address
        if self.server is not None:
            self.server.start()
            if advertised.endswith(":0"):
                advertised = f"{advertised[:-2]}:{self.server.port}"
        if self.forgets is not None:
            # What was read before a crash may not have left the index: it is heeded again.
            self._forget(self.forgets.book.take_news(), time.monotonic())
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
                forgets=self.forgets,
            )
            self.registry.start()
            self._share_sessions(self.registry)
        if self._config.kv_events_endpoint:
            self.events = KvEvents(
                self._config.kv_events_endpoint, self.name, lambda: self._loop().store.state
            )
        self._task = asyncio.create_task(self._run())
        log.info(
            "this node is one of a fleet",
            extra=fields(node=self.name, serves=advertised or "nobody", tls=self.door.encrypted),
        )

    def _share_sessions(self, registry: Registry) -> None:
        if not self._config.registry_sessions_max:
            return
        self.sessions = FleetSessions(
            self._config.registry_url,
            self.secret,
            self.name,
            self._boot,
            ttl_s=self._config.registry_session_ttl_s,
            connect=connect,
            done=lambda event: self._loop().post_threadsafe(event),
            refused=lambda: registry.why if registry.state == "refused" else "",
        )
        self.sessions.start()

    def close(self) -> None:
        if self._asyncio is not None and not self._asyncio.is_closed():
            self._asyncio.call_soon_threadsafe(self._cancel)
        if self.server is not None:
            self.server.close()
        if self.registry is not None:
            self.registry.close(CLOSE_S)
        if self.sessions is not None:
            self.sessions.close(CLOSE_S)

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
        if self.events is not None:
            self.events.changed(changes)

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
            "drain_running": float(self._drain.progress.running),
            "drain_chunks": float(self._drain.progress.chunks),
            "drain_taken": float(self._drain.progress.taken + self._drain.progress.elsewhere),
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

    @property
    def node(self) -> Node:
        """What this node says of itself now."""
        if self.registry is None:
            return Node(self.name, self._boot, "", load=self._load)
        return replace(self.registry.node, draining=self.registry.draining, load=self._load)

    @property
    def chunks(self) -> int:
        return int(self._load.get("chunks", 0.0) + self._load.get("cold_chunks", 0.0))

    # -------------------------------------------------------------------------------------------------------- orders

    def obey(self, order: Mapping[str, Any]) -> None:
        """An operator's order, given here or by the registry."""
        if self.registry is None:
            return
        match order.get("do"):
            case "drain":
                if self._draining is None or self._draining.done():
                    self._draining = self._drain.begin(int(order.get("bytes_max", 0)))
                self._load = self._measure()  # whoever reads that it drains reads, too, that it has not ended
                self.registry.drain(True)
            case "undrain":
                self.registry.drain(False)
                if self._draining is not None:
                    self._draining.cancel()
            case other:
                log.warning("an order is not understood", extra=fields(order=str(other)))
                return
        log.info("an operator's order is followed", extra=fields(order=dict(order)))

    def _forget(self, news: News, asked_at: float) -> None:
        """What other nodes have forgotten, by the digests that this node's namespaces have here."""
        forgotten, count, reached, untold = news
        ours: dict[bytes, bytes] = {}
        if any(digest for digest, _, _ in forgotten):
            for number, namespace in self._loop().store.state.namespaces.items():
                digest = self.digest(number)
                if digest is not None:
                    ours[digest] = namespace.salt
        meant = tuple(
            (ours[digest] if digest else b"", key, maker)
            for digest, key, maker in forgotten
            if not digest or digest in ours
        )
        age_ms = int(1_000 * (time.monotonic() - asked_at))
        self._loop().post(ForgottenElsewhere(PEERS, meant, count, age_ms, reached, untold))

    def _cancel(self) -> None:
        for task in (self._task, self._draining):
            if task is not None:
                task.cancel()
        if self.events is not None:
            self.events.close()

    async def _take(self, digest: bytes, keys: Sequence[ChunkKey]) -> int:
        if self.registry is None or self.registry.draining:
            return 0
        for number, namespace in self._loop().store.state.namespaces.items():
            if self.digest(number) == digest and not namespace.retired:
                worker = WorkerId(next(self._numbers))
                return await take(self._loop(), namespace, keys, worker)
        return 0

    # ------------------------------------------------------------------------------------------- from other threads

    def _heard(self, news: News, asked_at: float) -> None:
        assert self._asyncio is not None
        self._asyncio.call_soon_threadsafe(self._forget, news, asked_at)

    def _offered(self, namespace: bytes, keys: Sequence[ChunkKey]) -> int:
        assert self._asyncio is not None
        future = asyncio.run_coroutine_threadsafe(self._take(namespace, keys), self._asyncio)
        try:
            return future.result(TAKE_S + ANSWER_S)
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            future.cancel()
            return 0

    def _ordered(self, order: Mapping[str, Any]) -> None:
        assert self._asyncio is not None
        self._asyncio.call_soon_threadsafe(self.obey, order)
