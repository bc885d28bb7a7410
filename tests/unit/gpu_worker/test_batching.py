"""Sequences that run together get the tokens that they would get alone, whoever joins, leaves, shares or makes room.

Other neighbours mean other rounding, so what is compared are the logits behind every token with those of the plain
model on the same tokens, to a tolerance; and each token with what those logits choose, unless that is a tie at that
tolerance. What no sequence holds in the pool is NaN.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    T5Config,
)

from kvstore.errors import Unavailable, Unsupported
from kvstore.gpu_worker import batching
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.sampling import GREEDY, Sampler, Sampling

from .conftest import text, tiny_llama
from .recording import Recording, T

SMOLLM2 = sorted((Path(__file__).parents[3] / ".cache" / "models").glob("smollm2-135m-*[0-9a-f]"))
SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": None,
}
FAMILIES = {
    "gpt2": GPT2Config(
        **{name: SMALL[name] for name in ("vocab_size", "hidden_size", "initializer_range", "eos_token_id")},
        n_layer=3,
        n_head=4,
        n_positions=512,
        resid_pdrop=0.0,
        scale_attn_by_inverse_layer_idx=True,
    ),
    "llama": LlamaConfig(**SMALL),
    "llama-mha": LlamaConfig(**SMALL | {"num_key_value_heads": 4}),
    "llama-yarn": LlamaConfig(
        **SMALL,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ),
    "mistral": MistralConfig(**SMALL, sliding_window=None),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL),
}


def generated(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """What plain transformers answers."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama(layers=3)


@pytest.fixture
def engine(model: PreTrainedModel) -> Callable[..., Recording]:
    return lambda **options: Recording(model, **options)


# ---------------------------------------------------------------------------------------------- the tokens are the same


@pytest.mark.parametrize("share", [True, False], ids=["shared", "unshared"])
@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_answers_as_with_generate(name: str, share: bool) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[name], dtype=torch.float32).eval()
    system = text(3 * T + 5)
    prompts = [[*system, *text(n, seed=n)] for n in (1, 7, 30)] + [text(1), text(2 * T, seed=8), system]
    expected = [generated(model, prompt, 20) for prompt in prompts]
    engine = Recording(model, sequences_max=4, prefill_tokens=40, share=share)
    numbers = [engine.add(prompt, 20) for prompt in prompts]
    engine.finish().check()
    assert [engine.got[number] for number in numbers] == expected
    assert (engine.counters["adopted_tokens"] > 0) is share


@pytest.mark.skipif(not SMOLLM2, reason="the demo has not made SmolLM2 ready yet")
def test_a_real_model_answers_as_with_generate() -> None:
    model = AutoModelForCausalLM.from_pretrained(SMOLLM2[0], dtype=torch.float32).eval()
    system = [1, *(token % 40_000 + 17 for token in text(80))]
    prompts = [[*system, *text(n, seed=n)] for n in (3, 9)] + [text(4)]
    expected = [generated(model, prompt, 8) for prompt in prompts]
    engine = Recording(model, sequences_max=3)
    numbers = [engine.add(prompt, 8) for prompt in prompts]
    engine.finish().check(tolerance=1e-3)
    assert [engine.got[number] for number in numbers] == expected


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.bfloat16, 0.5), (torch.float16, 0.1)], ids=str
)
def test_other_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    one = Recording(tiny_llama(dtype, layers=3))
    for n in (1, 5, 20):
        one.add([*text(2 * T), *text(n, seed=n)], 10)
    one.finish().check(tolerance=tolerance)


def test_a_seed_gives_the_same_tokens_in_any_company(engine: Callable[..., Recording]) -> None:
    prompt = text(40)
    sampling = Sampling(temperature=1.2, top_k=50, top_p=0.95, seed=5)
    alone = engine()
    alone.add(prompt, 30, sampling=sampling)
    alone.finish()
    beside = engine(pool_chunks=16)
    for n in range(3):
        beside.add(text(50, seed=n), 40, sampling=Sampling(temperature=1.0, seed=n))
    beside.step()
    number = beside.add(prompt, 30, sampling=sampling)
    beside.add(prompt, 30, sampling=Sampling(temperature=1.2, seed=6))
    beside.finish()
    assert beside.counters["preemptions"] > 0
    beside.check()
    assert beside.got[number] == alone.got[1] != beside.got[number + 1]


# ----------------------------------------------------------------------------------------------- any schedule of events


