"""What a chunk costs the daemon: memory of its bookkeeping at 1,000,000 chunks, and the core's time per key.

Chunks come in as in service (Reserve, Commit, end of the copy, in batches of 256 through `Store.apply`): chains of 64
with parents, 32-byte keys, one shard, 1,000 sessions of 64 entries, nothing pinned, so all in the recency list. Memory
is the growth of RssAnon in a fresh process, from a store that has its (empty) arena. Time is CPU time: the core waits
for nothing, and what else runs on the machine is not its business.

    make bench-core_memory ARGS='--quick --json'
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvstore.benchmark import Goal, heading, report
from kvstore.core import events as ev
from kvstore.core.limits import Limits
from kvstore.core.store import Store
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.memory import fix_mmap_threshold
from kvstore.types import ChunkKey, NamespaceId, ReservationId, StagedPiece, WorkerId

BYTES_PER_CHUNK_GOAL = 300
BATCH = 256
CHAIN = 64
SESSIONS = 1_000
SLOT_BYTES = 4096
SEGMENT_BYTES = 64 << 20
STEP_MS = 10
"""Virtual time per batch: 25,600 chunks a second, more than two cores copy."""
WORKER = WorkerId(1)
SPEC = NamespaceSpec("llama", b"w", "layout", 64, (GroupSpec("kv", SLOT_BYTES),))


class Driver:
    """A store with one worker whose copies end at once; `now` is virtual."""

    def __init__(self, chunks: int) -> None:
        segments = -(-chunks * SLOT_BYTES // SEGMENT_BYTES) + 1
        self.store = Store(Limits(segments * SEGMENT_BYTES, SEGMENT_BYTES))
        self.now = 0
        self._request = 0
        for effect in self.store.start():
            assert isinstance(effect, ev.CreateSegment)
            self.store.apply(ev.SegmentReady(effect.op), self.now)
        self.store.apply(ev.WorkerJoined(WORKER, "alice", "engine"), self.now)
        self.namespace: NamespaceId = self.ask(ev.Open, SPEC).namespace

    def ask(self, kind: type, *args: Any, **named: Any) -> Any:
        """The answer; a copy that the request starts is carried out."""
        self._request += 1
        for effect in self.store.apply(kind(ev.Ticket(WORKER, self._request), *args, **named), self.now):
            match effect:
                case ev.Reply():
                    return effect.answer
                case ev.CopyIn():
                    done = ev.OpDone(effect.op, tuple(range(1, len(effect.targets) + 1)))
                    (reply,) = self.store.apply(done, self.now)
                    assert isinstance(reply, ev.Reply)
                    return reply.answer
        raise AssertionError(f"{kind.__name__} was not answered")

    def reserve(self, keys: Sequence[ChunkKey], parents: Sequence[ChunkKey] = ()) -> ev.Reserved:
        reserved: ev.Reserved = self.ask(
            ev.Reserve, self.namespace, tuple(keys), parents=tuple(parents), maker=b"worker 1, gpu 0!"
        )
        assert len(reserved.extents) == len(keys), reserved.results
        return reserved

    def commit(self, reservation: ReservationId, count: int) -> None:
        pieces = tuple(StagedPiece(SLOT_BYTES * number, 0) for number in range(count))
        answer = self.ask(ev.Commit, reservation, pieces)
        assert isinstance(answer, ev.Committed), answer

    def tick(self, ms: int) -> None:
        self.now += ms
        self.store.apply(ev.Tick(), self.now)


def keys_of_chain(number: int, count: int = CHAIN) -> list[ChunkKey]:
    seed = number.to_bytes(8, "little")
    return [
        ChunkKey(hashlib.blake2b(seed + bytes([place]), digest_size=32).digest()) for place in range(count)
    ]


def memory_per_chunk(chunks: int) -> dict[str, float]:
    """Fill a store; run this in a fresh process."""
    fix_mmap_threshold()  # as the daemon does
    driver = Driver(chunks)
    gc.collect()
    before = rss_anon_bytes()
    began = time.process_time()
    for start in range(0, chunks // CHAIN, BATCH // CHAIN):
        keys: list[ChunkKey] = []
        parents: list[ChunkKey] = []
        for number in range(start, min(start + BATCH // CHAIN, chunks // CHAIN)):
            chain = keys_of_chain(number)
            keys += chain
            parents += [ChunkKey(b""), *chain[:-1]]
        driver.commit(driver.reserve(keys, parents).reservation, len(keys))
        driver.tick(STEP_MS)
    seconds = time.process_time() - began
    stored = driver.store.state.chunks.rows_used
    for number in range(SESSIONS):
        entries = tuple(
            ev.SessionEntry(key, first_token=64 * place, token_count=64)
            for place, key in enumerate(keys_of_chain(number))
        )
        answer = driver.ask(
            ev.UpdateSession,
            driver.namespace,
            b"session %d" % number,
            expected_version=0,
            keep=0,
            append=entries,
        )
        assert isinstance(answer, ev.SessionInfo) and answer.usable == CHAIN, answer
    del keys, parents, chain, entries, answer
    gc.collect()
    grown = rss_anon_bytes() - before
    namespace = driver.store.state.namespaces[driver.namespace]
    assert namespace.visible == namespace.recency.count == stored, namespace
    return {"chunks": stored, "rss_anon_bytes": grown, "bytes_per_chunk": grown / stored, "seconds": seconds}


def speeds(batch: int, seconds: float) -> Iterator[dict[str, float | str]]:
    """Microseconds per key, of requests with `batch` keys."""
    chunks = 1 << 16
    driver = Driver(chunks)
    chains = [keys_of_chain(number, batch) for number in range(chunks // batch)]
    driver.tick(1)

    def save(chain: list[ChunkKey]) -> None:
        driver.commit(driver.reserve(chain).reservation, len(chain))

    def read(chain: list[ChunkKey]) -> None:
        acquired = driver.ask(ev.Acquire, driver.namespace, tuple(chain))
        assert len(acquired.extents) == batch
        driver.ask(ev.Release, (acquired.lease,))

    def match(chain: list[ChunkKey]) -> None:
        assert driver.ask(ev.Match, driver.namespace, tuple(chain)).usable == batch

    table: dict[ChunkKey, int] = {}

    def plain(chain: list[ChunkKey]) -> None:
        for key in chain:
            if key not in table:
                table[key] = len(table)

    for name, action, again in (
        ("reserve + commit", save, False),
        ("acquire + release", read, True),
        ("match", match, True),
        ("(ceiling: insert into a dict)", plain, False),
    ):
        yield {"what": name, "batch": batch, "us_per_key": timed(action, chains, seconds, again=again)}


def timed(
    action: Callable[[list[ChunkKey]], None], chains: list[list[ChunkKey]], seconds: float, *, again: bool
) -> float:
    """Microseconds per key, over all chains once, or again and again until `seconds` are over."""
    done = 0
    began = time.process_time()
    while True:
        for chain in chains:
            action(chain)
        done += len(chains)
        spent = time.process_time() - began
        if not again or spent >= seconds:
            return spent / (done * len(chains[0])) * 1e6


def rss_anon_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")


def in_fresh_process(part: str, *args: object) -> Any:
    command = [sys.executable, "-P", __file__, "--part", part, *map(str, args)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="200,000 chunks instead of 1,000,000")
    parser.add_argument("--json", action="store_true", help="one JSON object in the last line")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        name, *numbers = options.part
        if name == "memory":
            print(json.dumps(memory_per_chunk(int(numbers[0]))))
        else:
            print(json.dumps(list(speeds(int(numbers[0]), float(numbers[1])))))
        return
    memory = in_fresh_process("memory", 200_000 if options.quick else 1_000_000)
    rows = [
        row for batch in (16, 256) for row in in_fresh_process("speed", batch, 0.5 if options.quick else 2.0)
    ]
    print(f"{heading(__file__)}\n")
    print(
        f"{memory['chunks']:,} chunks: RssAnon grew by {memory['rss_anon_bytes'] / 2**20:.0f} MiB, "
        f"{memory['bytes_per_chunk']:.0f} bytes per chunk (goal: at most {BYTES_PER_CHUNK_GOAL})\n"
    )
    print(f"{'':30} {'keys a request':>14} {'CPU µs per key':>15}")
    for row in rows:
        print(f"{row['what']:30} {row['batch']:>14} {row['us_per_key']:>15.2f}")
    if options.json:
        goal = Goal(
            f"daemon memory at {memory['chunks']:,} chunks",
            memory["bytes_per_chunk"],
            "bytes per chunk",
            BYTES_PER_CHUNK_GOAL,
            "<=",
        )
        print(report(__file__, [memory, *rows], [goal]))


if __name__ == "__main__":
    main()
