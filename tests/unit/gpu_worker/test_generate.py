"""`StoredGenerator`: whatever is loaded, `generate` answers as without; what cannot be right is computed without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from kvstore.errors import Unsupported
from kvstore.gpu_worker.generate import StoredGenerator

from .conftest import FakeStore, text, tiny_llama

T = 64


def batch(*rows: list[int], pad: int = 0) -> dict[str, torch.Tensor]:
    """Padded on the left."""
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[pad] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }


def check(model: Any, store: FakeStore, inputs: dict[str, torch.Tensor], loaded: int, **options: Any) -> None:
    """Twice, with a process in between that begins anew; the second time so many tokens are loaded."""
    torch.manual_seed(5)
    expected = model.generate(**inputs, **options)
    for tokens in (0, loaded):
        with StoredGenerator(model, store.connect) as stored:
            torch.manual_seed(5)
            assert torch.equal(stored.generate(**inputs, **options), expected)
            assert stored.counters["loaded_tokens"] == tokens
            assert not stored.counters["without_store"]
            assert stored.flush()
    assert store.leases == 0


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 128, 129, 200])
def test_one_prompt(tokens: int, store: FakeStore) -> None:
    loaded = tokens // T * T
    check(tiny_llama(), store, batch(text(tokens)), min(loaded, tokens - 1), max_new_tokens=9)


def test_as_transformers_names_its_argument(store: FakeStore) -> None:
    model = tiny_llama()
    ids = torch.tensor([text(100)])
    with StoredGenerator(model, store.connect) as stored:
        for _ in range(2):
            assert torch.equal(
                stored.generate(inputs=ids, max_new_tokens=5), model.generate(inputs=ids, max_new_tokens=5)
            )
            assert stored.flush()
        assert stored.counters["loaded_tokens"] == 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, store: FakeStore) -> None:
    check(tiny_llama(dtype), store, batch(text(150), text(99, seed=2)), (51 + 64) + 64, max_new_tokens=9)


def test_what_was_answered_is_found_by_the_next_turn(store: FakeStore) -> None:
    model = tiny_llama()
    with StoredGenerator(model, store.connect) as stored:
        answer = stored.generate(**batch(text(60)), max_new_tokens=80)[0].tolist()
        assert stored.flush()
        after = batch([*answer, *text(9)])
        again = stored.generate(**after, max_new_tokens=5)
        assert stored.counters["loaded_tokens"] == 2 * T
        assert torch.equal(again, model.generate(**after, max_new_tokens=5))


def test_rows_of_a_batch_that_are_padded(store: FakeStore) -> None:
    """All are loaded up to the column where the first one is not: here that of 180 tokens, 20 + 128."""
    rows = text(200, seed=1), text(130, seed=2), text(180, seed=3)
    check(tiny_llama(), store, batch(*rows), 148 + (148 - 70) + (148 - 20), max_new_tokens=9)


def test_a_short_row_in_a_batch_is_no_hindrance(store: FakeStore) -> None:
    """It begins behind what the other one loads."""
    check(tiny_llama(), store, batch(text(200), text(3, seed=2)), 192, max_new_tokens=9)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3, "temperature": 1.5},
        {"do_sample": True, "top_k": 5},
        {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
        {"generation_config": GenerationConfig(num_beams=2, max_new_tokens=7)},
        {"eos_token_id": list(range(0, 256, 9)), "pad_token_id": 0},
    ],
    ids=lambda options: "-".join(options),
)
def test_ways_to_choose_tokens(options: dict[str, Any], store: FakeStore) -> None:
    more = {} if "generation_config" in options else {"max_new_tokens": 9}
    inputs = batch([*text(150, seed=1)], [*text(140, seed=2)])
    check(tiny_llama(), store, inputs, 128 + 118, **more, **options)


def test_padding_behind_an_answer_is_not_saved(store: FakeStore) -> None:
    """One row ends at once, the other goes on: what the first has behind its end is nobody's KV."""
    model = tiny_llama()
    inputs = batch(text(60, seed=1), text(60, seed=2))
    first, second = model.generate(**inputs, max_new_tokens=80)[:, 60].tolist()
    assert first != second
    with StoredGenerator(model, store.connect) as stored:
        stored.generate(**inputs, max_new_tokens=80, eos_token_id=first, pad_token_id=first)
        assert stored.flush()
        assert stored.save_counters["chunks_saved"] <= 2, "of the second row alone"


def test_gpt2(store: FakeStore) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=512,
        n_embd=64,
        n_layer=3,
        n_head=4,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    check(
        GPT2LMHeadModel(config).eval(),
        store,
        batch(text(150), text(99, seed=2)),
        (51 + 64) + 64,
        max_new_tokens=9,
    )


