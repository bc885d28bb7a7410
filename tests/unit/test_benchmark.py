"""The line of JSON with which every benchmark ends."""

import json
import subprocess

import pytest

from kvstore.benchmark import Goal, commit, heading, machine, report
from kvstore.errors import BadRequest


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


def test_the_commit_is_that_of_the_benchmark_and_says_when_it_was_changed(tmp_path):
    bench = tmp_path / "bench.py"
    assert commit(bench) == "unknown"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    bench.write_text("1\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    clean = commit(bench)
    assert clean and "dirty" not in clean
    bench.write_text("2\n")
    assert commit(bench) == f"{clean}-dirty"
    assert f"commit {clean}-dirty" in heading(bench)
