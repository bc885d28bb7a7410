"""What makes SGLang's KV comparable: the weights by their content, what computes, and the layout of a host page.

A storage backend is told the model's name and nothing of the model, so the scheduler that makes it is looked up on the
stack: its model is in this process. Whatever changes weights later makes KV of unknown weights; `Watch` follows that.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import secrets
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch

from kvstore.errors import ConfigError, Unsupported
from kvstore.gpu_worker.connectors.sglang.settings import WHERE, Settings
from kvstore.gpu_worker.identity import absorb, digest_of_tensor
from kvstore.layout import GroupKind, GroupSpec, NamespaceSpec

log = logging.getLogger(__name__)

HASH_PROTOCOL = "sglang.sha256.v1"
PACKAGES = ("sglang", "torch", "transformers")
"""Whose code is known by their versions."""
COMPUTING = (
    *("dtype", "kv_cache_dtype", "quantization", "quantization_param_path", "json_model_override_args"),
    *("context_length", "attention_backend", "prefill_attention_backend", "decode_attention_backend"),
    *("enable_deterministic_inference", "enable_fp32_lm_head", "rl_on_policy_target", "is_embedding"),
)
"""Arguments of the server that decide what KV comes out, beside the weights."""
CHANGING = (
    *("update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor"),
    *("update_weights_from_ipc", "begin_weight_update", "end_weight_update", "resume_memory_occupation"),
)
"""Methods of SGLang's weight updater after which the weights may be others."""


class Pages(Protocol):
    """Of SGLang's host pools, what is used here."""

    layout: str
    page_size: int
    dtype: torch.dtype

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]: ...


@dataclass(frozen=True)
class Owner:
    """All ranks of one engine agree on it."""

    weights: bytes
    """32 bytes."""
    nonce: bytes
    """16 bytes, of this start of the engine."""


def scheduler_under_construction() -> Any:
    """The scheduler that is making, or attaching, the backend; None: SGLang has changed, or nobody does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        for name in ("self", "scheduler"):
            found = frame.f_locals.get(name)
            runner = getattr(getattr(found, "tp_worker", None), "model_runner", None)
            if isinstance(getattr(runner, "model", None), torch.nn.Module):
                return found
        frame = frame.f_back
    return None


def check_arguments(arguments: Any) -> None:
    """Raises Unsupported for what cannot be right, by the argument's name."""
    if getattr(arguments, "enable_lora", None) or getattr(arguments, "lora_paths", None):
        raise Unsupported(
            "SGLang tells a backend an adapter's name only, and tomorrow that may be another adapter",
            field="--enable-lora",
            value=True,
        )
    nodes, width, stages = (
        int(getattr(arguments, name, 1) or 1) for name in ("nnodes", "tp_size", "pp_size")
    )
    if width * stages // nodes < width:
        raise Unsupported(
            "each node's daemon would hold the pages of its own ranks only, so no page would ever be whole",
            field="--nnodes",
            value=nodes,
        )


def check_stages(config: Any) -> None:
    """A stage's KV depends on the weights of the stages before it, which its ranks do not hold. Raises Unsupported."""
    if config.pp_size > 1:
        raise Unsupported(
            "a stage's KV depends on weights that only other stages hold",
            field="--pp-size",
            value=config.pp_size,
            remedy=f"set {WHERE}.kvstore.weights_digest to a name of all stages' weights",
        )


def check_drafter(arguments: Any) -> None:
    """A drafter's KV may lie in the same pages, and its weights are not looked at. Raises Unsupported."""
    algorithm = getattr(arguments, "speculative_algorithm", None)
    if algorithm not in (None, "", "NGRAM"):
        raise Unsupported(
            "the drafter's weights are not looked at, and its KV may be stored with the model's",
            field="--speculative-algorithm",
            value=algorithm,
            remedy=f"set {WHERE}.kvstore.weights_digest to a name of both models' weights",
        )


def check_disaggregation(arguments: Any) -> None:
    """A decode server gets prompts' KV from a prefill server, and nobody compares its weights with those here; what is
    computed behind it would be saved. Raises Unsupported."""
    mode = getattr(arguments, "disaggregation_mode", None)
    if mode == "decode" or getattr(arguments, "enable_pd_role_switch", False):
        raise Unsupported(
            "KV comes from a prefill server whose weights nobody compares with these",
            field="--disaggregation-mode",
            value=mode,
            remedy=f"set {WHERE}.kvstore.weights_digest to a name of the weights, on prefill and decode servers alike",
        )


