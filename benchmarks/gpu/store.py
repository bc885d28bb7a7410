"""The way to the store: registration, copies, the self-check."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from gpu.section import Row, Section, Steps
from kvstore.gpu_worker.loader import Loader, Piece


class Store(Section):
    """What lies between the arena and the device."""

    def steps(self) -> Steps:
        yield "registration", self.registration
        yield "copies between host and device", self.link
        yield "loads", self.loads
        for protection in (
            "group",
            "sealed",
        ):  # out of the arena itself; with most cards through the bounce ring
            yield f"self-check, {protection}", partial(self.self_check, protection)

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
        count, size = (512, 256 << 10) if self.on.real else (4, 1 << 10)
        device = self.make_device()
        mapped = shared_memory(count * size)
        device.register(mapped)
        card = torch.empty(count, size, dtype=torch.uint8, device=self.on.device)
        places = {
            "registered": mapped,
            "pinned": device.buffer(count * size),
            "pageable": np.ones(count * size, np.uint8),
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
                if name == "pageable":  # a kernel must not read it, and a driver may refuse batches of it
                    ways["in"] = ways.pop("in_one_by_one")
                    ways["out"] = lambda back=back: [device.copy_out(*pair) for pair in back]
                for way, call in ways.items():
                    took = []
                    for _ in range(4):
                        began = time.perf_counter()
                        stream.run(call)
                        stream.record().synchronize()
                        took.append(time.perf_counter() - began)
                    row[f"{name}_{way}_gb_per_s"] = round(count * size / min(took) / 1e9, 2)
        finally:
            device.unregister(mapped.ctypes.data)
            device.close()
        best = max(row[f"{name}_in_as_a_whole_gb_per_s"] for name in ("registered", "pinned"))
        for name in places:
            row[f"{name}_of_link"] = round(row[f"{name}_in_gb_per_s"] / best, 3) if best else 0.0
        return row

    def loads(self) -> Row:
        """GB/s of the worker's loader, out of registered memory, through the bounce ring, and with keys that are
        rotated on the way; what it wrote is what lay there."""
        from kvstore.gpu_worker.hbm_pool import HbmPool
        from kvstore.gpu_worker.layout import Geometry
        from kvstore.gpu_worker.positions import Positions
        from kvstore.gpu_worker.self_check import link_bytes_per_s

        model, chunks = self.narrow_model(), 64 if self.on.real else 4
        geometry, positions = Geometry.of(model, self.on.chunk), Positions.of(model)
        device = self.make_device()
        link = link_bytes_per_s(device, torch.device(self.on.device))
        stored = shared_memory(chunks * geometry.shard_bytes)
        stored[:] = np.random.default_rng(0).integers(0, 256, len(stored), np.uint8)
        device.register(stored)
        row: Row = {"bytes": stored.nbytes, "layers": geometry.layers, "link_gb_per_s": round(link / 1e9, 2)}
        try:
            for way, bounce, delta in (
                ("registered", False, 0),
                ("bounce", True, 0),
                ("rotated", False, 1000),
            ):
                pool = HbmPool(geometry, chunks, device=self.on.device)
                loader = Loader(geometry, positions, device=device, bounce=bounce)
                pieces = [
                    Piece(n, n * geometry.chunk_tokens, geometry.chunk_tokens, delta) for n in range(chunks)
                ]
                seconds = min(self.load_s(device, loader, pool, stored, pieces, bounce) for _ in range(4))
                loader.close()
                self.check_loaded(way, pool, stored, moved=bool(delta))
                row[f"{way}_gb_per_s"] = round(stored.nbytes / seconds / 1e9, 2)
                if link:
                    row[f"{way}_of_link"] = round(stored.nbytes / seconds / link, 3)
        finally:
            device.unregister(stored.ctypes.data)
            device.close()
        return row

    def narrow_model(self) -> Any:
        """With the KV of a 7B Llama, and next to no weights."""
        from transformers import LlamaConfig, LlamaForCausalLM

        size = (8, 32, 128) if self.on.real else (2, 4, 16)
        layers, heads, head_dim = size
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            head_dim=head_dim,
        )
        return LlamaForCausalLM(config).to(torch.bfloat16)

    def load_s(
        self, device: Any, loader: Loader, pool: Any, stored: Any, pieces: list[Piece], bounce: bool
    ) -> float:
        from kvstore.gpu_worker.layout import bits

        on_host = device.in_host_memory and not bounce
        layers = [bits(layer) for layer in pool.layers] if on_host else pool.layers
        held: Any = Held(stored.reshape(pool.chunks, -1))
        load = loader.start(held, pieces, lambda layer, piece: layers[layer][piece.index], deadline_s=60.0)
        load.settle()
        return load.seconds

    def check_loaded(self, way: str, pool: Any, stored: Any, *, moved: bool) -> None:
        wanted = torch.from_numpy(stored).view(pool.chunks, pool.geometry.layers, 2, -1)
        for number, layer in enumerate(pool.layers):
            found = layer.flatten(2).view(torch.uint8).cpu()
            if not torch.equal(found[:, moved:], wanted[:, number, moved:]):
                raise AssertionError(f"{way}: what was loaded differs in layer {number}")
            if moved and torch.equal(found[:, 0], wanted[:, number, 0]):
                raise AssertionError(f"{way}: what should have moved differs in nothing")

    def self_check(self, protection: str) -> Row:
        """As `kvctl doctor gpu` and a worker do it, with a daemon of its own."""
        from turns import daemon

        from kvstore.client import connect
        from kvstore.gpu_worker.segments import Segments
        from kvstore.gpu_worker.self_check import GEOMETRIES, check

        with daemon(f"--protection={protection}") as run_dir:
            device = self.make_device()
            segments = Segments(device)
            try:
                with connect(run_dir, timeout_s=30.0) as client:
                    segments.attach(client)
                    where = torch.device(self.on.device, 0) if self.on.real else torch.device("cpu")
                    passed = [
                        check(device, where, geometry, client.open, path=segments.path)
                        for geometry in GEOMETRIES
                    ]
                    assert not segments.failure, segments.failure
                return {
                    "path": segments.path.value,
                    "reads_read_only": device.registers_read_only,
                    "bytes": sum(one.bytes for one in passed),
                }
            finally:
                segments.close()
                device.close()


class Held:
    """A lease on chunks that nobody takes away: [chunks, bytes of a shard]."""

    def __init__(self, shards: Any) -> None:
        self.shards = shards

    def unsafe_views(self, pieces: Sequence[tuple[int, int, int, int]]) -> list[Any]:
        return [self.shards[index, offset : offset + length] for index, _, offset, length in pieces]

    def copy_many(self, pieces: Sequence[tuple[int, int, int, Any]]) -> bool:
        for index, _, offset, target in pieces:
            source = self.shards[index, offset : offset + target.nbytes]
            np.copyto(target, source.view(target.dtype).reshape(target.shape))
        return True

    def read_in_place(
        self, pieces: Sequence[tuple[int, int, int, int]], use: Callable[[list[Any]], None]
    ) -> bool:
        use(self.unsafe_views(pieces))
        return True

    def intact(self) -> bool:
        return True

    def release(self) -> None: ...


def shared_memory(size: int) -> Any:
    """Bytes of a memfd, as the arena's: mapped, and there."""
    handle = os.memfd_create("gpu-check")
    try:
        os.ftruncate(handle, size)
        memory = np.frombuffer(mmap.mmap(handle, size), np.uint8)
    finally:
        os.close(handle)
    memory[:] = 1
    return memory
