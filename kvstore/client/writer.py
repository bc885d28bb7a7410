"""Saving chunks: asking for slots, and what is written into them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstore import wire
from kvstore.answers import Reserved
from kvstore.arguments import flag, wholes
from kvstore.client.attachment import Attachment
from kvstore.client.batch import StagedPieces, WriteBatch
from kvstore.client.binding import Binding
from kvstore.client.call import Operation, gone
from kvstore.client.geometry import Geometry
from kvstore.client.mapped_extents import MappedExtents
from kvstore.client.requests import check_maker, check_parent, checked_keys
from kvstore.client.staging import footprint
from kvstore.errors import BadRequest, StoreError
from kvstore.types import ChunkKey, GrantResult, Protection
from kvstore.v1 import store_pb2

log = logging.getLogger(__name__)


class Writer:
    """The saves of one namespace, each an operation (see `call`); what they do `Namespace` says."""

    def __init__(self, binding: Binding, geometry: Geometry) -> None:
        self._binding = binding
        self._connection = binding.connection
        self._geometry = geometry

    def writing(
        self,
        keys: Sequence[ChunkKey],
        parent: ChunkKey,
        parents: Sequence[ChunkKey],
        token_counts: Sequence[int],
        shards: Sequence[int],
        derived: bool,
        maker: bytes,
        transient: bool,
        staged: bool,
        timeout_s: float | None,
    ) -> Operation[WriteBatch]:
        keys = checked_keys("keys", keys)
        check_parent(parent)
        parents = checked_keys("parents", parents, empty=True)
        token_counts = wholes("token_counts", token_counts, 1, self._binding.spec.chunk_tokens)
        derived, transient, staged = (
            flag(field, value)
            for field, value in (("derived", derived), ("transient", transient), ("staged", staged))
        )
        for field, column in (("parents", parents), ("token_counts", token_counts)):
            if column and len(column) != len(keys):
                raise BadRequest(
                    f"has one entry per key ({len(keys)}) or none", field=field, value=len(column)
                )
        shard_numbers = self._geometry.shards_of(tuple(wholes("shards", shards)))
        check_maker(maker)
        lengths = [self._geometry.shard_bytes[shard] for shard in shard_numbers]
        deadline = self._connection.deadline(timeout_s)
        binding = self._binding.now()
        if binding is None or not keys:
            return self._no_batch(keys, self._connection.absence if keys else None)
        attachment, number = binding

        pieces: StagedPieces | None = None
        asked = len(keys)
        if staged and attachment.protection is Protection.SEALED:
            self._check_staging(lengths)
            if attachment.staging is None:
                yield partial(attachment.make_staging, self._connection.staging_bytes, deadline)
            staging = attachment.staging
            if staging is None:
                return self._no_batch(keys, None)
            pieces = StagedPieces(staging, footprint(lengths), len(keys))
            asked = pieces.count
        if not asked:
            return self._no_batch(keys, None)

        def give_back(answer: store_pb2.AttachReply) -> None:
            attachment.notice(
                "abort", [answer.reserve.reservation_id] if answer.reserve.reservation_id else []
            )

        body = store_pb2.ReserveRequest(
            namespace_id=number,
            keys=keys[:asked],
            parent=parent,
            parents=parents[:asked],
            token_counts=token_counts[:asked],
            shards=shard_numbers,
            derived=derived,
            maker=maker,
            transient=transient,
            packed_extents=True,
        )
        batch = None
        try:
            call = attachment.call("reserve", body, deadline, on_late=give_back)
            yield call
            answer = call.answer
            if not isinstance(answer, store_pb2.AttachReply):
                return self._no_batch(keys, answer)
            try:
                reserved = wire.reserved_from_proto(answer.reserve)
                if staged and pieces is None:
                    missing = attachment.mappings.missing(set(reserved.extents.segment))
                    if missing:
                        yield partial(attachment.map_segments, missing, deadline)
                batch = self._batch(reserved, keys, shard_numbers, lengths, staged, pieces, attachment)
                if batch is not None:
                    attachment.batches[batch.reservation_id] = batch
            finally:
                kept = attachment.keep(call)
                if batch is None and kept:
                    give_back(answer)
        finally:
            if batch is None and pieces is not None:
                pieces.end()  # nothing was committed, so the daemon reads none of it
        if batch is None:
            return self._no_batch(keys, gone("the reserved slots could not be mapped"))
        if kept:
            return batch
        batch.abort()
        return self._no_batch(keys, self._connection.absence)

    def _batch(
        self,
        reserved: Reserved,
        keys: Sequence[ChunkKey],
        shards: tuple[int, ...],
        lengths: Sequence[int],
        staged: bool,
        pieces: StagedPieces | None,
        attachment: Attachment,
    ) -> WriteBatch | None:
        """The batch of an answer; None when it does not fit the request, or its slots are not mapped."""
        results = list(reserved.results)
        results += [GrantResult.FULL] * (len(keys) - len(results))
        granted = [index for index, result in enumerate(results) if result is GrantResult.GRANTED]
        if list(reserved.extents.length) != list(lengths) * len(granted):
            log.error("an answer to Reserve does not fit the request: %d keys granted", len(granted))
            return None
        slots: list[npt.NDArray[np.uint8]] = []
        if pieces is not None:
            pieces.limit(len(granted))
        elif staged:
            mapped = MappedExtents(reserved.extents, lengths, attachment.mappings)
            if mapped.wrong:
                return None
            slots = [mapped.data(row) for row in range(len(mapped))]
        self._count_dropped(results)
        return WriteBatch(
            results,
            shards=shards,
            attachment=attachment,
            timeout_s=self._connection.timeout_s,
            reservation_id=reserved.reservation,
            lengths=lengths,
            slots=slots,
            pieces=pieces,
        )

    def _no_batch(self, keys: Sequence[ChunkKey], error: StoreError | None) -> WriteBatch:
        results = (GrantResult.FULL,) * len(keys)
        self._count_dropped(results)
        return WriteBatch(results, error=error)

    def _count_dropped(self, results: Sequence[GrantResult]) -> None:
        dropped = results.count(GrantResult.FULL) + results.count(GrantResult.QUOTA)
        if dropped:
            self._connection.count("saves_dropped", dropped)

    def _check_staging(self, lengths: Sequence[int]) -> None:
        if footprint(lengths) > self._connection.staging_bytes:
            raise BadRequest(
                f"is too small for one chunk's {footprint(lengths)} bytes",
                field="staging_bytes",
                value=self._connection.staging_bytes,
                remedy="connect with more, or write fewer shards at a time",
            )
