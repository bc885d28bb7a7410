"""Ours: a daemon and the client library. Engines know their keys before they save or load, so these are made before."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from peers import START_S, ByKey, Item, Server, Shape, attempts, free_port

GIVES = "leases, eviction by use and hints, tenants, generation checks; each put is checksummed where it is stored"
SEGMENT_BYTES = 64 << 20


def missing() -> str:
    return ""


def start(folder: Path, room_bytes: int, protection: str = "sealed") -> Server:
    run_dir, tcp = folder / protection, f"127.0.0.1:{free_port()}"
    command = [
        *(sys.executable, "-P", "-m", "kvstore", f"--run-dir={run_dir}", "--log-level=warning"),
        *(f"--dram-bytes={room_bytes // SEGMENT_BYTES * SEGMENT_BYTES}", f"--segment-bytes={SEGMENT_BYTES}"),
        *(
            f"--protection={protection}",
            f"--tcp-address={tcp}",
            "--tcp-unauthenticated",
            "--staging-bytes=128M",
            # What gets read stays and every put is stored, as in the other stores: the default policy may hold what is
            # there for worth more than a put that nobody reads again.
            "--eviction=lru",
        ),
    ]
    address = {"run_dir": str(run_dir), "tcp": tcp}
    return Server(address, (subprocess.Popen(command, stdout=subprocess.DEVNULL),))


def spec_of(shape: Shape) -> Any:
    from kvstore.layout import GroupSpec, NamespaceSpec

    return NamespaceSpec(
        model=f"bench-{shape.value_bytes}",
        weights_digest=b"bench",
        layout_fingerprint="bytes",
        chunk_tokens=16,
        groups=(GroupSpec("full", shard_bytes=shape.value_bytes),),
    )


def chunk_key(name: str) -> Any:
    from kvstore.types import ChunkKey

    return ChunkKey(hashlib.blake2b(name.encode(), digest_size=32).digest())


class Client(ByKey):
    """A put makes its batch visible; a write does by two messages, as a put did once; a get is read + copy + release; a
    fill is write + fill out of a region that was adopted + commit: the daemon copies."""

    FILLS_UP = 1.0

    def __init__(self, address: dict[str, Any], shape: Shape) -> None:
        from kvstore import client
        from kvstore.errors import Unavailable

        super().__init__(shape)
        batch_bytes = shape.batch_max * shape.value_bytes
        for _ in attempts("the daemon"):
            with contextlib.suppress(Unavailable):
                self._client = client.connect(
                    address["run_dir"], timeout_s=START_S, staging_bytes=max(batch_bytes, 64 << 20)
                )
                break
        self._space = self._client.open(spec_of(shape))
        if not hasattr(self._space, "put"):  # `make bench-check` compares with older clients, too
            self.put = self.write  # type: ignore[method-assign]
        for _ in attempts("the whole arena"):
            if (arena := self._client.stats().arena).ready_bytes == arena.bytes:
                break

    def key(self, number: int) -> Any:
        return chunk_key(super().key(number))

    def put(self, plan: list[Item]) -> None:
        put = self._space.put([item.key for item in plan], [item.value for item in plan])
        assert put.ok and len(put.committed) == len(plan), put

    def get(self, plan: list[Item]) -> None:
        with self._space.read([item.key for item in plan]) as lease:
            assert lease.hits == len(plan), lease
            assert lease.copy_many([(index, 0, 0, item.out) for index, item in enumerate(plan)])

    def write(self, plan: list[Item]) -> None:
        with self._space.write([item.key for item in plan]) as batch:
            assert len(batch.granted) == len(plan), (batch, batch.results[:1])
            batch.copy_many([(index, 0, item.value) for index, item in enumerate(plan)])
            assert batch.commit().ok

    def fill(self, plan: list[Item]) -> None:
        first = self._source.ctypes.data
        with self._space.write([item.key for item in plan], staged=False) as batch:
            assert len(batch.granted) == len(plan), (batch, batch.results[:1])
            batch.fill(self._region, [item.value.ctypes.data - first for item in plan])
            assert batch.commit().ok

    @cached_property
    def _region(self) -> Any:
        """A copy of the source in shared memory, lent to the daemon."""
        from kvstore import memory

        fd = memory.create_memfd("bench", self._source.nbytes)
        np.copyto(memory.map_shared(fd, self._source.nbytes, writable=True).array, self._source)
        region = self._client.adopt(fd, self._source.nbytes)
        os.close(fd)
        return region

    def close(self) -> None:
        assert not self._client.counters["saves_dropped"], self._client.counters
        self._client.close()
