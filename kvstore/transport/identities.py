"""Who calls over TCP, by what proves it: a client certificate, a bearer token, or a Kubernetes service account's token.

The access file (TOML, setting `access_file`) names the identities. The tenant comes from there, never from a request:

    [[identity]]
    name = "prefill-a"
    tenant = "alice"
    roles = ["worker"]                        # reader, worker, scheduler, operator
    token_file = "/etc/kvstored/prefill-a"    # or token_env = "VARIABLE", or token_sha256 = "hexadecimal"
    certificate = "prefill-a.example"         # a subject alternative name, or the common name, of its certificate
    service_account = "inference/prefill"     # namespace and name of a Kubernetes service account
    expires = 2027-01-01T00:00:00Z

    [tenants.alice]
    calls_per_s = 500
    bytes_per_s = 1_000_000_000

    [kubernetes]
    jwks_file = "/etc/kvstored/jwks.json"     # the cluster's keys, as its /openid/v1/jwks gives them
    issuer = "https://kubernetes.default.svc"
    audience = "kvstored"

Secrets are compared by their SHA-256, so how long that takes tells nothing of them. No secret is ever logged.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvstore.errors import ConfigError, Unauthenticated
from kvstore.transport.roles import Role

TOKEN_BYTES_MIN = 16
TOKEN_BYTES_MAX = 8 << 10
"""Longest token that is looked at: gRPC's headers end at 8 KiB."""
FILE_BYTES_MAX = 1 << 20
IDENTITIES_MAX = 4_096
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,127}")
ALGORITHMS = ("RS256", "RS384", "RS512", "ES256", "ES384", "ES512", "PS256", "EdDSA")
"""Signatures by private keys alone: a shared secret, or none, would let whoever has the public keys sign."""
CLOCK_SKEW_S = 30
SERVICE_ACCOUNT = "system:serviceaccount:"
BEARER = "bearer "


