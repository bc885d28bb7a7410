from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SchemaVersion(_message.Message):
    __slots__ = ("name", "digest", "number", "bytes", "modules", "current")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: bytes
    number: int
    bytes: int
    modules: int
    current: bool
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[bytes] = ..., number: _Optional[int] = ..., bytes: _Optional[int] = ..., modules: _Optional[int] = ..., current: bool = ...) -> None: ...

class PutSchemaRequest(_message.Message):
    __slots__ = ("text", "document")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    text: bytes
    document: str
    def __init__(self, text: _Optional[bytes] = ..., document: _Optional[str] = ...) -> None: ...

class PutSchemaReply(_message.Message):
    __slots__ = ("schema", "added", "durable", "warnings")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    schema: SchemaVersion
    added: bool
    durable: bool
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, schema: _Optional[_Union[SchemaVersion, _Mapping]] = ..., added: bool = ..., durable: bool = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class GetSchemaRequest(_message.Message):
    __slots__ = ("name", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: bytes
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[bytes] = ...) -> None: ...

class GetSchemaReply(_message.Message):
    __slots__ = ("schema", "text")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    schema: SchemaVersion
    text: bytes
    def __init__(self, schema: _Optional[_Union[SchemaVersion, _Mapping]] = ..., text: _Optional[bytes] = ...) -> None: ...

class ListSchemasRequest(_message.Message):
    __slots__ = ("name", "all_versions")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ALL_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    all_versions: bool
    def __init__(self, name: _Optional[str] = ..., all_versions: bool = ...) -> None: ...

class ListSchemasReply(_message.Message):
    __slots__ = ("schemas",)
    SCHEMAS_FIELD_NUMBER: _ClassVar[int]
    schemas: _containers.RepeatedCompositeFieldContainer[SchemaVersion]
    def __init__(self, schemas: _Optional[_Iterable[_Union[SchemaVersion, _Mapping]]] = ...) -> None: ...

class RemoveSchemaRequest(_message.Message):
    __slots__ = ("name", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: bytes
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[bytes] = ...) -> None: ...

class RemoveSchemaReply(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: int
    def __init__(self, removed: _Optional[int] = ...) -> None: ...
