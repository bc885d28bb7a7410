"""An engine that runs many sequences at once: they join, decode and leave at any step, and share what they begin with.

Every step is one forward call (iteration-level batching): one token of each sequence that decodes, and pieces of the
prompts of those that are new, as many tokens as a step has for that. KV is written to and read from the paged pool;
what the store has of a prompt is loaded into it, and what becomes full is saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from transformers import PreTrainedModel

from kvstore.errors import Unavailable
from kvstore.gpu_worker.attention import check_pageable
from kvstore.gpu_worker.engine import check_request
from kvstore.gpu_worker.forward import Forward
from kvstore.gpu_worker.hbm_pool import HbmPool
from kvstore.gpu_worker.layout import CHUNK_TOKENS, Geometry
from kvstore.gpu_worker.pool_store import PoolStore
from kvstore.gpu_worker.sampling import GREEDY, Sampler, Sampling
from kvstore.gpu_worker.scheduling import Running, Scheduler

if TYPE_CHECKING:
    from kvstore.client import Client

Finish = Literal["", "stop", "length"]


@dataclass(frozen=True, slots=True)
class Output:
    """A token of a request; `finish` says why it is the last one, or ""."""

    request: int
    token: int
    finish: Finish = ""


class BatchEngine:
    """Requests in, tokens out; from one thread. Saving and loading run on threads of their own. In a step nobody else
    may call the model; between steps its attention is what it was. Once closed it raises Unavailable when it is to
    take a request or a step.

    `counters` by name: steps; of tokens, computed_tokens, adopted_tokens (found in the pool), restored_tokens (from the
    store); preemptions, load_failures, promotions_awaited.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        connect: Callable[[], Client] | None = None,
        *,
        pool_chunks: int,
        chunk_tokens: int = CHUNK_TOKENS,
        sequences_max: int = 16,
        prefill_tokens: int = 512,
        share: bool = True,
        weights: Sequence[Path] = (),
    ) -> None:
        """`connect` makes the client, which the engine closes; while no daemon answers, everything is computed.
        `pool_chunks`: size of the pool. `sequences_max`: how many run at a time; more wait. `prefill_tokens`: how many
        tokens of prompts are computed in a step, beside those that decode. `share=False`: sequences share nothing, to
        compare with. `weights`: the files the model was loaded from (see `namespace_of`).

        Raises Unsupported for a model that the pool, the kernels or the store cannot serve, naming the field,
        ValueError for a setting that is too small, and whatever else the daemon has against us.
        """
        check_pageable(model)
        self.counters: Counter[str] = Counter()
        self.pool = HbmPool(Geometry.of(model, chunk_tokens), pool_chunks, device=model.device)
        self._tokens_max = min(model.config.max_position_embeddings, pool_chunks * chunk_tokens)
        self._vocabulary = model.config.vocab_size
        self._store = (
            PoolStore(model, self.pool, connect, weights=weights, counters=self.counters) if connect else None
        )
        self._scheduler = Scheduler(
            self.pool,
            self._store,
            sequences_max=sequences_max,
            prefill_tokens=prefill_tokens,
            share=share,
            counters=self.counters,
        )
        self._forward = Forward(
            model, self.pool, sequences_max=sequences_max, tokens_max=self._tokens_max, share=share
        )
        self._count = 0
        self._closed = False

    def __repr__(self) -> str:
        running, waiting = len(self._scheduler.running), len(self._scheduler.waiting)
        return f"BatchEngine({running} running, {waiting} waiting, {self.pool})"

    @property
    def live(self) -> int:
        """Requests that have not got their last token."""
        return len(self._scheduler.running) + len(self._scheduler.waiting)

    def add(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        sampling: Sampling = GREEDY,
        stop_tokens: Sequence[int] = (),
    ) -> int:
        """A request, which runs from the next step on if there is room; returns its number. It gets 1 to
        `max_new_tokens` tokens, the last perhaps one of `stop_tokens`. The same seed gives the same tokens whatever
        runs beside it. Raises ValueError for what the model cannot take or the pool cannot hold."""
        self._check_open()
        check_request(prompt, max_new_tokens, vocabulary=self._vocabulary)
        limit = len(prompt) + max_new_tokens
        if limit > self._tokens_max:
            raise ValueError(
                f"{len(prompt)} and {max_new_tokens} tokens: the model and a pool of {self.pool.chunks} chunks "
                f"take {self._tokens_max}"
            )
        self._count += 1
        request = Running(self._count, list(prompt), limit, frozenset(stop_tokens), Sampler(sampling))
        self._scheduler.waiting.append(request)
        return self._count

    def abort(self, request: int) -> bool:
        """It gets no more tokens, those of a step that was taken excepted, and what only it held is free; False if it
        is not live."""
        return self._scheduler.abort(request)

    def run(self) -> Iterator[Output]:
        """Steps until nothing is left to do; requests may be added and aborted meanwhile."""
        while self.live:
            yield from self.step()

    def step(self) -> list[Output]:
        """One forward call, and the tokens that came out of it. None while all that could be computed is on its way
        from the store: the call returns soon then."""
        self._check_open()
        pieces = self._scheduler.schedule()
        if not pieces:
            return []
        logits = self._forward(pieces)
        # All of them before anything changes: a step that breaks off is taken again
        chosen = {sequence: sequence.sampler.choose(found) for sequence, found in logits.items()}
        outputs = []
        for sequence, count in pieces.items():
            self._scheduler.computed(sequence, count)
            if sequence in chosen:
                sequence.tokens.append(chosen[sequence])
                outputs.append(Output(sequence.number, chosen[sequence], _finish(sequence)))
                if outputs[-1].finish:
                    self._scheduler.stop(sequence)
        self.counters["steps"] += 1
        self.counters["computed_tokens"] += sum(pieces.values())
        return outputs

    def flush(self, timeout_s: float) -> bool:
        """Waits until all KV is saved or dropped; False if that took too long."""
        return self._store is None or self._store.flush(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Stops all requests, saves what is queued, for at most `timeout_s`, and closes the client."""
        self._closed = True
        self._scheduler.stop_all()
        if self._store is not None:
            self._store.close(timeout_s)

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the engine is closed", remedy="make another one")

    def check_integrity(self) -> None:
        """Assert what only a bug could break; for tests."""
        self._scheduler.check_integrity()


def _finish(sequence: Running) -> Finish:
    if sequence.tokens[-1] in sequence.stop_tokens:
        return "stop"
    return "length" if len(sequence.tokens) == sequence.tokens_max else ""