def play(engine: Recording, seed: int, steps: int) -> None:
    """Requests that begin alike, or not, come and go."""
    choose = random.Random(seed)
    roots = [text(70, seed=seed % 1000 + n) for n in range(3)]
    for _ in range(steps):
        match choose.choice(("add", "step", "step", "step", "abort")):
            case "add" if engine.live < 9:
                root = choose.choice(roots)[: choose.randrange(71)]
                prompt = [*root, *text(choose.randrange(1, 30), seed=choose.randrange(3))]
                sampling = choose.choice(
                    (GREEDY, Sampling(temperature=1.0, top_k=40, seed=choose.randrange(99)))
                )
                stop = choose.sample(range(256), 5)
                engine.add(prompt, choose.randrange(1, 24), sampling=sampling, stop_tokens=stop)
            case "abort" if engine.asked:
                number = choose.choice(list(engine.asked))
                live = {one.number for one in (*engine._scheduler.running, *engine._scheduler.waiting)}
                assert engine.abort(number) is (number in live)
                assert not engine.abort(number)
            case _:
                engine.step()
        engine.check_integrity()
    before = engine.counters["steps"]
    left = sum(one.tokens_max for one in (*engine._scheduler.running, *engine._scheduler.waiting))
    engine.finish()
    assert engine.counters["steps"] - before <= left, "in some step not even the oldest came any further"


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("pool_chunks", [9, 40])
def test_random_schedules(seed: int, pool_chunks: int, engine: Callable[..., Recording]) -> None:
    """A pool for little more than one sequence, and one for most of them."""
    one = engine(
        pool_chunks=pool_chunks, sequences_max=5, prefill_tokens=(7, 33, 100)[seed % 3], share=seed != 5
    )
    play(one, seed, 60)
    one.check()


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    pool_chunks=st.integers(8, 30),
    sequences_max=st.integers(1, 7),
    prefill_tokens=st.integers(1, 60),
)
def test_any_schedule(
    model: PreTrainedModel, seed: int, pool_chunks: int, sequences_max: int, prefill_tokens: int
) -> None:
    one = Recording(
        model, pool_chunks=pool_chunks, sequences_max=sequences_max, prefill_tokens=prefill_tokens
    )
    play(one, seed, 30)
    if any(one.got.values()):
        one.check()


# ---------------------------------------------------------------------------------------- sharing, waiting, making room


@pytest.mark.parametrize("prefill_tokens", [2 * T, 512])
def test_what_all_begin_with_is_computed_once(prefill_tokens: int, engine: Callable[..., Recording]) -> None:
    """Four at once: three wait for the first one's chunks rather than compute the same ones."""
    system, own, new = 4 * T, 3, 6
    one = engine(prefill_tokens=prefill_tokens)
    for n in range(4):
        one.add([*text(system), *text(own, seed=n + 2)], new)
    one.finish().check()
    assert one.counters["computed_tokens"] == system + 4 * (own + new - 1)
    assert one.counters["adopted_tokens"] == 3 * system
    assert one.pool.peak_chunks == 4 + 4

    apart = engine(share=False)
    for n in range(4):
        apart.add([*text(system), *text(own, seed=n + 2)], new)
    apart.finish().check()
    assert apart.counters["computed_tokens"] == 4 * (system + own + new - 1)
    assert apart.pool.peak_chunks == 4 * 5
    assert apart.got == one.got


def test_a_prompt_that_is_all_there_computes_its_last_token(engine: Callable[..., Recording]) -> None:
    one = engine()
    first = one.add(text(2 * T), 12)
    one.step()
    second = one.add(text(2 * T), 10)
    one.finish().check()
    assert one.got[second] == one.got[first][:10]
    assert one.counters["adopted_tokens"] == T  # of two chunks: the other one holds the last token


def test_decoded_tokens_are_shared_too(engine: Callable[..., Recording]) -> None:
    """A prompt that begins with another's prompt and answer."""
    one = engine()
    first = one.add(text(T - 4), 40)
    for _ in range(3 * T):
        one.step() if len(one.got[first]) < 22 else None
    one.add([*text(T - 4), *one.got[first][:20], 7], 5)
    one.finish().check()
    assert one.counters["adopted_tokens"] == 2 * T


def test_who_decodes_goes_on_while_a_long_prompt_is_read(engine: Callable[..., Recording]) -> None:
    one = engine(prefill_tokens=10)
    decoding = one.add(text(5), 30)
    one.step()
    one.add(text(100, seed=2), 3)
    for _ in range(10):
        before = one.counters["computed_tokens"]
        assert [output.request for output in one.step()][:1] == [decoding]
        assert one.counters["computed_tokens"] - before == 11
    one.finish().check()


