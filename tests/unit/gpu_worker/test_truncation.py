"""Conversations that outgrow the window: what is kept, under which keys, and that it is found again."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from kvstore.errors import Unsupported
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.chain import Chain, Part, Seen
from kvstore.gpu_worker.choices import store_key
from kvstore.gpu_worker.truncation import Truncation, Turns, Undecided, View, check_cuttable, view
from kvstore.keys import exact_chain
from kvstore.types import SessionEntry

from .conftest import FakeStore, recorded_logits, text, tiny_llama
from .emulated import EmulatedDevice, Trusting
from .recording import same_to_the_bit

T = 16
SALT = bytes(range(32))
SETTINGS = Truncation(window=256)
Make = Callable[..., BatchEngine]


# ------------------------------------------------------------------------------------------------- what is kept


def placed(kept: View) -> dict[int, int]:
    """All that the newest token attends to, by position."""
    found: dict[int, int] = {}
    chain = kept.chain
    spots = [(chain.position(number), token) for number, token in enumerate(chain.tokens)]
    for one in chain.seen:
        spots += [(one.position + n - one.begin, one.chain.tokens[n]) for n in range(one.begin, one.end)]
    for position, token in spots:
        assert position not in found, f"two tokens at position {position}"
        found[position] = token
    return found


def conversation(seed: int, turns: int, most: int = 60) -> tuple[list[int], list[Turns]]:
    """Tokens that all differ, and the turns as each prompt knows them."""
    choose = random.Random(seed)
    head = choose.randrange(40)
    length, begins, ends, known = head, [], [], []
    for _ in range(turns):
        begins.append(length)
        length += choose.randrange(1, most)
        ends.append(length)
        known.append(Turns(head, tuple(begins), tuple(ends)))
        length += choose.randrange(1, most)
    return list(range(length)), known


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    turns=st.integers(1, 14),
    window=st.sampled_from((128, 200, 256)),
    head=st.sampled_from((None, 0, 4, 20)),
    share=st.sampled_from((0.0, 0.2, 0.5)),
    keep=st.booleans(),
    told=st.booleans(),
    deviating=st.booleans(),
)
def test_what_is_kept_is_the_head_and_the_end_each_token_once(
    seed: int,
    turns: int,
    window: int,
    head: int | None,
    share: float,
    keep: bool,
    told: bool,
    deviating: bool,
) -> None:
    chosen = Truncation(
        window,
        head_tokens=head,
        recompute_share=share,
        keep_positions=keep,
        positions_max=512,
        deviating=deviating,
    )
    choices: dict[bytes, tuple[int, ...]] = {}
    draw = random.Random(seed)
    tokens, known = conversation(seed, turns)
    for each in known:
        prompt = tokens[: each.ends[-1]]
        kept = view(prompt, chosen, each if told else None, chunk_tokens=T, choices=choices)
        if (undecided := kept.undecided) is not None:
            assert deviating and kept.unknown[-1] == undecided.key and undecided.count % T == 0
            assert tuple(kept.remaining[: len(undecided.tokens)]) == undecided.tokens
            for (begin, end), number in zip(undecided.spans, undecided.numbers, strict=True):
                assert undecided.tokens[number : number + end - begin] == tuple(range(begin, end))
            places = sum(end - begin for begin, end in undecided.spans)
            choices[undecided.key] = undecided.choose([draw.random() for _ in range(places)])
            assert undecided.takes(choices[undecided.key])
            kept = view(prompt, chosen, each if told else None, chunk_tokens=T, choices=choices)
            assert kept.undecided is None and set(choices[undecided.key]) <= set(kept.chain.tokens)
        found = placed(kept)
        in_order = [found[position] for position in sorted(found)]
        assert in_order == list(kept.remaining)
        assert len(in_order) + kept.cut_tokens == len(prompt) and in_order[-1] == prompt[-1]
        assert len(in_order) <= chosen.prompt_tokens
        first = len(in_order) - next(
            (n for n, t in enumerate(reversed(in_order)) if t < len(prompt) - 1 - n), 0
        )
        assert in_order[:first] == list(range(first)) or kept.cuts
        if not keep:
            assert sorted(found) == list(range(len(found)))
        assert max(found) < 512 + window
        assert len(kept.chain.keys(SALT, T, len(kept.chain.tokens) // T)) == len(kept.chain.tokens) // T


def test_whole_turns_go_behind_the_head() -> None:
    """Head of 30; turns begin at 30, 80, 130, 180; the prompt of the last ends at 200, too long for 192."""
    turns = Turns(30, (30, 80, 130, 180), (60, 110, 160, 200))
    kept = view(list(range(200)), SETTINGS, turns, chunk_tokens=T)
    # 128 tokens are kept at most: 30 and the last 98 begin inside of the turn at 80, so the one at 130 is the first
    assert kept.remaining == (*range(30), *range(130, 200)) and kept.cut_tokens == 100 and kept.cuts == 1
    chain = kept.chain
    # Own: one full chunk of the head, then all from the last full chunk before the turn that is new
    assert chain.tokens == (*range(16), *range(176, 200))
    assert chain.jumps == ((0, 0), (16, 76))
    assert [(one.begin, one.end, one.position, one.at) for one in chain.seen] == [
        (16, 30, 16, 16),  # the rest of the head
        (130, 176, 30, 16),  # begins inside of a chunk
    ]
    assert all(one.chain.tokens == tuple(range(176)) for one in chain.seen)
    assert [part.delta for part in chain.seen[1].parts(SALT, T)] == [-100] * 3


def test_a_text_without_a_head_gets_a_new_one() -> None:
    kept = view(list(range(193)), SETTINGS, chunk_tokens=T)
    assert kept.cut_tokens == 80 and kept.remaining == tuple(range(80, 193))
    assert kept.chain.tokens[:T] == tuple(range(80, 96)), "the first chunk that remains is computed anew"
    assert kept.chain.exact_chunks(T) == 1
    assert kept.chain.keys(SALT, T, 1) == exact_chain(SALT, list(range(80, 96)), T)
    assert [(one.begin, one.position) for one in kept.chain.seen] == [(96, 16)]


def test_a_share_is_computed_anew_right_behind_the_head() -> None:
    turns = Turns(30, (30, 80, 130, 180), (60, 110, 160, 200))
    kept = view(list(range(200)), replace(SETTINGS, recompute_share=0.3), turns, chunk_tokens=T)
    # 30 of the head and 21 of 70 fill three chunks and more: four
    assert kept.chain.tokens[:64] == (*range(30), *range(130, 164))
    assert [(one.begin, one.end, one.position) for one in kept.chain.seen] == [(164, 176, 64)]


def test_positions_stay_with_a_gap_while_there_are_positions() -> None:
    turns = Turns(30, (30, 80, 130, 180), (60, 110, 160, 200))
    stay = replace(SETTINGS, keep_positions=True, positions_max=2000)
    kept = view(list(range(200)), stay, turns, chunk_tokens=T)
    assert {part.delta for one in kept.chain.seen for part in one.parts(SALT, T)} == {0}
    assert kept.chain.position(len(kept.chain.tokens) - 1) == 199
    close = replace(stay, positions_max=300)
    assert view(list(range(200)), close, turns, chunk_tokens=T).chain.position(39) == 99


def test_what_was_kept_of_a_cut_is_kept_from_its_first_bytes_ten_cuts_later() -> None:
    """Every piece names the chain that computed it, with one delta from there: nothing is moved twice."""
    tokens, known = conversation(5, 60, most=50)
    kept = view(tokens[: known[-1].ends[-1]], SETTINGS, known[-1], chunk_tokens=T)
    assert kept.cuts >= 10
    for one in kept.chain.seen:
        assert one.chain.tokens[one.begin] in kept.remaining
        for part in one.parts(SALT, T):
            assert part.begin == one.chain.position(part.chunk * T + part.first)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt_share": 1.0}, "prompt_share is 1.0"),
        ({"kept_share": 0.8}, "must be below prompt_share"),
        ({"recompute_share": 1.5}, "recompute_share is 1.5"),
        ({"window": -4}, "window is -4: 0.5 of it, which is kept, must be at least 1 token"),
        ({"window": 1}, "window is 1"),
        ({"head_tokens": 128}, "head_tokens is 128"),
        ({"keep_positions": True}, "positions_max is 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(SETTINGS, **change)


@pytest.mark.parametrize("head", [97, 128, 400])
def test_a_system_message_that_leaves_no_room_for_the_question_is_refused(
    head: int, model: LlamaForCausalLM, engines: Make
) -> None:
    engine = engines(model, None, chunk_tokens=T, truncation=SETTINGS)
    prompt = text(head + 200, seed=5)
    turns = Turns(head, (head,), ())
    with pytest.raises(ValueError, match=f"system message, with {head}, may be 75%"):
        engine.add(prompt, max_new_tokens=1, turns=turns)
    engine.add(text(head + 10, seed=5)[-180:], max_new_tokens=1, turns=Turns(100, (100,), ()))  # is not cut
    engine.add(prompt[-296:], max_new_tokens=1, turns=Turns(96, (96,), ()))
    other = engines(model, None, chunk_tokens=T, truncation=replace(SETTINGS, head_tokens=4))
    other.add(prompt, max_new_tokens=1, turns=turns)


# ---------------------------------------------------------------------------------------------------------- keys


def derived(**changes: Any) -> tuple[bytes, ...]:
    """The keys of a chain's three chunks; the first is exact."""
    other = Chain(changes.pop("others", tuple(range(100, 164))))
    seen = {"chain": other, "begin": 20, "end": 60, "position": 16, "at": 16} | changes.pop("seen", {})
    own = {"tokens": tuple(range(48)), "jumps": ((0, 0), (16, 56)), "seen": (Seen(**seen),)} | changes
    return tuple(Chain(**own).keys(SALT, T, 3))


