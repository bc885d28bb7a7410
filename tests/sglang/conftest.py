"""SGLang on a machine without a GPU: its classes load once what they import for images is there. SGLang has an
environment of its own (`make test-sglang`); elsewhere these tests are skipped."""

from __future__ import annotations

import enum
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

THERE = importlib.util.find_spec("sglang") is not None
collect_ignore_glob = [] if THERE else ["test_*.py"]


class Nothing:
    """Stands for every class of torchvision, whose wheel does not load beside a CPU build of torch."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("there is no torchvision here")


def _stub(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = []  # type: ignore[attr-defined]
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def anything(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Nothing

    module.__getattr__ = anything  # type: ignore[method-assign]
    names = ("NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")
    module.InterpolationMode = enum.Enum("InterpolationMode", names)  # type: ignore[attr-defined]
    return module


def _load_without_torchvision() -> None:
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()  # it remembers that there is none
    for name in (
        *("torchvision", "torchvision.io", "torchvision.ops", "torchvision.transforms"),
        *(
            "torchvision.transforms.functional",
            "torchvision.transforms.v2",
            "torchvision.transforms.v2.functional",
        ),
    ):
        sys.modules[name] = _stub(name)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, sys.modules[name])


if THERE:
    _load_without_torchvision()
