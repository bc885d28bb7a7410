"""The descriptor socket: the anchor of identity and life, and the way by which shared memory is handed over.

A peer is identified by what the kernel says (SO_PEERCRED), and alive as long as its pidfd says so:

    connected --hello--> worker --the connection ends--> closed --the core forgets it--> forgotten
        |                  |                                |
        +------------------+----- the process ends ---------+--> left

One packet, one message of descriptor.proto; one request, one reply, in order. There are two sockets for it:
SOCK_SEQPACKET, and SOCK_STREAM with each packet after its length, for languages that have no other (`memory.Frames`).
Runs on the daemon's asyncio loop with add_reader, because uvloop has no transport for SOCK_SEQPACKET.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import secrets
import socket
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvstore import __version__
from kvstore.config import StoreConfig
from kvstore.core.events import (
    Event,
    SegmentsAllowed,
    Ticket,
    WantDirectory,
    WantSegments,
    WorkerClosed,
    WorkerJoined,
    WorkerLeft,
)
from kvstore.errors import (
    BadRequest,
    ConfigError,
    Denied,
    Exhausted,
    NotFound,
    Precondition,
    StoreError,
    Unavailable,
    Unsupported,
)
from kvstore.memory import Frames, peek_fds, receive_packet, send_frame, send_packet
from kvstore.server.logs import fields
from kvstore.tiers.arena import Arena, Staging
from kvstore.tiers.directories import Directories
from kvstore.tiers.regions import Regions, in_memory
from kvstore.types import NamespaceId, Protection, RegionId, SegmentId, WorkerId
from kvstore.v1 import descriptor_pb2
from kvstore.wire import error_to_proto, parse

log = logging.getLogger(__name__)

PROTOCOL = 2
DEFAULT_TENANT = "default"
HELLO_S = 5.0
"""A connection that has not said hello by then is dropped."""
ASK_S = 5.0
"""How long the core may take to say which segments a worker may have."""
HELLOS_PER_USER_MAX = 256
"""Connections of one user that have not said hello yet; one more is closed without a word."""
SEGMENTS_PER_REQUEST_MAX = 16
TEXT_BYTES_MAX = 256
RANK_MAX = 65_535
ACCEPTS_PER_TURN_MAX = 64
ACCEPT_PAUSE_S = 0.1
"""Rest after the system refused a descriptor: the listener stays readable, and accepting on would only spin."""
SO_PEERPIDFD = 77
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Core(Protocol):
    """What this needs of `Loop`."""

    async def ask(self, event: Any, timeout_s: float) -> Any: ...

    def post(self, event: Event) -> None: ...


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose token it is."""

    worker: WorkerId
    tenant: str
    admin: bool
    pid: int
    uid: int


@dataclass(slots=True, eq=False)
class _Peer:
    sock: socket.socket
    pid: int
    uid: int
    pidfd: int
    task: asyncio.Task[None] | None = None
    identity: Identity | None = None
    token: bytes = field(default=b"", repr=False)
    connected: bool = True
    left_fds: bool = False
    """Descriptors that came with its last packet were not taken in."""
    frames: Frames | None = None
    """Of a SOCK_STREAM connection: what is here of its next packet."""


