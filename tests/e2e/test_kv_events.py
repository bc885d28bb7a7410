"""KV events of a real daemon, read by the structs that vLLM reads them with."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.client import connect

from ..fleet_tools import BOUND_S
from .test_fleet import SPEC, Member

msgspec = pytest.importorskip("msgspec")
zmq = pytest.importorskip("zmq")


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):  # type: ignore[misc]
    """As in vllm/distributed/kv_events.py, like the next three."""


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):  # type: ignore[misc]
    ts: float
    events: list[BlockStored | BlockRemoved]
    data_parallel_rank: int | None = None


def test_what_is_saved_and_forgotten_is_told(start_daemon: Callable[..., Any]) -> None:
    daemon = start_daemon(kv_events_endpoint="tcp://127.0.0.1:*", node_name="n1")
    endpoint = daemon.wait_for("KV events are published")["endpoint"]
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.RCVTIMEO, int(BOUND_S * 1000))
    subscriber.setsockopt(zmq.SUBSCRIBE, b"kv@n1@")
    subscriber.connect(endpoint)
    held: dict[bytes, str] = {}
    parents: dict[bytes, bytes | None] = {}
    numbers: list[int] = []

    def follow(until: Callable[[], bool]) -> None:
        while not until():
            topic, number, payload = subscriber.recv_multipart()
            assert topic == b"kv@n1@tiny"
            numbers.append(int.from_bytes(number, "big"))
            for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
                above = getattr(event, "parent_block_hash", None)
                for key in event.block_hashes:
                    if isinstance(event, BlockStored):
                        assert event.block_size == 64 and event.ownership == "kvstored"
                        held[key], parents[key] = event.medium, above
                        above = key
                    else:
                        assert held.pop(key) == event.medium

    try:
        with connect(str(daemon.run_dir), timeout_s=BOUND_S) as client:
            member = Member(daemon, "n1", client)
            until = time.monotonic() + BOUND_S
            for number in range(1_000):  # a subscriber misses what is sent before it is heard
                member.save(member.space.keys(np.arange(64) + number + 1))
                if subscriber.poll(50) or time.monotonic() > until:
                    break
            held.clear()
            keys = member.space.keys(np.arange(64 * 4) + 100_000)
            member.save(keys)
            follow(lambda: set(keys) <= held.keys())
            assert {held[key] for key in keys} == {"CPU"}
            assert [parents[key] for key in keys] == [None, *keys[:-1]]
            member.space.forget(keys=keys[2:])
            follow(lambda: not set(keys[2:]) & held.keys())
            assert set(keys[:2]) <= held.keys()
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    finally:
        context.destroy(linger=0)


def test_an_endpoint_that_cannot_be_bound_is_refused(launch: Callable[..., Any]) -> None:
    daemon = launch(kv_events_endpoint="tcp://nowhere")
    assert daemon.exit_status() != 0
    assert any("kv_events_endpoint" in line for line in daemon.refusals), daemon.refusals
    assert SPEC.model == "tiny"