@dataclass(frozen=True, slots=True)
class Identity:
    name: str
    tenant: str
    roles: frozenset[Role]
    expires_at: float | None = None
    """Unix time. From then on it is refused."""

    @property
    def lasting(self) -> Identity:
        """The same for each token of a service account, whenever that expires."""
        return replace(self, expires_at=None)

    def may(self, roles: frozenset[Role]) -> bool:
        return not self.roles.isdisjoint(roles)


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one tenant, all of its callers over TCP together; 0: no limit."""

    calls_per_s: float = 0.0
    bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ServiceAccounts:
    """How tokens of Kubernetes service accounts are checked, without asking the cluster."""

    keys: Mapping[str, Any]
    """Public keys by `kid`."""
    issuer: str
    audience: str

    def subject(self, token: str) -> tuple[str, float]:
        """(namespace/name, Unix time at which the token expires). Raises Unauthenticated."""
        import jwt  # an extra: who has no service accounts needs no library for them

        try:
            key = self.keys.get(jwt.get_unverified_header(token).get("kid", ""))
            if key is None:
                raise _refused("the token was signed by a key that jwks_file does not name")
            claims = jwt.decode(
                token,
                key.key,
                algorithms=[key.algorithm_name],
                audience=self.audience,
                issuer=self.issuer,
                leeway=CLOCK_SKEW_S,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except jwt.ExpiredSignatureError:
            raise _refused("the token has expired") from None
        except (jwt.PyJWTError, ValueError, TypeError) as problem:
            raise _refused(f"the token is not valid: {problem}") from None
        subject = claims["sub"]
        if not subject.startswith(SERVICE_ACCOUNT):
            raise _refused("the token is of no service account")
        return subject.removeprefix(SERVICE_ACCOUNT).replace(":", "/", 1), float(claims["exp"]) + CLOCK_SKEW_S


@dataclass(frozen=True, slots=True)
class Identities:
    """All that an access file says. `of` is the one question that is asked of it."""

    by_token: Mapping[bytes, Identity] = field(default_factory=dict)
    """By the token's SHA-256."""
    by_certificate: Mapping[str, Identity] = field(default_factory=dict)
    by_service_account: Mapping[str, Identity] = field(default_factory=dict)
    service_accounts: ServiceAccounts | None = None
    rates: Mapping[str, Rates] = field(default_factory=dict)
    """By tenant."""
    files: frozenset[str] = frozenset()
    """All files that were read: when one changes, so may this."""

    def __repr__(self) -> str:
        return f"Identities({len(self)} of them)"

    def __len__(self) -> int:
        return len(
            {*self.by_token.values(), *self.by_certificate.values(), *self.by_service_account.values()}
        )

    def __contains__(self, identity: Identity) -> bool:
        """Whether it is still what the file says (its expiry apart, which a token may shorten)."""
        known = (*self.by_token.values(), *self.by_certificate.values(), *self.by_service_account.values())
        return any(each.lasting == identity.lasting for each in known)

    def of(self, authorization: str, certificate_names: Sequence[str], now: float) -> Identity:
        """Who calls. `authorization`: the value of that header, or empty; `certificate_names`: of the client
        certificate that TLS has verified, or none; `now`: Unix time. Raises Unauthenticated."""
        by_certificate = {
            self.by_certificate[name] for name in certificate_names if name in self.by_certificate
        }
        if len(by_certificate) > 1:
            raise _refused("the client certificate names more than one identity")
        found = next(iter(by_certificate), None)
        if authorization:
            by_token = self._of_token(authorization)
            if found is not None and by_token.name != found.name:
                raise _refused("certificate and token are of different identities")
            found = by_token
        if found is None:
            raise _refused(
                "the client certificate is of no identity" if certificate_names else "nothing says who calls"
            )
        if found.expires_at is not None and found.expires_at <= now:
            raise _refused("the identity has expired")
        return found

    def _of_token(self, authorization: str) -> Identity:
        if authorization[: len(BEARER)].lower() != BEARER:
            raise _refused("authorization is no bearer token")
        token = authorization[len(BEARER) :].strip()
        found = self.by_token.get(_digest(token))
        if found is not None:
            return found
        if self.service_accounts is None or token.count(".") != 2 or len(token) > TOKEN_BYTES_MAX:
            raise _refused("the token is not known")
        account, expires_at = self.service_accounts.subject(token)
        found = self.by_service_account.get(account)
        if found is None:
            raise _refused("the service account is of no identity")
        ends_at = expires_at if found.expires_at is None else min(expires_at, found.expires_at)
        return replace(found, expires_at=ends_at)


def _refused(why: str) -> Unauthenticated:
    """Says nothing of what the file holds."""
    return Unauthenticated(
        why,
        field="authorization",
        value="hidden",
        remedy='send "authorization: Bearer TOKEN", or a client certificate, of an identity in access_file',
    )


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


# -------------------------------------------------------------------------------------------------------------- reading


def read(path: str, environment: Mapping[str, str] = os.environ) -> Identities:
    """Raises ConfigError that names the entry, the value and what to do; never with a secret in it."""
    return _Reader(path, environment).read()


