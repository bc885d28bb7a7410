"""Engines that share a daemon, each kept busy by several requests at once: vLLM's own scheduler, without a model. What
a token's KV holds depends on all tokens before it. Before each step it is looked at, on every rank, for all that vLLM
takes for computed.

The paged caches are so small that requests preempt one another. Requests go on where others have ended, also another
engine's; they are aborted at any time, and say strange things of what a prefill engine has promised; caches are reset,
loads are held up or fail on one rank, the daemon is killed or stands still. With the connector two ranks, with the tier
one, and models of one group and of several."""

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
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvstore.client import ReadLease, connect
from kvstore.gpu_worker.connectors.vllm.tier import KVStoreTier

from .conftest import BLOCK, BOUND_S, Daemon, Executor, prompt, transfer_config
from .schedulers import config_of, connectors_of, scheduler_of
from .test_ranks import FailsAtLayer
from .test_tier import tiering

LAYERS, HEADS, WIDTH = 3, 2, 8
BLOCKS = 26
"""Of each rank's cache, for each group."""
ROWS = 14
"""Of vLLM's own host memory above the tier, for each group."""
STEPS = 600
"""In which requests come; then all that there are end."""
REQUESTS_MAX = 60
TOKENS_MAX = 550
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 97, 160, 200, 257, 330, 400)
IMPATIENT = {"lookup_ms": 300, "load_ms": 1500, "save_ms": 1500, "hold_ms": 300}
PATIENT = {"lookup_ms": 20_000, "load_ms": 20_000, "save_ms": 20_000, "hold_ms": 300}
PATIENCE = (PATIENT, IMPATIENT)
"""Of the seeds, by turns: all is in time on a busy machine too, or much is late, and on a busy machine perhaps all."""
SHAPE: dict[str, Any] = {
    "block_size": BLOCK,
    "num_kv_heads": HEADS,
    "head_size": WIDTH,
    "dtype": torch.float32,
}
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=80)
NARROW = SlidingWindowSpec(**SHAPE, sliding_window=40)
"""Not 33, of which vLLM 0.32 saves one block and asks for two: never a hit."""
BLOCK_BYTES = LAYERS * FULL.page_size_bytes
SEEDS = 4
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

    def __init__(self, request: Request, tokens: list[int], count: int, salt: str) -> None:
        self.request = request
        self.salt = salt
        self.tokens = list(tokens)
        numbers = chain(salt, tokens)
        for _ in range(count + 2):
            self.tokens.append(3 + numbers[-1] % 500)
            numbers = chain(salt, self.tokens)
        self.values = torch.tensor([number % 4093 for number in numbers], dtype=torch.float32)


