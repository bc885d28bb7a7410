"""The directory of a namespace: which chunks are where, in shared memory, so that who looks needs no message.

The daemon writes it (`Writer`), workers that opened the namespace map it read-only (`View`). docs/formats.md describes
it byte by byte. Little-endian, all numbers of 64 bits at multiples of eight:

    offset  bytes
    0       8       magic "KVDIRECT"
    8       4       version, 1
    12      4       shards of a chunk
    16      8       rows that there is room for
    24      8       buckets that there is room for, a power of two
    32      16      boot id of the daemon that made it
    48      8       1: chunks may be beyond this node, of which the directory knows nothing: whoever does not find one
                    asks the daemon
    64      8       closed: not 0 where the daemon alone may be asked
    128     8       heartbeat: when the daemon's loop last turned, in ms of CLOCK_MONOTONIC
    192     8       buckets in use, a power of two; 0 while they are being put in order anew
    4096    64 each buckets: seven entries, and how many entries of this bucket stand in later ones
    ...     8 * (5 + 3 * shards) each rows

An entry is 0, or (upper half of the key's hash) << 32 | row + 1. The lower half of the hash says which bucket. What
does not fit there stands in one of the next PROBES_MAX - 1; where it does not fit either, the bucket is marked UNSURE.

    row:    state << 24 | tokens | sequence << 32
            key, 32 bytes
            per shard: segment << 32 | cell, generation, checksum

Keys. A key of 32 bytes stands in a row as it is; of another one its digest does, and the state says so (MAPPED), so
that the two can never be taken for each other.

Order. Three rules, each enough for right bytes against a daemon that is stopped, killed or overtaken at any point:

1. The sequence of a row is odd while the row is written. Who reads it takes it before and after; what differs, or is
   odd, is read again. The writer's stores are odd, fence, row, fence, even.
2. Beside a cell's generation in the header of its segment stands a tag of the key whose bytes are in the slot
   (`tag_of`). Generation and tag are compared before the first byte is copied and after the last. So a place that was
   torn from its key by whatever means is void, and so is a slot that is used anew meanwhile.
3. The daemon writes new generations before it withdraws rows, withdraws before it publishes, and lets bytes into a slot
   after all of these. A fence stands between (`memory.fence`).

`memory.fence` says why that holds on x86-64 and aarch64.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.memory import fence
from kvstore.types import ChunkKey, Extent, Extents

MAGIC = b"KVDIRECT"
VERSION = 1
HEADER_BYTES = 4096
BUCKET_BYTES = 64
ENTRIES = 7
PROBES_MAX = 8
"""Buckets in which a key may stand."""
LOAD_MAX = 4
"""Entries a bucket, in the mean; with more there are twice as many buckets."""
KEY_BYTES = 32
ROW_WORDS = 5
SHARD_WORDS = 3

HIT = 1
ON_SSD = 2
MAPPED = 0x80
"""With one of these: the row has the digest of the key."""
UNSURE = 1 << 32
"""Of a bucket, beside its count: some key found no room, so that what is not found may be there."""

_CLOSED, _HEARTBEAT, _BUCKETS = 8, 16, 24
"""Numbers of the words in the header."""
_HEADER = struct.Struct("<8sIIQQ16sQ")
_WORDS = struct.Struct("<4Q")
_MASK = (1 << 64) - 1
_LOW = (1 << 32) - 1
_ODD = 1 << 32
_TURN = 2 << 32
_STATES = 0xFF << 24
_TOKENS = (1 << 24) - 1
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
_LAST = 0xFF51AFD7ED558CCD
_AGAIN = 64
"""So often a row is read again that changes under the reader, before the daemon is asked."""
BULK_MIN = 16
"""From so many keys on, arrays pay."""

Words = npt.NDArray[np.uint64]
_U = np.uint64
_FACTOR_WORDS = np.array(_FACTORS, np.uint64)


def digest(key: bytes) -> bytes:
    """What stands for a key that has not 32 bytes."""
    return hashlib.blake2b(key, digest_size=KEY_BYTES, person=b"kvs.directory.1").digest()


def row_bytes(shards: int) -> int:
    return 8 * (ROW_WORDS + SHARD_WORDS * shards)


def size_bytes(shards: int, rows: int, buckets: int) -> int:
    """Of the whole, in pages."""
    size = HEADER_BYTES + BUCKET_BYTES * buckets + row_bytes(shards) * rows
    return -(-size // 4096) * 4096


def buckets_for(rows: int) -> int:
    """A power of two that leaves no bucket more than LOAD_MAX entries in the mean."""
    return 1 << max(0, (max(1, -(-rows // LOAD_MAX)) - 1).bit_length())


def hash_of(key: bytes) -> int:
    """Of 32 bytes. The daemon and its workers agree on it, and nobody else needs to: whoever can make keys that collide
    slows down nobody outside of his namespace."""
    a: int
    b: int
    c: int
    d: int
    a, b, c, d = _WORDS.unpack(key)
    h: int = (a * _FACTORS[0] + b * _FACTORS[1] + c * _FACTORS[2] + d * _FACTORS[3]) & _MASK
    h = ((h ^ h >> 32) * _LAST) & _MASK
    return h ^ h >> 29


def hashes_of(keys: Words) -> Words:
    """The same for each row of four words."""
    h: Words = np.einsum("ij,j->i", keys, _FACTOR_WORDS)  # a third of the time of four products and their sum
    h ^= h >> _U(32)
    h *= _U(_LAST)
    h ^= h >> _U(29)
    return h


def tag_of(hashed: int) -> int:
    """What stands beside the generation of a slot that has the bytes of this key; never 0."""
    return hashed | 1


def tags_of(hashed: Words) -> Words:
    """`tag_of` each."""
    return hashed | _U(1)


def plain(keys: Sequence[bytes]) -> tuple[list[bytes] | Sequence[bytes], list[int]]:
    """The 32 bytes of each key, and MAPPED or 0."""
    if set(map(len, keys)) == {KEY_BYTES}:
        return keys, []
    mapped = [0 if len(key) == KEY_BYTES else MAPPED for key in keys]
    return [digest(key) if which else key for key, which in zip(keys, mapped, strict=True)], mapped


def words_of(keys: Sequence[bytes]) -> Words:
    """Of keys of 32 bytes: four words each."""
    return np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 4)


def places_of(keys: Sequence[ChunkKey], extents: Sequence[Extent], shards: int) -> tuple[Words, Words]:
    """(tag of each extent's slot, words of each key's places) of chunks in DRAM; `extents` has all shards of each."""
    columns = [np.frombuffer(column, np.uint64) for column in Extents.of(extents).columns]
    segment, _, _, cell, generation, checksum = columns
    tags = np.repeat(tags_of(hashes_of(words_of(plain(keys)[0]))), shards)
    places = np.empty((len(segment), SHARD_WORDS), np.uint64)
    places[:, 0] = segment << _U(32) | cell
    places[:, 1] = generation
    places[:, 2] = checksum
    return tags, places.reshape(-1, SHARD_WORDS * shards)


class _Memory:
    """The words of a directory, as numbers and as arrays."""

    def __init__(self, array: npt.NDArray[np.uint8], shards: int, rows: int, buckets: int) -> None:
        self.shards = shards
        self.stride = ROW_WORDS + SHARD_WORDS * shards
        self.rows_max = rows
        self.bucket_count = buckets
        words: Words = array[: size_bytes(shards, rows, buckets)].view("<u8")
        self.header = words[: HEADER_BYTES // 8]
        first = HEADER_BYTES // 8
        self.rows_at = first + 8 * buckets
        self.buckets: Words = words[first : self.rows_at].reshape(buckets, 8)
        self.rows: Words = words[self.rows_at : self.rows_at + rows * self.stride].reshape(rows, self.stride)
        self.word: memoryview = words.data
        """All words: an index is one load, or one store, of eight bytes."""


class Found:
    """What a look at many keys found: one entry for each key, in their order."""

    __slots__ = ("_hashed", "_rows", "_words", "hits", "states", "usable")

    def __init__(
        self,
        states: bytes,
        rows: list[int] | npt.NDArray[np.intp],
        words: list[Sequence[int]] | Words,
        hashed: list[int] | Words,
    ) -> None:
        self.states = states
        """HIT, ON_SSD or 0 of each key."""
        self._rows = rows
        self._words = words
        self._hashed = hashed
        first = states.find(0)
        self.usable = len(states) if first < 0 else first
        """Leading keys whose bytes can be had, those on SSD included."""
        first_cold = states.find(ON_SSD)
        self.hits = self.usable if first_cold < 0 else min(self.usable, first_cold)
        """Leading keys that are in DRAM."""

    @property
    def numbers(self) -> list[int]:
        """Of the rows, -1 for none."""
        rows: list[int] = self._rows.tolist() if isinstance(self._rows, np.ndarray) else self._rows
        self._rows = rows
        return rows

    def tokens(self) -> list[int]:
        """Of each key; 0 of one that is not there."""
        if isinstance(self._words, np.ndarray):
            tokens: list[int] = (self._words[:, 0] & _U(_TOKENS)).tolist()
            return tokens
        return [words[0] & _TOKENS if words else 0 for words in self._words]

    def words(self, numbers: Sequence[int] | range) -> Words:
        """The rows of these keys, which are there."""
        if isinstance(self._words, np.ndarray):
            leading = isinstance(numbers, range) and numbers.start == 0
            return self._words[: len(numbers)] if leading else self._words[list(numbers)]
        return np.array([self._words[number] for number in numbers], np.uint64)

    def words_of_one(self) -> Sequence[int]:
        """The row of the first key, which is there."""
        words = self._words[0]
        return words.tolist() if isinstance(words, np.ndarray) else words

    def tags(self, numbers: Sequence[int] | range) -> list[int]:
        """What stands beside the generations of their slots."""
        hashed = self._hashed.tolist() if isinstance(self._hashed, np.ndarray) else self._hashed
        return [tag_of(hashed[number]) for number in numbers]

    def firsts(self, numbers: Sequence[int] | range) -> list[int]:
        """The first words of their rows."""
        if isinstance(self._words, np.ndarray):
            column = self._words[:, 0].tolist()
            return [column[number] for number in numbers]
        return [self._words[number][0] for number in numbers]


class View(_Memory):
    """The reader's side. Of the process that mapped it; needs no lock."""

    def __init__(self, array: npt.NDArray[np.uint8], boot_id: bytes) -> None:
        """Raises ValueError where these are not the bytes of a directory of this boot."""
        if array.size < HEADER_BYTES:
            raise ValueError(f"a directory has at least {HEADER_BYTES} bytes, not {array.size}")
        magic, version, shards, rows, buckets, boot, beyond = _HEADER.unpack_from(array.data, 0)
        if magic != MAGIC or version != VERSION:
            raise ValueError(f"not a directory of version {VERSION}: it begins with {magic!r}, {version}")
        if boot != boot_id:
            raise ValueError("a directory of another start of the daemon")
        if buckets & (buckets - 1) or not buckets or size_bytes(shards, rows, buckets) > array.size:
            raise ValueError(f"{rows} rows and {buckets} buckets cannot have {array.size} bytes")
        super().__init__(array, shards, rows, buckets)
        self.ask_for_others = bool(beyond)
        """What is not found may be beyond this node: the daemon knows."""

    def __repr__(self) -> str:
        return f"View({self.word[_BUCKETS]} buckets, {'closed' if self.closed else 'open'})"

    @property
    def closed(self) -> bool:
        return self.word[_CLOSED] != 0

    @property
    def buckets_in_use(self) -> int:
        """0: they are being put in order."""
        count: int = self.word[_BUCKETS]
        return count

    @property
    def beaten_at_ms(self) -> int:
        beaten: int = self.word[_HEARTBEAT]
        return beaten

    def look_up(self, keys: Sequence[ChunkKey]) -> Found | None:
        """None: the daemon has to be asked (closed, being put in order, or not to be read for other reasons)."""
        buckets = self.word[_BUCKETS]
        if self.word[_CLOSED] or not buckets:
            return None
        # The load of a word comes before those of what it leads to: on aarch64 only a fence says so.
        fence()
        try:
            found = self._one_by_one(keys, buckets) if len(keys) < BULK_MIN else self._many(keys, buckets)
        except _Unsure:
            return None
        if found.usable < len(keys):  # what is not found may have been on its way elsewhere
            fence()
            if self.word[_BUCKETS] != buckets:
                return None
        return None if self.word[_CLOSED] else found

    def rows_in_use(self) -> npt.NDArray[np.intp]:
        """That the buckets name at this moment. (Others may have no page yet, and would get one by being read.)"""
        entries = self.buckets[: self.buckets_in_use, :ENTRIES].ravel()
        rows: npt.NDArray[np.intp] = (entries[entries != 0] & _U(_LOW)).astype(np.intp) - 1
        found: npt.NDArray[np.intp] = rows[rows < self.rows_max]
        return found

    def sequences(self, rows: Sequence[int]) -> list[int]:
        """The first words of these rows, as they are now."""
        word, at, stride = self.word, self.rows_at, self.stride
        return [word[at + row * stride] for row in rows]

    # --------------------------------------------------------------------------------------------- one by one

    def _one_by_one(self, keys: Sequence[ChunkKey], buckets: int) -> Found:
        states = bytearray(len(keys))
        rows: list[int] = []
        words: list[Sequence[int]] = []
        hashes: list[int] = []
        for number, key in enumerate(keys):
            mapped = 0 if len(key) == KEY_BYTES else MAPPED
            short = digest(key) if mapped else key
            hashed = hash_of(short)
            row, found = self._find(short, hashed, mapped, buckets)
            hashes.append(hashed)
            rows.append(row)
            words.append(found)
            if found:
                states[number] = (found[0] & _STATES) >> 24 & ~MAPPED
        return Found(bytes(states), rows, words, hashes)

    def _find(self, key: bytes, hashed: int, mapped: int, buckets: int) -> tuple[int, Sequence[int]]:
        """(row, its words) of one key; (-1, ()) if it is not there. Raises _Unsure."""
        wanted = hashed >> 32
        home = hashed & _LOW & (buckets - 1)
        four = _WORDS.unpack(key)
        first = HEADER_BYTES // 8
        word = self.word
        entries = word[first + 8 * home : first + 8 * home + 8].tolist()
        elsewhere = entries[ENTRIES]
        for probe in range(PROBES_MAX):
            if probe:
                at = first + 8 * ((home + probe) & (buckets - 1))
                entries = word[at : at + 8].tolist()
            for entry in entries[:ENTRIES]:
                if entry and entry >> 32 == wanted:
                    row = (entry & _LOW) - 1
                    words = self._row(row)
                    if words and words[1:5] == list(four) and (words[0] & _STATES) >> 24 & MAPPED == mapped:
                        return row, words
            if not elsewhere:
                return -1, ()
        if elsewhere & UNSURE:
            raise _Unsure
        return -1, ()

    def _row(self, row: int) -> list[int]:
        """The words of a row, whole; none of one that holds nothing. Raises _Unsure."""
        if row >= self.rows_max:
            return []
        at = self.rows_at + row * self.stride
        word = self.word
        for _ in range(_AGAIN):
            before = word[at]
            if before & _ODD:
                continue
            fence()
            words: list[int] = word[at : at + self.stride].tolist()
            fence()
            if word[at] == before == words[0]:
                return words if before & _STATES else []
        raise _Unsure

    # --------------------------------------------------------------------------------------------------- many

    def _many(self, keys: Sequence[ChunkKey], buckets: int) -> Found:
        """The same in a few passes over arrays; what is not where it is first looked for, key by key."""
        shorts, mapped = plain(keys)
        four = words_of(shorts)
        hashed = hashes_of(four)
        home = (hashed & _U(buckets - 1)).astype(np.intp)
        lines = self.buckets.take(home, axis=0)
        same = (lines[:, :ENTRIES] >> _U(32)) == (hashed >> _U(32))[:, None]
        column = same.argmax(axis=1)
        everybody = np.arange(len(keys))
        row = (lines[everybody, column] & _U(_LOW)).astype(np.intp) - 1
        none = ~same[everybody, column]
        none |= row >= self.rows_max
        row[none] = -1
        words, good = self._rows(row, four, mapped)
        # Another key's entry may look the same; the row may change at this moment; others stand elsewhere.
        if not good.all():
            self._look_on(shorts, mapped, hashed, buckets, row, words, good, lines)
        states = ((words[:, 0] >> _U(24)) & _U(0xFF & ~MAPPED)).astype(np.uint8)
        return Found(states.tobytes(), row, words, hashed)

    def _look_on(
        self,
        shorts: Sequence[bytes],
        mapped: list[int],
        hashed: Words,
        buckets: int,
        row: npt.NDArray[Any],
        words: Words,
        good: npt.NDArray[np.bool_],
        lines: Words,
    ) -> None:
        """For those that were not good, where there may be more of them; puts what it finds into `row` and `words`."""
        rest = ~good & ((row >= 0) | (lines[:, ENTRIES] != 0))
        row[~good] = -1
        for number in np.flatnonzero(rest).tolist():
            found, its = self._find(
                shorts[number], int(hashed[number]), mapped[number] if mapped else 0, buckets
            )
            row[number] = found
            if its:
                words[number] = its
                good[number] = True
        words[~good] = 0

    def _rows(
        self, row: npt.NDArray[Any], four: Words, mapped: list[int]
    ) -> tuple[Words, npt.NDArray[np.bool_]]:
        """The words of these rows (of -1 some row's), and which are whole and hold these keys."""
        before = self.rows[row, 0]
        fence()
        words = self.rows.take(row, axis=0, mode="wrap")
        fence()
        after = self.rows[row, 0]
        good = (row >= 0) & (before == after) & (words[:, 0] == before) & (before & _U(_ODD) == 0)
        same = words[:, 1:5] == four
        if not same.all():
            good &= same.all(axis=1)
        good &= (before & _U(_STATES & ~(MAPPED << 24))) != 0
        good &= (before & _U(MAPPED << 24)) == (np.array(mapped, np.uint64) << _U(24) if mapped else _U(0))
        return words, good


