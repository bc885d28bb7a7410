"""What the nodes of a fleet have forgotten, in the registry's Redis: told by this node, and read with each heartbeat.

The registry's thread does all of it, once a round. A peer's chunk says up to which count of forgets its node has
dropped what was forgotten; `refuses` holds that against what this node knows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from kvstore.config import PEERS
from kvstore.core.events import ChunksForgotten, ForgetChunks, Heeded
from kvstore.fleet.secret import TAG_BYTES, FleetSecret
from kvstore.tiers.remote.backend import Book, News, StoreProblem
from kvstore.tiers.remote.records import Description
from kvstore.tiers.remote.redis_tombstones import RedisTombstones
from kvstore.tiers.remote.tombstones import Forgotten
from kvstore.types import OpId

KEPT_S = 30 * 24 * 3_600
"""A node that was away for longer takes all that it has for forgotten."""
TIDY_S = 600.0

Heard = Callable[[News, float], None]
"""(what others have forgotten, when it was asked by time.monotonic); digests are those of the fleet."""


class FleetForgets:
    def __init__(
        self,
        secret: FleetSecret,
        path: str,
        *,
        news: Heard,
        done: Callable[[ChunksForgotten], None],
        within_s: float,
        heeded: Heeded | None = None,
        is_ours: Callable[[], bool] = lambda: True,
    ) -> None:
        """`news` and `done` are called on the registry's thread, `news` first; `within_s`: chunks of peers are refused
        when nothing was read for so long (0: never)."""
        self._secret = secret
        self.book = Book(path, channel=PEERS, heeded=heeded, is_ours=is_ours)
        self._news = news
        self._done = done
        self._within_s = within_s
        self._told: deque[ForgetChunks] = deque()
        self._postponed: list[OpId] = []
        """Answered as not told."""
        self._read_at: float | None = None
        self._tidied_at = time.monotonic()
        self.wake: Callable[[], None] = lambda: None
        """Ends the pause between two rounds; set by the registry."""
        self._tombstones = RedisTombstones(
            lambda what: f"kvs:{{{secret.prefix}}}:{what}",
            self.book,
            tag=secret.tag,
            is_tag=secret.is_tag,
            tag_bytes=TAG_BYTES,
        )

    def __repr__(self) -> str:
        return f"FleetForgets({self.book.tombstones}, {len(self.book.pending)} to tell)"

    # ------------------------------------------------------------------------------------------------ from any thread

    def submit(self, effect: ForgetChunks) -> None:
        self.book.announce(map(self._as_told, effect.forgotten))
        self._told.append(effect)
        self.wake()

    @property
    def is_fresh(self) -> bool:
        """Whether it is known what others have forgotten, but for what is newer than the bound."""
        at = self._read_at
        return at is not None and (not self._within_s or time.monotonic() - at < self._within_s)

    def refuses(self, description: Description) -> str:
        """Why a chunk of a peer must not be served; empty: nothing stands against it."""
        if not self.is_fresh:
            return "it is not known what other nodes have forgotten"
        return self.book.refuses(description)

    # ----------------------------------------------------------------------------------------- on the registry's thread

    def round(self, client: Any) -> None:
        """Tell, and read. Raises what the client raises; then what was to be told is kept, and answered so."""
        effects = self._take()
        asked_at = time.monotonic()
        try:
            self._exchange(client)
        except Exception as problem:
            self._answer(effects, str(problem) or type(problem).__name__)
            raise
        self._read_at = asked_at
        self._news(self.book.take_news(), asked_at)
        self._answer(effects, "")
        if time.monotonic() - self._tidied_at > TIDY_S:
            self._tidied_at = time.monotonic()
            self._tombstones.tidy(client, KEPT_S)

    def postpone(self, why: str) -> None:
        """The registry cannot be used."""
        self._answer(self._take(), why)

    def _take(self) -> list[ForgetChunks]:
        """First into the journal, so that a crash forgets no forget."""
        effects = [self._told.popleft() for _ in range(len(self._told))]
        self.book.save_again()
        if effects:
            self.book.postpone([self._as_told(one) for effect in effects for one in effect.forgotten])
        return effects

    def _as_told(self, forgotten: Forgotten) -> Forgotten:
        digest, key, maker = forgotten
        return (self._secret.namespace(digest) if digest else b""), key, maker

    def _exchange(self, client: Any) -> None:
        try:
            self._tombstones.read(client)
        except StoreProblem:
            self._tombstones.read(client)  # it was told again what it had lost
        with self.book.lock:
            pending = list(self.book.pending)
        if pending:
            self._tombstones.add(client, pending)
            self.book.told(pending)

    def _answer(self, effects: list[ForgetChunks], why: str) -> None:
        if why and self.book.unsaved:
            why = f"{why}; {self.book.unsaved}"
        if not why:
            for op in self._postponed:  # what was in the journal was told with this
                self._done(ChunksForgotten(op))
            self._postponed.clear()
        for effect in effects:
            self._done(ChunksForgotten(effect.op, why))
            if why:
                self._postponed.append(effect.op)
