"""The worker as a server, over a unix socket: answers, streams, clients that go away, tenants, overload, the end."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from kvstore.gpu_worker import options
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.serve import api, connection
from kvstore.gpu_worker.serve.api import Api
from kvstore.gpu_worker.serve.connection import Connection
from kvstore.gpu_worker.serve.metrics import Metrics
from kvstore.gpu_worker.serve.service import Service
from kvstore.gpu_worker.serve.text import Detokenizer, StopStrings, Text
from kvstore.gpu_worker.truncation import Truncation, Turns

from ...waiting import eventually as eventually
from .conftest import FakeStore, text, tiny_llama

BOUND_S = 60.0
T = 16
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
HELLO = {"messages": [{"role": "user", "content": "Grüß Gott!"}], "temperature": 0, "max_tokens": 24}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: of random tokens most are no whole characters."""
    vocabulary = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE)


@dataclass
class Served:
    engine: BatchEngine
    server: uvicorn.Server
    path: Path
    thread: threading.Thread
    open: list[http.client.HTTPConnection] = field(default_factory=list)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> http.client.HTTPResponse:
        """The answer, whose body is still to be read."""
        connection = http.client.HTTPConnection("worker")
        self.open.append(connection)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(BOUND_S)
        connection.sock.connect(str(self.path))
        sent = body if isinstance(body, (str, bytes)) else json.dumps(body)
        connection.request(method, path, sent if body is not None else None, headers)
        return connection.getresponse()

    def post(self, path: str, body: Any, **headers: str) -> dict[str, Any]:
        response = self.ask("POST", path, body, **headers)
        answer: dict[str, Any] = json.load(response)
        assert response.status == 200, answer
        return answer

    def chat(self, body: dict[str, Any], **headers: str) -> dict[str, Any]:
        return self.post("/v1/chat/completions", body, **headers)

    def stream(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> http.client.HTTPResponse:
        response = self.ask("POST", path, body | {"stream": True})
        assert response.status == 200 and response.headers["content-type"].startswith("text/event-stream")
        return response

    def hang_up(self) -> None:
        """The client whose request came last goes away."""
        self.open.pop().close()

    def send(self, path: str, body: Any) -> None:
        """A request whose answer nobody has waited for yet."""
        connection = http.client.HTTPConnection("worker")
        self.open.append(connection)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(self.path))
        connection.request("POST", path, json.dumps(body))

    def health(self) -> dict[str, Any]:
        health: dict[str, Any] = json.load(self.ask("GET", "/health"))
        return health

    def metrics(self) -> dict[str, float]:
        lines = self.ask("GET", "/metrics").read().decode().splitlines()
        return {
            name.removeprefix("kvstore_worker_"): float(value)
            for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        }

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(BOUND_S)
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(layers=2)


