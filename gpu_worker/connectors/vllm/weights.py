"""The scheduler's side of the identity: what the ranks hold, asked when it may have changed.

Everything that vLLM does to its ranks goes through `collective_rpc` of its executor, which is in the scheduler's
process: `reload_weights`, weight transfer, `sleep` and `wake_up`, methods of extensions, functions of users. `Watch`
stands in between. A call that is not known to leave the weights alone (INERT) makes them unknown; before the next
request or step the ranks are asked for digests of all they hold (`held.rank_weights`). Equal digests are the same
weights: a model that slept and was loaded again finds its KV. While weights are asleep or in the middle of an update
nothing is named, so everything is computed.

What is changed without a call, by a program that reaches into the model, the ranks find themselves (`held.Held.check`).
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from kvstore.gpu_worker.connectors.vllm.held import (
    RankAdapter,
    RankWeights,
    rank_adapter,
    rank_generation,
    rank_weights,
)
from kvstore.gpu_worker.identity import absorb

INERT = frozenset(
    {
        *(
            "execute_model",
            "sample_tokens",
            "execute_dummy_batch",
            "take_draft_token_ids",
            "synchronize_device",
        ),
        *("profile", "check_health", "get_supported_tasks", "supports_draft_weight_updates", "shutdown"),
        *("initialize_from_config", "compile_or_warm_up_model", "determine_available_memory"),
        *(
            "get_kv_cache_spec",
            "get_supported_kv_cache_layouts",
            "set_kv_cache_layout",
            "get_model_inspection",
        ),
        *("get_kv_connector_handshake_metadata", "reset_mm_cache", "reset_encoder_cache"),
        *("save_sharded_state", "save_tensorized_model", "compute_weight_checksums"),
        *("init_weight_transfer_engine", "shutdown_weight_transfer_engine", "get_encoder_timing_stats"),
        # Adapters are no weights of the model; each rank watches what it loads.
        *("add_lora", "remove_lora", "pin_lora", "list_loras"),
    }
)
"""Methods of vLLM's workers that leave the model's weights as they are. Any other may change them."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Known:
    """What all ranks hold. `digest`: 32 bytes."""

    digest: bytes
    generations: dict[int, int]
    """By rank."""
    scales: bytes = b""
    """Digest of the factors by which their KV is quantised: 16 bytes; b"": not known."""


class Watch:
    """Of one executor. For the thread that runs the scheduler."""

    def __init__(self, executor: Any, *, name: str = "") -> None:
        """`name`: what the user calls the weights, for those that the ranks cannot tell. Only as long as nothing
        changes: then they are known to this engine alone."""
        self._name = name
        self._named: list[RankWeights] = []
        self._owner = secrets.token_bytes(16)
        self._changes = 0
        """Since the user's name was true."""
        self._call = executor.collective_rpc
        executor.collective_rpc = self._forward
        self.moved = True
        """The ranks must be asked before anything is named."""
        self.uncalled = 0
        """How often `poll` has found that something changed without a call, since nobody knows when ..."""
        self.verified_at = 0.0
        """... after that (time.monotonic): when all ranks were last seen to hold what they are named for."""
        self._anew = True
        self._asleep = False
        self._complaint = ""

    def _forward(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        inert = isinstance(method, str) and method in INERT
        if not inert:
            _, places, given = (*args, None, None, None)[:3]
            self._note(method, kwargs.get("args") or places or (), kwargs.get("kwargs") or given or {})
        try:
            return self._call(method, *args, **kwargs)
        finally:
            # Also when it fails: a part may have been done.
            if not inert:
                self.moved = self._anew = True

    def _note(self, method: Any, places: Sequence[Any], given: dict[str, Any]) -> None:
        self.moved = self._anew = True
        tags = given.get("tags", places[0] if places else None)
        if method in ("sleep", "suspend") or (method == "discard" and "weights" in (tags or ())):
            self._asleep = True
        elif method == "wake_up" and (tags is None or "weights" in tags):
            self._asleep = False

    @property
    def readable(self) -> bool:
        """Whether there is something to ask for."""
        return self.moved and not self._asleep

    def ask(self) -> Known | None:
        """What the ranks hold; None: that cannot be known, and nothing may be named. Waits for the ranks, for as long
        as they need to read their weights if those may have changed."""
        if self._asleep:
            return None
        anew, self.moved, self._anew = self._anew, False, False
        begun = time.monotonic()
        ranks = self._ranks(rank_weights, anew)
        if ranks is None:
            return None
        ranks.sort(key=lambda rank: rank.rank)
        state = hashlib.blake2b(digest_size=32, person=b"kvs.vllm.ranks")
        for rank in ranks:
            absorb(state, rank.digest)
            if not rank.digest and not self._name:
                self._complain(f"the weights of rank {rank.rank} are not known: {rank.reason}")
                return None
        if not all(rank.digest for rank in ranks):
            self._changes += bool(self._named and ranks != self._named)
            self._named = ranks
            absorb(
                state, self._name.encode(), self._owner if self._changes else b"", str(self._changes).encode()
            )
        self._complaint = ""
        if anew:
            log.info("weights %s, read in %.1f s", state.hexdigest()[:16], time.monotonic() - begun)
        scales = b"".join(rank.scales for rank in ranks)
        if scales:
            scales = hashlib.blake2b(scales, digest_size=16, person=b"kvs.vllm.scales").digest()
        return Known(state.digest(), {rank.rank: rank.generation for rank in ranks}, scales)

    def poll(self, known: Known) -> None:
        """Asks the ranks whether something changed without a call; then it has `moved`."""
        began = time.monotonic()
        ranks = None if self._asleep else self._ranks(rank_generation)
        if ranks is None:
            return
        if {rank.rank: rank.generation for rank in ranks} != known.generations:
            self.uncalled += not self.moved
            self.moved = True
        else:
            self.verified_at = began - max(rank.unverified_s for rank in ranks)

    def each(self, function: Callable[[Any], Any]) -> list[Any]:
        """What all ranks answer to a function that leaves their weights alone."""
        return list(self._call(function))

    def adapter(self, request: Any) -> tuple[bytes, dict[int, int]]:
        """Has the ranks hold the request's adapter. Its digest, b"" if it is not known or not the same everywhere, and
        the ranks' generations."""
        try:
            told: list[RankAdapter] = self._call(rank_adapter, args=(request,))
        except Exception as error:
            # vLLM says it to whoever asked for the adapter, with the request's first step.
            log.warning("adapter %s cannot be loaded: %s", request.lora_name, error)
            return b"", {}
        digests = {rank.digest for rank in told}
        return digests.pop() if len(digests) == 1 else b"", {rank.rank: rank.generation for rank in told}

    def _ranks(self, function: Any, *args: Any) -> list[RankWeights] | None:
        try:
            ranks: list[RankWeights] = self._call(function, args=args)
        except Exception as error:
            # Whatever is wrong with the engine, it hears of it without us.
            self._complain(f"the ranks do not say what they hold: {error!r}")
            return None
        return ranks

    def _complain(self, why: str) -> None:
        if why != self._complaint:
            log.warning("working without the store: %s", why)
        self._complaint = why


def executor_under_construction() -> Any:
    """Of the engine whose scheduler is just being made; None: vLLM has changed. vLLM makes connectors and tiers in the
    constructor of its scheduler, that in the constructor of the engine, which has an executor by then."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        executor = getattr(frame.f_locals.get("self"), "model_executor", None)
        if callable(getattr(executor, "collective_rpc", None)):
            return executor
        frame = frame.f_back
    return None
