"""What the doctor makes of what the daemon says of its disk, and of an engine's doctor that is late."""

import subprocess
from types import SimpleNamespace

import pytest

from kvstore.cli.doctor import Failed, Patient, ask_engine
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
