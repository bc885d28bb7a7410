"""How much of attention each token of a conversation gets: what decides which old tokens stay when it is cut.

AttentionStore (arXiv 2403.19708), section 3.4, keeps what matters of a cut conversation; which tokens do is told by the
attention that they got (H2O, arXiv 2306.14048), and the last tokens of a prompt tell it well enough (SnapKV, arXiv
2404.14469). So it is looked at once a prompt, in each layer: the last `OBSERVED` tokens' queries against all keys that
they see, summed over queries and heads. That costs as much as attention of so few tokens, and nothing while decoding.

What was recorded is kept in this process, by the tokens up to a chunk's end; a worker that does not know it cuts as if
nothing old mattered, until it has computed a prompt of that conversation. What was chosen is kept in the store
(`choices.py`).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from kvstore.gpu_worker.positions import Positions
    from kvstore.kernels.stretches import Stretch

OBSERVED = 16
"""Queries at the end of a prompt that are looked at."""
KEPT_SHARE = 0.5
"""Of a token's mass, what is left of it with each prompt that is looked at later: the recent counts more."""
BYTES_MAX = 64 << 20
"""Of all that is remembered; the oldest goes."""

Masses = npt.NDArray[np.float32]


@dataclass(slots=True)
class Observation:
    """Of one request, in one forward call."""

    lines: torch.Tensor
    """[observed] int64: which of the call's queries are looked at, ..."""
    numbers: torch.Tensor
    """[observed] int64: ... and the numbers of their tokens among the request's own."""
    chunks: torch.Tensor
    """[own chunks] int64 of the pool."""
    tokens: int
    """Own ones whose keys are there."""
    stretches: Sequence[Stretch] = ()
    """What all of these queries see beside them."""
    own: torch.Tensor | None = None
    """[tokens] float32: the mass of each own token, over all layers so far; ..."""
    seen: torch.Tensor | None = None
    """... and of each token of the stretches, one after the other."""
    _where: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = field(default=None, repr=False)

    def look(
        self, layer: int, q: torch.Tensor, keys: torch.Tensor, scale: float, positions: Positions | None
    ) -> None:
        """`q` [tokens, heads, head_dim] of the call, `keys` [chunks, kv_heads, chunk_tokens, head_dim] of the pool."""
        heads, size = keys.shape[1], keys.shape[2]
        asked = q.index_select(0, self.lines).float()
        # [kv_heads, group x observed, head_dim]: heads of a group stand side by side
        asked = asked.unflatten(1, (heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        count = len(self.lines)
        mine = keys.index_select(0, self.chunks).transpose(0, 1).flatten(1, 2)[:, : self.tokens].float()
        logits = (asked @ mine.transpose(1, 2)).unflatten(1, (-1, count)) * scale
        later = torch.arange(self.tokens, device=q.device) > self.numbers[:, None]
        logits = logits.masked_fill(later, float("-inf"))
        if self.stretches:
            chunks, places, deltas = self._places(q.device, size)
            others = keys[chunks, :, places].transpose(0, 1).float()
            if positions is not None and len(positions.inv_freq[layer]):
                others = _moved(
                    others, deltas, positions.inv_freq[layer].to(q.device), interleaved=positions.interleaved
                )
            beside = (asked @ others.transpose(1, 2)).unflatten(1, (-1, count)) * scale
            logits = torch.cat([logits, beside], dim=-1)
        mass = logits.softmax(-1).sum((0, 1, 2))
        own, seen = mass[: self.tokens], mass[self.tokens :]
        self.own = own if self.own is None else self.own + own
        self.seen = seen if self.seen is None else self.seen + seen

    def _places(self, device: torch.device, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of each token of the stretches: its chunk, its place there, and how far its key is moved."""
        if self._where is None:
            chunks: list[int] = []
            places: list[int] = []
            deltas: list[int] = []
            for one in self.stretches:
                chunks += [one.chunk] * one.tokens
                places += range(one.first, one.first + one.tokens)
                deltas += [one.delta] * one.tokens
            assert not places or max(places) < size, self.stretches
            self._where = (
                torch.tensor(chunks, device=device),
                torch.tensor(places, device=device),
                torch.tensor(deltas, device=device),
            )
        return self._where


def _moved(
    keys: torch.Tensor, deltas: torch.Tensor, inv_freq: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    """`keys` [.., tokens, head_dim] in float32, each as if it stood `deltas` positions later."""
    angles = deltas[:, None].float() * inv_freq.float()
    cos, sin = angles.cos(), angles.sin()
    pairs = len(inv_freq)
    turned = keys.clone()
    first = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    a, b = keys[..., first], keys[..., second]
    turned[..., first], turned[..., second] = a * cos - b * sin, b * cos + a * sin
    return turned


class MassBook:
    """What was recorded, by the tokens of a conversation up to a chunk's end."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._known: OrderedDict[bytes, Masses] = OrderedDict()
        self._bytes = 0

    def __repr__(self) -> str:
        return f"MassBook({len(self._known)} conversations, {self._bytes} bytes)"

    def find(self, tokens: Sequence[int], root: bytes = b"") -> Masses | None:
        """Of the longest beginning of `tokens` of which it is known."""
        for name in reversed(list(self._names(tokens, root))):
            if name in self._known:
                self._known.move_to_end(name)
                return self._known[name]
        return None

    def record(self, tokens: Sequence[int], masses: Masses, root: bytes = b"") -> None:
        """`masses`: what the last tokens of `tokens` attended to, of each of them; 0 for what they do not see."""
        names = list(self._names(tokens, root))
        if not names:
            return
        total = masses.astype(np.float32)
        before = self.find(tokens, root)
        if before is not None:
            total[: len(before)] += KEPT_SHARE * before[: len(total)]
        self._bytes += total.nbytes - (self._known[names[-1]].nbytes if names[-1] in self._known else 0)
        self._known[names[-1]] = total
        self._known.move_to_end(names[-1])
        while self._bytes > BYTES_MAX and len(self._known) > 1:
            self._bytes -= self._known.popitem(last=False)[1].nbytes

    def _names(self, tokens: Sequence[int], root: bytes) -> Iterator[bytes]:
        """Of what ends at each chunk's end."""
        state = hashlib.blake2b(root, digest_size=32, person=b"kvs.masses.v1")
        for end in range(self._chunk_tokens, len(tokens) + 1, self._chunk_tokens):
            state.update(np.asarray(tokens[end - self._chunk_tokens : end], "<i8").tobytes())
            yield state.copy().digest()
