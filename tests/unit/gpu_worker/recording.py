"""A batching engine that remembers all it computed, so that it can be held against the plain model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from kvstore.gpu_worker.batching import BatchEngine, Output
from kvstore.gpu_worker.request import Request
from kvstore.gpu_worker.sampling import GREEDY, Sampling, probabilities

T = 16
"""Tokens of a chunk."""
TOLERANCE = 1e-4
"""Of logits of the size of ten or so, in float32."""


def same_to_the_bit(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """With AVX-512. Elsewhere, as on an AMD EPYC with AVX2, results of the same computation differ in their last places
    from one run of it to the next: there it is TOLERANCE."""
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    return all(
        one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=TOLERANCE)
        for one, other in zip(found, expected, strict=True)
    )


class Recording(BatchEngine):
    """Keeps the logits behind each token, and fills with NaN whatever nobody holds and the pool does not know."""

    def __init__(
        self, model: PreTrainedModel, connect: Callable[[], Any] | None = None, **options: Any
    ) -> None:
        super().__init__(
            model, connect, **{"pool_chunks": 64, "chunk_tokens": T, "lookup_timeout_s": 30.0} | options
        )
        self.model = model
        forward = self._forward

        def record(pieces: dict[Request, int], watch: Any = None) -> dict[Request, torch.Tensor]:
            reading = sum(count for count in pieces.values() if count > 1)
            assert reading <= self._scheduler._prefill_tokens, pieces.values()
            logits = forward(pieces, watch)
            self._logits = {request.number: found.clone() for request, found in logits.items()}
            return logits

        record.renew, record.wait = forward.renew, forward.wait  # type: ignore[attr-defined]
        self._forward = record
        self._logits: dict[int, torch.Tensor] = {}
        """Of the last call. A load may still fail behind it: then nothing follows from them."""
        self.seen: dict[int, list[torch.Tensor]] = {}
        self.asked: dict[int, tuple[list[int], Sampling]] = {}
        self.got: dict[int, list[int]] = {}
        self.finished: dict[int, str] = {}
        self.poison()

    def add(self, prompt: Sequence[int], max_new_tokens: int, **options: Any) -> int:
        number = super().add(prompt, max_new_tokens, **options)
        self.asked[number] = list(prompt), options.get("sampling", GREEDY)
        self.seen[number], self.got[number] = [], []
        return number

    def step(self) -> list[Output]:
        outputs = super().step()
        for output in outputs:
            self.got[output.request].append(output.token)
            if (logits := self._logits.get(output.request)) is not None:
                self.seen[output.request].append(logits)
            self.finished[output.request] = output.finish
        self.check_integrity()
        self.poison()
        return outputs

    def poison(self) -> None:
        free = list(self.pool._free)
        if self._store is not None:
            for event in self._store._buffer.reads(free):
                event.synchronize()
        for layer in self.pool.layers:
            layer[free] = float("nan")
            for chunk, (_, tokens) in self.pool._tail_of.items():
                layer[chunk, :, :, len(tokens) :] = float("nan")

    def finish(self) -> Recording:
        for _ in self.run():
            pass
        assert self.pool.used == 0 and self.live == 0
        return self

    def check(self, *, tolerance: float = TOLERANCE) -> None:
        """Everything it ever computed, against the plain model."""
        assert any(self.got.values())
        for number, tokens in self.got.items():
            if tokens:
                prompt, sampling = self.asked[number]
                assert len(self.seen[number]) == len(tokens)
                check_tokens(self.model, prompt, tokens, self.seen[number], sampling, tolerance)


def check_tokens(
    model: PreTrainedModel,
    prompt: Sequence[int],
    tokens: Sequence[int],
    seen: Sequence[torch.Tensor],
    sampling: Sampling,
    tolerance: float,
) -> None:
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *tokens[:-1]]])
        plain = model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
    generator = torch.Generator().manual_seed(sampling.seed)
    for token, found, expected in zip(tokens, seen, plain, strict=True):
        assert (found - expected).abs().max() <= tolerance
        if sampling.temperature == 0:
            assert expected.max() - expected[token] <= 2 * tolerance
            clear = torch.topk(expected, 2).values.diff().abs() > 2 * tolerance
            assert not clear or token == int(expected.argmax())
        else:
            ends = probabilities(expected, sampling).cumsum(0)
            drawn = torch.rand((), dtype=torch.float64, generator=generator) * ends[-1]
            begin = ends[token - 1] if token else 0.0
            slack = 4 * tolerance / sampling.temperature
            assert begin - slack <= drawn <= ends[token] + slack
