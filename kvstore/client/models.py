"""Which namespaces a model has, for callers who know its name alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from kvstore import wire
from kvstore.client.prompts import EXACT, prompt_keys
from kvstore.errors import NotFound, StoreError, Unsupported
from kvstore.keys import Tokens
from kvstore.types import ChunkKey, NamespaceId
from kvstore.v1 import stats_pb2, stats_pb2_grpc

FRESH_S = 1.0
"""Whoever is not told by the daemon that a namespace was opened looks again after so long."""
HASHED_MAX = 16
"""Namespaces of a model, those that were opened last, for which keys are made of token ids."""


class Caller(Protocol):
    """A client, as far as it is needed here."""

    @property
    def boot_id(self) -> bytes: ...
    @property
    def tenant(self) -> str: ...
    def unary(self, stub: Any, method: str, request: Any, *, timeout_s: float | None = None) -> Any: ...


class Models:
    """The namespaces that a client's tenant has, by model: asked for once, and again when something tells that they are
    others. Thread-safe."""

    def __init__(self, client: Caller) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._rows: Sequence[stats_pb2.NamespaceStats] = ()
        self._boot_id = b""
        self._listed_at = float("-inf")

    def __repr__(self) -> str:
        return f"Models({sorted({row.model for row in self._rows})})"

    def forget(self) -> None:
        """They are others now."""
        with self._lock:
            self._rows = ()

    def listed(self, timeout_s: float | None) -> Sequence[stats_pb2.NamespaceStats]:
        """All that the caller may see, as of now. Raises StoreError."""
        boot_id = self._client.boot_id
        reply: stats_pb2.ListNamespacesReply = self._client.unary(
            stats_pb2_grpc.StatsStub,
            "ListNamespaces",
            stats_pb2.ListNamespacesRequest(),
            timeout_s=timeout_s,
        )
        with self._lock:
            self._rows, self._boot_id, self._listed_at = reply.namespaces, boot_id, time.monotonic()
        return reply.namespaces

    def namespaces(
        self, model: str, timeout_s: float | None, *, age_max_s: float = float("inf")
    ) -> list[stats_pb2.NamespaceStats]:
        """Of `model`, the one opened last first: of our tenant; for an admin whose tenant has none, of the tenant that
        opened one last. At most `age_max_s` old. Raises NotFound and other StoreErrors."""
        with self._lock:
            is_known = self._boot_id == self._client.boot_id
            is_known = is_known and self._listed_at + age_max_s > time.monotonic()
            rows = self._rows if is_known else ()
        found = _of(rows, model) or _of(self.listed(timeout_s), model)
        if not found:
            raise NotFound("no worker has opened it", field="model", value=model)
        tenants = [row.tenant for row in found]
        tenant = self._client.tenant if self._client.tenant in tenants else tenants[0]
        return [row for row in found if row.tenant == tenant]


def _of(rows: Sequence[stats_pb2.NamespaceStats], model: str) -> list[stats_pb2.NamespaceStats]:
    found = [row for row in rows if row.model == model]
    return sorted(found, key=lambda row: (row.opened, row.namespace_id), reverse=True)


def prompts_of(
    rows: Sequence[stats_pb2.NamespaceStats], tokens: Tokens
) -> list[tuple[NamespaceId, list[ChunkKey]]]:
    """Keys of all full chunks of a prompt, in each of the namespaces whose hashes are known here, in their order.
    Raises Unsupported and BadRequest where there is none."""
    found: list[tuple[NamespaceId, list[ChunkKey]]] = []
    problem: StoreError | None = None
    for row in rows:
        if len(found) == HASHED_MAX:
            break
        try:
            if row.spec.hash_protocol == EXACT and not row.salt:
                raise Unsupported(
                    "another tenant's keys are not to be had", field="hash_protocol", value=EXACT
                )
            keys = prompt_keys(wire.spec_from_proto(row.spec), row.salt, tokens)
        except StoreError as error:
            problem = problem or error
        else:
            found.append((NamespaceId(row.namespace_id), keys))
    if problem is not None and not found:
        raise problem
    return found
