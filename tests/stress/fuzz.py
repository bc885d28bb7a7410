"""Bytes from outside against every parser: what is no message, record, packet or setting of ours must be refused by the
parser's own kind of refusal, and by nothing else.

    make fuzz SECONDS=600 [ARGS='requests config']

Guided by coverage where atheris is installed (`make fuzz` sees to that), each target in a process of its own; what it
finds interesting is kept in .cache/fuzz/TARGET, what breaks a parser in .cache/fuzz/TARGET-*. Without atheris the same
targets get random changes of good inputs, which is what the test suite does for a moment (tests/unit/test_fuzz.py).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import random
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if importlib.util.find_spec("atheris"):
    import atheris

    with atheris.instrument_imports(include=["kvstore"], exclude=["kvstore.v1"]):
        from kvstore import config, errors, promptcache, wire
        from kvstore.replay import readers
        from kvstore.tiers import format
        from kvstore.transport import bytes_service, decoding, descriptors, identities
else:
    from kvstore import config, errors, promptcache, wire
    from kvstore.replay import readers
    from kvstore.tiers import format
    from kvstore.transport import bytes_service, decoding, descriptors, identities

from kvstore.core import events as ev
from kvstore.core.events import SessionEntry, Ticket
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.option_types import whole
from kvstore.sim.world import World, spec
from kvstore.types import ChunkKey, SlabId, WorkerId
from kvstore.v1 import bytes_pb2, descriptor_pb2, hints_pb2, store_pb2

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "fuzz"
TICKET = Ticket(WorkerId(1), 2)
SPEC = NamespaceSpec("m", b"w" * 32, "l", 64, (GroupSpec("full", shard_bytes=4096, shard_count=2),))


@dataclass(frozen=True)
class Target:
    parse: Callable[[bytes], Any]
    refusals: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]
    inputs: int = 3_000
    """How many the test suite tries: fewer of what is slow."""

    def __call__(self, data: bytes) -> None:
        with contextlib.suppress(*self.refusals):
            self.parse(data)


def parse_format(data: bytes) -> None:
    """Each decoder, as it is and with a seal that is right."""
    if not data:
        return
    decoders: list[Callable[[bytes], Any]] = [
        format.decode_slab_header,
        format.decode_record_header,
        format.decode_session_key,
        format.decode_meta,
        format.decode_slab,
        lambda value: format.decode_namespace(1, value),
        format.decode_session_head,
        format.decode_session_page,
        lambda value: format.decode_chunks([value], shards=1 + data[0] % 4),
    ]
    decode = decoders[data[0] % len(decoders)]
    decode(data[1:])
    decode(format._seal(data[1:]))


CALLS = [*decoding.STORE_CALLS.values(), *decoding.HINTS_CALLS.values(), *decoding.STATS_CALLS.values()]


def parse_request(data: bytes) -> None:
    """The first byte chooses the request."""
    if not data:
        return
    call = CALLS[data[0] % len(CALLS)]
    message = wire.parse(call.request, data[1:])
    assert call.event is not None
    call.event(message, TICKET)


def parse_attach(data: bytes) -> None:
    message = wire.parse(store_pb2.AttachRequest, data)
    decoding.lease_ids(message.release_lease_ids)
    name = message.WhichOneof("body")
    call = decoding.ATTACH_CALLS.get(name or "")
    if call is not None and call.event is not None:
        call.event(getattr(message, name), TICKET)


def parse_packet(data: bytes) -> None:
    request = descriptors._parsed(data)
    if request.WhichOneof("body") == "hello":
        descriptors._check_hello(request.hello)


def parse_frame(data: bytes) -> None:
    bytes(bytes_service.payload_of(data))


def parse_config(data: bytes) -> None:
    """Lines of NAME=VALUE after a first line "environment", else TOML."""
    text = data.decode("utf-8", "replace")
    head, _, lines = text.partition("\n")
    if head == "environment":
        pairs = (line.partition("=") for line in lines.splitlines())
        environment = {config.ENVIRONMENT_PREFIX + name: value for name, _, value in pairs}
        config.load(toml={}, environment=environment, flags={})
        return
    try:
        toml = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    config.load(toml=toml, environment={}, flags={})


def parse_schema(data: bytes) -> None:
    """What is read is written and read as the same, and has a layout."""
    schema = promptcache.parse_schema(data)
    assert promptcache.parse_schema(schema.to_pml()) == schema
    layout = promptcache.Layout(schema, promptcache.ByteTokenizer())
    keys = list(promptcache.Encoding(layout, bytes(32)).keys())
    assert len(keys) == len(set(keys)) or schema.scaffolds


TRIP = promptcache.parse_schema(
    "<schema name='s'><user><module name='a'>A<param name='p' len='9'/><union scaffold='c'><module name='b'/>"
    "<module name='c'>C</module></union></module></user><module name='d.e'>D</module></schema>"
)


def parse_prompt(data: bytes) -> None:
    """What is read is written and read as the same, and each of its positions is taken once."""
    prompt = promptcache.parse_prompt(data, TRIP)
    assert promptcache.parse_prompt(prompt.to_pml(), TRIP) == prompt
    layout = promptcache.Layout(TRIP, promptcache.ByteTokenizer())
    positions = layout.place(prompt).positions
    assert positions == sorted(set(positions))


def in_a_file(name: str, data: bytes, read: Callable[[str], Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, name)
        Path(path).write_bytes(data)
        return read(path)


def parse_access(data: bytes) -> None:
    """What is let in has a name, a tenant and a role; who shows nothing is not let in."""
    found = in_a_file("access.toml", data, lambda path: identities.read(path, {"TOKEN": "t" * 40}))
    known = [*found.by_token.values(), *found.by_certificate.values(), *found.by_service_account.values()]
    assert known and all(each.name and each.tenant and each.roles for each in known)
    assert all(min(rates.calls_per_s, rates.bytes_per_s) >= 0 for rates in found.rates.values())
    with contextlib.suppress(errors.Unauthenticated):
        found.of("Bearer " + data[:40].decode("latin-1"), (), 0.0)
        raise AssertionError("somebody came in with no token of the file")


def parse_trace(data: bytes) -> None:
    """The first byte chooses the format, and whether it is compressed. Times go up from 0."""
    if not data:
        return
    name = list(readers.FORMATS)[data[0] % len(readers.FORMATS)]
    file = "trace.zst" if data[0] & 128 else "trace"
    trace = in_a_file(file, data[1:], lambda path: readers.read_trace(path, name))
    at = [turn.at_ms for turn in trace]
    assert at and at == sorted(at) and at[0] >= 0
    assert all(turn.input_tokens >= 0 and turn.history <= len(turn.chunks) for turn in trace)


def parse_deltas(data: bytes) -> None:
    """Messages of one scheduler, each after its length: whatever their numbers, a delta is taken behind the message
    before it alone, and the store's own invariants hold (the world checks them)."""
    world = World()
    worker = world.join()
    namespace = world.open(spec(shard_bytes=100), worker)
    while data:
        length, data = data[0], data[1:]
        message = wire.parse(hints_pb2.PublishQueueRequest, data[:length])
        data = data[length:]
        message.namespace_id = int(namespace)
        call = decoding.HINTS_CALLS["PublishQueue"]
        assert call.event is not None
        event = call.event(message, Ticket(worker, 0))
        feed = world.store.queue.feeds.get(worker, {}).get(namespace)
        before = feed.number if feed is not None else 0
        world.tick(1)
        said = {"removed": event.removed, "snapshot": event.snapshot, "ttl_ms": event.ttl_ms}
        answer = world.ask(ev.PublishQueue, worker, namespace, event.hints, number=event.number, **said)
        lost = bool(event.number) and not event.snapshot and event.number > before + 1
        assert answer.snapshot_wanted == lost, (event, before)
        assert len(answer.results) == len(event.hints)


