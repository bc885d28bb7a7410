"""What the SSD tier notices of what others do to its files: each kind, its words, and what is told once."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.core.events import DiskDone, DiskTrouble, ProbeDisk, SlabReady
from kvstore.tiers import disk_watch
from kvstore.types import DiskResult, OpId, SlabId

from .test_ssd import Fixture, settings

WAIT_S = 20.0
"""A failure, never a measurement."""


@pytest.fixture
def it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fixture]:
    monkeypatch.setattr(disk_watch, "WATCH_S", 0.01)
    fixture = Fixture(tmp_path, settings(tmp_path))
    fixture.open()
    assert isinstance(fixture.create(), SlabReady)
    yield fixture
    fixture.tier.close(WAIT_S)


def problems(it: Fixture) -> list[tuple[str, bool]]:
    it.tier._watch.look()
    return [(problem.what, problem.severe) for problem in it.tier._watch.problems]


def slab_path(it: Fixture) -> str:
    return it.tier._slabs.path(SlabId(0))


def test_files_as_they_should_be(it: Fixture) -> None:
    assert problems(it) == []
    assert it.tier._watch.severe == ""
    assert it.tier.stats().free_bytes > 0


def test_a_file_that_was_renamed_or_replaced_is_missed_and_may_come_back(it: Fixture) -> None:
    path = slab_path(it)
    os.rename(path, path + ".away")
    assert problems(it) == [("slab-00000000.kvs was removed or replaced under the daemon", True)]
    shutil.copy(path + ".away", path)
    assert problems(it) == [("slab-00000000.kvs was removed or replaced under the daemon", True)], "a copy"
    os.replace(path + ".away", path)
    assert problems(it) == []


def test_a_file_that_was_cut(it: Fixture) -> None:
    size = os.path.getsize(slab_path(it))
    os.truncate(slab_path(it), size - 1)
    assert problems(it) == [(f"slab-00000000.kvs was cut to {size - 1} of {size} bytes", True)]


def test_a_file_that_we_remove_ourselves_is_not_missed(it: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the list and the look."""
    slabs = it.tier._slabs
    damage = slabs._damage

    def while_it_looks(slab: object, path: str) -> str:
        slabs.delete(SlabId(0))
        return damage(slab, path)  # type: ignore[arg-type]

    monkeypatch.setattr(slabs, "_damage", while_it_looks)
    assert problems(it) == []


def test_limits_and_room(it: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    config = it.tier._watch._config
    limits = {"now": config.ssd_slab_bytes - 1}
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limits["now"], resource.RLIM_INFINITY))
    (found,) = problems(it)
    assert found == (
        f"a file may have {limits['now']} bytes (RLIMIT_FSIZE), a slab file needs up to {config.ssd_slab_bytes}",
        True,
    )
    limits["now"] = resource.RLIM_INFINITY
    monkeypatch.setattr(it.tier._watch._disk, "free_bytes", lambda _: 5)
    (found,) = problems(it)
    assert found[0].startswith(f"ssd_bytes={config.ssd_bytes} wants ") and found[0].endswith("has 5 left")
    assert not found[1]


def test_no_space_is_logged_once_until_there_is_some(it: Fixture, caplog: pytest.LogCaptureFixture) -> None:
    watch = it.tier._watch
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            watch.no_space("another slab file", "ENOSPC: No space left on device")
        watch.no_space("the index", "full")
        assert problems(it) == [
            ("no space left for another slab file: ENOSPC: No space left on device", False)
        ]
        watch.has_space("another slab file")
        assert problems(it) == [("no space left for the index: full", False)]
        watch.has_space("the index")
        watch.has_space("the index")
        assert problems(it) == []
        watch.no_space("the index", "full")
    told = [record.getMessage().split(" of the SSD tier")[0] for record in caplog.records]
    told = [text for text in told if "space" in text and "for " in text]
    assert told.count("no space left for another slab file") == 1
    assert told.count("no space left for the index") == 2
    assert told.count("there is space again for the index") == 1


def test_what_is_severe_is_told_once_and_probes_fail_until_it_is_mended(it: Fixture) -> None:
    path = slab_path(it)
    os.rename(path, path + ".away")
    it.tier.watch()
    told = it.answers.get(timeout=WAIT_S)
    assert told == DiskTrouble("slab-00000000.kvs was removed or replaced under the daemon")
    it.tier.submit(ProbeDisk(OpId(901)))
    answer = it.answers.get(timeout=WAIT_S)
    assert isinstance(answer, DiskDone)
    assert (answer.op, answer.results, answer.why) == (901, (DiskResult.IO_ERROR,), told.why)
    os.rename(path + ".away", path)
    deadline = time.monotonic() + WAIT_S
    while it.tier._watch.severe:
        assert time.monotonic() < deadline
    it.tier.submit(ProbeDisk(OpId(902)))
    answer = it.answers.get(timeout=WAIT_S)
    assert isinstance(answer, DiskDone) and answer.results == (DiskResult.OK,)
