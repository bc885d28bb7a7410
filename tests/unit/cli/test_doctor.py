"""What the doctor makes of what the daemon says of its disk."""

from types import SimpleNamespace

import pytest

from kvstore.cli.doctor import Failed, Patient
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
