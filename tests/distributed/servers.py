"""Real servers on loopback for the tests of this folder: a Redis cluster of six nodes, an S3."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..fleet_tools import BOUND_S, eventually, free_port

BUCKET = "kv-cache"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}


class RedisCluster:
    """Three masters and three replicas."""

    def __init__(self, folder: Path) -> None:
        self.ports = [free_port() for _ in range(6)]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        for port in self.ports:
            (folder / str(port)).mkdir()
            self.processes[port] = subprocess.Popen(
                [
                    *("redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""),
                    *("--appendonly", "no", "--dir", str(folder / str(port)), "--cluster-enabled", "yes"),
                    *("--cluster-config-file", "nodes.conf", "--cluster-node-timeout", "2000"),
                    *("--cluster-port", str(free_port()), "--loglevel", "warning"),
                    *("--repl-diskless-sync-delay", "0"),
                ],
                stdout=subprocess.DEVNULL,
            )
        eventually(lambda: all(self.ask(port, "PING") == "PONG" for port in self.ports), "all nodes answer")
        places = [f"127.0.0.1:{port}" for port in self.ports]
        made = subprocess.run(
            ["redis-cli", "--cluster", "create", *places, "--cluster-replicas", "1", "--cluster-yes"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert made.returncode == 0, made.stdout + made.stderr
        eventually(lambda: all(self.is_well(port) for port in self.ports), "the cluster is well")
        eventually(
            lambda: sum("connected" in self.ask(port, "ROLE") for port in self.ports) == 3, "copies are whole"
        )

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def ask(self, port: int, *words: str) -> str:
        told = subprocess.run(
            ["redis-cli", "-p", str(port), *words],
            capture_output=True,
            text=True,
            timeout=BOUND_S,
            check=False,
        )
        return told.stdout.strip()

    def is_well(self, port: int) -> bool:
        return "cluster_state:ok" in self.ask(port, "CLUSTER", "INFO")

    def masters(self) -> list[int]:
        alive = [port for port in self.ports if self.processes[port].poll() is None]
        return [port for port in alive if self.ask(port, "ROLE").startswith("master")]

    def kill(self, port: int) -> None:
        self.processes[port].kill()
        self.processes[port].wait()

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


class S3:
    """moto's server, in a process of its own."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "moto.server", "-p", str(self.port), "-H", "127.0.0.1"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        eventually(self._answers, "moto answers")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def environment(self) -> dict[str, str]:
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}

    def store(self) -> Any:
        import obstore.store

        return obstore.store.S3Store(
            BUCKET,
            endpoint=f"http://127.0.0.1:{self.port}",
            access_key_id="test",
            secret_access_key="test",
            region="us-east-1",
            client_options={"allow_http": True},
        )

    def _answers(self) -> bool:
        import boto3
        import botocore.exceptions

        client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        )
        with contextlib.suppress(botocore.exceptions.BotoCoreError):
            client.create_bucket(Bucket=BUCKET)
            return True
        return False

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def timed(what: Callable[[], Any]) -> float:
    """Seconds that it takes."""
    began = time.perf_counter()
    what()
    return time.perf_counter() - began
