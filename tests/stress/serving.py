"""Worker processes that serve over HTTP while everything around them breaks; the oracle is the same engine without a
store.

Two workers of one random model, one that keeps chunks in its pool and one that does not, and a daemon under both.
Clients ask turns of a few conversations, several of one conversation at one time and at both workers, some of
conversations that outgrow the window, read the answers whole or as streams, and leave at random moments. Meanwhile, in
*rounds* of a few seconds, daemon and workers are killed (-9) at any moment, in the middle of a load and of a save,
and started again; the daemon is stopped for a while; its disk is full, fails or is slow. A *life* is a folder with
several rounds; in every third one the SSD is too small, and on a file system of its own, which is full now and then,
where root can mount one.

What must hold:
  - an answer that ends has the tokens that the engine computes without a store; of a conversation that was cut, these
    or those of an engine whose store never failed (what is kept then still carries what was cut)
  - no request takes longer than ANSWER_S, and none ends with an error but at a worker that was killed
  - after each round, with everything up again: what a worker answered and flushed is hit by the other one; a
    conversation that is cut goes on with what was kept; what is also durable is there after the faults of the next
    round (conversations that nobody asks for meanwhile)
  - then no worker holds chunks, nothing is leased or reserved, and no canary has found a difference
  - at the end of a life all processes end in good order, and `kvctl check` finds nothing wrong

    python tests/stress/serving.py [--rounds 20] [--seconds 4] [--seed N] [--canary NAME] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import http.client
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # a script's own folder is not searched (PYTHONSAFEPATH)
sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from common import (
    BOUND_S,
    Daemon,
    Hang,
    Running,
    Weather,
    Wrong,
    check_directory,
    client_of,
    goal,
    log_lines,
    until,
)

from kvstore.option_types import above_zero, whole

CHUNK_TOKENS = 16
WINDOW = 256
"""Of conversations that are cut."""
POSITIONS = 1024
POOL_BYTES = "2M"
"""128 chunks: not enough for all clients at one time."""
CLIENTS = 4
ANSWER_S = 90.0
"""Deadline of an answer. Alone one takes some 50 ms."""
START_S = 240.0
"""Of workers, which import torch first, on a machine that does much else."""
CLEAR = 1e-3
"""So far apart the two largest logits of each token of an answer are: rounding decides nothing."""
PLACES = ("load", "save")
CANARIES = ("wrong", "forgetful", "deaf")
"""Bugs to plant into the workers: one copy in some is not what the store has; one chunk in some, always the same ones,
is counted as saved and is not there; an answer in some is never given."""
LOST_IN = 8


# ------------------------------------------------------------------------------------------------- worker processes


def serve(arm: Path, canary: str, arguments: Sequence[str]) -> None:
    """A worker, which kills whom the file `arm` names (`place`, `after` how many calls there, `pid`) in the middle of a
    copy."""
    import kvstore.client.lease
    from kvstore.errors import StoreError
    from kvstore.gpu_worker import worker
    from kvstore.gpu_worker.saver import Saver
    from kvstore.gpu_worker.serve.service import Job

    mine = arm.with_name(f"armed-{os.getpid()}")
    lock = threading.Lock()
    armed: dict[str, Any] = {}

    def pass_by(place: str) -> None:
        """The file tells that it is armed still: whoever heals the world takes it away."""
        with lock:
            if armed and not mine.exists():
                armed.clear()
            if not armed:
                try:
                    os.rename(arm, mine)
                    armed.update(json.loads(mine.read_text()))
                except FileNotFoundError:
                    return
            if armed["place"] != place:
                return
            armed["after"] -= 1
            if armed["after"] > 0:
                return
            pid = armed["pid"] or os.getpid()
            armed.clear()
            try:
                mine.unlink()
            except FileNotFoundError:
                return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    lease: Any = kvstore.client.lease
    copy_pairs, shard, outputs = lease.copy_pairs, Saver._shard, Job.outputs
    calls = itertools.count(1)

    def copying(pairs: Any) -> Any:
        pass_by("load")
        if canary == "wrong" and next(calls) % 40 == 0:
            return None  # what was in the pool before stays
        return copy_pairs(pairs)

    def saving(self: Any, *which: Any) -> Any:
        pass_by("save")
        return shard(self, *which)

    lease.copy_pairs, Saver._shard = copying, saving  # type: ignore[method-assign]
    if canary == "forgetful":
        save_batch = Saver._save_batch

        def losing(self: Any, save: Any, keys: Any, *rest: Any) -> list[bool]:
            fine = save_batch(self, save, keys, *rest)
            lost = [key for key, saved in zip(keys, fine, strict=True) if saved and key[0] % LOST_IN == 0]
            with contextlib.suppress(StoreError):  # a daemon that is away has not got it either
                if lost:
                    save.turn.namespace.forget(keys=lost)
            return fine

        Saver._save_batch = losing  # type: ignore[method-assign]
    if canary == "deaf":

        async def never(self: Any) -> Any:
            number = 0
            async for output in outputs(self):
                number += 1
                if next(calls) % 500 == 0:
                    threading.Event().wait()
                yield output

        Job.outputs = never  # type: ignore[assignment, method-assign]
    worker.main(arguments)


class Worker(Running):
    """One after the other, at the same socket. What each says on stderr is in its log."""

    def __init__(self, folder: Path, number: int, canary: str, *arguments: str) -> None:
        self.number = number
        self.path = folder / f"w{number}.sock"
        self.log = folder / f"worker-{number}.log"
        self._command = [
            *(sys.executable, "-P", str(Path(__file__).resolve()), "--serve", str(folder / "arm")),
            *(
                f"--canary={canary}",
                "--",
                f"--model={folder.parent / 'model'}",
                f"--run-dir={folder / 'run'}",
            ),
            *(f"--socket={self.path}", "--threads=1", f"--pool-bytes={POOL_BYTES}", "--no-compute-or-load"),
            *(f"--chunk-tokens={CHUNK_TOKENS}", f"--truncate-tokens={WINDOW}", "--canary-every=5"),
            *("--prefill-tokens=128", *arguments),
        ]
        self.killed: set[int] = set()
        """Pids of those that were killed on purpose."""
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log
            )

    def kill(self) -> None:
        self.killed.add(self.pid)
        self.process.kill()
        self.process.wait()

    def connection(self, timeout_s: float = ANSWER_S) -> http.client.HTTPConnection:
        made = http.client.HTTPConnection("worker")
        made.sock = socket.socket(socket.AF_UNIX)
        made.sock.settimeout(timeout_s)
        try:
            made.sock.connect(str(self.path))
        except OSError:
            made.sock.close()
            raise
        return made

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The answer, decoded; OSError while there is no worker."""
        with contextlib.closing(self.connection()) as connection:
            connection.request(method, path, None if body is None else json.dumps(body))
            try:
                response = connection.getresponse()
                said = response.read()
            except TimeoutError:
                raise TimeoutError(
                    f"no answer of worker {self.number} to {path} in {ANSWER_S:.0f} s"
                ) from None
        if response.status != 200:
            raise Wrong(f"worker {self.number} answers {path} with {response.status}: {said[:500]!r}")
        return said.decode() if path == "/metrics" else json.loads(said)

    def is_ready(self) -> bool:
        if not self.alive:
            raise Wrong(f"worker {self.number} ended by itself: {self.tail()}")
        try:
            return bool(self.call("GET", "/health")["store"] == "connected")
        except (OSError, http.client.HTTPException):
            return False

    def metric(self, name: str) -> float:
        for line in self.call("GET", "/metrics").splitlines():
            if line.startswith(f"kvstore_worker_{name} "):
                return float(line.split()[-1])
        raise Wrong(f"no metric {name}")

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-1500:]