@pytest.mark.parametrize(
    "change",
    [
        {"others": tuple(range(101, 165))},
        {"seen": {"begin": 21}},
        {"seen": {"end": 59}},
        {"seen": {"position": 17}},
        {"seen": {"at": 20}},
        {"seen": {"maker": b"another"}},
        {"seen": {"chain": Chain(tuple(range(100, 164)), root=b"tenant")}},
        {"seen": {"chain": Chain(tuple(range(100, 164)), jumps=((0, 3),))}},
        {"jumps": ((0, 0), (16, 57))},
        {"jumps": ((0, 0), (16, 56), (20, 80))},
        {"method": b"another"},
        {"seen": {"begin": 4, "end": 44}},  # the same count elsewhere
        {"tokens": (*range(47), 7)},
    ],
    ids=str,
)
def test_each_thing_that_a_chunk_depends_on_is_in_its_key(change: dict[str, Any]) -> None:
    plain, changed = derived(), derived(**change)
    assert plain[0] == changed[0] == exact_chain(SALT, list(range(T)), T)[0]
    if "tokens" in change:
        assert plain[1] == changed[1]
    else:
        assert plain[1] != changed[1]
    assert plain[2] != changed[2]


def test_a_derived_chunk_has_no_exact_key() -> None:
    assert set(derived()[1:]).isdisjoint(exact_chain(SALT, list(range(48)), T))
    assert Chain(tuple(range(48))).keys(SALT, T, 3) == exact_chain(SALT, list(range(48)), T)


