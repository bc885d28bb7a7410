"""Handlers with a scripted peer: what the tests with a real daemon cannot bring about at will."""

import asyncio
import gc
from collections.abc import Callable
from inspect import signature
from types import SimpleNamespace
from typing import Any, get_type_hints

import grpc
import pytest

from kvstore import errors, wire
from kvstore.core import events as ev
from kvstore.core.limits import Limits
from kvstore.core.store import Store
from kvstore.errors import Code, DeadlineExceeded, Unavailable
from kvstore.transport import decoding, rpc
from kvstore.transport.access import Access
from kvstore.transport.attach import OUTSTANDING_MAX, PUSHES_MAX
from kvstore.transport.callers import CLIENT_METADATA
from kvstore.transport.door import TcpDoor
from kvstore.transport.identities import Identity
from kvstore.transport.rpc import DETAILS_MAX, STATUS, CallLimit, answering, read, write
from kvstore.transport.service import AttachStream, Service, stats_to_proto
from kvstore.types import ChunkKey, NamespaceId, Outcome, Reason, WorkerId
from kvstore.v1 import admin_pb2, hints_pb2, stats_pb2, store_pb2

WORKER = WorkerId(1)
BOUND_S = 20.0


class Core:
    """A loop that answers when told to."""

    def __init__(self) -> None:
        self.posted: list[ev.Event] = []
        self.channels: dict[int, Callable[[ev.Answer], None]] = {}

    def channel(self, answered, timeout_s):
        number = len(self.posted) + 1
        self.channels[number] = answered
        return number

    def drop_channel(self, number):
        self.channels.pop(number, None)

    def post(self, event):
        self.posted.append(event)

    def answer(self, answer, number=None):
        self.channels.pop(number or min(self.channels))(answer)


class Peer:
    """The other end of a stream, as gRPC's context shows it to a handler."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[Any] = asyncio.Queue()
        self.replies: list[store_pb2.AttachReply] = []
        self.reads = 0
        self.gone = False
        self.reading = asyncio.Event()
        """Cleared while the peer takes nothing from its socket."""
        self.reading.set()

    async def read(self):
        self.reads += 1
        return await self.requests.get()

    async def write(self, data):
        await self.reading.wait()
        if self.gone:
            raise grpc.aio.UsageError("RPC already finished")
        self.replies.append(store_pb2.AttachReply.FromString(data))

    def send(self, field, request):
        self.requests.put_nowait(store_pb2.AttachRequest(**{field: request}).SerializeToString())


class Rig:
    def __init__(self) -> None:
        self.core = Core()
        self.peer = Peer()
        self.service = SimpleNamespace(loop=self.core, draining=False, peer_timeout_s=BOUND_S)
        self.stream = AttachStream(self.service, WORKER, self.peer)
        self.task = asyncio.create_task(self.stream.run())

    async def until(self, found):
        async with asyncio.timeout(BOUND_S):
            while not found():  # noqa: ASYNC110 - the conditions are of many kinds
                await asyncio.sleep(0)

    async def settle(self):
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.fixture
async def rig():
    rig = Rig()
    yield rig
    rig.task.cancel()
    await asyncio.gather(rig.task, return_exceptions=True)


def match(number: int) -> store_pb2.MatchRequest:
    return store_pb2.MatchRequest(request_id=number, namespace_id=1, keys=[b"k"])


# ------------------------------------------------------------------------------------------------------------- stream


async def test_answers_go_out_in_the_order_in_which_they_come(rig):
    for number in (11, 12):
        rig.peer.send("match", match(number))
    await rig.until(lambda: len(rig.core.posted) == 2)
    assert [event.ticket.request_id for event in rig.core.posted] == [11, 12]
    rig.core.answer(ev.Matched(0, (), ()), 2)
    rig.core.answer(ev.Matched(1, (), ()), 1)
    await rig.until(lambda: len(rig.peer.replies) == 2)
    assert [(reply.request_id, reply.match.usable) for reply in rig.peer.replies] == [(12, 0), (11, 1)]


async def test_leases_that_ride_along_are_released_first(rig):
    request = store_pb2.AttachRequest(match=match(11), release_lease_ids=[5, 6])
    rig.peer.requests.put_nowait(request.SerializeToString())
    await rig.until(lambda: len(rig.core.posted) == 2)
    release, asked = rig.core.posted
    assert release == ev.Release(ev.Ticket(WORKER), (5, 6))
    assert isinstance(asked, ev.Match)


async def test_a_stream_that_is_not_answered_is_not_read_on(rig):
    """Bounded memory, whatever a peer sends: gRPC's flow control holds it back."""
    for number in range(1, OUTSTANDING_MAX + 10):
        rig.peer.send("match", match(number))
    await rig.until(lambda: len(rig.core.posted) == OUTSTANDING_MAX)
    await rig.settle()
    assert len(rig.core.posted) == OUTSTANDING_MAX
    assert rig.peer.reads == OUTSTANDING_MAX
    rig.core.answer(ev.Done())
    await rig.until(lambda: len(rig.core.posted) == OUTSTANDING_MAX + 1)


