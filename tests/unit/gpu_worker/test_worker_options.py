"""What the worker program says of options that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.gpu_worker import worker


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
