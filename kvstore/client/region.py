"""A region: memory of the engine's own, lent to the daemon, out of which `WriteBatch.fill` saves without a copy in
staging memory."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Self

from kvstore import wire
from kvstore.arguments import NUMBER_MAX, whole
from kvstore.client.call import FORKED, gone
from kvstore.errors import BadRequest, StoreError, Unavailable
from kvstore.v1 import descriptor_pb2

if TYPE_CHECKING:
    from kvstore.client.attachment import Attachment

log = logging.getLogger(__name__)


class Region:
    """Made by `Client.adopt`. Thread-safe; a context manager; survives restarts of the daemon, to which it is lent anew
    with the next fill. It holds a descriptor of its own, so the caller may close the one that was given.

    The daemon only reads it, and only what a `fill` names. Load with `ReadLease.copy_to` into the engine's own mapping:
    the daemon never writes to it.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Not lent to anybody yet. Raises BadRequest."""
        fd = whole("fd", fd, -1, (1 << 31) - 1)
        size_bytes = whole("size_bytes", size_bytes, -NUMBER_MAX)
        if size_bytes <= 0:
            raise BadRequest("must be above 0", field="size_bytes", value=size_bytes)
        self.size_bytes = size_bytes
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._lent: tuple[weakref.ref[Attachment], int] | None = None
        """To whom, and the number that it has there."""
        try:
            self._fd = os.dup(fd)
        except OSError as problem:
            raise BadRequest(f"cannot be used: {problem.strerror}", field="fd", value=fd) from None

    def __repr__(self) -> str:
        return f"Region({self.size_bytes} bytes{', closed' if self._closed else ''})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # May run at any point of any thread, so it takes no lock and leaves the daemon to the housekeeping.
        if getattr(self, "_fd", -1) >= 0:
            self._closed = True
            self._end()

    def number(self, attachment: Attachment) -> int:
        """The number that the daemon knows it by; 0 when it is not lent to this one."""
        lent = self._lent
        return lent[1] if lent is not None and lent[0]() is attachment else 0

    def lend(self, attachment: Attachment, deadline: float) -> None:
        """Unless it is lent to this daemon already. Blocks. Raises StoreError."""
        if os.getpid() != self._pid:
            raise gone(FORKED)
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise Unavailable("another thread waits for the daemon to adopt it", field="region")
        try:
            if self._closed:
                raise BadRequest("the region is closed", field="region", value=repr(self))
            if self.number(attachment):
                return
            self._lent = None
            refusal: list[StoreError] = []

            def answered(reply: descriptor_pb2.DescriptorReply) -> None:
                if reply.WhichOneof("body") == "error":
                    refusal.append(wire.error_from_proto(reply.error))
                    return
                earlier = self.number(attachment)
                if earlier:  # the answer to a request that was given up for lost
                    attachment.later(partial(attachment.drop_region, earlier))
                self._lent = (weakref.ref(attachment), reply.adopt.region)
                if self._closed:  # meanwhile: nobody had waited for this answer any more
                    self._take_back()

            attachment.adopt(self._fd, self.size_bytes, answered, deadline)
            if refusal:
                raise refusal[0]
            if not self.number(attachment):
                raise gone("the daemon did not adopt the region")
        finally:
            self._lock.release()
            self._end_if_closed()

    def close(self) -> None:
        """Take it back. Does not wait; idempotent. A fill that runs may fail, or end well."""
        self._closed = True
        self._end_if_closed()

    def _end_if_closed(self) -> None:
        """Whoever comes last: while the region is being lent its descriptor must stay what it is."""
        if self._closed and self._lock.acquire(blocking=False):
            self._end()
            self._lock.release()

    def _end(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._take_back()

    def _take_back(self) -> None:
        """Tell the daemon, soon."""
        if os.getpid() != self._pid:
            return  # the parent's
        lent, self._lent = self._lent, None
        attachment = lent[0]() if lent is not None else None
        if lent is not None and attachment is not None:
            attachment.later(partial(attachment.drop_region, lent[1]))
