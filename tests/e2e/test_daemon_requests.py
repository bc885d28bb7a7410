"""What a peer may send, and what it gets for what it must not send."""

import dataclasses
import os
import queue
import signal
import socket

import grpc
import pytest

from kvstore import wire
from kvstore.errors import BadRequest, Exhausted, NotFound, Precondition, Unauthenticated
from kvstore.layout import GroupSpec
from kvstore.v1 import bytes_pb2, descriptor_pb2, stats_pb2, store_pb2, types_pb2

from .ssd_tools import eventually
from .test_daemon_start_stop import free_port

SHARD = 256 << 10


@pytest.fixture(params=[True, False], ids=["lane", "grpc"])
def fast_lane(request):
    return request.param


def raw_call(worker, name: str, data: bytes) -> bytes:
    call = worker.channel.unary_unary(f"/kvstore.v1.{name}")
    try:
        return call(data, metadata=worker.metadata, timeout=20)
    except grpc.RpcError as error:
        raise wire.error_from_status(
            error.code().value[0], error.details(), error.trailing_metadata()
        ) from None


def conserved(worker) -> None:
    for pool in worker.ask_stats().pools:
        assert pool.free + pool.reserved + pool.ready + pool.quarantined == pool.capacity


def save(worker, stream, namespace: int, keys: list[bytes], fill: int) -> store_pb2.CommitReply:
    """Commit one shard of `fill` bytes for each key, by way of staging memory."""
    memory = worker.staging(len(keys) * SHARD)
    memory[:] = bytes([fill]) * len(memory)
    reserved = stream.ask("reserve", store_pb2.ReserveRequest(namespace_id=namespace, keys=keys))
    offsets = [index * SHARD for index in range(len(keys))]
    committed = stream.ask(
        "commit", store_pb2.CommitRequest(reservation_id=reserved.reservation_id, staging_offsets=offsets)
    )
    memory.close()
    return committed


# ---------------------------------------------------------------------------------------------------------- identity


@pytest.mark.parametrize(
    ("metadata", "why"),
    [((), "no token in the metadata"), (((wire.TOKEN_METADATA, b"x" * 32),), "unknown token")],
)
def test_no_token_no_answer(daemon, worker, metadata, why):
    with pytest.raises(grpc.RpcError) as caught:
        worker.store.Match(store_pb2.MatchRequest(namespace_id=1, keys=[b"k"]), metadata=metadata, timeout=20)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert why in caught.value.details()
    assert "say hello on the descriptor socket" in caught.value.details()


def test_a_closed_connection_ends_the_token_and_the_stream(daemon, worker, namespace):
    stream = worker.attach()
    stream.ask("heartbeat", store_pb2.HeartbeatRequest())
    worker.socket.close()
    assert isinstance(stream.wait_for_end(), Unauthenticated)
    with pytest.raises(Unauthenticated, match="unknown token"):
        worker.call("Match", store_pb2.MatchRequest(namespace_id=namespace, keys=[b"k"]))


def test_another_worker_has_to_open_the_namespace_itself(daemon, connect, namespace):
    """Namespace ids are small numbers: knowing one is not enough."""
    other = connect(daemon)
    with pytest.raises(NotFound, match="is not open for this caller"):
        other.call("GetSession", store_pb2.GetSessionRequest(namespace_id=namespace + 1, session=b"s"))
    with pytest.raises(Exception, match="bytes are only for workers that opened it"):
        other.call("Acquire", store_pb2.AcquireRequest(namespace_id=namespace, keys=[b"k"]))
    with pytest.raises(Exception, match="bytes are only for workers that opened it"):
        list_of(get(other, namespace, b"k"))


def test_all_that_a_request_may_name_is_explained(worker, namespace):
    """However many steps of the core that takes."""
    keys = [b"%d" % number for number in range(4_096)]
    told = worker.ask_stats("Explain", stats_pb2.ExplainRequest(namespace_id=namespace, keys=keys))
    assert [chunk.key for chunk in told.chunks] == keys


# ------------------------------------------------------------------------------------------------------ bad messages


