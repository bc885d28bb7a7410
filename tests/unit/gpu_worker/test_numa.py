"""Placement of host memory: by a sysfs that is made up, and as the kernel has it of real memory on this machine."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvstore.gpu_worker import numa

MIB = 1 << 20
ADDRESS = 2
"""MPOL_F_ADDR."""
linux = pytest.mark.skipif(
    platform.machine() not in numa.CALLS or not Path("/proc/self/numa_maps").exists(),
    reason="this kernel has no NUMA policies, or its calls have numbers that are not known here",
)


def machine(sysfs: Path, nodes: int, **devices: str) -> Path:
    for node in range(nodes):
        (sysfs / "devices/system/node" / f"node{node}").mkdir(parents=True)
    (sysfs / "devices/system/node" / "online").write_text(f"0-{nodes - 1}\n")
    for name, node in devices.items():
        folder = sysfs / "bus/pci/devices" / name.replace("_", ":").replace("__", ".")
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return sysfs


@pytest.mark.parametrize(
    ("nodes", "told", "node"), [(2, "1", 1), (2, "0", 0), (2, "-1", None), (1, "0", None), (2, "?", None)]
)
def test_the_node_of_a_device(nodes: int, told: str, node: int | None, tmp_path: Path) -> None:
    sysfs = machine(tmp_path, nodes, **{"0000_a1_00.0": told})
    assert numa.node_of("0000:A1:00.0", sysfs) == node, "the driver writes capitals"


def test_a_device_or_a_machine_that_is_not_described(tmp_path: Path) -> None:
    assert numa.node_of("0000:a1:00.0", tmp_path) is None
    assert numa.node_of("0000:a1:00.0", machine(tmp_path, 2)) is None


def policy(address: int | None = None) -> tuple[int, int]:
    """(mode, mask) of memory that lies there, or of the calling thread; as the kernel says."""
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    number = numa.CALLS[platform.machine()]["get_mempolicy"]
    code = ctypes.CDLL(None).syscall(
        *(number, ctypes.byref(mode), mask, ctypes.c_ulong(1025)),
        *(ctypes.c_void_p(address), ctypes.c_ulong(0 if address is None else ADDRESS)),
    )
    assert code == 0
    return mode.value, mask[0]


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = os.memfd_create("test-numa")
    os.ftruncate(fd, MIB)
    yield fd
    os.close(fd)


def mapped(fd: int, protection: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(fd, MIB, prot=protection), np.uint8)


@linux
def test_what_is_preferred_of_one_mapping_holds_for_all_who_map_it(memfd: int) -> None:
    """Though it can only be read here: another one, the daemon's, can be written."""
    ours, daemons = mapped(memfd, mmap.PROT_READ), mapped(memfd, mmap.PROT_READ | mmap.PROT_WRITE)
    assert policy(daemons.ctypes.data)[0] == 0
    numa.prefer(ours.ctypes.data + 100, ours.nbytes - 100, 0)  # from the page on in which it begins
    assert policy(ours.ctypes.data) == policy(daemons.ctypes.data) == (numa.PREFERRED, 1)
    assert policy(daemons.ctypes.data + MIB - 1) == (numa.PREFERRED, 1)


@linux
def test_an_unknown_node_leaves_memory_as_it_is(memfd: int) -> None:
    memory = mapped(memfd, mmap.PROT_READ)
    numa.prefer(memory.ctypes.data, memory.nbytes, None)
    assert policy(memory.ctypes.data)[0] == 0
    with numa.preferring(None):
        assert policy()[0] == 0


@linux
def test_a_thread_prefers_a_node_for_a_while_and_no_other_thread_does() -> None:
    before = policy()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(policy).result() == before
        with numa.preferring(0):
            assert policy() == (numa.PREFERRED, 1)
            assert other.submit(policy).result() == before
    assert policy() == before


@linux
def test_where_pages_are(memfd: int) -> None:
    memory = mapped(memfd, mmap.PROT_READ | mmap.PROT_WRITE)
    assert numa.nodes_of(memory.ctypes.data, MIB) == Counter()
    page = os.sysconf("SC_PAGESIZE")
    memory[: MIB // 2 : page] = 1
    found = numa.nodes_of(memory.ctypes.data, MIB)
    assert found.total() == MIB // 2 // page and set(found) <= set(range(numa.NODES_MAX))


@linux
def test_what_the_kernel_refuses_is_told_once_and_stops_nothing(
    memfd: int, caplog: pytest.LogCaptureFixture
) -> None:
    memory = mapped(memfd, mmap.PROT_READ)
    numa._say.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            numa.prefer(memory.ctypes.data, memory.nbytes, numa.NODES_MAX - 1)  # no machine has so many
    assert len(caplog.records) == 1 and "mbind: Invalid argument" in caplog.text
    assert policy(memory.ctypes.data)[0] == 0
