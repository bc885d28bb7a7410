"""`kvctl` against a real daemon."""

import json
import os
import signal
import subprocess
import sys

import pytest

from kvstore import measures, wire
from kvstore.cli.objects import granted
from kvstore.client import connect as client_of
from kvstore.config import ONE_SEGMENT
from kvstore.core.events import SessionEntry
from kvstore.core.requests.sessions import LISTED_MAX
from kvstore.v1 import store_pb2

from . import forked

SHARD = 256 << 10


@pytest.fixture
def kvctl(run_dir):
    """kvctl(*arguments, stdin=b"", status=0) -> what it wrote to standard output."""

    def run(*arguments: str, stdin: bytes = b"", status: int = 0, environment=None) -> bytes:
        given = {"PYTHONSAFEPATH": "1", "KVSTORED_RUN_DIR": str(run_dir), **(environment or {})}
        done = forked.run(arguments, os.environ | given, input=stdin)
        assert done.returncode == status, (done.stdout, done.stderr)
        run.stderr = done.stderr.decode()
        return done.stdout

    return run


@pytest.fixture
def session(worker, namespace):
    """A session "talk" of two committed chunks."""
    stream = worker.attach()
    memory = worker.staging(2 * SHARD)
    reserved = stream.ask("reserve", store_pb2.ReserveRequest(namespace_id=namespace, keys=[b"a", b"b"]))
    stream.ask(
        "commit",
        store_pb2.CommitRequest(reservation_id=reserved.reservation_id, staging_offsets=[0, SHARD]),
    )
    memory.close()
    entries = [
        store_pb2.SessionEntry(key=key, first_token=64 * i, token_count=64)
        for i, key in enumerate((b"a", b"b"))
    ]
    stream.ask(
        "update_session",
        store_pb2.UpdateSessionRequest(namespace_id=namespace, session=b"talk", append=entries),
    )
    return stream


def fill(worker, spec) -> None:
    """Reserve all of a 16 MiB arena."""
    namespace = worker.call("Open", store_pb2.OpenRequest(namespace=wire.spec_to_proto(spec))).namespace_id
    keys = [b"%d" % number for number in range(64)]
    reserved = worker.call("Reserve", store_pb2.ReserveRequest(namespace_id=namespace, keys=keys))
    assert set(reserved.results) == {0}


# ------------------------------------------------------------------------------------------------------------- stats


def test_stats_conserve_slots(daemon, kvctl, session):
    reply = json.loads(kvctl("stats", "--json"))
    (pool,) = reply["pools"]
    assert pool["free"] + pool["reserved"] + pool["ready"] + pool["quarantined"] == pool["capacity"] == 64
    assert pool["ready"] == 2
    assert reply["arena"]["bytes"] == 64 << 20
    assert reply["gauges"]["workers"] == 2, "the test's, and kvctl itself"
    assert reply["boot_id"] == daemon.wait_for("ready")["boot_id"]


def test_stats_for_people(daemon, kvctl, session):
    text = kvctl("stats").decode()
    assert "arena 64.0 MiB (sealed): ready" in text
    assert "tiny" in text
    assert "quarantined" in text
    assert "chunks_saved: Chunks committed" not in text
    assert "lookup" not in text.split("\n\n")[0], "nobody has asked for anything"
    session.ask("acquire", store_pb2.AcquireRequest(namespace_id=1, keys=[b"c"]))
    text = kvctl("stats").decode()
    assert "1 lookup: 0 hits (0.0 %), 0 pending, 1 missed\n    missed: 1 never seen\n" in text
    assert "chunks_saved: Chunks committed with all their shards." in kvctl("stats", "--long").decode()


def test_every_number_of_stats_has_a_meaning(daemon, kvctl, session):
    reply = json.loads(kvctl("stats", "--json"))
    assert [name for name in (*reply["gauges"], *reply["counters"]) if not measures.meaning(name)] == []


