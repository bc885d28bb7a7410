"""The run directory is cleaned, or taken over, under a running daemon."""

import os
import shutil
import signal

import pytest

from kvstore.config import LEARNED_FILE
from kvstore.types import GrantResult

from .ssd_tools import SMALL_SSD, SPEC, client_of, keys_of, save
from .test_daemon_start_stop import SERVING, health

MADE_AGAIN = "the run directory was cleaned under the daemon: made again"
LOST = "the run directory is lost: stopping"
FILES = {"kvstored.sock", "stream.sock", "grpc.sock", "lock"}
LEFT = {"lock", LEARNED_FILE}
"""By a daemon that ended in good order and has no ssd_dir."""


def names(run_dir) -> set[str]:
    return {path.name for path in run_dir.iterdir()}


@pytest.mark.parametrize(
    "gone",
    [*([name] for name in sorted(FILES)), sorted(FILES), ["directory"]],
    ids=lambda gone: "+".join(gone),
)
def test_what_was_cleaned_away_is_made_again(start_daemon, launch, run_dir, gone):
    """Those who are connected notice nothing, newcomers get in, and a second daemon does not."""
    daemon = start_daemon()
    with client_of(daemon) as client:
        space = client.open(SPEC)
        save(space, keys := keys_of(space, 4))
        if gone == ["directory"]:
            shutil.rmtree(run_dir)
        else:
            for name in gone:
                (run_dir / name).unlink()
        told = daemon.wait_for(MADE_AGAIN)
        assert {os.path.basename(path) for path in told["gone"]} == (
            FILES if gone == ["directory"] else set(gone)
        )
        assert names(run_dir) == FILES
        modes = {path.name: path.stat().st_mode & 0o777 for path in (run_dir, *run_dir.iterdir())}
        assert modes == {"run": 0o700, **dict.fromkeys(FILES, 0o600)}
        assert space.match(keys).usable == 4
        with client_of(daemon) as newcomer:
            assert newcomer.boot_id == client.boot_id
            assert newcomer.open(SPEC).match(keys).usable == 4
            assert newcomer.stats().uptime_ms, "by gRPC, too"
        assert health(daemon.grpc_target) == SERVING
        second = launch()
        assert second.exit_status() == 2
        assert f"another daemon uses this directory (pid {daemon.pid})" in second.refusals[0]
    assert daemon.stop() == 0
    assert names(run_dir) == LEFT


def test_it_is_made_again_as_often_as_it_is_cleaned(start_daemon, run_dir):
    daemon = start_daemon()
    for round in range(1, 4):
        for name in FILES:
            (run_dir / name).unlink()
        daemon.wait_for_count(MADE_AGAIN, round)
        with client_of(daemon) as client:
            assert client.stats().uptime_ms


@pytest.mark.parametrize("number", [None, signal.SIGTERM])
@pytest.mark.parametrize("directory", [False, True], ids=["files", "directory"])
def test_a_daemon_whose_directory_another_one_has_stops_and_leaves_it_alone(
    start_daemon, run_dir, tmp_path, number, directory
):
    """What it had only in DRAM is on its SSD by then."""
    # A deadline that its standing still, until the second daemon is there, does not pass.
    settings = {**SMALL_SSD, "durable_within_ms": 240_000, "drain_ms": 15_000, "ssd_deadline_ms": 60_000}
    first = start_daemon(ssd_dir=tmp_path / "ssd", **settings)
    with client_of(first) as client:
        space = client.open(SPEC)
        save(space, keys := keys_of(space, 8))
    os.kill(first.pid, signal.SIGSTOP)
    if directory:
        shutil.rmtree(run_dir)
    else:
        for name in FILES:
            (run_dir / name).unlink()
    second = start_daemon()
    inodes = {name: (run_dir / name).stat().st_ino for name in FILES}
    if number is not None:
        os.kill(first.pid, number)
    os.kill(first.pid, signal.SIGCONT)
    status = first.exit_status()
    if number is None:
        assert f"pid {second.pid}" in first.wait_for(LOST)["why"] and status == 1
    else:
        assert status in (0, 1)
    assert {name: (run_dir / name).stat().st_ino for name in FILES} == inodes
    assert int((run_dir / "lock").read_text()) == second.pid
    with client_of(second) as client:
        other = client.open(SPEC)
        assert set(other.write(keys_of(other, 2)).results) == {GrantResult.GRANTED}
        assert client.stats().uptime_ms
    third = start_daemon(run_dir=run_dir.parent / "third", ssd_dir=tmp_path / "ssd", **settings)
    with client_of(third) as client:
        space = client.open(SPEC)
        assert space.match(keys).usable == len(keys), "nothing that was saved is lost"
    assert second.stop() == 0
    assert names(run_dir) == LEFT


def test_a_directory_that_cannot_be_made_again_is_complained_of_and_who_is_in_is_served(
    start_daemon, run_dir
):
    daemon = start_daemon()
    with client_of(daemon) as client:
        space = client.open(SPEC)
        save(space, keys := keys_of(space, 4))
        shutil.rmtree(run_dir)
        run_dir.write_text("in its place")
        said = daemon.wait_for(
            "the run directory was cleaned and cannot be made again: nobody new can connect"
        )
        assert "run_dir" in said["why"]
        assert space.match(keys).usable == 4
        run_dir.unlink()
        daemon.wait_for(MADE_AGAIN)
        with client_of(daemon) as newcomer:
            assert newcomer.open(SPEC).match(keys).usable == 4
