"""Engines that share a daemon, each kept busy by several requests at once: vLLM's own scheduler over two ranks, without
a model. What a token's KV holds depends on all tokens before it. Before each step it is looked at, on every rank, for
all that vLLM takes for computed.

The paged caches are so small that requests preempt one another. Requests go on where others have ended, also another
engine's; they are aborted at any time, and say strange things of what a prefill engine has promised; caches are reset,
loads are held up or fail on one rank, the daemon is killed or stands still."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvstore.client import connect

from .conftest import BLOCK, BOUND_S, Daemon, prompt
from .test_ranks import FailsAtLayer, Rig

BLOCKS = 26
STEPS = 600
"""In which requests come; then all that there are end."""
REQUESTS_MAX = 60
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 97, 160, 200, 257, 330, 400)
IMPATIENT = {"lookup_ms": 300, "load_ms": 1500, "save_ms": 1500, "hold_ms": 300}
WAYS: dict[str, dict[str, Any]] = {
    "parked": {},
    "layer by layer": {"layerwise": True},
    "scheduled ahead": {"ahead": True},
    "chosen": {"compute_or_load": True},
}
pytestmark = pytest.mark.timeout(600)


def chain(salt: str, tokens: Sequence[int]) -> list[int]:
    """A number for each place, of all tokens up to it."""
    numbers, so_far = [], sum(salt.encode())
    for token in tokens:
        so_far = (so_far * 1_000_003 + token + 1) % ((1 << 61) - 1)
        numbers.append(so_far)
    return numbers


class Told:
    """A request, and the tokens that the model will say."""

    def __init__(self, request: Request, prompt_tokens: list[int], count: int, salt: str) -> None:
        self.request = request
        self.salt = salt
        tokens = list(prompt_tokens)
        numbers = chain(salt, tokens)
        for _ in range(count + 2):
            tokens.append(3 + numbers[-1] % 500)
            numbers = chain(salt, tokens)
        self.tokens = tokens
        self.values = torch.tensor([number % 4093 for number in numbers], dtype=torch.float32)


class Crowd(Rig):
    """One engine and its requests."""

    def __init__(self, model: Path, run_dir: Path, chosen: random.Random, **options: Any) -> None:
        super().__init__(model, run_dir, blocks=BLOCKS, **options)
        self.chosen = chosen
        self.told: dict[str, Told] = {}
        self.ended: list[Told] = []
        self.restored = 0
        self.preempted = 0
        self._pending: tuple[Any, Any] | None = None
        self._ahead = options.get("ahead", False)
        self._gates: list[threading.Event] = []
        self._fills = [worker.worker_side._loader._fill for worker in self.workers]
        self._held = [worker.worker_side._loader._blocks for worker in self.workers]

    # ----------------------------------------------------------------------------------------------- what happens

    def add(self, tokens: list[int], salt: str, priority: int, **changes: Any) -> None:
        self._count += 1
        count = self.chosen.choice((1, 2, 5, 40, 70))
        request = Request(
            request_id=f"r{self._count}",
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=count, ignore_eos=True),
            pooling_params=None,
            mm_features=None,
            cache_salt=salt or None,
            priority=priority,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        for name, value in changes.items():
            setattr(request, name, value)
        self.told[request.request_id] = Told(request, tokens, count, salt)
        self.scheduler.add_request(request)

    def abort(self) -> None:
        if self.told:
            name = self.chosen.choice(list(self.told))
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            del self.told[name]

    def reset(self) -> None:
        running, connector = self.chosen.choice(
            (*[(False, False), (True, False)] * 3, (False, True), (True, True))
        )
        try:
            self.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=connector)
        except RuntimeError as error:  # vLLM's own
            if not running or "waiting for remote KV" not in str(error):
                raise

    def hold(self) -> None:
        """No rank reads anything until it is let go."""
        self._gates.append(self.hold_loads())

    def break_a_rank(self) -> None:
        rank = self.chosen.randrange(len(self.workers))
        loader = self.workers[rank].worker_side._loader
        loader._fill = partial(_short, loader._fill, self.chosen.randrange(4))
        loader._blocks = FailsAtLayer(self._held[rank], 1)

    def mend(self) -> None:
        for gate in self._gates:
            gate.set()
        self._gates.clear()
        for worker, fill, blocks in zip(self.workers, self._fills, self._held, strict=True):
            worker.worker_side._loader._fill = fill
            worker.worker_side._loader._blocks = blocks

    # ------------------------------------------------------------------------------------------------------ a step

    def step(self) -> None:
        output = self.scheduler.schedule()
        told = {name: self.told[name] for name in output.num_scheduled_tokens}
        spans = {}
        for name, count in output.num_scheduled_tokens.items():
            request = told[name].request
            blocks = self.scheduler.kv_cache_manager.get_block_ids(name)[0]
            spans[name] = request.num_computed_tokens - count, request.num_computed_tokens, blocks
            assert request.num_computed_tokens <= len(told[name].tokens)
        says = [
            [told[name].tokens[spans[name][1]]] if not told[name].request.is_prefill_chunk else []
            for name in told
        ]
        merged = self._executed(output, told, spans, says)
        before, self._pending = self._pending, (output, merged)
        if not self._ahead:
            before, self._pending = self._pending, None
        if before is not None:
            self._update(*before)

    def _update(self, output: Any, merged: Any) -> None:
        self.scheduler.update_from_output(output, merged)
        for name in list(self.told):
            told = self.told[name]
            if told.request.is_finished():
                self.ended.append(self.told.pop(name))
                assert list(told.request.all_token_ids) == told.tokens[: told.request.num_tokens]

    def _executed(self, output: Any, told: dict[str, Told], spans: dict[str, Any], says: Any) -> Any:
        metadata = output.kv_connector_metadata
        arriving = {block for load in metadata.loads for block in load.blocks}
        layerwise = output.has_sync_kv_loads
        results = []
        wrong: set[str] = set()
        for rank, worker in enumerate(self.workers):
            worker.handle_preemptions(metadata)
            worker.bind_connector_metadata(metadata)
            if layerwise:
                worker.start_load_kv(None)
            for layer, (name, tensor) in enumerate(self.tensors[rank].items()):
                worker.wait_for_layer_load(name)
                for each, (start, end, blocks) in spans.items():
                    whole = self._whole_until(rank, layer, tensor, told[each], start, blocks)
                    if not whole.all():
                        places = (~whole).nonzero().flatten().tolist()
                        doubtful = {blocks[place // BLOCK] for place in places}
                        assert layerwise and doubtful <= arriving, (each, rank, layer, places, start)
                        wrong.add(each)
                    self._compute(rank, layer, tensor, told[each], (start, end), blocks, bad=each in wrong)
                worker.save_kv_layer(name, tensor, None)
            if not layerwise:
                worker.start_load_kv(None)
            worker.wait_for_save()
            done = worker.get_transfer_results(output.finished_req_ids)
            results.append(
                ModelRunnerOutput(
                    req_ids=list(told),
                    req_id_to_index={name: number for number, name in enumerate(told)},
                    sampled_token_ids=says,
                    kv_connector_output=KVConnectorOutput(
                        finished_recving=done.finished_recving,
                        invalid_block_ids=worker.get_block_ids_with_load_errors(),
                        kv_connector_stats=worker.get_kv_connector_stats(),
                        kv_connector_worker_meta=worker.build_connector_worker_meta(),
                    ),
                )
            )
            worker.clear_connector_metadata()
        self.restored += len(arriving)
        self.preempted += len(output.preempted_req_ids or ())
        merged = self._aggregator.aggregate(results)
        failed = merged.kv_connector_output.invalid_block_ids
        for name in wrong:
            assert failed.intersection(spans[name][2]), f"{name} was computed on what was not there"
        return merged

    def _expected(self, rank: int, layer: int, told: Told, start: int, end: int) -> Any:
        return told.values[start:end] + 4096.0 * (layer + LAYERS_MAX * rank)

    def _whole_until(
        self, rank: int, layer: int, tensor: Any, told: Told, end: int, blocks: list[int]
    ) -> Any:
        """Of the first `end` places, which hold what they should."""
        held = tensor[blocks].permute(0, 2, 1, 3).flatten(0, 1)[:end]
        return (held == self._expected(rank, layer, told, 0, end)[:, None, None]).flatten(1).all(1)

    def _compute(
        self,
        rank: int,
        layer: int,
        tensor: Any,
        told: Told,
        span: tuple[int, int],
        blocks: list[int],
        *,
        bad: bool,
    ) -> None:
        values = self._expected(rank, layer, told, *span) + 0.5 * bad
        places = torch.arange(*span)
        tensor[torch.tensor(blocks)[places // BLOCK], :, places % BLOCK] = values[:, None, None]

    # --------------------------------------------------------------------------------------------------- the end

    def finish(self) -> None:
        until = time.monotonic() + BOUND_S
        while self.scheduler.has_requests() or self._pending is not None:
            assert time.monotonic() < until, f"these never end: {self._stuck()}"
            self.step()
            if not self.scheduler.has_requests() and self._pending is not None:
                self._update(*self._pending)
                self._pending = None

    def _stuck(self) -> list[Any]:
        return [(name, told.request.status) for name, told in self.told.items()]

    def check_nothing_is_left(self) -> None:
        side = self.scheduler.connector.scheduler_side
        assert not side._requests and not side._loading and not side._arriving
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == BLOCKS - 1, "vLLM's own null block is never free"
        assert not side.tally.total["bugs"]
        for worker in self.workers:
            assert worker.worker_side.saver.flush(BOUND_S)
            assert not worker.worker_side.tally.total["bugs"]


LAYERS_MAX = 4


def _short(fill: Callable[..., int], most: int, *arguments: Any) -> int:
    return min(most, fill(*arguments))


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    home = folder / "crowds"
    home.mkdir()
    (home / "ssd").mkdir()
    # Less DRAM than is saved: some of what is loaded is on SSD, and some is gone.
    daemon = Daemon(
        home,
        dram_bytes=4 << 20,
        segment_bytes=1 << 20,
        staging_bytes=1 << 20,
        ssd_dir=home / "ssd",
        ssd_bytes=64 << 20,
        ssd_slab_bytes=1 << 20,
        durable_within_ms=300,
    )
    yield daemon
    daemon.stop()


def pinned(daemon: Daemon) -> int:
    with connect(str(daemon.run_dir), timeout_s=30.0) as client:
        return sum(namespace.pinned_bytes for namespace in client.stats(timeout_s=30.0).namespaces)


STRANGE: tuple[Any, ...] = (
    {"do_remote_decode": True},
    {"kvstore_blocks": 7},
    {"kvstore_blocks": -1},
    {"kvstore_blocks": 1 << 70},
    {"kvstore_blocks": "all"},
    {
        "kv_hints": {
            "protocol_version": "1",
            "actions": [{"action_id": "a", "action_type": "pin", "payload": {}}],
        }
    },
    {"kv_hints": [1]},
)


def happen(chosen: random.Random, crowds: list[Crowd], daemon: Daemon, ended: list[Told]) -> None:
    crowd = chosen.choice(crowds)
    what = chosen.random()
    if what < 0.3 and len(crowd.told) < 6 and crowd._count < REQUESTS_MAX:
        if ended and chosen.random() < 0.5:
            told = chosen.choice(ended)
            tokens, salt = told.tokens[: told.request.num_tokens], told.salt
        else:
            tokens, salt = (
                prompt(900 + chosen.randrange(4), chosen.choice(LENGTHS)),
                chosen.choice(("", "", "alice")),
            )
        if chosen.random() < 0.5:
            tokens = tokens + prompt(950 + chosen.randrange(3), chosen.randrange(1, 60))
        changes: dict[str, Any] = {}
        if chosen.random() < 0.2:
            changes["kv_transfer_params"] = chosen.choice(STRANGE)
        if chosen.random() < 0.1:
            changes["skip_reading_prefix_cache"] = True
        crowd.add(tokens[:550], salt, chosen.randrange(3), **changes)
    elif what < 0.32:
        crowd.abort()
    elif what < 0.36:
        crowd.reset()
    elif what < 0.38:
        crowd.hold()
    elif what < 0.40:
        crowd.break_a_rank()
    elif what < 0.50:
        crowd.mend()
    elif what < 0.51:
        daemon.signal(signal.SIGSTOP)
    elif what < 0.56:
        daemon.signal(signal.SIGCONT)
    elif what < 0.563:
        daemon.kill()
        daemon.start()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("way", WAYS)
def test_whatever_vllm_takes_for_computed_is_what_was_computed(
    model: Path, daemon: Daemon, way: str, seed: int
) -> None:
    chosen = random.Random(f"{way} {seed}")
    options = {**IMPATIENT, "salt": f"{way} {seed}", **WAYS[way]}
    crowds = [Crowd(model, daemon.run_dir, chosen, **options) for _ in range(2)]
    ended: list[Told] = []
    try:
        for _ in range(STEPS):
            happen(chosen, crowds, daemon, ended)
            for crowd in crowds:
                crowd.step()
                ended += crowd.ended
                crowd.ended.clear()
        daemon.signal(signal.SIGCONT)
        for crowd in crowds:
            crowd.mend()
            crowd.finish()
            crowd.check_nothing_is_left()
        deadline = time.monotonic() + BOUND_S
        while pinned(daemon):
            assert time.monotonic() < deadline, "something stays pinned"
            threading.Event().wait(0.05)
        print([(crowd._count, crowd.restored, crowd.preempted) for crowd in crowds])
        assert any(crowd.restored for crowd in crowds)
    finally:
        daemon.signal(signal.SIGCONT)
        for crowd in crowds:
            crowd.mend()
            crowd.close()
