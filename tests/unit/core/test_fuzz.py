"""Random schedules with everything in them: late and failing copies, damaged moves, repeated requests, dying workers.

A run that fails prints its seed; KVSTORE_FUZZ_SEED=N repeats it.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.errors import StoreError
from kvstore.sim.world import CHUNK_TOKENS, PAGE, World, epoch_of, spec
from kvstore.types import ChunkKey, NamespaceId, Outcome, Protection, WorkerId

STEPS = 700
SPECS = (spec("a"), spec("b", shard_bytes=2 * PAGE), spec("c", shards=2, shard_bytes=PAGE - 96))
EVERY_SEED = os.environ.get("KVSTORE_FUZZ_SEED")
SEEDS = [int(EVERY_SEED)] if EVERY_SEED else ["fresh-1", "fresh-2"]
"""A fresh one is drawn in the test, because the names of tests have to be the same in all processes of a test run."""


def drawn(seed: int | str) -> int:
    return seed if isinstance(seed, int) else random.SystemRandom().randrange(1 << 32)


@dataclass(slots=True)
class Filling:
    """A Fill as its worker sees it: it commits only if the rows were its own until the answer came."""

    worker: WorkerId
    reserved: ev.Reserved
    request: int = 0
    answer: Any = None
    reused: bool = False


class Fuzz:
    def __init__(self, seed: int, protection: Protection) -> None:
        self.random = random.Random(seed)
        # Some kinds of steps are switched off in each run, and the others are more or less frequent.
        steps = [name for name in dir(self) if name.startswith("do_")]
        always = ("do_save", "do_commit", "do_acquire", "do_finish", "do_unmap", "do_tick")
        self.steps = [name for name in steps if name in always or self.random.random() < 0.9]
        self.weights = [self.random.choice((1, 1, 3, 10)) for _ in self.steps]
        self.world = self.new_world(
            segments=self.random.choice((2, 4, 8)),
            segment_bytes=8 * PAGE,
            protection=protection,
            lease_ttl_ms=500,
            revoke_grace_ms=100,
            reservation_ttl_ms=400,
            incomplete_ttl_ms=700,
            ghosts_max=20,
            remembered_answers_max=8,
            remembered_rows_max=self.random.choice((0, 4)),
            sessions_max=10,
            manifest_entries_max=200,
            waits_per_worker_max=4,
            namespaces_max=12,
            scrub_bytes_per_s=self.random.choice((0, 4 * PAGE, 100 * PAGE)),
            scrub_pause_ms=500,
            quarantine_ms=self.random.choice((0, 300)),
        )
        self.world.unmap_at_once = self.random.random() < 0.7
        self.workers: dict[WorkerId, dict[int, NamespaceId]] = {}
        self.epochs = [0] * len(SPECS)
        self.saves: list[tuple[WorkerId, ev.Reserved]] = []
        self.fills: list[Filling] = []
        self.variant = 0
        self.makers = [b"%d" % number for number in range(3)]
        self._operator = WorkerId(0)
        self.answers: Counter[str] = Counter()

    def new_world(self, **limits: Any) -> World:
        return World(**limits)

    def run(self, steps: int = STEPS) -> None:
        self.do_join()
        for _ in range(steps):
            if self.random.random() < 0.4:
                self.world.now += self.random.randrange(60)
            if not self.workers:
                self.do_join()
            (step,) = self.random.choices(self.steps, self.weights)
            try:
                getattr(self, step)()
                self.answers[step] += 1
            except StoreError as error:
                self.answers[type(error).__name__] += 1
        self.settle()

    def settle(self) -> None:
        """Liveness: with all faults healed and everybody gone, nothing is left but what is cached."""
        world = self.world
        world.hold = set()
        while world.held:
            world.finish()
        for worker in list(world.mapped):
            world.kill(worker)
        for _ in range(40):
            world.tick(1_000)
        state = world.store.state
        assert not (state.leases.leases or state.reservations or state.waits or state.workers or state.groups)
        slots = world.slots()
        assert slots["reserved"] == 0
        assert slots["quarantined"] <= state.counters["slots_quarantined"]
        assert state.partials.count == 0

    # -------------------------------------------------------------------------------------------------------- parts

    def somebody(self) -> tuple[WorkerId, NamespaceId]:
        worker = self.random.choice(list(self.workers))
        return worker, self.random.choice(list(self.workers[worker].values()))

    def keys(self) -> tuple[ChunkKey, ...]:
        chain = self.random.randrange(6)
        return tuple(ChunkKey(b"%d-%d" % (chain, place)) for place in range(self.random.randrange(1, 8)))

    def shards(self, namespace: NamespaceId) -> tuple[int, ...]:
        found = self.world.store.state.namespaces.get(namespace)
        every = found.shards if found else 1
        return () if self.random.random() < 0.6 else (self.random.randrange(every),)

    def ask(self, kind: type, worker: WorkerId, *args: Any, **named: Any) -> Any:
        """Now and then the same request once more, as if its answer had been lost."""
        request = self.world._next_request
        answer = self.world.ask(kind, worker, *args, **named)
        remembered = kind not in (ev.Match, ev.GetSession, ev.ListSessions, ev.Explain, ev.GetStats)
        if remembered and answer is not None and self.random.random() < 0.2:
            assert self.world.ask(kind, worker, *args, request_id=request, **named) == answer
        return answer

    # -------------------------------------------------------------------------------------------------------- steps

    def do_join(self) -> None:
        if len(self.workers) >= 6:
            return
        worker = self.world.join(self.random.choice(("alice", "bob")), self.random.choice(("", "engine")))
        self.workers[worker] = dict.fromkeys(range(len(SPECS)), NamespaceId(99))
        self.open(worker)

    def open(self, worker: WorkerId) -> None:
        for number, base in enumerate(SPECS):
            self.workers[worker][number] = self.world.open(epoch_of(base, self.epochs[number]), worker)

    def do_open(self) -> None:
        self.open(self.random.choice(list(self.workers)))

    def do_new_epoch(self) -> None:
        if self.random.random() < 0.03:
            self.epochs[self.random.randrange(len(SPECS))] += 1
            self.do_open()

    def do_kill(self) -> None:
        if self.random.random() < 0.1:
            worker = self.random.choice(list(self.world.mapped))
            self.workers.pop(worker, None)
            self.world.kill(worker)

    def do_close(self) -> None:
        if self.random.random() < 0.1:
            worker = self.random.choice(list(self.workers))
            del self.workers[worker]
            self.world.close(worker)

    def do_reserve(self) -> None:
        worker, namespace = self.somebody()
        counts: tuple[int, ...] = ()
        keys = self.keys()
        if self.random.random() < 0.2:
            counts = (CHUNK_TOKENS,) * (len(keys) - 1) + (self.random.randrange(1, CHUNK_TOKENS),)
            keys = (*keys[:-1], ChunkKey(b"tail %d of " % counts[-1] + keys[-1]))
        reserved = self.ask(
            ev.Reserve, worker, namespace, keys, token_counts=counts, shards=self.shards(namespace),
            maker=self.random.choice(self.makers), transient=self.random.random() < 0.3,
        )  # fmt: skip
        if reserved.reservation:
            self.saves.append((worker, reserved))

    def do_save(self) -> None:
        self.do_reserve()
        if self.saves:
            worker, reserved = self.saves.pop()
            self.variant += 1
            self.world.commit(worker, reserved, variant=self.variant)

    def do_commit(self) -> None:
        if self.saves:
            worker, reserved = self.saves.pop(self.random.randrange(len(self.saves)))
            if worker in self.workers:
                self.variant += 1
                self.world.commit(worker, reserved, variant=self.variant)

    def do_commit_again(self) -> None:
        if self.saves:
            worker, reserved = self.random.choice(self.saves)
            if worker in self.workers:
                self.world.commit(worker, reserved, variant=self.variant)

    def do_fill(self) -> None:
        self.do_reserve()
        if self.saves:
            worker, reserved = self.saves.pop(self.random.randrange(len(self.saves)))
            if worker in self.workers:
                self.fill(Filling(worker, reserved))

    def do_fill_again(self) -> None:
        if self.fills:
            filling = self.random.choice(self.fills)
            if filling.worker in self.workers:
                self.fills.remove(filling)
                self.fill(Filling(filling.worker, filling.reserved))

    def fill(self, filling: Filling) -> None:
        self.variant += 1
        filling.request = self.world._next_request
        filling.answer = self.world.fill(filling.worker, filling.reserved, variant=self.variant)
        self.fills.append(filling)

    def answer_to(self, filling: Filling) -> Any:
        filling.answer = filling.answer or self.world.answers.get((filling.worker, filling.request))
        return filling.answer

    def do_reuse_rows(self) -> None:
        if self.fills:
            filling = self.random.choice(self.fills)
            filling.reused |= self.answer_to(filling) is None
            self.world.reuse_rows(filling.worker, filling.reserved)

    def do_cut_region(self) -> None:
        if self.fills and self.random.random() < 0.3:
            worker = self.random.choice(self.fills).worker
            self.world.cut_region(worker)

    def do_commit_filled(self) -> None:
        """Whatever became of the Fill: what was not answered well, or too late, is given up."""
        if not self.fills:
            return
        filling = self.fills.pop(self.random.randrange(len(self.fills)))
        if filling.worker not in self.workers:
            return
        if isinstance(self.answer_to(filling), ev.Filled) and not filling.reused:
            self.world.commit_filled(filling.worker, filling.reserved)
        elif self.random.random() < 0.7:
            self.world.abort(filling.worker, filling.reserved)

    def do_abort(self) -> None:
        if self.saves:
            worker, reserved = self.saves.pop(self.random.randrange(len(self.saves)))
            if worker in self.workers:
                self.world.abort(worker, reserved)

    def do_acquire(self) -> None:
        worker, namespace = self.somebody()
        keys = self.keys()
        acquired = self.world.acquire(
            worker, namespace, keys, shards=self.shards(namespace), wait_ms=self.random.choice((0, 100)),
            prefix_only=self.random.random() < 0.7,
        )  # fmt: skip
        if self.random.random() < 0.5:
            matched = self.world.match(worker, namespace, keys)
            leading = 0
            while leading < len(keys) and acquired.outcomes[leading] is Outcome.HIT:
                leading += 1
            assert matched.usable >= leading

    def do_release(self) -> None:
        worker, _ = self.somebody()
        if self.world.leases:
            self.world.release(worker, self.random.choice(list(self.world.leases)))

    def do_renew(self) -> None:
        worker, _ = self.somebody()
        if self.world.leases:
            self.ask(ev.Renew, worker, tuple(self.random.sample(list(self.world.leases), 1)))

    def do_load(self) -> None:
        """Read what a lease names, long after it was taken: it is what it was, or void."""
        for worker, extents in self.world.leases.values():
            for extent in extents:
                if extent.segment in self.world.mapped.get(worker, ()):
                    assert self.world.load(worker, extent) in (extent.checksum, None)

    def do_report(self) -> None:
        worker, namespace = self.somebody()
        self.ask(ev.ReportLoad, worker, namespace, self.keys())

    def operator(self) -> WorkerId:
        """An admin, as long as it lives."""
        if self._operator not in self.world.mapped:
            self._operator = self.world.join("operator", admin=True)
        return self._operator

    def do_recall(self) -> None:
        if self.random.random() < 0.2:
            number = self.random.randrange(len(self.makers))
            dry = self.random.random() < 0.3
            self.ask(ev.Recall, self.operator(), self.makers[number], self.random.choice((0, 0, 1_000)), dry)
            if not dry and self.random.random() < 0.8:  # else it goes on, and is refused
                self.makers[number] = b"%d" % self.random.randrange(10, 1 << 40)

    def do_duplicates(self) -> None:
        worker, namespace = self.somebody()
        keys = self.keys()
        sums = tuple(
            self.world.committed.get((namespace, key, 0), 1) ^ (self.random.random() < 0.2) for key in keys
        )
        self.ask(ev.ReportDuplicates, worker, namespace, keys, sums, (0,), self.random.choice(self.makers))

    def do_scrub(self) -> None:
        start, rate = self.random.random() < 0.5, self.random.choice((0, PAGE, 50 * PAGE))
        self.world.ask(ev.Scrub, self.operator(), start, rate)

    def do_quarantine(self) -> None:
        self.world.ask(ev.ListQuarantine, self.operator(), 10, self.random.random() < 0.5)

    def do_session(self) -> None:
        worker, namespace = self.somebody()
        keys = self.keys()
        keys = (
            keys[: self.world.match(worker, namespace, keys).usable] if self.random.random() < 0.9 else keys
        )
        if not keys:
            return
        explained = self.world.ask(ev.Explain, worker, namespace, b"", keys).chunks
        counts = [history.token_count for history in explained]
        name = b"%d" % self.random.randrange(15)
        info = self.world.session(worker, namespace, name)
        keep = self.random.choice((0, self.random.randrange(len(info.entries) + 1)))
        last = info.entries[keep - 1] if keep else None
        first = last.first_token + last.delta + last.token_count if last else 0
        self.world.append(
            worker, namespace, name, keys, version=info.version, keep=keep, first=first, counts=counts,
            approximate=self.random.random() < 0.2,
        )  # fmt: skip

    def some_session(self, worker: WorkerId, namespace: NamespaceId) -> bytes:
        listed = self.world.ask(ev.ListSessions, worker, namespace).rows
        return self.random.choice(listed).session if listed else b"none"

    def do_truncate(self) -> None:
        worker, namespace = self.somebody()
        info = self.world.session(worker, namespace, self.some_session(worker, namespace))
        if info.entries:
            cut = info.entries[self.random.randrange(len(info.entries)) :][: self.random.randrange(1, 4)]
            begin = cut[0].first_token + cut[0].delta
            count = cut[-1].first_token + cut[-1].delta + cut[-1].token_count - begin
            self.ask(
                ev.Truncate, worker, namespace, info.session, info.version, begin, count, self.random.random() < 0.5
            )  # fmt: skip

    def do_fork(self) -> None:
        worker, namespace = self.somebody()
        new = b"%d" % self.random.randrange(15)
        self.ask(ev.Fork, worker, namespace, self.some_session(worker, namespace), new)

    def do_forget(self) -> None:
        worker, namespace = self.somebody()
        if self.random.random() < 0.5:
            self.ask(ev.Forget, worker, namespace, b"%d" % self.random.randrange(15))
        else:
            self.ask(ev.Forget, worker, namespace, b"", self.keys())

    def do_look(self) -> None:
        worker, namespace = self.somebody()
        self.ask(ev.GetStats, worker)
        self.ask(ev.ListSessions, worker)
        self.ask(ev.Explain, worker, namespace, b"", self.keys())

    def do_hold(self) -> None:
        kinds = (ev.RewriteSlots, ev.CopyIn, ev.FillSlots, ev.Checksum, ev.MoveSlots, ev.CreateSegment)
        self.world.hold = {kind for kind in kinds if self.random.random() < 0.4}

    def do_finish(self) -> None:
        while self.world.held and self.random.random() < 0.8:
            held = self.random.choice(self.world.held)
            fails = "as told" if self.random.random() < 0.1 else ""
            spoil = int(isinstance(held, (ev.MoveSlots, ev.RewriteSlots)) and self.random.random() < 0.1)
            self.world.finish(held, fails=fails, spoil=spoil)

    def do_unmap(self) -> None:
        for push in self.world.take(ev.SegmentsRetired):
            if push.worker in self.workers:
                self.world.unmap(push.worker, push.segments)

    def do_tick(self) -> None:
        self.world.tick(self.random.choice((0, 1, 100, 300, 1_000, 12_000)))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("protection", list(Protection))
def test_random_schedules(seed: int | str, protection: Protection) -> None:
    seed = drawn(seed)
    print(f"KVSTORE_FUZZ_SEED={seed} .venv/bin/pytest tests/unit/core/test_fuzz.py")
    Fuzz(seed, protection).run()


def test_the_fuzz_reaches_what_it_is_for() -> None:
    """A canary: schedules that reach nothing, or are answered with errors only, test nothing."""
    counters: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    for seed in range(4):
        fuzz = Fuzz(seed, Protection.SEALED)
        fuzz.run()
        counters += fuzz.world.store.state.counters
        answers += fuzz.answers
    wanted = (
        *(
            "chunks_saved",
            "chunks_evicted",
            "chunks_incomplete",
            "reservations_expired",
            "reservations_aborted",
        ),
        *("fills", "fills_failed"),
        *("grants_already", "grants_busy", "grants_full", "segments_retired"),
    )
    assert not [name for name in wanted if not counters[name]], counters
    assert min(answers[step] for step in ("do_save", "do_acquire", "do_session", "do_release")) > 5, answers
