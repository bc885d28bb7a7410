"""Quotas of a real daemon: a tenant at its quota gives way to itself, is told so by name, and an operator sees it."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client import Namespace, connect
from kvstore.errors import BadRequest
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.transport.descriptors import DEFAULT_TENANT
from kvstore.types import GrantResult, Wait

from ..fleet_tools import free_port
from . import forked
from .test_put import BOUND_S, eventually

SHARD = 64 << 10
SPEC = NamespaceSpec("quotas", b"w", "test:bytes", 4, (GroupSpec("kv", SHARD),))
SETTINGS = {"dram_bytes": 64 << 20, "segment_bytes": 8 << 20, "staging_bytes": 16 << 20}


def put(space: Namespace, first: int, chunks: int, **named: Any) -> Any:
    keys = space.keys(np.arange(first * 4, (first + chunks) * 4))
    return keys, space.put(keys, [np.full(SHARD, number, np.uint8) for number in range(chunks)], **named)


def test_a_tenant_at_its_quota_keeps_what_it_used_last(
    start_daemon: Callable[..., Any], tmp_path: Path
) -> None:
    """In DRAM, and on SSD: also after a restart."""
    port = free_port()
    settings = {
        **SETTINGS,
        "ssd_dir": tmp_path / "ssd",
        "ssd_bytes": 64 << 20,
        "ssd_slab_bytes": 4 << 20,
        "durable_within_ms": 200,
        "eviction": "lru",
        "metrics_port": port,
        "dram_quotas": f"{DEFAULT_TENANT}={32 * SHARD}",
        "ssd_quotas": f"*={64 * (SHARD + 4096)}",
    }
    daemon = start_daemon(**settings)
    with connect(str(daemon.run_dir), timeout_s=BOUND_S, staging_bytes=12 << 20) as client:
        space = client.open(SPEC)
        eventually(lambda: client.stats().arena.ready_bytes == client.stats().arena.bytes)
        for number in range(16):
            assert put(space, 1_000 * number, 16, wait=Wait.DURABLE)[1].ok
        (row,) = client.stats().tenants
        assert (row.tenant, row.dram_quota) == (DEFAULT_TENANT, 32 * SHARD)
        assert row.dram_bytes == 32 * SHARD and 0 < row.ssd_bytes <= row.ssd_quota == 64 * (SHARD + 4096)
        newest = space.keys(np.arange(15_000 * 4, 15_016 * 4))
        assert space.match(newest).usable == 16
        assert space.match(space.keys(np.arange(16 * 4))).usable == 0, "what is oldest is nowhere"
        shown = forked.run(["--run-dir", str(daemon.run_dir), "stats"], dict(os.environ)).stdout.decode()
        assert "2.0 MiB of 2.0 MiB" in shown, shown
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=BOUND_S) as answer:
            exported = answer.read().decode()
        labels = f'{{tenant="{DEFAULT_TENANT}",tier="dram"}}'
        assert f"kvstored_tenant_bytes{labels} 2.097152e+06" in exported
        assert f"kvstored_tenant_quota_bytes{labels} 2.097152e+06" in exported
        with pytest.raises(BadRequest, match="dram_quotas"):
            client.open(NamespaceSpec("large", b"w", "x", 4, (GroupSpec("kv", 4 << 20),)))
    assert daemon.stop() == 0
    daemon = start_daemon(**settings)
    with connect(str(daemon.run_dir), timeout_s=BOUND_S) as client:
        space = client.open(SPEC)
        eventually(lambda: client.stats().arena.ready_bytes == client.stats().arena.bytes)

        def are_back() -> bool:
            with space.read(newest, wait_ms=1_000, pin=True) as lease:
                return lease.hits == 16

        eventually(are_back)
        (row,) = client.stats().tenants
        assert row.ssd_bytes <= row.ssd_quota


def test_saves_beyond_a_quota_say_so(start_daemon: Callable[..., Any], tmp_path: Path) -> None:
    daemon = start_daemon(
        **SETTINGS,
        ssd_dir=tmp_path / "ssd",
        ssd_bytes=64 << 20,
        ssd_slab_bytes=4 << 20,
        dram_quotas=f"*={8 * SHARD}",
        ssd_quotas=f"*={2 * (SHARD + 4096)}",
    )
    with connect(str(daemon.run_dir), timeout_s=BOUND_S, staging_bytes=12 << 20) as client:
        space = client.open(SPEC)
        eventually(lambda: client.stats().arena.ready_bytes == client.stats().arena.bytes)
        keys, _ = put(space, 0, 8)
        lease = space.read(keys, pin=True)
        assert lease.hits == 8
        _, refused = put(space, 500, 2)
        assert refused.results == (GrantResult.QUOTA,) * 2
        assert client.stats().counters["dram_quota_refusals"] >= 2
        lease.release()
        tries = count(1)

        def is_refused() -> bool:
            """As soon as nothing is pinned any more."""
            _, durable = put(space, 1_000 * next(tries), 4, wait=Wait.DURABLE)
            return "(ssd_quotas) is in use" in str(durable.error)

        eventually(is_refused)
