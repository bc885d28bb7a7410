"""KV is shared only by what computes the same: every way in which a model changes, and the answer after it.

Each change is made to a model whose KV is in the store, or in the pool; the answer must be that of an engine without
either. What is explained finds its own KV at the next turn; what is not is computed, and the reason is said.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.mistral.modeling_mistral import MistralRMSNorm

from kvstore.gpu_worker import identity as identity_module
from kvstore.gpu_worker.batching import NO_TOKEN, BatchEngine
from kvstore.gpu_worker.identity import Identity, digest_of_files, digest_of_tensor, inert
from kvstore.gpu_worker.sampling import NotNumbers

from .conftest import FakeStore, text, tiny_llama
from .emulated import EmulatedDevice, Trusting

MakeEngine = Callable[..., BatchEngine]
T = 16
PROMPT = text(100)
Change = Callable[[LlamaForCausalLM], Any]


def attention(model: LlamaForCausalLM, layer: int = 0) -> Any:
    return model.model.layers[layer].self_attn


def noise(tensor: torch.Tensor) -> torch.Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(7)) * 0.3


# ------------------------------------------------------------------------------------------ changes that are explained


def trained(model: LlamaForCausalLM) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise(parameter))


def one_element(model: LlamaForCausalLM) -> None:
    with torch.no_grad():
        attention(model).v_proj.weight[3, 5] += 8


def loaded(model: LlamaForCausalLM) -> None:
    model.load_state_dict(tiny_llama(seed=5, layers=2).state_dict())


def data_copied(model: LlamaForCausalLM) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(parameter + noise(parameter))


def data_replaced(model: LlamaForCausalLM) -> None:
    weight = attention(model).k_proj.weight
    weight.data = weight.data + noise(weight)


def shared_memory(model: LlamaForCausalLM) -> None:
    attention(model).v_proj.weight.detach().numpy()[:] *= -1


def one_element_of_shared_memory(model: LlamaForCausalLM) -> None:
    attention(model).v_proj.weight.detach().numpy()[3, 5] += 8


def parameter_replaced(model: LlamaForCausalLM) -> None:
    projection = attention(model).v_proj
    weight = projection.weight + noise(projection.weight)
    del projection.weight  # its memory may be the new one's
    projection.weight = nn.Parameter(weight.clone())


def rotary_buffer(model: LlamaForCausalLM) -> None:
    model.model.rotary_emb.inv_freq *= 0.5


def rotary_buffer_replaced(model: LlamaForCausalLM) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.5


def rope_scaling(model: LlamaForCausalLM) -> None:
    model.model.rotary_emb.attention_scaling = 1.5


def attention_scaling(model: LlamaForCausalLM) -> None:
    attention(model).scaling *= 2


def epsilon(model: LlamaForCausalLM) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 1.0


def layers_swapped(model: LlamaForCausalLM) -> None:
    attention(model, 0).v_proj, attention(model, 1).v_proj = (
        attention(model, 1).v_proj,
        attention(model, 0).v_proj,
    )


def module_replaced(model: LlamaForCausalLM) -> None:
    torch.manual_seed(3)
    attention(model).k_proj = nn.Linear(64, 32, bias=True)


def other_activation(model: LlamaForCausalLM) -> None:
    model.model.layers[0].mlp.act_fn = nn.GELU()


def merged(model: LlamaForCausalLM) -> None:
    """As adapters are merged, and taken out again."""
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data += torch.ones(64, 4) @ torch.ones(4, 64) * 0.1


def another_class(model: LlamaForCausalLM) -> None:
    """Of the package, with the same attributes."""
    model.model.norm.__class__ = MistralRMSNorm
    model.model.rotary_emb.inv_freq *= 0.5


EXPLAINED: dict[str, Change] = {
    change.__name__: change
    for change in (
        *(
            trained,
            one_element,
            loaded,
            data_copied,
            data_replaced,
            shared_memory,
            one_element_of_shared_memory,
        ),
        *(
            parameter_replaced,
            rotary_buffer,
            rotary_buffer_replaced,
            rope_scaling,
            attention_scaling,
            epsilon,
        ),
        *(layers_swapped, module_replaced, other_activation, merged, another_class),
    )
}


@pytest.fixture
def plain() -> Callable[[LlamaForCausalLM], tuple[int, ...]]:
    """The answer without a store."""

    def answer(model: LlamaForCausalLM, prompt: list[int] = PROMPT) -> tuple[int, ...]:
        return BatchEngine(model, pool_chunks=40, chunk_tokens=T).turn("s", prompt, 8).tokens

    return answer


Plain = Callable[..., tuple[int, ...]]


@pytest.mark.parametrize("name", EXPLAINED)
def test_what_changes_under_a_living_engine_is_another_model(
    name: str, store: FakeStore, engines: MakeEngine, plain: Plain
) -> None:
    model = tiny_llama(layers=2)
    engine = engines(model, store, chunk_tokens=T)
    before = engine.turn("s", PROMPT, 8)
    assert engine.flush(10)
    assert engine.turn("s", PROMPT, 8).reused_tokens == 96  # it would hit
    EXPLAINED[name](model)
    assert (expected := plain(model)) != before.tokens, "the change changes nothing here"
    after = engine.turn("s", PROMPT, 8)
    assert (after.tokens, after.reused_tokens) == (expected, 0)
    assert engine.flush(10)
    again = engine.turn("s", PROMPT, 8)
    assert (again.tokens, again.reused_tokens) == (expected, 96)
    other = engines(model, store, chunk_tokens=T).turn("s", PROMPT, 8)
    assert (other.tokens, other.reused_tokens) == (expected, 96)
    first = engines(tiny_llama(layers=2), store, chunk_tokens=T).turn("s", PROMPT, 8)
    assert (first.tokens, first.reused_tokens) == (before.tokens, 96)


@pytest.mark.parametrize("name", EXPLAINED)
def test_what_changes_between_steps_is_not_shared_in_the_pool(name: str, store: FakeStore) -> None:
    model = tiny_llama(layers=2)
    engine = BatchEngine(model, store.connect, pool_chunks=40, chunk_tokens=T)
    try:
        running = engine.add(PROMPT, 40)
        for _ in range(20):
            engine.step()
        assert engine.counters["computed_tokens"] >= len(PROMPT)
        EXPLAINED[name](model)
        second = engine.add(PROMPT, 8)
        tokens = [output.token for output in engine.run() if output.request == second]
        assert tokens == alone(model, PROMPT, 8)
        engine.check_integrity()
        assert running != second and engine.flush(10)
    finally:
        engine.close()


def alone(model: LlamaForCausalLM, prompt: list[int], count: int) -> list[int]:
    """Of a pool that shares nothing."""
    engine = BatchEngine(model, pool_chunks=40, chunk_tokens=T, share=False)
    engine.add(prompt, count)
    tokens = [output.token for output in engine.run()]
    engine.close()
    return tokens


# ------------------------------------------------------------------------------------------ what cannot be explained


class LowRank(nn.Module):
    """What adapter libraries put in the place of a layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        torch.manual_seed(11)
        self.a, self.b = nn.Linear(64, 4, bias=False), nn.Linear(4, base.out_features, bias=False)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + 4 * self.b(self.a(x))


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class DoubledLinears(TorchFunctionMode):
    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        return out * 2 if function is torch.nn.functional.silu else out


