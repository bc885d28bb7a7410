"""A rank's side of the identity: what this process really holds, weights and adapters, digested in full.

The digest covers every byte of all parameters and buffers of the model runner's model, its classes with their switches
and factors, and the files of code that is not vLLM's; a model with hooks is refused. Of weights that vLLM packs out of
sight or drops it covers the bytes that were loaded (see `loading`). An adapter's digest is that of the files it was
loaded from, known only if they were the same before and after vLLM read them.

`generation` counts changes: of the weights, and of an adapter whose place (name and path, by which vLLM's own cache
goes) got other contents. The scheduler's side says with every step for which generation it has named chunks (`weights`
in StepMetadata); a rank that is at another one loads nothing, saves nothing and reports. So a change that came by no
call that the scheduler's process sees (`weights.Watch`) costs hits, and never lets KV be taken for another model's.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import os
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvstore.errors import Unsupported
from kvstore.gpu_worker.connectors.loading import Loaded, loaded_into, watch
from kvstore.gpu_worker.connectors.vllm.identity import DRAFTERS, adapter_digest
from kvstore.gpu_worker.connectors.vllm.metadata import HeldAdapter
from kvstore.gpu_worker.identity import absorb, digest_of_files, digest_of_tensor

FULL_EVERY_S = 60.0
"""Between two digests of everything that look for changes which move no counter."""
FULL_SHARE = 100
"""They take at most this part of the time."""
STRANGE_MAX = 8
"""So many changes by no known call are followed; then the weights have no name until a known one."""
SCALES = ("_k_scale", "_v_scale", "k_scale", "v_scale", "kv_scale")
"""Of attention layers: begin the names of factors by which KV is quantised."""
PACKAGES = ("vllm", "torch", "transformers")
"""What they compute is told by vLLM's version. Other code, of plug-ins and of models that bring theirs, may be another
tomorrow under the same name."""
GLOBAL_HOOKS = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
log = logging.getLogger(__name__)
_all: weakref.WeakSet[Held] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class RankWeights:
    """What one rank holds now."""

    rank: int
    generation: int
    digest: bytes
    """32 bytes; b"": not known."""
    reason: str = ""
    """Why it is not known."""
    scales: bytes = b""
    """Digest of the factors by which KV is quantised, 16 bytes. They are part of `digest` too: here people see them
    differ."""
    unverified_s: float = field(default=0.0, compare=False)
    """How long ago they were last seen to be those that they are named for."""


@dataclass(frozen=True, slots=True)
class RankAdapter:
    """One adapter as one rank holds it. `digest`: b"": not known."""

    rank: int
    generation: int
    digest: bytes


class Held:
    """One per model runner. For the rank's main thread."""

    def __init__(self, runner: Any, config: Any, rank: int) -> None:
        self.rank = rank
        self.generation = 0
        self.config = config
        self._runner = runner
        self._models: list[tuple[nn.Module, Loaded]] = []
        """The model, and its drafter's, with what was loaded into each."""
        self._find_models()
        self._strange = 0
        """Changes by no known call, since the last known one."""
        self._known: RankWeights | None = None
        self.verified_at = 0.0
        """When the weights were last seen to be those that they are named for (time.monotonic)."""
        self.doubts = 0
        """How often they turned out to be others since nobody knows when, after `verified_at` as it was then."""
        self._hooks: list[Mapping[Any, Any]] = []
        self._watched: list[tuple[Any, str]] = []
        """Where its parameters and buffers are: the dictionary, and the name there."""
        self._marks: tuple[object, ...] = ()
        self._full_at = 0.0
        self._adapters: dict[int, bytes] = {}
        self._news: dict[int, HeldAdapter] = {}
        self._places: dict[tuple[str, str], bytes] = {}
        """What an adapter of this name and path was when it was loaded last; b"": not known."""
        self._watch_adapters()
        _all.add(self)

    # ------------------------------------------------------------------------------------------------------- weights

    def weights(self, *, anew: bool) -> RankWeights:
        """What the weights are; `anew`: digest all of them, whatever the counters say."""
        if anew or self._known is None or self._look() != self._marks:
            before = self._known
            begun = time.monotonic()
            digest, reason, scales = b"", "", b""
            self._strange = 0 if anew else self._strange
            try:
                digest = self._digest()
                scales = self._scales()
            except (Unsupported, ValueError, RuntimeError, OSError) as error:
                reason = str(error)
            self._marks = self._look()
            if before is None or before.digest == digest:
                self.verified_at = begun
            self._full_at = time.monotonic() + max(FULL_EVERY_S, FULL_SHARE * (time.monotonic() - begun))
            if before is not None and (before.digest != digest or not digest):
                self.generation += 1
            self._known = RankWeights(self.rank, self.generation, digest, reason, scales)
        elif self._known.generation != self.generation:
            self._known = replace(self._known, generation=self.generation)
        return self._known

    @property
    def is_due(self) -> bool:
        """Whether it is time to digest everything."""
        return self._known is not None and bool(self._known.digest) and time.monotonic() >= self._full_at

    def check(self) -> int:
        """The generation. Compares version counters, addresses and loads, and when it is due everything."""
        if self._known is None:
            return self.generation
        if self._look() != self._marks:
            self._changed()
        elif self.is_due:
            digest = self._known.digest
            if self.weights(anew=True).digest != digest:
                self.doubts += 1
                log.warning("weights were changed behind the engine's back: they are told apart from now on")
        return self.generation

    def _changed(self) -> None:
        self._strange += 1
        if self._strange <= STRANGE_MAX:
            log.info(
                "weights were changed by no call that is known: what was computed before is used no more"
            )
        self._marks = self._look()
        self._known = None
        self.generation += 1

    def _look(self) -> tuple[object, ...]:
        moving = (_mark(holder.get(name)) for holder, name in self._watched)
        hooks = sum(map(len, self._hooks))
        loads = sum(loaded.loads for _, loaded in self._models)
        return (*map(id, _models_of(self._runner)), loads, hooks, *moving)

    def _find_models(self) -> None:
        self._models = [(model, _watched(model)) for model in _models_of(self._runner)]

    def _digest(self) -> bytes:
        """Raises Unsupported."""
        if self._strange > STRANGE_MAX:
            raise Unsupported(
                "weights or buffers change all the time, by no call that is known",
                field="model",
                value=type(self._models[0][0]).__name__,
            )
        self._find_models()
        if _drafts(self.config) and len(self._models) < 2:
            raise Unsupported(
                "the drafter's weights are nowhere to be seen, and its KV is stored with the model's",
                field="speculative_config.method",
                value=self.config.speculative_config.method,
                remedy="set weights_digest",
            )
        modules = [module for model, _ in self._models for module in model.modules()]
        self._watched = [
            (holder, name)
            for module in modules
            for holder in (module._parameters, module._buffers)
            for name in holder
        ]
        self._hooks = [
            *GLOBAL_HOOKS,
            *(hooks for each in modules for hooks in (each._forward_hooks, each._forward_pre_hooks)),
        ]
        if len(self._models) == 1:
            return self._digest_of(*self._models[0])
        state = hashlib.blake2b(digest_size=32, person=b"kvs.vllm.draft")
        for model, loaded in self._models:
            absorb(state, self._digest_of(model, loaded))
        return state.digest()

    def _digest_of(self, model: nn.Module, loaded: Loaded) -> bytes:
        modules = dict(model.named_modules())
        if any(self._hooks):
            hooked = [
                name for name, each in modules.items() if each._forward_hooks or each._forward_pre_hooks
            ]
            raise Unsupported(
                "a hook may compute anything",
                field="model",
                value=", ".join(hooked[:3]) or type(model).__name__,
            )
        state = hashlib.blake2b(digest_size=32, person=b"kvs.vllm.held")
        for name, module in modules.items():
            absorb(state, f"{name} {type(module).__module__}.{type(module).__qualname__}".encode())
            absorb(state, repr(_settings(module)).encode(), digest_of_files(_foreign_code(module)))
        hidden, there = [], set()
        for name, tensor in _tensors(model):
            if tensor.is_meta:
                raise Unsupported("weights are just being loaded", field="model", value=name)
            there.add(name.replace(".base_layer.", "."))
            if tensor.numel() == 0 and isinstance(tensor, nn.Parameter):
                hidden.append(name.replace(".base_layer.", "."))
            absorb(state, f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), digest_of_tensor(tensor))
        # Of those that are gone, what was not loaded is as the code made it.
        gone = loaded.parameters - there
        hidden += sorted(gone & loaded.fills() if loaded.filled else gone)
        if hidden:
            absorb(state, _loaded_digest(model, hidden))
        return state.digest()

    def _scales(self) -> bytes:
        """Of all layers that have some, as tensors or as numbers."""
        state = hashlib.blake2b(digest_size=16, person=b"kvs.vllm.scales")
        for model, _ in self._models:
            for name, module in model.named_modules():
                numbers = {
                    given: value
                    for given, value in vars(module).items()
                    if given.startswith(SCALES) and isinstance(value, float)
                }
                tensors = {
                    given: tensor
                    for given, tensor in (*module._parameters.items(), *module._buffers.items())
                    if given.startswith(SCALES) and tensor is not None
                }
                for given, tensor in sorted(tensors.items()):
                    absorb(state, f"{name}.{given}".encode(), digest_of_tensor(tensor))
                if numbers:
                    absorb(state, f"{name} {sorted(numbers.items())}".encode())
        return state.digest()

    # ------------------------------------------------------------------------------------------------------ adapters

    def adapter(self, number: int) -> bytes:
        """Digest of the adapter with this id, as it is loaded now; b"": it is not, or is not known."""
        manager = getattr(self._runner, "lora_manager", None)
        if manager is None or number not in manager.list_adapters():
            return b""
        return self._adapters.get(number, b"")

    def hold(self, request: Any) -> RankAdapter:
        """Has the adapter loaded, as vLLM would with the request's first step."""
        number = request.lora_int_id
        if number not in self._runner.lora_manager.list_adapters():
            self._runner.lora_manager.add_adapter(request)
        return RankAdapter(self.rank, self.generation, self.adapter(number))

    def _watch_adapters(self) -> None:
        manager = getattr(self._runner, "lora_manager", None)
        if manager is None:
            return
        original = manager._load_adapter

        @functools.wraps(original)
        def load_adapter(request: Any) -> Any:
            before = _files(request)
            adapter = original(request)
            self._adapter_loaded(request, before if before == _files(request) else b"")
            return adapter

        manager._load_adapter = load_adapter

    def _adapter_loaded(self, request: Any, digest: bytes) -> None:
        number, place = int(request.lora_int_id), (str(request.lora_name), str(request.lora_path))
        for earlier in (self._adapters.get(number), self._places.get(place)):
            if earlier is not None and not (earlier == digest != b""):
                log.info("adapter %s has other contents now", request.lora_name)
                self.generation += 1
        self._adapters[number] = self._places[place] = digest
        self._news[number] = HeldAdapter(*place, digest)

    def take_news(self) -> dict[tuple[int, int], HeldAdapter]:
        """Adapters loaded since the last call, by rank and id."""
        news, self._news = self._news, {}
        return {(self.rank, number): adapter for number, adapter in news.items()}


