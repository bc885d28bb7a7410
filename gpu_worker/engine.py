"""A small multi-turn engine around a Llama-family model: greedy decoding, KV from the store where it is there.

A turn brings its whole history as tokens. The tokens decide what is reused: keys are computed from them, and the
session's name is only asked how long its tail is. Whatever goes wrong with the store, before or during the turn, the
answer is computed from the tokens instead, and is the same.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel

from kvstore.client import SessionEntry, SessionInfo
from kvstore.errors import Unavailable, Unsupported
from kvstore.gpu_worker.identity import Identity, Verdict
from kvstore.gpu_worker.layout import CHUNK_TOKENS, Bits, Geometry, namespace_of
from kvstore.gpu_worker.loader import Load, Loader, Piece
from kvstore.gpu_worker.restored_cache import LoadFailed, RestoredCache
from kvstore.gpu_worker.sampling import NotNumbers, check_numbers
from kvstore.gpu_worker.saver import QUEUE_BYTES_MAX, Saver, TurnSave
from kvstore.gpu_worker.store import Store
from kvstore.keys import ROOT
from kvstore.layout import NamespaceSpec
from kvstore.types import KEYS_PER_REQUEST_MAX, SESSION_NAME_BYTES_MAX, ChunkKey, Outcome

if TYPE_CHECKING:
    from kvstore.client import Client, Namespace

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TurnResult:
    tokens: tuple[int, ...]
    """The answer, greedily chosen."""
    gaps: tuple[float, ...]
    """Per token: how far its logit was above the second best."""
    ttft_s: float
    """From the call of `turn` to the first token."""
    seconds: float
    prompt_tokens: int
    reused_tokens: int = 0
    """Of the prompt: their KV came from the store, the rest went through the model."""
    loaded_bytes: int = 0
    load_failure: str = ""
    """Why a history that the store had was computed anew; "" if it was not."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What the store has of a prompt."""

    base: SessionInfo | None
    chain: Sequence[ChunkKey] = ()
    """Keys of the leading full chunks."""
    cache: RestoredCache | None = None
    load: Load | None = None


