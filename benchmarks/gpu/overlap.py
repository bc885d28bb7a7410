"""Loading and saving beside computing: AttentionStore's figures 18 to 20, on a model of a 7B Llama's shape.

`benchmarks/overlap.py` says what is compared; here the link is the card's own. The model has as many layers as the
card's free memory has room for: the load of the first layer cannot be hidden, and counts for less the more there are.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import overlap
import torch
from turns import BOUND_S, daemon

from gpu.engine import CLEAR
from gpu.section import Row, Section, Steps
from kvstore.client import connect
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.layout import Geometry
from kvstore.gpu_worker.self_check import link_bytes_per_s

LAYERS = (32, 16, 8, 4)
LAYER_BYTES = 405 << 20
"""Of a layer's weights, in bfloat16."""
TOKEN_BYTES = 16 << 10
"""Of a token's KV in a layer."""
TOKENS = 32_000
"""That the pools of all engines of a step have room for, at most."""
SEGMENT_BYTES = 256 << 20
NO_PRELOADING = 1000
"""A read buffer that no model has so many layers for: all is loaded before the first layer computes."""


class Overlap(Section):
    """Turns whose history is loaded beside turns whose history was kept, and steps that save beside steps that do
    not."""

    def steps(self) -> Steps:
        real = self.on.real
        if self.on.brief:
            yield "kernels and their check: 7B shape", self.started
            return
        buffers = (NO_PRELOADING, 0, 5, 15, None) if real else (NO_PRELOADING, 0, None)
        history, new = (1024, 100) if real else (64, 10)
        yield (
            f"figure 19: {history} tokens loaded, {new} new, read buffers",
            partial(self.loading, history, new, buffers),
        )
        for history, new in ((4096, 1024), (512, 512), (896, 128)) if real else ((64, 20),):
            yield (
                f"figure 18: {history} tokens loaded, {new} new",
                partial(self.loading, history, new, (NO_PRELOADING, None)),
            )
        for tokens in (1024, 1600) if real else (64,):
            yield f"figure 20: a prompt of {tokens} tokens and what is decoded", partial(self.saving, tokens)
        yield "decode: steps of many sequences", self.decoding
        vars(self).pop("model", None)  # other sections need the memory

    def started(self) -> Row:
        BatchEngine(self.model, pool_chunks=16).close()
        return {}

    @cached_property
    def model(self) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        size = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
        if not self.on.real:
            size = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        config = LlamaConfig(
            vocab_size=32_000,
            num_hidden_layers=self.layers(),
            max_position_embeddings=8192,
            eos_token_id=None,
            **size,
        )
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16 if self.on.real else usual)
        try:
            with torch.device(self.on.device):
                return LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(usual)

    def layers(self) -> int:
        if not self.on.real or self.on.brief:
            return 2
        gc.collect()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        fits = [n for n in LAYERS if n * (LAYER_BYTES + TOKENS * TOKEN_BYTES) < 0.8 * free]
        return fits[0] if fits else 2

    @property
    def name(self) -> str:
        return f"7B shape, {self.model.config.num_hidden_layers} layers" if self.on.real else "tiny"

    @contextmanager
    def store(self, tokens: int) -> Iterator[str]:
        """A daemon with room for so many and little more: soon all of its arena is registered."""
        gc.collect()  # engines of the step before
        geometry = Geometry.of(self.model)
        wanted = tokens * geometry.token_bytes * geometry.layers
        segments = max(4, -(-wanted // SEGMENT_BYTES) + 2) if self.on.real else 4
        size = SEGMENT_BYTES if self.on.real else 16 << 20
        with daemon(
            "--protection=group", f"--dram-bytes={segments * size}", f"--segment-bytes={size}"
        ) as run_dir:
            yield run_dir

    def room(self, tokens: int) -> dict[str, Any]:
        """Of an engine's write buffer: nothing is dropped."""
        geometry = Geometry.of(self.model)
        return {"save_queue_bytes_max": 2 * tokens * geometry.token_bytes * geometry.layers}

    # -- loading

    def loading(self, history: int, new: int, buffers: tuple[int | None, ...]) -> Row:
        tokens = history + new
        with self.store(tokens) as run_dir:
            rows = overlap.loading(
                self.name,
                self.model,
                run_dir,
                history,
                new,
                pairs=10 if self.on.real else 2,
                buffers=buffers,
                make_device=self.make_device,
                clear=CLEAR if self.on.real else None,
                **self.room(tokens),
            )
        first, ours = rows[0], rows[-1]
        row: Row = {"figure": 19 if len(buffers) > 2 else 18, "model": self.name}
        row |= {"history_tokens": history, "new_tokens": new, "kept_ms": round(ours["kept_ms"], 3)}
        for each in rows:
            buffer = {"no pre-loading": "no_preloading"}.get(each["read_buffer"], each["read_buffer"])
            row |= {
                f"ms_buffer_{buffer}": round(each["loaded_ms"], 3),
                f"over_kept_buffer_{buffer}": round(each["over_kept"], 3),
            }
        row |= {"over_kept": round(ours["over_kept"], 3), "spread": round(ours["spread"], 3)}
        row |= {"load_over_kept": round(first["alone"], 3), "load_gb_per_s": round(first["load_gb_per_s"], 2)}
        row["of_loading_first"] = round(ours["loaded_ms"] / first["loaded_ms"], 3)
        if link := self.link:
            row["load_of_link"] = round(1e9 * first["load_gb_per_s"] / link, 3)
        return row

    @cached_property
    def link(self) -> float:
        """Bytes a second that one copy after the other reaches; 0 where there is no link."""
        device = self.make_device()
        try:
            return link_bytes_per_s(device, torch.device(self.on.device))
        finally:
            device.close()

    # -- saving

    def saving(self, tokens: int) -> Row:
        with self.store(2 * tokens) as run_dir:
            found = overlap.saving(
                self.name,
                self.model,
                run_dir,
                tokens,
                rounds=6 if self.on.real else 2,
                **self.room(tokens + overlap.DECODED),
            )
        row: Row = {"figure": 20, "model": self.name, "new_tokens": tokens}
        row |= {name: round(found[name], 3) for name in ("plain_ms", "behind", "spread", "in_line")}
        return row | {"of_in_line": round(found["behind"] / found["in_line"], 3), "dropped": found["dropped"]}

    def decoding(self) -> Row:
        """Steps in which all decode, chunks becoming full on the way."""
        batch, prompt, steps = (16, 250, 130) if self.on.real else (2, 60, 10)
        text, tokens = overlap.Text(3), batch * (prompt + steps + 1)
        options: dict[str, Any] = {
            "pool_chunks": batch * ((prompt + steps) // 64 + 2),
            "retain": False,
            "prefill_tokens": 2048,
            "sequences_max": batch,
        }
        ratios, plain_s = [], []
        with self.store(tokens) as run_dir:
            plain = BatchEngine(self.model, **options)
            saving = BatchEngine(
                self.model, lambda: connect(run_dir, timeout_s=BOUND_S), **options, **self.room(tokens)
            )
            try:
                for number in range(-1, 6 if self.on.real else 2):
                    prompts = [text(prompt) for _ in range(batch)]
                    without_s, with_s = (self.decoded(engine, prompts, steps) for engine in (plain, saving))
                    assert saving.flush(BOUND_S)
                    if number >= 0:
                        plain_s.append(without_s)
                        ratios.append(with_s / without_s)
                saved, dropped = (saving.save_counters[f"chunks_{what}"] for what in ("saved", "dropped"))
            finally:
                for engine in (plain, saving):
                    engine.close()
        row: Row = {"model": self.name, "sequences": batch, "steps": steps - batch}
        row |= {
            "step_ms": round(1e3 * statistics.median(plain_s) / (steps - batch), 3),
            "behind": round(statistics.median(ratios), 3),
            "spread": round(overlap.spread(ratios), 3),
        }
        return row | {"saved": saved, "dropped": dropped}

    def decoded(self, engine: BatchEngine, prompts: list[list[int]], steps: int) -> float:
        """Seconds of steps in which all have begun and none has ended: `steps`, but for one each prompt at most."""
        numbers = [engine.add(prompt, steps + 1) for prompt in prompts]
        begun: set[int] = set()
        while len(begun) < len(prompts):
            begun |= {output.request for output in engine.step()}
        seconds = overlap.took(self.stepped, engine, steps - len(prompts))
        assert engine.running == len(prompts)
        for number in numbers:
            engine.abort(number)
        return seconds

    def stepped(self, engine: BatchEngine, steps: int) -> None:
        for _ in range(steps):
            engine.step()
        self.synchronize()