class DoubledSilu(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        return out * 2 if function is torch.ops.aten.silu.default else out


def doubled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args, **kwargs: 2 * function(*args, **kwargs)


@contextlib.contextmanager
def adapter(model: LlamaForCausalLM) -> Iterator[None]:
    attention(model).q_proj = LowRank(attention(model).q_proj)
    yield


@contextlib.contextmanager
def subclass(model: LlamaForCausalLM) -> Iterator[None]:
    attention(model).v_proj.__class__ = Doubled
    yield


@contextlib.contextmanager
def hook(model: LlamaForCausalLM) -> Iterator[None]:
    attention(model).v_proj.register_forward_hook(lambda module, args, out: 2 * out)
    yield


@contextlib.contextmanager
def pre_hook(model: LlamaForCausalLM) -> Iterator[None]:
    attention(model).v_proj.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    yield


@contextlib.contextmanager
def global_hook(model: LlamaForCausalLM) -> Iterator[None]:
    handle = register_module_forward_hook(
        lambda module, args, out: 2 * out if module is attention(model).v_proj else None
    )
    yield
    handle.remove()


@contextlib.contextmanager
def global_pre_hook(model: LlamaForCausalLM) -> Iterator[None]:
    handle = register_module_forward_pre_hook(
        lambda module, args: (2 * args[0],) if module is attention(model).v_proj else None
    )
    yield
    handle.remove()


@contextlib.contextmanager
def forward_replaced(model: LlamaForCausalLM) -> Iterator[None]:
    attention(model).v_proj.forward = doubled(attention(model).v_proj.forward)
    yield


@contextlib.contextmanager
def forward_of_the_class(model: LlamaForCausalLM) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_llama.LlamaMLP, "forward", doubled(modeling_llama.LlamaMLP.forward))
        yield


@contextlib.contextmanager
def function_of_the_package(model: LlamaForCausalLM) -> Iterator[None]:
    rotate = modeling_llama.apply_rotary_pos_emb
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            modeling_llama,
            "apply_rotary_pos_emb",
            lambda q, k, *rest, **options: rotate(2 * q, k, *rest, **options),
        )
        yield


@contextlib.contextmanager
def function_of_torch(model: LlamaForCausalLM) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        name = "scaled_dot_product_attention"
        patch.setattr(torch.nn.functional, name, doubled(getattr(torch.nn.functional, name)))
        yield


@contextlib.contextmanager
def attention_function(model: LlamaForCausalLM) -> Iterator[None]:
    before = AttentionInterface._global_mapping["sdpa"]

    def other(*args: Any, **kwargs: Any) -> Any:
        out, weights = before(*args, **kwargs)
        return 2 * out, weights

    AttentionInterface.register("sdpa", other)
    yield
    AttentionInterface.register("sdpa", before)


@contextlib.contextmanager
def parametrized(model: LlamaForCausalLM) -> Iterator[None]:
    parametrize.register_parametrization(attention(model).v_proj, "weight", Twice())
    yield


