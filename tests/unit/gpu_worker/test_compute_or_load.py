"""What is loaded and what is computed, by measured speeds."""

import itertools
import math
import random

import pytest

from kvstore.gpu_worker.compute_or_load import (
    BOUND_MIN_S,
    EXPLORE_AFTER_MAX_S,
    EXPLORE_AFTER_S,
    EXPLORE_BYTES,
    EXPLORE_SHARE,
    MARGIN_SHARE,
    VAIN_MAX,
    ComputeOrLoad,
    Delay,
    Found,
    Line,
    Plan,
    Why,
)
from kvstore.types import Tier

MIB = 1 << 20
TOKENS, CHUNK = 64, 2 * MIB
LONG_S = 1e6


def learned(tokens_per_s: float = 1_000, copy_bytes_per_s: float = 2e9) -> ComputeOrLoad:
    choice = ComputeOrLoad()
    for tokens in (1, 64, 512, 256, 1024, 64):  # the first does not count
        choice.compute.observe(tokens, 0.02 + tokens / tokens_per_s)
        choice.copy.observe(tokens * MIB, 0.001 + tokens * MIB / copy_bytes_per_s)
    return choice


def found(where: str, ahead: int = 0, rate: float = 0) -> Found:
    """`where`: D for each chunk in DRAM, S for each on SSD alone."""
    return Found([letter == "D" for letter in where], TOKENS, CHUNK, ahead, rate)


# ---------------------------------------------------------------------------------------------------------- Line


def test_a_line_tells_fixed_from_each() -> None:
    line = Line()
    assert (line.known, line.seconds(100)) == (False, 0.0)
    for units in (10, 1_000, 50, 400, 10):
        line.observe(units, 0.5 + 0.01 * units)
    assert line.fixed == pytest.approx(0.5) and line.each == pytest.approx(0.01)
    assert line.seconds(200) == pytest.approx(2.5)


def test_loads_of_one_size_do_not_tell_them_apart() -> None:
    line = Line()
    for _ in range(5):
        line.observe(100, 2.0)
    assert (line.fixed, line.each) == (0.0, pytest.approx(0.02))


def test_nothing_is_ever_free_or_negative() -> None:
    line = Line()
    for units, seconds in ((10, 5.0), (1_000, 1.0), (20, 4.0)):
        line.observe(units, seconds)
    assert line.each > 0 and line.fixed >= 0
    line.observe(0, 1.0)
    line.observe(5, -1.0)
    assert line.each > 0


def test_a_machine_that_stood_still_is_not_slow() -> None:
    line = Line()
    for _ in range(8):
        line.observe(100, 1.0)
    line.observe(100, 600.0)
    assert line.seconds(100) < 2.0


def test_one_that_got_slower_is_believed_soon() -> None:
    line = Line()
    for _ in range(32):
        line.observe(100, 1.0)
    for _ in range(16):
        line.observe(100, 100.0)
    assert line.seconds(100) > 30.0


def test_a_line_that_was_too_high_comes_down_at_once() -> None:
    """What is held to be slow is hardly ever tried."""
    line = Line()
    for _ in range(32):
        line.observe(100, 10.0)
    for _ in range(3):
        line.observe(100, 0.1)
    assert line.seconds(100) < 2.0


def test_what_is_done_once_does_not_count() -> None:
    choice = ComputeOrLoad()
    for line in (choice.compute, choice.copy):
        line.observe(64, 1_000.0)
        assert not line.known
        line.observe(64, 1.0)
        assert line.seconds(64) == 1.0


def test_a_few_loads_are_no_reason_to_compute() -> None:
    choice = ComputeOrLoad()
    for seconds in (9.0, 9.0, 9.0):
        choice.compute.observe(64, 0.064)
        choice.copy.observe(CHUNK, seconds)
    assert choice.choose(found("DD"), now=0, wait_max_s=1).chunks == 2
    for _ in range(3):
        choice.copy.observe(CHUNK, 9.0)
    assert choice.choose(found("DD"), now=0, wait_max_s=1).chunks == 0