@pytest.fixture
def serve(model: LlamaForCausalLM, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def start(
        store: FakeStore | None = None, keys: dict[str, str] | None = None, drain_s: int = 30, **options: Any
    ) -> Served:
        settings = {"pool_chunks": 64, "chunk_tokens": T} | options
        engine = BatchEngine(model, store.connect if store else None, **settings)
        metrics = Metrics(engine)
        app = Api(
            Service(engine, ended=metrics.ended), metrics, Text(byte_tokenizer()), model="tiny", keys=keys
        ).app()
        path = tmp_path / f"{len(made)}"
        config = uvicorn.Config(
            app, uds=str(path), http=Connection, log_config=None, timeout_graceful_shutdown=drain_s
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
        thread.start()
        made.append(Served(engine, server, path, thread))
        eventually(lambda: server.started or not thread.is_alive())
        return made[-1]

    yield start
    for served in made:
        for client in served.open:
            client.close()
        served.stop()


def events(response: http.client.HTTPResponse) -> list[dict[str, Any]]:
    lines = [line for line in response.read().decode().splitlines() if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_an_answer_is_the_same_whole_and_in_pieces(
    serve: Callable[..., Served], model: LlamaForCausalLM
) -> None:
    one = serve()
    options = HELLO | {"return_token_ids": True}
    whole = one.chat(options)
    (choice,) = whole["choices"]
    prompt = byte_tokenizer()("<user>Grüß Gott!<assistant>")["input_ids"]
    plain = BatchEngine(model, pool_chunks=64, chunk_tokens=T)
    assert choice["token_ids"] == list(plain.turn("", prompt, 24).tokens)
    assert choice["message"]["content"] == byte_tokenizer().decode(choice["token_ids"])
    assert (choice["finish_reason"], whole["object"]) == ("length", "chat.completion")
    usage = whole["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), 24)
    pieces = events(one.stream(options | {"stream_options": {"include_usage": True}}))
    assert pieces[0]["choices"][0]["delta"]["role"] == "assistant"
    said = [piece["choices"][0] for piece in pieces if piece["choices"]]
    assert "".join(each["delta"]["content"] for each in said) == choice["message"]["content"]
    assert [token for each in said for token in each.get("token_ids", [])] == choice["token_ids"]
    assert [each["finish_reason"] for each in said] == [None] * (len(said) - 1) + ["length"]
    assert pieces[-1]["usage"]["prompt_tokens"] == len(prompt) and not pieces[-1]["choices"]
    assert pieces[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) // T * T


def test_text_and_tokens_are_completed(serve: Callable[..., Served]) -> None:
    one = serve()
    options = {"temperature": 0, "max_tokens": 5, "return_token_ids": True}
    by_text = one.post("/v1/completions", {"prompt": "abc"} | options)["choices"][0]
    tokens = byte_tokenizer()("abc")["input_ids"]
    assert one.post("/v1/completions", {"prompt": tokens} | options)["choices"][0] == by_text
    assert events(one.stream({"prompt": tokens} | options, "/v1/completions"))[-1]["choices"][0]["token_ids"]
    (served,) = json.load(one.ask("GET", "/v1/models"))["data"]
    assert (served["id"], served["max_model_len"]) == ("tiny", 1024)


def test_a_stop_string_ends_an_answer_and_its_request(serve: Callable[..., Served]) -> None:
    one = serve()
    full = one.chat(HELLO | {"max_tokens": 60})["choices"][0]["message"]["content"]
    stop = full[12:14]
    assert full.count(stop) == 1
    for answer in (
        one.chat(HELLO | {"max_tokens": 900, "stop": stop})["choices"][0],
        one.chat(HELLO | {"max_tokens": 900, "stop": ["never!", stop]})["choices"][0],
    ):
        assert (answer["message"]["content"], answer["finish_reason"]) == (full[:12], "stop")
    eventually(lambda: one.engine.live == 0)
    assert one.engine.counters["computed_tokens"] < 600


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_request(stream: bool, serve: Callable[..., Served]) -> None:
    one = serve(sequences_max=1)
    body = HELLO | {"max_tokens": 900}
    if stream:
        assert one.stream(body).read(30)
    else:
        one.send("/v1/chat/completions", body)
        eventually(lambda: one.engine.counters["steps"] > 2)
    waiting = Served(one.engine, one.server, one.path, one.thread)
    waiting.send("/v1/chat/completions", body)  # and one that never ran
    eventually(lambda: (one.engine.running, one.engine.waiting) == (1, 1))
    waiting.hang_up()
    eventually(lambda: (one.engine.running, one.engine.waiting) == (1, 0))
    one.hang_up()
    eventually(lambda: one.engine.live == 0)
    assert one.engine.pool.used == 0
    assert one.engine.counters["computed_tokens"] < 900
    assert one.metrics()['requests_finished_total{finish="abort"}'] == 2
    assert one.chat(HELLO)["usage"]["completion_tokens"] == 24


def test_too_many_are_told_to_come_back(serve: Callable[..., Served]) -> None:
    one = serve(sequences_max=1, waiting_max=1)
    one.stream(HELLO | {"max_tokens": 900})
    one.send("/v1/chat/completions", HELLO | {"max_tokens": 900})
    eventually(lambda: one.engine.live == 2)
    refused = one.ask("POST", "/v1/chat/completions", HELLO)
    assert refused.status == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
    assert json.load(refused)["error"]["type"] == "rate_limit_error"
    assert one.metrics()["requests_rejected_total"] == 1
    for _ in range(4):
        one.hang_up()
    eventually(lambda: one.engine.live == 0)
    assert one.chat(HELLO)["choices"]


def test_a_session_is_named_by_field_or_header_or_not_at_all(
    serve: Callable[..., Served], store: FakeStore
) -> None:
    prompt = text(3 * T + 5)
    for name, reused in (("field", 3 * T + 5), ("header", 3 * T + 5), ("", 3 * T)):
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
        headers = {"X-Session-Id": name} if name == "header" else {}
        body |= {"session_id": name} if name == "field" else {}
        one = serve(store)
        one.post("/v1/completions", body, **headers)
        assert one.post("/flush", {"timeout_s": BOUND_S})["flushed"]
        two = serve(store)
        longer = two.post("/v1/completions", body | {"prompt": [*prompt, 7, 8]}, **headers)
        assert longer["kvstore"]["cached_tokens"] == {"hbm": 0, "dram": reused, "ssd": 0}, name
        assert longer["kvstore"]["loaded_bytes"] > 0
        store.chunks.clear()
        store.sessions.clear()


def test_tenants_share_nothing(serve: Callable[..., Served], store: FakeStore) -> None:
    keys = {"key-a": "a", "key-b": "b", "key-admin": "admin"}
    prompt = text(3 * T + 5)
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "session_id": "s"}
    one = serve(store, keys=keys)

    def reused(key: str) -> int:
        answer = one.post("/v1/completions", body, Authorization=f"Bearer {key}")
        count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    assert [reused("key-a"), reused("key-b")] == [0, 0]
    body["prompt"] = [*prompt, 7]
    assert [reused("key-a"), reused("key-b")] == [3 * T + 5] * 2
    for path, sent in (("/flush", {}), ("/reset", {})):
        assert one.ask("POST", path, sent, Authorization="Bearer key-a").status == 403
    assert one.post("/flush", {"timeout_s": BOUND_S}, Authorization="Bearer key-admin")["flushed"]
    assert {name for _, name in store.sessions} == {"a/s", "b/s"}
    assert len(store.chunks) == 2 * (3 + 2)  # two tails each
    for header in ({}, {"Authorization": "Bearer no"}, {"Authorization": "key-a"}):
        assert one.ask("POST", "/v1/completions", body, **header).status == 401
    assert one.ask("GET", "/health").status == one.ask("GET", "/metrics").status == 200
    salted = [body | {"cache_salt": salt} for salt in ("x", "x", "y")]
    counts = [one.post("/v1/completions", each, Authorization="Bearer key-a") for each in salted]
    assert [each["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 for each in counts] == [0, 1, 0]


def test_a_reset_forgets_what_was_computed_before(serve: Callable[..., Served], store: FakeStore) -> None:
    one = serve(store)
    body = {"prompt": text(3 * T + 5), "max_tokens": 1, "temperature": 0}
    assert [one.post("/v1/completions", body)["kvstore"]["cached_tokens"]["hbm"] for _ in "12"] == [0, 3 * T]
    one.stream(HELLO | {"max_tokens": 900}).read(30)
    assert one.post("/reset", {"epoch": 3})["reset"]
    assert one.post("/v1/completions", body)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    response = one.ask("POST", "/reset", {"epoch": 2})
    assert response.status == 400 and "must be at least 3" in json.load(response)["error"]["message"]


def test_a_step_that_breaks_fails_who_was_live_and_no_other(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = serve()
    forward = one.engine._forward
    broken = [True]

    def breaking(pieces: Any) -> Any:
        if broken:
            raise ZeroDivisionError("out of memory, say")
        return forward(pieces)

    monkeypatch.setattr(one.engine, "_forward", breaking)
    for number in (1, 2, 3):
        response = one.ask("POST", "/v1/chat/completions", HELLO)
        assert response.status == 500 and "out of memory" in json.load(response)["error"]["message"]
        assert one.ask("GET", "/health").status == (503 if number == 3 else 200)
    broken.clear()
    assert one.chat(HELLO)["choices"]
    assert one.engine.pool.used == 0 and one.ask("GET", "/health").status == 200


def test_an_engine_that_breaks_down_says_so_and_nobody_waits(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = serve()
    monkeypatch.setattr(one.engine, "abort", lambda number: 1 / 0)
    one.stream(HELLO | {"max_tokens": 900}).read(30)
    other = one.stream(HELLO | {"max_tokens": 900, "seed": 1})
    one.open[-2].close()
    assert "the engine broke down" in other.read().decode()
    for _ in range(2):
        response = one.ask("POST", "/v1/chat/completions", HELLO)
        assert response.status == 500 and "broke down" in json.load(response)["error"]["message"]
    assert one.ask("POST", "/reset", {}).status == 500
    health = one.ask("GET", "/health")
    assert health.status == 503 and "broke down" in json.load(health)["status"]


REFUSED: dict[str, Any] = {
    "messages": [{}, {"messages": []}, {"messages": "hello"}],
    "messages[0].role": [{"messages": [{"role": "king", "content": "x"}]}, {"messages": [5]}],
    "messages[0].content": [
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    ],
    "n": [HELLO | {"n": 2}],
    "tools": [HELLO | {"tools": [{}]}],
    "max_tokens": [HELLO | {"max_tokens": 0}, HELLO | {"max_tokens": "1"}, HELLO | {"max_tokens": True}],
    "temperature": [HELLO | {"temperature": -1}, HELLO | {"temperature": "hot"}],
    "top_p": [HELLO | {"top_p": 0}, HELLO | {"top_p": 1.5}],
    "stop": [HELLO | {"stop": [""]}, HELLO | {"stop": 5}, HELLO | {"stop": ["a"] * 17}],
    "stream": [HELLO | {"stream": "yes"}],
    "session_id": [HELLO | {"session_id": "x" * 257}, HELLO | {"session_id": 5}],
    "response_format": [HELLO | {"response_format": {"type": "json_object"}}],
    "presence_penalty": [HELLO | {"presence_penalty": 0.5}],
    "frequency_penalty": [HELLO | {"frequency_penalty": -2}],
    "repetition_penalty": [HELLO | {"repetition_penalty": 1.2}],
    "min_p": [HELLO | {"min_p": 0.1}],
    "min_tokens": [HELLO | {"min_tokens": 2}],
    "stop_token_ids": [HELLO | {"stop_token_ids": [3]}],
    "guided_choice": [HELLO | {"guided_choice": ["yes", "no"]}],
}
NEUTRAL = {
    **{"n": 1, "logprobs": False, "top_logprobs": 0, "presence_penalty": 0.0, "frequency_penalty": 0},
    **{"repetition_penalty": 1.0, "min_p": 0, "min_tokens": 0, "stop_token_ids": [], "logit_bias": {}},
}


def test_what_cannot_be_served_is_refused_by_name(serve: Callable[..., Served]) -> None:
    one = serve()
    for param, bodies in REFUSED.items():
        for body in bodies:
            response = one.ask("POST", "/v1/chat/completions", body)
            answer = json.load(response)
            assert (response.status, answer["error"]["param"]) == (400, param), body
    too_long = HELLO | {"max_tokens": 5000}
    no_text = {"messages": [{"role": "user", "content": "half \ud83d"}]}
    refused_by_template = {"messages": [{"role": "tool", "content": "x"}]}
    for body in (too_long, no_text, refused_by_template):
        assert one.ask("POST", "/v1/chat/completions", body).status == 400, body
    for raw in ("", "{", "[]", "5", "[" * 100_000, b"\xff"):
        assert one.ask("POST", "/v1/completions", raw).status == 400, raw
    assert one.ask("POST", "/v1/completions", b"x" * ((8 << 20) + 1)).status == 413
    assert one.ask("GET", "/v1/chat/completions").status == 405
    assert one.ask("GET", "/nothing").status == 404
    assert one.engine.counters["requests"] == 0
    assert one.chat(HELLO | {"unknown field": 1, "user": "me", **NEUTRAL})["choices"]


def test_another_models_request_is_not_answered_by_this_one(serve: Callable[..., Served]) -> None:
    one = serve()
    for path in ("/v1/chat/completions", "/v1/completions"):
        body = {"prompt": "Hello", "max_tokens": 1} if path == "/v1/completions" else HELLO
        response = one.ask("POST", path, body | {"model": "larger"})
        error = json.load(response)["error"]
        assert (response.status, error["param"]) == (404, "model")
        assert "model is 'larger': this worker serves 'tiny'" in error["message"]
        for served in ("tiny", "", None):
            assert one.post(path, body | {"model": served})["choices"]
    response = one.ask("POST", "/v1/completions", {"pml": "<prompt/>"})
    assert (response.status, json.load(response)["error"]["param"]) == (400, "pml")


def test_a_prompt_that_is_empty_is_shown_with_what_it_must_be(serve: Callable[..., Served]) -> None:
    response = serve().ask("POST", "/v1/completions", {"prompt": []})
    assert (
        "prompt is []: must be a text or a list of token ids, not empty"
        in json.load(response)["error"]["message"]
    )


def test_a_worker_that_ends_lets_requests_finish_and_saves(
    serve: Callable[..., Served], store: FakeStore
) -> None:
    one = serve(store)
    running = one.stream(HELLO | {"max_tokens": 300, "session_id": "s"})
    assert running.read(30)
    one.server.should_exit = True
    rest = running.read().decode()
    assert rest.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in rest
    one.stop()
    assert {name for _, name in store.sessions} == {"s"} and store.leases == 0 and store.closed == 1


def test_many_who_wait_for_a_flush_hold_up_nobody(
    serve: Callable[..., Served], store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that wait are few: the end of the worker needs one, too."""
    let_go = threading.Event()
    monkeypatch.setattr(store, "on_write", lambda: let_go.wait(BOUND_S) and None)
    one = serve(store)
    one.chat(HELLO | {"session_id": "s"})
    for _ in range(40):  # more than there are threads
        one.send("/flush", {"timeout_s": 600})
    answer = json.load(one.ask("POST", "/flush", {"timeout_s": 0}))
    assert answer["flushed"] is False
    for client in one.open:  # all have gone away
        client.close()
    state = one.server.server_state
    eventually(lambda: not state.tasks)
    let_go.set()
    one.stop()


def test_a_worker_that_ends_waits_no_longer_than_it_was_told(serve: Callable[..., Served]) -> None:
    one = serve(drain_s=0)
    running = one.stream(HELLO | {"max_tokens": 990 - 27})
    assert running.read(30)
    one.stop()
    assert one.engine.counters["computed_tokens"] < 990


def test_metrics_tell_what_was_done(serve: Callable[..., Served], store: FakeStore) -> None:
    one = serve(store)
    for _ in range(2):
        one.chat(HELLO)
    one.post("/flush", {"timeout_s": BOUND_S})
    seen = one.metrics()
    assert seen['requests_finished_total{finish="length"}'] == 2
    assert seen['tokens_total{source="hbm"}'] == one.engine.counters["adopted_tokens"] > 0
    assert seen['tokens_total{source="computed"}'] == one.engine.counters["computed_tokens"]
    assert seen['saved_chunks_total{outcome="saved"}'] == len(store.chunks) > 0
    assert seen["time_to_first_token_seconds_count"] == seen["request_seconds_count"] == 2
    chunks = [seen[f'pool_chunks{{state="{state}"}}'] for state in ("held", "idle", "free")]
    assert sum(chunks) == 64 and chunks[1] > 0
    assert seen["store_connected"] == 1
    assert one.health() == {
        "status": "ok",
        "running": 0,
        "waiting": 0,
        "store": "connected",
        "sharing": "on",
        "canary": "ok",
    }


# ------------------------------------------------------------------------------------------------------- text, options


@pytest.mark.parametrize("seed", range(5))
def test_pieces_are_whole_characters_and_together_the_text(seed: int) -> None:
    tokenizer = byte_tokenizer()
    characters = tokenizer("Straße €5 — 漢字 🙂")["input_ids"]
    tokens = [*characters, *text(50, seed=seed)]
    made = Detokenizer(tokenizer)
    pieces = [made.add(token) for token in tokens]
    assert "🙂" in pieces and not any("\ufffd" in piece for piece in pieces[: len(characters)])
    assert "".join(pieces) + made.end() == tokenizer.decode(tokens)


def test_stop_strings_are_found_across_pieces() -> None:
    for size in range(1, 9):
        stops = StopStrings(["END", "EN!", "zzz"])
        whole = "so ENENEND and more"
        said = "".join(stops.add(whole[at : at + size]) for at in range(0, len(whole), size))
        assert (said + stops.end(), stops.hit) == ("so ENEN", True)
        stops = StopStrings(["END"])
        assert stops.add("an EN") + stops.add("") == "an " and stops.end() == "EN" and not stops.hit


def test_options_that_cannot_be_are_named(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for content, what in (
        ("", "no key there"),
        ("a", "line 1: must be a tenant"),
        ("# a comment\na/b key", "line 2: must be a tenant"),
        ("a key\nb key", "line 2: the key of two tenants"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=re.escape(what)):
            options.keys_of(path)
    path.write_text("a k1\n\nb k2\na k3\n")
    assert options.keys_of(path) == {"k1": "a", "k2": "b", "k3": "a"}
    assert options.bytes_of("64m") == 64 << 20
    for wrong in ("", "0", "-1", "5X", "1.5G"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
            options.bytes_of(wrong)


def test_a_request_that_is_taken_after_a_failed_step_is_answered(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked for while the step ran that fails."""
    one = serve()
    forward = one.engine._forward
    stepping, asked = threading.Event(), threading.Event()

    def breaks_once(pieces: Any) -> Any:
        if stepping.is_set():
            return forward(pieces)
        stepping.set()
        assert asked.wait(BOUND_S)
        raise ZeroDivisionError("once")

    monkeypatch.setattr(one.engine, "_forward", breaks_once)
    one.send("/v1/chat/completions", HELLO)
    assert stepping.wait(BOUND_S)
    submit = Service._submit_command

    def told(self: Service, what: Callable[[], Any]) -> Any:
        found = submit(self, what)
        asked.set()
        return found

    monkeypatch.setattr(Service, "_submit_command", told)
    assert one.chat(HELLO | {"max_tokens": 5})["usage"]["completion_tokens"] == 5


HUGE = "9" * 400
DEEP = "[" * 450 + "]" * 450


def test_values_of_any_size_and_depth_are_refused_not_failed_at(serve: Callable[..., Served]) -> None:
    one = serve()
    hello = json.dumps(HELLO)[:-1]
    for name in (
        "temperature",
        "top_p",
        "n",
        "stream_options",
        "logprobs",
        "max_tokens",
        "stop",
        "session_id",
    ):
        for value in (HUGE, "NaN", "Infinity", DEEP, "[1]", '"x"', '"' + "x" * 100_000 + '"'):
            if (name, value) in {("stop", '"x"'), ("session_id", '"x"')}:
                continue
            response = one.ask("POST", "/v1/chat/completions", f'{hello}, "{name}": {value}}}')
            told = response.read()
            assert response.status == 400 and len(told) < 1000, (
                name,
                value[:20],
                response.status,
                told[:200],
            )
    for value in (HUGE, "NaN", "-1", "true", DEEP):
        for path, field_ in (("/flush", "timeout_s"), ("/reset", "epoch")):
            if path == "/flush" and value == HUGE:
                continue
            response = one.ask("POST", path, f'{{"{field_}": {value}}}')
            assert response.status == 400, (path, value[:20], response.read())
    assert one.ask("POST", "/flush", f'{{"timeout_s": {HUGE}}}').status == 400
    assert one.engine.counters["requests"] == 0 and one.health()["status"] == "ok"


def raw(one: Served, sent: bytes) -> bytes:
    """What the worker says to this, and nothing else, until it hangs up."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(BOUND_S)
        client.connect(str(one.path))
        client.sendall(sent)
        return client.makefile("rb").read()


def test_who_never_says_what_he_wants_is_hung_up_on(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.05)
    monkeypatch.setattr(api, "BODY_S", 0.05)
    one = serve()
    assert raw(one, b"") == b"" == raw(one, b"POST /v1/chat/compl")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    assert raw(one, head + b"{").startswith(b"HTTP/1.1 408")
    # Who is answered for longer than that, and who comes back, is not
    assert len(events(one.stream(HELLO | {"max_tokens": 300}))) > 10
    first = one.open[-1]
    eventually(lambda: one.engine.live == 0)
    first.request("GET", "/health")
    assert first.getresponse().status == 200


def test_of_many_requests_nothing_is_left(
    serve: Callable[..., Served], store: FakeStore, model: LlamaForCausalLM
) -> None:
    """Some are read to their end, some hung up on at any moment, some refused; all at once."""
    one = serve(store, pool_chunks=40, sequences_max=3, waiting_max=6, retain=False)
    expected = one.post("/v1/completions", {"prompt": text(40), "max_tokens": 8, "temperature": 0})
    told: list[int] = []

    def client(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(10):
            body = {
                "prompt": text(40, seed=choose.choice((1, 2, 3))),
                "max_tokens": choose.choice((1, 8, 100)),
            }
            body |= {"temperature": 0, "session_id": f"s{choose.randrange(3)}"}
            how = choose.random()
            with socket.socket(socket.AF_UNIX) as line:
                line.settimeout(BOUND_S)
                line.connect(str(one.path))
                asking = http.client.HTTPConnection("worker")
                asking.sock = line
                asking.request("POST", "/v1/completions", json.dumps(body | {"stream": how < 0.5}))
                if how < 0.2:
                    continue  # hung up on before it is answered
                response = asking.getresponse()
                told.append(response.status)
                if how < 0.4:
                    response.read(choose.randrange(1, 300))
                    continue
                answer = response.read()
                if (
                    response.status == 200
                    and how >= 0.5
                    and (body["max_tokens"], body["prompt"]) == (8, text(40))
                ):
                    assert json.loads(answer)["choices"] == expected["choices"]

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
    for each in clients:
        each.start()
    for each in clients:
        each.join(BOUND_S)
    assert not any(each.is_alive() for each in clients) and {*told} <= {200, 429} and 200 in told
    eventually(lambda: one.engine.live == 0 and not one.server.server_state.tasks)
    one.post("/flush", {"timeout_s": 30})
    assert one.engine.pool.used == 0 and store.leases == 0
    one.engine.check_integrity()
    finished = {name: count for name, count in one.metrics().items() if name.startswith("requests_finished")}
    assert sum(finished.values()) == one.engine.counters["requests"], finished


# ------------------------------------------------------------------------------------------------ long conversations


@pytest.mark.parametrize("system", [True, False])
def test_turns_are_where_the_template_writes_them(system: bool) -> None:
    talk = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    talk += [{"role": "user", "content": "efg"}]
    front = [{"role": "system", "content": "xyz"}] if system else []
    head = len("<system>xyz") if system else 0
    text_ = Text(byte_tokenizer())
    turns = text_.turns([*front, *talk])
    second = head + len("<user>ab<assistant>cd")
    ends = (head + len("<user>ab<assistant>"), second + len("<user>efg<assistant>"))
    assert turns == Turns(head, (head, second), ends)
    assert len(text_.chat([*front, *talk])) == turns.ends[-1]


def test_a_template_that_writes_something_first_has_a_head_without_a_system_message() -> None:
    template = "{% if messages[0].role != 'system' %}<system>be kind{% endif %}" + TEMPLATE
    talk = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    turns = Text(byte_tokenizer(), template=template).turns([*talk, {"role": "user", "content": "e"}])
    assert turns is not None and turns.head == len("<system>be kind") == turns.begins[0]
    assert turns.begins[1] == turns.head + len("<user>ab<assistant>cd")
    backwards = "{% for m in messages|reverse %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert Text(byte_tokenizer(), template=backwards).turns([*talk, *talk[:1]]) is None


def test_a_conversation_goes_on_beyond_the_window(serve: Callable[..., Served], store: FakeStore) -> None:
    served = serve(store, truncation=Truncation(256), retain=False)
    messages: list[dict[str, str]] = [{"role": "system", "content": "You answer."}]
    cut = []
    for number in range(10):
        messages.append({"role": "user", "content": f"{number} is a number, I say, what is the next?"})
        body = {"messages": messages, "temperature": 0, "max_tokens": 8, "session_id": "s"}
        answer = served.chat(body)
        usage = answer["usage"]
        cut.append(usage["prompt_tokens_details"].get("cut_tokens", 0))
        assert usage["prompt_tokens"] <= 192
        whole = len(Text(byte_tokenizer()).chat(messages))
        assert usage["prompt_tokens"] + cut[-1] == whole
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        assert served.post("/flush", {"timeout_s": 30})["flushed"]
    assert cut == sorted(cut) and cut[-1] > 0
    figures = served.metrics()
    assert figures["requests_cut_total"] == sum(each > 0 for each in cut)
    assert figures["cut_tokens_total"] == sum(cut)
    refused = served.ask("POST", "/v1/chat/completions", body | {"truncation": "disabled", "max_tokens": 900})
    assert refused.status == 400
    assert served.ask("POST", "/v1/chat/completions", HELLO | {"truncation": "perhaps"}).status == 400
    long = {"prompt": "a text of its own " * 40, "temperature": 0, "max_tokens": 4}
    assert served.post("/v1/completions", long)["usage"]["prompt_tokens_details"]["cut_tokens"] > 0


def test_no_short_text_waits_for_a_long_one(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megabytes take seconds."""
    monkeypatch.setattr(api, "LONG_CHARACTERS", 50)
    begun, end = threading.Event(), threading.Event()
    encode = Text.encode

    def slowly(text: Text, prompt: str) -> list[int]:
        if len(prompt) > 50:
            begun.set()
            assert end.wait(BOUND_S)
        return encode(text, prompt)

    monkeypatch.setattr(Text, "encode", slowly)
    one = serve()
    one.send("/v1/completions", {"prompt": "x" * 60, "max_tokens": 1})
    try:
        assert begun.wait(BOUND_S)
        assert one.post("/v1/completions", {"prompt": "short", "max_tokens": 1})["choices"]
    finally:
        end.set()


@pytest.mark.parametrize("chat", [True, False])
def test_what_cannot_fit_is_refused_before_it_is_read(
    chat: bool, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = serve()
    words = "x" * (1 + one.engine.tokens_max * Text(byte_tokenizer()).characters_per_token)
    monkeypatch.setattr(Text, "_tokens", lambda *_, **__: pytest.fail("it was read"))
    body = {"messages": [{"role": "user", "content": words}]} if chat else {"prompt": words}
    response = one.ask("POST", f"/v1/{'chat/' if chat else ''}completions", body)
    error = json.load(response)["error"]
    assert response.status == 400 and error["param"] == ("messages" if chat else "prompt")
    assert f"the prompt has {len(words)} characters" in error["message"]