def test_two_gaps_of_one_size_at_two_places_do_not_meet() -> None:
    one, other = (derived(seen={"begin": 20, "end": 52, "position": position}) for position in (16, 24))
    assert one[1] != other[1]


def test_keys_grow_with_the_answer() -> None:
    other = Chain(tuple(range(100, 164)))
    chain = Chain(tuple(range(40)), jumps=((0, 0), (16, 56)), seen=(Seen(other, 20, 60, 16, 16),))
    keys: list[Any] = []
    chain.extend(keys, list(range(40)), SALT, T, 2)
    chain.extend(keys, list(range(48)), SALT, T, 3)
    assert tuple(keys) == derived()


def test_a_manifest_names_what_is_seen_between_the_head_and_the_rest() -> None:
    other = Chain(tuple(range(100, 164)))
    chain = Chain(tuple(range(48)), jumps=((0, 0), (16, 56)), seen=(Seen(other, 20, 60, 16, 16),))
    own = [SessionEntry(key, number * T, T) for number, key in enumerate(chain.keys(SALT, T, 3))]
    entries = chain.manifest(own, SALT, T)
    assert [(one.first_token, one.token_count, one.delta, one.approximate) for one in entries] == [
        (0, 16, 0, False),
        (20, 12, -4, True),
        (32, 16, -4, True),
        (48, 12, -4, True),
        (56, 16, 0, False),
        (72, 16, 0, False),
    ]
    assert [one.first_token + one.delta for one in entries] == [0, 16, 28, 44, 56, 72]


# -------------------------------------------------------------------------------------------------------- engines


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(layers=3)


