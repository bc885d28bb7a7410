"""A schema that is edited, removed and put back while prompts of it run and worker and daemon are killed: each answer
is that of the version it names, token by token, and that version was the current one while it was asked.

All of a prompt's text is its schema's beginning and one module, so that modules have the bits of full attention: there
is one right answer for each version.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, LlamaForCausalLM

from kvstore.client.schemas import put_schema, remove_schema
from kvstore.errors import NotFound
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.promptcache import HuggingFaceTokenizer, Layout, parse_prompt, parse_schema
from kvstore.promptcache.schema import text_digest

from .ssd_tools import SMALL_SSD
from .test_promptcache_worker import client_of, encoded  # noqa: F401: fixtures
from .test_worker import BOUND_S, WorkerProcess

PROMPT = '<prompt schema="live"><m/>What do you know?</prompt>'
NEW = 6
STEPS = 24
pytestmark = [pytest.mark.timeout(12 * BOUND_S), pytest.mark.slow]


def schema_of(version: int) -> str:
    words = " ".join(str(random.Random(version).randrange(10**6)) for _ in range(40))
    module = f'<module name="m">{version}: {words}</module>'
    return f'<schema name="live"><system>Answer.</system><user>{module}</user></schema>'


class Reference:
    """What the model says to a version's prompt, with full attention and nothing stored."""

    def __init__(self, folder: Path) -> None:
        self._engine = BatchEngine(LlamaForCausalLM.from_pretrained(folder), None, pool_chunks=32)
        self._tokenizer = HuggingFaceTokenizer(AutoTokenizer.from_pretrained(folder))

    def answer(self, version: int) -> list[int]:
        schema = parse_schema(schema_of(version))
        placement = Layout(schema, self._tokenizer).place(parse_prompt(PROMPT, schema))
        assert placement.positions == list(range(len(placement.positions)))
        return list(self._engine.turn("", placement.tokens, NEW).tokens)


class Play:
    def __init__(
        self,
        seed: int,
        start_daemon: Callable[[], Any],
        start_worker: Callable[[], WorkerProcess],
        reference: Reference,
    ) -> None:
        self.chance = random.Random(seed)
        self.start_daemon, self.start_worker = start_daemon, start_worker
        self.daemon, self.worker = start_daemon(), start_worker()
        self.reference = reference
        self.expected: dict[str, list[int]] = {}
        self.current = ""
        """Digest of the version that is served; "": the schema is removed."""
        self.served = self.hits = 0

    def put(self) -> None:
        version = self.chance.randrange(5)
        digest = text_digest(schema_of(version)).hex()
        if digest not in self.expected:
            self.expected[digest] = self.reference.answer(version)
        with client_of(self.daemon) as client:
            put_schema(client, schema_of(version).encode())
        self.current = digest

    def remove(self) -> None:
        with client_of(self.daemon) as client, contextlib.suppress(NotFound):
            remove_schema(client, "live")
        self.current = ""

    def ask(self, *, allowed: set[str]) -> None:
        status, answer = self.worker.post(
            "/v1/chat/completions",
            {"pml": PROMPT, "max_tokens": NEW, "temperature": 0, "return_token_ids": True},
        )
        if status == 400:
            assert "" in allowed and "there is no schema live" in str(answer), answer
            return
        assert status == 200, answer
        about = answer["kvstore"]["promptcache"]
        assert about["version"] in allowed and not about["stale"], (about, allowed)
        assert answer["choices"][0]["token_ids"] == self.expected[about["version"]], about
        self.served += 1
        self.hits += answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 100

    def ask_while(self, change: Callable[[], None]) -> None:
        """Three at once, one of them before."""
        failures: list[BaseException] = []
        allowed = {self.current}

        def asking() -> None:
            try:
                self.ask(allowed=allowed)
            except BaseException as error:
                failures.append(error)

        # What may be current meanwhile is known before anybody asks
        allowed |= {text_digest(schema_of(version)).hex() for version in range(5)} | {""}
        threads = [threading.Thread(target=asking) for _ in range(3)]
        for number, thread in enumerate(threads):
            thread.start()
            if number == 0:
                change()
        for thread in threads:
            thread.join(BOUND_S)
            assert not thread.is_alive(), "an answer never came"
        assert not failures, failures

    def ask_in_vain(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            self.worker.post("/v1/chat/completions", {"pml": PROMPT, "max_tokens": NEW, "temperature": 0})

    def kill_worker(self) -> None:
        asking = threading.Thread(target=self.ask_in_vain)
        asking.start()
        asking.join(self.chance.random() / 4)
        self.worker.kill()
        asking.join(BOUND_S)
        self.worker = self.start_worker()

    def restart_daemon(self) -> None:
        encoded(self.worker)
        (self.daemon.kill if self.chance.random() < 0.5 else self.daemon.stop)()
        self.daemon = self.start_daemon()

    def step(self) -> None:
        what = self.chance.choices(
            ("ask", "put", "put while asked", "remove", "settle", "kill worker", "restart daemon"),
            (8, 4, 4, 1, 3, 1, 1),
        )[0]
        match what:
            case "ask":
                self.ask(allowed={self.current})
            case "put":
                self.put()
            case "put while asked":
                if self.current:
                    self.ask_while(self.put)
            case "remove":
                self.ask_while(self.remove)
            case "settle":
                encoded(self.worker)
            case "kill worker":
                self.kill_worker()
            case "restart daemon":
                self.restart_daemon()


@pytest.mark.parametrize("seed", range(2))
def test_each_answer_is_that_of_the_version_it_names(
    seed: int,
    folder: Path,
    start_daemon: Callable[..., Any],
    start_worker: Callable[..., WorkerProcess],
    run_dir: Path,
) -> None:
    settings = {**SMALL_SSD, "ssd_dir": run_dir.parent / "ssd"}
    play = Play(seed, lambda: start_daemon(**settings), start_worker, Reference(folder))
    play.put()
    for _ in range(STEPS):
        play.step()
    # In the end a hit is what it was to be
    play.put()
    play.ask(allowed={play.current})
    encoded(play.worker)
    before = play.hits
    play.ask(allowed={play.current})
    assert play.hits == before + 1 and play.served > 3
