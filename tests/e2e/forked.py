"""Starts `kvstored` and `kvctl` by forking a process that has imported them, once for many tests.

A daemon that starts from nothing spends half a second of CPU time on imports, several hundred times in a test run. What
runs after the imports is the same, and each daemon is a process of its own as ever. `start` imitates the few calls of
subprocess.Popen that tests use, `run` is like subprocess.run.

Each process of a test run starts one server. It sends {"start": [program, argument, ...], "environment": ...} together
with the descriptors of standard input, output and error, and gets {"pid": ...} and a pidfd. Or it sends {"reap": pid},
of a process that has ended, and gets {"status": ...}.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

MESSAGE_BYTES_MAX = 1 << 17
OWN = ("KVSTORED_", "NOTIFY_", "ATTNSTORE_", "PYTEST_", "PYTHONSAFEPATH")
"""What these variables say is read by a daemon at its start, or by nobody: they may differ from the server's."""


class Forked:
    """A process that the server forked, as subprocess.Popen shows it."""

    def __init__(self, server: Server, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        self._server = server
        self._pidfd = pidfd
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        if (status := self._wait(timeout)) is None:
            raise subprocess.TimeoutExpired(f"the forked process {self.pid}", timeout or 0)
        return status

    def _wait(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            waiting = select.poll()
            waiting.register(self._pidfd, select.POLLIN)
            if waiting.poll(None if timeout_s is None else 1000 * timeout_s):
                with self._lock:
                    self._reap()
        return self.returncode

    def _reap(self) -> None:
        if self.returncode is None:
            self.returncode = self._server.ask({"reap": self.pid})[0]["status"]
            os.close(self._pidfd)

    def send_signal(self, number: int) -> None:
        with self._lock:
            if self.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def imported_with(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(OWN)}


def inherited() -> tuple[object, ...]:
    """What a process has from its parent, and tests change: limits, users, the umask, ignored signals."""
    status = Path("/proc/self/status").read_text().splitlines()
    return (
        Path("/proc/self/limits").read_text(),
        *(line for line in status if line.startswith(("Umask:", "Uid:", "Gid:", "SigIgn:"))),
    )


class Server:
    def __init__(self) -> None:
        self._imported_with, self._inherited = imported_with(os.environ), inherited()
        self._lock = threading.Lock()
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(its.fileno())],
                stdin=subprocess.DEVNULL,
                cwd="/",
                pass_fds=(its.fileno(),),
            )

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether a fresh process would inherit what the server has, and its imports would be the same."""
        return (imported_with(environment), inherited()) == (self._imported_with, self._inherited)

    def start(self, command: Sequence[str], environment: Mapping[str, str], *fds: int) -> Forked:
        """`fds`: standard input, output and error."""
        reply, (pidfd,) = self.ask({"start": list(command), "environment": dict(environment)}, *fds)
        return Forked(self, reply["pid"], pidfd)

    def ask(self, request: dict[str, Any], *fds: int) -> tuple[dict[str, Any], list[int]]:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], list(fds))
            data, received, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES_MAX, 1)
        assert data, "the server that forks daemons has ended"
        return json.loads(data), received

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


_server: Server | None = None


def server_for(environment: Mapping[str, str]) -> Server | None:
    """None if the environment might change what is imported, or how."""
    global _server
    if _server is None:
        _server = Server()
    return _server if _server.fits(environment) else None


def start(arguments: Sequence[str], environment: Mapping[str, str]) -> Forked | subprocess.Popen[str]:
    """A daemon with pipes for its output, in a world that tests control (see kvstore/sim/daemon.py)."""
    if server := server_for(environment):
        stdout, its_stdout = os.pipe()
        stderr, its_stderr = os.pipe()
        with open(os.devnull, "rb") as nothing:
            daemon = server.start(
                ["kvstored", *arguments], environment, nothing.fileno(), its_stdout, its_stderr
            )
        os.close(its_stdout)
        os.close(its_stderr)
        # Whoever started it closes them, as with Popen
        daemon.stdout, daemon.stderr = open(stdout, encoding="utf-8"), open(stderr, encoding="utf-8")  # noqa: SIM115
        return daemon
    return fresh(["-m", "kvstore.sim.daemon", *arguments], environment)


def fresh(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """A Python process that inherits nothing of the server, with pipes for its output."""
    return subprocess.Popen(
        [sys.executable, "-P", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        env=dict(environment),
    )


def run(
    arguments: Sequence[str], environment: Mapping[str, str], *, input: bytes = b"", timeout_s: float = 60
) -> subprocess.CompletedProcess[bytes]:
    """`kvctl`, from beginning to end."""
    server = server_for(environment)
    if server is None:
        return subprocess.run(
            [sys.executable, "-P", "-m", "kvstore.cli.kvctl", *arguments],
            input=input,
            capture_output=True,
            timeout=timeout_s,
            cwd="/",
            env=dict(environment),
            check=False,
        )
    with (
        tempfile.TemporaryFile() as stdin,
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as stderr,
    ):
        stdin.write(input)
        stdin.seek(0)
        files = (stdin, stdout, stderr)
        kvctl = server.start(["kvctl", *arguments], environment, *(file.fileno() for file in files))
        try:
            status = kvctl.wait(timeout_s)
        except subprocess.TimeoutExpired:
            kvctl.kill()
            kvctl.wait()
            raise
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(arguments, status, stdout.read(), stderr.read())


def close() -> None:
    global _server
    if _server is not None:
        _server.close()
        _server = None


def serve(requests: socket.socket) -> list[str]:
    """In each forked process: the program that it is to be, and its arguments. In the server itself: never returns."""
    while True:
        data, fds, _, _ = socket.recv_fds(requests, MESSAGE_BYTES_MAX, 3)
        if not data:
            os._exit(0)
        request = json.loads(data)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            requests.send(json.dumps({"status": os.waitstatus_to_exitcode(status)}).encode())
            continue
        pid = os.fork()
        if pid == 0:
            for fd, its in enumerate(fds):
                os.dup2(its, fd)
            requests.detach()
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            os.environ.clear()
            os.environ.update(request["environment"])
            command: list[str] = request["start"]
            return command
        pidfd = os.pidfd_open(pid)
        socket.send_fds(requests, [json.dumps({"pid": pid}).encode()], [pidfd])
        for fd in (pidfd, *fds):
            os.close(fd)


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as the daemon itself does before it imports gRPC
    import uvloop  # noqa: F401 - imported here, so that no daemon has to

    import kvstore.server.daemon  # noqa: F401
    from kvstore.cli import kvctl
    from kvstore.sim import daemon as kvstored

    gc.freeze()
    name, *sys.argv[1:] = serve(socket.socket(fileno=int(sys.argv[1])))
    {"kvstored": kvstored.run, "kvctl": kvctl.main}[name]()
