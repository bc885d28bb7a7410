"""The tier between vLLM's own manager of tiers and a real daemon, without a model: what is in which row, and when."""

from __future__ import annotations

import copy
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from kvstore import wire
from kvstore.client import connect
from kvstore.errors import ConfigError, StoreError, Unsupported
from kvstore.gpu_worker.connectors.offload import Verdict
from kvstore.gpu_worker.connectors.vllm import tier as tier_module
from kvstore.gpu_worker.connectors.vllm.cpu_spec import CopyWorker, CPUTieringSpec
from kvstore.gpu_worker.connectors.vllm.kv_hints import REASONS, Answer, answer_hints
from kvstore.gpu_worker.connectors.vllm.settings import TierSettings
from kvstore.gpu_worker.connectors.vllm.tier import COUNTERS, PREFIX, KVStoreTier
from kvstore.gpu_worker.connectors.vllm.tier_identity import (
    Engine,
    is_prefix_only,
    namespace_of_rows,
    row_layout,
)
from kvstore.layout import NamespaceSpec
from kvstore.types import ActionKind, ChunkKey, Outcome
from kvstore.v1 import stats_pb2, stats_pb2_grpc

from .conftest import BLOCK, Daemon, Executor, transfer_config

LAYERS = [f"layer.{number}" for number in range(4)]
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32)
WINDOW = SlidingWindowSpec(
    block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=64
)
STATE = MambaSpec(block_size=BLOCK, shapes=((4, 8),), dtypes=(torch.float32,), mamba_cache_mode="align")
BOUND_S = 30.0


@pytest.fixture(scope="module")
def config(model: Path) -> Any:
    arguments = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK,
        kv_transfer_config=KVTransferConfig(**transfer_config(Path("/nowhere"))),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )
    return arguments.create_engine_config()


def caches(*specs: Any) -> KVCacheConfig:
    groups = [
        KVCacheGroupSpec([f"{name}.{number}" for name in LAYERS], spec)
        for number, spec in enumerate(specs or (FULL,))
    ]
    return KVCacheConfig(7, kv_cache_tensors=[], kv_cache_groups=groups)


def make(vllm_config: Any, kv_cache_config: KVCacheConfig, *, rows: int = 6, **extra: Any) -> CPUTieringSpec:
    """As vLLM does it: the two arguments are what the tier looks up in its callers."""
    changed = copy.copy(vllm_config)
    changed.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
    probe = build_offloading_config(changed, kv_cache_config)
    bytes_per_chunk = probe.worker_kv_bytes_per_block * extra.get("blocks_per_chunk", 1)
    changed.kv_transfer_config.kv_connector_extra_config = {
        "cpu_bytes_to_use": rows * bytes_per_chunk,
        **extra,
    }
    changed.kv_transfer_config.engine_id = f"kvs-test-{time.monotonic_ns()}"
    spec = CPUTieringSpec(build_offloading_config(changed, kv_cache_config))
    Core(changed, spec)
    return spec


class Core:
    """As vLLM's engine makes its scheduler, and that the tiers."""

    def __init__(self, vllm_config: Any, spec: CPUTieringSpec) -> None:
        self.model_executor = spec.executor = Executor(vllm_config)
        spec.get_manager()


def row_bytes(spec: CPUTieringSpec) -> int:
    return int(spec.kv_bytes_per_chunk)