# ------------------------------------------------------------------------------------------------------ conversations


@dataclass(frozen=True)
class Ask:
    prompt: list[int]
    count: int
    """Tokens of the answer."""
    right: tuple[list[int], ...]
    """What it may be."""


@dataclass(frozen=True)
class Talk:
    name: str
    cut: bool
    asks: list[Ask] = field(repr=False)


class Script:
    """All that will ever be asked, and the right answers."""

    def __init__(self, folder: Path, chance: random.Random, talks: int, turns: int) -> None:
        import torch
        from small_models import tiny_llama
        from transformers import LlamaForCausalLM

        from kvstore.gpu_worker.attention import NAME
        from kvstore.gpu_worker.batching import BatchEngine
        from kvstore.gpu_worker.identity import Identity
        from kvstore.gpu_worker.layout import Geometry, namespace_of
        from kvstore.gpu_worker.truncation import Truncation

        torch.set_num_threads(1)
        tiny_llama(seed=chance.randrange(100), positions=POSITIONS).save_pretrained(folder / "model")
        self.model: Any = LlamaForCausalLM.from_pretrained(folder / "model").eval()
        digest = Identity(self.model).check().digest
        geometry = Geometry.of(self.model, CHUNK_TOKENS)
        self.spec = namespace_of(self.model, geometry, digest=digest, attention=NAME)
        (folder / "oracle").mkdir()
        daemon = Daemon(folder / "oracle", {"dram_bytes": "128M", "log_level": "warning"})
        options: dict[str, Any] = {"pool_chunks": 128, "chunk_tokens": CHUNK_TOKENS, "retain": False}
        client_of(folder / "oracle" / "run").close()  # it has started
        connect = lambda: client_of(folder / "oracle" / "run")  # noqa: E731
        plain = BatchEngine(self.model, **options)
        masked = BatchEngine(self.model, truncation=Truncation(WINDOW), **options)
        stored = BatchEngine(self.model, connect, truncation=Truncation(WINDOW), **options)
        common = self._text(chance, 50)
        self.talks = []
        for number in range(talks):
            cut = number % 3 == 2
            engines = (stored, masked) if cut else (plain,)
            begin = (common if chance.random() < 0.4 else []) + self._text(chance, chance.randrange(5, 90))
            self.talks.append(Talk(f"s{number}", cut, self._converse(chance, engines, begin, turns)))
        for engine in (plain, masked, stored):
            engine.close()
        if daemon.stop() != 0:
            raise Wrong("the oracle's daemon did not end well")

    @staticmethod
    def _text(chance: random.Random, count: int) -> list[int]:
        return [chance.randrange(256) for _ in range(count)]

    def _converse(
        self, chance: random.Random, engines: Sequence[Any], begin: list[int], turns: int
    ) -> list[Ask]:
        asks: list[Ask] = []
        history = begin
        while len(asks) < turns:
            prompt = [*history, *self._text(chance, chance.randrange(10, 70))]
            count = chance.randrange(4, 20)
            found = [engine.turn("oracle", prompt, count) for engine in engines]
            if not all(engine.flush(BOUND_S) for engine in engines):
                raise Hang("the oracle does not save")
            if min(min(turn.gaps) for turn in found) < CLEAR:
                continue
            asks.append(Ask(prompt, count, tuple(list(turn.tokens) for turn in found)))
            history = [*prompt, *found[0].tokens]
        return asks


