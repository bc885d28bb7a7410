"""vLLM's own scheduler over two ranks, simulated: no model runs, each rank's blocks hold numbers made of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from .conftest import BLOCK, Daemon, prompt, transfer_config

LAYERS, HEADS, WIDTH, BLOCKS = 3, 2, 8, 50
STEPS_MAX = 20_000


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    daemon = Daemon(folder / "ranks")
    yield daemon
    daemon.stop()


class Rig:
    """One engine: a real scheduler, `ranks` connectors of the worker role, and no model."""

    def __init__(
        self, model: Path, run_dir: Path, *, ranks: int = 2, replicas: int = 1, **extra: Any
    ) -> None:
        init_none_hash(sha256)
        config = VllmConfig(
            model_config=ModelConfig(model=str(model), dtype="float32", skip_tokenizer_init=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=4,
                max_num_batched_tokens=128,
                max_model_len=1024,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(**transfer_config(run_dir, **extra)),
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        )
        config.parallel_config.tensor_parallel_size = ranks
        names = [f"layer.{number}" for number in range(LAYERS)]
        group = KVCacheGroupSpec(
            names, FullAttentionSpec(BLOCK, num_kv_heads=HEADS, head_size=WIDTH, dtype=torch.float32)
        )
        cache = KVCacheConfig(BLOCKS, kv_cache_tensors=[], kv_cache_groups=[group], kv_tp_replicas=replicas)
        config.cache_config.num_gpu_blocks = BLOCKS
        self.replicas = replicas
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )
        self.workers = []
        self.tensors = []
        layouts = {}
        for rank in range(ranks):
            config.parallel_config.rank = rank
            worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
            tensors = {name: torch.zeros(BLOCKS, HEADS, BLOCK, WIDTH) for name in names}
            worker.register_kv_caches(tensors)
            layouts[0, rank] = worker.get_handshake_metadata()
            self.workers.append(worker)
            self.tensors.append(tensors)
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(layouts)
        self._aggregator = KVOutputAggregator(ranks)
        self.events: list[Any] = []
        """All that vLLM published."""
        self.scheduler.kv_event_publisher.publish = lambda batch: self.events.extend(batch.events)
        self._count = 0
        self.keys: list[bytes] = []
        """Of the last request's full blocks."""

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.connector.shutdown()

    def value(self, rank: int, layer: int, token: int, place: int) -> float:
        return float((token * 31 + place * 7 + layer * 3 + rank // self.replicas * 101) % 4093)

    def run(self, tokens: list[int], *, between: Callable[[], None] = lambda: None) -> int:
        """Serves one request of two answer tokens, checks every block that vLLM takes for computed, and returns how
        many tokens were not computed. `between` runs before each step."""
        self._count += 1
        name = f"r{self._count}"
        parameters = SamplingParams(max_tokens=2, ignore_eos=True)
        request = Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=parameters,
            pooling_params=None,
            mm_features=None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
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
        for rank, worker in enumerate(self.workers):
            worker.handle_preemptions(output.kv_connector_metadata)
            worker.bind_connector_metadata(output.kv_connector_metadata)
            if output.has_sync_kv_loads:
                worker.start_load_kv(None)
            for layer, (name, tensor) in enumerate(self.tensors[rank].items()):
                worker.wait_for_layer_load(name)
                for place in range(start, start + count):
                    value = self.value(rank, layer, request.all_token_ids[place], place)
                    tensor[blocks[place // BLOCK], :, place % BLOCK] = value
                worker.save_kv_layer(name, tensor, None)
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
        if count and not failed:
            self._check(request, start + count, blocks)
        self.scheduler.update_from_output(output, merged)

    def _check(self, request: Request, end: int, blocks: list[int]) -> None:
        for rank, tensors in enumerate(self.tensors):
            for layer, tensor in enumerate(tensors.values()):
                for place in range(end):
                    wanted = self.value(rank, layer, request.all_token_ids[place], place)
                    got = tensor[blocks[place // BLOCK], :, place % BLOCK]
                    assert bool((got == wanted).all()), (rank, layer, place, got, wanted)

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


class FailsAtLayer:
    """A rank's blocks, but for one layer nothing can be loaded into them."""

    def __init__(self, blocks: Any, layer: int) -> None:
        self._blocks = blocks
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._blocks, name)

    def pieces(self, index: int, shard: int, block: int, layers: tuple[int, ...]) -> Any:
        if self._layer in layers:
            raise ZeroDivisionError
        return self._blocks.pieces(index, shard, block, layers)


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

    def reset_once() -> None:
        if connector.scheduler_side._loading and not connector.scheduler_side._resets:
            assert connector.reset_cache()

    assert second.run(tokens, between=reset_once) == 0
    assert connector.scheduler_side._resets == 1


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

    def forget_once() -> None:
        if side._loading and not forgotten:
            for lookup in side._loading.values():
                lookup.end()
            forgotten.append(namespace.forget(keys=keys[2:3]))

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
