"""What makes KV comparable (the namespace) and the byte geometry of a chunk (groups, shards, layer slices)."""

from __future__ import annotations

import enum
import hashlib
import struct
from dataclasses import dataclass, fields
from typing import Any

from kvstore.arguments import NUMBER_MAX, binary, listed, one_of, text, whole
from kvstore.errors import BadRequest, Unsupported

CHUNK_TOKENS_MAX = 65_536
SHARD_BYTES_MAX = 1 << 30
SHARDS_MAX = 256
LAYER_SLICES_MAX = 16_384
"""Of all groups together."""
TEXT_BYTES_MAX = 1024
EPOCH_MAX = (1 << 63) - 1


class GroupKind(enum.Enum):
    """Layers that share an attention kind. FULL and LATENT work; the others are refused until they are built."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"
    LATENT = "latent"
    DRAFT = "draft"
    INDEX = "index"


SUPPORTED_KINDS = frozenset({GroupKind.FULL, GroupKind.LATENT})


@dataclass(frozen=True, slots=True)
class LayerSlice:
    """The contiguous bytes of one layer inside a shard."""

    layer: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One group: how many distinct shards a chunk has for it, and the bytes of each.

    `layers` may be empty where the engine's layout is opaque; then a shard is loaded whole.
    `position_rule` names what happens to positions per layer ("rope", "none", "alibi", …): part of the digest.
    """

    name: str
    shard_bytes: int
    shard_count: int = 1
    kind: GroupKind = GroupKind.FULL
    layers: tuple[LayerSlice, ...] = ()
    position_rule: str = "rope"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _tuple_of(self.layers))


TOOLS_LAYOUT = "kvctl-1:opaque"
SELF_CHECK_LAYOUT = "self-check/"
DOCTORS_LAYOUT = "kvctl-doctor-1:opaque"
OF_TOOLS = (TOOLS_LAYOUT, SELF_CHECK_LAYOUT, DOCTORS_LAYOUT)
"""How layouts begin in the namespaces that `kvctl put` and the doctors open: no model that a worker serves."""
OF_ONE_NODE = (SELF_CHECK_LAYOUT, DOCTORS_LAYOUT)
"""Of these those whose chunks no other node needs: random bits that are forgotten at once."""


