"""Saving chunks: asking for slots, and what is written into them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore import wire
from kvstore.answers import Reserved
from kvstore.arguments import flag, listed, whole, wholes
from kvstore.client.attachment import Attachment
from kvstore.client.batch import FILL_AHEAD_BYTES, PutOutcome, StagedPieces, WriteBatch, were_read
from kvstore.client.binding import Binding
from kvstore.client.call import Operation, Reply, gone
from kvstore.client.destination import Bits, gather, groups, origin
from kvstore.client.geometry import Geometry
from kvstore.client.mapped_extents import MappedExtents
from kvstore.client.requests import check_maker, check_parent, checked_keys
from kvstore.client.staging import footprint
from kvstore.errors import BadRequest, DeadlineExceeded, StoreError, Unavailable
from kvstore.types import ChunkKey, GrantResult, NamespaceId, Protection, Wait
from kvstore.v1 import store_pb2

log = logging.getLogger(__name__)

DROPPED = (GrantResult.FULL, GrantResult.QUOTA, GrantResult.UNAVAILABLE)


def _refused(error: StoreError | None) -> GrantResult:
    """What is said of each key where no answer says it."""
    away = isinstance(error, Unavailable | DeadlineExceeded)
    return GrantResult.UNAVAILABLE if away else GrantResult.FULL


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be saved, checked."""

    keys: Sequence[ChunkKey]
    shards: tuple[int, ...]
    parent: ChunkKey
    parents: Sequence[ChunkKey]
    token_counts: Sequence[int]
    derived: bool
    maker: bytes
    transient: bool

    def request(self, namespace_id: NamespaceId, count: int | None = None) -> store_pb2.ReserveRequest:
        """Of the first `count` keys, or of all."""
        return store_pb2.ReserveRequest(
            namespace_id=namespace_id,
            keys=self.keys[:count],
            parent=self.parent,
            parents=self.parents[:count],
            token_counts=self.token_counts[:count],
            shards=self.shards,
            derived=self.derived,
            maker=self.maker,
            transient=self.transient,
            packed_extents=True,
        )