class Engine:
    """One turn at a time, from one thread. Loading and saving run on threads of their own, one each.

    What the model computes with may change between turns, and during one: the namespace follows. What cannot be
    explained is computed without the store (`identity.Identity`, which adds its counters).

    `counters` by name: turns, prompt_tokens, reused_tokens, loaded_bytes, load_failures, promotions_awaited;
    refused_turns (of a model that cannot be explained), unnamed_turns (whose session no store could name).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        connect: Callable[[], Client] | None = None,
        *,
        weights: Sequence[Path] = (),
        weights_epoch: int = 0,
        salt: bytes = b"",
        chunk_tokens: int = CHUNK_TOKENS,
        prefill_tokens: int = 2048,
        lookup_timeout_s: float = 0.5,
        promote_timeout_s: float = 1.0,
        load_deadline_s: float = 5.0,
        save_timeout_s: float = 5.0,
        save_queue_bytes_max: int = QUEUE_BYTES_MAX,
    ) -> None:
        """`connect` makes the client, which the engine closes; while no daemon answers, everything is computed, and now
        and then it is called again, in the background. `weights`: not read any more, since the weights that count are
        those in the model. `weights_epoch`, `salt`: of the namespace. `prefill_tokens`: how many tokens of a prompt go
        through the model at once. `promote_timeout_s`: how long a turn waits for KV that is on SSD; what is late is
        computed.

        Raises Unsupported for a model whose KV cannot be stored, naming the field, ValueError for a number of tokens
        below 1, and whatever else the daemon has against us or the namespace.
        """
        if prefill_tokens < 1:
            raise ValueError(f"prefill_tokens is {prefill_tokens}: must be at least 1")
        self.model = model.eval()
        self.geometry = Geometry.of(model, chunk_tokens)
        self.counters: Counter[str] = Counter()
        self._prefill_tokens = prefill_tokens
        self._lookup_timeout_s = lookup_timeout_s
        self._load_deadline_s = load_deadline_s
        self._store: Store | None = None
        self._saving: dict[str, TurnSave] = {}
        self.saver: Saver | None = None
        self._loader: Loader | None = None
        self._identity: Identity | None = None
        self._closed = False
        if connect is None:
            return
        if model.device.type != "cpu":
            raise Unsupported(
                "KV is stored from CPU memory only, so far", field="model.device", value=model.device
            )
        self._epoch, self._salt = weights_epoch, salt
        self._identity = Identity(model, counters=self.counters)
        self._verdict = self._identity.check()
        self._store = Store(
            connect,
            self._spec_of(self._verdict),
            lookup_timeout_s=lookup_timeout_s,
            promote_timeout_s=promote_timeout_s,
            counters=self.counters,
        )
        self._loader = Loader(self.geometry)
        self.saver = Saver(self.geometry, queue_bytes_max=save_queue_bytes_max, timeout_s=save_timeout_s)

    def turn(
        self, session: str, prompt: Sequence[int], max_new_tokens: int, *, stop_tokens: Sequence[int] = ()
    ) -> TurnResult:
        """Answers `prompt`, the whole conversation so far, with 1 to `max_new_tokens` tokens, the last perhaps a stop
        token. `session`: names the conversation, with 1 to 256 bytes; without such a name only full chunks are kept.
        Raises ValueError for what the model cannot take, NotNumbers where its logits lead to no token, and Unavailable
        once the engine is closed."""
        if self._closed:
            raise Unavailable("the engine is closed", remedy="make another one")
        begun = time.perf_counter()
        check_request(prompt, max_new_tokens, vocabulary=self.model.config.vocab_size)
        capacity = len(prompt) + max_new_tokens
        if capacity > self.model.config.max_position_embeddings:
            raise ValueError(
                f"{capacity} tokens exceed the model's {self.model.config.max_position_embeddings}"
            )

        # Three cases: the store has a history and it arrives; it has none; it has one and it gets lost on the way.
        session = self._named(session)
        store = self._recognise()
        found = self._find(store, session, prompt, capacity) if store is not None else _Found(None)
        result: TurnResult | None = None
        failure = ""
        if found.cache is not None and (load := found.load) is not None:
            try:
                save = self._begin(store, session, found.base, found.chain)
                result = self._answer(prompt, max_new_tokens, stop_tokens, found.cache, save, begun)
                result = replace(result, reused_tokens=found.cache.restored, loaded_bytes=load.bytes)
                if not self._holds():
                    raise LoadFailed("the model changed after its history was looked up")
            except (LoadFailed, NotNumbers) as error:
                result, failure = None, str(error)
                log.info("the history of a session is computed anew: %s", failure)
                if (now := self._recognise()) is not store:
                    store, found = now, _Found(None)  # the session's manifest is another namespace's
            finally:
                load.cancel("the turn is over")
        if result is None:
            save = self._begin(store, session, found.base, ())
            cache = RestoredCache(self.geometry, capacity=capacity)
            result = self._answer(prompt, max_new_tokens, stop_tokens, cache, save, begun)
            result = replace(result, load_failure=failure)

        self.counters["turns"] += 1
        self.counters["refused_turns"] += self._store is not None and self._store.spec is None
        self.counters["prompt_tokens"] += result.prompt_tokens
        self.counters["reused_tokens"] += result.reused_tokens
        self.counters["loaded_bytes"] += result.loaded_bytes
        self.counters["load_failures"] += bool(failure)
        return replace(result, seconds=time.perf_counter() - begun)

    def reset(self, epoch: int | None = None) -> None:
        """For programs that have changed weights: all of them are digested again, and what was computed with others is
        not used any more. `epoch`: the namespace's weights epoch from now on; the store then drops the older one of the
        same weights. Raises ValueError for one that is lower than before."""
        if self._store is None or self._identity is None:
            return
        if epoch is not None:
            if epoch < self._epoch:
                raise ValueError(f"epoch is {epoch}: must be at least {self._epoch}, which it was before")
            self._epoch = epoch
        verdict = self._identity.reset()
        if self.saver is not None:
            self.saver.follow(self._identity)
        self._use(self._store, verdict)

    def flush(self, timeout_s: float) -> bool:
        """Waits until all KV is saved or dropped; False if that took too long."""
        return self.saver is None or self.saver.flush(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Saves what is queued, for at most `timeout_s`, and closes the client."""
        self._closed = True
        try:
            if self._loader is not None:
                self._loader.close()
            if self.saver is not None:
                self.saver.close(timeout_s)
        finally:
            if self._store is not None:
                self._store.close()
            if self._identity is not None:
                self._identity.close()

    # ---------------------------------------------------------------------------------------------------- identity

    def _recognise(self) -> Namespace | None:
        """The namespace of what the model computes with now."""
        if self._store is None or self._identity is None:
            return None
        verdict = self._identity.check()
        if self.saver is not None:
            self.saver.follow(self._identity)
        if verdict != self._verdict:
            self._use(self._store, verdict)
        return self._store.namespace()

    def _use(self, store: Store, verdict: Verdict) -> None:
        self._verdict = verdict
        try:
            spec = self._spec_of(verdict)
        except Exception:
            # A living model may get any config and any name: the turn must not fail for it.
            log.warning("computing without the store: the model cannot be named", exc_info=True)
            spec = None
        store.use(spec)

    def _holds(self) -> bool:
        return self._identity is None or self._identity.check() == self._verdict

    def _spec_of(self, verdict: Verdict) -> NamespaceSpec | None:
        """None if its KV cannot be stored."""
        if not verdict.explained:
            return None
        try:
            geometry = Geometry.of(self.model, self.geometry.chunk_tokens)
        except Unsupported as error:
            log.warning("computing without the store: %s", error)
            return None
        if geometry != self.geometry:
            log.warning("computing without the store: the model's shape or type changed; make another engine")
            return None
        return namespace_of(
            self.model, geometry, digest=verdict.digest, weights_epoch=self._epoch, salt=self._salt
        )

    def _named(self, session: str) -> str:
        """The session's name, "" where it is none that the store takes."""
        try:
            fine = 0 < len(session.encode()) <= SESSION_NAME_BYTES_MAX
        except (AttributeError, UnicodeEncodeError):  # no text, or half a character
            fine = False
        if fine or self._store is None:
            return session
        if not self.counters["unnamed_turns"]:
            log.warning(
                "a session's name has 1 to %d bytes of text: of turns without one only full chunks are kept: %.80r",
                SESSION_NAME_BYTES_MAX,
                session,
            )
        self.counters["unnamed_turns"] += 1
        return ""

    # ------------------------------------------------------------------------------------------------------- model

    def _answer(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        stop_tokens: Sequence[int],
        cache: RestoredCache,
        save: TurnSave | None,
        begun: float,
    ) -> TurnResult:
        """Prefills what `cache` does not hold yet, then decodes. Raises LoadFailed, mostly before the first token, and
        NotNumbers."""
        try:
            return self._generate(prompt, max_new_tokens, stop_tokens, cache, save, begun)
        except BaseException:
            if save is not None:
                save.abandon()
            raise

    def _generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        stop_tokens: Sequence[int],
        cache: RestoredCache,
        save: TurnSave | None,
        begun: float,
    ) -> TurnResult:
        tokens: list[int] = []
        gaps: list[float] = []
        known = list(
            prompt
        )  # all tokens of the conversation; the KV of the last one is computed in the next step
        ttft_s = 0.0
        with torch.inference_mode():
            for start in range(cache.get_seq_length(), len(prompt), self._prefill_tokens):
                piece = prompt[start : start + self._prefill_tokens]
                logits = self._forward(piece, cache)
                if save is not None:
                    save.extend(cache, known[: start + len(piece)])
            while True:
                best = torch.topk(logits, 2).values
                tokens.append(int(logits.argmax()))
                gaps.append(float(best[0] - best[1]))
                ttft_s = ttft_s or time.perf_counter() - begun
                if len(tokens) == max_new_tokens or tokens[-1] in stop_tokens:
                    break
                known.append(tokens[-1])
                logits = self._forward(tokens[-1:], cache)
                if save is not None:
                    save.extend(cache, known)
            if save is not None:
                save.finish(cache, known)
        return TurnResult(tuple(tokens), tuple(gaps), ttft_s, 0.0, len(prompt))

    def _forward(self, tokens: Sequence[int], cache: RestoredCache) -> torch.Tensor:
        """Logits [vocabulary] after the last of `tokens`, in fp32. Raises NotNumbers."""
        ids = torch.tensor([list(tokens)], dtype=torch.long, device=self.model.device)
        out = self.model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = out.logits[0, -1].float()
        check_numbers(logits)  # before the KV that led to them is saved
        return logits

    # ------------------------------------------------------------------------------------------------------- store

    def _begin(
        self, store: Namespace | None, session: str, base: SessionInfo | None, chain: Sequence[ChunkKey]
    ) -> TurnSave | None:
        if store is None or self.saver is None:
            return None
        self._saving = {name: save for name, save in self._saving.items() if not save.saved.is_set()}
        self._saving[session] = save = TurnSave(self.saver, store, session, base, chain, valid=self._holds)
        return save

    def _find(self, store: Namespace, session: str, prompt: Sequence[int], capacity: int) -> _Found:
        """Looks the prompt up and starts to load what is there. At least one token is left to compute."""
        assert self._loader is not None and self._store is not None
        if (last := self._saving.get(session)) is not None:
            last.saved.wait(self._lookup_timeout_s)  # our own save of the turn before, still under way
        chunk_tokens = self.geometry.chunk_tokens
        base = store.get_session(session, timeout_s=self._lookup_timeout_s) if session else None
        # As many as the store takes at once, the tail included: of a longer prompt the rest is computed
        whole = min((len(prompt) - 1) // chunk_tokens, KEYS_PER_REQUEST_MAX - 1)
        keys = store.keys(prompt[: whole * chunk_tokens])
        tail = _tail_of(store, base, keys, prompt, chunk_tokens)
        asked = [*keys, tail.key] if tail is not None else keys
        if not asked:
            return _Found(base)
        # In any order, because the tail of an earlier turn lies beside the chunk that has grown out of it since.
        lease = self._store.read(store, asked, any_order=True)
        hit = [outcome is Outcome.HIT for outcome in lease.outcomes]
        chunks = next((number for number in range(len(keys)) if not hit[number]), len(keys))
        pieces = [Piece(number, number * chunk_tokens, chunk_tokens) for number in range(chunks)]
        if tail is not None and hit[-1] and tail.first_token == chunks * chunk_tokens:
            pieces.append(Piece(len(keys), tail.first_token, tail.token_count))
        if not pieces:
            lease.release()
            return _Found(base)
        restored = pieces[-1].first_token + pieces[-1].token_count
        cache = RestoredCache(self.geometry, capacity=capacity, restored=restored)
        targets = cache.targets()

        def place(layer: int, piece: Piece) -> Bits:
            return targets[layer][:, :, piece.first_token : piece.first_token + piece.token_count]

        load = self._loader.start(lease, pieces, place, deadline_s=self._load_deadline_s)
        cache.expect(load.wait)
        return _Found(base, keys[:chunks], cache, load)


def check_request(prompt: Sequence[int], max_new_tokens: int, *, vocabulary: int) -> None:
    """Raises ValueError for what is no prompt, or no number of tokens: found later, it would end or hold up the calls
    of all others."""
    ids = np.asarray(prompt)
    if not isinstance(max_new_tokens, (int, np.integer)):
        raise ValueError(f"max_new_tokens is {max_new_tokens!r}: must be a whole number")
    if ids.size == 0 or max_new_tokens < 1:
        raise ValueError(f"a request reads and writes tokens: not {ids.size} and {max_new_tokens}")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"the prompt is {ids.dtype} {list(ids.shape)}: must be one row of token ids")
    if not 0 <= ids.min() <= ids.max() < vocabulary:
        raise ValueError(f"the prompt has token ids outside of the model's {vocabulary}")


def _tail_of(
    store: Namespace,
    base: SessionInfo | None,
    keys: Sequence[ChunkKey],
    prompt: Sequence[int],
    chunk_tokens: int,
) -> SessionEntry | None:
    """The session's tail, if it is KV of exactly our tokens: its key must be the one that we compute from them."""
    if base is None or not base.entries:
        return None
    tail = base.entries[-1]
    chunks, aligned = divmod(tail.first_token, chunk_tokens)
    end = tail.first_token + tail.token_count
    if aligned != 0 or not 0 < tail.token_count < chunk_tokens or chunks > len(keys) or end >= len(prompt):
        return None
    parent = keys[chunks - 1] if chunks else ROOT
    return tail if store.tail_key(prompt[tail.first_token : end], parent) == tail.key else None
