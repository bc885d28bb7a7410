"""Forgets and purges of an encrypted SSD beside kill -9, rotations of its keys and starts with wrong ones, in any
order: what was forgotten never comes back, no byte is wrong, and every start works or says why it does not."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Namespace
from kvstore.errors import StoreError
from kvstore.transport.descriptors import DEFAULT_TENANT
from kvstore.types import ChunkKey, Wait

from . import forked
from .ssd_tools import SMALL_SSD, SPEC, client_of, hits, keys_of, save
from .test_ssd import refused

pytest.importorskip("cryptography")
CHAINS, LENGTH = 6, 6
LETTERS = "0123456789abcdef"


class Oracle:
    """Of each chunk whether it must be missing: it was answered as forgotten, and nobody saved it since."""

    def __init__(self) -> None:
        self.gone: set[ChunkKey] = set()
        self.certain: set[ChunkKey] = set()
        """Saved durably, and neither forgotten nor lost with a key since."""

    def saves(self, keys: list[ChunkKey]) -> None:
        self.gone -= set(keys)

    def saved(self, keys: list[ChunkKey]) -> None:
        self.certain |= set(keys)

    def forgets(self, keys: list[ChunkKey]) -> None:
        self.certain -= set(keys)

    def forgot(self, keys: list[ChunkKey]) -> None:
        self.gone |= set(keys)

    def check(self, space: Namespace, chains: list[list[ChunkKey]]) -> None:
        for keys in chains:
            had = hits(space, keys)
            assert not had & self.gone, "what was forgotten comes back"
            assert self.certain.intersection(keys) <= had, "what was durable, and nobody forgot, is lost"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_what_was_forgotten_stays_so(
    start_daemon: Callable[..., Any],
    launch: Callable[..., Any],
    run_dir: Path,
    tmp_path: Path,
    seed: int,
) -> None:
    chance = random.Random(seed)
    oracle = Oracle()
    file = tmp_path / "ssd.keys"
    keys_of_file = ["a"]
    settings = {**SMALL_SSD, "ssd_dir": run_dir.parent / "ssd", "ssd_key_file": file}
    chains: list[list[ChunkKey]] = []

    def write(letters: list[str]) -> None:
        file.write_text("\n".join(letter * 64 for letter in letters))
        file.chmod(0o600)

    for _ in range(12):
        if chance.random() < 0.2 and chains:
            write([letter for letter in LETTERS if letter not in keys_of_file][:1])
            refused(launch(**settings), "ssd_key_file", "has not the key")
        if chance.random() < 0.5:
            keys_of_file.insert(0, next(letter for letter in LETTERS if letter not in keys_of_file))
        if len(keys_of_file) > 2 and chance.random() < 0.5:
            keys_of_file.pop()
            oracle.certain.clear()
        write(keys_of_file)
        daemon = start_daemon(**settings)
        with client_of(daemon) as client:
            space = client.open(SPEC)
            chains = [keys_of(space, LENGTH, chain=number) for number in range(CHAINS)]
            oracle.check(space, chains)
            killed = _kill_soon(daemon, chance) if chance.random() < 0.7 else None
            with suppress(StoreError, AssertionError) if killed else nullcontext():
                for _ in range(chance.randrange(1, 5)):
                    _act(chance, oracle, daemon, space, chains)
            if killed:
                killed.join()
        if not killed:
            assert daemon.stop() == 0
    write(keys_of_file)
    daemon = start_daemon(**settings)
    with client_of(daemon) as client:
        oracle.check(client.open(SPEC), chains)
    assert daemon.stop() == 0


def _kill_soon(daemon: Any, chance: random.Random) -> threading.Thread:
    wait_s = chance.choice((0.0, 0.01, 0.05, 0.2, 0.6))

    def kill() -> None:
        time.sleep(wait_s)
        daemon.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def _act(
    chance: random.Random, oracle: Oracle, daemon: Any, space: Namespace, chains: list[list[ChunkKey]]
) -> None:
    keys = chance.choice(chains)
    match chance.choice(("save", "save", "save", "forget", "forget", "purge")):
        case "save":
            oracle.saves(keys)
            save(space, keys, wait=Wait.DURABLE)
            oracle.saved(keys)
        case "forget":
            mine = keys[chance.randrange(LENGTH) :]
            oracle.forgets(mine)
            if not space.forget(keys=mine).not_durable:
                oracle.forgot(mine)
        case "purge":
            everything = [key for chain in chains for key in chain]
            oracle.forgets(everything)
            order = ["--run-dir", str(daemon.run_dir), "--timeout", "30", "purge", "--tenant", DEFAULT_TENANT]
            if forked.run(order, dict(os.environ)).returncode == 0:
                oracle.forgot(everything)
