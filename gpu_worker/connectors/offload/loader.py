"""Chunks into rows: one copy each, out of shared memory, with the generations compared before and after."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from kvstore.client import ReadLease
from kvstore.errors import StoreError
from kvstore.gpu_worker.connectors.offload.crew import Crew
from kvstore.gpu_worker.connectors.offload.jobs import Job, Jobs
from kvstore.gpu_worker.connectors.offload.lookups import Opener, Place, Question, find
from kvstore.gpu_worker.connectors.offload.rows import Rows
from kvstore.gpu_worker.connectors.offload.tally import Tally
from kvstore.types import KEYS_PER_REQUEST_MAX, ChunkKey

log = logging.getLogger(__name__)


class RowLoader:
    def __init__(self, rows: Rows, crew: Crew, opener: Opener, tally: Tally) -> None:
        self._rows = rows
        self._opener = opener
        self._tally = tally
        self.jobs = Jobs(crew, rows_max=rows.count)

    def start(self, job: Job, places: Sequence[Place | None], questions: Sequence[Question]) -> None:
        """Copy each key of the job from its place; look those up again that have none. Ends the questions."""
        if not self.jobs.start(job, lambda: self._load(job, places, questions)):
            self._tally.add(loads_dropped=1)
            _end(questions)

    def _load(self, job: Job, places: Sequence[Place | None], questions: Sequence[Question]) -> None:
        try:
            missing = [
                number
                for number, place in enumerate(places)
                if place is None or not self._copy(job, number, place)
            ]
            if missing and not job.over:
                self._look_again(job, missing)
        except StoreError as error:
            log.warning("not loaded: %s", error)
        finally:
            _end(questions)
            job.end()
        loaded = sum(job.done)
        self._tally.add(
            blocks_loaded=loaded,
            bytes_loaded=loaded * self._rows.row_bytes,
            blocks_failed=len(job.keys) - loaded,
        )

    def _look_again(self, job: Job, missing: Sequence[int]) -> None:
        namespace = self._opener(job.left_s)
        if namespace is None:
            return
        for start in range(0, len(missing), KEYS_PER_REQUEST_MAX):
            part = missing[start : start + KEYS_PER_REQUEST_MAX]
            found: dict[ChunkKey, Place] = {}
            leases: list[ReadLease] = []
            try:
                keys = [job.keys[number] for number in part]
                find(namespace, keys, time.monotonic() + job.left_s, found, leases, prefix=False)
                for number in part:
                    place = found.get(job.keys[number])
                    if place is not None:
                        self._copy(job, number, place)
            finally:
                for lease in leases:
                    lease.release()

    def _copy(self, job: Job, number: int, place: Place) -> bool:
        if not job.hold():
            return False
        try:
            done = place.lease.copy_to(place.number, self._rows.row(job.rows[number]))
            job.done[number] = done
            return done
        finally:
            job.let_go()


def _end(questions: Sequence[Question]) -> None:
    for question in questions:
        question.end()
