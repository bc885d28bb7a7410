"""Whether a directory of the SSD tier is what it says, while no daemon uses it; and, if wished, the removal of what
is not.

    meta -> slabs: rows and files -> namespaces -> chunks: rows and records -> sessions -> free pages -> files, cap

All of it is read once, in the order of the index, each record in full. Memory: a byte a slot and an index page, eight
a chunk, one batch of rows. What is to be deleted waits in unnamed temporary files.

A *problem* is what should not be there, whatever happened before: it is never served, but it takes room, or it was
lost. A *note* is what time brings: a session names chunks that were in DRAM only or have been evicted, and is served
up to the first of them.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import resource
import shutil
import stat
import struct
import tempfile
import time
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import IO

import lmdb
import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.config import LEARNED_FILE, LOCK_FILE, PEERS_JOURNAL, REMOTE_JOURNAL
from kvstore.core.events import IndexUsage, NamespaceRecord
from kvstore.core.namespaces import chunk_salt
from kvstore.core.ssd.index_room import NEARLY_FULL
from kvstore.core.ssd.index_room import REMEDY as ROOM_REMEDY
from kvstore.core.ssd.index_room import describe as describe_usage
from kvstore.errors import ConfigError, Unavailable
from kvstore.tiers import format
from kvstore.tiers.directory import DirectoryLock
from kvstore.tiers.disk_port import Disk, describe, write_all
from kvstore.tiers.encryption import OTHER_KEY, DiskCipher
from kvstore.tiers.format import Defect, SlabHeader
from kvstore.tiers.index import DATA_FILE, TABLES, SlabRow, Table, assemble_session, room_for_rows
from kvstore.tiers.io_pool import Result
from kvstore.tiers.lmdb_pages import Damage, LmdbPages, Unreadable
from kvstore.tiers.schema_files import SCHEMAS_DIR
from kvstore.tiers.ssd import INDEX_DIR, NEW_INDEX_DIR, PROBE_FILE
from kvstore.tiers.verify import Verifier
from kvstore.types import KEY_BYTES_MAX, ChunkKey, DiskResult, Record, SlabId

BATCH_ROWS = 4_096
WINDOW_BYTES = 1 << 20
FILES_SPARE = 256
"""Descriptors that are used beside one a slab file."""
SHOWN_MAX = 1_000
"""Problems, and notes, that are listed; the others are counted."""
SPOOL_BYTES = 1 << 20
"""Keys of rows to delete that wait in memory; more of them wait in a file."""
REBUILD_ROWS = 10_000
"""In one transaction of an index that is written anew."""
META = ("format", "boot_count", "next_slab", "direct", "slab_bytes")
ROW = "row deleted"
REUSED = "reused"
BESIDE = {
    *(LEARNED_FILE, LEARNED_FILE + ".new"),
    *(
        os.path.splitext(name)[0] + end
        for name in (REMOTE_JOURNAL, PEERS_JOURNAL)
        for end in (".forgotten", ".new")
    ),
}
"""Files of the daemon beside the tier's, no bytes of `ssd_bytes`; they are written as NAME.new, and renamed."""
"""No problem: see `_check_record`."""


@dataclass(frozen=True, slots=True)
class Problem:
    kind: str
    """index, maker, slab, namespace, chunk, record, unreadable, twice, session, file, cap"""
    where: str
    what: str
    remedy: str
    """What --fix does, or why it does nothing."""
    fixable: bool = True
    place: tuple[int, int] | None = None
    """Slab and slot, where it is about one."""


@dataclass(slots=True)
class Progress:
    chunks: int = 0
    chunks_in_all: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        rate = self.bytes / self.seconds / 1e6 if self.seconds else 0.0
        return (
            f"{self.chunks:,} of {self.chunks_in_all:,} chunks, {self.bytes / 2**30:.2f} GiB verified"
            f" at {rate:,.0f} MB/s"
        )


