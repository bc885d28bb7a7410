"""vLLM's paged blocks in memory that the host does not reach: copied by streams, with all of vLLM's layouts, and every
wait that keeps copies and the engine apart. No vLLM is needed: what of it is imported stands for nothing here."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from kvstore.gpu_worker import bounce
from kvstore.gpu_worker.device import DeviceFailed
from kvstore.gpu_worker.segments import Path, Segments
from kvstore.keys import ROOT
from kvstore.types import ChunkKey, GrantResult, Protection

from .conftest import FakeClient, FakeLease, FakeNamespace, FakeStore
from .emulated import EmulatedDevice, Race

BOUND_S = 30.0
BLOCKS, TOKENS, HEADS, WIDTH, LAYERS = 9, 4, 3, 8, 3
NAMES = [f"layer.{number}" for number in range(LAYERS)]


class Named(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class Nothing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of vLLM in which every name is an empty class."""

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if name.partition(".")[0] == "vllm":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        def missing(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return Named(name, (), {})

        module.__getattr__ = missing  # type: ignore[method-assign]


def imported() -> tuple[ModuleType, ModuleType, ModuleType]:
    """blocks, loader and saver, with vLLM or without."""
    finder = Nothing()
    before = set(sys.modules)
    ours = "kvstore.gpu_worker.connectors.vllm."
    sys.meta_path.append(finder)
    try:
        return tuple(importlib.import_module(ours + name) for name in ("blocks", "loader", "saver"))  # type: ignore[return-value]
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:  # nobody else is to find these
            if name.startswith((ours, ours[:-1])) or isinstance(sys.modules[name].__loader__, Nothing):
                del sys.modules[name]


blocks, loader, saver = imported()


def split_tokens_first() -> torch.Tensor:
    """FlashAttention, NHD."""
    return torch.randn(2, BLOCKS, TOKENS, HEADS, WIDTH)


def split_heads_first() -> torch.Tensor:
    """FlashAttention, HND: the same dimensions, another order in memory."""
    return torch.randn(2, BLOCKS, HEADS, TOKENS, WIDTH).transpose(2, 3)


def joint_tokens_first() -> torch.Tensor:
    """FlashInfer, NHD."""
    return torch.randn(BLOCKS, 2, TOKENS, HEADS, WIDTH)


def joint_heads_first() -> torch.Tensor:
    """FlashInfer, HND."""
    return torch.randn(BLOCKS, 2, HEADS, TOKENS, WIDTH).transpose(2, 3)


def packed() -> torch.Tensor:
    """Triton's: K and V in one row, of 8 bits."""
    return torch.randint(0, 127, (BLOCKS, TOKENS, HEADS, 2 * WIDTH), dtype=torch.int8)


LAYOUTS = (split_tokens_first, split_heads_first, joint_tokens_first, joint_heads_first, packed)


class Rig:
    """Blocks on a device beside the same in memory of the host, and a store."""

    def __init__(
        self,
        layout: Callable[[], torch.Tensor] = split_tokens_first,
        protection: Protection = Protection.GROUP,
        store: FakeStore | None = None,
    ) -> None:
        torch.manual_seed(1)
        self.store = store or FakeStore()
        self.store.protection = protection
        self.device = EmulatedDevice()
        self.device.adopt = lambda tensors: None  # type: ignore[method-assign]  # some are integers
        self.tensors = {name: layout() for name in NAMES}
        self.content = {name: tensor.clone() for name, tensor in self.tensors.items()}
        self.client = FakeClient(self.store)
        self.segments = Segments(self.device)
        self.segments.attach(self.client)  # type: ignore[arg-type]
        self.host = blocks.PagedBlocks(self.content, NAMES, BLOCKS)
        self.blocks = blocks.DeviceBlocks(
            self.tensors, NAMES, BLOCKS, device=self.device, segments=self.segments
        )
        self.namespace = FakeNamespace(
            self.store,
            SimpleNamespace(chunk_tokens=TOKENS),
            b"salt",
            self.client,  # type: ignore[arg-type]
        )

    def stored(self, count: int) -> tuple[list[ChunkKey], list[np.ndarray]]:
        """Chunks that the store has."""
        keys, shards = [], []
        for number in range(count):
            key = ChunkKey(bytes([number + 1]) * 32)
            shard = np.random.default_rng(number).integers(0, 120, self.blocks.shard_bytes, np.uint8)
            self.store.chunks[b"salt", key] = shard
            keys.append(key)
            shards.append(shard)
        return keys, shards

    def read(self, keys: Sequence[ChunkKey]) -> FakeLease:
        return self.namespace.read(keys)

    def bytes_of(self, block: int) -> bytes:
        """As they are in the device's memory now."""
        out = np.zeros(self.host.shard_bytes, np.uint8)
        for layer in range(LAYERS):
            blocks.PagedBlocks(self.tensors, NAMES, BLOCKS).gather([(block, out)], layer)
        return out.tobytes()

    def touches(self, block: int, *, writes: bool) -> None:
        """The engine's step."""
        regions = [("block", layer, block) for layer in range(LAYERS)]
        self.device.compute.run(lambda: None, **({"writes": regions} if writes else {"reads": regions}))

    def gather(self, wanted: Sequence[int]) -> tuple[list[np.ndarray], Any]:
        shards = [self.blocks.buffer() for _ in wanted]
        for layer in range(LAYERS):
            self.blocks.gather(list(zip(wanted, shards, strict=True)), layer)
        return shards, self.blocks.gathered(wanted)

    def close(self) -> None:
        self.device.release()
        self.client.close()
        self.segments.close()
        self.device.close()


@pytest.fixture
def rigs() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(*given: Any, **named: Any) -> Rig:
        made.append(Rig(*given, **named))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_copied_out_is_what_a_cpu_would_store(
    layout: Callable[[], torch.Tensor], rigs: Callable[..., Rig]
) -> None:
    rig = rigs(layout)
    assert [rig.blocks.shapes, rig.blocks.offsets, rig.blocks.numbers] == [
        rig.host.shapes,
        rig.host.offsets,
        rig.host.numbers,
    ]
    wanted = [7, 0, 3]
    shards, ready = rig.gather(wanted)
    ready.synchronize()
    for block, shard in zip(wanted, shards, strict=True):
        expected = np.zeros_like(shard)
        for layer in range(LAYERS):
            rig.host.gather([(block, expected)], layer)
        assert (shard == expected).all()
    assert rig.device.pageable == 0 and not rig.device.races


@pytest.mark.parametrize("protection", [Protection.GROUP, Protection.SEALED])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_copied_in_is_what_the_store_has(
    layout: Callable[[], torch.Tensor], protection: Protection, rigs: Callable[..., Rig]
) -> None:
    rig = rigs(layout, protection)
    keys, shards = rig.stored(3)
    before = {block: rig.bytes_of(block) for block in range(BLOCKS)}
    assert rig.blocks.fill(rig.read(keys), [(0, 7), (2, 0), (1, 3)], 0)
    for block in range(BLOCKS):
        wanted = {7: shards[0], 0: shards[2], 3: shards[1]}.get(block)
        assert rig.bytes_of(block) == (before[block] if wanted is None else wanted.tobytes())
    assert rig.segments.path is (Path.BOUNCE if protection is Protection.SEALED else Path.REGISTERED)
    assert rig.device.pageable == 0 and not rig.device.races


def test_one_bounce_buffer_for_one_slice_is_enough(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is filled anew once the device has read it."""
    monkeypatch.setattr(bounce, "BUFFERS", 1)
    monkeypatch.setattr(bounce, "BUFFER_BYTES", 1)
    rig = rigs(protection=Protection.SEALED)
    keys, shards = rig.stored(2)
    assert rig.blocks.fill(rig.read(keys), [(0, 7), (1, 3)], 0)
    assert [rig.bytes_of(7), rig.bytes_of(3)] == [shard.tobytes() for shard in shards]
    assert not rig.device.races


def test_one_layer_alone(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    keys, shards = rig.stored(1)
    assert rig.blocks.fill(rig.read(keys), [(0, 5)], 0, (1,))
    size = rig.blocks.shapes[0].slice_bytes
    assert rig.bytes_of(5)[size : 2 * size] == shards[0][size : 2 * size].tobytes()
    assert rig.bytes_of(5)[:size] != shards[0][:size].tobytes()


@pytest.mark.parametrize("protection", [Protection.GROUP, Protection.SEALED])
def test_a_void_lease_is_told_and_nothing_is_written_afterwards(
    protection: Protection, rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of copies out of the arena it shows when they are over, and not before."""
    rig = rigs(protection=protection)
    keys, _ = rig.stored(2)
    lease = rig.read(keys)
    asked: list[bool] = []

    def intact() -> bool:
        asked.append(rig.blocks._read._given.empty())
        return False

    monkeypatch.setattr(lease, "intact", intact)
    rig.store.on_copy = lambda number: protection is Protection.GROUP
    assert not rig.blocks.fill(lease, [(0, 1), (1, 2)], 0)
    assert asked == [True] * (protection is Protection.GROUP)
    assert rig.blocks._read._given.empty()


def test_a_step_computes_what_is_copied_out(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    rig.touches(2, writes=True)
    _, ready = rig.gather([2])
    ready.synchronize()
    assert not rig.device.races


@pytest.mark.parametrize("told", [True, False])
def test_blocks_are_given_to_others_when_they_are_copied(told: bool, rigs: Callable[..., Rig]) -> None:
    """Also to a connector that no stream of ours knows: the engine's thread has waited."""
    rig = rigs()
    rig.touches(2, writes=True)
    rig.touches(3, writes=True)
    _, ready = rig.gather([2, 3])
    rig.blocks.overwritten([2, 8] if told else [8])
    if told:
        assert ready.query()
        rig.touches(2, writes=True)
        rig.gather([2])
        rig.blocks.overwritten(None)  # whatever it is
        rig.touches(3, writes=True)
    else:
        with pytest.raises(Race, match="compute writes"):
            rig.touches(2, writes=True)


@pytest.mark.parametrize("saved", [True, False])
def test_who_had_a_block_before_has_read_it_when_it_is_filled(saved: bool, rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    keys, _ = rig.stored(1)
    rig.touches(4, writes=True)
    if saved:
        rig.gather([4])
    after = rig.blocks.free_for([4])
    found: list[bool] = []
    lease = rig.read(keys)
    thread = threading.Thread(target=lambda: found.append(rig.blocks.fill(lease, [(0, 4)], 0, after=after)))
    thread.start()
    thread.join()
    rig.blocks.filled()
    rig.touches(4, writes=False)
    assert found == [True] and not rig.device.races


def test_who_uses_what_is_there_does_not_wait_for_what_is_being_filled(rigs: Callable[..., Rig]) -> None:
    """Layer by layer, the next one is copied while this one is computed."""
    rig = rigs()
    keys, _ = rig.stored(1)
    lease = rig.read(keys)
    assert rig.blocks.fill(lease, [(0, 4)], 0, (0,))
    rig.device.hold()
    thread = threading.Thread(target=rig.blocks.fill, args=(lease, [(0, 4)], 0, (1,)))
    thread.start()
    rig.blocks.filled()
    rig.device.compute.run(lambda: None, reads=[("block", 0, 4)])
    assert thread.is_alive() and not rig.device.races
    rig.device.release()
    thread.join()


def test_a_block_whose_load_failed_early_is_computed_when_it_is_copied(rigs: Callable[..., Rig]) -> None:
    """Of what is not found nothing is copied in, and nothing has waited for the copy out."""
    rig = rigs()
    rig.touches(4, writes=True)
    rig.gather([4])
    rig.blocks.free_for([4])
    rig.blocks.filled()
    rig.blocks.overwritten([4])
    rig.touches(4, writes=True)
    assert not rig.device.races


def test_a_race_of_the_engine_with_a_load_would_be_seen(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    keys, _ = rig.stored(1)
    rig.touches(4, writes=True)
    with pytest.raises((Race, DeviceFailed)):
        rig.blocks.fill(rig.read(keys), [(0, 4)], 0)


def test_a_load_is_sampled(rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "SAMPLE_EVERY", 2)
    rig = rigs()
    keys, _ = rig.stored(1)
    fill = lambda: rig.blocks.fill(rig.read(keys), [(0, 4)], 0)  # noqa: E731
    assert fill() and fill() and fill()
    copy = rig.device.copy_in

    def spoil(target: torch.Tensor, source: np.ndarray) -> None:
        copy(target, source)
        target.flatten()[0] ^= 1

    rig.device.copy_in = spoil  # type: ignore[method-assign]
    assert not fill() and "are not those of the store" in rig.segments.failure
    assert not fill(), "and nothing is loaded any more"


def test_a_save_waits_for_its_copy(rigs: Callable[..., Rig]) -> None:
    """And nothing else does: the engine goes on."""
    rig = rigs()
    written: list[bytes] = []

    class Batch:
        granted, results = [0], ()

        def __enter__(self) -> Batch:
            return self

        def __exit__(self, *_: object) -> None: ...

        def copy_many(self, pieces: Sequence[tuple[int, None, np.ndarray]]) -> None:
            written.extend(shard.tobytes() for _, _, shard in pieces)
            raise saver.StoreError("enough", field="", value="")

    namespace = SimpleNamespace(write=lambda *given, **named: Batch())
    link = SimpleNamespace(namespace=lambda spec, timeout_s: namespace)
    tally = SimpleNamespace(add=lambda **counts: None)
    made = saver.Saver(
        link,
        rig.blocks.shard_bytes,
        0,
        tally,
        None,
        queue_bytes=4 * rig.blocks.shard_bytes,
        save_s=BOUND_S,
        maker=bytes(16),
        make=rig.blocks.buffer,
    )
    rig.device.hold()
    (shard,) = made.buffers(1)
    for layer in range(LAYERS):
        rig.blocks.gather([(6, shard)], layer)
    ready = rig.blocks.gathered([6])
    made.put([saver.Copied(None, ChunkKey(b"k"), ROOT, shard, ready)])
    assert not made.flush(0.2) and not written
    rig.device.release()
    assert made.flush(BOUND_S)
    made.close(BOUND_S)
    assert written == [rig.bytes_of(6)] and rig.device.pageable == 0


class RoomLater:
    """Stands for link, namespace and batch: has room for all but the first chunk only when it is asked again."""

    spec = None

    def __init__(self) -> None:
        self.asked: list[list[ChunkKey]] = []
        self.results: list[GrantResult] = []

    def namespace(self, spec: Any, timeout_s: float) -> RoomLater:
        return self

    def write(self, keys: list[ChunkKey], **_: Any) -> Any:
        rest = GrantResult.GRANTED if self.asked else GrantResult.FULL
        self.asked.append(list(keys))
        self.results = [GrantResult.GRANTED, *[rest] * (len(keys) - 1)]
        return contextlib.nullcontext(self)

    @property
    def granted(self) -> list[int]:
        return [n for n, result in enumerate(self.results) if result is GrantResult.GRANTED]

    def copy_many(self, pieces: Any) -> None: ...

    def commit(self, *, timeout_s: float) -> Any:
        return SimpleNamespace(ok=True, error=None)


def test_what_finds_no_room_is_tried_again_until_its_time_is_up() -> None:
    """Before what came later."""
    store, counts = RoomLater(), Counter[str]()
    tally = SimpleNamespace(add=lambda **more: counts.update(more))
    changes = SimpleNamespace(add=lambda *_: None)
    made = saver.Saver(store, 8, 0, tally, changes, queue_bytes=32, save_s=BOUND_S, maker=bytes(16))
    a, b, c, d = (ChunkKey(name) for name in (b"a", b"b", b"c", b"d"))
    untils = {a: 0.0, b: time.monotonic() + BOUND_S, c: 0.0}
    made.put([saver.Copied(None, key, key, made.buffers(1)[0], until=untils[key]) for key in (a, b, c)])
    assert made.flush(BOUND_S)
    assert store.asked == [[a, b, c], [b]]
    made.put([saver.Copied(None, d, d, made.buffers(1)[0])])
    made.close(BOUND_S)
    assert store.asked[2:] == [[d]]
    assert (counts["blocks_saved"], counts["blocks_refused"]) == (3, 1)
    assert len(made._free) == 3, "each buffer is there once"


class Forgetful(RoomLater):
    """Has room, and notes what it shall forget."""

    def __init__(self) -> None:
        super().__init__()
        self.asked.append([])
        self.forgotten: list[ChunkKey] = []

    def forget(self, *, keys: list[ChunkKey], timeout_s: float) -> int:
        self.forgotten += keys
        return len(keys)


@pytest.mark.parametrize("verified", [False, True])
def test_what_another_rank_spoilt_is_recalled_though_this_one_is_verified(verified: bool) -> None:
    """That its own weights are what they were says nothing of the other's, which has added to what it saved."""
    store, counts = Forgetful(), Counter[str]()
    tally = SimpleNamespace(add=lambda **more: counts.update(more))
    changes = SimpleNamespace(add=lambda *_: None)
    made = saver.Saver(store, 8, 0, tally, changes, queue_bytes=32, save_s=BOUND_S, maker=bytes(16))
    a, b = ChunkKey(b"a"), ChunkKey(b"b")
    made.put([saver.Copied(None, key, key, made.buffers(1)[0]) for key in (a, b)])
    assert made.flush(BOUND_S)
    if verified:
        made.follow(SimpleNamespace(doubts=0, verified_at=time.monotonic()))
    made.recall(frozenset([b]))
    assert made.flush(BOUND_S)
    assert store.forgotten == [b]
    made.follow(SimpleNamespace(doubts=1, verified_at=0.0))
    made.close(BOUND_S)
    assert store.forgotten == ([b] if verified else [b, a, b])
    assert counts["blocks_recalled"] == len(store.forgotten)
