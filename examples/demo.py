"""A small model answers conversations three times: computing each history anew, and twice with kvstored beside it.

The store's DRAM is so small that most conversations live on SSD. In one run the queue of waiting jobs is told to the
daemon, which brings their KV to DRAM ahead of them; in the other it is not. In both the worker process is killed
half-way, and later the daemon is started anew: what they knew is in the store. Then all runs are compared, token by
token. Leaves nothing running, and nothing behind but the model in .cache/.
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).parent))  # the examples lie beside one another, in no package

from conversations import CONVERSATIONS, SYSTEM
from models import DemoModel, prepare

from kvstore.client import Client, connect
from kvstore.config import load, parse_setting
from kvstore.errors import ConfigError, Unavailable
from kvstore.scheduler.hints import HintedQueue
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
    # Importing these makes folders, wherever they are told to.
    "TORCHINDUCTOR_CACHE_DIR": str(CACHE / "torch"),
    "HF_HOME": str(CACHE / "huggingface"),
}
SEGMENT_BYTES = 32 << 20
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
            process_group=0,  # Ctrl-C is for us to answer: a child would only add its own traceback
        )
        try:
            self._read()
        except BaseException:
            self.kill()
            raise

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


@dataclass
class Figures:
    """What the daemon counted, over all its lives."""

    lookups: int = 0
    hits: int = 0
    """In DRAM when asked for."""
    ssd_hits: int = 0
    ahead: int = 0
    on_demand: int = 0
    saved_bytes: int = 0

    @property
    def in_dram(self) -> float:
        return self.hits / max(1, self.hits + self.ssd_hits)


class Daemon:
    """A daemon in directories of its own, which are removed at the end, and a client to ask it for figures."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.figures = Figures()
        self.run_dir = tempfile.mkdtemp(prefix="kvs-")  # short: the path of a unix socket is bounded
        self._ssd_dir = tempfile.mkdtemp(prefix="demo-ssd-", dir=CACHE)
        self._options = options

    def __enter__(self) -> Self:
        self._process = self._start()
        self.client = _connected(self.run_dir, self._process)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._stop()
        for folder in (self.run_dir, self._ssd_dir):
            shutil.rmtree(folder, ignore_errors=True)

    def restart(self) -> None:
        """Stopped in good order, started again; clients reconnect by themselves."""
        self.count()
        self._stop()
        self._process = self._start()
        self.client.wait_connected(START_S)

    def count(self) -> None:
        """Adds what this life of the daemon counted."""
        stats = self.client.stats()
        for space in stats.namespaces:
            self.figures.lookups += space.lookups
            self.figures.hits += space.hits - space.ssd_hits
            self.figures.ssd_hits += space.ssd_hits
        self.figures.ahead += stats.counters["chunks_promoted_ahead"]
        self.figures.on_demand += stats.counters["chunks_promoted_on_demand"]

    def wait_promoted(self) -> None:
        """Until the daemon has heard of the queue again and brought what it could, or for three seconds."""
        deadline = time.monotonic() + 3.0
        promoted = -1
        while time.monotonic() < deadline:
            before, promoted = promoted, self.client.stats().counters["chunks_promoted_ahead"]
            if promoted and promoted == before:
                return
            time.sleep(0.1)

    def _start(self) -> subprocess.Popen[bytes]:
        settings = (
            f"--run-dir={self.run_dir}",
            f"--dram-bytes={self._options.dram}",
            f"--segment-bytes={SEGMENT_BYTES}",
            f"--ssd-dir={self._ssd_dir}",
            "--ssd-bytes=2G",
            "--ssd-slab-bytes=64M",
            "--log-level=warning",
        )
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "kvstore", *settings],
            stdin=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=_end_with_parent,
        )

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)


class Run:
    """All conversations, answered through a queue of jobs: a turn of one, a turn of the next, and so on."""

    def __init__(
        self,
        model: DemoModel,
        options: argparse.Namespace,
        follow: list[Turn] | None = None,
        queue: JobQueue | None = None,
    ) -> None:
        """`follow`: turns of an earlier run, whose answers stand in the histories of this one too, so that a token
        that differs is judged where it stands and does not change the turns after it."""
        self.turns: list[Turn] = []
        self._model = model
        self._options = options
        self._follow = {(turn.conversation, turn.number): turn.tokens for turn in follow or ()}
        self._queue = queue if queue is not None else JobQueue()  # an empty one is false
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
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # for every process that is started from here
    model = prepare(CACHE / "models", random=options.random)

    print(f"\n1. {model.name}: every history is computed anew ({options.threads} threads)")
    print("   (so small a model is quick, and not much of a reader)", flush=True)
    recomputed = Run(model, options)
    with _worker(model, "", options.threads) as worker:
        recomputed.answer(worker, recomputed.turn_count)

    hinted, hinted_figures = with_store(2, model, options, recomputed.turns, hints=True)
    plain, plain_figures = with_store(3, model, options, recomputed.turns, hints=False)
    fine = report(recomputed.turns, (hinted, plain), (hinted_figures, plain_figures))
    print(f"\nDone in {time.perf_counter() - begun:.0f} s.")
    return 0 if fine else 1


