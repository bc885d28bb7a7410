"""An engine that runs many sequences at once: they join, decode and leave at any step, and share what they begin with.

Every step is one forward call (iteration-level batching): one token of each sequence that decodes, and pieces of the
prompts of those that are new, as many tokens as a step has for that. KV is written to and read from the paged pool;
what the store has of a prompt is loaded into it, and what becomes full is saved.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from transformers import PreTrainedModel

from kvstore.errors import Unavailable
from kvstore.gpu_worker.attention import NAME, check_pageable
from kvstore.gpu_worker.engine import check_request
from kvstore.gpu_worker.forward import Forward
from kvstore.gpu_worker.hbm_pool import HbmPool
from kvstore.gpu_worker.identity import Identity, Verdict
from kvstore.gpu_worker.layout import CHUNK_TOKENS, Geometry, namespace_of
from kvstore.gpu_worker.pool_store import PoolStore
from kvstore.gpu_worker.sampling import GREEDY, NotNumbers, Sampler, Sampling
from kvstore.gpu_worker.scheduling import Running, Scheduler
from kvstore.layout import NamespaceSpec

if TYPE_CHECKING:
    from kvstore.client import Client

log = logging.getLogger(__name__)

Finish = Literal["", "stop", "length", "error"]
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Output:
    """A token of a request; `finish` says why it is the last one, or "". With "error" there is no token (NO_TOKEN): the
    logits were no numbers."""

    request: int
    token: int
    finish: Finish = ""


class BatchEngine:
    """Requests in, tokens out; from one thread. Saving and loading run on threads of their own. In a step nobody else
    may call the model; between steps its attention is what it was. Once closed it raises Unavailable when it is to
    take a request or a step. What the model computes with may change between steps: what was computed before is then
    computed again, and the namespace follows (`identity.Identity`, which adds its counters).

    `counters` by name: steps; of tokens, computed_tokens, adopted_tokens (found in the pool), restored_tokens (from the
    store); preemptions, load_failures, promotions_awaited, requests_failed.
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
        compare with. `weights`: not read any more, since the weights that count are those in the model.

        Raises Unsupported for a model that the pool, the kernels or the store cannot serve, naming the field,
        ValueError for a setting that is too small, and whatever else the daemon has against us.
        """
        check_pageable(model)
        self.counters: Counter[str] = Counter()
        self.pool = HbmPool(Geometry.of(model, chunk_tokens), pool_chunks, device=model.device)
        self._tokens_max = min(model.config.max_position_embeddings, pool_chunks * chunk_tokens)
        self._vocabulary = model.config.vocab_size
        self._model = model.eval()
        self._share = share
        self._epoch = 0
        self._identity = Identity(model, counters=self.counters)
        self._verdict = self._identity.check()
        self._store = (
            PoolStore(model, self.pool, connect, spec=self._spec(), counters=self.counters)
            if connect
            else None
        )
        self._scheduler = Scheduler(
            self.pool,
            self._store,
            sequences_max=sequences_max,
            prefill_tokens=prefill_tokens,
            share=share and self._verdict.explained,
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
        self._recognise()
        pieces = self._scheduler.schedule()
        if not pieces:
            return []
        logits = self._forward(pieces)
        if self._fills(pieces) and self._recognise():
            return []  # it changed on the way: what is full now would be shared and saved
        # All of them before anything changes: a step that breaks off is taken again
        chosen, failed = {}, []
        for sequence, found in logits.items():
            try:
                chosen[sequence] = sequence.sampler.choose(found)
            except NotNumbers as error:
                log.warning("request %d: %s", sequence.number, error)
                failed.append(sequence)
        outputs = []
        for sequence in failed:
            outputs.append(Output(sequence.number, NO_TOKEN, "error"))
            self._scheduler.stop(sequence)
            self.counters["requests_failed"] += 1
        for sequence, count in pieces.items():
            if sequence in failed:
                continue
            self._scheduler.computed(sequence, count)
            if sequence in chosen:
                sequence.tokens.append(chosen[sequence])
                outputs.append(Output(sequence.number, chosen[sequence], _finish(sequence)))
                if outputs[-1].finish:
                    self._scheduler.stop(sequence)
        self.counters["steps"] += 1
        self.counters["computed_tokens"] += sum(pieces.values())
        return outputs

    def reset(self, epoch: int | None = None) -> None:
        """For programs that have changed weights: all of them are digested again, and what was computed before, in the
        pool and in the store, is not used any more. Requests go on with the tokens they have. `epoch`: the namespace's
        weights epoch from now on; the store then drops the older one of the same weights. Raises ValueError for one
        that is lower than before."""
        if epoch is not None:
            if epoch < self._epoch:
                raise ValueError(f"epoch is {epoch}: must be at least {self._epoch}, which it was before")
            self._epoch = epoch
        verdict = self._identity.reset()
        if self._store is not None:
            self._store.saver.follow(self._identity)
        self._follow(verdict)

    def flush(self, timeout_s: float) -> bool:
        """Waits until all KV is saved or dropped; False if that took too long."""
        return self._store is None or self._store.flush(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Stops all requests, saves what is queued, for at most `timeout_s`, and closes the client."""
        self._closed = True
        self._scheduler.stop_all()
        try:
            if self._store is not None:
                self._store.close(timeout_s)
        finally:
            self._identity.close()

    def _recognise(self) -> bool:
        """Whether the model computes otherwise than at the step before; then all is computed again."""
        verdict = self._identity.check()
        if self._store is not None:
            self._store.saver.follow(self._identity)
        if verdict == self._verdict:
            return False
        self._follow(verdict)
        return True

    def _follow(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._scheduler.restart(share=self._share and verdict.explained)
        if self._store is None:
            return
        try:
            spec = self._spec()
        except Exception:
            # A living model may get any name: the step must not fail for it.
            log.warning("computing without the store: the model cannot be named", exc_info=True)
            spec = None
        self._store.use(spec)

    def _spec(self) -> NamespaceSpec | None:
        if not self._verdict.explained:
            return None
        geometry = self.pool.geometry
        return namespace_of(
            self._model, geometry, digest=self._verdict.digest, attention=NAME, weights_epoch=self._epoch
        )

    def _fills(self, pieces: Mapping[Running, int]) -> bool:
        step = self.pool.geometry.chunk_tokens
        return any(sequence.computed % step + count >= step for sequence, count in pieces.items())

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