@dataclass(slots=True)
class Findings:
    directory: str
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Problems by kind, those that are not listed included."""
    notes_count: int = 0
    fixed: list[str] = field(default_factory=list)
    """What was done, in order."""
    other_key: int = 0
    """Chunks that are encrypted with a key that was not given: nothing in them was verified."""
    progress: Progress = field(default_factory=Progress)
    slabs: int = 0
    sessions: int = 0
    bytes_used: int = 0
    """Of everything in the directory, as its files are long."""
    unfixable: int = 0

    @property
    def clean(self) -> bool:
        return not self.counts


class Check:
    """`run` once, `fix` perhaps, `close` always. Raises ConfigError or Unavailable where nothing can be told."""

    def __init__(
        self,
        directory: str,
        disk: Disk,
        *,
        bytes_max: int = 0,
        cipher: DiskCipher | None = None,
        tell: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        """Takes the directory for itself. `bytes_max`: the cap, 0 if it is not known; `cipher`: of a directory that is
        encrypted; `tell` is called now and then."""
        self._directory = directory
        self._index_dir = os.path.join(directory, INDEX_DIR)
        self._disk = disk
        self._bytes_max = bytes_max
        self._cipher = cipher
        self._tell = tell
        self._began = time.monotonic()
        self.found = Findings(directory)
        if not os.path.isfile(os.path.join(self._index_dir, DATA_FILE)):
            raise ConfigError(
                "is no directory of an SSD tier: it has no index",
                field="ssd_dir",
                value=directory,
                remedy="name the daemon's ssd_dir",
            )
        self._lock = DirectoryLock(directory)
        self._fds: dict[SlabId, int] = {}
        self._slabs: dict[SlabId, SlabRow] = {}
        self._closed: dict[SlabId, str] = {}
        """Slab files that cannot be opened now, and why: nothing is known of them."""
        self._restore: list[SlabRow] = []
        """Slab files whose row is to be written anew."""
        self._delete = {table: _Spool() for table in TABLES}
        self._headers: list[SlabRow] = []
        """Slab files whose header is to be written anew."""
        self._files: list[str] = []
        """To be removed."""
        self._counts: dict[str, int] = {}
        """Counts of the table meta that are to be set."""
        self._newest = 0
        """The highest generation that a row names."""
        self._twice: set[tuple[int, int]] = set()
        """Slots that two rows name; at most one of them is right."""
        self._rebuild = False
        self._rebuilt = False
        self._damage: set[Damage] = set()
        """Of pages of the index."""
        self._index_fd = -1
        try:
            self._index_fd = os.open(os.path.join(self._index_dir, DATA_FILE), os.O_RDONLY | os.O_CLOEXEC)
            self._pages = LmdbPages(self._index_fd)
        except (OSError, Unreadable) as problem:
            self.close()
            why = describe(problem) if isinstance(problem, OSError) else str(problem)
            raise ConfigError(
                f"its index cannot be read: {why}",
                field="ssd_dir",
                value=directory,
                remedy="restore it, or remove the directory to start with an empty SSD tier",
            ) from None

    def close(self) -> None:
        for fd in self._fds.values():
            self._disk.close(fd)
        self._fds.clear()
        if self._index_fd >= 0:
            os.close(self._index_fd)
            self._index_fd = -1
        for spool in self._delete.values():
            spool.close()
        self._lock.release()

    def run(self) -> Findings:
        try:
            for damage in self._pages.damage:
                self._page(damage)
            self._check_meta()
            self._check_slabs()
            namespaces = self._check_namespaces()
            keys = self._check_chunks(namespaces)
            self._check_count("boot_count", self._boot_count, self._newest >> 32)
            self._check_sessions(namespaces, keys)
            self._check_room()
            for damage in self._pages.free_list():
                self._page(damage)
            self._check_files()
        except OSError as problem:
            raise Unavailable(f"{self._directory}: {describe(problem)}", remedy="check the disk") from None
        self._progress(0, 0)
        return self.found

    # ------------------------------------------------------------------------------------------------------ telling

    def _problem(self, problem: Problem) -> None:
        self.found.counts[problem.kind] += 1
        self.found.unfixable += not problem.fixable
        if len(self.found.problems) < SHOWN_MAX:
            self.found.problems.append(problem)

    def _note(self, text: str) -> None:
        self.found.notes_count += 1
        if len(self.found.notes) < SHOWN_MAX:
            self.found.notes.append(text)

    def _page(self, damage: Damage) -> None:
        self._rebuild = True
        self._damage.add(damage)
        remedy = "index written anew from the rows that can be read"
        self._problem(Problem("index", f"page {damage.page}", damage.why, remedy))

    def _row(self, table: str, key: bytes, problem: Problem) -> None:
        self._delete[table].add(key)
        self._problem(problem)

    def _progress(self, chunks: int, size: int) -> None:
        progress = self.found.progress
        progress.chunks += chunks
        progress.bytes += size
        progress.seconds = time.monotonic() - self._began
        self._tell(progress)

    def _rows(self, table: str) -> Iterator[tuple[bytes, bytes]]:
        for row in self._pages.rows(table):
            if isinstance(row, Damage):
                self._page(row)
            else:
                yield row

    # -------------------------------------------------------------------------------------------------------- tables

    def _check_meta(self) -> None:
        meta: dict[str, int] = {}
        for key, value in self._rows("meta"):
            number = format.decode_meta(value)
            if key.startswith(format.MAKERS_PREFIX):
                makers = format.decode_makers(value)
                if isinstance(makers, Defect):
                    where = f"makers {key.removeprefix(format.MAKERS_PREFIX).hex()}"
                    self._row("meta", key, Problem("maker", where, f"its row {makers.value}", ROW))
            elif key.startswith(format.BARRED_PREFIX):
                bar = format.decode_barred(key, value)
                if isinstance(bar, Defect):
                    where = f"barred maker {key.removeprefix(format.BARRED_PREFIX).hex()}"
                    self._row("meta", key, Problem("maker", where, f"its row {bar.value}", ROW))
            elif key.startswith(format.HEEDED_PREFIX):
                heeded = format.decode_heeded(key, value)
                if isinstance(heeded, Defect):
                    where = f"forgets of {key.removeprefix(format.HEEDED_PREFIX).decode('ascii', 'replace')}"
                    self._row("meta", key, Problem("forgets", where, f"its row {heeded.value}", ROW))
            elif key == format.KEY_ID:
                self._check_key(key, value)
            elif not isinstance(number, Defect):
                meta[key.decode("ascii", "backslashreplace")] = number
        meta.setdefault("next_slab", 0)  # written with the first slab: until then nothing was stored
        missing = [name for name in META if name not in meta]
        if missing:
            raise ConfigError(
                f"its index is damaged: there is no meta.{missing[0]}",
                field="ssd_dir",
                value=self._directory,
                remedy="restore it, or remove the directory to start with an empty SSD tier",
            )
        if meta["format"] != format.FORMAT_VERSION:
            raise ConfigError(
                f"is in format {meta['format']}; this kvctl knows {format.FORMAT_VERSION}",
                field="ssd_dir",
                value=self._directory,
                remedy="use the kvctl of the daemon that wrote it",
            )
        self._direct = bool(meta["direct"])
        self._slab_bytes = meta["slab_bytes"]
        self._next_slab = meta["next_slab"]
        self._boot_count = meta["boot_count"]
        self._next_generation = (self._boot_count + 1) << 32

    def _check_key(self, key: bytes, value: bytes) -> None:
        key_id = format.decode_key_id(value)
        if isinstance(key_id, Defect):
            self._row("meta", key, Problem("index", "meta.key", f"its row {key_id.value}", ROW))
        elif self._cipher is None or key_id not in self._cipher:
            raise ConfigError(
                f"is encrypted with the key {key_id.hex()}, without which nothing in it can be verified",
                field="ssd_dir",
                value=self._directory,
                remedy="name the file that has it: --ssd-key-file",
            )

    def _check_slabs(self) -> None:
        _allow_open_files(sum(name.endswith(".kvs") for name in self._disk.names(self._directory)))
        damaged = self._rebuild
        highest = -1
        for key, value in self._rows("slabs"):
            where = f"slabs, key {key.hex()}"
            shape = format.decode_slab(value)
            if len(key) != 4:
                self._row("slabs", key, Problem("slab", where, "is no slab's number", ROW))
            elif isinstance(shape, Defect):
                self._row("slabs", key, Problem("slab", where, f"its row {shape.value}", ROW))
            else:
                highest = max(highest, int.from_bytes(key, "big"))
                self._check_slab(key, SlabRow(SlabId(int.from_bytes(key, "big")), *shape))
        self._check_count("next_slab", self._next_slab, highest + 1)
        if damaged or self._rebuild or self._delete["slabs"].count:
            self._find_lost_slabs()
        self.found.slabs = len(self._slabs)

    def _check_room(self) -> None:
        """How full the index is: no harm, but who used it last finds out why older sessions and chunks are gone."""
        sizes = {table: self._pages.bytes_of(table) for table in TABLES}
        sessions, chunks = sizes.pop("sessions"), sizes.pop("chunks")
        used = IndexUsage(
            room_for_rows(os.fstat(self._index_fd).st_size), chunks, sessions, sum(sizes.values())
        )
        if used.used > used.bytes_max:
            what = f"is full: {describe_usage(used)}; the rest is for deletions"
            remedy = f"not fixed: the next start of the daemon lets the oldest give way; or {ROOM_REMEDY}"
            self._problem(Problem("index", "room", what, remedy, fixable=False))
        elif used.used > NEARLY_FULL * used.bytes_max:
            self.found.notes_count += 1  # and before all others, of which some may not be listed
            self.found.notes.insert(0, f"the index is nearly full, {describe_usage(used)}: {ROOM_REMEDY}")

    def _check_count(self, name: str, count: int, least: int) -> None:
        """These rows have no seal; others tell how many there must have been."""
        if not least <= count <= format.COUNT_MAX:
            self._counts[name] = least
            what = f"is {count}, but must be at least {least}, and plausible"
            self._problem(Problem("index", f"meta.{name}", what, f"set to {least}"))

    def _find_lost_slabs(self) -> None:
        """Slab files whose row may be among what is damaged: their header says the same."""
        for name in sorted(self._disk.names(self._directory)):
            number = name.removeprefix("slab-").removesuffix(".kvs")
            if name in self._files or not number.isdecimal() or name != format.slab_name(int(number)):
                continue
            slab = SlabId(int(number))
            if slab in self._slabs or slab in self._closed or slab >= self._next_slab:
                continue
            try:
                fd = self._disk.open(os.path.join(self._directory, name), direct=self._direct)
            except OSError as problem:
                self._cannot_open(slab, name, problem)
                continue
            header = self._read_header(fd)
            row = SlabRow(slab, header.slot_bytes, header.slots) if isinstance(header, SlabHeader) else None
            size = format.slab_file_bytes(row.slot_bytes, row.slots) if row else 0
            if row is None or header != self._header(row) or not 0 < size <= self._slab_bytes:
                self._disk.close(fd)  # it goes as one that nobody names
            elif self._disk.size(fd) < size:
                self._disk.close(fd)
            else:
                self._fds[slab] = fd
                self._slabs[slab] = row
                self._restore.append(row)
                self._problem(Problem("slab", name, "its row is damaged or lost", "row written anew"))

    def _cannot_open(self, slab: SlabId, name: str, problem: OSError) -> None:
        """Now: that is no reason to remove anything."""
        self._closed[slab] = describe(problem)
        what = f"cannot be opened: {describe(problem)}"
        self._problem(Problem("unreadable", name, what, "not fixed: it may be readable later", fixable=False))

    def _check_slab(self, key: bytes, row: SlabRow) -> None:
        name = format.slab_name(row.slab)
        size = format.slab_file_bytes(row.slot_bytes, row.slots)
        if size > self._slab_bytes:
            self._doubt_slab_bytes(row)
            what = f"its row says {size} bytes, more than a slab file has"
            self._row("slabs", key, Problem("slab", name, what, ROW))
            return
        try:
            fd = self._disk.open(os.path.join(self._directory, name), direct=self._direct)
        except FileNotFoundError:
            what = "the file is missing"
            self._row("slabs", key, Problem("slab", name, what, "row deleted, and those of the chunks in it"))
            return
        except OSError as problem:
            self._cannot_open(row.slab, name, problem)
            return
        if (length := self._disk.size(fd)) < size:
            self._disk.close(fd)
            self._files.append(name)
            remedy = "row deleted, those of the chunks in it, and the file"
            self._row("slabs", key, Problem("slab", name, f"has {length} bytes, not {size}", remedy))
            return
        self._fds[row.slab] = fd
        self._slabs[row.slab] = row
        what = self._wrong_header(fd, row)
        if what:
            self._headers.append(row)
            self._problem(Problem("slab", name, f"its header {what}", "header written anew"))

    def _doubt_slab_bytes(self, row: SlabRow) -> None:
        with contextlib.suppress(OSError):
            fd = self._disk.open(
                os.path.join(self._directory, format.slab_name(row.slab)), direct=self._direct
            )
            try:
                header = self._read_header(fd)
            finally:
                self._disk.close(fd)
            if isinstance(header, SlabHeader):
                self._doubt_layout(header)

    def _wrong_header(self, fd: int, row: SlabRow) -> str:
        header = self._read_header(fd)
        if isinstance(header, str):
            return header
        if header == self._header(row):
            return ""
        self._doubt_layout(header)
        return f"is that of {header}"

    def _doubt_layout(self, header: SlabHeader) -> None:
        """How the directory is laid out has no seal in the index, and the headers of slab files have: nothing that is
        whole may be taken for damaged because of it."""
        if header.direct != self._direct:
            raise self._damaged("direct", int(self._direct), header)
        if format.slab_file_bytes(header.slot_bytes, header.slots) > self._slab_bytes:
            raise self._damaged("slab_bytes", self._slab_bytes, header)

    def _damaged(self, name: str, value: int, header: SlabHeader) -> ConfigError:
        return ConfigError(
            f"its index is damaged: meta.{name} is {value}, but there is a slab file of {header}",
            field="ssd_dir",
            value=self._directory,
            remedy="restore it, or remove the directory to start with an empty SSD tier",
        )

    def _read_header(self, fd: int) -> SlabHeader | str:
        """Or what is wrong with it."""
        page = _page()
        try:
            self._disk.read(fd, [page], 0)
        except OSError as problem:
            return f"cannot be read: {describe(problem)}"
        header = format.decode_slab_header(bytes(page))
        return header.value if isinstance(header, Defect) else header

    def _header(self, row: SlabRow) -> SlabHeader:
        return SlabHeader(row.slab, row.slot_bytes, row.slots, self._direct)

    def _check_namespaces(self) -> dict[int, NamespaceRecord]:
        found: dict[int, NamespaceRecord] = {}
        for key, value in self._rows("namespaces"):
            number = int.from_bytes(key, "big")
            namespace = format.decode_namespace(number, value) if len(key) == 4 else Defect.RANGE
            if isinstance(namespace, Defect):
                what = f"its row {namespace.value}"
                self._row("namespaces", key, Problem("namespace", f"key {key.hex()}", what, ROW))
            else:
                found[number] = namespace
        return found

    # --------------------------------------------------------------------------------------------------------- chunks

    def _check_chunks(self, namespaces: dict[int, NamespaceRecord]) -> npt.NDArray[np.uint64]:
        """Returns the digests of the keys of the rows that are right, in order."""
        progress = self.found.progress
        chunks = self._pages.tables.get("chunks")
        progress.chunks_in_all = chunks.entries if chunks else 0
        verifier = Verifier(
            self._disk,
            direct=self._direct,
            first_generation=self._next_generation,
            window_bytes=WINDOW_BYTES,
            cipher=self._cipher,
        )
        self._salts = {_salt(namespace): number for number, namespace in namespaces.items()}
        named = {row.slab: bytearray(row.slots) for row in self._slabs.values()}
        digests = array("Q")
        for rows in _batches(self._rows("chunks"), BATCH_ROWS):
            keys = [key for key, _ in rows]
            start = 0
            while start < len(keys):
                number = int.from_bytes(keys[start][:4], "big")
                end = (
                    bisect_left(keys, format.number_key(number + 1), start) if number + 1 < 1 << 32 else None
                )
                mine = rows[start : None if end is None else max(start + 1, end)]  # a key may be too short
                start += len(mine)
                wrong = self._wrong_chunks(mine, namespaces.get(number), verifier, named)
                for (key, _), problem in zip(mine, wrong, strict=True):
                    if problem is not None and problem.kind == REUSED:
                        self._delete["chunks"].add(key)
                        other_key = problem.what.endswith(OTHER_KEY)
                        self.found.other_key += other_key
                        why = "" if other_key else "a crash leaves that; "
                        self._note(f"{problem.where}: {problem.what} ({why}--fix deletes the row)")
                    elif problem is not None and not problem.fixable:
                        self._problem(problem)
                    elif problem is not None:
                        self._row("chunks", key, problem)
                    else:
                        digests.append(xxhash.xxh3_64_intdigest(key))
        for index, problem in enumerate(self.found.problems):
            if problem.kind == "record" and problem.place in self._twice:
                self.found.problems[index] = replace(problem, kind="twice")
                self.found.counts.update({"record": -1, "twice": 1})
        self.found.counts = +self.found.counts
        found: npt.NDArray[np.uint64] = np.sort(np.frombuffer(digests, np.uint64))
        return found

    def _wrong_chunks(
        self,
        rows: Sequence[tuple[bytes, bytes]],
        namespace: NamespaceRecord | None,
        verifier: Verifier,
        named: dict[SlabId, bytearray],
    ) -> list[Problem | None]:
        """What is wrong with each row of one namespace, None if nothing is. Records are read in the order in which they
        lie in their files."""
        wrong: list[Problem | None] = [None] * len(rows)

        def is_wrong(number: int, kind: str, what: str, place: tuple[int, int] | None = None) -> None:
            key = rows[number][0]
            where = f"chunk {key[4:].hex()} of namespace {int.from_bytes(key[:4], 'big')}"
            if place is not None:
                what = f"{format.slab_name(place[0])}, slot {place[1]}: {what}"
            if kind == "unreadable":  # now: it may be readable another time
                remedy = "not fixed: the daemon finds out whether it stays so"
                wrong[number] = Problem(kind, where, what, remedy, fixable=False, place=place)
            else:
                wrong[number] = Problem(kind, where, what, ROW, place=place)

        if namespace is None:
            for number in range(len(rows)):
                is_wrong(number, "chunk", "its namespace is not in the index")
            self._progress(len(rows), 0)
            return wrong
        spec = namespace.spec
        columns = format.decode_chunks([value for _, value in rows], spec.shard_count)
        reads: list[tuple[int, int, int, int]] = []
        for number, (key, _) in enumerate(rows):
            if not columns.sound[number]:
                is_wrong(number, "chunk", "its row does not match its own checksum, or has the wrong size")
            elif not 4 < len(key) <= 4 + KEY_BYTES_MAX:
                is_wrong(number, "chunk", f"has a key of {len(key) - 4} bytes")
            elif not 0 < columns.token_count[number] <= spec.chunk_tokens:
                is_wrong(number, "chunk", f"says {columns.token_count[number]} tokens")
            else:
                places = zip(columns.slab[number].tolist(), columns.slot[number].tolist(), strict=True)
                reads += [(slab, slot, number, shard) for shard, (slab, slot) in enumerate(places)]
        if columns.sound.any():
            self._newest = max(self._newest, int(columns.generation[columns.sound].max()))
        salt = _salt(namespace)
        for slab, slot, number, shard in sorted(reads):
            row = self._slabs.get(SlabId(slab))
            size = spec.shard_bytes[shard]
            if SlabId(slab) in self._closed:
                is_wrong(
                    number, "unreadable", f"cannot be opened: {self._closed[SlabId(slab)]}", (slab, slot)
                )
                continue
            if row is None:
                is_wrong(number, "chunk", "there is no such slab file", (slab, slot))
                continue
            if slot >= row.slots or row.slot_bytes != format.slot_bytes(size, direct=self._direct):
                is_wrong(number, "chunk", "there is no slot of its size", (slab, slot))
                continue
            key, checksum = ChunkKey(rows[number][0][4:]), int(columns.checksum[number, shard])
            record = Record(salt, key, shard, size, checksum)
            result = self._check_record(row, slot, record, int(columns.generation[number, shard]), verifier)
            if named[row.slab][slot]:
                self._twice.add((slab, slot))
            named[row.slab][slot] = 1
            if result.result is DiskResult.REUSED:
                is_wrong(number, REUSED, result.why, (slab, slot))
            elif result.result is DiskResult.IO_ERROR:
                is_wrong(number, "unreadable", result.why, (slab, slot))
            elif result.result is not DiskResult.OK:
                is_wrong(number, "record", result.why, (slab, slot))
            self._progress(0, size)
        self._progress(len(rows), 0)
        return wrong

    def _check_record(
        self, row: SlabRow, slot: int, record: Record, generation: int, verifier: Verifier
    ) -> Result:
        fd, offset = self._fds[row.slab], format.slot_offset(row.slot_bytes, slot)
        try:
            result = verifier.check(fd, offset, record, generation)
            if result.result is not DiskResult.REUSED or result.why == OTHER_KEY:
                return result
            header = verifier.header(fd, offset)
        except OSError as problem:
            return Result(DiskResult.IO_ERROR, f"cannot be read: {describe(problem)}")
        # A newer record lies here. That is how a daemon that was killed leaves a slot which it had given to another
        # chunk, before it could say so in the index; unless the index says where that other chunk is.
        if isinstance(header, Defect):  # it was whole a moment ago
            return Result(DiskResult.IO_ERROR, f"reads differently each time: {header.value}")
        number = self._salts.get(header.record.namespace)
        if number is not None:
            value = self._pages.get("chunks", format.chunk_key(number, header.record.key))
            columns = None if value is None else format.decode_chunks([value], _shards_of(value))
            if columns is not None and columns.sound[0] and header.generation in columns.generation[0]:
                return Result(DiskResult.CORRUPT, "holds another key")
        return result

    # ------------------------------------------------------------------------------------------------- sessions, files

    def _check_sessions(
        self, namespaces: dict[int, NamespaceRecord], digests: npt.NDArray[np.uint64]
    ) -> None:
        for prefix, group in itertools.groupby(self._rows("sessions"), key=lambda row: row[0][:-4]):
            pages = list(group)
            session = assemble_session(pages)
            where = f"session {_name(prefix[6:])} of namespace {int.from_bytes(prefix[:4], 'big')}"
            if session is None or session.namespace not in namespaces:
                what = "its namespace is not in the index"
                if session is None:
                    what = "a page of it is missing or unreadable"
                for key, _ in pages:
                    self._delete["sessions"].add(key)
                self._problem(Problem("session", where, what, "its rows deleted"))
                continue
            self.found.sessions += 1
            wanted = np.fromiter(
                (
                    xxhash.xxh3_64_intdigest(format.chunk_key(session.namespace, entry.key))
                    for entry in session.entries
                ),
                np.uint64,
                len(session.entries),
            )
            at = np.searchsorted(digests, wanted)
            there = np.zeros(len(wanted), np.bool_)
            inside = at < len(digests)
            there[inside] = digests[at[inside]] == wanted[inside]
            if missing := len(wanted) - int(there.sum()):
                self._note(f"{where} names {missing:,} chunks of {len(wanted):,} that are not on SSD")

    def _check_files(self) -> None:
        mine = {format.slab_name(number) for number in (*self._slabs, *self._closed)} | set(self._files)
        known = {LOCK_FILE, PROBE_FILE, INDEX_DIR, SCHEMAS_DIR}
        for name in sorted(set(self._disk.names(self._directory)) - BESIDE):
            status = os.lstat(os.path.join(self._directory, name))
            if stat.S_ISREG(status.st_mode):
                self.found.bytes_used += status.st_size
            if name in mine or name in known:
                continue
            if name.startswith("slab-") and name.endswith(".kvs"):
                self._files.append(name)
                self._problem(Problem("file", name, "the index does not name it", "file removed"))
            elif name == NEW_INDEX_DIR:
                self._files.append(name)
                what = "was left by a --fix that did not end"
                self._problem(Problem("file", name, what, "directory removed"))
            else:
                self._note(f"{name} is not of the SSD tier")
        for name in self._disk.names(self._index_dir):
            self.found.bytes_used += os.stat(os.path.join(self._index_dir, name)).st_size
        if self._bytes_max and self.found.bytes_used > self._bytes_max:
            what = f"{self.found.bytes_used:,} bytes, more than the {self._bytes_max:,} of ssd_bytes"
            remedy = "not fixed: the daemon drops slab files beyond ssd_bytes at its next start"
            self._problem(Problem("cap", self._directory, what, remedy, fixable=False))

    # ------------------------------------------------------------------------------------------------------------ fix

    def fix(self) -> None:
        """Removes exactly what `run` found: rows of the index first, in one transaction, then files. Raises Unavailable
        if that fails: nothing was changed then, unless `found.fixed` says so."""
        done = self.found.fixed
        try:
            for row in self._headers:
                self._write_header(row)
                done.append(f"{format.slab_name(row.slab)}: header written anew")
            counts = {table: spool.count for table, spool in self._delete.items() if spool.count}
            change = bool(counts or self._restore or self._counts)
            if self._rebuild or (change and not self._change_rows()):
                kept = self._write_index_anew()
                done.append(f"index written anew: {kept:,} rows kept")
            done += [f"{format.slab_name(row.slab)}: row written anew" for row in self._restore]
            done += [f"meta.{name} set to {count}" for name, count in self._counts.items()]
            done += [f"{count:,} rows of table {table} deleted" for table, count in counts.items()]
            for name in self._files:
                path = os.path.join(self._directory, name)
                if name == NEW_INDEX_DIR and self._rebuilt:
                    pass  # it went with the one of this time
                elif os.path.isdir(path):
                    shutil.rmtree(path)
                else:
                    self._disk.unlink(path)
                done.append(f"{name} removed")
            self._disk.sync_directory(self._directory)
        except OSError as problem:
            raise Unavailable(
                f"not all was fixed: {describe(problem)}", field="ssd_dir", value=self._directory
            ) from None
        except lmdb.Error as problem:
            raise Unavailable(
                f"the index could not be changed: {problem}", field="ssd_dir", value=self._directory
            ) from None

    def _write_header(self, row: SlabRow) -> None:
        page = _page()
        page[:] = format.encode_slab_header(self._header(row))
        write_all(self._disk, self._fds[row.slab], [page], 0)
        self._disk.sync(self._fds[row.slab])

    def _environment(self, path: str, size: int) -> lmdb.Environment:
        return lmdb.open(
            path,
            map_size=size,
            mode=0o600,
            readahead=False,
            writemap=False,
            max_dbs=len(TABLES),
            lib_version=0,
        )

    @property
    def _map_bytes(self) -> int:
        """Room for what deletions need, which in a full index is more than there is."""
        used = (self._pages.last_page + 1) * self._pages.page_bytes
        file_bytes = os.fstat(self._index_fd).st_size
        return max(file_bytes, used + used // 8 + (1 << 20)) // format.PAGE_BYTES * format.PAGE_BYTES

    def _change_rows(self) -> bool:
        """False: the index has too few free pages. A transaction writes each page that it changes to another place, and
        rows all over the index are in most of its pages."""
        try:
            with self._environment(self._index_dir, self._map_bytes) as env:
                tables = {name: env.open_db(name.encode()) for name in TABLES}
                with env.begin(write=True) as txn:
                    for table, spool in self._delete.items():
                        for key in spool:
                            txn.delete(key, db=tables[table])
                    for table in ("meta", "slabs"):
                        self._put_rows(txn, table, tables[table])
        except lmdb.MapFullError:
            return False
        return True

    def _rows_again(self, table: str) -> Iterator[tuple[bytes, bytes]]:
        """What `run` read. Raises OSError where a page cannot be read that could be then: its rows are not lost."""
        for row in self._pages.rows(table):
            if not isinstance(row, Damage):
                yield row
            elif row not in self._damage:
                raise OSError(errno.EIO, f"page {row.page} of the index {row.why}, which it did not at first")

    def _put_rows(self, txn: lmdb.Transaction[bytes], table: str, db: Table) -> None:
        """Those of this table that are to be written anew."""
        for row in self._restore if table == "slabs" else ():
            value = format.encode_slab(row.slot_bytes, row.slots)
            txn.put(format.number_key(row.slab), value, db=db)
        for name, count in self._counts.items() if table == "meta" else ():
            txn.put(name.encode(), format.encode_meta(count), db=db)

    def _write_index_anew(self) -> int:
        """Beside the old one, whose place it takes when it is whole and on the disk. Returns the rows kept."""
        path = os.path.join(self._directory, NEW_INDEX_DIR)
        shutil.rmtree(path, ignore_errors=True)
        os.mkdir(path, 0o700)
        kept = 0
        with self._environment(path, self._map_bytes) as env:
            for table in TABLES:
                db = env.open_db(table.encode())
                bad = iter(self._delete[table])
                next_bad = next(bad, None)
                for batch in _batches(self._rows_again(table), REBUILD_ROWS):
                    with env.begin(write=True) as txn:
                        for key, value in batch:
                            if key == next_bad:
                                next_bad = next(bad, None)
                                continue
                            txn.put(key, value, db=db)
                            kept += 1
                assert next_bad is None, (table, next_bad)
                with env.begin(write=True) as txn:
                    self._put_rows(txn, table, db)
            env.sync(True)
        os.replace(os.path.join(path, DATA_FILE), os.path.join(self._index_dir, DATA_FILE))
        self._disk.sync_directory(self._index_dir)
        shutil.rmtree(path)
        self._rebuilt = True
        return kept


def _allow_open_files(count: int) -> None:
    """All slab files are open at once, as in the daemon."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + FILES_SPARE
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _page() -> memoryview:
    """Aligned as direct I/O wants it."""
    return memoryview(mmap.mmap(-1, format.PAGE_BYTES))


