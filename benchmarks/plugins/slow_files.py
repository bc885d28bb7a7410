"""LMCache's files as its second level, on a disk that reads no faster than SLOW_FILES_BYTES_PER_S; no page cache helps.
A plug-in of its server; the figures of `kvstore.sim.daemon` mean the same."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig

__all__ = ["FSL2AdapterConfig", "SlowFiles"]
BYTES_PER_S = float(os.environ.get("SLOW_FILES_BYTES_PER_S", "inf"))


class SlowFiles(FSL2Adapter):  # type: ignore[misc]
    def __init__(self, config: FSL2AdapterConfig, **_: Any) -> None:
        super().__init__(config)
        self._free_at = 0.0

    async def _execute_load(self, keys: Any, objects: Any, task_id: Any) -> None:
        now = asyncio.get_running_loop().time()
        size = sum(len(each.byte_array) for each in objects)
        self._free_at = max(self._free_at, now) + size / BYTES_PER_S
        await asyncio.sleep(self._free_at - now)
        await super()._execute_load(keys, objects, task_id)
