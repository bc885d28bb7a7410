"""The store as a secondary tier of vLLM's KV offloading: it saves and restores the rows of vLLM's own host memory.

vLLM calls all of this on its scheduler's thread. Nothing here waits, asks the daemon or raises; threads of
`connectors.offload` do the work. docs/vllm.md says when to choose the tier and when the connector.

    lookup             at once by the directory in shared memory, where that knows; else from what the request's
                       question found; "ask again" until it is answered or its time is up
    on_schedule_end    a request's new keys become one question
    submit_store       the daemon reads the rows; visible only if that ended while they were ours
    submit_load        leased slots are copied into the rows
    get_finished_jobs  each transfer once: done, failed or late; from then on its rows are vLLM's again

Other tiers of the engine load by the hash of the tokens, of whatever weights. What they have loaded is `_foreign`, and
what a request computes behind it is not saved: it would be named for our weights.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, ParentManager, SecondaryTierManager, TransferJob

from kvstore.errors import ConfigError
from kvstore.gpu_worker.compute_or_load import ComputeOrLoad
from kvstore.gpu_worker.connectors.link import Link
from kvstore.gpu_worker.connectors.offload import (
    Crew,
    HintBoard,
    Inquiry,
    Lookups,
    Needed,
    Orders,
    RowLoader,
    Rows,
    RowSaver,
    Tally,
    Transfer,
    Transfers,
    Verdict,
    needed,
)
from kvstore.gpu_worker.connectors.vllm.callers import (
    asked,
    own_cache_was_emptied,
    range_asked,
    tokens_of_step,
)
from kvstore.gpu_worker.connectors.vllm.groups import groups_of
from kvstore.gpu_worker.connectors.vllm.harmless import complain, harmless
from kvstore.gpu_worker.connectors.vllm.hint_desk import HintDesk, session_of
from kvstore.gpu_worker.connectors.vllm.identity import reset_spec
from kvstore.gpu_worker.connectors.vllm.interface import check_interface
from kvstore.gpu_worker.connectors.vllm.kv_hints import hints_of
from kvstore.gpu_worker.connectors.vllm.settings import TierSettings
from kvstore.gpu_worker.connectors.vllm.steps import Steps
from kvstore.gpu_worker.connectors.vllm.tier_identity import (
    check_alone,
    engine_under_construction,
    is_prefix_only,
    namespace_of_rows,
    row_layout,
)
from kvstore.gpu_worker.connectors.vllm.weights import Known, Watch, executor_under_construction
from kvstore.keys import ROOT
from kvstore.types import KEY_BYTES_MAX, ChunkKey

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

    from kvstore.client import Namespace
    from kvstore.layout import NamespaceSpec

ASK_THREADS, LOAD_THREADS, SAVE_THREADS = 16, 2, 1
"""A question that waits for the SSD keeps its thread: others must not wait behind it."""
WAITING_MAX = 1024
"""Questions, and transfers of each direction, that may wait for a thread."""
STAGING_BYTES_MIN = 64 << 20
HINT_AFTER_S = 0.05
"""A request that waits longer is told to the daemon, and again every HINT_AGAIN_S."""
HINT_AGAIN_S = 20.0
REMEMBERED_MAX = 65_536
"""Keys that were announced as stored, so that their loss can be; events that nobody took yet."""
FOREIGN_MAX = 1 << 20
"""Chunks of other tiers that are known by their keys."""
POLL_S = 30.0
"""Between two questions to the ranks whether their weights changed without a call."""
VERDICTS = {
    Verdict.HIT: LookupResult.HIT,
    Verdict.MISS: LookupResult.MISS,
    Verdict.WAIT: LookupResult.RETRY,
}
COUNTERS = {
    "lookups": "Chunks that the store was asked about.",
    "hits": "Chunks that vLLM was told to load.",
    "lookups_late": "Chunks that were computed because the store's answer did not come in time.",
    "lookups_dropped": "Chunks that were not asked about: too many questions waited.",
    "computed": "Chunks that the store had and vLLM computed, because that is faster.",
    "blocks_loaded": "Chunks copied into rows of vLLM's memory.",
    "bytes_loaded": "Bytes copied into rows of vLLM's memory.",
    "blocks_failed": "Chunks that were to be loaded and are computed instead.",
    "loads_late": "Loads whose time was up.",
    "loads_dropped": "Loads that failed at once: too many waited.",
    "blocks_saved": "Chunks saved out of rows of vLLM's memory.",
    "bytes_saved": "Bytes saved out of rows of vLLM's memory.",
    "bytes_shared": "Bytes of those rows that need no saving: another rank's part of the row is the same.",
    "replicas_differ": "Chunks not saved: ranks that should have the same KV have not.",
    "blocks_already": "Chunks that the store had already.",
    "blocks_refused": "Chunks not saved: the store had no room, was away or too slow.",
    "blocks_dropped": "Chunks not saved: too many rows waited to be, or they are of a time before a reset.",
    "blocks_foreign": "Chunks not saved: another tier has loaded what they follow, of weights that nobody compared.",
    "saves_late": "Saves whose time was up.",
    "saves_dropped": "Saves that failed at once, with their chunks.",
    "hints_published": "Waiting requests that the daemon was told of, and keeps chunks for.",
    "hints_refused": "Waiting requests that the daemon was told of, too far for its memory.",
    "blocks_touched": "Chunks of which the daemon was told that a request used them without it.",
    "blocks_untold": "Such chunks of which it was not: too many waited, or it was away.",
    "actions_accepted": "kv_hints actions that are done or in force.",
    "actions_clipped": "kv_hints actions that are in force for a part of their chunks.",
    "actions_deferred": "kv_hints actions that are in force while chunks are on their way, or not saved yet.",
    "actions_rejected": "kv_hints actions that the store cannot carry out.",
    "blocks_recalled": "Chunks that the store forgot again: the weights had changed, nobody knows when.",
    "resets": "Resets of the cache: a new weights epoch each.",
    "bugs": "Errors in the tier itself; the log has one of each kind.",
}
PREFIX = "vllm:kvstore_tier_"
log = logging.getLogger(__name__)


class KVStoreTier(SecondaryTierManager):  # type: ignore[misc]
    """Made by vLLM, once per engine, from `"secondary_tiers": [{"type": "KVStoreTier", "module_path": ...}]`.

    Construction raises StoreError for an engine whose KV cannot be stored, naming the setting; a daemon that is not
    there is no error, now or later.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __new__(cls, *_: Any, **__: Any) -> KVStoreTier:
        """Raises Unsupported where vLLM would call it otherwise than it expects."""
        check_interface(KVStoreTier, SecondaryTierManager)
        tier: KVStoreTier = super().__new__(cls)
        return tier

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **given: Any,
    ) -> None:
        """`primary_kv_view`: of shape (rows, row bytes); `given`: see TierSettings."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings = TierSettings.of(given)
        self.locality = _locality(settings.locality)
        engine = engine_under_construction()
        row_bytes = self.block_size_bytes
        self._name: Callable[..., NamespaceSpec] = functools.partial(
            namespace_of_rows, engine, offloading_spec, settings, row_bytes=row_bytes
        )
        self._alone = settings.save_what_others_load or all(
            tier.get("type") == KVStoreTier.__name__
            for tier in getattr(offloading_spec, "secondary_tier_configs", ())
        )
        """No other tier loads anything."""
        if not settings.save_what_others_load:
            check_alone()
        self._watches_others = False
        self._foreign: set[bytes] | None = set()
        """Chunks that other tiers have loaded since vLLM's caches were emptied; None: too many, or blocks of them may
        be in chunks with other keys, so nothing is saved."""
        executor = executor_under_construction()
        self._watch = Watch(executor, name=settings.weights_digest) if executor is not None else None
        self._known: Known | None = None
        """What the ranks hold; None: not known, and nothing is named (where there is no watch: what settings say)."""
        self._poll_at = 0.0
        self._uncalled = 0
        self._mixed = False
        """vLLM's own memory has rows, or requests run, from before the last change of the weights, or the last reset:
        nothing is saved."""
        self._used = False
        """Whether there were requests since vLLM's own memory was emptied."""
        self._base: NamespaceSpec | None = None
        self._spec: NamespaceSpec | None = None
        self._name(weights=bytes(32) if self._watch is not None else b"")  # whatever the weights are
        self._settings = settings
        self._prefix = is_prefix_only(engine)
        self._groups = tuple(group.group_id for group in offloading_spec.config.groups)
        self._kinds = (
            groups_of(engine.kv_cache_config, blocks_per_chunk=offloading_spec.blocks_per_chunk)
            if engine is not None
            else []
        )
        self._chunk_tokens = {
            group.group_id: group.tokens_per_block * offloading_spec.blocks_per_chunk
            for group in offloading_spec.config.groups
        }
        self._owner = secrets.token_bytes(16)
        self._resets = 0
        self.tally = Tally(COUNTERS)
        self.complaints: set[tuple[str, type[Exception]]] = set()
        self._events: list[OffloadingEvent] | None = None
        if settings.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events = []
        self._announced: OrderedDict[OffloadKey, None] = OrderedDict()

        self._requests: dict[str, Inquiry] = {}
        self._contexts: dict[str, ReqContext] = {}
        self._waiting: dict[str, Inquiry] = {}
        """Those that have asked and are not computed yet."""
        self._hinted: dict[str, float] = {}
        """Those of them that the daemon was told of, and when."""
        self._begun: dict[str, set[ChunkKey]] = {}
        """By request that vLLM computes, or has: the keys of it that the store was asked to load or save."""
        self._stale: set[str] = set()
        """Their KV was computed before a reset."""
        self._arrivals = 0
        self._closed = False

        self._link = Link(
            settings.run_dir,
            engine_group=f"vllm-{offloading_spec.config.engine_id}",
            rank=0,
            timeout_s=settings.connect_ms / 1000,
            staging_bytes=max(STAGING_BYTES_MIN, 2 * row_bytes),
        )
        layout = row_layout(engine, offloading_spec, row_bytes)
        self._rows = Rows(
            primary_kv_view,
            _file_of(offloading_spec, primary_kv_view.nbytes),
            copies=layout.copies,
            part_bytes=layout.part_bytes,
        )
        self._askers = Crew("kv-ask", threads=ASK_THREADS, waiting_max=WAITING_MAX)
        self._loaders = Crew("kv-load", threads=LOAD_THREADS, waiting_max=WAITING_MAX)
        self._savers = Crew("kv-save", threads=SAVE_THREADS, waiting_max=WAITING_MAX)
        self.choice = ComputeOrLoad()
        self._steps = Steps(self.choice.compute) if settings.compute_or_load else None
        self._lookups = Lookups(self._askers, self._namespace, self.tally, self.choice, self._tokens_without)
        self._board = HintBoard(self._askers, self._namespace, self.tally)
        self._orders = Orders(self._askers, self._namespace, self.tally)
        self._desk = HintDesk(self._orders, self.tally, self._groups)
        self._loader = RowLoader(self._rows, self._loaders, self._namespace, self.tally, self.choice)
        self._saver = RowSaver(
            self._rows,
            self._savers,
            self._namespace,
            self.tally,
            rows_max=max(1, int(settings.save_share_max * self._rows.count)),
            maker=self._owner,
        )
        self._finished: list[JobResult] = []
        """Not told yet."""
        if self._watch is None:
            self._base = self._spec = self._name(weights=b"")
            self._link.open(self._spec)
        self._mind_weights()

    def _namespace(self, timeout_s: float) -> Namespace | None:
        """For threads. Of the engine's present weights and epoch."""
        spec = self._spec
        return self._link.namespace(spec, timeout_s) if spec is not None else None

    def _tokens_without(self, keys: Sequence[ChunkKey]) -> int:
        """Tokens that these chunks save from being computed: of the group that they have most of."""
        groups = Counter(get_offload_group_idx(OffloadKey(key)) for key in keys)
        return max(int(count * self._chunk_tokens.get(group, 0)) for group, count in groups.items())

    # ---------------------------------------------------------------------------------------------------- weights

    def _mind_weights(self) -> None:
        """Before anything is named: what do the ranks hold, if that may have changed?

        vLLM's own memory keeps rows that other weights have made, until it is reset, and gives them to requests whose
        next rows it then wants saved. So after a change nothing is saved before the reset.
        """
        if self._watch is None:
            return
        now = time.monotonic()
        if self._known is not None and now >= self._poll_at:
            self._poll_at = now + POLL_S
            self._watch.poll(self._known)
            self._saver.verified(self._watch.verified_at)
        if self._uncalled != self._watch.uncalled and self._saver.recall():
            self._uncalled = self._watch.uncalled
        if not self._watch.moved:
            return
        before, self._known = self._known, self._watch.ask()
        self._poll_at = now + POLL_S
        if self._known == before:
            return
        # Rows that are being saved are of the weights before; what is being loaded is too.
        self._drain(now)
        known = self._known
        base = self._name(weights=known.digest, scales=known.scales) if known is not None else None
        self._base, self._spec = base, None
        self._mixed = self._used or bool(self._requests)
        if self._mixed:
            log.info(
                "the weights have changed: nothing is saved before reset_prefix_cache(reset_connector=True)"
            )
        if base is not None:
            self._use(base)
        self._leave_the_past()

    def _use(self, base: NamespaceSpec) -> None:
        self._spec = reset_spec(base, self._owner, self._resets) if self._resets else base
        self._link.open(self._spec)

    # --------------------------------------------------------------------------------------------------- requests

    @harmless(lambda *_: RequestOffloadingContext())
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._mind_weights()
        self._used = True
        self._inquiry(req_context.req_id)
        envelope = hints_of(req_context)
        if envelope is not None:
            self._desk.open(req_context.req_id, envelope)
            self._orders.flush()
        return RequestOffloadingContext()

    def _inquiry(self, name: str) -> Inquiry:
        inquiry = self._requests.get(name)
        if inquiry is None:
            inquiry = self._requests[name] = Inquiry(
                name,
                self._arrivals,
                self._lookups,
                self.tally,
                lookup_s=self._settings.lookup_ms / 1000,
                hold_s=self._settings.hold_ms / 1000,
            )
            self._arrivals += 1
        return inquiry

    @harmless(lambda *_: LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        self._mind_weights()
        if self._closed or self._spec is None or not 0 < len(key) <= KEY_BYTES_MAX:
            return LookupResult.MISS
        inquiry = self._inquiry(req_context.req_id)
        # Of several groups, what of all that is needed is decided once all was asked about.
        keys_max = self._rows.count * (1 if self._prefix else max(1, len(self._kinds)))
        now = time.monotonic()
        self._look(inquiry, key, req_context, now, keys_max)
        verdict = inquiry.verdict(ChunkKey(key), now, keys_max=keys_max)
        if inquiry.begun is not None:
            self._waiting[inquiry.name] = inquiry
            self._contexts[inquiry.name] = req_context
        if verdict is Verdict.MISS:
            self._lost([key])
        return VERDICTS[verdict]

    def _look(
        self, inquiry: Inquiry, first: OffloadKey, context: ReqContext, now: float, keys_max: int
    ) -> None:
        """vLLM begins to ask about a request, with this key: about all that it will ask, the directory is looked up."""
        tail = _position(context, first) % self._chunk_tokens.get(get_offload_group_idx(first), 1)
        if tail:
            known = inquiry.knows(ChunkKey(first))
        else:
            known = not inquiry.unasked and not inquiry.outdated(ChunkKey(first), now)
        if known:
            return
        assert self._spec is not None
        namespace = self._link.ready(self._spec)
        if namespace is None:
            return
        choose: Needed | None = None
        if tail:
            keys, choose = [ChunkKey(first)], list
        elif self._prefix:
            keys = self._behind(first, context)[:keys_max]
        else:
            keys, choose = self._of_groups(context)
        if keys and len(keys) <= keys_max:
            busy_s = self._steps.busy_s if self._steps is not None else 0.0
            ahead = self._loader.transfers.cold
            inquiry.look(namespace, keys, now, needed=choose, ahead=ahead, busy_s=busy_s)

    def _behind(self, first: OffloadKey, context: ReqContext) -> list[ChunkKey]:
        """The request's chunks from this one on."""
        chain = _chain_of(context)
        start = _position(context, first) // self._chunk_tokens[get_offload_group_idx(first)] - 1
        return chain[start:] if 0 <= start < len(chain) and chain[start] == first else []

    def _of_groups(self, context: ReqContext) -> tuple[list[ChunkKey], Needed | None]:
        """The keys that vLLM is about to ask for, and which of those that are there the request needs."""
        asks = range_asked()
        if asks is None or not self._kinds:
            return [], None
        places: dict[bytes, tuple[int, int]] = {}
        for key in _chain_of(context):
            number, end = get_offload_group_idx(OffloadKey(key)), _position(context, OffloadKey(key))
            if end % self._chunk_tokens.get(number, 1) == 0:
                places[key] = (number, end)
        wanted = {ChunkKey(key): place for key, place in asked(self._kinds, places, asks).items()}
        return list(wanted), functools.partial(needed, self._kinds, wanted, keys_max=self._rows.count)

    @harmless(lambda *_: None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        now = time.monotonic()
        busy_s = 0.0
        if self._steps is not None:
            busy_s = self._steps.busy_s
            self._steps.scheduled(tokens_of_step(), now)
        for name in context.new_req_ids:
            self._begun.setdefault(name, set())
            if name in self._waiting:
                self.choice.delayed(self._waiting[name].delay(), now, busy_s)
                self._waits_no_more(name)
        for name in context.preempted_req_ids:
            if (inquiry := self._requests.get(name)) is not None:
                self._waits_no_more(name)
                inquiry.again()
        for name, inquiry in self._waiting.items():
            inquiry.ask(now, prefix=self._prefix, needed=self._needed(name, inquiry), busy_s=busy_s)
            inquiry.tick(now)
            assert inquiry.begun is not None, inquiry
            due = self._hinted.get(name, inquiry.begun + HINT_AFTER_S - HINT_AGAIN_S) + HINT_AGAIN_S
            # What was loaded is vLLM's: a hint would bring it up again.
            if now >= due and not inquiry.loads and self._board.add(name, inquiry.position, inquiry.keys):
                self._hinted[name] = now
        self._board.flush()
        self._orders.flush()

    def _needed(self, name: str, inquiry: Inquiry) -> Needed | None:
        """Of several groups, or one with a window, a request needs a part only."""
        if self._prefix or not self._kinds or not inquiry.new:
            return None
        context = self._contexts[name]
        places = {
            key: (get_offload_group_idx(OffloadKey(key)), _position(context, OffloadKey(key)))
            for key in inquiry.new
        }
        return functools.partial(needed, self._kinds, places, keys_max=self._rows.count)

    def _waits_no_more(self, name: str) -> None:
        if (inquiry := self._waiting.pop(name, None)) is not None:
            inquiry.scheduled()
        self._take_back_hints(name)

    def _take_back_hints(self, name: str) -> None:
        if self._hinted.pop(name, None) is not None:
            self._board.remove(name)

    @harmless(lambda *_: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        name = req_context.req_id
        self._waits_no_more(name)
        self._requests.pop(name, None)
        self._contexts.pop(name, None)
        seen = self._begun.pop(name, None)
        stale = name in self._stale
        self._stale.discard(name)
        chain = _chain_of(req_context) if seen is not None and not stale and self._spec is not None else []
        if chain and seen is not None:
            self._orders.touch([key for key in chain if key not in seen])
        self._desk.close(name, session_of(req_context), chain)
        self._orders.flush()

    @harmless(lambda *_: None)
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Nothing to do: a request's whole chain is told of when it ends, in one message."""

    # ----------------------------------------------------------------------------------------------------- other tiers

    @harmless(lambda *_: None)
    def serve_external_requests(self, parent: ParentManager) -> None:
        """There are none. But vLLM calls it in each step before any tier loads, with what knows the other tiers."""
        if self._alone or self._watches_others:
            return
        tiers = getattr(getattr(parent, "_m", None), "secondary_tiers", None)
        if tiers is None:
            return  # vLLM has changed: nothing is saved
        for tier in tiers:
            if not isinstance(tier, KVStoreTier):
                tier.submit_load = functools.partial(self._loaded_elsewhere, tier.submit_load)
        self._watches_others = True

    def _loaded_elsewhere(self, load: Callable[[TransferJob], None], given: TransferJob) -> None:
        try:
            self._note_foreign(given)
        except Exception as error:
            complain(self, self._note_foreign.__name__, error)
            self._foreign = None
        load(given)

    def _note_foreign(self, given: TransferJob) -> None:
        if self._foreign is None:
            return
        if not self._foreign:
            log.info("another tier has loaded KV: what follows it is not saved")
        self._foreign.update(bytes(key) for key in given.keys)
        # A request may share some of a chunk's blocks, or of a block's tokens, and have another key.
        shared = self._offloading_spec.blocks_per_chunk > 1 or any(
            _position(given.req_context, key) % self._chunk_tokens.get(get_offload_group_idx(key), 1)
            for key in given.keys
        )
        if shared or len(self._foreign) > FOREIGN_MAX:
            self._foreign = None

    def _is_ours(self, context: ReqContext) -> bool:
        """Whether this engine has computed all of a request's KV, or has it from the store."""
        if self._alone:
            return True
        if not self._watches_others or self._foreign is None:
            return False
        chain = _chain_of(context)
        return not self._foreign or bool(chain and self._foreign.isdisjoint(chain))

    # ------------------------------------------------------------------------------------------------------- transfers

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(self._saver.transfers, job_metadata, self._store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(self._loader.transfers, job_metadata, self._load)

    def _submit(self, transfers: Transfers, given: TransferJob, start: Callable[[TransferJob], None]) -> None:
        """Whatever goes wrong, the transfer will be reported."""
        try:
            start(given)
        except Exception as error:
            complain(self, start.__name__, error)
            transfers.fail(given.job_id)

    def _store(self, given: TransferJob) -> None:
        transfer, context = self._job(given, self._settings.save_ms), given.req_context
        if (seen := self._begun.get(context.req_id)) is not None:
            seen.update(transfer.keys)
        self._used = True
        self._mind_weights()
        if self._closed or self._mixed or self._spec is None or context.req_id in self._stale:
            self._saver.refuse(transfer)
        elif not self._is_ours(context):
            self.tally.add(blocks_foreign=len(transfer.keys))
            self._saver.refuse(transfer)
        else:
            self._saver.start(transfer, self._parents(transfer.keys, context))

    def _load(self, given: TransferJob) -> None:
        transfer = self._job(given, self._settings.load_ms)
        self.tally.add(hits=len(transfer.keys))
        self._take_back_hints(given.req_context.req_id)
        self._begun.setdefault(given.req_context.req_id, set()).update(transfer.keys)
        hits, questions = self._inquiry(given.req_context.req_id).load(transfer.keys)
        self._loader.start(transfer, hits, questions)

    def _job(self, given: TransferJob, limit_ms: int) -> Transfer:
        """vLLM's keys are in no order; ours are in that of their tokens, group by group."""
        rows = [int(row) for row in given.chunk_ids]
        pairs = sorted(
            zip(given.keys, rows, strict=True),
            key=lambda pair: (get_offload_group_idx(pair[0]), _position(given.req_context, pair[0])),
        )
        for key, row in pairs:
            if not 0 < len(key) <= KEY_BYTES_MAX or not 0 <= row < self._rows.count:
                raise ValueError(f"a key of {len(key)} bytes for row {row} of {self._rows.count}")
        return Transfer(
            given.job_id,
            [ChunkKey(key) for key, _ in pairs],
            [row for _, row in pairs],
            time.monotonic() + limit_ms / 1000,
        )

    def _parents(self, keys: Sequence[ChunkKey], context: ReqContext) -> list[ChunkKey]:
        """Of each key the one before it, where the transfer has that too."""
        places = [
            (get_offload_group_idx(OffloadKey(key)), _position(context, OffloadKey(key))) for key in keys
        ]
        known = dict(zip(places, keys, strict=True))
        return [
            known.get((group, position - self._chunk_tokens.get(group, 0)), ROOT)
            for group, position in places
        ]

    @harmless(lambda *_: [])
    def get_finished_jobs(self) -> list[JobResult]:
        now = time.monotonic()
        self._take(self._saver.transfers.take(now), self._loader.transfers.take(now))
        finished, self._finished = self._finished, []
        return finished

    def _take(self, saves: Sequence[Transfer], loads: Sequence[Transfer]) -> None:
        for transfers, result in ((saves, self._saved), (loads, self._loaded)):
            for transfer in transfers:
                try:
                    self._finished.append(result(transfer))
                except Exception as error:
                    # vLLM would keep the rows of a transfer that it is not told of for ever.
                    complain(self, result.__name__, error)
                    self._finished.append(JobResult(job_id=transfer.number, success=False))

    def _saved(self, transfer: Transfer) -> JobResult:
        self.tally.add(saves_late=transfer.late)
        stored = [OffloadKey(key) for key, done in zip(transfer.keys, transfer.done, strict=True) if done]
        if self._events is not None and stored:
            self._announced.update(dict.fromkeys(stored))
            while len(self._announced) > REMEMBERED_MAX:
                self._announced.popitem(last=False)
            self._tell(stored, removed=False)
        return self._result(transfer, len(stored))

    def _loaded(self, transfer: Transfer) -> JobResult:
        self.tally.add(loads_late=transfer.late)
        done = [OffloadKey(key) for key, done in zip(transfer.keys, transfer.done, strict=True) if done]
        self._lost(
            [OffloadKey(key) for key, done in zip(transfer.keys, transfer.done, strict=True) if not done]
        )
        return self._result(transfer, len(done), done if not transfer.complete and done else None)

    def _result(
        self, transfer: Transfer, count: int, successful: list[OffloadKey] | None = None
    ) -> JobResult:
        return JobResult(
            job_id=transfer.number,
            success=transfer.complete,
            successful_keys=successful,
            transfer_time=time.monotonic() - transfer.begun,
            transfer_bytes=count * self._rows.chunk_bytes,
        )

    @harmless(lambda *_: None)
    def drain_jobs(self) -> None:
        """Called when the engine's cache is reset: its weights may be others from now on.

        At the latest after `drain_ms`, and the time of one copy, nothing touches vLLM's rows any more.
        """
        emptied = own_cache_was_emptied()
        self._drain(time.monotonic() + self._settings.drain_ms / 1000)
        self._begin_epoch(emptied=not self._requests if emptied is None else emptied)

    def _drain(self, until: float) -> None:
        saves = self._saver.transfers.drain(until - time.monotonic())
        self._take(saves, self._loader.transfers.drain(until - time.monotonic()))

    def _begin_epoch(self, *, emptied: bool) -> None:
        """`emptied`: vLLM's own cache. While requests run vLLM keeps it, gives it to new requests, and saves to its
        host memory once more what those that run have computed before."""
        self._resets += 1
        self.tally.add(resets=1)
        if self._base is not None:
            self._use(self._base)
        if emptied:
            self._mixed, self._used = False, bool(self._requests)
            self._foreign = set()
        else:
            self._used = self._used or bool(self._requests)
            self._mixed = self._used
        if self._mixed:
            log.info(
                "vLLM's cache was not emptied, as requests run: nothing is saved before a reset that empties it"
            )
        self._leave_the_past()

    def _leave_the_past(self) -> None:
        for name, inquiry in self._requests.items():
            self._waits_no_more(name)
            inquiry.again()
        self._stale.update(self._requests)
        self._board.clear()
        self._desk.clear()
        if self._events is not None:
            self._lost(list(self._announced))

    # --------------------------------------------------------------------------------------------- events, stats, end

    def _lost(self, keys: Sequence[OffloadKey]) -> None:
        """Tell of those that were announced."""
        lost = [key for key in keys if key in self._announced]
        for key in lost:
            del self._announced[key]
        if lost:
            self._tell(lost, removed=True)

    def _tell(self, keys: list[OffloadKey], *, removed: bool) -> None:
        if self._events is not None and len(self._events) < REMEMBERED_MAX:
            self._events.append(
                OffloadingEvent(
                    keys=keys,
                    medium=self.medium,
                    removed=removed,
                    locality=self.locality,
                    ownership=self.tier_type,
                )
            )

    @harmless(lambda *_: [])
    def take_events(self) -> list[OffloadingEvent]:
        if not self._events:
            return []
        events, self._events = self._events, []
        return events

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return {
            PREFIX + name: OffloadingCounterMetadata(documentation=about) for name, about in COUNTERS.items()
        }

    @harmless(lambda *_: None)
    def get_stats(self) -> OffloadingConnectorStats | None:
        if self._steps is not None:
            self._steps.ended(time.monotonic())  # vLLM asks once a step, when it is over
        stats = OffloadingConnectorStats()
        for name, count in self.tally.take().items():
            stats.increase_counter(PREFIX + name, count)
        return None if stats.is_empty() else stats

    @harmless(lambda *_: None)
    def shutdown(self) -> None:
        """Saves what is queued, for at most `drain_ms`, then lets go of vLLM's memory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        until = time.monotonic() + self._settings.drain_ms / 1000
        self._drain(until)
        for name, inquiry in self._requests.items():
            self._waits_no_more(name)
            inquiry.again()
        for crew in (self._savers, self._loaders, self._askers):
            if not crew.close(max(0.5, until - time.monotonic())):
                log.warning("a thread still waits for the daemon; it ends with its deadline")
        self._saver.close()
        self._link.close()
        self._rows.close()


def _chain_of(context: ReqContext) -> list[ChunkKey]:
    """The keys of all whole chunks of a request, in order; none where vLLM does not keep them."""
    return [ChunkKey(key) for key in getattr(context, "_offload_key_positions", ())]


def _position(context: ReqContext, key: OffloadKey) -> int:
    """Where the key's tokens end, in its request; 0 where vLLM does not say."""
    return int(context.get_offload_key_position(key) or 0)


def _locality(name: str) -> Locality:
    try:
        return Locality(name.upper())
    except ValueError:
        raise ConfigError(
            "is no locality",
            field="secondary_tiers.locality",
            value=name,
            remedy="there are: " + ", ".join(locality.value for locality in Locality),
        ) from None


def _file_of(spec: OffloadingSpec, size_bytes: int) -> int | None:
    """Descriptor of the file that vLLM's rows are in, from its first byte on; None: they are in none that we know."""
    fd = getattr(getattr(spec, "_scheduler_mmap", None), "fd", None)
    try:
        return fd if isinstance(fd, int) and os.fstat(fd).st_size >= size_bytes else None
    except OSError:
        return None