def test_garbage_is_refused_by_name(worker, subtests):
    for name, kind in (
        ("Store/Match", "MatchRequest"),
        ("Store/Open", "OpenRequest"),
        ("Stats/GetStats", "GetStatsRequest"),
        ("Stats/Explain", "ExplainRequest"),
        ("Bytes/Get", "GetRequest"),
    ):
        with subtests.test(name=name), pytest.raises(BadRequest, match=f"is not a valid {kind}"):
            raw_call(worker, name, b"\xff\xff\xff")


def test_invalid_utf8_gets_our_message(worker):
    model = b"\x0a\x02\xff\xfe"  # field 1 of Namespace, a string
    with pytest.raises(BadRequest, match=r"is not a valid OpenRequest.*text fields must be UTF-8"):
        raw_call(worker, "Store/Open", b"\x12" + bytes([len(model)]) + model)


def test_invalid_utf8_on_the_stream_ends_it_with_our_message(daemon, worker):
    class Garbage:
        def SerializeToString(self) -> bytes:
            return b"\x12\x06\x12\x04\x0a\x02\xff\xfe"

    call = worker.channel.stream_stream(
        "/kvstore.v1.Store/Attach", request_serializer=lambda message: message.SerializeToString()
    )
    hello = store_pb2.AttachHello(request_id=1, token=worker.hello.token, boot_id=worker.hello.boot_id)
    for _ in range(30):  # the status once was lost, one time in six, when the welcome was still being sent
        with pytest.raises(grpc.RpcError) as caught:
            list(call(iter([store_pb2.AttachRequest(hello=hello), Garbage()]), timeout=20))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "is not a valid AttachRequest" in caught.value.details()


HUGE = (1 << 64) - 1


