"""What a model computes with: one digest over all that its KV depends on, taken from the live model, and watched.

KV may be shared between two engines only if both compute the same. Files, names and configs do not say so: adapters are
put on afterwards, weights are changed in place, hooks and other arithmetic come and go. So the digest covers what runs:

    contents     every byte of every parameter and buffer, those outside of `state_dict` included
    structure    the tree of modules: classes, attributes, configs, names, shapes, dtypes, devices, training mode
    arithmetic   torch and transformers, device, precision of products, default dtype, deterministic algorithms

What this module cannot explain is refused, with the reason: an unknown hook, a class or a function of an unknown
package, a wrapper, quantised or offloaded weights, autocast. An engine then computes without the store.

`Identity.check` is for every turn: 0.6 ms for a model of 30 layers. It compares objects, version counters, addresses
and samples of the contents (every tensor has a few; of a model up to SMALL_BYTES on a CPU all bytes are compared). What
moves no counter and misses the samples is found by a thread that digests all contents every `verify_every_s`.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import hashlib
import logging
import os
import platform
import struct
import sys
import threading
import time
import types
import typing
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
import xxhash
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import GenerationConfig, PretrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import output_capturing

from kvstore.gpu_worker import linear

VERIFY_EVERY_S = 60.0
"""Between two full digests in the background."""
SMALL_BYTES = 4 << 20
"""Contents up to this size are compared in full on every check (about 0.5 ms)."""
SAMPLE_BYTES = 1024
SAMPLES = 8
"""Of each tensor of a larger model; a check looks at one of them, the next check at the next."""
REASONS_MAX = 8
FILE_BLOCK_BYTES = 16 << 20
FILE_SETTLED_S = 2.0
"""A file that changed more recently may change again within the same tick of its clock: its digest is not kept."""

log = logging.getLogger(__name__)

Hook = Callable[..., Any]
_inert: weakref.WeakSet[Any] = weakref.WeakSet()


def inert(hook: Hook) -> Hook:
    """Says that this very function, registered as a hook, changes nothing that a model computes. Returns it."""
    _inert.add(hook)
    return hook


@dataclass(frozen=True, slots=True)
class Rules:
    """What is explained by its name and its package's version."""

    classes: tuple[str, ...] = (
        "torch.nn.modules.",
        "transformers.models.",
        "transformers.activations.",
        "transformers.modeling_layers.",
        "transformers.pytorch_utils.Conv1D",
    )
    """Beginnings of `module.Class`, of modules that compute what their parameters and attributes say."""
    packages: tuple[str, ...] = ("torch", "transformers", "safetensors")
    """Functions whose code lies in these are what they were when the package was installed."""
    opaque: tuple[str, ...] = ()
    """Beginnings of `module.Class`, of attribute values that decide nothing beyond their class."""


RULES = Rules()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a model computes with now. `digest`: 32 bytes. `reason`: why its KV must not be shared; "" if it may."""

    digest: bytes
    reason: str = ""

    @property
    def explained(self) -> bool:
        return not self.reason


# --------------------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True, slots=True)
class _FileState:
    device: int
    inode: int
    size: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> _FileState:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)


_files: dict[_FileState, bytes] = {}


def digest_of_files(paths: Iterable[Path]) -> bytes:
    """32 bytes over names and contents. A file is read once a process: the digest is kept by inode, size and time of
    change, which no program can set back. Raises OSError, also for a file that changes while it is read."""
    state = hashlib.blake2b(digest_size=32, person=b"kvs.files.v1")
    for path in sorted(paths):
        absorb(state, path.name.encode(), _digest_of_file(path))
    return state.digest()


def _digest_of_file(path: Path) -> bytes:
    with path.open("rb", buffering=0) as file:
        before = _FileState.of(os.fstat(file.fileno()))
        if (known := _files.get(before)) is not None:
            return known
        state = xxhash.xxh3_128()
        while block := file.read(FILE_BLOCK_BYTES):
            state.update(block)
        if _FileState.of(os.fstat(file.fileno())) != before:
            raise OSError(f"{path} changed while it was read")
    digest = state.digest()
    if time.time_ns() - before.changed_ns > FILE_SETTLED_S * 1e9:
        _files[before] = digest
    return digest


def absorb(state: hashlib.blake2b, *parts: bytes) -> None:
    """Each part with its length before it, so that no two sequences of parts are the same bytes."""
    for part in parts:
        state.update(struct.pack("<Q", len(part)) + part)


# ------------------------------------------------------------------------------------------------------------- tensors


def digest_of_tensor(tensor: torch.Tensor) -> bytes:
    """16 bytes over all elements, computed where they are. The digest of a tensor on a CPU and that of its copy on
    another device differ. Raises ValueError for one whose elements are not plain bytes."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise ValueError(
            f"a tensor of {tensor.layout}, {tensor.dtype}, on {tensor.device} has no plain bytes"
        )
    with torch.no_grad():
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        if tensor.device.type == "cpu":
            return xxhash.xxh3_128_digest(flat.view(torch.uint8).numpy().data) if flat.numel() else bytes(16)
        return _mixed(flat.view(torch.uint8))


