"""The engine: many requests at once. They join, decode and leave at any step, and share what they begin with.

Every step is one forward call (iteration-level batching): one token of each request that decodes, and pieces of the
prompts of those that are new, as many tokens as a step has for that. KV is written to and read from the paged pool;
what the store has of a prompt is loaded into it, and what becomes full is saved. A request brings its whole history as
tokens, and the tokens decide what is reused: its session's name is only asked how long its tail is. Whatever goes wrong
with the store, before or during a request, the answer is computed from the tokens instead.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from kvstore.errors import Exhausted, Unavailable, Unsupported
from kvstore.gpu_worker.assembly import Assembly, most_deviating
from kvstore.gpu_worker.attention import NAME, check_pageable
from kvstore.gpu_worker.canary import TOKENS_MAX, SelfTest, differs, is_sampled, wrong_chunks
from kvstore.gpu_worker.chain import Seen
from kvstore.gpu_worker.choices import Choices
from kvstore.gpu_worker.compute_or_load import ComputeOrLoad
from kvstore.gpu_worker.defaults import CHUNK_TOKENS, WAITING_MAX
from kvstore.gpu_worker.device import Device, device_for_steps
from kvstore.gpu_worker.forward import Forward
from kvstore.gpu_worker.hbm_pool import HbmPool
from kvstore.gpu_worker.identity import Identity, Verdict
from kvstore.gpu_worker.kernel_check import prove_kernels
from kvstore.gpu_worker.layout import Geometry, namespace_of
from kvstore.gpu_worker.loader import LoadFailed
from kvstore.gpu_worker.masses import MassBook
from kvstore.gpu_worker.pool_store import PoolStore
from kvstore.gpu_worker.positions import check_movable
from kvstore.gpu_worker.request import Request, Reused, check_request, is_session_name
from kvstore.gpu_worker.sampling import GREEDY, Choice, NotNumbers, Sampler, Sampling, choose_all
from kvstore.gpu_worker.saver import QUEUE_BYTES_MAX
from kvstore.gpu_worker.scheduling import Scheduler
from kvstore.gpu_worker.truncation import Truncation, Turns, Undecided, View, check_cuttable, view
from kvstore.gpu_worker.verdicts import Verdicts
from kvstore.kernels.stretches import Stretch
from kvstore.keys import ROOT, SALT_BYTES
from kvstore.layout import NamespaceSpec
from kvstore.types import SESSION_NAME_BYTES_MAX, ChunkKey

if TYPE_CHECKING:
    from kvstore.client import Client, Namespace

PROBED_LAYER = 1
"""Whose values say how far a token's KV is from what it would be without the text that was cut: of the first that see
other tokens (CacheBlend, arXiv 2405.16444, looks at the second layer, too)."""
SALT = bytes(SALT_BYTES)
"""Of the pool's keys."""
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
    gap: float = 0.0
    """How far the largest logit was above the second: how clear the choice was."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A request from beginning to end, see `BatchEngine.turn`."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]
    """Per token, see `Output.gap`."""
    finish: Finish
    ttft_s: float
    """From the call to the first token."""
    seconds: float
    prompt_tokens: int
    reused: Reused
    """Of the prompt: tokens whose KV was in the pool or in the store."""
    load_failures: int = 0
    """How often KV that the store had did not arrive, and was computed."""
    choice: str = ""
    """See `Request.choice`."""
    cut_tokens: int = 0
    """Of the prompt, so many were not looked at."""

    @property
    def reused_tokens(self) -> int:
        return self.reused.tokens


class BatchEngine:
    """Requests in, tokens out; from one thread. Saving and loading run on threads of their own. In a step nobody else
    may call the model; between steps its attention is what it was. Once closed it raises Unavailable when it is to
    take a request or a step. What the model computes with may change between steps: what was computed before is then
    computed again, and the namespace follows (`identity.Identity`, which adds its counters).

    `counters` by name: steps, requests; of tokens, prompt_tokens, computed_tokens, adopted_tokens (found in the pool),
    restored_tokens (from the store) and of these restored_ssd_tokens; loads_overlapped (requests that joined a step
    before all of their load was there), preemptions, load_failures, promotions_awaited,
    requests_failed, requests_rejected (the queue was full), requests_unnamed (whose session no store could name),
    requests_unexplained (of a model that cannot be explained: their KV is neither shared nor stored); requests_cut and
    cut_tokens (of conversations that were too long), cuts_decided (where it was found out what deviates most),
    cuts_by_mass (where old tokens stay because others attend to them), prompts_observed (of which it was recorded what
    their ends attend to), probed_tokens (whose KV was compared with what the first layers give), truncations_recomputed
    (of these, requests whose older KV could not be had), canary_checks and canary_failures; reports of what
    is in the pool, and reports_failed.
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
        retain: bool = True,
        waiting_max: int = WAITING_MAX,
        weights: Sequence[Path] = (),
        weights_epoch: int = 0,
        salt: bytes = b"",
        lookup_timeout_s: float = 0.5,
        promote_timeout_s: float = 1.0,
        save_timeout_s: float = 5.0,
        save_queue_bytes_max: int = QUEUE_BYTES_MAX,
        read_buffer: int | None = None,
        load_ahead: int = 0,
        compute_or_load: bool = False,
        device: Device | None = None,
        verdicts: Verdicts | None = None,
        truncation: Truncation | None = None,
        canary_every: int = 0,
    ) -> None:
        """`connect` makes the client, which the engine closes; while no daemon answers, everything is computed, and now
        and then it is called again, in the background. `pool_chunks`: size of the pool. `sequences_max`: how many
        requests run at a time; up to `waiting_max` more wait. `prefill_tokens`: how many tokens of prompts are computed
        in a step, beside those that decode. `share=False`: requests share nothing, to compare with. `retain=False`:
        chunks that nobody holds do not stay in the pool. `weights`: not read any more, since the weights that count
        are those in the model. `weights_epoch`, `salt`: of the namespace. `promote_timeout_s`: how long a request waits
        for KV that is on SSD; what is late is computed. `read_buffer`: so many layers of what is loaded have to be
        there before a request joins a step, which waits for the others layer by layer; by default as many as keep it
        from waiting, by what was measured. `load_ahead`: how many of those that wait begin to load.
        `compute_or_load`: what is faster to compute than to load, by what was measured, is computed. `device`: how KV
        is copied, by default that of the model; `verdicts`: which ones passed the self-checks of copies and of kernels.
        `truncation`: how conversations that outgrow a window go on. `canary_every`: of so many hits one is computed
        again and compared (`canary.py`); 0: none is.

        Raises Unsupported for a model that the pool, the kernels or the store cannot serve and for a device whose
        kernels give wrong numbers (`kernel_check.py`), naming the field, ValueError for a setting that is too small,
        and whatever else the daemon has against us.
        """
        if waiting_max < 1:
            raise ValueError(f"waiting_max is {waiting_max}: must be at least 1")
        for name, value in (("load_ahead", load_ahead), ("read_buffer", read_buffer)):
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value}: must be at least 0")
        if truncation is not None:
            check_cuttable(model.config)
        check_pageable(model)
        if truncation is not None:
            check_movable(model.config, tokens_max=truncation.window, dtype=model.dtype)
        self.counters: Counter[str] = Counter()
        self.pool = HbmPool(Geometry.of(model, chunk_tokens), pool_chunks, retain=retain, device=model.device)
        self.tokens_max = min(model.config.max_position_embeddings, pool_chunks * chunk_tokens)
        """Of a request, prompt and answer together."""
        if truncation is not None and truncation.window > self.tokens_max:
            raise ValueError(
                f"truncation.window is {truncation.window}: the model and a pool of {pool_chunks} chunks take "
                f"{self.tokens_max} tokens"
            )
        self.truncation = truncation
        self.alarm = ""
        """Why KV is neither loaded nor saved any more: a hit was not what this worker computes, or the device cannot be
        used for it; else ""."""
        self.waiting_max = waiting_max
        self.sequences_max = sequences_max
        self._vocabulary = model.config.vocab_size
        self._model = model.eval()
        self._share = share
        self._epoch, self._salt = weights_epoch, salt
        self._identity = Identity(model, counters=self.counters)
        self._verdict = self._identity.check()
        self._examined = self.counters["identity_examinations"]
        """How often it had been, when the forward call was last told what the model is."""
        self._refusal = self._refuse(self._verdict)
        choice = ComputeOrLoad() if compute_or_load else None
        device = device or device_for_steps(model.device)
        self._device = device
        self._forward = Forward(
            model,
            self.pool,
            sequences_max=sequences_max,
            tokens_max=self.tokens_max,
            share=share,
            device=device,
            explained=self._verdict.explained,
        )
        if device is not None and not device.in_host_memory:
            prove_kernels(device, model.device, self._forward.shape, self._vocabulary, verdicts=verdicts)
        self._forward.warm_up()
        self._store = (
            PoolStore(
                model,
                self.pool,
                connect,
                spec=self._spec(),
                counters=self.counters,
                lookup_timeout_s=lookup_timeout_s,
                promote_timeout_s=promote_timeout_s,
                save_timeout_s=save_timeout_s,
                save_queue_bytes_max=save_queue_bytes_max,
                device=device,
                verdicts=verdicts,
                choice=choice,
            )
            if connect
            else None
        )
        self._scheduler = Scheduler(
            self.pool,
            self._store,
            sequences_max=sequences_max,
            prefill_tokens=prefill_tokens,
            share=share and not self._refusal,
            counters=self.counters,
            read_buffer=read_buffer,
            load_ahead=load_ahead,
            choice=choice,
        )
        self._choices = Choices()
        by_mass = truncation is not None and truncation.mass_tokens > 0
        self._masses = MassBook(chunk_tokens) if by_mass else None
        self._count = 0
        self._closed = False
        self._canary_every = canary_every
        self._self_test = SelfTest(self._vocabulary)
        self._golden: Verdict | None = None
        """What the model was when the self-test was made."""

    def __repr__(self) -> str:
        return f"BatchEngine({self.running} running, {self.waiting} waiting, {self.pool})"

    @property
    def running(self) -> int:
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def live(self) -> int:
        """Requests that have not got their last token."""
        return self.running + self.waiting

    @property
    def connected(self) -> bool:
        """Whether there is a store, as far as we know."""
        return self._store is not None and self._store.connected

    @property
    def namespace(self) -> Namespace | None:
        """Of what the model is now; None while there is no store, or nothing may be stored. From any thread."""
        return None if self._store is None else self._store.namespace

    @property
    def positions_max(self) -> int:
        """Positions that the model has."""
        return int(self._model.config.max_position_embeddings)

    @property
    def weights(self) -> bytes:
        """What the model computes with, as a digest (see `identity.Verdict`)."""
        return self._verdict.digest

    @property
    def moves(self) -> bool:
        """Whether the store's KV can be used at other positions than it was computed at."""
        return self._store is not None and self._store.moves

    @property
    def refusal(self) -> str:
        """Why KV of this model is neither shared nor stored; "" if it is."""
        return self._refusal

    @property
    def save_counters(self) -> Mapping[str, int]:
        """Those of `saver.Saver`."""
        return {} if self._store is None else self._store.saver.counters

    def add(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        session: str = "",
        root: ChunkKey = ROOT,
        sampling: Sampling = GREEDY,
        stop_tokens: Sequence[int] = (),
        turns: Turns | None = None,
        cut: bool = True,
        assembly: Assembly | None = None,
        sampler: Sampler | None = None,
    ) -> int:
        """A request, which runs from the next step on if there is room; returns its number. It gets 1 to
        `max_new_tokens` tokens, the last perhaps one of `stop_tokens`. The same seed gives the same tokens whatever
        runs beside it. `session`: names the conversation, with 1 to 256 bytes; without such a name only full chunks are
        stored. `root`: what the keys of its chunks begin with; requests with different ones share nothing, here and in
        the store. `turns`: where those of a chat begin and end, for an engine that truncates; `cut=False`: this one is
        not to be cut. `assembly`: the prompt is put together of parts, which the store may have; its own KV is nobody
        else's, but for what the assembly keeps, and it is not cut. `sampler`: chooses the tokens, instead of one that
        is made from `sampling`. Raises ValueError for what the model cannot take or the pool cannot hold, Exhausted
        when too many wait."""
        self._check_open()
        check_request(prompt, max_new_tokens, vocabulary=self._vocabulary)
        tokens, asked = prompt, max_new_tokens
        kept = self._view(prompt, turns, root) if cut and assembly is None else None
        choices = None
        if kept is not None and kept.unknown:
            choices = self._store.look_up_choices(kept.unknown) if self._store is not None else None
            kept = self._weigh(kept, prompt, turns, root) if choices is None else kept
        if kept is not None:
            assert self.truncation is not None
            room = self.truncation.window - kept.attended
            if kept.undecided is not None and kept.undecided.by_mass:
                room = self.truncation.window - self.truncation.prompt_tokens  # there may be more of it yet
            max_new_tokens = min(asked, room)
            prompt = kept.chain.tokens
        limit = len(prompt) + max_new_tokens
        if limit > self.tokens_max:
            raise ValueError(
                f"{len(prompt)} and {max_new_tokens} tokens: the model and a pool of {self.pool.chunks} chunks "
                f"take {self.tokens_max}"
            )
        if assembly is not None:
            if list(assembly.tokens) != list(prompt):
                raise ValueError("the prompt is not the assembly's")
            if assembly.end + max_new_tokens > self.positions_max:
                raise ValueError(
                    f"the prompt ends at position {assembly.end}, and {max_new_tokens} tokens are wanted: the model has"
                    f" {self.positions_max} positions"
                )
        if self.waiting >= self.waiting_max:
            self.counters["requests_rejected"] += 1
            raise Exhausted(
                "too many requests wait",
                field="waiting_max",
                value=self.waiting_max,
                remedy="ask again later, or raise it",
            )
        self._count += 1
        request = Request(
            self._count,
            [int(token) for token in prompt],
            limit,
            frozenset(stop_tokens),
            sampler or Sampler(sampling),
            session=self._named(session),
            root=root,
            assembly=assembly,
        )
        if self._masses is not None and assembly is None:
            request.observe = True
            request.conversation = tuple(int(token) for token in tokens), turns
        if kept is not None:
            self._cut(request, kept, tokens, turns)
            open_ = request.chain is not None or kept.undecided is not None
            request.choices = choices if open_ else None
            request.answer_max = asked
        self._scheduler.waiting.append(request)
        self.counters["requests"] += 1
        self.counters["prompt_tokens"] += request.prompt_tokens
        return self._count

    def turn(
        self,
        session: str,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        sampling: Sampling = GREEDY,
        stop_tokens: Sequence[int] = (),
        turns: Turns | None = None,
    ) -> Turn:
        """One request from beginning to end, for programs with one conversation at a time. Raises what `add` and `step`
        raise, NotNumbers where its logits lead to no token, and ValueError while other requests are live."""
        if self.live:
            raise ValueError(f"{self.live} requests are live: take steps, and look at their outputs")
        begun = time.perf_counter()
        number = self.add(
            prompt, max_new_tokens, session=session, sampling=sampling, stop_tokens=stop_tokens, turns=turns
        )
        request = self.request(number)
        outputs: list[Output] = []
        ttft_s = 0.0
        try:
            while not outputs or not outputs[-1].finish:
                outputs += self.step()
                if outputs and not ttft_s:
                    ttft_s = time.perf_counter() - begun
        finally:
            self.abort(number)  # where a step raised
        if outputs[-1].finish == "error":
            raise NotNumbers(request.failure)
        return Turn(
            tokens=tuple(output.token for output in outputs),
            gaps=tuple(output.gap for output in outputs),
            finish=outputs[-1].finish,
            ttft_s=ttft_s,
            seconds=time.perf_counter() - begun,
            prompt_tokens=request.prompt_tokens,
            reused=request.reused,
            load_failures=request.load_failures,
            choice=request.choice,
            cut_tokens=request.cut_tokens,
        )

    def _view(self, prompt: Sequence[int], turns: Turns | None, root: ChunkKey) -> View | None:
        """What is left of a prompt; None if all is. Raises ValueError if too little would be left of what was asked."""
        if self.truncation is None or len(prompt) <= self.truncation.prompt_tokens:
            return None
        self.truncation.check_head(turns)
        tokens = [int(token) for token in prompt]
        size = self.pool.geometry.chunk_tokens
        return view(tokens, self.truncation, turns, chunk_tokens=size, root=root, choices=self._choices)

    def _weigh(self, kept: View, prompt: Sequence[int], turns: Turns | None, root: ChunkKey) -> View:
        """If it is open which old tokens stay because others attend to them, what was recorded decides."""
        undecided = kept.undecided
        if undecided is None or not undecided.by_mass:
            return kept
        assert self._masses is not None
        masses = self._masses.find(prompt, root)
        chosen: tuple[int, ...] = ()
        if masses is not None:
            known = [masses[begin:end] for begin, end in undecided.spans]
            padded = [
                [*one.tolist(), *[0.0] * (end - begin - len(one))]
                for one, (begin, end) in zip(known, undecided.spans, strict=True)
            ]
            chosen = undecided.choose([mass for one in padded for mass in one])
        self.counters["cuts_by_mass"] += bool(chosen)
        self._remember(undecided, chosen)
        weighed = self._view(prompt, turns, root)
        assert weighed is not None and not (weighed.undecided is not None and weighed.undecided.by_mass)
        return weighed

    def _remember(self, undecided: Undecided, chosen: tuple[int, ...]) -> None:
        self._choices.remember(undecided.key, chosen)
        if self._store is not None:
            self._store.save_choice(undecided.key, chosen)

    def _record(self, request: Request) -> None:
        """What the end of its prompt attended to, of each token of its conversation."""
        seen, request.observation, request.observe = request.observation, None, False
        assert seen is not None and seen.own is not None and self._masses is not None
        tokens = request.conversation[0]
        masses = np.zeros(len(tokens), np.float32)
        # By rank: what stands where among all that is kept; positions have gaps where it stays
        kept = request.spans_kept or ((0, len(tokens)),)
        ranks = np.concatenate([np.arange(begin, end) for begin, end in kept])
        own = seen.own.cpu().numpy()
        if request.chain is None:
            masses[ranks[: len(own)]] = own[: len(ranks)]
        else:
            places = [*request.positions(0, len(own))]
            worth = [*own]
            if seen.seen is not None:
                worth += seen.seen.cpu().tolist()
                for one in request.chain.seen:
                    assert isinstance(one, Seen), one
                    places += range(one.position, one.position + one.end - one.begin)
            order = np.argsort(np.asarray(places), kind="stable")
            masses[ranks] = np.asarray(worth, np.float32)[order][: len(ranks)]
        self._masses.record(tokens, masses, request.root)
        self.counters["prompts_observed"] += 1

    def _cut(self, request: Request, kept: View, tokens: Sequence[int], turns: Turns | None) -> None:
        self.counters["requests_cut"] += 1
        self._keeps(request, kept)
        if kept.unknown:
            request.conversation = tuple(int(token) for token in tokens), turns
        if kept.chain.exact_tokens is None:
            return  # an ordinary prompt, as far as it is known
        request.chain = kept.chain
        request.jumps = list(kept.chain.jumps)
        if kept.unknown:
            by_mass = kept.undecided is not None and kept.undecided.by_mass
            request.open_cut = None if by_mass else kept.undecided
        if not self._has_room(request, kept):
            request.fall_back()

    def _has_room(self, request: Request, kept: View) -> bool:
        """A request's own tokens lie in other chunks than those it sees: whether the pool has as many."""
        size = self.pool.geometry.chunk_tokens
        parts = {
            (id(one.chain), n)
            for one in kept.chain.seen
            if isinstance(one, Seen)
            for n in range(one.begin // size, -(-one.end // size))
        }
        own = request.tokens_max + (kept.undecided.count if kept.undecided is not None else 0)
        return len(parts) + -(-own // size) <= self.pool.chunks

    def _keeps(self, request: Request, kept: View) -> None:
        self.counters["cut_tokens"] += kept.cut_tokens - request.cut_tokens
        request.cut_tokens = kept.cut_tokens
        request.remaining, request.spans_kept = kept.remaining, kept.spans

    def _resolve(self) -> None:
        """The store has said what it knows of conversations that were cut."""
        for request in self._scheduler.waiting:
            if request.choices is None or not request.choices.done():
                continue
            for key, chosen in request.choices.result().items():
                self._choices.remember(key, chosen)
            request.choices = None
            kept = self._view(*request.conversation, request.root)
            assert kept is not None
            kept = self._weigh(kept, *request.conversation, request.root)
            self._keeps(request, kept)
            if kept.chain.exact_tokens is None or not self._has_room(request, kept):
                request.fall_back()
            else:
                request.see(kept.chain, kept.undecided)
            assert self.truncation is not None
            room = min(request.answer_max, self.truncation.window - kept.attended)
            request.tokens_max = request.prompt_tokens + room

    def _decide_cut(self, request: Request) -> None:
        """Which tokens of what is kept of its conversation deviate most, now that all of their KV is here."""
        undecided = request.open_cut
        assert undecided is not None and request.chain is not None
        distances = self._distances(request, undecided)
        self.counters["cuts_decided"] += 1
        chosen = undecided.choose(distances)
        self._remember(undecided, chosen)
        kept = self._view(*request.conversation, request.root)
        assert kept is not None and kept.undecided is None and kept.remaining == request.remaining
        size, here = self.pool.geometry.chunk_tokens, {}
        before = [part for one in request.chain.seen for part in one.parts(SALT, size)]
        for part, stretch in zip(before, request.stretches, strict=True):
            here[part.key] = stretch.chunk
        stretches = [
            Stretch(here[part.key], part.first, part.count, delta=part.delta, at=part.at)
            for one in kept.chain.seen
            for part in one.parts(SALT, size)
        ]
        self._scheduler.close_cut(request, kept.chain, stretches)

    def _distances(self, request: Request, undecided: Undecided) -> list[float]:
        """Of each token that may be chosen: how far its values in one layer are from what they would be had the model
        read nothing but what is kept. Without room for that, all are taken to be equally far: the first are chosen."""
        size = self.pool.geometry.chunk_tokens
        layer = min(PROBED_LAYER, self.pool.geometry.layers - 1)
        count = len(undecided.tokens)
        spans = list(zip(undecided.spans, undecided.numbers, strict=True))
        chunks = self.pool.take(-(-count // size))
        if chunks is None:
            return [0.0] * sum(end - begin for (begin, end), _ in spans)
        probe = Request(
            0,
            list(undecided.tokens),
            count,
            frozenset(),
            Sampler(GREEDY),
            chunks=chunks,
            row=self._scheduler.a_row,
            jumps=list(undecided.jumps),
        )
        try:
            if self._store is not None:
                self._store.writes(chunks)
            with suppress(_Enough):
                self._forward({probe: count}, _Until(layer))
            values = self.pool.layers[layer]
            fresh = values[chunks, 1].transpose(1, 2).flatten(0, 1).flatten(1)
            wanted = torch.cat([fresh[at : at + end - begin] for (begin, end), at in spans])
            # The head's end may be among them, in front; what may be chosen is the rest
            seen = [values[one.chunk, 1, :, one.first : one.first + one.tokens] for one in request.stretches]
            stored = torch.cat([each.transpose(0, 1).flatten(1) for each in seen])[-len(wanted) :]
            distances: list[float] = (stored.float() - wanted.float()).norm(dim=1).tolist()
            return distances
        finally:
            self.pool.drop(chunks)
            self.counters["probed_tokens"] += count

    def request(self, number: int) -> Request:
        """A live request, to be looked at. Raises KeyError for one that is not live."""
        found = self._scheduler.find(number)
        if found is None:
            raise KeyError(number)
        return found

    def abort(self, request: int) -> bool:
        """It gets no more tokens, and what only it held is free for others; False if it is not live."""
        found = self._scheduler.find(request)
        if found is None:
            return False
        self._finish(found)
        return True

    def abort_all(self) -> None:
        """All live requests get no more tokens, and nothing of what is left of their KV is kept: after a step that
        raised, say."""
        self._scheduler.stop_all()

    def run(self) -> Iterator[Output]:
        """Steps until nothing is left to do; requests may be added and aborted meanwhile."""
        while self.live:
            yield from self.step()

    def step(self) -> list[Output]:
        """One forward call, and the tokens that came out of it. None while all that could be computed is on its way
        from the store: the call returns soon then."""
        self._check_open()
        if self._store is not None and self._store.failure and not self.alarm:
            self.alarm = self._store.failure
            self._follow(
                self._verdict
            )  # without a namespace from now on, and nothing that was loaded is used
        self._recognise()
        self._resolve()
        pieces = self._scheduler.schedule()
        for request in self._scheduler.open_cuts:
            self._decide_cut(request)
        for request in self._scheduler.undecided:
            self._decide(request)
        if not pieces:
            return []
        logits = self._compute(pieces)
        for request in self._scheduler.settle(pieces):
            logits.pop(request, None)
            del pieces[request]
        if self._fills(pieces) and self._recognise():
            return []  # it changed on the way: what is full now would be shared and saved
        for request in pieces:
            if request.observation is not None:
                self._record(request)
        # All of them before anything changes: a step that breaks off is taken again
        chosen, failed = {}, []
        for request, choice in self._choose(logits).items():
            if choice.failure:
                log.warning("request %d: %s", request.number, choice.failure)
                request.failure = choice.failure
                failed.append(request)
            else:
                chosen[request] = choice
        outputs = []
        for request in failed:
            if request.reused.tokens and not request.alone:
                self._scheduler.compute_alone(request)
                continue
            outputs.append(Output(request.number, NO_TOKEN, "error"))
            self._scheduler.stop(request, retain=False)
            self.counters["requests_failed"] += 1
        finished = []
        for request, count in pieces.items():
            if request in failed:
                continue
            self._scheduler.computed(request, count)
            if request in chosen:
                choice = chosen[request]
                request.sampler.used()
                request.tokens.append(choice.token)
                outputs.append(Output(request.number, choice.token, _finish(request), choice.gap))
                if outputs[-1].finish:
                    finished.append(request)
        self.counters["steps"] += 1
        self.counters["computed_tokens"] += sum(pieces.values())
        if finished:
            self._finish(*finished)
        return outputs

    def _choose(self, logits: Mapping[Request, torch.Tensor]) -> dict[Request, Choice]:
        """All at once, but for samplers that choose in their own way."""
        alike = [request for request in logits if type(request.sampler) is Sampler]
        rows = torch.stack([logits[request] for request in alike]) if alike else torch.empty(0)
        chosen = dict(zip(alike, choose_all([request.sampler for request in alike], rows), strict=True))
        for request in logits:
            if request not in chosen:
                try:
                    token, failure = request.sampler.choose(logits[request]), ""
                except NotNumbers as error:
                    token, failure = NO_TOKEN, str(error)
                chosen[request] = Choice(token, _gap(logits[request]), failure)
        return {request: chosen[request] for request in logits}

    def _decide(self, request: Request) -> None:
        """Which of the tokens whose KV was loaded deviate most: they are computed in place."""
        assert request.assembly is not None
        among, absent = self._scheduler.open_slots(request)
        if self._store is not None:
            self._store.writes(request.chunks)
        deviations = self._forward.deviations(request, among, absent)
        self.counters["probed_tokens"] += len(deviations)
        count = math.ceil(request.assembly.deviating * len(deviations))
        self._scheduler.decide(request, most_deviating(deviations.numpy(), among, count))

    def _compute(self, pieces: Mapping[Request, int]) -> dict[Request, torch.Tensor]:
        """The forward call. Without logits where nothing of it means anything."""
        begun, tokens = time.perf_counter(), sum(pieces.values())
        loads = [request.load for request in pieces if request.load is not None]
        if self._store is None:
            logits = self._forward(pieces)
        else:
            self._store.step_begins(pieces)
            try:
                logits = self._forward(pieces, self._store)
            except LoadFailed:
                for request in pieces:
                    request.observation = None
                return {}
            finally:
                self._store.step_ends()
        if self._device is not None and not self._device.in_host_memory:
            # So far it was only asked for. Of a step that decodes it costs more to wait than there is to learn; and
            # where loads come in between, the device waits for them, nobody knows for how long.
            if loads or self._store is None or max(pieces.values()) == 1:
                return logits
            self._forward.wait()
        waited_s = sum(load.waited_s for load in loads)
        self._scheduler.computing.observe(tokens, max(0.0, time.perf_counter() - begun - waited_s))
        return logits

    def reset(self, epoch: int | None = None) -> None:
        """For programs that have changed weights: all of them are digested again, and what was computed before, in the
        pool, in the store and on the way there, is not used any more. Requests go on with the tokens they have.
        `epoch`: the namespace's weights epoch from now on; the store then drops the older one of the same weights.
        Raises ValueError for one that is lower than before."""
        if epoch is not None:
            if epoch < self._epoch:
                raise ValueError(f"epoch is {epoch}: must be at least {self._epoch}, which it was before")
            self._epoch = epoch
        verdict = self._identity.reset()
        if self._store is not None:
            self._store.saver.forget()
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
            elif self._device is not None:
                self._device.close()
        finally:
            self._identity.close()

    def _recognise(self) -> bool:
        """Whether the model computes otherwise than at the step before; then all is computed again."""
        verdict = self._identity.check()
        if self._store is not None:
            self._store.saver.follow(self._identity)
        if verdict == self._verdict:
            if self.counters["identity_examinations"] != self._examined:  # the same, but elsewhere in memory
                self._renew_forward()
            return False
        self._follow(verdict)
        return True

    def _renew_forward(self) -> None:
        self._examined = self.counters["identity_examinations"]
        self._forward.renew(explained=self._verdict.explained)

    def _finish(self, *requests: Request) -> None:
        """They get no more tokens: what is left of their KV is kept, if it is what the model computes now."""
        if self._recognise():
            for request in requests:
                self._scheduler.waiting.remove(request)
            return
        self.counters["requests_unexplained"] += len(requests) * bool(self.refusal)
        for request in requests:
            if self._canary_every and self._store is not None and not self.alarm:
                self._check_hit(request)
            if not self.alarm or request in self._scheduler.running:
                self._scheduler.finish(request)
            else:
                self._scheduler.waiting.remove(request)

    def _check_hit(self, request: Request) -> None:
        """Of a sample of requests: whether the KV that came from the store is what the model computes. If it is not,
        nothing is loaded or saved any more, and what runs is computed again."""
        if request.row < 0 or request.assembly is not None or request.chain is not None:
            return
        if self._golden != self._verdict:
            self._golden = self._verdict
            self._self_test.remember(self._compute_once)
        size = self.pool.geometry.chunk_tokens
        count = min((request.reused.dram + request.reused.ssd) // size, TOKENS_MAX // size)
        if (
            not count
            or request.load is not None
            or not is_sampled(request.store_keys[count - 1], self._canary_every)
        ):
            return
        tokens = request.tokens[: count * size]
        if (computed := self._compute_once(tokens)) is None:
            return
        self.counters["canary_checks"] += 1
        restored = [layer[request.chunks[:count]] for layer in self.pool.layers]
        if not (found := differs(restored, computed)):
            return
        self.counters["canary_failures"] += 1
        healthy = self._self_test.passes(self._compute_once, tokens)
        self.alarm = f"KV from the store is not what this worker computes: {found}. Its self-test " + (
            "passes: the maker of these chunks is quarantined" if healthy else "FAILS: this worker is sick"
        )
        log.error(
            "%s; nothing is loaded or saved any more. Key: %s",
            self.alarm,
            request.store_keys[count - 1].hex(),
        )
        assert self._store is not None
        # One chunk's bound is that of its own numbers: where only all together tell, the last one is meant
        wrong = wrong_chunks(restored, computed) or [count - 1]
        self._store.saver.forget()
        self._store.tell_wrong(
            [request.store_keys[number] for number in wrong], request.store_keys[count:], healthy=healthy
        )
        self._follow(self._verdict)  # without a namespace from now on

    def _compute_once(self, tokens: Sequence[int]) -> list[torch.Tensor] | None:
        """KV of these tokens, of each layer [chunks, 2, kv_heads, chunk_tokens, head_dim], computed by themselves."""
        size = self.pool.geometry.chunk_tokens
        whole = len(tokens) // size * size
        row = self._scheduler.a_row
        chunks = self.pool.take(whole // size) if whole else None
        if chunks is None:
            return None
        probe = Request(0, list(tokens[:whole]), whole, frozenset(), Sampler(GREEDY), chunks=chunks, row=row)
        try:
            assert self._store is not None
            self._store.writes(chunks)
            self._forward({probe: whole})
            return [layer[chunks].clone() for layer in self.pool.layers]
        finally:
            self.pool.drop(chunks)

    def _named(self, session: str) -> str:
        """The session's name, "" where it is none that the store takes."""
        if session == "" or is_session_name(session):
            return session
        if not self.counters["requests_unnamed"]:
            log.warning(
                "a session's name has 1 to %d bytes of text: of requests without one only full chunks are kept: %.80r",
                SESSION_NAME_BYTES_MAX,
                session,
            )
        self.counters["requests_unnamed"] += 1
        return ""

    def _follow(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._refusal = self._refuse(verdict)
        self._scheduler.restart(share=self._share and not self._refusal)
        self._renew_forward()
        if self._store is not None:
            self._store.use(self._spec())

    def _refuse(self, verdict: Verdict) -> str:
        """Why KV of what the model is now must not be shared; "" if it may."""
        if not verdict.explained:
            return verdict.reason
        try:
            geometry = Geometry.of(self._model, self.pool.geometry.chunk_tokens)
        except Exception as error:  # a living model may get any config: the step must not fail for it
            reason = str(error) if isinstance(error, Unsupported) else f"its config cannot be read: {error!r}"
        else:
            if geometry == self.pool.geometry:
                return ""
            reason = "the model's shape or type changed; make another engine"
        log.warning("computing without the store: %s", reason)
        return reason

    def _spec(self) -> NamespaceSpec | None:
        if self._refusal or self.alarm:
            return None
        try:
            return namespace_of(
                self._model,
                self.pool.geometry,
                digest=self._verdict.digest,
                attention=NAME,
                weights_epoch=self._epoch,
                salt=self._salt,
            )
        except Exception:
            # A living model may get any name: the step must not fail for it.
            log.warning("computing without the store: the model cannot be named", exc_info=True)
            return None

    def _fills(self, pieces: Mapping[Request, int]) -> bool:
        size = self.pool.geometry.chunk_tokens
        return any(request.computed % size + count >= size for request, count in pieces.items())

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the engine is closed", remedy="make another one")

    def check_integrity(self) -> None:
        """Assert what only a bug could break; for tests."""
        self._scheduler.check_integrity()


class _Enough(Exception):
    """A forward call has computed what was wanted of it."""


class _Until:
    """Ends a forward call behind attention of one layer."""

    def __init__(self, layer: int) -> None:
        self._layer = layer

    def begin(self, layer: int) -> None: ...

    def end(self, layer: int) -> None:
        if layer == self._layer:
            raise _Enough


def _finish(request: Request) -> Finish:
    if request.tokens[-1] in request.stop_tokens:
        return "stop"
    return "length" if len(request.tokens) == request.tokens_max else ""


def _gap(logits: torch.Tensor) -> float:
    best, second = torch.topk(logits, 2).values.tolist() if len(logits) > 1 else (0.0, 0.0)
    return float(best - second)
