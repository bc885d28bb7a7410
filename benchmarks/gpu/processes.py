"""Steps in processes of their own, so that one which loses the context of the card, ends or hangs costs itself and no
other; and several at a time, where it is not time that they measure: kernels are compiled on all cores.

A process is told which steps are its own, and says what it does, a JSON object a line: `begins` before a step, `row`
after it, `speeds` when those change, `done` behind the last. What else it prints is passed on.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from gpu.section import Row

LOST = ("CUDA error", "AcceleratorError", "Triton Error [CUDA]")
"""In an error: whatever is asked of the card by this process next fails too."""
MARK = "step: "
"""Before what is said, at the beginning of its line."""


@dataclass(frozen=True, slots=True)
class Work:
    """Of a process. Its steps are numbered through all of `sections`."""

    sections: tuple[str, ...]
    first: int = 0
    """That is not done yet."""
    part: tuple[int, int] = (0, 1)
    """This one, of so many processes: steps go round."""
    spent_s: float = 0.0
    """Of the time that all have."""
    speeds: dict[str, float] = field(default_factory=dict)

    def mine(self, number: int) -> bool:
        return number >= self.first and number % self.part[1] == self.part[0]

    def told(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__dataclass_fields__})

    @classmethod
    def of(cls, told: str) -> Work:
        found: dict[str, Any] = json.loads(told)
        return cls(**found | {name: tuple(found[name]) for name in ("sections", "part")})


def say(**what: Any) -> None:
    print(f"{MARK}{json.dumps(what)}", flush=True)


def is_lost(row: Row) -> bool:
    return any(word in row.get("error", "") for word in LOST)


def rows_of(work: Work, command: Callable[[Work], Sequence[str]], *, hangs_s: float) -> Iterator[Row]:
    """All rows of this work, in processes one after the other: the next one goes on behind the step that ended the one
    before. `hangs_s`: that a step takes at most. `work.speeds` has what they said."""
    began = time.monotonic()
    while True:
        number, what = work.first - 1, None
        process = subprocess.Popen(command(work), stdout=subprocess.PIPE, text=True, start_new_session=True)
        done = False
        try:
            for message in _messages(process, hangs_s):
                if "begins" in message:
                    number, what = message["number"], message["begins"]
                elif "speeds" in message:
                    work.speeds.update(message["speeds"])
                elif "row" in message:
                    what = None
                    yield message["row"]
                else:
                    done = True
        finally:
            hung = process.poll() is None
            if hung or not done:  # also one that has done all, and hangs at its end
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # daemons that it started, too
            process.wait()
        if done:
            return
        how = f"took more than {hangs_s:.0f} s" if hung else f"ended with {process.returncode}"
        if what is not None:
            yield what | {"error": how}
        elif number < work.first:  # before any step, and so would the next one
            yield {"section": work.sections[0], "what": "its process", "error": how}
            return
        work = replace(work, first=number + 1, spent_s=work.spent_s + time.monotonic() - began)
        began = time.monotonic()


def _messages(process: subprocess.Popen[str], hangs_s: float) -> Iterator[dict[str, Any]]:
    """Until it ends, or says nothing for so long."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=hangs_s)
        except queue.Empty:
            return
        if line is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(hangs_s)
            return
        if not line.startswith(MARK):
            sys.stdout.write(line)
            continue
        yield json.loads(line.removeprefix(MARK))


def rows_of_all(
    works: Sequence[Work], command: Callable[[Work], Sequence[str]], *, hangs_s: float
) -> Iterator[Row]:
    """The same of several at a time, in no order."""
    rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()

    def follow(work: Work) -> None:
        try:
            for row in rows_of(work, command, hangs_s=hangs_s):
                rows.put(row)
        finally:
            rows.put(None)

    for work in works:
        threading.Thread(target=follow, args=(work,), daemon=True).start()
    left = len(works)
    while left:
        row = rows.get()
        if row is None:
            left -= 1
        else:
            yield row
