"""The processes of the demo: a daemon in directories of its own, workers, and how all of them end with the demo."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from models import DemoModel

from kvstore.client import Client, connect
from kvstore.errors import Unavailable

CACHE = Path(__file__).resolve().parent.parent / ".cache"
START_S = 120.0
"""Longest wait for a process that does nothing to be ready, or to answer a turn;"""
WORK_S = 900.0
"""and for one that works, on a machine that is busy with other things."""


class Worker:
    """A worker process (see kvstore.gpu_worker.worker), asked over a unix socket. It ends with us. Its pool keeps
    nothing that no request holds: what is reused came from the store."""

    def __init__(self, model: DemoModel, run_dir: str, threads: int) -> None:
        self._folder = tempfile.mkdtemp(prefix="kvw-")  # short: the path of a unix socket is bounded
        self._socket = f"{self._folder}/http"
        command = [sys.executable, "-P", "-m", "kvstore.gpu_worker.worker", f"--model={model.folder}"]
        self.process = subprocess.Popen(
            [
                *(*command, f"--run-dir={run_dir}", f"--threads={threads}"),
                *(f"--socket={self._socket}", "--no-retain", "--log-level=error"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # Ctrl-C is for us to answer: a child would only add its own traceback
            preexec_fn=_end_with_parent,
        )
        try:
            self._wait_ready()
        except BaseException:
            self.kill()
            raise

    def ask(self, *, session: str, tokens: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        """Tokens of the answer, and what it took."""
        answer = self._post(
            "/v1/completions",
            prompt=list(tokens),
            max_tokens=max_new_tokens,
            temperature=0,
            session_id=session,
            return_token_ids=True,
        )
        return {
            "tokens": answer["choices"][0]["token_ids"],
            "prompt_tokens": answer["usage"]["prompt_tokens"],
            "reused_tokens": answer["usage"]["prompt_tokens_details"]["cached_tokens"],
            **answer["kvstore"],
        }

    def flush(self) -> int:
        """Waits until all KV is saved; returns how many bytes of it this worker saved in its life."""
        reply = self._post("/flush", timeout_s=30.0)
        if not reply["flushed"]:
            raise SystemExit("the worker could not save its KV within 30 s")
        return int(reply["counters"].get("bytes_saved", 0))

    def _post(self, path: str, **body: Any) -> dict[str, Any]:
        connection = http.client.HTTPConnection("worker")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(START_S)
        try:
            connection.sock.connect(self._socket)
            connection.request("POST", path, json.dumps(body))
            _await_readable(connection.sock, self.process, "the worker does not answer")
            response = connection.getresponse()
            reply: dict[str, Any] = json.load(response)
        except TimeoutError:
            raise SystemExit(f"the worker does not answer within {START_S:.0f} s") from None
        finally:
            connection.close()
        if response.status != 200:
            raise SystemExit(f"the worker: {reply['error']['message']}")
        return reply

    def _wait_ready(self) -> None:
        assert self.process.stdout is not None
        _await_readable(self.process.stdout, self.process, "the worker does not start")
        if not self.process.stdout.readline():
            raise SystemExit(f"the worker ended with status {self.process.wait(10)}")

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> None:
        assert self.process.stdout is not None
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        self.process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass
class Figures:
    """What the daemon counted, over all its lives."""

    lookups: int = 0
    hits: int = 0
    """In DRAM when asked for."""
    ssd_hits: int = 0
    ahead: int = 0
    on_demand: int = 0
    saved_bytes: int = 0

    @property
    def in_dram(self) -> float:
        return self.hits / max(1, self.hits + self.ssd_hits)


class Daemon:
    """A daemon in directories of its own, which are removed at the end, and a client to ask it for figures."""

    def __init__(
        self, settings: Mapping[str, object], *, ssd: Path | None = None, read_bytes_per_s: float = 0
    ) -> None:
        """`ssd`: a directory of the SSD tier that is copied first. `read_bytes_per_s`: how fast the disk reads; 0: as
        fast as it can."""
        self.figures = Figures()
        self._copied = ssd
        self._settings = settings
        self._read_bytes_per_s = read_bytes_per_s

    def __enter__(self) -> Self:
        with ExitStack() as begun:
            self.run_dir = tempfile.mkdtemp(prefix="kvs-")  # short: the path of a unix socket is bounded
            begun.callback(shutil.rmtree, self.run_dir, ignore_errors=True)
            self.ssd = Path(tempfile.mkdtemp(prefix="demo-ssd-", dir=CACHE))
            begun.callback(shutil.rmtree, self.ssd, ignore_errors=True)
            if self._copied is not None:
                shutil.copytree(self._copied, self.ssd, dirs_exist_ok=True)
            self._process = self._start()
            begun.callback(self._stop)
            self.client = _connected(self.run_dir, self._process)
            begun.callback(self.client.close)
            self._end = begun.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()

    def restart(self) -> None:
        """Stopped in good order, started again; clients reconnect by themselves."""
        self.count()
        self._stop()
        self._process = self._start()
        self.client.wait_connected(START_S)

    def count(self) -> None:
        """Adds what this life of the daemon counted."""
        stats = self.client.stats()
        for space in stats.namespaces:
            self.figures.lookups += space.lookups
            self.figures.hits += space.hits - space.ssd_hits
            self.figures.ssd_hits += space.ssd_hits
        self.figures.ahead += stats.counters["chunks_promoted_ahead"]
        self.figures.on_demand += stats.counters["chunks_promoted_on_demand"]

    def wait_promoted(self) -> None:
        """Until the daemon has heard of the queue again and brought what it could, or for three seconds."""
        deadline = time.monotonic() + 3.0
        promoted = -1
        while time.monotonic() < deadline:
            before, promoted = promoted, self.client.stats().counters["chunks_promoted_ahead"]
            if promoted and promoted == before:
                return
            time.sleep(0.1)

    def _start(self) -> subprocess.Popen[bytes]:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in self._settings.items()]
        module, environment = "kvstore", dict(os.environ)
        if self._read_bytes_per_s:  # the same daemon, on a disk that is as slow as it is told to be
            module = "kvstore.sim.daemon"
            environment["ATTNSTORE_TEST_READ_BYTES_PER_S"] = str(self._read_bytes_per_s)
        return subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", module, f"--run-dir={self.run_dir}", f"--ssd-dir={self.ssd}"),
                *("--log-level=warning", *flags),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # what it says at its start
            process_group=0,
            preexec_fn=_end_with_parent,
            env=environment,
        )

    def stop(self) -> None:
        """In good order: what it has is on the SSD then."""
        self._stop()

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)


@contextmanager
def worker_process(model: DemoModel, run_dir: str, threads: int) -> Iterator[Worker]:
    worker = Worker(model, run_dir, threads)
    try:
        yield worker
    finally:
        if worker.process.poll() is None:
            worker.close()


def _connected(run_dir: str, process: subprocess.Popen[bytes]) -> Client:
    deadline = time.monotonic() + START_S
    while True:
        try:
            return connect(run_dir, timeout_s=1.0)
        except Unavailable as error:
            if process.poll() is not None:
                raise SystemExit(f"kvstored ended with status {process.returncode}") from None
            if time.monotonic() > deadline:
                raise SystemExit(f"kvstored does not answer: {error}") from None


_prctl = ctypes.CDLL(
    None
).prctl  # found before any fork: a child of a process with threads had better take no lock


def _end_with_parent() -> None:
    """Also when we are killed, nothing is left running."""
    _prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _await_readable(source: Any, process: subprocess.Popen[Any], problem: str) -> None:
    """Until `source` has something to say, or the process has ended. How long a start takes is no measure of anything
    where many processes want the same cores and the same disk: a process that gets on with it is waited for."""
    begun = moved = time.monotonic()
    before: object = None
    while not select.select([source], [], [], 0.5)[0] and process.poll() is None:
        now, done = time.monotonic(), _work_of(process.pid)
        if done != before:
            before, moved = done, now
        if now - moved > START_S or now - begun > WORK_S:
            raise SystemExit(f"{problem} within {now - begun:.0f} s")


def _work_of(pid: int) -> object:
    """What grows while a process computes, or reads from disk what it has mapped; None when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[9], fields[11], fields[12]  # major faults, time in user and in kernel mode
