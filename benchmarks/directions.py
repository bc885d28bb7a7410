"""Whether more or less of a figure is better: by its exact name, as no part of a name says it (`tokens_s` are tokens a
second, `first_token_s` are seconds). `tests/unit/test_benchmark_programs.py` holds benchmarks/results/ to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# fmt: off
MORE = frozenset(
    (
        "agreement", "cpu_speedup", "em", "f1", "gb_per_s", "group_over_it", "hits", "in_dram",
        "in_dram_foreseen", "memory_saved", "of_copy", "of_fio", "of_indexing", "of_memcpy",
        "of_one_client", "ours_cpu_speedup", "ours_speedup", "per_s", "sealed_over_it",
        "shared_tokens_s", "speedup", "throughput_ratio", "tier_gb_per_s", "tokens_per_s",
    )
)
LESS = frozenset(
    (
        "client_cpu_s_per_gb", "client_cpu_us", "copy_ms", "cpu_s", "daemon_cpu_us", "decode_ms",
        "fastest_over_slowest", "first_ms", "first_token_s", "growth", "healed_s", "hung_p50_ms",
        "index_bytes_per_chunk", "kept_ms", "kept_cpu_ms", "kl", "kl_median", "later_ms",
        "loaded_ms", "ours_cpu_ms", "ours_ms", "over_kept", "overhead", "p50_ms", "p50_us",
        "peak_kv_mib", "perplexity", "perplexity_growth", "perplexity_ratio", "planning_ms",
        "prefill_ms", "ratio_max", "read_ms", "server_cpu_s_per_gb", "shared_cpu_ms_per_step",
        "shared_cpu_s", "shared_first_s", "shared_peak_mib", "shared_ttft_s", "slower_share",
        "ssd_ms", "ssd_ratio", "stored_kib_a_token", "stored_ms", "token_ms", "told_ms",
        "ttft_cpu_ms", "ttft_ms", "us_per_key", "waited_ms", "well_p50_ms", "write_amplification",
    )
)
NEITHER = frozenset(
    (
        # of other programs, and of ours without what is measured
        "alone", "alone_ms", "bare_gb_per_s", "calm_p99_ms", "copy_gb_per_s", "full_cpu_ms",
        "full_ms", "full_perplexity", "gather_cpu_ms", "gather_cpu_speedup", "gather_ms",
        "gather_speedup", "iperf3_gb_per_s", "kl_uncut", "lmcache", "memcpy_ms",
        "mooncake_gb_per_s", "no_store", "peak_kv_mib_alone", "prefix_ms", "recomputed_ms",
        "sdpa_cpu_ms", "sdpa_cpu_speedup", "sdpa_ms", "sdpa_speedup", "slower_share_by_noise",
        "token_ms_alone", "tokens_per_s_without", "ttft_ms_without", "unshared_cpu_ms_per_step",
        "unshared_cpu_s", "unshared_first_s", "unshared_peak_mib", "unshared_tokens_s",
        "unshared_ttft_max_s", "unshared_ttft_s", "without_ms",
        # of so few calls that they say what else the machine did
        "attacked_p99_ms", "gb_per_s_max", "gb_per_s_min", "hung_max_ms", "hung_p99_ms", "p99",
        "p99_ms", "p99_us", "shared_ttft_max_s", "spread", "well_p99_ms",
        # what was done, and ratios of which each benchmark has its own sense: its goals have their direction
        "cached", "kib_a_token", "kvstored_over_no_store", "lmcache_over_no_store", "loaded_mib",
        "mooncake_ratio", "ratio", "recomputed_share", "share_recomputed", "written",
    )
)
# fmt: on
LESS_UNITS = frozenset(("ns", "us", "µs", "ms", "s", "µs per key", "bytes per chunk", "bytes per session"))
OF_A_UNIT = ("kvstored", "p50")
"""Fields of rows that name their figure's unit."""


class Unknown(Exception):
    """Of a figure nobody said which way it is counted."""


def more_is_better(field: str, row: Mapping[str, Any]) -> bool | None:
    """None: neither. Raises Unknown."""
    if field in OF_A_UNIT and "unit" in row:
        if row.get("better") in ("<=", ">="):
            return bool(row["better"] == ">=")
        if row["unit"] in LESS_UNITS:
            return False
        raise Unknown(f"{field} in {row['unit'] or 'no unit'}")
    field = field.replace(" ", "_")
    if field in MORE or field in LESS:
        return field in MORE
    if field in NEITHER:
        return None
    raise Unknown(field)
