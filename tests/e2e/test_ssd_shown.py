"""What an operator sees of the SSD tier: the daemon's first words, kvctl, /metrics."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli import doctor
from kvstore.client import Client, Hint, SessionEntry
from kvstore.client.mapped_extents import MappedExtents
from kvstore.types import Reason

from . import forked
from .ssd_tools import (
    BOUND_S,
    CHUNK,
    SMALL_SSD,
    SPEC,
    Weather,
    client_of,
    demote,
    eventually,
    in_state,
    keys_of,
    look,
    save,
    settled_ssd,
    ssd_of,
)
from .test_daemon_start_stop import free_port

TURN = 8


def kvctl(run_dir: Path, *arguments: str) -> str:
    done = forked.run(["--run-dir", str(run_dir), *arguments], os.environ | {"PYTHONSAFEPATH": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def metrics(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")
    }


def row_of(table: str, start: str) -> list[str]:
    """The cells of the line that begins so; cells are two or more blanks apart."""
    line = next(line for line in table.splitlines() if line.startswith(start))
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


@pytest.fixture
def start(start_daemon: Callable[..., Any], run_dir: Path) -> Callable[..., Any]:
    return lambda **settings: start_daemon(**{**SMALL_SSD, "ssd_dir": run_dir.parent / "ssd", **settings})


def test_a_life_of_two_sessions_as_it_is_shown(start: Callable[..., Any], run_dir: Path) -> None:
    port = free_port()
    weather = Weather(run_dir.parent)
    daemon = start(metrics_port=port, environment=weather.environment)
    with client_of(daemon) as client:
        space = client.open(SPEC)
        talks = {}
        for name, chain in ((b"hinted", 1), (b"asked", 2)):
            talks[name] = keys_of(space, TURN, chain)
            save(space, talks[name])
            entries = [SessionEntry(key, 64 * index, 64) for index, key in enumerate(talks[name])]
            space.update_session(name, expected_version=0, keep=0, append=entries)
        demote(space, talks[b"hinted"] + talks[b"asked"], filler=3)

        row = row_of(kvctl(run_dir, "sessions"), "asked")
        assert row[6:10] == ["8", "512.0 KiB", "0 B", "512.0 KiB"] and row[11] == "on ssd", row
        row = row_of(kvctl(run_dir, "explain", "asked"), talks[b"asked"][0].hex()[:16])
        assert row[1:6] == ["pending", "on ssd", "SSD", "64.0 KiB", "left DRAM for SSD"], row

        space.publish_queue([Hint(b"job", 0, session=b"hinted")])
        eventually(lambda: space.match(talks[b"hinted"]).reasons[-1] is Reason.NONE)
        row = row_of(kvctl(run_dir, "explain", "hinted"), talks[b"hinted"][0].hex()[:16])
        assert row[1:6] == ["hit", "-", "DRAM + SSD", "64.0 KiB", "stored on SSD, needed by the queue"], row
        look(space, talks[b"hinted"])
        for _ in range(3):
            look(space, talks[b"asked"])
        row = row_of(kvctl(run_dir, "sessions"), "asked")
        assert row[6:10] == ["8", "512.0 KiB", "512.0 KiB", "512.0 KiB"] and row[11] == "-", row

        settled_ssd(client)
        text = kvctl(run_dir, "stats")
        stats = json.loads(kvctl(run_dir, "stats", "--json"))
        assert f"SSD ok: {stats['ssd']['slab_bytes'] / 2**20:.1f} MiB in slab files of at most" in text
        assert f"{stats['ssd']['ready']:,} ready" in text and "0 to be stored" in text
        assert "prefetch: 8 on time, 0 late, 0 wasted; promoted: 8 ahead, 8 on demand" in text
        (shown,) = stats["namespaces"]
        assert shown["ssd_hits"] == TURN, "each of them once, however often it is used since"
        assert f"hits: {shown['hits'] - TURN} in DRAM, {TURN} on SSD" in text
        assert shown["cold_bytes"] == shown["cold_chunks"] * CHUNK == stats["ssd"]["cold_chunks"] * CHUNK

        found = metrics(port)
        assert found['kvstored_ssd_state{state="ok"}'] == 1 and found['kvstored_ssd_state{state="off"}'] == 0
        slots = {
            name: found[f'kvstored_ssd_slots{{state="{name}"}}'] for name in ("free", "reserved", "ready")
        }
        assert slots == {name: stats["ssd"][name] for name in slots}
        assert found['kvstored_prefetch_total{result="on_time"}'] == TURN
        assert found['kvstored_promoted_chunks_total{how="ahead"}'] == TURN
        assert found['kvstored_promoted_chunks_total{how="on_demand"}'] == TURN
        assert found['kvstored_hits_total{tenant="default",tier="ssd"}'] == TURN
        assert found['kvstored_hits_total{tenant="default",tier="dram"}'] == shown["hits"] - TURN
        assert found["kvstored_ssd_index_commits_total"] > 0
        assert 0 < found["kvstored_ssd_index_used_bytes"] <= found["kvstored_ssd_index_bytes"] == 8 << 20

        weather.set([{"calls": ["write"], "do": "EIO"}])
        save(space, keys_of(space, 1, 4))
        in_state(client, "read_only")
        assert metrics(port)['kvstored_ssd_state{state="read_only"}'] == 1
        assert metrics(port)['kvstored_ssd_errors_total{kind="io"}'] > 0
        assert "SSD read only (EIO: a test wants write of slab-" in kvctl(run_dir, "stats")
        assert daemon.wait_for("the SSD tier is degraded, DRAM serves on")["state"] == "read_only"


def test_the_first_words(start: Callable[..., Any], start_daemon: Callable[..., Any], run_dir: Path) -> None:
    daemon = start()
    with client_of(daemon) as client:
        space = client.open(SPEC)
        save(space, keys_of(space, 24, 1))
        settled_ssd(client)
    daemon.stop()
    ssd_dir = run_dir.parent / "ssd"
    words = f"SSD {ssd_dir}, at most 256 MiB: ok, {{}} chunks found, durable within 400 ms"
    assert words.format(0) in daemon.process.stdout.read()
    again = start()
    again.stop()
    assert words.format(24) in again.process.stdout.read(), "a stop in good order loses nothing"
    without = start_daemon()
    assert "SSD off" in kvctl(run_dir, "stats")
    without.stop()
    assert json.loads(without.process.stdout.read())["ssd"] == "SSD off"
    forgotten = start_daemon(ssd_bytes="256M", ssd_threads=2)
    forgotten.stop()
    assert (
        "SSD off: without ssd_dir, ssd_bytes and ssd_threads mean nothing" in forgotten.process.stdout.read()
    )


def examined(client: Client) -> doctor.Patient:
    """All checks were made but the one of generations and those after it; what was written waits for the SSD."""
    patient = doctor.Patient(client)
    checks = patient.round_trip()
    for check in checks[: checks.index(patient.check_generations)]:
        check()
    return patient


@pytest.mark.parametrize("ends", [True, False])
def test_the_doctor_judges_no_slot_that_is_still_being_written(
    start: Callable[..., Any], run_dir: Path, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was forgotten keeps its slot and its generation until the disk has taken it: no fault of the daemon."""
    weather = Weather(run_dir.parent)
    patient_disk = {"ssd_deadline_ms": int(1_000 * BOUND_S), "environment": weather.environment}
    with client_of(start(**patient_disk)) as client:
        examined(client)
        settled_ssd(client)  # the slab file is there
        weather.set([{"calls": ["write"], "files": "slab-*", "do": "hang"}])
        patient = examined(client)
        eventually(lambda: ssd_of(client).reserved == doctor.CHUNKS, "nothing was to be written")
        if ends:
            look_again = patient._slots_in_use
            monkeypatch.setattr(doctor, "FREED_S", 3 * BOUND_S)
            monkeypatch.setattr(patient, "_slots_in_use", lambda: (look_again(), weather.clear())[0])
            assert patient.check_generations() == "a slot that was given away is noticed by its old reader"
        else:
            monkeypatch.setattr(doctor, "FREED_S", 0.1)
            found, remedy = patient.check_generations()
            assert "still in use after" in found and "is the disk of ssd_dir slow, or hung?" in remedy
            weather.clear()


def test_the_doctor_finds_a_slot_without_a_new_generation(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_of(start()) as client:
        patient = examined(client)
        monkeypatch.setattr(MappedExtents, "intact", lambda extents, rows: True)
        with pytest.raises(doctor.Failed, match="freed without a new generation"):
            patient.check_generations()
