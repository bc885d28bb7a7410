"""The engine around the core: times that can be worked out by hand, plans, shadow caches, and `kvctl simulate`."""

import dataclasses
import json
from pathlib import Path

import pytest

from kvstore.cli import kvctl
from kvstore.errors import BadRequest
from kvstore.replay import Trace, Turn, replay
from kvstore.replay.engine import serve
from kvstore.replay.hardware import MODELS, Hardware, Model
from kvstore.replay.plan import footprint, loading, plan, sessions_per
from kvstore.replay.shadow import Shadows, Size

from .test_baselines import conversations

MODEL = Model("unit", 1.0, 1 << 14, window=64 * 20, decode_s=0.01).faster(1000.0)
"""A chunk of 64 tokens is a MiB; a prefill of 1,000 tokens takes a second."""
MIB = 1 << 20


def talk(*turns: tuple[int, tuple[int, ...], int], think_ms: int = -1) -> Trace:
    """(when, chunks, session), 100 tokens of answer."""
    made = Trace(
        "talk",
        64,
        [
            Turn(at, chunks, 64 * len(chunks), 100, (), session, n, think_ms=think_ms if n else -1)
            for n, (at, chunks, session) in enumerate(turns)
        ],
    )
    made.note_history()
    return made


def test_the_model_is_as_fast_as_it_was_measured() -> None:
    assert MODEL.prefill_tokens_per_s == pytest.approx(1000.0)
    assert MODELS["llama-13b"].prefill_tokens_per_s == pytest.approx(12_000, rel=0.01)


def test_a_hit_spares_its_prefill_and_is_loaded_meanwhile() -> None:
    trace = talk((0, (1, 2), 1), (5_000, (1, 2, 3), 1))
    slow = dataclasses.replace(Hardware(), pcie_bytes_per_s=10 * MIB)
    for hardware, second_s in ((Hardware(), 0.064), (slow, 0.2)):  # 64 tokens computed, or two MiB loaded
        served = serve(trace, MODEL, hardware=hardware, dram_bytes=64 * MIB)
        assert served.first_token_s == pytest.approx([0.128, second_s], abs=0.002)
        assert served.bytes_loaded == 2 * MIB
    anew = serve(trace, MODEL, dram_bytes=64 * MIB, store=False)
    assert anew.first_token_s == pytest.approx([0.128, 0.192], abs=0.002)
    assert anew.result.hits == 0


def test_decoding_stands_still_while_another_prefills() -> None:
    """Of the second that the first answer takes, 436 ms have passed when a prefill of 640 ms comes between; then both
    decode, the second for a second."""
    trace = talk((0, (1,), 1), (500, tuple(range(10, 20)), 2))
    served = serve(trace, MODEL, dram_bytes=64 * MIB)
    assert served.gpu_s == pytest.approx(0.064 + 0.436 + 0.64 + 1.0, abs=0.01)
    assert served.prefill_s == pytest.approx(0.704, abs=0.002)


def test_the_next_turn_comes_a_think_time_after_the_answer() -> None:
    trace = talk((0, (1,), 1), (100, (1, 2), 1), think_ms=3_000)
    served = serve(trace, MODEL, dram_bytes=64 * MIB)
    assert served.served_at_ms == pytest.approx([0, 64 + 1_000 + 3_000], abs=2)


def test_a_full_batch_makes_a_queue_that_is_told_to_the_store() -> None:
    """One place in the batch: while one is served the others wait, and what they need is fetched from SSD meanwhile."""
    first = [(0, (10 * n, 10 * n + 1), n) for n in range(1, 7)]
    again = [(0, (10 * n, 10 * n + 1, 10 * n + 2), n) for n in range(1, 7)]
    one = dataclasses.replace(Hardware(), batch=1, ssd_bytes_per_s=20 * MIB)
    trace = talk(*first, *again, think_ms=10)
    hints = serve(trace, MODEL, hardware=one, dram_bytes=6 * MIB, ssd_bytes=64 * MIB)
    lru = serve(trace, MODEL, hardware=one, dram_bytes=6 * MIB, ssd_bytes=64 * MIB, policy="lru")
    assert max(hints.backlog) == 5
    assert hints.result.hits == lru.result.hits == 12
    assert hints.result.dram_share > lru.result.dram_share
    assert hints.as_served(trace).turns[3].chunks == trace.turns[hints.order[3]].chunks


