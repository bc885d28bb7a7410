from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HintResult(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HINT_RESULT_ACCEPTED: _ClassVar[HintResult]
    HINT_RESULT_DEFERRED: _ClassVar[HintResult]
    HINT_RESULT_CLIPPED: _ClassVar[HintResult]
    HINT_RESULT_REJECTED: _ClassVar[HintResult]
HINT_RESULT_ACCEPTED: HintResult
HINT_RESULT_DEFERRED: HintResult
HINT_RESULT_CLIPPED: HintResult
HINT_RESULT_REJECTED: HintResult

class Hint(_message.Message):
    __slots__ = ("job", "position", "session", "keys")
    JOB_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    job: bytes
    position: int
    session: bytes
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, job: _Optional[bytes] = ..., position: _Optional[int] = ..., session: _Optional[bytes] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PublishQueueRequest(_message.Message):
    __slots__ = ("request_id", "namespace_id", "hints", "removed", "delta", "ttl_ms", "number")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    namespace_id: int
    hints: _containers.RepeatedCompositeFieldContainer[Hint]
    removed: _containers.RepeatedScalarFieldContainer[bytes]
    delta: bool
    ttl_ms: int
    number: int
    def __init__(self, request_id: _Optional[int] = ..., namespace_id: _Optional[int] = ..., hints: _Optional[_Iterable[_Union[Hint, _Mapping]]] = ..., removed: _Optional[_Iterable[bytes]] = ..., delta: bool = ..., ttl_ms: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class QueueReply(_message.Message):
    __slots__ = ("results", "prefetch_window", "eviction_window", "snapshot_wanted")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_WINDOW_FIELD_NUMBER: _ClassVar[int]
    EVICTION_WINDOW_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_WANTED_FIELD_NUMBER: _ClassVar[int]
    results: bytes
    prefetch_window: int
    eviction_window: int
    snapshot_wanted: bool
    def __init__(self, results: _Optional[bytes] = ..., prefetch_window: _Optional[int] = ..., eviction_window: _Optional[int] = ..., snapshot_wanted: bool = ...) -> None: ...
