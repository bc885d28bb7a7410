"""Files in the store: `kvctl put` and `kvctl get`.

A file is cut into chunks of one shard each, in a namespace of its own: the first begins with the file's length as a
little-endian u64, the last is filled up with zeros. Its name is a digest of its bytes.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Iterator, Sequence

from kvstore.client import Client, Forgotten, Namespace, ReadLease, WriteBatch
from kvstore.errors import BadRequest, Exhausted, NotFound, StoreError, Unavailable
from kvstore.keys import ROOT, exact_key
from kvstore.layout import TOOLS_LAYOUT, GroupSpec, NamespaceSpec
from kvstore.types import KEYS_PER_REQUEST_MAX, ChunkKey, GrantResult, Outcome, Reason

PIECE_BYTES = 256 << 10
PIECES_MAX = KEYS_PER_REQUEST_MAX
BATCH = 16
"""Pieces that are saved or loaded together."""
LENGTH = struct.Struct("<Q")
NAME_BYTES = 16
GRANT_PATIENCE_S = 5.0
GRANT_POLL_S = 0.05
PATIENCE_S = 30.0
"""For the next piece of a file that is on SSD, unless --wait says otherwise."""
WAIT_MAX_S = 5.0
"""For one answer of the daemon about it."""
POLL_S = 0.05
COMING = frozenset(
    (
        Reason.ON_SSD,
        Reason.SLOW,
        Reason.BEING_SAVED,
        Reason.BEING_MOVED,
        Reason.BEYOND_MISS,
        Reason.QUOTA,
        Reason.UNAVAILABLE,
    )
)
"""Why a key may be no hit now, though its bytes are there, or on their way."""
NO_ROOM = (
    "see kvctl stats: is the arena pinned or reserved by others, or are there fewer segments than models? "
    "Raise dram_bytes, or lower segment_bytes"
)

SPEC = NamespaceSpec(
    model="kvctl",
    weights_digest=b"kvctl.objects.v1",
    layout_fingerprint=TOOLS_LAYOUT,
    chunk_tokens=1,
    groups=(GroupSpec("file", shard_bytes=PIECE_BYTES, position_rule="none"),),
)


def put(client: Client, data: bytes) -> bytes:
    """Store a file; returns its name. Raises StoreError when it does not fit now."""
    body = memoryview(LENGTH.pack(len(data)) + data)
    count = -(-len(body) // PIECE_BYTES)
    if count > PIECES_MAX:
        raise BadRequest(f"a file has at most {PIECES_MAX * PIECE_BYTES - LENGTH.size} bytes", field="FILE")
    name = hashlib.blake2b(data, digest_size=NAME_BYTES).digest()
    namespace = client.open(SPEC)
    keys = keys_of(namespace, name, count)
    for start in range(0, count, BATCH):
        batch_keys = keys[start : start + BATCH]
        with granted(namespace, batch_keys, keys[start - 1] if start else ROOT) as batch:
            for index, result in enumerate(batch.results):
                if result is GrantResult.GRANTED:
                    piece = body[(start + index) * PIECE_BYTES :][:PIECE_BYTES]  # a view, no copy of the rest
                    buffer = batch.buffer(index)
                    buffer[: len(piece)] = piece
                    buffer[len(piece) :] = 0
                elif result is GrantResult.UNAVAILABLE:
                    raise Unavailable("the daemon is away, or did not answer in time")
                elif result is not GrantResult.ALREADY:
                    raise Exhausted(
                        f"the daemon answered {result.name} for piece {start + index} of {count}",
                        remedy=NO_ROOM,
                    )
            outcome = batch.commit()
            if outcome.error is not None:
                raise outcome.error
    _check_it_stayed(namespace, keys, len(data))
    return name


def _check_it_stayed(namespace: Namespace, keys: Sequence[ChunkKey], size: int) -> None:
    """A file larger than the store pushes its own pieces out, and its name would be of no use."""
    gone = sum(reason is Reason.EVICTED for reason in namespace.match(keys).reasons)
    if gone:
        raise Exhausted(
            f"{gone:,} of its {len(keys):,} pieces were evicted before all were saved: the store is too small",
            field="FILE",
            value=f"{size:,} bytes",
            remedy="raise dram_bytes, or give the daemon an ssd_dir",
        )


def granted(namespace: Namespace, keys: Sequence[ChunkKey], parent: ChunkKey = ROOT) -> WriteBatch:
    """As `Namespace.write`. FULL may mean that a segment is on its way to this namespace: it is asked for again, for
    GRANT_PATIENCE_S."""
    deadline = time.monotonic() + GRANT_PATIENCE_S
    while True:
        batch = namespace.write(keys, parent=parent)
        if GrantResult.FULL not in batch.results or time.monotonic() > deadline:
            return batch
        batch.abort()
        time.sleep(GRANT_POLL_S)


def get(client: Client, name: bytes, patience_s: float = PATIENCE_S) -> bytes:
    """A file by its name. A piece that is on SSD is waited for, `patience_s` since the last one came. Raises NotFound
    when any piece of it is gone, Unavailable when one is not lost but did not come in time."""
    namespace = client.open(SPEC)
    first = next(_load(namespace, name, keys_of(namespace, name, 1), patience_s))
    (length,) = LENGTH.unpack(first[: LENGTH.size])
    count = -(-(LENGTH.size + length) // PIECE_BYTES)
    body = b"".join((first, *_load(namespace, name, keys_of(namespace, name, count)[1:], patience_s)))
    data = body[LENGTH.size : LENGTH.size + length]
    if hashlib.blake2b(data, digest_size=NAME_BYTES).digest() != name:
        raise StoreError(
            "these are not the bytes that were put", field="KEY", value=name, remedy="report this"
        )
    return data


def forget(client: Client, name: bytes) -> Forgotten:
    """Drop a file; returns how many pieces of it were there."""
    namespace = client.open(SPEC)
    return namespace.forget(keys=keys_of(namespace, name, PIECES_MAX))


def keys_of(namespace: Namespace, name: bytes, count: int) -> list[ChunkKey]:
    if len(name) != NAME_BYTES:
        raise BadRequest(
            f"a key of put has {NAME_BYTES} bytes",
            field="KEY",
            value=name,
            remedy="give the key as kvctl put printed it",
        )
    keys: list[ChunkKey] = []
    for number in range(count):
        keys.append(exact_key(namespace.salt, keys[-1] if keys else ROOT, [number], (name,)))
    return keys


def _load(namespace: Namespace, name: bytes, keys: list[ChunkKey], patience_s: float) -> Iterator[bytes]:
    for start in range(0, len(keys), BATCH):
        yield from _load_batch(namespace, name, keys[start : start + BATCH], patience_s)


def _load_batch(
    namespace: Namespace, name: bytes, keys: Sequence[ChunkKey], patience_s: float
) -> Iterator[bytes]:
    """Each piece is copied as soon as it is in DRAM, so that a batch need not fit there at once."""
    pieces: dict[int, bytes] = {}
    deadline = time.monotonic() + patience_s
    while len(pieces) < len(keys):
        left = [number for number in range(len(keys)) if number not in pieces]
        wait_s = min(max(deadline - time.monotonic(), POLL_S), WAIT_MAX_S)
        with namespace.read(
            [keys[number] for number in left], wait_ms=int(1000 * wait_s), any_order=True, verify=1.0
        ) as lease:
            known = len(pieces)
            for index, number in enumerate(left):
                piece = bytearray(PIECE_BYTES)
                if lease.outcomes[index] is Outcome.HIT and lease.copy_to(index, piece):
                    pieces[number] = bytes(piece)
            reasons = [
                reason
                for number, reason in zip(left, lease.reasons, strict=True)
                if number not in pieces and reason is not Reason.NONE
            ]
            if gone := [reason for reason in reasons if reason not in COMING]:
                raise NotFound(
                    f"a piece of it is not there: {gone[0].name}",
                    field="KEY",
                    value=name,
                    remedy="put the file again",
                )
            if len(pieces) > known:
                deadline = time.monotonic() + patience_s
            elif time.monotonic() >= deadline or not namespace.client.connected:
                why = reasons[0].name if reasons else "its slot was given away"
                raise Unavailable(
                    f"a piece of it is stored, but was not to be had within {patience_s:g} s: {why}",
                    field="KEY",
                    value=name,
                    remedy="try again, with a longer --wait; see kvctl doctor",
                )
            elif not lease.settled():
                time.sleep(POLL_S)  # the daemon does not say when it will be there
    yield from (pieces[number] for number in range(len(keys)))


def settled_read(namespace: Namespace, keys: Sequence[ChunkKey], patience_s: float = PATIENCE_S) -> ReadLease:
    """As `Namespace.read`, every load verified, once all of `keys` are in DRAM; or as they are after `patience_s`, or
    when one of them is gone."""
    deadline = time.monotonic() + patience_s
    while True:
        wait_s = min(max(deadline - time.monotonic(), POLL_S), WAIT_MAX_S)
        lease = namespace.read(keys, wait_ms=int(1000 * wait_s), verify=1.0)
        coming = all(reason in COMING for reason in lease.reasons if reason is not Reason.NONE)
        if lease.hits == len(keys) or not coming or time.monotonic() >= deadline:
            return lease
        with lease:
            if not lease.settled():
                time.sleep(POLL_S)