def with_store(
    number: int, model: DemoModel, options: argparse.Namespace, follow: list[Turn], *, hints: bool
) -> tuple[list[Turn], Figures]:
    """One run with a daemon of its own; the worker is killed half-way, the daemon started anew at three quarters."""
    how = "and told what is in the queue" if hints else "and told nothing of the queue"
    print(f"\n{number}. With kvstored beside it, {options.dram} of DRAM and an SSD, {how}", flush=True)
    with Daemon(options) as daemon, ExitStack() as ending:
        queue = HintedQueue(daemon.client, model.folder.name) if hints else JobQueue()
        if isinstance(queue, HintedQueue):
            ending.callback(queue.close)
        run = Run(model, options, follow=follow, queue=queue)
        half, quarter = run.turn_count // 2, run.turn_count // 4
        with _worker(model, daemon.run_dir, options.threads) as worker:
            run.answer(worker, half)
            daemon.figures.saved_bytes += _flush(worker)
            worker.kill()
            print(f"  -- worker {worker.process.pid} killed with SIGKILL, another one started --", flush=True)
        with _worker(model, daemon.run_dir, options.threads) as worker:
            run.answer(worker, quarter)
            daemon.figures.saved_bytes += _flush(worker)
            daemon.restart()
            print("  -- kvstored stopped and started: what it kept is on the SSD --", flush=True)
            if isinstance(queue, HintedQueue):
                daemon.wait_promoted()
            run.answer(worker, run.turn_count)
            daemon.figures.saved_bytes += _flush(worker)
        daemon.count()
    return run.turns, daemon.figures


def report(recomputed: list[Turn], stored: tuple[list[Turn], ...], figures: tuple[Figures, ...]) -> bool:
    """Prints what came of all runs; whether it is as it should be."""
    later = [turn.result["ttft_s"] for turn in recomputed if turn.number >= 2]
    each = [[turn.result["ttft_s"] for turn in turns if turn.number >= 2] for turns in stored]
    print(f"\n{'':34} {'recomputed':>12} {'with hints':>20} {'without hints':>20}")
    print("time to first token, turns >= 2")
    measures: list[tuple[str, Callable[[list[float]], float]]] = [
        ("mean", statistics.fmean),
        ("95th percentile", _p95),
        (f"sum of {len(later)} turns", sum),
    ]
    for name, measure in measures:
        cells = [f"{measure(times):8.3f} s = {measure(times) / measure(later):6.3f}" for times in each]
        print(f"  {name:32} {measure(later):10.3f} s {cells[0]:>20} {cells[1]:>20}")
    _row("tokens of prompts, all turns", [sum(t.result["prompt_tokens"] for t in turns) for turns in stored])
    _row("  reused from the store", [sum(t.result["reused_tokens"] for t in turns) for turns in stored])
    _row("chunks looked up", [f.lookups for f in figures])
    _row("  hits", [f.hits + f.ssd_hits for f in figures])
    _row("  of these in DRAM when asked for", [f.hits for f in figures], [f.in_dram for f in figures])
    _row("  of these on SSD", [f.ssd_hits for f in figures])
    _row("chunks brought from SSD ahead", [f.ahead for f in figures])
    _row("chunks brought from SSD on demand", [f.on_demand for f in figures])
    _row("longest history, tokens", [max(t.result["prompt_tokens"] for t in turns) for turns in stored])
    _row("KV saved, MiB", [f.saved_bytes >> 20 for f in figures])
    _row("KV loaded, MiB", [sum(t.result["loaded_bytes"] for t in turns) >> 20 for turns in stored])
    _row("generated tokens", [sum(len(t.tokens) for t in turns) for turns in stored])
    fine = True
    for turns, name in zip(stored, ("with hints", "without hints"), strict=True):
        differences, swapped = compare(recomputed, turns)
        verdict = f"DIFFERENT ANSWERS: {len(differences)}" if differences else "identical to recomputation"
        if swapped and not differences:
            verdict += f" but for {len(swapped)} near-ties, logits closer than {GAP_MAX}"
        print(f"every token {name}: {verdict}")
        for line in (*swapped, *differences):
            print(f"    {line}")
        fine = fine and not differences and any(turn.result["reused_tokens"] for turn in turns)
    goals = {
        "time to first token, sum with hints: at most 1/5": sum(each[0]) <= sum(later) / 5,
        "hits in DRAM when asked for, with hints: at least 95 %": figures[0].in_dram >= 0.95,
        "chunks came from SSD": all(f.ahead + f.on_demand > 0 for f in figures),
    }
    for goal, met in goals.items():
        print(f"goal: {goal:58} {'met' if met else 'MISSED'}")
    return fine


def _row(name: str, values: list[int], shares: list[float] | None = None) -> None:
    cells = [f"{value:,}" for value in values]
    if shares is not None:
        cells = [f"{cell} = {share:6.1%}" for cell, share in zip(cells, shares, strict=True)]
    print(f"{name:34} {'':12} {cells[0]:>20} {cells[1]:>20}")


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


_prctl = ctypes.CDLL(
    None
).prctl  # found before any fork: a child of a process with threads had better take no lock


def _end_with_parent() -> None:
    """Also when we are killed, nothing is left running."""
    _prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


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
    parser.add_argument("--threads", type=_count, default=2, help="threads that compute")
    parser.add_argument("--conversations", type=_count, default=len(CONVERSATIONS), help="how many of them")
    parser.add_argument("--answer-tokens", type=_count, default=12, help="length of an answer at most")
    parser.add_argument("--random", action="store_true", help="a tiny random Llama instead of SmolLM2")
    parser.add_argument("--dram", default="160M", help="size of the daemon's arena, whole segments of 32M")
    options = parser.parse_args()
    try:  # now, not after the minutes of the first run
        load(
            {}, {}, {"dram_bytes": parse_setting("dram_bytes", options.dram), "segment_bytes": SEGMENT_BYTES}
        )
    except ConfigError as error:
        parser.error(f"--dram: {error}")
    return options


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nInterrupted. Nothing is left running.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
