"""A batch whose prompts begin alike: KV memory, time to first token and decoding, with and without sharing.

ChunkAttention's experiment (arXiv 2402.15220, section 4.2 and table 4) scaled down: 16 requests with 1,024 prompt
tokens in common, 64 of their own and 64 to decode, in an engine that shares what is equal and in one of the same kind
that does not. Two models in float32: a random Llama with as many KV heads as heads, as the paper's has (10 layers, 8
heads of 128), and SmolLM2-135M, which has a third as many and so much less KV to read (a random Llama of its shape
where the demo has not made it ready). Steps of both engines take turns, so that a machine whose speed drifts favours
nobody; a speed-up is the median of the rounds' own.

What sharing can win is bounded by what the model does beside attention, which is the same with and without it: with
torch's own linear layers three quarters of a shared step, and a speed-up of 1.3 for both models. The engine's
(`gpu_worker/linear.py`) take two thirds of that time. What is won grows with the KV that is read: with more sequences,
and with more tokens that they share.

To keep it short, the decoding engine that shares nothing gets its KV of the prompts by copying; "first token" is
measured with engines that compute all there is to compute, with SmolLM2-135M.

    make bench-shared_prefix ARGS='--quick --json'
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import Goal, arguments, finish, heading

# As many threads compute as there are cores: waiting ones spin for a moment only
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "30000")

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.layout import CHUNK_TOKENS

BATCH, SHARED, OWN, NEW = 16, 1024, 64, 64
THREADS = min(2, len(os.sched_getaffinity(0)))
ROUND_STEPS = 2  # of one engine, then as many of the other
VOCABULARY = 8192  # tokens that all models know
MEMORY_GOAL, DECODE_GOAL = 0.70, 1.5
READY = sorted((Path(__file__).parents[1] / ".cache" / "models").glob("smollm2-135m-*[0-9a-f]"))


def main() -> int:
    options = arguments(__doc__)
    options.add_argument(
        "--only", choices=(*MODELS, "first"), help="decoding with one model, or first tokens"
    )
    chosen = options.parse_args()
    torch.set_num_threads(THREADS)
    print(heading(__file__), f"torch {torch.__version__}, {THREADS} threads", sep=", ", flush=True)
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    for name, load in MODELS.items():
        if chosen.only not in (None, name):
            continue
        row = decode(name, load(), steps=8 if chosen.quick else 32)
        rows.append(row)
        print(
            f"decoding with {name}, {BATCH} sequences, {SHARED} of {SHARED + OWN} prompt tokens shared: "
            f"{row['shared_tokens_s']:.0f} tokens/s shared, {row['unshared_tokens_s']:.0f} not, "
            f"x {row['speedup']:.2f} (processor time: x {row['cpu_speedup']:.2f}); peak KV "
            f"{row['shared_peak_mib']:.0f} and {row['unshared_peak_mib']:.0f} MiB",
            flush=True,
        )
        goals.append(Goal(f"{name}: peak KV memory saved", row["memory_saved"], "of 1", MEMORY_GOAL, ">="))
        goals.append(
            Goal(f"{name}: decode throughput, shared over unshared", row["speedup"], "x", DECODE_GOAL, ">=")
        )
    if chosen.only == "first" or (chosen.only is None and not chosen.quick):  # it has no goal
        row = first_tokens(smollm2(), requests=2 if chosen.quick else 8)
        rows.append(row)
        print(
            f"time to first token, {row['requests']} requests at once: {row['shared_ttft_s']:.2f} s on average "
            f"shared, {row['unshared_ttft_s']:.2f} s not, x {row['unshared_ttft_s'] / row['shared_ttft_s']:.2f}",
            flush=True,
        )
    return finish(__file__, chosen, rows, goals, key=("what", "model"))


def smollm2() -> PreTrainedModel:
    transformers.utils.logging.disable_progress_bar()
    if READY:
        return AutoModelForCausalLM.from_pretrained(READY[-1], dtype=torch.float32).eval()
    return random_llama(vocab_size=49_152, hidden_size=576, layers=30, heads=9, kv_heads=3, inside=1536)


def as_in_the_paper() -> PreTrainedModel:
    """Few words, so that the last layer weighs as little as in a large model."""
    return random_llama(vocab_size=8192, hidden_size=1024, layers=10, heads=8, kv_heads=8, inside=2816)


def random_llama(
    *, vocab_size: int, hidden_size: int, layers: int, heads: int, kv_heads: int, inside: int
) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=inside,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


MODELS = {"Llama": as_in_the_paper, "SmolLM2-135M": smollm2}


def decode(name: str, model: PreTrainedModel, *, steps: int) -> dict[str, Any]:
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
            copy_prompts(shared, unshared)
        while len(engine.step()) < BATCH:
            assert engine.live == BATCH
    seconds: dict[str, list[float]] = {"shared": [], "unshared": []}
    processor: dict[str, list[float]] = {"shared": [], "unshared": []}
    for _ in range(steps // ROUND_STEPS):
        for way, engine in engines.items():
            began, used = time.perf_counter(), time.process_time()
            for _ in range(ROUND_STEPS):
                assert len(engine.step()) == BATCH
            seconds[way].append(time.perf_counter() - began)
            processor[way].append(time.process_time() - used)
    row: dict[str, Any] = {
        "what": "decode",
        "model": name,
        "batch": BATCH,
        "shared_tokens": SHARED,
        "own_tokens": OWN,
        "steps": steps,
    }
    for way, engine in engines.items():
        row[f"{way}_tokens_s"] = round(ROUND_STEPS * BATCH / statistics.median(seconds[way]), 1)
        row[f"{way}_cpu_ms_per_step"] = round(1e3 * statistics.median(processor[way]) / ROUND_STEPS, 1)
        row[f"{way}_peak_mib"] = round(engine.pool.peak_bytes / 2**20, 1)
    for kind, took in (("", seconds), ("cpu_", processor)):
        ratios = [slow / fast for fast, slow in zip(took["shared"], took["unshared"], strict=True)]
        row[f"{kind}speedup"] = round(statistics.median(ratios), 3)
    row["memory_saved"] = round(1 - row["shared_peak_mib"] / row["unshared_peak_mib"], 3)
    return row


def copy_prompts(source: BatchEngine, target: BatchEngine) -> None:
    """What has been computed of all prompts in `source`, but for the last token: for each request of `target` in chunks
    of its own."""
    computed = {tuple(twin.tokens[: SHARED + OWN]): twin.chunks for twin in source._scheduler.running}
    for sequence in target._scheduler.waiting:
        found = computed[tuple(sequence.tokens)][: -(-(SHARED + OWN) // CHUNK_TOKENS)]
        taken = target.pool.take(len(found))
        assert taken is not None
        for mine, theirs in zip(target.pool.layers, source.pool.layers, strict=True):
            mine[taken] = theirs[found]
        sequence.chunks, sequence.computed = taken, SHARED + OWN - 1


def first_tokens(model: PreTrainedModel, *, requests: int) -> dict[str, Any]:
    """Of so many requests that arrive at once."""
    row: dict[str, Any] = {
        "what": "first token",
        "model": "SmolLM2-135M",
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
        torch.randint(0, VOCABULARY, (SHARED,), generator=draw),
        torch.randint(0, VOCABULARY, (OWN,), generator=own),
    ]
    return torch.cat(tokens).tolist()


def chunks(*, together: bool) -> int:
    """What all sequences need, and some to spare."""
    own = -(-(SHARED + OWN + NEW) // CHUNK_TOKENS) - SHARED // CHUNK_TOKENS
    return (1 if together else BATCH) * (SHARED // CHUNK_TOKENS) + BATCH * (own + 3)


if __name__ == "__main__":
    raise SystemExit(main())
