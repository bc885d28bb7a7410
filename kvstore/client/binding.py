"""A namespace as the daemon of this moment knows it: its number there, and its directory in shared memory.

After a restart of the daemon it is opened again in the background, under another number.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from kvstore import wire
from kvstore.answers import Opened
from kvstore.client.attachment import Attachment
from kvstore.client.call import Operation, Reply, gone
from kvstore.client.connection import Connection
from kvstore.client.directory import Directory
from kvstore.directory import Found
from kvstore.errors import StoreError
from kvstore.layout import NamespaceSpec
from kvstore.types import ChunkKey, NamespaceId
from kvstore.v1 import store_pb2

log = logging.getLogger(__name__)

DIRECTORY_AGAIN_S = 0.5
"""How long the housekeeping waits for the directory of a namespace that was opened again."""
REOPEN_AGAIN_S = 1.0
"""After the daemon refused to open a namespace again."""


class Binding:
    """Thread-safe. Not bound yet: `opening` does that."""

    def __init__(self, connection: Connection, spec: NamespaceSpec) -> None:
        self.spec = spec
        self.connection = connection
        self.salt = b""
        self.notes: tuple[str, ...] = ()
        self.published: tuple[Attachment, Directory] | None = None
        """The directory, and for which attachment."""
        self._bound: tuple[Attachment, NamespaceId] | None = None
        self._reopening: tuple[Attachment | None, float] = (None, 0.0)

    def __repr__(self) -> str:
        bound = self._bound
        return "unbound" if bound is None or not bound[0].alive else f"id {bound[1]}"

    def opening(self, timeout_s: float | None) -> Operation[None]:
        deadline = self.connection.deadline(timeout_s)
        yield partial(self.connection.wait_until, self._can_open, deadline)
        attachment = self.connection.attachment
        assert attachment is not None, self.connection
        body = store_pb2.OpenRequest(namespace=wire.spec_to_proto(self.spec))
        call = attachment.call("open", body, deadline, patient=True)
        yield call
        self._bind(attachment, wire.opened_from_proto(raised(call.answer).open))
        yield partial(self._map_directory, attachment, deadline)

    def _map_directory(self, attachment: Attachment, deadline: float) -> None:
        """Blocks. Without a directory everything is asked."""
        binding = self._bound
        if binding is None or binding[0] is not attachment or not self.connection.directory:
            return
        directory = attachment.map_directory(binding[1], deadline)
        self.published = (attachment, directory) if directory is not None else None

    def looked_up(self, keys: Sequence[ChunkKey]) -> tuple[Directory, Found] | None:
        """What the directory says; None: the daemon has to be asked."""
        published, binding = self.published, self.now()
        if published is None or binding is None or published[0] is not binding[0] or not keys:
            return None
        if published[0].closing:
            return None
        found = published[1].look_up(keys)
        return None if found is None else (published[1], found)

    def asking(self, field: str, body: Any, timeout_s: float | None) -> Operation[store_pb2.AttachReply]:
        """A request that waits for a connection and whose failure is raised."""
        deadline = self.connection.deadline(timeout_s)
        if not self._can_ask():
            yield partial(self.connection.wait_until, self._can_ask, deadline)
        binding = self.now()
        if binding is None:
            raise gone("the connection was lost at this moment")
        attachment, body.namespace_id = binding
        call = attachment.call(field, body, deadline, patient=True)
        yield call
        return raised(call.answer)

    def now(self) -> tuple[Attachment, NamespaceId] | None:
        """The attachment and the number that the namespace has there; None while there is none, and in a forked child.
        The two belong together: another boot of the daemon may know another namespace by that number."""
        binding = self._bound
        usable = binding is not None and binding[0].alive and binding[0].pid == os.getpid()
        return binding if usable else None

    def _can_open(self) -> bool:
        attachment = self.connection.attachment
        return attachment is not None and attachment.attached

    def _can_ask(self) -> bool:
        binding = self.now()
        return binding is not None and binding[0].attached

    def _bind(self, attachment: Attachment, opened: Opened) -> None:
        self.salt = opened.salt
        self.notes = opened.notes
        self._bound = (attachment, opened.namespace)
        self.published = None
        self.connection.changed()

    def reopen(self, attachment: Attachment, now: float) -> None:
        """Called now and then by the connection: after a restart of the daemon, open the namespace there too."""
        if self.now() is not None and self._bound is not None and self._bound[0] is attachment:
            return
        asked, at = self._reopening
        if asked is attachment and now < at + REOPEN_AGAIN_S:
            return
        self._reopening = (attachment, now)

        def answered(answer: Reply) -> None:
            if isinstance(answer, store_pb2.AttachReply):
                self._bind(attachment, wire.opened_from_proto(answer.open))
                # On the housekeeping thread, which may wait a little.
                attachment.later(
                    lambda: self._map_directory(attachment, time.monotonic() + DIRECTORY_AGAIN_S)
                )
                self.connection.wake()
            else:
                self.connection.count("reopens_failed")
                log.warning("%r could not be opened again: %s", self, answer)

        body = store_pb2.OpenRequest(namespace=wire.spec_to_proto(self.spec))
        attachment.call("open", body, now + self.connection.timeout_s, patient=True, on_reply=answered)


def raised(answer: Reply) -> store_pb2.AttachReply:
    if isinstance(answer, StoreError):
        raise answer
    return answer
