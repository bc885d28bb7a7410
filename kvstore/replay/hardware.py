"""Models of machines and of models: how long prefill, decoding and loading take, and what an hour costs.

A prefill of n tokens takes n / `prefill_tokens_per_s`; its cached part is loaded layer by layer behind the computation
(AttentionStore, section 3.2.1), so a prefill takes the longer of both. Decoding takes a fixed time a token, in a batch
that stands still while somebody else's prefill runs (section 4.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

MIB = 1 << 20
GB = 10**9


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    parameters: float
    kv_bytes_per_token: int
    gpus: int = 1
    window: int = 4096
    """Tokens of context."""
    flops: float = 312e12
    """Peak of one GPU (A100, 16-bit); two floating-point operations for each parameter and token are needed."""
    utilisation: float = 0.5
    """Of the peak, in prefill."""
    decode_s: float = 0.03
    """Of one token, whatever the batch."""

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.gpus * self.flops * self.utilisation / (2 * self.parameters)

    def faster(self, tokens_per_s: float) -> Model:
        """The same with a prefill that was measured."""
        return replace(self, utilisation=self.utilisation * tokens_per_s / self.prefill_tokens_per_s)


MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        Model("llama-13b", 13.0e9, 819_200, gpus=2),
        Model("llama-65b", 65.2e9, 2_621_440, gpus=4, window=2048),
        Model("llama-70b", 69.0e9, 327_680, gpus=4),
        Model("falcon-40b", 41.3e9, 122_880, gpus=4, window=2048),
        Model("mistral-7b", 7.2e9, 131_072, window=32_768),
    )
}
"""Of the paper (section 4.1), with its bytes a token: 0.78, 2.5, 0.31 and 0.12 MiB; keys and values in 16 bits."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Bandwidths in bytes a second, prices in dollars an hour: those of the paper unless said otherwise."""

    pcie_bytes_per_s: float = 26 * GB
    """From DRAM to one GPU; each loads its part."""
    ssd_bytes_per_s: float = 5 * GB
    """Reads and writes together."""
    ssd_latency_ms: float = 0.1
    batch: int = 24
    """Jobs that decode together (section 4.1)."""
    gpu_per_hour: float = 5.0
    dram_gb_per_hour: float = 0.0088
    ssd_gb_per_hour: float = 0.000082

    def load_s(self, model: Model, tokens: float) -> float:
        """Of so many cached tokens, from DRAM."""
        return tokens * model.kv_bytes_per_token / (self.pcie_bytes_per_s * model.gpus)

    def cost(self, model: Model, hours: float, dram_bytes: float, ssd_bytes: float) -> Cost:
        return Cost(
            hours * model.gpus * self.gpu_per_hour,
            hours * dram_bytes / GB * self.dram_gb_per_hour,
            hours * ssd_bytes / GB * self.ssd_gb_per_hour,
        )


@dataclass(frozen=True, slots=True)
class Cost:
    """Dollars."""

    gpu: float = 0.0
    dram: float = 0.0
    ssd: float = 0.0

    @property
    def total(self) -> float:
        return self.gpu + self.dram + self.ssd

    @property
    def storage_share(self) -> float:
        return (self.dram + self.ssd) / self.total if self.total else 0.0
