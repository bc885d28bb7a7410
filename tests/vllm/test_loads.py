"""Whether, when and for how long a request's KV is loaded: vLLM's own scheduler over ranks that run no model."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kvstore.client import connect
from kvstore.gpu_worker.compute_or_load import BOUND_MIN_S, VAIN_MAX, ComputeOrLoad, Computing, Line
from kvstore.gpu_worker.connectors.vllm import lookups, scheduler
from kvstore.gpu_worker.connectors.vllm.callers import tokens_of_step
from kvstore.gpu_worker.connectors.vllm.steps import Steps
from kvstore.types import Tier

from .conftest import BLOCK, BOUND_S, Daemon, prompt
from .test_ranks import Rig

PATIENT = {"lookup_ms": 600_000, "compute_or_load": True}
"""Who waits for the store until then fails the test: a rig serves only so many steps."""


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    daemon = Daemon(folder / "loads", segment_bytes=1 << 20)
    yield daemon
    daemon.stop()


@pytest.fixture
def rig(model: Path, daemon: Daemon) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(**options: Any) -> Rig:
        made.append(Rig(model, daemon.run_dir, ranks=1, **{**PATIENT, **options}))
        return made[-1]

    yield make
    daemon.signal(signal.SIGCONT)
    for each in made:
        each.close()


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine's store is late, and vLLM would compute what it could save little of."""
    monkeypatch.setattr(scheduler, "ANSWER_MIN_S", 600.0)


def ready(rig: Rig) -> Rig:
    """Once it has its namespace. Before, nobody can look into the directory."""
    connector = side(rig)
    assert connector._link.namespace(connector._spec, BOUND_S) is not None
    return rig


def side(rig: Rig) -> Any:
    return rig.scheduler.connector.scheduler_side


def learn(rig: Rig, *, tokens_per_s: float, copy_bytes_per_s: float = 1e9) -> ComputeOrLoad:
    """From now on that is what was measured."""
    choice: ComputeOrLoad = side(rig).choice
    choice.compute, choice.copy = Computing(), Line()
    side(rig)._steps._compute = Line()  # what this machine takes is of no account
    for count in (64, 512, 64, 512):
        choice.compute.observe(count, count / tokens_per_s)
        choice.copy.observe(count * 1e4, count * 1e4 / copy_bytes_per_s)
    return choice


def test_speeds_are_learnt_from_steps_and_loads(rig: Callable[..., Rig]) -> None:
    first = rig()
    assert first.run(prompt(1, 300)) == 0
    assert side(first).choice.compute.known and not side(first).choice.copy.known
    assert first.run(prompt(2, 300)) == 0
    second = rig()
    assert second.run(prompt(1, 300)) == 288, "nobody knows yet what computing takes"
    assert second.run(prompt(2, 300)) == 288
    assert side(second).choice.copy.known, "the first load pays for what is done once"
    off = rig(compute_or_load=False)
    off.run(prompt(21, 300))
    assert not side(off).choice.compute.known


def test_the_daemon_hears_of_what_the_directory_answered(rig: Callable[..., Rig], daemon: Daemon) -> None:
    """Misses too, of which no load tells; once for each request, however often vLLM asks."""
    engine = ready(rig(compute_or_load=False))
    tokens = prompt(31, 300)
    assert engine.run(tokens) == 0

    def counts() -> tuple[int, int]:
        with connect(str(daemon.run_dir)) as client:
            for each in (engine.scheduler.connector.scheduler_side, *(w.worker_side for w in engine.workers)):
                if (its := each._link.ready(side(engine)._spec)) is not None:
                    its.client._attachment.tell_touched()
                    its.client.stats()
            spaces = client.stats().namespaces
            return sum(space.lookups for space in spaces), sum(space.hits for space in spaces)

    assert engine.run(tokens) == 288, "vLLM's own, which the directory knows too"
    lookups, hits = counts()
    assert lookups > hits
    assert engine.run(prompt(32, 300)) == 0
    assert counts() == (lookups + 1, hits)


