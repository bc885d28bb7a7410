"""The client's end of a fast lane: a unix socket with a length before each message.

No thread hands anything to another where it can be helped. A request is written by whoever makes it. Who then waits
for the answer reads the socket itself, for everybody: of several that wait, one *leads*, and hands the lead to another
when its own answer has come. While nobody leads, the carrier's own thread (`run`) watches the socket: for pushes, for
answers that no thread waits for, and for room to write what the daemon did not take at once. It watches by epoll, whose
mask is empty while somebody leads, so that one message never wakes two threads.

Requests mostly follow one another closely, and a thread that is woken by the answer to one takes the interpreter's lock
from who waits for it. So the carrier's thread *rests* between them: it looks for messages again once nobody has led for
REST_S, or as soon as there is something to come that no thread will wait for (`listen`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

from google.protobuf.message import DecodeError

from kvstore.client.call import Call, gone
from kvstore.client.stream import Receive
from kvstore.errors import StoreError
from kvstore.v1 import store_pb2
from kvstore.wire import LANE_PREFIX_BYTES, error_from_proto, lane_frame

log = logging.getLogger(__name__)

FRAME_BYTES_MAX = 16 << 20
"""Longest reply that is taken."""
READ_BYTES = 1 << 16
SEND_BUFFER_BYTES = 1 << 20
"""What we ask of the kernel, which gives less: so that a long request is rarely written in parts."""
NAP_S = 0.02
"""How long one read waits for bytes, before the reader looks whether there is still something to wait for."""
SPIN_S = 150e-6
"""How long who waits looks again and again before he sleeps: waking takes 20 to 40 µs, half of what a small request
takes in all. If it was in vain, he sleeps at once the next time, then three times, up to SPINS_SKIPPED_MAX times."""
SPINS_SKIPPED_MAX = 256
REST_S = 0.005
"""See above."""
SLOW = frozenset({"commit", "fill"})
"""Answers that wait for copies, for which one sleeps at once."""
END = select.EPOLLHUP | select.EPOLLERR
SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_NAP = struct.pack("ll", 0, int(NAP_S * 1e6))


class Lane:
    """Takes over `sock`. See `stream.Carrier`."""

    def __init__(self, sock: socket.socket, receive: Receive, awaited: Callable[[], bool]) -> None:
        """`awaited` says whether a message may come that no thread waits for by `wait`, and soon matters."""
        self._sock = sock
        self._receive = receive
        self._awaited = awaited
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _NAP)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._lock = threading.Lock()
        """Guards what follows. Nobody sleeps while holding it."""
        self._problem: StoreError | None = None
        """Why it ended."""
        self._disposing = False
        self._led = False
        self._led_lately = False
        """By who waited for an answer, since the carrier's thread last looked."""
        self._resting = False
        self._naps = False
        """The carrier's thread looks again after REST_S."""
        self._asleep: deque[Call] = deque()
        """Calls whose threads wait because somebody else leads."""
        self._unsent: deque[memoryview] = deque()
        self._mask = select.EPOLLIN
        self._epoll = select.epoll()
        self._epoll.register(sock, self._mask)
        self._received = bytearray()
        """The beginning of a message. It and what follows belong to who leads."""
        self._spins = len(os.sched_getaffinity(0)) > 1
        self._spins_skipped = 0
        self._spins_to_skip = 0

    def __repr__(self) -> str:
        return f"Lane({self._problem or 'open'}, {len(self._asleep)} asleep, {len(self._unsent)} unsent)"

    # ------------------------------------------------------------------------------------------------- sending

    def send(self, request: store_pb2.AttachRequest) -> None:
        frame = lane_frame(request.SerializeToString())
        with self._lock:
            if self._problem is not None:
                return
            if self._unsent:
                self._unsent.append(memoryview(frame))
                return
            rest = self._write(memoryview(frame))
            if rest:
                self._unsent.append(rest)
                self._watch()

    def _write(self, frame: memoryview) -> memoryview:
        """Under the lock. What the daemon did not take."""
        try:
            sent = self._sock.send(frame, SEND_FLAGS)
        except BlockingIOError:
            return frame
        except OSError as problem:
            self._end(gone(f"the daemon ended the lane: {problem.strerror}"))
            return frame[:0]
        except BaseException:
            self._end(gone("interrupted in the middle of a request"))  # who knows how much of it was written
            raise
        return frame[sent:]

    def _write_on(self) -> None:
        with self._lock:
            while self._unsent and self._problem is None:
                rest = self._write(self._unsent[0])
                if rest:
                    self._unsent[0] = rest
                    break
                self._unsent.popleft()
            self._watch()

    @property
    def unsent(self) -> int:
        return len(self._unsent)

    # ------------------------------------------------------------------------------------------------- waiting

    def wait(self, call: Call) -> None:
        while not call.done and self._problem is None:
            left_s = call.deadline - time.monotonic()
            if left_s <= 0:
                return
            if self._lead(call):
                try:
                    while not call.done and left_s > 0 and self._problem is None:
                        self._read(left_s, spin=not self._asleep and call.expects not in SLOW)
                        left_s = call.deadline - time.monotonic()
                    self._leave()
                except BaseException:
                    self._interrupted()
                    raise
            elif self._problem is None:
                try:
                    call.pause(left_s)
                finally:
                    with self._lock, contextlib.suppress(ValueError):  # who left took it out
                        self._asleep.remove(call)

    def listen(self) -> None:
        with self._lock:
            self._resting = False
            self._watch()

    def run(self) -> StoreError:
        events: list[tuple[int, int]] = []
        while self._problem is None:
            with self._lock:
                self._resting &= self._led_lately or bool(events)
                self._led_lately = False
                self._naps = self._resting
                self._watch()
            events = self._epoll.poll(REST_S if self._naps else None)
            wanted = (
                END if self._resting else END | select.EPOLLIN
            )  # what came has mostly been read by who led
            if any(event & wanted for _, event in events):
                if not self._lead():
                    time.sleep(NAP_S / 10)  # it is the end, which who leads sees too
                    continue
                try:
                    self._read(0.0)
                finally:
                    self._leave()
            if self._unsent:
                self._write_on()
        self._dispose()
        return self._problem

    def _lead(self, call: Call | None = None) -> bool:
        """Whether we lead now; if not, who leaves nudges `call`, or another that sleeps."""
        leads = False
        try:
            with self._lock:
                if self._problem is not None:
                    return False
                if self._led:
                    if call is not None:
                        call.prepare()
                        self._asleep.append(call)
                    return False
                leads = self._led = True
                self._led_lately |= call is not None
                self._watch()
                return True
        except BaseException:
            if leads:
                self._interrupted()
            raise

    def _leave(self) -> None:
        with self._lock:
            self._led = False
            self._resting = self._led_lately and not self._awaited()
            if self._disposing:
                self._close()
            self._watch()
            while self._asleep and self._asleep[0].done:
                self._asleep.popleft()
            follower = self._asleep.popleft() if self._asleep else None
        if follower is not None:
            follower.nudge()

    def _interrupted(self) -> None:
        """Who leads cannot go on (Ctrl-C), and who is to read on may not know it. All ask again on another lane."""
        with self._lock:
            self._led = False
            self._end(gone("interrupted while it was read"))
            if self._disposing:
                self._close()

    def _watch(self) -> None:
        """Under the lock: what the carrier's own thread looks for. The end it always sees."""
        mask = 0 if self._led or self._resting else select.EPOLLIN
        if self._unsent or (self._resting and not self._naps):  # then it wakes at once, and naps
            mask |= select.EPOLLOUT
        if mask != self._mask and not self._epoll.closed:
            self._epoll.modify(self._sock, mask)
            self._mask = mask

    # ----------------------------------------------------------------------------------------------- receiving

    def _read(self, timeout_s: float, *, spin: bool = False) -> None:
        """Who leads: wait for bytes (not much longer than a nap) and deal with all whole messages."""
        try:
            if timeout_s < NAP_S:
                if not readable(self._sock, timeout_s):
                    return
                data = self._sock.recv(READ_BYTES, socket.MSG_DONTWAIT)
            else:
                seen = self._spun() if spin and self._spins else None
                data = self._sock.recv(READ_BYTES) if seen is None else seen
            if data:
                self._received += data
                self._dispatch()
            else:
                self._fail(gone("the daemon ended the lane"))
        except BlockingIOError:
            pass
        except (OSError, DecodeError) as problem:
            self._fail(gone(f"the lane failed: {problem}"))
        except StoreError as problem:
            self._fail(problem)
        except Exception as bug:
            log.exception("a bug in the client: attaching anew")
            self._fail(gone(f"an error in the client: {bug!r}"))
        except BaseException:
            # An answer to somebody else may be lost, so everybody asks again on another lane.
            self._fail(gone("interrupted in the middle of an answer"))
            raise

    def _spun(self) -> bytes | None:
        """What comes while we look for it; None: nothing, or it is not worth looking."""
        if self._spins_skipped < self._spins_to_skip:
            self._spins_skipped += 1
            return None
        self._spins_skipped = 0
        end = time.perf_counter() + SPIN_S
        while time.perf_counter() < end:
            try:
                data = self._sock.recv(READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            self._spins_to_skip = 0
            return data
        self._spins_to_skip = min(2 * self._spins_to_skip + 1, SPINS_SKIPPED_MAX)
        return None

    def _dispatch(self) -> None:
        """Raises StoreError, DecodeError."""
        received = self._received
        start = 0
        while len(received) - start >= LANE_PREFIX_BYTES:
            body = start + LANE_PREFIX_BYTES
            length = int.from_bytes(received[start:body], "little")
            if length > FRAME_BYTES_MAX:
                raise gone(f"the daemon announced a message of {length} bytes")
            if len(received) - body < length:
                break
            start = body + length
            reply = store_pb2.AttachReply.FromString(bytes(received[body:start]))
            if reply.HasField("ended"):
                raise error_from_proto(reply.ended)
            self._receive(reply)
        del received[:start]

    # ----------------------------------------------------------------------------------------------------- end

    def cancel(self) -> None:
        self._fail(gone("the lane was given up"))

    def _fail(self, problem: StoreError) -> None:
        with self._lock:
            self._end(problem)

    def _end(self, problem: StoreError) -> None:
        """Under the lock. Wakes everybody."""
        if self._problem is None:
            self._problem = problem
            self._unsent.clear()
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            asleep, self._asleep = self._asleep, deque()
            for call in asleep:
                call.nudge()

    def _dispose(self) -> None:
        """Close the descriptors, or have who still leads do it when he leaves: he may be stuck in what follows an
        answer, and they must not be pulled away from under him."""
        with self._lock:
            self._disposing = True
            if not self._led:
                self._close()

    def _close(self) -> None:
        """Under the lock, after the end: nobody leads or sends any more."""
        self._epoll.close()
        self._sock.close()


def readable(sock: socket.socket, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))