# ------------------------------------------------------------------------------------------------------------ clients


class Clients:
    """Threads that ask until they are told to stop."""

    def __init__(self, workers: Sequence[Worker], talks: Sequence[Talk], seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[BaseException] = []
        self._workers, self._talks = workers, talks
        self._stop = threading.Event()
        self._lock = threading.Lock()  # guards `counts` and `_next`
        self._next = {talk.name: 0 for talk in talks}
        """Which turn of each comes next."""
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed} {n}"),), daemon=True)
            for n in range(CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(ANSWER_S + BOUND_S)
            if thread.is_alive():
                raise Hang("a client waits for an answer for ever")
        if self.problems:
            raise self.problems[0]

    def _run(self, chance: random.Random) -> None:
        try:
            while not self._stop.is_set() and not self.problems:
                talk, worker = chance.choice(self._talks), chance.choice(self._workers)
                # Of few conversations, so that the same turn, or the one before, is often asked at one time
                at = max(0, self._next[talk.name] - (chance.random() < 0.2))
                self._ask(chance, talk, at, worker)
        except BaseException as problem:
            self.problems.append(problem)

    def _ask(self, chance: random.Random, talk: Talk, at: int, worker: Worker) -> None:
        pid = worker.pid
        leaves = chance.random() < 0.3
        try:
            end = leave(chance, worker, talk, at) if leaves else read(chance, worker, talk, at)
        except TimeoutError:
            raise Hang(
                f"no answer of worker {worker.number} to {talk.name}.{at} in {ANSWER_S:.0f} s"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            end = "worker away"
            if worker.pid == pid and worker.alive:
                self._check_away(worker, pid, error)
        with self._lock:
            self.counts[end] += 1
            if end.endswith("answers") and self._next[talk.name] == at:
                self._next[talk.name] = (at + 1) % len(talk.asks)

    def _check_away(self, worker: Worker, pid: int, error: Exception) -> None:
        """Only one that was killed, or starts, gives no answer."""
        if isinstance(error, FileNotFoundError | ConnectionRefusedError):
            self._stop.wait(0.05)
            return
        deadline = time.monotonic() + 2  # one that kills itself is dead a moment later than its sockets
        while time.monotonic() < deadline:
            if worker.pid != pid or not worker.alive:
                return
            time.sleep(0.01)
        raise Wrong(f"worker {worker.number}, which lives, broke a connection: {error!r}")


def body_of(talk: Talk, at: int, *, stream: bool) -> dict[str, Any]:
    ask = talk.asks[at]
    body = {
        "prompt": ask.prompt,
        "max_tokens": ask.count,
        "temperature": 0,
        "session_id": talk.name,
        "return_token_ids": True,
        "stream": stream,
    }
    return body if talk.cut else body | {"truncation": "disabled"}


def read(chance: random.Random, worker: Worker, talk: Talk, at: int) -> str:
    """To the end."""
    if chance.random() < 0.5:
        return check(talk, at, answer(worker, talk, at)[0], worker) + "answers"
    deadline = time.monotonic() + ANSWER_S
    tokens, done = [], False
    with contextlib.closing(worker.connection()) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body_of(talk, at, stream=True)))
        response = connection.getresponse()
        if response.status != 200:
            raise Wrong(f"{talk.name}.{at} is answered with {response.status}: {response.read(500)!r}")
        for line in response:
            if time.monotonic() > deadline:
                raise TimeoutError
            if line.strip() == b"data: [DONE]":
                done = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    raise Wrong(f"{talk.name}.{at} ends with {event}")
                for choice in event["choices"]:
                    tokens += choice["token_ids"]
    if not done:
        raise http.client.IncompleteRead(b"", None)
    return check(talk, at, tokens, worker) + "streamed answers"


