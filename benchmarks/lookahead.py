"""What looking ahead costs the core: a plan of the queue in full, and one that follows a change of it.

queue     `Store.apply` alone: jobs of 24 keys each, all of them in DRAM. The plan in full is `Planner.anew`, which the
          tests hold the other one to; a change takes the job at the head away and adds one at the tail, as a scheduler
          does that starts a job and takes in another. Changes in the midst move nothing else either.
sessions  the same with jobs that name sessions, far more than the windows hold: they are taken, and clipped.
snapshot  64 jobs of 4 keys, published whole each time, shifted by one: what a simple scheduler does.
replay    turns of conversations, each with the next ones as hints, one changed at a time; DRAM alone.

    make bench-lookahead ARGS='--quick --json'
"""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from harness import Goal, arguments, finish, heading
from scale import CHAIN, SHARD_BYTES, Driver, chain, chains, new_driver

from kvstore.core import events as ev
from kvstore.types import ChunkKey, Outcome, StagedPiece

Row = dict[str, Any]

JOBS, KEYS = 10_000, 24
MESSAGE_JOBS = 2_000
"""Of the first publication: a request names 65,536 keys at most."""
SESSIONS = 100_000
TURNS, AHEAD = 52_000, 100
TURNS_QUICK = 6_000
SHARE, CHANGE_MS, REPLAY_S = 0.01, 1.0, 60.0
KEY = ("part", "what")


def seconds(action: Callable[[], Any]) -> float:
    """CPU time of this thread: all that the core needs."""
    began = time.thread_time()
    action()
    return time.thread_time() - began


def row(part: str, what: str, took: list[float]) -> Row:
    ms = 1e3 * np.array(took)
    return {
        "part": part,
        "what": what,
        "p50": float(np.median(ms)),
        "p99": float(np.quantile(ms, 0.99)),
        "unit": "ms",
    }


