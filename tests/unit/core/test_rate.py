"""How fast something comes."""

from kvstore.core.rate import REMEMBERED_MS, Rate


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
