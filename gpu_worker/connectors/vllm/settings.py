"""What `kv_connector_extra_config` may say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.errors import ConfigError
from kvstore.gpu_worker.connectors.settings import Daemon, read_settings


@dataclass(frozen=True)
class Settings(Daemon):
    """The connector's. Times in milliseconds, sizes in bytes."""

    layerwise: bool = False
    """Load inside the step, layer by layer ahead of the layer that computes, instead of parking the request until all
    of it is there."""
    compute_or_load: bool = True
    """Compute what by measured speeds would take longer to load, and give up a load that takes longer than computing.
    Off: all that is found is loaded."""
    load_tokens_min: int = 0
    """A shorter hit is computed instead."""
    lookup_ms: int = 1_000
    """How long a request may wait for the store's answer, including what is promoted from SSD; then it is computed."""
    hold_ms: int = 10_000
    """How long what a waiting request found stays pinned; after that it is looked up again when its turn comes."""
    load_ms: int = 5_000
    """After that a load has failed and vLLM computes."""
    save_ms: int = 5_000
    """After that a save is dropped."""
    save_queue_bytes: int = 256 << 20
    """KV that may wait to be saved, in memory of its own, per rank. What does not fit is dropped and counted."""
    save_what_others_load: bool = False
    """Of a MultiConnector: also save what another connector loaded while its request was parked, and what is computed
    behind it. Only where the engines that it loads from surely hold the same weights: nobody compares them."""
    drain_ms: int = 5_000
    """How long a rank that shuts down goes on saving what is queued."""
    connect_ms: int = 5_000
    """Bounds one attempt to reach the daemon; the engine never waits for it."""
    weights_digest: str = ""
    """Names the weights, where they cannot be told from files on this machine."""
    weights_epoch: int = 0
    """For who updates weights in place and counts the updates himself, on all replicas alike."""
    salt: str = ""
    """Engines with different salts share nothing."""

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Settings:
        """Raises ConfigError, naming the setting."""
        return read_settings(cls, extra, "kv_connector_extra_config")


@dataclass(frozen=True)
class TierSettings(Daemon):
    """The tier's, beside those that vLLM reads itself. Times in milliseconds."""

    lookup_ms: int = 1_000
    """How long a request may wait for the store's answer, including what is promoted from SSD; then it is computed."""
    hold_ms: int = 10_000
    """How long what a waiting request found stays pinned; after that it is looked up again when it is loaded."""
    load_ms: int = 5_000
    """After that a load has failed and vLLM computes."""
    compute_or_load: bool = True
    """As of the connector."""
    save_ms: int = 5_000
    """After that a save is dropped: so long a row of vLLM's memory may be kept from it."""
    save_share_max: float = 0.5
    """Share of vLLM's rows that waiting saves may keep from it. What does not fit is dropped and counted."""
    save_what_others_load: bool = False
    """Also save what follows KV that another tier, or another connector of a MultiConnector, has loaded. Only where
    that surely is of the same weights: nobody compares them."""
    drain_ms: int = 5_000
    """How long a shutdown, or a reset of the cache, waits for what is under way."""
    connect_ms: int = 5_000
    """Bounds one attempt to reach the daemon; the engine never waits for it."""
    enable_kv_events: bool = False
    """Publish what was stored, and what was found gone, to vLLM's KV events (where those are enabled)."""
    locality: str = "LOCAL"
    """What requests that choose their tiers know this one by."""
    weights_digest: str = ""
    """Names the weights, where they cannot be told from files on this machine."""
    weights_epoch: int = 0
    """For who updates weights in place and counts the updates himself, on all replicas alike."""
    salt: str = ""
    """Engines with different salts share nothing."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> TierSettings:
        """Raises ConfigError, naming the setting."""
        settings = read_settings(cls, given, "secondary_tiers")
        if not 0 < settings.save_share_max <= 1:
            raise ConfigError(
                "must be above 0 and at most 1",
                field="secondary_tiers.save_share_max",
                value=settings.save_share_max,
            )
        return settings
