"""The parts of the programs in benchmarks/ that decide something: what counts as slower, what is in a table, what is
put and read."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    """Programs put their folder on the path; other tests must not find it there."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "") or "").startswith(str(BENCHMARKS)):
            del sys.modules[name]


# --------------------------------------------------------------------------------------------------------- compare


def test_a_commit_that_is_none_is_said_in_gits_words():
    with pytest.raises(SystemExit, match=r"^git describe --always nope: fatal: .*nope"):
        load("compare").described("nope")


def report_of(ms: float, speed: float, **more) -> dict:
    goal = {"name": "get", "value": speed, "direction": ">=", "goal": 1, "unit": "x", "met": True}
    row = {"size": "2M", "calls": 12, "p50_ms": ms, "gb_per_s": speed, "strange": 7.0}
    return {"results": [row], "goals": [goal], **more}


def test_a_row_is_named_by_its_key_and_its_figures_know_their_direction():
    compare = load("compare")
    assert compare.figures(report_of(2.0, 8.0, key=["size"])) == {
        "goal: get": compare.Figure(8.0, True),
        "size=2M: p50_ms": compare.Figure(2.0, False),
        "size=2M: gb_per_s": compare.Figure(8.0, True),
    }
    assert "size=2M calls=12: p50_ms" in compare.figures(report_of(2.0, 8.0)), (
        "without a key: words and numbers"
    )


@pytest.mark.parametrize(
    ("row", "more_is_better"),
    [
        ({"of_memcpy": 1.0}, True),
        ({"shared_tokens_s": 1.0}, True),
        ({"first_token_s": 1.0}, False),
        ({"p50_ms": 1.0}, False),
        ({"server_cpu_s_per_gb": 1.0}, False),
        ({"fastest_over_slowest": 1.0}, False),
        ({"p99_ms": 1.0}, None),
        ({"p50": 1.0, "unit": "µs per key"}, False),
        ({"kvstored": 1.0, "unit": "%", "better": ">="}, True),
        ({"kvstored": 1.0, "unit": "ms", "better": "<="}, False),
    ],
)
def test_what_is_better(row, more_is_better):
    found = load("compare").figures({"results": [row], "goals": [], "key": ["unit", "better"]})
    assert [figure.more_is_better for figure in found.values()] == (
        [] if more_is_better is None else [more_is_better]
    )


@pytest.mark.parametrize(
    "row", [{"tokens_a_day": 1.0}, {"p50": 1.0, "unit": "MB/s"}, {"p50": 1.0, "unit": ""}]
)
def test_what_nobody_said_is_better_is_not_judged_in_silence(row):
    unknown: set[str] = set()
    assert load("compare").figures({"results": [row], "goals": [], "key": ["unit"]}, unknown) == {}
    assert len(unknown) == 1


@pytest.mark.parametrize("report", sorted(BENCHMARKS.glob("results/*.json")), ids=lambda path: path.stem)
def test_of_each_figure_that_is_kept_it_is_known_what_is_better(report):
    unknown: set[str] = set()
    assert load("compare").figures(json.loads(report.read_text()), unknown)
    assert unknown == set()


def test_no_figure_is_counted_two_ways():
    directions = load("directions")
    names = [*directions.MORE, *directions.LESS, *directions.NEITHER]
    assert len(names) == len(set(names))


def test_slower_is_what_all_rounds_say_and_by_more_than_the_threshold():
    compare = load("compare")

    def better(base: list[float], head: list[float], more_is_better: bool):
        sides = [[{"f": compare.Figure(value, more_is_better)} for value in side] for side in (base, head)]
        (row,) = compare.compared(*sides)
        return row

    row = better([10, 10, 10], [12, 13, 11], more_is_better=False)
    assert (row.base, row.head) == (10, 12)
    assert row.better == pytest.approx(10 / 12)
    assert (row.worst, row.best) == pytest.approx((10 / 13, 10 / 11))
    assert row.slower(1.1)
    assert not row.slower(1.25)
    assert not better([10, 10, 10], [12, 13, 9], more_is_better=False).slower(1.1), "one round says otherwise"
    assert better([10, 10, 10], [8, 7, 8], more_is_better=True).slower(1.1)
    assert not better([10, 10, 10], [12, 13, 14], more_is_better=True).slower(1.1)


def test_only_what_every_round_of_both_has_is_compared():
    compare = load("compare")
    one = compare.Figure(1.0, True)
    base = [{"a": one, "b": one, "zero": compare.Figure(0.0, True)}, {"a": one, "b": one, "zero": one}]
    head = [{"a": one, "zero": one}, {"a": one, "b": one, "zero": one}]
    assert [row.name for row in compare.compared(base, head)] == ["a"]


# ------------------------------------------------------------------------------------------------------ data_plane


