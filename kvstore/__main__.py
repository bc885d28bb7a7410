"""`kvstored`: flags, environment and TOML in; one daemon; an exit status out.

Exit status: 0 after a drain, 1 when what it needs is not to be had now (a full or failing disk), 2 for settings that
cannot work (one line on stderr says which), 70 after an internal error.

Standard error is the log from the first line to the last: one JSON object a line, whoever wrote it. Only a refusal to
start is a plain line on a terminal.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import inspect
import itertools
import logging
import os
import signal
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kvstore.startup import end_at_interrupt, loading

with loading("kvstored", extra="daemon"):
    from kvstore import __version__
    from kvstore.config import (
        CONFIG_VARIABLE,
        ENVIRONMENT_PREFIX,
        QUOTAS,
        StoreConfig,
        did_you_mean,
        is_size,
        load,
        parse_setting,
    )
    from kvstore.errors import ConfigError, StoreError, Unavailable
    from kvstore.server import logs

if TYPE_CHECKING:  # loaded only when a daemon starts
    from kvstore.core.store import Store
    from kvstore.tiers.disk_port import Disk


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, remedy="see kvstored --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Argparse itself says nothing when it cannot write its help."""
        rest = memoryview(message.encode("utf-8", "backslashreplace"))
        try:
            while rest:
                rest = rest[os.write(1, rest) :]
        except OSError as problem:
            raise Unavailable(
                f"standard output cannot be written: {problem.strerror}",
                remedy="free some space there, or write elsewhere",
            ) from None


def parser() -> Parser:
    """One flag per field of StoreConfig, described by the docstring under the field."""
    about = descriptions()
    result = Parser(
        prog="kvstored",
        description="Keeps attention KV beside the inference workers of a machine.",
        epilog=f"Flags win over {ENVIRONMENT_PREFIX}* in the environment, that over the TOML file, that over defaults. "
        "Sizes take K, M, G, T (powers of 1024).",
        allow_abbrev=False,
    )
    result.add_argument("--version", action="version", version=f"kvstored {__version__}")
    result.add_argument(
        "--config", metavar="FILE", help=f"TOML file with the settings below (environment: {CONFIG_VARIABLE})"
    )
    for item in fields(StoreConfig):
        default = {} if item.default is MISSING else item.default
        result.add_argument(
            f"--{item.name.replace('_', '-')}",
            dest=item.name,
            metavar=placeholder(item.name, item.default),
            default=argparse.SUPPRESS,
            nargs="?" if isinstance(item.default, bool) else None,
            const="true"
            if isinstance(item.default, bool)
            else None,  # a switch may stand alone: --huge-pages is --huge-pages=true
            help=f"{about[item.name]} (default: {shown(default)})".replace("%", "%%"),
        )
    return result


def placeholder(name: str, default: object) -> str:
    """What the help has for a setting's value."""
    if default is MISSING:
        return "TENANT=SIZE,..." if name in QUOTAS else "UID=TENANT,..."
    return "SIZE" if is_size(name) else type(default).__name__.upper()


def shown(default: object) -> str:
    return (
        str(default).lower()
        if isinstance(default, bool)
        else str(default)
        if default not in ("", {})
        else "none"
    )


def descriptions() -> dict[str, str]:
    """The docstring under each field of StoreConfig."""
    (body,) = (
        node.body for node in ast.parse(inspect.getsource(StoreConfig)).body if isinstance(node, ast.ClassDef)
    )
    found: dict[str, str] = {}
    for node, below in itertools.pairwise(body):
        match node, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def configuration(arguments: Sequence[str], environment: Mapping[str, str]) -> StoreConfig:
    """Raises ConfigError for whatever cannot be understood or cannot work."""
    known, unknown = parser().parse_known_args(arguments)
    if unknown:
        raise _unknown(unknown)
    flags: dict[str, Any] = vars(known)
    path = flags.pop("config") or environment.get(CONFIG_VARIABLE, "")
    return load(
        toml=read_toml(path) if path else {},
        environment=environment,
        flags={name: parse_setting(name, text) for name, text in flags.items()},
    )


def _unknown(arguments: Sequence[str]) -> ConfigError:
    """Of what stands on the command line and is no setting."""
    name = arguments[0].partition("=")[0]
    flags = [f"--{item.name.replace('_', '-')}" for item in fields(StoreConfig)]
    meant = did_you_mean(name, flags) if name.startswith("--") else ""
    return ConfigError(
        f"unrecognized arguments: {' '.join(arguments)}", remedy=f"{meant}kvstored --help lists all settings"
    )


def read_toml(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as problem:
        raise ConfigError.unreadable(problem, field="config", path=path) from None
    except (ValueError, RecursionError) as problem:
        raise ConfigError(
            f"is not TOML: {problem}",
            field="config",
            value=path,
            remedy="mend that place; deploy/kvstored.toml has every setting as it is written",
        ) from None


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop where it is installed: about a third less time per message."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def refuse(error: StoreError) -> None:
    """Say why the daemon does not start."""
    if os.isatty(2):
        with contextlib.suppress(OSError):
            os.write(2, f"kvstored: {error}\n".encode("utf-8", "backslashreplace"))
        return
    told = logs.fields(field=error.field, value=error.value, remedy=error.remedy)
    logging.getLogger("kvstored").critical("%s", error, extra=told)


def main(
    arguments: Sequence[str] | None = None,
    *,
    disk: Disk | None = None,
    at_end: Callable[[Store], None] | None = None,
) -> None:
    """Never returns: the process ends with the daemon. `disk` instead of the operating system's, and `at_end`, which is
    called before an end in good order, are for simulations."""
    logs.setup("info")
    logs.catch_the_rest()
    try:
        config = configuration(sys.argv[1:] if arguments is None else arguments, os.environ)
        # gRPC's core writes what a peer says to standard error as it is: lines could be forged.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        if os.environ["GRPC_VERBOSITY"].upper() != "NONE" or os.environ.get("GRPC_TRACE"):
            logs.catch_native()
        # Imported now: --help and a wrong flag are answered before gRPC is loaded.
        try:
            from kvstore.server.daemon import Daemon
        except ModuleNotFoundError as missing:
            raise ConfigError(
                f"{missing.name} is not installed: this is the client alone",
                remedy="pip install 'attnstore[daemon]'",
            ) from None

        logs.set_level(config.log_level)
        os.umask(0o077)
        end_at_interrupt()  # until the daemon catches signals
        owned = Daemon(config, disk, at_end)
        with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            logs.leave(runner.run(owned.run()))
    except ConfigError as error:
        refuse(error)
        logs.leave(2)
    except StoreError as error:
        refuse(error)
        logs.leave(1)
    except KeyboardInterrupt:  # before it has begun to serve
        logs.leave(128 + signal.SIGINT)
    except Exception:
        logging.getLogger(__name__).critical("the daemon ended by a bug", exc_info=True)
        logs.leave(70)


if __name__ == "__main__":
    main()
