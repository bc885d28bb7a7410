"""What makes KV comparable, and what is refused: without an engine."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CompilationConfig, KVTransferConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvstore.errors import ConfigError, StoreError, Unsupported
from kvstore.gpu_worker.connectors.vllm import identity
from kvstore.gpu_worker.connectors.vllm.blocks import PagedBlocks
from kvstore.gpu_worker.connectors.vllm.metadata import LayerShape, RankLayout
from kvstore.gpu_worker.connectors.vllm.settings import Settings
from kvstore.layout import NamespaceSpec

from .conftest import BLOCK, ENVIRONMENT, Daemon, transfer_config

LAYOUT = RankLayout(
    "CPU_ATTN:vec/x86_64:AVX512", (LayerShape((2, 32, 128), (0, 1, 2), "float32", 32768),) * 4, 1
)
PLAIN = Settings()
FULL = FullAttentionSpec(BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32)


@pytest.fixture(scope="module")
def config(model: Path) -> Any:
    arguments = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK,
        kv_transfer_config=KVTransferConfig(**transfer_config(Path("/nowhere"))),
    )
    return arguments.create_engine_config()


@pytest.fixture
def spec(config: Any) -> Callable[..., NamespaceSpec]:
    def make(
        changed: Any = config,
        settings: Settings = PLAIN,
        layout: RankLayout = LAYOUT,
        block: int = BLOCK,
        weights: bytes = bytes(32),
    ) -> NamespaceSpec:
        ranks = {(0, 0): layout}
        return identity.namespace_of(changed, settings, ranks, block_tokens=block, weights=weights)

    return make


def test_the_same_replica_is_the_same(spec: Callable[..., NamespaceSpec]) -> None:
    assert spec() == spec()


def test_whatever_differs_is_another_namespace(
    spec: Callable[..., NamespaceSpec],
    config: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def with_model(**changes: Any) -> Any:
        other = copy.copy(config)
        other.model_config = copy.copy(config.model_config)
        for name, value in changes.items():
            setattr(other.model_config, name, value)
        return other

    def with_lora(dtype: str) -> Any:
        other = copy.copy(config)
        other.lora_config = SimpleNamespace(lora_dtype=dtype)
        return other

    def positions(theta: float) -> Any:
        hf_config = copy.deepcopy(config.model_config.hf_config)
        hf_config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": theta}
        return with_model(hf_config=hf_config)

    quantised = copy.copy(config)
    quantised.cache_config = copy.copy(config.cache_config)
    quantised.cache_config.cache_dtype = "fp8"
    packed = replace(LAYOUT, backend="CPU_ATTN:amx/x86_64:AVX512")
    wider = replace(
        LAYOUT, layers=(*LAYOUT.layers[:3], LayerShape((2, 128, 32), (0, 1, 2), "float32", 32768))
    )
    different = {
        "other weights": spec(weights=b"x" * 32),
        "dtype": spec(with_model(dtype=torch.bfloat16)),
        "quantised as told": spec(with_model(quantization_config={"linear": "int8"})),
        "rounds adapters": spec(with_lora("bfloat16")),
        "rounds adapters otherwise": spec(with_lora("float32")),
        "sees": spec(with_model(multimodal_config=MultiModalConfig())),
        "sees otherwise": spec(
            with_model(multimodal_config=MultiModalConfig(mm_processor_kwargs={"max_pixels": 1}))
        ),
        "positions": spec(positions(1e4)),
        "positions of an override": spec(positions(1e6)),
        "cache dtype": spec(quantised),
        "block size": spec(block=2 * BLOCK),
        "packing": spec(layout=packed),
        "shape": spec(layout=wider),
        "salt": spec(settings=Settings(salt="x")),
        "named weights": spec(settings=Settings(weights_digest="x")),
        "reset": identity.reset_spec(spec(), b"a" * 16, 1),
        "reset of another engine": identity.reset_spec(spec(), b"b" * 16, 1),
    }
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    different["hash seed"] = spec()
    monkeypatch.delenv("PYTHONHASHSEED")
    monkeypatch.setattr(identity, "vllm_version", lambda: "0.99.0")
    different["vllm"] = spec()
    monkeypatch.undo()
    digests = {name: other.digest("tenant") for name, other in {"": spec(), **different}.items()}
    assert len(set(digests.values())) == len(digests)
    assert spec(with_model(model="/elsewhere")) == spec(), "but not where the files lie"


@pytest.mark.parametrize("nested", ["", "text_config", "full_attention"])
@pytest.mark.parametrize(("kind", "differ"), [("dynamic", True), ("longrope", True), ("linear", False)])
def test_positions_that_depend_on_the_longest_prompt(
    spec: Callable[..., NamespaceSpec], config: Any, kind: str, differ: bool, nested: str
) -> None:
    """Their K is another one under another limit."""
    specs = []
    for length in (1024, 2048):
        other = copy.copy(config)
        other.model_config = copy.copy(config.model_config)
        other.model_config.hf_config = copy.deepcopy(config.model_config.hf_config)
        rope: dict[str, Any] = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}
        if nested == "text_config":
            other.model_config.hf_config.text_config = {"rope_parameters": rope}
        else:
            other.model_config.hf_config.rope_parameters = {nested: rope} if nested else rope
        other.model_config.max_model_len = length
        specs.append(spec(other))
    assert (specs[0] != specs[1]) is differ


def test_how_images_are_read_is_part(spec: Callable[..., NamespaceSpec], config: Any, tmp_path: Path) -> None:
    """vLLM names an image by its bytes and by where the model lies."""
    other = copy.copy(config)
    other.model_config = copy.copy(config.model_config)
    other.model_config.model = str(tmp_path)
    specs = []
    for number in range(2):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": number}))
        for multimodal in (None, MultiModalConfig()):
            other.model_config.multimodal_config = multimodal
            specs.append(spec(other))
    assert specs[0] == specs[2] and specs[1] != specs[3]


def test_epochs_of_one_family(spec: Callable[..., NamespaceSpec]) -> None:
    """The daemon drops an older epoch of the same family: resets must not drop what others restored from files."""
    one, two = (identity.reset_spec(spec(), b"a" * 16, count) for count in (1, 2))
    assert one.digest("t") == two.digest("t") != spec().digest("t")
    assert (one.weights_epoch, two.weights_epoch) == (1, 2)


def test_pipeline_stages_and_distinct_ranks(config: Any) -> None:
    changed = copy.copy(config)
    changed.parallel_config = SimpleNamespace(tensor_parallel_size=4, pipeline_parallel_size=2)
    small = replace(LAYOUT, replicas=2)
    large = replace(small, layers=LAYOUT.layers + LAYOUT.layers[:1])
    ranks = {(stage, rank): (small, large)[stage] for stage in range(2) for rank in range(4)}
    spec = identity.namespace_of(changed, Settings(), ranks, block_tokens=BLOCK, weights=bytes(32))
    assert spec.shard_bytes == (4 * 32768, 4 * 32768, 5 * 32768, 5 * 32768)
    ranks[1, 3] = small
    with pytest.raises(Unsupported, match="differently"):
        identity.namespace_of(changed, Settings(), ranks, block_tokens=BLOCK, weights=bytes(32))


def test_random_hashes_are_refused() -> None:
    for algorithm in identity.FAST_HASHES:
        with pytest.raises(ConfigError, match="PYTHONHASHSEED"):
            identity.hash_protocol(algorithm, {})
        assert algorithm in identity.hash_protocol(algorithm, {"PYTHONHASHSEED": "0"})
    with pytest.raises(ConfigError, match="unknown"):
        identity.hash_protocol("md5", {})


def test_our_idea_of_the_hash_seed_is_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert kv_cache_utils.resolve_none_hash_seed(sha256) == identity.DEFAULT_SEED


def _latent_by_kernel(config: Any) -> None:
    config.model_config.use_mla = True
    config.compilation_config = CompilationConfig(custom_ops=["all"])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda c: setattr(c.kv_transfer_config, "kv_load_failure_policy", "fail"), "recompute"),
        (lambda c: setattr(c.scheduler_config, "async_scheduling", True), "no-async-scheduling"),
        (lambda c: setattr(c.parallel_config, "pipeline_parallel_size", 2), "leave layerwise out"),
        (lambda c: setattr(c.parallel_config, "decode_context_parallel_size", 2), "context parallel"),
        (lambda c: setattr(c, "speculative_config", SimpleNamespace(method="dflash")), "draft"),
        (lambda c: setattr(c.cache_config, "prefix_caching_hash_algo", "xxhash"), "random"),
        (_latent_by_kernel, "custom_ops"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    config: Any, change: Callable[[Any], None], match: str
) -> None:
    changed = SimpleNamespace(
        kv_transfer_config=copy.copy(config.kv_transfer_config),
        cache_config=copy.copy(config.cache_config),
        parallel_config=copy.copy(config.parallel_config),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        speculative_config=None,
        model_config=SimpleNamespace(use_mla=False),
        device_config=SimpleNamespace(device_type="cpu"),
        compilation_config=CompilationConfig(custom_ops=["all"]),
    )
    changed.kv_transfer_config.kv_connector_extra_config = {"layerwise": True}
    identity.check_settings(changed)
    change(changed)
    with pytest.raises(StoreError, match=match):
        identity.check_settings(changed)


def test_groups_that_cannot_be_stored_are_refused() -> None:
    def cache(*specs: Any) -> KVCacheConfig:
        return KVCacheConfig(8, [], [KVCacheGroupSpec([f"l{n}"], spec) for n, spec in enumerate(specs)])

    window = SlidingWindowSpec(BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=64)
    state = MambaSpec(block_size=BLOCK, shapes=((4, 4),), dtypes=(torch.float32,))
    assert identity.group_of(cache(FULL)).layer_names == ["l0"]
    kept = replace(FULL, sliding_window=64)  # as vLLM says it where it keeps all of a window's tokens
    assert identity.group_of(cache(kept)).layer_names == ["l0"]
    aligned = replace(state, mamba_cache_mode="align")
    for specs in ((window,), (aligned,), (FULL, window), (FULL, aligned)):
        with pytest.raises(Unsupported, match="KVStoreTier") as refused:
            identity.group_of(cache(*specs))
        assert ("--disable-hybrid" in str(refused.value)) is (specs == (FULL, window))
    for specs in ((), (state,), (replace(FULL, non_causal=True),)):
        with pytest.raises(Unsupported):
            identity.group_of(cache(*specs))


def test_tensors_that_cannot_be_told_are_refused() -> None:
    with pytest.raises(Unsupported, match="which dimension"):
        PagedBlocks({"a": torch.zeros(8, 8, 4)}, ["a"], 8)
    with pytest.raises(Unsupported, match="outside"):
        PagedBlocks({"a": torch.zeros(8, 4), "b": torch.zeros(8, 4)}, ["a"], 8)
    with pytest.raises(Unsupported, match="CPU"):
        PagedBlocks({"a": torch.zeros(8, 4, device="meta")}, ["a"], 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_any_strides_are_gathered_and_filled(dtype: torch.dtype) -> None:
    """K and V apart (blocks second), and heads before tokens: what GPU backends register."""
    first = torch.randint(0, 200, (2, 9, 4, 3, 5)).to(dtype)
    second = torch.randint(0, 200, (9, 3, 4, 10)).to(dtype).permute(0, 2, 1, 3)
    blocks = PagedBlocks({"a": first, "b": second, "c": second}, ["a", "b", "c"], 9)
    assert len(blocks.layers) == 2, "two names of one tensor are one layer"
    shard = torch.zeros(blocks.shard_bytes, dtype=torch.uint8).numpy()
    for layer in range(2):
        blocks.gather([(4, shard)], layer)
    flat = torch.cat([first[:, 4].contiguous().flatten(), second[4].contiguous().flatten()])
    assert shard.tobytes() == flat.view(torch.uint8).numpy().tobytes()
    for _, _, offset, target in blocks.pieces(0, 0, 7):
        source = shard[offset : offset + target.nbytes].view(target.dtype).reshape(target.shape)
        target[...] = source
    assert torch.equal(first[:, 7], first[:, 4]) and torch.equal(second[7], second[4])


def test_settings_are_checked() -> None:
    assert Settings.of({"run_dir": "/x", "layerwise": True}).layerwise
    for extra in ({"rundir": "/x"}, {"lookup_ms": "5"}, {"lookup_ms": -1}, {"layerwise": 1}):
        with pytest.raises(ConfigError, match="kv_connector_extra_config"):
            Settings.of(extra)


def test_adapters_differ_by_their_files(tmp_path: Path) -> None:
    request = LoRARequest("mine", 1, str(tmp_path))
    with pytest.raises(Unsupported, match="no weight files"):
        identity.adapter_digest(request)
    (tmp_path / "adapter_config.json").write_text("{}")
    file = tmp_path / "adapter_model.bin"
    digests = []
    for content in (b"one", b"two", b"one"):
        file.unlink(missing_ok=True)
        file.write_bytes(content)
        os.utime(file, ns=(1, 1))
        digests.append(identity.adapter_digest(request))
    assert digests[0] == digests[2] != digests[1]
    file.write_bytes(b"six")  # into the same file
    os.utime(file, ns=(1, 1))
    assert identity.adapter_digest(request) not in digests
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    digests.append(identity.adapter_digest(request))
    fused = LoRARequest("mine", 1, str(tmp_path), is_3d_lora_weight=True)
    assert identity.adapter_digest(fused) not in digests, "read otherwise"
    assert identity.adapted_key(digests[0], b"hash") != b"hash"
    with pytest.raises(Unsupported, match="no folder"):
        identity.adapter_digest(LoRARequest("mine", 1, "owner/name"))


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    daemon = Daemon(folder / "doctor")
    yield daemon
    daemon.stop()


def doctor(daemon: Daemon, model: Path, *more: str, **transfer: Any) -> list[dict[str, Any]]:
    arguments = [str(model), "--skip-tokenizer-init", "--dtype=float32", f"--block-size={BLOCK}"]
    if transfer:
        arguments.append(
            f"--kv-transfer-config={json.dumps({**transfer_config(daemon.run_dir), **transfer})}"
        )
    return doctor_on(daemon, *arguments, *more)


def doctor_on(daemon: Daemon, *arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-P", "-m", "kvstore.cli.kvctl", "--json", f"--run-dir={daemon.run_dir}"]
    done = subprocess.run(
        [*command, "doctor", "vllm", "--", *arguments],
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    findings = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == (0 if findings[-1]["ok"] else 1)
    return findings


def test_the_doctor_says_what_to_change(daemon: Daemon, model: Path) -> None:
    well = doctor(daemon, model, kv_role="kv_both")
    assert all(finding["ok"] for finding in well)
    assert well[-1]["check"] == "round trip"
    failing = doctor(daemon, model, kv_load_failure_policy="fail")[-1]
    assert (failing["check"], failing["ok"]) == ("settings", False) and "recompute" in failing["remedy"]
    without = doctor(daemon, model)[-1]
    assert (without["check"], without["ok"]) == ("connector", False) and "KVStoreConnector" in without[
        "remedy"
    ]


def test_the_doctor_reads_arguments_as_vllm_does(daemon: Daemon, model: Path, tmp_path: Path) -> None:
    misspelt = doctor(daemon, model, "--blok-size=16", kv_role="kv_both")[-1]
    assert (misspelt["check"], misspelt["ok"]) == ("arguments", False)
    assert "--blok-size" in misspelt["detail"] and "--block-size for --blok-size" in misspelt["remedy"]
    unread = doctor(daemon, model, "--port=many", kv_role="kv_both")[-1]
    assert (unread["check"], unread["ok"]) == ("arguments", False)
    assert "--port" in unread["detail"] and "many" in unread["detail"]
    written = tmp_path / "serve.yaml"
    written.write_text(
        json.dumps(
            {
                "model": str(model),
                "skip-tokenizer-init": True,
                "dtype": "float32",
                "kv-transfer-config": {**transfer_config(daemon.run_dir), "kv_role": "kv_both"},
            }
        )
    )
    well = doctor_on(
        daemon, "vllm", "serve", "--config", str(written), "--block_size", str(BLOCK), "--port=8001"
    )
    assert all(finding["ok"] for finding in well) and well[-1]["check"] == "round trip", well


def test_the_doctor_knows_the_tier(daemon: Daemon, model: Path) -> None:
    tier = {
        "type": "KVStoreTier",
        "module_path": "kvstore.gpu_worker.connectors.vllm.tier",
        "run_dir": str(daemon.run_dir),
        "backpressure": {"backpressure_cls": "EMABackpressureDetector"},
    }

    def with_tier(**changes: Any) -> list[dict[str, Any]]:
        extra = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 1 << 24,
            "secondary_tiers": [{**tier, **changes}],
        }
        return doctor(
            daemon,
            model,
            kv_connector="OffloadingConnector",
            kv_connector_module_path=None,
            kv_connector_extra_config=extra,
        )

    well = with_tier()
    assert all(finding["ok"] for finding in well)
    assert well[-1]["check"] == "round trip" and "3 rows of 128 KiB" in well[-1]["detail"]
    elsewhere = with_tier(run_dir="/elsewhere")[-1]
    assert (elsewhere["check"], elsewhere["ok"]) == ("connector", False) and "run_dir" in elsewhere["remedy"]
    misspelt = with_tier(colour="red")[-1]
    assert (misspelt["check"], misspelt["ok"]) == ("connector", False) and "colour" in misspelt["detail"]


def test_the_doctor_looks_into_a_multi_connector(daemon: Daemon, model: Path) -> None:
    ours = {**transfer_config(daemon.run_dir), "kv_role": "kv_both"}
    tiered = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 1 << 24,
            "secondary_tiers": [
                {
                    "type": "KVStoreTier",
                    "module_path": "kvstore.gpu_worker.connectors.vllm.tier",
                    "run_dir": str(daemon.run_dir),
                },
                {"type": "fs", "root_dir": "/nowhere"},
            ],
        },
    }
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}

    def among(*connectors: dict[str, Any], **outer: Any) -> list[dict[str, Any]]:
        return doctor(
            daemon,
            model,
            kv_connector="MultiConnector",
            kv_connector_module_path=None,
            kv_connector_extra_config={"connectors": connectors},
            **outer,
        )

    well = among(nixl, ours)
    assert all(finding["ok"] for finding in well) and well[-1]["check"] == "round trip"
    path = next(finding for finding in well if finding["check"] == "connector")
    assert "KVStoreConnector" in path["detail"] and "beside NixlConnector" in path["detail"]
    failing = among(nixl, ours, kv_load_failure_policy="fail")[-1]
    assert (failing["check"], failing["ok"]) == ("connector", False) and "recompute" in failing["remedy"]
    foreign = among(nixl, tiered)[-1]
    assert (foreign["check"], foreign["ok"]) == ("connector", False)
    assert "NixlConnector" in foreign["detail"] and "save_what_others_load" in foreign["remedy"]
    alone = among(tiered)
    path = next(finding for finding in alone if finding["check"] == "connector")
    assert "what follows KV of theirs is not saved" in path["detail"], path
