"""Streams of requests that are well formed but hostile: odd numbers, wrong ids, every field set or left out. The daemon
must answer, never with INTERNAL, and hold all its invariants in the end (it checks them when it stops, see conftest).

A run is repeated by its seed: a seed that ever failed stays in SEEDS.
"""

import random
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from kvstore import wire
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.transport.decoding import ATTACH_CALLS
from kvstore.v1 import store_pb2

SEEDS = (1, 2, 3)
REQUESTS = 3_000
IN_FLIGHT = 64
WANTED = {"acquire", "reserve", "commit", "update_session"}
"""Requests that the daemon must have been able to carry out at least once."""
HUGE = (0, 1, 255, 256, 4095, 4096, 4097, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
OFTEN = {"reserve": 8, "commit": 8, "acquire": 6, "release": 4, "update_session": 5, "truncate": 3, "fork": 2}
NUMBERS = {FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_FIXED64}


@pytest.fixture(params=[True, False], ids=["lane", "grpc"])
def fast_lane(request: pytest.FixtureRequest) -> bool:
    return request.param


class Hostile:
    def __init__(self, seed: int, namespaces: list[int], *, staged: bool) -> None:
        self.random = random.Random(seed)
        self.namespaces = namespaces
        self.staged = staged
        self.leases = [1]
        self.reservations = [(1, 1)]
        """With how many pieces to stage."""
        self.keys = [bytes([number]) * self.random.choice((1, 8, 32)) for number in range(20)]

    def request(self) -> tuple[str, Any]:
        field = self.random.choices([*ATTACH_CALLS], [OFTEN.get(name, 1) for name in ATTACH_CALLS])[0]
        body = getattr(store_pb2.AttachRequest(), field)
        self.fill(body)
        if field == "commit" and self.random.random() < 0.9:
            body.reservation_id, pieces = self.random.choice(self.reservations)
            del body.staging_offsets[:]
            body.staging_offsets.extend(4096 * self.random.randrange(4) for _ in range(pieces * self.staged))
            body.wait = 0
        return field, body

    def fill(self, message: Any) -> None:
        for field in message.DESCRIPTOR.fields:
            if field.name == "request_id" or (
                self.random.random() < 0.15 and field.name not in ("namespace_id", "keys")
            ):
                continue
            if field.name in ("parents", "token_counts", "shards", "maker") and self.random.random() < 0.7:
                continue
            if field.is_repeated:
                count = self.random.choice((0, 1, 1, 2, 4, 16))
                if field.name in ("parents", "token_counts"):
                    count = len(message.keys)
                for _ in range(count):
                    if field.message_type:
                        self.fill(getattr(message, field.name).add())
                    else:
                        getattr(message, field.name).append(self.value(field))
            elif field.message_type:
                self.fill(getattr(message, field.name))
            else:
                setattr(message, field.name, self.value(field))

    def value(self, field: FieldDescriptor) -> Any:
        odd = self.random.random() < 0.05
        if field.name == "namespace_id":
            return self.random.choice([0, 99] if odd else self.namespaces)
        if field.name in ("lease_id", "lease_ids", "reservation_ids"):
            return self.random.choice(self.leases[-8:] + [number for number, _ in self.reservations[-8:]])
        if field.name in ("session", "new_session"):
            return self.random.choice([b"", b"s" * 257] if odd else [b"a", b"b", b"c", b"d"])
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self.random.choice([b"", b"x" * 65] if odd else [*self.keys, b"m" * 16])
        if field.type == FieldDescriptor.TYPE_STRING:
            return self.random.choice(("full", "window", "", "m"))
        if field.type == FieldDescriptor.TYPE_BOOL:
            return self.random.random() < 0.3
        if field.type == FieldDescriptor.TYPE_SINT64:
            return self.random.choice((-(1 << 63), 1 << 62) if odd else (0, 16, -16))
        if field.type == FieldDescriptor.TYPE_UINT32:
            return self.random.choice((255, (1 << 32) - 1) if odd else (0, 0, 1, 2))
        if field.type == FieldDescriptor.TYPE_ENUM:
            return 99 if odd else self.random.choice(field.enum_type.values).number
        assert field.type in NUMBERS, field.name
        return self.random.choice(HUGE if odd else (0, 1, 2, 8, 16, 32))

    def learn(self, reply: store_pb2.AttachReply) -> None:
        match reply.WhichOneof("body"):
            case "acquire":
                self.leases.append(reply.acquire.lease_id)
            case "reserve" if reply.reserve.reservation_id:
                self.reservations.append((reply.reserve.reservation_id, len(reply.reserve.extents.length)))
                del self.reservations[:-4]


@pytest.mark.parametrize("protection", ["sealed", "group"])
@pytest.mark.parametrize("seed", SEEDS)
def test_hostile_requests(start_daemon, connect, seed, protection):
    daemon = start_daemon(
        protection=protection,
        dram_bytes=16 << 20,
        segment_bytes=2 << 20,
        lease_ttl_ms=300,
        reservation_ttl_ms=300,
        incomplete_ttl_ms=500,
    )
    worker = connect(daemon)
    stream = worker.attach()
    if protection == "sealed":
        worker.staging(1 << 20).close()
    specs = [
        NamespaceSpec(
            model=f"m{number}",
            weights_digest=b"w",
            layout_fingerprint="l",
            chunk_tokens=16,
            groups=(GroupSpec("g", shard_bytes=size, shard_count=number % 2 + 1),),
        )
        for number, size in enumerate((4096, 70_000, 300_000, 4096))
    ]
    namespaces = [
        stream.ask("open", store_pb2.OpenRequest(namespace=wire.spec_to_proto(spec))).namespace_id
        for spec in specs
    ]
    hostile = Hostile(seed, namespaces, staged=protection == "sealed")
    waiting: list[tuple[int, str, Any]] = []
    answered = set()
    for number in range(5 * REQUESTS):
        if (
            number >= REQUESTS
            and not waiting
            and {name for name, body in answered if body != "error"} >= WANTED
        ):
            break  # which requests make sense is chance, also that of the daemon's answers
        field, request = hostile.request()
        waiting.append((stream.send(field, request), field, request))
        if len(waiting) == IN_FLIGHT:
            for number, name, body in waiting:
                reply = stream.wait_for(lambda number=number: stream.replies.get(number))
                assert reply.error.code != 13, (seed, name, body, reply)
                answered.add((name, reply.WhichOneof("body")))
                hostile.learn(reply)
            waiting.clear()
    assert {name for name, body in answered if body != "error"} >= WANTED
    for pool in worker.ask_stats().pools:
        assert pool.free + pool.reserved + pool.ready + pool.quarantined == pool.capacity
