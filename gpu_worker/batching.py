"""An engine that runs many sequences at once: they join, decode and leave at any step, and share what they begin with.

Every step is one forward call (iteration-level batching): one token of each sequence that decodes, and pieces of the
prompts of those that are new, as many tokens as a step has for that. KV is written to and read from the paged pool.

What sequences have in common is computed once. A prompt whose next chunk is in the pool adopts it; one whose next chunk
an older sequence is about to compute waits for it. When the pool is full the newest sequence goes back to the queue and
is computed again from its tokens once there is room; the oldest one always goes on, so all get done.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import PreTrainedModel

from kvstore.gpu_worker.attention import Step, check_pageable, paged
from kvstore.gpu_worker.hbm_pool import HbmPool
from kvstore.gpu_worker.layout import CHUNK_TOKENS, Geometry
from kvstore.gpu_worker.sampling import GREEDY, Sampler, Sampling
from kvstore.kernels.forest import Forest, Plan
from kvstore.kernels.prefill import PrefillPlan
from kvstore.keys import ROOT, SALT_BYTES, exact_chain
from kvstore.types import ChunkKey

SPLIT_TOKENS = 512
"""Tokens that one work item of attention covers at most."""
TILE_ROWS = 64
"""On a GPU: queries times heads of a group in one work item."""


@dataclass(frozen=True, slots=True)
class Output:
    """A token of a request; `finish` says why it is the last one, or ""."""

    request: int
    token: int
    finish: Literal["", "stop", "length"] = ""


@dataclass(slots=True, eq=False)
class Running:
    """A request from `add` to its last token."""

    number: int
    tokens: list[int]
    """The prompt and what was chosen since."""
    tokens_max: int
    stop_tokens: frozenset[int]
    sampler: Sampler
    chunks: list[int] = field(default_factory=list)
    keys: list[ChunkKey] = field(default_factory=list)
    """Of the full chunks of `tokens`."""
    computed: int = 0
    """Tokens whose KV is in `chunks`."""
    row: int = -1
    """Its row in the forests, while it runs."""

    @property
    def missing(self) -> int:
        return len(self.tokens) - self.computed


class BatchEngine:
    """Requests in, tokens out; from one thread.

    `counters` by name: steps, computed_tokens, adopted_tokens (of prompts, found in the pool), preemptions.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pool_chunks: int,
        chunk_tokens: int = CHUNK_TOKENS,
        sequences_max: int = 16,
        prefill_tokens: int = 512,
        share: bool = True,
    ) -> None:
        """`pool_chunks`: size of the pool. `sequences_max`: how many run at a time; more wait. `prefill_tokens`: how
        many tokens of prompts are computed in a step, beside those that decode. `share=False`: sequences share nothing,
        to compare with.

        Raises Unsupported for a model that the pool or the kernels cannot serve, naming the field, and ValueError for a
        setting that is too small.
        """
        for name, value in (("sequences_max", sequences_max), ("prefill_tokens", prefill_tokens)):
            if value < 1:
                raise ValueError(f"{name} is {value}: must be at least 1")
        check_pageable(model)
        self.model = model.eval()
        self.geometry = Geometry.of(model, chunk_tokens)
        self.pool = HbmPool(self.geometry, pool_chunks, device=model.device)
        self.counters: Counter[str] = Counter()
        self._tokens_max = min(model.config.max_position_embeddings, pool_chunks * chunk_tokens)
        self._prefill_tokens = prefill_tokens
        self._share = share
        self._salt = bytes(SALT_BYTES)
        self._count = 0
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []
        """Oldest first; all of them are older than those that wait."""
        self._rows = list(range(sequences_max - 1, -1, -1))
        self._decoding, self._prefilling = (self._forest(sequences_max) for _ in range(2))

    def __repr__(self) -> str:
        return f"BatchEngine({len(self._running)} running, {len(self._waiting)} waiting, {self.pool})"

    @property
    def live(self) -> int:
        """Requests that have not got their last token."""
        return len(self._running) + len(self._waiting)

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
        if not prompt or max_new_tokens < 1:
            raise ValueError(f"a request reads and writes tokens: not {len(prompt)} and {max_new_tokens}")
        vocabulary = self.model.config.vocab_size
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise ValueError(f"the prompt has token ids outside of the model's {vocabulary}")
        if len(prompt) + max_new_tokens > self._tokens_max:
            raise ValueError(
                f"{len(prompt)} and {max_new_tokens} tokens: the model and a pool of {self.pool.chunks} chunks "
                f"take {self._tokens_max}"
            )
        self._count += 1
        limit = len(prompt) + max_new_tokens
        stop = frozenset(stop_tokens)
        self._waiting.append(Running(self._count, list(prompt), limit, stop, Sampler(sampling)))
        return self._count

    def abort(self, request: int) -> bool:
        """It gets no more tokens, and what only it held is free; False if it is not live."""
        for sequence in self._running:
            if sequence.number == request:
                self._stop(sequence)
                return True
        before = len(self._waiting)
        self._waiting = deque(waiting for waiting in self._waiting if waiting.number != request)
        return len(self._waiting) < before

    def run(self) -> Iterator[Output]:
        """Steps until nothing is left to do; requests may be added and aborted meanwhile."""
        while self.live:
            yield from self.step()

    def step(self) -> list[Output]:
        """One forward call, and the tokens that came out of it."""
        self._admit()
        pieces = self._schedule()
        logits = self._forward(pieces)
        outputs = []
        for sequence, count in pieces.items():
            self._computed(sequence, count)
            if sequence.missing == 0:
                token = sequence.sampler.choose(logits[sequence.number])
                sequence.tokens.append(token)
                outputs.append(Output(sequence.number, token, self._finish(sequence)))
                if outputs[-1].finish:
                    self._stop(sequence)
        return outputs

    def check_integrity(self) -> None:
        """Assert what only a bug could break; for tests."""
        self.pool.check_integrity([sequence.chunks for sequence in self._running])
        self._decoding.check_integrity()
        numbers = [sequence.number for sequence in (*self._running, *self._waiting)]
        assert numbers == sorted(numbers), "a sequence has lost its turn"
        rows = sorted([*self._rows, *(sequence.row for sequence in self._running)])
        assert rows == list(range(self._decoding.sequences_max)), "a row is lost or in two places"
        assert len(self._prefilling) == 0
        for sequence in self._running:
            assert sequence.computed <= len(sequence.chunks) * self.geometry.chunk_tokens
        for sequence in self._waiting:
            assert not sequence.chunks and not sequence.computed and sequence.row < 0

    # ---------------------------------------------------------------------------------------------------- scheduling

    def _admit(self) -> None:
        """Who waits runs, in order, if there are a row and chunks for all its tokens, and one more for each other."""
        while self._waiting and self._rows:
            sequence = self._waiting[0]
            found = self.pool.find(self._adoptable(sequence))
            needed = self._chunks(len(sequence.tokens)) - len(found) + len(self._running)
            if self._running and needed > self.pool.free:
                return
            sequence.row = self._rows.pop()
            self._running.append(self._waiting.popleft())

    def _schedule(self) -> dict[Running, int]:
        """How many tokens of which sequence are computed now; those that decode first, then the oldest."""
        pieces: dict[Running, int] = {}
        promised: set[ChunkKey] = set()  # of chunks that a sequence looked at before is to compute
        budget = self._prefill_tokens
        for sequence in sorted(self._running, key=lambda sequence: sequence.missing > 1):
            if sequence.row < 0:
                continue  # it had to make room meanwhile
            self._adopt(sequence)
            count = 1 if sequence.missing == 1 else min(sequence.missing, budget)
            if count == 0 or self._next(sequence) in promised:
                continue
            if self._make_room(sequence, sequence.computed + count, pieces):
                pieces[sequence] = count
                if sequence.missing > 1:
                    budget -= count
                    promised.update(
                        self._adoptable(sequence)[sequence.computed // self.geometry.chunk_tokens :]
                    )
        return pieces

    def _adopt(self, sequence: Running) -> None:
        """Take what others have computed of its tokens; at least one token is left to compute."""
        step = self.geometry.chunk_tokens
        if sequence.computed == len(sequence.chunks) * step:
            found = self.pool.find(self._adoptable(sequence)[len(sequence.chunks) :])
            self.pool.hold(found)
            sequence.chunks += found
            sequence.computed += len(found) * step
            self.counters["adopted_tokens"] += len(found) * step

    def _adoptable(self, sequence: Running) -> list[ChunkKey]:
        if not self._share:
            return []
        self._complete_keys(sequence)
        return sequence.keys[: (len(sequence.tokens) - 1) // self.geometry.chunk_tokens]

    def _next(self, sequence: Running) -> ChunkKey | None:
        """The key of the chunk that it begins with its next token, if others may compute it as well."""
        number, inside = divmod(sequence.computed, self.geometry.chunk_tokens)
        keys = self._adoptable(sequence)
        return keys[number] if not inside and number < len(keys) else None

    def _make_room(self, sequence: Running, tokens: int, pieces: dict[Running, int]) -> bool:
        """Chunks for so many tokens, taken from the newest if none is free; False if it is the newest itself."""
        needed = self._chunks(tokens) - len(sequence.chunks)
        while (taken := self.pool.take(needed)) is None:
            newest = self._running[-1]
            pieces.pop(newest, None)
            self._stop(newest)
            self._waiting.appendleft(newest)
            self.counters["preemptions"] += 1
            if newest is sequence:
                return False
        sequence.chunks += taken
        return True

    def _computed(self, sequence: Running, count: int) -> None:
        """The KV of so many tokens more is in the pool: what is full now, others may adopt."""
        step = self.geometry.chunk_tokens
        full = sequence.computed // step
        sequence.computed += count
        self.counters["computed_tokens"] += count
        if self._share and sequence.computed // step > full:
            self._complete_keys(sequence)
            for number in range(full, sequence.computed // step):
                self.pool.publish(sequence.chunks[number], sequence.keys[number])

    def _finish(self, sequence: Running) -> Literal["", "stop", "length"]:
        if sequence.tokens[-1] in sequence.stop_tokens:
            return "stop"
        return "length" if len(sequence.tokens) == sequence.tokens_max else ""

    def _stop(self, sequence: Running) -> None:
        """It runs no more, and holds nothing."""
        self._running.remove(sequence)
        self.pool.drop(sequence.chunks)
        if sequence.row in self._decoding:
            self._decoding.leave(sequence.row)
        self._rows.append(sequence.row)
        sequence.chunks, sequence.computed, sequence.row = [], 0, -1

    def _complete_keys(self, sequence: Running) -> None:
        step = self.geometry.chunk_tokens
        known = len(sequence.keys)
        if len(sequence.tokens) >= (known + 1) * step:
            parent = sequence.keys[-1] if known else ROOT
            sequence.keys += exact_chain(self._salt, sequence.tokens[known * step :], step, parent)

    def _chunks(self, tokens: int) -> int:
        return -(-tokens // self.geometry.chunk_tokens)

    # --------------------------------------------------------------------------------------------------------- model

    def _forward(self, pieces: dict[Running, int]) -> dict[int, torch.Tensor]:
        """Computes the tokens of all pieces; the logits [vocabulary], in fp32, after each request's last token, of
        those that have none left then."""
        if not pieces:
            return {}
        decoding = [sequence for sequence, count in pieces.items() if count == 1]
        prefilling = {sequence: count for sequence, count in pieces.items() if count > 1}
        order = [(sequence, pieces[sequence]) for sequence in (*decoding, *prefilling)]

        ids: list[int] = []
        positions: list[int] = []
        chunks: list[int] = []
        ends: list[int] = []
        done: list[int] = []
        for sequence, count in order:
            start, end = sequence.computed, sequence.computed + count
            ids += sequence.tokens[start:end]
            positions += range(start, end)
            chunks += [sequence.chunks[at // self.geometry.chunk_tokens] for at in range(start, end)]
            if end == len(sequence.tokens):
                ends.append(len(ids) - 1)
                done.append(sequence.number)

        def tensor(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.long, device=self.model.device)

        places = tensor(positions)
        step = Step(
            layers=self.pool.layers,
            chunks=tensor(chunks),
            places=places % self.geometry.chunk_tokens,
            rows=tensor([sequence.row for sequence in decoding]),
            decode=self._decode_plan(decoding),
            prefill=self._prefill_plan(prefilling),
        )
        with torch.inference_mode(), paged(self.model):
            out = self.model(
                input_ids=tensor(ids).unsqueeze(0),
                position_ids=places.unsqueeze(0),
                use_cache=False,
                logits_to_keep=tensor(ends),
                step=step,
            )
        self.counters["steps"] += 1
        return dict(zip(done, out.logits[0].float(), strict=True))

    def _decode_plan(self, sequences: Sequence[Running]) -> Plan | None:
        """The forest of those that decode is kept from step to step: a token more for each is a number more."""
        rows = {sequence.row for sequence in sequences}
        for sequence in self._running:
            if sequence.row not in rows and sequence.row in self._decoding:
                self._decoding.leave(sequence.row)
        for sequence in sequences:
            if sequence.row in self._decoding and self._decoding.length(sequence.row) == sequence.computed:
                number, inside = divmod(sequence.computed, self.geometry.chunk_tokens)
                self._decoding.append(sequence.row, None if inside else sequence.chunks[number])
            else:  # it is new, or a step was not finished
                if sequence.row in self._decoding:
                    self._decoding.leave(sequence.row)
                self._join(self._decoding, sequence, sequence.computed + 1)
        return self._decoding.plan() if sequences else None

    def _prefill_plan(self, pieces: Mapping[Running, int]) -> PrefillPlan | None:
        if not pieces:
            return None
        for sequence, count in pieces.items():
            self._join(self._prefilling, sequence, sequence.computed + count)
        try:
            return self._prefilling.prefill({sequence.row: count for sequence, count in pieces.items()})
        finally:
            for sequence in pieces:
                self._prefilling.leave(sequence.row)

    def _join(self, forest: Forest, sequence: Running, tokens: int) -> None:
        forest.join(sequence.row, sequence.chunks[: self._chunks(tokens)], tokens)

    def _forest(self, sequences_max: int) -> Forest:
        step = self.geometry.chunk_tokens
        split = max(1, SPLIT_TOKENS // step) * step
        # A sequence has a piece for every `split` tokens, and one more for each run, of which there are no more than
        # sequences; and so have all of them together.
        most = sequences_max * (self._tokens_max // split + 1 + sequences_max)
        group = self.model.config.num_attention_heads // self.geometry.heads
        on_gpu = self.model.device.type != "cpu"
        return Forest(
            chunk_tokens=step,
            chunks=self.pool.chunks,
            sequences_max=sequences_max,
            split_tokens=split,
            tile_sequences=max(1, TILE_ROWS // group) if on_gpu else sequences_max,
            items_max=most,
            partials_max=most,
            share=self._share,
            device=self.model.device,
        )
