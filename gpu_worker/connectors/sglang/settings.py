"""What `kvstore` in --hicache-storage-backend-extra-config may say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.errors import ConfigError
from kvstore.gpu_worker.connectors.settings import Daemon, read_settings

WHERE = "hicache_storage_backend_extra_config"


@dataclass(frozen=True)
class Settings(Daemon):
    """Times in milliseconds, sizes in bytes."""

    lookup_ms: int = 1_000
    """How long the daemon's answer to one look-up may take; then nothing is there."""
    load_ms: int = 5_000
    """How long a batch of pages may take, with what is read from SSD for it; then it is computed."""
    save_ms: int = 5_000
    """After that a batch of saves is dropped."""
    connect_ms: int = 5_000
    """Bounds one attempt to reach the daemon; SGLang never waits for it."""
    staging_bytes: int = 64 << 20
    """Shared memory through which this rank's saves go (protection "sealed")."""
    weights_digest: str = ""
    """Names the weights, where the model cannot be looked at: no update of weights may then keep the name."""
    salt: str = ""
    """Engines with different salts share nothing."""

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Settings:
        """Of SGLang's whole extra configuration. Raises ConfigError, naming the setting."""
        if extra.get("interface_v1") != 1:
            raise ConfigError(
                "SGLang copies each page twice without it",
                field=f"{WHERE}.interface_v1",
                value=extra.get("interface_v1"),
                remedy='add "interface_v1": 1',
            )
        mine = extra.get("kvstore", {})
        if not isinstance(mine, Mapping):
            raise ConfigError("must be a table of settings", field=f"{WHERE}.kvstore", value=mine)
        return read_settings(cls, mine, f"{WHERE}.kvstore")
