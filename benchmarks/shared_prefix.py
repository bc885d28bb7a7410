"""A batch whose prompts begin alike: KV memory, time to first token and decoding, with and without sharing.

ChunkAttention's experiment (arXiv 2402.15220, section 4.2 and table 4) scaled down: 16 requests with 1,024 prompt
tokens in common, 64 of their own and 64 to decode, in an engine that shares what is equal and in one of the same kind
that does not. The model is SmolLM2-135M in float32 where the demo has made it ready, else a random Llama of its shape,
which is as fast. Steps of both engines take turns, so that a machine whose speed drifts favours nobody; a speed-up is
the median of the rounds' own.

To keep it short, the decoding engine that shares nothing gets its KV of the common tokens by copying what was computed
once; "first token" is measured with engines that compute all there is to compute.

    make bench-shared_prefix ARGS='--quick --json'
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

# As many threads compute as there are cores: waiting ones must not spin
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvstore.benchmark import Goal, arguments, finish, heading
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.layout import CHUNK_TOKENS

BATCH, SHARED, OWN, NEW = 16, 1024, 64, 64
THREADS = 2
MEMORY_GOAL, DECODE_GOAL = 0.70, 1.5
READY = sorted((Path(__file__).parents[1] / ".cache" / "models").glob("smollm2-135m-*[0-9a-f]"))


def main() -> int:
    options = arguments(__doc__)
    options.add_argument("--only", choices=("decode", "first"), help="one of the two measurements")
    chosen = options.parse_args()
    torch.set_num_threads(THREADS)
    name, model = load()
    print(heading(__file__), f"torch {torch.__version__}, {THREADS} threads, {name}", sep=", ")
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    if chosen.only != "first":
        row = decode(model, steps=24 if chosen.quick else 48)
        rows.append(row)
        print(
            f"decoding, {BATCH} sequences, {SHARED} of {SHARED + OWN} prompt tokens shared: "
            f"{row['shared_tokens_s']:.0f} tokens/s shared, {row['unshared_tokens_s']:.0f} not, x {row['speedup']:.2f} "
            f"(processor time: x {row['cpu_speedup']:.2f}); peak KV {row['shared_peak_mib']:.0f} and "
            f"{row['unshared_peak_mib']:.0f} MiB"
        )
        goals.append(Goal("peak KV memory saved", row["memory_saved"], "of 1", MEMORY_GOAL, ">="))
        goals.append(Goal("decode throughput, shared over unshared", row["speedup"], "x", DECODE_GOAL, ">="))
    if chosen.only != "decode":
        row = first_tokens(model, requests=3 if chosen.quick else 8)
        rows.append(row)
        print(
            f"time to first token, {row['requests']} requests at once: {row['shared_ttft_s']:.2f} s on average shared, "
            f"{row['unshared_ttft_s']:.2f} s not, x {row['unshared_ttft_s'] / row['shared_ttft_s']:.2f}"
        )
    return finish(__file__, chosen, rows, goals, key=("what",))


def load() -> tuple[str, PreTrainedModel]:
    transformers.utils.logging.disable_progress_bar()
    if READY:
        model = AutoModelForCausalLM.from_pretrained(READY[-1], dtype=torch.float32)
        return "SmolLM2-135M", model.eval()
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
    return "random Llama of SmolLM2-135M's shape", LlamaForCausalLM(config).eval()


def decode(model: PreTrainedModel, *, steps: int) -> dict[str, Any]:
    """`steps` tokens of each sequence; the peaks are those of a whole run of `NEW`."""
    shared, unshared = (
        BatchEngine(model, pool_chunks=chunks(together=share), sequences_max=BATCH, share=share)
        for share in (True, False)
    )
    engines = {"shared": shared, "unshared": unshared}
    for engine in engines.values():
        for number in range(BATCH):
            engine.add(prompt(number), NEW)
        if engine is unshared:
            copy_prefix(shared, unshared)
        while len(engine.step()) < BATCH:
            pass
    seconds: dict[str, list[float]] = {"shared": [], "unshared": []}
    processor: dict[str, list[float]] = {"shared": [], "unshared": []}
    for _ in range(steps // 4):
        for name, engine in engines.items():
            began, used = time.perf_counter(), time.process_time()
            for _ in range(4):
                assert len(engine.step()) == BATCH
            seconds[name].append(time.perf_counter() - began)
            processor[name].append(time.process_time() - used)
    row: dict[str, Any] = {
        "what": "decode",
        "batch": BATCH,
        "shared_tokens": SHARED,
        "own_tokens": OWN,
        "steps": steps,
    }
    for name, engine in engines.items():
        row[f"{name}_tokens_s"] = round(4 * BATCH / statistics.median(seconds[name]), 1)
        row[f"{name}_cpu_ms_per_step"] = round(1e3 * statistics.median(processor[name]) / 4, 1)
        row[f"{name}_peak_mib"] = round(engine.pool.peak_bytes / 2**20, 1)
    for kind, took in (("", seconds), ("cpu_", processor)):
        ratios = [slow / fast for fast, slow in zip(took["shared"], took["unshared"], strict=True)]
        row[f"{kind}speedup"] = round(statistics.median(ratios), 3)
    row["memory_saved"] = round(1 - row["shared_peak_mib"] / row["unshared_peak_mib"], 3)
    return row


def copy_prefix(source: BatchEngine, target: BatchEngine) -> None:
    """What all prompts begin with has been computed in `source`: each request of `target` gets chunks of its own."""
    found = source._scheduler.running[0].chunks[: SHARED // CHUNK_TOKENS]
    for sequence in target._scheduler.waiting:
        taken = target.pool.take(len(found))
        assert taken is not None
        for mine, theirs in zip(target.pool.layers, source.pool.layers, strict=True):
            mine[taken] = theirs[found]
        sequence.chunks, sequence.computed = taken, SHARED


def first_tokens(model: PreTrainedModel, *, requests: int) -> dict[str, Any]:
    """Of so many requests that arrive at once."""
    row: dict[str, Any] = {
        "what": "first token",
        "requests": requests,
        "shared_tokens": SHARED,
        "own_tokens": OWN,
    }
    for name, share in (("shared", True), ("unshared", False)):
        engine = BatchEngine(model, pool_chunks=chunks(together=share), sequences_max=BATCH, share=share)
        for number in range(requests):
            engine.add(prompt(number), 1)
        began = time.perf_counter()
        times = [time.perf_counter() - began for _ in engine.run()]
        row[f"{name}_ttft_s"] = round(statistics.mean(times), 3)
        row[f"{name}_ttft_max_s"] = round(max(times), 3)
    return row


def prompt(number: int) -> list[int]:
    draw = torch.Generator().manual_seed(1)
    own = torch.Generator().manual_seed(2 + number)
    tokens = [
        torch.randint(0, 49_152, (SHARED,), generator=draw),
        torch.randint(0, 49_152, (OWN,), generator=own),
    ]
    return torch.cat(tokens).tolist()


def chunks(*, together: bool) -> int:
    """What all sequences need."""
    own = -(-(SHARED + OWN + NEW) // CHUNK_TOKENS) - SHARED // CHUNK_TOKENS
    return (1 if together else BATCH) * (SHARED // CHUNK_TOKENS) + BATCH * own


if __name__ == "__main__":
    raise SystemExit(main())
