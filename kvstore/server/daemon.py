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
import math
import os
import resource
import secrets
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import grpc
import grpc.aio
from prometheus_client.core import Metric

from kvstore import __version__
from kvstore.config import (
    MORE_SEGMENTS,
    ONE_SEGMENT,
    PEERS,
    REMOTE_STORE,
    REMOTE_WRITES,
    StoreConfig,
    address_remedy,
)
from kvstore.core import events
from kvstore.core.events import Ticket
from kvstore.core.store import Store
from kvstore.errors import BadRequest, ConfigError, StoreError
from kvstore.fleet import node as fleet_node
from kvstore.fleet.node import FleetNode
from kvstore.fleet.registry import without_password
from kvstore.fleet.service import FLEET_SERVICE, FleetService
from kvstore.memory import fix_mmap_threshold, keep_freed_memory, memory_limit_bytes
from kvstore.server.garbage import ShortSearches, no_searches
from kvstore.server.health import NOT_SERVING, SERVING, SSD, Health
from kvstore.server.health import SERVICE as HEALTH_SERVICE
from kvstore.server.learned import LearnedFile
from kvstore.server.logs import fields, leave, timestamp
from kvstore.server.loop import Loop, monotonic_ms
from kvstore.server.metrics import MetricsServer, families
from kvstore.server.recorder import Recorder
from kvstore.tiers.arena import Arena, Staging
from kvstore.tiers.base import ChunkSource
from kvstore.tiers.copier import Copier
from kvstore.tiers.directories import Directories
from kvstore.tiers.disk_port import Disk, RealDisk
from kvstore.tiers.regions import Regions
from kvstore.tiers.remote import opening as remote_opening
from kvstore.tiers.remote.tier import RemoteTier
from kvstore.tiers.schema_files import SchemaFiles
from kvstore.tiers.ssd import SsdTier
from kvstore.transport.access import Access, Tls
from kvstore.transport.bytes_service import BYTES_SERVICE, BytesService
from kvstore.transport.callers import TcpCallers
from kvstore.transport.descriptors import DEFAULT_TENANT, DescriptorServer
from kvstore.transport.door import TcpDoor
from kvstore.transport.reflection import Reflection
from kvstore.transport.schema_service import PROMPT_CACHE_SERVICE, SchemaService
from kvstore.transport.service import ADMIN_SERVICE, HINTS_SERVICE, STATS_SERVICE, STORE_SERVICE, Service
from kvstore.types import DiskState, Protection, WorkerId
from kvstore.v1 import admin_pb2, store_pb2

log = logging.getLogger(__name__)

EXIT_BUG = 70
EXIT_UNAVAILABLE = 1
"""What the daemon needs is not to be had any more."""
DRAINING = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
    *(signal.SIGQUIT, signal.SIGXCPU, signal.SIGPWR),
)
"""Each ends the daemon in good order: who closes a terminal, or types Ctrl-\\, loses nothing of what was saved."""
UNLESS_IGNORED = (signal.SIGHUP, signal.SIGQUIT)
"""Whoever started us with these ignored (nohup, a shell's background job) means that."""
MEANINGLESS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO)
"""By default they would end the process at once. SIGPIPE and SIGXFSZ are ignored by Python itself."""
WATCH_S = 0.2
"""How often it is looked whether lock and sockets are still in the run directory."""
REMADE_MAX = 64
"""So often they are made again; each time costs a gRPC server."""
TELL_AGAIN_S = 60.0
BOUND_AS = "grpc.new"
"""Under this name, not longer than the others in the run directory, gRPC binds its socket."""
CLOSE_TIMEOUT_S = 5.0
"""Bound on each step of closing; what has not ended then ends with the process."""
PROGRESS_S = 5.0
"""How often it is told how much of the arena is there, before the daemon is ready."""
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
FIRST_GUEST = -2
"""And on downwards: TCP callers, and guests of Get and Put."""


class DirectoryTaken(ConfigError):
    """Another daemon holds the run directory."""


