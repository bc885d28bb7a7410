"""What the policy learned of each tenant's reuse, kept over restarts: a file beside the daemon's other state.

    <ssd_dir or run_dir>/learned.json   {"kvstored_learned": 1, "policy": "expected", "tenants": {name: {...}}}

It is advice. Losing it costs some minutes of learning, and a file that cannot be read, or says what cannot be, is told
in the log and left out; no promise depends on it. It is written under another name, synced and renamed, on a thread:
every SAVE_S seconds if something was learned, and when the daemon ends in good order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping

from kvstore.server.logs import fields

log = logging.getLogger(__name__)

FILE = "learned.json"
FORMAT = 1
SAVE_S = 60.0
BYTES_MAX = 64 << 20
"""Of the file: it is read whole."""


class LearnedFile:
    def __init__(self, folder: str, policy: str) -> None:
        self._path = os.path.join(folder, FILE)
        self._policy = policy
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
        if learned:
            await asyncio.to_thread(self._save, learned)

    def _save(self, learned: Mapping[str, object]) -> None:
        text = json.dumps(
            {"kvstored_learned": FORMAT, "policy": self._policy, "tenants": _rounded(learned)},
            separators=(",", ":"),
        )
        if text == self._written:
            return
        new = self._path + ".new"
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
