"""KV events for routers, through vLLM's own publisher: which blocks can be had from the store.

A block is announced when every rank that saves it has said that its part is in the store, and when it is found there;
and taken back when the store says that it is gone. Which of the store's tiers holds it changes without anybody here, so
the medium is always STORAGE. vLLM publishes with a step: what the last request of a burst saved is told with the next
request.

All on the scheduler's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from kvstore.types import ChunkKey

OWNERSHIP = "kvstored"
LOCALITY = "LOCAL"
SAVING_MAX = 16_384
"""Blocks whose saves are under way; of more the oldest are never announced."""
ANNOUNCED_MAX = 131_072
"""Blocks that can be taken back. Of more, the loss of the oldest is not noticed by routers."""
REMOVED_MAX = 1_024
"""Hashes in one event."""


def events_wanted(config: Any) -> bool:
    """Whether vLLM publishes KV events."""
    wanted = getattr(config, "kv_events_config", None)
    return wanted is not None and bool(wanted.enable_kv_cache_events)


@dataclass(slots=True)
class Saving:
    event: BlockStored
    shards: int = 0
    """Bit n: shard n is in the store."""


class Events:
    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._saving: OrderedDict[ChunkKey, Saving] = OrderedDict()
        self._announced: OrderedDict[ChunkKey, Any] = OrderedDict()
        """Key -> the block's hash as routers see it."""
        self._events: list[KVCacheEvent] = []

    def saving(self, request: Any, first: int, keys: Sequence[ChunkKey]) -> None:
        """The ranks were told to save the request's blocks from number `first` on."""
        for number, key in enumerate(keys, first):
            if key not in self._saving and key not in self._announced:
                self._saving[key] = Saving(self._described(request, number))
        while len(self._saving) > SAVING_MAX:
            self._saving.popitem(last=False)

    def saved(self, keys: Iterable[ChunkKey], shard: int, shard_count: int) -> None:
        """One rank's part of each is in the store; the others' are counted before."""
        for key in keys:
            saving = self._saving.get(key)
            if saving is None:
                continue
            saving.shards |= 1 << shard
            if saving.shards == (1 << shard_count) - 1:
                del self._saving[key]
                self._announce(key, saving.event)

    def found(self, request: Any, first: int, keys: Sequence[ChunkKey]) -> None:
        """The request's blocks from number `first` on are in the store, whoever put them there. Said again each time,
        as vLLM does of its own: routers may have lost what they knew."""
        for number, key in enumerate(keys, first):
            self._saving.pop(key, None)
            self._announce(key, self._described(request, number))

    def lost(self, keys: Iterable[ChunkKey]) -> None:
        self._remove([self._announced.pop(key) for key in keys if key in self._announced])

    def reset(self) -> None:
        """Nothing that was announced can be had any more. vLLM says AllBlocksCleared of its own cache, which
        routers may take for all, but not while blocks are in use."""
        self._saving.clear()
        announced, self._announced = self._announced, OrderedDict()
        self._remove(list(announced.values()))

    def take(self) -> list[KVCacheEvent]:
        events, self._events = self._events, []
        return events

    def _announce(self, key: ChunkKey, event: BlockStored) -> None:
        (self._announced[key],) = event.block_hashes
        self._announced.move_to_end(key)
        if len(self._announced) > ANNOUNCED_MAX:
            self._announced.popitem(last=False)
        before = self._events[-1] if self._events else None
        if isinstance(before, BlockStored) and _continues(before, event):
            before.block_hashes += event.block_hashes
            before.token_ids += event.token_ids
            before.extra_keys += event.extra_keys
        else:
            self._events.append(event)

    def _remove(self, hashes: list[Any]) -> None:
        for start in range(0, len(hashes), REMOVED_MAX):
            self._events.append(
                BlockRemoved(
                    block_hashes=hashes[start : start + REMOVED_MAX],
                    medium=MEDIUM_STORAGE,
                    group_idx=0,
                    locality=LOCALITY,
                    ownership=OWNERSHIP,
                )
            )

    def _described(self, request: Any, number: int) -> BlockStored:
        start, end = number * self._block_tokens, (number + 1) * self._block_tokens
        extra, _ = generate_block_hash_extra_keys(request, start, end, 0)
        lora = request.lora_request
        hashes = request.block_hashes
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(hashes[number])],
            parent_block_hash=maybe_convert_block_hash(hashes[number - 1]) if number else None,
            token_ids=list(request.all_token_ids[start:end]),
            block_size=self._block_tokens,
            lora_id=lora.adapter_id if lora is not None else None,
            medium=MEDIUM_STORAGE,
            lora_name=lora.name if lora is not None else None,
            extra_keys=to_event_extra_keys([extra]),
            group_idx=0,
            locality=LOCALITY,
            ownership=OWNERSHIP,
            session_id=getattr(request, "session_id", None),
        )


def _continues(before: BlockStored, event: BlockStored) -> bool:
    """Whether one event can say both: blocks of one chain, in order."""
    same = (event.lora_name, event.session_id) == (before.lora_name, before.session_id)
    return same and bool(event.parent_block_hash == before.block_hashes[-1])
