"""A fast lane: the requests and pushes of `attach.py` over a unix socket that the worker got by descriptor.

Each message comes after its length (u32, little-endian). The event loop reads what is there, at most READ_BYTES in its
turn; whole messages become events that are applied in the same turn, and their answers go out in one write. Nothing
here waits for the peer: what it does not take is kept, up to a bound, while nothing more is read of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable

from kvstore.errors import BadRequest, DeadlineExceeded, Exhausted, StoreError
from kvstore.memory import SCM_MAX_FD
from kvstore.server.logs import fields
from kvstore.transport.attach import (
    FINISH_TIMEOUT_S,
    LAST_WRITE_TIMEOUT_S,
    OUTSTANDING_MAX,
    UNSENT_BYTES_MAX,
    UNSENT_PAUSE_BYTES,
    Attached,
    Serving,
)
from kvstore.transport.rpc import INTERNAL
from kvstore.types import WorkerId
from kvstore.v1 import store_pb2
from kvstore.wire import LANE_PREFIX_BYTES, error_to_proto, lane_frame

log = logging.getLogger(__name__)

READ_BYTES = 1 << 16
"""Of one peer in one turn of the event loop."""
FRAMES_PER_WRITE = 64
FDS_SPACE = socket.CMSG_LEN(SCM_MAX_FD * 4)


class Lane(Attached):
    """Owns its socket. Lives from `start` until it calls `ended`, once. Runs on the event loop's thread alone."""

    def __init__(
        self,
        service: Serving,
        worker: WorkerId,
        sock: socket.socket,
        *,
        frame_bytes_max: int,
        ended: Callable[[Lane], None],
        discard: Callable[[int], None] = os.close,
    ) -> None:
        """`discard` closes a descriptor that came from the peer: where that may last, elsewhere."""
        super().__init__(service, worker)
        self._sock = sock
        self._frame_bytes_max = frame_bytes_max
        self._ended = ended
        self._discard = discard
        self._asyncio = asyncio.get_running_loop()
        self._received = bytearray()
        """The beginning of a message, or messages that wait until others are answered."""
        self._held_up = False
        """Such messages wait."""
        self._resuming = False
        """Their turn is about to come."""
        self._unsent: deque[tuple[bytes | memoryview, bool]] = deque()
        """Frames, and whether each answers a request."""
        self._unsent_bytes = 0
        self._corked = False
        """Answers are being collected, to be written together."""
        self._watched_for_reading = False
        self._watched_for_writing = False
        self._peer_done = False
        """It has closed its side: what it asked is answered, and then the lane ends."""
        self._ending = False
        """Nothing is read any more, and nobody else knows the lane; what is unsent may still go out."""
        self._closed = False
        self._reading_since: float | None = None
        """When the message came of which a part is here."""
        self._writing_since: float | None = None
        """Since when the peer has not taken the frame that is being sent."""
        self._watchdog: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._sock.setblocking(False)
        self._watch()

    # ------------------------------------------------------------------------------------------------- reading

    def _readable(self) -> None:
        try:
            data = self._take()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as problem:
            self._close(str(problem))
            return
        if data:
            self._received += data
            self._turn()
            return
        self._peer_done = True
        self._watch()
        if self._outstanding or self._held_up:
            self._asyncio.call_later(FINISH_TIMEOUT_S, self._close, "the worker closed its side")
        else:
            self._close("the worker closed it")

    def _take(self) -> bytes:
        """What is there. Descriptors belong nowhere here, but left to the kernel they would be closed here and now, and
        that can last (a socket that lingers). Raises OSError."""
        data, ancillary, _, _ = self._sock.recvmsg(READ_BYTES, FDS_SPACE, socket.MSG_CMSG_CLOEXEC)
        for level, kind, fds in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                for (fd,) in struct.iter_unpack("i", fds[: len(fds) & ~3]):
                    self._discard(fd)
        return data

    def _turn(self) -> None:
        """Requests in, their answers out."""
        self._corked = True
        try:
            self._loop.turn(self._work)
        finally:
            self._corked = False
        self._flush()

    def _work(self) -> None:
        """Handle the whole messages of what was received, as far as there may be more requests."""
        received = self._received
        start = 0
        try:
            while self._may_ask and len(received) - start >= LANE_PREFIX_BYTES:
                body = start + LANE_PREFIX_BYTES
                length = int.from_bytes(received[start:body], "little")
                if length > self._frame_bytes_max:
                    raise BadRequest(
                        f"a message has at most {self._frame_bytes_max} bytes",
                        field="length",
                        value=length,
                        remedy="split the request, or raise message_bytes_max",
                    )
                if len(received) - body < length:
                    break
                start = body + length
                self._outstanding += 1
                self.handle(bytes(received[body:start]))
        except StoreError as error:
            self.end(error)
        except Exception:
            log.exception("a bug while serving %r", self)
            self.end(StoreError(INTERNAL))
        del received[:start]
        self._held_up = bool(received) and not self._may_ask
        if not received or self._held_up:
            self._reading_since = None
        elif start or self._reading_since is None:
            self._reading_since = self._asyncio.time()
            self._watch_over()

    @property
    def _may_ask(self) -> bool:
        return (
            self._outstanding < OUTSTANDING_MAX
            and self._unsent_bytes < UNSENT_PAUSE_BYTES
            and not self._ending
        )

    # ------------------------------------------------------------------------------------------------- writing

    def deliver(self, data: bytes, *, answers: bool) -> None:
        if self._ending:
            return
        if self._unsent_bytes > UNSENT_BYTES_MAX:
            self.end(
                Exhausted(f"{self._unsent_bytes} bytes were not read", remedy="read the lane; attach again")
            )
            return
        self._enqueue(data, answers)
        if not self._corked:
            self._flush()

    def _enqueue(self, data: bytes, answers: bool) -> None:
        frame = lane_frame(data)
        self._unsent.append((frame, answers))
        self._unsent_bytes += len(frame)

    def _flush(self) -> None:
        """Write what the peer takes now; the rest when it takes more."""
        unsent = self._unsent
        try:
            while unsent:
                if len(unsent) == 1:
                    sent = self._sock.send(unsent[0][0])
                else:
                    sent = self._sock.sendmsg(
                        [frame for frame, _ in itertools.islice(unsent, FRAMES_PER_WRITE)]
                    )
                self._sent(sent)
        except (BlockingIOError, InterruptedError):
            if self._writing_since is None:
                self._writing_since = self._asyncio.time()
                self._watch_over()
        except OSError as problem:
            self._close(str(problem))
            return
        done = self._peer_done and not self._outstanding and not self._held_up
        if not unsent and (self._ending or done):
            self._close("its end was told")
            return
        self._watch()

    def _sent(self, count: int) -> None:
        self._unsent_bytes -= count
        while count:
            frame, answers = self._unsent[0]
            if count < len(frame):
                self._unsent[0] = (memoryview(frame)[count:], answers)
                return
            count -= len(frame)
            self._unsent.popleft()
            self._writing_since = None
            self.written(answers=answers)

    # ------------------------------------------------------------------------------------- what is waited for

    def _watch(self) -> None:
        """Have the event loop tell what may be done now."""
        if self._closed:
            return
        reading = self._may_ask and not self._peer_done
        if reading != self._watched_for_reading:
            self._watched_for_reading = reading
            if reading:
                self._asyncio.add_reader(self._sock, self._readable)
            else:
                self._asyncio.remove_reader(self._sock)
        if self._held_up and self._may_ask and not self._resuming:
            self._resuming = True  # no word will come of what is here already
            self._asyncio.call_soon(self._resume)
        writing = bool(self._unsent)
        if writing != self._watched_for_writing:
            self._watched_for_writing = writing
            if writing:
                self._asyncio.add_writer(self._sock, self._flush)
            else:
                self._asyncio.remove_writer(self._sock)

    def _resume(self) -> None:
        self._resuming = False
        if not self._closed:
            self._turn()

    def _watch_over(self) -> None:
        """A message has begun, on its way in or out: see to it that it ends."""
        if self._watchdog is None and not self._closed:
            self._watchdog = self._asyncio.call_later(self._service.peer_timeout_s, self._look)

    def _look(self) -> None:
        self._watchdog = None
        timeout_s = self._service.peer_timeout_s
        late = self._asyncio.time() - timeout_s
        if self._reading_since is not None and self._reading_since <= late:
            self.end(
                DeadlineExceeded(
                    f"a message was not sent to its end in {timeout_s:g} s", remedy="attach again"
                )
            )
        elif self._writing_since is not None and self._writing_since <= late:
            self.end(
                DeadlineExceeded(
                    f"no message was accepted for {timeout_s:g} s", remedy="read the lane, and attach again"
                )
            )
        elif self._reading_since is not None or self._writing_since is not None:
            self._watch_over()

    # ----------------------------------------------------------------------------------------------------- end

    def end(self, error: StoreError) -> None:
        if self._ending:
            return
        self._leave(str(error))
        self._enqueue(store_pb2.AttachReply(ended=error_to_proto(error)).SerializeToString(), answers=False)
        self._asyncio.call_later(LAST_WRITE_TIMEOUT_S, self._close, "it was not read to its end")
        if not self._corked:
            self._flush()

    def _leave(self, why: str) -> None:
        self._ending = True
        self.drop_channels()
        self._received.clear()
        log.debug("a lane ends", extra=fields(worker=self._worker, why=why))
        self._ended(self)

    def _close(self, why: str) -> None:
        """Now. Idempotent."""
        if self._closed:
            return
        if not self._ending:
            self._leave(why)
        self._closed = True
        if self._watched_for_reading:
            self._asyncio.remove_reader(self._sock)
        if self._watched_for_writing:
            self._asyncio.remove_writer(self._sock)
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._unsent.clear()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # nothing can come any more
            while self._take():  # in what was not read there may be descriptors
                pass
        self._sock.close()
