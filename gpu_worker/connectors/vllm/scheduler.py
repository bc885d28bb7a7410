"""The scheduler's side: which blocks the ranks load and save. Runs on vLLM's scheduler thread and never waits while
there is something to compute.

    on_new_request ------------> lookup, in the background
    get_num_new_matched_tokens   its answer; None ("ask again") until it is there or its deadline has passed
    update_state_after_alloc     where the hits go: a Load for the next step
    build_connector_meta         the step's Loads, and a Save for each block that it makes full; the daemon is told who
                                 waits, in the background
    request_finished             whatever the request still held; what of it vLLM had itself is told of as used, and
                                 kv_hints about its blocks are carried out

Only tokens that are accepted are saved: a block is named by vLLM's hash of its tokens, and vLLM hashes accepted ones
alone; a rejected draft is in no hash.

Chunks are named for the weights that the ranks hold (see `weights`). When these have changed, what is in vLLM's own
cache was computed with others: its blocks are `_doubtful`, each until it is filled anew, and nothing that follows one
is saved.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore.gpu_worker.compute_or_load import VAIN_SHARE, ComputeOrLoad
from kvstore.gpu_worker.connectors.link import Link
from kvstore.gpu_worker.connectors.offload import Crew, HintBoard, Orders
from kvstore.gpu_worker.connectors.vllm.events import Events, events_wanted
from kvstore.gpu_worker.connectors.vllm.hint_desk import HintDesk, session_of
from kvstore.gpu_worker.connectors.vllm.identity import (
    adapted_key,
    adapter_digest,
    namespace_of,
    reset_spec,
)
from kvstore.gpu_worker.connectors.vllm.kv_hints import hints_of
from kvstore.gpu_worker.connectors.vllm.lookups import Lookup, Lookups
from kvstore.gpu_worker.connectors.vllm.metadata import (
    IDLE_S,
    Adapter,
    HeldAdapter,
    Load,
    RankLayout,
    RankReport,
    Save,
    StepMetadata,
)
from kvstore.gpu_worker.connectors.vllm.settings import Settings
from kvstore.gpu_worker.connectors.vllm.stats import Tally
from kvstore.gpu_worker.connectors.vllm.steps import Steps
from kvstore.gpu_worker.connectors.vllm.weights import Known, Watch, executor_under_construction
from kvstore.keys import ROOT
from kvstore.layout import NamespaceSpec
from kvstore.types import ChunkKey

if TYPE_CHECKING:
    from kvstore.client import Namespace

ANSWER_MIN_S = 0.02
"""So long a request waits for the store's answer, however little it could save."""
PROMISED = "kvstore_blocks"
"""Field of `kv_transfer_params`."""
HINT_AFTER_S = 0.05
"""A request that waits longer is told to the daemon, and again every HINT_AGAIN_S."""
HINT_AGAIN_S = 20.0
TELLING_MAX = 16
LOOKS_MAX = 64
"""So often the daemon is asked about a request. If what it found is lost each time, the request is computed."""
CLOSE_S = 2.0
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Tracked:
    """One request that vLLM has."""

    request: Any
    lookup: Lookup | None = None
    tried: int = -1
    """Number of preemptions at the last load: a load that failed is not tried again and again."""
    saved: int = 0
    """Leading blocks that are in the store, or were given to the ranks to save."""
    blocks: list[int] = field(default_factory=list)
    """As vLLM gave them to it, see `held`."""
    given: int = -1
    """Number of preemptions when it got its first ones."""
    keys: list[ChunkKey] = field(default_factory=list)
    stale_at: int = -1
    """Number of preemptions when it had KV that was computed or loaded before a reset."""
    deferred: bool = False
    """It waited for another request's load."""
    own: int | None = None
    """Leading tokens that vLLM has or we load, as far as that was asked; under `save_what_others_load`, only if it was
    asked since the last step."""
    position: int = 0
    """Requests came in this order."""
    arrived: float = field(default_factory=time.monotonic)
    hinted: float = 0.0
    """When the daemon was told that it waits; 0: it was not, or knows that it waits no more."""
    begun: bool = False
    """vLLM has computed some of it."""
    looks: int = 0
    """How often the daemon was asked about it."""
    noted: int = -1
    """Number of preemptions when the daemon was told that the directory had answered."""

    @property
    def held(self) -> list[int]:
        """Its blocks now: once it is preempted, they are others'."""
        return self.blocks if self.given == self.request.num_preemptions else []

    @property
    def stale(self) -> bool:
        """Its KV is of before a reset. A preemption takes it that KV."""
        return bool(self.stale_at == self.request.num_preemptions)


