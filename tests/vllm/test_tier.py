"""The store below vLLM's own host memory: one request at a time, fp32. Whatever becomes of it, the answer is that of an
engine without any connector. vLLM's offloading worker refuses a CPU, so the copies are `cpu_spec`'s."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.tiers.format import slot_bytes

from .conftest import BLOCK, Daemon, Engine, prompt, whole_blocks

ROW_BYTES = 4 * 2 * BLOCK * 2 * 64 * 4
Same = Callable[..., None]
Tiered = Callable[..., Engine]


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    home = folder / "tier"
    home.mkdir()
    (home / "ssd").mkdir()
    daemon = Daemon(
        home, ssd_dir=home / "ssd", ssd_bytes=256 << 20, ssd_slab_bytes=16 << 20, durable_within_ms=300
    )
    yield daemon
    daemon.stop()


def tiering(
    run_dir: Path,
    *,
    rows: int = 128,
    chunk: int = 1,
    others: Sequence[dict[str, Any]] = (),
    **settings: Any,
) -> dict[str, Any]:
    """What a user would write, with the spec for CPUs instead of vLLM's own. `others`: tiers that are asked before."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CPUTieringSpec",
            "spec_module_path": "kvstore.gpu_worker.connectors.vllm.cpu_spec",
            "cpu_bytes_to_use": rows * ROW_BYTES * chunk,
            "blocks_per_chunk": chunk,
            "secondary_tiers": [
                *others,
                {
                    "type": "KVStoreTier",
                    "module_path": "kvstore.gpu_worker.connectors.vllm.tier",
                    "run_dir": str(run_dir),
                    "compute_or_load": False,
                    **settings,
                },
            ],
        },
    }


@pytest.fixture(scope="session")
def tiered(launch_engine: Callable[..., Engine]) -> Tiered:
    """tiered(name, daemon, rows=..., chunk=..., **tier settings) -> Engine"""

    def launch(name: str, daemon: Daemon, options: dict[str, Any] | None = None, **settings: Any) -> Engine:
        return launch_engine(
            name, None, kv_transfer_config=tiering(daemon.run_dir, **settings), **(options or {})
        )

    return launch


@pytest.fixture(scope="module")
def engine(daemon: Daemon, tiered: Tiered) -> Engine:
    return tiered("tier", daemon, lookup_ms=2000, load_ms=3000, save_ms=2000)


