"""One request at a time, fp32: whatever becomes of the store, the answer is that of an engine without it."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.tiers.format import slot_bytes

from .conftest import BLOCK, Daemon, Engine, prompt, restorable, whole_blocks

SHARD_BYTES = 4 * 2 * BLOCK * 2 * 64 * 4
Same = Callable[..., None]


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    (folder / "ssd").mkdir()
    daemon = Daemon(
        folder,
        ssd_dir=folder / "ssd",
        ssd_bytes=256 << 20,
        ssd_slab_bytes=16 << 20,
        durable_within_ms=300,
    )
    yield daemon
    daemon.stop()


@pytest.fixture(scope="module")
def engine(daemon: Daemon, launch_engine: Callable[..., Engine]) -> Engine:
    return launch_engine("engine", daemon.run_dir, {"lookup_ms": 5000, "load_ms": 10_000})


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


def test_a_fresh_process_restores(
    engine: Engine, daemon: Daemon, same: Same, launch_engine: Callable[..., Engine]
) -> None:
    prompts = [prompt(1, 200), prompt(2, 97), prompt(3, 513), prompt(4, 64), prompt(5, 31)]
    same(prompts, engine.generate(*prompts))
    computed = [len(tokens) + 8 - 1 for tokens in prompts]  # the last token of an answer is not fed back
    assert engine.counts()["blocks_saved"] == sum(count // BLOCK for count in computed)

    fresh = launch_engine("fresh", daemon.run_dir, {"lookup_ms": 10_000, "load_ms": 10_000})
    outputs = fresh.generate(*prompts)
    same(prompts, outputs)
    restored = [restorable(tokens) for tokens in prompts]
    assert [output["cached"] for output in outputs] == restored
    metrics = fresh.ask(metrics=True)
    assert metrics["vllm:external_prefix_cache_hits"] == sum(restored)
    assert metrics["vllm:kvstore_hit_tokens"] == sum(restored)
    assert fresh.counts()["blocks_loaded"] == sum(len(tokens) // BLOCK for tokens in prompts)
    # What an answer of 8 tokens makes full is there already, of a prompt that was all there too.
    assert fresh.counts()["blocks_saved"] == 0
    assert fresh.counts()["tracked"] == 0
    assert fresh.end() == 0


def test_what_an_answer_added_is_restored(engine: Engine, control: Engine) -> None:
    """Decoded tokens are saved block by block, and are what a next turn finds."""
    first = prompt(10, 70)
    told = engine.generate(first, max_tokens=100)[0]["tokens"]
    following = first + told + prompt(11, 9)
    engine.forget()
    before = engine.counts()["hit_tokens"]
    output = engine.generate(following)
    assert engine.counts()["hit_tokens"] - before >= (70 + 100 - 1) // BLOCK * BLOCK
    # Bit for bit what an engine says that has the very same blocks, decoded one token at a time, in its own cache.
    control.ask(forget=True)
    control.generate(first, max_tokens=100)
    assert output == control.generate(following)


def test_salts_never_meet(engine: Engine, same: Same) -> None:
    tokens = prompt(20, 129)
    engine.generate(tokens, salt="ours")
    for salt in ("theirs", None):
        engine.forget()
        before = engine.counts()
        more = {"salt": salt} if salt else {}
        same([tokens], engine.generate(tokens, **more))
        assert engine.counts()["hit_tokens"] == before["hit_tokens"]
    engine.forget()
    before = engine.counts()
    engine.generate(tokens, salt="ours")
    assert engine.counts()["hit_tokens"] == before["hit_tokens"] + 128


def test_reset_cache_begins_a_new_epoch(engine: Engine, same: Same) -> None:
    tokens = prompt(30, 129)
    engine.generate(tokens)
    for resets in (1, 2):
        engine.forget()
        assert engine.ask(reset=True)["reset"]
        before = engine.counts()
        assert before["resets"] == resets
        same([tokens], engine.generate(tokens))
        assert engine.counts()["hit_tokens"] == before["hit_tokens"]
    engine.forget()
    before = engine.counts()
    engine.generate(tokens)
    assert engine.counts()["hit_tokens"] == before["hit_tokens"] + 128


def test_asleep_nothing_is_loaded_or_saved_and_awake_all_is_there(engine: Engine, same: Same) -> None:
    """vLLM's CPU ranks ignore the calls, so the engine goes on computing; nobody can know that from the call."""
    known, new = prompt(32, 129), prompt(33, 129)
    engine.generate(known)
    engine.forget()
    assert engine.ask(rpc="sleep", kwargs={"level": 1})["called"]
    before = engine.counts()
    same([known, new], engine.generate(known, new))
    after = engine.counts()
    assert (after["hit_tokens"], after["blocks_saved"]) == (before["hit_tokens"], before["blocks_saved"])
    assert engine.ask(rpc="wake_up")["called"]
    engine.forget()
    outputs = engine.generate(known, new)
    same([known, new], outputs)
    assert [output["cached"] for output in outputs] == [128, 0]
    engine.forget()
    outputs = engine.generate(known, new)
    same([known, new], outputs)
    assert [output["cached"] for output in outputs] == [128, 128]


