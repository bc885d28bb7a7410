"""Faults as data: what goes wrong, when and for how long, drawn from a seed before the run, and printable.

The run decides nothing about them: a schedule with fewer faults is a schedule too, which is how a failure is shrunk.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvstore.types import Protection


@dataclass(frozen=True, slots=True)
class Fault:
    number: int
    """Its place in the schedule as it was drawn."""
    step: int
    """After how many events."""
    kind: str
    ms: int = 0
    """How long it lasts, or by how much."""
    pick: int = 0
    """Whom it strikes, or which of the next."""

    def __str__(self) -> str:
        lasts = f", {self.ms} ms" if self.ms else ""
        return f"{self.number}: step {self.step} {self.kind} ({self.pick}{lasts})"


@dataclass(frozen=True, slots=True)
class Kind:
    weight: int
    ms: tuple[int, ...] = (0,)
    what: str = ""


KINDS = {
    "power_cut": Kind(
        2, what="machine stops: un-synced writes are lost, torn or kept, one by one; daemon starts again"
    ),
    "daemon_killed": Kind(2, what="daemon stops and starts again; what was written is in the page cache"),
    "sync_fails": Kind(4, (100, 1_000), "index transactions fail, and what they were to sync is lost"),
    "index_fails": Kind(4, (100, 1_000), "index transactions fail"),
    "disk_error": Kind(10, what="EIO at the n-th disk call from now"),
    "disk_errors": Kind(4, (50, 500), "EIO at every second record"),
    "disk_full": Kind(6, (200, 2_000), "ENOSPC for records, slab files and the index"),
    "files_touched": Kind(
        3,
        (200, 2_000),
        "somebody removes or cuts files of the SSD tier: it is told, and probes fail meanwhile",
    ),
    "disk_slow": Kind(6, (200, 1_000), "disk calls take 20 times as long"),
    "disk_hangs": Kind(6, (300, 1_500), "no disk call returns"),
    "read_late": Kind(
        0, (450, 1_500), "the next read of chunks returns long after its deadline, and the disk goes on"
    ),
    "bit_rot": Kind(8, what="bits of a record on SSD flip"),
    "bit_flip": Kind(8, what="bits of a slot in DRAM flip (protection group: others can write there)"),
    "misdirected_read": Kind(6, what="the n-th read from now gets another record's bytes"),
    "copies_fail": Kind(4, (50, 300), "every third copy between slots fails"),
    "copies_refused": Kind(8, (200, 2_000), "every second copy or checksum is refused before it began"),
    "copies_slow": Kind(4, (500, 15_000), "copies between slots take that long"),
    "no_memory": Kind(2, (500, 2_000), "no segment can be made"),
    "worker_dies": Kind(12, what="a worker's process is killed"),
    "worker_closes": Kind(6, what="a worker's connection is lost; its process lives on with its mappings"),
    "worker_stops": Kind(10, (300, 3_000), "a worker is stopped: what it was about to do it does late"),
    "rank_fails": Kind(6, (500, 5_000), "a rank saves nothing"),
    "rank_lags": Kind(6, (500, 5_000), "a rank saves late"),
    "stubborn": Kind(4, (500, 5_000), "a worker does not unmap what it is told to"),
    "requests_lost": Kind(8, (50, 500), "every third request, or answer, is lost; it is asked again"),
    "requests_twice": Kind(8, (50, 500), "every third request arrives twice"),
    "requests_late": Kind(8, (50, 500), "requests arrive late and in any order"),
    "clock_jumps": Kind(6, (1_000, 40_000), "time passes while nothing runs"),
    "new_weights": Kind(1, what="a tenant opens the next epoch of its weights"),
}


READ_LATE = "read_late"
READ_LATE_SHARE = 0.5
"""Of the schedules,"""
READ_LATE_GAP = 250
"""in which it strikes once in so many steps: rarely enough that the tier is well for most of the time."""


def draw(seed: int, steps: int, protection: Protection) -> tuple[Fault, ...]:
    """A schedule for so many steps. Some kinds are left out of each, and the others are more or less frequent."""
    faults = [*_draw_kinds(seed, steps, protection), *_draw_late_reads(seed, steps)]
    faults.sort(key=lambda fault: fault.step)
    return tuple(replace(fault, number=number) for number, fault in enumerate(faults))


def _draw_late_reads(seed: int, steps: int) -> Iterator[Fault]:
    """Beside the others, which it would crowd out if it were drawn as often among them."""
    chance = random.Random(f"late reads {seed}")
    step = 0
    strikes = chance.random() < READ_LATE_SHARE
    while strikes:
        step += 1 + int(chance.expovariate(1 / READ_LATE_GAP))
        if step >= steps:
            break
        yield Fault(0, step, READ_LATE, chance.randint(*KINDS[READ_LATE].ms))


def _draw_kinds(seed: int, steps: int, protection: Protection) -> list[Fault]:
    chance = random.Random(f"faults {seed}")
    kinds = [kind for kind in KINDS if kind != READ_LATE and chance.random() < 0.8]
    if protection is not Protection.GROUP and "bit_flip" in kinds:
        kinds.remove("bit_flip")
    weights = [KINDS[kind].weight * chance.choice((1, 1, 3)) for kind in kinds]
    gap = chance.choice((40, 100, 200, 400))
    faults: list[Fault] = []
    step = 0
    while kinds:
        step += 1 + int(chance.expovariate(1 / gap))
        if step >= steps:
            break
        (kind,) = chance.choices(kinds, weights)
        low, high = KINDS[kind].ms[0], KINDS[kind].ms[-1]
        faults.append(Fault(len(faults), step, kind, chance.randint(low, high), chance.randrange(1 << 16)))
    return faults


def show(faults: Sequence[Fault], until: int) -> str:
    """Those that struck before a step."""
    struck = [fault for fault in faults if fault.step <= until]
    return "\n".join(f"  {fault}" for fault in struck) or "  none"