BOUNDS = [
    (
        "Match",
        store_pb2.MatchRequest(namespace_id=1, keys=[b"k"] * 4097),
        "number of keys=4097: a request has at most 4096",
    ),
    (
        "Match",
        store_pb2.MatchRequest(namespace_id=1, keys=[b"k" * 65]),
        "keys.0.=65 bytes: a key has 1 to 64 bytes",
    ),
    (
        "Match",
        store_pb2.MatchRequest(namespace_id=1, keys=[b"k", b""]),
        "keys.1.=0 bytes: a key has 1 to 64",
    ),
    ("Match", store_pb2.MatchRequest(namespace_id=1), "keys=..: name at least one key"),
    (
        "Match",
        store_pb2.MatchRequest(namespace_id=HUGE, keys=[b"k"]),
        f"namespace_id={HUGE}: must be between",
    ),
    ("Match", store_pb2.MatchRequest(keys=[b"k"]), "namespace_id=0: must be between 1 and"),
    (
        "Match",
        store_pb2.MatchRequest(namespace_id=1, keys=[b"k"], token_count=HUGE),
        f"token_count={HUGE}: must be",
    ),
    (
        "Acquire",
        store_pb2.AcquireRequest(namespace_id=1, keys=[b"k"], ttl_ms=HUGE),
        f"ttl_ms={HUGE}: must be between",
    ),
    (
        "Acquire",
        store_pb2.AcquireRequest(namespace_id=1, keys=[b"k"], wait_ms=HUGE),
        f"wait_ms={HUGE}: must be",
    ),
    (
        "Acquire",
        store_pb2.AcquireRequest(namespace_id=1, keys=[b"k"], shards=[256]),
        "shards=256: must be between",
    ),
    (
        "Acquire",
        store_pb2.AcquireRequest(namespace_id=1, keys=[b"k"], shards=[0] * 300),
        "number of shards=300",
    ),
    (
        "Acquire",
        store_pb2.AcquireRequest(namespace_id=1, keys=[b"k"], shards=[1, 1]),
        "names a shard twice",
    ),
    (
        "Renew",
        store_pb2.RenewRequest(lease_ids=range(5000)),
        "number of lease_ids=5000: a request has at most",
    ),
    (
        "Reserve",
        store_pb2.ReserveRequest(namespace_id=1, keys=[b"k"], maker=b"m"),
        "maker=6d: has 16 bytes or none",
    ),
    (
        "Reserve",
        store_pb2.ReserveRequest(namespace_id=1, keys=[b"k"], parents=[b"p"] * 2),
        "number of parents=2",
    ),
    (
        "Reserve",
        store_pb2.ReserveRequest(namespace_id=1, keys=[b"k"], parent=b"p" * 65),
        "parent.0.=65 bytes",
    ),
    (
        "Reserve",
        store_pb2.ReserveRequest(namespace_id=1, keys=[b"k"], token_counts=[0]),
        "token_counts=0: must be",
    ),
    (
        "Reserve",
        store_pb2.ReserveRequest(namespace_id=1, keys=[b"k"], token_counts=[HUGE]),
        "token_counts=1844674407370",
    ),
    ("Commit", store_pb2.CommitRequest(reservation_id=1, wait=7), "wait=7: must be between 0 and 1"),
    (
        "Commit",
        store_pb2.CommitRequest(reservation_id=1, staging_offsets=[HUGE]),
        f"staging_offsets={HUGE}",
    ),
    (
        "Commit",
        store_pb2.CommitRequest(reservation_id=1, staging_offsets=[0] * 16_385),
        "number of staging_offsets=16385",
    ),
    ("Fill", store_pb2.FillRequest(reservation_id=1, offsets=[0] * 16_385), "number of offsets=16385"),
    ("Fill", store_pb2.FillRequest(reservation_id=1, numbers=range(16_385)), "number of numbers=16385"),
    (
        "Open",
        store_pb2.OpenRequest(namespace=types_pb2.Namespace(groups=[types_pb2.Group()] * 257)),
        "number of namespace.groups=257",
    ),
    (
        "Open",
        store_pb2.OpenRequest(
            namespace=types_pb2.Namespace(
                groups=[types_pb2.Group(layers=[types_pb2.LayerSlice()] * 5_500)] * 3
            )
        ),
        "layer slices in all=16500: must be between 0 and 16384",
    ),
    ("GetSession", store_pb2.GetSessionRequest(namespace_id=1), "session=0 bytes: has 1 to 256 bytes"),
    (
        "GetSession",
        store_pb2.GetSessionRequest(namespace_id=1, session=b"s" * 257),
        "session=257 bytes: has 1 to 256",
    ),
    (
        "UpdateSession",
        store_pb2.UpdateSessionRequest(
            namespace_id=1, session=b"s", append=[store_pb2.SessionEntry(key=b"k", token_count=HUGE)]
        ),
        "append.0..token_count=18446744073709551615: must be between",
    ),
    (
        "UpdateSession",
        store_pb2.UpdateSessionRequest(
            namespace_id=1,
            session=b"s",
            append=[store_pb2.SessionEntry(key=b"k", token_count=1, delta=-(1 << 62))],
        ),
        "append.0..delta=-4611686018427387904: must be between",
    ),
    (
        "Truncate",
        store_pb2.TruncateRequest(namespace_id=1, session=b"s", first_token=HUGE),
        "first_token=184467440737",
    ),
    (
        "Fork",
        store_pb2.ForkRequest(namespace_id=1, session=b"s"),
        "new_session=0 bytes: has 1 to 256 bytes",
    ),
    ("Forget", store_pb2.ForgetRequest(namespace_id=1), "name either a session or keys"),
    (
        "Forget",
        store_pb2.ForgetRequest(namespace_id=1, session=b"s", keys=[b"k"]),
        "name either a session or keys",
    ),
]


def test_bounds(worker, namespace, subtests):
    """The same by a unary call and on the stream, which goes on."""
    stream = worker.attach()
    for call, request, why in BOUNDS:
        field = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in call).removeprefix(
            "_"
        )
        with subtests.test(call=call, why=why):
            with pytest.raises(BadRequest, match=why):
                worker.call(call, request)
            with pytest.raises(BadRequest, match=why):
                stream.ask(field, request)
            stream.ask("heartbeat", store_pb2.HeartbeatRequest())


def test_an_error_carries_field_value_and_remedy(worker):
    with pytest.raises(NotFound) as caught:
        worker.call("GetSession", store_pb2.GetSessionRequest(namespace_id=77, session=b"s"))
    assert (caught.value.field, caught.value.value) == ("namespace_id", "77")
    assert caught.value.remedy