class RunDirectory:
    """The directory of sockets and lock, held exclusively from construction to `close`.

    What is held is the lock *file*, so whoever cleans the directory (of files in /tmp that look old) lets another
    daemon in. `gone` notices that, `take_again` makes it good as long as nobody else came, and nothing is ever removed
    that is not ours: each file is known by its inode, and an open descriptor keeps its number from going to another.
    """

    def __init__(self, config: StoreConfig) -> None:
        """Raises ConfigError, naming the pid of the daemon that holds the directory, and leaves nothing behind."""
        self._shared = bool({int(uid) for uid in config.tenants} - {0, os.geteuid()})
        """Whether other users may come in: their peer credentials decide then what they may see."""
        self._path = config.run_dir
        self._lock_file = config.lock_file
        self._sockets: dict[str, int] = {}
        """By path: a descriptor (O_PATH) of each socket that is there by us."""
        self._lock = self._take()
        for path in (config.descriptor_socket, config.stream_socket, config.grpc_socket):
            self.clear(path)  # left by a daemon that was killed: whoever holds the lock owns them

    def _take(self) -> int:
        """The lock file, locked. Raises ConfigError."""
        while True:
            lock = self._open_lock()
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
                os.close(lock)
                raise DirectoryTaken(
                    f"another daemon uses this directory (pid {holder or 'unknown'})",
                    field="run_dir",
                    value=self._path,
                    remedy="stop it, or choose another directory",
                ) from None
            if _is_at(lock, self._lock_file):
                break
            os.close(lock)  # it was removed between being opened and being locked
        os.ftruncate(lock, 0)
        os.pwrite(lock, b"%d\n" % os.getpid(), 0)
        return lock

    def _open_lock(self) -> int:
        path = self._path
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
                raise ConfigError(
                    "is not a directory", field="run_dir", value=path, remedy="choose a directory"
                )
            if status.st_mode & 0o022:
                raise ConfigError(
                    "can be written to by other users, who could replace the sockets",
                    field="run_dir",
                    value=f"{path} (mode {stat.S_IMODE(status.st_mode):o})",
                    remedy="choose a directory of the daemon's own, or chmod go-w",
                )
            return os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as problem:
            raise ConfigError(
                f"cannot be used: {problem.strerror}",
                field="run_dir",
                value=path,
                remedy="choose another directory",
            ) from None

    def opened(self, path: str) -> None:
        """A socket of ours is at this path now. Lets in whom the directory lets in: everybody where other users are
        tenants, else our own user. Raises OSError."""
        os.chmod(path, 0o666 if self._shared else 0o600)
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        earlier = self._sockets.pop(path, -1)
        self._sockets[path] = fd
        if earlier >= 0:
            os.close(earlier)

    def gone(self) -> list[str]:
        """What of ours, lock and sockets, is not at its path any more."""
        ours = {str(self._lock_file): self._lock, **self._sockets}
        return [path for path, fd in ours.items() if not _is_at(fd, path)]

    @property
    def holds(self) -> bool:
        """Whether the directory is still ours alone: our lock is at its path."""
        return _is_at(self._lock, self._lock_file)

    def take_again(self) -> None:
        """After `holds` turned false. Raises ConfigError: DirectoryTaken when another daemon was faster."""
        lock = self._take()
        os.close(self._lock)
        self._lock = lock

    def clear(self, path: str) -> None:
        """For who holds the lock."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def close(self) -> None:
        if self.holds:  # else what is there is another daemon's
            for path, fd in self._sockets.items():
                if _is_at(fd, path):
                    self.clear(path)
        for fd in self._sockets.values():
            os.close(fd)
        os.ftruncate(self._lock, 0)
        os.close(self._lock)  # the file stays: removing it could take away the lock of a successor


def _is_at(fd: int, path: str | os.PathLike[str]) -> bool:
    """Whether the open file is the one at this path."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class TcpAddress:
    host: str
    port: int
    tls: Tls | None

    @classmethod
    def of(cls, config: StoreConfig) -> TcpAddress | None:
        """Raises ConfigError for what is no address, would let in anybody, or would show secrets to who listens."""
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
        if bool(config.tls_certificate) != bool(config.tls_key):
            missing = "tls_key" if config.tls_certificate else "tls_certificate"
            raise ConfigError("TLS needs both certificate and key", field=missing, value="empty")
        if config.tls_client_ca and not config.tls_certificate:
            raise ConfigError("client certificates need TLS", field="tls_certificate", value="empty")
        tls = Tls(config.tls_certificate, config.tls_key, config.tls_client_ca) if config.tls_key else None
        if not loopback and tls is None:
            raise ConfigError(
                "is reachable from other machines, and without TLS everybody on the way could read tokens and KV",
                field="tcp_address",
                value=config.tcp_address,
                remedy="set tls_certificate and tls_key, or use 127.0.0.1",
            )
        if not config.access_file and not (loopback and config.tcp_unauthenticated):
            raise ConfigError(
                "nothing says who may come in over TCP",
                field="access_file",
                value="empty",
                remedy="name the callers in an access file"
                + (
                    ", or set tcp_unauthenticated to let in every process of this machine" if loopback else ""
                ),
            )
        if config.access_file and config.tcp_unauthenticated:
            raise ConfigError(
                "contradicts access_file", field="tcp_unauthenticated", value=True, remedy="set one of them"
            )
        return cls(host, int(port), tls)

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
                remedy=address_remedy(problem),
            ) from None


