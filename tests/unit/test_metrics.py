"""The metric contract: names, labels, sums, bounds; and the HTTP server around it."""

import asyncio
import socket

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.core.events import IndexUsage
from kvstore.errors import Unavailable
from kvstore.server.metrics import CONNECTIONS_MAX, NAMESPACES_MAX, MetricsServer, families, render
from kvstore.tiers.disk_watch import Problem
from kvstore.tiers.ssd import SsdStats

PROCESS = {
    "uptime_seconds": 1.5,
    "attach_streams": 2.0,
    "staging_bytes": 4096.0,
    "directory_bytes": 12288.0,
    "regions": 1.0,
    "region_bytes": 8192.0,
    "tcp_refused": 3.0,
}
BOUND_S = 20.0


def namespace(number: int, **values) -> dict:
    return {
        "namespace_id": number,
        "tenant": "default",
        "model": "m",
        "weights_epoch": 0,
        "chunks": 1,
        "incomplete": 2,
        "resident_bytes": 3,
        "pinned_bytes": 4,
        "sessions": 5,
        "cold_chunks": 7,
        "cold_bytes": 8,
        "worker_chunks": 6,
        "ssd_hits": 2,
        "lookups": 9,
        "hits": 6,
        "segments": 1,
        "by_reason": {"none": 6, "evicted": 2, "being_saved": 1},
        **values,
    }


def pool(number: int, **values) -> dict:
    return {
        "namespace_id": number,
        "slot_bytes": 4096,
        "segments": 1,
        "capacity": 10,
        "free": 4,
        "reserved": 3,
        "ready": 2,
        "quarantined": 1,
        **values,
    }


def statistics(namespaces=(), pools=(), tenants=()) -> dict:
    return {
        "arena": {
            "bytes": 40,
            "ready_bytes": 30,
            "assigned_bytes": 20,
            "retiring_bytes": 10,
            "protection": "sealed",
        },
        "ssd": {"state": "absent"},
        "pools": list(pools),
        "namespaces": list(namespaces),
        "tenants": list(tenants),
        "counters": {"chunks_evicted": 7},
        "gauges": {"leases": 8},
    }


def samples(values: dict, disk=None) -> dict[tuple, float]:
    text = render(families(values, PROCESS, "1.2.3", disk)).decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def tenant(name: str, **values) -> dict:
    sizes = {f"{tier}_{what}": 0 for tier in ("dram", "ssd", "remote") for what in ("bytes", "quota")}
    return {"tenant": name, **sizes, **values}


def test_tenants_have_their_bytes_and_quotas_by_tier():
    found = samples(
        statistics(
            tenants=[tenant("a", dram_bytes=5, dram_quota=9, remote_bytes=2), tenant("b", ssd_bytes=7)]
        )
    )
    assert {
        key[1:]: value for key, value in found.items() if key[0] == "kvstored_tenant_bytes" and value
    } == {
        (("tenant", "a"), ("tier", "dram")): 5,
        (("tenant", "a"), ("tier", "remote")): 2,
        (("tenant", "b"), ("tier", "ssd")): 7,
    }
    quotas = {key[1:]: value for key, value in found.items() if key[0] == "kvstored_tenant_quota_bytes"}
    assert quotas == {(("tenant", "a"), ("tier", "dram")): 9}


def test_series_of_tenants_are_bounded():
    many = [tenant(f"t{number}", dram_bytes=number) for number in range(300)]
    found = [key for key in samples(statistics(tenants=many)) if key[0] == "kvstored_tenant_bytes"]
    assert len(found) == 3 * 100
    assert ("kvstored_tenant_bytes", ("tenant", "t299"), ("tier", "dram")) in found