def digest_of_model(model: torch.nn.Module) -> bytes:
    """32 bytes over every parameter and buffer, their names, and the classes that compute with them. Raises Unsupported
    for tensors without bytes to look at."""
    state = hashlib.blake2b(digest_size=32, person=b"kvs.sglang.wgts")
    for name, module in model.named_modules():
        absorb(state, name.encode(), f"{type(module).__module__}.{type(module).__qualname__}".encode())
    for name in sorted({type(module).__module__ for module in model.modules()}):
        if name.partition(".")[0] not in PACKAGES:
            absorb(state, name.encode(), _code_of(name))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type == "meta":
            raise Unsupported(
                "has no bytes here", field=name, value="meta", remedy=f"set {WHERE}.kvstore.weights_digest"
            )
        absorb(state, name.encode(), str((tensor.dtype, tuple(tensor.shape))).encode())
        absorb(state, digest_of_tensor(tensor.detach()))
    return state.digest()


def _code_of(module: str) -> bytes:
    """Of a model that neither SGLang nor its libraries have brought. Raises Unsupported."""
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        return Path(file or "").read_bytes()
    except OSError as error:
        raise Unsupported(
            f"nobody can tell what its code is: {error}",
            field="model",
            value=module,
            remedy=f"set {WHERE}.kvstore.weights_digest",
        ) from None


def digest_of_arithmetic(arguments: Any, model: torch.nn.Module | None) -> bytes:
    """Of what computes, apart from the weights."""
    state = hashlib.blake2b(digest_size=32, person=b"kvs.sglang.args")
    versions = {
        name: _version(name)
        for name in ("sglang", "torch", "sgl-kernel", "flashinfer-python", "transformers")
    }
    settings = {name: str(getattr(arguments, name, None)) for name in COMPUTING}
    config: Any = getattr(model, "config", None)
    described = config.to_dict() if hasattr(config, "to_dict") else {}
    for name in ("_name_or_path", "transformers_version"):
        described.pop(name, None)
    device = next(model.parameters()).device.type if model is not None else ""
    for part in (versions, settings, described, device):
        absorb(state, json.dumps(part, sort_keys=True, default=str).encode())
    return state.digest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


Gather = Callable[[tuple[bytes, bytes]], Sequence[tuple[bytes, bytes]]]
"""What all tensor-parallel ranks say, in their order."""


def gather_ranks(mine: tuple[bytes, bytes]) -> Sequence[tuple[bytes, bytes]]:
    """Collective over the ranks that make the backend at this moment, as SGLang itself does to agree on loads."""
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group.cpu_group
    found: list[Any] = [None] * torch.distributed.get_world_size(group=group)
    torch.distributed.all_gather_object(found, mine, group=group)
    return found


def find_owner(config: Any, settings: Settings, gather: Gather = gather_ranks) -> Owner:
    """Of the engine that is being made. Raises ConfigError or Unsupported, with what to do; on all ranks where one of
    them has a reason."""
    scheduler = scheduler_under_construction()
    check_arguments(getattr(scheduler, "server_args", None))  # the same on all ranks
    if not settings.weights_digest:
        check_stages(config)
    # Of DP attention `config` counts the ranks that share one replica's attention; experts lie on all.
    ranks = max(config.tp_size, int(getattr(getattr(scheduler, "server_args", None), "tp_size", 1) or 1))
    why, digest = "", b""
    try:
        digest = _digest_here(scheduler, settings)
    except (ConfigError, Unsupported) as error:
        why = str(error)
        if ranks == 1:
            raise
    nonce = secrets.token_bytes(16)
    if ranks == 1:
        return Owner(digest, nonce)
    found = gather((digest, nonce))
    if why or not all(digest for digest, _ in found):
        raise Unsupported(
            why or "another rank cannot name its weights, see its log",
            field=f"{WHERE}.kvstore",
            value="weights",
        )
    state = hashlib.blake2b(digest_size=32, person=b"kvs.sglang.rank")
    absorb(state, *(digest for digest, _ in found))
    return Owner(state.digest(), found[0][1])


def _digest_here(scheduler: Any, settings: Settings) -> bytes:
    state = hashlib.blake2b(digest_size=32, person=b"kvs.sglang.owner")
    arguments = getattr(scheduler, "server_args", None)
    model = scheduler.tp_worker.model_runner.model if scheduler is not None else None
    absorb(state, digest_of_arithmetic(arguments, model), settings.weights_digest.encode())
    if not settings.weights_digest:
        check_drafter(arguments)
        check_disaggregation(arguments)
        if model is None:
            raise ConfigError(
                "the model whose KV this is cannot be found: SGLang has changed",
                field=f"{WHERE}.kvstore.weights_digest",
                value="",
                remedy="set it to a name of these weights, and restart SGLang when they change",
            )
        absorb(state, digest_of_model(model))
    return state.digest()


def page_pieces(pool: Pages) -> list[int]:
    """Bytes of each piece of a page in host memory, in the order in which the pool names them. Raises Unsupported."""
    try:
        _, sizes = pool.get_page_buffer_meta(torch.arange(pool.page_size, dtype=torch.int64))
    except (ValueError, NotImplementedError) as error:
        raise Unsupported(
            f"SGLang gives no addresses of such pages: {error}",
            field="--hicache-mem-layout",
            value=getattr(pool, "layout", None),
            remedy="use page_first",
        ) from None
    return [int(size) for size in sizes]


