"""The index of the SSD tier: an LMDB environment in `<ssd_dir>/index`, tables and values as `format.py` says.

One thread writes (the index thread of `tiers/ssd.py`), one transaction a batch, on the disk when it returns. It is read
once, at the start, in short transactions: a long one would keep LMDB from reusing pages. It holds no lock against other
processes; whoever opens it holds that of the directory.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, cast

import lmdb
import numpy as np
import numpy.typing as npt

from kvstore.core.events import (
    Bar,
    Heeded,
    IndexUsage,
    NamespaceRecord,
    SessionEntry,
    SessionRecord,
    WriteIndex,
)
from kvstore.errors import ConfigError, Exhausted, StoreError, Unavailable
from kvstore.layout import NamespaceSpec
from kvstore.tiers import format
from kvstore.tiers.disk_port import Disk, describe, disk_result
from kvstore.tiers.encryption import FIELD, DiskCipher
from kvstore.tiers.format import FORMAT_VERSION, Defect
from kvstore.types import KEY_BYTES_MAX, ChunkKey, DiskResult, SlabId

log = logging.getLogger(__name__)

DATA_FILE = "data.mdb"
LOCK_FILE = "lock.mdb"
LOCK_FILE_BYTES = 8192
"""What LMDB's table of READERS_MAX readers needs, and some."""
TABLES = ("meta", "slabs", "namespaces", "chunks", "sessions")
READERS_MAX = 8
"""Slots for readers in LMDB's lock file: ours, and a person with mdb_stat."""
RESERVE_SHARE = 8
"""One part in so many of the index is for deletions alone, which need free pages too: an index full to the last could
not be emptied. What counts are pages in use, not the length of the file."""
PIECE_SHARE = 8
"""One transaction that writes changes one part in so many of the pages kept for deletions, about."""
PIECE_ROWS_MIN = 16
SESSION_ENTRY_BYTES = 48
"""Of a session's rows, about."""
SPARSE_SHARE = 4
"""An index that uses at most one part in so many is mostly empty."""
META_PAGES = 3
"""Those that every file has: two with the roots, and the names of the tables."""
CHUNK_ROWS = 65_536
SESSION_ROWS = 1_024
"""Rows read in one transaction at the start."""
START_EMPTY = (
    "kvctl check --fix keeps what can be read; or remove the directory to start with an empty SSD tier"
)

Table: TypeAlias = "lmdb._Database"
Outcome = tuple[DiskResult, str]
"""And why, "" if it is OK."""


class SlabRow(NamedTuple):
    slab: SlabId
    slot_bytes: int
    slots: int


@dataclass(frozen=True, slots=True)
class IndexRows:
    """n chunks of one namespace as the index has them; arrays of two dimensions are [n, shards]."""

    namespace: int
    keys: list[ChunkKey]
    token_count: npt.NDArray[np.int32]
    flags: npt.NDArray[np.int32]
    maker: list[bytes]
    slab: npt.NDArray[np.int64]
    slot: npt.NDArray[np.int64]
    generation: npt.NDArray[np.uint64]
    checksum: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, slots=True)
class _Open:
    env: lmdb.Environment
    meta: Table
    slabs: Table
    namespaces: Table
    chunks: Table
    sessions: Table


class Transaction:
    """One that writes. Each call is announced to the disk port, so that tests can have it fail."""

    __slots__ = ("_disk", "raw")

    def __init__(self, raw: lmdb.Transaction[bytes], disk: Disk) -> None:
        self.raw = raw
        self._disk = disk

    def get(self, key: bytes, table: Table) -> bytes | None:
        self._disk.index("get")
        return self.raw.get(key, db=table)

    def put(self, key: bytes, value: bytes, table: Table) -> None:
        self._disk.index("put")
        self.raw.put(key, value, db=table)

    def delete(self, key: bytes, table: Table) -> None:
        self._disk.index("delete")
        self.raw.delete(key, db=table)

    def delete_range(self, first: bytes, prefix: bytes, table: Table) -> None:
        """The rows from `first` on that begin with `prefix`."""
        self._disk.index("delete")
        with self.raw.cursor(db=table) as cursor:
            found = cursor.set_range(first)
            while found and cursor.key().startswith(prefix):
                found = cursor.delete()


