"""Whoever stands still holds nobody up beyond a deadline: workers that are stopped (SIGSTOP) in the middle of a call,
the daemon while its clients work, close or end, peers that read nothing, a log that nobody reads.

No time is measured here: each wait has a bound that is many times what it should take, and a hang is a failure.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import client as library
from kvstore import wire
from kvstore.errors import StoreError
from kvstore.types import GrantResult
from kvstore.v1 import bytes_pb2, stats_pb2, store_pb2

from ..waiting import eventually
from .raw_http2 import Http2, in_header
from .standing_process import SPEC, keys_of, load, save
from .test_daemon_requests import frames_of, put
from .test_daemon_start_stop import free_port

BOUND_S = 20.0
PROGRAM = Path(__file__).with_name("standing_process.py")
SETTINGS = {"peer_timeout_ms": 400, "staging_bytes": 16 << 20, "staging_bytes_max": 256 << 20}


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: stopped(pid))


class Process:
    """One of standing_process.py."""

    def __init__(self, what: str, run_dir: Path) -> None:
        self.what = what
        self.child = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM), what, str(run_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> None:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line == "ready\n", (self.what, line, self.child.communicate(timeout=BOUND_S)[1])

    def go_on(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write("\n")
        self.child.stdin.flush()

    def result(self) -> dict[str, Any]:
        """What it said last; it must end, and well."""
        out, err = self.child.communicate(timeout=3 * BOUND_S)
        assert self.child.returncode == 0, (self.what, out, err)
        said: dict[str, Any] = json.loads(out.splitlines()[-1])
        return said

    def close(self) -> None:
        self.child.kill()
        self.child.communicate(timeout=BOUND_S)


@pytest.fixture
def begin() -> Iterator[Callable[..., list[Process]]]:
    started: list[Process] = []

    def start(run_dir: Path, *what: str) -> list[Process]:
        these = [Process(each, run_dir) for each in what]
        started.extend(these)
        for process in these:
            process.ready()
        return these

    yield start
    for process in started:
        process.close()


# ------------------------------------------------------------------------------------------------- stopped workers


def test_workers_stopped_in_the_middle_of_something(
    start_daemon: Callable[..., Any], begin: Callable[..., list[Process]]
) -> None:
    """Of a commit, of a Get, with an Attach stream full of answers. The others do not notice, what a call held comes
    back within its time, and whoever goes on finds either what it did or a clear failure."""
    port = free_port()
    daemon = start_daemon(metrics_port=port, **SETTINGS)
    committing, getting, streaming = begin(daemon.run_dir, "commit", "get", "stream")
    for process in (committing, getting, streaming):
        eventually(lambda process=process: stopped(process.child.pid))

    def streams() -> int:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=BOUND_S).read().decode()
        return int(float(text.split("\nkvstored_attach_streams ")[1].split()[0]))

    with library.connect(str(daemon.run_dir), timeout_s=BOUND_S) as client:
        space = client.open(SPEC)
        keys = keys_of(space, "other", 8)
        assert save(space, keys)
        assert load(space, keys) == 8
        eventually(lambda: not client.stats().gauges["leases"], "the Get still pins its chunk")
        eventually(lambda: not client.stats().gauges["reservations"], "the commit never ended")
        eventually(lambda: streams() == 3, "the stream that nobody reads never ended")
        assert load(space, keys_of(space, "commit")) == 4, "what was committed is there, whoever waits"
        for process in (committing, getting, streaming):
            os.kill(process.child.pid, signal.SIGCONT)
        assert committing.result() == {"ok": True, "hits": 4}
        got = getting.result()
        assert got["prefix"]
        assert got["whole"] == (got["status"] == "OK")
        assert got["status"] in ("OK", "DEADLINE_EXCEEDED", "UNAVAILABLE", "CANCELLED")
        assert streaming.result() == {"hits": 4}
        assert load(space, keys) == 8


def test_peers_that_read_nothing_do_not_keep_what_they_hold(
    start_daemon: Callable[..., Any], connect: Callable[..., Any], spec: Any, run_dir: Path
) -> None:
    """They live, and allow the daemon to send them nothing at all: for a Get, a watch of statistics, one of health, an
    Attach stream. Each call ends within its time; the daemon's own end does not wait for them either."""
    daemon = start_daemon(**SETTINGS)
    worker = connect(daemon)
    namespace = worker.call("Open", store_pb2.OpenRequest(namespace=wire.spec_to_proto(spec))).namespace_id
    put(worker, frames_of(namespace, b"k", bytes(256 << 10)))
    token = {wire.TOKEN_METADATA: in_header(worker.hello.token)}
    deaf = Http2(run_dir / "grpc.sock", window=0)
    get = bytes_pb2.GetRequest(namespace_id=namespace, key=b"k")
    deaf.call("/kvstore.v1.Bytes/Get", get.SerializeToString(), token)
    for _ in range(64):
        deaf.call(
            "/kvstore.v1.Stats/WatchStats",
            stats_pb2.WatchStatsRequest(interval_ms=100).SerializeToString(),
            token,
        )
        deaf.call("/grpc.health.v1.Health/Watch", b"")
    hello = store_pb2.AttachHello(token=worker.hello.token, boot_id=worker.hello.boot_id, request_id=1)
    attach = deaf.begin("/kvstore.v1.Store/Attach")
    deaf.send(attach, store_pb2.AttachRequest(hello=hello).SerializeToString())

    def watching() -> bool:
        """Whether there is room for one more: all 64 places were taken."""
        call = worker.stats.WatchStats(
            stats_pb2.WatchStatsRequest(interval_ms=100), metadata=worker.metadata, timeout=BOUND_S
        )
        try:
            return bool(next(call).uptime_ms)
        except Exception:
            return False
        finally:
            call.cancel()

    eventually(watching, "the watchers who read nothing keep their places")
    eventually(lambda: not worker.ask_stats().gauges["leases"], "the Get still pins its chunk")
    assert daemon.stop() == 0
    deaf.close()