class Writer:
    """The saves of one namespace, each an operation (see `call`); what they do `Namespace` says."""

    def __init__(self, binding: Binding, geometry: Geometry) -> None:
        self._binding = binding
        self._connection = binding.connection
        self._geometry = geometry

    def writing(self, asked: Asked, staged: bool, timeout_s: float | None) -> Operation[WriteBatch]:
        keys, lengths = asked.keys, self._lengths(asked)
        staged = flag("staged", staged)
        deadline = self._connection.deadline(timeout_s)
        binding = self._binding.now()
        if binding is None or not keys:
            return self._no_batch(keys, self._connection.absence if keys else None)
        attachment, number = binding

        pieces: StagedPieces | None = None
        count = len(keys)
        if staged and attachment.protection is Protection.SEALED:
            pieces = yield from self._taking(attachment, lengths, count, deadline)
            count = pieces.count if pieces is not None else 0
        if not count:
            return self._no_batch(keys, attachment.staging_problem if pieces is None else None)

        def give_back(answer: store_pb2.AttachReply) -> None:
            attachment.notice(
                "abort", [answer.reserve.reservation_id] if answer.reserve.reservation_id else []
            )

        batch = None
        try:
            body = asked.request(number, count)
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
                batch = self._batch(reserved, asked, lengths, staged, pieces, attachment)
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

    def putting(
        self, asked: Asked, values: Sequence[Any] | npt.NDArray[Any], wait: Wait, timeout_s: float | None
    ) -> Operation[PutOutcome]:
        """Copies where it is driven."""
        whole("wait", wait, 0, max(Wait))
        sources = self._sources(asked, values)
        deadline = self._connection.deadline(timeout_s)
        if self._may_be_at_once(asked):
            outcome = yield from self._putting_at_once(asked, sources, wait, deadline)
            if outcome is not None:
                return outcome
        batch = yield from self.writing(asked, True, max(0.0, deadline - time.monotonic()))
        with batch:
            if batch.error is not None or not batch.granted:
                return PutOutcome(batch.results, error=batch.error)
            each = len(asked.shards)
            batch.copy_many(
                [
                    (index, shard, sources[index * each + column])
                    for index in batch.granted
                    for column, shard in enumerate(asked.shards)
                ]
            )
            committed = yield from batch.committing(wait, max(0.0, deadline - time.monotonic()))
        return PutOutcome(batch.results, committed.results, committed.error)

    def _may_be_at_once(self, asked: Asked) -> bool:
        """Bytes are copied before anybody has said that they are wanted: not what the directory knows to be there. The
        ends of a chain tell (to look all of 16 keys up takes .1 ms, when the caches hold something else). And of much,
        the daemon had better copy the first parts while we write the rest."""
        binding = self._binding.now()
        if binding is None or not asked.keys or binding[0].protection is not Protection.SEALED:
            return False
        if len(asked.keys) * sum(self._lengths(asked)) > FILL_AHEAD_BYTES:
            return False
        known = self._binding.looked_up((asked.keys[0], asked.keys[-1]))
        return known is None or not any(known[1].states)

    def _putting_at_once(
        self, asked: Asked, sources: Sequence[Bits], wait: Wait, deadline: float
    ) -> Operation[PutOutcome | None]:
        """By one message. None: there is not enough staging memory for all of it now."""
        binding = self._binding.now()
        if binding is None:
            return None
        attachment, number = binding
        lengths = self._lengths(asked)
        pieces = yield from self._taking(attachment, lengths, len(asked.keys), deadline)
        if pieces is None:
            return None
        try:
            if pieces.count < len(asked.keys):
                return None
            starts = [pieces.next() for _ in asked.keys]
            columns = [footprint(lengths[:column]) for column in range(len(lengths))]
            offsets = [start + column for start in starts for column in columns]
            staging = pieces.staging.array
            pairs = [
                (staging[at : at + bits.nbytes], bits) for at, bits in zip(offsets, sources, strict=True)
            ]
            for group in groups([bits.nbytes for bits in sources]):
                gather(pairs[group])
            pieces.handed_over(starts)
            body = store_pb2.SaveRequest(reserve=asked.request(number), staging_offsets=offsets, wait=wait)
            answered = partial(were_read, pieces, starts)
            call = attachment.call("save", body, deadline, must_end=True, on_reply=answered)
            if call.request is None:  # it was never sent
                were_read(pieces, starts)
        finally:
            pieces.end()
        yield call
        return self._put_outcome(asked, call.answer)

    def _put_outcome(self, asked: Asked, answer: Reply) -> PutOutcome:
        if isinstance(answer, store_pb2.AttachReply):
            saved = wire.saved_from_proto(answer.save)
            granted = saved.results.count(GrantResult.GRANTED)
            if len(saved.results) == len(asked.keys) and len(saved.committed) == granted:
                self._count_dropped(saved.results)
                return PutOutcome(saved.results, saved.committed)
            answer = Unavailable("the daemon answered for other chunks than were put")
        self._connection.count("commits_failed")
        return PutOutcome((_refused(answer),) * len(asked.keys), error=answer)

    def _sources(self, asked: Asked, values: Sequence[Any] | npt.NDArray[Any]) -> list[Bits]:
        """One per key, then per shard. Raises BadRequest."""
        lengths = self._lengths(asked)
        if not isinstance(values, np.ndarray):  # of which the rows are taken
            values = listed("values", values, "arrays, one for each key and shard")
        sources = [origin(value, f"values[{number}]") for number, value in enumerate(values)]
        if len(sources) != len(asked.keys) * len(lengths):
            raise BadRequest(
                f"has one entry for each of {len(asked.keys)} keys and {len(lengths)} shards",
                field="values",
                value=len(sources),
            )
        for number, bits in enumerate(sources):
            if bits.nbytes != lengths[number % len(lengths)]:
                raise BadRequest(
                    f"must have the shard's {lengths[number % len(lengths)]} bytes",
                    field=f"values[{number}]",
                    value=f"{bits.nbytes} bytes",
                )
        return sources

    def _taking(
        self, attachment: Attachment, lengths: Sequence[int], count: int, deadline: float
    ) -> Operation[StagedPieces | None]:
        """Staging memory for as many of so many chunks as there is room for; None: there is none to be had."""
        self._check_staging(lengths)
        if attachment.staging is None:
            yield partial(attachment.make_staging, self._connection.staging_bytes, deadline)
        staging = attachment.staging
        return None if staging is None else StagedPieces(staging, footprint(lengths), count)

    def _lengths(self, asked: Asked) -> list[int]:
        return [self._geometry.shard_bytes[shard] for shard in asked.shards]

    def asked(
        self,
        keys: Sequence[ChunkKey],
        parent: ChunkKey,
        parents: Sequence[ChunkKey],
        token_counts: Sequence[int],
        shards: Sequence[int],
        derived: bool,
        maker: bytes,
        transient: bool,
    ) -> Asked:
        """What is to be saved. Raises BadRequest."""
        keys = checked_keys("keys", keys)
        check_parent(parent)
        parents = checked_keys("parents", parents, empty=True)
        token_counts = wholes("token_counts", token_counts, 1, self._binding.spec.chunk_tokens)
        derived, transient = flag("derived", derived), flag("transient", transient)
        for field, column in (("parents", parents), ("token_counts", token_counts)):
            if column and len(column) != len(keys):
                raise BadRequest(
                    f"has one entry per key ({len(keys)}) or none", field=field, value=len(column)
                )
        numbers = self._geometry.shards_of(tuple(wholes("shards", shards)))
        check_maker(maker)
        return Asked(keys, numbers, parent, parents, token_counts, derived, maker, transient)

    def _batch(
        self,
        reserved: Reserved,
        asked: Asked,
        lengths: Sequence[int],
        staged: bool,
        pieces: StagedPieces | None,
        attachment: Attachment,
    ) -> WriteBatch | None:
        """The batch of an answer; None when it does not fit the request, or its slots are not mapped."""
        results = list(reserved.results)
        results += [GrantResult.FULL] * (len(asked.keys) - len(results))
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
            shards=asked.shards,
            attachment=attachment,
            timeout_s=self._connection.timeout_s,
            reservation_id=reserved.reservation,
            lengths=lengths,
            slots=slots,
            pieces=pieces,
        )

    def _no_batch(self, keys: Sequence[ChunkKey], error: StoreError | None) -> WriteBatch:
        results = (_refused(error),) * len(keys)
        self._count_dropped(results)
        return WriteBatch(results, error=error)

    def _count_dropped(self, results: Sequence[GrantResult]) -> None:
        dropped = sum(result in DROPPED for result in results)
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