class Rig:
    """vLLM's manager with our tier; rows are written and read where vLLM's worker would copy."""

    def __init__(self, spec: CPUTieringSpec) -> None:
        self.spec = spec
        self.manager = spec.get_manager()
        self.tier: KVStoreTier = self.manager.secondary_tiers[0]
        self.rows = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self.contexts: dict[str, ReqContext] = {}

    def request(self, name: str, keys: Sequence[bytes] = (), **more: Any) -> ReqContext:
        context = self.contexts[name] = ReqContext(name, **more)
        self.know(context, keys)
        self.manager.on_new_request(context)
        return context

    def know(self, context: ReqContext, keys: Sequence[bytes]) -> None:
        for number, key in enumerate(keys):
            context.set_offload_key_position(key, BLOCK * (number + 1))

    def step(self, *new: str) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=new, preempted_req_ids=()))

    def until(self, what: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + BOUND_S
        while not (result := what()):
            assert time.monotonic() < deadline, dict(self.tier.tally.total)
            self.step()
            threading.Event().wait(0.005)
        return result

    def put(self, context: ReqContext, chunks: dict[bytes, int]) -> None:
        """What vLLM does when it has computed: chunks whose bytes are all that number."""
        given = self.manager.prepare_store(list(chunks), context)
        for key, row in zip(given.keys_to_store, given.store_spec.chunk_ids, strict=True):
            self.rows[row] = chunks[key]
        self.manager.complete_store(set(given.keys_to_store), context)

    def idle(self) -> None:
        self.until(lambda: not self.manager._jobs)

    def find(self, context: ReqContext, keys: Sequence[bytes]) -> list[LookupResult]:
        """As vLLM's scheduler asks: again, until nothing is open any more."""
        open_ones = (LookupResult.RETRY, LookupResult.HIT_PENDING)

        def ask() -> list[LookupResult]:
            found: list[LookupResult] = []
            for key in keys:
                found.append(self.manager.lookup(key, context))
                if found[-1] is LookupResult.MISS:
                    break
            return found

        result: list[LookupResult] = self.until(
            lambda: None if set(found := ask()) & set(open_ones) else found
        )
        return result

    def value(self, key: bytes, context: ReqContext) -> int:
        """The number that all of a loaded chunk's bytes are."""
        (row,) = self.manager.prepare_load([key], context).chunk_ids
        values = np.unique(self.rows[row])
        self.manager.complete_load([key], context)
        assert len(values) == 1, values
        return int(values[0])

    def reset(self, *, emptied: bool = True) -> bool:
        """As vLLM's scheduler does it, and its ranks say that nothing of before is under way any more. `emptied`: its
        own cache before, which it keeps while requests run."""
        reset_successful = emptied
        self.manager.reset_cache()
        getattr(self.manager, "on_reset_flushed", lambda: None)()
        return reset_successful

    def forget(self) -> None:
        self.idle()
        self.manager.primary_tier.reset_cache()

    def close(self) -> None:
        del self.rows
        self.manager.shutdown()


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    home = folder / "units"
    home.mkdir()
    (home / "ssd").mkdir()
    daemon = Daemon(
        home, ssd_dir=home / "ssd", ssd_bytes=128 << 20, ssd_slab_bytes=16 << 20, durable_within_ms=300
    )
    yield daemon
    daemon.stop()


@pytest.fixture(scope="module")
def in_memory(folder: Path) -> Iterator[dict[str, Any]]:
    """Settings of a tier whose daemon has no SSD: what is saved stays in DRAM."""
    daemon = Daemon(folder / "in memory")
    yield {"run_dir": str(daemon.run_dir)}
    daemon.stop()


@pytest.fixture
def launch(config: Any, daemon: Daemon) -> Iterator[Callable[..., Rig]]:
    """launch(rows=..., **tier settings) -> Rig"""
    rigs: list[Rig] = []

    def start(
        *specs: Any, rows: int = 6, blocks_per_chunk: int = 1, others: Sequence[Any] = (), **settings: Any
    ) -> Rig:
        tier = {
            "type": "KVStoreTier",
            "module_path": "kvstore.gpu_worker.connectors.vllm.tier",
            "run_dir": str(daemon.run_dir),
            **settings,
        }
        spec = make(
            config,
            caches(*specs),
            rows=rows,
            blocks_per_chunk=blocks_per_chunk,
            secondary_tiers=[tier, *copy.deepcopy(others)],
        )
        rigs.append(Rig(spec))
        return rigs[-1]

    yield start
    for rig in rigs:
        rig.close()


def asks(rig: Rig) -> None:
    """It has no directory to look into, and asks the daemon."""
    rig.tier._lookups.at_once = lambda *_, **__: None


def keys_of(name: str, count: int, group: int = 0) -> list[bytes]:
    return [make_offload_key(f"{name}-{number}".encode().ljust(32), group) for number in range(count)]


# ------------------------------------------------------------------------------------------------ rows, there and back


def test_rows_come_back_as_they_were(launch: Callable[..., Rig]) -> None:
    """Also to another engine, and chunks of different groups with the same hash apart."""
    first = launch(FULL, WINDOW, rows=8)
    full, window = keys_of("back", 3), keys_of("back", 3, group=1)
    context = first.request("one", full)
    first.know(context, window)
    first.put(context, {full[1]: 11, window[0]: 20, full[0]: 10, window[2]: 22, full[2]: 12})
    first.idle()
    assert first.tier.tally.total["blocks_saved"] == 5
    assert first.tier._saver._region is not None, "the daemon read them by itself"

    other = launch(FULL, WINDOW, rows=8)
    for rig in (other, first):
        rig.forget()
        context = rig.request("two", full)
        assert rig.find(context, full) == [LookupResult.HIT] * 3
        assert rig.find(context, window[2:]) == [LookupResult.HIT]
        assert [rig.value(key, context) for key in (*full, window[2])] == [10, 11, 12, 22]
        assert rig.find(context, window[1:2]) == [LookupResult.MISS]
        assert rig.tier.tally.total["bugs"] == rig.tier.tally.total["blocks_refused"] == 0


def test_what_is_in_dram_is_known_at_once(
    launch: Callable[..., Rig], in_memory: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first call, without a thread and without asking vLLM to ask again; also that it is not there."""
    keys = keys_of("at once", 4)
    first = launch(**in_memory)
    first.put(first.request("one", keys), {keys[0]: 51, keys[1]: 52, keys[2]: 53})
    first.idle()
    rig = launch(**in_memory)
    rig.until(lambda: rig.tier._spec is not None and rig.tier._link.ready(rig.tier._spec))

    def asked(*_: Any) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(rig.tier._lookups, "start", asked)
    context = rig.request("two", keys)
    rig.until(lambda: rig.tier._link.ready(rig.tier._spec).peek(keys) is not None)
    answers = [rig.manager.lookup(key, context) for key in keys]
    assert answers == [LookupResult.HIT_PENDING] * 3 + [LookupResult.MISS]
    assert rig.find(context, keys) == [LookupResult.HIT] * 3 + [LookupResult.MISS]
    assert [rig.value(key, context) for key in keys[:3]] == [51, 52, 53]
    # Behind what vLLM has itself; and of a request that the store has nothing of.
    rig.forget()
    behind = rig.request("three", keys)
    assert [rig.manager.lookup(key, behind) for key in keys[1:]] == [LookupResult.HIT_PENDING] * 2 + [
        LookupResult.MISS
    ]
    assert rig.manager.lookup(keys_of("unseen", 1)[0], rig.request("four", keys_of("unseen", 1))) == (
        LookupResult.MISS
    )
    counts = rig.tier.tally.total
    assert (counts["hits"], counts["bugs"], counts["lookups_late"]) == (3, 0, 0)
    rig.step()
    rig.idle()


@pytest.mark.parametrize("tier", ["DRAM", "SSD"])
def test_groups_and_what_is_on_ssd_are_known_at_once(
    launch: Callable[..., Rig],
    in_memory: dict[str, Any],
    daemon: Daemon,
    monkeypatch: pytest.MonkeyPatch,
    tier: str,
) -> None:
    """As vLLM's scheduler asks: all chunks of the full group, then those of the window from the end on. Of a window of
    64 tokens the last two are needed."""
    where = in_memory if tier == "DRAM" else {}
    full, window = keys_of(f"groups {tier}", 4), keys_of(f"groups {tier}", 4, group=1)
    first = launch(FULL, WINDOW, rows=12, **where)
    chunks = {key: 70 + number for number, key in enumerate((*full, *window))}
    context = first.request("one", full)
    first.know(context, window)
    first.put(context, chunks)
    first.idle()
    rig = launch(FULL, WINDOW, rows=12, **where)
    rig.until(lambda: rig.tier._spec is not None and rig.tier._link.ready(rig.tier._spec))
    wanted = Outcome.HIT if tier == "DRAM" else Outcome.PENDING
    namespace = rig.tier._link.ready(rig.tier._spec)
    rig.until(
        lambda: (peeked := namespace.peek(list(chunks))) is not None and set(peeked.outcomes) == {wanted}
    )
    monkeypatch.setattr(rig.tier._lookups, "start", lambda *_: pytest.fail("asked"))
    context = rig.request("two", full)
    rig.know(context, window)

    def ask(num_computed_tokens: int, max_hit_size_tokens: int, req_status: Any) -> list[list[LookupResult]]:
        """Named as the variables of vLLM's `_lookup_complete_chunks`."""
        return [[rig.manager.lookup(key, context) for key in keys] for keys in (full, window[::-1])]

    pending, miss = LookupResult.HIT_PENDING, LookupResult.MISS
    all_of_it = SimpleNamespace(max_load_tokens=None)
    assert ask(0, 4 * BLOCK, all_of_it) == [[pending] * 4, [pending, pending, miss, miss]]
    rig.step()
    rig.idle()
    assert ask(0, 4 * BLOCK, all_of_it) == [[LookupResult.HIT] * 4, [LookupResult.HIT] * 2 + [miss] * 2]
    for key in (*full, *window[2:]):
        assert rig.value(key, context) == chunks[key]
    counts = rig.tier.tally.total
    assert (counts["hits"], counts["blocks_failed"], counts["bugs"]) == (6, 0, 0)


def test_tails_are_known_at_once(
    launch: Callable[..., Rig], in_memory: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that end inside a block: vLLM asks about them once it knows of the complete ones, one after the other."""
    rig = launch(FULL, STATE, **in_memory)
    tails = [make_offload_key(b"tails".ljust(32), group) for group in (0, 1)]
    context = rig.request("one")
    for key in tails:
        context.set_offload_key_position(key, BLOCK // 2)
    rig.put(context, {tails[0]: 81, tails[1]: 82})
    rig.idle()
    rig.forget()
    namespace = rig.tier._link.ready(rig.tier._spec)
    rig.until(lambda: (peeked := namespace.peek(tails)) is not None and peeked.hits == 2)
    monkeypatch.setattr(rig.tier._lookups, "start", lambda *_: pytest.fail("asked"))
    context = rig.request("two")
    unseen = make_offload_key(b"unseen".ljust(32), 0)
    for key in (*tails, unseen):
        context.set_offload_key_position(key, BLOCK // 2)
    answers = [rig.manager.lookup(key, context) for key in (unseen, *tails)]
    assert answers == [LookupResult.MISS, LookupResult.HIT_PENDING, LookupResult.HIT_PENDING]
    rig.step()
    rig.idle()
    assert [rig.value(key, context) for key in tails] == [81, 82]


def test_what_goes_between_the_look_and_the_load_is_computed(
    launch: Callable[..., Rig], in_memory: dict[str, Any]
) -> None:
    """Nothing is pinned for an answer out of the directory."""
    keys = keys_of("goes", 3)
    first = launch(**in_memory)
    first.put(first.request("one", keys), {keys[0]: 61, keys[1]: 62, keys[2]: 63})
    first.idle()
    rig = launch(**in_memory)
    rig.until(lambda: rig.tier._spec is not None and rig.tier._link.ready(rig.tier._spec))
    rig.until(lambda: rig.tier._link.ready(rig.tier._spec).peek(keys) is not None)
    context = rig.request("two", keys)
    assert [rig.manager.lookup(key, context) for key in keys] == [LookupResult.HIT_PENDING] * 3
    assert first.tier._namespace(BOUND_S).forget(keys=keys[1:2]) == 1
    rig.step()
    rig.idle()
    assert rig.find(context, keys) == [LookupResult.HIT, LookupResult.MISS]
    assert rig.find(context, keys[2:]) == [LookupResult.HIT]
    assert [rig.value(keys[number], context) for number in (0, 2)] == [61, 63]


def test_how_long_a_request_waits_is_learnt_when_it_is_computed(
    launch: Callable[..., Rig], in_memory: dict[str, Any]
) -> None:
    """Of copies alone, what vLLM's steps make a request wait would cost nothing."""
    keys = keys_of("delay", 2)
    rig = launch(**in_memory)
    rig.put(rig.request("one", keys), dict.fromkeys(keys, 1))
    rig.forget()
    choice = rig.tier.choice
    for tokens in (64, 128, 64, 128, 64):
        choice.compute.observe(tokens, 10.0 * tokens)
        choice.copy.observe(1e6 * tokens, 1e-9)
    assert rig.find(rig.request("two", keys), keys) == [LookupResult.HIT] * 2
    assert set(choice._late_s.values()) == {0.0}
    rig.step("two")
    assert sum(choice._late_s.values()) > 0


def test_nothing_is_found_under_another_salt(launch: Callable[..., Rig]) -> None:
    keys = keys_of("salt", 2)
    first = launch(salt="a")
    first.put(first.request("one", keys), dict.fromkeys(keys, 1))
    first.idle()
    other = launch(salt="b")
    assert other.find(other.request("one", keys), keys) == [LookupResult.MISS]
    again = launch(salt="a")
    assert again.find(again.request("one", keys), keys) == [LookupResult.HIT] * 2


def test_more_hits_than_rows(launch: Callable[..., Rig]) -> None:
    """A request is not loaded in circles, the later chunks pushing out the earlier ones."""
    keys = keys_of("many", 9)
    rig = launch(rows=4)
    for number, key in enumerate(keys):
        rig.put(rig.request(f"save {number}", [key]), {key: number})
        rig.idle()
    rig.forget()
    context = rig.request("load", keys)
    found = rig.find(context, keys)
    assert found == [LookupResult.HIT] * 4 + [LookupResult.MISS]
    assert [rig.value(key, context) for key in keys[:4]] == [0, 1, 2, 3]
    assert rig.tier.tally.total["blocks_loaded"] == 4


def test_a_chunk_that_vanishes_fails_alone(launch: Callable[..., Rig]) -> None:
    """Between the answer and the load, its pin run out: the others are loaded, vLLM computes it."""
    keys = keys_of("vanish", 3)
    rig = launch(enable_kv_events=True)
    asks(rig)
    rig.put(rig.request("one", keys), {key: number for number, key in enumerate(keys)})
    rig.forget()
    context = rig.request("two", keys)
    assert [rig.manager.lookup(key, context) for key in keys] == [LookupResult.RETRY] * 3
    inquiry = rig.tier._requests["two"]
    rig.until(lambda: all(inquiry.verdict(key, 0.0, keys_max=9) is Verdict.HIT for key in keys))
    for question in list(inquiry._questions):
        inquiry._drop(question)
    namespace = rig.tier._namespace(BOUND_S)
    assert namespace is not None and namespace.forget(keys=keys[1:2]) == 1
    assert rig.find(context, keys) == [LookupResult.HIT, LookupResult.MISS]
    assert rig.find(context, keys[2:]) == [LookupResult.HIT]
    assert (rig.value(keys[0], context), rig.value(keys[2], context)) == (0, 2)
    total = rig.tier.tally.total
    assert (total["blocks_loaded"], total["blocks_failed"]) == (2, 1)
    assert [event.keys for event in rig.tier.take_events() if event.removed] == [keys[1:2]]


def ranks_of(config: Any, ranks: int, *, heads: int) -> Any:
    """The same engine on so many tensor-parallel ranks, its model with so many KV heads in all."""
    wide = copy.copy(config)
    wide.parallel_config = copy.copy(config.parallel_config)
    wide.parallel_config.tensor_parallel_size = wide.parallel_config.world_size = ranks
    wide.model_config = copy.copy(config.model_config)
    wide.model_config.get_total_num_kv_heads = lambda: heads
    return wide


@pytest.mark.parametrize("in_a_file", [True, False])
def test_one_copy_of_what_ranks_share(config: Any, daemon: Daemon, in_a_file: bool) -> None:
    """Four ranks, two KV heads: of a row's four parts the store has two, and all four come back."""
    keys = keys_of(f"shared {in_a_file}", 3)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
    tier = {
        "type": "KVStoreTier",
        "module_path": "kvstore.gpu_worker.connectors.vllm.tier",
        "run_dir": str(daemon.run_dir),
        "salt": str(in_a_file),
    }
    rigs = []
    for _ in range(2):
        made = make(ranks_of(config, 4, heads=2), caches(spec), rows=24, secondary_tiers=[tier])
        rigs.append(Rig(made))
        rigs[-1].tier._saver._adoptable &= in_a_file
    first, other = rigs
    try:
        part = first.spec.cpu_page_size_per_worker
        assert first.tier._rows.copies == ((0, part), (2 * part, 3 * part))
        context = first.request("one", keys)
        given = first.manager.prepare_store(keys, context)
        by_key = dict(zip(given.keys_to_store, given.store_spec.chunk_ids, strict=True))
        for number, key in enumerate(keys):
            row = first.rows[by_key[key]]
            row[: 2 * part], row[2 * part : 4 * part] = 10 + number, 20 + number
        first.rows[by_key[keys[2]]][part] += 1  # ranks that should agree do not
        first.manager.complete_store(set(keys), context)
        first.idle()
        total = first.tier.tally.total
        assert total["blocks_saved"] == 2 and total["replicas_differ"] == 1
        assert total["bytes_saved"] == total["bytes_shared"] == 2 * 2 * part
        assert (first.tier._saver._region is not None) is in_a_file

        context = other.request("two", keys)
        assert other.find(context, keys) == [LookupResult.HIT, LookupResult.HIT, LookupResult.MISS]
        assert other.tier.tally.total["bytes_loaded"] == 2 * 2 * part
        for number, key in enumerate(keys[:2]):
            (row,) = other.manager.prepare_load([key], context).chunk_ids
            assert set(other.rows[row][: 2 * part]) == {10 + number}
            assert set(other.rows[row][2 * part : 4 * part]) == {20 + number}
            other.manager.complete_load([key], context)
        assert other.tier.tally.total["bugs"] == first.tier.tally.total["bugs"] == 0
    finally:
        for rig in rigs:
            rig.close()


def test_latent_rows_of_all_ranks_are_one(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM joins them itself where its ranks are processes of one machine; elsewhere the store does."""
    wide = ranks_of(config, 2, heads=4)
    monkeypatch.setattr(type(wide.model_config), "use_mla", True)
    latent = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.float32)
    cache = caches(latent)
    cache.kv_tp_replicas = 2
    rows = []
    for backend in ("mp", "ray"):
        wide.parallel_config.distributed_executor_backend = backend
        spec = CPUTieringSpec(build_offloading_config(_with_memory(wide), cache))
        rows.append(row_layout(Engine(wide, cache), spec, int(spec.kv_bytes_per_chunk)))
    joined, apart = rows
    assert (joined.copies, apart.copies) == (((0,),), ((0, apart.part_bytes),))
    assert joined.part_bytes == apart.part_bytes


def test_copies_on_a_cpu_may_begin_in_the_middle_of_a_row(config: Any) -> None:
    """Two groups, two tensors, rows of two blocks."""
    spec = CPUTieringSpec(
        build_offloading_config(_with_memory(config, blocks_per_chunk=2), caches(FULL, WINDOW))
    )
    pages = (64, 32)
    tensors = [torch.zeros((9, page), dtype=torch.int8) for page in pages]
    region = SharedOffloadRegion(
        engine_id=f"kvs-test-{time.monotonic_ns()}",
        num_chunks=4,
        rank=0,
        kv_bytes_per_chunk=4096,
        cpu_page_size=2 * sum(pages),
    )
    worker = CopyWorker(
        CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, page) for tensor, page in zip(tensors, pages, strict=True)],
            [[CanonicalKVCacheRef(0, 64)], [CanonicalKVCacheRef(0, 64), CanonicalKVCacheRef(1, 32)]],
        ),
        region,
        spec.blocks_per_chunk,
    )
    for block in range(9):
        tensors[0][block], tensors[1][block] = block, 10 + block
    # Of the first group its blocks 0 to 3, of the second its blocks 3 and 4: the second half of one row, the first of
    # the next.
    stored = GPULoadStoreSpec([1, 2, 3, 4, 5, 6], group_sizes=[4, 2], block_indices=[0, 3])
    assert worker.submit_store(1, stored, CPULoadStoreSpec([2, 0, 1, 3]))
    for tensor in tensors:
        tensor.zero_()
    loaded = GPULoadStoreSpec([8, 7, 6, 5, 4], group_sizes=[3, 2], block_indices=[1, 3])
    assert worker.submit_load(2, CPULoadStoreSpec([2, 0, 1, 3]), loaded)
    assert [int(tensors[0][block, 0]) for block in range(9)] == [0, 0, 0, 0, 6, 5, 4, 3, 2]
    assert [int(tensors[1][block, 0]) for block in range(9)] == [0, 0, 0, 0, 16, 15, 0, 0, 0]
    assert all(bool((tensor == tensor[:, :1]).all()) for tensor in tensors)
    assert [(done.job_id, done.success) for done in worker.get_finished()] == [(1, True), (2, True)]
    assert [done.transfer_size for done in worker.get_finished()] == []
    worker.shutdown()


def test_the_store_knows_which_chunk_follows_which(launch: Callable[..., Rig]) -> None:
    """vLLM hands transfers over as sets; what follows what is told by the positions."""
    rig = launch(FULL, WINDOW)
    full, window = keys_of("chain", 4), keys_of("chain", 4, group=1)
    context = rig.request("one", full)
    rig.know(context, window)
    ordered = [full[0], full[1], full[3], window[2], window[3]]
    assert rig.tier._parents(ordered, context) == [b"", full[0], b"", b"", window[2]]
    assert rig.tier._parents(ordered, ReqContext("unknown")) == [b""] * 5


def test_a_daemon_that_reads_late_shows_nothing(
    launch: Callable[..., Rig], daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped just before it is asked to read; vLLM gets its row back in time and fills it anew."""
    keys, warm = keys_of("late", 1), keys_of("warm", 1)
    rig = launch(save_ms=700, lookup_ms=300)
    rig.put(rig.request("warm", warm), {warm[0]: 9})
    rig.idle()
    read = rig.tier._saver._read

    def stopped(*arguments: Any) -> bool:
        daemon.signal(signal.SIGSTOP)
        return bool(read(*arguments))

    try:
        with monkeypatch.context() as patched:
            patched.setattr(rig.tier._saver, "_read", stopped)
            rig.put(rig.request("one", keys), {keys[0]: 7})
            rig.idle()
        total = rig.tier.tally.total
        assert total["blocks_saved"] == 1, "only that of before"
        rig.rows[:] = 200
        assert rig.find(rig.request("two"), keys_of("unseen", 1)) == [LookupResult.MISS]
        rig.until(lambda: total["lookups_late"] == 1)  # counted by the thread that asked
    finally:
        daemon.signal(signal.SIGCONT)
    rig.forget()
    rig.until(lambda: rig.find(rig.request(f"try {time.monotonic_ns()}"), warm) == [LookupResult.HIT])
    rig.forget()
    assert rig.find(rig.request("three", keys), keys) == [LookupResult.MISS]
    rig.put(rig.request("four", keys), {keys[0]: 7})
    rig.forget()
    context = rig.request("five", keys)
    assert rig.find(context, keys) == [LookupResult.HIT]
    assert rig.value(keys[0], context) == 7


def test_the_daemon_dies_under_open_jobs(launch: Callable[..., Rig], daemon: Daemon) -> None:
    keys = keys_of("dies", 3)
    rig = launch(save_ms=2000, lookup_ms=2000)
    asks(rig)
    rig.put(rig.request("one", keys), dict.fromkeys(keys, 3))
    rig.idle()
    rig.forget()
    context = rig.request("two", keys)
    for key in keys:
        assert rig.manager.lookup(key, context) is LookupResult.RETRY
    rig.step()
    daemon.kill()
    found = rig.find(context, keys)
    assert found[-1] is LookupResult.MISS or [rig.value(key, context) for key in keys] == [3] * 3
    rig.put(rig.request("three", keys_of("gone", 1)), dict.fromkeys(keys_of("gone", 1), 4))
    rig.idle()
    daemon.start()
    after = keys_of("after", 1)

    def saved() -> bool:
        rig.put(rig.request(f"again {time.monotonic_ns()}", after), dict.fromkeys(after, 5))
        rig.forget()
        return rig.tier.tally.total["blocks_saved"] > 3

    rig.until(saved)
    assert rig.find(rig.request("four", after), after) == [LookupResult.HIT]
    assert rig.tier.tally.total["bugs"] == 0


def test_no_daemon_at_all(config: Any, folder: Path) -> None:
    keys = keys_of("alone", 2)
    settings = {"run_dir": str(folder / "nobody"), "connect_ms": 200, "lookup_ms": 300, "save_ms": 300}
    tier = {"type": "KVStoreTier", "module_path": "kvstore.gpu_worker.connectors.vllm.tier", **settings}
    rig = Rig(make(config, caches(), secondary_tiers=[tier]))
    rig.put(rig.request("one", keys), dict.fromkeys(keys, 1))
    rig.forget()
    assert rig.find(rig.request("two", keys), keys) == [LookupResult.MISS]
    rig.close()


# ---------------------------------------------------------------------------------------------- resets, events, the end


def test_a_reset_drains_and_begins_a_new_epoch(launch: Callable[..., Rig]) -> None:
    keys, other = keys_of("reset", 2), keys_of("new", 1)
    rig = launch(enable_kv_events=True)
    running = rig.request("running", keys)
    rig.put(running, dict.fromkeys(keys, 1))
    rig.idle()
    assert [event.keys for event in rig.manager.take_events() if event.medium.value == "STORAGE"] == [keys]
    waiting = rig.request("waiting", keys)
    rig.manager.lookup(keys[0], waiting)
    rig.reset()
    (gone,) = (event for event in rig.manager.take_events() if event.medium.value == "STORAGE")
    assert gone.removed and set(gone.keys) == set(keys)
    assert rig.tier.tally.total["resets"] == 1
    assert rig.find(waiting, keys) == [LookupResult.MISS]
    # KV of the running request was computed before: it is not saved as something of afterwards.
    rig.put(running, dict.fromkeys(keys, 1))
    rig.idle()
    assert rig.tier.tally.total["blocks_dropped"] == 2
    rig.put(rig.request("later", other), {other[0]: 8})
    rig.forget()
    assert rig.find(rig.request("last", other), other) == [LookupResult.HIT]


def update(rig: Rig, value: float) -> None:
    """Through vLLM's call, into the same tensors."""
    rig.spec.executor.collective_rpc("update_weights", None, (value,))


def test_updated_weights_are_another_model(launch: Callable[..., Rig]) -> None:
    keys = keys_of("weights", 2)
    first = launch()
    first.put(first.request("one", keys), dict.fromkeys(keys, 1))
    first.forget()
    second = launch()
    update(second, 1)
    assert second.find(second.request("two", keys), keys) == [LookupResult.MISS]
    second.put(second.contexts["two"], dict.fromkeys(keys, 2))
    second.forget()
    context = second.request("three", keys)
    assert second.find(context, keys) == [LookupResult.HIT] * 2
    assert second.value(keys[0], context) == 2
    first.forget()
    context = first.request("four", keys)
    assert first.find(context, keys) == [LookupResult.HIT] * 2
    assert first.value(keys[0], context) == 1


def test_rows_of_before_an_update_are_not_saved_after_it(launch: Callable[..., Rig]) -> None:
    """vLLM's own memory keeps them until it is reset, and they may be the ground of new ones."""
    old, new, last = keys_of("old", 1), keys_of("mixed", 1), keys_of("last", 1)
    rig = launch()
    rig.put(rig.request("one", old), {old[0]: 1})
    rig.idle()
    update(rig, 1)
    rig.put(rig.request("two", new), {new[0]: 2})
    rig.idle()
    assert rig.tier.tally.total["blocks_dropped"] == 1
    rig.manager.on_request_finished(rig.contexts["one"])
    rig.manager.on_request_finished(rig.contexts["two"])
    rig.reset()
    rig.put(rig.request("three", last), {last[0]: 3})
    rig.forget()
    assert rig.find(rig.request("four", last), last) == [LookupResult.HIT]
    assert rig.find(rig.request("five", new), new) == [LookupResult.MISS]


def test_what_follows_kv_that_another_tier_has_loaded_is_not_saved(
    launch: Callable[..., Rig], tmp_path: Path
) -> None:
    """vLLM's files are named by the model's name, whatever its weights are; what is computed behind their KV is of
    neither model."""
    files = [{"type": "fs", "root_dir": str(tmp_path)}]
    known, new, other = keys_of("known", 2), keys_of("behind", 2), keys_of("elsewhere", 2)
    before = launch(others=files, salt="before")
    before.put(before.request("one", known), {known[0]: 1})
    before.idle()

    rig = launch(others=files, salt="after")
    context = rig.request("two", [known[0], *new])
    assert rig.find(context, known[:1]) == [LookupResult.HIT], "out of the file"
    rig.put(context, {new[0]: 2})
    # A request that has it from vLLM's own caches, and one that has nothing of it.
    rig.put(rig.request("three", [known[0], known[1]]), {known[1]: 3})
    rig.put(rig.request("four", other), {other[0]: 4})
    rig.idle()
    counts = rig.tier.tally.total
    assert (counts["blocks_foreign"], counts["blocks_saved"], counts["bugs"]) == (2, 1, 0)

    alone = launch(salt="after")
    assert alone.find(alone.request("five", other), other[:1]) == [LookupResult.HIT]
    for number, key in enumerate((new[0], known[0], known[1])):
        assert alone.find(alone.request(f"missing {number}", [key]), [key]) == [LookupResult.MISS]

    # While a request goes on that uses it, vLLM's cache keeps it, whatever is reset.
    rig.reset(emptied=False)
    rig.put(rig.request("six", [known[0], new[1]]), {new[1]: 5})
    rig.idle()
    assert counts["blocks_saved"] == 1
    for context in rig.contexts.values():
        rig.manager.on_request_finished(context)
    rig.reset()
    rig.put(rig.request("seven", [known[0], new[1]]), {known[0]: 7, new[1]: 6})
    rig.idle()
    assert (counts["blocks_foreign"], counts["blocks_saved"]) == (2, 3)


def test_where_another_tier_is_trusted_all_is_saved(launch: Callable[..., Rig], tmp_path: Path) -> None:
    files = [{"type": "fs", "root_dir": str(tmp_path)}]
    keys = keys_of("trusted", 2)
    before = launch(others=files, salt="trusted before")
    before.put(before.request("one", keys), {keys[0]: 1})
    before.idle()
    rig = launch(others=files, salt="trusted", save_what_others_load=True)
    context = rig.request("two", keys)
    assert rig.find(context, keys[:1]) == [LookupResult.HIT]
    rig.put(context, {keys[1]: 2})
    rig.idle()
    assert rig.tier.tally.total["blocks_saved"] == 1


@pytest.mark.parametrize("how", ["rows of several blocks", "vLLM shows no other tiers"])
def test_what_another_tier_has_loaded_cannot_be_told(
    launch: Callable[..., Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Then nothing is saved: a request may share some of a row's blocks and have other keys."""
    files = [{"type": "fs", "root_dir": str(tmp_path)}]
    keys, other = keys_of("several", 2), keys_of("several else", 2)
    size = 2 if how == "rows of several blocks" else 1
    before = launch(others=files, salt="several before", blocks_per_chunk=size)
    before.put(before.request("one", keys), {keys[0]: 1})
    before.idle()
    if size == 1:
        monkeypatch.setattr(KVStoreTier, "serve_external_requests", lambda self, parent: None)
    rig = launch(others=files, salt="several", blocks_per_chunk=size)
    assert rig.find(rig.request("two", keys), keys[:1]) == [LookupResult.HIT]
    rig.put(rig.request("three", other), {other[0]: 4})
    rig.idle()
    assert (rig.tier.tally.total["blocks_foreign"], rig.tier.tally.total["blocks_saved"]) == (1, 0)


class MultiConnector:
    """As vLLM's, as far as the tier looks for it."""

    def __init__(self, vllm_config: Any, make: Callable[[], Any]) -> None:
        make()


def test_beside_a_connector_that_loads_what_nobody_compares(config: Any) -> None:
    """vLLM has all blocks of a request saved, also those that another connector has loaded; a tier is not told."""
    outer = copy.copy(config)
    outer.kv_transfer_config = copy.copy(config.kv_transfer_config)
    tiered = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}

    def among(*others: dict[str, Any], **settings: Any) -> Any:
        outer.kv_transfer_config.kv_connector_extra_config = {"connectors": [tiered, *others]}
        tier = {
            "type": "KVStoreTier",
            "module_path": "kvstore.gpu_worker.connectors.vllm.tier",
            "run_dir": "/nowhere",
            **settings,
        }
        made: list[Any] = []
        MultiConnector(outer, lambda: made.append(make(config, caches(), secondary_tiers=[tier])))
        made[0].get_manager().shutdown()

    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    with pytest.raises(Unsupported, match="NixlConnector") as refused:
        among(nixl)
    assert "save_what_others_load" in refused.value.remedy
    among(nixl, save_what_others_load=True)
    among({**nixl, "kv_role": "kv_producer"})
    among({"kv_connector": "KVStoreConnector", "kv_role": "kv_both"})
    among()


def test_a_save_under_way_is_of_the_weights_before(launch: Callable[..., Rig], daemon: Daemon) -> None:
    keys = keys_of("under way", 2)
    rig = launch(save_ms=600_000)
    rig.put(rig.request("zero", keys_of("pre way", 1)), dict.fromkeys(keys_of("pre way", 1), 1))
    rig.idle()
    daemon.signal(signal.SIGSTOP)
    try:
        rig.put(rig.request("one", keys), dict.fromkeys(keys, 1))
        update(rig, 1)
        rig.step()
        rig.request("two", keys)
        assert not rig.tier._saver.transfers, "it has failed"
    finally:
        daemon.signal(signal.SIGCONT)
    rig.idle()
    other = launch()
    update(other, 1)
    assert other.find(other.request("three", keys), keys) == [LookupResult.MISS]


def test_weights_that_are_asleep_have_no_name(launch: Callable[..., Rig]) -> None:
    keys, meanwhile = keys_of("asleep", 1), keys_of("meanwhile", 1)
    rig = launch()
    rig.put(rig.request("one", keys), {keys[0]: 1})
    rig.forget()
    rig.spec.executor.collective_rpc("sleep", kwargs={"level": 1})
    assert rig.find(rig.request("two", keys), keys) == [LookupResult.MISS]
    rig.put(rig.request("three", meanwhile), {meanwhile[0]: 1})
    rig.idle()
    assert rig.tier.tally.total["blocks_dropped"] == 1
    rig.spec.executor.collective_rpc("wake_up", kwargs={"tags": ["weights"]})
    rig.forget()
    assert rig.find(rig.request("four", keys), keys) == [LookupResult.HIT], "the same weights"


def test_weights_that_change_without_a_call_are_found(launch: Callable[..., Rig]) -> None:
    keys = keys_of("silent", 1)
    rig = launch()
    rig.put(rig.request("one", keys), {keys[0]: 1})
    rig.forget()
    assert rig.find(rig.request("before", keys), keys) == [LookupResult.HIT]
    rig.forget()
    with torch.no_grad():
        rig.spec.executor.models[0].weight.add_(1.0)
    rig.tier._poll_at = 0.0  # the time has come
    assert rig.find(rig.request("two", keys), keys) == [LookupResult.MISS]


@pytest.mark.parametrize("counted", [True, False])
def test_what_was_saved_before_a_change_was_found_is_forgotten(
    launch: Callable[..., Rig], counted: bool
) -> None:
    """It stands under the name of the weights before, which others still compute with."""
    before, between = keys_of(f"verified {counted}", 1), keys_of(f"between {counted}", 2)
    rig = launch()
    rig.put(rig.request("one", before), {before[0]: 1})
    rig.idle()
    held = rig.spec.executor.workers[0].model_runner._attnstore_held
    held._full_at = 0.0
    rig.tier._poll_at = 0.0  # the time has come
    rig.request("two")
    assert not rig.tier._saver._unverified
    weight = rig.spec.executor.models[0].weight
    with torch.no_grad():
        (weight if counted else weight.data).add_(1.0)
    rig.put(rig.request("three", between), dict.fromkeys(between, 2))
    rig.idle()
    held._full_at = rig.tier._poll_at = 0.0
    rig.request("four")
    rig.until(lambda: rig.tier.tally.total["blocks_recalled"] == 2)
    other = launch()
    assert other.find(other.request("five", between), between[:1]) == [LookupResult.MISS]
    assert other.find(other.request("six", before), before) == [LookupResult.HIT]


def test_a_reset_does_not_wait_for_a_daemon_that_hangs(launch: Callable[..., Rig], daemon: Daemon) -> None:
    keys = keys_of("hang", 2)
    rig = launch(drain_ms=100, save_ms=600_000)
    rig.put(rig.request("zero", keys_of("pre", 1)), dict.fromkeys(keys_of("pre", 1), 1))
    rig.idle()
    daemon.signal(signal.SIGSTOP)
    try:
        rig.put(rig.request("one", keys), dict.fromkeys(keys, 1))
        begun = time.monotonic()
        rig.reset()
        assert time.monotonic() - begun < BOUND_S
        assert not rig.manager._jobs
    finally:
        daemon.signal(signal.SIGCONT)


def test_what_is_found_gone_is_told(launch: Callable[..., Rig]) -> None:
    keys = keys_of("gone", 2)
    rig = launch(enable_kv_events=True)
    rig.put(rig.request("one", keys), dict.fromkeys(keys, 1))
    rig.forget()
    namespace = rig.tier._namespace(BOUND_S)
    assert namespace is not None and namespace.forget(keys=keys[1:]) == 1
    assert rig.find(rig.request("two", keys), keys) == [LookupResult.HIT, LookupResult.MISS]
    events = [event for event in rig.tier.take_events() if event.removed]
    assert [event.keys for event in events] == [keys[1:]]
    assert events[0].ownership == "KVStoreTier" and events[0].locality.value == "LOCAL"
    assert list(rig.tier.take_events()) == []


def test_nothing_is_told_unless_somebody_asked(launch: Callable[..., Rig]) -> None:
    rig = launch()
    keys = keys_of("quiet", 1)
    rig.put(rig.request("one", keys), dict.fromkeys(keys, 1))
    rig.idle()
    assert list(rig.tier.take_events()) == [] and not rig.tier._announced


def test_counts_have_definitions(launch: Callable[..., Rig]) -> None:
    rig = launch()
    keys = keys_of("counts", 1)
    rig.put(rig.request("one", keys), dict.fromkeys(keys, 1))
    rig.idle()
    stats = rig.tier.get_stats()
    assert stats is not None and stats.reduce()[f"{PREFIX}blocks_saved"] == 1
    defined = KVStoreTier.build_metric_definitions({})
    assert stats.data["data"].keys() <= defined.keys() == {PREFIX + name for name in COUNTERS}
    assert rig.tier.get_stats() is None


def test_requests_leave_nothing_behind(launch: Callable[..., Rig]) -> None:
    rig = launch()
    keys = keys_of("leave", 3)
    rig.put(rig.request("one", keys), dict.fromkeys(keys, 1))
    rig.forget()
    context = rig.request("two", keys)
    rig.find(context, keys)
    rig.step("two")
    for name in ("one", "two"):
        rig.manager.on_request_finished(rig.contexts[name])
    tier = rig.tier
    assert not (
        tier._requests or tier._waiting or tier._hinted or tier._stale or tier._begun or len(tier._desk)
    )


def test_who_waits_long_is_told_to_the_daemon(
    launch: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module, "HINT_AFTER_S", 0.0)
    rig = launch()
    asks(rig)
    keys = keys_of("hint", 1)
    rig.put(rig.request("one", keys), dict.fromkeys(keys, 1))
    rig.forget()
    context = rig.request("two", keys)
    rig.manager.lookup(keys[0], context)
    rig.until(lambda: rig.tier.tally.total["hints_published"])
    namespace = rig.tier._namespace(BOUND_S)
    assert namespace is not None
    assert rig.tier._hinted.keys() == {"two"}
    rig.find(context, keys)
    assert not rig.tier._hinted, "what is loaded is vLLM's; the hint would bring it up again"
    rig.until(lambda: not rig.tier._board._removed and not rig.tier._board._busy)


# --------------------------------------------------------------------------------------------------- it fails no engine


def test_a_bug_of_ours_is_a_miss_or_a_failed_job(
    launch: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = launch()
    keys = keys_of("bug", 2)

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("planted")

    with monkeypatch.context() as planted, caplog.at_level(logging.ERROR):
        for name in ("_inquiry", "_parents", "_waits_no_more"):
            planted.setattr(rig.tier, name, broken)
        planted.setattr(rig.tier._board, "flush", broken)
        contexts = [rig.request(f"{number}", keys) for number in range(3)]
        for context in contexts:
            assert rig.manager.lookup(keys[0], context) is LookupResult.MISS
            rig.put(context, dict.fromkeys(keys, 1))
            rig.step("0")
            rig.forget()
            rig.manager.on_request_finished(context)
        assert rig.tier.tally.total["blocks_saved"] == 0
    planted_ones = [record for record in caplog.records if "planted" in str(record.exc_info)]
    assert len(planted_ones) == 5, "one of each, not one each time"
    rig.put(rig.request("after", keys), dict.fromkeys(keys, 1))
    rig.forget()
    assert rig.find(rig.request("last", keys), keys) == [LookupResult.HIT] * 2


def test_a_job_is_told_of_even_if_its_result_cannot_be_made(
    launch: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = launch()
    keys = keys_of("told", 1)
    with monkeypatch.context() as planted:
        planted.setattr(rig.tier, "_result", lambda *_: 1 // 0)
        rig.put(rig.request("one", keys), {keys[0]: 1})
        rig.idle()
    assert rig.tier.tally.total["bugs"] == 1


def test_rows_that_do_not_exist_are_a_failed_job(launch: Callable[..., Rig]) -> None:
    from vllm.v1.kv_offload.tiering.base import TransferJob

    rig = launch()
    for number, (keys, rows) in enumerate(
        (([b"k" * 36], [99]), ([b"k" * 65], [0]), ([b"a" * 36, b"b" * 36], [0]))
    ):
        transfer = TransferJob(number, keys, np.array(rows, np.int32), number == 0, ReqContext("one"))
        (rig.tier.submit_load if transfer.is_promotion else rig.tier.submit_store)(transfer)
    results = rig.tier.get_finished_jobs()
    assert sorted((result.job_id, result.success) for result in results) == [
        (0, False),
        (1, False),
        (2, False),
    ]


def test_the_end_is_bounded_and_gives_the_memory_back(launch: Callable[..., Rig], daemon: Daemon) -> None:
    rig = launch(drain_ms=200, save_ms=1000, connect_ms=500)
    keys = keys_of("end", 1)
    rig.put(rig.request("zero", keys_of("pre-end", 1)), dict.fromkeys(keys_of("pre-end", 1), 1))
    rig.idle()
    daemon.signal(signal.SIGSTOP)
    try:
        rig.put(rig.request("one", keys), {keys[0]: 1})
        begun = time.monotonic()
        rig.tier.shutdown()
        rig.tier.shutdown()
        assert time.monotonic() - begun < BOUND_S
    finally:
        daemon.signal(signal.SIGCONT)
    assert rig.tier.lookup(keys[0], rig.contexts["one"]) is LookupResult.MISS
    assert not rig.manager.primary_tier._mmap_region.mmap_obj.closed
    rig.idle()


def test_what_is_queued_at_the_end_is_saved(launch: Callable[..., Rig]) -> None:
    rig = launch()
    keys = keys_of("queued", 3)
    rig.put(rig.request("zero", keys_of("pre-queued", 1)), dict.fromkeys(keys_of("pre-queued", 1), 1))
    rig.idle()
    rig.put(rig.request("one", keys), dict.fromkeys(keys, 6))
    rig.tier.shutdown()
    other = launch()
    assert other.find(other.request("two", keys), keys) == [LookupResult.HIT] * 3


# ------------------------------------------------------------------------------------------------------------- identity


def name_of(
    config: Any,
    kv_cache_config: KVCacheConfig,
    extra: dict[str, Any] | None = None,
    weights: bytes = bytes(32),
    **given: Any,
) -> NamespaceSpec:
    changed = copy.copy(config)
    changed.kv_transfer_config = copy.copy(config.kv_transfer_config)
    changed.kv_transfer_config.kv_connector_extra_config = {"cpu_bytes_to_use": 1 << 24, **(extra or {})}
    spec = CPUTieringSpec(build_offloading_config(changed, kv_cache_config))
    settings = TierSettings.of({"run_dir": "/nowhere", **given})
    return namespace_of_rows(
        Engine(changed, kv_cache_config), spec, settings, row_bytes=row_bytes(spec), weights=weights
    )


def test_whatever_differs_is_another_namespace(config: Any) -> None:
    def changed(part: str, **changes: Any) -> Any:
        other = copy.copy(config)
        setattr(other, part, copy.copy(getattr(config, part)))
        for name, value in changes.items():
            setattr(getattr(other, part), name, value)
        return other

    overridden = copy.copy(config.model_config.hf_config)
    overridden.rope_theta = 77.0
    large = replace(FULL, block_size=2 * BLOCK)
    names = {
        "plain": name_of(config, caches()),
        "other weights": name_of(config, caches(), weights=b"x" * 32),
        "an override": name_of(changed("model_config", hf_config=overridden), caches()),
        "named weights": name_of(config, caches(), weights_digest="x"),
        "epoch": name_of(config, caches(), weights_epoch=2),
        "salt": name_of(config, caches(), salt="x"),
        "two blocks a chunk": name_of(config, caches(), {"blocks_per_chunk": 2}),
        "larger blocks": name_of(config, caches(large)),
        "cache dtype": name_of(changed("cache_config", cache_dtype="fp8"), caches()),
        "cache layout": name_of(changed("cache_config", kv_cache_layout="BLHNC"), caches()),
        "heads": name_of(config, caches(replace(FULL, num_kv_heads=1, head_size=128))),
        "groups": name_of(config, caches(FULL, FULL)),
        "ranks": name_of(changed("parallel_config", tensor_parallel_size=2, world_size=2), caches()),
        "hash": name_of(changed("cache_config", prefix_caching_hash_algo="sha256_cbor"), caches()),
    }
    digests = {name: (spec.digest("t"), spec.weights_epoch) for name, spec in names.items()}
    assert len(set(digests.values())) == len(digests), digests
    assert name_of(config, caches()) == names["plain"]
    pair, big = names["two blocks a chunk"], names["larger blocks"]
    assert (pair.chunk_tokens, pair.chunk_bytes) == (big.chunk_tokens, big.chunk_bytes)


def test_what_cannot_be_told_apart_is_refused(config: Any) -> None:
    def changed(**changes: Any) -> Any:
        other = copy.copy(config)
        for name, value in changes.items():
            setattr(other, name, value)
        return other

    cases = [
        (changed(lora_config=object()), caches(), "lora_config"),
        (
            changed(speculative_config=type("S", (), {"method": "dflash"})()),
            caches(),
            "speculative_config.method",
        ),
        (
            config,
            caches(FULL, MambaSpec(block_size=BLOCK, shapes=((1, 1),), dtypes=(torch.float32,))),
            "mamba_cache_mode",
        ),
    ]
    for other, cache, field in cases:
        with pytest.raises(Unsupported) as refused:
            name_of(other, cache)
        assert field in refused.value.field


def test_without_an_engine_the_weights_must_be_named(config: Any) -> None:
    spec = CPUTieringSpec(build_offloading_config(_with_memory(config), caches()))
    for digest, works in (("", False), ("mine", True)):
        settings = TierSettings.of({"run_dir": "/nowhere", "weights_digest": digest})
        if works:
            assert (
                namespace_of_rows(None, spec, settings, row_bytes=row_bytes(spec), weights=b"").chunk_tokens
                == BLOCK
            )
        else:
            with pytest.raises(ConfigError, match="weights_digest"):
                namespace_of_rows(None, spec, settings, row_bytes=row_bytes(spec), weights=b"")


def _with_memory(config: Any, **extra: Any) -> Any:
    changed = copy.copy(config)
    changed.kv_transfer_config = copy.copy(config.kv_transfer_config)
    changed.kv_transfer_config.kv_connector_extra_config = {"cpu_bytes_to_use": 1 << 24, **extra}
    return changed


def test_vllm_makes_it_where_the_engine_can_be_seen(launch: Callable[..., Rig], config: Any) -> None:
    """Were it made elsewhere, it would ask for a name of the weights."""
    rig = launch()
    assert rig.tier._base.hash_protocol.count("sha256") == 1
    assert rig.tier._prefix


def test_one_group_of_full_attention_is_a_prefix(config: Any) -> None:
    assert is_prefix_only(Engine(config, caches()))
    assert not is_prefix_only(Engine(config, caches(FULL, WINDOW)))
    assert not is_prefix_only(Engine(config, caches(WINDOW)))
    assert not is_prefix_only(None)


def test_settings_are_checked(launch: Callable[..., Rig]) -> None:
    for given, field in (
        ({"colour": 1}, "secondary_tiers.colour"),
        ({"save_ms": "5"}, "secondary_tiers.save_ms"),
        ({"save_share_max": 0.0}, "secondary_tiers.save_share_max"),
        ({"locality": "MOON"}, "secondary_tiers.locality"),
    ):
        with pytest.raises(StoreError) as refused:
            launch(**given)
        assert refused.value.field == field


def test_vllms_own_settings_are_vllms(launch: Callable[..., Rig]) -> None:
    rig = launch(backpressure={"backpressure_cls": "EMABackpressureDetector"}, locality="remote")
    assert rig.tier.bp_detector is not None and rig.tier.locality.value == "REMOTE"


# ------------------------------------------------------------------------------------------------------------- kv_hints


def envelope(*actions: tuple[str, dict[str, Any]], version: str = "1.0") -> KvHintsEnvelope:
    return KvHintsEnvelope(
        version, "m", [KvHintAction(str(n), kind, "1", payload) for n, (kind, payload) in enumerate(actions)]
    )


def test_orders_are_answered_one_by_one() -> None:
    answers = answer_hints(
        envelope(
            ("prefetch", {"block_hashes": ["00ff", "0xabcd"]}),
            ("PREFETCH", {}),
            ("prefetch", {"block_hashes": ["ab"] * 5000}),
            ("prefetch", {"block_hashes": ["xyz"]}),
            ("prefetch", {"block_hashes": "ab"}),
            ("share", {}),
            ("", {}),
            ("demote", {}),
            ("pin", {"session_id": "known", "ttl_s": 2.5}),
            ("retain", {"session_id": "unknown"}),
            ("tool_call", {"session_id": "known", "eta_s": 40}),
            ("typing", {"eta_ms": 1_500}),
            ("pin", {"eta_ms": 1}),
            ("pause", {"eta_s": "soon"}),
            ("retain", {"ttl_ms": -1}),
            ("cancel", {"action_id": "8"}),
            ("cancel", {}),
        ),
        groups=(0, 3),
        chain_of=lambda session: [ChunkKey(b"its only chunk")] if session == "known" else [],
    )
    names = [answered.answer for answered in answers]
    assert names == [
        *(Answer.ACCEPTED, Answer.DEFERRED, Answer.CLIPPED, Answer.REJECTED, Answer.REJECTED),
        *(Answer.REJECTED, Answer.REJECTED, Answer.DEFERRED, Answer.ACCEPTED, Answer.REJECTED),
        *(Answer.ACCEPTED, Answer.DEFERRED, Answer.REJECTED, Answer.REJECTED, Answer.REJECTED),
        *(Answer.ACCEPTED, Answer.REJECTED),
    ]
    assert answers[0].keys == (
        *(b"\x00\xff\0\0\0\0", b"\x00\xff\0\0\0\3"),
        *(b"\xab\xcd\0\0\0\0", b"\xab\xcd\0\0\0\3"),
    )
    assert len(answers[2].keys) == 4096
    assert all(answered.why for answered in answers)
    assert answers[5].why == REASONS["share"]
    kinds = [(answered.kind, answered.own, answered.ttl_ms, answered.eta_ms) for answered in answers[7:12]]
    assert kinds == [
        (ActionKind.DEMOTE, True, 0, 0),
        (ActionKind.PIN, False, 2_500, 0),
        (None, False, 0, 0),
        (ActionKind.EXPECT, False, 0, 40_000),
        (ActionKind.EXPECT, True, 0, 1_500),
    ]
    assert answers[8].keys == answers[10].keys == (b"its only chunk",)
    assert (answers[8].name, answers[15].cancels) == ("8", "8")


@pytest.mark.parametrize(
    "strange",
    [
        *(None, 7, "text", {"protocol_version": "1", "actions": {"a": 1}}, {"actions": []}, [1]),
        *(
            {"protocol_version": "1", "actions": [None]},
            {"protocol_version": "1", "actions": [{"payload": 3}]},
        ),
        envelope(("prefetch", {}), version="9.1"),
    ],
)
def test_whatever_cannot_be_read_is_rejected(strange: Any) -> None:
    assert {answered.answer for answered in answer_hints(strange, (0,))} == {Answer.REJECTED}


def test_orders_are_bounded() -> None:
    assert len(answer_hints(envelope(*[("pin", {})] * 500), (0,))) == 64


def test_what_is_ordered_is_told_to_the_daemon_and_counted_by_its_answer(launch: Callable[..., Rig]) -> None:
    rig = launch()
    named = ["ab" * 32]  # which nobody has saved
    rig.request("one", kv_hints=envelope(("prefetch", {"keys": named}), ("dance", {})))
    total = rig.tier.tally.total
    rig.until(lambda: total["actions_deferred"] == 1)
    assert (total["actions_accepted"], total["actions_rejected"]) == (0, 1)


def explained(daemon: Daemon, rig: Rig, keys: Sequence[bytes]) -> list[Any]:
    with connect(str(daemon.run_dir)) as client:
        number = max(
            row.namespace_id
            for row in client.unary(
                stats_pb2_grpc.StatsStub, "ListNamespaces", stats_pb2.ListNamespacesRequest()
            ).namespaces
            if row.spec == wire.spec_to_proto(rig.tier._spec)
        )
        ask = stats_pb2.ExplainRequest(namespace_id=number, keys=keys)
        return list(client.unary(stats_pb2_grpc.StatsStub, "Explain", ask).chunks)


def test_what_vllms_own_memory_had_is_told_as_used_when_the_request_ends(
    launch: Callable[..., Rig], daemon: Daemon
) -> None:
    rig = launch()
    keys = keys_of("touched", 3)
    first = rig.request("first", keys)
    rig.step("first")
    rig.put(first, {key: number + 1 for number, key in enumerate(keys)})
    rig.until(lambda: rig.tier.tally.total["blocks_saved"] == 3)
    rig.manager.on_request_finished(first)
    assert [chunk.hits for chunk in explained(daemon, rig, keys)] == [0, 0, 0]
    second = rig.request("second", keys)
    rig.step("second")
    rig.manager.on_request_finished(second)
    rig.until(lambda: rig.tier.tally.total["blocks_touched"] == 3)
    rig.until(lambda: [chunk.hits for chunk in explained(daemon, rig, keys)] == [1, 1, 1])
    never = rig.request("aborted while it waited", keys)
    rig.manager.on_request_finished(never)
    rig.step()
    assert rig.tier.tally.total["blocks_touched"] == 3


def test_orders_about_a_request_are_carried_out_when_it_has_ended(
    launch: Callable[..., Rig], daemon: Daemon
) -> None:
    rig = launch()
    keys = keys_of("ordered", 2)
    actions = envelope(("pin", {"ttl_s": 60}), ("tool_call", {"eta_s": 40}), ("dance", {}))
    context = rig.request("one", keys, kv_hints=actions, kv_transfer_params={"session_id": "agent"})
    rig.step("one")
    rig.put(context, {key: number + 1 for number, key in enumerate(keys)})
    rig.until(lambda: rig.tier.tally.total["blocks_saved"] == 2)
    total = rig.tier.tally.total
    assert (total["actions_accepted"], total["actions_rejected"]) == (0, 1)
    rig.manager.on_request_finished(context)
    rig.until(lambda: total["actions_accepted"] + total["actions_deferred"] == 2)
    for chunk in explained(daemon, rig, keys):
        first, second = chunk.hints
        assert (first.kind, second.kind) == (ActionKind.PIN, ActionKind.EXPECT)
        assert 0 < first.ends_in_ms <= 60_000 and 30_000 < second.due_in_ms <= 40_000
    later = rig.request("two", kv_hints=envelope(("cancel", {"action_id": "0"})))
    rig.until(lambda: [len(chunk.hints) for chunk in explained(daemon, rig, keys)] == [1, 1])
    rig.manager.on_request_finished(later)
    third = rig.request("three", kv_hints=envelope(("demote", {"session_id": "agent"})))
    rig.until(lambda: total["actions_rejected"] == 2)  # a tool runs, and then they are wanted again
    rig.manager.on_request_finished(third)


def test_hints_come_by_way_of_vllm_serve_too(launch: Callable[..., Rig]) -> None:
    rig = launch()
    actions = {
        "protocol_version": "1",
        "actions": [
            {"action_id": "a", "action_type": "retain", "payload": {"keys": ["cd" * 32], "ttl_s": 1}}
        ],
    }
    rig.request("one", kv_transfer_params={"kv_hints": actions})
    rig.until(lambda: rig.tier.tally.total["actions_deferred"] == 1)
