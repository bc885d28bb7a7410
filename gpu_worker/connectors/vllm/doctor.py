"""What `kvctl doctor vllm -- ARGUMENTS` runs, where vLLM is installed: would `vllm serve ARGUMENTS` use the store?

One finding a line, as JSON: check, ok, detail, remedy. Ends with the first that is not ok. Loads no weights.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.metadata
import io
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvstore.errors import StoreError
from kvstore.gpu_worker.compute_or_load import ComputeOrLoad
from kvstore.gpu_worker.connectors.link import Link
from kvstore.gpu_worker.connectors.vllm.groups import groups_of
from kvstore.gpu_worker.connectors.vllm.held import Held
from kvstore.gpu_worker.connectors.vllm.identity import (
    USE_THE_TIER,
    build_of_vllm,
    check_settings,
    group_of,
    hash_protocol,
    namespace_of,
    vllm_version,
)
from kvstore.gpu_worker.connectors.vllm.interface import TESTED
from kvstore.gpu_worker.connectors.vllm.lookups import Lookups
from kvstore.gpu_worker.connectors.vllm.metadata import Load, Save, StepMetadata
from kvstore.gpu_worker.connectors.vllm.settings import Settings, TierSettings
from kvstore.gpu_worker.connectors.vllm.skeleton import planned_cache
from kvstore.gpu_worker.connectors.vllm.tier_doctor import (
    TIER,
    beside_other_tiers,
    daemon_room,
    round_trip,
    row_room,
    tier_settings,
)
from kvstore.gpu_worker.connectors.vllm.tier_identity import (
    MULTI_CONNECTOR,
    check_alone_among,
    check_engine_settings,
)
from kvstore.gpu_worker.connectors.vllm.worker import WorkerSide
from kvstore.keys import ROOT
from kvstore.types import ChunkKey

MODULE = "kvstore.gpu_worker.connectors.vllm"
CONNECTOR = "KVStoreConnector"
PLUGINS, PLUGIN = "vllm.general_plugins", "attnstore"
BLOCKS = 3
BLOCKS_IN_ALL = 7
BLOCK_TOKENS = 16
"""Where vLLM has not chosen yet."""


class Modelless:
    """A model runner that has loaded nothing."""

    def __init__(self) -> None:
        self._model = torch.nn.Module()

    def get_model(self) -> torch.nn.Module:
        return self._model


class Failed(Exception):
    def __init__(self, detail: str, remedy: str) -> None:
        super().__init__(detail)
        self.remedy = remedy


class Patient:
    """The checks, in the order in which they build on each other."""

    def __init__(self, arguments: Sequence[str], run_dir: str, timeout_s: float) -> None:
        self.arguments = list(arguments)
        self.run_dir = run_dir
        self.timeout_s = timeout_s
        self.config: Any = None
        self.settings = Settings()
        self.tier: TierSettings | None = None
        """Set when the tier is configured instead of the connector."""
        self.cache: KVCacheConfig | None = None
        self.guessed = ""
        """Why the groups are not known: they are taken for one of full attention."""

    def checks(self) -> list[Callable[[], str]]:
        return [
            self.check_vllm,
            self.check_arguments,
            self.check_connector,
            self.check_settings,
            self.check_model,
            self.check_stored,
            self.check_weights,
            self.check_hashes,
            self.check_round_trip,
        ]

    def check_vllm(self) -> str:
        tested = ".".join(vllm_version().split(".")[:2]) in TESTED
        warning = "" if tested else f" (tested only with {', '.join(TESTED)})"
        return f"{build_of_vllm()}{warning}, torch {torch.__version__}"

    def check_arguments(self) -> str:
        given = self.arguments[1:] if self.arguments[:1] == ["vllm"] else self.arguments
        given = given[1:] if given[:1] == ["serve"] else given
        parser = FlexibleArgumentParser(prog="vllm")
        served = ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
        said = io.StringIO()
        try:
            # The whole command line of vLLM, since only that one reads `--block_size`, `--config FILE` and
            # `--kv-transfer-config.kv_role`, and refuses what it does not know
            with contextlib.redirect_stderr(said):
                options = parser.parse_args(["serve", *given])
            options.model = options.model_tag or options.model
            engine = AsyncEngineArgs.from_cli_args(options)
            self.config = engine.create_engine_config(UsageContext.OPENAI_API_SERVER)
        except (Exception, SystemExit) as error:
            reason = (
                said.getvalue().partition("error: ")[2].strip() if isinstance(error, SystemExit) else error
            )
            raise Failed(f"vLLM does not take them: {reason}", _meant(given, served)) from error
        return f"model {self.config.model_config.model}"

    def check_connector(self) -> str:
        transfer = self.config.kv_transfer_config
        wanted = {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": MODULE,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"run_dir": self.run_dir},
        }
        paste = f"--kv-transfer-config '{json.dumps(wanted)}'"
        if transfer is None or transfer.kv_connector is None:
            raise Failed("no KV connector is configured", f"add {paste}")
        others = ""
        if transfer.kv_connector == MULTI_CONNECTOR:
            transfer, others = self._among_others(transfer, paste)
        self.tier = tier_settings(transfer)
        if self.tier is not None:
            self._check_directory(self.tier.run_dir, "secondary_tiers.run_dir")
            self.settings = Settings(
                run_dir=self.run_dir,
                weights_digest=self.tier.weights_digest,
            )
            beside = beside_other_tiers(transfer, self.tier)
            return f"{TIER} below vLLM's own host memory, {transfer.kv_role}{beside}{others}"
        if not _is_connector(transfer):
            raise Failed(
                f"the connector is {transfer.kv_connector} of {transfer.kv_connector_module_path}",
                f"use {paste}",
            )
        self.settings = Settings.of(transfer.kv_connector_extra_config)
        self._check_directory(self.settings.run_dir, "kv_connector_extra_config.run_dir")
        role = {"kv_both": "saves and loads", "kv_producer": "only saves", "kv_consumer": "only loads"}
        way = "layer by layer" if self.settings.layerwise else "whole requests"
        return f"{CONNECTOR}, {role[transfer.kv_role]}, {way}{others}"

    def _among_others(self, outer: Any, paste: str) -> tuple[Any, str]:
        """Ours of a MultiConnector, which the configuration is set to, and what is beside it."""
        given = outer.kv_connector_extra_config.get("connectors") or []
        made = [KVTransferConfig(**each, engine_id=outer.engine_id) for each in given]
        ours = [each for each in made if _is_connector(each) or tier_settings(each) is not None]
        if len(ours) != 1:
            raise Failed(
                f"of the {len(made)} connectors of the {MULTI_CONNECTOR}, {len(ours)} use the store",
                "two would keep everything twice: take one out"
                if ours
                else f"add to its connectors what is in {paste}",
            )
        if outer.kv_load_failure_policy != "recompute":
            raise Failed(
                f"vLLM goes by the policy of the {MULTI_CONNECTOR}, which is {outer.kv_load_failure_policy}",
                'set kv_load_failure_policy to "recompute" there, and in ours',
            )
        settings = tier_settings(ours[0])
        if settings is not None and not settings.save_what_others_load:
            check_alone_among(given)
        self.config.kv_transfer_config = ours[0]
        beside = [str(each.kv_connector) for each in made if each is not ours[0]]
        return ours[0], f", beside {' and '.join(beside)}" if beside else ""

    def _check_directory(self, run_dir: str, setting: str) -> None:
        if run_dir != self.run_dir:
            raise Failed(
                f"the engine will look for the daemon in {run_dir}, this doctor in {self.run_dir}",
                f"name the same directory in {setting} and with --run-dir",
            )

    def check_settings(self) -> str:
        if self.tier is not None:
            check_engine_settings(self.config)
            return "no setting of vLLM stands in the way"
        check_settings(self.config)
        return "a load that fails is computed; no setting of vLLM stands in the way"

    def check_model(self) -> str:
        model = self.config.model_config
        device = self.config.device_config.device_type
        if device != "cpu" and self.tier is None:
            raise Failed(
                f"its KV lies on {device}", f"KV is taken from CPU memory only, so far: {USE_THE_TIER}"
            )
        cache = self._cache()
        if self.guessed and (model.is_hybrid or model.is_attention_free or model.get_sliding_window()):
            raise Failed(
                f"its groups are not known before vLLM has loaded it: {self.guessed}",
                "start vLLM: what cannot be stored is refused then",
            )
        if self.tier is None:
            group_of(cache)
        groups = groups_of(cache, blocks_per_chunk=self._blocks_per_chunk(cache))
        return f"{'; '.join(map(str, groups))}; on {device}"

    def check_stored(self) -> str:
        """What of it, how much that is, and how much of it fits."""
        cache = self._cache()
        per_chunk = self._blocks_per_chunk(cache)
        groups = groups_of(cache, blocks_per_chunk=per_chunk)
        if self.tier is not None:
            made = build_offloading_config(self.config, cache)
            row = made.worker_kv_bytes_per_block * per_chunk
            room = row_room(self.config, row)
        else:
            row, room = sum(group.block_bytes for group in groups), ""
        rate = sum(row / group.chunk_tokens for group in groups)
        by_group = ", ".join(
            f"{group.kind} {row >> 10} KiB each {group.chunk_tokens} tokens" for group in groups
        )
        daemon = daemon_room(self.run_dir, rate, self.timeout_s)
        return f"{by_group}: at most {rate:,.0f} bytes a token, of all ranks that differ{room}; {daemon}"

    def _blocks_per_chunk(self, cache: KVCacheConfig) -> int:
        if self.tier is None:
            return 1
        return int(build_offloading_config(self.config, cache).cache.blocks_per_chunk)

    def check_weights(self) -> str:
        known = {point.name for point in importlib.metadata.entry_points(group=PLUGINS)}
        allowed = os.environ.get("VLLM_PLUGINS")
        loaded = PLUGIN in known and (allowed is None or PLUGIN in allowed.split(","))
        if not loaded and self.config.device_config.device_type == "cpu" and not self.settings.weights_digest:
            raise Failed(
                f"vLLM does not load the plug-in {PLUGIN}, and on a CPU nobody else sees the weights",
                f"install attnstore where vLLM is, and name {PLUGIN} in VLLM_PLUGINS if that is set",
            )
        return "are read in full, out of the ranks' memory, once vLLM has loaded them"

    def check_hashes(self) -> str:
        return hash_protocol(self.config.cache_config.prefix_caching_hash_algo, os.environ)

    def check_round_trip(self) -> str:
        """Blocks of the model's size, saved by one rank, found, and loaded by another, in a namespace of their own."""
        cache = self._cache()
        if self.tier is not None:
            return round_trip(self.config, cache, self.tier, self.timeout_s)
        layers = cache.kv_cache_groups[0].layer_names
        spec = cache.kv_cache_groups[0].kv_cache_spec
        element = spec.dtype.itemsize
        shape = (cache.num_blocks, spec.block_size, spec.page_size_bytes // spec.block_size // element)
        if cache.num_blocks in shape[1:]:  # which dimension counts blocks must be plain
            cache.num_blocks += 1
            shape = (cache.num_blocks, *shape[1:])
        settings = Settings.of(
            {**vars(self.settings), "salt": f"doctor {secrets.token_hex(16)}", "layerwise": False}
        )
        given = [torch.randint(0, 256, shape, dtype=torch.uint8).to(spec.dtype) for _ in layers]
        got = [torch.zeros(shape, dtype=spec.dtype) for _ in layers]
        keys = tuple(ChunkKey(secrets.token_bytes(32)) for _ in range(BLOCKS))
        with contextlib.ExitStack() as stack:
            ranks = []
            for tensors in (given, got):
                rank = WorkerSide(self.config, cache, settings, self._link(settings))
                rank.held = Held(Modelless(), self.config, 0)
                stack.callback(rank.close)
                rank.register(dict(zip(layers, tensors, strict=True)))
                ranks.append(rank)
            assert ranks[0].layout is not None and ranks[0].saver is not None
            name = namespace_of(
                self.config,
                settings,
                {(0, 0): ranks[0].layout},
                block_tokens=spec.block_size,
                weights=bytes(32),
            )
            link = self._link(settings)
            stack.callback(link.close)
            link.open(name)
            if link.namespace(name, self.timeout_s) is None:
                raise Failed(link.complaint or "the daemon did not answer in time", "see kvctl doctor")
            begun = time.perf_counter()
            self._step(ranks[0], StepMetadata(saves=[Save("d", ROOT, keys, tuple(range(BLOCKS)))], spec=name))
            if not ranks[0].saver.flush(self.timeout_s) or ranks[0].tally.total["blocks_saved"] != BLOCKS:
                raise Failed(
                    f"not saved: {dict(ranks[0].tally.total)}", "see kvctl doctor, and the daemon's log"
                )
            lookups = Lookups(
                link, ComputeOrLoad(), chunk_tokens=1, lookup_s=self.timeout_s, hold_s=self.timeout_s
            )
            stack.callback(lookups.close)
            lookup = lookups.start(name, keys, bytes, lambda _, block_hash: block_hash)
            stack.callback(lookup.end)
            _wait(lambda: lookup.done, self.timeout_s)
            if lookup.hits != BLOCKS:
                raise Failed(f"{lookup.hits} of {BLOCKS} saved blocks are found", "see kvctl doctor")
            self._step(ranks[1], StepMetadata(loads=[Load("d", keys, tuple(range(BLOCKS)))], spec=name))
            _wait(lambda: bool(ranks[1].take_done()), self.timeout_s)
            if failed := ranks[1].take_failed():
                raise Failed(f"blocks {sorted(failed)} were not loaded", "see kvctl doctor")
            for number, (one, other) in enumerate(zip(given, got, strict=True)):
                if not torch.equal(one[:BLOCKS], other[:BLOCKS]):
                    raise Failed(
                        f"layer {number} came back with other bytes", "stop the daemon and report this"
                    )
            took_ms = 1e3 * (time.perf_counter() - begun)
            opened = link.namespace(name, self.timeout_s)
            if opened is not None:
                opened.forget(keys=keys)
        return f"{BLOCKS} blocks of {name.chunk_bytes >> 10} KiB saved, found and loaded in {took_ms:.0f} ms"

    def _step(self, rank: WorkerSide, metadata: StepMetadata) -> None:
        metadata.weights = {0: 0}
        rank.begin(metadata)
        rank.load(metadata)
        rank.end_forward(metadata)

    def _link(self, settings: Settings) -> Link:
        return Link(
            settings.run_dir, engine_group="", rank=0, timeout_s=self.timeout_s, staging_bytes=64 << 20
        )

    def _cache(self) -> KVCacheConfig:
        """Of one rank alone, which the configuration is set to."""
        if self.cache is None:
            try:
                self.cache = planned_cache(self.config, BLOCKS_IN_ALL)
            except Exception as error:
                # Whatever a model raises that cannot be made without its weights.
                self.guessed = f"{type(error).__name__}: {error}"
                self.cache = self._guess()
        return self.cache

    def _guess(self) -> KVCacheConfig:
        model, parallel = self.config.model_config, self.config.parallel_config
        names = [f"layer.{number}" for number in range(model.get_num_layers(parallel))]
        spec = FullAttentionSpec(
            block_size=self.config.cache_config.block_size or BLOCK_TOKENS,
            num_kv_heads=model.get_num_kv_heads(parallel),
            head_size=model.get_head_size(),
            dtype=model.dtype,
        )
        parallel.tensor_parallel_size = parallel.pipeline_parallel_size = parallel.world_size = 1
        return KVCacheConfig(
            BLOCKS_IN_ALL, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)]
        )


