"""Short runs of the simulator: fresh seeds, those that once failed, and planted bugs that have to be found.

A run that fails prints the line that repeats it. `make sim COUNT=100` runs more.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore.sim.__main__ import main
from kvstore.sim.canaries import CANARIES, FLEET_CANARIES, REMOTE_CANARIES, planted
from kvstore.sim.faults import KINDS
from kvstore.sim.simulation import CLUSTERS, Simulation, SimulationFailed, shrink
from kvstore.types import Protection

KEPT = [line.split("#")[0].split() for line in Path(__file__).with_name("seeds.txt").read_text().splitlines()]
STEPS = 2_500
FRESH = 3
CANARY_RUNS_MAX = 12
CANARY_SEEDS = {
    **{"reuse-late-read": 9, "evict-pinned": 9, "plan-old-session": 10, "forgotten-elsewhere": 4},
    **{"over-dram-quota": 3, "over-ssd-quota": 8, "over-remote-quota": 8, "purge-spares-ssd": 4},
    **{"saved-again-is-slow": 4, "plan-with-lost": 7, "any-record": 2, "untold-is-done": 10},
    **dict.fromkeys(("reuse-late-copy", "plan-without-new", "read-while-off", "skip-lost-hints"), 1),
    **dict.fromkeys(("save-first-pieces", "forget-use", "record-too-new", "heed-all-again"), 1),
}
"""From where on: a run that finds it, as the core is now, so that few runs are needed."""


@pytest.mark.parametrize("number", range(FRESH))
@pytest.mark.parametrize("tier", ["ssd", "memory"])
def test_a_fresh_seed(number: int, tier: str) -> None:
    Simulation(random.SystemRandom().randrange(1 << 32), STEPS, tier=tier).run()


@pytest.mark.timeout(600)  # of a machine that does much else
@pytest.mark.parametrize("seed", [1, 4, 22])
def test_a_store_beyond_the_node(seed: int) -> None:
    """That is slow, hangs, fails, is wiped, put back from an old copy, and whose records are spoilt and swapped."""
    simulation = Simulation(seed, 1_000, tier="remote")
    counted = simulation.run()
    assert counted["remote_chunks_stored"] and counted["remote_keys_looked_up"], counted


@pytest.mark.timeout(600)
def test_another_node_beside_the_store() -> None:
    """That gives what it holds, hears of forgets late, and forgets by itself; and tenants are purged."""
    counted = Simulation(3, 1_500, tier="fleet").run() + Simulation(4, 1_500, tier="fleet").run()
    assert counted["tenants_purged"] and counted["forgets_from_elsewhere"], counted
    assert counted["remote_chunks_fetched"], counted


@pytest.mark.parametrize(("seed", "protection", "steps"), [line for line in KEPT if line])
def test_a_seed_that_failed_once(seed: str, protection: str, steps: str) -> None:
    Simulation(int(seed), int(steps), protection=Protection(protection), tier="ssd").run()


@pytest.mark.parametrize(
    ("name", "tier"),
    [
        *((name, "ssd") for name in CANARIES),
        ("reuse-late-read", "memory"),
        ("trust-disk", "memory"),
        *((name, "remote") for name in REMOTE_CANARIES),
        *((name, "fleet") for name in FLEET_CANARIES),
    ],
)
def test_a_planted_bug_is_found(name: str, tier: str) -> None:
    """Within a bounded number of steps, and by what is checked, not by a planted bug that does not fit any more."""
    failure = None
    first = CANARY_SEEDS.get(name, 0)
    for seed in range(first, first + CANARY_RUNS_MAX):
        simulation = Simulation(seed, STEPS, tier=tier)
        with planted(name), suppress(SimulationFailed):
            simulation.run()
        failure = simulation.failure
        if failure is not None:
            break
    assert failure is not None, f"not found in {CANARY_RUNS_MAX} runs of {STEPS} steps"
    (*_, last) = traceback.extract_tb(failure.__traceback__)
    assert "canaries" not in last.filename, failure


NEEDED = (
    *(
        "chunks_saved",
        "chunks_stored",
        "chunks_demoted",
        "chunks_promoted_on_demand",
        "chunks_promoted_ahead",
    ),
    *(
        "chunks_evicted",
        "chunks_evicted_from_ssd",
        "chunks_corrupt",
        "chunks_incomplete",
        "chunks_lost_by_sync",
    ),
    *(
        "reservations_expired",
        "reservations_aborted",
        "copies_late",
        "commits_failed",
        "fills",
        "fills_failed",
        "saves_in_one_message",
    ),
    *("grants_already", "grants_busy", "grants_full", "segments_retired", "slots_quarantined"),
    *("index_errors", "ssd_reads_late", "ssd_read_errors", "ssd_write_errors", "ssd_healed"),
    *("chunks_restored", "sessions_restored", "sessions_truncated", "promised", "hints_received"),
    *(f"fault {kind}" for kind in KINDS),
)


@pytest.mark.timeout(600)  # of a machine that does much else
def test_the_runs_reach_what_they_are_for() -> None:
    """Runs in which nothing is stored, raised, lost, revoked or late find nothing; in a few all of it happens."""
    totals: Counter[str] = Counter()
    chunks = 0
    for seed in (120, 127, 107, 109, *range(110, 120), *range(128, 150)):
        simulation = Simulation(seed, 3_000, tier="ssd")
        while simulation.cluster.events < simulation.steps:
            simulation._next()
        spaces = simulation.cluster.store.state.namespaces.values()
        chunks = max(chunks, sum(space.visible + space.cold for space in spaces))
        totals += simulation.run()
        if all(totals[name] for name in NEEDED) and chunks >= 200:
            return
    pytest.fail(f"{chunks} chunks; never: {[name for name in NEEDED if not totals[name]]}")


NEEDED_OF_MEMORY = (
    *("chunks_stored", "chunks_demoted", "chunks_promoted_on_demand", "chunks_promoted_ahead"),
    *("chunks_evicted_from_ssd", "chunks_corrupt", "chunks_reused", "scrub_records"),
    *("ssd_reads_late", "ssd_read_errors", "ssd_write_errors", "ssd_healed", "ssd_degraded_off"),
    *("fault power_cut", "fault daemon_killed", "fault disk_hangs", "fault disk_full", "fault bit_rot"),
)


@pytest.mark.timeout(600)
def test_the_runs_with_the_tier_in_memory_reach_what_they_are_for() -> None:
    totals: Counter[str] = Counter()
    for seed in (111, 102, 100, *range(113, 140)):
        totals += Simulation(seed, 3_000, tier="memory").run()
        assert not totals["chunks_restored"] and not totals["index_transactions"]
        if all(totals[name] for name in NEEDED_OF_MEMORY):
            return
    pytest.fail(f"never: {[name for name in NEEDED_OF_MEMORY if not totals[name]]}")


@pytest.mark.parametrize("tier", CLUSTERS)
def test_a_seed_repeats_itself(tier: str) -> None:
    """In another process too, whose hashes of strings are others: the same events at the same times."""
    script = (
        "from kvstore.sim.simulation import Simulation\n"
        f"run = Simulation(7, 1500, tier={tier!r})\n"
        "print(sorted(run.run().items()), run.cluster.history[-1], run.clock)\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": str(number)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for number in (1, 2)
    }
    assert len(outputs) == 1, outputs


def test_a_failure_says_how_to_see_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "3", "--steps", "1500", "--tier", "ssd", "--canary", "durable-too-early"]) == 1
    report = capsys.readouterr().out
    assert "seed 3, protection" in report and "last events:" in report and "faults until then:" in report
    again = next(line for line in report.splitlines() if line.startswith("again: python -m kvstore.sim "))
    arguments = again.removeprefix("again: python -m kvstore.sim ").split()
    assert arguments[-2:] == ["--canary", "durable-too-early"]
    assert main(arguments) == 1
    assert capsys.readouterr().out.splitlines()[:2] == report.splitlines()[:2]
    assert main(arguments[:-2]) == 0


def test_a_schedule_shrinks_to_what_matters() -> None:
    """The planted bug shows when bytes on SSD are not what they were, so a fault or two are all that it takes."""
    with planted("trust-disk"):
        for seed in range(20):
            simulation = Simulation(seed, 600, tier="ssd")
            try:
                simulation.run()
            except SimulationFailed:
                shrunk = shrink(simulation)
                left = shrunk.partition("--only ")[2].split()[0].split(",")
                assert len(left) < len(simulation.faults) and shrunk.startswith(f"seed {seed}, "), shrunk
                return
    pytest.fail("never fails")
