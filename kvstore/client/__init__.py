"""The client library: what an engine's process uses of the store. See `connect` and `connect_async`.

    with connect("/run/kvstored") as client:
        space = client.open(spec)
        keys = space.keys(tokens)
        with space.read(keys) as lease:
            loaded = [lease.copy_to(n, kv[n]) for n in range(lease.hits)]   # False: recompute that chunk
        with space.write(keys[lease.hits:], parent=keys[lease.hits - 1]) as batch:
            for n in batch.granted:
                batch.buffer(n)[:] = ...
            batch.commit()

Light on purpose: grpcio, protobuf, numpy, xxhash. A lost, late or refusing daemon is data in the engine's path (a
miss, a dropped save), never an exception; set-up and session calls raise `kvstore.errors.StoreError`.
"""

from kvstore.answers import ActionsApplied, Backlog, Matched, Peeked, QueueAccepted, SessionInfo
from kvstore.client.aio import (
    AsyncClient,
    AsyncNamespace,
    AsyncReadLease,
    AsyncWriteBatch,
    connect_async,
)
from kvstore.client.batch import CommitOutcome, PutOutcome, WriteBatch
from kvstore.client.lease import ReadLease
from kvstore.client.namespace import Forgotten, Namespace
from kvstore.client.region import Region
from kvstore.client.sync import Client, connect
from kvstore.types import (
    ActionKind,
    CommitResult,
    GrantResult,
    Hint,
    HintAction,
    HintResult,
    Outcome,
    Reason,
    SessionEntry,
    Wait,
)

__all__ = [
    "ActionKind",
    "ActionsApplied",
    "AsyncClient",
    "AsyncNamespace",
    "AsyncReadLease",
    "AsyncWriteBatch",
    "Backlog",
    "Client",
    "CommitOutcome",
    "CommitResult",
    "Forgotten",
    "GrantResult",
    "Hint",
    "HintAction",
    "HintResult",
    "Matched",
    "Namespace",
    "Outcome",
    "Peeked",
    "PutOutcome",
    "QueueAccepted",
    "ReadLease",
    "Reason",
    "Region",
    "SessionEntry",
    "SessionInfo",
    "Wait",
    "WriteBatch",
    "connect",
    "connect_async",
]
