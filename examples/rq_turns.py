"""Turns of chats as RQ jobs: who enqueues names the chat, RQ's worker answers, and the daemon knows who comes next.

    kvstored --run-dir /tmp/kv --dram-bytes 1G --ssd-dir /tmp/kv-ssd --ssd-bytes 4G &
    redis-server --port 6390 --save '' &
    python examples/rq_turns.py /tmp/kv redis://localhost:6390

The worker here runs in the same process, so that there is one command to try; a real one is `rq worker turns` with an
engine in it. It loads what the store has of a chat's KV, computes the rest (here: bytes), and saves and records it.
"""

from __future__ import annotations

import sys
from functools import cache

import redis
import rq

from kvstore.client import Client, Namespace, SessionEntry, connect
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.scheduler.rq_queue import RQHints

SPEC = NamespaceSpec("rq-example", b"digest", "bytes", 64, (GroupSpec("kv", shard_bytes=64 << 10),))
TURN_TOKENS = 256


@cache
def client_of(run_dir: str) -> Client:
    """One for each worker process."""
    return connect(run_dir)


@cache
def space_of(run_dir: str) -> Namespace:
    return client_of(run_dir).open(SPEC)


def answer(run_dir: str, chat: str, turn: int) -> tuple[int, int]:
    """The job: how many chunks of the chat were loaded, and how many computed."""
    store = space_of(run_dir)
    tokens = [*chat.encode()] * TURN_TOKENS  # as if the chat said nothing but its name
    keys = store.keys(tokens[: TURN_TOKENS * (turn + 1)])
    out = bytearray(64 << 10)
    with store.read(keys, wait_ms=2_000) as lease:
        lease.settled()  # what is on SSD is in DRAM now, and the next read has it
    with store.read(keys) as lease:
        loaded = sum(lease.copy_to(number, out) for number in range(lease.hits))
    with store.write(keys) as batch:  # what is there already is not granted
        batch.copy_many([(number, None, bytes([turn]) * (64 << 10)) for number in batch.granted])
        batch.commit()
    there = store.match(keys).usable  # DRAM may have been FULL: a session names chunks that were committed
    known = store.get_session(chat)
    entries = [SessionEntry(key, 64 * number, 64) for number, key in enumerate(keys[:there])]
    keep = min(loaded, there, len(known.entries)) if known else 0
    store.update_session(
        chat, expected_version=known.version if known else 0, keep=keep, append=entries[keep:]
    )
    return loaded, len(keys) - loaded


def main(run_dir: str, redis_url: str, chats: int = 4, turns: int = 3) -> list[tuple[int, int]]:
    """What each job loaded and computed, in the order in which they ran."""
    connection = redis.Redis.from_url(redis_url)
    queue = rq.Queue("turns", connection=connection)
    space_of(run_dir)  # opened once before anybody gives hints about it
    with RQHints(client_of(run_dir), SPEC.model, queue) as hints:
        jobs = [
            queue.enqueue("rq_turns.answer", run_dir, f"chat {chat}", turn, meta={"session": f"chat {chat}"})
            for turn in range(turns)
            for chat in range(chats)
        ]
        rq.SimpleWorker([queue], connection=connection).work(burst=True, logging_level="WARNING")
        print(f"{len(jobs)} jobs, hints: {hints.counters}")
    found: list[tuple[int, int]] = [job.return_value(refresh=True) for job in jobs]
    connection.close()
    for job, (loaded, computed) in zip(jobs, found, strict=True):
        print(f"{job.args[1]}, turn {job.args[2]}: {loaded} chunks loaded, {computed} computed")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
