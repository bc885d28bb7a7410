"""Clients that mean no good, or do not know better: each gets its answer or an error in OpenAI's words, and nothing of
them stays behind, neither chunks nor leases, connections nor tasks."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from kvstore.gpu_worker.serve import connection, text
from kvstore.gpu_worker.serve.api import Json
from kvstore.gpu_worker.serve.text import Text
from kvstore.gpu_worker.truncation import Truncation

from .conftest import FakeStore
from .conftest import text as tokens
from .test_serve import BOUND_S, HELLO, TEMPLATE, Served, T, byte_tokenizer, events, eventually, model, serve

__all__ = ["model", "serve"]
Serve = Callable[..., Served]
CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def nothing_stays(serve: Serve, store: FakeStore) -> Iterator[Serve]:
    made: list[Served] = []

    def start(*arguments: Any, **options: Any) -> Served:
        made.append(serve(store, *arguments, **{"retain": False} | options))
        return made[-1]

    yield start
    for one in made:
        for client in one.open:
            client.close()
        state = one.server.server_state
        eventually(lambda state=state: not state.connections and not state.tasks)
        eventually(lambda one=one: one.engine.live == 0)
        assert one.engine.flush(BOUND_S)
        # A load that nobody wants any more ends behind; its chunks are free at the next step
        eventually(lambda: store.leases == 0)
        one.post(TEXTS, {"prompt": [1, 2], "max_tokens": 1})
        eventually(lambda one=one: one.engine.pool.used == 0)
        one.engine.check_integrity()
        assert one.health()["status"] == "ok"


def told(response: Any) -> dict[str, Any]:
    """An error as OpenAI's clients expect it."""
    error: dict[str, Any] = json.loads(response.read())["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"], error
    return error


# --------------------------------------------------------------------------------------------------- what cannot be

NASTY: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    2**63,
    -(2**63),
    2**70,
    0.5,
    -0.0,
    1e308,
    5e-324,
    float("nan"),
    float("inf"),
    "",
    "x",
    "1",
    "\x00",
    "\ud83d",
    "\N{GRINNING FACE}" * 50,
    [],
    [[]],
    [None],
    [0],
    [-1],
    [2**63],
    ["x"],
    ["\ud83d"],
    {},
    {"role": "user"},
    {"include_usage": 1},
    [{"role": "user", "content": "x"}],
    [{"role": ["user"], "content": "x"}],
    [{"role": "user", "content": "\ud83d"}],
    [{"role": "system", "content": [{"type": "text", "text": "\ud800"}]}],
    [{"role": "tool", "content": "x"}] * 3,
    [{"content": "x"}],
]
FIELDS = (
    *(
        "messages",
        "prompt",
        "pml",
        "model",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
    ),
    *(
        "seed",
        "stop",
        "stream",
        "stream_options",
        "session_id",
        "cache_salt",
        "ignore_eos",
        "return_token_ids",
        "n",
    ),
    *(
        "truncation",
        "response_format",
        "tools",
        "logit_bias",
        "logprobs",
        "echo",
        "best_of",
        "user",
        "presence_penalty",
    ),
)


@pytest.mark.parametrize("path", [CHAT, TEXTS])
def test_every_field_with_every_kind_of_value(path: str, nothing_stays: Serve) -> None:
    one, choose = nothing_stays(pool_chunks=6), random.Random(path)
    valid = (HELLO if path == CHAT else {"prompt": tokens(5)}) | {"max_tokens": 1}
    for field in FIELDS:
        for value in choose.sample(NASTY, 9):
            response = one.ask("POST", path, json.dumps(valid | {field: value}))
            if response.status != 200:
                expected = 404 if field == "model" and isinstance(value, str) else 400
                assert response.status == expected, (field, value, response.read())
                told(response)
            elif "text/event-stream" in response.headers["content-type"]:
                assert "error" not in json.dumps(events(response)), (field, value)
            else:
                assert json.loads(response.read())["choices"], (field, value)
            one.open.pop().close()