def test_what_is_slower_to_load_than_to_compute_is_computed(rig: Callable[..., Rig], answered: None) -> None:
    tokens = prompt(3, 300)
    rig().run(tokens)
    engine = rig()
    learn(engine, tokens_per_s=1e9, copy_bytes_per_s=1e3)
    assert engine.run(tokens) == 0
    assert side(engine).tally.total["computed_tokens"] == 288
    assert not engine.loads
    learn(engine, tokens_per_s=100)
    assert engine.run(prompt(3, 300)) == 288, "vLLM's own"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory cannot tell, and the daemon is asked."""
    monkeypatch.setattr(lookups, "peek", lambda *_: None)


def test_a_request_does_not_wait_for_a_store_that_could_save_it_little(
    rig: Callable[..., Rig], daemon: Daemon, asked: None
) -> None:
    engine = rig()
    engine.run(prompt(4, 300))  # the store is there
    learn(engine, tokens_per_s=1e6)
    daemon.signal(signal.SIGSTOP)
    assert engine.run(prompt(5, 300)) == 0
    assert side(engine).tally.total["lookups_late"] == 1


def test_a_store_that_has_had_nothing_is_hardly_waited_for(
    rig: Callable[..., Rig], daemon: Daemon, asked: None
) -> None:
    """Not the second that could be saved, but a twentieth of it; whatever is found ends that."""
    engine = rig()
    engine.run(prompt(4, 300))  # the store is there
    choice = learn(engine, tokens_per_s=288)
    for _ in range(VAIN_MAX):
        choice.answered(useful=False)
    connector, waiting = side(engine), engine.request(prompt(23, 300))
    daemon.signal(signal.SIGSTOP)
    connector.on_new_request(waiting)
    lookup = connector._requests[waiting.request_id].lookup
    assert connector._patience_s(waiting, lookup, 9) == pytest.approx(0.05)
    choice.answered(useful=True)
    assert connector._patience_s(waiting, lookup, 9) == pytest.approx(1.0)
    for _ in range(VAIN_MAX):
        choice.answered(useful=False)
    lookup.delay.tier = Tier.SSD
    assert connector._patience_s(waiting, lookup, 9) == pytest.approx(1.0), "it comes"
    connector.finished(waiting)


def test_nor_for_one_that_has_only_what_vllm_has_itself(rig: Callable[..., Rig], daemon: Daemon) -> None:
    engine = rig(compute_or_load=False)
    engine.run(prompt(6, 300))
    daemon.signal(signal.SIGSTOP)
    assert engine.run(prompt(6, 300)) == 288


def test_a_load_is_bounded_by_what_it_saves(rig: Callable[..., Rig], answered: None) -> None:
    tokens = prompt(7, 300)
    rig().run(tokens)
    engine = rig()
    choice = learn(engine, tokens_per_s=100)
    assert engine.run(tokens) == 288
    assert [load.bound_s for load in engine.loads] == [pytest.approx(choice.saves(288))]
    quick = rig()
    learn(quick, tokens_per_s=1e5)
    assert quick.run(tokens) == 288
    assert [load.bound_s for load in quick.loads] == [BOUND_MIN_S]


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks the daemon instead of looking into the directory fails the test."""

    def start(*_: Any, **__: Any) -> Any:
        raise AssertionError("asked")

    monkeypatch.setattr(lookups.Lookups, "start", start)


@pytest.mark.parametrize("layerwise", [False, True])
def test_what_is_in_dram_is_known_at_once(
    rig: Callable[..., Rig], silent: None, monkeypatch: pytest.MonkeyPatch, layerwise: bool
) -> None:
    """Without asking, and without asking vLLM to ask again; also of prompts that end with a block."""
    monkeypatch.setattr(lookups, "FRESH_S", BOUND_S)
    for seed, length, found in ((31, 300, 288), (32, 320, 319), (33, 321, 320), (34, 31, 0), (35, 32, 31)):
        tokens = prompt(seed, length)
        ready(rig(layerwise=layerwise)).run(tokens)
        engine = ready(rig(layerwise=layerwise))
        answers: list[Any] = []
        connector = engine.scheduler.connector
        matched = connector.get_num_new_matched_tokens

        def note(*arguments: Any, matched: Callable[..., Any] = matched, answers: list[Any] = answers) -> Any:
            answers.append(matched(*arguments))
            return answers[-1]

        connector.get_num_new_matched_tokens = note
        assert engine.run(tokens) == found
        assert answers[0] == (found, bool(found) and not layerwise)


