"""`kvctl` whose answer cannot be written, or whose input is not what it seems: every command, every way."""

import contextlib
import io
import os
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.cli import files, kvctl, objects
from kvstore.client import connect
from kvstore.errors import Precondition

BOUND_S = 60.0
"""For a process that loads gRPC beside many others; a failure, never a measurement."""
KEPT = b"what was in the file before"
ANSWERS = [
    ["stats"],
    ["stats", "--json"],
    ["stats", "--watch", "0.1"],
    ["namespaces"],
    ["namespaces", "--long"],
    ["top"],
    ["top", "--json"],
    ["sessions"],
    ["explain", "--key", "61"],
    ["forget", "--key", "61"],
    ["put", "{file}"],
    ["get", "{key}"],
    ["quarantine"],
    ["recall", "--maker", "00" * 16, "--dry-run"],
    ["purge", "--tenant", "default", "--dry-run"],
    ["check"],
    ["doctor"],
    ["promptcache", "list"],
    ["simulate", "--format", "sharegpt", "{lengths}", "--dram", "1G"],
    ["plan", "--format", "sharegpt", "{lengths}", "--target", "0.5"],
    ["simulate-fleet", "--format", "sharegpt", "{lengths}", "--dram", "1G"],
    ["route", "--model", "kvctl", "--key", "61"],
    ["fleet", "stats"],
    ["record", "--status"],
    ["advise", "--help"],  # it watches for seconds
    ["--help"],
    ["stats", "--help"],
    ["--version"],
]
"""One of each command at least; all of them write to standard output."""
SIZE = 3_000_000
"""More than a pipe holds."""


@pytest.fixture
def call(daemon, tmp_path):
    """call(*arguments, **of_popen) -> a started kvctl; {file} and {key} in its arguments are those of a stored file."""
    data = os.urandom(SIZE)
    file = tmp_path / "file"
    file.write_bytes(data)
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, environment=(), **settings) -> subprocess.Popen[bytes]:
        arguments = [argument.format(file=file, key=start.key) for argument in arguments]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvstore.cli.kvctl", *arguments],
            **{"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, "cwd": "/", **settings},
            env={
                **os.environ,
                "PYTHONSAFEPATH": "1",
                "KVSTORED_RUN_DIR": str(daemon.run_dir),
                **dict(environment),
            },
        )
        started.append(process)
        return process

    start.data = data
    start.file = file
    start.lengths = tmp_path / "lengths.jsonl"
    turns = [[600, 200]] * 4
    start.lengths.write_text("".join(f'{{"id": {n}, "turns": {turns}}}\n' for n in range(4)))
    start.run_dir = str(daemon.run_dir)
    with connect(str(daemon.run_dir), timeout_s=BOUND_S) as client:
        start.key = objects.put(client, data).hex()
    yield start
    for process in started:
        process.kill()
        process.communicate()


