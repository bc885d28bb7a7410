"""`python -m kvstore.sim`: random runs, each of which its seed repeats. Exit status 1: one failed."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter

from kvstore.option_types import whole
from kvstore.types import Protection

from .canaries import CANARIES, FLEET_CANARIES, REMOTE_CANARIES, planted
from .simulation import CLUSTERS, Simulation, SimulationFailed, shrink

STEPS = 5_000


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvstore.sim", description=__doc__)
    parser.add_argument("--seed", type=whole(0), help="the first; drawn if not given")
    parser.add_argument("--count", type=whole(1), default=1, help="how many seeds, one after the other")
    parser.add_argument("--steps", type=whole(1), default=STEPS, help="events until the faults are healed")
    parser.add_argument("--total", type=whole(1), help="as many seeds as make so many events in all")
    parser.add_argument("--protection", choices=[p.value for p in Protection], help="drawn if not given")
    parser.add_argument("--tier", choices=[*CLUSTERS], help="what is below DRAM; drawn if not given")
    parser.add_argument("--only", help="numbers of the faults that happen, or none")
    parser.add_argument(
        "--canary",
        default="",
        choices=["", *CANARIES, *REMOTE_CANARIES, *FLEET_CANARIES],
        help="plant a bug, which must be found",
    )
    parser.add_argument("--shrink", action="store_true", help="drop faults as long as the run fails")
    parser.add_argument("--stop", action="store_true", help="at the first failure")
    args = parser.parse_args(arguments)
    first = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    only = None if args.only is None else [int(n) for n in args.only.split(",") if n.isdigit()]
    protection = Protection(args.protection) if args.protection else None
    totals: Counter[str] = Counter()
    failed: list[int] = []
    steps, began = 0, time.process_time()
    seed = first - 1
    with planted(args.canary):
        while steps < args.total if args.total is not None else seed + 1 < first + args.count:
            seed += 1
            simulation = Simulation(seed, args.steps, protection=protection, tier=args.tier, only=only)
            try:
                totals += simulation.run()
            except SimulationFailed as failure:
                failed.append(seed)
                print(f"{failure}{f' --canary {args.canary}' if args.canary else ''}", flush=True)
                if args.shrink:
                    print(shrink(simulation), flush=True)
                if args.stop or args.canary:
                    break
            steps += simulation.cluster.events
    seconds = time.process_time() - began
    faults = {
        name.removeprefix("fault "): n for name, n in sorted(totals.items()) if name.startswith("fault ")
    }
    print("counted:", {name: n for name, n in sorted(totals.items()) if not name.startswith("fault ")})
    print("faults:", faults)
    print(
        f"seeds {first} to {seed}: {steps} steps in {seconds:.1f} s of CPU "
        f"({steps / max(seconds, 1e-9):.0f}/s), {len(failed)} failures {failed or ''}"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