HELLO = descriptor_pb2.DescriptorRequest(
    hello=descriptor_pb2.Hello(protocol=2, client="c", engine_group="g", rank=3)
).SerializeToString()
OPEN = store_pb2.OpenRequest(request_id=1, namespace=wire.spec_to_proto(SPEC))
RESERVE = store_pb2.ReserveRequest(request_id=2, namespace_id=1, keys=[b"k", b"j"], token_counts=[64, 3])
MESSAGES = (
    hints_pb2.PublishQueueRequest(number=1, hints=[hints_pb2.Hint(job=b"a", position=1, keys=[b"k"])]),
    hints_pb2.PublishQueueRequest(number=2, delta=True, hints=[hints_pb2.Hint(job=b"b", session=b"s")]),
    hints_pb2.PublishQueueRequest(number=2, delta=True, removed=[b"a"]),
    hints_pb2.PublishQueueRequest(number=9, delta=True, removed=[b"a"], ttl_ms=5),
    hints_pb2.PublishQueueRequest(
        number=3, delta=True, hints=[hints_pb2.Hint(job=b"a", position=7, keys=[b"k"])]
    ),
)
DELTAS = b"".join(bytes([message.ByteSize()]) + message.SerializeToString() for message in MESSAGES)
TRACES = {
    "mooncake": b'{"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}\n' * 2,
    "agentic": b'{"requests": [{"t": 0, "in": 600, "out": 9, "h": [[1, 9]]}, {"t": 1, "requests": []}]}\n',
    "sharegpt": b'{"turns": [[100, 200], [30, 90]]}\n',
    "azure": b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n",
    "lmcache": b'{"timestamp": 1, "session_id": "s", "input": "' + b"x" * 99 + b'", "output": "y"}\n',
    "recorded": b'{"t": 1, "w": 0, "n": 0, "c": 64, "b": 4096, "ask": [1]}\n'
    b'{"t": 2, "w": 0, "n": 0, "c": 64, "b": 4096, "save": [2], "after": 1}\n',
}
ACCESS = b"""[[identity]]
name = "a"
tenant = "t"
roles = ["worker", "scheduler"]
token_sha256 = "%s"
token_env = "TOKEN"
certificate = "c.example"
expires = 2027-06-01T00:00:00Z
[tenants.t]
calls_per_s = 2_000
""" % (b"0123456789abcdef" * 4)
PAGE = next(format.encode_session_pages([SessionEntry(ChunkKey(b"a"), 0, 4)]))