def _loaded_digest(model: nn.Module, hidden: Sequence[str]) -> bytes:
    loaded = loaded_into(model)
    if loaded is None or not loaded.contents or not loaded.filled:
        raise Unsupported(
            "vLLM has packed weights out of sight, and nobody saw them being loaded",
            field="model",
            value=hidden[0],
            remedy="let vLLM load the plug-in attnstore (VLLM_PLUGINS), load weights from files, or set "
            "weights_digest",
        )
    filled = loaded.fills()
    missing = [name for name in hidden if name not in filled]
    if loaded.broken or missing:
        raise Unsupported(
            loaded.broken or "vLLM has packed weights out of sight that it did not load",
            field="model",
            value=", ".join(missing[:3]),
            remedy="load all weights again",
        )
    return loaded.digest()


def _models_of(runner: Any) -> list[nn.Module]:
    """The model, and the one that drafts for it."""
    models = [runner.get_model()]
    for name in ("drafter", "speculator"):
        drafter = getattr(getattr(runner, name, None), "model", None)
        if isinstance(drafter, nn.Module):
            models.append(drafter)
    return models


def _drafts(config: Any) -> bool:
    speculative = getattr(config, "speculative_config", None)
    return speculative is not None and speculative.method in DRAFTERS


def _watched(model: nn.Module) -> Loaded:
    """Of a model that was made before the plug-in could look, nothing is known but what is loaded from now on."""
    return watch(model, contents=all(tensor.device.type in ("cpu", "meta") for _, tensor in _tensors(model)))