def test_the_newest_makes_room_and_comes_back(engine: Callable[..., Recording]) -> None:
    """Three that together outgrow the pool: none is refused, none waits for ever, tokens are the same."""
    one = engine(pool_chunks=10)
    numbers = [one.add(text(2 * T, seed=n), 3 * T) for n in range(3)]
    finished = [output.request for output in one.run() if output.finish]
    assert one.counters["preemptions"] > 0
    assert finished == numbers, "the oldest goes on"
    one.check()
    roomy = engine(pool_chunks=64)
    for n in range(3):
        roomy.add(text(2 * T, seed=n), 3 * T)
    roomy.finish()
    assert roomy.got == one.got and roomy.counters["preemptions"] == 0


def test_who_would_have_to_make_room_at_once_is_not_begun(engine: Callable[..., Recording]) -> None:
    one = engine(pool_chunks=10)
    for n in range(3):
        one.add(text(3 * T + 2, seed=n), 5)
    one.step()
    assert len(one._scheduler.running) == 2
    one.finish().check()
    assert one.counters["preemptions"] == 0


def test_who_leaves_takes_nothing_along(engine: Callable[..., Recording]) -> None:
    """The one that computes what others wait for is aborted in the middle of it; then one that others share with."""
    one = engine(prefill_tokens=T)
    numbers = [one.add([*text(3 * T), n], 8) for n in range(3)]
    one.step()
    assert one.abort(numbers[0])
    for _ in range(5):
        one.step()
    assert one.got[numbers[1]]
    assert one.abort(numbers[1])
    one.finish().check()
    assert [len(one.got[number]) for number in numbers] == [0, len(one.got[numbers[1]]), 8]


def test_who_takes_over_a_row_decodes_in_its_own_chunks(engine: Callable[..., Recording]) -> None:
    """It begins with one token to compute, and is as long as who decoded in its row the step before."""
    one = engine(sequences_max=2)
    first = one.add(text(2 * T - 3, seed=5), 4)
    one.add([*text(2 * T), *text(5, seed=1)], 30)
    while first not in one.finished or not one.finished[first]:
        one.step()
    one.add([*text(2 * T), 7], 5)
    one.finish().check()
    assert one.counters["adopted_tokens"] == 2 * T


def test_requests_end_at_stop_tokens_and_at_their_limit(engine: Callable[..., Recording]) -> None:
    one = engine()
    first = one.add(text(9), 20)
    one.finish()
    stop = one.got[first][4]
    cut = one.got[first].index(stop) + 1
    second, third = one.add(text(9), 20, stop_tokens=[stop]), one.add(text(9), 1)
    one.finish()
    assert one.got[second] == one.got[first][:cut] and one.finished[second] == "stop"
    assert one.got[third] == one.got[first][:1] and one.finished[third] == one.finished[first] == "length"