def rows_of_goals(data_plane) -> list[dict]:
    """Rows that a run with every store would have, all figures 1."""
    figures = dict.fromkeys(("of_memcpy", "sealed_over_it", "gb_per_s", "p50_ms"), 1.0)
    figures |= {"of_one_client": 1.0, "fastest_over_slowest": 1.0}
    return [
        {
            **dict(zip(data_plane.KEY, (part.size, part.batch, part.clients, store, action), strict=True)),
            **figures,
        }
        for part, stores in data_plane.QUICK.items()
        for store in stores
        for action in ("get", "put", *(["write"] if part == data_plane.ONE_MESSAGE else []))
    ]


def test_a_quick_run_has_every_goal():
    data_plane = load("data_plane")
    goals = data_plane.goals_of(rows_of_goals(data_plane))
    peers = sum(len(goals) for goals in data_plane.OVER_PEER_GOALS.values())
    assert len(goals) == len({goal.name for goal in goals}) == len(data_plane.GOALS) + peers + 2 + 1 + 4, (
        "TCP, put by one message, 4 clients"
    )
    assert data_plane.goals_of([]) == []


def test_every_store_takes_turns_with_memcpy():
    data_plane = load("data_plane")
    for clients in data_plane.CLIENTS:
        groups = list(data_plane.groups(list(data_plane.STORES), clients))
        assert all(group[0] == "memcpy" for group in groups)
        assert {name for group in groups for name in group} == set(data_plane.STORES)
    assert list(data_plane.groups(["memcpy", "tcp"], 1)) == [["memcpy", "tcp"]]


def test_what_would_not_fit_in_memory_is_left_out_with_a_reason():
    data_plane = load("data_plane")
    assert "2048 MiB in flight" in data_plane.Part("32M", 64, 1).too_big()
    assert not data_plane.Part("2M", 64, 1).too_big()


def test_another_store_that_fails_is_left_out_and_ours_may_not(capsys):
    data_plane = load("data_plane")

    class Broken:
        def ask(self, do: str, **_) -> None:
            asked.append(do)
            raise data_plane.ClientFailed("it broke")

    for name in ("lmcache", "sealed"):
        asked: list[str] = []
        store = data_plane.Store(name, None, None, [Broken(), Broken()])
        if name == "sealed":
            with pytest.raises(data_plane.ClientFailed):
                data_plane.ask_all(store, "fill")
        else:
            data_plane.ask_all(store, "fill")
            data_plane.ask_all(store, "check")
            assert store.failed
        assert asked == ["fill"]
    assert capsys.readouterr().out == "lmcache: left out, it broke\n"


@pytest.mark.parametrize(
    ("command", "why"), [(["true"], "its client has ended"), (["sleep", "60"], "does not answer within 0 s")]
)
def test_a_client_that_ends_or_stands_still_has_failed(monkeypatch, command, why):
    data_plane = load("data_plane")
    monkeypatch.setattr(data_plane, "ANSWER_S", 0.2 if command == ["sleep", "60"] else 60.0)
    client = object.__new__(data_plane.Client)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        client._process = process
        with pytest.raises(data_plane.ClientFailed, match=why):
            client.answer()
        process.kill()


# ----------------------------------------------------------------------------------------------------------- peers


class Shelf:
    """A store that is a dict, and a client that remembers what it was asked."""

    def __init__(self, shape, *, wrong: bool = False) -> None:
        from peers import ByKey

        self.arrays = ByKey(shape)
        self.kept: dict[str, bytes] = {}
        self.wrong = wrong
        self.check, self.plan = self.arrays.check, self.arrays.plan

    def put(self, plan) -> None:
        for key, value, _ in plan:
            assert key not in self.kept, "keys are fresh"
            self.kept[key] = value.tobytes()

    def get(self, plan) -> None:
        for key, _, out in plan:
            out[:] = bytearray(self.kept[key])
            out[0] ^= self.wrong

    def forget(self, plan) -> None:
        for item in plan:
            del self.kept[item.key]


@pytest.fixture
def shape():
    sys.path.insert(0, str(BENCHMARKS))
    from peers import Shape

    return Shape(
        value_bytes=8192, hot_bytes=5 * 8192, room_bytes=0, source_bytes=64 * 4096, batch_max=2, client="a"
    )


def test_a_driver_reads_all_that_is_hot_and_puts_what_is_new(shape):
    driver = load("peers/client").Driver(Shelf(shape), shape)
    driver.fill(batch=2)
    hot = set(driver.client.kept)
    assert hot == {f"a:{number}" for number in range(4)}, "whole batches"
    read = []
    driver.client.arrays.key = lambda number: read.append(number) or f"a:{number}"
    assert len(driver.turn("get", batch=2, calls=2)["took"]) == 2
    assert read == [0, 1, 2, 3, 0, 1], "one more goes before those that count"
    assert len(driver.turn("put", batch=2, most=3, seconds=9.0)["took"]) == 3
    assert len(driver.client.kept) == len(hot) + 6
    assert driver.turn("get", batch=2, seconds=0.01)["took"]
    driver.tidy()
    assert set(driver.client.kept) == hot
    driver.fill(batch=1)
    assert set(driver.client.kept) == hot, "filled once"
    driver.turn("get", batch=2, most=1)
    assert read[-2:] == [0, 1], "from the first again: what is found by its batch only was put like that"


