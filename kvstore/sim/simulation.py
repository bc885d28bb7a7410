"""One run: the production core, a cluster around it, processes, a schedule of faults, and virtual time.

Everything that will happen stands in one agenda. Time moves to the next entry; each event that reaches the core is one
step, after which the whole state is checked (`World`, `DiskWorld`, `Cluster` and the core's own `Watch`). After so many
steps the faults are healed and the run comes to rest: every request is answered, nothing is pinned or under way, and
after one more power cut everything that was stored is there.
"""

from __future__ import annotations

import heapq
import random
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvstore.core import events as ev
from kvstore.core.policies import POLICIES
from kvstore.core.pool import Phase
from kvstore.layout import NamespaceSpec
from kvstore.types import DiskResult, DiskState, NamespaceId, Protection, SlotState, WorkerId

from .cluster import COPIES, Cluster
from .disk import DISK_OPS
from .faults import Fault, draw, show
from .fleet_cluster import FleetCluster
from .memory_world import MemoryCluster
from .processes import Answer, Conversation, Process, Settled
from .remote_cluster import REMOTE_OPS, RemoteCluster
from .world import PAGE, epoch_of, spec

TENANTS = ("alice", "bob", "carol")
CONVERSATIONS = 14
"""Of each tenant in each of its namespaces."""
TICK_MS = 50
IDLE_SHARE = 0.5
"""Of the requests after which the daemon finds time for what will be wanted next."""
REST_SHARE = 0.1
"""Of these, those after which it has time for all of that: in so many steps at most."""
KILLED_WHEN_HEARD_SHARE = 0.25
"""Of the forgets that a node of a fleet hears of."""
IDLE_STEPS_MAX = 500
REST_STEPS_MAX = 200_000
"""A run that does not come to rest within so many steps hangs,"""
REST_MS_MAX = 60_000
"""or within such a time after everybody has left."""
REST_LOOK_MS = 1_000
FULL_EVERY = 1_000

CLUSTERS: dict[str, type[Cluster]] = {
    "ssd": Cluster,
    "memory": MemoryCluster,
    "remote": RemoteCluster,
    "fleet": FleetCluster,
}
"""By what is below DRAM; "remote": an SSD, and a store beyond the node; "fleet": and another node."""

Action = Callable[[], None]


def _quotas(chance: random.Random) -> dict[str, dict[str, int]]:
    """Of one run in four: for one tenant, or for each, in some of the tiers."""
    if chance.randrange(4):
        return {}
    return {
        name: {tenant: PAGE * chance.choice(pages) for tenant in chance.choice((("alice",), ("alice", "*")))}
        for name, pages in (
            ("dram_quotas", (8, 24, 80)),
            ("ssd_quotas", (24, 80, 240)),
            ("remote_quotas", (8, 40)),
        )
        if chance.random() < 0.7
    }


class SimulationFailed(Exception):
    """What failed, in which run, and how to see it again."""


