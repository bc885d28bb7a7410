"""Prompts of modules: time to first token, and what a batch saves whose prompts import the same module.

After figures 5 to 8 and section 5.5 of Prompt Cache (arXiv 2311.04934), with SmolLM2-135M in float32 on a CPU (a random
Llama of its shape where the demo has not made it ready) and a daemon of its own. A module of so many tokens is in DRAM,
or on SSD (a file system of this machine: what the kernel still has in memory it reads from there); 32 tokens are the
prompt's own.

    ttft      from `add` to the first token, KV loaded out of the store
    floor     a copy of the same bytes between two arrays, and the same prompt with its KV in the pool already
    full      all of it computed: what encoding the module takes, which computes the same tokens in the same way
    prefix    the same prompt as tokens, with an exact prefix of its KV in the store: what our prefix reuse takes
    planning  text of a prompt to positions and keys, on a thread of its own in the worker
    batch     16 prompts at once that import a module of 1,024 tokens, behind the same text or each behind another

    make bench-promptcache ARGS='--quick --json'
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import Goal, arena_ready, arguments, connected, finish, heading
from shared_prefix import READY, smollm2

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from transformers import PreTrainedModel

from kvstore.client import connect
from kvstore.gpu_worker.assembly import Assembly
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.promptcache.plan import Job, Recipe, assemble, jobs
from kvstore.promptcache import ByteTokenizer, Encoding, Layout, Tokenizer, parse_prompt, parse_schema
from kvstore.types import ActionKind, ChunkKey, HintAction, Outcome

THREADS = 2
OWN, NEW, BATCH, BATCH_MODULE = 32, 16, 16, 1024
SIZES = (512, 1024, 2048, 4096, 7936)
QUICK_SIZES = (512, 1024)
SSD_SIZES = (1024, 4096)
OVERHEAD_GOAL, SPEEDUP_GOAL, MEMORY_GOAL = 1.2, 20.0, 0.7
EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "promptcache"
SEGMENT = 32 << 20


def main() -> int:
    options = arguments(__doc__)
    options.add_argument("--only", choices=("first", "ssd", "examples", "batch"), help="one part")
    options.add_argument("--sizes", type=int, nargs="+", help="tokens of the module (up to 7,936)")
    chosen = options.parse_args()
    sizes = chosen.sizes or (QUICK_SIZES if chosen.quick else SIZES)
    ssd_sizes = () if chosen.quick else chosen.sizes or SSD_SIZES
    torch.set_num_threads(THREADS)
    print(heading(__file__), f"torch {torch.__version__}, {THREADS} threads", sep=", ", flush=True)
    model = smollm2()
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    token_bytes = 46_080
    largest = max(sizes) if chosen.only in (None, "first", "ssd") else 2048
    if chosen.quick:
        print("left out (--quick): 2,048 tokens and more, modules on SSD, the batch", flush=True)
    chunks = max(-(-(largest + 256) // 64) + 4, BATCH * (BATCH_MODULE // 64 + 4))
    if chosen.only != "ssd":
        with served(model, 2 * largest * token_bytes, chunks) as engine:
            in_dram(engine, chosen, sizes, rows, goals)
    if chosen.only in (None, "ssd") and ssd_sizes:
        with served(model, 2 * largest * token_bytes, chunks, ssd=True) as engine:
            for size in ssd_sizes:
                rows.append(first_token(engine, size, rounds=5, on_ssd=True))
                print(told(rows[-1]), flush=True)
    return finish(__file__, chosen, rows, goals, key=("what", "tokens"))


def in_dram(
    engine: BatchEngine,
    chosen: Namespace,
    sizes: Sequence[int],
    rows: list[dict[str, Any]],
    goals: list[Goal],
) -> None:
    if chosen.only in (None, "first"):
        for size in sizes:
            rows.append(first_token(engine, size, rounds=3 if chosen.quick else 7))
            print(told(rows[-1]), flush=True)
            if size == 4096:
                speedup, overhead = rows[-1]["speedup"], rows[-1]["overhead"]
                goals.append(Goal("4,096 tokens: x faster", speedup, "x", SPEEDUP_GOAL, ">="))
                goals.append(Goal("4,096 tokens: of the floor", overhead, "x", OVERHEAD_GOAL, "<="))
    if chosen.only in (None, "examples") and READY:
        for name in ("travel", "code", "persona", "rag", "retrieval"):
            rows.append(example(engine, name, rounds=3))
            print(told(rows[-1]), flush=True)
    if chosen.only == "batch" or (chosen.only is None and not chosen.quick):
        for apart in (False, True):
            row = batch(engine, apart=apart)
            rows.append(row)
            print(
                f"{BATCH} prompts with one module of {BATCH_MODULE} tokens, {row['before']} before it: "
                f"peak KV {row['shared_peak_mib']:.0f} MiB shared, {row['unshared_peak_mib']:.0f} MiB not; "
                f"all first tokens after {row['shared_first_s']:.2f} s and {row['unshared_first_s']:.2f} s; "
                f"{row['shared_tokens_s']:.0f} and {row['unshared_tokens_s']:.0f} tokens/s",
                flush=True,
            )
            name = f"{row['what']}: peak KV memory saved"
            goals.append(Goal(name, row["memory_saved"], "of 1", MEMORY_GOAL, ">="))


@contextmanager
def served(
    model: PreTrainedModel, wanted_bytes: int, chunks: int, *, ssd: bool = False
) -> Iterator[BatchEngine]:
    with store(wanted_bytes, ssd=ssd) as run_dir:
        engine = BatchEngine(
            model, lambda: connect(run_dir, timeout_s=30), pool_chunks=chunks, promote_timeout_s=30
        )
        try:
            yield engine
        finally:
            engine.close()


@contextmanager
def store(wanted_bytes: int, *, ssd: bool = False) -> Iterator[str]:
    """A daemon with room for so much."""
    with tempfile.TemporaryDirectory(prefix="kv-bench-") as folder:
        size = max(8, -(-wanted_bytes // SEGMENT)) * SEGMENT
        command = [sys.executable, "-P", "-m", "kvstore", "--run-dir", folder, f"--dram-bytes={size}"]
        if ssd:
            command += [f"--ssd-dir={folder}/ssd", f"--ssd-bytes={size + (1 << 30)}"]
        process = subprocess.Popen(
            [*command, f"--segment-bytes={SEGMENT}", "--log-level=error"], stderr=subprocess.DEVNULL
        )
        try:
            with connected(folder, process) as client:
                arena_ready(client)
            yield folder
        finally:
            process.terminate()
            process.wait(30)


def first_token(engine: BatchEngine, size: int, *, rounds: int, on_ssd: bool = False) -> dict[str, Any]:
    """A schema whose only module has `size` tokens: bytes of a text that says nothing (what is timed does not care)."""
    words = torch.randint(97, 122, (size,), generator=torch.Generator().manual_seed(size)).tolist()
    schema = f'<schema name="bench">Read. <module name="m">{bytes(words).decode()}</module></schema>'
    return measured(
        engine,
        "module on SSD" if on_ssd else "module",
        size,
        schema,
        "<m/>",
        [chr(65 + n % 26) * OWN for n in range(2 * rounds + 1)],
        ByteTokenizer(),
        on_ssd=on_ssd,
    )


def example(engine: BatchEngine, name: str, *, rounds: int) -> dict[str, Any]:
    """One of examples/promptcache, as it is, with the model's own tokenizer."""
    from transformers import AutoTokenizer

    from kvstore.promptcache import HuggingFaceTokenizer

    tokenizer = HuggingFaceTokenizer(AutoTokenizer.from_pretrained(READY[-1]))
    schema = (EXAMPLES / f"{name}.xml").read_text()
    prompt = (EXAMPLES / f"{name}_prompt.xml").read_text()
    return measured(engine, name, 0, schema, prompt, [""] * (2 * rounds + 1), tokenizer)


