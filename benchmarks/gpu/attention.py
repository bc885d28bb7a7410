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
    """ChunkAttention's Table 3."""

    def steps(self) -> Steps:
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
