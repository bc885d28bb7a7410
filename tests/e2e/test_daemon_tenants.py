"""Two users, two tenants: neither finds, counts or explains what is the other's."""

import os
import socket

import pytest

from kvstore import wire
from kvstore.errors import NotFound, Unauthenticated
from kvstore.v1 import bytes_pb2, descriptor_pb2, stats_pb2, store_pb2

from .test_daemon_requests import get, list_of, put

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as other users")

ALICE, BOB, NOBODY = 12_001, 12_002, 12_003
DATA = bytes(range(256)) * 1024


@pytest.fixture
def daemon(start_daemon, run_dir):
    run_dir.parent.chmod(0o755)
    return start_daemon(tenants=f"{ALICE}=alice,{BOB}=bob")


@pytest.fixture
def workers(daemon, connect, spec):
    """Alice's and Bob's: both opened the very same namespace and saved the same key, each with bytes of its own."""
    both = []
    for uid, fill in ((ALICE, DATA), (BOB, DATA[::-1])):
        worker = connect(daemon, uid=uid)
        opened = worker.call("Open", store_pb2.OpenRequest(namespace=wire.spec_to_proto(spec)))
        frame = bytes_pb2.PutFrame(namespace_id=opened.namespace_id, key=b"k", payload=fill)
        assert put(worker, [frame]).grant == 0
        worker.call(
            "UpdateSession",
            store_pb2.UpdateSessionRequest(
                namespace_id=opened.namespace_id,
                session=worker.hello.tenant.encode(),
                append=[store_pb2.SessionEntry(key=b"k", token_count=64)],
            ),
        )
        both.append((worker, opened))
    return both


def test_the_same_key_has_each_tenants_own_bytes(workers):
    (alice, alices), (bob, bobs) = workers
    assert (alice.hello.tenant, bob.hello.tenant) == ("alice", "bob")
    assert alices.namespace_id != bobs.namespace_id
    assert alices.salt != bobs.salt, "not even the same key for the same tokens"
    for worker, opened, data in ((alice, alices, DATA), (bob, bobs, DATA[::-1])):
        assert b"".join(frame.payload for frame in list_of(get(worker, opened.namespace_id, b"k"))) == data


CALLS = {
    "Match": store_pb2.MatchRequest(keys=[b"k"]),
    "Acquire": store_pb2.AcquireRequest(keys=[b"k"]),
    "Reserve": store_pb2.ReserveRequest(keys=[b"j"]),
    "ReportLoad": store_pb2.ReportLoadRequest(keys=[b"k"]),
    "GetSession": store_pb2.GetSessionRequest(session=b"alice"),
    "UpdateSession": store_pb2.UpdateSessionRequest(session=b"alice", expected_version=1),
    "Truncate": store_pb2.TruncateRequest(session=b"alice", expected_version=1, token_count=64),
    "Fork": store_pb2.ForkRequest(session=b"alice", new_session=b"mine"),
    "Forget": store_pb2.ForgetRequest(session=b"alice"),
}


def test_no_call_reaches_the_others_namespace(workers, subtests):
    """And the refusal is that of a namespace that does not exist."""
    (_, alices), (bob, _) = workers
    for name, template in CALLS.items():
        with subtests.test(name=name):
            request = type(template)()
            request.CopyFrom(template)
            refusals = []
            for number in (alices.namespace_id, 4_000):
                request.namespace_id = number
                with pytest.raises(NotFound) as caught:
                    bob.call(name, request)
                refusals.append(str(caught.value).replace(str(number), "N"))
            assert refusals[0] == refusals[1]


def test_no_bytes_of_the_other(workers):
    (_, alices), (bob, _) = workers
    with pytest.raises(NotFound):
        list_of(get(bob, alices.namespace_id, b"k"))
    with pytest.raises(NotFound):
        put(bob, [bytes_pb2.PutFrame(namespace_id=alices.namespace_id, key=b"j", payload=DATA)])


def test_leases_and_reservations_are_the_holders_own(workers):
    (alice, alices), (bob, _) = workers
    lease = alice.call("Acquire", store_pb2.AcquireRequest(namespace_id=alices.namespace_id, keys=[b"k"]))
    assert bob.call("Release", store_pb2.ReleaseRequest(lease_ids=[lease.lease_id])).count == 0
    assert list(bob.call("Renew", store_pb2.RenewRequest(lease_ids=[lease.lease_id])).ttl_ms) == [0]
    reserved = alice.call("Reserve", store_pb2.ReserveRequest(namespace_id=alices.namespace_id, keys=[b"j"]))
    assert bob.call("Abort", store_pb2.AbortRequest(reservation_ids=[reserved.reservation_id])).count == 0
    with pytest.raises(NotFound, match="no such reservation of this worker"):
        bob.call("Commit", store_pb2.CommitRequest(reservation_id=reserved.reservation_id))


def test_statistics_are_the_tenants_own(workers, daemon, connect):
    (_, alices), (bob, _) = workers
    for worker, opened in workers:
        stats = worker.ask_stats()
        assert [row.tenant for row in stats.namespaces] == [worker.hello.tenant]
        assert [pool.namespace_id for pool in stats.pools] == [opened.namespace_id]
        assert not stats.gauges, "the daemon's own numbers show what others do"
        assert {name for name in stats.counters if f"namespace={opened.namespace_id}" not in name} == set()
        assert [
            row.tenant
            for row in worker.ask_stats("ListNamespaces", stats_pb2.ListNamespacesRequest()).namespaces
        ] == [worker.hello.tenant]
        sessions = worker.ask_stats("ListSessions", stats_pb2.ListSessionsRequest())
        assert [row.session for row in sessions.rows] == [worker.hello.tenant.encode()]
        assert sessions.total == 1
    for request in (
        stats_pb2.ExplainRequest(namespace_id=alices.namespace_id, keys=[b"k"]),
        stats_pb2.ExplainRequest(namespace_id=alices.namespace_id, session=b"alice"),
    ):
        with pytest.raises(NotFound):
            bob.ask_stats("Explain", request)
    assert (
        bob.ask_stats("ListSessions", stats_pb2.ListSessionsRequest(namespace_id=alices.namespace_id)).total
        == 0
    )
    root = connect(daemon).ask_stats()
    assert {row.tenant for row in root.namespaces} == {"alice", "bob"}
    assert root.gauges["workers"] == 3


def test_a_token_is_the_identity_whatever_else_is_said(workers):
    (alice, alices), (bob, _) = workers
    metadata = (*bob.metadata, ("tenant", "alice"), ("kvstore-tenant", "alice"))
    with pytest.raises(Exception, match="is not open for this caller"):
        bob.store.Match(
            store_pb2.MatchRequest(namespace_id=alices.namespace_id, keys=[b"k"]),
            metadata=metadata,
            timeout=20,
        )
    alice.socket.close()
    with pytest.raises(Unauthenticated):
        alice.call("Match", store_pb2.MatchRequest(namespace_id=alices.namespace_id, keys=[b"k"]))


def test_other_users_are_refused(daemon, connect):
    """With a reply that says why, which `Worker` takes for a hello without a tenant."""
    os.seteuid(NOBODY)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.settimeout(20)
            peer.connect(str(daemon.run_dir / "kvstored.sock"))
            hello = descriptor_pb2.DescriptorRequest(hello=descriptor_pb2.Hello(protocol=2))
            peer.send(hello.SerializeToString())
            reply = descriptor_pb2.DescriptorReply.FromString(peer.recv(4096))
    finally:
        os.seteuid(0)
    assert "this user has no tenant here" in reply.error.message