def answer(worker: Worker, talk: Talk, at: int) -> tuple[list[int], dict[str, Any]]:
    """Its tokens, and the whole of it."""
    said = worker.call("POST", "/v1/completions", body_of(talk, at, stream=False))
    return said["choices"][0]["token_ids"], said


def check(talk: Talk, at: int, tokens: list[int], worker: Worker) -> str:
    """Which of two right answers it is: "kept " or "recomputed "."""
    right = talk.asks[at].right
    if tokens not in right:
        raise Wrong(f"worker {worker.number} answers turn {at} of {talk} with {tokens}, not {right}")
    return "" if right[0] == right[-1] else "kept " if tokens == right[0] else "recomputed "


def leave(chance: random.Random, worker: Worker, talk: Talk, at: int) -> str:
    """At a random moment: in the request, before the answer, or in it."""
    body = json.dumps(body_of(talk, at, stream=chance.random() < 0.7)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: w\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with contextlib.closing(worker.connection()) as connection:
        assert connection.sock is not None
        where = chance.random()
        if where < 0.15:
            connection.sock.sendall((head + body)[: chance.randrange(len(head) + len(body))])
        else:
            connection.sock.sendall(head + body)
            if where < 0.6:
                time.sleep(chance.random() ** 2 * 0.2)
            else:
                for _ in range(chance.randrange(1, 6)):
                    connection.sock.recv(chance.choice((1, 200, 1000)))
    return "left"


# --------------------------------------------------------------------------------------------------------------- life


class Life:
    """One folder, one set of settings, daemon and workers."""

    def __init__(
        self, folder: Path, seed: int, script: Script, *, small: bool, canary: str, spared: bool
    ) -> None:
        """`spared`: no worker is killed."""
        self.folder, self.script, self.small, self.spared = folder, script, small, spared
        self.last = ""
        """What was looked at last."""
        self.chance = random.Random(seed)
        folder.mkdir()
        self.counts: Counter[str] = Counter()
        self.weather = Weather(folder)
        self.weather.set()
        self.disk = Disk(folder / "disk", small=small)
        self.settings: dict[str, Any] = {
            "dram_bytes": self.chance.choice(("4M", "64M")),
            "segment_bytes": "1M",
            "ssd_dir": self.disk.folder / "ssd",
            "ssd_bytes": "12M" if small and not self.disk.mounted else "64M",
            "ssd_slab_bytes": "2M",
            "ssd_index_bytes": "4M",
            "ssd_deadline_ms": 2_000,
            "durable_within_ms": 300,
            "staging_bytes": "2M",
            "staging_bytes_max": "32M",
            "scrub_bytes_per_s": "1M",
            "log_level": "debug",
            "drain_ms": 200,
        }
        self.daemon = Daemon(folder, self.settings)
        self.workers = [
            Worker(folder, 0, canary, "--no-retain"),
            Worker(folder, 1, canary, "--retain", "--read-buffer=1"),
        ]
        talks = list(script.talks)
        self.chance.shuffle(talks)
        whole = [talk for talk in talks if not talk.cut]
        self.apart = whole[: max(1, len(whole) // 4)]
        """Nobody asks for these while things break."""
        self.asked = [talk for talk in talks if talk not in self.apart]
        self.promised: dict[str, int] = {}
        """Of talks that are apart: the turn that is durable."""
        self.turn = 0

    def round(self, seconds: float) -> None:
        self.counts["rounds"] += 1
        clients = Clients(self.workers, self.asked, self.chance.randrange(1 << 30))
        try:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and not clients.problems:
                self.fault()
                self.restart()
            self.heal()
        finally:
            clients.stop()
            self.counts.update(clients.counts)
        until(self.ready, "the workers do not find the daemon again", START_S)
        self.judge()

    # ---------------------------------------------------------------------------------------------------------- faults

    def fault(self) -> None:
        faults: dict[Callable[[], None], int] = {
            self.kill_daemon: 3,
            self.kill_in_a_copy: 6,
            self.kill_worker: 0 if self.spared else 1,
            self.stop_daemon: 2,
            self.spoil_the_disk: 3,
            self.fill_the_disk: 3 if self.small else 0,
            self.flush_a_worker: 2,
        }
        (what,) = self.chance.choices(list(faults), list(faults.values()))
        self.pause(0.3)
        self.counts[what.__name__.replace("_", " ")] += 1
        what()

    def pause(self, most_s: float) -> None:
        time.sleep(self.chance.random() * most_s)

    def kill_daemon(self) -> None:
        self.counts["killed"] += self.daemon.alive
        self.daemon.kill()

    def kill_in_a_copy(self) -> None:
        place = self.chance.choice(PLACES)
        whom = self.daemon.pid if self.spared or self.chance.random() < 0.8 else 0
        new = self.folder / "arm.new"
        new.write_text(
            json.dumps({"place": place, "after": self.chance.choice((1, 1, 2, 5, 20)), "pid": whom})
        )
        os.replace(new, self.folder / "arm")
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            if not self.daemon.alive or not all(worker.alive for worker in self.workers):
                self.counts[f"killed in a {place}"] += 1
                self.counts["killed"] += 1
                return
            time.sleep(0.01)

    def kill_worker(self) -> None:
        self.chance.choice(self.workers).kill()

    def stop_daemon(self) -> None:
        if self.daemon.alive:
            os.kill(self.daemon.pid, signal.SIGSTOP)
            self.pause(2.0)
            os.kill(self.daemon.pid, signal.SIGCONT)

    def spoil_the_disk(self) -> None:
        faults: list[dict[str, Any]] = [
            {"calls": ["write", "allocate"], "files": "slab-*", "do": "ENOSPC"},
            {"calls": ["index_commit", "index_put"], "do": "ENOSPC"},
            {"calls": ["read"], "files": "slab-*", "do": "EIO", "count": self.chance.randrange(1, 5)},
            {"calls": ["read"], "files": "slab-*", "do": "flip", "count": self.chance.randrange(1, 3)},
            {"calls": ["read"], "files": "slab-*", "do": "delay", "ms": 300},
            {"calls": ["write", "sync"], "do": "delay", "ms": 200},
        ]
        self.weather.set(self.chance.choice(faults))
        self.pause(1.5)
        self.weather.set()

    def fill_the_disk(self) -> None:
        self.disk.fill()
        self.pause(1.5)
        self.disk.empty()

    def flush_a_worker(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            self.chance.choice(self.workers).call("POST", "/flush", {"timeout_s": BOUND_S})

    def restart(self) -> None:
        """Whoever is dead."""
        self.pause(0.6)
        if not self.daemon.alive:
            self.daemon = Daemon(self.folder, self.settings)
        for worker in self.workers:
            if not worker.alive:
                status = worker.process.returncode
                if status != -signal.SIGKILL:
                    raise Wrong(f"worker {worker.number} ended with {status}: {worker.tail()}")
                worker.start()
        self.disarm()

    def disarm(self) -> None:
        for path in self.folder.glob("arm*"):
            path.unlink(missing_ok=True)

    def heal(self) -> None:
        self.weather.set()
        self.disk.empty()
        self.disarm()
        time.sleep(0.1)
        self.restart()

    def ready(self) -> bool:
        if not self.daemon.alive or not all(worker.alive for worker in self.workers):
            self.restart()  # a worker had taken the file that arms it, and used it late
        return all(worker.is_ready() for worker in self.workers)

    # --------------------------------------------------------------------------------------------------------- judging

    def judge(self) -> None:
        with contextlib.closing(client_of(self.folder / "run")) as client:
            space = client.open(self.script.spec)
            if not self.small:
                for talk in self.apart:
                    if talk.name in self.promised:
                        self.judge_promise(space, talk)
            self.turn += 1
            for talk in self.apart:
                self.judge_talk(talk, self.turn % len(talk.asks))
            whole = [talk for talk in self.asked if not talk.cut]
            for talk in self.chance.sample(whole, min(2, len(whole))):
                self.judge_talk(talk, self.chance.randrange(len(talk.asks)))
            if cut := [talk for talk in self.asked if talk.cut]:
                self.judge_cut(self.chance.choice(cut))
            if not self.small:
                self.until(lambda: self.is_durable(client), "what was saved is not durable")
                self.promised = {talk.name: self.turn % len(talk.asks) for talk in self.apart}
            self.judge_quiet(client)

    def judge_promise(self, space: Any, talk: Talk) -> None:
        from kvstore.types import Outcome, Reason

        ask = talk.asks[self.promised[talk.name]]
        keys = space.keys([*ask.prompt, *ask.right[0][:-1]])

        def there() -> bool:
            found = space.match(keys)
            lost = [
                (number, str(reason))
                for number, (outcome, reason) in enumerate(zip(found.outcomes, found.reasons, strict=True))
                if outcome is not Outcome.HIT and reason not in (Reason.ON_SSD, Reason.SLOW)
            ]
            if lost and lost[0][1] not in (str(Reason.UNAVAILABLE), str(Reason.CORRUPT)):
                raise Wrong(f"of {talk}, which was durable, there is lost: {lost}")
            return not lost

        until(there, f"what was durable of {talk} is not there")
        self.counts["promises kept"] += 1
        self.counts["chunks promised"] += len(keys)

    def judge_talk(self, talk: Talk, at: int) -> None:
        """Answered and flushed at one worker, hit at the other."""
        other, first = self.workers
        full = (len(talk.asks[at].prompt) - 1) // CHUNK_TOKENS * CHUNK_TOKENS

        def hit() -> bool:
            check(talk, at, answer(first, talk, at)[0], first)
            self.flush(first)
            tokens, said = answer(other, talk, at)
            check(talk, at, tokens, other)
            self.counts["asked to be hit"] += 1
            cached = said["usage"]["prompt_tokens_details"]["cached_tokens"]
            self.last = f"{talk.name}.{at}: {said['usage']} {said['kvstore']}"
            return bool(cached >= full)

        if self.small:
            hit()
            return
        self.until(hit, "what was flushed is not hit")
        self.counts["flushed and hit"] += 1

    def judge_cut(self, talk: Talk) -> None:
        """From its first turn on, each saved before the next one, at either worker."""

        def goes_on() -> bool:
            kept = True
            for at in range(len(talk.asks)):
                worker = self.chance.choice(self.workers)
                kept &= check(talk, at, answer(worker, talk, at)[0], worker) != "recomputed "
                self.flush(worker)
            return kept

        if self.small:
            goes_on()
            return
        until(goes_on, f"a conversation that was cut does not go on with what was kept: {talk}")
        self.counts["cut and kept"] += 1

    @staticmethod
    def flush(worker: Worker) -> None:
        if not worker.call("POST", "/flush", {"timeout_s": BOUND_S})["flushed"]:
            raise Hang("a worker does not save")

    def until(self, what: Callable[[], bool], why: str) -> None:
        def holds() -> bool:
            if not self.daemon.alive:
                raise Wrong(f"the daemon ended by itself with status {self.daemon.process.returncode}")
            return what()

        try:
            until(holds, why)
        except Hang:
            raise Hang(f"{why}: {self.last}") from None

    def is_durable(self, client: Any) -> bool:
        ssd = client.stats().ssd
        self.last = str(ssd)
        return not (ssd.to_store or ssd.reserved or ssd.oldest_not_durable_ms)

    def judge_quiet(self, client: Any) -> None:
        def quiet() -> bool:
            stats = client.stats()
            self.last = str(stats.gauges)
            return (
                stats.gauges["leases"] == 0
                and stats.gauges["reservations"] == 0
                and all(worker.metric('pool_chunks{state="held"}') == 0 for worker in self.workers)
                and all(worker.metric('requests{state="running"}') == 0 for worker in self.workers)
            )

        self.until(quiet, "something is held by nobody")
        for worker in self.workers:
            health = worker.call("GET", "/health")
            if health["status"] != "ok" or health["canary"] != "ok" or health["sharing"] != "on":
                raise Wrong(f"worker {worker.number} is not well: {health}")
            for name in (
                "load_failures",
                "preemptions",
                "requests_cut",
                "truncations_recomputed",
                "loads_overlapped",
                "canary_checks",
            ):
                # Of the workers that live now: those before them took their counters with them
                self.counts[f"worker {name}"] = max(
                    self.counts[f"worker {name}"], int(worker.metric(f"{name}_total"))
                )

    # ------------------------------------------------------------------------------------------------------------- end

    def end(self) -> None:
        for worker in self.workers:
            worker.process.send_signal(signal.SIGTERM)
        for worker in self.workers:
            try:
                status = worker.process.wait(BOUND_S)
            except subprocess.TimeoutExpired:
                raise Hang(f"worker {worker.number} does not end") from None
            if status != 0:
                raise Wrong(f"worker {worker.number} ended with {status}: {worker.tail()}")
            said = worker.log.read_text(errors="replace")
            if "Traceback" in said or "broke down" in said:
                raise Wrong(f"worker {worker.number} said: {said[-3000:]}")
        if (status := self.daemon.stop()) != 0:
            raise Wrong(f"the daemon ended with status {status}: {log_lines(self.daemon.log)[-3:]}")
        check_directory(self.folder, self.settings["ssd_dir"])

    def describe(self) -> None:
        """What each of them says of itself, as far as it answers, on stderr."""
        for worker in self.workers:
            with contextlib.suppress(OSError, http.client.HTTPException, Wrong):
                said = [worker.call("GET", "/health"), *worker.call("GET", "/metrics").splitlines()]
                shown = (str(line) for line in said if not str(line).startswith("#"))
                print(f"--- worker {worker.number}", *shown, sep="\n", file=sys.stderr)
        if self.daemon.alive:
            command = [
                *(sys.executable, "-P", "-m", "kvstore.cli.kvctl"),
                "--run-dir",
                str(self.folder / "run"),
            ]
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run([*command, "stats", "--long"], stdout=sys.stderr, timeout=BOUND_S, check=False)

    def abandon(self) -> None:
        for process in (*(worker.process for worker in self.workers), self.daemon.process):
            if process.poll() is None:
                process.kill()
            process.wait(BOUND_S)
        self.disk.close()


class Disk:
    """A folder; with `small`, a file system of 24 MiB where root can mount one."""

    def __init__(self, folder: Path, *, small: bool) -> None:
        self.folder = folder
        folder.mkdir()
        self.mounted = False
        if small and os.geteuid() == 0:
            command = ("mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder))
            with contextlib.suppress(OSError):
                self.mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0

    def fill(self) -> None:
        """To the last block."""
        if not self.mounted:
            return
        with (self.folder / "other").open("ab", buffering=0) as file:
            for size in (1 << 20, 4096):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def empty(self) -> None:
        (self.folder / "other").unlink(missing_ok=True)

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)
            self.mounted = False


# --------------------------------------------------------------------------------------------------------------- main


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--rounds", type=whole(1), default=20)
    options.add_argument("--minutes", type=above_zero, help="as many rounds as fit instead")
    options.add_argument("--seconds", type=above_zero, default=4.0, help="of a round's faults")
    options.add_argument("--talks", type=whole(1), default=12)
    options.add_argument("--turns", type=whole(1), default=6)
    options.add_argument("--rounds-per-life", type=whole(1), default=8)
    options.add_argument(
        "--spare-workers", action="store_true", help="no worker is killed (each start takes seconds)"
    )
    options.add_argument("--seed", type=int, default=None, help="default: drawn, and printed")
    options.add_argument("--folder", type=Path, default=None, help="in which everything lies (default: /tmp)")
    options.add_argument("--canary", choices=CANARIES, default="", help="a bug that must be found out")
    options.add_argument("--json", action="store_true", help="the last line is the result as JSON")
    chosen = options.parse_args()
    from harness import commit, machine

    seed = chosen.seed if chosen.seed is not None else random.randrange(1 << 32)
    faulthandler.enable()
    print(f"seed {seed}", flush=True)
    counts: Counter[str] = Counter()
    failure, begun = "", time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="kvs-serving-", dir=chosen.folder))
    chance = random.Random(seed)

    def more() -> bool:
        if chosen.minutes:
            return time.monotonic() - begun < 60 * chosen.minutes
        return counts["rounds"] < chosen.rounds

    script = Script(folder, chance, chosen.talks, chosen.turns)
    print(f"{len(script.talks)} conversations after {time.monotonic() - begun:.0f} s", flush=True)
    lives = 0
    while more() and not failure:
        small = lives % 3 == 2
        life = Life(
            folder / f"life{lives}",
            chance.randrange(1 << 30),
            script,
            small=small,
            canary=chosen.canary,
            spared=chosen.spare_workers,
        )
        lives += 1
        try:
            until(life.ready, "the first workers do not start", START_S)
            for _ in range(chosen.rounds_per_life):
                if not more():
                    break
                life.round(chosen.seconds)
                counts["rounds"] += 1
                life.counts.pop("rounds")
                print(
                    f"life {lives} round {counts['rounds']} {'small ' * small}{dict(life.counts)}", flush=True
                )
            life.end()
        except Exception as problem:
            failure = f"{type(problem).__name__}: {problem}"
            traceback.print_exc()
            life.describe()
            for path in (life.daemon.log, *(worker.log for worker in life.workers)):
                print(f"--- {path}\n{path.read_text(errors='replace')[-4000:]}", file=sys.stderr)
            kind = "hangs" if isinstance(problem, Hang) else "wrong"
            counts[kind] += 1
        finally:
            life.abandon()
            counts.update(life.counts)
    if failure:
        print(f"everything is kept in {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    print(failure or f"{counts['rounds']} rounds in {time.monotonic() - begun:.0f} s: {dict(counts)}")
    goals = [
        goal("wrong answers, errors, lost promises", counts["wrong"], 0),
        goal("hangs", counts["hangs"], 0),
    ]
    if chosen.json:
        result = {"machine": machine(), "commit": commit(__file__), "seed": seed, "rounds": counts["rounds"]}
        print(json.dumps(result | {"failure": failure, "counts": dict(counts), "goals": goals}))
    return 0 if all(row["met"] for row in goals) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]), sys.argv[3].removeprefix("--canary="), sys.argv[5:])
    else:
        sys.exit(main())
