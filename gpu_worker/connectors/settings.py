"""Settings that an engine hands to its connector, read strictly."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from kvstore.errors import ConfigError

RUN_DIR_VARIABLE = "KVSTORED_RUN_DIR"
Chosen = TypeVar("Chosen", bound="Daemon")


@dataclass(frozen=True)
class Daemon:
    """Where it is."""

    run_dir: str = "/run/kvstored"
    """The daemon's directory. Default: $KVSTORED_RUN_DIR, else this."""


def read_settings(cls: type[Chosen], given: Mapping[str, Any], where: str) -> Chosen:
    """An instance of `cls`, a dataclass of plain values with a default each, one of them `run_dir`. Raises ConfigError,
    naming the setting in `where`."""
    known = {field.name for field in fields(cls)}
    values: dict[str, Any] = {"run_dir": os.environ.get(RUN_DIR_VARIABLE, cls.run_dir)}
    for name, value in given.items():
        field = f"{where}.{name}"
        if name not in known:
            raise ConfigError(
                "is no setting", field=field, value=value, remedy="there are: " + ", ".join(sorted(known))
            )
        wanted = type(getattr(cls, name))
        if type(value) is not wanted:
            raise ConfigError(f"must be {wanted.__name__}", field=field, value=value)
        if wanted is int and not 0 <= value < 1 << 62:
            raise ConfigError("must not be negative", field=field, value=value)
        values[name] = value
    return cls(**values)
