"""The directory in shared memory: what is published is found, whole, and what is not is not."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import directory
from kvstore.types import ChunkKey

BOOT = bytes(range(16))


def made(*, rows: int = 4096, shards: int = 1, buckets: int = 64) -> tuple[directory.Writer, directory.View]:
    most = max(buckets, directory.buckets_for(rows))
    array = np.zeros(directory.size_bytes(shards, rows, most), np.uint8)
    writer = directory.Writer(
        array, shards=shards, rows=rows, buckets_max=most, buckets=buckets, boot_id=BOOT
    )
    return writer, directory.View(array, BOOT)


def key_of(number: int) -> ChunkKey:
    """Of 32 bytes, or others."""
    size = 32 if number % 3 else 5 + number % 40
    return ChunkKey(random.Random(number).randbytes(size))


def publish(writer: directory.Writer, numbers: Sequence[int], state: int = directory.HIT) -> None:
    keys = [key_of(number) for number in numbers]
    width = directory.SHARD_WORDS * writer.shards
    places = np.array([[number * 100 + n for n in range(width)] for number in numbers], np.uint64)
    writer.publish(
        numbers,
        keys,
        state,
        [number % 64 + 1 for number in numbers],
        places if state == directory.HIT else [],
    )


def found(view: directory.View, numbers: Sequence[int]) -> directory.Found:
    it = view.look_up([key_of(number) for number in numbers])
    assert it is not None
    return it


@pytest.mark.parametrize("shards", [1, 3])
def test_one_by_one_and_many_at_once_find_the_same(shards: int) -> None:
    writer, view = made(shards=shards)
    for start in range(0, 2000, 50):
        publish(writer, range(start, start + 50))
    publish(writer, range(500, 600), directory.ON_SSD)
    writer.unpublish(range(700, 720))
    numbers = list(range(490, 760)) + list(range(5000, 5100))
    together = found(view, numbers)
    each = [found(view, [number]) for number in numbers]
    assert together.states == b"".join(one.states for one in each)
    assert together.states[:10] == b"\1" * 10 and together.states[10:110] == b"\2" * 100
    assert together.states[210:230] == bytes(20) and together.states[-100:] == bytes(100)
    assert together.numbers == [one.numbers[0] for one in each]
    assert together.tokens() == [one.tokens()[0] for one in each]
    assert (together.hits, together.usable) == (10, 210)
    there = [index for index, state in enumerate(together.states) if state == directory.HIT]
    assert together.tags(there) == [each[index].tags([0])[0] for index in there]
    assert together.firsts(there) == [each[index].firsts([0])[0] for index in there]
    for index, words in zip(there, together.words(there).tolist(), strict=True):
        assert words == list(each[index].words_of_one()) == each[index].words([0])[0].tolist()
        width = directory.SHARD_WORDS * shards
        assert words[directory.ROW_WORDS :] == [numbers[index] * 100 + n for n in range(width)]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 60), st.booleans(), st.booleans()), max_size=120), st.integers(0, 5))
def test_it_is_a_dictionary(steps: list[tuple[int, bool, bool]], spare: int) -> None:
    """In one bucket too few, where keys stand in others' buckets or find no room; rows are used again."""
    writer, view = made(rows=64, buckets=1 << spare)
    told: dict[int, tuple[int, int]] = {}
    free = list(range(64))
    for number, there, cold in steps:
        state = directory.ON_SSD if cold else directory.HIT
        if there:
            row = told[number][0] if number in told else free.pop()
            told[number] = (row, state)
            places = [] if cold else np.array([[number, 2, 3]], np.uint64)
            writer.publish([row], [key_of(number)], state, [7], places)
        elif number in told:
            row, _ = told.pop(number)
            free.append(row)
            writer.unpublish([row])
        assert writer.count == len(told) == len(writer.entries())
    for number in range(61):
        one = view.look_up([key_of(number)])
        if one is None:  # the daemon knows
            assert writer._homeless
            continue
        row, state = told.get(number, (-1, 0))
        assert (one.numbers, one.states) == ([row], bytes([state])), number