def test_long_prompts_do_not_make_short_ones_slow() -> None:
    """Attention's share grows with the prompt: 2,048 tokens take three times what 1,024 take, not twice."""
    choice = ComputeOrLoad()
    for _ in range(8):
        for tokens, seconds in ((256, 0.02), (1_024, 0.1), (2_048, 0.3), (2_048, 0.3)):
            choice.compute.observe(tokens, seconds)
    assert choice.saves(256) == pytest.approx(0.02, rel=0.01)
    assert choice.saves(1_024) == pytest.approx(0.1, rel=0.01)
    assert choice.saves(2_048) == pytest.approx(0.3, rel=0.1)
    assert choice.choose(found("S" * 16, rate=340e6), now=0, wait_max_s=5).why is Why.COMPUTE


def test_what_a_step_takes_anyway_is_not_saved() -> None:
    choice = learned()
    for _ in range(8):
        choice.compute.observe(64, 0.02 + 0.064)
    assert choice.saves(64) == pytest.approx(0.064, rel=0.01)


# --------------------------------------------------------------------------------------------------------- choices


def test_what_the_engine_has_is_not_loaded() -> None:
    plan = learned().choose(found("DD"), now=0, wait_max_s=1, have=2)
    assert (plan.chunks, plan.why) == (2, Why.NOTHING)
    assert learned().choose(found("DDDD"), now=0, wait_max_s=1, have=1).chunks == 4


def test_while_nobody_knows_what_computing_takes_all_is_loaded() -> None:
    plan = ComputeOrLoad().choose(found("DDSS", rate=1), now=0, wait_max_s=0.7)
    assert (plan.chunks, plan.why, plan.wait_s, plan.bound_s) == (4, Why.UNKNOWN, 0.7, math.inf)


def test_dram_is_faster_than_computing() -> None:
    plan = learned().choose(found("D" * 16), now=0, wait_max_s=1)
    assert (plan.chunks, plan.why, plan.wait_s) == (16, Why.LOAD, 0.0)
    assert plan.saves_s == pytest.approx(16 * TOKENS / 1_000)


def test_an_engine_that_computes_faster_than_memory_copies_computes() -> None:
    choice = learned(tokens_per_s=1e6, copy_bytes_per_s=1e9)
    assert choice.choose(found("D" * 16), now=0, wait_max_s=1).chunks == 0


@pytest.mark.parametrize(
    ("rate", "chunks", "why"),
    [
        (1e9, 16, Why.LOAD),
        (200e6, 16, Why.LOAD),
        (50e6, 16, Why.LOAD),
        (40e6, 0, Why.COMPUTE),
        (30e6, 0, Why.COMPUTE),
        (1e6, 0, Why.COMPUTE),
    ],
)
def test_an_ssd_is_used_while_it_is_faster_than_computing(rate: float, chunks: int, why: Why) -> None:
    """Computing a chunk takes 64 ms; 2 MiB in that time are 33 MB/s, and in three quarters of it 44 MB/s."""
    plan = learned().choose(found("S" * 16, rate=rate), now=0, wait_max_s=5)
    assert (plan.chunks, plan.why) == (chunks, why)


def test_what_is_read_before_counts() -> None:
    assert learned().choose(found("S" * 16, ahead=50 * MIB, rate=200e6), now=0, wait_max_s=5).chunks == 16
    plan = learned().choose(found("S" * 16, ahead=500 * MIB, rate=200e6), now=0, wait_max_s=5)
    assert (plan.chunks, plan.why) == (0, Why.COMPUTE)


def test_waits_that_are_longer_than_reading_takes_count() -> None:
    """Of a small hit they are the most: 2 chunks are read in 42 ms, and computed in 128."""
    choice = learned()
    assert choice.choose(found("SS", rate=100e6), now=0, wait_max_s=5).why is Why.LOAD
    for _ in range(20):
        delayed(choice, Tier.SSD, 0.042, 0.3)
    assert choice.choose(found("SS", rate=100e6), now=0, wait_max_s=5).why is Why.COMPUTE
    assert choice.choose(found("S" * 32, rate=100e6), now=0, wait_max_s=5).why is Why.LOAD
    assert choice.choose(found("DD"), now=0, wait_max_s=5).why is Why.LOAD
    for _ in range(20):
        delayed(choice, Tier.SSD, 0.042, 0.01)
    assert choice.choose(found("SS", rate=100e6), now=0, wait_max_s=5).why is Why.LOAD


def test_parking_a_request_costs_more_than_a_small_copy_saves() -> None:
    choice = learned()
    assert choice.choose(found("D"), now=0, wait_max_s=5).why is Why.LOAD
    for _ in range(40):
        delayed(choice, Tier.DRAM, 0.02, 0.12)
    assert choice.choose(found("D"), now=0, wait_max_s=5).why is Why.COMPUTE
    assert choice.choose(found("D" * 8), now=0, wait_max_s=5).why is Why.LOAD


