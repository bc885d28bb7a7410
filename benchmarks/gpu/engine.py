"""The engine on the device: its answers beside those of `generate`, and where the time of a turn goes."""

from __future__ import annotations

import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu.section import Row, Section, Setting, Steps

CLEAR = 0.25
"""A token whose logit is less above the second one than that may be another one for one that rounds otherwise."""


class Engine(Section):
    """Beside `generate`, in each dtype and with many sequences."""

    def steps(self) -> Steps:
        for dtype in self.dtypes():
            name = str(dtype).removeprefix("torch.")
            if self.on.brief:
                yield f"kernels and their check: {name}", partial(self.started, dtype)
                continue
            yield f"as generate: {name}", partial(self.as_generate, dtype, 12 if self.on.real else 3)
        if not self.on.brief:
            yield (
                "256 sequences at a time",
                partial(self.as_generate, torch.bfloat16, 256 if self.on.real else 5),
            )

    def started(self, dtype: torch.dtype) -> Row:
        """An engine, which compiles its kernels and compares them with what they should give."""
        from kvstore.gpu_worker.batching import BatchEngine

        chunk = 64 if self.on.real else 16
        BatchEngine(self.model(dtype), pool_chunks=16, chunk_tokens=chunk).close()
        return {}

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
            if self.on.real and not row["graphs"].get("replayed"):
                raise AssertionError(f"no step was replayed as a graph: {row['graphs']}")
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


class Trace(Engine):
    """Of one turn, as chrome://tracing reads it; `trace`: into this file, None: none."""

    def __init__(self, on: Setting, speeds: dict[str, float], trace: Path | None) -> None:
        super().__init__(on, speeds)
        self.trace = trace

    def steps(self) -> Steps:
        if self.trace is not None:
            yield "a turn whose history is loaded, and which is saved", self.trace_turn

    def trace_turn(self) -> Row:
        from torch.profiler import ProfilerActivity, profile
        from turns import BOUND_S, daemon

        from kvstore.client import connect
        from kvstore.gpu_worker.batching import BatchEngine

        history, new = (1024, 100) if self.on.real else (64, 20)
        text = list(range(history + new))
        with daemon("--protection=group") as run_dir:
            engine = BatchEngine(
                self.model(torch.bfloat16),
                lambda: connect(run_dir, timeout_s=BOUND_S),
                pool_chunks=2 * (history + new) // 16 + 8,
                chunk_tokens=16,
                sequences_max=4,
                retain=False,
            )
            try:
                for turn in range(2):  # the second is as all later ones are
                    engine.turn("", [*text[:history], turn], 8)
                    assert engine.flush(BOUND_S)
                activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on.real else [])]
                with profile(activities=activities) as profiled:
                    traced = engine.turn("", text, 8)
                    engine.flush(BOUND_S)
                    self.synchronize()
                assert traced.reused.dram == history, traced
            finally:
                engine.close()
        assert self.trace is not None
        profiled.export_chrome_trace(str(self.trace))
        return {"bytes": self.trace.stat().st_size, "ttft_ms": round(1e3 * traced.ttft_s, 2)}
