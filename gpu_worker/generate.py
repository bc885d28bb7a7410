"""The store for `model.generate` of Hugging Face's transformers, for programs that have no engine.

    with StoredGenerator(model, "/run/kvstored") as stored:
        answers = stored.generate(**tokenizer(prompts, return_tensors="pt", padding=True), max_new_tokens=64)

`generate` is the model's own, with a cache in which the prompt's beginning is already there. Afterwards what became
full chunks is saved, from a thread. What the store cannot be right for is computed by the model's own `generate`
without it, and the log says why, once.

    columns of a batch     0 . . . . . . . . . . . . . . width
    row that is padded     p p p p|t t t t|t t t t|t t t        p: padding, whose KV nobody looks at
    row without            t t t t|t t t t|t t t t|t t t        loaded: as many columns as all rows have
"""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedModel

from kvstore.client import connect
from kvstore.errors import StoreError, Unsupported
from kvstore.gpu_worker.defaults import CHUNK_TOKENS
from kvstore.gpu_worker.identity import Identity, Verdict
from kvstore.gpu_worker.layout import Geometry, bits, namespace_of
from kvstore.gpu_worker.pool_store import maker_of
from kvstore.gpu_worker.saver import Saver, TurnSave
from kvstore.gpu_worker.store import Store
from kvstore.types import KEYS_PER_REQUEST_MAX, Outcome

if TYPE_CHECKING:
    from kvstore.client import Client, Namespace

HARMLESS = frozenset(
    {
        *("generation_config", "logits_processor", "stopping_criteria", "streamer", "tokenizer"),
        *("prefix_allowed_tokens_fn", "return_dict_in_generate"),
    }
)
"""Arguments of `generate` that are no settings, and leave KV as it is. All others are computed without the store."""
REFUSED: Mapping[str, tuple[object, ...]] = {
    "use_cache": (True, None),
    "cache_implementation": (None, "dynamic"),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "prefill_chunk_size": (None,),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "guidance_scale": (None, 1, 1.0),
    "token_healing": (None, False),
    "low_memory": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "num_beam_groups": (None, 1),
    "constraints": (None,),
    "force_words_ids": (None,),
}
"""Settings of generation, and the values with which a cache that is filled already changes nothing else."""
CONNECT_TIMEOUT_S = 5.0
log = logging.getLogger(__name__)


