"""`kvctl check`: the SSD tier's directory without its daemon, or all that a running daemon stores.

Exit status: 0 when nothing is wrong (or no longer: --fix), 1 when something is, 2 when that cannot be told.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.cli.command import Command, byte_size, refuse_unused
from kvstore.cli.output import OutputClosed, note, say, say_json
from kvstore.cli.tables import counted, plain, size, table
from kvstore.client import Client, connect
from kvstore.config import StoreConfig, load
from kvstore.errors import BadRequest, ConfigError, DeadlineExceeded, StoreError
from kvstore.tiers.disk_port import RealDisk
from kvstore.v1 import admin_pb2, admin_pb2_grpc

if TYPE_CHECKING:
    from kvstore.tiers.check import Findings, Progress

CLEAN, PROBLEMS, CANNOT = 0, 1, 2
PROGRESS_S = 1.0
POLL_S = 0.25
WAIT_S = 3_600.0
"""For a daemon's round, unless --wait says otherwise."""
WAIT_MAX_S = 30 * 86_400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ssd-dir", metavar="DIR", help="check this directory itself; its daemon must not be running"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="the daemon's TOML file: ssd_dir and its cap are taken from there"
    )
    parser.add_argument(
        "--ssd-bytes",
        type=byte_size,
        default=0,
        metavar="SIZE",
        help="the cap of the directory (default: not judged)",
    )
    parser.add_argument(
        "--ssd-key-file", metavar="FILE", help="the daemon's keys, where the directory is encrypted"
    )
    parser.add_argument(
        "--fix", action="store_true", help="remove exactly what is wrong; with --ssd-dir or --config"
    )
    parser.add_argument(
        "--rate",
        type=byte_size,
        default=0,
        metavar="SIZE",
        help="bytes a second that a running daemon verifies",
    )
    parser.add_argument(
        "--wait", type=_wait, default=WAIT_S, metavar="SECONDS", help="longest wait for a running daemon"
    )


def _wait(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds") from None
    if not 0 <= value <= WAIT_MAX_S:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {WAIT_MAX_S:.0f} seconds")
    return value


def run(run_dir: str, options: argparse.Namespace) -> int:
    try:
        directory, bytes_max, key_file = _directory(options)
        if directory:
            refuse_unused(options, "rate", remedy="it is for a running daemon: leave it out")
            return _offline(directory, bytes_max, key_file, options)
        if options.fix:
            raise BadRequest(
                "is for a directory that no daemon uses",
                field="--fix",
                remedy="stop the daemon and name --ssd-dir or --config",
            )
        refuse_unused(
            options,
            "ssd_bytes",
            "ssd_key_file",
            remedy="a running daemon has its own; stop it and name --ssd-dir or --config",
        )
        with connect(run_dir, timeout_s=options.timeout) as client:
            return _online(client, options)
    except OutputClosed:
        return CANNOT
    except StoreError as error:
        note(f"kvctl: {error}")
        return CANNOT


def _directory(options: argparse.Namespace) -> tuple[str, int, str]:
    """And the cap, 0 if it is not known; and the file of its keys, "" if it has none."""
    if not options.config:
        return options.ssd_dir or "", options.ssd_bytes, options.ssd_key_file or ""
    try:
        toml = tomllib.loads(Path(options.config).read_text("utf-8"))
    except OSError as problem:
        raise ConfigError.unreadable(problem, field="--config", path=options.config) from None
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"is not TOML: {problem}", field="--config", value=options.config) from None
    config: StoreConfig = load(toml, os.environ, {})
    directory = options.ssd_dir or config.ssd_dir
    if not directory:
        raise ConfigError("names no ssd_dir", field="--config", value=options.config)
    return directory, options.ssd_bytes or config.ssd_bytes, options.ssd_key_file or config.ssd_key_file


# ------------------------------------------------------------------------------------------------------------ offline


class _Teller:
    """Progress on stderr, once a second: a line that is written over on a terminal, else a new one each time."""

    def __init__(self) -> None:
        self._next = time.monotonic() + PROGRESS_S
        self._terminal = sys.stderr.isatty()

    def __call__(self, progress: object) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + PROGRESS_S
            end, start = ("", "\r\x1b[K") if self._terminal else ("\n", "")
            note(f"{start}{progress}", end=end)

    def end(self) -> None:
        if self._terminal:
            note("\r\x1b[K", end="")


