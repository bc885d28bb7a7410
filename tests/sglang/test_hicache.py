"""SGLang's own factory, host pools and controller drive our backend, against a real daemon. The controller is made
without its constructor, which wants a GPU's streams; the methods that are called are SGLang's."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.cache_controller import HiCacheController, PrefetchOperation, StorageOperation
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from kvstore.client import connect
from kvstore.client.prompts import prompt_keys
from kvstore.errors import ConfigError, Unavailable, Unsupported
from kvstore.gpu_worker.connectors.sglang import identity
from kvstore.gpu_worker.connectors.sglang.identity import namespace_of

LAYERS, HEADS, DIM, PAGE, TOKENS = 4, 2, 64, 16, 512
BOUND_S = 60.0


class Daemon:
    def __init__(self, folder: Path) -> None:
        self.run_dir = str(folder / "run")
        self._arguments = [
            *(f"--run-dir={self.run_dir}", "--dram-bytes=32M", "--segment-bytes=8M", "--staging-bytes=8M"),
            *(
                f"--ssd-dir={folder / 'ssd'}",
                "--ssd-bytes=128M",
                "--ssd-slab-bytes=8M",
                "--durable-within-ms=100",
            ),
        ]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-P", "-m", "kvstore", *self._arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        wait_until(self._answers)

    def _answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None, "it ended"
        with contextlib.suppress(Unavailable), connect(self.run_dir):
            return True
        return False

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(BOUND_S)

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(BOUND_S)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path)
    made.start()
    yield made
    with contextlib.suppress(ProcessLookupError):
        assert made.process is not None
        os.kill(made.process.pid, signal.SIGCONT)
    made.kill()


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))


class Scheduler:
    """What makes SGLang's backends, as far as ours looks at it."""

    def __init__(self, model: torch.nn.Module, **arguments: Any) -> None:
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        self.server_args = SimpleNamespace(**{"dtype": "bfloat16", "kv_cache_dtype": "auto", **arguments})

    def make(self, config: HiCacheStorageConfig, pool: Any) -> Any:
        return StorageBackendFactory.create_backend("dynamic", config, pool)


def pool_of(layout: str = "page_first") -> MHATokenToKVPoolHost:
    def buffers() -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros(TOKENS, HEADS, DIM, dtype=torch.bfloat16) for _ in range(LAYERS))

    def pointers(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)

    k, v = buffers(), buffers()
    kv = KVBuffers(k=k, v=v, k_data_ptrs=pointers(k), v_data_ptrs=pointers(v), layout=KVBufferLayout.NHD)
    info = MHABufferInfo(
        buffers=kv,
        page_size=PAGE,
        head_num=HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    pool = MHATokenToKVPoolHost(
        *(info, 2.0, 0, PAGE, layout),
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=LAYERS,
    )
    torch.seed()
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    return pool


def config_of(
    daemon: Daemon, *, rank: int = 0, ranks: int = 1, stages: int = 1, mla: bool = False, **more: Any
) -> HiCacheStorageConfig:
    extra = {
        "backend_name": "kvstore",
        "module_path": "kvstore.gpu_worker.connectors.sglang",
        "class_name": "KVStoreHiCache",
        "interface_v1": more.pop("interface_v1", 1),
        "kvstore": {"run_dir": daemon.run_dir, **more.pop("settings", {})},
    }
    return HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=ranks,
        pp_rank=0,
        pp_size=stages,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=mla,
        enable_storage_metrics=True,
        is_page_first_layout=True,
        model_name="tiny",
        extra_config=extra,
        **more,
    )


