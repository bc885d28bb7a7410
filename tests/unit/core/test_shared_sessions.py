"""What the core tells other nodes of sessions, what it asks of them, and what it makes of the answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.core.remote import sessions as shared
from kvstore.keys import tenant_mark
from kvstore.sim.remote_world import RemoteWorld
from kvstore.sim.world import PAGE, chain, spec
from kvstore.types import ChunkKey, HintResult, NamespaceId, WorkerId

KEYS = chain("k", 4)
NAME = b"talk"


class Node(RemoteWorld):
    def __init__(self, **limits: Any) -> None:
        defaults: dict[str, Any] = {
            "segments": 2,
            "segment_bytes": 16 * PAGE,
            "reserve_share_max": 1.0,
            "sessions_told": "remote",
        }
        super().__init__(**{**defaults, **limits})
        self.worker: WorkerId = self.join()
        self.space: NamespaceId = self.open(spec(), self.worker)
        self.writes: list[ev.ShareSessions] = []

    def _perform_op(self, effect: Any, *, fails: str = "", spoil: int = 0) -> None:
        if isinstance(effect, ev.ShareSessions):
            self.writes.append(effect)
            self.sessions.emitted(effect, self.store)
        super()._perform_op(effect, fails=fails, spoil=spoil)

    def say(self, keys: Any = KEYS, name: bytes = NAME) -> None:
        if not all(key in self.store.state.namespaces[self.space].index for key in keys):
            self.save(self.worker, self.space, keys)
        session = self.store.state.sessions.by_name.get((self.space, name))
        version, kept = (session.version, len(session.manifest)) if session is not None else (0, 0)
        self.append(self.worker, self.space, name, keys, version=version, keep=kept)

    def wait(self, ms: int = 1_000) -> None:
        for _ in range(ms // 100):
            self.tick(100)

    @property
    def place(self) -> tuple[bytes, bytes, bytes]:
        namespace = self.store.state.namespaces[self.space]
        return namespace.salt, tenant_mark(namespace.tenant), NAME

    def another_tells(self, keys: Any, count: int = 1, version: int = 7) -> None:
        self.sessions.there[self.place] = ev.SharedManifest(
            b"other %d" % version, count, "b", version, tuple(keys), (64,) * len(keys)
        )

    @property
    def told(self) -> ev.SharedManifest | None:
        return self.sessions.there.get(self.place)

    def find(self, name: bytes = NAME) -> Any:
        return self.ask(ev.GetSession, self.worker, self.space, name, elsewhere=True)


def test_what_changed_is_told_once_and_so_many_a_second() -> None:
    node = Node(sessions_told_per_s=10)
    for number in range(30):
        node.say(KEYS[:1] if number else KEYS, name=b"talk %d" % number)
    node.wait(1_000)
    told = sum(len(write.sessions) for write in node.writes)
    assert 8 <= told <= 12, told
    node.wait(4_000)
    assert sum(len(write.sessions) for write in node.writes) == 30


def test_a_newer_manifest_of_another_node_stays() -> None:
    node = Node()
    node.another_tells((*KEYS[:2], ChunkKey(b"of b")))
    node.say(KEYS[:2])
    node.wait()
    assert node.told is not None and node.told.node == "b"
    assert node.counters["sessions_newer_elsewhere"] == 1
    node.say(KEYS[2:3])  # what its workers do from now on is newer
    node.wait()
    assert node.told.node == "a" and node.told.keys == KEYS[:3]


def test_who_goes_on_where_the_other_ended_loses_nothing_of_it() -> None:
    node = Node()
    node.another_tells(KEYS[:2])
    node.say(KEYS)
    node.wait()
    assert node.told is not None and (node.told.node, node.told.keys) == ("a", KEYS)


def test_what_is_not_exact_is_told_no_more() -> None:
    node = Node()
    node.say(KEYS)
    node.wait()
    assert node.told is not None and node.told.keys == KEYS
    info = node.ask(ev.GetSession, node.worker, node.space, NAME)
    node.ask(ev.Truncate, node.worker, node.space, NAME, info.version, 0, info.entries[0].token_count, False)
    node.wait()
    assert node.told is not None and node.told.keys == ()
    other = Node()
    other.save(other.worker, other.space, KEYS)
    other.ask(
        ev.UpdateSession,
        *(other.worker, other.space, NAME, 0, 0),
        (ev.SessionEntry(KEYS[0], 64, spec().chunk_tokens, 0, True),),
    )
    other.wait()
    assert other.told is None and not other.writes, "what never was exact is not told at all"


def test_a_forgotten_session_is_told_no_more_whoever_went_on_with_it() -> None:
    node = Node()
    node.say(KEYS)
    node.wait()
    node.another_tells((*KEYS, ChunkKey(b"of b")), count=5)
    node.ask(ev.Forget, node.worker, node.space, NAME, ())
    node.wait()
    assert node.told is not None and node.told.keys == ()


def test_sessions_that_make_room_stay_told_until_too_many_are() -> None:
    node = Node(sessions_told_max=2)
    for number in range(4):
        node.say(KEYS if not number else KEYS[:1], name=b"talk %d" % number)
        node.wait(300)
    node.wait()
    names = sorted(name for *_, name in node.sessions.there)
    assert names == [b"talk 2", b"talk 3"]


def test_a_hint_brings_what_another_node_told() -> None:
    node = Node()
    node.put_elsewhere(node.space, KEYS)
    node.another_tells(KEYS)
    accepted = node.ask(ev.PublishQueue, node.worker, node.space, (ev.Hint(b"j", 0, NAME, ()),))
    assert accepted.results[0] is not HintResult.REJECTED
    node.wait()
    state = node.store.state
    index = state.namespaces[node.space].index
    assert all(state.is_hit(index[key]) for key in KEYS)
    assert {state.chunks.key[row] for row in state.policy.rank} == set(KEYS), "they are needed"
    assert (node.space, NAME) not in state.sessions.by_name


def test_a_hint_for_what_nobody_knows_is_refused_once_that_is_known() -> None:
    node = Node()
    hint = (ev.Hint(b"j", 0, b"nobody's", ()),)
    node.ask(ev.PublishQueue, node.worker, node.space, hint)
    node.wait(200)
    again = (ev.Hint(b"another", 0, b"nobody's", ()),)
    assert node.ask(ev.PublishQueue, node.worker, node.space, again).results[0] is HintResult.REJECTED


def test_only_who_asks_for_it_waits_and_not_for_long() -> None:
    node = Node(lookup_wait_ms=200)
    node.another_tells(KEYS)
    assert node.find().elsewhere.keys == KEYS
    assert node.ask(ev.GetSession, node.worker, node.space, NAME).elsewhere is None
    node.hold = {ev.LookUpSessions}
    assert node.ask(ev.GetSession, node.worker, node.space, b"other", elsewhere=True, request_id=77) is None
    node.wait(500)
    answer: Any = node.answers[node.worker, 77]
    assert answer.version == 0 and answer.elsewhere is None


@pytest.mark.parametrize("how", ["fails", "late"])
def test_a_source_that_fails_is_left_alone_and_told_when_it_is_back(how: str) -> None:
    node = Node(source_pause_ms=1_000)
    node.hold = {ev.ShareSessions}
    node.say(KEYS)
    node.wait(300)
    if how == "late":
        node.wait(shared.DEADLINE_MS)
        before = len(node.writes)
    else:
        for _ in range(shared.ERRORS_MAX):
            while not node.held:
                node.wait(100)
            node.finish(fails="as told")
        before = len(node.writes)
    node.say(chain("o", 2), name=b"other")
    node.wait(500)
    assert len(node.writes) == before and not node.store.shared_sessions._source.is_well
    node.hold = set()
    while node.held:
        node.finish()
    node.wait(6_000)
    assert node.told is not None and node.told.keys == KEYS
    assert node.store.shared_sessions._source.is_well


def test_without_a_source_nothing_is_told() -> None:
    node = Node(sessions_told="")
    node.say(KEYS)
    node.wait()
    assert not node.writes and not node.store.state.changed_sessions
    assert node.find().version and replace(node.find()).elsewhere is None