class Crowd:
    """One engine and its requests."""

    def __init__(
        self,
        model: Path,
        transfer: dict[str, Any],
        chosen: random.Random,
        *,
        specs: Sequence[Any] = (FULL,),
        ranks: int = 1,
        ahead: bool = False,
        prefill_tokens_max: int = 0,
    ) -> None:
        """`specs`: of each group of layers; `ahead`: steps are scheduled while the one before is computed;
        `prefill_tokens_max`: of one prompt in one step, 0: all that there is room for."""
        config = config_of(
            model,
            transfer,
            ranks=ranks,
            async_scheduling=ahead,
            long_prefill_token_threshold=prefill_tokens_max,
            policy="priority",
            disable_hybrid_kv_cache_manager=False,
        )
        self.specs = list(specs)
        self.names = [[f"layer.{group}.{n}" for n in range(LAYERS)] for group in range(len(specs))]
        groups = [KVCacheGroupSpec(*each) for each in zip(self.names, specs, strict=True)]
        self.blocks = BLOCKS * len(specs)
        cache = KVCacheConfig(self.blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.model_executor = Executor(config, ranks)  # before the scheduler, as vLLM's engine
        self.scheduler = scheduler_of(config, cache)
        shape = (self.blocks, 2 * HEADS, BLOCK, WIDTH)
        names = [name for each in self.names for name in each]
        self.workers, self.tensors = connectors_of(self.scheduler, names, shape, ranks=ranks)
        self._aggregator = KVOutputAggregator(ranks)
        self.chosen = chosen
        self.told: dict[str, Told] = {}
        self.ended: list[Told] = []
        self.asked = self.preempted = 0
        self.meanwhile: Callable[[], None] = lambda: None
        """Happens during the next step: vLLM hears of it before it hears of the step."""
        self._ahead = ahead
        self._pending: tuple[Any, Any] | None = None

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.connector.shutdown()

    # ----------------------------------------------------------------------------------------------- what happens

    def add(self, tokens: list[int], salt: str, priority: int, *, count: int = 0, **changes: Any) -> None:
        """`count`: of answer tokens; 0: any."""
        self.asked += 1
        count = count or self.chosen.choice((1, 2, 5, 40, 70))
        request = Request(
            request_id=f"r{self.asked}",
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

    def abort(self, name: str = "") -> None:
        """The request of this name, or any."""
        if self.told:
            name = name or self.chosen.choice(list(self.told))
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            del self.told[name]

    def reset(self) -> None:
        running, connector = self.chosen.choice(self.resets())
        try:
            self.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=connector)
        except RuntimeError as error:  # vLLM's own
            if not running or "waiting for remote KV" not in str(error):
                raise

    def resets(self) -> list[tuple[bool, bool]]:
        """(of running requests, of the connector)"""
        return [*[(False, False), (True, False)] * 3, (False, True), (True, True)]

    def hold(self) -> None:
        """Nothing is loaded until it is let go."""
        raise NotImplementedError

    def spoil(self) -> None:
        """Of what is loaded, some fails."""
        raise NotImplementedError

    def mend(self) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------------ a step

    def step(self) -> None:
        output = self.scheduler.schedule()
        told = {name: self.told[name] for name in output.num_scheduled_tokens}
        spans = {}
        for name, count in output.num_scheduled_tokens.items():
            request = told[name].request
            blocks = self.scheduler.kv_cache_manager.get_block_ids(name)
            spans[name] = request.num_computed_tokens - count, request.num_computed_tokens, blocks
        says = [
            [] if told[name].request.is_prefill_chunk else [told[name].tokens[spans[name][1]]]
            for name in told
        ]
        merged = self._executed(output, told, spans, says)
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
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
        now = output.has_sync_kv_loads
        arriving = {block for load in metadata.loads for block in load.blocks} if now else set()
        results = []
        for worker in self.workers:
            worker.handle_preemptions(metadata)
            worker.bind_connector_metadata(metadata)
            if now:
                worker.start_load_kv(None)
        wrong = self._forward(told, spans, arriving)
        for worker in self.workers:
            if not now:
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
        self.preempted += len(output.preempted_req_ids or ())
        merged = self._aggregator.aggregate(results)
        failed = merged.kv_connector_output.invalid_block_ids
        for name in wrong:
            assert failed.intersection(spans[name][2][0]), f"{name} was computed on what was not there"
        return merged

    def _forward(self, told: dict[str, Told], spans: dict[str, Any], arriving: set[int]) -> set[str]:
        """Requests that attention computed on what was not there, as a load in this step may leave it: vLLM hears of
        it after the step. The ranks add up what each has computed: what one lacks spoils what all compute then. In each
        layer the KV of all new tokens is written before attention reads: one request may share what another one
        computes in the same step."""
        wrong: set[str] = set()
        for group, names in enumerate(self.names):
            for layer, name in enumerate(names):
                bases = [4096.0 * (layer + LAYERS * (group + 4 * rank)) for rank in range(len(self.workers))]
                for rank, worker in enumerate(self.workers):
                    worker.wait_for_layer_load(name)
                    tensor = self.tensors[rank][name]
                    for each, (start, end, blocks) in spans.items():
                        values = told[each].values[start:end] + bases[rank] + 0.5 * (each in wrong)
                        places = torch.arange(start, end)
                        numbers = torch.tensor(blocks[group])[places // BLOCK]
                        tensor[numbers, :, places % BLOCK] = values[:, None, None]
                for rank, worker in enumerate(self.workers):
                    for each, (start, _, blocks) in spans.items():
                        expected = told[each].values + bases[rank]
                        if gone := self._gone(
                            group, self.tensors[rank][name], expected, start, blocks[group]
                        ):
                            assert gone <= arriving, (each, rank, name, gone, start)
                            wrong.add(each)
                    worker.save_kv_layer(name, self.tensors[rank][name], None)
        return wrong

    def _gone(self, group: int, tensor: Any, expected: Any, end: int, blocks: Sequence[int]) -> set[int]:
        """Blocks that lack something of what the next token needs of those before `end`."""
        window = getattr(self.specs[group], "sliding_window", None)
        first = max(0, end - window + 1) if window else 0
        low, high = first // BLOCK, -(-end // BLOCK)
        held = tensor[list(blocks[low:high])].permute(0, 2, 1, 3).flatten(0, 1)[: end - low * BLOCK]
        right = (held == expected[low * BLOCK : end, None, None]).flatten(1).all(1)
        right[: first - low * BLOCK] = True
        return {blocks[low + place // BLOCK] for place in (~right).nonzero().flatten().tolist()}

    # --------------------------------------------------------------------------------------------------- the end

    def finish(self) -> None:
        until = time.monotonic() + BOUND_S
        while self.scheduler.has_requests() or self._pending is not None:
            assert time.monotonic() < until, [(name, each.request.status) for name, each in self.told.items()]
            self.step()
            if not self.scheduler.has_requests() and self._pending is not None:
                self._update(*self._pending)
                self._pending = None

    def is_idle(self) -> bool:
        pool = self.scheduler.kv_cache_manager.block_pool
        return bool(pool.get_num_free_blocks() == self.blocks - 1)  # vLLM's null block is never free

    def loads_again(self) -> bool:
        """Whether it has a prompt from the store, after all that has happened, that it has computed and saved anew."""
        before, salt = self.restored(), f"again {self.asked}"
        assert self.scheduler.reset_prefix_cache(reset_connector=True)
        for _ in range(2):
            self.add(prompt(990, 200), salt, 0, count=1)
            self.finish()
            self.settle()
        return self.restored() > before

    def settle(self) -> None:
        """Until all is saved; then vLLM has nothing left of it."""
        until(self.is_idle)
        assert self.scheduler.reset_prefix_cache()

    def restored(self) -> int:
        """Blocks, or rows."""
        raise NotImplementedError

    def late(self) -> int:
        """What was found, loaded or saved too late."""
        raise NotImplementedError

    def bugs(self) -> int:
        raise NotImplementedError


class ByConnector(Crowd):
    """Two ranks."""

    def __init__(self, model: Path, run_dir: Path, chosen: random.Random, extra: dict[str, Any], **more: Any):
        super().__init__(model, transfer_config(run_dir, **extra), chosen, ranks=2, **more)
        self._gates: list[threading.Event] = []
        self._loaders = [worker.worker_side._loader for worker in self.workers]
        self._whole = [(loader._fill, loader._blocks) for loader in self._loaders]

    def hold(self) -> None:
        gate = threading.Event()
        self._gates.append(gate)
        for loader in self._loaders:
            loader._fill = partial(_behind, gate, loader._fill)

    def spoil(self) -> None:
        loader = self.chosen.choice(self._loaders)
        loader._fill = partial(_short, self.chosen.randrange(4), loader._fill)
        loader._blocks = FailsAtLayer(loader._blocks, 1)

    def mend(self) -> None:
        for gate in self._gates:
            gate.set()
        self._gates.clear()
        for loader, (fill, blocks) in zip(self._loaders, self._whole, strict=True):
            loader._fill, loader._blocks = fill, blocks

    def is_idle(self) -> bool:
        side = self.scheduler.connector.scheduler_side
        return super().is_idle() and not (side._requests or side._loading or side._arriving)

    def settle(self) -> None:
        for worker in self.workers:
            assert worker.worker_side.saver.flush(BOUND_S)
        super().settle()

    def restored(self) -> int:
        return int(self.workers[0].worker_side.tally.total["blocks_loaded"])

    def late(self) -> int:
        failed = sum(worker.worker_side.tally.total["blocks_failed"] for worker in self.workers)
        return int(failed + self.scheduler.connector.scheduler_side.tally.total["lookups_late"])

    def bugs(self) -> int:
        sides = [self.scheduler.connector.scheduler_side, *(worker.worker_side for worker in self.workers)]
        return int(sum(side.tally.total["bugs"] for side in sides))


class ByTier(Crowd):
    """Below vLLM's own host memory."""

    def __init__(self, model: Path, run_dir: Path, chosen: random.Random, extra: dict[str, Any], **more: Any):
        transfer = tiering(run_dir, **extra)
        groups = len(more.get("specs", (FULL,)))
        # A row has room for a block of each group.
        transfer["kv_connector_extra_config"]["cpu_bytes_to_use"] = ROWS * groups * groups * BLOCK_BYTES
        super().__init__(model, transfer, chosen, **more)
        self.manager = self.scheduler.connector.connector_scheduler.manager
        (self.tier,) = self.manager.secondary_tiers
        assert isinstance(self.tier, KVStoreTier)
        self._gates: list[threading.Event] = []
        self._copy = self.tier._loader._copy

    def resets(self) -> list[tuple[bool, bool]]:
        """vLLM's OffloadingConnector asserts that a request whose running is reset has nothing to load in the next
        step, which is not so while its host memory has what it needs. And after a reset of the connector it saves to
        its host memory once more what running requests have, for blocks that left their windows what others have
        written there since."""
        kept = [] if any(getattr(spec, "sliding_window", None) for spec in self.specs) else [(False, True)]
        return [*[(False, False)] * 3, *kept, (True, True)]

    def reset(self) -> None:
        side = self.scheduler.connector.connector_scheduler
        if self.chosen.random() < 0.5 and not (side._jobs or self.manager._jobs):
            self.manager.primary_tier.reset_cache()  # as after a restart
        super().reset()

    def settle(self) -> None:
        super().settle()
        self.manager.primary_tier.reset_cache()

    def hold(self) -> None:
        gate = threading.Event()
        self._gates.append(gate)
        self.tier._loader._copy = partial(_behind, gate, self.tier._loader._copy)

    def spoil(self) -> None:
        self.tier._loader._copy = partial(_every_second, self.tier._loader._copy)

    def mend(self) -> None:
        for gate in self._gates:
            gate.set()
        self._gates.clear()
        self.tier._loader._copy = self._copy

    def is_idle(self) -> bool:
        # vLLM's manager hears of what is done when it is asked, step by step.
        self.step()
        left = self.manager._jobs or self.tier._requests or self.tier._waiting or self.tier._begun
        return super().is_idle() and not left

    def restored(self) -> int:
        return int(self.tier.tally.total["blocks_loaded"])

    def late(self) -> int:
        return sum(int(self.tier.tally.total[name]) for name in ("lookups_late", "loads_late", "saves_late"))

    def bugs(self) -> int:
        return int(self.tier.tally.total["bugs"])


def _short(most: int, fill: Callable[..., int], *arguments: Any) -> int:
    return min(most, fill(*arguments))


def _behind(gate: threading.Event, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    assert gate.wait(BOUND_S)
    return call(*arguments, **named)


def _every_second(copy: Callable[..., bool], transfer: Any, number: int, hit: Any) -> bool:
    return number % 2 == 0 and copy(transfer, number, hit)


WAYS: dict[str, Callable[..., Crowd]] = {
    "connector": ByConnector,
    "connector, layer by layer": lambda *given: ByConnector(*given[:3], {**given[3], "layerwise": True}),
    "connector, scheduled ahead": partial(ByConnector, ahead=True),
    "connector, chosen": lambda *given: ByConnector(*given[:3], {**given[3], "compute_or_load": True}),
    "tier": ByTier,
    "tier, scheduled ahead": partial(ByTier, ahead=True),
    "tier, a window": partial(ByTier, specs=(WINDOW,)),
    "tier, windows and full": partial(ByTier, specs=(WINDOW, FULL, NARROW)),
}


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


@pytest.fixture
def leases(monkeypatch: pytest.MonkeyPatch) -> list[ReadLease]:
    """All that pin something. They are kept here: one that nobody has released is not given back by being collected."""
    given: list[ReadLease] = []
    made = ReadLease.__init__

    def noting(lease: ReadLease, *arguments: Any, **named: Any) -> None:
        made(lease, *arguments, **named)
        if lease.lease_id:
            given.append(lease)

    monkeypatch.setattr(ReadLease, "__init__", noting)
    return given


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
    if what < 0.30 and len(crowd.told) < 6 and crowd.asked < REQUESTS_MAX:
        if ended and chosen.random() < 0.5:
            told = chosen.choice(ended)
            tokens, salt = told.tokens[: told.request.num_tokens], told.salt
        else:
            tokens = prompt(900 + chosen.randrange(4), chosen.choice(LENGTHS))
            salt = chosen.choice(("", "", "alice"))
        if chosen.random() < 0.5:
            tokens = tokens + prompt(950 + chosen.randrange(3), chosen.randrange(1, 60))
        changes: dict[str, Any] = {}
        if chosen.random() < 0.2:
            changes["kv_transfer_params"] = chosen.choice(STRANGE)
        if chosen.random() < 0.1:
            changes["skip_reading_prefix_cache"] = True
        crowd.add(tokens[:TOKENS_MAX], salt, chosen.randrange(3), **changes)
    elif what < 0.32:
        if chosen.random() < 0.5:
            crowd.abort()
        else:
            crowd.meanwhile = crowd.abort
    elif what < 0.36:
        crowd.reset()
    elif what < 0.38:
        crowd.hold()
    elif what < 0.40:
        crowd.spoil()
    elif what < 0.50:
        crowd.mend()
    elif what < 0.51:
        daemon.signal(signal.SIGSTOP)
    elif what < 0.56:
        daemon.signal(signal.SIGCONT)
    elif what < 0.563:
        daemon.kill()
        daemon.start()


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not what():
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.02)


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("way", WAYS)
def test_what_vllm_takes_for_computed_is_what_was_computed(
    model: Path, daemon: Daemon, leases: list[ReadLease], way: str, seed: int
) -> None:
    chosen = random.Random(f"{way} {seed}")
    patience = PATIENCE[seed % len(PATIENCE)]
    extra = {**patience, "salt": f"{way} {seed}"}
    crowds = [WAYS[way](model, daemon.run_dir, chosen, extra) for _ in range(2)]
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
            until(crowd.is_idle)
        until(lambda: all(lease._released for lease in leases))
        until(lambda: not pinned(daemon))
        print(way, seed, [(crowd.asked, crowd.restored(), crowd.preempted) for crowd in crowds])
        for crowd in crowds if "chosen" not in way else ():
            until(crowd.loads_again)
        assert not any(crowd.bugs() for crowd in crowds)
    finally:
        daemon.signal(signal.SIGCONT)
        for crowd in crowds:
            crowd.mend()
            crowd.close()


@pytest.mark.parametrize("then", ["comes later", "comes with it", "comes after its abort"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_step_failed_to_load_no_other_request_is_given(
    model: Path, daemon: Daemon, rank: int, then: str
) -> None:
    """vLLM has it in its own cache before it is loaded, and leaves it there until its request has computed it anew:
    that takes some steps here."""
    extra = {**PATIENT, "layerwise": True, "salt": f"{then} {rank}"}
    crowds = [
        ByConnector(model, daemon.run_dir, random.Random(then), extra, prefill_tokens_max=40)
        for _ in range(2)
    ]
    saving, loading = crowds
    tokens = prompt(995, 300)
    try:
        saving.add(tokens, "", 0)
        saving.finish()
        for worker in saving.workers:
            assert worker.worker_side.saver.flush(BOUND_S)
        loader = loading._loaders[rank]
        loader._blocks = FailsAtLayer(loader._blocks, 1)
        loading.add(tokens, "", 0)
        if then == "comes with it":
            loading.add(tokens + prompt(996, 9), "", 0)
        until(lambda: loading.late() > 0 or loading.step() is not None)
        loading.mend()
        if then == "comes after its abort":
            loading.abort()
        if then != "comes with it":
            loading.add(tokens + prompt(996, 9), "", 0)
        loading.finish()  # and looks at each block, of each rank
        until(loading.is_idle)
        assert loading.restored() > 0, "the other one has loaded it"
        assert not loading.bugs()
    finally:
        for crowd in crowds:
            crowd.close()


@pytest.mark.parametrize("gone", ["after the step", "in the step", "in the step, while another waits"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_step_computed_behind_a_failed_load_no_other_request_is_given(
    model: Path, daemon: Daemon, rank: int, gone: str
) -> None:
    """Of a request all blocks fail but the first, which vLLM has itself, and the step has filled more behind these. A
    shorter request brings what was to be loaded to vLLM's own cache again, and whoever goes on behind that finds what
    follows there, if it is left. The one that waits had all blocks until it was preempted: they are others' by now."""
    extra = {**PATIENT, "layerwise": True, "salt": f"behind {gone} {rank}"}
    saving, loading = crowds = [
        ByConnector(model, daemon.run_dir, random.Random(gone), extra) for _ in range(2)
    ]
    tokens, known = prompt(985, 300), 4 * BLOCK + 2
    try:
        saving.add(tokens[:known], "", 0)
        saving.finish()
        for worker in saving.workers:
            assert worker.worker_side.saver.flush(BOUND_S)
        if gone.endswith("waits"):
            loading.add(prompt(986, (BLOCKS - 1) * BLOCK - 20), "", 2, count=9)
            waiting = loading.told["r1"].request
            until(lambda: waiting.num_output_tokens > 0 or loading.step() is not None)
            assert loading.scheduler.reset_prefix_cache(reset_running_requests=True)
        else:
            loading.add(tokens[: BLOCK + 1], "", 0, count=1)
            loading.finish()
        own = loading.restored()
        loader = loading._loaders[rank]
        loader._blocks = FailsAtLayer(loader._blocks, 1)
        loading.add(tokens, "", 0)
        name = f"r{loading.asked}"
        leave = partial(loading.abort, name)
        if gone != "after the step":
            loading.meanwhile = leave
        until(lambda: loading.late() > 0 or loading.step() is not None)
        assert loading.late() == 4 - own
        loading.mend()
        if gone == "after the step":
            leave()
        assert name not in loading.told
        loading.add(tokens[:known], "", 0, count=1)
        until(lambda: f"r{loading.asked}" not in loading.told or loading.step() is not None)
        assert loading.restored() >= 4
        loading.add(tokens + prompt(987, 9), "", 0)
        loading.finish()  # and looks at each block, of each rank
        until(loading.is_idle)
        assert not loading.bugs()
    finally:
        for crowd in crowds:
            crowd.close()


def test_a_load_that_is_begun_again_leaves_nothing_behind(model: Path, daemon: Daemon) -> None:
    """Layer by layer: preempted after the step that loads, and the store has less by then."""
    extra = {**PATIENT, "layerwise": True, "salt": "begun again"}
    saving, loading = crowds = [ByConnector(model, daemon.run_dir, random.Random(0), extra) for _ in range(2)]
    tokens = prompt(984, 300)
    try:
        saving.add(tokens, "", 0, count=1)
        saving.finish()
        for worker in saving.workers:
            assert worker.worker_side.saver.flush(BOUND_S)
        loading.add(tokens, "", 0, count=40)
        until(lambda: loading.restored() > 0 or loading.step() is not None)
        side = loading.scheduler.connector.scheduler_side
        (lookup,) = side._loading.values()
        side._link.ready(side._spec).forget(keys=lookup.keys[5:], timeout_s=BOUND_S)
        assert loading.scheduler.reset_prefix_cache(reset_running_requests=True)
        loading.step()
        assert loading.restored() == 9 + 5
        loading.finish()
        until(loading.is_idle)
        assert not loading.bugs()
    finally:
        for crowd in crowds:
            crowd.close()


@pytest.mark.parametrize("way", [way for way in WAYS if way.startswith("connector")])
def test_requests_of_one_prompt_that_is_all_there(model: Path, daemon: Daemon, way: str) -> None:
    """Of each the last token is computed, into a block of its own; what goes on behind it may have any of these."""
    chosen = random.Random(way)
    extra = {"lookup_ms": 20_000, "load_ms": 20_000, "salt": f"whole {way}"}
    saving, loading = (WAYS[way](model, daemon.run_dir, chosen, extra) for _ in range(2))
    assert isinstance(saving, ByConnector) and isinstance(loading, ByConnector)
    tokens = prompt(990, 8 * BLOCK)
    try:
        saving.add(tokens, "", 0)
        saving.finish()
        for worker in saving.workers:
            assert worker.worker_side.saver.flush(BOUND_S)
        blocks: dict[str, int] = {}
        executed = loading._executed

        def noting(output: Any, told: Any, spans: dict[str, Any], says: Any) -> Any:
            blocks.update({name: held[0][7] for name, (_, _, held) in spans.items()})
            return executed(output, told, spans, says)

        loading._executed = noting
        for _ in range(3):
            loading.add(tokens, "", 0)
        loading.add(tokens + prompt(991, 9), "", 0)
        loading.finish()
        assert len(set(blocks.values())) > 1
        side = loading.scheduler.connector.scheduler_side
        if way != "connector, chosen":
            assert side.tally.total["hit_tokens"] >= 8 * BLOCK - 1
        assert saving.restored() == 0
        assert not loading.bugs()
    finally:
        for crowd in (saving, loading):
            crowd.close()


@pytest.mark.parametrize("way", ["connector", "tier"])
def test_requests_that_are_aborted_while_they_are_queued(model: Path, daemon: Daemon, way: str) -> None:
    """Never scheduled, some of which the store has, some of which it does not. vLLM's OffloadingConnector once ended
    the engine (vllm-project/vllm#49118)."""
    extra = {"lookup_ms": 20_000, "load_ms": 20_000, "salt": f"queued {way}"}
    crowd = WAYS[way](model, daemon.run_dir, random.Random(way), extra)
    try:
        known = prompt(992, 4 * BLOCK)
        crowd.add(known, "", 0)
        crowd.finish()
        for round_ in range(4):
            for number in range(4):  # as many as vLLM runs
                crowd.add(prompt(1000 + 10 * round_ + number, 70), "", 0)
            for _ in range(round_):
                crowd.step()
            queued = [f"r{crowd.asked + number + 1}" for number in range(2)]
            crowd.add(known + prompt(993, 40), "", 1)
            crowd.add(prompt(994, 90), "", 1)
            if round_ % 2:
                crowd.step()
            for name in queued:
                request = crowd.told.pop(name).request
                assert not request.num_computed_tokens
                crowd.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            crowd.step()
        crowd.finish()
        until(crowd.is_idle)
        assert not crowd.bugs()
    finally:
        crowd.close()
