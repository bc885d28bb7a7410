"""Schemas of Prompt Cache as files of the SSD directory, or in memory where there is none.

They are not the core's: nothing that the core decides (slots, pins, eviction, leases) depends on a schema's text, and
keys of their KV cover what was encoded, whatever the daemon knows of schemas. They are written by themselves:

    <ssd_dir>/schemas/<digest of tenant and name, 32 digits>-<version, 32 digits>.pml

    header  magic "KVSSCHEM", format u32, number u64, modules u32, lengths of tenant u16, name u16 and text u32,
            then BLAKE2b-128 of the header before it, tenant and name; little-endian
    then    tenant, name, text (UTF-8); in format 2 a sealing and the encrypted text (`encryption.py`)

A file is written under another name, synced, renamed, and its folder is synced: after a crash it is there whole, or not
at all. The version is a digest of the text, which is checked whenever it is read. Of a name, the greatest number is
current; versions are removed from the oldest on, so that a crash in between never brings an older one back.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
from dataclasses import dataclass

from kvstore.errors import Exhausted, NotFound, Unavailable
from kvstore.keys import tenant_mark
from kvstore.promptcache.schema import parse_schema, text_digest
from kvstore.server.logs import fields
from kvstore.tiers.encryption import ID_BYTES, SEALING_BYTES, DiskCipher

log = logging.getLogger(__name__)

SCHEMAS_DIR = "schemas"
SUFFIX = ".pml"
NEW = ".new"
NAMES_PER_TENANT_MAX = 1_024
VERSIONS_MAX = 8
"""Of one name: when there is one more, the oldest goes."""
BYTES_PER_TENANT_MAX = 64 << 20
FILES_MAX = 65_536
"""Of all tenants."""

_HEADER = struct.Struct("<8sIQIHHI")
_MAGIC = b"KVSSCHEM"
_PLAIN, _ENCRYPTED = 1, 2
"""Formats."""
_CHECK_BYTES = 16


@dataclass(frozen=True, slots=True)
class Version:
    tenant: str
    name: str
    digest: bytes
    number: int
    bytes: int
    modules: int
    encrypted: bool = False


class SchemaFiles:
    """Not thread-safe: one thread makes all calls, and may wait for the disk."""

    def __init__(self, ssd_dir: str, cipher: DiskCipher | None = None) -> None:
        """ "": schemas are kept in memory."""
        self._cipher = cipher
        self._folder = os.path.join(ssd_dir, SCHEMAS_DIR) if ssd_dir else ""
        self._versions: dict[tuple[str, str], list[Version]] = {}
        """By tenant and name, the current one last."""
        self._texts: dict[tuple[str, str, bytes], bytes] = {}
        """Without a folder."""
        self._number = 0
        self._count = 0

    def __repr__(self) -> str:
        return f"SchemaFiles({self._folder or 'in memory'}, {self._count} versions)"

    @property
    def durable(self) -> bool:
        return bool(self._folder)

    # --------------------------------------------------------------------------------------------------- start

    def load(self) -> None:
        """Read the headers of all files. What is no schema of ours is left alone, and told in the log."""
        if not self._folder:
            return
        found = []
        for name in self._names():
            path = os.path.join(self._folder, name)
            if name.endswith(NEW):  # a write that did not end
                with contextlib.suppress(OSError):
                    os.unlink(path)
                continue
            try:
                version = _read_header(path)
            except (OSError, ValueError) as problem:
                log.warning(
                    "a file is no schema, and is left alone", extra=fields(path=path, why=str(problem))
                )
                continue
            if _file_name(version.tenant, version.name, version.digest) != name:
                log.warning("a schema's file has another's name", extra=fields(path=path))
                continue
            found.append(version)
        for version in sorted(found, key=lambda one: one.number):
            self._versions.setdefault((version.tenant, version.name), []).append(version)
        self._number = max((version.number for version in found), default=0)
        self._count = len(found)

    def _names(self) -> list[str]:
        """Of the files; none, and a line in the log, where the folder cannot be used: KV is served all the same."""
        try:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            return sorted(os.listdir(self._folder))
        except OSError as problem:
            log.error("schemas cannot be read", extra=fields(path=self._folder, why=problem.strerror))
            return []

    # ------------------------------------------------------------------------------------------------ requests

    def put(self, tenant: str, text: bytes, document: str) -> tuple[Version, bool, tuple[str, ...]]:
        """The version, whether it is new, and what was mended. Raises PmlError, Exhausted, Unavailable."""
        schema = parse_schema(text, document=document)
        digest = text_digest(text)
        known = self._versions.get((tenant, schema.name), [])
        if known and known[-1].digest == digest:
            return known[-1], False, schema.warnings
        self._check_room(tenant, schema.name, len(text), known)
        modules = sum(1 for _ in schema.modules)
        encrypted = bool(self._folder) and self._cipher is not None
        version = Version(tenant, schema.name, digest, self._number + 1, len(text), modules, encrypted)
        self._write(version, text)
        self._number += 1
        again = [one for one in known if one.digest == digest]  # its file was replaced
        kept = [one for one in known if one.digest != digest]
        self._count += 1 - len(again)
        self._versions[tenant, schema.name] = [*kept, version]
        if len(kept) >= VERSIONS_MAX:
            self._drop(kept[0])
            self._sync_folder()
        return version, True, schema.warnings

    def get(self, tenant: str, name: str, digest: bytes = b"") -> tuple[Version, bytes]:
        """A version and its text. Raises NotFound, Unavailable."""
        version = self._find(tenant, name, digest)
        if not self._folder:
            return version, self._texts[tenant, name, version.digest]
        path = os.path.join(self._folder, _file_name(tenant, name, version.digest))
        try:
            with open(path, "rb") as file:
                text = file.read()[len(_header(version)) :]
        except OSError as problem:
            raise self._failed("read", problem) from None
        if version.encrypted:
            text = self._decrypted(version, text)
        if text_digest(text) != version.digest:
            raise Unavailable(
                "the file of this version is damaged",
                field="name",
                value=name,
                remedy="put the schema again, or remove this version",
            )
        return version, text

    def versions(self, tenant: str, name: str = "", *, all_versions: bool = False) -> list[Version]:
        """By name, the current one of each first."""
        found = []
        for owner, known in sorted(self._versions):
            if owner == tenant and (not name or known == name):
                newest_first = self._versions[owner, known][::-1]
                found += newest_first if all_versions else newest_first[:1]
        return found

    def is_current(self, version: Version) -> bool:
        known = self._versions.get((version.tenant, version.name), [])
        return bool(known) and known[-1] == version

    def remove(self, tenant: str, name: str, digest: bytes = b"") -> int:
        """How many versions were removed. Raises NotFound, Unavailable."""
        self._find(tenant, name, digest)
        going = [one for one in self._versions[tenant, name] if not digest or one.digest == digest]
        for version in going:  # the oldest first
            self._drop(version)
        self._sync_folder()
        return len(going)

    def remove_all(self, tenant: str, *, dry_run: bool = False) -> int:
        """How many versions of this tenant's schemas there are, and go unless `dry_run`. Raises Unavailable."""
        going = [one for (owner, _), known in self._versions.items() if owner == tenant for one in known]
        for version in going if not dry_run else ():
            self._drop(version)
        if going and not dry_run:
            self._sync_folder()
        return len(going)

    def remove_all_marked(self, mark: bytes) -> int:
        """As `remove_all`, of the tenant that has this `keys.tenant_mark`."""
        tenants = {owner for owner, _ in self._versions}
        return sum(self.remove_all(tenant) for tenant in tenants if tenant_mark(tenant) == mark)

    def _find(self, tenant: str, name: str, digest: bytes) -> Version:
        known = self._versions.get((tenant, name), [])
        found = next((one for one in reversed(known) if not digest or one.digest == digest), None)
        if found is None:
            what = "version of this schema" if known else "schema"
            raise NotFound(
                f"there is no such {what}",
                field="digest" if known else "name",
                value=digest if known else name,
                remedy="see kvctl promptcache list",
            )
        return found

    def _check_room(self, tenant: str, name: str, size: int, known: list[Version]) -> None:
        mine = [one for (owner, _), some in self._versions.items() if owner == tenant for one in some]
        names = len({one.name for one in mine})
        going = known[0].bytes if len(known) >= VERSIONS_MAX else 0
        total = sum(one.bytes for one in mine) + size - going
        for what, value, bound in (
            ("schemas", names + (not known), NAMES_PER_TENANT_MAX),
            ("bytes of schemas", total, BYTES_PER_TENANT_MAX),
            ("versions of all tenants", self._count + 1, FILES_MAX),
        ):
            if value > bound:
                raise Exhausted(
                    f"there would be {value} {what}, more than {bound}",
                    field="schema",
                    value=name,
                    remedy="remove schemas or versions: kvctl promptcache remove",
                )

    # ---------------------------------------------------------------------------------------------------- disk

    def _write(self, version: Version, text: bytes) -> None:
        if not self._folder:
            self._texts[version.tenant, version.name, version.digest] = text
            return
        path = os.path.join(self._folder, _file_name(version.tenant, version.name, version.digest))
        try:
            with open(path + NEW, "wb") as file:
                header = _header(version)
                if version.encrypted:
                    assert self._cipher is not None
                    text = self._cipher.seal_text(text, header)
                file.write(header + text)
                file.flush()
                os.fsync(file.fileno())
            os.rename(path + NEW, path)
            self._sync()
        except OSError as problem:
            with contextlib.suppress(OSError):
                os.unlink(path + NEW)
            raise self._failed("written", problem) from None

    def _decrypted(self, version: Version, sealed: bytes) -> bytes:
        """Raises Unavailable where its key is gone. What was changed is b"", which is no schema."""
        if self._cipher is None or sealed[:ID_BYTES] not in self._cipher:
            raise Unavailable(
                "the file of this version is encrypted with a key that is not here",
                field="name",
                value=version.name,
                remedy="add its key to ssd_key_file, or put the schema again",
            )
        return self._cipher.open_text(sealed, _header(version)) or b""

    def _drop(self, version: Version) -> None:
        tenant, name = version.tenant, version.name
        if self._folder:
            try:
                os.unlink(os.path.join(self._folder, _file_name(tenant, name, version.digest)))
            except FileNotFoundError:
                pass
            except OSError as problem:
                raise self._failed("removed", problem) from None
        self._texts.pop((tenant, name, version.digest), None)
        left = [one for one in self._versions[tenant, name] if one != version]
        self._versions[tenant, name] = left
        if not left:
            del self._versions[tenant, name]
        self._count -= 1

    def _sync_folder(self) -> None:
        try:
            self._sync()
        except OSError as problem:
            raise self._failed("removed for good", problem) from None

    def _sync(self) -> None:
        if not self._folder:
            return
        fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _failed(self, what: str, problem: OSError) -> Unavailable:
        return Unavailable(
            f"a schema cannot be {what}: {problem.strerror}",
            field="ssd_dir",
            value=self._folder,
            remedy="see kvctl doctor; free some space, or mend the disk",
        )


