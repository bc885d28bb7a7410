"""The simulator's world with another node beside the REMOTE store: its DRAM is read directly, as by `fleet/`.

The other node computes what this one has, in other batches; it hears of forgets late, and gives what it holds with the
count up to which it has heeded them (`fleet/server.py`). What comes is held against what this node knows of the
registry's forgets (`fleet/forgets.py`). The other node is slow, gone, damages what it sends, and forgets by itself:
then it tells the registry and the REMOTE store. What is served of it was made after every forget that was answered
here, or heard of.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.core import events as ev
from kvstore.keys import tenant_mark
from kvstore.tiers.remote import records
from kvstore.tiers.remote.tombstones import Forgotten, Tombstones
from kvstore.types import ChunkKey, DiskResult, Found, NamespaceId, OpId

from .disk import GARBAGE
from .remote_cluster import OTHER_NODE, TROUBLES, WHOLE, Came, RemoteCluster
from .world import CHUNK_TOKENS, tag

PEERS = "peers"
PEER_TROUBLES = (*("",) * 6, "gone", "fails", "flipped")
HELD_SHARE = 0.8
"""Of the chunks that this node asks for, those that the other one has computed, too."""
SPELL_OPS = (10, 40, 160)
"""So many ops beyond this node pass in fair weather or in foul: else sources were left alone for most of a run."""
FOUL_SHARE = 0.4
FORGET_SHARE = 0.04
"""Of the look-ups at the other node: it forgets something then."""


@dataclass(frozen=True, slots=True)
class Held:
    """A chunk in the other node's DRAM."""

    contents: tuple[int, ...]
    token_count: int
    derived: bool
    makers: tuple[bytes, ...]
    made_at: int
    """By the same count as the records' times."""


