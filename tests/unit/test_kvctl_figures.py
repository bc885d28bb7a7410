"""What `kvctl` makes of the daemon's numbers: rates, frames, words, and what tells namespaces apart."""

from __future__ import annotations

import re

import pytest

from kvstore import wire
from kvstore.cli import stats as stats_command
from kvstore.cli import top
from kvstore.cli.rates import rates
from kvstore.cli.stats import WATCH_HEAD, WATCH_WIDTHS, differences_text, stats_text, watch_row
from kvstore.cli.tables import count, plain, rate, share, word, words
from kvstore.layout import GroupSpec, LayerSlice, NamespaceSpec
from kvstore.types import Outcome, Reason, Tier
from kvstore.v1 import stats_pb2

BOOT = b"b" * 16


def reply(uptime_ms: int, hits: int = 0, ssd_hits: int = 0, boot: bytes = BOOT, **reasons: int):
    counters = {f"lookups{{namespace=1,reason={reason}}}": times for reason, times in reasons.items()}
    counters |= {
        "lookups{namespace=1,reason=none}": hits,
        "bytes_saved": 1000 * hits,
        "chunks_promoted_ahead": hits,
    }
    row = stats_pb2.NamespaceStats(
        namespace_id=1,
        model="m",
        hits=hits,
        ssd_hits=ssd_hits,
        lookups=hits + sum(reasons.values()),
        chunk_tokens=64,
        chunk_bytes=1 << 20,
    )
    return stats_pb2.StatsReply(
        boot_id=boot,
        uptime_ms=uptime_ms,
        namespaces=[row],
        counters=counters,
        gauges={"chunks_being_promoted": 30, "queued_jobs": 7, "workers": 2},
        arena=stats_pb2.Arena(bytes=100 << 20, ready_bytes=(10 << 20) + 10 * uptime_ms),
        ssd=stats_pb2.Ssd(state="ok"),
    )


def test_stats_say_why_there_was_no_hit() -> None:
    text = stats_text(reply(10_000, hits=70, ssd_hits=20, never_seen=10, on_ssd=5, evicted=15))
    assert "100 lookups: 70 hits (70.0 %), 5 pending, 25 missed\n    pending: 5 on ssd\n" in text
    assert "\n    missed: 15 evicted, 10 never seen\n" in text
    assert "lookup" not in stats_text(reply(10_000)).split("\n\n")[0]


def test_rates_are_those_of_the_time_between_two_replies() -> None:
    before = reply(10_000, hits=100, ssd_hits=50, never_seen=10, on_ssd=5)
    after = reply(12_000, hits=160, ssd_hits=60, never_seen=30, on_ssd=10, evicted=15)
    found = rates(before, after)
    assert (found.seconds, found.since_start) == (2.0, False)
    assert (found.lookups, found.dram_hits, found.ssd_hits) == (100, 50, 10)
    assert found.pending == {"on_ssd": 5}
    assert list(found.misses.items()) == [("never_seen", 20), ("evicted", 15)]
    assert found.tokens_reused_per_s == 60 * 64 / 2
    assert found.bytes_loaded_per_s == 60 * (1 << 20) / 2
    assert found.counters_per_s["bytes_saved"] == 30_000
    assert found.promotion_s == 30 / 30, "30 chunks wait, 30 come a second"
    assert found.arena_s == ((90 << 20) - 120_000) / 10_000
    shares = [found.share(part) for part in (found.hits, 5, 35)]
    assert sum(part for part in shares if part is not None) == 1.0
    told = found.as_dict()
    assert (told["hit_rate"], told["hit_rate_dram"], told["hit_rate_ssd"]) == (0.6, 0.5, 0.1)


@pytest.mark.parametrize("before", [None, reply(10_000, hits=9), reply(900, hits=500, boot=b"o" * 16)])
def test_rates_begin_anew_with_a_new_start(before) -> None:
    found = rates(before, reply(1_000, hits=10, evicted=10))
    assert (found.seconds, found.since_start, found.hits, found.lookups) == (1.0, True, 10, 20)


def test_rates_without_anything() -> None:
    found = rates(reply(1_000), reply(1_000))
    assert found.share(found.hits) is None and found.as_dict()["hit_rate"] is None
    assert found.promotion_s is None, "30 chunks wait, none came"


def test_a_frame_has_eighty_columns_and_the_figures_of_both_times() -> None:
    before = reply(10_000, hits=100, never_seen=100)
    after = reply(12_000, hits=160, ssd_hits=30, never_seen=140)
    after.ssd.problems.add(what="no space left " + "x" * 100, remedy="r")
    after.namespaces.add(namespace_id=2, model="long " * 30, lookups=5)
    lines = top.frame(after, before, 2.0)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    row = {line[:22].strip(): line[22:].split() for line in lines if re.match(r" *[a-zA-Z /]+", line[:22])}
    assert row["hit rate"] == ["57.1", "%", "52.5", "%"]
    assert row["from DRAM"] == ["28.6", "%", "42.6", "%"]
    assert row["from SSD"] == ["28.6", "%", "9.8", "%"]
    assert row["never seen"] == ["38.1", "%", "45.9", "%"]
    assert row["reused tokens/s"] == ["1920", "853"]
    assert "30 chunks on the way, ready in about 1.0s" in text
    assert "7 jobs" in text and "! no space left" in text and "all of it in about" in text
    first = top.frame(after, None, 2.0)
    assert "since start     since start" in "\n".join(first)


