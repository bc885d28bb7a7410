"""The parsers' fuzz targets for a moment, with the same inputs each time; `make fuzz` takes as long as one likes."""

from __future__ import annotations

import random

import pytest

from ..stress.fuzz import TARGETS, changed


@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_refuses_in_its_own_way(name: str) -> None:
    target, chance = TARGETS[name], random.Random(name)
    for seed in target.seeds:
        target.parse(seed)  # good inputs are taken
    for _ in range(target.inputs):
        data = changed(chance, chance.choice((*target.seeds, b"")))
        try:
            target(data)
        except Exception as problem:
            raise AssertionError(f"{name}: {data!r}") from problem
