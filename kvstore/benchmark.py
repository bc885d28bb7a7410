"""What every benchmark says beside its figures: the machine, the commit, which goals were met; as a last line of JSON.

{"machine": {...}, "commit": "...", "results": [...], "goals": [{name, value, unit, goal, direction, met}]}
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from kvstore.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure and what it should be: at least (">=") or at most ("<=") `goal`, in `unit`."""

    name: str
    value: float
    unit: str
    goal: float
    direction: Literal[">=", "<="]

    def __post_init__(self) -> None:
        if self.direction not in (">=", "<="):
            raise BadRequest('must be ">=" or "<="', field="direction", value=self.direction)

    @property
    def met(self) -> bool:
        return self.value >= self.goal if self.direction == ">=" else self.value <= self.goal

    def __str__(self) -> str:
        verdict = "met" if self.met else "MISSED"
        return f"{self.name}: {self.value:.4g} {self.unit}, goal {self.direction} {self.goal:g}: {verdict}"


def machine() -> dict[str, Any]:
    """What a figure depends on; `load` is the average of the last minute, other work included."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(models, platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
    }


def commit(of: str | Path) -> str:
    """Of the checkout that the file `of` lies in; with "-dirty" when it was changed since; "unknown" outside of one."""
    command = ["git", "-C", str(Path(of).resolve().parent), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return found.stdout.strip() or "unknown"


def heading(of: str | Path) -> str:
    """One line to stand above a table."""
    on = machine()
    return (
        f"{on['cpu']}, {on['cores']} cores, kernel {on['kernel']}, Python {on['python']}, "
        f"load {on['load']}, commit {commit(of)}"
    )


def report(of: str | Path, results: Sequence[Mapping[str, Any]], goals: Sequence[Goal]) -> str:
    """The line of JSON that ends a benchmark's output."""
    return json.dumps(
        {
            "machine": machine(),
            "commit": commit(of),
            "results": list(results),
            "goals": [
                asdict(goal) | {"value": round(goal.value, 4), "met": bool(goal.met)} for goal in goals
            ],
        }
    )
