from kvstore.v1 import hints_pb2 as _hints_pb2
from kvstore.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachRequest(_message.Message):
    __slots__ = ("hello", "open", "match", "acquire", "renew", "release", "reserve", "commit", "abort", "report_load", "get_session", "update_session", "truncate", "fork", "forget", "segments_unmapped", "heartbeat", "publish_queue", "fill", "report_duplicates", "touch", "apply_actions", "report_resident", "save", "release_lease_ids", "touched")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    ACQUIRE_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    REPORT_LOAD_FIELD_NUMBER: _ClassVar[int]
    GET_SESSION_FIELD_NUMBER: _ClassVar[int]
    UPDATE_SESSION_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_UNMAPPED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_QUEUE_FIELD_NUMBER: _ClassVar[int]
    FILL_FIELD_NUMBER: _ClassVar[int]
    REPORT_DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    TOUCH_FIELD_NUMBER: _ClassVar[int]
    APPLY_ACTIONS_FIELD_NUMBER: _ClassVar[int]
    REPORT_RESIDENT_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    TOUCHED_FIELD_NUMBER: _ClassVar[int]
    hello: AttachHello
    open: OpenRequest
    match: MatchRequest
    acquire: AcquireRequest
    renew: RenewRequest
    release: ReleaseRequest
    reserve: ReserveRequest
    commit: CommitRequest
    abort: AbortRequest
    report_load: ReportLoadRequest
    get_session: GetSessionRequest
    update_session: UpdateSessionRequest
    truncate: TruncateRequest
    fork: ForkRequest
    forget: ForgetRequest
    segments_unmapped: SegmentsUnmappedRequest
    heartbeat: HeartbeatRequest
    publish_queue: _hints_pb2.PublishQueueRequest
    fill: FillRequest
    report_duplicates: ReportDuplicatesRequest
    touch: TouchRequest
    apply_actions: _hints_pb2.ApplyActionsRequest
    report_resident: ReportResidentRequest
    save: SaveRequest
    release_lease_ids: _containers.RepeatedScalarFieldContainer[int]
    touched: _containers.RepeatedCompositeFieldContainer[Touched]
    def __init__(self, hello: _Optional[_Union[AttachHello, _Mapping]] = ..., open: _Optional[_Union[OpenRequest, _Mapping]] = ..., match: _Optional[_Union[MatchRequest, _Mapping]] = ..., acquire: _Optional[_Union[AcquireRequest, _Mapping]] = ..., renew: _Optional[_Union[RenewRequest, _Mapping]] = ..., release: _Optional[_Union[ReleaseRequest, _Mapping]] = ..., reserve: _Optional[_Union[ReserveRequest, _Mapping]] = ..., commit: _Optional[_Union[CommitRequest, _Mapping]] = ..., abort: _Optional[_Union[AbortRequest, _Mapping]] = ..., report_load: _Optional[_Union[ReportLoadRequest, _Mapping]] = ..., get_session: _Optional[_Union[GetSessionRequest, _Mapping]] = ..., update_session: _Optional[_Union[UpdateSessionRequest, _Mapping]] = ..., truncate: _Optional[_Union[TruncateRequest, _Mapping]] = ..., fork: _Optional[_Union[ForkRequest, _Mapping]] = ..., forget: _Optional[_Union[ForgetRequest, _Mapping]] = ..., segments_unmapped: _Optional[_Union[SegmentsUnmappedRequest, _Mapping]] = ..., heartbeat: _Optional[_Union[HeartbeatRequest, _Mapping]] = ..., publish_queue: _Optional[_Union[_hints_pb2.PublishQueueRequest, _Mapping]] = ..., fill: _Optional[_Union[FillRequest, _Mapping]] = ..., report_duplicates: _Optional[_Union[ReportDuplicatesRequest, _Mapping]] = ..., touch: _Optional[_Union[TouchRequest, _Mapping]] = ..., apply_actions: _Optional[_Union[_hints_pb2.ApplyActionsRequest, _Mapping]] = ..., report_resident: _Optional[_Union[ReportResidentRequest, _Mapping]] = ..., save: _Optional[_Union[SaveRequest, _Mapping]] = ..., release_lease_ids: _Optional[_Iterable[int]] = ..., touched: _Optional[_Iterable[_Union[Touched, _Mapping]]] = ...) -> None: ...

