"""A position is no place: what a request sees may stand anywhere, in chunks that are filled as they happen to be. Held
against plain transformers with the tokens masked that are not seen."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from kvstore.gpu_worker.forward import Forward
from kvstore.gpu_worker.hbm_pool import HbmPool
from kvstore.gpu_worker.layout import Geometry
from kvstore.gpu_worker.request import Request
from kvstore.gpu_worker.sampling import GREEDY, Sampler
from kvstore.kernels.stretches import Stretch

from ..kernels.launches import bound
from .conftest import text, tiny_llama

SIZE = 16
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 0.4, torch.float16: 0.05}
"""Of logits of size 5 or so."""


class Machine:
    """A model, its pool, and requests that are computed one after the other."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.model = tiny_llama(dtype, layers=3)
        self.pool = HbmPool(Geometry.of(self.model, SIZE), 48)
        for layer in self.pool.layers:
            layer.fill_(float("nan"))
        self.forward = Forward(self.model, self.pool, sequences_max=4, tokens_max=768, share=True)
        self.rows = 0

    def request(self, tokens: list[int], **settings: object) -> Request:
        request = Request(
            self.rows, list(tokens), 1000, frozenset(), Sampler(GREEDY), row=self.rows, **settings
        )
        self.rows += 1
        return request

    def compute(self, *requests: Request, pieces: int = 1000) -> list[torch.Tensor]:
        """All of their tokens, so many at a time; the logits after the last of each."""
        found: dict[Request, torch.Tensor] = {}
        while any(request.missing for request in requests):
            counts = {each: min(each.missing, pieces) for each in requests if each.missing}
            for request, count in counts.items():
                needed = -(-(request.computed + count) // SIZE) - len(request.chunks)
                request.chunks += self.pool.take(needed) or []
            found |= self.forward(counts)
            for request, count in counts.items():
                request.computed += count
        return [found[request] for request in requests]


def expected(
    model: LlamaForCausalLM, history: list[int], new: list[int], hidden: range, jump: int = 0
) -> torch.Tensor:
    """The logits after `new`, which stand `jump` positions behind the history and do not see what is `hidden` of it."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([history]), cache=cache, use_cache=True)
        seen = torch.ones(len(new), len(history) + len(new), dtype=torch.bool).tril(len(history))
        seen[:, hidden] = False
        positions = torch.arange(len(history) + jump, len(history) + jump + len(new))
        return (
            model(
                torch.tensor([new]),
                cache=cache,
                use_cache=True,
                position_ids=positions[None],
                attention_mask=seen[None, None],
            )
            .logits[0, -1]
            .float()
        )


def stretches(chunks: list[int], begin: int, end: int, *, to: int, at: int = 0) -> list[Stretch]:
    """Tokens of a chain from `begin` to `end`, the first at position `to`."""
    found = []
    while begin < end:
        count = min(SIZE - begin % SIZE, end - begin)
        found.append(Stretch(chunks[begin // SIZE], begin % SIZE, count, delta=to - begin, at=at))
        begin, to = begin + count, to + count
    return found


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("pieces", [1, 7, 100])
def test_what_moved_up_is_attention_with_the_cut_text_masked(dtype: torch.dtype, pieces: int) -> None:
    """The first 21 tokens stay, 70 are cut, 58 move up: a cut at no edge of a chunk."""
    machine, history, new = Machine(dtype), text(149), text(33, seed=2)
    old = machine.request(history)
    machine.compute(old)
    seen = stretches(old.chunks, 0, 21, to=0) + stretches(old.chunks, 91, 149, to=21)
    cut = machine.request(new, stretches=seen, jumps=[(0, 79)])
    (found,) = machine.compute(cut, pieces=pieces)
    wanted = expected(machine.model, history, new, range(21, 91))
    # The head stands where it stood, so that only its distance differs: what is masked has no positions that close up
    apart = machine.request(
        new,
        stretches=stretches(old.chunks, 0, 21, to=0) + stretches(old.chunks, 91, 149, to=91),
        jumps=[(0, 149)],
    )
    (unmoved,) = machine.compute(apart, pieces=pieces)
    assert (unmoved - wanted).abs().max() < TOLERANCE[dtype]
    assert found.isfinite().all() and (found - wanted).abs().max() > TOLERANCE[dtype], (
        "the head came no closer"
    )
    no_head = machine.request(new, stretches=stretches(old.chunks, 91, 149, to=0), jumps=[(0, 58)])
    (moved,) = machine.compute(no_head, pieces=pieces)
    wanted = expected(machine.model, history, new, range(91))
    assert (moved - wanted).abs().max() < TOLERANCE[dtype]


def test_naive_positions_are_visibly_broken() -> None:
    """Keys that are not moved, under queries that are: what a system does that forgets the delta."""
    machine, history, new = Machine(), text(149), text(33, seed=2)
    old = machine.request(history)
    machine.compute(old)
    wrong = [one._replace(delta=0) for one in stretches(old.chunks, 91, 149, to=0)]
    naive = machine.request(new, stretches=wrong, jumps=[(0, 58)])
    (found,) = machine.compute(naive)
    assert (found - expected(machine.model, history, new, range(91))).abs().max() > 0.5


def test_nothing_moved_is_bit_identical_to_the_same_kv_and_the_same_pieces() -> None:
    """Positions that are spelled out change no bit; nor does a neighbour that sees what has moved."""
    machine, history = Machine(), text(100)
    plain = machine.request(history)
    spelled = machine.request(history, jumps=[(0, 0), (40, 40)])
    one, other = machine.compute(plain, spelled, pieces=37)
    assert torch.equal(one, other)
    alone = Machine()
    (wanted,) = alone.compute(alone.request(history), pieces=37)
    beside = Machine()
    again = beside.request(history)
    first = beside.request(text(40, seed=5))
    beside.compute(first)
    (found,) = beside.compute(again, pieces=37)
    assert torch.equal(found, wanted)


def test_gaps_are_ordinary() -> None:
    """Positions jump in the middle of a chunk, and the answer goes on from there."""
    machine, tokens = Machine(), text(60)
    request = machine.request(tokens, jumps=[(0, 0), (21, 130), (45, 500)])
    (found,) = machine.compute(request, pieces=25)
    positions = [*range(21), *range(130, 154), *range(500, 515)]
    assert request.positions(0, 60) == positions
    assert request.positions(20, 47) == positions[20:47] and request.position(45) == 500
    with torch.inference_mode():
        wanted = machine.model(torch.tensor([tokens]), position_ids=torch.tensor([positions])).logits[0, -1]
    assert (found - wanted).abs().max() < TOLERANCE[torch.float32]


def test_one_stored_k_serves_several_placements_at_once() -> None:
    """Two requests in one step see the same chunks at two places, and a third one where they were computed."""
    machine, history = Machine(), text(96)
    old = machine.request(history)
    machine.compute(old)
    before = [layer[old.chunks].clone() for layer in machine.pool.layers]
    news = [text(20, seed=seed) for seed in (3, 4, 5)]
    places = (0, 48, 400)
    requests = [
        machine.request(new, stretches=stretches(old.chunks, 48, 96, to=to), jumps=[(0, to + 48)])
        for new, to in zip(news, places, strict=True)
    ]
    for new, found in zip(news, machine.compute(*requests), strict=True):
        wanted = expected(machine.model, history, new, range(48))
        assert (found - wanted).abs().max() < TOLERANCE[torch.float32]
    after = [layer[old.chunks] for layer in machine.pool.layers]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True)), (
        "stored KV was edited"
    )


def test_what_comes_in_later_is_seen_from_there_on() -> None:
    """Own tokens that come before a stretch do not see it."""
    machine, history, new = Machine(), text(64), text(40, seed=7)
    old = machine.request(history)
    machine.compute(old)
    late = machine.request(
        new, stretches=stretches(old.chunks, 0, 64, to=0, at=30), jumps=[(0, 64), (30, 94)]
    )
    machine.compute(late, pieces=40)
    plain = machine.request(new[:30], jumps=[(0, 64)])
    machine.compute(plain)
    for layer in machine.pool.layers:
        assert torch.allclose(layer[late.chunks[0]], layer[plain.chunks[0]], atol=1e-5)
    seen = machine.request(new, stretches=stretches(old.chunks, 0, 64, to=0), jumps=[(0, 64)])
    machine.compute(seen)
    deep = machine.pool.layers[-1]
    assert not torch.allclose(deep[late.chunks[0]], deep[seen.chunks[0]], atol=1e-2)
    assert not torch.allclose(deep[late.chunks[2], :, :, :8], deep[plain.chunks[1], :, :, :8], atol=1e-2)


def test_kernels_are_compiled_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; here it is looked at what would be launched."""
    pytest.importorskip("triton", reason="Triton is not installed: nothing can be bound")
    model = tiny_llama()
    forward = Forward(model, HbmPool(Geometry.of(model, 16), 4), sequences_max=4, tokens_max=64, share=True)
    monkeypatch.setattr(type(model), "device", property(lambda _: torch.device("cuda")))
    with bound(monkeypatch) as launches:
        forward.warm_up()
    kernels = {name.removeprefix("kvstore.kernels.") for name, *_ in launches.keys}
    assert kernels == {
        *("decode.kernel._attend", "decode.kernel._merge", "prefill.kernel._attend"),
        *("stretches.kernel._attend", "write.kernel._write"),
    }
