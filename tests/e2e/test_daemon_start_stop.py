"""Starting, refusing to start, and stopping."""

import contextlib
import itertools
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore import wire
from kvstore.errors import Unavailable
from kvstore.memory import memory_limit_bytes
from kvstore.server.daemon import DRAINING, MEANINGLESS
from kvstore.types import GrantResult
from kvstore.v1 import store_pb2

from .ssd_tools import SMALL_SSD, SPEC, client_of, eventually, keys_of, save

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = ("", "kvstore.v1.Store", "kvstore.v1.Stats", "kvstore.v1.Bytes")


_ports = itertools.count(20_000 + os.getpid() % 100 * 100)


def free_port() -> int:
    """One that stays free until it is used: the kernel gives out none below 32,768 by itself, and other processes of a
    test run begin to count elsewhere."""
    for port in _ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("there is always another one")


@pytest.fixture
def port() -> int:
    return free_port()


def health(target: str, service: str = "") -> int:
    with grpc.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=20).status


# ----------------------------------------------------------------------------------------------------------- starting


def test_says_what_it_uses(start_daemon, run_dir):
    daemon = start_daemon()
    ready = daemon.wait_for("ready")
    assert ready["pid"] == daemon.pid
    assert ready["settings"]["dram_bytes"] == 64 << 20
    daemon.stop()
    assert "arena 64 MiB in 4 segments (sealed)" in daemon.process.stdout.read()


def test_the_directory_and_its_sockets_are_for_us_alone(daemon, run_dir):
    modes = {path.name: path.stat().st_mode & 0o777 for path in (run_dir, *run_dir.iterdir())}
    assert modes == {
        "run": 0o700,
        "kvstored.sock": 0o600,
        "stream.sock": 0o600,
        "grpc.sock": 0o600,
        "lock": 0o600,
    }


def test_tenants_that_are_named_later_can_come_in_too(start_daemon, run_dir):
    assert start_daemon().stop() == 0
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    start_daemon(tenants="12345=alice")
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o755


def test_other_tenants_can_come_in(start_daemon, run_dir):
    start_daemon(tenants="12345=alice")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (run_dir, *run_dir.iterdir())}
    assert modes == {
        "run": 0o755,
        "kvstored.sock": 0o666,
        "stream.sock": 0o666,
        "grpc.sock": 0o666,
        "lock": 0o600,
    }