class StoredGenerator:
    """Of one model, for one thread at a time. `counters` by name: prompt_tokens and loaded_tokens (padding left out),
    without_store (calls), and those of the saver."""

    def __init__(
        self,
        model: PreTrainedModel,
        run_dir: str | Callable[[], Client],
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        weights_epoch: int = 0,
        salt: bytes = b"",
        lookup_timeout_s: float = 0.5,
        promote_timeout_s: float = 1.0,
        save_timeout_s: float = 5.0,
    ) -> None:
        """`run_dir`: the daemon's directory, or what makes a client. `lookup_timeout_s`, `promote_timeout_s`: how long
        a call may wait for the store's answer, and for what is on SSD. Reads all weights once (some 6 GB/s a core).

        Raises Unsupported, naming the setting, for a model whose KV cannot be stored; not where there is no daemon.
        """
        self._geometry = Geometry.of(model, chunk_tokens)
        self._model = model
        self._generate: Any = model.generate
        self._epoch, self._salt = weights_epoch, salt
        self.counters: Counter[str] = Counter()
        self._identity = Identity(model, counters=self.counters)
        self._told: set[str] = set()
        make = run_dir if callable(run_dir) else lambda: connect(run_dir, timeout_s=CONNECT_TIMEOUT_S)
        self._verdict = self._identity.check()
        self._store = Store(
            make,
            self._spec(self._verdict),
            lookup_timeout_s=lookup_timeout_s,
            promote_timeout_s=promote_timeout_s,
            counters=self.counters,
        )
        self._saver = Saver(self._geometry, timeout_s=save_timeout_s, maker=maker_of(model))

    def __repr__(self) -> str:
        return f"StoredGenerator({self._geometry.chunk_tokens} tokens a chunk, {dict(self.counters)})"

    def __enter__(self) -> StoredGenerator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Waits until what was computed is saved or dropped; False if that took too long."""
        return self._saver.flush(timeout_s)

    def close(self) -> None:
        """Saves what is queued, for some seconds at most."""
        try:
            self._saver.close()
        finally:
            self._store.close()
            self._identity.close()

    def generate(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """What `model.generate` returns. `input_ids` (or `inputs`, as transformers says) and `attention_mask`: [rows,
        tokens]."""
        if input_ids is None:
            input_ids = options.pop("inputs", None)
        given: dict[str, Any] = {} if attention_mask is None else {"attention_mask": attention_mask}
        # None as a setting can mean something; whatever else is None is not given
        settings = self._model.generation_config
        options = {
            name: value for name, value in options.items() if value is not None or hasattr(settings, name)
        }
        why, config = self._refusal(input_ids, attention_mask, options)
        namespace = None if why else self._namespace()
        if namespace is None or input_ids is None:
            self._tell(why)
            return self._generate(input_ids, **given, **options)
        if attention_mask is None:
            given["attention_mask"] = attention_mask = torch.ones_like(input_ids)
        verdict, width = self._verdict, input_ids.shape[1]
        begins = [width - int(count) for count in attention_mask.sum(1).tolist()]
        rows = [row[begin:] for row, begin in zip(input_ids.tolist(), begins, strict=True)]
        copies = max(config.num_beams or 1, config.num_return_sequences or 1)
        cache, stored = self._load(namespace, rows, begins, width)
        self.counters["prompt_tokens"] += sum(map(len, rows))
        if copies > 1 and cache.get_seq_length():
            cache.batch_repeat_interleave(copies)
        result = self._generate(input_ids, cache=cache, **given, **options)
        if self._identity.holds(verdict):
            sequences = result if isinstance(result, torch.Tensor) else result.sequences
            ends = _ends(config, width)
            for number, begin in enumerate(begins):
                tokens = rows[number]
                if copies == 1:
                    tokens = ends(sequences[number].tolist())[begin:]
                self._save(namespace, cache, number * copies, begin, tokens, stored[number])
        self._saver.follow(self._identity)
        return result

    # ------------------------------------------------------------------------------------------------- what is refused

    def _refusal(
        self, input_ids: object, attention_mask: torch.Tensor | None, options: Mapping[str, Any]
    ) -> tuple[str, Any]:
        """Why this call is computed without the store, "" if it is not; and its settings."""
        config = copy.deepcopy(options.get("generation_config") or self._model.generation_config)
        settings = {name: value for name, value in options.items() if name not in HARMLESS}
        unknown = sorted(config.update(**settings))
        if unknown:
            return f"{unknown[0]} is given", config
        for name, allowed in REFUSED.items():
            value = getattr(config, name, None)
            if value not in allowed:
                return f"{name} is {value!r}", config
        if self._model.training:
            return "the model is in training mode", config
        if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or not input_ids.numel():
            return "input_ids is no tensor of [rows, tokens]", config
        if attention_mask is None:
            pad = config.pad_token_id
            if pad is not None and bool((input_ids == pad).any()):
                return "there is padding and no attention_mask", config
        elif not _padded_left(attention_mask, input_ids):
            return "attention_mask is not padded on the left alone", config
        return "", config

    def _tell(self, why: str) -> None:
        self.counters["without_store"] += 1
        if why and why not in self._told:
            self._told.add(why)
            log.warning("generated without the store: %s", why)

    # -------------------------------------------------------------------------------------------------------- the store

    def _namespace(self) -> Namespace | None:
        verdict = self._identity.check()
        if verdict != self._verdict:
            self._saver.forget()
            self._verdict = verdict
            self._store.use(self._spec(verdict))
        return self._store.namespace()

    def _spec(self, verdict: Verdict) -> Any:
        if not verdict.explained:
            self._tell(verdict.reason)
            return None
        try:
            if Geometry.of(self._model, self._geometry.chunk_tokens) != self._geometry:
                self._tell("the model's shape or type changed; make another StoredGenerator")
                return None
            return namespace_of(
                self._model,
                self._geometry,
                digest=verdict.digest,
                # Not that of an engine: it computes the same KV in another order, with other bits
                attention=f"generate/{self._model.config._attn_implementation}",
                weights_epoch=self._epoch,
                salt=self._salt,
            )
        except (Unsupported, StoreError) as error:  # a living model may get any config
            self._tell(str(error))
            return None

    def _load(
        self, namespace: Namespace, rows: Sequence[list[int]], begins: Sequence[int], width: int
    ) -> tuple[DynamicCache, list[int]]:
        """A cache whose columns are filled as far as all rows are in the store, but for the last one; and how many
        leading chunks of each row are there."""
        cache = DynamicCache(config=self._model.config)
        stored = [0] * len(rows)
        size = self._geometry.chunk_tokens
        leases = []
        try:
            for number, row in enumerate(rows):
                keys = namespace.keys(row[: len(row) // size * size])[:KEYS_PER_REQUEST_MAX]
                lease = self._store.read(namespace, keys)[0] if keys else None
                leases.append(lease)
                if lease is not None:
                    hits = [outcome is Outcome.HIT for outcome in lease.outcomes]
                    stored[number] = hits.index(False) if False in hits else len(hits)
            reach = [begin + count * size for begin, count in zip(begins, stored, strict=True)]
            columns = min(*reach, width - 1)
            if columns > min(begins):
                self._fill(cache, leases, begins, columns)
        except StoreError as error:
            log.info("not loaded: %s", error)
            cache, stored = DynamicCache(config=self._model.config), [0] * len(rows)
        finally:
            for lease in leases:
                if lease is not None:
                    lease.release()
        return cache, stored

    def _fill(self, cache: DynamicCache, leases: Sequence[Any], begins: Sequence[int], columns: int) -> None:
        geometry, model = self._geometry, self._model
        shape = (geometry.layers, 2, len(begins), geometry.heads, columns, geometry.head_dim)
        filled = torch.zeros(shape, dtype=geometry.dtype)
        tokens = 0
        for number, (lease, begin) in enumerate(zip(leases, begins, strict=True)):
            count = max(0, columns - begin)
            chunks = math.ceil(count / geometry.chunk_tokens)
            if not chunks:
                continue
            raw = np.empty((chunks, geometry.shard_bytes), np.uint8)
            if not lease.copy_many([(index, 0, 0, raw[index]) for index in range(chunks)]):
                return  # gone meanwhile: all is computed
            kv = torch.from_numpy(raw).view(geometry.dtype)
            kv = kv.view(chunks, geometry.layers, 2, geometry.heads, geometry.chunk_tokens, geometry.head_dim)
            whole = kv.permute(1, 2, 3, 0, 4, 5).reshape(*shape[:2], geometry.heads, -1, geometry.head_dim)
            filled[:, :, number, :, begin:] = whole[..., :count, :]
            tokens += count
        for layer in range(geometry.layers):
            keys, values = filled[layer].to(model.device)
            cache.update(keys, values, layer)
        self.counters["loaded_tokens"] += tokens

    def _save(
        self,
        namespace: Namespace,
        cache: DynamicCache,
        row: int,
        begin: int,
        tokens: Sequence[int],
        stored: int,
    ) -> None:
        """`row`: of the cache, which has the KV of `tokens` from column `begin` on."""
        size = self._geometry.chunk_tokens
        tokens = tokens[: max(0, cache.get_seq_length() - begin)]
        known = namespace.keys(tokens[: stored * size])
        turn = TurnSave(self._saver, namespace, "", None, known)
        turn.finish(_CacheRow(cache, row, begin, self._geometry), tokens)

    @property
    def save_counters(self) -> Counter[str]:
        return self._saver.counters


class _CacheRow:
    """Where a save finds the KV of one row."""

    def __init__(self, cache: DynamicCache, row: int, begin: int, geometry: Geometry) -> None:
        self._cache = cache
        self._row = row
        self._begin = begin
        self._geometry = geometry

    def snapshot(self, first_token: int, token_count: int, /) -> _Packed:
        geometry = self._geometry
        chunks = token_count // geometry.chunk_tokens
        packed = np.zeros((chunks, geometry.shard_bytes), np.uint8)
        span = slice(self._begin + first_token, self._begin + first_token + token_count)
        for layer, held in enumerate(self._cache.layers):
            kept: Any = held  # a layer of full attention: others are refused
            for which, tensor in enumerate((kept.keys, kept.values)):
                columns = bits(tensor[self._row, :, span].detach().cpu().contiguous())
                for chunk in range(chunks):
                    window = geometry.window(packed[chunk], layer, geometry.chunk_tokens)
                    start = chunk * geometry.chunk_tokens
                    window[which] = columns[:, start : start + geometry.chunk_tokens]
        return _Packed(packed)


class _Packed:
    def __init__(self, chunks: npt.NDArray[np.uint8]) -> None:
        self._chunks = chunks

    def wait(self) -> None:
        """It is all there."""

    def shard(self, number: int, /) -> npt.NDArray[np.uint8]:
        chunk: npt.NDArray[np.uint8] = self._chunks[number]
        return chunk

    def release(self) -> None:
        self._chunks = self._chunks[:0]


def _padded_left(mask: torch.Tensor, input_ids: torch.Tensor) -> bool:
    """And at least one token in each row."""
    if not isinstance(mask, torch.Tensor) or mask.shape != input_ids.shape:
        return False
    ones = mask == 1
    plain = bool((ones | (mask == 0)).all())
    return plain and bool(ones[:, -1].all()) and bool((ones.int().diff(dim=1) >= 0).all())


def _ends(config: Any, width: int) -> Callable[[list[int]], list[int]]:
    """Leaves of a row what comes behind the token that ended its answer, which is padding, out."""
    ends = config.eos_token_id
    stops = {ends} if isinstance(ends, int) else set(ends or ())
    if config.pad_token_id is not None:
        stops.add(config.pad_token_id)

    def cut(row: list[int]) -> list[int]:
        end = next((n for n in range(width, len(row)) if row[n] in stops), len(row))
        return row[: end + 1]

    return cut