@contextlib.contextmanager
def weight_norm(model: LlamaForCausalLM) -> Iterator[None]:
    parametrizations.weight_norm(attention(model).v_proj)
    with torch.no_grad():
        attention(model).v_proj.parametrizations.weight.original0.mul_(2)
    model.eval()
    yield


@contextlib.contextmanager
def quantised(model: LlamaForCausalLM) -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"):  # torch's own: it goes one day
        torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8, inplace=True)
    model.eval()
    yield


@contextlib.contextmanager
def compiled(model: LlamaForCausalLM) -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"):  # torch's own
        attention(model).v_proj.compile(backend=lambda graph, _: doubled(graph.forward))
        yield


@contextlib.contextmanager
def autocast(model: LlamaForCausalLM) -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


@contextlib.contextmanager
def function_mode(model: LlamaForCausalLM) -> Iterator[None]:
    with DoubledLinears():
        yield


@contextlib.contextmanager
def dispatch_mode(model: LlamaForCausalLM) -> Iterator[None]:
    with DoubledSilu():
        yield


@contextlib.contextmanager
def another_type(model: LlamaForCausalLM) -> Iterator[None]:
    model.to(torch.bfloat16)
    yield


REFUSED: dict[str, tuple[Callable[[LlamaForCausalLM], Any], str]] = {
    change.__name__: (change, reason)
    for change, reason in (
        (adapter, "test_identity.LowRank, which is not known"),
        (subclass, "test_identity.Doubled, which is not known"),
        (hook, "v_proj has a hook that is not known"),
        (pre_hook, "v_proj has a hook that is not known"),
        (global_hook, "every module has a hook that is not known"),
        (global_pre_hook, "every module has a hook that is not known"),
        (forward_replaced, "v_proj.forward"),
        (forward_of_the_class, "LlamaMLP.forward was replaced"),
        (function_of_the_package, "modeling_llama.apply_rotary_pos_emb was replaced"),
        (function_of_torch, "functional.scaled_dot_product_attention"),
        (attention_function, "attention 'sdpa' was replaced"),
        (parametrized, "ParametrizedLinear, which is not known"),
        (weight_norm, "ParametrizedLinear, which is not known"),
        (quantised, "quantized.dynamic"),
        (compiled, "v_proj._compiled_call_impl"),
        (autocast, "autocast to torch.bfloat16 is on"),
        (function_mode, "a function mode is on"),
        (dispatch_mode, "a dispatch mode is on"),
        (another_type, "shape or type changed"),
    )
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_explained_is_computed_and_the_reason_said_once(
    name: str, store: FakeStore, engines: MakeEngine, plain: Plain, caplog: pytest.LogCaptureFixture
) -> None:
    change, reason = REFUSED[name]
    model = tiny_llama(layers=2)
    engine = engines(model, store, chunk_tokens=T)
    engine.turn("s", PROMPT, 8)
    assert engine.flush(10)
    saved = len(store.chunks)
    with caplog.at_level(logging.WARNING), change(model):
        expected = plain(model)
        caplog.clear()
        for _ in range(2):
            turn = engine.turn("s", PROMPT, 8)
            assert (turn.tokens, turn.reused_tokens) == (expected, 0)
        assert engine.flush(10)
    assert len(store.chunks) == saved and engine.counters["requests_unexplained"] == 2
    assert [reason in record.message for record in caplog.records].count(True) == 1


@pytest.mark.parametrize(
    "name", sorted(REFUSED.keys() - {"another_type", "attention_function", "function_of_torch"})
)
def test_what_cannot_be_explained_from_the_start(
    name: str, store: FakeStore, engines: MakeEngine, plain: Plain
) -> None:
    model = tiny_llama(layers=2)
    kept = engines(tiny_llama(layers=2), store, chunk_tokens=T)
    kept.turn("s", PROMPT, 8)
    assert kept.flush(10)
    saved = len(store.chunks)
    with REFUSED[name][0](model):
        engine = engines(model, store, chunk_tokens=T)
        turn = engine.turn("s", PROMPT, 8)
        assert (turn.tokens, turn.reused_tokens) == (plain(model), 0)
        assert engine.flush(10)
    assert len(store.chunks) == saved


def test_a_pool_shares_nothing_that_cannot_be_explained() -> None:
    model = tiny_llama(layers=2)
    engine = BatchEngine(model, pool_chunks=40, chunk_tokens=T)
    try:
        requests = [engine.add(PROMPT, 4)]
        engine.step()
        attention(model).v_proj.register_forward_hook(lambda module, args, out: 2 * out)
        requests.append(engine.add(PROMPT, 4))
        outputs = list(engine.run())
        assert engine.counters["adopted_tokens"] == 0
        assert [output.token for output in outputs if output.request == requests[1]] == alone(
            model, PROMPT, 4
        )
    finally:
        engine.close()


def test_settings_that_come_back_find_what_they_saved(store: FakeStore, engines: MakeEngine) -> None:
    engine = engines(tiny_llama(layers=2), store, chunk_tokens=T)
    engine.turn("s", PROMPT, 8)
    assert engine.flush(10)
    torch.set_float32_matmul_precision("medium")
    try:
        assert engine.turn("s", PROMPT, 8).reused_tokens == 0
    finally:
        torch.set_float32_matmul_precision("highest")
    assert engine.turn("s", PROMPT, 8).reused_tokens == 96


def test_training_mode_is_refused(store: FakeStore, engines: MakeEngine) -> None:
    model = tiny_llama(layers=2)
    engine = engines(model, store, chunk_tokens=T)
    engine.turn("s", PROMPT, 8)
    assert engine.flush(10)
    attention(model).train()
    attention(model).attention_dropout = 0.5
    assert engine.turn("s", PROMPT, 8).reused_tokens == 0
    assert "training mode: call model.eval()" in Identity(model).check().reason


def test_hooks_that_are_vouched_for_are_no_reason(store: FakeStore, engines: MakeEngine) -> None:
    model = tiny_llama(layers=2)
    engine = engines(model, store, chunk_tokens=T)
    engine.turn("s", PROMPT, 8)
    assert engine.flush(10)
    seen: list[object] = []
    model.lm_head.register_forward_hook(inert(lambda *_: seen.append(1)))
    assert engine.turn("s", PROMPT, 8).reused_tokens == 96 and seen


def test_transformers_own_hooks_are_no_reason(store: FakeStore, engines: MakeEngine) -> None:
    """They are there once hidden states were asked for, and return nothing."""
    model = tiny_llama(layers=2)
    engine = engines(model, store, chunk_tokens=T)
    engine.turn("s", PROMPT, 8)
    assert engine.flush(10)
    model(torch.tensor([PROMPT]), output_hidden_states=True)
    assert any(layer._forward_hooks for layer in model.model.layers)
    assert engine.turn("s", PROMPT, 8).reused_tokens == 96


# ------------------------------------------------------------------------------------------------- while a turn runs


def test_what_a_change_during_a_turn_computed_is_not_saved(
    store: FakeStore, engines: MakeEngine, plain: Plain
) -> None:
    """The weights change in the forward call that reads the last piece of the prompt."""
    model = tiny_llama(layers=2)
    calls = iter(range(1000))

    @inert
    def change(*_: object) -> None:
        if next(calls) == 2:
            trained(model)

    engine = engines(model, store, chunk_tokens=T, prefill_tokens=32)
    model.model.layers[1].register_forward_pre_hook(change)
    engine.turn("s", PROMPT, 8)
    assert engine.flush(10)
    first_two_pieces, rest = Counter(salt for salt, _ in store.chunks).values()
    assert (first_two_pieces, rest) == (4, 7), "all was computed again, under another name"
    first = tiny_llama(layers=2)
    turn = engines(first, store, chunk_tokens=T).turn("s", PROMPT, 8)
    assert (turn.tokens, turn.reused_tokens) == (plain(first), 64)


def test_a_change_between_look_up_and_compute_is_computed_anew(
    store: FakeStore, engines: MakeEngine, plain: Plain
) -> None:
    model = tiny_llama(layers=2)
    engine = engines(model, store, chunk_tokens=T)
    engine.turn("s", PROMPT, 8)
    assert engine.flush(10)
    pending = [trained]
    store.on_read = lambda: pending.pop()(model) if pending else None
    turn = engine.turn("s", PROMPT, 8)
    assert (turn.tokens, turn.reused_tokens) == (plain(model), 0)
    assert engine.flush(10)
    assert engine.turn("s", PROMPT, 8).tokens == plain(model)


def test_a_change_during_a_step_is_neither_shared_nor_saved(store: FakeStore) -> None:
    model = tiny_llama(layers=2)
    pending = [True]

    @inert
    def change(*_: object) -> None:
        if pending:
            pending.clear()
            trained(model)

    engine = BatchEngine(model, store.connect, pool_chunks=40, chunk_tokens=T)
    model.model.layers[1].register_forward_pre_hook(change)
    try:
        engine.add(PROMPT, 8)
        tokens = [output.token for output in engine.run()]
        assert tokens == alone(model, PROMPT, 8)
        assert engine.flush(10)
        other = BatchEngine(tiny_llama(layers=2), store.connect, pool_chunks=40, chunk_tokens=T)
        other.add(PROMPT, 8)
        assert [output.token for output in other.run()] == alone(tiny_llama(layers=2), PROMPT, 8)
        assert other.counters["restored_tokens"] == 0
        other.close()
    finally:
        engine.close()


# ------------------------------------------------------------------------------------------------------------- reset


def test_reset_sees_what_moves_no_counter(
    store: FakeStore, engines: MakeEngine, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity_module, "SMALL_BYTES", 0)
    monkeypatch.setattr(identity_module, "SAMPLE_BYTES", 64)
    model = tiny_llama(layers=2)
    engine = engines(model, store, chunk_tokens=T)
    engine.turn("s", PROMPT, 8)
    assert engine.flush(10)
    attention(model).v_proj.weight.detach().numpy()[1, 21:40] += 8  # between the samples
    assert engine.turn("s", PROMPT, 8).reused_tokens == 96, "a sample saw it: this test shows nothing"
    engine.reset()
    turn = engine.turn("s", PROMPT, 8)
    assert (turn.tokens, turn.reused_tokens) == (plain(model), 0)


@pytest.mark.parametrize("name", ["one_element", "data_replaced", "parameter_replaced"])
def test_counters_and_addresses_show_what_samples_miss(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity_module, "SMALL_BYTES", 0)
    monkeypatch.setattr(identity_module, "_samples", lambda *_: ())
    model = tiny_llama(layers=2)
    watched = Identity(model)
    before = watched.check()
    EXPLAINED[name](model)
    assert watched.check() != before
    assert watched.counters["identity_silent_changes"] == 0


def test_a_verification_sees_what_moves_no_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity_module, "SMALL_BYTES", 0)
    monkeypatch.setattr(identity_module, "SAMPLE_BYTES", 64)
    model = tiny_llama(layers=2)
    watched = Identity(model, verify_every_s=1e9)
    before = watched.check()
    attention(model).v_proj.weight.detach().numpy()[1, 21:40] += 8
    assert watched.check() == before and not watched.verify()
    assert watched.check() != before and watched.counters["identity_silent_changes"] == 1
    assert watched.verify() and watched.check() == Identity(model).check()


