"""Schemas of Prompt Cache that the daemon keeps for the caller's tenant. All raise StoreError."""

from __future__ import annotations

from kvstore.client.sync import Client
from kvstore.v1 import promptcache_pb2 as pb
from kvstore.v1 import promptcache_pb2_grpc as pb_grpc


def put_schema(client: Client, text: bytes, *, document: str = "") -> pb.PutSchemaReply:
    """Make PML the current version of its schema. `document`: what an error in it calls the text."""
    request = pb.PutSchemaRequest(text=text, document=document)
    reply: pb.PutSchemaReply = client.unary(pb_grpc.PromptCacheStub, "PutSchema", request)
    return reply


def get_schema(client: Client, name: str, *, digest: bytes = b"") -> pb.GetSchemaReply:
    """A version's text: the one of this digest, or the current one."""
    request = pb.GetSchemaRequest(name=name, digest=digest)
    reply: pb.GetSchemaReply = client.unary(pb_grpc.PromptCacheStub, "GetSchema", request)
    return reply


def list_schemas(client: Client, *, name: str = "", all_versions: bool = False) -> list[pb.SchemaVersion]:
    """By name, the current version of each first."""
    request = pb.ListSchemasRequest(name=name, all_versions=all_versions)
    reply: pb.ListSchemasReply = client.unary(pb_grpc.PromptCacheStub, "ListSchemas", request)
    return list(reply.schemas)


def remove_schema(client: Client, name: str, *, digest: bytes = b"") -> int:
    """How many versions were removed."""
    request = pb.RemoveSchemaRequest(name=name, digest=digest)
    reply: pb.RemoveSchemaReply = client.unary(pb_grpc.PromptCacheStub, "RemoveSchema", request)
    return int(reply.removed)
