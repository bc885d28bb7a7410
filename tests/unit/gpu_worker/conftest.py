"""A store in memory that speaks the client's language, with faults to order, and tiny models that answer something."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from transformers import DynamicCache, LlamaForCausalLM

from kvstore.answers import NO_BACKLOG, Backlog
from kvstore.core.events import Matched, SessionEntry, SessionInfo
from kvstore.core.namespaces import chunk_salt
from kvstore.errors import BadRequest, Conflict, DeadlineExceeded, Precondition, StoreError, Unavailable
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.identity import Identity, inert
from kvstore.keys import ROOT, exact_chain, exact_key
from kvstore.layout import NamespaceSpec
from kvstore.types import KEYS_PER_REQUEST_MAX, ChunkKey, GrantResult, Outcome, Protection, Reason

from ...small_models import tiny_llama as tiny_llama

# A test computes little: more threads would only wait for one another.
torch.set_num_threads(1)


@dataclass
class FakeStore:
    """What a daemon would hold. Faults are switched on by setting the attributes."""

    chunks: dict[tuple[bytes, ChunkKey], np.ndarray] = field(default_factory=dict)
    sessions: dict[tuple[bytes, str], SessionInfo] = field(default_factory=dict)
    derived: dict[tuple[bytes, ChunkKey], bool] = field(default_factory=dict)
    """Of every key that was reserved."""
    away: bool = False
    room: int | None = None
    """Chunks that may still be granted; None: any number."""
    commits_fail: bool = False
    commits_unheard: bool = False
    """They are done, and the answer is lost."""
    on_ssd: set[ChunkKey] = field(default_factory=set)
    """Keys whose chunks have to be promoted before they can be read."""
    promotes: bool = True
    promoted: list[ChunkKey] = field(default_factory=list)
    """Keys that somebody awaited from SSD."""
    backlog: Backlog = NO_BACKLOG
    busy: set[ChunkKey] = field(default_factory=set)
    keys_max: int = KEYS_PER_REQUEST_MAX
    """More in one request are refused."""
    on_copy: Callable[[int], bool] = lambda number: True
    """Called with the number of the lease's copy_many call; False voids the lease, as would a changed generation."""
    views: dict[int, tuple[np.ndarray, FakeLease, int]] | None = None
    """What devices may still copy by themselves, and of which lease and layer it is. None: `on_copy` is called when
    they are told to, and not when they do."""
    on_intact: Callable[[], bool] = lambda: True
    """Whether a lease's slots still hold what was granted, when a device has read them by itself."""
    protection: Protection = Protection.GROUP
    on_read: Callable[[], None] = lambda: None
    on_write: Callable[[], None] = lambda: None
    leases: int = 0
    """Open ones."""
    closed: int = 0
    reads: list[list[ChunkKey]] = field(default_factory=list)
    makers: set[bytes] = field(default_factory=set)
    found_wrong: list[tuple[list[ChunkKey], bool]] = field(default_factory=list)
    resident: dict[bytes, list[ChunkKey]] = field(default_factory=dict)
    """By namespace, what was reported last."""
    needed: list[ChunkKey] = field(default_factory=list)
    """By queued jobs, soonest first."""
    on_report: Callable[[], None] = lambda: None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def connect(self) -> FakeClient:
        if self.away:
            raise Unavailable("no daemon")
        return FakeClient(self)

    def copied_by_device(self, source: np.ndarray) -> None:
        """What `on_copy` says of it shows at the end, when the lease is asked."""
        assert self.views is not None
        _, lease, number = self.views.pop(id(source), (None, None, 0))
        if lease is not None:
            try:
                lease.whole &= self.on_copy(number)
            except Exception:
                lease.whole = False

    def forget(self, *wanted: ChunkKey) -> None:
        self.chunks = {name: shard for name, shard in self.chunks.items() if name[1] not in wanted}


@dataclass
class FakeClient:
    """Each chunk is a segment of its own, mapped when it is first read."""

    store: FakeStore
    registrar: Any = None
    mapped: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def protection(self) -> Protection:
        return self.store.protection

    def register_with(self, registrar: Any) -> None:
        assert not self.mapped, "nobody has read yet"
        self.registrar = registrar

    def map(self, shard: np.ndarray) -> bool:
        """False: it cannot be read."""
        with self.store.lock:
            if shard.ctypes.data in self.mapped:
                return True
            shard.flags.writeable = self.protection is Protection.GROUP
            try:
                if self.registrar is not None:
                    self.registrar.mapped(len(self.mapped), shard)
            except OSError:
                return False
            self.mapped[shard.ctypes.data] = shard
            return True

    def open(self, spec: NamespaceSpec, *, timeout_s: float | None = None) -> FakeNamespace:
        spec.validate()
        salt = chunk_salt(spec.digest("default"), spec.weights_epoch)
        return FakeNamespace(self.store, spec, salt, self)

    def close(self) -> None:
        self.store.closed += 1
        if self.registrar is not None:
            for address, shard in self.mapped.items():
                self.registrar.last_view_gone(address, lambda shard=shard: None)


