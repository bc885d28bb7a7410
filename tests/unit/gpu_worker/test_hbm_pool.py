"""The paged pool beside a plain record of who holds what."""

from __future__ import annotations

import random

import pytest
import torch

from kvstore.gpu_worker.hbm_pool import HbmPool
from kvstore.gpu_worker.layout import Geometry
from kvstore.types import ChunkKey

GEOMETRY = Geometry(layers=2, heads=2, head_dim=4, dtype=torch.float32, chunk_tokens=16)


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(4, "little"))


@pytest.mark.parametrize("seed", range(5))
def test_chunks_are_conserved_whatever_comes(seed: int) -> None:
    choose = random.Random(seed)
    pool = HbmPool(GEOMETRY, 12, retain=False)
    held: list[list[int]] = []
    tree: dict[ChunkKey, int] = {}
    most = 0
    for _ in range(300):
        match choose.choice(["take", "take", "adopt", "publish", "drop"]):
            case "take":
                count, free = choose.randrange(6), pool.available
                taken = pool.take(count)
                assert (taken is None) == (count > free)
                if taken is not None:
                    assert len(set(taken)) == count
                    held.append(taken)
            case "adopt":
                wanted = [key(choose.randrange(8)) for _ in range(3)]
                found = pool.find(wanted)
                expected = [tree.get(one) for one in wanted]
                assert found == expected[: expected.index(None) if None in expected else 3]
                pool.hold(found)
                held.append(found)
            case "publish" if any(held):
                chunk = choose.choice([chunk for chunks in held for chunk in chunks])
                name = key(choose.randrange(8))
                if chunk not in tree.values():
                    pool.publish(chunk, name)
                    tree.setdefault(name, chunk)
            case "drop" if held:
                pool.drop(held.pop(choose.randrange(len(held))))
                used = {chunk for chunks in held for chunk in chunks}
                tree = {name: chunk for name, chunk in tree.items() if chunk in used}
        pool.check_integrity(held)
        used = {chunk for chunks in held for chunk in chunks}
        most = max(most, len(used))
        assert pool.used == len(used) and pool.peak_chunks == most
    for chunks in held:
        pool.drop(chunks)
    pool.check_integrity([])
    assert pool.available == 12 and pool.find([key(number) for number in range(8)]) == []


def test_memory_that_is_not_needed_is_not_touched() -> None:
    pool = HbmPool(GEOMETRY, 8)
    first = pool.take(3)
    assert first == [0, 1, 2]
    pool.drop([1])
    assert pool.take(2) == [1, 3]


def test_what_it_says_of_itself() -> None:
    pool = HbmPool(GEOMETRY, 8)
    assert [list(layer.shape) for layer in pool.layers] == [[8, 2, 2, 16, 4]] * 2
    assert pool.take(3)
    pool.publish(0, key(1))
    assert repr(pool) == "HbmPool(3/8 chunks in use, 0 idle, 1 in the tree)"
    assert pool.peak_bytes == 3 * 2 * 2 * 2 * 16 * 4 * 4
    with pytest.raises(ValueError, match="chunks is 0"):
        HbmPool(GEOMETRY, 0)


# ------------------------------------------------------------------------------------------------------- the HBM tier


def chain(pool: HbmPool, *numbers: int) -> list[int]:
    """Chunks of a sequence that is computed and still held, under these keys."""
    taken = pool.take(len(numbers))
    assert taken is not None
    for chunk, number in zip(taken, numbers, strict=True):
        pool.publish(chunk, key(number))
    return taken


def known(pool: HbmPool, numbers: range) -> list[int]:
    return [number for number in numbers if pool.find([key(number)])]


def test_chunks_that_nobody_holds_stay_until_room_is_needed() -> None:
    pool = HbmPool(GEOMETRY, 6)
    first, second = chain(pool, 1, 2), chain(pool, 3, 4)
    pool.drop(first)
    pool.drop(second)
    assert (pool.used, pool.idle, pool.available) == (0, 4, 6)
    found = pool.find([key(1), key(2)])
    assert found == first
    pool.hold(found)
    pool.drop(found)  # used last
    assert pool.take(2) and known(pool, range(1, 5)) == [1, 2, 3, 4], "free ones go first"
    assert pool.take(1) and known(pool, range(1, 5)) == [1, 2, 3], "least recently used, and its end first"
    assert pool.take(1) and known(pool, range(1, 5)) == [1, 2]
    assert pool.take(3) is None and known(pool, range(1, 5)) == [1, 2], "refused: nothing has changed"
    assert pool.take(2) and known(pool, range(1, 5)) == [] and pool.evicted == 4


def test_what_a_job_needs_goes_last_and_the_latest_job_first() -> None:
    pool = HbmPool(GEOMETRY, 6)
    for number in range(1, 7):
        (chunk,) = chain(pool, number)
        pool.mark_stored(chunk, key(100 + number))
        pool.drop([chunk])
    pool.rank({key(101): 0, key(102): 2, key(103): 1, key(999): 0})
    gone = []
    for _ in range(6):
        before = known(pool, range(1, 7))
        assert pool.take(1)
        gone += [number for number in before if number not in known(pool, range(1, 7))]
    assert gone == [4, 5, 6, 2, 3, 1]
    assert pool.resident(9) == []


