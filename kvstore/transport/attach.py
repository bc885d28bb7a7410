"""What a worker asks and is told, whatever carries it: a gRPC stream (`service.py`) or a fast lane (`lane.py`).

Both bring serialised AttachRequests to `handle` and take serialised AttachReplies to the worker, in the order in which
they come ready. At most OUTSTANDING_MAX requests may be read and not answered, and UNSENT_PAUSE_BYTES of answers be
unsent; beyond, the carrier reads no further. With UNSENT_BYTES_MAX unsent the connection ends, and with too many
pushes, which cannot be held back.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from kvstore import wire
from kvstore.core import events
from kvstore.core.events import Ticket
from kvstore.errors import BadRequest, Exhausted, StoreError, Unauthenticated
from kvstore.server.logs import fields
from kvstore.server.loop import Loop, Push
from kvstore.transport import audit, decoding
from kvstore.transport.rpc import INTERNAL
from kvstore.types import WorkerId
from kvstore.v1 import store_pb2

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 30.0
"""Longest time that any request waits for the core's answer, copies included."""
FINISH_TIMEOUT_S = 5.0
"""How long the answers for a peer that closed its side may take."""
LAST_WRITE_TIMEOUT_S = 1.0
"""How long what is on its way when a connection ends may take."""
OUTSTANDING_MAX = 1_024
PUSHES_MAX = 1_024
UNSENT_PAUSE_BYTES = 1 << 20
"""With so much to be sent, nothing more is read."""
UNSENT_BYTES_MAX = 32 << 20
"""With more, in answers to what it had asked before, the peer is cut off."""

STARTS_SOMETHING = frozenset({events.Open, events.Match, events.Acquire, events.Reserve, events.Save})
"""Refused while the daemon drains; whatever ends something goes on."""


class Serving(Protocol):
    """What all workers' requests have in common: a `Service`."""

    loop: Loop
    draining: bool
    peer_timeout_s: float
    who: audit.Who

    def check_not_draining(self) -> None:
        """Raises Unavailable."""


class Attached:
    """One worker's requests, answers and pushes after it said who it is. `deliver` and `end` are the carrier's."""

    def __init__(self, service: Serving, worker: WorkerId) -> None:
        self._service = service
        self._loop = service.loop
        self._worker = worker
        self._outstanding = 0
        """Requests that were read and whose answers are not written yet; the carrier counts."""
        self._pushes = 0
        """Pushes that are not written yet."""
        self._channels: set[int] = set()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(worker={self._worker}, outstanding={self._outstanding}, "
            f"unanswered={len(self._channels)}, pushes={self._pushes})"
        )

    def deliver(self, data: bytes, *, answers: bool) -> None:
        """Take a serialised reply to the worker; `answers` a request, or else it is a push. Never waits."""
        raise NotImplementedError

    def end(self, error: StoreError) -> None:
        """The connection ends, and the worker is told why if it still listens. Idempotent."""
        raise NotImplementedError

    def written(self, *, answers: bool) -> None:
        """The carrier got rid of a reply."""
        if answers:
            self._outstanding -= 1
        else:
            self._pushes -= 1

    def drop_channels(self) -> None:
        """Nobody is there for the answers any more."""
        for channel in self._channels:
            self._loop.drop_channel(channel)
        self._channels.clear()

    # -------------------------------------------------------------------------------------------------- pushes

    def send(self, reply: store_pb2.AttachReply) -> None:
        """A push."""
        if self._pushes >= PUSHES_MAX:
            self.end(
                Exhausted(f"{PUSHES_MAX} pushes were not read", remedy="read the stream, and attach again")
            )
            return
        self._pushes += 1
        self.deliver(reply.SerializeToString(), answers=False)

    def push(self, push: Push) -> None:
        match push:
            case events.ChunksSettled(_, namespace, ready, failed):
                settled = store_pb2.ChunksSettled(namespace_id=namespace, ready=ready, failed=failed)
                self.send(store_pb2.AttachReply(chunks_settled=settled))
            case events.SegmentsRetired(_, segments):
                retired = store_pb2.SegmentsRetired(segments=segments)
                self.send(store_pb2.AttachReply(segments_retired=retired))
            case events.LeasesRevoked(_, leases):
                revoked = store_pb2.LeasesRevoked(lease_ids=leases)
                self.send(store_pb2.AttachReply(leases_revoked=revoked))
            case events.WorkerClosed() | events.WorkerLeft():
                self.end(
                    Unauthenticated(
                        "the descriptor connection of this worker ended", remedy="say hello again"
                    )
                )

    # ------------------------------------------------------------------------------------------------ requests

    def handle(self, raw: bytes) -> None:
        """One request, which the carrier has counted. Raises StoreError when not even its number could be read."""
        message: Any = wire.parse(store_pb2.AttachRequest, raw)
        field = message.WhichOneof("body")
        if field is None and message.touched:
            self._touched(message.touched)
            self.written(answers=True)  # there is none
            return
        call = decoding.ATTACH_CALLS.get(field)
        if call is None:
            raise BadRequest(
                "hello comes once, first" if field == "hello" else "a request has a known body",
                field="body",
                value=field,
            )
        body = getattr(message, field)
        request_id: int = body.request_id
        channel = 0
        try:
            if request_id == 0:
                raise BadRequest(
                    "a request on the stream has a number above 0", field=f"{field}.request_id", value=0
                )
            if message.release_lease_ids:
                leases = decoding.lease_ids(message.release_lease_ids)
                self._loop.post(events.Release(Ticket(self._worker), leases))
            if message.touched:
                self._touched(message.touched)
            if call.event is None:
                self._answer(request_id, events.Done())
                return
            packed = call.extents and body.packed_extents
            channel = self._loop.channel(
                lambda answer: self._answered(channel, event, answer, packed), REQUEST_TIMEOUT_S
            )
            event = call.event(body, Ticket(self._worker, request_id, channel))
            if self._service.draining and type(event) in STARTS_SOMETHING:
                self._service.check_not_draining()
        except StoreError as error:
            self._loop.drop_channel(channel)
            self._answer(request_id, error)
            return
        self._channels.add(channel)
        self._loop.post(event)

    def _touched(self, lookups: Sequence[store_pb2.Touched]) -> None:
        """Raises BadRequest."""
        decoding.count("touched", lookups, decoding.TOUCHED_PER_MESSAGE_MAX)
        for lookup in lookups:
            self._loop.post(decoding.touched(lookup, Ticket(self._worker)))

    def _answered(self, channel: int, event: Any, answer: events.Answer, packed: bool) -> None:
        self._channels.discard(channel)
        if type(event) in audit.NAMED:
            audit.ended(event, self._service.who(self._worker), answer)
        self._answer(event.ticket.request_id, answer, packed)

    def _answer(self, request_id: int, answer: events.Answer, packed: bool = False) -> None:
        try:
            data = wire.attach_reply(request_id, answer, packed=packed).SerializeToString()
        except Exception:
            log.exception(
                "an answer could not be put on the wire", extra=fields(answer=type(answer).__name__)
            )
            data = wire.attach_reply(request_id, StoreError(INTERNAL)).SerializeToString()
        self.deliver(data, answers=True)
