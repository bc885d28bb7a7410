"""What a program's option may be: types for argparse, which names the option and says what was wrong with it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Of an option that takes whole numbers in these bounds."""

    def number_of(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{value!r} is no whole number") from None
        if number < least or (most is not None and number > most):
            bounds = f"at least {least}" if most is None else f"between {least} and {most}"
            raise argparse.ArgumentTypeError(f"{number}: must be {bounds}")
        return number

    return number_of


def above_zero(value: str) -> float:
    """Of one that takes seconds and the like."""
    try:
        number = float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is no number") from None
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{value}: must be above 0")
    return number