def disturbed(engine: BatchEngine, prompts: Sequence[Sequence[int]], turns: Turns) -> list[tuple[int, ...]]:
    """The answers to prompts that run beside each other while one is aborted and the newest twice has to make room."""
    numbers = [engine.add(prompt, 20, turns=turns) for prompt in prompts]
    dropped = engine.add(prompts[0], 20, turns=turns)
    got: dict[int, list[int]] = {number: [] for number in (*numbers, dropped)}
    steps = 0
    while engine.live:
        for output in engine.step():
            got[output.request].append(output.token)
        engine.check_integrity()
        steps += 1
        if steps == 2:
            engine.abort(dropped)
        if steps in (3, 9) and engine.running > 1:
            newest = engine._scheduler.running[-1]
            engine._scheduler.stop(newest)
            engine._scheduler.waiting.appendleft(newest)
            engine.check_integrity()
    return [tuple(got[number]) for number in numbers]


class Chat:
    """A conversation with an engine, whose answers become part of it."""

    def __init__(self, engine: BatchEngine, *, session: str = "s", head: int = 20) -> None:
        self.engine, self.session, self.head = engine, session, head
        self.tokens = text(head, seed=99)
        self.begins: list[int] = []
        self.ends: list[int] = []

    def turn(self, number: int, *, length: int = 30, answer: int = 12) -> Any:
        self.begins.append(len(self.tokens))
        self.tokens += text(length, seed=number)
        self.ends.append(len(self.tokens))
        turns = Turns(self.head, tuple(self.begins), tuple(self.ends))
        done = self.engine.turn(self.session, self.tokens, answer, turns=turns)
        self.tokens += done.tokens
        self.engine.check_integrity()
        return done

    def parts_of_next(self, store: FakeStore, length: int = 30) -> list[Part]:
        """What the next prompt is going to see beside its own tokens, as the store names it."""
        ((salt, _),) = store.sessions
        turns = Turns(self.head, (*self.begins, len(self.tokens)), (*self.ends, len(self.tokens) + length))
        kept = view([*self.tokens, *[0] * length], SETTINGS, turns, chunk_tokens=T)
        return [part for one in kept.chain.seen for part in one.parts(salt, T)]

    def again(self, engine: BatchEngine) -> Chat:
        """The same conversation, as far as it is, with another engine."""
        other = Chat(engine, session=self.session, head=self.head)
        other.tokens, other.begins, other.ends = list(self.tokens), list(self.begins), list(self.ends)
        return other


def logits_of(model: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0, -1]


def test_a_conversation_goes_on_beyond_its_window(
    model: LlamaForCausalLM, store: FakeStore, engines: Make
) -> None:
    engine = engines(model, store, chunk_tokens=T, pool_chunks=48, truncation=SETTINGS)
    chat = Chat(engine)
    cut = []
    for number in range(16):
        done = chat.turn(number)
        assert len(done.tokens) == 12
        cut.append(done.cut_tokens)
        assert engine.flush(30)
    assert cut[0] == 0 and cut == sorted(cut) and len(set(cut)) >= 4, cut
    assert engine.counters["truncations_recomputed"] == 0
    assert engine.counters["requests_cut"] == sum(each > 0 for each in cut)
    assert {True, False} == set(store.derived.values())


def test_a_restarted_worker_finds_all_of_it_again(
    model: LlamaForCausalLM, store: FakeStore, engines: Make
) -> None:
    """The same tokens, the same answers to the bit, and next to nothing computed."""
    first = engines(model, store, chunk_tokens=T, pool_chunks=48, truncation=SETTINGS)
    chat = Chat(first)
    for number in range(13):
        chat.turn(number)
        assert first.flush(30)
    second = engines(model, store, chunk_tokens=T, pool_chunks=48, truncation=SETTINGS)
    one, other = chat.again(first), chat.again(second)
    with recorded_logits(model) as seen:
        mine = one.turn(50)
        count = len(seen)
        theirs = other.turn(50)
    assert mine.tokens == theirs.tokens and mine.cut_tokens == theirs.cut_tokens > 0
    assert same_to_the_bit(seen[:count], seen[count:])
    assert second.counters["truncations_recomputed"] == 0
    kept = second.counters["restored_tokens"]
    assert second.counters["computed_tokens"] < 30 + 12 + 12 + 2 * T < kept


