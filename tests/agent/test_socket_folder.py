"""Files beside the sockets of a node that a cleaner has removed are written again."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlmesh.agent.socket_folder import SocketFolder


def test_an_attempt_that_fails_hinders_no_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "key"
    key.write_text("k")
    tmp_path.chmod(0o700)
    folder = SocketFolder(cast(Any, SimpleNamespace(socket_dir=str(tmp_path), start_master=False, job_path="")))
    key.unlink()

    def refused(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "replace", refused)
        full.setattr(os, "rename", refused)
        folder.look()
    folder.look()
    assert [path.name for path in tmp_path.iterdir()] == ["key"] and key.read_text() == "k"
