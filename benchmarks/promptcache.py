"""Prompts of modules: time to first token, and what a batch saves whose prompts import the same module.

After figures 5 to 8 and section 5.5 of Prompt Cache (arXiv 2311.04934), with SmolLM2-135M in float32 on a CPU (a random
Llama of its shape where the demo has not made it ready) and a daemon of its own. A module of so many tokens is in DRAM,
or on SSD (a file system of this machine: what the kernel still has in memory it reads from there); 32 tokens are the
prompt's own.

    ttft      from `add` to the first token, KV loaded out of the store
    floor     a copy of the same bytes between two arrays, and the same prompt with its KV in the pool already; of
              modules on SSD, also a read of the same bytes from a file beside the store's
    full      all of it computed: what encoding the module takes, which computes the same tokens in the same way; of the
              examples, the whole prompt with full attention
    prefix    the same prompt as tokens, with an exact prefix of its KV in the store: what our prefix reuse takes
    planning  text of a prompt to positions and keys, on a thread of its own in the worker
    batch     16 prompts at once that import a module of 1,024 tokens, behind the same text or each behind another

Beside each time stands what this process computed in it, with all its threads: on a busy machine trust that one.

The examples are those of examples/promptcache, and where the data folder is there (`--data`) the paper's own schemas:
source files, personas, parameters. A machine with little memory runs it in parts (`--only`, `--sizes`), which `--out`
puts together.

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
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import Goal, arena_ready, arguments, connected, finish, heading, some
from shared_prefix import READY, smollm2

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from transformers import PreTrainedModel

from kvstore.client import connect
from kvstore.gpu_worker.assembly import Assembly
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.promptcache.plan import Job, Recipe, assemble, document_jobs, jobs
from kvstore.promptcache import ByteTokenizer, Encoding, Layout, Tokenizer, parse_prompt, parse_schema
from kvstore.types import ActionKind, ChunkKey, HintAction, Outcome

THREADS = min(2, len(os.sched_getaffinity(0)))
OWN, NEW, BATCH, BATCH_MODULE = 32, 16, 16, 1024
SIZES = (512, 1024, 2048, 4096, 7936)
QUICK_SIZES = (512, 1024)
SSD_SIZES = (1024, 4096)
OVERHEAD_GOAL, SPEEDUP_GOAL, MEMORY_GOAL = 1.2, 20.0, 0.7
STORED_GOAL = 1.05
"""What the store keeps of a module of 4,096 tokens, over its KV: chunks at its ends are partial."""
COPIED_AT_A_TIME = 64 << 20
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "promptcache"
SEGMENT = 32 << 20
Times = np.ndarray[Any, np.dtype[np.float64]]
"""[2]: seconds on the clock, and of processors."""
PAPERS = {
    "code (paper)": (
        "code_generation_game.xml",
        "<unit.py/><map.py/><player.py/><game.py/><database.py/>"
        "<user>Create a main entry for the game: load a map, let two players take turns.</user>",
    ),
    "persona (paper)": (
        "persona_generation.xml",
        "<age><young-adult/></age><residence><seaside/></residence><education><doctorate/></education>"
        "<occupation><technology/></occupation><martial-status><married/></martial-status>"
        "<personality><creative/></personality><user>How does this person spend a Sunday?</user>",
    ),
    "travel (paper)": (
        "parameterized_prompts.xml",
        '<travel-plan duration="3 days"><overseas><tokyo/></overseas></travel-plan>'
        "<user>Create a plan for each day.</user>",
    ),
}
"""Of figures 6 to 8: a schema of `promptcache/` in the data folder, and a prompt of ours."""
PAPERS_TOKENS_MAX = 6144
"""The game's source files have 5,464."""


