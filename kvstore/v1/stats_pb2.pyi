from kvstore.v1 import hints_pb2 as _hints_pb2
from kvstore.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchStatsRequest(_message.Message):
    __slots__ = ("interval_ms",)
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    def __init__(self, interval_ms: _Optional[int] = ...) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("arena", "pools", "namespaces", "counters", "gauges", "uptime_ms", "version", "boot_id", "ssd", "tenants")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class GaugesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ARENA_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    GAUGES_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SSD_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    arena: Arena
    pools: _containers.RepeatedCompositeFieldContainer[PoolStats]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStats]
    counters: _containers.ScalarMap[str, int]
    gauges: _containers.ScalarMap[str, float]
    uptime_ms: int
    version: str
    boot_id: bytes
    ssd: Ssd
    tenants: _containers.RepeatedCompositeFieldContainer[TenantStats]
    def __init__(self, arena: _Optional[_Union[Arena, _Mapping]] = ..., pools: _Optional[_Iterable[_Union[PoolStats, _Mapping]]] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceStats, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ..., gauges: _Optional[_Mapping[str, float]] = ..., uptime_ms: _Optional[int] = ..., version: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., ssd: _Optional[_Union[Ssd, _Mapping]] = ..., tenants: _Optional[_Iterable[_Union[TenantStats, _Mapping]]] = ...) -> None: ...

class TenantStats(_message.Message):
    __slots__ = ("tenant", "dram_bytes", "dram_quota", "ssd_bytes", "ssd_quota", "remote_bytes", "remote_quota")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAM_QUOTA_FIELD_NUMBER: _ClassVar[int]
    SSD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_QUOTA_FIELD_NUMBER: _ClassVar[int]
    REMOTE_BYTES_FIELD_NUMBER: _ClassVar[int]
    REMOTE_QUOTA_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    dram_bytes: int
    dram_quota: int
    ssd_bytes: int
    ssd_quota: int
    remote_bytes: int
    remote_quota: int
    def __init__(self, tenant: _Optional[str] = ..., dram_bytes: _Optional[int] = ..., dram_quota: _Optional[int] = ..., ssd_bytes: _Optional[int] = ..., ssd_quota: _Optional[int] = ..., remote_bytes: _Optional[int] = ..., remote_quota: _Optional[int] = ...) -> None: ...

class Ssd(_message.Message):
    __slots__ = ("state", "full", "bytes", "slab_bytes", "capacity", "free", "reserved", "ready", "quarantined", "to_store", "oldest_not_durable_ms", "cold_chunks", "why", "index_used_bytes", "index_bytes", "io_errors", "no_space", "corrupt", "index_max_bytes", "index_sessions_bytes", "index_chunks_bytes", "to_forget", "free_bytes", "problems")
    STATE_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SLAB_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    TO_STORE_FIELD_NUMBER: _ClassVar[int]
    OLDEST_NOT_DURABLE_MS_FIELD_NUMBER: _ClassVar[int]
    COLD_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    INDEX_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    INDEX_BYTES_FIELD_NUMBER: _ClassVar[int]
    IO_ERRORS_FIELD_NUMBER: _ClassVar[int]
    NO_SPACE_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    INDEX_MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    INDEX_SESSIONS_BYTES_FIELD_NUMBER: _ClassVar[int]
    INDEX_CHUNKS_BYTES_FIELD_NUMBER: _ClassVar[int]
    TO_FORGET_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    state: str
    full: bool
    bytes: int
    slab_bytes: int
    capacity: int
    free: int
    reserved: int
    ready: int
    quarantined: int
    to_store: int
    oldest_not_durable_ms: int
    cold_chunks: int
    why: str
    index_used_bytes: int
    index_bytes: int
    io_errors: int
    no_space: int
    corrupt: int
    index_max_bytes: int
    index_sessions_bytes: int
    index_chunks_bytes: int
    to_forget: int
    free_bytes: int
    problems: _containers.RepeatedCompositeFieldContainer[Problem]
    def __init__(self, state: _Optional[str] = ..., full: bool = ..., bytes: _Optional[int] = ..., slab_bytes: _Optional[int] = ..., capacity: _Optional[int] = ..., free: _Optional[int] = ..., reserved: _Optional[int] = ..., ready: _Optional[int] = ..., quarantined: _Optional[int] = ..., to_store: _Optional[int] = ..., oldest_not_durable_ms: _Optional[int] = ..., cold_chunks: _Optional[int] = ..., why: _Optional[str] = ..., index_used_bytes: _Optional[int] = ..., index_bytes: _Optional[int] = ..., io_errors: _Optional[int] = ..., no_space: _Optional[int] = ..., corrupt: _Optional[int] = ..., index_max_bytes: _Optional[int] = ..., index_sessions_bytes: _Optional[int] = ..., index_chunks_bytes: _Optional[int] = ..., to_forget: _Optional[int] = ..., free_bytes: _Optional[int] = ..., problems: _Optional[_Iterable[_Union[Problem, _Mapping]]] = ...) -> None: ...

