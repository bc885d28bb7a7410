"""The scrubber, the quarantine and recall, in a real daemon and by `kvctl`."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from kvstore.cli import kvctl
from kvstore.cli.admin import AGE_MS_MAX, moment
from kvstore.client import Client, Namespace, SessionEntry
from kvstore.errors import BadRequest, Denied
from kvstore.types import ChunkKey, GrantResult, Outcome, Reason, Wait
from kvstore.v1 import admin_pb2, admin_pb2_grpc

from .ssd_tools import (
    CHUNK,
    SMALL_SSD,
    SPEC,
    client_of,
    content,
    eventually,
    hits,
    keys_of,
    look,
    save,
    settled_ssd,
)
from .test_check import Left

MIB = 1 << 20
SICK, WELL = b"S" * 16, b"W" * 16


@pytest.fixture
def ssd_dir(run_dir: Path) -> Path:
    return run_dir.parent / "ssd"


@pytest.fixture
def start(start_daemon: Callable[..., Any], ssd_dir: Path) -> Callable[..., Any]:
    return lambda **settings: start_daemon(**{**SMALL_SSD, "ssd_dir": ssd_dir, **settings})


def kvctl_(run_dir: Path, *arguments: str, status: int = 0) -> Any:
    """What it wrote as JSON."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
        kvctl.main(["--run-dir", str(run_dir), "--json", "--timeout", "20", *arguments])
    assert end.value.code == status, (out.getvalue(), err.getvalue())
    return json.loads(out.getvalue()) if out.getvalue() else err.getvalue()


def counter(client: Client, name: str) -> int:
    return client.stats().counters.get(name, 0)


def logged(daemon: Any) -> list[dict[str, Any]]:
    return [line for line in daemon.lines if line["message"] == "corrupt bytes: their slots are quarantined"]


# ----------------------------------------------------------------------------------------------------------- scrubbing