def measured(
    engine: BatchEngine,
    what: str,
    size: int,
    text: str,
    prompt: str,
    asked: list[str],
    tokenizer: Tokenizer,
    *,
    on_ssd: bool = False,
) -> dict[str, Any]:
    schema = parse_schema(text)
    assert engine.namespace is not None
    layout = Layout(schema, tokenizer, positions_max=engine.positions_max)
    encoding = Encoding(layout, engine.namespace.salt, chunk_tokens=engine.pool.geometry.chunk_tokens)
    made = list(jobs(encoding, salt=engine.namespace.salt))
    full_s = sum(encode(engine, job) for job in made)
    assert engine.flush(60)
    assert not engine.save_counters["modules_dropped"], "a module found no room"
    planning, plans = [], []
    for own in asked:
        begun = time.perf_counter()
        body = f'<prompt schema="{schema.name}">{prompt}{own}</prompt>' if own else prompt
        placement = layout.place(parse_prompt(body, schema))
        plan = assemble(encoding, placement, salt=engine.namespace.salt, moves=engine.moves, recipe=Recipe())
        planning.append(time.perf_counter() - begun)
        assert plan is not None
        plans.append(plan)
    loaded, kept, copies = [], [], []
    stored = sum(part.count for part in plans[0].parts)
    token_bytes = engine.pool.geometry.token_bytes * engine.pool.geometry.layers
    source = np.ones((stored, token_bytes), np.uint8)
    target = np.zeros_like(source)
    first_token_of(engine, plans.pop())  # pages and threads are warm after it
    keys = [part.key for part in plans[0].parts]
    for cold, warm in zip(plans[::2], plans[1::2], strict=True):
        engine.pool.forget()
        if on_ssd:
            to_ssd(engine, keys)
        loaded.append(first_token_of(engine, cold))
        kept.append(first_token_of(engine, warm))
        begun = time.perf_counter()
        np.copyto(target, source)
        copies.append(time.perf_counter() - begun)
    prefix = [] if on_ssd or not size else prefix_reuse(engine, plans[0], len(loaded))
    ttft, floor = statistics.median(loaded), statistics.median(copies) + statistics.median(kept)
    return {
        "what": what,
        "tokens": stored,
        "own_tokens": len(plans[0].tokens) - stored,
        "kib_a_token": token_bytes / 1024,
        "stored_kib_a_token": len(keys) * engine.pool.geometry.shard_bytes / 1024 / stored,
        "ttft_ms": 1e3 * ttft,
        "kept_ms": 1e3 * statistics.median(kept),
        "copy_ms": 1e3 * statistics.median(copies),
        "planning_ms": 1e3 * statistics.median(planning),
        "prefix_ms": 1e3 * statistics.median(prefix) if prefix else None,
        "full_ms": 1e3 * full_s if size else None,
        "speedup": full_s / ttft if size else None,
        "overhead": ttft / floor,
    }


