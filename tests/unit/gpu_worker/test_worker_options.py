"""What the worker program says of options that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.gpu_worker import worker
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
    options = worker._parser().parse_args([*given.split(), "--truncate-keep-positions"])
    assert worker.truncation_of(options, 512) == Truncation(
        256, head_tokens=4, recompute_share=0.2, deviating=True, keep_positions=True, positions_max=512
    )
    assert worker.truncation_of(worker._parser().parse_args(["--model", "m"]), 512) is None


def test_settings_that_cannot_be_are_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_llama(layers=1).save_pretrained(tmp_path)
    with pytest.raises(SystemExit) as ended:
        worker.main(["--model", str(tmp_path), "--truncate-tokens", "256", "--truncate-to", "2"])
    assert ended.value.code == 2
    assert "kept_share is 2.0: must be above 0 and below 1" in capsys.readouterr().err