def _offline(directory: str, bytes_max: int, key_file: str, options: argparse.Namespace) -> int:
    try:
        from kvstore.tiers.check import Check
        from kvstore.tiers.encryption import DiskCipher
    except ModuleNotFoundError as missing:  # it comes with the daemon: workers have kvctl without it
        raise ConfigError(
            f"{missing.name} is not installed: this is the client alone",
            field="--ssd-dir",
            value=directory,
            remedy="pip install 'attnstore[daemon]'",
        ) from None

    tell = _Teller()
    cipher = DiskCipher.read(key_file) if key_file else None
    check = Check(os.path.abspath(directory), RealDisk(), bytes_max=bytes_max, cipher=cipher, tell=tell)
    try:
        found = check.run()
        tell.end()
        if options.fix:
            try:
                check.fix()
            except StoreError:
                _show(found, options)  # what was done, and what is still wrong
                raise
    finally:
        check.close()
    _show(found, options)
    left = found.unfixable if options.fix else not found.clean
    return PROBLEMS if left else CLEAN


def _show(found: Findings, options: argparse.Namespace) -> None:
    if options.json:
        say_json(_plain(found))
        return
    if found.problems:
        rows = [
            (problem.kind, problem.where, problem.what, problem.remedy if options.fix else "")
            for problem in found.problems
        ]
        say(table(("kind", "where", "what is wrong", "fix" if options.fix else ""), rows))
        hidden = sum(found.counts.values()) - len(found.problems)
        if hidden:
            say(f"... and {hidden:,} more")
        say("")
    for remark in found.notes[:20]:
        say(f"note: {remark}")
    if found.notes_count > 20:
        say(f"note: ... and {found.notes_count - 20:,} more notes")
    for done in found.fixed:
        say(f"fixed: {done}")
    total = sum(found.counts.values())
    counts = ", ".join(f"{count:,} {kind}" for kind, count in sorted(found.counts.items()))
    say(
        f"{found.directory}: {_chunks(found.progress)}, {found.slabs:,} slab files, {found.sessions:,} sessions,"
        f" {size(found.bytes_used)} used"
    )
    unread = (
        f"{counted(found.other_key, 'chunk')} could not be verified: encrypted with a key that is not here"
    )
    say(
        (f"{total:,} problems ({counts})" if total else "clean")
        + (f"; {unread} (--ssd-key-file; a daemon without it drops them)" if found.other_key else "")
    )


def _chunks(progress: Progress) -> str:
    return f"{progress.chunks:,} chunks, {size(progress.bytes)} verified in {progress.seconds:.1f} s"


def _plain(found: Findings) -> dict[str, Any]:
    values = dataclasses.asdict(found)
    values["counts"] = dict(found.counts)
    values["clean"] = found.clean
    for problem in values["problems"]:
        del problem["place"]
    return values


# ------------------------------------------------------------------------------------------------------------- online


def _online(client: Client, options: argparse.Namespace) -> int:
    """Ask the daemon to verify everything, and wait for the end of that round."""
    deadline = time.monotonic() + options.wait
    tell = _Teller()

    def ask(**request: Any) -> admin_pb2.ScrubReply:
        reply: admin_pb2.ScrubReply = client.unary(
            admin_pb2_grpc.AdminStub, "Scrub", admin_pb2.ScrubRequest(**request)
        )
        return reply

    state = ask(start=True, bytes_per_s=options.rate)
    wanted = state.round
    while state.running:
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"the daemon has not verified everything yet: {_progress(state)}",
                field="--wait",
                value=options.wait,
                remedy="wait longer, or raise --rate; the round goes on",
            )
        tell(_progress(state))
        time.sleep(POLL_S)
        state = ask(round=wanted)
    tell.end()
    if options.json:
        say_json(plain(state))
    else:
        say(
            f"round {wanted}: {state.chunks:,} chunks, {size(state.bytes)} verified: {state.corrupt:,} corrupt"
            f" (see kvctl quarantine), {state.failed:,} records could not be read"
        )
    return PROBLEMS if state.corrupt or state.failed else CLEAN


def _progress(state: admin_pb2.ScrubReply) -> str:
    waits = f", waits: {state.waits_for}" if state.waits_for else ""
    return (
        f"round {state.round}: {state.rows:,} of {state.rows_in_all:,} rows, {size(state.bytes)} verified,"
        f" {state.corrupt:,} corrupt{waits}"
    )


COMMANDS = (
    Command(
        "check",
        "verify all that is stored: by the running daemon, or a directory without one; perhaps --fix",
        run_alone=run,
        arguments=add_arguments,
    ),
)