def main() -> int:
    options = arguments(__doc__)
    options.add_argument("--only", choices=("first", "ssd", "examples", "batch"), help="one part")
    options.add_argument("--sizes", type=some, nargs="+", help="tokens of the module (up to 7,936)")
    options.add_argument("--data", type=Path, default=DATA, help="folder with promptcache/")
    chosen = options.parse_args()
    sizes = chosen.sizes or (QUICK_SIZES if chosen.quick else SIZES)
    ssd_sizes = () if chosen.quick else chosen.sizes or SSD_SIZES
    torch.set_num_threads(THREADS)
    print(heading(__file__), f"torch {torch.__version__}, {THREADS} threads", sep=", ", flush=True)
    model = smollm2()
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    token_bytes = 46_080
    papers = chosen.only in (None, "examples") and not chosen.quick
    largest = max(
        max(sizes) if chosen.only in (None, "first", "ssd") else 0,
        PAPERS_TOKENS_MAX if papers else 2560,
    )
    if chosen.quick:
        print("left out (--quick): 2,048 tokens and more, modules on SSD, the batch", flush=True)
    chunks = -(-(largest + 256) // 64) + 4
    if chosen.only == "batch" or (chosen.only is None and not chosen.quick):
        chunks = max(chunks, BATCH * (BATCH_MODULE // 64 + 4))
    if chosen.only != "ssd":
        # Of the paper's schemas all modules are encoded, and many are smaller than the chunk that they take
        with served(model, (4 if papers else 2) * largest * token_bytes, chunks) as engine:
            in_dram(engine, chosen, sizes, rows, goals)
    for size in ssd_sizes if chosen.only in (None, "ssd") else ():
        # A store each: the beginning that they share would stay in DRAM as long as another module there continues it
        with served(model, 2 * largest * token_bytes, chunks, ssd=True) as engine:
            rows.append(first_token(engine, size, rounds=5, on_ssd=True))
            print(told(rows[-1]), flush=True)
            name = f"{size:,} tokens on SSD: of the floor"
            goals.append(Goal(name, rows[-1]["overhead"], "x", OVERHEAD_GOAL, "<="))
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
            row, name = rows[-1], f"{size:,} tokens"
            goals.append(Goal(f"{name}: of the floor", row["overhead"], "x", OVERHEAD_GOAL, "<="))
            if size == 4096:
                kept, cpu = (
                    row["stored_kib_a_token"] / row["kib_a_token"],
                    row["full_cpu_ms"] / row["ttft_cpu_ms"],
                )
                goals.append(
                    Goal(f"{name}: faster than computing all", row["speedup"], "x", SPEEDUP_GOAL, ">=")
                )
                goals.append(Goal(f"{name}: less processor time", cpu, "x", SPEEDUP_GOAL, ">="))
                goals.append(Goal(f"{name}: stored over KV", kept, "x", STORED_GOAL, "<="))
    if chosen.only in (None, "examples") and READY:
        for name, schema, prompt in examples(chosen.data / "promptcache", quick=chosen.quick):
            rows.append(example(engine, name, schema, prompt, rounds=3))
            print(told(rows[-1]), flush=True)
            name = f"{name}: faster than computing all"
            goals.append(Goal(name, rows[-1]["speedup"], "x", 1.0, ">="))
    if chosen.only == "batch" or (chosen.only is None and not chosen.quick):
        for apart in (False, True):
            row = batch(engine, apart=apart)
            rows.append(row)
            print(
                f"{BATCH} prompts with one module of {BATCH_MODULE} tokens, {row['before']} before it: "
                f"peak KV {row['shared_peak_mib']:.0f} MiB shared, {row['unshared_peak_mib']:.0f} MiB not; "
                f"all first tokens after {row['shared_first_s']:.2f} s and {row['unshared_first_s']:.2f} s; "
                f"{row['shared_tokens_s']:.0f} and {row['unshared_tokens_s']:.0f} tokens/s; "
                f"computed {row['shared_cpu_s']:.1f} and {row['unshared_cpu_s']:.1f} s",
                flush=True,
            )
            name = row["what"]
            goals.append(
                Goal(f"{name}: peak KV memory saved", row["memory_saved"], "of 1", MEMORY_GOAL, ">=")
            )
            faster = row["shared_tokens_s"] / row["unshared_tokens_s"]
            goals.append(Goal(f"{name}: tokens/s over not sharing", faster, "x", 1.0, ">="))
            less = row["shared_cpu_s"] / row["unshared_cpu_s"]
            goals.append(Goal(f"{name}: processor time over not sharing", less, "x", 1.0, "<="))
            sooner = row["shared_first_s"] / row["unshared_first_s"]
            goals.append(Goal(f"{name}: first tokens over not sharing", sooner, "x", 1.0, "<="))


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


def examples(folder: Path, *, quick: bool) -> Iterator[tuple[str, str, str]]:
    """Name, schema, prompt."""
    for name in ("travel", "code", "persona", "rag", "retrieval"):
        yield name, (EXAMPLES / f"{name}.xml").read_text(), (EXAMPLES / f"{name}_prompt.xml").read_text()
    for name, (file, inner) in PAPERS.items():
        if not (folder / file).exists():
            print(f"{name}: left out, {file} is not in {folder}")
        elif not quick:
            schema = (folder / file).read_text()
            yield name, schema, f'<prompt schema="{parse_schema(schema).name}">{inner}</prompt>'


def example(engine: BatchEngine, name: str, schema: str, prompt: str, *, rounds: int) -> dict[str, Any]:
    """As it is, with the model's own tokenizer."""
    from transformers import AutoTokenizer

    from kvstore.promptcache import HuggingFaceTokenizer

    tokenizer = HuggingFaceTokenizer(AutoTokenizer.from_pretrained(READY[-1]))
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
    salt = engine.namespace.salt
    placed = layout.place(
        parse_prompt(f'<prompt schema="{schema.name}">{prompt}</prompt>' if size else prompt, schema)
    )
    made = [*jobs(encoding, salt=salt), *document_jobs(encoding, placed, salt=salt)]
    full = sum((encode(engine, job) for job in made), start=np.zeros(2))
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
    loaded, kept, copies, reads = [], [], [], []
    stored = sum(part.count for part in plans[0].parts)
    token_bytes = engine.pool.geometry.token_bytes * engine.pool.geometry.layers
    copied = Copied(stored * token_bytes)
    first_token_of(engine, plans.pop())  # pages and threads are warm after it
    if not size:
        whole = replace(plans[0], parts=(), recomputed=(), exact=0)
        full = median([computed_all(engine, whole) for _ in range(len(plans) // 2)])
    keys = [part.key for part in plans[0].parts]
    for cold, warm in zip(plans[::2], plans[1::2], strict=True):
        engine.pool.forget()
        if on_ssd:
            to_ssd(engine, keys)
        loaded.append(first_token_of(engine, cold))
        kept.append(first_token_of(engine, warm))
        copies.append(copied.seconds())
        if on_ssd:
            reads.append(copied.read_seconds())
    copied.close()
    prefix = [] if on_ssd or not size else prefix_reuse(engine, plans[0], len(loaded))
    (ttft, ttft_cpu), (warm_s, warm_cpu), (full_s, full_cpu) = median(loaded), median(kept), full
    floor = statistics.median(copies) + warm_s
    floor += statistics.median(reads) if reads else 0.0
    return {
        "what": what,
        "tokens": stored,
        "own_tokens": len(plans[0].tokens) - stored,
        "kib_a_token": token_bytes / 1024,
        "stored_kib_a_token": len(keys) * engine.pool.geometry.shard_bytes / 1024 / stored,
        "ttft_ms": 1e3 * ttft,
        "kept_ms": 1e3 * warm_s,
        "ttft_cpu_ms": 1e3 * ttft_cpu,
        "kept_cpu_ms": 1e3 * warm_cpu,
        "full_cpu_ms": 1e3 * full_cpu,
        "copy_ms": 1e3 * statistics.median(copies),
        "read_ms": 1e3 * statistics.median(reads) if reads else None,
        "planning_ms": 1e3 * statistics.median(planning),
        "prefix_ms": 1e3 * statistics.median(prefix) if prefix else None,
        "full_ms": 1e3 * full_s,
        "speedup": full_s / ttft,
        "overhead": ttft / floor,
    }


class Copied:
    """So many bytes, copied from array to array and read from a file, a part at a time."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._source = np.ones(min(size, COPIED_AT_A_TIME), np.uint8)
        self._target = np.zeros_like(self._source)
        self._file: IO[bytes] | None = None

    def seconds(self) -> float:
        begun = time.perf_counter()
        for at in range(0, self._size, len(self._source)):
            count = min(len(self._source), self._size - at)
            np.copyto(self._target[:count], self._source[:count])
        return time.perf_counter() - begun

    def read_seconds(self) -> float:
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  (until `close`)
            for at in range(0, self._size, len(self._source)):
                self._file.write(self._source[: self._size - at])
            self._file.flush()
        begun = time.perf_counter()
        for at in range(0, self._size, len(self._source)):
            count = min(len(self._source), self._size - at)
            os.preadv(self._file.fileno(), [self._target[:count]], at)
        return time.perf_counter() - begun

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def now() -> Times:
    return np.array([time.perf_counter(), time.process_time()])


def median(times: Sequence[Times]) -> Times:
    found: Times = np.median(np.array(times), axis=0)
    return found


def encode(engine: BatchEngine, job: Job) -> Times:
    begun = now()
    engine.add(job.assembly.tokens, 1, assembly=job.assembly)
    for _ in engine.run():
        pass
    return now() - begun


def first_token_of(engine: BatchEngine, assembly: Assembly) -> Times:
    begun = now()
    number = engine.add(assembly.tokens, 1, assembly=assembly)
    reused = engine.request(number).reused
    for _ in engine.run():
        pass
    seconds = now() - begun
    assert reused.tokens >= sum(part.count for part in assembly.parts) - 1, (reused, assembly)
    return seconds


def computed_all(engine: BatchEngine, whole: Assembly) -> Times:
    engine.pool.forget()
    return first_token_of(engine, whole)


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
        begun, cpu = time.perf_counter(), time.process_time()
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
        row[f"{name}_cpu_s"] = time.process_time() - cpu
        row[f"{name}_peak_mib"] = engine.pool.peak_bytes / (1 << 20)
        scheduler._share = before
    row["memory_saved"] = 1 - row["shared_peak_mib"] / row["unshared_peak_mib"]
    return row


def told(row: dict[str, Any]) -> str:
    full = f", all computed {row['full_ms']:.0f} ms (x {row['speedup']:.1f})"
    prefix = f", by exact prefix {row['prefix_ms']:.0f} ms" if row["prefix_ms"] else ""
    read = f" + read {row['read_ms']:.0f}" if row["read_ms"] else ""
    return (
        f"{row['what']}, {row['tokens']} tokens stored and {row['own_tokens']} computed: first token after "
        f"{row['ttft_ms']:.0f} ms, x {row['overhead']:.2f} of copy {row['copy_ms']:.0f}{read} + compute "
        f"{row['kept_ms']:.0f} ms{full}{prefix}; computed in {row['ttft_cpu_ms']:.0f}, {row['kept_cpu_ms']:.0f} and "
        f"{row['full_cpu_ms']:.0f} ms; planning {row['planning_ms']:.1f} ms; a token's KV has "
        f"{row['kib_a_token']:.1f} KiB, and takes {row['stored_kib_a_token']:.1f}"
    )


if __name__ == "__main__":
    sys.exit(main())
