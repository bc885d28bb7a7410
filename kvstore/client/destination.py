"""Where loaded bytes go, and where saved ones come from: any buffer, numpy array or CPU torch tensor, as a numpy array
of plain bits.

torch is looked up, never imported: whoever hands us a tensor has it loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore import memory
from kvstore.errors import BadRequest

Bits = npt.NDArray[Any]
_BYTE = np.dtype(np.uint8)
_UNSIGNED: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}


def destination(out: object, field: str = "out") -> Bits:
    """A writable view of `out` as unsigned integers of its item size: flat bytes where it is contiguous, else with its
    shape and strides, to be filled in C order. Copying through it never converts, rounds or quiets a NaN.

    Raises BadRequest for what cannot be written in place.
    """
    array = _array(out, field)
    flags = array.flags
    if not flags.writeable:
        raise BadRequest("is read-only", field=field, value=_describe(array))
    bits = _bits(array, field)
    if not flags.c_contiguous and any(
        step == 0 and length > 1 for step, length in zip(bits.strides, bits.shape, strict=True)
    ):
        raise BadRequest("has elements that share memory", field=field, value=_describe(array))
    return bits


def origin(source: object, field: str = "source") -> Bits:
    """The same of what is to be read. Raises BadRequest for what has no plain bytes."""
    return _bits(_array(source, field), field)


def _array(thing: object, field: str) -> Bits:
    if isinstance(thing, np.ndarray):
        return thing
    if (torch := sys.modules.get("torch")) is not None and isinstance(thing, torch.Tensor):
        return _of_tensor(torch, thing, field)
    try:
        return np.asarray(memoryview(thing))  # type: ignore[arg-type]
    except TypeError as problem:
        raise BadRequest(
            f"is neither a buffer, a numpy array nor a CPU tensor: {problem}",
            field=field,
            value=type(thing).__name__,
        ) from None


def _bits(array: Bits, field: str) -> Bits:
    dtype = array.dtype
    if dtype.hasobject:
        raise BadRequest("holds objects, not bytes", field=field, value=_describe(array))
    if array.flags.c_contiguous:
        return array if dtype is _BYTE and array.ndim == 1 else array.reshape(-1).view(_BYTE)
    bits: Bits = array.view(_UNSIGNED.get(array.itemsize, np.dtype(f"V{array.itemsize}")))
    return bits


def groups(sizes: Sequence[int]) -> Iterator[slice]:
    """Neighbours of these sizes in bytes that are copied together: TOUCHED_BYTES, or one that is larger.

    Of small ones, all that can be done before is done for a whole group, and nothing but copies follows: each pushes
    out of the cache what the interpreter needs for anything else.
    """
    start = size = 0
    for number, more in enumerate(sizes):
        if number > start and size + more > memory.TOUCHED_BYTES:
            yield slice(start, number)
            start, size = number, 0
        size += more
    if sizes:
        yield slice(start, len(sizes))


def copy_pairs(pairs: Sequence[tuple[Bits, Bits]]) -> None:
    """Copy each source (flat bytes in shared memory, as many as go there) into its `destination`."""
    for group in groups([source.size for _, source in pairs]):
        mine = pairs[group]
        if len(mine) > 1:
            for _, source in mine:
                memory.touch(source)
        copy = memory.copy if len(mine) > 1 else memory.copy_out
        for bits, source in mine:
            if bits.dtype is _BYTE and bits.ndim == 1:
                copy(bits, source)
            else:
                np.copyto(bits, source.view(bits.dtype).reshape(bits.shape), casting="no")


def gather(pairs: Sequence[tuple[Bits, Bits]]) -> None:
    """Copy each `origin`, in C order, into as many flat bytes of shared memory; those of one of `groups`."""
    if len(pairs) > 1:
        for target, _ in pairs:
            memory.touch(target)
    copy = memory.copy if len(pairs) > 1 else memory.copy_in
    for target, bits in pairs:
        if bits.dtype is _BYTE and bits.ndim == 1:
            copy(target, bits)
        else:
            np.copyto(target.view(bits.dtype).reshape(bits.shape), bits, casting="no")


def _of_tensor(torch: Any, tensor: Any, field: str) -> Bits:
    if tensor.device.type != "cpu":
        raise BadRequest(
            "is not in host memory", field=field, value=tensor.device, remedy="copy to a CPU tensor first"
        )
    try:
        plain = tensor.detach()
        if plain.element_size() == 16:
            plain = torch.view_as_real(plain)
        whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()]
        array: Bits = plain.view(whole).numpy()
    except (RuntimeError, TypeError, KeyError) as problem:
        kind = f"{tensor.dtype} {tensor.layout}"
        raise BadRequest(f"is no plain strided tensor: {problem}", field=field, value=kind) from None
    return array


def _describe(array: Bits) -> str:
    return f"{array.dtype} of shape {array.shape}"
