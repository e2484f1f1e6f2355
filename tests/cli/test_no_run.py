"""Commands on folders in which there is no run say so, whatever the folder's mode is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlmesh.cli.main import main
from rlmesh.run_directory.records import read_end

COMMANDS = [
    "doctor {}", "status {}", "logs --job {}", "stop {}", "timeline {}", "samples {}", "replay {} --step 1",
    "evaluate {}", "export {} {}/out",
]  # fmt: skip


@pytest.mark.parametrize("mode", [0o755, 0o1777])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_without_a_run_is_named_as_such(
    command: str, mode: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    folder.chmod(mode)
    assert main(command.replace("{}", str(folder)).split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"there is no run in {folder}. A run directory is the folder that a job writes its files into" in said.err
    assert "chmod" not in said.err


@pytest.mark.parametrize("command", ["doctor {}", "timeline {}", "samples {}", "replay {} --step 1", "evaluate {}"])
def test_a_run_that_others_can_write_to_is_still_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("samples", "timeline"):
        (tmp_path / name).mkdir()
    (tmp_path / "job.json").write_text("{}")
    tmp_path.chmod(0o777)
    assert main(command.replace("{}", str(tmp_path)).split()) == 2
    assert "chmod -R go-w" in capsys.readouterr().err


def test_no_record_is_made_up_for_a_folder_without_a_run(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    assert read_end(tmp_path) is None
    (tmp_path / "end.json").write_text("{}")
    found = read_end(tmp_path)
    assert found is not None
    assert "chmod" in found.trouble
