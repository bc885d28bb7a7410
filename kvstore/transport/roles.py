"""What each role may call over TCP. What is not in the table nobody may call there.

A caller on this machine is known by its user id and needs no role: see `descriptors.py`.
"""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    READER = "reader"
    """Looks up and reads the KV of its tenant."""
    WORKER = "worker"
    """Reads and writes the KV and the sessions of its tenant."""
    SCHEDULER = "scheduler"
    """Gives hints for its tenant, and asks what of its sessions is there. Takes no bytes."""
    OPERATOR = "operator"
    """Sees all tenants, forgets and recalls. Takes no bytes and gives none."""


EVERYBODY = frozenset(Role)
_READS = frozenset({Role.READER, Role.WORKER})
_LOOKS_UP = _READS | {Role.SCHEDULER}
_WRITES = frozenset({Role.WORKER})
_HINTS = frozenset({Role.SCHEDULER})
_OPERATES = frozenset({Role.OPERATOR})

ROLES: dict[str, frozenset[Role]] = {
    "Store/Open": EVERYBODY,
    "Store/Match": _LOOKS_UP,
    "Store/GetSession": EVERYBODY,
    "Store/Acquire": _READS,
    "Store/Renew": _READS,
    "Store/Release": _READS,
    "Store/ReportLoad": _READS,
    "Store/Reserve": _WRITES,
    "Store/Fill": _WRITES,
    "Store/Commit": _WRITES,
    "Store/Save": _WRITES,
    "Store/Abort": _WRITES,
    "Store/ReportDuplicates": _WRITES,
    "Store/ReportResident": _READS,
    "Store/UpdateSession": _WRITES,
    "Store/Truncate": _WRITES,
    "Store/Fork": _WRITES,
    "Store/Forget": _WRITES | _OPERATES,
    "Store/Touch": _READS,
    "Hints/PublishQueue": _HINTS,
    "Hints/ApplyActions": _HINTS,
    "Stats/GetStats": EVERYBODY,
    "Stats/WatchStats": EVERYBODY,
    "Stats/ListNamespaces": EVERYBODY,
    "Stats/ListSessions": EVERYBODY,
    "Stats/Explain": EVERYBODY,
    "Admin/Scrub": _OPERATES,
    "Admin/ListQuarantine": _OPERATES,
    "Admin/Recall": _OPERATES,
    "Admin/Purge": _OPERATES,
    "PromptCache/GetSchema": _LOOKS_UP,
    "PromptCache/ListSchemas": _LOOKS_UP,
    "PromptCache/PutSchema": _WRITES,
    "PromptCache/RemoveSchema": _WRITES,
    "Admin/Record": _OPERATES,
    "Fleet/Route": _LOOKS_UP,
    "Fleet/ListNodes": _OPERATES,
    "Fleet/Drain": _OPERATES,
    "Bytes/Get": _READS,
    "Bytes/Put": _WRITES,
}
"""Roles by "Service/Method". One of them is enough."""
