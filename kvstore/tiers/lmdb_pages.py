"""The pages of an LMDB data file, read without LMDB, which trusts what it maps: a damaged page makes it crash.

For a check of the index while nobody has it open. Every page is checked before anything in it is believed; what cannot
be believed is told as `Damage`, and the walk goes on beside it. Memory: one byte a page of the file, and one path down
a tree.

File format of LMDB 0.9 on a 64-bit little-endian machine, as its mdb.c lays it out:

    page header, 16 bytes          meta, behind the header of pages 0 and 1     database, 48 bytes
      0 8  page number               0  4  magic 0xBEEFC0DE                       0 4  page size (of the free list's)
      8 2  (unused)                  4  4  version 1                              4 2  flags
     10 2  flags: 1 branch, 2 leaf,  8  8  address                                6 2  depth
           4 overflow, 8 meta       16  8  size of the map                        8 8  branch pages
     12 2  end of the node offsets  24 48  database: the free list               16 8  leaf pages
     14 2  start of the nodes       72 48  database: names of the tables         24 8  overflow pages
     12 4  overflow: its pages     120  8  last page                             32 8  entries
     16 .  u16 offsets of nodes    128  8  transaction                           40 8  root page, all ones: empty

    node: u16 low, u16 high, u16 flags, u16 key size, key, data. In a branch low, high and flags are the child's page;
    in a leaf low and high are the size of the data, and flags say 1: the data is the number of an overflow page, 2: it
    is a database. A free list's entry: u64 count, then as many page numbers.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_HEADER = struct.Struct("<QHHHH")
_META = struct.Struct("<IIQQ48s48sQQ")
_DATABASE = struct.Struct("<IHHQQQQQ")
_NODE = struct.Struct("<HHHH")
_U64 = struct.Struct("<Q")
MAGIC, VERSION = 0xBEEFC0DE, 1
BRANCH, LEAF, OVERFLOW, META = 1, 2, 4, 8
DIRTY = 16
"""A flag that LMDB leaves on some pages that it has written."""
BIG, TABLE = 1, 2
INTEGER_KEYS = 8
"""The flag of a database that the free list has, and no other here."""
NOTHING = (1 << 64) - 1
KEY_BYTES_MAX = 511
DEPTH_MAX = 32
PAGE_BYTES_MIN, PAGE_BYTES_MAX = 512, 65_536
FREE_LIST, NAMES = "", "."
"""What the two databases are called here that every file has."""


@dataclass(frozen=True, slots=True)
class Damage:
    page: int
    why: str

    def __str__(self) -> str:
        return f"page {self.page} {self.why}"


@dataclass(frozen=True, slots=True)
class Root:
    page: int
    entries: int
    depth: int


UNDONE = "the last change of the index may be undone, so what was forgotten last is to be forgotten again"
"""Where a meta page is damaged: the other one may be that of the transaction before."""


class Unreadable(Exception):
    """Nothing can be told of the file: it is no LMDB file, or neither of its meta pages is whole."""


class LmdbPages:
    """A data file as it lies there. `fd` stays the caller's; nobody may write to it meanwhile."""

    def __init__(self, fd: int) -> None:
        """Raises Unreadable, or OSError."""
        self._fd = fd
        self._file_bytes = os.fstat(fd).st_size
        self.damage: list[Damage] = []
        """Of what holds for the whole file: its end, its list of tables."""
        self.page_bytes, self.last_page, free_list, names = self._newest_meta()
        self._owner = bytearray(self.last_page + 1)
        """By page: number of the database that it belongs to, 0 for none."""
        self._numbers = {FREE_LIST: 1, NAMES: 2}
        self.tables: dict[str, Root] = {}
        self._roots = {FREE_LIST: free_list, NAMES: names}
        if (self.last_page + 1) * self.page_bytes > self._file_bytes:
            self.damage.append(Damage(self.last_page, "is the last, but the file is shorter"))
        for row in self._walk(NAMES):
            if isinstance(row, Damage):
                self.damage.append(row)
                continue
            key, value, flags = row
            root = self._root(value) if flags & TABLE and len(value) == _DATABASE.size else None
            if root is None:
                self.damage.append(Damage(names.page, f"names a table {key[:32]!r} that is none"))
                continue
            name = key.decode("ascii", "backslashreplace")
            self.tables[name] = self._roots[name] = root
            self._numbers[name] = len(self._numbers) + 1

    def __repr__(self) -> str:
        return f"LmdbPages({self.last_page + 1} pages of {self.page_bytes} bytes, {sorted(self.tables)})"

    def rows(self, table: str) -> Iterator[tuple[bytes, bytes] | Damage]:
        """All that can be believed, in the order of the keys, and what cannot. A table that is not there is empty."""
        if table not in self.tables:
            return
        count = 0
        whole = True
        for row in self._walk(table):
            if isinstance(row, Damage):
                whole = False
                yield row
            else:
                count += 1
                yield row[0], row[1]
        root = self.tables[table]
        if whole and count != root.entries:
            yield Damage(root.page, f"is the root of {root.entries} entries, but there are {count}")

    def get(self, table: str, key: bytes) -> bytes | None:
        """The value of one key, if the pages on the way to it can be believed; for keys of whom few are asked for."""
        root = self.tables.get(table)
        if root is None or root.page == NOTHING:
            return None
        page = root.page
        for level in range(root.depth, 0, -1):
            if not 2 <= page <= self.last_page:
                return None
            nodes = self._nodes(page, LEAF if level == 1 else BRANCH)
            if isinstance(nodes, str):
                return None
            if level == 1:
                found = (data for name, data, flags in nodes if name == key and not flags)
                return next(found, None)
            below = [data for index, (name, data, _) in enumerate(nodes) if not index or name <= key]
            page = int.from_bytes(below[-1], "little")
        return None

    def bytes_of(self, table: str) -> int:
        """Of the pages that the table has, once it was walked."""
        number = self._numbers.get(table)
        return 0 if number is None else self._owner.count(number) * self.page_bytes

    def free_list(self) -> Iterator[Damage]:
        """What is wrong with the list of free pages, once all tables were walked: LMDB writes to what it names."""
        free = 255
        for row in self._walk(FREE_LIST):
            if isinstance(row, Damage):
                yield row
                continue
            _, value, _ = row
            count = _U64.unpack_from(value)[0] if len(value) >= 8 else NOTHING
            if len(value) != 8 * (count + 1):
                yield Damage(self._roots[FREE_LIST].page, "lists free pages in an entry of the wrong size")
                continue
            for page in struct.unpack_from(f"<{count}Q", value, 8):
                if not 2 <= page <= self.last_page:
                    yield Damage(page, "is listed as free, but beyond the last")
                elif self._owner[page]:
                    again = "twice" if self._owner[page] == free else "and in use"
                    yield Damage(page, f"is listed as free {again}")
                else:
                    self._owner[page] = free

    # -------------------------------------------------------------------------------------------------------- pages

    def _newest_meta(self) -> tuple[int, int, Root, Root]:
        found = []
        page_bytes = 0
        for number in (0, 1):
            # The second one's place depends on the page size, which the first one tells; if it cannot, all are tried.
            sizes = [page_bytes] if page_bytes else [4096, *(512 << shift for shift in range(8))]
            for size in sizes:
                raw = os.pread(self._fd, _HEADER.size + _META.size, number * size)
                meta = self._meta(raw, number)
                if meta is not None and (number == 0 or meta[1] == size):
                    page_bytes = meta[1]
                    found.append(meta)
                    break
            else:  # LMDB opens no file of which one is damaged, or takes what it says there
                self.damage.append(Damage(number, f"should be a meta page, but is none: {UNDONE}"))
        if not found:
            raise Unreadable("neither of its meta pages is whole")
        _, size, last, free_list, names = max(found, key=lambda meta: meta[0])
        return size, last, free_list, names

    def _meta(self, raw: bytes, number: int) -> tuple[int, int, int, Root, Root] | None:
        """(transaction, page size, last page, free list, names); None: it is none."""
        if len(raw) < _HEADER.size + _META.size:
            return None
        page, _, flags, _, _ = _HEADER.unpack_from(raw)
        magic, version, _, _, free_list, names, last, transaction = _META.unpack_from(raw, _HEADER.size)
        if (page, flags & META, magic, version) != (number, META, MAGIC, VERSION):
            return None
        page_bytes = int(_DATABASE.unpack(free_list)[0])
        if not PAGE_BYTES_MIN <= page_bytes <= PAGE_BYTES_MAX or page_bytes & (page_bytes - 1):
            return None
        if not 1 <= last <= max(1, self._file_bytes // page_bytes) * 2:
            return None
        roots = self._root(free_list, INTEGER_KEYS), self._root(names)
        if roots[0] is None or roots[1] is None:
            return None
        return transaction, page_bytes, last, roots[0], roots[1]

    @staticmethod
    def _root(raw: bytes, wanted: int = 0) -> Root | None:
        _, flags, depth, _, _, _, entries, page = _DATABASE.unpack(raw)
        if flags != wanted:  # LMDB would read another kind of tree
            return None
        if depth > DEPTH_MAX or (page == NOTHING) != (entries == 0) or (page == NOTHING) != (depth == 0):
            return None
        return Root(page, entries, depth)

    def _take(self, page: int, owner: int) -> str:
        """Note who uses a page; or why it cannot be so."""
        if not 2 <= page <= self.last_page:
            return f"is named, but the last one is {self.last_page}"
        if self._owner[page]:
            return "is named twice"
        self._owner[page] = owner
        return ""

    def _read(self, page: int, count: int = 1) -> bytes | str:
        try:
            data = os.pread(self._fd, count * self.page_bytes, page * self.page_bytes)
        except OSError as problem:
            return f"cannot be read: {problem.strerror}"
        return data if len(data) == count * self.page_bytes else "lies beyond the end of the file"

    # --------------------------------------------------------------------------------------------------------- trees

    def _walk(self, table: str) -> Iterator[tuple[bytes, bytes, int] | Damage]:
        """(key, data, flags) of every leaf, in order."""
        root, owner = self._roots[table], self._numbers[table]
        self._owner = self._owner.replace(bytes([owner]), b"\0")  # of an earlier walk
        if root.page == NOTHING:
            return
        integers = table == FREE_LIST
        # (page, levels below and with it, keys are from here, and below here)
        stack: list[tuple[int, int, bytes, bytes | None]] = [(root.page, root.depth, b"", None)]
        while stack:
            page, level, low, high = stack.pop()
            wrong = self._take(page, owner)
            if wrong:
                yield Damage(page, wrong)
                continue
            nodes = self._nodes(page, LEAF if level == 1 else BRANCH)
            if isinstance(nodes, str):
                yield Damage(page, nodes)
                continue
            keys = [key for key, _, _ in nodes]
            if level > 1:
                keys[0] = low  # the first key of a branch means nothing
            if not _ascending(keys, low, high, integers=integers):
                yield Damage(page, "has keys out of order")
                continue
            if level > 1:
                ends = [*keys[1:], high]
                below = [
                    (int.from_bytes(data[:6], "little"), level - 1, key, end)
                    for (_, data, _), key, end in zip(nodes, keys, ends, strict=True)
                ]
                stack += reversed(below)
                continue
            for key, data, flags in nodes:
                if not flags & BIG:
                    yield key, data, flags
                    continue
                whole = self._overflow(data, owner)
                yield (key, whole, flags) if isinstance(whole, bytes) else whole

    def _nodes(self, page: int, kind: int) -> list[tuple[bytes, bytes, int]] | str:
        """(key, data, flags) of each node of a page, or what is wrong with it. Data of a branch is the child's page in
        six bytes; of a big node, size in four and page in eight."""
        data = self._read(page)
        if isinstance(data, str):
            return data
        number, _, flags, lower, upper = _HEADER.unpack_from(data)
        if number != page:
            return f"says that it is page {number}"
        if flags & ~DIRTY != kind:
            return f"should be a {'leaf' if kind == LEAF else 'branch'}, but has flags {flags:#x}"
        if not _HEADER.size < lower <= upper <= len(data) or lower % 2:
            return "has an impossible size"
        found = []
        for (offset,) in struct.iter_unpack("<H", data[_HEADER.size : lower]):
            if not upper <= offset <= len(data) - _NODE.size:
                return "has a node outside of it"
            low, high, node_flags, key_bytes = _NODE.unpack_from(data, offset)
            start = offset + _NODE.size + key_bytes
            if key_bytes > KEY_BYTES_MAX or start > len(data):
                return "has a key that is too long"
            key = data[offset + _NODE.size : start]
            if kind == BRANCH:
                found.append((key, data[offset : offset + 6], 0))
                continue
            if node_flags & ~(BIG | TABLE) or not key_bytes:
                return "has a node that cannot be"
            size = low | high << 16
            if node_flags & BIG:
                if start + 8 > len(data):
                    return "has a node that is cut short"
                found.append((key, size.to_bytes(4, "little") + data[start : start + 8], node_flags))
                continue
            if start + size > len(data):
                return "has a node that is cut short"
            found.append((key, data[start : start + size], node_flags))
        return found

    def _overflow(self, where: bytes, owner: int) -> bytes | Damage:
        size, page = int.from_bytes(where[:4], "little"), int.from_bytes(where[4:], "little")
        count = -(-(size + _HEADER.size) // self.page_bytes)
        if page + count - 1 > self.last_page:
            return Damage(page, f"is named, but the last one is {self.last_page}")
        for number in range(page, page + count):
            if wrong := self._take(number, owner):
                return Damage(number, wrong)
        data = self._read(page, count)
        if isinstance(data, str):
            return Damage(page, data)
        number, _, flags, low, high = _HEADER.unpack_from(data)
        if number != page or flags & ~DIRTY != OVERFLOW or (low | high << 16) < count:
            return Damage(page, f"should be {count} pages of one value, but is not")
        for extra in range(page + count, page + (low | high << 16)):
            if wrong := self._take(extra, owner):
                return Damage(extra, wrong)
        return data[_HEADER.size : _HEADER.size + size]


def _ascending(keys: list[bytes], low: bytes, high: bytes | None, *, integers: bool) -> bool:
    if integers:
        if any(len(key) != 8 for key in keys if key):
            return False
        keys = [key[::-1] for key in keys]
        low, high = low[::-1], None if high is None else high[::-1]
    in_order = all(keys[index] < keys[index + 1] for index in range(len(keys) - 1))
    return in_order and low <= keys[0] and (high is None or keys[-1] < high)
