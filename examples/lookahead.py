"""Why the daemon should know who comes next: the same requests, with the queue told and not told.

The model's KV takes 384 KiB a token, DRAM holds that of two conversations, and the SSD reads at 1 GB/s (a throttle in
front of the disk, the same for both runs: the page cache would hide what an SSD takes). Requests are served at a steady
pace. Untold, the daemon reads a history from SSD when its request has come, and the request waits; told, it has read it
while the request before was served.
"""

from __future__ import annotations

import statistics
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from models import DemoModel, prepare_wide
from processes import Daemon, Worker, worker_process

from kvstore.scheduler.hints import HintedQueue
from kvstore.scheduler.job_queue import Job, JobQueue

READ_BYTES_PER_S = 1e9
TTFT_SHARE_MAX = 0.6
"""Goal: time to first token with hints, over that without."""
ROUNDS = 3
NEW_TOKENS = 16
"""Of each request behind its history."""


@dataclass(frozen=True)
class Shape:
    token_bytes: int
    history_tokens: int
    conversations: int
    pace_s: float
    """From one request to the next."""

    @property
    def chunk_bytes(self) -> int:
        return 64 * self.token_bytes

    @property
    def settings(self) -> dict[str, object]:
        """DRAM for two histories and what is new."""
        chunks = 2 * (self.history_tokens // 64 + 2)
        segment = 4 * self.chunk_bytes
        return {
            "dram_bytes": -(-chunks // 4) * segment,
            "segment_bytes": segment,
            "staging_bytes": 4 * self.chunk_bytes,
            "ssd_bytes": 4 * self.conversations * self.history_tokens * self.token_bytes,
            "ssd_slab_bytes": 8 * self.chunk_bytes + (1 << 20),
            "prefetch_share_max": 0.9,
            "ssd_deadline_ms": 10_000,  # other work on the machine is no failing disk
        }


WIDE = Shape(token_bytes=384 << 10, history_tokens=704, conversations=4, pace_s=0.9)
SMALL = Shape(token_bytes=16 << 10, history_tokens=192, conversations=4, pace_s=0.1)


def show(cache: Path, threads: int, *, small: bool = False) -> bool:
    """Prints both runs; whether their answers are the same. `small`: with little KV, for tests."""
    shape = SMALL if small else WIDE
    model = prepare_wide(cache / "models", small=small)
    draw = Random(1)
    histories = {
        f"chat {name}": [draw.randrange(256) for _ in range(shape.history_tokens)]
        for name in "ABCDEFGH"[: shape.conversations]
    }
    turns = [
        (name, [draw.randrange(256) for _ in range(NEW_TOKENS)]) for _ in range(ROUNDS) for name in histories
    ]
    size = shape.conversations * shape.history_tokens * shape.token_bytes
    print(
        f"\n3. Why hints matter: {model.name} with {shape.token_bytes >> 10} KiB of KV a token,"
        f" {shape.conversations} conversations of {shape.history_tokens} tokens = {size >> 20} MiB on an SSD,"
        f"\n   DRAM for two of them, the disk throttled to {READ_BYTES_PER_S / 1e9:.0f} GB/s, a request every"
        f" {shape.pace_s} s",
        flush=True,
    )
    with Daemon(shape.settings) as first:
        with worker_process(model, first.run_dir, threads) as worker:
            for name, tokens in histories.items():
                worker.ask(session=name, tokens=tokens, max_new_tokens=1)
                worker.flush()
        first.stop()
        runs = {
            told: _serve(model, shape, first.ssd, histories, turns, threads, told=told)
            for told in (False, True)
        }
    return _report(runs[False], runs[True])


def _serve(
    model: DemoModel,
    shape: Shape,
    ssd: Path,
    histories: dict[str, list[int]],
    turns: list[tuple[str, list[int]]],
    threads: int,
    *,
    told: bool,
) -> list[dict[str, Any]]:
    """The worker's results, in the order of the turns; each history grows by its turns."""
    with (
        Daemon(shape.settings, ssd=ssd, read_bytes_per_s=READ_BYTES_PER_S) as daemon,
        worker_process(model, daemon.run_dir, threads) as worker,
    ):
        _warm(worker)
        grown = {name: list(tokens) for name, tokens in histories.items()}
        jobs = []
        for name, tokens in turns:
            grown[name] += tokens
            jobs.append(Job(name, tuple(grown[name]), 1))
        if not told:
            return _paced(JobQueue(), jobs, worker, shape.pace_s)
        with closing(HintedQueue(daemon.client, model.folder.name)) as queue:
            return _paced(queue, jobs, worker, shape.pace_s)


def _paced(queue: JobQueue, jobs: list[Job], worker: Worker, pace_s: float) -> list[dict[str, Any]]:
    for job in jobs:
        queue.put(job)
    results = []
    due = time.monotonic() + 2 * pace_s
    while (job := queue.start()) is not None:
        time.sleep(max(0.0, due - time.monotonic()))
        due = max(due, time.monotonic()) + pace_s
        results.append(worker.ask(session=job.session, tokens=job.tokens, max_new_tokens=job.max_new_tokens))
        queue.finish(job)
    return results


def _warm(worker: Worker) -> None:
    """The first forward call takes longer than all others."""
    worker.ask(session="warm", tokens=[1, 2, 3], max_new_tokens=1)


def _report(untold: list[dict[str, Any]], told: list[dict[str, Any]]) -> bool:
    times = [[result["ttft_s"] for result in results] for results in (untold, told)]
    print(f"{'':38} {'without hints':>20} {'with hints':>20}")
    for name, measure in (("mean", statistics.fmean), ("longest", max)):
        without, hinted = measure(times[0]), measure(times[1])
        share = f"{hinted:8.3f} s = {hinted / without:6.3f}"
        print(f"  time to first token, {name:15} {without:18.3f} s {share:>20}")
    for name, field in (("tokens reused", "reused_tokens"), ("KV loaded, bytes", "loaded_bytes")):
        cells = [sum(result[field] for result in results) for results in (untold, told)]
        print(f"  {name:36} {cells[0]:>20,} {cells[1]:>20,}")
    same = [result["tokens"] for result in untold] == [result["tokens"] for result in told]
    print(f"every token: {'the same in both runs' if same else 'DIFFERENT ANSWERS'}")
    met = statistics.fmean(times[1]) <= TTFT_SHARE_MAX * statistics.fmean(times[0])
    goal = f"time to first token with hints: at most {TTFT_SHARE_MAX} of without"
    print(f"goal: {goal:58} {'met' if met else 'MISSED'}")
    return same