def told(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Exit status and standard error."""
    _, errors = process.communicate(timeout=BOUND_S)
    text = errors.decode()
    assert "Traceback" not in text and "Exception" not in text, text
    return process.returncode, text


def test_every_command_is_tried_here():
    commands = {command.name for command in kvctl.COMMANDS}
    assert {words[0] for words in ANSWERS if words[0][0] != "-"} == commands - {"demo"}  # ten seconds a time


def answer_into(descriptor: int, call, words: list[str]) -> tuple[int, str]:
    """Exit status and standard error of kvctl in this process, with this standard output."""
    arguments = [word.format(file=call.file, key=call.key, lengths=call.lengths) for word in words]
    errors = io.StringIO()
    with (
        open(descriptor, "w", encoding="utf-8") as out,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
        pytest.raises(SystemExit) as end,
    ):
        kvctl.main(["--run-dir", call.run_dir, "--timeout", str(BOUND_S), *arguments])
    return end.value.code, errors.getvalue()


def test_a_full_output(call, subtests):
    for words in ANSWERS:
        with subtests.test(words=words):
            status, text = answer_into(os.open("/dev/full", os.O_WRONLY), call, words)
            assert status == (2 if words[0] == "check" else 1)
            (line,) = text.splitlines()[-1:]
            assert line.startswith("kvctl: standard output cannot be written: No space left on device")
            assert "free some space there, or write elsewhere" in line


def test_an_output_that_nobody_reads(call, subtests):
    for words in ANSWERS:
        with subtests.test(words=words):
            reading, writing = os.pipe()
            os.close(reading)
            status, text = answer_into(writing, call, words)
            assert status == (2 if words[0] == "check" else 1)
            assert text == ""


def test_an_output_that_is_closed(call, subtests):
    """What `open_standard_streams` puts there in its place."""
    for words in ANSWERS:
        with subtests.test(words=words):
            status, text = answer_into(os.open(os.devnull, os.O_RDONLY), call, words)
            assert status == (2 if words[0] == "check" else 1)
            assert "kvctl: standard output cannot be written: Bad file descriptor" in text


@pytest.mark.parametrize("words", [["get", "{key}"], ["--help"]], ids=" ".join)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_process_with_a_full_output(call, words, unbuffered):
    with open("/dev/full", "wb") as full:
        status, text = told(call(*words, stdout=full, environment={"PYTHONUNBUFFERED": unbuffered}))
    assert status == 1
    (line,) = text.splitlines()
    assert line.startswith("kvctl: standard output cannot be written: No space left on device")


def test_a_process_without_an_output(call):
    status, text = told(call("stats", preexec_fn=lambda: os.close(1)))
    assert status == 1
    (line,) = text.splitlines()
    assert line.startswith("kvctl: standard output cannot be written: Bad file descriptor")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_ends_in_the_middle(call, unbuffered):
    process = call("get", "{key}", stdout=subprocess.PIPE, environment={"PYTHONUNBUFFERED": unbuffered})
    assert process.stdout.read(10) == call.data[:10]
    process.stdout.close()
    process.stdout = None
    assert told(process) == (1, "")


def test_closed_errors_do_not_get_into_the_answer(call):
    process = call("check", "--json", stdout=subprocess.PIPE, preexec_fn=lambda: os.close(2))
    out, _ = process.communicate(timeout=BOUND_S)
    assert process.returncode == 0
    assert out.count(b"\n") == 1 and out.startswith(b"{")
    process = call("get", "00" * 16, stdout=subprocess.PIPE, preexec_fn=lambda: os.close(2))
    assert process.communicate(timeout=BOUND_S)[0] == b""
    assert process.returncode == 1


def test_a_closed_input_is_no_empty_file(call):
    process = call("put", "-", stdout=subprocess.PIPE, stdin=None, preexec_fn=lambda: os.close(0))
    out, errors = process.communicate(timeout=BOUND_S)
    assert (process.returncode, out) == (1, b"")
    assert errors.decode().startswith("kvctl: FILE=-: cannot be read: Bad file descriptor")


def test_an_output_that_takes_nothing_for_a_while(call):
    """Somebody made it non-blocking: what a shell shares between its children."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    process = call("get", "{key}", stdout=writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == call.data
    assert told(process) == (0, "")


# ------------------------------------------------------------------------------------------------------- --output


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/nonexistent/dir/x", "No such file or directory"),
        ("/", "Is a directory"),
        ("/dev/full", "No space left on device"),
        ("/proc/version", "Permission denied|Input/output error"),
        ("{file}/x", "Not a directory"),
        ("/tmp/" + "x" * 300, "File name too long"),
        ("a\0b", "embedded null"),
    ],
    ids=["missing", "directory", "full", "permission", "below a file", "long", "null"],
)
def test_a_file_that_cannot_be_written(call, path, why):
    if "\0" in path:
        with pytest.raises(ValueError, match=why):  # nobody can pass it on a command line
            call("get", "{key}", "-o", path)
        return
    status, text = told(call("get", "{key}", "-o", path, stdout=subprocess.PIPE))
    assert status == 1
    (line,) = text.splitlines()
    assert line.startswith("kvctl: --output=") and any(word in line for word in why.split("|")), line
    assert line.endswith(")"), "a remedy"


@pytest.mark.parametrize("before", [None, KEPT])
def test_a_file_that_cannot_be_written_in_full(call, tmp_path, before):
    """As by a quota, or a disk that fills up."""
    target = tmp_path / "target"
    if before is not None:
        target.write_bytes(before)
    process = call(
        "get",
        "{key}",
        "-o",
        str(target),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
    )
    status, text = told(process)
    assert status == 1
    assert "cannot be written: File too large" in text and "ulimit -f" in text
    assert target.exists() == (before is not None), "what is incomplete is not left behind"
    assert ("what is in it now is incomplete" in text) == (before is not None)


def test_a_file_of_nothing_is_not_written_when_there_is_nothing_to_write(call, tmp_path):
    target = tmp_path / "target"
    target.write_bytes(KEPT)
    status, _ = told(call("get", "ab" * 16, "-o", str(target)))
    assert (status, target.read_bytes()) == (1, KEPT)


# ---------------------------------------------------------------------------------------------------------- inputs


