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

import hashlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.errors import Unsupported
from kvstore.gpu_worker.assembly import most_deviating
from kvstore.gpu_worker.chain import Chain, Jump, Seen
from kvstore.keys import ROOT
from kvstore.types import ChunkKey

VERSION = 2
"""Of the method: what it makes of the same tokens."""
RUN_TOKENS = 4
"""Tokens that are computed anew because they deviate are chosen in runs: every run is a stretch more for attention."""
MASS_RUN_TOKENS = 16
"""Older tokens that stay because others attend to them are chosen in runs."""
FIRST_PART = 4
"""One part in so many of what is computed anew is the first tokens behind the head, if the rest is what deviates."""
HEAD_SHARE_MAX = 0.75
"""Of what is kept, template and system message may be so much: the question must have room."""
Choices = Mapping[bytes, tuple[int, ...]]
"""By `Undecided.key`: which tokens deviate most, or are attended to most, by their numbers in the conversation."""


LEARNED_SINKS = ("gpt_oss",)
"""`config.model_type` of families whose heads have an attention sink of their own."""


def check_cuttable(config: Any) -> None:
    """Raises Unsupported, naming the field of the Hugging Face `config`, for a model of which nobody has measured what
    a cut does to it."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    sliding = window is not None and getattr(config, "use_sliding_window", True) and not kinds
    for field_name, value, why in (
        (
            "model_type",
            config.model_type if config.model_type in LEARNED_SINKS else None,
            "its attention sinks are learned",
        ),
        ("attention_chunk_size", getattr(config, "attention_chunk_size", None), "it attends within chunks"),
        ("sliding_window", window if sliding else None, "it attends within a sliding window"),
        (
            "layer_types",
            next((kind for kind in kinds or () if kind != "full_attention"), None),
            "such layers do not attend to all that is kept",
        ),
    ):
        if value is not None:
            raise Unsupported(
                f"conversations with this model are not cut: {why}, and what a cut does then was not measured",
                field=f"config.{field_name}",
                value=value,
                remedy="serve it without truncation",
            )


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
    deviating: bool = False
    """Of that, a quarter is right behind the head, and the rest those tokens whose KV deviates most from what it would
    be without the text that was cut (CacheBlend, arXiv 2405.16444): somebody has to look, see `Undecided`."""
    mass_share: float = 0.0
    """Of what is kept, so much is older than the rest: those tokens that had the largest share of attention
    (AttentionStore 3.4), as far as it was recorded (`masses.py`). They stand between head and rest."""
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
        if self.kept_tokens < 1:
            raise ValueError(
                f"window is {self.window}: {self.kept_share} of it, which is kept, must be at least 1 token"
            )
        if not 0 <= self.recompute_share <= 1:
            raise ValueError(f"recompute_share is {self.recompute_share}: must be between 0 and 1")
        if not 0 <= self.mass_share < 1:
            raise ValueError(f"mass_share is {self.mass_share}: must be at least 0 and below 1")
        room = self.kept_tokens - self.mass_tokens
        if self.head_tokens is not None and not 0 <= self.head_tokens < room:
            raise ValueError(
                f"head_tokens is {self.head_tokens}: must be below the {room} tokens that are kept"
                + " beside those with the largest mass" * bool(self.mass_tokens)
            )
        if self.keep_positions and self.positions_max < self.window:
            raise ValueError(
                f"positions_max is {self.positions_max}: must be at least window ({self.window})"
            )

    def check_head(self, turns: Turns | None) -> None:
        """Raises ValueError for a conversation whose system message leaves no room for what was asked."""
        if turns is None or self.head_tokens is not None:
            return
        room = self.kept_tokens - self.mass_tokens
        if turns.head > room * HEAD_SHARE_MAX:
            raise ValueError(
                f"the prompt outgrows its window of {self.window} tokens: {room} are kept then, of which "
                f"the template and system message, with {turns.head}, may be {HEAD_SHARE_MAX:.0%} (shorten it, or "
                "start the worker with a larger --truncate-tokens or --truncate-to, or with --truncate-head)"
            )

    @property
    def prompt_tokens(self) -> int:
        return int(self.window * self.prompt_share)

    @property
    def kept_tokens(self) -> int:
        return int(self.window * self.kept_share)

    @property
    def mass_tokens(self) -> int:
        """Of the kept ones, those that stay because others attend to them."""
        return int(self.kept_tokens * self.mass_share) // MASS_RUN_TOKENS * MASS_RUN_TOKENS


@dataclass(frozen=True, slots=True)
class Turns:
    """Of a chat: how many tokens come before its first turn, where turns begin, and where prompts ended, the last of
    which is the whole."""

    head: int = 0
    begins: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Undecided:
    """A cut of which it is not known yet which tokens deviate most, or (`by_mass`) which older ones stay because others
    attend to them."""

    key: bytes
    """Of what a choice follows from: the conversation up to the cut, and the settings."""
    tokens: tuple[int, ...] = field(repr=False)
    """All that is kept and has KV, as a text of its own ..."""
    jumps: tuple[Jump, ...]
    """... with its positions."""
    spans: tuple[tuple[int, int], ...]
    """Of the conversation: from where to where tokens may be chosen, ..."""
    numbers: tuple[int, ...]
    """... and the number in `tokens` of the first token of each span."""
    count: int
    """So many are to be chosen; by mass, so many at most."""
    by_mass: bool = False

    def choose(self, distances: Sequence[float]) -> tuple[int, ...]:
        """`distances`: of each token of the spans, how far it is from what it would be, or its mass, in their order.
        Runs with the largest sum come first; of equal ones those that stand first."""
        size = MASS_RUN_TOKENS if self.by_mass else RUN_TOKENS
        runs = [distances[at : at + size] for at in range(0, len(distances), size)]
        of_run = [sum(run) / len(run) for run in runs for _ in run]
        chosen = most_deviating(of_run, self.spans, self.count)
        return tuple(place for begin, end in chosen for place in range(begin, end))

    def takes(self, chosen: Sequence[int]) -> bool:
        """Whether this can be a choice."""
        places = {place for begin, end in self.spans for place in range(begin, end)}
        fits = len(chosen) <= self.count if self.by_mass else len(chosen) == self.count
        return fits and len(set(chosen)) == len(chosen) and places.issuperset(chosen)


@dataclass(frozen=True, slots=True)
class View:
    """What a request computes and sees of a conversation."""

    chain: Chain
    """Its own tokens, from the first to the last of the prompt."""
    remaining: tuple[int, ...] = field(repr=False)
    """All that is kept, as a text of its own: what is computed where the KV cannot be had."""
    cuts: int = 0
    cut_tokens: int = 0
    undecided: Undecided | None = None
    """The last cut, if it is: `chain` is to be asked for again with the choice."""
    unknown: tuple[bytes, ...] = ()
    """Keys of all choices that were not among those that were told."""
    spans: tuple[tuple[int, int], ...] = ()
    """What is kept, as spans of the conversation."""
    stays: bool = False
    """Whether it stands where it stood."""

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
    choices: Choices | None = None,
) -> View:
    """What is left of the prompt `tokens`. Without `turns` any chunk's end is the end of a prompt and of a turn.
    `choices`: what is known of the cuts, for settings that ask what deviates most."""
    return _Conversation(tuple(tokens), settings, turns, chunk_tokens, root, choices or {}).view()


class _Conversation:
    def __init__(
        self,
        tokens: tuple[int, ...],
        settings: Truncation,
        turns: Turns | None,
        size: int,
        root: ChunkKey,
        choices: Choices,
    ) -> None:
        self.tokens, self.settings, self.size, self.root = tokens, settings, size, root
        self.choices = choices
        self.unknown: list[bytes] = []
        self.undecided: Undecided | None = None
        grid = tuple(range(size, len(tokens) + 1, size))
        self.begins = turns.begins if turns is not None else grid
        ends = turns.ends if turns is not None else grid
        self.ends = [*(end for end in ends if end < len(tokens)), len(tokens)]
        head = settings.head_tokens
        self.head = min(
            head if head is not None else turns.head if turns is not None else 0, settings.kept_tokens
        )
        self.cut = self.head
        """History [head, cut) is gone, ..."""
        self.early: list[tuple[int, int]] = []
        """... but for these spans of it, to which others attend."""
        self.stays = False
        """What is kept stands where it stood."""
        self.from_ = 0
        """History from here on is the chain's own, behind `front`, which is computed anew."""
        self.front: tuple[int, ...] = ()
        self.scattered: list[tuple[int, int, int]] = []
        """(history from, to, its number in the chain) of what is in `front` because it deviates."""
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
            self._kept(len(self.tokens)),
            self.cuts,
            len(self.tokens) - self._rank(len(self.tokens)),
            self.undecided,
            tuple(self.unknown),
            ((0, min(self.head, len(self.tokens))), *self.early, (self.cut, max(self.cut, len(self.tokens)))),
            self.stays,
        )

    def _length(self, end: int) -> int:
        """Of what is kept up to there, with the room that older tokens have, used or not: where cuts are must not
        depend on what was chosen, or the choices could not all be asked for at once."""
        return self.head + (self.settings.mass_tokens if self.cuts else 0) + end - self.cut

    def _kept(self, end: int) -> tuple[int, ...]:
        """All of the history up to `end` that is kept."""
        early = tuple(token for low, high in self.early for token in self.tokens[low:high])
        return self.tokens[: self.head] + early + self.tokens[self.cut : end]

    def _rank(self, number: int) -> int:
        """How many tokens are kept before this one of the history, which is kept."""
        if number < self.head:
            return number
        early = sum(min(high, number) - low for low, high in self.early if low < number)
        return self.head + early + max(0, number - self.cut)

    def _place(self, number: int) -> int:
        """At which position a kept token of the history stands."""
        return number if self.stays else self._rank(number)

    def _from(self, rank: int) -> int:
        """The token of the history before which so many are kept, the head among them."""
        rank -= self.head
        for low, high in self.early:
            if rank < high - low:
                return low + rank
            rank -= high - low
        return self.cut + rank

    def _chain(self, end: int) -> Chain:
        own = self.front + self.tokens[self.from_ : end]
        return Chain(own, self.root, self.jumps, self.seen, self.method)

    def _cut(self, end: int, before: int) -> None:
        """At a prompt that ends there, where the prompt before ended at `before`."""
        settings, size = self.settings, self.size
        # The turn that is new was not computed; where no turn begins, neither was what came after the last prompt
        place = bisect_right(self.begins, end - 1) - 1
        current = self.begins[place] if place >= 0 and self.begins[place] > before else before
        wanted = end - (settings.kept_tokens - self.head - settings.mass_tokens)
        place = bisect_left(self.begins, wanted)
        cut = (
            self.begins[place]
            if place < len(self.begins) and self.begins[place] <= max(current, wanted)
            else wanted
        )
        cut = max(cut, self.cut, self.head)
        computed = current - (current > before)  # the last token of an answer was read by nobody
        own = (len(self.front) + max(0, computed - self.from_)) // size * size
        until = self.from_ + max(0, own - len(self.front))  # in whole chunks
        old = self._chain(until)
        pieces = [*self.pieces, (self.from_, until, old, len(self.front))]
        pieces += [(low, high, old, number) for low, high, number in self.scattered]
        pieces.sort(key=lambda piece: piece[:2])

        self.cuts += 1
        self.cut, self.undecided = cut, None
        self.early = self._attended_to(end, pieces)
        anew = int(settings.recompute_share * (self._rank(end) - self.head))
        first = anew // FIRST_PART if settings.deviating else anew
        if not self.head:
            first = max(first, size)
        prefix = -(-(self.head + first) // size) * size if first else self.head // size * size
        prefix = min(prefix, (self._rank(end) - 1) // size * size)
        kept_from = self._from(max(prefix, self.head))
        self.stays = not anew and self._fits(end)
        if self.head_chain is None and own >= self.head:
            self.head_chain = old
        self.scattered = []
        start = max(until, cut)
        if start <= kept_from or (prefix < self.head and self.head_chain is None):
            # No KV of what is kept: an ordinary prompt again
            self.front, self.from_, self.pieces, self.seen, self.method = (
                self.tokens[: self.head],
                cut,
                [],
                (),
                b"",
            )
            self.early = []  # if it is open which stay, the answer is asked for all the same
            self.jumps = ((0, 0), (self.head, cut)) if self.stays and cut != self.head else ((0, 0),)
            self.head_chain = None
            return
        self.pieces = [
            (max(low, begin), min(high, stop), chain, number + max(low, begin) - low)
            for low, high, chain, number in pieces
            for begin, stop in ((max(kept_from, a), b) for a, b in (*self.early, (cut, until)))
            if max(low, begin) < min(high, stop)
        ]
        self.front = self._kept(end)[:prefix]
        jumps = [(0, 0)] if prefix else []
        wanted = (anew - max(0, prefix - self.head)) // size * size if settings.deviating else 0
        for low, high in _runs(self._chosen(end, until, wanted if self.undecided is None else 0)):
            self.scattered.append((low, high, len(self.front)))
            jumps.append((len(self.front), self._place(low)))
            self.front += self.tokens[low:high]
        self.pieces = list(_without(self.pieces, self.scattered))
        seen = [
            Seen(
                chain,
                number,
                number + high - low,
                self._place(low),
                prefix + sum(to - from_ for from_, to, _ in self.scattered if from_ < low),
            )
            for low, high, chain, number in self.pieces
        ]
        if prefix < self.head and self.head_chain is not None:
            seen.insert(0, Seen(self.head_chain, prefix, self.head, prefix, prefix))
        self.from_, self.seen = start, tuple(seen)
        self.jumps = (*jumps, (len(self.front), self._place(start)))
        self.method = b"truncation %d" % VERSION + b" deviating" * settings.deviating

    def _attended_to(self, end: int, pieces: Sequence[tuple[int, int, Chain, int]]) -> list[tuple[int, int]]:
        """Of a cut at `end`: spans of what goes, which have KV, that stay because others attend to them most; none if
        that is not known."""
        spans = tuple(
            (max(low, self.head), min(high, self.cut))
            for low, high, _, _ in pieces
            if max(low, self.head) < min(high, self.cut)
        )
        count = min(self.settings.mass_tokens, sum(high - low for low, high in spans))
        if count <= 0:
            return []
        undecided = Undecided(self._key(end, b"mass"), (), (), spans, (), count, by_mass=True)
        chosen = self._choice(undecided)
        return list(_runs(chosen)) if chosen is not None else []

    def _key(self, end: int, what: bytes) -> bytes:
        """Of a choice at this cut."""
        said = f"{self.settings} {self.size} {self.head} {self.cut} {self.cuts}".encode() + what
        state = hashlib.blake2b(said, digest_size=32, person=b"kvs.choice.v1")
        state.update(len(self.root).to_bytes(2, "little") + self.root)
        state.update(array("q", self.tokens[:end]).tobytes())
        return state.digest()

    def _choice(self, undecided: Undecided) -> tuple[int, ...] | None:
        chosen = self.choices.get(undecided.key)
        if chosen is not None and undecided.takes(chosen):
            return tuple(sorted(chosen))
        self.unknown.append(undecided.key)
        self.undecided = undecided
        return None

    def _chosen(self, end: int, until: int, wanted: int) -> tuple[int, ...]:
        """Of a cut at `end`, whose old KV ends at `until`: which tokens of the conversation deviate most, none if that
        is not known."""
        spans = tuple((low, high) for low, high, _, _ in self.pieces)
        count = min(wanted, sum(high - low for low, high in spans) // self.size * self.size)
        if count <= 0:
            return ()
        jumps = [(self._rank(low), self._place(low)) for low, _ in (*self.early, (self.cut, until))]
        undecided = Undecided(
            self._key(end, b""),
            self._kept(until),
            ((0, 0), *(jump for jump in jumps if jump[0] != jump[1])),
            spans,
            tuple(self._rank(low) for low, _ in spans),
            count,
        )
        return self._choice(undecided) or ()

    def _fits(self, end: int) -> bool:
        """Whether positions may stay, with a gap, for this prompt, its answer and the prompts up to the next cut."""
        settings = self.settings
        return settings.keep_positions and end + settings.window <= settings.positions_max


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Rising numbers as spans [from, to)."""
    begin = 0
    for at, number in enumerate(numbers):
        if at + 1 == len(numbers) or numbers[at + 1] != number + 1:
            yield numbers[begin], number + 1
            begin = at + 1


def _without(
    pieces: Sequence[tuple[int, int, Chain, int]], taken: Sequence[tuple[int, int, int]]
) -> Iterator[tuple[int, int, Chain, int]]:
    """What is left of pieces of the history when spans are taken out; both in order."""
    for low, high, chain, number in pieces:
        at = low
        for begin, end, _ in taken:
            if begin < high and end > at:
                if begin > at:
                    yield at, begin, chain, number + at - low
                at = end
        if at < high:
            yield at, high, chain, number + at - low
