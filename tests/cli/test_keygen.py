"""``rlmesh keygen``, and jobs under a key of the user's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlmesh.cli.main import main
from rlmesh.runtime.connections.security import KEY_VARIABLE, load_key_file

SCRIPT = """
from rlmesh.driver.options import effective
key = effective(None).key
print("key", key.hex() if key else None)
"""


def test_a_key_is_made_and_never_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.key"
    assert main(["keygen", str(path)]) == 0
    said = capsys.readouterr().out
    assert said == f"wrote {path}; use it by --key-file {path}\n"
    key = load_key_file(path)
    assert key.hex() not in said
    assert main(["keygen", str(path)]) == 2
    assert "rlmesh keygen: " in (error := capsys.readouterr().err) and "exists already" in error
    assert load_key_file(path) == key


def test_launch_takes_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    (tmp_path / "job.py").write_text(SCRIPT)
    job, path = str(tmp_path / "job.py"), tmp_path / "key"
    main(["keygen", str(path)])
    capsys.readouterr()
    assert main(["launch", job]) == 0
    assert capsys.readouterr().out == "key None\n"
    told = f"key {load_key_file(path).hex()}\n"
    assert main(["launch", "--key-file", str(path), job]) == 0
    assert capsys.readouterr().out == told
    monkeypatch.setenv(KEY_VARIABLE, str(path))
    assert main(["launch", job]) == 0
    assert capsys.readouterr().out == told
    os.chmod(path, 0o644)
    assert main(["launch", job]) == 2
    assert "rlmesh launch: the key file" in (error := capsys.readouterr().err) and "chmod 600" in error