TARGETS = {
    "format": Target(
        parse_format,
        (),
        (
            b"\0" + format.encode_slab_header(format.SlabHeader(SlabId(7), 8192, 3, True)),
            b"\5" + format.encode_namespace(format.NamespaceRecord(1, "t", SPEC)),
            b"\7" + PAGE,
        ),
    ),
    "requests": Target(
        parse_request,
        (errors.StoreError,),
        (b"\0" + OPEN.SerializeToString(), b"\5" + RESERVE.SerializeToString()),
    ),
    "attach": Target(
        parse_attach,
        (errors.StoreError,),
        (
            store_pb2.AttachRequest(reserve=RESERVE, release_lease_ids=[1, 2]).SerializeToString(),
            store_pb2.AttachRequest(open=OPEN).SerializeToString(),
        ),
    ),
    "packets": Target(parse_packet, (errors.StoreError,), (HELLO,)),
    "frames": Target(
        parse_frame, (errors.StoreError,), (bytes_pb2.PutFrame(payload=b"abc").SerializeToString(),)
    ),
    "schemas": Target(
        parse_schema,
        (errors.StoreError,),
        (
            TRIP.to_pml().encode(),
            b"<?xml version='1.0'?><schema name=s>a < b && c <!-- x --><![CDATA[<user>]]>&lt;<param a 3>\n</schema>",
            b"<schema name='s'>\n <module name=a cache=false>\n x</module><scaffold modules='a'/></user></schema>",
        ),
    ),
    "prompts": Target(
        parse_prompt,
        (errors.StoreError,),
        (
            b"<prompt schema='s'><a p='1'>t<b/></a> &amp; x<y <d.e/><user>q</user></prompt>",
            b"<prompt schema=s>f<int>(x)<a><param name=p>1</param></a></prompt>",
        ),
    ),
    "access": Target(parse_access, (errors.ConfigError,), (ACCESS,), inputs=800),
    "traces": Target(
        parse_trace,
        (errors.StoreError,),
        tuple(bytes([list(readers.FORMATS).index(name)]) + text for name, text in TRACES.items()),
        inputs=800,
    ),
    "deltas": Target(parse_deltas, (errors.StoreError,), (DELTAS,), inputs=300),
    "config": Target(
        parse_config,
        (errors.ConfigError,),
        (
            b'dram_bytes = "4G"\nhuge_pages = true\n[tenants]\n"7" = "t"\n',
            b"lease_ttl_ms=5\ntenants=1=a,2=b\n",
        ),
    ),
}


def changed(chance: random.Random, data: bytes) -> bytes:
    """A few bytes flipped, cut, doubled or put in."""
    changing = bytearray(data)
    for _ in range(chance.randrange(1, 5)):
        place = chance.randrange(len(changing) + 1)
        match chance.randrange(5):
            case 0 if place < len(changing):
                changing[place] = chance.randrange(256)
            case 1:
                del changing[place : place + chance.randrange(8)]
            case 2:
                changing[place:place] = chance.randbytes(chance.randrange(1, 9))
            case 3:
                changing[place:place] = changing[: chance.randrange(40)]
            case _:
                changing[place:place] = b"\xff" * chance.choice((1, 4, 9))
    return bytes(changing[:100_000])


def without_guidance(name: str, seconds: float) -> None:
    target, chance = TARGETS[name], random.Random()
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        data = changed(chance, chance.choice((*target.seeds, b"")))
        count += 1
        try:
            target(data)
        except BaseException:
            print(f"{name}: {data!r}")
            raise
    print(f"{name}: {count:,} inputs, nothing found (without guidance: atheris is not installed)")


def guided(name: str, seconds: int) -> None:
    """Does not return."""
    corpus = CACHE / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(TARGETS[name].seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    options = (f"-max_total_time={seconds}", "-max_len=8192", "-verbosity=0", "-print_final_stats=1")
    atheris.Setup([sys.argv[0], str(corpus), f"-artifact_prefix={CACHE}/{name}-", *options], TARGETS[name])
    atheris.Fuzz()


def main() -> int:
    options = argparse.ArgumentParser(description="Fuzz the parsers.")
    options.add_argument("targets", nargs="*", choices=[*TARGETS, []], help="default: all")
    options.add_argument("--seconds", type=whole(1), default=60, help="all targets together")
    options.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    names = given.targets or list(TARGETS)
    if given.here:
        (guided if importlib.util.find_spec("atheris") else without_guidance)(names[0], given.seconds)
        return 0
    broken = []
    for name in names:
        share = max(1, given.seconds // len(names))
        command = [sys.executable, "-P", __file__, name, "--here", f"--seconds={share}"]
        print(f"--- {name}, {share} s", flush=True)
        done = subprocess.run(command, timeout=10 * share + 120, check=False, env={**os.environ})
        if done.returncode:
            broken.append(name)
    print(f"broken: {', '.join(broken) or 'none'}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
