"""Where the commands' answers go: standard output, or a file that the operator named.

An answer that could not be written in full is an error that says so, and never exit status 0. Every command writes by
`say`, `say_json` or `write`, so that none of them has to think of it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import select
import sys
from typing import Any

from kvstore.errors import StoreError

NOTHING_TO_READ = os.O_WRONLY
NOTHING_TO_WRITE = os.O_RDONLY


class OutputFailed(StoreError):
    """An answer could not be written, or only a part of it."""


class OutputClosed(OutputFailed):
    """Whoever read standard output has ended, as `head` does: there is nobody to tell, and nothing is wrong."""


def open_standard_streams() -> None:
    """Give the process the standard streams that it was started without (`>&-`).

    Python has None for them: printing would do nothing and report success, what is meant for standard error would go
    to standard output, and the next socket would get the number that libraries write their complaints to. An input or
    output that is not there fails when it is used; what nobody hears of standard error is dropped.
    """
    for number, flags in ((0, NOTHING_TO_READ), (1, NOTHING_TO_WRITE), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            fd = os.open(os.devnull, flags)
            if fd != number:
                os.dup2(fd, number)
                os.close(fd)
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):  # a name may hold what the terminal's encoding has no letter for
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def say(text: str, *, end: str = "\n") -> None:
    """Write to standard output, at once. Raises OutputFailed."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    _write_out((text + end).encode(encoding, "backslashreplace"))


def say_json(value: Any) -> None:
    """One JSON value in a line."""
    say(json.dumps(value))


def write(data: bytes, path: str | None) -> None:
    """Write bytes to a file, or to standard output where `path` is None. Raises OutputFailed; a file that this call
    made and could not complete is removed."""
    if path is None:
        _write_out(data)
        return
    made = not os.path.lexists(path)
    written = False
    try:
        with open(path, "wb") as file:
            written = True
            file.write(data)
            file.flush()
            if os.path.isfile(path):
                os.fsync(file.fileno())  # some file systems tell only now that they are full
    except (OSError, ValueError) as problem:
        if written and made:
            with contextlib.suppress(OSError):
                os.unlink(path)
        left = ", what is in it now is incomplete" if written and not made and os.path.isfile(path) else ""
        raise OutputFailed(
            f"cannot be written: {_why(problem)}{left}",
            field="--output",
            value=path,
            remedy=_remedy(problem),
        ) from None


def _write_out(data: bytes) -> None:
    """All of it. Not by Python's stream: an unbuffered one (PYTHONUNBUFFERED) takes a part of what it is given, for
    instance when the reader of a pipe ends, and neither raises nor goes on."""
    try:
        sys.stdout.flush()
        try:
            fd = sys.stdout.fileno()
        except io.UnsupportedOperation:  # memory: somebody calls us within a process of his own
            buffer = getattr(sys.stdout, "buffer", None)
            if buffer is not None:
                buffer.write(data)
            else:
                sys.stdout.write(data.decode())
            return
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(fd, rest) :]
            except BlockingIOError:  # whoever shares it made it so
                select.select([], [fd], [])
    except (OSError, ValueError) as problem:  # ValueError: a stream that was closed
        raise _failed(problem) from None


def note(text: str, *, end: str = "\n") -> None:
    """Write to standard error. What cannot be told is not told: the exit status says it."""
    with contextlib.suppress(OSError, ValueError):
        print(text, end=end, file=sys.stderr, flush=True)


def abandon() -> None:
    """Standard output takes no more: what is left in its buffer must not fail a second time at the process' end."""
    with contextlib.suppress(OSError, ValueError):
        fd = os.open(os.devnull, os.O_WRONLY)
        os.dup2(fd, sys.stdout.fileno())
        os.close(fd)


def _failed(problem: OSError | ValueError) -> OutputFailed:
    abandon()
    if isinstance(problem, BrokenPipeError):
        return OutputClosed("standard output was closed by its reader")
    return OutputFailed(
        f"standard output cannot be written: {_why(problem)}; what was written is incomplete",
        remedy=_remedy(problem),
    )


def _why(problem: OSError | ValueError) -> str:
    return (problem.strerror if isinstance(problem, OSError) else None) or str(problem)


def _remedy(problem: OSError | ValueError) -> str:
    number = problem.errno if isinstance(problem, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "free some space there, or write elsewhere"
    if number == errno.EFBIG:
        return "raise the limit of a file's size (ulimit -f), or write elsewhere"
    if number in (errno.EBADF, None):
        return "run kvctl with standard output open"
    return "name a file that can be written"
