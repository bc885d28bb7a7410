"""TCP callers by what proves who they are, against a real daemon: TLS, tokens, roles, tenants, rates."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from kvstore import __version__, wire
from kvstore.types import GrantResult
from kvstore.v1 import admin_pb2, bytes_pb2, stats_pb2, store_pb2

from . import certificates
from .test_daemon_start_stop import free_port

BOUND_S = 20
TOKENS = {
    "worker": "token of the worker of alice",
    "reader": "token of the reader of alice",
    "scheduler": "token of the scheduler of alice",
    "operator": "token of the operator, who sees all",
    "bob": "token of the worker of bob, another tenant",
}
TEXT = "".join(
    f'[[identity]]\nname = "{name}"\ntenant = "{"bob" if name == "bob" else "alice"}"\n'
    f'roles = ["{"worker" if name == "bob" else name}"]\ntoken_file = "{name}.token"\n'
    for name in TOKENS
)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


class Caller:
    def __init__(
        self, address: str, metadata: tuple[tuple[str, Any], ...] = (), credentials: Any = None
    ) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channel = (
            grpc.insecure_channel(address, options=options)
            if credentials is None
            else grpc.secure_channel(address, credentials, options=options)
        )
        self.metadata = metadata

    def ask(self, method: str, request: Any = None, reply: Any = None) -> Any:
        call = self.channel.unary_unary(f"/kvstore.v1.{method}")
        raw = b"" if request is None else request.SerializeToString()
        found = call(raw, metadata=self.metadata, timeout=BOUND_S)
        return found if reply is None else reply.FromString(found)

    def status(self, method: str, request: Any = None) -> str:
        try:
            self.ask(method, request)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"

    def open(self, spec: Any) -> int:
        request = store_pb2.OpenRequest(namespace=wire.spec_to_proto(spec))
        return int(self.ask("Store/Open", request, store_pb2.OpenReply).namespace_id)

    def put(self, namespace: int, key: bytes, payload: bytes) -> Any:
        frame = bytes_pb2.PutFrame(namespace_id=namespace, key=key, payload=payload)
        call = self.channel.stream_unary("/kvstore.v1.Bytes/Put")
        raw = call(iter([frame.SerializeToString()]), metadata=self.metadata, timeout=BOUND_S)
        return bytes_pb2.PutReply.FromString(raw)

    def get(self, namespace: int, key: bytes) -> bytes:
        request = bytes_pb2.GetRequest(namespace_id=namespace, key=key)
        call = self.channel.unary_stream("/kvstore.v1.Bytes/Get")
        frames = call(request.SerializeToString(), metadata=self.metadata, timeout=BOUND_S)
        return b"".join(bytes_pb2.GetFrame.FromString(raw).payload for raw in frames)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, token in TOKENS.items():
        (tmp_path / f"{name}.token").write_text(token)
        (tmp_path / f"{name}.token").chmod(0o600)
    (tmp_path / "access.toml").write_text(TEXT)
    return tmp_path


@pytest.fixture
def daemon(start_daemon: Callable[..., Any], folder: Path) -> Any:
    return start_daemon(tcp_address=f"127.0.0.1:{free_port()}", access_file=str(folder / "access.toml"))


@pytest.fixture
def caller(daemon: Any) -> Iterator[Callable[..., Caller]]:
    address = daemon.wait_for("ready")["settings"]["tcp_address"]
    with contextlib.ExitStack() as ended:

        def of(name: str = "", credentials: Any = None, **more: str) -> Caller:
            metadata = bearer(TOKENS.get(name, name)) if name else ()
            made = Caller(address, metadata + tuple(more.items()), credentials)
            ended.enter_context(made.channel)
            return made

        yield of


# --------------------------------------------------------------------------------------------------- who comes in


def test_without_an_identity_there_is_health_and_nothing_else(daemon, caller):
    nobody = caller()
    health = nobody.channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=BOUND_S)
    assert health_pb2.HealthCheckResponse.FromString(health).status == 1
    for method in (
        "Stats/GetStats",
        "Stats/ListNamespaces",
        "Stats/WatchStats",
        "Store/Open",
        "Admin/Recall",
    ):
        assert nobody.status(method) == "UNAUTHENTICATED", method
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    asked = nobody.channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    with pytest.raises(grpc.RpcError) as refused:
        list(asked(iter([question.SerializeToString()]), timeout=BOUND_S))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    line = daemon.wait_for("a TCP caller was refused")
    assert line["why"] == "nothing says who calls"


def test_wrong_tokens_are_refused_and_not_shown(daemon, caller):
    for token in ("x" * 32, TOKENS["worker"][:-1], TOKENS["worker"] + " x", "a.b.c"):
        assert caller(token).status("Stats/GetStats") == "UNAUTHENTICATED"
    with pytest.raises(grpc.RpcError) as refused:
        caller("wrong but secret, as somebody mistyped it").ask("Stats/GetStats")
    assert "mistyped" not in str(refused.value.details())
    daemon.wait_for("a TCP caller was refused")
    assert not any("mistyped" in str(line) or TOKENS["worker"] in str(line) for line in daemon.lines)


def test_a_token_of_the_descriptor_socket_is_worth_nothing_over_tcp(daemon, caller, connect):
    worker = connect(daemon)
    worker.ask_stats()
    for name in ("", "worker"):
        replayed = caller(name)
        replayed.metadata += ((wire.TOKEN_METADATA, worker.hello.token),)
        assert replayed.status("Stats/GetStats") == "UNAUTHENTICATED"


# --------------------------------------------------------------------------------------------- what they may do there


def test_roles(daemon, caller, spec):
    allowed = {
        "worker": {"Stats/GetStats", "Store/UpdateSession", "Store/Match"},
        "reader": {"Stats/GetStats", "Store/Match"},
        "scheduler": {"Stats/GetStats", "Store/Match", "Hints/PublishQueue"},
        "operator": {"Stats/GetStats", "Admin/Recall", "Admin/ListQuarantine"},
    }
    methods = sorted(set().union(*allowed.values()))
    for role, mine in allowed.items():
        who = caller(role)
        refused = {method for method in methods if who.status(method) == "PERMISSION_DENIED"}
        assert refused == set(methods) - mine, role
    line = daemon.wait_for("a call was refused")
    assert line["logger"] == "kvstore.audit" and line["identity"] in allowed


def test_a_tenant_comes_from_the_identity_alone(caller, spec):
    alice, bob = caller("worker"), caller("bob")
    mine, theirs = alice.open(spec), bob.open(spec)
    assert mine != theirs, "the same model, and nothing in common"
    request = store_pb2.UpdateSessionRequest(request_id=1, namespace_id=mine, session=b"s")
    assert bob.status("Store/UpdateSession", request) == "NOT_FOUND"
    assert alice.status("Store/UpdateSession", request) == "OK"
    shown = bob.ask("Stats/ListNamespaces", None, stats_pb2.ListNamespacesReply)
    assert [row.tenant for row in shown.namespaces] == ["bob"]
    everything = caller("operator").ask("Stats/ListNamespaces", None, stats_pb2.ListNamespacesReply)
    assert {row.tenant for row in everything.namespaces} == {"alice", "bob"}


def test_an_id_of_another_identity_is_another_caller(caller, spec):
    """Whoever learns the id that somebody chose must not become that caller."""
    client = (("kvstore-client-bin", b"an id of mine"),)
    alice, reader = caller("worker"), caller("reader")
    alice.metadata += client
    reader.metadata += client
    namespace = alice.open(spec)
    assert (
        reader.status("Store/Match", store_pb2.MatchRequest(namespace_id=namespace, keys=[b"k"]))
        == "NOT_FOUND"
    )


def test_bytes_by_role(caller, spec):
    alice, reader, scheduler = caller("worker"), caller("reader"), caller("scheduler")
    namespace = alice.open(spec)
    payload = os.urandom(spec.shard_bytes[0])
    assert alice.put(namespace, b"k", payload).grant == GrantResult.GRANTED
    reader.open(spec)
    assert reader.get(namespace, b"k") == payload
    for other, call in ((reader, "put"), (scheduler, "put")):
        with pytest.raises(grpc.RpcError) as refused:
            getattr(other, call)(namespace, b"k2", payload)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    with pytest.raises(grpc.RpcError) as refused:
        scheduler.get(namespace, b"k")
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_an_operator_s_calls_are_in_the_audit_log(daemon, caller):
    caller("operator").ask("Admin/Recall", admin_pb2.RecallRequest(maker=b"m" * 16))
    line = daemon.wait_for("an operator's call")
    assert (line["call"], line["identity"], line["outcome"]) == ("Admin/Recall", "operator", "done")
    assert line["maker"] == (b"m" * 16).hex() and line["peer"].startswith("ipv4:127.0.0.1:")


def test_rates(start_daemon, folder):
    path = folder / "access.toml"
    path.write_text(TEXT + "[tenants.alice]\ncalls_per_s = 3\n")
    address = f"127.0.0.1:{free_port()}"
    start_daemon(tcp_address=address, access_file=str(path))
    alice, bob = Caller(address, bearer(TOKENS["worker"])), Caller(address, bearer(TOKENS["bob"]))
    with alice.channel, bob.channel:
        seen = {alice.status("Stats/GetStats") for _ in range(60)}
        assert "RESOURCE_EXHAUSTED" in seen
        assert {bob.status("Stats/GetStats") for _ in range(20)} == {"OK"}, "another tenant is not held up"


# --------------------------------------------------------------------------------------------------- taken back


def test_an_identity_that_is_taken_back_is_out(daemon, caller, folder, spec):
    alice, bob = caller("worker"), caller("bob")
    alice.open(spec)
    bob.open(spec)
    watching = alice.channel.unary_stream("/kvstore.v1.Stats/WatchStats")(
        stats_pb2.WatchStatsRequest(interval_ms=100).SerializeToString(), metadata=alice.metadata, timeout=60
    )
    next(watching)
    (folder / "worker.token").write_text("a new token for the worker of alice")
    daemon.wait_for("access_file was read anew")
    assert alice.status("Stats/GetStats") == "UNAUTHENTICATED"
    with pytest.raises(grpc.RpcError) as ended:
        for _ in watching:
            pass
    assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert caller("a new token for the worker of alice").status("Stats/GetStats") == "OK"
    (folder / "access.toml").write_text(TEXT[: TEXT.rindex("[[identity]]")])
    daemon.wait_for("a TCP caller left")
    assert bob.status("Stats/GetStats") == "UNAUTHENTICATED"


# ------------------------------------------------------------------------------------------------------------- TLS


@pytest.fixture
def authority() -> certificates.Authority:
    return certificates.Authority()


def tls_settings(folder: Path, authority: certificates.Authority, **more: Any) -> dict[str, Any]:
    certificate, key = certificates.write(folder, "server", authority.issue("kvstored"))
    return {
        "tcp_address": f"127.0.0.1:{free_port()}",
        "access_file": str(folder / "access.toml"),
        "tls_certificate": str(certificate),
        "tls_key": str(key),
        **more,
    }


def trusting(
    authority: certificates.Authority, pair: tuple[bytes, bytes] | None = None
) -> grpc.ChannelCredentials:
    certificate, key = pair or (None, None)
    return grpc.ssl_channel_credentials(authority.pem, key, certificate)


def test_tls_with_tokens(start_daemon, folder, authority, spec):
    settings = tls_settings(folder, authority)
    start_daemon(**settings)
    address = settings["tcp_address"]
    for metadata, credentials, wanted in (
        (bearer(TOKENS["worker"]), trusting(authority), "OK"),
        ((), trusting(authority), "UNAUTHENTICATED"),
        (bearer(TOKENS["worker"]), None, "UNAVAILABLE"),  # plaintext to a TLS port
        (bearer(TOKENS["worker"]), trusting(certificates.Authority("another")), "UNAVAILABLE"),
    ):
        caller = Caller(address, metadata, credentials)
        with caller.channel:
            assert caller.status("Stats/GetStats") == wanted


def test_the_program_of_the_page_asks_over_tls(start_daemon, folder, authority):
    page = (Path(__file__).resolve().parents[2] / "docs/security.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    settings = tls_settings(folder, authority)
    start_daemon(**settings)
    (folder / "ca.pem").write_bytes(authority.pem)
    address = settings["tcp_address"]

    def run(token: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-c", program, address, folder / "ca.pem", folder / token]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    ended = run("operator.token")
    assert (ended.stdout, ended.stderr) == (f"kvstored {__version__} serves 0 namespaces\n", "")
    (folder / "stranger.token").write_text("a token that nobody knows, and long enough")
    assert "UNAUTHENTICATED" in run("stranger.token").stderr


def test_old_versions_of_tls_are_refused(start_daemon, folder, authority):
    settings = tls_settings(folder, authority)
    start_daemon(**settings)
    host, port = settings["tcp_address"].split(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.set_alpn_protocols(["h2"])
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection((host, int(port)), timeout=BOUND_S) as sock, pytest.raises(ssl.SSLError):
        context.wrap_socket(sock)
    context.maximum_version = ssl.TLSVersion.MAXIMUM_SUPPORTED
    with (
        socket.create_connection((host, int(port)), timeout=BOUND_S) as sock,
        context.wrap_socket(sock) as wrapped,
    ):
        assert wrapped.version() == "TLSv1.3"


def test_mutual_tls(start_daemon, folder, authority, spec):
    (folder / "ca.pem").write_bytes(authority.pem)
    (folder / "access.toml").write_text(
        '[[identity]]\nname = "a"\ntenant = "alice"\nroles = ["worker"]\ncertificate = "a.example"\n'
        '[[identity]]\nname = "b"\ntenant = "bob"\nroles = ["reader"]\ncertificate = "b.example"\n'
    )
    settings = tls_settings(folder, authority, tls_client_ca=str(folder / "ca.pem"))
    start_daemon(**settings)

    def status(pair: tuple[bytes, bytes] | None, method: str = "Stats/GetStats") -> str:
        caller = Caller(settings["tcp_address"], (), trusting(authority, pair))
        with caller.channel:
            return caller.status(method)

    assert status(authority.issue("a.example")) == "OK"
    assert status(authority.issue("whoever", names=("a.example", "other.example"))) == "OK"
    assert status(authority.issue("b.example"), "Store/UpdateSession") == "PERMISSION_DENIED"
    assert status(authority.issue("unknown.example")) == "UNAUTHENTICATED"
    assert status(authority.issue("a.example", names=("unknown.example",))) == "UNAUTHENTICATED", (
        "its names count"
    )
    assert status(None) == "UNAVAILABLE"
    assert status(certificates.Authority("another").issue("a.example")) == "UNAVAILABLE"
    assert status(authority.issue("a.example", days=-1)) == "UNAVAILABLE", "expired"


def test_a_new_certificate_is_used_without_a_restart(start_daemon, folder, authority):
    settings = tls_settings(folder, authority)
    daemon = start_daemon(**settings)
    newer = certificates.Authority("the next one")
    (folder / "server.key").write_text("broken")
    caller = Caller(settings["tcp_address"], bearer(TOKENS["worker"]), trusting(authority))
    with caller.channel:
        assert caller.status("Stats/GetStats") == "OK", "what cannot be used changes nothing"
    daemon.wait_for("TLS goes on with the certificate that it has")
    certificates.write(folder, "server", newer.issue("kvstored"))
    caller = Caller(settings["tcp_address"], bearer(TOKENS["worker"]), trusting(newer))
    with caller.channel:
        assert caller.status("Stats/GetStats") == "OK"


def test_certificates_that_cannot_be_used(launch, folder, authority):
    settings = tls_settings(folder, authority)
    certificates.write(folder, "other", authority.issue("other"))
    wrong = launch(**settings | {"tls_key": str(folder / "other.key")})
    assert wrong.exit_status() == 2
    assert "cannot be used" in wrong.refusals[0]
    (folder / "server.key").chmod(0o644)
    readable = launch(**settings)
    assert readable.exit_status() == 2 and "chmod o-rwx" in readable.refusals[0]
