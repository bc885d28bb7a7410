"""How long vLLM's steps take, by the prompt tokens that they compute: its prefill speed, as it is now."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from kvstore.gpu_worker.compute_or_load import Line

DECODED_MAX = 16
"""A request with more tokens than that in a step has its prompt computed: decoding, also with drafts, has fewer."""
OPEN_MAX = 64
"""Steps that vLLM has begun and not ended; it has a few at most."""


class Steps:
    """For the scheduler's thread. vLLM may schedule a step before the one before has ended: a step is taken to last
    from then on."""

    def __init__(self, compute: Line) -> None:
        self._compute = compute
        self._open: deque[tuple[int, bool, float]] = deque(maxlen=OPEN_MAX)
        self._ended_at = 0.0
        self.busy_s = 0.0
        """Of steps that computed anything."""

    def scheduled(self, tokens: Mapping[str, int], now: float) -> None:
        """`tokens`: of each request in the step."""
        prefill = sum(count for count in tokens.values() if count > DECODED_MAX)
        self._open.append((prefill, bool(tokens), now))

    def ended(self, now: float) -> None:
        """The oldest step has ended."""
        if not self._open:
            return
        tokens, computes, begun = self._open.popleft()
        seconds = now - max(begun, self._ended_at)
        if computes:
            self.busy_s += seconds
        if tokens:
            self._compute.observe(tokens, seconds)
        self._ended_at = now