def encode(engine: BatchEngine, job: Job) -> float:
    begun = time.perf_counter()
    engine.add(job.assembly.tokens, 1, assembly=job.assembly)
    for _ in engine.run():
        pass
    return time.perf_counter() - begun


def first_token_of(engine: BatchEngine, assembly: Assembly) -> float:
    begun = time.perf_counter()
    number = engine.add(assembly.tokens, 1, assembly=assembly)
    reused = engine.request(number).reused
    for _ in engine.run():
        pass
    seconds = time.perf_counter() - begun
    assert reused.tokens >= sum(part.count for part in assembly.parts) - 1, (reused, assembly)
    return seconds


def to_ssd(engine: BatchEngine, keys: Sequence[ChunkKey]) -> None:
    """These leave DRAM."""
    namespace = engine.namespace
    assert namespace is not None
    deadline = time.monotonic() + 60
    while Outcome.HIT in namespace.match(keys).outcomes:
        assert time.monotonic() < deadline, "the modules stay in DRAM"
        namespace.apply_actions([HintAction(b"bench", ActionKind.DEMOTE, keys=tuple(keys))])
        time.sleep(0.05)
    namespace.apply_actions([], cancelled=[b"bench"])


def prefix_reuse(engine: BatchEngine, plan: Assembly, rounds: int) -> list[float]:
    """The same tokens as an ordinary prompt, whose KV but for the last `OWN` tokens is in the store by prefix."""
    stored = sum(part.count for part in plan.parts)
    engine.turn("", plan.tokens[:stored], 1)
    assert engine.flush(60)
    found = []
    for number in range(rounds):
        engine.pool.forget()
        turn = engine.turn("", [*plan.tokens[:stored], *(97 + (number + at) % 26 for at in range(OWN))], 1)
        assert turn.reused_tokens >= stored - 64, turn.reused
        found.append(turn.ttft_s)
    return found