def test_what_cannot_be_had_is_computed_from_what_remains(
    model: LlamaForCausalLM, store: FakeStore, engines: Make
) -> None:
    first = engines(model, store, chunk_tokens=T, pool_chunks=48, truncation=SETTINGS)
    chat = Chat(first)
    for number in range(13):
        chat.turn(number)
        assert first.flush(30)
    engine = engines(model, store, chunk_tokens=T, pool_chunks=48, truncation=SETTINGS)
    other = chat.again(engine)
    parts = chat.parts_of_next(store)
    assert {part.key for part in parts} <= {key for _, key in store.chunks}
    store.forget(parts[len(parts) // 2].key)
    with recorded_logits(model) as seen:
        done = other.turn(50, answer=1)
    assert engine.counters["truncations_recomputed"] == 1 and done.cut_tokens > 0
    turns = Turns(20, tuple(other.begins), tuple(other.ends))
    kept = view(other.tokens[:-1], SETTINGS, turns, chunk_tokens=T)
    wanted = logits_of(model, list(kept.remaining))
    assert (seen[-1][0, -1] - wanted).abs().max() < 1e-3, "not what a model computes from what remains"
    assert engine.flush(30)
    after = engines(model, store, chunk_tokens=T, pool_chunks=48, truncation=SETTINGS)
    chat.again(after).turn(50, answer=1)
    assert after.counters["restored_tokens"] > 0, "what was computed instead is not found again"


def test_without_a_store_and_with_an_empty_pool_it_is_what_remains(
    model: LlamaForCausalLM, engines: Make
) -> None:
    engine = engines(model, None, chunk_tokens=T, pool_chunks=48, truncation=SETTINGS)
    chat = Chat(engine)
    for number in range(9):
        done = chat.turn(number)
    assert done.cut_tokens > 0 and engine.counters["truncations_recomputed"] > 0


def test_the_pool_alone_serves_a_cut_conversation(model: LlamaForCausalLM, engines: Make) -> None:
    engine = engines(model, None, chunk_tokens=T, pool_chunks=128, retain=True, truncation=SETTINGS)
    chat = Chat(engine)
    for number in range(14):
        done = chat.turn(number)
    assert done.cut_tokens > 0 and engine.counters["truncations_recomputed"] == 0
    assert engine.counters["adopted_tokens"] > 1000


def test_cut_requests_share_a_step_with_others(model: LlamaForCausalLM, engines: Make) -> None:
    """Side by side, preempted in a small pool, and aborted: the same answers as alone."""
    turns = Turns(20, (20, 100, 200, 300), (90, 190, 290, 330))
    prompts = [text(20, seed=99) + text(310, seed=seed) for seed in (1, 2, 3)]

    def warm(engine: BatchEngine) -> None:
        for number, prompt in enumerate(prompts):
            engine.turn(f"s{number}", prompt[:180], 1)
            engine.turn(f"s{number}", prompt[:290], 1, turns=Turns(20, turns.begins[:3], turns.ends[:3]))

    store = FakeStore()
    alone = engines(model, store, chunk_tokens=T, pool_chunks=64, truncation=SETTINGS)
    warm(alone)
    assert alone.flush(30)
    wanted = [alone.turn("", prompt, 20, turns=turns).tokens for prompt in prompts]
    for chunks in (64, 18):
        engine = engines(model, store, chunk_tokens=T, pool_chunks=chunks, truncation=SETTINGS)
        assert disturbed(engine, prompts, turns) == wanted
        assert engine.counters["truncations_recomputed"] == 0


@pytest.mark.parametrize("layer", range(3))
def test_a_load_that_fails_at_any_layer_costs_time_only(
    model: LlamaForCausalLM, store: FakeStore, engines: Make, layer: int
) -> None:
    first = engines(model, store, chunk_tokens=T, pool_chunks=48, truncation=SETTINGS)
    chat = Chat(first)
    for number in range(9):
        chat.turn(number)
        assert first.flush(30)
    engine = engines(model, store, chunk_tokens=T, pool_chunks=48, truncation=SETTINGS)
    store.on_copy = lambda number: number != layer
    other = chat.again(engine)
    with recorded_logits(model) as seen:
        other.turn(50, answer=1)
    store.on_copy = lambda number: True
    turns = Turns(20, tuple(other.begins), tuple(other.ends))
    kept = view(other.tokens[:-1], SETTINGS, turns, chunk_tokens=T)
    assert (seen[-1][0, -1] - logits_of(model, list(kept.remaining))).abs().max() < 1e-3
    assert store.leases == 0


# ----------------------------------------------------------------------------------------------- what deviates most

DEVIATING = replace(SETTINGS, recompute_share=0.5, deviating=True)


def test_the_runs_that_deviate_most_are_chosen() -> None:
    cut = Undecided(b"", tuple(range(60)), ((0, 0),), ((10, 30), (50, 62)), (0, 20), count=16)
    places = [*range(10, 30), *range(50, 62)]
    distances = [0.1] * len(places)
    for place in (13, 50, 51, 52, 53, 27):
        distances[places.index(place)] = 5.0
    chosen = cut.choose(distances)
    assert cut.takes(chosen) and {10, 11, 12, 13, 26, 27, 28, 29, 50, 51, 52, 53} < set(chosen)
    assert chosen == cut.choose(distances), "the same numbers, another choice"
    assert not cut.takes(chosen[1:]) and not cut.takes((*chosen[1:], 40)) and not cut.takes(chosen[:1] * 16)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    head=st.sampled_from((0, 4, 20)),
    share=st.sampled_from((0.3, 0.5, 0.8)),
    mass=st.sampled_from((0.0, 0.2)),
)
def test_each_token_that_is_computed_sees_what_stands_before_it(
    seed: int, head: int, share: float, mass: float
) -> None:
    """Whatever was chosen at each of many cuts: tokens are their own numbers in the conversation here."""
    tokens, known = conversation(seed, 24)
    how = replace(DEVIATING, recompute_share=share, mass_share=mass, head_tokens=head)
    choices: dict[bytes, tuple[int, ...]] = {}
    for turns in known:
        prompt = tokens[: turns.ends[-1]]
        kept = view(prompt, how, turns, chunk_tokens=T, choices=choices)
        while kept.undecided is not None:
            asked = kept.undecided
            places = [place for low, high in asked.spans for place in range(low, high)]
            choices[asked.key] = asked.choose([float(place * 7_919 % 101) for place in places])
            kept = view(prompt, how, turns, chunk_tokens=T, choices=choices)
        assert not kept.unknown
        rank = {token: number for number, token in enumerate(kept.remaining)}
        own = kept.chain.tokens
        there = set(own)
        for piece in kept.chain.seen:
            old = piece.chain.tokens[piece.begin : piece.end]
            assert list(old) == list(range(old[0], old[0] + len(old))), "a piece is of one place"
            assert not there.intersection(old), "seen twice"
            there.update(old)
            for number, token in enumerate(own):
                assert (number >= piece.at) == (token > old[0]), f"{token} and {old[0]} to {old[-1]}"
            if not kept.stays:
                assert piece.position == rank[old[0]]
        assert there == set(kept.remaining), "something that is kept is seen by nobody, or something else is"
        if not kept.stays:
            assert [kept.chain.position(number) for number in range(len(own))] == [rank[one] for one in own]


@pytest.mark.parametrize("head", [20, 0])
def test_all_of_it_computed_anew_is_what_remains(
    model: LlamaForCausalLM, store: FakeStore, engines: Make, head: int
) -> None:
    """Scattered among what is kept, at their positions, each sees what stands before it."""
    settings = replace(DEVIATING, recompute_share=1.0)
    engine = engines(model, store, chunk_tokens=T, pool_chunks=64, truncation=settings)
    chat = Chat(engine, head=head)
    whole = 0
    for number in range(16):
        with recorded_logits(model) as seen:
            done = chat.turn(number, length=31, answer=1)
        assert engine.flush(30)
        if not done.cut_tokens:
            continue
        turns = Turns(head, tuple(chat.begins), tuple(chat.ends))
        kept = view(chat.tokens[:-1], settings, turns, chunk_tokens=T, choices=engine._choices)
        assert kept.undecided is None
        if not kept.chain.seen:  # else some of what is less than a chunk is as it was
            whole += 1
            apart = (seen[-1][0, -1] - logits_of(model, list(kept.remaining))).abs().max()
            assert apart < 1e-3, "not what a model computes from what remains"
    assert whole > 2 and engine.counters["truncations_recomputed"] == 0
    assert engine.counters["cuts_decided"] >= 4 and engine.counters["probed_tokens"] > 0


def test_a_choice_is_found_again_by_a_worker_that_knows_nothing(
    model: LlamaForCausalLM, store: FakeStore, engines: Make
) -> None:
    options: dict[str, Any] = {"chunk_tokens": T, "pool_chunks": 64, "truncation": DEVIATING}
    first = engines(model, store, **options)
    chat = Chat(first)
    for number in range(13):
        chat.turn(number)
        assert first.flush(30)
    decided = first.counters["cuts_decided"]
    assert decided >= 3 and first.save_counters["choices_saved"] == decided
    second, third = engines(model, store, **options), engines(model, store, **options)
    one, other = chat.again(first), chat.again(second)
    with recorded_logits(model) as seen:
        mine = one.turn(50)
        count = len(seen)
        theirs = other.turn(50)
    assert mine.tokens == theirs.tokens and mine.cut_tokens == theirs.cut_tokens > 0
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(seen[:count], seen[count:], strict=True))
    assert second.counters["truncations_recomputed"] == 0
    assert second.counters["cuts_decided"] <= 1, "what was found out is found out again"
    assert second.counters["restored_tokens"] > second.counters["computed_tokens"]
    # Choices that are lost, or no choices, cost time only
    keys = {store_key(salt, key) for salt, _ in store.sessions for key in first._choices}
    for name, shard in list(store.chunks.items()):
        if name[1] in keys:
            store.chunks[name] = shard ^ 0xFF
    lost = chat.again(third).turn(50)
    assert (
        len(lost.tokens) == 12 and third.counters["cuts_decided"] + third.counters["truncations_recomputed"]
    )