MIX_WORDS = 1 << 22
_FACTORS = (-7046029254386353131, -4417276706812531889)  # odd 64-bit numbers, as torch's signed ones
_MIX_1, _MIX_2 = -4658895280553007687, -7723592293110705685


def _mixed(flat: torch.Tensor) -> bytes:
    """Of bytes on any device: two sums over all 64-bit words, each word mixed with its position first (splitmix64)."""
    words, rest = divmod(flat.numel(), 8)
    sums = [torch.zeros((), dtype=torch.int64, device=flat.device) for _ in _FACTORS]
    tail = flat.new_zeros(8)
    tail[:rest] = flat[words * 8 :]
    whole = flat[: words * 8]
    if whole.data_ptr() % 8:
        whole = whole.clone()
    pieces = [*whole.view(torch.int64).split(MIX_WORDS), tail.view(torch.int64)]
    start = 1
    for piece in pieces:
        places = torch.arange(start, start + len(piece), dtype=torch.int64, device=flat.device)
        for number, factor in enumerate(_FACTORS):
            sums[number] += _splitmix(piece ^ _splitmix(places * factor)).sum()
        start += len(piece)
    return struct.pack("<qq", *(int(each) for each in sums))


def _splitmix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _right(x, 30)) * _MIX_1
    x = (x ^ _right(x, 27)) * _MIX_2
    return x ^ _right(x, 31)


def _right(x: torch.Tensor, count: int) -> torch.Tensor:
    """torch's shift of a signed number brings in its sign: zeros here."""
    return (x >> count) & ((1 << (64 - count)) - 1)


NO_VERSION = -1
"""Of inference tensors, which count none."""


class _Token(NamedTuple):
    """What moves with nearly every change of a tensor's contents."""

    version: int
    address: int
    storage: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Token:
        version = NO_VERSION if tensor.is_inference() else tensor._version
        return cls(version, tensor.data_ptr(), tensor.untyped_storage()._cdata)


class _Sample(NamedTuple):
    kind: Any
    """The ctypes array."""
    address: int
    value: int


@dataclass(frozen=True, slots=True)
class _Record:
    """Contents of one tensor when they were digested."""

    path: str
    tensor: weakref.ref[torch.Tensor]
    token: _Token
    storage: object
    """A weak reference to the storage: while it is held, no other storage gets the same address (`token.storage`)."""
    digest: bytes
    bytes: int
    whole: Any
    """The ctypes array of its bytes; None where they are not one piece of memory."""
    samples: tuple[_Sample, ...]

    @classmethod
    def of(cls, path: str, tensor: torch.Tensor) -> _Record:
        token = _Token.of(tensor)
        storage = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())
        digest = digest_of_tensor(tensor)
        readable = tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel() > 0
        samples = _samples(token.address, tensor.nbytes) if readable else ()
        if _Token.of(tensor) != token:
            raise ValueError(f"{path} changes while it is read")
        whole = _array(tensor.nbytes) if readable else None
        return cls(path, weakref.ref(tensor), token, storage, digest, tensor.nbytes, whole, samples)


@functools.cache
def _array(length: int) -> Any:
    return ctypes.c_char * length


