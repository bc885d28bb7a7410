"""Weights that change while an engine computes, and resets of the connector: of what the store has for the weights that
its ranks hold, each block was computed with these from its first token on, and since the last reset.

Engines of `test_crowds`, each of several requests at once. What a token's KV holds depends on the weights as well. A
trainer updates them by vLLM's call and has vLLM forget its own cache, or forgets that; a program writes them without a
call. Meanwhile requests preempt one another, are aborted before and after vLLM hears of a step, loads are held up or
fail, caches are reset, and the store has no room."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore.client import ReadLease

from .conftest import BLOCK, BOUND_S, Daemon, prompt
from .test_crowds import (
    LAYERS,
    LENGTHS,
    PATIENT,
    TOKENS_MAX,
    ByConnector,
    ByTier,
    Told,
    leases,
    pinned,
    until,
)

STEPS = 500
REQUESTS_MAX = 60
SEEDS = 3
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "whole, scheduled ahead": {"ahead": True},
    "layer by layer": {"layerwise": True},
    "layer by layer, in pieces": {"layerwise": True, "prefill_tokens_max": 40},
}
WEIGHTS = (0, 1, 2)
GONE = math.nan
__all__ = ["leases"]  # a fixture
pytestmark = pytest.mark.timeout(600)


class Trained(ByConnector):
    """Its ranks add up what each has computed, so a token's KV depends on the weights of all."""

    def __init__(self, model: Path, run_dir: Path, chosen: random.Random, extra: dict[str, Any], **more: Any):
        super().__init__(model, run_dir, chosen, extra, **more)
        self.weights = 0
        self._epoch = 0.0
        """After a reset of the connector its caller wants nothing of before: as if this were in the KV, too."""
        self._made = torch.full((self.blocks, BLOCK), GONE)
        """What vLLM may take each block for: computed by this engine, with whatever weights, or loaded for those that
        it had then. GONE: neither."""
        self._arriving: dict[str, tuple[list[int], float]] = {}
        """By request: blocks that were loaded for it, until it begins, and the epoch then. A reset while it loads makes
        the load fail; what had come by then vLLM keeps, as what it has computed for requests that go on."""
        self._mixtures = 0
        self.updates = 0

    # ----------------------------------------------------------------------------------------------- what happens

    def update(self, *, reset: bool) -> None:
        """By vLLM's call; no counter moves. `reset`: of vLLM's own cache, as vLLM advises."""
        self.weights = self.chosen.choice(WEIGHTS)
        self.updates += 1
        self.model_executor.collective_rpc("update_weights", None, (float(self.weights),))
        if reset:
            self.reset()

    def write(self) -> None:
        """By no call."""
        self.weights = self.chosen.choice(WEIGHTS)
        self.updates += 1
        with torch.no_grad():
            for each in self.model_executor.models:
                each.weight.fill_(float(self.weights))

    def resets(self) -> list[tuple[bool, bool]]:
        return [(True, False), (True, True), (False, False), (False, True)]

    def reset(self) -> None:
        self.reset_by(*self.chosen.choice(self.resets()))

    def reset_by(self, running: bool, connector: bool) -> None:
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks
        try:
            self.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=connector)
            if connector:
                self._epoch = float(self.chosen.randrange(1, 4093))
        except RuntimeError as error:  # vLLM's own
            if not running or "waiting for remote KV" not in str(error):
                raise
        if free() == self.blocks - 1:
            self._made.fill_(GONE)  # it is empty, and says so

    # ------------------------------------------------------------------------------------------------------ a step

    def _values(self, told: Told, epoch: float) -> torch.Tensor:
        """Of its tokens, each computed with the weights of now and behind KV of the same."""
        return (told.values + 977 * self.weights + epoch) % 4093

    def _executed(self, output: Any, told: dict[str, Told], spans: dict[str, Any], says: Any) -> Any:
        metadata = output.kv_connector_metadata
        for load in metadata.loads:
            self._arriving[load.request] = list(load.blocks), self._epoch
        for name in list(self._arriving):
            if name not in self.told:
                del self._arriving[name]
        self._now: set[int] = set()
        for name, (start, _, (blocks,)) in spans.items():
            arrived, epoch = self._arriving.pop(name, ([], 0.0))
            self._now.update(arrived)
            values = self._values(told[name], epoch)
            for number, block in enumerate(blocks[: -(-start // BLOCK)]):
                if block in arrived:
                    self._made[block] = values[number * BLOCK : (number + 1) * BLOCK]
        return super()._executed(output, told, spans, says)

    def _forward(self, told: dict[str, Told], spans: dict[str, Any], arriving: set[int]) -> set[str]:
        wrong: set[str] = set()
        (names,) = self.names
        for each, (start, end, (blocks,)) in spans.items():
            self._make(told[each], start, end, blocks, spoilt=False)
        for layer, name in enumerate(names):
            bases = [4096.0 * (layer + LAYERS * 4 * rank) for rank in range(len(self.workers))]
            for rank, worker in enumerate(self.workers):
                worker.wait_for_layer_load(name)
                tensor = self.tensors[rank][name]
                for start, end, (blocks,) in spans.values():
                    places = torch.arange(start, end)
                    numbers = torch.tensor(blocks)[places // BLOCK]
                    made = self._made[numbers, places % BLOCK]
                    tensor[numbers, :, places % BLOCK] = (made + bases[rank])[:, None, None]
            for rank, worker in enumerate(self.workers):
                for each, (start, _, (blocks,)) in spans.items():
                    believed = self._made[list(blocks)].flatten() + bases[rank]
                    gone = self._gone(0, self.tensors[rank][name], believed, start, blocks)
                    if gone:
                        assert gone <= self._now, (each, rank, name, gone, start, self.weights)
                        wrong.add(each)
                worker.save_kv_layer(name, self.tensors[rank][name], None)
            for each in wrong:  # from the next layer on
                start, end, (blocks,) = spans[each]
                self._make(told[each], start, end, blocks, spoilt=True)
        return wrong

    def _make(self, told: Told, start: int, end: int, blocks: list[int], *, spoilt: bool) -> None:
        """What these tokens hold: behind what is not of the weights of now, something that nobody else computes."""
        values = self._values(told, self._epoch)
        before = self._made[list(blocks)].flatten()[:start]
        places = torch.arange(start, end)
        made = values[start:end]
        if spoilt or not torch.equal(before, values[:start]):
            self._mixtures += 1
            made = torch.full((end - start,), -float(self._mixtures))
        self._made[torch.tensor(blocks)[places // BLOCK], places % BLOCK] = made


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    """Room for a few namespaces at a time: segments change hands with nearly every update."""
    daemon = Daemon(folder / "changes", dram_bytes=4 << 20, segment_bytes=1 << 20, staging_bytes=1 << 20)
    yield daemon
    daemon.stop()


def happen(chosen: random.Random, crowds: list[Trained], ended: list[Told]) -> None:
    crowd = chosen.choice(crowds)
    what = chosen.random()
    if what < 0.35 and len(crowd.told) < 6 and crowd.asked < REQUESTS_MAX:
        if ended and chosen.random() < 0.4:
            told = chosen.choice(ended)
            tokens, salt = told.tokens[: told.request.num_tokens], told.salt
        else:
            tokens, salt = prompt(900 + chosen.randrange(3), chosen.choice(LENGTHS)), ""
        if chosen.random() < 0.4:
            tokens = tokens + prompt(950 + chosen.randrange(3), chosen.randrange(1, 60))
        crowd.add(tokens[:TOKENS_MAX], salt, chosen.randrange(3))
    elif what < 0.38:
        crowd.abort()
    elif what < 0.41:
        crowd.meanwhile = crowd.abort
    elif what < 0.44:
        crowd.reset()
    elif what < 0.47:
        crowd.update(reset=True)
    elif what < 0.48:
        crowd.update(reset=False)
    elif what < 0.485:
        crowd.write()
    elif what < 0.50:
        crowd.hold()
    elif what < 0.52:
        crowd.spoil()
    elif what < 0.62:
        crowd.mend()


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("way", WAYS)
def test_what_is_loaded_is_of_the_weights_that_the_ranks_hold(
    model: Path, daemon: Daemon, leases: list[ReadLease], way: str, seed: int
) -> None:
    chosen = random.Random(f"{way} {seed}")
    more = dict(WAYS[way])
    extra = {**PATIENT, "layerwise": more.pop("layerwise", False), "salt": f"changes {way} {seed}"}
    crowds = [Trained(model, daemon.run_dir, chosen, extra, **more) for _ in range(2)]
    ended: list[Told] = []
    try:
        for _ in range(STEPS):
            happen(chosen, crowds, ended)
            for crowd in crowds:
                crowd.step()
                ended += crowd.ended
                crowd.ended.clear()
        for crowd in crowds:
            crowd.mend()
            crowd.finish()
            until(crowd.is_idle)
        until(lambda: all(lease._released for lease in leases))
        until(lambda: not pinned(daemon))
        assert sum(crowd.restored() for crowd in crowds), "nothing was loaded: this shows nothing"
        assert all(crowd.updates for crowd in crowds)
        assert not any(crowd.bugs() for crowd in crowds)
    finally:
        for crowd in crowds:
            crowd.mend()
            crowd.close()


def test_what_vllm_keeps_through_a_reset_of_the_connector_is_not_saved(model: Path, daemon: Daemon) -> None:
    """As long as requests run it keeps its own cache, and gives it to others."""
    extra = {**PATIENT, "salt": "kept"}
    engine = Trained(model, daemon.run_dir, random.Random(0), extra)
    tokens = prompt(980, 200)
    try:
        engine.add(tokens, "", 0, count=40)
        running = engine.told["r1"].request
        until(lambda: running.num_output_tokens > 0 or engine.step() is not None)
        engine.reset_by(running=False, connector=True)
        engine.add(tokens + prompt(981, 70), "", 0, count=1)
        engine.finish()
        for found in (0, 6):
            engine.reset_by(running=False, connector=False)
            for worker in engine.workers:
                assert worker.worker_side.saver.flush(BOUND_S)
            engine.add(tokens, "", 0, count=1)
            engine.finish()  # and looks at each block, of each rank
            assert engine.restored() == found
        assert not engine.bugs()
    finally:
        engine.close()


def test_the_tier_saves_nothing_of_what_vllm_keeps_through_a_reset(model: Path, daemon: Daemon) -> None:
    """Nor what follows it: until vLLM's own cache was emptied, also while requests wait to be computed again."""
    engine = ByTier(model, daemon.run_dir, random.Random(0), {**PATIENT, "salt": "kept, tier"})
    tokens = prompt(982, 200)
    tally = engine.tier.tally.total

    def run() -> None:
        engine.finish()
        until(engine.is_idle)

    def begin(name: str, number: int, count: int) -> None:
        engine.add(prompt(number, 200), "", 0, count=count)
        running = engine.told[name].request
        until(lambda: running.num_output_tokens > 0 or engine.step() is not None)

    try:
        begin("r1", 982, 40)
        assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
        before = tally["blocks_saved"]
        engine.add(tokens + prompt(983, 70), "", 0, count=1)
        run()
        engine.add(prompt(984, 200), "", 0, count=1)
        run()
        assert tally["blocks_saved"] == before and tally["blocks_dropped"] > 0

        begin("r4", 985, 40)
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        engine.add(tokens, "", 0, count=1)
        run()
        assert tally["blocks_saved"] == before + len(tokens) // BLOCK, "of what it computes from now on"
        engine.scheduler.reset_prefix_cache()
        engine.manager.primary_tier.reset_cache()
        engine.add(tokens, "", 0, count=1)
        run()  # and looks at each block
        assert engine.restored() == len(tokens) // BLOCK
        assert not engine.bugs()
    finally:
        engine.close()
