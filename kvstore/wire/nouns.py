"""Nouns of types.py and layout.py <-> proto: namespaces, extents, results of one byte, entries of sessions."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import TypeVar

from kvstore.errors import StoreError, Unsupported
from kvstore.layout import GroupKind, GroupSpec, LayerSlice, NamespaceSpec
from kvstore.types import (
    ChunkKey,
    CommitResult,
    Extent,
    Extents,
    GrantResult,
    HintResult,
    Outcome,
    Reason,
    SessionEntry,
)
from kvstore.v1 import store_pb2, types_pb2

LITTLE_ENDIAN = sys.byteorder == "little"


def spec_to_proto(spec: NamespaceSpec) -> types_pb2.Namespace:
    """Call `spec.validate()` before: a number that does not fit its field is a ValueError here."""
    return types_pb2.Namespace(
        model=spec.model,
        weights_digest=spec.weights_digest,
        weights_epoch=spec.weights_epoch,
        adapter_digest=spec.adapter_digest,
        kv_scales_digest=spec.kv_scales_digest,
        layout_fingerprint=spec.layout_fingerprint,
        hash_protocol=spec.hash_protocol,
        tensor_parallel=spec.tensor_parallel,
        pipeline_parallel=spec.pipeline_parallel,
        context_parallel=spec.context_parallel,
        chunk_tokens=spec.chunk_tokens,
        groups=[
            types_pb2.Group(
                name=group.name,
                kind=group.kind.value,
                shard_bytes=group.shard_bytes,
                shard_count=group.shard_count,
                layers=[
                    types_pb2.LayerSlice(layer=piece.layer, offset=piece.offset, length=piece.length)
                    for piece in group.layers
                ],
                position_rule=group.position_rule,
            )
            for group in spec.groups
        ],
        salt=spec.salt,
    )


def spec_from_proto(message: types_pb2.Namespace) -> NamespaceSpec:
    """Not validated, except that an unknown group kind is Unsupported; the receiver calls `validate()`. What was not
    sent and has a default has it: one shard, one rank, full attention."""
    return NamespaceSpec(
        model=message.model,
        weights_digest=message.weights_digest,
        weights_epoch=message.weights_epoch,
        adapter_digest=message.adapter_digest,
        kv_scales_digest=message.kv_scales_digest,
        layout_fingerprint=message.layout_fingerprint,
        hash_protocol=message.hash_protocol,
        tensor_parallel=message.tensor_parallel or 1,
        pipeline_parallel=message.pipeline_parallel or 1,
        context_parallel=message.context_parallel or 1,
        chunk_tokens=message.chunk_tokens,
        groups=tuple(_group_from_proto(group, index) for index, group in enumerate(message.groups)),
        salt=message.salt,
    )


def _group_from_proto(message: types_pb2.Group, index: int) -> GroupSpec:
    try:
        kind = GroupKind(message.kind or GroupKind.FULL.value)
    except ValueError:
        raise Unsupported(
            "no such kind of group",
            field=f"namespace.groups[{index}].kind",
            value=message.kind,
            remedy="known: " + ", ".join(item.value for item in GroupKind),
        ) from None
    return GroupSpec(
        name=message.name,
        kind=kind,
        shard_bytes=message.shard_bytes,
        shard_count=message.shard_count or 1,
        layers=tuple(LayerSlice(piece.layer, piece.offset, piece.length) for piece in message.layers),
        position_rule=message.position_rule,
    )


# ---------------------------------------------------------------------------------------------------- extents


def extents_to_proto(extents: Sequence[Extent], *, packed: bool = False) -> types_pb2.Extents:
    """`packed`: for a reader that asked for it (`packed_extents`)."""
    columns = Extents.of(extents)
    if packed:
        ordered = columns.columns if LITTLE_ENDIAN else map(_swapped, columns.columns)
        return types_pb2.Extents(packed=b"".join(ordered))
    return types_pb2.Extents(
        segment=columns.segment,
        offset=columns.offset,
        length=columns.length,
        cell=columns.cell,
        generation=columns.generation,
        checksum=columns.checksum,
    )


def _swapped(column: array[int]) -> array[int]:
    swapped = column[:]
    swapped.byteswap()
    return swapped


def extents_from_proto(message: types_pb2.Extents) -> Extents:
    """Raises StoreError (INTERNAL) when the columns differ in length."""
    packed = message.packed
    if packed:
        if len(packed) % (6 * 8):
            raise StoreError("is not six columns of u64", field="extents.packed", value=len(packed))
        whole = array("Q", packed) if LITTLE_ENDIAN else _swapped(array("Q", packed))
        n = len(whole) // 6
        return Extents(
            whole[:n],
            whole[n : 2 * n],
            whole[2 * n : 3 * n],
            whole[3 * n : 4 * n],
            whole[4 * n : 5 * n],
            whole[5 * n :],
        )
    columns = (
        message.segment,
        message.offset,
        message.length,
        message.cell,
        message.generation,
        message.checksum,
    )
    if len({len(column) for column in columns}) != 1:
        raise StoreError(
            "the columns of an Extents message differ in length", field="extents", value=[*map(len, columns)]
        )
    return Extents(*(array("Q", column) for column in columns))


# ---------------------------------------------------------------------------------------- results of one byte


E = TypeVar("E", Outcome, Reason, GrantResult, CommitResult, HintResult)


def _table(kind: type[E], unknown: E) -> list[E]:
    known = {item.value: item for item in kind}
    return [known.get(byte, unknown) for byte in range(256)]


_OUTCOMES = _table(Outcome, Outcome.MISS)
_REASONS = _table(Reason, Reason.NONE)
_GRANTS = _table(GrantResult, GrantResult.FULL)
_HINTS = _table(HintResult, HintResult.REJECTED)
_COMMITS = _table(CommitResult, CommitResult.WAITING_FOR_SHARDS)


def outcomes_from_bytes(data: bytes) -> tuple[Outcome, ...]:
    return tuple(map(_OUTCOMES.__getitem__, data))


def reasons_from_bytes(data: bytes) -> tuple[Reason, ...]:
    return tuple(map(_REASONS.__getitem__, data))


def grants_from_bytes(data: bytes) -> tuple[GrantResult, ...]:
    return tuple(map(_GRANTS.__getitem__, data))


def commits_from_bytes(data: bytes) -> tuple[CommitResult, ...]:
    return tuple(map(_COMMITS.__getitem__, data))


def hints_from_bytes(data: bytes) -> tuple[HintResult, ...]:
    return tuple(map(_HINTS.__getitem__, data))


# ---------------------------------------------------------------------------------------- entries of sessions


def entries_to_proto(entries: Iterable[SessionEntry]) -> list[store_pb2.SessionEntry]:
    return [
        store_pb2.SessionEntry(
            key=entry.key,
            first_token=entry.first_token,
            token_count=entry.token_count,
            delta=entry.delta,
            approximate=entry.approximate,
        )
        for entry in entries
    ]


def entries_from_proto(messages: Iterable[store_pb2.SessionEntry]) -> tuple[SessionEntry, ...]:
    return tuple(
        SessionEntry(
            key=ChunkKey(message.key),
            first_token=message.first_token,
            token_count=message.token_count,
            delta=message.delta,
            approximate=message.approximate,
        )
        for message in messages
    )
