"""`kvstored`: everything that one daemon owns, from its lock to its last byte.

    start   lock the directory -> check what could not work -> arena, copier, loop -> sockets -> ready
    stop    say so (health, Draining) -> wait for open leases and commits, and for the SSD to have all that DRAM has,
            drain_ms at most -> close -> exit

Exclusive: one daemon a directory (flock on <run_dir>/lock, which the kernel drops when the process dies, however it
dies), and a TCP port that is in use is refused, which gRPC alone would share silently.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import ipaddress
import itertools
import json
import logging
import os
import resource
import secrets
import signal
import socket
import stat
import sys
import threading
import time
from array import array
from dataclasses import asdict, dataclass, replace
from typing import Any

import grpc
import grpc.aio
import numpy.typing as npt
from prometheus_client.core import Metric

from kvstore import __version__
from kvstore.config import MORE_SEGMENTS, ONE_SEGMENT, StoreConfig
from kvstore.core import events
from kvstore.core.events import Ticket
from kvstore.core.ssd import restart
from kvstore.core.store import Store
from kvstore.errors import ConfigError
from kvstore.memory import fix_mmap_threshold, keep_freed_memory, memory_limit_bytes
from kvstore.server.garbage import ShortSearches, no_searches
from kvstore.server.health import NOT_SERVING, SERVING, SSD, Health
from kvstore.server.health import SERVICE as HEALTH_SERVICE
from kvstore.server.logs import fields, leave, timestamp
from kvstore.server.loop import Loop, monotonic_ms
from kvstore.server.metrics import MetricsServer, families
from kvstore.tiers import ssd
from kvstore.tiers.arena import Arena, Staging
from kvstore.tiers.copier import Copier
from kvstore.tiers.disk_port import disk_from_environment
from kvstore.tiers.index import ChunkBatch
from kvstore.tiers.regions import Regions
from kvstore.tiers.ssd import SsdTier
from kvstore.transport.bytes_service import BYTES_SERVICE, BytesService
from kvstore.transport.descriptors import DEFAULT_TENANT, DescriptorServer
from kvstore.transport.reflection import Reflection
from kvstore.transport.service import ADMIN_SERVICE, HINTS_SERVICE, STATS_SERVICE, STORE_SERVICE, Service
from kvstore.types import DiskState, Protection, WorkerId
from kvstore.v1 import store_pb2

log = logging.getLogger(__name__)

EXIT_BUG = 70
CLOSE_TIMEOUT_S = 5.0
"""Bound on each step of closing; what has not ended then ends with the process."""
FIRST_SEGMENT_TIMEOUT_S = 10.0
"""How long being ready waits for the first segment of the arena."""
POLL_S = 0.01
SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter's lock that others want; Python's own choice is 5 ms. The threads of the
tiers want it for microseconds after each call of the kernel or of LMDB: beside a busy loop the index commits four times
as often, and the loop loses a tenth."""
STATS_TIMEOUT_S = 2.0
STDOUT_TIMEOUT_S = 1.0
NOTIFY_TIMEOUT_S = 1.0
RPCS_MAX = 8_192
DESCRIPTORS_PER_WORKER = 5
"""Its two connections, its fast lane, its pidfd and its staging memory."""
DESCRIPTORS_OF_OUR_OWN = 256
"""Sockets, index, threads; two more for each segment and one for each slab file are there before workers come."""

SELF = WorkerId(-1)
"""The daemon as a client of its own core: metrics, draining. Workers on the descriptor socket are numbered from 1."""
ANONYMOUS = WorkerId(-2)
"""All TCP callers without a token."""
FIRST_GUEST = -3
"""And on downwards: guests of Get and Put."""


