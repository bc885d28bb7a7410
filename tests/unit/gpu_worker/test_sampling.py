"""Which tokens may be drawn and how often: what transformers' own warpers say."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kvstore.gpu_worker import sampling as module
from kvstore.gpu_worker.sampling import GREEDY, NotNumbers, Sampler, Sampling, choose_all, probabilities


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


MIXED = [
    *(
        GREEDY,
        Sampling(1.0, seed=1),
        Sampling(0.7, top_k=5, seed=2),
        GREEDY,
        Sampling(1.3, top_p=0.5, seed=3),
    ),
    *(Sampling(0.2, top_k=300, top_p=0.9, seed=4), Sampling(2.0, top_k=1, seed=5), Sampling(1e-300, seed=6)),
    *(Sampling(1.0, top_k=3, top_p=0.4, seed=7), Sampling(1.0, top_k=20, seed=8)),
]


@pytest.mark.parametrize("rows_max", [1, 3, 32])
def test_a_batch_gets_the_tokens_that_each_row_gets_alone(
    rows_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROWS_MAX", rows_max)
    together, alone = ([Sampler(one) for one in MIXED] for _ in range(2))
    for step in range(12):
        rows = torch.stack([logits(seed=100 * step + number) for number in range(len(MIXED))])
        rows[2, :150] = -float("inf")
        choices = choose_all(together, rows)
        assert choices == choose_all(together, rows), "a step that is taken again draws other numbers"
        for number, (choice, sampler) in enumerate(zip(choices, alone, strict=True)):
            assert choice.token == sampler.choose(rows[number]) and not choice.failure
            best, second = rows[number].topk(2).values.tolist()
            assert choice.gap == best - second
            together[number].used()


def test_in_a_batch_only_who_has_no_numbers_gets_no_token() -> None:
    samplers = [Sampler(one) for one in MIXED]
    rows = torch.stack([logits(seed=number) for number in range(len(MIXED))])
    for number, broken in ((1, float("nan")), (4, float("inf")), (3, float("nan"))):
        rows[number, 7] = broken
    rows[6] = -float("inf")
    drawn = samplers[1].draw()
    choices = choose_all(samplers, rows)
    assert {number for number, choice in enumerate(choices) if choice.failure} == {1, 3, 4, 6}
    for number, choice in enumerate(choices):
        if choice.failure:
            with pytest.raises(NotNumbers) as raised:
                Sampler(MIXED[number]).choose(rows[number])
            assert choice.failure == str(raised.value) and choice.token == -1
        else:
            assert choice.token == Sampler(MIXED[number]).choose(rows[number])
    assert samplers[1].draw() == drawn, "a number was drawn for no token"
    assert choose_all([], rows[:0]) == []
    assert choose_all(samplers[:2], torch.zeros(2, 1)) == [(0, 0.0, ""), (0, 0.0, "")]


class _Asked(TorchFunctionMode):
    """Counts what makes the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = getattr(func, "__name__", "")
        if name in {
            "item",
            "tolist",
            "cpu",
            "numpy",
            "nonzero",
            "__bool__",
            "__int__",
            "__float__",
            "__index__",
        }:
            self.times.append(name)
        return func(*args, **(kwargs or {}))


def test_a_batch_waits_for_the_device_once() -> None:
    samplers = [Sampler(one) for one in MIXED]
    for sampler in samplers:
        sampler.draw()  # on the host
    rows = torch.stack([logits(seed=number) for number in range(len(MIXED))])
    with _Asked() as asked:
        choose_all(samplers, rows)
    assert asked.times == ["tolist"]
