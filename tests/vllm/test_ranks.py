"""vLLM's own scheduler over two ranks, simulated: no model runs, each rank's blocks hold numbers made of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
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
        self._count = 0
        self.recomputed: list[int] = []

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
