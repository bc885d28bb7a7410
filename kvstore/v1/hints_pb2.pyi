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

class ActionKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACTION_KIND_PREFETCH: _ClassVar[ActionKind]
    ACTION_KIND_DEMOTE: _ClassVar[ActionKind]
    ACTION_KIND_PIN: _ClassVar[ActionKind]
    ACTION_KIND_RETAIN: _ClassVar[ActionKind]
    ACTION_KIND_EXPECT: _ClassVar[ActionKind]
HINT_RESULT_ACCEPTED: HintResult
HINT_RESULT_DEFERRED: HintResult
HINT_RESULT_CLIPPED: HintResult
HINT_RESULT_REJECTED: HintResult
ACTION_KIND_PREFETCH: ActionKind
ACTION_KIND_DEMOTE: ActionKind
ACTION_KIND_PIN: ActionKind
ACTION_KIND_RETAIN: ActionKind
ACTION_KIND_EXPECT: ActionKind

class Hint(_message.Message):
    __slots__ = ("job", "position", "session", "keys", "prompts")
    JOB_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    job: bytes
    position: int
    session: bytes
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    prompts: _containers.RepeatedCompositeFieldContainer[Prompt]
    def __init__(self, job: _Optional[bytes] = ..., position: _Optional[int] = ..., session: _Optional[bytes] = ..., keys: _Optional[_Iterable[bytes]] = ..., prompts: _Optional[_Iterable[_Union[Prompt, _Mapping]]] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("namespace_id", "keys")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, namespace_id: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PublishQueueRequest(_message.Message):
    __slots__ = ("request_id", "namespace_id", "hints", "removed", "delta", "ttl_ms", "number", "by_model")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BY_MODEL_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    namespace_id: int
    hints: _containers.RepeatedCompositeFieldContainer[Hint]
    removed: _containers.RepeatedScalarFieldContainer[bytes]
    delta: bool
    ttl_ms: int
    number: int
    by_model: bool
    def __init__(self, request_id: _Optional[int] = ..., namespace_id: _Optional[int] = ..., hints: _Optional[_Iterable[_Union[Hint, _Mapping]]] = ..., removed: _Optional[_Iterable[bytes]] = ..., delta: bool = ..., ttl_ms: _Optional[int] = ..., number: _Optional[int] = ..., by_model: bool = ...) -> None: ...

class QueueReply(_message.Message):
    __slots__ = ("results", "prefetch_window", "eviction_window", "snapshot_wanted", "namespaces")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_WINDOW_FIELD_NUMBER: _ClassVar[int]
    EVICTION_WINDOW_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_WANTED_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    results: bytes
    prefetch_window: int
    eviction_window: int
    snapshot_wanted: bool
    namespaces: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, results: _Optional[bytes] = ..., prefetch_window: _Optional[int] = ..., eviction_window: _Optional[int] = ..., snapshot_wanted: bool = ..., namespaces: _Optional[_Iterable[int]] = ...) -> None: ...

class HintAction(_message.Message):
    __slots__ = ("name", "kind", "session", "keys", "ttl_ms", "eta_ms", "prompts")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    ETA_MS_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    kind: ActionKind
    session: bytes
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    ttl_ms: int
    eta_ms: int
    prompts: _containers.RepeatedCompositeFieldContainer[Prompt]
    def __init__(self, name: _Optional[bytes] = ..., kind: _Optional[_Union[ActionKind, str]] = ..., session: _Optional[bytes] = ..., keys: _Optional[_Iterable[bytes]] = ..., ttl_ms: _Optional[int] = ..., eta_ms: _Optional[int] = ..., prompts: _Optional[_Iterable[_Union[Prompt, _Mapping]]] = ...) -> None: ...

class ApplyActionsRequest(_message.Message):
    __slots__ = ("request_id", "namespace_id", "actions", "cancelled", "by_model")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    BY_MODEL_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    namespace_id: int
    actions: _containers.RepeatedCompositeFieldContainer[HintAction]
    cancelled: _containers.RepeatedScalarFieldContainer[bytes]
    by_model: bool
    def __init__(self, request_id: _Optional[int] = ..., namespace_id: _Optional[int] = ..., actions: _Optional[_Iterable[_Union[HintAction, _Mapping]]] = ..., cancelled: _Optional[_Iterable[bytes]] = ..., by_model: bool = ...) -> None: ...

class ActionsReply(_message.Message):
    __slots__ = ("results", "chunks", "namespaces")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    results: bytes
    chunks: _containers.RepeatedScalarFieldContainer[int]
    namespaces: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, results: _Optional[bytes] = ..., chunks: _Optional[_Iterable[int]] = ..., namespaces: _Optional[_Iterable[int]] = ...) -> None: ...

class HintState(_message.Message):
    __slots__ = ("kind", "ends_in_ms", "due_in_ms")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ENDS_IN_MS_FIELD_NUMBER: _ClassVar[int]
    DUE_IN_MS_FIELD_NUMBER: _ClassVar[int]
    kind: ActionKind
    ends_in_ms: int
    due_in_ms: int
    def __init__(self, kind: _Optional[_Union[ActionKind, str]] = ..., ends_in_ms: _Optional[int] = ..., due_in_ms: _Optional[int] = ...) -> None: ...
