"""The policies of others, on turns whose outcome is known; the core's LRU agrees with theirs."""

import random
from itertools import pairwise

import pytest

from kvstore.errors import BadRequest
from kvstore.replay import Trace, Turn, replay
from kvstore.replay.baselines import BASELINES, baseline


def trace(*chains: tuple[int, ...]) -> Trace:
    made = Trace("made", 64, [Turn(1000 * n, c, 64 * len(c), session=c[0]) for n, c in enumerate(chains)])
    made.note_history()
    return made


def conversations(seed: int, sessions: int = 30, turns: int = 300) -> Trace:
    """Chains that grow by one to three chunks a turn; sessions come back at random, some more than others."""
    chance = random.Random(seed)
    lengths = dict.fromkeys(range(sessions), 0)
    chains = []
    for _ in range(turns):
        session = min(chance.randrange(sessions), chance.randrange(sessions))
        lengths[session] = min(20, lengths[session] + chance.randint(1, 3))
        chains.append(tuple(100 * session + n for n in range(lengths[session])))
    return trace(*chains)


def test_lru_and_fifo_differ_where_they_should() -> None:
    turns = trace((1,), (11,), (1,), (21,), (1,))
    assert baseline(turns, "lru", dram_chunks=2).hits == 2
    assert baseline(turns, "fifo", dram_chunks=2).hits == 1


def test_belady_keeps_what_comes_back_first() -> None:
    turns = trace((1, 2), (11, 12), (21, 22), (1, 2), (11, 12))
    assert baseline(turns, "lru", dram_chunks=4).hits == 0
    assert baseline(turns, "belady", dram_chunks=4).hits == 4
    assert baseline(turns, "belady", dram_chunks=3).hits == 3, "the end of the later chain went"


def test_the_paper_moves_whole_sessions_and_looks_into_the_queue() -> None:
    turns = trace((1, 2), (11, 12), (21, 22), (1, 2), (11, 12))
    blind = baseline(turns, "paper", dram_chunks=4)
    assert blind.hits == 0
    sees = baseline(turns, "paper", dram_chunks=4, look_ahead=3)
    assert sees.hits == 2
    assert sees.returning_hit == 1


def test_the_paper_fetches_ahead() -> None:
    turns = trace((1, 2), (11, 12), (21, 22), (1, 2))
    found = baseline(turns, "paper", dram_chunks=4, ssd_chunks=8, look_ahead=2)
    assert (found.hits_dram, found.hits_ssd) == (2, 0)
    assert baseline(turns, "lru", dram_chunks=4, ssd_chunks=8).hits_ssd == 2


def test_s3_fifo_lets_a_scan_pass() -> None:
    """What was used twice stays, though many that are used once come by."""
    turns = trace((1,), (1,), (1,), *((n,) for n in range(10, 40)), (1,))
    assert baseline(turns, "s3-fifo", dram_chunks=10).hits == 3
    assert baseline(turns, "lru", dram_chunks=10).hits == 2


def test_gdsf_prefers_what_is_used_often() -> None:
    turns = trace((1,), (1,), (1,), (2,), (3,), (4,), (1,))
    assert baseline(turns, "gdsf", dram_chunks=3).hits == 3
    assert baseline(turns, "lru", dram_chunks=3).hits == 2


@pytest.mark.parametrize("seed", range(6))
def test_nothing_beats_belady_and_more_is_never_less(seed: int) -> None:
    turns = conversations(seed)
    for name in BASELINES:
        rates = [
            baseline(turns, name, dram_chunks=size, look_ahead=20).hit_rate for size in (8, 32, 128, 700)
        ]
        best = [baseline(turns, "belady", dram_chunks=size).hit_rate for size in (8, 32, 128, 700)]
        assert all(rate <= most + 1e-9 for rate, most in zip(rates, best, strict=True)), name
        assert rates[-1] == best[-1], f"{name}: everything fits"
    assert all(small <= large for small, large in pairwise(best))


@pytest.mark.parametrize("seed", range(4))
def test_the_core_is_lru_as_lru_is_known(seed: int) -> None:
    """But for the order within a turn: the core's engine lets go of what it found before it saves the rest."""
    turns = conversations(seed)
    for size in (24, 64, 200):
        ours = replay(turns, dram_chunks=size, policy="lru").hit_rate
        assert ours == pytest.approx(baseline(turns, "lru", dram_chunks=size).hit_rate, abs=0.01)


@pytest.mark.parametrize("name", BASELINES)
def test_a_tier_holds_no_more_than_it_can(name: str) -> None:
    turns = conversations(1)
    store = BASELINES[name](turns, 16, 40)
    for number, turn in enumerate(turns):
        store.serve(number, turn, range(number + 1, min(len(turns), number + 20)))
        for shelf in (store.dram, store.ssd):
            assert shelf.used == sum(shelf.sizes.values()) <= shelf.capacity
        assert not store.dram.sizes.keys() & store.ssd.sizes.keys()


def test_an_unknown_one_is_refused() -> None:
    with pytest.raises(BadRequest, match="known: lru"):
        baseline(trace((1,)), "magic", dram_chunks=1)