@dataclass(frozen=True, slots=True)
class NamespaceSpec:
    """Everything that must be equal for two chunks to be comparable, for a whole model replica, never for one rank.

    The tenant is not here: the daemon derives it from the caller's identity. `weights_epoch` is bumped on reload,
    weight sync or an engine's reset_cache; an old epoch is never served.
    """

    model: str
    weights_digest: bytes
    layout_fingerprint: str
    """Engine, its version and how it lays KV out in memory, e.g. "hf-5.24/k,v:[H,T,D]:float32"."""
    chunk_tokens: int
    groups: tuple[GroupSpec, ...]
    weights_epoch: int = 0
    adapter_digest: bytes = b""
    kv_scales_digest: bytes = b""
    hash_protocol: str = "kvs.exact.v1"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    salt: bytes = b""
    """Caller's own separation inside its tenant (an engine's cache_salt)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", _tuple_of(self.groups))

    @property
    def is_of_one_node(self) -> bool:
        """Its chunks go to no REMOTE store, and other nodes are not told what is forgotten of it."""
        return self.layout_fingerprint.startswith(OF_ONE_NODE)

    @property
    def shard_count(self) -> int:
        return sum(group.shard_count for group in self.groups)

    @property
    def shard_bytes(self) -> tuple[int, ...]:
        """Bytes of each shard; shard numbers run through the groups in order, ranks inside a group."""
        return tuple(group.shard_bytes for group in self.groups for _ in range(group.shard_count))

    @property
    def chunk_bytes(self) -> int:
        return sum(self.shard_bytes)

    def shard_number(self, group: str, rank: int = 0) -> int:
        """Number of the shard of `group` on distinct `rank`."""
        start = 0
        for spec in self.groups:
            if spec.name == group:
                if not 0 <= rank < spec.shard_count:
                    raise BadRequest(f"group {group} has {spec.shard_count} shards", field="rank", value=rank)
                return start + rank
            start += spec.shard_count
        raise BadRequest("no such group in the namespace", field="group", value=group)

    def digest(self, tenant: str) -> bytes:
        """32 bytes over every field but the epoch: two specs share KV only if tenant and digest are equal."""
        state = hashlib.blake2b(digest_size=32, person=b"kvs.namespc.v1")
        for part in (tenant.encode(), *_canonical(self)):
            state.update(struct.pack("<Q", len(part)) + part)
        return state.digest()

    def differences(self, other: NamespaceSpec) -> list[str]:
        """Names of the fields that differ, with both values: what an error or a log line says."""
        found = []
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if mine != theirs:
                found.append(f"{item.name}: {_show(mine)} != {_show(theirs)}")
        return found

    def validate(self) -> None:
        """Raises BadRequest or Unsupported, naming the first field that cannot work."""
        for name in ("model", "layout_fingerprint", "hash_protocol"):
            _check_text(f"namespace.{name}", getattr(self, name), TEXT_BYTES_MAX)
        for name in ("weights_digest", "adapter_digest", "kv_scales_digest", "salt"):
            if len(binary(f"namespace.{name}", getattr(self, name))) > 64:
                raise BadRequest(
                    "must have at most 64 bytes", field=f"namespace.{name}", value=getattr(self, name)
                )
        if not self.weights_digest:
            raise BadRequest(
                "must not be empty; it is missing",
                field="namespace.weights_digest",
                value="0 bytes",
                remedy="send a digest of the model's config and weight files, so that other weights never match",
            )
        _in_range("namespace.weights_epoch", self.weights_epoch, 0, EPOCH_MAX)
        _in_range("namespace.chunk_tokens", self.chunk_tokens, 1, CHUNK_TOKENS_MAX)
        for name in ("tensor_parallel", "pipeline_parallel", "context_parallel"):
            _in_range(f"namespace.{name}", getattr(self, name), 1, 65_536)
        if not listed("namespace.groups", self.groups, "GroupSpec"):
            raise BadRequest(
                "must name at least one group; it is missing", field="namespace.groups", value="()"
            )
        for index, group in enumerate(self.groups):
            _check_group_types(group, f"namespace.groups[{index}]")
        if len({group.name for group in self.groups}) != len(self.groups):
            raise BadRequest(
                "group names must differ", field="namespace.groups", value=[g.name for g in self.groups]
            )
        slices = sum(len(group.layers) for group in self.groups)
        _in_range("namespace.groups: layer slices in all", slices, 0, LAYER_SLICES_MAX)
        for index, group in enumerate(self.groups):
            _validate_group(group, f"namespace.groups[{index}]")
        _in_range("namespace.groups: shards in all", self.shard_count, 1, SHARDS_MAX)


def _tuple_of(values: Any) -> Any:
    """A list as a tuple, so that equal specs are equal; anything else is judged by `validate`."""
    return tuple(values) if isinstance(values, list) else values


def _check_text(field: str, value: str, bytes_max: int) -> None:
    if not text(field, value):
        raise BadRequest(f"must have 1 to {bytes_max} bytes; it is missing", field=field, value='""')
    if len(value.encode()) > bytes_max:
        raise BadRequest(f"must have 1 to {bytes_max} bytes", field=field, value=value)


def _check_group_types(group: GroupSpec, where: str) -> None:
    one_of(where, group, GroupSpec)
    _check_text(f"{where}.name", group.name, 64)
    one_of(f"{where}.kind", group.kind, GroupKind, "name it GroupKind.FULL, or GroupKind.LATENT")
    text(f"{where}.position_rule", group.position_rule)
    for number, piece in enumerate(listed(f"{where}.layers", group.layers, "LayerSlice")):
        one_of(f"{where}.layers[{number}]", piece, LayerSlice)


def _validate_group(group: GroupSpec, where: str) -> None:
    if group.kind not in SUPPORTED_KINDS:
        raise Unsupported(
            "this kind of group is not supported yet",
            field=f"{where}.kind",
            value=group.kind.value,
            remedy="supported: " + ", ".join(sorted(kind.value for kind in SUPPORTED_KINDS)),
        )
    if len(group.position_rule.encode()) > 64:
        raise BadRequest(
            "must have at most 64 bytes", field=f"{where}.position_rule", value=group.position_rule
        )
    _in_range(f"{where}.shard_bytes", group.shard_bytes, 1, SHARD_BYTES_MAX)
    _in_range(f"{where}.shard_count", group.shard_count, 1, SHARDS_MAX)
    end = 0
    for number, piece in enumerate(group.layers):
        for name in ("layer", "offset", "length"):
            whole(f"{where}.layers[{number}].{name}", getattr(piece, name), -NUMBER_MAX)
        if piece.offset < end or piece.length <= 0 or piece.offset + piece.length > group.shard_bytes:
            raise BadRequest(
                f"layer slices must be in order, apart, and inside the shard's {group.shard_bytes} bytes",
                field=f"{where}.layers[{number}]",
                value=f"[{piece.offset}, {piece.offset + piece.length})",
            )
        end = piece.offset + piece.length


def _in_range(field: str, value: int, low: int, high: int) -> None:
    if value == 0 < low:  # as protobuf reads what was not sent
        raise BadRequest(f"must be between {low} and {high}; it is missing, or 0", field=field, value=0)
    whole(field, value, low, high)


def _canonical(spec: NamespaceSpec) -> list[bytes]:
    parts = [
        spec.model.encode(),
        spec.weights_digest,
        spec.layout_fingerprint.encode(),
        struct.pack("<Q", spec.chunk_tokens),
        spec.adapter_digest,
        spec.kv_scales_digest,
        spec.hash_protocol.encode(),
        struct.pack("<QQQ", spec.tensor_parallel, spec.pipeline_parallel, spec.context_parallel),
        spec.salt,
        struct.pack("<Q", len(spec.groups)),
    ]
    for group in spec.groups:
        parts += [group.name.encode(), group.kind.value.encode(), group.position_rule.encode()]
        parts.append(struct.pack("<QQQ", group.shard_bytes, group.shard_count, len(group.layers)))
        parts += [struct.pack("<QQQ", piece.layer, piece.offset, piece.length) for piece in group.layers]
    return parts


def _show(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex() or '""'
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