def test_a_step_that_breaks_off_is_taken_again(
    engine: Callable[..., Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory in the middle of a forward call, say, while some decode and others are new."""
    one = engine(prefill_tokens=20)
    one.add(text(30), 20)
    for _ in range(3):
        one.step()
    one.add(text(50), 10)
    layer = one.model.model.layers[1]
    for _ in range(4):
        with monkeypatch.context() as patch:
            patch.setattr(layer, "forward", lambda *args, **kwargs: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                one.step()
        one.check_integrity()
        one.step()
    one.finish().check()


def test_a_token_that_cannot_be_chosen_is_computed_again(
    engine: Callable[..., Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, plain = engine(), engine()
    for each in (one, plain):
        each.add(text(30), 8)
        each.add(text(20, seed=4), 8, sampling=Sampling(temperature=1.0, seed=5))
        each.step()

    def broken(samplers: Sequence[Sampler], logits: torch.Tensor) -> None:
        assert [sampler.draw() for sampler in samplers] and 1 / 0

    with monkeypatch.context() as patch:
        patch.setattr(batching, "choose_all", broken)
        with pytest.raises(ZeroDivisionError):
            one.step()
    one.finish()
    plain.finish()
    assert one.got == plain.got


def test_requests_may_come_while_others_run(engine: Callable[..., Recording]) -> None:
    one = engine(sequences_max=2)
    one.add(text(4), 3)
    order = []
    for output in one.run():
        order.append(output.request)
        if len(order) == 2:
            one.add(text(5), 2)
    assert order == [1, 1, 1, 2, 2] or order == [1, 1, 2, 1, 2] or order == [1, 1, 1, 2, 2]
    one.check()


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (MistralConfig(**SMALL, sliding_window=32), "layer_types"),
        (
            Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=32, max_window_layers=0),
            "layer_types",
        ),
        (
            LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "rope",
        ),
        (
            BertConfig(vocab_size=256, hidden_size=64, num_hidden_layers=1, num_attention_heads=4),
            "model_type",
        ),
        (T5Config(vocab_size=256, d_model=64, d_ff=64, num_layers=1, num_heads=4, d_kv=16), "model_type"),
    ],
    ids=["mistral-window", "qwen2-window", "rope", "encoder", "encoder-decoder"],
)
def test_models_with_other_attention_are_refused(config: Any, field: str) -> None:
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with pytest.raises(Unsupported, match=field):
        BatchEngine(kind.from_config(config), pool_chunks=4)


def test_other_caches_and_dtypes_are_refused() -> None:
    model = tiny_llama()
    model.generation_config.cache_implementation = "quantized"
    with pytest.raises(Unsupported, match=r"cache_implementation.*quantized"):
        BatchEngine(model, pool_chunks=4)
    with pytest.raises(Unsupported, match=r"model.dtype.*float8.*supported: torch.float16"):
        BatchEngine(tiny_llama().to(torch.float8_e4m3fn), pool_chunks=4)


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ([], 1, "not 0 and 1"),
        ([1], 0, "not 1 and 0"),
        ([1, 256], 1, "outside of the model's 256"),
        ([-1], 1, "outside of the model's 256"),
        ([1.0] * 20, 1, r"float64 \[20\]: must be one row of token ids"),
        ([True], 1, "one row"),
        ([[1]], 1, "one row"),
        ([1], 2.5, "max_new_tokens is 2.5: must be a whole number"),
        ([1], float("nan"), "max_new_tokens is nan"),
        ([1] * 60, 5, "a pool of 4 chunks takes? 64|take 64"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(
    prompt: Any, new: Any, message: str, engine: Callable[..., Recording]
) -> None:
    one = engine(pool_chunks=4)
    with pytest.raises(ValueError, match=message):
        one.add(prompt, new)
    assert one.live == 0
    one.add([1] * 60, 4)  # exactly what the pool holds
    one.finish().check()


@pytest.mark.parametrize("name", ["sequences_max", "prefill_tokens", "pool_chunks"])
def test_settings_that_are_too_small_are_refused(name: str, model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="is 0: must be at least 1"):
        BatchEngine(model, **{"pool_chunks": 4} | {name: 0})


def test_a_closed_engine_says_so(engine: Callable[..., Recording]) -> None:
    one = engine()
    one.add(text(20), 9)
    outputs = one.run()
    next(outputs)
    one.close()
    assert one.live == 0 and not list(outputs) and not one.abort(1)
    for call in (lambda: one.add(text(20), 3), one.step):
        with pytest.raises(Unavailable, match=r"the engine is closed \(make another one\)"):
            call()
    one.close()


def test_between_steps_the_model_is_what_it_was(engine: Callable[..., Recording]) -> None:
    """Two engines on one model, and whoever else uses it."""
    first, second = engine(), engine()
    for one in (first, second):
        one.add(text(20), 3)
        one.step()
        assert one.model.config._attn_implementation == "sdpa"
    assert first.model(torch.tensor([[1, 2]])).logits.isfinite().all()
    first.finish().check()
    second.finish().check()
    assert first.got == second.got


def test_our_attention_says_when_it_is_used_by_itself() -> None:
    model = tiny_llama(layers=1)
    model.set_attn_implementation("kvstore_paged")
    with pytest.raises(RuntimeError, match="attention of a batching engine"):
        model(torch.tensor([[1, 2]]))


def test_what_it_says_of_itself(engine: Callable[..., Recording]) -> None:
    one = engine(sequences_max=1)
    one.add(text(20), 3)
    one.add(text(20), 3)
    one.step()
    assert (
        repr(one) == "BatchEngine(1 running, 1 waiting, HbmPool(2/64 chunks in use, 0 idle, 1 in the tree))"
    )


def test_the_sampler_of_a_request_goes_on_after_it_made_room() -> None:
    """Its random numbers are drawn once a token, not once a computation."""
    sampler = Sampler(Sampling(temperature=1.0, seed=1))
    assert len({sampler.choose(torch.zeros(1000)) for _ in range(5)}) == 5
