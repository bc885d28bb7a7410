"""What a replay is about: turns, in the order in which they arrive, and the chunks that each asks for and leaves."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvstore.errors import BadRequest


@dataclass(slots=True)
class Turn:
    """One request to an engine."""

    at_ms: int
    """When it arrives, from the beginning of the trace."""
    chunks: Sequence[int]
    """Of its prompt, in the order of the chain. One number stands for one content behind one prefix, so two prompts
    have as many leading tokens in common as they have leading chunks in common. The last may be partial."""
    input_tokens: int
    """Of the prompt."""
    output_tokens: int = 0
    answer: Sequence[int] = ()
    """Chunks that are whole only with the answer; they follow the whole ones of the prompt."""
    session: int = -1
    """Turns of one session have one number; -1: nobody knows."""
    number: int = 0
    """In its session, from 0."""
    history: int = 0
    """How many of the leading `chunks` hold tokens of earlier turns of the session: were nothing ever evicted, nor
    invalidated, they would be there."""
    think_ms: int = -1
    """From the end of the answer before it to this turn, where that is known; an engine that is late delays it."""


@dataclass(slots=True)
class Trace:
    name: str
    chunk_tokens: int
    turns: list[Turn] = field(repr=False)

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise BadRequest("must be at least 1", field="chunk_tokens", value=self.chunk_tokens)
        if any(turn.at_ms > later.at_ms for turn, later in pairwise(self.turns)):
            self.turns.sort(key=lambda turn: turn.at_ms)
        if self.turns and self.turns[0].at_ms < 0:  # a file whose first row is not its earliest
            begin = self.turns[0].at_ms
            for turn in self.turns:
                turn.at_ms -= begin

    def __len__(self) -> int:
        return len(self.turns)

    def __iter__(self) -> Iterator[Turn]:
        return iter(self.turns)

    def note_history(self) -> None:
        """Set `history` of every turn from what came before it in its session; a turn of no known session has none."""
        left: dict[int, set[int]] = {}
        for turn in self.turns:
            if turn.session < 0:
                turn.history = 0
                continue
            known = left.setdefault(turn.session, set())
            turn.history = next(
                (n for n, chunk in enumerate(turn.chunks) if chunk not in known), len(turn.chunks)
            )
            known.update(turn.chunks)
            known.update(turn.answer)

    def first(self, count: int) -> Trace:
        """Of the turns, the first so many."""
        return Trace(self.name, self.chunk_tokens, self.turns[:count])

    def last_tokens(self, turn: Turn) -> int:
        """Tokens of the last chunk of the turn's prompt: fewer than `chunk_tokens` make it a tail."""
        if not turn.chunks:
            return 0
        return min(self.chunk_tokens, max(1, turn.input_tokens - (len(turn.chunks) - 1) * self.chunk_tokens))


def numbers(values: Sequence[int]) -> array[int]:
    """Chunk numbers as a trace keeps them: 8 bytes each."""
    return array("q", values)
