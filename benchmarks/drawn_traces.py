"""Traces that are drawn, for benchmarks without a trace of their own: the same from one seed everywhere, and each of
another kind of reuse. Lengths are in chunks of 512 tokens, think times are lognormal.

    mixed       dialogues of a dozen applications with prompts in common
    dialogues   with the lengths of people's conversations, eight system prompts
    agents      sessions of some 25 quick turns that only grow, one system prompt
    documents   asked about by popularity (Zipf), each question once
    scans       dialogues beside a loop over long documents that does not fit
    recent      what was used lately is used next: nothing does better than LRU by knowing kinds
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvstore.replay import Trace, Turn

CHUNK_TOKENS = 512
Numbers = Callable[..., int]
"""The number of the chunk that these words name."""


def mixed(dice: random.Random, number: Numbers) -> Iterator[Turn]:
    arrives = 0.0
    for session in range(1_500):
        arrives += dice.expovariate(0.5)
        at, application, length = arrives, int(12 * dice.random() ** 3), 0
        while True:
            length += 1 + int(dice.expovariate(0.4))
            chunks = [number(0, application, n) for n in range(4)] + [
                number(1, session, n) for n in range(length)
            ]
            yield Turn(int(1_000 * at), chunks, CHUNK_TOKENS * len(chunks), session=session)
            at += dice.lognormvariate(math.log(40), 1.0)
            if dice.random() < 0.2:
                break


def dialogues(dice: random.Random, number: Numbers) -> Iterator[Turn]:
    arrives = 0.0
    for session in range(1_500):
        arrives += dice.expovariate(0.8)
        at, length, application = arrives, 0, int(8 * dice.random() ** 2)
        while True:
            length += 1 + int(dice.expovariate(0.5))
            chunks = [number("system", application, n) for n in range(3)]
            chunks += [number(session, n) for n in range(length)]
            yield turn(dice, at, chunks, session)
            at += dice.lognormvariate(math.log(60), 1.0)
            if dice.random() < 0.25:
                break


def agents(dice: random.Random, number: Numbers) -> Iterator[Turn]:
    arrives = 0.0
    for session in range(220):
        arrives += dice.expovariate(0.05)
        at, length = arrives, 20
        for _ in range(1 + int(dice.expovariate(1 / 25))):
            length += 1 + int(dice.expovariate(0.3))
            chunks = [number("system", n) for n in range(10)] + [number(session, n) for n in range(length)]
            yield turn(dice, at, chunks, session)
            at += dice.lognormvariate(math.log(6), 1.2)


def documents(dice: random.Random, number: Numbers) -> Iterator[Turn]:
    weights = [1 / (rank + 1) ** 0.9 for rank in range(1_200)]
    lengths = [5 + int(dice.expovariate(1 / 15)) for _ in weights]
    at = 0.0
    for question in range(6_000):
        at += dice.expovariate(3)
        document = dice.choices(range(1_200), weights)[0]
        chunks = [number("document", document, n) for n in range(lengths[document])]
        yield turn(dice, at, [*chunks, number("question", question)])


def scans(dice: random.Random, number: Numbers) -> Iterator[Turn]:
    arrives = at = 0.0
    for session in range(900):
        arrives += dice.expovariate(0.8)
        at, length = arrives, 0
        while True:
            length += 1 + int(dice.expovariate(0.5))
            yield turn(dice, at, [number(session, n) for n in range(length)], session)
            at += dice.lognormvariate(math.log(60), 1.0)
            if dice.random() < 0.25:
                break
    for step in range(math.ceil(arrives / 4)):
        document = step % 30
        chunks = [number("scan", document, n) for n in range(80)]
        yield Turn(4_000 * step, chunks, CHUNK_TOKENS * len(chunks), session=10**6 + document)


def recent(dice: random.Random, number: Numbers) -> Iterator[Turn]:
    at = 0.0
    used: list[int] = []
    for step in range(6_000):
        at += dice.expovariate(3)
        again = used and dice.random() < 0.6
        document = used[-1 - int(len(used) * dice.random() ** 3)] if again else step
        used.append(document)
        yield turn(dice, at, [number("document", document, n) for n in range(10)])


def turn(dice: random.Random, at_s: float, chunks: list[int], session: int = -1) -> Turn:
    """Its last chunk is filled in part."""
    tokens = CHUNK_TOKENS * len(chunks) - dice.randrange(CHUNK_TOKENS)
    return Turn(int(1_000 * at_s), chunks, tokens, session=session)


KINDS: Mapping[str, Callable[[random.Random, Numbers], Iterator[Turn]]] = {
    kind.__name__: kind for kind in (mixed, dialogues, agents, documents, scans, recent)
}


def drawn(kind: str, seed: int = 7) -> Trace:
    numbers: dict[tuple[Any, ...], int] = {}

    def number(*words: Any) -> int:
        return numbers.setdefault(words, len(numbers))

    turns = list(KINDS[kind](random.Random(seed), number))
    return Trace(f"drawn {kind}", CHUNK_TOKENS, turns)


def lengths(count: int, seed: int = 1) -> Iterator[list[list[int]]]:
    """Conversations with the shape of ShareGPT's: [tokens asked, tokens answered] of each turn; 6 turns on average, a
    third of a single one."""
    dice = random.Random(seed)
    for _ in range(count):
        turns = 1 if dice.random() < 0.31 else 2 + min(60, int(dice.expovariate(1 / 7)))
        yield [
            [
                1 + int(dice.lognormvariate(math.log(40), 1.3)),
                1 + int(dice.lognormvariate(math.log(200), 0.9)),
            ]
            for _ in range(turns)
        ]