@pytest.mark.parametrize(
    ("why", "options"),
    [
        ("assistant_model", {"assistant_model": tiny_llama(layers=1)}),
        ("prompt_lookup_num_tokens", {"prompt_lookup_num_tokens": 3}),
        ("use_cache", {"use_cache": False}),
        ("cache_implementation", {"cache_implementation": "static"}),
        ("output_hidden_states", {"output_hidden_states": True, "return_dict_in_generate": True}),
        ("guidance_scale", {"guidance_scale": 1.5}),
        ("prefill_chunk_size", {"prefill_chunk_size": 50}),
    ],
)
def test_what_is_computed_without_the_store(
    why: str, options: dict[str, Any], store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_llama()
    inputs = batch(text(150))
    expected = model.generate(**inputs, max_new_tokens=5, **options)
    with StoredGenerator(model, store.connect) as stored:
        for _ in range(2):
            result = stored.generate(**inputs, max_new_tokens=5, **options)
            assert torch.equal(getattr(result, "sequences", result), getattr(expected, "sequences", expected))
        assert stored.counters["without_store"] == 2
        assert stored.flush() and not store.chunks
    assert caplog.text.count(f"generated without the store: {why}") == 1


def test_what_is_given_as_none_is_not_given(store: FakeStore) -> None:
    absent = {"assistant_model": None, "cache": None, "streamer": None, "position_ids": None}
    check(tiny_llama(), store, batch(text(150)), 128, max_new_tokens=5, eos_token_id=None, **absent)


def test_masks_that_are_no_left_padding(store: FakeStore, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_llama()
    ids = torch.tensor([text(150)])
    for mask in ([1] * 140 + [0] * 10, [1] * 50 + [0] * 50 + [1] * 50):
        with StoredGenerator(model, store.connect) as stored:
            given = {"input_ids": ids, "attention_mask": torch.tensor([mask])}
            assert torch.equal(
                stored.generate(**given, max_new_tokens=5), model.generate(**given, max_new_tokens=5)
            )
            assert stored.flush() and not store.chunks
    assert "padded on the left" in caplog.text
    with StoredGenerator(model, store.connect) as stored:
        stored.generate(ids, max_new_tokens=5, pad_token_id=ids[0, 7].item())
        assert "no attention_mask" in caplog.text and stored.counters["without_store"]
        stored.generate(ids, max_new_tokens=5)
        assert stored.flush() and store.chunks


def test_changed_weights_find_nothing_of_before(store: FakeStore) -> None:
    model = tiny_llama()
    inputs = batch(text(200))
    with StoredGenerator(model, store.connect) as stored:
        stored.generate(**inputs, max_new_tokens=3)
        assert stored.flush()
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
        changed = stored.generate(**inputs, max_new_tokens=3)
        assert stored.counters["loaded_tokens"] == 0
        assert torch.equal(changed, model.generate(**inputs, max_new_tokens=3))
        assert stored.flush()
        stored.generate(**inputs, max_new_tokens=3)
        assert stored.counters["loaded_tokens"] == 192


@pytest.mark.parametrize("fault", ["away", "void", "commits_fail", "full"])
def test_whatever_the_store_does_the_answer_is_the_same(fault: str, store: FakeStore) -> None:
    model = tiny_llama()
    inputs = batch(text(200), text(150, seed=2))
    expected = model.generate(**inputs, max_new_tokens=5)
    if fault in ("away", "void"):
        with StoredGenerator(model, store.connect) as stored:
            stored.generate(**inputs, max_new_tokens=5)
            assert stored.flush()
    with StoredGenerator(model, store.connect) as stored:
        if fault == "void":
            store.on_copy = lambda number: False
        elif fault == "full":
            store.room = 0
        else:
            setattr(store, fault, True)
        assert torch.equal(stored.generate(**inputs, max_new_tokens=5), expected)
        assert stored.counters["loaded_tokens"] == 0
        assert stored.flush()


def test_no_daemon_at_all(store: FakeStore) -> None:
    model = tiny_llama()
    store.away = True
    with StoredGenerator(model, store.connect) as stored:
        inputs = batch(text(100))
        assert torch.equal(
            stored.generate(**inputs, max_new_tokens=5), model.generate(**inputs, max_new_tokens=5)
        )


def test_a_model_with_a_sliding_window_is_refused_by_name(store: FakeStore) -> None:
    config = MistralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=32,
    )
    with pytest.raises(Unsupported, match=r"layer_types"):
        StoredGenerator(MistralForCausalLM(config).eval(), store.connect)