def filled(chunks: int) -> Driver:
    driver = new_driver(chunks)
    for first in range(0, chunks // CHAIN, 8):
        driver.save(chains(first))
        driver.tick(20)
    return driver


class Publisher:
    """Numbers its messages, waits between them as long as a plan may put off the next one."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.number = 0

    def __call__(
        self, hints: tuple[ev.Hint, ...], removed: tuple[bytes, ...] = (), *, snapshot: bool = False
    ) -> ev.QueueAccepted:
        self.number += 1
        answer: ev.QueueAccepted = self.driver.ask(
            ev.PublishQueue, self.driver.namespace, hints, removed, snapshot, 0, self.number
        )
        assert not answer.snapshot_wanted, self.number
        return answer


def job(number: int, keys: tuple[ChunkKey, ...]) -> ev.Hint:
    return ev.Hint(b"job %d" % number, number, keys=keys)


def queue(rounds: int) -> Iterator[Row]:
    driver = filled(JOBS * KEYS // CHAIN * CHAIN)
    stored = driver.store.state.chunks.rows_used // CHAIN
    of = [tuple(chain(number % stored)[:KEYS]) for number in range(JOBS + 4 * rounds + 1)]
    publish = Publisher(driver)
    took = []
    for first in range(0, JOBS, MESSAGE_JOBS):
        driver.now += 10_000
        hints = tuple(job(number, of[number]) for number in range(first, first + MESSAGE_JOBS))
        took.append(seconds(lambda hints=hints, first=first: publish(hints, snapshot=not first)))  # type: ignore[misc]
    yield row("queue", f"{MESSAGE_JOBS:,} more jobs", took)
    planner = driver.store.queue.planner
    assert driver.store.queue.reach("alice")[1] == JOBS, driver.store.queue
    full = [seconds(planner.anew) for _ in range(5)]
    yield row("queue", "plan in full", full)
    took, midst = [], []
    driver.now += 10_000
    for number in range(JOBS, JOBS + rounds):
        driver.now += 100
        hints = (job(number, of[number]),)
        removed = (b"job %d" % (number - JOBS),)
        took.append(seconds(lambda hints=hints, removed=removed: publish(hints, removed)))  # type: ignore[misc]
    for number in range(JOBS + rounds, JOBS + 2 * rounds):
        driver.now += 100
        hints = (ev.Hint(b"job %d" % number, rounds + 1, keys=of[number]),)
        midst.append(seconds(lambda hints=hints: publish(hints)))  # type: ignore[misc]
    planner.check()
    yield row("queue", "change of one job", took)
    yield row("queue", "one more at the head", midst)
    share = float(np.median(took)) / float(np.median(full))
    yield {"part": "queue", "what": "change over plan in full", "p50": share, "unit": ""}


def sessions(rounds: int) -> Iterator[Row]:
    driver = filled(1 << 16)
    stored = driver.store.state.chunks.rows_used // CHAIN
    for number in range(SESSIONS):
        key = chain(number % stored, 1)[0]
        driver.ask(
            ev.UpdateSession, driver.namespace, b"%d" % number, 0, 0, (ev.SessionEntry(key, 0, CHAIN),)
        )
    publish = Publisher(driver)
    took = []
    for first in range(0, SESSIONS, 4_000):
        driver.now += 10_000
        hints = tuple(
            ev.Hint(b"job %d" % number, number, b"%d" % number) for number in range(first, first + 4_000)
        )
        took.append(seconds(lambda hints=hints, first=first: publish(hints, snapshot=not first)))  # type: ignore[misc]
    yield row("sessions", "4,000 more of 100,000 jobs", took)
    assert driver.store.queue.count == SESSIONS
    took = []
    driver.now += 10_000
    for number in range(rounds):
        driver.now += 100
        hints = (ev.Hint(b"job %d" % (SESSIONS + number), SESSIONS + number, b"%d" % number),)
        removed = (b"job %d" % number,)
        took.append(seconds(lambda hints=hints, removed=removed: publish(hints, removed)))  # type: ignore[misc]
    yield row("sessions", "change of one job of 100,000", took)
    yield row("sessions", "tick", [seconds(lambda: driver.tick(100)) for _ in range(rounds)])


def snapshot(rounds: int) -> Iterator[Row]:
    driver = filled(1 << 13)
    keys = [key for number in range(8) for key in chain(number)]
    took = []
    for turn in range(rounds):
        driver.now += 100
        hints = tuple(
            ev.Hint(b"job %d" % (turn + place), place, keys=tuple(keys[place : place + 4]))
            for place in range(64)
        )
        took.append(seconds(lambda hints=hints: driver.ask(ev.PublishQueue, driver.namespace, hints)))  # type: ignore[misc]
    yield row("snapshot", "64 jobs of 4 keys", took)


def replay(turns: int) -> Iterator[Row]:
    """Conversations that grow by 4 chunks a turn up to 48; a job asks for what there is and saves the rest."""
    driver = new_driver(10_240)
    dice = random.Random(1)
    lengths = dict.fromkeys(range(600), 0)
    work: list[tuple[int, int]] = []
    newest = len(lengths)
    for _ in range(turns):
        number = dice.choice(list(lengths)[-400:])
        lengths[number] += 4
        work.append((number, lengths[number]))
        if lengths[number] >= 48:
            del lengths[number]
            lengths[newest] = 0
            newest += 1
    publish = Publisher(driver)

    def hint(turn: int) -> ev.Hint:
        number, length = work[turn]
        return ev.Hint(b"%d" % turn, turn, keys=tuple(chain(number, length)))

    hits = asked = 0
    began = time.thread_time()
    known = deque(hint(turn) for turn in range(min(AHEAD, turns)))
    publish(tuple(known), snapshot=True)
    for turn in range(turns):
        driver.now += 50
        driver.apply(ev.Tick())
        keys = known.popleft().keys
        found = driver.ask(ev.Acquire, driver.namespace, keys)
        hits += found.outcomes.count(Outcome.HIT)
        asked += len(keys)
        if found.lease:
            driver.ask(ev.Release, (found.lease,))
        reserved = driver.ask(ev.Reserve, driver.namespace, keys)
        if isinstance(reserved, ev.Reserved) and reserved.extents:
            pieces = tuple(StagedPiece(SHARD_BYTES * at, SHARD_BYTES) for at in range(len(reserved.extents)))
            driver.ask(ev.Commit, reserved.reservation, pieces)
        if turn + AHEAD < turns:
            known.append(hint(turn + AHEAD))
        publish(tuple(list(known)[-1:]), (b"%d" % turn,))
    took = time.thread_time() - began
    yield {"part": "replay", "what": "turns", "p50": turns, "unit": ""}
    yield {"part": "replay", "what": f"{TURNS:,} turns", "p50": took * TURNS / turns, "unit": "s"}
    yield {"part": "replay", "what": "hits", "p50": hits / asked, "unit": ""}


def goals(rows: list[Row]) -> list[Goal]:
    found = {(row["part"], row["what"]): row["p50"] for row in rows}
    return [
        Goal(
            f"one of {JOBS:,} jobs x {KEYS} keys changes, over a plan in full",
            found["queue", "change over plan in full"],
            "times",
            SHARE,
            "<=",
        ),
        Goal("one of these jobs changes, p50", found["queue", "change of one job"], "ms", CHANGE_MS, "<="),
        Goal(
            f"one of {SESSIONS:,} jobs changes, p50",
            found["sessions", f"change of one job of {SESSIONS:,}"],
            "ms",
            CHANGE_MS,
            "<=",
        ),
        Goal(
            f"{TURNS:,} turns with {AHEAD} ahead",
            found["replay", f"{TURNS:,} turns"],
            "s",
            REPLAY_S,
            "<=",
        ),
    ]


def main() -> int:
    chosen = arguments(__doc__).parse_args()
    rounds, turns = (200, TURNS_QUICK) if chosen.quick else (2_000, TURNS)
    print(heading(__file__), flush=True)
    rows: list[Row] = []
    for part in (queue(rounds), sessions(rounds), snapshot(rounds), replay(turns)):
        for found in part:
            rows.append(found)
            late = f"   p99 {found['p99']:10.3f}" if "p99" in found else ""
            print(
                f"{found['part']:10}{found['what']:34}{found['p50']:12.4f} {found['unit']:4}{late}",
                flush=True,
            )
    return finish(__file__, chosen, rows, goals(rows), key=KEY)


if __name__ == "__main__":
    sys.exit(main())
