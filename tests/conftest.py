"""What all tests have in common: modules that no collection of garbage looks at again, and few threads."""

from __future__ import annotations

import gc
import os
import signal

import pytest

# Several processes share the cores: threads of one would only wait for those of another. Set before torch is imported;
# what the tests start inherits it.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell that starts pytest in the background has it, and all that tests start, ignore these two.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
# Imports leave no garbage, but much to look at: a third of the time that it takes to collect all tests
gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays: else each collection of garbage looks at torch and all other modules again, for a third
    of a second."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Else extension modules find what they made still there when the process ends, and say so."""
    gc.unfreeze()
