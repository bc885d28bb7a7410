"""The registry: who holds what, in Redis. Each node tells of itself, and reads of the others into memory.

    P:nodes                 set of names                                   what a reader begins with
    P:node:{NAME}           record of a node, ends by itself               refreshed with each heartbeat
    P:held:{NAME}           hash: page number -> page, "versions" -> all   see held.py; ends by itself
    P:order:{NAME}          what an operator wants of a node (drain)       ends by itself

P is derived from the fleet's secret. Nothing here is the truth about anything: a node makes its part anew when Redis
has lost it, has an older one, or has something else there; whoever believes too much asks a peer in vain, once. So no
write waits for another, nothing is elected or replicated, and a node without Redis serves on from its own tiers.

One thread of its own talks to Redis. Lookups touch memory alone.
"""

from __future__ import annotations

import json
import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError
from kvstore.fleet.forgets import FleetForgets
from kvstore.fleet.held import Held, Known, Where, as_hashes, decode_page, decode_versions
from kvstore.fleet.secret import TAG_BYTES, FleetSecret, KeyHasher
from kvstore.server.logs import fields
from kvstore.tiers.remote.backend import StoreProblem
from kvstore.types import ChunkKey

log = logging.getLogger(__name__)

ROUNDS_PER_TTL = 10
"""Heartbeats in the time after which a node that is silent has gone."""
NODES_MAX = 1_024
PAGES_READ_MAX = 256
"""Of other nodes, in one round: 8 MiB."""
PAGES_PER_CALL = 64
CALL_TIMEOUT_S = 1.0
FORGET_TTLS = 20
"""So many times to live after Redis was last heard, what it said of others is forgotten."""
POLICY_CHECK_S = 30.0
TOLD_AGAIN_S = 60.0
NAMES_TTL_S = 24 * 3_600
KEYS_REMEMBERED_MAX = 256
"""Namespaces whose hashers are kept."""
NO_POLICY = "noeviction"
RECORD_BYTES_MAX = 16 << 10
VERSIONS = b"versions"


@dataclass(frozen=True, slots=True)
class Node:
    """What a node says of itself."""

    name: str
    boot: bytes
    address: str
    """host:port where it serves peers; empty: it serves none."""
    draining: bool = False
    pages: int = 0
    """Counts the changes of its page table."""
    started_at: float = 0.0
    """Unix time by its own clock: for people."""
    load: Mapping[str, float] = field(default_factory=dict)
    """What routers and people look at: bytes, leases, rates."""

    def encode(self, secret: FleetSecret) -> bytes:
        body = json.dumps(
            {
                "v": 1,
                "name": self.name,
                "boot": self.boot.hex(),
                "address": self.address,
                "draining": self.draining,
                "pages": self.pages,
                "started_at": self.started_at,
                "load": dict(self.load),
            },
            separators=(",", ":"),
        ).encode()
        return secret.tag(body) + body

    @classmethod
    def decode(cls, secret: FleetSecret, data: bytes) -> Node:
        """Raises ValueError for what no node of this fleet wrote."""
        tag, body = data[:TAG_BYTES], data[TAG_BYTES:]
        if len(data) > RECORD_BYTES_MAX or not secret.is_tag(body, tag):
            raise ValueError("no node of this fleet wrote it")
        said = json.loads(body)
        if said["v"] != 1:
            raise ValueError(f"version {said['v']}")
        return cls(
            name=str(said["name"]),
            boot=bytes.fromhex(said["boot"]),
            address=str(said["address"]),
            draining=bool(said["draining"]),
            pages=int(said["pages"]),
            started_at=float(said["started_at"]),
            load={str(name): float(value) for name, value in said["load"].items()},
        )


@dataclass(frozen=True, slots=True)
class Holder:
    """A node that holds some of the keys that were asked for."""

    node: Node
    where: npt.NDArray[np.uint8]
    """A `Where` for each key."""

    @property
    def leading(self) -> int:
        """How many keys from the first on it holds without a hole."""
        missing = np.flatnonzero(self.where == Where.NOWHERE)
        return int(missing[0]) if len(missing) else len(self.where)


@dataclass(slots=True)
class _Other:
    node: Node
    known: Known = field(default_factory=Known)
    pages: int = -1
    """`Node.pages` of what is known; -1: nothing is, or not all of it."""


