"""Work for the threads that torch may use on a CPU, each of which calls into numpy."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch

PRODUCT_MAX = 1 << 18
"""Multiplications in one matrix product at most. Beyond it OpenBLAS starts threads of its own for each product, which
wait for each other in turns with ours: 20 times slower where cores are scarce."""


def in_threads(pending: list[Callable[[], None]]) -> None:
    """Do all of this, the last first; the list is empty then."""
    threads = min(torch.get_num_threads(), len(pending))
    helpers = [_threads(os.getpid()).submit(_run, pending) for _ in range(threads - 1)]
    _run(pending)
    for helper in helpers:
        helper.result()


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    """A forked process has none of its parent's threads."""
    return ThreadPoolExecutor(thread_name_prefix=f"attention-{process}")


def _run(pending: list[Callable[[], None]]) -> None:
    with np.errstate(invalid="ignore", over="ignore"):  # of what nobody wrote
        while True:
            try:
                work = pending.pop()  # one thread gets it
            except IndexError:
                return
            work()
