"""The self-check: random bits through the whole path, device -> store -> device, before a device is trusted with KV.

What `kvctl doctor gpu` runs, and what a worker may run before it serves. Bits go from chunks of a pool through the
write buffer into the store, and from the store through the loader into other chunks, with the streams and events that
serving uses, several copies in flight at a time, whole chunks and a tail, for several shapes. Every byte is compared;
what differs names the shape, the chunk, the layer and the first byte. Bits are random, so that NaN of many kinds occur.
The doctor also compares each kernel with its naive.py (`kernels/self_check.py`), as an engine does for its own model.

As a program: one finding a line, as JSON (check, ok, detail, remedy). Ends with the first that is not ok.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstore.errors import StoreError
from kvstore.gpu_worker.device import CpuDevice, Device, DeviceFailed
from kvstore.gpu_worker.hbm_pool import HbmPool
from kvstore.gpu_worker.kernel_check import OTHER_VERSION, check_choice
from kvstore.gpu_worker.layout import Geometry
from kvstore.gpu_worker.loader import Loader, LoadFailed, Piece
from kvstore.gpu_worker.numa import nodes_of
from kvstore.gpu_worker.segments import Path, Segments
from kvstore.gpu_worker.write_buffer import WriteBuffer, regions
from kvstore.kernels.pages.cpu import INTEGERS
from kvstore.kernels.self_check import Shape, Wrong, check_kernels
from kvstore.layout import SELF_CHECK_LAYOUT, NamespaceSpec
from kvstore.types import ChunkKey, GrantResult

if TYPE_CHECKING:
    from kvstore.client import Namespace

CHUNKS = 6
"""Of each shape; the last is a tail. They are loaded in two parts, at the same time."""
GEOMETRIES = (
    Geometry(layers=2, heads=8, head_dim=128, dtype=torch.bfloat16, chunk_tokens=64),
    Geometry(layers=3, heads=1, head_dim=80, dtype=torch.float16, chunk_tokens=16),
    Geometry(layers=2, heads=3, head_dim=64, dtype=torch.float32, chunk_tokens=32),
)
KERNELS_OF = Shape(
    heads=32,
    kv_heads=8,
    head_dim=128,
    dtype=torch.bfloat16,
    chunk_tokens=64,
    split_tokens=512,
    tile_sequences=16,
    pairs=64,
)
"""Of an 8B model, as `forward.py` has it; an engine checks its own model's."""
VOCABULARY = 128_256
TIMEOUT_S = 30.0
HOW = {
    Path.DIRECT: "the client copies, into memory of the host",
    Path.REGISTERED: "the device copies out of the arena, whose segments are registered with it",
    Path.BOUNCE: "the device copies out of a bounce ring: the daemon's protection is sealed, and the device registers "
    'no memory that is read-only; with protection = "group" one copy less',
}


CANNOT = "see that the driver fits torch, and that the device is free; or use the store from a CPU"
NO_GPU = f"no GPU is seen by this torch ({torch.__version__})"
LINK_BYTES = 64 << 20


class Refused(Exception):
    """The device, or the way to it, is not to be used."""


@dataclass(frozen=True, slots=True)
class Passed:
    """Of one shape."""

    bytes: int
    """That went there and back."""
    out_s: float
    """From the pool into host memory."""
    in_s: float
    """From the store into the pool."""


def spec_of(geometry: Geometry) -> NamespaceSpec:
    """Of what checks store. Their keys are of random tokens, so that no two checks name the same chunk."""
    dtype = str(geometry.dtype).removeprefix("torch.")
    return NamespaceSpec(
        model=f"kvstore-self-check {geometry.heads}x{geometry.head_dim} {dtype}",  # a model has one layout
        weights_digest=b"kvstore.self.v1",
        layout_fingerprint=f"{SELF_CHECK_LAYOUT}k,v:[H,T,D]:{dtype}",
        chunk_tokens=geometry.chunk_tokens,
        groups=(geometry.group,),
    )


def check(
    device: Device,
    where: torch.device,
    geometry: Geometry,
    open_namespace: Callable[[NamespaceSpec], Namespace],
    *,
    path: Path = Path.DIRECT,
    seed: int = 0,
    timeout_s: float = TIMEOUT_S,
) -> Passed:
    """One shape, in a pool of its own in the memory of `where`, which is that of `device`, which gets at the arena by
    `path`. What it stores it drops again. Raises Refused, naming what differs or failed, and StoreError where the store
    is not there."""
    namespace = open_namespace(spec_of(geometry))
    keys: list[ChunkKey] = []
    try:
        return _Check(device, where, geometry, namespace, path, seed, timeout_s).run(keys)
    except (DeviceFailed, LoadFailed) as error:
        raise Refused(f"{_named(geometry)}: {error}") from error
    finally:
        if keys:
            namespace.forget(keys=keys, timeout_s=timeout_s)


