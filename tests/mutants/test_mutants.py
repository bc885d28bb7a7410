"""The list of planted bugs fits the sources, and the program that plants them tells caught from survived."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run.py")
spec = importlib.util.spec_from_file_location("mutants_run", RUN)
run = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = run
spec.loader.exec_module(run)


@pytest.mark.parametrize("mutant", run.mutants(), ids=lambda mutant: mutant.name)
def test_each_can_be_planted_and_names_tests_that_exist(mutant):
    assert (run.ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.old != mutant.new
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert (
            name.partition("[")[0] in (run.ROOT / file).read_text() if name else (run.ROOT / file).exists()
        ), test


def test_there_are_enough_of_them_and_no_two_share_a_name():
    names = [mutant.name for mutant in run.mutants()]
    assert len(set(names)) == len(names) >= 20


@pytest.mark.parametrize(
    ("new", "found"),
    [
        ("tokens > event.token_count:", "failed: FAILED tests/unit/core/test_reads.py"),
        ("tokens >= event.token_count + 0:", "passed"),
    ],
)
def test_a_bug_is_caught_and_a_change_that_changes_nothing_survives(tmp_path, new, found):
    run.copy_sources(tmp_path)
    mutant = run.Mutant(
        "match",
        "kvstore/core/requests/reads.py",
        "tokens >= event.token_count:",
        new,
        ("tests/unit/core/test_reads.py",),
    )
    mutant.plant(tmp_path)
    assert run.ask(mutant.tests, tmp_path).startswith(found)


def test_a_list_that_does_not_fit_is_an_error_not_a_catch(tmp_path):
    run.copy_sources(tmp_path)
    with pytest.raises(SystemExit, match="`old` occurs 0 times"):
        run.Mutant("x", "kvstore/core/requests/reads.py", "no such text", "", ()).plant(tmp_path)
    assert run.ask(("tests/no_such_test.py",), tmp_path).startswith("pytest ended with 4")


def test_the_list_can_be_read():
    shown = subprocess.run([sys.executable, RUN, "--list"], capture_output=True, text=True, check=True)
    assert len(shown.stdout.splitlines()) == len(run.mutants())