@pytest.mark.parametrize("size", [5 << 20, 1 << 30])
def test_an_oversized_message_is_refused_and_nothing_else_suffers(daemon, worker, size):
    worker.ask_stats()
    before = daemon.rss_anon_bytes
    with pytest.raises(Exhausted, match="larger than max"):
        raw_call(worker, "Store/Match", bytes(size))
    assert daemon.rss_anon_bytes - before < 64 << 20
    worker.ask_stats()


def test_hostile_text_does_not_reach_the_log_as_it_is(daemon, connect):
    connect(daemon, engine_group="g")
    evil = '\x1b[2J"}\n{"message": "forged"}'
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(str(daemon.run_dir / "kvstored.sock"))
        hello = descriptor_pb2.Hello(protocol=2, client=evil)
        peer.send(descriptor_pb2.DescriptorRequest(hello=hello).SerializeToString())
        peer.settimeout(20)
        assert peer.recv(4096)
    daemon.stop()
    assert "forged" not in [line["message"] for line in daemon.lines]
    assert daemon.text == []


# ------------------------------------------------------------------------------------------------------------ attach


def test_stream_round_trip(daemon, worker, namespace):
    stream = worker.attach()
    assert stream.receive(1).lease_ttl_ms == 10_000
    assert save(worker, stream, namespace, [b"a", b"b"], fill=7).results == b"\0\0"
    lease = stream.ask("acquire", store_pb2.AcquireRequest(namespace_id=namespace, keys=[b"a", b"b", b"c"]))
    assert lease.outcomes == bytes([0, 0, 2])
    assert list(lease.extents.length) == [SHARD, SHARD]
    conserved(worker)
    assert stream.ask("release", store_pb2.ReleaseRequest(lease_ids=[lease.lease_id])).count == 1
    assert worker.ask_stats().gauges["leases"] == 0


def test_answers_come_while_a_copy_runs(daemon, worker, namespace):
    """Many requests in flight; each gets its own answer."""
    stream = worker.attach()
    requests = [
        store_pb2.MatchRequest(namespace_id=namespace, keys=[b"%d" % n] * (n % 7 + 1)) for n in range(3000)
    ]
    numbers = [stream.send("match", request) for request in requests]
    for number, request in zip(numbers, requests, strict=True):
        assert len(stream.receive(number).outcomes) == len(request.keys)


def test_a_repeated_request_gets_its_first_answer(daemon, worker, namespace):
    stream = worker.attach()
    first = stream.ask("reserve", store_pb2.ReserveRequest(namespace_id=namespace, keys=[b"k"]))
    request = store_pb2.ReserveRequest(namespace_id=namespace, keys=[b"k"], request_id=2)
    assert worker.call("Reserve", request) == first, "also when it comes another way"
    request.request_id = 99
    assert worker.call("Reserve", request).results == b"\2", "BUSY: held by the first"


def test_a_newer_stream_takes_over(daemon, worker, namespace):
    older = worker.attach()
    older.receive(1)
    newer = worker.attach()
    error = older.wait_for_end()
    assert isinstance(error, Precondition)
    assert "a newer Attach stream" in str(error)
    newer.ask("heartbeat", store_pb2.HeartbeatRequest())


@pytest.mark.parametrize(
    ("hello", "kind", "why"),
    [
        ({"boot_id": b"x" * 16}, Precondition, "the daemon restarted: say hello again"),
        ({"token": b"x" * 32}, Unauthenticated, "unknown token"),
    ],
)
def test_hello_must_be_right(worker, hello, kind, why):
    error = worker.attach(**hello).wait_for_end()
    assert isinstance(error, kind)
    assert why in str(error)


def test_hello_comes_first(worker):
    call = worker.store.Attach(
        iter([store_pb2.AttachRequest(heartbeat=store_pb2.HeartbeatRequest(request_id=1))])
    )
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "the first message of a stream must be hello" in caught.value.details()


def test_hello_comes_once(worker):
    stream = worker.attach()
    stream.receive(1)
    stream.send_raw(store_pb2.AttachRequest(hello=store_pb2.AttachHello(request_id=5)))
    assert "hello comes once" in str(stream.wait_for_end())