class _Full(Exception):
    """A transaction that writes would leave too little for those that delete."""


class Index:
    """After a failed transaction nothing of it is in the index, and the next one is tried on a fresh environment."""

    def __init__(
        self,
        path: str,
        *,
        bytes_max: int,
        direct: bool,
        slab_bytes: int,
        disk: Disk,
        cipher: DiskCipher | None = None,
    ) -> None:
        """Opens or creates; the boot count is one higher afterwards. `bytes_max` is a hard cap of the data file, unless
        that is larger already: what LMDB once had it keeps.

        Raises ConfigError (a newer format, another layout, a damaged index), Exhausted (the disk is full) or
        Unavailable (it fails); nothing is open then, and nothing but the boot count was changed."""
        self._path = path
        self.bytes_max = bytes_max
        self._disk = disk
        self._cipher = cipher
        self._open: _Open | None = None
        self.boot_count = 0
        self.next_slab = 0
        self.usage = IndexUsage(bytes_max)
        """As of the last transaction."""
        self._page_bytes = 4096
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                self.bytes_max = max(bytes_max, os.stat(os.path.join(path, DATA_FILE)).st_size)
            self._preallocate_lock_file()
            self._open = self._open_or_create({"direct": int(direct), "slab_bytes": slab_bytes})
            self._preallocate()
        except lmdb.Error as problem:
            self.close()
            raise _cannot_open(path, problem) from None
        except OSError as problem:
            self.close()
            raise _unusable(path, problem) from None
        except StoreError:
            self.close()
            raise

    def close(self) -> None:
        """By the thread that writes, and no other: LMDB's write lock belongs to it."""
        if self._open is not None:
            self._open.env.close()
            self._open = None

    # ---------------------------------------------------------------------------------------------------- writing

    def write(self, batch: WriteIndex) -> Outcome:
        """What is to go first, in transactions of its own; then what is to be written, which leaves free what deletions
        need. OK: all of it is on the disk. After a failure any part may be; NO_SPACE with `usage.full` says that the
        index is full."""
        self.usage = replace(self.usage, full=False)
        outcome = self._delete_batch(batch) if batch.deletes else (DiskResult.OK, "")
        pieces = self._pieces(batch) if batch.writes else ()
        for piece in pieces:
            if outcome[0] != DiskResult.OK:
                break
            outcome = self._write_piece(piece)
        return outcome

    def _write_piece(self, piece: WriteIndex) -> Outcome:
        def work(to: _Open, txn: Transaction) -> None:
            _write(to, txn, piece)

        outcome = self._transact(work, grows=True)
        if self.usage.full and self.usage.used * 2 < self.usage.bytes_max and self._recycle():
            outcome = self._transact(work, grows=True)
        return outcome

    def _recycle(self) -> bool:
        """Pages that the last transactions gave back can be used by the next but one: let two pass."""
        recycled = all(self.probe()[0] == DiskResult.OK for _ in range(2))
        self.usage = replace(self.usage, full=False)
        return recycled

    def _delete_batch(self, batch: WriteIndex) -> Outcome:
        outcome = self._transact(lambda to, txn: _delete(to, txn, batch))
        # In an index that is full, deletions all over it need more pages than are left: fewer at a time then, because
        # the pages that one transaction gives back are there for the next but one.
        if not self.usage.full:
            return outcome
        if len(batch.chunks_deleted) + len(batch.sessions_deleted) <= 1:
            return self._transact(lambda to, txn: _delete(to, txn, batch)) if self._recycle() else outcome
        self.usage = replace(self.usage, full=False)
        if outcome[0] == DiskResult.NO_SPACE:
            for half in _halves(batch):
                outcome = self._delete_batch(half)
                if outcome[0] != DiskResult.OK:
                    break
        return outcome

    def _pieces(self, batch: WriteIndex) -> Iterator[WriteIndex]:
        """What is written in one transaction each. It moves the pages that it changes to other places, and those that
        it moved them from can be used by the next but one: together they must fit in what is kept for deletions. In an
        index that is mostly empty there is room enough."""
        rows_max = max(PIECE_ROWS_MIN, self._reserved_bytes // self._page_bytes // PIECE_SHARE)
        if self.usage.used * SPARSE_SHARE <= self.bytes_max:
            rows_max = max(rows_max, len(batch.chunks) + 1)
        first = batch.chunks[:rows_max]
        yield WriteIndex(
            batch.op,
            (),
            namespaces=batch.namespaces,
            makers=batch.makers,
            bars=batch.bars,
            heeded=batch.heeded,
            chunks=first,
        )
        for start in range(rows_max, len(batch.chunks), rows_max):
            yield WriteIndex(batch.op, (), chunks=batch.chunks[start : start + rows_max])
        start, pages = 0, 0
        for end, session in enumerate(batch.sessions, 1):
            pages += 2 + len(session.entries) * SESSION_ENTRY_BYTES // self._page_bytes
            if pages >= rows_max or end == len(batch.sessions):
                yield WriteIndex(batch.op, (), sessions=batch.sessions[start:end])
                start, pages = end, 0

    def add_slab(self, slab: SlabId, slot_bytes: int, slots: int) -> Outcome:
        def work(to: _Open, txn: Transaction) -> None:
            txn.put(format.number_key(slab), format.encode_slab(slot_bytes, slots), to.slabs)
            if slab >= self.next_slab:
                _put_meta(to, txn, "next_slab", slab + 1)

        result, why = self._transact(work)
        if result == DiskResult.OK:
            self.next_slab = max(self.next_slab, slab + 1)
        return result, why

    def remove_slabs(self, slabs: Iterable[SlabId]) -> Outcome:
        return self._delete("slabs", [format.number_key(slab) for slab in slabs])

    def probe(self) -> Outcome:
        """A transaction that changes nothing of consequence."""

        def work(to: _Open, txn: Transaction) -> None:
            _put_meta(to, txn, "probe", _get_meta(to, txn, "probe") + 1)

        return self._transact(work)

    # ---------------------------------------------------------------------------------------------------- reading

    def slabs(self) -> list[SlabRow]:
        """Unreadable rows are deleted, here as below: what they named is a miss."""
        found, bad = [], []
        for key, value in self._rows("slabs", CHUNK_ROWS):
            slab = format.decode_slab(value)
            if isinstance(slab, Defect) or len(key) != 4:
                bad.append(key)
            else:
                found.append(SlabRow(SlabId(int.from_bytes(key, "big")), *slab))
        self._drop("slabs", bad)
        # The count has no seal; these rows have.
        self.next_slab = max(self.next_slab, 1 + max((row.slab for row in found), default=-1))
        return found

    def namespaces(self) -> list[NamespaceRecord]:
        found, bad = [], []
        for key, value in self._rows("namespaces", CHUNK_ROWS):
            namespace = format.decode_namespace(int.from_bytes(key, "big"), value)
            if isinstance(namespace, Defect) or len(key) != 4:
                bad.append(key)
            else:
                found.append(namespace)
        self._drop("namespaces", bad)
        return found

    def makers(self) -> dict[bytes, tuple[bytes, ...]]:
        """Digests that stand for several makers. An unreadable one only means that they are not recalled by name."""
        found: dict[bytes, tuple[bytes, ...]] = {}
        for key, value in self._rows("meta", CHUNK_ROWS):
            makers = format.decode_makers(value) if key.startswith(format.MAKERS_PREFIX) else Defect.RANGE
            if not isinstance(makers, Defect):
                found[key.removeprefix(format.MAKERS_PREFIX)] = makers
        return found

    def bars(self) -> list[Bar]:
        """Makers that were recalled or quarantined. One that cannot be read is let in again."""
        return [Bar(*bar) for bar in self._sealed_meta(format.BARRED_PREFIX, format.decode_barred)]

    def heeded(self) -> list[Heeded]:
        """How far each journal of forgets was carried out. Of one whose row cannot be read all is heeded."""
        return [Heeded(*each) for each in self._sealed_meta(format.HEEDED_PREFIX, format.decode_heeded)]

    def _sealed_meta(self, prefix: bytes, decode: Callable[[bytes, bytes], Any]) -> list[Any]:
        """The rows of the table meta that begin so."""
        found, bad = [], []
        for key, value in self._rows("meta", CHUNK_ROWS):
            if not key.startswith(prefix):
                continue
            row = decode(key, value)
            if isinstance(row, Defect):
                bad.append(key)
            else:
                found.append(row)
        self._drop("meta", bad)
        return found

    def sessions(self, namespaces: Iterable[int]) -> list[SessionRecord]:
        """Of these namespaces; others', and those of which a page is missing or unreadable, are deleted."""
        known = set(namespaces)
        found: list[SessionRecord] = []
        bad: list[bytes] = []
        rows = self._rows("sessions", SESSION_ROWS)
        for _, group in itertools.groupby(rows, key=lambda row: row[0][:-4]):
            pages = list(group)
            session = assemble_session(pages)
            if session is None or session.namespace not in known:
                bad += [key for key, _ in pages]
            else:
                found.append(session)
        self._drop("sessions", bad)
        return found

    def chunks(
        self, namespaces: Mapping[int, NamespaceSpec], slabs: Iterable[SlabRow], *, direct: bool
    ) -> Iterator[IndexRows]:
        """All chunks of these namespaces whose shards lie in slots of these slabs that no other chunk names; the others
        are deleted. To be read to its end before anything is written."""
        places = _Places(slabs, direct=direct)
        for keys, values in self._columns("chunks", CHUNK_ROWS):
            bad: list[bytes] = []
            start = 0
            while start < len(keys):
                number = int.from_bytes(keys[start][:4], "big")
                end = (
                    bisect_left(keys, format.number_key(number + 1), start)
                    if number + 1 < 1 << 32
                    else len(keys)
                )
                end = max(end, start + 1)  # a key that is too short sorts behind those of its number
                spec = namespaces.get(number)
                if spec is None:
                    bad += keys[start:end]
                else:
                    columns = format.decode_chunks(values[start:end], spec.shard_count)
                    lengths = np.fromiter(map(len, keys[start:end]), np.int64, end - start)
                    good = columns.sound & (lengths > 4) & (lengths <= 4 + KEY_BYTES_MAX)
                    good = places.take(good, columns.slab, columns.slot, spec.shard_bytes)
                    batch = _batch(number, keys[start:end], columns)
                    if not good.all():
                        bad += [keys[start + row] for row in np.flatnonzero(~good)]
                        batch = _select(batch, np.flatnonzero(good))
                    if len(batch):
                        yield batch
                start = end
            self._drop("chunks", bad)

    # ------------------------------------------------------------------------------------------------ the environment

    def _open_or_create(self, layout: dict[str, int]) -> _Open:
        env = self._environment()
        try:
            env.reader_check()  # readers that were killed
            with self._begin(env) as txn:
                to = _tables(env, txn.raw, create=True)
                version = _get_meta(to, txn, "format")
                if version > FORMAT_VERSION:
                    raise ConfigError(
                        f"was written by a newer kvstored, in format {version}; this one knows {FORMAT_VERSION}",
                        field="ssd_dir",
                        value=os.path.dirname(self._path),
                        remedy="run the newer version again, or name another directory",
                    )
                for name, value in layout.items() if version else ():
                    if (former := _get_meta(to, txn, name)) != value:
                        raise self._other_layout(name, former, value)
                self._check_key(to, txn)
                self.boot_count = _get_count(to, txn, "boot_count") + 1
                self.next_slab = _get_count(to, txn, "next_slab")
                _put_meta(to, txn, "format", FORMAT_VERSION)
                _put_meta(to, txn, "boot_count", self.boot_count)
                for name, value in layout.items():
                    _put_meta(to, txn, name, value)
                self._page_bytes = env.stat()["psize"]
                self.usage = self._measured(to, txn)
        except BaseException:
            env.close()
            raise
        return to

    def _check_key(self, to: _Open, txn: Transaction) -> None:
        """Whoever comes with another key than that of what is here has made a mistake: nothing is written then, and
        nothing given up. A rotation leaves the former key second."""
        directory = os.path.dirname(self._path)
        value = txn.get(format.KEY_ID, to.meta)
        former = b"" if value is None else format.decode_key_id(value)
        if isinstance(former, Defect):  # each record says its key, too
            log.warning("meta.key of %s %s: written anew", self._path, former.value)
            former = b""
        if former and (self._cipher is None or former not in self._cipher):
            raise ConfigError(
                f"has not the key {former.hex()}, with which {directory} is encrypted",
                field=FIELD,
                remedy="name the file that has it, as the first key or behind a newer one; or another ssd_dir",
            )
        if self._cipher is None:
            return
        if not former and txn.raw.stat(to.chunks)["entries"]:
            log.warning(
                "what %s held before it was encrypted stays as it is until it is evicted; name a new ssd_dir to have "
                "nothing of it, and remove this one",
                directory,
            )
        if former != self._cipher.newest:
            txn.put(format.KEY_ID, format.encode_key_id(self._cipher.newest), to.meta)

    def _other_layout(self, name: str, former: int, value: int) -> ConfigError:
        field = {"direct": "ssd_direct_io", "slab_bytes": "ssd_slab_bytes"}[name]
        old, new = (bool(former), bool(value)) if name == "direct" else (former, value)
        return ConfigError(
            f"is not how {os.path.dirname(self._path)} was laid out when it was created",
            field=field,
            value=str(new).lower(),
            remedy=f"set it to {str(old).lower()}, or name another ssd_dir",
        )

    def _environment(self) -> lmdb.Environment:
        self._disk.index("open")
        return lmdb.open(
            self._path,
            map_size=self.bytes_max,
            subdir=True,
            readonly=False,
            sync=True,  # a transaction is on the disk when commit returns,
            metasync=True,  # and so is the page that makes it the current one
            map_async=False,
            mode=0o600,
            create=True,
            readahead=True,  # the start reads all of it
            writemap=False,  # a full or failing disk would be a SIGBUS
            meminit=True,  # no stray memory of ours in the file
            max_readers=READERS_MAX,
            max_dbs=len(TABLES),
            max_spare_txns=1,
            lock=True,
            lib_version=0,  # the file format of LMDB 0.9
        )

    @property
    def _reserved_bytes(self) -> int:
        return self.bytes_max // RESERVE_SHARE

    def _preallocate_lock_file(self) -> None:
        """LMDB writes to its lock file through a mapping: on a full disk, a page of it that has no space yet would be a
        SIGBUS."""
        path = os.path.join(self._path, LOCK_FILE)
        try:
            fd = self._disk.open(path, create=True)
        except FileExistsError:
            fd = self._disk.open(path)
        try:
            self._disk.allocate(fd, LOCK_FILE_BYTES)
        finally:
            self._disk.close(fd)

    def _preallocate(self) -> None:
        """The file gets all its space at once, so that a full disk cannot keep deletions from being recorded. Where
        there is not so much space, it grows while it can."""
        fd = self._disk.open(os.path.join(self._path, DATA_FILE))
        try:
            missing = self.bytes_max - self._disk.size(fd)
            if missing > 0:
                free = self._disk.free_bytes(self._path)
                if free < missing:  # asked first: an allocation that fails half-way keeps what it got
                    raise OSError(errno.ENOSPC, f"{free} bytes are free")
                self._disk.allocate(fd, self.bytes_max)
        except OSError as problem:
            log.warning(
                "no room for the whole index of %d bytes in %s (%s): it grows as long as it can",
                self.bytes_max,
                self._path,
                describe(problem),
            )
        finally:
            self._disk.close(fd)

    def _reopened(self) -> _Open:
        if self._open is None:
            env = self._environment()
            try:
                self._open = _tables(env, None, create=False)
            except BaseException:
                env.close()
                raise
        return self._open

    def _transact(self, work: Callable[[_Open, Transaction], None], *, grows: bool = False) -> Outcome:
        """`grows`: it is refused where it would take of what is kept for deletions."""
        full = f"the index is full ({self.bytes_max} bytes)"
        try:
            to = self._reopened()
            with self._begin(to.env) as txn:
                work(to, txn)
                usage = self._measured(to, txn)
                if grows and usage.used > usage.bytes_max:
                    raise _Full
            self.usage = usage
        except (lmdb.MapFullError, _Full):
            self.usage = replace(self.usage, full=True)
            return DiskResult.NO_SPACE, full
        except lmdb.Error as problem:
            # After some failures LMDB refuses all further transactions of an environment: begin anew with the next.
            self.close()
            no_space = isinstance(problem, lmdb.DiskError)
            return (DiskResult.NO_SPACE if no_space else DiskResult.IO_ERROR), f"index: {problem}"
        except OSError as problem:
            return disk_result(problem), f"index: {describe(problem)}"
        return DiskResult.OK, ""

    @contextlib.contextmanager
    def _begin(self, env: lmdb.Environment) -> Iterator[Transaction]:
        self._disk.index("begin")
        with env.begin(write=True) as raw:
            yield Transaction(raw, self._disk)
            self._disk.index("commit")
        self._disk.index("committed")

    def _measured(self, to: _Open, txn: Transaction) -> IndexUsage:
        """Of the pages in use as this transaction sees them. The list of free pages is not among them: it is small, and
        LMDB does not tell."""
        sizes = {
            name: _table_bytes(cast("Mapping[str, Any]", txn.raw.stat(getattr(to, name)))) for name in TABLES
        }
        other = sum(sizes[name] for name in ("meta", "slabs", "namespaces")) + META_PAGES * self._page_bytes
        most = room_for_rows(self.bytes_max)
        return IndexUsage(most, chunks=sizes["chunks"], sessions=sizes["sessions"], other=other)

    @property
    def used_bytes(self) -> int:
        """Of the pages in use, as of the last transaction."""
        return self.usage.used

    def _rows(self, table: str, count: int) -> Iterator[tuple[bytes, bytes]]:
        """All rows in the order of their keys, `count` in a transaction."""
        for keys, values in self._columns(table, count):
            yield from zip(keys, values, strict=True)

    def _columns(self, table: str, count: int) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Keys and values apart: a million pairs would keep the garbage collector busy as long as LMDB."""
        position = b"\0"  # LMDB has no empty key
        while True:
            try:
                to = self._reopened()
                self._disk.index("read")
                with to.env.begin() as txn, txn.cursor(db=getattr(to, table)) as cursor:
                    if not cursor.set_range(position):
                        return
                    keys = list(itertools.islice(cursor.iternext(keys=True, values=False), count))
                    cursor.set_range(position)
                    values = list(itertools.islice(cursor.iternext(keys=False, values=True), count))
            except lmdb.Error as problem:
                raise _cannot_open(self._path, problem) from None
            except OSError as problem:
                raise _unusable(self._path, problem) from None
            yield keys, values
            position = keys[-1] + b"\0"

    def _drop(self, table: str, keys: Sequence[bytes]) -> None:
        """Deletes rows that lead nowhere. If that fails they are dropped again at the next start."""
        if keys:
            result, why = self._delete(table, keys)
            log.warning(
                "%d rows of table %s are unreadable or name what is gone: %s",
                len(keys),
                table,
                "deleted" if result == DiskResult.OK else f"not deleted ({why})",
            )

    def _delete(self, table: str, keys: Sequence[bytes]) -> Outcome:
        def work(to: _Open, txn: Transaction) -> None:
            for key in keys:
                txn.delete(key, getattr(to, table))

        return self._transact(work)

    def __repr__(self) -> str:
        state = "open" if self._open else "closed"
        return f"Index({self._path} {state}, {self.used_bytes} of {self.bytes_max} bytes, boot {self.boot_count})"


# --------------------------------------------------------------------------------------------------------- one batch


def _delete(to: _Open, txn: Transaction, batch: WriteIndex) -> None:
    for slab in batch.slabs_deleted:
        txn.delete(format.number_key(slab), to.slabs)
    for number in batch.namespaces_deleted:
        prefix = format.number_key(number)
        txn.delete(prefix, to.namespaces)
        txn.delete_range(prefix, prefix, to.chunks)
        txn.delete_range(prefix, prefix, to.sessions)
    for number, key in batch.chunks_deleted:
        txn.delete(format.chunk_key(number, key), to.chunks)
    for number, name in batch.sessions_deleted:
        first = format.session_key(number, name, 0)
        txn.delete_range(first, first[:-4], to.sessions)
    for digest in batch.makers_deleted:
        txn.delete(format.makers_key(digest), to.meta)


def _write(to: _Open, txn: Transaction, batch: WriteIndex) -> None:
    for namespace in batch.namespaces:
        value = format.encode_namespace(namespace)
        txn.put(format.number_key(namespace.number), value, to.namespaces)
    for digest, makers in batch.makers:
        txn.put(format.makers_key(digest), format.encode_makers(makers), to.meta)
    for bar in batch.bars:
        txn.put(format.barred_key(bar.mark, bar.maker), format.encode_barred(purge=bar.purge), to.meta)
    for one in batch.heeded:
        txn.put(format.heeded_key(one.channel), format.encode_heeded(one.journal, one.position), to.meta)
    for chunk in batch.chunks:
        value = format.encode_chunk(chunk)
        txn.put(format.chunk_key(chunk.namespace, chunk.key), value, to.chunks)
    for session in batch.sessions:
        _write_session(to, txn, session)


def _halves(batch: WriteIndex) -> tuple[WriteIndex, WriteIndex]:
    """Of deletions. Slabs, namespaces and makers go last, when nothing names them any more."""
    chunks, sessions = (len(batch.chunks_deleted) + 1) // 2, len(batch.sessions_deleted) // 2
    first = WriteIndex(
        batch.op,
        (),
        chunks_deleted=batch.chunks_deleted[:chunks],
        sessions_deleted=batch.sessions_deleted[:sessions],
    )
    rest = replace(
        _only_deletions(batch),
        chunks_deleted=batch.chunks_deleted[chunks:],
        sessions_deleted=batch.sessions_deleted[sessions:],
    )
    return first, rest


def _only_deletions(batch: WriteIndex) -> WriteIndex:
    return replace(batch, namespaces=(), makers=(), bars=(), heeded=(), chunks=(), sessions=())


def _table_bytes(stat: Mapping[str, Any]) -> int:
    pages: int = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
    return pages * int(stat["psize"])


def _write_session(to: _Open, txn: Transaction, session: SessionRecord) -> None:
    def key(page: int) -> bytes:
        return format.session_key(session.namespace, session.session, page)

    head = format.encode_session_head(session.version, len(session.entries))
    for number, page in enumerate((head, *format.encode_session_pages(session.entries))):
        if txn.get(key(number), to.sessions) != page:
            txn.put(key(number), page, to.sessions)
    txn.delete_range(key(number + 1), key(0)[:-4], to.sessions)


def room_for_rows(file_bytes: int) -> int:
    """Of an index of this size: the rest is for deletions."""
    return file_bytes - file_bytes // RESERVE_SHARE


def assemble_session(pages: list[tuple[bytes, bytes]]) -> SessionRecord | None:
    """A session from the rows that share its key but for the page number; None if they are not exactly its pages."""
    (first_key, head_value), *rest = pages
    where, head = format.decode_session_key(first_key), format.decode_session_head(head_value)
    if isinstance(where, Defect) or isinstance(head, Defect) or where.page != 0:
        return None
    entries: list[SessionEntry] = []
    for number, (key, value) in enumerate(rest, 1):
        page = format.decode_session_page(value)
        if isinstance(page, Defect) or key[-4:] != format.number_key(number):
            return None
        entries += page
    if len(entries) != head.entries:
        return None
    return SessionRecord(where.namespace, where.session, head.version, tuple(entries))


# ---------------------------------------------------------------------------------------------------- chunks in bulk


class _Places:
    """Which slots of which slabs are named already, as one row of bits over all slabs."""

    def __init__(self, slabs: Iterable[SlabRow], *, direct: bool) -> None:
        known = sorted(slabs, key=lambda row: row.slab)
        self._direct = direct
        self._slabs = np.array([row.slab for row in known], np.int64)
        self._slots = np.array([row.slots for row in known], np.int64)
        self._slot_bytes = np.array([row.slot_bytes for row in known], np.int64)
        self._first = np.concatenate([[0], np.cumsum(self._slots)]).astype(np.int64)
        self._named = np.zeros(int(self._first[-1]), np.bool_)

    def take(
        self,
        rows: npt.NDArray[np.bool_],
        slab: npt.NDArray[np.int64],
        slot: npt.NDArray[np.int64],
        shard_bytes: Sequence[int],
    ) -> npt.NDArray[np.bool_]:
        """Which of `rows` name only slots that exist, fit their shards ([n, shards]) and were not named before."""
        if not len(self._slabs):
            return np.zeros_like(rows)
        fitting = np.array([format.slot_bytes(size, direct=self._direct) for size in shard_bytes])
        number = np.minimum(np.searchsorted(self._slabs, slab), len(self._slabs) - 1)
        exists = (self._slabs[number] == slab) & (slot < self._slots[number])
        fits = (exists & (self._slot_bytes[number] == fitting)).all(axis=1)
        good: npt.NDArray[np.bool_] = rows & fits
        place = np.where(good[:, None], self._first[number] + slot, 0)
        flat = place[good].ravel()
        if not self._named[flat].any() and len(np.unique(flat)) == len(flat):
            self._named[flat] = True
            return good
        for row in np.flatnonzero(good):  # a slot named twice: the first one keeps it
            mine = place[row]
            if self._named[mine].any() or len(set(mine)) < len(mine):
                good[row] = False
            else:
                self._named[mine] = True
        return good


def _batch(namespace: int, keys: list[bytes], columns: format.ChunkColumns) -> IndexRows:
    return IndexRows(
        namespace=namespace,
        keys=[ChunkKey(key[4:]) for key in keys],
        token_count=columns.token_count,
        flags=columns.flags,
        maker=columns.maker,
        slab=columns.slab,
        slot=columns.slot,
        generation=columns.generation,
        checksum=columns.checksum,
    )


def _select(batch: IndexRows, rows: npt.NDArray[np.intp]) -> IndexRows:
    return IndexRows(
        namespace=batch.namespace,
        keys=[batch.keys[row] for row in rows],
        token_count=batch.token_count[rows],
        flags=batch.flags[rows],
        maker=[batch.maker[row] for row in rows],
        slab=batch.slab[rows],
        slot=batch.slot[rows],
        generation=batch.generation[rows],
        checksum=batch.checksum[rows],
    )


# ------------------------------------------------------------------------------------------------------------ pieces


def _tables(env: lmdb.Environment, txn: lmdb.Transaction[bytes] | None, *, create: bool) -> _Open:
    """`txn` must be one that writes: LMDB closes the tables that were opened in another when that ends."""
    return _Open(env, *(env.open_db(name.encode(), txn=txn, create=create) for name in TABLES))


def _get_meta(to: _Open, txn: Transaction, name: str) -> int:
    """0 when it was never set."""
    value = txn.get(name.encode(), to.meta)
    number = 0 if value is None else format.decode_meta(value)
    if isinstance(number, Defect):
        raise ConfigError(
            f"its index is damaged: meta.{name} {number.value}", field="ssd_dir", remedy=START_EMPTY
        )
    return number


def _get_count(to: _Open, txn: Transaction, name: str) -> int:
    count = _get_meta(to, txn, name)
    if count > format.COUNT_MAX:
        raise ConfigError(
            f"its index is damaged: meta.{name} is {count}", field="ssd_dir", remedy=START_EMPTY
        )
    return count


def _put_meta(to: _Open, txn: Transaction, name: str, value: int) -> None:
    txn.put(name.encode(), format.encode_meta(value), to.meta)


def _no_space(path: str, problem: Exception | str) -> Exhausted:
    return Exhausted(
        f"the index cannot be opened, because there is no space left: {problem}",
        field="ssd_dir",
        value=os.path.dirname(path),
        remedy="free some space on its file system, or raise ssd_index_bytes",
    )


def _unusable(path: str, problem: OSError) -> StoreError:
    if disk_result(problem) is DiskResult.NO_SPACE:
        return _no_space(path, describe(problem))
    return Unavailable(f"{path}: {describe(problem)}")


def _cannot_open(path: str, problem: lmdb.Error) -> StoreError:
    if isinstance(problem, (lmdb.DiskError, lmdb.MapFullError)):
        return _no_space(path, problem)
    return ConfigError(
        f"its index cannot be read: {problem}",
        field="ssd_dir",
        value=os.path.dirname(path),
        remedy=START_EMPTY,
    )
