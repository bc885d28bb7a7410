"""Which tokens of a conversation that outgrew the model's window are kept, and what KV there is of them.

AttentionStore (arXiv 2403.19708), section 3.4: what is left is not computed again; its stored keys are moved. Here the
beginning (template and system message) stays, and whole turns behind it go:

    history     head | turns that are cut | turns that stay, chunks of older chains | the rest, computed anew
    positions   0 .. head                   head ....................... P            P .....

What is left still carries, from the second layer on, what the cut text said to it: this is attention with the cut text
masked, not a computation of what remains. A base model has no head that could stay; then the first tokens of what
remains are computed anew, as if the text began with them, since a model needs something at its beginning (attention
sinks, arXiv 2309.17453).

All of it follows from the tokens, the turns and the settings, so that a worker that knows nothing of the conversation
finds the same cuts, the same keys, and what was saved under them. Each cut makes a new chain (`chain.py`); what is kept
of the old ones ends at a full chunk, since tails are nobody else's.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.gpu_worker.chain import Chain, Jump, Seen
from kvstore.keys import ROOT
from kvstore.types import ChunkKey

VERSION = 1
"""Of the method: what it makes of the same tokens."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """Settings. Shares are of `window`, the tokens that a request may attend to, its answer included."""

    window: int
    prompt_share: float = 0.75
    """A prompt that is longer is cut: the rest is for the answer ..."""
    kept_share: float = 0.5
    """... to no more than that."""
    head_tokens: int | None = None
    """So many of the first tokens stay: attention sinks, or a beginning up to which a middle is cut. None: the template
    and system message of a chat, nothing of any other text."""
    recompute_share: float = 0.0
    """Of what is kept, so much is computed anew, right behind the head. Where there is no head, one chunk at least."""
    keep_positions: bool = False
    """What stays, stays where it stood, and a gap is left, as far as the model's positions go."""
    positions_max: int = 0
    """With `keep_positions`: how many positions the model has."""

    def __post_init__(self) -> None:
        for name in ("prompt_share", "kept_share"):
            if not 0 < (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} is {value}: must be above 0 and below 1")
        if self.kept_share >= self.prompt_share:
            raise ValueError(
                f"kept_share is {self.kept_share}: must be below prompt_share ({self.prompt_share})"
            )
        if not 0 <= self.recompute_share <= 1:
            raise ValueError(f"recompute_share is {self.recompute_share}: must be between 0 and 1")
        if self.head_tokens is not None and not 0 <= self.head_tokens < self.kept_tokens:
            raise ValueError(
                f"head_tokens is {self.head_tokens}: must be below the {self.kept_tokens} tokens that are kept"
            )
        if self.keep_positions and self.positions_max < self.window:
            raise ValueError(
                f"positions_max is {self.positions_max}: must be at least window ({self.window})"
            )

    @property
    def prompt_tokens(self) -> int:
        return int(self.window * self.prompt_share)

    @property
    def kept_tokens(self) -> int:
        return int(self.window * self.kept_share)


@dataclass(frozen=True, slots=True)
class Turns:
    """Of a chat: how many tokens come before its first turn, where turns begin, and where prompts ended, the last of
    which is the whole."""

    head: int = 0
    begins: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class View:
    """What a request computes and sees of a conversation."""

    chain: Chain
    """Its own tokens, from the first to the last of the prompt."""
    remaining: tuple[int, ...] = field(repr=False)
    """All that is kept, as a text of its own: what is computed where the KV cannot be had."""
    cuts: int = 0
    cut_tokens: int = 0

    @property
    def attended(self) -> int:
        return len(self.remaining)


def view(
    tokens: Sequence[int],
    settings: Truncation,
    turns: Turns | None = None,
    *,
    chunk_tokens: int,
    root: ChunkKey = ROOT,
) -> View:
    """What is left of the prompt `tokens`. Without `turns` any chunk's end is the end of a prompt and of a turn."""
    return _Conversation(tuple(tokens), settings, turns, chunk_tokens, root).view()