def namespace_of(config: Any, pool: Pages, owner: Owner, settings: Settings) -> NamespaceSpec:
    """For the whole replica: each rank has a shard, unless all have the same KV."""
    for field in ("attn_cp_size", "dcp_size"):
        if getattr(config, field, 1) > 1:
            raise Unsupported(
                "a page's tokens lie on several ranks", field=field, value=getattr(config, field)
            )
    pieces = page_pieces(pool)
    layers = [getattr(pool, name, "") for name in ("start_layer", "end_layer", "layer_num")]
    heads = [getattr(pool, name, "") for name in ("head_num", "head_dim", "v_head_dim", "kv_cache_dim")]
    layout = f"sglang-{_version('sglang')}/{type(pool).__name__}/{pool.layout}/{pool.dtype}/layers-{layers}/{heads}"
    pieces_told = f"{len(pieces)}x{pieces[0]}" if len(set(pieces)) == 1 else str(pieces)
    replicated = bool(config.is_mla_model)
    group = GroupSpec(
        "kv",
        sum(pieces),
        1 if replicated else config.tp_size,
        GroupKind.LATENT if replicated else GroupKind.FULL,
    )
    return NamespaceSpec(
        model=config.model_name or "sglang",
        weights_digest=owner.weights,
        layout_fingerprint=f"{layout}/{pieces_told}/pp-{config.pp_rank}",
        chunk_tokens=pool.page_size,
        groups=(group,),
        hash_protocol=HASH_PROTOCOL,
        tensor_parallel=config.tp_size,
        pipeline_parallel=config.pp_size,
        salt=settings.salt.encode(),
    )


def after_reset(spec: NamespaceSpec, owner: Owner, count: int) -> NamespaceSpec:
    """What this engine computes after its weights, or its cache, changed for the `count`-th time: nobody else's, since
    nobody digested the weights again. Each is a newer epoch, and the daemon drops the one before."""
    state = hashlib.blake2b(digest_size=32, person=b"kvs.sglang.reset")
    absorb(state, owner.weights, owner.nonce)
    return replace(spec, weights_digest=state.digest(), weights_epoch=count)


class Watched(Protocol):
    def weights_changing(self) -> None: ...

    def flushed(self) -> None: ...


_watched: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(backend: Watched) -> None:
    """From now on it is told when SGLang is about to change weights, and when its caches were emptied. Raises
    Unsupported where SGLang's methods for that are not what they were."""
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    missing = [name for name in CHANGING if not callable(getattr(SchedulerWeightUpdaterManager, name, None))]
    strange = [
        name
        for name in dir(SchedulerWeightUpdaterManager)
        if name.startswith("update_weights") and name not in CHANGING
    ]
    if missing or strange or not callable(getattr(HiCacheController, "reset", None)):
        raise Unsupported(
            f"weights change in ways that are not known here: {', '.join(missing + strange) or 'reset'}",
            field="sglang",
            value=_version("sglang"),
            remedy="use the version that docs/sglang.md names",
        )
    for name in CHANGING:
        _announce(SchedulerWeightUpdaterManager, name)
    _announce_flush(HiCacheController)
    _watched.add(backend)


def _announce(manager: Any, name: str) -> None:
    method = getattr(manager, name)
    if getattr(method, "announces_to_kvstore", False):
        return

    @functools.wraps(method)
    def changing(self: Any, request: Any, *rest: Any, **named: Any) -> Any:
        if _touches_weights(self, name, request):
            for backend in list(_watched):
                backend.weights_changing()
        return method(self, request, *rest, **named)

    changing.announces_to_kvstore = True  # type: ignore[attr-defined]
    setattr(manager, name, changing)


def _touches_weights(manager: Any, name: str, request: Any) -> bool:
    if name == "resume_memory_occupation":
        tags = getattr(request, "tags", None)
        return not tags or "weights" in tags
    if name == "end_weight_update":  # what was loaded was announced; else the weights came by another way
        return not getattr(getattr(manager, "_session", None), "loaded_weights", False)
    return True


def _announce_flush(controller: Any) -> None:
    reset = controller.reset
    if getattr(reset, "announces_to_kvstore", False):
        return

    @functools.wraps(reset)
    def flushed(self: Any, *rest: Any, **named: Any) -> Any:
        result = reset(self, *rest, **named)
        mine: Any = getattr(self, "storage_backend", None)
        mine = getattr(mine, "_backend", mine)  # SGLang's failure injector stands before it in tests
        if mine in _watched:
            mine.flushed()
        return result

    flushed.announces_to_kvstore = True  # type: ignore[attr-defined]
    controller.reset = flushed


def extra_of(config: Any) -> Mapping[str, Any]:
    extra = config.extra_config
    return extra if isinstance(extra, Mapping) else {}