class Touched(_message.Message):
    __slots__ = ("namespace_id", "keys", "counts", "found")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    counts: _containers.RepeatedScalarFieldContainer[int]
    found: bytes
    def __init__(self, namespace_id: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., counts: _Optional[_Iterable[int]] = ..., found: _Optional[bytes] = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("request_id", "welcome", "error", "open", "match", "acquire", "renew", "reserve", "commit", "session", "done", "queue", "fill", "actions", "resident", "save", "chunks_settled", "segments_retired", "leases_revoked", "draining", "ended")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    ACQUIRE_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    FILL_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_SETTLED_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_RETIRED_FIELD_NUMBER: _ClassVar[int]
    LEASES_REVOKED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    welcome: AttachWelcome
    error: _types_pb2.Error
    open: OpenReply
    match: MatchReply
    acquire: AcquireReply
    renew: RenewReply
    reserve: ReserveReply
    commit: CommitReply
    session: SessionReply
    done: DoneReply
    queue: _hints_pb2.QueueReply
    fill: FillReply
    actions: _hints_pb2.ActionsReply
    resident: ResidentReply
    save: SaveReply
    chunks_settled: ChunksSettled
    segments_retired: SegmentsRetired
    leases_revoked: LeasesRevoked
    draining: Draining
    ended: _types_pb2.Error
    def __init__(self, request_id: _Optional[int] = ..., welcome: _Optional[_Union[AttachWelcome, _Mapping]] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ..., open: _Optional[_Union[OpenReply, _Mapping]] = ..., match: _Optional[_Union[MatchReply, _Mapping]] = ..., acquire: _Optional[_Union[AcquireReply, _Mapping]] = ..., renew: _Optional[_Union[RenewReply, _Mapping]] = ..., reserve: _Optional[_Union[ReserveReply, _Mapping]] = ..., commit: _Optional[_Union[CommitReply, _Mapping]] = ..., session: _Optional[_Union[SessionReply, _Mapping]] = ..., done: _Optional[_Union[DoneReply, _Mapping]] = ..., queue: _Optional[_Union[_hints_pb2.QueueReply, _Mapping]] = ..., fill: _Optional[_Union[FillReply, _Mapping]] = ..., actions: _Optional[_Union[_hints_pb2.ActionsReply, _Mapping]] = ..., resident: _Optional[_Union[ResidentReply, _Mapping]] = ..., save: _Optional[_Union[SaveReply, _Mapping]] = ..., chunks_settled: _Optional[_Union[ChunksSettled, _Mapping]] = ..., segments_retired: _Optional[_Union[SegmentsRetired, _Mapping]] = ..., leases_revoked: _Optional[_Union[LeasesRevoked, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., ended: _Optional[_Union[_types_pb2.Error, _Mapping]] = ...) -> None: ...

class AttachHello(_message.Message):
    __slots__ = ("request_id", "token", "boot_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    token: bytes
    boot_id: bytes
    def __init__(self, request_id: _Optional[int] = ..., token: _Optional[bytes] = ..., boot_id: _Optional[bytes] = ...) -> None: ...

class AttachWelcome(_message.Message):
    __slots__ = ("lease_ttl_ms", "reservation_ttl_ms")
    LEASE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    lease_ttl_ms: int
    reservation_ttl_ms: int
    def __init__(self, lease_ttl_ms: _Optional[int] = ..., reservation_ttl_ms: _Optional[int] = ...) -> None: ...

class TouchRequest(_message.Message):
    __slots__ = ("request_id", "namespace_id", "keys")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    namespace_id: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, request_id: _Optional[int] = ..., namespace_id: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    def __init__(self, request_id: _Optional[int] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("request_id", "namespace")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    namespace: _types_pb2.Namespace
    def __init__(self, request_id: _Optional[int] = ..., namespace: _Optional[_Union[_types_pb2.Namespace, _Mapping]] = ...) -> None: ...

class OpenReply(_message.Message):
    __slots__ = ("namespace_id", "salt", "weights_epoch", "segment_bytes", "notes")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    salt: bytes
    weights_epoch: int
    segment_bytes: int
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, namespace_id: _Optional[int] = ..., salt: _Optional[bytes] = ..., weights_epoch: _Optional[int] = ..., segment_bytes: _Optional[int] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("request_id", "namespace_id", "keys", "token_count")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    namespace_id: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    token_count: int
    def __init__(self, request_id: _Optional[int] = ..., namespace_id: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., token_count: _Optional[int] = ...) -> None: ...

class MatchReply(_message.Message):
    __slots__ = ("usable", "outcomes", "reasons", "backlog")
    USABLE_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_FIELD_NUMBER: _ClassVar[int]
    usable: int
    outcomes: bytes
    reasons: bytes
    backlog: Backlog
    def __init__(self, usable: _Optional[int] = ..., outcomes: _Optional[bytes] = ..., reasons: _Optional[bytes] = ..., backlog: _Optional[_Union[Backlog, _Mapping]] = ...) -> None: ...

class Backlog(_message.Message):
    __slots__ = ("ssd_bytes", "ahead_bytes", "ssd_bytes_per_s")
    SSD_BYTES_FIELD_NUMBER: _ClassVar[int]
    AHEAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    ssd_bytes: int
    ahead_bytes: int
    ssd_bytes_per_s: int
    def __init__(self, ssd_bytes: _Optional[int] = ..., ahead_bytes: _Optional[int] = ..., ssd_bytes_per_s: _Optional[int] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("request_id", "namespace_id", "keys", "shards", "ttl_ms", "wait_ms", "any_order", "packed_extents", "no_promotion")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    ANY_ORDER_FIELD_NUMBER: _ClassVar[int]
    PACKED_EXTENTS_FIELD_NUMBER: _ClassVar[int]
    NO_PROMOTION_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    namespace_id: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    shards: _containers.RepeatedScalarFieldContainer[int]
    ttl_ms: int
    wait_ms: int
    any_order: bool
    packed_extents: bool
    no_promotion: bool
    def __init__(self, request_id: _Optional[int] = ..., namespace_id: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., shards: _Optional[_Iterable[int]] = ..., ttl_ms: _Optional[int] = ..., wait_ms: _Optional[int] = ..., any_order: bool = ..., packed_extents: bool = ..., no_promotion: bool = ...) -> None: ...

class AcquireReply(_message.Message):
    __slots__ = ("lease_id", "ttl_ms", "outcomes", "reasons", "extents", "backlog")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    ttl_ms: int
    outcomes: bytes
    reasons: bytes
    extents: _types_pb2.Extents
    backlog: Backlog
    def __init__(self, lease_id: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., outcomes: _Optional[bytes] = ..., reasons: _Optional[bytes] = ..., extents: _Optional[_Union[_types_pb2.Extents, _Mapping]] = ..., backlog: _Optional[_Union[Backlog, _Mapping]] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("request_id", "lease_ids", "ttl_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    ttl_ms: int
    def __init__(self, request_id: _Optional[int] = ..., lease_ids: _Optional[_Iterable[int]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("ttl_ms",)
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    ttl_ms: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ttl_ms: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("request_id", "lease_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[int] = ..., lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("request_id", "namespace_id", "keys", "parent", "parents", "token_counts", "shards", "derived", "maker", "ttl_ms", "transient", "packed_extents")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    DERIVED_FIELD_NUMBER: _ClassVar[int]
    MAKER_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSIENT_FIELD_NUMBER: _ClassVar[int]
    PACKED_EXTENTS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    namespace_id: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    parent: bytes
    parents: _containers.RepeatedScalarFieldContainer[bytes]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    shards: _containers.RepeatedScalarFieldContainer[int]
    derived: bool
    maker: bytes
    ttl_ms: int
    transient: bool
    packed_extents: bool
    def __init__(self, request_id: _Optional[int] = ..., namespace_id: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., parent: _Optional[bytes] = ..., parents: _Optional[_Iterable[bytes]] = ..., token_counts: _Optional[_Iterable[int]] = ..., shards: _Optional[_Iterable[int]] = ..., derived: bool = ..., maker: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ..., transient: bool = ..., packed_extents: bool = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("reservation_id", "ttl_ms", "results", "extents")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    ttl_ms: int
    results: bytes
    extents: _types_pb2.Extents
    def __init__(self, reservation_id: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., results: _Optional[bytes] = ..., extents: _Optional[_Union[_types_pb2.Extents, _Mapping]] = ...) -> None: ...

class FillRequest(_message.Message):
    __slots__ = ("request_id", "reservation_id", "region", "offsets", "numbers")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    reservation_id: int
    region: int
    offsets: _containers.RepeatedScalarFieldContainer[int]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[int] = ..., reservation_id: _Optional[int] = ..., region: _Optional[int] = ..., offsets: _Optional[_Iterable[int]] = ..., numbers: _Optional[_Iterable[int]] = ...) -> None: ...

class FillReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("request_id", "reservation_id", "staging_offsets", "wait", "checksums")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    STAGING_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    reservation_id: int
    staging_offsets: _containers.RepeatedScalarFieldContainer[int]
    wait: int
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[int] = ..., reservation_id: _Optional[int] = ..., staging_offsets: _Optional[_Iterable[int]] = ..., wait: _Optional[int] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: bytes
    def __init__(self, results: _Optional[bytes] = ...) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ("request_id", "reserve", "staging_offsets", "wait")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    STAGING_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    reserve: ReserveRequest
    staging_offsets: _containers.RepeatedScalarFieldContainer[int]
    wait: int
    def __init__(self, request_id: _Optional[int] = ..., reserve: _Optional[_Union[ReserveRequest, _Mapping]] = ..., staging_offsets: _Optional[_Iterable[int]] = ..., wait: _Optional[int] = ...) -> None: ...

class SaveReply(_message.Message):
    __slots__ = ("results", "committed")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    results: bytes
    committed: bytes
    def __init__(self, results: _Optional[bytes] = ..., committed: _Optional[bytes] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id", "reservation_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    reservation_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[int] = ..., reservation_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReportDuplicatesRequest(_message.Message):
    __slots__ = ("request_id", "namespace_id", "keys", "shards", "checksums", "maker", "wrong", "healthy")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    MAKER_FIELD_NUMBER: _ClassVar[int]
    WRONG_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    namespace_id: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    shards: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    maker: bytes
    wrong: bool
    healthy: bool
    def __init__(self, request_id: _Optional[int] = ..., namespace_id: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., shards: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ..., maker: _Optional[bytes] = ..., wrong: bool = ..., healthy: bool = ...) -> None: ...

class ReportResidentRequest(_message.Message):
    __slots__ = ("request_id", "namespace_id", "keys", "ttl_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    namespace_id: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    ttl_ms: int
    def __init__(self, request_id: _Optional[int] = ..., namespace_id: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class ResidentReply(_message.Message):
    __slots__ = ("ranks",)
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class ReportLoadRequest(_message.Message):
    __slots__ = ("request_id", "namespace_id", "keys")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    namespace_id: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, request_id: _Optional[int] = ..., namespace_id: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SessionEntry(_message.Message):
    __slots__ = ("key", "first_token", "token_count", "delta", "approximate")
    KEY_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    APPROXIMATE_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    first_token: int
    token_count: int
    delta: int
    approximate: bool
    def __init__(self, key: _Optional[bytes] = ..., first_token: _Optional[int] = ..., token_count: _Optional[int] = ..., delta: _Optional[int] = ..., approximate: bool = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("request_id", "namespace_id", "session", "elsewhere")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    namespace_id: int
    session: bytes
    elsewhere: bool
    def __init__(self, request_id: _Optional[int] = ..., namespace_id: _Optional[int] = ..., session: _Optional[bytes] = ..., elsewhere: bool = ...) -> None: ...

class UpdateSessionRequest(_message.Message):
    __slots__ = ("request_id", "namespace_id", "session", "expected_version", "keep", "append")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    namespace_id: int
    session: bytes
    expected_version: int
    keep: int
    append: _containers.RepeatedCompositeFieldContainer[SessionEntry]
    def __init__(self, request_id: _Optional[int] = ..., namespace_id: _Optional[int] = ..., session: _Optional[bytes] = ..., expected_version: _Optional[int] = ..., keep: _Optional[int] = ..., append: _Optional[_Iterable[_Union[SessionEntry, _Mapping]]] = ...) -> None: ...

class TruncateRequest(_message.Message):
    __slots__ = ("request_id", "namespace_id", "session", "expected_version", "first_token", "token_count", "close_gap")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    CLOSE_GAP_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    namespace_id: int
    session: bytes
    expected_version: int
    first_token: int
    token_count: int
    close_gap: bool
    def __init__(self, request_id: _Optional[int] = ..., namespace_id: _Optional[int] = ..., session: _Optional[bytes] = ..., expected_version: _Optional[int] = ..., first_token: _Optional[int] = ..., token_count: _Optional[int] = ..., close_gap: bool = ...) -> None: ...

class ForkRequest(_message.Message):
    __slots__ = ("request_id", "namespace_id", "session", "new_session")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NEW_SESSION_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    namespace_id: int
    session: bytes
    new_session: bytes
    def __init__(self, request_id: _Optional[int] = ..., namespace_id: _Optional[int] = ..., session: _Optional[bytes] = ..., new_session: _Optional[bytes] = ...) -> None: ...

class ForgetRequest(_message.Message):
    __slots__ = ("request_id", "namespace_id", "session", "keys")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    namespace_id: int
    session: bytes
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, request_id: _Optional[int] = ..., namespace_id: _Optional[int] = ..., session: _Optional[bytes] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SessionReply(_message.Message):
    __slots__ = ("session", "version", "entries", "usable", "usable_beyond", "entries_forgotten", "elsewhere")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    USABLE_FIELD_NUMBER: _ClassVar[int]
    USABLE_BEYOND_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    version: int
    entries: _containers.RepeatedCompositeFieldContainer[SessionEntry]
    usable: int
    usable_beyond: bytes
    entries_forgotten: bool
    elsewhere: SharedManifest
    def __init__(self, session: _Optional[bytes] = ..., version: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[SessionEntry, _Mapping]]] = ..., usable: _Optional[int] = ..., usable_beyond: _Optional[bytes] = ..., entries_forgotten: bool = ..., elsewhere: _Optional[_Union[SharedManifest, _Mapping]] = ...) -> None: ...

class SharedManifest(_message.Message):
    __slots__ = ("node", "version", "keys", "token_counts")
    NODE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    node: str
    version: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, node: _Optional[str] = ..., version: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., token_counts: _Optional[_Iterable[int]] = ...) -> None: ...

class DoneReply(_message.Message):
    __slots__ = ("count", "not_durable")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    NOT_DURABLE_FIELD_NUMBER: _ClassVar[int]
    count: int
    not_durable: str
    def __init__(self, count: _Optional[int] = ..., not_durable: _Optional[str] = ...) -> None: ...

class SegmentsUnmappedRequest(_message.Message):
    __slots__ = ("request_id", "segments")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    segments: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[int] = ..., segments: _Optional[_Iterable[int]] = ...) -> None: ...

class ChunksSettled(_message.Message):
    __slots__ = ("namespace_id", "ready", "failed")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    ready: _containers.RepeatedScalarFieldContainer[bytes]
    failed: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, namespace_id: _Optional[int] = ..., ready: _Optional[_Iterable[bytes]] = ..., failed: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SegmentsRetired(_message.Message):
    __slots__ = ("segments",)
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, segments: _Optional[_Iterable[int]] = ...) -> None: ...

class LeasesRevoked(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
