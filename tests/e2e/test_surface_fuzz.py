"""Every method of every service, found in the protos' own descriptors, called with messages that fit their types and
nothing else: each field set, left out or out of range, lists of thousands, unknown fields, nesting without end, bytes
flipped and cut, several messages where one belongs and none where one belongs.

The daemon answers each with a reply or with a status that names the mistake, never with INTERNAL or UNKNOWN, and holds
its invariants in the end (it checks them when it stops, see conftest). A run is repeated by its seed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from kvstore import v1, wire
from kvstore.v1 import store_pb2

SEEDS = [int(seed) for seed in os.environ.get("FUZZ_SEEDS", "1 2").split()]
CALLS = int(os.environ.get("FUZZ_CALLS", "600"))
TIMEOUT_S = 20.0
NUMBERS = (0, 1, 2, 3, 7, 64, 255, 4_096, 4_097, (1 << 31) - 1, (1 << 32) - 1, (1 << 63) - 1)
FAULTS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
SELDOM = {"shards", "parent", "parents", "token_counts", "maker", "frame_bytes"}
"""What makes most requests wrong at once when it is filled by chance."""
DEEP = b"\x0b" * 5_000
"""The beginning of a group, field 1, again and again."""


def methods() -> list[MethodDescriptor]:
    folder = os.path.dirname(v1.__file__)
    names = sorted(name.removesuffix(".py") for name in os.listdir(folder) if name.endswith("_pb2.py"))
    modules = [__import__(f"kvstore.v1.{name}", fromlist=["DESCRIPTOR"]) for name in names]
    services = [one for module in modules for one in module.DESCRIPTOR.services_by_name.values()]
    return [method for service in services for method in service.methods]


class Strange:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.known: list[int] = [1, 2]
        """Numbers that the daemon gave out."""
        self.keys = [b"k%d" % number for number in range(12)]

    def message(self, kind: Any, depth: int = 0) -> Any:
        message = GetMessageClass(kind)()
        for field in kind.fields:
            if self.random.random() < (0.8 if field.name in SELDOM else 0.15) or depth > 4:
                continue
            if field.name == "namespace_id" and self.random.random() < 0.9:
                message.namespace_id = 1
                continue
            value = getattr(message, field.name)
            if field.is_repeated:
                count = self.random.choice((0, 1, 1, 2, 3, 16, 17)) if self.random.random() < 0.97 else 5_000
                for _ in range(count):
                    if field.message_type and count < 100:
                        value.add().CopyFrom(self.message(field.message_type, depth + 1))
                    elif not field.message_type:
                        value.append(self.value(field))
            elif field.message_type:
                value.CopyFrom(self.message(field.message_type, depth + 1))
            else:
                setattr(message, field.name, self.value(field))
        return message

    def value(self, field: FieldDescriptor) -> Any:
        usual = self.random.random() < 0.9
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_BOOL:
                return self.random.random() < 0.5
            case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
                return (
                    self.random.choice(self.keys)
                    if usual
                    else self.random.randbytes(self.random.choice((0, 16, 65, 9_000)))
                )
            case FieldDescriptor.CPPTYPE_STRING:
                return self.random.choice(("full", "m", "", "ü" * 300, "\x00\n\x1b[2J"))
            case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
                return self.random.choice((0.0, -1.0, float("nan"), float("inf")))
            case FieldDescriptor.CPPTYPE_ENUM:
                return self.random.choice([each.number for each in field.enum_type.values])
        number = self.random.choice(self.known[-12:] if usual else NUMBERS)
        signed = field.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
        wide = field.cpp_type in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
        number &= (1 << (63 if wide else 31)) - 1
        return -number if signed and self.random.random() < 0.3 else number

    def bytes_of(self, kind: Any) -> bytes:
        data = bytearray(self.message(kind).SerializeToString())
        match self.random.randrange(12):
            case 0:  # a field that nobody knows
                data += b"\xfa\x3f" + bytes([20]) + self.random.randbytes(20)
            case 1:
                data += DEEP
            case 2 if data:
                data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
            case 3:
                del data[self.random.randrange(len(data) + 1) :]
            case 4:
                data *= 2
        return bytes(data)

    def requests(self, kind: Any) -> Iterator[bytes]:
        for _ in range(self.random.choice((1, 1, 1, 1, 0, 2, 5))):
            yield self.bytes_of(kind)

    def learn(self, message: Any) -> None:
        """Every number in a reply may be the id of something."""
        for field, value in message.ListFields():
            if field.message_type and field.message_type.GetOptions().map_entry:
                continue
            for each in value if field.is_repeated else (value,):
                if field.message_type:
                    self.learn(each)
                elif isinstance(each, int) and not isinstance(each, bool) and 0 < each < 1 << 63:
                    self.known.append(each)
        del self.known[:-64]


WANTED = {"Match", "Acquire", "GetStats", "Get", "Attach", "ListSessions"}
"""Methods that must have been called with something that they could answer."""


@pytest.mark.parametrize("protection", ["sealed", "group"])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_method_with_strange_messages(
    start_daemon: Callable[..., Any], connect: Callable[..., Any], spec: Any, seed: int, protection: str
) -> None:
    daemon = start_daemon(
        protection=protection,
        dram_bytes=16 << 20,
        segment_bytes=2 << 20,
        lease_ttl_ms=300,
        reservation_ttl_ms=300,
        peer_timeout_ms=500,
        ssd_dir="",
    )
    worker = connect(daemon)
    worker.call("Open", store_pb2.OpenRequest(namespace=wire.spec_to_proto(spec)))
    strange = Strange(seed)
    reached = set()
    hello = store_pb2.AttachHello(token=worker.hello.token, boot_id=worker.hello.boot_id, request_id=1)
    greeting = store_pb2.AttachRequest(hello=hello).SerializeToString()
    all_methods = methods()
    for number in range(25 * CALLS):
        if (
            number >= CALLS and reached >= WANTED
        ):  # which calls make sense is chance, also that of the daemon's answers
            break
        method = all_methods[number % len(all_methods)]
        requests = list(strange.requests(method.input_type))
        if method.name == "Attach" and strange.random.random() < 0.8:
            requests.insert(0, greeting)
        call = worker.channel.stream_stream(f"/{method.containing_service.full_name}/{method.name}")(
            iter(requests), metadata=worker.metadata, timeout=TIMEOUT_S
        )
        refusal = None
        try:
            for count, reply in enumerate(call):
                message = GetMessageClass(method.output_type).FromString(reply)
                error = getattr(message, "error", None)
                assert getattr(error, "code", 0) != 13, (seed, number, method.full_name, message)
                strange.learn(message)
                if count == 3 or method.name.startswith("Watch"):
                    call.cancel()
                    break
            reached.add(method.name)
        except grpc.RpcError as error:
            refusal = error
        if refusal is not None:
            assert refusal.code() not in FAULTS, (
                seed,
                number,
                method.full_name,
                refusal,
                daemon.lines[-1].get("exception"),
            )
            assert refusal.details(), "a refusal says why"
    assert reached >= WANTED, reached
    worker.ask_stats()
    for pool in worker.ask_stats().pools:
        assert pool.free + pool.reserved + pool.ready + pool.quarantined == pool.capacity
    assert not [line for line in daemon.lines if line["level"] in ("error", "critical")]