def test_wrong_bytes_are_found(shape):
    driver = load("peers/client").Driver(Shelf(shape, wrong=True), shape)
    with pytest.raises(AssertionError, match="wrong bytes for a:0"):
        driver.fill(batch=2)


def test_no_two_values_are_equal(shape):
    from peers import ByKey

    values = ByKey(shape)
    assert len({values.value(number).tobytes() for number in range(60)}) == 60


def test_every_peer_has_what_a_peer_must_have():
    data_plane = load("data_plane")
    for module_name, how in data_plane.STORES.values():
        module = importlib.import_module(f"peers.{module_name}")
        assert isinstance(module.missing(), str)
        assert module.GIVES
        assert set(how) <= set(module.start.__code__.co_varnames)
        assert {"plan", "put", "get", "check", "forget", "close"} <= set(dir(module.Client))


def test_a_peer_whose_library_is_absent_is_left_out(tmp_path, monkeypatch, shape):
    mooncake = importlib.import_module("peers.mooncake")
    for name in ("MASTER", "PYTHON"):
        program = tmp_path / name
        program.touch(mode=0o755)
        monkeypatch.setattr(mooncake, name, str(program))
    monkeypatch.setattr(mooncake, "LIBRARY", "libc.so.6")
    assert mooncake.missing() == ""
    monkeypatch.setattr(mooncake, "LIBRARY", "libnobody-has-it.so.1")
    assert mooncake.missing() == "libnobody-has-it.so.1 not installed (make bench-peers)"


# ----------------------------------------------------------------------------------------------------------- pages


def test_the_page_is_made_of_the_reports_that_are_there():
    performance = load("performance")
    found = (BENCHMARKS.parent / "docs/performance.md").read_text()
    assert found == performance.whole_page(), "run `make bench-docs`"
    assert found.startswith(performance.page(performance.reports(BENCHMARKS / "results")))
    assert found.endswith("\n" + (BENCHMARKS / "limits.md").read_text())


def test_a_report_without_words_of_its_own_gets_a_table():
    performance = load("performance")
    goal = {"name": "a", "value": 0.12345, "unit": "ms", "goal": 1, "direction": "<=", "met": True}
    told = {
        "machine": {"cpu": "c", "cores": 2, "kernel": "k", "python": "3", "load": 1.5},
        "commit": "abc",
        "results": [{"what": "get", "ms": 1.23456}, {"what": "put", "count": 12_345, "fine": True}],
        "goals": [goal, goal | {"name": "b", "met": False}],
    }
    page = performance.page([("new_bench", told)])
    assert "## `new_bench`" in page
    assert "commit abc" in page
    assert "| a | 0.123 ms | ≤ 1 | met |\n| b | 0.123 ms | ≤ 1 | **missed** |" in page
    assert "| what | ms |\n| --- | --: |\n| get | 1.23 |\n" in page
    assert "| what | count | fine |\n| --- | --: | --- |\n| put | 12,345 | yes |\n" in page, (
        "another kind of row"
    )


def told_of(rows: list[dict], **more) -> dict:
    machine = {"cpu": "c", "cores": 2, "kernel": "k", "python": "3", "load": 1.5}
    return {"machine": machine, "commit": "abc", "results": rows, "goals": [], **more}


def test_scale_has_a_column_for_each_size_on_the_page():
    def row(chunks: int, what: str, p50: float, **more) -> dict:
        return {"part": "core", "chunks": chunks, "what": what, "p50": p50, "unit": "µs", **more}

    rows = [row(10_000, "match", 0.5, p99=0.75), row(10_000, "longest step (Open)", 3)]
    rows += [
        row(400_000, "match", 0.625, p99=2),
        row(400_000, "longest step (Reserve)", 4),
        row(400_000, "new", 9),
    ]
    page = load("performance").page([("scale", told_of(rows))])
    lines = (
        "|  | 10,000 | 400,000 |",
        "| --- | --: | --: |",
        "| match, µs | 0.5 (0.75) | 0.625 (2) |",
        "| longest step, µs | 3 (Open) | 4 (Reserve) |",
        "| new, µs |  | 9 |",
    )
    assert "\n".join(lines) in page


