"""The line to the daemon, as those see it who use it: calls, leases, batches and regions. An `Attachment` is one.

What uses the line is made, held and ended by the attachment, so neither's module can import the other's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from kvstore.client.call import Answers, Call, Reply
from kvstore.client.renewals import Renewals
from kvstore.v1 import descriptor_pb2, store_pb2


class Settles(Protocol):
    """Hears what the daemon says about keys that were PENDING."""

    def settle(self, push: store_pb2.ChunksSettled) -> None: ...

    def end(self) -> None:
        """No more will be said."""


class Line(Answers, Protocol):
    """See `Attachment` for what each of them does."""

    alive: bool
    renewals: Renewals

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
    ) -> Call: ...

    def notice(self, kind: str, ids: Iterable[int]) -> None: ...

    def count(self, name: str, number: int = 1) -> None: ...

    def collect(self) -> None: ...

    def forget_waiter(self, waiter: Settles) -> None: ...

    def adopt(
        self,
        fd: int,
        size_bytes: int,
        answered: Callable[[descriptor_pb2.DescriptorReply], None],
        deadline: float,
    ) -> None: ...

    def drop_region(self, number: int) -> None: ...
