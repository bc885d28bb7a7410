"""Tombstones and packs of the REMOTE store: what is refused, and what is read back as it was written."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.keys import tenant_mark
from kvstore.tiers.remote import packs, tombstones
from kvstore.tiers.remote.records import Description
from kvstore.tiers.remote.redis_store import one_host
from kvstore.tiers.remote.tombstones import Tombstones
from kvstore.types import ChunkKey

NONE = ChunkKey(b"")
RECORD = Description(b"n" * 32, ChunkKey(b"k"), 0, 1, 64, False, (b"m" * 16,), 8, 1, generation=4)


@pytest.mark.parametrize(
    "forgotten", [(b"n" * 32, ChunkKey(b"k"), b""), (b"n" * 32, NONE, b""), (b"", NONE, b"m" * 16)]
)
def test_what_was_written_before_a_forget_is_refused_and_what_came_after_is_not(
    forgotten: tombstones.Forgotten,
) -> None:
    known = Tombstones()
    known.add(forgotten, 5)
    assert known.refuses(RECORD) and known.refuses(replace(RECORD, generation=0))
    assert not known.refuses(replace(RECORD, generation=5))
    others = replace(RECORD, namespace=b"o" * 32, makers=())
    assert not known.refuses(others)
    known.add(forgotten, 3)  # told again of what it knew: nothing is forgotten less
    assert known.refuses(RECORD)


def test_a_quarantine_is_of_one_tenant_alone() -> None:
    alice, bob = tenant_mark("alice"), tenant_mark("bob")
    known = Tombstones()
    known.add((b"", ChunkKey(alice), b"m" * 16), 5)
    mine = replace(RECORD, makers=(b"m" * 16, b"o" * 16, alice))
    assert "quarantined" in known.refuses(mine)
    assert not known.refuses(replace(mine, generation=5))
    assert not known.refuses(replace(mine, makers=(b"m" * 16, bob)))
    assert not known.refuses(replace(mine, makers=(b"o" * 16, alice)))
    assert not known.refuses(RECORD), "it does not say whose it is"


FORGOTTEN = st.tuples(
    st.sampled_from([b"", b"n" * 32]), st.binary(max_size=64).map(ChunkKey), st.sampled_from([b"", b"m" * 16])
)


@settings(deadline=None, max_examples=50)
@given(
    st.dictionaries(FORGOTTEN, st.integers(1, 99), max_size=8), st.lists(FORGOTTEN, max_size=4, unique=True)
)
def test_tombstones_are_read_back(
    at: dict[tombstones.Forgotten, int], pending: list[tombstones.Forgotten]
) -> None:
    known = Tombstones(100, head="abc")
    for forgotten, count in at.items():
        known.add(forgotten, count)
    packed = tombstones.pack(known)
    assert tombstones.unpack(packed) == known
    assert all(tombstones.unpack(packed[:length]) != known for length in range(len(packed)))
    journal = tombstones.Journal(known, dict.fromkeys(pending))
    for one in (*at, *pending):
        journal.note(one)
    lines = tombstones.to_lines(journal)
    assert tombstones.from_lines(lines) == journal
    cut = tombstones.from_lines(lines[: len(lines) // 2])  # a crash in the middle of it
    assert cut.tombstones.at.items() <= known.at.items()


def test_packs_are_read_back_and_a_damaged_one_is_none() -> None:
    wanted = [
        (ChunkKey(b"key %d" % number), shard, 100 + number) for number in range(5) for shard in range(2)
    ]
    head, placed = packs.header(wanted)
    assert packs.read_header(head + b"records") == placed
    assert [(piece.key, piece.shard, piece.length) for piece in placed] == wanted
    assert placed[0].start == len(head) and placed[1].start == len(head) + 100
    for at in range(len(head)):
        assert packs.read_header(head[:at] + bytes([head[at] ^ 1]) + head[at + 1 :]) is None
        assert packs.read_header(head[:at]) is None


def test_a_chain_is_cut_by_its_keys_alone() -> None:
    """Whoever has a part of the chain finds the same ends of packs in it."""
    keys = [ChunkKey(b"chunk %d" % number) for number in range(400)]
    parents = [NONE, *keys[:-1]]
    runs = packs.runs(keys, parents, 1)
    assert [number for run in runs for number in run] == list(range(400))
    cuts = {run[-1] for run in runs if packs.ends_pack(keys[run[-1]])}
    assert 25 <= len(cuts) <= 100
    later = packs.runs(keys[100:], parents[100:], 1)
    assert {run[-1] + 100 for run in later} >= {cut for cut in cuts if cut >= 132}
    broken = packs.runs(keys[:4], [NONE, keys[0], NONE, keys[2]], 1)
    assert all(run.start != 1 or run.stop == 2 for run in broken) and 1 in {run[-1] for run in broken}


def test_a_url_may_name_several_nodes_of_a_cluster() -> None:
    assert one_host("redis+cluster://u:p@a:1,b:2,c:3/") == ("redis+cluster://u:p@a:1/", [("b", 2), ("c", 3)])
    assert one_host("redis://a:1/0") == ("redis://a:1/0", [])
    for wrong in ("redis://a:1,b:2", "redis+cluster://a:1,b"):
        with pytest.raises(ValueError, match=r"cluster|host:port"):
            one_host(wrong)