def test_an_empty_message_ends_the_stream(worker):
    stream = worker.attach()
    stream.receive(1)
    stream.send_raw(store_pb2.AttachRequest())
    assert "a request has a known body" in str(stream.wait_for_end())


def test_number_zero_is_for_pushes(worker):
    stream = worker.attach()
    stream.send_raw(store_pb2.AttachRequest(heartbeat=store_pb2.HeartbeatRequest()))
    (push,) = stream.wait_for(lambda: stream.pushes[:])
    assert "a request on the stream has a number above 0" in push.error.message


def test_half_close_still_answers_everything(worker, namespace):
    stream = worker.attach()
    numbers = [
        stream.send("match", store_pb2.MatchRequest(namespace_id=namespace, keys=[b"k"])) for _ in range(100)
    ]
    stream.half_close()
    assert stream.wait_for_end() is None
    assert set(numbers) <= stream.replies.keys()


def test_settled_is_pushed(daemon, worker, connect, namespace, spec):
    reader = connect(daemon)
    listening = reader.attach()
    listening.ask("open", store_pb2.OpenRequest(namespace=wire.spec_to_proto(spec)))
    writing = worker.attach()
    reserved = writing.ask("reserve", store_pb2.ReserveRequest(namespace_id=namespace, keys=[b"k"]))
    request = store_pb2.AcquireRequest(namespace_id=namespace, keys=[b"k"], wait_ms=20_000)
    assert listening.ask("acquire", request).outcomes == b"\1"
    worker.staging(SHARD).close()
    writing.ask(
        "commit", store_pb2.CommitRequest(reservation_id=reserved.reservation_id, staging_offsets=[0])
    )
    (push,) = listening.wait_for(lambda: listening.pushes[:])
    assert list(push.chunks_settled.ready) == [b"k"]


# --------------------------------------------------------------------------------------------------------------- tcp


@pytest.fixture(params=["sealed"])
def tcp(start_daemon, request):
    port = free_port()
    daemon = start_daemon(tcp_address=f"127.0.0.1:{port}", tcp_unauthenticated=True, protection=request.param)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield daemon, channel


def test_tcp_serves_without_a_token(tcp, spec):
    _, channel = tcp
    opened = channel.unary_unary("/kvstore.v1.Store/Open")(
        store_pb2.OpenRequest(namespace=wire.spec_to_proto(spec)).SerializeToString(), timeout=20
    )
    assert store_pb2.OpenReply.FromString(opened).namespace_id == 1
    stats = channel.unary_unary("/kvstore.v1.Stats/GetStats")(b"", timeout=20)
    assert b"segments_retired" not in stats, "counters of the whole daemon are for admins"


def test_tcp_has_no_attach(tcp):
    _, channel = tcp
    with pytest.raises(grpc.RpcError) as caught:
        list(channel.stream_stream("/kvstore.v1.Store/Attach")(iter([b""]), timeout=20))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "needs shared memory" in caught.value.details()


@pytest.mark.parametrize("tcp", ["sealed", "group"], indirect=True)
def test_tcp_reserves_nothing_that_it_could_not_write(tcp, spec):
    """Under `group` a commit would have shown whatever the slots held before."""
    _, channel = tcp
    opened = channel.unary_unary("/kvstore.v1.Store/Open")(
        store_pb2.OpenRequest(namespace=wire.spec_to_proto(spec)).SerializeToString(), timeout=20
    )
    namespace = store_pb2.OpenReply.FromString(opened).namespace_id
    request = store_pb2.ReserveRequest(namespace_id=namespace, keys=[b"a", b"b"])
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/kvstore.v1.Store/Reserve")(request.SerializeToString(), timeout=20)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "Bytes.Put" in caught.value.details()


def test_tcp_checks_a_token_that_is_given(tcp):
    _, channel = tcp
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/kvstore.v1.Stats/GetStats")(
            b"", metadata=((wire.TOKEN_METADATA, b"x" * 32),), timeout=20
        )
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


# ------------------------------------------------------------------------------------------------------- get and put