class _Reader:
    def __init__(self, path: str, environment: Mapping[str, str]) -> None:
        self._path = path
        self._environment = environment
        self._files: set[str] = {path}

    def read(self) -> Identities:
        data = _table(self._path)
        _known(data, {"identity", "tenants", "kubernetes"}, "access_file", self._path)
        entries = data.get("identity", [])
        if not (isinstance(entries, list) and entries and all(isinstance(entry, dict) for entry in entries)):
            raise ConfigError(
                "names no identity",
                field="access_file",
                value=self._path,
                remedy="write a [[identity]] for each caller",
            )
        if len(entries) > IDENTITIES_MAX:
            raise ConfigError(f"at most {IDENTITIES_MAX}", field="identity", value=len(entries))
        proofs: dict[str, dict[Any, Identity]] = {"token": {}, "certificate": {}, "service_account": {}}
        names: set[str] = set()
        for entry in entries:
            identity = self._identity(entry)
            if identity.name in names:
                raise ConfigError("is there twice", field="identity.name", value=identity.name)
            names.add(identity.name)
            for kind, value in self._proofs(entry, identity.name):
                if value in proofs[kind]:
                    raise ConfigError(
                        f"has the same {kind} as {proofs[kind][value].name}",
                        field="identity",
                        value=identity.name,
                        remedy="a proof of who calls belongs to one identity",
                    )
                proofs[kind][value] = identity
        accounts = self._service_accounts(data)
        if proofs["service_account"] and accounts is None:
            raise ConfigError(
                "service accounts are named, and no keys to check their tokens with",
                field="kubernetes",
                value="absent",
                remedy="write [kubernetes] with jwks_file, issuer and audience",
            )
        return Identities(
            MappingProxyType(proofs["token"]),
            MappingProxyType(proofs["certificate"]),
            MappingProxyType(proofs["service_account"]),
            accounts,
            MappingProxyType(self._rates(data)),
            frozenset(self._files),
        )

    def _identity(self, entry: dict[str, Any]) -> Identity:
        known = {"name", "tenant", "roles", "certificate", "service_account", "expires"}
        _known(entry, known | {"token_file", "token_env", "token_sha256"}, "identity", entry.get("name", "?"))
        name = _named(entry, "name", "identity.name")
        tenant = _named(entry, "tenant", f"identity {name}: tenant")
        roles = entry.get("roles")
        known_roles = [role.value for role in Role]
        if not (isinstance(roles, list) and roles and all(role in known_roles for role in roles)):
            raise ConfigError(
                "must be a list of roles",
                field=f"identity {name}: roles",
                value=roles,
                remedy="known: " + ", ".join(known_roles),
            )
        expires = entry.get("expires")
        if expires is not None and not (isinstance(expires, datetime) and expires.tzinfo is not None):
            raise ConfigError(
                "must be a time with its zone",
                field=f"identity {name}: expires",
                value=expires,
                remedy="such as 2027-01-01T00:00:00Z",
            )
        try:
            ends_at = None if expires is None else expires.astimezone(UTC).timestamp()
        except OverflowError:  # within a day of the calendar's ends
            raise ConfigError(
                "is no year to come", field=f"identity {name}: expires", value=expires
            ) from None
        return Identity(name, tenant, frozenset(map(Role, roles)), ends_at)

    def _proofs(self, entry: dict[str, Any], name: str) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        where = f"identity {name}"
        if "token_file" in entry:
            path = os.path.join(os.path.dirname(self._path), str(entry["token_file"]))
            self._files.add(path)
            found.append(("token", _token_digest(secret(path, f"{where}: token_file"), where, path)))
        if "token_env" in entry:
            variable = str(entry["token_env"])
            if variable not in self._environment:
                raise ConfigError("is not set", field=f"{where}: token_env", value=variable)
            found.append(("token", _token_digest(self._environment[variable], where, variable)))
        if "token_sha256" in entry:
            text = str(entry["token_sha256"])
            if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
                raise ConfigError("has 64 hexadecimal digits", field=f"{where}: token_sha256", value="hidden")
            found.append(("token", bytes.fromhex(text)))
        for kind in ("certificate", "service_account"):
            if kind in entry:
                found.append((kind, _named(entry, kind, f"{where}: {kind}")))
        if not found:
            raise ConfigError(
                "nothing proves who calls",
                field=where,
                value="absent",
                remedy="give token_file, token_env, token_sha256, certificate or service_account",
            )
        return found

    def _service_accounts(self, data: dict[str, Any]) -> ServiceAccounts | None:
        table = data.get("kubernetes")
        if table is None:
            return None
        wanted = {"jwks_file", "issuer", "audience"}
        if not isinstance(table, dict) or not all(isinstance(table.get(key), str) for key in wanted):
            raise ConfigError(
                "needs jwks_file, issuer and audience", field="kubernetes", value=table, remedy="all are text"
            )
        _known(table, wanted, "kubernetes", "?")
        try:
            import jwt
        except ModuleNotFoundError:
            raise ConfigError(
                "needs PyJWT", field="kubernetes", value="absent", remedy="pip install 'attnstore[identity]'"
            ) from None
        path = os.path.join(os.path.dirname(self._path), table["jwks_file"])
        self._files.add(path)
        keys: dict[str, Any] = {}
        try:
            for entry in json.loads(read_file(path, "kubernetes.jwks_file"))["keys"]:
                key = jwt.PyJWK(entry)
                if key.algorithm_name in ALGORITHMS and key.key_id:
                    keys[key.key_id] = key
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, jwt.PyJWTError) as problem:
            raise ConfigError(
                f"is no JSON Web Key Set: {problem}", field="kubernetes.jwks_file", value=path
            ) from None
        if not keys:
            raise ConfigError(
                "has no key with an id for signatures by a private key",
                field="kubernetes.jwks_file",
                value=path,
            )
        return ServiceAccounts(MappingProxyType(keys), table["issuer"], table["audience"])

    def _rates(self, data: dict[str, Any]) -> dict[str, Rates]:
        found: dict[str, Rates] = {}
        tenants = data.get("tenants", {})
        if not isinstance(tenants, dict):
            raise ConfigError("must be tables", field="tenants", value=tenants, remedy="[tenants.NAME]")
        for tenant, table in tenants.items():
            where = f"tenants.{tenant}"
            if not isinstance(table, dict):
                raise ConfigError("must be a table", field=where, value=table)
            _known(table, {"calls_per_s", "bytes_per_s"}, where, "?")
            for key, value in table.items():
                if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
                    raise ConfigError("must be a number above 0", field=f"{where}.{key}", value=value)
            found[tenant] = Rates(**{key: float(value) for key, value in table.items()})
        return found


