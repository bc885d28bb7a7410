"""The Saver: copies new KV into the store behind prefill and decode, chunk by chunk; the rest of a turn as a tail.

    model's thread                      write stream             saver's thread
    TurnSave.extend(source, tokens) ---> copy into the buffer --> reserve, copy, commit the chunks that became full
    TurnSave.finish(source, tokens) ---> the same of the tail --> and then the session's new manifest

The model's thread neither copies nor waits here. What the write buffer, whose size is bounded, or the store cannot
take is dropped and counted, with all that comes after it in the turn: a history is only usable up to its first hole.
The next turn of the session finds the shorter history, computes the rest again and saves it again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.client import SessionEntry, SessionInfo
from kvstore.errors import Conflict, Precondition, StoreError
from kvstore.gpu_worker.assembly import Kept
from kvstore.gpu_worker.device import DeviceFailed
from kvstore.gpu_worker.layout import Geometry
from kvstore.keys import ROOT
from kvstore.types import KEYS_PER_REQUEST_MAX, ChunkKey, GrantResult

if TYPE_CHECKING:
    from kvstore.client import Namespace, WriteBatch
    from kvstore.gpu_worker.chain import Chain
    from kvstore.gpu_worker.identity import Identity

QUEUE_BYTES_MAX = 512 << 20
"""KV that may wait to be saved: of the write buffer."""
QUEUE_JOBS_MAX = 4096
BATCH_BYTES_MAX = 16 << 20
"""What is reserved, copied and committed at a time: well below the staging memory of a worker."""
MANIFEST_TRIES = 3
AUDIT_EVERY = 64
UNVERIFIED_MAX = 16384
IN_STORE = (GrantResult.GRANTED, GrantResult.ALREADY, GrantResult.BUSY)
"""BUSY: another worker is saving the very same tokens. Should it fail, the manifest is cut where the hole is."""
log = logging.getLogger(__name__)


class Shards(Protocol):
    """KV on its way into the write buffer, chunk by chunk."""

    def wait(self) -> None:
        """Until it has arrived. Raises DeviceFailed."""

    def shard(self, number: int, /) -> npt.NDArray[np.uint8]:
        """All bytes of one chunk as the store has them, see layout.py. Nobody writes them before `release`."""

    def release(self) -> None:
        """It is saved or dropped."""


class Source(Protocol):
    """Where the KV of a sequence is."""

    def snapshot(self, first_token: int, token_count: int, /) -> Shards:
        """Of these tokens, whose first begins a chunk, as they are now. Does not wait."""


class TurnSave:
    """What one turn of a session saves. `extend` and `finish` belong to the model's thread, the rest to the saver's."""

    def __init__(
        self,
        saver: Saver,
        namespace: Namespace,
        session: str,
        base: SessionInfo | None,
        chain: Sequence[ChunkKey],
        *,
        root: ChunkKey = ROOT,
        layout: Chain | None = None,
    ) -> None:
        """`session`: "" for a turn that no session names. `base`: the session's manifest as this turn found it.
        `chain`: keys of the leading full chunks that are in the store already, or queued by another turn. `root`: what
        the chain begins with. `layout`: of a turn whose tokens see more than those before them; then its keys are told
        with its tokens, and it has no tail."""
        chunk_tokens = saver.geometry.chunk_tokens
        self.namespace = namespace
        self.chunk_tokens = chunk_tokens
        self.session = session
        self.base = base
        self.entries = [
            SessionEntry(key, number * chunk_tokens, chunk_tokens) for number, key in enumerate(chain)
        ]
        """The history that is in the store, without holes."""
        self.whole = True
        """False once a chunk was dropped: what comes after it is of no use."""
        self.saved = threading.Event()
        """Set when all of the turn was saved or dropped."""
        self.root = root
        self.layout = layout
        self.cut = False
        """Something was not queued: what comes after it is of no use."""
        self._saver = saver
        self._queued = len(chain) * chunk_tokens

    @property
    def queued_tokens(self) -> int:
        """Whose chunks are in the store, or queued, or cut."""
        return self._queued

    def extend(self, source: Source, tokens: Sequence[int], keys: Sequence[ChunkKey] | None = None) -> None:
        """`tokens` are those whose KV is in `source`: queues the chunks that became full since the last call. `keys`:
        of all full chunks, where there is a layout."""
        assert (keys is None) is (self.layout is None), "keys and layout belong together"
        chunk_tokens = self._saver.geometry.chunk_tokens
        end = len(tokens) // chunk_tokens * chunk_tokens
        exact = self.layout.exact_chunks(chunk_tokens) if self.layout is not None else None
        if exact is not None:  # a batch is all exact, or all derived
            self._queue(source, tokens, min(end, exact * chunk_tokens), keys)
        self._queue(source, tokens, end, keys)

    def finish(self, source: Source, tokens: Sequence[int], keys: Sequence[ChunkKey] | None = None) -> None:
        """Queues what is left, as a tail, and the session's manifest. Nothing may be queued after it."""
        self.extend(source, tokens, keys)
        if self.session and self.layout is None:  # nobody would find a tail without its session
            self._queue(source, tokens, len(tokens))
        self._saver.put(_Save(self, cut=self.cut))

    def _queue(
        self, source: Source, tokens: Sequence[int], end: int, keys: Sequence[ChunkKey] | None = None
    ) -> None:
        if end > self._queued:
            first, count = self._queued, end - self._queued
            size = self._saver.geometry.chunk_tokens
            told = tuple(keys[first // size : end // size]) if keys is not None else ()
            save = _Save(self, first, tuple(tokens[first:end]), cut=self.cut, keys=told)
            self.cut = not self._saver.put(save, lambda: source.snapshot(first, count))
            self._queued = end


@dataclass(frozen=True, slots=True)
class _Save:
    """Save `tokens`, which start at `first_token` (a multiple of the chunk), and so do `shards`; or, without tokens,
    publish the turn's manifest."""

    turn: TurnSave
    first_token: int = 0
    tokens: tuple[int, ...] = ()
    shards: Shards | None = None
    cut: bool = False
    """Something before it was not queued."""
    keys: tuple[ChunkKey, ...] = ()
    """Of the chunks, where they do not follow from the tokens alone."""

    @property
    def derived(self) -> bool:
        """Whether what it saves saw more than the text before it (invariant 2)."""
        layout, size = self.turn.layout, self.turn.chunk_tokens
        exact = layout.exact_chunks(size) if layout is not None else None
        return exact is not None and self.first_token // size >= exact


@dataclass(frozen=True, slots=True, eq=False)
class PartSave:
    """Save chunks of a prompt that was put together for it (a module of Prompt Cache): `shards` are its KV, `count`
    tokens from slot `first` on, a multiple of the chunk. All of them become the manifest of `owner`, in place of what
    it was; without all of them there is none, and what was committed is evicted like any other chunk that nobody
    names."""

    namespace: Namespace
    owner: str
    kept: tuple[Kept, ...]
    first: int
    count: int
    shards: Shards | None = None
    saved: threading.Event = field(default_factory=threading.Event)
    """Set when all was saved or dropped."""


@dataclass(frozen=True, slots=True, eq=False)
class ChoiceSave:
    """Save what was found out about a conversation (`choices.py`): a chunk that is no KV."""

    namespace: Namespace
    key: ChunkKey
    record: npt.NDArray[np.uint8]
    shards: Shards | None = None


class Saver:
    """One thread that saves in the order in which things were queued.

    `counters` by name: chunks_saved, bytes_saved, chunks_already (others had saved them), chunks_dropped (queue full or
    behind a hole), chunks_recalled (forgotten again, see `follow`), chunks_refused (the store had no room or was away),
    chunks_compared and chunks_differed (with what others had saved), manifests, manifests_dropped; modules_saved and
    modules_dropped, of Prompt Cache; choices_saved and choices_dropped, of conversations that were cut.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
        timeout_s: float = 5.0,
        maker: bytes = b"",
        audit_every: int = AUDIT_EVERY,
    ) -> None:
        """`timeout_s` bounds each request to the store; `maker` is written on every chunk (16 bytes or none). Of the
        chunks that others had saved, one in `audit_every` (0: none) is compared with what this worker computed."""
        self.geometry = geometry
        self.counters: Counter[str] = Counter()
        self._queue_bytes_max = queue_bytes_max
        self._timeout_s = timeout_s
        self.maker = maker
        self._audit_every = audit_every
        self._changed = threading.Condition()  # guards all below, and `counters`
        self._saves: deque[_Save | PartSave | ChoiceSave | None] = deque()
        """None: forget what was saved before it and is not verified."""
        self._waiting_bytes = 0
        self._busy = False
        self._closing = False
        self._error: Exception | None = None
        self._unverified: deque[tuple[float, Namespace, list[ChunkKey]]] = deque(maxlen=UNVERIFIED_MAX)
        """What was saved, or may have been, by the time of its commit, that nobody has vouched for yet."""
        self._doubts = 0
        self._thread = threading.Thread(target=self._run, name="kv-saver", daemon=True)
        self._thread.start()

    def put(self, save: _Save, snapshot: Callable[[], Shards] | None = None) -> bool:
        """Queues a save, or drops it: False. Never waits. Nothing is copied of what is dropped."""
        with self._changed:
            waiting_bytes = self._waiting_bytes + self._bytes(save)
            full = waiting_bytes > self._queue_bytes_max or len(self._saves) >= QUEUE_JOBS_MAX
            useless = save.cut and save.tokens
            if full or useless or self._closing:
                self._drop(save)
                return False
            try:
                save = replace(save, shards=snapshot() if snapshot is not None else None)
            except DeviceFailed as error:
                log.warning("not saved: %s", error)
                self._drop(save)
                return False
            self._waiting_bytes = waiting_bytes
            self._saves.append(save)
            self._changed.notify_all()
            return True

    def put_parts(self, save: PartSave, snapshot: Callable[[], Shards]) -> bool:
        """Queues a save, or drops it: False. Never waits."""
        if not self.has_room(save.count):
            with self._changed:
                self._drop(save)
            return False
        with self._changed:
            try:
                save = replace(save, shards=snapshot())
            except DeviceFailed as error:
                log.warning("not saved: %s", error)
                self._drop(save)
                return False
            self._saves.append(save)
            self._waiting_bytes += self._bytes(save)
            self._changed.notify_all()
            return True

    def put_choice(self, save: ChoiceSave) -> bool:
        """Queues a save, or drops it: False. Never waits."""
        with self._changed:
            waiting_bytes = self._waiting_bytes + self._bytes(save)
            if waiting_bytes > self._queue_bytes_max or len(self._saves) >= QUEUE_JOBS_MAX or self._closing:
                self._drop(save)
                return False
            self._waiting_bytes = waiting_bytes
            self._saves.append(save)
            self._changed.notify_all()
            return True

    def has_room(self, tokens: int) -> bool:
        """Whether a save of so many tokens would be taken now."""
        with self._changed:
            size = tokens * self.geometry.token_bytes * self.geometry.layers
            full = self._waiting_bytes + size > self._queue_bytes_max or len(self._saves) >= QUEUE_JOBS_MAX
            return not (full or self._closing)

    def forget(self) -> None:
        """Drops what is queued: it was computed with weights that count no more. What is being saved ends first."""
        with self._changed:
            kept: deque[_Save | PartSave | ChoiceSave | None] = deque()
            for save in self._saves:
                if save is None:
                    kept.append(None)
                else:
                    self._waiting_bytes -= self._bytes(save)
                    self._drop(save)
            self._saves = kept
            self._changed.notify_all()

    def follow(self, identity: Identity) -> None:
        """Once contents of the model were others since nobody knows when, the store shall forget what was saved and not
        verified since, after what is queued: it may have been computed with other weights already."""
        with self._changed:
            if identity.doubts != self._doubts:
                self._doubts = identity.doubts
                self._saves.append(None)
                self._changed.notify_all()
            elif None not in self._saves:
                while self._unverified and self._unverified[0][0] < identity.verified_at:
                    self._unverified.popleft()

    def flush(self, timeout_s: float) -> bool:
        """Waits until all that was queued is saved or dropped; False if that took too long."""
        with self._changed:
            idle = self._changed.wait_for(lambda: not self._saves and not self._busy, timeout=timeout_s)
            if self._error is not None:
                raise RuntimeError("the saver failed") from self._error
            return idle

    def close(self, timeout_s: float = 5.0) -> None:
        """Saves what is queued, for at most `timeout_s`; drops the rest."""
        try:
            self.flush(timeout_s)
        finally:
            with self._changed:
                self._closing = True
                for save in self._saves:
                    if save is not None:
                        self._drop(save)
                self._saves.clear()
                self._changed.notify_all()
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._saves or self._closing)
                if not self._saves:
                    return
                save = self._saves.popleft()
                self._busy = True
            try:
                if save is None:
                    self._recall()
                elif isinstance(save, PartSave):
                    self._save_parts(save)
                elif isinstance(save, ChoiceSave):
                    self._save_choice(save)
                else:
                    self._do(save)
            except Exception as error:
                # Our bug. It must not stop the model, nor pass unseen: it is logged here and raised by flush and close.
                log.exception("saving failed")
                with self._changed:
                    self._error = self._error or error
                    if isinstance(save, _Save):
                        save.turn.whole = False
                    if save is not None:
                        self._drop(save)
            finally:
                with self._changed:
                    self._busy = False
                    self._waiting_bytes -= self._bytes(save) if save is not None else 0
                    self._changed.notify_all()
                if save is not None and save.shards is not None:
                    save.shards.release()
                del save  # and with it the buffers, while the thread sleeps

    def _recall(self) -> None:
        with self._changed:
            suspect = list(self._unverified)
            self._unverified.clear()
        for _, namespace, keys in suspect:
            try:
                recalled = namespace.forget(keys=keys, timeout_s=self._timeout_s)
            except StoreError as error:
                log.warning("%d chunks of changed weights may still be in the store: %s", len(keys), error)
                continue
            with self._changed:
                self.counters["chunks_recalled"] += recalled

    def _do(self, save: _Save) -> None:
        if save.tokens:
            self._save(save)
        else:
            save.turn.whole &= not save.cut
            self._publish(save.turn)
            save.turn.saved.set()

    def _save(self, save: _Save) -> None:
        turn, chunk_tokens = save.turn, self.geometry.chunk_tokens
        assert save.shards is not None
        try:
            save.shards.wait()
        except DeviceFailed as error:
            log.warning("not saved: %s", error)
            turn.whole = False
        if not turn.whole:
            with self._changed:
                self._drop(save)
            return
        # A key stands for all tokens before it: after a hole it would name KV of another text.
        assert save.first_token == len(turn.entries) * chunk_tokens, (save.first_token, turn.entries)
        parent = turn.entries[-1].key if turn.entries else turn.root
        keys = list(save.keys or turn.namespace.keys(save.tokens, parent))
        counts = [chunk_tokens] * len(keys)
        if rest := len(save.tokens) % chunk_tokens:
            keys.append(turn.namespace.tail_key(save.tokens[-rest:], keys[-1] if keys else parent))
            counts.append(rest)
        batch_chunks = max(1, BATCH_BYTES_MAX // self.geometry.shard_bytes)
        for start in range(0, len(keys), batch_chunks):
            batch = slice(start, start + batch_chunks)
            first_token = save.first_token + start * chunk_tokens
            fine = self._save_batch(
                save, keys[batch], counts[batch], first_token, keys[start - 1] if start else parent
            )
            for index, (key, count) in enumerate(zip(keys[batch], counts[batch], strict=True)):
                if turn.whole and fine[index]:
                    turn.entries.append(SessionEntry(key, first_token + index * chunk_tokens, count))
                else:
                    turn.whole = False
            if not turn.whole:
                left = len(keys[start + batch_chunks :])
                with self._changed:
                    self.counters["chunks_dropped"] += left
                return

    def _save_batch(
        self, save: _Save, keys: list[ChunkKey], counts: list[int], first_token: int, parent: ChunkKey
    ) -> list[bool]:
        """Per key: whether its chunk is in the store now."""
        chunk_tokens = self.geometry.chunk_tokens
        committed = False
        results: Sequence[GrantResult] = ()
        try:
            with save.turn.namespace.write(
                keys,
                parent=parent,
                token_counts=counts,
                derived=save.derived,
                maker=self.maker,
                timeout_s=self._timeout_s,
            ) as batch:
                results = batch.results
                for index in batch.granted:
                    np.copyto(batch.buffer(index), self._shard(save, first_token + index * chunk_tokens))
                    batch.written(index)
                committed = self._commit(batch, save.turn.namespace, keys)
            already = [n for n, result in enumerate(results) if result is GrantResult.ALREADY]
            self._audit(save, {keys[n]: first_token + n * chunk_tokens for n in already})
        except StoreError as error:
            log.info("not saved: %s", error)
        fine = [
            result in IN_STORE and (committed or result is not GrantResult.GRANTED) for result in results
        ] or [False] * len(keys)
        with self._changed:
            saved = sum(result is GrantResult.GRANTED for result in results) if committed else 0
            self.counters["chunks_saved"] += saved
            self.counters["bytes_saved"] += saved * self.geometry.shard_bytes
            self.counters["chunks_already"] += sum(fine) - saved
            self.counters["chunks_refused"] += len(keys) - sum(fine)
        return fine

    def _commit(self, batch: WriteBatch, namespace: Namespace, keys: Sequence[ChunkKey]) -> bool:
        """Of KV that nobody has vouched for yet, also where nobody answers: it may have been done."""
        with self._changed:
            if mine := [keys[index] for index in batch.granted]:
                self._unverified.append((time.monotonic(), namespace, mine))
        return self._committed(batch)

    def _committed(self, batch: WriteBatch) -> bool:
        if not batch.granted:
            return True
        outcome = batch.commit(timeout_s=self._timeout_s)
        if not outcome.ok:
            log.info("not saved: %s", outcome.error)
        return bool(outcome.ok)

    def _audit(self, save: _Save, already: dict[ChunkKey, int]) -> None:
        """Tell the store what our bytes of some chunks are; `already`: first token by key. Keys are digests, so that
        all workers pick the same chunks."""
        if not self._audit_every:
            return
        checksums = {}
        for key, first_token in already.items():
            if int.from_bytes(key[:4], "little") % self._audit_every == 0:
                checksums[key] = xxhash.xxh3_64_intdigest(self._shard(save, first_token).data)
        if checksums:
            differ = save.turn.namespace.report_duplicates(
                list(checksums), list(checksums.values()), maker=self.maker, timeout_s=self._timeout_s
            )
            with self._changed:
                self.counters["chunks_compared"] += len(checksums)
                self.counters["chunks_differed"] += differ

    def _shard(self, save: _Save, first_token: int) -> npt.NDArray[np.uint8]:
        assert save.shards is not None
        return save.shards.shard((first_token - save.first_token) // self.geometry.chunk_tokens)

    def _save_choice(self, save: ChoiceSave) -> None:
        saved = False
        try:
            with save.namespace.write(
                [save.key],
                token_counts=[self.geometry.chunk_tokens],
                derived=True,
                maker=self.maker,
                timeout_s=self._timeout_s,
            ) as batch:
                for index in batch.granted:
                    np.copyto(batch.buffer(index), save.record)
                    batch.written(index)
                saved = batch.results[0] in IN_STORE and self._committed(batch)
        except StoreError as error:
            log.info("choice not saved: %s", error)
        with self._changed:
            self.counters["choices_saved" if saved else "choices_dropped"] += 1

    def _save_parts(self, save: PartSave) -> None:
        """In batches that fit into staging memory; each is visible as a whole or not at all."""
        assert save.shards is not None
        most = max(1, BATCH_BYTES_MAX // self.geometry.shard_bytes)
        whole, mine = True, 0
        try:
            save.shards.wait()
            for exact, alike in groupby(save.kept, key=lambda kept: kept.exact):
                group = list(alike)
                for start in range(0, len(group), most):
                    batch = group[start : start + most]
                    saved = self._save_part_batch(save, batch, exact=exact) if whole else -1
                    whole = whole and saved >= 0
                    mine += max(saved, 0)
        except DeviceFailed as error:
            log.warning("not saved: %s", error)
            whole = False
        whole = whole and self._own_parts(save)
        with self._changed:
            self.counters["chunks_saved"] += mine
            self.counters["bytes_saved"] += mine * self.geometry.shard_bytes
            self.counters["modules_saved" if whole else "modules_dropped"] += 1
        save.saved.set()

    def _save_part_batch(self, save: PartSave, kept: Sequence[Kept], *, exact: bool) -> int:
        """How many were not there already; -1: not all of them are there now."""
        try:
            with save.namespace.write(
                [one.key for one in kept],
                parents=[one.parent for one in kept],
                token_counts=[one.count for one in kept],
                derived=not exact,
                maker=self.maker,
                timeout_s=self._timeout_s,
            ) as batch:
                for index in batch.granted:
                    self._fill_part(batch.buffer(index), save, kept[index])
                    batch.written(index)
                keys = [one.key for one in kept]
                there = all(result in IN_STORE for result in batch.results)
                return len(batch.granted) if there and self._commit(batch, save.namespace, keys) else -1
        except StoreError as error:
            log.info("module not saved: %s", error)
        return -1

    def _fill_part(self, out: npt.NDArray[np.uint8], save: PartSave, kept: Kept) -> None:
        """A chunk of its own out of the slots that it fills in those of the prompt."""
        assert save.shards is not None
        geometry, size = self.geometry, self.geometry.chunk_tokens
        out[...] = 0
        at, done = kept.first - save.first, 0
        while done < kept.count:
            number, inside = divmod(at + done, size)
            count = min(size - inside, kept.count - done)
            shard = save.shards.shard(number)
            filled = min(size, save.count - number * size)
            for layer in range(geometry.layers):
                source = geometry.window(shard, layer, filled)[:, :, inside : inside + count]
                geometry.window(out, layer, kept.count)[:, :, done : done + count] = source
            done += count

    def _own_parts(self, save: PartSave) -> bool:
        """The owner's manifest names them, so that they are not lost one by one."""
        entries = [SessionEntry(one.key, one.position, one.count, approximate=True) for one in save.kept]
        if not save.owner:
            return True
        try:
            for _ in range(MANIFEST_TRIES):
                info = save.namespace.get_session(save.owner, timeout_s=self._timeout_s)
                if info is not None and list(info.entries) == entries:
                    return True
                try:
                    save.namespace.update_session(
                        save.owner,
                        expected_version=info.version if info is not None else 0,
                        keep=0,
                        append=entries[:KEYS_PER_REQUEST_MAX],
                        timeout_s=self._timeout_s,
                    )
                except Conflict:  # another worker was faster
                    continue
                return True
        except StoreError as error:
            log.info("manifest of module not updated: %s", error)
        return False

    def _publish(self, turn: TurnSave) -> None:
        """The session's manifest becomes the history that is in the store, as far as one request can name it."""
        info, entries = turn.base, turn.entries
        if not turn.session:
            return
        if turn.layout is not None:
            entries = turn.layout.manifest(entries, turn.namespace.salt, turn.chunk_tokens)
        entries = entries[:KEYS_PER_REQUEST_MAX]
        for _ in range(MANIFEST_TRIES):
            old = info.entries if info is not None else ()
            keep = _common(old, entries)
            if keep == len(entries) and (keep == len(old) or not turn.whole):
                return  # nothing new; and what is behind a hole may yet be reached by the next turn
            try:
                turn.namespace.update_session(
                    turn.session,
                    expected_version=info.version if info is not None else 0,
                    keep=keep,
                    append=entries[keep:],
                    timeout_s=self._timeout_s,
                )
            except Conflict:  # another worker was faster, or the daemon was away when this turn asked
                info = turn.namespace.get_session(turn.session, timeout_s=self._timeout_s)
            except Precondition:  # some chunk is gone again
                usable = turn.namespace.match(
                    [entry.key for entry in entries], timeout_s=self._timeout_s
                ).usable
                entries = entries[:usable]
                if turn.layout is None:
                    del turn.entries[usable:]
            except StoreError as error:
                log.info("manifest of session not updated: %s", error)
                break
            else:
                with self._changed:
                    self.counters["manifests"] += 1
                return
        with self._changed:
            self.counters["manifests_dropped"] += 1

    def _drop(self, save: _Save | PartSave | ChoiceSave) -> None:
        """Caller holds the lock."""
        if save.shards is not None:
            save.shards.release()
        if isinstance(save, PartSave):
            self.counters["modules_dropped"] += 1
            save.saved.set()
        elif isinstance(save, ChoiceSave):
            self.counters["choices_dropped"] += 1
        elif save.tokens:
            self.counters["chunks_dropped"] += -(-len(save.tokens) // self.geometry.chunk_tokens)
        else:
            self.counters["manifests_dropped"] += 1
            save.turn.saved.set()

    def _bytes(self, save: _Save | PartSave | ChoiceSave) -> int:
        if isinstance(save, ChoiceSave):
            return save.record.nbytes
        tokens = save.count if isinstance(save, PartSave) else len(save.tokens)
        return tokens * self.geometry.token_bytes * self.geometry.layers


def _common(old: Sequence[SessionEntry], new: Sequence[SessionEntry]) -> int:
    count = 0
    while count < min(len(old), len(new)) and old[count] == new[count]:
        count += 1
    return count