class SchedulerSide:
    def __init__(
        self,
        config: Any,
        settings: Settings,
        link: Link,
        *,
        block_tokens: int,
        blocks: int,
        loads: bool,
        saves: bool,
    ) -> None:
        """`blocks`: how many vLLM's own cache has."""
        self._blocks = blocks
        self._config = config
        self._settings = settings
        self._link = link
        self._block_tokens = block_tokens
        self._may_load = loads
        self._may_save = saves
        self.choice = ComputeOrLoad()
        self._steps = Steps(self.choice.compute) if settings.compute_or_load else None
        """None: as long as nobody knows what computing takes, everything is loaded."""
        self._lookups = Lookups(
            link,
            self.choice,
            chunk_tokens=block_tokens,
            lookup_s=settings.lookup_ms / 1000,
            hold_s=settings.hold_ms / 1000,
        )
        self._idle_s = IDLE_S
        """How long a step without anything to compute may wait: until somebody's patience ends."""
        self._requests: dict[str, Tracked] = {}
        self._loads: list[Load] = []
        self._building: StepMetadata | None = None
        """Of the step that is being scheduled."""
        self._loading: dict[str, Lookup] = {}
        """Pins of loads that the ranks have not reported yet."""
        self._arriving: dict[ChunkKey, float] = {}
        """Of these, each key, and until when it is worth waiting for."""
        self._filling: dict[str, frozenset[bytes]] = {}
        """Layer by layer: by request, vLLM's hashes of the blocks that the step which is being scheduled loads."""
        self.forget_blocks: Callable[[set[int]], object] = lambda blocks: None
        """vLLM's own cache no longer gives these to requests to come; set by vLLM."""
        self._shares = bool(config.cache_config.enable_prefix_caching)
        """What one request has loaded, vLLM gives to the others."""
        self._doubtful: set[int] = set()
        """Blocks that another connector (beside ours, in a MultiConnector) filled: nobody has compared the weights that
        computed them with ours, and that a load within a step failed is known only after the step, when they would be
        saved. And those that other weights have filled, or another adapter of the same name. Neither they are saved,
        nor what follows them."""
        self._owner = secrets.token_bytes(16)
        self._resets = 0
        self._ranks: dict[tuple[int, int], RankLayout] = {}
        executor = executor_under_construction()
        self._watch = Watch(executor, name=settings.weights_digest) if executor is not None else None
        if self._watch is None:
            log.warning("working without the store: this vLLM does not show what weights its ranks hold")
        self._known: Known | None = None
        """What the ranks hold; None: not known, and nothing is named."""
        self._stepped = False
        """vLLM's own cache may hold something."""
        self._given: deque[list[ChunkKey]] = deque(maxlen=1 + config.max_concurrent_batches)
        """What the ranks were given to save in the last step of which all is known, and in those since."""
        self._recalled: set[ChunkKey] = set()
        """Of that, what the ranks shall have forgotten again."""
        self._adapters: dict[tuple[int, int], HeldAdapter] = {}
        """As the ranks have loaded them, by rank and id. A rank may have loaded another one since: it looks."""
        self._base: NamespaceSpec | None = None
        self._spec: NamespaceSpec | None = None
        self._spec_to_send: NamespaceSpec | None = None
        self.tally = Tally()
        self._arrivals = 0
        self._tellers = Crew("kv-hints", threads=1, waiting_max=TELLING_MAX)
        self._board = HintBoard(self._tellers, self._namespace, self.tally)
        self._orders = Orders(self._tellers, self._namespace, self.tally)
        self._desk = HintDesk(self._orders, self.tally, ())
        self.events = Events(block_tokens) if events_wanted(config) else None

    # ------------------------------------------------------------------------------------------------- namespace

    def meet_ranks(self, ranks: dict[tuple[int, int], RankLayout]) -> None:
        """Raises StoreError when their KV cannot be stored."""
        self._ranks = ranks
        self._name(bytes(32))  # whatever the weights are
        self._mind_weights()

    def ask_ranks(
        self, told: Callable[[Any], tuple[tuple[int, int], RankLayout | None]]
    ) -> dict[tuple[int, int], RankLayout]:
        """What vLLM's handshake did not bring."""
        answers = self._watch.each(told) if self._watch is not None else []
        return {place: layout for place, layout in answers if layout is not None}

    def _name(self, weights: bytes, scales: bytes = b"") -> NamespaceSpec:
        return namespace_of(
            self._config,
            self._settings,
            self._ranks,
            block_tokens=self._block_tokens,
            weights=weights,
            scales=scales,
        )

    def _namespace(self, timeout_s: float) -> Namespace | None:
        """For threads. Of the present weights and epoch."""
        spec = self._spec
        return self._link.namespace(spec, timeout_s) if spec is not None else None

    def _use(self, spec: NamespaceSpec) -> None:
        self._spec = self._spec_to_send = spec
        self._link.open(spec)

    def _mind_weights(self) -> None:
        try:
            self._look_at_weights()
        except Exception:
            self.silence()
            raise

    def _look_at_weights(self) -> None:
        """Before anything is named: what do the ranks hold, if that may have changed?"""
        if self._watch is None or not self._watch.moved or not self._ranks:
            return
        before, self._known = self._known, self._watch.ask()
        if self._known == before:
            return
        self._doubt_all()
        base = self._name(self._known.digest, self._known.scales) if self._known is not None else None
        if base is not None and base == self._base and self._spec is not None:
            return  # the same weights, another adapter
        self._base, self._spec = base, None
        if base is not None:
            self._use(reset_spec(base, self._owner, self._resets) if self._resets else base)
        self._leave_the_past()

    def reset(self) -> bool:
        """The weights are others now, or whoever calls wants nothing of the past."""
        if not self._ranks:
            return True
        self._resets += 1
        self.tally.add(resets=1)
        self._doubt_all()  # vLLM keeps its own cache while requests run
        if self._base is not None:
            self._use(reset_spec(self._base, self._owner, self._resets))
        self._leave_the_past()
        return True

    def _doubt_all(self) -> None:
        """Of what vLLM's own cache holds by now nothing is saved, nor what follows it."""
        if self._stepped:
            self._doubtful = set(range(self._blocks))

    def silence(self) -> None:
        """After an error about what the ranks hold: nothing is named any more, loaded or saved, as long as the engine
        lives."""
        self._watch = self._known = self._base = self._spec = None
        for name in list(self._requests):
            self.drop(name)

    def drop(self, name: str) -> None:
        """After an error: the request is computed without the store, and nothing of it is saved."""
        tracked = self._requests.pop(name, None)
        if tracked is not None:
            self._end_lookup(tracked)
            self._waits_no_more(tracked)

    def _leave_the_past(self) -> None:
        """Nothing that was found or computed before counts any more."""
        if self.events is not None:
            self.events.reset()
        self._board.clear()
        self._desk.clear()
        for tracked in self._requests.values():
            self._end_lookup(tracked)
            tracked.hinted = 0.0
            # Not one that still waits: its KV is yet to be computed. One that loads may have what it wanted already.
            if tracked.held or tracked.tried == tracked.request.num_preemptions:
                tracked.stale_at = tracked.request.num_preemptions

    # ---------------------------------------------------------------------------------------------------- lookup

    def on_new_request(self, request: Any) -> None:
        self._mind_weights()
        tracked = self._requests[request.request_id] = Tracked(request, position=self._arrivals)
        self._arrivals += 1
        envelope = hints_of(request)
        if envelope is not None:
            self._desk.open(request.request_id, envelope)
            self._orders.flush()
        if _usable(request):
            self._look_up(tracked)

    def matched(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens beyond `num_computed_tokens` to load, whether the request is parked meanwhile); None: ask again."""
        self._mind_weights()
        if self._shares_what_fills(request, num_computed_tokens):
            return None, False
        tracked = self._requests.get(request.request_id)
        if tracked is not None:
            tracked.own = num_computed_tokens
        if (
            tracked is None
            or not self._may_load
            or not _usable(request)
            or request.skip_reading_prefix_cache
            or tracked.stale
            or tracked.tried == request.num_preemptions
        ):
            return 0, False
        lookup = tracked.lookup
        local, rest = divmod(num_computed_tokens, self._block_tokens)
        assert rest == 0, f"vLLM asks about {num_computed_tokens} tokens, blocks have {self._block_tokens}"
        if lookup is None or lookup.stale or lookup.preemptions != request.num_preemptions:
            lookup = self._look_up(tracked, local)
        lookup.local = local
        blocks = request.num_tokens // self._block_tokens
        if not lookup.done:
            until = min(lookup.deadline, lookup.begun + self._patience_s(request, lookup, blocks - local))
            left_s = until - time.monotonic()
            if left_s > 0:
                self._idle_s = min(self._idle_s, left_s)
                return None, False
            self.tally.add(lookups_late=1)
            self.choice.delayed(lookup.delay, time.monotonic(), self._busy_s)
            tracked.tried = request.num_preemptions  # computed; not asked again in the next step
            self._end_lookup(tracked)
            return 0, False
        self._tell(request, lookup)
        if self._comes_with_another(tracked, lookup, local):
            return None, False
        load = min(lookup.load, blocks)
        computed = min(lookup.hits, blocks) - max(load, local)
        if computed > 0 and not lookup.counted:
            lookup.counted = True
            self.tally.add(computed_tokens=computed * self._block_tokens)
        # At least one token is left to compute: its logits are what the request is for. Of a prompt that is all there
        # it is the last one, whose KV is written again into the last block. That block is the request's own: to vLLM
        # it is full, and others may have it, only with the step that computes that token.
        tokens = min(load * self._block_tokens, request.num_tokens - 1) - local * self._block_tokens
        if tokens <= 0 or tokens < self._settings.load_tokens_min:
            return 0, False
        if request.lora_request is not None and not self._hold(request.lora_request, lookup.adapter):
            tracked.tried = request.num_preemptions  # computed; not asked again in the next step
            return 0, False
        return tokens, not self._settings.layerwise

    def _shares_what_fills(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether vLLM takes blocks for the request's own that are just being loaded within a step, for another one: it
        gives them to all before it knows that they are there, and if they are not, leaves them so until the other one
        has computed them."""
        hashes = request.block_hashes[: num_computed_tokens // self._block_tokens]
        return any(bytes(each) in filling for filling in self._filling.values() for each in hashes)

    def _patience_s(self, request: Any, lookup: Lookup, blocks: int) -> float:
        """How long a request may wait for the store's answer about so many blocks."""
        saves_s = self.choice.saves(blocks * self._block_tokens)
        # Something was found that comes; or without an answer, nothing of the request would be named and saved.
        awaited = lookup.delay.tier is not None or request.lora_request is not None or _promised(request) > 0
        if self.choice.asks_in_vain and not awaited:
            return VAIN_SHARE * saves_s
        return max(ANSWER_MIN_S, saves_s)

    def _comes_with_another(self, tracked: Tracked, lookup: Lookup, local: int) -> bool:
        """Whether another request loads what comes first: once that has ended, vLLM has it for both."""
        if not self._shares or self._settings.layerwise or not local < min(lookup.load, len(lookup.keys)):
            return False
        until = self._arriving.get(lookup.keys[local], 0.0)
        if time.monotonic() >= until:
            return False
        self.tally.add(loads_deferred=not tracked.deferred)
        tracked.deferred = True
        return True

    def _tell(self, request: Any, lookup: Lookup) -> None:
        """Routers, what was found and what was not."""
        if self.events is None or lookup.told:
            return
        lookup.told = True
        self.events.found(request, 0, lookup.keys[: lookup.hits])
        if lookup.lost is not None:
            self.events.lost((lookup.lost,))

    def _look_up(self, tracked: Tracked, local: int | None = None) -> Lookup:
        """`local`: leading blocks that vLLM has itself, when it asks what to load."""
        request, before = tracked.request, tracked.lookup
        self._end_lookup(tracked)
        limit = request.num_tokens // self._block_tokens if self._may_load else 0
        hashes = [bytes(block_hash) for block_hash in request.block_hashes[:limit]]
        lookup = self._at_once(request, hashes, local)
        if lookup is None:
            tracked.looks += 1
            if tracked.looks > LOOKS_MAX:
                hashes = []
            digest = self._digest_of(request.lora_request)
            lookup = self._lookups.start(self._spec, hashes, digest, _key, promised=_promised(request))
        else:
            if before is not None and before.done and before.hits == lookup.hits:
                lookup.told, lookup.counted = before.told, before.counted
            if local is not None and tracked.noted != request.num_preemptions:
                tracked.noted = request.num_preemptions
                assert self._spec is not None
                self._lookups.note(self._spec, lookup)
        tracked.lookup = lookup
        lookup.preemptions = request.num_preemptions
        lookup.delay.busy_s = self._busy_s
        self.tally.add(lookups=before is None or before.fresh_until is None)
        return lookup

    def _at_once(self, request: Any, hashes: list[bytes], local: int | None) -> Lookup | None:
        adapter = self._held(request.lora_request) if request.lora_request is not None else b""
        if self._spec is None or (request.lora_request is not None and not adapter):
            return None
        return self._lookups.at_once(
            self._spec,
            [ChunkKey(_key(adapter, block_hash)) for block_hash in hashes],
            adapter,
            local=local,
            ahead=sum(loading.cold for loading in self._loading.values()),
            waits=not self._settings.layerwise,
            promised=_promised(request),
        )

    def _digest_of(self, lora: Any) -> Callable[[], bytes]:
        """Digest of a request's adapter: as the ranks hold it, else of the files that they would load. Whether they
        did is seen before anything is loaded (`_hold`), and by each rank before it loads or saves."""
        if lora is None:
            return bytes
        if digest := self._held(lora):
            return lambda: digest
        return lambda: adapter_digest(lora)

    def _held(self, lora: Any) -> bytes:
        """Digest of the adapter as all ranks hold it; b"": they do not, or it is not known."""
        ranks = self._known.generations if self._known is not None else ()
        held = {self._adapters.get((rank, lora.lora_int_id)) for rank in ranks}
        known = held.pop() if len(held) == 1 else None
        return known.digest if known and (known.name, known.path) == (lora.lora_name, lora.lora_path) else b""

    def _hold(self, lora: Any, digest: bytes | None) -> bool:
        """Whether all ranks hold the adapter that chunks are named by. The first time they are made to load it, as they
        would with the request's first step."""
        held = self._held(lora)
        if not held:
            assert self._watch is not None
            held, generations = self._watch.adapter(lora)
            if not held or self._known is None or generations != self._known.generations:
                self._watch.moved = True
                return False
            for rank in generations:
                adapter = HeldAdapter(lora.lora_name, lora.lora_path, held)
                self._adapters[rank, lora.lora_int_id] = adapter
        return held == digest

    def _end_lookup(self, tracked: Tracked) -> None:
        if tracked.lookup is not None:
            tracked.lookup.end()
            tracked.lookup = None

    # ---------------------------------------------------------------------------------------------------- a step

    def allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Called when a request got its blocks; of an asynchronous load a second time, with 0, when it is done."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.lookup is None:
            return
        lookup = tracked.lookup
        if num_external_tokens == 0:
            # What it found is settled; which of it is in the store is remembered.
            tracked.saved = max(tracked.saved, lookup.hits)
            lookup.end()
            return
        self.loaded({request.request_id})  # layer by layer: in the step before, if it was preempted since
        first, count = lookup.local, -(-num_external_tokens // self._block_tokens)
        block_ids = blocks.get_block_ids()[0]
        keys = lookup.keys[first : first + count]
        self._loads.append(
            Load(
                request.request_id,
                keys,
                tuple(block_ids[first : first + count]),
                _adapter(request, lookup.adapter),
                lookup.bound_s,
                lookup.wait_s,
            )
        )
        until = time.monotonic() + min(self._settings.load_ms / 1000, lookup.bound_s)
        self._arriving.update(dict.fromkeys(keys, until))
        self._doubtful.difference_update(block_ids[first : first + count])
        tracked.own = (first + count) * self._block_tokens
        tracked.tried = request.num_preemptions
        tracked.saved = max(tracked.saved, lookup.hits)
        if self._settings.layerwise:
            hashes = request.block_hashes[first : first + count]
            self._filling[request.request_id] = frozenset(map(bytes, hashes))
        self._loading[request.request_id] = lookup
        self.tally.add(hit_tokens=num_external_tokens)

    def fail(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """After an error in `allocated`: vLLM waits for a load, so it is told that the load has failed."""
        self.drop(request.request_id)
        self._loads = [load for load in self._loads if load.request != request.request_id]
        if num_external_tokens:
            self._loads.append(Load(request.request_id, (), tuple(blocks.get_block_ids()[0])))

    @property
    def _busy_s(self) -> float:
        return self._steps.busy_s if self._steps is not None else 0.0

    def step_without(self) -> StepMetadata:
        """After an error in `step`: what vLLM has scheduled is not known to us, so nothing is saved, now or later, of
        the requests that it has. Loads go on."""
        for name in list(self._requests):
            self.drop(name)
        metadata = self._building
        if metadata is None:
            metadata = StepMetadata(loads=self._loads, spec=self._spec_to_send)
            self._loads, self._spec_to_send = [], None
        metadata.saves.clear()
        self._filling.clear()
        metadata.weights = self._known.generations if self._known is not None else None
        return metadata

    def step(self, output: Any) -> StepMetadata:
        self._mind_weights()
        self._stepped = True
        metadata = self._building = StepMetadata(
            loads=self._loads,
            spec=self._spec_to_send,
            weights=self._known.generations if self._known is not None else None,
            begun=(
                *(new.req_id for new in output.scheduled_new_reqs),
                *output.scheduled_cached_reqs.resumed_req_ids,
            ),
        )
        self._loads, self._spec_to_send = [], None
        metadata.recalled, self._recalled = frozenset(self._recalled), set()
        if self._settings.layerwise:
            # Loaded in the step before; the ranks hold leases of their own.
            loading = {load.request for load in metadata.loads}
            self.loaded({name for name in self._loading if name not in loading})
        computed: dict[str, int] = {}
        metadata.written = set()
        for new in output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            metadata.written.update(new.block_ids[0])
            tracked = self._requests.get(new.req_id)
            if tracked is not None:
                if tracked.lookup is not None:
                    self.choice.delayed(tracked.lookup.delay, time.monotonic(), self._busy_s)
                metadata.fresh.update(self._begin(tracked, list(new.block_ids[0]), new.num_computed_tokens))
        cached = output.scheduled_cached_reqs
        for number, name in enumerate(cached.req_ids):
            computed[name] = cached.num_computed_tokens[number]
            tracked = self._requests.get(name)
            given = cached.new_block_ids[number]
            metadata.written.update(given[0] if given is not None else ())
            if tracked is None:
                continue
            fresh = list(given[0]) if given is not None else []
            if name in cached.resumed_req_ids:
                fresh = self._begin(tracked, fresh, computed[name])
                tracked.stale_at = -1  # after a load that failed it has no preemption more
            else:
                tracked.blocks += fresh
            metadata.fresh.update(fresh)
        self._doubtful -= metadata.fresh
        for name, count in output.num_scheduled_tokens.items():
            tracked = self._requests.get(name)
            if tracked is not None:
                self._save(metadata, tracked, computed[name], count)
        self._given.append([key for save in metadata.saves for key in save.keys])
        if not self._settings.layerwise:
            metadata.fresh.clear()
        else:
            metadata.fresh.update(block for load in metadata.loads for block in load.blocks)
        if self._steps is not None:
            self._steps.scheduled(output.num_scheduled_tokens, time.monotonic())
        metadata.idle = not output.num_scheduled_tokens
        if metadata.idle:
            self._lookups.await_answer(self._idle_s)
        self._idle_s = IDLE_S
        now = time.monotonic()
        for tracked in self._requests.values():
            if self._settings.save_what_others_load:
                tracked.own = None
            lookup = tracked.lookup
            if lookup is not None and lookup.done and now > lookup.held_until:
                lookup.end()
            if not tracked.begun:
                self._hint(tracked, now)
        self._board.flush()
        self._orders.flush()
        self._filling.clear()
        self._building = None
        return metadata

    def step_ended(self) -> None:
        if self._steps is not None:
            self._steps.ended(time.monotonic())

    def _hint(self, tracked: Tracked, now: float) -> None:
        """The daemon is told of a request that waits for long, and again before it forgets that."""
        lookup = tracked.lookup
        due = tracked.hinted + HINT_AGAIN_S if tracked.hinted else tracked.arrived + HINT_AFTER_S
        if now < due or lookup is None or not lookup.done or not lookup.keys or not self._may_load:
            return
        if self._board.add(tracked.request.request_id, tracked.position, lookup.keys):
            tracked.hinted = now

    def _waits_no_more(self, tracked: Tracked) -> None:
        if tracked.hinted:
            tracked.hinted = 0.0
            self._board.remove(tracked.request.request_id)

    def _begin(self, tracked: Tracked, blocks: list[int], computed: int) -> list[int]:
        """A request that is scheduled, for the first time or again, with these blocks; returns those still to be
        computed. Between `own` and those, another connector has loaded. With `save_what_others_load` a request that
        was parked for that has `own` no more: vLLM knows by now what failed."""
        tracked.blocks, tracked.given = blocks, tracked.request.num_preemptions
        tracked.begun = True
        self._waits_no_more(tracked)
        begun = computed // self._block_tokens
        if tracked.own is not None:
            self._doubtful.update(blocks[tracked.own // self._block_tokens : begun])
        return blocks[begun:]

    def _save(self, metadata: StepMetadata, tracked: Tracked, computed: int, count: int) -> None:
        """Adds the blocks of a request that are full after this step."""
        request = tracked.request
        kept = -(-computed // self._block_tokens)
        if tracked.saved > kept:
            # Computed again, after a load that failed or a preemption; not one that was loaded but for its last token.
            metadata.fresh.update(tracked.blocks[kept : tracked.saved])
            tracked.saved = kept
        if not self._may_save or self._spec is None or tracked.stale or not _usable(request):
            return
        if self._settings.layerwise and metadata.loads and len(self._ranks) > 1:
            # Where a load fails on one rank in this step, all compute on what was not there, and the others do not
            # know: they would save it, once and for good. After the step vLLM knows; what is right then comes with the
            # next one.
            return
        full = min(len(request.block_hashes), (computed + count) // self._block_tokens, len(tracked.blocks))
        if full <= tracked.saved or not self._doubtful.isdisjoint(tracked.blocks[:full]):
            return
        adapter = self._adapter(tracked)
        if adapter is None:
            return
        for block_hash in request.block_hashes[len(tracked.keys) : full]:
            tracked.keys.append(ChunkKey(_key(adapter, bytes(block_hash))))
        first = tracked.saved
        metadata.saves.append(
            Save(
                request.request_id,
                parent=tracked.keys[first - 1] if first else ROOT,
                keys=tuple(tracked.keys[first:full]),
                blocks=tuple(tracked.blocks[first:full]),
                before=tuple(tracked.blocks[:first]) if self._settings.layerwise else (),
                adapter=_adapter(request, adapter),
            )
        )
        if self.events is not None:
            self.events.saving(request, first, tracked.keys[first:full])
        tracked.saved = full

    def _adapter(self, tracked: Tracked) -> bytes | None:
        if tracked.request.lora_request is None:
            return b""
        return tracked.lookup.adapter if tracked.lookup is not None and tracked.lookup.done else None

    # ------------------------------------------------------------------------------------------------------- end

    def loaded(self, requests: set[str]) -> None:
        """All ranks have reported; their pins are their own."""
        for name in requests:
            if (lookup := self._loading.pop(name, None)) is not None:
                for key in lookup.keys[lookup.local : lookup.load]:
                    self._arriving.pop(key, None)
                lookup.end()

    def failed(self, blocks: set[int]) -> None:
        """Blocks that were to be loaded and are not there. Those that are loaded within a step are in vLLM's own cache
        already, with those that the step has computed behind them. vLLM leaves them there until their request has
        computed them anew: if it is aborted or preempted before, for good."""
        if not blocks:
            return
        behind, unknown = set(blocks), set(blocks)
        for tracked in self._requests.values():
            held = tracked.held
            first = next((n for n, block in enumerate(held) if block in blocks), None)
            if first is not None:
                behind.update(held[first:])
                unknown.difference_update(held)
        if unknown and self._settings.layerwise:
            behind.update(range(self._blocks))  # of a request that was dropped, or aborted during the step
        self.forget_blocks(behind)

    def reported(self, report: RankReport) -> None:
        """What became of chunks, and what the ranks hold, as they say."""
        self._adapters.update(report.adapters)
        if self._known is not None and self._watch is not None:
            known = self._known.generations
            if any(known.get(rank) != now for rank, now in report.generations.items()):
                # That rank has saved nothing of it. The others did not know, but have added up what it computed.
                self._watch.moved = True
                self._recalled.update(key for keys in self._given for key in keys)
        self.choice.reads_from_ssd(report.ssd_bytes_per_s)
        if self._spec is not None:
            for blocks, seconds in report.loads:
                self.choice.copy.observe(blocks * self._spec.chunk_bytes, seconds)
        if self.events is None or self._spec is None:
            return
        for change in report.changes:
            if change.spec != self._spec:
                continue  # of before a reset
            if change.shard is None:
                self.events.lost(change.keys)
            else:
                self.events.saved(change.keys, change.shard, self._spec.shard_count)

    def finished(self, request: Any) -> dict[str, Any] | None:
        """Also of aborted requests. A load under way ends by itself; vLLM keeps its blocks until it is reported.

        Returns what a router hands on to the engine that decodes, if it said that there is one: how many blocks are in
        the store or about to be."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is not None:
            self._waits_no_more(tracked)
            self._tell_used(tracked)
            self._end_lookup(tracked)
        self.loaded({request.request_id})
        if tracked is None or not tracked.saved or not _handed(request).get("do_remote_decode"):
            return None
        return {PROMISED: tracked.saved}

    def _tell_used(self, tracked: Tracked) -> None:
        """What the lookup found was a use when it was found, and what was saved when it was saved."""
        request = tracked.request
        chain: list[ChunkKey] = []
        adapter = self._adapter(tracked)
        known = self._spec is not None and adapter is not None and _usable(request)
        if tracked.begun and not tracked.stale and known:
            computed = min(len(request.block_hashes), request.num_computed_tokens // self._block_tokens)
            chain = tracked.keys[:computed]
            for block_hash in request.block_hashes[len(chain) : computed]:
                chain.append(ChunkKey(_key(adapter or b"", bytes(block_hash))))
        self._orders.touch(chain[tracked.saved :])
        self._desk.close(request.request_id, session_of(request), chain)
        self._orders.flush()

    def close(self) -> None:
        for tracked in self._requests.values():
            self._end_lookup(tracked)
        self._lookups.close()
        if not self._tellers.close(CLOSE_S):
            log.warning("a thread still tells the daemon something; it ends with its deadline")
        self._link.close()


def _usable(request: Any) -> bool:
    """Prompts of embeddings have no tokens to name their KV by; sessions that are fed as they go change theirs."""
    return request.prompt_embeds is None and not getattr(request, "resumable", False)


def _promised(request: Any) -> int:
    """Leading blocks that the engine which computed the prompt is about to save, as a router handed it on."""
    told = _handed(request).get(PROMISED, 0)
    return told if isinstance(told, int) else 0


def _handed(request: Any) -> Mapping[str, Any]:
    """What came with the request, from whoever sent it."""
    given = request.kv_transfer_params
    return given if isinstance(given, Mapping) else {}


def _adapter(request: Any, digest: bytes | None) -> Adapter | None:
    if request.lora_request is None:
        return None
    return Adapter(request.lora_request.lora_int_id, digest or b"")


def _key(adapter: bytes, block_hash: bytes) -> bytes:
    return adapted_key(adapter, block_hash) if adapter else block_hash