def test_verifications_happen_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    verify = Identity._verify
    monkeypatch.setattr(Identity, "_verify", lambda *args: (verify(*args), done.set()))
    watched = Identity(tiny_llama(layers=2), verify_every_s=1e-9)
    watched.check()
    assert done.wait(30)
    watched.close()
    assert watched.counters["identity_verifications"] >= 1


def test_a_digest_in_the_background_ends_with_its_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large model it takes minutes, which nobody who closes an engine waits for."""
    watched = Identity(tiny_llama(layers=2), verify_every_s=1e-9)
    began, digested = threading.Event(), []
    real = identity_module.digest_of_tensor

    def digest(tensor: torch.Tensor) -> bytes:
        digested.append(tensor)
        began.set()
        assert watched._closing.wait(30)
        return real(tensor)

    monkeypatch.setattr(identity_module, "digest_of_tensor", digest)
    watched.check()
    assert began.wait(30)
    watched.close()
    watched.check()
    assert len(digested) == 1 and not watched._verifying.is_alive()


def test_every_sample_is_looked_at_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity_module, "SMALL_BYTES", 0)
    monkeypatch.setattr(identity_module, "SAMPLE_BYTES", 64)
    model = tiny_llama(layers=2)
    watched = Identity(model)
    before = watched.check()
    model.model.embed_tokens.weight.detach().numpy()[-1, -1] += 1  # in the last sample of its tensor
    verdicts = {watched.check() for _ in range(identity_module.SAMPLES)}
    assert watched.check() != before and verdicts == {before, watched.check()}


@pytest.mark.parametrize("found_by", ["verification", "reset"])
@pytest.mark.parametrize("kind", ["one", "many"])
def test_what_was_saved_before_a_silent_change_was_found_is_forgotten(
    found_by: str,
    kind: str,
    store: FakeStore,
    engines: MakeEngine,
    plain: Plain,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It lies under the old weights' name, where engines that have them would find it."""
    monkeypatch.setattr(identity_module, "SMALL_BYTES", 0)
    monkeypatch.setattr(identity_module, "_samples", lambda *_: ())
    model, prompts = tiny_llama(layers=2), (PROMPT, PROMPT[::-1])
    engine: Any = (
        engines(model, store, chunk_tokens=T)
        if kind == "one"
        else BatchEngine(model, store.connect, pool_chunks=40, chunk_tokens=T)
    )

    def run(prompt: list[int]) -> None:
        if kind == "one":
            engine.turn("s", prompt, 1)
        else:
            engine.add(prompt, 1)
            list(engine.run())
        assert engine.flush(10)

    run(prompts[0])
    assert engine._identity.verify()
    run(PROMPT[:T])  # what the verification vouches for
    kept = len(store.chunks)
    shared_memory(model)
    run(prompts[1])
    assert len(store.chunks) > kept
    if found_by == "reset":
        engine.reset()
    else:
        assert not engine._identity.verify()
        run(PROMPT[:4])
    assert engine.flush(10)
    if kind == "many":
        engine.close()
    for prompt, reused in zip(prompts, (96, 0), strict=True):
        old: Any = tiny_llama(layers=2)
        if kind == "one":
            turn = engines(old, store, chunk_tokens=T).turn("o", prompt, 8)
            assert (turn.tokens, turn.reused_tokens) == (plain(old, prompt), reused)
        else:
            batch = BatchEngine(old, store.connect, pool_chunks=40, chunk_tokens=T)
            batch.add(prompt, 8)
            assert [output.token for output in batch.run()] == alone(old, prompt, 8)
            assert batch.counters["restored_tokens"] == reused
            batch.close()


