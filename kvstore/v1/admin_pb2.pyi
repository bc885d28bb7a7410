from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScrubRequest(_message.Message):
    __slots__ = ("start", "bytes_per_s", "round")
    START_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    start: bool
    bytes_per_s: int
    round: int
    def __init__(self, start: bool = ..., bytes_per_s: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class ScrubReply(_message.Message):
    __slots__ = ("round", "running", "asked_for", "age_ms", "rows", "rows_in_all", "chunks", "bytes", "corrupt", "failed", "bytes_per_s", "finished", "waits_for")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    ASKED_FOR_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ROWS_IN_ALL_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    round: int
    running: bool
    asked_for: bool
    age_ms: int
    rows: int
    rows_in_all: int
    chunks: int
    bytes: int
    corrupt: int
    failed: int
    bytes_per_s: int
    finished: int
    waits_for: str
    def __init__(self, round: _Optional[int] = ..., running: bool = ..., asked_for: bool = ..., age_ms: _Optional[int] = ..., rows: _Optional[int] = ..., rows_in_all: _Optional[int] = ..., chunks: _Optional[int] = ..., bytes: _Optional[int] = ..., corrupt: _Optional[int] = ..., failed: _Optional[int] = ..., bytes_per_s: _Optional[int] = ..., finished: _Optional[int] = ..., waits_for: _Optional[str] = ...) -> None: ...

class ListQuarantineRequest(_message.Message):
    __slots__ = ("limit", "retry")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    limit: int
    retry: bool
    def __init__(self, limit: _Optional[int] = ..., retry: bool = ...) -> None: ...

class QuarantinedSlot(_message.Message):
    __slots__ = ("tier", "place", "slot", "slot_bytes", "namespace_id", "key", "reason", "age_ms", "next")
    TIER_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    tier: str
    place: int
    slot: int
    slot_bytes: int
    namespace_id: int
    key: bytes
    reason: str
    age_ms: int
    next: str
    def __init__(self, tier: _Optional[str] = ..., place: _Optional[int] = ..., slot: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., namespace_id: _Optional[int] = ..., key: _Optional[bytes] = ..., reason: _Optional[str] = ..., age_ms: _Optional[int] = ..., next: _Optional[str] = ...) -> None: ...

class ListQuarantineReply(_message.Message):
    __slots__ = ("rows", "dram", "ssd", "returned", "failed")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DRAM_FIELD_NUMBER: _ClassVar[int]
    SSD_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[QuarantinedSlot]
    dram: int
    ssd: int
    returned: int
    failed: int
    def __init__(self, rows: _Optional[_Iterable[_Union[QuarantinedSlot, _Mapping]]] = ..., dram: _Optional[int] = ..., ssd: _Optional[int] = ..., returned: _Optional[int] = ..., failed: _Optional[int] = ...) -> None: ...

class RecallRequest(_message.Message):
    __slots__ = ("maker", "age_ms_max", "dry_run", "sessions_max")
    MAKER_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_MAX_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_MAX_FIELD_NUMBER: _ClassVar[int]
    maker: bytes
    age_ms_max: int
    dry_run: bool
    sessions_max: int
    def __init__(self, maker: _Optional[bytes] = ..., age_ms_max: _Optional[int] = ..., dry_run: bool = ..., sessions_max: _Optional[int] = ...) -> None: ...

class RecalledSession(_message.Message):
    __slots__ = ("session", "tenant", "namespace_id", "version", "entry", "first_token")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    tenant: str
    namespace_id: int
    version: int
    entry: int
    first_token: int
    def __init__(self, session: _Optional[bytes] = ..., tenant: _Optional[str] = ..., namespace_id: _Optional[int] = ..., version: _Optional[int] = ..., entry: _Optional[int] = ..., first_token: _Optional[int] = ...) -> None: ...

class RecallReply(_message.Message):
    __slots__ = ("chunks", "bytes", "pinned", "sessions", "sessions_in_all")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_IN_ALL_FIELD_NUMBER: _ClassVar[int]
    chunks: int
    bytes: int
    pinned: int
    sessions: _containers.RepeatedCompositeFieldContainer[RecalledSession]
    sessions_in_all: int
    def __init__(self, chunks: _Optional[int] = ..., bytes: _Optional[int] = ..., pinned: _Optional[int] = ..., sessions: _Optional[_Iterable[_Union[RecalledSession, _Mapping]]] = ..., sessions_in_all: _Optional[int] = ...) -> None: ...

class PurgeRequest(_message.Message):
    __slots__ = ("tenant", "dry_run")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    dry_run: bool
    def __init__(self, tenant: _Optional[str] = ..., dry_run: bool = ...) -> None: ...

class PurgeReply(_message.Message):
    __slots__ = ("chunks", "bytes", "pinned", "sessions", "schemas")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SCHEMAS_FIELD_NUMBER: _ClassVar[int]
    chunks: int
    bytes: int
    pinned: int
    sessions: int
    schemas: int
    def __init__(self, chunks: _Optional[int] = ..., bytes: _Optional[int] = ..., pinned: _Optional[int] = ..., sessions: _Optional[int] = ..., schemas: _Optional[int] = ...) -> None: ...

class RecordRequest(_message.Message):
    __slots__ = ("path", "stop", "bytes_max", "seconds")
    PATH_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    path: str
    stop: bool
    bytes_max: int
    seconds: int
    def __init__(self, path: _Optional[str] = ..., stop: bool = ..., bytes_max: _Optional[int] = ..., seconds: _Optional[int] = ...) -> None: ...

class RecordReply(_message.Message):
    __slots__ = ("running", "path", "lookups", "saves", "bytes", "dropped", "ended")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    SAVES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    running: bool
    path: str
    lookups: int
    saves: int
    bytes: int
    dropped: int
    ended: str
    def __init__(self, running: bool = ..., path: _Optional[str] = ..., lookups: _Optional[int] = ..., saves: _Optional[int] = ..., bytes: _Optional[int] = ..., dropped: _Optional[int] = ..., ended: _Optional[str] = ...) -> None: ...
