"""Whether the kernels that an engine computes with may be trusted on its device: each has been compared with its
naive.py for this model's shapes, lately or now, and so has the choice of tokens. See `kernels/self_check.py`."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch

from kvstore import kernels
from kvstore.errors import Unsupported
from kvstore.gpu_worker.device import Device
from kvstore.gpu_worker.sampling import ROWS_MAX, Sampler, Sampling, choose_all
from kvstore.gpu_worker.verdicts import Verdicts, default_file, kernels_subject
from kvstore.kernels.self_check import KERNELS, Shape, Wrong, check_kernels

COPIES = ("pages",)
"""Kernels that no engine of ours computes with."""
FEW_TOKENS = 300
NO_NUMBERS = 1
"""The row with a NaN."""
OTHER_VERSION = "use another version of the driver, of torch or of triton, or have the model on a CPU"
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.6, top_k=40),
    Sampling(temperature=0.8, top_p=0.9),
    Sampling(temperature=1.3, top_k=200, top_p=0.5),
)


def prove_kernels(
    device: Device, where: torch.device, shape: Shape, vocabulary: int, *, verdicts: Verdicts | None = None
) -> None:
    """`where`: the device's memory. Raises Unsupported for a device on which something of it is wrong."""
    verdicts = verdicts or Verdicts(default_file())
    about = kernels_subject(device, f"{shape!r} {vocabulary}", triton=_triton(), sources=_sources())
    if verdicts.passed(about):
        return
    try:
        check_kernels(shape, where, names=names_for(shape))
        check_choice(vocabulary, where)
    except Wrong as wrong:
        raise Unsupported(
            f"a kernel is wrong on it: {wrong}",
            field="device",
            value=device.identity,
            remedy=f"see `kvctl doctor gpu`; {OTHER_VERSION}",
        ) from wrong
    verdicts.note(about)


def names_for(shape: Shape) -> list[str]:
    """Of the kernels that an engine uses. Without pairs of a rotation no keys are moved, but stretches may be seen."""
    return [name for name in KERNELS if name not in COPIES and (shape.pairs or name != "rotate")]


def check_choice(vocabulary: int, where: torch.device) -> None:
    """Of each kind of sampling a row, and of a small vocabulary more rows than are sampled at a time; one of each
    has no numbers. Raises Wrong."""
    _check_choice(SAMPLINGS + SAMPLINGS[:1], vocabulary, where)
    _check_choice(SAMPLINGS * (1 + ROWS_MAX // (len(SAMPLINGS) - 1)), min(vocabulary, FEW_TOKENS), where)


def _check_choice(samplings: Sequence[Sampling], vocabulary: int, where: torch.device) -> None:
    draw = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn((len(samplings), vocabulary), generator=draw)
    logits[NO_NUMBERS, vocabulary // 2] = math.nan
    samplers = [Sampler(sampling) for sampling in samplings]
    try:
        found = choose_all(samplers, logits.to(where))
    except RuntimeError as error:
        raise Wrong(f"choice of tokens: {error}") from error
    rows = logits.double().numpy()
    for number, (choice, sampler) in enumerate(zip(found, samplers, strict=True)):
        if bool(choice.failure) != (number == NO_NUMBERS):
            raise Wrong(
                f"choice of tokens: row {number} of {len(found)}: {choice.failure or 'NaN is no failure'}"
            )
        if number == NO_NUMBERS:
            continue
        exact = naive_choice(rows[number], sampler)
        if choice.token != exact:
            raise Wrong(
                f"choice of tokens, {sampler.sampling}, vocabulary {vocabulary}: row {number} of {len(found)}: token"
                f" {choice.token} instead of {exact}"
            )


def naive_choice(logits: np.ndarray[tuple[int], np.dtype[np.float64]], sampler: Sampler) -> int:
    """What `choose_all` chooses of a row, by the same number drawn."""
    sampling = sampler.sampling
    if not sampling.temperature:
        return int(logits.argmax())
    scaled = (logits - logits.max()) / sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        scaled[scaled < np.sort(scaled)[-sampling.top_k]] = -math.inf
    shares = np.exp(scaled)
    shares /= shares.sum()
    if sampling.top_p < 1:
        largest_first = np.argsort(-shares, kind="stable")
        before = np.concatenate(([0.0], shares[largest_first].cumsum()[:-1]))
        shares[largest_first[before >= sampling.top_p]] = 0.0
    ends = shares.cumsum()
    return int(np.searchsorted(ends, sampler.draw() * ends[-1], side="right"))


def _triton() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "none"


@cache
def _sources() -> str:
    """A digest of what kernels are compiled from."""
    digest = blake2b(digest_size=16)
    for file in _files(kernels.__path__):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _files(folders: Sequence[str]) -> list[Path]:
    return sorted(file for folder in folders for file in Path(folder).rglob("*.py"))