@pytest.mark.parametrize("epoch", [None, 3])
def test_reset_makes_the_pool_forget(epoch: int | None, store: FakeStore) -> None:
    engine = BatchEngine(tiny_llama(layers=2), store.connect, pool_chunks=40, chunk_tokens=T)
    try:
        first = engine.add(PROMPT, 30)
        outputs = [output for _ in range(10) for output in engine.step()]
        engine.reset(epoch)
        assert engine.pool.used == 0
        engine.check_integrity()
        outputs += engine.run()
        assert [output.token for output in outputs if output.request == first] == alone(
            tiny_llama(layers=2), PROMPT, 30
        )
    finally:
        engine.close()


def test_a_change_in_the_last_step_is_not_saved_as_a_tail(store: FakeStore, engines: MakeEngine) -> None:
    """No chunk becomes full in it: nobody but the end of the request would look."""
    model = tiny_llama(layers=2)
    engine = engines(model, store, chunk_tokens=T)
    calls = iter(range(1000))
    model.model.layers[1].register_forward_pre_hook(
        inert(lambda *_: trained(model) if next(calls) == 4 else None)
    )
    engine.turn("s", PROMPT, 5)
    assert engine.flush(10)
    assert {len(info.entries) for info in store.sessions.values()} <= {6}
    turn = engines(tiny_llama(layers=2), store, chunk_tokens=T).turn("s", [*PROMPT, 1], 8)
    assert turn.reused_tokens == 96
    assert turn.tokens == tuple(alone(tiny_llama(layers=2), [*PROMPT, 1], 8))