class Problem(_message.Message):
    __slots__ = ("what", "remedy")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    what: str
    remedy: str
    def __init__(self, what: _Optional[str] = ..., remedy: _Optional[str] = ...) -> None: ...

class Arena(_message.Message):
    __slots__ = ("bytes", "ready_bytes", "assigned_bytes", "retiring_bytes", "protection", "segment_bytes")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    READY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ASSIGNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RETIRING_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROTECTION_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    ready_bytes: int
    assigned_bytes: int
    retiring_bytes: int
    protection: str
    segment_bytes: int
    def __init__(self, bytes: _Optional[int] = ..., ready_bytes: _Optional[int] = ..., assigned_bytes: _Optional[int] = ..., retiring_bytes: _Optional[int] = ..., protection: _Optional[str] = ..., segment_bytes: _Optional[int] = ...) -> None: ...

class PoolStats(_message.Message):
    __slots__ = ("namespace_id", "slot_bytes", "segments", "capacity", "free", "reserved", "ready", "quarantined")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    slot_bytes: int
    segments: int
    capacity: int
    free: int
    reserved: int
    ready: int
    quarantined: int
    def __init__(self, namespace_id: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., segments: _Optional[int] = ..., capacity: _Optional[int] = ..., free: _Optional[int] = ..., reserved: _Optional[int] = ..., ready: _Optional[int] = ..., quarantined: _Optional[int] = ...) -> None: ...

