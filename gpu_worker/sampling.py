"""How the next token is chosen from logits: the largest one, or drawn with a request's own random numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


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
        raise NotNumbers(f"the largest logit is {largest}: the model's weights or its precision are at fault")


class Sampler:
    """Draws the tokens of one request. One random number a token, from a generator of its own, and tokens laid out by
    id, not by rank: what the neighbours in a batch are changes logits by rounding only, and so hardly ever a token."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def choose(self, logits: torch.Tensor) -> int:
        """The next token, from logits [vocabulary]. Raises NotNumbers."""
        check_numbers(logits)
        if self.sampling.temperature == 0:
            return int(logits.argmax())
        shares = probabilities(logits, self.sampling).cumsum(0)
        drawn = torch.rand((), dtype=torch.float64, generator=self._generator) * shares[-1]
        # The first token whose share ends above the number drawn: one of no probability has no share. Rounding may
        # bring the number up to the end of the last share, which is that token's still.
        return min(
            int(torch.searchsorted(shares, drawn, right=True)), int(torch.searchsorted(shares, shares[-1]))
        )


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Of each token, [vocabulary], in float64; `sampling.temperature` is positive."""
    exact = logits.detach().cpu().double()
    scaled = (exact - exact.max()) / sampling.temperature  # the largest is 0 however low the temperature
    if 0 < sampling.top_k < len(scaled):
        least = scaled.topk(sampling.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < least, -float("inf"))
    found = scaled.softmax(0)
    if sampling.top_p < 1:
        ordered, tokens = found.sort(descending=True, stable=True)
        before = ordered.cumsum(0) - ordered
        found[tokens[before >= sampling.top_p]] = 0
    return found
