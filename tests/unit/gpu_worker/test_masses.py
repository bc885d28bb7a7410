"""Old tokens that stay in a cut conversation since others attend to them: what is recorded, chosen, and found again."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from kvstore.gpu_worker import masses
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.masses import OBSERVED, MassBook, Observation
from kvstore.gpu_worker.positions import Positions
from kvstore.gpu_worker.truncation import MASS_RUN_TOKENS, Truncation, Turns, view
from kvstore.kernels.rotate import rotate, rotation
from kvstore.kernels.stretches import Stretch

from .conftest import FakeStore, recorded_logits, text, tiny_llama
from .emulated import EmulatedDevice, Trusting
from .test_truncation import SALT, Chat, T, conversation, disturbed, logits_of, placed

SETTINGS = Truncation(window=256, mass_share=0.3)
BUDGET = SETTINGS.mass_tokens
Make = Callable[..., BatchEngine]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(layers=3)


def planted(engine: BatchEngine, spans: list[tuple[int, int]]) -> None:
    """These tokens get more attention than all others."""
    assert engine._masses is not None

    def find(tokens: Any, root: bytes = b"") -> Any:
        found = np.full(len(tokens), 0.01, np.float32)
        for begin, end in spans:
            found[begin:end] = 1.0
        return found

    engine._masses.find = find  # type: ignore[method-assign]


# -------------------------------------------------------------------------------------------------- what is chosen


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    turns=st.integers(1, 14),
    window=st.sampled_from((128, 200, 256)),
    head=st.sampled_from((None, 0, 4, 20)),
    share=st.sampled_from((0.0, 0.2, 0.5)),
    mass=st.sampled_from((0.2, 0.4)),
    keep=st.booleans(),
    told=st.booleans(),
    deviating=st.booleans(),
    forgotten=st.booleans(),
)
def test_what_is_kept_is_head_chosen_runs_and_end_each_token_once(
    seed: int,
    turns: int,
    window: int,
    head: int | None,
    share: float,
    mass: float,
    keep: bool,
    told: bool,
    deviating: bool,
    forgotten: bool,
) -> None:
    chosen = Truncation(
        window,
        head_tokens=head,
        recompute_share=share,
        keep_positions=keep,
        positions_max=512,
        deviating=deviating,
        mass_share=mass,
    )
    choices: dict[bytes, tuple[int, ...]] = {}
    draw = random.Random(seed)
    tokens, known = conversation(seed, turns)
    for each in known:
        prompt = tokens[: each.ends[-1]]
        while True:
            kept = view(prompt, chosen, each if told else None, chunk_tokens=T, choices=choices)
            if (undecided := kept.undecided) is None:
                break
            assert kept.unknown[-1] == undecided.key
            places = sum(end - begin for begin, end in undecided.spans)
            choices[undecided.key] = undecided.choose([draw.random() for _ in range(places)])
            if undecided.by_mass:
                assert undecided.count <= chosen.mass_tokens
                if forgotten and draw.random() < 0.3:
                    choices[undecided.key] = ()
            assert undecided.takes(choices[undecided.key])
        found = placed(kept)
        in_order = [found[position] for position in sorted(found)]
        assert in_order == list(kept.remaining) == sorted(in_order), "not in the order of the conversation"
        assert len(in_order) + kept.cut_tokens == len(prompt) and in_order[-1] == prompt[-1]
        assert len(in_order) <= chosen.prompt_tokens
        assert [number for begin, end in kept.spans for number in range(begin, end)] == in_order
        if not keep:
            assert sorted(found) == list(range(len(found)))
        assert len(kept.chain.keys(SALT, T, len(kept.chain.tokens) // T)) == len(kept.chain.tokens) // T
        if draw.random() < 0.2 and choices:  # a worker that lost one computes the rest all the same
            del choices[draw.choice(sorted(choices))]


def test_two_choices_do_not_meet_under_one_key() -> None:
    turns = Turns(30, (30, 80, 130, 180), (60, 110, 160, 200))
    prompt = list(range(200))
    open_ = view(prompt, SETTINGS, turns, chunk_tokens=T).undecided
    assert open_ is not None and open_.by_mass and open_.spans[0][0] == 30
    views = [
        view(prompt, SETTINGS, turns, chunk_tokens=T, choices={open_.key: tuple(range(begin, begin + 16))})
        for begin in (46, 62)
    ]
    assert [kept.spans[1] for kept in views] == [(46, 62), (62, 78)]
    one, other = (kept.chain.keys(SALT, T, len(kept.chain.tokens) // T) for kept in views)
    exact = views[0].chain.exact_chunks(T)
    assert exact == 1 and one[:exact] == other[:exact] and set(one[exact:]).isdisjoint(other[exact:])


def test_what_has_the_largest_mass_stays_between_head_and_end(
    model: LlamaForCausalLM, store: FakeStore, engines: Make
) -> None:
    engine = engines(model, store, chunk_tokens=T, pool_chunks=64, truncation=SETTINGS)
    chat = Chat(engine)
    begin = 20 + MASS_RUN_TOKENS
    planted(engine, [(begin, begin + MASS_RUN_TOKENS)])
    cuts = 0
    for number in range(14):
        done = chat.turn(number)
        assert engine.flush(30)
        if done.cut_tokens:
            cuts += 1
            turns = Turns(20, tuple(chat.begins), tuple(chat.ends))
            kept = view(chat.tokens[:-12], SETTINGS, turns, chunk_tokens=T, choices=engine._choices)
            assert kept.undecided is None and kept.cut_tokens == done.cut_tokens
            assert any(a <= begin and begin + MASS_RUN_TOKENS <= b for a, b in kept.spans[1:-1]), kept.spans
            assert sum(b - a for a, b in kept.spans[1:-1]) <= BUDGET
    assert cuts > 4 and engine.counters["cuts_by_mass"] >= 3
    assert engine.counters["truncations_recomputed"] == 0


@pytest.mark.parametrize("keep", [False, True])
def test_where_kv_depends_on_its_token_alone_it_is_what_remains(
    store: FakeStore, engines: Make, keep: bool
) -> None:
    """A model of one layer: moved and scattered KV is then what a model makes of the text that remains."""
    model = tiny_llama(layers=1)
    chosen = replace(SETTINGS, keep_positions=keep, positions_max=model.config.max_position_embeddings)
    engine = engines(model, store, chunk_tokens=T, pool_chunks=64, truncation=chosen)
    chat = Chat(engine)
    cuts = 0
    for number in range(16):
        with recorded_logits(model) as seen:
            done = chat.turn(number, answer=1)
        assert engine.flush(30)
        if not done.cut_tokens:
            continue
        turns = Turns(20, tuple(chat.begins), tuple(chat.ends))
        kept = view(chat.tokens[:-1], chosen, turns, chunk_tokens=T, choices=engine._choices)
        assert kept.undecided is None
        cuts += len(kept.spans) > 2
        if not kept.stays:
            apart = (seen[-1][0, -1] - logits_of(model, list(kept.remaining))).abs().max()
            assert apart < 1e-3, "not what a model computes from what remains"
    assert cuts > 3 and engine.counters["truncations_recomputed"] == 0


def test_all_of_it_computed_anew_is_what_remains(
    model: LlamaForCausalLM, store: FakeStore, engines: Make
) -> None:
    chosen = replace(SETTINGS, recompute_share=1.0, deviating=True)
    engine = engines(model, store, chunk_tokens=T, pool_chunks=64, truncation=chosen)
    chat = Chat(engine)
    whole = 0
    for number in range(16):
        with recorded_logits(model) as seen:
            done = chat.turn(number, length=31, answer=1)
        assert engine.flush(30)
        turns = Turns(20, tuple(chat.begins), tuple(chat.ends))
        kept = view(chat.tokens[:-1], chosen, turns, chunk_tokens=T, choices=engine._choices)
        if done.cut_tokens and not kept.chain.seen:
            whole += len(kept.spans) > 2
            assert (seen[-1][0, -1] - logits_of(model, list(kept.remaining))).abs().max() < 1e-3
    assert whole > 2


def test_a_worker_that_recorded_nothing_finds_the_choice_and_the_kv(
    model: LlamaForCausalLM, store: FakeStore, engines: Make
) -> None:
    options: dict[str, Any] = {"chunk_tokens": T, "pool_chunks": 64, "truncation": SETTINGS}
    first = engines(model, store, **options)
    chat = Chat(first)
    for number in range(13):
        chat.turn(number)
        assert first.flush(30)
    assert first.counters["cuts_by_mass"] >= 3 and first.counters["truncations_recomputed"] == 0
    second = engines(model, store, **options)
    one, other = chat.again(first), chat.again(second)
    before = dict(store.chunks), dict(store.sessions)
    with recorded_logits(model) as seen:
        mine = one.turn(50)
        count = len(seen)
        assert first.flush(30)
        # Who finds what the other one has just saved computes fewer tokens at a time, which rounds otherwise
        store.chunks, store.sessions = before
        theirs = other.turn(50)
    assert mine.tokens == theirs.tokens and mine.cut_tokens == theirs.cut_tokens > 0
    assert mine.reused == theirs.reused
    assert all(torch.equal(a, b) for a, b in zip(seen[:count], seen[count:], strict=True))
    assert second.counters["truncations_recomputed"] == 0
    assert second.counters["restored_tokens"] > second.counters["computed_tokens"]


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "emulated"])
def test_cuts_by_mass_share_steps_are_preempted_and_aborted(
    model: LlamaForCausalLM, store: FakeStore, engines: Make, late: bool
) -> None:
    options: dict[str, Any] = {
        "chunk_tokens": T,
        "truncation": replace(SETTINGS, recompute_share=0.3, deviating=True),
    }
    alone = engines(model, store, pool_chunks=64, **options)
    chats = [Chat(alone, session=f"s{number}") for number in range(3)]
    for number in range(8):
        for offset, chat in enumerate(chats):
            chat.turn(100 * offset + number, answer=1)
            assert alone.flush(30)
    turns = Turns(20, (*chats[0].begins, len(chats[0].tokens)), (*chats[0].ends, len(chats[0].tokens) + 30))
    prompts = [[*chat.tokens, *text(30, seed=7)] for chat in chats]
    wanted = [alone.turn("", prompt, 20, turns=turns).tokens for prompt in prompts]
    assert alone.flush(30) and alone.counters["cuts_by_mass"] >= 3
    device = EmulatedDevice() if late else None
    engine = engines(model, store, pool_chunks=64, device=device, verdicts=Trusting(), **options)
    assert disturbed(engine, prompts, turns) == wanted
    assert engine.counters["truncations_recomputed"] == 0
    assert device is None or not device.races


@pytest.mark.parametrize("chunks", [17, 19, 22])
def test_a_pool_without_room_for_what_stays_goes_on(
    model: LlamaForCausalLM, store: FakeStore, engines: Make, chunks: int
) -> None:
    engine = engines(model, store, chunk_tokens=T, pool_chunks=chunks, truncation=SETTINGS)
    chat = Chat(engine)
    for number in range(12):
        assert len(chat.turn(number).tokens) == 12
        assert engine.flush(30)
    assert engine.counters["requests_cut"] > 3


def test_a_daemon_that_is_away_decides_nothing(model: LlamaForCausalLM, engines: Make) -> None:
    """Without a store the record decides, at once."""
    engine = engines(model, None, chunk_tokens=T, pool_chunks=128, retain=True, truncation=SETTINGS)
    chat = Chat(engine)
    for number in range(12):
        done = chat.turn(number)
    assert done.cut_tokens > 0 and engine.counters["cuts_by_mass"] >= 2
    assert engine.counters["truncations_recomputed"] == 0


def test_an_answer_ends_where_the_window_does(model: LlamaForCausalLM, engines: Make) -> None:
    engine = engines(model, None, chunk_tokens=T, pool_chunks=64, retain=True, truncation=SETTINGS)
    chat = Chat(engine)
    for number in range(9):
        done = chat.turn(number)
    done = chat.turn(50, answer=500)
    kept = len(chat.tokens) - len(done.tokens) - done.cut_tokens
    assert done.finish == "length" and 256 - BUDGET <= kept + len(done.tokens) <= 256


# ------------------------------------------------------------------------------------------------- what is recorded


def attention_of(model: LlamaForCausalLM, tokens: list[int]) -> np.ndarray[Any, Any]:
    """What the last tokens attend to, by transformers."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            found = model(torch.tensor([tokens]), output_attentions=True).attentions
    finally:
        model.set_attn_implementation(before)
    return sum(layer[0, :, -OBSERVED:].sum((0, 1)) for layer in found).numpy()


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "emulated"])
def test_what_is_recorded_is_what_the_last_tokens_attend_to(
    model: LlamaForCausalLM, store: FakeStore, engines: Make, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several steps, beside others, with a history that was loaded."""
    monkeypatch.setattr(masses, "KEPT_SHARE", 0.0)
    writer = engines(model, store, chunk_tokens=T, truncation=SETTINGS)
    writer.turn("", text(100), 1)
    assert writer.flush(30)
    engine = engines(
        model,
        store,
        chunk_tokens=T,
        pool_chunks=48,
        truncation=SETTINGS,
        prefill_tokens=24,
        device=EmulatedDevice() if late else None,
        verdicts=Trusting(),
    )
    prompts = [[*text(100), *text(60, seed=2)], text(50, seed=3)]
    for prompt in prompts:
        engine.add(prompt, 4)
    list(engine.run())
    assert engine.counters["restored_tokens"] == 96 and engine.counters["prompts_observed"] == 2
    assert engine._masses is not None
    for prompt in prompts:
        found = engine._masses.find(prompt)
        assert found is not None and len(found) == len(prompt)
        assert np.abs(found - attention_of(model, prompt)).max() < 1e-3
        assert abs(found.sum() - 3 * 4 * OBSERVED) < 1e-2


@pytest.mark.parametrize("count", [49, 50, 63, 64])
def test_the_end_of_a_prompt_is_computed_in_one_step(
    model: LlamaForCausalLM, engines: Make, count: int
) -> None:
    """Though steps of 24 tokens would leave one, two or fewer than are looked at."""
    engine = engines(model, None, chunk_tokens=T, truncation=SETTINGS, prefill_tokens=24)
    prompt = text(count)
    engine.turn("", prompt, 2)
    assert engine._masses is not None
    found = engine._masses.find(prompt)
    assert found is not None and np.abs(found - attention_of(model, prompt)).max() < 1e-3


def test_of_a_cut_conversation_it_is_recorded_where_its_tokens_stand(store: FakeStore, engines: Make) -> None:
    """One layer, whose KV depends on tokens alone: as if the model had read what remains."""
    model = tiny_llama(layers=1)
    engine = engines(model, store, chunk_tokens=T, pool_chunks=64, truncation=SETTINGS)
    chat = Chat(engine)
    cuts = 0
    for number in range(14):
        done = chat.turn(number, answer=1)
        assert engine.flush(30) and engine._masses is not None
        if not done.cut_tokens:
            continue
        prompt = chat.tokens[:-1]
        turns = Turns(20, tuple(chat.begins), tuple(chat.ends))
        kept = view(prompt, SETTINGS, turns, chunk_tokens=T, choices=engine._choices)
        numbers = [number for begin, end in kept.spans for number in range(begin, end)]
        wanted = np.zeros(len(prompt), np.float32)
        wanted[numbers] = attention_of(model, list(kept.remaining))
        before = engine._masses.find(prompt[: chat.ends[-2]])
        assert before is not None
        wanted[: len(before)] += masses.KEPT_SHARE * before
        found = engine._masses.find(prompt)
        assert found is not None and len(found) == len(prompt) and np.abs(found - wanted).max() < 1e-3
        cuts += len(kept.spans) > 2
    assert cuts > 3


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [8, 5])
def test_keys_are_seen_where_they_stand(interleaved: bool, pairs: int) -> None:
    draw = torch.Generator().manual_seed(pairs)
    pool = torch.randn(4, 2, 8, 16, generator=draw)
    inv_freq = torch.rand(pairs, generator=draw)
    q = torch.randn(9, 4, 16, generator=draw)
    seen = Observation(
        lines=torch.tensor([6, 7]),
        numbers=torch.tensor([8, 9]),
        chunks=torch.tensor([2, 0]),
        tokens=10,
        stretches=(Stretch(1, 3, 4, delta=-7), Stretch(3, 0, 8, delta=5)),
    )
    seen.look(0, q, pool, 0.25, Positions((inv_freq,), interleaved))
    own = torch.cat([pool[2], pool[0]], dim=1)[:, :10]
    moved = [
        rotate(pool[chunk, :, first : first + count], rotation(delta, inv_freq, interleaved=interleaved))
        for chunk, first, count, delta in ((1, 3, 4, -7), (3, 0, 8, 5))
    ]
    keys = torch.cat([own, *moved], dim=1)
    wanted = torch.zeros(22)
    for line, number in ((6, 8), (7, 9)):
        for head in range(4):
            logits = 0.25 * keys[head // 2] @ q[line, head]
            logits[number + 1 : 10] = float("-inf")
            wanted += logits.softmax(-1)
    assert seen.own is not None and seen.seen is not None
    assert torch.allclose(torch.cat([seen.own, seen.seen]), wanted, atol=1e-5)


def test_the_book_is_bounded_and_knows_beginnings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    book = MassBook(16)
    book.record(range(40), np.ones(40, np.float32))
    assert book.find([*range(32), 99]) is not None and book.find([*range(31), 99, *range(20)]) is None
    assert book.find(range(40), root=b"other") is None
    book.record(range(50), np.ones(50, np.float32))
    found = book.find(range(50))
    assert found is not None and found[:40].tolist() == [1.5] * 40 and found[40:].tolist() == [1.0] * 10
    book.record(range(10), np.ones(10, np.float32))  # less than a chunk: nobody finds it
    monkeypatch.setattr(masses, "BYTES_MAX", 1_000)
    for number in range(20):
        book.record([number, *range(40)], np.ones(41, np.float32))
    assert book._bytes <= 1_000 and book._bytes == sum(one.nbytes for one in book._known.values())
    assert book.find([19, *range(40)]) is not None and book.find([0, *range(40)]) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mass_share": 1.0}, "mass_share is 1.0"),
        ({"mass_share": 0.5, "head_tokens": 70}, "head_tokens is 70"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(SETTINGS, **change)