def _files(request: Any) -> bytes:
    try:
        return adapter_digest(request)
    except (Unsupported, OSError) as error:
        log.warning("requests with adapter %s are computed without the store: %s", request.lora_name, error)
        return b""


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers; of one that wraps others, those."""
    waiting: list[tuple[str, Any]] = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in waiting:
        if is_traceable_wrapper_subclass(tensor):
            for part in tensor.__tensor_flatten__()[0]:
                waiting.append((f"{name}.{part}", getattr(tensor, part)))
        else:
            partitions = getattr(tensor, "partitions", None)
            if isinstance(partitions, dict):
                waiting += [(f"{name}.{index}", part) for index, part in partitions.items()]
            else:
                yield name, tensor


def _settings(module: nn.Module) -> list[tuple[str, bool | float]]:
    """Switches and factors: some depend on more than the model's config, such as the longest prompt."""
    return sorted(
        (name, value)
        for name, value in vars(module).items()
        if type(value) in (bool, float) and not name.startswith("_")
    )


def _foreign_code(module: nn.Module) -> set[Path]:
    """Files of what the module computes, as far as PACKAGES have not brought it. Raises Unsupported for code without
    one."""
    files = set()
    package = sys.modules.get(type(module).__module__)
    if package is not None and type(module).__module__.partition(".")[0] not in PACKAGES:
        files.add(str(getattr(package, "__file__", None)))
    for forward in filter(None, (vars(module).get("forward"), type(module).forward)):
        function = inspect.unwrap(getattr(forward, "__func__", forward))
        code = getattr(function, "__code__", None)
        if code is not None:
            files.add(code.co_filename)
        elif forward is not type(module).forward:
            raise Unsupported("it has been given another forward", field="model", value=type(module).__name__)
    foreign = {Path(file) for file in files if not file.startswith(_roots())}
    for file in foreign:
        if not file.is_file():
            raise Unsupported("nobody can tell what its code is", field="model", value=type(module).__name__)
    return foreign


