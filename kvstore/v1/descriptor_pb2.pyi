from kvstore.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescriptorRequest(_message.Message):
    __slots__ = ("hello", "segments", "staging", "adopt", "drop_region", "lane", "directory")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    STAGING_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    DROP_REGION_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    segments: SegmentsRequest
    staging: StagingRequest
    adopt: AdoptRequest
    drop_region: DropRegionRequest
    lane: LaneRequest
    directory: DirectoryRequest
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., segments: _Optional[_Union[SegmentsRequest, _Mapping]] = ..., staging: _Optional[_Union[StagingRequest, _Mapping]] = ..., adopt: _Optional[_Union[AdoptRequest, _Mapping]] = ..., drop_region: _Optional[_Union[DropRegionRequest, _Mapping]] = ..., lane: _Optional[_Union[LaneRequest, _Mapping]] = ..., directory: _Optional[_Union[DirectoryRequest, _Mapping]] = ...) -> None: ...

class DescriptorReply(_message.Message):
    __slots__ = ("hello", "error", "segments", "staging", "adopt", "drop_region", "lane", "directory")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    STAGING_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    DROP_REGION_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    hello: HelloReply
    error: _types_pb2.Error
    segments: SegmentsReply
    staging: StagingReply
    adopt: AdoptReply
    drop_region: DropRegionReply
    lane: LaneReply
    directory: DirectoryReply
    def __init__(self, hello: _Optional[_Union[HelloReply, _Mapping]] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ..., segments: _Optional[_Union[SegmentsReply, _Mapping]] = ..., staging: _Optional[_Union[StagingReply, _Mapping]] = ..., adopt: _Optional[_Union[AdoptReply, _Mapping]] = ..., drop_region: _Optional[_Union[DropRegionReply, _Mapping]] = ..., lane: _Optional[_Union[LaneReply, _Mapping]] = ..., directory: _Optional[_Union[DirectoryReply, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "client", "engine_group", "rank")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    client: str
    engine_group: str
    rank: int
    def __init__(self, protocol: _Optional[int] = ..., client: _Optional[str] = ..., engine_group: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("protocol", "boot_id", "token", "tenant", "protection", "grpc_target", "version", "fast_lane", "directory")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PROTECTION_FIELD_NUMBER: _ClassVar[int]
    GRPC_TARGET_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FAST_LANE_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    boot_id: bytes
    token: bytes
    tenant: str
    protection: str
    grpc_target: str
    version: str
    fast_lane: bool
    directory: bool
    def __init__(self, protocol: _Optional[int] = ..., boot_id: _Optional[bytes] = ..., token: _Optional[bytes] = ..., tenant: _Optional[str] = ..., protection: _Optional[str] = ..., grpc_target: _Optional[str] = ..., version: _Optional[str] = ..., fast_lane: bool = ..., directory: bool = ...) -> None: ...

class SegmentsRequest(_message.Message):
    __slots__ = ("segments",)
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, segments: _Optional[_Iterable[int]] = ...) -> None: ...

class SegmentsReply(_message.Message):
    __slots__ = ("segments", "bytes", "cells")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedScalarFieldContainer[int]
    bytes: _containers.RepeatedScalarFieldContainer[int]
    cells: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, segments: _Optional[_Iterable[int]] = ..., bytes: _Optional[_Iterable[int]] = ..., cells: _Optional[_Iterable[int]] = ...) -> None: ...

class StagingRequest(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class StagingReply(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class LaneRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LaneReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DirectoryRequest(_message.Message):
    __slots__ = ("namespace_id",)
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    def __init__(self, namespace_id: _Optional[int] = ...) -> None: ...

class DirectoryReply(_message.Message):
    __slots__ = ("bytes", "slot_bytes")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    slot_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, bytes: _Optional[int] = ..., slot_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class AdoptRequest(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class AdoptReply(_message.Message):
    __slots__ = ("region",)
    REGION_FIELD_NUMBER: _ClassVar[int]
    region: int
    def __init__(self, region: _Optional[int] = ...) -> None: ...

class DropRegionRequest(_message.Message):
    __slots__ = ("region",)
    REGION_FIELD_NUMBER: _ClassVar[int]
    region: int
    def __init__(self, region: _Optional[int] = ...) -> None: ...

class DropRegionReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