def test_rows_of_the_data_plane_name_their_run_and_fill_stands_beside_the_puts():
    def row(store: str, action: str, **more) -> dict:
        return {"size": "2M", "batch": 16, "clients": 1, "store": store, "action": action, **more}

    rows = [
        row("sealed", "put", gb_per_s=3.0),
        row("sealed", "fill", gb_per_s=4.0),
        row("sealed", "get", gb_per_s=9.0),
    ]
    key = ["size", "batch", "clients", "store", "action"]
    performance = load("performance")
    page = performance.page([("data_plane", told_of(rows, key=key))])
    assert performance.SEVERAL_RUNS not in page
    assert page.count("| fill | 4 |") == 2, "among the puts in detail, and in the overview"
    page = performance.page(
        [("data_plane", told_of([*rows, row("redis", "put", gb_per_s=1.0, commit="old")], key=key))]
    )
    assert performance.SEVERAL_RUNS in page
    assert re.search(r"^\| redis \| 1 \|.* old \|$", page, re.M)
    assert re.search(r"^\| sealed \| 3 \|.* abc \|$", page, re.M)


def test_a_flame_graph_puts_callees_below_their_callers():
    flame = load("flame")
    boxes, depth = flame.laid_out({("main", "get", "copy"): 3, ("main", "get"): 1, ("main", "put"): 4})
    assert depth == 3
    assert boxes == [
        ("main", 0.0, 1.0, 0),
        ("get", 0.0, 0.5, 1),
        ("copy", 0.0, 0.375, 2),
        ("put", 0.5, 0.5, 1),
    ]


# ----------------------------------------------------------------------------------------------------------- scale


def test_scale_has_a_goal_for_whatever_was_measured():
    scale = load("scale")

    def row(part: str, chunks: int, what: str, p50: float, unit: str = "µs per key") -> dict:
        return {"part": part, "chunks": chunks, "what": what, "p50": p50, "unit": unit}

    assert scale.goals([]) == []
    core = [
        row("core", chunks, "match", us) for chunks, us in ((10_000, 0.4), (100_000, 0.5), (4_000_000, 2.0))
    ]
    core += [row("core", 4_000_000, "acquire + release", 2.4), row("core", 4_000_000, "tick", 100.0, "µs")]
    (lease, growth) = scale.goals(core)
    assert (lease.name, lease.value, lease.goal) == (
        "core, acquire + release with 4,000,000 chunks",
        2.4,
        2.5,
    )
    assert (growth.name, growth.met) == ("core, match: 4,000,000 chunks over 10,000", False)
    assert round(growth.value, 6) == 5
    daemon = [
        row("daemon", 4_000_000, "match of 512", 0.6, "ms"),
        row("daemon", 10_000, "match of 512", 0.5, "ms"),
    ]
    daemon.append(row("daemon", 1_000_000, "start to first hit", 5.5, "s"))
    (match, restart) = scale.goals(daemon)
    assert match.name == "match of 512 keys: round trip with 4,000,000 chunks, p50" and match.met
    assert not restart.met
    (memory,) = scale.goals([row("core", 1_000_000, "memory", 301.0, "bytes per chunk")])
    assert not memory.met


def test_scale_saves_chains_and_finds_them_again():
    scale = load("scale")
    driver = scale.Driver(2_048)
    assert len(scale.fill(driver, 1_024)) == 2
    keys = tuple(scale.chain(3))
    assert driver.ask(scale.ev.Match, driver.namespace, keys).usable == len(keys) == 64
    chunks = driver.store.state.chunks
    index = driver.store.state.namespaces[driver.namespace].index
    assert [chunks.parent[index[key]] for key in keys] == [-1, *(index[key] for key in keys[:-1])]
    assert driver.longest[0] > 0


# ------------------------------------------------------------------------------------------------------------- ssd


def test_shares_of_fio_are_goals_for_large_chunks_alone_and_space_must_not_grow():
    ssd = load("ssd")

    def row(what: str, order: str, by: str, of_fio: float, chunk_bytes: int = 2 << 20) -> dict:
        kind = {"what": what, "io": "direct", "order": order, "chunk_bytes": chunk_bytes, "by": by}
        return {**kind, "of_fio": of_fio}

    rows = [
        row("demote", "sequential", "attnstore", 0.7),
        row("demote", "random", "attnstore", 1.1),
        row("demote", "random", "fio", 1.0),
        row("demote", "random", "attnstore", 0.1, chunk_bytes=4096),
        {"what": "space", "io": "buffered", "chunk_bytes": 4096, "growth": 1.01},
    ]
    demote, space = ssd.goals(rows)
    assert (demote.name, round(demote.value, 3), demote.met) == ("demote, 2 MiB, direct", 0.9, True)
    assert (space.value, space.met) == (1.01, False)
    assert ssd.goals([{**row("promote", "random", "attnstore", 0), "of_fio": 0.84}])[0].met is False