def test_ranks_that_end_leave_recency() -> None:
    pool = HbmPool(GEOMETRY, 3)
    for number in (1, 2):
        (chunk,) = chain(pool, number)
        pool.mark_stored(chunk, key(100 + number))
        pool.drop([chunk])
    pool.rank({key(101): 0})
    assert pool.resident(9) == [key(101), key(102)]
    pool.rank({})
    pool.check_integrity([])
    (held,) = pool.find([key(1)])
    pool.hold([held])
    pool.rank({key(101): 0})
    pool.drop([held])  # a rank counts also for what was held when it came
    assert pool.take(2) and known(pool, range(1, 3)) == [1]


def test_a_tail_goes_to_one_taker_whose_tokens_go_on_from_it() -> None:
    pool = HbmPool(GEOMETRY, 6)
    short, long = chain(pool, 1), chain(pool, 2)
    tails = [pool.take(1), pool.take(1)]
    for taken, tokens in zip(tails, ([5, 6], [5, 6, 7]), strict=True):
        assert taken is not None
        pool.leave_tail(taken[0], key(1), tokens)
    pool.check_integrity([short, long])
    for parent, tokens in ((key(2), [5, 6, 7, 8]), (key(1), [5]), (key(1), [5, 6]), (key(1), [6, 6, 7, 8])):
        assert pool.take_tail(parent, tokens) is None and not pool.tail_tokens(parent, tokens)
    assert pool.take_tail(key(1), [5, 6, 7, 8]) == (tails[1][0], 3), "the longest"
    assert pool.take_tail(key(1), [5, 6, 7, 8]) == (tails[0][0], 2)
    assert pool.take_tail(key(1), [5, 6, 7, 8]) is None, "each goes to one taker"
    pool.check_integrity([short, long, *tails])
    for taken in tails:
        pool.leave_tail(taken[0], key(1), [9])  # the same twice: one is enough
    pool.check_integrity([short, long])
    assert pool.idle == 1 and pool.take(4) and not pool.tail_tokens(key(1), [9, 9])


def test_forgetting_frees_what_is_idle_and_keeps_what_is_held() -> None:
    pool = HbmPool(GEOMETRY, 6)
    idle, held = chain(pool, 1), chain(pool, 2)
    pool.mark_stored(idle[0], key(101))
    pool.drop(idle)
    pool.rank({key(101): 0})
    pool.forget()
    assert known(pool, range(1, 3)) == [] and (pool.used, pool.idle) == (1, 0)
    pool.check_integrity([held])
    pool.drop(held)
    assert pool.available == 6 and pool.resident(9) == []


@pytest.mark.parametrize("seed", range(5))
def test_the_tier_keeps_its_books_whatever_comes(seed: int) -> None:
    choose = random.Random(seed)
    pool = HbmPool(GEOMETRY, 10)
    held: list[list[int]] = []
    for _ in range(400):
        match choose.choice(
            ["take", "take", "adopt", "publish", "drop", "tail", "take tail", "rank", "mark"]
        ):
            case "take":
                count, most = choose.randrange(5), pool.available
                taken = pool.take(count)
                assert (taken is None) == (count > most)
                held += [taken] if taken else []
            case "adopt":
                found = pool.find([key(choose.randrange(6)) for _ in range(2)])
                pool.hold(found)
                held.append(found)
            case "publish" if any(held):
                chunk = choose.choice([chunk for chunks in held for chunk in chunks])
                if chunk not in pool._keys:
                    pool.publish(chunk, key(choose.randrange(6)))
            case "drop" if held:
                pool.drop(held.pop(choose.randrange(len(held))))
            case "tail" if held:
                chunks = held.pop(choose.randrange(len(held)))
                last = chunks.pop() if chunks else None
                if last is not None and pool._holders[last] == 1 and last not in pool._keys:
                    tokens = [choose.randrange(2) for _ in range(choose.randrange(1, 4))]
                    pool.leave_tail(last, key(choose.randrange(3)), tokens)
                elif last is not None:
                    chunks.append(last)
                held.append(chunks)
            case "take tail":
                wanted = [choose.randrange(2) for _ in range(4)]
                if (tail := pool.take_tail(key(choose.randrange(3)), wanted)) is not None:
                    held.append([tail[0]])
            case "rank":
                pool.rank({key(choose.randrange(6)): rank for rank in range(choose.randrange(4))})
            case "mark" if any(held):
                chunk = choose.choice([chunk for chunks in held for chunk in chunks])
                pool.mark_stored(chunk, key(choose.randrange(6)))
        pool.check_integrity(held)
    for chunks in held:
        pool.drop(chunks)
    pool.check_integrity([])
    assert pool.take(10) and pool._tree == {} and pool.resident(9) == []


def test_of_many_resident_chunks_those_are_named_whose_rank_matters() -> None:
    pool = HbmPool(GEOMETRY, 6)
    for number in range(6):
        (chunk,) = pool.take(1)
        pool.publish(chunk, key(number))
        pool.mark_stored(chunk, key(100 + number))
        if number != 1:
            pool.drop([chunk])
    pool.rank({key(104): 0})
    assert pool.resident(6) == [key(100 + number) for number in (4, 0, 2, 3, 5, 1)]
    assert pool.resident(3) == [key(100 + number) for number in (4, 0, 2)]
