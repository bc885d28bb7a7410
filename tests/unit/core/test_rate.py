"""How fast something comes, and how much of it is asked for at once."""

import pytest

from kvstore.core.rate import AT_FIRST_BYTES, AT_LEAST_BYTES, REMEMBERED_MS, AtOnce, Rate

MIB = 1 << 20


def test_nothing_is_known_before_something_came() -> None:
    rate = Rate()
    assert rate.bytes_per_s == 0
    rate.begin(0)
    assert rate.bytes_per_s == 0


def test_ops_at_one_time_are_one_stream() -> None:
    rate = Rate()
    rate.begin(100)
    rate.begin(100)
    rate.end(1_000, 200, more=True)
    rate.end(1_000, 300, more=False)
    assert rate.bytes_per_s == 10_000, "2,000 bytes in 0.2 s, though each op took 0.1 or 0.2 s"


def test_idle_time_does_not_count() -> None:
    rate = Rate()
    for start in (0, 60_000):
        rate.begin(start)
        rate.end(500, start + 50, more=False)
    assert rate.bytes_per_s == 10_000


def test_time_in_which_nothing_came_counts() -> None:
    rate = Rate()
    rate.begin(0)
    rate.end(1_000, 100, more=False)
    rate.begin(100)
    rate.end(0, 1_000, more=False)
    assert rate.bytes_per_s == 1_000


def test_the_recent_counts_more() -> None:
    rate = Rate()
    now = 0
    for size in (1_000_000,) * 50 + (10_000,) * 50:
        rate.begin(now)
        now += REMEMBERED_MS // 10
        rate.end(size, now, more=False)
    assert 50_000 <= rate.bytes_per_s < 100_000
    rate.begin(now)
    rate.end(0, now + 1_000 * REMEMBERED_MS, more=False)
    assert rate.bytes_per_s < 1_000, "one long wait is not forgotten because it was long"


def test_what_takes_no_time_is_fast_not_infinite() -> None:
    rate = Rate()
    rate.begin(5)
    rate.end(4_096, 5, more=False)
    assert rate.bytes_per_s == 4_096_000


@pytest.mark.parametrize("bytes_per_s", [5, 20, 100, 2_000])
def test_what_is_under_way_ends_before_its_deadline(bytes_per_s: int) -> None:
    """Of a disk that shares its speed among all ops, on which always as much is under way as there may be."""
    at_once = AtOnce(64 * MIB, 2_000)
    now, latest = 0, 0
    for _ in range(50):
        began, size = now, at_once.bytes
        now += size * 1_000 // (bytes_per_s * 1_000_000)
        latest = max(latest, now - began)
        at_once.ended(now - began, size)
    assert latest <= 2_000
    assert at_once.bytes >= min(64 * MIB, bytes_per_s * 250_000 // 2), "and no less than it could be"


def test_a_disk_that_becomes_slow_is_late_once() -> None:
    at_once = AtOnce(64 * MIB, 2_000)
    for _ in range(3):
        at_once.ended(4, at_once.bytes)
    assert at_once.bytes == 64 * MIB
    at_once.ended(2_001, at_once.bytes)
    assert at_once.bytes == MIB
    at_once.ended(900, at_once.bytes)
    assert at_once.bytes == MIB, "neither more nor less where it takes a good part of its time"
    at_once.ended(10, at_once.bytes)
    assert at_once.bytes == 2 * MIB


@pytest.mark.parametrize("most", [64 * MIB, 4_096, 1])
def test_its_bounds_hold(most: int) -> None:
    at_once = AtOnce(most, 2_000)
    assert at_once.bytes == min(most, AT_FIRST_BYTES)
    assert at_once.op_bytes == max(at_once.bytes, AT_LEAST_BYTES)
    for took in (*(0,) * 20, 1_500, 2_500, *(1_500,) * 20, 0):
        at_once.ended(took, at_once.bytes)
        assert min(most, AT_LEAST_BYTES) <= at_once.bytes <= most


def test_several_ops_share_what_may_be_under_way_while_it_is_little() -> None:
    at_once = AtOnce(64 * MIB, 2_000, ops=4)
    assert at_once.op_bytes == 2 * MIB
    for _ in range(3):
        at_once.ended(4, at_once.bytes)
    assert at_once.op_bytes == 8 * MIB
    at_once.ended(2_001, at_once.bytes)
    assert at_once.op_bytes == MIB


def test_an_op_that_fails_soon_is_no_reason_to_ask_for_more() -> None:
    at_once = AtOnce(64 * MIB, 2_000)
    at_once.ended(4, at_once.bytes, failed=True)
    assert at_once.bytes == 8 * MIB
    at_once.ended(1_500, at_once.bytes, failed=True)
    assert at_once.bytes == 4 * MIB, "one that hung is"


def test_that_few_bytes_come_soon_says_nothing_of_many() -> None:
    at_once = AtOnce(64 * MIB, 2_000)
    for _ in range(20):
        at_once.ended(100, 2 * MIB)
    assert at_once.bytes == 8 * MIB
    at_once.ended(100, 5 * MIB)
    assert at_once.bytes == 16 * MIB
