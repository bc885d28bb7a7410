"""What the policy learned of each tenant's reuse, kept over restarts: a file beside the daemon's other state.

    <ssd_dir or run_dir>/learned.json   {"kvstored_learned": 1, "policy": "expected", "tenants": {name: {...}}}

It is advice. Losing it costs some minutes of learning, and a file that cannot be read, or says what cannot be, is told
in the log and left out; no promise depends on it. It is written under another name, synced and renamed, on a thread
that a disk may hold up without holding up anybody else: every SAVE_S seconds if something was learned, and when the
daemon ends in good order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping

from kvstore.config import LEARNED_FILE
from kvstore.server.logs import fields

log = logging.getLogger(__name__)

FORMAT = 1
SAVE_S = 60.0
SAVE_MAX_S = 5.0
"""So long one save is waited for; the next begins when it has ended."""
NEW = ".new"
"""What the name ends in until all is written."""
BYTES_MAX = 64 << 20
"""Of the file: it is read whole."""


class LearnedFile:
    def __init__(self, folder: str, policy: str, *, is_ours: Callable[[], bool] = lambda: True) -> None:
        """`is_ours`: whether the folder is still this daemon's; if not, nothing is written there."""
        self._path = os.path.join(folder, LEARNED_FILE)
        self._policy = policy
        self._is_ours = is_ours
        self._thread: threading.Thread | None = None
        self._failed = False
        self._written = ""

    def __repr__(self) -> str:
        return f"LearnedFile({self._path})"

    def load(self, recall: Callable[[Mapping[str, object]], None]) -> None:
        """Hand what is there to the policy; nothing, and a line in the log, where it is no such file."""
        try:
            with open(self._path, "rb") as file:
                text = file.read(BYTES_MAX + 1)
            if len(text) > BYTES_MAX:
                raise ValueError(f"is larger than {BYTES_MAX} bytes")
            found = json.loads(text)
            if not isinstance(found, dict) or found.get("kvstored_learned") != FORMAT:
                raise ValueError("is of another format")
            if found.get("policy") != self._policy:
                return
            tenants = found.get("tenants")
            if not isinstance(tenants, dict):
                raise ValueError("names no tenants")
            recall(tenants)
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as problem:
            log.warning(
                "what was learned of reuse cannot be read, and is learned anew",
                extra=fields(path=self._path, why=str(problem)),
            )

    async def run(self, learned: Callable[[], Mapping[str, object]]) -> None:
        """Save from time to time, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_S)
            await self.save(learned())

    async def save(self, learned: Mapping[str, object]) -> None:
        """Returns after SAVE_MAX_S at the latest."""
        if not learned or (self._thread is not None and self._thread.is_alive()):
            return
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def work() -> None:
            self._save(learned)
            with contextlib.suppress(RuntimeError):  # the loop has ended without us
                loop.call_soon_threadsafe(ended.set)

        self._thread = threading.Thread(target=work, name="kvstored-learned", daemon=True)
        self._thread.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SAVE_MAX_S):
                await ended.wait()

    def _save(self, learned: Mapping[str, object]) -> None:
        text = json.dumps(
            {"kvstored_learned": FORMAT, "policy": self._policy, "tenants": _rounded(learned)},
            separators=(",", ":"),
        )
        if text == self._written or not self._is_ours():
            return
        new = self._path + NEW
        try:
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with open(fd, "wb") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self._path)
        except OSError as problem:
            with contextlib.suppress(OSError):
                os.unlink(new)
            if not self._failed:
                log.warning(
                    "what was learned of reuse cannot be written down: a restart learns anew",
                    extra=fields(path=self._path, why=problem.strerror),
                )
            self._failed = True
            return
        self._failed = False
        self._written = text


def _rounded(value: object) -> object:
    """Counts to a tenth, whole ones without a fraction: a file of half the size."""
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    if isinstance(value, float):
        return int(value) if value == int(value) else round(value, 1)
    return value