def test_a_flipped_byte_is_found_before_anybody_reads_it(
    start: Callable[..., Any], ssd_dir: Path, run_dir: Path
) -> None:
    daemon = start()
    with client_of(daemon) as client:
        keys = keys_of(client.open(SPEC), 8, 1)
        save(client.open(SPEC), keys, wait=Wait.DURABLE)
    daemon.kill()
    Left(ssd_dir, keys).flip(keys[3], 256 + CHUNK // 2)
    daemon = start(scrub_bytes_per_s=16 * MIB)
    with client_of(daemon) as client:
        eventually(lambda: counter(client, "chunks_corrupt") == 1)
        space = client.open(SPEC)
        matched = space.match(keys)
        assert (matched.outcomes[3], matched.reasons[3]) == (Outcome.MISS, Reason.CORRUPT)
        assert counter(client, "chunks_promoted_on_demand") == 0, "nobody read anything"
        (line,) = logged(daemon)
        assert line["key"] == keys[3].hex() and line["tier"] == "ssd" and line["miss"] is True, line
        assert "do not match their checksum" in line["why"], line

        (row,) = kvctl_(run_dir, "quarantine")["rows"]
        assert (row["tier"], row["key"], row["reason"]) == ("ssd", keys[3].hex(), "corrupt"), row
        settled_ssd(client)  # the index has forgotten it
        kvctl_(run_dir, "quarantine", "--retry")
        eventually(lambda: counter(client, "slots_returned") == 1)
        assert client.stats().ssd.quarantined == 0
        after = kvctl_(run_dir, "quarantine")
        assert after["rows"] == [] and after["returned"] == 1 and after["ssd"] == 0
        assert hits(space, keys) == set(keys) - {keys[3]}
        save(space, keys, wait=Wait.DURABLE)
        assert hits(space, keys) == set(keys)


def test_a_check_of_a_running_daemon(start: Callable[..., Any], ssd_dir: Path, run_dir: Path) -> None:
    """What is in DRAM still is not lost with its record: it is written once more."""
    daemon = start()
    with client_of(daemon) as client:
        space = client.open(SPEC)
        keys = keys_of(space, 40, 1)
        save(space, keys, wait=Wait.DURABLE)
        done = kvctl_(run_dir, "check")
        assert (done["corrupt"], done["chunks"], done["bytes"]) == (0, 40, 40 * CHUNK), done
        Left(ssd_dir, keys).flip(keys[7], 256)
        done = kvctl_(run_dir, "check", "--rate", "1G", status=1)
        assert done["corrupt"] == 1 and done["finished"] == done["round"], done
        settled_ssd(client)
        assert kvctl_(run_dir, "check")["corrupt"] == 0
        assert hits(space, keys) == set(keys)
        assert counter(client, "chunks_corrupt") == 1 == len(logged(daemon))
    daemon.kill()
    with client_of(start()) as client:
        assert hits(client.open(SPEC), keys) == set(keys), "and what was written anew is durable"


def test_a_check_that_takes_too_long_says_how_far_it_is(start: Callable[..., Any], run_dir: Path) -> None:
    daemon = start()
    with client_of(daemon) as client:
        space = client.open(SPEC)
        save(space, keys_of(space, 32, 1), wait=Wait.DURABLE)
    error = kvctl_(run_dir, "check", "--rate", "1K", "--wait", "0.3", status=2)
    assert "has not verified everything yet" in error and "rows" in error


def test_a_check_is_told_what_its_own_round_found(
    start: Callable[..., Any], ssd_dir: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the next one has begun, and ended, before it looks."""
    daemon = start()
    with client_of(daemon) as client:
        space = client.open(SPEC)
        keys = keys_of(space, 8, 1)
        save(space, keys, wait=Wait.DURABLE)
        Left(ssd_dir, keys).flip(keys[7], 256)

        def another(_: float) -> None:
            def ask(**named: Any) -> Any:
                return client.unary(admin_pb2_grpc.AdminStub, "Scrub", admin_pb2.ScrubRequest(**named))

            first = ask().round
            eventually(lambda: not ask(round=first).running)
            second = ask(start=True).round
            eventually(lambda: not ask(round=second).running)
            assert second == first + 1

        monkeypatch.setattr(
            "kvstore.cli.check.time", SimpleNamespace(monotonic=time.monotonic, sleep=another)
        )
        done = kvctl_(run_dir, "check", "--rate", "1G", status=1)
        assert (done["corrupt"], done["chunks"], done["finished"]) == (1, 8, done["round"] + 1), done


def test_no_daemon_no_check(run_dir: Path) -> None:
    run_dir.mkdir()
    assert kvctl_(run_dir, "check", "--timeout", "0.2", status=2)


# -------------------------------------------------------------------------------------------------------------- recall


def save_as(space: Namespace, keys: list[ChunkKey], maker: bytes) -> None:
    for start in range(0, len(keys), 8):
        part = keys[start : start + 8]
        with space.write(part, parent=keys[start - 1] if start else ChunkKey(b""), maker=maker) as batch:
            assert set(batch.results) == {GrantResult.GRANTED}, batch.results
            for index in batch.granted:
                batch.buffer(index)[:] = content(part[index])
            assert batch.commit(wait=Wait.DURABLE).ok


def test_recall(start: Callable[..., Any], run_dir: Path) -> None:
    daemon = start()
    with client_of(daemon) as client:
        space = client.open(SPEC)
        good, bad = keys_of(space, 8, 1), keys_of(space, 24, 2)
        save_as(space, good, WELL)
        save_as(space, bad[:16], SICK)
        save_as(space, bad[16:], WELL)
        for name, keys in ((b"well", good), (b"sick", bad)):
            entries = [SessionEntry(key, 64 * index, 64) for index, key in enumerate(keys)]
            space.update_session(name, expected_version=0, keep=0, append=entries)
        with space.read(bad[:4], pin=True) as lease:
            assert lease.hits == 4
            for arguments, still in ((("--dry-run",), Outcome.HIT), ((), Outcome.MISS), ((), Outcome.MISS)):
                done = kvctl_(run_dir, "recall", "--maker", SICK.hex(), *arguments)
                assert [row["session"] for row in done["sessions"]] == [b"sick".hex()], done
                assert done["sessions"][0]["first_token"] == 0 and done["sessions_in_all"] == 1
                assert space.match(bad[:1]).outcomes[0] is still
        assert [reason for _, reason in look(space, bad[:16])] == [Reason.RECALLED] * 16
        assert hits(space, [*good, *bad[16:]]) == {*good, *bad[16:]}
        with space.write(bad[:1], maker=SICK) as batch:
            assert isinstance(batch.error, Denied) and "recalled" in str(batch.error)
        save_as(space, bad[:1], WELL)
        assert kvctl_(run_dir, "recall", "--maker", SICK.hex())["chunks"] == 0
    daemon.kill()
    with client_of(start()) as client:
        space = client.open(SPEC)
        assert hits(space, [*good, *bad]) == {*good, *bad[16:], bad[0]}, "answered means durable"


def test_recall_of_what_an_earlier_start_left_on_ssd(start: Callable[..., Any], run_dir: Path) -> None:
    daemon = start()
    with client_of(daemon) as client:
        space = client.open(SPEC)
        old = keys_of(space, 8, 1)
        save_as(space, old, SICK)
    assert daemon.stop() == 0
    daemon = start()
    with client_of(daemon) as client:
        space = client.open(SPEC)
        assert kvctl_(run_dir, "recall", "--maker", WELL.hex(), status=1)["chunks"] == 0
        assert kvctl_(run_dir, "recall", "--maker", SICK.hex(), "--since", "1s")["chunks"] == 8
        assert set(space.match(old).reasons) == {Reason.RECALLED}
    daemon.kill()
    with client_of(start()) as client:
        assert hits(client.open(SPEC), old) == set()


# ---------------------------------------------------------------------------------------------------------- duplicates


def test_makers_that_compute_different_bytes_are_named_once(start: Callable[..., Any]) -> None:
    daemon = start()
    with client_of(daemon) as client, client_of(daemon) as other:
        space, again = client.open(SPEC), other.open(SPEC)
        keys = keys_of(space, 4, 1)
        save_as(space, keys, WELL)
        with again.write(keys, maker=SICK) as batch:
            assert set(batch.results) == {GrantResult.ALREADY}
        right = [xxhash.xxh3_64_intdigest(content(key).data) for key in keys]
        assert again.report_duplicates(keys, right, maker=SICK) == 0
        wrong = [right[0], right[1] ^ 1, right[2] ^ 1, right[3]]
        for _ in range(2):
            assert again.report_duplicates(keys, wrong, maker=SICK) == 2
        eventually(lambda: counter(client, "duplicate_commits_differed") == 4)
        assert counter(client, "duplicate_commits_compared") == 12
        assert hits(space, keys) == set(keys)
        with pytest.raises(BadRequest, match="checksums"):
            again.report_duplicates(keys, right[:2], maker=SICK)
    (line,) = [line for line in daemon.lines if line["message"].startswith("two makers computed")]
    assert (line["first"], line["second"], line["key"]) == (WELL.hex(), SICK.hex(), keys[1].hex())


def test_recall_wants_a_maker(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["soon", "0s", "\u00b2s", "9999-01-01", "-5m", "", "1" * 5_000 + "d"]
    for arguments in (
        ("--maker", "abcd"),
        ("--maker", "zz" * 16),
        *(("--maker", "00" * 16, "--since", since) for since in wrong),
    ):
        with pytest.raises(SystemExit, match="2"):
            kvctl.main(["--run-dir", str(run_dir), "recall", *arguments])
    assert "16 bytes" in capsys.readouterr().err
    assert moment("2m") == 120_000 and moment("9" * 30 + "d") == AGE_MS_MAX == moment("1900-01-01")