def test_a_get_that_is_read_when_its_slot_is_anothers_gives_no_bytes_of_it(
    start_daemon: Callable[..., Any], connect: Callable[..., Any], spec: Any, run_dir: Path
) -> None:
    """The peer takes the first frame only when the lease has been revoked, because all else was pinned, and the slot
    holds another chunk."""
    small = {"dram_bytes": 4 << 20, "segment_bytes": 1 << 20, "staging_bytes": 1 << 20}
    daemon = start_daemon(lease_ttl_ms=300, pin_share_max=1.0, **small)
    worker = connect(daemon)
    namespace = worker.call("Open", store_pb2.OpenRequest(namespace=wire.spec_to_proto(spec))).namespace_id
    data = {b"%d" % number: bytes([number]) * (256 << 10) for number in range(1, 18)}

    def saved(key: bytes) -> bool:
        return put(worker, frames_of(namespace, key, data[key])).grant == GrantResult.GRANTED

    assert saved(b"1")
    deaf = Http2(run_dir / "grpc.sock", window=0)
    get = bytes_pb2.GetRequest(namespace_id=namespace, key=b"1")
    token = {wire.TOKEN_METADATA: in_header(worker.hello.token)}
    stream = deaf.call("/kvstore.v1.Bytes/Get", get.SerializeToString(), token)
    eventually(lambda: worker.ask_stats().gauges["leases"] == 1)
    for key in list(data)[1:]:
        eventually(lambda key=key: saved(key), "the lease that expired was not revoked")
        pins = store_pb2.AcquireRequest(namespace_id=namespace, keys=[key], ttl_ms=60_000)
        assert worker.call("Acquire", pins).lease_id
    assert not worker.call("Match", store_pb2.MatchRequest(namespace_id=namespace, keys=[b"1"])).usable
    deaf.allow(stream, 1 << 20)
    answer = deaf.answer(stream)
    assert not any(data[key][: 4 << 10] in answer for key in list(data)[1:]), "another chunk's bytes"
    assert b"the lease ended while the bytes were being sent" in answer
    deaf.close()


