"""Between the paged pool and the store: what is there of a prompt is loaded into chunks; what was computed, saved.

Nothing here holds up a forward call: lookups have threads, copies in and out have streams (`device.py`), requests to
the store other threads. What is late, void or finds no room is computed, or dropped and counted. A step tells when it
begins and ends, and when attention of each layer does (`step_begins`, `begin`, `end`, `step_ends`): of a request that
joined before all of its load was there, a layer is waited for when attention reads it, and a layer of what becomes full
is copied out as soon as it is computed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from kvstore.client import SessionEntry, SessionInfo
from kvstore.errors import StoreError, Unsupported
from kvstore.gpu_worker.assembly import Assembly, Part
from kvstore.gpu_worker.choices import decode, encode, store_key
from kvstore.gpu_worker.compute_or_load import ComputeOrLoad, Plan, Why
from kvstore.gpu_worker.device import Device, Event, device_of
from kvstore.gpu_worker.hbm_pool import HbmPool
from kvstore.gpu_worker.loader import SHARD, Load, Loader, LoadFailed, Piece, Target
from kvstore.gpu_worker.positions import Positions
from kvstore.gpu_worker.proven import Proven, cannot_be_used
from kvstore.gpu_worker.request import Request
from kvstore.gpu_worker.residency import REPORT_KEYS_MAX, Reporter
from kvstore.gpu_worker.saver import QUEUE_BYTES_MAX, ChoiceSave, PartSave, Saver, Shards, TurnSave
from kvstore.gpu_worker.segments import Path
from kvstore.gpu_worker.store import CONNECT_AGAIN_S, Store
from kvstore.gpu_worker.verdicts import Verdicts
from kvstore.gpu_worker.write_buffer import Outgoing, WriteBuffer, regions
from kvstore.layout import NamespaceSpec
from kvstore.types import KEYS_PER_REQUEST_MAX, ChunkKey, Outcome, Reason

if TYPE_CHECKING:
    from kvstore.client import Client, Namespace, ReadLease

TELL_TIMEOUT_S = 5.0
SAMPLE_EVERY = 256
LOOKUP_THREADS = 8
"""A lookup waits for what is promoted from SSD: others go on beside it."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """What the store has of a prompt."""

    lease: ReadLease | None = None
    chunks: int = 0
    """How many leading full chunks."""
    tail: SessionEntry | None = None
    """What the session has behind those."""
    asked: int = 0
    """Full chunks that were asked for: the tail is the next in the lease."""
    from_ssd: frozenset[int] = frozenset()
    """Numbers in the lease of those that were promoted because they were asked for."""
    base: SessionInfo | None = None
    """The session's manifest."""
    plan: Plan | None = None
    """Why so many; None: nothing was weighed."""

    parts: tuple[tuple[int, Part], ...] = ()
    """Of a prompt that is put together: its parts that are there, each with its number in the lease."""
    missing: frozenset[ChunkKey] = frozenset()
    """Keys of the others."""

    def tokens(self, chunk_tokens: int) -> int:
        """Of the prompt, in its chunks and its tail."""
        return self.chunks * chunk_tokens + (self.tail.token_count if self.tail is not None else 0)

    def release(self) -> None:
        if self.lease is not None:
            self.lease.release()


