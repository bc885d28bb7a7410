"""The store below vLLM's own host memory: one request at a time, fp32. Whatever becomes of it, the answer is that of an
engine without any connector. vLLM's offloading worker refuses a CPU, so the copies are `cpu_spec`'s."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import BLOCK, Daemon, Engine, prompt, whole_blocks

ROW_BYTES = 4 * 2 * BLOCK * 2 * 64 * 4
Same = Callable[..., None]
Tiered = Callable[..., Engine]


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    home = folder / "tier"
    home.mkdir()
    (home / "ssd").mkdir()
    daemon = Daemon(
        home, ssd_dir=home / "ssd", ssd_bytes=256 << 20, ssd_slab_bytes=16 << 20, durable_within_ms=300
    )
    yield daemon
    daemon.stop()


def tiering(run_dir: Path, *, rows: int = 128, chunk: int = 1, **settings: Any) -> dict[str, Any]:
    """What a user would write, with the spec for CPUs instead of vLLM's own."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CPUTieringSpec",
            "spec_module_path": "kvstore.gpu_worker.connectors.vllm.cpu_spec",
            "cpu_bytes_to_use": rows * ROW_BYTES * chunk,
            "blocks_per_chunk": chunk,
            "secondary_tiers": [
                {
                    "type": "KVStoreTier",
                    "module_path": "kvstore.gpu_worker.connectors.vllm.tier",
                    "run_dir": str(run_dir),
                    **settings,
                }
            ],
        },
    }


@pytest.fixture(scope="session")
def tiered(launch_engine: Callable[..., Engine]) -> Tiered:
    """tiered(name, daemon, rows=..., chunk=..., **tier settings) -> Engine"""

    def launch(name: str, daemon: Daemon, options: dict[str, Any] | None = None, **settings: Any) -> Engine:
        return launch_engine(
            name, None, kv_transfer_config=tiering(daemon.run_dir, **settings), **(options or {})
        )

    return launch


@pytest.fixture(scope="module")
def engine(daemon: Daemon, tiered: Tiered) -> Engine:
    return tiered("tier", daemon, lookup_ms=2000, load_ms=3000, save_ms=2000)


def test_a_fresh_process_restores(engine: Engine, daemon: Daemon, same: Same, tiered: Tiered) -> None:
    prompts = [prompt(1, 200), prompt(2, 97), prompt(3, 513), prompt(4, 65), prompt(5, 31)]
    same(prompts, engine.generate(*prompts))
    saved = engine.counts()
    assert saved["blocks_saved"] == sum(len(tokens) // BLOCK for tokens in prompts)
    assert saved["bytes_saved"] == saved["blocks_saved"] * ROW_BYTES

    fresh = tiered("tier-fresh", daemon)
    outputs = fresh.generate(*prompts)
    same(prompts, outputs)
    restored = [whole_blocks(tokens) for tokens in prompts]
    assert [output["cached"] for output in outputs] == restored
    counts = fresh.counts()
    metrics = fresh.ask(metrics=True)
    assert metrics["vllm:external_prefix_cache_hits"] == sum(restored)
    assert counts["blocks_loaded"] == metrics["vllm:kvstore_tier_blocks_loaded"]
    assert counts["blocks_saved"] == counts["bugs"] == 0
    assert counts["tracked"] == 0
    assert fresh.end() == 0
