"""Time to first token of a conversation's next turn: history recomputed, loaded from SSD or DRAM, or still in the pool;
and what an engine with and without the store does with many requests.

A Llama of SmolLM2-135M's shape (30 layers, 3 KV heads of 64, fp32; random weights, which are as fast as trained ones)
reads 32 new tokens after histories of several lengths. The ways take turns, so that a busy machine slows all of them;
figures are medians. "kept" is the floor: the same engine, whose pool has kept the history's KV. From SSD: the daemon
was told to demote the history, and its files may be in the page cache.

Further parts, which --quick cuts short:

  choices    what the engine makes of KV on a disk that reads 200, 20 or 5 MB/s: load, compute, or both; how often the
             next turn is more than 5 % slower than recomputing
  arrivals   Poisson arrivals of next turns, one request at a time and up to 16: tokens a second and time to first
             token, with the store and without (AttentionStore's figures 13 to 16 in small)
  documents  documents of 4k to 28k tokens with tasks behind them, on a random model with a window of 32k (figures 25
             and 26)
  shared     a long plugin prompt that all requests share, at several arrival rates: latency per token, the most KV and
             the largest batch, with the prefix tree and without (ChunkAttention's figure 5 and table 4)

    make bench-turns ARGS='--quick --json'
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import Goal, arguments, connected, finish, some

# See examples/demo.py: compute threads that spin would fight the threads that load and save for the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvstore.client import connect
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.layout import CHUNK_TOKENS
from kvstore.sim.daemon import READ_BYTES_PER_S
from kvstore.types import ActionKind, HintAction, Reason

ROOT = Path(__file__).parent.parent
NEW_TOKENS = 32
RATIO_GOAL = 0.2
RATIO_GOALS = {2048: 0.15, 7936: 0.05}
"""AttentionStore: 87 % less, and 95 % less for long sequences."""
KEPT_GOAL = 1.10
SLOWER_MAX, SLOWER_SHARE_MAX = 1.05, 0.05
"""Loading may take so much of recomputing, in all turns but this share."""
BOUND_S = 60.0
PARTS = ("turns", "choices", "arrivals", "documents", "shared")


def measure(model: LlamaForCausalLM, run_dir: str, history: int, repeats: int) -> dict[str, Any]:
    """Medians over `repeats` turns after `history` tokens (whole chunks)."""
    generator = torch.Generator().manual_seed(history)

    def text(count: int) -> list[int]:
        tokens: list[int] = torch.randint(0, 49_152, (count,), generator=generator).tolist()
        return tokens

    past = text(history)
    chunks = (history + NEW_TOKENS) // CHUNK_TOKENS + 4
    recomputing = BatchEngine(model, pool_chunks=chunks, retain=False)
    storing, from_ssd = (
        BatchEngine(
            model,
            lambda: connect(run_dir, timeout_s=BOUND_S),
            pool_chunks=chunks,
            retain=False,
            promote_timeout_s=BOUND_S,
            compute_or_load=weighing,
        )
        for weighing in (True, False)
    )
    keeping = BatchEngine(model, pool_chunks=chunks + 2 * repeats)
    times: dict[str, list[float]] = {"recomputed": [], "ssd": [], "stored": [], "kept": []}
    slow = 1 if history > 4096 else repeats  # recomputing takes minutes there
    try:
        storing.turn("", past, 1)
        keeping.turn("", past, 1)
        assert storing.flush(BOUND_S)
        for repeat in range(repeats):
            prompt = [*past, *text(NEW_TOKENS)]
            stored = storing.turn("", prompt, 1)  # without a session: a tail would keep the history in DRAM
            assert stored.reused.dram == history, stored
            times["stored"].append(stored.ttft_s)
            assert storing.flush(BOUND_S)
            if repeat < slow:
                times["recomputed"].append(recomputing.turn("", prompt, 1).ttft_s)
            kept = keeping.turn("", prompt, 1)
            assert kept.reused.hbm == history, kept
            times["kept"].append(kept.ttft_s)
            assert stored.tokens == kept.tokens, (
                "a restored history must give the token that a kept one gives"
            )
            demote(from_ssd, past)
            cold = from_ssd.turn("", prompt, 1)
            assert cold.reused.ssd == history, cold
            times["ssd"].append(cold.ttft_s)
            assert cold.tokens == kept.tokens
    finally:
        for engine in (storing, from_ssd, recomputing, keeping):
            engine.close()
    loaded_bytes = history * storing.pool.geometry.token_bytes * storing.pool.geometry.layers
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "part": "turns",
        "history_tokens": history,
        "repeats": repeats,
        "recomputed_ms": median["recomputed"] * 1e3,
        "stored_ms": median["stored"] * 1e3,
        "ssd_ms": median["ssd"] * 1e3,
        "kept_ms": median["kept"] * 1e3,
        "ratio": median["stored"] / median["recomputed"],
        "ssd_ratio": median["ssd"] / median["recomputed"],
        "over_kept": statistics.median(
            stored / kept for stored, kept in zip(times["stored"], times["kept"], strict=True)
        ),
        "loaded_mib": loaded_bytes / 2**20,
        "memcpy_ms": memcpy_ms(loaded_bytes),
    }


def demote(engine: BatchEngine, tokens: Sequence[int]) -> None:
    """Returns when the KV of these is on SSD alone."""
    namespace = engine._store._store.namespace()  # type: ignore[union-attr]
    assert namespace is not None
    keys = tuple(namespace.keys(tokens))
    deadline = time.monotonic() + BOUND_S
    for number in itertools.count():
        if all(reason is Reason.ON_SSD for reason in namespace.match(keys).reasons):
            return
        if number % 20 == 0:  # an order ends by itself after a while
            # What the engine asked for and computed instead stays for a while, as nobody took it
            namespace.read(keys, promote=False).release()
            namespace.apply_actions([HintAction(b"cold", ActionKind.DEMOTE, keys=keys)])
        assert time.monotonic() < deadline, f"in DRAM still: {namespace.match(keys)}"
        time.sleep(0.05)


def choices(
    model: LlamaForCausalLM,
    run_dir: str,
    histories: Sequence[int],
    *,
    mb_per_s: int,
    turns: int,
    warm_up: int,
) -> dict[str, Any]:
    """Next turns whose history is on a disk of that speed, by an engine that chooses and one that recomputes."""
    draw = random.Random(mb_per_s)
    pasts = [[draw.randrange(49_152) for _ in range(history)] for history in histories]
    chunks = (max(histories) + NEW_TOKENS) // CHUNK_TOKENS + 4
    choosing = BatchEngine(
        model,
        lambda: connect(run_dir, timeout_s=BOUND_S),
        pool_chunks=chunks,
        retain=False,
        compute_or_load=True,
        promote_timeout_s=BOUND_S,
    )
    recomputing = BatchEngine(model, pool_chunks=chunks, retain=False)
    ratios: list[float] = []
    noise: list[float] = []
    """The same of the engine that recomputes, asked once more: what is due to the machine."""
    made: Counter[str] = Counter()
    try:
        for past in pasts:
            choosing.turn("", past, 1)
            assert choosing.flush(BOUND_S)
        choosing._store.saver._queue_bytes_max = 0  # type: ignore[union-attr]
        for number in range(-warm_up, turns):
            past = pasts[number % len(pasts)]
            prompt = [*past, *(draw.randrange(49_152) for _ in range(NEW_TOKENS))]
            demote(choosing, past)
            computed = recomputing.turn("", prompt, 1)
            turn = choosing.turn("", prompt, 1)
            assert turn.tokens == computed.tokens or turn.gaps[0] < 1e-3, (turn, computed)
            if number >= 0:
                ratios.append(turn.ttft_s / computed.ttft_s)
                noise.append(recomputing.turn("", prompt, 1).ttft_s / computed.ttft_s)
                made[turn.choice] += 1
    finally:
        choosing.close()
        recomputing.close()
    return {
        "part": "choices",
        "history_tokens": "/".join(map(str, histories)),
        "disk_mb_per_s": mb_per_s,
        "turns": turns,
        "ratio": statistics.median(ratios),
        "ratio_max": max(ratios),
        "slower_share": sum(ratio > SLOWER_MAX for ratio in ratios) / turns,
        "slower_share_by_noise": sum(ratio > SLOWER_MAX for ratio in noise) / turns,
        "made": dict(made),
    }


def memcpy_ms(count: int) -> float:
    """What moving so many bytes costs at least: one thread, from and to memory that is there."""
    source, target = np.ones(count, np.uint8), np.zeros(count, np.uint8)
    spent = []
    for _ in range(5):
        began = time.perf_counter()
        np.copyto(target, source)
        spent.append(time.perf_counter() - began)
    return statistics.median(spent) * 1e3


# ----------------------------------------------------------------------------------------------------- many requests


def served(
    engine: BatchEngine, requests: Sequence[tuple[float, list[int], str]], answer: int
) -> dict[str, float]:
    """Requests that arrive at given times (seconds, prompt, session), served to the end."""
    begun = time.perf_counter()
    arrived: dict[int, float] = {}
    first: dict[int, float] = {}
    ended: dict[int, float] = {}
    batch_max, coming = 0, list(requests)
    while coming or engine.live:
        now = time.perf_counter() - begun
        while coming and coming[0][0] <= now:
            at, prompt, session = coming.pop(0)
            arrived[engine.add(prompt, answer, session=session)] = at
        if not engine.live:
            time.sleep(max(0.0, coming[0][0] - now))
            continue
        batch_max = max(batch_max, engine.running)
        for output in engine.step():
            now = time.perf_counter() - begun
            first.setdefault(output.request, now)
            if output.finish:
                ended[output.request] = now
    seconds = time.perf_counter() - begun
    return {
        "seconds": seconds,
        "tokens_per_s": sum(len(prompt) + answer for _, prompt, _ in requests) / seconds,
        "ttft_ms": statistics.mean(first[n] - arrived[n] for n in arrived) * 1e3,
        "token_ms": statistics.mean((ended[n] - arrived[n]) / answer for n in arrived) * 1e3,
        "peak_kv_mib": engine.pool.peak_bytes / 2**20,
        "batch_max": batch_max,
    }


def arrivals(
    model: LlamaForCausalLM,
    run_dir: str,
    *,
    at_once: int,
    sessions: int,
    history: int,
    rate: float,
    answer: int,
) -> dict[str, Any]:
    """Next turns of so many sessions, `rate` a second."""
    draw = random.Random(at_once)
    past = [[draw.randrange(49_152) for _ in range(history)] for _ in range(sessions)]
    at, requests = 0.0, []
    for number, tokens in enumerate(past):
        at += draw.expovariate(rate)
        prompt = [*tokens, *(draw.randrange(49_152) for _ in range(NEW_TOKENS))]
        requests.append((at, prompt, f"arrivals {at_once} {number}"))
    options: dict[str, Any] = {
        "pool_chunks": max(at_once, 2) * ((history + NEW_TOKENS + answer) // CHUNK_TOKENS + 2),
        "sequences_max": at_once,
        "retain": False,
    }
    before = BatchEngine(model, lambda: connect(run_dir, timeout_s=BOUND_S), **options)
    for tokens in past:
        before.turn("", tokens, 1)
    assert before.flush(BOUND_S)
    before.close()
    figures = {}
    for name in ("without", "with"):
        client = (lambda: connect(run_dir, timeout_s=BOUND_S)) if name == "with" else None
        engine = BatchEngine(model, client, load_ahead=2, **options)
        figures[name] = served(engine, requests, answer)
        engine.close()
    with_, without = figures["with"], figures["without"]
    return {
        "part": "arrivals",
        "at_once": at_once,
        "sessions": sessions,
        "history_tokens": history,
        "rate_per_s": rate,
        "tokens_per_s": with_["tokens_per_s"],
        "tokens_per_s_without": without["tokens_per_s"],
        "ttft_ms": with_["ttft_ms"],
        "ttft_ms_without": without["ttft_ms"],
        "throughput_ratio": with_["tokens_per_s"] / without["tokens_per_s"],
    }


def documents(run_dir: str, sizes: Sequence[int], *, tasks: int) -> Iterator[dict[str, Any]]:
    """Tasks behind a document, one after the other: the first computes it, the others load it."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    draw = random.Random(5)
    for size in sizes:
        document = [draw.randrange(4096) for _ in range(size)]
        options: dict[str, Any] = {
            "pool_chunks": size // CHUNK_TOKENS + 8,
            "retain": False,
            "prefill_tokens": 1024,
        }
        storing = BatchEngine(model, lambda: connect(run_dir, timeout_s=BOUND_S), **options)
        computing = BatchEngine(model, **options)
        spent: dict[str, list[float]] = {"with": [], "without": []}
        for number in range(tasks):
            prompt = [*document, *(draw.randrange(4096) for _ in range(NEW_TOKENS))]
            spent["with"].append(storing.turn("", prompt, 1).ttft_s)
            assert storing.flush(BOUND_S)
            if number < 2:  # they take the same time each
                spent["without"].append(computing.turn("", prompt, 1).ttft_s)
        storing.close()
        computing.close()
        without = statistics.mean(spent["without"])
        yield {
            "part": "documents",
            "history_tokens": size,
            "tasks": tasks,
            "first_ms": spent["with"][0] * 1e3,
            "later_ms": statistics.median(spent["with"][1:]) * 1e3,
            "without_ms": without * 1e3,
            "ratio": statistics.median(spent["with"][1:]) / without,
            "throughput_ratio": tasks * without / sum(spent["with"]),
        }


