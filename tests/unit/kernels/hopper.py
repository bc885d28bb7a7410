"""Compiling kernels for a GPU that is not here, and what the result says; interpreting them in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import pytest

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""That one program can have, by compute capability."""
CAPABILITIES = [90, *(pytest.param(each, marks=pytest.mark.slow) for each in (80, 89, 100, 120))]
"""For which each kernel is compiled in tests: all of them in the long ones."""


def interpreted_passes(file: str) -> int:
    """Run the tests of a file that have "interpreter" in their names; how many passed, if none failed."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = (
        *(sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "interpreter"),
        # Triton 3.6 with a numpy before 2.4; from 2.4 on it is an error, so that a later Triton is needed
        *("-W", "ignore:Conversion of an array with ndim:DeprecationWarning"),
        file,
    )
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    (passed,) = re.findall(r"\b(\d+) passed", done.stdout)
    return int(passed)


def compile_aligned(
    function: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
    capability: int = 90,
) -> Any:
    """As at a launch with whole tensors, whose addresses are multiples of 16, and so are numbers that the kernel is
    compiled for. Arguments that `types` does not name are int32 or, with names that end in "_ptr", point at it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def kind(name: str) -> str:
        return "constexpr" if name in constants else "*i32" if name.endswith("_ptr") else "i32"

    signature = {name: types.get(name, kind(name)) for name in function.arg_names}
    aligned = {
        (number,): [["tt.divisibility", 16]]
        for number, (kind, parameter) in enumerate(zip(signature.values(), function.params, strict=True))
        if kind[0] in "*i" and not parameter.do_not_specialize
    }
    places = {(list(signature).index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=places, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))


def stack_bytes(binary: Any) -> int:
    """Of registers that spill, and whatever else lies in local memory."""
    from triton.knobs import nvidia

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = (nvidia.cuobjdump.path, "--dump-resource-usage", file.name)
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (found,) = re.findall(r"STACK:(\d+)", told)
    return int(found)


def pipelined_waits(binary: Any) -> list[int]:
    """How many groups of loads may be under way at each wait for one."""
    return [int(count) for count in re.findall(r"cp\.async\.wait_group\s+(\d+)", binary.asm["ptx"])]