async def test_a_stream_that_is_not_read_by_its_peer_is_not_read_on(rig):
    """Answers that are not taken count as outstanding, so they cannot pile up either."""
    rig.peer.reading.clear()
    for number in range(1, OUTSTANDING_MAX + 10):
        rig.peer.send("heartbeat", store_pb2.HeartbeatRequest(request_id=number))
    await rig.until(lambda: rig.peer.reads == OUTSTANDING_MAX)
    await rig.settle()
    assert rig.peer.reads == OUTSTANDING_MAX
    rig.peer.reading.set()
    await rig.until(lambda: len(rig.peer.replies) == OUTSTANDING_MAX + 9)


def long_answer() -> ev.Matched:
    """Of some 4 KiB on the wire."""
    return ev.Matched(0, (Outcome.MISS,) * 2_000, (Reason.NEVER_SEEN,) * 2_000)


async def test_with_many_bytes_unsent_no_more_is_read(rig, monkeypatch):
    """Few requests may have long answers: memory is bounded by bytes, not by their number alone."""
    monkeypatch.setattr("kvstore.transport.service.UNSENT_PAUSE_BYTES", 1 << 14)
    rig.peer.reading.clear()
    for number in range(1, 101):
        rig.peer.send("match", match(number))
        await rig.settle()
        while rig.core.channels:
            rig.core.answer(long_answer())
    assert 2 <= rig.peer.reads <= 12
    assert 1 << 14 <= rig.stream._unsent_bytes < (1 << 14) + 10_000, "one more was asked for by then"
    rig.peer.reading.set()
    while len(rig.peer.replies) < 100:
        await rig.settle()
        while rig.core.channels:
            rig.core.answer(long_answer())
    assert rig.stream._unsent_bytes == 0


async def test_too_many_bytes_unread_end_the_stream(rig, monkeypatch):
    """Requests that were read before their answers came: each may have the longest there is."""
    monkeypatch.setattr("kvstore.transport.service.UNSENT_BYTES_MAX", 1 << 16)
    monkeypatch.setattr("kvstore.transport.service.LAST_WRITE_TIMEOUT_S", 0.01)
    rig.peer.reading.clear()
    for number in range(1, 101):
        rig.peer.send("match", match(number))
    await rig.until(lambda: len(rig.core.posted) == 100)
    for number in range(1, 101):
        if number in rig.core.channels:  # else the stream has ended
            rig.core.answer(long_answer(), number)
    assert rig.stream._unsent_bytes < (1 << 16) + 5_000
    with pytest.raises(errors.Exhausted, match="bytes were not read"):
        await asyncio.wait_for(rig.task, BOUND_S)


async def test_too_many_pushes_end_the_stream(rig):
    rig.peer.reading.clear()
    push = ev.ChunksSettled(WORKER, NamespaceId(1), (), ())
    rig.stream.push(push)
    await rig.settle()  # the first is being written, and counts no more once it is
    for _ in range(PUSHES_MAX):
        rig.stream.push(push)
    with pytest.raises(errors.Exhausted, match="pushes were not read"):
        await asyncio.wait_for(rig.task, BOUND_S)


