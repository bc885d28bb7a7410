"""All of the kernels that needs a GPU, in one call: is it right on the device, and how fast.

1. The engine: `BatchEngine`, with graphs, against Hugging Face's `generate` on the same device, also with 256 sequences
   at a time. The way to the store: registration of host memory, copies from pinned, registered and ordinary memory, one
   by one and in batches, each beside the link's own rate; the self-check that a worker makes before it trusts a device.
   Correct, in float16 and bfloat16, with NaN wherever nothing was written: decode and prefill attention against fp64
   from the sequences as told, also in layers of more than 2^31 elements, with contexts of 32,768 and 131,072 tokens,
   logits of 10^4, and on another stream than the current one; rotate against fp64, gather and scatter bit by bit;
   repeated runs and moved chunks give the same bits; a captured CUDA graph stays right while sequences grow.
2. What a plan costs: a token more, a join and a leave, the plan of a prefill.
3. Tile shapes: a few of each kernel; `--tiles FILE` writes the best ones, as kernels/tiles.py has them.
4. Fast: decoding at the points of ChunkAttention's Table 3 (arXiv 2402.15220; 32 sequences, 32 heads of 128, chunks of
   64) and the same with 8 KV heads, as share of the read bandwidth measured in this run, counting each shared chunk
   once; prefill as share of a large matrix product's rate; rotate, gather and scatter beside a copy of the same bytes.
   Medians over graph replays with a cold L2. Beside them: torch's attention on unshared copies, and FlashInfer where it
   can be imported.
5. Where the time of a turn goes: `--trace FILE` writes one of the engine for chrome://tracing.

Needed on the machine: this checkout, and `pip install -e .[daemon]` beside a torch for CUDA, transformers and triton.
Each section has its share of the time; what does not fit in is left out and named, and what fails is told and stops
nothing else. The JSON object is written to `--into` after every step. Without a GPU it says so and ends well.
`--dry-run` does all of it on the CPU with small shapes, to see that it runs; its figures mean nothing.

    make bench-gpu_check ARGS='--into result.json --seconds 420 --tiles kernels/tiles.py'
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.nn.functional as F
from harness import report

from kvstore.kernels import tiles
from kvstore.kernels.decode import decode_attention
from kvstore.kernels.decode.naive import naive_decode_attention
from kvstore.kernels.forest import Forest
from kvstore.kernels.pages import BlockTable, gather, scatter
from kvstore.kernels.pages.naive import naive_gather, naive_scatter
from kvstore.kernels.prefill import PrefillPlan, prefill_attention
from kvstore.kernels.prefill.naive import naive_prefill_attention
from kvstore.kernels.rotate import rotate, rotation
from kvstore.kernels.rotate.naive import naive_rotate

Sequences = dict[int, tuple[list[int], int]]
Row = dict[str, Any]
Steps = Iterator[tuple[str, Callable[[], Row]]]


@dataclass(frozen=True, slots=True)
class Setting:
    """Where, and of which size."""

    device: str = "cuda"
    batch: int = 32
    heads: int = 32
    head_dim: int = 128
    chunk: int = 64
    points: tuple[tuple[int, int], ...] = (
        *((4096, shared) for shared in (4096, 3072, 2048, 1024, 0)),
        *((tokens, shared) for tokens in (2048, 1024) for shared in (tokens, tokens // 2, 0)),
    )
    """(tokens of a sequence, how many of them are shared)."""
    variants: tuple[tuple[int, int], ...] = ((16, 512), (32, 256), (32, 512), (32, 1024), (64, 512))
    """(rows of a tile, tokens of an item), all timed at each point."""
    prefill_points: tuple[tuple[int, int, int], ...] = (
        *((8, 4096, new) for new in (16, 64, 128, 512)),
        *((1, 0, 4096), (1, 8192, 512), (32, 4096, 1)),
    )
    """(sequences, cached tokens that they share, new tokens of each)."""
    copied_tokens: int = 65536
    flush_bytes: int = 256 << 20
    """More than any L2."""
    repeats: int = 20

    @property
    def real(self) -> bool:
        return self.device == "cuda"


DRY = Setting(
    device="cpu",
    batch=3,
    heads=4,
    head_dim=16,
    chunk=16,
    points=((64, 64), (64, 32), (64, 0)),
    variants=((16, 32),),
    prefill_points=((2, 32, 5), (1, 0, 20)),
    copied_tokens=64,
    flush_bytes=1 << 10,
    repeats=2,
)
DECODE_TILES = [(32, 4, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 4, 2), (128, 8, 3)]
PREFILL_TILES = [(32, 8, 4), (64, 8, 2), (64, 8, 3), (64, 4, 2), (128, 8, 2), (32, 4, 4)]
PEERS_TOLERANCE = 2e-2
ONLY_CORRECT = ("device", "engine", "store", "correct")
CLEAR = 0.25
"""A token whose logit is less above the second one than that may be another one for one that rounds otherwise."""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument(
        "--into", type=Path, help="a file for the JSON object that also is the last line of output"
    )
    options.add_argument("--seconds", type=float, default=420, help="begin nothing new after this time")
    options.add_argument("--only-correct", action="store_true", help="no timing")
    options.add_argument(
        "--tiles", type=Path, help="write the best tile shapes there, as kernels/tiles.py has them"
    )
    options.add_argument("--trace", type=Path, help="write where a turn's time goes, for chrome://tracing")
    options.add_argument("--dry-run", action="store_true", help="on the CPU, with small shapes")
    chosen = options.parse_args()
    on = DRY if chosen.dry_run else Setting()
    results: list[Row] = []
    if on.real and not torch.cuda.is_available():
        print("no GPU here: nothing was checked (--dry-run goes through all of it on the CPU)")
    else:
        check = Check(on, chosen.trace)
        sections = check.sections()
        if chosen.only_correct:
            sections = [each for each in sections if each[0] in ONLY_CORRECT]
        begun = time.monotonic()
        share = 0.0
        for name, part, steps in sections:
            share += part
            deadline = begun + share * chosen.seconds  # what a section leaves, the next ones have
            for row in performed(name, steps, deadline):
                results.append(row)
                print(json.dumps(row), flush=True)
                written(chosen.into, results)
        if chosen.tiles:
            chosen.tiles.write_text(check.tiles_module())
    wrong = [
        row
        for row in results
        if "error" in row and (row["section"] in ONLY_CORRECT or "differs" in row["error"])
    ]
    told = report(__file__, results, [])
    written(chosen.into, results)
    print(told)
    return 1 if wrong else 0


def performed(section: str, steps: Callable[[], Steps], deadline: float) -> Iterator[Row]:
    """The rows of a section; one that fails has its error."""
    for name, step in steps():
        row: Row = {"section": section, "what": name}
        if time.monotonic() > deadline:
            yield row | {"left_out": "no time left"}
            continue
        began = time.monotonic()
        try:
            row |= step()
        except Exception as error:  # the other steps are worth their time all the same
            row["error"] = f"{type(error).__name__}: {error}"[:500]
        yield row | {"seconds": round(time.monotonic() - began, 2)}


def written(into: Path | None, results: list[Row]) -> None:
    """Whole at any time, whenever the run is ended."""
    if into is not None:
        beside = into.with_suffix(".part")
        beside.write_text(report(__file__, results, []) + "\n")
        beside.replace(into)


class Check:
    """All sections of one run."""

    def __init__(self, on: Setting, trace: Path | None = None) -> None:
        self.on = on
        self.trace = trace
        self.speeds: dict[str, float] = {}
        self.best: dict[str, dict[tiles.Key, tiles.Tile]] = {"DECODE": {}, "PREFILL": {}}

    def sections(self) -> list[tuple[str, float, Callable[[], Steps]]]:
        """(name, share of the time, steps)"""
        return [
            ("device", 0.04, self.device),
            ("engine", 0.14, self.engine),
            ("store", 0.08, self.store),
            ("correct", 0.26, self.correct),
            ("plans", 0.02, self.plans),
            ("decode", 0.18, self.decode),
            ("tiles", 0.14, self.tile_shapes),
            ("prefill", 0.09, self.prefill),
            ("copies", 0.03, self.copies),
            ("trace", 0.02, self.traced),
        ]

    def dtypes(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    # -- the device

    def device(self) -> Steps:
        yield "device", self.described
        yield "bandwidth", self.bandwidth
        yield "matrix product", self.matrix_product

    def described(self) -> Row:
        row: Row = {"torch": torch.__version__, "dry_run": not self.on.real}
        if self.on.real:
            card = torch.cuda.get_device_properties(0)
            row |= {
                "name": card.name,
                "l2_bytes": card.L2_cache_size,
                "processors": card.multi_processor_count,
            }
            row |= {"triton": __import__("triton").__version__, "cuda": torch.version.cuda}
        return row

    def bandwidth(self) -> Row:
        """Bytes a second: of a copy (read and written bytes together) and of reading alone."""
        source = torch.ones(1 << 30 if self.on.real else 1 << 10, dtype=torch.float16, device=self.on.device)
        target = torch.empty_like(source)
        self.speeds["copy"] = 2 * source.nbytes / self.seconds(lambda: target.copy_(source))
        self.speeds["read"] = source.nbytes / self.seconds(lambda: torch.amax(source))
        return {f"{name}_tb_per_s": round(speed / 1e12, 3) for name, speed in self.speeds.items()}

    def matrix_product(self) -> Row:
        """The rate that prefill is held against."""
        size = 8192 if self.on.real else 32
        a, b = (torch.randn(size, size, device=self.on.device, dtype=torch.bfloat16) for _ in range(2))
        self.speeds["flops"] = 2 * size**3 / self.seconds(self.captured(lambda: a @ b))
        return {"tflop_per_s": round(self.speeds["flops"] / 1e12, 1)}

    # -- the engine

    def engine(self) -> Steps:
        for dtype in self.dtypes():
            name = str(dtype).removeprefix("torch.")
            yield f"as generate: {name}", partial(self.as_generate, dtype, 12 if self.on.real else 3)
        yield "256 sequences at a time", partial(self.as_generate, torch.bfloat16, 256 if self.on.real else 5)

    def model(self, dtype: torch.dtype) -> Any:
        """Of a small Llama's shape, random: what it says is noise, and the same noise from all."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        size = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "head_dim": 64}
        if not self.on.real:
            size = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
        config = LlamaConfig(
            vocab_size=8192,
            num_hidden_layers=4,
            num_key_value_heads=size["num_attention_heads"] // 4,
            max_position_embeddings=4096,
            initializer_range=0.05,
            eos_token_id=None,
            **size,
        )
        return LlamaForCausalLM(config).to(dtype).eval().to(self.on.device)

    def prompts(self, count: int) -> list[list[int]]:
        """Half of them begin alike."""
        draw = random.Random(count)
        common = [draw.randrange(8192) for _ in range(300 if self.on.real else 20)]
        longest = 400 if self.on.real else 30
        return [
            [
                *(common if number % 2 else ()),
                *(draw.randrange(8192) for _ in range(draw.randint(2, longest))),
            ]
            for number in range(count)
        ]

    def as_generate(self, dtype: torch.dtype, count: int) -> Row:
        from kvstore.gpu_worker.batching import BatchEngine

        model, prompts, answer = self.model(dtype), self.prompts(count), 24 if self.on.real else 6
        chunk = 64 if self.on.real else 16
        chunks = sum(len(prompt) // chunk + 3 for prompt in prompts)
        engine = BatchEngine(model, pool_chunks=chunks, chunk_tokens=chunk, sequences_max=count)
        try:
            numbers = {
                engine.add(prompt, answer): prompt_number for prompt_number, prompt in enumerate(prompts)
            }
            said: dict[int, list[tuple[int, float]]] = {number: [] for number in range(count)}
            began = time.perf_counter()
            for output in engine.run():
                said[numbers[output.request]].append((output.token, output.gap))
            self.synchronize()
            row: Row = {"tokens_per_s": round(count * answer / (time.perf_counter() - began), 1)}
            graphs = engine._forward.graphs
            row["graphs"] = dict(graphs.counters) if graphs is not None else {}
        finally:
            engine.close()
        unclear = compared = 0
        for number, prompt in enumerate(prompts[:24]):
            ids = torch.tensor([prompt], device=self.on.device)
            with torch.inference_mode():
                answers = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=answer,
                    do_sample=False,
                    pad_token_id=0,
                )
            for place, ((token, gap), other) in enumerate(
                zip(said[number], answers[0, len(prompt) :].tolist(), strict=True)
            ):
                compared += 1
                if token != other:
                    if gap > CLEAR:
                        raise AssertionError(
                            f"prompt {number} of {len(prompt)} tokens differs at token {place} of the answer: {token}, "
                            f"{gap:.3f} above the second; generate says {other}"
                        )
                    unclear += 1
                    break  # from here on they answer different texts
        return row | {"compared": compared, "unclear": unclear}

    def traced(self) -> Steps:
        if self.trace is not None:
            yield "one turn of the engine", self.trace_turn

    def trace_turn(self) -> Row:
        from torch.profiler import ProfilerActivity, profile

        from kvstore.gpu_worker.batching import BatchEngine

        engine = BatchEngine(self.model(torch.bfloat16), pool_chunks=64, chunk_tokens=16, sequences_max=4)
        try:
            engine.turn("", list(range(100)), 8)
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on.real else [])]
            with profile(activities=activities) as profiled:
                engine.turn("", list(range(50, 150)), 8)
                self.synchronize()
        finally:
            engine.close()
        assert self.trace is not None
        profiled.export_chrome_trace(str(self.trace))
        return {"bytes": self.trace.stat().st_size}

    # -- the way to the store

    def store(self) -> Steps:
        yield "registration", self.registration
        yield "copies between host and device", self.link
        yield "self-check", self.self_check

    def registration(self) -> Row:
        """Of memory as the arena is: a memfd, mapped and touched."""
        size = 1 << 30 if self.on.real else 1 << 16
        memory = shared_memory(size)
        if not self.on.real:
            return {"bytes": size}
        device = self.cuda()
        try:
            began = time.perf_counter()
            device.register(memory)
            row: Row = {"s_per_gib": round(time.perf_counter() - began, 3)}
            began = time.perf_counter()
            device.unregister(memory.ctypes.data)
            return row | {"unregistering_s_per_gib": round(time.perf_counter() - began, 3)}
        finally:
            device.close()

    def link(self) -> Row:
        """GB/s of slices as a load copies them, by how they are asked for and where they lie."""
        import numpy as np

        from kvstore.gpu_worker.device import CpuDevice

        count, size = (512, 256 << 10) if self.on.real else (4, 1 << 10)
        device: Any = self.cuda() if self.on.real else CpuDevice()
        mapped = shared_memory(count * size)
        if self.on.real:
            device.register(mapped)
        card = torch.empty(count, size, dtype=torch.uint8, device=self.on.device)
        places = {
            "registered": mapped,
            "pinned": device.buffer(count * size),
            "ordinary": np.ones(count * size, np.uint8),
        }
        stream = device.stream("gpu-check")
        row: Row = {"slices": count, "slice_bytes": size}
        row["batches"] = getattr(device, "_batched", None) is not None
        try:
            for name, memory in places.items():
                pairs = [(card[n], memory[n * size : (n + 1) * size]) for n in range(count)]
                back = [(here, there) for there, here in pairs]
                whole = torch.from_numpy(memory)
                ways: dict[str, Callable[[], object]] = {
                    "in": lambda pairs=pairs: device.copy_all_in(pairs),
                    "in_one_by_one": lambda pairs=pairs: [device.copy_in(*pair) for pair in pairs],
                    "in_as_a_whole": lambda whole=whole: card.view(-1).copy_(whole, non_blocking=True),
                    "out": lambda back=back: device.copy_all_out(back),
                }
                for way, call in ways.items():
                    took = []
                    for _ in range(4):
                        began = time.perf_counter()
                        stream.run(call)
                        stream.record().synchronize()
                        took.append(time.perf_counter() - began)
                    row[f"{name}_{way}_gb_per_s"] = round(count * size / min(took) / 1e9, 2)
        finally:
            if self.on.real:
                device.unregister(mapped.ctypes.data)
            device.close()
        best = row["registered_in_as_a_whole_gb_per_s"]
        return row | {"of_link": round(row["registered_in_gb_per_s"] / best, 3) if best else 0.0}

    def self_check(self) -> Row:
        """As `kvctl doctor gpu` and a worker do it, with a daemon of its own."""
        from turns import daemon

        from kvstore.client import connect
        from kvstore.gpu_worker.device import CpuDevice
        from kvstore.gpu_worker.segments import Segments
        from kvstore.gpu_worker.self_check import GEOMETRIES, check

        row: Row = {}
        with daemon() as run_dir:
            device: Any = self.cuda() if self.on.real else CpuDevice()
            segments = Segments(device)
            try:
                with connect(run_dir, timeout_s=30.0) as client:
                    segments.attach(client)
                    where = torch.device(self.on.device, 0) if self.on.real else torch.device("cpu")
                    passed = [
                        check(device, where, geometry, client.open, path=segments.path)
                        for geometry in GEOMETRIES
                    ]
                row = {
                    "path": segments.path.value,
                    "reads_read_only": device.registers_read_only,
                    "bytes": sum(one.bytes for one in passed),
                }
            finally:
                segments.close()
                device.close()
        return row

    def cuda(self) -> Any:
        from kvstore.gpu_worker.cuda import CudaDevice

        return CudaDevice(torch.device("cuda", 0))

    # -- is it right

    def correct(self) -> Steps:
        shapes: list[Row] = [
            {"head_dim": 128, "group": 1, "chunk_tokens": 64, "tile": 16},
            {"head_dim": 128, "group": 4, "chunk_tokens": 64, "tile": 8},
            {"head_dim": 128, "group": 4, "chunk_tokens": 16, "tile": 16, "soft_cap": 20.0},
            {"head_dim": 128, "group": 8, "chunk_tokens": 256, "tile": 16},
            {"head_dim": 64, "group": 1, "chunk_tokens": 32, "tile": 64, "scale": 0.3},
            {"head_dim": 80, "group": 2, "chunk_tokens": 64, "tile": 16},
            {"head_dim": 96, "group": 7, "chunk_tokens": 128, "tile": 4},
            {"head_dim": 256, "group": 1, "chunk_tokens": 64, "tile": 64},
            {"head_dim": 256, "group": 2, "chunk_tokens": 16, "tile": 8, "soft_cap": 50.0},
        ]
        if not self.on.real:
            shapes = [
                {"head_dim": 16, "group": 2, "chunk_tokens": 16, "tile": 2, "soft_cap": 20.0, "batch": 4}
            ]
        # Time may run out: first what nothing else shows, then the common shapes in every dtype
        yield "decode: a graph that is replayed while sequences grow", self.graph_while_growing
        for dtype in self.dtypes():
            for interleaved in (False, True):
                pairs = "interleaved" if interleaved else "half-split"
                yield (
                    f"rotate: {dtype}, {pairs} pairs".replace("torch.", ""),
                    partial(self.correct_rotate, dtype, interleaved),
                )
            for layout in ("ours", "tokens first"):
                name = f"gather and scatter: {dtype}, {layout}".replace("torch.", "")
                yield name, partial(self.correct_pages, dtype, layout)
        yield "decode and prefill: layers of more than 2^31 elements", self.far_chunks
        for tokens in (32_768, 131_072) if self.on.real else (200,):
            yield f"decode: {tokens} tokens", partial(self.long_context, tokens)
        yield "decode and prefill: logits of 10^4, on another stream", self.large_logits
        for seed, shape in enumerate(shapes):
            for dtype in self.dtypes():
                for kind, attend in (("decode", self.correct_decode), ("prefill", self.correct_prefill)):
                    name = f"{kind}: {dtype} {shape}".replace("torch.", "")
                    yield name, partial(attend, dtype, seed, **shape)

    def correct_decode(
        self,
        dtype: torch.dtype,
        seed: int,
        *,
        head_dim: int,
        group: int,
        chunk_tokens: int,
        tile: int,
        scale: float | None = None,
        soft_cap: float | None = None,
        batch: int = 24,
        kv_heads: int = 4,
    ) -> Row:
        sequences, chunks = random_sequences(seed, batch, chunk_tokens)
        heads = group * kv_heads
        q = self.randn(seed, batch, heads, head_dim).to(dtype)
        pool = self.pool(dtype, seed, sequences, chunks, chunk_tokens, kv_heads, head_dim)
        options = {"scale": scale, "soft_cap": soft_cap}

        def attend(pool: torch.Tensor, sequences: Sequences) -> torch.Tensor:
            plan = self.forest(sequences, batch, chunks, chunk_tokens, tile, split_tokens=256).plan()
            return decode_attention(q, *pool.unbind(1), plan, out=torch.full_like(q, math.nan), **options)

        out = attend(pool, sequences)
        keys, values = pool.unbind(1)
        exact = naive_decode_attention(q, keys, values, sequences, **options)
        plain = naive_decode_attention(q, keys, values, sequences, dtype=dtype, **options)
        return self.compared(out, exact, plain) | self.same_bits(out, attend, pool, sequences)

    def correct_prefill(
        self,
        dtype: torch.dtype,
        seed: int,
        *,
        head_dim: int,
        group: int,
        chunk_tokens: int,
        tile: int,
        scale: float | None = None,
        soft_cap: float | None = None,
        batch: int = 12,
        kv_heads: int = 4,
    ) -> Row:
        sequences, chunks = random_sequences(seed, batch, chunk_tokens)
        draw = random.Random(seed)
        new = {row: draw.choice((1, draw.randint(1, n), n)) for row, (_, n) in sequences.items() if n}
        q = self.randn(seed, sum(new.values()), group * kv_heads, head_dim).to(dtype)
        pool = self.pool(dtype, seed, sequences, chunks, chunk_tokens, kv_heads, head_dim)
        options = {"scale": scale, "soft_cap": soft_cap}

        def attend(pool: torch.Tensor, sequences: Sequences, **work: int) -> torch.Tensor:
            forest = self.forest(sequences, batch, chunks, chunk_tokens, tile, split_tokens=256)
            plan = forest.prefill(new, **work)
            return prefill_attention(q, *pool.unbind(1), plan, out=torch.full_like(q, math.nan), **options)

        out = attend(pool, sequences)
        keys, values = pool.unbind(1)
        exact = naive_prefill_attention(q, keys, values, sequences, new, **options)
        plain = naive_prefill_attention(q, keys, values, sequences, new, dtype=dtype, **options)
        row = self.compared(out, exact, plain) | self.same_bits(out, attend, pool, sequences)
        cut = attend(pool, sequences, tile_queries=tile, split_tokens=2 * chunk_tokens)
        return row | {"max_error_when_cut": self.compared(cut, exact, plain)["max_error"]}

    def both(
        self, pool: torch.Tensor, sequences: Sequences, q: torch.Tensor, scale: float | None = None
    ) -> list[torch.Tensor]:
        """Decode's and prefill's results, of the sequences' last tokens."""
        batch, chunk_tokens = len(sequences), pool.shape[3]
        forest = self.forest(sequences, batch, len(pool), chunk_tokens, 16, split_tokens=4 * chunk_tokens)
        keys, values = pool.unbind(1)
        new = dict.fromkeys(sequences, 1)
        return [
            decode_attention(q, keys, values, forest.plan(), scale=scale),
            prefill_attention(q, keys, values, forest.prefill(new), scale=scale),
        ]

    def far_chunks(self) -> Row:
        """The same chunks at both ends of a layer give the same bits."""
        kv_heads, chunk_tokens, head_dim, own = 8, 64, 128, 6
        elements = 2 * kv_heads * chunk_tokens * head_dim
        chunks = (1 << 31) // elements + 64 if self.on.real else 64
        if self.on.real and torch.cuda.mem_get_info()[0] < 2.2 * chunks * elements:
            return {"left_out": "not enough memory"}
        pool = torch.empty(
            chunks, 2, kv_heads, chunk_tokens, head_dim, dtype=torch.float16, device=self.on.device
        )
        pool[:own] = self.randn(1, own, 2, kv_heads, chunk_tokens, head_dim).half()
        pool[-own:] = pool[:own]
        q = self.randn(2, 1, 4 * kv_heads, head_dim).half()
        tokens = own * chunk_tokens - 5
        near = self.both(pool, {0: (list(range(own)), tokens)}, q)
        far = self.both(pool, {0: (list(range(chunks - own, chunks)), tokens)}, q)
        if not all(torch.equal(one, other) for one, other in zip(near, far, strict=True)):
            raise AssertionError("what is far in memory differs")
        return {"elements": pool.numel(), "over_2_31": pool.numel() > 1 << 31}

    def long_context(self, tokens: int) -> Row:
        kv_heads, chunk_tokens, head_dim, batch = 2, 64, 128, 2
        own = -(-tokens // chunk_tokens)
        sequences = {row: ([*range(row * own, (row + 1) * own)], tokens - row) for row in range(batch)}
        pool = self.randn(1, batch * own, 2, kv_heads, chunk_tokens, head_dim).half()
        q = self.randn(2, batch, 4 * kv_heads, head_dim).half()
        keys, values = pool.unbind(1)
        exact = naive_decode_attention(q, keys, values, sequences)
        plain = naive_decode_attention(q, keys, values, sequences, dtype=torch.float16)
        return self.compared(self.both(pool, sequences, q)[0], exact, plain)

    def large_logits(self) -> Row:
        """exp of their differences is 0 or 1; no two infinities are subtracted."""
        sequences, chunks = random_sequences(5, 6, 16)
        sequences = dict(enumerate(each for each in sequences.values() if each[1]))
        pool = self.pool(torch.float16, 5, sequences, chunks, 16, 2, 64)
        keys, values = pool.unbind(1)
        q = (
            self.randn(6, len(sequences), 8, 64) * 1e3
        ).half()  # products of some 10^4, below what float16 has
        found: list[torch.Tensor] = []
        if self.on.real:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found = self.both(pool, sequences, q, 1.0)
            torch.cuda.current_stream().wait_stream(stream)
        else:
            found = self.both(pool, sequences, q, 1.0)
        exact = naive_decode_attention(q, keys, values, sequences, scale=1.0)
        plain = naive_decode_attention(q, keys, values, sequences, scale=1.0, dtype=torch.float16)
        return self.compared(found[0], exact, plain) | self.compared(found[1], exact, plain)

    def compared(self, out: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> Row:
        """By the rule of the tests (tests/unit/kernels/conftest.py)."""
        rounding = ((exact.to(out.dtype) + 0.3 - 0.3).double() - exact).abs().max().item()
        last_place = torch.finfo(out.dtype).eps * exact.abs().max().item() / 2
        error, allowed = ((found.double() - exact).abs().max().item() for found in (out, plain))
        allowed = 2 * allowed + 2 * rounding + last_place
        if not error <= allowed:  # also if it is NaN
            raise AssertionError(f"differs by {error:.3g} from fp64, allowed are {allowed:.3g}")
        return {"max_error": error, "allowed": allowed}

    def same_bits(
        self,
        out: torch.Tensor,
        attend: Callable[[torch.Tensor, Sequences], torch.Tensor],
        pool: torch.Tensor,
        sequences: Sequences,
    ) -> Row:
        if not all(torch.equal(attend(pool, sequences), out) for _ in range(5)):
            raise AssertionError("repeated runs differ")
        last = len(pool) - 1
        moved = {row: ([last - chunk for chunk in own], tokens) for row, (own, tokens) in sequences.items()}
        if not torch.equal(attend(pool.flip(0), moved), out):
            raise AssertionError("moved chunks give other bits")
        return {}

    def correct_rotate(self, dtype: torch.dtype, interleaved: bool) -> Row:
        keys = self.randn(1, 5, 4, 33, 80).to(dtype)
        inv_freq = 1 / 10000 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64)
        deltas = torch.randint(-100_000, 100_000, (33,), generator=torch.Generator().manual_seed(1))
        deltas[3] = 0
        by = rotation(deltas, inv_freq, interleaved=interleaved, device=self.on.device)
        out = rotate(keys, by, out=torch.full_like(keys, math.nan))
        exact = naive_rotate(keys.cpu(), deltas, inv_freq, interleaved=interleaved)
        rounding = (exact.to(dtype).double() - exact).abs().max().item()
        error = (out.cpu().double() - exact).abs().max().item()
        if not error <= 2 * rounding:
            raise AssertionError(f"differs by {error:.3g} from fp64, allowed are {2 * rounding:.3g}")
        if not (torch.equal(out[..., 64:], keys[..., 64:]) and torch.equal(out[..., 3, :], keys[..., 3, :])):
            raise AssertionError("what is not rotated differs")
        return {"max_error": error, "allowed": 2 * rounding}

    def correct_pages(self, dtype: torch.dtype, layout: str) -> Row:
        blocks, block_tokens, chunk_tokens, tokens, kv_heads, head_dim = 40, 16, 64, 300, 4, 80
        pool = self.randn(2, blocks, 2, kv_heads, block_tokens, head_dim).to(dtype)
        if layout == "tokens first":
            pool = pool.transpose(2, 3).contiguous().transpose(2, 3)
        keys, values = pool.unbind(1)
        numbers = random.Random(3).sample(range(blocks), -(-tokens // block_tokens))
        numbers[2] = -1
        sizes = {
            "blocks": blocks,
            "block_tokens": block_tokens,
            "chunk_tokens": chunk_tokens,
            "tokens": tokens,
        }
        table = BlockTable.of(numbers, **sizes, device=self.on.device)
        slices = torch.full((table.chunks, 2, kv_heads, chunk_tokens, head_dim), math.nan, dtype=dtype)
        slices = slices.to(self.on.device)
        expected = naive_gather(keys.cpu(), values.cpu(), self.on_cpu(table, numbers, sizes), slices.cpu())
        gather(keys, values, table, slices)
        if not same(slices.cpu(), expected):
            raise AssertionError("gather: other bits than one by one")
        back = [torch.full_like(half, math.nan) for half in (keys, values)]
        slices.nan_to_num_(0.5)
        expected_back = naive_scatter(
            back[0].cpu(), back[1].cpu(), self.on_cpu(table, numbers, sizes), slices.cpu()
        )
        scatter(back[0], back[1], table, slices)
        if not all(same(found.cpu(), wanted) for found, wanted in zip(back, expected_back, strict=True)):
            raise AssertionError("scatter: other bits than one by one")
        inv_freq = 1 / 10000 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64)
        by = rotation(torch.full((table.chunks, 1), 1234), inv_freq, device=self.on.device)
        scatter(back[0], back[1], table, slices, by=by)
        apart = rotate(slices[0, 0], rotation(1234, inv_freq, device=self.on.device))
        if not torch.equal(back[0][numbers[0]], apart[:, :block_tokens]):
            raise AssertionError("scatter with a rotation: other bits than rotate")
        return {}

    def on_cpu(self, table: BlockTable, numbers: list[int], sizes: dict[str, int]) -> BlockTable:
        return table if not self.on.real else BlockTable.of(numbers, **sizes)

    def graph_while_growing(self, tokens: int = 200) -> Row:
        batch, chunk_tokens, dtype = 8, 16, torch.float16
        tokens = tokens if self.on.real else 20
        sequences, chunks = random_sequences(
            1, batch, chunk_tokens, more=batch * (tokens // chunk_tokens + 1)
        )
        unused = iter(sorted(set(range(chunks)) - {chunk for own, _ in sequences.values() for chunk in own}))
        forest = self.forest(sequences, batch, chunks, chunk_tokens, 16, split_tokens=64)
        q = self.randn(1, batch, 8, 128).to(dtype)
        keys, values = self.pool(dtype, 1, sequences, chunks, chunk_tokens, 8, 128).nan_to_num_(0.5).unbind(1)
        plan, out = forest.plan(), torch.empty_like(q)
        replay = self.captured(lambda: decode_attention(q, keys, values, plan, out=out))
        worst, captures = 0.0, 1
        for number in range(tokens):
            new = {row: next(unused) for row, (_, length) in sequences.items() if length % chunk_tokens == 0}
            forest.step(new)
            if forest.plan().capacity != plan.capacity:
                plan, captures = forest.plan(), captures + 1
                replay = self.captured(lambda plan=plan: decode_attention(q, keys, values, plan, out=out))
            for row, (own, length) in sequences.items():
                sequences[row] = ([*own, *([new[row]] if row in new else ())], length + 1)
            if number % 10 == 0:
                out.fill_(math.nan)
                replay()
                exact = naive_decode_attention(q, keys, values, sequences)
                worst = max(worst, (out.double() - exact).abs().max().item())
                if not (out.double() - exact).abs().max().item() < 5e-3:
                    raise AssertionError(f"after {number + 1} tokens it differs by {worst:.3g}")
        return {"max_error": worst, "captures": captures}

    # -- what plans cost

    def plans(self) -> Steps:
        yield "plans", self.planning

    def planning(self) -> Row:
        """Microseconds on the host, copies to the device included."""
        on = self.on
        tokens, shared = on.points[len(on.points) // 2][0], on.points[len(on.points) // 2][0] // 2
        sequences, chunks = self.sharing(on.batch, tokens, shared)
        forest = self.forest(
            sequences, on.batch, chunks + 2 * on.batch, on.chunk, 16, split_tokens=8 * on.chunk, timed=True
        )
        forest.plan()
        fresh = iter(range(chunks, chunks + 2 * on.batch))
        forest.step({row: next(fresh) for row in sequences if forest.length(row) % on.chunk == 0})

        def step() -> None:
            if forest.length(0) % on.chunk:
                forest.step()
            forest.plan()

        def join_and_leave() -> None:
            own, length = forest.chunks_of(0), forest.length(0)
            forest.leave(0)
            forest.join(0, own, length)
            forest.plan()

        new = dict.fromkeys(sequences, min(on.chunk, shared or 1))
        calls = {"step": step, "join_and_leave": join_and_leave, "prefill": lambda: forest.prefill(new)}
        row: Row = {"sequences": on.batch, "tokens": tokens}
        for name, call in calls.items():
            took = []
            for _ in range(10):
                began = time.perf_counter()
                call()
                self.synchronize()
                took.append(time.perf_counter() - began)
            row[f"{name}_us"] = round(1e6 * statistics.median(took), 1)
        return row

    # -- tile shapes

    def tile_shapes(self) -> Steps:
        on = self.on
        for kv_heads in (on.heads, on.heads // 4):
            for rows in (16, 32, 64):
                yield (
                    f"decode: {rows} rows, {on.heads}/{kv_heads} heads",
                    lambda rows=rows, kv=kv_heads: self.sweep(
                        "DECODE", self.decode_call(kv, rows), DECODE_TILES
                    ),
                )
        for kv_heads in (on.heads, on.heads // 4):
            yield (
                f"prefill: {on.heads}/{kv_heads} heads",
                lambda kv=kv_heads: self.sweep("PREFILL", self.prefill_call(kv), PREFILL_TILES),
            )

    def decode_call(self, kv_heads: int, rows: int) -> tuple[tiles.Key, Callable[[], object]]:
        """Halfway shared: both phases count."""
        on = self.on
        tokens, shared = on.points[0][0], on.points[0][0] // 2
        sequences, chunks = self.sharing(on.batch, tokens, shared)
        pool = self.randn(0, chunks, 2, kv_heads, on.chunk, on.head_dim).to(torch.float16)
        q = self.randn(1, on.batch, on.heads, on.head_dim).to(torch.float16)
        tile = max(1, rows * kv_heads // on.heads)
        plan = self.forest(
            sequences, on.batch, chunks, on.chunk, tile, split_tokens=8 * on.chunk, timed=True
        ).plan()
        keys, values = pool.unbind(1)
        out = torch.empty_like(q)
        return self.key(rows), lambda: decode_attention(q, keys, values, plan, out=out)

    def prefill_call(self, kv_heads: int) -> tuple[tiles.Key, Callable[[], object]]:
        on = self.on
        cached, new = on.points[0][0] // 2, 8 * on.chunk
        q, keys, values, plan, _ = self.prefilling(2, cached, new, kv_heads, torch.float16)
        out = torch.empty_like(q)
        return self.key(128), lambda: prefill_attention(q, keys, values, plan, out=out)

    def key(self, rows: int) -> tiles.Key:
        return tiles.Key(rows, 1 << (self.on.head_dim - 1).bit_length(), self.on.chunk)

    def sweep(
        self, kind: str, made: tuple[tiles.Key, Callable[[], object]], candidates: list[tuple[int, int, int]]
    ) -> Row:
        """Each candidate in turn in the table that kernels read; the best one stays there."""
        key, call = made
        table: dict[tiles.Key, tiles.Tile] = getattr(tiles, kind)
        before = table.pop(key, None)
        row: Row = {"key": list(key)}
        row["us_by_rule"] = round(1e6 * self.seconds(self.captured(call)), 1)
        best, least = None, row["us_by_rule"]
        for candidate in candidates:
            name = "us_{}_tokens_{}_warps_{}_stages".format(*candidate)
            table[key] = tiles.Tile(*candidate)
            try:
                row[name] = round(1e6 * self.seconds(self.captured(call)), 1)
            except Exception as error:  # what does not fit on this device is no candidate
                row[name.replace("us_", "error_")] = f"{type(error).__name__}: {error}"[:100]
                continue
            if row[name] < 0.98 * least:
                best, least = table[key], row[name]
        table.pop(key)
        if best is None:
            if before is not None:
                table[key] = before
        else:
            # Two shapes of heads may have the same key: the first one decides
            known = self.best[kind].get(key)
            table[key] = self.best[kind][key] = known or best
        return row | {"best": list(best) if best else "by rule"}

    def tiles_module(self) -> str:
        """kernels/tiles.py with what was found."""
        name = torch.cuda.get_device_name() if self.on.real else "no GPU (a dry run)"
        text = Path(tiles.__file__).read_text()
        head, _, _ = text.partition("DECODE: dict")
        first, last = head.index("Written by"), head.index('"""\n\nfrom')
        told = f"Written by `make bench-gpu_check ARGS='--tiles kernels/tiles.py'` on: {name}.\n"
        lines = [head[:first] + told + head[last:]]
        for kind in ("DECODE", "PREFILL"):
            found = {**getattr(tiles, kind), **self.best[kind]}
            entries = "".join(f"    {key!r}: {tile!r},\n" for key, tile in sorted(found.items()))
            lines.append(f"{kind}: dict[Key, Tile] = {{{chr(10) + entries if entries else ''}}}\n")
        return "".join(lines)

    # -- how fast: decode

    def decode(self) -> Steps:
        for tokens, shared in self.on.points:
            for kv_heads in (self.on.heads, self.on.heads // 4):
                yield (
                    f"{tokens} tokens, {shared} shared, {self.on.heads}/{kv_heads} heads",
                    (lambda tokens=tokens, shared=shared, kv=kv_heads: self.point(tokens, shared, kv)),
                )

    def point(self, tokens: int, shared: int, kv_heads: int) -> Row:
        on = self.on
        sequences, chunks = self.sharing(on.batch, tokens, shared)
        pool = self.randn(0, chunks, 2, kv_heads, on.chunk, on.head_dim).to(torch.float16)
        keys, values = pool.unbind(1)
        q = self.randn(1, on.batch, on.heads, on.head_dim).to(torch.float16)
        moved = pool.nbytes + 2 * q.nbytes
        row: Row = {"bytes": moved}
        out = torch.empty_like(q)
        for rows, split in on.variants:
            tile = max(1, rows * kv_heads // on.heads)
            plan = self.forest(
                sequences, on.batch, chunks, on.chunk, tile, split_tokens=split, timed=True
            ).plan()
            call = self.captured(lambda plan=plan: decode_attention(q, keys, values, plan, out=out))
            row[f"us_rows_{rows}_split_{split}"] = round(1e6 * self.seconds(call, 2 * on.repeats), 1)
        best = min(value for name, value in row.items() if name.startswith("us_rows"))
        row |= {"us": best, "tb_per_s": round(moved / best / 1e6, 3)}
        for name in ("read", "copy"):
            if name in self.speeds:
                row[f"of_{name}"] = round(moved / best * 1e6 / self.speeds[name], 3)

        index = torch.tensor([own for own, _ in sequences.values()], device=on.device)
        k, v = (of[index].transpose(1, 2).flatten(2, 3) for of in (keys, values))

        def by_torch() -> torch.Tensor:
            return F.scaled_dot_product_attention(
                q.unsqueeze(2), k, v, enable_gqa=kv_heads < on.heads
            ).squeeze(2)

        self.compare(row, out, by_torch())
        row["torch_us"] = round(1e6 * self.seconds(self.captured(by_torch)), 1)
        first = shared // on.chunk
        row |= self.flashinfer_decode(q, pool, first, tokens // on.chunk - first, out)
        return row | {"speedup_over_best_other": self.over_others(row, best)}

    def compare(self, row: Row, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """With torch's result, which is as exact. The figures of the row are kept even if it is wrong."""
        differ = (ours - theirs).abs().max().item()
        row["differs_from_torch"] = differ
        if not differ <= PEERS_TOLERANCE * (1 + theirs.abs().max().item()):
            row["error"] = f"differs by {differ:.3g} from torch"

    def over_others(self, row: Row, best: float) -> float:
        others = [value for name, value in row.items() if name.endswith("_us") and isinstance(value, float)]
        return round(min(others) / best, 3)

    def flashinfer_decode(
        self, q: torch.Tensor, pool: torch.Tensor, shared: int, own: int, ours: torch.Tensor
    ) -> Row:
        """Its decode kernel, and its cascade with the backend that it picks and with fa2; what fails is told."""
        try:
            import flashinfer
        except ImportError:
            return {}
        on, batch = self.on, len(q)
        heads = {
            "num_qo_heads": q.shape[1],
            "num_kv_heads": pool.shape[2],
            "head_dim": on.head_dim,
            "page_size": on.chunk,
        }

        def ints(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=on.device)

        def pages(counts: int) -> torch.Tensor:
            return ints([row * counts for row in range(batch + 1)])

        def private(row: int) -> list[int]:
            return list(range(shared + row * own, shared + (row + 1) * own))

        def workspace() -> torch.Tensor:
            return torch.zeros(256 << 20, dtype=torch.uint8, device=on.device)

        def decode() -> Any:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), "HND", use_tensor_cores=True)
            every = [chunk for row in range(batch) for chunk in (*range(shared), *private(row))]
            last = ints([on.chunk] * batch)
            wrapper.plan(pages(shared + own), ints(every), last, *heads.values(), q_data_type=q.dtype)
            return wrapper

        def cascade(backend: str | None) -> Any:
            if not shared or not own:
                raise ValueError("two levels need shared and private chunks")
            wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(), "HND")
            for level in wrapper._batch_prefill_wrappers if backend else ():
                level._backend = backend
            wrapper.plan(
                [ints([0, batch]), pages(1)],
                [ints([0, shared]), pages(own)],
                [ints(list(range(shared))), ints([chunk for row in range(batch) for chunk in private(row)])],
                [ints([on.chunk]), ints([on.chunk] * batch)],
                *heads.values(),
                q_data_type=q.dtype,
            )
            return wrapper

        makers = {
            "flashinfer_decode": decode,
            "flashinfer_cascade": lambda: cascade(None),
            "flashinfer_cascade_fa2": lambda: cascade("fa2"),
        }
        return self.peers(makers, q, pool, ours)

    def peers(
        self, makers: dict[str, Callable[[], Any]], q: torch.Tensor, pool: torch.Tensor, ours: torch.Tensor
    ) -> Row:
        found: Row = {}
        for name, make in makers.items():
            try:
                wrapper = make()
                found[f"{name}_differs"] = (wrapper.run(q, pool) - ours).abs().max().item()
                call = lambda wrapper=wrapper: wrapper.run(q, pool)  # noqa: E731
                try:
                    call = self.captured(call)
                except Exception:  # a launch more is counted then
                    found[f"{name}_without_graph"] = True
                found[f"{name}_us"] = round(1e6 * self.seconds(call), 1)
            except Exception as error:  # a peer's trouble is not ours
                found[f"{name}_error"] = f"{type(error).__name__}: {error}"[:200]
        return found

    # -- how fast: prefill

    def prefill(self) -> Steps:
        for batch, cached, new in self.on.prefill_points:
            for kv_heads in (self.on.heads, self.on.heads // 4):
                yield (
                    f"{batch} x {new} new, {cached} cached and shared, {self.on.heads}/{kv_heads} heads",
                    (
                        lambda batch=batch, cached=cached, new=new, kv=kv_heads: self.prefill_point(
                            batch, cached, new, kv
                        )
                    ),
                )

    def prefill_point(self, batch: int, cached: int, new: int, kv_heads: int) -> Row:
        on = self.on
        q, keys, values, plan, sequences = self.prefilling(batch, cached, new, kv_heads, torch.bfloat16)
        out = torch.empty_like(q)
        call = self.captured(lambda: prefill_attention(q, keys, values, plan, out=out))
        took = self.seconds(call)
        pairs = batch * (new * cached + new * (new + 1) // 2)  # of a query and a token that it sees
        flops = 4 * pairs * on.heads * on.head_dim
        row: Row = {"us": round(1e6 * took, 1), "tflop_per_s": round(flops / took / 1e12, 1)}
        row |= {"items": len(plan.items), "partials": plan.partials}
        if "flops" in self.speeds:
            row["of_matrix_product"] = round(flops / took / self.speeds["flops"], 3)
        index = torch.tensor([own for own, _ in sequences.values()], device=on.device)
        tokens = cached + new
        k, v = (of[index].transpose(1, 2).flatten(2, 3)[:, :, :tokens].contiguous() for of in (keys, values))
        by_head = q.view(batch, new, on.heads, on.head_dim).transpose(1, 2).contiguous()
        mask: Any = torch.ones(new, tokens, dtype=torch.bool, device=on.device).tril(cached)
        if on.real:
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(new, tokens)  # goes to flash-attention
            if kv_heads < on.heads:
                k, v = (of.repeat_interleave(on.heads // kv_heads, 1) for of in (k, v))
        grouped = k.shape[1] < on.heads

        def by_torch() -> torch.Tensor:
            return F.scaled_dot_product_attention(by_head, k, v, attn_mask=mask, enable_gqa=grouped)

        self.compare(row, out, by_torch().transpose(1, 2).flatten(0, 1))
        row["torch_us"] = round(1e6 * self.seconds(by_torch), 1)
        row |= self.flashinfer_prefill(q, keys, values, sequences, new, out)
        return row | {"speedup_over_best_other": self.over_others(row, row["us"])}

    def flashinfer_prefill(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sequences: Sequences,
        new: int,
        ours: torch.Tensor,
    ) -> Row:
        try:
            import flashinfer
        except ImportError:
            return {}
        on, batch = self.on, len(sequences)

        def ints(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=on.device)

        def make(backend: str) -> Any:
            space = torch.zeros(256 << 20, dtype=torch.uint8, device=on.device)
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "HND", backend=backend)
            counts = [len(own) for own, _ in sequences.values()]
            wrapper.plan(
                ints([row * new for row in range(batch + 1)]),
                ints([sum(counts[:row]) for row in range(batch + 1)]),
                ints([chunk for own, _ in sequences.values() for chunk in own]),
                ints([(tokens - 1) % on.chunk + 1 for _, tokens in sequences.values()]),
                *(q.shape[1], keys.shape[1], on.head_dim, on.chunk),
                causal=True,
                q_data_type=q.dtype,
            )
            return wrapper

        makers = {
            f"flashinfer_{backend}": (lambda backend=backend: make(backend)) for backend in ("auto", "fa2")
        }
        return self.peers(makers, q, torch.stack((keys, values), 1), ours)

    # -- how fast: copies

    def copies(self) -> Steps:
        for dtype in self.dtypes():
            yield (
                f"rotate, gather, scatter: {dtype}".replace("torch.", ""),
                lambda dtype=dtype: self.copying(dtype),
            )

    def copying(self, dtype: torch.dtype) -> Row:
        """GB/s, read and written bytes together, and as share of a copy of the same bytes by torch."""
        on, kv_heads, block_tokens = self.on, max(1, self.on.heads // 4), 16
        chunks, blocks = on.copied_tokens // on.chunk, on.copied_tokens // block_tokens
        slices = self.randn(1, chunks, 2, kv_heads, on.chunk, on.head_dim).to(dtype)
        pool = torch.empty(blocks, 2, kv_heads, block_tokens, on.head_dim, dtype=dtype, device=on.device)
        keys, values = pool.unbind(1)
        numbers = random.Random(1).sample(range(blocks), blocks)
        table = BlockTable.of(
            numbers, blocks=blocks, block_tokens=block_tokens, chunk_tokens=on.chunk, device=on.device
        )
        inv_freq = 1 / 10000 ** (torch.arange(0, on.head_dim, 2, dtype=torch.float64) / on.head_dim)
        by = rotation(1000, inv_freq, device=on.device)
        other = torch.empty_like(slices)
        calls: dict[str, tuple[int, Callable[[], object]]] = {
            "copy": (slices.nbytes, lambda: other.copy_(slices)),
            "scatter": (slices.nbytes, lambda: scatter(keys, values, table, slices)),
            "scatter_rotated": (slices.nbytes, lambda: scatter(keys, values, table, slices, by=by)),
            "gather": (slices.nbytes, lambda: gather(keys, values, table, other)),
            "rotate": (slices.nbytes // 2, lambda: rotate(slices[:, 0], by, out=other[:, 0])),
        }
        row: Row = {"bytes": slices.nbytes}
        for name, (size, call) in calls.items():
            speed = 2 * size / self.seconds(self.captured(call))
            row[f"{name}_gb_per_s"] = round(speed / 1e9, 1)
            row[f"{name}_of_copy"] = round(speed / 1e9 / row["copy_gb_per_s"], 3)
        return row

    # -- what all of them use

    def randn(self, seed: int, *shape: int) -> torch.Tensor:
        draw = torch.Generator(self.on.device).manual_seed(seed)
        return torch.randn(shape, generator=draw, device=self.on.device)

    def pool(
        self,
        dtype: torch.dtype,
        seed: int,
        sequences: Sequences,
        chunks: int,
        chunk_tokens: int,
        kv_heads: int,
        head_dim: int,
    ) -> torch.Tensor:
        """With NaN wherever no sequence has a token."""
        pool = self.randn(seed + 1, chunks, 2, kv_heads, chunk_tokens, head_dim).to(dtype)
        unwritten = torch.ones(chunks, chunk_tokens, dtype=torch.bool)
        for own, tokens in sequences.values():
            for number, chunk in enumerate(own):
                unwritten[chunk, : tokens - number * chunk_tokens] = False
        return pool.masked_fill_(unwritten.to(self.on.device)[:, None, None, :, None], math.nan)

    def forest(
        self,
        sequences: Sequences,
        batch: int,
        chunks: int,
        chunk_tokens: int,
        tile: int,
        *,
        split_tokens: int,
        timed: bool = False,
    ) -> Forest:
        """`timed`: with no more room than two levels need, since programs for unused items take time as well."""
        pieces = sum(2 - (-tokens // split_tokens) for _, tokens in sequences.values())
        forest = Forest(
            chunk_tokens=chunk_tokens,
            chunks=chunks,
            sequences_max=batch,
            split_tokens=split_tokens,
            tile_sequences=tile,
            items_max=pieces if timed else 2048,
            partials_max=2048,
            device=self.on.device,
        )
        for row, (own, tokens) in sequences.items():
            forest.join(row, own, tokens)
        return forest

    def sharing(self, batch: int, tokens: int, shared: int) -> tuple[Sequences, int]:
        """Sequences of so many tokens that begin with the same `shared` ones; how many chunks they have in all."""
        first, own = shared // self.on.chunk, -(-(tokens - shared) // self.on.chunk)
        sequences = {
            row: ([*range(first), *range(first + row * own, first + (row + 1) * own)], tokens)
            for row in range(batch)
        }
        return sequences, first + batch * own

    def prefilling(
        self, batch: int, cached: int, new: int, kv_heads: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PrefillPlan, Sequences]:
        """(queries, keys, values, plan, sequences)"""
        on = self.on
        sequences, chunks = self.sharing(batch, cached + new, cached)
        pool = self.randn(0, chunks, 2, kv_heads, on.chunk, on.head_dim).to(dtype)
        q = self.randn(1, batch * new, on.heads, on.head_dim).to(dtype)
        forest = self.forest(sequences, batch, chunks, on.chunk, 16, split_tokens=8 * on.chunk, timed=True)
        return q, *pool.unbind(1), forest.prefill(dict.fromkeys(sequences, new)), sequences

    def synchronize(self) -> None:
        if self.on.real:
            torch.cuda.synchronize()

    def captured(self, call: Callable[[], object]) -> Callable[[], object]:
        """The call as a CUDA graph; compiled before, as a graph may not."""
        if not self.on.real:
            return call
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def seconds(self, call: Callable[[], object], repeats: int | None = None) -> float:
        """Median time of a call with a cold L2. Writing the flushed bytes also hides the time to launch."""
        repeats = repeats or self.on.repeats
        for _ in range(3):
            call()
        flush = torch.empty(self.on.flush_bytes, dtype=torch.int8, device=self.on.device)
        if not self.on.real:
            took = []
            for _ in range(repeats):
                flush.zero_()
                began = time.perf_counter()
                call()
                took.append(time.perf_counter() - began)
            return statistics.median(took)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for begin, end in events:
            flush.zero_()
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3


def shared_memory(size: int) -> Any:
    """Bytes of a memfd, as the arena's: mapped, and there."""
    import mmap
    import os

    import numpy as np

    handle = os.memfd_create("gpu-check")
    try:
        os.ftruncate(handle, size)
        memory = np.frombuffer(mmap.mmap(handle, size), np.uint8)
    finally:
        os.close(handle)
    memory[:] = 1
    return memory


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit: NaN is like itself."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def random_sequences(seed: int, batch: int, chunk_tokens: int, more: int = 0) -> tuple[Sequences, int]:
    """Forks of one another at random chunks, with tails of any length, some empty; and how many chunks a pool needs."""
    draw = random.Random(seed)
    sequences: Sequences = {}
    used = 0
    for row in range(batch):
        chunks: list[int] = []
        if sequences and draw.random() < 0.8:
            other, tokens = sequences[draw.choice(list(sequences))]
            chunks = other[: draw.randint(0, tokens // chunk_tokens)]
        own = draw.randrange(6 * chunk_tokens) if draw.random() < 0.9 else 0
        count = -(-own // chunk_tokens)
        sequences[row] = ([*chunks, *range(used, used + count)], len(chunks) * chunk_tokens + own)
        used += count
    chunks_in_all = used + 5 + more
    places = list(range(chunks_in_all))
    draw.shuffle(places)
    return {
        row: ([places[chunk] for chunk in own], tokens) for row, (own, tokens) in sequences.items()
    }, chunks_in_all


if __name__ == "__main__":
    raise SystemExit(main())