def test_names_and_values():
    found = samples(statistics([namespace(1)], [pool(1), pool(1, slot_bytes=8192)]))
    assert found == {
        ("kvstored_build_info", ("version", "1.2.3")): 1,
        ("kvstored_uptime_seconds",): 1.5,
        ("kvstored_attach_streams",): 2,
        ("kvstored_staging_bytes",): 4096,
        ("kvstored_directory_bytes",): 12288,
        ("kvstored_regions",): 1,
        ("kvstored_region_bytes",): 8192,
        ("kvstored_tcp_refused",): 3,
        ("kvstored_arena_bytes",): 40,
        ("kvstored_arena_ready_bytes",): 30,
        ("kvstored_arena_assigned_bytes",): 20,
        ("kvstored_arena_retiring_bytes",): 10,
        ("kvstored_slots", ("namespace", "1"), ("state", "free")): 8,
        ("kvstored_slots", ("namespace", "1"), ("state", "reserved")): 6,
        ("kvstored_slots", ("namespace", "1"), ("state", "ready")): 4,
        ("kvstored_slots", ("namespace", "1"), ("state", "quarantined")): 2,
        ("kvstored_namespace_info", ("model", "m"), ("namespace", "1"), ("tenant", "default")): 1,
        ("kvstored_chunks", ("namespace", "1")): 1,
        ("kvstored_chunks_incomplete", ("namespace", "1")): 2,
        ("kvstored_resident_bytes", ("namespace", "1")): 3,
        ("kvstored_pinned_bytes", ("namespace", "1")): 4,
        ("kvstored_sessions", ("namespace", "1")): 5,
        ("kvstored_cold_chunks", ("namespace", "1")): 7,
        ("kvstored_cold_bytes", ("namespace", "1")): 8,
        ("kvstored_worker_chunks", ("namespace", "1")): 6,
        ("kvstored_hits_total", ("tenant", "default"), ("tier", "dram")): 4,
        ("kvstored_hits_total", ("tenant", "default"), ("tier", "ssd")): 2,
        ("kvstored_ssd_state", ("state", "ok")): 0,
        ("kvstored_ssd_state", ("state", "read_only")): 0,
        ("kvstored_ssd_state", ("state", "off")): 0,
        ("kvstored_ssd_state", ("state", "absent")): 1,
        ("kvstored_prefetch_total", ("result", "on_time")): 0,
        ("kvstored_prefetch_total", ("result", "late")): 0,
        ("kvstored_prefetch_total", ("result", "wasted")): 0,
        ("kvstored_promoted_chunks_total", ("how", "ahead")): 0,
        ("kvstored_promoted_chunks_total", ("how", "on_demand")): 0,
        ("kvstored_lookups_total", ("outcome", "hit"), ("reason", "none"), ("tenant", "default")): 6,
        ("kvstored_lookups_total", ("outcome", "miss"), ("reason", "evicted"), ("tenant", "default")): 2,
        (
            "kvstored_lookups_total",
            ("outcome", "pending"),
            ("reason", "being_saved"),
            ("tenant", "default"),
        ): 1,
        ("kvstored_leases",): 8,
        ("kvstored_chunks_evicted_total",): 7,
    }


def test_an_ssd_tier():
    values = statistics()
    values["ssd"] = {
        "state": "read_only",
        "full": True,
        "bytes": 100,
        "slab_bytes": 50,
        "capacity": 10,
        "free": 4,
        "reserved": 3,
        "ready": 2,
        "quarantined": 1,
        "to_store": 6,
        "oldest_not_durable_ms": 1500,
        "cold_chunks": 9,
        "to_forget": 7,
    }
    values["counters"] |= {"prefetch_on_time": 21, "chunks_promoted_ahead": 22, "ssd_bytes_read": 23}
    disk = SsdStats(
        bytes_read=0,
        bytes_written=0,
        records_read=0,
        records_written=0,
        records_corrupt=31,
        io_errors=32,
        no_space=33,
        index_commits=34,
        index_commit_seconds=0.5,
        index=IndexUsage(35, chunks=20, sessions=10, other=5),
        index_bytes=36,
        slab_files=1,
        slab_bytes=50,
        free_bytes=37,
        problems=(Problem("a", "b"), Problem("c", "d")),
    )
    found = samples(values, disk)
    expected = {
        ("kvstored_ssd_state", ("state", "ok")): 0,
        ("kvstored_ssd_state", ("state", "read_only")): 1,
        ("kvstored_ssd_full",): 1,
        ("kvstored_ssd_free_bytes",): 37,
        ("kvstored_ssd_problems",): 2,
        ("kvstored_ssd_bytes",): 100,
        ("kvstored_ssd_slab_bytes",): 50,
        ("kvstored_ssd_slots", ("state", "free")): 4,
        ("kvstored_ssd_slots", ("state", "reserved")): 3,
        ("kvstored_ssd_slots", ("state", "ready")): 2,
        ("kvstored_ssd_slots", ("state", "quarantined")): 1,
        ("kvstored_ssd_chunks_to_store",): 6,
        ("kvstored_ssd_cold_chunks",): 9,
        ("kvstored_ssd_oldest_not_durable_seconds",): 1.5,
        ("kvstored_ssd_errors_total", ("kind", "corrupt")): 31,
        ("kvstored_ssd_errors_total", ("kind", "io")): 32,
        ("kvstored_ssd_errors_total", ("kind", "no_space")): 33,
        ("kvstored_ssd_index_commits_total",): 34,
        ("kvstored_ssd_index_commit_seconds_total",): 0.5,
        ("kvstored_ssd_index_used_bytes",): 35,
        ("kvstored_ssd_index_bytes",): 36,
        ("kvstored_ssd_index_max_bytes",): 35,
        ("kvstored_ssd_index_share_bytes", ("kind", "sessions")): 10,
        ("kvstored_ssd_index_share_bytes", ("kind", "chunks")): 20,
        ("kvstored_ssd_index_share_bytes", ("kind", "other")): 5,
        ("kvstored_ssd_to_forget",): 7,
        ("kvstored_prefetch_total", ("result", "on_time")): 21,
        ("kvstored_promoted_chunks_total", ("how", "ahead")): 22,
        ("kvstored_ssd_bytes_read_total",): 23,
    }
    assert expected.items() <= found.items()
    assert not any("prefetch_on_time" in name or "promoted_ahead" in name for name, *_ in found), "said once"


