"""A daemon whose SSD is encrypted: what is saved survives kill -9 and a rotation, nobody reads it on disk, and a wrong
key file costs nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.types import Wait

from .ssd_tools import CHUNK, SMALL_SSD, SPEC, client_of, content, hits, keys_of, save
from .test_check import check
from .test_ssd import refused

pytest.importorskip("cryptography")
COUNT = 16


def key_file(folder: Path, *letters: str) -> Path:
    path = folder / f"{''.join(letters)}.keys"
    path.write_text("\n".join(letter * 64 for letter in letters))
    path.chmod(0o600)
    return path


def test_it_survives_kill_9_and_a_rotation(
    start_daemon: Callable[..., Any], run_dir: Path, tmp_path: Path
) -> None:
    ssd = run_dir.parent / "ssd"
    before, both, after = key_file(tmp_path, "a"), key_file(tmp_path, "b", "a"), key_file(tmp_path, "b")

    def start(keys: Path | str, **settings: Any) -> Any:
        return start_daemon(**SMALL_SSD, ssd_dir=ssd, ssd_key_file=keys, **settings)

    daemon = start(before)
    with client_of(daemon) as client:
        space = client.open(SPEC)
        old, new = keys_of(space, COUNT), keys_of(space, COUNT, chain=1)
        save(space, old, wait=Wait.DURABLE)
    daemon.kill()
    pieces = [content(key)[at : at + 32].tobytes() for key in old for at in (0, CHUNK // 2)]
    for path in [each for each in ssd.rglob("*") if each.is_file()]:
        data = path.read_bytes()
        assert not any(piece in data for piece in pieces), path

    refused = check(ssd)
    assert refused.status == 2 and "--ssd-key-file" in refused.error, refused
    clean = check(ssd, "--ssd-key-file", str(before))
    assert clean.status == 0 and clean.found["progress"]["bytes"] == COUNT * CHUNK, clean

    daemon = start(both)
    with client_of(daemon) as client:
        space = client.open(SPEC)
        assert hits(space, old) == set(old)
        save(space, new, wait=Wait.DURABLE)
    assert daemon.stop() == 0

    rotated = check(ssd, "--ssd-key-file", str(after))
    assert (rotated.status, rotated.found["clean"], rotated.found["other_key"]) == (0, True, COUNT), rotated
    daemon = start(after)  # the old key is gone, and with it what only that one opens
    with client_of(daemon) as client:
        space = client.open(SPEC)
        assert hits(space, old) == set() and hits(space, new) == set(new)
        assert not client.stats().ssd.corrupt
        save(space, old, wait=Wait.DURABLE)
    assert daemon.stop() == 0
    daemon = start(after)
    with client_of(daemon) as client:
        assert hits(client.open(SPEC), [*old, *new]) == {*old, *new}
    assert daemon.stop() == 0
    assert json.loads(daemon.process.stdout.read())["ssd"].endswith(", encrypted")


@pytest.mark.parametrize("letters", [(), ("b",)])
def test_a_wrong_key_file_is_refused_and_costs_nothing(
    start_daemon: Callable[..., Any],
    launch: Callable[..., Any],
    run_dir: Path,
    tmp_path: Path,
    letters: tuple[str, ...],
) -> None:
    ssd = run_dir.parent / "ssd"
    right = {**SMALL_SSD, "ssd_dir": ssd, "ssd_key_file": key_file(tmp_path, "a")}
    daemon = start_daemon(**right)
    with client_of(daemon) as client:
        space = client.open(SPEC)
        keys = keys_of(space, COUNT)
        save(space, keys, wait=Wait.DURABLE)
    assert daemon.stop() == 0
    wrong = key_file(tmp_path, *letters) if letters else ""
    refused(
        launch(**{**right, "ssd_key_file": wrong}), "ssd_key_file", "has not the key", "behind a newer one"
    )
    daemon = start_daemon(**right)
    with client_of(daemon) as client:
        assert hits(client.open(SPEC), keys) == set(keys)
    assert daemon.stop() == 0