def shared(
    model: LlamaForCausalLM, *, common: int, rate: float, requests: int, answer: int
) -> dict[str, Any]:
    """Chat behind a long plugin prompt, the same for all."""
    draw = random.Random(int(100 * rate))
    system = [draw.randrange(49_152) for _ in range(common)]
    at, asked = 0.0, []
    for _ in range(requests):
        at += draw.expovariate(rate)
        asked.append((at, [*system, *(draw.randrange(49_152) for _ in range(NEW_TOKENS))], ""))
    figures = {}
    for share in (False, True):
        chunks = 32 * ((common + NEW_TOKENS + answer) // CHUNK_TOKENS + 2)
        engine = BatchEngine(model, pool_chunks=chunks, sequences_max=32, share=share)
        figures[share] = served(engine, asked, answer)
        engine.close()
    return {
        "part": "shared",
        "history_tokens": common,
        "rate_per_s": rate,
        "requests": requests,
        **{f"{name}": figures[True][name] for name in ("token_ms", "peak_kv_mib", "batch_max")},
        **{f"{name}_alone": figures[False][name] for name in ("token_ms", "peak_kv_mib", "batch_max")},
    }


@contextmanager
def daemon(*options: str, mb_per_s: int = 0) -> Iterator[str]:
    """`mb_per_s`: so fast its disk reads; 0: as it does."""
    program = "kvstore.sim.daemon" if mb_per_s else "kvstore"
    environment = os.environ | ({READ_BYTES_PER_S: str(mb_per_s * 10**6)} if mb_per_s else {})
    with tempfile.TemporaryDirectory(prefix="kvs-") as folder:
        command = [sys.executable, "-P", "-m", program, f"--run-dir={folder}/run", "--log-level=warning"]
        process = subprocess.Popen(
            [*command, "--dram-bytes=1G", "--segment-bytes=64M", *options],
            stdout=subprocess.DEVNULL,
            env=environment,
        )
        try:
            connected(f"{folder}/run", process).close()
            yield f"{folder}/run"
        finally:
            process.terminate()
            process.wait(30)


def smollm2_shape() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def main() -> int:
    options = arguments(__doc__)
    options.add_argument(
        "--threads", type=some, default=min(2, len(os.sched_getaffinity(0))), help="threads that compute"
    )
    options.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, help="which (all)")
    options.add_argument("--histories", nargs="*", type=some, help="of the part turns, in tokens")
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    model = smollm2_shape()
    quick, rows = chosen.quick, []

    def show(row: dict[str, Any]) -> None:
        rows.append(row)
        figures = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in row.items()
        )
        print(", ".join(figures), flush=True)

    rates = (200,) if quick else (200, 20, 5)
    for mb_per_s in rates if "choices" in chosen.parts else ():
        with (
            tempfile.TemporaryDirectory(prefix="kvs-ssd-") as ssd,
            daemon(f"--ssd-dir={ssd}", "--ssd-bytes=3G", mb_per_s=mb_per_s) as run_dir,
        ):
            settings = {"turns": 3, "warm_up": 2} if quick else {"turns": 20, "warm_up": 5}
            histories = (128,) if quick else (192, 448)
            show(choices(model, run_dir, histories, mb_per_s=mb_per_s, **settings))
    with (
        tempfile.TemporaryDirectory(prefix="kvs-ssd-") as ssd,
        daemon(f"--ssd-dir={ssd}", "--ssd-bytes=3G") as run_dir,
    ):
        if "turns" in chosen.parts:
            for history in chosen.histories or ((256, 512) if quick else (512, 2048, 7936)):
                show(measure(model, run_dir, history, 2 if quick else 3 if history > 4096 else 7))
        if "arrivals" in chosen.parts:
            for at_once in (4,) if quick else (1, 16):
                settings = {"sessions": 4, "history": 128, "rate": 4.0, "answer": 4}
                if not quick:
                    settings = {"sessions": 16, "history": 512, "rate": 1.0, "answer": 16}
                show(arrivals(model, run_dir, at_once=at_once, **settings))  # type: ignore[arg-type]
        if "documents" in chosen.parts:
            sizes = (2048,) if quick else (4096, 12_288, 28_672)
            for row in documents(run_dir, sizes, tasks=2 if quick else 6):
                show(row)
        if "shared" in chosen.parts:
            for rate in (4.0,) if quick else (0.5, 1.0, 2.0):
                settings = {"common": 128, "requests": 4, "answer": 4}
                if not quick:
                    settings = {"common": 1024, "requests": 16, "answer": 32}
                show(shared(model, rate=rate, **settings))  # type: ignore[arg-type]
    if quick:
        print(
            "left out: histories over 512 tokens, all but one speed of the disk, batches of 16, documents over 2k "
            "tokens, all but one arrival rate"
        )
    return finish(
        __file__,
        chosen,
        rows,
        goals_of(rows),
        key=("part", "history_tokens", "at_once", "rate_per_s", "disk_mb_per_s"),
    )


def goals_of(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    goals = []
    for row in rows:
        if row["part"] == "choices":
            what = f"a disk of {row['disk_mb_per_s']} MB/s: turns slower than {SLOWER_MAX} x recomputing"
            goals.append(Goal(what, row["slower_share"], "of 1", SLOWER_SHARE_MAX, "<="))
        if row["part"] != "turns":
            continue
        what = f"next turn after {row['history_tokens']} tokens"
        goal = RATIO_GOALS.get(row["history_tokens"], RATIO_GOAL)
        goals.append(
            Goal(f"{what}: time to first token against recomputing", row["ratio"], "ratio", goal, "<=")
        )
        goals.append(Goal(f"{what}: from SSD against recomputing", row["ssd_ratio"], "ratio", goal, "<="))
        goals.append(
            Goal(
                f"{what}: loaded from DRAM against kept in the pool",
                row["over_kept"],
                "ratio",
                KEPT_GOAL,
                "<=",
            )
        )
    return goals


if __name__ == "__main__":
    sys.exit(main())