def _samples(address: int, length: int) -> tuple[_Sample, ...]:
    size = min(length, SAMPLE_BYTES)
    count = min(SAMPLES, -(-length // SAMPLE_BYTES))
    starts = [(length - size) * number // max(count - 1, 1) for number in range(count)]
    kind = _array(size)
    return tuple(
        _Sample(kind, address + start, xxhash.xxh3_64_intdigest(kind.from_address(address + start)))
        for start in starts
    )


# ----------------------------------------------------------------------------------------------------------- structure

_INTERNAL = frozenset(nn.Module().__dict__)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_GLOBAL_HOOKS = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
_LABELS = frozenset(
    {
        "name_or_path",
        "generation_config",
        "warnings_issued",
        "loss_type",
        "_use_kernels",  # they replace `forward`
        "_ep_plan",
        "_keep_in_fp32_modules",
        "_keep_in_fp32_modules_strict",
        "_keys_to_ignore_on_load_missing",
        "_keys_to_ignore_on_load_unexpected",
        "_keys_to_ignore_on_save",
        "_weight_conversions",
        "_is_hf_initialized",
        "_output_capturing_hooks_installed",
        "_tp_plan",
        "_pp_plan",
        "_fsdp_plan",
        "_no_split_modules",
        "_skip_keys_device_placement",
        "all_tied_weights_keys",
    }
)
"""Attributes of modules that no forward call computes with."""
_CONFIG_LABELS = frozenset(
    {
        *("_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "architectures"),
        *("dtype", "torch_dtype", "use_cache", "return_dict", "problem_type", "id2label", "label2id"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "model_type"),
    }
)
"""Of configs: where they were read from and by what, and what is handed over with every call. The dtypes that count are
those of the tensors."""
_CAPTURE = next(
    constant
    for constant in output_capturing.install_output_capuring_hook.__code__.co_consts
    if isinstance(constant, types.CodeType) and constant.co_name == "output_capturing_hook"
)
"""The hook by which transformers hands out hidden states: it returns None."""
_WRAPPERS = frozenset(str(module.__file__) for module in (contextlib, functools, typing))
"""Their functions call those in their closures."""
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, np.generic),
)


class _Unexplained(Exception):
    """The message is the reason."""


class _Scan:
    """One walk over a model. `lines` describe it, `reasons` say what stands in the way, the rest is what to watch."""

    def __init__(self, model: nn.Module, rules: Rules) -> None:
        self.lines: list[str] = []
        self.reasons: list[str] = []
        self.tensors: list[tuple[str, Any, str, torch.Tensor]] = []
        """Path, the dictionary that holds it, its name there."""
        self.dicts: list[Mapping[Any, Any]] = []
        """Dictionaries whose values must stay the same objects."""
        self.modules: list[nn.Module] = []
        self.soft: list[tuple[object, str]] = []
        """Objects that may change in place, with what they say."""
        self._rules = rules
        self._seen: dict[int, str] = {}
        self._classes: set[type] = set()
        self._namespaces: set[str] = set()
        self._roots = [str(Path(str(sys.modules[name].__file__)).parent) + os.sep for name in rules.packages]
        self._walk(model)
        for hooks in _GLOBAL_HOOKS:
            self._hooks("every module", hooks)
        self._surroundings()

    # ------------------------------------------------------------------------------------------------ modules

    def _walk(self, model: nn.Module) -> None:
        waiting = [("", model)]
        while waiting:
            path, module = waiting.pop()
            if (first := self._seen.setdefault(id(module), path)) != path:
                self.lines.append(f"{path} is {first}")
                continue
            self.modules.append(module)
            children = self._module(path, module)
            waiting += reversed(children)

    def _module(self, path: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
        cls, held = type(module), module.__dict__
        self.lines.append(f"{path} {cls.__module__}.{cls.__qualname__} training={module.training}")
        where = path or "the model"
        self._class(where, cls)
        if module.training:
            self.reasons.append(f"{where} is in training mode: call model.eval()")
        self.dicts.append(held)
        for name in ("_parameters", "_buffers", "_modules", *_HOOKS):
            if type(held.get(name)) not in (dict, OrderedDict):
                self.reasons.append(f"{where}.{name} is {type(held.get(name)).__name__}")
                return []
        self.dicts.append(held["_modules"])
        for name in _HOOKS:
            self._hooks(where, held[name])
        for kind in ("_parameters", "_buffers"):
            for name, tensor in held[kind].items():
                self._tensor(_join(path, name), held[kind], name, tensor)
        for name in sorted(held.keys() - _INTERNAL - _LABELS):
            self._attribute(path, name, module, held[name])
        children = [(_join(path, name), child) for name, child in held["_modules"].items()]
        for name, child in children:
            if not isinstance(child, nn.Module):
                self.lines.append(f"{name} {child}")
        return [(name, child) for name, child in children if isinstance(child, nn.Module)]

    def _tensor(self, path: str, holder: Any, name: str, tensor: object) -> None:
        if tensor is None:
            self.lines.append(f"{path} None")
            return
        if type(tensor) not in (nn.Parameter, torch.Tensor, nn.Buffer):
            self.reasons.append(f"{path} is a {type(tensor).__module__}.{type(tensor).__qualname__}")
            return
        assert isinstance(tensor, torch.Tensor)
        if tensor.device.type == "meta":
            self.reasons.append(f"{path} is on the meta device: its contents are elsewhere")
            return
        self.lines.append(
            f"{path} {tensor.dtype} {list(tensor.shape)} {tensor.stride()} {tensor.device.type}"
        )
        self.tensors.append((path, holder, name, tensor))

    def _attribute(self, path: str, name: str, module: nn.Module, value: object) -> None:
        where = _join(path, name)
        if isinstance(value, torch.Tensor):
            self._tensor(where, module.__dict__, name, value)
            return
        if name == "forward" and _is_ours(value, module):
            return
        try:
            text = self.text(value)
        except _Unexplained as unexplained:
            self.reasons.append(f"{where}: {unexplained}")
            return
        self.lines.append(f"{where} {text}")
        if isinstance(value, PretrainedConfig):
            if id(value) not in self._seen:
                self._seen[id(value)] = where
                self.dicts.append(value.__dict__)
                self.soft.append((value, text))
        elif isinstance(value, (dict, list, set, deque, np.ndarray)) and len(value):
            self.soft.append((value, text))

    def _hooks(self, where: str, hooks: Mapping[int, Hook]) -> None:
        self.dicts.append(hooks)
        for hook in hooks.values():
            if getattr(hook, "__code__", None) is not _CAPTURE and not _is_inert(hook):
                self.reasons.append(f"{where} has a hook that is not known: {_name(hook)}")

    # ------------------------------------------------------------------------------------------- classes and functions

    def _class(self, where: str, cls: type) -> None:
        """What a class computes is known if it is one of a package we know, and all its methods are that package's."""
        if cls in self._classes:
            return
        self._classes.add(cls)
        full = f"{cls.__module__}.{cls.__qualname__}"
        if not full.startswith(self._rules.classes) or not _is_at_home(cls):
            self.reasons.append(f"{where} is a {full}, which is not known")
            return
        for base in cls.__mro__[:-1]:
            if base in self._classes and base is not cls:
                continue
            self._classes.add(base)
            self.dicts.append(vars(base))
            for name, value in vars(base).items():
                for function in _functions(value):
                    self._function(f"{base.__qualname__}.{name}", function)
        self._namespace(sys.modules.get(cls.__module__))

    def _namespace(self, home: Any) -> None:
        """A package's module: its functions are called by their names there, which anybody can rebind."""
        if home is None or home.__name__ in self._namespaces:
            return
        self._namespaces.add(home.__name__)
        self.dicts.append(vars(home))
        for name, value in vars(home).items():
            if isinstance(value, types.FunctionType):
                self.lines.append(f"{home.__name__}.{name} {value.__module__}.{value.__qualname__}")
                self._function(f"{home.__name__}.{name}", value)

    def _function(self, where: str, function: types.FunctionType, depth: int = 0) -> None:
        file = function.__code__.co_filename
        if function is dataclass:  # a decorator, which had its say when the module was imported
            return
        if not file.startswith(("<", *self._roots)) and file not in _WRAPPERS:
            self.reasons.append(f"{where} was replaced by {_name(function)}")
        elif depth < 8:
            for cell in function.__closure__ or ():
                try:
                    inner = cell.cell_contents
                except ValueError:  # not assigned yet
                    continue
                for found in _functions(inner):
                    self._function(where, found, depth + 1)

    def _surroundings(self) -> None:
        """Functions that all models of transformers share."""
        for name in (
            "torch.nn.functional",
            "transformers.masking_utils",
            "transformers.integrations.sdpa_attention",
        ):
            if name.split(".")[0] in self._rules.packages:
                self._namespace(sys.modules.get(name))
        for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            for mapping in (interface._global_mapping, interface._local_mapping):
                self.dicts.append(mapping)
        configs = [module.__dict__.get("config") for module in self.modules]
        used = {config._attn_implementation for config in configs if isinstance(config, PretrainedConfig)}
        for name in sorted(filter(None, used)):
            for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
                function = interface.get(name)
                if isinstance(function, types.FunctionType):
                    self.lines.append(f"attention {name} {function.__module__}.{function.__qualname__}")
                    self._function(f"attention {name!r}", function)
                elif function is not None:
                    self.reasons.append(f"attention {name!r} is {_name(function)}, which is not known")

    # ------------------------------------------------------------------------------------------------ values

    def text(self, value: object, depth: int = 0) -> str:
        """What a value says; the same for equal values, in every process. Raises _Unexplained."""
        if isinstance(value, _PLAIN):
            return f"{type(value).__name__}:{value!r}"
        if depth > 16:
            raise _Unexplained("is nested too deeply")
        if isinstance(value, PretrainedConfig):
            items = {name: each for name, each in vars(value).items() if name not in _CONFIG_LABELS}
            return f"{type(value).__qualname__}{self.text(items, depth + 1)}"
        if isinstance(value, GenerationConfig):
            return ""
        if isinstance(value, dict):
            each = [
                f"{self.text(key, depth + 1)}={self.text(item, depth + 1)}" for key, item in value.items()
            ]
            return "{" + ",".join(sorted(each)) + "}"
        if isinstance(value, (set, frozenset)):
            return "{" + ",".join(sorted(self.text(item, depth + 1) for item in value)) + "}"
        if isinstance(value, (list, tuple, deque)):
            return "[" + ",".join(self.text(item, depth + 1) for item in value) + "]"
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return f"{value.dtype}{value.shape}{xxhash.xxh3_128_hexdigest(np.ascontiguousarray(value).data)}"
        if isinstance(value, nn.Module):
            if id(value) in self._seen:
                return f"module {self._seen[id(value)]}"
            raise _Unexplained(f"holds a module outside of the tree: {_name(type(value))}")
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if self._rules.opaque and kind.startswith(self._rules.opaque):
            return kind
        if isinstance(value, (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
            return self._callable(value)
        raise _Unexplained(f"is a {kind}, which is not known")

    def _callable(self, value: Any) -> str:
        function = getattr(value, "__func__", value)
        if isinstance(function, types.FunctionType):
            before = len(self.reasons)
            self._function(_name(value), function)
            if len(self.reasons) > before:
                raise _Unexplained(self.reasons.pop())
            if not isinstance(value, types.MethodType) and not _is_at_home(value):
                raise _Unexplained(f"is a function made on the way: {_name(value)}")
            if isinstance(value, types.MethodType) and id(value.__self__) not in self._seen:
                raise _Unexplained(f"is a method of another object: {_name(value)}")
        elif str(getattr(value, "__module__", "")).split(".")[0] not in self._rules.packages:
            raise _Unexplained(f"is {_name(value)}, which is not known")
        return _name(value)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _name(value: Any) -> str:
    known = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(known, '__module__', '')}.{known.__qualname__}"


def _is_at_home(value: Any) -> bool:
    """Whether a class or a function is what its package has under its name."""
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


def _functions(value: object) -> list[types.FunctionType]:
    """Those that a class attribute, or a cell, calls."""
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        value = value.__func__
    if isinstance(value, property):
        return [each for each in (value.fget, value.fset) if isinstance(each, types.FunctionType)]
    if isinstance(value, functools.partial):
        value = value.func
    return [value] if isinstance(value, types.FunctionType) else []


def _is_ours(forward: object, module: nn.Module) -> bool:
    """The product of linear.py, which is there during a step only, on its own module."""
    return (
        type(forward) is functools.partial
        and forward.func is linear._forward
        and len(forward.args) == 1
        and forward.args[0] is module
        and not forward.keywords
    )


def _is_inert(hook: object) -> bool:
    try:
        return hook in _inert
    except TypeError:  # no weak reference to it
        return False


# ---------------------------------------------------------------------------------------------------------- arithmetic


def arithmetic() -> tuple[object, ...]:
    """Settings of torch, in this thread, that change what a forward call computes."""
    return (
        torch.get_default_dtype(),
        _precision("cuda"),
        _precision("mkldnn"),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        torch._C._get_deterministic_algorithms(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )


def _precision(backend: str) -> str:
    """Of products of float32."""
    precision: str = torch._C._get_fp32_precision_getter(backend, "matmul")
    return "ieee" if precision == "none" else precision


def interference(device: str) -> str:
    """What else stands between the model and its operators in this thread; "" if nothing does."""
    if torch.is_autocast_enabled(device):
        return f"autocast to {torch.get_autocast_dtype(device)} is on"
    for mode in _get_current_dispatch_mode_stack():
        return f"a dispatch mode is on: {_name(mode)}"
    for number in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(number)
        if type(mode) is not DeviceContext:
            return f"a function mode is on: {_name(mode)}"
    return ""


def machine(device: torch.device) -> str:
    """Where it computes: other processors and devices round otherwise."""
    if device.type == "cpu":
        return f"cpu/{platform.machine()}/{torch.backends.cpu.get_cpu_capability()}"
    if device.type == "cuda":
        return f"cuda/{torch.cuda.get_device_name(device)}/{torch.version.cuda or torch.version.hip}"
    return device.type


# ------------------------------------------------------------------------------------------------------------ identity


@dataclass(slots=True)
class _Watch:
    """What a check compares."""

    full: Sequence[Iterable[Any]]
    """Views of the values of dictionaries that hold something ..."""
    values: list[tuple[Any, ...]]
    """... and these values."""
    empty: list[Mapping[Any, Any]]
    modules: list[nn.Module]
    classes: list[type]
    tensors: list[tuple[Any, str, _Record]]
    """The dictionary that holds it, its name there."""
    holders: list[Mapping[str, Any]]
    """Dictionaries of parameters and buffers ..."""
    counts: list[int]
    """... and how many there are."""
    soft: list[tuple[object, str]]
    text: Callable[[object], str]
    small: bool


@dataclass(slots=True)
class _State:
    """What the last examination found."""

    digest: bytes
    reasons: list[str]
    watch: _Watch | None
    verdicts: dict[tuple[object, ...], Verdict] = field(default_factory=dict)


class Identity:
    """Of one model, in one process. Safe for concurrent use, but settings of a thread (autocast) are the caller's.

    `counters` by name: identity_examinations (of the whole structure), identity_changes, identity_silent_changes (that
    moved no counter), identity_verifications (of all contents).
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        rules: Rules = RULES,
        verify_every_s: float = VERIFY_EVERY_S,
        counters: Counter[str] | None = None,
    ) -> None:
        """Digests all weights, at some 6 GB/s a core. `verify_every_s`: how often they are digested again in the
        background; 0: never. Raises nothing for a model that cannot be explained: `check` says why."""
        self.counters = Counter() if counters is None else counters
        self._model = model
        self._rules = rules
        self._verify_every_s = verify_every_s
        self._lock = threading.RLock()
        self._records: dict[int, _Record] = {}
        self._device = torch.device("cpu")
        self._round = 0
        self._generation = 0
        self._differs: str = ""
        self._verifying: threading.Thread | None = None
        self._closing = threading.Event()
        self._verify_at = time.monotonic() + verify_every_s
        self._told: set[str] = set()
        self.verified_at = time.monotonic()
        """When all contents were last known to be what the digest says. What was computed before is sound."""
        self.doubts = 0
        """How often contents turned out to be others since nobody knows when, after `verified_at` as it was then."""
        self._state = self._examine()

    def check(self) -> Verdict:
        """What the model computes with in this thread now. Well below a millisecond unless something changed."""
        began = time.monotonic()
        with self._lock:
            try:
                moved = self._moved()
            except Exception:
                # Whatever a model's attributes raise when they are compared: the examination says what it is
                log.debug("a model could not be compared with what it was", exc_info=True)
                moved = "structure"
            if moved:
                before = self._state.digest
                if moved == _SILENT:
                    self._forget_contents()
                    self.doubts += 1
                    self.counters["identity_silent_changes"] += 1
                self._state = self._examine()
                if self._state.digest != before:
                    self.counters["identity_changes"] += 1
                    log.info(
                        "the model computes otherwise than before: what was saved before is not used any more"
                    )
            elif self._state.watch is not None and self._state.watch.small:
                self.verified_at = began
            self._verify_now_and_then()
            return self._verdict()

    def holds(self, verdict: Verdict) -> bool:
        """Whether it still is what `check` said."""
        return self.check() == verdict

    def reset(self) -> Verdict:
        """Digests everything again, whatever the counters say: for programs that have changed weights."""
        with self._lock:
            before = self._state.digest
            self._forget_contents()
            self._state = self._examine()
            if self._state.digest != before:
                self.doubts += 1
                self.counters["identity_changes"] += 1
            return self._verdict()

    def verify(self) -> bool:
        """Digests all contents now, and waits for it: whether they are what they were. `check` knows it then."""
        self._verify(list(self._records.values()), self._generation)
        return not self._differs

    def close(self) -> None:
        """Ends the digest in the background, which stops behind the tensor that it is at, and waits for that."""
        self._closing.set()
        if self._verifying is not None:
            self._verifying.join()

    # -------------------------------------------------------------------------------------------------- verdict

    def _verdict(self) -> Verdict:
        settings = arithmetic()
        other = interference(self._device.type)
        key = (settings, other)
        if (known := self._state.verdicts.get(key)) is None:
            reasons = [*([other] if other else []), *self._state.reasons]
            reason = "; ".join(reasons[:REASONS_MAX])
            if len(reasons) > REASONS_MAX:
                reason += f"; and {len(reasons) - REASONS_MAX} more"
            state = hashlib.blake2b(digest_size=32, person=b"kvs.identity.v1")
            absorb(state, self._state.digest, repr(settings).encode(), other.encode())
            self._state.verdicts[key] = known = Verdict(state.digest(), reason)
            if reason and reason not in self._told:
                self._told.add(reason)
                log.warning("computing without the store: %s", reason)
        return known

    # ------------------------------------------------------------------------------------------------ examination

    def _examine(self) -> _State:
        self.counters["identity_examinations"] += 1
        try:
            return self._look()
        except Exception as error:
            # A model may hold anything, and its attributes may raise anything: the turn must not fail for it.
            reason = f"it could not be examined: {error!r}"
            if reason not in self._told:
                log.warning("a model could not be examined", exc_info=True)
            return _State(b"", [reason], None)

    def _look(self) -> _State:
        scan = _Scan(self._model, self._rules)
        records: dict[int, _Record] = {}
        state = hashlib.blake2b(digest_size=32, person=b"kvs.model.v1")
        tensors = []
        for path, holder, name, tensor in scan.tensors:
            record = records.get(id(tensor)) or self._record(path, tensor)
            records[id(tensor)] = record
            tensors.append((holder, name, record))
            absorb(state, path.encode(), record.digest)
        self._records = records
        if scan.tensors:
            self._device = scan.tensors[0][3].device
        scan.tensors.clear()  # the watch keeps the scan, which must not keep weights alive
        absorb(state, f"{torch.__version__}/{transformers.__version__}/{machine(self._device)}".encode())
        absorb(state, *(line.encode() for line in scan.lines))
        holders = [
            holder
            for module in scan.modules
            for holder in (module.__dict__["_parameters"], module.__dict__["_buffers"])
        ]
        watch = _Watch(
            full=(full := [each.values() for each in scan.dicts if each]),
            values=list(map(tuple, full)),
            empty=[each for each in scan.dicts if not each],
            modules=scan.modules,
            classes=[type(module) for module in scan.modules],
            tensors=tensors,
            holders=holders,
            counts=list(map(len, holders)),
            soft=scan.soft,
            text=scan.text,
            small=all(record.whole for record in records.values())
            and sum(record.bytes for record in records.values()) <= SMALL_BYTES,
        )
        return _State(state.digest(), scan.reasons, watch)

    def _record(self, path: str, tensor: torch.Tensor) -> _Record:
        known = self._records.get(id(tensor))
        if known is not None and known.tensor() is tensor and known.token == _Token.of(tensor):
            return known
        return _Record.of(path, tensor)

    def _forget_contents(self) -> None:
        self._records = {}
        self.verified_at = time.monotonic()
        self._differs = ""
        self._generation += 1
        self._verify_at = time.monotonic() + self._verify_every_s

    # -------------------------------------------------------------------------------------------------- watching

    def _moved(self) -> str:
        """What changed since the last examination, as far as that can be seen at once; "" if nothing did."""
        watch = self._state.watch
        if watch is None:
            return "it could not be examined"
        if self._differs:
            return _SILENT
        try:
            # Tuples compare their elements by identity first
            same = list(map(tuple, watch.full)) == watch.values
        except (RuntimeError, ValueError):  # arrays, which answer with arrays
            same = False
        if not same or any(watch.empty) or [type(module) for module in watch.modules] != watch.classes:
            return "structure"
        if list(map(len, watch.holders)) != watch.counts:
            return "parameters"
        return self._contents_moved(watch) or self._soft_moved(watch)

    def _contents_moved(self, watch: _Watch) -> str:
        self._round += 1
        number, digest, small = self._round, xxhash.xxh3_64_intdigest, watch.small
        for holder, name, record in watch.tensors:
            tensor = record.tensor()
            version, address, storage = record.token
            if (
                tensor is None
                or holder.get(name) is not tensor
                or tensor.data_ptr() != address
                or tensor.untyped_storage()._cdata != storage
                or (version != NO_VERSION and tensor._version != version)
            ):
                return "contents"
            # The memory is that of `record` and alive, for `tensor` is and the address is the same
            if small:
                if xxhash.xxh3_128_digest(record.whole.from_address(address)) != record.digest:
                    return _SILENT
            elif record.samples:
                kind, start, value = record.samples[number % len(record.samples)]
                if digest(kind.from_address(start)) != value:
                    return _SILENT
        return ""

    def _soft_moved(self, watch: _Watch) -> str:
        for value, text in watch.soft:
            try:
                same = watch.text(value) == text
            except _Unexplained:
                same = False
            if not same:
                return "attributes"
        return ""

    # ------------------------------------------------------------------------------------------------ verification

    def _verify_now_and_then(self) -> None:
        running = self._verifying is not None and self._verifying.is_alive()
        due = self._verify_every_s > 0 and time.monotonic() >= self._verify_at
        if due and not running and not self._closing.is_set():
            self._verify_at = time.monotonic() + self._verify_every_s
            records = list(self._records.values())
            self._verifying = threading.Thread(
                target=self._verify, args=(records, self._generation), name="kv-verify", daemon=True
            )
            self._verifying.start()

    def _verify(self, records: Sequence[_Record], generation: int) -> None:
        self.counters["identity_verifications"] += 1
        began = time.monotonic()
        for record in records:
            if self._closing.is_set():
                return
            tensor = record.tensor()
            if tensor is None or _Token.of(tensor) != record.token:
                continue  # a change that the next check sees
            try:
                same = digest_of_tensor(tensor) == record.digest
            except (ValueError, RuntimeError):
                log.warning("%s could not be digested again", record.path, exc_info=True)
                same = False
            if not same and _Token.of(tensor) == record.token:
                with self._lock:
                    if generation == self._generation:
                        self._differs = record.path
                return
        with self._lock:
            if generation == self._generation:
                self.verified_at = began


_SILENT = "contents, and no counter moved"
