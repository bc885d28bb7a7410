"""What the policy learned survives a restart, and a file that is none of ours harms nothing."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.config import LEARNED_FILE
from kvstore.core.policies import ages
from kvstore.core.policies.ages import BUCKETS, Book
from kvstore.core.policies.expected import Expected
from kvstore.server import learned as learned_file
from kvstore.server.learned import LearnedFile
from kvstore.sim.world import PAGE, World, chain, spec

KIND = ages.NAMES.index("second turn, under 2k tokens")


def taught() -> Book:
    """All of one kind come back after 10 s, those of another never do."""
    book = Book(lives_min=100)
    for now in range(0, 100_000, 100):
        book.begin(KIND, now, 2)
        book.begin(ages.PART, now, 2)
        if now >= 10_000:
            book.end(KIND, now - 10_000, now, 2)
        book.refresh(now)
    return book


def test_a_book_that_recalls_knows_at_once() -> None:
    old, new = taught(), Book(lives_min=100)
    new.recall(json.loads(json.dumps(old.learned())))
    assert new.refresh(0) and new.knows
    young = ages.bucket_of(8_000)
    assert new.worth[KIND][young] > 10 * new.worth[ages.PART][young]
    assert new.worth[KIND][young] == pytest.approx(old.worth[KIND][young], rel=0.5)


def test_what_is_recalled_counts_half() -> None:
    old, new = taught(), Book(lives_min=100)
    new.recall(old.learned())
    ended, _ = old.learned()[ages.NAMES[KIND]]
    again, _ = new.learned()[ages.NAMES[KIND]]
    assert again == [count / 2 for count in ended] and any(again)


def test_a_kind_that_nobody_knows_any_more_is_left_out() -> None:
    book = Book()
    book.recall({"chunks of last year's code": ([1.0] * BUCKETS, [2.0] * BUCKETS)})
    assert not book.learned() and not book.lives


@pytest.mark.parametrize(
    "counts",
    [
        ([1.0], [1.0]),
        ([-1.0] * BUCKETS, [0.0] * BUCKETS),
        ([float("inf")] * BUCKETS, [0.0] * BUCKETS),
        ([float("nan")] * BUCKETS, [0.0] * BUCKETS),
        ([1e30] * BUCKETS, [0.0] * BUCKETS),
    ],
    ids=["few", "negative", "infinite", "none", "huge"],
)
def test_counts_that_cannot_be_are_refused_whole(counts: tuple[list[float], list[float]]) -> None:
    book = taught()
    before = book.learned()
    with pytest.raises(ValueError, match="turn"):
        book.recall({ages.NAMES[ages.PART]: ([1.0] * BUCKETS, [1.0] * BUCKETS), ages.NAMES[KIND]: counts})
    assert book.learned() == before


def policy_of(world: World) -> Expected:
    policy = world.store.state.policy
    assert isinstance(policy, Expected)
    return policy


def used_world() -> World:
    world = World(segments=4, segment_bytes=16 * PAGE, lives_min=20)
    worker = world.join()
    namespace = world.open(spec(), worker)
    for number in range(20):
        keys = chain(f"chain {number % 4}", 4)
        got = world.acquire(worker, namespace, keys)
        if got.lease:
            world.release(worker, got.lease)
        else:
            world.commit(worker, world.reserve(worker, namespace, keys))
        world.tick(1_000)
    return world


def test_tenants_begin_where_they_left_off(tmp_path: Path) -> None:
    world = used_world()
    learned = policy_of(world).learned()
    assert learned
    asyncio.run(LearnedFile(str(tmp_path), "expected").save(learned))
    after = World(segments=4, segment_bytes=16 * PAGE, lives_min=20)
    LearnedFile(str(tmp_path), "expected").load(policy_of(after).recall)
    assert policy_of(after).learned().keys() == learned.keys(), (
        "a tenant that has not come yet is not forgotten"
    )
    after.open(spec(), after.join())
    book = policy_of(after).books[0]
    assert book.lives > 20 and book.refresh(0)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[]", b"\xff\xfe", b'{"kvstored_learned": 2}', b"[" * 100_000,
        b'{"kvstored_learned": 1, "policy": "expected", "tenants": []}',
        b'{"kvstored_learned": 1, "policy": "expected", "tenants": {"a": {"unknown": [1, 2]}}}',
        b'{"kvstored_learned": 1, "policy": "expected", "tenants": {"a": 3}}',
    ],
)  # fmt: skip
def test_a_file_that_is_none_is_told_and_left_out(
    tmp_path: Path, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / LEARNED_FILE).write_bytes(text)
    policy = policy_of(World(segments=1, segment_bytes=16 * PAGE))
    LearnedFile(str(tmp_path), "expected").load(policy.recall)
    assert "cannot be read" in caplog.text
    assert not policy.learned()


def test_what_another_policy_learned_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(LearnedFile(str(tmp_path), "other").save({"a": 1}))
    policy = policy_of(World(segments=1, segment_bytes=16 * PAGE))
    LearnedFile(str(tmp_path), "expected").load(policy.recall)
    assert not policy.learned() and not caplog.text


def test_a_folder_that_cannot_be_written_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = LearnedFile(str(tmp_path / "nowhere"), "expected")
    for _ in range(3):
        asyncio.run(file.save({"a": {"unknown": [[1.0] * BUCKETS, [0.0] * BUCKETS]}}))
    assert caplog.text.count("cannot be written down") == 1


@settings(deadline=None, max_examples=50)
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
        lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=9), each, max_size=3),
        max_leaves=8,
    )
)
def test_nothing_that_a_file_may_say_is_taken_for_counts(value: object) -> None:
    policy = policy_of(World(segments=1, segment_bytes=16 * PAGE))
    try:
        policy.recall({"tenant": value})
    except ValueError:
        return
    known = policy.learned().get("tenant", {})
    assert isinstance(known, dict)
    assert all(len(counts) == 2 for counts in known.values())


def test_another_daemons_directory_is_left_alone(tmp_path: Path) -> None:
    file = LearnedFile(str(tmp_path), "expected", is_ours=lambda: False)
    asyncio.run(file.save({"a": 1}))
    assert not list(tmp_path.iterdir())


def test_a_disk_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, reached, real = threading.Event(), threading.Event(), os.fsync

    def hang(fd: int) -> None:
        reached.set()
        assert gate.wait(60)
        real(fd)

    monkeypatch.setattr(os, "fsync", hang)
    monkeypatch.setattr(learned_file, "SAVE_MAX_S", 0.1)
    file = LearnedFile(str(tmp_path), "expected")
    asyncio.run(file.save({"a": 1}))  # comes back, and the loop ends
    assert reached.wait(60)
    asyncio.run(file.save({"a": 2}))
    writing = file._thread
    assert writing is not None and writing.is_alive(), "no second one while the first hangs"
    gate.set()
    writing.join(60)
    assert json.loads((tmp_path / LEARNED_FILE).read_text())["tenants"] == {"a": 1}
