"""Host memory near a device: on which NUMA node it is, and where pages come from that nobody has touched yet.

On a machine with several sockets a copy between a card and memory of the other one goes through the link between them.
A preference is all that is set: pages come from elsewhere where the node has none left. Segments of the arena are
memfds, whose policy is the file's own and not a process's: what a worker says of its mapping, before registering it
faults it in, holds for pages that the daemon touches too. Pages that are there already stay where they are: with
`prefault` (the default) all of a segment.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np

SYSFS = Path("/sys")
PREFERRED = 1
"""MPOL_PREFERRED."""
NODES_MAX = 1024
SAMPLED_PAGES = 1024
CALLS = {
    "x86_64": {"mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239, "move_pages": 279},
    "aarch64": {"mbind": 235, "get_mempolicy": 236, "set_mempolicy": 237, "move_pages": 239},
}
"""Numbers of system calls for which libc has no function."""
log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)
_Mask = ctypes.c_ulong * (NODES_MAX // (8 * ctypes.sizeof(ctypes.c_ulong)))


def node_of(pci: str, sysfs: Path = SYSFS) -> int | None:
    """Of a device at this PCI address; None where it is unknown, or where there is one node and nothing to choose."""
    try:
        nodes = [one for one in (sysfs / "devices/system/node").iterdir() if one.name[4:].isdigit()]
        node = int((sysfs / "bus/pci/devices" / pci.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if 0 <= node < NODES_MAX and len(nodes) > 1 else None


def prefer(address: int, size: int, node: int | None) -> None:
    """Pages of this mapping come from that node, if it has some. Of what is in the way only the log tells, once."""
    if node is None:
        return
    page = os.sysconf("SC_PAGESIZE")
    begin = address // page * page
    _ask("mbind", begin, address + size - begin, PREFERRED, _mask(node), NODES_MAX + 1, 0)


@contextmanager
def preferring(node: int | None) -> Iterator[None]:
    """What the calling thread allocates meanwhile comes from that node, if it has some."""
    before, mask = ctypes.c_int(0), _Mask()
    if node is None or not _ask("get_mempolicy", ctypes.byref(before), mask, NODES_MAX + 1, None, 0):
        yield
        return
    _ask("set_mempolicy", PREFERRED, _mask(node), NODES_MAX + 1)
    try:
        yield
    finally:
        _ask("set_mempolicy", before.value, mask, NODES_MAX + 1)


def nodes_of(address: int, size: int) -> Counter[int]:
    """Of how many pages are where, of some all over this mapping; what this process has not touched counts nowhere."""
    page = os.sysconf("SC_PAGESIZE")
    pages = np.arange(address // page, -(-(address + size) // page), dtype=np.uint64) * np.uint64(page)
    pages = np.ascontiguousarray(pages[:: max(1, len(pages) // SAMPLED_PAGES)])
    found = np.full(len(pages), -1, np.int32)
    _ask("move_pages", 0, len(pages), pages.ctypes.data, None, found.ctypes.data, 0)
    return Counter(int(node) for node in found if node >= 0)


def _mask(node: int) -> ctypes.Array[ctypes.c_ulong]:
    mask, bits = _Mask(), 8 * ctypes.sizeof(ctypes.c_ulong)
    mask[node // bits] = 1 << node % bits
    return mask


def _ask(call: str, *arguments: object) -> bool:
    number = CALLS.get(platform.machine(), {}).get(call)
    if number is None:
        return False
    given = [ctypes.c_ulong(each) if isinstance(each, int) else each for each in arguments]
    if _libc.syscall(number, *given) == 0:
        return True
    _say(call, os.strerror(ctypes.get_errno()))
    return False


@cache
def _say(call: str, why: str) -> None:
    """Once of each."""
    log.warning("memory is not placed near the device: %s: %s", call, why)