def get(worker, namespace: int, key: bytes, **fields):
    request = bytes_pb2.GetRequest(namespace_id=namespace, key=key, **fields)
    call = worker.channel.unary_stream("/kvstore.v1.Bytes/Get")
    return call(request.SerializeToString(), metadata=worker.metadata, timeout=20)


def list_of(call) -> list[bytes_pb2.GetFrame]:
    try:
        return [bytes_pb2.GetFrame.FromString(frame) for frame in call]
    except grpc.RpcError as error:
        raise wire.error_from_status(
            error.code().value[0], error.details(), error.trailing_metadata()
        ) from None


def put(worker, frames) -> bytes_pb2.PutReply:
    call = worker.channel.stream_unary("/kvstore.v1.Bytes/Put")
    try:
        return bytes_pb2.PutReply.FromString(
            call((frame.SerializeToString() for frame in frames), metadata=worker.metadata, timeout=20)
        )
    except grpc.RpcError as error:
        raise wire.error_from_status(
            error.code().value[0], error.details(), error.trailing_metadata()
        ) from None


def frames_of(namespace: int, key: bytes, data: bytes, step: int = 100_000) -> list[bytes_pb2.PutFrame]:
    """An uneven cut, the first frame with some bytes too."""
    first = bytes_pb2.PutFrame(namespace_id=namespace, key=key, payload=data[:777])
    return [first, *(bytes_pb2.PutFrame(payload=data[at : at + step]) for at in range(777, len(data), step))]


@pytest.mark.parametrize("protection", ["sealed", "group"])
def test_put_then_get(start_daemon, connect, spec, protection):
    daemon = start_daemon(protection=protection)
    worker = connect(daemon)
    namespace = worker.call("Open", store_pb2.OpenRequest(namespace=wire.spec_to_proto(spec))).namespace_id
    data = os.urandom(SHARD)
    reply = put(worker, frames_of(namespace, b"k", data))
    assert (reply.grant, reply.result) == (0, 0)
    first, *rest = list_of(get(worker, namespace, b"k", frame_bytes=50_000))
    assert (first.outcome, list(first.shard_bytes)) == (0, [SHARD])
    assert b"".join(frame.payload for frame in rest) == data
    assert len(rest) == 6
    same = put(worker, frames_of(namespace, b"k", data))
    assert (same.grant, same.differs) == (1, False)
    other = put(worker, frames_of(namespace, b"k", data[:-1] + bytes([data[-1] ^ 1])))
    assert (other.grant, other.differs) == (1, True)
    stats = worker.ask_stats()
    assert stats.gauges["leases"] == stats.gauges["reservations"] == 0
    conserved(worker)


def test_get_of_what_is_not_there(worker, namespace):
    (frame,) = list_of(get(worker, namespace, b"k"))
    assert (frame.outcome, frame.reason, list(frame.shard_bytes)) == (2, 1, [])


@pytest.mark.parametrize(
    ("size", "why"),
    [
        (SHARD - 1, f"payload={SHARD - 1} bytes: the chunk has {SHARD} bytes"),
        (SHARD + 1, f"payload={SHARD + 1} bytes or more"),
    ],
)
def test_put_of_the_wrong_size(worker, namespace, size, why):
    with pytest.raises(BadRequest, match=why):
        put(worker, frames_of(namespace, b"k", bytes(size)))
    (frame,) = list_of(get(worker, namespace, b"k"))
    assert frame.outcome == 2, "nothing of it is visible"
    assert worker.ask_stats().gauges["reservations"] == 0
    conserved(worker)