def test_the_number_of_series_is_bounded_and_no_slot_is_lost():
    many = range(1, NAMESPACES_MAX + 51)
    found = samples(statistics([namespace(n, resident_bytes=n) for n in many], [pool(n) for n in many]))
    names = {dict(labels)["namespace"] for name, *labels in found if name == "kvstored_slots"}
    assert len(names) == NAMESPACES_MAX + 1
    assert "other" in names
    assert str(many[-1]) in names, "the largest have series of their own"
    total = sum(value for (name, *_), value in found.items() if name == "kvstored_slots")
    assert total == 10 * len(many)
    assert found["kvstored_resident_bytes", ("namespace", "other")] == sum(range(1, 51))


def test_peers_text_is_escaped_and_cut():
    evil = 'a"} 1\nforged_metric 1\n' + "x" * 1000
    found = samples(statistics([namespace(1, model=evil)]))
    assert not any("forged_metric" in name for name, *_ in found)
    (labels,) = [dict(labels) for name, *labels in found if name == "kvstored_namespace_info"]
    assert len(labels["model"]) < 120


# ------------------------------------------------------------------------------------------------------------- server


class Server:
    def __init__(self) -> None:
        self.values = statistics([namespace(1)])
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.server = MetricsServer(self.families)

    async def families(self):
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return families(self.values, PROCESS, "1")

    async def ask(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request)
            writer.write_eof()
            return await asyncio.wait_for(reader.read(), BOUND_S)
        finally:
            writer.close()
            await writer.wait_closed()


@pytest.fixture
async def server():
    server = Server()
    await server.server.start("127.0.0.1", server.port)
    yield server
    server.server.close()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"200 OK"),
        (b"GET /metrics?name=x HTTP/1.1\r\n\r\n", b"200 OK"),
        (b"GET / HTTP/1.1\r\n\r\n", b"404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405 Method Not Allowed"),
        (b"nonsense", b"400 Bad Request"),
        (b"\r\n\r\n", b"405 Method Not Allowed"),
        (b"GET /" + b"x" * 10_000 + b" HTTP/1.1\r\n\r\n", b"400 Bad Request"),
    ],
)
async def test_answers(server, request_, status):
    answer = await server.ask(request_)
    assert answer.startswith(b"HTTP/1.1 " + status)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert (b"kvstored_arena_bytes" in body) == status.startswith(b"200")


async def test_no_statistics_is_unavailable(server):
    server.error = Unavailable("the daemon is shutting down")
    assert b"503 Service Unavailable" in await server.ask(b"GET /metrics HTTP/1.1\r\n\r\n")


async def test_scrapes_at_one_time_are_bounded(server):
    server.gate.clear()
    request = b"GET /metrics HTTP/1.1\r\n\r\n"
    waiting = [asyncio.create_task(server.ask(request)) for _ in range(CONNECTIONS_MAX)]
    async with asyncio.timeout(BOUND_S):
        while server.server._connections < CONNECTIONS_MAX:  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(0.001)
    assert b"503 Service Unavailable" in await server.ask(request)
    server.gate.set()
    assert all(b"200 OK" in answer for answer in await asyncio.gather(*waiting))


async def test_a_port_that_is_taken_is_an_error(server):
    with pytest.raises(OSError, match="address already in use"):
        await MetricsServer(server.families).start("127.0.0.1", server.port)


async def test_head_is_answered_as_get_is_without_its_body(server):
    get = await server.ask(b"GET /metrics HTTP/1.1\r\n\r\n")
    head = await server.ask(b"HEAD /metrics HTTP/1.1\r\n\r\n")
    top, _, body = get.partition(b"\r\n\r\n")
    assert (head, body[:1]) == (top + b"\r\n\r\n", b"#")
    missing = await server.ask(b"HEAD /other HTTP/1.1\r\n\r\n")
    assert missing.startswith(b"HTTP/1.1 404 ") and missing.endswith(b"\r\n\r\n")
    other = await server.ask(b"POST /metrics HTTP/1.1\r\n\r\n")
    assert other.startswith(b"HTTP/1.1 405 ") and b"\r\nAllow: GET, HEAD\r\n" in other
