"""How fast attention is, beside the rates of the card, torch and FlashInfer; and what plans cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from gpu.section import Row, Section, Sequences, Steps
from kvstore.kernels.decode import decode_attention
from kvstore.kernels.prefill import prefill_attention

PEERS_TOLERANCE = 2e-2
TABLE_3 = {
    **{(1024, 0): 332.50, (1024, 512): 198.87, (1024, 768): 131.21, (1024, 1024): 56.00},
    **{(2048, 0): 655.44, (2048, 1024): 384.37, (2048, 1536): 247.14, (2048, 2048): 110.48},
    **{(4096, 0): 1301.78, (4096, 2048): 747.56, (4096, 3072): 477.66, (4096, 4096): 206.22},
}
"""(tokens of a sequence, of them shared) -> microseconds of ChunkAttention's kernel on an A100, as its paper says."""
FIGURE_3 = {512: 145_000, 2048: 70_000}
FIGURE_4 = {16: 155_000, 96: 224_000}
"""Tokens a second with 2,048 tokens shared, by tokens of a sequence's own and by batch."""


class Plans(Section):
    """A token more, a join and a leave, the plan of a prefill."""

    def steps(self) -> Steps:
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


class Beside(Section):
    """Attention of torch and FlashInfer on the same queries and keys."""

    def compare(self, row: Row, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """With torch's result, which is as exact. The figures of the row are kept even if it is wrong."""
        differ = (ours - theirs).abs().max().item()
        row["differs_from_torch"] = differ
        if not differ <= PEERS_TOLERANCE * (1 + theirs.abs().max().item()):
            row["error"] = f"differs by {differ:.3g} from torch"

    def over_others(self, row: Row, best: float) -> float:
        others = [value for name, value in row.items() if name.endswith("_us") and isinstance(value, float)]
        return round(min(others) / best, 3)

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


class Decode(Beside):
    """ChunkAttention's Table 3 and Figures 3 and 4."""

    def steps(self) -> Steps:
        for tokens, shared in self.on.points:
            for kv_heads in (self.on.heads, self.on.heads // 4):
                yield (
                    f"{tokens} tokens, {shared} shared, {self.on.heads}/{kv_heads} heads",
                    (lambda tokens=tokens, shared=shared, kv=kv_heads: self.point(tokens, shared, kv)),
                )
        yield "figure 3: tokens a second while sequences diverge", self.diverging
        yield "figure 4: tokens a second of several batches", self.batches

    def point(self, tokens: int, shared: int, kv_heads: int) -> Row:
        on = self.on
        q, pool, sequences, out, row = self.timed(on.batch, tokens, shared, kv_heads)
        keys, values = pool.unbind(1)
        row |= {"tokens": tokens, "shared": shared, "kv_heads": kv_heads}
        if (paper := TABLE_3.get((tokens, shared))) and kv_heads == on.heads:
            row["paper_us_on_a100"] = paper
        best = row["us"]
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

    def timed(
        self, batch: int, tokens: int, shared: int, kv_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor, Sequences, torch.Tensor, Row]:
        """(queries, pool, sequences, result, figures): every shape of tile and item, the best of them."""
        on = self.on
        sequences, chunks = self.sharing(batch, tokens, shared)
        pool = self.randn(0, chunks, 2, kv_heads, on.chunk, on.head_dim).to(torch.float16)
        keys, values = pool.unbind(1)
        q = self.randn(1, batch, on.heads, on.head_dim).to(torch.float16)
        moved = pool.nbytes + 2 * q.nbytes
        row: Row = {"bytes": moved}
        out = torch.empty_like(q)
        for rows, split in on.variants:
            tile = max(1, rows * kv_heads // on.heads)
            plan = self.forest(
                sequences, batch, chunks, on.chunk, tile, split_tokens=split, timed=True
            ).plan()
            call = self.captured(lambda plan=plan: decode_attention(q, keys, values, plan, out=out))
            row[f"us_rows_{rows}_split_{split}"] = round(1e6 * self.seconds(call, 2 * on.repeats), 1)
        best = min(value for name, value in row.items() if name.startswith("us_rows"))
        row |= {"us": best, "tb_per_s": round(moved / best / 1e6, 3)}
        if "read" in self.speeds:
            row["of_roofline"] = round(moved / best * 1e6 / max(self.speeds["read"], self.speeds["copy"]), 3)
        return q, pool, sequences, out, row

    def diverging(self) -> Row:
        """Of the kernel alone, on average while sequences have generated up to so many tokens of their own."""
        on, (shared, owns) = self.on, ((2048, (64, 512, 1024, 2048)) if self.on.real else (32, (16, 32)))
        row: Row = {"batch": on.batch, "shared": shared, "paper_per_s_on_a100": FIGURE_3}
        seconds, before, last = 0.0, 0, 0.0
        for own in owns:
            step_s = self.timed(on.batch, shared + own, shared, on.heads)[-1]["us"] / 1e6
            seconds += (own - before) * (step_s + (last or step_s)) / 2
            before, last = own, step_s
            row |= {f"us_{own}": round(1e6 * step_s, 1), f"per_s_{own}": round(on.batch * own / seconds)}
        return row

    def batches(self) -> Row:
        """Of the kernel alone, with one chunk of each sequence's own."""
        on, (shared, batches) = self.on, ((2048, (1, 8, 16, 32, 64, 96)) if self.on.real else (32, (1, 3)))
        row: Row = {"shared": shared, "paper_per_s_on_a100": FIGURE_4}
        for batch in batches:
            us = self.timed(batch, shared + on.chunk, shared, on.heads)[-1]["us"]
            row |= {f"us_batch_{batch}": us, f"per_s_batch_{batch}": round(1e6 * batch / us)}
        return row

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


class Prefill(Beside):
    """Pieces of prompts behind cached tokens that they share."""

    def steps(self) -> Steps:
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
