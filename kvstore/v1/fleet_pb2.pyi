from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RouteRequest(_message.Message):
    __slots__ = ("namespace_id", "keys", "session")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    session: bytes
    def __init__(self, namespace_id: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., session: _Optional[bytes] = ...) -> None: ...

class RouteNode(_message.Message):
    __slots__ = ("name", "address", "here", "draining", "reachable", "prefix_chunks", "prefix_dram_chunks", "prefix_bytes", "chunks", "cost_ms", "resident_share", "leases")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HERE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    REACHABLE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_DRAM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    COST_MS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_SHARE_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    here: bool
    draining: bool
    reachable: bool
    prefix_chunks: int
    prefix_dram_chunks: int
    prefix_bytes: int
    chunks: int
    cost_ms: float
    resident_share: float
    leases: float
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., here: bool = ..., draining: bool = ..., reachable: bool = ..., prefix_chunks: _Optional[int] = ..., prefix_dram_chunks: _Optional[int] = ..., prefix_bytes: _Optional[int] = ..., chunks: _Optional[int] = ..., cost_ms: _Optional[float] = ..., resident_share: _Optional[float] = ..., leases: _Optional[float] = ...) -> None: ...

class RouteReply(_message.Message):
    __slots__ = ("nodes", "keys", "registry")
    NODES_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[RouteNode]
    keys: int
    registry: str
    def __init__(self, nodes: _Optional[_Iterable[_Union[RouteNode, _Mapping]]] = ..., keys: _Optional[int] = ..., registry: _Optional[str] = ...) -> None: ...

class ListNodesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FleetNode(_message.Message):
    __slots__ = ("name", "address", "here", "draining", "reachable", "boot_id", "known_chunks", "bytes_per_s", "load")
    class LoadEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HERE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    REACHABLE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    KNOWN_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    here: bool
    draining: bool
    reachable: bool
    boot_id: str
    known_chunks: int
    bytes_per_s: float
    load: _containers.ScalarMap[str, float]
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., here: bool = ..., draining: bool = ..., reachable: bool = ..., boot_id: _Optional[str] = ..., known_chunks: _Optional[int] = ..., bytes_per_s: _Optional[float] = ..., load: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ListNodesReply(_message.Message):
    __slots__ = ("nodes", "registry", "why")
    NODES_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[FleetNode]
    registry: str
    why: str
    def __init__(self, nodes: _Optional[_Iterable[_Union[FleetNode, _Mapping]]] = ..., registry: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("node", "stop", "bytes_max")
    NODE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    node: str
    stop: bool
    bytes_max: int
    def __init__(self, node: _Optional[str] = ..., stop: bool = ..., bytes_max: _Optional[int] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("here",)
    HERE_FIELD_NUMBER: _ClassVar[int]
    here: bool
    def __init__(self, here: bool = ...) -> None: ...