def test_daemon_restarted(engine: Engine, daemon: Daemon, same: Same, whole: None) -> None:
    tokens = prompt(40, 300)
    engine.generate(tokens)
    engine.forget()
    daemon.stop()
    daemon.start()
    wait_until(lambda: hits_again(engine, 41))
    before = engine.counts()
    same([tokens], engine.generate(tokens))
    assert engine.counts()["hit_tokens"] - before["hit_tokens"] == whole_blocks(tokens), "from SSD"


def test_flipped_bytes_are_a_miss(engine: Engine, daemon: Daemon, same: Same, whole: None) -> None:
    tokens = prompt(50, 300)
    engine.generate(tokens)
    engine.forget()
    daemon.stop()
    for slab in (daemon.folder / "ssd").glob("slab-*.kvs"):
        with slab.open("r+b") as file:
            step = slot_bytes(SHARD_BYTES, direct=False)
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
    for moment in range(4):
        engine.generate(tokens)
        engine.forget()
        engine.send(generate=[{"tokens": tokens, "max_tokens": 40}])
        threading.Event().wait(0.03 * moment)
        daemon.kill()
        same([tokens], engine.receive()["outputs"], max_tokens=40)
        same([tokens], engine.generate(tokens, max_tokens=40), max_tokens=40)
        daemon.start()
        wait_until(lambda seed=61 + moment: hits_again(engine, seed))


def test_deadline_hit(engine: Engine, daemon: Daemon, same: Same, whole: None) -> None:
    """A daemon that hangs is worse than a dead one. What is in DRAM is found and loaded without it."""
    tokens = prompt(70, 300)
    engine.generate(tokens)
    engine.forget()
    daemon.signal(signal.SIGSTOP)
    before = engine.counts()
    others = prompt(72, 300)
    same([tokens, others], engine.generate(tokens, others))
    assert engine.counts()["hit_tokens"] - before["hit_tokens"] == whole_blocks(tokens)
    daemon.signal(signal.SIGCONT)
    wait_until(lambda: hits_again(engine, 71))


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


def test_disk_full(folder: Path, launch_engine: Callable[..., Engine], same: Same, engine: Engine) -> None:
    """A real file system that is full: what is in DRAM serves, the rest is computed."""
    disk = folder / "full"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m,mode=700", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        small = Daemon(
            folder / "small",
            ssd_dir=disk,
            ssd_bytes=256 << 20,
            ssd_slab_bytes=8 << 20,
            ssd_index_bytes=8 << 20,
            dram_bytes=8 << 20,
            durable_within_ms=300,
        )
        filling = launch_engine("filling", small.run_dir)
        prompts = [prompt(90 + number, 600) for number in range(16)]
        for _ in range(2):
            same(prompts, filling.generate(*prompts))
            filling.forget()
        assert filling.counts()["blocks_saved"] * SHARD_BYTES > 24 << 20
        assert filling.end() == 0
        small.stop()
    finally:
        subprocess.run(["umount", str(disk)], check=True)