def test_a_fresh_process_restores(engine: Engine, daemon: Daemon, same: Same, tiered: Tiered) -> None:
    prompts = [prompt(1, 200), prompt(2, 97), prompt(3, 513), prompt(4, 65), prompt(5, 31)]
    same(prompts, engine.generate(*prompts))
    saved = engine.counts()
    assert saved["blocks_saved"] == sum(len(tokens) // BLOCK for tokens in prompts)
    assert saved["bytes_saved"] == saved["blocks_saved"] * ROW_BYTES

    fresh = tiered("tier-fresh", daemon)
    outputs = fresh.generate(*prompts)
    same(prompts, outputs)
    restored = [whole_blocks(tokens) for tokens in prompts]
    assert [output["cached"] for output in outputs] == restored
    counts = fresh.counts()
    metrics = fresh.ask(metrics=True)
    assert metrics["vllm:external_prefix_cache_hits"] == sum(restored)
    assert counts["blocks_loaded"] == metrics["vllm:kvstore_tier_blocks_loaded"]
    assert counts["blocks_saved"] == counts.get("bugs", 0) == counts["tracked"] == 0
    assert fresh.end() == 0


@pytest.fixture
def whole(daemon: Daemon) -> Iterator[None]:
    """The daemon is there again after a test that takes it away."""
    yield
    if daemon._process is None:
        daemon.start()
    daemon.signal(signal.SIGCONT)


def wait_until(what: Callable[[], bool]) -> None:
    for _ in range(400):
        if what():
            return
        threading.Event().wait(0.05)
    raise AssertionError("it did not come")


def hits_again(engine: Engine, seed: int) -> bool:
    """Whether the engine saves and loads: told by a prompt of its own."""
    tokens = prompt(seed, 2 * BLOCK + 1)
    engine.generate(tokens)
    engine.forget()
    before = engine.counts()["blocks_loaded"]
    engine.generate(tokens)
    return engine.counts()["blocks_loaded"] == before + 2


def test_salts_never_meet(engine: Engine, same: Same) -> None:
    tokens = prompt(20, 129)
    engine.generate(tokens, salt="ours")
    for salt in ("theirs", None):
        engine.forget()
        before = engine.counts()
        more = {"salt": salt} if salt else {}
        same([tokens], engine.generate(tokens, **more))
        assert engine.counts()["blocks_loaded"] == before["blocks_loaded"]
    engine.forget()
    before = engine.counts()
    same([tokens], engine.generate(tokens, salt="ours"), salt="ours")
    assert engine.counts()["blocks_loaded"] == before["blocks_loaded"] + 4


def test_a_reset_begins_a_new_epoch(engine: Engine, same: Same) -> None:
    """The weights may be others then. vLLM leaves its tiers alone, but lets their jobs end."""
    tokens = prompt(30, 129)
    engine.generate(tokens)
    for resets in (1, 2):
        engine.forget()
        assert engine.ask(reset=True)["reset"]
        before = engine.counts()
        assert before["resets"] == resets
        same([tokens], engine.generate(tokens))
        assert engine.counts()["blocks_loaded"] == before["blocks_loaded"]
    engine.forget()
    before = engine.counts()
    engine.generate(tokens)
    assert engine.counts()["blocks_loaded"] == before["blocks_loaded"] + 4


def test_daemon_restarted(engine: Engine, daemon: Daemon, same: Same, whole: None) -> None:
    tokens = prompt(40, 300)
    engine.generate(tokens)
    engine.forget()
    daemon.stop()
    daemon.start()
    wait_until(lambda: hits_again(engine, 41))
    before = engine.counts()
    same([tokens], engine.generate(tokens))
    assert engine.counts()["blocks_loaded"] - before["blocks_loaded"] == 9, "from SSD"


def test_flipped_bytes_are_a_miss(engine: Engine, daemon: Daemon, same: Same, whole: None) -> None:
    """What the engine has in its own memory is in the daemon's no more: it comes back from SSD."""
    tokens = prompt(50, 300)
    engine.generate(tokens)
    engine.forget()
    daemon.stop()
    for slab in (daemon.folder / "ssd").glob("slab-*.kvs"):
        with slab.open("r+b") as file:
            step = slot_bytes(ROW_BYTES, direct=False)
            for start in range(4096, slab.stat().st_size - step + 1, step):
                file.seek(start + step // 2)
                (byte,) = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 1]))
    daemon.start()
    wait_until(lambda: hits_again(engine, 51))
    before = engine.counts()
    same([tokens], engine.generate(tokens))
    after = engine.counts()
    assert after["blocks_loaded"] == before["blocks_loaded"]
    assert after["blocks_saved"] > before["blocks_saved"], "and saved anew"


def test_killed_in_mid_request(engine: Engine, daemon: Daemon, same: Same, whole: None) -> None:
    """It may die before the lookup, in the load or while saving: at several moments of a request."""
    tokens = prompt(60, 500)
    for moment in range(3):
        engine.generate(tokens)
        engine.forget()
        engine.send(generate=[{"tokens": tokens, "max_tokens": 40}])
        threading.Event().wait(0.03 * moment)
        daemon.kill()
        same([tokens], engine.receive()["outputs"], max_tokens=40)
        # What vLLM has in its own cache now may have come in part from a load that was cut short
        same([tokens], engine.generate(tokens, max_tokens=40), exactly=False, max_tokens=40)
        daemon.start()
        wait_until(lambda seed=61 + moment: hits_again(engine, seed))


def test_a_daemon_that_hangs(engine: Engine, daemon: Daemon, same: Same, whole: None) -> None:
    """Lookups are misses, saves fail; what it read late is not to be found afterwards."""
    tokens, others = prompt(70, 300), [prompt(72 + number, 200) for number in range(3)]
    engine.generate(tokens)
    engine.forget()
    daemon.signal(signal.SIGSTOP)
    before = engine.counts()
    same([tokens, *others], engine.generate(tokens, *others))
    assert engine.ask(flush=60.0)["flushed"], "every job was told of"
    assert engine.counts()["blocks_loaded"] == before["blocks_loaded"]
    daemon.signal(signal.SIGCONT)
    wait_until(lambda: hits_again(engine, 71))
    engine.forget()
    same([tokens, *others], engine.generate(tokens, *others))


def test_aborted_while_it_loads(engine: Engine, same: Same) -> None:
    tokens = prompt(80, 900)
    engine.generate(tokens)
    for step in range(4):
        engine.forget()
        told = engine.ask(generate=[{"tokens": tokens}, {"tokens": prompt(81, 50)}], abort={"0": step})
        assert told["outputs"][1]["finish"] == "length"
        assert engine.counts()["tracked"] == 0
    engine.forget()
    same([tokens], engine.generate(tokens))


