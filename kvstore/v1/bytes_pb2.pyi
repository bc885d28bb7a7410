from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class GetRequest(_message.Message):
    __slots__ = ("namespace_id", "key", "shards", "frame_bytes")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    key: bytes
    shards: _containers.RepeatedScalarFieldContainer[int]
    frame_bytes: int
    def __init__(self, namespace_id: _Optional[int] = ..., key: _Optional[bytes] = ..., shards: _Optional[_Iterable[int]] = ..., frame_bytes: _Optional[int] = ...) -> None: ...

class GetFrame(_message.Message):
    __slots__ = ("outcome", "reason", "shard_bytes", "checksum", "payload")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SHARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    outcome: int
    reason: int
    shard_bytes: _containers.RepeatedScalarFieldContainer[int]
    checksum: _containers.RepeatedScalarFieldContainer[int]
    payload: bytes
    def __init__(self, outcome: _Optional[int] = ..., reason: _Optional[int] = ..., shard_bytes: _Optional[_Iterable[int]] = ..., checksum: _Optional[_Iterable[int]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class PutFrame(_message.Message):
    __slots__ = ("namespace_id", "key", "parent", "token_count", "shards", "derived", "maker", "payload")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    DERIVED_FIELD_NUMBER: _ClassVar[int]
    MAKER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    key: bytes
    parent: bytes
    token_count: int
    shards: _containers.RepeatedScalarFieldContainer[int]
    derived: bool
    maker: bytes
    payload: bytes
    def __init__(self, namespace_id: _Optional[int] = ..., key: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., token_count: _Optional[int] = ..., shards: _Optional[_Iterable[int]] = ..., derived: bool = ..., maker: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class PutReply(_message.Message):
    __slots__ = ("grant", "result", "differs")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    DIFFERS_FIELD_NUMBER: _ClassVar[int]
    grant: int
    result: int
    differs: bool
    def __init__(self, grant: _Optional[int] = ..., result: _Optional[int] = ..., differs: bool = ...) -> None: ...
