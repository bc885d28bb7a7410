"""Keeps one attachment to the daemon of a run directory, and makes a new one when it is lost.

    CONNECTED     the stream is up
    RECONNECTING  stream lost, daemon there: attach again with the same token, ask again what was not answered
                  daemon gone or restarted: everything of its boot is void; say hello, open the namespaces again
    CLOSED

Two threads: one says hello, attaches and receives; one expires what is overdue, renews leases, beats.
"""

from __future__ import annotations

import enum
import logging
import os
import random
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import grpc

from kvstore import wire
from kvstore.arguments import NUMBER_MAX, flag, seconds, text, whole, wrong_type
from kvstore.client.attachment import Attachment, nobody_there
from kvstore.client.call import FORKED, closed, gone
from kvstore.client.mappings import Registrar
from kvstore.client.renewals import alive
from kvstore.client.stream import status_error
from kvstore.config import DESCRIPTOR_SOCKET
from kvstore.errors import (
    BadRequest,
    DeadlineExceeded,
    Precondition,
    StoreError,
    Unauthenticated,
    Unavailable,
)

log = logging.getLogger(__name__)

BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 1.0
HELLO_TIMEOUT_S = 5.0
NOBODY_S = 0.5
"""How long the first connection is tried for where no daemon listens: one may be starting at this moment."""
CLOSE_TIMEOUT_S = 1.0
"""How long `close()` may wait for the daemon to confirm, and then for each of the two threads."""

_first_pid: int | None = None
"""Process that made the first connection. gRPC's threads do not survive a fork, so a child cannot make its own."""


class State(enum.Enum):
    CONNECTED = "connected"
    RECONNECTING = "reconnecting"
    CLOSED = "closed"


class Reopened(Protocol):
    """What outlives an attachment and is opened again under the next one: a `Namespace`."""

    def reopen(self, attachment: Attachment, now: float) -> None: ...


