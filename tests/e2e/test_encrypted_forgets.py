"""Forgets and purges of an encrypted SSD beside kill -9, rotations of its keys and starts with wrong ones, in any
order: what was forgotten never comes back, no byte is wrong, and every start works or says why it does not."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Namespace
from kvstore.errors import StoreError
from kvstore.transport.descriptors import DEFAULT_TENANT
from kvstore.types import ChunkKey, GrantResult, Wait

from . import forked
from .ssd_tools import BOUND_S, SMALL_SSD, SPEC, client_of, content, hits, keys_of
from .test_ssd import refused

pytest.importorskip("cryptography")
CHAINS, LENGTH = 5, 6
LETTERS = "0123456789abcdef"
ACTIONS_MAX = 6
KILLED_AFTER_S = (0.0, 0.01, 0.03, 0.1, 0.3)


class Killed(Exception):
    """The daemon is no more, and an action was not answered."""


class Attack:
    def __init__(
        self, seed: int, start: Callable[..., Any], launch: Callable[..., Any], folder: Path
    ) -> None:
        self.chance = random.Random(seed)
        self.gone: set[ChunkKey] = set()
        """A forget of it was answered as durable, and nobody saved it since."""
        self.there: set[ChunkKey] = set()
        """Saved durably, and neither forgotten nor lost with a key since."""
        self.letters = ["a"]
        """Of the keys in the file, the newest first."""
        self.done: list[str] = []
        self._file = folder / "ssd.keys"
        self._start, self._launch = start, launch
        self._settings = {**SMALL_SSD, "ssd_dir": folder / "ssd", "ssd_key_file": self._file}

    def round(self) -> None:
        """A start with other keys, a look at everything, some actions, and an end, which may come amid them."""
        self._rotate()
        daemon = self._start(**self._settings)
        killer: threading.Thread | None = None
        with client_of(daemon, timeout_s=BOUND_S) as client:
            space = client.open(SPEC)
            chains = [keys_of(space, LENGTH, chain=number) for number in range(CHAINS)]
            self._check(space, chains)
            if self.chance.random() < 0.7:
                killer = threading.Thread(target=_kill, args=(daemon, self.chance.choice(KILLED_AFTER_S)))
                killer.start()
            try:
                for _ in range(self.chance.randrange(1, ACTIONS_MAX + 1)):
                    self._act(daemon, space, chains)
            except (StoreError, Killed):
                if killer is None:
                    raise
        if killer is None:
            assert daemon.stop() == 0
        else:
            killer.join()

    def _rotate(self) -> None:
        if self.done and self.chance.random() < 0.2:
            self._write([self._new_letter()])
            refused(self._launch(**self._settings), "ssd_key_file", "has not the key")
        if self.chance.random() < 0.5:
            self.letters.insert(0, self._new_letter())
        if len(self.letters) > 1 and self.done and self.chance.random() < 0.4 and self._is_first_in_use:
            self.letters.pop()
            self.there.clear()  # what only that one opens is a miss
        self._write(self.letters)
        self.done.append(f"keys {''.join(self.letters)}")

    @property
    def _is_first_in_use(self) -> bool:
        """Or a start has to refuse: not even its index would open."""
        return len(self.letters) > 2

    def _new_letter(self) -> str:
        return next(letter for letter in LETTERS if letter not in self.letters)

    def _write(self, letters: Sequence[str]) -> None:
        self._file.write_text("\n".join(letter * 64 for letter in letters))
        self._file.chmod(0o600)

    def _check(self, space: Namespace, chains: Sequence[Sequence[ChunkKey]]) -> None:
        """`hits` compares all bytes."""
        for keys in chains:
            had = hits(space, keys)
            assert not had & self.gone, f"what was forgotten comes back: {self.done}"
            assert self.there.intersection(keys) <= had, f"what was durable is lost: {self.done}"

    def _act(self, daemon: Any, space: Namespace, chains: Sequence[Sequence[ChunkKey]]) -> None:
        keys = self.chance.choice(chains)
        action = self.chance.choice(("save", "save", "save", "forget", "forget", "purge"))
        self.done.append(action)
        match action:
            case "save":
                self.gone -= set(keys)
                self.there |= _save(daemon, space, keys)
            case "forget":
                mine = keys[self.chance.randrange(LENGTH) :]
                self.there -= set(mine)
                if not space.forget(keys=mine).not_durable:
                    self.gone |= set(mine)
            case "purge":
                everything = [key for chain in chains for key in chain]
                self.there.clear()
                order = ["--run-dir", str(daemon.run_dir), "--timeout", "30", "purge"]
                if forked.run([*order, "--tenant", DEFAULT_TENANT], dict(os.environ)).returncode == 0:
                    self.gone |= set(everything)


def _save(daemon: Any, space: Namespace, keys: Sequence[ChunkKey]) -> set[ChunkKey]:
    """All of them, or it raises; those of them that are durable for certain."""
    certain: set[ChunkKey] = set()
    until = time.monotonic() + BOUND_S
    while True:
        if daemon.process.poll() is not None:
            raise Killed
        with space.write(keys) as batch:
            for index in batch.granted:
                batch.buffer(index)[:] = content(keys[index])
            if batch.granted:
                outcome = batch.commit(wait=Wait.DURABLE)
                if outcome.error is not None:
                    raise outcome.error
                assert outcome.ok, outcome
                certain |= {keys[index] for index in batch.granted}
            if {GrantResult.GRANTED, GrantResult.ALREADY}.issuperset(batch.results):
                return certain
        assert time.monotonic() < until, f"the daemon does not take them: {batch.results}"
        time.sleep(0.002)


def _kill(daemon: Any, after_s: float) -> None:
    time.sleep(after_s)
    daemon.kill()


@pytest.mark.timeout(600)  # of a machine that does much else
@pytest.mark.parametrize(
    ("seed", "rounds"),
    [(0, 5), (1, 5), *(pytest.param(seed, 15, marks=pytest.mark.slow) for seed in range(2, 8))],
)
def test_what_was_forgotten_stays_so(
    start_daemon: Callable[..., Any], launch: Callable[..., Any], run_dir: Path, seed: int, rounds: int
) -> None:
    attack = Attack(seed, start_daemon, launch, run_dir.parent)
    for _ in range(rounds):
        attack.round()