def test_without_room_to_look_the_first_are_chosen_and_it_goes_on(
    model: LlamaForCausalLM, store: FakeStore, engines: Make
) -> None:
    engine = engines(model, store, chunk_tokens=T, pool_chunks=17, truncation=DEVIATING)
    chat = Chat(engine)
    for number in range(12):
        assert len(chat.turn(number).tokens) == 12
        assert engine.flush(30)
    assert engine.counters["requests_cut"] > 3


def test_deviating_requests_share_steps_are_preempted_and_aborted(
    model: LlamaForCausalLM, store: FakeStore, engines: Make
) -> None:
    options: dict[str, Any] = {"chunk_tokens": T, "truncation": DEVIATING}
    alone = engines(model, store, pool_chunks=64, **options)
    chats = [Chat(alone, session=f"s{number}") for number in range(3)]
    for number in range(8):
        for offset, chat in enumerate(chats):
            chat.turn(100 * offset + number, answer=1)
            assert alone.flush(30)
    turns = Turns(20, (*chats[0].begins, len(chats[0].tokens)), (*chats[0].ends, len(chats[0].tokens) + 30))
    prompts = [[*chat.tokens, *text(30, seed=7)] for chat in chats]
    wanted = [alone.turn("", prompt, 20, turns=turns).tokens for prompt in prompts]
    assert alone.flush(30) and alone.counters["cuts_decided"] >= 3
    for late in (False, True):
        device = EmulatedDevice() if late else None
        engine = engines(model, store, pool_chunks=64, device=device, verdicts=Trusting(), **options)
        assert disturbed(engine, prompts, turns) == wanted
        assert engine.counters["truncations_recomputed"] == 0
        assert device is None or not device.races


