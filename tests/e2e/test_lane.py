"""Fast lanes of a real daemon: what ends them, what they fall back to, and peers that mean harm."""

import contextlib
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading

import pytest

from kvstore import wire
from kvstore.client import connect as client_of
from kvstore.client.lane import Lane
from kvstore.client.stream import GrpcStream
from kvstore.errors import BadRequest, DeadlineExceeded, Precondition, Unavailable
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.transport.attach import OUTSTANDING_MAX
from kvstore.transport.lane import READ_BYTES
from kvstore.v1 import descriptor_pb2, store_pb2

from ..waiting import eventually
from .test_hostile import lingering

BOUND_S = 20.0

SPEC = NamespaceSpec("lane", b"w", "test:bytes", 64, (GroupSpec("full", 4096),))
STAGING = descriptor_pb2.DescriptorRequest(staging=descriptor_pb2.StagingRequest(bytes=8 << 20))


def descriptors(daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


def beat(number: int = 1) -> bytes:
    return wire.lane_frame(
        store_pb2.AttachRequest(heartbeat=store_pb2.HeartbeatRequest(request_id=number)).SerializeToString()
    )


def replies(lane: socket.socket, count: int = 1 << 30) -> list[store_pb2.AttachReply]:
    """The next so many, or all to the end."""
    found = []
    with contextlib.suppress(ConnectionResetError):  # it ended, and there were requests that it never read
        while len(found) < count:
            prefix = lane.recv(4, socket.MSG_WAITALL)
            if not prefix:
                break
            data = lane.recv(int.from_bytes(prefix, "little"), socket.MSG_WAITALL)
            found.append(store_pb2.AttachReply.FromString(data))
    return found


# ------------------------------------------------------------------------------------------------------------- choosing


def carrier(client):
    return client._connection.attachment._carrier


def test_a_client_takes_the_lane(daemon, namespace):
    with client_of(str(daemon.run_dir), timeout_s=BOUND_S) as client:
        assert isinstance(carrier(client), Lane)
        assert client.stats().version, "unary calls go by gRPC as ever"


def test_without_lanes_it_is_grpc(start_daemon, connect):
    daemon = start_daemon(fast_lane=False)
    with client_of(str(daemon.run_dir), timeout_s=BOUND_S) as client:
        assert isinstance(carrier(client), GrpcStream)
    worker = connect(daemon)
    assert not worker.hello.fast_lane
    with pytest.raises(Precondition, match="fast lanes are off here"):
        worker.lane()
    assert worker.attach().receive(1), "asking for one costs nothing else"


def test_a_client_that_gets_no_lane_uses_grpc(daemon, monkeypatch):
    """As when the daemon has no descriptors left for it, or this process none to take it with."""
    receive = client_module().memory.receive_packet

    def lose(sock, **options):
        data, fds = receive(sock, **options)
        for fd in fds:
            os.close(fd)
        return data, []

    monkeypatch.setattr(client_module().memory, "receive_packet", lose)
    with client_of(str(daemon.run_dir), timeout_s=BOUND_S) as client:
        assert isinstance(carrier(client), GrpcStream)
        assert client.connected


def client_module():
    from kvstore.client import attachment

    return attachment


def test_either_way_and_back_again_it_is_one_worker(daemon, worker, namespace):
    """The newer of stream and lane ends the older one; a request that was answered there is answered the same here."""
    lane = worker.attach()
    first = lane.ask("reserve", store_pb2.ReserveRequest(namespace_id=namespace, keys=[b"k"]))
    stream = worker.attach(request_id=1)  # with a hello of its own: by gRPC
    assert isinstance(lane.wait_for_end(), Precondition)
    request = store_pb2.ReserveRequest(namespace_id=namespace, keys=[b"k"], request_id=2)
    assert worker.call("Reserve", request) == first
    again = worker.attach()
    assert again.ask("heartbeat", store_pb2.HeartbeatRequest()) == store_pb2.DoneReply()
    assert isinstance(stream.wait_for_end(), Precondition)


# ------------------------------------------------------------------------------------------------------ packed extents


def test_extents_come_as_they_are_asked_for(daemon, worker, namespace):
    stream = worker.attach()
    ask = {"namespace_id": namespace, "keys": [b"a", b"b"]}
    columns = stream.ask("reserve", store_pb2.ReserveRequest(**ask))
    stream.ask("abort", store_pb2.AbortRequest(reservation_ids=[columns.reservation_id]))
    packed = stream.ask("reserve", store_pb2.ReserveRequest(**ask, packed_extents=True))
    assert list(columns.extents.length) == [256 << 10] * 2 and not columns.extents.packed
    assert packed.extents.packed and not packed.extents.length
    assert [extent.length for extent in wire.extents_from_proto(packed.extents)] == [256 << 10] * 2
    stream.ask("abort", store_pb2.AbortRequest(reservation_ids=[packed.reservation_id]))
    unary = worker.call("Reserve", store_pb2.ReserveRequest(**ask, packed_extents=True))
    assert unary.extents.packed and not unary.extents.length


# -------------------------------------------------------------------------------------------------------------- the end


def test_the_end_of_the_descriptor_connection_is_the_end_of_the_lane(daemon, worker):
    lane = worker.lane()
    worker.socket.close()
    assert "descriptor connection of this worker ended" in replies(lane)[-1].ended.message
    lane.close()


def test_staging_memory_ends_with_the_connection_whatever_is_mapped(start_daemon, connect):
    """A process that connects anew may keep mappings of before for long; its staging memory is everybody's again."""
    daemon = start_daemon(staging_bytes_max=8 << 20)
    first = connect(daemon)
    first.staging(8 << 20).close()
    namespace = first.call("Open", store_pb2.OpenRequest(namespace=wire.spec_to_proto(SPEC))).namespace_id
    granted = first.call("Reserve", store_pb2.ReserveRequest(namespace_id=namespace, keys=[b"k"]))
    request = descriptor_pb2.SegmentsRequest(segments=granted.extents.segment)
    reply, fds = first.ask(descriptor_pb2.DescriptorRequest(segments=request))
    assert len(fds) == 2, reply
    first.socket.close()
    second = connect(daemon)
    eventually(lambda: second.ask(STAGING)[0].WhichOneof("body") == "staging")
    for fd in fds:
        os.close(fd)


def test_a_daemon_that_ends_says_so(daemon, worker):
    lane = worker.lane()
    assert replies(lane, 1)[0].HasField("welcome")
    daemon.process.send_signal(signal.SIGTERM)
    draining, last = replies(lane)
    assert draining.HasField("draining")
    assert isinstance(wire.error_from_proto(last.ended), Unavailable)
    lane.close()
    assert daemon.exit_status() == 0


HOLDER = """
import os, sys, time
from kvstore.client import connect
client = connect(sys.argv[1], timeout_s=20)
child = os.fork()
if child == 0:
    time.sleep(60)  # holds whatever it inherited
    os._exit(0)
if sys.argv[2] == "close":
    client.close()
print(child, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["close", "kill"])
def test_a_forked_child_does_not_keep_the_lane_open(daemon, worker, how):
    """Neither after a close nor after a kill of the process that the lane was given to."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", HOLDER, str(daemon.run_dir), how], stdout=subprocess.PIPE, text=True
    )
    child = 0
    try:
        child = int(process.stdout.readline())
        if how == "kill":
            process.kill()
        eventually(lambda: any(line["message"] == "a lane ends" for line in daemon.lines))
        os.kill(child, 0)  # it lives
    finally:
        process.kill()
        process.wait(BOUND_S)
        process.stdout.close()
        if child:
            os.kill(child, signal.SIGKILL)


