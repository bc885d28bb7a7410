"""What the client has of one hello to one daemon: it dies as a whole, and the connection says hello anew.

The descriptor socket is the anchor: while it is open the daemon is the same process and knows us by our token. What
carries requests on top, a fast lane or a gRPC stream, may break and be opened again; requests that were not answered
are then sent again under the same number, and the daemon answers those that it carried out before with their first
answer.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError

import kvstore
from kvstore import memory, wire
from kvstore.client.batch import WriteBatch
from kvstore.client.call import FORKED, Call, Reply, closed, gone
from kvstore.client.directory import Directory
from kvstore.client.lane import Lane, readable
from kvstore.client.lease import ReadLease, Waiter
from kvstore.client.line import Settles
from kvstore.client.mappings import Mappings
from kvstore.client.renewals import Renewals, alive
from kvstore.client.staging import Staging
from kvstore.client.stream import Carrier, GrpcStream
from kvstore.errors import DeadlineExceeded, StoreError, Unavailable, Unsupported
from kvstore.types import KEYS_PER_REQUEST_MAX, Protection
from kvstore.v1 import descriptor_pb2, store_pb2

log = logging.getLogger(__name__)

PROTOCOL = 2
CALLS_MAX = 192
"""Requests that may be unanswered at one time. Answers that a broken stream loses are among the last so many, so this
must stay below the 256 that the daemon remembers."""
NOTICE_IDS_MAX = 4096
"""Most leases, reservations or segments that one notice names."""
LINGER_S = 0.005
"""How long a release waits for a request that takes it along, before it becomes a message of its own."""
TOUCHED_KEYS_MAX = 1_024
"""Of lookups in directories, that the daemon has not been told of: with more it is told at once. What is hot then does
not age, even in an arena of a few thousand chunks;"""
TOUCHED_S = 0.05
"""and after so long in any case."""
SEGMENTS_PER_REQUEST = 16
AWAITED_MAX = 64
"""Unanswered requests on the descriptor socket, when the daemon stands still."""
HEARTBEAT_S = 1.0
"""A daemon that said nothing for so long is asked whether it is there."""
SILENCE_S = 2.0
"""A daemon that says nothing for so long though something is asked is not waited for again until it speaks."""
ATTACH_ANEW_S = 10.0
"""A stream that is silent for so long is attached anew: the daemon may have ended it while this process stood still,
and the word of that may have been lost."""

_EXPECTS = {
    "open": "open",
    "match": "match",
    "acquire": "acquire",
    "renew": "renew",
    "release": "done",
    "reserve": "reserve",
    "fill": "fill",
    "commit": "commit",
    "save": "save",
    "abort": "done",
    "report_load": "done",
    "report_duplicates": "done",
    "report_resident": "resident",
    "get_session": "session",
    "update_session": "session",
    "truncate": "session",
    "fork": "session",
    "forget": "done",
    "publish_queue": "queue",
    "apply_actions": "actions",
    "touch": "done",
    "segments_unmapped": "done",
    "heartbeat": "done",
}

NOBODY_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED, errno.EACCES, errno.EPERM, errno.ENOTSOCK)
"""Why a socket's path cannot be connected to: no process listens there, or not to us."""
NOT_FOR_US = (errno.EACCES, errno.EPERM)
WELCOME_S = 5.0
"""How long a new stream may take until the daemon welcomes us."""
ASK_AGAIN_S = 1.0
RECONNECT_LOOK_S = 0.05
"""How often who waits for an answer looks whether the daemon can be heard again."""
SETTLING_S = 0.001
NEVER = float("inf")

CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.default_authority", "localhost"),
    ("grpc.max_receive_message_length", 16 << 20),
)

Handler = Callable[[descriptor_pb2.DescriptorReply, list[int]], None]


class _NotSent(Unavailable):
    """A request did not even get on the descriptor socket, so no reply to it will come."""


class _NotSentInTime(DeadlineExceeded, _NotSent):
    """Another thread had the descriptor socket, and waited for the daemon there."""


class Owner(Protocol):
    """What an attachment tells the connection that made it."""

    def attached(self, attachment: Attachment) -> None:
        """The stream was welcomed. Called on the thread that receives."""

    def wake(self) -> None:
        """There is something to be done before the next tick."""

    def count(self, name: str, number: int = 1) -> None: ...


