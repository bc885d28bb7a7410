"""What kvstored is for, on this machine: conversations that come back, and why it should know who comes next.

First a small model answers conversations twice: computing each history anew, and with kvstored beside it. The worker is
killed half-way, later the daemon is started anew, and every token is compared. Then a model with as much KV as large
ones have answers requests whose KV lies on an SSD, twice: the queue is told to the daemon, or not (`lookahead.py`).
Leaves nothing running, and nothing behind but the models in .cache/.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # the examples lie beside one another, in no package

from kvstore.startup import loading

with loading("the demo", extra="worker"):
    import lookahead
    from conversations import CONVERSATIONS, SYSTEM
    from models import DemoModel, prepare
    from processes import CACHE, Daemon, Figures, Worker, worker_process

    from kvstore.config import load, parse_setting
    from kvstore.errors import ConfigError
    from kvstore.scheduler.hints import HintedQueue
    from kvstore.scheduler.job_queue import Job, JobQueue

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


@dataclass
class Conversation:
    name: str
    messages: list[str]
    tokens: list[int] = field(default_factory=list)
    """The request that is to be answered next: all that was said so far."""
    turn: int = 0


@dataclass(frozen=True)
class Turn:
    """One answered turn; `result` is what `Worker.ask` returned."""

    conversation: str
    number: int
    result: dict[str, Any]

    @property
    def tokens(self) -> list[int]:
        return list(self.result["tokens"])


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
    # Hints of first turns are rejected: nobody has recorded these sessions yet, and nothing is wrong with that
    logging.getLogger("kvstore.scheduler.hints").setLevel(logging.ERROR)
    model = prepare(CACHE / "models", random=options.random)

    print(f"\n1. {model.name}: every history is computed anew ({options.threads} threads)")
    print("   (so small a model is quick, and not much of a reader)", flush=True)
    recomputed = Run(model, options)
    with worker_process(model, "", options.threads) as worker:
        recomputed.answer(worker, recomputed.turn_count)

    stored, figures = with_store(model, options, recomputed.turns)
    fine = report(recomputed.turns, stored, figures)
    fine = lookahead.show(CACHE, options.threads, small=options.random) and fine
    print(f"\nDone in {time.perf_counter() - begun:.0f} s.")
    return 0 if fine else 1


def with_store(
    model: DemoModel, options: argparse.Namespace, follow: list[Turn]
) -> tuple[list[Turn], Figures]:
    """A run with a daemon of its own; the worker is killed half-way, the daemon started anew at three quarters."""
    print(f"\n2. With kvstored beside it, {options.dram} of DRAM and an SSD", flush=True)
    settings = {
        "dram_bytes": options.dram,
        "segment_bytes": SEGMENT_BYTES,
        "ssd_bytes": "2G",
        "ssd_slab_bytes": "64M",
    }
    with Daemon(settings) as daemon, closing(HintedQueue(daemon.client, model.folder.name)) as queue:
        run = Run(model, options, follow=follow, queue=queue)
        half, quarter = run.turn_count // 2, run.turn_count // 4
        with worker_process(model, daemon.run_dir, options.threads) as worker:
            run.answer(worker, half)
            daemon.figures.saved_bytes += worker.flush()
            worker.kill()
            print(f"  -- worker {worker.process.pid} killed with SIGKILL, another one started --", flush=True)
        with worker_process(model, daemon.run_dir, options.threads) as worker:
            run.answer(worker, quarter)
            daemon.figures.saved_bytes += worker.flush()
            daemon.restart()
            print("  -- kvstored stopped and started: what it kept is on the SSD --", flush=True)
            daemon.wait_promoted()
            run.answer(worker, run.turn_count)
            daemon.figures.saved_bytes += worker.flush()
        daemon.count()
    return run.turns, daemon.figures


def report(recomputed: list[Turn], stored: list[Turn], figures: Figures) -> bool:
    """Prints what came of both runs; whether it is as it should be."""
    before, now = (
        [turn.result["ttft_s"] for turn in turns if turn.number >= 2] for turns in (recomputed, stored)
    )
    print(f"\n{'':38} {'recomputed':>12} {'with kvstored':>20}")
    print("time to first token, turns >= 2")
    measures: list[tuple[str, Callable[[list[float]], float]]] = [
        ("mean", statistics.fmean),
        ("95th percentile", p95),
        (f"sum of {len(before)} turns", sum),
    ]
    for name, measure in measures:
        share = f"{measure(now):8.3f} s = {measure(now) / measure(before):6.3f}"
        print(f"  {name:36} {measure(before):10.3f} s {share:>20}")
    _row("tokens of prompts, all turns", sum(turn.result["prompt_tokens"] for turn in stored))
    _row("  reused from the store", sum(turn.result["reused_tokens"] for turn in stored))
    _row("chunks that were there when asked for", figures.hits + figures.ssd_hits)
    _row("  of these in DRAM", figures.hits)
    _row("  brought there from SSD ahead of need", figures.ahead)
    _row("KV saved, MiB", figures.saved_bytes >> 20)
    _row("KV loaded, MiB", sum(turn.result["loaded_bytes"] for turn in stored) >> 20)
    differences, swapped = compare(recomputed, stored)
    verdict = f"DIFFERENT ANSWERS: {len(differences)}" if differences else "identical to recomputation"
    if swapped and not differences:
        verdict += f" but for {len(swapped)} near-ties, logits closer than {GAP_MAX}"
    print(f"every token: {verdict}")
    for line in (*swapped, *differences):
        print(f"    {line}")
    goals = {
        "time to first token, sum: at most 1/5": sum(now) <= sum(before) / 5,
        "chunks came from SSD": figures.ahead + figures.on_demand > 0,
    }
    for goal, met in goals.items():
        print(f"goal: {goal:58} {'met' if met else 'MISSED'}")
    return not differences and any(turn.result["reused_tokens"] for turn in stored)


def _row(name: str, value: int) -> None:
    print(f"{name:38} {'':12} {value:>20,}")


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


def p95(values: list[float]) -> float:
    return sorted(values)[max(0, -(-len(values) * 95 // 100) - 1)]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=_count, default=2, help="threads that compute")
    parser.add_argument("--conversations", type=_count, default=3, help=f"how many, of {len(CONVERSATIONS)}")
    parser.add_argument("--answer-tokens", type=_count, default=12, help="length of an answer at most")
    parser.add_argument(
        "--random", action="store_true", help="tiny random models instead of SmolLM2 and of the wide one"
    )
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
