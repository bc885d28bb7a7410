"""What a request needs of each group: our idea of it held against vLLM's own scheduler for offloading."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import LookupResult, ReqContext, RequestOffloadingContext, get_offload_group_idx
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from kvstore.errors import Unsupported
from kvstore.gpu_worker.connectors.offload import Group, needed
from kvstore.gpu_worker.connectors.vllm.callers import asked, range_asked
from kvstore.gpu_worker.connectors.vllm.connector import KVStoreConnector
from kvstore.gpu_worker.connectors.vllm.cpu_spec import CPUTieringSpec
from kvstore.gpu_worker.connectors.vllm.groups import groups_of, tp_replicas
from kvstore.gpu_worker.connectors.vllm.interface import check_interface
from kvstore.gpu_worker.connectors.vllm.tier import KVStoreTier
from kvstore.types import ChunkKey

from .conftest import BLOCK, transfer_config

SHAPE: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)
LATENT = MLAAttentionSpec(**{**SHAPE, "num_kv_heads": 1})
STATE = MambaSpec(block_size=BLOCK, shapes=((4, 8),), dtypes=(torch.float32,), mamba_cache_mode="align")


def window(tokens: int, **more: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(**SHAPE, sliding_window=tokens, **more)


def local(tokens: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=tokens)


def cache_of(*specs: Any, drafts: Collection[int] = ()) -> KVCacheConfig:
    groups = [
        KVCacheGroupSpec(
            [f"layer.{number}.{place}" for place in range(2)], spec, is_eagle_group=number in drafts
        )
        for number, spec in enumerate(specs)
    ]
    return KVCacheConfig(7, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.fixture(scope="module")
def config(model: Path) -> Any:
    return EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK,
        kv_transfer_config=KVTransferConfig(**transfer_config(Path("/nowhere"))),
    ).create_engine_config()


class Store:
    """Stands for vLLM's manager with the tier below it: "ask again" at first, then what the request needs."""

    def __init__(self, choose: Callable[[ReqContext, list[bytes]], Collection[bytes]]) -> None:
        self._choose = choose
        self.asked: list[bytes] = []
        self.answered: dict[bytes, bool] = {}
        self.told = 0
        self.lock = contextlib.nullcontext()

    def on_new_request(self, context: ReqContext) -> RequestOffloadingContext:
        self._context = context
        return RequestOffloadingContext()

    def lookup(self, key: bytes, context: ReqContext) -> LookupResult:
        if key not in self.answered:
            if key not in self.asked:
                self.asked.append(key)
            return LookupResult.RETRY
        return LookupResult.HIT if self.answered[key] else LookupResult.MISS

    def answer(self) -> None:
        chosen = self._choose(self._context, self.asked)
        self.told += len(chosen)
        self.answered.update({key: key in chosen for key in self.asked})
        self.asked = []


