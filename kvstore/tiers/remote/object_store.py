"""REMOTE in an object store (S3, GCS, Azure) or a file system that nodes share, by `obstore`: packs of chunks.

    <prefix>/data/<place>/<name>       a pack (`packs.py`); <name> is that of its last key
    <prefix>/forgotten/<count>         what was forgotten at that count (`tombstones.py`): made once, never changed

A forget creates the object with the next count, which one node succeeds in; a reader that knows all up to a count asks
for the next one. Nothing is listed but at the start, when garbage is collected, and after an older copy was put back:
then a node tells all that it knows at a count above all, and again at the count that follows the copy's last one. So
whoever knows no more than the copy reads it there, and goes on behind the count that the object itself says.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from threading import Thread
from typing import Any, TypeVar

import numpy as np
import obstore
import obstore.exceptions
import obstore.store

from kvstore.core.events import FetchChunks, FetchedChunk, LookUpChunks, StoreChunks
from kvstore.tiers.base import SlotMemory
from kvstore.tiers.remote import packs, records, tombstones
from kvstore.tiers.remote.backend import Book, StoreFull, StoreProblem, describe, judge, sealed, view
from kvstore.tiers.remote.encryption import Cipher
from kvstore.tiers.remote.tombstones import Forgotten, Tombstones
from kvstore.types import ChunkKey, Found

log = logging.getLogger(__name__)

AT_ONCE = 32
"""Requests of one call that are under way together."""
ASK_ALL = 16
"""Keys up to which a look-up asks for each pack at once; of more, first for those of the beginning."""
KNOWN_CHECKED_S = 1.0
"""How often it is looked whether the store still has what this node knows."""
FORGETS_PER_CATCH_UP_MAX = 100_000
DAMAGED_PATIENCE_S = 30.0
"""What was forgotten at a count, and cannot be read, is written again by a node that has read it, if there is one by
then. Else EVERYTHING counts as forgotten."""
GAPS_LOOKED_FOR_S = 60.0
"""How often it is looked whether the next count is missing, though others follow."""
FULL = ("StorageFull", "No space left", "QuotaExceeded", "InsufficientStorage", "os error 28", "os error 122")
T = TypeVar("T")
Where = tuple[str, tuple[tuple[int, int], ...]]
"""(object, (start, length) of each shard's record)"""


class Damaged:
    """The object of a forget that cannot be read."""


class ObjectStore:
    def __init__(
        self,
        url: str,
        book: Book,
        *,
        salt: bytes,
        ttl_s: int,
        timeout_s: float,
        store: Any = None,
        cipher: Cipher | None = None,
    ) -> None:
        self._book = book
        self._salt = salt
        self._cipher = cipher
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s
        self._prefix = records.prefix_of(salt)
        self._store = store if store is not None or url.startswith("file://") else _open(url, timeout_s)
        self._url = url
        self._opening = threading.Lock()
        self._opened: Future[Any] | None = None
        self._mine = threading.local()
        self._runners: list[asyncio.Runner] = []
        self._listed = False
        self._gaps_looked_for_at = 0.0
        self._unreadable: dict[int, float] = {}
        """Counts whose object is damaged, or gone, since when."""
        self._checked_at = 0.0
        self._catching_up = threading.Lock()
        self._fetch_ms = 20.0

    def __repr__(self) -> str:
        return f"ObjectStore({self._prefix})"

    # --------------------------------------------------------------------------------------------------------- calls

    def _run(self, deadline: float, work: Callable[[], Awaitable[T]]) -> T:
        """On this thread's own loop of asyncio, no longer than until the deadline. Raises StoreProblem."""
        if self._store is None:
            self._open_folder(deadline)
        runner: asyncio.Runner | None = getattr(self._mine, "runner", None)
        if runner is None:
            runner = self._mine.runner = asyncio.Runner()
            self._runners.append(runner)

        async def bounded() -> T:
            return await asyncio.wait_for(work(), max(0.001, deadline - time.monotonic()))

        try:
            return runner.run(bounded())
        except TimeoutError:
            raise StoreProblem("it did not answer before the deadline") from None
        except (obstore.exceptions.BaseError, OSError, NotImplementedError, ValueError) as problem:
            text = str(problem).split("Debug source")[0].strip()
            if any(word in str(problem) for word in FULL):
                raise StoreFull(text) from None
            raise StoreProblem(f"{type(problem).__name__}: {text}"[:500]) from None

    def _open_folder(self, deadline: float) -> None:
        """A file system may be away, or hang, when the daemon starts: its folder is opened when it is first used, by a
        thread that may be left behind. Raises StoreProblem."""
        with self._opening:
            opened = self._opened
            if opened is None or (opened.done() and opened.exception() is not None):
                opened = self._opened = Future()
                Thread(target=_open_into, args=(opened, self._url, self._timeout_s), daemon=True).start()
        try:
            self._store = opened.result(max(0.001, deadline - time.monotonic()))
        except TimeoutError:
            raise StoreProblem(
                "its folder was not opened before the deadline: the file system hangs"
            ) from None
        except Exception as problem:
            folder = self._url.removeprefix("file://")
            raise StoreProblem(f"the folder {folder} cannot be used: {problem}") from None

    async def _all(self, work: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
        turns = asyncio.Semaphore(AT_ONCE)

        async def one(each: Callable[[], Awaitable[T]]) -> T:
            async with turns:
                return await each()

        return list(await asyncio.gather(*map(one, work)))

    def _path(self, digest: bytes, key: ChunkKey) -> str:
        place = records.place_of(digest, self._salt)
        return f"{self._prefix}/data/{place}/{records.name_of(digest, key, 0, self._salt)}"

    async def _head(self, path: str) -> list[packs.Piece] | None:
        """What is in a pack; None: it is not there."""
        try:
            data = await obstore.get_range_async(self._store, path, start=0, end=packs.HEADER_BYTES_MAX)
        except (FileNotFoundError, obstore.exceptions.NotFoundError):
            return None
        return packs.read_header(memoryview(data))

    # ------------------------------------------------------------------------------------------------------- look-ups

    def look_up(self, effect: LookUpChunks, deadline: float) -> Sequence[Found | None]:
        found: dict[ChunkKey, Where] = self._run(deadline, lambda: self._find(effect.digest, effect.keys))
        answers: list[Found | None] = []
        for key in effect.keys:
            where = found.get(key)
            size = sum(length for _, length in where[1]) if where else 0
            answers.append(Found(size, self._fetch_ms, where=where) if where else None)
        return answers

    async def _find(self, digest: bytes, keys: Sequence[ChunkKey]) -> dict[ChunkKey, Where]:
        found: dict[ChunkKey, Where] = {}
        cuts = [number for number, key in enumerate(keys) if packs.ends_pack(key)]
        if len(keys) <= ASK_ALL:
            await self._ask(digest, keys, found)
            return found
        first = (cuts[0] if cuts else len(keys) - 1) + 1
        await self._ask(digest, keys[: min(first, packs.CHUNKS_MAX)], found)
        if keys[0] not in found:
            return found  # who asks for a prefix can use nothing behind it
        await self._ask(digest, [keys[number] for number in cuts[1:]], found)
        missing = next((number for number, key in enumerate(keys) if key not in found), len(keys))
        behind = next((number for number in cuts if number >= missing), len(keys) - 1) + 1
        await self._ask(digest, keys[missing : min(behind, missing + packs.CHUNKS_MAX)], found)
        return found

    async def _ask(self, digest: bytes, ends: Sequence[ChunkKey], found: dict[ChunkKey, Where]) -> None:
        """Look into the packs that end with these keys."""
        paths = [self._path(digest, key) for key in ends if key not in found]

        def head(path: str) -> Callable[[], Awaitable[list[packs.Piece] | None]]:
            return lambda: self._head(path)

        heads = await self._all(list(map(head, paths)))
        for path, pieces in zip(paths, heads, strict=True):
            shards: dict[ChunkKey, dict[int, tuple[int, int]]] = {}
            for piece in pieces or ():
                shards.setdefault(piece.key, {})[piece.shard] = (piece.start, piece.length)
            for key, places in shards.items():
                if sorted(places) == list(range(len(places))):
                    found[key] = path, tuple(places[shard] for shard in range(len(places)))

    # ------------------------------------------------------------------------------------------------------ transfers

    def fetch(
        self, effect: FetchChunks, memory: SlotMemory, deadline: float
    ) -> tuple[Sequence[FetchedChunk], int]:
        began = time.monotonic()
        shards = len(effect.targets) // len(effect.keys)
        wheres = list(effect.wheres)
        if None in wheres:
            again = self._run(deadline, lambda: self._find(effect.digest, effect.keys))
            wheres = [where or again.get(key) for key, where in zip(effect.keys, wheres, strict=True)]
        data = self._run(deadline, lambda: self._read(wheres))
        self._catch_up(deadline)

        def read(number: int, shard: int) -> memoryview | None:
            found = data.get(number)
            return found[shard] if found is not None and len(found) == shards else None

        count = self._book.seen[0]
        chunks = [
            judge(effect, number, read, memory, self._book, self._salt, self._cipher)
            for number in range(len(effect.keys))
        ]
        took_ms = 1_000 * (time.monotonic() - began) / len(effect.keys)
        self._fetch_ms += 0.1 * (took_ms - self._fetch_ms)
        return chunks, count

    async def _read(self, wheres: Sequence[object]) -> dict[int, list[memoryview]]:
        """Records by number of the key, of those that are there."""
        of_path: dict[str, list[int]] = {}
        for number, where in enumerate(wheres):
            if isinstance(where, tuple):
                of_path.setdefault(where[0], []).append(number)

        async def ranges(path: str, numbers: list[int]) -> dict[int, list[memoryview]]:
            places = [place for number in numbers for place in wheres[number][1]]  # type: ignore[index]
            try:
                parts = await obstore.get_ranges_async(
                    self._store,
                    path,
                    starts=[start for start, _ in places],
                    lengths=[length for _, length in places],
                )
            except (FileNotFoundError, obstore.exceptions.NotFoundError):
                return {}
            views = iter([memoryview(part) for part in parts])
            return {number: [next(views) for _ in wheres[number][1]] for number in numbers}  # type: ignore[index]

        found: dict[int, list[memoryview]] = {}
        for part in await asyncio.gather(*(ranges(path, numbers) for path, numbers in of_path.items())):
            found |= part
        return found

    def store(
        self, effect: StoreChunks, memory: SlotMemory, generation: int, deadline: float
    ) -> Sequence[object]:
        shards = len(effect.sources) // len(effect.keys)
        parents = [about.parent for about in effect.about]
        wheres: dict[int, Where] = {}
        puts: list[tuple[str, bytearray]] = []
        for run in packs.runs(effect.keys, parents, shards):
            path = self._path(effect.digest, effect.keys[run[-1]])
            data, placed = self._pack(effect, memory, run, shards, generation)
            puts.append((path, data))
            for number in run:
                mine = [piece for piece in placed if piece.key == effect.keys[number]]
                wheres[number] = path, tuple((piece.start, piece.length) for piece in mine)

        def put(path: str, data: bytearray) -> Callable[[], Awaitable[Any]]:
            return lambda: obstore.put_async(self._store, path, memoryview(data), use_multipart=False)

        self._run(deadline, lambda: self._all([put(path, data) for path, data in puts]))
        self._catch_up(deadline)  # for the generation of what comes next
        return tuple(wheres[number] for number in range(len(effect.keys)))

    def _pack(
        self, effect: StoreChunks, memory: SlotMemory, run: range, shards: int, generation: int
    ) -> tuple[bytearray, list[packs.Piece]]:
        heads: list[bytes] = []
        payloads: list[Any] = []
        lengths: list[tuple[ChunkKey, int, int]] = []
        for number in run:
            for shard in range(shards):
                payload = view(memory, effect.sources[number * shards + shard])
                about = describe(effect, number, shard, generation)
                head, body = sealed(about, payload, self._salt, self._cipher)
                heads.append(head)
                payloads.append(np.frombuffer(body, np.uint8))
                lengths.append((effect.keys[number], shard, len(head) + len(body)))
        top, placed = packs.header(lengths)
        data = bytearray(placed[-1].start + placed[-1].length)
        data[: len(top)] = top
        room = np.frombuffer(data, np.uint8)
        for piece, head, payload in zip(placed, heads, payloads, strict=True):
            data[piece.start : piece.start + len(head)] = head
            room[piece.start + len(head) : piece.start + piece.length] = payload
        return data, placed

    def drop(self, digest: bytes, keys: Sequence[ChunkKey], deadline: float) -> None:
        """Packs go with their last key; the others of a pack were put there with it, and go about then."""
        self._run(deadline, lambda: self._delete([self._path(digest, key) for key in keys]))

    async def _delete(self, paths: Sequence[str]) -> None:
        async def one(path: str) -> None:
            with suppress(FileNotFoundError, obstore.exceptions.NotFoundError):
                await obstore.delete_async(self._store, path)

        def delete(path: str) -> Callable[[], Awaitable[None]]:
            return lambda: one(path)

        await self._all(list(map(delete, paths)))

    # -------------------------------------------------------------------------------------------------------- forgets

    def _forgotten(self, count: int) -> str:
        return f"{self._prefix}/forgotten/{count:012d}"

    def forget(self, forgotten: Sequence[Forgotten], deadline: float) -> None:
        self._catch_up(deadline)
        self._add(forgotten, deadline)
        named = [self._path(digest, key) for digest, key, maker in forgotten if key and not maker]
        self._run(deadline, lambda: self._delete(named))
        for digest, key, maker in forgotten:
            if not key and not maker:
                place = f"{self._prefix}/data/{records.place_of(digest, self._salt)}"
                try:
                    self._run(deadline, partial(self._delete_under, place, None))
                except StoreProblem as problem:  # the tombstone stands, and the objects expire
                    log.warning("deleting a namespace from the REMOTE store: %s", problem)

    def _add(self, forgotten: Sequence[Forgotten], deadline: float) -> None:
        """Create the object of the next count; somebody else may come first."""
        while True:
            count = self._book.seen[0] + 1
            mine = Tombstones(count, head=f"{random.getrandbits(60):015x}")
            for one in forgotten:
                mine.add(one, count)
            if not self._create(count, mine, deadline):
                self._catch_up(deadline)
                if self._book.seen[0] < count:
                    raise StoreProblem(f"{self._forgotten(count)} is there, and cannot be read")
                continue
            self._book.learn([(one, count) for one in forgotten], count, mine.head, own=True)
            return

    def catch_up(self, deadline: float) -> None:
        self._catch_up(deadline)

    def _catch_up(self, deadline: float) -> None:
        """Read the forgets that this node does not know. Raises StoreProblem if the store is not the one that the node
        knew, after it was told what it lacks."""
        with self._catching_up:
            known, head = self._book.seen
            if known and time.monotonic() - self._checked_at > KNOWN_CHECKED_S:
                there = self._run(deadline, lambda: self._get_forgotten(known))
                if isinstance(there, Damaged):
                    self._write_again(known, deadline)
                elif there is None or there.head != head:
                    self._tell_again(known, deadline)
                self._checked_at = time.monotonic()
            if not self._listed:
                self._learn_all(self._run(deadline, self._list_forgotten), deadline)
                self._listed = True
            for _ in range(FORGETS_PER_CATCH_UP_MAX):
                count = self._book.seen[0] + 1
                more = self._run(deadline, partial(self._get_forgotten, count))
                if more is None and not self._is_passed_over(count, deadline):
                    self._unreadable.clear()
                    return
                self._learn(count, more, deadline)

    def _is_passed_over(self, count: int, deadline: float) -> bool:
        """Whether others follow a count that is not there: somebody removed it."""
        if time.monotonic() - self._gaps_looked_for_at < GAPS_LOOKED_FOR_S and not self._unreadable:
            return False
        self._gaps_looked_for_at = time.monotonic()
        later = [other for other in self._run(deadline, self._counts) if other > count]
        # Both may have come since: it before them.
        return bool(later) and self._run(deadline, partial(self._get_forgotten, count)) is None

    def _learn_all(
        self,
        there: Sequence[tuple[int, Tombstones | Damaged | None]],
        deadline: float,
        *,
        is_other: bool = False,
    ) -> None:
        for count, found in there:
            if found is not None:
                self._learn(count, found, deadline, is_other=is_other)

    def _learn(
        self, count: int, found: Tombstones | Damaged | None, deadline: float, *, is_other: bool = False
    ) -> None:
        """What was forgotten at this count. Raises StoreProblem while that cannot be read, and may be again."""
        if isinstance(found, Tombstones):
            self._unreadable.pop(count, None)
            self._book.learn(found.at.items(), max(count, found.count), found.head, is_other=is_other)
            return
        if count <= self._book.seen[0]:
            self._write_again(count, deadline)
            return
        since = self._unreadable.setdefault(count, time.monotonic())
        left_s = since + DAMAGED_PATIENCE_S - time.monotonic()
        what = f"{self._forgotten(count)} is {'gone' if found is None else 'damaged'}"
        if left_s > 0:
            raise StoreProblem(
                f"{what}: nothing is served before a node that has read it writes it again, or {left_s:.0f} s have"
                " passed; then all that was stored before it counts as forgotten"
            )
        del self._unreadable[count]
        log.error("%s: all that was stored before it counts as forgotten, here and in the REMOTE store", what)
        said = Tombstones(count, head=f"{random.getrandbits(60):015x}")
        said.add(tombstones.EVERYTHING, count)
        self._overwrite(count, said, deadline)
        self._book.learn(said.at.items(), count, said.head)

    def _write_again(self, count: int, deadline: float) -> None:
        """A damaged object of which this node knows what it said."""
        known, head = self._book.seen
        said = Tombstones(count, head=head if count == known else f"{random.getrandbits(60):015x}")
        for one, at in self._book.forgotten_at(count):
            said.add(one, at)
        log.warning("%s was damaged, and is written again", self._forgotten(count))
        self._overwrite(count, said, deadline)

    def _overwrite(self, count: int, said: Tombstones, deadline: float) -> None:
        path, data = self._forgotten(count), tombstones.pack(said)
        self._run(deadline, lambda: obstore.put_async(self._store, path, data, use_multipart=False))

    def _tell_again(self, known: int, deadline: float) -> None:
        """The store was wiped, an older copy was put back, or this node was away for longer than forgets are kept."""
        is_told = False
        while not is_told:
            there = self._run(deadline, self._list_forgotten)
            counts = [count for count, _ in there]
            self._learn_all(there, deadline, is_other=True)
            # Also what stood there at a count that records have passed meanwhile.
            ours = self._book.everything()
            if counts and counts[0] > known + 1:
                self._book.learn([(tombstones.EVERYTHING, counts[0])], *self._book.seen)
            count = self._book.seen[0] + 1
            mine = Tombstones(count, head=f"{random.getrandbits(60):015x}")
            for one in ours:
                mine.add(one, count)
            # Who knows no more than the copy asks for the count that follows, and is led on to this one.
            follows = counts[-1] + 1 if counts else 1
            places = [follows, count] if follows < count else [count]
            is_told = all(self._create(place, mine, deadline) for place in places)
        self._book.learn([(one, count) for one in ours], count, mine.head, own=True)
        raise StoreProblem(
            f"the store was wiped, or is an older copy: it lacks what this node knew of {known} forgets; told again"
        )

    def _create(self, count: int, said: Tombstones, deadline: float) -> bool:
        """False: somebody else came first."""
        create = partial(
            obstore.put_async, self._store, self._forgotten(count), tombstones.pack(said), mode="create"
        )
        try:
            self._run(deadline, create)
        except StoreProblem as problem:
            if "AlreadyExists" not in str(problem) and "Precondition" not in str(problem):
                raise
            return False
        return True

    async def _get_forgotten(self, count: int) -> Tombstones | Damaged | None:
        try:
            got = await obstore.get_async(self._store, self._forgotten(count))
        except (FileNotFoundError, obstore.exceptions.NotFoundError):
            return None
        return tombstones.unpack(bytes(await got.bytes_async())) or Damaged()

    async def _counts(self) -> list[int]:
        """In their order; they may begin anywhere, for old ones are removed."""
        counts: list[int] = []
        async for page in obstore.list(self._store, prefix=f"{self._prefix}/forgotten"):
            for entry in page:
                name = entry["path"].rpartition("/")[2]
                if name.isascii() and name.isdigit():
                    counts.append(int(name))
        counts.sort()
        return counts

    async def _list_forgotten(self) -> list[tuple[int, Tombstones | Damaged | None]]:
        """All that is there, by count."""
        counts = await self._counts()

        def get(count: int) -> Callable[[], Awaitable[Tombstones | Damaged | None]]:
            return lambda: self._get_forgotten(count)

        return list(zip(counts, await self._all(list(map(get, counts))), strict=True))

    async def _delete_under(self, prefix: str, before: datetime | None) -> None:
        """What is there, or what is older."""
        async for page in obstore.list(self._store, prefix=prefix):
            old = [entry["path"] for entry in page if before is None or entry["last_modified"] < before]
            await self._delete(old)

    def tidy(self, deadline: float) -> None:
        """What is older than its time to live goes, whoever put it there, by the store's clock."""
        now = self._run(deadline, self._now)
        old, older = now - timedelta(seconds=self._ttl_s), now - timedelta(seconds=2 * self._ttl_s)
        self._run(deadline, lambda: self._delete_under(f"{self._prefix}/data", old))
        self._run(deadline, lambda: self._tidy_forgotten(older))

    async def _now(self) -> datetime:
        """When the store says that an object was written now: a node's own clock may be wrong by days."""
        path = f"{self._prefix}/clock"
        await obstore.put_async(self._store, path, b"", use_multipart=False)
        return (await obstore.head_async(self._store, path))["last_modified"]

    async def _tidy_forgotten(self, before: datetime) -> None:
        newest = self._forgotten(self._book.seen[0])
        async for page in obstore.list(self._store, prefix=f"{self._prefix}/forgotten"):
            old = [
                entry["path"]
                for entry in page
                if entry["last_modified"] < before and not entry["path"].endswith(newest)
            ]
            await self._delete(old)

    def abandon(self) -> None:
        """Nothing: `_run` ends calls by itself."""

    def close(self) -> None:
        """Connections go with the store; of a thread that is late its loop stays."""
        for runner in self._runners:
            loop = runner.get_loop()
            if not loop.is_running():  # Runner.close() would run it, inside of the daemon's own loop
                loop.close()


def _open_into(opened: Future[Any], url: str, timeout_s: float) -> None:
    try:
        opened.set_result(_open(url, timeout_s))
    except Exception as problem:
        opened.set_exception(problem)


def _open(url: str, timeout_s: float) -> Any:
    """Raises ValueError with what is wrong with it."""
    timeout = timedelta(seconds=timeout_s)
    if url.startswith("file://"):
        return obstore.store.from_url(url, mkdir=True)
    options: Any = {"timeout": timeout, "connect_timeout": timeout, "allow_http": True}
    retry: Any = {"max_retries": 0, "retry_timeout": timeout}
    return obstore.store.from_url(url, client_options=options, retry_config=retry)