async def test_the_end_drops_what_was_waited_for(rig):
    rig.peer.send("match", match(1))
    await rig.until(lambda: rig.core.posted)
    rig.stream.end(Unavailable("the end"))
    with pytest.raises(Unavailable, match="the end"):
        await asyncio.wait_for(rig.task, BOUND_S)
    assert rig.core.channels == {}


async def test_the_message_on_its_way_is_sent_before_the_stream_ends(rig):
    """gRPC sends one thing at a time: the status of a stream that ended meanwhile would be lost."""
    rig.peer.reading.clear()
    rig.stream.send(store_pb2.AttachReply(draining=store_pb2.Draining()))
    await rig.settle()
    rig.stream.end(Unavailable("the end"))
    await rig.settle()
    assert not rig.task.done()
    rig.peer.reading.set()
    with pytest.raises(Unavailable, match="the end"):
        await asyncio.wait_for(rig.task, BOUND_S)
    assert len(rig.peer.replies) == 1


async def test_a_peer_that_takes_nothing_does_not_hold_the_stream_open(rig, monkeypatch):
    monkeypatch.setattr("kvstore.transport.service.LAST_WRITE_TIMEOUT_S", 0.01)
    rig.peer.reading.clear()
    rig.stream.send(store_pb2.AttachReply(draining=store_pb2.Draining()))
    await rig.settle()
    rig.stream.end(Unavailable("the end"))
    with pytest.raises(Unavailable, match="the end"):
        await asyncio.wait_for(rig.task, BOUND_S)


async def test_a_stream_whose_peer_accepts_nothing_ends(rig, monkeypatch):
    monkeypatch.setattr("kvstore.transport.service.LAST_WRITE_TIMEOUT_S", 0.01)
    rig.service.peer_timeout_s = 0.2
    rig.stream._watchdog.cancel()
    rig.stream._watch_writer()
    rig.stream.send(store_pb2.AttachReply(draining=store_pb2.Draining()))
    await rig.until(lambda: rig.peer.replies)
    await asyncio.sleep(0.5)
    assert not rig.task.done(), "a stream that has nothing to say goes on"
    rig.peer.reading.clear()
    rig.stream.send(store_pb2.AttachReply(draining=store_pb2.Draining()))
    with pytest.raises(DeadlineExceeded, match=r"no message was accepted for 0\.2 s"):
        await asyncio.wait_for(rig.task, BOUND_S)


