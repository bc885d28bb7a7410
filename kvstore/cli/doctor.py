"""`kvctl doctor`: one round trip through everything, with findings that say what to do.

Silent trouble (writes that are never read, a client and a daemon that do not fit) is what users of such stores lose
most time with; this looks for it in two seconds, and leaves nothing behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from kvstore import __version__
from kvstore.cli.command import Command
from kvstore.cli.objects import NO_ROOM, granted, settled_read
from kvstore.cli.output import say, say_json
from kvstore.cli.tables import peer_text
from kvstore.client import Client, Namespace, ReadLease, SessionEntry, connect
from kvstore.config import DESCRIPTOR_SOCKET, LOCK_FILE, MORE_SEGMENTS, ONE_SEGMENT
from kvstore.core.events import IndexUsage
from kvstore.core.ssd.index_room import NEARLY_FULL, REMEDY, describe
from kvstore.errors import StoreError
from kvstore.layout import DOCTORS_LAYOUT, GroupSpec, NamespaceSpec
from kvstore.types import ChunkKey, GrantResult, Outcome

CHUNKS = 3
SHARD_BYTES = 256 << 10
CHUNK_TOKENS = 16
ROUND_TRIPS = 50
DOCTORS = {"vllm": "kvstore.gpu_worker.connectors.vllm.doctor", "gpu": "kvstore.gpu_worker.self_check"}
"""Programs that ask what only their own libraries know."""
FREED_S = 5.0
"""What was forgotten keeps its slot while the daemon writes it to a disk or to the REMOTE store."""
FORGETTING_LATE_MS = 60_000
"""What was dropped leaves the index within seconds."""
FORGETS_READ_MS_MAX = 30_000
"""They are read once a second, from an object store each five."""
ENGINE_S = 300.0
"""An engine's libraries take long to load on a busy machine."""

SPEC = NamespaceSpec(
    model="kvctl-doctor",
    weights_digest=b"kvctl.doctor.v1",
    layout_fingerprint=DOCTORS_LAYOUT,
    chunk_tokens=CHUNK_TOKENS,
    groups=(GroupSpec("bytes", shard_bytes=SHARD_BYTES, position_rule="none"),),
)


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    ok: bool
    detail: str
    remedy: str = ""


class Failed(Exception):
    """A check that found something."""

    def __init__(self, detail: str, remedy: str) -> None:
        super().__init__(detail)
        self.remedy = remedy


def run(run_dir: str, options: argparse.Namespace) -> int:
    """Findings as they come; the exit status is 1 if one of them is not ok."""
    status = 0
    with contextlib.closing(_findings(run_dir, options)) as findings:  # whatever happens, it cleans up
        for finding in findings:
            if options.json:
                say_json(asdict(finding))
            else:
                say(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.check:16} {finding.detail}")
                if finding.remedy:
                    say(f"      {'':16} -> {finding.remedy}")
            if not finding.ok:
                status = 1
    return status


def _findings(run_dir: str, options: argparse.Namespace) -> Generator[Finding, None, None]:
    serves = yield from examine(run_dir, options.timeout)
    if options.engine and serves:
        yield from ask_engine(options.engine, run_dir, options.timeout, options.arguments)


def examine(run_dir: str, timeout_s: float) -> Generator[Finding, None, bool]:
    """Findings in order, as they come; returns whether the daemon serves. Never raises for what the daemon does."""
    try:
        yield Finding("directory", True, _look_at(run_dir))
        client = connect(run_dir, timeout_s=timeout_s)
    except Failed as failed:
        yield Finding("directory", False, str(failed), failed.remedy)
        return False
    except StoreError as error:
        yield Finding("connect", False, error.message, error.remedy or "see the daemon's log")
        return False
    with client:
        patient = Patient(client)
        try:
            for check in patient.round_trip():
                finding = _found(check)
                yield finding
                if not finding.ok:
                    return False  # no later check makes sense
            for check in patient.surroundings():
                yield _found(check)
            return True
        finally:
            patient.clean_up()


def _found(check: Check) -> Finding:
    name = check.__name__.removeprefix("check_").replace("_", " ")
    try:
        found = check()
    except Failed as failed:
        return Finding(name, False, str(failed), failed.remedy)
    except StoreError as error:
        return Finding(name, False, error.message, error.remedy or "see the daemon's log")
    return Finding(name, True, *((found,) if isinstance(found, str) else found))