@pytest.mark.parametrize("seed", range(2))
def test_bodies_with_broken_bytes(seed: int, nothing_stays: Serve) -> None:
    """Cut off, doubled, with bits that are others: mostly no JSON, sometimes another request."""
    choose, one = random.Random(seed), nothing_stays(pool_chunks=6)
    whole = json.dumps(
        HELLO | {"max_tokens": 1, "session_id": "s", "stop": ["a"]}, ensure_ascii=False
    ).encode()
    for _ in range(60):
        body = bytearray(whole)
        for _ in range(choose.randint(1, 4)):
            at = choose.randrange(len(body))
            how = choose.random()
            if how < 0.5:
                body[at] = choose.randrange(256)
            elif how < 0.7:
                del body[at:]
                body += b"}"
            else:
                body[at:at] = body[at : at + 5]
        response = one.ask("POST", CHAT, bytes(body))
        if response.status != 200:
            assert response.status == 400, body
            told(response)
        else:
            response.read()
        one.open.pop().close()


def test_what_is_not_there_and_what_fails_is_said_in_the_same_words(
    nothing_stays: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = nothing_stays()
    for status, method, path in (
        (404, "GET", "/nothing"),
        (404, "POST", "/v1/embeddings"),
        (405, "GET", CHAT),
        (405, "DELETE", "/v1/models"),
    ):
        response = one.ask(method, path)
        assert response.status == status and path in told(response)["message"]
    monkeypatch.setattr(one.engine, "add", lambda *_, **__: 1 / 0)
    response = one.ask("POST", CHAT, HELLO)
    assert response.status == 500 and told(response)["type"] == "server_error"
    monkeypatch.undo()


def test_numbers_that_json_has_not_and_halves_of_characters_are_sent_nevertheless() -> None:
    assert Json({"a": "\ud83d\N{GRINNING FACE}"}).body == b'{"a":"\\ud83d\\ud83d\\ude00"}'
    assert Json({"a": "\N{GRINNING FACE}"}).body == '{"a":"\N{GRINNING FACE}"}'.encode()


def test_a_choice_without_a_second_is_no_number_in_an_answer(
    nothing_stays: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All logits but one are -inf: how clear the choice was is infinite, which JSON has no word for."""
    one = nothing_stays()
    forward = one.engine._forward

    def only_one(*arguments: Any) -> Any:
        logits = {request: found.clone() for request, found in forward(*arguments).items()}
        for found in logits.values():
            found[5:] = float("-inf")
            found[:4] = float("-inf")
        return logits

    only_one.renew = forward.renew  # type: ignore[attr-defined]
    monkeypatch.setattr(one.engine, "_forward", only_one)
    answer = one.post(TEXTS, {"prompt": [1, 2, 3], "max_tokens": 2, "return_token_ids": True})
    assert answer["choices"][0]["token_ids"] == [4, 4] and answer["kvstore"]["gaps"] == [None, None]
    streamed = events(
        one.stream({"prompt": [1, 2, 3], "max_tokens": 2, "stream_options": {"include_usage": True}}, TEXTS)
    )
    assert streamed[-1]["kvstore"]["gaps"] == [None, None]
    monkeypatch.undo()


# --------------------------------------------------------------------------------------------- many, slow, and gone


def test_a_thousand_clients_at_once(nothing_stays: Serve) -> None:
    """All are answered: with tokens, or told to come again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip(f"a process may have {hard} open files here")
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (4096 if hard == resource.RLIM_INFINITY else min(4096, hard), hard)
    )
    try:
        one = nothing_stays(sequences_max=16, waiting_max=700)
        body = json.dumps({"prompt": tokens(20), "max_tokens": 2, "temperature": 0, "return_token_ids": True})
        sent = (
            f"POST {TEXTS} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        ).encode()

        async def client() -> bytes:
            while True:
                with suppress(BlockingIOError):  # the listener's queue is full
                    reader, writer = await asyncio.open_unix_connection(str(one.path))
                    break
                await asyncio.sleep(0.01)
            writer.write(sent)
            answer = await reader.read()
            writer.close()
            return answer

        async def clients() -> list[bytes]:
            return await asyncio.wait_for(asyncio.gather(*(client() for _ in range(1000))), 4 * BOUND_S)

        answers = asyncio.run(clients())
        by_status: dict[bytes, list[bytes]] = {}
        for answer in answers:
            head, _, said = answer.partition(b"\r\n\r\n")
            by_status.setdefault(head[9:12], []).append(said)
        assert set(by_status) <= {b"200", b"429"} and len(by_status[b"200"]) >= 700
        chosen = {tuple(json.loads(said)["choices"][0]["token_ids"]) for said in by_status[b"200"]}
        assert len(chosen) == 1, "the same prompt, greedily"
        assert all("too many" in json.loads(said)["error"]["message"] for said in by_status.get(b"429", ()))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_reads_nothing_of_what_he_asked_for_is_hung_up_on(
    nothing_stays: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "WRITE_S", 0.2)
    one = nothing_stays()
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(BOUND_S)
        client.connect(str(one.path))
        sender = threading.Thread(target=ask_for_ever, args=(client,))
        sender.start()
        eventually(lambda: one.server.server_state.connections)
        sender.join(BOUND_S)
        assert not sender.is_alive(), "the worker would have kept all of it"
    eventually(lambda: not one.server.server_state.connections)


def ask_for_ever(client: socket.socket) -> None:
    with suppress(OSError):
        while True:
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 100)


def test_one_connection_too_many_is_told_so(serve: Serve, store: FakeStore) -> None:
    one = serve(store)
    first = one.ask("GET", "/health")
    assert first.status == 200 and first.read()
    one.server.config.limit_concurrency = 1  # of connections that are made from now on
    response = one.ask("GET", "/health")
    assert response.status == 503 and "too many connections" in told(response)["message"]
    assert response.headers["retry-after"] == "1"
    one.server.config.limit_concurrency = 100
    assert one.ask("GET", "/health").status == 200


@pytest.mark.parametrize("when", ["load", "save", "wait"])
def test_who_goes_away_in_mid_load_and_in_mid_save(when: str, nothing_stays: Serve, store: FakeStore) -> None:
    one = nothing_stays(sequences_max=1 if when == "wait" else 4, load_ahead=1)
    prompt = [*tokens(3 * T), 7]
    one.post(TEXTS, {"prompt": prompt, "max_tokens": 1, "session_id": "s"})
    assert one.engine.flush(BOUND_S)
    reached, go = threading.Event(), threading.Event()

    def hold(*_: Any) -> bool:
        reached.set()
        return go.wait(BOUND_S)

    if when == "save":
        store.on_write = hold  # type: ignore[assignment]
        prompt = [*tokens(4 * T, seed=3), 7]
    else:
        store.on_copy = hold
    if when == "wait":
        busy = one.stream({"prompt": tokens(5, seed=4), "max_tokens": 500}, TEXTS)
        assert busy.read(20)
    one.send(TEXTS, {"prompt": prompt, "max_tokens": 200, "stream": True, "session_id": "s"})
    assert reached.wait(BOUND_S)
    one.open.pop().close()
    if when == "wait":
        one.open.pop().close()
    eventually(lambda: one.engine.live == 0)
    go.set()


def test_weights_change_while_answers_stream(nothing_stays: Serve, store: FakeStore) -> None:
    """Nobody's answer breaks off, and what it had before is no chunk of the new epoch."""
    one = nothing_stays()
    bodies = [{"prompt": tokens(40, seed=seed), "max_tokens": 120, "temperature": 0} for seed in range(4)]
    alone = [one.post(TEXTS, body | {"return_token_ids": True})["choices"][0]["token_ids"] for body in bodies]
    streams = [one.stream(body | {"return_token_ids": True}, TEXTS) for body in bodies]
    for epoch in (1, 2, 3):
        one.post("/reset", {"epoch": epoch})
    refused = one.ask("POST", "/reset", {"epoch": 1})
    assert refused.status == 400 and told(refused)["param"] == "epoch"
    for stream, wanted in zip(streams, alone, strict=True):
        got = [
            token for event in events(stream) for choice in event["choices"] for token in choice["token_ids"]
        ]
        assert got == wanted


def test_a_session_of_another_tenant_is_another_session(serve: Serve, store: FakeStore) -> None:
    """Whatever is written into the name."""
    one = serve(store, {"key a": "a", "key b": "b"}, retain=False)
    prompt = tokens(40)
    ask = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
    one.post(TEXTS, ask | {"session_id": "s"}, authorization="Bearer key a")
    assert one.engine.flush(BOUND_S)
    before = dict(store.sessions)
    for name in ("s", "a/s", "../a/s", "/s", "a\x00/s", "b/../a/s"):
        for headers in ({}, {"x-session-id": "a/s"}):
            body = ask | ({} if headers else {"session_id": name})
            answer = one.post(TEXTS, body, authorization="Bearer key b", **headers)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] <= (
                0 if name == "s" and not headers else 48
            )
            assert one.engine.flush(BOUND_S)
    assert all(store.sessions[name] == info for name, info in before.items()), "only its own tenant writes it"
    assert {name.partition("/")[0] for _, name in store.sessions} == {"a", "b"}


