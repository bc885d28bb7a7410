"""What kernels would be compiled for on a GPU that is not here: launches bound as Triton binds them, and not run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

CUDA_GRID_Y_MAX = 65_535
CUDA_GRID_X_MAX = (1 << 31) - 1


@dataclass
class Launches:
    """`keys`: of each launch what Triton would look its compiled kernel up by; `grids`: how many programs it has."""

    keys: set[tuple[str, str, str]] = field(default_factory=set)
    grids: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)


@contextmanager
def bound(monkeypatch: pytest.MonkeyPatch, capability: int = 90) -> Iterator[Launches]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    backend = make_backend(GPUTarget("cuda", capability, 32))
    binders: dict[Any, Any] = {}
    launches = Launches()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if self not in binders:
            binders[self] = create_function_from_signature(self.signature, self.params, backend)
        _, specialization, others = binders[self](*args, **options)
        name = f"{self.fn.__module__}.{self.fn.__name__}"
        launches.keys.add((name, str(specialization), str(sorted(others.items()))))
        launches.grids.append((name, tuple(grid)))
        x, *others = grid
        assert 0 < x <= CUDA_GRID_X_MAX and all(0 < one <= CUDA_GRID_Y_MAX for one in others), (name, grid)

    with monkeypatch.context() as patched:
        patched.setattr(JITFunction, "run", run)
        yield launches
