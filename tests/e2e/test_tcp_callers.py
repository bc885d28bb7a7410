"""Callers over TCP of one identity: each connection is one, or each id that a caller chose."""

import dataclasses
import socket

import grpc
import pytest

from kvstore import wire
from kvstore.errors import Conflict, NotFound
from kvstore.transport.callers import CLIENT_METADATA
from kvstore.v1 import store_pb2


@pytest.fixture
def daemon(start_daemon):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return start_daemon(tcp_address=f"127.0.0.1:{port}", tcp_unauthenticated=True, log_level="debug")


class TcpCaller:
    """A TCP client with a connection of its own."""

    def __init__(self, daemon, client: bytes = b"") -> None:
        address = daemon.wait_for("ready")["settings"]["tcp_address"]
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.insecure_channel(address, options=options)
        self.metadata = ((CLIENT_METADATA, client),) if client else ()

    def ask(self, method: str, request, reply):
        call = self.channel.unary_unary(f"/kvstore.v1.Store/{method}")
        try:
            found = call(request.SerializeToString(), metadata=self.metadata, timeout=20)
        except grpc.RpcError as error:
            raise wire.error_from_status(
                error.code().value[0], error.details(), error.trailing_metadata()
            ) from None
        return reply.FromString(found)

    def open(self, spec) -> int:
        request = store_pb2.OpenRequest(namespace=wire.spec_to_proto(spec))
        return self.ask("Open", request, store_pb2.OpenReply).namespace_id

    def update(self, namespace: int, name: bytes, number: int, version: int = 0):
        request = store_pb2.UpdateSessionRequest(
            request_id=number, namespace_id=namespace, session=name, expected_version=version
        )
        return self.ask("UpdateSession", request, store_pb2.SessionReply)

    def close(self) -> None:
        self.channel.close()


def test_tcp_callers_do_not_spoil_each_other_s_specs_numbers_and_ends(daemon, spec):
    one, two = TcpCaller(daemon), TcpCaller(daemon)
    namespace = one.open(spec)
    other = two.open(dataclasses.replace(spec, layout_fingerprint="another engine's", tensor_parallel=2))
    assert other != namespace, "refused if both were ranks of one engine"
    with pytest.raises(NotFound, match="is not open for this caller"):
        two.update(namespace, b"s", 1)
    first = one.update(namespace, b"one", 7)
    second = two.update(other, b"two", 7)
    assert (first.session, second.session) == (b"one", b"two"), "numbers are each caller's own"
    assert one.update(namespace, b"one", 7) == first, "asked again"
    two.close()
    daemon.wait_for("a TCP caller left")
    assert one.update(namespace, b"one", 8, first.version).version > first.version
    assert one.update(namespace, b"one", 7) == first
    one.close()


def test_a_tcp_caller_with_an_id_goes_on_over_another_connection(daemon, spec):
    one, another = TcpCaller(daemon, b"an id of mine"), TcpCaller(daemon, b"somebody else's")
    namespace = one.open(spec)
    another.open(spec)
    first = one.update(namespace, b"s", 7)
    one.close()
    again = TcpCaller(daemon, b"an id of mine")
    assert again.update(namespace, b"s", 7) == first, "the repeated request gets its first answer"
    with pytest.raises(Conflict):
        another.update(namespace, b"s", 7)
    again.close()
    another.close()