# ------------------------------------------------------------------------------------------------ peers that mean harm


def test_a_message_that_is_too_long(daemon, worker):
    lane = worker.lane()
    lane.sendall((4 << 20).to_bytes(4, "little"))  # allowed, and never sent
    lane.close()
    lane = worker.lane()
    lane.sendall(((4 << 20) + 1).to_bytes(4, "little"))
    last = replies(lane)[-1]
    assert isinstance(wire.error_from_proto(last.ended), BadRequest)
    assert last.ended.field == "length"
    lane.close()


def test_a_message_that_never_ends(start_daemon, connect):
    daemon = start_daemon(peer_timeout_ms=100)
    lane = connect(daemon).lane()
    lane.sendall(beat() + beat()[:-1])
    found = replies(lane)
    assert [reply.request_id for reply in found] == [0, 1, 0]
    assert isinstance(wire.error_from_proto(found[-1].ended), DeadlineExceeded)
    lane.close()


def test_lanes_asked_for_again_and_again(daemon, worker):
    """Each ends the one before; nothing is left of them, whether the worker takes them or not."""
    eventually(
        lambda: (arena := worker.ask_stats().arena).ready_bytes == arena.bytes
    )  # all segments have theirs
    before = descriptors(daemon)
    for _ in range(200):
        worker.lane().close()
    last = worker.lane()
    last.sendall(beat())
    assert replies(last, 2)[1].request_id == 1
    last.close()
    eventually(lambda: descriptors(daemon) <= before)
    # and unread: the descriptors are in the worker's own queue, until it is cut off
    request = descriptor_pb2.DescriptorRequest(lane=descriptor_pb2.LaneRequest()).SerializeToString()
    worker.socket.setblocking(False)
    with contextlib.suppress(OSError):
        for _ in range(2000):
            with contextlib.suppress(BlockingIOError):
                worker.socket.send(request)
    assert descriptors(daemon) <= before + 4
    worker.socket.close()
    eventually(lambda: descriptors(daemon) < before)