async def test_a_message_that_is_not_accepted_ends_its_call_and_the_status_comes_after_it():
    """What the call held is given back at once; the peer is told why when it reads on, or not at all."""
    peer, released = Call(), asyncio.Event()
    reading = asyncio.Event()
    order = []

    async def take(data):
        await reading.wait()
        order.append(data)

    async def one_message(request, context):
        try:
            await write(context, b"message", 0.01)
        finally:
            released.set()

    peer.write = take
    call = asyncio.create_task(answering(one_message, "One")(b"", peer))
    await asyncio.wait_for(released.wait(), BOUND_S)
    assert not call.done() and not peer.aborted
    reading.set()
    with pytest.raises(Aborted):
        await asyncio.wait_for(call, BOUND_S)
    assert order == [b"message"]
    assert peer.aborted[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "no message was accepted for 0.01 s" in peer.aborted[1]


async def test_a_peer_that_does_not_even_take_a_status_is_left(monkeypatch):
    monkeypatch.setattr("kvstore.transport.rpc.STATUS_TIMEOUT_S", 0.01)

    class Deaf(Call):
        async def abort(self, *status):
            await asyncio.Event().wait()

    async def fail(request, context):
        raise errors.NotFound("no")

    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(answering(fail, "Fail")(b"", Deaf()), BOUND_S)


async def test_a_request_that_never_comes_is_not_waited_for():
    peer = Peer()
    with pytest.raises(DeadlineExceeded, match=r"no message came for 0\.01 s"):
        await asyncio.wait_for(read(peer, 0.01), BOUND_S)
    peer.requests.put_nowait(grpc.aio.EOF)
    assert await read(peer, BOUND_S) is None


async def test_what_one_caller_may_have_going():
    """So many calls, of which so many receive their requests; others have places of their own."""
    places = CallLimit(calls_max=3, reads_max=2)
    with places.taken("a") as one, places.taken("a") as two, places.taken("a"):
        assert one is two
        with pytest.raises(errors.Exhausted, match="3 calls of this caller"), places.taken("a"):
            pass
        with places.taken("b"):
            pass
        peer = Peer()
        reading = [asyncio.create_task(read(peer, BOUND_S, one)) for _ in range(3)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert peer.reads == 2, "the third waits, in its peer's buffers"
        for _ in range(3):
            peer.requests.put_nowait(b"request")
        assert await asyncio.wait_for(asyncio.gather(*reading), BOUND_S) == [b"request"] * 3
    with places.taken("a", "all") as one, places.taken("b", "all") as two, places.taken("b") as own:
        assert one is two is not own
    with places.taken("a"):
        pass
    assert repr(places) == "CallLimit(0 calls of 0 callers)"


async def test_a_write_that_fails_while_its_call_is_cancelled_is_no_error_of_ours(caplog):
    class Torn(Peer):
        async def write(self, data):
            try:
                await super().write(data)
            except asyncio.CancelledError:
                raise RuntimeError("the batch failed") from None

    peer = Torn()
    peer.reading.clear()
    call = asyncio.create_task(rpc.write(peer, b"", BOUND_S))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    for _ in range(5):
        await asyncio.sleep(0)
    del call  # its traceback holds on to the write
    gc.collect()
    assert not caplog.records


async def test_half_close_waits_for_answers(rig):
    rig.peer.send("match", match(1))
    rig.peer.requests.put_nowait(grpc.aio.EOF)
    await rig.until(lambda: rig.core.posted)
    await rig.settle()
    assert not rig.task.done()
    rig.core.answer(ev.Done())
    await asyncio.wait_for(rig.task, BOUND_S)
    assert len(rig.peer.replies) == 1


async def test_a_peer_that_vanishes_ends_the_stream(rig):
    rig.peer.gone = True
    rig.stream.push(ev.LeasesRevoked(WORKER, ()))
    with pytest.raises(grpc.aio.UsageError):
        await asyncio.wait_for(rig.task, BOUND_S)


async def test_an_answer_that_cannot_be_said_is_an_internal_error(rig):
    rig.peer.send("match", match(1))
    await rig.until(lambda: rig.core.posted)
    rig.core.answer(ev.Stats({}))
    await rig.until(lambda: rig.peer.replies)
    assert rig.peer.replies[0].error.code == Code.INTERNAL.value


@pytest.mark.parametrize("event", [ev.WorkerClosed(WORKER), ev.WorkerLeft(WORKER)])
async def test_the_end_of_the_worker_is_the_end_of_the_stream(rig, event):
    rig.stream.push(event)
    with pytest.raises(errors.Unauthenticated):
        await asyncio.wait_for(rig.task, BOUND_S)


async def test_every_push_has_a_message(rig):
    for push in (
        ev.ChunksSettled(WORKER, NamespaceId(3), (b"r",), (b"f",)),
        ev.SegmentsRetired(WORKER, (5,)),
        ev.LeasesRevoked(WORKER, (6,)),
    ):
        rig.stream.push(push)
    await rig.until(lambda: len(rig.peer.replies) == 3)
    settled, retired, revoked = rig.peer.replies
    assert (settled.chunks_settled.namespace_id, settled.chunks_settled.ready) == (3, [b"r"])
    assert retired.segments_retired.segments == [5]
    assert revoked.leases_revoked.lease_ids == [6]
    assert {reply.request_id for reply in rig.peer.replies} == {0}


async def test_draining_refuses_what_starts_something(rig):
    rig.service.draining = True
    rig.service.check_not_draining = lambda: Service.check_not_draining(rig.service)
    rig.peer.send("match", match(1))
    rig.peer.send("release", store_pb2.ReleaseRequest(request_id=2))
    await rig.until(lambda: rig.peer.replies and rig.core.posted)
    assert rig.peer.replies[0].error.code == Code.UNAVAILABLE.value
    assert isinstance(rig.core.posted[0], ev.Release)


# -------------------------------------------------------------------------------------------------------------- calls


async def test_a_long_explanation_is_asked_for_in_parts_and_answered_as_one():
    """Each part is a step of its own, so others are served in between."""
    keys = tuple(ChunkKey(b"%d" % number) for number in range(5))
    histories = [
        ev.ChunkHistory(key, Outcome.MISS, Reason.EVICTED, 4, 0, 1, 0, 0, 0, 0, 1, False, b"") for key in keys
    ]
    parts = [
        ev.Explained(3, tuple(histories[:2]), keys[2:]),
        ev.Explained(0, tuple(histories[2:4]), keys[4:]),
        ev.Explained(0, tuple(histories[4:])),
    ]
    asked: list[Any] = []

    async def ask(event, timeout_s):
        asked.append((event.session, event.keys))
        return parts[len(asked) - 1]

    loop = SimpleNamespace(ask=ask)
    service = Service(loop, lambda _: None, boot_id=b"", welcome=store_pb2.AttachWelcome())
    request = stats_pb2.ExplainRequest(namespace_id=1, session=b"s").SerializeToString()
    context = SimpleNamespace(time_remaining=lambda: None)
    reply = stats_pb2.ExplainReply.FromString(await service._explain(WORKER, request, context))
    assert asked == [(b"s", ()), (b"", keys[2:]), (b"", keys[4:])]
    assert reply == wire.explained_to_proto(ev.Explained(3, tuple(histories)))


def published(**fields: Any) -> ev.Event:
    call = decoding.HINTS_CALLS["PublishQueue"]
    assert call.event is not None
    return call.event(hints_pb2.PublishQueueRequest(namespace_id=1, **fields), ev.Ticket(WORKER, 1))


def test_the_keys_of_all_hints_together_are_bounded():
    most = decoding.HINT_KEYS_PER_REQUEST_MAX
    many = [hints_pb2.Hint(job=b"%d" % n, keys=[b"k"] * 4_096) for n in range(most // 4_096)]
    assert sum(len(hint.keys) for hint in published(hints=many).hints) == most
    with pytest.raises(
        errors.BadRequest, match=r"number of keys of all hints=65537: a request has at most 65536 \(.*changes"
    ):
        published(hints=[*many, hints_pb2.Hint(job=b"j", keys=[b"k"])])


@pytest.mark.parametrize(
    ("hint", "why"),
    [
        ({"job": b""}, r"hints\[1\]\.job=0 bytes"),
        ({"job": b"j" * 65}, r"hints\[1\]\.job=65 bytes"),
        ({"job": b"j", "position": (1 << 31) + 1}, r"hints\[1\]\.position="),
        ({"job": b"j", "session": b"s" * 257}, r"hints\[1\]\.session=257 bytes"),
        ({"job": b"j", "keys": [b"k", b""]}, r"hints\[1\]\.keys\[1\]=0 bytes"),
        ({"job": b"j", "keys": [b"k" * 65]}, r"hints\[1\]\.keys\[0\]=65 bytes"),
    ],
)
def test_a_hint_that_is_wrong_is_named(hint, why):
    good = hints_pb2.Hint(job=b"j" * 64, position=1 << 31, session=b"s" * 256, keys=[b"k" * 64])
    assert len(published(hints=[good]).hints) == 1
    with pytest.raises(errors.BadRequest, match=why):
        published(hints=[good, hints_pb2.Hint(**hint)])


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({}, r"append\[1\]\.key.*0 bytes"),
        ({"key": b"k" * 65}, r"append\[1\]\.key.*65 bytes"),
        ({"key": b"k", "first_token": (1 << 40) + 1, "token_count": 1}, r"append\[1\]\.first_token="),
        ({"key": b"k", "token_count": 0}, r"append\[1\]\.token_count=0"),
        ({"key": b"k", "token_count": 1 << 40}, r"append\[1\]\.token_count="),
        ({"key": b"k", "token_count": 1, "delta": -(1 << 40) - 1}, r"append\[1\]\.delta="),
        ({"key": b"k", "token_count": 1, "delta": (1 << 40) + 1}, r"append\[1\]\.delta="),
    ],
)
def test_an_entry_that_is_wrong_is_named(entry, why):
    call = decoding.STORE_CALLS["UpdateSession"]
    good = store_pb2.SessionEntry(key=b"k" * 64, first_token=1 << 40, token_count=1, delta=-(1 << 40))
    wrong = store_pb2.UpdateSessionRequest(
        namespace_id=1, session=b"s", append=[good, store_pb2.SessionEntry(**entry)]
    )
    with pytest.raises(errors.BadRequest, match=why):
        call.event(wrong, ev.Ticket(WORKER, 1))
    del wrong.append[1]
    assert len(call.event(wrong, ev.Ticket(WORKER, 1)).append) == 1


def test_each_row_of_the_table_says_what_the_contract_says():
    """What a request's call takes and returns, on its own and on the stream."""
    services = {
        name: file.DESCRIPTOR.services_by_name[name]
        for name, file in (
            ("Store", store_pb2),
            ("Hints", hints_pb2),
            ("Stats", stats_pb2),
            ("Admin", admin_pb2),
        )
    }
    bodies = store_pb2.AttachRequest.DESCRIPTOR.fields_by_name
    replies = store_pb2.AttachReply.DESCRIPTOR.fields_by_name
    for call in decoding.REQUESTS:
        kind = wire.ANSWERS[call.answer]
        reply = get_type_hints(kind.to_proto)["return"].DESCRIPTOR
        if call.service:
            method = services[call.service].methods_by_name[call.method]
            assert (method.input_type, method.output_type) == (call.request.DESCRIPTOR, reply), call
        if call.field:
            assert bodies[call.field].message_type is call.request.DESCRIPTOR, call
            assert replies[kind.field].message_type is reply, call
            assert kind.from_proto is not None, call
        assert call.extents == ("packed_extents" in call.request.DESCRIPTOR.fields_by_name), call
        if call.event is not None and call.service:
            assert call.extents == ("packed" in signature(kind.to_proto).parameters), call


def test_every_body_of_the_stream_has_a_call():
    bodies = {field.name for field in store_pb2.AttachRequest.DESCRIPTOR.oneofs_by_name["body"].fields}
    assert decoding.ATTACH_CALLS.keys() == bodies - {"hello"}


def test_every_method_has_a_handler():
    handlers = Service(Core(), lambda token: None, boot_id=b"", welcome=store_pb2.AttachWelcome()).handlers()
    for service in ("Store", "Stats"):
        module = __import__(f"kvstore.v1.{service.lower()}_pb2", fromlist=["DESCRIPTOR"])
        for method in module.DESCRIPTOR.services_by_name[service].methods:
            handler = handlers.service(SimpleNamespace(method=f"/kvstore.v1.{service}/{method.name}"))
            assert handler is not None, method.full_name
            assert handler.request_streaming and handler.response_streaming, "reading and writing are ours"
            assert handler.request_deserializer is None, "fields are parsed by us"
    assert handlers.service(SimpleNamespace(method="/kvstore.v1.Store/Nothing")) is None


def test_every_code_is_a_status():
    assert {code: STATUS[code.value].name for code in Code} == {code: code.name for code in Code}


class Aborted(Exception):
    pass


class Call:
    """gRPC's context of one call, as far as the identity is concerned."""

    def __init__(self, peer="unix:", metadata=()):
        self._peer, self._metadata = peer, metadata
        self.aborted: tuple[Any, ...] = ()

    def peer(self):
        return self._peer

    def invocation_metadata(self):
        return self._metadata

    async def abort(self, *status):
        self.aborted = status
        raise Aborted


async def test_an_error_is_a_status_with_details_and_an_error_message():
    async def fail(request, context):
        raise errors.Conflict("no", field="f", value="v" * 500, remedy="r" * 5000)

    context = Call()
    with pytest.raises(Aborted):
        await answering(fail, "Fail")(b"", context)
    code, details, metadata = context.aborted
    assert code is grpc.StatusCode.ABORTED
    assert details.startswith("f=vvv")
    assert len(details) == DETAILS_MAX
    error = wire.error_from_status(code.value[0], details, metadata)
    assert (type(error), error.field) == (errors.Conflict, "f")


async def test_a_bug_is_internal_and_tells_the_peer_nothing(caplog):
    async def fail(request, context):
        raise KeyError("secret")

    context = Call()
    with pytest.raises(Aborted):
        await answering(fail, "Fail")(b"", context)
    assert context.aborted[0] is grpc.StatusCode.INTERNAL
    assert "secret" not in context.aborted[1]
    assert "secret" in caplog.text


TOKEN = ((wire.TOKEN_METADATA, b"good"),)


class Callers:
    """Stands for TcpCallers."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes]] = []

    def worker_of(self, peer: str, identity: Identity, client: bytes) -> WorkerId:
        assert identity.tenant == "default"
        self.asked.append((peer, client))
        return WorkerId(-2)


TCP_PEER = "ipv4:127.0.0.1:1"


@pytest.mark.parametrize(
    ("tcp", "call", "worker", "asked"),
    [
        (False, Call(metadata=TOKEN), 1, []),
        (False, Call(), None, []),
        (False, Call(TCP_PEER), None, []),
        (True, Call(TCP_PEER), -2, [(TCP_PEER, b"")]),
        (True, Call("ipv6:[::1]:1"), -2, [("ipv6:[::1]:1", b"")]),
        (True, Call(TCP_PEER, ((CLIENT_METADATA, b"my own id"),)), -2, [(TCP_PEER, b"my own id")]),
        (True, Call(TCP_PEER, TOKEN), None, []),
        (True, Call(TCP_PEER, ((wire.TOKEN_METADATA, b"bad"),)), None, []),
        (True, Call("unix:"), None, []),
        (True, Call("unix:", ((CLIENT_METADATA, b"my own id"),)), None, []),
    ],
)
def test_who_calls(tcp, call, worker, asked):
    callers = Callers()
    door = TcpDoor(Access("", "default"), callers) if tcp else None
    service = Service(Core(), {b"good": WORKER}.get, boot_id=b"", welcome=store_pb2.AttachWelcome(), tcp=door)
    if worker is None:
        with pytest.raises(errors.Unauthenticated):
            service.caller(call, "Store/Open")
    else:
        assert service.caller(call, "Store/Open") == worker
    assert callers.asked == asked


def test_statistics_fit_the_message():
    """The layout of core/stats.py, with something in every part of it."""
    store = Store(Limits(arena_bytes=1 << 20, segment_bytes=1 << 20))
    for effect in store.start():
        store.apply(ev.SegmentReady(effect.op), 0)
    store.apply(ev.WorkerJoined(WORKER, "t", "", admin=True), 0)
    spec = decoding.STORE_CALLS["Open"].event(
        store_pb2.OpenRequest(namespace=wire.spec_to_proto(SPEC)), ev.Ticket(WORKER)
    )
    store.apply(spec, 0)
    store.apply(ev.Reserve(ev.Ticket(WORKER), NamespaceId(1), (b"k",)), 0)
    store.apply(ev.Acquire(ev.Ticket(WORKER), NamespaceId(1), (b"k", b"j"), prefix_only=False), 0)
    (reply,) = store.apply(ev.GetStats(ev.Ticket(WORKER)), 0)
    proto = stats_to_proto(reply.answer)
    assert proto.arena.bytes == 1 << 20
    (pool,) = proto.pools
    assert (pool.reserved, pool.free, pool.capacity) == (1, 255, 256)
    assert proto.namespaces[0].lookups == 2
    assert proto.counters["lookups{namespace=1,reason=never_seen}"] == 1
    assert proto.counters["grants_granted"] == 1
    assert proto.gauges["reservations"] == 1


SPEC = wire.spec_from_proto(
    store_pb2.OpenRequest(
        namespace={
            "model": "m",
            "weights_digest": b"w",
            "layout_fingerprint": "l",
            "hash_protocol": "h",
            "tensor_parallel": 1,
            "pipeline_parallel": 1,
            "context_parallel": 1,
            "chunk_tokens": 64,
            "groups": [{"name": "g", "kind": "full", "shard_bytes": 4096, "shard_count": 1}],
        }
    ).namespace
)