def check_url(url: str) -> None:
    """Raises ConfigError."""
    if not url.startswith(("redis://", "rediss://", "redis+cluster://", "rediss+cluster://", "unix://")):
        raise ConfigError(
            "must be redis://, rediss://, redis+cluster://, rediss+cluster:// or unix://",
            field="registry_url",
            value=url.partition("://")[0],
        )
    try:
        one_host(url)
    except ValueError as problem:
        raise ConfigError(str(problem), field="registry_url", value=url.partition("://")[0]) from None
    check_database(url, "registry_url")


def check_database(url: str, setting: str) -> None:
    """The client takes a database that is no number for 0, which may be somebody else's. Raises ConfigError."""
    parts = urlsplit(url)
    database = parts.path.strip("/")
    if parts.scheme != "unix" and database and not (database.isascii() and database.isdigit()):
        raise ConfigError(
            "names a database that is no number",
            field=setting,
            value=f"{parts.scheme}://.../{database}",
            remedy=f"{parts.scheme}://host:6379/0",
        )


def one_host(url: str) -> tuple[str, list[tuple[str, int]]]:
    """Of redis+cluster://user:password@host:port,host:port/ the URL with the first host alone, and the others. Raises
    ValueError."""
    scheme, _, rest = url.partition("://")
    place, slash, path = rest.partition("/")
    login, at, hosts = place.rpartition("@")
    first, *others = hosts.split(",")
    nodes = []
    for other in others:
        host, _, port = other.rpartition(":")
        if not host or not (port.isascii() and port.isdigit()):
            raise ValueError(f"{other!r} is not host:port")
        nodes.append((host, int(port)))
    if nodes and "+cluster" not in scheme:
        raise ValueError("only a cluster has several hosts")
    return f"{scheme}://{login}{at}{first}{slash}{path}", nodes


def without_password(url: str) -> str:
    """What a log may say of it: no password, and no query, which may hold one."""
    scheme, found, rest = url.partition("://")
    login, at, place = rest.rpartition("@")
    if not found or "?" in login:  # where a password with a ? or a query with an @ ends is not known
        return f"{scheme}://***" if found else url
    place, query, _ = place.partition("?")
    user = f"{login.partition(':')[0]}:***@" if at else ""
    return f"{scheme}://{user}{place}{'?***' if query else ''}"


def connect(url: str) -> Any:
    """A client of redis-py, which connects when it is first used. Raises ConfigError."""
    try:
        import redis
        import redis.cluster
    except ImportError:
        raise ConfigError(
            "needs the Redis client",
            field="registry_url",
            value="set",
            remedy="pip install 'attnstore[fleet]'",
        ) from None
    options: dict[str, Any] = {
        "socket_timeout": CALL_TIMEOUT_S,
        "socket_connect_timeout": CALL_TIMEOUT_S,
        "health_check_interval": 0,
    }
    try:
        if "+cluster" in url:
            first, others = one_host(url)
            nodes = [
                redis.cluster.ClusterNode(host, port)  # type: ignore[no-untyped-call]
                for host, port in others
            ]
            url = first.replace("+cluster", "")
            return redis.cluster.RedisCluster.from_url(url, startup_nodes=nodes, **options)
        return redis.Redis.from_url(url, **options)
    except ValueError as problem:
        raise ConfigError(str(problem), field="registry_url", value=url.partition("://")[0]) from None