def test_the_engines_own_cache_comes_first() -> None:
    trace = talk((0, (1, 2), 1), (5_000, (1, 2, 3), 1))
    with_store = serve(trace, MODEL, dram_bytes=64 * MIB, hbm_bytes=64 * MIB)
    alone = serve(trace, MODEL, dram_bytes=64 * MIB, hbm_bytes=64 * MIB, store=False)
    for served in (with_store, alone):
        assert (served.result.hits_hbm, served.result.hits_dram) == (2, 0)
        assert served.bytes_loaded == 0


def test_cost_is_gpus_and_storage_for_as_long_as_the_gpus_work() -> None:
    cost = Hardware().cost(MODELS["llama-13b"], 10.0, 128e9, 10e12)
    assert (cost.gpu, cost.dram, cost.ssd) == pytest.approx((100.0, 11.264, 8.2))
    assert cost.storage_share == pytest.approx(0.163, abs=0.001)


# --------------------------------------------------------------------------------------------------------------- plan


def test_a_plan_reaches_its_target_with_less_than_everything() -> None:
    trace = conversations(3)
    made = plan(trace, MODEL, 0.8, points=5)
    assert made.reached
    assert made.best == pytest.approx(replay(trace, dram_chunks=footprint(trace)).token_hit_rate)
    assert 0.8 * made.best * 0.99 <= made.hit_rate <= made.best
    assert max(made.dram_bytes, made.ssd_bytes) < footprint(trace) * MIB
    rates = [point.hit_rate for point in made.curve]
    assert rates == sorted(rates)
    assert made.ccput_bytes == made.sessions_per_hour * MODEL.window * MODEL.kv_bytes_per_token


def test_a_fast_ssd_needs_little_dram_and_a_slow_one_much() -> None:
    trace = conversations(3, sessions=40, turns=150)
    fast = plan(trace, MODEL, 0.9, points=4, hardware=dataclasses.replace(Hardware(), ssd_bytes_per_s=1e12))
    slow = plan(trace, MODEL, 0.9, points=4, hardware=dataclasses.replace(Hardware(), ssd_bytes_per_s=1e6))
    assert fast.ssd_bytes > 0
    assert fast.dram_bytes < slow.dram_bytes
    assert not slow.loading.ssd_wins


def test_loading_is_weighed_against_computing() -> None:
    """1,000 tokens of LLaMA-13B: 83 ms of prefill, 819 MB."""
    found = loading(MODELS["llama-13b"], Hardware())
    assert (found.recompute_s, found.dram_s, found.ssd_s) == pytest.approx(
        (0.0833, 0.01575, 0.1638), rel=0.01
    )
    assert found.dram_wins and not found.ssd_wins


def test_distinct_sessions_are_counted_within_the_unit() -> None:
    turns = [
        Turn(at, (1,), 64, session=session) for at, session in ((0, 1), (10, 2), (20, 1), (35, 3), (200, 4))
    ]
    assert sessions_per(Trace("made", 64, turns), unit_ms=30) == 3
    assert sessions_per(Trace("made", 64, turns), unit_ms=5) == 1


def test_a_target_of_nothing_is_refused() -> None:
    with pytest.raises(BadRequest, match="target"):
        plan(conversations(1), MODEL, 0.0)


# ------------------------------------------------------------------------------------------------------------ shadows


