"""Prompts in PML over HTTP: served by modules, encoded behind, refused with a reason, and of one version at a time."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from transformers import LlamaForCausalLM

from kvstore.errors import Unavailable
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.promptcache import encoder as encoder_module
from kvstore.gpu_worker.promptcache import quality
from kvstore.gpu_worker.promptcache.encoder import EncodeQueue
from kvstore.gpu_worker.promptcache.plan import Job
from kvstore.gpu_worker.promptcache.quality import RECIPES, Sample
from kvstore.gpu_worker.promptcache.service import PromptCache
from kvstore.gpu_worker.serve.api import Api
from kvstore.gpu_worker.serve.connection import Connection
from kvstore.gpu_worker.serve.metrics import Metrics
from kvstore.gpu_worker.serve.service import Service
from kvstore.gpu_worker.serve.text import Text
from kvstore.keys import ROOT
from kvstore.promptcache import Schema, parse_schema
from kvstore.types import ChunkKey

from .conftest import FakeStore, tiny_llama
from .modular import PROMPT, TRIP
from .test_serve import Served, byte_tokenizer, eventually

T = 16
ASK = {"pml": PROMPT, "temperature": 0, "max_tokens": 5}
SAMPLE = {
    "documents": ["The key is under the mat.", "The cat is out."],
    "question": "Where?",
    "answer": "Under",
}


@dataclass
class Shelf:
    """Schemas, as a daemon keeps them."""

    texts: dict[str, list[str]] = field(default_factory=dict)
    away: bool = False

    def put(self, text: str) -> None:
        self.texts.setdefault(parse_schema(text).name, []).insert(0, text)

    def versions(self, name: str) -> Sequence[Schema]:
        if self.away:
            raise Unavailable("no daemon")
        return [parse_schema(text) for text in self.texts.get(name, [])]


@dataclass
class Cached:
    served: Served
    shelf: Shelf
    cache: PromptCache

    def ask(self, body: dict[str, Any], *, status: int = 200, **headers: str) -> dict[str, Any]:
        response = self.served.ask("POST", "/v1/chat/completions", body, **headers)
        answer: dict[str, Any] = json.load(response)
        assert response.status == status, answer
        return answer

    def encoded(self) -> None:
        """All that was asked for is in the store."""
        eventually(lambda: not self.cache.encoder.queue.waiting and not self.served.engine.live)
        eventually(lambda: self.cache.encoder._idle.is_set())
        assert self.served.engine.flush(30)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(layers=2)


@pytest.fixture
def serve(model: LlamaForCausalLM, tmp_path: Path) -> Iterator[Callable[..., Cached]]:
    made: list[Served] = []

    def start(
        store: FakeStore,
        *,
        forced: bool = True,
        keys: dict[str, str] | None = None,
        shelf: Shelf | None = None,
        verdict_file: Path | None = None,
    ) -> Cached:
        engine = BatchEngine(model, store.connect, pool_chunks=96, chunk_tokens=T, retain=False)
        shelf = shelf or Shelf()
        service = Service(engine)
        text = Text(byte_tokenizer())
        cache = PromptCache(service, text.tokenizer(), shelf, forced=forced, verdict_file=verdict_file)
        app = Api(service, Metrics(engine), text, model="tiny", keys=keys, prompt_cache=cache).app()
        path = tmp_path / f"{len(made)}.sock"
        server = uvicorn.Server(uvicorn.Config(app, uds=str(path), http=Connection, log_config=None))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
        thread.start()
        made.append(Served(engine, server, path, thread))
        eventually(lambda: server.started or not thread.is_alive())
        return Cached(made[-1], shelf, cache)

    yield start
    for served in made:
        for connection in served.open:
            connection.close()
        served.stop()


def test_what_a_prompt_missed_is_a_hit_for_the_next_one(
    store: FakeStore, serve: Callable[..., Cached]
) -> None:
    cached = serve(store)
    cached.shelf.put(TRIP)
    first = cached.ask(ASK)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    said = first["kvstore"]["promptcache"]
    assert (said["schema"], said["stale"]) == ("trip", False)
    cached.encoded()
    second = cached.ask(ASK)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == said["stored_tokens"] > 100
    encoded = cached.cache.encoder.encoded
    cached.ask(ASK)
    cached.encoded()
    assert cached.cache.encoder.encoded == encoded > 0


def test_streams_say_the_same(store: FakeStore, serve: Callable[..., Cached]) -> None:
    cached = serve(store)
    cached.shelf.put(TRIP)
    cached.ask(ASK)
    cached.encoded()
    whole = cached.ask(ASK)["choices"][0]["message"]["content"]
    lines = cached.served.stream(ASK).read().decode().split("\n\n")
    parts = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == whole


def test_a_restart_of_the_worker_finds_them(store: FakeStore, serve: Callable[..., Cached]) -> None:
    cached = serve(store)
    cached.shelf.put(TRIP)
    cached.ask(ASK)
    cached.encoded()
    cached.served.stop()
    again = serve(store, shelf=cached.shelf)
    answer = again.ask(ASK)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    again.encoded()
    assert again.cache.encoder.encoded == 0


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"pml": '<prompt schema="nowhere"/>'}, 400, "nowhere"),
        ({"pml": '<prompt schema="trip"><paris/></prompt>'}, 400, "paris"),
        ({"pml": '<prompt schema="trip"><plan days="more than eight"/></prompt>'}, 400, "length of 8"),
        ({"pml": 5}, 400, "must be text"),
        ({"pml": PROMPT, "messages": [{"role": "user", "content": "x"}]}, 400, "into the prompt"),
        ({"pml": PROMPT, "session_id": "mine"}, 400, "nobody's session"),
        ({"pml": PROMPT, "max_tokens": 1000}, 400, "takes"),
    ],
)
def test_what_is_no_prompt_is_refused(
    body: dict[str, Any], status: int, says: str, store: FakeStore, serve: Callable[..., Cached]
) -> None:
    cached = serve(store)
    cached.shelf.put(TRIP)
    assert says in cached.ask(body, status=status)["error"]["message"]


def test_without_a_daemon_the_answer_is_503(store: FakeStore, serve: Callable[..., Cached]) -> None:
    cached = serve(store)
    cached.shelf.away = True
    cached.ask(ASK, status=503)


def test_while_a_new_beginning_is_encoded_the_old_version_serves(
    store: FakeStore, serve: Callable[..., Cached], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = serve(store)
    cached.shelf.put(TRIP)
    cached.ask(ASK)
    cached.encoded()
    cached.shelf.put(TRIP.replace("You plan trips", "You plan long trips"))
    stale = cached.ask(ASK)
    assert stale["kvstore"]["promptcache"]["stale"]
    assert stale["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    cached.encoded()
    fresh = cached.ask(ASK)["kvstore"]["promptcache"]
    assert not fresh["stale"]
    assert fresh["version"] != stale["kvstore"]["promptcache"]["version"]


def test_an_edited_module_is_served_as_it_is_now(store: FakeStore, serve: Callable[..., Cached]) -> None:
    """The beginning is the same: there is nothing to wait for."""
    cached = serve(store)
    cached.shelf.put(TRIP)
    before = cached.ask(ASK)
    cached.encoded()
    cached.shelf.put(TRIP.replace("olives", "onions"))
    after = cached.ask(ASK)["kvstore"]["promptcache"]
    assert not after["stale"] and after["version"] != before["kvstore"]["promptcache"]["version"]


def test_a_module_that_only_moved_is_no_new_one(store: FakeStore, serve: Callable[..., Cached]) -> None:
    """A longer `plan` moves `food` and the text behind it: they are found where they were encoded, at their new place,
    and only `plan` is encoded again. With the first version put back, all is there as it was."""
    cached = serve(store)
    cached.shelf.put(TRIP)
    cached.ask(ASK)
    cached.encoded()
    before = cached.cache.encoder.encoded
    cached.shelf.put(TRIP.replace("For <param", "For no more than <param"))
    edited = cached.ask(ASK)
    kept = edited["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert kept > 80
    cached.encoded()
    names = [name for (_, name) in store.sessions]
    again = cached.ask(ASK)
    assert (
        again["usage"]["prompt_tokens_details"]["cached_tokens"]
        == again["kvstore"]["promptcache"]["stored_tokens"]
    )
    cached.encoded()
    plan_and_scaffold = 3  # plan, plan/oslo inside of it has moved, and both together
    assert cached.cache.encoder.encoded - before <= plan_and_scaffold, names
    assert [name for (_, name) in store.sessions] == names
    cached.shelf.put(TRIP)
    back = cached.ask(ASK)
    assert (
        back["usage"]["prompt_tokens_details"]["cached_tokens"]
        == back["kvstore"]["promptcache"]["stored_tokens"]
    )


def test_a_module_that_only_the_new_version_has_is_computed(
    store: FakeStore, serve: Callable[..., Cached]
) -> None:
    cached = serve(store)
    cached.shelf.put(TRIP)
    cached.ask(ASK)
    cached.encoded()
    cached.shelf.put(TRIP.replace("You plan", "You make").replace('name="rome"', 'name="siena"'))
    answer = cached.ask({**ASK, "pml": '<prompt schema="trip"><plan days="1"><siena/></plan>?</prompt>'})
    assert not answer["kvstore"]["promptcache"]["stale"]


def test_tenants_of_a_worker_share_no_module(store: FakeStore, serve: Callable[..., Cached]) -> None:
    cached = serve(store, keys={"one": "alice", "two": "bob"})
    cached.shelf.put(TRIP)
    cached.ask(ASK, Authorization="Bearer one")
    cached.encoded()
    theirs = cached.ask(ASK, Authorization="Bearer two")
    assert theirs["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    mine = cached.ask(ASK, Authorization="Bearer one")
    assert mine["usage"]["prompt_tokens_details"]["cached_tokens"] > 100


def test_a_model_is_measured_before_it_serves(
    store: FakeStore, serve: Callable[..., Cached], tmp_path: Path
) -> None:
    """What random weights say of modules is far from what they say of the whole: refused, unless it is allowed."""
    file = tmp_path / "verdict"
    cached = serve(store, forced=False, verdict_file=file)
    cached.shelf.put(TRIP)
    assert "kvctl promptcache verify" in cached.ask(ASK, status=409)["error"]["message"]
    verify = {"texts": [SAMPLE], "kl_max": 1e-9}
    verdict = cached.served.post("/promptcache/verify", verify)
    assert verdict["recipe"] is None and len(verdict["rows"]) == len(RECIPES)
    assert all(row["kl"] > 1e-9 and row["tokens"] == 6 for row in verdict["rows"])
    assert "more quality" in cached.ask(ASK, status=409)["error"]["message"]
    allowed = cached.served.post("/promptcache/verify", {**verify, "kl_max": 100, "perplexity_max": 1e9})
    assert (allowed["recipe"]["method"], allowed["recipe"]["share"]) == ("beginning", 0.0)
    cached.ask(ASK)
    assert json.load(cached.served.ask("GET", "/promptcache"))["verdict"]["rows"]
    # The next worker with these weights knows; one with others does not
    cached.served.stop()
    again = serve(store, forced=False, verdict_file=file, shelf=cached.shelf)
    again.ask(ASK)
    again.served.stop()
    file.write_text(file.read_text().replace('"weights": "', '"weights": "00'))
    other = serve(store, forced=False, verdict_file=file, shelf=cached.shelf)
    other.ask(ASK, status=409)
    other.served.stop()
    file.write_text("no verdict")
    serve(store, forced=False, verdict_file=file, shelf=cached.shelf).ask(ASK, status=409)


def test_a_measurement_says_how_far_it_is(
    store: FakeStore, serve: Callable[..., Cached], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = serve(store, forced=False)
    seen: list[Any] = []
    read = quality._read

    async def reading(*arguments: Any) -> Any:
        seen.append(cached.cache.status["measuring"])
        return await read(*arguments)

    monkeypatch.setattr(quality, "_read", reading)
    samples = [SAMPLE, SAMPLE | {"question": "Why?"}]
    cached.served.post("/promptcache/verify", {"texts": samples, "kl_max": 1e-9})
    places = [(at["number"], at["samples_done"]) for at in seen]
    assert sorted(set(places)) == [(n, done) for n in range(1, len(RECIPES) + 1) for done in (0, 1)]
    assert places == sorted(places)
    assert all((at["recipes"], at["samples"]) == (len(RECIPES), 2) for at in seen)
    assert json.load(cached.served.ask("GET", "/promptcache"))["measuring"] is None


def test_force_serves_whatever_was_found(store: FakeStore, serve: Callable[..., Cached]) -> None:
    cached = serve(store, forced=False)
    cached.shelf.put(TRIP)
    cached.served.post("/promptcache/verify", {"texts": [SAMPLE], "kl_max": 1e-9, "force": True})
    cached.ask(ASK)


@pytest.mark.parametrize("recipe", [{"share": 1.0}, {"deviating": 1.0}, {"share": 0.3, "deviating": 1.0}])
def test_recomputing_all_of_it_is_full_attention(
    recipe: dict[str, float],
    store: FakeStore,
    serve: Callable[..., Cached],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvstore.gpu_worker.promptcache.plan import Recipe

    monkeypatch.setattr(quality, "RECIPES", (Recipe(**recipe),))
    cached = serve(store, forced=False)
    verdict = cached.served.post("/promptcache/verify", {"texts": [SAMPLE]})
    (row,) = verdict["rows"]
    assert row["kl"] < 1e-6 and row["agreement"] == 1 and row["recomputed_share"] > 0.3
    assert recipe.items() <= verdict["recipe"].items()


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ([], "an object"),
        ({"documents": []}, "documents"),
        ({"documents": ["x"], "question": "y"}, "question and answer"),
    ],
)
def test_what_is_no_text_to_measure_is_refused(
    row: object, says: str, store: FakeStore, serve: Callable[..., Cached]
) -> None:
    response = serve(store).served.ask("POST", "/promptcache/verify", {"texts": [row]})
    assert response.status == 400 and says in response.read().decode()


def test_documents_may_be_anything() -> None:
    sample = Sample(("a < b ]]> <module>", "</schema>"), "<q>", "a")
    assert len(list(sample.schema.modules)) == 2


def job(number: int) -> Job:
    key = ChunkKey(bytes([number]) * 32)
    return Job(key, (key,), str(number), None)  # type: ignore[arg-type]


def test_a_module_is_encoded_once_however_many_miss_it() -> None:
    queue = EncodeQueue()
    assert queue.want([job(1), job(2), job(1)], ROOT, 0.0) == 2
    assert queue.want([job(2)], ROOT, 0.0) == 0
    taken = queue.take(0.0)
    assert taken is not None and taken[0].name == "1"
    assert queue.want([job(1)], ROOT, 1.0) == 0, "its save is under way"
    assert queue.want([job(1)], ROOT, encoder_module.AGAIN_S + 1.0) == 1
    assert len(queue.waiting) == 2


def test_the_queue_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_module, "WAITING_MAX", 2)
    queue = EncodeQueue()
    assert queue.want([job(1), job(2), job(3)], ROOT, 0.0) == 2
    assert (queue.dropped, queue.take(0.0) is None) == (1, False)
