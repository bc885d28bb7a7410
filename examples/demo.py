"""A small model answers conversations twice: computing each history anew, and with kvstored beside it.

In the second run the worker process is killed half-way and started again: what it knew is in the store. Then both runs
are compared, token by token. Leaves nothing running, and nothing behind but the model in .cache/.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # the examples lie beside one another, in no package

from conversations import CONVERSATIONS, SYSTEM
from models import DemoModel, prepare

from kvstore.client import Client, connect
from kvstore.errors import Unavailable
from kvstore.scheduler.job_queue import Job, JobQueue

CACHE = Path(__file__).resolve().parent.parent / ".cache"
GAP_MAX = 1e-3
"""Two orders of summing the same numbers may swap two tokens whose logits are closer than this. Nothing else may."""
ENVIRONMENT = {
    # Threads that wait for one another must not spin: with as many as there are cores, one that lost its core to some
    # other process holds up all the rest, and a forward call takes ten times as long.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
START_S = 120.0
"""Longest wait for a process to be ready, or to answer a turn."""


@dataclass
class Conversation:
    name: str
    messages: list[str]
    tokens: list[int] = field(default_factory=list)
    """The request that is to be answered next: all that was said so far."""
    turn: int = 0


@dataclass(frozen=True)
class Turn:
    """One answered turn; `result` is the worker's TurnResult."""

    conversation: str
    number: int
    result: dict[str, Any]

    @property
    def tokens(self) -> list[int]:
        return list(self.result["tokens"])