class _Conversation:
    def __init__(
        self,
        tokens: tuple[int, ...],
        settings: Truncation,
        turns: Turns | None,
        size: int,
        root: ChunkKey,
    ) -> None:
        self.tokens, self.settings, self.size, self.root = tokens, settings, size, root
        grid = tuple(range(size, len(tokens) + 1, size))
        self.begins = turns.begins if turns is not None else grid
        ends = turns.ends if turns is not None else grid
        self.ends = [*(end for end in ends if end < len(tokens)), len(tokens)]
        head = settings.head_tokens
        self.head = min(
            head if head is not None else turns.head if turns is not None else 0, settings.kept_tokens
        )
        self.cut = self.head
        """History [head, cut) is gone."""
        self.from_ = 0
        """History from here on is the chain's own, behind `prefix` tokens that are computed anew."""
        self.prefix = 0
        self.jumps: tuple[Jump, ...] = ((0, 0),)
        self.seen: tuple[Seen, ...] = ()
        self.method = b""
        self.cuts = 0
        self.head_chain: Chain | None = None
        """Which has the KV of all of the head."""
        self.pieces: list[tuple[int, int, Chain, int]] = []
        """(history from, to, chain, its number there) of what older chains computed and is still kept."""

    def view(self) -> View:
        for number, end in enumerate(self.ends):
            if self._length(end) > self.settings.prompt_tokens:
                self._cut(end, self.ends[number - 1] if number else 0)
        return View(
            self._chain(len(self.tokens)),
            self.tokens[: self.head] + self.tokens[self.cut :],
            self.cuts,
            self.cut - self.head,
        )

    def _length(self, end: int) -> int:
        return self.head + end - self.cut

    def _chain(self, end: int) -> Chain:
        kept = (self.tokens[: self.head] + self.tokens[self.cut :])[: self.prefix]
        return Chain(kept + self.tokens[self.from_ : end], self.root, self.jumps, self.seen, self.method)

    def _cut(self, end: int, before: int) -> None:
        """At a prompt that ends there, where the prompt before ended at `before`."""
        settings, size = self.settings, self.size
        # The turn that is new was not computed; where no turn begins, neither was what came after the last prompt
        place = bisect_right(self.begins, end - 1) - 1
        current = self.begins[place] if place >= 0 and self.begins[place] > before else before
        wanted = end - (settings.kept_tokens - self.head)
        place = bisect_left(self.begins, wanted)
        cut = (
            self.begins[place]
            if place < len(self.begins) and self.begins[place] <= max(current, wanted)
            else wanted
        )
        cut = max(cut, self.cut, self.head)
        own = (self.prefix + max(0, current - self.from_)) // size * size
        until = self.from_ + max(0, own - self.prefix)  # in whole chunks
        old = self._chain(until)
        pieces = [*self.pieces, (self.from_, until, old, self.prefix)]

        anew = int(settings.recompute_share * (end - cut))
        if not self.head:
            anew = max(anew, size)
        prefix = -(-(self.head + anew) // size) * size if anew else self.head // size * size
        prefix = min(prefix, (self.head + end - 1 - cut) // size * size)
        kept_from = cut + max(0, prefix - self.head)
        self.cuts += 1
        self.cut = cut
        gap = cut - self.head
        if not anew and self._fits(end):
            gap = 0
        if self.head_chain is None and own >= self.head:
            self.head_chain = old
        if until <= kept_from or (prefix < self.head and self.head_chain is None):
            # No KV of what is kept: an ordinary prompt again
            self.prefix, self.from_, self.pieces, self.seen, self.method = self.head, cut, [], (), b""
            self.jumps = ((0, 0), (self.head, cut - gap)) if cut - gap != self.head else ((0, 0),)
            self.head_chain = None
            return
        self.pieces = [
            (max(low, kept_from), min(high, until), chain, number + max(low, kept_from) - low)
            for low, high, chain, number in pieces
            if max(low, kept_from) < min(high, until)
        ]
        seen = [
            Seen(chain, number, number + high - low, low - gap, prefix)
            for low, high, chain, number in self.pieces
        ]
        if prefix < self.head and self.head_chain is not None:
            seen.insert(0, Seen(self.head_chain, prefix, self.head, prefix, prefix))
        self.prefix, self.from_, self.seen = prefix, until, tuple(seen)
        self.jumps = ((0, 0), (prefix, until - gap)) if prefix else ((0, until - gap),)
        self.method = b"truncation %d" % VERSION

    def _fits(self, end: int) -> bool:
        """Whether positions may stay, with a gap, for this prompt, its answer and the prompts up to the next cut."""
        settings = self.settings
        return settings.keep_positions and end + settings.window <= settings.positions_max
