"""LMCache's multiprocess server, by the client of its own benchmark, on a CPU; the engine's side copies.

Its values are KV of an engine: 32 layers of pages of 16 tokens (vLLM's layout), a chunk of 16 tokens as large as our
value. So each value is gathered from, and scattered to, 64 places in the engine's KV, as LMCache does it for engines.
A batch is one sequence: LMCache finds a chunk by all the tokens before it. A get is a look-up, a retrieval, and the end
of the request.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import socket
import subprocess
import urllib.request
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from peers import Server, Shape, attempts, free_port, not_installed

BIN = Path(__file__).resolve().parents[2] / ".cache/lmcache-venv/bin"
PYTHON = str(BIN / "python")
GIVES = "eviction, locks while chunks are read; no checksum"
CHUNK_TOKENS = 16
MADV_POPULATE_WRITE = 23
"""Of linux/mman.h."""
LAYERS, HEAD_DIM, BYTES = 32, 128, 2
ENVIRONMENT = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_LOG_LEVEL": "ERROR"}


def missing() -> str:
    return not_installed(BIN / "lmcache")


def start(folder: Path, room_bytes: int) -> Server:
    port, http = free_port(), free_port()
    name = f"kvs-{port}"
    command = [
        *(BIN / "lmcache", "server", "--host", "localhost", "--port", str(port), "--http-host", "127.0.0.1"),
        *(
            "--http-port",
            str(http),
            "--l1-size-gb",
            str(2 * room_bytes / (1 << 30)),
            "--eviction-policy",
            "LRU",
        ),
        *("--eviction-trigger-watermark", "0.7"),  # of twice the room: see forget()
        *("--supported-transfer-mode", "auto", "--shm-name", name, "--chunk-size", str(CHUNK_TOKENS)),
        *("--max-workers", "2", "--disable-observability"),
    ]
    with open(folder / "lmcache.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | ENVIRONMENT)
    return Server({"port": port, "http": http, "shm": name}, (process,))


class Sequenced(NamedTuple):
    """A batch as one sequence of tokens, whose KV is in these pages before a put, and in those after a get."""

    source: Any
    out: Any


class Client:
    FILLS_UP = 0.1
    """Enough that the pool is mapped: `clear` touches all of it, which would be slow in a put."""
    BY_BATCH = True
    """A chunk is found by all tokens before it: only in batches like the one it was put in."""

    def __init__(self, address: dict[str, Any], shape: Shape) -> None:
        os.environ.update(ENVIRONMENT)
        import torch
        from lmcache.cli.commands.bench.server_bench import client, config, helpers

        # Its default is a thread a core: those of this process then wait for each other, spinning, as soon as there is
        # anything else to run, and a put takes five times as long.
        torch.set_num_threads(1)
        per_head = 2 * CHUNK_TOKENS * HEAD_DIM * BYTES  # K and V of one layer
        layers = min(LAYERS, shape.value_bytes // per_head)
        heads = shape.value_bytes // per_head // layers
        self._pages = shape.hot
        pages = 1 + self._pages + shape.batch_max  # page 0 stands for no KV
        self._name = shape.client
        self._pool = address["shm"]
        self._http = f"http://127.0.0.1:{address['http']}"
        self._number = zlib.crc32(shape.client.encode())
        self._requests = itertools.count()
        self._request_type = client.RequestContext
        helpers._INSTANCE_ID_BASE = self._number  # as if each client were another rank
        self._client = client.ServerBenchClient(
            config.BenchConfig(
                rpc_url=f"tcp://localhost:{address['port']}",
                http_url=self._http,
                mode="cpu",
                transfer_mode="engine_driven",
                tp_size=1,
                use_mla=False,
                num_tokens=CHUNK_TOKENS,
                kvcache_shape_spec=f"(2,{pages},{CHUNK_TOKENS},{heads},{HEAD_DIM}):bfloat16:{layers}",
                num_blocks=pages,
                block_size=CHUNK_TOKENS,
            ),
            lambda _: None,
        )
        for _ in attempts("LMCache's server"):
            with contextlib.suppress(OSError):
                socket.create_connection(("localhost", address["port"]), 1).close()
                break
        self._client.start()

    def plan(self, numbers: Sequence[int]) -> Sequenced:
        chunks = len(numbers)
        name = f"{self._name}:{next(self._requests)}"
        first = numbers[0] % (self._pages - chunks + 1)
        tokens = (self._number, numbers[0], *range(CHUNK_TOKENS * chunks - 2))
        source, out = (
            self._request_type(
                sequence_id=0,
                request_id=name,
                request_kind="",
                token_ids=tokens,
                num_full_tokens=CHUNK_TOKENS * chunks,
                total_chunks=chunks,
                chunk_size=CHUNK_TOKENS,
                block_offset=page,
                num_blocks=chunks,
            )
            for page in (1 + first, 1 + self._pages)
        )
        return Sequenced(source, out)

    def put(self, plan: Sequenced) -> None:
        stored = self._client.store(plan.source, 0, plan.source.num_full_tokens)
        assert stored is not None and stored.succeeded, stored
        self._client.end_session(plan.source)

    def get(self, plan: Sequenced) -> None:
        assert self._fetched(plan), (plan.out.request_id, "is not there")

    def _fetched(self, plan: Sequenced) -> bool:
        """What is found has to be retrieved: a look-up alone leaves it locked, so that other things are evicted."""
        found = self._client.lookup(plan.out)
        if found.is_full_hit:
            retrieved = self._client.retrieve(plan.out, 0, plan.out.num_full_tokens)
            assert retrieved is not None and retrieved.succeeded, retrieved
        self._client.end_session(plan.out)
        return found.is_full_hit

    def clear(self) -> None:
        """Drop all there is, and have every page of the pool at hand, as in an engine that has run for a while."""
        for line in Path("/proc/self/maps").read_text().splitlines():
            if self._pool in line:
                start, end = (int(number, 16) for number in line.split()[0].split("-"))
                madvise = ctypes.CDLL(None, use_errno=True).madvise
                if madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_POPULATE_WRITE):
                    raise OSError(ctypes.get_errno(), "madvise")
                break
        else:
            raise LookupError(f"{self._pool} is not mapped")
        clear = urllib.request.Request(self._http + "/cache/clear", data=b"", method="POST")
        with urllib.request.urlopen(clear, timeout=30) as answer:
            assert answer.status == 200, answer.status

    def wait(self, plan: Sequenced) -> None:
        """Until what was put can be found: a put is answered a little earlier."""
        for _ in attempts(plan.out.request_id):
            if self._fetched(plan):
                break

    def check(self, plan: Sequenced) -> None:
        were, are = (self._client.compute_checksums(of, 0, of.num_full_tokens) for of in plan)
        assert were == are, f"wrong bytes for {plan.out.request_id}"

    def forget(self, plan: Sequenced) -> None:
        """It evicts by itself, some time after it is due. Until then there has to be room: what there is none for, it
        says to have stored. So look whether it was."""
        assert self._fetched(plan), (plan.out.request_id, "was not stored")

    def close(self) -> None:
        self._client.close()
