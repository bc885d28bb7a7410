"""What the worker program says of options that cannot be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.gpu_worker import worker
from kvstore.gpu_worker.options import parser
from kvstore.gpu_worker.serve.process import truncation_of
from kvstore.gpu_worker.truncation import Truncation

from .conftest import tiny_llama


@pytest.mark.parametrize("there", [True, False], ids=["an empty folder", "no folder"])
def test_a_folder_without_a_model_is_named(
    there: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    if there:
        folder.mkdir()
    with pytest.raises(SystemExit) as ended:
        worker.main(["--model", str(folder)])
    assert ended.value.code == 2
    assert f"--model {folder}: no config.json there" in capsys.readouterr().err


def test_settings_of_truncation_reach_the_engine() -> None:
    given = "--model m --truncate-tokens 256 --truncate-head 4 --truncate-recompute .2 --truncate-deviating"
    options = parser().parse_args([*given.split(), "--truncate-keep-positions"])
    assert truncation_of(options, 512) == Truncation(
        256, head_tokens=4, recompute_share=0.2, deviating=True, keep_positions=True, positions_max=512
    )
    assert truncation_of(parser().parse_args(["--model", "m"]), 512) is None


def test_settings_that_cannot_be_are_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_llama(layers=1).save_pretrained(tmp_path)
    with pytest.raises(SystemExit) as ended:
        worker.main(["--model", str(tmp_path), "--truncate-tokens", "256", "--truncate-to", "2"])
    assert ended.value.code == 2
    assert "kept_share is 2.0: must be above 0 and below 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--truncate-tokens -4", "argument --truncate-tokens: -4: must be at least 0"),
        ("--canary-every -1", "argument --canary-every: -1: must be at least 0"),
        ("--chunk-tokens 0", "argument --chunk-tokens: 0: must be at least 1"),
        ("--port 65536", "argument --port: 65536: must be between 0 and 65535"),
        ("--threads many", "argument --threads: 'many' is no whole number"),
        ("--pool-bytes 1Q", "argument --pool-bytes: '1Q' is no size: a number of bytes, or as 512M or 4G"),
        ("--run /tmp", "unrecognized arguments: --run /tmp"),
    ],
)
def test_an_option_that_cannot_be_is_named_with_what_it_may_be(
    given: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        worker.main(["--model", "m", *given.split()])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--api-keys", "--chat-template"])
@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot be read: No such file or directory"), (b"\xff", "is no text in UTF-8")],
    ids=["no file", "no text"],
)
def test_a_file_that_cannot_be_read_is_named_with_its_option(
    option: str, content: bytes | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    given = tmp_path / "given"
    if content is not None:
        given.write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        worker.main(["--model", str(tmp_path), option, str(given)])
    assert ended.value.code == 2
    assert f"{option} {given}: {said}" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["torch", "uvicorn", "transformers"])
def test_without_its_extra_it_says_what_to_install(module: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    ended = run_without([module], "--model", str(tmp_path))
    assert ended.returncode == 1
    assert ended.stderr == f"the worker needs {module}: pip install 'attnstore[worker]'\n"


@pytest.mark.parametrize(("given", "status"), [(["--help"], 0), (["--port", "x"], 2)], ids=["help", "wrong"])
def test_its_options_are_read_before_what_takes_seconds_to_load(given: list[str], status: int) -> None:
    ended = run_without(["torch", "transformers", "uvicorn", "grpc", "numpy"], *given)
    assert ended.returncode == status, ended.stderr
    assert "usage: worker" in ended.stdout + ended.stderr


def run_without(modules: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    program = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({modules!r}));"
        "runpy.run_module('kvstore.gpu_worker.worker', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-P", "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
