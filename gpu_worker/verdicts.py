"""Which devices have passed the self-check: a file, so that not every start of a worker checks anew.

A verdict on copies counts for one device with one driver, kernel, IOMMU, torch, version of ours, path to the arena and
layout of KV; one on kernels for one device with one driver, torch, triton, sources of the kernels and shape: both for a
while. Only what passed is kept. A byte that differs in service takes the verdicts of its device back.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import kvstore
from kvstore.gpu_worker.device import Device
from kvstore.gpu_worker.layout import Geometry

LASTS_S = 7 * 24 * 3600.0


def default_file() -> Path:
    """Of this user."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "attnstore" / "self-checks.json"


def subject(device: Device, geometry: Geometry, path: str) -> str:
    """What a verdict is about; `path`: how the device gets at the arena."""
    return json.dumps(
        {
            "device": device.identity,
            "kernel": platform.release(),
            "iommu": _iommu(),
            "torch": torch.__version__,
            "attnstore": kvstore.__version__,
            "path": path,
            "layout": f"{geometry.layers}x{geometry.heads}x{geometry.head_dim} {geometry.dtype} "
            f"{geometry.chunk_tokens}",
        },
        sort_keys=True,
    )


def kernels_subject(device: Device, shape: str, *, triton: str, sources: str) -> str:
    """Of kernels that were compared with what they should give; `sources`: a digest of what they are compiled from."""
    return json.dumps(
        {
            "device": device.identity,
            "torch": torch.__version__,
            "triton": triton,
            "kernels": sources,
            "shape": shape,
        },
        sort_keys=True,
    )


def _iommu() -> list[str]:
    try:
        return sorted(os.listdir("/sys/class/iommu"))
    except OSError:
        return []


class Verdicts:
    """A file of subjects and when each passed, in seconds since the epoch. What cannot be read counts as empty, and
    what cannot be written is checked again the next time."""

    def __init__(self, file: Path, *, lasts_s: float = LASTS_S, now: Callable[[], float] = time.time) -> None:
        self.file = file
        self._lasts_s = lasts_s
        self._now = now

    def __repr__(self) -> str:
        return f"Verdicts({self.file}, {len(self._read())} kept)"

    def passed(self, subject: str) -> bool:
        """Also false of one that says it will pass: the clock was set back."""
        at = self._read().get(subject)
        return at is not None and 0 <= self._now() - at < self._lasts_s

    def note(self, subject: str) -> None:
        now = self._now()
        kept = {name: at for name, at in self._read().items() if 0 <= now - at < self._lasts_s}
        self._write(kept | {subject: now})

    def take_back(self, device: Device) -> None:
        """All of this device."""
        mine = json.dumps(device.identity)
        self._write({name: at for name, at in self._read().items() if f'"device": {mine}' not in name})

    def _read(self) -> dict[str, float]:
        try:
            found = json.loads(self.file.read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {name: float(at) for name, at in found.items() if isinstance(at, (int, float))}

    def _write(self, verdicts: dict[str, float]) -> None:
        with contextlib.suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.file.parent, prefix=self.file.name)
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump(verdicts, file)
                os.replace(name, self.file)
            except BaseException:
                os.unlink(name)
                raise
