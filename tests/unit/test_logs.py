"""One JSON object a line, whatever a peer puts into it; and no flood."""

import io
import json
import logging
import subprocess
import sys
import threading

import pytest

from kvstore.server import logs


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def log(clock):
    """A logger of its own, so that the one of pytest stays as it is."""
    logger = logging.Logger("kvstore.test")
    logger.stream = io.StringIO()
    handler = logging.StreamHandler(logger.stream)
    handler.setFormatter(logs.JsonFormatter())
    handler.addFilter(logs.RateLimit(clock))
    logger.addHandler(handler)
    return logger


def lines(log) -> list[dict]:
    return [json.loads(line) for line in log.stream.getvalue().splitlines()]


def test_fields(log):
    log.warning(
        "a %s", "b", extra=logs.fields(number=1, level="not this", data=b"\xff", nested={"a": [1, "ü"]})
    )
    (line,) = lines(log)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "logger": "kvstore.test",
        "message": "a b",
        "number": 1,
        "data": "ff",
        "nested": {"a": [1, "\\xfc"]},
    }


def test_a_value_cannot_forge_a_line(log):
    log.info("%s", 'x"}\n{"level": "critical"}\x1b[2J')
    (line,) = lines(log)
    assert line["level"] == "info"
    assert "\x1b" not in log.stream.getvalue()


def test_texts_are_cut(log):
    log.info("x" * 10_000, extra=logs.fields(value="y" * 10_000))
    (line,) = lines(log)
    assert len(line["message"]) < 2_100
    assert len(line["value"]) < 2_100


def test_exceptions_keep_their_end(log):
    try:
        raise ValueError("the end")
    except ValueError:
        log.exception("failed")
    (line,) = lines(log)
    assert line["exception"].endswith("ValueError: the end")


def test_a_flood_is_held_back_and_counted(log, clock):
    for number in range(1_000):
        log.warning("peer %d misbehaves", number)
        log.warning("something else") if number == 500 else None
    assert [line["message"] for line in lines(log)].count("something else") == 1
    assert len(lines(log)) == logs.REPEATS_MAX + 1
    clock.now = logs.PERIOD_S
    log.warning("peer %d misbehaves", 1)
    assert lines(log)[-1]["held_back"] == 1_000 - logs.REPEATS_MAX
    log.critical("the end")
    for _ in range(100):
        log.critical("the end")
    assert [line["message"] for line in lines(log)].count("the end") == 101


def test_templates_are_bounded(clock):
    limit = logs.RateLimit(clock)
    for number in range(3 * logs.TEMPLATES_MAX):
        limit.filter(logging.LogRecord("n", logging.INFO, "", 0, f"formatted {number}", (), None))
    assert len(limit._templates) <= logs.TEMPLATES_MAX


def test_setup_routes_everything(monkeypatch):
    root = logging.getLogger()
    before = (root.handlers[:], root.level, logging.raiseExceptions)
    stream = io.StringIO()
    try:
        logs.setup("warning", stream)
        logging.getLogger("any").info("no")
        logging.getLogger("any").warning("yes")
        root.handlers[0].flush()
    finally:
        root.handlers[:], root.level, logging.raiseExceptions = before
        logging.captureWarnings(False)
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["yes"]


class Stalled(io.StringIO):
    """A pipe that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = threading.Event()

    def write(self, text: str) -> int:
        self.reading.wait()
        return super().write(text)


def test_a_log_that_nobody_reads_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(logs, "LINES_MAX", 10)
    monkeypatch.setattr(logs, "FLUSH_S", 0.01)
    stream = Stalled()
    logger = logging.Logger("kvstore.test")
    handler = logs.Writer(stream)
    handler.setFormatter(logs.JsonFormatter())
    logger.addHandler(handler)
    for number in range(100):  # would wait for ever
        logger.warning("line %d", number)
    handler.flush()
    assert stream.getvalue() == ""
    stream.reading.set()
    monkeypatch.setattr(logs, "FLUSH_S", 20.0)
    handler.flush()
    logger.warning("the last")
    handler.flush()
    written = [json.loads(line) for line in stream.getvalue().splitlines()]
    # One report, or two: the thread may begin when some were dropped already.
    reports = [line for line in written if line["message"].startswith("log lines were dropped")]
    dropped = sum(report["lines"] for report in reports)
    assert len(written) - len(reports) + dropped == 101, "every line is there or counted"
    assert dropped >= 89
    assert written[-1]["message"] == "the last"


def test_a_closed_log_ends_nothing():
    stream = io.StringIO()
    logger = logging.Logger("kvstore.test")
    handler = logs.Writer(stream)
    logger.addHandler(handler)
    stream.close()
    logger.warning("a")
    handler.flush()
    logger.warning("b")
    handler.flush()
    assert not handler._lines.unfinished_tasks


# ---------------------------------------------------------------------------------------- past the log, in a process


NOISE = """
import os, sys, threading, traceback, warnings, weakref
from kvstore.server import logs
logs.setup("info")
logs.catch_the_rest()
if "native" in sys.argv:
    logs.catch_native()
    os.write(2, b"E1129 a library, in C\\n")
print("printed\\nin two lines", file=sys.stderr)
sys.stderr.write("by ")
sys.stderr.write("parts\\n")
try:
    1 / 0
except ZeroDivisionError:
    traceback.print_exc()
warnings.warn("of a library")
def ends():
    raise ValueError("in a thread")
thread = threading.Thread(target=ends, name="mine")
thread.start()
thread.join()
class Bad:
    def __del__(self):
        raise KeyError("while it goes")
Bad()
if "native" in sys.argv:
    import time
    time.sleep(0.5)
raise RuntimeError("at last")
"""


@pytest.mark.parametrize("native", [False, True])
def test_whatever_is_written_past_the_log_is_a_line_of_it(native):
    arguments = ["native"] if native else []
    done = subprocess.run(
        [sys.executable, "-c", NOISE, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    found = [json.loads(line) for line in done.stderr.splitlines()]
    messages = [line["message"] for line in found]
    assert {"printed", "in two lines", "by parts", "ZeroDivisionError: division by zero"} <= set(messages)
    assert any("of a library" in message for message in messages)
    assert ("E1129 a library, in C" in messages) == native
    by_message = {line["message"]: line for line in found}
    assert by_message["a thread ended by an exception"]["thread"] == "mine"
    assert by_message["a thread ended by an exception"]["exception"].endswith("ValueError: in a thread")
    assert any("while it goes" in line.get("exception", "") for line in found)
    assert by_message["not caught"]["exception"].endswith("RuntimeError: at last")