@dataclass
class FakeNamespace:
    store: FakeStore
    spec: NamespaceSpec
    salt: bytes
    client: FakeClient
    notes: tuple[str, ...] = ()

    def map_segments(self, *, shards: Sequence[int] = (), timeout_s: float | None = None) -> int:
        assert tuple(shards) == (0,)
        mine = [shard for (salt, _), shard in self.store.chunks.items() if salt == self.salt]
        return sum(map(self.client.map, mine))

    def keys(self, tokens: Sequence[int], parent: ChunkKey = ROOT) -> list[ChunkKey]:
        return exact_chain(self.salt, tokens, self.spec.chunk_tokens, parent)

    def tail_key(self, tokens: Sequence[int], parent: ChunkKey) -> ChunkKey:
        assert len(tokens) < self.spec.chunk_tokens
        return exact_key(self.salt, parent, tokens)

    def check_count(self, wanted: Sequence[object]) -> None:
        if len(wanted) > self.store.keys_max:
            raise BadRequest(f"a request has at most {self.store.keys_max} keys")

    def has(self, key: ChunkKey) -> bool:
        return (self.salt, key) in self.store.chunks

    def forget(
        self, name: str | None = None, *, keys: Sequence[ChunkKey] = (), timeout_s: float | None = None
    ) -> int:
        found = [self.store.chunks.pop((self.salt, key), None) for key in keys]
        return sum(shard is not None for shard in found)

    def report_duplicates(
        self,
        keys: Sequence[ChunkKey],
        checksums: Sequence[int],
        *,
        maker: bytes = b"",
        timeout_s: float | None = None,
    ) -> int:
        kept = [xxhash.xxh3_64_intdigest(self.store.chunks[self.salt, key].tobytes()) for key in keys]
        return sum(mine != theirs for mine, theirs in zip(checksums, kept, strict=True))

    def report_wrong(
        self, keys: Sequence[ChunkKey], *, healthy: bool, maker: bytes = b"", timeout_s: float | None = None
    ) -> int:
        self.store.found_wrong.append((list(keys), healthy))
        return int(healthy)

    def report_resident(
        self, keys: Sequence[ChunkKey], *, ttl_ms: int = 0, timeout_s: float | None = None
    ) -> tuple[int, ...]:
        self.check_count(keys)
        self.store.on_report()
        if self.store.away:
            raise Unavailable("no daemon")
        self.store.resident[self.salt] = list(keys)
        return tuple(self.store.needed.index(key) + 1 if key in self.store.needed else 0 for key in keys)

    def match(
        self, wanted: Sequence[ChunkKey], *, token_count: int = 0, timeout_s: float | None = None
    ) -> Matched:
        self.check_count(wanted)
        hits = [self.has(key) and not self.store.away for key in wanted]
        usable = hits.index(False) if False in hits else len(hits)
        return Matched(usable, outcomes(hits), (Reason.NONE,) * len(hits))

    def read(
        self,
        wanted: Sequence[ChunkKey],
        *,
        wait_ms: int = 0,
        any_order: bool = False,
        promote: bool = True,
        pin: bool = False,
        timeout_s: float | None = None,
    ) -> FakeLease:
        self.check_count(wanted)
        self.store.reads.append(list(wanted))
        self.store.on_read()
        hits = [self.has(key) and not self.store.away and key not in self.store.on_ssd for key in wanted]
        shards = [
            self.store.chunks[self.salt, key] if hit else None for key, hit in zip(wanted, hits, strict=True)
        ]
        hits = [shard is not None and self.client.map(shard) for shard in shards]
        with self.store.lock:
            self.store.leases += 1
        cold = [self.has(key) and key in self.store.on_ssd for key in wanted]
        found = tuple(
            Outcome.PENDING if promote and on_ssd else outcome
            for on_ssd, outcome in zip(cold, outcomes(hits), strict=True)
        )
        other = Reason.UNAVAILABLE if self.store.away else Reason.NONE
        missing = Reason.NEVER_SEEN if not self.store.away else other
        reasons = tuple(
            Reason.ON_SSD if on_ssd else other if hit else missing
            for on_ssd, hit in zip(cold, hits, strict=True)
        )
        if promote and wait_ms:
            self.store.promoted += [key for key, on_ssd in zip(wanted, cold, strict=True) if on_ssd]
        waited = list(wanted) if wait_ms else []
        return FakeLease(self.store, shards, found, reasons, waited, backlog=self.store.backlog)

    def write(
        self,
        wanted: Sequence[ChunkKey],
        *,
        parent: ChunkKey = ROOT,
        parents: Sequence[ChunkKey] = (),
        token_counts: Sequence[int] = (),
        derived: bool = False,
        maker: bytes = b"",
        timeout_s: float | None = None,
    ) -> FakeBatch:
        self.store.on_write()
        if self.store.away:
            raise Unavailable("no daemon")
        assert len(token_counts) == len(wanted)
        self.store.makers.add(maker)
        for key in wanted:
            assert self.store.derived.setdefault((self.salt, key), derived) == derived, "invariant 2"
        results = []
        for key in wanted:
            if self.has(key):
                results.append(GrantResult.ALREADY)
            elif key in self.store.busy:
                results.append(GrantResult.BUSY)
            elif self.store.room == 0:
                results.append(GrantResult.FULL)
            else:
                results.append(GrantResult.GRANTED)
                if self.store.room is not None:
                    self.store.room -= 1
        return FakeBatch(self, list(wanted), tuple(results))

    def get_session(self, name: str, *, timeout_s: float | None = None) -> SessionInfo | None:
        if self.store.away or (info := self.store.sessions.get((self.salt, name))) is None:
            return None
        hits = [self.has(entry.key) for entry in info.entries]
        usable = hits.index(False) if False in hits else len(hits)
        return SessionInfo(info.session, info.version, info.entries, usable)

    def update_session(
        self,
        name: str,
        *,
        expected_version: int,
        keep: int,
        append: Sequence[SessionEntry],
        timeout_s: float | None = None,
    ) -> SessionInfo:
        self.check_count(append)
        if self.store.away:
            raise Unavailable("no daemon")
        old = self.store.sessions.get((self.salt, name))
        if expected_version != (old.version if old else 0):
            raise Conflict("the version has moved on")
        if missing := [entry for entry in append if not self.has(entry.key)]:
            raise Precondition("not committed", field="append", value=missing[0].key)
        entries = (*(old.entries[:keep] if old else ()), *append)
        info = SessionInfo(name.encode(), expected_version + 1, entries, len(entries))
        self.store.sessions[self.salt, name] = info
        return info


