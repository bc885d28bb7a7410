"""The audit log: who changed what others see, from where, and how it ended.

Lines of the logger `kvstore.audit` are never held back as other repeated lines are. Forgetting is also what engines do
all day: its lines have a logger of their own, whose repeats are counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from kvstore.core import events
from kvstore.errors import StoreError
from kvstore.server.logs import AUDIT, fields
from kvstore.types import WorkerId
from kvstore.v1 import admin_pb2

audit = logging.getLogger(AUDIT)
forgotten = logging.getLogger(f"{AUDIT}.forget")

Who = Callable[[WorkerId], Mapping[str, object]]
"""Worker -> fields that say who it is: "identity" and "peer" over TCP, "uid" and "pid" on this machine."""

Naming = Callable[[Any], dict[str, object] | None]
NAMED: dict[type[Any], Naming] = {
    events.Forget: lambda event: {
        "call": "Store/Forget",
        "namespace": event.namespace,
        "session": event.session.hex(),
        "keys": len(event.keys),
    },
    events.Scrub: lambda event: (
        {"call": "Admin/Scrub", "bytes_per_s": event.bytes_per_s} if event.start else None
    ),
    events.ListQuarantine: lambda event: {"call": "Admin/ListQuarantine"} if event.retry else None,
    events.Recall: lambda event: {
        "call": "Admin/Recall",
        "maker": event.maker.hex(),
        "age_ms_max": event.age_ms_max,
        "dry_run": event.dry_run,
    },
    events.PurgeTenant: lambda event: {
        "call": "Admin/Purge",
        "tenant": event.tenant,
        "dry_run": event.dry_run,
    },
    admin_pb2.RecordRequest: lambda request: (
        {"call": "Admin/Record", "path": request.path, "stop": request.stop}
        if request.path or request.stop
        else None
    ),
}
"""By the kind of event, or of request where no event is made of it: what of it is written down; None: it only asks."""


def ended(event: Any, who: Mapping[str, object], answer: object) -> None:
    """A request was answered; all that are not in NAMED are passed over."""
    naming = NAMED.get(type(event))
    named = naming(event) if naming is not None else None
    if named is None:
        return
    outcome = str(answer) if isinstance(answer, StoreError) else "done"
    line = forgotten if isinstance(event, events.Forget) else audit
    line.info("an operator's call", extra=fields(**named, outcome=outcome, **who))


def refused(call: str, who: Mapping[str, object], why: StoreError) -> None:
    """Somebody who is known asked for what its roles do not allow."""
    audit.warning("a call was refused", extra=fields(call=call, outcome=str(why), **who))