def test_shadows_of_everything_are_replays() -> None:
    trace = conversations(5)
    sizes = [Size(chunks * MIB, 0, "lru") for chunks in (24, 64, 200)]
    shadows = Shadows(sizes, chunk_tokens=64, chunk_bytes=MIB, share=1.0)
    assert all(map(shadows.feed, trace))
    for size, result in shadows.results:
        assert result.hits == replay(trace, dram_chunks=size.dram_bytes // MIB, policy="lru").hits


def test_a_sample_says_about_the_same() -> None:
    """A quarter of the sessions, in caches of a quarter."""
    trace = conversations(7, sessions=400, turns=4_000)
    sizes = [Size(chunks * MIB, 0, "lru") for chunks in (400, 1_200)]
    shadows = Shadows(sizes, chunk_tokens=64, chunk_bytes=MIB, share=0.25)
    fed = sum(map(shadows.feed, trace))
    assert 0.1 * len(trace) < fed < 0.4 * len(trace)
    for size, result in shadows.results:
        true = replay(trace, dram_chunks=size.dram_bytes // MIB, policy="lru").hit_rate
        assert abs(result.hit_rate - true) < 0.08, (size, result.hit_rate, true)


def test_a_share_too_small_for_the_smallest_is_raised() -> None:
    assert Shadows([Size(64 * MIB, 0, "lru")], chunk_tokens=64, chunk_bytes=MIB, share=0.01).share == 0.25


# ---------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"id": "a", "turns": [[600, 300], [300, 300], [300, 100]]}\n' * 8)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    with pytest.raises(SystemExit) as end:
        kvctl.main(list(arguments))
    out, err = capsys.readouterr()
    assert end.value.code == status, (out, err)
    return out if not status else err


def test_kvctl_simulate_tells_a_row_for_each(
    capsys: pytest.CaptureFixture[str], lengths: Path, tmp_path: Path
) -> None:
    common = (str(lengths), "--format", "sharegpt", "--model", "llama-13b", "--dram", "1G", "64G")
    found = json.loads(run(capsys, "simulate", *common, "--policy", "hints", "belady", "--json"))
    assert [(row["policy"], row["turns"]) for row in found["rows"]] == [
        *(("hints", 24), ("hints", 24)),
        *(("belady", 24), ("belady", 24)),
    ]
    assert found["rows"][1]["session_hit_rate"] == 1.0
    timed = json.loads(
        run(capsys, "simulate", *common, "--policy", "hints", "recompute", "--engine", "--json")
    )
    assert timed["rows"][1]["first_token_mean_s"] < timed["rows"][3]["first_token_mean_s"]
    assert "first token" in run(capsys, "simulate", *common, "--engine")


def test_kvctl_simulate_draws(capsys: pytest.CaptureFixture[str], lengths: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: nothing can be drawn")
    plot, page = tmp_path / "plot.png", tmp_path / "page.html"
    common = (str(lengths), "--format", "sharegpt", "--dram", "1G", "4G")
    run(capsys, "simulate", *common, "--plot", str(plot), "--html", str(page))
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "data:image/png;base64," in page.read_text() and "<td>expected</td>" in page.read_text()


def test_kvctl_plan_says_what_to_buy(capsys: pytest.CaptureFixture[str], lengths: Path) -> None:
    common = (str(lengths), "--format", "sharegpt", "--model", "llama-70b", "--target", "0.9")
    found = json.loads(run(capsys, "plan", *common, "--json"))
    assert found["reached"] and found["dram_bytes"] > 0
    assert found["loading_beats_recomputing"]["dram"] is True
    assert "an hour" in run(capsys, "plan", *common)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--policy", "magic"), "known: expected"),
        (("--model", "gpt-9"), "known: llama-13b"),
        (("--option", "colour=1"), "no such option"),
    ],
)
def test_a_wrong_word_is_refused(
    capsys: pytest.CaptureFixture[str], lengths: Path, arguments: tuple[str, ...], said: str
) -> None:
    assert said in run(capsys, "simulate", str(lengths), "--format", "sharegpt", *arguments, status=1)