def test_a_delay_counts_once_and_without_what_others_computed_meanwhile() -> None:
    choice = learned()
    delay = Delay(busy_s=7.0)
    delay.begin(Plan(4, Why.LOAD, takes_s=0.1), Tier.SSD, now=10.0)
    delay.begin(Plan(4, Why.LOAD, takes_s=9.0), Tier.DRAM, now=11.0)
    assert (delay.since, delay.expected_s, delay.tier) == (10.0, 0.1, Tier.SSD)
    choice.delayed(delay, now=13.0, busy_s=9.5)
    late_s = choice._late_s[Tier.SSD]
    assert late_s == pytest.approx(0.25 * 0.4)
    choice.delayed(delay, now=20.0)
    choice.delayed(Delay(), now=20.0)
    assert choice._late_s == {Tier.SSD: late_s, Tier.DRAM: 0.0}


def test_a_store_that_has_nothing_is_not_waited_for() -> None:
    choice = learned()
    for _ in range(VAIN_MAX):
        assert not choice.asks_in_vain
        choice.answered(useful=False)
    assert choice.asks_in_vain
    choice.answered(useful=True)
    assert not choice.asks_in_vain


def test_nobody_knows_what_was_expected_before_computing_is_measured() -> None:
    delay = Delay()
    delay.begin(Plan(4, Why.UNKNOWN), Tier.SSD, now=1.0)
    assert delay.tier is None


def delayed(choice: ComputeOrLoad, tier: Tier, expected_s: float, seconds: float) -> None:
    delay = Delay()
    delay.begin(Plan(1, Why.LOAD, takes_s=expected_s), tier, now=1.0)
    choice.delayed(delay, now=1.0 + seconds)


def test_what_is_in_dram_is_loaded_though_the_ssd_is_slow() -> None:
    plan = learned().choose(found("DDDDSSSS", rate=1e6), now=0, wait_max_s=5)
    assert (plan.chunks, plan.why, plan.wait_s) == (4, Why.SPLIT, 0.0)


def test_what_comes_in_time_is_loaded_and_the_rest_computed() -> None:
    plan = learned().choose(found("S" * 64, rate=50e6), now=0, wait_max_s=1.0)
    assert plan.why is Why.SPLIT
    assert plan.chunks == int(50e6 / CHUNK)
    assert plan.wait_s <= 1.0


def test_a_wait_is_bounded_by_what_it_saves() -> None:
    plan = learned().choose(found("S" * 16, rate=40e6), now=0, wait_max_s=60)
    assert plan.wait_s <= plan.saves_s <= plan.bound_s
    fast = learned().choose(found("S" * 16, rate=1e9), now=0, wait_max_s=60)
    assert fast.wait_s < 0.1 < fast.bound_s
    assert learned().choose(found("D"), now=0, wait_max_s=60).bound_s >= BOUND_MIN_S


def cost(choice: ComputeOrLoad, what: Found, have: int, chunks: int, wait_max_s: float) -> float:
    """Seconds, against computing everything."""
    cold = sum(not here for here in what.in_dram[have:chunks])
    wait_s = (what.ahead_bytes + cold * CHUNK) / what.ssd_bytes_per_s if cold else 0.0
    if wait_s > wait_max_s:
        return math.inf
    copied = choice.copy.seconds((chunks - have) * CHUNK) if chunks > have else 0.0
    margin_s = MARGIN_SHARE * choice.saves(cold * TOKENS)
    return wait_s + margin_s + copied - choice.saves((chunks - have) * TOKENS)


def test_the_best_is_never_worse_than_any_other_number_of_chunks() -> None:
    chance = random.Random(3)
    for _ in range(300):
        choice = learned(10 ** chance.uniform(2, 5), 10 ** chance.uniform(8, 10))
        what = found(
            "".join(chance.choice("DDSS") * chance.randrange(1, 6) for _ in range(chance.randrange(1, 6))),
            chance.randrange(0, 100 * MIB),
            10 ** chance.uniform(6, 10),
        )
        have, wait_max_s = chance.randrange(0, 4), chance.choice((0.05, 1.0, LONG_S))
        plan = choice.choose(what, now=0, wait_max_s=wait_max_s, have=have)
        if plan.why in (Why.LOAD, Why.SPLIT, Why.COMPUTE):
            ends = range(have, max(have, len(what.in_dram)) + 1)
            costs = [cost(choice, what, have, chunks, wait_max_s) for chunks in ends]
            assert costs[plan.chunks - have] == pytest.approx(min(costs), rel=1e-6, abs=1e-9), (what, plan)


