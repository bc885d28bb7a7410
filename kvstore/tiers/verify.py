"""One record of a slab file, held against what the index says of it, without a slot of DRAM to read it into; and
whether a slot that holds nothing keeps what is written to it."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable

import xxhash

from kvstore.tiers import format
from kvstore.tiers.disk_port import Disk, read_all, write_all
from kvstore.tiers.encryption import NOT_WHOLE, OTHER_KEY, DiskCipher, Opening
from kvstore.tiers.format import PAGE_BYTES, Defect, RecordHeader
from kvstore.tiers.io_pool import OK, Result
from kvstore.types import DiskResult, Record

WINDOW_BYTES = 256 << 10
"""What is read or written at once."""
PATTERNS = (0x55, 0xAA, 0)
"""The last leaves nothing behind that could be taken for a record."""


class Verifier:
    """With memory of its own: for one thread. `first_generation` is that of this start of the daemon."""

    def __init__(
        self,
        disk: Disk,
        *,
        direct: bool,
        first_generation: int,
        window_bytes: int = WINDOW_BYTES,
        cipher: DiskCipher | None = None,
        pause: Callable[[int], None] = lambda size: None,
    ) -> None:
        """`pause` is called before each further window of a record, with its size; it may raise OSError."""
        self._disk = disk
        self._direct = direct
        self._first_generation = first_generation
        self._header_bytes = format.record_header_bytes(direct=direct)
        self._cipher = cipher
        self._pause = pause
        self._window = memoryview(mmap.mmap(-1, window_bytes))

    def check(self, fd: int, offset: int, record: Record, generation: int) -> Result:
        """Whether what lies at `offset` is this record: OK, CORRUPT or REUSED. Raises OSError."""
        end = self._header_bytes + record.length
        state = xxhash.xxh3_64()
        opening: Opening | None = None
        for start in range(0, end, len(self._window)):
            # Whole pages, as direct I/O wants them; a slot is some.
            wanted = min(len(self._window), _whole_pages(end - start))
            if start:
                self._pause(wanted)
            count = read_all(self._disk, fd, [self._window[:wanted]], offset + start)
            if count < min(wanted, end - start):
                return Result(DiskResult.CORRUPT, "the file ends in it")
            skip = 0
            if start == 0:
                skip = self._header_bytes
                header = format.decode_record_header(self._window[:skip])
                if isinstance(header, Defect):
                    return Result(DiskResult.CORRUPT, header.value)
                if generation < header.generation < self._first_generation:
                    return Result(DiskResult.REUSED, "was reused before the restart")
                if different := format.difference(header, record, generation, direct=self._direct):
                    return Result(DiskResult.CORRUPT, different)
                if header.sealing:
                    about = bytes(self._window[: format.RECORD_ABOUT_BYTES])
                    opening = None if self._cipher is None else self._cipher.opening(header.sealing, about)
                    if opening is None:
                        return Result(DiskResult.REUSED, OTHER_KEY)
            data = self._window[skip : min(wanted, end - start)]
            if opening is not None:
                opening.decrypt(data)
            state.update(data)
        if opening is not None and not opening.is_whole():
            return Result(DiskResult.CORRUPT, NOT_WHOLE)
        if state.intdigest() != record.checksum:
            return Result(DiskResult.CORRUPT, "its bytes do not match their checksum")
        return OK

    def header(self, fd: int, offset: int) -> RecordHeader | Defect:
        """What the record at `offset` says of itself. Raises OSError."""
        page = self._window[:PAGE_BYTES]
        if read_all(self._disk, fd, [page], offset) < PAGE_BYTES:
            return Defect.SHORT
        return format.decode_record_header(page)

    def rewrite(self, path: str, offset: int, size: int) -> Result:
        """Write patterns over [offset, offset + size), whole pages, and read them back: from the medium where the file
        system can bypass its cache. Raises OSError.

        By a descriptor of its own: the kernel tells each once of writes that were lost, and what the sync of this one
        is told must not be kept from those who sync the file for its records."""
        try:
            fd = self._disk.open(path, direct=True)
        except OSError as problem:
            if problem.errno != errno.EINVAL:
                raise
            fd = self._disk.open(path)
        try:
            return self._rewrite(fd, offset, size)
        finally:
            self._disk.close(fd)

    def _rewrite(self, fd: int, offset: int, size: int) -> Result:
        for pattern in PATTERNS:
            wanted = bytes([pattern]) * min(size, len(self._window))
            for start in range(0, size, len(self._window)):
                window = self._window[: min(size - start, len(self._window))]
                window[:] = wanted[: len(window)]
                write_all(self._disk, fd, [window], offset + start)
            self._disk.sync(fd)
            for start in range(0, size, len(self._window)):
                window = self._window[: min(size - start, len(self._window))]
                window[:] = bytes([pattern ^ 0xFF]) * len(window)  # so that reading nothing is no success
                read_all(self._disk, fd, [window], offset + start)
                if window != wanted[: len(window)]:
                    return Result(DiskResult.CORRUPT, "read back other bytes than were written")
        return OK


def _whole_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES
