"""Worker processes and daemons that die, stop and come back at the worst moments: the answers never change."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from kvstore.client import Client, Namespace, connect
from kvstore.gpu_worker.attention import NAME
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.identity import Identity, inert
from kvstore.gpu_worker.layout import Geometry, namespace_of
from kvstore.layout import NamespaceSpec

from ..small_models import tiny_llama
from ..waiting import eventually as eventually

BOUND_S = 60.0
"""Every wait ends by then (a worker imports torch first); it is a failure, never a measurement."""
GONE_S = 2.0
"""So soon nothing of a killed worker is left: that is promised."""
pytestmark = pytest.mark.timeout(6 * BOUND_S)
slow = pytest.mark.slow
"""Nearly all of these are: each starts several processes that import torch."""
NEW = 12
"""Tokens of an answer."""


def text(count: int, seed: int = 1) -> list[int]:
    tokens: list[int] = torch.randint(
        0, 256, (count,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    return tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with four layers: 64 KiB a chunk."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> LlamaForCausalLM:
    loaded: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder)
    return loaded.eval()


@pytest.fixture(scope="module")
def recomputed(model: LlamaForCausalLM) -> Callable[[list[int]], list[int]]:
    """The right answer to a prompt."""
    engine = BatchEngine(model, pool_chunks=16, retain=False)
    return lambda prompt: list(engine.turn("s", prompt, NEW).tokens)


class WorkerProcess:
    """See worker_process.py. It is asked over a unix socket; its output is read all the time."""

    def __init__(self, folder: Path, run_dir: Path, socket_path: Path, arguments: tuple[str, ...]) -> None:
        script = Path(__file__).with_name("worker_process.py")
        self.socket_path = socket_path
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-P", str(script), f"--model={folder}", f"--run-dir={run_dir}"),
                *(
                    f"--socket={socket_path}",
                    "--threads=1",
                    "--pool-bytes=16M",
                    "--no-compute-or-load",
                    *arguments,
                ),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.errors: list[str] = []
        self._asked: http.client.HTTPConnection | None = None
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()
        assert self.process.stdout is not None
        ready = self.process.stdout.readline()  # the test's own limit is the bound
        assert ready, f"the worker ended: {''.join(self.errors)}"
        assert json.loads(ready)["url"] == f"unix:{socket_path}"

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    def connection(self) -> http.client.HTTPConnection:
        made = http.client.HTTPConnection("worker")
        made.sock = socket.socket(socket.AF_UNIX)
        made.sock.settimeout(BOUND_S)
        made.sock.connect(str(self.socket_path))
        return made

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        """Status and answer; `body` may be text that is no JSON."""
        connection = self.connection()
        try:
            connection.request("POST", path, body if isinstance(body, str) else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, json.load(response)
        finally:
            connection.close()

    def send(self, prompt: list[int], session: str = "s") -> None:
        assert self._asked is None
        self._asked = self.connection()
        body = {
            "prompt": prompt,
            "max_tokens": NEW,
            "temperature": 0,
            "session_id": session,
            "return_token_ids": True,
        }
        self._asked.request("POST", "/v1/completions", json.dumps(body))

    def answer(self) -> dict[str, Any]:
        """To what was sent."""
        assert self._asked is not None
        response = self._asked.getresponse()
        answer = json.load(response)
        self._asked.close()
        self._asked = None
        assert response.status == 200, answer
        return {
            "tokens": answer["choices"][0]["token_ids"],
            "reused_tokens": answer["usage"]["prompt_tokens_details"]["cached_tokens"],
            **answer["kvstore"],
        }

    def turn(self, prompt: list[int], session: str = "s") -> dict[str, Any]:
        """An answered turn whose KV is saved."""
        self.send(prompt, session)
        answer = self.answer()
        self.flush()
        return answer

    def flush(self) -> dict[str, int]:
        status, reply = self.post("/flush", {"timeout_s": BOUND_S})
        assert status == 200 and reply["flushed"], reply
        counters: dict[str, int] = reply["counters"]
        return counters

    def wait_until_stopped(self) -> None:
        def stopped() -> bool:
            options = os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG
            state = os.waitid(os.P_PID, self.process.pid, options)
            assert state is None or state.si_code == os.CLD_STOPPED, f"it ended: {''.join(self.errors)}"
            return state is not None

        eventually(stopped)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(BOUND_S)

    def child(self) -> int:
        """Pid of the forked one."""
        match = eventually(lambda: re.search(r"child (\d+)", "".join(self.errors)))
        return int(match[1])

    def close(self) -> None:
        if self._asked is not None:
            self._asked.close()
        if "child" in "".join(self.errors):
            os.kill(self.child(), signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(BOUND_S)
        self._reader.join(BOUND_S)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def start_worker(folder: Path, run_dir: Path) -> Iterator[Callable[..., WorkerProcess]]:
    """Their pools keep nothing that no request holds, unless it is said: what they reuse came from the store."""
    started: list[WorkerProcess] = []

    def start(*arguments: str, retain: bool = False) -> WorkerProcess:
        kept = "--retain" if retain else "--no-retain"
        where = run_dir.with_name(f"w{len(started)}.sock")
        started.append(WorkerProcess(folder, run_dir, where, (kept, *arguments)))
        return started[-1]

    yield start
    for worker in started:
        worker.close()


@pytest.fixture
def client(daemon: Any) -> Iterator[Client]:
    with connect(str(daemon.run_dir), timeout_s=BOUND_S, staging_bytes=4 << 20) as client:
        yield client


def spec_of(model: LlamaForCausalLM) -> NamespaceSpec:
    return namespace_of(model, Geometry.of(model), digest=Identity(model).check().digest, attention=NAME)


@pytest.fixture
def space(client: Client, folder: Path, model: LlamaForCausalLM) -> Namespace:
    """The workers' own namespace."""
    return client.open(spec_of(model))


def held(client: Client) -> dict[str, int]:
    """What workers hold now; and no slot is ever lost."""
    stats = client.stats()
    for pool in stats.pools:
        assert pool.free + pool.reserved + pool.ready + pool.quarantined == pool.capacity
    return {
        "leases": int(stats.gauges["leases"]),
        "pinned_bytes": sum(space.pinned_bytes for space in stats.namespaces),
        "reservations": int(stats.gauges["reservations"]),
        "reserved": sum(pool.reserved for pool in stats.pools),
    }


def test_a_restarted_worker_has_lost_nothing(
    daemon: Any, start_worker: Callable[..., WorkerProcess], recomputed: Callable[..., list[int]]
) -> None:
    prompt = text(150)
    for number in range(2):
        worker = start_worker()
        result = worker.turn(prompt)
        worker.kill()
        assert result["tokens"] == recomputed(prompt)
        assert result["reused_tokens"] == (0 if number == 0 else len(prompt) - 31)
        prompt = [*prompt, *result["tokens"], *text(30, seed=number)]


@slow
def test_what_cannot_be_served_is_said_and_ends_no_worker(
    daemon: Any, start_worker: Callable[..., WorkerProcess], recomputed: Callable[..., list[int]]
) -> None:
    worker = start_worker()
    for body in ({"prompt": [1], "session_id": "s" * 257}, {"prompt": [256]}, {"prompt": [-1]}):
        status, answer = worker.post("/v1/completions", body)
        assert status == 400 and answer["error"]["message"]
    for body in ("", "[]", "5", "[" * 100_000, {"prompt": [1.5]}, {"prompt": []}):
        assert worker.post("/v1/completions", body)[0] == 400
    assert worker.turn(text(70))["tokens"] == recomputed(text(70))


@slow
@pytest.mark.parametrize("forked", [False, True], ids=["alone", "with a forked child"])
@pytest.mark.parametrize("place", ["load:2", "copy:3"])
def test_a_worker_killed_in_mid_load_pins_nothing(
    place: str,
    forked: bool,
    daemon: Any,
    client: Client,
    start_worker: Callable[..., WorkerProcess],
    recomputed: Callable[..., list[int]],
) -> None:
    other = start_worker()
    first = other.turn(text(150))
    prompt = [*text(150), *first["tokens"], *text(20, seed=2)]

    victim = start_worker("--stop-at", place, *(["--fork"] if forked else []))
    victim.send(prompt)
    victim.wait_until_stopped()
    before = held(client)
    assert before["leases"] == 1 and before["pinned_bytes"] > 0
    victim.kill()
    eventually(lambda: held(client) == dict.fromkeys(before, 0), bound_s=GONE_S)
    if forked:
        os.kill(victim.child(), 0)  # it lives
    result = other.turn(prompt)
    assert result["tokens"] == recomputed(prompt)
    assert result["reused_tokens"] == len(prompt) - 21


@slow
@pytest.mark.parametrize("forked", [False, True], ids=["alone", "with a forked child"])
def test_a_worker_killed_in_mid_save_reserves_nothing(
    forked: bool,
    daemon: Any,
    client: Client,
    start_worker: Callable[..., WorkerProcess],
    recomputed: Callable[..., list[int]],
) -> None:
    other = start_worker()
    victim = start_worker("--stop-at", "save:2", *(["--fork"] if forked else []))
    prompt = text(150)
    victim.send(prompt)
    victim.wait_until_stopped()
    before = held(client)
    assert before["reservations"] == 1 and before["reserved"] > 0
    victim.kill()
    eventually(lambda: held(client) == dict.fromkeys(before, 0), bound_s=GONE_S)
    if forked:
        os.kill(victim.child(), 0)
    result = other.turn(prompt)  # of a save that was not committed nothing is visible
    assert result["tokens"] == recomputed(prompt)
    assert result["reused_tokens"] == 0
    prompt = [*prompt, *result["tokens"], 1]
    again = other.turn(prompt)
    assert again["tokens"] == recomputed(prompt)
    assert again["reused_tokens"] == len(prompt) - 2


@slow
@pytest.mark.parametrize("place", ["load:2", "copy:10"])
def test_a_worker_stopped_past_its_lease_computes_what_was_taken_from_it(
    place: str, start_daemon: Callable[..., Any], start_worker: Callable[..., WorkerProcess], request: Any
) -> None:
    """Of the history's three chunks (one is a tail) the first is copied at the stop in the last of four layers: what is
    copied after it is another chunk's bytes, and only the second look at the generations can tell."""
    settings = {"dram_bytes": 16 << 20, "staging_bytes": 32 << 20, "staging_bytes_max": 256 << 20}
    start_daemon(lease_ttl_ms=500, reserve_share_max=1.0, **settings)
    client, space, recomputed = (
        request.getfixturevalue(name) for name in ("client_here", "space_here", "recomputed")
    )
    first = start_worker().turn(text(150))
    prompt = [*text(150), *first["tokens"], *text(20, seed=2)]
    keys = space.keys(prompt)

    stopped = start_worker("--stop-at", place)
    stopped.send(prompt)
    stopped.wait_until_stopped()
    assert space.match(keys).usable == 2
    (pool,) = client.stats().pools
    wanted = space.keys(text(64 * pool.capacity, seed=3))

    def every_slot_is_given_away() -> bool:
        """Another session wants all there is: also what the stopped worker has pinned, once its lease is over."""
        with space.write(wanted) as batch:
            if len(batch.granted) < len(wanted):
                return False
            for index in batch.granted:
                batch.buffer(index)[:] = 0xEE
            return batch.commit().ok

    eventually(every_slot_is_given_away)
    stopped.go_on()
    result = stopped.answer()
    assert result["tokens"] == recomputed(prompt)
    assert result["reused_tokens"] == 0
    assert result["load_failures"] == 1
    stopped.flush()
    assert held(client)["leases"] == 0


@pytest.fixture
def client_here(run_dir: Path) -> Iterator[Client]:
    """Of a daemon that the test itself starts."""
    with connect(str(run_dir), timeout_s=BOUND_S, staging_bytes=24 << 20) as client:
        yield client


@pytest.fixture
def space_here(client_here: Client, folder: Path, model: LlamaForCausalLM) -> Namespace:
    return client_here.open(spec_of(model))


@slow
def test_a_daemon_killed_and_restarted_is_not_missed(
    start_daemon: Callable[..., Any],
    start_worker: Callable[..., WorkerProcess],
    recomputed: Callable[..., list[int]],
) -> None:
    daemon = start_daemon()
    worker = start_worker()
    prompt = text(150)

    def turn() -> dict[str, Any]:
        nonlocal prompt
        result = worker.turn(prompt)
        assert result["tokens"] == recomputed(prompt)
        prompt = [*prompt, *result["tokens"], 1, 2, 3]
        return result

    assert turn()["reused_tokens"] == 0
    assert turn()["reused_tokens"] > 0
    daemon.kill()
    assert turn()["reused_tokens"] == 0
    start_daemon()
    eventually(lambda: turn()["reused_tokens"] > 0)


@pytest.mark.parametrize(
    "place", ["load:2", pytest.param("copy:3", marks=slow), pytest.param("save:1", marks=slow)]
)
def test_a_daemon_killed_in_mid_turn_is_not_missed(
    place: str,
    daemon: Any,
    start_worker: Callable[..., WorkerProcess],
    recomputed: Callable[..., list[int]],
) -> None:
    first = start_worker().turn(text(150))
    prompt = [*text(150), *first["tokens"], *text(20, seed=2)]
    worker = start_worker("--stop-at", place)
    worker.send(prompt)
    worker.wait_until_stopped()
    daemon.kill()
    worker.go_on()
    result = worker.answer()
    assert result["tokens"] == recomputed(prompt)
    worker.flush()
    assert worker.turn(prompt)["tokens"] == recomputed(prompt)


@slow
def test_a_worker_started_before_its_daemon_finds_it(
    start_daemon: Callable[..., Any],
    start_worker: Callable[..., WorkerProcess],
    recomputed: Callable[..., list[int]],
) -> None:
    worker = start_worker()
    prompt = text(150)
    assert worker.turn(prompt)["tokens"] == recomputed(prompt)
    start_daemon()

    def reused() -> bool:
        result = worker.turn([*prompt, 1])
        assert result["tokens"] == recomputed([*prompt, 1])
        return bool(result["reused_tokens"] > 0)

    eventually(reused)


@slow
def test_a_worker_that_is_told_to_end_answers_first_and_saves(
    daemon: Any, space: Namespace, start_worker: Callable[..., WorkerProcess]
) -> None:
    worker = start_worker(retain=True)
    connection = worker.connection()
    body = {"prompt": text(150), "max_tokens": 300, "temperature": 0, "session_id": "s"}
    body |= {
        "stream": True,
        "return_token_ids": True,
    }  # of a model without a tokenizer there is no text to stream
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    worker.process.send_signal(signal.SIGTERM)
    said = response.read()
    connection.close()
    assert said.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"length"' in said
    assert worker.process.wait(BOUND_S) == 0
    info = space.get_session("s")
    assert info is not None and sum(entry.token_count for entry in info.entries) == 150 + 299


@slow
def test_workers_take_turns_at_one_session(
    daemon: Any, start_worker: Callable[..., WorkerProcess], recomputed: Callable[..., list[int]]
) -> None:
    workers = [start_worker(), start_worker()]
    prompt = text(100)
    for number in range(6):
        result = workers[number % 2].turn(prompt)
        assert result["tokens"] == recomputed(prompt)
        assert result["reused_tokens"] == (0 if number == 0 else len(prompt) - 4)
        prompt = [*prompt, *result["tokens"], 1, 2, 3]


@slow
@pytest.mark.parametrize("protection", ["sealed", "group"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_are_bit_equal_to_those_of_an_engine_that_kept_its_kv(
    dtype: torch.dtype, protection: str, start_daemon: Callable[..., Any], folder: Path
) -> None:
    """Through shared memory, every turn by an engine that knows nothing."""
    daemon = start_daemon(protection=protection)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    seen: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(inert(lambda module, args, out: seen.append(out.clone())))
    kept = BatchEngine(model, pool_chunks=16)
    prompt = text(100)
    for number in range(4):
        there = kept.turn("s", prompt, NEW)
        expected = seen[:]
        seen.clear()
        engine = BatchEngine(
            model,
            lambda: connect(str(daemon.run_dir), timeout_s=BOUND_S, staging_bytes=4 << 20),
            pool_chunks=16,
        )
        try:
            result = engine.turn("s", prompt, NEW)
            assert engine.flush(BOUND_S)
        finally:
            engine.close()
        assert result.reused.dram == there.reused.hbm == (0 if number == 0 else len(prompt) - 51)
        assert len(seen) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))
        seen.clear()
        prompt = [*prompt, *result.tokens, *text(50, seed=number)]
    kept.close()
    hook.remove()