def test_it_grows_and_readers_ask_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, view = made(rows=4096, buckets=2)
    asked = []
    put_in_many = directory.Writer._put_in_many

    def look(self: directory.Writer, *args: object) -> None:
        asked.append(view.look_up([key_of(1)]))
        put_in_many(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(directory.Writer, "_put_in_many", look)
    for number in range(0, 600, 3):
        publish(writer, range(number, number + 3))
    assert view.buckets_in_use == 256
    assert asked and not any(asked)
    assert found(view, range(600)).usable == 600


def test_the_digest_of_a_key_is_not_that_key() -> None:
    writer, view = made()
    long = ChunkKey(b"k" * 36)
    writer.publish([3], [long], directory.HIT, [1], np.ones((1, 3), np.uint64))
    same = ChunkKey(directory.digest(long))
    for others in ((), [key_of(number) for number in range(30)]):
        it = view.look_up([long, same, *others])
        assert it is not None and it.states[:2] == b"\1\0"
    writer.publish([4], [same], directory.HIT, [1], np.ones((1, 3), np.uint64))
    it = view.look_up([long, same])
    assert it is not None and it.numbers == [3, 4]


@pytest.mark.parametrize("count", [1, 40])
def test_a_row_that_is_being_written_is_nobodys(count: int) -> None:
    """The daemon was killed in the middle: the sequence stays odd."""
    writer, view = made()
    publish(writer, range(count))
    writer.word[writer.rows_at] |= 1 << 32
    assert view.look_up([key_of(number) for number in range(count)]) is None
    writer.word[writer.rows_at] ^= 1 << 32
    assert found(view, range(count)).usable == count


@pytest.mark.parametrize("count", [1, 40])
def test_a_row_that_changes_under_the_reader_is_read_again(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at its sequence and that at its words the row becomes another chunk's."""
    writer, view = made()
    publish(writer, range(count))
    fences = 0

    def fence() -> None:
        nonlocal fences
        fences += 1
        if fences == 2:  # after the first look at the sequence
            monkeypatch.setattr(directory, "fence", lambda: None)
            writer.unpublish([0])
            writer.publish([0], [key_of(999)], directory.HIT, [1], np.full((1, 3), 77, np.uint64))

    monkeypatch.setattr(directory, "fence", fence)
    it = view.look_up([key_of(number) for number in range(count)])
    assert it is None or it.states[0] == 0
    assert found(view, [999]).words_of_one()[directory.ROW_WORDS] == 77


def test_closed_is_for_nobody() -> None:
    writer, view = made()
    publish(writer, range(3))
    writer.close(True)
    assert view.closed and view.look_up([key_of(1)]) is None
    writer.close(False)
    assert found(view, range(3)).hits == 3


def test_whose_bytes_these_are() -> None:
    writer, _ = made()
    array = np.zeros(8192, np.uint8)
    with pytest.raises(ValueError, match="not a directory"):
        directory.View(array, BOOT)
    with pytest.raises(ValueError, match="at least"):
        directory.View(array[:100], BOOT)
    with pytest.raises(ValueError, match="another start"):
        directory.View(writer.header.view(np.uint8), bytes(16))
    with pytest.raises(ValueError, match="cannot have"):
        directory.View(writer.header.view(np.uint8), BOOT)


def test_byte_for_byte() -> None:
    """As docs/formats.md has it: other programs read it."""
    writer, _ = made(rows=8, buckets=4)
    key = ChunkKey(bytes(range(32)))
    writer.publish([2], [key], directory.HIT, [64], np.array([[5 << 32 | 6, 9, 0xABCD]], np.uint64))
    raw = writer.word.tobytes()
    golden = "4b56444952454354 01000000 01000000 0800000000000000 0400000000000000" + BOOT.hex()
    assert raw[:48].hex() == golden.replace(" ", "")
    assert raw[192:200] == (4).to_bytes(8, "little")
    hashed = directory.hash_of(key)
    assert hashed == 0xB61AA9A595AD090
    bucket = 4096 + 64 * (hashed % 4)
    assert raw[bucket : bucket + 8] == (hashed >> 32 << 32 | 3).to_bytes(8, "little")
    row = 4096 + 64 * 4 + 64 * 2
    words = [raw[row + 8 * n : row + 8 * n + 8].hex() for n in range(8)]
    assert words[0] == "40000001" + "02000000"
    assert "".join(words[1:5]) == key.hex()
    assert words[5:] == ["0600000005000000", "0900000000000000", "cdab000000000000"]