def ask_engine(engine: str, run_dir: str, timeout_s: float, arguments: Sequence[str]) -> Iterator[Finding]:
    """Findings about vLLM with these arguments, or about the devices that there are, from a process of its own: only
    that one loads vLLM, or torch."""
    command = [sys.executable, "-P", "-m", DOCTORS[engine], f"--run-dir={run_dir}", f"--timeout={timeout_s}"]
    process = subprocess.Popen(
        [*command, "--", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    late = False
    try:
        output, errors = process.communicate(timeout=ENGINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        late = True
    for line in output.splitlines(keepends=True):
        if line.endswith("\n"):  # else it was cut short
            yield Finding(**json.loads(line))
    if late:
        yield Finding(
            engine, False, f"its doctor did not end within {ENGINE_S:.0f} s", "is the machine overloaded?"
        )
    elif not output:
        why = errors.strip().splitlines()[-1:] or [f"its doctor ended with {process.returncode}"]
        needed = {"vllm": "vLLM", "gpu": "the worker"}[engine]
        yield Finding(
            engine, False, why[0], f"run kvctl where {needed} is installed; this is {sys.executable}"
        )


def _look_at(run_dir: str) -> str:
    path = os.path.join(run_dir, DESCRIPTOR_SOCKET)
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise Failed(f"{path} is not there", "start kvstored, or name its directory with --run-dir") from None
    except PermissionError:
        raise Failed(
            f"{path} is not for you", "name your user under `tenants` in the daemon's settings"
        ) from None
    if not stat.S_ISSOCK(mode):
        raise Failed(f"{path} is no socket", "name the daemon's directory with --run-dir")
    try:
        with open(os.path.join(run_dir, LOCK_FILE), encoding="ascii", errors="replace") as lock:
            return f"{path}, daemon's pid {lock.read(32).strip() or 'unknown'}"
    except OSError:
        return path  # the lock is for the daemon's user alone


Check = Callable[[], str | tuple[str, str]]
"""Tells what it found, or that and a remedy for what is no failure."""


class Patient:
    """The checks."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.session = f"kvctl-doctor-{secrets.token_hex(8)}"
        self.rng = np.random.default_rng()
        self.data = self.rng.integers(0, 256, size=(CHUNKS, SHARD_BYTES), dtype=np.uint8)
        self.namespace: Namespace | None = None
        self.keys: list[ChunkKey] = []

    def round_trip(self) -> list[Check]:
        """In the order in which they build on each other."""
        return [
            self.check_connect,
            self.check_arena,
            self.check_open,
            self.check_round_trip_time,
            self.check_write,
            self.check_read_back,
            self.check_session,
            self.check_generations,
            self.check_slots,
        ]

    def surroundings(self) -> list[Check]:
        """What the daemon serves without: a finding of one says nothing of the others."""
        return [self.check_ssd, self.check_beyond]

    @property
    def open_namespace(self) -> Namespace:
        assert self.namespace is not None, "check_open comes first"
        return self.namespace

    def check_connect(self) -> str:
        version = self.client.stats().version
        if version != __version__:
            raise Failed(
                f"the daemon is version {version}, this client {__version__}",
                "install the same version on both sides",
            )
        return f"version {version}, tenant {self.client.tenant}, protection {self.client.protection.value}"

    def check_arena(self) -> str | tuple[str, str]:
        arena = self.client.stats().arena
        if not arena.ready_bytes:
            raise Failed("no segment of the arena is ready", "wait for the prefault, or see the daemon's log")
        ready = f"{arena.ready_bytes >> 20} of {arena.bytes >> 20} MiB are ready"
        if arena.bytes < 2 * arena.segment_bytes:
            return f"{ready}, {ONE_SEGMENT}", MORE_SEGMENTS
        return ready

    def check_open(self) -> str:
        self.namespace = self.client.open(SPEC)
        tokens = self.rng.integers(0, 1 << 31, size=CHUNKS * CHUNK_TOKENS)
        self.keys = self.namespace.keys(tokens)
        return f"namespace with {SPEC.chunk_bytes >> 10} KiB a chunk"

    def check_round_trip_time(self) -> str:
        times = []
        for _ in range(ROUND_TRIPS):
            began = time.perf_counter()
            matched = self.open_namespace.match(self.keys)
            times.append(time.perf_counter() - began)
            if matched.usable or Outcome.HIT in matched.outcomes:
                raise Failed("a hit for keys that nobody saved", "stop the daemon and report this")
        return f"median of {ROUND_TRIPS} lookups {1e6 * sorted(times)[ROUND_TRIPS // 2]:.0f} us"

    def check_write(self) -> str:
        with granted(self.open_namespace, self.keys) as batch:
            refused = [result.name for result in batch.results if result is not GrantResult.GRANTED]
            if refused:
                raise Failed(
                    f"the daemon granted no room: {', '.join(refused)}",
                    NO_ROOM,
                )
            for index in range(CHUNKS):
                batch.buffer(index)[:] = self.data[index]
            began = time.perf_counter()
            outcome = batch.commit()
            took = time.perf_counter() - began
        if not outcome.ok:
            raise Failed(f"the commit failed: {outcome.error}", "see the daemon's log")
        return f"{CHUNKS} chunks committed in {1e3 * took:.1f} ms"

    def check_read_back(self) -> str:
        with settled_read(self.open_namespace, self.keys) as lease:
            if lease.hits != CHUNKS:
                reasons = ", ".join(reason.name for reason in lease.reasons)
                raise Failed(f"{lease.hits} of {CHUNKS} chunks are hits ({reasons})", "see the daemon's log")
            self._compare(lease)
        return f"{CHUNKS} chunks, every byte as it was written"

    def _compare(self, lease: ReadLease) -> None:
        for index in range(CHUNKS):
            copy = np.empty(SHARD_BYTES, dtype=np.uint8)
            if not lease.copy_to(index, copy):
                raise Failed(
                    f"the load of chunk {index} was void",
                    "is the arena under heavy pressure? See kvctl stats",
                )
            if not np.array_equal(copy, self.data[index]):
                raise Failed(f"chunk {index} came back with other bytes", "stop the daemon and report this")

    def check_session(self) -> str:
        entries = [
            SessionEntry(key, index * CHUNK_TOKENS, CHUNK_TOKENS) for index, key in enumerate(self.keys)
        ]
        made = self.open_namespace.update_session(self.session, expected_version=0, keep=0, append=entries)
        found = self.open_namespace.get_session(self.session)
        if found is None or found.entries != made.entries or found.usable != CHUNKS:
            raise Failed(f"the session came back as {found}", "report this")
        return f"version {found.version} with {len(found.entries)} entries"

    def check_generations(self) -> str | tuple[str, str]:
        """A reader that comes too late must see that its slot was given away."""
        namespace = self.open_namespace
        lease = settled_read(namespace, self.keys)
        grant, (row, _) = lease._grant, lease._row(0, None)
        if grant is None or row is None or not grant.mapped.intact((row,)):
            raise Failed("the generation of a leased slot does not match", "stop the daemon and report this")
        namespace.forget(self.session)
        namespace.forget(keys=self.keys)
        if not grant.mapped.intact((row,)):
            raise Failed("a slot was given away under an open lease", "stop the daemon and report this")
        lease.release()
        namespace.get_session(self.session)  # on the same stream, hence after the release
        deadline = time.monotonic() + FREED_S
        while grant.mapped.intact((row,)):
            # The daemon may be writing the chunk: then its slot is still in use. Another doctor's slots count too.
            in_use = self._slots_in_use()
            if not in_use and grant.mapped.intact((row,)):
                raise Failed("a slot was freed without a new generation", "stop the daemon and report this")
            if in_use and time.monotonic() >= deadline:
                return (
                    f"{in_use} slots of what was forgotten are still in use after {FREED_S:.0f} s: not judged",
                    "is the disk of ssd_dir slow, or hung? See kvctl stats; then ask again",
                )
            time.sleep(0.01)
        return "a slot that was given away is noticed by its old reader"

    def _slots_in_use(self) -> int:
        """Of the doctors' namespaces, in DRAM."""
        stats = self.client.stats()
        doctors = {row.namespace_id for row in stats.namespaces if row.model == SPEC.model}
        return sum(pool.reserved + pool.ready for pool in stats.pools if pool.namespace_id in doctors)

    def check_slots(self) -> str:
        pools = self.client.stats().pools
        for pool in pools:
            total = pool.free + pool.reserved + pool.ready + pool.quarantined
            if total != pool.capacity:
                raise Failed(
                    f"namespace {pool.namespace_id}: {total} slots of {pool.capacity} are accounted for",
                    "stop the daemon and report this",
                )
        return f"free + reserved + ready + quarantined = capacity in {len(pools)} pools"

    def check_ssd(self) -> str | tuple[str, str]:
        """What is in DRAM serves without it."""
        ssd = self.client.stats().ssd
        if ssd.state == "absent":
            return "off"
        remedies = [peer_text(problem.remedy) for problem in ssd.problems]
        if ssd.state != "ok":
            raise Failed(
                f"{ssd.state.replace('_', ' ')}: {peer_text(ssd.why)}; what is saved is in DRAM alone",
                remedies[0]
                if remedies
                else "see to the disk of ssd_dir (room, health); the daemon tries again by itself",
            )
        if ssd.problems:
            raise Failed(
                "; ".join(peer_text(problem.what) for problem in ssd.problems),
                "; ".join(dict.fromkeys(remedies)),
            )
        found = f"ok, {ssd.slab_bytes >> 20} of {ssd.bytes >> 20} MiB are in slab files"
        usage = IndexUsage(ssd.index_max_bytes, ssd.index_chunks_bytes, ssd.index_sessions_bytes)
        usage = replace(usage, other=max(0, ssd.index_used_bytes - usage.used))
        if ssd.to_forget and ssd.oldest_not_durable_ms > FORGETTING_LATE_MS:
            raise Failed(
                f"{found}, but {ssd.to_forget:,} records are still to go from the index: a restart now could bring back"
                " what was forgotten",
                "wait before a restart; see the daemon's log, and the disk of ssd_dir",
            )
        if usage.bytes_max and usage.used > NEARLY_FULL * usage.bytes_max:
            return f"{found}; the index is nearly full, {describe(usage)}: the oldest give way", REMEDY
        return found

    def check_beyond(self) -> str | tuple[str, str]:
        """The REMOTE store and the peers: this node serves without them."""
        gauges = self.client.stats().gauges
        names = {
            peer_text(name.removeprefix("source_").removesuffix("_well")): bool(value)
            for name, value in sorted(gauges.items())
            if name.startswith("source_") and name.endswith("_well")
        }
        if not names:
            return "no REMOTE store, no peers (or not told: ask as the daemon's user)"
        waiting = int(gauges.get("remote_forgets_waiting", 0))
        problems = [*self._left_alone(names), *self._forgets_unread(gauges)]
        if problems and waiting:
            problems.append(
                (
                    f"{waiting} forgets have not been told to the other nodes",
                    "keep ssd_dir (without one, run_dir): they stand there until they are told",
                )
            )
        if problems:
            raise Failed("; ".join(what for what, _ in problems), "; ".join(remedy for _, remedy in problems))
        found = f"{', '.join(names)}: well"
        if waiting:
            return (
                f"{found}; {waiting} forgets are on their way",
                "wait; they are told again until they are taken",
            )
        return found

    def _left_alone(self, names: dict[str, bool]) -> Iterator[tuple[str, str]]:
        away = [name for name, well in names.items() if not well]
        if away:
            yield (
                f"{', '.join(away)}: failing or late, and left alone for a while; this node serves from its own tiers",
                "see the daemon's log for why; it tries again by itself",
            )

    def _forgets_unread(self, gauges: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        for name in ("remote", "peers"):
            read_ms_ago = gauges.get(f"{name}_forgets_read_ms_ago", 0.0)
            if read_ms_ago > FORGETS_READ_MS_MAX:
                yield (
                    f"{peer_text(name)}: what others have forgotten was not read for {read_ms_ago / 1_000:,.0f} s",
                    "see the daemon's log for why; of an object store there must be the bucket, and the rights to list,"
                    " read, write and delete in it",
                )

    def clean_up(self) -> None:
        """Whatever a check left behind; what cannot be dropped now is evicted like anything else."""
        if self.namespace is None or not self.keys or not self.client.connected:
            return
        with contextlib.suppress(StoreError):  # a finding has told it, or the daemon has just gone
            self.namespace.forget(self.session)
            self.namespace.forget(keys=self.keys)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "engine",
        nargs="?",
        choices=[*DOCTORS],
        help="vllm: look at an engine's arguments too, in the engine's environment; gpu: random bits from each device "
        "through the store and back, compared byte by byte",
    )
    parser.add_argument(
        "arguments", nargs="*", metavar="-- ARGUMENTS", help="what `vllm serve` is given, behind --"
    )


COMMANDS = (
    Command("doctor", "a round trip through everything, with findings", run_alone=run, arguments=_arguments),
)
