"""The slab files of the SSD tier: opened, made, removed, and which of what was written to them a sync has covered."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Sequence

from kvstore.core.events import ChunkRecord, CreateSlab
from kvstore.tiers import format
from kvstore.tiers.disk_port import Disk, describe, read_all, write_all
from kvstore.tiers.format import Defect, SlabHeader
from kvstore.tiers.index import SlabRow
from kvstore.tiers.io_pool import Scratch
from kvstore.types import DiskPlace, SlabId

log = logging.getLogger(__name__)


class SlabFile:
    """An open slab file. Its descriptor lives as long as somebody holds this object, so that no number of a closed one
    is ever written to."""

    __slots__ = ("__weakref__", "fd", "lost", "slot_bytes", "slots", "unsynced")

    def __init__(self, disk: Disk, fd: int, slot_bytes: int, slots: int) -> None:
        self.fd = fd
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.unsynced: dict[int, int] = {}
        """Generation by slot: written since the last sync began."""
        self.lost: dict[int, int] = {}
        """Generation by slot: written before a sync that failed."""
        weakref.finalize(self, _close, disk, fd).atexit = False

    @property
    def bytes(self) -> int:
        return format.slab_file_bytes(self.slot_bytes, self.slots)

    def room(self, length: int, *, direct: bool) -> int:
        """What a slot has left behind a payload of `length` bytes."""
        left = self.slot_bytes - format.record_header_bytes(direct=direct) - length
        if left < 0:
            raise OSError(errno.EINVAL, f"{length} bytes do not fit a slot of {self.slot_bytes}")
        return left


class SlabFiles:
    """Those of one directory. Used by all threads of the tier: what they share is behind a lock that is never held
    during I/O."""

    def __init__(self, directory: str, disk: Disk, *, direct: bool) -> None:
        self._directory = directory
        self._disk = disk
        self._direct = direct
        self._lock = threading.Lock()
        self._slabs: dict[SlabId, SlabFile] = {}
        self._bytes = 0
        self._bytes_max = 0
        self._leftover: dict[SlabId, int] = {}
        """Bytes by number: files that could not be removed."""

    def __len__(self) -> int:
        return len(self._slabs)

    @property
    def bytes(self) -> int:
        """Files that could not be removed included."""
        return self._bytes

    # ------------------------------------------------------------------------------------------------- start and end

    def open(self, rows: Iterable[SlabRow], bytes_max: int) -> list[SlabRow]:
        """Opens those that the index names, as far as `bytes_max` goes, and returns them. One that is missing, not what
        it should be, or beyond a cap that was lowered, is left out, and with it what lay in it."""
        self._bytes_max = bytes_max
        kept: list[SlabRow] = []
        for row in rows:
            path = self.path(row.slab)
            try:
                slab = self._open(row, path)
                if self._bytes + slab.bytes > bytes_max:
                    raise OSError(errno.EDQUOT, "more than ssd_bytes allows")
            except OSError as problem:
                log.warning("dropped %s and all that was in it: %s", path, describe(problem))
                continue
            self._slabs[row.slab] = slab
            self._bytes += slab.bytes
            kept.append(row)
        return kept

    def remove_others(self) -> None:
        """All slab files but the open ones."""
        names = {format.slab_name(number) for number in self._slabs}
        for name in self._disk.names(self._directory):
            if name.startswith("slab-") and name.endswith(".kvs") and name not in names:
                log.warning("removed %s, which the index does not name", name)
                self._disk.unlink(os.path.join(self._directory, name))

    def close(self) -> None:
        """Each descriptor, when the last op that uses it has returned."""
        with self._lock:
            self._slabs.clear()

    def _open(self, row: SlabRow, path: str) -> SlabFile:
        fd = self._disk.open(path, direct=self._direct)
        slab = SlabFile(self._disk, fd, row.slot_bytes, row.slots)
        if self._disk.size(fd) < slab.bytes:
            raise OSError(errno.EINVAL, "the file is too short")
        page = Scratch().page
        read_all(self._disk, fd, [page], 0)
        header = format.decode_slab_header(bytes(page))
        if isinstance(header, Defect):
            raise OSError(errno.EINVAL, f"its header {header.value}")
        if header != SlabHeader(row.slab, row.slot_bytes, row.slots, self._direct):
            raise OSError(errno.EINVAL, f"its header is that of {header}")
        return slab

    # ------------------------------------------------------------------------------------------- new and deleted ones

    def make(self, effect: CreateSlab, scratch: Scratch) -> SlabFile:
        """The file, of which nobody knows before `add`. Raises OSError, EDQUOT if the cap does not allow it."""
        size = format.slab_file_bytes(effect.slot_bytes, effect.slots)
        self._remove_leftovers()
        with self._lock:
            if effect.slab in self._slabs:
                raise FileExistsError(errno.EEXIST, f"slab {effect.slab} exists")
            if (over := self._bytes + size - self._bytes_max) > 0:
                raise OSError(errno.EDQUOT, f"a slab of {size} bytes would exceed ssd_bytes by {over}")
            self._bytes += size
        try:
            path = self.path(effect.slab)
            with contextlib.suppress(FileNotFoundError):
                self._disk.unlink(path)  # of an attempt that failed, and then could not even be removed
            fd = self._disk.open(path, create=True, direct=self._direct)
            slab = SlabFile(self._disk, fd, effect.slot_bytes, effect.slots)
            self._disk.allocate(fd, size)
            header = SlabHeader(effect.slab, effect.slot_bytes, effect.slots, self._direct)
            scratch.page[:] = format.encode_slab_header(header)
            write_all(self._disk, fd, [scratch.page], 0)
            self._disk.sync(fd)
            self._disk.sync_directory(self._directory)
        except BaseException:
            self.remove(effect.slab, size)
            raise
        return slab

    def add(self, number: SlabId, slab: SlabFile) -> None:
        with self._lock:
            self._slabs[number] = slab

    def delete(self, number: SlabId) -> None:
        """The index no longer names it. Its descriptor is closed when the last op that uses it has returned."""
        with self._lock:
            slab = self._slabs.pop(number, None)
        if slab is not None:
            self.remove(number, slab.bytes)

    def remove(self, number: SlabId, size: int) -> None:
        """Bytes of a file that cannot be removed go on counting; it is tried again before the next one is made."""
        try:
            with contextlib.suppress(FileNotFoundError):
                self._disk.unlink(self.path(number))
        except OSError as problem:
            log.warning("%s cannot be removed: %s", self.path(number), describe(problem))
            with self._lock:
                self._leftover[number] = size
        else:
            with self._lock:
                self._bytes -= size

    def _remove_leftovers(self) -> None:
        with self._lock:
            leftover, self._leftover = self._leftover, {}
        for number, size in leftover.items():
            self.remove(number, size)

    def path(self, number: SlabId) -> str:
        return os.path.join(self._directory, format.slab_name(number))

    def damaged(self) -> list[tuple[str, str]]:
        """Name of each file that others did something to, and what. May hang with the disk."""
        with self._lock:
            slabs = list(self._slabs.items())
        found = []
        for number, slab in slabs:
            what = self._damage(slab, self.path(number))
            with self._lock:
                if what and self._slabs.get(number) is slab:  # else we ourselves removed it meanwhile
                    found.append((format.slab_name(number), what))
        return found

    def _damage(self, slab: SlabFile, path: str) -> str:
        try:
            if not self._disk.is_at(slab.fd, path):
                return "was removed or replaced under the daemon"
            size = self._disk.size(slab.fd)
        except OSError as problem:
            return f"cannot be looked at: {describe(problem)}"
        return f"was cut to {size} of {slab.bytes} bytes" if size < slab.bytes else ""

    # ------------------------------------------------------------------------------------------ what is written to them

    def at(self, place: DiskPlace) -> SlabFile:
        with self._lock:
            slab = self._slabs.get(place.slab)
        if slab is None or not 0 <= place.slot < slab.slots:
            raise OSError(errno.ENOENT, f"no such place: slab {place.slab}, slot {place.slot}")
        return slab

    # A failed fdatasync is never repeated: the kernel may have marked the lost pages clean, and the next call would
    # report success. So each slab knows which records were written since its last sync; those of a failed one are
    # *lost*, and an index batch that names one of them is refused as CORRUPT, until it is written anew. A record counts
    # from before its first byte, because the sync that fails may run meanwhile, and again after its last, because one
    # that succeeds may have missed it. A failed one has also lost what was written while it ran: the kernel may have
    # begun to write that back and failed, and it tells of each failure once.

    def begin_write(self, slab: SlabFile, places: Sequence[DiskPlace]) -> None:
        with self._lock:
            for place in places:
                slab.unsynced[place.slot] = place.generation
                slab.lost.pop(place.slot, None)

    def end_write(self, slab: SlabFile, places: Sequence[DiskPlace]) -> None:
        with self._lock:
            slab.unsynced.update((place.slot, place.generation) for place in places)

    def sync(self, slab: SlabFile) -> None:
        with self._lock:
            written, slab.unsynced = slab.unsynced, {}
        try:
            self._disk.sync(slab.fd)
        except OSError:
            with self._lock:
                slab.lost.update(written)
                slab.lost.update(slab.unsynced)
            raise

    def to_sync(self, numbers: Sequence[SlabId], chunks: Sequence[ChunkRecord]) -> dict[SlabId, SlabFile]:
        """Those that are named, and any other in which these chunks are not synced yet."""
        with self._lock:
            wanted = {number: self._slabs[number] for number in numbers if number in self._slabs}
            missing = set(numbers) - wanted.keys()
            for chunk in chunks:
                for place in chunk.places:
                    slab = self._slabs.get(place.slab)
                    if slab is None:
                        missing.add(place.slab)
                    elif place.slot in slab.unsynced:
                        wanted[place.slab] = slab
        if missing:
            raise OSError(errno.ENOENT, f"no such slab: {sorted(missing)}")
        return wanted

    def first_lost(self, chunks: Sequence[ChunkRecord]) -> DiskPlace | None:
        with self._lock:
            if any(slab.lost for slab in self._slabs.values()):
                for chunk in chunks:
                    for place in chunk.places:
                        if self._slabs[place.slab].lost.get(place.slot) == place.generation:
                            return place
        return None


def _close(disk: Disk, fd: int) -> None:
    """It is closed in any case. What it may report is of writes that no sync has covered: nobody counts on those."""
    try:
        disk.close(fd)
    except OSError as problem:
        log.warning("a slab file's close reports: %s", describe(problem))