def test_a_put_that_stops_sending_ends(
    start_daemon: Callable[..., Any], connect: Callable[..., Any], spec: Any, run_dir: Path
) -> None:
    daemon = start_daemon(**SETTINGS)
    worker = connect(daemon)
    namespace = worker.call("Open", store_pb2.OpenRequest(namespace=wire.spec_to_proto(spec))).namespace_id
    token = {wire.TOKEN_METADATA: in_header(worker.hello.token)}
    peer = Http2(run_dir / "grpc.sock")
    first = bytes_pb2.PutFrame(namespace_id=namespace, key=b"k", payload=b"x" * 1000)
    peer.send(peer.begin("/kvstore.v1.Bytes/Put", token), first.SerializeToString())
    eventually(lambda: worker.ask_stats().gauges["reservations"] == 1)
    eventually(lambda: worker.ask_stats().gauges["reservations"] == 0, "it keeps its reservation")
    peer.close()


def test_a_log_that_nobody_reads_holds_up_nobody(run_dir: Path) -> None:
    """Standard error is a pipe that is full from the start, standard output another: the daemon serves, and ends."""
    pipes = [os.pipe(), os.pipe()]
    for _, end in pipes:
        os.set_blocking(end, False)
        try:
            while True:
                os.write(end, b"x" * 4096)
        except BlockingIOError:
            os.set_blocking(end, True)
    settings = ["--dram-bytes=16M", "--segment-bytes=16M", "--drain-ms=200", "--log-level=debug"]
    daemon = subprocess.Popen(
        [sys.executable, "-P", "-m", "kvstore.sim.daemon", f"--run-dir={run_dir}", *settings],
        stdin=subprocess.DEVNULL,
        stdout=pipes[0][1],
        stderr=pipes[1][1],
        cwd="/",
    )
    try:
        eventually((run_dir / "kvstored.sock").exists)
        for _ in range(10):  # each a line or two in the log
            with library.connect(str(run_dir), timeout_s=BOUND_S) as client:
                space = client.open(SPEC)
                assert save(space, keys_of(space, "log"))
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(BOUND_S) == 0
    finally:
        daemon.kill()
        daemon.wait(BOUND_S)
        for pipe in pipes:
            for end in pipe:
                os.close(end)


# ------------------------------------------------------------------------------------------------ a stopped daemon


def test_clients_of_a_stopped_daemon_come_to_their_end(
    start_daemon: Callable[..., Any], begin: Callable[..., list[Process]], run_dir: Path
) -> None:
    """They use it, close, or just end with everything open; blocking, on an event loop, as a scheduler; none waits for
    the daemon longer than it said. Nor does one that comes only now. When the daemon goes on it forgets them all."""
    daemon = start_daemon(**SETTINGS)
    these = begin(daemon.run_dir, "use", "close", "end", "on_a_loop")
    stop(daemon.pid)
    try:
        for process in these:
            process.go_on()
        said = {process.what: process.result() for process in these}
        with pytest.raises(StoreError):
            library.connect(str(run_dir), timeout_s=0.5)
        kvctl = subprocess.run(
            [sys.executable, "-P", "-m", "kvstore.cli.kvctl", "--timeout=1", f"--run-dir={run_dir}", "stats"],
            capture_output=True,
            text=True,
            timeout=2 * BOUND_S,
            check=False,
        )
        assert kvctl.returncode
        assert len(kvctl.stderr.splitlines()) == 1, kvctl.stderr
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert said["close"] == said["on_a_loop"] == {"closed": True}
    assert said["use"]["seconds"] < BOUND_S
    with library.connect(str(run_dir), timeout_s=BOUND_S) as client:
        eventually(lambda: not client.stats().gauges["leases"])
        eventually(lambda: not client.stats().gauges["reservations"])
        eventually(lambda: client.stats().gauges["workers"] == 1)
