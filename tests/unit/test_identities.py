"""The access file, and who it lets in by which proof."""

import base64
import hashlib
import json
import time
from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from kvstore.errors import ConfigError, Exhausted, Unauthenticated
from kvstore.transport import identities
from kvstore.transport.access import Access
from kvstore.transport.identities import Rates
from kvstore.transport.rates import TenantRates
from kvstore.transport.roles import ROLES, Role
from kvstore.v1 import admin_pb2, bytes_pb2, fleet_pb2, hints_pb2, promptcache_pb2, stats_pb2, store_pb2

TOKEN = "a token of at least sixteen characters"
OTHER = "another token of more than sixteen characters"
ISSUER, AUDIENCE = "https://kubernetes.default.svc", "kvstored"
NOW = 1_800_000_000.0


def entry(name: str, *lines: str, tenant: str = "alice", roles: str = '["worker"]') -> str:
    return "\n".join(
        ("[[identity]]", f'name = "{name}"', f'tenant = "{tenant}"', f"roles = {roles}", *lines, "")
    )


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def by_token(name: str, token: str = TOKEN, **more: str) -> str:
    return entry(name, f'token_sha256 = "{digest(token)}"', **more)


@pytest.fixture
def read(tmp_path):
    def of(*parts: str, environment=None):
        (tmp_path / "access.toml").write_text("\n".join(parts))
        return identities.read(str(tmp_path / "access.toml"), environment or {})

    return of


def bearer(token: str) -> str:
    return f"Bearer {token}"


def test_tokens_by_digest_file_and_environment(read, tmp_path):
    (tmp_path / "secret").write_text(f"{OTHER}\n")
    (tmp_path / "secret").chmod(0o600)
    found = read(
        by_token("one"),
        entry("two", 'token_file = "secret"', tenant="bob", roles='["reader", "scheduler"]'),
        entry("three", 'token_env = "THREE"'),
        environment={"THREE": "x" * 16},
    )
    assert found.of(bearer(TOKEN), (), NOW).name == "one"
    two = found.of(f"bearer  {OTHER}", (), NOW)
    assert (two.name, two.tenant, two.roles) == ("two", "bob", {Role.READER, Role.SCHEDULER})
    assert found.of(bearer("x" * 16), (), NOW).name == "three"
    assert found.files == {str(tmp_path / "access.toml"), str(tmp_path / "secret")}
    assert TOKEN not in repr(found) and OTHER not in repr(found)


@pytest.mark.parametrize(
    ("authorization", "certificate"),
    [
        ("", ()),
        ("", ("unknown.example",)),
        (bearer("no such token, as long as others are"), ()),
        (f"Basic {TOKEN}", ()),
        (TOKEN, ()),
        ("Bearer ", ()),
        (bearer(digest(TOKEN)), ()),
        (bearer(TOKEN), ("two.example",)),
        ("", ("two.example", "three.example")),
        ("Bearer \udcff" * 3, ()),
        (bearer("a.b.c"), ()),
    ],
    ids=[
        "nothing", "unknown certificate", "unknown token", "not bearer", "no scheme", "empty", "the digest itself",
        "token of one, certificate of another", "two at once", "not text", "a JWT, and no keys to check it",
    ],
)  # fmt: skip
def test_who_is_refused(read, authorization, certificate):
    found = read(
        by_token("one"),
        entry("two", 'certificate = "two.example"'),
        entry("three", 'certificate = "three.example"'),
    )
    with pytest.raises(Unauthenticated) as refused:
        found.of(authorization, certificate, NOW)
    assert TOKEN not in str(refused.value)


def test_certificates(read):
    found = read(
        entry("two", 'certificate = "two.example"', f'token_sha256 = "{digest(TOKEN)}"'), by_token("x", OTHER)
    )
    assert found.of("", ("127.0.0.1", "two.example"), NOW).name == "two"
    assert found.of(bearer(TOKEN), ("two.example",), NOW).name == "two"


def test_expiry(read):
    found = read(by_token("one") + "expires = 2027-01-15T08:00:00Z")
    ends = 1_800_000_000.0
    assert found.of(bearer(TOKEN), (), ends - 1).expires_at == ends
    with pytest.raises(Unauthenticated, match="expired"):
        found.of(bearer(TOKEN), (), ends)


# -------------------------------------------------------------------------------------------------- service accounts


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.curve = ec.generate_private_key(ec.SECP256R1())
        self.keys = [
            json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key()))
            | {"kid": "k1", "alg": "RS256"},
            json.loads(jwt.algorithms.ECAlgorithm.to_jwk(self.curve.public_key()))
            | {"kid": "k2", "alg": "ES256"},
        ]
        (folder / "jwks.json").write_text(json.dumps({"keys": self.keys}))
        self.text = f'[kubernetes]\njwks_file = "jwks.json"\nissuer = "{ISSUER}"\naudience = "{AUDIENCE}"\n'

    def token(self, *, key=None, algorithm="RS256", kid="k1", **claims) -> str:
        now = int(time.time())
        whole = {
            "iss": ISSUER,
            "aud": [AUDIENCE],
            "sub": "system:serviceaccount:inference:prefill",
            "iat": now,
            "exp": now + 600,
        } | claims
        whole = {name: value for name, value in whole.items() if value is not None}
        return jwt.encode(whole, key or self.key, algorithm=algorithm, headers={"kid": kid} if kid else {})


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


