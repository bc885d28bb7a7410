"""The gateway in front of two `vllm serve` that share a daemon, and the block hashes that it makes itself."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from kvstore.client import ActionKind, Client, connect
from kvstore.client.prompts import prompt_keys
from kvstore.gpu_worker.connectors.vllm.identity import hash_protocol
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.scheduler.gateway.app import Settings, create_app
from kvstore.v1 import stats_pb2, stats_pb2_grpc

from .conftest import BLOCK, BOUND_S, Daemon, prompt
from .test_serve import Server, wait_until


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("cache_salt", ["", "alice"])
@pytest.mark.parametrize("seed", [None, "7"])
def test_keys_of_a_prompt_are_vllms_own(
    algorithm: str, cache_salt: str, seed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    hash_block = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(hash_block)
    tokens = [0, 23, 24, 255, 256, 65_535, 65_536, 200_000, *prompt(1, 200)]
    request: Any = SimpleNamespace(
        block_hashes=[],
        num_tokens=len(tokens),
        all_token_ids=tokens,
        mm_features=[],
        lora_request=None,
        cache_salt=cache_salt or None,
        prompt_embeds=None,
        prompt_is_token_ids=None,
    )
    theirs = kv_cache_utils.get_request_block_hasher(BLOCK, hash_block)(request)
    environment = {} if seed is None else {"PYTHONHASHSEED": seed}
    spec = NamespaceSpec(
        "m",
        b"w",
        "vllm-0.32.0/x",
        BLOCK,
        (GroupSpec("kv", 64),),
        hash_protocol=hash_protocol(algorithm, environment),
    )
    assert prompt_keys(spec, b"", tokens, cache_salt=cache_salt) == theirs


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    place = folder / "gateway"
    (place / "ssd").mkdir(parents=True)
    daemon = Daemon(
        place, ssd_dir=place / "ssd", ssd_bytes=256 << 20, ssd_slab_bytes=16 << 20, durable_within_ms=300
    )
    yield daemon
    daemon.stop()


@pytest.fixture(scope="module")
def servers(words: Path, daemon: Daemon) -> Iterator[list[Server]]:
    started: list[Server] = []
    try:
        for number in range(2):
            place = daemon.folder / f"server {number}"
            place.mkdir()
            started.append(Server(words, daemon.run_dir, place))
        yield started
    finally:
        for server in started:
            server.kill()


@pytest.fixture
def gateway(servers: list[Server], daemon: Daemon) -> Iterator[str]:
    urls = tuple(f"http://127.0.0.1:{server.port}" for server in servers)
    app = create_app(Settings(urls, str(daemon.run_dir), slots=1))
    runs = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, ws="none"))
    thread = threading.Thread(target=runs.run, daemon=True)
    thread.start()
    wait_until(lambda: runs.started)
    yield f"http://127.0.0.1:{runs.servers[0].sockets[0].getsockname()[1]}"
    runs.should_exit = True
    thread.join(BOUND_S)
    assert not thread.is_alive()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with connect(str(daemon.run_dir)) as client:
        yield client


def ask(url: str, asked: Any, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": asked, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(
        f"{url}/v1/completions", json={**body, "return_token_ids": True, **more}, timeout=BOUND_S
    )
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def streamed(url: str, tokens: list[int]) -> Any:
    """More than anybody waits for."""
    body = {"model": "tiny", "prompt": tokens, "max_tokens": 900, "ignore_eos": True, "stream": True}
    return httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=BOUND_S)


def explained(client: Client, keys: list[Any]) -> list[Any]:
    rows = client.unary(
        stats_pb2_grpc.StatsStub, "ListNamespaces", stats_pb2.ListNamespacesRequest()
    ).namespaces
    ask_of = stats_pb2.ExplainRequest(namespace_id=max(row.namespace_id for row in rows), keys=keys)
    return list(client.unary(stats_pb2_grpc.StatsStub, "Explain", ask_of).chunks)


def stored(client: Client, keys: list[Any]) -> bool:
    return all(chunk.tiers for chunk in explained(client, keys))


def metric(url: str, name: str) -> float:
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        label, _, value = line.rpartition(" ")
        if label.partition("{")[0] == name:
            return float(value)
    raise AssertionError(name)


def test_what_waits_is_told_ahead_and_answered_as_the_server_alone_answers(
    servers: list[Server], gateway: str, client: Client
) -> None:
    tokens = prompt(1, 5 * BLOCK + 3)
    (alone,) = servers[0].generate(tokens)
    model = client.only_model()
    keys = client.prompt_keys(model, tokens)
    assert len(keys) == 5
    wait_until(lambda: stored(client, keys))  # under the keys that were made here

    found: list[dict[str, Any]] = []
    text = " ".join(f"w{token}" for token in tokens)
    waits = [
        threading.Thread(target=lambda asked=asked: found.append(ask(gateway, asked)))
        for asked in (tokens, text)
    ]
    with contextlib.ExitStack() as busy:  # both servers, until the daemon knows of those that wait
        lines = [
            busy.enter_context(streamed(gateway, prompt(number, 40))).iter_lines() for number in (2, 3)
        ]  # who drops such an iterator closes its answer
        assert all(next(each).startswith("data: ") for each in lines)
        for thread in waits:
            thread.start()
        wait_until(lambda: metric(gateway, "attnstore_gateway_hints_told_total") >= 2)
        assert all(chunk.needed for chunk in explained(client, keys))
    for thread in waits:
        thread.join(BOUND_S)
    assert [answer["choices"][0]["token_ids"] for answer in found] == [alone["tokens"]] * 2
    wait_until(lambda: client.stats().gauges["queued_jobs"] == 0)


def test_who_goes_away_frees_its_server(servers: list[Server], gateway: str) -> None:
    with streamed(gateway, prompt(4, 40)) as answer:
        assert next(answer.iter_lines()).startswith("data: ")
    urls = [f"http://127.0.0.1:{server.port}" for server in servers]
    wait_until(lambda: sum(metric(url, "vllm:num_requests_running") for url in urls) == 0)
    for number in range(2):  # one after the other, and each finds a slot
        ask(gateway, prompt(5 + number, 40))
    assert metric(gateway, "attnstore_gateway_waiting") == 0


def test_orders_of_agents_come_through_vllm_serve(gateway: str, client: Client) -> None:
    tokens = prompt(7, 3 * BLOCK + 1)
    hints = {
        "protocol_version": "1",
        "actions": [
            {"action_id": "tool", "action_type": "tool_call", "payload": {"eta_s": 40}},
            {"action_id": "system", "action_type": "pin", "payload": {"ttl_s": 60}},
        ],
    }
    ask(gateway, tokens, kv_transfer_params={"kv_hints": hints}, session_id="agent")
    keys = client.prompt_keys(client.only_model(), tokens)
    wait_until(lambda: all(len(chunk.hints) == 2 for chunk in explained(client, keys)))
    kinds = {hint.kind for chunk in explained(client, keys) for hint in chunk.hints}
    assert kinds == {ActionKind.EXPECT, ActionKind.PIN}
    answer = httpx.post(
        f"{gateway}/v1/kv/presence", json={"prompt": tokens, "eta_s": 5}, timeout=BOUND_S
    ).json()
    assert answer["result"] in ("accepted", "deferred") and answer["chunks"] == 3