def batch(engine: BatchEngine, *, apart: bool) -> dict[str, Any]:
    """All at once, each with a question of its own, in engines that share and that do not. `apart`: behind text of
    another length in each prompt, so that the module stands at 16 places."""
    words = torch.randint(97, 122, (BATCH_MODULE,), generator=torch.Generator().manual_seed(3)).tolist()
    schema = parse_schema(
        f'<schema name="batch">Read. <module name="m">{bytes(words).decode()}</module></schema>'
    )
    assert engine.namespace is not None
    layout = Layout(schema, ByteTokenizer(), positions_max=engine.positions_max)
    encoding = Encoding(layout, engine.namespace.salt, chunk_tokens=engine.pool.geometry.chunk_tokens)
    for job in jobs(encoding, salt=engine.namespace.salt):
        encode(engine, job)
    assert engine.flush(60)
    plans = []
    for number in range(BATCH):
        first = f"{'x' * (number + 1)}: " if apart else ""
        text = f'<prompt schema="batch">{first}<m/>{chr(65 + number) * OWN}</prompt>'
        placement = layout.place(parse_prompt(text, schema))
        plan = assemble(encoding, placement, salt=engine.namespace.salt, moves=engine.moves, recipe=Recipe())
        assert plan is not None
        plans.append(plan)
    before = "different text" if apart else "the same text"
    row: dict[str, Any] = {"what": f"batch, {before}", "before": before, "tokens": BATCH_MODULE}
    for name, share in (("shared", True), ("unshared", False)):
        engine.pool.forget()
        scheduler = engine._scheduler
        before, scheduler._share = scheduler._share, share
        engine.pool.peak_chunks = 0
        begun = time.perf_counter()
        for plan in plans:
            engine.add(plan.tokens, NEW, assembly=plan)
        firsts: set[int] = set()
        first_s = 0.0
        count = 0
        for output in engine.run():
            count += 1
            firsts.add(output.request)
            first_s = first_s or (time.perf_counter() - begun if len(firsts) == BATCH else 0.0)
        row[f"{name}_first_s"] = first_s
        row[f"{name}_tokens_s"] = count / (time.perf_counter() - begun)
        row[f"{name}_peak_mib"] = engine.pool.peak_bytes / (1 << 20)
        scheduler._share = before
    row["memory_saved"] = 1 - row["shared_peak_mib"] / row["unshared_peak_mib"]
    return row


def told(row: dict[str, Any]) -> str:
    full = f", all computed {row['full_ms']:.0f} ms (x {row['speedup']:.1f})" if row["full_ms"] else ""
    prefix = f", by exact prefix {row['prefix_ms']:.0f} ms" if row["prefix_ms"] else ""
    return (
        f"{row['what']}, {row['tokens']} tokens stored and {row['own_tokens']} computed: first token after "
        f"{row['ttft_ms']:.0f} ms, x {row['overhead']:.2f} of copy {row['copy_ms']:.0f} + compute "
        f"{row['kept_ms']:.0f} ms{full}{prefix}; planning {row['planning_ms']:.1f} ms"
    )


if __name__ == "__main__":
    sys.exit(main())