def test_service_accounts(read, cluster):
    found = read(entry("prefill", 'service_account = "inference/prefill"'), cluster.text)
    now = time.time()
    mine = found.of(bearer(cluster.token()), (), now)
    assert (mine.name, mine.tenant) == ("prefill", "alice")
    assert now + 600 <= mine.expires_at <= now + 700, "it ends with its token"
    assert (
        mine in found and mine.lasting == found.of(bearer(cluster.token(exp=int(now) + 60)), (), now).lasting
    )
    curve = cluster.token(key=cluster.curve, algorithm="ES256", kid="k2")
    assert found.of(bearer(curve), (), now).name == "prefill"


def _unsigned(token: str) -> str:
    head = base64.urlsafe_b64encode(json.dumps({"alg": "none", "kid": "k1"}).encode()).rstrip(b"=").decode()
    return f"{head}.{token.split('.')[1]}."


def test_service_account_tokens_that_are_refused(read, cluster):
    found = read(entry("prefill", 'service_account = "inference/prefill"'), cluster.text)
    good = cluster.token()
    stranger = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    head, body, signature = good.split(".")
    now = int(time.time())
    forged = {
        "expired": cluster.token(exp=now - 60),
        "not yet valid": cluster.token(nbf=now + 600),
        "without an end": cluster.token(exp=None),
        "another issuer": cluster.token(iss="https://elsewhere"),
        "another audience": cluster.token(aud=["vault"]),
        "no audience": cluster.token(aud=None),
        "another account": cluster.token(sub="system:serviceaccount:inference:decode"),
        "a person": cluster.token(sub="alice"),
        "another's signature": cluster.token(key=stranger),
        "unknown key": cluster.token(kid="k9"),
        "no key": cluster.token(kid=""),
        "unsigned": _unsigned(good),
        "public key as a shared secret": jwt.encode(
            {
                "sub": "system:serviceaccount:inference:prefill",
                "exp": now + 60,
                "aud": AUDIENCE,
                "iss": ISSUER,
            },
            cluster.keys[0]["n"],
            algorithm="HS256",
            headers={"kid": "k1"},
        ),
        "key of another algorithm": cluster.token(key=cluster.curve, algorithm="ES256", kid="k1"),
        "body changed": f"{head}.{body[:-2]}AA.{signature}",
        "signature cut": f"{head}.{body}.{signature[:-4]}",
        "no JSON": "e30.e30.e30",
        "long": f"{head}.{'A' * 20_000}.{signature}",
    }
    assert found.of(bearer(good), (), time.time())
    let_in = {what for what, token in forged.items() if _comes_in(found, token)}
    assert not let_in


def _comes_in(found: identities.Identities, token: str) -> bool:
    try:
        found.of(bearer(token), (), time.time())
    except Unauthenticated:
        return False
    return True


# ---------------------------------------------------------------------------------------------------------- bad files


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no identity"),
        ("identity = 3", "names no identity"),
        ("[[identity]", "is not TOML"),
        ("[other]\n" + by_token("one"), "does not know 'other'"),
        (by_token("one") + "tokn_file = 3", "does not know 'tokn_file'"),
        (entry("one"), "nothing proves who calls"),
        (by_token("a b"), "must be a name"),
        (by_token("one", tenant=""), "identity one: tenant"),
        (by_token("one", roles='["admin"]'), "known: reader, worker, scheduler, operator"),
        (by_token("one", roles="[]"), "must be a list of roles"),
        (by_token("one", roles='[["worker"]]'), "must be a list of roles"),
        (by_token("one") + by_token("one", OTHER), "is there twice"),
        (by_token("one") + by_token("two"), "has the same token as one"),
        (by_token("one") + "expires = 2027-01-01T00:00:00", "a time with its zone"),
        (by_token("one") + 'expires = "soon"', "a time with its zone"),
        (by_token("one") + "expires = 0001-01-01T00:00:00+10:00", "is no year to come"),
        (entry("one", 'token_file = "a\\u0000b"'), "is no path"),
        ("a = " + "[" * 20_000, "is not TOML"),
        ("a = " + "1" * 5_000, "is not TOML"),
        (entry("one", 'token_sha256 = "abc"'), "64 hexadecimal digits"),
        (entry("one", 'token_env = "MISSING"'), "MISSING: is not set"),
        (entry("one", 'token_env = "SHORT"'), "16 to 8192 printable characters"),
        (entry("one", 'token_file = "nowhere"'), "No such file"),
        (entry("one", 'token_file = "open"'), "chmod o-rwx"),
        (entry("one", "certificate = 3"), "must be a name"),
        (entry("one", 'service_account = "a/b"'), "no keys to check their tokens with"),
        (by_token("one") + "[kubernetes]\nissuer = 3", "needs jwks_file, issuer and audience"),
        (
            by_token("one") + '[kubernetes]\njwks_file = "open"\nissuer = "i"\naudience = "a"',
            "is no JSON Web Key Set",
        ),
        (
            by_token("one") + '[kubernetes]\njwks_file = "symmetric"\nissuer = "i"\naudience = "a"',
            "has no key with an id",
        ),
        (by_token("one") + "[tenants]\nalice = 3", "must be a table"),
        (by_token("one") + "[tenants.alice]\ncalls_per_s = -1", "tenants.alice.calls_per_s"),
        (by_token("one") + "[tenants.alice]\ncalls_per_s = true", "tenants.alice.calls_per_s"),
        (by_token("one") + "[tenants.alice]\nbytes_per_s = nan", "tenants.alice.bytes_per_s"),
        (by_token("one") + "[tenants.alice]\nspeed = 1", "does not know 'speed'"),
    ],
)
def test_files_that_cannot_be(read, tmp_path, text, words):
    (tmp_path / "open").write_text("a secret that everybody can read")
    (tmp_path / "open").chmod(0o644)
    symmetric = {"kty": "oct", "k": "c2VjcmV0", "kid": "k", "alg": "HS256"}
    (tmp_path / "symmetric").write_text(json.dumps({"keys": [symmetric]}))
    with pytest.raises(ConfigError) as problem:
        read(text, environment={"SHORT": "short"})
    assert words in str(problem.value)
    assert "everybody can read" not in str(problem.value) and digest(TOKEN) not in str(problem.value)


