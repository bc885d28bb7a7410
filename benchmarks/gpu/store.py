"""The way to the store: registration, copies, the self-check."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from gpu.section import Row, Section, Steps


class Store(Section):
    """What lies between the arena and the device."""

    def steps(self) -> Steps:
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
