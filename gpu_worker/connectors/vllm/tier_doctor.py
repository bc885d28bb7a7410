"""The doctor's part for the tier: is it configured, and do rows of the model's size come back as they were?"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import secrets
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvstore.client import connect
from kvstore.errors import StoreError, Unavailable
from kvstore.gpu_worker.compute_or_load import ComputeOrLoad
from kvstore.gpu_worker.connectors.link import Link
from kvstore.gpu_worker.connectors.offload import Crew, RowLoader, Rows, RowSaver, Tally, Transfer
from kvstore.gpu_worker.connectors.vllm.settings import TierSettings
from kvstore.gpu_worker.connectors.vllm.tier import COUNTERS
from kvstore.gpu_worker.connectors.vllm.tier_identity import Engine, namespace_of_rows
from kvstore.keys import ROOT
from kvstore.types import ChunkKey

CONNECTOR = "OffloadingConnector"
MODULE = "kvstore.gpu_worker.connectors.vllm.tier"
TIER = "KVStoreTier"
OURS = ("type", "module_path", "backpressure")
"""vLLM's own settings of a tier."""
ROWS = 3


def tier_settings(transfer: Any) -> TierSettings | None:
    """Those of our tier, where vLLM's offloading is configured with it. Raises ConfigError."""
    if transfer is None or transfer.kv_connector != CONNECTOR:
        return None
    for tier in transfer.kv_connector_extra_config.get("secondary_tiers") or []:
        if (tier.get("type"), tier.get("module_path")) == (TIER, MODULE):
            return TierSettings.of({name: value for name, value in tier.items() if name not in OURS})
    return None


def beside_other_tiers(transfer: Any, settings: TierSettings) -> str:
    """What is said of those that the engine has besides."""
    tiers = transfer.kv_connector_extra_config.get("secondary_tiers") or []
    others = [str(tier.get("type")) for tier in tiers if tier.get("type") != TIER]
    if not others:
        return ""
    saved = "is saved too" if settings.save_what_others_load else "is not saved"
    return f", beside the tier {' and '.join(others)}: what follows KV of theirs {saved}"


def row_room(config: Any, row_bytes: int) -> str:
    """How much vLLM's own host memory holds."""
    given = int(config.kv_transfer_config.kv_connector_extra_config.get("cpu_bytes_to_use") or 0)
    return f"; vLLM's own memory of {given / (1 << 30):.3g} GiB holds {given // max(1, row_bytes):,} rows"


def daemon_room(run_dir: str, rate: float, timeout_s: float) -> str:
    """How many tokens the daemon holds, at so many bytes a token. Raises StoreError."""
    with connect(run_dir, timeout_s=timeout_s) as client:
        reply = client.stats(timeout_s=timeout_s)
    rooms = [("DRAM", reply.arena.bytes)]
    if reply.ssd.bytes:
        rooms.append(("SSD", reply.ssd.bytes))
    return "the daemon's " + ", ".join(
        f"{name} of {given / (1 << 30):.3g} GiB {given / max(1.0, rate):,.0f} tokens" for name, given in rooms
    )


def round_trip(config: Any, cache: KVCacheConfig, settings: TierSettings, timeout_s: float) -> str:
    """Rows of the model's size, read by the daemon out of a file in memory, found, and copied into others, in a
    namespace of their own. Raises StoreError."""
    spec = OffloadingSpecFactory.create_spec(build_offloading_config(config, cache))
    settings = dataclasses.replace(settings, salt=f"doctor {secrets.token_hex(16)}")
    row_bytes = int(spec.kv_bytes_per_chunk)
    name = namespace_of_rows(Engine(config, cache), spec, settings, row_bytes=row_bytes, weights=bytes(32))
    keys = [ChunkKey(secrets.token_bytes(36)) for _ in range(ROWS)]
    with contextlib.ExitStack() as stack:
        fd = os.memfd_create("kvctl-doctor")
        stack.callback(os.close, fd)
        os.ftruncate(fd, 2 * ROWS * row_bytes)
        memory = stack.enter_context(mmap.mmap(fd, 2 * ROWS * row_bytes))
        rows = Rows(memoryview(memory).cast("B", (2 * ROWS, row_bytes)), fd)
        stack.callback(rows.close)
        link = Link(
            settings.run_dir,
            engine_group="",
            rank=0,
            timeout_s=timeout_s,
            staging_bytes=max(64 << 20, 2 * row_bytes),
        )
        stack.callback(link.close)
        link.open(name)
        opened = link.namespace(name, timeout_s)
        if opened is None:
            raise Unavailable(
                link.complaint or "the daemon did not answer in time", remedy="run kvctl doctor without vllm"
            )
        crew = Crew("doctor", threads=1, waiting_max=2)
        stack.callback(crew.close, timeout_s)
        tally = Tally(COUNTERS)
        saver = RowSaver(rows, crew, lambda _: opened, tally, rows_max=ROWS, maker=secrets.token_bytes(16))
        stack.callback(saver.close)
        loader = RowLoader(rows, crew, lambda _: opened, tally, ComputeOrLoad())
        for number in range(ROWS):
            rows.row(number)[:] = np.random.default_rng(number).integers(0, 256, row_bytes, np.uint8)
        begun = time.perf_counter()
        _finish(
            lambda transfer: saver.start(transfer, [ROOT] * ROWS),
            Transfer(0, keys, range(ROWS), _until(timeout_s)),
            tally,
        )
        copies = Transfer(1, keys, range(ROWS, 2 * ROWS), _until(timeout_s))
        _finish(lambda transfer: loader.start(transfer, [None] * ROWS, []), copies, tally)
        took_ms = 1e3 * (time.perf_counter() - begun)
        for number in range(ROWS):
            if not np.array_equal(rows.row(number), rows.row(ROWS + number)):
                raise StoreError("a row came back with other bytes", remedy="stop the daemon and report this")
        opened.forget(keys=keys)
    return f"{ROWS} rows of {row_bytes >> 10} KiB saved, found and loaded in {took_ms:.0f} ms"


def _until(timeout_s: float) -> float:
    return time.monotonic() + timeout_s


def _finish(start: Callable[[Transfer], None], transfer: Transfer, tally: Tally) -> None:
    start(transfer)
    if not transfer.ended.wait(transfer.left_s) or not transfer.complete:
        raise StoreError(
            f"not all rows were saved and loaded: {dict(+tally.total)}",
            remedy="run kvctl doctor without vllm, and look at the daemon's log",
        )
