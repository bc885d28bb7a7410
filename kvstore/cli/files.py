"""`kvctl put` and `kvctl get`: files in the store."""

from __future__ import annotations

import argparse
import os
import stat
import sys

from kvstore.cli import objects
from kvstore.cli.command import Command, key, seconds
from kvstore.cli.output import say, say_json, write
from kvstore.client import Client
from kvstore.errors import BadRequest, Precondition


def put(client: Client, options: argparse.Namespace) -> int:
    data = _read(options.file)
    stored = objects.put(client, data).hex()
    if options.json:
        say_json({"key": stored, "bytes": len(data)})
    else:
        say(stored)
    return 0


def _read(path: str) -> bytes:
    """All of it. A file that somebody writes to meanwhile is refused: what was read may never have been in it."""
    try:
        if path == "-":
            return sys.stdin.buffer.read()
        with open(path, "rb") as file:
            before = os.fstat(file.fileno())
            data = file.read()
            after = os.fstat(file.fileno())
    except (OSError, ValueError) as problem:
        why = (problem.strerror if isinstance(problem, OSError) else None) or str(problem)
        raise BadRequest(
            f"cannot be read: {why}", field="FILE", value=path, remedy="name a file that can be read, or -"
        ) from None
    changed = (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns)
    if stat.S_ISREG(after.st_mode) and (changed or len(data) != after.st_size):
        raise Precondition(
            "it changed while it was read",
            field="FILE",
            value=path,
            remedy="put it again when nobody writes to it",
        )
    return data


def get(client: Client, options: argparse.Namespace) -> int:
    write(objects.get(client, options.key, options.wait), options.output)
    return 0


def _put_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="- for standard input")


def _get_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key", type=key, metavar="KEY")
    parser.add_argument("-o", "--output", metavar="FILE")
    parser.add_argument(
        "--wait",
        type=seconds,
        default=objects.PATIENCE_S,
        metavar="SECONDS",
        help="longest wait for a part of the file that is on SSD (default: %(default)s)",
    )


COMMANDS = (
    Command("put", "store a file; prints its key", run=put, arguments=_put_arguments),
    Command("get", "write a file that was put to standard output", run=get, arguments=_get_arguments),
)