@functools.cache
def _roots() -> tuple[str, ...]:
    modules = (sys.modules.get(name) for name in PACKAGES)
    return tuple(
        str(Path(module.__file__).parent) + os.sep for module in modules if module and module.__file__
    )


def _mark(tensor: torch.Tensor | None) -> tuple[int, int, int]:
    if tensor is None:
        return 0, 0, 0
    version = -1 if tensor.is_inference() else tensor._version
    hidden = tensor.is_meta or _wraps(type(tensor), tensor)
    return id(tensor), version, 0 if hidden else tensor.data_ptr()


_wrappers: dict[type, bool] = {torch.Tensor: False}


def _wraps(kind: type, tensor: torch.Tensor) -> bool:
    """Whether it has no memory of its own. Asked once for each kind: torch takes longer than all else here."""
    found = _wrappers.get(kind)
    if found is None:
        found = _wrappers[kind] = bool(is_traceable_wrapper_subclass(tensor))
    return found


def held_by(config: Any, rank: int) -> Held | None:
    """That of the engine with this configuration, in this process."""
    for held in list(_all):
        if held.rank == rank and held.config.model_config is config.model_config:
            return held
    return None


# --------------------------------------------------------------------------------- run in each rank, by its executor


def _held(worker: Any) -> Held:
    runner = worker.model_runner
    held = getattr(runner, "_attnstore_held", None)
    if held is None:
        held = runner._attnstore_held = Held(runner, worker.vllm_config, int(worker.rank))
    assert isinstance(held, Held)
    return held


def rank_weights(worker: Any, anew: bool) -> RankWeights:
    return _held(worker).weights(anew=anew)


def rank_generation(worker: Any) -> RankWeights:
    """Also what changed without a call."""
    held = _held(worker)
    held.check()
    unverified_s = time.monotonic() - held.verified_at
    return replace(held.weights(anew=False), unverified_s=unverified_s)


def rank_adapter(worker: Any, request: Any) -> RankAdapter:
    return _held(worker).hold(request)