@dataclass
class FakeLease:
    store: FakeStore
    shards: list[np.ndarray | None]
    outcomes: tuple[Outcome, ...]
    reasons: tuple[Reason, ...] = ()
    awaited: list[ChunkKey] = field(default_factory=list)
    backlog: Backlog = NO_BACKLOG
    copies: int = 0
    whole: bool = True
    released: bool = False

    def copy_many(self, pieces: Sequence[tuple[int, int, int, Any]]) -> bool:
        assert not self.released
        number, self.copies = self.copies, self.copies + 1
        whole = self.store.on_copy(number)
        for index, shard, offset, out in pieces:
            assert shard == 0 and self.outcomes[index] is Outcome.HIT
            piece = self.shards[index][offset : offset + out.nbytes]
            void = np.full_like(out, 0xA5 if out.dtype == np.uint8 else -1)  # whatever lies there
            out[...] = piece.view(out.dtype).reshape(out.shape) if whole else void
        return whole

    def read_in_place(
        self,
        pieces: Sequence[tuple[int, int, int, int]],
        use: Callable[[Sequence[np.ndarray]], None],
    ) -> bool:
        outs = [np.empty(length, np.uint8) for _, _, _, length in pieces]
        rows = [(*piece[:3], out) for piece, out in zip(pieces, outs, strict=True)]
        whole = self.copy_many(rows)
        for out in outs:
            out.flags.writeable = False
        use(outs)  # whatever lies there: the slots may be reused while they are read
        return whole

    def unsafe_views(self, pieces: Sequence[tuple[int, int, int, int]]) -> list[np.ndarray] | None:
        assert not self.released
        number, self.copies = self.copies, self.copies + 1
        assert all(shard == 0 and self.outcomes[index] is Outcome.HIT for index, shard, _, _ in pieces)
        views = [self.shards[index][offset : offset + length] for index, _, offset, length in pieces]
        if self.store.views is None:
            self.whole &= self.store.on_copy(number)
        else:
            self.store.views[id(views[0])] = views[0], self, number
        return views if self.whole else None

    def intact(self) -> bool:
        assert not self.released
        return self.whole and self.store.on_intact()

    def settled(self, timeout_s: float | None = None) -> tuple[int, ...]:
        """What is awaited is promoted, unless the store says that it does not."""
        assert not self.released
        promoted = [key for key in self.awaited if key in self.store.on_ssd and self.store.promotes]
        self.store.on_ssd.difference_update(promoted)
        return tuple(self.awaited.index(key) for key in promoted)

    def release(self) -> None:
        if not self.released:
            self.released = True
            with self.store.lock:
                self.store.leases -= 1


