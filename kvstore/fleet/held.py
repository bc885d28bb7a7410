"""Which chunks a node holds, as a page table of hashes: what one node tells and the others remember.

    row of the core's table    0 .. 4095            4096 .. 8191
    page                           0                     1           ...      each at most 32 KiB
    a page on the wire         header | the hashes that are not 0 | tag

A chunk's row number is its place in the table. New chunks get the rows of those that left last, so what a busy node
changes in a second lies in few pages, and each is written as a whole: there is no log to replay and none to lose. The
lowest bit of a hash says where the bytes are: 0 in DRAM, 1 on SSD alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvstore.fleet.secret import TAG_BYTES, FleetSecret

PAGE_ROWS = 4_096
PAGES_MAX = 16_384
"""Of one node: 67 million chunks."""
_MAGIC = b"KVH1"
_HEADER = struct.Struct("<4s16sIII")
"""Magic, boot id, page, version, count."""
PAGE_BYTES_MAX = _HEADER.size + 8 * PAGE_ROWS + TAG_BYTES
Hashes = npt.NDArray[np.uint64]


class Where(IntEnum):
    """Of a chunk in one node."""

    NOWHERE = 0
    SSD = 1
    DRAM = 2


class Held:
    """Of this node. `set` is called by one thread, and the rest by the same."""

    def __init__(self, secret: FleetSecret, boot: bytes) -> None:
        self._secret = secret
        self._boot = boot
        self._pages: list[Hashes] = []
        self.versions: list[int] = []
        """Of each page, as it was last encoded; 0: never."""
        self._gained: dict[int, None] = {}
        self._lost: dict[int, None] = {}
        """Pages whose hashes changed since, in the order in which they did: those with new ones, and those that only
        lost some, which can wait, since what others believe too long costs them one question."""
        self.count = 0

    def __repr__(self) -> str:
        return f"Held({self.count} chunks, {len(self._pages)} pages, {self.behind} to be told)"

    @property
    def behind(self) -> int:
        return len(self._gained) + len(self._lost)

    def set(self, row: int, value: int) -> None:
        """The chunk in this row of the core's table is now `value`; 0: there is none that can be had."""
        number, place = divmod(row, PAGE_ROWS)
        if number >= PAGES_MAX:
            return
        while number >= len(self._pages):
            self._pages.append(np.zeros(PAGE_ROWS, np.uint64))
            self.versions.append(0)
        page = self._pages[number]
        before = int(page[place])
        if before == value:
            return
        page[place] = value
        self.count += bool(value) - bool(before)
        if value:
            self._lost.pop(number, None)
            self._gained[number] = None
        elif number not in self._gained:
            self._lost[number] = None

    def tell_all(self) -> None:
        """Nobody knows anything any more."""
        self._lost.clear()
        self._gained = dict.fromkeys([*self._gained, *range(len(self._pages))])

    def tell(self, page: int) -> None:
        if page < len(self._pages) and page not in self._gained:
            self._lost[page] = None

    def take(self, pages_max: int) -> dict[int, bytes]:
        """Pages to be written now, each with its next version."""
        taken: dict[int, bytes] = {}
        for changed in (self._gained, self._lost):
            while changed and len(taken) < pages_max:
                number = next(iter(changed))
                del changed[number]
                self.versions[number] += 1
                taken[number] = self._encoded(number)
        return taken

    def _encoded(self, number: int) -> bytes:
        page = self._pages[number]
        values = page[page != 0]
        head = _HEADER.pack(_MAGIC, self._boot, number, self.versions[number], len(values))
        body: bytes = head + values.astype("<u8").tobytes()
        return body + self._secret.tag(body)

    def encoded_versions(self) -> bytes:
        """Of all pages: what a reader compares with what it has."""
        body = self._boot + np.array(self.versions, "<u4").tobytes()
        return body + self._secret.tag(body)


def decode_versions(secret: FleetSecret, boot: bytes, data: bytes) -> list[int]:
    """Raises ValueError."""
    body, tag = data[:-TAG_BYTES], data[-TAG_BYTES:]
    if not secret.is_tag(body, tag) or body[:16] != boot or len(body) % 4 or len(body) > 16 + 4 * PAGES_MAX:
        raise ValueError("these are no versions of this node's pages")
    versions: list[int] = np.frombuffer(body[16:], "<u4").tolist()
    return versions


def decode_page(secret: FleetSecret, boot: bytes, number: int, data: bytes) -> tuple[int, Hashes]:
    """(version, hashes). Raises ValueError for what is not this page of this start of the node."""
    if not _HEADER.size + TAG_BYTES <= len(data) <= PAGE_BYTES_MAX:
        raise ValueError(f"{len(data)} bytes are no page")
    body, tag = data[:-TAG_BYTES], data[-TAG_BYTES:]
    magic, its_boot, its_number, version, count = _HEADER.unpack_from(body)
    if magic != _MAGIC or not secret.is_tag(body, tag):
        raise ValueError("no node of this fleet wrote it")
    if (its_boot, its_number) != (boot, number) or len(body) != _HEADER.size + 8 * count:
        raise ValueError("it is another page")
    return version, np.frombuffer(body, "<u8", offset=_HEADER.size).astype(np.uint64)


class Known:
    """What this node knows of another one. Read by one thread while another replaces pages: what is read is one array,
    which nobody changes."""

    def __init__(self) -> None:
        self.versions: dict[int, int] = {}
        self._pages: dict[int, Hashes] = {}
        self._sorted: Hashes = np.empty(0, np.uint64)

    def __len__(self) -> int:
        return len(self._sorted)

    def replace(self, pages: Mapping[int, tuple[int, Hashes]], gone: Iterable[int] = ()) -> None:
        for number, (version, values) in pages.items():
            self.versions[number] = version
            self._pages[number] = values
        for number in gone:
            self.versions.pop(number, None)
            self._pages.pop(number, None)
        held = list(self._pages.values())
        self._sorted = np.sort(np.concatenate(held)) if held else np.empty(0, np.uint64)

    def where(self, hashes: Hashes) -> npt.NDArray[np.uint8]:
        """A `Where` for each."""
        values = self._sorted
        if not len(values):
            return np.zeros(len(hashes), np.uint8)
        at = np.searchsorted(values, hashes)
        inside = at < len(values)
        found = values[np.minimum(at, len(values) - 1)]
        same = inside & (found >> np.uint64(1) == hashes >> np.uint64(1))
        return np.where(same, np.where(found & np.uint64(1), Where.SSD, Where.DRAM), Where.NOWHERE).astype(
            np.uint8
        )


def as_hashes(values: Sequence[int]) -> Hashes:
    return np.array(values, np.uint64)
