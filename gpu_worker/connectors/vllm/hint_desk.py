"""Where requests' `kv_hints` are taken and answered, for the connector and the tier alike. All on the engine's thread;
what is to be told goes to `Orders`.

An action is counted once, by its last answer: ours, when there is nothing to tell, else the daemon's.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from typing import Any

from kvstore.gpu_worker.connectors.offload import Chains, Counts, Order, Orders
from kvstore.gpu_worker.connectors.vllm.kv_hints import DAEMON_SAID, Answer, Answered, answer_hints
from kvstore.types import KEYS_PER_REQUEST_MAX, ChunkKey, HintResult

log = logging.getLogger(__name__)


class HintDesk:
    def __init__(self, orders: Orders, tally: Counts, groups: Sequence[int]) -> None:
        """`groups`: see `answer_hints`."""
        self._orders = orders
        self._tally = tally
        self._groups = groups
        self._chains = Chains()
        self._own: dict[str, list[Answered]] = {}
        """By request: what is ordered about its own chunks."""

    def __len__(self) -> int:
        """Requests that have something to order when they end."""
        return len(self._own)

    def open(self, request: str, envelope: Any) -> None:
        """A request came with hints."""
        for answered in answer_hints(envelope, self._groups, self._chains.get):
            if answered.cancels:
                self._orders.cancel(answered.cancels)
            if answered.kind is None:
                self._answer(answered.action, answered.answer, answered.why)
            elif answered.own:
                log.info("kv_hints: %s deferred: %s", answered.action, answered.why)
                self._own.setdefault(request, []).append(answered)
            else:
                self._order(answered, answered.keys)

    def close(self, request: str, session: str, chain: Sequence[ChunkKey]) -> None:
        """A request has ended; what it used, in chain order (nothing: it was never computed)."""
        if session and chain:
            self._chains.put(session, tuple(chain))
        for answered in self._own.pop(request, ()):
            if chain:
                self._order(answered, chain)
            else:
                self._answer(answered.action, Answer.REJECTED, "the request has no whole chunk")

    def clear(self) -> None:
        """What keys stand for is not what it was."""
        self._chains.clear()
        self._orders.clear()

    def _order(self, answered: Answered, keys: Sequence[ChunkKey]) -> None:
        assert answered.kind is not None, answered
        name = answered.name or secrets.token_hex(8)
        clipped = answered.answer is Answer.CLIPPED or len(keys) > KEYS_PER_REQUEST_MAX
        few = tuple(keys[:KEYS_PER_REQUEST_MAX])
        order = Order(name, answered.kind, few, answered.ttl_ms, answered.eta_ms)

        def told(result: HintResult, chunks: int) -> None:
            answer = DAEMON_SAID[result]
            if clipped and answer is not Answer.REJECTED:
                answer = Answer.CLIPPED
            self._answer(answered.action, answer, f"{chunks} of {len(keys)} chunks are there")

        if not self._orders.add(order, told):
            self._answer(answered.action, Answer.REJECTED, "too many wait to be told")

    def _answer(self, action: str, answer: Answer, why: str) -> None:
        self._tally.add(**{f"actions_{answer.value}": 1})
        log.info("kv_hints: %s %s: %s", action, answer.value, why)


def session_of(request: Any) -> str:
    """Of vLLM's request, or of what a tier is told of it; "": none."""
    session = getattr(request, "session_id", None)
    if not session:
        session = (getattr(request, "kv_transfer_params", None) or {}).get("session_id")
    return session if isinstance(session, str) else ""