def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch):
    file = tmp_path / "file"
    for change in (lambda: file.write_bytes(b"longer than before"), lambda: file.write_bytes(b"c")):
        file.write_bytes(b"before")
        os.utime(file, ns=(1, 1))
        stat = os.fstat
        calls = []

        def fstat(fd, change=change, stat=stat, calls=calls):
            found = stat(fd)
            if not calls:
                calls.append(fd)
                change()
            return found

        monkeypatch.setattr(files.os, "fstat", fstat)
        with pytest.raises(Precondition, match="changed while it was read") as caught:
            files._read(str(file))
        assert caught.value.remedy
        monkeypatch.undo()
    assert files._read(str(file)) == b"c"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["put", "/"], "FILE=/: cannot be read: Is a directory"),
        (["put", "/proc/self/mem"], "FILE=/proc/self/mem: cannot be read: Input/output error"),
    ],
)
def test_a_file_that_cannot_be_read(call, arguments, why):
    status, text = told(call(*arguments, stdout=subprocess.PIPE))
    assert status == 1 and why in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["sessions", "--limit", "-1"],
        ["sessions", "--namespace", "1e9"],
        ["sessions", "--limit", str(1 << 64)],
        ["explain", "hex:zz"],
        ["explain", "--key", "61", "--namespace", "-1"],
        ["quarantine", "--limit", "-1"],
        ["recall", "--maker", "00" * 16, "--limit", "-5"],
        ["check", "--wait", "nan"],
        ["check", "--wait", "inf"],
        ["top", "--count", "-1"],
        ["top", "--interval", "0"],
        ["get", "--wait", "nan", "00"],
    ],
)
def test_numbers_that_cannot_be(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        kvctl.main(arguments)
    assert end.value.code == 2
    assert "error: argument" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize(
    "arguments", [["stats", "--watch", "0.1"], ["top", "--interval", "0.1"], ["stats", "--watch", "3600"]]
)
def test_an_interrupt_ends_it_without_a_word(call, arguments):
    process = call(
        *arguments,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert told(process) == (130, "")


def test_an_interrupt_while_it_starts_or_ends(call):
    """Wherever it strikes once Python itself has started: no traceback, and 130 or what the whole answer gave."""
    for delay in (0.1, 0.5, 0.9):
        process = call(
            "namespaces",
            stdout=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(delay)  # a moment that differs, no synchronisation
        if _imports_have_begun(process):
            process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=BOUND_S)
        if b"<frozen" in errors or b"site.py" in errors:
            continue  # Python's own start
        assert b"Traceback" not in errors, errors
        assert process.returncode in (130, 0), errors
        assert process.returncode == 130 or out.count(b"\n") >= 1


@pytest.mark.parametrize(
    "interrupted",
    [
        "import dataclasses; dataclasses.dataclass = strike",
        "import kvstore.cli.kvctl as kvctl; kvctl.connect = strike",
        "import kvstore.cli.kvctl as kvctl; kvctl.open_standard_streams = strike",
    ],
    ids=["while it imports", "while it runs", "before it runs"],
)
def test_an_interrupt_inside_exec(interrupted, tmp_path):
    """CPython remembers an interrupt that left exec() of a string though it was caught, and `python -m` ends by it."""
    (tmp_path / "struck.py").write_text(
        "import sys\ndef strike(*_, **__):\n    exec('raise KeyboardInterrupt')\n"
        f"{interrupted}\nimport kvstore.cli.kvctl\nsys.argv = ['kvctl', 'stats']\nkvstore.cli.kvctl.main()"
    )
    where = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    ended = subprocess.run(
        [sys.executable, "-m", "struck"], cwd=tmp_path, env=where, capture_output=True, timeout=BOUND_S
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + signal.SIGINT, b"", b"")


def _imports_have_begun(process: subprocess.Popen[bytes]) -> bool:
    with contextlib.suppress(OSError):
        return "grpc" in Path(f"/proc/{process.pid}/maps").read_text()
    return False


# ------------------------------------------------------------------------------------------------------- a terminal


def test_top_on_a_terminal(call, run_dir, spec):
    """80 columns: drawn over itself, never wider than the terminal, and q ends it and leaves the terminal as it was."""
    import pty
    import termios

    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 80))
    before = termios.tcgetattr(slave)
    process = call(
        "top",
        "--interval",
        "0.1",
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: _take_terminal(slave),
    )
    with connect(str(run_dir)) as client:
        client.open(spec)
    shown = b""
    deadline = time.monotonic() + BOUND_S
    while shown.count(b"hit rate") < 4:
        assert time.monotonic() < deadline, shown
        if select.select([master], [], [], 0.1)[0]:
            shown += os.read(master, 65_536)
    frames = shown.decode().split("\x1b[J")
    assert frames[0].startswith("\x1b[H\x1b[2J"), "the first one begins on a clean screen"
    assert all(frame.startswith("\r\x1b[") for frame in frames[1:-1]), "the others where the last one began"
    for frame in frames[:-1]:
        lines = frame.replace("\x1b[H\x1b[2J", "").split("\r\n")
        assert len(lines) <= 24
        assert all(len(line.split("A", 1)[-1].replace("\x1b[K", "")) <= 80 for line in lines), lines
    os.write(master, b"q")
    while process.poll() is None:
        assert time.monotonic() < deadline
        if select.select([master], [], [], 0.05)[0]:
            os.read(master, 65_536)
    assert process.returncode == 0
    assert termios.tcgetattr(slave) == before
    os.close(master)
    os.close(slave)


def _take_terminal(slave: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.tcsetpgrp(slave, os.getpgrp())