class RunDirectory:
    """The directory of sockets and lock, held exclusively from construction to `close`."""

    def __init__(self, config: StoreConfig) -> None:
        """Raises ConfigError, naming the pid of the daemon that holds the directory, and leaves nothing behind."""
        self._shared = bool({int(uid) for uid in config.tenants} - {0, os.geteuid()})
        """Whether other users may come in: their peer credentials decide then what they may see."""
        path = config.run_dir
        try:
            with contextlib.suppress(FileExistsError):
                os.makedirs(path, mode=0o700)
                os.chmod(path, 0o755 if self._shared else 0o700)
            status = os.stat(path)
            if self._shared and status.st_uid == os.geteuid():
                os.chmod(
                    path, stat.S_IMODE(status.st_mode) | 0o055
                )  # it may be from before there were tenants
            if not stat.S_ISDIR(status.st_mode):
                raise ConfigError("is not a directory", field="run_dir", value=path)
            if status.st_mode & 0o022:
                raise ConfigError(
                    "can be written to by other users, who could replace the sockets",
                    field="run_dir",
                    value=f"{path} (mode {stat.S_IMODE(status.st_mode):o})",
                    remedy="choose a directory of the daemon's own, or chmod go-w",
                )
            self._lock = os.open(
                config.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        except OSError as problem:
            raise ConfigError(
                f"cannot be used: {problem.strerror}",
                field="run_dir",
                value=path,
                remedy="choose another directory",
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip()
            os.close(self._lock)
            raise ConfigError(
                f"another daemon uses this directory (pid {holder or 'unknown'})",
                field="run_dir",
                value=path,
                remedy="stop it, or choose another directory",
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, b"%d\n" % os.getpid(), 0)
        self._sockets = (config.descriptor_socket, config.grpc_socket)
        self._remove_sockets()  # left by a daemon that was killed: whoever holds the lock owns them

    def open_to_peers(self, path: str) -> None:
        """Let in whom the directory lets in: everybody where other users are tenants, else our own user."""
        os.chmod(path, 0o666 if self._shared else 0o600)

    def close(self) -> None:
        self._remove_sockets()
        os.ftruncate(self._lock, 0)
        os.close(self._lock)  # the file stays: removing it could take away the lock of a successor

    def _remove_sockets(self) -> None:
        for path in self._sockets:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


@dataclass(frozen=True, slots=True)
class TcpAddress:
    host: str
    port: int

    @classmethod
    def of(cls, config: StoreConfig) -> TcpAddress | None:
        """Raises ConfigError for what is no address, or is reachable from elsewhere without the flag that says so."""
        if not config.tcp_address:
            return None
        host, _, port = config.tcp_address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65_535 and host):
            raise ConfigError(
                'must be "host:port" with a port from 1 to 65535',
                field="tcp_address",
                value=config.tcp_address,
            )
        if host == "localhost":
            host = "127.0.0.1"
        try:
            loopback = ipaddress.ip_address(host).is_loopback
        except ValueError:
            raise ConfigError(
                "needs a numeric IP address", field="tcp_address", value=config.tcp_address
            ) from None
        if not loopback and not config.tcp_unauthenticated:
            raise ConfigError(
                "is reachable from other machines, and TCP has no authentication yet",
                field="tcp_address",
                value=config.tcp_address,
                remedy="use 127.0.0.1, or set tcp_unauthenticated to let anybody read and write",
            )
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def check_port_is_free(field: str, host: str, port: int) -> None:
    """Raises ConfigError when something listens there already, or the address is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as problem:
            raise ConfigError(
                f"cannot be used: {problem.strerror}",
                field=field,
                value=f"{host}:{port}",
                remedy="stop what listens there (ss -ltnp), or choose another",
            ) from None


def check_memory(config: StoreConfig) -> None:
    """Raises ConfigError when arena and staging memory could not all be there at once."""
    limit = memory_limit_bytes()
    sealed = config.protection == Protection.SEALED.value
    wanted = config.dram_bytes + (config.staging_bytes_max if sealed else 0)
    if wanted > limit:
        staging = f" and {config.staging_bytes_max} of staging memory" if sealed else ""
        raise ConfigError(
            f"{config.dram_bytes} bytes of arena{staging} are more than the {limit} bytes that this process may have"
            " (machine or cgroup)",
            field="dram_bytes",
            value=config.dram_bytes,
            remedy="lower dram_bytes or staging_bytes_max, or raise the memory limit",
        )


def check_file_limit(config: StoreConfig) -> None:
    """Raises ConfigError when the system's limit of a file's size is below what workers map: it holds for memory files
    too."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    names = ["segment_bytes"]
    if config.protection == Protection.SEALED.value:
        names.append("staging_bytes")
    for name in names:
        wanted = getattr(config, name)
        if limit != resource.RLIM_INFINITY and wanted > limit:
            raise ConfigError(
                f"is more than the {limit} bytes that a file of this process may have (RLIMIT_FSIZE)",
                field=name,
                value=wanted,
                remedy=f"lower {name}, or raise the limit (ulimit -f, LimitFSIZE=)",
            )


def raise_descriptor_limit(wanted: int) -> int:
    """Lift this process' limit of open descriptors to what it may have. Returns the limit; a warning where less than
    `wanted` is to be had."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # a hard limit above what the kernel allows now
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        log.warning(
            "few open descriptors are allowed: connections are refused when they are used up",
            extra=fields(limit=soft, wanted=wanted, remedy="raise LimitNOFILE= or ulimit -n"),
        )
    return soft


class Daemon:
    """One daemon in this process. `run` is all of its life."""

    def __init__(self, config: StoreConfig) -> None:
        """Checks all that can be checked and takes the lock; raises ConfigError, and then nothing was started."""
        self.config = replace(config, run_dir=os.path.abspath(config.run_dir))
        self._tcp = TcpAddress.of(config)
        check_memory(config)
        check_file_limit(config)
        if self._tcp is not None:
            check_port_is_free("tcp_address", self._tcp.host, self._tcp.port)
        if config.metrics_port:
            check_port_is_free("metrics_port", "127.0.0.1", config.metrics_port)
        self.boot_id = secrets.token_bytes(16)
        self._started_at = time.monotonic()
        self._grpc_target = f"unix:{self.config.grpc_socket}"
        self._numbers = itertools.count(FIRST_GUEST, -1)
        self._server: grpc.aio.Server | None = None
        self._directory = RunDirectory(self.config)

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT, then drain and close. Returns the exit status."""
        self._stop: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._build()
        try:
            await self._start()
            await self._first_segment()
            self._announce()
            status = await self._stop
            if status == 0:
                await self._drain()
                if log.isEnabledFor(
                    logging.DEBUG
                ):  # a pass over everything: for tests and for whoever hunts a bug
                    self.loop.store.check_integrity()
            return status
        finally:
            await self._close()

    # --------------------------------------------------------------------------------------------------- start

    def _build(self) -> None:
        config = self.config
        if config.tcp_address:
            keep_freed_memory()
        else:
            fix_mmap_threshold()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        raise_descriptor_limit(DESCRIPTORS_PER_WORKER * config.limits.workers_max + DESCRIPTORS_OF_OUR_OWN)
        protection = Protection(config.protection)
        self._arena = Arena(
            protection=protection,
            boot_id=self.boot_id,
            huge_pages=config.huge_pages,
            prefault=config.prefault,
        )
        self._staging = Staging(bytes_max=config.staging_bytes_max)
        self._regions = Regions()
        self._copier = Copier(self._arena, self._staging, self._regions, threads=config.copy_threads)
        self._searches = ShortSearches()
        with no_searches():
            store, tier = self._open_ssd() if config.ssd_dir else (Store(config.limits), None)
        self._tier = tier
        self.loop = Loop(
            store,
            self._arena,
            self._staging,
            self._copier,
            ssd=tier,
            on_forget=lambda worker: self._descriptors.forget(worker),
            on_fatal=lambda: self._end(EXIT_BUG),
            on_disk=lambda state: self._health.set(SSD, SERVING if state is DiskState.OK else NOT_SERVING),
        )
        self._descriptors = DescriptorServer(
            config,
            self.loop,
            arena=self._arena,
            staging=self._staging,
            regions=self._regions,
            boot_id=self.boot_id,
            grpc_target=self._grpc_target,
            open_lane=(lambda worker: self._service.open_lane(worker)) if config.fast_lane else None,
        )
        peer_timeout_s = config.peer_timeout_ms / 1000
        self._service = Service(
            self.loop,
            self._worker_of,
            boot_id=self.boot_id,
            welcome=store_pb2.AttachWelcome(
                lease_ttl_ms=config.lease_ttl_ms, reservation_ttl_ms=config.reservation_ttl_ms
            ),
            anonymous=ANONYMOUS if self._tcp is not None else None,
            peer_timeout_s=peer_timeout_s,
            message_bytes_max=config.message_bytes_max,
            discard=self._regions.discard,
        )
        self._metrics = MetricsServer(self._families)
        self._health = Health(peer_timeout_s=peer_timeout_s)

    def _open_ssd(self) -> tuple[Store, SsdTier]:
        """Take the directory, read its index, and put what it names into a core. Raises ConfigError or StoreError."""
        tier = SsdTier(
            self.config,
            self._arena,
            disk_from_environment(os.environ),
            done=lambda event: self.loop.post_threadsafe(event),
        )
        began = time.monotonic()
        snapshot = tier.open()
        limits = self.config.limits
        store = Store(replace(limits, disk_slabs_max=min(limits.disk_slabs_max, snapshot.slabs_max)))
        restored = store.restore(_core_snapshot(snapshot), monotonic_ms())
        log.info(
            "SSD tier is open",
            extra=fields(
                chunks=restored.chunks,
                chunks_dropped=restored.chunks_dropped,
                sessions=restored.sessions,
                slabs=len(snapshot.slabs),
                seconds=round(time.monotonic() - began, 3),
            ),
        )
        return store, tier

    async def _start(self) -> None:
        self._catch_signals()
        self.loop.start()
        if self._tier is not None:
            self._tier.watch()
        self.loop.post(events.WorkerJoined(SELF, tenant=DEFAULT_TENANT, engine_group="", admin=True))
        if self._tcp is not None:
            anonymous = events.WorkerJoined(ANONYMOUS, tenant=DEFAULT_TENANT, engine_group="", remote=True)
            self.loop.post(anonymous)
        await self._start_grpc()
        await self._descriptors.start()
        if self.config.metrics_port:
            await self._metrics.start(self.config.metrics_port)

    async def _start_grpc(self) -> None:
        server = grpc.aio.server(
            maximum_concurrent_rpcs=RPCS_MAX,
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", self.config.message_bytes_max),
                ("grpc.max_send_message_length", -1),
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
            ],
        )
        bytes_service = BytesService(self._service, self._numbers)
        names = (STORE_SERVICE, HINTS_SERVICE, STATS_SERVICE, ADMIN_SERVICE, BYTES_SERVICE)
        for name in names:
            self._health.set(name, SERVING)
        if self.config.ssd_dir:
            self._health.set(SSD, SERVING)
        shown = Reflection((*names, HEALTH_SERVICE), peer_timeout_s=self._service.peer_timeout_s)
        server.add_generic_rpc_handlers(
            tuple(part.handlers() for part in (self._service, bytes_service, self._health, shown))
        )
        self._bind(server, self._grpc_target, field="run_dir")
        self._directory.open_to_peers(self.config.grpc_socket)
        if self._tcp is not None:
            self._bind(server, str(self._tcp), field="tcp_address")
        await server.start()
        self._server = server

    async def _first_segment(self) -> None:
        """Ready means that something can be saved; the other segments come while we serve."""
        deadline = time.monotonic() + FIRST_SEGMENT_TIMEOUT_S
        while not (await self._own_stats()).values["arena"]["ready_bytes"] and not self._stop.done():
            if time.monotonic() > deadline:
                log.warning("no segment of the arena is ready yet: everything is a miss until then")
                return
            await asyncio.sleep(POLL_S)

    @staticmethod
    def _bind(server: grpc.aio.Server, address: str, *, field: str) -> None:
        try:
            server.add_insecure_port(address)
        except RuntimeError as problem:
            raise ConfigError(f"cannot be bound: {problem}", field=field, value=address) from None

    def _worker_of(self, token: bytes) -> WorkerId | None:
        identity = self._descriptors.worker_of(token)
        return None if identity is None else identity.worker

    def _announce(self) -> None:
        """Say what this daemon uses, to people and to machines, and that it is ready."""
        config = self.config
        settings = asdict(config)
        log.info(
            "ready",
            extra=fields(
                version=__version__,
                pid=os.getpid(),
                boot_id=self.boot_id.hex(),
                settings=settings,
                uid=os.getuid(),
            ),
        )
        segments = config.limits.segment_count
        if segments < 2:
            log.warning(
                "the arena is %s",
                ONE_SEGMENT,
                extra=fields(
                    dram_bytes=config.dram_bytes, segment_bytes=config.segment_bytes, remedy=MORE_SEGMENTS
                ),
            )
        # On a thread: whoever should read standard output may stand still, or never have begun.
        saying = threading.Thread(target=_say, args=(self._words(),), name="kvstored-hello", daemon=True)
        saying.start()
        saying.join(STDOUT_TIMEOUT_S)
        sd_notify("READY=1")

    def _words(self) -> str:
        """What this daemon uses: lines for people on a terminal, elsewhere one JSON object, as in the log that standard
        output often ends in."""
        config = self.config
        parts = {
            "arena": f"arena {config.dram_bytes / 2**20:,.0f} MiB in {config.limits.segment_count} segments"
            f" ({config.protection}), staging at most {config.staging_bytes_max / 2**20:,.0f} MiB",
            "ssd": f"SSD {self._ssd_text()}",
            "directory": f"directory {config.run_dir}",
            "tcp": f"TCP {self._tcp} (not authenticated)" if self._tcp else "TCP off",
            "metrics": f"metrics http://127.0.0.1:{config.metrics_port}/metrics"
            if config.metrics_port
            else "metrics off",
            "tenants": f"tenants by user id: {dict(config.tenants) or 'own user and root only'}",
        }
        if sys.stdout is not None and sys.stdout.isatty():
            return f"kvstored {__version__}\n  " + "\n  ".join(parts.values())
        return json.dumps(
            {
                "time": timestamp(time.time()),
                "level": "info",
                "logger": "kvstored",
                "message": f"kvstored {__version__} serves",
                **parts,
            }
        )

    def _ssd_text(self) -> str:
        config = self.config
        if not config.ssd_dir:
            idle = [
                option.name
                for option in dataclasses.fields(config)
                if option.name.startswith("ssd_") and getattr(config, option.name) != option.default
            ]
            return f"off: without ssd_dir, {' and '.join(idle)} mean nothing" if idle else "off"
        state = self.loop.store.state
        return (
            f"{config.ssd_dir}, at most {config.ssd_bytes / 2**20:,.0f} MiB: {state.disk_state.name.lower()},"
            f" {state.cold.count:,} chunks found, durable within {config.durable_within_ms} ms"
        )

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)

    def _signalled(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._stop.done():
            log.warning("%s again: leaving at once", name)
            leave(128 + number)
        log.info("%s: draining", name, extra=fields(drain_ms=self.config.drain_ms))
        self._end(0)

    def _end(self, status: int) -> None:
        if not self._stop.done():
            self._stop.set_result(status)

    # ---------------------------------------------------------------------------------------------------- stop

    async def _drain(self) -> None:
        """Start nothing new; what is open may end, for drain_ms."""
        sd_notify("STOPPING=1")
        self._health.end()
        self._service.drain()
        self.loop.store.hurry()
        try:
            async with asyncio.timeout(self.config.drain_ms / 1000):
                while await self._open_work():  # noqa: ASYNC110 - the core publishes no event for this
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            log.warning("draining took too long: open leases, commits and writes to SSD end now")

    async def _own_stats(self) -> events.Stats:
        answer: events.Stats = await self.loop.ask(events.GetStats(Ticket(SELF)), STATS_TIMEOUT_S)
        return answer

    async def _open_work(self) -> int:
        gauges = (await self._own_stats()).values["gauges"]
        return int(gauges["leases"] + gauges["reservations"] + self.loop.store.disk.behind)

    async def _families(self) -> list[Metric]:
        lent = self._regions.stats()
        process = {
            "uptime_seconds": time.monotonic() - self._started_at,
            "attach_streams": float(self._service.streams),
            "staging_bytes": float(self._staging.bytes_granted),
            "regions": float(lent.regions),
            "region_bytes": float(lent.bytes),
        }
        return families((await self._own_stats()).values, process, __version__, self.loop.disk_stats())

    async def _close(self) -> None:
        """Each step bounded; the last is the lock, so that no successor meets our remains."""
        self._metrics.close()
        self._service.close()
        if self._server is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._server.stop(grace=0.5), CLOSE_TIMEOUT_S)
        await self._descriptors.close()
        self.loop.close(CLOSE_TIMEOUT_S)
        self._regions.close(CLOSE_TIMEOUT_S)
        self._staging.close()
        self._arena.close()
        self._searches.close()
        self._directory.close()
        log.info("stopped", extra=fields(uptime_s=round(time.monotonic() - self._started_at, 3)))


