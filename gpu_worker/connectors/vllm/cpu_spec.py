"""vLLM's tiered KV offloading on machines without a GPU.

vLLM's own worker for it refuses every device but CUDA and XPU, because it copies with their streams. Where the paged
cache is in host memory anyway, a copy is a copy: with this spec the tier can be tried, and is tested, on a CPU. There
is nothing to gain from it otherwise: the connector saves such a cache without a second copy of it in host memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstore.errors import Unsupported


class CPUTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """`"spec_name": "CPUTieringSpec", "spec_module_path": "kvstore.gpu_worker.connectors.vllm.cpu_spec"`."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """As vLLM's, but for the device."""
        worker: OffloadingWorker | None = getattr(self, "_worker", None)
        if worker is None:
            worker = self._worker = self.create_worker(kv_caches)
        return worker

    def create_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Raises Unsupported."""
        for tensor in kv_caches.tensors:
            if tensor.tensor.device.type != "cpu":
                raise Unsupported(
                    "this worker copies host memory only",
                    field="spec_name",
                    value=type(self).__name__,
                    remedy="use vLLM's TieringOffloadingSpec",
                )
        if self.config.canonical_layout:
            raise Unsupported("is not supported on a CPU", field="canonical_layout", value=True)
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return CopyWorker(kv_caches, region, self.blocks_per_chunk)


class CopyWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies at once, on the caller's thread."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int
    ) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._groups = [sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs]
        """Numbers of the tensors that hold each group."""
        self._pages = [tensor.page_size_bytes for tensor in kv_caches.tensors]
        self._blocks: list[torch.Tensor] = [tensor.tensor for tensor in kv_caches.tensors]
        """[blocks, page bytes] of int8, with whatever strides."""
        self._rows: list[torch.Tensor] = [
            region.create_next_worker_view(page * blocks_per_chunk) for page in self._pages
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_rows=True)

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_rows=False)

    def _copy(self, job_id: int, blocks: GPULoadStoreSpec, rows: Any, *, to_rows: bool) -> bool:
        begun, copied = time.monotonic(), 0
        for tensors, block, row, part in self._pairs(blocks, rows):
            for number in tensors:
                page = self._pages[number]
                place = self._rows[number][row, part * page : (part + 1) * page]
                if to_rows:
                    place.copy_(self._blocks[number][block])
                else:
                    self._blocks[number][block].copy_(place)
                copied += page
        self._finished.append(TransferResult(job_id, True, copied, max(1e-9, time.monotonic() - begun)))
        return True

    def _pairs(
        self, blocks: GPULoadStoreSpec, rows: BlockIDsLoadStoreSpec
    ) -> Iterator[tuple[list[int], int, int, int]]:
        """(its tensors, block, row, which part of the row): group after group, each group's first row perhaps from its
        middle on."""
        per_row = self._blocks_per_chunk
        block_at = row_at = 0
        for tensors, count, first in zip(self._groups, blocks.group_sizes, blocks.block_indices, strict=True):
            if not count:
                continue
            skipped = first % per_row
            for index in range(count):
                row, part = divmod(skipped + index, per_row)
                yield (
                    tensors,
                    int(blocks.block_ids[block_at + index]),
                    int(rows.block_ids[row_at + row]),
                    part,
                )
            block_at += count
            row_at += -(-(skipped + count) // per_row)
        assert (block_at, row_at) == (len(blocks.block_ids), len(rows.block_ids)), (blocks, rows)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """All were copied when they were submitted."""

    def shutdown(self) -> None:
        self._blocks.clear()
        self._rows.clear()
        self._region.cleanup()
