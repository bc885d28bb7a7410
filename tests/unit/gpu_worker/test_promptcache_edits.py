"""A schema that is edited, removed and put back while prompts of it run, chunks are lost, loads and saves fail and the
worker starts anew: each answer is that of the version it names, token by token, and that is the current one.

A prompt has the schema's beginning, one module behind a gap, and a question: with the module's KV encoded after the
beginning there is one right answer for each version, which an engine without a store gives.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
from transformers import LlamaForCausalLM

from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.promptcache.plan import Recipe
from kvstore.gpu_worker.promptcache.prompts import Prompts
from kvstore.gpu_worker.promptcache.quality import Fixed
from kvstore.gpu_worker.serve.text import Text
from kvstore.promptcache import parse_schema

from .conftest import FakeStore
from .test_promptcache_serve import Cached, Shelf, T, model, serve  # noqa: F401
from .test_serve import byte_tokenizer

PROMPT = '<prompt schema="live"><m/>What do you know?</prompt>'
VERSIONS, NEW, STEPS = 4, 5, 16
CLEAR = 1e-3
"""A choice between logits that are nearer may fall otherwise: attention is summed in another order."""


def schema_of(version: int) -> str:
    words = " ".join(str(random.Random(version).randrange(10**6)) for _ in range(12))
    return (
        '<schema name="live"><system>Answer.</system><user><module name="other">Nobody imports it.</module>'
        f'<module name="m">{version}: {words}</module></user></schema>'
    )


class Reference:
    """What the model says to a version's prompt with nothing stored."""

    def __init__(self, model: LlamaForCausalLM) -> None:  # noqa: F811
        self._engine = BatchEngine(model, None, pool_chunks=64, chunk_tokens=T)
        self._text = Text(byte_tokenizer())
        self._known: dict[str, list[int]] = {}

    def answer(self, version: int) -> tuple[str, list[int]]:
        """Its digest, and the tokens."""
        schema = parse_schema(schema_of(version))
        digest = schema.digest.hex()
        if digest not in self._known:
            planned = Prompts(self._engine, self._text.tokenizer(), Fixed(schema)).plan(PROMPT, Recipe())
            self._engine.add(planned.tokens, NEW, assembly=planned.assembly)
            self._known[digest] = [output.token for output in self._engine.run()]
        return digest, self._known[digest]


class Play:
    def __init__(
        self, chance: random.Random, store: FakeStore, start: Callable[..., Cached], reference: Reference
    ) -> None:
        self.chance, self.store, self.start, self.reference = chance, store, start, reference
        self.expected = dict(map(reference.answer, range(VERSIONS)))
        assert len(set(map(tuple, self.expected.values()))) == VERSIONS, "versions say the same"
        self.shelf = Shelf()
        self.cached = start(store, shelf=self.shelf)
        self.current = ""
        """Digest of the version that is served; "": there is no schema."""
        self.served = self.hits = 0

    def put(self) -> None:
        version = self.chance.randrange(VERSIONS)
        self.shelf.put(schema_of(version))
        self.current = parse_schema(schema_of(version)).digest.hex()

    def remove(self) -> None:
        self.shelf.texts.clear()
        self.current = ""

    def ask(self, allowed: set[str]) -> None:
        body = {"pml": PROMPT, "temperature": 0, "max_tokens": NEW, "return_token_ids": True}
        status = 400 if allowed == {""} else 200
        answer = self.cached.ask(body, status=status)
        if status == 400:
            assert "there is no schema live" in answer["error"]["message"]
            return
        about, said = answer["kvstore"]["promptcache"], answer["choices"][0]["token_ids"]
        assert about["version"] in allowed and not about["stale"], (about, allowed)
        for found, expected, gap in zip(
            said, self.expected[about["version"]], answer["kvstore"]["gaps"], strict=True
        ):
            if found != expected:
                assert gap < CLEAR, (said, self.expected[about["version"]], answer["kvstore"])
                break
        self.served += 1
        self.hits += answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 60

    def put_while_asked(self) -> None:
        """Three ask while it is edited; they get the version of before or of after."""
        if not self.current:
            return
        before, failures = self.current, []
        gate = threading.Barrier(4)
        version = self.chance.randrange(VERSIONS)
        after = parse_schema(schema_of(version)).digest.hex()

        def asking() -> None:
            try:
                gate.wait(30)
                self.ask({before, after})
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=asking) for _ in range(3)]
        for thread in threads:
            thread.start()
        gate.wait(30)
        self.shelf.put(schema_of(version))
        self.current = after
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "an answer never came"
        assert not failures, failures

    def lose(self) -> None:
        keys = sorted(key for _, key in self.store.chunks)
        self.store.forget(*self.chance.sample(keys, len(keys) // 3))

    def fail(self) -> None:
        """Copies and saves fail while it is asked."""
        self.store.on_copy = lambda number: number % 2 == 0
        self.store.commits_fail = True
        try:
            self.ask({self.current})
            self.cached.encoded()
        finally:
            self.store.on_copy = lambda number: True
            self.store.commits_fail = False

    def restart(self) -> None:
        self.cached.served.stop()
        self.cached = self.start(self.store, shelf=self.shelf)

    def step(self) -> None:
        what = self.chance.choices(
            (lambda: self.ask({self.current}), self.put, self.put_while_asked, self.remove),
            (8, 4, 3, 1),
        )[0]
        what()
        other = self.chance.random()
        if other < 0.2:
            self.cached.encoded()
        elif other < 0.3:
            self.lose()
        elif other < 0.4:
            self.fail()
        elif other < 0.5:
            self.restart()


@pytest.mark.parametrize("seed", range(3))
def test_each_answer_is_that_of_the_version_it_names(
    seed: int,
    model: LlamaForCausalLM,  # noqa: F811
    store: FakeStore,
    serve: Callable[..., Cached],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.gpu_worker.promptcache.encoder.AGAIN_S", 0.0)
    play = Play(random.Random(seed), store, serve, Reference(model))
    play.put()
    for _ in range(STEPS):
        play.step()
    play.put()
    play.ask({play.current})
    play.cached.encoded()
    before = play.hits
    play.ask({play.current})
    assert play.hits == before + 1 and play.served > 5
