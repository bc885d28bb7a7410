"""Time to first token of a conversation's next turn: history recomputed, loaded from the store, or still in the pool.

A Llama of SmolLM2-135M's shape (30 layers, 3 KV heads of 64, fp32; random weights, which are as fast as trained ones)
reads 32 new tokens after histories of several lengths. The three ways take turns, so that a busy machine slows all of
them; figures are medians. "kept" is the floor: the same engine, whose pool has kept the history's KV.

    make bench-turns ARGS='--quick --json'
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import Goal, arguments, connected, finish

# See examples/demo.py: compute threads that spin would fight the threads that load and save for the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvstore.client import connect
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.layout import CHUNK_TOKENS

ROOT = Path(__file__).parent.parent
NEW_TOKENS = 32
RATIO_GOAL = 0.2
BOUND_S = 60.0


def measure(model: LlamaForCausalLM, run_dir: str, history: int, repeats: int) -> dict[str, Any]:
    """Medians over `repeats` turns after `history` tokens (whole chunks)."""
    generator = torch.Generator().manual_seed(history)

    def text(count: int) -> list[int]:
        tokens: list[int] = torch.randint(0, 49_152, (count,), generator=generator).tolist()
        return tokens

    past = text(history)
    chunks = (history + NEW_TOKENS) // CHUNK_TOKENS + 4
    recomputing = BatchEngine(model, pool_chunks=chunks, retain=False)
    storing = BatchEngine(
        model, lambda: connect(run_dir, timeout_s=BOUND_S), pool_chunks=chunks, retain=False
    )
    keeping = BatchEngine(model, pool_chunks=chunks + 2 * repeats)
    times: dict[str, list[float]] = {"recomputed": [], "stored": [], "kept": []}
    try:
        storing.turn("history", past, 1)
        keeping.turn("history", past, 1)
        assert storing.flush(BOUND_S)
        for repeat in range(repeats):
            prompt = [*past, *text(NEW_TOKENS)]
            stored = storing.turn(f"turn {repeat}", prompt, 1)
            assert stored.reused.dram == history, stored
            times["stored"].append(stored.ttft_s)
            assert storing.flush(BOUND_S)
            times["recomputed"].append(recomputing.turn("", prompt, 1).ttft_s)
            kept = keeping.turn("", prompt, 1)
            assert kept.reused.hbm == history, kept
            times["kept"].append(kept.ttft_s)
            assert stored.tokens == kept.tokens, (
                "a restored history must give the token that a kept one gives"
            )
    finally:
        for engine in (storing, recomputing, keeping):
            engine.close()
    loaded_bytes = history * storing.pool.geometry.token_bytes * storing.pool.geometry.layers
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "history_tokens": history,
        "repeats": repeats,
        "recomputed_ms": median["recomputed"] * 1e3,
        "stored_ms": median["stored"] * 1e3,
        "kept_ms": median["kept"] * 1e3,
        "ratio": median["stored"] / median["recomputed"],
        "over_kept": median["stored"] / median["kept"],
        "loaded_mib": loaded_bytes / 2**20,
        "memcpy_ms": memcpy_ms(loaded_bytes),
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


@contextmanager
def daemon() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="kvs-") as folder:
        command = [sys.executable, "-P", "-m", "kvstore", f"--run-dir={folder}/run", "--log-level=warning"]
        process = subprocess.Popen(
            [*command, "--dram-bytes=1G", "--segment-bytes=64M"], stdout=subprocess.DEVNULL
        )
        try:
            connected(f"{folder}/run", process).close()
            yield f"{folder}/run"
        finally:
            process.terminate()
            process.wait(30)


def main() -> int:
    options = arguments(__doc__)
    options.add_argument("--threads", type=int, default=2, help="threads that compute")
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
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
    model = LlamaForCausalLM(config).eval()
    rows = []
    print(
        f"{'history':>8} {'recomputed':>12} {'stored':>10} {'kept':>10} {'ratio':>7} {'loaded':>11} {'(memcpy)':>10}"
    )
    with daemon() as run_dir:
        for history in (256, 1024) if chosen.quick else (256, 512, 1024, 2048):
            row = measure(model, run_dir, history, 2 if chosen.quick else 5)
            rows.append(row)
            print(
                f"{history:>8} {row['recomputed_ms']:>9.0f} ms {row['stored_ms']:>7.0f} ms {row['kept_ms']:>7.0f} ms"
                f" {row['ratio']:>7.3f} {row['loaded_mib']:>7.1f} MiB {row['memcpy_ms']:>7.1f} ms",
                flush=True,
            )
    goals = [
        Goal(
            f"next turn after {row['history_tokens']} tokens: time to first token against recomputing",
            row["ratio"],
            "ratio",
            RATIO_GOAL,
            "<=",
        )
        for row in rows
        if row["history_tokens"] >= 1024
    ]
    return finish(__file__, chosen, rows, goals, key=("history_tokens",))


if __name__ == "__main__":
    sys.exit(main())