class Attachment:
    """Thread-safe. `alive` turns false once and for ever; `attached` says whether the stream is up."""

    def __init__(
        self,
        descriptor_socket: str,
        *,
        engine_group: str,
        rank: int,
        deadline: float,
        owner: Owner,
    ) -> None:
        """Connect and say hello. Raises StoreError: Unavailable, DeadlineExceeded, Denied, Unsupported, Exhausted."""
        self.pid = os.getpid()
        self.alive = False
        self.attached = False
        self.silent = False
        self.draining = False
        self._closing = False
        """Everything is being given back, and nothing new is asked for."""
        self.lease_ttl_ms = 0
        self.staging: Staging | None = None
        self.staging_problem: StoreError | None = None
        """Why the daemon said nothing when it was asked for staging memory last."""
        self._waiters: list[Settles] = []
        self.renewals = Renewals()
        self.batches: weakref.WeakValueDictionary[int, WriteBatch] = weakref.WeakValueDictionary()
        """By the number of their reservation."""
        self._owner = owner
        self._next_tick = 0.0
        self._stream_opened_at = 0.0
        self._lane_refused = False
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._calls: dict[int, Call] = {}
        self._unkept: set[Call] = set()
        """Those that acquired something which nobody has taken yet."""
        self._last_id = 0
        self._carrier: Carrier | None = None
        self._channel: grpc.Channel | None = None
        self._heard_at = time.monotonic()
        self._notices: dict[str, list[int]] = {"release": [], "abort": [], "segments_unmapped": []}
        self._touched: list[tuple[int, Sequence[bytes], bytes]] = []
        """Lookups in directories that the daemon has not been told of: namespace, keys, what was found."""
        self._touched_keys = 0
        self._touched_at = 0.0
        """When the oldest of them came."""
        self._release_by = 0.0
        """When the oldest release that waits for company goes alone."""
        self._released_since_tick = False
        self._noticing: set[str] = set()
        self._beating = False
        self._spoiled = False
        self._dropped: deque[Callable[[], None]] = deque()
        self._dropped_regions: deque[int] = deque()
        """Regions that the daemon is to be told of again."""

        # These are taken with a time limit, not by `with`; of an RLock, who was interrupted can tell if it is his.
        self._socket_lock = threading.RLock()
        self._making_staging = threading.RLock()
        self._awaited: deque[Handler] = deque()
        self._socket = _connect(descriptor_socket, deadline)
        self.hello = descriptor_pb2.HelloReply()
        try:
            self._hello(engine_group, rank, deadline)
        except BaseException:
            self._socket.close()
            raise
        self.tenant = self.hello.tenant
        self.boot_id = self.hello.boot_id
        self.protection = Protection(self.hello.protection)
        self.mappings = Mappings(boot_id=self.boot_id, writable=self.protection is Protection.GROUP)
        self.alive = True

    def __repr__(self) -> str:
        state = "attached" if self.attached else "detached" if self.alive else "ended"
        return (
            f"Attachment(boot {self.hello.boot_id.hex()[:8]}, {state}, {len(self._calls)} unanswered, "
            f"{self.mappings!r}, {self.staging!r})"
        )

    # --------------------------------------------------------------------------------- the descriptor socket

    @property
    def closing(self) -> bool:
        """Everything is being given back, and nothing new begins."""
        return self._closing

    def _hello(self, engine_group: str, rank: int, deadline: float) -> None:
        request = descriptor_pb2.DescriptorRequest(
            hello=descriptor_pb2.Hello(
                protocol=PROTOCOL,
                client=f"attnstore-python/{kvstore.__version__} pid {self.pid}",
                engine_group=engine_group,
                rank=rank,
            )
        )

        def answered(reply: descriptor_pb2.DescriptorReply, fds: list[int]) -> None:
            _close_all(fds)
            if reply.WhichOneof("body") == "error":
                raise wire.error_from_proto(reply.error)
            self.hello.CopyFrom(reply.hello)

        self._exchange(request, answered, deadline)
        if self.hello.protocol != PROTOCOL or self.hello.protection not in {p.value for p in Protection}:
            raise Unsupported(
                f"the daemon ({self.hello.version}) speaks protocol {self.hello.protocol} with protection "
                f"{self.hello.protection!r}; this client speaks protocol {PROTOCOL}",
                field="protocol",
                value=self.hello.protocol,
                remedy="install the same version of attnstore on both sides",
            )

    def _spoil(self, why: str) -> None:
        """Some staging memory can never be used again: begin anew, with a new hello."""
        log.error("%s: connecting anew", why)
        self._spoiled = True
        self.cancel_stream()

    def anchored(self) -> bool:
        """Whether this attachment can go on: the daemon still holds its end of the descriptor socket."""
        if self._spoiled:
            return False
        try:
            return self._socket.recv(1, socket.MSG_PEEK) != b""
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False

    def _exchange(
        self,
        request: descriptor_pb2.DescriptorRequest,
        handler: Handler,
        deadline: float,
        fds: Sequence[int] = (),
    ) -> None:
        """Send, and read until this request's reply was handled. Replies come in order, so what an earlier request
        gave up waiting for is handled on the way. Raises DeadlineExceeded, Unavailable, and what handlers raise."""
        if os.getpid() != self.pid:
            raise _NotSent(FORKED)
        try:
            if not self._socket_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise _NotSentInTime("the descriptor socket is busy: the daemon does not answer")
            if len(self._awaited) >= AWAITED_MAX:
                raise _NotSent(f"{AWAITED_MAX} requests on the descriptor socket are unanswered already")
            try:
                memory.send_packet(self._socket, request.SerializeToString(), fds)
                self._awaited.append(handler)
            except OSError as problem:
                raise self._last_word() or _NotSent(
                    f"nothing can be sent on the descriptor socket: {problem}"
                ) from problem
            except BaseException:
                self._spoil("interrupted in the middle of a request")  # who knows whether a reply will come
                raise
            while handler in self._awaited:
                self._handle_one(deadline)
        finally:
            try:  # noqa: SIM105 - nothing may come before it: an interruption there would leave the lock taken
                self._socket_lock.release()
            except RuntimeError:  # not ours
                pass

    def _handle_one(self, deadline: float) -> None:
        """Raises DeadlineExceeded, Unavailable, and what the handler raises."""
        _wait_readable(self._socket, deadline)
        try:
            self._handle_readable()
        except StoreError:
            raise
        except BaseException:
            self._spoil("interrupted in the middle of a reply")  # it and its descriptors may be lost
            raise

    def _handle_readable(self) -> None:
        reply = descriptor_pb2.DescriptorReply()
        fds: list[int] = []
        try:
            data, fds = memory.receive_packet(self._socket, fds_max=2 * SEGMENTS_PER_REQUEST)
            if not data:
                raise gone("the daemon closed the descriptor socket")
            reply.ParseFromString(data)
        except DecodeError as problem:
            log.error("an unreadable packet on the descriptor socket: %s", problem)
        except OSError as problem:
            if problem.errno != errno.EMSGSIZE:
                raise self._last_word() or gone(f"the descriptor socket failed: {problem}") from problem
            # The packet is gone, with descriptors that the kernel did not open: this process has too many already.
            log.error("descriptors were lost: %s", problem)
        self._awaited.popleft()(reply, fds)

    def _last_word(self) -> StoreError | None:
        """Why the daemon hung up, if it said so: the kernel tells of the hanging up before that."""
        reply = descriptor_pb2.DescriptorReply()
        try:
            data, _ = memory.receive_packet(self._socket)
            reply.ParseFromString(data)
        except (OSError, DecodeError):
            return None
        return wire.error_from_proto(reply.error) if reply.WhichOneof("body") == "error" else None

    def read_late_packets(self) -> None:
        """Handle replies that nobody waits for any more, if they have come. Never blocks."""
        while self._awaited and self._socket_lock.acquire(blocking=False):
            try:
                if not (self.alive and self._awaited and readable(self._socket, 0.0)):
                    return
                self._handle_one(time.monotonic() + 1.0)
            except StoreError as problem:
                log.debug("a late reply on the descriptor socket: %s", problem)
                return
            finally:
                self._socket_lock.release()

    def map_segments(self, segments: Sequence[int], deadline: float) -> None:
        """Map those that are not mapped yet; one that the daemon refuses stays unmapped. Blocks, never raises
        StoreError: what could not be mapped is a miss."""
        missing = self.mappings.missing(segments)
        for start in range(0, len(missing), SEGMENTS_PER_REQUEST):
            wanted = missing[start : start + SEGMENTS_PER_REQUEST]
            self.mappings.asking(wanted)

            def answered(
                reply: descriptor_pb2.DescriptorReply, fds: list[int], wanted: Sequence[int] = tuple(wanted)
            ) -> None:
                self._install(reply, fds)
                self.mappings.answered(wanted)
                if reply.WhichOneof("body") is None:  # lost: the daemon believes that we map what it sent
                    self.notice("segments_unmapped", wanted)

            request = descriptor_pb2.DescriptorRequest(
                segments=descriptor_pb2.SegmentsRequest(segments=wanted)
            )
            try:
                self._exchange(request, answered, deadline)
            except StoreError as problem:
                log.info("segments %s could not be fetched: %s", wanted, problem)
                if isinstance(problem, _NotSent):
                    self.mappings.answered(wanted)
                return

    def _install(self, reply: descriptor_pb2.DescriptorReply, fds: list[int]) -> None:
        body = reply.segments
        if reply.WhichOneof("body") == "error":
            log.info("segments refused: %s", wire.error_from_proto(reply.error))
        if not len(body.segments) * 2 == len(body.bytes) * 2 == len(body.cells) * 2 == len(fds):
            log.error("%d descriptors came for %d segments", len(fds), len(body.segments))
            _close_all(fds)
            self.notice("segments_unmapped", body.segments)
            return
        refused = [
            number
            for index, number in enumerate(body.segments)
            if not self.mappings.install(
                number, body.bytes[index], body.cells[index], fds[2 * index], fds[2 * index + 1]
            )
        ]
        self.notice("segments_unmapped", refused)

    def map_directory(self, namespace_id: int, deadline: float) -> Directory | None:
        """Of a namespace that is open. Blocks; None: the daemon has none, or it could not be had now."""
        found: list[Directory] = []

        def answered(reply: descriptor_pb2.DescriptorReply, fds: list[int]) -> None:
            body = reply.directory
            try:
                if reply.WhichOneof("body") != "directory" or len(fds) != 1:
                    log.info("no directory: %s", wire.error_from_proto(reply.error))
                    return
                mapping = memory.map_shared(fds[0], body.bytes)
                found.append(Directory(mapping, body.slot_bytes, self.boot_id))
            except (OSError, ValueError) as problem:
                log.error("a directory could not be mapped: %s", problem)
            finally:
                _close_all(fds)

        if not self.hello.directory:
            return None
        request = descriptor_pb2.DescriptorRequest(
            directory=descriptor_pb2.DirectoryRequest(namespace_id=namespace_id)
        )
        try:
            self._exchange(request, answered, deadline)
        except StoreError as problem:
            log.info("no directory: %s", problem)
        return found[0] if found else None

    def make_staging(self, wanted_bytes: int, deadline: float) -> None:
        """Ask for staging memory, unless there is some. Blocks; without success `staging` stays None."""

        def answered(reply: descriptor_pb2.DescriptorReply, fds: list[int]) -> None:
            try:
                if reply.WhichOneof("body") == "error":
                    log.warning("no staging memory: %s", wire.error_from_proto(reply.error))
                elif len(fds) == 1 and self.staging is None and self.alive:
                    self.staging = Staging(fds[0], reply.staging.bytes)
            except OSError as problem:
                log.error("staging memory could not be mapped: %s", problem)
            finally:
                _close_all(fds)

        # One thread asks: the daemon gives a worker staging memory once.
        try:
            if not self._making_staging.acquire(timeout=max(0.0, deadline - time.monotonic())):
                return
            if self.staging is None:
                self.staging_problem = None
                request = descriptor_pb2.DescriptorRequest(
                    staging=descriptor_pb2.StagingRequest(bytes=wanted_bytes)
                )
                self._exchange(request, answered, deadline)
        except StoreError as problem:
            self.staging_problem = problem
            log.info("no staging memory: %s", problem)
        finally:
            try:  # noqa: SIM105 - nothing may come before it: an interruption there would leave the lock taken
                self._making_staging.release()
            except RuntimeError:  # not ours
                pass

    def adopt(
        self,
        fd: int,
        size_bytes: int,
        answered: Callable[[descriptor_pb2.DescriptorReply], None],
        deadline: float,
    ) -> None:
        """Lend the daemon a region; `answered` hears what it says, even when nobody waits for that any more. Blocks.
        Raises StoreError when there was no answer in time."""

        def handle(reply: descriptor_pb2.DescriptorReply, fds: list[int]) -> None:
            _close_all(fds)
            answered(reply)

        # There is room for few, so those that were given back are dropped first.
        self._give_back_dropped()
        self._drop_regions_again()
        request = descriptor_pb2.DescriptorRequest(adopt=descriptor_pb2.AdoptRequest(bytes=size_bytes))
        self._exchange(request, handle, deadline, (fd,))

    def drop_region(self, number: int) -> None:
        """Tell the daemon, without waiting for its answer; again later while the socket is busy."""
        if os.getpid() != self.pid or not self.alive:
            return
        if not self._socket_lock.acquire(blocking=False):
            self._dropped_regions.append(number)
            return
        try:
            request = descriptor_pb2.DescriptorRequest(
                drop_region=descriptor_pb2.DropRegionRequest(region=number)
            )
            if len(self._awaited) >= AWAITED_MAX:
                self._dropped_regions.append(number)
                return
            memory.send_packet(self._socket, request.SerializeToString())
            self._awaited.append(lambda _, fds: _close_all(fds))
        except BlockingIOError:
            self._dropped_regions.append(number)
        except OSError as problem:
            log.debug("region %d ends with the connection: %s", number, problem)
        finally:
            self._socket_lock.release()

    # --------------------------------------------------------------------------------------------- the stream

    def serve(self) -> StoreError:
        """Attach, and receive until that ends; returns why it did. Raises StoreError when it could not begin."""
        carrier = self._open()
        with self._lock:
            if not self.alive:
                carrier.cancel()
            self._carrier = carrier
            self._stream_opened_at = time.monotonic()
        try:
            return carrier.run()
        finally:
            self.close_stream()

    def _open(self) -> Carrier:
        if self.hello.fast_lane and not self._lane_refused:
            sock = self._ask_for_lane(time.monotonic() + WELCOME_S)
            if sock is not None:
                return Lane(sock, self.receive, self._awaits)
            self._lane_refused = True
        channel = self.channel
        if channel is None:
            raise gone("this connection has ended")
        hello = store_pb2.AttachHello(token=self.hello.token, boot_id=self.hello.boot_id)
        return GrpcStream(channel, hello, self.receive)

    def _ask_for_lane(self, deadline: float) -> socket.socket | None:
        """None: there is none to be had, so gRPC is used until the next hello. Raises StoreError when the daemon did
        not answer."""
        found: list[socket.socket] = []

        def answered(reply: descriptor_pb2.DescriptorReply, fds: list[int]) -> None:
            if reply.WhichOneof("body") == "error":
                log.info("no fast lane: %s", wire.error_from_proto(reply.error))
            if len(fds) == 1 and reply.WhichOneof("body") == "lane" and time.monotonic() < deadline:
                found.append(socket.socket(fileno=fds.pop()))
            _close_all(fds)

        self._exchange(
            descriptor_pb2.DescriptorRequest(lane=descriptor_pb2.LaneRequest()), answered, deadline
        )
        return found[0] if found else None

    def cancel_stream(self) -> None:
        """From any thread: `serve` comes to its end."""
        carrier = self._carrier
        if carrier is not None:
            carrier.cancel()

    @property
    def channel(self) -> grpc.Channel | None:
        """For unary calls, made when it is first needed; None once this connection has ended."""
        with self._lock:
            if self._channel is None and self.alive:
                self._channel = grpc.insecure_channel(self.hello.grpc_target, options=CHANNEL_OPTIONS)
            return self._channel

    def _welcomed(self, welcome: store_pb2.AttachWelcome) -> None:
        """Send what a broken stream left unanswered, in order and under the same numbers, before anything new."""
        with self._lock:
            self.lease_ttl_ms = welcome.lease_ttl_ms
            for number, call in sorted(self._calls.items()):
                if call.request is None or (call.abandoned and not call.has_consequences):
                    del self._calls[number]
                    self._notices["release"] += call.request.release_lease_ids if call.request else ()
                elif self._carrier is not None:
                    self._carrier.send(call.request)
            self.attached = self.alive and self._carrier is not None
        self._send_notices()
        self._owner.attached(self)

    def receive(self, reply: store_pb2.AttachReply) -> None:
        """Every message of the stream, in order, on the receiving thread."""
        self._heard_at = time.monotonic()
        self.silent = False
        body = reply.WhichOneof("body")
        if reply.request_id:
            call = self._calls.get(reply.request_id)
            if call is not None:
                try:
                    self._answered(call, reply, body or "")
                except (
                    BaseException
                ):  # Ctrl-C in the middle: the housekeeping, which nobody interrupts, does it again
                    self.later(partial(self._answered, call, reply, body or ""))
                    self._owner.wake()
                    raise
            return
        match body:
            case "welcome":
                self._welcomed(reply.welcome)
            case "chunks_settled":
                for waiter in list(self._waiters):
                    waiter.settle(reply.chunks_settled)
            case "segments_retired":
                self.notice("segments_unmapped", self.mappings.retire(reply.segments_retired.segments))
                self.collect()
            case "leases_revoked":
                self.count("leases_revoked", len(reply.leases_revoked.lease_ids))
                self.renewals.void(reply.leases_revoked.lease_ids)
            case "draining":
                self.draining = True
            case _:
                log.debug("an unknown push: %s", body)  # a newer daemon

    def _answered(self, call: Call, reply: store_pb2.AttachReply, body: str) -> None:
        """Also once more, wherever it was interrupted."""
        answer: Reply = reply
        if body == "error":
            answer = wire.error_from_proto(reply.error)
        elif body != call.expects:
            answer = StoreError(f"the daemon answered with {body!r}", field="body", value=call.expects)
        now = time.monotonic()
        with self._lock:
            self._calls.pop(reply.request_id, None)
            late, call.settled = call.abandoned, True
            if call.on_late is not None and answer is reply and not late:
                self._unkept.add(call)
            # The daemon stopped waiting, not copying: asked again, it may tell how it ended. What is committed but not
            # durable in time (field "wait") has been copied.
            unknown = call.must_end and isinstance(answer, DeadlineExceeded) and answer.field != "wait"
            ask_again = unknown and now - call.asked_at > ASK_AGAIN_S and call.request is not None
            if ask_again and call.request is not None:
                call.abandoned, call.asked_at = True, now
                self._calls[reply.request_id] = call
                if self._carrier is not None:
                    self._carrier.send(call.request)
        if not late:
            call.settle(answer)
        if unknown:
            if not ask_again:
                self._spoil("a commit never ended")
            return
        if call.on_reply is not None:
            call.on_reply(answer)
        if late:
            self.count("late_answers", 1)
            if call.on_late is not None and isinstance(answer, store_pb2.AttachReply):
                call.on_late(answer)
            with self._lock:
                self._idle.notify_all()

    # ---------------------------------------------------------------------------------------------- requests

    def call(
        self,
        field: str,
        body: Any,
        deadline: float,
        *,
        patient: bool = False,
        must_end: bool = False,
        on_reply: Callable[[Reply], None] | None = None,
        on_late: Callable[[store_pb2.AttachReply], None] | None = None,
    ) -> Call:
        """Send a request; `field` names it in AttachRequest. Never blocks and never raises: what cannot be sent now is
        answered at once. `patient` asks even a daemon that has been silent for long; `must_end` says that a
        DeadlineExceeded of the daemon is no answer, because it may still be reading our memory."""
        call = Call(self, _EXPECTS[field], deadline, must_end, on_reply, on_late)
        if os.getpid() != self.pid:
            # before any lock: another thread of the parent may have held it when the process forked
            call.settle(gone(FORKED))
            return call
        with self._lock:
            if self._closing:
                problem = closed()
            elif not self.attached:
                problem = gone("not connected to the daemon")
            elif self.silent and not patient:
                problem = gone("the daemon has not answered for a while")
            elif len(self._calls) >= CALLS_MAX:
                problem = gone(f"{CALLS_MAX} requests are unanswered already")
            else:
                self._send(field, body, call)
                if deadline < self._next_tick:
                    self._owner.wake()
                return call
        call.settle(problem)
        return call

    def wait_for(self, call: Call) -> None:
        """Until the call is done, which is at its deadline at the latest. One thread waits for a call."""
        while not call.done:
            left_s = call.deadline - time.monotonic()
            if left_s <= 0:
                self.expire(call)
                return
            carrier = self._carrier
            if carrier is not None:
                carrier.wait(call)
            if not call.done:  # there is none now, or it has ended
                call.pause(min(max(0.0, call.deadline - time.monotonic()), RECONNECT_LOOK_S))

    def listen(self) -> None:
        """An answer is wanted at once for which no thread waits."""
        carrier = self._carrier
        if carrier is not None:
            carrier.listen()

    def _awaits(self) -> bool:
        """Whether there is such an answer to come, or such a push."""
        return bool(self._waiters) or any(call.watched for call in list(self._calls.values()))

    def _send(self, field: str, body: Any, call: Call) -> None:
        """Under the lock."""
        self._last_id += 1
        body.request_id = self._last_id
        releases = self._notices["release"]
        along, self._notices["release"] = releases[:NOTICE_IDS_MAX], releases[NOTICE_IDS_MAX:]
        touched = self._take_touched() if self._touched else ()
        call.request = store_pb2.AttachRequest(release_lease_ids=along, touched=touched, **{field: body})
        self._calls[self._last_id] = call
        if self._carrier is not None:
            self._carrier.send(call.request)

    def touched(self, namespace_id: int, keys: Sequence[bytes], found: bytes) -> None:
        """A lookup in a directory: the daemon is told with the next request, or soon. What a broken stream loses is
        lost: some chunks are older then than they should be."""
        now = time.monotonic()
        with self._lock:
            if not self._touched:
                self._touched_at = now
            self._touched.append((namespace_id, tuple(keys), found))
            self._touched_keys += len(keys)
            over = self._touched_keys >= TOUCHED_KEYS_MAX
        if over:
            self.tell_touched()
        elif now + TOUCHED_S < self._next_tick:
            self._owner.wake()

    def tell_touched(self, now: float = NEVER) -> None:
        """Of the lookups that are to be told at `now`."""
        if not self._touched or os.getpid() != self.pid:
            return
        with self._lock:
            if not self.attached or self._carrier is None or now < self._touched_at + TOUCHED_S:
                return
            if self._touched:
                self._carrier.send(store_pb2.AttachRequest(touched=self._take_touched()))

    def _take_touched(self) -> list[store_pb2.Touched]:
        """Under the lock. Those of one namespace together, as far as a message may have so many keys."""
        touched, self._touched, self._touched_keys = self._touched, [], 0
        messages: list[store_pb2.Touched] = []
        for namespace_id, keys, found in touched:
            last = messages[-1] if messages else None
            room = KEYS_PER_REQUEST_MAX - len(keys)
            if last is None or last.namespace_id != namespace_id or len(last.keys) > room:
                last = store_pb2.Touched(namespace_id=namespace_id)
                messages.append(last)
            last.keys.extend(keys)
            last.counts.append(len(keys))
            last.found += found
        return messages

    def expire(self, call: Call) -> None:
        """Stop waiting for an answer; it is dealt with when it comes."""
        with self._lock:
            if not call.settled:
                call.settled = call.abandoned = True
                expired = True
            else:
                expired = False
        if expired:
            self.count("requests_late", 1)
            call.settle(
                DeadlineExceeded("the daemon did not answer in time", remedy="recompute, or allow more time")
            )
        while not call.done:  # being settled by another thread at this moment
            call.pause(RECONNECT_LOOK_S)

    def abandon(self, call: Call, problem: StoreError | None = None) -> None:
        """Nobody will look at the answer, be it there already or not: give back what it acquired. Who waits all the
        same gets `problem`."""
        with self._lock:
            settled, call.settled = call.settled, True
            call.abandoned = True
            self._unkept.discard(call)
        if not settled:
            call.settle(problem or gone("nobody waits for this answer"))
            return
        while not call.done:  # being settled by another thread; its nudge is for who waits for the answer
            time.sleep(SETTLING_S)
        answer = call.answer
        if call.on_late is not None and isinstance(answer, store_pb2.AttachReply):
            call.on_late(answer)

    def keep(self, call: Call) -> bool:
        """What `call` acquired is the caller's now, to be given back by him. False: the client was closed meanwhile,
        and it has been given back."""
        with self._lock:
            self._unkept.discard(call)
            return not call.abandoned

    def notice(self, kind: str, ids: Iterable[int]) -> None:
        """Tell the daemon without waiting: `kind` is release, abort or segments_unmapped. One request of a kind is
        under way at a time; what comes meanwhile goes together into the next, and survives a broken stream. A release
        goes along with the next request of whatever kind if there is one within LINGER_S."""
        ids = list(ids)
        if ids and os.getpid() == self.pid:
            due = time.monotonic() + LINGER_S
            with self._lock:
                if kind == "release" and not self._notices[kind]:
                    self._release_by = due
                self._notices[kind] += ids
            if kind != "release" or self._closing:
                self._send_notices()
                return
            self._released_since_tick = True
            if due < self._next_tick:
                self._owner.wake()

    def _send_notices(self, now: float = NEVER) -> None:
        """Those that are due at `now`."""
        with self._lock:
            for kind, ids in self._notices.items():
                if not (ids and self.attached) or kind in self._noticing:
                    continue
                if kind == "release" and now < self._release_by:
                    continue
                first, self._notices[kind] = ids[:NOTICE_IDS_MAX], ids[NOTICE_IDS_MAX:]
                self._noticing.add(kind)
                self._send(kind, _notice(kind, first), self._notice_call(kind))

    def _notice_call(self, kind: str) -> Call:
        def answered(_: Reply) -> None:
            with self._lock:
                self._noticing.discard(kind)
                self._idle.notify_all()
            self._send_notices()

        return Call(self, "done", NEVER, on_reply=answered)

    def wait_for_notices(self, deadline: float) -> bool:
        """Until the daemon has confirmed all notices, those also that are to follow answers which nobody waits for any
        more; False when it did not in time, or is gone."""
        self._send_notices()
        with self._lock:
            self._idle.wait_for(
                lambda: not self.attached or not self._owes_notices(), max(0.0, deadline - time.monotonic())
            )
            return self.attached and not self._noticing

    def _owes_notices(self) -> bool:
        """Under the lock."""
        late = any(call.abandoned and call.on_late is not None for call in self._calls.values())
        return late or bool(self._noticing) or any(self._notices.values())

    # ------------------------------------------------------------------------------------------ housekeeping

    def collect(self) -> None:
        """Tell the daemon of retired segments that nobody here uses any more."""
        self.notice("segments_unmapped", self.mappings.collect())

    def count(self, name: str, number: int = 1) -> None:
        self._owner.count(name, number)

    def hold(self, lease: ReadLease) -> None:
        """Renew it while it is open."""
        due = self.renewals.add(lease)
        if due < self._next_tick:
            self._owner.wake()

    def new_waiter(self, waiter: Waiter) -> Waiter:
        """From now on `waiter` hears which chunks settled, until `forget_waiter`."""
        with self._lock:
            self._waiters.append(waiter)
        return waiter

    def forget_waiter(self, waiter: Settles) -> None:
        if os.getpid() != self.pid:
            return  # as in `call`: the lock may be held for ever
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def later(self, work: Callable[[], None]) -> None:
        """Run `work` on the housekeeping thread soon: for destructors, which may run anywhere and must take no lock."""
        self._dropped.append(work)

    def tick(self, now: float) -> float:
        """Expire, renew, heartbeat, collect. Returns when to come again at the latest."""
        self._give_back_dropped()
        self._drop_regions_again()
        with self._lock:
            waiting = [call for call in self._calls.values() if not call.settled]
        overdue = [call for call in waiting if call.deadline <= now]
        for call in overdue:
            self.expire(call)
        if self.attached:
            self._watch(now)
            for ttl_ms, leases in self.renewals.due(now):
                self._renew(ttl_ms, leases)
            self.read_late_packets()
            self.collect()
            self._send_notices(now)
            self.tell_touched(now)
        elif self._carrier is not None and now - self._stream_opened_at > WELCOME_S:
            self.cancel_stream()
        deadlines = [call.deadline for call in waiting if call.deadline > now]
        # While there are releases we come every LINGER_S, so that they need not wake us.
        soon = now + LINGER_S if self._released_since_tick else NEVER
        self._released_since_tick = False
        if self._touched:
            soon = min(soon, max(now, self._touched_at + TOUCHED_S))
        self._next_tick = min([now + HEARTBEAT_S / 2, self.renewals.next_due(), soon, *deadlines])
        return self._next_tick

    def _give_back_dropped(self) -> None:
        with contextlib.suppress(IndexError):  # empty
            while True:
                self._dropped.popleft()()

    def _drop_regions_again(self) -> None:
        with contextlib.suppress(IndexError):  # empty
            for _ in range(len(self._dropped_regions)):
                self.drop_region(self._dropped_regions.popleft())

    def _watch(self, now: float) -> None:
        if not self.anchored():
            self.cancel_stream()
            return
        with self._lock:
            oldest = min((call.asked_at for call in self._calls.values()), default=now)
        if now - max(oldest, self._heard_at) > SILENCE_S and not self.silent:
            self.silent = True
            self.count("silences", 1)
            log.warning("the daemon has not answered for %.1f s", now - max(oldest, self._heard_at))
        if self.silent and now - max(oldest, self._heard_at, self._stream_opened_at) > ATTACH_ANEW_S:
            self.cancel_stream()
            return
        if now - self._heard_at > HEARTBEAT_S and not self._beating:
            self._beating = True
            beat = self.call(
                "heartbeat", store_pb2.HeartbeatRequest(), NEVER, patient=True, on_reply=self._beaten
            )
            if beat.request is None:  # not sent after all
                self._beating = False

    def _beaten(self, _: Reply) -> None:
        self._beating = False

    def _renew(self, ttl_ms: int, leases: Sequence[int]) -> None:
        sent_at = time.monotonic()

        def answered(answer: Reply) -> None:
            if isinstance(answer, store_pb2.AttachReply):
                for lease, granted_ms in zip(leases, answer.renew.ttl_ms, strict=False):
                    self.renewals.renewed(lease, sent_at, granted_ms)

        body = store_pb2.RenewRequest(lease_ids=leases, ttl_ms=ttl_ms)
        self.call("renew", body, sent_at + ttl_ms / 1000, patient=True, on_reply=answered)

    # ---------------------------------------------------------------------------------------------------- end

    def close_stream(self) -> None:
        """No more requests can be sent; those that are unanswered wait for the next stream."""
        with self._lock:
            self.attached = False
            carrier, self._carrier = self._carrier, None
            channel, self._channel = self._channel, None
            self._idle.notify_all()
        if carrier is not None:
            carrier.cancel()
        if channel is not None:
            channel.close()

    def give_everything_back(self, deadline: float) -> None:
        """Release, abort, unmap, and wait until the daemon knows. From now on nothing is asked for."""
        with self._lock:
            self._closing = True
            acquiring = [
                call for call in self._calls.values() if call.on_late is not None and not call.settled
            ]
            acquiring += self._unkept
        for call in acquiring:
            self.abandon(call, closed())
        for batch in alive(self.batches):
            batch.abort()
        for lease in self.renewals.open_leases():
            lease.release()
        self._give_back_dropped()
        self.tell_touched()
        self.wait_for_notices(deadline)
        self.mappings.retire_all()
        self.collect()
        self.wait_for_notices(deadline)

    def end(self, why: str) -> None:
        """Everything of this boot is void: leases, batches, mappings, staging. Answers every open call."""
        with self._lock:
            self.alive = False
        self.close_stream()
        with self._lock:
            calls = [call for call in self._calls.values() if not call.settled]
            self._calls.clear()
            for call in calls:
                call.settled = True
        for call in calls:
            call.settle(gone(why))
        for waiter in list(self._waiters):
            waiter.end()
        self.mappings.retire_all()
        self.staging = None
        with contextlib.suppress(OSError):  # the daemon closed it already
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes whoever waits on it
        with self._socket_lock:
            self._socket.close()


