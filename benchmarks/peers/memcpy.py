"""The limit: one memcpy of each value, between arrays of one process. A put copies into a second array as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from peers import ByKey, Item, Server, Shape

GIVES = "no store: the speed of one copy in one thread"


def missing() -> str:
    return ""


def start(folder: Path, room_bytes: int) -> Server:
    return Server({})


class Client(ByKey):
    def __init__(self, address: dict[str, Any], shape: Shape) -> None:
        super().__init__(shape)

    def put(self, plan: list[Item]) -> None:
        self.get(plan)

    def get(self, plan: list[Item]) -> None:
        for _, value, out in plan:
            np.copyto(out, value)