def _file_name(tenant: str, name: str, digest: bytes) -> str:
    state = hashlib.blake2b(digest_size=16, person=b"kvs.schemafile")
    for part in (tenant.encode(), name.encode()):
        state.update(struct.pack("<Q", len(part)) + part)
    return f"{state.hexdigest()}-{digest.hex()}{SUFFIX}"


def _header(version: Version) -> bytes:
    tenant, name = version.tenant.encode(), version.name.encode()
    head = _HEADER.pack(
        _MAGIC,
        _ENCRYPTED if version.encrypted else _PLAIN,
        version.number,
        version.modules,
        len(tenant),
        len(name),
        version.bytes,
    )
    check = hashlib.blake2b(head + tenant + name, digest_size=_CHECK_BYTES).digest()
    return head + check + tenant + name


def _read_header(path: str) -> Version:
    """Raises OSError; ValueError where it is none."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_HEADER.size + _CHECK_BYTES)
        if len(head) < _HEADER.size + _CHECK_BYTES:
            raise ValueError("it is too short")
        magic, form, number, modules, tenant_bytes, name_bytes, text_bytes = _HEADER.unpack(
            head[: _HEADER.size]
        )
        names = file.read(tenant_bytes + name_bytes)
    if magic != _MAGIC or form not in (_PLAIN, _ENCRYPTED):
        raise ValueError("it has another format")
    check = hashlib.blake2b(head[: _HEADER.size] + names, digest_size=_CHECK_BYTES).digest()
    encrypted = form == _ENCRYPTED
    wanted = len(head) + len(names) + text_bytes + (SEALING_BYTES if encrypted else 0)
    if check != head[_HEADER.size :] or size != wanted:
        raise ValueError("it is damaged")
    digest = bytes.fromhex(os.path.basename(path).removesuffix(SUFFIX).rpartition("-")[2])
    return Version(
        names[:tenant_bytes].decode(),
        names[tenant_bytes:].decode(),
        digest,
        number,
        text_bytes,
        modules,
        encrypted,
    )
