"""`kvctl`: what an operator asks of a running daemon.

Exit status: 0, 1 when the daemon refused, doctor or check found something, or the answer could not be written in full
(one line on stderr says why), 2 for a wrong command line, or when check cannot tell, 3 when forget did what it was
asked for and a restart of the daemon now could undo it, 128 and the signal's number when a signal ended it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

try:
    from kvstore import __version__
    from kvstore.cli import (
        admin,
        advise,
        check,
        demo,
        doctor,
        files,
        fleet,
        promptcache,
        sessions,
        simulate,
        stats,
        top,
    )
    from kvstore.cli.command import Command, run_directory, seconds
    from kvstore.cli.output import OutputClosed, abandon, note, open_standard_streams, say
    from kvstore.client import connect
    from kvstore.config import ENVIRONMENT_PREFIX, StoreConfig, did_you_mean
    from kvstore.errors import StoreError
except KeyboardInterrupt:  # these take most of the time that a short command takes
    os._exit(128 + signal.SIGINT)  # see main()

RUN_DIR_VARIABLE = f"{ENVIRONMENT_PREFIX}RUN_DIR"
COMMANDS: tuple[Command, ...] = (
    *stats.COMMANDS,
    *top.COMMANDS,
    *sessions.COMMANDS,
    *files.COMMANDS,
    *admin.COMMANDS,
    *fleet.COMMANDS,
    *promptcache.COMMANDS,
    *check.COMMANDS,
    *doctor.COMMANDS,
    *simulate.COMMANDS,
    *advise.COMMANDS,
    *demo.COMMANDS,
)
"""In the order of the help. A new command is an entry in the COMMANDS of its module."""


class Parser(argparse.ArgumentParser):
    """Whose help is an answer like any other: argparse itself says nothing when it cannot write it."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stdout:
            say(message, end="")
        elif message:
            note(message, end="")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            meant = did_you_mean(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, meant + error.message) from None

    def unrecognized(self, arguments: Sequence[str]) -> NoReturn:
        meant = did_you_mean(arguments[0].partition("=")[0], self._option_string_actions)
        self.error(f"unrecognized arguments: {' '.join(arguments)}{f' ({meant.rstrip()})' if meant else ''}")


def parser() -> Parser:
    # On both sides of the command's name; what is not given leaves the other's value alone.
    common = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument(
        "--run-dir",
        type=run_directory,
        metavar="DIR",
        help=f"the daemon's directory (environment: {RUN_DIR_VARIABLE})",
    )
    common.add_argument(
        "--timeout", type=seconds, metavar="SECONDS", help="longest wait for the daemon (default: 5)"
    )
    common.add_argument("--json", action="store_true", help="for programs: JSON, bytes in hexadecimal")
    result = Parser(prog="kvctl", description=__doc__, parents=[common], allow_abbrev=False)
    result.add_argument("--version", action="version", version=f"kvctl {__version__}")
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        added = commands.add_parser(
            command.name, help=command.about, description=command.about, parents=[common], allow_abbrev=False
        )
        command.arguments(added)
        added.set_defaults(chosen=command, of_command=added)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Ends by SystemExit, whatever happens; a process that was interrupted ends here."""
    if arguments is not None:
        sys.exit(_run(arguments))
    status = 128 + signal.SIGINT
    try:
        open_standard_streams()
        status = _run(None)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is said: the status stands
    except KeyboardInterrupt:  # between two lines of this function
        abandon()
    if status == 128 + signal.SIGINT:
        # An interrupt that strikes inside exec() of a string (each dataclass is made by one) stays noted in CPython
        # after it was caught, and the end of `python -m` then kills itself by SIGINT instead of giving its status.
        os._exit(status)
    sys.exit(status)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        return _command(arguments)
    except OutputClosed:  # as by `kvctl ... | head`
        return 1
    except StoreError as error:
        note(f"kvctl: {error}")
        return 1
    except UnicodeEncodeError as problem:  # an argument that a daemon cannot be told
        note(f"kvctl: {ascii(problem.object)[1:-1]}: is no text in UTF-8 (name it otherwise)")
        return 1
    except OSError as problem:
        note(f"kvctl: {problem.strerror or problem}: {problem.filename or 'the system refused a call'}")
        return 1
    except KeyboardInterrupt:
        abandon()
        return 128 + signal.SIGINT


def _command(arguments: Sequence[str] | None) -> int:
    try:
        defaults = argparse.Namespace(json=False, timeout=5.0, run_dir="")
        options, unknown = parser().parse_known_args(arguments, defaults)
        if unknown:
            options.of_command.unrecognized(unknown)
    except SystemExit as end:  # --help and --version have been written, an error has been told
        return end.code if isinstance(end.code, int) else 2
    command: Command = options.chosen
    run_dir = options.run_dir = options.run_dir or os.environ.get(RUN_DIR_VARIABLE) or StoreConfig().run_dir
    if command.run_alone is not None:
        return command.run_alone(run_dir, options)
    assert command.run is not None
    with connect(run_dir, timeout_s=options.timeout) as client:
        return command.run(client, options)


if __name__ == "__main__":
    main()
