"""The demo's verdict and its texts. That it runs: tests/e2e/test_demo.py."""

from __future__ import annotations

import fcntl
import importlib.util
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def demo() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "demo.py")
    assert spec is not None and spec.loader is not None
    before = list(sys.path), set(sys.modules)
    module = sys.modules["demo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before[0]
    for name in ("demo", "lookahead", "models", "processes", "conversations"):
        sys.modules.pop(name, None)


def turns(demo: ModuleType, *answers: tuple[list[int], list[float]], reused: int = 50) -> list[Any]:
    return [
        demo.Turn(
            "a",
            number,
            {
                "tokens": tokens,
                "gaps": gaps,
                "ttft_s": 1.0,
                "prompt_tokens": 100,
                "reused_tokens": reused,
                "loaded_bytes": 1,
            },
        )
        for number, (tokens, gaps) in enumerate(answers, start=1)
    ]


CLEAR = [5.0, 5.0, 5.0]
UNDECIDED = [5.0, 0.0009, 5.0]


@pytest.mark.parametrize(
    ("recomputed", "stored", "differences", "swapped"),
    [
        (([1, 2, 3], CLEAR), ([1, 2, 3], CLEAR), 0, 0),
        (([1, 2, 3], CLEAR), ([1, 9, 3], CLEAR), 1, 0),
        (([1, 2, 3], UNDECIDED), ([1, 9, 8], CLEAR), 0, 1),  # what follows a swapped token is another text
        (([1, 2, 3], UNDECIDED), ([9, 2, 3], CLEAR), 1, 0),  # the gap counts where they differ first
        (([1, 2, 3], CLEAR), ([1, 2, 3], UNDECIDED), 0, 0),
        (([1, 2, 3], CLEAR), ([1, 2], CLEAR), 1, 0),
        (([1, 2], CLEAR[:2]), ([1, 2, 3], CLEAR), 1, 0),
    ],
)
def test_a_token_may_differ_only_where_recomputation_was_undecided(
    demo: ModuleType, recomputed: Any, stored: Any, differences: int, swapped: int
) -> None:
    found = demo.compare(turns(demo, recomputed), turns(demo, stored))
    assert (len(found[0]), len(found[1])) == (differences, swapped)


def test_the_verdict_needs_equal_tokens_and_reuse(
    demo: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    good = turns(demo, ([1], [5.0]), ([1], [5.0]))
    assert demo.report(good, good, demo.Figures())
    assert "DIFFERENT" not in capsys.readouterr().out
    for wrong in (turns(demo, ([1], [5.0]), ([2], [5.0])), turns(demo, ([1], [5.0]), ([1], [5.0]), reused=0)):
        assert not demo.report(good, wrong, demo.Figures())
    assert "DIFFERENT ANSWERS: 1" in capsys.readouterr().out


@pytest.mark.parametrize("told", [[[1], [2]], [[1], [3]]])
def test_hints_must_not_change_an_answer(
    demo: ModuleType, told: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    def results(tokens: list[list[int]], ttft_s: float) -> list[dict[str, Any]]:
        return [
            {"tokens": each, "ttft_s": ttft_s, "reused_tokens": 64, "loaded_bytes": 1 << 20}
            for each in tokens
        ]

    same = told == [[1], [2]]
    assert demo.lookahead._report(results([[1], [2]], 1.0), results(told, 0.5)) is same
    shown = capsys.readouterr().out
    assert ("DIFFERENT" in shown) is not same
    assert "0.500 s =  0.500" in shown and "met" in shown


def test_the_95th_percentile_is_a_value_that_occurred(demo: ModuleType) -> None:
    assert demo.p95([3.0]) == 3.0
    assert demo.p95([float(n) for n in range(1, 21)]) == 19.0
    assert demo.p95([float(n) for n in range(1, 101)]) == 95.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dram=lots"], "dram_bytes=lots: is not a size"),
        (["--dram=40M"], "dram_bytes=41943040: must be a whole number of segments of 33554432 bytes"),
        (["--threads=0"], "--threads: 0 is not a whole number above 0"),
        (["--conversations=-1"], "--conversations: -1 is not a whole number above 0"),
        (["--answer-tokens=some"], "--answer-tokens: some is not a whole number above 0"),
    ],
)
def test_what_cannot_work_is_said_before_anything_runs(
    demo: ModuleType,
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        demo._parse()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_two_that_want_the_model_make_it_once(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = sys.modules["models"]
    asks, made = threading.Event(), []
    lock = fcntl.flock

    def flock(*arguments: Any) -> None:
        asks.set()
        lock(*arguments)

    monkeypatch.setattr(models, "fcntl", SimpleNamespace(flock=flock, LOCK_EX=fcntl.LOCK_EX))
    monkeypatch.setattr(models.subprocess, "run", lambda command, **_: made.append(command))
    model = tmp_path / "model"
    with open(tmp_path / "lock", "w") as other:
        lock(other, fcntl.LOCK_EX)
        asking = threading.Thread(target=models._make, args=("random", model), daemon=True)
        asking.start()
        assert asks.wait(10)
        model.mkdir()  # the other has finished
    asking.join(10)
    assert not asking.is_alive() and made == []
    models._make("random", tmp_path / "another")
    assert len(made) == 1 and (tmp_path / "another").is_dir()


def test_conversations_are_as_many_and_as_long_as_promised(demo: ModuleType) -> None:
    assert len(demo.CONVERSATIONS) >= 6
    assert all(len(messages) >= 4 for messages in demo.CONVERSATIONS.values())
    words = [len(" ".join(messages).split()) for messages in demo.CONVERSATIONS.values()]
    assert min(words) > 550  # with system prompt, marks and answers: 1,000 tokens and more


def test_a_reply_continues_the_tokens_it_answers(demo: ModuleType) -> None:
    """Histories must grow at their end only: nothing of a conversation may be tokenised again."""
    tokenizer = sys.modules["models"].ByteTokenizer()
    model = demo.DemoModel("bytes", Path(), tokenizer, end=tokenizer.END)
    opening = model.opening("be brief", "hello")
    assert opening[0] == tokenizer.START
    ended = model.reply([104, 105, tokenizer.END], "and?")
    cut = model.reply([104, 105], "and?")
    assert ended == cut
    assert ended.count(tokenizer.START) == ended.count(tokenizer.END) == 2
    assert tokenizer.decode([104, 105, 300]) == "hi"


def test_a_daemon_that_does_not_start_leaves_nothing_behind(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = sys.modules["processes"]
    monkeypatch.setattr(processes, "CACHE", tmp_path)
    monkeypatch.setattr(processes.tempfile, "tempdir", str(tmp_path))
    earlier = tmp_path / "ssd of an earlier one"
    earlier.mkdir()
    with pytest.raises(SystemExit, match="kvstored ended with status 2"):
        demo.Daemon({"dram_bytes": 1}, ssd=earlier).__enter__()
    assert list(tmp_path.iterdir()) == [earlier]