class Simulation:
    def __init__(
        self,
        seed: int,
        steps: int,
        *,
        protection: Protection | None = None,
        tier: str | None = None,
        only: Sequence[int] | None = None,
    ) -> None:
        """`only` these faults (their numbers) of the schedule happen. `tier`, a key of `CLUSTERS`, is below DRAM."""
        self.seed = seed
        self.steps = steps
        self.only = only
        self.random = random.Random(f"simulation {seed}")
        self._idle = random.Random(f"idle {seed}")
        self._heard = random.Random(f"heard {seed}")
        drawn = self.random.choice(list(Protection))  # also if it is given: a run is the same if it is named
        self.protection = protection or drawn
        self.tier = tier or random.Random(f"tier {seed}").choice(("ssd", "ssd", "memory"))
        self.faults = [
            fault for fault in draw(seed, steps, self.protection) if only is None or fault.number in only
        ]
        self.struck = 0
        self.failure: Exception | None = None
        self.clock = 0
        self._boot = 0
        """The clock at the last start of the daemon, whose own clock begins at 0."""
        self._jumped = 0
        self._agenda: list[tuple[int, int, Action]] = []
        self._sequence = 0
        self._channel = 0
        self._boots = 0
        self.variant = 0
        self.healed = False
        self.totals: Counter[str] = Counter()
        self.epochs = dict.fromkeys(TENANTS, 0)
        self._until: Counter[str] = Counter()
        """Until when a condition (disk_hangs, ...) lasts."""
        self._error_in = 0
        self._read_late_ms = 0
        """By how much the next read of chunks is."""
        self._calls = 0
        self.specs = (
            spec("llama", shard_bytes=PAGE),
            spec("llama", weights=b"others", shards=2, shard_bytes=2 * PAGE - 96),
        )
        self.processes: dict[WorkerId, Process] = {}
        """The connected ones."""
        self.lingering: list[WorkerId] = []
        """Processes whose connection is closed: they live on with their mappings."""
        chance = self.random
        index = random.Random(f"index {seed}")
        most = 4 if self.tier == "fleet" else 32  # slab files: what is here still is not asked of others
        widest = 16 if self.tier == "fleet" else 32
        self.cluster = CLUSTERS[self.tier](
            self,
            random.Random(f"disk {seed}"),
            segments=min(widest, chance.choice((8, 16, 24, 32))),
            segment_bytes=16 * PAGE,
            slabs=min(most, chance.choice((6, 18, 24, 32))),
            slab_slots=24,
            protection=self.protection,
            lease_ttl_ms=800,
            revoke_grace_ms=100,
            reservation_ttl_ms=600,
            incomplete_ttl_ms=1_500,
            ghosts_max=60,
            remembered_answers_max=64,
            remembered_rows_max=0 if self.seed // 4 % 2 else 16_384,
            sessions_max=70,
            manifest_entries_max=1_000,
            waits_per_worker_max=16,
            namespaces_max=20,
            hints_per_worker_max=12,
            hint_ttl_ms=3_000,
            session_ttl_ms=chance.choice((0, 30_000)),
            disk_deadline_ms=400,
            durable_within_ms=chance.choice((200, 2_000)),
            probe_interval_ms=100,
            scrub_bytes_per_s=chance.choice((0, 4 * PAGE, 100 * PAGE)),
            scrub_pause_ms=500,
            batch_min=2 if self.seed % 2 else 24,
            evict_min=2 if self.seed // 2 % 2 else 12,
            ahead_share_max=0.25,
            index_bytes=index.choice((1 << 40, 12_000, 20_000, 40_000)),
            index_sessions_share=index.choice((0.25, 0.5, 0.75)),
            eviction=chance.choice(("hints", *POLICIES)),
            lives_min=30,
            **_quotas(random.Random(f"quotas {seed}")),
        )
        self.cluster.watch._full_every = FULL_EVERY
        self.members = self._people()
        for process in self.members:
            self.after(self.random.randrange(20), partial(self.connect, process))
        self.after(TICK_MS, self._tick)

    def _people(self) -> list[Process]:
        """Eight workers in three engine groups, a scheduler for each tenant, and an operator."""
        members: list[Process] = []
        for tenant in TENANTS:
            conversations = {
                number: [
                    Conversation(b"%s %d %d" % (tenant.encode(), number, i), []) for i in range(CONVERSATIONS)
                ]
                for number in range(len(self.specs))
            }

            def join(
                name: str, kind: str, rank: int = 0, tenant: str = tenant, d: Any = conversations
            ) -> Process:
                group = f"{tenant}'s engine" if kind in ("engine", "rank") else ""
                chance = random.Random(f"{name} {self.seed}")
                members.append(Process(self, f"{tenant} {name}", tenant, group, rank, kind, chance, d))
                members[-1].hints = random.Random(f"hints {tenant} {name} {self.seed}")
                members[-1].greed = random.Random(f"greed {tenant} {name} {self.seed}")
                return members[-1]

            if tenant == "carol":  # two engines that write all shards themselves
                join("engine 1", "engine")
                join("engine 2", "engine")
            else:
                first, second = join("rank 0", "engine"), join("rank 1", "rank", 1)
                first.peers.append(second)
                join("prefill", "engine")
            join("scheduler", "scheduler")
        join("operator", "operator")
        return members

    # ---------------------------------------------------------------------------------------------------------- run

    def run(self) -> Counter[str]:
        """Raises SimulationFailed, which tells all that is needed to see it again."""
        try:
            while self.cluster.events < self.steps:
                self._next()
            self.rest()
        except Exception as error:
            self.failure = error
            raise SimulationFailed(self.report(error)) from error
        self._note()
        return self.totals

    def report(self, error: Exception) -> str:
        step = self.cluster.events
        (*_, last) = traceback.extract_tb(error.__traceback__)
        only = "" if self.only is None else f" --only {','.join(map(str, self.only)) or 'none'}"
        events = "\n".join(
            f"  {number} at {now} ms: {event}"[:300] for number, now, event in self.cluster.history
        )
        return (
            f"seed {self.seed}, protection {self.protection.value}, tier {self.tier}: step {step} fails\n"
            f"{type(error).__name__} at {last.filename}:{last.lineno} in {last.name}: {str(error)[:2000]}\n"
            f"last events:\n{events}\nfaults until then:\n{show(self.faults, step)}\n"
            f"again: python -m kvstore.sim --seed {self.seed} --steps {self.steps} "
            f"--protection {self.protection.value} --tier {self.tier}{only}"
        )

    def _next(self) -> None:
        at, _, action = heapq.heappop(self._agenda)
        self.clock = at
        self.cluster.now = self.clock + self._jumped - self._boot
        while self.struck < len(self.faults) and self.faults[self.struck].step <= self.cluster.events:
            fault = self.faults[self.struck]
            self.struck += 1
            if not self.healed:
                self.totals[f"fault {fault.kind}"] += 1
                getattr(self, f"_{fault.kind}")(fault)
        action()

    def after(self, ms: int, action: Action) -> None:
        self._sequence += 1
        heapq.heappush(self._agenda, (self.clock + ms, self._sequence, action))

    def _tick(self) -> None:
        self.after(TICK_MS, self._tick)
        self.cluster.step(ev.Tick())

    def lasts(self, kind: str) -> bool:
        """Whether a condition still lasts."""
        return self._until[kind] > self.clock

    # ----------------------------------------------------------------------------------------------------- processes

    def connect(self, process: Process) -> None:
        if self.healed and process.leaving:
            return
        admin = process.kind == "operator"
        process.worker = self.cluster.join(process.tenant, process.group, process.rank, admin=admin)
        process.requests = 0
        self.processes[process.worker] = process
        process.program = process.run()
        self.resume(process, None)

    def spec(self, process: Process, number: int) -> NamespaceSpec:
        return epoch_of(self.specs[number], self.epochs[process.tenant])

    def send(self, process: Process, event: ev.Event) -> None:
        """A request is on its way; it may be lost, late or doubled there. Each arrival is a delivery of its own."""
        self._calls += 1
        if self.lasts("requests_lost") and self._calls % 3 == 0:
            return
        for _ in range(2 if self.lasts("requests_twice") and self._calls % 3 == 0 else 1):
            late = self.random.randrange(300) if self.lasts("requests_late") else self.random.randrange(2)
            self.after(late, lambda: self._arrive(process, event))

    def _arrive(self, process: Process, event: Any) -> None:
        if self.processes.get(event.ticket.worker) is not process:
            return  # the connection is closed, or the daemon another
        self._channel += 1
        ticket = ev.Ticket(event.ticket.worker, event.ticket.request_id, self._channel)
        self.cluster.step(replace(event, ticket=ticket))
        if self.cluster.store.has_ahead() and self._idle.random() < IDLE_SHARE:
            self.cluster.step(ev.Idle())
            if self._idle.random() < REST_SHARE:
                self._take_rest()

    def _take_rest(self) -> None:
        """The daemon finds time for all of it: steps for their own sake come to an end."""
        last = self.cluster.events + IDLE_STEPS_MAX
        while self.cluster.store.has_ahead():
            assert self.cluster.events < last, f"no end of what is to be done ahead: {self.cluster.store}"
            self.cluster.step(ev.Idle())

    def replied(self, ticket: ev.Ticket, answer: ev.Answer) -> None:
        process = self.processes.get(ticket.worker)
        if process is None:
            return
        if isinstance(answer, ev.SegmentsAllowed):
            self.cluster.mapped[ticket.worker] |= set(answer.segments)
        if self.lasts("requests_lost") and ticket.channel % 3 == 0:
            return
        waiting = process.waiting
        if isinstance(waiting, Answer) and waiting.request == ticket.request_id:
            self.after(0, lambda: self._wake(process, waiting, answer))

    def pushed(self, worker: WorkerId, push: Any) -> None:
        process = self.processes.get(worker)
        if process is None:
            return
        if isinstance(push, ev.SegmentsRetired):
            self.after(self.random.randrange(10), lambda: self._unmap(process, push))
        elif isinstance(push, ev.ChunksSettled) and isinstance(process.waiting, Settled):
            waiting = process.waiting
            self.after(0, lambda: self._wake(process, waiting, push))

    def _unmap(self, process: Process, push: ev.SegmentsRetired) -> None:
        if self.processes.get(push.worker) is not process:
            return
        busy_until = max(process.stubborn_until, process.stopped_until)
        if busy_until > self.clock:
            self.after(busy_until - self.clock, lambda: self._unmap(process, push))
            return
        self.cluster.mapped[push.worker] -= set(push.segments)
        self._insist(process, push, 0)

    def _insist(self, process: Process, push: ev.SegmentsRetired, request: int) -> None:
        """Say that it is unmapped until that is answered."""
        if self.processes.get(push.worker) is not process:
            return
        if request and (push.worker, request) in self.cluster.answers:
            return
        if not request:
            process.requests += 1
            request = process.requests
        self.send(process, ev.SegmentsUnmapped(ev.Ticket(push.worker, request), push.segments))
        self.after(500, lambda: self._insist(process, push, request))

    def _wake(self, process: Process, waiting: Any, value: Any) -> None:
        if process.waiting is not waiting or process.program is None:
            return
        if process.stopped_until > self.clock:
            self.after(process.stopped_until - self.clock, lambda: self._wake(process, waiting, value))
            return
        self.resume(process, value)

    def resume(self, process: Process, value: Any) -> None:
        """Run a program up to what it waits for next."""
        process.waiting = None
        assert process.program is not None
        try:
            waiting = process.program.send(value)
        except StopIteration:
            self._ended(process)
            return
        process.waiting = waiting
        self.after(waiting.ms, lambda: self._wake(process, waiting, None))

    def _ended(self, process: Process) -> None:
        """Its program is over: it leaves in good order, or begins anew."""
        worker = process.worker
        process.program = None
        if self.processes.pop(worker, None) is None:
            return
        self.cluster.kill(worker)
        if not process.leaving:
            self.after(self.random.randrange(500), lambda: self.connect(process))

    def _cut_off(self, process: Process) -> WorkerId:
        """Its connection is gone; the program is not told more."""
        worker = process.worker
        del self.processes[worker]
        process.waiting = None
        if process.program is not None:
            process.program.close()
            process.program = None
        return worker

    # ---------------------------------------------------------------------------------------------------------- ops

    def begun(self, op: Any) -> None:
        if isinstance(op, COPIES) and self.lasts("copies_refused") and op.op % 2:
            boot = self._boots
            self.after(0, lambda: self._refuse(op, boot))
            return
        if isinstance(op, REMOTE_OPS):
            boot, cluster = self._boots, self.cluster
            assert isinstance(cluster, RemoteCluster)
            self.after(cluster.delay_ms(op, self.random), lambda: self._perform(op, boot))
            return
        ms = self.random.choice((0, 1, 1, 2, 4))
        if isinstance(op, DISK_OPS):
            ms += self.random.choice((1, 3, 8, 20)) * (20 if self.lasts("disk_slow") else 1)
        elif isinstance(op, COPIES) and self.lasts("copies_slow"):
            ms += self.random.randrange(12_000)
        if isinstance(op, CLUSTERS[self.tier].READS):
            ms += self._read_late_ms
            self._read_late_ms = 0
        boot = self._boots
        self.after(ms, lambda: self._perform(op, boot))

    def _refuse(self, op: Any, boot: int) -> None:
        if boot == self._boots:
            for report in self.cluster.refuse(op):
                self._report(report, boot)

    def _perform(self, op: Any, boot: int) -> None:
        """The call does its work. What it has to say reaches the core a little later."""
        if boot != self._boots:
            return
        if isinstance(op, DISK_OPS) and self.lasts("disk_hangs"):
            self.after(self._until["disk_hangs"] - self.clock, lambda: self._perform(op, boot))
            return
        for report in self.cluster.perform(op, fails=self._fails(op)):
            late = self.random.choice((0, 0, 1, 5))
            if isinstance(report, ev.ForgottenElsewhere):
                late = 0  # what was read is told in that order
            self.after(late, partial(self._report, report, boot))

    def _report(self, event: ev.Event, boot: int) -> None:
        if boot != self._boots:
            return
        self.cluster.step(event)
        is_heard = isinstance(event, ev.ForgottenElsewhere) and event.forgotten and self.tier == "fleet"
        if is_heard and self._heard.random() < KILLED_WHEN_HEARD_SHARE:
            self.after(self._heard.choice((0, 2, 10, 40, 200)), partial(self._killed_when_heard, boot))

    def _killed_when_heard(self, boot: int) -> None:
        """The daemon is killed while what it has heard of is about to leave the index, or has just left it."""
        if boot == self._boots and not self.healed:
            self.totals["killed when it heard of a forget"] += 1
            self._restart(power=False)

    def _fails(self, op: Any) -> str:
        if isinstance(op, ev.CreateSegment):
            return "no memory" if self.lasts("no_memory") else ""
        if isinstance(op, REMOTE_OPS):
            return ""
        if isinstance(op, ev.Checksum) and self.protection is Protection.SEALED and op.op % 4 == 0:
            return "busy"  # it is an audit, which says nothing then
        if not isinstance(op, DISK_OPS):
            return "as told" if self.lasts("copies_fail") and op.op % 3 == 0 else ""
        cluster = self.cluster
        cluster.failing_syncs = self.lasts("sync_fails")
        cluster.faults = {}
        if self.lasts("disk_errors"):
            cluster.faults = dict.fromkeys(cluster.RECORD_OPS, DiskResult.IO_ERROR)
        if self.lasts("disk_full"):
            cluster.faults |= dict.fromkeys(cluster.GROWING_OPS, DiskResult.NO_SPACE)
        if self.lasts("files_touched"):
            cluster.faults |= dict.fromkeys(cluster.PROBES, DiskResult.IO_ERROR)
        if self.lasts("index_fails") or self.lasts("sync_fails"):
            cluster.faults[ev.WriteIndex] = DiskResult.IO_ERROR
        if self._error_in:
            self._error_in -= 1
            return "" if self._error_in else DiskResult.IO_ERROR.name
        return ""

    # ------------------------------------------------------------------------------------------------------- faults

    def _lasting(self, fault: Fault) -> None:
        self._until[fault.kind] = max(self._until[fault.kind], self.clock + fault.ms)

    _sync_fails = _index_fails = _disk_errors = _disk_full = _disk_slow = _disk_hangs = _lasting
    _copies_fail = _copies_refused = _copies_slow = _no_memory = _requests_lost = _requests_twice = (
        _requests_late
    ) = _lasting

    def _files_touched(self, fault: Fault) -> None:
        self._lasting(fault)
        self.cluster.step(ev.DiskTrouble("somebody removed a slab file"))

    def _somebody(self, fault: Fault, *kinds: str) -> Process | None:
        """Whom it strikes, of those who are connected."""
        able = [process for process in self.members if not kinds or process.kind in kinds]
        able = [process for process in able if self.processes.get(process.worker) is process]
        return able[fault.pick % len(able)] if able else None

    def _worker_dies(self, fault: Fault) -> None:
        process = self._somebody(fault)
        if process is not None:
            worker = self._cut_off(process)
            self.cluster.kill(worker)
            self.after(self.random.randrange(1_000), lambda: self.connect(process))

    def _worker_closes(self, fault: Fault) -> None:
        """The process lives on and dies later; another takes its place."""
        process = self._somebody(fault)
        if process is not None:
            worker = self._cut_off(process)
            self.lingering.append(worker)
            self.cluster.close(worker)
            self.after(self.random.randrange(4_000), lambda: self._dies_at_last(worker))
            self.after(self.random.randrange(500), lambda: self.connect(process))

    def _dies_at_last(self, worker: WorkerId) -> None:
        if worker in self.lingering:
            self.lingering.remove(worker)
            self.cluster.kill(worker)

    def _worker_stops(self, fault: Fault) -> None:
        process = self._somebody(fault)
        if process is not None:
            process.stopped_until = self.clock + fault.ms

    def _stubborn(self, fault: Fault) -> None:
        process = self._somebody(fault)
        if process is not None:
            process.stubborn_until = self.clock + fault.ms

    def _rank_fails(self, fault: Fault) -> None:
        process = self._somebody(fault, "rank")
        if process is not None:
            process.fails_until = self.clock + fault.ms

    def _rank_lags(self, fault: Fault) -> None:
        process = self._somebody(fault, "rank")
        if process is not None:
            process.lags_until = self.clock + fault.ms

    def _clock_jumps(self, fault: Fault) -> None:
        self._jumped += fault.ms
        self.cluster.now += fault.ms

    def _new_weights(self, fault: Fault) -> None:
        self.epochs[TENANTS[fault.pick % len(TENANTS)]] += 1

    def _disk_error(self, fault: Fault) -> None:
        self._error_in = 1 + fault.pick % 8

    def _read_late(self, fault: Fault) -> None:
        self._read_late_ms = fault.ms

    def _misdirected_read(self, fault: Fault) -> None:
        self.cluster.misdirect_in = 1 + fault.pick % 8

    def _bit_rot(self, fault: Fault) -> None:
        self.cluster.rot_some(fault.pick)

    def _bit_flip(self, fault: Fault) -> None:
        ready = [
            (segment, slot)
            for segment in self.cluster.store.state.pool.segments
            if segment.phase is Phase.ASSIGNED
            for slot, state in enumerate(segment.state)
            if state == SlotState.READY
        ]
        if ready:
            segment, slot = ready[fault.pick % len(ready)]
            self.cluster.flip(segment.id, slot * segment.slot_bytes // PAGE)

    def _power_cut(self, fault: Fault) -> None:
        self._restart(power=True)

    def _daemon_killed(self, fault: Fault) -> None:
        self._restart(power=False)

    def _restart(self, *, power: bool) -> None:
        """Everything that was under way is over; the processes live on and connect anew (or begin anew)."""
        self._note()
        cluster = self.cluster
        connected = [process for process in self.members if self.processes.get(process.worker) is process]
        for process in connected:
            self._cut_off(process)
        self.lingering.clear()
        self._boots += 1
        self._boot = self.clock + self._jumped
        cluster.crash(cluster.chance, power=power)
        cluster.watch._full_every = FULL_EVERY
        self.totals["chunks_restored"] += cluster.restored.chunks
        self.totals["sessions_restored"] += cluster.restored.sessions
        for process in connected:
            self.after(self.random.randrange(300), partial(self.connect, process))

    def _note(self) -> None:
        self.totals.update(self.cluster.counters)
        self.totals["promised"] += len(self.cluster.promised)

    # ---------------------------------------------------------------------------------------------------------- rest

    def rest(self) -> None:
        """Faults are healed: everybody ends what he does and leaves, and the store comes to rest."""
        self.healed = True
        if isinstance(self.cluster, RemoteCluster):
            self.cluster.calm = True
        self._until.clear()
        self._error_in = self._read_late_ms = self.cluster.misdirect_in = 0
        for process in self.members:
            process.leaving = True
            process.stopped_until = process.stubborn_until = 0
        last = self.cluster.events + REST_STEPS_MAX
        left_at = self.clock
        while not self._at_rest(due=self.clock - left_at > REST_MS_MAX):
            look_at = self.clock + REST_LOOK_MS
            while self.clock < look_at:
                self._next()
                assert self.cluster.events < last, f"no rest: {self.processes}, {self.cluster.store}"
            if self.processes or self.lingering:
                left_at = self.clock
        self._restart(power=True)
        self._read_everything()

    def _at_rest(self, *, due: bool) -> bool:
        """Whether it is at rest; raises if it is not, and had time enough."""
        if self.processes or self.lingering:
            return False
        try:
            assert self.cluster.health() is DiskState.OK, self.cluster.store.transfers
            self.cluster.at_rest()
        except AssertionError:
            if due:
                raise
            return False
        return True

    def _read_everything(self) -> None:
        """All that was restored of an epoch that is served comes back with its bytes (`World` compares them)."""
        cluster = self.cluster
        cluster.hold = set()  # from here on ops end at once, past `_fails`
        cluster.faults = {}
        cluster.failing_syncs = False
        while cluster.held:
            cluster.finish()
        for number, record in sorted(cluster.platter.namespaces.items()):
            if cluster.store.state.namespaces[NamespaceId(number)].retired:
                continue
            worker = cluster.join(record.tenant)
            assert cluster.open(record.spec, worker) == number
            for key in [key for of, key in cluster.platter.chunks if of == number]:
                # What lay in the cache over a slot may have been lost since, and the old owner's bytes are back.
                wanted = ["HIT"] if (number, key) in cluster.promised else ["HIT", "CORRUPT", "EVICTED"]
                if cluster.is_forgotten(NamespaceId(number), key):
                    wanted.append("FORGOTTEN")
                found = cluster.fetch(worker, NamespaceId(number), (key,), tries=50)
                assert found[0] in wanted, (number, key, found, cluster.store.transfers)
            cluster.kill(worker)


def shrink(failed: Simulation) -> str:
    """The report of the same run with as few faults as it takes to fail. Dropping one changes what comes after it, so
    what fails then may be something else; it is a failure all the same."""
    steps = failed.cluster.events + 1
    numbers = [fault.number for fault in failed.faults if fault.step <= steps]
    report = ""
    size = max(1, len(numbers) // 2)
    while size:
        at = 0
        while at < len(numbers):
            fewer = numbers[:at] + numbers[at + size :]
            found = _fails(failed, fewer)
            if found:
                numbers, report = fewer, found
            else:
                at += size
        size //= 2
    return report or _fails(failed, numbers)


def _fails(failed: Simulation, only: Sequence[int]) -> str:
    simulation = Simulation(
        failed.seed, failed.steps, protection=failed.protection, tier=failed.tier, only=only
    )
    try:
        simulation.run()
    except SimulationFailed as failure:
        return str(failure)
    return ""