class Registry:
    def __init__(
        self,
        url: str,
        secret: FleetSecret,
        node: Node,
        *,
        ttl_ms: int,
        pages_per_s: int,
        load: Callable[[], Mapping[str, float]] = dict,
        on_order: Callable[[Mapping[str, Any]], None] = lambda order: None,
        forgets: FleetForgets | None = None,
        client: Callable[[str], Any] = connect,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`load` and `on_order` are called on the registry's thread. Raises ConfigError."""
        check_url(url)
        self.secret = secret
        self.node = node
        self._url = url
        self._make_client = client
        self._client: Any = None
        self._ttl_ms = ttl_ms
        self._round_s = ttl_ms / 1000 / ROUNDS_PER_TTL
        self._pages_per_round = max(1, round(pages_per_s * self._round_s))
        self._load = load
        self._on_order = on_order
        self._forgets = forgets
        self._clock = clock
        self._held = Held(secret, node.boot)
        self._told: deque[tuple[int, int]] = deque()
        """(row, value) that the loop noted and the thread has not looked at."""
        self._draining = False
        self._pages = 0
        self._written: bytes | None = None
        self._refresh = 0
        self._policy_at = -math.inf
        self._heard_at = -math.inf
        self._said_at: dict[str, float] = {}
        self._others: dict[str, _Other] = {}
        """Replaced as a whole, never changed: other threads read it."""
        self._hashers: dict[bytes, KeyHasher] = {}
        self.state = "starting"
        """ok, away (Redis is not to be had) or refused (it would evict, or another node has our name)."""
        self.why = ""
        self.counters: dict[str, int] = dict.fromkeys(
            ("rounds", "rounds_failed", "pages_written", "pages_read", "pages_bad", "bytes_written"), 0
        )
        self._wake = threading.Event()
        if forgets is not None:
            forgets.wake = self._wake.set
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="kvstored-registry", daemon=True)

    def __repr__(self) -> str:
        return f"Registry({self.node.name}, {self.state}, {len(self._others)} others, {self._held})"

    # ------------------------------------------------------------------------------------- for the daemon's loop

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Say that this node has gone, if that takes no longer."""
        self._ended = True
        self._wake.set()
        self._thread.join(timeout_s)

    def note(self, changes: Iterable[tuple[int, int]]) -> None:
        """Chunks of this node came or went: (row, value) as `Held.set` takes them."""
        self._told.extend(changes)

    def drain(self, draining: bool = True) -> None:
        self._draining = draining
        self._wake.set()

    @property
    def draining(self) -> bool:
        return self._draining

    def hasher(self, namespace: bytes) -> KeyHasher:
        """`namespace`: digest by `FleetSecret.namespace`."""
        found = self._hashers.get(namespace)
        if found is None:
            if len(self._hashers) >= KEYS_REMEMBERED_MAX:
                self._hashers.clear()
            found = self._hashers[namespace] = self.secret.hasher(namespace)
        return found

    def others(self) -> list[Node]:
        return [other.node for other in self._others.values()]

    def known(self) -> list[tuple[Node, int]]:
        """The other nodes, and how many chunks of each are known."""
        return [(other.node, len(other.known)) for other in self._others.values()]

    def holders(self, namespace: bytes, keys: Sequence[ChunkKey]) -> list[Holder]:
        """Other nodes that hold some of these keys, as far as is known; best first: the longest unbroken beginning,
        then most of it in DRAM. No round trip."""
        others = self._others
        if not others or not keys:
            return []
        hashes = as_hashes(list(map(self.hasher(namespace), keys)))
        found = []
        for other in others.values():
            where = other.known.where(hashes)
            if where.any():
                found.append(Holder(other.node, where))
        found.sort(
            key=lambda holder: (
                -holder.leading,
                -int((holder.where == Where.DRAM).sum()),
                holder.node.draining,
                holder.node.name,
            )
        )
        return found

    def order(self, name: str, order: Mapping[str, Any], ttl_s: int = 60) -> None:
        """Ask another node to do something. Blocks, on any thread but the loop's. Raises OSError if Redis is away."""
        body = json.dumps(dict(order)).encode()
        try:
            client = self._client or self._make_client(self._url)
            client.set(self._name("order", name), self.secret.tag(name.encode() + body) + body, ex=ttl_s)
        except self._errors() as problem:
            raise OSError(str(problem)) from None

    # ------------------------------------------------------------------------------------------------- the thread

    def _name(self, what: str, node: str = "") -> str:
        return f"kvs:{self.secret.prefix}:{what}" + (f":{{{node}}}" if node else "")

    @staticmethod
    def _errors() -> tuple[type[BaseException], ...]:
        import redis.exceptions

        return (redis.RedisError, redis.exceptions.RedisClusterException, OSError, StoreProblem)

    def _run(self) -> None:
        while not self._ended:
            began = self._clock()
            self.round()
            left = self._round_s * random.uniform(0.9, 1.1) - (self._clock() - began)
            self._wake.wait(max(0.01, left))
            self._wake.clear()
        self._leave()

    def round(self) -> None:
        """One heartbeat: tell what changed, read what others told."""
        self._take_notes()
        try:
            if self._client is None:
                self._client = self._make_client(self._url)
            if self._may_use():
                if self._forgets is not None:
                    self._forgets.round(self._client)
                ours = self._look_at_own()
                if ours:
                    self._write_pages()
                    self._write_record()
                self._read_others()
                self._heard_at = self._clock()
                if ours:
                    self._become("ok", "")
            elif self._forgets is not None:
                self._forgets.postpone(self.why)
            self.counters["rounds"] += 1
        except self._errors() as problem:
            self.counters["rounds_failed"] += 1
            self._become("away", f"{type(problem).__name__}: {problem}")
            self._drop_client()
        except Exception as problem:  # whatever an answer that is none does to a client: the thread lives on
            self.counters["rounds_failed"] += 1
            self._become("away", f"{type(problem).__name__}: {problem}")
            log.warning("the registry answered what nobody understands", exc_info=True)
            self._drop_client()
        if self._forgets is not None and self.state == "away":
            self._forgets.postpone(self.why)
        if self._others and self._clock() - self._heard_at > FORGET_TTLS * self._ttl_ms / 1000:
            self._others = {}

    def _drop_client(self) -> None:
        client, self._client = self._client, None
        try:
            if client is not None:
                client.close()
        except Exception:
            log.debug("closing a connection to the registry", exc_info=True)

    def _take_notes(self) -> None:
        told = self._told
        while told:
            row, value = told.popleft()
            self._held.set(row, value)

    def _become(self, state: str, why: str) -> None:
        before, self.state, self.why = self.state, state, why
        if state == "ok":
            if before != "ok":
                log.info("the registry is there", extra=fields(was=before, node=self.node.name))
            return
        now = self._clock()
        if before == state and now - self._said_at.get(state, -math.inf) < TOLD_AGAIN_S:
            return
        self._said_at[state] = now
        log.error(
            "the registry cannot be used: this node serves on from its own tiers",
            extra=fields(state=state, why=why, node=self.node.name),
        )

    def _may_use(self) -> bool:
        """Not a Redis that would evict: what it dropped silently would look like nodes that hold nothing."""
        now = self._clock()
        if self.state in ("ok",) and now - self._policy_at < POLICY_CHECK_S:
            return True
        said = self._client.info("memory")
        shown = said.values() if said and all(isinstance(value, dict) for value in said.values()) else [said]
        policies = {str(each.get("maxmemory_policy", NO_POLICY)) for each in shown} - {NO_POLICY}
        if policies:
            self._others = {}
            self._become(
                "refused",
                f"its maxmemory-policy is {', '.join(sorted(policies))}: set it to {NO_POLICY}, or use another Redis",
            )
            return False
        self._policy_at = now
        return True

    def _look_at_own(self) -> bool:
        """Whether what stands in Redis of this node is what it wrote last, or is to be made anew. Each part is looked
        at for itself: one that is spoilt spoils no other. False: the name is another daemon's."""
        name = self.node.name
        pipe = self._client.pipeline(transaction=False)
        pipe.get(self._name("node", name))
        pipe.pexpire(self._name("held", name), 2 * self._ttl_ms)
        pipe.get(self._name("order", name))
        there, has_pages, order = pipe.execute(raise_on_error=False)
        for answer in (there, order):
            if isinstance(answer, Exception) and not self._is_refusal(answer):
                raise answer
        if self._is_others(there):
            return False
        if there != self._written or has_pages != 1:
            self._held.tell_all()  # Redis lost it, or has what we did not write last
        elif self._held.versions:
            self._refresh += 1
            self._held.tell(self._refresh % len(self._held.versions))
        if isinstance(order, bytes):
            self._obey(order)
        return True

    def _write_record(self) -> None:
        """This node is there, for the time to live."""
        node = replace(self.node, draining=self._draining, pages=self._pages, load=dict(self._load()))
        record = node.encode(self.secret)
        pipe = self._client.pipeline(transaction=False)
        pipe.set(self._name("node", node.name), record, px=self._ttl_ms)
        pipe.sadd(self._name("nodes"), node.name)
        pipe.expire(self._name("nodes"), NAMES_TTL_S)
        answers = pipe.execute(raise_on_error=False)
        if isinstance(answers[0], Exception):
            raise answers[0]
        if isinstance(answers[1], Exception):
            self._client.delete(self._name("nodes"))  # something else is there: each node adds itself again
            self._client.sadd(self._name("nodes"), node.name)
        self.counters["bytes_written"] += len(record)
        self._written = record
        self.node = node

    @staticmethod
    def _is_refusal(answer: Exception) -> bool:
        """Whether Redis answered, so that only this command is in question (WRONGTYPE, say)."""
        import redis

        return isinstance(answer, redis.ResponseError) and not isinstance(
            answer, (redis.ConnectionError, redis.TimeoutError)
        )

    def _is_others(self, there: object) -> bool:
        """Whether another daemon that began later goes by our name. Of the two that is the one which operators mean."""
        if not isinstance(there, bytes) or there == self._written:
            return False
        try:
            other = Node.decode(self.secret, there)
        except (ValueError, KeyError, TypeError):
            return False
        if other.boot == self.node.boot or other.started_at <= self.node.started_at:
            return False
        self._become("refused", f"another daemon that began later is named {self.node.name}: set node_name")
        return True

    def _obey(self, order: bytes) -> None:
        tag, body = order[:TAG_BYTES], order[TAG_BYTES:]
        if not self.secret.is_tag(self.node.name.encode() + body, tag):
            log.warning("an order in the registry that no node of this fleet gave is not followed")
            return
        self._client.delete(self._name("order", self.node.name))
        try:
            self._on_order(json.loads(body))
        except ValueError as problem:
            log.warning("an order in the registry is not understood", extra=fields(why=str(problem)))

    def _write_pages(self) -> None:
        """So many in a round at most; the rest comes with the next."""
        pages = self._held.take(self._pages_per_round)
        if not pages:
            return
        name = self._name("held", self.node.name)
        values: dict[bytes, bytes] = {str(number).encode(): page for number, page in pages.items()}
        values[VERSIONS] = self._held.encoded_versions()
        try:
            pipe = self._client.pipeline(transaction=False)
            pipe.hset(name, mapping=values)
            pipe.pexpire(name, 2 * self._ttl_ms)
            answers = pipe.execute(raise_on_error=False)
            if isinstance(answers[0], Exception):
                if not self._is_refusal(answers[0]):
                    raise answers[0]
                self._client.delete(name)  # something else is there: it is made anew
                self._held.tell_all()
                return
        except BaseException:
            self._held.tell_all()
            raise
        self._pages += 1
        self.counters["pages_written"] += len(pages)
        self.counters["bytes_written"] += sum(map(len, values.values()))

    def _leave(self) -> None:
        """At the end: others need not wait until the record ends by itself."""
        try:
            if self._client is not None and self.state == "ok":
                self._client.delete(self._name("node", self.node.name))
                self._client.delete(self._name("held", self.node.name))
                self._client.srem(self._name("nodes"), self.node.name)
        except self._errors() as problem:
            log.debug("the registry was not told of the end", extra=fields(why=str(problem)))
        self._drop_client()

    # -------------------------------------------------------------------------------------------------- the others

    def _read_others(self) -> None:
        names = sorted(
            name.decode("utf-8", "replace") for name in self._client.smembers(self._name("nodes"))
        )[:NODES_MAX]
        names = [name for name in names if name != self.node.name]
        if not names:
            self._others = {}
            return
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.get(self._name("node", name))
        others: dict[str, _Other] = {}
        before = self._others
        for name, answer in zip(names, pipe.execute(raise_on_error=False), strict=True):
            if answer is None:
                if name not in before:  # it was gone in the round before, too
                    self._client.srem(self._name("nodes"), name)
                continue
            if not isinstance(answer, bytes):
                continue
            try:
                node = Node.decode(self.secret, answer)
            except (ValueError, KeyError, TypeError):
                continue
            if node.name != name:
                continue
            earlier = before.get(name)
            if earlier is not None and earlier.node.boot == node.boot:
                others[name] = _Other(node, earlier.known, earlier.pages)
            else:
                others[name] = _Other(node)
        self._others = others
        left = PAGES_READ_MAX
        turn = list(others.values())
        random.shuffle(turn)  # one that changes much must not starve the rest
        for other in turn:
            if other.pages != other.node.pages and left > 0:
                left -= self._read_pages(other, left)

    def _read_pages(self, other: _Other, pages_max: int) -> int:
        """What changed in another node's table since it was last read. How many pages that were."""
        name = self._name("held", other.node.name)
        try:
            answer = self._client.hget(name, VERSIONS)
        except self._errors() as problem:
            if isinstance(problem, Exception) and self._is_refusal(problem):
                return 0
            raise
        if answer is None:
            return 0
        try:
            versions = decode_versions(self.secret, other.node.boot, answer)
        except ValueError:
            self.counters["pages_bad"] += 1
            return 0
        known = other.known.versions
        wanted = [
            number for number, version in enumerate(versions) if version and known.get(number) != version
        ]
        gone = [number for number in known if number >= len(versions)]
        asked = wanted[:pages_max]
        found: dict[int, tuple[int, npt.NDArray[np.uint64]]] = {}
        whole = len(asked) == len(wanted)
        for start in range(0, len(asked), PAGES_PER_CALL):
            part = asked[start : start + PAGES_PER_CALL]
            for number, data in zip(part, self._client.hmget(name, [str(n) for n in part]), strict=True):
                try:
                    if data is None:
                        raise ValueError("it is missing")
                    found[number] = decode_page(self.secret, other.node.boot, number, data)
                except ValueError:
                    self.counters["pages_bad"] += 1
                    whole = False
        if found or gone:
            other.known.replace(found, gone)
        if whole:
            other.pages = other.node.pages
        self.counters["pages_read"] += len(found)
        return len(asked)
