"""The door for TCP: TLS, who comes in, and the file that says so, which is read again whenever it changes.

Without an identity a caller gets health and nothing else. A file that cannot be read any more changes nothing: who was
let in stays in and nobody new is, until the file is right again; the log says so as long as that lasts.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from kvstore.errors import ConfigError, Unauthenticated
from kvstore.server.logs import fields
from kvstore.transport import identities
from kvstore.transport.identities import Identities, Identity
from kvstore.transport.rates import TenantRates
from kvstore.transport.roles import Role
from kvstore.transport.rpc import Context

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often it is looked whether the access file, or a file that it names, has changed."""
TELL_AGAIN_S = 60.0
REFUSALS_TOLD_MAX = 10
"""Refused callers that the log names in TELL_AGAIN_S; the rest is counted."""
AUTHORIZATION = "authorization"
SUBJECT_NAMES = "x509_subject_alternative_name"
COMMON_NAME = "x509_common_name"
"""As gRPC calls what TLS has verified."""
ANYBODY = "anybody"


def anybody(tenant: str) -> Identity:
    """Who calls where nothing is asked (tcp_unauthenticated)."""
    return Identity(ANYBODY, tenant, frozenset((Role.WORKER, Role.SCHEDULER)))


class Access:
    """Called on the asyncio thread."""

    def __init__(
        self,
        path: str,
        tenant: str,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`path`: the access file; empty: anybody comes in, as `tenant`. Raises ConfigError."""
        self._path = path
        self._anybody = None if path else anybody(tenant)
        self._clock = clock
        self._identities = identities.read(path) if path else Identities()
        self._signature = identities.signature(self._identities.files)
        self._file_told_at = -math.inf
        self._refusals_told_at = -math.inf
        self._refusals_told = 0
        self.refused = 0
        """Calls, since the start."""
        self.rates = TenantRates()
        self.rates.set(dict(self._identities.rates))

    def __repr__(self) -> str:
        return f"Access({self._path or ANYBODY}, {self._identities})"

    def warn_of_certificates(self, client_ca: str) -> None:
        """TLS without an authority for clients asks them for no certificate: identities that have nothing else never
        come in, and nothing would say why."""
        if self._identities.by_certificate and not client_ca:
            log.warning(
                "access_file names client certificates, and nobody is asked for one",
                extra=fields(
                    identities=sorted(each.name for each in self._identities.by_certificate.values())[:10],
                    remedy="set tls_client_ca; then every caller needs a certificate, also those with tokens",
                ),
            )

    def identify(self, context: Context) -> Identity:
        """Raises Unauthenticated."""
        if self._anybody is not None:
            return self._anybody
        authorization = ""
        for key, value in context.invocation_metadata() or ():
            if key == AUTHORIZATION:
                authorization = value if isinstance(value, str) else value.decode("latin-1")
        try:
            return self._identities.of(authorization, certificate_names(context), self._clock())
        except Unauthenticated as error:
            self._tell(context.peer(), error)
            raise

    def still(self, identity: Identity) -> bool:
        """Whether who came in as this would come in now."""
        if identity.expires_at is not None and identity.expires_at <= self._clock():
            return False
        return self._anybody is not None or identity in self._identities

    async def look(self) -> None:
        """Read the file again if it, or a file that it names, has changed. Files may hang: not on the loop's thread."""
        if self._anybody is not None:
            return
        seen = await asyncio.to_thread(identities.signature, self._identities.files)
        if seen == self._signature:
            return
        try:
            found = await asyncio.to_thread(identities.read, self._path)
        except ConfigError as error:
            now = time.monotonic()
            if now - self._file_told_at >= TELL_AGAIN_S:
                self._file_told_at = now
                log.error(
                    "access_file cannot be used: identities stay as they were",
                    extra=fields(why=str(error), remedy="mend it; it is read again by itself"),
                )
            return
        # What changes between the look and the reading is seen by the next look. Files that are new were not looked at
        # before they were read: they are read once more.
        self._signature = seen if found.files == self._identities.files else ()
        self._file_told_at = -math.inf
        if found != self._identities:
            self.rates.set(dict(found.rates))
            log.info("access_file was read anew", extra=fields(identities=len(found)))
        self._identities = found

    def _tell(self, peer: str, error: Unauthenticated) -> None:
        self.refused += 1
        now = time.monotonic()
        if now - self._refusals_told_at >= TELL_AGAIN_S:
            self._refusals_told_at, self._refusals_told = now, 0
        if self._refusals_told < REFUSALS_TOLD_MAX:
            self._refusals_told += 1
            log.warning(
                "a TCP caller was refused", extra=fields(peer=peer, why=error.message, refused=self.refused)
            )


def certificate_names(context: Context) -> list[str]:
    """Names in the client certificate that TLS has verified: its subject alternative names, or without any its common
    name."""
    found = context.auth_context() or {}
    names = found.get(SUBJECT_NAMES) or found.get(COMMON_NAME) or ()
    return [name.decode("utf-8", "replace") for name in names]


@dataclass(slots=True)
class Tls:
    """Certificate files, read again for the next connection when they have changed."""

    certificate: str
    key: str
    client_ca: str
    """Empty: clients need no certificate."""
    _signature: tuple[Any, ...] = ()

    def credentials(self) -> grpc.ServerCredentials:
        """Raises ConfigError."""
        first = self._read()
        return grpc.dynamic_ssl_server_credentials(
            first,
            self._newer,  # type: ignore[arg-type]  # None is "as before", which the stubs do not know
            require_client_authentication=bool(self.client_ca),
        )

    def _read(self) -> grpc.ServerCertificateConfiguration:
        files = frozenset(filter(None, (self.certificate, self.key, self.client_ca)))
        seen = identities.signature(files)
        key = identities.secret(self.key, "tls_key").encode()
        certificate = identities.read_file(self.certificate, "tls_certificate")
        check_pair(self, certificate, key)
        ca = identities.read_file(self.client_ca, "tls_client_ca") if self.client_ca else None
        found = grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=ca)
        self._signature = seen
        return found

    def _newer(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC for each new connection, on a thread of its own; None: as before."""
        files = frozenset(filter(None, (self.certificate, self.key, self.client_ca)))
        if identities.signature(files) == self._signature:
            return None
        try:
            found = self._read()
        except ConfigError as error:
            log.error("TLS goes on with the certificate that it has", extra=fields(why=str(error)))
            return None
        log.info("TLS uses a new certificate")
        return found


def check_pair(tls: Tls, certificate: bytes, key: bytes) -> None:
    """gRPC says nothing when they do not fit: each connection just fails. Raises ConfigError."""
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.certificate, tls.key, password="")
        if tls.client_ca:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(tls.client_ca)
    except (ssl.SSLError, OSError) as problem:
        raise ConfigError(
            f"certificate, key and client authority cannot be used: {problem}",
            field="tls_certificate",
            value=tls.certificate,
            remedy="PEM files: the certificate with its chain, and its key without a password",
        ) from None
