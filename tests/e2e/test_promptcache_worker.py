"""Prompts of modules end to end: kvctl, daemon, worker, the examples of docs/promptcache.md, what a kill leaves."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvstore.client import Client, connect
from kvstore.client.schemas import put_schema
from kvstore.promptcache.tokenizer import CHATML

from ..small_models import tiny_llama
from .ssd_tools import SMALL_SSD, settled_ssd
from .test_worker import BOUND_S, WorkerProcess, eventually

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "promptcache"
NAMES = ("travel", "code", "persona", "rag", "retrieval")
pytestmark = [pytest.mark.timeout(6 * BOUND_S), pytest.mark.slow]  # several processes each that import torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that reads bytes."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(layers=3).save_pretrained(folder)
    vocabulary = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made, chat_template=CHATML).save_pretrained(folder)
    return folder


@pytest.fixture
def start_worker(folder: Path, run_dir: Path) -> Iterator[Callable[..., WorkerProcess]]:
    started: list[WorkerProcess] = []

    def start(*arguments: str) -> WorkerProcess:
        where = run_dir.with_name(f"w{len(started)}.sock")
        options = ("--no-retain", "--promptcache", "force", *arguments)
        started.append(WorkerProcess(folder, run_dir, where, options))
        return started[-1]

    yield start
    for worker in started:
        worker.close()


def client_of(daemon: Any) -> Client:
    return connect(str(daemon.run_dir), timeout_s=BOUND_S)


def put_examples(daemon: Any) -> None:
    with client_of(daemon) as client:
        for name in NAMES:
            put_schema(client, (EXAMPLES / f"{name}.xml").read_bytes())


def ask(worker: WorkerProcess, name: str, **headers: str) -> dict[str, Any]:
    pml = (EXAMPLES / f"{name}_prompt.xml").read_text()
    body = {"pml": pml, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    status, answer = worker.post("/v1/chat/completions", body, **headers)
    assert status == 200, answer
    return answer


def tokens(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def chunks_stored(daemon: Any) -> int:
    with client_of(daemon) as client:
        return sum(space.chunks for space in client.stats().namespaces)


@pytest.fixture
def two_tenants(start_worker: Callable[..., WorkerProcess], tmp_path: Path) -> WorkerProcess:
    """A worker of Alice and Bob, with their keys."""
    keys = tmp_path / "keys"
    keys.write_text("alice one\nbob two\nadmin three\n")
    return start_worker(f"--api-keys={keys}")


ALICE, BOB, ADMIN = ({"Authorization": f"Bearer {key}"} for key in ("one", "two", "three"))


def ask_in_vain(worker: WorkerProcess, name: str) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        ask(worker, name)


def cached(answer: dict[str, Any]) -> tuple[int, int]:
    """Tokens that were not computed, and those that the store can have."""
    found = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found, answer["kvstore"]["promptcache"]["stored_tokens"]


def encoded(worker: WorkerProcess, **headers: str) -> None:
    def done() -> bool:
        connection = worker.connection()
        try:
            connection.request("GET", "/promptcache", headers=headers)
            return b'"waiting":0' in connection.getresponse().read()
        finally:
            connection.close()

    eventually(done)
    status, reply = worker.post("/flush", {"timeout_s": BOUND_S}, **headers)
    assert status == 200 and reply["flushed"], reply


def test_the_examples_are_hits_the_second_time_and_after_a_restart(
    daemon: Any, start_worker: Callable[..., WorkerProcess]
) -> None:
    put_examples(daemon)
    worker = start_worker()
    for name in NAMES:
        assert cached(ask(worker, name))[0] < 66  # what another one had, of their beginnings
    encoded(worker)
    answers = {name: ask(worker, name) for name in NAMES}
    for answer in answers.values():
        found, stored = cached(answer)
        assert found == stored > 50
    worker.kill()
    again = start_worker()
    for name, answer in answers.items():
        other = ask(again, name)
        assert cached(other) == cached(answer)
        assert other["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]


def test_a_restart_of_the_daemon_keeps_modules_and_schemas(
    start_daemon: Callable[..., Any], start_worker: Callable[..., WorkerProcess], run_dir: Path
) -> None:
    settings = {**SMALL_SSD, "ssd_dir": run_dir.parent / "ssd"}
    daemon = start_daemon(**settings)
    put_examples(daemon)
    worker = start_worker()
    ask(worker, "code")
    encoded(worker)
    expected = ask(worker, "code")
    worker.close()
    daemon.stop()
    start_daemon(**settings)
    found = ask(start_worker(), "code")
    assert cached(found) == cached(expected)
    assert found["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_a_killed_encoding_leaves_nothing_visible(
    chunk: int, daemon: Any, start_worker: Callable[..., WorkerProcess]
) -> None:
    """It dies while a module is copied to where it is saved: the beginning, or a module of several chunks."""
    put_examples(daemon)
    worker = start_worker("--stop-at", f"encode:{chunk}")
    # The answer may come before the worker stands still, or never.
    asking = threading.Thread(target=ask_in_vain, args=(worker, "code"), daemon=True)
    asking.start()
    worker.wait_until_stopped()
    with client_of(daemon) as client:
        before = client.stats()
    worker.kill()
    with client_of(daemon) as client:
        eventually(lambda: not client.stats().gauges["reservations"])
        after = client.stats()
        assert sum(space.chunks for space in after.namespaces) == sum(
            space.chunks for space in before.namespaces
        )
    again = start_worker()
    first = ask(again, "code")
    found, stored = cached(first)
    assert found < stored  # of what was not saved whole there is nothing
    encoded(again)
    second = ask(again, "code")
    assert cached(second) == (stored, stored)


def test_what_dies_while_it_encodes_leaves_whole_modules_and_no_others(
    start_daemon: Callable[..., Any], start_worker: Callable[..., WorkerProcess], run_dir: Path
) -> None:
    """Worker and daemon are killed at once. What was durable before is a hit; what was being encoded is a miss."""
    settings = {**SMALL_SSD, "ssd_dir": run_dir.parent / "ssd"}
    daemon = start_daemon(**settings)
    put_examples(daemon)
    worker = start_worker()
    ask(worker, "code")
    encoded(worker)
    expected = ask(worker, "code")
    with client_of(daemon) as client:
        settled_ssd(client)
    worker.close()

    worker = start_worker(
        "--stop-at", "encode:2"
    )  # the second chunk of the first module: the beginning is saved
    asking = threading.Thread(target=ask_in_vain, args=(worker, "rag"), daemon=True)
    asking.start()
    worker.wait_until_stopped()
    daemon.kill()
    worker.kill()

    start_daemon(**settings)
    again = start_worker()
    found = ask(again, "code")
    assert cached(found) == cached(expected)
    assert tokens(found) == tokens(expected)
    found, stored = cached(ask(again, "rag"))
    assert found < stored
    encoded(again)
    assert cached(ask(again, "rag")) == (stored, stored)


def test_two_tenants_with_the_same_schema_share_nothing(daemon: Any, two_tenants: WorkerProcess) -> None:
    put_examples(daemon)
    worker = two_tenants
    ask(worker, "rag", **ALICE)
    encoded(worker, **ADMIN)
    hers = ask(worker, "rag", **ALICE)
    assert cached(hers)[0] == cached(hers)[1] > 50
    alone = chunks_stored(daemon)
    assert cached(ask(worker, "rag", **BOB))[0] == 0
    encoded(worker, **ADMIN)
    his = ask(worker, "rag", **BOB)
    assert cached(his) == cached(hers)
    assert tokens(his) == tokens(hers)
    assert chunks_stored(daemon) == 2 * alone


def test_an_edited_schema_never_serves_a_module_of_before(daemon: Any, two_tenants: WorkerProcess) -> None:
    """Alice has modules of the version before, Bob has none: what they get is the same. Both texts of the edited module
    have the same length, so that only their keys tell them apart."""
    worker = two_tenants
    before = (EXAMPLES / "rag.xml").read_text()
    edited = before.replace("after four years", "after nine weeks")
    assert edited != before and len(edited) == len(before)

    def current(text: str) -> None:
        with client_of(daemon) as client:
            put_schema(client, text.encode())

    current(before)
    ask(worker, "rag", **ALICE)
    encoded(worker, **ADMIN)
    first = ask(worker, "rag", **ALICE)
    current(edited)
    found, stored = cached(ask(worker, "rag", **ALICE))
    assert 0 < found < stored == cached(first)[1], "only what was not edited is there"
    encoded(worker, **ADMIN)
    second = ask(worker, "rag", **ALICE)
    ask(worker, "rag", **BOB)
    encoded(worker, **ADMIN)
    expected = ask(worker, "rag", **BOB)
    assert cached(second) == cached(expected) == (stored, stored)
    assert tokens(second) == tokens(expected) != tokens(first)
    current(before)
    assert tokens(ask(worker, "rag", **ALICE)) == tokens(first)