@pytest.mark.parametrize("settings", [SETTINGS, DEVIATING], ids=["place", "deviating"])
def test_ten_cuts_drift_no_further_than_two(
    model: LlamaForCausalLM, store: FakeStore, engines: Make, settings: Truncation
) -> None:
    """How far an answer is from what a model makes of the text that remains: reuse costs something, and no more the
    tenth time."""
    engine = engines(model, store, chunk_tokens=T, pool_chunks=64, truncation=settings)
    chat = Chat(engine)
    apart: list[float] = []
    number = cuts = 0
    while cuts < 10:
        with recorded_logits(model) as seen:
            chat.turn(number, answer=2)
        assert engine.flush(30)
        turns = Turns(20, tuple(chat.begins), tuple(chat.ends))
        kept = view(chat.tokens[:-2], settings, turns, chunk_tokens=T, choices=engine._choices)
        if kept.cuts > cuts:
            cuts = kept.cuts
            mine = seen[-2][0, -1].log_softmax(-1)
            wanted = logits_of(model, list(kept.remaining)).log_softmax(-1)
            apart.append(float((wanted.exp() * (wanted - mine)).sum()))
        number += 1
    assert engine.counters["truncations_recomputed"] == 0
    assert sum(apart[-3:]) <= 2 * sum(apart[:3]), apart


