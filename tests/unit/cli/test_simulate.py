"""`kvctl simulate`, `plan` and `advise`: arguments that make no sense are refused before anything is replayed."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

import pytest

from kvstore.cli import advise
from kvstore.cli.kvctl import main
from kvstore.replay.shadow import Shadows, Size
from kvstore.replay.trace import Turn

ROW = '{"timestamp": %d, "input_length": 1024, "output_length": 9, "hash_ids": [1, 2]}\n'


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace"
    path.write_text("".join(ROW % number for number in range(4)))
    return str(path)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    written = capsys.readouterr()
    return int(ended.value.code or 0), written.out + written.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--dram -1", "is not between 0 and"),
        ("--dram 0", "is no bytes at all"),
        ("--dram nan", "is not a size"),
        ("--dram 9999999999T", "is not between 0 and"),
        ("--dram 1M", "holds no chunk"),
        ("--ssd -1", "is not between 0 and"),
        ("--kv-bytes-per-token 0", "is no bytes at all"),
        ("--kv-bytes-per-token 100G", "--kv-bytes-per-token"),
        ("--ssd-rate 0", "is no bytes at all"),
        ("--pcie-rate -1", "is not between 0 and"),
        ("--prefill-tokens-per-s nan", "is not between"),
        ("--prefill-tokens-per-s -5", "is not between"),
        ("--prefill-tokens-per-s inf", "is not between"),
        ("--warm-up 4", "leaves nothing to count"),
        ("--option path=3", "mooncake has no such option"),
        ("--option chunk_tokens=0", "must be a whole number"),
        ("--policy nonsense", "no such policy"),
        ("--policy recompute", "no policy is left"),
        ("--policy belady --engine", "no policy is left"),
        ("--plot /nonexistent/plot.png", "/nonexistent/plot.png"),
        ("--html /nonexistent/page.html", "/nonexistent/page.html"),
    ],
)
def test_simulate_refuses(trace: str, capsys: pytest.CaptureFixture[str], arguments: str, words: str) -> None:
    if "/nonexistent" in arguments:  # told before the trace is read
        pytest.importorskip("matplotlib")
        trace = "/nonexistent/trace"
    status, text = said(capsys, "simulate", trace, "--format", "mooncake", *arguments.split())
    assert status in (1, 2) and words in text and "Traceback" not in text


@pytest.mark.parametrize("text", ["0@nan", "0@inf", "0@1e400", "0@-5", "0@5+nan", "-1@5", "0@5+-1"])
def test_failures_of_nodes_are_at_times_that_come(
    trace: str, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    arguments = ("simulate-fleet", trace, "--format", "mooncake", "--dram", "1G", f"--fail={text}")
    status, written = said(capsys, *arguments)
    assert status == 2 and f"{text} has a number that is not between 0 and" in written


@pytest.mark.parametrize("arguments", ["--target 0", "--target nan", "--policy belady", "--warm-up 9"])
def test_plan_refuses(trace: str, capsys: pytest.CaptureFixture[str], arguments: str) -> None:
    status, text = said(capsys, "plan", trace, "--format", "mooncake", *arguments.split())
    assert status in (1, 2) and arguments.split()[0] in text


def test_outputs_are_tried_and_leave_nothing_behind(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    page = Path(trace).with_name("page.html")
    status, _ = said(capsys, "simulate", trace, "--format", "mooncake", "--warm-up", "4", "--html", str(page))
    assert status == 1 and not page.exists()
    status, _ = said(capsys, "simulate", trace, "--format", "mooncake", "--dram", "1G", "--html", str(page))
    assert status == 0 and "<table>" in page.read_text()


def test_advise_refuses_a_port_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys, "advise", "--metrics-port", "99999")
    assert status == 2 and "is not between 0 and 65535" in text


@pytest.mark.parametrize("few", [True, False])
def test_advise_says_when_it_saw_little(
    few: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shadows = Shadows([Size(64 << 20, 0, "lru")], chunk_tokens=4, chunk_bytes=1 << 20, share=1.0)
    for number in range(3):
        shadows.feed(Turn(number, [number], 4, session=number))
    monkeypatch.setattr(advise, "TURNS_MIN", 4 if few else 3)
    advise._tell(advise.Looked(shadows, elsewhere=7), argparse.Namespace(json=False), 64 << 20, 0)
    text = capsys.readouterr().out
    assert (
        "3 turns of a sample of 100.0 % of the sessions; 7 lookups in other namespaces are left out" in text
    )
    assert ("larger --share" in text) is few


def test_advise_ends_with_all_that_is_recorded_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many blocks of it, and a line that is not whole."""
    monkeypatch.setattr(advise, "BLOCK_BYTES", 64)
    path = tmp_path / "trace"
    path.write_text("".join(f'{{"t": {number}}}\n' for number in range(100)) + '{"t"')
    ended = threading.Event()
    ended.set()
    with path.open("rb") as file:
        assert [line["t"] for line in advise._lines(file, 600, ended)] == list(range(100))
