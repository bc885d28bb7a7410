"""The worlds with a `MemoryTier` below DRAM: they perform its effects and hold what it keeps against what was
committed. The platter of `DiskWorld` stays empty, so nothing is promised, and nothing comes back after a restart."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from kvstore.core import events as ev
from kvstore.core.chunks import STORED
from kvstore.types import DiskPlace, DiskResult, SlabId

from .cluster import OPS, Cluster
from .disk import GARBAGE, DiskWorld
from .memory_tier import DropObjects, GetObjects, MemoryTier, Name, ProbeObjects, PutObjects, ScrubObjects

FORGOTTEN_SHARE = 3
"""One in so many objects that go bad is not there any more; the others have other bytes."""


class MemoryWorld(DiskWorld):
    def __init__(self, *args: Any, **world: Any) -> None:
        self.objects: dict[Name, int] = {}
        """What stands for their bytes."""
        self.spoilt: set[Name] = set()
        """Objects whose bytes changed, or that were forgotten, behind the core's back."""
        super().__init__(*args, cold_tier="memory", **world)

    def crash(self, chance: random.Random | None = None, *, power: bool = False, **changed: Any) -> None:
        """Everything is gone with the daemon."""
        self.objects.clear()
        self.spoilt.clear()
        super().crash(chance, power=power, **changed)
        state = self.store.state
        assert not (state.namespaces or state.sessions.by_name or state.chunks.rows_used), state.chunks

    def _tier(self) -> MemoryTier:
        tier = self.store.cold_tier
        assert isinstance(tier, MemoryTier)
        return tier

    def _perform_op(self, effect: Any, *, fails: str = "", spoil: int = 0) -> None:
        if not isinstance(effect, ev.TierEffect):
            super()._perform_op(effect, fails=fails, spoil=spoil)
            return
        result = DiskResult[fails] if fails else self.faults.get(type(effect), DiskResult.OK)
        results: tuple[DiskResult, ...] = (result,)
        match effect:
            case DropObjects():
                for name in effect.names:
                    self.objects.pop(name, None)
                    self.spoilt.discard(name)
                return
            case PutObjects():
                results = tuple(self._put_object(effect, n, result) for n in range(len(effect.names)))
            case GetObjects():
                results = tuple(self._get_object(effect, n, result) for n in range(len(effect.names)))
            case ScrubObjects():
                pairs = zip(effect.names, effect.checksums, strict=True)
                results = tuple(self._verify(name, checksum, result) for name, checksum in pairs)
            case ProbeObjects():
                pass
            case _:
                raise AssertionError(effect)
        why = "" if set(results) == {DiskResult.OK} else f"{effect.__class__.__name__} fails"
        self._inbox.append(ev.DiskDone(effect.op, results, why))

    def _put_object(self, effect: PutObjects, number: int, result: DiskResult) -> DiskResult:
        """One that fails may be there, whole or not."""
        name, source = effect.names[number], effect.sources[number]
        assert name not in self.objects, f"a name is given twice: {name}"
        content = self._read(source)
        assert content == source.checksum or self.is_damaged(source), (name, source)
        result = self._one_by_one(result)
        self.objects[name] = content if result is DiskResult.OK else GARBAGE
        if content != source.checksum:
            self.spoilt.add(name)
        return result

    def _get_object(self, effect: GetObjects, number: int, result: DiskResult) -> DiskResult:
        """Whatever the result, the target's bytes have changed."""
        name, target = effect.names[number], effect.targets[number]
        found = self._object(name)
        result = self._verify(name, target.checksum, result, found)
        if target.segment in self.memory:
            self._write(target, GARBAGE if found is None or result is DiskResult.IO_ERROR else found, by=None)
        return result

    def _verify(self, name: Name, checksum: int, result: DiskResult, found: int | None = None) -> DiskResult:
        found = self.objects.get(name) if found is None else found
        result = self._one_by_one(result)
        if result is not DiskResult.OK:
            return result
        if found is None:
            return DiskResult.REUSED
        result = DiskResult.OK if found == checksum else DiskResult.CORRUPT
        return self._noted(DiskPlace(SlabId(name.generation), name.shard, name.generation), result)

    def _object(self, name: Name) -> int | None:
        return self.objects.get(name)

    def rot_some(self, pick: int) -> None:
        names = list(self.objects)
        if names:
            self.spoil(names[pick % len(names)], forget=pick % FORGOTTEN_SHARE == 0)

    def spoil(self, name: Name, *, forget: bool) -> None:
        self.spoilt.add(name)
        if forget:
            del self.objects[name]
        else:
            self.objects[name] ^= 1 << 40

    def _check_stored(self, row: int) -> None:
        """What is STORED is there as it was committed."""
        chunks, tier = self.store.state.chunks, self._tier()
        if not chunks.flags[row] & STORED:
            return
        start = chunks.shard0[row]
        for shard, name in enumerate(tier.names((row,))):
            if name not in self.spoilt:
                assert self.objects[name] == chunks.shard_checksum[start + shard], (
                    chunks.describe(row),
                    name,
                )


class MemoryCluster(MemoryWorld, Cluster):
    RECORD_OPS = (PutObjects, GetObjects)
    READS = (GetObjects,)
    GROWING_OPS = (PutObjects,)
    PROBES = (ProbeObjects,)
    FILLING_OPS = (*Cluster.FILLING_OPS, GetObjects)
    SCRUBS = (*Cluster.SCRUBS, ScrubObjects)

    def _begin(self) -> list[ev.Effect]:
        effects = super()._begin()
        self.hold = {*OPS, PutObjects, GetObjects, ScrubObjects, ProbeObjects}
        return effects

    def _object(self, name: Name) -> int | None:
        found = super()._object(name)
        if self.misdirect_in:
            self.misdirect_in -= 1
            if not self.misdirect_in:
                others = [content for other, content in self.objects.items() if other != name]
                return self.chance.choice(others) if others and self.chance else GARBAGE
        return found

    def _tier_at_rest(self, stored: Sequence[int]) -> None:
        """No object is left of what was dropped."""
        names = set(self._tier().names(stored))
        assert self.objects.keys() <= names, self.objects.keys() - names
        assert names - self.objects.keys() <= self.spoilt, names - self.objects.keys()
