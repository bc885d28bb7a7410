"""Structured logs: one JSON object a line on stderr, for the stdlib's `logging`.

    log = logging.getLogger(__name__)
    log.warning("a segment could not be created", extra=fields(segment=3, why=why))

A peer can neither forge a line (values are JSON strings in ASCII), nor make one long (texts are cut), nor flood the
log: a message template that repeats more than REPEATS_MAX times in PERIOD_S is held back, and the next line that passes
says how many were. Nor can whoever reads the log, or the disk it is written to, hold up the process by standing still:
lines go out on a thread, and what it cannot write is dropped and counted.
"""

from __future__ import annotations

import io
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

from kvstore.errors import shorten

log = logging.getLogger(__name__)

AUDIT = "kvstore.audit"
"""The logger of the audit log, none of whose lines are held back: see `transport/audit.py`."""
STDERR = "stderr"
"""The logger of what others write to standard error."""
TEXT_MAX = 2_000
"""Characters of one text in a line; a traceback may have ten times as many."""
REPEATS_MAX = 20
PERIOD_S = 10.0
TEMPLATES_MAX = 1_024
LINES_MAX = 4_096
"""Lines that wait to be written."""
FLUSH_S = 1.0
"""How long the end of the process waits for lines that are not written yet."""


def fields(**values: object) -> dict[str, dict[str, object]]:
    """`extra=` of a logging call: values that go into the line under their own names."""
    return {"fields": values}


def timestamp(moment: float) -> str:
    """UTC in ISO 8601, with milliseconds."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(moment))}.{int(moment % 1 * 1000):03d}Z"


class JsonFormatter(logging.Formatter):
    """{"time": UTC in ISO 8601, "level", "logger", "message", the record's fields, "exception"}."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": shorten(record.getMessage(), limit=TEXT_MAX),
        }
        extra: dict[str, object] = getattr(record, "fields", {})
        line |= {name: _plain(value) for name, value in extra.items() if name not in line}
        held_back = getattr(record, "held_back", 0)
        if held_back:
            line["held_back"] = held_back
        if record.exc_info:
            # what was raised is at the end
            line["exception"] = self.formatException(record.exc_info)[-10 * TEXT_MAX :]
        return json.dumps(line, ensure_ascii=True)


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float)) else shorten(value, limit=TEXT_MAX)


class RateLimit(logging.Filter):
    """At most REPEATS_MAX lines per PERIOD_S of one template (the text before `%` formatting); critical ones pass, and
    those of the audit log."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._templates: dict[tuple[str, str], list[float]] = {}
        """(logger, template) -> [start of the period, lines in it, held back]."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.CRITICAL or record.name == AUDIT:
            return True
        now = self._clock()
        key = (record.name, str(record.msg))
        state = self._templates.get(key)
        if state is None or now - state[0] >= PERIOD_S:
            if state is None and len(self._templates) >= TEMPLATES_MAX:
                self._templates.clear()  # somebody formats before logging; forget rather than grow
            record.held_back = int(state[2]) if state else 0
            self._templates[key] = [now, 1, 0]
            return True
        state[1] += 1
        if state[1] > REPEATS_MAX:
            state[2] += 1
            return False
        return True


class Writer(logging.Handler):
    """Hands each line to a thread, which writes it to `stream`. Logging never waits for it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str] = queue.Queue(LINES_MAX)
        self._dropped = 0
        threading.Thread(target=self._run, name="kvstored-log", daemon=True).start()

    def write_to(self, stream: TextIO) -> None:
        """From the next line on."""
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._dropped += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait for what is queued, FLUSH_S at most."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, FLUSH_S)

    def _run(self) -> None:
        told = 0
        while True:
            line = self._lines.get()
            dropped = self._dropped - told  # `emit` alone writes the count: set to 0 here, it could lose one
            if dropped:
                told += dropped
                fields = {
                    "logger": __name__,
                    "message": "log lines were dropped: nobody took them",
                    "lines": dropped,
                }
                line = f"{json.dumps({'time': timestamp(time.time()), 'level': 'error', **fields})}\n{line}"
            try:
                self._stream.write(f"{line}\n")
                self._stream.flush()
            except (OSError, ValueError):
                pass  # a full or closed stderr must not end the daemon
            finally:
                self._lines.task_done()


def setup(level: str, stream: TextIO | None = None) -> None:
    """Route all that this process logs to `stream` (stderr) as JSON lines; `level` as in StoreConfig.log_level."""
    handler = Writer(stream or sys.stderr or open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    handler.setFormatter(JsonFormatter())
    handler.addFilter(RateLimit())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    set_level(level)
    logging.raiseExceptions = False
    logging.captureWarnings(True)


def set_level(level: str) -> None:
    """As in StoreConfig.log_level."""
    logging.getLogger().setLevel(level.upper())


def catch_the_rest() -> None:
    """After `setup`, for a process of our own: what Python and its libraries write to standard error past the log goes
    into the log too, a line an object: tracebacks of threads, exceptions nobody could be told of, `print`."""
    sys.excepthook = lambda kind, value, trace: log.critical("not caught", exc_info=(kind, value, trace))
    sys.unraisablehook = _unraisable
    threading.excepthook = _thread_ended
    sys.stderr = Lines(STDERR)


def _unraisable(problem: sys.UnraisableHookArgs) -> None:
    what = problem.err_msg or "an exception that nobody could be told of"
    told = (problem.exc_type, problem.exc_value or problem.exc_type(), problem.exc_traceback)
    log.error("%s", what, exc_info=told, extra=fields(where=repr(problem.object)))


def _thread_ended(problem: threading.ExceptHookArgs) -> None:
    if problem.exc_type is SystemExit:
        return
    name = problem.thread.name if problem.thread is not None else "unknown"
    told = (problem.exc_type, problem.exc_value or problem.exc_type(), problem.exc_traceback)
    log.error("a thread ended by an exception", exc_info=told, extra=fields(thread=name))


class Lines(io.TextIOBase):
    """A text stream whose lines become lines of the log."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._log = logging.getLogger(name)
        self._rest = ""
        self._lock = threading.Lock()

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        with self._lock:
            *lines, rest = (self._rest + text).split("\n")
            self._rest = rest[-TEXT_MAX:]
        for line in lines:
            if line.strip():
                self._log.warning("%s", line.rstrip())
        return len(text)

    def fileno(self) -> int:
        return 2


def catch_native() -> None:
    """After `catch_the_rest`: also what is written to the descriptor itself, as gRPC does when its own log is on. Only
    then: what a process says while it crashes would be lost in the pipe."""
    original = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace", buffering=1)
    reading, writing = os.pipe2(os.O_CLOEXEC)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, Writer):
            handler.write_to(original)
    os.dup2(writing, 2, inheritable=True)
    os.close(writing)

    def read() -> None:
        lines = Lines(STDERR)
        with os.fdopen(reading, encoding="utf-8", errors="backslashreplace") as pipe:
            for line in pipe:
                lines.write(line)

    threading.Thread(target=read, name="kvstored-stderr", daemon=True).start()


def leave(status: int) -> NoReturn:
    """End the process without waiting for any thread but the log's: what is left belongs to the kernel."""
    logging.shutdown()
    os._exit(status)