class FleetCluster(RemoteCluster):
    SOURCES = (PEERS, "remote")
    TROUBLES = tuple(trouble for trouble in TROUBLES if trouble not in ("wiped", "older"))
    """What a store has lost is told again by the node that knew it, which this world has no model of."""

    def __init__(self, listener: Any, chance: random.Random, **limits: Any) -> None:
        self.peer_holds: dict[tuple[bytes, ChunkKey], Held] = {}
        self.heeded = 0
        """Up to which count the other node has dropped what was forgotten."""
        self.registry = Tombstones()
        """What the registry has; what this node has read there, and is about to tell, is in its journal."""
        self._spell, self._foul = 0, False
        self._count_at: dict[OpId, int] = {}
        """What this node knew when it began to fetch."""
        super().__init__(listener, chance, **limits)

    @property
    def known_peers(self) -> Tombstones:
        return self.journals[PEERS].tombstones

    def delay_ms(self, op: Any, chance: random.Random) -> int:
        delay = super().delay_ms(op, chance)
        self._spell -= 1
        if self._spell < 0:
            self._spell, self._foul = self.weather.choice(SPELL_OPS), self.weather.random() < FOUL_SHARE
        if not self._foul:
            delay = min(delay, self._carried_ms + 10)
        if isinstance(op, ev.ForgetChunks) and op.source == PEERS:
            self._postpone(PEERS, op.forgotten)
        if isinstance(op, ev.FetchChunks) and op.source == PEERS:
            self._count_at[op.op] = self.known_peers.count
        return delay

    def _trouble(self, troubles: Sequence[str]) -> str:
        found = super()._trouble(troubles)
        return found if self._foul or self.weather.random() < 0.2 else ""

    # --------------------------------------------------------------------------------------------------- performing

    def _perform_op(self, effect: Any, *, fails: str = "", spoil: int = 0) -> None:
        source = getattr(effect, "source", "")
        mine = isinstance(effect, (ev.LookUpChunks, ev.FetchChunks, ev.ForgetChunks)) and source == PEERS
        if not mine:
            super()._perform_op(effect, fails=fails, spoil=spoil)
            return
        trouble = self._trouble(PEER_TROUBLES)
        if not self.calm and self.weather.random() < 0.3:
            self._other_node_heeds()
        is_look_up = isinstance(effect, ev.LookUpChunks) and effect.namespace in self.store.state.namespaces
        if is_look_up and not self.calm and self.weather.random() < FORGET_SHARE:
            self._other_node_forgets(effect)
        match effect:
            case ev.LookUpChunks():
                self._inbox.append(self._peer_looks_up(effect))
            case ev.FetchChunks():
                self._inbox.append(self._peer_gives(effect, trouble))
            case ev.ForgetChunks():
                self._answer_forget(PEERS, effect.op, self._tell_registry(trouble))
        if self.weather.random() < 0.5:
            self._read_registry()
        if self._news[PEERS] or isinstance(effect, ev.ForgetChunks):
            self._inbox.append(self._tell_news(PEERS))

    def _peer_looks_up(self, effect: ev.LookUpChunks) -> ev.ChunksLookedUp:
        for key in effect.keys:
            if (effect.digest, key) not in self.peer_holds and self.weather.random() < HELD_SHARE:
                self._other_node_computes(effect.namespace, effect.digest, key)
        return ev.ChunksLookedUp(
            effect.op,
            tuple(
                Found(8 * len(held.contents), 1.0, held.token_count)
                if (held := self.peer_holds.get((effect.digest, key))) is not None
                else None
                for key in effect.keys
            ),
        )

    def _other_node_computes(self, namespace: NamespaceId, digest: bytes, key: ChunkKey) -> None:
        """The chunk that a process here would make of this key, which says what it is (`processes.py`)."""
        found = self.store.state.namespaces.get(namespace)  # none: it was asked whether anybody answers
        if found is None:
            return
        _, _, tail = key.partition(b" tail ")
        self._orders += 1
        self.peer_holds[digest, key] = Held(
            tuple(tag((namespace, key, shard), OTHER_NODE) for shard in range(found.shards)),
            int(tail) if tail else CHUNK_TOKENS,
            key.find(b"derived") >= 0,
            (tenant_mark(found.tenant),),
            self._orders,
        )

    def _peer_gives(self, effect: ev.FetchChunks, trouble: str) -> ev.ChunksFetched:
        shards = len(effect.targets) // len(effect.keys)
        chunks = []
        came = self._came[effect.op] = []
        for number, key in enumerate(effect.keys):
            held = self.peer_holds.get((effect.digest, key))
            result = DiskResult.OK
            if held is None or trouble in ("gone", "fails"):
                result = DiskResult.REUSED
            elif trouble == "flipped":
                result = DiskResult.CORRUPT
            elif self._refuses_peer(effect.digest, key, held):
                result = DiskResult.REUSED
            good = held is not None and result is DiskResult.OK
            for shard, target in enumerate(effect.targets[number * shards : (number + 1) * shards]):
                if target.segment in self.memory:
                    self._write(target, held.contents[shard] if held and good else GARBAGE, by=None)
            if held is None or not good:
                chunks.append(ev.FetchedChunk(result, why=f"it is {result.name}"))
                continue
            forgotten = self._forgotten_before(effect.digest, key, held.makers, heard=True, is_peers=True)
            assert held.made_at > forgotten, f"a peer brings back what was forgotten: {key!r}"
            came.append(Came(effect.namespace, key, held.contents, held.makers, held.made_at, True, True))
            chunks.append(ev.FetchedChunk(result, held.contents, held.token_count, held.derived, held.makers))
        return ev.ChunksFetched(effect.op, tuple(chunks), self._count_at.pop(effect.op, 0))

    def _refuses_peer(self, digest: bytes, key: ChunkKey, held: Held) -> bool:
        """As `FleetForgets.refuses`, of what says that its node has heeded so many forgets."""
        makers = tuple(maker.ljust(16) for maker in held.makers)
        description = records.Description(
            digest, key, 0, 1, held.token_count, held.derived, makers, 8, 0, self.heeded, 0
        )
        about: list[Forgotten] = [(digest, key, b""), (digest, WHOLE, b"")]
        about += [(b"", WHOLE, maker) for maker in held.makers]
        return bool(self.known_peers.refuses(description)) or any(
            one in self.journals[PEERS].pending for one in about
        )

    # ------------------------------------------------------------------------------------------------------ forgets

    def _tell_registry(self, trouble: str) -> str:
        if trouble == "fails":
            return "as told"
        self._read_registry()
        count = self.registry.count + 1
        pending = self.journals[PEERS].pending
        for one in pending:
            self.registry.add(one, count)
            self.known_peers.add(one, count)
            self._is_heard_again(PEERS, one)
        pending.clear()
        self.registry.count = self.known_peers.count = count
        self._tell_postponed(PEERS)
        return ""

    def _read_registry(self) -> None:
        self._read_elsewhere(PEERS, self.registry)
        self.known_peers.count = self.registry.count

    def _other_node_forgets(self, effect: ev.LookUpChunks | ev.FetchChunks | ev.StoreChunks) -> None:
        """It tells both, and has dropped what it holds of it before."""
        before = dict(self.told.at)
        super()._other_node_forgets(effect)
        here = sorted(key for number, key in self.platter.chunks if number == effect.namespace)
        for key in self.weather.sample(here, min(len(here), self.weather.choice((0, 1, 4)))):
            self.told.add((effect.digest, key, b""), self.told.count)  # at the count that it has just told of
            self._others_at[effect.digest, key] = self.told.count
            self._others_told_at[effect.digest, key] = self._orders
        count = self.registry.count + 1
        for one, at in self.told.at.items():
            if before.get(one, 0) < at:
                self.registry.add(one, count)
        self.registry.count = count
        self._other_node_heeds()

    def _other_node_heeds(self) -> None:
        for (digest, key), held in list(self.peer_holds.items()):
            about: list[Forgotten] = [(digest, key, b""), (digest, WHOLE, b"")]
            about += [(b"", WHOLE, maker) for maker in held.makers]
            if any(self.registry.at.get(one, 0) > self.heeded for one in about):
                del self.peer_holds[digest, key]
        self.heeded = self.registry.count

    def is_forgotten(self, namespace: NamespaceId, key: ChunkKey) -> bool:
        if super().is_forgotten(namespace, key):
            return True
        found = self.store.state.namespaces[namespace]
        about: list[Forgotten] = [(found.salt, name, b"") for name in (key, WHOLE)]
        return any(one in self.known_peers.at for one in (*about, (b"", WHOLE, tenant_mark(found.tenant))))