class Engine:
    """One rank."""

    def __init__(
        self, daemon: Daemon, *, seed: int = 0, layout: str = "page_first", arguments: Any = (), **config: Any
    ) -> None:
        self.pool = pool_of(layout)
        self.config = config_of(daemon, **config)
        self.scheduler = Scheduler(model_of(seed), **dict(arguments))
        self.backend = self.scheduler.make(self.config, self.pool)
        self.backend.register_mem_pool_host(self.pool)
        self.backend.on_host_pools_registered()
        controller = self.controller = HiCacheController.__new__(HiCacheController)
        controller.storage_backend = self.backend
        controller.storage_host_pool = controller.mem_pool_host = self.pool
        controller.page_size = PAGE
        controller.enable_storage = False  # no threads of its own
        controller.storage_stop_event = threading.Event()
        controller.prefetch_sync_queue = queue.Queue()
        controller.write_queue, controller.load_queue = [], []
        controller.ack_write_queue, controller.ack_load_queue = [], []
        controller.page_get_func = controller._page_get_zero_copy
        controller.page_set_func = controller._page_set_zero_copy

    def save(self, tokens: Sequence[int]) -> tuple[list[torch.Tensor], int]:
        """The pages, and how many tokens SGLang takes for saved."""
        where = self.pool.alloc(len(tokens))
        pages = [self.page(where, number) for number in range(len(tokens) // PAGE)]
        hashes = self.hashes(tokens)
        operation = StorageOperation(where, list(tokens), hash_value=hashes)
        self.controller._page_backup(operation)
        self.pool.free(where)
        return pages, operation.completed_tokens

    def hashes(self, tokens: Sequence[int]) -> list[str]:
        operation = PrefetchOperation("hashes", list(tokens), None, None)
        self.controller._storage_hit_query(operation)
        return list(operation.all_hash_values)

    def found(self, tokens: Sequence[int]) -> int:
        """Tokens that a look-up promises."""
        return int(
            self.controller._storage_hit_query(PrefetchOperation("found", list(tokens), None, None))[1]
        )

    def load(self, tokens: Sequence[int]) -> list[torch.Tensor]:
        """The pages that SGLang takes for loaded."""
        operation = PrefetchOperation("load", list(tokens), None, None)
        hashes, count = self.controller._storage_hit_query(operation)
        where = self.pool.alloc(max(PAGE, count))
        operation.hash_value, operation.host_indices = hashes, where[:count]
        pages = self.controller._page_transfer(operation)
        loaded = [self.page(where, number) for number in range(pages)]
        self.pool.free(where)
        return loaded

    def page(self, where: torch.Tensor, number: int) -> torch.Tensor:
        return self.pool.get_data_page(int(where[number * PAGE])).clone()

    def flush(self) -> None:
        self.controller.reset()

    def update_weights(self, **request: Any) -> None:
        """By SGLang's own method, of no runners: what it does to ours is in the way there."""
        manager = object.__new__(SchedulerWeightUpdaterManager)
        manager.metrics_collector = manager.draft_worker = None
        manager.tp_worker = SimpleNamespace(weight_update_runners=list)
        manager.scheduler = SimpleNamespace(record_weight_version_change=lambda **_: None)
        manager.update_weights_from_disk(
            SimpleNamespace(
                model_path="", load_format="", recapture_cuda_graph=False, weight_version=None, **request
            )
        )

    def close(self) -> None:
        self.backend.close()


@pytest.fixture
def engines(daemon: Daemon) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(**given: Any) -> Engine:
        made.append(Engine(daemon, **given))
        wait_until(lambda: made[-1].backend._link.promising and made[-1].backend._namespace(60_000))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def wait_until(fact: Callable[[], Any]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def tokens_of(number: int, pages: int = 10) -> list[int]:
    return list(range(1000 * number, 1000 * number + pages * PAGE))


def same(mine: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(mine) == len(others) and all(map(torch.equal, mine, others))


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_another_engine_loads_what_one_saved_bit_for_bit(engines: Callable[..., Engine], layout: str) -> None:
    one = engines(layout=layout)
    tokens = tokens_of(1)
    assert one.found(tokens) == 0 and one.load(tokens) == []
    pages, saved = one.save(tokens[: 7 * PAGE])
    assert saved == 7 * PAGE
    other = engines(layout=layout)
    assert other.found(tokens) == 7 * PAGE
    assert same(other.load(tokens), pages)
    assert other.load(tokens_of(2)) == []


def test_the_daemon_hears_of_what_was_not_found(engines: Callable[..., Engine], daemon: Daemon) -> None:
    """Of a look-up that finds nothing no read tells."""
    one = engines()
    tokens = tokens_of(1)
    one.save(tokens[: 7 * PAGE])

    def lookups() -> tuple[int, int]:
        with connect(daemon.run_dir) as client:
            (space,) = client.stats().namespaces
            return space.lookups, space.hits

    before = lookups()
    assert one.found(tokens_of(2)) == 0
    wait_until(lambda: lookups() == (before[0] + 1, before[1]))
    assert one.found(tokens) == 7 * PAGE
    wait_until(lambda: lookups() == (before[0] + 2, before[1]))


def test_what_differs_in_weights_arithmetic_layout_or_salt_shares_nothing(
    engines: Callable[..., Engine],
) -> None:
    tokens = tokens_of(1)
    assert engines().save(tokens)[1] == len(tokens)
    assert engines(seed=1).found(tokens) == 0
    assert engines(layout="layer_first").found(tokens) == 0
    assert engines(arguments={"dtype": "float16"}).found(tokens) == 0
    assert engines(settings={"salt": "other"}).found(tokens) == 0
    assert engines().found(tokens) == len(tokens)


def test_more_than_one_batch_and_more_than_dram(engines: Callable[..., Engine], daemon: Daemon) -> None:
    """200 pages are two batches of SGLang's; then the daemon is stopped, and all comes back from its SSD."""
    one = engines()
    saved = {}
    for number in range(1, 25):
        one.pool.kv_buffer.copy_(torch.randn(one.pool.kv_buffer.shape))
        tokens = tokens_of(number, 40)
        saved[number] = (tokens, one.save(tokens)[0])
    daemon.stop()
    daemon.start()
    other = engines()
    for tokens, pages in saved.values():
        loaded = other.load(tokens)
        assert same(loaded, pages[: len(loaded)])
    assert same(other.load(saved[24][0]), saved[24][1])


def test_all_ranks_have_to_have_saved(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[bytes, bytes]] = [(b"weights of rank 0", bytes(16)), (b"weights of rank 1", b"x" * 16)]
    monkeypatch.setattr(identity.find_owner, "__defaults__", (lambda mine: said,))
    ranks = [engines(rank=rank, ranks=2) for rank in range(2)]
    tokens = tokens_of(1)
    first, _ = ranks[0].save(tokens)
    assert ranks[0].found(tokens) == ranks[1].found(tokens) == 0
    second, _ = ranks[1].save(tokens)
    assert not same(first, second)
    assert same(ranks[0].load(tokens), first) and same(ranks[1].load(tokens), second)


def test_a_rank_that_cannot_name_its_weights_stops_all(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity.find_owner, "__defaults__", (lambda mine: [mine, (b"", bytes(16))],))
    with pytest.raises(Unsupported, match="another rank"):
        engines(ranks=2)


def test_experts_on_other_ranks_are_part_of_the_weights(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DP attention: one rank has a replica's attention, all ranks together its experts."""
    tokens = tokens_of(1)
    for others, found in ((b"experts", 0), (b"other experts", 0), (b"experts", len(tokens))):
        monkeypatch.setattr(
            identity.find_owner, "__defaults__", (lambda mine, others=others: [mine, (others, bytes(16))],)
        )
        one = engines(arguments={"tp_size": 2})
        assert one.found(tokens) == found
        one.save(tokens)
        assert one.found(tokens) == len(tokens)


def test_code_that_is_not_sglangs_is_part(
    engines: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_of(1)
    source = tmp_path / "ours_for_a_test.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    for code, found in (("", 0), ("# another", 0), ("", len(tokens))):
        source.write_text(f"import torch\n\nclass Model(torch.nn.Linear):\n    pass\n{code}")
        sys.modules.pop("ours_for_a_test", None)
        importlib.invalidate_caches()
        module = importlib.import_module("ours_for_a_test")
        monkeypatch.setattr(f"{__name__}.model_of", lambda seed, module=module: _filled(module.Model(8, 8)))
        one = engines()
        assert one.found(tokens) == found
        one.save(tokens)
        monkeypatch.undo()
        monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("ours_for_a_test", None)


def _filled(model: torch.nn.Module) -> torch.nn.Module:
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    return model


def test_no_error_reaches_sglangs_threads(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that ends would be waited for by every request to come."""
    one = engines()
    tokens = tokens_of(1)
    keys, where = one.hashes(tokens), one.pool.alloc(len(tokens))
    strange = SimpleNamespace(prefix_keys=["no hash"])
    assert one.backend.batch_set_v1(keys, where, strange) == [False] * len(keys)
    assert one.backend.batch_get_v1(["no hash"], where[:PAGE]) == [False]
    assert one.backend.batch_exists(["no hash"]) == 0
    namespace, _ = one.backend._namespace(1_000)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    for name in ("match", "read", "write"):
        monkeypatch.setattr(namespace, name, broken)
    assert one.found(tokens) == 0
    assert one.backend.batch_get_v1(keys, where) == [False] * len(keys)
    assert one.backend.batch_set_v1(keys, where) == [False] * len(keys)
    monkeypatch.undo()
    assert one.backend.batch_set_v1(keys, where) == [True] * len(keys)


def test_latent_kv_is_stored_once_for_all_ranks(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [(b"weights of rank 0", bytes(16)), (b"weights of rank 1", bytes(16))]
    monkeypatch.setattr(identity.find_owner, "__defaults__", (lambda mine: said,))
    writer, reader = (engines(rank=rank, ranks=2, mla=True) for rank in range(2))
    assert writer.config.is_storage_writer and not reader.config.is_storage_writer
    tokens = tokens_of(1)
    pages, _ = writer.save(tokens)
    assert same(reader.load(tokens), pages)


def test_changed_weights_find_nothing_of_those_before(engines: Callable[..., Engine]) -> None:
    one = engines()
    old, new = tokens_of(1), tokens_of(2)
    pages, _ = one.save(old)
    one.update_weights()
    assert one.found(old) == 0 and one.load(old) == []
    assert one.save(new)[1] == 0, "what is in SGLang's caches is of the old weights"
    one.flush()
    wait_until(lambda: one.backend._namespace(1_000))
    assert one.found(old) == one.found(new) == 0
    after, saved = one.save(new)
    assert saved == len(new) and same(one.load(new), after)
    other = engines()
    assert other.found(new) == 0, "nobody knows what weights these are"
    assert same(other.load(old), pages), "and the old ones are still the old ones"


def test_a_flush_alone_keeps_what_was_stored(engines: Callable[..., Engine]) -> None:
    one = engines()
    pages, _ = one.save(tokens_of(1))
    one.flush()
    assert same(one.load(tokens_of(1)), pages)


@pytest.mark.parametrize("what", ["save", "load", "found"])
def test_weights_that_change_in_the_middle_spoil_what_is_under_way(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    one = engines()
    tokens = tokens_of(1)
    pages, _ = one.save(tokens)
    keys, others = one.hashes(tokens), one.hashes(tokens_of(2))
    namespace, _ = one.backend._namespace(1_000)
    for name in ("match", "read", "write"):
        asked = getattr(namespace, name)

        def changing(*given: Any, _asked: Any = asked, **named: Any) -> Any:
            one.update_weights()
            one.flush()
            return _asked(*given, **named)

        monkeypatch.setattr(namespace, name, changing)
    if what == "save":
        assert one.backend.batch_set_v1(others, one.pool.alloc(len(tokens))) == [False] * len(others)
    elif what == "load":
        where = one.pool.alloc(len(tokens))
        assert one.backend.batch_get_v1(keys, where) == [False] * len(keys)
    else:
        assert one.found(tokens) == 0
    other = engines()
    assert other.found(tokens_of(2)) == 0 and same(other.load(tokens), pages)


def test_clear_forgets_for_this_engine(engines: Callable[..., Engine]) -> None:
    one = engines()
    one.save(tokens_of(1))
    one.backend.clear()
    wait_until(lambda: one.backend._namespace(1_000))
    assert one.found(tokens_of(1)) == 0


def test_a_daemon_that_is_killed_is_missed_and_comes_back(
    engines: Callable[..., Engine], daemon: Daemon
) -> None:
    one = engines()
    pages, _ = one.save(tokens_of(1))
    daemon.kill()
    # Shared memory may serve for some seconds more, and serves what was saved.
    loaded = one.load(tokens_of(1))
    assert same(loaded, pages[: len(loaded)])
    wait_until(lambda: one.found(tokens_of(1)) == 0)
    assert one.load(tokens_of(1)) == [] and one.save(tokens_of(2))[1] == 0
    daemon.start()
    wait_until(lambda: one.save(tokens_of(3, 2))[1] == 2 * PAGE)
    loaded = one.load(tokens_of(1))
    assert same(loaded, pages[: len(loaded)])


def test_a_daemon_that_stands_still_is_not_waited_for(engines: Callable[..., Engine], daemon: Daemon) -> None:
    one = engines(settings={"lookup_ms": 200, "load_ms": 200, "save_ms": 200})
    pages, _ = one.save(tokens_of(1))
    keys, where = one.hashes(tokens_of(1)), one.pool.alloc(10 * PAGE)
    assert daemon.process is not None
    os.kill(daemon.process.pid, signal.SIGSTOP)
    begun = time.monotonic()
    # What is in DRAM is read without the daemon for some seconds; then nothing is there.
    assert one.backend.batch_exists(keys) in (0, 10)
    for number, loaded in enumerate(one.backend.batch_get_v1(keys, where)):
        assert not loaded or torch.equal(one.page(where, number), pages[number])
    wait_until(lambda: one.backend.batch_exists(keys) == 0)
    assert one.backend.batch_get_v1(keys, where) == [False] * 10
    assert one.backend.batch_set_v1(one.hashes(tokens_of(2)), where) == [False] * 10
    assert time.monotonic() - begun < BOUND_S
    os.kill(daemon.process.pid, signal.SIGCONT)
    wait_until(lambda: one.found(tokens_of(1)) == 10 * PAGE)


def test_without_a_daemon_sglang_starts_and_goes_on(tmp_path: Path) -> None:
    nowhere = SimpleNamespace(run_dir=str(tmp_path / "nowhere"))
    one = Engine(nowhere, settings={"lookup_ms": 50, "load_ms": 50, "save_ms": 50, "connect_ms": 100})
    assert one.found(tokens_of(1)) == 0 and one.save(tokens_of(1))[1] == 0
    one.close()


def test_hashes_of_prompts_are_sglangs(engines: Callable[..., Engine], daemon: Daemon) -> None:
    """A scheduler that knows token ids alone gives hints for what SGLang will ask for."""
    one = engines()
    tokens = tokens_of(1)
    one.save(tokens)
    spec = namespace_of(one.config, one.pool, one.backend._owner, one.backend._settings)
    assert [key.hex() for key in prompt_keys(spec, b"", [*tokens, 1])] == one.hashes(tokens)
    with connect(daemon.run_dir) as client:
        assert [key.hex() for key in client.prompt_keys("tiny", tokens)] == one.hashes(tokens)
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    class Key(list):
        extra_key = None
        cache_salt = "tenant a"

    salted = get_storage_hash_str(Key(tokens), None, page_size=PAGE)
    assert [key.hex() for key in prompt_keys(spec, b"", tokens, cache_salt="tenant a")] == salted


def test_metrics_are_those_that_sglang_asks_for(engines: Callable[..., Engine]) -> None:
    one = engines()
    one.save(tokens_of(1))
    one.load(tokens_of(1))
    stats = one.backend.get_stats()
    assert stats.backup_pgs == [10] and stats.prefetch_pgs == [10]
    assert all(speed > 0 for speed in itertools.chain(stats.backup_bandwidth, stats.prefetch_bandwidth))
    assert one.backend.get_stats().backup_pgs == []


@pytest.mark.parametrize(
    ("given", "error", "why"),
    [
        ({"interface_v1": 0}, ConfigError, "interface_v1"),
        ({"settings": {"run_directory": "/x"}}, ConfigError, "run_directory"),
        ({"settings": {"load_ms": "5"}}, ConfigError, "load_ms"),
        ({"arguments": {"enable_lora": True}}, Unsupported, "--enable-lora"),
        ({"arguments": {"speculative_algorithm": "EAGLE"}}, Unsupported, "--speculative-algorithm"),
        ({"arguments": {"disaggregation_mode": "decode"}}, Unsupported, "--disaggregation-mode"),
        (
            {"arguments": {"disaggregation_mode": "prefill", "enable_pd_role_switch": True}},
            Unsupported,
            "--disaggregation-mode",
        ),
        ({"arguments": {"nnodes": 2, "tp_size": 2}}, Unsupported, "--nnodes"),
        ({"stages": 2}, Unsupported, "--pp-size"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(
    daemon: Daemon, given: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        Engine(daemon, **given)


def test_weights_that_nobody_can_look_at_have_to_be_named(daemon: Daemon) -> None:
    config = config_of(daemon)
    with pytest.raises(ConfigError, match="weights_digest"):
        StorageBackendFactory.create_backend("dynamic", config, pool_of())
    named = config_of(daemon, settings={"weights_digest": "llama of monday"})
    StorageBackendFactory.create_backend("dynamic", named, pool_of()).close()


def test_a_model_of_several_pools_is_refused(engines: Callable[..., Engine]) -> None:
    one = engines()
    one.backend.register_mem_host_pool_v2(one.pool, "kv")
    with pytest.raises(Unsupported, match="mamba"):
        one.backend.register_mem_host_pool_v2(one.pool, "mamba")


def test_weight_updates_that_are_not_known_are_refused(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        SchedulerWeightUpdaterManager, "update_weights_by_magic", lambda _: None, raising=False
    )
    with pytest.raises(Unsupported, match="update_weights_by_magic"):
        Engine(daemon)
