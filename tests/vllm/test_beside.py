"""vLLM's other tiers beside ours, in real engines: files, whose names know nothing of weights, and KV of other engines
by NIXL (P2P)."""

from __future__ import annotations

import importlib.util
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .conftest import BLOCK, Daemon, Engine, make_model, prompt, whole_blocks
from .test_tier import tiering

Launch = Callable[..., Engine]
Same = Callable[..., None]


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    daemon = Daemon(folder / "beside", dram_bytes=64 << 20)
    yield daemon
    daemon.stop()


def test_what_follows_files_of_other_weights_is_not_found(
    daemon: Daemon, launch_engine: Launch, folder: Path
) -> None:
    """vLLM's tier of files finds KV of the weights that this path had before. What an engine answers then is its own
    affair; nobody else shall hear of it."""
    path = make_model(folder / "replaced", seed=1)
    files = {"type": "fs", "root_dir": str(folder / "files")}
    beginning, whole = prompt(5000, 4 * BLOCK), prompt(5000, 4 * BLOCK) + prompt(5001, 3 * BLOCK + 5)

    def launch(name: str, *others: dict[str, str]) -> Engine:
        config = tiering(daemon.run_dir, others=others)
        return launch_engine(name, None, model=str(path), kv_transfer_config=config)

    old = launch("files-old", files)
    old.generate([*beginning, 5])
    old.forget()
    assert old.end() == 0
    shutil.rmtree(path)
    make_model(path, seed=2)

    new = launch("files-new", files)
    (answer,) = new.generate(whole)
    counts = new.counts()
    assert answer["cached"] == 4 * BLOCK, "it loads files of other weights: this test is about that"
    assert (counts["blocks_foreign"], counts["blocks_saved"]) == (3, 0)
    assert new.end() == 0

    alone = launch("files-alone")
    (wanted,) = alone.generate(whole, salt="alone")
    alone.generate([*beginning, 5])
    alone.forget()
    for _ in range(2):
        (found,) = alone.generate(whole)
        assert found["tokens"] == wanted["tokens"]
        alone.forget()
    assert found["cached"] == whole_blocks(whole), "once it was computed by these weights, it is there"
    assert alone.end() == 0


@pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="there is no nixl here: pip install nixl"
)
def test_a_decode_engine_gets_its_kv_over_p2p_or_from_the_store(
    daemon: Daemon, launch_engine: Launch, same: Same
) -> None:
    engines, ports = {}, {}
    for role in ("prefill", "decode"):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            ports[role] = int(listener.getsockname()[1])
        p2p = {"type": "p2p", "host": "127.0.0.1", "port": ports[role]}
        config = tiering(daemon.run_dir, others=[p2p], salt=f"p2p {role}")  # the store joins them only below
        engines[role] = launch_engine(f"p2p-{role}", None, kv_transfer_config=config)
    prefill, decode = engines["prefill"], engines["decode"]
    prompts = [prompt(5100, 200), prompt(5101, 97), prompt(5102, 513)]
    answers = []
    for number, tokens in enumerate(prompts):
        name = f"handed {number}"
        prefill.generate(tokens, max_tokens=1, handed={"remote_decoder": {"kv_request_id": name}})
        source = {"kv_request_id": name, "remote_host": "127.0.0.1", "remote_port": ports["prefill"]}
        with prefill.serving():
            answers += decode.generate(tokens, handed={"remote_prefiller": source})
    same(prompts, answers, exactly=False)
    assert [answer["cached"] for answer in answers] == [whole_blocks(tokens) for tokens in prompts]
    counts = decode.counts()
    assert (counts["blocks_loaded"], counts["blocks_saved"]) == (0, 0), "of weights that nobody compared"
    # What the prefill engine has computed is in the store, for when nobody is asked over NIXL.
    assert prefill.counts()["blocks_saved"] == sum(len(tokens) // BLOCK for tokens in prompts)
    prefill.forget()
    restored = prefill.generate(*prompts)
    same(prompts, restored, exactly=False)
    assert [answer["cached"] for answer in restored] == [whole_blocks(tokens) for tokens in prompts]
    # And the decode engine saves what it computes by itself.
    (alone,) = decode.generate(prompt(5103, 200))
    same([prompt(5103, 200)], [alone])
    assert decode.counts()["blocks_saved"] == 200 // BLOCK
    # An engine whose peer has gone before it waits for ever to be rid of what it would have told it: vLLM's own.
    with prefill.serving():
        assert decode.end() == 0
    assert prefill.end() == 0