class _Unsure(Exception):
    """The daemon has to be asked."""


class Writer(_Memory):
    """The daemon's side; of one thread."""

    def __init__(
        self,
        array: npt.NDArray[np.uint8],
        *,
        shards: int,
        rows: int,
        buckets_max: int,
        buckets: int,
        boot_id: bytes,
        ask_for_others: bool = False,
    ) -> None:
        """`array`: zeros. `buckets` are in use at first, a power of two as `buckets_max`."""
        assert array.size >= size_bytes(shards, rows, buckets_max), (array.size, shards, rows, buckets_max)
        assert 0 < buckets <= buckets_max and not buckets & (buckets - 1), (buckets, buckets_max)
        super().__init__(array, shards, rows, buckets_max)
        _HEADER.pack_into(
            array.data, 0, MAGIC, VERSION, shards, rows, buckets_max, boot_id, int(ask_for_others)
        )
        self._buckets = buckets
        self._closed = False
        self.count = 0
        """Entries."""
        self._rows_ever = 0
        """Rows from there on were never touched: to look at one would give it memory."""
        self._homeless: set[int] = set()
        """Rows that no bucket has an entry of."""
        self.word[_BUCKETS] = buckets

    def __repr__(self) -> str:
        return f"Writer({self.count} rows, {self._buckets} buckets{', closed' if self._closed else ''})"

    def close(self, closed: bool) -> None:
        """Send every reader to the daemon, or no longer."""
        fence()
        self._closed = closed
        self.word[_CLOSED] = int(closed)
        fence()

    def beat(self, now_ms: int) -> None:
        self.word[_HEARTBEAT] = now_ms

    def unpublish(self, rows: Sequence[int]) -> None:
        """These hold nothing any more. Bytes may be let into their slots after that."""
        word, at, stride = self.word, self.rows_at, self.stride
        for row in rows:
            first = word[at + row * stride]
            assert first & _STATES, (row, first)
            word[at + row * stride] = (first + _TURN & _MASK) & ~(_STATES | _TOKENS)
        fence()
        hashed = hashes_of(self.rows[np.array(rows, np.intp), 1:5]).tolist()
        for row, one in zip(rows, hashed, strict=True):
            self._take_out(row, one)
        self.count -= len(rows)

    def publish(
        self, rows: Sequence[int], keys: Sequence[ChunkKey], state: int, tokens: Sequence[int], places: Words
    ) -> None:
        """Each row holds this key, in this state; `places` has the words of its shards, or none where there are none in
        DRAM. A row that holds a key already holds the same."""
        shorts, mapped = plain(keys)
        four = words_of(shorts)
        hashed = hashes_of(four)
        which = np.array(rows, np.intp)
        self._rows_ever = max(self._rows_ever, int(which.max()) + 1)
        before = self.rows[which, 0]
        new = np.flatnonzero(before & _U(_STATES) == 0).tolist()
        self.rows[which, 0] = before | _U(_ODD)
        fence()
        self.rows[which, 1:5] = four
        self.rows[which, 5:] = places if len(places) else 0
        fence()
        states = np.uint64(state) if not mapped else np.array(mapped, np.uint64) | _U(state)
        about = (states << _U(24)) | np.array(tokens, np.uint64)
        self.rows[which, 0] = ((before >> _U(32) << _U(32)) + _U(_TURN)) | about
        fence()
        self.count += len(new)
        if self.count > LOAD_MAX * self._buckets and self._buckets < self.bucket_count:
            self._grow()
            return
        some = hashed.tolist()
        if len(new) >= 4 * BULK_MIN:
            self._put_in_many(which[new], hashed[new])
        else:
            for number in new:
                self._put_in(rows[number], some[number])

    # ------------------------------------------------------------------------------------------------ buckets

    def _put_in(self, row: int, hashed: int) -> None:
        word = self.word
        mask = self._buckets - 1
        home = hashed & _LOW & mask
        first = HEADER_BYTES // 8
        entry = hashed >> 32 << 32 | row + 1
        for probe in range(PROBES_MAX):
            at = first + 8 * ((home + probe) & mask)
            for number in range(at, at + ENTRIES):
                if not word[number]:
                    if probe:  # so that nobody stops looking before it is there
                        word[first + 8 * home + ENTRIES] += 1
                        fence()
                    word[number] = entry
                    return
        word[first + 8 * home + ENTRIES] |= UNSURE
        self._homeless.add(row)

    def _take_out(self, row: int, hashed: int) -> None:
        if row in self._homeless:
            self._homeless.discard(row)
            return
        word = self.word
        mask = self._buckets - 1
        home = hashed & _LOW & mask
        first = HEADER_BYTES // 8
        entry = hashed >> 32 << 32 | row + 1
        for probe in range(PROBES_MAX):
            at = first + 8 * ((home + probe) & mask)
            for number in range(at, at + ENTRIES):
                if word[number] == entry:
                    word[number] = 0
                    if probe:
                        word[first + 8 * home + ENTRIES] -= 1
                    return
        raise AssertionError(f"row {row} has no entry")

    def _put_in_many(self, rows: npt.NDArray[Any], hashed: Words) -> None:
        """`_put_in` for each: all that find room where they belong in a few passes, the rest one by one."""
        homes = (hashed & _U(self._buckets - 1)).astype(np.intp)
        order = np.argsort(homes, kind="stable")
        homes, rows, hashed = homes[order], rows[order], hashed[order]
        starts = np.flatnonzero(np.append(True, homes[1:] != homes[:-1]))
        counts = np.diff(np.append(starts, len(homes)))
        rank = np.arange(len(homes)) - np.repeat(starts, counts)
        free = self.buckets[homes[starts], :ENTRIES] == 0
        # Where the n-th free entry of a bucket is: the order of a stable sort that has the free ones first.
        columns = np.argsort(~free, axis=1, kind="stable")
        room = np.repeat(free.sum(axis=1), counts)
        fits = rank < room
        group = np.repeat(np.arange(len(starts)), counts)[fits]
        entries = ((hashed >> _U(32)) << _U(32)) | (rows.astype(np.uint64) + _U(1))
        self.buckets[homes[fits], columns[group, rank[fits]]] = entries[fits]
        for row, one in zip(rows[~fits].tolist(), hashed[~fits].tolist(), strict=True):
            self._put_in(row, one)

    def _grow(self) -> None:
        """Twice as many buckets, until they are enough. Readers ask the daemon meanwhile."""
        self.word[_BUCKETS] = 0
        fence()
        self.buckets[: self._buckets] = 0
        while self.count > LOAD_MAX * self._buckets and self._buckets < self.bucket_count:
            self._buckets *= 2
        self._homeless.clear()
        rows = np.flatnonzero(self.rows[: self._rows_ever, 0] & _U(_STATES))
        self._put_in_many(rows, hashes_of(self.rows[rows, 1:5]))
        fence()
        self.word[_BUCKETS] = self._buckets

    # ------------------------------------------------------------------------------------------------- looking

    def entries(self) -> dict[bytes, tuple[int, list[int]]]:
        """All that it holds, by the key's 32 bytes behind MAPPED or 0: (state, words of its places). For tests, the
        simulator and debugging."""
        found = {}
        for row in np.flatnonzero(self.rows[: self._rows_ever, 0] & _U(_STATES)).tolist():
            words = self.rows[row].tolist()
            state = (words[0] & _STATES) >> 24
            key = bytes([state & MAPPED]) + _WORDS.pack(*words[1:5])
            found[key] = (state & ~MAPPED, words[ROW_WORDS:])
        return found