def test_reset_drops_what_waits_to_be_saved(store: FakeStore, engines: MakeEngine) -> None:
    engine = engines(tiny_llama(layers=2), store, chunk_tokens=T, prefill_tokens=16)
    saving, go = threading.Event(), threading.Event()

    def hang() -> None:
        saving.set()
        assert go.wait(30)

    store.on_write = hang
    engine.turn("s", PROMPT, 8)
    assert saving.wait(30)
    engine.reset(1)
    store.on_write = lambda: None
    go.set()
    assert engine.flush(10)
    assert len(store.chunks) <= 1 and not store.sessions, "all but the one that was being saved"
    assert engine.turn("s", PROMPT, 8).reused_tokens == 0


class Gate:
    """Holds up a thread of the engine's at a stated call of the store's until it is opened."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Event(), threading.Event()

    def open(self) -> None:
        self._open.set()

    def hold(self) -> bool:
        self.reached.set()
        return self._open.wait(30)


@pytest.mark.parametrize("steps", [0, None])
@pytest.mark.parametrize("held", ["the look-up", "layer 0", "layer 1"])
@pytest.mark.parametrize(("epoch", "ahead"), [(None, False), (1, True)])
def test_reset_in_mid_load_uses_nothing_of_it(
    epoch: int | None, ahead: bool, held: str, steps: int | None, store: FakeStore, engines: MakeEngine
) -> None:
    """The load goes on meanwhile, into chunks that nobody gets before it has ended: `steps` later, or (None) after all
    that was asked of the engine. `ahead`: the request still waits for a row."""
    model = tiny_llama(layers=2)
    first = engines(model, store, chunk_tokens=T)
    first.turn("s", PROMPT, 8)
    assert first.flush(10) and store.leases == 0
    gate = Gate()
    engine = engines(
        model, store, chunk_tokens=T, retain=True, sequences_max=1, read_buffer=2, load_ahead=int(ahead)
    )
    if ahead:
        running = engine.add(text(40, seed=9), 400)
        while not engine.step():
            pass
    else:
        running = 0

    def copy(number: int) -> bool:
        return gate.hold() if held == f"layer {number}" else True

    store.on_copy = copy
    if held == "the look-up":
        store.on_read = lambda: gate.hold() and None
    number = engine.add([*PROMPT, 1], 8, session="s")
    while not gate.reached.is_set():
        assert all(output.request == running for output in engine.step())
    store.on_read = lambda: None  # of what was held up, nothing; of what is asked from now on, neither
    trained(model)
    engine.reset(epoch)
    engine.check_integrity()
    assert engine.pool.used > 0 or held == "the look-up", "chunks that may still be written are free"
    if running:
        engine.abort(running)
    tokens: list[int] = []
    taken = 0
    while engine.live:
        if taken == steps:
            gate.open()
        tokens += [output.token for output in engine.step() if output.request == number]
        engine.check_integrity()
        taken += 1
    assert tokens == alone(model, [*PROMPT, 1], 8)
    assert engine.counters["restored_tokens"] == 0 and engine.flush(10)
    assert engine.turn("s", [*PROMPT, 1], 8).tokens == tuple(tokens)
    if steps is None and held != "the look-up":
        assert store.leases == 1 and engine.pool.used > 0, "a lease is given back while its bytes are copied"
    gate.open()
    engine.add(PROMPT[:T], 1)
    while engine.live or engine.pool.used:
        engine.step()  # finds the load ended
    engine.close()
    assert store.leases == 0


@pytest.mark.parametrize("steps", [1, 3])
def test_reset_on_a_device_whose_copies_run_late(steps: int, store: FakeStore, engines: MakeEngine) -> None:
    """Two conversations, one of which waits for its row and loads ahead."""
    model = tiny_llama(layers=2)
    first = engines(model, store, chunk_tokens=T)
    for name, prompt in (("s", PROMPT), ("t", text(90, seed=4))):
        first.turn(name, prompt, 8)
    assert first.flush(10)
    device = EmulatedDevice()
    engine = engines(
        model,
        store,
        chunk_tokens=T,
        retain=True,
        sequences_max=1,
        load_ahead=1,
        device=device,
        verdicts=Trusting(),
    )
    prompts = [[*PROMPT, 1], [*text(90, seed=4), 2]]
    numbers = [engine.add(prompt, 8, session=name) for prompt, name in zip(prompts, "st", strict=True)]
    got: dict[int, list[int]] = {number: [] for number in numbers}
    for _ in range(steps):
        for output in engine.step():
            got[output.request].append(output.token)
    trained(model)
    engine.reset(1)
    said = [list(got[number]) for number in numbers]
    while engine.live:
        for output in engine.step():
            got[output.request].append(output.token)
        engine.check_integrity()
    for number, prompt, before in zip(numbers, prompts, said, strict=True):
        rest = alone(model, [*prompt, *before], 8 - len(before)) if len(before) < 8 else []
        assert got[number] == [*before, *rest]
    assert not device.races and engine.flush(10)
    engine.close()
    assert store.leases == 0


def test_reset_moves_the_epoch_and_never_back(store: FakeStore, engines: MakeEngine) -> None:
    engine = engines(tiny_llama(layers=2), store, chunk_tokens=T)
    engine.turn("s", PROMPT, 1)
    engine.reset(2)
    assert engine._store._store.spec.weights_epoch == 2
    with pytest.raises(ValueError, match="epoch is 1: must be at least 2"):
        engine.reset(1)


# --------------------------------------------------------------------------------------------------------------- same


def test_two_copies_of_a_model_are_the_same(tmp_path: Path) -> None:
    model = tiny_llama()
    digest = Identity(model).check()
    assert digest.explained
    assert Identity(tiny_llama()).check() == digest
    model.save_pretrained(tmp_path)
    for options in ({}, {"device_map": "cpu"}, {"low_cpu_mem_usage": True}):
        assert Identity(LlamaForCausalLM.from_pretrained(tmp_path, **options)).check() == digest
    half = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert Identity(half).check() not in (digest, Identity(tiny_llama(torch.bfloat16)).check())
    # The second's rotary frequencies were rounded too, which files say nothing about
    half.model.rotary_emb.to(torch.bfloat16)
    assert Identity(half).check() == Identity(tiny_llama(torch.bfloat16)).check()


def test_computing_changes_nothing(plain: Plain) -> None:
    model = tiny_llama(layers=2)
    watched = Identity(model)
    before = watched.check()
    plain(model)
    alone(model, PROMPT, 4)
    assert watched.check() == before and watched.counters["identity_examinations"] == 1


def test_one_bit_of_any_tensor_counts() -> None:
    model = tiny_llama(torch.bfloat16, layers=1)
    watched = Identity(model)
    seen = {watched.check()}
    tensors = [*model.parameters(), *model.buffers()]
    for tensor in tensors:
        with torch.no_grad():
            flat = tensor.view(-1)
            flat[-1:].view(torch.uint8)[0] ^= 1
        seen.add(watched.check())
    assert len(seen) == len(tensors) + 1


def test_a_model_that_raises_when_it_is_looked_at_is_computed(
    store: FakeStore, engines: MakeEngine, plain: Plain
) -> None:
    class Awkward:
        def __eq__(self, other: object) -> bool:
            raise OSError("not now")

        __hash__ = None  # type: ignore[assignment]

    model = tiny_llama(layers=2)
    engine = engines(model, store, chunk_tokens=T)
    engine.turn("s", PROMPT, 8)
    assert engine.flush(10)
    for _ in range(2):
        model.model.something = Awkward()
        turn = engine.turn("s", PROMPT, 8)
        assert (turn.tokens, turn.reused_tokens) == (plain(model), 0)


def renamed(name: str) -> Callable[[LlamaForCausalLM], None]:
    def change(model: LlamaForCausalLM) -> None:
        model.name_or_path = name
        trained(model)

    return change


@pytest.mark.parametrize("kind", ["one", "many"])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(renamed("x" * 300), id="a name longer than a file's"),
        pytest.param(renamed("x" * 5000), id="a name longer than a path"),
        pytest.param(renamed("half a character: \ud83d"), id="a name that is no text"),
        pytest.param(
            lambda model: setattr(model.config, "layer_types", ["of tomorrow"] * 2), id="unknown layer types"
        ),
    ],
)
def test_a_living_model_that_cannot_be_named_any_more_is_computed(
    change: Callable[[LlamaForCausalLM], None],
    kind: str,
    store: FakeStore,
    engines: MakeEngine,
) -> None:
    model = tiny_llama(layers=2)
    if kind == "one":
        engine = engines(model, store, chunk_tokens=T)
        engine.turn("s", PROMPT, 8)
        change(model)
        tokens = engine.turn("s", PROMPT, 8).tokens
        engine.reset()
        model.config.layer_types = None  # a new engine would not take it
        assert tokens == tuple(alone(model, PROMPT, 8))
        return
    many = BatchEngine(model, store.connect, pool_chunks=40, chunk_tokens=T)
    try:
        many.add(PROMPT, 8)
        assert len(list(many.run())) == 8
        change(model)
        many.add(PROMPT, 8)
        outputs = [output.token for output in many.run()]
        many.reset()
        model.config.layer_types = None
        assert outputs == alone(model, PROMPT, 8)
    finally:
        many.close()


def test_wrappers_and_offloaded_weights_are_refused() -> None:
    model = tiny_llama(layers=2)
    assert "DataParallel, which is not known" in Identity(nn.DataParallel(model)).check().reason
    with warnings.catch_warnings(action="ignore"):  # torch's own
        compiled = torch.compile(model)
    assert "OptimizedModule, which is not known" in Identity(compiled).check().reason
    attention(model).v_proj.to("meta")
    assert "v_proj.weight is on the meta device" in Identity(model).check().reason


# -------------------------------------------------------------------------------------------------- tensors and files


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
def test_sums_on_a_device_see_every_byte_and_its_place(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity_module, "MIX_WORDS", 16)
    content = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    seen = {identity_module._mixed(content)}
    for place in range(count):
        content[place] ^= 128
        seen.add(identity_module._mixed(content))
        content[place] ^= 128
    for shift in range(1, count, 8):
        seen.add(identity_module._mixed(content.roll(shift)))
    assert len(seen) == 1 + count + len(range(1, count, 8))
    assert identity_module._mixed(content.clone()) in seen


def test_digests_of_tensors_that_have_no_plain_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="meta has no plain bytes"):
        digest_of_tensor(torch.empty(3, device="meta"))
    turned = torch.arange(6.0).view(2, 3).t()
    assert digest_of_tensor(turned) == digest_of_tensor(turned.contiguous())


def test_files_are_known_by_their_contents(tmp_path: Path) -> None:
    digests = set()
    for content in (b"a" * 100, b"b" * 100):
        (tmp_path / "weights").write_bytes(content)
        os.utime(tmp_path / "weights", ns=(1, 1))  # as images and content stores do
        digests.add(digest_of_files([tmp_path / "weights"]))
    assert len(digests) == 2
    (tmp_path / "more").write_bytes(b"")
    assert digest_of_files([tmp_path / "weights", tmp_path / "more"]) not in digests


def test_a_file_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity_module, "FILE_SETTLED_S", -1e9)
    path = tmp_path / "weights"
    path.write_bytes(b"a" * 100)
    first = digest_of_files([path])
    made: list[int] = []
    hasher = identity_module.xxhash.xxh3_128
    monkeypatch.setattr(identity_module.xxhash, "xxh3_128", lambda: made.append(1) or hasher())
    assert digest_of_files([path]) == first and not made
    path.unlink()
    path.write_bytes(b"b" * 100)
    assert digest_of_files([path]) != first and made


# ---------------------------------------------------------------------------------- names of sessions, and no numbers


@pytest.mark.parametrize("name", ["", "x" * 257, "é" * 200, "\ud800", None, 7])
def test_a_turn_without_a_usable_name_is_computed(
    name: Any, store: FakeStore, engines: MakeEngine, plain: Plain
) -> None:
    engine = engines(tiny_llama(layers=2), store, chunk_tokens=T)
    for reused in (0, 96):
        turn = engine.turn(name, PROMPT, 8)
        assert (turn.tokens, turn.reused_tokens) == (plain(engine._model), reused)
        assert engine.flush(10)
    assert not store.sessions and engine.counters["requests_unnamed"] == 2 * (name != "")


def test_logits_that_are_no_numbers_end_the_turn_and_are_not_saved(
    store: FakeStore, engines: MakeEngine
) -> None:
    model = tiny_llama(layers=2)
    with torch.no_grad():
        attention(model).v_proj.weight[0, 0] = float("nan")
    engine = engines(model, store, chunk_tokens=T)
    for _ in range(2):
        with pytest.raises(NotNumbers, match="the largest logit is nan"):
            engine.turn("s", PROMPT, 8)
    assert engine.flush(10) and not store.chunks and not store.sessions


def test_history_that_leads_to_no_numbers_is_computed_anew(
    store: FakeStore, engines: MakeEngine, plain: Plain
) -> None:
    engine = engines(tiny_llama(layers=2), store, chunk_tokens=T)
    engine.turn("s", PROMPT, 8)
    assert engine.flush(10)
    next(iter(store.chunks.values())).view("f4")[:] = float("nan")
    turn = engine.turn("s", PROMPT, 8)
    assert (turn.tokens, turn.reused_tokens) == (plain(engine._model), 0)
    assert turn.load_failures == 1


def test_a_request_whose_logits_are_no_numbers_ends_alone(store: FakeStore) -> None:
    """Token 9 is what the model has no numbers for."""
    model = tiny_llama(layers=2)
    with torch.no_grad():
        model.model.embed_tokens.weight[9] = float("nan")
    good = [token for token in PROMPT if token != 9]
    engine = BatchEngine(model, store.connect, pool_chunks=40, chunk_tokens=T)
    try:
        broken = engine.add([*good, 9], 4)
        fine = engine.add(good[::-1], 4)
        outputs = list(engine.run())
        (failed,) = [output for output in outputs if output.request == broken]
        assert (failed.token, failed.finish) == (NO_TOKEN, "error")
        assert [output.token for output in outputs if output.request == fine] == alone(model, good[::-1], 4)
        assert engine.counters["requests_failed"] == 1 and engine.pool.used == 0
        engine.check_integrity()
    finally:
        engine.close()