def test_what_is_on_ssd_is_awaited_by_the_load(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is parked at once. How fast the SSD is, the daemon has told before."""
    home = folder / "cold"
    home.mkdir()
    (home / "ssd").mkdir()
    small = Daemon(
        home,
        segment_bytes=1 << 20,
        ssd_dir=home / "ssd",
        ssd_bytes=256 << 20,
        ssd_slab_bytes=16 << 20,
        durable_within_ms=300,
    )
    made: list[Rig] = []
    try:

        def start(**options: Any) -> Rig:
            made.append(ready(Rig(model, small.run_dir, ranks=1, **{**PATIENT, **options})))
            return made[-1]

        tokens = prompt(40, 300)
        start().run(tokens)
        small.stop()
        small.start()
        layered = start(compute_or_load=False, layerwise=True)
        side(layered).choice.reads_from_ssd(1e9)
        assert layered.run(tokens) == 288, "a step cannot wait for the SSD: the lookup does"
        assert not layered.workers[0].worker_side.tally.total["blocks_failed"]
        small.stop()
        small.start()
        engine = start(compute_or_load=False)
        side(engine).choice.reads_from_ssd(1e9)
        monkeypatch.setattr(lookups.Lookups, "start", lambda *_, **__: pytest.fail("asked") if _[2] else None)
        assert engine.run(tokens) == 288
        (load,) = engine.loads
        assert load.wait_s > 0 and len(load.keys) == 9
        assert not side(engine).choice.copy.known, "how fast a copy is, such a load does not tell"
    finally:
        for each_rig in made:
            each_rig.close()
        small.stop()


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_load_whose_time_is_up_is_computed(rig: Callable[..., Rig], layerwise: bool) -> None:
    """The rig checks each block that vLLM takes for computed."""
    tokens = prompt(8, 300)
    rig(layerwise=layerwise).run(tokens)
    engine = rig(layerwise=layerwise)
    loader = engine.workers[0].worker_side._loader
    if layerwise:
        start = loader.start_layers
        loader.start_layers = lambda loads, spec: start([replace(load, bound_s=0.0) for load in loads], spec)
    else:
        whole = loader.start
        loader.start = lambda load, spec: whole(replace(load, bound_s=0.0), spec)
    assert engine.run(tokens) == 0
    assert engine.workers[0].worker_side.tally.total["blocks_failed"] == 9


def test_how_long_a_load_keeps_a_request_is_learnt(rig: Callable[..., Rig], answered: None) -> None:
    """Of copies alone, parking a request would cost nothing."""
    tokens = prompt(22, 300)
    rig().run(tokens)
    engine = rig()
    choice = learn(engine, tokens_per_s=100, copy_bytes_per_s=1e15)
    gate = engine.hold_loads()
    steps = iter(range(10_000))

    def between() -> None:
        if next(steps) == 20:
            gate.set()

    assert engine.run(tokens, between=between) == 288
    assert choice._late_s[Tier.DRAM] > 0 and not choice._late_s[Tier.SSD]


def test_one_request_loads_what_several_want(rig: Callable[..., Rig]) -> None:
    common = prompt(9, 8 * BLOCK)
    rig().run(common + prompt(10, 20))
    engine = rig()
    gate = engine.hold_loads()
    engine.checks = False  # it checks one request only
    engine.scheduler.add_request(engine.request(common + prompt(11, 20)))
    steps = iter(range(10_000))

    def between() -> None:
        if next(steps) == 20:
            gate.set()

    engine.run(common + prompt(12, 20), between=between)
    loaded = [key for load in engine.loads for key in load.keys]
    assert len(loaded) == len(set(loaded)) == 8
    assert side(engine).tally.total["loads_deferred"] == 1
    assert not side(engine)._arriving


@pytest.mark.parametrize("end", ["aborted", "failed"])
def test_who_waits_for_anothers_load_goes_on_without_it(rig: Callable[..., Rig], end: str) -> None:
    common = prompt(13, 8 * BLOCK)
    rig().run(common + prompt(14, 20))
    engine = rig()
    loader = engine.workers[0].worker_side._loader
    gate, fill, begun = threading.Event(), loader._fill, []

    def held(*arguments: Any) -> int:
        begun.append(arguments)
        assert gate.wait(BOUND_S)
        return 0 if end == "failed" and len(begun) == 1 else fill(*arguments)

    loader._fill = held
    first = engine.request(common + prompt(15, 20))
    engine.checks = False
    engine.scheduler.add_request(first)
    steps = iter(range(10_000))

    def between() -> None:
        if next(steps) == 5:
            if end == "aborted":
                engine.scheduler.finish_requests(first.request_id, RequestStatus.FINISHED_ABORTED)
            gate.set()

    engine.run(common + prompt(16, 20), between=between)
    assert not side(engine)._arriving and not side(engine)._loading


# ---------------------------------------------------------------------------------------- prefill and decode engines


def hand_over(engine: Rig, tokens: list[int]) -> dict[str, Any]:
    """What the engine that computed a prompt tells the router."""
    told: list[Any] = []
    finished = engine.scheduler.connector.request_finished_all_groups

    def note(*arguments: Any) -> Any:
        told.append(finished(*arguments))
        return told[-1]

    engine.scheduler.connector.request_finished_all_groups = note
    engine.run(tokens, kv_transfer_params={"do_remote_decode": True})
    ((held, handed),) = told
    assert not held
    return dict(handed)


def test_a_decode_engine_waits_for_what_the_prefill_engine_still_saves(rig: Callable[..., Rig]) -> None:
    tokens = prompt(17, 300)
    prefill = rig(role="kv_producer")
    saver = prefill.workers[0].worker_side.saver
    gate, save, flush = threading.Event(), saver._save, saver.flush

    def held(batch: Any) -> Any:
        assert gate.wait(BOUND_S)
        return save(batch)

    saver._save, saver.flush = held, lambda timeout_s: True
    handed = hand_over(prefill, tokens)
    assert handed == {"kvstore_blocks": 9}
    decode = rig()
    learn(decode, tokens_per_s=10)
    steps = iter(range(10_000))

    def between() -> None:
        if next(steps) == 5:
            gate.set()

    assert decode.run(tokens, between=between, kv_transfer_params=handed) == 288
    assert flush(BOUND_S)


def test_who_was_promised_nothing_does_not_wait(rig: Callable[..., Rig]) -> None:
    decode = rig()
    learn(decode, tokens_per_s=10)
    assert decode.run(prompt(18, 300)) == 0
    strange = ({"kvstore_blocks": "nine"}, {"kvstore_blocks": None}, {"kvstore_blocks": -1})
    for number, handed in enumerate(strange):
        assert decode.run(prompt(100 + number, 300), kv_transfer_params=handed) == 0
    assert side(decode).tally.total["lookups_late"] == 0


def test_a_prefill_engine_finds_what_the_decode_engine_saved(rig: Callable[..., Rig]) -> None:
    tokens = prompt(20, 9 * BLOCK + 31)  # its first answer token fills a block
    prefill, decode = rig(), rig()
    handed = hand_over(prefill, tokens)
    assert decode.run(tokens, kv_transfer_params=handed) == 9 * BLOCK
    assert rig().run([*tokens, 7, 7]) == 10 * BLOCK, "the rig answers 7, 7"


# ------------------------------------------------------------------------------------------------------------- steps


def test_only_steps_that_compute_prompts_count() -> None:
    line = Line()
    steps = Steps(line)
    steps.ended(0.0)
    steps.scheduled({"a": 1, "b": 5}, 0.0)
    steps.ended(10.0)
    assert not line.known
    steps.scheduled({"a": 1, "b": 500}, 10.0)
    steps.ended(11.0)
    assert line.seconds(500) == pytest.approx(1.0)
    assert steps.busy_s == 11.0, "decoding keeps the engine busy too"
    steps.scheduled({}, 11.0)
    steps.ended(12.0)
    assert steps.busy_s == 11.0


def test_a_step_that_is_scheduled_ahead_lasts_from_the_end_of_the_one_before() -> None:
    line = Line()
    steps = Steps(line)
    for start in (0.0, 0.1, 0.2):
        steps.scheduled({"a": 500}, start)
    for end in (1.0, 2.0, 3.0):
        steps.ended(end)
    assert line.seconds(500) == pytest.approx(1.0)


def test_a_tier_sees_the_step_that_its_caller_schedules() -> None:
    assert tokens_of_step() == {}

    output = SimpleNamespace(num_scheduled_tokens={"a": 7})

    def build(scheduler_output: Any) -> Any:
        return tokens_of_step()

    assert build(output) == {"a": 7}
