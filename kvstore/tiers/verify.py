"""One record of a slab file, held against what the index says of it, without a slot of DRAM to read it into."""

from __future__ import annotations

import mmap

import xxhash

from kvstore import format
from kvstore.format import PAGE_BYTES, Defect
from kvstore.ports import Disk, read_all
from kvstore.types import Record

WINDOW_BYTES = 256 << 10
"""What is read at once."""


class Verifier:
    """With memory of its own: for one thread."""

    def __init__(self, disk: Disk, *, direct: bool, window_bytes: int = WINDOW_BYTES) -> None:
        self._disk = disk
        self._direct = direct
        self._header_bytes = format.record_header_bytes(direct=direct)
        self._window = memoryview(mmap.mmap(-1, window_bytes))

    def wrong(self, fd: int, offset: int, record: Record, generation: int) -> str:
        """Why what lies at `offset` is not this record, "" if it is. Raises OSError."""
        end = self._header_bytes + record.length
        state = xxhash.xxh3_64()
        for start in range(0, end, len(self._window)):
            # Whole pages, as direct I/O wants them; a slot is some.
            wanted = min(len(self._window), -(-(end - start) // PAGE_BYTES) * PAGE_BYTES)
            count = read_all(self._disk, fd, [self._window[:wanted]], offset + start)
            if count < min(wanted, end - start):
                return "the file ends in it"
            skip = 0
            if start == 0:
                skip = self._header_bytes
                header = format.decode_record_header(self._window[:skip])
                if isinstance(header, Defect):
                    return header.value
                if different := format.difference(header, record, generation, direct=self._direct):
                    return different
            state.update(self._window[skip : min(wanted, end - start)])
        return "" if state.intdigest() == record.checksum else "its bytes do not match their checksum"