def read_file(path: str, where: str) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as problem:
        raise ConfigError.unreadable(problem, field=where, path=path) from None
    except ValueError as problem:  # a NUL in it
        raise ConfigError(f"is no path: {problem}", field=where, value=path) from None
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"is longer than {FILE_BYTES_MAX} bytes", field=where, value=path)
    return data


def secret(path: str, where: str) -> str:
    """A file's secret. A file that others than owner and group can read is refused."""
    data = read_file(path, where)
    if os.stat(path).st_mode & 0o007:
        raise ConfigError("can be read by other users", field=where, value=path, remedy=f"chmod o-rwx {path}")
    return data.decode("utf-8", "surrogateescape").strip()


def _token_digest(token: str, where: str, source: str) -> bytes:
    if not TOKEN_BYTES_MIN <= len(token) <= TOKEN_BYTES_MAX or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"a token has {TOKEN_BYTES_MIN} to {TOKEN_BYTES_MAX} printable characters",
            field=where,
            value=source,
            remedy="openssl rand -hex 32",
        )
    return _digest(token)


def _table(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(read_file(path, "access_file").decode())
    except (ValueError, RecursionError) as problem:
        raise ConfigError(
            f"is not TOML: {problem}",
            field="access_file",
            value=path,
            remedy="mend that place; docs/security.md shows such a file",
        ) from None


def _known(table: dict[str, Any], known: set[str], where: str, value: Any) -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        raise ConfigError(
            f"does not know {unknown[0]!r}",
            field=where,
            value=value,
            remedy="known: " + ", ".join(sorted(known)),
        )


def _named(table: dict[str, Any], key: str, where: str) -> str:
    value = table.get(key)
    if not (isinstance(value, str) and NAME.fullmatch(value)):
        raise ConfigError(
            "must be a name: letters, digits and . _ : @ / -, at most 128",
            field=where,
            value="absent" if value is None else value,
        )
    return value


def signature(files: frozenset[str]) -> tuple[Any, ...]:
    """Changes when one of the files is changed, replaced, removed or comes back."""
    found: list[Any] = []
    for path in sorted(files):
        try:
            status = Path(path).stat()
            found.append((path, status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode))
        except OSError as problem:
            found.append((path, problem.errno))
    return tuple(found)
