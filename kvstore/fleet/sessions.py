"""What nodes tell each other of their sessions, in the registry's Redis: the edge of `core/remote/sessions.py`.

    kvs:P:session:T:{ID}    tag | count | head | node, version, keys, counts of tokens

ID is a keyed hash of the namespace's digest and the session's name, and T of the tenant, so none of them is shown. The
tag is made with the fleet's secret over the name and all that follows, so nobody else writes one and none stands for
another session. `head` tells each manifest that was told from every other: a hash of node, boot and version. A script
replaces one only for whoever has seen it (`SHARE`). No clock is compared: Redis ends what nobody tells again within the
time to live.

One thread of its own talks to Redis, with a connection of its own: neither heartbeats nor forgets wait for sessions.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.core import events as ev
from kvstore.fleet.secret import TAG_BYTES, FleetSecret
from kvstore.server.logs import fields
from kvstore.types import KEY_BYTES_MAX, ChunkKey, OpId

log = logging.getLogger(__name__)

HEAD_BYTES = 16
COUNT_DIGITS = 16
COUNT_MAX = 10**15
"""A store that says more is not believed: Lua's numbers end at 2^53."""
RECORD_BYTES_MAX = 256 << 10
_FIXED = struct.Struct("<BHQI")
"""Version of the format, bytes of the node's name, version of the session, entries."""
_ENTRY = struct.Struct("<IB")
FORMAT = 1
NAMES_PER_SCAN = 1_000
Effect = ev.ShareSessions | ev.LookUpSessions | ev.ForgetSessions
Answer = ev.SessionsShared | ev.SessionsLookedUp | ev.PurgedBeyond

SHARE = """
local there = redis.pcall('GET', KEYS[1])
if type(there) == 'table' then redis.call('DEL', KEYS[1]); there = false end
if there and there ~= ARGV[5] then
  local first = tonumber(ARGV[6])
  local count = tonumber(string.sub(there, first, first + 15))
  local head = string.sub(there, first + 16, first + 31)
  local same = head == ARGV[1] and count == tonumber(ARGV[2])
  if not same and not (count and count < tonumber(ARGV[2])) then return there end
end
if ARGV[3] == '' then redis.call('DEL', KEYS[1]) else redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4]) end
return false
"""
"""ARGV: the head and the count that the writer has seen; the new record (empty: none), for how many ms; a record that
no node wrote, which does not count; where counts begin. Returns what is there, if it is something that the writer has
not seen: nothing was changed then. A count below the one that was seen is of an older copy of the store."""