@pytest.mark.parametrize("late", ["its bytes", "its end"])
@pytest.mark.parametrize("protection", ["sealed", "group"])
def test_a_put_that_takes_too_long_writes_into_nobodys_slot(start_daemon, connect, spec, protection, late):
    """Its reservation ended between two frames, or behind the last, and others have the whole arena by now."""
    daemon = start_daemon(
        protection=protection, dram_bytes=4 << 20, segment_bytes=4 << 20, reservation_ttl_ms=2_000
    )
    worker = connect(daemon)
    namespace = worker.call("Open", store_pb2.OpenRequest(namespace=wire.spec_to_proto(spec))).namespace_id
    sending: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    slow = worker.channel.stream_unary("/kvstore.v1.Bytes/Put").future(
        iter(sending.get, None), metadata=worker.metadata, timeout=60
    )
    frames = [frame.SerializeToString() for frame in frames_of(namespace, b"slow", bytes(SHARD))]
    in_time = 1 if late == "its bytes" else len(frames)
    for frame in frames[:in_time]:
        sending.put(frame)
    eventually(lambda: worker.ask_stats().gauges["reservations"] == 1)
    eventually(lambda: worker.ask_stats().gauges["reservations"] == 0)
    others = {b"%d" % number: os.urandom(SHARD) for number in range(16 if protection == "sealed" else 15)}
    for key, data in others.items():
        assert put(worker, frames_of(namespace, key, data)).grant == 0
    for frame in (*frames[in_time:], None):
        sending.put(frame)
    with pytest.raises(grpc.RpcError) as caught:
        slow.result()
    (frame,) = list_of(get(worker, namespace, b"slow"))
    assert frame.outcome == 2, "it is never seen"
    for key, data in others.items():
        _, *rest = list_of(get(worker, namespace, key))
        assert b"".join(frame.payload for frame in rest) == data, "somebody else's bytes"
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    if late == "its bytes":
        assert caught.value.details().startswith("the reservation ended while the bytes came in")
    conserved(worker)


def test_a_put_that_breaks_off_leaves_nothing(worker, namespace):
    def frames():
        yield bytes_pb2.PutFrame(namespace_id=namespace, key=b"k", payload=b"x" * 1000).SerializeToString()
        raise ConnectionError("the peer goes away")

    call = worker.channel.stream_unary("/kvstore.v1.Bytes/Put")
    with pytest.raises(grpc.RpcError):
        call(frames(), metadata=worker.metadata, timeout=20)
    put(worker, frames_of(namespace, b"j", bytes(SHARD)))
    assert worker.ask_stats().gauges["reservations"] == 0
    conserved(worker)


# ------------------------------------------------------------------------------------------------------------- watch


def watch(worker, interval_ms: int):
    return worker.stats.WatchStats(
        stats_pb2.WatchStatsRequest(interval_ms=interval_ms), metadata=worker.metadata, timeout=20
    )


@pytest.mark.parametrize("interval_ms", [0, 99, 3_600_001])
def test_watching_too_often_or_too_rarely_is_refused(worker, interval_ms):
    with pytest.raises(grpc.RpcError) as caught:
        next(watch(worker, interval_ms))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"interval_ms={interval_ms}: must be between 100 and 3600000" in caught.value.details()


def test_watching_goes_on_until_the_daemon_drains(daemon, worker):
    watching = watch(worker, 100)
    assert next(watching).uptime_ms < next(watching).uptime_ms
    daemon.process.send_signal(signal.SIGTERM)
    with pytest.raises(grpc.RpcError) as caught:
        for _ in watching:
            pass
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert daemon.exit_status() == 0


def test_watchers_are_bounded(worker):
    watching = [watch(worker, 100) for _ in range(64)]
    for each in watching:
        next(each)
    with pytest.raises(grpc.RpcError) as caught:
        next(watch(worker, 100))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    watching[0].cancel()
    for each in watching[1:]:
        next(each)
        next(each)
    next(watch(worker, 100))


def test_a_peer_that_reads_nothing_does_not_hold_the_daemon(start_daemon, connect, spec):
    """Of a Get, of a watch and of an Attach stream; the daemon ends all the same."""
    daemon = start_daemon()
    worker = connect(daemon)
    large = dataclasses.replace(spec, groups=(GroupSpec("full", shard_bytes=8 << 20),))
    namespace = worker.call("Open", store_pb2.OpenRequest(namespace=wire.spec_to_proto(large))).namespace_id
    put(worker, frames_of(namespace, b"k", os.urandom(8 << 20), step=1 << 20))
    unread = [get(worker, namespace, b"k"), watch(worker, 100)]
    next(unread[0])
    assert worker.ask_stats().gauges["leases"] == 1, "it has not been sent yet"
    assert daemon.stop() == 0
    for call in unread:
        call.cancel()