def resumed(config: Any, cache: KVCacheConfig, store: Store, tokens: int, computed: int) -> int:
    """Tokens that vLLM's scheduler would load."""
    changed = copy.copy(config)
    changed.kv_transfer_config = copy.copy(config.kv_transfer_config)
    changed.kv_transfer_config.kv_connector_extra_config = {"cpu_bytes_to_use": 1 << 20}
    spec = CPUTieringSpec(build_offloading_config(changed, cache))
    spec._manager = store
    scheduler = OffloadingConnectorScheduler(spec, changed, cache)
    request = SimpleNamespace(
        request_id="r",
        block_hashes=[f"{number}".encode().ljust(32) for number in range(tokens // spec.tokens_per_hash)],
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        kv_transfer_params=None,
        kv_hints=None,
        skip_reading_prefix_cache=False,
    )
    scheduler.on_new_request(request)
    for _ in range(20):
        found, _ = scheduler.get_num_new_matched_tokens(request, computed)
        if found is not None:
            return int(found)
        store.answer()
    raise AssertionError("it asks for ever")


def places(context: ReqContext, keys: Collection[bytes]) -> dict[ChunkKey, tuple[int, int]]:
    return {
        ChunkKey(key): (get_offload_group_idx(key), int(context.get_offload_key_position(key) or 0))
        for key in keys
    }


MODELS: dict[str, KVCacheConfig] = {
    "full": cache_of(FULL),
    "window": cache_of(window(96)),
    "odd window": cache_of(window(97), FULL),
    "narrow windows": cache_of(window(65), window(40), FULL),
    "kept": cache_of(window(96, extra_retained_tokens=40), FULL),
    "local": cache_of(local(64), FULL),
    "state": cache_of(STATE, STATE, FULL),
    "state and window": cache_of(STATE, window(96), FULL),
    "latent": cache_of(LATENT, window(128)),
    "draft": cache_of(FULL, FULL, drafts=(1,)),
    "window draft": cache_of(FULL, window(96), drafts=(1,)),
    "window, draft": cache_of(window(96), FULL, drafts=(1,)),
    "two sizes": cache_of(FULL, replace(window(96), block_size=2 * BLOCK)),
    "two sizes, full": cache_of(replace(FULL, block_size=2 * BLOCK), window(80)),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_needed_is_what_vllm_loads(config: Any, name: str) -> None:
    """As long a prefix as if everything that is there were found; and nothing of use is left out when all is there."""
    cache, chosen = MODELS[name], random.Random(name)
    groups = groups_of(cache)
    lengths = (64, 97, 128, 129, 200, 320, 321)
    for number in range(120):
        tokens = lengths[number % len(lengths)]
        computed = chosen.choice((0, 0, 64, 128)) if name != "state" else 0
        computed = computed if computed < tokens else 0
        share = chosen.choice((0.0, 0.5, 0.8, 0.95, 1.0))
        gone: dict[bytes, bool] = {}

        def there(key: bytes, gone: dict[bytes, bool] = gone, share: float = share) -> bool:
            return gone.setdefault(key, chosen.random() < share)

        def everything(_: ReqContext, keys: list[bytes]) -> list[bytes]:
            return [key for key in keys if there(key)]

        def ours(context: ReqContext, keys: list[bytes]) -> list[ChunkKey]:
            present = {ChunkKey(key) for key in keys if there(key)}
            return needed(groups, places(context, keys), present, keys_max=10_000)

        whole, part = Store(everything), Store(ours)
        expected = resumed(config, cache, whole, tokens, computed)
        assert resumed(config, cache, part, tokens, computed) == expected, (tokens, computed, share)
        assert part.told <= whole.told


class AtOnce(Store):
    """Answers each key the first time, by what the tier takes vLLM to be about to ask."""

    def __init__(self, groups: list[Group], there: Callable[[bytes], bool]) -> None:
        super().__init__(lambda *_: [])
        self._groups = groups
        self._there = there
        self.expected: set[bytes] = set()

    def lookup(self, key: bytes, context: ReqContext) -> LookupResult:
        if not self.answered:
            asks = range_asked()
            assert asks is not None, "vLLM has changed"
            known = places(context, context._offload_key_positions)
            wanted = asked(self._groups, known, asks)
            self.expected = set(wanted)
            present = [ChunkKey(each) for each in wanted if self._there(each)]
            chosen = needed(self._groups, wanted, present, keys_max=10_000)
            self.told += len(chosen)
            self.answered.update({each: each in chosen for each in wanted})
            assert key in wanted or not wanted
        return LookupResult.HIT if self.answered.get(key) else LookupResult.MISS


@pytest.mark.parametrize("name", MODELS)
def test_what_vllm_will_ask_is_known_at_its_first_question(config: Any, name: str) -> None:
    """All that it asks if it is told to ask again; and it loads as much as if it had been."""
    cache, chosen = MODELS[name], random.Random(name)
    groups = groups_of(cache)
    for number in range(60):
        tokens = (64, 97, 128, 129, 200, 320, 321)[number % 7]
        computed = chosen.choice((0, 0, 64, 128)) if name != "state" else 0
        computed = computed if computed < tokens else 0
        share, gone = chosen.choice((0.0, 0.5, 0.8, 0.95, 1.0)), dict[bytes, bool]()

        def there(key: bytes, gone: dict[bytes, bool] = gone, share: float = share) -> bool:
            return gone.setdefault(key, chosen.random() < share)

        first: list[set[bytes]] = []

        def ours(context: ReqContext, keys: list[bytes], first: list[set[bytes]] = first) -> list[ChunkKey]:
            first.append(set(keys))
            present = {ChunkKey(key) for key in keys if there(key)}
            return needed(groups, places(context, keys), present, keys_max=10_000)

        expected = resumed(config, cache, Store(ours), tokens, computed)
        store = AtOnce(groups, there)
        assert resumed(config, cache, store, tokens, computed) == expected, (tokens, computed, share)
        if first and store.expected:
            assert store.expected == first[0], (tokens, computed)
        else:
            assert expected == 0


def test_a_window_of_a_long_prompt_needs_only_its_end(config: Any) -> None:
    cache = cache_of(window(96), FULL)
    told: list[int] = []

    def ours(context: ReqContext, keys: list[bytes]) -> list[ChunkKey]:
        chosen = needed(
            groups_of(cache), places(context, keys), {ChunkKey(key) for key in keys}, keys_max=10_000
        )
        told.append(len(chosen))
        return chosen

    assert resumed(config, cache, Store(ours), 3201, 0) == 3200
    assert told == [100 + 3]


def test_no_more_than_the_rows_hold() -> None:
    groups = groups_of(cache_of(window(64), FULL))
    asked = {
        ChunkKey(f"{group}/{end}".encode()): (group, end)
        for group in (0, 1)
        for end in range(BLOCK, 321, BLOCK)
    }
    chosen = needed(groups, asked, set(asked), keys_max=7)
    assert sorted(asked[key] for key in chosen) == [
        (0, 128),
        (0, 160),
        *((1, end) for end in range(32, 161, 32)),
    ]


def test_tails_are_taken_whole() -> None:
    """Boundaries inside a block, as vLLM asks for them with states: the longest at which all groups have theirs."""
    groups = groups_of(cache_of(STATE, FULL))
    asked = {ChunkKey(f"{group}/{end}".encode()): (group, end) for end in (56, 48, 40) for group in (0, 1)}
    there = set(asked) - {b"1/56"}
    assert needed(groups, asked, there, keys_max=9) == [b"0/48", b"1/48"]
    assert needed(groups, asked, there - {b"0/48", b"0/40"}, keys_max=9) == []


def test_long_prompts() -> None:
    """A cold one of 100,000 tokens, and one of which every other block is there: nothing is compared pair by pair."""
    groups = groups_of(cache_of(window(4096), STATE, FULL))
    asked = {
        ChunkKey(f"{group}/{end}".encode()): (group, end)
        for group in (0, 1, 2)
        for end in range(BLOCK, 100_001, BLOCK)
    }
    assert needed(groups, asked, set(), keys_max=10_000) == []
    odd = {key for key in asked if asked[key][1] % 64}
    assert needed(groups, asked, odd, keys_max=10_000) == [b"0/32", b"1/32", b"2/32"]


@pytest.mark.parametrize(
    ("cache", "chunk", "field", "said"),
    [
        (cache_of(replace(STATE, mamba_cache_mode="none")), 1, "mamba_cache_mode", "prefix-caching"),
        (cache_of(FULL, window(64)), 2, "blocks_per_chunk", "leave"),
        (cache_of(FULL, local(64)), 4, "blocks_per_chunk", "leave"),
        (cache_of(CrossAttentionSpec(**SHAPE)), 1, "kv_cache_groups", "CrossAttentionSpec"),
        (cache_of(replace(FULL, non_causal=True)), 1, "kv_cache_groups", "not causal"),
        (cache_of(), 1, "kv_cache_groups", "none"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_right_is_refused(cache: KVCacheConfig, chunk: int, field: str, said: str) -> None:
    with pytest.raises(Unsupported, match=said) as refused:
        groups_of(cache, blocks_per_chunk=chunk)
    assert field in str(refused.value.field)


def test_rows_of_several_blocks_are_fine_without_windows() -> None:
    groups = groups_of(cache_of(FULL, STATE), blocks_per_chunk=4)
    assert [(group.kind, group.chunk_tokens) for group in groups] == [("full", 128), ("state", 128)]


def told(heads: int, ranks: int) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads),
    )


@pytest.mark.parametrize(
    ("specs", "heads", "ranks", "replicas"),
    [
        ((LATENT,), 16, 8, 8),
        ((replace(FULL, num_kv_heads=1),), 2, 8, 4),
        ((replace(FULL, num_kv_heads=1),), 8, 8, 1),
        ((replace(FULL, num_kv_heads=2),), 4, 2, 1),
        ((replace(FULL, num_kv_heads=1), replace(FULL, num_kv_heads=2)), 2, 4, 1),
        ((replace(FULL, num_kv_heads=1), STATE), 2, 8, 1),
        ((replace(FULL, num_kv_heads=1), replace(STATE, tp_replicated=True)), 2, 8, 4),
        ((LATENT, replace(FULL, num_kv_heads=1)), 2, 4, 2),
    ],
)
def test_ranks_that_hold_the_same(specs: tuple[Any, ...], heads: int, ranks: int, replicas: int) -> None:
    assert tp_replicas(told(heads, ranks), cache_of(*specs)) == replicas


def test_a_group_says_what_it_is() -> None:
    (group,) = groups_of(cache_of(window(96)))
    assert str(group) == "window of 96 tokens, 2 layers"
    assert isinstance(group, Group)


def test_a_changed_interface_is_told_at_the_start() -> None:
    class Base:
        def lookup(self, key: bytes, req_context: Any, tier: int = 0) -> None: ...

        def load(self, job: Any) -> None: ...

    class Ours(Base):
        def lookup(self, key: bytes, req_context: Any) -> None:  # type: ignore[override]
            ...

        def load(self, job: Any, **more: Any) -> None: ...

    with pytest.raises(Unsupported, match=r"lookup is given tier.*0\.32"):
        check_interface(Ours, Base)
    Ours.__abstractmethods__ = frozenset({"drain"})  # type: ignore[attr-defined]
    with pytest.raises(Unsupported, match="drain is missing"):
        check_interface(Ours, Base)
    check_interface(KVStoreTier, SecondaryTierManager)
    check_interface(KVStoreConnector, KVConnectorBase_V1)