def _say(text: str) -> None:
    """In one call: standard output and the log may be the same file."""
    with contextlib.suppress(OSError):  # nobody is there to hear it, or no space
        os.write(1, f"{text}\n".encode("utf-8", "backslashreplace"))


def sd_notify(state: str) -> None:
    """Tell systemd, if it asked to be told."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
        notify.settimeout(NOTIFY_TIMEOUT_S)
        try:
            notify.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)
        except OSError as problem:
            log.warning("NOTIFY_SOCKET does not listen", extra=fields(address=address, why=str(problem)))


def _core_snapshot(snapshot: ssd.Snapshot) -> restart.Snapshot:
    """The index's arrays as the core's plain columns."""
    return restart.Snapshot(
        boot_count=snapshot.boot_count,
        next_slab=snapshot.next_slab,
        slabs=snapshot.slabs,
        namespaces=snapshot.namespaces,
        makers=snapshot.makers,
        chunks=map(_core_batch, snapshot.chunks),
        sessions=snapshot.sessions,
    )


def _core_batch(batch: ChunkBatch) -> restart.ChunkBatch:
    makers = sorted(set(batch.maker) - {b""})
    number = {maker: index for index, maker in enumerate(makers)} | {b"": -1}
    return restart.ChunkBatch(
        namespace=batch.namespace,
        shards=batch.slab.shape[1],
        keys=batch.keys,
        token_count=_column("i", batch.token_count),
        flags=_column("i", batch.flags),
        maker=[number[maker] for maker in batch.maker],
        makers=makers,
        slab=_column("i", batch.slab),
        slot=_column("i", batch.slot),
        generation=_column("Q", batch.generation),
        checksum=_column("Q", batch.checksum),
    )


def _column(code: str, values: npt.NDArray[Any]) -> array[int]:
    column = array(code)
    column.frombytes(values.astype(f"={code}").tobytes())
    return column