# ----------------------------------------------------------------------------------------------- what was not tried


def test_an_ssd_that_nobody_has_read_is_tried_with_a_few() -> None:
    plan = learned().choose(found("S" * 64), now=0, wait_max_s=5)
    assert plan.why is Why.EXPLORE
    assert plan.chunks * CHUNK == EXPLORE_BYTES
    assert plan.wait_s == pytest.approx(3 * EXPLORE_SHARE * 64 * TOKENS / 1_000)


def test_one_that_lost_is_tried_again_ever_more_rarely_and_at_little_cost() -> None:
    choice = learned()
    slow = found("D" * 4 + "S" * 60, rate=1e6)
    tries = []
    for second in range(3_600):
        plan = choice.choose(slow, now=second, wait_max_s=5)
        if plan.why is Why.EXPLORE:
            tries.append(second)
            assert plan.wait_s <= EXPLORE_SHARE * choice.saves(64 * TOKENS)
            assert plan.chunks * CHUNK == 4 * CHUNK + EXPLORE_BYTES
        else:
            assert plan.chunks == 4
    pauses = [later - sooner for sooner, later in itertools.pairwise((0, *tries))]
    assert pauses[:3] == [EXPLORE_AFTER_S, 2 * EXPLORE_AFTER_S, 4 * EXPLORE_AFTER_S]
    assert set(pauses[7:]) == {EXPLORE_AFTER_MAX_S}


def test_one_that_got_fast_is_used_again_and_then_forgiven() -> None:
    choice = learned()
    for second in range(100):
        choice.choose(found("S" * 8, rate=1e6), now=second, wait_max_s=5)
    assert choice.choose(found("S" * 8, rate=46e6), now=101, wait_max_s=5).chunks == 0, "noise"
    assert choice.choose(found("S" * 8, rate=1e9), now=102, wait_max_s=5).why is Why.LOAD
    assert choice.choose(found("S" * 8, rate=46e6), now=103, wait_max_s=5).why is Why.LOAD
    tries = [
        second
        for second in range(200, 300)
        if choice.choose(found("S" * 8, rate=1e6), now=second, wait_max_s=5).why is Why.EXPLORE
    ]
    assert tries[0] == 200 + EXPLORE_AFTER_S


def test_copies_that_lost_are_tried_again_too() -> None:
    choice = learned(tokens_per_s=1e6, copy_bytes_per_s=1e9)
    plans = [choice.choose(found("D" * 64), now=second, wait_max_s=1) for second in range(6)]
    assert [plan.why for plan in plans] == [Why.COMPUTE] * 5 + [Why.EXPLORE]
    assert plans[-1].chunks * CHUNK == EXPLORE_BYTES


def test_an_engine_that_always_loads_learns_what_computing_takes() -> None:
    """It has seen short steps alone, of which most is fixed: per token, long ones take a fraction."""
    for long_s, then in ((0.1, Why.COMPUTE), (0.6, Why.LOAD)):
        choice = ComputeOrLoad()
        for _ in range(6):
            choice.compute.observe(32, 0.04)
        near = found("S" * 7, rate=7 * CHUNK / 0.3)
        assert choice.choose(near, now=0.0, wait_max_s=LONG_S).why is Why.COMPUTE
        assert choice.choose(near, now=1.0, wait_max_s=LONG_S).why is Why.LOAD, "one request is enough"
        choice.compute.observe(480, long_s)
        assert choice.choose(near, now=2.0, wait_max_s=LONG_S).why is then


def test_what_loads_in_no_time_is_not_computed_to_learn() -> None:
    choice = ComputeOrLoad()
    for _ in range(6):
        choice.compute.observe(32, 0.04)
    assert choice.choose(found("D" * 7), now=0.0, wait_max_s=LONG_S).why is Why.LOAD
    assert choice.choose(found("S" * 7, rate=7 * CHUNK / 0.05), now=0.0, wait_max_s=LONG_S).why is Why.LOAD