def _notice(kind: str, ids: list[int]) -> Any:
    match kind:
        case "release":
            return store_pb2.ReleaseRequest(lease_ids=ids)
        case "abort":
            return store_pb2.AbortRequest(reservation_ids=ids)
        case _:
            return store_pb2.SegmentsUnmappedRequest(segments=ids)


def nobody_there(problem: StoreError) -> bool:
    """Whether it was raised because no daemon listens, or not to us: trying on helps only while one is starting."""
    cause = problem.__cause__
    return isinstance(cause, OSError) and cause.errno in NOBODY_THERE


def _connect(path: str, deadline: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.connect(path)
        sock.setblocking(False)
        return sock
    except OSError as problem:
        sock.close()
        remedy = "start kvstored with this run_dir, or name that of one which runs"
        if problem.errno in NOT_FOR_US:
            remedy = "ask as the daemon's own user or root, or name your user under `tenants` in its settings"
        elif problem.errno == errno.ECONNREFUSED:
            remedy = "the daemon that was there has ended: start kvstored with this run_dir, and see its log"
        raise Unavailable(
            f"no daemon answers there: {problem.strerror or problem}",
            field="run_dir",
            value=os.path.dirname(path),
            remedy=remedy,
        ) from problem


def _wait_readable(sock: socket.socket, deadline: float) -> None:
    if not readable(sock, max(0.0, deadline - time.monotonic())):
        raise DeadlineExceeded(
            "the daemon did not answer on the descriptor socket in time: it may be stopped, or hung (see its log)"
        )


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