def url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


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

    def __init__(
        self,
        config: StoreConfig,
        disk: Disk | None = None,
        at_end: Callable[[Store], None] | None = None,
    ) -> None:
        """Checks all that can be checked and takes the lock; raises ConfigError, and then nothing was started."""
        self.config = replace(config, run_dir=os.path.abspath(config.run_dir))
        self._disk = disk or RealDisk()
        self._at_end = at_end
        self._tcp = TcpAddress.of(config)
        check_memory(config)
        check_file_limit(config)
        self._in_fleet = fleet_node.check(config)
        self._has_remote = remote_opening.check(config)
        self._access: Access | None = None
        if self._tcp is not None:
            check_port_is_free("tcp_address", self._tcp.host, self._tcp.port)
            self._access = Access(config.access_file, DEFAULT_TENANT)
            self._access.warn_of_certificates(config.tls_client_ca)
            if self._tcp.tls is not None:
                self._tcp.tls.credentials()
        if config.metrics_port:
            check_port_is_free("metrics_port", config.metrics_host, config.metrics_port)
        self.boot_id = secrets.token_bytes(16)
        self._started_at = time.monotonic()
        self._ready = False
        self._signals = 0
        """That asked us to stop."""
        self._grpc_target = f"unix:{self.config.grpc_socket}"
        self._numbers = itertools.count(FIRST_GUEST, -1)
        self._servers: list[grpc.aio.Server] = []
        """More than one where the run directory was cleaned: those who are connected to the first stay there."""
        self._watching: list[asyncio.Task[None]] = []
        self._directory = RunDirectory(self.config)

    async def run(self) -> int:
        """Serve until a signal says stop (DRAINING), then drain and close. Returns the exit status."""
        self._stop: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._build()
        try:
            await self._start()
            await self._half_the_arena()
            if not self._stop.done():
                self._announce()
            status = await self._stop
            if status != EXIT_BUG:
                await self._drain()
                await self._learned.save(self.loop.store.state.policy.learned())
                if self._at_end is not None:
                    self._at_end(self.loop.store)
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
        self._directories = Directories(self._arena, boot_id=self.boot_id)
        self._staging = Staging(bytes_max=config.staging_bytes_max)
        self._regions = Regions()
        self._copier = Copier(self._arena, self._staging, self._regions, threads=config.copy_threads)
        self._searches = ShortSearches()
        with no_searches():
            store, tier = self._open_ssd() if config.ssd_dir else (Store(config.limits), None)
        self._learned = LearnedFile(
            config.ssd_dir or config.run_dir,
            config.eviction,
            is_ours=self._folder_is_ours,
        )
        self._learned.load(store.state.policy.recall)
        self._tier = tier
        heeded = store.state.heeded
        self._remote = self._open_remote(heeded.get(REMOTE_STORE)) if self._has_remote else None
        self._fleet = (
            FleetNode(
                config,
                lambda: self.loop,
                self._arena,
                self._numbers,
                self.boot_id,
                heeded=heeded.get(PEERS),
                is_ours=self._folder_is_ours,
            )
            if self._in_fleet
            else None
        )
        sources: dict[str, ChunkSource] = {}
        if self._fleet is not None:
            sources[PEERS] = self._fleet.source
        if self._remote is not None:
            sources[REMOTE_STORE] = self._remote
        self.loop = Loop(
            store,
            self._arena,
            self._staging,
            self._copier,
            directories=self._directories,
            ssd=tier,
            sources=sources,
            on_forget=lambda worker: self._descriptors.forget(worker),
            on_fatal=lambda: self._end(EXIT_BUG),
            on_disk=self._show_disk,
            on_purged=lambda mark, done: self._schemas.purged(mark, done),
        )
        self._descriptors = DescriptorServer(
            config,
            self.loop,
            arena=self._arena,
            staging=self._staging,
            regions=self._regions,
            boot_id=self.boot_id,
            grpc_target=self._grpc_target,
            directories=self._directories if config.directory else None,
            open_lane=(lambda worker: self._service.open_lane(worker)) if config.fast_lane else None,
        )
        self._door: TcpDoor | None = None
        if self._tcp is not None:
            assert self._access is not None
            callers = TcpCallers(self.loop, lambda: WorkerId(next(self._numbers)), port=self._tcp.port)
            self._door = TcpDoor(self._access, callers)
        peer_timeout_s = config.peer_timeout_ms / 1000
        self._service = Service(
            self.loop,
            self._worker_of,
            boot_id=self.boot_id,
            welcome=store_pb2.AttachWelcome(
                lease_ttl_ms=config.lease_ttl_ms, reservation_ttl_ms=config.reservation_ttl_ms
            ),
            tcp=self._door,
            who=self._who,
            peer_timeout_s=peer_timeout_s,
            message_bytes_max=config.message_bytes_max,
            discard=self._regions.discard,
            record=self._record,
        )
        schemas = SchemaFiles(config.ssd_dir, tier.cipher if tier else None)
        schemas.load()
        self._schemas = SchemaService(self._service, schemas)
        self._recorder = Recorder(store.state, self._observe)
        self._metrics = MetricsServer(self._families)
        self._health = Health(peer_timeout_s=peer_timeout_s)

    def _open_ssd(self) -> tuple[Store, SsdTier]:
        """Take the directory, read its index, and put what it names into a core. Raises ConfigError or StoreError."""
        tier = SsdTier(
            self.config,
            self._arena,
            self._disk,
            done=lambda event: self.loop.post_threadsafe(event),
        )
        began = time.monotonic()
        snapshot = tier.open()
        limits = self.config.limits
        store = Store(replace(limits, disk_slabs_max=min(limits.disk_slabs_max, tier.slabs_max)))
        restored = store.restore(snapshot, monotonic_ms())
        log.info(
            "SSD tier is open",
            extra=fields(
                chunks=restored.chunks,
                chunks_dropped=restored.chunks_dropped,
                chunks_barred=restored.chunks_barred,
                sessions=restored.sessions,
                slabs=len(snapshot.slabs),
                seconds=round(time.monotonic() - began, 3),
            ),
        )
        return store, tier

    def _open_remote(self, heeded: events.Heeded | None) -> RemoteTier:
        """Raises ConfigError."""
        return remote_opening.open_remote(
            self.config,
            self._arena,
            lambda event: self.loop.post_threadsafe(event),
            heeded=heeded,
            is_ours=self._folder_is_ours,
        )

    def _folder_is_ours(self) -> bool:
        """Whether what this daemon keeps beside its sockets, where it has no SSD, is still its own: a directory that
        was cleaned may be another daemon's by now. From any thread."""
        return bool(self.config.ssd_dir) or self._directory.holds

    async def _start(self) -> None:
        self._catch_signals()
        self.loop.start()
        if self._tier is not None:
            self._tier.watch()
        self.loop.post(events.WorkerJoined(SELF, tenant=DEFAULT_TENANT, engine_group="", admin=True))
        await self._start_grpc()
        await self._descriptors.start()
        for path in (self.config.descriptor_socket, self.config.stream_socket):
            self._directory.opened(path)
        learned = self._learned.run(self.loop.store.state.policy.learned)
        self._watching = [asyncio.create_task(self._watch_directory()), asyncio.create_task(learned)]
        if self._door is not None:
            self._watching.append(asyncio.create_task(self._door.watch()))
        if self._remote is not None:
            self._remote.start()
        if self._fleet is not None:
            self._fleet.start()
        if self.config.metrics_port:
            await self._metrics.start(self.config.metrics_host, self.config.metrics_port)

    async def _start_grpc(self) -> None:
        bytes_service = BytesService(
            self._service,
            self._numbers,
            self._regions,
            intake_bytes_max=self.config.staging_bytes_max,
        )
        names = (
            STORE_SERVICE,
            HINTS_SERVICE,
            STATS_SERVICE,
            ADMIN_SERVICE,
            BYTES_SERVICE,
            PROMPT_CACHE_SERVICE,
            FLEET_SERVICE,
        )
        for name in names:
            self._health.set(name, NOT_SERVING)
        if self.config.ssd_dir:
            self._health.set(SSD, NOT_SERVING)
        shown = Reflection(
            (*names, HEALTH_SERVICE),
            peer_timeout_s=self._service.peer_timeout_s,
            check=self._service.check_tcp,
        )
        fleet = FleetService(self._service, self._fleet)
        parts = (self._service, bytes_service, self._schemas, fleet, self._health, shown)
        self._handlers = tuple(part.handlers() for part in parts)
        self._served = names
        await self._serve_grpc(tcp=self._tcp)

    async def _serve_grpc(self, *, tcp: TcpAddress | None) -> None:
        """One more gRPC server, on the socket in the run directory. Raises ConfigError."""
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
        server.add_generic_rpc_handlers(self._handlers)
        # Bound under another name: gRPC removes what is at the path that it bound when it ends, whoever's it is then.
        path = os.path.join(self.config.run_dir, BOUND_AS)
        self._bind(server, f"unix:{path}", field="run_dir")
        try:
            os.rename(path, self.config.grpc_socket)
            self._directory.opened(self.config.grpc_socket)
        except OSError as problem:
            raise ConfigError(
                f"cannot be used: {problem.strerror}",
                field="run_dir",
                value=self.config.run_dir,
                remedy="choose a directory in which the daemon's user may write",
            ) from None
        if tcp is not None:
            tls = tcp.tls.credentials() if tcp.tls is not None else None
            self._bind(server, str(tcp), field="tcp_address", tls=tls)
        await server.start()
        self._servers.append(server)

    async def _half_the_arena(self) -> None:
        """Ready means that half of the arena can be saved to, at once; the rest comes while we serve. That takes
        milliseconds, unless pages are huge or the kernel cannot allocate without touching: then it is told how it goes.
        Where memory is short, what there is has to do."""
        config = self.config
        wanted = (config.limits.segment_count + 1) // 2 * config.segment_bytes
        told_at, told = time.monotonic(), 0
        while not self._stop.done():
            stats = (await self._own_stats()).values
            ready = stats["arena"]["ready_bytes"]
            if ready >= wanted:
                return
            if stats["counters"].get("segment_create_failures") and not self.loop.store.segments.creating:
                log.warning(
                    "the arena is smaller than it should be: memory is short",
                    extra=fields(ready_bytes=ready, dram_bytes=config.dram_bytes),
                )
                return
            if time.monotonic() - told_at >= PROGRESS_S:
                log.info("the arena is being made", extra=fields(ready_bytes=ready, wanted_bytes=wanted))
                if ready > told:  # else systemd's patience may end
                    sd_notify(f"EXTEND_TIMEOUT_USEC={int(3e6 * PROGRESS_S)}")
                told_at, told = time.monotonic(), ready
            await asyncio.sleep(POLL_S)

    @staticmethod
    def _bind(
        server: grpc.aio.Server, address: str, *, field: str, tls: grpc.ServerCredentials | None = None
    ) -> None:
        try:
            if tls is None:
                server.add_insecure_port(address)
            else:
                server.add_secure_port(address, tls)
        except RuntimeError as problem:
            raise ConfigError.unbound(problem, field=field, address=address) from None

    def _observe(self, observer: Callable[[events.Event, int], None] | None) -> None:
        self.loop.observer = observer

    async def _record(self, request: admin_pb2.RecordRequest) -> admin_pb2.RecordReply:
        if request.stop:
            await self._recorder.stop()
        elif request.path:
            if not os.path.isabs(request.path):
                raise BadRequest("must be absolute", field="path", value=request.path)
            await self._recorder.start(request.path, bytes_max=request.bytes_max, seconds=request.seconds)
        last = self._recorder.last
        return admin_pb2.RecordReply() if last is None else admin_pb2.RecordReply(**asdict(last))

    def _show_disk(self, state: DiskState) -> None:
        if self.config.ssd_dir and self._ready:
            self._health.set(SSD, SERVING if state is DiskState.OK else NOT_SERVING)

    def _worker_of(self, token: bytes) -> WorkerId | None:
        identity = self._descriptors.worker_of(token)
        return None if identity is None else identity.worker

    def _who(self, worker: WorkerId) -> Mapping[str, object]:
        """For the audit log."""
        by_tcp = self._door.who(worker) if self._door is not None else {}
        return by_tcp or self._descriptors.who(worker) or {"worker": worker}

    def _announce(self) -> None:
        """That it is ready, to health, log and systemd at once; and what this daemon uses, to people and machines."""
        config = self.config
        settings = asdict(config)
        settings["registry_url"] = without_password(config.registry_url)
        settings["remote_url"] = without_password(config.remote_url)
        self._ready = True
        for name in ("", *self._served):
            self._health.set(name, SERVING)
        self._show_disk(self.loop.store.state.disk_state)
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
        sd_notify("READY=1")
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

    def _words(self) -> str:
        """What this daemon uses: lines for people on a terminal, elsewhere one JSON object, as in the log that standard
        output often ends in."""
        config = self.config
        parts = {
            "arena": f"arena {config.dram_bytes / 2**20:,.0f} MiB in {config.limits.segment_count} segments"
            f" ({config.protection}), staging at most {config.staging_bytes_max / 2**20:,.0f} MiB",
            "ssd": f"SSD {self._ssd_text()}",
            "remote": f"REMOTE {self._remote_text()}",
            "directory": f"directory {config.run_dir}",
            "tcp": self._tcp_text(),
            "metrics": f"metrics http://{url_host(config.metrics_host)}:{config.metrics_port}/metrics"
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

    def _tcp_text(self) -> str:
        if self._tcp is None:
            return "TCP off"
        tls = "" if self._tcp.tls is None else ", mTLS" if self._tcp.tls.client_ca else ", TLS"
        who = f"identities of {self.config.access_file}" if self.config.access_file else "NOT AUTHENTICATED"
        return f"TCP {self._tcp} ({who}{tls})"

    def _remote_text(self) -> str:
        config = self.config
        if not config.remote_url:
            return "off"
        guarded = ("signed",) * bool(config.remote_salt_file) + ("encrypted",) * bool(config.remote_key_file)
        what = ", ".join((REMOTE_WRITES[config.remote_writes], *guarded))
        return f"{without_password(config.remote_url)} ({what})"

    def _ssd_text(self) -> str:
        config = self.config
        if not config.ssd_dir:
            idle = [
                option.name
                for option in dataclasses.fields(config)
                if option.name.startswith("ssd_")
                and getattr(config, option.name)
                != ({} if option.default is dataclasses.MISSING else option.default)
            ]
            return f"off: without ssd_dir, {' and '.join(idle)} mean nothing" if idle else "off"
        state = self.loop.store.state
        encrypted = ", encrypted" if config.ssd_key_file else ""
        return (
            f"{config.ssd_dir}, at most {config.ssd_bytes / 2**20:,.0f} MiB: {state.disk_state.name.lower()},"
            f" {state.cold.count:,} chunks found, durable within {config.durable_within_ms} ms{encrypted}"
        )

    def _catch_signals(self) -> None:
        """What would end the process by default must not cost what DRAM has: it drains, or means nothing here."""
        loop = asyncio.get_running_loop()
        for number in DRAINING:
            if number in UNLESS_IGNORED and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: it is to outlive its terminal
            loop.add_signal_handler(number, self._signalled, number)
        for number in MEANINGLESS:
            loop.add_signal_handler(number, self._ignored, number)

    def _signalled(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._signals:
            log.warning("%s again: leaving at once", name)
            leave(128 + number)
        if self._ready:
            log.info("%s: draining", name, extra=fields(drain_ms=self.config.drain_ms))
        else:
            log.info("%s: stopping before it was ready", name)
        self._signals += 1
        self._end(0)

    def _ignored(self, number: int) -> None:
        log.warning(
            "%s means nothing here, and is ignored",
            signal.Signals(number).name,
            extra=fields(remedy="SIGTERM drains and ends; logs go to standard error and need no rotation"),
        )

    def _end(self, status: int) -> None:
        if not self._stop.done():
            self._stop.set_result(status)

    # -------------------------------------------------------------------------------------- the run directory

    async def _watch_directory(self) -> None:
        """Whoever cleans the directory (of files that look old, in /tmp) takes lock and sockets away from under us:
        then they are made anew, because connected workers are served all the time and newcomers should be, too. Where
        another daemon was faster, we stop: nobody could find us any more, and `drain` saves what DRAM has."""
        remade = 0
        told_at = -math.inf
        while True:
            await asyncio.sleep(WATCH_S)
            gone = self._directory.gone()
            if not gone:
                continue
            try:
                if remade >= REMADE_MAX:
                    raise DirectoryTaken(
                        f"lock and sockets were removed {remade} times",
                        field="run_dir",
                        value=self.config.run_dir,
                        remedy="find out who removes them",
                    )
                await self._make_again(gone)
                remade += 1
            except DirectoryTaken as taken:
                log.critical("the run directory is lost: stopping", extra=fields(why=str(taken), gone=gone))
                self._end(EXIT_UNAVAILABLE)
                return
            except (StoreError, OSError) as problem:
                if time.monotonic() - told_at >= TELL_AGAIN_S:
                    told_at = time.monotonic()
                    log.error(
                        "the run directory was cleaned and cannot be made again: nobody new can connect",
                        extra=fields(why=str(problem), gone=gone),
                    )

    async def _make_again(self, gone: Sequence[str]) -> None:
        config = self.config
        if not self._directory.holds:
            self._directory.take_again()
        for path in (config.descriptor_socket, config.stream_socket):
            if path in gone:
                self._directory.clear(path)
                self._descriptors.listen_again(path)
                self._directory.opened(path)
        if config.grpc_socket in gone:
            await self._serve_grpc(tcp=None)
        log.warning(
            "the run directory was cleaned under the daemon: made again",
            extra=fields(
                gone=gone,
                remedy="use a directory that nobody cleans (/run), or name it to the cleaner (tmpfiles.d: x PATH)",
            ),
        )

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
        return int(gauges["leases"] + gauges["reservations"] + self.loop.store.behind)

    async def _families(self) -> list[Metric]:
        lent = self._regions.stats()
        process = {
            "uptime_seconds": time.monotonic() - self._started_at,
            "attach_streams": float(self._service.streams),
            "staging_bytes": float(self._staging.bytes_granted),
            "directory_bytes": float(self._directories.memory_bytes),
            "regions": float(lent.regions),
            "region_bytes": float(lent.bytes),
            "tcp_refused": float(self._access.refused if self._access is not None else 0),
        }
        values = (await self._own_stats()).values
        if self._fleet is not None:
            values = {
                **values,
                "gauges": {**values["gauges"], **self._fleet.gauges()},
                "counters": {**values["counters"], **self._fleet.counters()},
            }
        return families(values, process, __version__, self.loop.disk_stats())

    async def _close(self) -> None:
        """Each step bounded; the last is the lock, so that no successor meets our remains."""
        await self._recorder.stop()
        self._metrics.close()
        if self._fleet is not None:
            await asyncio.to_thread(self._fleet.close)
        if self._door is not None:
            self._door.close()
        self._service.close()
        for watching in self._watching:
            watching.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        stopping = [asyncio.ensure_future(server.stop(grace=0.5)) for server in self._servers]
        if stopping:
            await asyncio.wait(stopping, timeout=CLOSE_TIMEOUT_S)
        await self._descriptors.close()
        self.loop.close(CLOSE_TIMEOUT_S)
        self._regions.close(CLOSE_TIMEOUT_S)
        self._staging.close()
        self._directories.end()
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
