"""What others do to the SSD tier's files and to their file system while the daemon runs, looked at now and then.

A file that was removed goes on taking writes until its descriptor is closed, and a restart knows nothing of them: no
call fails. So the files' names, links and sizes are looked at, and the room that is left, on a thread of its own,
because each of these calls may hang with the disk.

    severe   what is written now does not last: the tier is read only until it is mended, and the state says why
    mild     the tier serves and stores, but not as much as the settings promise
"""

from __future__ import annotations

import logging
import os
import resource
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.config import StoreConfig
from kvstore.server.logs import fields
from kvstore.tiers.disk_port import Disk, describe
from kvstore.tiers.slab_files import SlabFiles

log = logging.getLogger(__name__)

WATCH_S = 2.0
NAMED_MAX = 3
"""Files that a problem names; of more it says how many."""
INDEX_FILE = "data.mdb"


@dataclass(frozen=True, slots=True)
class Problem:
    what: str
    remedy: str
    severe: bool = False

    def __str__(self) -> str:
        return f"{self.what} ({self.remedy})"


class DiskWatch:
    def __init__(
        self,
        config: StoreConfig,
        slabs: SlabFiles,
        disk: Disk,
        index_directory: str,
        *,
        trouble: Callable[[str], None],
    ) -> None:
        """`trouble` is told, on the watch's thread, what is severe as often as that changes."""
        self._config = config
        self._slabs = slabs
        self._disk = disk
        self._index_file = os.path.join(index_directory, INDEX_FILE)
        self._trouble = trouble
        self._told = ""
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._no_space: dict[str, str] = {}
        """Why, by what could not grow."""
        self._index_inode: tuple[int, int] | None = None
        self._problems: dict[str, Problem] = {}
        self.free_bytes = 0
        """Of the file system, as measured last."""

    def __repr__(self) -> str:
        return f"DiskWatch({', '.join(self._problems) or 'well'})"

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Severe ones first."""
        return tuple(sorted(self._problems.values(), key=lambda problem: not problem.severe))

    @property
    def severe(self) -> str:
        """Why what is written now does not last; "" if it does."""
        return "; ".join(problem.what for problem in self.problems if problem.severe)

    def start(self) -> None:
        """Look from now on. Before that `look` may be called."""
        threading.Thread(target=self._run, name="kvstored-disk-watch", daemon=True).start()

    def close(self) -> None:
        """Does not wait for a look that hangs: it changes nothing."""
        self._ending.set()

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                self.look()
            except Exception:
                log.exception("a look at the SSD tier's files failed")
            if (severe := self.severe) != self._told and not self._ending.is_set():
                self._told = severe
                if severe:
                    self._trouble(severe)
            self._ending.wait(WATCH_S)

    def no_space(self, what: str, why: str) -> None:
        """`what` ("a slab file", "the index") could not grow. Any thread."""
        with self._lock:
            first = what not in self._no_space
            self._no_space[what] = why
        if first:
            log.error(
                "no space left for %s of the SSD tier: it goes on with what it has",
                what,
                extra=fields(
                    ssd_dir=self._config.ssd_dir, why=why, free_bytes=self.free_bytes, remedy=MORE_SPACE
                ),
            )

    def has_space(self, what: str) -> None:
        """It could grow (again)."""
        if what in self._no_space:
            with self._lock:
                self._no_space.pop(what, None)
            log.info("there is space again for %s of the SSD tier", what)

    # ---------------------------------------------------------------------------------------------------- the look

    def look(self) -> None:
        """Once; whatever is new is logged."""
        found = self._files()
        if "directory" not in found:  # else all the rest follows from it
            found |= self._limit() | self._room()
        for kind, problem in found.items():
            if kind not in self._problems:
                say = log.error if problem.severe else log.warning
                say("%s", problem.what, extra=fields(ssd_dir=self._config.ssd_dir, remedy=problem.remedy))
        self._problems = found

    def _files(self) -> dict[str, Problem]:
        found: dict[str, Problem] = {}
        directory = self._config.ssd_dir
        if not os.path.isdir(directory):
            what = f"the directory {directory} was removed under the daemon"
            return {"directory": Problem(what, RESTART, severe=True)}
        damaged = self._slabs.damaged()
        if damaged:
            named = ", ".join(f"{name} {what}" for name, what in damaged[:NAMED_MAX])
            more = f" and {len(damaged) - NAMED_MAX:,} more" if len(damaged) > NAMED_MAX else ""
            found["slab files"] = Problem(f"{named}{more}", RESTART, severe=True)
        try:
            status = os.stat(self._index_file)
        except OSError as problem:
            what = f"the index {self._index_file} is not to be found: {describe(problem)}"
            found["index"] = Problem(what, RESTART, severe=True)
        else:
            inode = (status.st_dev, status.st_ino)
            if self._index_inode is None:
                self._index_inode = inode
            if inode != self._index_inode:
                what = f"the index {self._index_file} was replaced under the daemon"
                found["index"] = Problem(what, RESTART, severe=True)
        return found

    def _limit(self) -> dict[str, Problem]:
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        needed = self._config.ssd_slab_bytes
        if limit == resource.RLIM_INFINITY or limit >= max(needed, self._config.ssd_index_max):
            return {}
        severe = limit < needed
        what = "a slab file" if severe else "the index"
        size = needed if severe else self._config.ssd_index_max
        return {
            "limit": Problem(
                f"a file may have {limit} bytes (RLIMIT_FSIZE), {what} needs up to {size}",
                "raise the limit (ulimit -f, LimitFSIZE=)"
                + (", or lower ssd_slab_bytes" if severe else ", or lower ssd_index_bytes"),
                severe=severe,
            )
        }

    def _room(self) -> dict[str, Problem]:
        try:
            self.free_bytes = free = self._disk.free_bytes(self._config.ssd_dir)
        except OSError as problem:
            return {"room": Problem(f"its file system cannot be asked: {describe(problem)}", RESTART)}
        with self._lock:
            no_space = dict(self._no_space)
        if no_space:
            what, why = next(iter(no_space.items()))
            return {"no space": Problem(f"no space left for {what}: {why}", MORE_SPACE)}
        try:
            index_bytes = os.stat(self._index_file).st_blocks * 512
        except OSError:
            index_bytes = 0
        wanted = self._config.ssd_bytes - self._slabs.bytes - index_bytes
        if wanted <= free:
            return {}
        return {
            "room": Problem(
                f"ssd_bytes={self._config.ssd_bytes} wants {wanted} bytes more, its file system has {free} left",
                "lower ssd_bytes, or free some space there",
            )
        }


RESTART = "leave its files alone; restart the daemon, which drops what is lost and keeps the rest"
MORE_SPACE = "free some space on its file system, or lower ssd_bytes"