def _name(session: bytes) -> str:
    text = session.decode("ascii", "replace")
    return text[:64] if text.isprintable() and "\ufffd" not in text else f"hex:{session[:64].hex()}"


def _salt(namespace: NamespaceRecord) -> bytes:
    return chunk_salt(namespace.spec.digest(namespace.tenant), namespace.spec.weights_epoch)


def _shards_of(value: bytes) -> int:
    """Of a chunk's row, by its size."""
    none, one = format.chunk_value_bytes(0), format.chunk_value_bytes(1)
    return max(1, (len(value) - none) // (one - none))


def _batches(rows: Iterable[tuple[bytes, bytes]], count: int) -> Iterator[list[tuple[bytes, bytes]]]:
    source = iter(rows)
    while batch := list(itertools.islice(source, count)):
        yield batch


class _Spool:
    """Keys, in the order in which they were added, in bounded memory."""

    def __init__(self) -> None:
        self.count = 0
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES)  # noqa: SIM115 - closed below

    def add(self, key: bytes) -> None:
        self.count += 1
        self._file.write(struct.pack("<H", len(key)) + key)

    def __iter__(self) -> Iterator[bytes]:
        self._file.seek(0)
        while size := self._file.read(2):
            yield self._file.read(struct.unpack("<H", size)[0])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
