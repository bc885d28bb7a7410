"""A client process for tests of what stands still. Its arguments: what it does, and the run directory.

It prints "ready" at the point where it, or its daemon, is stopped; what it prints last is JSON, about what came after.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from typing import Any

import grpc
import numpy as np

from kvstore.client import Client, Namespace, connect, connect_async
from kvstore.errors import StoreError
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.scheduler.hints import HintedQueue
from kvstore.types import ChunkKey
from kvstore.v1 import bytes_pb2, bytes_pb2_grpc, store_pb2
from kvstore.wire import TOKEN_METADATA

BOUND_S = 20.0
TIMEOUT_S = 0.3
SHARD = 256 << 10
LARGE_SHARD = 8 << 20
SPEC = NamespaceSpec("tiny", b"w" * 32, "test:bytes", 64, (GroupSpec("full", shard_bytes=SHARD),))
LARGE = NamespaceSpec("large", b"w" * 32, "test:bytes", 64, (GroupSpec("full", shard_bytes=LARGE_SHARD),))


def content(key: bytes, size: int = SHARD) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng([*key]).integers(0, 256, size, dtype=np.uint8)


def keys_of(space: Namespace, name: str, count: int = 4) -> list[ChunkKey]:
    """Keys that no other process uses."""
    tokens = np.arange(64 * count)
    tokens[0] = (1 << 31) + sum(name.encode())
    return space.keys(tokens)


def save(space: Namespace, keys: list[ChunkKey], size: int = SHARD) -> bool:
    with space.write(keys) as batch:
        for index in batch.granted:
            batch.buffer(index)[:] = content(keys[index], size)
        return batch.commit().ok


def load(space: Namespace, keys: list[ChunkKey]) -> int:
    """How many are hits, each with the right bytes."""
    out = np.empty(SHARD, np.uint8)
    with space.read(keys) as lease:
        for index in range(lease.hits):
            assert lease.copy_to(index, out)
            assert np.array_equal(out, content(keys[index]))
        return lease.hits


def stop_here() -> None:
    print("ready", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


# ------------------------------------------------------------------------------------------- this process is stopped


def commit(client: Client) -> None:
    """Stopped with a commit that the daemon has (it answers in order), and that nobody here has looked at."""
    space = client.open(SPEC)
    keys = keys_of(space, "commit")
    batch = space.write(keys)
    for index in batch.granted:
        batch.buffer(index)[:] = content(keys[index])
    future = batch.commit_async()
    assert space.get_session("none", timeout_s=BOUND_S) is None
    stop_here()
    outcome = future.result(BOUND_S)
    say(ok=outcome.ok, hits=load(space, keys))


def get(client: Client) -> None:
    """Stopped in the middle of a Get, whose frames it has not read."""
    space = client.open(LARGE)
    (key,) = keys_of(space, "get", 1)
    assert save(space, [key], LARGE_SHARD)
    attachment = client._connection.attachment
    assert attachment is not None
    with grpc.insecure_channel(attachment.hello.grpc_target) as channel:
        call = bytes_pb2_grpc.BytesStub(channel).Get(
            bytes_pb2.GetRequest(namespace_id=space._binding.now()[1], key=key, frame_bytes=1 << 20),
            metadata=((TOKEN_METADATA, attachment.hello.token),),
            timeout=BOUND_S,
        )
        data = next(call).payload + next(call).payload
        stop_here()
        status = "OK"
        try:
            data += b"".join(frame.payload for frame in call)
        except grpc.RpcError as error:
            status = error.code().name
    right = content(key, LARGE_SHARD).tobytes()
    say(status=status, prefix=right.startswith(data), whole=data == right)


def stream(client: Client) -> None:
    """Stopped with more answers on its Attach stream than the connection can hold."""
    space = client.open(SPEC)
    keys = keys_of(space, "stream")
    assert save(space, keys)
    attachment = client._connection.attachment
    assert attachment is not None
    many = [b"%d" % number for number in range(4096)]
    for _ in range(180):
        body = store_pb2.MatchRequest(namespace_id=space._binding.now()[1], keys=many)
        attachment.call("match", body, time.monotonic() + 600)
    stop_here()
    began = time.monotonic()
    while load(space, keys) < len(keys):
        assert time.monotonic() - began < BOUND_S, "it never recovered"
        time.sleep(0.01)
    say(hits=len(keys))


# ---------------------------------------------------------------------------------------------- the daemon is stopped


def hold(client: Client) -> Namespace:
    """A lease, a reservation and a session are open when the daemon stops."""
    space = client.open(SPEC)
    keys = keys_of(space, sys.argv[1])
    assert save(space, keys)
    hold.all = (space.read(keys, pin=True), space.write([ChunkKey(b"never")]))  # type: ignore[attr-defined]
    print("ready", flush=True)
    sys.stdin.readline()
    return space


def close(client: Client) -> None:
    hinted = HintedQueue(client, model="tiny")
    hold(client)
    hinted.close()
    client.close()
    say(closed=True)


def use(client: Client) -> None:
    """Every operation, each with its deadline."""
    space = hold(client)
    keys = keys_of(space, "use")
    began = time.monotonic()
    with space.write([ChunkKey(b"new")], timeout_s=TIMEOUT_S) as batch:
        assert not batch.granted
    assert space.read(keys, pin=True, timeout_s=TIMEOUT_S).hits == 0
    assert space.match([ChunkKey(b"never")], timeout_s=TIMEOUT_S).usable == 0
    assert space.get_session("s", timeout_s=TIMEOUT_S) is None
    for change in (
        lambda: space.update_session("s", expected_version=0, keep=0, append=[], timeout_s=TIMEOUT_S),
        lambda: space.truncate("s", expected_version=1, first_token=0, token_count=64, timeout_s=TIMEOUT_S),
        lambda: space.fork("s", "t", timeout_s=TIMEOUT_S),
        lambda: space.forget("s", timeout_s=TIMEOUT_S),
        lambda: client.open(LARGE, timeout_s=TIMEOUT_S),
        lambda: client.stats(timeout_s=TIMEOUT_S),
    ):
        try:
            change()
        except StoreError:
            continue
        raise AssertionError("a stopped daemon answered")
    say(seconds=time.monotonic() - began)


def end(client: Client) -> None:
    """Just ends, with everything open."""
    hold(client)
    say(closed=False)


async def on_a_loop(run_dir: str) -> None:
    async with await connect_async(run_dir, timeout_s=BOUND_S) as client:
        space = await client.open(SPEC)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        found = await space.match([ChunkKey(b"k")], timeout_s=TIMEOUT_S)
        assert found.usable == 0
    say(closed=True)


def main() -> None:
    what, run_dir = sys.argv[1:]
    if what == "on_a_loop":
        asyncio.run(on_a_loop(run_dir))
        return
    globals()[what](connect(run_dir, timeout_s=BOUND_S))


if __name__ == "__main__":
    main()