@dataclass
class Committed:
    ok: bool
    error: StoreError | None


class FakeBatch:
    def __init__(
        self, namespace: FakeNamespace, wanted: list[ChunkKey], results: tuple[GrantResult, ...]
    ) -> None:
        self.namespace, self.wanted, self.results = namespace, wanted, results
        self.granted = tuple(number for number, result in enumerate(results) if result is GrantResult.GRANTED)
        # Staging memory holds what was there before: whoever writes must write all of it.
        self.buffers = {
            number: np.full(namespace.spec.shard_bytes[0], 0xA5, np.uint8) for number in self.granted
        }
        self.handed_over: set[int] = set()

    def __enter__(self) -> FakeBatch:
        return self

    def __exit__(self, *error: object) -> None:
        self.buffers = {}

    def buffer(self, index: int, shard: int | None = None) -> np.ndarray:
        return self.buffers[index]

    def written(self, index: int, shard: int | None = None) -> None:
        """From here on the bytes are the daemon's: what is written later is not seen."""
        self.buffers[index] = self.buffers[index].copy()
        self.handed_over.add(index)

    def commit(self, *, timeout_s: float | None = None) -> Committed:
        assert self.handed_over == {*self.granted}, "the daemon could have copied it all by now"
        store = self.namespace.store
        if store.away or store.commits_fail:
            return Committed(False, Unavailable("the daemon went away"))
        for number, shard in self.buffers.items():
            store.chunks.setdefault((self.namespace.salt, self.wanted[number]), shard)
        if store.commits_unheard:
            return Committed(False, DeadlineExceeded("no answer in time"))
        return Committed(True, None)


def outcomes(hits: Sequence[bool]) -> tuple[Outcome, ...]:
    return tuple(Outcome.HIT if hit else Outcome.MISS for hit in hits)


def digest_of(model: LlamaForCausalLM) -> bytes:
    """Of what it computes with."""
    return Identity(model).check().digest


class InMemory:
    """An engine that keeps a session's KV, in Hugging Face's own cache: what a restored one is compared to."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model
        self.caches: dict[str, DynamicCache] = {}

    def turn(self, session: str, prompt: Sequence[int], max_new_tokens: int) -> tuple[int, ...]:
        cache = self.caches.setdefault(session, DynamicCache(config=self.model.config))
        step, answer = list(prompt[cache.get_seq_length() :]), []
        with torch.inference_mode():
            while len(answer) < max_new_tokens:
                logits = self.model(
                    torch.tensor([step]), cache=cache, use_cache=True, logits_to_keep=1
                ).logits
                step = [int(logits[0, -1].float().argmax())]
                answer += step
        return tuple(answer)


@contextmanager
def recorded_logits(model: LlamaForCausalLM) -> Iterator[list[torch.Tensor]]:
    seen: list[torch.Tensor] = []

    def record(module: object, args: object, out: torch.Tensor) -> None:
        seen.append(out.detach().clone())

    hook = model.lm_head.register_forward_hook(inert(record))
    try:
        yield seen
    finally:
        hook.remove()


def text(count: int, seed: int = 1) -> list[int]:
    """`count` token ids."""
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def engines() -> Iterator[Callable[..., BatchEngine]]:
    """Makes engines, and closes them: a thread that failed is seen. Chunks that nobody holds do not stay in the pool,
    unless it is said (`retain`): what is reused came from the store then."""
    made: list[BatchEngine] = []

    def make(model: LlamaForCausalLM, store: FakeStore | None, **options: Any) -> BatchEngine:
        # A lookup that is late is a miss: here it is never late, on whatever machine.
        settings = {"pool_chunks": 32, "retain": False, "lookup_timeout_s": 30.0} | options
        made.append(BatchEngine(model, store.connect if store is not None else None, **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