class Worker:
    """A worker process (see kvstore.gpu_worker.worker). Its input ends with us, and it ends with its input."""

    def __init__(self, model: DemoModel, run_dir: str, threads: int) -> None:
        command = [sys.executable, "-P", "-m", "kvstore.gpu_worker.worker", f"--model={model.folder}"]
        self.process = subprocess.Popen(
            [*command, f"--run-dir={run_dir}", f"--threads={threads}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**ENVIRONMENT, **os.environ},
        )
        self._read()

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        with _alarm(START_S, "the worker does not answer"):
            line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the worker ended with status {self.process.wait(10)}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise SystemExit(f"the worker: {reply['error']}")
        return reply

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        self.process.stdout.close()


class Run:
    """All conversations, answered through a queue of jobs: a turn of one, a turn of the next, and so on."""

    def __init__(
        self, model: DemoModel, options: argparse.Namespace, follow: list[Turn] | None = None
    ) -> None:
        """`follow`: turns of an earlier run, whose answers stand in the histories of this one too, so that a token
        that differs is judged where it stands and does not change the turns after it."""
        self.turns: list[Turn] = []
        self._model = model
        self._options = options
        self._follow = {(turn.conversation, turn.number): turn.tokens for turn in follow or ()}
        self._queue = JobQueue()
        self._conversations: dict[str, Conversation] = {}
        for name, messages in list(CONVERSATIONS.items())[: options.conversations]:
            conversation = Conversation(name, messages, model.opening(SYSTEM, messages[0]))
            self._conversations[name] = conversation
            self._put(conversation)
        self.turn_count = sum(len(conversation.messages) for conversation in self._conversations.values())

    def answer(self, worker: Worker, turn_count: int) -> None:
        """Answers so many turns, or all that are left."""
        for _ in range(turn_count):
            job = self._queue.start()
            if job is None:
                return
            result = worker.ask(
                session=job.session,
                tokens=job.tokens,
                max_new_tokens=job.max_new_tokens,
                stop_tokens=[self._model.end],
            )
            self._queue.finish(job)
            self._done(self._conversations[job.session], result)

    def _put(self, conversation: Conversation) -> None:
        self._queue.put(Job(conversation.name, tuple(conversation.tokens), self._options.answer_tokens))

    def _done(self, conversation: Conversation, result: dict[str, Any]) -> None:
        turn = Turn(conversation.name, conversation.turn + 1, result)
        self.turns.append(turn)
        said = " ".join(self._model.tokenizer.decode(turn.tokens).split())
        print(
            f"  [{len(self.turns):2}/{self.turn_count}] {turn.conversation:9} turn {turn.number}: "
            f"{result['prompt_tokens']:5} tokens, {result['reused_tokens']:5} reused, "
            f"first after {result['ttft_s']:6.3f} s | {said[:60]}",
            flush=True,
        )
        conversation.turn += 1
        if conversation.turn < len(conversation.messages):
            answer = self._follow.get((turn.conversation, turn.number), turn.tokens)
            conversation.tokens += self._model.reply(answer, conversation.messages[conversation.turn])
            self._put(conversation)


def main() -> int:
    options = _parse()
    begun = time.perf_counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that everything is ended
    model = prepare(CACHE / "models")

    print(f"\n1. {model.name}: every history is computed anew ({options.threads} threads)")
    print("   (so small a model is quick, and not much of a reader)", flush=True)
    recomputed = Run(model, options)
    with _worker(model, "", options.threads) as worker:
        recomputed.answer(worker, recomputed.turn_count)

    print("\n2. The same with kvstored beside it", flush=True)
    stored = Run(model, options, follow=recomputed.turns)
    half = stored.turn_count // 2
    saved = 0
    with _daemon(options) as (run_dir, client):
        with _worker(model, run_dir, options.threads) as worker:
            stored.answer(worker, half)
            saved += _flush(worker)
            worker.kill()
            print(f"  -- worker {worker.process.pid} killed with SIGKILL, another one started --", flush=True)
        with _worker(model, run_dir, options.threads) as worker:
            stored.answer(worker, stored.turn_count)
            saved += _flush(worker)
        stats = client.stats()
    fine = report(recomputed.turns, stored.turns, stats, saved)
    print(f"\nDone in {time.perf_counter() - begun:.0f} s.")
    return 0 if fine else 1


def report(recomputed: list[Turn], stored: list[Turn], stats: Any, saved_bytes: int) -> bool:
    """Prints what came of both runs; whether it is as it should be."""
    differences, swapped = compare(recomputed, stored)
    prompt = sum(turn.result["prompt_tokens"] for turn in stored)
    reused = sum(turn.result["reused_tokens"] for turn in stored)
    loaded = sum(turn.result["loaded_bytes"] for turn in stored)
    lookups = sum(space.lookups for space in stats.namespaces)
    hits = sum(space.hits for space in stats.namespaces)
    later = [(a, b) for a, b in zip(recomputed, stored, strict=True) if a.number >= 2]
    before = [a.result["ttft_s"] for a, _ in later]
    after = [b.result["ttft_s"] for _, b in later]

    print(f"\n{'time to first token, turns >= 2':34} {'recomputed':>12} {'with store':>12} {'ratio':>8}")
    measures: list[tuple[str, Callable[[list[float]], float]]] = [
        ("mean", statistics.fmean),
        ("95th percentile", _p95),
        (f"sum of {len(later)} turns", sum),
    ]
    for name, measure in measures:
        a, b = measure(before), measure(after)
        print(f"  {name:32} {a:10.3f} s {b:10.3f} s {b / a:8.3f}")
    print(f"{'tokens of prompts, all turns':34} {prompt:12,}")
    print(f"  {'reused from the store':32} {reused:12,} = {reused / prompt:.1%}")
    print(f"{'chunks looked up':34} {lookups:12,}")
    print(f"  {'hits':32} {hits:12,} = {hits / max(1, lookups):.1%} (a miss: what nobody had said before)")
    print(f"{'longest history, tokens':34} {max(turn.result['prompt_tokens'] for turn in stored):12,}")
    print(f"{'KV saved':34} {saved_bytes / 2**20:8.1f} MiB")
    print(f"{'KV loaded':34} {loaded / 2**20:8.1f} MiB")
    total = sum(len(turn.tokens) for turn in recomputed)
    print(f"{'generated tokens':34} {total:12,}")
    if differences:
        print(f"  DIFFERENT ANSWERS: {len(differences)}")
    elif swapped:
        print(f"  {'identical but for':32} {len(swapped):12,} near-ties, logits closer than {GAP_MAX}")
    else:
        print(f"  {'all identical to recomputation':32} {'yes':>12}")
    for line in (*swapped, *differences):
        print(f"    {line}")
    goal = sum(after) <= sum(before) / 5
    print(f"{'goal: sum at most 1/5':34} {'met' if goal else 'MISSED':>12}")
    if not reused:
        print("NOTHING WAS REUSED")
    return not differences and reused > 0


def compare(recomputed: list[Turn], stored: list[Turn]) -> tuple[list[str], list[str]]:
    """Answers that differ and should not, and those that differ first where recomputation itself was undecided."""
    differences, swapped = [], []
    for a, b in zip(recomputed, stored, strict=True):
        if a.tokens == b.tokens:
            continue
        shorter = min(len(a.tokens), len(b.tokens))
        place = next((n for n in range(shorter) if a.tokens[n] != b.tokens[n]), shorter)
        gap = a.result["gaps"][place] if place < len(a.tokens) else float("inf")
        line = f"{a.conversation} turn {a.number}, token {place}: {a.tokens[place : place + 1]}"
        (swapped if gap < GAP_MAX else differences).append(f"{line}, top-2 logit gap {gap:.2e}")
    return differences, swapped


@contextmanager
def _worker(model: DemoModel, run_dir: str, threads: int) -> Iterator[Worker]:
    worker = Worker(model, run_dir, threads)
    try:
        yield worker
    finally:
        if worker.process.poll() is None:
            worker.close()


@contextmanager
def _daemon(options: argparse.Namespace) -> Iterator[tuple[str, Client]]:
    """A daemon in a directory of its own, and a client to ask it for figures."""
    folder = tempfile.mkdtemp(prefix="kvs-")  # short: the path of a unix socket is bounded
    settings = (
        f"--run-dir={folder}",
        f"--dram-bytes={options.dram}",
        "--segment-bytes=64M",
        "--log-level=warning",
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "kvstore", *settings],
        stdin=subprocess.DEVNULL,
        preexec_fn=_end_with_parent,
    )
    try:
        with _connected(folder, process) as client:
            yield folder, client
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        shutil.rmtree(folder, ignore_errors=True)


def _connected(run_dir: str, process: subprocess.Popen[bytes]) -> Client:
    deadline = time.monotonic() + START_S
    while True:
        try:
            return connect(run_dir, timeout_s=1.0)
        except Unavailable as error:
            if process.poll() is not None:
                raise SystemExit(f"kvstored ended with status {process.returncode}") from None
            if time.monotonic() > deadline:
                raise SystemExit(f"kvstored does not answer: {error}") from None


def _end_with_parent() -> None:
    """Also when we are killed, nothing is left running."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _flush(worker: Worker) -> int:
    reply = worker.ask(flush=30.0)
    if not reply["flushed"]:
        raise SystemExit("the worker could not save its KV within 30 s")
    return int(reply["counters"].get("bytes_saved", 0))


@contextmanager
def _alarm(seconds: float, problem: str) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise SystemExit(f"{problem} within {seconds:.0f} s")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _p95(values: list[float]) -> float:
    return sorted(values)[max(0, -(-len(values) * 95 // 100) - 1)]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2, help="threads that compute")
    parser.add_argument("--conversations", type=int, default=len(CONVERSATIONS), help="how many of them")
    parser.add_argument("--answer-tokens", type=int, default=20, help="length of an answer at most")
    parser.add_argument("--dram", default="768M", help="size of the daemon's arena")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
