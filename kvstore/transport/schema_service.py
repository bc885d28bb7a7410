"""gRPC service PromptCache: schemas in and out. The tenant is that of the caller's identity.

Reading a schema and writing its file take a thread, one for all, so that requests are carried out one after the other
and neither a long schema nor a disk that hangs holds up the daemon's loop. A request waits CALL_TIMEOUT_S at most.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from google.protobuf.message import Message

from kvstore import wire
from kvstore.config import TENANT_LENGTH_MAX
from kvstore.core import events
from kvstore.core.events import Ticket
from kvstore.errors import BadRequest, DeadlineExceeded, Exhausted, StoreError
from kvstore.promptcache.markup import DOCUMENT_BYTES_MAX, NAME_LENGTH_MAX
from kvstore.promptcache.schema import DIGEST_BYTES
from kvstore.tiers.schema_files import SchemaFiles, Version
from kvstore.transport import audit
from kvstore.transport.rpc import Context, Handlers
from kvstore.transport.service import ADMIN_SERVICE, Service, time_left
from kvstore.types import WorkerId
from kvstore.v1 import admin_pb2
from kvstore.v1 import promptcache_pb2 as pb

log = logging.getLogger(__name__)

PROMPT_CACHE_SERVICE = "kvstore.v1.PromptCache"
CALL_TIMEOUT_S = 10.0
PURGE_RETRY_S = 10.0
WAITING_MAX = 64
"""Requests for the thread."""
DOCUMENT_NAME_MAX = 256


class SchemaService:
    def __init__(self, service: Service, files: SchemaFiles) -> None:
        self._service = service
        self._files = files
        self._thread = OneThread()

    def __repr__(self) -> str:
        return f"SchemaService({self._files})"

    def handlers(self) -> Handlers:
        calls = {
            "PutSchema": self._put,
            "GetSchema": self._get,
            "ListSchemas": self._list,
            "RemoveSchema": self._remove,
        }
        named = {
            f"/{PROMPT_CACHE_SERVICE}/{name}": self._service.method(call, f"PromptCache/{name}")
            for name, call in calls.items()
        }
        named[f"/{ADMIN_SERVICE}/Purge"] = self._service.method(self._purge, "Admin/Purge")
        return Handlers(named)

    # ------------------------------------------------------------------------------------------------ requests

    async def _put(self, caller: WorkerId, raw: bytes, context: Context) -> bytes:
        self._service.check_not_draining()
        message = wire.parse(pb.PutSchemaRequest, raw)
        if not 1 <= len(message.text) <= DOCUMENT_BYTES_MAX:
            raise BadRequest(
                f"has 1 to {DOCUMENT_BYTES_MAX} bytes", field="text", value=f"{len(message.text)} bytes"
            )
        if len(message.document) > DOCUMENT_NAME_MAX:
            raise BadRequest(
                f"has at most {DOCUMENT_NAME_MAX} characters", field="document", value=message.document
            )
        tenant, document = self._tenant(caller), message.document or "schema"

        def put() -> pb.PutSchemaReply:
            version, added, warnings = self._files.put(tenant, message.text, document)
            return pb.PutSchemaReply(
                schema=self._to_proto(version), added=added, durable=self._files.durable, warnings=warnings
            )

        return await self._on_thread(put, context)

    async def _get(self, caller: WorkerId, raw: bytes, context: Context) -> bytes:
        message = wire.parse(pb.GetSchemaRequest, raw)
        tenant, name, digest = self._tenant(caller), _name(message.name), _digest(message.digest)

        def get() -> pb.GetSchemaReply:
            version, text = self._files.get(tenant, name, digest)
            return pb.GetSchemaReply(schema=self._to_proto(version), text=text)

        return await self._on_thread(get, context)

    async def _list(self, caller: WorkerId, raw: bytes, context: Context) -> bytes:
        message = wire.parse(pb.ListSchemasRequest, raw)
        tenant, name = self._tenant(caller), _name(message.name) if message.name else ""

        def listed() -> pb.ListSchemasReply:
            found = self._files.versions(tenant, name, all_versions=message.all_versions)
            return pb.ListSchemasReply(schemas=map(self._to_proto, found))

        return await self._on_thread(listed, context)

    async def _remove(self, caller: WorkerId, raw: bytes, context: Context) -> bytes:
        message = wire.parse(pb.RemoveSchemaRequest, raw)
        tenant, name, digest = self._tenant(caller), _name(message.name), _digest(message.digest)
        return await self._on_thread(
            lambda: pb.RemoveSchemaReply(removed=self._files.remove(tenant, name, digest)), context
        )

    # ---------------------------------------------------------------------------------------------------- purging

    async def _purge(self, caller: WorkerId, raw: bytes, context: Context) -> bytes:
        """All that a tenant has: what the core has of it, then its schemas."""
        message = wire.parse(admin_pb2.PurgeRequest, raw)
        if not 1 <= len(message.tenant) <= TENANT_LENGTH_MAX:
            raise BadRequest(
                f"has 1 to {TENANT_LENGTH_MAX} characters",
                field="tenant",
                value=message.tenant[:TENANT_LENGTH_MAX],
                remedy="kvctl stats names the tenants",
            )
        event = events.PurgeTenant(Ticket(caller), message.tenant, message.dry_run)
        who = self._service.who(caller)
        try:
            found: events.Purged = await self._service.loop.ask(event, time_left(context))
            reply = await self._on_thread(
                lambda: admin_pb2.PurgeReply(
                    chunks=found.chunks,
                    bytes=found.bytes,
                    pinned=found.pinned,
                    sessions=found.sessions,
                    schemas=self._files.remove_all(message.tenant, dry_run=message.dry_run),
                ),
                context,
            )
        except StoreError as error:
            audit.ended(event, who, error)
            raise
        audit.ended(event, who, found)
        return reply

    def purged(self, mark: bytes, gone: Callable[[], None]) -> None:
        """This node purges a tenant (`keys.tenant_mark`), whoever was told to. Where another node was, nobody here
        asks again: what fails is tried until it succeeds, and by the next start. Then `gone` is called."""
        loop = asyncio.get_running_loop()

        def again(problem: BaseException) -> None:
            log.error(
                "the schemas of a tenant that is purged are still here, and are tried again: %s", problem
            )
            loop.call_later(PURGE_RETRY_S, self.purged, mark, gone)

        def ended(done: Future[bytes]) -> None:
            problem = done.exception()
            with suppress(RuntimeError):  # the daemon has ended
                if problem is not None:
                    loop.call_soon_threadsafe(again, problem)
                else:
                    loop.call_soon_threadsafe(gone)

        try:
            done = self._thread.submit(
                lambda: admin_pb2.PurgeReply(schemas=self._files.remove_all_marked(mark))
            )
        except Exhausted as problem:
            again(problem)
        else:
            done.add_done_callback(ended)

    # ------------------------------------------------------------------------------------------------- helpers

    def _tenant(self, caller: WorkerId) -> str:
        return self._service.loop.store.state.worker(caller).tenant

    def _to_proto(self, version: Version) -> pb.SchemaVersion:
        return pb.SchemaVersion(
            name=version.name,
            digest=version.digest,
            number=version.number,
            bytes=version.bytes,
            modules=version.modules,
            current=self._files.is_current(version),
        )

    async def _on_thread(self, call: Callable[[], Message], context: Context) -> bytes:
        done = self._thread.submit(call)
        try:
            async with asyncio.timeout(min(CALL_TIMEOUT_S, time_left(context))):
                return await asyncio.wrap_future(done)
        except TimeoutError:
            raise DeadlineExceeded(
                "the disk, or requests before this one, took too long",
                remedy="look what is there, and try again",
            ) from None


class OneThread:
    """Carries out calls one after the other, WAITING_MAX of them at a time. It ends with the process: nobody waits for
    a disk that hangs."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Message], Future[bytes]]] = queue.SimpleQueue()
        self._room = threading.BoundedSemaphore(WAITING_MAX)
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], Message]) -> Future[bytes]:
        """The reply, serialised. Raises Exhausted."""
        if not self._room.acquire(blocking=False):
            raise Exhausted(f"{WAITING_MAX} requests about schemas wait already", remedy="try again later")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvstored-schemas", daemon=True)
            self._thread.start()
        done: Future[bytes] = Future()
        self._calls.put((call, done))
        return done

    def _run(self) -> None:
        while True:
            call, done = self._calls.get()
            self._room.release()
            if not done.set_running_or_notify_cancel():
                continue  # whoever asked has gone
            try:
                done.set_result(call().SerializeToString())
            except BaseException as problem:
                done.set_exception(problem)


def _name(name: str) -> str:
    if not 1 <= len(name) <= NAME_LENGTH_MAX:
        raise BadRequest(
            f"has 1 to {NAME_LENGTH_MAX} characters{'' if name else '; it is missing'}",
            field="name",
            value=name,
        )
    return name


def _digest(digest: bytes) -> bytes:
    if len(digest) not in (0, DIGEST_BYTES):
        raise BadRequest(f"has {DIGEST_BYTES} bytes or none", field="digest", value=digest)
    return digest