def _is_connector(transfer: Any) -> bool:
    return (transfer.kv_connector, transfer.kv_connector_module_path) == (CONNECTOR, MODULE)


def _wait(what: Callable[[], bool], timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > until:
            raise Failed("the daemon did not answer in time", "see kvctl doctor, and the daemon's log")
        time.sleep(0.005)


def _meant(given: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """What to do about arguments that vLLM refuses: the nearest names of those that it does not know."""
    known = list(parser._option_string_actions)
    names = [each.partition("=")[0].partition(".")[0].replace("_", "-") for each in given if each[:2] == "--"]
    near = {name: difflib.get_close_matches(name, known, 1) for name in names if name not in known}
    hints = [f"{found[0]} for {name}" for name, found in near.items() if found]
    return f"perhaps {', '.join(hints)}" if hints else "give the arguments of `vllm serve` after --"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="kvctl doctor vllm", description=__doc__)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--timeout", type=float, default=5.0)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    given = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
    patient = Patient(given, options.run_dir, options.timeout)
    for check in patient.checks():
        finding = {"check": check.__name__.removeprefix("check_").replace("_", " "), "ok": True, "remedy": ""}
        try:
            with contextlib.redirect_stdout(sys.stderr):  # whatever vLLM prints
                finding["detail"] = check()
        except Failed as failed:
            finding.update(ok=False, detail=str(failed), remedy=failed.remedy)
        except StoreError as error:
            detail = str(error).removesuffix(f" ({error.remedy})")
            finding.update(ok=False, detail=detail, remedy=error.remedy)
        print(json.dumps(finding), flush=True)
        if not finding["ok"]:
            sys.exit(1)


if __name__ == "__main__":
    main()
