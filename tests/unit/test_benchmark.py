"""The line of JSON with which every benchmark ends."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.errors import BadRequest

HARNESS = Path(__file__).resolve().parents[2] / "benchmarks/harness.py"
spec = importlib.util.spec_from_file_location("harness", HARNESS)
harness = importlib.util.module_from_spec(spec)
sys.modules["harness"] = harness  # dataclasses look it up
spec.loader.exec_module(harness)

Goal, arguments, commit, finish = harness.Goal, harness.arguments, harness.commit, harness.finish
heading, machine, merged, report, slug = (
    harness.heading,
    harness.machine,
    harness.merged,
    harness.report,
    harness.slug,
)


@pytest.mark.parametrize(
    ("value", "direction", "met"),
    [(1.0, ">=", True), (0.9, ">=", False), (1.0, "<=", True), (1.1, "<=", False)],
)
def test_a_goal_is_met_from_its_own_side(value, direction, met):
    goal = Goal("speed", value, "x", 1.0, direction)
    assert goal.met is met
    assert str(goal).endswith("met" if met else "MISSED")


def test_a_goal_has_a_direction():
    with pytest.raises(BadRequest, match=r'direction=lower: must be ">=" or "<="'):
        Goal("speed", 1.0, "x", 1.0, "lower")


def test_the_report_is_one_line_of_json(tmp_path):
    line = report(tmp_path / "bench.py", [{"what": "get"}], [Goal("speed", 1 / 3, "x", 0.3, ">=")])
    assert "\n" not in line
    found = json.loads(line)
    assert list(found) == ["machine", "commit", "results", "goals"]
    assert found["results"] == [{"what": "get"}]
    assert found["goals"] == [
        {"name": "speed", "value": 0.3333, "unit": "x", "goal": 0.3, "direction": ">=", "met": True}
    ]
    assert set(found["machine"]) == set(machine()) == {"cpu", "cores", "kernel", "python", "load"}


def test_a_machine_has_a_name_for_files():
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*-cores", slug())


def test_the_commit_is_that_of_the_benchmark_and_says_when_it_was_changed(tmp_path):
    bench = tmp_path / "bench.py"
    assert commit(bench) == "unknown"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    bench.write_text("1\n")
    kept = tmp_path / "benchmarks" / "results" / "of_another.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    clean = commit(bench)
    assert clean and "dirty" not in clean
    kept.write_text("{1: 2}")
    assert commit(bench) == clean, "the report of the benchmark before"
    bench.write_text("2\n")
    assert commit(bench) == f"{clean}-dirty"
    assert f"commit {clean}-dirty" in heading(bench)


def test_a_file_is_filled_in_several_runs_of_one_commit(tmp_path):
    bench = tmp_path / "bench.py"
    options = arguments("What it measures.")

    def run(rows, goals, *, key=("what",)):
        chosen = options.parse_args(["--out", str(tmp_path / "results/bench.json")])
        assert finish(bench, chosen, rows, goals, key=key) == 0
        return json.loads((tmp_path / "results/bench.json").read_text())

    run([{"what": "get", "ms": 1.0}, {"what": "put", "ms": 2.0}], [Goal("a", 1.0, "ms", 2.0, "<=")])
    found = run(
        [{"what": "put", "ms": 3.0}], [Goal("a", 3.0, "ms", 2.0, "<="), Goal("b", 1.0, "ms", 2.0, "<=")]
    )
    assert found["results"] == [{"what": "get", "ms": 1.0}, {"what": "put", "ms": 3.0}]
    assert [(goal["name"], goal["met"]) for goal in found["goals"]] == [("a", False), ("b", True)]
    assert found["key"] == ["what"]
    found = run([{"what": "put", "ms": 4.0}], [], key=())
    assert found["results"] == [{"what": "put", "ms": 4.0}], "nothing says which rows are the same"
    assert found["goals"] == []


def one_report(*rows, **other) -> dict:
    return json.loads(report("bench.py", rows, [], key=("what",))) | other


def test_what_was_measured_at_another_commit_says_so():
    earlier = one_report({"what": "get", "ms": 1.0}, {"what": "put", "ms": 1.0}, commit="old")
    earlier["goals"] = [{"name": "a", "met": True}]
    later = one_report({"what": "put", "ms": 2.0}, commit="new")
    found = json.loads(merged(json.dumps(earlier), json.dumps(later), ("what",)))
    assert found["commit"] == "new"
    assert found["results"] == [{"commit": "old", "what": "get", "ms": 1.0}, {"what": "put", "ms": 2.0}]
    assert found["goals"] == [{"commit": "old", "name": "a", "met": True}]
    last = one_report({"what": "fill", "ms": 3.0}, commit="newer")
    found = json.loads(merged(json.dumps(found), json.dumps(last), ("what",)))
    assert [row.get("commit") for row in found["results"]] == ["old", "new", None]


def test_figures_of_another_machine_are_not_mixed_in():
    earlier = one_report({"what": "put"}, machine=machine() | {"cores": 999})
    found = merged(json.dumps(earlier), json.dumps(one_report({"what": "get"})), ("what",))
    assert json.loads(found)["results"] == [{"what": "get"}]


def test_the_load_of_the_moment_makes_no_other_machine():
    later = json.loads(report("bench.py", [{"what": "get"}], [], key=("what",)))
    earlier = later | {"machine": later["machine"] | {"load": 99.0}, "results": [{"what": "put"}]}
    found = json.loads(merged(json.dumps(earlier), json.dumps(later), ("what",)))
    assert found["results"] == [{"what": "put"}, {"what": "get"}]
    assert found["machine"] == later["machine"]
