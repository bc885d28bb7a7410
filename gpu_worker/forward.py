"""One forward call of a Hugging Face model for tokens of many sequences, whose KV lies in the paged pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from transformers import PreTrainedModel

from kvstore.errors import Unsupported
from kvstore.gpu_worker.assembly import Span, missing_spans
from kvstore.gpu_worker.attention import Layers, Probe, Seen, Step, paged
from kvstore.gpu_worker.device import Device
from kvstore.gpu_worker.graphs import DecodeGraphs, Inputs
from kvstore.gpu_worker.hbm_pool import HbmPool
from kvstore.gpu_worker.linear import turnable, turned
from kvstore.gpu_worker.masses import OBSERVED, Observation
from kvstore.gpu_worker.positions import Positions
from kvstore.gpu_worker.request import Request
from kvstore.gpu_worker.uploads import Uploads
from kvstore.kernels.forest import Forest, Plan
from kvstore.kernels.launch import card_of, rows_max
from kvstore.kernels.prefill import PrefillPlan
from kvstore.kernels.self_check import Shape
from kvstore.kernels.warm_up import warm_up
from kvstore.kernels.write import Slots

SPLIT_TOKENS = 512
"""Tokens that one work item of attention covers at most."""
TILE_ROWS = 64
"""On a GPU: queries times heads of a group in one work item, at most."""


class Forward:
    """The model, the pool, and who shares what: one forest of those that decode, kept from step to step (a token more
    for each is a number more), and one of those whose prompts are read, made anew each time."""

    def __init__(
        self,
        model: PreTrainedModel,
        pool: HbmPool,
        *,
        sequences_max: int,
        tokens_max: int,
        share: bool,
        device: Device | None = None,
        explained: bool = True,
    ) -> None:
        """`device`: captures steps that only decode, if it can; gets plans of what decodes from registered memory, if
        its own is not the host's. `explained`: see `renew`."""
        self.model = model.eval()
        self._explained = explained
        uploads = Uploads(device) if device is not None and not device.in_host_memory else None
        self.graphs = (
            DecodeGraphs(device, model.device, sequences_max=sequences_max, upload=uploads)
            if device is not None and device.captures
            else None
        )
        self._linear = turnable(model)
        self._tokens_max = tokens_max
        self._positions = self._positions_of(model)
        self._pool = pool
        self._chunk_tokens = pool.geometry.chunk_tokens
        split = max(1, SPLIT_TOKENS // self._chunk_tokens) * self._chunk_tokens
        # A sequence has a piece for every `split` tokens, and one more for each run, of which there are no more than
        # sequences on its path; all together have no more items than that.
        group = model.config.num_attention_heads // pool.geometry.heads
        on_gpu = model.device.type != "cpu"
        tile_rows = rows_max(pool.geometry.head_dim, most=TILE_ROWS, card=card_of(model.device))
        self._decoding, self._prefilling = (
            Forest(
                chunk_tokens=self._chunk_tokens,
                chunks=pool.chunks,
                sequences_max=sequences_max,
                split_tokens=split,
                tile_sequences=max(1, tile_rows // group) if on_gpu else sequences_max,
                items_max=sequences_max * (tokens_max // split + 1 + sequences_max),
                partials_max=sequences_max * (tokens_max // split + 1 + sequences_max),
                share=share,
                device=model.device,
                upload=upload,
            )
            for upload in (uploads, None)  # the other one's arrays are new for each step
        )

    def warm_up(self) -> None:
        """Compiles what steps will need of the kernels, so that none of them waits for a compiler. What they compute
        on the way nobody uses; all the same they are to be proved first (`kernel_check.py`): one that fails is told
        then as what it is."""
        if self.model.device.type == "cpu":
            return
        keys, values = self._pool.layers[0].unbind(1)
        warm_up(
            keys,
            values,
            heads=self.model.config.num_attention_heads,
            split_tokens=self._decoding.split_tokens,
            tile_sequences=self._decoding.tile_sequences,
        )

    @property
    def shape(self) -> Shape:
        """What kernels are compiled for."""
        geometry, moved = self._pool.geometry, [] if self._positions is None else self._positions.inv_freq
        return Shape(
            heads=self.model.config.num_attention_heads,
            kv_heads=geometry.heads,
            head_dim=geometry.head_dim,
            dtype=geometry.dtype,
            chunk_tokens=geometry.chunk_tokens,
            split_tokens=self._decoding.split_tokens,
            tile_sequences=self._decoding.tile_sequences,
            pairs=max((len(inv_freq) for inv_freq in moved), default=0),
            interleaved=self._positions is not None and self._positions.interleaved,
        )

    def renew(self, *, explained: bool) -> None:
        """The model computes otherwise, or some of its tensors or layers are others. `explained`: all that it computes
        with is known (`identity.Verdict`). Of one that is not, nothing is captured: a replay runs no Python, and a hook
        may compute something else each time."""
        self._explained = explained
        if self.graphs is not None:
            self.graphs.forget()
        self._linear = turnable(self.model)
        self._positions = self._positions_of(self.model)

    def _positions_of(self, model: PreTrainedModel) -> Positions | None:
        """None for a model whose keys cannot be moved."""
        try:
            return Positions.of(model, tokens_max=self._tokens_max)
        except (Unsupported, AttributeError, KeyError):  # a living model may get any config
            return None

    @property
    def moves(self) -> bool:
        """Whether what a request sees may stand elsewhere than it was computed."""
        return self._positions is not None

    def __call__(
        self, pieces: Mapping[Request, int], watch: Layers | None = None, *, every: bool = False
    ) -> dict[Request, torch.Tensor]:
        """Computes the next so many tokens of each request; of those that have none left then, the logits
        [vocabulary] after the last, in float32. `watch` is told when attention of each layer comes and is over.
        `every`: of one request alone, the logits [count, vocabulary] after each of the tokens."""
        decoding = [request for request, count in pieces.items() if count == 1]
        prefilling = {request: request.spans(count) for request, count in pieces.items() if count > 1}
        ids: list[int] = []
        positions: list[int] = []
        places: list[int] = []
        chunks: list[int] = []
        last: dict[Request, int] = {}
        for request in (*decoding, *prefilling):
            for start, end in request.spans(pieces[request]):
                ids += request.tokens[start:end]
                positions += request.positions(start, end)
                places += (at % self._chunk_tokens for at in range(start, end))
                chunks += [request.chunks[at // self._chunk_tokens] for at in range(start, end)]
                if end == len(request.tokens):
                    last[request] = len(ids) - 1

        lines = [0] * self._decoding.sequences_max
        for line, request in enumerate(decoding):
            lines[request.row] = line
        plan = self._decode_plan(decoding)
        alike = plan is not None and plan.stretches is None and not prefilling and not every
        if self.graphs is not None and self._explained and plan is not None and alike:
            rows = [request.row for request in decoding]
            logits = self._replayed(plan, (ids, positions, chunks, places, rows), lines, watch)
            return {request: logits[line].float() for request, line in last.items()}
        step = Step(
            layers=self._pool.layers,
            slots=self._slots(chunks, places),
            rows=self._tensor([request.row for request in decoding]),
            lines=self._tensor(lines),
            decode=plan,
            prefill=self._prefill_plan(prefilling),
            watch=watch,
            positions=self._positions,
            observed=self._observe(decoding, prefilling),
        )
        with torch.inference_mode(), paged(self.model), turned(self._linear):
            out = self.model(
                input_ids=self._tensor(ids).unsqueeze(0),
                position_ids=self._tensor(positions).unsqueeze(0),
                use_cache=False,
                logits_to_keep=0 if every else self._tensor(list(last.values())),
                step=step,
            )
        logits = out.logits[0].contiguous()  # a row after the other: whoever samples reads it row by row
        if every:
            (request,) = pieces
            return {request: logits.float()}
        return dict(zip(last, logits.float(), strict=True))

    def wait(self) -> None:
        """Until what was asked of a GPU is computed."""
        if self.model.device.type == "cuda":
            torch.cuda.current_stream(self.model.device).synchronize()

    def _replayed(
        self, plan: Plan, columns: Sequence[Sequence[int]], lines: Sequence[int], watch: Layers | None
    ) -> torch.Tensor:
        """The logits [sequences, vocabulary] of a step in which all decode, as a graph. It reads all layers, so all of
        them are waited for before, and what follows them comes after."""
        assert self.graphs is not None
        # Raises for what the pool does not have; of the host's, since `columns` go there by another way
        Slots.of(columns[2], columns[3], pool_chunks=self._pool.chunks, chunk_tokens=self._chunk_tokens)
        layers = range(len(self._pool.layers))

        def compute(inputs: Inputs) -> torch.Tensor:
            step = Step(
                layers=self._pool.layers,
                slots=Slots(
                    inputs.chunks, inputs.places, self._pool.chunks, self._chunk_tokens, all_written=True
                ),
                rows=inputs.rows,
                lines=inputs.lines,
                decode=plan,
                prefill=None,
                positions=self._positions,
            )
            out = self.model(
                input_ids=inputs.ids.unsqueeze(0),
                position_ids=inputs.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=0,
                step=step,
            )
            logits: torch.Tensor = out.logits[0]
            return logits

        for layer in layers if watch is not None else ():
            watch.begin(layer)  # type: ignore[union-attr]
        with torch.inference_mode(), paged(self.model), turned(self._linear):
            logits = self.graphs.run(plan.capacity, columns, lines, compute)
        for layer in layers if watch is not None else ():
            watch.end(layer)  # type: ignore[union-attr]
        return logits

    def _observe(
        self, decoding: Sequence[Request], prefilling: Mapping[Request, Sequence[Span]]
    ) -> list[Observation]:
        """Of those whose prompt ends with this step, and of whom somebody wants to know."""
        found = []
        line = len(decoding)
        for request, spans in prefilling.items():
            line += sum(end - begin for begin, end in spans)
            begin, end = spans[-1]
            if not request.observe or end != len(request.tokens):
                continue
            count = min(OBSERVED, end - begin)
            request.observation = Observation(
                lines=self._tensor(range(line - count, line)),
                numbers=self._tensor(range(end - count, end)),
                chunks=self._tensor(request.chunks[: -(-end // self._chunk_tokens)]),
                tokens=end,
                stretches=request.seen_before(end - count + 1),
            )
            found.append(request.observation)
        return found

    def deviations(self, request: Request, wanted: Sequence[Span], absent: Sequence[Span]) -> torch.Tensor:
        """How far the KV of the tokens `wanted`, which it has, is from what full attention over its text gives: one
        after the other, float32, squares of differences of their values in the second layer. That is the first one
        that depends on other tokens; to have it, one layer of them is computed. `absent`: tokens whose KV is not there
        yet; of those, the first layer's is written."""
        until = max(end for _, end in wanted)
        inside = [(begin, min(end, until)) for begin, end in absent if begin < until]
        numbers = sorted({n for begin, end in (*wanted, *inside) for n in range(begin, end)})
        line = {number: at for at, number in enumerate(numbers)}
        asked = self._tensor([line[n] for begin, end in wanted for n in range(begin, end)])
        spans = missing_spans([number not in line for number in range(until)])
        size = self._chunk_tokens
        self._join(self._prefilling, request, until, request.row)
        try:
            plan = self._prefilling.prefill({request.row: numbers})
        finally:
            self._prefilling.leave(request.row)
        probe = Probe(
            layers=self._pool.layers,
            slots=self._slots(
                [request.chunks[number // size] for number in numbers], [number % size for number in numbers]
            ),
            rows=self._tensor([]),
            lines=self._tensor([]),
            decode=None,
            prefill=plan,
            absent=self._tensor([line[n] for begin, end in inside for n in range(begin, end)]),
        )
        positions = [at for begin, end in spans for at in request.positions(begin, end)]
        with torch.inference_mode(), paged(self.model), turned(self._linear), suppress(Seen):
            self.model(
                input_ids=self._tensor([request.tokens[number] for number in numbers]).unsqueeze(0),
                position_ids=self._tensor(positions).unsqueeze(0),
                use_cache=False,
                logits_to_keep=1,
                step=probe,
            )
        if not probe.deviations:  # a model of one layer: nothing of it depends on other tokens
            return torch.zeros(len(asked))
        return probe.deviations[0][asked].cpu()

    def _decode_plan(self, sequences: Sequence[Request]) -> Plan | None:
        forest = self._decoding
        rows = {request.row for request in sequences}
        for row in range(forest.sequences_max):
            if row in forest and row not in rows:
                forest.leave(row)
        for request in sequences:
            row, tokens = request.row, request.computed
            before = request.chunks[: -(-tokens // self._chunk_tokens)]
            same = row in forest and forest.length(row) == tokens and forest.chunks_of(row) == before
            if same and forest.stretches_of(row) == request.seen_before(tokens + 1):
                forest.append(row, None if tokens % self._chunk_tokens else request.chunks[len(before)])
            else:  # it did not decode before; or another one did in this row, or it did in other chunks
                if row in forest:
                    forest.leave(row)
                self._join(forest, request, tokens + 1, row)
        return forest.plan() if sequences else None

    def _prefill_plan(self, pieces: Mapping[Request, Sequence[Span]]) -> PrefillPlan | None:
        """Each token as if it was the last of its sequence. Those that are computed attend to one another, since all
        keys are written before any is read."""
        rows: dict[int, int | Sequence[int]] = {}
        try:
            for request, spans in pieces.items():
                self._join(self._prefilling, request, spans[-1][1], request.row)
                numbers = [number for start, end in spans for number in range(start, end)]
                rows[request.row] = numbers if len(spans) > 1 else len(numbers)
            return self._prefilling.prefill(rows) if rows else None
        finally:
            for row in rows:
                self._prefilling.leave(row)

    def _join(self, forest: Forest, request: Request, tokens: int, row: int) -> None:
        chunks = request.chunks[: -(-tokens // self._chunk_tokens)]
        forest.join(row, chunks, tokens, request.seen_before(tokens))

    def _slots(self, chunks: Sequence[int], places: Sequence[int]) -> Slots:
        return Slots.of(
            chunks,
            places,
            pool_chunks=self._pool.chunks,
            chunk_tokens=self._chunk_tokens,
            device=self.model.device,
        )

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.model.device)
