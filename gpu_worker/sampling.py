"""How the next token is chosen from logits: the largest one, or drawn with a request's own random numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

ROWS_MAX = 32
"""Of logits that are sampled at a time: a row of 128,000 takes 1 MB in float64, several times."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """`temperature` 0 takes the largest logit. Else logits are divided by it, then the `top_k` largest are kept (0:
    all), then the fewest whose probabilities reach `top_p`; one of those is drawn. Raises ValueError for a value out of
    range."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}: must be 0 (greedy) or positive")
        if type(self.top_k) is not int or self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}: must be a whole number, 0 (all) or positive")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: must be above 0 and at most 1")
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed is {self.seed}: must be a whole number from 0 to 2**63 - 1")


GREEDY = Sampling()


class NotNumbers(ArithmeticError):
    """The largest of the logits is NaN or infinite: no token follows from them."""


def check_numbers(logits: torch.Tensor) -> None:
    """Raises NotNumbers for logits [vocabulary] that no token follows from."""
    largest = float(logits.amax())  # NaN if any is
    if not math.isfinite(largest):
        raise NotNumbers(_no_numbers(largest))


def _no_numbers(largest: float) -> str:
    return f"the largest logit is {largest}: the model's weights or its precision are at fault"


class Sampler:
    """Draws the tokens of one request. One random number a token, from a generator of its own, and tokens laid out by
    id, not by rank: what the neighbours in a batch are changes logits by rounding only, and so hardly ever a token."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)
        self._drawn: float | None = None

    def choose(self, logits: torch.Tensor) -> int:
        """The next token, from logits [vocabulary]. Raises NotNumbers."""
        check_numbers(logits)
        if self.sampling.temperature == 0:
            return int(logits.argmax())
        drawn = _moved([self.draw()], torch.float64, logits.device)
        self.used()
        return int(_tokens_at(probabilities(logits, self.sampling).unsqueeze(0), drawn))

    def draw(self) -> float:
        """The number in [0, 1) that the next token is drawn by: the same until it is `used`, since a step may be taken
        again."""
        if self._drawn is None:
            self._drawn = float(torch.rand((), dtype=torch.float64, generator=self._generator))
        return self._drawn

    def used(self) -> None:
        """A token was chosen by it."""
        self._drawn = None


class Choice(NamedTuple):
    """What follows from the logits of one request."""

    token: int
    gap: float
    """How far the largest logit is above the second."""
    failure: str
    """Why there is no token, as NotNumbers says it; else ""."""


def choose_all(samplers: Sequence[Sampler], logits: torch.Tensor) -> list[Choice]:
    """The next token of each request, from logits [requests, vocabulary] in float32, on their device and with one
    synchronisation: what `Sampler.choose` gives for each row alone. Nothing is `used` yet."""
    if not samplers:
        return []
    best = logits.topk(min(2, logits.shape[1]), sorted=True).values
    tokens = logits.argmax(1)
    for some in _blocks([n for n, one in enumerate(samplers) if one.sampling.temperature > 0]):
        rows = _moved(some, torch.long, logits.device)
        settings = [samplers[number].sampling for number in some]
        drawn = _moved([samplers[number].draw() for number in some], torch.float64, logits.device)
        found = _probabilities(logits.index_select(0, rows).double(), settings)
        tokens.index_copy_(0, rows, _tokens_at(found, drawn))
    largest = logits.amax(1)  # NaN if any is
    told = torch.cat((tokens.double().unsqueeze(1), largest.double().unsqueeze(1), best.double()), 1)
    choices = []
    for token, most, *gap in told.tolist():  # waits for the device
        gap = gap[0] - gap[1] if len(gap) > 1 else 0.0
        failure = "" if math.isfinite(most) else str(NotNumbers(_no_numbers(most)))
        choices.append(Choice(int(token) if not failure else -1, gap, failure))
    return choices


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Of each token, [vocabulary], in float64; `sampling.temperature` is positive."""
    return _probabilities(logits.detach().double().unsqueeze(0), [sampling])[0]


def _probabilities(exact: torch.Tensor, settings: Sequence[Sampling]) -> torch.Tensor:
    """Of logits [requests, vocabulary] in float64, each with its own settings. Nothing here asks the device for a
    value."""
    vocabulary, device = exact.shape[1], exact.device
    temperatures = _moved([one.temperature for one in settings], torch.float64, device)
    scaled = (exact - exact.amax(1, keepdim=True)) / temperatures.unsqueeze(
        1
    )  # the largest is 0, however low it is
    kept = [one.top_k if 0 < one.top_k < vocabulary else vocabulary for one in settings]
    if (most := max((k for k in kept if k < vocabulary), default=0)) > 0:
        largest = scaled.topk(most, sorted=True).values
        at = _moved([min(k, most) - 1 for k in kept], torch.long, device).unsqueeze(1)
        least = largest.gather(1, at)
        all_ = _moved([k == vocabulary for k in kept], torch.bool, device).unsqueeze(1)
        scaled = scaled.masked_fill((scaled < least) & ~all_, -float("inf"))
    found = scaled.softmax(1)
    if any(one.top_p < 1 for one in settings):
        limits = _moved([one.top_p for one in settings], torch.float64, device).unsqueeze(1)
        ordered, tokens = found.sort(dim=1, descending=True, stable=True)
        before = ordered.cumsum(1) - ordered
        out = (before >= limits) & (limits < 1)
        found = found.masked_fill(torch.zeros_like(out).scatter_(1, tokens, out), 0.0)
    return found


def _tokens_at(found: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Of each row the first token whose share ends above the number drawn: one of no probability has no share. Rounding
    may bring the number up to the end of the last share, which is that token's still."""
    shares = found.cumsum(1)
    ends = shares[:, -1:].contiguous()
    at = torch.searchsorted(shares, drawn.unsqueeze(1) * ends, right=True)
    return torch.minimum(at, torch.searchsorted(shares, ends)).squeeze(1)


def _blocks(numbers: list[int]) -> Iterator[list[int]]:
    """Few enough rows at a time for the memory that float64 takes."""
    return (numbers[at : at + ROWS_MAX] for at in range(0, len(numbers), ROWS_MAX))


def _moved(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """To the device, without waiting for it."""
    here = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return here.to(device, non_blocking=True)
