"""A rank's side: fills blocks of its paged cache from the store, and copies full ones to it."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from kvstore.gpu_worker.connectors.link import Link
from kvstore.gpu_worker.connectors.vllm.blocks import DeviceBlocks, PagedBlocks
from kvstore.gpu_worker.connectors.vllm.events import events_wanted
from kvstore.gpu_worker.connectors.vllm.groups import tp_replicas
from kvstore.gpu_worker.connectors.vllm.held import Held, held_by
from kvstore.gpu_worker.connectors.vllm.identity import backend_of, group_of, vllm_version
from kvstore.gpu_worker.connectors.vllm.loader import LayerLoad, Loader
from kvstore.gpu_worker.connectors.vllm.metadata import (
    IDLE_S,
    Adapter,
    Changes,
    Load,
    RankLayout,
    RankReport,
    Save,
    StepMetadata,
)
from kvstore.gpu_worker.connectors.vllm.saver import Copied, Saver, Shard
from kvstore.gpu_worker.connectors.vllm.settings import Settings
from kvstore.gpu_worker.connectors.vllm.stats import Tally
from kvstore.gpu_worker.device import Device, Event, device_of
from kvstore.gpu_worker.proven import Proven
from kvstore.layout import NamespaceSpec

log = logging.getLogger(__name__)


class WorkerSide:
    def __init__(self, config: Any, kv_cache_config: Any, settings: Settings, link: Link) -> None:
        self._config = config
        self._kv_cache_config = kv_cache_config
        self._settings = settings
        self._link = link
        self.tally = Tally()
        self.changes = Changes(events_wanted(config))
        self.layout: RankLayout | None = None
        parallel = config.parallel_config
        self.place = divmod(
            parallel.rank % (parallel.tensor_parallel_size * parallel.pipeline_parallel_size),
            parallel.tensor_parallel_size,
        )
        """(pp, tp)."""
        self._spec: NamespaceSpec | None = None
        self.blocks: PagedBlocks | None = None
        self._loader: Loader | None = None
        self._device: Device | None = None
        """Whose memory the blocks are in, if it is not the host's."""
        self._proven: Proven | None = None
        self.saver: Saver | None = None
        """None on a rank whose bytes another one saves."""
        self._layer_loads: list[LayerLoad] = []
        self._copying: list[tuple[Save, list[Shard]]] = []
        """Layer-wise: this step's saves, being copied layer by layer."""
        self._copied_layers: set[int] = set()
        self._idle = False
        """This step computes nothing."""
        self._bad: set[int] = set()
        """Layer-wise: blocks that were not loaded and that attention may already have read; what is computed behind
        them is no KV of its tokens."""
        self._bad_unreported: set[int] = set()
        self.held: Held | None = None
        """What this rank holds; None: nobody has asked yet, and nothing is loaded or saved."""
        self._rank = config.parallel_config.rank
        self._trusted: int | None = None
        """The generation at which this step's chunks are named; None: they are named for something else."""
        self._named: Mapping[int, int] | None = None
        """The generations of all ranks for which chunks are named, as of the last step that was not empty."""
        self._arrived: dict[str, tuple[Load, int]] = {}
        """Whole loads of requests that have not begun to compute, and the generation that they were begun at."""

    def register(self, tensors: dict[str, torch.Tensor]) -> None:
        """Raises Unsupported for tensors that cannot be stored."""
        group = group_of(self._kv_cache_config)
        self.blocks = self._blocks_of(tensors, group.layer_names)
        parallel = self._config.parallel_config
        replicas = tp_replicas(self._config, self._kv_cache_config)
        self.layout = RankLayout(
            backend_of(self._config, self._kv_cache_config), tuple(self.blocks.shapes), replicas
        )
        stage, rank = self.place
        shard = stage * (parallel.tensor_parallel_size // replicas) + rank // replicas
        if self._proven is not None:
            self._link.opened = partial(self._proven.register_all, shard=shard)
        settings = self._settings
        self._loader = Loader(
            self._link, self.blocks, shard, self.tally, self.changes, load_s=settings.load_ms / 1000
        )
        if rank % replicas == 0:
            self.saver = Saver(
                self._link,
                self.blocks.shard_bytes,
                shard,
                self.tally,
                self.changes,
                queue_bytes=settings.save_queue_bytes,
                save_s=settings.save_ms / 1000,
                maker=_maker(parallel.rank),
                make=self.blocks.buffer,
            )

    def _blocks_of(self, tensors: dict[str, torch.Tensor], names: Sequence[str]) -> PagedBlocks:
        """What moves KV from and to memory that is not the host's is proved before it is used."""
        count = self._kv_cache_config.num_blocks
        plain = [tensor for tensor in tensors.values() if isinstance(tensor, torch.Tensor)]
        if not plain:
            return PagedBlocks(tensors, names, count)  # says what they are
        device = device_of(plain[0].device)
        if device.in_host_memory:
            device.close()
            return PagedBlocks(tensors, names, count)
        self._device = device
        self._proven = Proven(device, plain[0].device)
        self._link.prepare = self._proven.attach
        return DeviceBlocks(tensors, names, count, device=device, segments=self._proven.segments)

    # ---------------------------------------------------------------------------------------------------- a step

    def begin(self, metadata: StepMetadata) -> None:
        self._idle = metadata.idle
        if self.blocks is not None and not metadata.idle:
            self.blocks.overwritten(metadata.written)
        if metadata.recalled and self.saver is not None:
            self.saver.recall(metadata.recalled)
        if self.held is None:
            self.held = held_by(self._config, self._rank)
        if metadata.weights == self._named and not self._must_know(metadata):
            return
        self._follow(metadata.spec)
        self._named = metadata.weights
        before, self._trusted = self._trusted, self._generation(metadata)
        if self._loader is not None and before != self._trusted:
            self._loader.void()
        self._bad -= metadata.fresh
        for name in metadata.begun:
            self._use(name)

    def _must_know(self, metadata: StepMetadata) -> bool:
        """Whether to see what this rank holds before the step. To look at a thousand parameters takes a millisecond,
        which steps that only decode are spared. What they save is looked at behind them, for counters of changes only
        rise."""
        arrive = any(name in self._arrived for name in metadata.begun)
        is_due = not metadata.idle and self.held is not None and self.held.is_due
        return bool(metadata.loads or metadata.fresh or metadata.spec or arrive or is_due)

    def _follow(self, spec: NamespaceSpec | None) -> None:
        """From now on chunks are those of this namespace, if one is given."""
        if spec is not None and spec is not self._spec:
            if self._loader is not None:
                self._loader.void()
            self._spec = spec
            self._link.open(spec)

    def _generation(self, metadata: StepMetadata) -> int | None:
        """Of what this rank holds, if the step's chunks are named for that."""
        if self.held is None or metadata.weights is None:
            return None
        generation = self._check(self.held)
        return generation if metadata.weights.get(self.held.rank) == generation else None

    def _check(self, held: Held) -> int:
        generation = held.check()
        if self.saver is not None:
            self.saver.follow(held)
        return generation

    def _is(self, adapter: Adapter | None) -> bool:
        """Whether this rank holds the very adapter by which a chunk is named."""
        if adapter is None:
            return True
        return self.held is not None and self.held.adapter(adapter.number) == adapter.digest != b""

    def _use(self, name: str) -> None:
        """A request computes from now on, behind what was loaded for it: unless that is another model's by now."""
        load, generation = self._arrived.pop(name, (None, None))
        if load is not None and (generation != self._trusted or not self._is(load.adapter)):
            self._bad_unreported.update(load.blocks)
            self.tally.add(blocks_failed=len(load.blocks))

    def load(self, metadata: StepMetadata) -> None:
        """Whole loads are begun and go on behind the steps to come; layer-wise ones are awaited in this step."""
        if self._loader is None or not metadata.loads:
            return
        good = [load for load in metadata.loads if self._trusted is not None and self._is(load.adapter)]
        for load in metadata.loads:
            if load not in good:
                self._refuse(load)
        if not good:
            return
        assert self._spec is not None and self._trusted is not None, "nothing can be found before it is sent"
        if self._settings.layerwise:
            self._layer_loads = self._loader.start_layers(good, self._spec)
            return
        for load in good:
            self._loader.start(load, self._spec)
            self._arrived[load.request] = (load, self._trusted)

    def distrust(self, metadata: StepMetadata) -> None:
        """After an error in `begin`: what this rank holds is not known in this step, nor whether what was loaded for
        requests that begin to compute is of it."""
        self._trusted = None
        if self._loader is not None:
            self._loader.void()
        self._follow(metadata.spec)
        for name in metadata.begun:
            load, _ = self._arrived.pop(name, (None, None))
            if load is not None:
                self._bad_unreported.update(load.blocks)

    def refuse_all(self, metadata: StepMetadata) -> None:
        """After an error in `load`: those that were not begun have failed."""
        self._layer_loads = []
        for load in metadata.loads:
            if self._arrived.get(load.request, (None, 0))[0] is not load and self._loader is not None:
                self._refuse(load)

    def spoil(self) -> None:
        """After an error while layers are awaited: attention may have read what was not there."""
        for layers in self._layer_loads:
            self._bad.update(layers.load.blocks)
            self._bad_unreported.update(layers.load.blocks)
        self._layer_loads = []
        self.give_up()

    def give_up(self) -> None:
        """After an error while blocks are copied: nothing of this step is saved."""
        copying, self._copying = self._copying, []
        self._copied_layers = set()
        self._await_copies(copying)
        for _, shards in copying:
            self.tally.add(blocks_dropped=len(shards))
            if self.saver is not None:
                self.saver.give_back(shards)

    def _await_copies(self, copying: Sequence[tuple[Save, list[Shard]]]) -> None:
        """Buffers may be given to others."""
        if self.blocks is not None and copying:
            ready = self.blocks.gathered(block for save, _ in copying for block in save.blocks)
            if ready is not None:
                ready.synchronize()

    def _refuse(self, load: Load) -> None:
        """It is named for another model than this rank holds."""
        assert self._loader is not None
        self.tally.add(blocks_failed=len(load.blocks))
        if self._settings.layerwise:
            self._bad.update(load.blocks)
            self._bad_unreported.update(load.blocks)
        else:
            self._loader.refuse(load)

    def await_layer(self, name: str) -> None:
        assert self.blocks is not None
        for layers in self._layer_loads:
            if not layers.failed:
                layers.wait(self.blocks.numbers[name])
        if self._layer_loads:
            self.blocks.filled()

    def save_layer(self, metadata: StepMetadata, name: str) -> None:
        """Layer-wise: copy the layer while the next one computes."""
        if not self._settings.layerwise or self.blocks is None or not metadata.saves:
            return
        if not self._copied_layers:
            self._copying = self._room(metadata)
        layer = self.blocks.numbers[name]
        if layer not in self._copied_layers:
            self._copy_layer(layer)

    def end_forward(self, metadata: StepMetadata) -> None:
        """The step's compute is done: its full blocks are copied aside, before vLLM may use them for others."""
        if self.blocks is None:
            return
        self._end_layer_loads()
        if not metadata.saves:
            return
        if not self._copied_layers:
            self._copying = self._room(metadata)
        for layer in range(len(self.blocks.shapes)):
            if layer not in self._copied_layers:
                self._copy_layer(layer)
        # Weights may have changed beneath the step.
        same = self.held is not None and self._trusted == self._check(self.held)
        copying, self._copying = self._copying, []
        self._copied_layers = set()
        ready = None
        if copying:
            ready = self.blocks.gathered(block for save, _ in copying for block in save.blocks)
        for save, shards in copying:
            self._put(save, shards, ready, same=same)

    def _room(self, metadata: StepMetadata) -> list[tuple[Save, list[Shard]]]:
        """Buffers for as many of each save's leading blocks as there is room for."""
        if self.saver is None:
            return []
        taken = []
        for save in metadata.saves:
            good = self._trusted is not None and self._link.promising and self._is(save.adapter)
            good = good and not (self._proven is not None and self._proven.segments.failure)
            shards = self.saver.buffers(len(save.blocks)) if good else []
            self.tally.add(blocks_dropped=len(save.blocks) - len(shards))
            if shards:
                taken.append((save, shards))
        return taken

    def _copy_layer(self, layer: int) -> None:
        assert self.blocks is not None
        self._copied_layers.add(layer)
        pairs = [pair for save, shards in self._copying for pair in zip(save.blocks, shards, strict=False)]
        self.blocks.gather(pairs, layer)

    def _put(self, save: Save, shards: list[Shard], ready: Event | None, *, same: bool) -> None:
        """`same`: this rank holds what the step's chunks are named for."""
        assert self.saver is not None
        spec = self._spec
        spoilt = not self._bad.isdisjoint((*save.before, *save.blocks))
        if spec is None or spoilt or not same or not self._is(save.adapter):
            self.tally.add(blocks_dropped=len(shards))
            if ready is not None:
                ready.synchronize()  # until then it is written
            self.saver.give_back(shards)
            return
        parents = (save.parent, *save.keys)
        until = time.monotonic() + self._settings.save_ms / 1000
        self.saver.put(
            [
                Copied(spec, key, parent, shard, ready, until)
                for key, parent, shard in zip(save.keys, parents, shards, strict=False)
            ]
        )

    def _end_layer_loads(self) -> None:
        last = len(self.blocks.shapes) - 1 if self.blocks is not None else 0
        for layers in self._layer_loads:
            if not layers.failed:
                layers.wait(last)
            if layers.failed:
                self._bad.update(layers.load.blocks)
                self._bad_unreported.update(layers.load.blocks)
        self._layer_loads = []

    def take_done(self) -> set[str]:
        """Requests whose whole loads have ended; their failed blocks are in the next `take_failed`."""
        if self._loader is None:
            return set()
        done, failed = self._loader.take_done(IDLE_S if self._idle else 0.0)
        self._bad_unreported |= failed
        return done

    def forget(self, requests: set[str]) -> None:
        """Requests that have ended."""
        for name in requests:
            self._arrived.pop(name, None)

    def report(self) -> RankReport | None:
        """For the scheduler's side."""
        report = RankReport(self.changes.take())
        if self.held is not None:
            report.adapters = self.held.take_news()
            if self._trusted != self.held.generation:
                report.generations = {self.held.rank: self.held.generation}
        if self._loader is not None:
            report.loads = self._loader.take_speeds()
            report.ssd_bytes_per_s = self._loader.take_ssd_speed()
        news = (report.changes, report.adapters, report.generations, report.loads, report.ssd_bytes_per_s)
        return report if any(news) else None

    def take_failed(self) -> set[int]:
        failed, self._bad_unreported = self._bad_unreported, set()
        return failed

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()
        if self.saver is not None:
            self.saver.close(self._settings.drain_ms / 1000)
        self._link.close()
        if self._proven is not None:
            self._proven.segments.close()
        if self._device is not None:
            self._device.close()


def _maker(rank: int) -> bytes:
    """Who computed a chunk: what `kvctl recall` would go by."""
    who = f"{platform.node()}/{os.getpid()}/{rank}/vllm-{vllm_version()}/{time.time_ns()}"
    return hashlib.blake2b(who.encode(), digest_size=16, person=b"kvs.maker.v1").digest()
