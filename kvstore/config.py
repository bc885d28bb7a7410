"""One frozen configuration of the daemon: flags over environment (`KVSTORED_*`) over TOML over these defaults."""

from __future__ import annotations

import difflib
import errno
import ipaddress
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from kvstore.core.limits import Limits
from kvstore.core.policies import POLICIES
from kvstore.errors import ConfigError
from kvstore.tiers.format import PAGE_BYTES, RECORD_HEADER_BYTES
from kvstore.types import Protection

SOCKET_PATH_BYTES_MAX = 107
"""sun_path of a unix socket, less its terminating zero."""
DESCRIPTOR_SOCKET = "kvstored.sock"
STREAM_SOCKET = "stream.sock"
"""The same as the descriptor socket, for languages that have no SOCK_SEQPACKET."""
GRPC_SOCKET = "grpc.sock"
LOCK_FILE = "lock"
LEARNED_FILE = "learned.json"
REMOTE_JOURNAL = "remote.forgotten"
PEERS_JOURNAL = "peers.forgotten"
"""What was forgotten elsewhere, in ssd_dir or run_dir (`core/remote/forgets.py`)."""
ENVIRONMENT_PREFIX = "KVSTORED_"
TENANT_LENGTH_MAX = 256
"""Characters of a tenant's name: as long as `kvctl purge` takes it."""
REMOTE_STORE = "remote"
"""Name of the REMOTE store among the sources beyond this node,"""
PEERS = "peers"
"""and of the nodes beside it."""
REMOTE_WRITES = {
    "on-evict": "writes on-evict: what is about to leave DRAM",
    "write-through": "writes write-through: everything, soon",
    "off": "writes off: reads alone",
}
"""Values of remote_writes, as the daemon says at its start what they do."""
CONFIG_VARIABLE = f"{ENVIRONMENT_PREFIX}CONFIG"
"""Names the TOML file; all else with the prefix is a setting."""
ONE_SEGMENT = "in one segment: it serves one model at a time, and what another saves meanwhile is FULL"
MORE_SEGMENTS = "raise dram_bytes, or lower segment_bytes: more segments than models"
SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN = 1 << 30, 32 << 20
"""Of a segment whose size nobody named."""
SEGMENTS_MIN = 4
"""So many an arena has if nobody says otherwise: some for models, one each for `kvctl put` and doctor."""
SSD_INDEX_BYTES_MIN = 16 << 20
FORGET_WITHIN_S_MIN = 10
SSD_INDEX_SHARE = 32
MAKERS_MAX = 65_536
INDEX_BYTES_PER_MAKERS = 2_048
"""So many bytes of the index for each digest of several makers that it may have, each of which takes some 100."""
QUOTAS = ("dram_quotas", "ssd_quotas", "remote_quotas")
SSD_OVERHEAD_BYTES = 1 << 20
"""Of ssd_bytes: for the lock, the probe, LMDB's lock file and the directories."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    run_dir: str = "/run/kvstored"
    """Directory of the two sockets and the lock; one daemon a directory."""
    dram_bytes: int = 4 << 30
    """Size of the arena; a whole number of segments. Refused above the cgroup's memory limit."""
    segment_bytes: int = SEGMENT_BYTES_MAX
    """Size of one segment of the arena: the piece that moves between models and slab classes. Unless it is named, it is
    made smaller (32 MiB at least) where dram_bytes is no whole number of segments, or fewer than four."""
    protection: str = "sealed"
    """"sealed": workers read segments read-only and write through staging memory. "group": the workers of one namespace
    map its segments read-write and write in place."""
    staging_bytes: int = 64 << 20
    """Staging memory a worker gets unless it asks for less (protection "sealed")."""
    staging_bytes_max: int = 1 << 30
    """Staging memory of all workers together; beyond it a worker gets less, or a clear refusal."""
    prefault: bool = True
    """Allocate the arena's pages at the start, and touch them in the background while they serve already."""
    huge_pages: bool = True
    """Ask for transparent huge pages where the kernel offers them for shared memory."""
    copy_threads: int = 2
    """Threads that copy and checksum; they do not hold the interpreter's lock meanwhile."""

    ssd_dir: str = ""
    """Directory of the SSD tier (slab files and index); empty: no SSD tier. One daemon a directory."""
    ssd_bytes: int = 64 << 30
    """Hard cap of everything in ssd_dir, the index included."""
    ssd_slab_bytes: int = 256 << 20
    """Size of one slab file; preallocated when it is first needed. Fixed when ssd_dir is created."""
    ssd_index_bytes: int = 0
    """Part of ssd_bytes that the index may use; 0: a thirty-second, at least 16 MiB."""
    ssd_direct_io: bool = False
    """Bypass the page cache (worth it on real NVMe, where buffered I/O doubles DRAM). Fixed when ssd_dir is created."""
    ssd_key_file: str = ""
    """File with keys of 64 hexadecimal digits, the newest first: KV and schemas on SSD are encrypted with the first
    (AES-256-GCM), and what is read opens with any. Empty: they are not encrypted."""
    ssd_threads: int = 4
    """Threads that read and write slab files."""
    ssd_deadline_ms: int = 2_000
    """A read or write that takes longer is given up: a miss with a reason, and the tier degrades."""
    durable_within_ms: int = 5_000
    """What was committed longer ago than this survives a power cut."""
    scrub_bytes_per_s: int = 8 << 20
    """Rate at which all that is on SSD (under protection "group" also what is in DRAM) is read and verified in the
    background, round after round, while the disk has nothing else to do; 0: never."""

    eviction: str = "expected"
    """What leaves DRAM first: "expected": what no queued job needs, in the order of the hits that may be expected of
    it, then what is needed last; "hints": as that, but least recently used first; "lru"; "fifo"."""
    prefetch_share_max: float = 0.8
    """Share of the arena that chunks fetched ahead for queued jobs may fill."""
    hint_pin_share_max: float = 0.25
    """Share of the arena that pins of hints may keep, of all tenants together; each has an equal part. 0: no pins."""
    hint_retain_share_max: float = 0.5
    """Share of arena and SSD that hints may have retained, likewise."""
    hint_ttl_ms: int = 60_000
    """Time to live of hints unless the scheduler asks for less; it publishes again before that."""
    session_ttl_ms: int = 7 * 24 * 3_600_000
    """A session ends this long after its last use (7 days), with its chunks that nobody used for as long; 0: never.
    Sessions take room in the index of the SSD tier; when that is full, the oldest give way before their time."""

    lease_ttl_ms: int = 10_000
    """Time to live of a lease unless the caller asks for less; renewed by the client."""
    reservation_ttl_ms: int = 30_000
    """Time a worker has between Reserve and Commit."""
    incomplete_ttl_ms: int = 60_000
    """A chunk of which some rank never commits its shard is dropped after this."""
    pin_share_max: float = 0.5
    """Share of the arena that one engine group may pin by leases, renewed ones included."""
    reserve_share_max: float = 0.25
    """Share of the arena that one worker may hold in open reservations."""
    drain_ms: int = 3_000
    """On SIGTERM: how long open leases and commits may take to end."""
    peer_timeout_ms: int = 30_000
    """How long a peer may take to accept one message that is sent to it, or to send the next one of a Put; then its
    call ends."""

    fast_lane: bool = True
    """Offer workers on this machine a fast lane, a unix socket of their own for what else goes over gRPC's Attach: a
    small request costs a fifth there. Off: all use gRPC, which every client can; it is easier to look into."""

    directory: bool = True
    """Let workers on this machine look up chunks by themselves, in shared memory: reads of what is in DRAM then need no
    message. Off: they ask for each."""

    tcp_address: str = ""
    """"host:port" to serve gRPC on TCP too; empty: off. Needs access_file; other addresses than loopback need TLS."""
    tcp_unauthenticated: bool = False
    """For development: on loopback, and without access_file, every process of this machine reads and writes tenant
    "default" over TCP."""
    access_file: str = ""
    """TOML file that says who comes in over TCP, as which tenant, in which roles: see docs/security.md. Read again when
    it, or a file that it names, changes."""
    tls_certificate: str = ""
    """PEM file of the certificate that TCP callers see, with its chain. Read again when it changes."""
    tls_key: str = ""
    """PEM file of its private key, without a password, that other users cannot read."""
    tls_client_ca: str = ""
    """PEM file of the authorities whose client certificates are accepted; every client then needs one (mTLS)."""
    node_name: str = ""
    """Of this daemon in a fleet, and in KV events: unique there, and stable; empty: the host's name."""
    registry_url: str = ""
    """Redis where nodes tell each other what they hold: redis://, rediss://, redis+cluster://host:port,host:port,
    unix://; empty: off. It must not evict (maxmemory-policy noeviction), so it is not the one of a cache."""
    registry_ttl_ms: int = 10_000
    """A node that was silent for so long has gone. Ten heartbeats in that time."""
    registry_pages_per_s: int = 16
    """How many pages, of 4,096 chunks and at most 32 KiB each, this node writes to the registry a second."""
    registry_sessions_max: int = 10_000
    """Sessions of which this node tells the others there, those that changed last; 0: sessions are this node's own."""
    registry_session_ttl_s: int = 86_400
    """A session that nobody went on with for so long is told no more."""
    fleet_secret_file: str = ""
    """File with the secret that all nodes of a fleet share, and nobody else has. Names and hashes in the registry, and
    the proofs of peers, are derived from it."""
    peer_address: str = ""
    """"host:port" where other nodes of the fleet read chunks; empty: nowhere. Needs TLS (peer_certificate)."""
    peer_advertise: str = ""
    """"host:port" that other nodes connect to, where that is not peer_address."""
    peer_certificate: str = ""
    """PEM file of this node's certificate, as server and as client of its peers. Read again when it changes."""
    peer_key: str = ""
    """PEM file of its private key."""
    peer_ca: str = ""
    """PEM file of the authority that signs the certificates of nodes, and of nobody else."""
    peer_tls_name: str = ""
    """Name that the certificates of all nodes have; empty: each has its own node_name."""
    peer_plaintext: bool = False
    """For development: talk to peers on loopback without TLS. They still have to know the fleet's secret."""
    peer_bytes_per_s: int = 0
    """Cap on what is read from peers, and on what is served to them; 0: none."""
    peer_deadline_ms: int = 2_000
    """A chunk that a peer does not give within this is a miss."""
    peer_threads: int = 4
    """Threads that read from peers."""
    forget_within_s: int = 300
    """What came from other nodes (by peers or the REMOTE store) goes when this node could not read for so long what
    they have forgotten: see docs/peers.md; 0: it stays. At least 10."""
    kv_events_endpoint: str = ""
    """ZMQ endpoint to bind, tcp://127.0.0.1:5557 say, for KV events in vLLM's format; empty: none are published."""
    remote_url: str = ""
    """Store beyond this node, which other nodes share: redis://, rediss://, redis+cluster://, rediss+cluster://, s3://,
    gs://, az://, or file:///folder (NFS and the like); empty: none. Credentials of object stores come from their usual
    environment variables. See docs/remote.md."""
    remote_writes: str = "on-evict"
    """What this node writes there: "on-evict" (what is about to leave DRAM), "write-through" (everything, soon) or
    "off" (nothing; what others wrote is read all the same)."""
    remote_bytes: int = 1 << 40
    """Of what this node has put there; what promises the fewest hits a byte gives way."""
    remote_ttl_s: int = 7 * 24 * 3_600
    """Records go after this."""
    remote_salt_file: str = ""
    """File with a secret of 16 bytes or more that all nodes of one cluster share: it signs records, and keys their
    names. Without it, whoever can write to the store can make a node serve KV of his own."""
    remote_key_file: str = ""
    """File with keys of 64 hexadecimal digits, the newest first, which all nodes of one cluster share: what is written
    to the store is encrypted with the first (AES-256-GCM), what is read opens with any. Empty: it is not encrypted."""
    remote_lookup_ms: int = 50
    """How long a Match or an Acquire waits for what the look-up of its missing keys finds, at most."""
    remote_deadline_ms: int = 5_000
    """Of a transfer. A store that is late is left alone for a while."""
    remote_threads: int = 4
    """Threads that read from the store; half as many write."""
    remote_bytes_per_s: int = 0
    """Cap on what is read, and on what is written; 0: none."""
    message_bytes_max: int = 4 << 20
    """Largest message that is read, by gRPC or on a fast lane."""
    metrics_port: int = 0
    """Port of /metrics in Prometheus format; 0: off."""
    metrics_host: str = "127.0.0.1"
    """Numeric address that /metrics is served at, to everybody who reaches it: it names tenants and models."""
    tenants: Mapping[str, str] = field(default_factory=dict)
    """Tenant by numeric user id of the caller, e.g. {"1000" = "alice"}. The daemon's own user and root are tenant
    "default" unless named; other users are refused."""
    dram_quotas: Mapping[str, int] = field(default_factory=dict)
    """How many bytes of DRAM a tenant may use on this node, e.g. {alice = "8G", "*" = "2G"}; "*": each that is not
    named. Who is at a quota gives way to itself."""
    ssd_quotas: Mapping[str, int] = field(default_factory=dict)
    """The same on SSD,"""
    remote_quotas: Mapping[str, int] = field(default_factory=dict)
    """and of what this node has put into the REMOTE store."""
    log_level: str = "info"
    """debug, info, warning or error; logs are one JSON object a line."""

    def __post_init__(self) -> None:
        _check_types(self)
        page = mmap.PAGESIZE
        for name in ("dram_bytes", "segment_bytes", "staging_bytes", "staging_bytes_max"):
            _positive(self, name)
        if self.segment_bytes % page:
            raise ConfigError(
                f"must be a multiple of the page size {page}", field="segment_bytes", value=self.segment_bytes
            )
        if self.dram_bytes < self.segment_bytes:
            raise ConfigError(
                f"is smaller than one segment of {self.segment_bytes} bytes",
                field="dram_bytes",
                value=self.dram_bytes,
                remedy="raise dram_bytes or lower segment_bytes",
            )
        if self.dram_bytes % self.segment_bytes:
            raise ConfigError(
                f"must be a whole number of segments of {self.segment_bytes} bytes",
                field="dram_bytes",
                value=self.dram_bytes,
                remedy=f"give {self.dram_bytes // self.segment_bytes * self.segment_bytes}, or another segment_bytes",
            )
        if self.dram_bytes // self.segment_bytes > 65_536:
            raise ConfigError(
                "gives more than 65536 segments", field="segment_bytes", value=self.segment_bytes
            )
        if self.protection not in {item.value for item in Protection}:
            raise ConfigError('must be "sealed" or "group"', field="protection", value=self.protection)
        for name in (
            "lease_ttl_ms",
            "reservation_ttl_ms",
            "incomplete_ttl_ms",
            "copy_threads",
            "message_bytes_max",
            "peer_timeout_ms",
            "registry_ttl_ms",
            "registry_pages_per_s",
            "registry_session_ttl_s",
            "peer_deadline_ms",
            "peer_threads",
        ):
            _positive(self, name)
        for name in ("pin_share_max", "reserve_share_max"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ConfigError("must be above 0 and at most 1", field=name, value=getattr(self, name))
        for name in (
            "ssd_bytes",
            "ssd_slab_bytes",
            "ssd_threads",
            "ssd_deadline_ms",
            "durable_within_ms",
            "hint_ttl_ms",
        ):
            _positive(self, name)
        if self.forget_within_s and self.forget_within_s < FORGET_WITHIN_S_MIN:
            raise ConfigError(
                f"must be 0, or at least {FORGET_WITHIN_S_MIN}: nodes read of forgets each second or so",
                field="forget_within_s",
                value=self.forget_within_s,
            )
        for name in ("ssd_index_bytes", "session_ttl_ms", "scrub_bytes_per_s", "peer_bytes_per_s"):
            if getattr(self, name) < 0:
                raise ConfigError("must not be negative", field=name, value=getattr(self, name))
        if not 0.0 < self.prefetch_share_max <= 1.0:
            raise ConfigError(
                "must be above 0 and at most 1", field="prefetch_share_max", value=self.prefetch_share_max
            )
        for name in ("hint_pin_share_max", "hint_retain_share_max"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError("must be between 0 and 1", field=name, value=getattr(self, name))
        if self.eviction not in POLICIES:
            known = ", ".join(f'"{name}"' for name in POLICIES)
            raise ConfigError(f"must be one of {known}", field="eviction", value=self.eviction)
        if self.ssd_slab_bytes % PAGE_BYTES:
            raise ConfigError(
                f"must be a multiple of {PAGE_BYTES}", field="ssd_slab_bytes", value=self.ssd_slab_bytes
            )
        if self.ssd_dir and self.ssd_slabs_max < 1:
            raise ConfigError(
                f"leaves no room for one slab of {self.ssd_slab_bytes} bytes beside an index of {self.ssd_index_max}",
                field="ssd_bytes",
                value=self.ssd_bytes,
                remedy="raise ssd_bytes or lower ssd_slab_bytes or ssd_index_bytes",
            )
        if self.remote_writes not in REMOTE_WRITES:
            raise ConfigError(
                'must be "on-evict", "write-through" or "off"',
                field="remote_writes",
                value=self.remote_writes,
            )
        for name in (
            "remote_bytes",
            "remote_ttl_s",
            "remote_lookup_ms",
            "remote_deadline_ms",
            "remote_threads",
        ):
            _positive(self, name)
        if self.remote_bytes_per_s < 0:
            raise ConfigError(
                "must not be negative", field="remote_bytes_per_s", value=self.remote_bytes_per_s
            )
        if self.remote_threads > 64:
            raise ConfigError("must be at most 64", field="remote_threads", value=self.remote_threads)
        if self.copy_threads > 64:
            raise ConfigError("must be at most 64", field="copy_threads", value=self.copy_threads)
        if not 0 <= self.metrics_port <= 65_535:
            raise ConfigError("must be between 0 and 65535", field="metrics_port", value=self.metrics_port)
        try:
            ipaddress.ip_address(self.metrics_host)
        except ValueError:
            raise ConfigError(
                "needs a numeric IP address",
                field="metrics_host",
                value=self.metrics_host,
                remedy="127.0.0.1 for this machine alone, 0.0.0.0 for everybody",
            ) from None
        if self.drain_ms < 0:
            raise ConfigError("must not be negative", field="drain_ms", value=self.drain_ms)
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(
                "must be debug, info, warning or error", field="log_level", value=self.log_level
            )
        for uid, tenant in self.tenants.items():
            if not (uid.isascii() and uid.isdigit()) or not _is_tenant(tenant):
                raise ConfigError(
                    f"maps a numeric user id to a tenant's name, at most {TENANT_LENGTH_MAX} characters of UTF-8",
                    field="tenants",
                    value=f"{uid}={tenant}",
                    remedy="write 1000=alice; `id -u USER` prints the number",
                )
        for name in QUOTAS:
            for tenant, size in getattr(self, name).items():
                if not _is_tenant(tenant) or not isinstance(size, int) or isinstance(size, bool) or size <= 0:
                    raise ConfigError(
                        "maps the name of a tenant to a size above 0",
                        field=name,
                        value=f"{tenant}={size}",
                        remedy='write alice=8G, and "*" for each tenant that is not named',
                    )
        if not self.run_dir:
            raise ConfigError("is empty", field="run_dir", remedy="name a directory; . is the current one")
        for path in (self.descriptor_socket, self.stream_socket, self.grpc_socket):
            length = len(os.fsencode(path))
            if length > SOCKET_PATH_BYTES_MAX:
                raise ConfigError(
                    f"makes the socket path {length} bytes long; a unix socket allows {SOCKET_PATH_BYTES_MAX}",
                    field="run_dir",
                    value=self.run_dir,
                    remedy="choose a shorter directory",
                )

    @property
    def descriptor_socket(self) -> str:
        return os.path.join(self.run_dir, DESCRIPTOR_SOCKET)

    @property
    def stream_socket(self) -> str:
        return os.path.join(self.run_dir, STREAM_SOCKET)

    @property
    def grpc_socket(self) -> str:
        return os.path.join(self.run_dir, GRPC_SOCKET)

    @property
    def lock_file(self) -> Path:
        return Path(self.run_dir) / LOCK_FILE

    @property
    def ssd_index_max(self) -> int:
        """The part of ssd_bytes that belongs to the index, in whole pages."""
        wanted = self.ssd_index_bytes or max(SSD_INDEX_BYTES_MIN, self.ssd_bytes // SSD_INDEX_SHARE)
        return wanted // PAGE_BYTES * PAGE_BYTES

    @property
    def ssd_slabs_max(self) -> int:
        """How many slab files fit under the cap beside the index and small files; may be negative."""
        return (self.ssd_bytes - self.ssd_index_max - SSD_OVERHEAD_BYTES) // self.ssd_slab_bytes

    @property
    def sources(self) -> tuple[str, ...]:
        """Who is asked for chunks that are missing here, by name."""
        return (PEERS,) * bool(self.registry_url) + (REMOTE_STORE,) * bool(self.remote_url)

    @property
    def limits(self) -> Limits:
        return Limits(
            arena_bytes=self.dram_bytes,
            segment_bytes=self.segment_bytes,
            protection=Protection(self.protection),
            lease_ttl_ms=self.lease_ttl_ms,
            lease_ttl_max_ms=max(60_000, self.lease_ttl_ms),
            reservation_ttl_ms=self.reservation_ttl_ms,
            reservation_ttl_max_ms=max(120_000, self.reservation_ttl_ms),
            incomplete_ttl_ms=self.incomplete_ttl_ms,
            pin_share_max=self.pin_share_max,
            reserve_share_max=self.reserve_share_max,
            eviction=self.eviction,
            sources=self.sources,
            prefetch_share_max=self.prefetch_share_max,
            hint_pin_share_max=self.hint_pin_share_max,
            hint_retain_share_max=self.hint_retain_share_max,
            hint_ttl_ms=self.hint_ttl_ms,
            session_ttl_ms=self.session_ttl_ms,
            makers_max=min(MAKERS_MAX, self.ssd_index_max // INDEX_BYTES_PER_MAKERS)
            if self.ssd_dir
            else MAKERS_MAX,
            disk_slab_bytes=self.ssd_slab_bytes,
            disk_slabs_max=self.ssd_slabs_max if self.ssd_dir else 0,
            disk_header_bytes=PAGE_BYTES if self.ssd_direct_io else RECORD_HEADER_BYTES,
            disk_deadline_ms=self.ssd_deadline_ms,
            durable_within_ms=self.durable_within_ms,
            scrub_bytes_per_s=self.scrub_bytes_per_s,
            directory=self.directory,
            remote_store=REMOTE_STORE if self.remote_url else "",
            forgets_told=self.sources,
            sessions_told=PEERS if self.registry_url and self.registry_sessions_max else "",
            sessions_told_max=self.registry_sessions_max,
            forget_within_ms=1_000 * self.forget_within_s,
            remote_writes=self.remote_writes if self.remote_url else "off",
            remote_bytes_max=self.remote_bytes,
            dram_quotas=self.dram_quotas,
            ssd_quotas=self.ssd_quotas,
            remote_quotas=self.remote_quotas,
            remote_deadline_ms=self.remote_deadline_ms,
            fetch_within_ms={PEERS: self.peer_deadline_ms},
            lookup_wait_ms=self.remote_lookup_ms,
            lookup_deadline_ms=max(500, 2 * self.remote_lookup_ms),
            remote_bytes_in_flight_max=min(64 << 20, max(1 << 20, self.dram_bytes // 16)),
            remote_writes_in_flight_max=min(16 << 20, max(1 << 20, self.dram_bytes // 32)),
            remote_linger_ms=0 if self.remote_url.startswith(("redis", "rediss")) else 500,
        )


SIZE_SUFFIXES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
WANTED: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: 'tenants by user id: 1000=alice,1001=bob, or in a file [tenants] with 1000 = "alice"',
}
QUOTAS_WANTED = 'sizes by tenant: alice=8G,*=2G, or in a file {alice = "8G", "*" = "2G"}'


def address_remedy(problem: OSError) -> str:
    """What to do about an address that the system refused to listen at."""
    if problem.errno == errno.EADDRINUSE:
        return "stop what listens there (ss -ltnp), or choose another"
    if problem.errno == errno.EADDRNOTAVAIL:
        return "choose an address of this machine (ip addr)"
    return "choose a port from 1024 on" if problem.errno == errno.EACCES else "choose another"


def _meant(name: str) -> str:
    """What to do about a setting that does not exist."""
    return did_you_mean(name, _kinds()) + "kvstored --help lists all settings"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question in front of a remedy; nothing where no name is alike."""
    alike = difflib.get_close_matches(name, known, n=3)
    return "did you mean " + " or ".join(alike) + "? " if alike else ""


def is_size(name: str) -> bool:
    """Whether a setting of numbers is one in bytes, which may be given as 8G."""
    return name.endswith(("_bytes", "_bytes_max", "_bytes_per_s"))


def parse_setting(name: str, text: str) -> Any:
    """A setting given as text (flag or environment): sizes take K, M, G, T (powers of 1024), switches true or false,
    `tenants` "1000=alice,1001=bob", quotas "alice=8G,*=2G"."""
    kind = _kinds().get(name)
    if kind is None:
        raise ConfigError("no such setting", field=name, value=text, remedy=_meant(name))
    try:
        if kind is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[
                text.lower()
            ]
        if kind is int:
            return _size(text) if is_size(name) else int(text)
        if kind is float:
            return float(text)
        if name in QUOTAS:
            quotas = [pair.rsplit("=", 1) for pair in text.split(",") if pair]
            return {tenant: _size(size) for tenant, size in quotas}
        if kind is dict:
            return dict(pair.split("=", 1) for pair in text.split(",") if pair)
    except (KeyError, ValueError):
        wanted = "a size" if is_size(name) else QUOTAS_WANTED if name in QUOTAS else WANTED[kind]
        remedy = "bytes, or a whole number with K, M, G or T: 8G" if is_size(name) else ""
        raise ConfigError(f"is not {wanted}", field=name, value=text, remedy=remedy) from None
    return text


def load(toml: Mapping[str, Any], environment: Mapping[str, str], flags: Mapping[str, Any]) -> StoreConfig:
    """Flags over environment over TOML over defaults; an unknown key anywhere is refused."""
    values: dict[str, Any] = {}
    for key, value in toml.items():
        if key not in _kinds():
            raise ConfigError("unknown key in the TOML file", field=key, value=value, remedy=_meant(key))
        if key in QUOTAS and isinstance(value, dict):
            value = {tenant: _quota(key, tenant, size) for tenant, size in value.items()}
        values[key] = (
            parse_setting(key, value) if isinstance(value, str) and _kinds()[key] is not str else value
        )
    for key, text in environment.items():
        if key.startswith(ENVIRONMENT_PREFIX) and key != CONFIG_VARIABLE:
            name = key.removeprefix(ENVIRONMENT_PREFIX).lower()
            values[name] = parse_setting(name, text)
    values.update(flags)
    dram_bytes = values.get("dram_bytes")
    if isinstance(dram_bytes, int) and "segment_bytes" not in values:
        values["segment_bytes"] = _fitting_segment_bytes(dram_bytes)
    return StoreConfig(**values)


def _size(text: str) -> int:
    """Raises ValueError."""
    digits = text.lower().removesuffix("ib").removesuffix("b")
    factor = SIZE_SUFFIXES.get(digits[-1:], 1)
    return int(digits[:-1]) * factor if factor > 1 else int(digits)


def _quota(name: str, tenant: str, size: Any) -> Any:
    """As it stands in a file: bytes, or text with a suffix."""
    try:
        return _size(size) if isinstance(size, str) else size
    except ValueError:
        raise ConfigError(f"must be {QUOTAS_WANTED}", field=name, value=f"{tenant}={size}") from None


def _fitting_segment_bytes(dram_bytes: int) -> int:
    """The largest size that cuts the arena into whole segments, and enough of them for several models."""
    size = SEGMENT_BYTES_MAX
    while size > SEGMENT_BYTES_MIN and (dram_bytes % size or dram_bytes < SEGMENTS_MIN * size):
        size //= 2
    return size


def _kinds() -> dict[str, type]:
    kinds: dict[str, type] = {}
    for item in fields(StoreConfig):
        kinds[item.name] = dict if item.default is MISSING else type(item.default)
    return kinds


def _check_types(config: StoreConfig) -> None:
    for name, kind in _kinds().items():
        value = getattr(config, name)
        wanted = (int, float) if kind is float else (Mapping,) if kind is dict else (kind,)
        if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
            what = QUOTAS_WANTED if name in QUOTAS else WANTED[kind]
            raise ConfigError(f"must be {what}", field=name, value=repr(value))


def _positive(config: StoreConfig, name: str) -> None:
    if getattr(config, name) <= 0:
        raise ConfigError("must be above 0", field=name, value=getattr(config, name))


def _is_tenant(name: object) -> bool:
    """Names from the environment and command lines may have bytes that are no text: nothing is keyed by those."""
    try:
        return isinstance(name, str) and len(name.encode()) > 0 and len(name) <= TENANT_LENGTH_MAX
    except UnicodeEncodeError:
        return False
