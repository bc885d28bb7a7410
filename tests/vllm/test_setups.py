"""Set-ups that people run: prefill and decode engines of one node, speculative decoding, prompts in pieces, another
connector beside ours. Whatever is loaded, the answer is that of an engine alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import BLOCK, Daemon, Engine, prompt, restorable, transfer_config, whole_blocks
from .test_tier import tiering

Same = Callable[..., None]
Launch = Callable[..., Engine]
PATIENT = {"lookup_ms": 10_000, "load_ms": 10_000}


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    daemon = Daemon(folder / "setups", dram_bytes=64 << 20)
    yield daemon
    daemon.stop()


def test_a_decode_engine_goes_on_where_a_prefill_engine_stopped(
    daemon: Daemon, launch_engine: Launch, same: Same
) -> None:
    """Token for token, bit for bit; and what it decodes, the prefill engine finds in the next turn."""
    roles = transfer_config(daemon.run_dir, **PATIENT)
    prefill = launch_engine("prefill", None, kv_transfer_config={**roles, "kv_role": "kv_both"})
    decode = launch_engine("decode", None, kv_transfer_config=roles)
    prompts = [prompt(1, 200), prompt(2, 97), prompt(3, 513)]
    answers = []
    for tokens in prompts:
        (asked,) = prefill.generate(tokens, max_tokens=1, handed={"do_remote_decode": True})
        assert asked["handed"] == {"kvstore_blocks": len(tokens) // BLOCK}
        answers += decode.generate(tokens, handed=asked["handed"])
    same(prompts, answers)
    assert [answer["cached"] for answer in answers] == [whole_blocks(tokens) for tokens in prompts]
    assert decode.counts()["hit_tokens"] == sum(map(whole_blocks, prompts))

    (told,) = decode.generate(prompts[0], max_tokens=100)
    following = prompts[0] + told["tokens"] + prompt(4, 9)
    decode.forget()
    prefill.forget()
    before = prefill.counts()["hit_tokens"]
    (answer,) = prefill.generate(following)
    assert prefill.counts()["hit_tokens"] - before == (200 + 100 - 1) // BLOCK * BLOCK
    assert answer["finish"] == "length"
    assert prefill.end() == decode.end() == 0


@pytest.mark.parametrize("compute_or_load", [False, True])
def test_speculative_decoding(
    daemon: Daemon, launch_engine: Launch, control: Engine, compute_or_load: bool
) -> None:
    """Drafts out of the prompt, which repeats itself: accepted tokens are saved, rejected ones in no block."""
    engine = launch_engine(
        f"speculative-{compute_or_load}",
        daemon.run_dir,
        {**PATIENT, "compute_or_load": compute_or_load, "salt": str(compute_or_load)},
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
        max_num_batched_tokens=96,  # prompts in pieces
    )
    for seed, length in ((10, 60), (11, 60), (13, 64)):
        tokens = prompt(seed, length) * 3
        assert control.ask(forget=True)["forgotten"]
        (wanted,) = control.generate(tokens, max_tokens=40)
        first, again = engine.generate(tokens, tokens, max_tokens=40)
        engine.forget()
        (restored,) = engine.generate(tokens, max_tokens=40)
        following = tokens + wanted["tokens"] + prompt(12, 5)
        engine.forget()
        (last,) = engine.generate(following)
        for output in (first, again, restored):
            assert output["tokens"] == wanted["tokens"]
        assert last["tokens"] == control.generate(following)[0]["tokens"]
        if not compute_or_load:
            assert restored["cached"] == restorable(tokens)
            assert last["cached"] == (len(tokens) + 40 - 1) // BLOCK * BLOCK
    assert engine.ask(flush=300.0)["learnt"] is compute_or_load
    assert engine.end() == 0


def test_the_tier_learns_what_computing_takes(daemon: Daemon, launch_engine: Launch, same: Same) -> None:
    """vLLM tells a tier nothing of its steps; its caller has them in hand."""
    engine = launch_engine(
        "tier-learns", None, kv_transfer_config=tiering(daemon.run_dir, compute_or_load=True)
    )
    prompts = [prompt(30, 200), prompt(31, 513)]
    for _ in range(2):
        same(prompts, engine.generate(*prompts), exactly=False)
        engine.forget()
    assert engine.ask(flush=300.0)["learnt"]
    assert engine.end() == 0


@pytest.mark.parametrize("ours_first", [True, False])
def test_beside_another_connector(
    daemon: Daemon, launch_engine: Launch, folder: Path, same: Same, ours_first: bool
) -> None:
    """vLLM's ExampleConnector, which keeps whole prompts in files and loads them inside the step."""
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / f"files-{ours_first}")},
    }
    ours = transfer_config(daemon.run_dir, **PATIENT, salt=f"beside {ours_first}")
    both = [ours, other] if ours_first else [other, ours]
    engine = launch_engine(
        f"beside-{ours_first}",
        None,
        kv_transfer_config={
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": both},
        },
    )
    prompts = [prompt(20, 200), prompt(21, 97)]
    outputs: list[dict[str, Any]] = engine.generate(*prompts)
    same(prompts, outputs)
    engine.forget()
    outputs = engine.generate(*prompts)
    assert all(output["cached"] for output in outputs)
    same(prompts, outputs, exactly=False)
    assert engine.end() == 0


@pytest.mark.parametrize("way", ["connector", "tier"])
def test_embeddings(daemon: Daemon, launch_engine: Launch, words: Path, way: str) -> None:
    """A model that answers with a vector: of the prompt's last token, behind blocks that were restored."""
    settings: dict[str, Any] = {**PATIENT, "salt": f"embeddings {way}"}
    options = {"runner": "pooling", "max_num_batched_tokens": 96, "enable_prefix_caching": True}
    options |= {"model": str(words), "skip_tokenizer_init": False}  # vLLM asks for a tokenizer for scores
    if way == "tier":
        config = tiering(daemon.run_dir, **settings)
        engine = launch_engine("embeddings-tier", None, kv_transfer_config=config, **options)
    else:
        engine = launch_engine("embeddings", daemon.run_dir, settings, **options)
    prompts = [prompt(40, 200), prompt(41, 97), prompt(42, 2 * BLOCK), prompt(43, 3)]

    def embedded(tokens: list[int], **more: Any) -> dict[str, Any]:
        (output,) = engine.ask(generate=[{"tokens": tokens, "embed": True, **more}])["outputs"]
        return dict(output)

    wanted = [embedded(tokens, salt="alone") for tokens in prompts]
    assert [output["cached"] for output in wanted] == [0] * 4
    for attempt in range(2):
        for tokens, expected in zip(prompts, wanted, strict=True):
            output = embedded(tokens)
            assert output["data"] == pytest.approx(expected["data"], abs=1e-5)
            assert bool(output["cached"]) == (attempt == 1 and len(tokens) > BLOCK)
        engine.forget()
    assert engine.end() == 0
