"""Shadow caches: stores of other sizes and policies, run by the production core, that see a sample of what a live
daemon sees, and say what each would have served (SHARDS, Waldspurger et al., FAST 2015; sessions are sampled).

A share R of the sessions, chosen by a hash of their number, meets caches of R times the size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import BadRequest
from kvstore.replay.machine import Machine, Result
from kvstore.replay.trace import Trace, Turn

SCALE = 1 << 32
CHUNKS_MIN = 16
"""A shadow smaller than this says nothing: the share is raised until the smallest has as many."""


@dataclass(frozen=True, slots=True)
class Size:
    """Of a store that might be."""

    dram_bytes: int
    ssd_bytes: int
    policy: str


class Shadows:
    """Fed turn by turn."""

    def __init__(
        self,
        sizes: Sequence[Size],
        *,
        chunk_tokens: int,
        chunk_bytes: int,
        share: float = 0.1,
        seed: bytes = b"",
    ) -> None:
        if not 0.0 < share <= 1.0:
            raise BadRequest("must be above 0 and at most 1", field="share", value=share)
        if not sizes:
            raise BadRequest("names no size", field="sizes", value=0)
        smallest = min(size.dram_bytes for size in sizes) / chunk_bytes
        self.share = min(1.0, max(share, CHUNKS_MIN / max(1.0, smallest)))
        self.sizes = tuple(sizes)
        self.sampled = 0
        """Turns."""
        self._seed = seed
        self._machines = [
            Machine(
                Trace("live", chunk_tokens, []),
                dram_chunks=max(1, round(self.share * size.dram_bytes / chunk_bytes)),
                ssd_chunks=round(self.share * size.ssd_bytes / chunk_bytes),
                policy=size.policy,
                chunk_bytes=chunk_bytes,
                ssd_bytes_per_s=float("inf"),
                ssd_latency_ms=0.0,
            )
            for size in sizes
        ]

    def __repr__(self) -> str:
        return f"Shadows({len(self.sizes)} of {self.share:.3f}, {self.sampled} turns)"

    def feed(self, turn: Turn) -> bool:
        """Whether the turn is in the sample. Times never go back."""
        if not self._is_sampled(turn.session):
            return False
        self.sampled += 1
        for machine in self._machines:
            machine.serve(turn)
        return True

    def _is_sampled(self, session: int) -> bool:
        digest = hashlib.blake2b(
            session.to_bytes(8, "little", signed=True), digest_size=4, key=self._seed
        ).digest()
        return int.from_bytes(digest, "little") < self.share * SCALE

    @property
    def results(self) -> list[tuple[Size, Result]]:
        return [(size, machine.result) for size, machine in zip(self.sizes, self._machines, strict=True)]