class PoolStore:
    """All methods but `close` return at once, and are called from the engine's thread."""

    def __init__(
        self,
        model: PreTrainedModel,
        pool: HbmPool,
        connect: Callable[[], Client],
        *,
        spec: NamespaceSpec | None,
        counters: Counter[str],
        lookup_timeout_s: float = 0.5,
        promote_timeout_s: float = 1.0,
        save_timeout_s: float = 5.0,
        save_queue_bytes_max: int = QUEUE_BYTES_MAX,
        device: Device | None = None,
        choice: ComputeOrLoad | None = None,
        verdicts: Verdicts | None = None,
        sample_every: int = SAMPLE_EVERY,
    ) -> None:
        """`spec`: of the namespace; None: none for now (see `use`). `choice`: by which loading and computing are
        weighed; None: whatever is there is loaded. `device`: by default that of the model; one whose memory is not the
        host's is checked (`self_check.py`) before it is first used, unless `verdicts` say that it has passed, and of
        `sample_every` loads one is compared with the store. Raises
        Unsupported for a model on a device that no make of `device.py` is for, and whatever the daemon has against
        us."""
        self._device = device or device_of(model.device)
        self._device.adopt(pool.layers)
        self._pool = pool
        self._choice = choice
        self._chunk_tokens = pool.geometry.chunk_tokens
        self._lookup_timeout_s = lookup_timeout_s
        self._proven = Proven(
            self._device, pool.layers[0].device, geometries=(pool.geometry,), verdicts=verdicts
        )
        self.segments = self._proven.segments
        self._sample_every = sample_every
        self._store = Store(
            self._attaching(connect),
            spec,
            lookup_timeout_s=lookup_timeout_s,
            promote_timeout_s=promote_timeout_s,
            counters=counters,
            opened=partial(self._proven.register_all, shard=SHARD),
        )
        if self.failure:
            self._store.close()
            self.segments.close()
            raise cannot_be_used(self._device, self.failure)
        self._lookups = ThreadPoolExecutor(max_workers=LOOKUP_THREADS, thread_name_prefix="kv-lookup")
        self._no_lookup_before = 0.0
        self._positions = _positions_of(model)
        self._loader = self._make_loader(bounce=False)
        self._bouncing: Loader | None = None
        """Of a device that cannot read the arena by itself; made when it turns out to be one."""
        self._buffer = WriteBuffer(pool, self._device)
        self._staged: dict[Request, Outgoing] = {}
        """Chunks that become full in the step that runs."""
        self._loading: dict[Request, Load] = {}
        """Of the requests in the step that runs: loads whose layers are still to come."""
        self._healthy = 0
        """Requests in it whose KV is there, as far as we know."""
        self._touching: dict[Request, tuple[list[int], list[int]]] = {}
        """Chunks that each of them reads, and writes; where the device looks at that."""
        self.saver = Saver(
            pool.geometry,
            queue_bytes_max=save_queue_bytes_max,
            timeout_s=save_timeout_s,
            maker=maker_of(model),
        )
        self._reporter = Reporter(counters, timeout_s=lookup_timeout_s)
        self._ended: list[tuple[TurnSave, list[ChunkKey]]] = []
        """Saves that go on behind, each with the keys of all its full chunks."""
        self._saving: dict[str, TurnSave] = {}
        """The last one of each session, while it goes on."""

    def _attaching(self, connect: Callable[[], Client]) -> Callable[[], Client]:
        """The client that a device can be used with: segments are registered before anything is read from them."""

        def attached() -> Client:
            client = connect()
            try:
                self._proven.attach(client)
            except BaseException:
                client.close()
                raise
            return client

        return attached

    def _make_loader(self, *, bounce: bool) -> Loader:
        return Loader(
            self._pool.geometry,
            self._positions,
            device=self._device,
            bounce=bounce,
            sample_every=self._sample_every,
            on_wrong=self._proven.distrust,
        )

    @property
    def failure(self) -> str:
        """Why KV can neither be loaded nor saved any more by this device; "" while it can."""
        return self.segments.failure

    def _start_load(
        self, lease: ReadLease, pieces: Sequence[Piece], place: Target, chunks: Sequence[int]
    ) -> Load:
        """Nobody waits for it but by asking whether it has ended: copies between memories end."""
        loader = self._loader
        if self.segments.path is Path.BOUNCE:
            if self._bouncing is None:
                self._bouncing = self._make_loader(bounce=True)
            loader = self._bouncing
        return loader.start(
            lease,
            pieces,
            place,
            deadline_s=float("inf"),
            after=self._before_overwriting(chunks),
            regions=lambda layer: regions(layer, chunks),
        )

    @property
    def connected(self) -> bool:
        """Whether there is a daemon, as far as we know."""
        return self._store.namespace() is not None

    @property
    def salt(self) -> bytes | None:
        """Of the keys of the namespace; None while there is none."""
        namespace = self._store.namespace()
        return None if namespace is None else namespace.salt or None

    @property
    def namespace(self) -> Namespace | None:
        """None while there is no daemon."""
        return self._store.namespace()

    @property
    def moves(self) -> bool:
        """Whether KV can be loaded to other positions than it was computed at."""
        return self._positions is not None

    def use(self, spec: NamespaceSpec | None) -> None:
        """From now on loads and saves are those of this namespace; None: there are none."""
        self._store.use(spec)

    # ------------------------------------------------------------------------------------------------------ loading

    def look_up(self, request: Request) -> Future[Found] | None:
        """Of its full chunks and its session's tail, leaving at least one token to compute; None if the store is not
        there."""
        namespace = self._store.namespace()
        if namespace is None or len(request.tokens) < 2 or time.monotonic() < self._no_lookup_before:
            return None
        if request.assembly is not None:
            parts = [part for part in request.assembly.parts if part.end > request.computed]
            return self._look_up_parts(namespace, request.assembly, parts)
        # As many as the store takes at once, the tail included: of a longer prompt the rest is computed
        whole = min((len(request.tokens) - 1) // self._chunk_tokens, KEYS_PER_REQUEST_MAX - 1)
        if not whole and not request.session:
            return None
        keys = self._store_keys(request, namespace, whole)
        tokens, session = tuple(request.tokens), request.session
        have = request.computed // self._chunk_tokens
        # Of what saw more than its own text, only full chunks are kept
        root = request.root if request.chain is None else None
        before = self._saving.get(session) if session else None

        def find() -> Found:
            if before is not None:  # our own save of the turn before, still under way
                before.saved.wait(self._lookup_timeout_s)
            return self._find(namespace, keys, tokens, session, root, have)

        return self._ask(find)

    def look_up_parts(self, assembly: Assembly, parts: Sequence[Part]) -> Future[Found] | None:
        """Of these parts of an assembly, whichever are there; None if the store is not there."""
        namespace = self._store.namespace()
        if namespace is None or time.monotonic() < self._no_lookup_before:
            return None
        return self._look_up_parts(namespace, assembly, parts)

    def _look_up_parts(
        self, namespace: Namespace, assembly: Assembly, parts: Iterable[Part]
    ) -> Future[Found] | None:
        """Those of another namespace than the one of now are not there: their keys are others."""
        wanted = [part for part in parts if self.moves or not part.delta][:KEYS_PER_REQUEST_MAX]
        if not wanted or assembly.salt != namespace.salt:
            return None

        def find() -> Found:
            lease, promoted = self._store.read(namespace, [part.key for part in wanted], any_order=True)
            there = [outcome is Outcome.HIT for outcome in lease.outcomes]
            return Found(
                lease,
                from_ssd=promoted,
                parts=tuple((number, part) for number, part in enumerate(wanted) if there[number]),
                missing=frozenset(part.key for number, part in enumerate(wanted) if not there[number]),
            )

        return self._ask(find)

    def _ask(self, find: Callable[[], Found]) -> Future[Found]:
        """On a thread of its own."""

        def ask() -> Found:
            began = time.monotonic()
            try:
                found = find()
            except Exception:
                # Our bug, or the client's: said loudly here, while the model must not wait for what will not come.
                log.exception("looking up failed")
                return Found()
            late = time.monotonic() - began >= self._lookup_timeout_s
            away = found.lease is not None and found.lease.reasons[0] is Reason.UNAVAILABLE
            if late and away:  # it hangs: who comes next need not wait as long
                self._no_lookup_before = time.monotonic() + CONNECT_AGAIN_S
            return found

        return self._lookups.submit(ask)

    def look_up_chunks(self, keys: Sequence[ChunkKey]) -> Future[Found] | None:
        """Of these, in any order: `Found.chunks` is how many are there. None if the store is not there."""
        namespace = self._store.namespace()
        if namespace is None or not 0 < len(keys) <= KEYS_PER_REQUEST_MAX:
            return None
        if time.monotonic() < self._no_lookup_before:
            return None

        def find() -> Found:
            lease, promoted = self._store.read(namespace, list(keys), any_order=True)
            there = sum(outcome is Outcome.HIT for outcome in lease.outcomes)
            return Found(lease, there, None, len(keys), promoted)

        return self._ask(find)

    def look_up_choices(self, wanted: Sequence[bytes]) -> Future[dict[bytes, tuple[int, ...]]] | None:
        """What was found out earlier, by these keys (`choices.py`); None if the store is not there."""
        namespace = self._store.namespace()
        if namespace is None or not wanted or time.monotonic() < self._no_lookup_before:
            return None
        asked = list(wanted)[-KEYS_PER_REQUEST_MAX:]
        size = self._pool.geometry.shard_bytes

        def find() -> dict[bytes, tuple[int, ...]]:
            try:
                lease, _ = self._store.read(
                    namespace, [store_key(namespace.salt, key) for key in asked], any_order=True
                )
            except Exception:
                log.exception("looking up failed")
                return {}
            try:
                there = [n for n, outcome in enumerate(lease.outcomes) if outcome is Outcome.HIT]
                records = {n: np.empty(size, np.uint8) for n in there}
                if there and not lease.copy_many([(n, 0, 0, record) for n, record in records.items()]):
                    return {}
                found = {asked[n]: decode(record) for n, record in records.items()}
                return {key: chosen for key, chosen in found.items() if chosen is not None}
            finally:
                lease.release()

        return self._lookups.submit(find)

    def save_choice(self, key: bytes, chosen: Sequence[int]) -> None:
        """For whoever goes on with the conversation."""
        namespace = self._store.namespace()
        record = encode(chosen, self._pool.geometry.shard_bytes)
        if namespace is not None and record is not None:
            self.saver.put_choice(ChoiceSave(namespace, store_key(namespace.salt, key), record))

    def load_chunks(self, found: Found, chunks: Sequence[int]) -> Load:
        """All that was asked for, which is there, into these chunks of the pool. Takes over the lease."""
        return self.load(found, 0, chunks)

    def load(self, found: Found, first: int, chunks: Sequence[int]) -> Load:
        """Chunk `first` of a prompt and those after it, into these of the pool; the last may be the tail. Takes over
        the lease."""
        assert found.lease is not None
        size = self._chunk_tokens
        pieces = [Piece(number, number * size, size) for number in range(first, found.chunks)]
        if found.tail is not None:
            pieces.append(Piece(found.asked, found.tail.first_token, found.tail.token_count))
        assert len(pieces) == len(chunks), (pieces, chunks)

        layers = self._buffer.layers or self._pool.layers

        def place(layer: int, piece: Piece) -> Any:
            return layers[layer][chunks[piece.first_token // size - first]][:, :, : piece.token_count]

        return self._start_load(found.lease, pieces, place, chunks)

    def _before_overwriting(self, chunks: Sequence[int]) -> list[Event]:
        """What may still touch these chunks: computing for whoever had them, and copies out of them."""
        return [self._device.compute.record(), *self._buffer.reads(chunks)]

    def load_parts(self, found: Found, first: int, chunks: Sequence[int]) -> Load:
        """The parts that are there, into a prompt's chunks from number `first` on: a part may lie in two of them. Takes
        over the lease."""
        assert found.lease is not None
        size = self._chunk_tokens
        pieces = [Piece(number, part.first, part.count, part.delta) for number, part in found.parts]
        layers = self._buffer.layers or self._pool.layers

        def place(layer: int, piece: Piece) -> Any:
            targets: list[Any] = []
            at, end = piece.first_token, piece.first_token + piece.token_count
            while at < end:
                number, inside = divmod(at, size)
                until = min(size, inside + end - at)
                # Of what others have loaded already, and share, no byte is written again
                if number >= first:
                    targets.append(layers[layer][chunks[number - first]][:, :, inside:until])
                else:
                    targets.append(until - inside)
                at += until - inside
            return targets[0] if len(targets) == 1 and not isinstance(targets[0], int) else targets

        return self._start_load(found.lease, pieces, place, chunks)

    def load_apart(self, found: Found, chunks: Sequence[int]) -> Load:
        """The parts that are there, each as it is into one of these chunks. Takes over the lease."""
        assert found.lease is not None and len(chunks) == len(found.parts)
        into = {number: chunk for (number, _), chunk in zip(found.parts, chunks, strict=True)}
        layers = self._buffer.layers or self._pool.layers

        def place(layer: int, piece: Piece) -> Any:
            return layers[layer][into[piece.index]][:, :, : piece.token_count]

        return self._loader.start(
            found.lease,
            [Piece(number, 0, part.count) for number, part in found.parts],
            place,
            deadline_s=float("inf"),
            after=self._before_overwriting(chunks),
            regions=lambda layer: regions(layer, chunks),
        )

    def loaded(self, request: Request, first: int) -> None:
        """Its full chunks from `first` on came from the store."""
        for number in range(first, request.computed // self._chunk_tokens):
            self._pool.mark_stored(request.chunks[number], request.store_keys[number])

    def _find(
        self,
        namespace: Namespace,
        keys: Sequence[ChunkKey],
        tokens: Sequence[int],
        session: str,
        root: ChunkKey | None,
        have: int,
    ) -> Found:
        """`root`: None for keys behind which no tail is looked for."""
        base = namespace.get_session(session, timeout_s=self._lookup_timeout_s) if session else None
        tail = None
        if root is not None:
            tail = _tail_of(namespace, base, keys, tokens, self._chunk_tokens, root)
        asked = [*keys, tail.key] if tail is not None else list(keys)
        if not asked:
            return Found(base=base)
        # In any order, because the tail of an earlier turn lies beside the chunk that has grown out of it since.
        plan = None
        any_order = tail is not None
        if self._choice is None:
            lease, promoted = self._store.read(namespace, asked, any_order=any_order)
        else:
            lease, promoted, plan = self._store.read_worthwhile(
                namespace, asked, self._choice, chunks=len(keys), have=have, any_order=any_order
            )
        hit = [outcome is Outcome.HIT for outcome in lease.outcomes]
        chunks = next((number for number in range(len(keys)) if not hit[number]), len(keys))
        if plan is not None and plan.why is not Why.NOTHING:
            chunks = min(chunks, max(plan.chunks, have))
        if tail is not None and not (hit[-1] and tail.first_token == chunks * self._chunk_tokens):
            tail = None
        return Found(lease, chunks, tail, len(keys), promoted, base, plan)

    # -------------------------------------------------------------------------------------------------- while it runs

    def step_begins(self, pieces: Mapping[Request, int]) -> None:
        """A step of these begins."""
        size = self._chunk_tokens
        self._staged.clear()
        self._loading = {request: request.load for request in pieces if request.load is not None}
        self._healthy = len(pieces)
        written = []
        for request, count in pieces.items():
            spans = request.spans(count)
            first = request.computed // size
            for begin, end in spans:
                written += request.chunks[begin // size : -(-end // size)]
            full = (request.computed + count) // size
            if count > 1 and full > first and request.load is None and request.assembly is None:
                self._stage(request, full)
        self.writes(written)
        if self._device.tracks:
            self._touching = {
                request: (
                    [*request.chunks[: -(-request.spans(count)[-1][1] // size)], *request.held],
                    [
                        chunk
                        for begin, end in request.spans(count)
                        for chunk in request.chunks[begin // size : -(-end // size)]
                    ],
                )
                for request, count in pieces.items()
            }

    def writes(self, chunks: Sequence[int]) -> None:
        """What is computed next writes these: copies out of them come first."""
        for event in self._buffer.reads(chunks):
            self._device.compute.wait(event)

    def begin(self, layer: int) -> None:
        """Attention of that layer comes next. Raises LoadFailed once there is no request left whose KV is there."""
        for request, load in list(self._loading.items()):
            try:
                load.wait(layer)
            except LoadFailed:  # its tokens mean nothing; those of others do
                del self._loading[request]
                self._touching.pop(request, None)
                self._healthy -= 1
                if not self._healthy:
                    raise
        for read, written in self._touching.values():
            self._device.compute.run(lambda: None, reads=regions(layer, read), writes=regions(layer, written))

    def end(self, layer: int) -> None:
        """Attention of that layer has written its KV."""
        for outgoing in self._staged.values():
            outgoing.copy(layer)

    def step_ends(self) -> None:
        """It is over, or broke off."""
        self._loading.clear()
        for outgoing in self._staged.values():
            outgoing.stop()

    def _stage(self, request: Request, full: int) -> None:
        save = self._save_of(request)
        if save is None or save.cut:
            return
        first = save.queued_tokens // self._chunk_tokens
        if full > first and self.saver.has_room((full - first) * self._chunk_tokens):
            self._staged[request] = self._buffer.begin(
                request.chunks[first:full], (full - first) * self._chunk_tokens
            )

    # ------------------------------------------------------------------------------------------------------- saving

    def save(self, request: Request) -> None:
        """Some of its chunks are full now: those that the store has not are saved."""
        save = self._save_of(request)
        if save is None:
            return
        whole = request.computed // self._chunk_tokens
        keys = self._store_keys(request, save.namespace, whole) if request.chain is not None else None
        save.extend(self._chunks_of(request), request.tokens[: whole * self._chunk_tokens], keys)
        self._mark(request, save, whole)

    def finish(self, request: Request) -> None:
        """It computes no more: the rest is saved as a tail, and all of it becomes its session's manifest."""
        save = self._save_of(request)
        if save is None:
            return
        whole = request.computed // self._chunk_tokens
        keys = self._store_keys(request, save.namespace, whole) if request.chain is not None else None
        save.finish(self._chunks_of(request), request.tokens[: request.computed], keys)
        self._mark(request, save, whole)
        self._ended.append((save, request.store_keys[:whole]))
        if request.session:
            self._saving[request.session] = save

    def save_parts(self, request: Request) -> None:
        """What its assembly is computed for: all of it is in the pool."""
        assembly, namespace = request.assembly, self._store.namespace()
        assert assembly is not None
        if namespace is None or namespace.salt != assembly.salt or not assembly.kept:
            return
        size = self._chunk_tokens
        first = min(kept.first for kept in assembly.kept) // size * size
        count = max(kept.first + kept.count for kept in assembly.kept) - first
        source = _Chunks(self._buffer, request.chunks, None)
        save = PartSave(namespace, assembly.owner, assembly.kept, first, count)
        self.saver.put_parts(save, lambda: source.snapshot(first, count))

    def tell_wrong(self, keys: Sequence[ChunkKey], own: Sequence[ChunkKey], *, healthy: bool) -> None:
        """The store hears, behind, that these are not what this worker computes, in the order of their tokens (see
        `canary`); twice where nobody answers. `own`: what this worker may have saved since, computed from those."""
        namespace, saver = self._store.namespace(), self.saver
        if namespace is None:
            return

        def tell() -> None:
            with suppress(RuntimeError):  # it failed before, and saves nothing more
                saver.flush(TELL_TIMEOUT_S)
            for again in (True, False):
                try:
                    quarantined = namespace.report_wrong(
                        keys[:1], healthy=healthy, maker=saver.maker, timeout_s=TELL_TIMEOUT_S
                    )
                    if follow := [*(keys[1:] if healthy else ()), *own]:
                        namespace.forget(keys=follow, timeout_s=TELL_TIMEOUT_S)
                except StoreError as error:
                    log.log(
                        logging.WARNING if again else logging.ERROR,
                        "the store was not told of a wrong chunk: %s",
                        error,
                    )
                    continue
                if quarantined:
                    log.error("the maker of chunk %s is quarantined", keys[0].hex())
                return

        self._lookups.submit(tell)

    def abandon(self, request: Request) -> None:
        """It ends before its prompt was read: what was queued of it is saved, and is nobody's manifest."""
        save, request.save = request.save, None
        if save is None:
            return
        save.session = ""
        keys = request.store_keys if request.chain is not None else None
        save.finish(self._chunks_of(request), request.tokens[: save.queued_tokens], keys)
        self._ended.append((save, request.store_keys[: save.queued_tokens // self._chunk_tokens]))

    def collect(self) -> None:
        """What saves that have ended could not bring into the store is no longer taken to be there."""
        going_on = []
        for save, keys in self._ended:
            if not save.saved.is_set():
                going_on.append((save, keys))
                continue
            self._pool.unmark_stored(keys[len(save.entries) :])
            if self._saving.get(save.session) is save:
                del self._saving[save.session]
        self._ended = going_on
        self._report()

    def _report(self) -> None:
        """Of what is in the pool, now and then; what the queue needs of it is evicted last."""
        if (ranks := self._reporter.take_ranks()) is not None:
            self._pool.rank(ranks)
        if self._reporter.due:
            self._reporter.offer(self._store.namespace(), self._pool.resident(REPORT_KEYS_MAX))

    def forget(self) -> None:
        """The model computes otherwise: nothing of before is taken to be in the store."""
        self._ended.clear()
        self._saving.clear()

    def _save_of(self, request: Request) -> TurnSave | None:
        """Begins it, behind the leading chunks that the store has already."""
        namespace = self._store.namespace()
        if namespace is None or request.save is not None:
            return request.save
        whole = request.computed // self._chunk_tokens
        keys = self._store_keys(request, namespace, whole)
        known = 0
        while known < whole and self._pool.stored(request.chunks[known]) == keys[known]:
            known += 1
        base = request.found.base if request.found is not None else None
        request.save = TurnSave(
            self.saver,
            namespace,
            request.session,
            base,
            keys[:known],
            root=request.root,
            layout=request.chain,
        )
        return request.save

    def _chunks_of(self, request: Request) -> _Chunks:
        return _Chunks(self._buffer, request.chunks, self._staged.pop(request, None))

    def _mark(self, request: Request, save: TurnSave, whole: int) -> None:
        if save.cut:
            return
        keys = self._store_keys(request, save.namespace, whole)
        for number, chunk in enumerate(request.chunks[:whole]):
            if self._pool.stored(chunk) != keys[number]:
                self._pool.mark_stored(chunk, keys[number])

    def _store_keys(self, request: Request, namespace: Namespace, count: int) -> list[ChunkKey]:
        known = len(request.store_keys)
        if request.chain is not None:
            request.chain.extend(
                request.store_keys, request.tokens, namespace.salt, self._chunk_tokens, count
            )
        elif known < count:
            parent = request.store_keys[-1] if known else request.root
            size = self._chunk_tokens
            request.store_keys += namespace.keys(request.tokens[known * size : count * size], parent)
        return request.store_keys[:count]

    def flush(self, timeout_s: float) -> bool:
        """Waits until all KV is saved or dropped; False if that took too long."""
        return self.saver.flush(timeout_s)

    def close(self, timeout_s: float) -> None:
        try:
            self._reporter.close()
            self._lookups.shutdown(wait=True)
            self._loader.close()
            if self._bouncing is not None:
                self._bouncing.close()
            self.saver.close(timeout_s)
        finally:
            self._store.close()
            self.segments.close()
            self._device.close()


def _positions_of(model: PreTrainedModel) -> Positions | None:
    """None: keys of such a model cannot be moved."""
    try:
        return Positions.of(model)
    except (Unsupported, AttributeError, KeyError) as error:
        log.debug("KV stays at its positions: %s", error)
        return None


def maker_of(model: PreTrainedModel) -> bytes:
    """16 bytes for this engine in this process: what `kvctl recall` purges by when it turns out to have been sick."""
    who = f"{socket.gethostname()} {os.getpid()} {time.time_ns()} {model.device} torch {torch.__version__}"
    return hashlib.blake2b(who.encode(), digest_size=16, person=b"kvs.maker.v1").digest()


class _Chunks:
    """What a save reads: what was staged while it was computed, or chunks of the pool as they are now."""

    def __init__(self, buffer: WriteBuffer, chunks: Sequence[int], staged: Outgoing | None) -> None:
        self._buffer = buffer
        self._chunks = chunks
        self._staged = staged

    def snapshot(self, first_token: int, token_count: int, /) -> Shards:
        size = self._buffer.pool.geometry.chunk_tokens
        chunks = self._chunks[first_token // size : -(-(first_token + token_count) // size)]
        staged = self._staged
        if (
            staged is not None
            and staged.whole
            and (staged.chunks, staged.tokens) == (tuple(chunks), token_count)
        ):
            return staged
        return self._buffer.copy(chunks, token_count)


def _tail_of(
    store: Namespace,
    base: SessionInfo | None,
    keys: Sequence[ChunkKey],
    prompt: Sequence[int],
    chunk_tokens: int,
    root: ChunkKey,
) -> SessionEntry | None:
    """The session's tail, if it is KV of exactly our tokens: its key must be the one that we compute from them."""
    if base is None or not base.entries:
        return None
    tail = base.entries[-1]
    chunks, inside = divmod(tail.first_token, chunk_tokens)
    end = tail.first_token + tail.token_count
    if inside != 0 or not 0 < tail.token_count < chunk_tokens or chunks > len(keys) or end >= len(prompt):
        return None
    parent = keys[chunks - 1] if chunks else root
    return tail if store.tail_key(prompt[tail.first_token : end], parent) == tail.key else None