def test_watch(daemon, kvctl):
    watching = subprocess.Popen(
        [
            *("env", "--default-signal=INT"),  # what a shell starts in the background has it ignored
            *(sys.executable, "-P", "-m", "kvstore.cli.kvctl", "stats", "--watch", "0.1", "--json"),
        ],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONSAFEPATH": "1", "KVSTORED_RUN_DIR": str(daemon.run_dir)},
    )
    try:
        uptimes = [json.loads(watching.stdout.readline())["uptime_ms"] for _ in range(3)]
        assert uptimes[0] + 100 <= uptimes[1]
        watching.send_signal(signal.SIGINT)
        assert watching.wait(20) == 130
    finally:
        watching.kill()
        watching.wait(20)
        watching.stdout.close()


def test_a_watch_is_a_line_a_tick(daemon, kvctl, session):
    watching = subprocess.Popen(
        [sys.executable, "-P", "-m", "kvstore.cli.kvctl", "stats", "--watch", "0.1"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONSAFEPATH": "1", "KVSTORED_RUN_DIR": str(daemon.run_dir)},
    )
    try:
        head, *lines = [watching.stdout.readline().split() for _ in range(4)]
        assert head[:3] == ["time", "look/s", "hit%"]
        assert all(len(line) == len(head) and line[0].count(":") == 2 for line in lines)
    finally:
        watching.kill()
        watching.wait(20)
        watching.stdout.close()


def test_top_without_a_terminal(daemon, kvctl, session):
    frames = kvctl("top", "--count", "2", "--interval", "0.1").decode().split("\n\nkvstored ")
    assert len(frames) == 2 and "\x1b" not in "".join(frames)
    assert "hit rate" in frames[0] and "queue         0 jobs" in frames[1]
    told = [
        json.loads(line) for line in kvctl("top", "--json", "--count", "2", "--interval", "0.1").splitlines()
    ]
    assert [one["since_start"] for one in told] == [True, False]
    assert told[0]["counters_per_s"]["chunks_saved"] > 0 and told[1]["lookups"] == 0
    assert told[1]["queued_jobs"] == told[1]["prefetch_window_jobs"] == 0


def test_namespaces(daemon, kvctl, session):
    (row,) = json.loads(kvctl("namespaces", "--json"))["namespaces"]
    assert (row["model"], row["tenant"], row["chunks"], row["sessions"]) == ("tiny", "default", 2, 1)
    assert "tiny" in kvctl("namespaces").decode()
    assert (row["spec"]["layout_fingerprint"], row["spec"]["weights_digest"]) == ("test:bytes", "77" * 32)
    assert (row["chunk_tokens"], row["chunk_bytes"]) == (64, SHARD)
    text = kvctl("namespaces", "--long").decode()
    assert "its identity:\n" in text and "  layout_fingerprint: test:bytes\n" in text


# ---------------------------------------------------------------------------------------------------------- sessions


def test_sessions(daemon, kvctl, session):
    (row,) = json.loads(kvctl("sessions", "--json"))["rows"]
    assert (row["session"], row["usable"], row["resident_bytes"]) == (b"talk".hex(), 2, 2 * SHARD)
    text = kvctl("sessions").decode()
    assert "talk" in text
    assert "1 of 1 sessions" in text


def test_a_long_list_of_sessions_comes_in_parts(daemon, kvctl, run_dir, spec):
    """No request keeps the daemon busy for long, however many are wanted."""
    count = 2 * LISTED_MAX + 100
    with client_of(run_dir) as client:
        store = client.open(spec)
        keys = store.keys(range(64))
        with store.write(keys) as batch:
            batch.copy_from(0, bytes(SHARD))
            assert batch.commit().ok
        for number in range(count):
            store.update_session(
                b"%d" % number, expected_version=0, keep=0, append=[SessionEntry(keys[0], 0, 64)]
            )
    newest_first = [(b"%d" % number).hex() for number in reversed(range(count))]
    for limit in (count + 1, count - 200, 3):
        reply = json.loads(kvctl("sessions", "--json", "--limit", str(limit)))
        assert [row["session"] for row in reply["rows"]] == newest_first[:limit]
        assert int(reply["total"]) == count


def test_explain_a_session(daemon, kvctl, session):
    (answer,) = json.loads(kvctl("explain", "talk", "--json"))
    assert [chunk["key"] for chunk in answer["chunks"]] == [b"a".hex(), b"b".hex()]
    assert "hit" in kvctl("explain", "hex:" + b"talk".hex()).decode()


def test_explain_says_why_a_chunk_is_gone(daemon, kvctl, session):
    assert kvctl("forget", "--key", b"b".hex()) == b"1 chunk dropped\n"
    text = kvctl("explain", "talk").decode()
    assert "hit" in text
    assert "forgotten" in text


def test_explain_keys(daemon, kvctl, session):
    (answer,) = json.loads(kvctl("explain", "--key", "61", "--key", "ff", "--json", status=1))
    assert [chunk["shards_ready"] for chunk in answer["chunks"]] == [1, 0]
    words = [(chunk["outcome"], chunk["reason"], chunk["tiers"]) for chunk in answer["chunks"]]
    assert words == [("hit", "none", ["dram"]), ("miss", "never_seen", [])]


def test_forget_a_session(daemon, kvctl, session, namespace):
    assert kvctl("forget", "talk") == b"the session and 2 chunks dropped\n"
    assert "0 of 0 sessions" in kvctl("sessions").decode()
    request = store_pb2.MatchRequest(namespace_id=namespace, keys=[b"a"])
    assert session.ask("match", request).outcomes == b"\2"


def test_a_key_that_explain_shows_is_one_that_others_take(daemon, kvctl, run_dir, spec):
    with client_of(run_dir) as client:
        store = client.open(spec)
        keys = store.keys(range(64))
        with store.write(keys) as batch:
            batch.copy_from(0, bytes(SHARD))
            assert batch.commit().ok
        store.update_session("talk", expected_version=0, keep=0, append=[SessionEntry(keys[0], 0, 64)])
    shown = kvctl("explain", "talk").decode().splitlines()[2].split()[0]
    assert shown == keys[0].hex()
    assert " hit " in kvctl("explain", "--key", shown).decode()
    assert kvctl("forget", "--key", shown) == b"1 chunk dropped\n"


def test_forget_says_what_it_did_not_know(daemon, kvctl, session, namespace):
    known, unknown = b"a".hex(), "ff" * 32
    assert kvctl("forget", "--key", unknown, status=1) == b"0 chunks dropped\n"
    assert kvctl.stderr == f"kvctl: --key={unknown}: no such chunk is known here\n"
    told = json.loads(kvctl("forget", "--json", "--key", known, "--key", unknown, status=1))
    assert told == {"count": 1, "durable": True, "not_durable": "", "unknown": [unknown]}
    assert "no such chunk" in kvctl.stderr
    kvctl("forget", "--namespace", str(namespace), "another", status=1)
    assert "no such session" in kvctl.stderr
    assert kvctl("forget", "--file", "00" * 16, status=1) == b"0 chunks of the file dropped\n"
    assert "no such file" in kvctl.stderr


def test_names_that_nobody_has_are_said_to_be_unknown(daemon, kvctl, session, namespace):
    """And end with a status that says so, whatever asks for them."""
    for dry_run in (["--dry-run"], []):
        said = kvctl("purge", "--tenant", "alcie", *dry_run, status=1)
        assert "--tenant=alcie: nothing of such a tenant is known here" in kvctl.stderr
        assert ("other nodes are told all the same" in kvctl.stderr) == (not dry_run)
        assert said == b"", "nothing was purged"
    kvctl("recall", "--maker", "ab" * 16, "--dry-run", status=1)
    assert "nothing that it made is known here" in kvctl.stderr
    there, other = ["--namespace", str(namespace)], ["--namespace", "99"]
    for order, words in {
        ("sessions", *other): "--namespace=99: no such namespace",
        ("explain", "talk", *other): "--namespace=99: no such namespace",
        ("explain", "--key", "61", *other): "--namespace=99: no such namespace",
        ("forget", "talk", *other): "no such",
        ("forget", "--key", "61", *other): "no such",
        ("explain", "another"): "SESSION=another: no such session",
        ("explain", "another", *there): "SESSION=another: no such session",
        ("explain", "--key", "ff"): "--key=ff: no such chunk is known here",
        ("forget", "another"): "SESSION=another: no such session",
        ("get", "00" * 16): "a piece of it is not there",
        ("route", "--session", "another"): "--session=another: no session with chunks of such a name",
        ("route", "--model", "other", "--tokens", "1,2"): "model=other: no worker has opened it",
        ("promptcache", "get", "other"): "no such schema",
        ("promptcache", "remove", "other"): "no such schema",
    }.items():
        kvctl(*order, status=1)
        assert words in kvctl.stderr, order
    kvctl("purge", "--tenant", "default")
    assert not kvctl.stderr
    kvctl("purge", "--tenant", "default")
    assert not kvctl.stderr, "it has a namespace, of which nothing is left"


def test_what_kvctl_opens_itself_is_no_model_to_be_named(daemon, kvctl, session):
    kvctl("put", "-", stdin=b"x")
    kvctl("doctor")
    assert "registry" in kvctl("route", "--session", "talk").decode()


# ------------------------------------------------------------------------------------------------------ put and get


@pytest.mark.parametrize("size", [0, 1, SHARD - 8, SHARD - 7, 5_000_000])
def test_a_file_comes_back_as_it_was(daemon, kvctl, tmp_path, size):
    data = os.urandom(size)
    (tmp_path / "in").write_bytes(data)
    key = kvctl("put", str(tmp_path / "in")).decode().strip()
    assert kvctl("get", key) == data
    kvctl("get", key, "-o", str(tmp_path / "out"))
    assert (tmp_path / "out").read_bytes() == data
    assert json.loads(kvctl("put", "-", "--json", stdin=data)) == {"key": key, "bytes": size}, (
        "again: the same key"
    )
    kvctl("forget", "--file", key)
    kvctl("get", key, status=1)
    assert "a piece of it is not there: FORGOTTEN" in kvctl.stderr


def test_a_file_that_does_not_fit(start_daemon, connect, kvctl, spec):
    daemon = start_daemon(dram_bytes=16 << 20, reserve_share_max=1.0)
    fill(connect(daemon), spec)
    kvctl("put", "-", stdin=b"x", status=1)
    assert "the daemon answered FULL for piece 0 of 1 (see kvctl stats: " in kvctl.stderr
    assert "Raise dram_bytes, or lower segment_bytes)" in kvctl.stderr


def test_put_waits_for_a_segment_that_another_model_gives_up(start_daemon, run_dir, kvctl, spec):
    """As in a small first try: one segment, and a model's chunks in it."""
    start_daemon(dram_bytes=16 << 20)
    with client_of(run_dir) as client:
        store = client.open(spec)
        keys = store.keys(range(128))
        with granted(store, keys) as batch:
            for index in batch.granted:
                batch.copy_from(index, bytes(256 << 10))
            batch.commit()
        key = kvctl("put", "-", stdin=b"x").decode().strip()
        assert kvctl("get", key) == b"x"


# ------------------------------------------------------------------------------------------------------------ doctor


def test_doctor_finds_nothing_and_leaves_nothing(daemon, kvctl):
    before = json.loads(kvctl("stats", "--json"))
    text = kvctl("doctor").decode()
    assert "FAIL" not in text
    assert "->" not in text
    assert f"the arena is {ONE_SEGMENT}" not in [line["message"] for line in daemon.lines]
    assert [line.split()[1] for line in text.splitlines()][:3] == ["directory", "connect", "arena"]
    after = json.loads(kvctl("stats", "--json"))
    assert sum(pool["ready"] + pool["reserved"] + pool["quarantined"] for pool in after["pools"]) == 0
    assert sum(row["sessions"] for row in after["namespaces"]) == 0
    assert after["gauges"]["leases"] == before["gauges"]["leases"] == 0


def test_doctor_of_the_devices(daemon, kvctl):
    """Random bits from each device through the store and back, in a process of its own."""
    pytest.importorskip("torch", reason="torch is not installed: there is no device")
    findings = [json.loads(line) for line in kvctl("doctor", "gpu", "--json").splitlines()]
    assert all(finding["ok"] for finding in findings)
    assert findings[-1]["check"] == "cpu" and "in 3 shapes, no byte differs" in findings[-1]["detail"]
    after = json.loads(kvctl("stats", "--json"))
    assert sum(pool["ready"] + pool["reserved"] + pool["quarantined"] for pool in after["pools"]) == 0
    assert after["gauges"]["leases"] == 0


def test_doctor_of_an_arena_with_one_segment(start_daemon, kvctl):
    daemon = start_daemon(dram_bytes=16 << 20)
    warning = daemon.wait_for(f"the arena is {ONE_SEGMENT}")
    assert (warning["level"], warning["dram_bytes"], warning["segment_bytes"]) == (
        "warning",
        16 << 20,
        16 << 20,
    )
    assert warning["remedy"] == "raise dram_bytes, or lower segment_bytes: more segments than models"
    found = {finding["check"]: finding for finding in map(json.loads, kvctl("doctor", "--json").splitlines())}
    assert (found["arena"]["ok"], found["arena"]["remedy"]) == (True, warning["remedy"])
    assert found["arena"]["detail"] == f"16 of 16 MiB are ready, {ONE_SEGMENT}"
    assert [finding["remedy"] for finding in found.values() if finding["remedy"]] == [warning["remedy"]]


@pytest.mark.parametrize("protection", ["sealed", "group"])
def test_doctor_of_both_protections(start_daemon, kvctl, protection):
    start_daemon(protection=protection)
    findings = [json.loads(line) for line in kvctl("doctor", "--json").splitlines()]
    assert [finding["check"] for finding in findings if not finding["ok"]] == []
    assert len(findings) == 12


def test_doctor_without_a_daemon(kvctl, run_dir):
    text = kvctl("doctor", status=1).decode()
    assert "FAIL  directory" in text
    assert "start kvstored, or name its directory with --run-dir" in text


def test_doctor_after_kill(daemon, kvctl):
    daemon.kill()
    text = kvctl("doctor", "--timeout", "0.5", status=1).decode()
    assert "FAIL  connect" in text


def test_doctor_of_a_full_arena(start_daemon, connect, kvctl, spec):
    """Everything is reserved by somebody else."""
    daemon = start_daemon(dram_bytes=16 << 20, reserve_share_max=1.0)
    fill(connect(daemon), spec)
    text = kvctl("doctor", status=1).decode()
    assert "FAIL  write            the daemon granted no room: FULL, FULL, FULL" in text
    assert "see kvctl stats" in text


# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("arguments", "status", "why"),
    [
        (["stats"], 1, "kvctl: run_dir="),
        (["nonsense"], 2, "invalid choice: 'nonsense'"),
        ([], 2, "the following arguments are required: COMMAND"),
        (["get", "xyz"], 2, "argument KEY: xyz is not in hexadecimal digits, two a byte"),
        (["recall", "--maker", "zz"], 2, "a maker has 16 bytes, 32 hexadecimal digits"),
        (["stats", "--watch", "0"], 2, "0 is not between 0.1 and 3600 seconds"),
        (["explain", "hex:" + "00" * 300], 2, "a session's name has 1 to 256 bytes"),
    ],
)
def test_errors_are_one_line(kvctl, arguments, status, why):
    kvctl("--timeout", "0.5", *arguments, status=status)
    assert why in kvctl.stderr
    assert "Traceback" not in kvctl.stderr


MISSING = [
    (["fleet", "stats", "--wait"], "--wait: would do nothing here (it is for drain: leave it out)"),
    (["fleet", "drain", "a", "--stop", "--wait"], "--wait: would do nothing here (nothing is offered after"),
    (["record", "--status", "--seconds", "9"], "--seconds: would do nothing here (with --status or --stop"),
    (["stats", "--watch", "--long"], "--long: would do nothing here"),
    (["explain", "nobody"], "SESSION=nobody: no such session (see kvctl sessions)"),
    (
        ["explain", "--key", "61", "--namespace", "99"],
        "--namespace=99: no such namespace (see kvctl namespaces)",
    ),
    (["get", "00"], "KEY=00: a key of put has 16 bytes (give the key as kvctl put printed it)"),
    (["get", "ab" * 16], f"KEY={'ab' * 16}: a piece of it is not there: NEVER_SEEN"),
    (["put", "/nowhere"], "FILE=/nowhere: cannot be read: No such file or directory"),
]


def test_what_the_daemon_has_not(daemon, kvctl, session, subtests):
    for arguments, why in MISSING:
        with subtests.test(arguments=arguments):
            kvctl(*arguments, status=1)
            assert why in kvctl.stderr
            assert "Traceback" not in kvctl.stderr