class DescriptorServer:
    """Every method is called on the asyncio thread. The path of the socket belongs to whoever holds the lock of its
    directory, who removes what is left there before `start` and after `close`."""

    def __init__(
        self,
        config: StoreConfig,
        core: Core,
        *,
        arena: Arena,
        staging: Staging,
        regions: Regions,
        boot_id: bytes,
        grpc_target: str,
        directories: Directories | None = None,
        open_lane: Callable[[WorkerId], socket.socket] | None = None,
    ) -> None:
        """`open_lane`: the worker's end of a new fast lane, see `Service`; None: there are none here. Likewise
        `directories`."""
        self._config = config
        self._core = core
        self._arena = arena
        self._staging = staging
        self._regions = regions
        self._boot_id = boot_id
        self._grpc_target = grpc_target
        self._directories = directories
        self._open_lane = open_lane
        self._workers_max = config.limits.workers_max
        self._tenants = {int(uid): tenant for uid, tenant in config.tenants.items()}
        self._numbers = itertools.count(1)
        self._peers: set[_Peer] = set()
        """Connected, whether or not they said hello."""
        self._workers: dict[WorkerId, _Peer] = {}
        """Said hello and live: connected or closed, not forgotten."""
        self._tokens: dict[bytes, Identity] = {}
        self._before_hello: Counter[int] = Counter()
        """Connections by uid."""
        self._listeners: dict[str, socket.socket] = {}
        """By path."""
        self._pause: asyncio.TimerHandle | None = None
        self._spare = -1
        """A descriptor to be closed when there is no other left; -1: none."""
        self._lendable: list[int] = []
        """Likewise, for the duplicates of one reply: who is in is served when others have used up the rest."""
        self._closing = False

    async def start(self) -> None:
        """Raises ConfigError when the path cannot be bound."""
        self._asyncio = asyncio.get_running_loop()
        try:
            for path in (self._config.descriptor_socket, self._config.stream_socket):
                self._listeners[path] = self._listen(path)
        except ConfigError:
            self._stop_listening()
            raise
        self._spare_one()
        self._spare_lendable()
        self._resume()

    def listen_again(self, path: str) -> None:
        """Where our socket is no longer: somebody has cleaned the directory. Those who are connected stay; those who
        are about to be, too. Raises ConfigError, and then nothing has changed."""
        before, listener = self._listeners.get(path), self._listen(path)
        if before is not None:
            self._accept(before)  # who knocked before
            self._asyncio.remove_reader(before.fileno())
            before.close()
        self._listeners[path] = listener
        if self._pause is None:  # else it is about to
            self._resume()

    def _listen(self, path: str) -> socket.socket:
        kind = socket.SOCK_STREAM if path == self._config.stream_socket else socket.SOCK_SEQPACKET
        listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            listener.bind(path)
            # Before listen(), so that nobody gets in by the mode that the umask gave it. Credentials decide, so where
            # other users are tenants everybody may knock.
            others = self._tenants.keys() - {0, os.geteuid()}
            os.chmod(path, 0o666 if others else 0o600)
            listener.listen(socket.SOMAXCONN)
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"the descriptor socket {path} cannot be bound: {error.strerror}",
                field="run_dir",
                value=self._config.run_dir,
                remedy="stop the other daemon, or choose another directory",
            ) from None
        return listener

    def worker_of(self, token: bytes) -> Identity | None:
        """None: never given out, or its connection or process has ended."""
        return self._tokens.get(token)

    def who(self, worker: WorkerId) -> dict[str, object]:
        """For the audit log; empty: it is none of these."""
        peer = self._workers.get(worker)
        return {} if peer is None else {"uid": peer.uid, "pid": peer.pid}

    def forget(self, worker: WorkerId) -> None:
        """The core has nothing of this worker any more: its process is watched no longer. Unknown workers are fine."""
        peer = self._workers.pop(worker, None)
        if peer is not None:
            self._unwatch(peer)
            self._hang_up(peer)

    async def close(self) -> None:
        """Hang up on everybody; nothing is posted about it. Needs no peer's cooperation."""
        self._closing = True
        self._stop_listening()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        self._drop_lendable()
        if self._pause is not None:
            self._pause.cancel()
        tasks = [peer.task for peer in self._peers if peer.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for peer in [*self._peers, *self._workers.values()]:
            self._unwatch(peer)
        self._workers.clear()

    def _stop_listening(self) -> None:
        for listener in self._listeners.values():
            self._asyncio.remove_reader(listener.fileno())
            listener.close()
        self._listeners.clear()

    def __repr__(self) -> str:
        return f"DescriptorServer({len(self._workers)} workers, {len(self._peers)} connections)"

    # ---------------------------------------------------------------------------------------------------- accepting

    def _resume(self) -> None:
        self._pause = None
        if self._spare < 0:
            self._spare_one()
        for listener in self._listeners.values():
            self._asyncio.add_reader(listener.fileno(), self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_TURN_MAX):
            if listener not in self._listeners.values():
                return
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in OUT_OF_DESCRIPTORS and self._turn_away(listener):
                    return  # whoever else waits makes the listener readable again
                log.warning("connections cannot be accepted", extra=fields(why=str(error)))
                for each in self._listeners.values():
                    self._asyncio.remove_reader(each.fileno())
                if self._pause is not None:
                    self._pause.cancel()
                self._pause = self._asyncio.call_later(ACCEPT_PAUSE_S, self._resume)
                return
            try:
                self._admit(sock)
            except OSError as error:
                log.warning("a connection was dropped", extra=fields(why=str(error)))
                if error.errno in OUT_OF_DESCRIPTORS:
                    _say_full(sock)
                self._close(sock)

    def _turn_away(self, listener: socket.socket) -> bool:
        """Out of descriptors: take one connection by the descriptor that was spared for this, say why, and hang up.
        Else it would wait, without a word, in the listener's queue. False: not even that is possible."""
        if self._spare < 0:
            return False
        os.close(self._spare)
        self._spare = -1
        try:
            sock, _ = listener.accept()
            with sock:
                _say_full(sock)
            log.warning("a connection was refused: no descriptors are left")
            return True
        except OSError:
            return False
        finally:
            self._spare_one()

    def _spare_one(self) -> None:
        with contextlib.suppress(OSError):  # somebody was faster
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _spare_lendable(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._lendable) < 2 * SEGMENTS_PER_REQUEST_MAX:
                self._lendable.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def _drop_lendable(self) -> None:
        while self._lendable:
            os.close(self._lendable.pop())

    def _admit(self, sock: socket.socket) -> None:
        """Whose connection it is; what it may do is decided when it says hello, so that it gets an answer."""
        sock.setblocking(False)
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        uid &= 0xFFFF_FFFF
        if self._before_hello[uid] >= HELLOS_PER_USER_MAX:
            raise OSError(errno.EUSERS, f"user {uid} has {HELLOS_PER_USER_MAX} connections without a hello")
        frames = Frames() if sock.type is socket.SOCK_STREAM else None
        peer = _Peer(sock, pid=pid, uid=uid, pidfd=_pidfd_of(sock, pid), frames=frames)
        self._peers.add(peer)
        self._before_hello[uid] += 1
        self._asyncio.add_reader(peer.pidfd, self._died, peer)
        peer.task = self._asyncio.create_task(self._serve(peer))

    def _tenant_of(self, uid: int) -> tuple[str, bool]:
        """(tenant, admin)"""
        own = uid in (0, os.geteuid())
        if uid in self._tenants:
            return self._tenants[uid], own
        if own:
            return DEFAULT_TENANT, True
        raise Denied(
            "this user has no tenant here",
            field="uid",
            value=uid,
            remedy="name it under `tenants` in the configuration",
        )

    # ------------------------------------------------------------------------------------------------------ serving

    async def _serve(self, peer: _Peer) -> None:
        """One connection, from its first packet to its end."""
        try:
            async with asyncio.timeout(HELLO_S):
                packet, _ = await self._receive(peer)
            if packet:
                self._welcome(peer, packet)
                while True:
                    packet, fds = await self._receive(peer)
                    if not packet:
                        self._discard(fds)
                        break
                    await self._answer(peer, packet, fds)
        except TimeoutError:
            log.warning("a connection never said hello", extra=fields(pid=peer.pid, uid=peer.uid))
        except (OSError, StoreError) as error:
            log.warning("a connection was dropped", extra=fields(why=str(error), pid=peer.pid, uid=peer.uid))
        except Exception:
            log.exception("a bug while serving %r", peer)
        finally:
            self._disconnected(peer)

    async def _receive(self, peer: _Peer) -> tuple[bytes, list[int]]:
        """The next packet; no bytes when the peer closed. At most one packet in a turn of the loop, so that a peer that
        floods us waits like everybody else. A worker may send one descriptor along; more of them, or any from others,
        are an OSError, as a packet that is too long. While too many wait to be closed, which may be another worker's
        doing, none is taken in: then it only is not there."""
        fd = peer.sock.fileno()
        while True:
            ready: asyncio.Future[None] = self._asyncio.create_future()
            self._asyncio.add_reader(fd, _wake, ready)
            try:
                await ready
            finally:
                self._asyncio.remove_reader(fd)
            packet = self._take(peer)
            if packet is not None:
                return packet

    def _take(self, peer: _Peer) -> tuple[bytes, list[int]] | None:
        """What is there; None: a part of a packet. Raises OSError."""
        frames = peer.frames
        begun = frames is not None and frames.begun
        peer.left_fds = self._regions.full or (begun and peer.left_fds)
        if peer.left_fds:
            self._check_left(peer)
        fds_max, discard = int(peer.identity is not None), self._regions.discard
        if frames is not None:
            return frames.receive(peer.sock, fds_max=fds_max, discard=discard, leave_fds=peer.left_fds)
        return receive_packet(peer.sock, fds_max=fds_max, discard=discard, leave_fds=peer.left_fds)

    def _check_left(self, peer: _Peer) -> None:
        """Raises OSError unless descriptors that came along, if any, are a worker's and of files in memory: the kernel
        closes those that are left to it at once, which must not last."""
        fds = peek_fds(peer.sock, bytes_max=1 if peer.frames is None else peer.frames.wanted)
        foreign = [fd for fd in fds if not in_memory(fd)]
        for fd in fds:
            if fd in foreign:
                self._regions.discard(fd)
            else:
                os.close(fd)
        if foreign or (fds and peer.identity is None):
            raise OSError(errno.EMSGSIZE, "descriptors came where none belong")

    def _welcome(self, peer: _Peer, packet: bytes) -> None:
        """Makes a worker of the peer. Raises StoreError after having said so to the peer."""
        try:
            request = _parsed(packet)
            if request.WhichOneof("body") != "hello":
                raise Precondition("the first request must be a hello", field="hello")
            hello = request.hello
            _check_hello(hello)
            tenant, admin = self._tenant_of(peer.uid)
            if len(self._workers) >= self._workers_max:
                raise Exhausted(f"{self._workers_max} workers are connected already", remedy="stop some")
        except StoreError as error:
            self._refuse(peer, error)
            raise
        worker = WorkerId(next(self._numbers))
        peer.identity = Identity(worker, tenant=tenant, admin=admin, pid=peer.pid, uid=peer.uid)
        peer.token = secrets.token_bytes(32)
        self._before_hello[peer.uid] -= 1
        self._workers[worker] = peer
        self._tokens[peer.token] = peer.identity
        # Posted before the answer is sent: whatever the worker asks next reaches the core later.
        self._core.post(WorkerJoined(worker, tenant, hello.engine_group, rank=hello.rank, admin=admin))
        log.info(
            "worker joined",
            extra=fields(worker=worker, pid=peer.pid, uid=peer.uid, tenant=tenant, client=hello.client),
        )
        reply = descriptor_pb2.HelloReply(
            protocol=PROTOCOL,
            boot_id=self._boot_id,
            token=peer.token,
            tenant=tenant,
            protection=self._config.protection,
            grpc_target=self._grpc_target,
            version=__version__,
            fast_lane=self._open_lane is not None,
            directory=self._directories is not None,
        )
        self._send(peer, descriptor_pb2.DescriptorReply(hello=reply))

    def _discard(self, fds: Sequence[int]) -> None:
        for fd in fds:
            self._regions.discard(fd)

    async def _answer(self, peer: _Peer, packet: bytes, fds: Sequence[int]) -> None:
        """Takes over the descriptors that came along. Raises BadRequest, after having said so to the peer, for what is
        no request of ours, and OSError for descriptors where none belong."""
        try:
            request = _parsed(packet)
        except BadRequest as error:
            self._discard(fds)
            self._refuse(peer, error)
            raise
        if fds and request.WhichOneof("body") != "adopt":
            self._discard(fds)
            raise OSError(errno.EMSGSIZE, "a descriptor came with a request that takes none")
        assert peer.identity is not None, peer
        worker = peer.identity.worker
        try:
            match request.WhichOneof("body"):
                case "segments":
                    await self._hand_over_segments(peer, worker, request.segments)
                case "staging":
                    self._hand_over_staging(peer, worker, request.staging)
                case "adopt":
                    self._adopt(peer, worker, request.adopt, fds)
                case "drop_region":
                    self._regions.drop(worker, RegionId(request.drop_region.region))
                    dropped = descriptor_pb2.DropRegionReply()
                    self._send(peer, descriptor_pb2.DescriptorReply(drop_region=dropped))
                case "lane":
                    self._hand_over_lane(peer, worker)
                case "directory":
                    await self._hand_over_directory(peer, worker, request.directory)
                case _:
                    raise Precondition("this connection has said hello already", field="hello")
        except StoreError as error:
            self._refuse(peer, error)

    async def _hand_over_segments(
        self, peer: _Peer, worker: WorkerId, request: descriptor_pb2.SegmentsRequest
    ) -> None:
        if not 1 <= len(request.segments) <= SEGMENTS_PER_REQUEST_MAX:
            raise BadRequest(
                f"must name 1 to {SEGMENTS_PER_REQUEST_MAX}", field="segments", value=len(request.segments)
            )
        wanted = tuple(SegmentId(segment) for segment in dict.fromkeys(request.segments))
        answer = await self._core.ask(WantSegments(Ticket(worker), wanted), timeout_s=ASK_S)
        assert isinstance(answer, SegmentsAllowed), answer
        # The thread that makes and unmakes segments may destroy one at any time, so duplicates are sent.
        reply = descriptor_pb2.SegmentsReply()
        with contextlib.ExitStack() as lent:
            lent.callback(self._spare_lendable)  # once the others are closed
            fds: list[int] = []
            for segment in answer.segments:
                try:
                    segment_bytes, cells = self._arena.size_of(segment)
                    pair = self._lend(segment)
                except NotFound:
                    continue
                except OSError as error:
                    raise Unavailable(
                        f"the daemon cannot hand over a segment: {error.strerror}",
                        field="segments",
                        value=segment,
                        remedy="try again later; raise the daemon's LimitNOFILE= or ulimit -n",
                    ) from None
                for fd in pair:
                    lent.callback(os.close, fd)
                fds += pair
                reply.segments.append(segment)
                reply.bytes.append(segment_bytes)
                reply.cells.append(cells)
            self._send(peer, descriptor_pb2.DescriptorReply(segments=reply), fds)

    def _lend(self, segment: SegmentId) -> tuple[int, int]:
        """Raises NotFound, OSError."""
        try:
            return self._arena.descriptors(segment)
        except OSError as error:
            if error.errno not in OUT_OF_DESCRIPTORS or not self._lendable:
                raise
        self._drop_lendable()
        return self._arena.descriptors(segment)

    def _hand_over_staging(
        self, peer: _Peer, worker: WorkerId, request: descriptor_pb2.StagingRequest
    ) -> None:
        if self._config.protection != Protection.SEALED.value:
            raise Precondition(
                "workers write in place here", field="protection", value=self._config.protection
            )
        wanted = min(request.bytes or self._config.staging_bytes, self._config.staging_bytes)
        try:
            fd, granted = self._staging.create(worker, wanted)
        except OSError as error:
            raise Unavailable(
                f"staging memory cannot be made: {error.strerror}", field="staging.bytes", value=wanted
            ) from None
        reply = descriptor_pb2.StagingReply(bytes=granted)
        try:
            self._send(peer, descriptor_pb2.DescriptorReply(staging=reply), [fd])
        finally:
            os.close(fd)

    async def _hand_over_directory(
        self, peer: _Peer, worker: WorkerId, request: descriptor_pb2.DirectoryRequest
    ) -> None:
        if self._directories is None:
            raise Precondition(
                "directories are off here", field="directory", remedy="ask by Match and Acquire"
            )
        namespace = NamespaceId(request.namespace_id)
        await self._core.ask(WantDirectory(Ticket(worker), namespace), timeout_s=ASK_S)
        try:
            fd, size_bytes, slot_bytes = self._directories.descriptor(namespace)
        except OSError as error:
            raise Unavailable(
                f"the daemon cannot hand over a directory: {error.strerror}",
                field="directory",
                value=namespace,
                remedy="try again later; raise the daemon's LimitNOFILE= or ulimit -n",
            ) from None
        reply = descriptor_pb2.DirectoryReply(bytes=size_bytes, slot_bytes=slot_bytes)
        try:
            self._send(peer, descriptor_pb2.DescriptorReply(directory=reply), [fd])
        finally:
            os.close(fd)

    def _hand_over_lane(self, peer: _Peer, worker: WorkerId) -> None:
        if self._open_lane is None:
            raise Precondition("fast lanes are off here", field="lane", remedy="attach by gRPC")
        with self._open_lane(worker) as sock:
            self._send(peer, descriptor_pb2.DescriptorReply(lane=descriptor_pb2.LaneReply()), [sock.fileno()])

    def _adopt(
        self, peer: _Peer, worker: WorkerId, request: descriptor_pb2.AdoptRequest, fds: Sequence[int]
    ) -> None:
        if not fds:
            if peer.left_fds:
                raise Unavailable(
                    "too many descriptors wait to be closed", field="adopt", remedy="try again later"
                )
            raise BadRequest(
                "no descriptor came along", field="adopt", value="0 descriptors", remedy="send one with it"
            )
        (fd,) = fds
        region = self._regions.adopt(worker, fd, request.bytes)
        log.info("region adopted", extra=fields(worker=worker, region=region, bytes=request.bytes))
        self._send(peer, descriptor_pb2.DescriptorReply(adopt=descriptor_pb2.AdoptReply(region=region)))

    def _send(self, peer: _Peer, reply: descriptor_pb2.DescriptorReply, fds: Sequence[int] = ()) -> None:
        """Raises OSError, which drops the peer. Also when it would block: a reply has less than 1 KiB, so the peer has
        left hundreds unread, and waiting for it would keep descriptors in flight."""
        send = send_packet if peer.frames is None else send_frame
        send(peer.sock, reply.SerializeToString(), fds)

    def _refuse(self, peer: _Peer, error: StoreError) -> None:
        self._send(peer, descriptor_pb2.DescriptorReply(error=error_to_proto(error)))

    # ------------------------------------------------------------------------------------------------------- ending

    def _died(self, peer: _Peer) -> None:
        """Its pidfd is readable: the process has ended, whoever else may still hold its end of the connection."""
        self._unwatch(peer)
        if peer.identity is not None and self._workers.pop(peer.identity.worker, None) is not None:
            self._tokens.pop(peer.token, None)
            self._core.post(WorkerLeft(peer.identity.worker))
            log.info("worker left", extra=fields(worker=peer.identity.worker, pid=peer.pid))
        self._hang_up(peer)

    def _disconnected(self, peer: _Peer) -> None:
        """The end of `_serve`, for whatever reason."""
        peer.connected = False
        if peer.frames is not None:
            peer.frames.drop(self._regions.discard)
        self._close(peer.sock)
        self._peers.discard(peer)
        if peer.identity is None:
            self._before_hello[peer.uid] -= 1
            self._unwatch(peer)
            return
        self._tokens.pop(peer.token, None)
        self._regions.drop_all(peer.identity.worker)
        if peer.identity.worker in self._workers and not self._closing:  # neither left nor forgotten
            self._core.post(WorkerClosed(peer.identity.worker))
            log.info("worker closed its connection", extra=fields(worker=peer.identity.worker, pid=peer.pid))

    def _close(self, sock: socket.socket) -> None:
        """Packets that were never read may hold descriptors whose closing lasts: then a thread does it."""
        unread = 0
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # the peer knows, and nothing can come any more
            if sock.type is socket.SOCK_STREAM:
                unread = len(sock.recv(1, socket.MSG_PEEK))
            else:
                # So that a packet is told from the end: each has credentials, for which there is no room here.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
                unread = sock.recvmsg(1, 0, socket.MSG_PEEK)[2] & socket.MSG_CTRUNC
        if unread:
            self._regions.discard(sock.detach())
        else:
            sock.close()

    def _hang_up(self, peer: _Peer) -> None:
        if peer.connected and peer.task is not None:
            peer.task.cancel()

    def _unwatch(self, peer: _Peer) -> None:
        if peer.pidfd >= 0:
            self._asyncio.remove_reader(peer.pidfd)
            os.close(peer.pidfd)
            peer.pidfd = -1


def _pidfd_of(sock: socket.socket, pid: int) -> int:
    """Raises OSError when the process is gone, or not to be seen from here."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
    # Before Linux 6.5 by number, which by now might be another process's: the socket of one that is gone gets no hello.
    return os.pidfd_open(pid)


def _say_full(sock: socket.socket) -> None:
    """Never waits. Reads the hello if it is there: closing on unread packets is a reset to the peer."""
    error = Exhausted(
        "the daemon has no descriptors left", remedy="try again later; raise its LimitNOFILE= or ulimit -n"
    )
    reply = descriptor_pb2.DescriptorReply(error=error_to_proto(error))
    sock.setblocking(False)
    with contextlib.suppress(OSError):
        stream = sock.type is socket.SOCK_STREAM
        (send_frame if stream else send_packet)(sock, reply.SerializeToString())
        receive_packet(sock)


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():  # told again before the waiter ran
        ready.set_result(None)


def _parsed(packet: bytes) -> descriptor_pb2.DescriptorRequest:
    request = parse(descriptor_pb2.DescriptorRequest, packet)
    if request.WhichOneof("body") is None:
        raise BadRequest("is no request that this daemon knows", field="message", value=packet[:16])
    return request


def _check_hello(hello: descriptor_pb2.Hello) -> None:
    if hello.protocol != PROTOCOL:
        raise Unsupported(
            f"this daemon (version {__version__}) speaks protocol {PROTOCOL}",
            field="hello.protocol",
            value=hello.protocol,
            remedy="use a client and a daemon of the same version",
        )
    for name, text in (("client", hello.client), ("engine_group", hello.engine_group)):
        if len(text.encode()) > TEXT_BYTES_MAX:
            raise BadRequest(f"must have at most {TEXT_BYTES_MAX} bytes", field=f"hello.{name}", value=text)
    if hello.rank > RANK_MAX:
        raise BadRequest(f"must be at most {RANK_MAX}", field="hello.rank", value=hello.rank)