def test_models_whose_keys_cannot_be_moved_are_refused(engines: Make) -> None:
    model = tiny_llama(layers=2)
    model.config.rope_parameters = {**model.config.rope_parameters, "mrope_section": [4, 4]}
    with pytest.raises(Unsupported, match="M-RoPE"):
        engines(model, None, chunk_tokens=T, truncation=SETTINGS)
    for config, says in (
        (GptOssConfig(), "config.model_type=gpt_oss.*sinks are learned"),
        (MistralConfig(sliding_window=4096), "config.sliding_window=4096.*a sliding window"),
        (Gemma3TextConfig(), "config.layer_types"),
        (Llama4TextConfig(), "attention_chunk_size"),
    ):
        with pytest.raises(Unsupported, match=says):
            check_cuttable(config)
    for fine in (LlamaConfig(), MistralConfig(sliding_window=None), Qwen2Config(), Qwen3Config()):
        check_cuttable(fine)
    window = LlamaForCausalLM(tiny_llama(layers=2).config)
    window.config.sliding_window = 64
    with pytest.raises(Unsupported, match=r"config.sliding_window=64"):
        engines(window, None, chunk_tokens=T, truncation=SETTINGS)
    with pytest.raises(ValueError, match=r"truncation.window is 4096"):
        engines(tiny_llama(layers=2), None, chunk_tokens=T, truncation=Truncation(4096))


def test_an_answer_ends_where_the_window_does(model: LlamaForCausalLM, engines: Make) -> None:
    engine = engines(model, None, chunk_tokens=T, pool_chunks=48, truncation=SETTINGS)
    prompt = text(400)
    done = engine.turn("", prompt, 500)
    assert done.finish == "length" and done.cut_tokens > 0
    assert len(done.tokens) == 256 - (400 - done.cut_tokens)
    number = engine.add(text(200), 20, cut=False)
    assert engine.request(number).cut_tokens == 0


def test_a_tail_of_a_cut_conversation_is_nobody_elses(model: LlamaForCausalLM, engines: Make) -> None:
    """Behind the same full chunk and with the same tokens: one saw what was kept of a conversation, the other not."""
    engine = engines(model, None, chunk_tokens=T, pool_chunks=128, retain=True, truncation=SETTINGS)
    prompt = text(200)
    turns = Turns(T, (T, 100, 193), (90, 180, 200))
    engine.turn("", prompt[:192], 1, turns=Turns(T, turns.begins[:2], turns.ends[:2]))
    cut = engine.turn("", prompt, 1, turns=turns)
    assert cut.cut_tokens > 0 and engine.counters["truncations_recomputed"] == 0
    kept = view(prompt, SETTINGS, turns, chunk_tokens=T)
    own = list(kept.chain.tokens)
    assert len(own) == T + 8 and kept.chain.exact_chunks(T) == 1
    with recorded_logits(model) as seen:
        engine.turn("", [*own, 7], 1)
    assert (seen[-1][0, -1] - logits_of(model, [*own, 7])).abs().max() < 1e-3


def test_nothing_is_read_before_it_is_there_on_a_device_that_runs_late(
    model: LlamaForCausalLM, store: FakeStore, engines: Make
) -> None:
    """What is gathered is loaded by a stream, and read by attention; hits are checked beside it."""
    plain = Chat(engines(model, FakeStore(), chunk_tokens=T, pool_chunks=48, truncation=SETTINGS))
    for number in range(10):
        plain.turn(number)
        assert plain.engine.flush(30)
    device = EmulatedDevice()
    options: dict[str, Any] = {
        "chunk_tokens": T,
        "pool_chunks": 48,
        "truncation": SETTINGS,
        "canary_every": 1,  # of which hits are drawn for less depends on keys, and these on the machine
    }
    engine = engines(model, store, device=device, verdicts=Trusting(), **options)
    chat = Chat(engine)
    for number in range(10):
        chat.turn(number)
        assert engine.flush(30)
    assert not device.races and not engine.alarm
    assert engine.counters["truncations_recomputed"] == 0 and engine.counters["restored_tokens"] > 500
    assert engine.counters["canary_checks"] > 0
    assert chat.tokens == plain.tokens
