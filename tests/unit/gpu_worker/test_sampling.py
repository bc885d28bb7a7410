"""Which tokens may be drawn and how often: what transformers' own warpers say."""

from __future__ import annotations

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kvstore.gpu_worker.sampling import GREEDY, NotNumbers, Sampler, Sampling, probabilities


def logits(count: int = 200, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.7), (20, 0.5), (1, 1.0), (500, 0.01)])
def test_probabilities_are_those_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    scores = logits().double().unsqueeze(0)
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    for warper in warpers:
        scores = warper(None, scores)
    found = probabilities(logits(), Sampling(temperature, top_k, top_p))
    assert torch.allclose(found / found.sum(), scores.softmax(-1)[0], atol=1e-12)


def test_tokens_are_drawn_as_often_as_is_probable() -> None:
    sampling = Sampling(temperature=1.5, top_k=6, seed=3)
    sampler, few = Sampler(sampling), logits(20)
    drawn = torch.tensor([sampler.choose(few) for _ in range(4000)]).bincount(minlength=20) / 4000
    expected = probabilities(few, sampling)
    assert (drawn[expected == 0] == 0).all()
    assert (drawn - expected).abs().max() < 0.03


def test_the_seed_decides() -> None:
    def tokens(seed: int) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed))
        return [sampler.choose(logits(seed=number)) for number in range(20)]

    assert tokens(1) == tokens(1) != tokens(2)


def test_without_temperature_it_is_the_largest() -> None:
    assert Sampler(GREEDY).choose(logits()) == int(logits().argmax())
    assert Sampler(Sampling(temperature=1e-300)).choose(logits()) == int(logits().argmax())


@pytest.mark.parametrize("random", [0.0, 1 - 2**-53])
def test_a_token_of_no_probability_is_never_drawn(random: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outermost numbers that may be drawn, and tokens of no probability at both ends."""
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.tensor(random, dtype=torch.float64))
    few = torch.tensor([-9.0, 1.0, 1.1, 1.2, -9.0])
    assert Sampler(Sampling(temperature=1.0, top_k=3)).choose(few) == (1 if random == 0 else 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", -1.0), ("temperature", float("nan")), ("temperature", float("inf"))),
        *(("top_k", -1), ("top_p", 0.0), ("top_p", 1.1), ("seed", -1), ("seed", 1 << 63)),
        *(("top_k", 1.5), ("top_k", True), ("seed", 1.5)),
    ],
)
def test_what_is_out_of_range_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        Sampling(**{field: value})


SAMPLINGS = (GREEDY, Sampling(1.0), Sampling(1.0, top_k=5), Sampling(1.0, top_p=0.5))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("count", [1, 20])
def test_no_token_follows_from_logits_that_are_no_numbers(
    sampling: Sampling, broken: float, count: int
) -> None:
    few = logits(20)
    few[:count] = broken
    with pytest.raises(NotNumbers, match=f"the largest logit is {broken}"):
        Sampler(sampling).choose(few)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_tokens_that_are_ruled_out_are_never_chosen(sampling: Sampling) -> None:
    few = logits(20)
    few[:19] = -float("inf")
    assert Sampler(sampling).choose(few) == 19
    few[19] = -float("inf")
    with pytest.raises(NotNumbers, match="the largest logit is -inf"):
        Sampler(sampling).choose(few)
