"""A process' connection to the daemon: made and kept in the background, so that an engine never waits for one."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvstore.client import connect
from kvstore.errors import StoreError

if TYPE_CHECKING:
    from kvstore.client import Client, Namespace
    from kvstore.layout import NamespaceSpec

AGAIN_S = 2.0
"""Between two attempts."""
log = logging.getLogger(__name__)


class Link:
    """Opens the namespace that was asked for last. Once open it survives restarts of the daemon by itself; one that is
    refused is tried again now and then."""

    def __init__(
        self, run_dir: str, *, engine_group: str, rank: int, timeout_s: float, staging_bytes: int
    ) -> None:
        self._run_dir = os.path.abspath(run_dir)  # the engine may change its working directory later
        self._engine_group = engine_group
        self._rank = rank
        self._timeout_s = timeout_s
        self._staging_bytes = staging_bytes
        self.prepare: Callable[[Client], None] = lambda client: None
        """Called with a client before it is used; what it raises is told, and tried again."""
        self.opened: Callable[[Namespace], None] = lambda namespace: None
        """The same with a namespace."""
        self._changed = threading.Condition()  # guards all below
        self._wanted: NamespaceSpec | None = None
        self._namespace: Namespace | None = None
        self._client: Client | None = None
        self._closing = False
        self._complaint = ""
        self._thread: threading.Thread | None = None

    @property
    def promising(self) -> bool:
        """Whether it is of use to prepare something for the store: connected, or about to be for the first time."""
        client = self._client
        if self._namespace is not None:
            return client is not None and client.connected
        return self._wanted is not None and not self._complaint

    @property
    def complaint(self) -> str:
        """Why there is no store, if somebody said so."""
        return self._complaint

    def open(self, spec: NamespaceSpec) -> None:
        """From now on this one; whoever has the one before goes on with it."""
        with self._changed:
            self._wanted = spec
            self._namespace = None
            self._complaint = ""
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kv-link", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def namespace(self, spec: NamespaceSpec, timeout_s: float) -> Namespace | None:
        """That of `spec`, for threads that may wait while it is being opened for the first time; None when it is not
        there in time, the daemon is away, or another one is wanted by now."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._namespace is not None or self._wanted is not spec or self._complaint, timeout_s
            )
            return self._namespace if self._wanted is spec else None

    def ready(self, spec: NamespaceSpec) -> Namespace | None:
        """As `namespace`, without waiting."""
        with self._changed:
            return self._namespace if self._wanted is spec else None

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(2 * self._timeout_s)
        client, self._client, self._namespace = self._client, None, None
        if client is not None:
            client.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._namespace is None)
                if self._closing:
                    return
                wanted = self._wanted
            assert wanted is not None
            try:
                if self._client is None:
                    self._client = self._connected()
                opened = self._client.open(wanted)
                self.opened(opened)
            except Exception as error:
                # One of ours, or of a device, must not end this thread: nobody else would connect.
                self._complain(str(error) or repr(error), bug=not isinstance(error, StoreError))
                self._pause(wanted)
                continue
            log.info("the store is there: %r %s", opened, "; ".join(opened.notes))
            with self._changed:
                if self._wanted is wanted:
                    self._namespace, self._complaint = opened, ""
                self._changed.notify_all()

    def _connected(self) -> Client:
        client = connect(
            self._run_dir,
            engine_group=self._engine_group,
            rank=self._rank,
            timeout_s=self._timeout_s,
            staging_bytes=self._staging_bytes,
        )
        try:
            self.prepare(client)
        except BaseException:
            client.close()
            raise
        return client

    def _pause(self, wanted: NamespaceSpec) -> None:
        """Before it is tried again; not when another one is asked for meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._wanted is not wanted, AGAIN_S)

    def _complain(self, text: str, *, bug: bool) -> None:
        """Once, not every two seconds."""
        with self._changed:
            known, self._complaint = self._complaint, text
            self._changed.notify_all()
        if text != known:
            log.warning("working without the store: %s", text, exc_info=bug)