# ------------------------------------------------------------------------------------------------ long conversations


def talk(count: int, seed: int = 0) -> list[dict[str, str]]:
    choose = random.Random(seed)
    said = [{"role": "system", "content": "be kind"}] if seed % 2 else []
    for number in range(count):
        said.append({"role": "user", "content": "u" * choose.randint(0, 9) + str(number)})
        if choose.random() < 0.9:
            said.append({"role": "assistant", "content": "a" * choose.randint(0, 9)})
    return said


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}</s>"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [TEMPLATE, CHATML, INST])
@pytest.mark.parametrize("seed", range(6))
def test_turns_of_long_conversations_are_those_of_short_ones(
    template: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by marks, they are what is found by writing the conversation up to each."""
    words, messages = (
        Text(byte_tokenizer(), template=template),
        talk(random.Random(seed).randint(2, 30), seed),
    )
    found = words.turns(messages)
    monkeypatch.setattr(text, "EXACT_MAX", 1000)
    assert found == words.turns(messages) and found is not None
    monkeypatch.setattr(text, "EXACT_MAX", 1)
    assert found == words.turns(messages)


def test_a_conversation_of_thousands_of_messages_is_written_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not once for each: others wait for the tokenizer."""
    words, written = Text(byte_tokenizer()), [0]
    render = words._rendered

    def count(messages: Any, **options: Any) -> str:
        written[0] += 1
        return render(messages, **options)

    monkeypatch.setattr(words, "_rendered", count)
    turns = words.turns(talk(1000, seed=1))
    assert turns is not None and len(turns.begins) == 1000 and written[0] < 16
    backwards = "{% for m in messages|reverse %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    other = Text(byte_tokenizer(), template=backwards)
    assert other.turns(talk(1000)) is None


def test_a_mark_in_what_somebody_says_is_no_mark() -> None:
    words = Text(byte_tokenizer())
    messages = talk(20)
    messages[3]["content"] = text.MARK * 3
    assert words.turns(messages) is not None


def test_a_very_long_conversation_is_cut_and_answered(nothing_stays: Serve) -> None:
    one = nothing_stays(truncation=Truncation(256))
    answer = one.chat({"messages": talk(600, seed=1), "max_tokens": 2, "temperature": 0})
    assert answer["usage"]["prompt_tokens_details"]["cut_tokens"] > 5000
    refused = one.ask("POST", CHAT, {"messages": talk(600), "truncation": "disabled"})
    assert refused.status == 400 and told(refused)["param"] == "messages"