@pytest.mark.parametrize("unread", [b"", ((4 << 20) + 1).to_bytes(4, "little") + bytes(READ_BYTES)])
def test_descriptors_whose_closing_lasts(daemon, worker, unread):
    """Sent along on a lane, where none belong, read or left there when it ends: the daemon serves on."""
    lane = worker.lane()
    lane.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * READ_BYTES)
    fd, (deaf,) = lingering()
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        lane.sendall(unread)
        lane.sendmsg([beat()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))])
        os.close(fd)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    found = replies(lane, 2)
    assert found[1].HasField("ended" if unread else "done")
    lane.close()
    for _ in range(2):  # whoever comes next may be answered before the lane is closed
        with client_of(str(daemon.run_dir), timeout_s=BOUND_S) as client:
            assert client.stats().version
    deaf.close()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_noise(daemon, connect, seed):
    """Nobody else notices, and what had been asked before the noise was carried out or not at all."""
    chance = random.Random(seed)
    other = connect(daemon).attach()
    worker = connect(daemon)
    for _ in range(60):
        lane = worker.lane()
        with contextlib.suppress(OSError):
            for _ in range(chance.randrange(1, 5)):
                noise = chance.randbytes(chance.choice((1, 3, 4, 5, 100, 70_000)))
                lane.sendall(chance.choice((noise, wire.lane_frame(noise), beat(), beat() + noise)))
        if chance.random() < 0.3:
            lane.shutdown(socket.SHUT_WR)
        lane.close()
    other.ask("heartbeat", store_pb2.HeartbeatRequest())
    lane = worker.lane()
    lane.sendall(beat(9))
    assert replies(lane, 2)[1].request_id == 9
    lane.close()


def test_peers_that_read_nothing_hold_up_nobody(start_daemon, connect):
    """They ask as much as they can and take no answer: what the daemon keeps for them is bounded, others are served,
    and in the end they are left."""
    daemon = start_daemon(peer_timeout_ms=500)
    before = daemon.rss_anon_bytes
    stop = threading.Event()
    lanes = [connect(daemon).lane() for _ in range(8)]

    def flood(lane: socket.socket) -> None:
        lane.settimeout(BOUND_S)
        with contextlib.suppress(OSError):
            for number in range(1, 200_000):
                lane.sendall(beat(number))
                if stop.is_set():
                    return

    threads = [threading.Thread(target=flood, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    other = connect(daemon).attach()
    for _ in range(100):
        other.ask("heartbeat", store_pb2.HeartbeatRequest())
    for lane in lanes:  # left, because they took nothing
        eventually(lambda lane=lane: ended(lane))
    stop.set()
    for thread in threads:
        thread.join(BOUND_S)
        assert not thread.is_alive()
    for lane in lanes:
        lane.close()
    other.ask("heartbeat", store_pb2.HeartbeatRequest())
    assert daemon.rss_anon_bytes - before < len(lanes) * (OUTSTANDING_MAX * 1024 + (4 << 20))


def ended(lane: socket.socket) -> bool:
    """Whether the daemon has closed its end; takes none of the bytes that lie there."""
    try:
        lane.send(b"", socket.MSG_DONTWAIT)
        lane.send(beat(), socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return False
