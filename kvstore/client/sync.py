"""The blocking client."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import grpc

from kvstore.answers import ActionsApplied, QueueAccepted
from kvstore.arguments import one_of, text
from kvstore.client.attachment import Attachment
from kvstore.client.call import drive
from kvstore.client.connection import Connection, State
from kvstore.client.mappings import Registrar
from kvstore.client.models import FRESH_S, Models, prompts_of
from kvstore.client.namespace import Namespace
from kvstore.client.region import Region
from kvstore.client.requests import (
    PromptsOf,
    actions_applied,
    actions_request,
    queue_accepted,
    queue_request,
)
from kvstore.errors import NotFound
from kvstore.keys import Tokens
from kvstore.layout import OF_TOOLS, NamespaceSpec
from kvstore.types import ChunkKey, Hint, HintAction, NamespaceId, Protection
from kvstore.v1 import fleet_pb2, fleet_pb2_grpc, hints_pb2_grpc, stats_pb2, stats_pb2_grpc

STAGING_BYTES = 64 << 20
TIMEOUT_S = 5.0


class Client:
    """A connection to the daemon of one run directory. Thread-safe; a context manager; reconnects by itself.

    In a forked child it is useless and harmless: every call answers that the daemon is unavailable.
    """

    def __init__(self, connection: Connection) -> None:
        """Use `connect`."""
        self._connection = connection
        self._models = Models(self)
        # Also when it is only dropped, and at exit: gRPC's threads must not meet an interpreter that goes down.
        self._finalizer = weakref.finalize(self, connection.close)

    def __repr__(self) -> str:
        return f"Client({self._connection!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        """False while the client reconnects, and after `close`."""
        return self._connection.state is State.CONNECTED

    @property
    def tenant(self) -> str:
        """As the daemon derived it from our user."""
        return self._attachment.tenant

    @property
    def protection(self) -> Protection:
        return self._attachment.protection

    @property
    def boot_id(self) -> bytes:
        """16 bytes, new at each start of the daemon: of the one that we are or were connected to."""
        return self._attachment.boot_id

    @property
    def lease_ttl_ms(self) -> int:
        """What a lease lasts unless `read` asks for less; renewed while it is open."""
        return self._attachment.lease_ttl_ms

    @property
    def counters(self) -> dict[str, int]:
        """What went on, by name: loads_void, loads_corrupt, saves_dropped, requests_late, reconnects, ..."""
        return self._connection.counters

    @property
    def _attachment(self) -> Attachment:
        attachment = self._connection.attachment
        assert attachment is not None, "connect() waits for the first"
        return attachment

    def register_with(self, registrar: Registrar) -> None:
        """For an engine on a device that copies out of mapped memory: `registrar` hears of each segment that this
        client maps, before anybody reads it, and before it is unmapped; at once of those that are mapped already.
        Raises OSError if one of these cannot be registered."""
        self._connection.register_with(registrar)

    def open(self, spec: NamespaceSpec, *, timeout_s: float | None = None) -> Namespace:
        """Make the namespace known to the daemon. Raises StoreError: BadRequest and Unsupported name the field."""
        namespace = self.unopened(spec)
        drive(namespace.opening(timeout_s))
        return namespace

    def unopened(self, spec: NamespaceSpec) -> Namespace:
        """Checked, but not known to the daemon yet. Raises BadRequest, Unsupported."""
        one_of("spec", spec, NamespaceSpec)
        spec.validate()
        return Namespace(self, self._connection, spec)

    def stats(self, *, timeout_s: float | None = None) -> stats_pb2.StatsReply:
        """The daemon's, as far as this tenant may see them. Raises StoreError."""
        reply: stats_pb2.StatsReply = self.unary(
            stats_pb2_grpc.StatsStub, "GetStats", stats_pb2.GetStatsRequest(), timeout_s=timeout_s
        )
        return reply

    def adopt(self, fd: int, size_bytes: int, *, timeout_s: float | None = None) -> Region:
        """Lend the daemon the first `size_bytes` of a file in memory (a memfd, a file in /dev/shm), to save out of it
        with `WriteBatch.fill`. At most 8 regions a client.

        The daemon only ever reads it, through a descriptor that can do no more: if `fd` can write, the daemon opens the
        file anew, which its user must be allowed to; else hand over one that was opened with O_RDONLY. Raises
        StoreError: BadRequest (no file in memory, too short, not readable), Unavailable, Exhausted.
        """
        deadline = self._connection.deadline(timeout_s)
        region = Region(fd, size_bytes)
        try:
            self._connection.wait_until(lambda: self.connected, deadline)
            region.lend(self._attachment, deadline)
        except BaseException:
            region.close()
            raise
        return region

    def publish_queue(
        self,
        model: str,
        hints: Sequence[Hint],
        *,
        removed: Sequence[bytes] = (),
        snapshot: bool = True,
        ttl_ms: int = 0,
        number: int = 0,
        timeout_s: float | None = None,
    ) -> QueueAccepted:
        """As `Namespace.publish_queue`, for a scheduler that knows sessions and jobs of a model, but not the layout of
        its KV. Of several namespaces of `model` that our tenant has, each hint is for the one that has what it names:
        most of its chunks, or its session (where that was used last), or else the one that was opened last. Of token
        ids keys are made for each namespace whose hashes are known here.

        Raises NotFound while no worker has opened one, and other StoreErrors.
        """
        text("model", model)
        reply = self._of_model(
            model,
            "PublishQueue",
            lambda prompts_of: queue_request(
                hints, removed=removed, snapshot=snapshot, ttl_ms=ttl_ms, number=number, prompts_of=prompts_of
            ),
            timeout_s,
        )
        return queue_accepted(reply, len(hints))

    def apply_actions(
        self,
        model: str,
        actions: Sequence[HintAction],
        *,
        cancelled: Sequence[bytes] = (),
        timeout_s: float | None = None,
    ) -> ActionsApplied:
        """As `Namespace.apply_actions`, each action for one of the namespaces of `model`, as in `publish_queue`."""
        text("model", model)
        reply = self._of_model(
            model,
            "ApplyActions",
            lambda prompts_of: actions_request(actions, cancelled=cancelled, prompts_of=prompts_of),
            timeout_s,
        )
        return actions_applied(reply, len(actions))

    def prompt_keys(self, model: str, tokens: Tokens, *, timeout_s: float | None = None) -> list[ChunkKey]:
        """Keys of all full chunks of a prompt, as whoever stores the KV of `model` makes them: in the namespace that
        was opened last of those whose hashes are known here. Raises NotFound, Unsupported (there is none; see
        `client.prompts`), and other StoreErrors."""
        return self.prompts(model, tokens, timeout_s=timeout_s)[0][1]

    def prompts(
        self, model: str, tokens: Tokens, *, timeout_s: float | None = None
    ) -> list[tuple[NamespaceId, list[ChunkKey]]]:
        """The same in each of the model's namespaces whose hashes are known here (of at most HASHED_MAX), the one that
        was opened last first."""
        rows = self._models.namespaces(text("model", model), timeout_s, age_max_s=FRESH_S)
        return prompts_of(rows, tokens)

    def route(
        self,
        model: str,
        *,
        tokens: Tokens | None = None,
        keys: Sequence[ChunkKey] = (),
        session: bytes = b"",
        timeout_s: float | None = None,
    ) -> fleet_pb2.RouteReply:
        """Which nodes hold how much of a prompt, and what it costs each to have the rest, the cheapest first. The
        prompt is given as tokens, as chunk keys in chain order, or as a session of the daemon that is asked. Of several
        namespaces of `model` the one counts of which a node has most of it. Raises NotFound and other StoreErrors."""
        rows = self._models.namespaces(text("model", model), timeout_s, age_max_s=FRESH_S)
        prompts: list[tuple[NamespaceId, Sequence[ChunkKey]]]
        if tokens is not None:
            prompts = [(number, made) for number, made in prompts_of(rows, tokens) if made]
        else:
            prompts = [(NamespaceId(row.namespace_id), keys) for row in rows]
        found: list[tuple[int, fleet_pb2.RouteReply]] = []
        problem: NotFound | None = None
        chunk_tokens = {row.namespace_id: row.chunk_tokens for row in rows}
        for number, named in prompts:
            request = fleet_pb2.RouteRequest(namespace_id=number, keys=named, session=session)
            try:
                reply = self.unary(fleet_pb2_grpc.FleetStub, "Route", request, timeout_s=timeout_s)
            except NotFound as error:  # no such session there, or it is gone
                problem = problem or error
                continue
            held = max((node.prefix_chunks for node in reply.nodes), default=0)
            found.append((held * chunk_tokens[number], reply))
        if not found and problem is not None:
            self._models.forget()
            raise problem
        return max(found, key=lambda each: each[0])[1] if found else fleet_pb2.RouteReply()

    def only_model(self, *, timeout_s: float | None = None) -> str:
        """The name of the one model that workers have opened; what kvctl opens is none. Raises NotFound if there is
        none, or several."""
        rows = self._models.listed(timeout_s)
        names = sorted({row.model for row in rows if not row.spec.layout_fingerprint.startswith(OF_TOOLS)})
        if len(names) != 1:
            raise NotFound(
                "name the model: there is not just one", field="model", value=", ".join(names) or "none"
            )
        return names[0]

    def _of_model(
        self, model: str, method: str, request: Callable[[PromptsOf], Any], timeout_s: float | None
    ) -> Any:
        """A call of service Hints by model: the daemon finds the namespace of each hint."""
        for attempt in range(2):
            rows = self._models.namespaces(model, timeout_s)
            message = request(partial(prompts_of, rows))
            # Any of them, and always the same: the daemon keeps the queue under it.
            message.namespace_id = min(row.namespace_id for row in rows)
            try:
                reply = self.unary(hints_pb2_grpc.HintsStub, method, message, timeout_s=timeout_s)
            except NotFound:
                # The daemon dropped it, or was started anew: what we knew is gone.
                self._models.forget()
                if attempt:
                    raise
                continue
            if set(reply.namespaces) <= {row.namespace_id for row in rows}:
                return reply
            # One was opened since we looked. If keys were made of token ids, it needs its own.
            self._models.forget()
            named: Sequence[Any] = getattr(message, "hints", ()) or getattr(message, "actions", ())
            if not any(each.prompts for each in named):
                return reply
            if getattr(message, "number", 0):
                reply.snapshot_wanted = True  # the same number would not be taken again
                return reply
        return reply

    def unary(
        self,
        stub: Callable[[grpc.Channel], Any],
        method: str,
        request: Any,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """Any unary call of the daemon's services, as this client. Raises StoreError."""
        return self._connection.unary(stub, method, request, self._connection.deadline(timeout_s))

    def wait_connected(self, timeout_s: float | None = None) -> None:
        """Until the client is connected (again). Raises Unavailable when that takes longer."""
        self._connection.wait_until(lambda: self.connected, self._connection.deadline(timeout_s))

    def close(self) -> None:
        """Release all leases, abort all batches, unmap everything, tell the daemon, and end. Idempotent; bounded."""
        self._finalizer()


def connect(
    run_dir: str,
    *,
    engine_group: str = "",
    rank: int = 0,
    timeout_s: float = TIMEOUT_S,
    staging_bytes: int = STAGING_BYTES,
    directory: bool = True,
) -> Client:
    """Connect to the daemon that serves `run_dir`.

    `engine_group` names the engine whose scheduler and ranks hold leases together ("": this process alone). `timeout_s`
    bounds connecting, and is the default of every later call. `staging_bytes` of memory for saves are asked for when
    the first save needs them. `directory`: chunks are looked up in shared memory where that is possible; without it the
    daemon is asked for each read and match. A relative `run_dir` means where it is now, also for later reconnections.
    Raises StoreError: Unavailable when no daemon answers in time, and within a second where none listens; Denied when
    it does not serve this user.
    """
    connection = Connection(
        run_dir,
        engine_group=engine_group,
        rank=rank,
        timeout_s=timeout_s,
        staging_bytes=staging_bytes,
        directory=directory,
    )
    connection.start()
    return Client(connection)
