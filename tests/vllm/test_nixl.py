"""vLLM's NIXL connector beside ours, in both orders: a prefill engine hands its KV to a decode engine over NIXL (UCX on
loopback), and both save and load through the store."""

from __future__ import annotations

import importlib.util
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import BLOCK, Daemon, Engine, prompt, transfer_config, whole_blocks

Same = Callable[..., None]
Launch = Callable[..., Engine]
PATIENT = {"lookup_ms": 10_000, "load_ms": 10_000, "save_ms": 20_000}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="there is no nixl here: pip install nixl"
)


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    daemon = Daemon(folder / "nixl", dram_bytes=64 << 20)
    yield daemon
    daemon.stop()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def beside_nixl(daemon: Daemon, role: str, *, ours_first: bool, **ours: Any) -> dict[str, Any]:
    nixl = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
    mine = transfer_config(daemon.run_dir, **PATIENT, **ours)
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [mine, nixl] if ours_first else [nixl, mine]},
    }


def forget(engine: Engine) -> None:
    """NIXL keeps what it hands over until the other engine has it, and hears of that in a step."""
    assert engine.ask(flush=300.0)["flushed"]
    deadline = time.monotonic() + 120
    while not engine.ask(forget=True)["forgotten"]:
        assert time.monotonic() < deadline
        engine.generate([5, 6, 7], max_tokens=1)


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_decode_engine_gets_its_kv_over_nixl_or_from_the_store(
    daemon: Daemon, launch_engine: Launch, same: Same, monkeypatch: pytest.MonkeyPatch, ours_first: bool
) -> None:
    engines = {}
    for role in ("kv_producer", "kv_consumer"):
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
        engines[role] = launch_engine(
            f"nixl-{ours_first}-{role}",
            None,
            kv_transfer_config=beside_nixl(
                daemon,
                role,
                ours_first=ours_first,
                salt=f"{ours_first}-{role}",  # the store joins them only below
            ),
        )
    prefill, decode = engines["kv_producer"], engines["kv_consumer"]
    prompts = [prompt(1, 200), prompt(2, 97), prompt(3, 513)]
    answers = []
    for tokens in prompts:
        (asked,) = prefill.generate(tokens, max_tokens=1, handed={"do_remote_decode": True})
        assert asked["handed"]["do_remote_prefill"] and asked["handed"]["kvstore_blocks"]
        answers += decode.generate(tokens, handed=asked["handed"])
    same(prompts, answers, exactly=False)
    hits = decode.ask(metrics=True)["vllm:external_prefix_cache_hits"]
    assert hits >= sum(map(whole_blocks, prompts))
    counts = decode.counts()
    assert counts["hit_tokens"] == counts["blocks_saved"] == 0, (
        "it came over NIXL, of weights nobody compared"
    )
    # What the prefill engine has computed is in the store, for when NIXL has nothing.
    assert prefill.counts()["blocks_saved"] == sum(len(tokens) // BLOCK for tokens in prompts)
    forget(prefill)
    restored = prefill.generate(*prompts)
    same(prompts, restored, exactly=False)
    assert [answer["cached"] for answer in restored] == [whole_blocks(tokens) for tokens in prompts]
    # And the decode engine saves what it computes by itself.
    (alone,) = decode.generate(prompt(4, 200))
    same([prompt(4, 200)], [alone])
    assert decode.counts()["blocks_saved"] == 200 // BLOCK
    assert prefill.end() == decode.end() == 0