class NamespaceStats(_message.Message):
    __slots__ = ("namespace_id", "tenant", "model", "weights_epoch", "chunks", "incomplete", "resident_bytes", "pinned_bytes", "sessions", "lookups", "hits", "segments", "cold_chunks", "cold_bytes", "ssd_hits", "spec", "chunk_tokens", "chunk_bytes", "salt", "worker_chunks", "opened")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    COLD_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    COLD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_HITS_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    WORKER_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    tenant: str
    model: str
    weights_epoch: int
    chunks: int
    incomplete: int
    resident_bytes: int
    pinned_bytes: int
    sessions: int
    lookups: int
    hits: int
    segments: int
    cold_chunks: int
    cold_bytes: int
    ssd_hits: int
    spec: _types_pb2.Namespace
    chunk_tokens: int
    chunk_bytes: int
    salt: bytes
    worker_chunks: int
    opened: int
    def __init__(self, namespace_id: _Optional[int] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., weights_epoch: _Optional[int] = ..., chunks: _Optional[int] = ..., incomplete: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., sessions: _Optional[int] = ..., lookups: _Optional[int] = ..., hits: _Optional[int] = ..., segments: _Optional[int] = ..., cold_chunks: _Optional[int] = ..., cold_bytes: _Optional[int] = ..., ssd_hits: _Optional[int] = ..., spec: _Optional[_Union[_types_pb2.Namespace, _Mapping]] = ..., chunk_tokens: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., salt: _Optional[bytes] = ..., worker_chunks: _Optional[int] = ..., opened: _Optional[int] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("namespace_id", "limit", "skip", "session")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    limit: int
    skip: int
    session: bytes
    def __init__(self, namespace_id: _Optional[int] = ..., limit: _Optional[int] = ..., skip: _Optional[int] = ..., session: _Optional[bytes] = ...) -> None: ...

class SessionRow(_message.Message):
    __slots__ = ("session", "tenant", "namespace_id", "version", "entry_count", "token_count", "usable", "resident_bytes", "idle_ms", "bytes", "ssd_bytes", "reason", "hints")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENTRY_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    USABLE_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_BYTES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    tenant: str
    namespace_id: int
    version: int
    entry_count: int
    token_count: int
    usable: int
    resident_bytes: int
    idle_ms: int
    bytes: int
    ssd_bytes: int
    reason: int
    hints: _containers.RepeatedCompositeFieldContainer[_hints_pb2.HintState]
    def __init__(self, session: _Optional[bytes] = ..., tenant: _Optional[str] = ..., namespace_id: _Optional[int] = ..., version: _Optional[int] = ..., entry_count: _Optional[int] = ..., token_count: _Optional[int] = ..., usable: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., idle_ms: _Optional[int] = ..., bytes: _Optional[int] = ..., ssd_bytes: _Optional[int] = ..., reason: _Optional[int] = ..., hints: _Optional[_Iterable[_Union[_hints_pb2.HintState, _Mapping]]] = ...) -> None: ...

class ListSessionsReply(_message.Message):
    __slots__ = ("rows", "total")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[SessionRow]
    total: int
    def __init__(self, rows: _Optional[_Iterable[_Union[SessionRow, _Mapping]]] = ..., total: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("namespace_id", "session", "keys")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    session: bytes
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, namespace_id: _Optional[int] = ..., session: _Optional[bytes] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ChunkHistory(_message.Message):
    __slots__ = ("key", "outcome", "reason", "token_count", "shards_ready", "shards", "pins", "hits", "age_ms", "idle_ms", "manifests", "derived", "maker", "bytes", "tiers", "moving", "durable", "needed", "hints", "resident_in", "standing")
    KEY_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    SHARDS_READY_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    MANIFESTS_FIELD_NUMBER: _ClassVar[int]
    DERIVED_FIELD_NUMBER: _ClassVar[int]
    MAKER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    MOVING_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_IN_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    outcome: int
    reason: int
    token_count: int
    shards_ready: int
    shards: int
    pins: int
    hits: int
    age_ms: int
    idle_ms: int
    manifests: int
    derived: bool
    maker: bytes
    bytes: int
    tiers: int
    moving: bool
    durable: bool
    needed: bool
    hints: _containers.RepeatedCompositeFieldContainer[_hints_pb2.HintState]
    resident_in: _containers.RepeatedScalarFieldContainer[str]
    standing: Standing
    def __init__(self, key: _Optional[bytes] = ..., outcome: _Optional[int] = ..., reason: _Optional[int] = ..., token_count: _Optional[int] = ..., shards_ready: _Optional[int] = ..., shards: _Optional[int] = ..., pins: _Optional[int] = ..., hits: _Optional[int] = ..., age_ms: _Optional[int] = ..., idle_ms: _Optional[int] = ..., manifests: _Optional[int] = ..., derived: bool = ..., maker: _Optional[bytes] = ..., bytes: _Optional[int] = ..., tiers: _Optional[int] = ..., moving: bool = ..., durable: bool = ..., needed: bool = ..., hints: _Optional[_Iterable[_Union[_hints_pb2.HintState, _Mapping]]] = ..., resident_in: _Optional[_Iterable[str]] = ..., standing: _Optional[_Union[Standing, _Mapping]] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("rule", "jobs_before", "worth", "least_worth", "kind", "jobs_ahead", "jobs_kept", "ahead_bytes", "kept_bytes")
    RULE_FIELD_NUMBER: _ClassVar[int]
    JOBS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    WORTH_FIELD_NUMBER: _ClassVar[int]
    LEAST_WORTH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    JOBS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    JOBS_KEPT_FIELD_NUMBER: _ClassVar[int]
    AHEAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    rule: str
    jobs_before: int
    worth: float
    least_worth: float
    kind: str
    jobs_ahead: int
    jobs_kept: int
    ahead_bytes: int
    kept_bytes: int
    def __init__(self, rule: _Optional[str] = ..., jobs_before: _Optional[int] = ..., worth: _Optional[float] = ..., least_worth: _Optional[float] = ..., kind: _Optional[str] = ..., jobs_ahead: _Optional[int] = ..., jobs_kept: _Optional[int] = ..., ahead_bytes: _Optional[int] = ..., kept_bytes: _Optional[int] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("version", "chunks")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    version: int
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkHistory]
    def __init__(self, version: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[ChunkHistory, _Mapping]]] = ...) -> None: ...

class ListNamespacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNamespacesReply(_message.Message):
    __slots__ = ("namespaces",)
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStats]
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceStats, _Mapping]]] = ...) -> None: ...