def test_tells_systemd(start_daemon, run_dir):
    address = str(run_dir.parent / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(address)
        notify.settimeout(20)
        daemon = start_daemon(environment={"NOTIFY_SOCKET": address})
        assert notify.recv(100) == b"READY=1"
        daemon.stop()
        assert notify.recv(100) == b"STOPPING=1"


SLOW_ARENA = """
from kvstore.server import daemon
from kvstore.tiers.arena import Arena

real = Arena.create
made = iter(range(1_000))

def create(arena, *args):
    if next(made) >= {at_once}:
        open({gate!r}).close()  # until somebody opens it for writing
    real(arena, *args)

Arena.create = create
daemon.PROGRESS_S = 0.01
"""
"""A daemon that makes so many segments at once, and each of the others when it is told to."""


def test_ready_means_that_half_of_the_arena_can_be_saved_to(start_daemon, launch, run_dir):
    """Health, log and systemd say so together; and a save is never told that it is full of what is still being made."""
    gate, address = str(run_dir.parent / "gate"), str(run_dir.parent / "notify")
    os.mkfifo(gate)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(address)
        notify.settimeout(20)
        daemon = launch(
            prelude=SLOW_ARENA.format(at_once=1, gate=gate),
            environment={"NOTIFY_SOCKET": address},
            **SMALL_SSD | {"reserve_share_max": 1.0, "staging_bytes": 4 << 20},
        )
        said = daemon.wait_for("the arena is being made")
        assert said["wanted_bytes"] == 2 << 20
        for service in SERVICES:
            assert health(daemon.grpc_target, service) == NOT_SERVING
        assert "ready" not in [line["message"] for line in daemon.lines]
        open(gate, "w").close()  # the second of four
        daemon.wait_for("ready")
        while (told := notify.recv(100)) != b"READY=1":
            assert told.startswith(b"EXTEND_TIMEOUT_USEC=")
        for service in SERVICES:
            assert health(daemon.grpc_target, service) == SERVING
        with client_of(daemon, staging_bytes=4 << 20) as client:
            space = client.open(SPEC)
            with space.write(keys_of(space, 32)) as batch:
                assert set(batch.results) == {GrantResult.GRANTED}


def test_the_whole_arena_is_there_at_once(start_daemon):
    """Pages are allocated first, and faulted in later: at this size all of them can be saved to when it is ready."""
    daemon = start_daemon(dram_bytes=512 << 20, segment_bytes=64 << 20, reserve_share_max=1.0)
    with client_of(daemon) as client:
        arena = client.stats().arena
        assert arena.ready_bytes >= arena.bytes // 2


@pytest.mark.parametrize("number", DRAINING, ids=lambda number: number.name)
def test_a_signal_before_it_is_ready_ends_it(launch, run_dir, number):
    gate = str(run_dir.parent / "gate")
    os.mkfifo(gate)
    daemon = launch(prelude=SLOW_ARENA.format(at_once=0, gate=gate))
    daemon.wait_for("the arena is being made")
    daemon.process.send_signal(number)
    assert daemon.exit_status() == 0
    said = [line["message"] for line in daemon.lines]
    assert f"{number.name}: stopping before it was ready" in said
    assert "ready" not in said and f"{number.name}: draining" not in said
    assert daemon.process.stdout.read() == ""


def test_an_arena_that_cannot_be_made_whole_is_told_and_what_there_is_serves(launch):
    broken = """
from kvstore.tiers.arena import Arena
real = Arena.create
def create(arena, segment, *args):
    if segment:
        raise OSError(12, "Cannot allocate memory")
    real(arena, segment, *args)
Arena.create = create
"""
    daemon = launch(prelude=broken)
    daemon.wait_for("ready")
    daemon.wait_for("the arena is smaller than it should be: memory is short")
    assert health(daemon.grpc_target) == SERVING


def test_ctrl_c_before_anything_has_begun_is_no_traceback(launch, run_dir):
    gate = str(run_dir.parent / "gate")
    os.mkfifo(gate)
    waiting = f"""
from kvstore.server.daemon import Daemon
real = Daemon._build
def build(daemon):
    open({gate!r}).read()  # until nobody has it open for writing
    real(daemon)
Daemon._build = build
"""
    daemon = launch(prelude=waiting)
    with open(gate, "w"):  # it has come to that
        daemon.process.send_signal(signal.SIGINT)
        assert daemon.process.wait(20) == -signal.SIGINT
    daemon._reader.join(20)
    assert daemon.text == []


def test_a_second_daemon_is_refused(daemon, launch, run_dir):
    second = launch()
    assert second.exit_status() == 2
    assert second.text == []
    assert second.refusals == [
        f"run_dir={run_dir}: another daemon uses this directory (pid {daemon.pid})"
        " (stop it, or choose another directory)"
    ]
    assert health(daemon.grpc_target) == health_pb2.HealthCheckResponse.SERVING


def test_takes_over_after_kill(daemon, start_daemon, run_dir):
    daemon.kill()
    assert (run_dir / "kvstored.sock").exists(), "nothing is cleaned up by kill -9"
    second = start_daemon()
    assert health(second.grpc_target) == health_pb2.HealthCheckResponse.SERVING
    assert int((run_dir / "lock").read_text()) == second.pid


def test_two_directories_two_daemons(daemon, start_daemon, run_dir):
    other = start_daemon(run_dir=run_dir.parent / "other")
    assert health(daemon.grpc_target) == health(other.grpc_target) == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("setting", ["tcp_address", "metrics_port"])
def test_port_in_use(launch, setting, port):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        value = port if setting == "metrics_port" else f"127.0.0.1:{port}"
        refused(
            launch(**{setting: value, "tcp_unauthenticated": True}),
            f"{setting}=127.0.0.1:{port}: cannot be used: Address already in use",
        )


def test_tcp_port_of_another_daemon(start_daemon, launch, run_dir, port):
    start_daemon(tcp_address=f"127.0.0.1:{port}", tcp_unauthenticated=True)
    second = launch(
        run_dir=run_dir.parent / "other", tcp_address=f"127.0.0.1:{port}", tcp_unauthenticated=True
    )
    refused(second, f"tcp_address=127.0.0.1:{port}: cannot be used: Address already in use")
    assert not (run_dir.parent / "other").exists(), "something was started all the same"


def refused(daemon, start: str) -> None:
    """Exit status 2 and one clear line, no traceback, no log."""
    assert daemon.exit_status() == 2
    (line,) = daemon.refusals
    assert line.startswith(start), line
    assert daemon.text == []
    assert [entry["message"] for entry in daemon.lines] == [line, "<end of log>"]


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        ({"dram_bytes": 4096}, "dram_bytes=4096: is smaller than one segment"),
        ({"dram_bytes": 40 << 20}, "dram_bytes=41943040: must be a whole number of segments"),
        ({"segment_bytes": 1000}, "segment_bytes=1000: must be a multiple of the page size"),
        (
            {"dram_bytes": "many"},
            "dram_bytes=many: is not a size (bytes, or a whole number with K, M, G or T: 8G)",
        ),
        ({"protection": "none"}, 'protection=none: must be "sealed" or "group"'),
        ({"copy_threads": 0}, "copy_threads=0: must be above 0"),
        ({"pin_share_max": 1.5}, "pin_share_max=1.5: must be above 0 and at most 1"),
        ({"metrics_port": 70_000}, "metrics_port=70000: must be between"),
        ({"metrics_host": "localhost"}, "metrics_host=localhost: needs a numeric IP address"),
        ({"drain_ms": -1}, "drain_ms=-1: must not be negative"),
        ({"log_level": "loud"}, "log_level=loud: must be debug, info, warning or error"),
        ({"tenants": "alice=1000"}, "tenants=alice=1000: maps a numeric user id"),
        ({"tcp_address": "here"}, 'tcp_address=here: must be "host:port"'),
        ({"tcp_address": "127.0.0.1:0"}, 'tcp_address=127.0.0.1:0: must be "host:port"'),
        ({"tcp_address": "example.org:80"}, "tcp_address=example.org:80: needs a numeric IP address"),
        ({"tcp_address": "0.0.0.0:5000"}, "tcp_address=0.0.0.0:5000: is reachable from other machines"),
        ({"tcp_address": "[::]:5000"}, "tcp_address=[::]:5000: is reachable from other machines"),
        (
            {"tcp_address": "0.0.0.0:5000", "tcp_unauthenticated": True},
            "tcp_address=0.0.0.0:5000: is reachable from other machines",
        ),
        ({"tcp_address": "127.0.0.1:5000"}, "access_file=empty: nothing says who may come in over TCP"),
        (
            {"tcp_address": "127.0.0.1:5000", "access_file": "/nowhere"},
            "access_file=/nowhere: cannot be read",
        ),
        (
            {"tcp_address": "127.0.0.1:5000", "access_file": "/nowhere", "tcp_unauthenticated": True},
            "tcp_unauthenticated=True: contradicts access_file",
        ),
        ({"tcp_address": "127.0.0.1:5000", "tls_key": "/k"}, "tls_certificate=empty: TLS needs both"),
        (
            {"tcp_address": "127.0.0.1:5000", "tls_client_ca": "/k"},
            "tls_certificate=empty: client certificates",
        ),
        ({"run_dir": "/tmp/" + "d" * 100}, "run_dir=/tmp/" + "d" * 75),
        ({"run_dir": "/dev/null"}, "run_dir=/dev/null: is not a directory"),
        ({"run_dir": "/proc/nowhere"}, "run_dir=/proc/nowhere: cannot be used: No such file or directory"),
        ({"run_dir": "/tmp"}, "run_dir=/tmp (mode 1777): can be written to by other users"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_impossible_settings(launch, settings, start):
    refused(launch(**settings), start)


def test_too_long_a_socket_path_says_so(launch):
    daemon = launch(run_dir="/tmp/" + "d" * 100)
    refused(daemon, "run_dir=")
    assert (
        "makes the socket path 119 bytes long; a unix socket allows 107 (choose a shorter directory)"
        in daemon.refusals[0]
    )


def test_arena_above_the_memory_limit(launch):
    limit = memory_limit_bytes()
    above = (limit // (16 << 20) + 1) * (16 << 20)
    daemon = launch(dram_bytes=above)
    refused(
        daemon,
        f"dram_bytes={above}: {above} bytes of arena and {32 << 20} of staging memory are more than the {limit}",
    )


def test_an_unknown_flag(launch):
    refused(launch("--drams-bytes=1"), "unrecognized arguments: --drams-bytes=1 (did you mean --dram-bytes")


def test_an_unknown_variable(launch):
    refused(
        launch(environment={"KVSTORED_DRAMS": "1"}),
        "drams=1: no such setting (did you mean drain_ms or dram_bytes or dram_quotas? kvstored --help",
    )


def test_an_unknown_toml_key(launch, run_dir):
    (run_dir.parent / "kvstored.toml").write_text("dram_byte = 1\n")
    refused(
        launch(f"--config={run_dir.parent}/kvstored.toml"),
        "dram_byte=1: unknown key in the TOML file (did you mean dram_bytes",
    )


def test_broken_toml(launch, run_dir):
    (run_dir.parent / "kvstored.toml").write_text("dram_bytes = = 1\n")
    refused(
        launch(f"--config={run_dir.parent}/kvstored.toml"),
        f"config={run_dir.parent}/kvstored.toml: is not TOML",
    )


def test_missing_toml(launch):
    refused(
        launch("--config=/nowhere.toml"), "config=/nowhere.toml: cannot be read: No such file or directory"
    )


def test_flags_over_environment_over_toml(start_daemon, run_dir):
    toml = run_dir.parent / "kvstored.toml"
    toml.write_text(
        'lease_ttl_ms = 1001\nreservation_ttl_ms = 1001\nincomplete_ttl_ms = 1001\n[tenants]\n"77" = "t"\n'
    )
    daemon = start_daemon(
        environment={
            "KVSTORED_CONFIG": str(toml),
            "KVSTORED_LEASE_TTL_MS": "1002",
            "KVSTORED_RESERVATION_TTL_MS": "1002",
        },
        lease_ttl_ms=1003,
    )
    settings = daemon.wait_for("ready")["settings"]
    assert [settings[f"{name}_ttl_ms"] for name in ("lease", "reservation", "incomplete")] == [
        1003,
        1002,
        1001,
    ]
    assert settings["tenants"] == {"77": "t"}


# ----------------------------------------------------------------------------------------------------------- stopping


@pytest.mark.parametrize("number", DRAINING, ids=lambda number: number.name)
def test_a_signal_ends_it_cleanly(daemon, run_dir, number):
    daemon.process.send_signal(number)
    assert daemon.exit_status() == 0
    daemon.wait_for(f"{number.name}: draining")
    assert [path.name for path in run_dir.iterdir()] == ["lock"]
    assert daemon.text == []


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT], ids=lambda number: number.name)
def test_a_terminal_that_closes_loses_nothing(start_daemon, tmp_path, number):
    """Whatever was saved and is not on SSD yet is there after the next start."""
    slow = SMALL_SSD | {"durable_within_ms": 240_000, "drain_ms": 15_000}
    daemon = start_daemon(ssd_dir=tmp_path / "ssd", **slow)
    with client_of(daemon) as client:
        save(space := client.open(SPEC), keys := keys_of(space, 32))
    daemon.process.send_signal(number)
    assert daemon.exit_status() == 0
    daemon = start_daemon(ssd_dir=tmp_path / "ssd", **slow)
    with client_of(daemon) as client:
        assert client.open(SPEC).match(keys).usable == 32


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT], ids=lambda number: number.name)
def test_what_it_was_started_to_ignore_is_ignored(start_daemon, number):
    """nohup: it is to outlive its terminal."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        daemon = start_daemon()
    finally:
        signal.signal(number, before)
    daemon.process.send_signal(number)
    daemon.process.send_signal(signal.SIGUSR1)
    daemon.wait_for("SIGUSR1 means nothing here, and is ignored")  # it came later
    assert daemon.stop() == 0
    assert f"{number.name}: draining" not in [line["message"] for line in daemon.lines]


@pytest.mark.parametrize("number", [*MEANINGLESS, signal.SIGPIPE], ids=lambda number: number.name)
def test_a_signal_that_means_nothing_ends_nothing(daemon, number):
    daemon.process.send_signal(number)
    if number is not signal.SIGPIPE:
        said = daemon.wait_for(f"{number.name} means nothing here, and is ignored")
        assert "SIGTERM" in said["remedy"]
    assert health(daemon.grpc_target) == SERVING


def test_drain_waits_for_open_leases(start_daemon, connect, spec):
    """Health says no, the worker is told, nothing new begins, what is open may end; then the daemon goes."""
    daemon = start_daemon(drain_ms=15_000)
    worker = connect(daemon)
    stream = worker.attach()
    opened = stream.ask("open", store_pb2.OpenRequest(namespace=wire.spec_to_proto(spec)))
    reserved = stream.ask("reserve", store_pb2.ReserveRequest(namespace_id=opened.namespace_id, keys=[b"k"]))
    assert reserved.reservation_id
    daemon.process.send_signal(signal.SIGTERM)
    stream.wait_for(lambda: [push for push in stream.pushes if push.WhichOneof("body") == "draining"])
    for service in SERVICES:
        assert health(daemon.grpc_target, service) == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(Unavailable, match="stopping and starts nothing new"):
        stream.ask("reserve", store_pb2.ReserveRequest(namespace_id=opened.namespace_id, keys=[b"j"]))
    with pytest.raises(Unavailable, match="stopping and starts nothing new"):
        worker.call("Match", store_pb2.MatchRequest(namespace_id=opened.namespace_id, keys=[b"k"]))
    assert daemon.process.poll() is None
    assert stream.ask("abort", store_pb2.AbortRequest(reservation_ids=[reserved.reservation_id])).count == 1
    assert daemon.exit_status() == 0
    assert isinstance(stream.wait_for_end(), Unavailable)
    assert "draining took too long: open leases, commits and writes to SSD end now" not in [
        line["message"] for line in daemon.lines
    ]


def test_drain_writes_the_index_at_once(start_daemon, tmp_path):
    """Though it has a minute until records that wait for others are due."""
    slow = SMALL_SSD | {"durable_within_ms": 240_000, "drain_ms": 15_000}
    daemon = start_daemon(ssd_dir=tmp_path / "ssd", **slow)
    with client_of(daemon) as client:
        save(space := client.open(SPEC), keys_of(space, 1, 1))
        eventually(lambda: client.stats().ssd.oldest_not_durable_ms)
        assert daemon.stop() == 0
    assert "draining took too long: open leases, commits and writes to SSD end now" not in [
        line["message"] for line in daemon.lines
    ]


def test_drain_is_bounded(start_daemon, connect, spec):
    daemon = start_daemon(drain_ms=200)
    stream = connect(daemon).attach()
    opened = stream.ask("open", store_pb2.OpenRequest(namespace=wire.spec_to_proto(spec)))
    reserve = store_pb2.ReserveRequest(namespace_id=opened.namespace_id, keys=[b"k"])
    assert stream.ask("reserve", reserve).reservation_id
    assert daemon.stop() == 0
    daemon.wait_for("draining took too long: open leases, commits and writes to SSD end now")


def test_a_second_signal_ends_it_at_once(start_daemon, connect, spec):
    daemon = start_daemon(drain_ms=600_000)
    stream = connect(daemon).attach()
    opened = stream.ask("open", store_pb2.OpenRequest(namespace=wire.spec_to_proto(spec)))
    reserve = store_pb2.ReserveRequest(namespace_id=opened.namespace_id, keys=[b"k"])
    assert stream.ask("reserve", reserve).reservation_id
    daemon.process.send_signal(signal.SIGTERM)
    daemon.wait_for("SIGTERM: draining")
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.exit_status() == 128 + signal.SIGTERM


def test_nothing_is_left_in_shared_memory(start_daemon, connect):
    before = set(os.listdir("/dev/shm"))  # others use it, too
    daemon = start_daemon()
    worker = connect(daemon)
    worker.attach()
    worker.staging(1 << 20).close()
    daemon.kill()
    assert set(os.listdir("/dev/shm")) <= before


# ------------------------------------------------------------------------------------------------------------- health


def test_health_of_each_service(daemon):
    for service in SERVICES:
        assert health(daemon.grpc_target, service) == health_pb2.HealthCheckResponse.SERVING


def test_reflection_names_the_services(daemon):
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    with grpc.insecure_channel(daemon.grpc_target) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert set(SERVICES[1:]) | {"grpc.health.v1.Health"} <= set(database.get_services())
        file = database.FindFileContainingSymbol("kvstore.v1.Store")
        assert "Attach" in [method.name for method in file.service[0].method]


# ------------------------------------------------------------------------------------------------------------ metrics


def scrape(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
        return answer.read().decode()


def test_metrics(start_daemon, connect, spec, port):
    daemon = start_daemon(metrics_port=port)
    worker = connect(daemon)
    opened = worker.call("Open", store_pb2.OpenRequest(namespace=wire.spec_to_proto(spec)))
    worker.call("Reserve", store_pb2.ReserveRequest(namespace_id=opened.namespace_id, keys=[b"k"]))
    worker.call("Acquire", store_pb2.AcquireRequest(namespace_id=opened.namespace_id, keys=[b"other"]))
    lines = scrape(port).splitlines()
    assert "kvstored_arena_bytes 6.7108864e+07" in lines
    assert 'kvstored_slots{namespace="1",state="reserved"} 1.0' in lines
    assert 'kvstored_slots{namespace="1",state="free"} 63.0' in lines
    assert 'kvstored_lookups_total{outcome="miss",reason="never_seen",tenant="default"} 1.0' in lines
    assert 'kvstored_namespace_info{model="tiny",namespace="1",tenant="default"} 1.0' in lines
    assert "kvstored_grants_granted_total 1.0" in lines
    (touched,) = [float(line.split()[1]) for line in lines if line.startswith("kvstored_directory_bytes ")]
    assert 4096 <= touched < 1 << 20, "its head, and no more: it is sparse"


def test_metrics_at_an_address_that_is_not_loopbacks_default(start_daemon, port):
    start_daemon(metrics_port=port, metrics_host="127.0.0.2")
    with pytest.raises(urllib.error.URLError, match="refused"):
        scrape(port)
    with urllib.request.urlopen(f"http://127.0.0.2:{port}/metrics", timeout=20) as answer:
        assert b"kvstored_arena_bytes" in answer.read()


def test_metrics_answers_nothing_else(start_daemon, port):
    start_daemon(metrics_port=port)
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:
        scrape(port, "/")
    caught.value.close()
    with socket.create_connection(("127.0.0.1", port), timeout=20) as peer:
        peer.sendall(b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n")
        assert peer.recv(100).startswith(b"HTTP/1.1 400 ")
    assert "kvstored_arena_bytes" in scrape(port)


def test_every_log_line_is_json(daemon):
    daemon.stop()
    assert daemon.text == []
    for line in daemon.lines[:-1]:
        assert {"time", "level", "logger", "message"} <= line.keys(), json.dumps(line)
        assert Path(line["logger"]).suffix != ".py"


@pytest.mark.parametrize("verbosity", ["NONE", "debug"])
def test_every_line_of_both_outputs_is_json(run_dir, port, verbosity):
    """Into one file, as a supervisor has it; what gRPC itself says included."""
    run_dir.parent.mkdir(exist_ok=True)
    path = run_dir.parent / "log"
    command = [sys.executable, "-P", "-m", "kvstore", f"--run-dir={run_dir}", "--dram-bytes=16M"]
    command += ["--segment-bytes=16M", "--staging-bytes=8M", "--staging-bytes-max=16M"]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "GRPC_VERBOSITY": verbosity, "GRPC_TRACE": ""}

    def run(*arguments):
        with path.open("ab") as log:
            return subprocess.Popen(
                [*command, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def said():
        return [json.loads(line) for line in path.read_text().splitlines()]

    with run(f"--metrics-port={port}") as daemon:
        deadline = time.monotonic() + 60
        while not path.exists() or "kvstored 0.1.0 serves" not in path.read_text():
            assert time.monotonic() < deadline and daemon.poll() is None, path.read_text()
            time.sleep(0.01)
        assert run().wait(60) == 2, "a second one"
        assert run("--dram-bytes=none").wait(60) == 2
        assert run("--nonsense").wait(60) == 2
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(60) == 0
    lines = said()
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    (words,) = [line for line in lines if line["message"].endswith("serves")]
    assert words["ssd"] == "SSD off" and words["remote"] == "REMOTE off"
    assert words["arena"].startswith("arena 16 MiB in 1 segments")
    refused = [line for line in lines if line["level"] == "critical"]
    assert [line["field"] for line in refused] == ["run_dir", "dram_bytes", ""]
    assert all(line["remedy"] in line["message"] for line in refused)
    assert any(line["logger"] == "stderr" for line in lines) == (verbosity == "debug")
