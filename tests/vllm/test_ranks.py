"""vLLM's own scheduler over two ranks, simulated: no model runs, each rank's blocks hold numbers made of its tokens."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvstore.client import connect
from kvstore.gpu_worker.connectors.vllm import lookups
from kvstore.gpu_worker.connectors.vllm import worker as ranks
from kvstore.gpu_worker.connectors.vllm.loader import BATCH_BLOCKS, LayerLoad
from kvstore.gpu_worker.connectors.vllm.metadata import (
    Change,
    Changes,
    HeldAdapter,
    Load,
    RankReport,
    StepMetadata,
)
from kvstore.gpu_worker.connectors.vllm.saver import Copied, Saver
from kvstore.gpu_worker.connectors.vllm.scheduler import _usable
from kvstore.gpu_worker.connectors.vllm.stats import Tally
from kvstore.types import ChunkKey, GrantResult

from ..unit.gpu_worker.emulated import EmulatedDevice
from .conftest import BLOCK, BOUND_S, Daemon, Executor, prompt, transfer_config
from .schedulers import config_of, connectors_of, scheduler_of

LAYERS, HEADS, WIDTH, BLOCKS = 3, 2, 8, 50
STEPS_MAX = 20_000
PATIENT = {"lookup_ms": 20_000, "load_ms": 20_000, "save_ms": 20_000}
"""What is late on a busy machine is a miss, which here would be a failure."""


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    daemon = Daemon(folder / "ranks", segment_bytes=1 << 20)  # room for many namespaces
    yield daemon
    daemon.stop()


class Rig:
    """One engine: a real scheduler, `ranks` connectors of the worker role, and no model."""

    def __init__(
        self,
        model: Path,
        run_dir: Path,
        *,
        ranks: int = 2,
        replicas: int = 1,
        role: str = "kv_both",
        hidden: bool = False,
        **extra: Any,
    ) -> None:
        transfer = {**transfer_config(run_dir, **{**PATIENT, **extra}), "kv_role": role}
        config = config_of(model, transfer, ranks=ranks)
        names = [f"layer.{number}" for number in range(LAYERS)]
        group = KVCacheGroupSpec(
            names, FullAttentionSpec(BLOCK, num_kv_heads=HEADS, head_size=WIDTH, dtype=torch.float32)
        )
        cache = KVCacheConfig(BLOCKS, kv_cache_tensors=[], kv_cache_groups=[group], kv_tp_replicas=replicas)
        self.replicas = replicas
        self.model_executor = Executor(config, ranks, hidden=hidden)  # before the scheduler, as vLLM's engine
        self.scheduler = scheduler_of(config, cache)
        shape = (BLOCKS, HEADS, BLOCK, WIDTH)
        self.workers, self.tensors = connectors_of(self.scheduler, names, shape, ranks=ranks)
        self._aggregator = KVOutputAggregator(ranks)
        self.events: list[Any] = []
        """All that vLLM published."""
        self.scheduler.kv_event_publisher.publish = lambda batch: self.events.extend(batch.events)
        self._count = 0
        self.weights = 0
        """What is computed depends on them. A request that has KV of two is not checked."""
        self.checks = True
        self.keys: list[bytes] = []
        """Of the last request's full blocks."""
        self.loads: list[Load] = []

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.connector.shutdown()

    def hold_loads(self) -> threading.Event:
        """No rank reads anything before that is set."""
        gate = threading.Event()
        for worker in self.workers:
            loader = worker.worker_side._loader
            loader._fill = partial(_behind, gate, loader._fill)
        return gate

    def value(self, rank: int, layer: int, token: int, place: int) -> float:
        number = token * 31 + place * 7 + layer * 3 + rank // self.replicas * 101 + self.weights * 1009
        return float(number % 4093)

    def request(self, tokens: list[int], lora: LoRARequest | None = None) -> Request:
        """One of two answer tokens."""
        self._count += 1
        return Request(
            request_id=f"r{self._count}",
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=2, ignore_eos=True),
            pooling_params=None,
            mm_features=None,
            lora_request=lora,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )

    def run(
        self,
        tokens: list[int],
        *,
        between: Callable[[], None] = lambda: None,
        lora: LoRARequest | None = None,
        **changes: Any,
    ) -> int:
        """Serves one request, checks every block that vLLM takes for computed, and returns how many tokens were not
        computed. `between` runs before each step; `changes` are made to the request."""
        request = self.request(tokens, lora)
        for attribute, value in changes.items():
            setattr(request, attribute, value)
        self.scheduler.add_request(request)
        self.keys = [bytes(block_hash) for block_hash in request.block_hashes]
        computed: set[int] = set()
        for _ in range(STEPS_MAX):
            between()
            output = self.scheduler.schedule()
            self._step(output, request, computed)
            if not self.scheduler.has_unfinished_requests():
                break
        else:
            raise AssertionError("it does not end")
        for worker in self.workers:
            saver = worker.worker_side.saver
            assert saver is None or saver.flush(20)
        assert not self.scheduler.connector.scheduler_side._requests
        return len(tokens) - len([place for place in computed if place < len(tokens)])

    def _step(self, output: Any, request: Request, computed: set[int]) -> None:
        count = output.num_scheduled_tokens.get(request.request_id, 0)
        start = request.num_computed_tokens - count
        blocks = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0] if count else []
        results = []
        self.loads += output.kv_connector_metadata.loads
        for rank, worker in enumerate(self.workers):
            if count and request.lora_request is not None:
                self.model_executor.workers[rank].model_runner.lora_manager.add_adapter(request.lora_request)
            worker.handle_preemptions(output.kv_connector_metadata)
            worker.bind_connector_metadata(output.kv_connector_metadata)
            if output.has_sync_kv_loads:
                worker.start_load_kv(None)
        self._forward(output, request, start, count, blocks)
        for worker in self.workers:
            if not output.has_sync_kv_loads:
                worker.start_load_kv(None)
            worker.wait_for_save()
            done = worker.get_transfer_results(output.finished_req_ids)
            results.append(
                ModelRunnerOutput(
                    req_ids=list(output.num_scheduled_tokens),
                    req_id_to_index={id_: n for n, id_ in enumerate(output.num_scheduled_tokens)},
                    sampled_token_ids=[
                        [7] if start + count >= request.num_tokens else []
                        for _ in output.num_scheduled_tokens
                    ],
                    kv_connector_output=KVConnectorOutput(
                        finished_recving=done.finished_recving,
                        invalid_block_ids=worker.get_block_ids_with_load_errors(),
                        kv_connector_stats=worker.get_kv_connector_stats(),
                        kv_connector_worker_meta=worker.build_connector_worker_meta(),
                    ),
                )
            )
            worker.clear_connector_metadata()
        computed.update(range(start, start + count))
        merged = self._aggregator.aggregate(results)
        failed = merged.kv_connector_output.invalid_block_ids
        if count and not failed and self.checks:
            self._check(request, start + count, blocks)
        self.scheduler.update_from_output(output, merged)

    def _forward(self, output: Any, request: Request, start: int, count: int, blocks: list[int]) -> None:
        """Layer by layer on all ranks, which add up what each has computed: what is not there on one of them, where
        attention reads it, spoils what all compute from then on."""
        doubtful = count and (output.has_sync_kv_loads or self.weights)
        spoilt = 0
        for layer, name in enumerate(self.tensors[0]):
            for rank, worker in enumerate(self.workers):
                worker.wait_for_layer_load(name)
                self._touch(rank, layer, blocks, start, start + count)
                if doubtful and not self._whole(rank, layer, request, start, blocks):
                    spoilt = 1
            for rank, worker in enumerate(self.workers):
                tensor = self.tensors[rank][name]
                for place in range(start, start + count):
                    value = self.value(rank, layer, request.all_token_ids[place], place) + spoilt
                    tensor[blocks[place // BLOCK], :, place % BLOCK] = value
                worker.save_kv_layer(name, tensor, None)

    def _touch(self, rank: int, layer: int, blocks: list[int], start: int, end: int) -> None:
        """Attention of one layer, for a device that tells races."""
        device = self.workers[rank].worker_side._device
        if device is not None and end > start:
            last = -(-end // BLOCK)
            device.compute.run(
                lambda: None,
                reads=[("block", layer, block) for block in blocks[:last]],
                writes=[("block", layer, block) for block in blocks[start // BLOCK : last]],
            )

    def _check(self, request: Request, end: int, blocks: list[int]) -> None:
        for rank in range(len(self.tensors)):
            for layer in range(LAYERS):
                assert self._whole(rank, layer, request, end, blocks), (rank, layer)

    def _whole(self, rank: int, layer: int, request: Request, end: int, blocks: list[int]) -> bool:
        """Whether the KV of the request's first `end` tokens is what it should be."""
        tensor = list(self.tensors[rank].values())[layer]
        return all(
            bool(
                (
                    tensor[blocks[place // BLOCK], :, place % BLOCK]
                    == self.value(rank, layer, request.all_token_ids[place], place)
                ).all()
            )
            for place in range(end)
        )

    def announced(self) -> dict[Any, BlockStored]:
        """What a router that heard all of it believes to be in the store: hash -> the event that said so."""
        blocks: dict[Any, BlockStored] = {}
        for event in self.events:
            if isinstance(event, BlockStored) and event.medium == "STORAGE":
                blocks.update(dict.fromkeys(event.block_hashes, event))
            elif isinstance(event, BlockRemoved) and event.medium == "STORAGE":
                for block_hash in event.block_hashes:
                    del blocks[block_hash]
        return blocks


def _behind(gate: threading.Event, fill: Callable[..., int], *arguments: Any) -> int:
    assert gate.wait(BOUND_S)
    return fill(*arguments)


class FailsAtLayer:
    """A rank's blocks, but for one layer nothing can be loaded into them."""

    def __init__(self, blocks: Any, layer: int) -> None:
        self._blocks = blocks
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._blocks, name)

    def fill(self, lease: Any, rows: Any, shard: int, layers: tuple[int, ...], **more: Any) -> bool:
        if self._layer in layers:
            raise ZeroDivisionError
        return self._blocks.fill(lease, rows, shard, layers, **more)


class WaitsAtBlock:
    """A rank's blocks; who wants to fill the one with key number `index` says so, and waits."""

    def __init__(self, blocks: Any, index: int, reached: threading.Event, gate: threading.Event) -> None:
        self._blocks = blocks
        self._index = index
        self._reached = reached
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._blocks, name)

    def fill(self, lease: Any, rows: Any, *rest: Any, **more: Any) -> bool:
        if self._index in [index for index, _ in rows]:
            self._reached.set()
            assert self._gate.wait(BOUND_S)
        return self._blocks.fill(lease, rows, *rest, **more)


@pytest.fixture
def rig(model: Path, daemon: Daemon) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(**options: Any) -> Rig:
        made.append(Rig(model, daemon.run_dir, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_both_ranks_save_and_load(rig: Callable[..., Rig]) -> None:
    tokens = prompt(1, 300)
    assert rig().run(tokens) == 0
    second = rig()
    assert second.run(tokens) == 288
    assert [worker.worker_side.tally.total["blocks_loaded"] for worker in second.workers] == [9, 9]


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("path", ["registered", "bounce"])
def test_on_a_device_that_tells_races(
    rig: Callable[..., Rig], layerwise: bool, path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Blocks change hands all the time: each prompt has more than half of them. Two engines take turns."""
    made: list[EmulatedDevice] = []

    def device_of(_: torch.device) -> EmulatedDevice:
        made.append(EmulatedDevice(seed=len(made), registers_read_only=path == "registered"))
        return made[-1]

    monkeypatch.setattr(ranks, "device_of", device_of)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rigs = [rig(layerwise=layerwise, salt=f"{path} {layerwise}") for _ in range(2)]
    prompts = [prompt(900 + number, 32 * BLOCK + 3) for number in range(3)]
    for number in range(2 * len(prompts)):
        for one in rigs:
            one.run(prompts[number % len(prompts)])
    sides = [each.worker_side for one in rigs for each in one.workers]
    assert len(made) == len(sides) and {side._proven.segments.path.value for side in sides} == {path}
    assert not [race for device in made for race in device.races]
    assert not [side for side in sides if side.tally.total["blocks_failed"] or side._proven.segments.failure]
    loaded = [side.tally.total["blocks_loaded"] for side in sides]
    assert min(loaded) >= 32 and max(device.pageable for device in made) == 0, loaded


def test_layer_by_layer(rig: Callable[..., Rig]) -> None:
    tokens = prompt(2, 300)
    assert rig(layerwise=True).run(tokens) == 0
    assert rig(layerwise=True).run(tokens) == 288
    assert rig().run(tokens) == 288, "the bytes are the same"


def test_a_rank_that_does_not_save_makes_a_miss_for_both(rig: Callable[..., Rig]) -> None:
    tokens = prompt(3, 300)
    first = rig()
    first.workers[1].worker_side._room = lambda metadata: []
    assert first.run(tokens) == 0
    assert first.workers[0].worker_side.tally.total["blocks_saved"] == 9
    assert rig().run(tokens) == 0, "half of each block is there: no hit"
    assert rig().run(tokens) == 288, "now both halves are"


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_load_makes_both_compute(
    rig: Callable[..., Rig], layerwise: bool, rank: int
) -> None:
    tokens = prompt(4 + 2 * layerwise + rank, 300)
    rig().run(tokens)
    second = rig(layerwise=layerwise)
    loader = second.workers[rank].worker_side._loader
    fill, blocks = loader._fill, loader._blocks
    loader._fill = lambda load, *rest: min(5, fill(load, *rest))
    if layerwise:
        loader._blocks = FailsAtLayer(blocks, 1)
    loaded = second.run(tokens)
    assert loaded == (0 if layerwise else 5 * BLOCK)
    # What was computed after the failure, on whatever ground, must not have spoilt what is stored.
    assert rig().run(tokens) == 288


@pytest.mark.parametrize("rank", [0, 1])
def test_what_follows_a_layer_that_is_missing_is_not_saved(rig: Callable[..., Rig], rank: int) -> None:
    """Layer by layer, the step has computed more blocks on bad ground before vLLM hears of it, on all ranks: those that
    have loaded all of theirs do not know."""
    tokens = prompt(52 + rank, 290)
    rig().run(tokens[:130])
    second = rig(layerwise=True)
    loader = second.workers[rank].worker_side._loader
    loader._blocks = FailsAtLayer(loader._blocks, 1)
    assert second.run(tokens) == 0
    assert rig().run(tokens) == 288  # and looks at each block, of each rank


@pytest.mark.parametrize("layerwise", [False, True])
def test_of_a_prompt_that_is_all_there_one_token_is_computed(
    rig: Callable[..., Rig], layerwise: bool
) -> None:
    tokens = prompt(54 + 400 * layerwise, 288)
    rig().run(tokens)
    second = rig(layerwise=layerwise)
    assert second.run(tokens) == 287
    for worker in second.workers:
        total = worker.worker_side.tally.total
        assert total["blocks_loaded"] == 9
        assert total["blocks_saved"] == total["blocks_already"] == 0, "the last block is not saved again"
    # vLLM's own cache gives all blocks but the last, which is loaded for its other tokens.
    assert second.run(tokens) == 287
    # And the whole block to a request that goes on behind it.
    assert second.run(tokens + prompt(455, 20)) == 288
    assert [worker.worker_side.tally.total["blocks_loaded"] for worker in second.workers] == [10, 10]


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_of_a_prompt_that_is_all_there_the_last_block_fails(
    rig: Callable[..., Rig], layerwise: bool, rank: int
) -> None:
    """It is computed whole, not but for its last token."""
    tokens = prompt(456 + 2 * layerwise + rank, 288)
    rig().run(tokens)
    second = rig(layerwise=layerwise)
    loader = second.workers[rank].worker_side._loader
    if layerwise:
        loader._blocks = FailsAtLayer(loader._blocks, 1)
    else:
        loader._fill = partial(_but_for_the_last, loader._fill)
    assert second.run(tokens) == (0 if layerwise else 8 * BLOCK)
    assert second.workers[rank].worker_side.tally.total["blocks_already"] == (9 if layerwise else 1)
    assert rig().run(tokens) == 287


def _but_for_the_last(fill: Callable[..., int], load: Load, *rest: Any) -> int:
    return min(len(load.keys) - 1, fill(load, *rest))


def test_behind_what_the_engine_has_itself(rig: Callable[..., Rig]) -> None:
    tokens = prompt(55, 300)
    rig().run(tokens)
    for layerwise in (False, True):
        second = rig(layerwise=layerwise)
        second.run(tokens[:100])
        assert second.run(tokens) == 288
        assert second.workers[0].worker_side.tally.total["blocks_loaded"] == 9, "each once"


def test_a_broken_thread_is_a_miss(rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture) -> None:
    tokens = prompt(10, 200)
    rig().run(tokens)
    second = rig()

    def broken(*_: object) -> int:
        raise ZeroDivisionError

    second.workers[0].worker_side._loader._fill = broken
    assert second.run(tokens) == 0


def test_replicas_store_and_read_one_copy(rig: Callable[..., Rig]) -> None:
    tokens = prompt(11, 300)
    first = rig(replicas=2)
    first.run(tokens)
    assert first.workers[0].worker_side.tally.total["blocks_saved"] == 9
    assert first.workers[1].worker_side.saver is None
    spec = first.scheduler.connector.scheduler_side._spec
    assert spec is not None and spec.shard_count == 1
    second = rig(replicas=2)
    assert second.run(tokens) == 288
    assert [worker.worker_side._loader._shard for worker in second.workers] == [0, 0]


def test_a_reset_voids_loads_under_way(rig: Callable[..., Rig]) -> None:
    """The weights change while a request waits for KV that the old ones made."""
    tokens = prompt(12, 300)
    rig().run(tokens)
    second = rig()
    connector = second.scheduler.connector

    gate = second.hold_loads()

    def reset_once() -> None:
        if connector.scheduler_side._loading and not connector.scheduler_side._resets:
            assert connector.reset_cache()
            gate.set()

    assert second.run(tokens, between=reset_once) == 0
    assert connector.scheduler_side._resets == 1


def test_a_reset_between_two_batches_of_a_load(rig: Callable[..., Rig]) -> None:
    """What is in already is of weights that are gone, as is what follows."""
    tokens = prompt(50, BLOCK * (BATCH_BLOCKS + 4) + 1)
    rig().run(tokens)
    second = rig()
    connector = second.scheduler.connector
    second.run(prompt(56, 40))  # the ranks know the namespace
    loaders = [worker.worker_side._loader for worker in second.workers]
    generations = [loader._generation for loader in loaders]
    between_batches, gate = threading.Event(), threading.Event()
    for loader in loaders:
        loader._blocks = WaitsAtBlock(loader._blocks, BATCH_BLOCKS, between_batches, gate)

    def reset_once() -> None:
        if between_batches.is_set() and not connector.scheduler_side._resets:
            assert connector.reset_cache()
        if all(loader._generation > was for loader, was in zip(loaders, generations, strict=True)):
            gate.set()

    assert second.run(tokens, between=reset_once) == 0
    assert gate.is_set()


@pytest.mark.parametrize("loaded", [0, 6])
def test_a_reset_in_mid_request_saves_nothing_of_it(rig: Callable[..., Rig], loaded: int) -> None:
    """Its first blocks were computed with other weights, or loaded, and all that follow depend on them."""
    tokens = prompt(40 + loaded, 300)
    if loaded:
        rig().run(tokens[: loaded * BLOCK + 1])
    first = rig()
    side = first.scheduler.connector.scheduler_side

    def reset_once() -> None:
        for tracked in side._requests.values():
            begun = tracked.tried == 0 and not side._loading if loaded else tracked.blocks
            if begun and not side._resets:
                assert first.scheduler.connector.reset_cache()
                first.weights, first.checks = 1, False

    assert first.run(tokens, between=reset_once) == loaded * BLOCK
    assert side._resets == 1
    first.checks = True
    assert first.scheduler.reset_prefix_cache()
    assert first.run(tokens) == 0
    assert first.scheduler.reset_prefix_cache()
    assert first.run(tokens) == 288


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory cannot tell, and the daemon is asked."""
    monkeypatch.setattr(lookups, "peek", lambda *_: None)


@pytest.mark.parametrize("end", ["reset", "finish"])
def test_what_a_waiting_request_found_is_given_back(rig: Callable[..., Rig], asked: None, end: str) -> None:
    tokens = prompt(57, 300)
    rig().run(tokens)
    second = rig()
    side = second.scheduler.connector.scheduler_side
    request = second.request(tokens)
    side.on_new_request(request)
    (tracked,) = side._requests.values()
    lookup = tracked.lookup
    for _ in range(int(BOUND_S / 0.02)):
        if lookup.done:
            break
        threading.Event().wait(0.02)
    assert lookup.hits == 9 and not lookup.stale
    leases = list(lookup._leases)
    if end == "reset":
        assert second.scheduler.connector.reset_cache()
    else:
        side.finished(request)
    assert lookup.stale and tracked.lookup is None
    assert leases and all(lease._released for lease in leases)


def test_a_full_queue_drops(rig: Callable[..., Rig]) -> None:
    first = rig(save_queue_bytes=0)
    first.run(prompt(13, 300))
    assert [worker.worker_side.tally.total["blocks_dropped"] for worker in first.workers] == [9, 9]


def test_memory_for_saves_is_bounded_and_used_again(rig: Callable[..., Rig]) -> None:
    first = rig()
    saver = first.workers[0].worker_side.saver
    for seed in range(14, 18):
        first.run(prompt(seed, 300))
    assert len(saver._free) < 4 * 9


def computed_blocks(rig: Rig) -> list[Any]:
    """Hashes that vLLM itself announced, of its own cache."""
    return [
        block_hash
        for event in rig.events
        if isinstance(event, BlockStored) and event.medium == "GPU"
        for block_hash in event.block_hashes
    ]


def test_routers_hear_of_what_all_ranks_saved(rig: Callable[..., Rig]) -> None:
    """vLLM publishes with a step, so the last saves are told with the next request."""
    tokens, other = prompt(20, 300), prompt(21, 40)
    first = rig()
    first.run(tokens)
    first.run(other)
    told = first.announced()
    hashes = computed_blocks(first)[:9]
    assert set(hashes) <= told.keys()
    told = {block_hash: told[block_hash] for block_hash in hashes}
    covered: list[int] = []
    for event in dict.fromkeys(told.values()):
        assert event.parent_block_hash == (hashes[len(covered) // BLOCK - 1] if covered else None)
        assert len(event.token_ids) == len(event.block_hashes) * BLOCK == len(event.extra_keys) * BLOCK
        covered += event.token_ids
    assert covered == tokens[:288]
    assert {(e.block_size, e.locality, e.ownership) for e in told.values()} == {(BLOCK, "LOCAL", "kvstored")}

    second = rig()
    second.run(tokens)
    assert second.announced().keys() >= told.keys(), "and of what an engine finds"


def test_routers_do_not_hear_of_what_one_rank_saved(rig: Callable[..., Rig]) -> None:
    tokens = prompt(22, 300)
    first = rig()
    room = first.workers[1].worker_side._room
    first.workers[1].worker_side._room = lambda metadata: []
    first.run(tokens)
    first.run(prompt(23, 40))
    assert not first.announced()
    first.workers[1].worker_side._room = room
    assert first.scheduler.reset_prefix_cache()
    first.run(tokens)
    first.run(prompt(24, 40))
    assert first.announced().keys() >= set(computed_blocks(first)[:9])


def test_routers_hear_of_what_is_gone(rig: Callable[..., Rig]) -> None:
    """Found by the lookup; and by a rank, behind a lookup that found it."""
    tokens = prompt(25, 300)
    first = rig()
    first.run(tokens)
    keys = first.keys
    first.run(prompt(26, 40))
    hashes = computed_blocks(first)[:9]
    namespace = first.workers[0].worker_side._link._namespace
    assert namespace.forget(keys=keys[4:5]) == 1
    assert first.scheduler.reset_prefix_cache()
    assert first.run(tokens) == 4 * BLOCK
    removed = [event.block_hashes for event in first.events if isinstance(event, BlockRemoved)]
    assert [hashes[4]] in removed
    first.run(prompt(27, 40))
    assert set(hashes) <= first.announced().keys(), "it was computed and saved again"

    assert first.scheduler.reset_prefix_cache()
    side = first.scheduler.connector.scheduler_side
    forgotten = []
    gate = first.hold_loads()

    def forget_once() -> None:
        if side._loading and not forgotten:
            for lookup in side._loading.values():
                lookup.end()
            forgotten.append(namespace.forget(keys=keys[2:3]))
            gate.set()

    before = len(first.events)
    first.run(tokens, between=forget_once)
    assert forgotten == [1]
    said = [event.block_hashes for event in first.events[before:] if isinstance(event, BlockRemoved)]
    assert [hashes[2]] in said


def test_routers_hear_of_a_reset(rig: Callable[..., Rig]) -> None:
    tokens = prompt(28, 300)
    first = rig()
    first.run(tokens)
    first.run(prompt(29, 40))
    assert first.announced()
    assert first.scheduler.reset_prefix_cache(reset_connector=True)
    first.run(prompt(30, 40))
    assert not first.announced().keys() & set(computed_blocks(first)[:9])
    first.run(tokens)
    first.run(prompt(31, 40))
    assert set(computed_blocks(first)[:9]) <= first.announced().keys()


def test_adapters_of_one_place_never_meet(rig: Callable[..., Rig], tmp_path: Path) -> None:
    """vLLM's hash covers an adapter's name and path, not what lies there."""
    tokens = prompt(41, 300)
    adapter = LoRARequest("mine", 1, str(tmp_path))
    for content in (b"one", b"other"):
        (tmp_path / "adapter_model.bin").write_bytes(content)
        assert rig().run(tokens, lora=adapter) == 0
        assert rig().run(tokens, lora=adapter) == 288
    assert rig().run(tokens) == 0


def saved_blocks(rig: Rig, rank: int = 0) -> int:
    return int(rig.workers[rank].worker_side.tally.total["blocks_saved"])


def update(rig: Rig, value: float) -> None:
    """As a trainer does: through vLLM's call, into the same tensors, and no counter moves."""
    rig.weights = int(value)
    rig.model_executor.collective_rpc("update_weights", None, (value,))


def test_updated_weights_are_another_model(rig: Callable[..., Rig]) -> None:
    """The engine's own KV of before is not found, nor is what it computes taken for that; weights that come back find
    theirs."""
    tokens = prompt(60, 300)
    first = rig()
    assert first.run(tokens) == 0
    update(first, 1)
    assert first.scheduler.reset_prefix_cache()
    assert first.run(tokens) == 0
    assert first.scheduler.reset_prefix_cache()
    assert first.run(tokens) == 288, "what it computed since"
    assert rig().run(tokens) == 288, "who has the weights of before finds what is theirs"
    second = rig()
    update(second, 1)
    assert second.run(tokens) == 288, "and who has the new ones, theirs"
    update(first, 0)
    assert first.scheduler.reset_prefix_cache()
    assert first.run(tokens) == 288, "as before"


def test_behind_blocks_of_other_weights_nothing_is_saved(rig: Callable[..., Rig]) -> None:
    """vLLM's own cache was not reset: what follows its old blocks is KV of neither."""
    tokens = prompt(61, 300)
    first = rig()
    assert first.run(tokens[:160]) == 0
    update(first, 1)
    first.checks = False
    assert first.run(tokens) == 160, "by vLLM's own cache"
    first.checks = True
    assert saved_blocks(first) == 5, "nothing of the mixture"
    third = prompt(62, 300)
    assert first.run(third) == 0
    other = rig()
    update(other, 1)
    assert other.run(third) == 288, "what is computed from the beginning is saved again"


def test_weights_that_change_without_a_call(rig: Callable[..., Rig]) -> None:
    """A program that reaches into one rank: it does not load what is named for others, and the engine hears of it."""
    tokens = prompt(63, 300)
    rig().run(tokens)
    second = rig()
    with torch.no_grad():
        second.model_executor.models[1].weight.add_(1.0)
    second.weights = 1
    assert second.run(tokens) == 0
    assert rig().run(tokens) == 288
    assert second.scheduler.reset_prefix_cache()
    assert second.run(tokens) == 288, "under a name of their own"


def test_a_change_that_moves_no_counter_is_found_in_time(rig: Callable[..., Rig]) -> None:
    tokens = prompt(64, 300)
    rig().run(tokens)
    second = rig()
    second.model_executor.models[0].weight.data.fill_(1.0)
    for worker in second.workers:
        worker.worker_side.begin(StepMetadata())
        worker.worker_side.held._full_at = 0.0  # the time has come
    second.weights = 1
    assert second.run(tokens) == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_what_the_others_computed_with_a_rank_that_changed_is_forgotten(
    rig: Callable[..., Rig], rank: int
) -> None:
    """They hear of it after the step, and have given their part to the store by then. Whoever computes the same blocks
    with the weights of before brings the part that is missing."""
    tokens = prompt(646 + rank, 300)
    second = rig()
    second.run(prompt(648, 20))
    with torch.no_grad():
        second.model_executor.models[rank].weight.add_(1.0)
    second.weights = 1
    second.run(tokens)
    assert saved_blocks(second, 1 - rank) == saved_blocks(second, rank) + 3, (
        "in the step in which one has changed"
    )
    assert rig().run(tokens) == 0
    assert rig().run(tokens) == 288  # and looks at each block, of each rank


def the_time_has_come(rig: Rig) -> None:
    """To look at all weights."""
    for worker in rig.workers:
        worker.worker_side.held._full_at = 0.0


def test_what_was_saved_before_a_silent_change_was_found_is_forgotten(rig: Callable[..., Rig]) -> None:
    """It stands under the name of the weights before, which others still compute with."""
    before, between, after = (prompt(640 + number, 300) for number in range(3))
    first = rig()
    first.run(before)
    the_time_has_come(first)
    first.run(prompt(643, 20))  # verified
    for model in first.model_executor.models:
        model.weight.data.fill_(1.0)
    first.weights = 1
    first.run(between)
    the_time_has_come(first)
    first.run(after)
    assert sum(worker.worker_side.tally.total["blocks_recalled"] for worker in first.workers) >= 9
    second = rig()
    assert second.run(between) == second.run(after) == 0
    assert second.run(before) == 288


def test_a_hook_is_seen_in_the_next_step(rig: Callable[..., Rig]) -> None:
    tokens = prompt(644, 300)
    rig().run(tokens)
    second = rig()
    second.run(prompt(645, 20))
    handle = second.model_executor.models[1].register_forward_hook(lambda *_: None)
    second.weights = 1
    assert second.run(tokens) == 0
    handle.remove()
    second.weights = 0
    second.model_executor.collective_rpc("reload_weights")
    assert second.scheduler.reset_prefix_cache()
    assert second.run(tokens) == 288


def test_weights_that_change_all_the_time_have_no_name(rig: Callable[..., Rig]) -> None:
    """Nobody waits for their digest in every step."""
    first = rig()
    model = first.model_executor.models[0]

    def change() -> None:
        with torch.no_grad():
            model.weight.add_(1.0)

    first.checks = False
    for number in range(12):
        first.run(prompt(760 + number, 100), between=change)
    assert not first.workers[0].worker_side.held.weights(anew=False).digest
    assert first.scheduler.connector.scheduler_side._known is None
    first.model_executor.collective_rpc("reload_weights")
    tokens = prompt(76, 300)
    first.run(tokens)
    assert first.scheduler.reset_prefix_cache()
    assert first.run(tokens) == 288


def test_weights_change_while_a_request_loads(rig: Callable[..., Rig]) -> None:
    tokens = prompt(65, 300)
    rig().run(tokens)
    second = rig()
    side = second.scheduler.connector.scheduler_side
    gate = second.hold_loads()
    updated = []

    def update_once() -> None:
        if side._loading and not updated:
            updated.append(update(second, 1))
        if updated:
            gate.set()

    assert second.run(tokens, between=update_once) == 0
    assert updated


def test_weights_change_between_a_load_and_its_use(rig: Callable[..., Rig]) -> None:
    tokens = prompt(75, 300)
    rig().run(tokens)
    second = rig()
    side = second.scheduler.connector.scheduler_side
    updated = []

    def update_once() -> None:
        if second.loads and not side._loading and not updated:
            updated.append(update(second, 1))

    assert second.run(tokens, between=update_once) == 0
    assert updated
    assert second.workers[0].worker_side.tally.total["blocks_loaded"] == 9


def test_weights_change_between_a_load_after_a_preemption_and_its_use(rig: Callable[..., Rig]) -> None:
    tokens = prompt(76, 300)
    rig().run(tokens)
    second = rig()
    side = second.scheduler.connector.scheduler_side
    done: list[Any] = []

    def preempt_and_update() -> None:
        running = second.scheduler.running
        if not done and running and running[0].num_output_tokens:
            done.append(second.scheduler.reset_prefix_cache(reset_running_requests=True))
        elif len(done) == 1 and len(second.loads) == 2 and not side._loading:
            done.append(update(second, 1))

    assert second.run(tokens, between=preempt_and_update) == 0
    assert len(done) == 2
    assert second.workers[0].worker_side.tally.total["blocks_loaded"] == 18


def test_steps_that_only_wait_do_not_look_at_the_weights(rig: Callable[..., Rig]) -> None:
    """A thousand parameters take a millisecond, and a core that copies what is waited for."""
    tokens = prompt(77, 300)
    rig().run(tokens)
    second = rig()
    side, rank = second.scheduler.connector.scheduler_side, second.workers[0].worker_side
    gate = second.hold_loads()
    looks: list[int] = []
    steps: list[int] = []

    def count() -> None:
        if not side._loading:
            return
        if not steps:
            check = rank.held.check
            rank.held.check = lambda: (looks.append(1), check())[1]
        steps.append(len(looks))
        if len(steps) == 5:
            gate.set()

    assert second.run(tokens, between=count) == 288
    assert len(steps) >= 5 and not any(steps)
    assert looks, "but those that compute do"


def test_steps_that_only_decode_do_not_look_at_the_weights(rig: Callable[..., Rig]) -> None:
    engine = rig()
    engine.run(prompt(79, 40))
    rank = engine.workers[0].worker_side
    check, end_forward = rank.held.check, rank.end_forward
    looks: list[int] = []
    saving: list[bool] = []

    def end(metadata: StepMetadata) -> None:
        saving.append(bool(metadata.saves))
        end_forward(metadata)

    rank.held.check = lambda: (looks.append(1), check())[1]
    rank.end_forward = end
    engine.run(prompt(83, 40), max_tokens=150)
    assert len(saving) > 100 and sum(saving) < 10
    assert len(looks) == sum(saving) > 1, "once for all that a step saves"


def test_a_change_in_a_step_that_does_not_look_is_seen_when_its_block_is_saved(
    rig: Callable[..., Rig],
) -> None:
    engine = rig()
    engine.run(prompt(84, 40))
    steps = []

    def change() -> None:
        steps.append(1)
        if len(steps) == 20:  # in the middle of a block
            for model in engine.model_executor.models:
                with torch.no_grad():
                    model.weight.add_(1.0)

    before = saved_blocks(engine)
    engine.run(prompt(85, 64), between=change, max_tokens=60)
    assert len(steps) > 40
    assert saved_blocks(engine) == before + 2, (
        "of what follows the change nothing is saved under a name of before"
    )


@pytest.mark.parametrize("sleeps", [True, False])
def test_what_is_asleep_or_half_loaded_has_no_name(rig: Callable[..., Rig], sleeps: bool) -> None:
    tokens = prompt(66 + sleeps, 300)
    first = rig()
    first.run(tokens)
    executor = first.model_executor
    weights = [model.weight for model in executor.models]
    if sleeps:
        executor.collective_rpc("sleep", kwargs={"level": 2})
    else:
        executor.models[1].weight = torch.nn.Parameter(torch.empty(4, 4, device="meta"))
        executor.collective_rpc("start_weight_update")
    assert first.scheduler.reset_prefix_cache()
    assert first.run(tokens) == 0
    assert saved_blocks(first) == 9, "nothing was saved in between"
    for model, weight in zip(executor.models, weights, strict=True):
        model.weight = weight
    executor.collective_rpc("wake_up" if sleeps else "finish_weight_update")
    assert first.scheduler.reset_prefix_cache()
    assert first.run(tokens) == 288, "the same weights are the same model"


def test_weights_that_no_rank_can_tell_need_a_name(rig: Callable[..., Rig]) -> None:
    """Packed out of sight: an empty parameter is left. A name counts until something changes."""
    tokens = prompt(68, 300)

    for _ in range(2):
        first = rig(hidden=True)
        assert first.run(tokens) == 0
    for model in first.model_executor.models:  # vLLM loads them anew, with nobody having seen the first time
        model.load_weights([("weight", torch.ones(4, 4))])
    first.model_executor.collective_rpc("reload_weights")
    for found in (0, 288):
        assert first.scheduler.reset_prefix_cache()
        assert first.run(tokens) == found
    assert rig(hidden=True, weights_digest="mine").run(tokens) == 0
    second = rig(hidden=True, weights_digest="mine")
    assert second.run(tokens) == 288
    second.model_executor.collective_rpc("reload_weights")
    assert second.scheduler.reset_prefix_cache()
    assert second.run(tokens) == 0


def test_an_adapter_is_what_the_ranks_have_loaded(rig: Callable[..., Rig], tmp_path: Path) -> None:
    """Other files under its name: this engine still computes with those that it read, and another one with these."""
    tokens = prompt(69, 300)
    adapter = LoRARequest("mine", 1, str(tmp_path))
    file = tmp_path / "adapter_model.bin"
    file.write_bytes(b"one")
    first = rig()
    assert first.run(tokens, lora=adapter) == 0
    status = file.stat()
    file.unlink()
    file.write_bytes(b"two")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    second = rig()
    assert second.run(tokens, lora=adapter) == 0
    assert second.scheduler.reset_prefix_cache() and first.scheduler.reset_prefix_cache()
    assert second.run(tokens, lora=adapter) == 288
    assert first.run(tokens, lora=adapter) == 288, "what it holds is what it finds"
    (mine,), (its,) = ({load.adapter.digest for load in each.loads} for each in (first, second))
    assert mine != its
    side = first.scheduler.connector.scheduler_side
    # Had the scheduler's side not heard of that, it would go by the files, and ask before it loads.
    side._adapters.clear()
    assert first.scheduler.reset_prefix_cache()
    assert first.run(tokens, lora=adapter) == 0
    # Were it wrong about the ranks, they would not load.
    for rank in (0, 1):
        side._adapters[rank, 1] = HeldAdapter("mine", str(tmp_path), its)
    assert first.scheduler.reset_prefix_cache()
    assert first.run(tokens, lora=adapter) == 0
    assert first.loads[-1].adapter.digest == its
    assert saved_blocks(first) == 9


def test_an_adapter_that_is_replaced_in_place(rig: Callable[..., Rig], tmp_path: Path) -> None:
    """vLLM's own cache keeps blocks of the one before: nothing that follows them is saved."""
    tokens = prompt(70, 300)
    file = tmp_path / "adapter_model.bin"
    file.write_bytes(b"one")
    adapter = LoRARequest("mine", 1, str(tmp_path))
    first = rig()
    assert first.run(tokens[:160], lora=adapter) == 0
    file.write_bytes(b"two")
    swap = LoRARequest("mine", 1, str(tmp_path), load_inplace=True)
    first.model_executor.collective_rpc("add_lora", args=(swap,))
    first.run(prompt(77, 40), lora=adapter)  # the scheduler's side hears of it with a step
    assert first.run(tokens, lora=adapter) == 160, "by vLLM's own cache"
    assert saved_blocks(first) == 5, "nothing of the mixture"
    assert first.scheduler.reset_prefix_cache()
    assert first.run(tokens, lora=adapter) == 0
    assert rig().run(tokens, lora=adapter) == 288


@pytest.mark.parametrize("moment", ["while vLLM reads it", "brought along"])
def test_an_adapter_that_cannot_be_known_is_computed(
    rig: Callable[..., Rig], tmp_path: Path, moment: str
) -> None:
    tokens = prompt(71 + len(moment), 300)
    file = tmp_path / "adapter_model.bin"
    file.write_bytes(b"one")
    adapter = LoRARequest("mine", 1, str(tmp_path))
    if moment == "brought along":

        class Bringing(LoRARequest):  # type: ignore[misc]
            lora_tensors: Any = None

        adapter = Bringing("mine", 1, str(tmp_path), lora_tensors=b"w")

    def replaced() -> None:
        file.write_bytes(file.read_bytes() + b"!")

    for _ in range(2):
        each = rig()
        if moment == "while vLLM reads it":
            for worker in each.model_executor.workers:
                worker.model_runner.lora_manager.reading = replaced
        assert each.run(tokens, lora=adapter) == 0
        assert saved_blocks(each) == 0


def test_what_is_not_to_be_read_is_not_looked_up(rig: Callable[..., Rig]) -> None:
    tokens = prompt(42, 300)
    rig().run(tokens)
    assert rig(load_tokens_min=289).run(tokens) == 0
    assert rig(load_tokens_min=288).run(tokens) == 288
    assert rig().run(tokens, skip_reading_prefix_cache=True) == 0
    assert not _usable(SimpleNamespace(prompt_embeds=torch.zeros(1), resumable=False))
    assert not _usable(SimpleNamespace(prompt_embeds=None, resumable=True))


def test_roles(rig: Callable[..., Rig]) -> None:
    tokens, other = prompt(43, 300), prompt(44, 300)
    assert rig(role="kv_producer").run(tokens) == 0
    assert rig(role="kv_producer").run(tokens) == 0, "it does not load"
    assert rig(role="kv_consumer").run(tokens) == 288
    assert rig(role="kv_consumer").run(other) == 0
    assert rig().run(other) == 0, "it does not save"


def pinned_bytes(daemon: Daemon) -> int:
    with connect(str(daemon.run_dir), timeout_s=BOUND_S) as client:
        return sum(row.pinned_bytes for row in client.stats().namespaces)


def test_aborted_in_the_load(rig: Callable[..., Rig], daemon: Daemon) -> None:
    """vLLM keeps its blocks until the ranks have reported; the store's pins go."""
    tokens = prompt(45, 300)
    rig().run(tokens)
    second = rig()
    side = second.scheduler.connector.scheduler_side
    gate = second.hold_loads()

    def abort() -> None:
        if side._loading:
            second.scheduler.finish_requests(list(side._loading), RequestStatus.FINISHED_ABORTED)
            assert not side._loading and not side._requests
            gate.set()

    second.run(tokens, between=abort)
    for _ in range(int(BOUND_S / 0.05)):
        if pinned_bytes(daemon) == 0 and second.scheduler.reset_prefix_cache():
            break
        second.run(prompt(48, 20))  # the ranks report with a step
        threading.Event().wait(0.05)
    assert pinned_bytes(daemon) == 0
    assert second.scheduler.reset_prefix_cache()
    assert second.run(tokens) == 288


def test_pins_of_who_waits_too_long_are_given_back(rig: Callable[..., Rig], asked: None) -> None:
    tokens = prompt(46, 300)
    rig().run(tokens)
    second = rig(lookup_ms=2000, hold_ms=0)
    side = second.scheduler.connector.scheduler_side
    side.on_new_request(second.request(tokens))  # it never gets its turn
    (tracked,) = side._requests.values()
    lookup = tracked.lookup
    held = False
    for _ in range(int(BOUND_S / 0.02)):
        held = held or bool(lookup._leases)
        if held and not lookup._leases:
            break
        second.scheduler.schedule()
        threading.Event().wait(0.02)
    assert held and not lookup._leases and lookup.stale


def test_reports_of_before_a_reset_are_void(rig: Callable[..., Rig]) -> None:
    tokens = prompt(47, 300)
    first = rig()
    side = first.scheduler.connector.scheduler_side
    before = side._spec
    first.run(tokens)
    assert first.scheduler.reset_prefix_cache(reset_connector=True)
    for worker in first.workers:  # what they save from now on is not reported
        worker.build_connector_worker_meta()
        worker.worker_side.changes._wanted = False
    first.run(tokens)
    keys = tuple(ChunkKey(key) for key in first.keys[:9])
    for spec, announced in ((before, 0), (side._spec, 9)):
        side.reported(RankReport([Change(spec, keys, shard) for shard in (0, 1)]))
        said = [event for event in side.events.take() if isinstance(event, BlockStored)]
        assert sum(len(event.block_hashes) for event in said) == announced


def test_a_late_copy_is_awaited() -> None:
    """Layer-wise: the step goes on only when nothing writes to the blocks any more."""
    layers = LayerLoad(Load("r", (ChunkKey(b"k"),), (1,)), deadline=0.0)
    assert layers.begin_layer()
    waiting = threading.Thread(target=layers.wait, args=(0,))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    layers.end_layer(True)
    waiting.join(BOUND_S)
    assert not waiting.is_alive() and layers.failed
    assert not layers.begin_layer(), "and it goes on for good"


class FullStore:
    """Stands for link and namespace: grants the first chunk, has the second, is full for the third; commits fail."""

    spec = None

    def __init__(self, ok: bool) -> None:
        self.results = (GrantResult.GRANTED, GrantResult.ALREADY, GrantResult.FULL)
        self.granted = (0,)
        self.touched: list[ChunkKey] = []
        self._ok = ok

    def namespace(self, spec: Any, timeout_s: float) -> Any:
        return self

    def write(self, keys: list[ChunkKey], **_: Any) -> Any:
        return nullcontext(self)

    def touch(self, keys: Sequence[ChunkKey]) -> bool:
        self.touched += keys
        return True

    def copy_many(self, pieces: Sequence[tuple[int, int | None, Any]]) -> None:
        assert [(index, shard, source.nbytes) for index, shard, source in pieces] == [
            (index, None, 8) for index in self.granted
        ]

    def commit(self, *, timeout_s: float) -> Any:
        return SimpleNamespace(ok=self._ok, error=None if self._ok else "full")


@pytest.mark.parametrize("ok", [True, False])
def test_what_was_not_committed_is_not_said_to_be_there(ok: bool) -> None:
    tally, changes = Tally(), Changes(wanted=True)
    store = FullStore(ok)
    saver = Saver(store, 8, 0, tally, changes, queue_bytes=24, save_s=1.0, maker=b"m" * 16)
    keys = [ChunkKey(name) for name in (b"a", b"b", b"c")]
    shards = saver.buffers(4)
    assert len(shards) == 3, "bounded"
    saver.put([Copied(None, key, ChunkKey(b"p"), shard) for key, shard in zip(keys, shards, strict=True)])
    assert saver.flush(BOUND_S)
    saver.close(BOUND_S)
    assert [change.keys for change in changes.take()] == [tuple(keys[:2] if ok else keys[1:2])]
    counts = {name: tally.total[name] for name in ("blocks_saved", "blocks_already", "blocks_refused")}
    assert counts == {"blocks_saved": int(ok), "blocks_already": 1, "blocks_refused": 1 + (not ok)}
    assert store.touched == [b"b"], "computed again: a use that no lookup has told of"


def test_new_weights_find_room_in_a_full_store(model: Path, folder: Path) -> None:
    """Each update has a namespace of its own, whose first segment is another one's until all have unmapped it."""
    daemon = Daemon(folder / "full", dram_bytes=3 << 20, segment_bytes=1 << 20)
    engine = Rig(model, daemon.run_dir)
    try:
        tokens = prompt(78, 300)
        for number in range(6):
            update(engine, number)
            assert engine.scheduler.reset_prefix_cache()
            assert engine.run(tokens) == 0
            assert engine.scheduler.reset_prefix_cache()
            assert engine.run(tokens) == 288, f"after update {number}"
    finally:
        engine.close()
        daemon.stop()


class Recorder(FullStore):
    """Grants everything; keeps who asked to save what, and where. The first write waits."""

    def __init__(self) -> None:
        super().__init__(ok=True)
        self.writes: list[tuple[Any, list[ChunkKey]]] = []
        self.gate = threading.Event()
        self._wanted: Any = None

    def namespace(self, spec: Any, timeout_s: float) -> Any:
        self._wanted = spec
        return self

    def write(self, keys: list[ChunkKey], **_: Any) -> Any:
        assert self.gate.wait(BOUND_S)
        self.writes.append((self._wanted, keys))
        self.results, self.granted = (GrantResult.GRANTED,) * len(keys), tuple(range(len(keys)))
        return nullcontext(self)


def test_a_batch_is_of_one_namespace_and_names_a_chunk_once() -> None:
    """Two resets apart, the same tokens have the same keys."""
    store = Recorder()
    saver = Saver(store, 8, 0, Tally(), Changes(wanted=False), queue_bytes=80, save_s=1.0, maker=b"m" * 16)
    a, b, c = (ChunkKey(name) for name in (b"a", b"b", b"c"))
    old, new = object(), object()
    saver.put([Copied(old, c, c, shard) for shard in saver.buffers(1)])  # keeps the thread
    wanted = [(old, a), (old, b), (new, c), (new, a), (new, a), (old, b)]
    saver.put(
        [Copied(spec, key, key, shard) for (spec, key), shard in zip(wanted, saver.buffers(6), strict=True)]
    )
    store.gate.set()
    assert saver.flush(BOUND_S)
    saver.close(BOUND_S)
    assert [(spec, key) for spec, keys in store.writes for key in keys] == [(old, c), *wanted]
    assert all(len(set(keys)) == len(keys) for _, keys in store.writes)


class Beside:
    """Another connector beside ours, as vLLM's MultiConnector has them: it says first that it loads a request's two
    leading blocks, and ours hears of no load."""

    def __init__(self, rig: Rig, *, parked: bool) -> None:
        self.parked = parked
        self.loads: dict[str, list[int]] = {}
        """Blocks that it was to fill, by request."""
        self._ours = rig.scheduler.connector
        self._matched = self._ours.get_num_new_matched_tokens
        self._allocated = self._ours.update_state_after_alloc
        self._ours.get_num_new_matched_tokens = self.matched
        self._ours.update_state_after_alloc = self.allocated

    def matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        tokens, parks = self._matched(request, computed)
        if tokens is not None and not self.loads:
            return 2 * BLOCK - computed, self.parked
        return tokens, parks

    def allocated(self, request: Request, blocks: Any, tokens: int) -> None:
        self._allocated(request, blocks, 0)
        if tokens:
            self.loads[request.request_id] = blocks.get_block_ids()[0][:2]


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_what_another_connector_failed_to_load_is_not_saved(
    rig: Callable[..., Rig], shared: bool, layerwise: bool
) -> None:
    """It says so after the step in which they were used: by the request itself, or by one with the same prefix."""
    tokens = prompt(70 + 2 * layerwise + shared, 300)
    first = rig(ranks=1, layerwise=layerwise)
    other = Beside(first, parked=False)
    (worker,) = first.workers
    errors = worker.get_block_ids_with_load_errors
    told: list[set[int]] = []

    def failed() -> set[int]:
        found = errors()
        if other.loads and not told:
            told.append(set(next(iter(other.loads.values()))))
            return found | told[0]
        return found

    worker.get_block_ids_with_load_errors = failed
    loader = first.request(tokens[: 2 * BLOCK + 8])
    if shared:
        first.checks = False  # it would be the loader's to compute those blocks
        first.scheduler.add_request(loader)

    def forget_loader() -> None:
        if told and loader.request_id in first.scheduler.requests:
            first.scheduler.finish_requests(loader.request_id, RequestStatus.FINISHED_ABORTED)

    first.run(tokens, between=forget_loader)
    first.checks = True
    assert told, "nothing was loaded"
    second = rig(ranks=1, layerwise=layerwise)
    second.run(tokens)  # checks each block
    for number in range(6):  # until vLLM has used each of its blocks anew
        later = prompt(1000 * (number + 1) + 2 * layerwise + shared, 300)
        assert first.run(later) == 0
        assert second.run(later) == 288, "only the other's blocks are doubtful"
    assert not first.scheduler.connector.scheduler_side._doubtful


@pytest.mark.parametrize("trusted", [True, False])
def test_what_another_connector_loaded_before_the_step(rig: Callable[..., Rig], trusted: bool) -> None:
    """Its request was parked meanwhile: vLLM knows what failed, and computes that. But with which weights the rest was
    computed, only the user can know."""
    tokens = prompt(90 + trusted, 300)
    first = rig(ranks=1, save_what_others_load=trusted)
    other = Beside(first, parked=True)
    (worker,) = first.workers
    results = worker.get_transfer_results
    told: list[str] = []

    def filled(finished: set[str]) -> Any:
        done = results(finished)
        for name, blocks in other.loads.items():
            if name not in told:
                told.append(name)
                for layer, tensor in enumerate(first.tensors[0].values()):
                    for place in range(2 * BLOCK):
                        value = first.value(0, layer, tokens[place], place)
                        tensor[blocks[place // BLOCK], :, place % BLOCK] = value
                return SimpleNamespace(finished_recving={name})
        return done

    worker.get_transfer_results = filled
    assert first.run(tokens) == 2 * BLOCK
    assert told
    second = rig(ranks=1)
    assert second.run(tokens) == (288 if trusted else 0)
    later = prompt(92 + trusted, 300)
    assert first.run(later) == 0
    assert second.run(later) == 288, "only what follows the other's blocks is not saved"
