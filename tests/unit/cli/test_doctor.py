"""What the doctor makes of what the daemon says of its disk, and of an engine's doctor that is late."""

import argparse
import subprocess
from types import SimpleNamespace

import pytest

from kvstore.cli import doctor
from kvstore.cli.doctor import Failed, Finding, Patient, ask_engine
from kvstore.v1 import stats_pb2


def patient(**ssd) -> Patient:
    reply = stats_pb2.StatsReply(ssd=stats_pb2.Ssd(**ssd))
    return Patient(SimpleNamespace(stats=lambda: reply))


def test_an_ssd_that_serves_and_one_that_is_not_wanted() -> None:
    assert patient(state="absent").check_ssd() == "off"
    found = patient(state="ok", slab_bytes=256 << 20, bytes=1 << 30).check_ssd()
    assert found == "ok, 256 of 1024 MiB are in slab files"


@pytest.mark.parametrize("state", ["read_only", "off"])
def test_an_ssd_in_trouble_is_a_finding(state) -> None:
    with pytest.raises(Failed, match=f"{state.replace('_', ' ')}: ENOSPC: No space left on device") as found:
        patient(state=state, why="ENOSPC: No space left on device").check_ssd()
    assert "ssd_dir" in found.value.remedy


class Connected:
    """A client whose daemon says `reply` of itself."""

    def __init__(self, reply: stats_pb2.StatsReply) -> None:
        self.stats = lambda: reply

    def __enter__(self) -> "Connected":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_a_sick_ssd_hides_no_remote_store_that_is_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each alert of what is around the daemon sends its reader to doctor."""
    reply = stats_pb2.StatsReply(ssd=stats_pb2.Ssd(state="off", why="EIO: Input/output error"))
    reply.gauges["source_remote_well"] = 0.0
    reply.gauges["remote_forgets_read_ms_ago"] = 61_000.0
    reply.gauges["remote_forgets_waiting"] = 4.0
    client = Connected(reply)
    monkeypatch.setattr(doctor, "connect", lambda *_, **__: client)
    monkeypatch.setattr(doctor, "_look_at", lambda run_dir: run_dir)
    monkeypatch.setattr(Patient, "round_trip", lambda self: [])
    monkeypatch.setattr(Patient, "clean_up", lambda self: None)
    monkeypatch.setattr(doctor, "ask_engine", lambda *_: [Finding("vllm", True, "asked too")])
    options = argparse.Namespace(timeout=1.0, json=False, engine="vllm", arguments=[])
    assert doctor.run("/run/kv", options) == 1
    told = capsys.readouterr().out
    for words in (
        "FAIL  ssd ",
        "FAIL  beyond ",
        "remote: failing",
        "for 61 s; 4 forgets have not",
        "asked too",
    ):
        assert words in told


def test_what_a_round_trip_needs_ends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check_open() -> str:
        raise Failed("no room", "see to it")

    client = Connected(stats_pb2.StatsReply())
    monkeypatch.setattr(doctor, "connect", lambda *_, **__: client)
    monkeypatch.setattr(doctor, "_look_at", lambda run_dir: run_dir)
    monkeypatch.setattr(Patient, "round_trip", lambda self: [check_open, lambda: pytest.fail("went on")])
    monkeypatch.setattr(doctor, "ask_engine", lambda *_: pytest.fail("went on"))
    options = argparse.Namespace(timeout=1.0, json=False, engine="vllm", arguments=[])
    assert doctor.run("/run/kv", options) == 1
    assert "FAIL  open             no room" in capsys.readouterr().out


class Hanging:
    """A doctor's process that is late, after it has said something."""

    def __init__(self, command: object, **options: object) -> None:
        self.killed = False

    def kill(self) -> None:
        self.killed = True

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        if not self.killed:
            raise subprocess.TimeoutExpired("doctor", timeout or 0.0)
        return '{"check": "vllm", "ok": true, "detail": "0.32.0", "remedy": ""}\n{"check": "argum', ""


def test_what_a_late_doctor_has_said_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.cli.doctor.subprocess.Popen", Hanging)
    first, late = ask_engine("vllm", "/run/kv", 1.0, [])
    assert (first.check, first.ok, first.detail) == ("vllm", True, "0.32.0")
    assert not late.ok and "did not end within" in late.detail
