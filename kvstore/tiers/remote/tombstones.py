"""What was forgotten, for every node that reads the REMOTE store: which records it must not serve.

A store counts its forgets. Each forget raises the *count* and is kept under it, with a *head* drawn for it; a record
carries the count that its writer knew (`Description.generation`). A record is refused if something that it is about was
forgotten at a higher count: so what is computed and written again after a forget is served, what was written before it
is not, and no clock is compared with another one's. A writer that knew too little only has its record refused.

Whoever serves from the store reads the count after the records, and all forgets that it does not know before it serves
any of them. A store whose count is lower than what a node has seen, or which has another head for that count, is an
older copy that was put back, or was wiped: nothing of it is served before that node has read all that it has, and told
it every forget that it knows, at a count above all that it has seen.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvstore.keys import is_tenant_mark
from kvstore.tiers.remote.records import Description
from kvstore.types import MAKER_BYTES, ChunkKey

Forgotten = tuple[bytes, ChunkKey, bytes]
"""(digest of the namespace, key, maker): a maker alone; a maker for one tenant (then the key is the tenant's mark); all
of a namespace, or one key of it."""
EVERYTHING: Forgotten = (b"", ChunkKey(b""), b"")
"""What a node has missed, and nobody knows any more: all that it has, and all records of before that count, may have
been forgotten."""
DIGEST_BYTES = 32
_NO_DIGEST, _NO_MAKER = bytes(DIGEST_BYTES), bytes(MAKER_BYTES)
_LINE = struct.Struct("<QH")


def encode(forgotten: Forgotten) -> bytes:
    digest, key, maker = forgotten
    return (digest or _NO_DIGEST) + (maker or _NO_MAKER) + key


def decode(data: bytes) -> Forgotten | None:
    """None: it is no such thing."""
    if len(data) < DIGEST_BYTES + MAKER_BYTES:
        return None
    digest, maker = data[:DIGEST_BYTES], data[DIGEST_BYTES : DIGEST_BYTES + MAKER_BYTES]
    key = ChunkKey(data[DIGEST_BYTES + MAKER_BYTES :])
    return (digest if digest != _NO_DIGEST else b""), key, (maker if maker != _NO_MAKER else b"")


def quarantines_of(d: Description) -> Iterator[Forgotten]:
    """What would be told of its makers if one was quarantined for its tenant."""
    for mark in filter(is_tenant_mark, d.makers):
        for maker in d.makers:
            yield b"", ChunkKey(mark), maker


@dataclass(slots=True)
class Tombstones:
    """All that one node knows. Guarded by whoever owns it."""

    count: int = 0
    """The highest that it has seen,"""
    head: str = ""
    """and what was drawn for it."""
    at: dict[Forgotten, int] = field(default_factory=dict)
    """At which count each was forgotten last."""
    everything: int = 0
    """The highest count at which EVERYTHING was."""

    def __repr__(self) -> str:
        return f"Tombstones({len(self.at)} up to {self.count})"

    def add(self, forgotten: Forgotten, count: int) -> None:
        self.count = max(self.count, count)
        if self.at.get(forgotten, 0) < count:
            self.at[forgotten] = count

    def refuses(self, d: Description) -> str:
        """Why a record must not be served; empty: no forget stands against it."""
        if self.everything > d.generation:
            return "what was forgotten since cannot be read any more"
        key = (d.namespace, d.key, b"")
        if self.at.get(key, 0) > d.generation:
            return "it was forgotten"
        if self.at.get((d.namespace, ChunkKey(b""), b""), 0) > d.generation:
            return "its namespace was forgotten, or is of an old epoch"
        for maker in d.makers:
            if self.at.get((b"", ChunkKey(b""), maker), 0) > d.generation:
                return "its maker was recalled"
        for quarantine in quarantines_of(d):
            if self.at.get(quarantine, 0) > d.generation:
                return "its maker is quarantined"
        return ""

    def forget_older(self, count: int) -> None:
        """No record of before that count is left anywhere: their time to live is over."""
        self.at = {forgotten: at for forgotten, at in self.at.items() if at > count}


def pack(tombstones: Tombstones) -> bytes:
    """As one object of a store that has no better way: count, then (count, length, entry) of each."""
    parts = [struct.pack("<8sQ16s", b"KVSTOMBS", tombstones.count, tombstones.head.encode())]
    for forgotten, count in sorted(tombstones.at.items(), key=lambda item: item[1]):
        entry = encode(forgotten)
        parts += (_LINE.pack(count, len(entry)), entry)
    return b"".join(parts)


def unpack(data: bytes) -> Tombstones | None:
    """None: it is no such object, or not whole."""
    if len(data) < 32 or data[:8] != b"KVSTOMBS":
        return None
    count, head = struct.unpack_from("<Q16s", data, 8)
    found = Tombstones(count, head.rstrip(b"\0").decode("ascii", "replace"))
    at = 32
    while at < len(data):
        if at + _LINE.size > len(data):
            return None
        count, length = _LINE.unpack_from(data, at)
        at += _LINE.size
        forgotten = decode(data[at : at + length])
        if forgotten is None or at + length > len(data):
            return None
        found.add(forgotten, count)
        at += length
    return found


def to_lines(tombstones: Tombstones, pending: Iterable[Forgotten], *, heeded: bool = True) -> str:
    """The journal of a node: what it has seen, and what no store knows yet. `heeded`: it has dropped EVERYTHING."""
    lines = [json.dumps({"count": tombstones.count, "head": tombstones.head})]
    if tombstones.everything:
        lines.append(json.dumps({"everything": tombstones.everything, "heeded": heeded}))
    lines += [
        json.dumps({"at": count, "entry": encode(forgotten).hex()})
        for forgotten, count in tombstones.at.items()
    ]
    lines += [json.dumps({"pending": encode(forgotten).hex()}) for forgotten in pending]
    return "\n".join(lines) + "\n"


def from_lines(text: str) -> tuple[Tombstones, list[Forgotten], bool]:
    """What does not parse is left out: a line that was cut short by a crash was not answered either. True: EVERYTHING
    was heeded, if ever it was forgotten."""
    tombstones, pending, heeded = Tombstones(), [], True
    for line in _lines(text):
        everything = line.get("everything")
        if isinstance(everything, int):
            tombstones.everything = max(tombstones.everything, everything)
            heeded = heeded and line.get("heeded") is True
        count, at = line.get("count"), line.get("at")
        if isinstance(count, int):
            tombstones.count = max(tombstones.count, count)
            tombstones.head = str(line.get("head", ""))
        for name in ("entry", "pending"):
            try:
                forgotten = decode(bytes.fromhex(str(line.get(name, ""))))
            except ValueError:
                continue
            if forgotten is None:
                continue
            if name == "pending":
                pending.append(forgotten)
            elif isinstance(at, int):
                tombstones.add(forgotten, at)
    return tombstones, pending, heeded


def _lines(text: str) -> Iterator[dict[str, object]]:
    for line in text.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found