# ------------------------------------------------------------------------------------------------------ roles, rates


def test_every_call_says_who_may_make_it():
    """A method that is missing in ROLES nobody may call over TCP: that must be somebody's decision."""
    files = (admin_pb2, bytes_pb2, fleet_pb2, hints_pb2, promptcache_pb2, stats_pb2, store_pb2)
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
    served = {f"{service.name}/{method.name}" for service in services for method in service.methods}
    served -= {"Store/Attach"}  # needs shared memory
    assert served == set(ROLES)
    assert all(roles == {Role.OPERATOR} for name, roles in ROLES.items() if name.startswith("Admin/"))
    writing = {
        "Store/Reserve",
        "Store/Commit",
        "Store/UpdateSession",
        "Store/Truncate",
        "Store/Fork",
        "Bytes/Put",
    }
    assert all(ROLES[name] == {Role.WORKER} for name in writing)
    assert Role.SCHEDULER not in ROLES["Bytes/Get"] | ROLES["Store/Acquire"]


def test_calls_a_second():
    now = 0.0
    rates = TenantRates(lambda: now)
    rates.set({"alice": Rates(calls_per_s=2), "slow": Rates(calls_per_s=0.5)})
    for _ in range(100):
        rates.call("bob")
    rates.call("alice")
    rates.call("alice")
    with pytest.raises(Exhausted, match="tenant alice may make 2 calls a second"):
        rates.call("alice")
    now = 0.5
    rates.call("alice")
    rates.call("slow")
    with pytest.raises(Exhausted):
        rates.call("slow")
    now = 2.5
    rates.call("slow")
    rates.set({})
    rates.call("slow")


async def test_bytes_a_second(monkeypatch):
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("kvstore.transport.rates.asyncio.sleep", sleep)
    rates = TenantRates(lambda: 0.0)
    rates.set({"alice": Rates(bytes_per_s=1000)})
    await rates.carry("bob", 1 << 40)
    await rates.carry("alice", 1000)
    assert slept == []
    await rates.carry("alice", 500)
    await rates.carry("alice", 1_000_000_000)
    assert slept == [0.5, 30.0]


# ------------------------------------------------------------------------------------------------------- reading anew


async def test_the_file_is_read_again_when_it_changes(tmp_path, caplog):
    path = tmp_path / "access.toml"
    path.write_text(by_token("one"))
    access = Access(str(path), "default")
    one = identities.read(str(path)).of(bearer(TOKEN), (), NOW)
    assert access.still(one)
    path.write_text("broken [")
    await access.look()
    assert access.still(one), "a file that cannot be read changes nothing"
    assert "identities stay as they were" in caplog.text
    path.write_text(by_token("one", roles='["reader"]') + by_token("two", OTHER))
    await access.look()
    assert not access.still(one), "it has other roles now"
    two = identities.read(str(path)).of(bearer(OTHER), (), NOW)
    assert access.still(two)
    path.unlink()
    await access.look()
    assert access.still(two)


def test_certificates_that_nobody_is_asked_for_are_told(tmp_path, caplog):
    path = tmp_path / "access.toml"
    path.write_text(by_token("one") + entry("two", 'certificate = "two.example"'))
    access = Access(str(path), "default")
    access.warn_of_certificates("ca.pem")
    assert not caplog.records
    access.warn_of_certificates("")
    (record,) = caplog.records
    assert "nobody is asked for one" in record.message
