"""Prompts of modules, truncated conversations and ordinary prompts in one engine that runs out of room, loses loads,
requests and modules, and gets other weights: the logits behind each token are those that its prompt has alone."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from kvstore.gpu_worker.assembly import Assembly
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.promptcache.plan import Recipe
from kvstore.gpu_worker.request import Request
from kvstore.gpu_worker.sampling import GREEDY, Sampler
from kvstore.gpu_worker.truncation import Truncation, Turns
from kvstore.types import ChunkKey

from .conftest import FakeStore, text
from .modular import assembly_of, bytes_llama, encode_all, encoding_of
from .test_importing import BEFORE, SCHEMA, prompt

MakeEngine = Callable[..., BatchEngine]
T = 16
TOLERANCE = 1e-3
"""Of logits of the size of ten or so, in float32, of KV that was moved several times."""
RECIPES = (Recipe(), Recipe(), Recipe(share=0.2), Recipe(see_later=True), Recipe(deviating=0.3))
CUT = Truncation(160)
CUTS = (CUT, replace(CUT, recompute_share=0.3), replace(CUT, recompute_share=0.5, deviating=True))
Store = dict[tuple[bytes, ChunkKey], Any]


@dataclass(frozen=True)
class Way:
    """How the logits behind a token came about: with which weights, of modules which ones were read and not computed,
    of a conversation whether it sees what was kept of it; "": as `tokens` say."""

    weights: int
    kind: str = ""
    read: frozenset[ChunkKey] = frozenset()
    tokens: tuple[int, ...] = field(default=(), repr=False)


class Told(Sampler):
    """Chooses what it is told, then the largest logit; keeps the logits and how they came about."""

    def __init__(self, way: Callable[[Request], Way], told: Sequence[int] = ()) -> None:
        super().__init__(GREEDY)
        self.way, self.told = way, list(told)
        self.request: Request | None = None
        self.seen: list[tuple[torch.Tensor, Way]] = []

    def choose(self, logits: torch.Tensor) -> int:
        self.logits = logits.clone()
        number = len(self.seen)
        return self.told[number] if number < len(self.told) else super().choose(logits)

    def used(self) -> None:
        assert self.request is not None
        self.seen.append((self.logits, self.way(self.request)))


@dataclass
class Asked:
    """A request of the engine that is tested. `before`: the earlier turns of its conversation."""

    tokens: list[int]
    sampler: Told
    assembly: Assembly | None = None
    before: list[Asked] = field(default_factory=list)
    turns: Turns | None = None
    said: list[int] = field(default_factory=list)

    def add(self, engine: BatchEngine, count: int, sampler: Told, **options: Any) -> int:
        number = engine.add(
            self.tokens,
            count,
            sampler=sampler,
            assembly=self.assembly,
            turns=self.turns,
            cut=self.turns is not None,
            **options,
        )
        sampler.request = engine.request(number)
        return number


def way_of(request: Request, weights: int) -> Way:
    if request.assembly is None:
        if request.chain is not None:
            return Way(weights, "cut")
        return Way(weights, tokens=tuple(request.tokens))
    if request.chain is not None:
        parts = [part for one in request.chain.seen for part in one.parts(b"", T)]
        return Way(weights, "modules", frozenset(part.key for part in parts))
    if not request.unplanned:
        return Way(weights, "modules", frozenset(part.key for part in request.assembly.parts))
    if request.reused.tokens == 0:
        return Way(weights, "modules")
    return Way(weights, "unknown")  # some of its chunks are those of a prompt that had all modules


class Alone:
    """Each prompt by itself, with the same KV of modules."""

    def __init__(
        self, models: Sequence[LlamaForCausalLM], modules: Store, engines: MakeEngine, like: BatchEngine
    ) -> None:
        self.models, self.modules = models, modules
        self.store = FakeStore()
        options: dict[str, Any] = {"chunk_tokens": T, "pool_chunks": 400, "prefill_tokens": 512}
        self.copying = [engines(model, self.store, share=False, **options) for model in models]
        options["truncation"] = like.truncation
        self.keeping = [engines(model, None, retain=True, **options) for model in models]
        for engine in self.keeping:
            engine._choices = like._choices  # of equally good ones, another one may be chosen
        self.turns: dict[tuple[int, int], Told] = {}

    def logits(self, asked: Asked, way: Way, number: int) -> torch.Tensor | None:
        """Behind the prompt and behind each token of its answer but the last; `way` is that of one of them. None where
        it cannot be told."""
        said = asked.said
        if way.kind == "modules":
            return self._modules(asked, way, said)
        if way.kind == "cut":
            seen = self._turn(asked, way.weights).seen
            kept = all(each.kind == "cut" for _, each in seen)
            return torch.stack([logits for logits, _ in seen]) if kept else None
        tokens = [*way.tokens[: len(way.tokens) - number], *said]
        with torch.inference_mode():
            return self.models[way.weights](torch.tensor([tokens[:-1]])).logits[0, -len(said) :]

    def _modules(self, asked: Asked, way: Way, said: Sequence[int]) -> torch.Tensor:
        """Copied between its own tokens, not read where they lie."""
        engine = self.copying[way.weights]
        self.store.chunks = {name: shard for name, shard in self.modules.items() if name[1] in way.read}
        sampler = Told(lambda request: way_of(request, way.weights), said)
        asked.add(engine, len(said), sampler)
        for _ in engine.run():
            pass
        return torch.stack([logits for logits, _ in sampler.seen])

    def _turn(self, asked: Asked, weights: int) -> Told:
        """After the turns before it, in an engine that let go of nothing."""
        if (found := self.turns.get((id(asked), weights))) is not None:
            return found
        if asked.before:
            self._turn(asked.before[-1], weights)
        engine = self.keeping[weights]
        said = asked.said
        sampler = self.turns[id(asked), weights] = Told(lambda request: way_of(request, weights), said)
        asked.add(engine, max(1, len(said)), sampler, session=f"alone {id([*asked.before, asked][0])}")
        for _ in engine.run():
            pass
        return sampler


class Play:
    """Random requests and misfortunes."""

    def __init__(self, seed: int, store: FakeStore, engines: MakeEngine) -> None:
        self.random = random.Random(seed)
        self.store = store
        self.models = [bytes_llama(seed=0), bytes_llama(seed=1)]
        self.model = copy.deepcopy(self.models[0])
        self.weights = 0
        self.engine = engines(
            self.model,
            store,
            chunk_tokens=T,
            pool_chunks=(30, 90, 38)[seed % 3],
            sequences_max=6,
            prefill_tokens=self.random.choice((512, 100, 21)),
            retain=True,
            load_ahead=self.random.choice((0, 2)),
            truncation=self.random.choice(CUTS),
            canary_every=2,
        )
        self.assemblies: list[Assembly] = []
        for weights in (1, 0):
            self.use(weights)
            encoding = encoding_of(self.engine, SCHEMA)
            encode_all(self.engine, encoding)
            for number in range(len(BEFORE)):
                own = self.random.choice(("Why?", "And what of all the others that are named here?"))
                recipe = self.random.choice(RECIPES)
                self.assemblies.append(assembly_of(self.engine, encoding, prompt(number, own), recipe))
        self.modules = dict(store.chunks)
        assert self.modules
        self.alone = Alone(self.models, self.modules, engines, self.engine)
        self.live: dict[int, Asked] = {}
        self.over: list[Asked] = []
        self.conversations: list[list[Asked]] = [[] for _ in range(2)]
        self.number = 0
        store.on_copy = lambda number: self.random.random() > 0.02

    def way(self, request: Request) -> Way:
        return way_of(request, self.weights)

    def use(self, weights: int, *, told: bool = True) -> None:
        self.weights = weights
        with torch.no_grad():
            self.model.load_state_dict(self.models[weights].state_dict())
        if told:
            self.engine.reset()

    def add(self) -> None:
        count, session = self.random.choice((2, 6, 6, 25)), ""
        kind = self.random.choice(("modules", "modules", "conversation", "conversation", "plain"))
        asked = Asked([], Told(self.way))
        if kind == "modules":
            asked.assembly = self.random.choice(self.assemblies)
            asked.tokens = list(asked.assembly.tokens)
        elif kind == "plain":
            root = text(70, seed=self.random.randrange(2))
            asked.tokens = [*root, *text(self.random.randrange(1, 40), seed=self.random.randrange(3))]
        else:
            which = self.random.randrange(len(self.conversations))
            turns = self.conversations[which]
            if turns and turns[-1] not in self.over:
                return
            self.number += 1
            said = [*turns[-1].tokens, *turns[-1].said] if turns else []
            asked.tokens = [*said, *text(self.random.randrange(20, 60), seed=1000 + self.number)]
            asked.before, session = list(turns), f"conversation {which}"
            ends = [len(turn.tokens) for turn in (*turns, asked)]
            begins = [len(turn.tokens) + len(turn.said) for turn in turns]
            asked.turns = Turns(0, (0, *begins), tuple(ends))
            turns.append(asked)
        self.live[asked.add(self.engine, count, asked.sampler, session=session)] = asked

    def step(self) -> None:
        for output in self.engine.step():
            self.live[output.request].said.append(output.token)
            if output.finish:
                assert output.finish == "length"
                self.over.append(self.live.pop(output.request))
        self.engine.check_integrity()

    def misfortune(self) -> None:
        chance = self.random.random()
        if chance < 0.03 and self.live:
            number = self.random.choice(list(self.live))
            assert self.engine.abort(number)
            self.over.append(self.live.pop(number))
        elif chance < 0.06:
            self.store.forget(*self.random.sample([key for _, key in self.modules], 2))
        elif chance < 0.09:
            self.store.chunks |= self.modules
        elif chance < 0.097:
            self.use(1 - self.weights, told=self.random.random() < 0.5)

    def check(self) -> Counter[str]:
        """All logits of all requests; how many of which kind."""
        checked: Counter[str] = Counter()
        for asked in self.over:
            seen = asked.sampler.seen
            assert len(seen) == len(asked.said)
            wanted: dict[Way, torch.Tensor | None] = {}
            for number, (logits, way) in enumerate(seen):
                name = replace(way, tokens=())
                if name not in wanted:
                    known = way.kind != "unknown"
                    wanted[name] = self.alone.logits(asked, way, number) if known else None
                expected = wanted[name]
                if expected is None:
                    checked["unknown"] += 1
                    continue
                checked[way.kind or "plain"] += 1
                difference = (logits - expected[number]).abs().max()
                assert difference < TOLERANCE, (number, name, difference)
                assert expected[number].max() - expected[number][asked.said[number]] < 2 * TOLERANCE
        return checked


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_beside_it_a_prompt_has_the_logits_that_it_has_alone(
    seed: int, store: FakeStore, engines: MakeEngine
) -> None:
    play = Play(seed, store, engines)
    for _ in range(60):
        if play.random.random() < 0.3 and len(play.live) < 9:
            play.add()
        play.misfortune()
        play.step()
    while play.live:
        play.step()
    assert play.engine.pool.used == 0 and not play.engine.alarm
    checked = play.check()
    assert checked["unknown"] < checked.total() / 2, checked
    assert checked["modules"] and checked["plain"]