def test_orders_that_come_with_a_request(engine: Engine, same: Same) -> None:
    """Known or not, they fail nothing."""
    tokens = prompt(85, 100)
    known = [
        ("prefetch", {}),
        ("prefetch", {"block_hashes": ["ab" * 32]}),
        ("pin", {}),
        ("dance", {"a": [None]}),
    ]
    actions = [
        {"action_id": str(number), "action_type": kind, "action_version": "1", "payload": payload}
        for number, (kind, payload) in enumerate(known)
    ]
    before = engine.ask(flush=60.0)["scheduler"]
    outputs = engine.ask(generate=[{"tokens": tokens, "kv_hints": actions}])["outputs"]
    same([tokens], outputs)
    names = ("accepted", "clipped", "deferred", "rejected")
    answers: dict[str, int] = {}
    for _ in range(600):  # the daemon answers for what it is told, in its time
        after = engine.ask(flush=60.0)["scheduler"]
        answers = {name: after.get(f"actions_{name}", 0) - before.get(f"actions_{name}", 0) for name in names}
        if sum(answers.values()) == len(known):
            break
        threading.Event().wait(0.05)
    # What is named is unknown to the store, and what is pinned is saved, or about to be.
    assert (answers["clipped"], answers["rejected"]) == (0, 1)
    assert answers["accepted"] + answers["deferred"] == 3 and answers["deferred"] >= 2
    assert after.get("bugs", 0) == 0


def test_memory_that_is_always_full(daemon: Daemon, tiered: Tiered, same: Same) -> None:
    """vLLM has fewer rows than one of the prompts, and eight of them at once."""
    small = tiered("tier-small", daemon, rows=12)
    prompts = [prompt(100 + number, 65 + 61 * number) for number in range(8)]
    same(prompts, small.generate(*prompts))
    for _ in range(2):
        assert small.ask(flush=60.0)["flushed"]
        small.forget()
        together = small.ask(generate=[{"tokens": tokens} for tokens in prompts])["outputs"]
        for tokens, output in zip(prompts, together, strict=True):
            assert output["finish"] == "length", output
            # In a batch, log-probabilities are rounded otherwise.
            same([tokens], [{**output, "cached": -1}])
    counts = small.counts()
    assert counts["blocks_loaded"] > 0 and counts["tracked"] == counts.get("bugs", 0) == 0
    small.forget()
    same(prompts, small.generate(*prompts))
    assert small.end() == 0


def test_block_sizes_never_meet(daemon: Daemon, tiered: Tiered, same: Same) -> None:
    """Chunks of two blocks, and blocks of twice the size: as many tokens and bytes, laid out differently."""
    prompts = [prompt(120, 200), prompt(121, 333)]
    engines = [
        tiered("tier-pairs", daemon, chunk=2),
        tiered("tier-large", daemon, {"block_size": 2 * BLOCK}, rows=128, chunk=1),
    ]
    for number, other in enumerate(engines):
        outputs = other.generate(*prompts)
        for output, tokens in zip(outputs, prompts, strict=True):
            same([tokens], [{**output, "cached": -1}])
        counts = other.counts()
        assert counts["blocks_loaded"] == 0, number
        assert counts["blocks_saved"] == sum(len(tokens) // (2 * BLOCK) for tokens in prompts)
        other.forget()
        again = other.generate(*prompts)
        assert [output["cached"] for output in again] == [192, 320]
        assert other.counts()["blocks_loaded"] == 3 + 5
        for output, tokens in zip(again, prompts, strict=True):
            same([tokens], [{**output, "cached": -1}])


def test_disk_full(folder: Path, tiered: Tiered, same: Same) -> None:
    """A real file system that is full: what is in DRAM serves, the rest is computed."""
    disk = folder / "tier-full"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m,mode=700", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        small = Daemon(
            folder / "tier-filled",
            ssd_dir=disk,
            ssd_bytes=256 << 20,
            ssd_slab_bytes=8 << 20,
            ssd_index_bytes=8 << 20,
            dram_bytes=8 << 20,
            durable_within_ms=300,
        )
        filling = tiered("tier-filling", small, rows=64)
        prompts = [prompt(140 + number, 600) for number in range(12)]
        for _ in range(2):
            same(prompts, filling.generate(*prompts))
            filling.forget()
        assert filling.counts()["blocks_saved"] * ROW_BYTES > 16 << 20
        assert filling.end() == 0
        small.stop()
    finally:
        subprocess.run(["umount", str(disk)], check=True)