class _Check:
    def __init__(
        self,
        device: Device,
        where: torch.device,
        geometry: Geometry,
        namespace: Namespace,
        path: Path,
        seed: int,
        timeout_s: float,
    ) -> None:
        self.path = path
        self.device, self.geometry, self.namespace, self.timeout_s = device, geometry, namespace, timeout_s
        self.pool = HbmPool(geometry, 2 * CHUNKS, device=where)
        device.adopt(self.pool.layers)
        draw = torch.Generator().manual_seed(seed)
        shape = (CHUNKS, geometry.layers, 2, geometry.heads, geometry.chunk_tokens, geometry.head_dim)
        raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * geometry.dtype.itemsize), generator=draw)
        self.bits = raw.to(torch.uint8).view(INTEGERS[geometry.dtype.itemsize])
        """[chunks, layers, 2, heads, chunk_tokens, head_dim], as integers: no copy of a NaN changes them."""
        self.layers = [layer.view(INTEGERS[geometry.dtype.itemsize]) for layer in self.pool.layers]
        self.tail = max(1, geometry.chunk_tokens // 3)

    def run(self, keys: list[ChunkKey]) -> Passed:
        chunks = self.pool.take(2 * CHUNKS)
        assert chunks is not None
        sources, targets = chunks[:CHUNKS], chunks[CHUNKS:]
        for layer in range(self.geometry.layers):
            self.device.compute.run(partial(self._fill, layer, sources), writes=regions(layer, sources))
        out_s = self._save(sources, keys)
        in_s = self._load(targets, keys)
        for layer in range(self.geometry.layers):
            self.device.compute.run(partial(self._compare, layer, targets), reads=regions(layer, targets))
        return Passed(CHUNKS * self.geometry.shard_bytes, out_s, in_s)

    def _tokens(self, number: int) -> int:
        return self.tail if number == CHUNKS - 1 else self.geometry.chunk_tokens

    def _fill(self, layer: int, chunks: Sequence[int]) -> None:
        for number, chunk in enumerate(chunks):
            self.layers[layer][chunk].copy_(self.bits[number, layer])

    def _save(self, sources: Sequence[int], keys: list[ChunkKey]) -> float:
        begun = time.perf_counter()
        buffer = WriteBuffer(self.pool, self.device)
        leaving = [
            (number, buffer.copy([chunk], self._tokens(number))) for number, chunk in enumerate(sources)
        ]
        for _, outgoing in leaving:
            outgoing.wait()
        out_s = time.perf_counter() - begun
        size = self.geometry.chunk_tokens
        tokens = [secrets.randbits(31) for _ in range((CHUNKS - 1) * size + self.tail)]
        keys += self.namespace.keys(tokens[: -self.tail])
        keys.append(self.namespace.tail_key(tokens[-self.tail :], keys[-1]))
        counts = [self._tokens(number) for number in range(CHUNKS)]
        with self.namespace.write(keys, token_counts=counts, timeout_s=self.timeout_s) as batch:
            if any(result is not GrantResult.GRANTED for result in batch.results):
                results = ", ".join(result.name for result in batch.results)
                raise Refused(
                    f"{_named(self.geometry)}: the store has no room for {CHUNKS} chunks: {results}"
                )
            for number, outgoing in leaving:
                np.copyto(batch.buffer(number), outgoing.shard(0))
                batch.written(number)
            outcome = batch.commit(timeout_s=self.timeout_s)
        for _, outgoing in leaving:
            outgoing.release()
        if not outcome.ok:
            raise Refused(f"{_named(self.geometry)}: the store took nothing: {outcome.error}")
        return out_s

    def _load(self, targets: Sequence[int], keys: Sequence[ChunkKey]) -> float:
        begun = time.perf_counter()
        loader = Loader(self.geometry, device=self.device, bounce=self.path is Path.BOUNCE)
        size = self.geometry.chunk_tokens
        try:
            loads = []
            for part in (range(CHUNKS // 2), range(CHUNKS // 2, CHUNKS)):
                lease = self.namespace.read(
                    [keys[number] for number in part], any_order=True, pin=True, timeout_s=self.timeout_s
                )
                pieces = [Piece(at, number * size, self._tokens(number)) for at, number in enumerate(part)]
                chunks = [targets[number] for number in part]
                loads.append(
                    loader.start(
                        lease,
                        pieces,
                        self._place(targets),
                        deadline_s=self.timeout_s,
                        after=[self.device.compute.record()],
                        regions=partial(regions, chunks=chunks),
                    )
                )
            for load in loads:
                for layer in range(self.geometry.layers):
                    load.wait(layer)
                load.settle()
        finally:
            loader.close()
        return time.perf_counter() - begun

    def _place(self, targets: Sequence[int]) -> Callable[[int, Piece], object]:
        layers = self.pool.layers
        host = [layer.numpy() for layer in self.layers] if self.device.in_host_memory else None

        def place(layer: int, piece: Piece) -> object:
            chunk = targets[piece.first_token // self.geometry.chunk_tokens]
            return (host or layers)[layer][chunk][:, :, : piece.token_count]

        return place

    def _compare(self, layer: int, targets: Sequence[int]) -> None:
        for number, chunk in enumerate(targets):
            count = self._tokens(number)
            wanted = self.bits[number, layer][:, :, :count].contiguous().view(torch.uint8).flatten()
            found = self.layers[layer][chunk][:, :, :count].cpu().contiguous().view(torch.uint8).flatten()
            if not torch.equal(found, wanted):
                differ = (found != wanted).nonzero().flatten()
                raise Refused(
                    f"{_named(self.geometry)}: chunk {number}, layer {layer}: {len(differ)} of {len(wanted)} bytes came"
                    f" back otherwise, the first at {int(differ[0])}"
                )


def link_bytes_per_s(device: Device, where: torch.device) -> float:
    """What one copy after the other out of registered memory reaches; 0 for memory that is the host's."""
    if device.in_host_memory:
        return 0.0
    memory = device.buffer(LINK_BYTES)
    card = torch.empty(LINK_BYTES, dtype=torch.uint8, device=where)
    stream = device.stream("kv-link")
    took = []
    for _ in range(4):
        begun = time.perf_counter()
        stream.run(partial(device.copy_in, card, memory))
        stream.record().synchronize()
        took.append(time.perf_counter() - begun)
    return LINK_BYTES / min(took)


def placement(node: int | None, segments: Segments) -> str:
    """Where the device's host memory is, on a machine where that makes a difference."""
    if node is None:
        return ""
    pages = sum((nodes_of(*one) for one in segments.registered), Counter())
    there = ", ".join(f"{count} on node {number}" for number, count in sorted(pages.items())) or "none"
    return f"; the device is near NUMA node {node}; of the arena's pages that were looked at: {there}"


def _named(geometry: Geometry) -> str:
    dtype = str(geometry.dtype).removeprefix("torch.")
    return f"{geometry.heads} x {geometry.head_dim} {dtype}, chunks of {geometry.chunk_tokens}"


def devices() -> Iterator[tuple[str, torch.device, Callable[[], Device]]]:
    """Each that there is: its name, where its memory is, and how it is made."""
    for number in range(torch.cuda.device_count()):
        from kvstore.gpu_worker.cuda import CudaDevice

        where = torch.device("cuda", number)
        name = f"cuda:{number} {torch.cuda.get_device_name(number)}"
        yield name, where, partial(CudaDevice, where)
    yield "cpu", torch.device("cpu"), CpuDevice


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="kvctl doctor gpu", description=__doc__)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--timeout", type=float, default=5.0)
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    from kvstore.client import connect

    for name, where, make in devices():
        finding: dict[str, object] = {"check": name, "ok": True, "detail": "", "remedy": ""}
        try:
            device = make()
        except (
            RuntimeError
        ) as error:  # torch's: a driver that is too old, a card that somebody else has alone
            print(json.dumps(finding | {"ok": False, "detail": str(error), "remedy": CANNOT}), flush=True)
            sys.exit(1)
        segments = Segments(device)
        try:
            with connect(options.run_dir, timeout_s=options.timeout) as client:
                segments.attach(client)
                passed = [
                    check(device, where, geometry, client.open, path=segments.path) for geometry in GEOMETRIES
                ]
                near = placement(device.node, segments)
            if segments.failure:
                raise Refused(segments.failure)
            if not device.in_host_memory:
                check_kernels(KERNELS_OF, where)
                check_choice(VOCABULARY, where)
            link = link_bytes_per_s(device, where)
            moved = sum(one.bytes for one in passed)
            finding["detail"] = (
                f"{moved >> 10} KiB there and back in {len(passed)} shapes, no byte differs; out "
                f"{moved / sum(one.out_s for one in passed) / 1e6:.0f} MB/s, in "
                f"{moved / sum(one.in_s for one in passed) / 1e6:.0f} MB/s, with all that goes with it; "
                f"{HOW[segments.path]}"
                + (f"; the link takes {link / 1e9:.1f} GB/s from registered memory" if link else "")
                + ("" if device.in_host_memory else f"; every kernel gives what it should, {KERNELS_OF}")
                + near
                + (f"; {NO_GPU}" if name == "cpu" and not torch.cuda.device_count() else "")
            )
        except RuntimeError as error:  # no memory left on it, or the context is lost
            finding |= {"ok": False, "detail": str(error), "remedy": CANNOT}
        except Refused as refused:
            finding |= {"ok": False, "detail": segments.failure or str(refused)}
            finding["remedy"] = "do not use this device with the store, and look at its driver and memory"
        except Wrong as wrong:
            finding |= {"ok": False, "detail": f"a kernel is wrong: {wrong}", "remedy": OTHER_VERSION}
        except StoreError as error:
            finding |= {"ok": False, "detail": error.message}
            finding["remedy"] = error.remedy or "see the daemon's log"
        segments.close()
        device.close()
        print(json.dumps(finding), flush=True)
        if not finding["ok"]:
            sys.exit(1)


if __name__ == "__main__":
    main()
