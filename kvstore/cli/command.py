"""What a command of `kvctl` is, and what several of them share.

A command lives in the module of its subject, as an entry of its COMMANDS; kvctl.py lists the modules.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from kvstore.cli.output import say, say_json
from kvstore.cli.tables import plain
from kvstore.client import Client
from kvstore.config import parse_setting
from kvstore.errors import BadRequest, ConfigError
from kvstore.types import KEY_BYTES_MAX, SESSION_NAME_BYTES_MAX
from kvstore.v1 import stats_pb2_grpc

BYTES_MAX = 1 << 60
EXIT_NOT_DURABLE = 3
"""What was asked for is done, but a restart of the daemon now could undo it."""


def no_arguments(_: argparse.ArgumentParser) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Command:
    """`run` gets a connected client; `run_alone` gets the run directory instead, and connects by itself if it wants.
    Both get the parsed arguments, return the exit status, and may raise StoreError."""

    name: str
    about: str
    run: Callable[[Client, argparse.Namespace], int] | None = None
    run_alone: Callable[[str, argparse.Namespace], int] | None = None
    arguments: Callable[[argparse.ArgumentParser], None] = no_arguments

    def __post_init__(self) -> None:
        assert (self.run is None) != (self.run_alone is None), f"{self.name} is run in one of two ways"


# --------------------------------------------------------------------------------------------------------- arguments


def seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 3600 seconds")
    return value


def number(text: str) -> int:
    value = int(text)
    if not 0 <= value < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {(1 << 63) - 1}")
    return value


def run_directory(text: str) -> str:
    if not text:  # an empty variable of a shell, perhaps: the default is another daemon's
        raise argparse.ArgumentTypeError("is empty (name the daemon's directory, or leave the option out)")
    return text


def some(text: str) -> int:
    value = number(text)
    if not value:
        raise argparse.ArgumentTypeError("0 is none at all")
    return value


def byte_size(text: str) -> int:
    try:
        value = int(parse_setting("dram_bytes", text))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{text} {error.message} ({error.remedy})") from None
    if not 0 <= value <= BYTES_MAX:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 2^60 bytes")
    return value


def session_name(text: str) -> bytes:
    try:
        data = bytes.fromhex(text.removeprefix("hex:")) if text.startswith("hex:") else os.fsencode(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: behind hex: come hexadecimal digits, two a byte") from None
    if not 1 <= len(data) <= SESSION_NAME_BYTES_MAX:
        raise argparse.ArgumentTypeError(f"a session's name has 1 to {SESSION_NAME_BYTES_MAX} bytes")
    return data


def key(text: str) -> bytes:
    try:
        data = bytes.fromhex(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not in hexadecimal digits, two a byte") from None
    if not 1 <= len(data) <= KEY_BYTES_MAX:
        raise argparse.ArgumentTypeError(f"a key has 1 to {KEY_BYTES_MAX} bytes")
    return data


def refuse_unused(options: argparse.Namespace, *names: str, remedy: str) -> None:
    """Raises BadRequest for the first of these options that was given, and would do nothing. Defaults are false."""
    for name in names:
        if getattr(options, name):
            raise BadRequest("would do nothing here", field=f"--{name.replace('_', '-')}", remedy=remedy)


# ----------------------------------------------------------------------------------------------------------- answers


def ask_stats(client: Client, method: str, request: Message) -> Any:
    return client.unary(stats_pb2_grpc.StatsStub, method, request)


def show(options: argparse.Namespace, reply: Message, text: Callable[[], str]) -> int:
    if options.json:
        say_json(plain(reply))
    else:
        say(text())
    return 0