def test_a_frame_of_a_tenant_has_no_figures_of_others() -> None:
    """Its replies have neither counters of the daemon nor gauges."""
    mine = reply(1_000, hits=10)
    for name in [name for name in mine.counters if "{" not in name]:
        del mine.counters[name]
    mine.gauges.clear()
    text = "\n".join(top.frame(mine, None, 1.0))
    assert "hit rate" in text and "saved KV/s" not in text and "queue" not in text
    cells = watch_row(rates(None, mine), mine)
    assert cells[7:10] == ("-", "-", "-")


@pytest.mark.parametrize("factor", [0, 1, 999, 10**6, 10**12])
def test_a_line_of_a_watch_fits_eighty_columns(factor: int) -> None:
    after = reply(1_000, hits=factor, ssd_hits=factor // 2, evicted=factor)
    after.ssd.state = "read_only"
    cells = watch_row(rates(None, after), after)
    assert len(cells) == len(WATCH_HEAD) == len(WATCH_WIDTHS)
    assert len(stats_command._cells(cells)) == len(stats_command._cells(WATCH_HEAD)) <= 80


def test_numbers_for_people() -> None:
    assert [count(number) for number in (0, 2.5, 3, 1234, 12_345, 12_345_678, 5e9)] == [
        *("0", "2.5", "3", "1234", "12k", "12M", "5000M"),
    ]
    assert [rate(number) for number in (0, 1023, 1536, 200 << 20)] == ["0", "1023", "1.5K", "200M"]
    assert (share(0.831), share(None), share(0.5, unit="")) == ("83.1 %", "-", "50.0")


# ------------------------------------------------------------------------------------------------------ words


def test_values_of_enums_are_words() -> None:
    chunk = stats_pb2.ChunkHistory(outcome=Outcome.PENDING, reason=Reason.ON_SSD, tiers=1 << Tier.SSD)
    told = plain(chunk)
    assert (told["outcome"], told["reason"], told["tiers"]) == ("pending", "on_ssd", ["ssd"])
    listed = plain(stats_pb2.ListSessionsReply(rows=[stats_pb2.SessionRow(reason=Reason.LOST)]))
    assert listed["rows"][0]["reason"] == "lost"
    assert (word(Reason, 0), word(Reason, 999)) == ("none", "999"), "of a newer daemon"
    assert words(Tier, 0b1000_0001) == ["dram", "7"]


def test_every_number_of_an_enum_in_the_contract_is_a_word_in_json() -> None:
    """By their names: whatever field is called as an enum is one."""
    from kvstore.cli.tables import SETS, WORDS
    from kvstore.v1 import admin_pb2

    for module in (stats_pb2, admin_pb2):
        for message in module.DESCRIPTOR.message_types_by_name.values():
            for item in message.fields:
                assert item.enum_type is None, f"{message.name}.{item.name} would be a number in JSON"
                if item.name in WORDS or item.name in SETS:
                    assert item.type in (item.TYPE_UINT32, item.TYPE_STRING), item.name


# ------------------------------------------------------------------------------------------------------ namespaces


def row(number: int, **changes):
    spec = NamespaceSpec(
        **{
            "model": "m",
            "weights_digest": b"w" * 32,
            "layout_fingerprint": "engine/1",
            "chunk_tokens": 64,
            "groups": (GroupSpec("kv", shard_bytes=1 << 20),),
            **changes,
        }
    )
    return stats_pb2.NamespaceStats(
        namespace_id=number, tenant="default", model=spec.model, spec=wire.spec_to_proto(spec)
    )


CHANGES = [
    {"weights_digest": b"v" * 32},
    {"weights_digest": b"w" * 31 + b"x"},
    {"weights_epoch": 3},
    {"adapter_digest": b"a" * 32},
    {"kv_scales_digest": b"k"},
    {"layout_fingerprint": "engine/2"},
    {"layout_fingerprint": "engine/" + "x" * 250},
    {"hash_protocol": "other"},
    {"tensor_parallel": 2},
    {"pipeline_parallel": 2},
    {"context_parallel": 2},
    {"chunk_tokens": 128},
    {"salt": b"s"},
    {"groups": (GroupSpec("kv", shard_bytes=1 << 21),)},
    {"groups": (GroupSpec("kv", shard_bytes=1 << 20, layers=(LayerSlice(0, 0, 10),)),)},
    {"groups": (GroupSpec("kv", shard_bytes=1 << 20, position_rule="none"),)},
]


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: next(iter(changes)))
def test_what_tells_two_namespaces_apart_has_a_column(changes) -> None:
    name = next(iter(changes))
    head, first, second, _, title, *common = differences_text([row(1), row(2, **changes)]).splitlines()
    assert head.split() == ["id", "tenant", "model", name]
    assert first.split("m  ", 1)[1] != second.split("m  ", 1)[1], "the two values read differently"
    assert title == "the same in all of them:"
    assert len(common) == 11, "all the others"


def test_texts_that_are_cut_to_the_same_are_told_apart() -> None:
    long = "engine/" + "x" * 250
    text = differences_text([row(1, layout_fingerprint=long + "y"), row(2, layout_fingerprint=long + "z")])
    values = {line.split()[-1] for line in text.splitlines()[1:3]}
    assert len(values) == 2 and all(value.startswith("#") for value in values), text


def test_one_namespace_or_none() -> None:
    assert differences_text([]) == "no namespace is open"
    assert "its identity:" in differences_text([row(1)])
