"""The benchmark of the data plane, with little of everything: each store that is installed, through its own client."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SLOW = ("lmcache",)
"""Their servers take seconds to start."""
NAMES = ("memcpy", "sealed", "group", "tcp", "redis", "redis bare", "memcached", "memcached bare", "mooncake")
NAMES += ("lmcache", "tmpfs", "safetensors")


@pytest.fixture
def data_plane(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    module = importlib.import_module("data_plane")
    for name, value in {"ROOM_BYTES": 128 << 20, "HOT_BYTES": 8 << 20, "SOURCE_BYTES": 8 << 20}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "TURN_BYTES", 1 << 20)
    monkeypatch.setattr(module, "WINDOW_PUT_BYTES", 1 << 20)
    monkeypatch.setattr(module, "WINDOW_S", 0.01)
    yield module
    for name in [name for name in sys.modules if name == "data_plane" or name.partition(".")[0] == "peers"]:
        del sys.modules[name]


def rows_of(data_plane, names, part):
    with data_plane.running(names) as stores:
        if not stores:
            pytest.skip(f"{names} not installed")
        with data_plane.with_clients(stores, [part]):
            return list(data_plane.measure(part, stores, 1))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in NAMES]
)
def test_a_store_puts_gets_and_gives_back_what_was_put(data_plane, name):
    rows = rows_of(data_plane, [name], data_plane.Part("64K", 16, 1))
    actions = {"get", "put"} | {action for action, stores in data_plane.ONLY.items() if name in stores}
    assert {(row["store"], row["action"]) for row in rows} == {(name, action) for action in actions}
    assert all(row["gb_per_s"] > 0 and row["client_cpu_s_per_gb"] > 0 for row in rows)
    served = {row["action"] for row in rows if row["server_cpu_s_per_gb"] > 0}
    if name in ("memcpy", "tmpfs", "safetensors"):
        assert not served
    else:  # our gets need no message, so the daemon may do nothing for them
        assert served >= actions - ({"get"} if name in ("sealed", "group") else set())


def test_the_names_are_all(data_plane):
    assert tuple(data_plane.STORES) == NAMES


def test_several_clients_are_compared_with_one_and_with_each_other(data_plane):
    rows = rows_of(data_plane, ["memcpy", "sealed"], data_plane.Part("64K", 1, 4))
    assert len(rows) == 4
    for row in rows:
        assert row["of_one_client"] > 0
        assert row["fastest_over_slowest"] >= 1
        assert row["of_memcpy"] > 0
