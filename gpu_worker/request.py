"""A request: tokens in, tokens out, and what it holds meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvstore.gpu_worker.assembly import Assembly, Span
from kvstore.gpu_worker.sampling import Sampler
from kvstore.kernels.stretches import Stretch
from kvstore.keys import ROOT
from kvstore.types import SESSION_NAME_BYTES_MAX, ChunkKey

if TYPE_CHECKING:
    from kvstore.gpu_worker.chain import Chain
    from kvstore.gpu_worker.gathering import Gathering
    from kvstore.gpu_worker.importing import Importing
    from kvstore.gpu_worker.loader import Load
    from kvstore.gpu_worker.masses import Observation
    from kvstore.gpu_worker.pool_store import Found
    from kvstore.gpu_worker.saver import TurnSave
    from kvstore.gpu_worker.truncation import Turns, Undecided


@dataclass(slots=True)
class Reused:
    """Tokens of a prompt whose KV was not computed, by where it was."""

    hbm: int = 0
    dram: int = 0
    ssd: int = 0

    @property
    def tokens(self) -> int:
        return self.hbm + self.dram + self.ssd


@dataclass(slots=True, eq=False)
class Request:
    """From `add` to its last token."""

    number: int
    tokens: list[int]
    """The prompt and what was chosen since."""
    tokens_max: int
    stop_tokens: frozenset[int]
    sampler: Sampler
    session: str = ""
    """Whose manifest its KV becomes; "": only full chunks are saved."""
    root: ChunkKey = ROOT
    """What the chain of its keys begins with: requests with different roots share nothing."""
    prompt_tokens: int = 0
    chunks: list[int] = field(default_factory=list)
    """Of its own tokens: token n is at place n % chunk_tokens of chunk n // chunk_tokens, wherever it stands."""
    jumps: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    """(number of an own token, its position): from there on positions go up by one. A position is not a place."""
    stretches: list[Stretch] = field(default_factory=list)
    """What it sees beside its own tokens, in chunks of the pool that it holds too, ..."""
    held: list[int] = field(default_factory=list)
    """... which are these."""
    chain: Chain | None = None
    """What its own tokens are, if they see others (`stretches`, once these are there) or leave gaps."""
    remaining: tuple[int, ...] = ()
    """What it computes instead, as an ordinary prompt, if that cannot be had."""
    gathering: Gathering | Importing | None = None
    """While it is on its way to `stretches`."""
    cut_tokens: int = 0
    """Of its conversation, so many are not there any more."""
    conversation: tuple[tuple[int, ...], Turns | None] = ((), None)
    """All its tokens, and its turns, if something is to be found out before it is known what it computes: ..."""
    choices: Future[dict[bytes, tuple[int, ...]]] | None = None
    """... what the store knows of that, or ..."""
    open_cut: Undecided | None = None
    """... what has to be found out."""
    spans_kept: tuple[Span, ...] = ()
    """Of a conversation that was cut: what is kept of it."""
    answer_max: int = 0
    """So many tokens were asked for, of which the window may have no room for all."""
    observe: bool = False
    """It is to be recorded what the end of its prompt attends to: ..."""
    observation: Observation | None = None
    """... this."""
    keys: list[ChunkKey] = field(default_factory=list)
    """Of the full chunks of `tokens`, in the pool."""
    store_keys: list[ChunkKey] = field(default_factory=list)
    """Of the same chunks, in the store; as many as were asked for."""
    computed: int = 0
    """Leading tokens whose KV is in `chunks`; not those that are being loaded."""
    row: int = -1
    """Its row in the forests, while it runs."""
    lookup: Future[Found] | None = None
    """What the store has of it; asked when it begins to run."""
    found: Found | None = None
    """What the store had, once it is known."""
    choice: str = ""
    """What was made of what the store had, see `compute_or_load.Why`; "": nothing was weighed."""
    load: Load | None = None
    load_first: int = 0
    """The first of its chunks that `load` fills; that one and all after it are the load's until it has ended."""
    asked: bool = False
    """The store was asked for it while it waited."""
    joined: bool = False
    """It runs though not all of `load` is there; `computed` counts what is being loaded."""
    save: TurnSave | None = None
    reused: Reused = field(default_factory=Reused)
    load_failures: int = 0
    failure: str = ""
    """Why no token followed from its logits."""
    alone: bool = False
    """It reuses nothing: what it reused before was no numbers."""
    assembly: Assembly | None = None
    """Of a prompt that is put together of parts, what stands where."""
    holes: list[Span] = field(default_factory=list)
    """Of such a prompt, once its parts are loaded: what is computed yet, as spans of `tokens`. Without any, all of
    `tokens` from `computed` on is."""
    undecided: bool = False
    """Its parts are loaded, and it is to be decided which of its tokens deviate most: those are computed, too."""
    absent: frozenset[ChunkKey] | None = None
    """Keys of parts that were nowhere, and are computed; None: it was not asked, or `found` says it."""
    unplanned: bool = False
    """Some of its parts are not there and are computed: its KV is not that of a prompt of the same parts."""

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)
        if self.assembly is not None:
            self.jumps = self.assembly.jumps

    def position(self, number: int) -> int:
        """Where its own token of that number stands."""
        return self.positions(number, number + 1)[0]

    def positions(self, begin: int, end: int) -> list[int]:
        """Where its own tokens from `begin` to `end` stand."""
        found: list[int] = []
        for (first, position), until in zip(
            self.jumps, (*(one for one, _ in self.jumps[1:]), end), strict=True
        ):
            low, high = max(first, begin), min(until, end)
            found += range(position + low - first, position + high - first)
        return found

    def seen_before(self, tokens: int) -> tuple[Stretch, ...]:
        """The stretches that some of its first `tokens` tokens see."""
        return tuple(one for one in self.stretches if one.at < tokens)

    @property
    def attended_prompt_tokens(self) -> int:
        """What is left of its prompt, computed here or not."""
        seen = sum(one.end - one.begin for one in self.chain.seen) if self.chain is not None else 0
        return self.prompt_tokens + seen

    def see(self, chain: Chain, open_cut: Undecided | None) -> None:
        """From now on this is what its own tokens are. Nothing is held, but what `held` says. Undone by `fall_back`, or
        by `put_together`."""
        assert not self.chunks and self.save is None
        said = self.tokens[self.prompt_tokens :]
        room = self.tokens_max - self.prompt_tokens
        self.chain, self.open_cut, self.jumps = chain, open_cut, list(chain.jumps)
        self.tokens = [*chain.tokens, *said]
        self.prompt_tokens = len(chain.tokens)
        self.tokens_max = self.prompt_tokens + room
        self.keys, self.store_keys = [], []

    def fall_back(self) -> None:
        """What it was to see cannot be had: what remains is computed as an ordinary prompt. Nothing is held."""
        assert not self.chunks and not self.held
        said = self.tokens[self.prompt_tokens :]
        room = self.tokens_max - self.prompt_tokens
        self.tokens = [*self.remaining, *said]
        self.prompt_tokens = len(self.remaining)
        self.tokens_max = self.prompt_tokens + room
        self.chain, self.jumps, self.stretches = None, [(0, 0)], []
        self.choices = self.open_cut = None
        self.keys, self.store_keys, self.save, self.reused = [], [], None, Reused()

    def put_together(self) -> None:
        """Its assembly is all that it computes, as if no part had been found. Nothing is held."""
        assert self.assembly is not None and not self.chunks and not self.held
        if self.chain is None:
            return
        said = self.tokens[self.prompt_tokens :]
        room = self.tokens_max - self.prompt_tokens
        self.tokens = [*self.assembly.tokens, *said]
        self.prompt_tokens = len(self.assembly.tokens)
        self.tokens_max = self.prompt_tokens + room
        self.chain, self.jumps, self.stretches = None, self.assembly.jumps, []
        self.keys, self.store_keys, self.absent = [], [], None

    @property
    def missing(self) -> int:
        """Tokens that are to be computed."""
        if self.holes:
            return sum(end - begin for begin, end in self.holes)
        return len(self.tokens) - self.computed

    @property
    def shared_tokens(self) -> int:
        """Leading tokens whose KV is what the keys of its chunks say: what others may share."""
        if self.assembly is None or self.chain is not None:
            return len(self.tokens)
        mine = self.unplanned or self.assembly.deviating
        return self.assembly.exact if mine else len(self.assembly.tokens)

    def spans(self, count: int) -> list[Span]:
        """Where the next `count` tokens stand that are computed."""
        found: list[Span] = []
        for begin, end in self.holes or [(self.computed, len(self.tokens))]:
            if count <= 0:
                break
            found.append((begin, min(end, begin + count)))
            count -= end - begin
        return found

    def advance(self, count: int) -> None:
        """The next `count` tokens have been computed."""
        if not self.holes:
            self.computed += count
            return
        while count:
            begin, end = self.holes[0]
            done = min(count, end - begin)
            count -= done
            if begin + done < end:
                self.holes[0] = begin + done, end
            else:
                del self.holes[0]
            self.computed = begin + done
        if self.holes:
            self.computed = self.holes[0][0]


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


def is_session_name(name: str) -> bool:
    """Whether the store takes it: 1 to 256 bytes of text."""
    try:
        return 0 < len(name.encode()) <= SESSION_NAME_BYTES_MAX
    except (AttributeError, UnicodeEncodeError):  # no text, or half a character
        return False
