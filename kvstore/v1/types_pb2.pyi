from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_HIT: _ClassVar[Outcome]
    OUTCOME_PENDING: _ClassVar[Outcome]
    OUTCOME_MISS: _ClassVar[Outcome]

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_NONE: _ClassVar[Reason]
    REASON_NEVER_SEEN: _ClassVar[Reason]
    REASON_EVICTED: _ClassVar[Reason]
    REASON_EXPIRED: _ClassVar[Reason]
    REASON_CORRUPT: _ClassVar[Reason]
    REASON_INCOMPLETE: _ClassVar[Reason]
    REASON_LAYOUT_MISMATCH: _ClassVar[Reason]
    REASON_TRUNCATED: _ClassVar[Reason]
    REASON_FORGOTTEN: _ClassVar[Reason]
    REASON_OLD_EPOCH: _ClassVar[Reason]
    REASON_BEING_SAVED: _ClassVar[Reason]
    REASON_BEING_MOVED: _ClassVar[Reason]
    REASON_QUOTA: _ClassVar[Reason]
    REASON_BEYOND_MISS: _ClassVar[Reason]
    REASON_UNAVAILABLE: _ClassVar[Reason]
    REASON_ON_SSD: _ClassVar[Reason]
    REASON_SLOW: _ClassVar[Reason]
    REASON_LOST: _ClassVar[Reason]
    REASON_RECALLED: _ClassVar[Reason]
    REASON_ON_REMOTE: _ClassVar[Reason]

class GrantResult(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRANT_RESULT_GRANTED: _ClassVar[GrantResult]
    GRANT_RESULT_ALREADY: _ClassVar[GrantResult]
    GRANT_RESULT_BUSY: _ClassVar[GrantResult]
    GRANT_RESULT_FULL: _ClassVar[GrantResult]
    GRANT_RESULT_QUOTA: _ClassVar[GrantResult]
    GRANT_RESULT_UNAVAILABLE: _ClassVar[GrantResult]

class CommitResult(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMMIT_RESULT_VISIBLE: _ClassVar[CommitResult]
    COMMIT_RESULT_WAITING_FOR_SHARDS: _ClassVar[CommitResult]
    COMMIT_RESULT_ALREADY: _ClassVar[CommitResult]

class Wait(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WAIT_VISIBLE: _ClassVar[Wait]
    WAIT_DURABLE: _ClassVar[Wait]
OUTCOME_HIT: Outcome
OUTCOME_PENDING: Outcome
OUTCOME_MISS: Outcome
REASON_NONE: Reason
REASON_NEVER_SEEN: Reason
REASON_EVICTED: Reason
REASON_EXPIRED: Reason
REASON_CORRUPT: Reason
REASON_INCOMPLETE: Reason
REASON_LAYOUT_MISMATCH: Reason
REASON_TRUNCATED: Reason
REASON_FORGOTTEN: Reason
REASON_OLD_EPOCH: Reason
REASON_BEING_SAVED: Reason
REASON_BEING_MOVED: Reason
REASON_QUOTA: Reason
REASON_BEYOND_MISS: Reason
REASON_UNAVAILABLE: Reason
REASON_ON_SSD: Reason
REASON_SLOW: Reason
REASON_LOST: Reason
REASON_RECALLED: Reason
REASON_ON_REMOTE: Reason
GRANT_RESULT_GRANTED: GrantResult
GRANT_RESULT_ALREADY: GrantResult
GRANT_RESULT_BUSY: GrantResult
GRANT_RESULT_FULL: GrantResult
GRANT_RESULT_QUOTA: GrantResult
GRANT_RESULT_UNAVAILABLE: GrantResult
COMMIT_RESULT_VISIBLE: CommitResult
COMMIT_RESULT_WAITING_FOR_SHARDS: CommitResult
COMMIT_RESULT_ALREADY: CommitResult
WAIT_VISIBLE: Wait
WAIT_DURABLE: Wait

class LayerSlice(_message.Message):
    __slots__ = ("layer", "offset", "length")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    layer: int
    offset: int
    length: int
    def __init__(self, layer: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("name", "kind", "shard_bytes", "shard_count", "layers", "position_rule")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SHARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    POSITION_RULE_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    shard_bytes: int
    shard_count: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerSlice]
    position_rule: str
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., shard_bytes: _Optional[int] = ..., shard_count: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerSlice, _Mapping]]] = ..., position_rule: _Optional[str] = ...) -> None: ...

class Namespace(_message.Message):
    __slots__ = ("model", "weights_digest", "weights_epoch", "adapter_digest", "kv_scales_digest", "layout_fingerprint", "hash_protocol", "tensor_parallel", "pipeline_parallel", "context_parallel", "chunk_tokens", "groups", "salt")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KV_SCALES_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HASH_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    model: str
    weights_digest: bytes
    weights_epoch: int
    adapter_digest: bytes
    kv_scales_digest: bytes
    layout_fingerprint: str
    hash_protocol: str
    tensor_parallel: int
    pipeline_parallel: int
    context_parallel: int
    chunk_tokens: int
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    salt: bytes
    def __init__(self, model: _Optional[str] = ..., weights_digest: _Optional[bytes] = ..., weights_epoch: _Optional[int] = ..., adapter_digest: _Optional[bytes] = ..., kv_scales_digest: _Optional[bytes] = ..., layout_fingerprint: _Optional[str] = ..., hash_protocol: _Optional[str] = ..., tensor_parallel: _Optional[int] = ..., pipeline_parallel: _Optional[int] = ..., context_parallel: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., salt: _Optional[bytes] = ...) -> None: ...

class Extents(_message.Message):
    __slots__ = ("segment", "offset", "length", "cell", "generation", "checksum", "packed")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    CELL_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    segment: _containers.RepeatedScalarFieldContainer[int]
    offset: _containers.RepeatedScalarFieldContainer[int]
    length: _containers.RepeatedScalarFieldContainer[int]
    cell: _containers.RepeatedScalarFieldContainer[int]
    generation: _containers.RepeatedScalarFieldContainer[int]
    checksum: _containers.RepeatedScalarFieldContainer[int]
    packed: bytes
    def __init__(self, segment: _Optional[_Iterable[int]] = ..., offset: _Optional[_Iterable[int]] = ..., length: _Optional[_Iterable[int]] = ..., cell: _Optional[_Iterable[int]] = ..., generation: _Optional[_Iterable[int]] = ..., checksum: _Optional[_Iterable[int]] = ..., packed: _Optional[bytes] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "field", "value", "remedy")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    field: str
    value: str
    remedy: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., value: _Optional[str] = ..., remedy: _Optional[str] = ...) -> None: ...