class Connection:
    """Thread-safe. `start` before use, `close` after."""

    def __init__(
        self,
        run_dir: str,
        *,
        engine_group: str,
        rank: int,
        timeout_s: float,
        staging_bytes: int,
        directory: bool = True,
    ) -> None:
        timeout_s = seconds("timeout_s", timeout_s)
        if timeout_s <= 0:
            raise BadRequest("must be above 0", field="timeout_s", value=timeout_s)
        staging_bytes = whole("staging_bytes", staging_bytes, -NUMBER_MAX)
        if staging_bytes <= 0:
            raise BadRequest("must be above 0", field="staging_bytes", value=staging_bytes)
        rank = whole("rank", rank, -NUMBER_MAX)
        if not 0 <= rank < 1 << 32:
            raise BadRequest("must be a small number, not negative", field="rank", value=rank)
        text("engine_group", engine_group)
        self.directory = flag("directory", directory)
        """Whether namespaces look chunks up by themselves where the daemon lets them."""
        if not run_dir or not isinstance(run_dir, (str, bytes, os.PathLike)):
            raise wrong_type("run_dir", run_dir, "the path of the daemon's directory")
        # Where it is now: this process may change its working directory before it has to connect again.
        self.run_dir = run_dir = os.path.abspath(os.fsdecode(run_dir))
        self.timeout_s = timeout_s
        self.staging_bytes = staging_bytes
        self.counters: dict[str, int] = defaultdict(int)
        self.namespaces: weakref.WeakValueDictionary[int, Reopened] = weakref.WeakValueDictionary()
        self._registrar: Registrar | None = None
        self._pid = os.getpid()
        self._engine_group = engine_group
        self._rank = rank
        self._socket_path = os.path.join(run_dir, DESCRIPTOR_SOCKET)
        self._counters_lock = threading.Lock()
        self._changed = threading.Condition()
        """Guards what follows, and is notified when it changes."""
        self._attachment: Attachment | None = None
        self._problem: StoreError = gone(
            "the daemon does not answer: it may be stopped, or hung (see its log)"
        )
        self._was_attached = False
        self._closing = threading.Event()
        self._woken = threading.Event()
        self._streams = threading.Thread(target=self._run, name="kvstore-client-stream", daemon=True)
        self._timer = threading.Thread(target=self._keep, name="kvstore-client-timer", daemon=True)

    def __repr__(self) -> str:
        return f"Connection({self.run_dir}, {self.state.value}, {self._attachment!r})"

    @property
    def state(self) -> State:
        if self._closing.is_set():
            return State.CLOSED
        attachment = self._attachment
        up = attachment is not None and attachment.attached and os.getpid() == self._pid
        return State.CONNECTED if up else State.RECONNECTING

    @property
    def attachment(self) -> Attachment | None:
        """The latest; it may have ended."""
        return self._attachment

    def register_with(self, registrar: Registrar) -> None:
        """Raises OSError."""
        with self._changed:
            self._registrar = registrar
            attachment = self._attachment
        if attachment is not None:
            attachment.mappings.register_with(registrar)

    def start(self) -> None:
        """Raises StoreError when there is no connection within `timeout_s`: at once if trying again cannot help, and
        after NOBODY_S where no daemon listens."""
        global _first_pid
        if _first_pid is None:
            _first_pid = self._pid
        elif _first_pid != self._pid:
            raise Unavailable(
                "this process was forked from one that uses the client, and gRPC does not survive that",
                field="pid",
                value=self._pid,
                remedy="start processes with spawn (or exec) instead of fork, or connect after forking only",
            )
        self._streams.start()
        self._timer.start()
        try:
            self.wait_until(
                lambda: self.state is State.CONNECTED, time.monotonic() + self.timeout_s, setting_up=True
            )
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------------------------ waiting

    def deadline(self, timeout_s: float | None) -> float:
        """On the monotonic clock, in seconds."""
        wanted = self.timeout_s if timeout_s is None else seconds("timeout_s", timeout_s)
        return time.monotonic() + wanted

    def wait_until(self, ready: Callable[[], bool], deadline: float, *, setting_up: bool = False) -> None:
        """Blocks. Raises Unavailable when `ready` does not come true in time, or never can; when `setting_up`, also
        whatever the daemon refused us for."""
        if os.getpid() != self._pid:
            raise gone(FORKED)
        began = time.monotonic()
        with self._changed:
            while not ready():
                if self._closing.is_set():
                    raise closed()
                problem, left = self._problem, deadline - time.monotonic()
                if setting_up and nobody_there(problem):
                    left = min(left, began + NOBODY_S - time.monotonic())
                if setting_up and not isinstance(problem, (Unavailable, DeadlineExceeded)):
                    raise problem
                if left <= 0:
                    raise problem if setting_up else gone(f"not connected in time: {problem}")
                self._changed.wait(left)

    @property
    def absence(self) -> StoreError:
        """Why nothing can be asked now."""
        return closed() if self._closing.is_set() else gone("not connected to the daemon")

    def changed(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def count(self, name: str, number: int = 1) -> None:
        if os.getpid() != self._pid:
            return  # another thread of the parent may have held the lock when the process forked
        with self._counters_lock:
            self.counters[name] += number

    def wake(self) -> None:
        """Let the timer thread look now."""
        self._woken.set()

    # ------------------------------------------------------------------------------------------------ threads

    def _run(self) -> None:
        backoff = BACKOFF_MIN_S
        while not self._closing.is_set():
            began = time.monotonic()
            problem = self._serve()
            if self._closing.is_set():
                return
            with self._changed:
                self._problem = problem
                self._changed.notify_all()
            log.info("%r: %s", self, problem)
            if time.monotonic() - began > BACKOFF_MAX_S:
                backoff = BACKOFF_MIN_S  # it worked for a while
            self._closing.wait(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, BACKOFF_MAX_S)

    def _serve(self) -> StoreError:
        """Attach and receive until the stream ends; returns why it did."""
        attachment = self._attachment
        try:
            if attachment is None or not attachment.alive or not attachment.anchored():
                attachment = self._renewed_attachment()
            problem = attachment.serve()
        except StoreError as refusal:
            problem = refusal
        except Exception as bug:
            log.exception("a bug in the client: attaching anew")
            problem = gone(f"an error in the client: {bug!r}")
        stale = isinstance(problem, Unauthenticated) or (
            isinstance(problem, Precondition) and problem.field == "boot_id"
        )
        if attachment is not None and (stale or not attachment.anchored()):
            attachment.end("the daemon is gone or has restarted")
        return problem

    def _renewed_attachment(self) -> Attachment:
        if self._attachment is not None:
            self._attachment.end("the daemon is gone or has restarted")
        attachment = Attachment(
            self._socket_path,
            engine_group=self._engine_group,
            rank=self._rank,
            deadline=time.monotonic() + min(HELLO_TIMEOUT_S, self.timeout_s),
            owner=self,
        )
        with self._changed:
            if self._closing.is_set():
                attachment.end("the client is closed")
                raise Unavailable("the client is closed")
            if self._registrar is not None:
                attachment.mappings.register_with(self._registrar)  # nothing is mapped yet
            self._attachment = attachment
        return attachment

    def attached(self, attachment: Attachment) -> None:
        """Called by an attachment whose stream was welcomed, on the receiving thread."""
        self.count("reconnects" if self._was_attached else "connects")
        self._was_attached = True
        self.changed()
        self.wake()  # to open the namespaces again

    def _keep(self) -> None:
        until = 0.0
        while not self._closing.is_set():
            self._woken.wait(max(0.0, until - time.monotonic()))
            self._woken.clear()
            now = time.monotonic()
            until = now + BACKOFF_MAX_S
            attachment = self._attachment
            if attachment is None:
                continue
            try:
                until = min(until, attachment.tick(now))
                if attachment.attached:
                    for namespace in alive(self.namespaces):
                        namespace.reopen(attachment, now)
            except Exception:
                log.exception("a bug in the client's housekeeping")
                self.count("bugs")

    # ---------------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """Give everything back and end. Idempotent; takes a few seconds at most, when the daemon stands still."""
        if os.getpid() != self._pid:
            return  # the parent's, who goes on using it
        with self._changed:
            if self._closing.is_set():
                return
            self._closing.set()
            attachment = self._attachment
            self._changed.notify_all()
        self.wake()
        if attachment is not None:
            attachment.give_everything_back(time.monotonic() + CLOSE_TIMEOUT_S)
            attachment.end("the client is closed")
        for thread in (self._streams, self._timer):
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(CLOSE_TIMEOUT_S)

    # -------------------------------------------------------------------------------------------- unary calls

    def unary(self, stub: Callable[[grpc.Channel], Any], method: str, request: Any, deadline: float) -> Any:
        """Blocks. Raises StoreError."""
        self.wait_until(lambda: self.state is State.CONNECTED, deadline)
        attachment = self._attachment
        channel = attachment.channel if attachment else None
        if attachment is None or channel is None:
            raise gone("not connected to the daemon")
        metadata = ((wire.TOKEN_METADATA, attachment.hello.token),)
        try:
            return getattr(stub(channel), method)(
                request, timeout=max(0.0, deadline - time.monotonic()), metadata=metadata
            )
        except grpc.RpcError as failure:
            raise status_error(failure) from None
        except ValueError as problem:  # the channel was closed at this moment
            raise gone(f"the connection was lost: {problem}") from None