class FleetSessions:
    def __init__(
        self,
        url: str,
        secret: FleetSecret,
        node: str,
        boot: bytes,
        *,
        ttl_s: int,
        connect: Callable[[str], Any],
        done: Callable[[Answer], None],
        refused: Callable[[], str] = str,
    ) -> None:
        """`done` is called on the thread of its own; `refused`: why the registry must not be used, or nothing."""
        self._url = url
        self._secret = secret
        self._node = node
        self._boot = boot
        self._ttl_ms = 1_000 * ttl_s
        self._connect = connect
        self._done = done
        self._refused = refused
        self._client: Any = None
        self._unforgotten: dict[bytes, list[OpId]] = {}
        """Tenants (`keys.tenant_mark`) whose sessions are still to be removed."""
        self._effects: queue.Queue[Effect | None] = queue.Queue()
        """The core has at most `OPS_MAX` of each kind under way."""
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="kvstored-sessions", daemon=True)

    def __repr__(self) -> str:
        return f"FleetSessions({self._node}, {self._effects.qsize()} to do)"

    def start(self) -> None:
        self._thread.start()

    def submit(self, effect: Effect) -> None:
        """From any thread; never blocks."""
        self._effects.put(effect)

    def close(self, timeout_s: float) -> None:
        self._ended = True
        self._effects.put(None)
        self._thread.join(timeout_s)

    # ------------------------------------------------------------------------------------------------------ records

    def _names_of_tenant(self, mark: bytes) -> str:
        return f"kvs:{self._secret.prefix}:session:{self._secret.tag(b'tenant' + mark).hex()[:16]}"

    def name_of(self, digest: bytes, mark: bytes, session: bytes) -> str:
        made = hashlib.blake2b(session, key=digest, digest_size=32, person=b"kvs.fleet.sess").digest()
        return f"{self._names_of_tenant(mark)}:{{{self._secret.tag(b'session' + made).hex()}}}"

    def head_of(self, version: int) -> bytes:
        said = f"{self._node}\0{self._boot.hex()}\0{version}".encode()
        return hashlib.blake2b(said, digest_size=HEAD_BYTES, person=b"kvs.fleet.head").digest()

    def encode(self, name: str, told: ev.SessionTold) -> bytes:
        node = self._node.encode()
        parts = [
            f"{told.seen_count + 1:0{COUNT_DIGITS}d}".encode(),
            self.head_of(told.version),
            _FIXED.pack(FORMAT, len(node), told.version, len(told.keys)),
            node,
        ]
        for key, count in zip(told.keys, told.token_counts, strict=True):
            parts += (_ENTRY.pack(count, len(key)), key)
        body = b"".join(parts)
        return self._secret.tag(name.encode() + body) + body

    def decode(self, name: str, record: bytes) -> ev.SharedManifest:
        """Raises ValueError for what no node of this fleet wrote under this name."""
        tag, body = record[:TAG_BYTES], record[TAG_BYTES:]
        if len(record) > RECORD_BYTES_MAX or not self._secret.is_tag(name.encode() + body, tag):
            raise ValueError("no node of this fleet wrote it")
        count, head = int(body[:COUNT_DIGITS]), body[COUNT_DIGITS : COUNT_DIGITS + HEAD_BYTES]
        at = COUNT_DIGITS + HEAD_BYTES
        try:
            version_of_format, name_bytes, version, entries = _FIXED.unpack_from(body, at)
            at += _FIXED.size
            node = body[at : at + name_bytes].decode()
            at += name_bytes
            keys: list[ChunkKey] = []
            counts: list[int] = []
            for _ in range(entries):
                tokens, length = _ENTRY.unpack_from(body, at)
                at += _ENTRY.size
                keys.append(ChunkKey(body[at : at + length]))
                counts.append(tokens)
                at += length
        except struct.error as problem:
            raise ValueError(f"it is cut short: {problem}") from None
        if version_of_format != FORMAT or at != len(body) or not 0 < count <= COUNT_MAX:
            raise ValueError("another version of the format wrote it")
        if not all(0 < len(key) <= KEY_BYTES_MAX for key in keys):
            raise ValueError("a key has an impossible length")
        ours = head == self.head_of(version) and node == self._node
        return ev.SharedManifest(head, count, node, version, tuple(keys), tuple(counts), ours)

    # --------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while True:
            effect = self._effects.get()
            if effect is None or self._ended:
                return
            try:
                answer = self._perform(effect)
            except (
                Exception
            ) as problem:  # whatever an answer that is none does to a client: the thread lives on
                self._drop_client()
                answer = self._failed(effect, f"{type(problem).__name__}: {problem}")
            if answer is not None:
                self._done(answer)

    def _perform(self, effect: Effect) -> Answer | None:
        if isinstance(effect, ev.ForgetSessions):
            self._unforgotten.setdefault(effect.mark, []).append(effect.op)
        if why := self._refused():
            return self._failed(effect, why)
        if self._client is None:
            self._client = self._connect(self._url)
        for mark in list(self._unforgotten):  # before anything is told anew
            self._forget(mark)
            for op in self._unforgotten.pop(mark):
                self._done(ev.PurgedBeyond(op))
        if isinstance(effect, ev.ForgetSessions):
            return None
        if isinstance(effect, ev.ShareSessions):
            return ev.SessionsShared(effect.op, tuple(map(self._share, effect.sessions)))
        names = [self.name_of(*place) for place in effect.sessions]
        return ev.SessionsLookedUp(effect.op, tuple(self._read(names)))

    @staticmethod
    def _failed(effect: Effect, why: str) -> Answer | None:
        if isinstance(effect, ev.ForgetSessions):
            log.error(
                "what was told of a tenant's sessions is not removed before the registry is back",
                extra=fields(why=why),
            )
            return None
        if isinstance(effect, ev.ShareSessions):
            return ev.SessionsShared(effect.op, failed=why)
        return ev.SessionsLookedUp(effect.op, failed=why)

    def _drop_client(self) -> None:
        client, self._client = self._client, None
        try:
            if client is not None:
                client.close()
        except Exception:
            log.debug("closing a connection to the registry", exc_info=True)

    def _share(self, told: ev.SessionTold) -> ev.ToldResult:
        name = self.name_of(told.digest, told.mark, told.session)
        record = b"" if told.ends else self.encode(name, told)
        spoilt = b"?"
        for _ in range(2):
            there = self._client.eval(
                SHARE,
                *(1, name, told.seen, told.seen_count, record, self._ttl_ms, spoilt, TAG_BYTES + 1),
            )
            if there is None:
                return ev.ToldResult(True, self.decode(name, record) if record else None)
            try:
                return ev.ToldResult(False, self.decode(name, bytes(there)))
            except ValueError as problem:
                log.warning(
                    "the manifest of a session that no node of this fleet told is replaced",
                    extra=fields(name=name, why=str(problem)),
                )
                spoilt = bytes(there)
        raise OSError(f"somebody else writes what nobody can read: {name}")

    def _forget(self, mark: bytes) -> None:
        """All of a tenant, whoever told it."""
        for name in self._client.scan_iter(match=f"{self._names_of_tenant(mark)}:*", count=NAMES_PER_SCAN):
            self._client.unlink(name)

    def _read(self, names: Sequence[str]) -> list[ev.SharedManifest | None]:
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.get(name)
        found: list[ev.SharedManifest | None] = []
        for name, answer in zip(names, pipe.execute(raise_on_error=False), strict=True):
            if isinstance(answer, Exception) and not _is_refusal(answer):
                raise answer
            try:
                found.append(self.decode(name, answer) if isinstance(answer, bytes) else None)
            except ValueError:
                found.append(None)
        return found


def _is_refusal(answer: Exception) -> bool:
    """Whether Redis answered, and something else stands under this name."""
    import redis

    return isinstance(answer, redis.ResponseError) and not isinstance(
        answer, (redis.ConnectionError, redis.TimeoutError)
    )
